"""Find what is to be checked: an object, "file.py:Name", "module.path:Name", "file.py:Name.sub.module"."""

import ast
import functools
import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from equivalence_tests.checker.doors.importing import import_place, users_modules_first
from equivalence_tests.checker.errors import CannotCheckError
from equivalence_tests.checker.lines import CodeLine

__all__ = ["Source", "guilty_line", "load", "source_of", "with_signature"]


@dataclass(frozen=True)
class Source:
    """The text of the user's code, where it could be found.

    Args:
        text: The source of the class or function; "" if unknown.
        path: Its file; "" if unknown.
        first_line: Where it starts in that file.
    """

    text: str = ""
    path: str = ""
    first_line: int = 1

    def line_matching(self, *patterns: str) -> tuple[int, str] | None:
        """Give the first line of code that one of the patterns is found in, with its number in the file."""
        for pattern in patterns:
            for number, line in self.lines(signatures="def" in pattern):
                if re.search(pattern, line):
                    return number, line.strip()
        return None

    def lines(self, signatures: bool = False) -> list[tuple[int, str]]:
        """List the lines of code with their numbers in the file, without docstrings and comments."""
        tree = _parsed(self.text)
        skipped = _docstring_lines(tree) | (set() if signatures else _signature_lines(tree))
        numbered = enumerate(self.text.splitlines(), start=1)
        return [(self.first_line + n - 1, line.split("#")[0]) for n, line in numbered if n not in skipped]


def guilty_line(patterns: tuple[str, ...], source: Source) -> tuple[CodeLine, ...]:
    """Give the line that is probably to blame; nothing if none is found.

    Args:
        patterns: What it looks like, the most telling first.
        source: Where to look.
    """
    found = source.line_matching(*patterns)
    return () if found is None else (CodeLine(Path(source.path).name, *found),)


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
    with users_modules_first(place):
        found: Any = import_place(place, run_all)
    for part in name.split("."):
        found = _member(found, part, place)
    if inspect.isfunction(found) and found.__name__ == "<lambda>":
        found.__name__ = name.rpartition(".")[2]
    return found


def with_signature(target: Any) -> Any:
    """Give a function written in C the signature that the first line of its docstring shows.

    Args:
        target: Any object.

    Returns:
        The object itself, or a function around it where Python cannot tell its arguments.

    >>> inspect.signature(with_signature(nn.functional.scaled_dot_product_attention)).parameters["is_causal"]
    <Parameter "is_causal=False">
    """
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

    @functools.wraps(target)
    def function(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def source_of(target: Any) -> Source:
    """Find the source text of a class, function or instance.

    Args:
        target: Any object.

    Returns:
        The source; empty if there is none to be found (typed at a prompt, or compiled).
    """
    if isinstance(target, functools.partial):
        target = target.func
    if not (inspect.isclass(target) or inspect.isroutine(target)):
        target = type(target)
    for owner in target.__mro__ if inspect.isclass(target) else (target,):
        try:
            lines, first = inspect.getsourcelines(owner)
            return Source(textwrap.dedent("".join(lines)), inspect.getsourcefile(owner) or "", first)
        except (OSError, TypeError, IndentationError, SyntaxError):
            continue  # a class made at run time has the source of the first base that has one
    return Source()


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


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module([], [])


def _docstring_lines(tree: ast.Module) -> set[int]:
    return {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _signature_lines(tree: ast.Module) -> set[int]:
    """The lines of all def statements down to their bodies: an argument's name is not where it is misused."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {number for node in functions for number in range(node.lineno, node.body[0].lineno)}
