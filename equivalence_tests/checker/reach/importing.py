"""Import the user's code: a file by itself or as a part of its package, a module, or the cells of a notebook.

No more is run than importing runs; of a file that does not come to its end, only what it defines.
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from equivalence_tests.checker.reach.absent import ABSENCES
from equivalence_tests.checker.reach.crashes import CRASHES
from equivalence_tests.checker.reach.devices import begin_anew_on_cpu
from equivalence_tests.checker.reach.errors import CannotCheckError, said
from equivalence_tests.checker.reach.notebooks import DEFINITIONS, import_notebook, is_constant
from equivalence_tests.checker.reporting.lines import OURS, raised_at

OUR_NAMES = ("scratch", "builtin", "equivalence_tests", "benchmarks")
PROJECT = (".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt")  # one of them stands at its root
DEEPEST, NEAR = 6, 4  # folders between a file and the root of its project, and where nothing shows which that is
FILES, LONGEST = 40, 100_000  # how many files beside are looked at, and up to how many characters
# What a script does beside defining; none of it is run where a part of it cannot be.
DOES = (ast.Expr, ast.For, ast.While, ast.With, ast.Assert, ast.Raise, ast.Delete)
IMPORTS = (ast.Import, ast.ImportFrom)
MOST_COMPUTED = 2**27
CHECKED = "_checked_"  # how the name of a module begins that is checked


def imported(place: str, run_all: bool) -> ModuleType:
    """Import what stands before the colon of a target: "file.py", "notebook.ipynb" or "module.path"."""
    if not place.endswith((".py", ".ipynb")) and Path(place).is_file():
        raise CannotCheckError(f"{place} is neither a Python file (.py) nor a notebook (.ipynb)")
    path = Path(place).resolve()
    if place.endswith((".py", ".ipynb")) and not path.is_file():
        raise CannotCheckError(f"there is no file {Path(place)}")

    def run() -> ModuleType:
        if place.endswith(".ipynb"):
            return import_notebook(path, run_all)
        return _import_file(path) if place.endswith(".py") else importlib.import_module(place)

    try:
        with _users_modules_first(path) as found_above:
            return ABSENCES.imported(run, found_above)
    except CannotCheckError:
        raise
    except (Exception, SystemExit) as error:
        CRASHES.note(error)
        raise CannotCheckError(f"importing {place} failed: {said(error)}{raised_at(error)}") from error


def definitions_beside(target: Any, speaks_of_it: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
    """Give what files beside that of a class define, or in the folder above; only those that speak of it are run."""
    own = Path(getattr(sys.modules.get(getattr(target, "__module__", "")), "__file__", None) or "")
    folders = [own.parent, own.parent.parent] if own.is_file() else []
    patterns = ((folder, pattern) for folder in folders for pattern in ("*.py", "*conf*/*.py"))
    files = dict.fromkeys(file for folder, pattern in patterns for file in sorted(folder.glob(pattern)))
    others = (file for file in files if file != own and not file.name.startswith("test_"))
    for file in itertools.islice(others, FILES):
        text = file.read_bytes().decode(errors="replace")
        if len(text) < LONGEST and speaks_of_it(text):
            yield _definitions_of(file, text)


@functools.lru_cache(maxsize=FILES)
def _definitions_of(path: Path, text: str) -> dict[str, Any]:
    """Run the imports, definitions and plain values of a file, and give what it calls them; nothing if that fails."""
    module = sys.modules[f"_beside_{path.stem}"] = ModuleType(f"_beside_{path.stem}")  # where a dataclass looks
    module.__file__ = str(path)
    with contextlib.suppress(Exception, SystemExit), _users_modules_first(path) as found_above:
        tree = _partial(text, lambda node: isinstance(node, DEFINITIONS) or is_constant(node))
        ABSENCES.imported(lambda: exec(compile(tree, str(path), "exec"), vars(module)), found_above)
    return {name: x for name, x in vars(module).items() if getattr(x, "__module__", module.__name__) == module.__name__}


@contextlib.contextmanager
def _users_modules_first(path: Path) -> Iterator[Callable[[str], bool]]:
    """Let the user's folders come first: what they call ``scratch`` or ``benchmarks`` is theirs, not ours.

    The folder that holds the package of a file comes before its own, the folders above it and their ``src`` come last.
    """
    above = _folders_above(path) if path.is_file() else []
    holder = [next(folder for folder in path.parents if not (folder / "__init__.py").is_file())] if above else []
    folders = list(dict.fromkeys([*holder, *above[:1], Path.cwd()]))
    last = [str(one) for folder in reversed(above) for one in (folder, folder / "src") if one not in folders]
    places = [folder for folder in folders if folder != OURS]
    defined = {one.stem for folder in places for one in folder.iterdir() if one.is_dir() or one.suffix == ".py"}
    theirs = [name for name in OUR_NAMES if name in defined]
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in theirs}
    for name in ours:
        del sys.modules[name]
    sys.path[:] = [*map(str, folders), *sys.path, *last]
    for name in theirs:
        _put_first(name, places)
    neighbours = _Neighbours(path, above[-1] if above else Path.cwd())
    sys.meta_path.insert(0, neighbours)
    try:
        yield neighbours.found_above
    finally:
        sys.meta_path.remove(neighbours)
        for folder in (*map(str, (*folders, *neighbours.added)), *last):
            with contextlib.suppress(ValueError):  # the code may have changed it
                sys.path.remove(folder)
        if ours:
            for name in [name for name in sys.modules if name.partition(".")[0] in theirs]:
                del sys.modules[name]
            sys.modules.update(ours)


def _put_first(name: str, places: Sequence[Path]) -> None:
    """Let a folder without __init__.py come before the files and packages of its name that lie elsewhere."""
    spec = PathFinder.find_spec(name, list(map(str, places)))
    if spec is not None and spec.origin is None:
        sys.modules[name] = importlib.util.module_from_spec(spec)


def _folders_above(path: Path) -> list[Path]:
    """List the folder of a file and those above it, up to the root of its project; only the first if there is none."""
    folders = list(path.parents)[:DEEPEST]
    roots = (n for n, one in enumerate(folders) if one == Path.cwd() or any((one / name).exists() for name in PROJECT))
    return folders[: next(roots, 0) + 1]


def _holds(folder: Path, name: str) -> bool:
    """Whether a folder holds the file, or the package, of a module, which may hold nothing but packages itself."""
    place = folder.joinpath(*name.split("."))
    inside = (file for pattern in ("*.py", "*/*.py") for file in place.glob(pattern))
    return place.with_name(f"{place.name}.py").is_file() or next(inside, None) is not None


def _import_file(path: Path) -> ModuleType:
    """Import a file by itself; one that imports relative to its package, as a part of that, or of one further up."""
    name = f"{CHECKED}{path.stem}"
    loader = _InFullOrPart(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None  # it is given its loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        del sys.modules[name]
        if "relative import" not in str(error):
            raise
    else:
        return module
    packages = list(itertools.takewhile(lambda folder: (folder / "__init__.py").is_file(), path.parents))
    for root in path.parents[max(len(packages), 1) : DEEPEST]:  # a package need not have an __init__.py
        sys.path.insert(0, str(root))
        if (first := path.relative_to(root).parts[0]) not in sys.modules:
            _put_first(first, [root])  # a file inside may have the name of the package
        try:
            return importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
        except ImportError as error:
            if "beyond top-level" not in str(error):
                raise
        finally:
            sys.path.remove(str(root))
    raise ImportError(f"the package of {path} was not found")


class _Computing(TorchFunctionMode):
    """Stops a script that computes for long while it is imported, as a benchmark does."""

    entries = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.entries += made.numel() if isinstance(made, Tensor) else 0
        if self.entries > MOST_COMPUTED:
            raise RuntimeError(f"it computes more than {MOST_COMPUTED:,} numbers while it is imported")
        return made


class _InFullOrPart(SourceFileLoader):
    """Runs a file of the user's; where it trains or breaks off, what it defines."""

    def exec_module(self, module: ModuleType) -> None:
        """Run it in a module."""
        path = Path(self.path)
        if step := _training_step(path):
            why = f"it trains ({path.name}:{step})"
        else:
            try:
                with _Computing():
                    super().exec_module(module)
            except (Exception, SystemExit) as error:
                own = isinstance(error, SyntaxError) and error.filename == self.path
                if own or (isinstance(error, ImportError) and not ABSENCES.find_spec(str(error.name))):
                    raise
                begin_anew_on_cpu(error)
                why = f"{said(error)}{raised_at(error)}"
                if self.name.startswith(CHECKED):  # of a neighbour nothing else may need what is missing
                    CRASHES.note(error)
            else:
                return
        ABSENCES.in_part[path.name] = why
        tree = _partial(path.read_bytes(), lambda node: not isinstance(node, DOES))
        exec(compile(tree, str(path), "exec"), vars(module))


class _Neighbours:
    """Finds the files of the user's project, so that they run in full or in part."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.root = path, root
        self.added: list[Path] = []  # folders above that are looked in, too

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find one of their files; None for what is installed."""
        spec = PathFinder.find_spec(name, path)
        file = Path(spec.origin or "") if spec is not None and type(spec.loader) is SourceFileLoader else Path()
        if spec is None or "site-packages" in file.parts or not any(map(file.is_relative_to, (self.root, *self.added))):
            return None
        spec.loader = _InFullOrPart(name, str(file))
        return spec

    def found_above(self, name: str) -> bool:
        """Say whether a module that was not found lies in a folder above the file, which is then looked in, too."""
        nearest = next((one for one in self.path.parents[:NEAR] if one not in self.added and _holds(one, name)), None)
        if nearest is None:
            return False
        self.added.append(nearest)
        first = name.partition(".")[0]
        shadowed = [one for one in sys.modules if one.partition(".")[0] == first]
        sys.path.insert(0 if shadowed else len(sys.path), str(nearest))
        for one in shadowed:  # a file of the same name that lies nearer
            del sys.modules[one]
        _put_first(first, [nearest])
        return True


def _training_step(path: Path) -> int:
    """The line in which a file would train while it is imported; 0 if it does not."""
    does = (node for node in ast.parse(path.read_bytes(), str(path)).body if isinstance(node, DOES))
    calls = (call for node in does for call in ast.walk(node) if isinstance(call, ast.Call))
    return next((call.lineno for call in calls if getattr(call.func, "attr", "") == "backward"), 0)


def _partial(text: str | bytes, runs: Callable[[ast.stmt], bool]) -> ast.Module:
    """Take these statements of a file alone; each may fail by itself, an import where what it names is no Python."""
    tree = ast.parse(text)
    both = ("(Exception, SystemExit)", "SyntaxError")
    guards = [ast.parse(f"try: ...\nexcept {errors}: ...").body[0] for errors in both]
    handlers = [one.handlers for one in guards if isinstance(one, ast.Try)]
    tree.body = [ast.Try([node], handlers[isinstance(node, IMPORTS)], [], []) for node in tree.body if runs(node)]
    return ast.fix_missing_locations(tree)
