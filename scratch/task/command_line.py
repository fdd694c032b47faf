"""The commands train, translate, summary and plot, the same for both packages."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from scratch import validation
from scratch.positional import Layout
from scratch.recording import record_attention
from scratch.task import plotting, translation
from scratch.task.summary import ParameterRow, parameter_rows
from scratch.task.terminal import Screen
from scratch.task.translation import ModelSizes, Training, TrainingSettings, TranslationTask, Vocabulary

__all__ = ["command_line"]

errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

CheckpointOption = Annotated[Path, typer.Option("--checkpoint", "-c", help="Checkpoint file of the model.")]
DeviceOption = Annotated[str, typer.Option(help="Device to run on: cpu, cuda, cuda:1, ...")]
CHECKPOINT = Path("translation.pt")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Say what is wrong with an argument in one line instead of a traceback, and end with status 2."""
    try:
        yield
    except (validation.ArgumentValueError, validation.ArgumentTypeError) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}")
        raise typer.Exit(2) from error


def command_line(package: str, model_class: type[nn.Module]) -> typer.Typer:
    """Make the command line of one package.

    Args:
        package: Its name, for the help.
        model_class: Its ``Seq2SeqTransformer``.

    Returns:
        A typer application with the commands train, translate, summary and plot.
    """
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"obj": model_class},
        help=f"Train the Transformer of {package} on sentence pairs, translate with it and look inside.",
    )
    plots = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Draw pictures as PNG or SVG.")
    for command in (train, translate, summary):
        app.command()(command)
    plots.command("positional")(plot_positional)
    plots.command("attention")(plot_attention)
    app.add_typer(plots, name="plot")
    return app


def check_alone(context: typer.Context, option: str, *beside: str) -> None:
    """Refuse options that were typed beside one that leaves them without effect."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    typed = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    validation.check_alone(option, [name.replace("_", "-") for name in typed if name not in (option, *beside)])


def train(
    context: typer.Context,
    pairs: Annotated[
        Path | None, typer.Option(help="Tab-separated sentence pairs; by default three German-English ones.")
    ] = None,
    checkpoint: CheckpointOption = CHECKPOINT,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint.")] = False,
    epochs: Annotated[int, typer.Option(help="Total number of epochs.")] = 30,
    small: Annotated[
        bool, typer.Option("--small", help="Width 64 and two layers instead of the paper's sizes.")
    ] = False,
    optimizer: Annotated[Literal["sgd", "adam"], typer.Option(help="Optimizer.")] = "sgd",
    learning_rate: Annotated[float | None, typer.Option(help="By default 1e-3, or 1e-4 for adam at full size.")] = None,
    momentum: Annotated[float, typer.Option(help="Momentum for sgd.")] = 0.99,
    loss: Annotated[
        Literal["cross_entropy", "kl"],
        typer.Option(help="kl is the Kullback-Leibler divergence from smoothed targets."),
    ] = "cross_entropy",
    label_smoothing: Annotated[float, typer.Option(help="Share of each target that kl spreads over all tokens.")] = 0.0,
    batch_size: Annotated[int, typer.Option(help="Sentence pairs per step.")] = 2,
    dropout: Annotated[float, typer.Option(help="Dropout probability.")] = 0.0,
    norm_first: Annotated[
        bool, typer.Option("--norm-first", help="LayerNorm before each sub-layer, not after it.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed for parameters, order and dropout.")] = 0,
    device: DeviceOption = "cpu",
    dtype: Annotated[Literal["float32", "float64"], typer.Option(help="Dtype of the parameters.")] = "float32",
) -> None:
    """Train a model on sentence pairs and save a checkpoint."""
    with one_line_errors():
        validation.check_writable(checkpoint)
        place = validation.check_device(device)
        if resume:
            check_alone(context, "resume", "checkpoint", "epochs", "device")
            training, sizes = translation.load_checkpoint(checkpoint, context.obj, place)
            training.settings = dataclasses.replace(training.settings, num_epochs=epochs)
        else:
            default_rate = 1e-4 if optimizer == "adam" and not small else 1e-3
            rate = default_rate if learning_rate is None else learning_rate
            settings = TrainingSettings(optimizer, rate, momentum, loss, label_smoothing, epochs, batch_size, seed)
            build = ModelSizes.small if small else ModelSizes
            sizes = build(dropout=dropout, norm_first=norm_first)
            task = TranslationTask(translation.PAIRS if pairs is None else translation.read_pairs(pairs))
            model = task.build(context.obj, sizes, seed, place, getattr(torch, dtype))
            training = Training(model, task, settings)
        run_with_progress(training, lambda: translation.save_checkpoint(checkpoint, training, sizes))
        show_result(training, checkpoint)


def run_with_progress(training: Training, save: Callable[[], None]) -> None:
    """Train to the last epoch behind a progress bar; save every tenth epoch, at the end and when interrupted."""
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    num_epochs = training.settings.num_epochs
    try:
        with Progress(*columns, TimeRemainingColumn(), console=errors) as progress:
            bar = progress.add_task("", total=num_epochs, completed=len(training.losses), loss="")
            for loss in training.epochs():
                progress.update(bar, advance=1, loss=f"loss {loss:.4f}")
                if len(training.losses) % 10 == 0:
                    save()
    finally:
        save()


def show_result(training: Training, checkpoint: Path) -> None:
    """Print what the model makes of the first pairs it was trained on."""
    pairs = training.task.pairs[:10]
    table = Table("source", "translation", "expected", "")
    outputs = translation.translate(training.model, training.task, [source for source, _ in pairs])
    for (source, expected), output in zip(pairs, outputs, strict=True):
        table.add_row(source, output, expected, "right" if output == expected else "wrong")
    console = Screen()
    console.print(table)
    console.print(
        f"epoch {len(training.losses)}, loss {training.losses[-1]:.4f}, saved to {checkpoint}", highlight=False
    )


def translate(
    context: typer.Context,
    sentence: Annotated[
        str, typer.Argument(metavar="SENTENCE", help="Sentence to translate; - reads lines from standard input.")
    ],
    checkpoint: CheckpointOption = CHECKPOINT,
    beam_size: Annotated[int, typer.Option(help="Number of hypotheses in beam search; 1 is greedy decoding.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="How strongly beam search favours long sentences.")] = 0.6,
    as_json: Annotated[bool, typer.Option("--json", help="Print the sentence and its translation as JSON.")] = False,
    device: DeviceOption = "cpu",
) -> None:
    """Translate a sentence with a trained model."""
    with one_line_errors():
        training, _ = translation.load_checkpoint(checkpoint, context.obj, validation.check_device(device))
        sentences = [line for line in sys.stdin.read().splitlines() if line.strip()] if sentence == "-" else [sentence]
        outputs = translation.translate(training.model, training.task, sentences, beam_size, length_penalty)
        for source, output in zip(sentences, outputs, strict=True):
            typer.echo(json.dumps({"source": source, "translation": output}) if as_json else output)


def summary(
    context: typer.Context,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", "-c", help=f"Checkpoint file; by default {CHECKPOINT}, if it exists.")
    ] = None,
    small: Annotated[
        bool | None, typer.Option("--small/--paper", help="An untrained model instead, small or of the paper's size.")
    ] = None,
    bias: Annotated[bool, typer.Option(help="Whether an untrained model has biases.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Count the parameters of each layer.

    Without options, the model is the one just trained, or an untrained one if there is none.
    """
    untrained = small is not None or not bias
    with one_line_errors():
        if checkpoint is not None:
            check_alone(context, "checkpoint", "as_json")
        elif not untrained and CHECKPOINT.exists():
            checkpoint = CHECKPOINT
        model: Any
        if checkpoint is None:
            sizes = ModelSizes.small(bias=bias) if small else ModelSizes(bias=bias)
            model = TranslationTask(translation.PAIRS).build(context.obj, sizes, seed=0, device="meta")
        else:
            model = translation.load_checkpoint(checkpoint, context.obj)[0].model
        title = f"{'an untrained model' if checkpoint is None else checkpoint}: width {model.transformer.d_model}"
        show_summary(list(parameter_rows(model)), as_json, title)


def show_summary(rows: list[ParameterRow], as_json: bool, title: str) -> None:
    """Print the rows with their sum, as a table or as JSON."""
    if as_json:
        typer.echo(json.dumps([{**dataclasses.asdict(row), "total": row.total} for row in rows], indent=2))
        return
    table = Table(title=escape(title), title_justify="left", show_footer=True, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", footer="all", overflow="fold")
    for name in ("weights", "biases", "total"):
        table.add_column(name, footer=f"{sum(getattr(row, name) for row in rows):,}", justify="right")
    for row in rows:
        counts = (f"{count:,}" for count in (row.weights, row.biases, row.total))
        table.add_row(row.path.removeprefix("transformer."), *counts)
    Screen().print(table)


OutputOption = Annotated[Path, typer.Option("--output", "-o", help="File to write, .png or .svg.")]


def plot_positional(
    output: OutputOption = Path("positional.png"),
    positions: Annotated[int, typer.Option(help="Number of positions.")] = 64,
    d_model: Annotated[int, typer.Option(help="Number of dimensions.")] = 8,
    curves: Annotated[int, typer.Option(help="Number of dimensions to draw as curves.")] = 5,
    layout: Annotated[
        Layout, typer.Option(help="interleaved as in the paper, or concatenated as in tensor2tensor.")
    ] = "interleaved",
) -> None:
    """Draw sinusoidal positional encodings: a heat map and curves."""
    with one_line_errors():
        validation.check_picture_path(output)
        figure = plotting.positional_figure(positions, d_model, layout, curves)
        plotting.save_figure(figure, output)
        typer.echo(output)


def plot_attention(
    context: typer.Context,
    sentence: Annotated[str, typer.Argument(metavar="SENTENCE", help="Sentence to translate.")],
    checkpoint: CheckpointOption = CHECKPOINT,
    output: OutputOption = Path("attention.png"),
    only: Annotated[str, typer.Option(help="Draw only attentions whose path contains this, e.g. multihead_attn.")] = "",
) -> None:
    """Draw the attention maps of a trained model as it translates a sentence.

    Each row is a layer, each column a head.
    """
    with one_line_errors():
        validation.check_picture_path(output)
        training, _ = translation.load_checkpoint(checkpoint, context.obj)
        maps, tokens = maps_of_sentence(training.model, training.task, sentence)
        validation.check_path_part(only, list(maps))
        maps = {path: weights for path, weights in maps.items() if only in path}
        plotting.save_figure(plotting.attention_figure(maps, tokens), output)
        typer.echo(output)


def maps_of_sentence(model: Any, task: TranslationTask, sentence: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Translate a sentence, and give the maps of the whole pass and the tokens of their queries and keys."""
    (translated,) = translation.translate(model, task, [sentence])
    src_ids = task.source_ids([sentence])
    source, target = sentence.split(), [Vocabulary.SPECIAL[Vocabulary.START], *translated.split()]
    tgt_ids = torch.tensor([[task.target.ids[word] for word in target]])
    with torch.no_grad(), record_attention(model) as recorded:
        model(src_ids, tgt_ids)
    maps = {path.removeprefix("transformer."): weights[0] for path, weights in recorded.items()}
    sides = {path: (source, source) if "encoder" in path else (target, target) for path in maps}
    sides |= {path: (target, source) for path in maps if path.endswith("multihead_attn")}
    return maps, sides
