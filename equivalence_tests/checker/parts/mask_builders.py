"""Check code that builds masks: try what it takes, compare what it gives with every mask that it could mean, write it.

Token ids, lengths and sizes are drawn so that no two axes are alike and padding has holes. A mask is read when one
reading, right or with known mistakes, gives it on all draws, in one shape and one meaning of its numbers.
"""

import functools
import inspect
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.ran import frames_where, operations_of
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.equivalent.comparing import Case
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.part_holding import WrittenPart, hold_part, joined_output
from equivalence_tests.checker.equivalent.texts import Code, bracketed
from equivalence_tests.checker.equivalent.writer import Text, Writer, signature_of
from equivalence_tests.checker.intended import accepted
from equivalence_tests.checker.mistakes import found_mistake, named_mistake
from equivalence_tests.checker.parts.drawing import KINDS, OF_BOOLS, CallOfRoles, Drawn
from equivalence_tests.checker.parts.kinds import BUILDER_NAME
from equivalence_tests.checker.parts.mask_meanings import (
    COMPARED,
    READ,
    ROWS_ALONE,
    Meaning,
    draws_of,
    evaluated,
    meanings,
    number_of,
)
from equivalence_tests.checker.parts.names import words_of
from equivalence_tests.checker.reach.arguments import MASK_ROLES, first_match
from equivalence_tests.checker.reach.construction import build
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.masking import COUNTS, ENCODINGS, SHAPES, in_shape
from equivalence_tests.checker.reach.proposing import compared_by, parameters_of, ranked
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reporting.findings import CheckResult, Exercise
from equivalence_tests.checker.reporting.lines import code_lines, source_of
from equivalence_tests.checker.reporting.report import Report

# What is tried where a name says nothing: one sequence, another, or something else.
SEQUENCES = ("ids", "size", "key_ids", "key_size")
UNKNOWN = (*SEQUENCES, "lengths", "keep", "pad_id", "vectors", "window")
KEEP_LAYOUTS = ("(batch, len)", "(batch, 1, len)", "(batch, 1, 1, len)")
TORCH_WORDS = "attn_mask (query, key), or key_padding_mask (batch, key): True = may not look"
SHOWN = "gives your mask, entry by entry, on 10 sequences of other lengths; no right mask does"
STRONG = -1e4
SAYS_WHAT = ("window", "prefix", "pad_id", "lengths")  # what is hidden, and nothing else
MOST_CALLS = 200
ANOTHER = "another "  # string than those with which code compares an argument


@dataclass(frozen=True)
class Attempt:
    """One way to call a builder, what came back, and what each of the masks means; None where nothing fits."""

    plan: CallOfRoles
    masks: list[Meaning | None]
    outputs: list[Tensor]

    @property
    def badness(self) -> tuple[int, int]:
        """Count what was not understood, and the mistakes in the rest; masks that hide nothing do not count."""
        hiding = [mask for mask in self.masks if mask is None or mask.words != "hides nothing"]
        unread = hiding.count(None) if hiding else len(self.masks)
        return unread, sum(len(mask.mistakes) for mask in hiding if mask)


def mask_methods(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """List the methods of the user's own class that build masks, bound to the instance."""
    own = (owner for owner in type(module).__mro__ if not owner.__module__.startswith(("torch", "builtins")))
    for name, member in (
        pair for owner in own for pair in vars(owner).items() if BUILDER_NAME.search(words_of(pair[0]))
    ):
        if isinstance(member, staticmethod | classmethod | FunctionType):
            yield name, getattr(module, name)


def examine_mask_builder(found: Any, name: str, intended: Mapping[str, str] | None = None) -> Report:
    """Say which mask each output of a function or method is, in which shape and meaning, and what is wrong with it.

    Raises:
        CannotCheckError: If it cannot be called, or gives no mask.
    """
    first, *others = _ways(_bound(found))
    report = _examined(first[1], name, intended)
    for said, function in others:
        try:
            _add_option(report, said, _examined(function, name, intended))
        except CannotCheckError as error:
            report.coverage += [Exercise(said, False, str(error))] if not said.startswith(ANOTHER) else []
    return report


def _ways(function: Callable[..., Any]) -> list[tuple[str, Callable[..., Any]]]:
    """Give the builder with each string with which it compares an argument, in words; by itself where there is none."""
    compared = compared_by(inspect.unwrap(getattr(function, "__func__", function)))
    ways: list[tuple[str, Callable[..., Any]]] = []
    for parameter in parameters_of(function):
        values = [x for x in dict.fromkeys(compared.get(parameter.name, ())) if isinstance(x, str)]
        named = {f"{parameter.name}={x!r}": x for x in values if x != parameter.default}
        named |= (
            {f"{ANOTHER}{parameter.name}": ANOTHER} if values else {}
        )  # which code refuses, or does something else for
        ways += [("", function)] if values and parameter.default is not parameter.empty else []
        ways += [(said, functools.partial(function, **{parameter.name: x})) for said, x in named.items()]
    return ways or [("", function)]


def _add_option(report: Report, said: str, other: Report) -> None:
    """Add what is said of a builder that is called with another string."""
    report.findings += [replace(one, evidence=f"{one.evidence}; called with {said}") for one in other.findings]
    report.conventions += [(f"{said}: {what}" if what else "", here, there) for what, here, there in other.conventions]
    left = [Exercise(said, False, other.reason)] if other.verdict == "unchecked" else other.not_exercised
    report.coverage += left
    if report.findings:
        report.verdict, report.reason = "deviates", ""
    elif report.verdict == "equal" and left:
        report.verdict = "partial"


def _examined(function: Callable[..., Any], name: str, intended: Mapping[str, str] | None) -> Report:
    draws = draws_of(_pads_near(function))
    report = Report(name, "mask builder")
    errors: list[str] = []
    best = _best_attempt(function, draws, errors)
    if best is None:
        answers = "; ".join(dict.fromkeys(errors)) or "it takes nothing that a mask is built from"
        raise CannotCheckError(f"no way to call {name} as a mask builder was found: {answers}")
    ran = operations_of(lambda: best.plan.call(function, draws[0]))
    report = accepted(_reported(report, best, ran), intended or {})
    if report.verdict == "equal":
        _hold_masks(report, function, best, draws_of(_pads_near(function), COMPARED))
    return report


def _bound(found: Any) -> Callable[..., Any]:
    """Bind a method that was named through its class to an instance of that class."""
    parameters = list(inspect.signature(found).parameters)
    if inspect.ismethod(found) or parameters[:1] != ["self"]:
        return found
    owner: Any = sys.modules[found.__module__]
    for part in found.__qualname__.split(".")[:-1]:
        owner = getattr(owner, part)
    instance, _ = next(iter(build(owner)))
    return functools.partial(found, instance)


def _pads_near(function: Callable[..., Any]) -> set[int]:
    """List the numbers that are called pad in the globals around a function, or on its instance."""
    inner = getattr(function, "func", function)
    instance = getattr(function, "__self__", None) or next(iter(getattr(function, "args", ())), None)
    names = {**getattr(inner, "__globals__", {}), **getattr(instance, "__dict__", {})}
    return {x for name, x in names.items() if "pad" in name.lower() and type(x) is int}


def _best_attempt(function: Callable[..., Any], draws: Sequence[Drawn], errors: list[str]) -> Attempt | None:
    """Call with every assignment of roles, in each layout, until one is read; what the names say is believed."""
    best: Attempt | None = None
    for number, roles in enumerate(itertools.islice(_role_lists(parameters_of(function)), MOST_CALLS)):
        plans = (CallOfRoles(roles, layout) for layout in _layouts({role for _, role in roles}))
        attempts = (made for plan in plans if (made := _attempt(function, plan, draws, errors)) is not None)
        found = min(attempts, key=lambda made: made.badness, default=None)
        if found is not None and (number == 0 or found.badness == (0, 0)):
            return found
        best = best or found
    return best


def _attempt(
    function: Callable[..., Any], plan: CallOfRoles, draws: Sequence[Drawn], errors: list[str]
) -> Attempt | None:
    outputs = attempt(lambda: [plan.call(function, drawn) for drawn in draws], errors)
    if outputs is None or not outputs[0] or len({len(o) for o in outputs}) > 1:
        return None
    return Attempt(plan, [_read(plan, draws, list(same)) for same in zip(*outputs, strict=True)], outputs[0])


def _layouts(roles: set[str]) -> list[str]:
    if "keep" in roles:
        return [f"{layout}{bools}" for bools in ("", OF_BOOLS) for layout in KEEP_LAYOUTS]
    return ["(batch, len)", "(len, batch)", "(len,)"] if roles & {"ids", "key_ids"} else [""]


def _role_lists(parameters: list[inspect.Parameter]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Propose roles for the required parameters, and for optional ones that name the padding or another device."""
    defaults = {"pad_id": int, "device": str}
    known = {p.name: first_match(p.name, MASK_ROLES, "") for p in parameters}
    asked = [p.name for p in parameters if p.default is p.empty or type(p.default) is defaults.get(known[p.name])]
    for roles in ranked([_choices(known[name]) for name in asked]):
        sequences = [role for role in roles if role in SEQUENCES]
        if len(sequences) == len(set(sequences)):
            yield tuple(zip(asked, roles, strict=True))


def _choices(role: str) -> list[str]:
    """List what an argument may be given whose name says this, or nothing; what only a name asks for is believed."""
    believed = role == "pad_id" or role not in ("", *UNKNOWN)
    return [role] if believed else list(dict.fromkeys(filter(None, (role, *UNKNOWN))))


def _read(plan: CallOfRoles, draws: Sequence[Drawn], masks: list[Tensor]) -> Meaning | None:
    """Find what a mask means: the reading with the fewest mistakes that gives it on all draws."""
    best: Meaning | None = None
    encodings = list(_encodings(masks))
    for meaning in meanings(plan, draws[0].first.unique().tolist()):
        if best is not None and len(best.mistakes) <= len(meaning.mistakes):
            break
        first = meaning.mask(plan, draws[0])
        for (encoding, looks, wrong), shape in itertools.product(encodings, _shapes(first.shape, masks[0].shape)):
            mistakes = (*meaning.mistakes, *wrong)
            if not _gives(first, shape, looks[0]) or (best is not None and len(best.mistakes) <= len(mistakes)):
                continue
            others = zip(draws[1:], looks[1:], strict=True)
            if all(_gives(meaning.mask(plan, drawn), shape, look) for drawn, look in others):
                best = replace(meaning, shape=shape, encoding=encoding, mistakes=mistakes)
    return best


@functools.cache
def _shapes(mask: torch.Size, found: torch.Size) -> list[str]:
    """List the shapes in which a mask of this size may have been handed over."""
    whole, heads = torch.ones(mask), max(found[0] // mask[0], 1)
    return [shape for shape in SHAPES if not shape.startswith(COUNTS) and in_shape(whole, shape, heads).shape == found]


def _gives(mask: Tensor, shape: str, look: Tensor) -> bool:
    """Whether a mask is another in this shape, where all is alike along each axis that the shape does not have."""
    axes = [place for place, name in enumerate(("batch", "query", "key")) if name not in shape]
    laid_out = in_shape(mask, shape, max(look.size(0) // mask.size(0), 1))
    return torch.equal(laid_out, look) and all(bool((mask == mask.narrow(axis, 0, 1)).all()) for axis in axes)


def _encodings(masks: list[Tensor]) -> Iterator[tuple[str, list[Tensor], tuple[str, ...]]]:
    """Turn masks into True = may look, in each way that their numbers allow; with the mistake that this would be."""
    values = torch.cat([x.double().flatten() for x in masks]).unique()
    kind = "" if masks[0].dtype == torch.bool else "_float" if masks[0].is_floating_point() else "_int"
    if bool(((values == 0) | (values == 1)).all()):
        yield "look" + kind, [x.bool() for x in masks], ()
        yield "block" + kind, [~x.bool() for x in masks], ()
    elif len(values) == 2 and 0 in values and kind == "_float":
        fill = float(values[values != 0])
        weak = () if fill <= STRONG else ("mask_fill_too_small",)
        yield "additive", [x == 0 for x in masks], weak
        yield "additive", [x != 0 for x in masks], (*weak, "mask_inverted")


def _reported(report: Report, attempt: Attempt, ran: list[Operation]) -> Report:
    plan, masks = attempt.plan, attempt.masks
    ids = f"token ids {plan.layout}"
    kept = f"{'True and False' if OF_BOOLS in plan.layout else '0 and 1'}, {plan.layout.removesuffix(OF_BOOLS)}"
    words = {"ids": ids, "key_ids": ids, "keep": kept, "vectors": "(batch, len, features)"}
    given = ", ".join(f"{name}: {words.get(role, role.replace('_', ' '))}" for name, role in plan.roles)
    report.conventions.append(("arguments", given or "none", ""))
    for number, (mask, output) in enumerate(zip(masks, attempt.outputs, strict=True), start=1):
        label = f"mask {number}" if len(masks) > 1 else "mask"
        if mask is None or (len(masks) == 1 and mask.words == "hides nothing"):
            report.checks.append(CheckResult(label, "skipped", _unknown(output)))
        else:
            _report_one(report, label, mask, output, ran)
    unread = [f"{c.name}: {c.detail}" for c in report.checks if c.outcome == "skipped"]
    report.verdict = "deviates" if report.findings else "unchecked" if unread else "equal"
    report.reason = "" if report.verdict != "unchecked" else "; ".join(unread)
    return report


def _report_one(report: Report, label: str, mask: Meaning, output: Tensor, ran: list[Operation]) -> None:
    fill = float(output.min()) if mask.encoding == "additive" else -math.inf
    encoded = f"{mask.shape}, {ENCODINGS[mask.encoding]}" + (f" (here {fill:g})" if math.isfinite(fill) else "")
    report.conventions += [(label, mask.words, ""), ("", encoded, TORCH_WORDS)]
    report.checks.append(CheckResult(label, "failed" if mask.mistakes else "passed", ", ".join(mask.mistakes)))
    for name in mask.mistakes:
        stack = code_lines(frames_where(named_mistake(name).ran, ran))
        report.findings.append(found_mistake(name, {"fill": fill}, stack=stack, evidence=SHOWN))
    if "padded queries too" in mask.words:
        report.notes.append("the rows of padded queries hide everything: with -inf their softmax is NaN")
    if mask.words.endswith(ROWS_ALONE):
        why = "after the tokens, the causal mask hides it from them; in front of them, all would see it"
        report.coverage.append(Exercise("padding in front of the tokens", False, why))


def _unknown(output: Tensor) -> str:
    """Say what a mask that was not understood looks like."""
    if bool(output.double().isnan().any()):
        return "holds NaN"
    hides_all = not bool(output.double().isfinite().any())
    return "hides everything" if hides_all else f"no mask that is known: shape {tuple(output.shape)}, {output.dtype}"


# ------------------------------------------------------------------------------------------- in torch's own
def _hold_masks(report: Report, function: Callable[..., Any], best: Attempt, draws: Sequence[Drawn]) -> None:
    """Hold masks that were read against what torch builds in fresh calls."""
    plan = best.plan
    masks = [(mask, one) for mask, one in zip(best.masks, best.outputs, strict=True) if mask is not None]
    arguments = signature_of(function, {name: KINDS.get(role, "Tensor") for name, role in plan.roles})
    writer = Writer(report.target.rpartition("/")[2], Parameters({}), nn.Module(), arguments, is_function=True)
    returned = []
    for place, (mask, output) in enumerate(masks, start=1):
        name, heads = f"may_attend_{place}" if len(masks) > 1 else "may_attend", len(output) // READ[0][0]
        writer.lines.append(f"{name} = {_written(plan, mask, heads, draws)}  # True = may look")
        returned.append(_as_given(mask, output).replace("MASK", name))
    inner = getattr(function, "func", function)
    part = WrittenPart(writer.equivalent(writer.source(Text(", ".join(returned), writer)), source_of(inner)))
    asked, source = [name for name, role in plan.roles if role in SAYS_WHAT], part.equivalent.source
    # A name that is used stands there more often than in its own place among the arguments.
    idle = [name for name in asked if len(re.findall(rf"\b{name}\b", source)) < 2]
    if idle:
        report.verdict = "unchecked"
        report.reason = f"Nothing that it builds depends on its argument {idle[0]}."
        return
    hold_part(report, part, _cases(function, plan, draws), output=joined_output)


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


def _as_given(mask: Meaning, output: Tensor) -> str:
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
