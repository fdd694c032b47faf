"""The user's lines: which frames of a stack are theirs, and what stands there."""

import ast
import functools
import inspect
import itertools
import linecache
import os
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

OURS = Path(__file__).resolve().parents[3]
CHECKER = str(Path(__file__).parents[1])
ENGINE = str(Path(__file__).parents[1] / "engine")
# Where torch is, without importing it: the command has its first line on the screen before that.
TORCH = str(Path(getattr(find_spec("torch"), "origin", "")).parent)
NOT_THE_USERS = ("<frozen", "<string>", "<equivalent>", "/einops/", "/einx/", "/jaxtyping/", "/beartype/")
REFUSAL = re.compile(r"(^|:\s*)(assert|raise)\b")
STANDARD = sysconfig.get_path("stdlib")
_SOURCES: "WeakKeyDictionary[Any, tuple[list[str], int]]" = WeakKeyDictionary()
# Path, number and function of each line, the innermost first.
Frames = tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class CodeLine:
    """One line of the user's code."""

    path: str  # its file, as the user would name it; "<stdin>" or "In[3]" where there is none
    number: int
    text: str  # the code, without the blanks around it
    function: str = ""  # the function that it stands in

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


def code_lines(frames: Frames) -> tuple[CodeLine, ...]:
    """Turn frames into lines, the outermost first; a comprehension and the line it stands in are one."""
    last = (next(same) for _, same in itertools.groupby(frames, key=lambda frame: frame[:2]))
    lines = (CodeLine(_shown(path), n, linecache.getline(path, n).strip(), name) for path, n, name in last)
    return tuple(reversed(list(lines)))


def frames_of(error: BaseException) -> Frames:
    """The user's lines in which an error came up."""
    walked = [
        (frame.f_code.co_filename, n, frame.f_code.co_name) for frame, n in traceback.walk_tb(error.__traceback__)
    ]
    return tuple(line for line in reversed(walked) if is_users(line[0]))


def is_refusal(error: BaseException) -> bool:
    """Say whether the user's code itself does not take what it was given: an ``assert`` or a ``raise`` of its own."""
    return any(REFUSAL.search(line.text) for line in code_lines(frames_of(error)[:1]))


def raised_at(error: BaseException) -> str:
    """Name the user's line in which an error came up: " (model.py:12)"; "" if it was none of theirs."""
    lines = code_lines(frames_of(error)[:1])
    return f" ({lines[0]})" if lines else ""


def raised_in(error: BaseException) -> str:
    """Name the user's line in which an error came up, and the one that their code was entered by and that led there."""
    lines = code_lines(frames_of(error))
    places = dict.fromkeys(str(line) for line in (*lines[-1:], *lines[:1]))
    return f" ({', called from '.join(places)})" if places else ""


def frames_here() -> Frames:
    """The user's lines that led here: what stands between the engine that called and this operation."""
    found: list[tuple[str, int, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # walk_stack looks up the line of every frame, which takes longer than all else here
        path = frame.f_code.co_filename
        if is_users(path):
            found.append((path, frame.f_lineno, frame.f_code.co_name))
        elif found and path.startswith(ENGINE):
            break
        frame = frame.f_back
    return tuple(found)


def local_here(name: str) -> object:
    """Give a variable of the user's function that led here; None where it has none of that name."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)) if is_users(frame.f_code.co_filename))
    frame = next(frames, None)
    return frame.f_locals.get(name) if frame is not None else None


def inside(frames: Frames, outside: Frames) -> Frames:
    """Leave out the lines that led to the checker."""
    return frames[: -len(outside)] if outside and frames[-len(outside) :] == outside else frames


def _shown(path: str) -> str:
    """Name a file as the user would: from the working directory, where it is below that; a cell by its number."""
    shell = getattr(getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)(), "compile", None)
    cell = shell.format_code_name(path) if shell is not None else None
    if cell is not None:
        return str(cell[1])
    return _from(os.getcwd(), path)  # noqa: PTH109 -- a Path takes longer than all else here


@functools.lru_cache(maxsize=1024)
def _from(folder: str, path: str) -> str:
    """Name a file from a folder, where it is below that; each of thousands of calls that fail asks for it."""
    return os.path.relpath(path, folder) if path.startswith(folder + os.sep) else path


@functools.cache
def is_users(path: str) -> bool:
    """Whether a file is the user's: neither torch's, nor ours, nor one that only hands calls on."""
    standard = path.startswith(STANDARD) and "site-packages" not in path
    tested = "/test_" in path or "/zoo/" in path  # the classes that tests check are as good as a user's
    ours = path.startswith(CHECKER) and not tested
    return not (ours or standard or path.startswith(TORCH) or any(part in path for part in NOT_THE_USERS))


def source_of(function: Any) -> str:
    """The source of a class, a function or a file; "" where there is none."""
    written = isinstance(function, type | ModuleType) or inspect.isroutine(function)
    return "".join(source_lines(function if written else type(function))[0])


def source_lines(written: Any) -> tuple[list[str], int]:
    """The lines of a class, a function or a file, without common indentation, and the number of the first."""
    written = getattr(written, "__func__", written)  # a method is another object each time
    try:
        if written not in _SOURCES:
            lines, start = (_lines_of_class if isinstance(written, type) else inspect.getsourcelines)(written)
            _SOURCES[written] = textwrap.dedent("".join(lines)).splitlines(keepends=True), start
        return _SOURCES[written]
    except (OSError, TypeError):
        return [], 0


def _lines_of_class(kind: type) -> tuple[list[str], int]:
    """The lines of a class, and the number of the first: Python before 3.13 parses the whole file for each class."""
    path = inspect.getsourcefile(kind) or ""
    linecache.checkcache(path)
    lines = linecache.getlines(path, vars(sys.modules[kind.__module__]))
    first = _classes_in("".join(lines)).get(kind.__qualname__)
    if first is None:
        raise OSError("no class of this name is written there")
    return inspect.getblock(lines[first - 1 :]), first


@functools.lru_cache(maxsize=64)
def _classes_in(source: str) -> dict[str, int]:
    """The line in which each class of a file begins; of several with one name it is the first."""
    return dict(reversed([*_classes_below(ast.parse(source), "")]))


def _classes_below(node: ast.AST, inside: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ClassDef(name=name):
                yield inside + name, min([child.lineno, *(x.lineno for x in child.decorator_list)])
                yield from _classes_below(child, f"{inside}{name}.")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield from _classes_below(child, f"{inside}{name}.<locals>.")
            case ast.stmt() | ast.ExceptHandler() | ast.match_case():
                yield from _classes_below(child, inside)


def assigned_at(module: Any, path: str) -> Frames:
    """The line that gives a module what it keeps, a sub-module, or the list that holds it; none where no line does."""
    owner, _, name = re.sub(r"(\.\d+)+$", "", path).rpartition(".")
    assigns = re.compile(rf"\bself\.{name}\b[^=(]*=[^=]|['\"]{name}['\"]")
    for kind in type(module.get_submodule(owner)).__mro__:
        lines, first = source_lines(kind)
        number = next((number for number, line in enumerate(lines, first) if assigns.search(line)), 0)
        if number and is_users(file := inspect.getsourcefile(kind) or ""):
            return ((file, number, "__init__"),)
    return ()
