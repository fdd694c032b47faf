"""A model to watch: how to build it small, and what to call it with."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.reach.state import default_dtype
from equivalence_tests.checker.reach.tracing import tensors_in

__all__ = ["Runnable", "WildModel", "randomised", "runnable"]

Inputs = Mapping[str, Any]


def _its_own(model: nn.Module) -> tuple[str]:
    return ("own",)


@dataclass(frozen=True)
class WildModel:
    """One model of a library.

    Args:
        library: "transformers", "timm" or "diffusers".
        name: Its name there.
        builds: Ways to build it small, the most telling first.
        inputs: Gives what to call a built model with, the likeliest first.
        implementations: Puts one of its implementations of attention after the other into a built model.
    """

    library: str
    name: str
    builds: Callable[[], Iterable[Callable[[], nn.Module]]]
    inputs: Callable[[nn.Module], Iterable[Inputs]]
    implementations: Callable[[nn.Module], Iterable[str]] = _its_own


@dataclass(frozen=True)
class Runnable:
    """A built model and inputs with which it ran."""

    model: nn.Module
    inputs: Inputs

    def __call__(self) -> Any:
        """Run it from the same state of the random numbers every time, and let it make masks of its own dtype."""
        torch.manual_seed(0)
        dtype = next((x.dtype for x in self.model.parameters() if x.is_floating_point()), torch.get_default_dtype())
        with default_dtype(dtype):
            return self.model(**self.inputs)


def runnable(wild: WildModel) -> Runnable:
    """Build a model in the first way that runs, in float64 if it can.

    Raises:
        RuntimeError: If none runs, with the first reasons.
    """
    reasons: list[str] = []
    for build in wild.builds():
        try:
            torch.manual_seed(0)
            model = randomised(build().eval())
        except Exception as error:  # any library, any reason
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        spare = None
        for candidate in _in_precisions(model, wild.inputs(model)):
            try:
                with torch.no_grad():
                    output = candidate()
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            if not any(bool(x.isnan().any()) for x in tensors_in((output,))):
                return candidate
            spare = candidate  # the last: its precision is the one that the model is in
        if spare is not None:
            return spare
    said = list(dict.fromkeys(" ".join(reason.split())[:160] for reason in reasons))
    raise RuntimeError(" | ".join(said[:6]) or "there is no way to build it")


def _in_precisions(model: nn.Module, ways: Iterable[Inputs]) -> Iterator[Runnable]:
    listed = list(ways)
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        for inputs in listed:
            yield Runnable(model, {name: _to(value, dtype) for name, value in inputs.items()})


def _to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(_to(one, dtype) for one in value)
    return {name: _to(one, dtype) for name, one in value.items()} if isinstance(value, dict) else value


@torch.no_grad()
def randomised(model: nn.Module) -> nn.Module:
    """Move every parameter off its first value: biases that are 0 and gains that are 1 hide what is done with them.

    What is not trained, tables of angles for one, stays.

    >>> bool(randomised(nn.Linear(3, 5)).bias.abs().min() > 0)
    True
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point() and parameter.device.type != "meta":
            size = 0.2 if parameter.dim() < 2 else 0.5 / max(parameter[0].numel(), 1) ** 0.5
            parameter.add_(torch.randn_like(parameter) * size)
    return model


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Give of what is offered what a function has an argument for.

    >>> accepted(lambda a, *, b=0: None, {"a": 1, "c": 2})
    {'a': 1}
    """
    known = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in known}
