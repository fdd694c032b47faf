"""``sidebyside compare``, the main job: both packages compared, trained and timed, with a verdict."""

import dataclasses
import itertools
import json
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import torch
import typer
from rich import box
from rich.table import Table

from equivalence_tests.compare.components import CALL, Component, Row, compare_component, compare_masks, components
from equivalence_tests.compare.processes import RanksFailedError
from equivalence_tests.compare.ranks import CONTEXT_PARALLEL, RankRow, compare_ranks, number_of_comparisons
from equivalence_tests.compare.timing import Timing, TimingSizes, time_side_by_side
from equivalence_tests.compare.training import SettledTraining, train_side_by_side
from equivalence_tests.progress import progress
from scratch import validation
from scratch.task.command_line import one_line_errors
from scratch.task.terminal import Screen
from scratch.task.translation import PAIRS, Pair, read_pairs, replacing

__all__ = ["compare", "compare_all_components"]

EPOCHS = 30
QUANTITIES = {
    "output": "output",
    "attention maps": "maps",
    "masks": "masks",
    "input gradients": "d input",
    "parameter gradients": "d weights",
}

DtypeName = Literal["float64", "float32", "bfloat16", "float16"]


def compare(
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes, one training run, shorter timings.")] = False,
    dtype: Annotated[DtypeName, typer.Option(help="Precision in which components are compared.")] = "float64",
    device: Annotated[str, typer.Option(help="Device to run on: cpu, cuda, ...")] = "cpu",
    pairs: Annotated[Path | None, typer.Option(help="File of tab-separated sentence pairs to train on.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed for weights, inputs and training.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write all results to this file, as JSON.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Compare work split over 2 or 4 processes with one process, and nothing else.")
    ] = None,
) -> None:
    """Show that scratch and builtin compute the same numbers.

    Every component is compared, then both models are trained and timed. Exit status: 0 if they agree, 1 if anything
    differs by more than is allowed, 2 for bad arguments.
    """
    with one_line_errors():
        if ranks is not None:
            validation.check_choice("ranks", ranks, (2, 4))
            check_ranks_alone(quick=quick, dtype=dtype != "float64", pairs=pairs is not None)
        place = validation.check_device(device)
        sentences = PAIRS if pairs is None else read_pairs(pairs)
        if json_file is not None:
            validation.check_writable(json_file)
    console = Screen(highlight=False)
    if ranks is not None:
        compare_processes_with_one(console, ranks, place, seed, json_file)
    console.print(f"scratch and builtin, side by side, on {about_this_machine(place)}")
    console.print(f"{work_ahead(quick)}\n")
    rows = compare_all_components(getattr(torch, dtype), place, seed)
    console.print(component_table(rows), "")
    show_failures(console, rows)
    trainings = train_all(sentences, place, seed, quick)
    show_trainings(console, trainings)
    timings = time_all(TimingSizes.quick() if quick else TimingSizes(), place)
    console.print(timing_table(timings), "")
    show_decoding(console, timings[-1])
    agree, verdict = verdict_on(rows, trainings)
    if json_file is not None:
        about = {"agree": agree, "machine": about_this_machine(place), "dtype": dtype, "seed": seed}
        write_json(json_file, about | as_data(rows, trainings, timings))
    console.print(verdict)
    raise typer.Exit(0 if agree else 1)


def work_ahead(quick: bool) -> str:
    """Say what is done and how long that takes, before it begins."""
    trained, takes = ("one training", "under a minute") if quick else ("two trainings", "a few minutes")
    return f"Every component is compared, then {trained} and four timings follow: {takes} on a quiet machine."


def check_ranks_alone(**given: bool) -> None:
    """Refuse options that ``--ranks`` leaves without effect."""
    typed = [f"--{name}" for name, is_given in given.items() if is_given]
    if typed:
        raise validation.ArgumentValueError(
            f"--ranks compares models of its own, in float64: leave out {' and '.join(typed)}"
        )


def compare_processes_with_one(
    console: Screen, num_ranks: int, device: torch.device, seed: int, json_file: Path | None
) -> NoReturn:
    """Share the work among several processes, compare with one, and exit with 0 if they agree."""
    console.print(f"{num_ranks} processes and one, side by side, on {about_this_machine(device)}\n")
    try:
        with progress(f"starting {num_ranks} processes", number_of_comparisons()) as advance:
            rows = compare_ranks(num_ranks, device.type, seed, advance)
    except RanksFailedError as error:
        console.print(f"[bold red]They could not be compared:[/] {error}.")
        raise typer.Exit(1) from None
    console.print(ranks_table(rows), "", CONTEXT_PARALLEL, "")
    wrong = [row for row in rows if not row.passed]
    for row in wrong:
        console.print(f"[bold red]{row.strategy}, {row.model}, {row.quantity}:[/] {row.detail}")
    if json_file is not None:
        found = [dataclasses.asdict(row) for row in rows]
        write_json(json_file, {"agree": not wrong, "ranks": num_ranks, "seed": seed, "comparisons": found})
    if wrong:
        console.print(f"[bold red]They differ:[/] {len(wrong)} of {len(rows)} comparisons.")
    else:
        console.print(f"[bold green]They agree:[/] {len(rows)} comparisons of {num_ranks} processes with one.")
    raise typer.Exit(1 if wrong else 0)


def ranks_table(rows: Sequence[RankRow]) -> Table:
    """Show a line for each model and strategy, and in each cell the greatest difference."""
    table = new_table("The numbers of one process, float64: greatest difference")
    quantities = list(dict.fromkeys(row.quantity for row in rows))
    table.add_column("", no_wrap=True)
    for quantity in quantities:
        table.add_column(quantity, min_width=9)
    for model, group in itertools.groupby(rows, key=lambda row: row.model):
        table.add_row(model)
        for strategy, line in itertools.groupby(group, key=lambda row: row.strategy):
            cells = {row.quantity: f"{row.greatest_difference:.1e}{'' if row.passed else ' DIFFERS'}" for row in line}
            table.add_row(f"  {strategy}", *(cells[quantity] for quantity in quantities))
    return table


def about_this_machine(device: torch.device) -> str:
    """Name versions, device and threads, so that results can be placed."""
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return (
        f"{device} ({name}), {threads} {'thread' if threads == 1 else 'threads'}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def new_table(title: str) -> Table:
    """Make an empty table in the look of all of them."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )


def compare_all_components(dtype: torch.dtype, device: torch.device, seed: int) -> list[Row]:
    """Compare the masks and every component.

    Args:
        dtype: Of parameters and inputs.
        device: Where.
        seed: Of weights and inputs.

    Returns:
        One row for each quantity of each component.
    """
    listed: list[Component] = components(dtype, seed)
    rows = compare_masks(device)
    with progress("comparing", len(listed)) as advance:
        for component in listed:
            rows += compare_component(component, device)
            advance(f"compared {component.name}")
    return rows


def component_table(rows: Sequence[Row]) -> Table:
    """Show a line for each component, and in each cell "identical", or the greatest difference and its size."""
    below = "the errors of scratch : builtin" if any(row.error_ratio for row in rows) else "units in the last place"
    table = new_table(f"Same weights in both packages: greatest difference, with {below} below it")
    table.add_column("", overflow="fold")
    for heading in QUANTITIES.values():
        table.add_column(heading, no_wrap=True)
    for component, group in itertools.groupby(rows, key=lambda row: row.component):
        shown = {row.quantity.replace(CALL, "output"): in_a_cell(row) for row in group}
        table.add_row(component, *(shown.get(quantity, "") for quantity in QUANTITIES))
    return table


def in_a_cell(row: Row) -> str:
    """Give the difference, and below it its ulp, or in lower precision the ratio of the two errors."""
    if row.identical:
        return "identical"
    if row.quantity == CALL:
        return "[bold red]RAISES[/]"
    below = f"{row.greatest_difference_ulps:.3g} ulp" if row.error_ratio is None else f"{row.error_ratio:.2f} : 1"
    text = f"{row.greatest_difference:.1e}\n{below}"
    return text if row.passed else f"[bold red]DIFFERS\n{text}[/]"


def show_failures(console: Screen, rows: Sequence[Row]) -> None:
    """Say in full where anything differs more than allowed."""
    for row in rows:
        if not row.passed:
            console.print(f"[bold red]{row.component}, {row.quantity}:[/] {row.detail}")


def train_all(pairs: Sequence[Pair], device: torch.device, seed: int, quick: bool) -> list[SettledTraining]:
    """Train with both optimizers in float64, or with Adam only."""
    optimizers: tuple[Literal["adam", "sgd"], ...] = ("adam",) if quick else ("adam", "sgd")
    settled = []
    for optimizer in optimizers:
        with progress(f"training both with {optimizer}", EPOCHS) as advance:
            for result in train_side_by_side(
                pairs, optimizer, num_epochs=EPOCHS, seed=seed, dtype=torch.float64, device=device
            ):
                advance()
                settled += [] if result is None else [result]
    return settled


def show_trainings(console: Screen, trainings: Sequence[SettledTraining]) -> None:
    """Print losses and parameters of each training, and the translations of the first."""
    table = new_table("Trained from the same seed, dropout on, float64")
    for name in ("", "loss: scratch", "builtin", "greatest difference", "parameters", "allowed", ""):
        table.add_column(name)
    for x in trainings:
        verdict = "[green]same[/]" if x.same else "[bold red]DIFFERS[/]"
        differences = (f"{x.greatest_loss_difference:.1e}", f"{x.greatest_parameter_difference:.1e}")
        losses = (f"{x.scratch_loss:.6f}", f"{x.builtin_loss:.6f}")
        table.add_row(x.optimizer, *losses, *differences, f"{x.parameter_bound:.0e}", verdict)
    console.print(table, "")
    translations = new_table("Translated by both")
    for name in ("", "source", "scratch", "builtin", ""):
        translations.add_column(name)
    for beam_size, source, wanted, ours, theirs in trainings[0].translations:
        verdict = "same" if ours == theirs else "[bold red]DIFFERS[/]"
        verdict += ", right" if ours == theirs == wanted else ", not as wanted"
        translations.add_row("greedy" if beam_size == 1 else f"beam {beam_size}", source, ours, theirs, verdict)
    console.print(translations, "")


def time_all(sizes: TimingSizes, device: torch.device) -> list[Timing]:
    """Time both in turns, in float32."""
    timings = []
    with progress("timing in turns", 4) as advance:
        for timing in time_side_by_side(sizes, torch.float32, device):
            timings.append(timing)
            advance(f"timed {timing.name}")
    return timings


def timing_table(timings: Sequence[Timing]) -> Table:
    """Show medians with their spread, and the ratio of each thing that was timed."""
    table = new_table("Timed in turns, float32: median over the rounds, with the range")
    table.add_column("")
    for name in ("scratch ms", "builtin ms", "scratch / builtin"):
        table.add_column(name, justify="right", no_wrap=True)
    for x in timings:
        ratio = f"{x.ratio:.2f} ({min(x.ratios):.2f}–{max(x.ratios):.2f})"
        table.add_row(x.name, in_words(x.scratch_ms), in_words(x.builtin_ms), ratio)
    return table


def show_decoding(console: Screen, decoding: Timing) -> None:
    """Say what the cache of scratch gains over recomputing all tokens at each step."""
    speed = decoding.tokens / statistics.median(decoding.scratch_ms) * 1e3
    gain = 1 / decoding.ratio
    console.print(f"With its cache, scratch decodes {speed:,.0f} tokens/s, {gain:.1f} times as many as without.\n")


def in_words(times: Sequence[float]) -> str:
    """Give the median of times, with the least and the greatest."""
    ordered = sorted(times)
    return f"{ordered[len(ordered) // 2]:.0f} ({ordered[0]:.0f}–{ordered[-1]:.0f})"


def as_data(rows: Sequence[Row], trainings: Sequence[SettledTraining], timings: Sequence[Timing]) -> dict[str, Any]:
    """Give all results in a form that JSON can hold."""
    return {
        "components": [dataclasses.asdict(row) for row in rows],
        "trainings": [dataclasses.asdict(training) | {"same": training.same} for training in trainings],
        "timings": [dataclasses.asdict(timing) | {"ratio": timing.ratio} for timing in timings],
    }


def verdict_on(rows: Sequence[Row], trainings: Sequence[SettledTraining]) -> tuple[bool, str]:
    """Say in one line whether everything agrees."""
    wrong = [f"{row.component} ({row.quantity})" for row in rows if not row.passed]
    wrong += [f"training with {training.optimizer}" for training in trainings if not training.same]
    if wrong:
        return False, f"[bold red]They differ:[/] {', '.join(wrong)}."
    identical = sum(row.identical for row in rows)
    wanted = sum(x.right for x in trainings), sum(2 * len(x.translations) for x in trainings)
    return True, (
        f"[bold green]They agree:[/] {len(rows)} comparisons, {identical} of them identical to the last bit; "
        f"{wanted[0]} of {wanted[1]} translations are right."
    )


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Write results, all or nothing."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(results, indent=2), encoding="utf-8")
