"""Tell the exceptions that the user's own code raises whatever it is given from those of calls that do not fit it."""

import ast
import difflib
import functools
import linecache
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType, TracebackType

from torch import nn

from equivalence_tests.checker.reach.absent import ABSENCES, NotInstalled
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.tried import TRIED
from equivalence_tests.checker.reporting.lines import TORCH, CodeLine, code_lines, frames_of, is_users, source_of

# What Python says where a call does not fit a signature, and where a local variable is read too early.
MISFIT = re.compile(r"\S\(\) (missing \d|takes (from )?\d|got (an unexpected keyword|multiple values))")
UNBOUND = re.compile(r"local variable '(\w+)'")
# What may give something a name that the text does not show.
DYNAMIC = re.compile(
    r"__dict__|__getattr|__setattr__|\b((set|del)attr|vars|locals|globals|exec)\(|"
    r"\b(register_(buffer|parameter|module)|add_module)\((?!\s*(name=)?[\"'])"
)
ALIKE = 0.75  # of the letters of two names


@dataclass(frozen=True)
class Crash:
    """An exception of the user's code of which no argument is the cause.

    Args:
        said: Its type and words.
        why: Why no other call would do.
        fix: What to change.
        stack: The lines that led there, the one that raised it last.
        importing: Whether it came up while the file was imported.
    """

    said: str
    why: str
    fix: str
    stack: tuple[CodeLine, ...]
    importing: bool


class Crashes:
    """Keeps such exceptions, as code is imported, built and called."""

    def __init__(self) -> None:
        self._met: dict[tuple[str, int, str], Crash | None] = {}

    def forget(self) -> None:
        """Begin anew, for another check."""
        self._met = {}

    def note(self, error: BaseException) -> None:
        """Note an exception that the code raised, if it is one of those."""
        last = _last_of_user(error) if isinstance(error, NameError | AttributeError | TypeError) else None
        if last is None or ABSENCES.used:  # what stands in for a package lacks what that has
            return
        key = last.tb_frame.f_code.co_filename, last.tb_lineno, str(error)
        if key not in self._met:
            why, fix = (_fault(error, last) if _is_readable(key[0]) else None) or ("", "")
            stack = code_lines(frames_of(error))
            self._met[key] = Crash(said(error), why, fix, stack, ABSENCES.importing) if why else None

    @property
    def found(self) -> list[Crash]:
        """List them, one for each line and text."""
        return [crash for crash in self._met.values() if crash is not None]

    @property
    def in_calls(self) -> list[Crash]:
        """List those that calls and constructors raised."""
        return [crash for crash in self.found if not crash.importing]


CRASHES = Crashes()


def _last_of_user(error: BaseException) -> TracebackType | None:
    """Where the user's own code was last when it raised; None where it did not run."""
    last, step = None, error.__traceback__
    while step is not None:
        last, step = step if is_users(step.tb_frame.f_code.co_filename) else last, step.tb_next
    return last


def _is_readable(path: str) -> bool:
    """Whether a file shows all that is to know: no library, and no cell of a notebook."""
    return path.endswith(".py") and is_users(path) and Path(path).is_file()


def _fault(error: BaseException, last: TracebackType) -> tuple[str, str] | None:
    """Say why no other call would do, and what to change; None where one might."""
    path, name = last.tb_frame.f_code.co_filename, str(getattr(error, "name", None))
    match error:
        case UnboundLocalError():
            local = UNBOUND.search(str(error))
            function = _function_of(last)
            if local and function and not _gives_before(local[1], last, [function]):
                return f"{local[1]} is set only below this line", "Set it before it is read."
        case NameError() if not _may_be_defined(name, last):
            return f"no line of {Path(path).name} defines or imports {name}", f"Import or define {name}."
        case AttributeError(obj=ModuleType() as module):
            return _not_in_module(module, name)
        case AttributeError(obj=nn.Module() as owner) if last.tb_frame.f_locals.get("self") is owner:
            if not _may_have(owner, name, last):
                near = difflib.get_close_matches(name, dir(owner), n=1, cutoff=ALIKE)
                fix = f"Is self.{near[0]} meant?" if near else "Set it in __init__."
                return f"no line that runs before this one sets self.{name}", fix
        case TypeError() if MISFIT.search(str(error)) and TRIED.handed_numbers_alone and _writes_out_a_call(last):
            return "what is passed is written out in this line", "Pass what is taken there."
    return None


@functools.lru_cache(maxsize=64)
def _tree(path: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(path)))


def _may_be_defined(name: str, last: TracebackType) -> bool:
    """Whether a file gives something this name, or may do so unseen."""
    path = last.tb_frame.f_code.co_filename
    return bool(DYNAMIC.search("".join(linecache.getlines(path)))) or _gives_before(name, last, [_tree(path)])


def _not_in_module(module: ModuleType, name: str) -> tuple[str, str] | None:
    """Say that torch, numpy or Python's own library has no such thing, but something of nearly the same name."""
    root = module.__name__.partition(".")[0]
    near = difflib.get_close_matches(name, dir(module), n=1, cutoff=ALIKE)
    waits = hasattr(module, "__path__") and find_spec(f"{module.__name__}.{name}")  # to be imported
    if not near or waits or root not in {"numpy", "torch", *sys.stdlib_module_names}:
        return None
    version = getattr(sys.modules[root], "__version__", sys.version.split()[0])
    return f"{root} {version} has no {module.__name__}.{name}", f"Is {near[0]} meant?"


def _may_have(owner: nn.Module, name: str, last: TracebackType) -> bool:
    """Whether something might have given a module an attribute of this name."""
    classes = [one for one in type(owner).__mro__ if one is not object and not one.__module__.startswith("torch.")]
    files = {str(getattr(sys.modules.get(one.__module__), "__file__", "")) for one in classes}
    if any(isinstance(one, NotInstalled) or name in vars(one) for one in classes) or not all(map(_is_readable, files)):
        return True
    around = (one for file in files for one in Path(file).parent.glob("*.py"))
    given = re.compile(rf"(?<!\bself)\.{name}\s*=[^=]")  # by whoever uses the module
    unseen = any(DYNAMIC.search(source_of(one)) for one in classes)
    unseen = unseen or any(given.search(one.read_text(errors="replace")) for one in around)
    return unseen or _gives_before(name, last, map(_tree, files))


def _gives_before(name: str, last: TracebackType, trees: Iterable[ast.AST]) -> bool:
    """Whether a line gives something this name that need not run after another of the same function."""
    function, line = _function_of(last), last.tb_lineno
    below: set[ast.AST] = set()
    if function is not None:
        around = [x for x in ast.walk(function) if isinstance(x, ast.stmt) and _spans(x, line)]
        start = max(x.lineno for x in around)
        looped = any(isinstance(x, ast.For | ast.While) for x in around)
        below = {x for x in ast.walk(function) if not looped and getattr(x, "lineno", 0) >= start}
    return any(_gives(node, name) and node not in below for tree in trees for node in ast.walk(tree))


def _gives(node: ast.AST, name: str) -> bool:
    """Whether a line gives something this name, or only speaks of it; so do stars of packages that are absent."""
    match node:
        case ast.Name(id=given, ctx=ast.Store()) | ast.Attribute(attr=given, ctx=ast.Store()):
            return given == name
        case ast.FunctionDef(name=given) | ast.ClassDef(name=given) | ast.ExceptHandler(name=given):
            return given == name
        case ast.Constant(value=text):
            return bool(text == name)
        case ast.alias(name=imported, asname=given):
            return name == (given or imported.partition(".")[0]) or (imported == "*" and bool(ABSENCES.names))
    return False


def _function_of(last: TracebackType) -> ast.FunctionDef | None:
    code = last.tb_frame.f_code
    functions = (x for x in ast.walk(_tree(code.co_filename)) if isinstance(x, ast.FunctionDef))
    return next((x for x in functions if x.name == code.co_name and _spans(x, last.tb_lineno)), None)


def _spans(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)


def _writes_out_a_call(last: TracebackType) -> bool:
    """Whether the user's own function was called with arguments that are all written out, without stars."""
    frame = last.tb_frame
    position = list(frame.f_code.co_positions())[last.tb_lasti // 2]
    calls = (x for x in ast.walk(_tree(frame.f_code.co_filename)) if isinstance(x, ast.Call))
    own = next((x for x in calls if (x.lineno, x.end_lineno, x.col_offset, x.end_col_offset) == position), None)
    if own is None or any(isinstance(x, ast.Starred) for x in own.args) or not all(x.arg for x in own.keywords):
        return False
    called = _named(own.func, frame)
    made = getattr(called, "__init__", None) if isinstance(called, type) else getattr(called, "forward", called)
    return is_users(getattr(getattr(made, "__code__", None), "co_filename", TORCH))


def _named(node: ast.expr, frame: FrameType) -> object:
    """What a name or an attribute stands for; None where it is neither."""
    match node:
        case ast.Name(id=name):
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Attribute(value=value, attr=name):
            return getattr(_named(value, frame), name, None)
    return None
