"""What somebody's callable may want: its parameters, what their names say, and every choice, the likeliest first."""

import ast
import dis
import functools
import inspect
import itertools
import math
import re
import sys
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from equivalence_tests.checker.reach.arguments import (
    ADDED_POSITIONS,
    RESOLUTION,
    ROLES,
    Sizes,
    role_of_parameter,
    value_for,
)
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reach.syntax import assigned_in
from equivalence_tests.checker.reach.variadic import with_the_rest
from equivalence_tests.checker.reporting.lines import source_of

T = TypeVar("T")
JOINS = ("cat", "concat", "concatenate", "stack", "hstack", "vstack")
PLACE = re.compile(r"^(layer|block)_?(idx|index|id|num(ber)?)$")
SWITCH = re.compile(r"^(is|use|with|do|has)_|(shifted|causal|masked|cross|relative\w*|pre_?norm|norm_first|bias)$")
SHIFT = re.compile(r"^shift(_?size)?$")
STATE = re.compile(r"(?<!hidden_)state|cache|past")
MAKES_STATE = re.compile(r"^(init|empty|new|zero|make|create)\w*_?(state|cache|past)s?$")
SHORT, LONGEST = 3, 256  # tables of other lengths are not tried
JOINED = ("...",)  # a list that is joined as a whole


def parameters_of(target: Any) -> list[inspect.Parameter]:
    """List the arguments of a callable, or of the forward of a module, that have names of their own.

    Those that default to None though the code computes with them all the same have no default here.

    >>> [p.name for p in parameters_of(nn.ReLU())]
    ['input']
    """
    if isinstance(target, nn.Module) and getattr(type(target), "forward", None) is not nn.Module.forward:
        target = target.forward  # some override __call__ instead
    if isinstance(target, torch.ScriptMethod):
        return list(scripted_signature(target.schema).parameters.values())[1:]
    signature = _signature(target, eval_str=True) or _signature(target, eval_str=False)
    if signature is None:  # what is written in C may not say
        return []
    found = with_the_rest(target, signature, lambda function: parsed(source_of(function)), parameters_of)
    written: Any = getattr(target, "__init__", None) if isinstance(target, type) else target
    if all(p.default is not None for p in found):
        return found
    needed = _needed(inspect.unwrap(getattr(written, "__func__", written)))
    return [p.replace(default=p.empty) if p.name in needed and p.default is None else p for p in found]


@functools.lru_cache(maxsize=256)
def _needed(function: Any) -> frozenset[str]:
    """Name what a function computes with, and neither sets nor asks for whether it is there."""
    used, asked = set[str](), set[str]()
    nodes = parsed(source_of(function)) if inspect.isfunction(function) else []
    for node in nodes:
        if isinstance(node, ast.BinOp | ast.UnaryOp | ast.AugAssign | ast.Attribute | ast.Subscript):
            computed = [getattr(node, "value", node)] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)
            used |= {x.id for x in computed if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
        elif isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert | ast.BoolOp | ast.Try):
            asked |= {x.id for x in ast.walk(getattr(node, "test", node)) if isinstance(x, ast.Name)}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            asked.add(node.id)
    for one, other in ((own, x) for node in nodes for own, x in assigned_in(node)):
        used |= {ast.unparse(other)} if isinstance(other, ast.Name) and ast.unparse(one) in used else set()
    return frozenset(used - asked)


def multiplied_by(function: Any) -> set[str]:
    """Name the arguments that a function only multiplies with."""
    nodes = parsed(source_of(function.forward if isinstance(function, nn.Module) else function))
    loads = Counter(x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load))
    products = (x for x in nodes if isinstance(x, ast.BinOp | ast.AugAssign) and isinstance(x.op, ast.Mult))
    factors = Counter(name for x in products for name in (getattr(y, "id", "") for y in ast.iter_child_nodes(x)))
    return {name for name, count in factors.items() if count == loads[name]}


def taken_by_parts(module: nn.Module, inside: tuple[str, ...] = ("forward",)) -> dict[str, nn.Module]:
    """Give the matrix or the embedding that each argument goes to, in a method or in what that hands it to."""
    found, children = dict[str, nn.Module](), dict(module.named_children())
    calls = (x for x in parsed(source_of(getattr(type(module), inside[-1], None))) if isinstance(x, ast.Call))
    for call, called in ((x, getattr(x.func, "attr", "")) for x in calls if ast.unparse(x.func).startswith("self.")):
        child: Any = children.get(called)
        child = child[0] if isinstance(child, nn.Sequential) and len(child) else child
        method = None if called in (*children, *inside) else getattr(module, called, None)
        inner = taken_by_parts(child) if child is not None else {}
        inner = taken_by_parts(module, (*inside, called)) if inspect.ismethod(method) else inner
        for argument, value in _handed_over(call, child or method):
            taken = child if isinstance(child, nn.Linear | nn.Embedding) else inner.get(argument)
            for name in (x.id for x in ast.walk(value) if isinstance(x, ast.Name) and taken is not None):
                found.setdefault(name, cast(nn.Module, taken))
    return found


def code_of(function: Callable[..., Any]) -> tuple[list[str], CodeType | None]:
    """The arguments of a function, and the code that it is written in."""
    code = getattr(inspect.unwrap(getattr(function, "forward", function)), "__code__", None)
    names = [] if code is None else [*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
    return names[names[:1] == ["self"] :], code


def unread_arguments(function: Callable[..., Any]) -> set[str]:
    """The arguments that no line of a function reads."""
    names, code = code_of(function)
    return set() if code is None else set(names) - _read_in(code)


@functools.lru_cache(maxsize=256)
def _read_in(code: CodeType) -> frozenset[str]:
    """The variables that code reads, or that functions inside it may read."""
    loads = [one.argval for one in dis.get_instructions(code) if one.opname.startswith("LOAD_FAST")]
    read = {name for value in loads for name in (value if isinstance(value, tuple) else (value,))}
    return frozenset(read.union(code.co_cellvars))


def called_arguments(function: Callable[..., Any]) -> set[str]:
    """The arguments that a function calls."""
    nodes = parsed(source_of(getattr(function, "forward", function)))
    called = {x.func.id for x in nodes if isinstance(x, ast.Call) and isinstance(x.func, ast.Name)}
    return called.intersection(code_of(function)[0])


def nodes_of(target: Any) -> list[ast.AST]:
    """Give what a function says, or a class and those of its file that it is made from, if that is known."""
    own = (target,) if inspect.isfunction(target) else ()
    written = [one for one in getattr(target, "__mro__", own) if one.__module__ == target.__module__]
    return [node for one in written for node in parsed(source_of(one))]


def handed_on_as(function: Any, role: str) -> set[str]:
    """Name the arguments that a forward hands on under a name that has this role."""
    calls = (node for node in nodes_of(type(function)) if isinstance(node, ast.Call))
    given = ((one.arg or "", one.value) for call in calls for one in call.keywords)
    return {value.id for name, value in given if isinstance(value, ast.Name) and role_of_parameter(name) == role}


@functools.lru_cache(maxsize=256)
def parsed(source: str) -> list[ast.AST]:
    """Give all that a text says; nothing where it is no whole statement."""
    try:
        return list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return []


def compared_by(target: Any) -> dict[str, list[object]]:
    """List the constants with which a class, or a function, compares what has a name."""
    compared: dict[str, list[object]] = {}
    for node in nodes_of(target):
        match node:
            case ast.Compare(left=ast.Name(id=name) | ast.Attribute(attr=name), comparators=[with_]):
                one_of = with_.elts if isinstance(with_, ast.Tuple | ast.List | ast.Set) else [with_]
                compared.setdefault(name, []).extend(x.value for x in one_of if isinstance(x, ast.Constant))
    return compared


def taken_apart(target: Any) -> tuple[str, ...]:
    """Give the order in which a class takes queries, keys and values out of one tensor; () for none, or for several."""
    named = [
        tuple(role_of_parameter(getattr(x, "id", "")) for x in node.targets[0].elts)
        for node in nodes_of(target)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
    ]
    orders = {roles for roles in named if sorted(roles) == sorted(ROLES)}
    return orders.pop() if len(orders) == 1 else ()


def keys_for(target: Any, name: str) -> list[Any]:
    """List the keys of the tables in a class's file in which something of this name is looked up."""
    file = sys.modules.get(getattr(target, "__module__", ""))
    source = source_of(file) if file else ""
    found = _looked_up_in(source).get(name, [])
    tables = {getattr(x, "id", "") for x in found} - {""}
    assigned = (x for x in parsed(source) if isinstance(x, ast.Assign)) if tables else ()
    local = [x.value for x in assigned if tables & {getattr(t, "id", "") for t in x.targets}]
    written = (key for x in (*found, *local) if isinstance(x, ast.Dict) for key in x.keys)
    keys = [key for one in tables if isinstance(table := vars(file).get(one), dict) for key in table]
    return [*dict.fromkeys([*keys, *(key.value for key in written if isinstance(key, ast.Constant))])]


@functools.lru_cache(maxsize=64)
def _looked_up_in(source: str) -> dict[str, list[ast.expr]]:
    """Give what a text looks something up in, by the name of the key."""
    found: dict[str, list[ast.expr]] = {}
    for node in parsed(source):
        match node:
            case ast.Subscript(value, ast.Name(id=key) | ast.Attribute(attr=key)):
                found.setdefault(key, []).append(value)
    return found


def other_options(target: Any) -> Iterator[tuple[str, str | int]]:
    """Give Booleans of a constructor negated, strings with the values that its class looks for, and shifts."""
    compared = compared_by(target)
    for parameter in parameters_of(target):
        default = parameter.default
        if isinstance(default, bool):
            yield parameter.name, not default
        elif default is parameter.empty and parameter.annotation in (bool, default) and SWITCH.search(parameter.name):
            yield parameter.name, not value_for(parameter.name, Sizes())[1]
        elif default == 0 and SHIFT.search(parameter.name):
            yield parameter.name, 1
        elif isinstance(default, str) or default is parameter.empty:
            values = dict.fromkeys(x for x in compared.get(parameter.name, []) if isinstance(x, str))
            yield from ((parameter.name, value) for value in values if value != default)


@functools.lru_cache(maxsize=64)
def used_as(target: Any, inside: tuple[Any, ...] = ()) -> dict[str, str]:
    """Say what a constructor does with its arguments, or a class of its module that it hands them to.

    That is, for each name, "drops", if it is a rate of dropout, "divides NAME", if that is divided by it, "repeats",
    "counts", if it says which of several layers it is, "accepts VALUES", if an assertion lists these, "runs", if it is
    called as a sub-module is, "pairs", if two numbers are taken out of it, or "decides", if all that is asked is
    whether it is true.
    """
    names = vars(sys.modules.get(getattr(target, "__module__", ""), object))
    used: dict[str, str] = dict.fromkeys(_only_tested(nodes_of(target)), "decides")
    used |= dict.fromkeys(_run_by(nodes_of(target)), "runs")
    for node in nodes_of(target):
        match node:
            case ast.BinOp(whole, ast.FloorDiv() | ast.Mod(), ast.Name(id=name) | ast.Attribute(attr=name)):
                of = getattr(whole, "id", getattr(whole, "attr", ""))
                used[name.lstrip("_")] = f"divides {of.lstrip('_')}"
            case ast.Assign(targets=[ast.Tuple(elts=[_, _])], value=ast.Name(id=name)):
                used[name] = "pairs"
            case ast.Call(func=ast.Name(id="range"), args=[*_, ast.Name(id=name)]):
                used.setdefault(name, "repeats")
            case ast.Assert(test=ast.Compare(ast.Name(id=name), [ast.In()], [ast.Tuple() | ast.List() as allowed])):
                plain = all(isinstance(x, ast.Constant) for x in allowed.elts)
                used |= {name: f"accepts {ast.unparse(allowed)}"} if plain else {}
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)):
                made = names.get(called)
                further = isinstance(made, type) and made not in (*inside, target)
                meant = used_as(made, (*inside, target)) if further else {}
                for argument, value in _handed_over(node, made if further else None):
                    drops = "drop" in argument or (argument in ("", "p") and "drop" in called.lower())
                    use = "drops" if drops else "counts" if PLACE.search(argument) else meant.get(argument, "")
                    used |= {getattr(value, "id", getattr(value, "attr", "")): use} if use else {}
    return used


def _only_tested(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Name what is only asked whether it is true, or kept under its own name."""
    tested, kept = set[ast.AST](), set[ast.AST]()
    for node in nodes:
        match node:
            case ast.If(test=test) | ast.IfExp(test=test) | ast.UnaryOp(op=ast.Not(), operand=test):
                tested.add(test)
            case ast.Assign():
                kept |= {x for own, x in assigned_in(node) if getattr(own, "attr", "") == getattr(x, "id", None)}
    loads = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Load)]
    uses: dict[str, list[ast.AST]] = {}
    for node in loads:
        uses.setdefault(getattr(node, "id", getattr(node, "attr", "")), []).append(node)
    yield from (name for name, every in uses.items() if {*every} & tested and {*every} <= tested | kept)


def _run_by(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Name what is kept as it is, and called under the name that it is kept by."""
    called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    kept = (pair for node in nodes for pair in assigned_in(node))
    yield from (x.id for own, x in kept if isinstance(x, ast.Name) and ast.unparse(own) in called)


def _handed_over(call: ast.Call, made: Any) -> list[tuple[str, ast.expr]]:
    """Give what a call hands over, each with the name of the argument, or "" where that is not known."""
    order = [p.name for p in parameters_of(made)] if made is not None else []
    given = zip(itertools.chain(order, itertools.repeat("")), call.args, strict=False)
    return [*given, *((keyword.arg or "", keyword.value) for keyword in call.keywords)]


def _signature(target: Any, eval_str: bool) -> inspect.Signature | None:
    try:
        return inspect.signature(target, eval_str=eval_str)
    except Exception:  # an annotation may be any text
        return None


def held_by_arguments(function: Any) -> dict[str, tuple[str, ...]]:
    """Name the variables that a function takes out of each argument that holds several tensors; else ``JOINED``.

    >>> def attention(inputs, mask): ...
    >>> held_by_arguments(attention)
    {}
    """
    forward = function.forward if isinstance(function, nn.Module) else function
    return _held_by_arguments(inspect.unwrap(getattr(forward, "__func__", forward)))


@functools.lru_cache(maxsize=16)
def _held_by_arguments(function: Any) -> dict[str, tuple[str, ...]]:
    if not inspect.isfunction(function):
        return {}
    parents = {child: node for node in parsed(source_of(function)) for child in ast.iter_child_nodes(node)}
    read = {p.name: _taken_out(p.name, parents) for p in parameters_of(function)}
    said = {p.name: p.annotation for p in parameters_of(function)}
    lists = {name for name, asked in said.items() if (typing.get_origin(asked) or asked) is list}
    return {name: found or JOINED for name, found in read.items() if found or name in lists}


def _taken_out(argument: str, parents: Mapping[ast.AST, ast.AST]) -> tuple[str, ...]:
    """Name what is taken out of an argument; () where nothing is, or where it is used as one tensor, too."""
    found, otherwise = dict[int, str](), False
    for node in parents:
        if not (isinstance(node, ast.Name) and node.id == argument and isinstance(node.ctx, ast.Load)):
            continue
        match parents[node]:
            case ast.Assign(targets=[ast.Tuple(elts=elements)]):  # under its name, something else may follow
                return tuple(getattr(element, "id", "") for element in elements)
            case ast.Subscript(slice=ast.Constant(value=int(place))) as taken if taken.value is node:
                targets = getattr(parents[taken], "targets", [None])
                found.setdefault(place, getattr(targets[0], "id", ""))
            case ast.Call(func=ast.Attribute(attr=name), args=[ast.Name(), *_]) if name in JOINS:
                return JOINED
            case ast.Call(func=ast.Name(id="len" | "isinstance")) | ast.Compare() | ast.UnaryOp():
                pass
            case _:
                otherwise = True
    return () if otherwise else tuple(found.get(place, "") for place in range(max(found, default=-1) + 1))


def empty_state(function: Any, argument: str, sizes: Sizes = Sizes(), batch: int = 1) -> Any:  # noqa: B008 -- frozen
    """Give what an argument takes before the first step: what the class makes, or no keys and values; None if none."""
    held = held_by_arguments(function).get(argument, ())
    if not STATE.search(argument) and not (held and all(map(STATE.search, held))):
        return None
    makers = [getattr(function, name) for name in dir(type(function)) if MAKES_STATE.search(name)]
    made = (attempt(partial(maker, batch)) for maker in makers)
    none = torch.zeros(batch, sizes.num_heads, 0, sizes.head_dim)
    return next((state for state in made if state is not None), (none, none) if held else None)


def scripted_signature(schema: Any) -> inspect.Signature:
    """Give the arguments of what TorchScript has compiled."""
    kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(x.name, kind, default=x.default_value if x.has_default_value() else none)
            for x in schema.arguments
        ]
    )


def ranked(choices: Sequence[Sequence[T]]) -> Iterator[tuple[T, ...]]:
    """Choose one from each, first choices first: the sum of their places rises.

    >>> ["".join(chosen) for chosen in ranked(["ab", "xyz"])]
    ['ax', 'ay', 'bx', 'az', 'by', 'bz']
    """

    def of_sum(total: int, rest: Sequence[Sequence[T]]) -> Iterator[tuple[T, ...]]:
        if not rest and not total:
            yield ()
        for place, one in enumerate(rest[0][: total + 1] if rest else ()):
            yield from ((one, *others) for others in of_sum(total - place, rest[1:]))

    for total in range(1 + sum(len(options) - 1 for options in choices)):
        yield from of_sum(total, choices)


def exact_lengths(module: nn.Module) -> list[int]:
    """List the lengths that tables of positions may insist on.

    Such tables are learned, of shape (1, len, features), or indices into one whose last axis is the length, or the rows
    and columns of an image; an embedding that is called positions may be looked up as a whole.
    """
    learned = [p.size(1) for p in module.parameters() if p.dim() == 3 and p.size(0) == 1]
    indices = [b.size(-1) for b in module.buffers() if b.dim() and not b.is_floating_point()]
    held = (pair for child in module.modules() for pair in vars(child).items())
    named = (x for name, x in held if type(x) in (tuple, list) and re.search(RESOLUTION, name.lower()))
    grids = [math.prod(x) for x in named if all(type(size) is int for size in x)]
    sides = [side for side in map(math.isqrt, indices) if side**2 in indices]  # of (len, len), end to end
    embeds = ((path.lower().split("."), m) for path, m in module.named_modules() if isinstance(m, nn.Embedding))
    places = [m.num_embeddings for names, m in embeds if any(map(ADDED_POSITIONS.search, names))]
    return [n for n in dict.fromkeys([*learned, *grids, *sides, *indices, *places]) if SHORT < n <= LONGEST]
