"""The command line: run is what happens without a command; compare and report read what it kept."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from benchmarks.advice import advice_by_case
from benchmarks.contenders import CONTENDERS
from benchmarks.fitting import fitted
from benchmarks.grids import COMPONENTS, DTYPES, MASKS, MODES, PRESETS, Case, Grid, cases_of
from benchmarks.measuring import machine_rates
from benchmarks.own import check_own, in_torch, own_takes_part
from benchmarks.peers import PEERS
from benchmarks.readme import goals, renewed
from benchmarks.regressions import change_table, changes_between
from benchmarks.results import Row, read_rows
from benchmarks.screen import command_errors, console
from benchmarks.session import Plan, begun, make_folder, measure, write_report
from benchmarks.summary import in_sentences, summary
from scratch import validation

__all__ = ["app"]

WITH_OWN = ("attention", "self_attention", "cross_attention")
SECONDS = {"quick": 1.5, "standard": 1.0, "full": 4.0}  # few cases are quick's, and each has many rounds
# What a preset has no time for: flex compiles for long, and math computes what "scratch textbook" does.
TOO_SLOW = {"quick": {"flex", "math", *PEERS}, "standard": {"math"}}
QUICK_SECONDS = 45.0  # for measuring; importing torch and writing the page take the rest of the minute

app = typer.Typer(invoke_without_command=True, add_completion=False, rich_markup_mode=None)


def _listed(help_text: str, names: Sequence[str] = ()) -> Any:
    choices = f" ({', '.join(names)})" if names else ""
    return typer.Option(help=f"{help_text}{choices}.", metavar="LIST")


@app.callback()
def run(
    context: typer.Context,
    quick: Annotated[
        bool, typer.Option("--quick", help="Sizes fitted to this machine; takes about a minute. The default.")
    ] = False,
    standard: Annotated[
        bool, typer.Option("--standard", help="Lengths up to 4096; about a quarter of an hour.")
    ] = False,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Lengths up to 16384, more modes, masks and dtypes, and torch.compile; many hours."
        ),
    ] = False,
    component: Annotated[str | None, _listed("What to time", COMPONENTS)] = None,
    mode: Annotated[str | None, _listed("How to run it", MODES)] = None,
    batch: Annotated[str | None, _listed("Numbers of sequences")] = None,
    length: Annotated[str | None, _listed("Lengths of queries and keys")] = None,
    key_length: Annotated[
        str | None, _listed("Lengths of keys, or of the source, if they differ from --length")
    ] = None,
    width: Annotated[str | None, _listed("embed_dim or d_model")] = None,
    heads: Annotated[str | None, _listed("Numbers of heads")] = None,
    layers: Annotated[str | None, _listed("Numbers of layers in the encoder and in the decoder")] = None,
    dtype: Annotated[str | None, _listed("Dtypes of parameters and inputs", DTYPES)] = None,
    mask: Annotated[str | None, _listed("Masks", MASKS)] = None,
    window: Annotated[str | None, _listed("Numbers of keys that a query sees with --mask window")] = None,
    need_weights: Annotated[str | None, _listed("Whether attention returns its weights (no, yes)")] = None,
    compiled: Annotated[str | None, _listed("Whether to use torch.compile (no, yes)")] = None,
    bias: Annotated[str | None, _listed("Whether projections have biases (no, yes)")] = None,
    key_heads: Annotated[str | None, _listed("Numbers of key heads, for grouped queries (the function only)")] = None,
    threads: Annotated[str | None, _listed("Numbers of threads on the CPU; by default as many as torch uses")] = None,
    device: Annotated[str, _listed("Where to run", ["cpu", "cuda", "cuda:1"])] = "cpu",
    contender: Annotated[str | None, _listed("What to compare with builtin", list(CONTENDERS))] = None,
    implementation: Annotated[
        list[str] | None, typer.Option(metavar="FILE:NAME", help="Your own attention; may be given several times.")
    ] = None,
    with_equivalent: Annotated[
        bool,
        typer.Option("--with-equivalent", help="Also time the equivalent of --implementation in torch's own parts."),
    ] = False,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Memory that a large case may use on the CPU; by default all free memory."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for results, plots and an HTML page.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --output.")] = False,
) -> None:
    """Time scratch, torch.nn and your own attention side by side, once their results have been compared.

    Options override the preset. Separate several values by commas: --length 512,2048. The exit status is 0 if all
    contenders give equal results, 1 if one does not, 2 for bad arguments, 3 if results could not be written, and 130
    after Ctrl-C.
    """
    if context.invoked_subcommand is not None:
        return
    with command_errors():
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
            "window": _numbers("window", window),
            "need_weights": _switches("need-weights", need_weights),
            "compiled": _switches("compiled", compiled),
            "bias": _switches("bias", bias),
            "key_heads": _numbers("key-heads", key_heads),
        }
        preset, own = _preset(quick, standard, full), _own(implementation, with_equivalent)
        components = _names(component) or (WITH_OWN if own else ())
        counts, devices = _numbers("threads", threads) or (torch.get_num_threads(),), _devices(device)
        done = begun(output, resume)
        grids = PRESETS[preset] if preset != "quick" or axes["length"] else _fitted(counts[0], devices[0], done)
        cases = cases_of(_chosen_grids(grids, components, axes), counts, devices)
        cases = cases if component or not own else _taking_part(own, cases)
        chosen = (*_chosen_contenders(contender, preset, devices), *own)
        limit = _limit(preset, quick, bool(component or any(axes.values()) or own))
        plan = Plan(cases, chosen, SECONDS[preset], output, _bytes(memory), limit)
        raise typer.Exit(measure(plan, done))


def _limit(preset: str, quick: bool, chosen: bool) -> float | None:
    """What somebody has chosen is measured, however long it takes; unless ``--quick`` was typed too."""
    return QUICK_SECONDS if preset == "quick" and (quick or not chosen) else None


def _fitted(threads: int, device: str, done: Sequence[Row]) -> tuple[Grid, ...]:
    """Give the quick grids with lengths that fit this machine, or those of the run that is continued."""
    rates = machine_rates("float32", threads, torch.device(device))
    return tuple(fitted(PRESETS["quick"], rates.flops_per_s, done[0].case if done else None))


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Results of the earlier run.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Results of the later run.")],
    threshold: Annotated[
        float,
        typer.Option(metavar="NUMBER", help="Smallest relative change to report, if it stands out from the noise."),
    ] = 0.05,
) -> None:
    """Say what became faster or slower between two files of results.

    The exit status is 1 if anything became slower, needs more memory or could not be timed any more.
    """
    with command_errors():
        before, after = read_rows(old), read_rows(new)
        changes = changes_between(before, after, threshold)
        screen = console()
        machines = [str(rows[0].environment) for rows in (before, after)]
        if machines[0] != machines[1]:
            screen.print(
                f"[yellow]Measured on different machines or versions:[/]\n  old: {machines[0]}\n  new: {machines[1]}"
            )
        changed = [x for x in changes if x.verdict != "same"]
        if changed:
            screen.print(change_table(changes))
        worse = sum(x.is_regression for x in changes)
        same = len(changes) - len(changed)
        screen.print(
            f"Cells compared: {len(changes)}. Worse: {worse}, better: {len(changed) - worse}, the same: {same}."
        )
        raise typer.Exit(int(worse > 0))


@app.command()
def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="Results of a run: results.jsonl.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder to write to; by default the folder of the results.")
    ] = None,
) -> None:
    """Say what to use in each case; write a table, plots and a page.

    The page is a single HTML file.
    """
    with command_errors():
        rows = read_rows(results)
        folder = results.parent if output is None else output
        make_folder(folder)
        validation.check_writable(folder / "report.html")
        screen = console()
        screen.print(summary(rows), "", in_sentences(advice_by_case(rows)), markup=False)
        write_report(rows, folder, screen)


@app.command()
def readme() -> None:
    """Update the figures in README and in benchmarks/results.

    Then say which goals they meet.
    """
    with command_errors():
        for path, text in renewed().items():
            path.write_text(text, encoding="utf-8")
        for line in goals():
            console().print(escape(line), soft_wrap=True)


def _preset(quick: bool, standard: bool, full: bool) -> str:
    chosen = [name for name, given in (("quick", quick), ("standard", standard), ("full", full)) if given]
    if len(chosen) > 1:
        raise validation.ArgumentValueError(f"one preset can be given, got --{' --'.join(chosen)}")
    return chosen[0] if chosen else "quick"


def _chosen_grids(preset_grids: tuple[Grid, ...], components: tuple[str, ...], axes: Mapping[str, Any]) -> list[Grid]:
    """Keep the grids of the preset that have these components, one of their own for those that it lacks; set axes."""
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
    only_on_cuda = {"efficient", "cudnn", "scratch triton"} if not any(x.startswith("cuda") for x in devices) else set()
    left_out = only_on_cuda | TOO_SLOW.get(preset, set())
    return _names(given) or tuple(name for name in CONTENDERS if name not in left_out)


def _devices(given: str) -> list[str]:
    found = [validation.check_device(name) for name in _names(given)]
    for device in found:  # nobody waits for the kernels of other devices
        validation.check_choice("device", device.type, ("cpu", "cuda"))
    return [str(device) for device in found]


def _own(given: Sequence[str] | None, with_equivalent: bool) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name for text in given or () for name in _split(text)))
    for name in names:
        check_own(name)
    if with_equivalent and not names:
        raise validation.ArgumentValueError("--with-equivalent needs --implementation, your own attention")
    return tuple(x for name in names for x in ((name, in_torch(name)) if with_equivalent else (name,)))


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
