"""The second part of ``sidebyside compare``: both packages trained from the same seed, dropout on, epoch by epoch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

import builtin
import scratch
from scratch.task.translation import ModelSizes, Pair, Training, TrainingSettings, TranslationTask, translate

__all__ = ["SettledTraining", "train_side_by_side"]

# Of the largest parameter, in float64. AdamW and Adam divide by the size of the gradient, rounding noise included.
PARAMETER_BOUND = {"sgd": 1e-12, "adam": 1e-10}
LOSS_BOUND = {torch.float64: 1e-10, torch.float32: 1e-4}


@dataclass(frozen=True)
class SettledTraining:
    """How a training of both packages ended.

    Args:
        optimizer: What was trained with.
        num_epochs: Number of epochs.
        scratch_loss: Mean loss of the last epoch of scratch.
        builtin_loss: That of builtin.
        greatest_loss_difference: Over all epochs.
        loss_bound: What is allowed for it.
        greatest_parameter_difference: After the last epoch, relative to the largest parameter.
        parameter_bound: What is allowed for it; None where only losses are compared.
        translations: For each beam size and sentence: beam size, source, wanted, from scratch, from builtin.
    """

    optimizer: str
    num_epochs: int
    scratch_loss: float
    builtin_loss: float
    greatest_loss_difference: float
    loss_bound: float
    greatest_parameter_difference: float
    parameter_bound: float | None
    translations: tuple[tuple[int, str, str, str, str], ...]

    @property
    def same(self) -> bool:
        """Whether losses, parameters and translations agree."""
        parameters = self.parameter_bound is None or self.greatest_parameter_difference <= self.parameter_bound
        translations = all(ours == theirs for *_, ours, theirs in self.translations)
        return self.greatest_loss_difference <= self.loss_bound and parameters and translations

    @property
    def right(self) -> int:
        """How many translations, of both packages, are as wanted."""
        return sum((ours == wanted) + (theirs == wanted) for _, _, wanted, ours, theirs in self.translations)


def train_side_by_side(
    pairs: Sequence[Pair],
    optimizer: Literal["sgd", "adam"],
    *,
    num_epochs: int,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[SettledTraining | None]:
    """Train ``Seq2SeqTransformer`` of both packages in turns, from the same seed, with dropout 0.1.

    Args:
        pairs: Source and target sentences.
        optimizer: "sgd" with momentum 0.99, or "adam".
        num_epochs: Number of epochs.
        seed: Of parameters, order and dropout.
        dtype: float64 or float32; in float32 only losses are compared.
        device: Where.

    Yields:
        None after each epoch, and at last how the training ended.
    """
    task, sizes = TranslationTask(pairs), ModelSizes.small(dropout=0.1)
    settings = TrainingSettings(optimizer=optimizer, num_epochs=num_epochs, seed=seed)
    trainings = [
        Training(task.build(package.Seq2SeqTransformer, sizes, seed, device, dtype), task, settings)
        for package in (scratch, builtin)
    ]
    for _ in zip(*(training.epochs() for training in trainings), strict=True):
        yield None
    ours, theirs = trainings
    yield SettledTraining(
        optimizer=optimizer,
        num_epochs=num_epochs,
        scratch_loss=ours.losses[-1],
        builtin_loss=theirs.losses[-1],
        greatest_loss_difference=max(abs(x - y) for x, y in zip(ours.losses, theirs.losses, strict=True)),
        loss_bound=LOSS_BOUND[dtype],
        greatest_parameter_difference=_parameter_difference(ours.model, theirs.model),
        parameter_bound=PARAMETER_BOUND[optimizer] if dtype == torch.float64 else None,
        translations=tuple(_translations(ours.model, theirs.model, task)),
    )


def _parameter_difference(ours: torch.nn.Module, theirs: torch.nn.Module) -> float:
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    largest = max(float(q.detach().abs().max()) for _, q in pairs)
    return max(float((p - q).detach().abs().max()) for p, q in pairs) / largest


def _translations(ours: Any, theirs: Any, task: TranslationTask) -> Iterator[tuple[int, str, str, str, str]]:
    sources = [source for source, _ in task.pairs]
    for beam_size in (1, 2):
        outputs = (translate(model, task, sources, beam_size) for model in (ours, theirs))
        for (source, wanted), mine, other in zip(task.pairs, *outputs, strict=True):
            yield beam_size, source, wanted, mine, other
