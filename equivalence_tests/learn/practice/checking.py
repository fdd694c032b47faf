"""Check a solution: its numbers decide, and the known mistakes and the checker say why they are wrong."""

import ast
import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text
from torch import Tensor

from equivalence_tests.checker.reporting.findings import Finding
from equivalence_tests.checker.reporting.lines import CodeLine, code_lines, frames_of
from equivalence_tests.checker.reporting.rendering import Shown, findings_view
from equivalence_tests.checker.verify import verify
from equivalence_tests.instruments.differences import compare_tensors
from equivalence_tests.learn.excerpts import Excerpt
from equivalence_tests.learn.practice.exercise import IMPORTS, Call, Exercise, Mistake
from equivalence_tests.learn.practice.listing import find_exercise
from equivalence_tests.learn.terminal import code_block, quote

__all__ = [
    "Answer",
    "check",
    "check_solution",
    "difference",
    "has_blank",
    "results_of_mistakes",
    "run_calls",
    "solution",
    "solution_view",
]

# What came out of each call, by its name: a tensor, the error, or what else is wrong in words.
Results = dict[str, Tensor | Exception | str]


@dataclass(repr=False)
class Answer(Shown):
    """The answer to a solution.

    Args:
        exercise: Its name.
        solved: Whether all of its numbers are right.
        calls: What it was called with, in words.
        difference: The first number that is wrong; "" if none is.
        mistake: What is wrong, on which line: a known mistake, or an error that was raised.
        findings: What the checker finds.
        trap: The trap of torch.nn that it fell into; "" if none.
    """

    exercise: str
    solved: bool
    calls: tuple[str, ...]
    difference: str = ""
    mistake: Finding | None = None
    findings: tuple[Finding, ...] = ()
    trap: str = ""

    def __rich__(self) -> Group:
        """Lay the answer out for a terminal."""
        return Group(*self._parts())

    def _parts(self) -> Iterator[RenderableType]:
        if self.solved:
            yield Text.assemble(("SOLVED", "bold green"), f"  {self.exercise}  ({'; '.join(self.calls)})")
            return
        yield Text.assemble(("NOT YET", "bold red"), f"  {self.exercise}")
        yield from (Padding(part, (1, 0, 0, 2)) for part in self._reasons())

    def _reasons(self) -> Iterator[RenderableType]:
        if self.difference:
            yield Text(self.difference)
        if self.mistake is not None:
            yield from findings_view([self.mistake])
        if self.findings:
            yield Text("What `sidebyside verify` finds:", style="dim")
            yield from findings_view(self.findings)
        if self.trap:
            yield Text(f"A trap of torch.nn. To see it run: sidebyside traps {self.trap}")


def check(name: str, function: Callable[..., Any]) -> Answer:
    """Check a solution that is a function of this session, as in a notebook.

    Args:
        name: Name or number of the exercise.
        function: The solution.

    Returns:
        The answer; print it.

    Raises:
        ValueError: If there is no such exercise.

    >>> def scale(q, k, v):
    ...     return torch.softmax(q @ k.mT / q.size(-1) ** 0.5, dim=-1) @ v
    >>> check("scale", scale).solved
    True
    """
    try:
        return check_solution(find_exercise(name), function)
    except LookupError as error:
        raise ValueError(str(error)) from None


def solution(name: str) -> None:
    """Print one solution, and the same lines of this project.

    Args:
        name: Name or number of the exercise.

    Raises:
        ValueError: If there is no such exercise.
    """
    from equivalence_tests.learn import terminal

    try:
        terminal.console().print(solution_view(find_exercise(name)))
    except LookupError as error:
        raise ValueError(str(error)) from None


def solution_view(exercise: Exercise) -> Group:
    """Lay a solution out, above the lines of this project that do the same."""
    quoted: list[Excerpt] = [place.excerpt() for place in exercise.textbook]
    return Group(code_block(exercise.source), "", Text("The same in this project", style="bold"), "", quote(quoted))


def has_blank(function: Callable[..., Any]) -> bool:
    """Say whether the blank is still there: a ``...`` that stands for a statement or a value, and not for axes."""
    try:
        tree = ast.parse(inspect.getsource(function).strip())
    except (OSError, SyntaxError):  # typed in where no source is kept
        return False
    holders = [node for node in ast.walk(tree) if isinstance(node, ast.Expr | ast.Assign | ast.Return)]
    return any(isinstance(node.value, ast.Constant) and node.value.value is ... for node in holders)


def check_solution(exercise: Exercise, function: Callable[..., Any]) -> Answer:
    """Compare a solution with the right one in every call, and find out what is wrong with it."""
    calls = tuple(call.what for call in exercise.calls())
    if has_blank(function):
        return Answer(exercise.name, False, calls, "The blank is not filled in: write your code in place of the `...`.")
    ran = run_calls(exercise, function)
    wrong = difference(ran, run_calls(exercise, exercise.solution))
    if not wrong:
        return Answer(exercise.name, True, calls)
    findings = _verified(exercise, function)
    known = zip(exercise.mistakes, results_of_mistakes(exercise.name), strict=True)
    mistake = next((one for one, theirs in known if not difference(ran, theirs)), None)
    if mistake is None:
        return Answer(exercise.name, False, calls, wrong, _error(ran), findings)
    named = Finding("known", "", mistake.why, stack=_line_like(mistake, exercise, function))
    return Answer(exercise.name, False, calls, wrong, named, findings, mistake.trap)


def run_calls(exercise: Exercise, function: Callable[..., Any]) -> Results:
    """Run every call, from one seed each; an error counts as a result."""
    results: Results = {}
    for call in exercise.calls():
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's: flex attention that is not compiled
                results |= _named(exercise, call, exercise.use(function(**call.arguments)))
        except Exception as error:  # a learner's code can raise anything
            results[call.what] = error
    return results


def _named(exercise: Exercise, call: Call, returned: Any) -> Results:
    """Give what was returned by name; in words if it is no tensor."""
    values = returned if isinstance(returned, tuple) else (returned,)
    if len(values) != len(exercise.outputs):
        wanted = " and ".join(exercise.outputs)
        return {call.what: f"{len(values)} values were returned, but there should be {len(exercise.outputs)}: {wanted}"}
    words = (x.detach() if isinstance(x, Tensor) else f"{x!r} is not a tensor" for x in values)
    return {f"{call.what}: {name}": x for name, x in zip(exercise.outputs, words, strict=True)}


def difference(found: Results, want: Results) -> str:
    """Say which number is the first wrong one; "" if none is."""
    for name, mine in found.items():
        theirs = want.get(name)
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
            comparison = compare_tensors(mine, theirs, name=name)
            if not comparison.passed:
                return f"{str(comparison).split(' (')[0] if comparison.greatest else comparison}."
        elif isinstance(mine, Tensor) or str(mine) != str(theirs):
            raised = f"{type(mine).__name__}: " if isinstance(mine, Exception) else ""
            return f"{name}: {raised}{mine if not isinstance(mine, Tensor) else 'a tensor'}"
    return ""


@functools.cache
def results_of_mistakes(name: str) -> tuple[Results, ...]:
    """Run every known mistake of an exercise."""
    exercise = find_exercise(name)
    return tuple(run_calls(exercise, compiled(exercise, exercise.with_mistake(one))) for one in exercise.mistakes)


def _error(ran: Results) -> Finding | None:
    """Report the first error, at the line that raised it."""
    for x in ran.values():
        if isinstance(x, Exception):
            return Finding("raises", "", f"It raises a {type(x).__name__}.", stack=code_lines(frames_of(x)))
    return None


def _verified(exercise: Exercise, function: Callable[..., Any]) -> tuple[Finding, ...]:
    """Ask the checker, which follows the formula: where that is written by hand, in every call that it can judge."""
    calls = [] if exercise.is_built_in else [call for call in exercise.calls() if not call.is_random]
    reports = (report for call in calls for report in verify(function, call.arguments))
    return next((tuple(report.findings) for report in reports if report.findings), ())


def compiled(exercise: Exercise, source: str) -> Callable[..., Any]:
    """Make a function of source text."""
    names: dict[str, Any] = {}
    exec(compile(IMPORTS + source, f"<{exercise.name}>", "exec"), names)
    return names[exercise.name]


def _line_like(mistake: Mistake, exercise: Exercise, function: Callable[..., Any]) -> tuple[CodeLine, ...]:
    """Find the line of a solution that looks most like those that the mistake changes."""
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError:  # typed in where no source is kept
        return ()
    right, wrong = (
        set(map(str.strip, text.splitlines())) for text in (exercise.source, exercise.with_mistake(mistake))
    )
    changed = (wrong - right) or (right - wrong)
    likeness = [max(difflib.SequenceMatcher(None, line.strip(), x).ratio() for x in changed) for line in lines[1:]]
    place = inspect.getsourcefile(function) or "", first + 1 + likeness.index(max(likeness)), exercise.name
    return code_lines((place,))
