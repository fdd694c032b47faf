"""What attention may do to queries and keys between projecting and scoring them: normalise them, rotate them.

torch.nn has neither. Both are right, so they belong to the reading of a class, not to its mistakes.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "BASE",
    "Options",
    "angles_of",
    "words_of",
    "base_of",
    "in_places",
    "inner_conventions",
    "norms_of_queries_and_keys",
    "normalise",
    "rms_norm",
    "rotate",
]

BASE = 10000.0
ANGLES = re.compile(r"freq|theta", re.IGNORECASE)
OF_QUERIES = re.compile(r"^(q|query)s?_?(layer_?)?(norm|ln)$|^(norm|ln|layer_?norm)_?(q|query)$", re.IGNORECASE)
OF_KEYS = re.compile(r"^(k|key)s?_?(layer_?)?(norm|ln)$|^(norm|ln|layer_?norm)_?(k|key)$", re.IGNORECASE)

Norm = Callable[[Tensor], Tensor]
Options = tuple[tuple[str, str], ...]


def norms_of_queries_and_keys(module: nn.Module) -> tuple[str, str] | None:
    """Find the paths of two norms that are called after queries and keys: q_norm and k_norm.

    >>> module = nn.ModuleDict({"q_norm": nn.LayerNorm(3), "k_norm": nn.LayerNorm(3), "norm": nn.LayerNorm(6)})
    >>> norms_of_queries_and_keys(module)
    ('q_norm', 'k_norm')
    """
    paths = [(path, path.rpartition(".")[2]) for path, child in module.named_modules() if _is_norm(child)]
    query = next((path for path, name in paths if OF_QUERIES.search(name)), None)
    key = next((path for path, name in paths if OF_KEYS.search(name)), None)
    return (query, key) if query is not None and key is not None else None


def _is_norm(module: nn.Module) -> bool:
    return not list(module.children()) and not isinstance(module, nn.Identity)


def inner_conventions(norms: tuple[str, str] | None, rotated: bool, rms: bool) -> list[Options]:
    """List what may be done to queries and keys, nothing last.

    Args:
        norms: From ``norms_of_queries_and_keys``.
        rotated: Whether something was seen that rotates.
        rms: Whether a norm without weights was seen.
    """
    normed = (*(("heads", "width") if norms is not None else ()), *(("rms",) if rms else ()), "no")
    turned = ("halves", "pairs", "no") if rotated else ("no",)
    both = [(("qk_norm", norm), ("rotary", turn)) for norm in normed for turn in turned]
    return [tuple(option for option in options if option[1] != "no") for options in both]


def base_of(module: Any) -> float:
    """Find the base of the angles: an attribute, or what kept frequencies tell; 10000 where nothing does.

    >>> module = nn.Module()
    >>> module.register_buffer("inv_freq", 500.0 ** -torch.arange(0, 1, 0.25, dtype=torch.float64))
    >>> round(base_of(module))
    500
    """
    for child in module.modules() if isinstance(module, nn.Module) else ():
        kept = {**vars(child), **dict(child.named_buffers(recurse=False))}
        for name, value in kept.items():
            if isinstance(value, int | float) and re.search(r"theta|base", name.lower()) and value > 1:
                return float(value)
            if isinstance(value, Tensor) and ANGLES.search(name) and _falls_from_one(value):
                return float(value[1].double() ** -len(value))  # base ** (-2 i / head_dim) at i = 1
    return BASE


def _falls_from_one(x: Tensor) -> bool:
    return x.dim() == 1 and len(x) > 1 and x.is_floating_point() and bool(x[0] == 1) and bool((x.diff() < 0).all())


def normalise(q: Tensor, k: Tensor, norms: tuple[Norm, Norm] | None) -> tuple[Tensor, Tensor]:
    """Call the norms of queries and keys, if they are called here."""
    return (q, k) if norms is None else (norms[0](q), norms[1](k))


def rms_norm(x: Tensor) -> Tensor:
    """Divide by the root of the mean square, without weights."""
    return F.rms_norm(x, x.shape[-1:])


def rotate(x: Tensor, role: str, how: str, base: float) -> Tensor:
    """Turn the elements of (b, h, l, d), two by two, by an angle that grows with the position.

    angle(position, i) = position * base^(-2 i / head_dim)

    Args:
        x: Queries, keys or values, by heads.
        role: Which of the three: "q", "k" or "v".
        how: "halves" joins element i with i + head_dim / 2, "pairs" joins 2 i with 2 i + 1. A mistake may follow:
            "halves_reversed", "halves_mixed", "halves_queries", "halves_keys", "halves_values".
        base: Of the angles.

    Source: Su et al. 2021, RoFormer, section 3.4.2.
    """
    layout, _, mistake = how.partition("_")
    turned = {"queries": "q", "keys": "k", "values": "qkv"}.get(mistake, "qk")
    if how == "no" or role not in turned:
        return x
    angles = in_places(angles_of(x, base), OTHER[layout] if mistake == "mixed" else layout)  # (l, d)
    return x * angles.cos() + _quarter_turn(x, layout) * angles.sin() * (-1 if mistake == "reversed" else 1)


OTHER = {"halves": "pairs", "pairs": "halves"}


def angles_of(x: Tensor, base: float) -> Tensor:
    """Give the angle of each position and pair of elements, (l, d / 2), for (..., l, d)."""
    steps = base ** -(torch.arange(0, x.size(-1), 2, dtype=x.dtype) / x.size(-1))
    return torch.outer(torch.arange(x.size(-2), dtype=x.dtype), steps)


def in_places(angles: Tensor, layout: str) -> Tensor:
    """Give both elements of a pair its angle, (l, d)."""
    return torch.cat((angles, angles), -1) if layout == "halves" else angles.repeat_interleave(2, -1)


def _quarter_turn(x: Tensor, layout: str) -> Tensor:
    """(a, b) -> (-b, a)."""
    if layout == "halves":
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def words_of(options: Mapping[str, str]) -> str:
    """Say what is done, for the report.

    >>> words_of({"qk_norm": "heads", "rotary": "pairs"})
    'normalised in each head, rotated by position (pairs of neighbours)'
    """
    return ", ".join(WORDS[option] for option in options.items() if option in WORDS)


WORDS = {
    ("qk_norm", "heads"): "normalised in each head",
    ("qk_norm", "width"): "normalised before they are split",
    ("qk_norm", "rms"): "normalised in each head, without weights",
    ("rotary", "halves"): "rotated by position (halves of a head)",
    ("rotary", "pairs"): "rotated by position (pairs of neighbours)",
}
