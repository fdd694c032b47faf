"""One case from beginning to end: build, compare, measure memory, time in turns."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._functorch import config as functorch_config

from benchmarks.aims import compares
from benchmarks.contenders import BASELINE, Contender, contenders_of
from benchmarks.environment import Environment, after_load, environment_of
from benchmarks.equality import Gate
from benchmarks.grids import Case
from benchmarks.measuring import (
    MachineRates,
    Runner,
    machine_rates,
    peak_memory_bytes,
    rounds_in_turns,
    thread_count,
    turn_seconds,
)
from benchmarks.profiling import Profile, profile_of
from benchmarks.results import Row, Status
from benchmarks.summarising import median_and_iqr, ratio_in_turns, why_unstable
from benchmarks.work import bytes_moved, flops, roofline_seconds
from benchmarks.workloads import runnable

__all__ = ["run_case", "rows_without_times"]

OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "alloc_failed",
    "overflow",  # so many elements that their number, or that of their bytes, does not fit into 64 bits
)


PROFILED_FROM_SECONDS = 1.0  # who gives a case less wants a quick look


@dataclass(frozen=True)
class _Ready:
    """A contender that may be timed, and the row that it will fill."""

    runner: Runner
    row: Row


def run_case(case: Case, chosen: Sequence[str], seconds: float) -> list[Row]:
    """Compare all contenders of a case with the built-in, and time those that are equal.

    Args:
        case: What is computed.
        chosen: Names of contenders.
        seconds: Time for the rounds, about.

    Returns:
        One row for each contender.
    """
    # Kernels that cannot be used say why in warnings; the status of their row says it too.
    with (
        warnings.catch_warnings(),
        thread_count(case.threads),
        _nothing_compiled(),
        _current(torch.device(case.device)),
    ):
        warnings.simplefilter("ignore")
        try:
            gate = Gate(case)
        except Exception as error:  # whatever torch raises where it cannot do something
            return rows_without_times(case, chosen, *_status_of(error))
        environment = environment_of(torch.device(case.device))
        prepared = [_prepare(case, contender, gate, environment) for contender in contenders_of(case, chosen)]
        del gate  # its tensors are not part of anybody's memory
        timed = _time([x for x in prepared if isinstance(x, _Ready)], seconds)
    return [timed[x.row.contender] if isinstance(x, _Ready) else x for x in prepared]


def rows_without_times(case: Case, chosen: Sequence[str], status: Status, detail: str) -> list[Row]:
    """Give the rows of a case in which nothing could be timed.

    Args:
        case: What was to be computed.
        chosen: Names of contenders.
        status: What happened.
        detail: What happened, in words.

    Returns:
        One row for each contender.
    """
    environment = environment_of(torch.device(case.device))
    return [Row(case, x.name, status, environment, detail) for x in contenders_of(case, chosen)]


def _prepare(case: Case, contender: Contender, gate: Gate, environment: Environment) -> _Ready | Row:
    """Compare, build, warm up and measure the memory."""
    row = Row(case, contender.name, "timed", environment, compared_query_len=gate.case.query_len)
    try:
        objection = gate.objection(contender)
        if objection:
            return replace(row, status="unequal", detail=objection)
        with contender.switches():
            run = runnable(case, contender.prepare(case))
        runner = Runner(run, contender.switches, case.threads, torch.device(case.device))
        turn_seconds(runner)
        return _Ready(runner, replace(row, peak_memory_bytes=peak_memory_bytes(runner), **_work(case)))
    except Exception as error:  # likewise
        status, detail = _status_of(error)
        return replace(row, status=status, detail=detail)


def _work(case: Case) -> dict[str, Any]:
    return {"flops": flops(case), "bytes_moved": bytes_moved(case)}


def _time(ready: Sequence[_Ready], seconds: float) -> dict[str, Row]:
    if not ready:
        return {}
    case, device = ready[0].row.case, ready[0].runner.device
    try:
        rates = machine_rates(case.dtype, case.threads, device)
        times = rounds_in_turns([x.runner for x in ready], seconds)
    except Exception as error:  # all of them together may need more memory than each alone
        status, detail = _status_of(error)
        return {x.row.contender: replace(x.row, status=status, detail=detail) for x in ready}
    environment = after_load(ready[0].row.environment, device)
    by_name = {x.row.contender: rounds for x, rounds in zip(ready, times, strict=True)}
    baseline = by_name.get(BASELINE)
    with_profile = seconds >= PROFILED_FROM_SECONDS
    rows = [replace(x.row, environment=environment, profile=_profile(x) if with_profile else None) for x in ready]
    return {row.contender: _filled(row, by_name[row.contender], baseline, rates) for row in rows}


def _profile(ready: _Ready) -> Profile | None:
    """Say what a run is spent on, once all are timed; the profiler cannot look into compiled code and other devices."""
    case = ready.row.case
    in_eager_mode_on_cpu = case.device == "cpu" and not case.compiled
    if not (in_eager_mode_on_cpu and compares(case, ready.row.contender)):
        return None
    try:
        return profile_of(ready.runner)
    except Exception:  # as where memory ends: the times are known, and stay, without a word about what they are made of
        return None


def _filled(row: Row, rounds: Sequence[float], baseline: Sequence[float] | None, rates: MachineRates) -> Row:
    """Put times, in seconds, and all that follows from them into a row."""
    median, iqr = median_and_iqr(rounds)
    ratio = None if baseline is None else ratio_in_turns(rounds, baseline)
    bound = roofline_seconds(row.case, rates.flops_per_s, rates.bytes_per_s)
    return replace(
        row,
        rounds_us=tuple(round(1e6 * x, 3) for x in rounds),
        median_us=1e6 * median,
        iqr_us=1e6 * iqr,
        unstable=why_unstable(rounds, baseline),
        ratio_to_builtin=ratio.value if ratio else None,
        ratio_low=ratio.low if ratio else None,
        ratio_high=ratio.high if ratio else None,
        flops_per_s=row.flops / median,
        share_of_matmul_rate=row.flops / median / rates.flops_per_s,
        roofline_us=None if bound is None else 1e6 * bound,
        tokens_per_s=row.case.batch * row.case.query_len / median if row.case.component == "generate" else None,
    )


def _status_of(error: Exception) -> tuple[Status, str]:
    text = str(error)
    lines = text.strip().splitlines()
    first_line = lines[0][:300] if lines else ""
    detail = first_line if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {first_line}"
    no_memory = isinstance(error, MemoryError) or any(words in text.lower() for words in OUT_OF_MEMORY)
    return ("out of memory" if no_memory else "unavailable"), detail


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Forget compiled code: what torch keeps on disk does not tell the kernels of attention apart."""
    torch.compiler.reset()
    with functorch_config.patch(enable_autograd_cache=False):
        yield


def _current(device: torch.device) -> AbstractContextManager[None]:
    """Make a GPU the current one: events and compiled kernels go to that, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
