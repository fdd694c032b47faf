"""What cannot be watched, TorchScript, numpy or a kernel of one's own, has its output compared all the same."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.same import EXACT, TABLE, distance
from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.lines import code_lines
from equivalence_tests.checker.reporting.report import Report

FRESH = (3, 5, 7)
BOUNDS = {torch.float64: EXACT, torch.float32: TABLE}

Linear = tuple[Tensor, Tensor | None]


def compare_output(report: Report, situation: Situation) -> None:
    """Say what hides the operations, and compare the output with torch's; a report that knows no reason stays.

    Args:
        report: Receives the verdict: equal as far as it was run, or unchecked.
        situation: One call, in which no attention was seen.
    """
    hidden = _what_hides(situation)
    if not hidden:
        return
    worst = min((_difference(situation, reading) for reading in _readings(situation)), default=None)
    if worst is None or worst > BOUNDS[situation.subject.dtype]:
        apart = "" if worst is None else f", from which it differs by {worst:.2g}"
        report.reason = (
            f"{hidden} Its output was compared all the same, and is not that of plain attention{apart}. Write it in "
            "torch's functions to see where."
        )
        return
    report.verdict, report.reason = "partial", ""
    told = f"{hidden} The output is that of torch's attention on {len(FRESH)} fresh inputs."
    report.coverage.append(Exercise("what happens inside", False, told))
    for name, role in situation.plan.roles:
        if "mask" in role:
            report.coverage.append(Exercise(name, False, "nothing was hidden"))


def _what_hides(situation: Situation) -> str:
    """Say why nothing was seen; "" where everything was."""
    function = situation.subject.function
    inside = function.modules() if isinstance(function, nn.Module) else [getattr(function, "__wrapped__", None)]
    if any(isinstance(one, torch.jit.ScriptModule | torch.jit.ScriptFunction) for one in inside):
        return "It runs as TorchScript, which hides its operations."
    taking = situation.found.run.graph.unwatched(situation.found.run.recorder.given)
    if taking is None:
        return ""
    line = code_lines(taking.frames)[-1]
    return (
        f"Line {line.number}, `{line.text}`, takes numbers that no torch function gave: they come from numpy, or from "
        "a kernel of its own, and cannot be watched."
    )


def _difference(situation: Situation, reading: list[Linear]) -> float:
    """How far the output is from torch's, with these projections of queries, keys and values, and of the output."""
    sizes = situation.trial.sizes
    numbers = [sizes.num_heads] if reading or "h" in situation.plan.layout else [1]
    if reading and not situation.subject.built:  # nobody says how many heads an instance has
        numbers = [number for number in range(1, sizes.embed_dim + 1) if sizes.embed_dim % number == 0]

    def apart(heads: int, causal: bool, seed: int) -> float:
        inputs = situation.trial.inputs(seed=seed)
        have = situation.trial.output(inputs)
        return distance(have, _attention(inputs.query, inputs.key, inputs.value, reading, heads, causal))

    ways = itertools.product(numbers, (False, True))
    return min(max(apart(*way, seed) for seed in FRESH) for way in ways)


def _attention(query: Tensor, key: Tensor, value: Tensor, reading: list[Linear], heads: int, causal: bool) -> Tensor:
    inputs: tuple[Tensor, ...] = (query, key, value)
    if reading:
        inputs = tuple(F.linear(x, *linear) for x, linear in zip(inputs, reading, strict=False))
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in inputs)
    context = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
    return F.linear(context, *reading[3]) if len(reading) > 3 else context


def _readings(situation: Situation) -> Iterator[list[Linear]]:
    """Which matrix may project what: every order of four or three square ones, or one that holds three."""
    module = situation.subject.module
    if module is None:
        yield []
        return
    named = {name: p.detach() for name, p in module.named_parameters()}
    width = situation.trial.sizes.embed_dim
    linears = [(p, named.get(name.removesuffix("weight") + "bias")) for name, p in named.items() if p.dim() == 2]
    square = [linear for linear in linears if linear[0].shape == (width, width)]
    for weight, bias in linears:
        if weight.shape == (3 * width, width):
            biases = bias.chunk(3) if bias is not None else (None, None, None)
            yield [*zip(weight.chunk(3), biases, strict=True), *square[:1]]
    if len(square) in (3, 4):
        yield from map(list, itertools.permutations(square))
