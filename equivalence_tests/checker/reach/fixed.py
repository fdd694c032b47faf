"""Tell from the text of a function which of its values have one type, whatever the code is given."""

import ast
import functools
import linecache
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType, ModuleType

from torch import nn

from equivalence_tests.checker.reach.arguments import Sizes, value_for
from equivalence_tests.checker.reporting.lines import is_users

DEEPEST = 8  # steps from a value back to what it is made of
OF_SHAPES = {"size", "dim", "numel"}
NUMBERS = {"len", "int", "float", "bool"}
Place = tuple[str, int]  # a file and a line; 0 where an argument is a number


@functools.lru_cache(maxsize=64)
def tree_of(path: str) -> ast.Module:
    """Parse a file."""
    return ast.parse("".join(linecache.getlines(path)))


@functools.lru_cache(maxsize=64)
def nodes_in(path: str) -> list[ast.AST]:
    """List what a file says."""
    return list(ast.walk(tree_of(path)))


def spans(node: ast.stmt, line: int) -> bool:
    """Whether a statement stands in a line, its decorators left aside."""
    return node.lineno <= line <= (node.end_lineno or 0)


def function_at(path: str, name: str, line: int) -> ast.FunctionDef | None:
    """Find the function of this name that a line stands in."""
    functions = (x for x in nodes_in(path) if isinstance(x, ast.FunctionDef))
    return next((x for x in functions if x.name == name and spans(x, line)), None)


def assigned_in(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Give what an assignment assigns to, each with its value; nothing for another statement."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        pairs = zip(getattr(target, "elts", ()), getattr(node.value, "elts", ()), strict=False)
        yield from pairs if several else [(target, node.value)]


def named(node: ast.expr, names: Mapping[str, object]) -> object:
    """What a name or an attribute stands for; None where it is neither."""
    match node:
        case ast.Name(id=name):
            return names.get(name)
        case ast.Attribute(value=value, attr=name):
            return getattr(named(value, names), name, None)
    return None


@dataclass(frozen=True)
class Scope:
    """Where an expression stands."""

    path: str
    function: ast.FunctionDef | None
    names: Mapping[str, object]  # what names stand for there, as far as that is known
    line: int = 0  # the line that it stands in; 0 at the end of the function
    steps: int = 0  # how many steps back led there

    @classmethod
    def of_frame(cls, frame: FrameType, line: int) -> "Scope":
        """Where a frame was when it raised."""
        path = frame.f_code.co_filename
        function = function_at(path, frame.f_code.co_name, line)
        return cls(path, function, {**frame.f_globals, **frame.f_locals}, line)

    def fixed_at(self, node: ast.expr) -> Place | None:
        """Say which line fixes the type of an expression; None where that may depend on what the code is given."""
        match node:
            case _ if self.steps > DEEPEST:
                return None
            case ast.Constant() | ast.Tuple() | ast.List() | ast.Dict() | ast.ListComp():
                return self.path, node.lineno
            case ast.Attribute(value=ast.Name(id=owner), attr="shape" | "ndim") if owner != "self":
                return self.path, node.lineno
            case ast.Call(func=ast.Attribute(attr=name)) if name in OF_SHAPES:
                return self.path, node.lineno
            case ast.Call(func=ast.Name(id=name)) if name in NUMBERS:
                return self.path, node.lineno
            case ast.Subscript(value=ast.Attribute() | ast.Call() as value):
                return self._all([value])
            case ast.BinOp(left=left, right=right):
                return self._all([left, right]) and (self.path, node.lineno)
            case ast.Name(id=name):
                return self._of_name(name)
            case ast.Attribute(value=ast.Name(id="self")):
                return (self.path, 0) if _is_size(node.attr, named(node, self.names)) else None
            case ast.Call(func=function):
                return self._of_call(named(function, self.names))
        return None

    def _all(self, nodes: Iterable[ast.expr | None]) -> Place | None:
        """Say what fixes the last of several values, if all of them are fixed."""
        further = replace(self, steps=self.steps + 1)
        found = [None if node is None else further.fixed_at(node) for node in nodes]
        return found[-1] if found and all(found) else None

    def _of_name(self, name: str) -> Place | None:
        inside = list(_nodes_of(self.function)) if self.function is not None else []
        given = next((x for x in inside if isinstance(x, ast.arg) and x.arg == name), None)
        stored = [x for x in inside if isinstance(x, ast.Name) and x.id == name and isinstance(x.ctx, ast.Store)]
        before = [x for x in stored if not self.line or x.lineno < self.line]
        always = (one for one in self.function.body if isinstance(one, ast.Assign)) if self.function is not None else ()
        if before and (given is None or any(spans(one, x.lineno) for one in always for x in before)):
            last = max(x.lineno for x in before)
            return replace(self, line=last)._all(_value_stored(x, inside) for x in before)
        if given is None and not stored and isinstance(self.names.get(name), ModuleType):
            imports = (x for x in nodes_in(self.path) if isinstance(x, ast.Import | ast.ImportFrom))
            return next(((self.path, x.lineno) for x in imports if name in {y.asname or y.name for y in x.names}), None)
        if given is None or before:
            return None
        value = self.names.get(name) if self.line else 0
        said = isinstance(given.annotation, ast.Name) and given.annotation.id in NUMBERS and type(value) in (int, float)
        building = self.function is not None and self.function.name == "__init__"
        return (self.path, 0) if said or (building and _is_size(name, value)) else None

    def _of_call(self, called: object) -> Place | None:
        """Say what fixes what a function of the user's gives: where it ends if no line returns anything."""
        forward = getattr(type(called), "forward", None) if isinstance(called, nn.Module) else called
        forward = getattr(forward, "__func__", forward)
        code = getattr(forward, "__code__", None)
        if code is None or not is_users(code.co_filename):
            return None
        made = function_at(code.co_filename, code.co_name, code.co_firstlineno)
        if made is None or made.decorator_list:
            return None
        inside = list(_nodes_of(made))
        returned = [x.value for x in inside if isinstance(x, ast.Return)]
        abstract = all(isinstance(x, ast.Pass | ast.Raise | ast.Expr) for x in made.body)
        if abstract or any(isinstance(x, ast.Yield | ast.YieldFrom) for x in inside):
            return None
        if not any(returned):
            return code.co_filename, made.body[-1].lineno
        return Scope(code.co_filename, made, getattr(forward, "__globals__", {}), steps=self.steps)._all(returned)


def _is_size(name: str, value: object) -> bool:
    """Whether a whole number has the name of a size."""
    return type(value) is int and type(value_for(name, Sizes())[1]) is int


def _nodes_of(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Give the nodes of a function, but not those of the functions inside it."""
    waiting: list[ast.AST] = [function.args, *function.body]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)


def _value_stored(name: ast.Name, inside: Iterable[ast.AST]) -> ast.expr | None:
    """What an assignment gives a name, or unpacks into it and others; None where something else gives it."""
    for node in inside:
        match node:
            case ast.Assign(targets=[ast.Name() as target], value=value) if target is name:
                return value
            case ast.Assign(targets=[ast.Tuple(elts=several)], value=value) if name in several:
                return value if re.search(r"\w\.(shape|size\(\))(\[[-:\d]+\])?$", ast.unparse(value)) else None
    return None
