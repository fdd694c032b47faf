"""Judge an attention function in every architecture and situation that a request names."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from equivalence_tests.kernels.faults import Request
from equivalence_tests.kernels.reporting import Report
from equivalence_tests.models.faults import Found, faults_in
from equivalence_tests.models.judging import UNMASKED, ModelCell, Ran, Runs
from equivalence_tests.models.library import Architecture, Library, Registration, Situation
from equivalence_tests.models.naming import Cause, cause_of, described
from equivalence_tests.models.reproducing import reproducer

__all__ = ["TITLE", "best_registration", "judged"]

TITLE = "Outputs, gradients and tokens compared with the models' own attention in float64"
Tell = Callable[[str, int, int], None]


def judged(
    library: Library,
    architectures: Sequence[Architecture],
    registration: Registration,
    request: Request,
    tell: Tell = lambda *_: None,
) -> Report:
    """Judge an attention function.

    Args:
        library: Of the models.
        architectures: Which of them.
        registration: The function, its mask function and their name.
        request: Seed, and whether it is to be quick.
        tell: Called before each model with its name, its number and how many there are.

    Returns:
        The report, without the machine.
    """
    cells: list[ModelCell] = []
    found: list[Found] = []
    apart: list[str] = []
    failing: list[str] = []
    for number, architecture in enumerate(architectures):
        tell(architecture.name, number, len(architectures))
        one = _Judged(library, architecture, registration, request, number)
        one.run()
        cells += one.cells
        found += one.found
        apart += [architecture.name] if one.unreached else []
        failing += [f"{architecture.name} cannot be run: {one.failure}"] if one.failure and not one.cells else []
    remarks = [f"Mask function: {registration.mask_name}."] if registration.mask_name else []
    if apart:
        remarks.append(f"Not judged: {', '.join(apart)}. Their attention does not use the interface.")
    remarks += [*failing, *_without_a_mask(cells)]
    groups = [*dict.fromkeys(situation.group for situation in library.situations), UNMASKED]
    return Report(request, "", cells, list(faults_in(found)), remarks, TITLE, groups)


def _without_a_mask(cells: Sequence[ModelCell]) -> Iterator[str]:
    """Say what happens where somebody forgets the mask function."""
    bare = [cell for cell in cells if cell.group == UNMASKED]
    wrong = [cell for cell in bare if cell.state == "needs mask"]
    if wrong:
        yield (
            f"Without a mask function {len(wrong)} of {len(bare)} calls are wrong: attention_mask is silently None "
            "there, and nothing tells the function about padding, packed rows or the future. Register one under its "
            "name."
        )


@dataclass
class _Judged:
    """One architecture, judged."""

    library: Library
    architecture: Architecture
    registration: Registration
    request: Request
    number: int

    def __post_init__(self) -> None:
        self.runs = Runs(self.library, self.architecture, self.request.seed)
        self.cells: list[ModelCell] = []
        self.found: list[Found] = []
        self.unreached = False
        self.failure = ""

    def run(self) -> None:
        """Judge every situation, until it shows that the model does not call the function."""
        for rank, situation in enumerate(self.library.situations):
            if self.architecture.asked(situation) and (situation.quick or not self.request.quick):
                if failure := self.runs.right(situation).failure:
                    self.failure = failure
                    continue  # the model itself cannot be run so
                self.unreached = not self._judge(situation, 100 * rank + self.number + 1)
                if self.unreached:
                    return

    def _judge(self, situation: Situation, size: int) -> bool:
        """Judge one situation; false if the function is never called."""
        cell, ran = self.runs.judge(situation, self.registration, size)
        if not ran.calls and not ran.failure:
            return False
        self.cells.append(cell)
        if cell.state == "wrong":
            program = reproducer(self.architecture, situation, self.registration, self.request.seed)
            self.found.append(Found(cell, self._cause(situation, ran), program))
        if situation.unmasked and self.registration.mask is not None:
            bare, _ = self.runs.judge(situation, replace(self.registration, mask=None), size)
            state = "needs mask" if bare.state == "wrong" else bare.state
            self.cells.append(replace(bare, group=UNMASKED, state=state))
        return True

    def _cause(self, situation: Situation, ran: Ran) -> Cause:
        if situation.dropout or ran.failure:
            return Cause(where=described(self.runs, ran.calls[-1], ran.calls)) if ran.calls else Cause()
        return cause_of(self.runs, self.runs.right(situation), ran, self.registration)


def best_registration(
    library: Library, architectures: Sequence[Architecture], function: Any, make: Callable[[Any, str], Registration]
) -> Registration:
    """Find the mask function that an attention function understands, by trying them on a few models.

    Args:
        library: Of the models.
        architectures: The first of each kind is tried.
        function: The attention function.
        make: Gives a registration of it with the mask function of a name.

    Returns:
        That with which the fewest calls fail or are wrong.
    """
    kinds = {one.kind: one for one in reversed(architectures)}
    best: tuple[int, Registration] | None = None
    for name in library.masks:
        registration = make(function, name)
        tried = [_trial(library, one, registration) for one in kinds.values()]
        if best is None or sum(tried) < best[0]:
            best = sum(tried), registration
        if not best[0]:
            break
    assert best is not None
    return best[1]


def _trial(library: Library, architecture: Architecture, registration: Registration) -> int:
    """Count what is wrong with a mask function; a function that fails counts double."""
    runs = Runs(library, architecture)
    count = 0
    for situation in library.situations:
        if architecture.asked(situation) and situation.unmasked and not runs.right(situation).failure:
            cell, ran = runs.judge(situation, registration, 0)
            count += 0 if cell.state == "right" else 2 if ran.failure else 1
    return count
