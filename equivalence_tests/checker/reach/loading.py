"""Find what is to be checked: an object, "file.py:Name", "module.path:Name", "file.py:Name.sub.module"."""

import ast
import contextlib
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from equivalence_tests.checker.reach.absent import ABSENCES
from equivalence_tests.checker.reach.by_steps import forward_by_steps
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.importing import imported
from equivalence_tests.checker.reach.proposing import scripted_signature
from equivalence_tests.checker.reporting.lines import TORCH, is_users, source_of

# Attributes by which wrappers hold the module that they hand their calls on to.
WRAPPERS = ("_orig_mod", "module")
LISTED = ("parameters", "buffers", "modules", "children")
INPLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__")


def load(target: Any, run_all: bool = False) -> Any:
    """Import what a string names; anything else stands for itself.

    It names "file.py:Name", "notebook.ipynb:Name" or "module.path:Name", each with ``.attribute`` after it; of a
    notebook every cell is run, or only its imports and definitions.

    >>> load("math:sqrt")(9.0)
    3.0
    """
    if not isinstance(target, str):
        return target
    place, colon, name = target.rpartition(":")
    if not colon or not name:
        raise CannotCheckError(f"{target!r} does not say what to check: write file.py:Name or module.path:Name")
    found: Any = imported(place, run_all)
    for part in name.split("."):
        found = _member(found, part, place)
    if inspect.isfunction(found) and found.__name__ == "<lambda>":
        found.__name__ = name.rpartition(".")[2]
    return found


def _member(owner: Any, name: str, place: str) -> Any:
    try:
        return owner[int(name)] if name.isdigit() else getattr(owner, name)
    except (AttributeError, IndexError, TypeError) as error:
        names = sorted(
            key
            for key, value in vars(owner).items()
            if isinstance(owner, ModuleType)
            and getattr(value, "__module__", None) == owner.__name__
            and (inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, nn.Module)))
        )
        hint = f"; it has {', '.join(names)}" if names else ""
        hint += "".join(f"; only the definitions of {file} were run: {why}" for file, why in ABSENCES.in_part.items())
        raise CannotCheckError(f"there is no {name} in {place}{hint}") from error


def with_signature(target: Any) -> Any:
    """Give a function written in C the signature that its docstring shows, an autograd function that of its forward.

    Modules are made of classes of no framework.

    >>> inspect.signature(with_signature(nn.functional.scaled_dot_product_attention)).parameters["is_causal"]
    <Parameter "is_causal=False">
    """
    if isinstance(target, torch.jit.ScriptFunction):
        return _signed(target, scripted_signature(target.schema))
    if inspect.isclass(target) and issubclass(target, torch.autograd.Function):
        return _applied(target)
    if inspect.isclass(target) and _has_only_a_forward(target):
        return _called_by_its_forward(target)
    if inspect.isfunction(target) and _is_of_numpy(target):
        return _signed(_in_torch(target), inspect.signature(target))
    if not inspect.isbuiltin(target):
        return target
    shown = re.search(r"(\w+)(\(.*?\))", (target.__doc__ or "").strip().partition("\n\n")[0], re.DOTALL)
    try:
        made = ast.parse(f"def {shown[1]}{shown[2]}: ..." if shown else "").body[0]
        names: dict[str, Any] = {}
        exec(compile(ast.Module([made], []), "<signature>", "exec"), names)
        signature = inspect.signature(names[made.name])  # type: ignore[attr-defined]
    except (SyntaxError, NameError, IndexError):
        return target
    return _signed(target, signature)


def _has_only_a_forward(target: type) -> bool:
    """Whether a class of no framework has a forward of its own, and its instances cannot be called with tensors."""
    of_torch, forward = issubclass(target, nn.Module | torch.autograd.Function), vars(target).get("forward")
    return not of_torch and inspect.isfunction(forward) and ("__call__" not in dir(target) or _is_of_numpy(forward))


def _called_by_its_forward(target: type) -> type:
    """Make a module of a class of no framework; it runs in torch's functions if it is numpy's, and holds its arrays."""
    theirs: Any = target
    construct, forward = theirs.__init__, theirs.forward
    of_numpy = _is_of_numpy(forward)

    class Made(nn.Module, theirs):  # type: ignore[misc]
        @functools.wraps(construct)  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            nn.Module.__init__(self)
            watched = of_numpy and inspect.isfunction(construct)
            (_in_torch(construct) if watched else construct)(self, *args, **kwargs)
            _learn_arrays(self)
            if callable(getattr(theirs, "eval", None)):
                theirs.eval(self)  # a class of its own may have a dropout of its own

        def __getattr__(self, name: str) -> Any:
            found = super().__getattr__(name)
            as_array = of_numpy and isinstance(found, nn.Parameter)
            return importlib.import_module("torch._numpy").asarray(found) if as_array else found

        def __setattr__(self, name: str, value: Any) -> None:
            if name in LISTED:
                return  # a method of modules; a forward needs no list of them
            if name in self.__dict__.get("_parameters", ()) and not isinstance(value, nn.Parameter):
                del self._parameters[name]
            super().__setattr__(name, value)

    Made.forward = functools.wraps(forward)(_in_torch(forward)) if of_numpy else forward
    Made.__name__, Made.__qualname__, Made.__module__ = target.__name__, target.__qualname__, target.__module__
    return Made


def _learn_arrays(made: nn.Module) -> None:
    """Let a module hold the arrays of real numbers that its instance keeps as parameters, but for its tables."""
    for name, x in [*vars(made).items()]:
        tensor = x if isinstance(x, Tensor) else getattr(x, "tensor", None)
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel() > 1 and not _is_table(tensor):
            del made.__dict__[name]
            made.register_parameter(name, nn.Parameter(tensor.detach().clone()))


def _is_table(x: Tensor) -> bool:
    """Whether numbers are computed, as masks and angles are: they begin with a row of 0 and 1, or fall from 1 on.

    >>> _is_table(torch.ones(3, 3).tril()), _is_table(torch.tensor([1.0, 0.1])), _is_table(torch.zeros(3, 3))
    (True, True, False)
    """
    first = x if x.dim() == 1 else x[0]
    marked = bool(((first == 0) | (first == 1) | (first < -1e8)).all()) and x.dim() > 1
    falls = x.dim() == 1 and len(x) > 1 and bool((x.diff() < 0).all())
    return (marked or falls) and bool((x != x.flatten()[0]).any())


def _is_of_numpy(target: Any) -> bool:
    """Whether the file of a function of the user's imports numpy, and not torch."""
    held = [id(x) for x in vars(sys.modules.get(target.__module__, object)).values()]
    return is_users(target.__code__.co_filename) and id(np) in held and id(torch) not in held


def _in_torch(target: Any) -> Callable[..., Any]:
    """Let a function of numpy, and what its file takes from others, run in torch's functions, so that it is watched."""
    torchs: Any = importlib.import_module("torch._numpy")  # torch's own words of numpy: they take a while to import

    def function(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, torchs.asarray, (args, kwargs))
        given = {id(x) for x in tree_leaves((args, kwargs))}
        with _in_the_place_of_numpy(torchs, target.__module__), _keeping_gradients(torchs.ndarray, given):
            made = target(*args, **kwargs)
        return tree_map_only(torchs.ndarray, lambda x: x.tensor, made)

    return functools.wraps(target)(function)


@contextlib.contextmanager
def _in_the_place_of_numpy(torchs: Any, module: str) -> Iterator[None]:
    """Put something in the place of numpy in a module and in those of the user's that it takes from, for this time."""
    modules, waiting = set[str](), [module]
    while waiting:
        modules.add(one := waiting.pop())
        held = vars(sys.modules[one]).values()
        near = {x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", "") for x in held}
        files = {x: getattr(sys.modules.get(x), "__file__", None) or TORCH for x in near - modules}
        waiting += [x for x, file in files.items() if is_users(file) and "site-packages" not in file]
    places = [(names, name) for names in (vars(sys.modules[x]) for x in modules) for name in names if names[name] is np]
    for names, name in places:
        names[name] = torchs
    drawing = SimpleNamespace(**{name: getattr(torchs.random, name) for name in torchs.random.__all__})
    try:
        with mock.patch.dict(vars(torchs.random), default_rng=lambda seed=None: drawing):  # torch has none
            yield
    finally:
        for names, name in places:
            names[name] = np


@contextlib.contextmanager
def _keeping_gradients(array: Any, given: Collection[int]) -> Iterator[None]:
    """Let what writes into an array of its own give it new numbers, so that gradients go through the old ones.

    What is written into arrays that are handed over, whose ids are ``given``, is seen outside.
    """

    def operation(own: Callable[..., Any], name: str) -> Callable[..., Any]:
        def operate(x: Any, y: Any) -> Any:
            if id(x) in given or x.tensor._is_view():
                return own(x, y)
            x.tensor = getattr(x, name.replace("__i", "__", 1))(y).tensor
            return x

        return operate

    operations: dict[str, Any] = {name: operation(getattr(array, name), name) for name in INPLACE}
    with mock.patch.multiple(array, **operations):
        yield


def _applied(target: type[torch.autograd.Function]) -> Any:
    """Give a function that calls one with a backward of its own: that itself takes no arguments by name."""
    own = inspect.signature(target.forward)
    given = list(own.parameters.values())[0 if "setup_context" in vars(target) else 1 :]
    signature = own.replace(parameters=given)

    return _signed(lambda *args, **kwargs: target.apply(*signature.bind(*args, **kwargs).args), signature)


def _signed(target: Any, signature: inspect.Signature) -> Any:
    @functools.wraps(target)
    def function(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def check_forward(found: Any) -> None:
    """Raise CannotCheckError for a module, or a class of modules, without a forward."""
    kind = found if inspect.isclass(found) else type(found)
    if not issubclass(kind, nn.Module) or "forward" in vars(found) or forward_by_steps(kind):
        return
    own, source = kind.__mro__[: kind.__mro__.index(nn.Module)], source_of(kind)
    if any({"forward", "__call__"} & vars(base).keys() for base in own) or ".forward =" in source:
        return
    nested = ": the one in its source is inside another function" if "def forward(" in source else ""
    raise CannotCheckError(f"{kind.__name__} has no forward{nested}.")


def inside_wrappers(found: Any) -> tuple[Any, tuple[str, ...]]:
    """Look through what only hands its calls on to a module, compiled, data parallel or sharded, and name the wrappers.

    >>> inside_wrappers(nn.DataParallel(nn.Linear(3, 2)))
    (Linear(in_features=3, out_features=2, bias=True), ('DataParallel',))
    """
    wrapped: tuple[str, ...] = ()
    while (inner := _inside(found)) is not None:
        found, wrapped = inner, (*wrapped, type(found).__name__)
    return found, wrapped


def _inside(found: Any) -> nn.Module | None:
    if not isinstance(found, nn.Module) or not type(found).__module__.startswith("torch.") or len(found._modules) != 1:
        return None
    return next((found._modules[name] for name in WRAPPERS if name in found._modules), None)
