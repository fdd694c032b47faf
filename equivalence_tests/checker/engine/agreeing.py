"""Calls that have to agree: training with eval, one sample with several, one implementation with the other."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.ran import operations_of
from equivalence_tests.checker.engine.same import MEASURED, near
from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.reach.branches import RAN, Branches
from equivalence_tests.checker.reach.calling import Trial
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.masking import MaskForm, draw_masks
from equivalence_tests.checker.reach.state import ask, attempt
from equivalence_tests.checker.reporting.lines import frames_of, is_refusal

Output = Callable[[], Tensor]
OF_THE_BATCH = nn.modules.batchnorm._BatchNorm, _InstanceNorm  # in training they take the statistics of each batch


class WithoutDropout(TorchFunctionMode):
    """Lets the functions of dropout drop nothing."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "dropout" in getattr(func, "__name__", ""):
            return args[0] if args else kwargs["input"]
        return func(*args, **{name: 0.0 if name == "dropout_p" else x for name, x in kwargs.items()})


@contextmanager
def training(module: nn.Module) -> Iterator[None]:
    """Put a module into training for a time, with its dropout off."""
    with ExitStack() as stack:
        for one in module.modules():
            if isinstance(one, _DropoutNd | nn.MultiheadAttention):
                stack.enter_context(mock.patch.object(one, "p" if isinstance(one, _DropoutNd) else "dropout", 0.0))
        module.train()
        stack.callback(module.eval)
        stack.enter_context(WithoutDropout())
        yield


def differing_in_training(module: nn.Module, calls: Iterable[Output]) -> Departure | None:
    """Find the condition at which training computes something other than eval does, without dropout."""
    if any(isinstance(one, OF_THE_BATCH) for one in module.modules()):
        return None
    for call in calls:
        ways, state = Branches(), torch.get_rng_state()
        before, drawn = attempt(call), torch.get_rng_state()
        torch.set_rng_state(state)
        with training(module):
            trained, drawn_in_training = attempt(ways.watching(call)), torch.get_rng_state()
            again = attempt(call)
        if before is None or trained is None or again is None or not torch.equal(trained, again):
            continue
        if not torch.equal(drawn, drawn_in_training):
            continue  # it drops by itself, and may have dropped the same twice
        if not near(trained, before, MEASURED):
            claim = f"Without dropout, the output differs by {_gap(trained, before):.2g} of the largest value."
            return Departure("training_differs", "call", None, {"claim": claim}, frames=ways.decided_by("training"))
        RAN.add(ways)
    return None


def without_an_axis(what: str, call: Callable[[int], Tensor]) -> Departure | None:
    """Find what one sample, or one token, gives that lacks an axis, or raises where two and three do not.

    Args:
        what: "sample" or "token".
        call: Gives the output for so many.
    """
    one, *several = (ask(partial(call, count)) for count in (1, 2, 3))
    two, three = (x.value.shape if x.value is not None else () for x in several)
    if not two or len(two) != len(three):
        return None
    raised = () if one.error is None else frames_of(one.error)
    if one.error is not None:
        if what == "token" or not raised or is_refusal(one.error):  # it may need more tokens
            return None
        facts = {"what": what, "claim": f"A single {what} raises {said(one.error)}."}
        return Departure("axis_of_one_lost", "call", None, facts, frames=raised)
    shape = tuple(one.value.shape)  # type: ignore[union-attr]
    if shape == tuple(2 * x - y for x, y in zip(two, three, strict=True)):
        return None
    squeezing = (op for op in operations_of(partial(call, 1)) if op.name == "squeeze")
    claim = f"A single {what} gives an output of shape {shape}; two give {tuple(two)}."
    return Departure("axis_of_one_lost", "call", next(squeezing, None), {"what": what, "claim": claim})


def outputs_of(situation: Situation, what: str) -> Callable[[int], Tensor]:
    """Give what calls an attention with so many samples or tokens, and returns its output as it comes."""
    trial = situation.trial

    def call(count: int) -> Tensor:
        sizes = replace(trial.sizes, batch=count) if what == "sample" else trial.sizes
        lengths = (count, count) if what == "token" else ()
        other = replace(trial, sizes=sizes)
        return other.tensors(other.inputs(*lengths))[trial.plan.output]

    return call


def agree(one: Trial, other: nn.Module, form: MaskForm | None) -> str:
    """Say how the output of another implementation differs with the same weights; "" where it does not."""
    assert isinstance(one.function, nn.Module)
    other.load_state_dict(one.function.state_dict(), strict=False)
    ours, theirs = output_with(one, form), RAN.watching(output_with)(replace(one, function=other), form)
    given = f" with {one.plan.mask_parameter}" if form is not None else ""
    if near(theirs, ours, MEASURED):
        return ""
    return f"With the same weights, the output{given} differs by {_gap(theirs, ours):.2g} of the largest value."


def calls_of(situations: Iterable[Situation]) -> Iterator[tuple[Trial, MaskForm | None]]:
    """Give the calls without a mask, and with each that is understood."""
    yield from dict.fromkeys((one.trial, form) for one in situations for form in (None, one.understood))


def output_with(trial: Trial, form: MaskForm | None, extra: Mapping[str, Any] | None = None) -> Tensor:
    """Give the output of a call with a mask of this form, or without one."""
    inputs = trial.inputs()
    if form is not None:
        may = draw_masks(form.pattern, len(inputs.query), inputs.query.size(1), inputs.key.size(1))
        inputs = replace(inputs, may_attend=may)
    return trial.output(inputs, extra, form)


def _gap(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max() / y.abs().max()) if x.shape == y.shape else torch.inf
