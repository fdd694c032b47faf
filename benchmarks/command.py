"""The command line: run is what happens without a command; compare and report read what it kept."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from benchmarks.advice import advice_by_case
from benchmarks.cases import COMPONENTS, DTYPES, MASKS, MODES, PRESETS, Case, Grid, cases_of
from benchmarks.comparison import change_table, changes_between
from benchmarks.contenders import CONTENDERS
from benchmarks.own import check_own, own_takes_part
from benchmarks.readme import README, renewed_readme
from benchmarks.results import read_rows
from benchmarks.session import Plan, measure, write_report
from scratch import validation
from scratch.command_line import one_line_errors

__all__ = ["app"]

WITH_OWN = ("attention", "self_attention", "cross_attention")
SECONDS = {"quick": 0.4, "standard": 1.0, "full": 4.0}

app = typer.Typer(invoke_without_command=True, add_completion=False, rich_markup_mode=None)


def _listed(help_text: str, names: Sequence[str] = ()) -> Any:
    choices = f" ({', '.join(names)})" if names else ""
    return typer.Option(help=f"{help_text}{choices}.")


@app.callback()
def run(
    context: typer.Context,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes; under a minute. What happens by default.")
    ] = False,
    standard: Annotated[bool, typer.Option("--standard", help="Lengths to 4096; under ten minutes.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Also lengths to 16384, more modes, masks, dtypes and compiled; many hours.")
    ] = False,
    component: Annotated[str | None, _listed("What is timed", COMPONENTS)] = None,
    mode: Annotated[str | None, _listed("How", MODES)] = None,
    batch: Annotated[str | None, _listed("Numbers of sequences")] = None,
    length: Annotated[str | None, _listed("Lengths, of queries and keys")] = None,
    key_length: Annotated[str | None, _listed("Lengths of keys or source, where they are others")] = None,
    width: Annotated[str | None, _listed("embed_dim or d_model")] = None,
    heads: Annotated[str | None, _listed("Numbers of heads")] = None,
    layers: Annotated[str | None, _listed("Numbers of layers, of encoder and decoder each")] = None,
    dtype: Annotated[str | None, _listed("Of parameters and inputs", DTYPES)] = None,
    mask: Annotated[str | None, _listed("Which", MASKS)] = None,
    need_weights: Annotated[str | None, _listed("Whether attention returns its weights (no, yes)")] = None,
    compiled: Annotated[str | None, _listed("Whether torch.compile is used (no, yes)")] = None,
    bias: Annotated[str | None, _listed("Whether projections have biases (no, yes)")] = None,
    threads: Annotated[str | None, _listed("Numbers of threads on the CPU; else as many as torch takes")] = None,
    device: Annotated[str, _listed("Where", ["cpu", "cuda", "cuda:1"])] = "cpu",
    contender: Annotated[str | None, _listed("Who, besides builtin", list(CONTENDERS))] = None,
    implementation: Annotated[
        str | None, _listed("Your own attention, my.py:MyAttention, read as sidebyside verify does")
    ] = None,
    memory: Annotated[float | None, typer.Option(help="GiB that a large case may take on the CPU; else all.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for rows, plots and the page; else nothing is kept.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the folder.")] = False,
) -> None:
    """Time scratch, torch.nn and your own attention side by side, after comparing their numbers.

    Any axis replaces that of the preset; several values stand with commas between, as in --length 512,2048. The exit
    status is 0 if all contenders are equal, 1 if one is not, 2 for bad arguments.
    """
    if context.invoked_subcommand is not None:
        return
    with one_line_errors():
        preset = _preset(quick, standard, full)
        axes: dict[str, Any] = {
            "mode": _names(mode),
            "batch": _numbers("batch", batch),
            "length": _numbers("length", length),
            "key_len": _numbers("key-length", key_length),
            "width": _numbers("width", width),
            "heads": _numbers("heads", heads),
            "layers": _numbers("layers", layers),
            "dtype": _names(dtype),
            "mask": _names(mask),
            "need_weights": _switches("need-weights", need_weights),
            "compiled": _switches("compiled", compiled),
            "bias": _switches("bias", bias),
        }
        components = _names(component) or (WITH_OWN if implementation else ())
        counts, devices = _numbers("threads", threads) or (torch.get_num_threads(),), _devices(device)
        cases, own = cases_of(_chosen_grids(preset, components, axes), counts, devices), _own(implementation)
        cases = cases if component or not own else _taking_part(own, cases)
        chosen = (*_chosen_contenders(contender, preset, devices), *own)
        plan = Plan(cases, chosen, SECONDS[preset], output, _bytes(memory))
        done = plan.begin(resume)
    raise typer.Exit(measure(plan, done))


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Results of the earlier run.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Results of the later run.")],
    threshold: Annotated[float, typer.Option(help="Relative change that counts, beside the noise.")] = 0.05,
) -> None:
    """Say what became faster or slower between two files of results.

    What lies within the noise does not count. The exit status is 1 if anything became slower, takes more memory or
    is not timed any more.
    """
    with one_line_errors():
        before, after = read_rows(old), read_rows(new)
        changes = changes_between(before, after, threshold)
    console = Console(highlight=False, emoji=False)
    machines = [str(rows[0].environment) for rows in (before, after)]
    if machines[0] != machines[1]:
        console.print(f"[yellow]Measured on different grounds:[/]\n  before: {machines[0]}\n  after: {machines[1]}")
    changed = [x for x in changes if x.verdict != "same"]
    if changed:
        console.print(change_table(changes))
    worse = sum(x.is_regression for x in changes)
    console.print(
        f"{len(changes)} cells: {worse} worse, {len(changed) - worse} better, {len(changes) - len(changed)} the same."
    )
    raise typer.Exit(int(worse > 0))


@app.command()
def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A file of results, results.jsonl.")],
    output: Annotated[Path | None, typer.Option(help="Folder; that of the results if not given.")] = None,
) -> None:
    """Say for each shape what to use, and write CSV, plots and a page.

    The page needs no other file.
    """
    with one_line_errors():
        rows = read_rows(results)
        folder = results.parent if output is None else output
        validation.check_writable(folder / "report.html")
    console = Console(highlight=False, emoji=False)
    for case, sentence in advice_by_case(rows):
        console.print(f"[bold]{case}[/]\n  {escape(sentence)}")
    write_report(rows, folder, console)


@app.command()
def readme(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit status 1 if README is not current.")
    ] = False,
) -> None:
    """Renew the table in README from the results that are committed."""
    with one_line_errors():
        text = renewed_readme()
    if check:
        raise typer.Exit(int(text != README.read_text(encoding="utf-8")))
    README.write_text(text, encoding="utf-8")


def _preset(quick: bool, standard: bool, full: bool) -> str:
    chosen = [name for name, given in (("quick", quick), ("standard", standard), ("full", full)) if given]
    if len(chosen) > 1:
        raise validation.ArgumentValueError(f"one preset can be given, got --{' --'.join(chosen)}")
    return chosen[0] if chosen else "quick"


def _chosen_grids(preset: str, components: tuple[str, ...], axes: Mapping[str, Any]) -> list[Grid]:
    """Keep the grids of the preset that have these components, one of their own for those that it lacks; set axes."""
    preset_grids = PRESETS[preset]
    if components:
        kept = [(grid, tuple(x for x in grid.component if x in components)) for grid in preset_grids]
        missing = tuple(x for x in components if all(x not in names for _, names in kept))
        own_grid = (Grid(missing),) if missing else ()
        preset_grids = (*(replace(grid, component=names) for grid, names in kept if names), *own_grid)
    return [replace(grid, **{name: values for name, values in axes.items() if values}) for grid in preset_grids]


def _taking_part(own: Sequence[str], cases: Sequence[Case]) -> list[Case]:
    found = [case for case in cases if any(own_takes_part(name, case) for name in own)]
    if not found:
        raise validation.ArgumentValueError(
            f"implementation must take part in a case that is chosen, got {', '.join(own)} in none of {len(cases)}"
        )
    return found


def _chosen_contenders(given: str | None, preset: str, devices: Sequence[str]) -> tuple[str, ...]:
    for name in _names(given):
        validation.check_choice("contender", name, list(CONTENDERS))
    only_on_cuda = {"efficient", "cudnn"} if not any(x.startswith("cuda") for x in devices) else set()
    slow_to_compile = {"flex"} if preset == "quick" else set()
    return _names(given) or tuple(name for name in CONTENDERS if name not in only_on_cuda | slow_to_compile)


def _devices(given: str) -> list[str]:
    found = [validation.check_device(name) for name in _names(given)]
    for device in found:  # nobody waits for the kernels of other devices
        validation.check_choice("device", device.type, ("cpu", "cuda"))
    return [str(device) for device in found]


def _own(given: str | None) -> tuple[str, ...]:
    for name in _names(given):
        check_own(name)
    return _names(given)


def _bytes(gib: float | None) -> int | None:
    if gib is not None and gib <= 0:
        raise validation.ArgumentValueError(f"memory must be greater than 0, got memory={gib}")
    return None if gib is None else int(gib * 2**30)


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(_split(text))


def _numbers(name: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _split(text))
    except ValueError as error:
        raise validation.ArgumentValueError(
            f"{name} must be whole numbers with commas between, got {text!r}"
        ) from error


def _switches(name: str, text: str | None) -> tuple[bool, ...]:
    for part in _split(text):
        validation.check_choice(name, part, ("no", "yes"))
    return tuple(part == "yes" for part in _split(text))
