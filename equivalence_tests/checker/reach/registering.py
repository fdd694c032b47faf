"""Register modules in plain lists, and tensors to be learnt, so that the check goes on, and note where they stood."""

import ast
import builtins
import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from equivalence_tests.checker.reach.syntax import file_of, setting
from equivalence_tests.checker.reporting.lines import CodeLine, code_lines


class Unregistered(NamedTuple):
    """An attribute of a class that keeps modules, or a tensor to be learnt, where no module looks for them."""

    name: str
    kind: str  # what keeps them: list, tuple or dict; "Tensor" for a tensor
    weights: int  # the number of parameters in them
    stack: tuple[CodeLine, ...]  # the line that sets it


class Registering:
    """Registers modules, and keeps where they were not registered."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, for another check."""
        self.found: dict[tuple[type, str], Unregistered] = {}
        self.twice: dict[tuple[type, str], str] = {}  # what has a second name, by the class that gives it and that name

    def register(self, module: Any) -> None:
        """Register what a module and the modules in it keep in lists, tuples and dictionaries."""
        waiting = [*module.modules()] if isinstance(module, nn.Module) else []
        for owner in waiting:  # which grows
            self.twice |= {(type(owner), name): first for first, name in _named_twice(owner)}
            for name in _learnt_aside(owner):
                if self._note(type(owner), name, TENSOR, vars(owner)[name].numel()):
                    with contextlib.suppress(Exception):  # a class may refuse to be given anything
                        setattr(owner, name, nn.Parameter(vars(owner)[name].detach()))
            for name, kept in _kept_aside(owner):
                weights = sum(len([*x.parameters()]) for x in tree_leaves(kept))
                if _is_unknown(kept, module) and self._note(type(owner), name, type(kept).__name__, weights):
                    with contextlib.suppress(Exception):
                        setattr(owner, name, made := _as_modules(kept))
                        waiting += made.modules()

    def _note(self, owner: type, name: str, kind: str, weights: int) -> bool:
        """Note what an attribute keeps, if the class makes it itself; say whether it does."""
        file, line = _made_at(owner, name)
        if line:
            self.found.setdefault((owner, name), Unregistered(name, kind, weights, code_lines(((file, line, ""),))))
        return bool(line)


TENSOR = "Tensor"
REGISTERING = Registering()


def _kept_aside(owner: nn.Module) -> list[tuple[str, Any]]:
    """List the attributes that hold nothing but modules, those that hold most of them first.

    A name that begins with an underscore is how modules are hidden on purpose.
    """
    held = [(name, x) for name, x in vars(owner).items() if not name.startswith("_") and _are_modules(x)]
    return sorted(held, key=lambda one: -len(tree_leaves(one[1])))


def _named_twice(owner: nn.Module) -> Iterator[tuple[str, str]]:
    """Name the modules with parameters that a module of the user's holds under two names."""
    first: dict[int, str] = {}
    for name, module in owner._modules.items() if file_of(type(owner)) else ():
        known = first.setdefault(id(module), name)
        if known != name and module is not None and next(module.parameters(), None) is not None:
            yield known, name


def _learnt_aside(owner: nn.Module) -> list[str]:
    """Name the attributes that are tensors to be learnt, made of no others, and no parameters."""
    held = ((name, x) for name, x in vars(owner).items() if isinstance(x, Tensor) and not isinstance(x, nn.Parameter))
    return [name for name, x in held if x.requires_grad and x.is_leaf]


def _are_modules(kept: Any) -> bool:
    return type(kept) in (list, tuple, dict) and all(isinstance(x, nn.Module) for x in tree_leaves(kept))


def _is_unknown(kept: Any, module: nn.Module) -> bool:
    """Whether no module among these is registered, and they have weights to learn that are not registered either."""
    modules, weights = ({id(x) for x in held} for held in (module.modules(), module.parameters()))
    leaves = tree_leaves(kept)
    learnt = (p for x in leaves for p in x.parameters() if p.requires_grad)
    return not any(id(x) in modules for x in leaves) and any(id(p) not in weights for p in learnt)


def _as_modules(kept: Any) -> nn.Module:
    if isinstance(kept, nn.Module):
        return kept
    if isinstance(kept, dict):
        return nn.ModuleDict({key: _as_modules(x) for key, x in kept.items()})
    return nn.ModuleList(_as_modules(x) for x in kept)


def _made_at(owner: type, name: str) -> tuple[str, int]:
    """Find the file and line in which a class sets an attribute of its own; line 0 where none does.

    What a method is handed is no more than kept there: whoever made it may have registered it.
    """
    for kind in owner.__mro__:
        lines = [line for method, line, value in setting(kind, name) if not _is_handed_over(value, method)]
        if lines:
            return file_of(kind), min(lines)
    return "", 0


def _is_handed_over(value: ast.expr, method: ast.FunctionDef) -> bool:
    """Whether a value holds nothing but arguments of a method, as [encoder] does."""
    names = [x for x in ast.walk(value) if isinstance(x, ast.Name) and not hasattr(builtins, x.id)]
    read = {x.id for x in names} - {x.id for x in names if isinstance(x.ctx, ast.Store)}
    taken = {x.arg for x in ast.walk(method.args) if isinstance(x, ast.arg)} - {"self"}
    calls = (x.func for x in ast.walk(value) if isinstance(x, ast.Call))
    return bool(read) and read <= taken and all(hasattr(builtins, getattr(x, "id", "")) for x in calls)
