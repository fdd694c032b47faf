"""Find which parameter is which projection, and how fused ones are laid out.

Names decide where they say something, the tensors that meet a parameter where they do not, and every order that is
left is tried.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equivalence_tests.checker.reference import Projection, Projections, key_heads

__all__ = ["Leaf", "ProjectionReading", "leaves_of", "projection_readings"]

MOST_TRIED = 2000
ROLE_LETTERS = {"q": "query", "k": "key", "v": "value", "o": "output"}
WORDS = (
    (r"qkv|kqv|c_attn|in_proj|query_key_value|to_qkv|qvk|vkq|kvq", "qkv"),
    (r"(^|_)kv($|_)|key_value|to_kv", "kv"),
    (r"(^|_)(qk|kq)($|_)|query_key|to_qk", "qk"),
    (
        r"quer(y|ies)|(^|[_.])(w_?|fc_?|lin_?|linear_?|to_?|proj_?|in_?|x_?)*q(_?(proj|linear|lin|layer|w|net|dense|fc|mat|s))*($|[_.])",
        "query",
    ),
    (
        r"keys?($|[^a-z])|(^|[_.])(w_?|fc_?|lin_?|linear_?|to_?|proj_?|in_?|x_?)*k(_?(proj|linear|lin|layer|w|net|dense|fc|mat|s))*($|[_.])",
        "key",
    ),
    (
        r"val(ue)?s?($|[^a-z])|(^|[_.])(w_?|fc_?|lin_?|linear_?|to_?|proj_?|in_?|x_?)*v(_?(proj|linear|lin|layer|w|net|dense|fc|mat|s))*($|[_.])",
        "value",
    ),
    (
        r"out|unify|(^|[_.])(w_?|fc_?|lin_?|linear_?)*o(_?(proj|linear|lin|layer|w|fc))*($|[_.])|(^|[_.])(c_)?proj($|[_.])|combine|concat|^fc$|final|dense$",
        "output",
    ),
)


@dataclass(frozen=True)
class Leaf:
    """A matrix of the user's module: one parameter, or the small ones of all heads stacked.

    Args:
        name: How the user calls it.
        weights: Paths of the parameters.
        biases: Paths of their biases; empty if there are none.
        transposed: Whether the parameter is stored (in, out).
        role: What the name says: query, key, value, output, qkv, kv, qk, or "".
        shared_heads: How many heads use this one head-sized matrix; 1 for a matrix of full width.
    """

    name: str
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    transposed: bool
    role: str
    shared_heads: int = 1

    def read(self, module: nn.Module) -> Projection:
        """Give the matrix as (out, in), with its bias, in float64 whatever the module computes in."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        weight = _stacked([self._matrix(parameters[name].detach().double()) for name in self.weights])
        bias = (
            torch.cat([parameters[name].detach().double().flatten() for name in self.biases]) if self.biases else None
        )
        if self.shared_heads > 1:
            weight = torch.block_diag(*[weight] * self.shared_heads)
            bias = None if bias is None else bias.repeat(self.shared_heads)
        return Projection(weight, bias)

    def _matrix(self, weight: Tensor) -> Tensor:
        """(out, in); of an output projection kept as (h, d, e) or (h, e, d) the heads are what goes in."""
        if self.role == "output" and weight.dim() == 3 and weight.size(-1) > 1:
            return (weight if self.transposed else weight.transpose(1, 2)).flatten(0, 1).t()
        return _as_matrix(weight, self.transposed)


@dataclass(frozen=True)
class ProjectionReading:
    """One way to read the four projections out of a module.

    Args:
        leaves: The input projections in the order in which ``layout`` names them: three, two or one.
        output: The output projection.
        layout: "separate", "kv", "qk" (the value first, then what is packed) or "qkv" plus the order of the axes of
            the packed rows: "3hd", "h3d", "hd3".
        order: Which role the first, second and third part plays, "qkv" as a rule; for separate leaves a letter each,
            "-" for a role without a matrix.
        by_name: Whether names, and not trying, told the roles.
        norms: Paths of the norms of queries and keys.
    """

    leaves: tuple[Leaf, ...]
    output: Leaf | None
    layout: str = "separate"
    order: str = "qkv"
    by_name: bool = True
    norms: tuple[str, str] | None = None

    def read(self, module: nn.Module, num_heads: int) -> Projections:
        """Give the four projections with the weights that the module holds now."""
        parts = self._parts(module, num_heads)
        roles = {letter: parts[letter] for letter in "qkv"}
        norms = (module.get_submodule(self.norms[0]), module.get_submodule(self.norms[1])) if self.norms else None
        return Projections(roles["q"], roles["k"], roles["v"], self.output.read(module) if self.output else None, norms)

    def _parts(self, module: nn.Module, num_heads: int) -> dict[str, Projection]:
        read = [leaf.read(module) for leaf in self.leaves]
        nothing = Projection()
        if self.layout == "separate":
            index = iter(read)
            return dict.fromkeys("qkv", nothing) | {letter: next(index) for letter in self.order if letter != "-"}
        if self.layout.startswith("kv"):
            rows = [len(x.weight) for x in read if x.weight is not None]
            halves = _unpack(read[1], self.layout[2:], key_heads(rows[0], rows[1] // 2, num_heads), 2)
            return {"q": read[0]} | dict(zip(self.order[1:], halves, strict=True))
        if not self.layout.startswith("qkv"):
            halves = _unpack(read[1], self.layout[2:], num_heads, 2)
            return {"v": read[0]} | dict(zip(self.order[:2], halves, strict=True))
        if self.layout == "qkv3hd" and self.output is not None:
            return _cut_by_role(read[0], self.order, self.output.read(module))
        return dict(zip(self.order, _unpack(read[0], self.layout[3:], num_heads, 3), strict=True))


def leaves_of(module: nn.Module, num_heads: int, embed_dim: int) -> list[Leaf]:
    """List the matrices of a module that could be projections.

    Args:
        module: The user's module.
        num_heads: Number of heads.
        embed_dim: Width of the tokens.

    Returns:
        Every Linear-like pair of weight and bias; head-sized matrices of equal names are stacked.
    """
    named = module.named_parameters(remove_duplicate=False)
    singles = [_leaf(module, name, p) for name, p in named if _is_matrix(p) or _is_pointwise(module, name)]
    groups: dict[str, list[Leaf]] = {}
    for leaf in singles:
        groups.setdefault(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", leaf.name), []).append(leaf)
    stacked: list[Leaf] = []
    for name, group in groups.items():
        stacked += _stack(module, name, group, num_heads, embed_dim)
    return [_shared(module, leaf, num_heads, embed_dim) for leaf in stacked]


def projection_readings(
    leaves: list[Leaf], fed_by_inputs: set[str], module: nn.Module, num_heads: int
) -> Iterator[ProjectionReading]:
    """Propose readings, the likeliest first.

    Args:
        leaves: From ``leaves_of``.
        fed_by_inputs: Names of the leaves that were seen to meet an argument itself (or its LayerNorm).
        module: The user's module, for shapes.
        num_heads: Number of heads.

    Yields:
        Readings by name first, then every assignment that the shapes allow.
    """
    seen: set[ProjectionReading] = set()
    proposed = itertools.chain(_by_name(leaves, fed_by_inputs), _by_trying(leaves, fed_by_inputs))
    for reading in itertools.islice(proposed, MOST_TRIED):
        if reading in seen or not _fits(reading, module, num_heads):
            continue
        seen.add(reading)
        yield reading


def role_of(name: str) -> str:
    """Say what the name of a parameter or layer says about its role.

    >>> [role_of(name) for name in ("w_q", "to_kv", "attn.c_attn", "fc_out", "keys", "linears.2")]
    ['query', 'kv', 'qkv', 'output', 'key', '']
    """
    last = name.lower().replace("_weight", "").replace("weight_", "")
    for part in reversed(last.split(".")):
        for pattern, role in WORDS:
            if re.search(pattern, part):
                return role
    return ""


def _by_name(leaves: list[Leaf], fed: set[str]) -> Iterator[ProjectionReading]:
    named: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        role = leaf.role
        if role == "output" and leaf.name in fed and len([x for x in leaves if x.role == "output"]) > 1:
            role = ""
        named.setdefault(role, []).append(leaf)
    outputs: list[Leaf | None] = [*(x for x in named.get("output", []) if x.name not in fed or not fed)]
    outputs += [x for x in named.get("", []) if fed and x.name not in fed]
    outputs = outputs or [None]
    if len(named.get("query", [])) == len(named.get("key", [])) == len(named.get("value", [])) == 1:
        three = (named["query"][0], named["key"][0], named["value"][0])
        yield from (ProjectionReading(three, output) for output in outputs)
    for packed in named.get("qkv", []):
        for layout in ("qkv3hd", "qkvh3d", "qkvhd3"):
            yield from (ProjectionReading((packed,), output, layout, by_name=False) for output in outputs)
    for query, packed in itertools.product(named.get("query", []), named.get("kv", [])):
        for layout in ("kv2hd", "kvh2d", "kvhd2"):
            yield from (ProjectionReading((query, packed), output, layout, by_name=False) for output in outputs)
    for value, packed in itertools.product(named.get("value", []), named.get("qk", [])):
        for layout, order in itertools.product(("qk2hd", "qkh2d", "qkhd2"), ("qkv", "kqv")):
            yield from (ProjectionReading((value, packed), output, layout, order, by_name=False) for output in outputs)


def _by_trying(leaves: list[Leaf], fed: set[str]) -> Iterator[ProjectionReading]:
    inputs = [leaf for leaf in leaves if leaf.name in fed] or leaves
    for output in [*(leaf for leaf in leaves if leaf.name not in fed or not fed), None]:
        rest = [leaf for leaf in inputs if leaf is not output]
        for three in itertools.permutations(rest, 3):
            yield ProjectionReading(three, output, by_name=False)
        for one in rest:
            for order, layout in itertools.product(("qkv", "kqv", "qvk", "vqk", "kvq", "vkq"), ("3hd", "h3d", "hd3")):
                yield ProjectionReading((one,), output, f"qkv{layout}", order, by_name=False)
        for query, packed in itertools.permutations(rest, 2):
            for order, layout in itertools.product(("qkv", "qvk"), ("2hd", "h2d", "hd2")):
                yield ProjectionReading((query, packed), output, f"kv{layout}", order, by_name=False)
            for layout in ("2hd", "h2d", "hd2"):
                yield ProjectionReading((query, packed), output, f"qk{layout}", by_name=False)
        for two in itertools.permutations(rest, 2):
            yield from (
                ProjectionReading(two, output, order=order, by_name=_roles_agree(two, order))
                for order in ("qk-", "q-v", "-kv")
            )
        for one in rest:
            yield from (ProjectionReading((one,), output, order=order, by_name=False) for order in ("q--", "--v"))
        yield from (ProjectionReading((one,) * 3, output, by_name=False) for one in rest)
        if output is not None:
            yield ProjectionReading((), output, order="---", by_name=False)
        for one, other in itertools.permutations(rest, 2):
            for three in ((one, other, other), (one, one, other), (one, other, one)):
                yield ProjectionReading(three, output, by_name=False)


def _roles_agree(leaves: tuple[Leaf, ...], order: str) -> bool:
    letters = [letter for letter in order if letter != "-"]
    return all(leaf.role == ROLE_LETTERS[letter] for leaf, letter in zip(leaves, letters, strict=True))


def _fits(reading: ProjectionReading, module: nn.Module, num_heads: int) -> bool:
    """Whether the shapes of a reading make an attention."""
    if reading.layout != "separate" and reading.leaves[-1].shared_heads > 1:
        return False
    try:
        read = reading.read(module, num_heads)
    except RuntimeError:
        return False
    parts = (read.query, read.key, read.value)
    query, key, value = (None if x.weight is None else x.weight.size(0) for x in parts)
    merged = None if read.output is None or read.output.weight is None else read.output.weight.size(1)
    return _heads_fit(query, key, value, merged, num_heads)


def _heads_fit(query: int | None, key: int | None, value: int | None, merged: int | None, num_heads: int) -> bool:
    """Whether rows make heads, keys and values as many as queries, or fewer that groups of them share."""
    shared = key_heads(query, key, num_heads) if query and key else num_heads
    if any(rows is not None and rows % heads for rows, heads in ((query, num_heads), (key, shared), (value, shared))):
        return False
    if query and key and query // num_heads != key // shared:
        return False
    return value is None or merged is None or not (query or key) or merged == value // shared * num_heads


def _cut_by_role(packed: Projection, order: str, output: Projection) -> dict[str, Projection]:
    """Cut [q; k; v]: queries as wide as what the output takes in, keys and values half of the rest."""
    assert packed.weight is not None  # a leaf has a matrix
    assert output.weight is not None
    queries = output.weight.size(1)
    shared = (packed.weight.size(0) - queries) // 2
    sizes = [queries if letter == "q" else shared for letter in order]
    weights = packed.weight.split(sizes)
    biases = [None] * 3 if packed.bias is None else packed.bias.split(sizes)
    return {letter: Projection(w, b) for letter, w, b in zip(order, weights, biases, strict=True)}


def _unpack(packed: Projection, layout: str, num_heads: int, parts: int) -> list[Projection]:
    """Cut packed rows into their parts: "3hd" is [q; k; v], "h3d" is [q, k, v] for each head in turn."""
    assert packed.weight is not None  # only matrices are packed
    axis = layout.index(str(parts))
    width = packed.weight.size(0) // (parts * num_heads)
    sizes = [{"h": num_heads, "d": width}.get(letter, parts) for letter in layout]

    def cut(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(y.reshape(-1, *x.shape[1:]) for y in x.reshape(*sizes, *x.shape[1:]).unbind(axis))

    weights = cut(packed.weight)
    biases: tuple[Tensor | None, ...] = (None,) * parts if packed.bias is None else cut(packed.bias)
    return [Projection(w, b) for w, b in zip(weights, biases, strict=True)]


def _stacked(parts: list[Tensor]) -> Tensor:
    """Put parts below each other; one part stays where it is, since large matrices are read many times."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _is_matrix(parameter: nn.Parameter) -> bool:
    return parameter.dim() in (2, 3) and min(parameter.shape) > 1


def _is_pointwise(module: nn.Module, name: str) -> bool:
    """Whether a parameter is the kernel of a convolution over one token at a time, (out, in, 1) or (out, in, 1, 1)."""
    owner, _, last = name.rpartition(".")
    parent = module.get_submodule(owner)
    if last != "weight" or not isinstance(parent, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    return parent.groups == 1 and set(parent.kernel_size) == {1}


def _as_matrix(weight: Tensor, transposed: bool) -> Tensor:
    """Flatten (h, e, d) or (h, d, e), drop every 1 of (out, in, 1), or transpose (in, out)."""
    if weight.dim() > 2 and weight.size(-1) == 1:
        return weight.flatten(1)
    if weight.dim() == 3:
        return (weight.transpose(1, 2) if transposed else weight).flatten(0, 1)
    return weight.t() if transposed else weight


def _leaf(module: nn.Module, name: str, parameter: nn.Parameter) -> Leaf:
    owner, _, last = name.rpartition(".")
    parent = module.get_submodule(owner)
    biases = [f"{owner}.bias" if owner else "bias"] if last == "weight" else [name.replace("weight", "bias")]
    biases += [re.sub(r"(?i)w(?=_?[a-z]?$)", "b", name), re.sub(r"(?i)(^|[._])w(?=_?[a-z0-9]+$)", r"\1b", name)]
    parameters = dict(module.named_parameters(remove_duplicate=False))
    bias = next(((b,) for b in biases if b != name and b in parameters and parameters[b].dim() == 1), ())
    label = owner if last == "weight" and owner else name
    raw = last != "weight" or (
        not isinstance(parent, nn.Linear) and type(parent).__name__ != "NonDynamicallyQuantizableLinear"
    )
    transposed = raw and not last.endswith("in_proj_weight") and "proj_weight" not in last
    if bias and parameter.dim() == 2 and parameter.size(0) != parameter.size(1):
        transposed = parameters[bias[0]].numel() == parameter.size(1)
    return Leaf(label, (name,), bias, transposed, role_of(label))


def _stack(module: nn.Module, name: str, group: list[Leaf], num_heads: int, embed_dim: int) -> list[Leaf]:
    """Stack the head-sized matrices of one name: heads.0.key, heads.1.key, ..."""
    rows = [leaf.read(module).weight for leaf in group]
    shapes = {tuple(r.shape) for r in rows if r is not None}
    head_sized = len(shapes) == 1 and (next(iter(shapes))[0] < embed_dim or _joined(module, group, shapes))
    if len(group) < 2 or len(group) != num_heads or not head_sized:
        return group
    first = group[0]
    return [
        Leaf(
            name,
            tuple(leaf.weights[0] for leaf in group),
            tuple(leaf.biases[0] for leaf in group) if first.biases else (),
            first.transposed,
            first.role or role_of(name.replace("*", "")),
        )
    ]


def _joined(module: nn.Module, group: list[Leaf], shapes: set[tuple[int, ...]]) -> bool:
    """Whether another matrix takes in what all of a group give, side by side: heads as wide as the tokens."""
    ours = {name for leaf in group for name in leaf.weights}
    width = len(group) * next(iter(shapes))[0]
    return any(width in p.shape for name, p in module.named_parameters() if p.dim() == 2 and name not in ours)


def _shared(module: nn.Module, leaf: Leaf, num_heads: int, embed_dim: int) -> Leaf:
    weight = leaf.read(module).weight
    head_dim = embed_dim // num_heads
    if num_heads > 1 and weight is not None and tuple(weight.shape) == (head_dim, head_dim):
        return Leaf(leaf.name, leaf.weights, leaf.biases, leaf.transposed, leaf.role, num_heads)
    return leaf
