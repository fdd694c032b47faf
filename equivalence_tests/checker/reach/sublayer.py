"""Hand an attention to a module whose forward calls what it is given, as ``x + sublayer(norm(x))`` does."""

import ast
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from equivalence_tests.checker.reach.syntax import assigned_in, function_at


class SelfAttention(nn.Module):
    """What is handed over: torch's attention of one sequence to itself."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend: (batch, len, embed_dim) to the same shape."""
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class WithSublayer(nn.Module):
    """Somebody's module, called with an attention in the place of the function that it takes."""

    def __init__(self, theirs: nn.Module, names: tuple[str, str], embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.theirs, self.names = theirs, names
        self.sublayer = SelfAttention(embed_dim, num_heads)

    def forward(self, x: Tensor) -> Any:
        """Call it with the tokens and the attention."""
        return self.theirs(**dict(zip(self.names, (x, self.sublayer), strict=True)))


def names_with_sublayer(module: Any) -> tuple[str, str] | None:
    """Name what a forward takes, if that is one tensor and one function that it calls with nothing but a tensor.

    >>> names_with_sublayer(nn.Linear(2, 3))
    """
    forward = getattr(type(module), "forward", None) if isinstance(module, nn.Module) else None
    if not inspect.isfunction(forward) or any(x.dim() > 1 for x in module.parameters()):  # only norms stand around it
        return None
    needed = [one.name for one in inspect.signature(forward).parameters.values() if one.default is one.empty][1:]
    node = function_at(forward.__code__.co_filename, forward.__name__, forward.__code__.co_firstlineno)
    called = [] if node is None else [x for x in ast.walk(node) if _called_name(x) in needed]
    names = {_called_name(x) for x in called}
    tokens = [name for name in needed if name not in names]
    one_of_each = len(names) == len(tokens) == 1 and node is not None and _give_tensors(node, called)
    return (tokens[0], names.pop()) if one_of_each else None


def called_with_one(nodes: Iterable[ast.AST], name: str) -> bool:
    """Whether what has this name is called, and never with more than one tensor."""
    calls = [x for x in nodes if isinstance(x, ast.Call) and ast.unparse(x.func) == name]
    return bool(calls) and all(len(x.args) == 1 for x in calls)


def _called_name(node: ast.AST) -> str:
    """Name the variable that is called with nothing but one argument; "" of anything else."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[_], keywords=[]):
            return name
    return ""


def _give_tensors(node: ast.AST, called: Sequence[ast.AST]) -> bool:
    """Whether what calls give is taken as it is: it is no tuple, of which one takes a part."""
    inside = ast.Subscript | ast.Attribute | ast.Starred
    parts = [x.value for x in ast.walk(node) if isinstance(x, inside)]
    parts += [value for x in ast.walk(node) for target, value in assigned_in(x) if isinstance(target, ast.Tuple)]
    return not any(x is part for x in called for part in parts)
