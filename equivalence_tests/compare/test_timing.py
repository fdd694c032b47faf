"""Tests of timing.py: what is timed is what it says, in turns; how long it takes is nobody's test."""

import statistics
from typing import Any

import pytest
import torch

import builtin
import scratch
from equivalence_tests.compare import timing as compare_timing
from equivalence_tests.compare.timing import Timing, TimingSizes, decoding, time_side_by_side

CPU = torch.device("cpu")
TINY = TimingSizes(batch=2, length=5, sentences=2, decoded=7, d_model=16, num_layers=1, seconds=0.0)


def test_everything_is_timed_in_at_least_three_rounds() -> None:
    timings = list(time_side_by_side(TINY, torch.float32, CPU))
    assert [timing.name for timing in timings] == [
        "forward, fast path off",
        "forward, fast path on",
        "training step",
        "decoding, cache / none",
    ]
    assert len(timings) == compare_timing.NUM_TIMINGS
    assert [timing.tokens for timing in timings] == [20, 20, 20, 14]
    for timing in timings:
        assert len(timing.scratch_ms) == len(timing.builtin_ms) == compare_timing.FEWEST_ROUNDS
        assert min(timing.scratch_ms + timing.builtin_ms) > 0


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    timing = Timing("step", 10, (1.0, 8.0, 3.0), (2.0, 2.0, 3.0))
    assert timing.ratios == [0.5, 4.0, 1.0]
    assert timing.ratio == statistics.median([0.5, 4.0, 1.0])


def test_rounds_are_interleaved_after_one_round_of_warming_up() -> None:
    order: list[str] = []
    timing = compare_timing._in_turns("turns", 1, [lambda: order.append("A"), lambda: order.append("B")], seconds=60.0)
    assert "".join(order) == "AB" * (1 + compare_timing.MOST_ROUNDS)
    assert len(timing.ratios) == compare_timing.MOST_ROUNDS


def test_a_first_round_that_takes_long_counts() -> None:
    order: list[str] = []
    timing = compare_timing._in_turns("turns", 1, [lambda: order.append("A"), lambda: order.append("B")], seconds=0.0)
    assert "".join(order) == "AB" * compare_timing.FEWEST_ROUNDS
    assert len(timing.ratios) == compare_timing.FEWEST_ROUNDS


def test_both_models_hold_the_same_weights_and_decode_the_same_tokens() -> None:
    ours, theirs = compare_timing._same_models(TINY, torch.float64, CPU)
    assert isinstance(ours, scratch.Seq2SeqTransformer)
    assert isinstance(theirs, builtin.Seq2SeqTransformer)
    src_ids = torch.tensor([[5, 3, 7, 4]])
    by_cache = decoding(ours, src_ids, 7, cached=True)()
    by_recomputation = decoding(theirs, src_ids, 7, cached=False)()
    assert by_cache.shape == (1, 7)
    assert torch.equal(by_cache, by_recomputation)


def test_only_scratch_decodes_with_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    for package in (scratch, builtin):
        original = package.Seq2SeqTransformer.decode

        def decode(self: Any, *args: Any, cache: Any = None, _original: Any = original) -> Any:
            used.append(cache is not None)
            return _original(self, *args, cache=cache)

        monkeypatch.setattr(package.Seq2SeqTransformer, "decode", decode)
    *_, timing = time_side_by_side(TINY, torch.float32, CPU)
    rounds = len(timing.ratios)
    assert used[-2 * 7 * rounds :] == ([True] * 7 + [False] * 7) * rounds


def test_the_training_step_trains_and_the_forward_does_not() -> None:
    model = compare_timing._same_models(TINY, torch.float32, CPU)[0]
    ids = torch.tensor([[5, 3, 7], [4, 8, 9]])
    before = model.projection.weight.clone()
    compare_timing._forward(model, ids, ids)()
    assert not model.training
    assert torch.equal(model.projection.weight, before)
    compare_timing._training_step(model, ids, ids)()
    assert model.training
    assert not torch.equal(model.projection.weight, before)


@pytest.mark.parametrize("before", [True, False])
def test_the_fast_path_is_put_back_as_it_was(before: bool) -> None:
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(before)
    seen = []
    try:
        for timing in time_side_by_side(TINY, torch.float32, CPU):
            seen.append((timing.name.startswith("forward"), torch.backends.mha.get_fastpath_enabled()))
        assert torch.backends.mha.get_fastpath_enabled() is before
    finally:
        torch.backends.mha.set_fastpath_enabled(was)
    assert seen == [(True, False), (True, True), (False, before), (False, before)]
