"""What a callable takes as ``*args`` or ``**kwargs``: what its code takes out of them, or hands on to another one."""

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter
from typing import Any

from torch import nn

STAR, STARS = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
BASES = (object, nn.Module)  # which take no more
BY_NUMBER = {1: ("x",), 2: ("query", "memory"), 3: ("query", "key", "value")}  # what so many tensors mostly are


def taken_out_of(rest: Parameter, nodes: Sequence[ast.AST]) -> Iterator[Parameter]:
    """Give what code takes out of the rest of its arguments under a name.

    >>> nodes = [*ast.walk(ast.parse("q, k = args; dim = kwargs['dim']; bias = kwargs.get('bias', True)"))]
    >>> [str(p) for p in taken_out_of(Parameter("args", STAR), nodes)]
    ['q', 'k']
    >>> [str(p) for p in taken_out_of(Parameter("kwargs", STARS), nodes)]
    ['dim', 'bias=True']
    >>> [str(p) for p in taken_out_of(Parameter("x", STAR), [*ast.walk(ast.parse("f(x[0]) @ f(x[1])"))])]
    ['query', 'memory']
    """
    places = set[int]()
    asked = {name for x in nodes if (name := _asked_for(x, rest.name))}
    for node in nodes:
        match node:
            case ast.Subscript(ast.Name(id=own), ast.Constant(int(place))) if own == rest.name:
                places.add(place)
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id=own)) if own == rest.name:
                yield from (Parameter(x.id, Parameter.POSITIONAL_ONLY) for x in names if isinstance(x, ast.Name))
            case ast.Subscript(ast.Name(id=own), ast.Constant(str(key))) if own == rest.name:
                yield Parameter(key, Parameter.KEYWORD_ONLY, default=None if key in asked else Parameter.empty)
            case ast.Call(
                ast.Attribute(ast.Name(id=own), "get" | "pop" as way), [ast.Constant(str(key)), *default]
            ) if own == rest.name:
                value = default[0].value if default and isinstance(default[0], ast.Constant) else None
                needed = way == "pop" and not default
                yield Parameter(key, Parameter.KEYWORD_ONLY, default=Parameter.empty if needed else value)
    counted = BY_NUMBER.get(max(places, default=-1) + 1, ())
    yield from (Parameter(name, Parameter.POSITIONAL_ONLY) for name in counted)


def _asked_for(node: ast.AST, rest: str) -> str:
    """The name that a node looks for among the rest of the arguments, where it may be absent; "" for none."""
    match node:
        case ast.Compare(ast.Constant(str(name)), [ast.In() | ast.NotIn()], [ast.Name(id=own)]) if own == rest:
            return name
    return ""


def handed_on(rest: Parameter, nodes: Sequence[ast.AST]) -> Iterator[ast.Call]:
    """Give the calls that hand the rest of the arguments on."""
    for node in nodes:
        if isinstance(node, ast.Call):
            starred = (x.value for x in node.args if isinstance(x, ast.Starred))
            stars = (keyword.value for keyword in node.keywords if keyword.arg is None)
            if any(isinstance(x, ast.Name) and x.id == rest.name for x in (stars if rest.kind is STARS else starred)):
                yield node


def called_by(call: ast.Call, target: Any, function: Any) -> Any:
    """Find what a call in a function of a class or of an instance calls; None where that is not known."""
    match call.func:
        case ast.Attribute(ast.Call(func=ast.Name(id="super")), name):
            kinds = (target if isinstance(target, type) else type(target)).__mro__
            holds = (any(function is one for one in vars(kind).values()) for kind in kinds)
            place = next((i for i, held in enumerate(holds) if held), len(kinds))
            above = next((kind for kind in kinds[place + 1 :] if name in vars(kind)), object)
            return (
                None if above in BASES else above if name == "__init__" else getattr(super(kinds[place], target), name)
            )
        case ast.Attribute(ast.Name(id="self"), name):
            found = getattr(target, name, None) if isinstance(target, nn.Module) else None
            return found if isinstance(found, nn.Module) or inspect.ismethod(found) else None
        case ast.Name(id=name):
            return getattr(function, "__globals__", {}).get(name)
    return None


def still_asked(call: ast.Call, parameters: list[Parameter]) -> list[Parameter]:
    """List the arguments that a call does not give itself."""
    said = {keyword.arg for keyword in call.keywords}
    given = sum(not isinstance(x, ast.Starred) for x in call.args)
    return [p for p in parameters[given:] if p.name not in said]


def with_the_rest(
    target: Any,
    signature: inspect.Signature,
    nodes_of: Callable[[Any], Sequence[ast.AST]],
    parameters_of: Callable[[Any], list[Parameter]],
) -> list[Parameter]:
    """List the arguments of a class, a function or a forward, with those in the place of ``*args`` and ``**kwargs``."""
    own = list(signature.parameters.values())
    rest = [p for p in own if p.kind in (STAR, STARS)]
    found = {p.name: p for p in own if p not in rest}
    function: Any = getattr(target, "__init__" if isinstance(target, type) else "__func__", target)
    nodes = nodes_of(function) if rest else ()
    for one in rest:
        named = [*taken_out_of(one, nodes)]
        for call in handed_on(one, nodes) if one is rest[-1] else ():  # by name, where both are handed on
            inside = called_by(call, getattr(target, "__self__", target), function)
            named += still_asked(call, parameters_of(inside)) if inside is not None else []
        if one.kind is STAR:
            named = [p.replace(kind=Parameter.POSITIONAL_ONLY) for p in named if p.default is p.empty]
        named.sort(key=lambda p: p.default is not p.empty)  # one place that does without it is enough
        found |= {p.name: p for p in named if p.name not in found}
    return list(found.values())
