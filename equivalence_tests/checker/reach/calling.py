"""Find out how to call somebody's attention: argument order, layout, mask arguments, and what comes back.

Names are read first. Where they say nothing, every assignment is tried with lengths that are all different: the
output then has the length of the query, and perturbing one sample shows which axis the samples lie on.
"""

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.reach.angles import AngleForm, base_of, takes_angles
from equivalence_tests.checker.reach.construction import MAX_LEN, Sizes, exact_lengths, parameters_of, value_for
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.kept_state import keeping_state
from equivalence_tests.checker.reach.masking import HeldMask, MaskForm
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.lines import code_lines, frames_of

__all__ = [
    "POSITION",
    "CallPlan",
    "Caller",
    "Inputs",
    "call_plans",
    "cross_plans",
    "independent_samples",
    "other_mask_plans",
    "random_inputs",
]

# "b l e": batch first; "l b e": sequence first; with heads given: "b h l d", "b l h d"; "l e": no batch.
# "b e l", "b e l 1": sounds and images, features first. Each group is tried where the ones before it cannot be called.
CHANNELS_FIRST = ("b e l", "b e l 1")
LAYOUTS = (("b l e", "l b e", "b h l d", "b l h d"), CHANNELS_FIRST, ("l e",))
ROLE_NAMES = (
    (r"mask|valid_?len|lengths?$|^lens$|seq_len|attn_bias|^bias$|padding|(^|_)pads?$|^m$", "mask"),
    (r"^\w{0,4}_?q$|^q_?\w{0,5}$|quer(y|ies)|^tgt$|^target$|^trg$|dec(oder)?_?(in|hid|x)\w*|^xq$|^x_?1$", "query"),
    (r"^\w{0,4}_?k$|^k_?(in|s|x)?$|^keys?\w*$|(^|_)key(s|_?in\w*|_states)?$|^xk$", "key"),
    (r"^\w{0,4}_?v$|^v_?(in|s|x)?$|^values?\w*$|(^|_)value(s|_?in\w*|_states)?$|^xv$", "value"),
    (r"mem|enc|context|^kv|cond|^y$|cross|source|^xa$|other|^x_?2$|^z$", "memory"),
    (r"^x$|hidden|input|^src$|emb|token|^h$|feature|seq|^inp$|^x_?\w*$|states?$|data", "input"),
)
IMAGE_SIZES = (("h", "w"), ("height", "width"))
SWITCH = re.compile(
    r"^(is|use|need|return|output|average|training|train)_|^(training|train)$|cache|past|causal|head_mask|weights$|dropout|^p$|drop|scale|temperature|pos|verbose|need|rope|freq|kwargs|layer_idx|relative"
)

LETTER = re.compile(r"^[a-z]_?\d?$")
POSITION = re.compile(
    r"^(start_?(pos|idx)|past_len\w*|offset|(input_|cache_)?pos(ition)?|cache_position|seqlen_offset|step)$"
)


@dataclass(frozen=True)
class Inputs:
    """One call: batch-first tensors, and who may look at whom, (b, q, k) bool, or None for everyone."""

    query: Tensor
    key: Tensor
    value: Tensor
    may_attend: Tensor | None = None

    def changed(self, sample: int | slice | None = None, token: int | None = None) -> "Inputs":
        """Change one sample or token of every tensor, each feature by another amount, keeping equal tensors equal."""
        changed: dict[int, Tensor] = {}
        for x in (self.query, self.key, self.value):
            if id(x) not in changed:
                changed[id(x)] = x.clone()
                part = changed[id(x)][sample] if sample is not None else changed[id(x)][:, token]
                part += torch.linspace(0.5, 1.5, x.size(-1), dtype=x.dtype)  # a LayerNorm would take back a constant
        return Inputs(changed[id(self.query)], changed[id(self.key)], changed[id(self.value)], self.may_attend)


@dataclass(frozen=True)
class CallPlan:
    """How the user's forward is called.

    Args:
        roles: For each parameter that is passed, in order: its name and what it gets (query, key, value, memory,
            input, mask, neutral (a mask that hides nothing), angles (of rotary positions), or a constant written
            "=None", "=False", "=d_k").
        layout: One of ``LAYOUTS``.
        positional: Whether to pass by position, for parameters that have no usable name.
        named: Whether the names of the parameters told the roles.
        neutral: The mask that hides nothing, where one is required.
        angles: The form of the angles, where they are an argument.
        output: Index of the output among the tensors that come back.
        weights: Index of the attention weights among them; -1 if they do not come back.
        key_heads: How many heads keys and values are handed over with, where heads are; 0 for as many as queries.
    """

    roles: tuple[tuple[str, str], ...]
    layout: str
    positional: bool = False
    named: bool = True
    neutral: MaskForm | None = None
    angles: AngleForm | None = None
    output: int = 0
    weights: int = -1
    key_heads: int = 0

    @property
    def self_attention(self) -> bool:
        """Whether one tensor is queries, keys and values."""
        return any(role == "input" for _, role in self.roles)

    @property
    def mask_parameter(self) -> str:
        """Name of the mask argument; "" if there is none."""
        return next((name for name, role in self.roles if role in ("mask", "mask?")), "")

    @property
    def takes_angles(self) -> bool:
        """Whether the angles of rotary positions are an argument."""
        return any(role == "angles" for _, role in self.roles)

    @property
    def channels_first(self) -> bool:
        """Whether the features come before the length."""
        return self.layout in CHANNELS_FIRST


@dataclass
class Caller:
    """Calls the user's code with batch-first tensors, whatever its own layout is.

    Args:
        function: The module or function.
        num_heads: Number of heads, for the layouts and masks that show it.
        dtype: Precision of the call.
    """

    function: Callable[..., Any]
    num_heads: int
    dtype: torch.dtype = torch.float64

    def returned(self, plan: CallPlan, inputs: Inputs, mask: MaskForm | None = None) -> list[Tensor]:
        """Call and list the tensors that come back, untouched."""
        args, kwargs = self.arguments(plan, inputs, mask)
        with keeping_state(self.function):
            return list(tensors_in((self.function(*args, **kwargs),)))

    def output(self, plan: CallPlan, inputs: Inputs, mask: MaskForm | None = None) -> Tensor:
        """Call and give the output as (b, q, e)."""
        return from_layout(self.returned(plan, inputs, mask)[plan.output], plan.layout)

    def arguments(self, plan: CallPlan, inputs: Inputs, mask: MaskForm | None) -> tuple[list[Any], dict[str, Any]]:
        """Lay out tensors and mask as the user's code wants them."""
        values = {name: self._value(name, role, plan, inputs, mask) for name, role in plan.roles}
        if plan.positional:
            return list(values.values()), {}
        return [], {name: value for name, value in values.items() if value is not OMIT}

    def _value(self, name: str, role: str, plan: CallPlan, inputs: Inputs, mask: MaskForm | None) -> Any:
        if role == "mask?" and mask is None:
            return None
        if role in ("mask", "mask?", "neutral"):
            form = plan.neutral if role == "neutral" else mask or plan.neutral
            if form is None:
                return None if plan.positional else OMIT
            may_attend = inputs.may_attend if mask is not None and role != "neutral" else None
            if may_attend is None:
                may_attend = inputs.query.new_ones(len(inputs.query), inputs.query.size(1), inputs.key.size(1)).bool()
            tensor = form.build(may_attend, self.num_heads, self.dtype)
            return HeldMask(tensor) if form.held else tensor
        if role.startswith("="):
            return {"=None": None, "=False": False, "=True": True, "=0": 0}.get(role, self._size(role[1:], inputs))
        if role == "angles" and plan.angles is not None:
            return self.angles(name, plan.angles, inputs)
        tensors = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
        x = tensors.get(role, inputs.query if role == "input" else inputs.key)
        laid_out = to_layout(x.to(self.dtype, copy=True), plan.layout, self.num_heads)  # the code may write into it
        grouped = plan.key_heads and role in ("key", "value", "memory")
        return laid_out.narrow(plan.layout.split().index("h"), 0, plan.key_heads) if grouped else laid_out

    def angles(self, name: str, form: AngleForm, inputs: Inputs) -> Any:
        """Make the argument of this name for the positions of the queries, from 0."""
        head = inputs.query[0, :, : inputs.query.size(-1) // self.num_heads].to(self.dtype)
        return form.build(name, head, base_of(self.function))

    def _size(self, name: str, inputs: Inputs) -> Any:
        if name in ("height", "width"):
            return inputs.query.size(1) if name == "height" else 1
        width = inputs.query.size(-1)
        sizes = Sizes(num_heads=self.num_heads, head_dim=width // self.num_heads)
        return value_for(name, sizes)[1]


class _Omit:
    """Marks an argument that is left to its default."""


OMIT = _Omit()


def to_layout(x: Tensor, layout: str, num_heads: int) -> Tensor:
    """Turn (b, l, e) into the user's layout."""
    names, given = layout.split(), "b l h d" if "h" in layout else "b l e"
    x = x.unflatten(-1, (num_heads, -1)) if "h" in names else x
    kept = [name for name in names if name != "1"]
    axes = given.split() if "b" in names else given.split()[1:]
    laid_out = (x if "b" in names else x[0]).permute([axes.index(name) for name in kept]).contiguous()
    return laid_out[..., None] if "1" in names else laid_out


def from_layout(x: Tensor, layout: str) -> Tensor:
    """Turn the user's layout into (b, l, e); what has its heads merged is there already."""
    if "h" in layout and x.dim() != 4:
        return x
    names = layout.removesuffix(" 1").split()
    x = x.flatten(len(names) - 1) if "1" in layout else x
    x, names = (x, names) if "b" in names else (x[None], ["b", *names])
    return x.permute([names.index(name) for name in "blhde" if name in names]).flatten(2)


def random_inputs(sizes: Sizes, plan: CallPlan, seed: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """Draw inputs for a plan: equal tensors where the plan has one argument for several roles."""
    generator = torch.Generator().manual_seed(seed)
    batch = 1 if plan.layout == "l e" else sizes.batch

    def draw(length: int) -> Tensor:
        return torch.randn(batch, length, sizes.embed_dim, generator=generator, dtype=torch.float64).to(dtype)

    query = draw(sizes.query_len)
    if plan.self_attention:
        return Inputs(query, query, query)
    key = draw(sizes.key_len)
    return Inputs(query, key, key if "memory" in dict(plan.roles).values() else draw(sizes.key_len))


def role_of_parameter(name: str) -> str:
    """Say what the name of an argument says.

    >>> [role_of_parameter(name) for name in ("queries", "x", "attention_mask", "memory", "v_in")]
    ['query', 'input', 'mask', 'memory', 'value']
    """
    for pattern, role in ROLE_NAMES:
        if re.search(pattern, name.lower()):
            return role
    return ""


def forward_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """List the arguments of a function, or of the forward of a module."""
    target: Callable[..., Any] = function
    if isinstance(function, nn.Module) and getattr(type(function), "forward", None) is not nn.Module.forward:
        target = function.forward  # some override __call__ instead
    return parameters_of(target)


def call_plans(caller: Caller, sizes: Sizes, errors: list[str]) -> Iterator[tuple[CallPlan, Sizes]]:
    """Give the ways in which the code can be called, the likeliest first.

    Args:
        caller: Holds the code.
        sizes: Of the tensors to try.
        errors: Receives what the code said to attempts that failed.

    Yields:
        Plans that ran and gave an output of the query's length, with the sizes that they ran on. Equal lengths are
        tried only where different ones fail.
    """
    parameters = forward_parameters(caller.function)
    equal = replace(sizes, key_len=sizes.query_len)
    found = False
    exact = exact_lengths(caller.function) if isinstance(caller.function, nn.Module) else []
    wholes = [replace(sizes, query_len=n, key_len=n) for n in (MAX_LEN, *exact)]
    for lengths, layouts in itertools.product((sizes, equal, *wholes), LAYOUTS):
        for (roles, named), layout, heads in itertools.product(role_lists(parameters), layouts, _key_heads(sizes)):
            if heads and "h" not in layout:
                continue
            plan = CallPlan(roles, layout, positional_only(parameters, roles), named, key_heads=heads)
            for working in _working(caller, plan, lengths, errors):
                found = True
                yield working, lengths
                if _may_take_one_head(caller.function, plan):
                    one_head = replace(lengths, num_heads=1)
                    yield from ((narrow, one_head) for narrow in _working(caller, working, one_head, []))
        if found:
            return


def _may_take_one_head(function: Callable[..., Any], plan: CallPlan) -> bool:
    """Whether the width that a constructor was told may be that of one head: no parameter shows which it is."""
    return isinstance(function, nn.Module) and next(function.parameters(), None) is None and "h" not in plan.layout


def _key_heads(sizes: Sizes) -> tuple[int, ...]:
    """How many heads keys may be handed over with, where heads are: fewer first, if there are sizes for that."""
    return (0,) if sizes.key_heads == sizes.num_heads else (sizes.key_heads, 0)


def cross_plans(caller: Caller, sizes: Sizes) -> Iterator[tuple[CallPlan, Sizes]]:
    """Give the ways to call with a second tensor that may be left out; masks are left to their defaults.

    Args:
        caller: Holds the code.
        sizes: Of the tensors to try.

    Yields:
        As ``call_plans``.
    """
    parameters = forward_parameters(caller.function)
    roles = [(p.name, _role(p)) for p in parameters]
    memory = {name for name, role in roles if role in ("memory", "key", "value") and not _required(name, parameters)}
    given = tuple((name, "query" if role == "input" else role) for name, role in roles if role not in ("", "default"))
    kept = tuple((n, r) for n, r in given if n in memory or r.startswith("=") or _required(n, parameters))
    if {"key", "value"} - {role for name, role in kept}:  # one tensor for both, whatever it is called
        kept = tuple((name, "memory" if name in memory else role) for name, role in kept)
    if not memory or not any(role == "input" for _, role in roles):
        return
    lengths_tried = (sizes, replace(sizes, key_len=sizes.query_len))
    for lengths, layout in itertools.product(lengths_tried, itertools.chain(*LAYOUTS)):
        plan = CallPlan(kept, layout, positional_only(parameters, kept))
        yield from ((working, lengths) for working in _working(caller, plan, lengths, []))


def independent_samples(caller: Caller, plan: CallPlan, lengths: Sizes) -> bool:
    """Whether changing sample 0 leaves the other samples alone, and changing token 0 does not."""
    inputs = random_inputs(lengths, plan, 1, caller.dtype)
    if len(inputs.query) == 1:
        return True
    try:
        with torch.no_grad():
            before, after = caller.output(plan, inputs), caller.output(plan, inputs.changed(sample=0))
    except Exception:
        return False
    return bool(torch.allclose(before[1:], after[1:], rtol=1e-9, atol=1e-12))


def other_mask_plans(caller: Caller, plan: CallPlan) -> Iterator[CallPlan]:
    """Give the ways to call with another mask than the one of a plan; that one hides nothing then.

    Args:
        caller: Holds the code.
        plan: A way to call it that works.

    Yields:
        A plan for each mask that is left out.
    """
    parameters = forward_parameters(caller.function)
    first = plan.mask_parameter
    others = [p.name for p in parameters if _role(p) == "mask" and p.name != first]
    instead = {"mask?": "=None"} if plan.neutral is None else {"mask": "neutral", "mask?": "neutral"}
    kept = tuple((n, instead.get(r, r)) for n, r in plan.roles if n != first or r in instead)
    for name in () if plan.positional else others:
        yield replace(plan, roles=(*(pair for pair in kept if pair[0] != name), (name, "mask")))


def positional_only(parameters: list[inspect.Parameter], roles: tuple[tuple[str, str], ...]) -> bool:
    """Whether the arguments can be passed by position only."""
    kinds = {p.name: p.kind for p in parameters}
    return any(kinds.get(name) == inspect.Parameter.POSITIONAL_ONLY for name, _ in roles)


def role_lists(parameters: list[inspect.Parameter]) -> Iterator[tuple[tuple[tuple[str, str], ...], bool]]:
    """Propose what each parameter gets; also whether the names said so."""
    roles = _with_one_mask(_with_image_sizes([(p.name, _role(p)) for p in parameters]), parameters)
    kept = [(name, role) for name, role in roles if role not in ("", "default")]
    unknown = [name for name, role in roles if role == ""]
    known = {role for _, role in kept}
    if not unknown and (known & {"query", "input"}) and _complete(known):
        yield from ((option, True) for option in _with_optional_memory(kept, parameters))
    tensors = [name for name, role in roles if role in ("", "query", "key", "value", "memory", "input")]
    tensors = [name for name in tensors if name in unknown or _required(name, parameters)] or tensors[:1]
    for assignment in _assignments(len(tensors)):
        chosen = dict(zip(tensors, assignment, strict=True))
        yield tuple((n, chosen.get(n, r)) for n, r in roles if n in chosen or r == "mask" or r.startswith("=")), False


def _with_image_sizes(roles: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Height and width beside each other are the sizes of an image: x of (batch, height * width, features), H, W."""
    names = {name.lower() for name, _ in roles}
    sizes = next((pair for pair in IMAGE_SIZES if set(pair) <= names), ("", ""))
    meant = dict(zip(sizes, ("=height", "=width"), strict=True))
    return [(name, meant.get(name.lower(), role)) for name, role in roles]


def _with_one_mask(roles: list[tuple[str, str]], parameters: list[inspect.Parameter]) -> list[tuple[str, str]]:
    """Of several masks pass one, the most general: not the one of the padding. The others are left out."""
    names = [name for name, role in roles if role == "mask"]
    chosen = next((name for name in names if not re.search(r"pad|len|causal", name.lower())), names[0] if names else "")
    left_out = {name: "=None" if _required(name, parameters) else "default" for name in names if name != chosen}
    return [(name, left_out.get(name, role)) for name, role in roles]


def _complete(known: set[str]) -> bool:
    three = {"query", "key", "value"} & known
    return ("input" in known) != ("query" in known) and (
        not three or three == {"query", "key", "value"} or (three == {"query"} and "memory" in known)
    )


def _with_optional_memory(
    kept: list[tuple[str, str]], parameters: list[inspect.Parameter]
) -> Iterator[tuple[tuple[str, str], ...]]:
    """X with an optional second tensor is self-attention first; with a required one it is cross-attention."""
    if not any(role == "input" for _, role in kept):
        yield tuple(kept)
        return
    memory = [name for name, role in kept if role == "memory"]
    if any(_required(name, parameters) for name in memory):
        yield tuple((name, "query" if role == "input" else role) for name, role in kept)
        if all(LETTER.search(name) for name in memory):  # where lengths must be equal, (x, y) may be (memory, target)
            yield tuple((name, {"input": "memory", "memory": "query"}.get(role, role)) for name, role in kept)
        return
    yield tuple(pair for pair in kept if pair[1] not in ("memory", "key", "value"))


def _required(name: str, parameters: list[inspect.Parameter]) -> bool:
    return any(p.name == name and p.default is p.empty for p in parameters)


def _role(parameter: inspect.Parameter) -> str:
    name, optional = parameter.name.lower(), parameter.default is not parameter.empty
    role = role_of_parameter(name)
    if optional and (isinstance(parameter.default, bool | int | float) or "str" in str(parameter.annotation)):
        return "default"
    if takes_angles(name) and not optional:
        return "angles"
    if SWITCH.search(name) and (role != "mask" or "head_mask" in name):
        if optional:
            return "default"
        return "=None" if re.search("drop|cache|past", name) else "=0" if POSITION.search(name) else "=False"
    if role == "" and optional:
        return "default"
    known, value = value_for(parameter.name, Sizes())
    if parameter.annotation in (int, float) or (
        name in ("d_k", "dk", "d_model", "num_heads", "n_heads", "heads") and known and value
    ):
        return f"={parameter.name}"
    return role


def _assignments(count: int) -> Iterator[tuple[str, ...]]:
    if count == 1:
        yield ("input",)
    if count == 2:
        yield from (("query", "memory"), ("memory", "query"))
        yield ("input", "mask")
    if count == 3:
        yield from itertools.permutations(("query", "key", "value"))
        yield ("query", "memory", "mask")
    if count == 4:
        yield from ((*three, "mask") for three in itertools.permutations(("query", "key", "value")))


def _working(caller: Caller, plan: CallPlan, sizes: Sizes, errors: list[str]) -> Iterator[CallPlan]:
    """Try a plan with each form of the angles that it takes."""
    for angles in AngleForm.all() if plan.takes_angles else (None,):
        yield from _with_masks(caller, replace(plan, angles=angles), sizes, errors)


def _with_masks(caller: Caller, plan: CallPlan, sizes: Sizes, errors: list[str]) -> Iterator[CallPlan]:
    """Try a plan without a mask, None where one is required, then with each mask that might hide nothing."""
    required = _required(plan.mask_parameter, forward_parameters(caller.function))
    without = tuple((name, "mask?" if role == "mask" and required else role) for name, role in plan.roles)
    done = _try(caller, replace(plan, roles=without), sizes, errors)
    if done is not None:
        yield done
        return
    for neutral in MaskForm.neutral_forms() if plan.mask_parameter else ():
        for roles in dict.fromkeys((plan.roles, _all_neutral(plan.roles))):
            done = _try(caller, replace(plan, roles=roles, neutral=neutral), sizes, errors)
            if done is not None:
                yield done
                break


def _all_neutral(roles: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Give every mask that got None one that hides nothing."""
    none_masks = {name for name, role in roles if role == "=None" and role_of_parameter(name) == "mask"}
    return tuple((name, "neutral" if name in none_masks else role) for name, role in roles)


def _try(caller: Caller, plan: CallPlan, sizes: Sizes, errors: list[str]) -> CallPlan | None:
    inputs = random_inputs(sizes, plan, seed=1, dtype=caller.dtype)
    try:
        with torch.no_grad():
            tensors = caller.returned(plan, inputs)
    except Exception as error:
        place = "".join(f" ({line.path}:{line.number})" for line in code_lines(frames_of(error)[:1]))
        errors.append(said(error) + place)
        return None
    found = [index for index, x in enumerate(tensors) if _is_output(x, plan, inputs, caller.num_heads)]
    if found:
        output = min(found, key=lambda index: _like_weights(tensors[index], inputs))
        return replace(plan, output=output, weights=_weights_index(tensors, output, inputs))
    errors.append(f"no output of the query's length came back, but {[tuple(x.shape) for x in tensors]}")
    return None


def _is_output(x: Tensor, plan: CallPlan, inputs: Inputs, num_heads: int) -> bool:
    batch, length, width = inputs.query.shape
    sizes, names = {"b": batch, "l": length, "h": num_heads, "1": 1}, plan.layout.split()
    laid_out = x.dim() == len(names) and all(sizes.get(n, size) == size for n, size in zip(names, x.shape, strict=True))
    return laid_out or ("h" in names and tuple(x.shape) == (batch, length, width))


def _like_weights(x: Tensor, inputs: Inputs) -> tuple[bool, bool]:
    """Order what might be the output: weights come last, then what has another width than the input."""
    sums_to_one = x.size(-1) == inputs.key.size(1) and bool(torch.allclose(x.sum(-1), torch.ones_like(x.sum(-1))))
    return sums_to_one, x.size(-1) != inputs.query.size(-1)


def _weights_index(tensors: list[Tensor], output: int, inputs: Inputs) -> int:
    ending = (inputs.query.size(1), inputs.key.size(1))
    matching = [i for i, x in enumerate(tensors) if i != output and tuple(x.shape[-2:]) == ending]
    return matching[0] if matching else -1
