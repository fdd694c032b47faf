"""Give each call of a module the state that it had before: a cache of keys and values would go on growing."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

__all__ = ["changed_by_calls", "keeping_state"]

CACHE = re.compile(r"cache|past|(^|_)kv($|_)|memory", re.IGNORECASE)


@dataclass
class _Kept:
    """A tensor that a module holds beside its parameters, as it was before a call."""

    owner: nn.Module
    name: str
    value: Tensor | None
    copy: Tensor | None
    version: int

    @property
    def intact(self) -> bool:
        return getattr(self.owner, self.name, None) is self.value and _version(self.value) == self.version

    def put_back(self) -> None:
        self.value = None if self.copy is None else self.copy.clone()
        self.version = _version(self.value)
        setattr(self.owner, self.name, self.value)


@dataclass
class _State:
    kept: dict[tuple[int, str], _Kept] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)

    def take(self, module: nn.Module) -> None:
        for child in module.modules():
            for name, value in [*vars(child).items(), *child.named_buffers(recurse=False)]:
                known = self.kept.get((id(child), name))
                if _is_state(name, value) and not (known and known.intact):
                    copy = None if value is None else value.detach().clone()
                    self.kept[id(child), name] = _Kept(child, name, value, copy, _version(value))

    def put_back(self) -> None:
        for one in self.kept.values():
            if not one.intact:
                self.changed.add(one.name)
                one.put_back()


_STATES: "WeakKeyDictionary[nn.Module, _State]" = WeakKeyDictionary()


@contextlib.contextmanager
def keeping_state(function: Any) -> Iterator[None]:
    """Put back afterwards what a call changes of the tensors that a module holds; parameters are left alone.

    >>> module = nn.Module()
    >>> module.cache = torch.zeros(2)
    >>> with keeping_state(module):
    ...     module.cache += 1
    >>> module.cache, changed_by_calls(module)
    (tensor([0., 0.]), ['cache'])
    """
    if not isinstance(function, nn.Module):
        yield
        return
    state = _STATES.setdefault(function, _State())
    state.take(function)
    try:
        yield
    finally:
        with torch.no_grad():
            state.put_back()


def changed_by_calls(function: Any) -> list[str]:
    """Name what calls have changed so far."""
    state = _STATES.get(function) if isinstance(function, nn.Module) else None
    return sorted(state.changed) if state else []


def _is_state(name: str, value: Any) -> bool:
    if value is None:
        return bool(CACHE.search(name))
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def _version(value: Tensor | None) -> int:
    return 0 if value is None or value.is_inference() else value._version
