"""What the checker finds, as data: the mistakes with their proof, and what was exercised."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from equivalence_tests.checker.reporting.lines import CodeLine

Verdict = Literal["equal", "partial", "deviates", "unchecked"]
# The modules that are read by a table of forms, and all that can be checked; an attention unless the name or the parts
# say otherwise.
PARTS = ("layer_norm", "feed_forward", "positional_encoding")
KINDS = ("attention", *PARTS, "mask_builder", "layers")

# What these checks find is worth knowing and no proof of a wrong number.
NOT_JUDGED = ("check_float32_error",)
MOST_SAID = 4  # of what a sentence lists
Outcome = Literal["passed", "failed", "skipped", "expected"]

# Verdicts with their exit statuses.
VERDICTS: Mapping[Verdict, int] = {"equal": 0, "deviates": 1, "unchecked": 2, "partial": 3}


# Relative differences: the proofs run in float64.
ROUNDING, ABOVE_ROUNDING = 1e-9, 1e-6


@dataclass(frozen=True)
class Proof:
    """What happens when the right value is put in and the user's own code goes on.

    Args:
        error: The greatest difference from torch with this and every other finding put right, relative to the
            largest value.
        without: The same with every other finding put right, but not this one.
        inputs: On how many fresh inputs.
        rounding: The greatest difference that is rounding: more where a part computes in float32.
    """

    error: float
    without: float
    inputs: int
    rounding: float = ROUNDING

    @property
    def holds(self) -> bool:
        """Whether it proves anything: rounding with it, and a difference far above rounding without it."""
        return self.error < self.rounding < ABOVE_ROUNDING / ROUNDING * self.rounding < self.without


@dataclass(frozen=True)
class Finding:
    """One mistake, or one deviation that is intended.

    Args:
        name: Its short identifier; "changed_by_clamp" where no catalogue knows it.
        stage: Where it stands: "project", "split", "product", "scale", "mask", "softmax", "context", "merge", ...
        sentence: What is wrong, in one plain sentence.
        have: The formula that the code computes.
        want: The formula that it should compute.
        fix: What to change.
        stack: The lines that ran, the outermost of the user's class first, the guilty one last; empty if unknown.
        proof: What putting it right does; None where nothing was put right.
        evidence: Why we are sure where nothing was put right.
        on_purpose_in: Which well-known models do this on purpose; "" if none does.
        reason: Why it counts as intended; "" if it does not.
        where: Path of the sub-module; "" for the checked object itself.
    """

    name: str
    stage: str
    sentence: str
    have: str = ""
    want: str = ""
    fix: str = ""
    stack: tuple[CodeLine, ...] = ()
    proof: Proof | None = None
    evidence: str = ""
    on_purpose_in: str = ""
    reason: str = ""
    where: str = ""

    @property
    def is_proven(self) -> bool:
        """Whether numbers show it: the proof, a check that fails, or evidence of its own."""
        return bool(self.evidence) or self.stage == "checks" or (self.proof is not None and self.proof.holds)

    @property
    def line(self) -> CodeLine | None:
        """The line to change."""
        return self.stack[-1] if self.stack else None


@dataclass(frozen=True)
class Exercise:
    """Something that the code offers, and whether it was run.

    Args:
        what: "mask", "past_key_value", "use_cache=True", "lengths beyond the window of 16", ...
        exercised: Whether there is a verdict on it.
        detail: How it was exercised, or why it could not be.
    """

    what: str
    exercised: bool
    detail: str = ""


@dataclass(frozen=True)
class CheckResult:
    """One small check and how it went."""

    name: str
    outcome: Outcome
    detail: str = ""


def some_of(words: Iterable[str], between: str = "; ") -> str:
    """List the first few, each once, and say how many more there are.

    >>> some_of(["a", "b", "a", "c", "d", "e"])
    'a; b; c; d; and 1 more'
    """
    first = list(dict.fromkeys(words))
    more = [f"and {len(first) - MOST_SAID} more"] if first[MOST_SAID:] else []
    return between.join(first[:MOST_SAID] + more)
