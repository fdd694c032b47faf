"""Attention of other sorts: additive, as a program of torch's parts, and code that returns the weights of one alone.

weights = softmax over the keys of score(tanh(query + key)), of projected queries and keys (Bahdanau et al. 2015); one
matrix for both side by side is the same (Luong et al. 2015, concat)
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.additive import IT_IS
from equivalence_tests.checker.engine.coverage import built_alike
from equivalence_tests.checker.engine.same import MEASURED, near
from equivalence_tests.checker.engine.situations import Situation, situation_of
from equivalence_tests.checker.equivalent.comparing import Comparison, compare, kept_parameters
from equivalence_tests.checker.equivalent.deciding import NOT_TORCHS, differs, explained, is_same
from equivalence_tests.checker.equivalent.expressions import Values
from equivalence_tests.checker.equivalent.holding import Held, case_of, signature_of
from equivalence_tests.checker.equivalent.parameters import Layer, Parameters
from equivalence_tests.checker.equivalent.part_holding import EXACT, WrittenPart
from equivalence_tests.checker.equivalent.proving import MADE_OF, argument_of
from equivalence_tests.checker.equivalent.steps import Step, UnreadError
from equivalence_tests.checker.equivalent.watched import Layout
from equivalence_tests.checker.equivalent.writer import LAYOUTS, Signature, Text, Writer
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.masking import MaskForm, mask_forms
from equivalence_tests.checker.reach.proposing import other_options, parameters_of, unread_arguments
from equivalence_tests.checker.reach.state import attempt, prepare
from equivalence_tests.checker.reach.subject import Subject
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.equivalents import Equivalent
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.lines import source_of
from equivalence_tests.checker.reporting.report import Report

KIND = "additive attention"
SENTENCE = "softmax(score(tanh(query + key))) · value."
NO_FORM = "in no form does it do what hiding keys before the softmax does"
TOKENS = 3  # how many axes tokens have: batch, length, features
ALONE = "it returns the weights alone; they were compared by what they make of the tokens that they weigh"


@dataclass(frozen=True)
class Additive:
    """Writes one way in which the parameters of a module may make additive attention."""

    situation: Situation
    query: Layer
    key: Layer
    score: Layer  # makes one score of what both give

    def written(self, form: MaskForm | None = None, weights: bool = False) -> Equivalent:
        """Write it down, with a mask of some form, and what returns the weights in the place of the output."""
        signature, module = replace(signature_of(self.situation), form=form), self.situation.subject.module
        assert module is not None  # it has parameters
        arguments = [f"{name}: Tensor" for _, name in signature.arguments]
        arguments += [f"{signature.mask}: Tensor | None = None"] if form is not None else []
        writer = Writer(signature.target, Parameters.of(module), module, ", ".join(arguments), sentence=SENTENCE)
        for name, layer in (("query", self.query), ("key", self.key), ("score", self.score)):
            writer.linear(name, layer.weight, layer.bias)
        known, names = dict(signature.arguments), self.situation.arguments
        made_of = (known[argument_of(role, names)] for role in MADE_OF)
        query, key, value = (name + signature.inward(name) for name in made_of)
        writer.lines = [
            f"query, key = self.query({query}), self.key({key})",
            "scores = self.score(torch.tanh(query[:, :, None] + key[:, None])).squeeze(-1)",
            *_hiding(signature),
            "weights = scores.softmax(-1)",
        ]
        result = "weights" if weights else f"(weights @ {value}){LAYOUTS[signature.returned][1]}"
        return writer.equivalent(writer.source(Text(result, writer)), source_of(self.situation.subject.function))


def hold_additive(report: Report, situation: Situation) -> None:
    """Compare additive attention with a program of its own layers; a report that says so stays where none agrees."""
    with kept_parameters(situation.subject.module):
        try:
            found = next((one for one in _readings(situation) if _compared(one, situation).agrees_in_all), None)
        except UnreadError:
            return
        if found is not None:
            _decide(report, found, situation)


def hold_option(one: Exercise, report: Report, situation: Situation) -> Exercise:
    """Compare what an option makes additive attention of, and say whether that is a program of its own layers.

    What is said of anything else is given back; the report receives what is intended in the program.
    """
    subject, (name, _, value) = situation.subject, one.what.partition("=")
    made = built_alike(type(subject.function), subject, **{name: value}) if one.detail.startswith(IT_IS) else None
    if one.exercised or made is None:
        return one
    own = {key: x.detach().clone() for key, x in made.named_parameters()}
    other = replace(subject, function=prepare(made, subject.dtype), built=False, initial=own)
    held = Report(one.what, reason=one.detail)
    hold_additive(held, situation_of(other, replace(situation.trial, function=made)))
    report.intended += held.intended if held.verdict == "equal" else []
    return replace(one, exercised=True, detail=SENTENCE) if held.verdict == "equal" else one


def _decide(report: Report, found: Additive, situation: Situation) -> None:
    """Compare it in all calls, also with a mask, and say what it is and what was not run."""
    mask, module = situation.plan.mask_parameter, situation.subject.module
    form = next((one for one in mask_forms() if mask and _compared(found, situation, one).agrees_in_all), None)
    comparison = _compared(found, situation, form, everything=True)
    scored = ", ".join(Parameters.of(module).names_at(found.score.weight))
    step = Step("the scores are score(tanh(query + key)), not products", f"the parameter {scored}", "scores")
    report.kind, report.reason, report.verdict = KIND, "", "equal"
    report.equivalent = replace(comparison.of(found.written(form)), steps=((step.words, step.evidence),))
    if not comparison.agrees:
        differs(report, comparison.worst)
        return
    explained(report, {step: step.evidence}, {})
    report.coverage += [Exercise(case.words, False, said(error)) for case, error in comparison.left_out]
    report.coverage += [Exercise(mask, False, NO_FORM)] if mask and form is None else []
    report.coverage += [Exercise(name, False, NOT_TORCHS) for name in _left_over(found, situation)]
    report.coverage += _not_run(situation)
    report.verdict = "partial" if report.not_exercised else "equal"


def _not_run(situation: Situation) -> Iterator[Exercise]:
    """List the arguments and options that no call had, and training where that differs."""
    function, built = situation.subject.function, situation.subject.built
    given = {*dict(situation.plan.roles), *unread_arguments(function)}
    for name in (p.name for p in parameters_of(function) if p.name not in given):
        yield Exercise(name, False, "its name does not say what it does")
    for name, value in other_options(type(function)) if built else ():
        yield Exercise(f"{name}={value}", False, "it was not built with that")
    if not _trains_alike(situation):
        yield Exercise("training", False, "it gives other numbers than in evaluation; what it drops was not compared")


def _trains_alike(situation: Situation) -> bool:
    """Whether training gives the same numbers as evaluation."""
    module = situation.subject.module
    assert module is not None  # it has parameters
    before = [*tensors_in((situation.call.returned(),))]
    module.train()
    after = attempt(lambda: [*tensors_in((situation.call.returned(),))]) or []
    module.eval()
    return len(before) == len(after) and all(map(torch.equal, before, after))


def _readings(situation: Situation) -> Iterator[Additive]:
    """List every way in which its parameters fit: two matrices, or one for queries and keys side by side."""
    parameters = Parameters.of(situation.subject.module)
    given = Layout.of(situation.trial).values(situation.call).given
    query, key = (given[argument_of(role, situation.arguments)].size(-1) for role in ("query", "key"))
    matrices = [name for name, x in parameters.named.items() if x.dim() == 2 and min(x.shape) > 1]
    for name in (name for name, x in parameters.named.items() if x.numel() == max(x.shape, default=0) > 1):
        score = parameters.layer(name)
        score = score if len(score.weight) == 1 else Layer(score.weight.mT, torch.tensor([-1]))  # a column
        layers = [parameters.layer(one) for one in matrices if len(parameters.named[one]) == score.weight.numel()]
        for one in (x for x in layers if x.weight.size(1) == query + key):
            first, last = one.weight.split((query, key), 1), one.weight.split((key, query), 1)
            for own, other in (first, last[::-1]):
                yield Additive(situation, Layer(own, one.bias), Layer(other, torch.full_like(one.bias, -1)), score)
        for one, other in itertools.permutations(layers, 2):
            if (one.weight.size(1), other.weight.size(1)) == (query, key):
                yield Additive(situation, one, other, score)


def _compared(
    one: Additive, situation: Situation, form: MaskForm | None = None, everything: bool = False
) -> Comparison:
    """Compare in one call, with or without a mask, or in all."""
    layout = Layout.of(situation.trial)
    as_given = replace(layout, inward=lambda x: x.to(situation.subject.dtype), apart={})
    masked = [] if form is None else [case_of(situation.trial, None, f"with a mask: {form}", seed=31, form=form)]
    plain = [*Held(situation).cases()]
    cases = [*plain, *masked] if everything else masked or plain[:1]
    text = one.written(form if situation.plan.neutral in (None, form) else None)  # it takes a mask of one form
    parts = {id(case): WrittenPart(one.written(form)) for case in masked}
    return compare(lambda x: parts.get(id(x), WrittenPart(text)).on(x.call, layout.outward), cases, as_given, EXACT)


def _left_over(one: Additive, situation: Situation) -> Iterator[str]:
    """Name what comes back beside the output and is not the weights."""
    returned = situation.call.returned()
    output = Layout.of(situation.trial).output(returned)
    weights = WrittenPart(one.written(weights=True)).on(situation.call, lambda x: x)
    own = weights(Values(dict(situation.call.tensors), Parameters.of(situation.subject.module)), None)
    for place, x in enumerate(tensors_in((returned,)), 1):
        if x is not output and not is_same(x.double(), own.detach().double(), EXACT):
            yield f"output {place}"


def _hiding(signature: Signature) -> Iterator[str]:
    if signature.form is not None:
        hidden = signature.hidden(1, "key.size(1)")
        yield f"if {signature.mask} is not None:"
        yield f"    scores = scores.masked_fill(({hidden})[:, 0], -torch.inf)"


def averaging(subject: Subject) -> Subject | None:
    """Give code with the product of its weights and the tokens behind it; None where that cannot be."""
    if sum(p.default is p.empty for p in parameters_of(subject.function)) < 2:
        return None
    if subject.module is None:
        return replace(subject, function=functools.wraps(subject.function)(_averaging(subject.function)))
    module = attempt(functools.partial(copy.deepcopy, subject.module))
    if module is None:  # some modules cannot be copied
        return None
    forward: Callable[..., Any] = type(module).forward
    module.forward = MethodType(functools.wraps(forward)(_averaging(forward)), module)
    return replace(subject, function=module)


def _averaging(weigh: Callable[..., Any]) -> Callable[..., Tensor]:
    known = False  # what was once seen to give weights may give others in training, or where a mask is wrong

    def averaged(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal known
        (weights,) = tensors_in((weigh(*args, **kwargs),))
        if not known and not _are_weights(weights):
            raise ValueError("what it returns are not weights")
        given = [x for x in args if not isinstance(x, nn.Module)]
        average = next(_averages(weights, [*tensors_in((given, kwargs))]))
        known = True
        return average

    return averaged


def _are_weights(x: Tensor) -> bool:
    """Whether numbers are none below zero, and add up to one along some axis, be it the wrong one."""
    sums = (x.sum(axis) for axis in range(x.dim()) if x.size(axis) > 1)
    return not bool((x < 0).any()) and any(near(one, torch.ones_like(one), MEASURED) for one in sums)


def _averages(weights: Tensor, given: list[Tensor]) -> Iterator[Tensor]:
    """Give the averages of all tokens that the weights may be of, of the last that were handed over first."""
    weights = weights[:, None] if weights.dim() == 2 else weights.mT if weights.size(-1) == 1 else weights
    batch, keys, lengths = len(weights), weights.size(-1), {n for x in given if x.dim() == TOKENS for n in x.shape[:2]}
    if weights.dim() == TOKENS + 1 and weights.size(1) in lengths and weights.size(2) not in lengths:
        weights = weights.transpose(1, 2)  # heads behind the queries
    for x in given[::-1]:
        if x.is_floating_point() and x.dim() == TOKENS and sorted((batch, keys)) == sorted(x.shape[:2]):
            tokens = x if x.shape[:2] == (batch, keys) else x.transpose(0, 1)
            if weights.dim() == TOKENS:
                yield weights @ tokens
            heads = tokens.unflatten(-1, (weights.size(1), -1)).transpose(1, 2)
            yield (weights @ heads).transpose(1, 2).flatten(2)
