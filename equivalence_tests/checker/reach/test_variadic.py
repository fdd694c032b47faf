"""Arguments that no signature names are known by what the code takes out of them, or by whom it hands them to."""

from typing import Any

import pytest
from torch import Tensor, nn

from equivalence_tests.checker.reach.proposing import parameters_of
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.stages import ThreeMatrices


class Named(ThreeMatrices):
    """Right."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.projected(query, key, value)
        scores = self.scores(q, k)
        scores = scores if mask is None else scores.masked_fill(mask == 0, -1e9)
        return self.finish(self.weigh(scores) @ v)


class ByKeys(Named):
    """Right: the constructor takes its sizes out of a dictionary."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(kwargs["d_model"], kwargs.get("num_heads", 2))


class HandsOn(nn.Module):
    """Right: all goes on to another class, and another forward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.inner = Named(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner(*args, **kwargs)


class Unpacks(Named):
    """Right."""

    def forward(self, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        query, key, value = tensors
        return super().forward(query, key, value)


class Counts(Named):
    """Right."""

    def forward(self, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs[0], inputs[1], inputs[2])


class OfTorch(nn.MultiheadAttention):
    """Right: torch's own, of one tensor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def forward(self, *x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x[0], x[0], x[0], need_weights=False)[0]


class OverQueries(Unpacks):
    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-2)


@pytest.mark.parametrize("right", [ByKeys, HandsOn, Unpacks, Counts, OfTorch])
def test_what_is_not_named_is_given(right: type[nn.Module]) -> None:
    report = verify(right)
    assert report.verdict == "equal", str(report)


def test_a_mask_that_is_handed_on_is_tried() -> None:
    assert any(row[0] == "mask (mask)" for row in verify(HandsOn).conventions)


def test_what_is_wrong_behind_it_is_found() -> None:
    report = verify(OverQueries)
    assert report.mistakes == ("softmax_over_queries",), str(report)


def test_what_is_given_there_is_not_asked_for_again() -> None:
    class Above(nn.Module):
        def __init__(self, dim: int, heads: int, bias: bool = True) -> None:
            super().__init__()

    class Below(Above):
        def __init__(self, width: int, **kwargs: Any) -> None:
            super().__init__(width, bias=False, **kwargs)

    assert [p.name for p in parameters_of(Below)] == ["width", "heads"]


class TakesAFactor(Named):
    """Right: takes a factor of the caller's, if one is there."""

    def __init__(self, dim: int, heads: int, **kwargs: Any) -> None:
        super().__init__(dim, heads)
        self.factor = float(kwargs["factor"]) if "factor" in kwargs else 1.0

    def weigh(self, scores: Tensor) -> Tensor:
        return (scores * self.factor).softmax(-1)


class WrongWithoutAContext(Named):
    """Without a context, which is the default, the scores are doubled."""

    def forward(self, x: Tensor, **kwargs: Tensor) -> Tensor:  # type: ignore[override]
        if "context" in kwargs:
            return super().forward(x, kwargs["context"], kwargs["context"])
        return super().forward(2 * x, x, x)


def test_what_is_asked_for_first_may_be_left_out() -> None:
    assert verify(TakesAFactor).verdict == "equal"
    assert verify(WrongWithoutAContext).verdict != "equal"
