"""Steps of a program that torch's formula does not have, each intended or not; and why no program could be made."""

import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reporting.equivalents import WRITTEN
from equivalence_tests.checker.reporting.findings import Finding
from equivalence_tests.checker.reporting.lines import raised_at

# The names of the deviations that a step of a program is, by its stage.
NAMES: Mapping[str, str] = {
    "project": (
        "input|(?<![a-z]_)norm|swapped|rotated|_uses_|shared|_from_|not_projected|not_normalised|only_|memory_unused"
    ),
    "again": r"(?!)",  # matches no finding: what takes part elsewhere says nothing for a second place
    "cut": "class_token",
    "split": "grouped|paired|split",
    "merge": "merged|order|missing_or_repeated",
    "output": "output",
    "gate": "gate",
    "factor": "scale|changed_by_(mul|div)",
    "sign": "opposite",
    "unused": "never_used|without_effect",
    "heads": "heads",
    "residual": "residual",
    "shared_norm": "norm_shared",
    "shared_attention": "attention_shared",
    "parallel": "side_by_side",
    "operand": "(?<!values_)norm",
    "values": "value",
    "rotary": "rota",
    "rotated": "rota(ry_(?!positions)|tions)",
    "context": "value|weights_scaled|scale",
    "scale": "scale|normalised",
    "cap": "capped|by_clamp",
    "scores": "bias|sink|position",
    "mask": "mask|window|causal",
    "mixed": "heads_mixed|mixed_in",
}
OF_ITS_OWN = "_of_its_own"
RESIDUAL = "a residual connection"


@dataclass(frozen=True)
class Step:
    """Something in the program that torch's formula does not have."""

    words: str
    evidence: str  # what says that it is intended; "" if nothing does
    stage: str  # where it stands, as in a finding

    @property
    def name(self) -> str:
        """What it is called with ``--intended``, where no finding is about it."""
        return self.stage + OF_ITS_OWN

    def is_named_by(self, finding: Finding) -> bool:
        """Whether a finding is about it: of what is of a part's own, the very step, and none that is called alike."""
        if finding.name.endswith(OF_ITS_OWN):
            return finding.name == self.name and f": {self.words}." in finding.sentence
        return bool(re.search(NAMES[self.stage], finding.name))

    def as_intended(self, evidence: str) -> Finding:
        """List it among what is intended."""
        return Finding(self.name, self.stage, f"Not in torch's formula: {self.words}.", reason=evidence)


def names_a_step(name: str) -> bool:
    """Whether ``--intended`` may name a step so.

    >>> names_a_step("residual_of_its_own"), names_a_step("lunch_of_its_own")
    (True, False)
    """
    return name.endswith(OF_ITS_OWN) and name.removesuffix(OF_ITS_OWN) in NAMES


def evidence_of(steps: Sequence[Step], intended: Sequence[Finding], projections: set[str]) -> dict[Step, str]:
    """Give the evidence that each step is intended; "" where there is none.

    A finding that names a parameter of the projections is none.
    """
    usable = [one for one in intended if not any(name in one.reason for name in projections)]
    found = {}
    for step in steps:
        said = [step.evidence, *(one.reason for one in usable if step.is_named_by(one))]
        found[step] = next(filter(None, said), "")
    return found


class UnreadError(Exception):
    """What the code does is not among the parts that an equivalent is made of."""


def not_called_again(error: Exception) -> UnreadError:
    """Say that code raised something when it was called again; what says why it cannot be read stays as it is."""
    if isinstance(error, UnreadError):
        return error
    if any(frame.f_code.co_filename == WRITTEN for frame, _ in traceback.walk_tb(error.__traceback__)):
        return UnreadError("the program written from it does not run in all the calls in which it does")
    return UnreadError(f"it cannot be called again ({said(error)}{raised_at(error)})")
