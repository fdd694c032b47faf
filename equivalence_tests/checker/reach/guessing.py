"""What an argument of a constructor may want: by its name, its annotation, and what the constructor does with it."""

import ast
import inspect
import re
import typing
from typing import Any

from torch import nn

from equivalence_tests.checker.reach.arguments import (
    AMBIGUOUS,
    COUNTS_KEY_HEADS,
    DROPOUT,
    FEEDS_FORWARD,
    GRID,
    IMAGE_SIDE,
    MAX_LEN,
    PATCH_SIDE,
    Sizes,
    first_match,
    value_for,
)
from equivalence_tests.checker.reach.configs import ImitatedConfig
from equivalence_tests.checker.reach.proposing import compared_by, keys_for, nodes_of, parameters_of, used_as
from equivalence_tests.checker.reach.sublayer import SelfAttention, called_with_one
from equivalence_tests.checker.reporting.lines import source_of

SIDES = (0, PATCH_SIDE, 3, IMAGE_SIDE)  # where a name means the side of a square, or how far one is shifted
FEW = 9  # no width of a model is as small
ASKED_FOR = re.compile(r"norm|scale|proj|bias|residual")  # what torch has; other switches stay off
COUNT = re.compile(r"(^|_)num_")
SQUARED = r"\b{0}\s*(-\s*1\s*\)\s*)?(\*\*\s*2|\*\s*\(?[\w.* ]*{0})\b"  # a name, in the text of a file


def value_of(target: Any, name: str, sizes: Sizes) -> tuple[bool, Any]:
    """Say what an argument probably wants, by its name, or by what the constructor does with it."""
    known, value = value_for(name, sizes)
    use, _, whole = used_as(target).get(name, "").partition(" ")
    keys = ast.literal_eval(whole) if use == "accepts" else keys_for(target, name)
    if keys:
        return True, value if value in keys else keys[0]
    letter = len(name) == 1
    use = use if letter or not known or value == sizes.embed_dim else ""
    of_heads = value_for(whole, sizes)[1] == sizes.num_heads
    divisor = sizes.key_heads if of_heads else sizes.num_heads if letter else sizes.head_dim
    divisor = PATCH_SIDE if value_for(whole, sizes)[1] == IMAGE_SIDE else divisor
    used = {"drops": DROPOUT, "divides": divisor, "repeats": sizes.num_layers, "counts": 0}
    used["decides"] = bool(ASKED_FOR.search(name))
    return (True, used[use]) if use in used else (known, value)


def override(parameter: inspect.Parameter, sizes: Sizes, target: Any = None) -> list[Any]:
    """Give sizes to optional arguments too, where the name says so; flags and other switches keep their default."""
    default = parameter.default
    if parameter.name == "device" and default is not None:
        return ["cpu"]  # some default to a GPU
    known, value = value_of(target, parameter.name, sizes)
    if re.search(COUNTS_KEY_HEADS, parameter.name.lower()) and (default is None or type(default) is int):
        return [value]
    others = [] if target is None else [value_for(p.name, sizes)[1] for p in parameters_of(target)]
    ambiguous = first_match(parameter.name, AMBIGUOUS, None)
    if ambiguous and sizes.embed_dim not in others and sizes.embed_dim in ambiguous(sizes):
        value = sizes.embed_dim  # nothing else says how wide tokens are
    wanted_number = isinstance(default, int | float) and not isinstance(default, bool)
    if parameter.name == "k" and wanted_number and default < FEW:
        return []  # of the largest, or of neighbours: no width
    if known and wanted_number and isinstance(value, int | float) and not isinstance(value, bool):
        return [] if re.search(r"eps|base$|theta|pad|window|shift", parameter.name.lower()) else [value]
    return []


def guesses(parameter: inspect.Parameter, sizes: Sizes, target: Any) -> list[Any]:
    """List the numbers, names and layers that a required argument may want."""
    name, asked = parameter.name.lower(), parameter.annotation
    known, value = value_of(target, parameter.name, sizes)
    runs = used_as(target).get(parameter.name) == "runs"
    if name.endswith("scale") and asked is not bool and used_as(target).get(parameter.name) != "decides":
        return [sizes.head_dim**-0.5]  # tried otherwise where the scores are divided by it
    pairs = used_as(target).get(parameter.name) == "pairs"
    if pairs or (typing.get_origin(asked) is tuple and typing.get_args(asked) == (int, int)):  # of an image, or a part
        return [(2, 4) if "window" in name else (value, value) if value in SIDES else GRID]
    compared = compared_by(target).get(parameter.name, [])
    if words := [*dict.fromkeys(x for x in compared if isinstance(x, str))]:
        return words
    if ambiguous := first_match(name, AMBIGUOUS, None):
        squared = re.search(SQUARED.format(name), source_of(inspect.getmodule(target) or target))
        return [x for x in ambiguous(sizes) if not squared or x not in (MAX_LEN, sizes.embed_dim)]  # a side is short
    if isinstance(value, str) and (runs or re.search("Callable|Module", str(asked))):  # an activation, or its name
        return [nn.ReLU(), value]
    if runs and re.search(FEEDS_FORWARD, name):  # that of torch's layers, where no class beside is one
        width, hidden = sizes.embed_dim, sizes.ff_dim
        return [nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))]
    if known:
        return [value] if value != sizes.embed_dim else [value, (value,)]
    alone = runs and [*used_as(target).values()].count("runs") == 1
    alone = alone and called_with_one(nodes_of(target), f"self.{parameter.name}")
    found: list[Any] = [SelfAttention(sizes.embed_dim, sizes.num_heads)] if alone else []
    found += [None] * compared.count(None)
    found += [sizes.num_layers] * bool(COUNT.search(name))
    found += [sizes.embed_dim, sizes.key_heads, sizes.num_heads, sizes.head_dim, DROPOUT, False, None]
    return [*found, ImitatedConfig(sizes)]
