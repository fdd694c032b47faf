"""What cannot be watched, TorchScript, numpy or a kernel of one's own, has its output compared all the same."""

import torch
from torch import nn

from equivalence_tests.checker.engine.same import EXACT, TABLE
from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.equivalent.holding import arguments_of, layout_of
from equivalence_tests.checker.equivalent.plain import plain_programs
from equivalence_tests.checker.equivalent.proving import Proving
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.lines import code_lines
from equivalence_tests.checker.reporting.report import Report

BOUNDS = {torch.float64: EXACT, torch.float32: TABLE}


def compare_output(report: Report, situation: Situation) -> None:
    """Say what hides the operations, and compare the output with torch's; a report that knows no reason stays.

    Args:
        report: Receives the verdict: equal as far as it was run, or unchecked.
        situation: One call, in which no attention was seen.
    """
    hidden = _what_hides(situation)
    if not hidden:
        return
    worst = _difference(situation)
    if worst is None or worst > BOUNDS[situation.subject.dtype]:
        apart = "" if worst is None else f", from which it differs by {worst:.2g}"
        report.reason = (
            f"{hidden} Its output was compared all the same, and is not that of plain attention{apart}. Write it in "
            "torch's functions to see where."
        )
        return
    report.verdict, report.reason = "partial", ""
    report.coverage.append(Exercise("what happens inside", False, f"{hidden} The output is that of torch's attention."))
    masks = [name for name, role in situation.plan.roles if "mask" in role]
    report.coverage += [Exercise(name, False, "nothing was hidden") for name in masks]


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


def _difference(situation: Situation) -> float | None:
    """How far it is from the nearest plain attention with its weights, over all numbers of heads that it may have."""
    subject, width = situation.subject, situation.trial.sizes.embed_dim
    flat = subject.module is None and "h" not in situation.plan.layout
    counts = [1] if flat else [situation.trial.sizes.num_heads]
    if subject.module is not None and not subject.built:  # nobody says how many heads an instance has
        counts = [number for number in range(1, width + 1) if width % number == 0]
    proving = Proving(situation, layout_of(situation.trial))
    arguments = arguments_of(situation)
    plain = (one for heads in counts for one in plain_programs(subject.module, arguments, heads, width))
    return min((proving.difference(one.program) for one in plain), default=None)
