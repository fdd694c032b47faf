"""Caches that are made before the first step: by a method, as an object of some sizes, or as a pair of nothing."""

import math

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.verify import verify


class SetsItsCacheUp(nn.Module):
    """Causal, rotated in halves by positions that count on from ``start_pos``."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.width, self.max_batch_size, self.max_seq_len = n_heads, dim // n_heads, 0, 0
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def setup_cache(self, max_batch_size: int, max_seq_len: int, dtype: torch.dtype | None = None) -> None:
        self.max_batch_size, self.max_seq_len, weight = max_batch_size, max_seq_len, self.wk.weight
        shape = (max_batch_size, self.n_heads, max_seq_len, self.width)
        self.k_cache, self.v_cache = (weight.new_zeros(shape, dtype=dtype or weight.dtype) for _ in range(2))

    def turned(self, x: Tensor, start: int) -> Tensor:
        half = self.width // 2
        places = torch.arange(start, start + x.size(-2)).to(x)
        angles = places[:, None] / 10000 ** (torch.arange(half).to(x) / half)
        first, second = x.chunk(2, -1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1
        )

    def kept(self, x: Tensor, cache: Tensor, start: int) -> Tensor:
        cache[: len(x), :, start : start + x.size(-2)] = x
        return cache[: len(x), :, : start + x.size(-2)]

    def forward(self, x: Tensor, start_pos: int = 0, use_cache: bool = False) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        q, k = self.turned(q, self.first(start_pos)), self.turned(k, self.first(start_pos))
        if use_cache:
            k, v = self.kept(k, self.k_cache, start_pos), self.kept(v, self.v_cache, start_pos)
        return self.attended(q, k, v)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ones = q.new_ones(q.size(-2), k.size(-2))
        future = ones.triu(1 + k.size(-2) - q.size(-2)).bool()
        scores = (q @ k.mT / math.sqrt(self.width)).masked_fill(future, -torch.inf)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def first(self, start: int) -> int:
        return start


class StandsOneBefore(SetsItsCacheUp):
    def first(self, start: int) -> int:
        return max(start - 1, 0)


class WritesOverTheFirst(SetsItsCacheUp):
    def kept(self, x: Tensor, cache: Tensor, start: int) -> Tensor:
        cache[: len(x), :, : x.size(-2)] = x
        return cache[: len(x), :, : start + x.size(-2)]


def test_a_cache_may_be_made_by_a_method_before_the_first_step() -> None:
    report = verify(SetsItsCacheUp)
    assert report.verdict == "equal", str(report)
    run = [one.detail for one in report.coverage if one.what == "use_cache" and one.exercised]
    assert run == ["the module keeps it, made by setup_cache"]


@pytest.mark.parametrize(("wrong", "line"), [(StandsOneBefore, "self.turned(q, self.first"), (WritesOverTheFirst, "")])
def test_mistakes_with_such_a_cache_are_found(wrong: type[nn.Module], line: str) -> None:
    report = verify(wrong)
    assert report.mistakes == ("cache_differs_from_one_pass",), str(report)
    assert line in str(report.findings[0].stack)


class KeyValueCache:
    """Keys and values of all layers; whoever runs the model advances the length after each step."""

    def __init__(self, n_layer: int, max_batch_size: int, n_heads: int, max_seq_len: int, width: int) -> None:
        self.k, self.v = (torch.zeros(n_layer, max_batch_size, n_heads, max_seq_len, width) for _ in range(2))
        self.seen = 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> list[Tensor]:
        stop = self.seen + k.size(-2)
        for kept, new in ((self.k, k), (self.v, v)):
            kept[layer, :, :, self.seen : stop] = new
        return [kept[layer, :, :, :stop] for kept in (self.k, self.v)]

    def advance(self, tokens: int) -> None:
        self.seen += tokens


class TakesAnObject(SetsItsCacheUp):
    """Nothing but its name and its file say of what class its cache is."""

    def forward(self, x: Tensor, cache=None, layer_idx: int | None = None) -> Tensor:  # type: ignore[no-untyped-def]
        q, k, v = (f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        start = 0 if cache is None else cache.seen
        q, k = self.turned(q, self.first(start)), self.turned(k, start)
        if cache is not None:
            assert layer_idx is not None
            k, v = cache.update(layer_idx, k, v)
        return self.attended(q, k, v)


class TurnsQueriesFromTheFirst(TakesAnObject):
    def first(self, start: int) -> int:
        return 0


class TakesAPair(SetsItsCacheUp):
    """Gives keys and values back where it is handed some, or a pair of nothing."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cache: tuple[Tensor | None, ...] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        q, k, v = (f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        if cache is None:
            return self.attended(q, k, v), None
        keys, values = cache
        k, v = (new if old is None else self.joined(old, new) for old, new in ((keys, k), (values, v)))
        return self.attended(q, k, v), (k, v)

    def joined(self, old: Tensor, new: Tensor) -> Tensor:
        return torch.cat([old, new], 2)


class JoinsThemInFront(TakesAPair):
    def joined(self, old: Tensor, new: Tensor) -> Tensor:
        return torch.cat([new, old], 2)


@pytest.mark.parametrize(
    ("right", "how", "wrong"),
    [
        (TakesAnObject, "a KeyValueCache is passed to cache", TurnsQueriesFromTheFirst),
        (TakesAPair, "what it returns is passed to cache", JoinsThemInFront),
    ],
)
def test_an_empty_cache_may_be_an_object_of_some_sizes_or_a_pair(
    right: type[nn.Module], how: str, wrong: type[nn.Module]
) -> None:
    report = verify(right)
    assert report.verdict == "equal", str(report)
    assert [one.detail for one in report.coverage if one.what == "cache" and one.exercised] == [how]
    assert verify(wrong).mistakes == ("cache_differs_from_one_pass",), str(verify(wrong))
