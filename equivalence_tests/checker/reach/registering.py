"""Register the modules that a module keeps in plain lists, so that the check goes on, and remember where they stood."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.utils._pytree import tree_leaves

from equivalence_tests.checker.reporting.lines import CodeLine, assigned_at, code_lines


class Unregistered(NamedTuple):
    """An attribute of a class that keeps modules where no module looks for them.

    Args:
        name: The attribute.
        kind: What keeps them: list, tuple or dict.
        weights: The number of parameters in them.
        stack: The line that sets it.
    """

    name: str
    kind: str
    weights: int
    stack: tuple[CodeLine, ...]


class Registering:
    """Registers modules, and keeps where they were not registered."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, for another check."""
        self._met: dict[tuple[type, str], Unregistered] = {}

    @property
    def found(self) -> list[Unregistered]:
        """List what was met."""
        return [*self._met.values()]

    def register(self, module: Any) -> None:
        """Register what a module and the modules in it keep in lists, tuples and dictionaries."""
        waiting = [module] if isinstance(module, nn.Module) else []
        registered = {id(x) for x in waiting[0].modules()} if waiting else set()
        for owner in waiting:  # which grows
            for name, kept in _kept_aside(owner, registered):
                self._note(owner, name, kept)
                setattr(owner, name, _as_modules(kept))
            waiting += owner.children()

    def _note(self, owner: nn.Module, name: str, kept: Any) -> None:
        weights = sum(len([*x.parameters()]) for x in tree_leaves(kept))
        if stack := code_lines(assigned_at(owner, name)):
            self._met.setdefault((type(owner), name), Unregistered(name, type(kept).__name__, weights, stack))


REGISTERING = Registering()


def _kept_aside(owner: nn.Module, registered: set[int]) -> Iterator[tuple[str, Any]]:
    """Give the attributes that hold nothing but modules, none of them registered, with weights that are to be learnt.

    A name that begins with an underscore is how modules are hidden on purpose.
    """
    for name, kept in [*vars(owner).items()]:
        if name.startswith("_") or type(kept) not in (list, tuple, dict) or not _may_be_modules(kept):
            continue
        leaves = tree_leaves(kept)
        if not leaves or not all(isinstance(x, nn.Module) and id(x) not in registered for x in leaves):
            continue
        if any(p.requires_grad for x in leaves for p in x.parameters()):
            yield name, kept


def _may_be_modules(kept: Any) -> bool:
    """Whether torch's own dictionary of modules takes the keys of a dictionary."""
    keys = [*kept] if isinstance(kept, dict) else []
    return all(isinstance(key, str) and "." not in key and not hasattr(nn.ModuleDict, key) for key in keys)


def _as_modules(kept: Any) -> nn.Module:
    if isinstance(kept, nn.Module):
        return kept
    if isinstance(kept, dict):
        return nn.ModuleDict({key: _as_modules(x) for key, x in kept.items()})
    return nn.ModuleList(_as_modules(x) for x in kept)
