"""Clocks and meters: rounds in turns, peak memory, and what the machine itself can do."""

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils import benchmark

from benchmarks.summarising import is_unstable

__all__ = ["MachineRates", "Runner", "machine_rates", "peak_memory_bytes", "rounds_in_turns", "turn_seconds"]

FEWEST_ROUNDS, MOST_ROUNDS = 5, 25
TURN_SECONDS = 0.01
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

    If any is unstable, all are timed once more, and the first timing is thrown away.

    Args:
        runners: What is timed.
        seconds: Time for the rounds, about; there are at least five.

    Returns:
        For each runner the seconds of one run, round by round.
    """
    start = benchmark.timer()
    _time_rounds(runners, 1)  # warms up
    one_round = benchmark.timer() - start
    rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(seconds / one_round)))
    times = _time_rounds(runners, rounds)
    return _time_rounds(runners, rounds) if any(is_unstable(x) for x in times) else times


def _time_rounds(runners: Sequence[Runner], rounds: int) -> list[list[float]]:
    by_round = [[turn_seconds(runner) for runner in runners] for _ in range(rounds)]
    return [list(times) for times in zip(*by_round, strict=True)]


def turn_seconds(runner: Runner) -> float:
    """Time one turn: a run to warm up, then runs for about ten milliseconds, at least one.

    Args:
        runner: What is timed.

    Returns:
        Seconds of one run, the median of the turn.
    """
    with runner.switches():
        if runner.device.type == "cuda":
            return _cuda_turn(runner)
        timer = benchmark.Timer("run()", globals={"run": runner.run}, num_threads=runner.threads)
        return timer.blocked_autorange(min_run_time=TURN_SECONDS).median


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


def _cpu_peak(runner: Runner) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler writes to the standard error otherwise
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        runner.run()
    assert profiler.profiler is not None
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@dataclass(frozen=True)
class MachineRates:
    """What the device does at best, measured in the same run.

    Args:
        flops_per_s: Of a large product of square matrices.
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
    size = 8192 if device.type == "cuda" else 1024
    left, right = torch.randn(2, size, size, device=device).to(getattr(torch, dtype))
    product = torch.empty_like(left)
    source = torch.zeros(2**30 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    products, copies = (
        min(turn_seconds(runner) for _ in range(FEWEST_ROUNDS))
        for runner in (
            Runner(lambda: torch.mm(left, right, out=product), _no_switches, threads, device),
            Runner(lambda: target.copy_(source), _no_switches, threads, device),
        )
    )
    return MachineRates(2 * size**3 / products, 2 * source.numel() / copies)


@contextmanager
def _no_switches() -> Iterator[None]:
    yield
