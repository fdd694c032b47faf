"""Put the weights of one module into another, and random numbers into all of them.

Two implementations can be compared only when they hold the same weights. Between ``scratch``, ``builtin`` and
torch.nn the names agree. A module of somebody else may keep the projections of queries, keys and values apart: they
are then matched by the role in their name.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from scratch.validation import ArgumentValueError

__all__ = ["CopiedWeights", "WeightsDoNotMatchError", "copy_weights", "randomize_parameters"]

Module = TypeVar("Module", bound=nn.Module)

ROLES = {
    "q_proj": {"q", "qs", "query", "queries"},
    "k_proj": {"k", "ks", "key", "keys"},
    "v_proj": {"v", "vs", "value", "values"},
    "out_proj": {"o", "out", "output", "combine", "concat", "final", "unify"},
}
# What the names of projections are padded with: W_q, q_linear, to_q, fc_out, unifyheads, ...
PADDING = (
    "weight",
    "w",
    "projection",
    "proj",
    "linear",
    "lin",
    "layer",
    "dense",
    "fc",
    "to",
    "transform",
    "c",
    "heads",
)

GAINS = {"a", "alpha", "g", "gain", "gamma", "scale", "weight"}


class WeightsDoNotMatchError(ArgumentValueError):
    """Two modules hold weights that cannot be told which goes where."""


@dataclass(frozen=True)
class CopiedWeights:
    """What ``copy_weights`` did.

    Args:
        pairs: (name in the source, name in the target) for all that was copied; a part of a packed matrix is written
            ``in_proj_weight[0:33]``.
        left_alone: Buffers that only one side has: constants of that implementation, such as a causal mask.
    """

    pairs: tuple[tuple[str, str], ...]
    left_alone: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{source} -> {target}" for source, target in self.pairs]
        return "\n".join(lines + [f"{name} left alone (a buffer of one side)" for name in self.left_alone])


class _Slot(NamedTuple):
    """A weight, or the part of a packed weight that plays one role."""

    name: str
    values: Tensor


@dataclass
class _Match:
    pairs: list[tuple[_Slot, _Slot]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def copy_weights(source: nn.Module, target: nn.Module) -> CopiedWeights:
    """Copy every weight of one module into another, or none at all.

    Equal names are matched first. What remains is matched by role: torch.nn's packed ``in_proj_weight`` and
    ``in_proj_bias``, its ``q_proj_weight``, ``k_proj_weight``, ``v_proj_weight``, and ``nn.Linear`` children called
    q_proj, Wq, w_q, query, to_q, ... Values are converted to the dtype and device of the target.

    Args:
        source: Any module.
        target: Another one with the same weights, perhaps packed in another way.

    Returns:
        Which name went where.

    Raises:
        WeightsDoNotMatchError: If a shape differs, if two weights claim one role, or if a parameter is left over on
            either side: a ValueError (also a RuntimeError) that lists the names. Nothing has been copied then.

    In torch.nn: ``target.load_state_dict(source.state_dict())``, which knows equal names only.

    >>> linears = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("W_q", "W_k", "W_v", "W_o")})
    >>> print(copy_weights(nn.MultiheadAttention(6, 2), linears))
    in_proj_weight[0:6] -> W_q.weight
    in_proj_weight[6:12] -> W_k.weight
    in_proj_weight[12:18] -> W_v.weight
    in_proj_bias[0:6] -> W_q.bias
    in_proj_bias[6:12] -> W_k.bias
    in_proj_bias[12:18] -> W_v.bias
    out_proj.weight -> W_o.weight
    out_proj.bias -> W_o.bias
    """
    _check_initialised(source, "source")
    _check_initialised(target, "target")
    buffers, left_alone = _match_buffers(source, target)
    match = _match_parameters(source, target)
    pairs = match.pairs + buffers
    problems = match.problems + _misfits(pairs)
    if problems:
        raise WeightsDoNotMatchError("the weights cannot be copied, nothing was: " + "; ".join(problems))
    with torch.no_grad():
        for old, new in pairs:
            new.values.copy_(old.values)
    return CopiedWeights(tuple((old.name, new.name) for old, new in pairs), left_alone)


def randomize_parameters(module: Module, *, seed: int = 0, generator: torch.Generator | None = None) -> Module:
    """Fill every parameter with random numbers, in place, so that a forgotten one is noticed.

    At default initialisation the biases of torch.nn's attention are 0 and its gains 1: whoever forgets them computes
    the same. Here gains are uniform in 0.5 ... 1.5, biases uniform in -0.5 ... 0.5, matrices normal with variance
    1 / fan_in and single tokens (``bias_k``) normal with variance 1: inputs of variance 1 then give scores of a
    variance near 1, a softmax that is neither flat nor saturated.

    Numbers are drawn on the CPU in float64 and then converted: modules with the same parameters in the same order get
    the same values on every device, up to the rounding of their dtype.

    Args:
        module: Any module; parameters that share memory are drawn once.
        seed: Where the random numbers start.
        generator: Stands in for the seed; on the CPU.

    Returns:
        The module itself.

    In torch.nn: the functions of ``torch.nn.init``.

    >>> attention = randomize_parameters(nn.MultiheadAttention(6, 2), seed=1)
    >>> bool((attention.in_proj_bias != 0).all())
    True
    """
    _check_initialised(module, "module")
    generator = torch.Generator().manual_seed(seed) if generator is None else generator
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(_random_values(name, parameter.shape, generator))
    return module


def _random_values(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    if len(shape) <= 1:
        is_gain = not shape or name.rpartition(".")[2].rstrip("_0123456789").lower() in GAINS
        return torch.rand(shape, generator=generator, dtype=torch.float64) + (0.5 if is_gain else -0.5)
    is_token = len(shape) > 2 and math.prod(shape[:-1]) == 1
    fan_in = 1 if is_token else max(math.prod(shape[1:]), 1)
    return torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(fan_in)


def _check_initialised(module: nn.Module, role: str) -> None:
    lazy = [name for name, x in (*module.named_parameters(), *module.named_buffers()) if is_lazy(x)]
    if lazy:
        raise WeightsDoNotMatchError(f"the {role} has no shapes yet for {', '.join(lazy)}: call the module once first")


def _misfits(pairs: list[tuple[_Slot, _Slot]]) -> list[str]:
    misfits = [
        f"{old.name} of the source is {tuple(old.values.shape)}, {new.name} of the target {tuple(new.values.shape)}"
        for old, new in pairs
        if old.values.shape != new.values.shape
    ]
    places: dict[int, tuple[_Slot, _Slot]] = {}
    for old, new in pairs:  # one weight under two names can hold only one value
        first_old, first_new = places.setdefault(new.values.data_ptr(), (old, new))
        if first_new.values.shape == new.values.shape and not torch.equal(first_old.values, old.values):
            misfits.append(
                f"{first_new.name} and {new.name} of the target are one weight, {first_old.name} and {old.name} of the "
                f"source differ"
            )
    return misfits


def _match_buffers(source: nn.Module, target: nn.Module) -> tuple[list[tuple[_Slot, _Slot]], tuple[str, ...]]:
    old, new = (dict(module.named_buffers(remove_duplicate=False)) for module in (source, target))
    shared = [(_Slot(name, old[name]), _Slot(name, new[name])) for name in old if name in new]
    return shared, tuple(name for name in (*old, *new) if name not in old or name not in new)


def _match_parameters(source: nn.Module, target: nn.Module) -> _Match:
    old, new = (dict(module.named_parameters(remove_duplicate=False)) for module in (source, target))
    match = _Match([(_Slot(name, old[name]), _Slot(name, new[name])) for name in old if name in new])
    old_slots, new_slots = _slots(source, new), _slots(target, old)
    for slots, side in ((old_slots, "source"), (new_slots, "target")):
        match.problems += [
            f"{' and '.join(slot.name for slot in claimants)} of the {side} all look like {role}"
            for role, claimants in slots.items()
            if len(claimants) > 1
        ]
    for slots, others, side in ((old_slots, new_slots, "source"), (new_slots, old_slots, "target")):
        left_over = [slot.name for role, claimants in slots.items() if role not in others for slot in claimants]
        match.problems += [f"left over in the {side}: {', '.join(left_over)}"] if left_over else []
    match.pairs += [(slots[0], new_slots[role][0]) for role, slots in old_slots.items() if role in new_slots]
    return match


def _slots(module: nn.Module, matched: dict[str, nn.Parameter]) -> dict[str, list[_Slot]]:
    """Say which role each parameter plays that is not matched by its name; those without a role keep their name."""
    roles = _linear_roles(module)
    slots: dict[str, list[_Slot]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in matched:
            for role, slot in _parts(module, name, parameter, roles):
                slots.setdefault(role, []).append(slot)
    return slots


def _parts(module: nn.Module, name: str, parameter: nn.Parameter, roles: dict[str, str]) -> Iterator[tuple[str, _Slot]]:
    path, _, last = name.rpartition(".")
    prefix = path + "." if path else ""
    if last in ("in_proj_weight", "in_proj_bias"):
        kind, start = last.removeprefix("in_proj_"), 0
        for role, size in zip(("q_proj", "k_proj", "v_proj"), _packed_sizes(module, path, parameter), strict=True):
            part = _Slot(f"{name}[{start}:{start + size}]", parameter[start : start + size])
            yield f"{prefix}{role}.{kind}", part
            start += size
    elif last in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        yield f"{prefix}{last.removesuffix('_weight')}.weight", _Slot(name, parameter)
    else:
        yield f"{roles[path]}.{last}" if path in roles else name, _Slot(name, parameter)


def _packed_sizes(module: nn.Module, path: str, packed: Tensor) -> tuple[int, int, int]:
    """Give the rows of queries, keys and values; values may have a size of their own, which out_proj tells."""
    out_proj = getattr(module.get_submodule(path), "out_proj", None)
    v_dim = out_proj.in_features if isinstance(out_proj, nn.Linear) else packed.size(0) // 3
    qk_dim = (packed.size(0) - v_dim) // 2
    return qk_dim, qk_dim, packed.size(0) - 2 * qk_dim


def _linear_roles(module: nn.Module) -> dict[str, str]:
    """Find the Linears that project queries, keys, values and output, as {path: path of the role}."""
    children: dict[str, dict[str, str]] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        if path and isinstance(child, nn.Linear):
            named = re.sub(r"(\.\d+)+$", "", path)  # to_out.0 is called to_out
            children.setdefault(named.rpartition(".")[0], {})[path] = named.rpartition(".")[2]
    roles: dict[str, str] = {}
    for parent, names in children.items():
        found = {path: role for path, name in names.items() if (role := _role(name)) is not None}
        if {"q_proj", "k_proj", "v_proj"} <= set(found.values()):
            nameless = [path for path, name in names.items() if not _words(name)]
            if "out_proj" not in found.values() and len(nameless) == 1:
                found[nameless[0]] = "out_proj"
            roles |= {path: f"{parent}.{role}" if parent else role for path, role in found.items()}
    return roles


def _role(name: str) -> str | None:
    words = _words(name)
    roles = [role for role, meanings in ROLES.items() if words and words <= meanings]
    return roles[0] if roles else None


def _words(name: str) -> set[str]:
    """Cut a name into words without padding: W_q, wq, WQ and q_linear all become q."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {bare for word in words if (bare := _without_padding(word.lower()))}


def _without_padding(word: str) -> str:
    meanings = set().union(*ROLES.values(), [""])
    bare = [word.removeprefix(padding) for padding in PADDING] + [word.removesuffix(padding) for padding in PADDING]
    return next((x for x in bare if x in meanings and word not in meanings), word)
