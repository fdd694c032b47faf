"""Call a model that has no forward as the loop that trains it does: it encodes, then decodes, then projects."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from equivalence_tests.checker.reach.arguments import role_of_parameter

STEPS, LAST = ("encode", "decode"), "project"


def with_forward(instance: Any) -> Any:
    """Give a module that only encodes and decodes a forward that does both; anything else comes back as it is.

    The module itself stays as it was: what comes back shares its parts and its weights.
    """
    kind = type(instance)
    if (forward := forward_by_steps(kind)) is None:
        return instance
    made = copy.copy(instance)
    own = {name: vars(kind)[name] for name in ("__module__", "__doc__", "__firstlineno__") if name in vars(kind)}
    made.__class__ = type(kind.__name__, (kind,), {**own, "forward": forward, "__qualname__": kind.__qualname__})
    return made


def forward_by_steps(kind: Any) -> Callable[..., Any] | None:
    """Make a forward that takes what both steps take; None where there is one, or it is not clear what was encoded."""
    forward = inspect.getattr_static(kind, "forward", None) if issubclass(kind, nn.Module) else None
    steps = [inspect.getattr_static(kind, step, None) for step in STEPS]
    if forward is not nn.Module.forward or not all(map(inspect.isfunction, steps)):
        return None
    takes, reads = (dict(inspect.signature(step).parameters) for step in steps if step is not None)
    encoded = [name for name in reads if role_of_parameter(name) == "memory"]
    given = {name: p for name, p in (takes | reads).items() if name not in encoded}
    if len(encoded) != 1 or {p.kind for p in given.values()} != {inspect.Parameter.POSITIONAL_OR_KEYWORD}:
        return None
    signature = inspect.Signature(sorted(given.values(), key=lambda p: p.default is not p.empty))

    def by_steps(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        module, *_ = bound.args
        first, second = ({n: x for n, x in [*bound.arguments.items()][1:] if n in names} for names in (takes, reads))
        made = module.decode(**{encoded[0]: module.encode(**first)}, **second)
        return getattr(module, LAST, lambda x: x)(made)

    by_steps.__signature__ = signature  # type: ignore[attr-defined]
    return by_steps
