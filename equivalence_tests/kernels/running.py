"""Judge every kernel in every situation that a request names."""

from collections.abc import Callable, Sequence
from itertools import product

import torch

from equivalence_tests.kernels.faults import Request, faults_in
from equivalence_tests.kernels.judging import Cell, Judge
from equivalence_tests.kernels.kernels import Kernel, listed_kernels
from equivalence_tests.kernels.reporting import Report
from equivalence_tests.kernels.rewriting import has_compiler
from equivalence_tests.kernels.situations import Situation, listed_situations

__all__ = ["kernels_for", "judged"]

# What is traced or compiled takes its time: a quick run sees it in one precision.
TRACED = ("flex", "compiled")

Tell = Callable[[str, int, int], None]


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
        The report.
    """
    listed = listed_situations(request.quick) if situations is None else list(situations)
    judge = Judge(request.device, request.seed)
    work = [
        (kernel, situation, dtype)
        for kernel, dtype, situation in product(kernels, request.dtypes, listed)
        if kernel.asked(situation) and not (kernel.backend in TRACED and request.quick and dtype != request.dtypes[0])
    ]
    cells: list[Cell] = []
    for number, (kernel, situation, dtype) in enumerate(work):
        if tell is not None:
            tell(f"{kernel.name}: {situation.name}", number, len(work))
        cells.append(judge.judge(kernel, situation, dtype))
    torch._dynamo.reset()
    return Report(request, "", cells, faults_in(cells, kernels, listed, request), remarks)
