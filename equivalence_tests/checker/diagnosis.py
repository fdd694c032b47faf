"""Search the family: which reading, and which mistakes, reproduce the user's numbers.

Readings without a mistake are tried first, then one mistake under every reading, then pairs, then triples. What
reproduces the output on the inputs of the search is confirmed on fresh inputs of other sizes and on other weights.

Two probes part the mistakes. Where all tokens are alike, weights that sum to one do not count: the mistakes that show
there must explain the output there by themselves. And what makes the order of tokens count is in the code or it is not.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.calling import CallPlan
from equivalence_tests.checker.inner import Options
from equivalence_tests.checker.mistakes import ATTENTION_MISTAKES, CONVENTIONS, Mistake, mistake_for
from equivalence_tests.checker.projections import ProjectionReading
from equivalence_tests.checker.reference import Inputs, Projection, Projections, Setting, attend

__all__ = ["PROBES", "Match", "Observation", "Reading", "distance", "matches", "search"]

# Differences below this part of the largest value are rounding; a true one stands far above it.
FEWEST_READINGS = 100  # are tried however little time is left
LEVELS = ("readings", "single mistakes", "pairs of mistakes", "triples of mistakes")
# Code that computes a part in float32, whatever it is given, is that exact and no more.
FLOAT32_INSIDE = 3e-6
PROBES = {"alike": Inputs.alike, "reversed": Inputs.reversed}
UNSCALED = mistake_for("scale", "none")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


@dataclass(frozen=True)
class Observation:
    """One call of the user's code: canonical inputs, and the output as (b, q, e); also which of ``PROBES`` it was."""

    inputs: Inputs
    output: Tensor
    probe: str = ""


@dataclass(frozen=True)
class Reading:
    """One way to understand the code: how it is called, what its parameters are, and what it includes.

    Args:
        plan: How it is called.
        projections: Where the matrices are; None for code without parameters.
        setting: Heads, layout, LayerNorm.
        conventions: Settings of the family that are right too, as (slot, option).
        implied: Mistakes that the structure itself shows, such as a projection that does not exist.
        likely: Whether names, and not trying, led here.
        own_bias: Reads the bias that the code adds to its scores by itself, for lengths of queries and keys.
    """

    plan: CallPlan
    projections: ProjectionReading | None
    setting: Setting
    conventions: tuple[tuple[str, str], ...] = ()
    implied: tuple[str, ...] = ()
    likely: bool = True
    own_bias: Callable[[int, int], Tensor] | None = None

    def read(self, module: Any) -> Projections:
        """Give the matrices that the module holds now, and its bias."""
        bias = self.own_bias and functools.cache(self.own_bias)
        if self.projections is None or not isinstance(module, nn.Module):
            nothing = Projection()
            return Projections(nothing, nothing, nothing, None, own_bias=bias)
        return replace(self.projections.read(module, self.setting.num_heads), own_bias=bias)


@dataclass(frozen=True)
class Match:
    """A reading and the mistakes under which the family gives the user's numbers."""

    reading: Reading
    mistakes: tuple[Mistake, ...] = ()
    error: float = 0.0

    @property
    def float32_inside(self) -> bool:
        """Whether the agreement is only that of float32."""
        return self.error > 3 * TOLERANCE[torch.float64]

    @property
    def choices(self) -> dict[str, str]:
        """The settings of the family."""
        chosen = {m.slot: m.option for m in self.mistakes}
        causal = {"causal": "yes"} if "causal_use" in chosen else {}
        return dict(self.reading.conventions) | causal | chosen

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all mistakes, those that the structure shows included."""
        return (*self.reading.implied, *dict.fromkeys(m.name for m in self.mistakes))


@dataclass
class Effort:
    """How long the search may take, for how many mistakes together, and how much of it was done."""

    seconds: float
    progress: Callable[[str], None] = lambda text: None
    most: int = 3
    evaluated: int = 0
    started: float | None = None

    def begin(self) -> None:
        """Let the time run, if it does not yet."""
        self.started = self.started or time.monotonic()

    @property
    def exhausted(self) -> bool:
        """Whether the time is up."""
        return self.started is not None and time.monotonic() - self.started > self.seconds


def distance(actual: Tensor, expected: Tensor) -> float:
    """Greatest difference relative to the largest expected value, over rows where the expected one is finite.

    >>> distance(torch.tensor([[1.0, 2.5]]), torch.tensor([[1.0, 2.0]]))
    0.25
    """
    if actual.shape != expected.shape:
        return float("inf")
    rows = expected.isfinite().all(-1)
    if 2 * int(rows.sum()) < rows.numel():
        return float("inf")
    difference = (actual[rows] - expected[rows]).abs().max()
    largest = expected[rows].abs().max().clamp_min(1e-30)
    return float((difference / largest).nan_to_num(float("inf")))


def matches(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float64) -> bool:
    """Whether the two are equal up to rounding."""
    return distance(actual, expected) <= TOLERANCE[dtype]


def search(
    module: Any,
    readings: Sequence[Reading],
    observe: Callable[[CallPlan], Sequence[Observation]],
    dtype: torch.dtype,
    effort: Effort,
    most: int = 3,
    fewest: int = 0,
) -> list[Match]:
    """Find the fewest mistakes that explain the output, under any reading.

    Args:
        module: Holds the weights.
        readings: The likeliest first.
        observe: Gives observations for a plan; the first is searched on, the others confirm.
        dtype: Precision that the code computed in.
        effort: Bounds the search.
        most: Greatest number of mistakes together.
        fewest: Least number of them.

    Returns:
        Every match with the least number of mistakes; several readings without a mistake, or several mistakes that
        give the same numbers. Empty if nothing fits.
    """
    effort.begin()  # what it takes to find out how the code is called does not count
    readings = _in_turns(readings)
    likely = [r for r in readings if r.likely] or readings[:60]
    others = [r for r in readings if not r.likely]
    stages = [(likely, 0), (others[:1500], 0), (likely[:40], 1), (others[:60], 1), (likely[:10], 2), (likely[:4], 3)]
    for parted, (group, count) in [*((True, stage) for stage in stages), (False, (likely[:10], 2))]:
        if not fewest <= count <= most or (count and effort.exhausted):
            continue
        effort.progress(f"{LEVELS[count]} under {len(group)} readings")
        found: list[Match] = []
        for index, reading in enumerate(group):
            if effort.exhausted and (count or index >= FEWEST_READINGS):
                break
            searched = _Searched(module, reading, observe(reading.plan), dtype, effort)
            found += searched.matches(count, parted)
            if found and count != 1 and reading.likely and not found[-1].float32_inside:
                break
        if found:
            return _distinct([m for m in found if not m.float32_inside] or found)
    return []


def _in_turns(readings: Sequence[Reading]) -> list[Reading]:
    """Let every way to call the code have its turn: a mask that was meant to hide nothing may hide everything."""
    of_plans: dict[CallPlan, list[Reading]] = {}
    for reading in readings:
        of_plans.setdefault(reading.plan, []).append(reading)
    turns = itertools.zip_longest(*of_plans.values())
    return [reading for turn in turns for reading in turn if reading is not None]


class _Searched:
    """One reading, and what its mistakes give."""

    def __init__(
        self, module: Any, reading: Reading, observations: Sequence[Observation], dtype: torch.dtype, effort: Effort
    ) -> None:
        self.reading, self.observations, self.effort = reading, observations, effort
        self.projections = reading.read(module)
        self.bound = max(TOLERANCE[dtype], FLOAT32_INSIDE)
        self.probes = {o.probe: o for o in observations if o.probe}

    def matches(self, count: int, parted: bool) -> list[Match]:
        """List what reproduces every output with so many mistakes."""
        found: list[Match] = []
        for candidates in self._candidates(count, parted) if self.observations else ():
            for mistakes in candidates:
                if mistakes and self.effort.exhausted:
                    return found
                if self._error(mistakes, self.observations[0]) <= self.bound:
                    worst = max(self._error(mistakes, o) for o in self.observations)
                    found += [Match(self.reading, mistakes, worst)] if worst <= 3 * self.bound else []
            if found:
                break
        return found

    def _candidates(self, count: int, parted: bool) -> Iterator[Iterable[tuple[Mistake, ...]]]:
        """Give what is to be tried, the soonest done first."""
        options = applicable(self.reading, self.projections, self.observations[0]) if count else []
        if count < 2 or not parted or set(self.probes) != set(PROBES):
            yield combinations_of(options, count)
        elif self._ordered(self.observations[0].output, self.probes["reversed"].output):
            yield from self._in_parts([m for m in options if not self._orders(m)], count)
        else:
            ordering = [] if self._orders() else [m for m in options if self._orders(m)]
            for group in self._in_parts(options, count):
                yield (found for found in group if not ordering or any(m in ordering for m in found))

    def _ordered(self, output: Tensor | None, other: Tensor | None) -> bool:
        """Whether tokens in reverse give the output in reverse."""
        return output is None or other is None or distance(other.flip(1), output) <= self.bound

    def _orders(self, *mistakes: Mistake) -> bool:
        """Whether these make the order of tokens count."""
        return not self._ordered(*(self._output(mistakes, o) for o in (self.observations[0], self.probes["reversed"])))

    def _in_parts(self, options: Sequence[Mistake], count: int) -> Iterator[Iterator[tuple[Mistake, ...]]]:
        """Join the mistakes that explain the output where all tokens are alike with those that change nothing there."""
        alike = self.probes["alike"]
        usual = self._output((), alike)
        right = None if usual is None else replace(alike, output=usual)
        showing = [m for m in options if right is None or self._error((m,), right) > self.bound]
        silent = [m for m in options if m not in showing]
        parting = [m for m in showing if self._parts_values(m)]
        parts = [part for size in range(count + 1) for part in combinations_of(showing, size)]
        settled = (part for part in parts if not any(m in parting for m in part) and self._explains(part, alike))
        for some in (settled, (part for part in parts if any(m in parting for m in part))):
            yield (joined for part in some for joined in _joined(part, silent, count))

    def _explains(self, mistakes: tuple[Mistake, ...], observation: Observation) -> bool:
        return not self.effort.exhausted and self._error(mistakes, observation) <= self.bound

    def _parts_values(self, mistake: Mistake) -> bool:
        """Whether it makes unlike values of tokens that are alike, so that weights count again."""
        usual, other = (self._output(some, self.probes["alike"]) for some in ((mistake,), (mistake, UNSCALED)))
        return usual is not None and other is not None and distance(other, usual) > self.bound

    def _error(self, mistakes: tuple[Mistake, ...], observation: Observation) -> float:
        expected = self._output(mistakes, observation)
        return float("inf") if expected is None else distance(observation.output.to(expected.dtype), expected)

    def _output(self, mistakes: tuple[Mistake, ...], observation: Observation) -> Tensor | None:
        """What the family gives; None if the shapes do not fit."""
        self.effort.evaluated += 1
        choices = Match(self.reading, mistakes).choices
        try:
            return attend(self.reading.setting, self.projections, observation.inputs, choices)
        except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
            return None


def _joined(part: tuple[Mistake, ...], others: Sequence[Mistake], count: int) -> Iterator[tuple[Mistake, ...]]:
    """Fill a part up with others that set different switches."""
    slots = {m.slot for m in part}
    for rest in combinations_of(others, count - len(part)):
        if not slots & {m.slot for m in rest}:
            yield (*part, *rest)


def combinations_of(options: Sequence[Mistake], count: int) -> Iterator[tuple[Mistake, ...]]:
    """List combinations of mistakes that set different switches."""
    for combination in itertools.combinations(options, count):
        if len({m.slot for m in combination}) == count:
            yield combination


def applicable(reading: Reading, projections: Projections, observation: Observation) -> list[Mistake]:
    """List the mistakes that could change anything under a reading."""
    inputs = observation.inputs
    parts = {"query": projections.query, "key": projections.key, "value": projections.value}
    heights = {name: None if p.weight is None else p.weight.size(0) for name, p in parts.items()}
    output, one_tensor = projections.output, inputs.query is inputs.key is inputs.value
    square = inputs.query.size(1) == inputs.key.size(1)
    slots = {f"{name}_bias": p.bias is not None for name, p in parts.items()} | {
        "output_bias": output is not None and output.bias is not None,
        "output": output is not None,
        "matrices": None not in heights.values() and reading.projections is not None,
        "arguments": not one_tensor and reading.plan.named,
        "grouped": None not in (heights["query"], heights["key"]) and heights["query"] != heights["key"],
        "causal_use": square,
        "causal": square,
    }
    return [
        m for m in ATTENTION_MISTAKES if slots.get(m.slot, True) and _option_fits(m, reading, projections, one_tensor)
    ]


def _option_fits(m: Mistake, reading: Reading, projections: Projections, one_tensor: bool) -> bool:
    """Whether the option of a switch could change anything under a reading."""
    own, query = reading.setting, projections.query.weight
    if m.option == "sqrt_input":
        return query is not None and len(set(query.shape)) > 1
    if m.option == "whole":
        return own.num_heads > 1
    if m.name == "packed_parts_mixed":
        return reading.projections is not None and reading.projections.layout == "qkv3hd"
    if m.slot in ("split", "merge"):
        return m.option != ("lbhd" if own.sequence_first else "bhdl" if own.channels_first else "blhd")
    if m.slot == "rotary":
        return m.option.startswith(dict(reading.conventions).get("rotary", "never"))
    if m.slot == "wrap" and own.norm is not None:
        return one_tensor or not m.option.endswith("keys_only")
    return m.slot != "wrap" or not m.option.startswith(("post", "pre", "norm", "residual_from", "residual_after"))


def convention_sets(
    norms: int, crosses: bool, causal: Iterable[str], inner: Iterable[Options] = ((),)
) -> list[Options]:
    """List the settings that are right too, the commonest first."""
    wraps = CONVENTIONS["wrap of two norms"] if norms == 2 else CONVENTIONS["wrap"] if norms else ("none", "residual")
    wraps = (*wraps, *CONVENTIONS["wrap of cross-attention"]) if norms == 1 and crosses else wraps
    features = (("lh", "lh"), ("ld", "ld"), ("lh", "ld"), ("ld", "lh"))
    sets: list[Options] = []
    for (split, merge), wrap, mask, done in itertools.product(features, wraps, causal, inner):
        sets.append((("wrap", wrap), ("split", split), ("merge", merge), ("causal", mask), *done))
    return sets


def _distinct(found: list[Match]) -> list[Match]:
    """Keep one match for each set of mistakes."""
    kept: dict[tuple[str, ...], Match] = {}
    for match in found:
        kept.setdefault(match.names, match)
    return list(kept.values())
