"""Judge every kernel in every situation that a request names."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

import torch

from equivalence_tests.kernels.faults import Request, faults_in
from equivalence_tests.kernels.judging import Cell, Judge
from equivalence_tests.kernels.kernels import Kernel, listed_kernels
from equivalence_tests.kernels.reporting import Report
from equivalence_tests.kernels.rewriting import has_compiler
from equivalence_tests.kernels.situations import Situation, listed_situations
from equivalence_tests.progress import progress

__all__ = ["counted", "judged", "judged_apart", "kernels_for"]

# What is traced or compiled takes its time: a quick run sees it in one precision.
TRACED = ("flex", "compiled")

Tell = Callable[[str, int, int], None]
Work = tuple[Kernel, Situation, str]


def kernels_for(request: Request) -> tuple[list[Kernel], list[str]]:
    """List the kernels of a request, and say what is left out.

    Returns:
        The kernels, and a remark in one line where the machine has no compiler or there is no time for it.
    """
    compiler = has_compiler(request.device)
    compiles = compiler and not request.quick
    wanted = request.backends or None
    found = [one for one in listed_kernels(request.device, compiles) if wanted is None or one.backend in wanted]
    if compiles or not any(one.backend in ("compiled", "flex") for one in found):
        return found, []
    reason = "--quick compiles nothing" if compiler else "this machine has no compiler for torch.compile"
    return found, [f"Hand-written forms were rewritten as torch.compile does first, but not compiled: {reason}."]


def judged(
    request: Request,
    kernels: Sequence[Kernel],
    situations: Sequence[Situation] | None = None,
    tell: Tell | None = None,
    remarks: Sequence[str] = (),
) -> Report:
    """Judge kernels.

    Args:
        request: Device, precisions and seed.
        kernels: Which.
        situations: Where; those of the request if not given.
        tell: Called before each with its name, its number and how many there are.
        remarks: What the report says beside.

    Returns:
        The report. It ends with the first kernel after which the device cannot be used any more.
    """
    listed = listed_situations(request.quick) if situations is None else list(situations)
    cells = _cells(request, _work(request, kernels, listed), 0, tell)
    remarks = [*remarks, "Nothing was run after it."] if cells and cells[-1].lost else remarks
    return Report(request, "", cells, faults_in(cells, kernels, listed, request), remarks)


def judged_apart(request: Request) -> Report:
    """Judge torch's kernels in another process, and in a new one after each that loses its device.

    Returns:
        The report.
    """
    kernels, remarks = kernels_for(request)
    listed = listed_situations(request.quick)
    cells: list[Cell] = []
    while len(cells) < len(_work(request, kernels, listed)):
        with ProcessPoolExecutor(1, get_context("spawn")) as child:
            cells += child.submit(_cells_from, request, len(cells)).result()
    return Report(request, "", cells, faults_in(cells, kernels, listed, request), remarks)


def _cells_from(request: Request, start: int) -> list[Cell]:
    work = _work(request, kernels_for(request)[0], listed_situations(request.quick))
    with progress("judging", None) as advance:
        return _cells(request, work, start, lambda *what: advance(counted(*what)))


def counted(what: str, done: int, total: int) -> str:
    """Say what is being done, and how far it is."""
    return f"{done} of {total}: {what}"


def _work(request: Request, kernels: Sequence[Kernel], situations: Sequence[Situation]) -> list[Work]:
    return [
        (kernel, situation, dtype)
        for kernel, dtype, situation in product(kernels, request.dtypes, situations)
        if kernel.asked(situation) and not (kernel.backend in TRACED and request.quick and dtype != request.dtypes[0])
    ]


def _cells(request: Request, work: Sequence[Work], start: int, tell: Tell | None) -> list[Cell]:
    """Judge one after another, until a kernel loses the device."""
    judge = Judge(request.device, request.seed)
    cells: list[Cell] = []
    for number, (kernel, situation, dtype) in enumerate(work[start:], start):
        if tell is not None:
            tell(f"{kernel.name}: {situation.name}", number, len(work))
        cells.append(judge.judge(kernel, situation, dtype))
        if cells[-1].lost:
            return cells
    torch._dynamo.reset()
    return cells
