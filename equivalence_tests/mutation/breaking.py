"""Every way to break a source file a little: one comparison, number, argument or statement at a time.

Docstrings, annotations, ``__all__``, the words of error texts, and assertions (which here only tell mypy what holds)
are left alone.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

__all__ = ["Mutant", "mutants_of"]

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
WORDS = {"tril": "triu", "triu": "tril", "any": "all", "all": "any", "max": "min", "min": "max"}
# What a reader is told, not what is computed.
LEFT_ALONE = {"annotation", "returns"}


@dataclass(frozen=True)
class Mutant:
    """One small break.

    Args:
        name: The function, the line as it reads, and what is done to it: a name that outlives edits elsewhere.
        lines: The numbers, from 1, of the broken line and of the statement around it, without the block inside.
        code: The broken file, compiled, with the line numbers of the whole one.
    """

    name: str
    lines: tuple[int, ...]
    code: CodeType


@dataclass(frozen=True)
class _Slot:
    """Where a node hangs in the tree."""

    scope: str
    statement: ast.stmt
    owner: ast.AST
    field: str
    index: int | None
    node: Any

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.owner, self.field, node)
        else:
            getattr(self.owner, self.field)[self.index] = node


def mutants_of(source: str, path: str) -> list[Mutant]:
    r"""Give every mutant of a source file, in the order of its lines.

    Args:
        source: Python code.
        path: Where it stands; the compiled code names it.

    >>> for mutant in mutants_of("def last(x):\n    return x[-1] if x else None", "last.py"):
    ...     print(mutant.name)
    last | return x[-1] if x else None | if x: always
    last | return x[-1] if x else None | if x: never
    last | return x[-1] if x else None | -1 -> 1
    last | return x[-1] if x else None | 1 -> 2
    """
    tree, lines, seen = ast.parse(source), source.splitlines(), Counter[str]()
    found = []
    for slot in list(_slots(tree, "module", tree.body[0])):
        for what, replacement in _breaks(slot):
            name = f"{slot.scope} | {lines[slot.node.lineno - 1].strip()} | {what}"
            seen[name] += 1
            slot.put(ast.fix_missing_locations(ast.copy_location(replacement, slot.node)))
            code = compile(tree, path, "exec", dont_inherit=True)
            slot.put(slot.node)
            name = name if seen[name] == 1 else f"{name} ({seen[name]})"
            found.append(Mutant(name, (slot.node.lineno, *_header(slot.statement)), code))
    return sorted(found, key=lambda mutant: mutant.lines[0])


def _header(statement: ast.stmt) -> range:
    """Give the lines of a statement as far as the first that stands inside it."""
    inside = [x.lineno for x in ast.walk(statement) if isinstance(x, ast.stmt) and x is not statement]
    end = min(inside) if inside else (statement.end_lineno or statement.lineno) + 1
    return range(statement.lineno, max(end, statement.lineno + 1))


def _slots(owner: ast.AST, scope: str, statement: ast.stmt) -> Iterator[_Slot]:
    """Walk the tree, outermost first, past what is left alone."""
    for field, value in ast.iter_fields(owner):
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or field in LEFT_ALONE or _is_left_alone(node):
                continue
            if isinstance(statement, ast.Raise) and owner is statement.exc and isinstance(node, ast.Constant):
                continue  # the words of an error
            around = node if isinstance(node, ast.stmt) else statement
            if hasattr(node, "lineno"):
                yield _Slot(scope, around, owner, field, index, node)
            inside = scope
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                inside = f"{scope}.{node.name}".removeprefix("module.")
            yield from _slots(node, inside, around)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()) | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.Subscript(value=ast.Name(id="Literal")):
            return True
    return False


def _breaks(slot: _Slot) -> Iterator[tuple[str, ast.AST]]:
    """Say what is done to a node, and give what stands there then."""
    node = slot.node
    if slot.field == "decorator_list":
        yield f"without @{ast.unparse(node)}", ast.parse("lambda x: x", mode="eval").body
    elif slot.field == "test" and isinstance(slot.owner, ast.If | ast.IfExp):
        yield f"if {ast.unparse(node)}: always", ast.Constant(True)
        yield f"if {ast.unparse(node)}: never", ast.Constant(False)
        if _is_yes_or_no(node):
            return  # its negation would say no more
    elif isinstance(node, ast.stmt) and _can_go(node):
        yield "deleted", ast.Pass()
    for replacement in _replacements(node):
        yield f"{ast.unparse(node)} -> {ast.unparse(replacement)}", replacement


def _is_yes_or_no(node: ast.AST) -> bool:
    match node:
        case ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Compare(ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
            return True
    return False


def _can_go(statement: ast.stmt) -> bool:
    """Say whether the code reads on without a statement: without a new name it would not."""
    match statement:
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Break() | ast.Continue():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
        case ast.Assign(targets=targets, value=value):
            new = {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}
            return bool(new & {x.id for x in ast.walk(value) if isinstance(x, ast.Name)})
    return False


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Give what may stand in place of an expression."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right):
            yield ast.Compare(left, [COMPARISONS[type(op)]()], right)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(op)](), right)
        case ast.BoolOp(op=op, values=values):
            for i in range(len(values)):
                rest = values[:i] + values[i + 1 :]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.Constant(value=value) if (other := _other_constant(value)) is not None:
            yield ast.Constant(other)
        case ast.Attribute(value=value, attr=word, ctx=context) if word in WORDS:
            yield ast.Attribute(value, WORDS[word], context)
        case ast.Call(func=function, args=arguments, keywords=keywords):
            for i, keyword in enumerate(keywords):
                if keyword.arg is not None:
                    yield ast.Call(function, arguments, keywords[:i] + keywords[i + 1 :])
        case ast.Slice(lower=lower, upper=upper, step=step):
            if lower is not None:
                yield ast.Slice(None, upper, step)
            if upper is not None:
                yield ast.Slice(lower, None, step)


def _other_constant(value: object) -> bool | float | str | None:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}?"
    return None
