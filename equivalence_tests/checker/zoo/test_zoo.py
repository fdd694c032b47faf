"""The zoo: every mistake is found and named, and nothing right is blamed.

One class for each mistake runs here; ``make diagnose-report`` runs each in every convention. A mistake that
``test_mistakes.py`` makes of right code is made in these classes too where the run is thorough.
"""

from typing import Any

import pytest

from equivalence_tests.checker.mistakes import MISTAKES
from equivalence_tests.checker.zoo import builders, layers
from equivalence_tests.checker.zoo.confusion import judged_case
from equivalence_tests.checker.zoo.listing import zoo

# The tests of layers and of mask builders verify theirs, and ask for more.
ELSEWHERE = (*layers.CORRECT, *builders.CORRECT, *(broken for broken, *_ in (*layers.BROKEN, *builders.BROKEN)))
HERE = [index for index, case in enumerate(zoo()) if case.target not in ELSEWHERE]
# The defects of a row differ in convention only: its first stands for all of them.
FIRST_OF_ROW = list({zoo()[index].row: index for index in reversed(HERE) if zoo()[index].expected}.values())
CORRECT = [index for index in HERE if not zoo()[index].expected]
# What a search over one convention missed once: mistakes that let the future through, and layouts that turn inside.
HARD = (
    "SplitsByReshapeInFusedCausal",
    "ViewsKeysInFusedCausal",
    "MergesByReshapeInSequenceFirst",
    "FillsWithTinyInFusedCausal",
    "FillsWithTinyInSequenceFirst",
    "DropsScoresInPostNorm",
)
OTHERS = [index for index in HERE if zoo()[index].label in HARD and index not in FIRST_OF_ROW]


def label(index: int) -> str:
    return zoo()[index].label


def is_made_elsewhere(index: int) -> bool:
    """Whether a test makes the one mistake of a class of right code, and asks for its name."""
    expected = zoo()[index].expected
    return len(expected) == 1 and all(MISTAKES[name].right for name in expected[0])


def marked(index: int) -> Any:
    repeats = is_made_elsewhere(index) and index not in OTHERS
    return pytest.param(index, marks=pytest.mark.thorough if repeats else ())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("index", [*map(marked, sorted(FIRST_OF_ROW + OTHERS))], ids=label)
def test_mistakes_are_named(index: int) -> None:
    judged = judged_case(index)
    assert judged.found, judged.said
    assert judged.named, judged.said


@pytest.mark.sampled(2)
@pytest.mark.parametrize("index", CORRECT, ids=label)
def test_what_is_right_is_found_equal(index: int) -> None:
    judged = judged_case(index)
    assert judged.named, judged.said
