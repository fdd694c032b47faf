"""Run one model in one situation with an attention function, and hold it against the model's own attention."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.instruments.differences import FLOAT64_BOUND, ErrorRatio, compare_errors, largest_value
from equivalence_tests.kernels.judging import REFUSALS, Cell, State
from equivalence_tests.models.calls import Call, Recorder
from equivalence_tests.models.library import Architecture, Library, Registration, Situation
from equivalence_tests.models.precision import in_float64

__all__ = ["ModelCell", "Ran", "Runs", "UNMASKED"]

UNMASKED = "no mask function"


@dataclass(frozen=True)
class ModelCell(Cell):
    """What an attention function does in one model, in one situation."""

    def to_dict(self) -> dict[str, Any]:
        """Give plain data."""
        data = super().to_dict()
        return {"architecture": data.pop("kernel"), "group": self.group, **data}


@dataclass
class Ran:
    """What came out of one run of a model."""

    parts: dict[str, Tensor] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    failure: str = ""
    refused: bool = False


class Runs:
    """The runs of one architecture; what is right is computed once for each situation."""

    def __init__(self, library: Library, architecture: Architecture, seed: int = 0) -> None:
        self.library, self.architecture, self.seed = library, architecture, seed
        with in_float64():
            self.model = architecture.build()
        self.paths = {id(module): path for path, module in self.model.named_modules()}
        self._right: dict[Situation, Ran] = {}

    def right(self, situation: Situation) -> Ran:
        """Run the model with its own attention."""
        if situation not in self._right:
            self._right[situation] = self.run(situation, None)
        return self._right[situation]

    def run(self, situation: Situation, registration: Registration | None) -> Ran:
        """Run the model with an attention function, or its own."""
        recorder = Recorder(situation.dropout if registration else 0.0)
        ran = Ran(calls=recorder.calls)
        try:
            with _quiet(), in_float64(), self.library.in_use(self.model, registration, recorder.wrap):
                ran.parts = self._parts(situation)
        except Exception as error:  # somebody's function fails in any way
            ran.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            ran.refused = recorder.failure in (error, None) and _is_refusal(error)
        return ran

    def _parts(self, situation: Situation) -> dict[str, Tensor]:
        self.model.eval()
        names = {**self.library.names, "torch": torch, "model": self.model}
        torch.manual_seed(self.seed)
        with torch.set_grad_enabled(situation.trains):
            exec("\n".join(situation.lines), names)
        parts: dict[str, Tensor] = {
            name: names[name].detach().double() for name in ("tokens", "output") if name in names
        }
        if situation.trains:
            parts["gradients"] = _gradients(self.model)
        return parts

    def judge(self, situation: Situation, registration: Registration, size: int) -> tuple[ModelCell, Ran]:
        """Run a model with an attention function and say what that is worth there."""
        right, ran = self.right(situation), self.run(situation, registration)
        told = self.architecture.name, "own", situation.name, situation.group, "float64"
        if ran.failure:
            state: State = "refuses" if ran.refused else "wrong"
            words = ran.failure if ran.refused else f"it fails: {ran.failure}"
            return ModelCell(*told, state, size, words=words), ran
        words = "it writes into its inputs" if any(call.writes for call in ran.calls) else ""
        if situation.dropout:
            same = torch.equal(
                ran.parts["output"], self.run(replace(situation, dropout=0.0), registration).parts["output"]
            )
            words = "dropout is ignored in training" if same else words
            return ModelCell(*told, "wrong" if words else "right", size, words=words), ran
        errors = tuple(_compared(name, ran.parts[name], value) for name, value in right.parts.items())
        wrong = bool(words) or not all(error.passed for error in errors)
        return ModelCell(*told, "wrong" if wrong else "right", size, errors, words), ran

    def path(self, call: Call) -> str:
        """Name the layer that made a call."""
        return self.paths.get(id(call.module), type(call.module).__name__)


def _compared(name: str, given: Tensor, right: Tensor) -> ErrorRatio:
    largest = largest_value([right])
    error = compare_errors(given, right, right, name=name, largest=largest)
    return replace(error, floor=max(error.floor, FLOAT64_BOUND * largest))


def _gradients(model: nn.Module) -> Tensor:
    """Take the gradients of all parameters out of a model, as one long row."""
    found = [x.grad if x.grad is not None else torch.zeros_like(x) for x in model.parameters()]
    model.zero_grad(set_to_none=True)
    return torch.cat([x.detach().double().flatten() for x in found])


def _is_refusal(error: Exception) -> bool:
    said = str(error).lower()
    return isinstance(error, NotImplementedError) or any(sign in said for sign in (*REFUSALS, "cannot be run"))


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
