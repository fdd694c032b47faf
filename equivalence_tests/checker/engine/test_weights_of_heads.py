"""Weights that are a list, one for each head, as parameters or modules, and are repeated for each sample."""

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.verify import verify


class ListOfWeights(nn.Module):
    wqs: Any
    wks: Any
    wvs: Any

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.wqs, self.wks, self.wvs = (self.made(d_model, d_model // num_heads) for _ in range(3))
        self.wo = nn.Linear(d_model, d_model)

    def made(self, width: int, own: int) -> Any:
        return nn.ParameterList(nn.Parameter(torch.randn(width, own)) for _ in range(self.num_heads))

    def head(self, query: Tensor, key: Tensor, value: Tensor, i: int) -> Tensor:
        q, k, v = (
            self.projected(query, self.wqs[i]),
            self.projected(key, self.wks[i]),
            self.projected(value, self.wvs[i]),
        )
        return (q @ k.mT / sqrt(q.size(-1))).softmax(-1) @ v

    def projected(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.wo(torch.cat([self.head(query, key, value, i) for i in range(self.num_heads)], -1))


class RepeatsItsWeights(ListOfWeights):
    def projected(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.repeat(len(x), 1, 1)


class ListOfModules(ListOfWeights):
    def made(self, width: int, own: int) -> Any:
        return nn.ModuleList(nn.Linear(width, own) for _ in range(self.num_heads))

    def projected(self, x: Tensor, weight: Any) -> Tensor:
        return weight(x)


RIGHT = ListOfWeights, RepeatsItsWeights, ListOfModules


def keys_like_queries(self: Any, query: Tensor, key: Tensor, value: Tensor, i: int) -> Tensor:
    q, k, v = self.projected(query, self.wqs[i]), self.projected(key, self.wqs[i]), self.projected(value, self.wvs[i])
    return (q @ k.mT / sqrt(q.size(-1))).softmax(-1) @ v


def values_like_keys(self: Any, query: Tensor, key: Tensor, value: Tensor, i: int) -> Tensor:
    q, k, v = self.projected(query, self.wqs[i]), self.projected(key, self.wks[i]), self.projected(value, self.wks[i])
    return (q @ k.mT / sqrt(q.size(-1))).softmax(-1) @ v


def always_the_first(self: Any, query: Tensor, key: Tensor, value: Tensor, i: int) -> Tensor:
    return ListOfWeights.head(self, query, key, value, 0)


def not_scaled(self: Any, query: Tensor, key: Tensor, value: Tensor, i: int) -> Tensor:
    q, k, v = self.projected(query, self.wqs[i]), self.projected(key, self.wks[i]), self.projected(value, self.wvs[i])
    return (q @ k.mT).softmax(-1) @ v


WRONG = {
    keys_like_queries: "key_uses_query_projection",
    values_like_keys: "value_uses_key_projection",
    always_the_first: "heads_missing_or_repeated",
    not_scaled: "scale_missing",
}


@pytest.mark.parametrize("found", RIGHT, ids=lambda found: found.__name__)
def test_weights_may_be_a_list_and_repeated_for_each_sample(found: type[nn.Module]) -> None:
    report = verify(found)
    assert report.verdict == "equal", str(report)


@pytest.mark.parametrize("found", RIGHT, ids=lambda found: found.__name__)
@pytest.mark.parametrize("head", WRONG, ids=lambda head: head.__name__)
def test_weights_of_a_list_that_are_used_twice_are_named_and_shown(found: type[nn.Module], head: Any) -> None:
    report = verify(type(found.__name__, (found,), {"head": head, "__module__": __name__}))
    assert report.mistakes == (WRONG[head],), str(report)
    assert report.findings[0].is_proven


class ListOfSlices(ListOfWeights):
    """Gives each head a slice of the features and matrices that are no wider, and returns a map of each."""

    def made(self, width: int, own: int) -> Any:
        return nn.ModuleList(nn.Linear(own, own) for _ in range(self.num_heads))

    def slice_of(self, x: Tensor, i: int) -> Tensor:
        return x.chunk(self.num_heads, -1)[i]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / sqrt(q.size(-1))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, list[Tensor]]:  # type: ignore[override]
        maps, made = [], []
        for i in range(self.num_heads):
            q, k, v = self.wqs[i](self.slice_of(query, i)), self.wks[i](self.slice_of(key, i)), self.value(value, i)
            maps.append(self.scores(q, k).softmax(-1))
            made.append(maps[-1] @ v)
        return self.wo(torch.cat(made, -1)), maps

    def value(self, x: Tensor, i: int) -> Tensor:
        return self.wvs[i](self.slice_of(x, i))


class TakesTheFirstSlice(ListOfSlices):
    def slice_of(self, x: Tensor, i: int) -> Tensor:
        return x.chunk(self.num_heads, -1)[0]


class TakesSlicesBackwards(ListOfSlices):
    def slice_of(self, x: Tensor, i: int) -> Tensor:
        return x.chunk(self.num_heads, -1)[-1 - i]


class TakesOtherValues(ListOfSlices):
    def value(self, x: Tensor, i: int) -> Tensor:
        return self.wvs[i](self.slice_of(x, -1 - i))


class ReturnsOtherMaps(ListOfSlices):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, list[Tensor]]:  # type: ignore[override]
        output, maps = super().forward(query, key, value)
        return output, [(2 * x.log()).softmax(-1) for x in maps]


class DoesNotScaleSlices(ListOfSlices):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT


def test_each_head_may_project_a_slice_of_its_own() -> None:
    report = verify(ListOfSlices)
    assert report.verdict == "equal", str(report)
    assert "each head takes features of its own" in str(report)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (TakesTheFirstSlice, "a part of the features"),
        (TakesSlicesBackwards, "is projected from other tokens or features"),
        (TakesOtherValues, "is projected from other tokens or features"),
        (ReturnsOtherMaps, "maps that are returned are not the weights"),
        (DoesNotScaleSlices, "The scores are not scaled."),
    ],
)
def test_other_slices_are_not_passed_over(found: type[nn.Module], words: str) -> None:
    report = verify(found)
    assert report.verdict in ("deviates", "unchecked"), str(report)
    assert words in " ".join(str(report).split())
