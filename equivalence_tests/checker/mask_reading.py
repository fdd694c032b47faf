"""Find out in which form an attention takes its mask, and what is wrong where none hides what it says."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from equivalence_tests.checker.blame import related_sources, told_by
from equivalence_tests.checker.calling import Caller, random_inputs
from equivalence_tests.checker.construction import Sizes
from equivalence_tests.checker.diagnosis import Match, Observation, distance
from equivalence_tests.checker.loading import Source
from equivalence_tests.checker.masking import MaskForm, draw_masks, mask_forms
from equivalence_tests.checker.mistakes import MASK_MISTAKES, Mistake, mistake_for
from equivalence_tests.checker.observing import as_float64, observe, other_sizes
from equivalence_tests.checker.reference import attend
from equivalence_tests.checker.subject import Subject

__all__ = ["MaskReading", "read_masks"]

Observed = list[tuple[MaskForm, list[Observation]]]
HIDING = ("right", "fill_large")
IGNORED = "ignored"
COMPLEMENT = r"\b1(\.0*)?\s*-\s*\(?\w*mask"
# What code answers that wants an object with a mask in it; all it asks of a tensor itself exists.
HELD = "'Tensor' object has no attribute"


@dataclass(frozen=True)
class MaskReading:
    """How masks are read.

    Args:
        form: The form that was understood; None if there is no mask argument or none was.
        accepted: Forms that the code takes without an error.
        understood: Forms that hide what they say.
        mistakes: Masks mistakes that reproduce the output, all with the same numbers.
        error: How well they do.
        without: How far from it a mask that works is.
        square: Whether masks work only with as many queries as keys.
        parameter: Name of the argument.
        said: What the code answered most often where it raised.
        switched_off: The attribute that says so, where no form of mask has an effect.
        replaces_causal: Whether a mask that is given takes the place of the causal mask that is built in.
    """

    form: MaskForm | None = None
    accepted: tuple[MaskForm, ...] = ()
    understood: tuple[MaskForm, ...] = ()
    mistakes: tuple[Mistake, ...] = ()
    error: float = 0.0
    without: float = 0.0
    square: bool = False
    parameter: str = ""
    said: str = ""
    replaces_causal: bool = False
    switched_off: str = ""


@dataclass
class _Reader:
    """Calls with masks, and compares with the reference under every use of a mask."""

    subject: Subject
    caller: Caller
    lengths: Sizes
    match: Match
    errors: list[str] = field(default_factory=list)
    held: bool = False

    def __post_init__(self) -> None:
        exact = self.subject.dtype == torch.float64 and not self.match.float32_inside
        self.bound = 1e-10 if exact else 2e-5
        self.projections = self.match.reading.read(self.subject.function)

    def error(self, observation: Observation, use: str) -> float:
        """How far an output is from the reference that uses the mask in this way."""
        choices = self.match.choices | {"mask": use}
        try:
            expected = attend(self.match.reading.setting, self.projections, observation.inputs, choices)
        except (RuntimeError, IndexError):
            return float("inf")
        return distance(observation.output, expected)

    def fits(self, seen: list[Observation], use: str) -> bool:
        """Whether the mask is used so."""
        return all(self.error(o, use) <= self.bound for o in seen)

    def observed(self) -> tuple[Observed, bool]:
        """Call with every form of mask; keep those that ran and gave numbers, if need be with equal lengths."""
        first, second = self.lengths, other_sizes(self.lengths)[0]
        found = list(self._observe((first, second)))
        self.held = not found and any(HELD in error for error in self.errors)
        found = found or list(self._observe((first, second)))
        if found or first.query_len == first.key_len:
            return found, False
        square = [replace(sizes, key_len=sizes.query_len) for sizes in (first, second)]
        found = list(self._observe((square[0], square[1])))
        return found, bool(found)

    def forms(self) -> list[MaskForm]:
        """List the forms to try."""
        if self.subject.adapter.call:
            return [MaskForm("(batch, query, key)", "look")]
        return [replace(form, held=self.held) for form in mask_forms()]

    def _observe(self, lengths: tuple[Sizes, Sizes]) -> Iterator[tuple[MaskForm, list[Observation]]]:
        plan = self.match.reading.plan
        for form in self.forms():
            seen = [observe(self.caller, plan, s, seed, form, self.errors) for seed, s in enumerate(lengths, start=7)]
            kept = [o for o in seen if o is not None and o.output.isfinite().any()]
            if len(kept) == len(seen):
                yield form, kept


def read_masks(subject: Subject, caller: Caller, lengths: Sizes, match: Match) -> MaskReading:
    """Find the forms of mask that hide what they say, or the mistake in how they are read.

    Args:
        subject: What is checked.
        caller: Calls it.
        lengths: Of the tensors.
        match: How the rest is understood; its plan says which argument is the mask.

    Returns:
        What was found out.
    """
    reader = _Reader(subject, caller, lengths, match)
    observed, square = reader.observed()
    found = _read(reader, observed)
    if found.form is None and match.choices.get("causal", "no") == "yes":
        found = _read_without_causal(reader, observed) or found
    if found.form is None:
        found = next(_infinite_after_softmax(reader, found.accepted), found)
    if any(m.option == IGNORED for m in found.mistakes) and (switch := _switch(subject)):
        found = replace(found, mistakes=(), form=None, switched_off=switch)
    said = Counter(reader.errors).most_common(1)[0][0] if reader.errors else ""
    return replace(found, square=square, parameter=match.reading.plan.mask_parameter, said=said)


def _read(reader: _Reader, observed: Observed) -> MaskReading:
    accepted = tuple(form for form, _ in observed)
    understood = tuple(form for form, seen in observed if any(reader.fits(seen, use) for use in HIDING))
    if all(form.encoding == "additive" for form in understood) and _counts_from_one(reader.subject):
        observed = [(form, seen) for form, seen in observed if form.encoding != "additive"]
        understood = ()  # a mask of -inf passes such arithmetic by chance
    shared_only = bool(understood) and all(form.pattern == "shared" for form in understood)
    suspects = observed if not understood else _per_sample(observed, understood) if shared_only else []
    no_effect = not understood and all(reader.fits(seen, IGNORED) for _, seen in observed)
    readings = []
    for form, seen in suspects:
        explaining = [m for m in MASK_MISTAKES if reader.fits(seen, m.option)]
        if any(m.option == IGNORED for m in explaining):
            if not no_effect:
                continue  # this form has no effect, another one has
            explaining = [m for m in explaining if m.option == IGNORED]
        if explaining:
            worst = max(reader.error(o, explaining[0].option) for o in seen)
            without = reader.error(seen[0], "right")
            readings.append(MaskReading(form, accepted, understood, tuple(explaining), worst, without))
    if readings:
        return _likeliest(readings, related_sources(reader.subject.function, reader.subject.source))
    return MaskReading(understood[0] if understood else None, accepted, understood)


def _counts_from_one(subject: Subject) -> bool:
    """Whether the code takes the mask from one: its masks are zeros and ones."""
    return any(place.line_matching(COMPLEMENT) for place in related_sources(subject.function, subject.source))


def _switch(subject: Subject) -> str:
    """Name the attribute that is False and speaks of masks; "" if there is none."""
    owners = subject.module.named_modules() if subject.module is not None else ()
    named = ((f"{path}.{name}".strip("."), value) for path, owner in owners for name, value in vars(owner).items())
    return next((name for name, value in named if value is False and "mask" in name.rpartition(".")[2].lower()), "")


def _read_without_causal(reader: _Reader, observed: Observed) -> MaskReading | None:
    """Read the masks as taking the place of the causal mask: no mask means a causal one in some code."""
    reading = reader.match.reading
    bare = replace(reading, conventions=tuple((slot, o) for slot, o in reading.conventions if slot != "causal"))
    found = _read(replace(reader, match=replace(reader.match, reading=bare)), observed)
    return replace(found, replaces_causal=True) if found.understood and not found.mistakes else None


def _infinite_after_softmax(reader: _Reader, accepted: tuple[MaskForm, ...]) -> Iterator[MaskReading]:
    """Weights filled with -inf: whatever looks past a hidden key is not a number, and what hides nothing is right."""
    for form in reader.forms():
        plan = reader.match.reading.plan
        inputs = random_inputs(reader.lengths, plan, 9, reader.caller.dtype)
        may = draw_masks(form.pattern, len(inputs.query), inputs.query.size(1), inputs.key.size(1))
        may[:, 0] = True
        if form.pattern != "shared":
            may[0] = True
        else:
            may = may[:1].expand_as(may)
        inputs = replace(as_float64(inputs), may_attend=may)
        try:
            with torch.no_grad():
                output = reader.caller.output(plan, inputs, form).double()
        except Exception:  # the code may raise anything
            continue
        sound = may.all(-1)
        unhidden = replace(inputs, may_attend=None)
        expected = attend(reader.match.reading.setting, reader.projections, unhidden, reader.match.choices)
        if torch.equal(output.isfinite().all(-1), sound) and distance(output[sound], expected[sound]) <= reader.bound:
            yield MaskReading(form, accepted, (), (mistake_for("mask", "after_softmax_inf"),), 0.0, float("inf"))


def _likeliest(readings: list[MaskReading], places: list[Source]) -> MaskReading:
    """Choose among readings that give the same numbers by what the source says; the others become alternatives."""
    best = max(readings, key=lambda reading: told_by(reading.mistakes, places))
    others = (m for reading in readings for m in reading.mistakes)
    return replace(best, mistakes=tuple(dict.fromkeys((*best.mistakes, *others))))


def _per_sample(observed: Observed, understood: tuple[MaskForm, ...]) -> Observed:
    """Forms with a mask for each sample, in the encodings that are understood where all samples share one."""
    encodings = {form.encoding for form in understood}
    return [(form, seen) for form, seen in observed if form.pattern == "full" and form.encoding in encodings]
