"""Processes for tests, forked from one that has imported torch and the project: each anew takes seconds."""

import multiprocessing
from multiprocessing.context import BaseContext

import torch

__all__ = ["warm_context"]

IMPORTED = [
    "torch._dynamo",
    "equivalence_tests.compare.ranks",
    "equivalence_tests.checker.verify",
    "benchmarks.children",
]


def warm_context(_: str = "spawn") -> BaseContext:
    """Stand in for ``multiprocessing.get_context``: fork from a server that is started once, where the system can.

    A test of how a process is started, or of what it inherits, needs a fresh one.
    """
    # What is forked cannot use a GPU that the server has begun to use.
    if "forkserver" not in multiprocessing.get_all_start_methods() or torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context
