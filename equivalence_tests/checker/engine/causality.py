"""Find out whether code that builds a causal mask, or is called causal, hides nothing with it.

What is asked for here is evidence that a causal mask is intended: a triangle that the instance keeps or that forward
makes, or the name of the class. A mask argument or a switch that is off leaves the causal mask to the caller.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from equivalence_tests.checker.engine.ran import operations_of
from equivalence_tests.checker.engine.visibility import OFF_BY_ONE, ahead_of, pattern_of
from equivalence_tests.checker.reach.proposing import parameters_of
from equivalence_tests.checker.reach.state import held_by

CLAIM = re.compile(r"causal|masked|auto_?regressive", re.IGNORECASE)
SWITCH = re.compile(r"mask|causal|decoder|directional|auto_?regressive", re.IGNORECASE)
LEFT_TO_THE_CALLER = re.compile(r"mask|causal|bias|tril|triu|future|decoder|auto_?regressive", re.IGNORECASE)


def causal_claim(module: nn.Module, call: Callable[[], Any]) -> str:
    """Say what shows that a causal mask is intended.

    Args:
        module: The module; that it is not causal is known.
        call: Calls it.

    Returns:
        What speaks for a causal mask; "" if nothing does, or if whoever calls it decides.
    """
    if any(LEFT_TO_THE_CALLER.search(p.name) for p in parameters_of(module)) or _switched_off(module):
        return ""
    kept = next((name for name, x in held_by(module).items() if isinstance(x, Tensor) and _is_triangle(x)), "")
    if kept:
        return f"self.{kept} is a triangle"
    cut = (op for op in operations_of(call) if op.name in ("tril", "triu"))
    if any(_is_triangle(slot.value) for op in cut for slot in op.outputs):
        return "forward makes a triangle"
    name = type(module).__name__
    return f"it is called {name}" if CLAIM.search(name) else ""


def _switched_off(module: nn.Module) -> bool:
    """Whether the constructor was asked for no causal mask, or an attribute says that there is none."""
    arguments = inspect.signature(type(module)).parameters.values()
    asked = any(SWITCH.search(p.name) and p.default is not True for p in arguments)
    return asked or switch_off(module, SWITCH) != ""


def switch_off(module: nn.Module | None, named: re.Pattern[str]) -> str:
    """Name the attribute that is False and has such a name; "" if there is none."""
    held = held_by(module).items()
    return next((name for name, value in held if value is False and named.search(name.rpartition(".")[2])), "")


def _is_triangle(x: Tensor) -> bool:
    """Whether the last two axes hold one value on and on one side of the diagonal, and another beyond."""
    if x.dim() < 2 or x.size(-1) != x.size(-2) or x.size(-1) < 3:
        return False
    square = x.reshape(-1, *x.shape[-2:])[0]
    seen = square == square[-1, 0]
    two_values = bool((seen | (square == square[0, -1])).all())
    return two_values and pattern_of(seen, ahead_of(len(seen))) in ("causal", *OFF_BY_ONE)
