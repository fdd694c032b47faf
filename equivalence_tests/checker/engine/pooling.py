"""Recognise attention pooling, which averages all tokens of a sample into one vector, and check that it is an average.

torch.nn has no pooling to compare it with. But the weights of an average sum to one, so that equal tokens give the same
vector however many there are.
"""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.same import SINGLE, near
from equivalence_tests.checker.engine.vocabulary import SOFTMAXES
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.reach.proposing import parameters_of
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reach.subject import Subject
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.lines import code_lines
from equivalence_tests.checker.reporting.report import Report

LENGTHS = (5, 7)
POOLING = "attention pooling"


def judge_pooling(subject: Subject) -> Report | None:
    """Report a pooling, which gives one vector for each sample or its weights alone; None if the code is none.

    It is called with equal tokens, few and many: it deviates if its softmax does not run over the tokens.
    """
    for pair in zip(*(_arguments(subject, length) for length in LENGTHS), strict=True):
        calls = (Call(subject.function, given, module=subject.module) for given in pair)
        runs = [run for call in calls if (run := attempt(partial(call.run, read=False))) is not None]
        weighs = next((op for run in runs[:1] for op in run.operations if op.name in SOFTMAXES), None)
        if weighs is None or len(runs) < len(LENGTHS):
            continue
        one, two = (next(tensors_in((run.output,))) for run in runs)
        if one.shape == two.shape and one.dim() == 2 and len(one) == subject.sizes.batch:
            return _pooled(subject, weighs, "one vector per sample is returned", near(one, two, SINGLE))
        if [x.numel() for x in (one, two)] == [subject.sizes.batch * length for length in LENGTHS]:
            sums = one.reshape(subject.sizes.batch, -1).sum(-1)
            whole = near(sums, torch.ones_like(sums), SINGLE)
            return _pooled(subject, weighs, "only their weights are returned", whole)
    return None


def _arguments(subject: Subject, length: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield arguments to try: equal tokens alone, or with one query per sample, in either order, and a mask of ones."""
    batch, generator = subject.sizes.batch, torch.Generator().manual_seed(1)
    drawn = {n: torch.randn(2, batch, n, generator=generator, dtype=torch.float64) for n in _widths(subject)}
    token, query = ({n: x[i].to(subject.dtype) for n, x in drawn.items()} for i in (0, 1))
    required = sum(p.default is p.empty for p in parameters_of(subject.function))
    keep = (torch.ones(batch, length, dtype=torch.bool),) * (required == 3)
    for one, other, axis in itertools.product(drawn, drawn, (1, 0)):
        tokens = torch.stack([token[one]] * length, axis)
        if required > 1:
            yield from ((query[other], tokens, *keep), (tokens, query[other], *keep))
        elif one == other:
            yield (tokens,)


def _widths(subject: Subject) -> list[int]:
    """List possible widths of the inputs: embed_dim, and what each nn.Linear takes or takes as one of two parts."""
    width, modules = subject.sizes.embed_dim, [] if subject.module is None else list(subject.module.modules())
    taken = [m.in_features for m in modules if isinstance(m, torch.nn.Linear)]
    parts = [part for n in taken for part in (n, n - width, n // 2)]
    return [n for n in dict.fromkeys([width, *parts]) if n > 0]


def _pooled(subject: Subject, weighs: Operation, gives: str, whole: bool) -> Report:
    line, over = code_lines(weighs.frames)[-1], weighs.inputs[0].value.size(weighs.argument(1, "dim", -1))
    said = f"It is a pooling layer: line {line.number} (`{line.text}`) weighs tokens, and {gives}."
    report = Report(subject.name, POOLING, reason=f"{said} torch.nn has none to compare it with.")
    if over != LENGTHS[0] and not whole:
        report.verdict = "deviates"
        report.reason += (
            f" Its softmax runs over an axis of length {over}, not over the tokens: their weights do not sum to one, "
            "and more tokens that are all equal give another vector."
        )
    return report
