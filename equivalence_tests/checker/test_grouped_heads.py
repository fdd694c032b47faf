"""verify on attention whose keys and values have fewer heads than the queries."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests import verify
from equivalence_tests.checker.helpers_for_tests import line_of
from equivalence_tests.checker.reach.arguments import Sizes, value_for
from equivalence_tests.checker.zoo.stages import OneMatrix


class Grouped(nn.Module):
    """Right: each head of keys serves heads of queries that lie side by side."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.num_heads, self.groups, head_dim = num_heads, num_heads // num_kv_heads, dim // num_heads
        self.num_kv_heads = num_kv_heads
        self.wq, self.wo = nn.Linear(dim, dim, bias), nn.Linear(dim, dim, bias)
        self.wk, self.wv = (nn.Linear(dim, num_kv_heads * head_dim, bias) for _ in range(2))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.wq(x), self.wk(x), self.wv(x)

    def shared(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.groups, dim=1)

    def causal(self, scores: Tensor) -> Tensor:
        return scores

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        q = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = (self.shared(y.unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)) for y in (k, v))
        scores = self.causal(q @ k.mT / q.size(-1) ** 0.5)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Tiled(Grouped):
    """Wrong: repeat puts heads 0, 1, 0, 1 where repeat_interleave puts 0, 0, 1, 1."""

    def shared(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.groups, 1, 1)


class Packed(Grouped):
    """One matrix for queries, keys and values, whose parts are of different heights."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__(dim, num_heads, num_kv_heads)
        self.heights = [dim, self.wk.out_features, self.wv.out_features]
        self.qkv = nn.Linear(dim, sum(self.heights))
        del self.wq, self.wk, self.wv

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).split(self.heights, dim=-1)
        return q, k, v


class FromConfig(Grouped):
    """The counts come from a config."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads, config.num_key_value_heads)


@dataclass
class Settings:
    """The counts have defaults that do not fit other counts of heads."""

    dim: int = 1024
    n_heads: int = 16
    n_kv_heads: int = 4


class FromSettings(Grouped):
    def __init__(self, config: Settings) -> None:
        super().__init__(config.dim, config.n_heads, config.n_kv_heads)


class TiledFromSettings(FromSettings, Tiled):
    pass


class TakesThemOptionally(Tiled):
    """As many heads of keys as of queries, unless it is asked otherwise."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int | None = None) -> None:
        super().__init__(dim, n_heads, n_heads if n_kv_heads is None else n_kv_heads)


class NeverGroups(Grouped):
    """Takes the count, and runs only where it is that of the queries."""

    def shared(self, x: Tensor) -> Tensor:
        return x


class OffersGroups(OneMatrix):
    """Has an argument that no line reads, as code that was taken from a grouped one may."""

    def __init__(self, dim: int, heads: int, n_kv_heads: int | None = None) -> None:
        super().__init__(dim, heads)


class OneKeyHead(Grouped):
    """All heads share one head of keys and one of values, packed."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads, 1)
        self.wkv = nn.Linear(dim, 2 * self.wk.out_features)
        del self.wk, self.wv

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self.wkv(x).chunk(2, dim=-1)
        return self.wq(x), k, v


class MaskOfTheDefaultDtype(Grouped):
    """The causal mask is made in each call, in whatever dtype is the default then."""

    def causal(self, scores: Tensor) -> Tensor:
        length = scores.size(-1)
        return scores + torch.full((length, length), -torch.inf, device=scores.device).triu(1)


@pytest.mark.parametrize(
    ("right", "heads"),
    [
        (Grouped, "6; keys and values have 2"),
        (Packed, "6; keys and values have 2"),
        (FromConfig, "6; keys and values have 2"),
        (FromSettings, "6; keys and values have 2"),
        (OneKeyHead, "3; keys and values have 1"),
        (lambda: Grouped(24, 4, 2, bias=False), "4; keys and values have 2"),
        (lambda: Grouped(24, 4, 4), "4"),
        (MaskOfTheDefaultDtype, "6; keys and values have 2"),
    ],
)
def test_shared_keys_and_values_are_read(right: Callable[..., Any], heads: str) -> None:
    report = verify(right)
    assert report.verdict == "equal", str(report)
    assert next(theirs for what, theirs, _ in report.conventions if what == "heads") == heads


@pytest.mark.parametrize("broken", [Tiled, lambda: Tiled(24, 4, 2), TiledFromSettings, TakesThemOptionally])
def test_keys_repeated_in_the_wrong_order_are_named(broken: Callable[..., Any]) -> None:
    report = verify(broken)
    assert [finding.name for finding in report.findings] == ["grouped_heads_tiled"], str(report)
    assert "x.repeat(1, self.groups, 1, 1)" in line_of(report.findings[0])


class TiledByAnotherName(Tiled):
    """The name of the third argument says nothing."""

    def __init__(self, d: int, h: int, kv: int) -> None:
        super().__init__(d, h, kv)


class RightByAnotherName(Grouped):
    def __init__(self, d: int, h: int, zebra: int) -> None:
        super().__init__(d, h, zebra)


def test_what_a_name_does_not_say_may_be_a_count_of_key_heads() -> None:
    assert [finding.name for finding in verify(TiledByAnotherName).findings] == ["grouped_heads_tiled"]
    report = verify(RightByAnotherName)
    assert report.verdict == "equal", str(report)
    assert ("heads", "6; keys and values have 2") in [(what, here) for what, here, _ in report.conventions]


def test_groups_that_never_ran_are_listed() -> None:
    report = verify(NeverGroups)
    assert report.verdict == "partial"
    assert [exercise.what for exercise in report.not_exercised] == ["heads that share keys"]


def test_a_count_that_no_line_reads_asks_for_no_groups() -> None:
    assert verify(OffersGroups).verdict == "equal"


@pytest.mark.parametrize("name", ["n_kv_heads", "num_key_value_heads", "num_kv_groups", "n_heads_kv", "n_query_groups"])
def test_names_that_count_heads_of_keys(name: str) -> None:
    assert value_for(name, Sizes(num_heads=6)) == (True, 2)
