"""Write a function that builds masks down in torch's own, and let the comparison of what it builds decide."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.equivalent.comparing import Case
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.part_holding import WrittenPart, hold_part, joined_output
from equivalence_tests.checker.equivalent.texts import Code, bracketed
from equivalence_tests.checker.equivalent.writer import Text, Writer, signature_of
from equivalence_tests.checker.parts.drawing import KINDS, CallOfRoles, Drawn
from equivalence_tests.checker.parts.mask_meanings import READ, Meaning, evaluated, number_of
from equivalence_tests.checker.reach.masking import SHAPES, in_shape
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reporting.lines import source_of
from equivalence_tests.checker.reporting.report import Report

SAYS_WHAT = ("window", "prefix", "pad_id", "lengths")  # what is hidden, and nothing else


def hold_masks(
    report: Report,
    function: Callable[..., Any],
    plan: CallOfRoles,
    masks: Sequence[tuple[Meaning, Tensor]],
    draws: Sequence[Drawn],
) -> None:
    """Hold masks, what each means and what it was in the first call, against what torch builds in fresh calls."""
    arguments = signature_of(function, {name: KINDS.get(role, "Tensor") for name, role in plan.roles})
    writer = Writer(report.target.rpartition("/")[2], Parameters({}), nn.Module(), arguments, is_function=True)
    returned = []
    for place, (mask, output) in enumerate(masks, start=1):
        name, heads = f"may_attend_{place}" if len(masks) > 1 else "may_attend", len(output) // READ[0][0]
        writer.lines.append(f"{name} = {_written(plan, mask, heads, draws)}  # True = may look")
        returned.append(_encoded(mask, output).replace("MASK", name))
    inner = getattr(function, "func", function)
    part = WrittenPart(writer.equivalent(writer.source(Text(", ".join(returned), writer)), source_of(inner)))
    idle = [name for name, role in plan.roles if role in SAYS_WHAT and not _is_used(name, part.equivalent.source)]
    if idle:
        report.verdict = "unchecked"
        report.reason = f"Nothing that it builds depends on its argument {idle[0]}."
        return
    hold_part(report, part, _cases(function, plan, draws), output=joined_output)


def _is_used(name: str, source: str) -> bool:
    return len(re.findall(rf"\b{name}\b", source)) > 1  # beside its own place among the arguments


def _laid_out(plan: CallOfRoles, mask: Meaning, heads: str) -> Iterator[str]:
    """List what may be the mask in its shape, the shortest expression first."""
    text, behind = bracketed(Code(mask.text)), SHAPES[mask.shape].replace("heads", heads)
    plain = mask.text.lstrip("~")
    if plain.endswith(")[:, None]") and bracketed(Code(plain)) == plain:
        of_keys = mask.text.removesuffix("[:, None]")
        yield of_keys if of_keys.startswith("~") else of_keys[1:-1]
    yield from (mask.text, f"{text}[None]", f"{text}[None, None]")
    yield f"{text}{behind}".replace("[:, None][:, None]", "[:, None, None]")
    yield f"{text}.expand({number_of('samples', plan)}, {', '.join(mask.lengths)}){behind}"


def _written(plan: CallOfRoles, mask: Meaning, heads: int, draws: Sequence[Drawn]) -> str:
    """Write what may be looked at, in the shape in which it is handed over."""
    wanted = [in_shape(mask.mask(plan, drawn), mask.shape, heads) for drawn in draws]

    def fits(text: str) -> bool:
        found = attempt(lambda: [evaluated(text, plan, drawn) for drawn in draws])
        return found is not None and all(map(torch.equal, found, wanted))

    texts = list(_laid_out(plan, mask, plan.named("heads") or str(heads)))
    return next(filter(fits, texts), texts[-1])  # what fits nowhere, the comparison refuses


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
