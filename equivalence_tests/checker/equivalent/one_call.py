"""Hold an attention that ran in somebody's call against torch: the sub-module that holds it, with what it was given."""

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from equivalence_tests.checker.engine.codes import numbered, sources_in, token_of
from equivalence_tests.checker.engine.given_masks import GivenMasks
from equivalence_tests.checker.engine.judgement import Judgement
from equivalence_tests.checker.engine.judging import examine
from equivalence_tests.checker.engine.running import Call, Examination, is_data
from equivalence_tests.checker.equivalent.beside import left_over
from equivalence_tests.checker.equivalent.comparing import Case, Difference, compare, kept_parameters
from equivalence_tests.checker.equivalent.deciding import Holding, decide
from equivalence_tests.checker.equivalent.expressions import Given, all_of
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.program import Program
from equivalence_tests.checker.equivalent.reading import plain_layout, read
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.equivalent.watched import Layout
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.report import Report

WHOLE = "the whole, beside torch's own program"


@dataclass(frozen=True)
class _Apart:
    """The call of the sub-module that holds one attention, examined by itself.

    Args:
        found: What was seen in it.
        judgement: Of its attention.
        layout: Of its arguments and its output.
    """

    found: Examination
    judgement: Judgement
    layout: Layout


def hold_call(report: Report, found: Examination, judgement: Judgement, intended: Mapping[str, str]) -> None:
    """Hold the verdict on an attention in a call against torch's own program; where none can be made, say why.

    Args:
        report: Receives the verdict that follows.
        found: What was seen in the call.
        judgement: Of the attention.
        intended: What the user says is intended, by name, each with the reason.
    """
    try:
        holding = _holding(_apart(found, judgement))
    except UnreadError as why:
        report.unread = str(why)
        report.coverage.append(Exercise(WHOLE, False, f"not compared: {why}"))
        report.verdict = "partial"
        return
    decide(report, holding, intended)


def _apart(found: Examination, judgement: Judgement) -> _Apart:
    """Call the sub-module that holds an attention with its projections again, on a copy of it."""
    module, call = found.call.module, found.call
    inside = _call_around(found, judgement)
    if inside is not None and module is not None:
        call = Call(module.get_submodule(inside.path), inside.args, inside.kwargs)
    call = _copied(call)
    call.seeds = {id(x): numbered(x.shape) for _, x in call.tensors if x.dim() >= 3 and is_data(x)}
    apart = examine(call, GivenMasks(call))
    if len(apart.judgements) != 1:
        raise UnreadError("more than one attention runs in one forward")
    layout = plain_layout(lambda returned: next(tensors_in((returned,))))
    _require_batch_first(apart.judgements[0], call)
    return _Apart(apart, apart.judgements[0], layout)


def _copied(call: Call) -> Call:
    module = call.module
    if module is not None and any(isinstance(x, nn.Dropout) and x.p and x.training for x in module.modules()):
        raise UnreadError("dropout is on")
    if module is None:
        return Call(call.function, call.args, call.kwargs)
    try:
        other = copy.deepcopy(module)
    except Exception as error:  # some modules cannot be copied
        raise UnreadError(f"it cannot be copied ({type(error).__name__}: {error})") from error
    if inspect.ismethod(call.function) and call.function.__self__ is module:
        return Call(getattr(other, call.function.__name__), call.args, call.kwargs, other)
    if call.function is not module:
        raise UnreadError("what is called is neither a module nor a method of it")
    return Call(other, call.args, call.kwargs)


def _call_around(found: Examination, judgement: Judgement) -> Any:
    """The innermost call of a sub-module that holds an attention and its projections; None for the whole."""
    names, attention = found.run.names, judgement.attention
    sides = [codes for part in attention.parts for codes, _ in part.sides.values()]
    made = [names.sources[number].operation for codes in sides for number in sources_in(codes)]
    first = min([attention.first.index, *(op.index for op in made if op is not None)])
    around = [x for x in found.run.recorder.calls if x.first <= first <= attention.end.index < x.end]
    return around[-1] if around else None


def _require_batch_first(judgement: Judgement, call: Call) -> None:
    """Tokens are numbered row after row: those of one slice have to lie in one sample."""
    lengths = [x.shape[1:-1].numel() for _, x in call.tensors if id(x) in call.seeds]
    tokens = token_of(judgement.attention.parts[0].product.left[0][:, 0])
    if not lengths or bool((tokens // lengths[0] != tokens[0] // lengths[0]).any()):
        raise UnreadError("its first axis does not hold the samples")


def _holding(apart: _Apart) -> Holding:
    module = apart.found.call.module
    with kept_parameters(module):
        reading = read(apart.found, apart.judgement, apart.layout)
        parameters = Parameters.of(module)
        worst = Difference("", "output", 0.0)
        for case in _cases(apart.found.call, reading.program):
            try:
                differences = list(compare(reading.program, case, apart.layout, gradients=True))
            except RuntimeError as error:
                raise UnreadError(f"it cannot be called again ({type(error).__name__}: {error})") from error
            worst = max([worst, *differences], key=lambda one: one.size)
        steps = tuple(reading.program.steps(module, parameters))
        agrees = worst.size <= reading.tolerance
        first = Case(apart.found.call, None, "")
        rest = left_over(reading.program, first, apart.layout, reading.tolerance) if agrees else ()
    return Holding(reading.program, parameters, steps, worst, reading.tolerance, tuple(rest))


def _cases(call: Call, program: Program) -> Iterator[Case]:
    """Other tokens in the place of those that are projected, and other parameters."""
    expressions = [one.tokens for _, one in program.roles] + [program.output.around]
    used = {x.name for one in expressions for x in all_of(one) if isinstance(x, Given)}
    tokens = {id(x) for name, x in call.tensors if name in used}
    for seed in (7, 8):
        args, kwargs = _drawn((call.args, call.kwargs), tokens, seed)
        other = Call(call.function, args, kwargs, call.module)
        other.seeds = {id(x): numbered(x.shape) for name, x in other.tensors if name in used}
        yield Case(other, None, "fresh inputs", seed)


def _drawn(given: Any, tokens: set[int], seed: int) -> Any:
    """Put other numbers in the place of some tensors, the same for the same tensor."""
    generator, drawn = torch.Generator().manual_seed(seed), dict[int, Tensor]()

    def fresh(x: Tensor) -> Tensor:
        if id(x) in tokens and id(x) not in drawn:
            drawn[id(x)] = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
        return drawn.get(id(x), x)

    return tree_map_only(Tensor, fresh, given)
