"""What conditions were in calls is noted, and what they never were is listed."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests import verify
from equivalence_tests.checker.reach.branches import NOT_RUN, Branches
from equivalence_tests.checker.zoo.right import broken


def helped(x: int, times: int) -> int:
    return x * times if times > 1 else x + int(x > 5)


def chosen(x: int, y: int | None = None) -> int:
    if not (x <= 3 or x % 7 == 0):
        x = helped(x, 1) if x % 2 else x
    elif x < -100:
        raise ValueError(x)
    if torch.cuda.is_available():
        print(x)
    if y is not None:
        x += y
    return x


def far(x: int) -> int:
    if x > 0:
        x = x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1
        x = x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1
        x = x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1
        x = x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1
        x = x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1
        x = x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1 + x + 1
    return x


def many(x: int) -> int:
    x = x + 1 if x == 1 else x
    x = x + 1 if x == 20 else x
    x = x + 1 if x == 30 else x
    x = x + 1 if x == 40 else x
    x = x + 1 if x == 50 else x
    x = x + 1 if x == 60 else x
    x = x + 1 if x == 70 else x
    return x + 1 if x == 80 else x


class Switched(nn.Module):
    def __init__(self, doubled: bool = False) -> None:
        super().__init__()
        self.doubled = doubled

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 0
        return 2 * x if self.doubled else x


def never(target: object, *calls: object) -> list[str]:
    seen = Branches()
    for x in calls:
        seen.watching(target)(*x if isinstance(x, tuple) else (x,))  # type: ignore[arg-type]
    listed = list(seen.never(target))
    assert all(one.detail == NOT_RUN and not one.exercised for one in listed)
    return [one.what.partition("where ")[2] or one.what for one in listed]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ((1,), ["`x <= 3` is false", "`y is not None` is true"]),
        ((1, (5, 2)), ["`x % 7 == 0` is true", "`x % 2` is false"]),
        ((1, (5, 2), 7), ["`x % 2` is false"]),
        ((1, (5, 2), 7, 8), []),
    ],
)
def test_what_no_call_was_is_listed(calls: tuple[object, ...], expected: list[str]) -> None:
    assert never(chosen, *calls) == expected  # neither what only refuses, nor what the callers of a helper ask for


@pytest.mark.parametrize(("call", "expected"), [(1, "`x > 0` is false"), (-1, "`x > 0` is true")])
def test_a_jump_over_many_lines_is_noted(call: int, expected: str) -> None:
    assert never(far, call) == [expected]


def test_how_many_more_conditions_there_are_is_said() -> None:
    assert never(many, 0)[-2:] == ["`x == 60` is true", "2 more conditions"]


def test_what_an_instance_holds_is_as_it_is() -> None:
    assert never(Switched().eval(), torch.ones(1)) == ["`self.training` is true"]


def test_a_tracer_that_was_there_before_stays() -> None:
    before = sys.gettrace()
    never(chosen, 1)
    assert sys.gettrace() is before


LONG = (
    "weights = scores",
    "scores = scores.clone() if scores.amax() < 900 else scores / 2\n        weights = scores",
)


def test_an_equal_lists_the_ways_that_it_did_not_go(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(broken("cross", (LONG,)))
    report = verify(f"{tmp_path / 'mine.py'}:Attention")
    assert report.verdict == "partial", str(report)
    assert [one.what.partition("where ")[2] for one in report.not_exercised] == ["`scores.amax() < 900` is false"]
