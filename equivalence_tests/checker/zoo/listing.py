"""The list of all classes of the zoo, each with what the checker must say."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from equivalence_tests.checker.zoo import builders, layers, parts, source_defects
from equivalence_tests.checker.zoo.conventions import CONVENTIONS
from equivalence_tests.checker.zoo.defects import DEFECTS

__all__ = ["Case", "cases", "combinations", "zoo"]


@dataclass(frozen=True)
class Case:
    """One class and its diagnosis.

    Args:
        label: Convention and defect.
        target: What to verify.
        expected: For each mistake in it, the names that are right; empty for a correct class.
        row: The row of the list of bugs.
    """

    label: str
    target: Any
    expected: tuple[tuple[str, ...], ...] = ()
    row: str = "correct"


def cases() -> Iterator[Case]:
    """List the correct classes, every defect in every convention that can have it, and the parts."""
    yield from (Case(convention.__name__, convention) for convention in CONVENTIONS)
    correct_parts: tuple[Any, ...] = (*parts.CORRECT, *builders.CORRECT, *layers.CORRECT)
    yield from (Case(found.__name__, found) for found in correct_parts)
    for defect in DEFECTS:
        for convention in defect.conventions:
            broken = type(f"{defect.mixin.__name__}In{convention.__name__}", (defect.mixin, convention), {})
            yield Case(broken.__name__, broken, (defect.names,), defect.row)
    broken_parts: tuple[tuple[Any, tuple[str, ...], str], ...] = (
        *parts.BROKEN,
        *builders.BROKEN,
        *layers.BROKEN,
        *source_defects.BROKEN,
    )
    for found, names, row in broken_parts:
        yield Case(found.__name__, found, tuple((name,) for name in names), row)


def combinations() -> Iterator[Case]:
    """List pairs and triples of defects in one class."""
    by_name = {defect.mixin.__name__: defect for defect in DEFECTS}
    for convention, *names in (
        (CONVENTIONS[0], "ScalesByWholeWidth", "MergesByReshape"),
        (CONVENTIONS[0], "SplitsByReshape", "DoesNotScale"),
        (CONVENTIONS[0], "LeavesValueAlone", "SoftmaxOverQueries"),
        (CONVENTIONS[2], "DoesNotScale", "SeesNextToken"),
        (CONVENTIONS[5], "ScalesByWholeWidth", "ForgetsResidual"),
        (CONVENTIONS[0], "SplitsByReshape", "MergesByReshape", "ScalesByWholeWidth"),
        (CONVENTIONS[2], "DoesNotScale", "SeesNextToken", "MergesByReshape"),
    ):
        mixins = tuple(by_name[name].mixin for name in names)
        broken = type("And".join(names) + "In" + convention.__name__, (*mixins, convention), {})
        yield Case(broken.__name__, broken, tuple(by_name[name].names for name in names), f"{len(names)} together")


@cache
def zoo() -> list[Case]:
    """All of them, in one order."""
    return [*cases(), *combinations()]
