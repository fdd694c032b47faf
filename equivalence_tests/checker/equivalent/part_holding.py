"""Hold what is written of a part against the user's code, whole: the text itself is run, with the user's weights."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.equivalent.comparing import (
    Case,
    Comparison,
    Computes,
    Difference,
    compare,
    kept_parameters,
)
from equivalence_tests.checker.equivalent.deciding import differs, unread
from equivalence_tests.checker.equivalent.expressions import Values
from equivalence_tests.checker.equivalent.steps import UnreadError, not_called_again
from equivalence_tests.checker.equivalent.watched import Layout
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.tracing import tensors_of as watched_tensors
from equivalence_tests.checker.reporting.equivalents import Equivalent, like, taken
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.lines import raised_at
from equivalence_tests.checker.reporting.report import Report

EXACT, SINGLE = 1e-12, 3e-6  # relative; the second where a part computes in float32


@dataclass(frozen=True)
class WrittenPart:
    """A part in torch's own, as text."""

    equivalent: Equivalent
    weights: tuple[str, ...] = ()  # the arguments of a function that are its weights, as a module calls them

    def on(self, call: Call, output: Callable[[Any], Tensor]) -> Computes:
        """Give what computes the same as a call, with the weights of a module and with their gradients."""
        names = self.equivalent.names()

        def computed(values: Values, may_attend: Tensor | None = None) -> Tensor:
            module = values.parameters.module
            leaves = {id(x): values.given[name] for name, x in call.tensors if name in values.given}
            args, kwargs, _ = call.fresh(leaves=leaves)
            if self.equivalent.is_function:
                own = [getattr(module, name) for name in self.weights]
                args, kwargs = taken(names["equivalent"], (*args, *own), kwargs)
                return output(names["equivalent"](*args, **kwargs))
            inner = (copy.deepcopy(module.get_submodule(path)) for path in self.equivalent.handed)
            made = like(names["Equivalent"](*inner), None, torch.get_default_dtype()).eval()
            state = names["from_theirs"](module.state_dict(keep_vars=True))
            if state.keys() != made.state_dict().keys():
                raise UnreadError("it is not known which parameters all of its weights are")
            return output(functional_call(made, state, *taken(made.forward, args, kwargs)))

        return computed


def joined_output(returned: Any) -> Tensor:
    """Lay all tensors that come back end to end; one alone stays as it is."""
    found = tensors_of(returned)
    return found[0] if len(found) == 1 else torch.cat([x.flatten() for x in found])


def first_output(returned: Any) -> Tensor:
    """Give the first tensor of real numbers that comes back."""
    return next(x for x in tensors_of(returned) if x.is_floating_point())


def tensors_of(returned: Any) -> list[Tensor]:
    """List the tensors that come back, nested as they may be; arrays of numpy too."""
    return [*watched_tensors(tree_map_only(np.ndarray, torch.from_numpy, returned))]


def held(part: WrittenPart, cases: Iterable[Case], output: Callable[[Any], Tensor], tolerance: float) -> Comparison:
    """Compare a program with the user's code, until it differs.

    Raises:
        UnreadError: If no call could be compared.
    """
    layout = Layout(lambda x: x, lambda x: x, output)
    found = compare(lambda case: part.on(case.call, output), cases, layout, tolerance)
    if found.compared:
        return found
    raise not_called_again(found.left_out[-1][1] if found.left_out else UnreadError("no call is known"))


def hold_part(
    report: Report,
    part: WrittenPart,
    cases: Iterable[Case],
    *,
    output: Callable[[Any], Tensor] = first_output,
    tolerance: float = EXACT,
) -> Difference | None:
    """Compare a part with its equivalent, and let that decide: the report receives the equivalent and the verdict.

    Returns:
        The greatest difference, where they differ.
    """
    listed = [*cases]
    try:
        with kept_parameters(listed[0].call.module if listed else None):
            found = held(part, listed, output, tolerance)
    except UnreadError as why:
        unread(report, str(why))
        return None
    for case, error in found.left_out:  # the user's code may take no other lengths, or no gradients
        if isinstance(error, UnreadError):
            unread(report, str(error))
            return None
        if case.redrawn is not None:
            report.coverage.append(Exercise(case.words, False, f"{said(error)}{raised_at(error)}"))
    report.equivalent = found.of(part.equivalent)
    report.verdict = "partial" if report.not_exercised else report.verdict
    if found.agrees:
        return None
    differs(report, found.worst)
    return found.worst
