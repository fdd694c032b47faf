"""Write a function that builds masks down in torch's own, and let the comparison of what it builds decide."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.equivalent.comparing import Case
from equivalence_tests.checker.equivalent.holding import source_of
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.part_holding import WrittenPart, hold_part, joined_output, unread
from equivalence_tests.checker.equivalent.part_writing import PartWriter, Text
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.parts.drawing import CallOfRoles, Drawn
from equivalence_tests.checker.parts.mask_meanings import Meaning, samples_of
from equivalence_tests.checker.reporting.report import Report

KINDS = {"pad_id": "int", "size": "int", "key_size": "int", "samples": "int", "heads": "int", "window": "int"}
KINDS |= {"prefix": "int", "shape": "tuple[int, int]", "device": "str", "dtype": "torch.dtype"}
SAYS_WHAT = ("window", "prefix", "pad_id", "lengths")  # what is hidden, and nothing else
PER_HEAD = "(batch, heads, query, key)"
# How a mask of (batch, query, key) is laid out; that of one query and key alone has no axis for the samples.
SHAPES: Mapping[str, tuple[str, str]] = {
    "(batch, query, key)": ("", ""),
    "(batch, 1, query, key)": ("[:, None]", ""),
    "(batch, heads, query, key)": ("[:, None].expand(-1, {heads}, -1, -1)", ""),
    "(batch * heads, query, key)": (".repeat_interleave({heads}, 0)", ""),
    "(heads * batch, query, key)": (".repeat({heads}, 1, 1)", ""),
    "(query, key, batch)": (".permute(1, 2, 0)", ""),
    "(query, key)": ("[0]", " "),
    "(1, query, key)": ("[:1]", "[None]"),
    "(1, 1, query, key)": ("[:1, None]", "[None, None]"),
    "(batch, key)": ("[:, 0]", ""),
    "(batch, 1, key)": ("[:, :1]", ""),
    "(batch, 1, 1, key)": ("[:, None, :1]", ""),
    "(1, key, batch)": ("[:, :1].permute(1, 2, 0)", ""),
    "(batch, key, 1)": ("[:, 0, :, None]", ""),
    "(batch, query)": ("[:, :, -1]", ""),
    "(key, batch)": ("[:, 0].T", ""),
    "(key,)": ("[0, 0]", ""),
    "(batch, query, 1)": ("[:, :, :1]", ""),
    "(batch, 1, query, 1)": ("[:, None, :, :1]", ""),
}


def hold_masks(
    report: Report,
    function: Callable[..., Any],
    plan: CallOfRoles,
    masks: Sequence[tuple[Meaning | None, Tensor]],
    draws: Sequence[Drawn],
) -> None:
    """Hold masks against what torch builds.

    Args:
        report: Receives the equivalent and the verdict.
        function: What builds them.
        plan: How it is called.
        masks: What each of them means, and what it was in the first call.
        draws: Fresh ones, to be compared.
    """
    try:
        source = _source(report, function, plan, masks)
    except UnreadError as why:
        unread(report, str(why))
        return
    idle = [name for name, role in plan.roles if role in SAYS_WHAT and not _is_used(name, source.equivalent.source)]
    if idle:
        report.verdict = "unchecked"
        report.reason = f"Nothing that it builds depends on its argument {idle[0]}."
        return
    hold_part(report, source, _cases(function, plan, draws), output=joined_output)


def _is_used(name: str, source: str) -> bool:
    return len(re.findall(rf"\b{name}\b", source)) > 1  # beside its own place among the arguments


def _source(
    report: Report, function: Callable[..., Any], plan: CallOfRoles, masks: Sequence[tuple[Meaning | None, Tensor]]
) -> WrittenPart:
    defaults = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    given = {
        name: "" if defaults[name] is inspect.Parameter.empty else f" = {defaults[name]!r}" for name, _ in plan.roles
    }
    arguments = ", ".join(f"{name}: {KINDS.get(role, 'Tensor')}{given[name]}" for name, role in plan.roles)
    writer = PartWriter(report.target.rpartition("/")[2], Parameters({}), nn.Module(), arguments, is_function=True)
    written = [_mask(plan, one, output) for one, output in masks if one is not None]
    names = [f"may_attend_{place + 1}" if len(written) > 1 else "may_attend" for place in range(len(written))]
    returned = []
    for name, (text, encoded) in zip(names, written, strict=True):
        writer.lines.append(f"{name} = {text}  # True = may look")
        returned.append(encoded.replace("MASK", name))
    inner = getattr(function, "func", function)
    return WrittenPart(writer.equivalent(writer.source(Text(", ".join(returned), writer)), source_of(inner)))


def _mask(plan: CallOfRoles, mask: Meaning, output: Tensor) -> tuple[str, str]:
    """Write what may be looked at, and what is made of that."""
    if not mask.text:
        raise UnreadError(f"what it hides cannot be written down ({mask.words})")
    laid, alone = SHAPES[mask.shape]
    of_samples = any(bracket in mask.text for bracket in ("[:, None]", "[..., None]"))
    if mask.text.endswith(")[:, None]") and mask.shape == "(batch, key)":
        text = mask.text.removesuffix("[:, None]").strip("~")[1:-1]
        text = f"~({text})" if mask.text.startswith("~") else text
    elif of_samples and "torch.ones(" in mask.text and "{heads}" not in laid:
        text = f"({mask.text}){laid}" if laid else mask.text
    elif alone and not of_samples:
        text = f"({mask.text}){alone.strip()}" if "|" in mask.text and alone.strip() else mask.text + alone.strip()
    else:
        heads = plan.named("heads") or (str(output.size(1)) if mask.shape == PER_HEAD else "")
        if "{heads}" in laid and not heads:
            raise UnreadError("nothing says for how many heads it is repeated")
        query, key = mask.lengths
        text = f"({mask.text}).expand({samples_of(plan)}, {query}, {key}){laid.format(heads=heads)}"
    return text, _encoded(mask, output)


def _encoded(mask: Meaning, output: Tensor) -> str:
    dtype = "" if output.dtype == torch.get_default_dtype() else f", dtype={output.dtype}"
    if mask.encoding == "additive":
        fill = float(output.min())
        said = "-torch.inf" if fill == -torch.inf else repr(fill)
        hidden = "MASK" if "mask_inverted" in mask.mistakes else "~MASK"
        return f"torch.zeros(MASK.shape{dtype}, device=MASK.device).masked_fill({hidden}, {said})"
    meaning, _, kind = mask.encoding.partition("_")
    text = "MASK" if meaning == "look" else "~MASK"
    return f"({text}).to({output.dtype})".replace("(MASK)", "MASK") if kind else text


def _cases(function: Callable[..., Any], plan: CallOfRoles, draws: Sequence[Drawn]) -> Iterator[Case]:
    for drawn in draws:
        other = replace(drawn, window=3, pad_id=4)
        kwargs = {name: other.value(role, plan.layout) for name, role in plan.roles}
        words = f"{drawn.first.size(0)} of {drawn.first.size(1)} and {drawn.second.size(1)} tokens"
        yield Case(Call(function, (), kwargs), None, words)
