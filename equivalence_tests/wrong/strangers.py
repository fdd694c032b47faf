"""Attentions of anybody's files as right ones, where the checker calls them equal: built and called as it did."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from equivalence_tests import load, verify
from equivalence_tests.checker.doors.discovery import Candidate, candidates
from equivalence_tests.wrong.asking import EQUAL, INTENDED
from equivalence_tests.wrong.drawing import UNCHANGED, unchanged
from equivalence_tests.wrong.judging import Row, edited_here, judged_here, row_of
from equivalence_tests.wrong.operators import Operator
from equivalence_tests.wrong.sources import Calls, Right, complete, noisy

__all__ = ["Stranger", "candidates_in", "judged_in", "left_out", "stranger"]

KINDS = ("attention", "layers")
GOES_ON = (EQUAL, INTENDED, "partial")


@dataclass(frozen=True)
class Stranger(Right):
    """A class or function of somebody's file, built and called as the checker did.

    Args:
        script: What ``sidebyside verify TARGET --template`` prints.
    """

    script: str = ""

    def built(self, module: ModuleType) -> nn.Module:
        """Build it with the arguments of the script, in float64 and in eval."""
        torch.manual_seed(0)
        made = self._named(lambda place: getattr(module, self.target) if self._is_own(place) else load(place))["model"]
        whole: nn.Module = made if isinstance(made, nn.Module) else Calls(made)
        return whole.double().eval()

    def drawn(self, seed: int, length: int) -> list[Any]:
        """Give the inputs of the script with noise on their numbers."""
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(seed)

        return [tree_map(lambda x: noisy(_in_double(x), generator), self._named(load)["inputs"])]

    def run(self, module: nn.Module, given: Any) -> Any:
        """Call it with what was drawn."""
        return module(**given) if isinstance(given, dict) else module(*given)

    def _named(self, loads: Callable[[str], Any]) -> dict[str, Any]:
        """Run the script up to where it verifies."""
        names: dict[str, Any] = {"load": loads, "verify": lambda *_: []}
        text = self.script.replace("from equivalence_tests import load, verify\n", "").partition("\nreports = ")[0]
        exec(text, names)  # it builds and calls what is checked, as the checker does
        return names | {"model": names.get("model", names[self.target])}

    def _is_own(self, place: str) -> bool:
        return place.endswith(f":{self.target}")


def _in_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def candidates_in(folder: Path) -> list[Candidate]:
    """List the attentions, layers and models that the files of a folder define."""
    return [one for one in candidates(str(folder))[0] if one.kind in KINDS]


def stranger(found: Candidate, script: str) -> Stranger:
    """Give a class of a file, to be edited there."""
    text = complete(found.path.read_text(encoding="utf-8"))
    return Stranger("strangers", found.target, text, found.name, {}, ({},), {}, (0,), script=script)


def left_out(found: Candidate, why: str) -> Row:
    """Say of a class that it is not edited."""
    row = {"room": "strangers", "class": found.target, "operator": UNCHANGED, "adds": False, "diff": ""}
    return {**row, "dropped": why}


def judged_in(found: Candidate, operators: Sequence[Operator], seed: int, each: int) -> Iterator[Row]:
    """Verify a class, and judge versions of it where it is equal.

    Args:
        found: The class.
        operators: The edits.
        seed: Of the draw.
        each: How many versions that differ, at most.
    """
    sys.path.insert(0, str(found.path.parent))  # what it imports may lie beside it
    report = verify(found.target)
    if report.verdict not in GOES_ON or not report.template:
        said = report.reason or ", ".join(report.mistakes) or "there is no script"
        yield left_out(found, f"{report.verdict}: {said}")
        return
    right = stranger(found, report.template)
    whole = row_of(unchanged(right), judged_here(unchanged(right)))
    yield whole
    if whole.get("truth") == "same" and whole["verdict"] in GOES_ON:
        yield from edited_here(right, operators, seed, each)
