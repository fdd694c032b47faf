"""Import the user's code: a file, a module of a package, or the cells of a notebook, without running more than that."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from equivalence_tests.checker.reach.errors import CannotCheckError, said
from equivalence_tests.checker.reach.notebooks import import_notebook
from equivalence_tests.checker.reporting.lines import raised_at

__all__ = ["import_place", "users_modules_first"]

OURS = Path(__file__).resolve().parents[3]
OUR_NAMES = ("scratch", "builtin", "equivalence_tests", "benchmarks")


def import_place(place: str, run_all: bool = False) -> ModuleType:
    """Import what stands before the colon of a target.

    Args:
        place: "file.py", "notebook.ipynb" or "module.path".
        run_all: Run every cell of a notebook, not only its imports and definitions.

    Raises:
        CannotCheckError: If it is not there, or importing it fails.
    """
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
def users_modules_first(place: str) -> Iterator[None]:
    """Let the user's folders come first: what they call ``scratch`` or ``benchmarks`` is theirs, not ours.

    Args:
        place: As in ``import_place``.
    """
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
