"""Images that are handed over cut into windows, with rows and columns of windows and of pixels in each."""

from typing import Any

import pytest
from torch import Tensor

from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.stages import OneMatrix


class AttendsInWindows(OneMatrix):
    """(batch, rows and columns of windows, height and width of each, features)."""

    def windows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.size(3) * x.size(4), x.size(5))

    def images(self, attended: Tensor, x: Tensor) -> Tensor:
        return attended.view_as(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.images(super().forward(self.windows(x)), x)


class TakesPixelsOfOtherWindows(AttendsInWindows):
    def windows(self, x: Tensor) -> Tensor:
        return super().windows(x.transpose(2, 3))


class PutsWindowsInOtherPlaces(AttendsInWindows):
    def images(self, attended: Tensor, x: Tensor) -> Tensor:
        return super().images(attended, x.transpose(1, 2)).transpose(1, 2)


class TurnsEachWindow(AttendsInWindows):
    def images(self, attended: Tensor, x: Tensor) -> Tensor:
        return super().images(attended, x).transpose(3, 4).reshape(x.shape)


def test_attention_in_windows_that_are_handed_over_is_compared_with_torch() -> None:
    report = verify(AttendsInWindows)
    assert (report.verdict, report.not_exercised) == ("equal", []), str(report)
    assert report.equivalent is not None
    assert "class Equivalent(nn.MultiheadAttention)" in report.equivalent.source
    assert "two images of 3 by 2 windows" in report.equivalent.compared


@pytest.mark.parametrize("other", [TakesPixelsOfOtherWindows, PutsWindowsInOtherPlaces, TurnsEachWindow])
def test_windows_that_are_mixed_up_are_no_equal(other: Any) -> None:
    assert verify(other).verdict in ("deviates", "unchecked"), str(verify(other))
