"""Each file of scratch beside its twin in builtin: definition against definition, line against line."""

import ast
import builtins
import difflib
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markupsafe import Markup

import builtin
import scratch
from equivalence_tests.learn.page.code import Link, coloured_lines

__all__ = ["Chunk", "Half", "Twin", "Unit", "address_of", "is_preamble", "twins"]

FOLDERS = {"scratch": Path(inspect.getfile(scratch)).parent, "builtin": Path(inspect.getfile(builtin)).parent}
NOT_SHOWN = ("__init__", "__main__", "documentation")  # they hold nothing of attention
FIRST = ("functional", "sdpa", "attention", "masks", "layers", "transformer", "seq2seq")  # the way into the code


@dataclass(frozen=True)
class Chunk:
    """Lines that stand against each other; ``same`` if they are equal."""

    scratch: Markup
    builtin: Markup
    same: bool


@dataclass(frozen=True)
class Half:
    """One side of a definition: where it begins, the first line of its docstring and the rest.

    The rest of builtin's docstring is what scratch's does not say.
    """

    line: int
    first: str
    rest: str


@dataclass(frozen=True)
class Unit:
    """A definition in either file or in both.

    Args:
        name: "MultiheadAttention.forward"; "" for what stands before the first definition.
        address: Where it stands on the page.
        scratch: The definition in scratch; None if it has none.
        builtin: The definition in builtin; None if it has none.
        chunks: The code.
    """

    name: str
    address: str
    scratch: Half | None
    builtin: Half | None
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Twin:
    """A file of scratch, and the file of the same name in builtin if there is one."""

    name: str
    has_twin: bool
    units: tuple[Unit, ...]

    @property
    def begins(self) -> str:
        """The address of the first definition that ``scratch`` exports, or else of the first of all."""
        named = [unit for unit in self.units if unit.name]
        return next((unit for unit in named if unit.name in scratch.__all__), named[0]).address


@dataclass(frozen=True)
class Part:
    """A piece of a file: a definition without those inside it, its docstring apart."""

    name: str
    line: int
    docstring: str
    code: str


def twins() -> tuple[Twin, ...]:
    """Set every file of scratch beside its twin.

    Returns:
        Those that one reads first, then files with a twin, then the others, by name.
    """
    files = sorted(path.stem for path in FOLDERS["scratch"].glob("*.py") if path.stem not in NOT_SHOWN)
    found = [_twin(name) for name in files]
    return tuple(sorted(found, key=_rank))


def _rank(twin: Twin) -> tuple[int, bool]:
    return FIRST.index(twin.name) if twin.name in FIRST else len(FIRST), not twin.has_twin


def _twin(name: str) -> Twin:
    ours = {part.name: part for part in parts_of("scratch", name)}
    theirs = {part.name: part for part in parts_of("builtin", name)}
    order = list(ours) + [part for part in theirs if part not in ours]
    units = tuple(_unit(name, part, ours.get(part), theirs.get(part)) for part in order)
    return Twin(name, bool(theirs), units)


def _unit(file: str, name: str, ours: Part | None, theirs: Part | None) -> Unit:
    halves = (_half(ours, ""), _half(theirs, ours.docstring if ours else ""))
    lines = [() if part is None else tuple(part.code.splitlines()) for part in (ours, theirs)]
    address = address_of(file, name)
    linked = [coloured_lines("\n".join(code), _links_of(file, address)) for code in lines]
    return Unit(name, address, *halves, tuple(_chunks(lines, linked)))


def _half(part: Part | None, told: str) -> Half | None:
    """Leave out the paragraphs of a docstring that are shown already."""
    if part is None:
        return None
    first, _, rest = part.docstring.partition("\n")
    known = {paragraph.strip() for paragraph in told.split("\n\n")}
    new = [paragraph for paragraph in rest.strip("\n").split("\n\n") if paragraph.strip() not in known]
    return Half(part.line, first, "\n\n".join(new))


def _chunks(lines: Sequence[Sequence[str]], shown: Sequence[Sequence[Markup]]) -> Iterator[Chunk]:
    ours, theirs = ([line.strip() for line in side] for side in lines)
    for kind, a, b, c, d in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        left, right = (Markup("").join(line + "\n" for line in side) for side in (shown[0][a:b], shown[1][c:d]))
        yield Chunk(left, right, kind == "equal")


def address_of(file: str, name: str) -> str:
    """Give the address of a definition on the page."""
    return f"code-{file}-{name}" if name else f"code-{file}-begin"


@cache
def defined() -> dict[str, str]:
    """Find every public definition of the files that are shown, with its address."""
    found: dict[str, str] = {}
    for path in sorted(FOLDERS["scratch"].glob("*.py")):
        if path.stem not in NOT_SHOWN:
            for part in parts_of("scratch", path.stem):
                if part.name and "." not in part.name:
                    found.setdefault(part.name, address_of(path.stem, part.name))
    return found


def _links_of(file: str, here: str) -> Link:
    """Link each name where it stands first, and none to where it stands."""
    done = {here}

    def link(text: str) -> str:
        address = _link(file, text)
        new = address not in done
        done.add(address)
        return address if new else ""

    return link


def _link(file: str, text: str) -> str:
    if hasattr(builtins, text):
        return ""
    return defined().get(text, address_of(text, "") if text in _files() and text != file else "")


@cache
def _files() -> frozenset[str]:
    return frozenset(path.stem for path in FOLDERS["scratch"].glob("*.py")) - {*NOT_SHOWN}


@cache
def parts_of(package: str, file: str) -> tuple[Part, ...]:
    """Cut a file into definitions.

    Args:
        package: "scratch" or "builtin".
        file: Its name without ``.py``.

    Returns:
        The parts in order; none if there is no such file.
    """
    path = FOLDERS[package] / f"{file}.py"
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").splitlines()
    tree = ast.parse("\n".join(lines))
    starts = list(_definitions(tree, ""))
    ends = [line for _, line, _ in starts[1:]] + [len(lines) + 1]
    return tuple(_part(lines, name, first, end, node) for (name, first, node), end in zip(starts, ends, strict=True))


def _definitions(node: ast.Module | ast.ClassDef, owner: str) -> Iterator[tuple[str, int, ast.AST]]:
    """Give each definition with the line where it begins, decorators and comments above it included."""
    yield owner, 1 if isinstance(node, ast.Module) else _first_line(node), node
    for child in node.body:
        name = getattr(child, "name", "")
        if isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{owner}.{name}".lstrip("."))
        elif isinstance(child, ast.FunctionDef):
            yield f"{owner}.{name}".lstrip("."), _first_line(child), child


def _first_line(node: ast.ClassDef | ast.FunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _part(lines: Sequence[str], name: str, first: int, end: int, node: ast.AST) -> Part:
    left_out = {line for x in _not_shown(node) for line in range(x.lineno, (x.end_lineno or x.lineno) + 1)}
    kept = [line for number, line in enumerate(lines[first - 1 : end - 1], start=first) if number not in left_out]
    code = re.sub("\n{4,}", "\n\n\n", inspect.cleandoc("\n" + "\n".join(kept)).rstrip())
    return Part(name, first, ast.get_docstring(node) or "", code)  # type: ignore[arg-type]


def _not_shown(node: ast.AST) -> Iterator[ast.stmt]:
    """Give what is left out of the code: the docstring, and a file's imports and ``__all__``."""
    body: list[ast.stmt] = node.body  # type: ignore[attr-defined]
    if body and ast.get_docstring(node):  # type: ignore[arg-type]
        yield body[0]
    if isinstance(node, ast.Module):
        yield from (x for x in body if is_preamble(x))


def is_preamble(statement: ast.stmt) -> bool:
    """Say whether a statement imports something, or lists what a file exports."""
    if isinstance(statement, ast.Assign):
        return ast.unparse(statement.targets[0]) == "__all__"
    return isinstance(statement, ast.Import | ast.ImportFrom)
