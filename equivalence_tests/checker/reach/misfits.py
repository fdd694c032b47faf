"""Calls in the user's own code that fit nothing, whatever the code is given: what it passes, and what it gets back."""

import ast
import math
import re
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple

from torch import nn

from equivalence_tests.checker.reach.arguments import Sizes, value_for
from equivalence_tests.checker.reach.syntax import assigned_in, function_at, nodes_in, spans
from equivalence_tests.checker.reach.tried import TRIED
from equivalence_tests.checker.reporting.lines import TORCH, is_users

Place = tuple[str, int]  # a file and a line

# What Python says where a call does not fit a signature, and what torch says of a number in the place of a tensor.
MISFIT = re.compile(r"\S\(\) (missing \d|takes (from )?\d|got (an unexpected keyword|multiple values))")
NO_TENSOR = re.compile(r"argument '\w+' \(position \d+\) must be Tensor, not (int|float)")
OF_A_SHAPE = re.compile(r"\w+\.(size\([^()]*\)|shape\[[^][]*\])|len\(\w+\)")
# What torch says of a view that a copy would have to stand for; of one token, it says nothing.
NOT_VIEWED = re.compile(r"view size is not compatible with input tensor's size and stride")
COPIES = re.compile(r"\.(contiguous|clone|reshape|flatten)\(")
TRANSPOSES = re.compile(r"\.(transpose|permute|swapaxes|swapdims|movedim)\(|\.m?T\b")


class Fault(NamedTuple):
    """Why no other call would do, what to change, and where, if not in the line that raises."""

    why: str
    fix: str
    place: Place | None = None
    may_run: bool = False  # whether a call of another shape may not raise it


def misfit(text: str, last: TracebackType) -> Fault | None:
    """Say that a call does not fit as it is written, takes a size for a tensor, or that a tuple is taken for one."""
    if MISFIT.search(text) and any(_is_written_out(x, last) and _stays(x.func, last) for x in _failing_call(last)):
        return Fault("what is passed is written out in this line", "Pass what is taken there.")
    for part in _parts_of_tuples(last) if "tuple" in text else ():
        if _stays(part, last):
            return Fault(f"{ast.unparse(part)} returns a tuple in every call", "Take the tensor out of it first.")
    if NOT_VIEWED.search(text) and any(_is_transposed(x, last) for x in _failing_call(last)):
        return Fault("what it views was transposed, and is not contiguous", "Use reshape.", may_run=True)
    name = _root_of_a_size(last) if NO_TENSOR.search(text) else ""
    return Fault("a size is a number in every call", f"Use math.{name}.") if name else None


def _is_transposed(call: ast.Call, last: TracebackType) -> bool:
    """Whether what a method is called on was transposed by the code itself: in this line, or where it is assigned."""
    owner = getattr(call.func, "value", None)
    assigned = (pair for node in ast.walk(function_of(last) or call) for pair in assigned_in(node))
    made = [value for own, value in assigned if owner is not None and ast.unparse(own) == ast.unparse(owner)]
    texts = [ast.unparse(one) for one in (*made, owner) if one is not None]
    return any(map(TRANSPOSES.search, texts)) and not any(map(COPIES.search, texts))


def function_of(last: TracebackType) -> ast.FunctionDef | None:
    """Find the function that raised."""
    code = last.tb_frame.f_code
    return function_at(code.co_filename, code.co_name, last.tb_lineno)


def _failing_call(last: TracebackType) -> list[ast.Call]:
    """The call that raised, if it was one."""
    code = last.tb_frame.f_code
    position = list(code.co_positions())[last.tb_lasti // 2]
    calls = (x for x in nodes_in(code.co_filename) if isinstance(x, ast.Call))
    return [x for x in calls if (x.lineno, x.end_lineno, x.col_offset, x.end_col_offset) == position]


def _is_written_out(call: ast.Call, last: TracebackType) -> bool:
    """Whether a function of the user's or of torch that no caller chooses was called with arguments all written out."""
    if any(isinstance(x, ast.Starred) for x in call.args) or not all(x.arg for x in call.keywords):
        return False
    code, names = last.tb_frame.f_code, {x.id for x in ast.walk(call.func) if isinstance(x, ast.Name)}
    called = _named(call.func, last)
    made = getattr(called, "__init__", None) if isinstance(called, type) else getattr(called, "forward", called)
    file = str(getattr(getattr(made, "__code__", None), "co_filename", ""))
    chosen = names & {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]} - {"self"}
    return is_users(file) or (file.startswith(TORCH) and not chosen) if file else False


def _stays(called: ast.expr, last: TracebackType) -> bool:
    """Whether what is called is the same however the class is built: it is made by the name of its own class."""
    is_global = isinstance(called, ast.Name) and called.id not in last.tb_frame.f_locals
    if is_global or TRIED.handed_numbers_alone:
        return True
    kinds = {one.__name__ for one in type(last.tb_frame.f_locals.get("self")).__mro__}
    classes = [x for x in nodes_in(last.tb_frame.f_code.co_filename) if isinstance(x, ast.ClassDef) and x.name in kinds]
    assigned = [pair for one in classes for node in ast.walk(one) for pair in assigned_in(node)]
    made = [value for own, value in assigned if ast.unparse(own) == ast.unparse(called)]
    by = {_named(value.func, last) if isinstance(value, ast.Call) else None for value in made}
    return by == {type(_named(called, last))}


def _parts_of_tuples(last: TracebackType) -> Iterator[ast.expr]:
    """Name the parts that always return a tuple of which the statement that raised uses the whole."""
    function, line = function_of(last) or ast.Module([], []), last.tb_lineno
    inside = sorted((x for x in ast.walk(function) if isinstance(x, ast.stmt)), key=lambda x: x.lineno)
    failing = (x for x in inside if spans(x, line) and not hasattr(x, "body"))
    used = [x for one in failing for node in ast.walk(one) if _takes_one(node) for x in ast.iter_child_nodes(node)]
    above = {ast.unparse(own): x for one in inside if one.lineno < line for own, x in assigned_in(one)}
    named = [above.get(x.id) for x in used if isinstance(x, ast.Name) and isinstance(_named(x, last), tuple)]
    for value in (*used, *named):
        if isinstance(value, ast.Call) and _returns_tuples(_named(value.func, last)):
            yield value.func


def _takes_one(node: ast.AST) -> bool:
    """Whether this computes with what it is given, or hands it to a part."""
    is_part = isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self.")
    return is_part or isinstance(node, ast.BinOp | ast.AugAssign | ast.Attribute)


def _returns_tuples(part: object) -> bool:
    """Whether each return of a module says that it returns several tensors."""
    code = getattr(getattr(part, "forward", None), "__code__", None) if isinstance(part, nn.Module) else None
    if code is None or not is_users(code.co_filename):
        return isinstance(part, nn.MultiheadAttention | nn.RNNBase)
    forward = function_at(code.co_filename, "forward", max(line or 0 for *_, line in code.co_lines()))
    returned = [x.value for x in ast.walk(forward or ast.Module([], [])) if isinstance(x, ast.Return)]
    return bool(returned) and all(isinstance(x, ast.Tuple) for x in returned)


def _named(node: ast.expr, last: TracebackType) -> object:
    """What a name or an attribute stands for where code raised; None where it is neither."""
    match node:
        case ast.Name(id=name):
            return {**last.tb_frame.f_globals, **last.tb_frame.f_locals}.get(name)
        case ast.Attribute(value=value, attr=name):
            return getattr(_named(value, last), name, None)
    return None


def _root_of_a_size(last: TracebackType) -> str:
    """Name the function of torch's that was given a size, of a tensor or by its name, where math has the same."""
    for call in _failing_call(last):
        if len(call.args) == 1 and isinstance(call.func, ast.Attribute) and hasattr(math, call.func.attr):
            given = ast.parse(OF_A_SHAPE.sub("1", ast.unparse(call.args[0])))
            nodes = [x for x in ast.walk(given) if isinstance(x, ast.Name | ast.Attribute)]
            values = {getattr(x, "attr", getattr(x, "id", "")): _named(x, last) for x in nodes}
            sizes = (type(x) is int and value_for(name, Sizes())[0] for name, x in values.items() if name != "self")
            return call.func.attr if all(sizes) else ""
    return ""
