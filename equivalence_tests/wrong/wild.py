"""Attentions of published models as right ones: their source with one edit, run in the place of the original."""

import copy
import importlib.util
import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from equivalence_tests.wild.checking import Attention, attentions_in
from equivalence_tests.wild.models import WildModel
from equivalence_tests.wrong.drawing import unchanged
from equivalence_tests.wrong.judging import edited_here, judged_here, row_of
from equivalence_tests.wrong.operators import Operator
from equivalence_tests.wrong.sources import Right, complete, noisy, text_of

__all__ = ["Published", "judged_in", "models", "published"]

LIBRARIES = ("transformers", "timm", "diffusers")


@dataclass(frozen=True)
class Published(Right):
    """An attention that ran in a published model, called as it was called there."""

    attention: Attention | None = None

    def built(self, module: ModuleType) -> nn.Module:
        """Copy it, with the classes of another module for those of its own file."""
        assert self.attention is not None
        made = copy.deepcopy(self.attention.module)
        for part in made.modules():
            found = getattr(module, type(part).__name__, None)
            if type(part).__module__ == type(self.attention.module).__module__ and isinstance(found, type):
                part.__class__ = found
        return made

    def drawn(self, seed: int, length: int) -> list[Any]:
        """Give the call that was seen with noise on its numbers."""
        assert self.attention is not None
        generator = torch.Generator().manual_seed(seed)
        call = self.attention.call.copied()

        return [tree_map(partial(noisy, generator=generator), (call.args, dict(call.kwargs)))]

    def run(self, module: nn.Module, given: Any) -> Any:
        """Call it with what was drawn."""
        args, kwargs = given
        return module(*args, **kwargs)

    def asked(self, path: Path, module: nn.Module) -> tuple[Any, Any]:
        """Ask about the instance, with the call that was seen."""
        assert self.attention is not None
        call = self.attention.call.copied()
        return module, (call.args, dict(call.kwargs))


def published(attention: Attention) -> Published:
    """Cut the source of an attention out of its library."""
    owner = type(attention.module)
    source = inspect.getsource(inspect.getmodule(owner) or owner)
    text = complete(text_of(source, owner.__name__))
    package = owner.__module__.rpartition(".")[0]
    named = f"{owner.__module__}.{owner.__name__}"
    return Published("wild", named, text, owner.__name__, {}, ({},), {}, (0,), package, attention)


def models() -> list[WildModel]:
    """List the models of the libraries that are installed."""
    from equivalence_tests.wild.__main__ import listed_models

    return listed_models([name for name in LIBRARIES if importlib.util.find_spec(name)])


def judged_in(
    model: WildModel, operators: Sequence[Operator], seed: int, each: int, known: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Build a model and judge versions of every attention that runs in it.

    Args:
        model: The model.
        operators: The edits.
        seed: Of the draw.
        each: How many versions that differ of each attention, at most.
        known: Names of attentions that were edited in other models.
    """
    seen = set(known)
    for attention in attentions_in(model):
        right = published(attention)
        if right.name not in seen:
            seen.add(right.name)
            yield from _judged(right, operators, seed, each)


def _judged(right: Right, operators: Sequence[Operator], seed: int, each: int) -> Iterator[dict[str, Any]]:
    whole = row_of(unchanged(right), judged_here(unchanged(right)))
    yield whole
    if whole.get("truth") == "same":
        yield from edited_here(right, operators, seed, each)
