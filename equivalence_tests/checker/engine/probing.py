"""Further calls that show what one call hides: large inputs, other lengths, training, a second tensor."""

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.codes import feature_of, known, source_of, sources_in, token_of
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.contracts.projecting import output_weight
from equivalence_tests.checker.engine.contracts.scores_table import ranks_of
from equivalence_tests.checker.engine.judgement import Judgement
from equivalence_tests.checker.engine.meaning import Evidence
from equivalence_tests.checker.engine.names import Attention, Run
from equivalence_tests.checker.engine.ran import operations_of, unused_fill
from equivalence_tests.checker.engine.same import HIDING, MEASURED, constant_ratio
from equivalence_tests.checker.engine.situations import OF_TOKENS, Situation, situation_of
from equivalence_tests.checker.engine.visibility import (
    OFF_BY_ONE,
    ahead_of,
    met_in,
    pattern_of,
    probed,
    seen_in,
    sides_of_windows,
    triangle_of,
)
from equivalence_tests.checker.engine.vocabulary import CONTRACTIONS, MULTIPLIES, WEIGHS
from equivalence_tests.checker.engine.watching import Operation, storage_of
from equivalence_tests.checker.reach.calling import OF_PIXELS, Trial, columns_of
from equivalence_tests.checker.reach.construction import built_with
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.plans import crossed
from equivalence_tests.checker.reach.proposing import other_options, parameters_of
from equivalence_tests.checker.reach.state import ask, attempt, held_by, prepare, switch_off
from equivalence_tests.checker.reach.tracing import layers_made, tensors_in
from equivalence_tests.checker.reporting.lines import frames_of, is_refusal
from equivalence_tests.checker.reporting.report import Report

LOUD, LOUDEST = 30.0, 1000.0
FORMS = {  # what training drops, if it is no weight
    "query": "softmax(dropout(q) kᵀ) v",
    "key": "softmax(q dropout(k)ᵀ) v",
    "value": "softmax(scores) dropout(v)",
    "output": "dropout(softmax(scores) v)",
}
# How torch's own stacks see whether a mask is causal: they make a triangle.
DETECTS = "torch.nn.modules.transformer._detect_is_causal_mask"
# What speaks for a causal mask, what turns one off, and what leaves it to the caller.
CLAIM = re.compile(r"causal|masked(?!_?(lm|lang|model|im|tok|auto))|auto_?regressive", re.IGNORECASE)
SWITCHED_ON = re.compile(r"^(?!.*mask).*(causal|auto_?regressive)", re.IGNORECASE)
SWITCH = re.compile(r"(?<!pad_)(?<!padding_)mask|causal|decoder|directional|auto_?regressive", re.IGNORECASE)
LEFT_TO_THE_CALLER = re.compile(r"mask|causal|bias|tril|triu|future|decoder|auto_?regressive", re.IGNORECASE)


def loud(situation: Situation) -> list[Departure]:
    """Large inputs show what holds scores down."""
    louder = attempt(partial(situation_of, situation.subject, situation.trial, size=LOUD))
    return [] if louder is None else [d for d in louder.departures if "changed_by" in d.name]


def overflowing(situation: Situation) -> list[Departure]:
    """Exponentials of large scores overflow where the largest is not taken off."""
    louder, returned = situation.inputs.scaled(LOUDEST), list[Tensor]()
    ran = attempt(lambda: operations_of(lambda: returned.extend(situation.trial.tensors(louder))))
    if ran is None or not any(map(_has_overflown, returned)):  # 1 / (1 + exp(-x)) does no harm
        return []
    first = next((op for op in ran if any(_has_overflown(slot.value) for slot in op.outputs)), None)
    if first is None or first.name != "exp":
        return []
    claim = f"With inputs {LOUDEST:g} times as large, the exponential is infinite here, and the output is NaN."
    return [Departure("softmax_overflows", "softmax", first, {"claim": claim})]


def _has_overflown(x: Tensor) -> bool:
    return x.is_floating_point() and bool((x.isnan() | (x == torch.inf)).any())


def missing_keys(situation: Situation) -> list[Departure]:
    """Every query meets every key of its sample."""
    queries, keys = situation.inputs.query.size(1), situation.inputs.key.size(1)
    for judgement in situation.found.judgements:
        attention, tables = judgement.attention, [part.table for part in judgement.attention.parts]
        over = all(bool((t.query % queries == t.key % keys).all()) for t in tables) and queries == keys > 1
        if over and any(bool((t.query != t.key).any()) for t in tables):
            return [Departure("attention_over_batch", "product", attention.first)]
        met = met_in(judgement)
        asking = met.any(1)
        learnt = not bool(met[:, : len(situation.inputs.key) * keys].any())
        if learnt or _rows_are_samples(situation) or int(met.sum()) >= int(asking.sum()) * keys:
            continue
        drawn = situation.plan.layout in OF_PIXELS or "=width" in situation.plan.given
        sides = sides_of_windows(met, queries, columns_of(queries) if drawn else 1)
        if sides and (evidence := Evidence(judgement, situation.subject.module).width_named(sides)):
            return [Departure("own_mask", "mask", attention.first, evidence=evidence)]
        return [Departure("key_tokens_missing", "product", _cutting(attention))]
    return []


def _rows_are_samples(situation: Situation) -> bool:
    """Whether the rows of matrices never meet: they are samples of one token each."""
    tables = [part.table for judgement in situation.found.judgements for part in judgement.attention.parts]
    return situation.plan.layout == "l e" and all(torch.equal(table.query, table.key) for table in tables)


def _cutting(attention: Attention) -> Operation:
    """The first operation that leaves tokens of the keys out; the product, where none is seen to."""
    names = attention.run.names
    for source in {int(x) for p in attention.parts for x in source_of(p.product.right).unique()}:
        whole = len(token_of(names.sources[source].codes).unique())
        for operation, codes, _ in names.carrying([source], before=attention.first.index):
            fewer = len(token_of(codes[known(codes)]).unique()) < whole and len(operation.outputs) == 1
            if fewer and len(feature_of(codes).unique()) == len(feature_of(names.sources[source].codes).unique()):
                return operation
    return attention.first


def query_by_query(situation: Situation) -> list[Departure] | None:
    """What is wrong in a causal mask where each query has a product of its own; None where none of it is causal."""
    judgement, (batch, length) = situation.judgement, situation.inputs.query.shape[:2]
    if judgement is None or not situation.plan.self_attention:
        return None
    parts = judgement.attention.parts
    if not 2 <= len(parts) <= len(judgement.models) or any(int(part.table.rank_query.max()) for part in parts):
        return None
    sees, ahead = seen_in(judgement, batch * length), ahead_of(batch * length)
    sample = torch.arange(batch * length) // length
    same = sample[:, None] == sample
    name = "" if bool(sees[~same].any()) else pattern_of(sees[same], ahead[same])
    if name not in OFF_BY_ONE:
        return [] if name == "causal" else None
    lows = ((op, value) for part in parts for op, _, value in part.steps(judgement.attention.run))
    hiding = next((op for op, value in lows if bool((value < -HIDING).any())), None)
    return [Departure(name, "mask", hiding or _cutting(judgement.attention))]


def other_length_departures(situation: Situation) -> list[Departure]:
    """Keys may be more or fewer than queries wherever they are given apart."""
    lengths, trial = situation.trial.sizes, situation.trial
    # A causal mask of its own has one length, and images that attend to each other are as large as each other.
    own = situation.plan.of_one_length or situation.hides_by_itself or situation.plan.layout in OF_PIXELS
    others = [role for _, role in situation.plan.roles if role not in OF_TOKENS and role[0] not in "=["]
    guessed = bool(others) and not situation.plan.named
    if own or guessed or lengths.query_len != lengths.key_len or situation.subject.adapter.call:
        return []
    parts = situation.judgement.attention.parts if situation.judgement is not None else []
    if any(ranks_of(part)[3] != lengths.key_len for part in parts):  # keys of another tensor are joined to these
        return []
    error = ask(lambda: trial.returned(trial.inputs(key_len=lengths.query_len + 2))).error
    if error is None or is_refusal(error) or _rows_are_samples(situation) or _meets_positions(situation, error):
        return []
    facts = {"said": said(error), "claim": f"With {lengths.query_len + 2} keys the call raises {said(error)}"}
    return [Departure("other_lengths_crash", "project", None, facts, frames=frames_of(error))]


def _meets_positions(situation: Situation, error: Exception) -> bool:
    """Whether the line that raises takes what is made of no argument for each position: a window, a bias or angles."""
    run, length, line = situation.found.run, situation.trial.sizes.query_len, frames_of(error)[:1]
    taken = (pair for op in run.operations if op.frames[:1] == line for pair in zip(op.inputs, op.origins, strict=True))
    made = [slot for slot, bits in taken if not any(name.startswith("arg:") for name in run.recorder.named(bits))]
    return any(length in slot.value.shape for slot in made)


def in_training(situation: Situation, report: Report) -> list[Departure]:
    """Dropout drops the weights, not the scores, and scales up what it leaves; a layer that drops nothing is noted."""
    module, judgement = situation.subject.module, situation.judgement
    if module is None or judgement is None or judgement.blocked():
        return []
    module.train()
    run = attempt(partial(situation.call.run, situation.found.patches))
    module.eval()
    if run is None:
        return []
    idle = torch.equal(*(next(tensors_in((one.output,))) for one in (run, situation.found.run)))
    drops = any(isinstance(one, nn.Dropout) and one.p > 0 for one in module.modules())
    if idle and drops and not situation.found.patches:
        report.notes.append("there is a dropout layer, but nothing goes through it: training drops nothing")
    if (overwritten := _overwritten(situation, run)) is not None:
        return [overwritten]
    found = (_dropout(situation.found.run, run, part.number) for part in judgement.attention.parts)
    wrong = [one for one in found if one is not None] or list(_beside_weights(situation.found.run, run, judgement))
    return wrong[:1]


def _overwritten(situation: Situation, run: Run) -> Departure | None:
    """What writes over a tensor that gradients need, where the call runs and they cannot be computed."""
    trial, module = situation.trial, situation.subject.module
    assert module is not None  # it is in training
    learnt = list(module.parameters())
    module.train()
    with torch.enable_grad():
        answer = ask(lambda: torch.autograd.grad(trial.output(trial.inputs()).sum(), learnt, allow_unused=True))
    module.eval()
    raised = str(answer.error)
    if "modified by an inplace operation" not in raised:
        return None
    needed = re.search(r"output \d+ of ([A-Za-z]+?)(Backward\d*)?,", raised)
    made = [op for op in run.operations if needed and op.name.replace("_", "") == needed[1].lower()]
    memory = {storage_of(slot.tensor): op.index for op in made for slot in op.outputs}
    inplace = ((op, memory.get(storage_of(op.outputs[0].tensor))) for op in run.operations if op.inplace)
    writes = [op for op, index in inplace if index is not None and op.index > index]
    claim = f"In training, backward raises: {raised.partition(':')[0]}."
    return Departure("gradients_fail", "dropout", writes[0] if writes else None, {"claim": claim})


def _dropout(evaluated: Run, trained: Run, number: int) -> Departure | None:
    """What is wrong in how training drops the scores or weights that a product gives."""
    weighing = [op for op, *_ in trained.names.carrying([number]) if op.name in WEIGHS]
    weighed = min((op.index for op in weighing), default=0)
    for operation, kept, count in _dropping(evaluated, trained, [number]):
        made = (trained.graph.ancestors(op.inputs[0], op.index) for op in weighing)
        if "dropout" in operation.name and any(operation in before for before in made):
            claim = f"In training, {count - len(kept)} of {count} scores became 0 here, before the softmax."
            return Departure("dropout_on_scores", "dropout", operation, {"claim": claim})
        stays = operation.index > weighed > 0 and bool((kept == 1).all())
        if stays and not _is_scaled_later(trained, number, operation):
            claim = f"In training, {count - len(kept)} of {count} weights became 0 here, and the others stayed."
            return Departure("dropout_not_rescaled", "dropout", operation, {"claim": claim})
    return None


def _is_scaled_later(run: Run, number: int, before: Operation) -> bool:
    """Whether one number multiplies all weights after an operation."""
    steps = (one for one in _changes(run, [number], before.index) if one[0].name in MULTIPLIES)
    ratios = (constant_ratio(given, taken) for _, taken, given in steps)
    return any(ratio is not None and abs(ratio - 1) > MEASURED for ratio in ratios)


def _beside_weights(evaluated: Run, trained: Run, judgement: Judgement) -> Iterator[Departure]:
    """Name what training drops between the projections in the place of the weights."""
    attention, sides = judgement.attention, defaultdict[str, set[int]](set)
    for part in attention.parts:
        for role, (codes, _) in part.sides.items():
            sides[FORMS[role]] |= {*sources_in(codes)}
    sides[FORMS["output"]] = {*attention.context_sources}
    too = any(True for part in attention.parts for _ in _dropping(evaluated, trained, [part.number]))
    for have, numbers in sides.items():
        returned = have == FORMS["output"] and not output_weight(attention)
        for operation, kept, count in _dropping(evaluated, trained, numbers) if not (too and returned) else ():
            facts = {"have": have, "claim": f"In training, {count - len(kept)} of {count} numbers became 0 here."}
            said = "the weights are dropped too" if too else "the output is dropped" if returned else ""
            if have == FORMS["output"]:  # another way to regularise, which changes no number in eval
                said = said or "dropout is applied to the averaged values instead, and in training alone"
            yield Departure("dropout_not_on_weights", "dropout", operation, facts, evidence=said)


def _dropping(evaluated: Run, trained: Run, numbers: Collection[int]) -> Iterator[tuple[Operation, Tensor, int]]:
    """List what makes some elements of these sources zero in training alone, with the factors of the others."""
    hidden = {operation.frames for operation, *_ in _zeroing(evaluated, numbers)}
    yield from (one for one in _zeroing(trained, numbers) if one[0].frames not in hidden)


def _changes(run: Run, numbers: Collection[int], after: int = -1) -> Iterator[tuple[Operation, Tensor, Tensor]]:
    """List what happens to elements of these sources: each operation, with the numbers that it takes and gives."""
    for operation, _, given in run.names.carrying(numbers, after):
        taken = (slot.value for slot, _ in run.names.taken(operation) if slot.value.shape == given.shape)
        yield operation, next(taken, given), given


def _zeroing(run: Run, numbers: Collection[int]) -> Iterator[tuple[Operation, Tensor, int]]:
    for operation, before, after in _changes(run, numbers):
        if operation.name not in CONTRACTIONS and bool(((after == 0) & (before != 0)).any()):
            yield operation, after[after != 0] / before[after != 0], after.numel()


def crossing(situation: Situation) -> list[Departure]:
    """With the second tensor that may be left out."""
    if not situation.plan.self_attention or situation.subject.adapter.call is not None:
        return []
    trial = crossed(situation.trial)
    found = situation_of(situation.subject, trial).departures if trial is not None else []
    unused = [one for one in found if one.name == "memory_unused"]
    return [one for one in found if one not in unused] if unused and _crosses_by_an_option(situation) else found


def _crosses_by_an_option(situation: Situation) -> bool:
    """Whether some option of the constructor makes the class attend to a second tensor, as its defaults do not."""
    for name, value in other_options(type(situation.subject.module)):
        for other, _ in built_with(type(situation.subject.module), **{name: value}):
            trial = crossed(replace(situation.trial, function=prepare(other, situation.trial.dtype)))
            departures = situation_of(situation.subject, trial).departures if trial is not None else [None]
            if not any(one is None or one.name == "memory_unused" for one in departures):
                return True
    return False


def made_in_forward(trial: Trial) -> list[Departure]:
    """Layers with weights that every call makes anew."""
    made = layers_made(lambda: trial.returned(trial.inputs(seed=1)))
    if not made:
        return []
    name = "norm_fresh_in_forward" if set(made) == {"LayerNorm"} else "layer_made_in_forward"
    claim = f"Each call makes {' and '.join(sorted(made))} anew: none of its weights is a parameter of the module."
    return [Departure(name, "project", None, {"claim": claim}, frames=next(iter(made.values())))]


def never_causal(situation: Situation) -> list[Departure]:
    """A causal mask that the code speaks of, where every token sees the future."""
    module, judgement, trial = situation.subject.module, situation.judgement, situation.trial
    if module is None or judgement is None or not situation.plan.self_attention:
        return []
    if any(bool(hidden.any()) for hidden in judgement.hidden) or any(d.stage == "mask" for d in judgement.departures):
        return []
    with torch.no_grad():
        claim = causal_claim(module, lambda: trial.returned(situation.inputs))
    last = situation.inputs.query.size(1) - 1
    if not claim or not bool(probed(trial, last + 1, {}, [last])[:, :-1].any()):
        return []
    ran, triangles = situation.found.run.operations, {storage_of(x) for x in _triangles(module).values()}
    reads = (op for op in ran if not triangles.isdisjoint(storage_of(slot.tensor) for slot in op.inputs))
    place = unused_fill(ran) or next(reads, judgement.attention.first)
    return [Departure("causal_mask_never_used", "mask", place, {"claim": claim})]


def _triangles(module: nn.Module) -> dict[str, Tensor]:
    """The causal masks that a module keeps, by their paths."""
    return {name: x for name, x in held_by(module).items() if isinstance(x, Tensor) and triangle_of(x)}


def causal_claim(module: nn.Module, call: Callable[[], Any]) -> str:
    """Say what shows that a causal mask is intended; "" if nothing does, or if whoever calls it decides.

    Evidence is a switch that is on, a triangle that the instance keeps or that forward makes, or the name of the class.
    A switch that is off leaves the causal mask to the caller, and so does a mask argument, unless a triangle that is
    kept takes part without it.
    """
    with mock.patch(DETECTS, return_value=False):
        kept, ran = _triangles(module), operations_of(call)
    taken = {storage_of(slot.tensor) for operation in ran for slot in operation.inputs}
    takes_part = any(storage_of(x) in taken for x in kept.values())
    if any(LEFT_TO_THE_CALLER.search(p.name) for p in parameters_of(module)) and not takes_part:
        return ""
    switched_on = next((name for name, x in vars(module).items() if x is True and SWITCHED_ON.search(name)), "")
    if switched_on:
        return f"self.{switched_on} is True"
    arguments = inspect.signature(type(module)).parameters.values()
    if any(SWITCH.search(p.name) and p.default is not True for p in arguments) or switch_off(module, SWITCH):
        return ""
    if kept:
        return f"self.{next(iter(kept))} is a triangle"
    cut = [slot.value for op in ran if op.name in ("tril", "triu") for slot in op.outputs]
    if any(map(triangle_of, cut)):
        return "forward makes a triangle"
    if any(x.dtype == torch.bool and not x.any() for x in cut):
        return "forward cuts a triangle out of a mask that hides nothing"
    name = type(module).__name__
    return f"it is called {name}" if CLAIM.search(name) else ""
