"""``sidebyside kernels``: which ways of computing attention are right on this machine."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from equivalence_tests.compare.command import about_this_machine
from equivalence_tests.kernels.faults import Request
from equivalence_tests.kernels.kernels import BACKENDS, Kernel
from equivalence_tests.kernels.own import judge_own, own_kernel
from equivalence_tests.kernels.reporting import Report, to_github, to_json, to_junit
from equivalence_tests.kernels.running import counted, judged, judged_apart, kernels_for
from equivalence_tests.kernels.situations import DTYPES
from equivalence_tests.progress import progress
from scratch import validation
from scratch.task.command_line import one_line_errors
from scratch.task.terminal import Screen

__all__ = ["kernels"]

PRINTED = Path("-")
WIDTH = 150  # of the table, where no terminal says how wide it is


def kernels(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="TARGET", help="Kernels of your own: file.py:name or module:name.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="Device to run on: cpu, cuda, ...")] = "cpu",
    dtype: Annotated[
        list[str] | None,
        typer.Option(help=f"Precision: {', '.join(DTYPES)}. Repeatable. By default float32 and bfloat16."),
    ] = None,
    backend: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(BACKENDS)}. Repeatable.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer situations, nothing compiled: under a minute.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the inputs: the same seed gives the same table.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON; - prints it.")] = None,
    junit_file: Annotated[
        Path | None, typer.Option("--junit", help="Write every cell as JUnit XML; - prints it.")
    ] = None,
    github: Annotated[bool, typer.Option("--github", help="Print the faults as GitHub annotations.")] = False,
) -> None:
    """Find which of torch's attentions are wrong on this machine, forward and backward.

    With a TARGET, your own kernel is tried instead of torch's, and its mistakes are named. It takes query, key and
    value, (batch, heads, tokens, features), and any of the other arguments of torch's function. If it returns the
    log-sum-exp with its output, that is checked too.

    Every kernel, module and compiled form is compared with scratch in float64 over a grid of situations that break
    kernels. Exit status: 0 if nothing is wrong, 1 if something is, 2 if it could not be run.
    """
    with one_line_errors():
        for name in dtype or ():
            validation.check_choice("--dtype", name, tuple(DTYPES))
        for name in backend or ():
            validation.check_choice("--backend", name, BACKENDS)
        place = validation.check_device(device)
        check_files(json_file, junit_file)
    precisions = tuple(dtype or (("float32",) if targets else ("float32", "bfloat16")))
    request = Request(device, precisions, tuple(backend or ()), quick, seed)
    with one_line_errors():
        own = [own_kernel(target) for target in targets or ()]
    reports = [_own(kernel, request) for kernel in own] if own else [_torchs(request)]
    report = replace(
        reports[0], cells=[x for r in reports for x in r.cells], faults=[x for r in reports for x in r.faults]
    )
    write(replace(report, machine=about_this_machine(place)), json_file, junit_file, github)
    raise typer.Exit(report.exit_status)


def _torchs(request: Request) -> Report:
    if torch.device(request.device).type == "cuda":  # what fails there takes the device from its whole process
        return judged_apart(request)
    listed, remarks = kernels_for(request)
    with progress("judging", None) as advance:
        return judged(request, listed, tell=lambda *what: advance(counted(*what)), remarks=remarks)


def _own(kernel: Kernel, request: Request) -> Report:
    with progress("judging", None) as advance:
        return judge_own(kernel, request, tell=lambda *what: advance(counted(*what)))


def check_files(*files: Path | None) -> None:
    """Refuse what cannot be written before the work is done."""
    for file in files:
        if file not in (None, PRINTED):
            validation.check_writable(file)
    if files.count(PRINTED) > 1:
        raise validation.ArgumentValueError("only one of --json and --junit can be -: give the other a file")


def write(report: Report, json_file: Path | None, junit_file: Path | None, github: bool) -> None:
    """Print the report, and write it where it was asked for."""
    if PRINTED not in (json_file, junit_file):
        console = Screen(highlight=False)
        if not console.is_terminal:
            console.width = WIDTH
        console.print(f"Attention on {report.machine}, seed {report.request.seed}\n")
        report.show(console)
    for path, export in ((json_file, to_json), (junit_file, to_junit)):
        if path == PRINTED:
            typer.echo(export(report))
        elif path is not None:
            path.write_text(export(report) + "\n", encoding="utf-8")
    if github:
        for line in to_github(report):
            typer.echo(line)
