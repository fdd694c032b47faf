"""Who imports whom: dependencies point one way, and no import goes round in a circle, not even one that waits."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeGuard

import pytest

import scratch

ROOT = Path(scratch.__file__).parents[1]
ROOMS = ("scratch", "builtin", "equivalence_tests", "benchmarks")
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for room in ROOMS
    for file in sorted((ROOT / room).rglob("*.py"))
}
CHECKER = "equivalence_tests.checker"
FLOORS = ("reporting", "reach", "mistakes", "engine", "parts", "layers", "doors")
# What imports modules by names that stand in a text.
BY_NAME = {"import_module", "from_homes"}


def imported_by(nodes: list[ast.AST]) -> Iterator[str]:
    """Name every module that a file imports, at its top or inside a function."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module or ""


def named_in_texts(nodes: list[ast.AST]) -> set[str]:
    """Name the modules that a file may import by their names, where it has what does so."""
    names = {node.id if isinstance(node, ast.Name) else node.attr for node in nodes if is_name(node)}
    if not names & BY_NAME:
        return set()
    texts = (node.value for node in nodes if isinstance(node, ast.Constant))
    return {text.partition(":")[0] for text in texts if isinstance(text, str)}


def is_name(node: ast.AST) -> TypeGuard[ast.Name | ast.Attribute]:
    return isinstance(node, ast.Name | ast.Attribute)


def nodes_of(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


@cache
def names_in(module: str) -> tuple[frozenset[str], frozenset[str]]:
    """Name what a file imports, and what it may import by a text."""
    nodes = nodes_of(FILES[module].read_text(encoding="utf-8"))
    return frozenset(imported_by(nodes)), frozenset(named_in_texts(nodes))


def imports_of(module: str) -> set[str]:
    """Keep those of our own; from a package that hands names on, only the module that is named."""
    imported, in_texts = names_in(module)
    found = {name for name in imported | in_texts if name in FILES}
    named = {name for name in found if not any(other.startswith(f"{name}.") for other in found)} - {module}
    around = {package for name in named for package in packages_of(name)}
    return named | {package for package in around if not f"{module}.".startswith(f"{package}.")}


def packages_of(module: str) -> Iterator[str]:
    """Name the packages that a module stands in: each is imported before it."""
    while "." in module:
        module = module.rpartition(".")[0]
        if module in FILES:
            yield module


def test_a_room_imports_only_from_rooms_to_its_left() -> None:
    assert {module: rooms for module in FILES if (rooms := rooms_to_the_right(module))} == {}


def rooms_to_the_right(module: str) -> set[str]:
    """Name the rooms that a file imports from and should not."""
    rooms = {name.split(".")[0] for name in names_in(module)[0]}
    return rooms & set(ROOMS[ROOMS.index(module.split(".")[0]) + 1 :])


def test_a_floor_of_the_checker_imports_only_from_those_below() -> None:
    modules = [name for name in FILES if not name.rpartition(".")[2].startswith("test_")]
    assert {module: floors for module in modules if (floors := floors_above(module))} == {}


def floors_above(module: str) -> set[str | None]:
    """Name the floors that a file of the checker imports from and should not."""
    floor = floor_of(module)
    if floor is None:
        return set()
    return {floor_of(name) for name in imports_of(module)} - {None, *FLOORS[: FLOORS.index(floor) + 1]}


def floor_of(module: str) -> str | None:
    name = module.removeprefix(f"{CHECKER}.").split(".")[0]
    return name if module.startswith(f"{CHECKER}.") and name in FLOORS else None


def test_no_import_goes_round_in_a_circle() -> None:
    graph = {module: imports_of(module) for module in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_imports_that_wait_are_seen() -> None:
    late = nodes_of('def late():\n    from scratch import masks\n    return import_module("scratch.layers:given")\n')
    assert "scratch.masks" in set(imported_by(late))
    assert "scratch.layers" in named_in_texts(late)
    assert named_in_texts(nodes_of('MODULE = "scratch.layers"')) == set()
