"""What comes back beside the output: weights, scores, keys and values that are kept."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from equivalence_tests.checker.equivalent.comparing import Case
from equivalence_tests.checker.equivalent.expressions import Values
from equivalence_tests.checker.equivalent.operands import first_alike
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.program import Program
from equivalence_tests.checker.equivalent.watched import Layout
from equivalence_tests.checker.reach.tracing import tensors_in

HIDES = -1e4  # a score below hides its key, whether it is -inf or a large number
AXES = 4


def left_over(program: Program, case: Case, layout: Layout, tolerance: float) -> list[str]:
    """List the tensors that come back and are none of the program's, in any order of their axes.

    Args:
        program: What was read.
        case: A call.
        layout: Of its arguments and its output.
        tolerance: What differs by less, relative to the largest value, is rounding.
    """
    call = case.call
    args, kwargs, _ = call.fresh()
    with torch.no_grad():
        returned = call.function(*args, **kwargs)
        output = layout.output(returned)
        rest = {f"output {place}": x for place, x in enumerate(tensors_in((returned,)), 1) if x is not output}
        if not rest:
            return []
        given = {name: layout.inward(x.double()) for name, x in call.tensors if id(x) in call.seeds}
        values = Values(given, call.module, Parameters.of(call.module))
        own = [x.double().clamp_min(HIDES) for x in _stages(program, values, layout.outward(output))]
    known = [*own, *(x.double() for _, x in call.tensors if x.is_floating_point())]
    return [name for name, x in rest.items() if not any(_same(x.double(), one, tolerance) for one in known)]


def _stages(program: Program, values: Values, output: Tensor) -> Iterator[Tensor]:
    """All that the program computes, with one head alone where several share it, and averaged over heads."""
    scores = program.scores(values)
    weights = scores.softmax(-1)
    yield from (output, scores, weights, weights.mean(1), weights.sum(1), program.averaged(values))
    yield program.products(values)
    for _, one in program.roles:
        heads = one.projected(values), one(values)
        first = first_alike(one.weight).unique()
        yield from heads
        yield from (x[:, first] for x in heads)


def _same(x: Tensor, own: Tensor, tolerance: float) -> bool:
    if x.numel() != own.numel() or own.dim() > AXES:
        return False
    x, close = x.clamp_min(HIDES), tolerance * float(own.abs().max())
    orders = itertools.permutations(range(own.dim()))
    return any(torch.allclose(own.permute(order).reshape(x.shape), x, rtol=0, atol=close) for order in orders)
