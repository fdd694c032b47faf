"""Call somebody's attention: argument order, layout, mask arguments, and what comes back."""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from equivalence_tests.checker.reach.angles import AngleForm, base_of
from equivalence_tests.checker.reach.arguments import ROLES, Sizes, role_of_parameter, value_for
from equivalence_tests.checker.reach.construction import part_for
from equivalence_tests.checker.reach.masking import HeldMask, MaskForm
from equivalence_tests.checker.reach.proposing import empty_state, parameters_of
from equivalence_tests.checker.reach.state import attempt, keeping_state
from equivalence_tests.checker.reach.tracing import tensors_in

# "b l e": batch first; "l b e": sequence first; with heads given: "b h l d", "b l h d"; "l e": no batch.
# "b e l", "b e l 1": sounds and images, features first; "b l 1 e": images, features last. Each group is tried where the
# ones before it cannot be called; the one tensor of a module holds heads only where it can be nothing else, not a film.
OF_PIXELS = IMAGE, PIXELS = "b e l 1", "b l 1 e"
VECTOR = "=(batch, features)"  # one of each sample, as a time step or a class is embedded; as wide as tokens at first
# What an argument may get whatever the tokens are.
CONSTANTS: dict[str, Any] = {"=None": None, "=True": True, "=False": False, "=0": 0, "=2": 2, "=no window": (-1, -1)}
REAL_TOKENS = "=real tokens"  # what tokens are multiplied with: 1 for each
POSITIONS_OF = OF_QUERIES, OF_KEYS = "positions of the queries", "positions of the keys"  # one vector for each token
# Relative positions: vectors of the distances, or of each query and key.
TABLES = ("=(1, 2 len - 1, features)", "=(batch, 2 len - 1, features)", "=(len, len, features)")
HEADS = ("b h l d", "b l h d")
WINDOWS = "b 1 1 l 1 e"  # of an image: rows and columns of windows, and of pixels in each
OF_ONE = (("b 1 l e",), (PIXELS,), ("b e 1 l", "b e l 1 1"), (WINDOWS,), HEADS)
STEPS = ("b e", "1 b e", "b 1 e")  # of one time step, as the state of a decoder is laid out
OF_STEPS = tuple(f"{step}, {others}" for others in ("b l e", "l b e") for step in STEPS)  # of queries, and of others
BESIDE = f"{IMAGE}, b l e"  # queries that are pixels, and a context of tokens
LAYOUTS = (("b l e", "l b e", *HEADS, *OF_STEPS), ("b e l", IMAGE, BESIDE), ("l e",), *OF_ONE)

Extra = Mapping[str, Any] | None  # more arguments, by name
OF_MEMORY = re.compile(r"src|source|mem|enc|cross", re.IGNORECASE)
PADDING = OF_QUERY_TOKENS, OF_KEY_TOKENS = "neutral query", "neutral key"  # a mask of the tokens of one side
LEFT_OUT = inspect.Parameter.empty  # an argument that is left to its default


@dataclass(frozen=True)
class Inputs:
    """One call: batch-first tensors, and who may look at whom, (b, q, k) bool, or None for everyone."""

    query: Tensor
    key: Tensor
    value: Tensor
    may_attend: Tensor | None = None

    def mapped(self, made: Callable[[Tensor], Tensor], of: tuple[str, ...] = ROLES) -> "Inputs":
        """Make others of some tensors, keeping equal tensors equal."""
        distinct = {id(x): x for x in (getattr(self, role) for role in of)}
        others = {key: made(x) for key, x in distinct.items()}
        query, key, value = (others.get(id(x), x) for x in (self.query, self.key, self.value))
        return Inputs(query, key, value, self.may_attend)

    def cut(self, place: int, count: int) -> "Inputs":
        """Give one of so many pieces of all tokens."""
        return self.mapped(lambda x: x.tensor_split(count, 1)[place])

    def scaled(self, factor: float, of: tuple[str, ...] = ROLES) -> "Inputs":
        """Multiply some tensors."""
        return self.mapped(lambda x: factor * x, of)

    def changed(self, sample: int | slice | None = None, token: int | None = None) -> "Inputs":
        """Change one sample or token of every tensor, each feature by another amount."""

        def other(x: Tensor) -> Tensor:
            x = x.clone()
            part = x[sample] if sample is not None else x[:, token]
            part += torch.linspace(0.5, 1.5, x.size(-1), dtype=x.dtype)  # a LayerNorm would take back a constant
            return x

        return self.mapped(other)


def held_roles(role: str) -> list[str]:
    """List the roles of what one argument holds, or its own.

    >>> held_roles("[query, key]"), held_roles("mask")
    (['query', 'key'], ['mask'])
    """
    return role[1:-1].split(", ") if role.startswith("[") else [role]


@dataclass(frozen=True)
class CallPlan:
    """How the user's forward is called.

    Args:
        roles: For each parameter that is passed, in order: its name and what it gets (query, key, value, memory, input,
            mask, neutral (a mask that hides nothing; "neutral query" and "neutral key" are of the tokens of one side),
            angles (of rotary positions), positions of the queries or of the keys, a constant written "=None", "=False",
            "=d_k", or a list, "[query, key, value]", where what stands twice is cut into pieces).
    """

    roles: tuple[tuple[str, str], ...]
    layout: str  # how tokens are laid out, "b l e" or another
    positional: bool = False  # whether to pass by position, for parameters that have no usable name
    named: bool = True  # whether the roles follow from the names of the parameters
    neutral: MaskForm | None = None  # the mask that hides nothing, where one is required
    angles: AngleForm | None = None  # the form of the angles, where they are an argument
    output: int = 0  # index of the output among the tensors that come back
    key_heads: int = 0  # how many heads keys and values are handed over with, where heads are; 0 for as many as queries
    step: str = ""  # the layout of queries that are one time step, one of ``STEPS``; "" where they lie as the others
    returned: str = ""  # the layout of what comes back for that step
    beside: str = ""  # the layout of keys and values; "" where they lie as the queries

    @property
    def given(self) -> set[str]:
        """The roles of all that is passed, also inside of lists."""
        return {one for _, role in self.roles for one in held_roles(role)}

    @property
    def self_attention(self) -> bool:
        """Whether one tensor is queries, keys and values."""
        return "input" in self.given

    @property
    def of_one_length(self) -> bool:
        """Whether there are as many keys as queries: they are one tensor, or vectors of their distances are given."""
        return self.self_attention or not self.given.isdisjoint(TABLES)

    @property
    def mask_parameter(self) -> str:
        """Name of the mask argument; "" if there is none."""
        return next((name for name, role in self.roles if role in ("mask", "mask?")), "")

    @property
    def output_layout(self) -> str:
        """How the output is laid out."""
        return self.returned or self.layout

    @property
    def may_lie_apart(self) -> bool:
        """Whether its queries may be laid out in another way; with two masks there would be too many ways to try."""
        masks = [name for name, _ in self.roles if role_of_parameter(name) == "mask"]
        return "query" in self.given and not self.self_attention and not self.positional and len(masks) < 2

    @property
    def apart(self) -> dict[str, str]:
        """The layouts of the arguments that lie in another way than the rest: one time step, a context of an image."""
        layouts = {"query": self.step} | dict.fromkeys(("key", "value", "memory"), self.beside)
        return {name: layouts[role] for name, role in self.roles if layouts.get(role)}

    def laid_out(self, layout: str) -> "CallPlan":
        """Give the same for one of the ``LAYOUTS``, of all tokens, or of queries and of others."""
        queries, _, others = layout.partition(", ")
        if layout in OF_STEPS:
            return replace(self, layout=others, step=queries)
        return replace(self, layout=queries, beside=others)

    def at(self, place: str) -> tuple[str, str]:
        """Give the name and the role of a tensor by where it lies in a call: "key", "inputs[1]", "0" by position."""
        name, bracket, index = place.partition("[")
        name = self.roles[int(name)][0] if self.positional else name
        return name + bracket + index, held_roles(dict(self.roles)[name])[int(index[:-1] or 0)]


@dataclass(frozen=True)
class Trial:
    """A way to call somebody's code, with batch-first tensors whatever its own layout is."""

    function: Callable[..., Any]  # the module or function
    plan: CallPlan  # how it is called
    sizes: Sizes  # of the inputs; the number of heads also for the layouts and masks that show it
    dtype: torch.dtype = torch.float64  # precision of the call
    adapted: Callable[..., Any] | None = None  # the user's own ``call(function, query, key, value, may_attend)``
    first: int = 0  # position of the first query, where positions or angles are arguments

    @property
    def called(self) -> Callable[..., Any]:
        """What takes the arguments: the code itself, or the user's adapter around it."""
        return self.function if self.adapted is None else partial(self.adapted, self.function)

    def inputs(self, query_len: int | None = None, key_len: int | None = None, seed: int = 11) -> Inputs:
        """Draw inputs, equal tensors where the plan has one argument for several roles; of other lengths if given."""
        queries = 1 if self.plan.step else query_len or self.sizes.query_len
        keys = key_len or (query_len if self.plan.of_one_length and query_len else self.sizes.key_len)
        batch = 1 if self.plan.layout == "l e" else self.sizes.batch
        tensors = 1 if self.plan.self_attention else 2 if "memory" in self.plan.given else 3
        lengths = (queries, keys, keys)[:tensors]
        drawn = _drawn(batch, lengths, self.sizes.embed_dim, seed, self.dtype, self.sizes.memory_dim)
        return Inputs(drawn[0], *(drawn[-1:] * 2 if tensors < 3 else drawn[1:]))

    def arguments(
        self, inputs: Inputs, extra: Extra = None, mask: MaskForm | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Lay tensors and mask out as the user's code wants them, with more arguments by name."""
        values = {name: self._value(name, role, inputs, mask) for name, role in self.plan.roles}
        if self.plan.positional:
            return tuple(values.values()), dict(extra or {})
        return (), {name: value for name, value in values.items() if value is not LEFT_OUT} | dict(extra or {})

    def returned(
        self, inputs: Inputs, extra: Extra = None, mask: MaskForm | None = None, *, changing: bool = False
    ) -> Any:
        """Call, and give what comes back, whatever it is; ``changing``: what the code keeps may stay changed."""
        args, kwargs = self.arguments(inputs, extra, mask)
        with contextlib.nullcontext() if changing else keeping_state(self.function):
            return self.called(*args, **kwargs)

    def tensors(self, inputs: Inputs) -> list[Tensor]:
        """Call, and list the tensors that come back, untouched."""
        return list(tensors_in((self.returned(inputs),)))

    def output(self, inputs: Inputs, extra: Extra = None, mask: MaskForm | None = None) -> Tensor:
        """Call, and give the output as (batch, query_len, embed_dim)."""
        return self.output_in(self.returned(inputs, extra, mask))

    def output_in(self, returned: Any) -> Tensor:
        """Find the output in what came back."""
        return from_layout(list(tensors_in((returned,)))[self.plan.output], self.plan.output_layout)

    @property
    def causal_switches(self) -> list[str]:
        """The arguments beside the mask that ask for a causal one."""
        names = [p.name for p in parameters_of(self.function)]
        return [name for name in names if "causal" in name and name != self.plan.mask_parameter]

    @property
    def keeps_samples_apart(self) -> bool:
        """Whether changing sample 0 leaves the other samples alone."""
        inputs = self.inputs(seed=1)
        both = attempt(lambda: [self.output(x)[1:] for x in (inputs, inputs.changed(sample=0))])
        return both is not None and torch.allclose(both[0], both[1], rtol=1e-9, atol=1e-12)

    def _value(self, name: str, role: str, inputs: Inputs, mask: MaskForm | None) -> Any:
        if role.startswith("["):
            held = held_roles(role)
            pieces = (inputs.cut(held[:place].count(one), held.count(one)) for place, one in enumerate(held))
            return [self._value(name, one, piece, mask) for one, piece in zip(held, pieces, strict=True)]
        if role in ("mask", "mask?", "neutral", *PADDING):
            return self._mask(name, role, inputs, mask)
        if role.startswith("="):
            return self._beside_tokens(name, role, *inputs.query.shape[:2])
        if role == "angles" and self.plan.angles is not None:
            x, angles, own = inputs.query.to(self.dtype), self.plan.angles, cast(Any, type(self.function))
            if angles.kind == "part":
                return part_for(own, name, self.sizes, self.dtype)
            x = x if angles.kind == "encoding" else x[0, :, : x.size(-1) // self.sizes.num_heads]
            return angles.build(name, x, base_of(self.function), self.first)
        tensors = {"query": inputs.query, "key": inputs.key, "value": inputs.value, OF_QUERIES: inputs.query}
        x = tensors.get(role, inputs.query if role == "input" else inputs.key).to(self.dtype, copy=True)
        if role in POSITIONS_OF:
            x = _drawn(len(x), (x.size(1),), x.size(2), sum(name.encode()), self.dtype)[0].clone()
        layout = self.plan.apart.get(name, self.plan.layout)
        laid_out = to_layout(x, layout, self.sizes.num_heads)  # a copy: the code may write into it
        grouped = self.plan.key_heads and role in ("key", "value", "memory")
        return laid_out.narrow(self.plan.layout.split().index("h"), 0, self.plan.key_heads) if grouped else laid_out

    def _mask(self, name: str, role: str, inputs: Inputs, mask: MaskForm | None) -> Any:
        """Give the mask of a call, or one that hides nothing in its place."""
        if role == "mask?" and mask is None:
            return None
        hides = mask is not None and role in ("mask", "mask?")
        form = mask if hides else self.plan.neutral
        if form is None:
            return None if self.plan.positional else LEFT_OUT
        others = [n for n, r in self.plan.roles if r in ("mask", "mask?", "neutral")]
        alone = OF_QUERY_TOKENS in self.plan.given or any(map(OF_MEMORY.search, others))
        alone = alone and not OF_MEMORY.search(name)
        keys = inputs.query if role == OF_QUERY_TOKENS or (alone and role not in PADDING) else inputs.key
        if role in PADDING:
            form = replace(form, shape="(batch, key)")
        may_attend = inputs.may_attend if hides else None
        if may_attend is None:
            may_attend = inputs.query.new_ones(len(keys), inputs.query.size(1), keys.size(1)).bool()
        tensor = form.build(may_attend, self.sizes.num_heads, self.dtype)
        return HeldMask(tensor) if form.held else tensor

    def _beside_tokens(self, name: str, role: str, batch: int, length: int) -> Any:
        """Give what an argument gets that holds no tokens: a constant, a size, positions, a state or a vector."""
        width = columns_of(length)
        made = CONSTANTS | {"=height": length // width, "=width": width}
        made["=positions"] = torch.arange(self.first, self.first + length).expand(batch, -1)
        made[REAL_TOKENS] = torch.ones(batch, length, 1, dtype=self.dtype)
        if role == "=state":
            return empty_state(self.function, name, self.sizes, batch)
        if role in TABLES:
            shapes = dict(zip(TABLES, ((1, 2 * length - 1), (batch, 2 * length - 1), (length, length)), strict=True))
            first, rows = shapes[role]
            return _drawn(first, (rows,), self.sizes.embed_dim, sum(name.encode()), self.dtype)[0].clone()
        if role.startswith("=("):
            width = self.sizes.embed_dim if role == VECTOR else int(role[len("=(batch, ") : -1])
            return _drawn(batch, (1,), width, sum(name.encode()), self.dtype)[0][:, 0].clone()
        return made[role] if role in made else value_for(role[1:], self.sizes)[1]


@functools.lru_cache(maxsize=256)
def _drawn(
    batch: int, lengths: tuple[int, ...], width: int, seed: int, dtype: torch.dtype, others: int = 0
) -> list[Tensor]:
    """Draw one tensor for each length, all but the first as wide as others are; a call gets copies of them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = zip(lengths, (width, *(others or width for _ in lengths[1:])), strict=True)
    made = (torch.randn(batch, n, size, generator=generator, dtype=torch.float64) for n, size in sizes)
    return [x.to(dtype) for x in made]


def to_layout(x: Tensor, layout: str, num_heads: int) -> Tensor:
    """Turn (b, l, e) into the user's layout."""
    if layout in STEPS:
        return {"b e": x[:, 0], "1 b e": x.transpose(0, 1), "b 1 e": x}[layout].contiguous()
    if layout == WINDOWS:  # the samples are windows of images, as many in each as fit
        grid = grid_of(len(x))
        return x.unflatten(1, (-1, columns_of(x.size(1)))).unflatten(0, (-1, *grid)).contiguous()
    names, given = layout.split(), "b l h d" if "h" in layout else "b l e"
    x = x.unflatten(-1, (num_heads, -1)) if "h" in names else x
    kept = [name for name in names if name != "1"]
    axes = given.split() if "b" in names else given.split()[1:]
    laid_out = (x if "b" in names else x[0]).permute([axes.index(name) for name in kept]).contiguous()
    if layout in OF_PIXELS:
        axis = kept.index("l")
        return laid_out.unflatten(axis, (-1, columns_of(laid_out.size(axis))))
    return laid_out[tuple(None if name == "1" else slice(None) for name in names)]


def columns_of(pixels: int) -> int:
    """How wide an image of so many pixels is: nearly as wide as high, so that axes that change places show.

    >>> columns_of(12), columns_of(6), columns_of(5)
    (3, 2, 1)
    """
    return max(width for width in range(1, pixels + 1) if pixels % width == 0 and width * width <= pixels)


def grid_of(windows: int) -> tuple[int, int]:
    """How many rows and columns of windows images have that hold so many.

    >>> grid_of(2), grid_of(3), grid_of(12)
    ((1, 2), (1, 3), (3, 2))
    """
    columns = min(n for n in range(2, windows + 1) if windows % n == 0) if windows > 1 else 1
    rest = windows // columns
    return max((n for n in range(2, rest) if rest % n == 0), default=1), columns


def from_layout(x: Tensor, layout: str) -> Tensor:
    """Turn the user's layout into (b, l, e); what has its heads merged is there already, or still has them split."""
    if "h" in layout and x.dim() != 4:
        return x
    if layout == "b l e" and x.dim() == 4:
        return x.transpose(1, 2).flatten(2)
    if layout == WINDOWS:
        return x.flatten(3, 4).flatten(0, 2)
    if layout in STEPS:
        return x[:, None] if layout == "b e" else x.transpose(0, 1) if layout == "1 b e" else x
    rows = layout.split().index("l")
    x = x.flatten(rows, rows + 1).unsqueeze(rows + 1) if layout in OF_PIXELS else x
    x = x[tuple(0 if name == "1" else slice(None) for name in layout.split())] if "1" in layout else x
    names = layout.replace(" 1", "").split()
    x, names = (x, names) if "b" in names else (x[None], ["b", *names])
    return x.permute([names.index(name) for name in "blhde" if name in names]).flatten(2)


def is_output(x: Tensor, trial: Trial, inputs: Inputs) -> bool:
    """Whether what comes back has the batch and the length of the queries."""
    batch, length, width = inputs.query.shape
    layout, heads = trial.plan.output_layout, trial.sizes.num_heads
    if trial.plan.step and x.size(-1) == inputs.key.size(1):
        return False  # the weights of the tokens
    if layout == WINDOWS:
        return x.shape[:-1] == to_layout(inputs.query, layout, heads).shape[:-1]
    columns, names = columns_of(length) if layout in OF_PIXELS else 1, layout.split()
    sizes = {"b": batch, "l": length // columns, "h": heads, "1": columns}
    laid_out = x.dim() == len(names) and all(sizes.get(n, size) == size for n, size in zip(names, x.shape, strict=True))
    split = layout == "b l e" and x.shape == (batch, heads, length, width // heads)
    return laid_out or split or ("h" in names and x.shape == inputs.query.shape)


def like_weights(x: Tensor, inputs: Inputs) -> tuple[bool, bool]:
    """Order what might be the output: weights come last, then what has another width than the input."""
    sums_to_one = x.size(-1) == inputs.key.size(1) and bool(torch.allclose(x.sum(-1), torch.ones_like(x.sum(-1))))
    return sums_to_one, x.size(-1) != inputs.query.size(-1)
