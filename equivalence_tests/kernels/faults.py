"""Each fault once: of all the cells that show it, the smallest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from equivalence_tests.kernels.judging import Cell
from equivalence_tests.kernels.kernels import Kernel
from equivalence_tests.kernels.known import Advice, advice_for
from equivalence_tests.kernels.reproducing import reproducer
from equivalence_tests.kernels.situations import Situation

__all__ = ["Fault", "Request", "faults_in"]


@dataclass(frozen=True)
class Request:
    """What a run was asked for: by it a table can be had again."""

    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32",)
    backends: tuple[str, ...] = ()
    quick: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Args:
        cell: The smallest situation that shows it.
        advice: What is known about it and what to do.
        program: A reproducer for torch alone, or "".
        others: The other cells that show it.
        name: What is wrong, where the numbers tell it.
    """

    cell: Cell
    advice: Advice
    program: str = ""
    others: tuple[Cell, ...] = ()
    name: str = ""
    kind: ClassVar[str] = "attention kernel"

    @property
    def places(self) -> list[str]:
        """Where in a program it stands, a line for each thing to be told."""
        return []

    @property
    def parts(self) -> list[str]:
        """Which of output, dq, dk and dv are wrong."""
        return [error.name for error in self.cell.wrong_parts]

    @property
    def sentence(self) -> str:
        """The fault in one line."""
        errors = "; ".join(
            f"{x.name} has {x.misfit}"
            if x.misfit
            else f"{x.name} is off by {x.candidate_error:.2g} (textbook: {x.builtin_error:.2g})"
            for x in self.cell.wrong_parts
        )
        told = "; ".join(text for text in (errors, self.cell.words) if text)
        return f"{self.cell.kernel}, {self.cell.situation}, {self.cell.dtype}: {told}"

    def to_dict(self) -> dict[str, Any]:
        """Give plain data."""
        return self.cell.to_dict() | {
            "wrong": self.parts,
            "name": self.name,
            "issue": self.advice.issue,
            "help": self.advice.help,
            "reproducer": self.program,
            "also_in": sorted({f"{x.kernel}: {x.situation}" for x in self.others}),
        }


def faults_in(
    cells: Sequence[Cell], kernels: Sequence[Kernel], situations: Sequence[Situation], request: Request
) -> list[Fault]:
    """Gather the cells that are wrong or worse than the rule into faults, the wrong ones first."""
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        if cell.state in ("wrong", "worse"):
            advice = _advice(cell)
            key = advice.issue or (cell.kernel, cell.group, cell.dtype)
            groups.setdefault((key, cell.state), []).append(cell)
    known_kernels = {kernel.name: kernel for kernel in kernels}
    known_situations = {situation.name: situation for situation in situations}
    found = []
    for group in groups.values():
        # Of what fails, numbers tell more than an error.
        first, *others = sorted(group, key=lambda cell: (not cell.wrong_parts, cell.size))
        kernel, situation = known_kernels[first.kernel], known_situations[first.situation]
        part = first.wrong_parts[0].name if first.wrong_parts else "output"
        program = ""
        if kernel.lines:
            program = reproducer(kernel, situation, part, request.seed, request.device, first.dtype)
        found.append(Fault(first, _advice(first), program, tuple(others)))
    return sorted(found, key=lambda fault: fault.cell.state == "worse")


def _advice(cell: Cell) -> Advice:
    return advice_for(cell.kernel, cell.backend, cell.situation, {error.name for error in cell.wrong_parts})
