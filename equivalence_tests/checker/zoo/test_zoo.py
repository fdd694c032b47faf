"""The zoo: every mistake is found and named, and nothing right is blamed.

One class for each mistake runs here; ``make diagnose-report`` runs each in every convention.
"""

import pytest

from equivalence_tests.checker.zoo.confusion import judged_case
from equivalence_tests.checker.zoo.listing import zoo

# The defects of a row differ in convention only: its first stands for all of them.
FIRST_OF_ROW = list({case.row: index for index, case in reversed(list(enumerate(zoo()))) if case.expected}.values())
CORRECT = [index for index, case in enumerate(zoo()) if not case.expected]
# What a search over one convention missed once: mistakes that let the future through, and layouts that turn inside.
HARD = (
    "SplitsByReshapeInFusedCausal",
    "ViewsKeysInFusedCausal",
    "MergesByReshapeInSequenceFirst",
    "FillsWithTinyInFusedCausal",
    "FillsWithTinyInSequenceFirst",
    "DropsScoresInPostNorm",
)
OTHERS = [index for index, case in enumerate(zoo()) if case.label in HARD and index not in FIRST_OF_ROW]


def label(index: int) -> str:
    return zoo()[index].label


@pytest.mark.parametrize("index", sorted(FIRST_OF_ROW + OTHERS), ids=label)
def test_mistakes_are_named(index: int) -> None:
    judged = judged_case(index)
    assert judged.found, judged.said
    assert judged.named, judged.said


@pytest.mark.parametrize("index", CORRECT, ids=label)
def test_what_is_right_is_found_equal(index: int) -> None:
    judged = judged_case(index)
    assert judged.named, judged.said
