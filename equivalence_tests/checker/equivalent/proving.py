"""No accusation without proof: what counts against the code is shown by numbers.

What is right where the code cannot be read is torch's plain attention, with somebody's weights by their names.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.contracts.projecting import OWN, any_number
from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.engine.taking_part import unused_parameters
from equivalence_tests.checker.engine.watching import Operation, Patch, Recorder
from equivalence_tests.checker.equivalent.biases import Bias, Visible
from equivalence_tests.checker.equivalent.comparing import difference_of, kept_parameters, redraw
from equivalence_tests.checker.equivalent.expressions import Attended, Called, Expression, Given, Made, Values
from equivalence_tests.checker.equivalent.operands import Projection
from equivalence_tests.checker.equivalent.parameters import Layer, Parameters
from equivalence_tests.checker.equivalent.program import Output, Program
from equivalence_tests.checker.equivalent.watched import Layout
from equivalence_tests.checker.reporting.findings import ROUNDING, Proof

MADE_OF = {  # the roles of arguments that each is made of, the likeliest first
    "query": ("query", "input"),
    "key": ("key", "memory", "input", "query"),
    "value": ("value", "memory", "key", "input", "query"),
}
KEYS_AND_VALUES = re.compile(r"kv|key_?value", re.I)
INPUTS = 20
NOT_ITS_SIZE = (RuntimeError, IndexError)  # a program by names alone may be of other sizes


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


def proven(
    module: nn.Module | None, gaps: Callable[[int], tuple[float, float]], rounding: float = ROUNDING
) -> Proof | None:
    """Give the greatest differences with something put right, and without, on fresh inputs and other parameters.

    Both are given for the inputs of a seed; None where they prove nothing, or the program is of other sizes.
    """
    with kept_parameters(module), torch.no_grad():
        redraw(module, 9)
        try:
            errors, without = map(max, zip(*map(gaps, range(1, INPUTS + 1)), strict=True))
        except NOT_ITS_SIZE:
            return None
    proof = Proof(errors, without, INPUTS, max(rounding, ROUNDING))
    return proof if proof.holds else None


@dataclass
class Proving:
    """Puts torch's averaged values into the user's run, and lets the user's own code go on."""

    situation: Situation

    @cached_property
    def layout(self) -> Layout:
        """Of its arguments and its output."""
        return Layout.of(self.situation.trial)

    @cached_property
    def parameters(self) -> Parameters:
        """Of the user's module."""
        return Parameters.of(self.situation.subject.module)

    @property
    def rotates(self) -> bool:
        """Whether queries or keys are rotated by something, which no plain attention does."""
        judgement = self.situation.judgement
        return judgement is not None and any(one.rotated for one in judgement.first_operands)

    def plain(self, counts: Sequence[int] = ()) -> Iterator[tuple[float, Plain]]:
        """List the plain attentions that the code may be intended to be, each with how far the code is from it.

        Its heads may be so many; () for as many as it was built with.
        """
        situation, sizes = self.situation, self.situation.trial.sizes
        flat = situation.subject.module is None and "h" not in situation.plan.layout
        for heads in [1] if flat else counts or [sizes.num_heads]:
            for one in plain_programs(self.parameters, situation.arguments, heads, sizes.embed_dim):
                yield self.difference(one.program), one

    def proof(self, plain: Plain, blamed: Operation | None) -> Proof | None:
        """Show that torch's values make the user's code return torch's numbers, and that it does not without them.

        Where the operation that is blamed stands behind the attention, what comes back is put in there. None where
        something takes part in the user's code that the program does not have: nobody knows then what is right.
        """
        place, end = self._around(plain.output)
        late = blamed is not None and blamed.index >= end
        place = blamed if late else place
        if place is None or not self._accounts_for_all(plain):
            return None
        module = self.situation.subject.module
        return proven(module, lambda seed: self._gaps(plain.program, seed, place, late))

    def _gaps(self, program: Program, seed: int, place: Operation, late: bool) -> tuple[float, float]:
        """How far the user's code is from a program with the right values put in, and without."""
        values = self.values(seed)
        want = program(values)
        right = want if late else program.merged(values)
        patched = self._run(seed, {place.index: _put(right, self.layout)})
        return difference_of(want, patched), difference_of(want, self._run(seed, {}))

    def difference(self, program: Program) -> float:
        """How far the user's code is from a program, relative to the largest value, with parameters drawn anew."""
        module = self.situation.subject.module
        with kept_parameters(module), torch.no_grad():
            redraw(module, 9)
            try:
                return difference_of(program(self.values(1)), self._run(1, {}))
            except NOT_ITS_SIZE:
                return math.inf

    def values(self, seed: int) -> Values:
        """Give what a program computes from, with fresh inputs."""
        _, _, copies = self.situation.call.fresh(seed)
        return self.layout.values(self.situation.call, copies)

    def _run(self, seed: int, patches: Mapping[int, Patch]) -> Tensor:
        run = self.situation.call.run(patches, seed=seed, read=False)
        return self.layout.tokens(run.output).double()

    def _around(self, path: str) -> tuple[Operation | None, int]:
        """What gives the averaged values to the output projection, or back, and the first operation behind that."""
        run = self.situation.found.run
        calls = [call for call in run.recorder.calls if call.path == path and path]
        taken, before, end = self.layout.output(run.output), len(run.operations), len(run.operations)
        if calls:
            taken, before, end = calls[0].inputs[0], calls[0].first, calls[0].end
        made = (op for op in reversed(run.operations[:before]) if any(slot.tensor is taken for slot in op.outputs))
        return next(made, None) if len(calls) == bool(path) else None, end

    def _accounts_for_all(self, plain: Plain) -> bool:
        """Whether all that takes part in the user's code is in the program: parameters, and other arguments."""
        situation = self.situation
        learnt = self.parameters.named.keys() - {*unused_parameters(situation.found.run, situation.subject.module)}
        others = [x for _, x in situation.call.tensors if x.is_floating_point() and id(x) not in situation.call.seeds]
        return learnt <= plain.used and not others


def _put(right: Tensor, layout: Layout) -> Patch:
    """A patch that gives numbers, (b, q, features), in the layout of what they stand for."""

    def patch(recorder: Recorder, operation: Operation) -> Tensor:
        stand_in = operation.outputs[0].value
        if stand_in.numel() != right.numel():
            return stand_in
        if stand_in.dim() == 2:
            return right.reshape(stand_in.shape)
        places = layout.outward(torch.arange(stand_in.numel(), dtype=torch.float64).view(stand_in.shape)).long()
        flat = torch.empty(stand_in.numel(), dtype=right.dtype)
        flat[places.reshape(-1)] = right.reshape(-1)
        return flat.view(stand_in.shape)

    return patch
