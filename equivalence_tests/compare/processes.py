"""Run a function in several processes, hear from all of them, and say clearly when one dies or falls silent."""

import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

__all__ = ["RanksFailedError", "Tell", "run_ranks"]

PATIENCE = 180.0
Tell = Callable[[Any], None]


class RanksFailedError(RuntimeError):
    """A process has died, raised or fallen silent; the others have been ended."""


def run_ranks(
    work: Callable[[int, int, Tell, Any], None],
    num_ranks: int,
    argument: Any,
    *,
    device: str = "cpu",
    patience: float = PATIENCE,
) -> Iterator[tuple[int, Any]]:
    """Call a function in each of several processes that can talk to one another through ``torch.distributed``.

    Args:
        work: Called with the rank, the number of ranks, a function that tells something, and the argument. It has to be
            importable: each process imports it anew.
        num_ranks: Number of processes.
        argument: Handed to each.
        device: "cpu" takes gloo, "cuda" NCCL and a device for each rank.
        patience: How many seconds all of them may be silent, once they have begun.

    Yields:
        The rank and what it told, as it comes.

    Raises:
        RanksFailedError: If one raises, dies or nothing is heard for too long. All are ended then.
    """
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        group = _Group(num_ranks, f"file://{Path(folder) / 'rendezvous'}", device, patience)
        given = (group, work, told, argument)
        processes = [context.Process(target=_begin, args=(rank, *given), daemon=True) for rank in range(num_ranks)]
        for process in processes:
            process.start()
        try:
            yield from _listen(processes, told, patience)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _listen(processes: list[Any], told: Any, patience: float) -> Iterator[tuple[int, Any]]:
    began: set[int] = set()
    running, last_heard = set(range(len(processes))), time.monotonic()
    while running:
        try:
            kind, rank, what = told.get(timeout=0.2)
        except queue.Empty:
            _check_alive(processes, running)
            if len(began) == len(processes) and time.monotonic() - last_heard > patience:
                silent = " and ".join(map(str, sorted(running)))
                raise RanksFailedError(
                    f"nothing was heard from rank {silent} of {len(processes)} for {patience:g} seconds"
                ) from None
            continue
        last_heard = time.monotonic()
        if kind == "raised":
            _check_alive(processes, running - {rank})  # one that died is why the others raise
            raise RanksFailedError(f"rank {rank} of {len(processes)} raised {what}")
        if kind == "began":
            began.add(rank)
        elif kind == "done":
            running.discard(rank)
        else:
            yield rank, what


def _check_alive(processes: list[Any], running: set[int]) -> None:
    for rank in sorted(running):
        code = processes[rank].exitcode
        if code:  # 0: its last words are still on their way
            how = f"was killed by signal {-code}" if code < 0 else f"died with exit status {code}"
            raise RanksFailedError(f"rank {rank} of {len(processes)} {how}")


@dataclass(frozen=True)
class _Group:
    """The processes that talk to one another, and where they meet."""

    num_ranks: int
    rendezvous: str
    device: str
    patience: float

    def join(self, rank: int) -> None:
        """Make this process one of them."""
        if self.device == "cuda":
            torch.cuda.set_device(rank)
        distributed.init_process_group(
            "nccl" if self.device == "cuda" else "gloo",
            init_method=self.rendezvous,
            rank=rank,
            world_size=self.num_ranks,
            timeout=timedelta(seconds=self.patience + PATIENCE),  # the silence is noticed before
        )


def _begin(rank: int, group: _Group, work: Callable[[int, int, Tell, Any], None], told: Any, argument: Any) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    try:
        group.join(rank)
        told.put(("began", rank, None))
        work(rank, group.num_ranks, lambda what: told.put(("told", rank, what)), argument)
        distributed.destroy_process_group()
        told.put(("done", rank, None))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        told.put(("raised", rank, f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"))
