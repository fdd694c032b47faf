"""Torch's plain attention with somebody's weights by their names: what is right where what runs cannot be read."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.contracts.projecting import OWN, any_number
from equivalence_tests.checker.equivalent.biases import Bias, Visible
from equivalence_tests.checker.equivalent.expressions import Attended, Called, Expression, Given, Made
from equivalence_tests.checker.equivalent.operands import Projection
from equivalence_tests.checker.equivalent.parameters import Layer, Parameters
from equivalence_tests.checker.equivalent.program import Output, Program

MADE_OF = {  # the roles of arguments that each is made of, the likeliest first
    "query": ("query", "input"),
    "key": ("key", "memory", "input", "query"),
    "value": ("value", "memory", "key", "input", "query"),
}
KEYS_AND_VALUES = re.compile(r"kv|key_?value", re.I)


@dataclass(frozen=True)
class Plain:
    """A program by names alone."""

    program: Program
    output: str  # the path of its output projection; "" where nothing is projected
    used: frozenset[str]  # the parameters that take part in it


def argument_of(role: str, arguments: Mapping[str, str]) -> str:
    """Name the argument that queries, keys or values are made of; "" where none is known."""
    return next((arguments[one] for one in MADE_OF[role] if one in arguments), "")


def plain_programs(parameters: Parameters, arguments: Mapping[str, str], heads: int, features: int) -> Iterator[Plain]:
    """List the plain attentions that a module or function may be intended as: causal or not, alone or in a sublayer.

    The arguments are named by their roles; a function, without parameters, takes queries, keys and values.
    """
    given = {role: argument_of(role, arguments) for role in MADE_OF}
    parts = _parts(parameters) if parameters.named else (None, "")
    if parts is None or not all(given.values()):
        return
    rows, out = parts
    rows = rows and {role: _of_all_heads(one, heads, features) for role, one in rows.items()}
    sizes = [features] * 3 if rows is None else [len(weight) for weight, _ in rows.values()]
    width = sizes[0] // heads
    if width * heads != sizes[0] or any(size % width or heads % (size // width) for size in sizes):
        return
    for before, around, norms in _sublayers(parameters, Given(given["query"]), features):
        tokens = {role: Called(before, (Given(name),)) if before else Given(name) for role, name in given.items()}
        three = [_projection(None if rows is None else rows[role], tokens[role], heads, width) for role in MADE_OF]
        output = _output(parameters, out, sizes[0], around)
        for visible in (Visible(), Visible(0), Visible(0, from_end=True)):
            program = Program(three[0], three[1], three[2], width**-0.5, Bias(visible), output)
            yield Plain(program, out, frozenset({*program.projections(parameters), *norms}))


def _parts(parameters: Parameters) -> tuple[dict[str, Layer], str] | None:
    """Find the weights of queries, keys and values by their names or sizes, and the path of the output projection."""
    matrices = _matrices(parameters)
    named = {role: [path for path in matrices if said.search(path)] for role, said in OWN.items()}
    alone = {role: paths[0] for role, paths in named.items() if len(paths) == 1}
    rest = [path for path in matrices if path not in alone.values()]
    rows = {role: matrices[path] for role, path in alone.items()}
    missing = [role for role in OWN if role not in rows]
    if len({*alone.values()}) < len(alone):
        return None
    if missing:
        packed = next((path for path in rest if len(matrices[path][0]) % len(missing) == 0 and _packs(path)), "")
        packed = packed or (rest[0] if len(missing) == 3 and len(rest) in (1, 2) else "")
        if not packed or len(missing) == 1 or len(matrices[packed][0]) % len(missing):
            return None
        weight, bias = matrices[packed]
        pieces = map(Layer, weight.chunk(len(missing)), bias.chunk(len(missing)))
        rows |= dict(zip(missing, pieces, strict=True))
        rest.remove(packed)
    if len(rest) > 1 or (rest and matrices[rest[0]][0].size(1) % len(rows["query"][0])):
        return None
    return rows, next(iter(rest), "")


def _matrices(parameters: Parameters) -> dict[str, Layer]:
    """List the weights and biases of linear layers by path, and what a list holds for each head, as one matrix."""
    lists, inside = dict[str, list[Tensor]](), [*parameters.module.named_modules()]
    found = {path: parameters.layer(f"{path}.weight") for path, child in inside if path and _is_linear(child)}
    for path, child in inside:
        for name, x in child.named_parameters(prefix=path) if isinstance(child, nn.ParameterList) else ():
            if x.dim() == 2:
                lists.setdefault(any_number(name), []).append(parameters.places(name).mT)  # x @ weight
    alike = {name: torch.cat(every) for name, every in lists.items() if len({x.size(1) for x in every}) == 1}
    return found | {name: Layer(weight, torch.full(weight.shape[:1], -1)) for name, weight in alike.items()}


def _is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer, traced or not."""
    named = type(module) is nn.Linear or getattr(module, "original_name", "") == "Linear"
    return named and isinstance(module.weight, Tensor)


def _packs(path: str) -> bool:
    return bool(KEYS_AND_VALUES.search(path.rpartition(".")[2])) or "qkv" in path.lower()


def _of_all_heads(rows: Layer, heads: int, features: int) -> Layer:
    """Give what projects the features of every head alike as rows for all of them; others as they are."""
    weight, bias = rows
    width = features // heads
    if heads == 1 or weight.shape != (width, width):
        return rows
    whole, every = torch.full((heads, width, heads, width), -1), torch.arange(heads)
    whole[every, :, every] = weight
    return Layer(whole.flatten(2).flatten(0, 1), bias.repeat(heads))


def _projection(rows: Layer | None, tokens: Expression, heads: int, width: int) -> Projection:
    """Cut the rows into heads; each of fewer heads serves several queries. Without rows, cut the tokens."""
    if rows is None:
        return Projection(torch.arange(heads * width).view(heads, width), None, tokens=tokens)
    shared = heads * width // len(rows[0])
    weight, bias = (x.unflatten(0, (-1, width)).repeat_interleave(shared, 0) for x in rows)
    return Projection(weight, bias, tokens=tokens)


def _output(parameters: Parameters, path: str, width: int, around: Expression) -> Output:
    if not path:
        return Output(torch.arange(width), None, around=around)
    return Output(*parameters.layer(f"{path}.weight"), around=around)


def _sublayers(parameters: Parameters, first: Given, features: int) -> Iterator[tuple[str, Expression, set[str]]]:
    """What stands around an attention: nothing; or, where the module has one norm of tokens, that and a residual."""
    norms = [
        path
        for path, x in parameters.module.named_modules()
        if isinstance(x, nn.LayerNorm | nn.RMSNorm) and tuple(x.normalized_shape) == (features,)
    ]
    if len(norms) != 1:
        yield "", Attended(), set()
        return
    named = parameters.inside(norms[0])
    yield "", Called(norms[0], (Made("sum", (Attended(), first)),)), named
    yield norms[0], Made("sum", (Attended(), first)), named
