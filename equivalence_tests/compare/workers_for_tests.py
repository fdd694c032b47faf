"""What the processes of test_ranks.py do: apart from the tests, so that each starts without importing those."""

import os
import signal
import time
from typing import Any

import torch

from equivalence_tests.compare.processes import Tell

__all__ = ["one_dies", "one_hangs", "one_raises", "tell_sum"]


def tell_sum(rank: int, num_ranks: int, tell: Tell, argument: Any) -> None:
    """Add up over all ranks, and tell the sum."""
    x = torch.tensor([float(rank + argument)])
    torch.distributed.all_reduce(x)
    tell((num_ranks, x.item()))


def one_raises(rank: int, num_ranks: int, tell: Tell, argument: Any) -> None:  # noqa: ARG001  one signature for all
    """Raise on rank 1."""
    if rank == 1:
        raise ZeroDivisionError("no heads left")
    time.sleep(600)


def one_dies(rank: int, num_ranks: int, tell: Tell, argument: Any) -> None:  # noqa: ARG001  one signature for all
    """End rank 1 without a word."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def one_hangs(rank: int, num_ranks: int, tell: Tell, argument: Any) -> None:  # noqa: ARG001  one signature for all
    """Let rank 1 do nothing, for ever."""
    if rank == 1:
        time.sleep(600)
