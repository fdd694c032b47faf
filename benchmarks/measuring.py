"""Clocks and meters: rounds in turns, peak memory, and what the machine itself can do."""

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils import benchmark

from benchmarks.summarising import why_unstable

__all__ = [
    "MachineRates",
    "Runner",
    "machine_rates",
    "peak_memory_bytes",
    "profiled",
    "rounds_in_turns",
    "thread_count",
    "turn_seconds",
]

FEWEST_ROUNDS, MOST_ROUNDS = 5, 25
FEWEST_LONG_ROUNDS = 3  # where a single round takes longer than all of them should
TURN_SECONDS = 0.01
LONG_TURN_SECONDS = 0.05  # a run that takes this long needs no other before it to warm up
MOST_CUDA_REPEATS = 100


@dataclass(frozen=True)
class Runner:
    """What is timed, with the switches that it needs, which are set outside of the timed section.

    Args:
        run: Called again and again.
        switches: Gives a context around a turn.
        threads: Number of threads on the CPU.
        device: Where it runs.
    """

    run: Callable[[], object]
    switches: Callable[[], AbstractContextManager[None]]
    threads: int
    device: torch.device


def rounds_in_turns(runners: Sequence[Runner], seconds: float) -> list[list[float]]:
    """Time several contenders in turns, A B C A B C, so that other work on the machine slows all of them.

    If any is unstable and a round is short, all are timed once more, and the first timing is thrown away.

    Args:
        runners: What is timed; each has run before.
        seconds: Time for the rounds, about; there are at least five, or three where each of them takes longer.

    Returns:
        For each runner the seconds of one run, round by round.
    """
    start = benchmark.timer()
    first = _time_rounds(runners, 1)
    one_round = benchmark.timer() - start
    if one_round > seconds:
        others = _time_rounds(runners, FEWEST_LONG_ROUNDS - 1)
        return [before + after for before, after in zip(first, others, strict=True)]
    rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(seconds / one_round)))
    times = _time_rounds(runners, rounds)
    return _time_rounds(runners, rounds) if any(why_unstable(x) for x in times) else times


def _time_rounds(runners: Sequence[Runner], rounds: int) -> list[list[float]]:
    by_round = [[turn_seconds(runner) for runner in runners] for _ in range(rounds)]
    return [list(times) for times in zip(*by_round, strict=True)]


def turn_seconds(runner: Runner) -> float:
    """Time one turn: a run to warm up, then runs for about ten milliseconds; a single run if that takes long.

    Args:
        runner: What is timed.

    Returns:
        Seconds of one run, the median of the turn.
    """
    with runner.switches(), thread_count(runner.threads):
        if runner.device.type == "cuda":
            return _cuda_turn(runner)
        start = benchmark.timer()
        runner.run()
        seconds = benchmark.timer() - start
        if seconds > LONG_TURN_SECONDS:
            return seconds
        timer = benchmark.Timer("run()", globals={"run": runner.run}, num_threads=runner.threads)
        return timer.blocked_autorange(min_run_time=TURN_SECONDS).median


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    """Let torch compute with so many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cuda_turn(runner: Runner) -> float:
    """Put events around each run."""
    runner.run()
    one_run = _cuda_seconds(runner, 1)
    repeats = max(1, min(MOST_CUDA_REPEATS, round(TURN_SECONDS / one_run)))
    return _cuda_seconds(runner, repeats)


def _cuda_seconds(runner: Runner, repeats: int) -> float:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        _l2_filler(runner.device).zero_()  # empties the cache, outside of the events
        start.record()
        runner.run()
        end.record()
    torch.cuda.synchronize(runner.device)
    return statistics.median(1e-3 * start.elapsed_time(end) for start, end in events)


@cache
def _l2_filler(device: torch.device) -> torch.Tensor:
    return torch.empty(4 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)


def peak_memory_bytes(runner: Runner) -> int:
    """Give the most memory that one run holds at a time beyond what was there before.

    On CUDA this is what the allocator says; on the CPU allocations and releases that the profiler saw are summed up.

    Args:
        runner: What is run, once.

    Returns:
        Bytes.
    """
    with runner.switches():
        return _cuda_peak(runner) if runner.device.type == "cuda" else _cpu_peak(runner)


def _cuda_peak(runner: Runner) -> int:
    torch.cuda.synchronize(runner.device)
    torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_allocated(runner.device)
    runner.run()
    torch.cuda.synchronize(runner.device)
    return torch.cuda.max_memory_allocated(runner.device) - before


def profiled(run: Callable[[], object], *, memory: bool = False, shapes: bool = False) -> list[Any]:
    """Run under torch's profiler.

    Args:
        run: What is run, once.
        memory: Whether to note what is asked for and given back.
        shapes: Whether to note the shapes and dtypes of what operations are given.

    Returns:
        Its events as they are: to put hundreds of thousands into the order of its tables takes minutes.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler writes to the standard error otherwise
    activities = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(
        activities=activities, profile_memory=memory, record_shapes=shapes, acc_events=True
    )
    with profile as profiler:
        run()
    assert profiler.profiler is not None
    return list(profiler.profiler.kineto_results.events())


def _cpu_peak(runner: Runner) -> int:
    held = peak = 0
    for event in profiled(runner.run, memory=True):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@dataclass(frozen=True)
class MachineRates:
    """What the device does at best, measured in the same run.

    Args:
        flops_per_s: Of the fastest of a few large products of square matrices.
        bytes_per_s: Read and written by a large copy.
    """

    flops_per_s: float
    bytes_per_s: float


@cache
def machine_rates(dtype: str, threads: int, device: torch.device) -> MachineRates:
    """Measure the rates of matrix products and of memory; once for each combination.

    Args:
        dtype: Of the matrices.
        threads: Number of threads on the CPU.
        device: Where.

    Returns:
        The best of a few turns.
    """
    sizes, num_bytes = ((4096, 8192), 2**30) if device.type == "cuda" else ((256, 512, 1024), 2**27)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = _best_seconds(lambda: target.copy_(source), threads, device)
    # Which size suits the caches best differs between machines.
    rates = [2 * size**3 / _product_seconds(size, getattr(torch, dtype), threads, device) for size in sizes]
    return MachineRates(max(rates), 2 * num_bytes / copy_seconds)


def _product_seconds(size: int, dtype: torch.dtype, threads: int, device: torch.device) -> float:
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    product = torch.empty_like(left)
    return _best_seconds(lambda: torch.mm(left, right, out=product), threads, device)


def _best_seconds(run: Callable[[], object], threads: int, device: torch.device) -> float:
    return min(turn_seconds(Runner(run, nullcontext, threads, device)) for _ in range(FEWEST_ROUNDS))
