"""Call somebody's attention on random inputs and keep what came back."""

from dataclasses import replace

import torch

from equivalence_tests.checker.calling import Caller, CallPlan, random_inputs
from equivalence_tests.checker.construction import Sizes
from equivalence_tests.checker.diagnosis import PROBES, Observation
from equivalence_tests.checker.masking import MaskForm, draw_masks
from equivalence_tests.checker.reference import Inputs

__all__ = ["as_float64", "observe", "other_sizes"]

OTHER_LENGTHS = ((4, 6, 9), (1, 8, 8), (5, 4, 10))


def observe(
    caller: Caller,
    plan: CallPlan,
    sizes: Sizes,
    seed: int,
    mask: MaskForm | None = None,
    errors: list[str] | None = None,
    probe: str = "",
) -> Observation | None:
    """Call once with random inputs, or as a probe asks; None if the code raises, and then ``errors`` says what."""
    inputs = random_inputs(sizes, plan, seed, caller.dtype)
    inputs = PROBES[probe](inputs) if probe else inputs
    if mask is not None:
        may = draw_masks(mask.pattern, len(inputs.query), inputs.query.size(1), inputs.key.size(1), seed + 3)
        inputs = replace(inputs, may_attend=may)
    try:
        with torch.no_grad():
            return Observation(as_float64(inputs), caller.output(plan, inputs, mask).double(), probe)
    except Exception as error:
        if errors is not None:
            errors.append(f"{type(error).__name__}: {error}")
        return None


def as_float64(inputs: Inputs) -> Inputs:
    """Upcast, keeping equal tensors equal."""
    query = inputs.query.double()
    key = query if inputs.key is inputs.query else inputs.key.double()
    value = query if inputs.value is inputs.query else key if inputs.value is inputs.key else inputs.value.double()
    return Inputs(query, key, value, inputs.may_attend)


def other_sizes(sizes: Sizes) -> list[Sizes]:
    """Give other lengths; equal ones where only equal ones work."""
    equal = sizes.query_len == sizes.key_len
    if sizes.whole:
        return [replace(sizes, batch=batch) for batch, _, _ in OTHER_LENGTHS]
    return [replace(sizes, batch=b, query_len=q, key_len=q if equal else k) for b, q, k in OTHER_LENGTHS]
