"""Judge every kernel in every situation that a request names."""

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from equivalence_tests.kernels.faults import Request, faults_in
from equivalence_tests.kernels.judging import Cell, Judge, lost
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
    cells = [*_cells(request, _work(request, kernels, listed), 0, tell)]
    remarks = [*remarks, "Nothing was run after it."] if cells and cells[-1].lost else remarks
    return Report(request, "", cells, faults_in(cells, kernels, listed, request), remarks)


def judged_apart(request: Request) -> Report:
    """Judge torch's kernels in another process, and in a new one after each that loses its device or its process.

    Returns:
        The report.
    """
    kernels, remarks = kernels_for(request)
    listed = listed_situations(request.quick)
    work, cells = _work(request, kernels, listed), list[Cell]()
    with progress("judging", None) as advance:
        while len(cells) < len(work):
            for cell in _cells_of_a_process(request, work, len(cells)):
                cells.append(cell)
                advance(counted(f"{cell.kernel}: {cell.situation}", len(cells), len(work)))
    return Report(request, "", cells, faults_in(cells, kernels, listed, request), remarks)


def _cells_of_a_process(request: Request, work: Sequence[Work], start: int) -> Iterator[Cell]:
    """Judge in another process as far as it comes; it is ended afterwards, since compilers keep theirs alive."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_cells, args=(sender, request, start))
    child.start()
    sender.close()
    try:
        for kernel, situation, dtype in work[start:]:
            told = _received(receiver) or lost(kernel, situation, dtype, _how_it_ended(child))
            yield told
            if told.lost:
                return
    finally:
        child.kill()
        child.join()


def _received(receiver: Connection) -> Cell | None:
    """Return what the process sent, or None if it is gone."""
    try:
        sent: Cell | Exception = receiver.recv()
    except EOFError:
        return None
    if isinstance(sent, Exception):
        raise sent
    return sent


def _how_it_ended(child: BaseProcess) -> str:
    child.join()
    return f"and its process was ended by signal {-(child.exitcode or 0)}"


def _send_cells(sender: Connection, request: Request, start: int) -> None:
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # the first backward of each process makes it so
    try:
        work = _work(request, kernels_for(request)[0], listed_situations(request.quick))
        for cell in _cells(request, work, start):
            sender.send(cell)
    except Exception as error:  # of the judge: the kernels' are caught
        error.add_note(traceback.format_exc())
        sender.send(error)


def counted(what: str, done: int, total: int) -> str:
    """Say what is being done, and how far it is."""
    return f"{done} of {total}: {what}"


def _work(request: Request, kernels: Sequence[Kernel], situations: Sequence[Situation]) -> list[Work]:
    return [
        (kernel, situation, dtype)
        for kernel, dtype, situation in product(kernels, request.dtypes, situations)
        if kernel.asked(situation) and not (kernel.backend in TRACED and request.quick and dtype != request.dtypes[0])
    ]


def _cells(request: Request, work: Sequence[Work], start: int, tell: Tell | None = None) -> Iterator[Cell]:
    """Judge one after another, until a kernel loses the device."""
    judge = Judge(request.device, request.seed)
    for number, (kernel, situation, dtype) in enumerate(work[start:], start):
        if tell is not None:
            tell(f"{kernel.name}: {situation.name}", number, len(work))
        cell = judge.judge(kernel, situation, dtype)
        yield cell
        if cell.lost:
            return
    torch._dynamo.reset()
