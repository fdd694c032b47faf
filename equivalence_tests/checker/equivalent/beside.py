"""What comes back beside the output: weights, scores, keys and values that are kept."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.same import HIDING, MEASURED, TABLE, near
from equivalence_tests.checker.equivalent.comparing import Comparison
from equivalence_tests.checker.equivalent.expressions import Values
from equivalence_tests.checker.equivalent.operands import first_alike
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.program import Program
from equivalence_tests.checker.equivalent.watched import Layout
from equivalence_tests.checker.reach.tracing import tensors_in

AXES = 4


def left_over(program: Program, call: Call, layout: Layout, comparison: Comparison) -> dict[str, bool]:
    """Find the tensors that come back and are none of the program's, in any order of their axes.

    Args:
        program: What was read.
        call: What is called.
        layout: Of its arguments and its output.
        comparison: How the program compares; where it does not agree, nothing is looked at.

    Returns:
        For each, by its place, whether it looks like a map of weights, and is none that was used.
    """
    args, kwargs, _ = call.fresh()
    with torch.no_grad():
        returned = call.function(*args, **kwargs)
        output = layout.output(returned)
        rest = {f"output {place}": x for place, x in enumerate(tensors_in((returned,)), 1) if x is not output}
        if not rest or not comparison.agrees:
            return {}
        values = Values(layout.given(call), call.module, Parameters.of(call.module))
        own = [x.double().clamp_min(-HIDING) for x in _stages(program, values, layout.outward(output))]
    known = [*own, *(x.double() for _, x in call.tensors if x.is_floating_point())]
    found = {
        n: x.double() for n, x in rest.items() if not any(_same(x.double(), y, comparison.tolerance) for y in known)
    }
    return {name: _is_map(x, own[1]) and not any(_same(x, y, TABLE) for y in known) for name, x in found.items()}


def _is_map(x: Tensor, weights: Tensor) -> bool:
    """Whether it holds numbers for each query and key that sum to one over the keys, as weights do."""
    return x.shape[-2:] == weights.shape[-2:] and near(x.sum(-1), torch.ones_like(x.sum(-1)), MEASURED)


def _stages(program: Program, values: Values, output: Tensor) -> Iterator[Tensor]:
    """All that the program computes, with one head alone where several share it, and averaged over heads."""
    scores = program.scores(values)
    weights = scores.softmax(-1)
    yield from (scores, weights, weights.mean(1), weights.sum(1), *weights.unbind(1), output, program.averaged(values))
    yield program.products(values)
    for _, one in program.roles:
        heads = one.projected(values), one(values)
        first = first_alike(one.weight).unique()
        yield from heads
        yield from (x[:, first] for x in heads)


def _same(x: Tensor, own: Tensor, tolerance: float) -> bool:
    if x.numel() != own.numel() or own.dim() > AXES:
        return False
    x, close = x.clamp_min(-HIDING), tolerance * float(own.abs().max())
    orders = itertools.permutations(range(own.dim()))
    return any(torch.allclose(own.permute(order).reshape(x.shape), x, rtol=0, atol=close) for order in orders)
