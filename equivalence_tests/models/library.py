"""What the judge asks of a library of models: its architectures, and a way to put an attention function into them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

__all__ = ["Architecture", "Library", "Registration", "Situation", "Wrap"]

# Puts something around each attention function that a model calls.
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Situation:
    """One way of running a model, as the lines that a person would type.

    Args:
        name: What the reports call it.
        group: The column in which it stands.
        lines: They read ``model`` and ``torch``, and leave ``output`` and perhaps ``tokens``.
        kinds: The kinds of models that can be run so.
        windowed: Whether it is for models with a window only.
        quick: Whether ``--quick`` looks at it.
        unmasked: Whether it is also looked at without a mask function.
        dropout: The dropout rate the attention is given; such runs are compared with themselves.
    """

    name: str
    group: str
    lines: tuple[str, ...]
    kinds: tuple[str, ...]
    windowed: bool = False
    quick: bool = False
    unmasked: bool = False
    dropout: float = 0.0

    @property
    def trains(self) -> bool:
        """Whether gradients are asked for."""
        return any(".backward()" in line for line in self.lines)


@dataclass(frozen=True)
class Architecture:
    """One model of a library.

    Args:
        name: Its name there.
        kind: "decoder", "encoder", "encoder-decoder" or "vision".
        build: Gives it small, with the same parameters every time, in the default dtype.
        windowed: Whether some of its layers look at no more than the last tokens.
        lines: The lines that build it, for a reproducer.
    """

    name: str
    kind: str
    build: Callable[[], nn.Module]
    windowed: bool = False
    lines: Sequence[str] = field(default=(), repr=False)

    def asked(self, situation: Situation) -> bool:
        """Say whether it can be run so."""
        return self.kind in situation.kinds and (self.windowed or not situation.windowed)


@dataclass(frozen=True)
class Registration:
    """An attention function with its mask function, under a name.

    Args:
        function: The attention function.
        mask: The mask function, or None if none is registered.
        name: The name.
        mask_name: What reports call the mask function.
        lines: The lines that register both, for a reproducer.
    """

    function: Callable[..., Any]
    mask: Callable[..., Any] | None
    name: str
    mask_name: str = ""
    lines: Sequence[str] = field(default=(), repr=False)


class Library(Protocol):
    """A library whose models look up their attention function by a name."""

    situations: Sequence[Situation]
    masks: Mapping[str, Callable[..., Any]]
    names: Mapping[str, Any]

    def architectures(self, names: Sequence[str] = ()) -> list[Architecture]:
        """List its architectures, or those that are named."""

    def registered(self, function: Callable[..., Any]) -> Registration | None:
        """Find the name under which a function is registered already, and the mask function with it."""

    def in_use(self, model: nn.Module, registration: Registration | None, wrap: Wrap) -> AbstractContextManager[None]:
        """Let a model use an attention function, or its own if there is None, each call within a wrap."""
