"""verify on modules that remember: each call must start from the same state."""

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests import verify
from equivalence_tests.checker.zoo.stages import ThreeMatrices


class Remembers(ThreeMatrices):
    """Keys and values are written into a cache, graph and all; in eval nothing but the new tokens is looked at."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.cache = torch.zeros(2, 64, 64, dim)

    def remembered(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, _ = x.shape
        self.cache = self.cache.to(x)
        self.cache[0, :batch, :length], self.cache[1, :batch, :length] = self.k(x), self.v(x)
        return self.cache[0, :batch, :length], self.cache[1, :batch, :length]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), *self.remembered(x)))
        return self.finish(self.attend(q, k, v))


class Grows(Remembers):
    """Keys and values are joined with those of all calls before."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.kv_cache: Tensor | None = None

    def remembered(self, x: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.stack((self.k(x), self.v(x)))
        self.kv_cache = both if self.kv_cache is None else torch.cat((self.kv_cache, both), 2)
        return self.kv_cache[0], self.kv_cache[1]


class RemembersUnscaled(Remembers):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT


@pytest.mark.parametrize(
    ("right", "name", "never"), [(Remembers, "cache", []), (Grows, "kv_cache", ["`self.kv_cache is None` is false"])]
)
def test_no_call_sees_what_another_left(right: type[nn.Module], name: str, never: list[str]) -> None:
    report = verify(right)
    assert [one.what.partition("where ")[2] for one in report.not_exercised] == never, str(report)
    assert any(note.startswith(f"a call changes {name};") for note in report.notes)


def test_the_instance_is_left_as_it_was() -> None:
    module = Remembers(12, 2)
    verify(module)
    assert not module.cache.any()


def test_a_mistake_beside_a_cache_is_named() -> None:
    assert [finding.name for finding in verify(RemembersUnscaled).findings] == ["scale_missing"]


class KeepsATable(RemembersUnscaled):
    """Works a table out in the first call, and finds it in the next; its train() gives nothing back."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.known, self.count = dict[str, Tensor](), 0

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)

    def remembered(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        if "" not in self.known:
            self.known[""] = torch.arange(x.size(1)).to(x).exp().log()
        return self.k(x) + 0 * self.known[""][:, None], self.v(x)


def test_a_table_that_a_call_fills_is_empty_in_the_next() -> None:
    module = KeepsATable(12, 2)
    (report,) = verify(module, (torch.randn(2, 5, 12),))
    assert report.mistakes == ("scale_missing",), str(report)
    assert report.findings[0].proof is not None
    assert report.findings[0].proof.holds
    assert (module.known, module.count) == ({}, 0)
