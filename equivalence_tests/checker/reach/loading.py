"""Find what is to be checked: an object, "file.py:Name", "module.path:Name", "file.py:Name.sub.module".

A file, a module of a package, or the cells of a notebook are imported without running more than that.
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from equivalence_tests.checker.reach.errors import CannotCheckError, said
from equivalence_tests.checker.reach.notebooks import import_notebook
from equivalence_tests.checker.reach.proposing import scripted_signature
from equivalence_tests.checker.reporting.lines import raised_at

# Attributes by which wrappers hold the module that they hand their calls on to.
WRAPPERS = ("_orig_mod", "module")
OURS = Path(__file__).resolve().parents[3]
OUR_NAMES = ("scratch", "builtin", "equivalence_tests", "benchmarks")


def load(target: Any, run_all: bool = False) -> Any:
    """Import what a string names; anything else stands for itself.

    Args:
        target: "file.py:Name", "notebook.ipynb:Name", "module.path:Name" (each with ``.attribute`` after it) or an
            object.
        run_all: Run every cell of a notebook, not only its imports and definitions.

    Returns:
        The class, function or instance.

    Raises:
        CannotCheckError: If there is no such file, module or name, or if importing it fails.

    >>> load("math:sqrt")(9.0)
    3.0
    """
    if not isinstance(target, str):
        return target
    place, colon, name = target.rpartition(":")
    if not colon or not name:
        raise CannotCheckError(f"{target!r} does not say what to check: write file.py:Name or module.path:Name")
    with _users_modules_first(place):
        found: Any = _import(place, run_all)
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
        raise CannotCheckError(f"there is no {name} in {place}{hint}") from error


def _import(place: str, run_all: bool) -> ModuleType:
    """Import what stands before the colon of a target: "file.py", "notebook.ipynb" or "module.path"."""
    try:
        if place.endswith(".ipynb"):
            return import_notebook(_existing(place), run_all)
        if Path(place).is_file() and not place.endswith(".py"):
            raise CannotCheckError(f"{place} is neither a Python file (.py) nor a notebook (.ipynb)")
        return _import_file(_existing(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        if isinstance(error, CannotCheckError):
            raise
        missing = isinstance(error, ModuleNotFoundError)
        advice = "; install it beside sidebyside, or start in the folder that holds it" if missing else ""
        raise CannotCheckError(f"importing {place} failed: {said(error)}{raised_at(error)}{advice}") from error


@contextlib.contextmanager
def _users_modules_first(place: str) -> Iterator[None]:
    """Let the user's folders come first: what they call ``scratch`` or ``benchmarks`` is theirs, not ours."""
    folders = list(dict.fromkeys([*([Path(place).resolve().parent] if Path(place).is_file() else []), Path.cwd()]))
    places = [folder for folder in folders if folder != OURS]
    theirs = [name for name in OUR_NAMES if any(_defines(folder, name) for folder in places)]
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in theirs}
    for name in ours:
        del sys.modules[name]
    sys.path[:0] = map(str, folders)
    for name in theirs:
        spec = PathFinder.find_spec(name, list(map(str, places)))
        if spec is not None and spec.origin is None:  # a folder without __init__.py would come after ours
            sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        for folder in folders:
            with contextlib.suppress(ValueError):
                sys.path.remove(str(folder))
        if ours:
            for name in [name for name in sys.modules if name.partition(".")[0] in theirs]:
                del sys.modules[name]
            sys.modules.update(ours)


def _defines(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


def _existing(place: str) -> Path:
    path = Path(place)
    if not path.is_file():
        raise CannotCheckError(f"there is no file {path}")
    return path.resolve()


def _import_file(path: Path) -> ModuleType:
    """Import a file by itself; one that imports relative to its package, as part of that package."""
    try:
        return _executed(f"_checked_{path.stem}", path)
    except ImportError as error:
        if "relative import" not in str(error):
            raise
    root = next(folder for folder in path.parents if not (folder / "__init__.py").is_file())
    root = path.parents[1] if root == path.parent else root  # a package need not have an __init__.py
    sys.path.insert(0, str(root))
    try:
        return importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
    finally:
        sys.path.remove(str(root))


def _executed(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def with_signature(target: Any) -> Any:
    """Give a function written in C the signature that its docstring shows, an autograd function that of its forward.

    Returns:
        The object itself, or a function around it where Python cannot tell its arguments.

    >>> inspect.signature(with_signature(nn.functional.scaled_dot_product_attention)).parameters["is_causal"]
    <Parameter "is_causal=False">
    """
    if isinstance(target, torch.jit.ScriptFunction):
        return _signed(target, scripted_signature(target.schema))
    if inspect.isclass(target) and issubclass(target, torch.autograd.Function):
        return _applied(target)
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


def _applied(target: type[torch.autograd.Function]) -> Any:
    """Give a function that calls one with a backward of its own, with the arguments of its forward but for the context.

    None of them can be given by name to the function itself.
    """
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
    """Say of a module that nothing in it can be called.

    Raises:
        CannotCheckError: If it is a module, or a class of modules, without a forward.
    """
    kind = found if inspect.isclass(found) else type(found)
    if not issubclass(kind, nn.Module) or "forward" in vars(found):
        return
    own, source = kind.__mro__[: kind.__mro__.index(nn.Module)], ""
    with contextlib.suppress(OSError, TypeError):  # no source
        source = inspect.getsource(kind)
    if any({"forward", "__call__"} & vars(base).keys() for base in own) or ".forward =" in source:
        return
    nested = ": that in its source stands inside another function" if "def forward(" in source else ""
    raise CannotCheckError(f"{kind.__name__} has no forward{nested}.")


def inside_wrappers(found: Any) -> tuple[Any, tuple[str, ...]]:
    """Look through what only hands its calls on to a module: compiled, data parallel, sharded.

    Returns:
        The module inside, or the object itself; and the names of the wrappers around it, from the outside in.

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
