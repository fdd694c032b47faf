"""Files, settings and options of the small real task."""

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from scratch.validation.basics import ArgumentValueError, check_choice, check_positive

__all__ = [
    "check_alone",
    "check_device",
    "check_pair",
    "check_pairs",
    "check_picture_path",
    "check_training_settings",
    "check_words",
    "check_writable",
    "import_matplotlib_figure",
    "read_checkpoint",
    "read_text",
    "writing",
]


def read_text(path: Path) -> str:
    """Read a text file, or say why that cannot be done."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ArgumentValueError(f"{path} must be text in UTF-8, got other bytes on line {line}") from error
    except OSError as error:
        raise ArgumentValueError(f"{path} must be a file that can be read, got: {error.strerror}") from error


def check_pair(path: Path, number: int, line: str) -> tuple[str, str]:
    """Require a source and a target sentence with one tab between."""
    columns = [column.strip() for column in line.split("\t")]
    if len(columns) != 2:
        raise ArgumentValueError(
            f"{path}, line {number}: must be a source and a target sentence with one tab between, "
            f"got {len(columns) - 1} tabs in {line!r}"
        )
    for name, sentence in zip(("source", "target"), columns, strict=True):
        if not sentence:
            raise ArgumentValueError(f"{path}, line {number}: the {name} sentence must not be empty, got {line!r}")
    return columns[0], columns[1]


def check_pairs(pairs: Sequence[tuple[str, str]], name: str) -> None:
    """Require at least one pair of sentences."""
    if not pairs:
        raise ArgumentValueError(f"{name} must hold at least one pair of sentences, got none")


def check_words(words: Sequence[str], known: Sequence[str], near: Callable[[str], list[str]]) -> None:
    """Require a sentence of known words."""
    if not words:
        raise ArgumentValueError("sentence must hold at least one word, got an empty one")
    for word in words:
        if word not in known:
            close = near(word)
            hint = f"nearest: {', '.join(close)}" if close else f"known: {', '.join(known[:20])}"
            more = f" and {len(known) - 20} more" if not close and len(known) > 20 else ""
            raise ArgumentValueError(f"sentence must hold words of the vocabulary only, got {word!r}; {hint}{more}")


def check_training_settings(settings: Any) -> None:
    """Check how a model is to be trained."""
    check_choice("optimizer", settings.optimizer, ("sgd", "adam"))
    check_choice("loss", settings.loss, ("cross_entropy", "kl"))
    check_positive(num_epochs=settings.num_epochs, batch_size=settings.batch_size)
    if not 0 <= settings.seed < 2**32:
        raise ArgumentValueError(f"seed must be in 0 ... 2**32 - 1, got {settings.seed}")
    if not settings.learning_rate > 0:
        raise ArgumentValueError(f"learning_rate must be greater than 0, got {settings.learning_rate}")
    for name in ("momentum", "label_smoothing"):
        value = getattr(settings, name)
        if not 0 <= value < 1:
            raise ArgumentValueError(f"{name} must be in 0 ... 1, without 1, got {value}")
    if settings.label_smoothing and settings.loss != "kl":
        raise ArgumentValueError(
            f"label_smoothing needs loss='kl', got label_smoothing={settings.label_smoothing} and "
            f"loss={settings.loss!r}"
        )


def check_writable(path: Path) -> None:
    """Require a file name in a folder that exists and can be written to."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ArgumentValueError(f"{path} must be in a folder that exists, and {folder} does not")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ArgumentValueError(f"{path} must be a file that you may write, got a folder or no permission")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say what keeps a file from being written, such as a full disk, instead of what a library makes of it."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = error if isinstance(error, OSError) else error.__context__  # torch.save hides it in a RuntimeError
        if not isinstance(reason, OSError):
            raise
        raise ArgumentValueError(f"{path} could not be written: {reason.strerror or reason}") from error


def read_checkpoint(path: Path, expected_format: str, device: torch.device | str | None) -> dict[str, Any]:
    """Load a checkpoint, or say why it is none."""
    if not path.is_file():
        raise ArgumentValueError(f"{path} must be a checkpoint, and there is no such file; the command train makes one")
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises what its reader, zipfile or pickle come upon
        raise ArgumentValueError(f"{path} must be a complete checkpoint, and torch.load cannot read it") from error
    found = saved.get("format") if isinstance(saved, dict) else None
    if found != expected_format:
        raise ArgumentValueError(f"{path} must be a checkpoint of format {expected_format!r}, got {found!r}")
    return saved


def check_alone(option: str, others: Sequence[str]) -> None:
    """Require that an option which reads everything from a checkpoint comes without options that say otherwise."""
    if others:
        raise ArgumentValueError(
            f"--{option} takes everything else from the checkpoint: leave out {', '.join(f'--{x}' for x in others)}"
        )


def check_picture_path(path: Path) -> None:
    """Require a PNG or SVG file that can be written."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ArgumentValueError(f"{path} must end in .png or .svg, got {path.suffix or 'no suffix'!r}")
    check_writable(path)


def import_matplotlib_figure() -> Any:
    """Import what draws, or say how to install it."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ArgumentValueError(
            "plots need matplotlib, which is not installed: pip install 'attention-side-by-side[plot]'"
        ) from error


def check_device(name: str) -> torch.device:
    """Require a device that this machine has."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentValueError(f"device must be one that this machine has, such as cpu, got {name!r}") from error
    return device
