"""Functions that rotate heads by angles, both of which are handed over: apply_rotary_emb(xq, xk, freqs_cis)."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.reach.angles import BASE, AngleForm
from equivalence_tests.checker.reach.arguments import role_of_parameter
from equivalence_tests.checker.reach.proposing import parameters_of
from equivalence_tests.checker.reach.tracing import tensors_in

AXES_OF_HEADS = (1, 2, None)  # (batch, heads, len, head_dim), (batch, len, heads, head_dim), or without heads
LOUDER = 2.0  # than the first head is the second one


def rotating(function: Callable[..., Any]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Give functions of (batch, len, head_dim) that call one which takes heads, and angles if it names any."""
    required = [p.name for p in parameters_of(function) if p.default is p.empty]
    turning = [name for name in required if role_of_parameter(name.lower()) == "angles"]
    if not 1 <= len(required) - len(turning) <= 2:
        return
    for form, axis in itertools.product(AngleForm.all() if turning else [None], AXES_OF_HEADS):
        if form is not None or axis is not None:
            yield _of_vectors(function, required, {*turning}, form, axis)


def _of_vectors(
    function: Callable[..., Any], names: list[str], turning: set[str], form: AngleForm | None, axis: int | None
) -> Callable[[Tensor], Tensor]:
    def rotated(x: Tensor) -> Tensor:
        heads = x if axis is None else torch.stack((x, LOUDER * x), axis)
        angles = {name: form.build(name, x[0], BASE) for name in turning if form is not None}
        returned = tensors_in((function(*(angles.get(name, heads.clone()) for name in names)),))
        first, *others = (one for y in returned for one in _heads(y, axis))
        if not all(torch.allclose(first, one, rtol=1e-5, atol=1e-6) for one in others):
            raise ValueError("what comes back is no rotation of each head")
        return first

    return rotated


def _heads(x: Tensor, axis: int | None) -> list[Tensor]:
    """Give what came of each head, all equally loud."""
    return [x] if axis is None else [x.select(axis, 0), x.select(axis, 1) / LOUDER]
