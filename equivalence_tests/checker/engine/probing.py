"""Further calls that show what one call hides: large inputs, other lengths, training, a second tensor."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from equivalence_tests.checker.engine.causality import causal_claim
from equivalence_tests.checker.engine.codes import feature_of, known, source_of, sources_in, token_of
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.meaning import Evidence
from equivalence_tests.checker.engine.names import Attention
from equivalence_tests.checker.engine.ran import operations_of, unused_fill
from equivalence_tests.checker.engine.same import HIDING
from equivalence_tests.checker.engine.situations import Situation, situation_of
from equivalence_tests.checker.engine.vocabulary import ADDS, WEIGHS
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.reach.calling import Inputs
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.plans import crossed
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reach.tracing import layers_made
from equivalence_tests.checker.reporting.lines import frames_of, is_refusal

LOUD, LOUDEST = 30.0, 1000.0


def loud(situation: Situation) -> list[Departure]:
    """Large inputs show what holds scores down."""
    louder = attempt(partial(situation_of, situation.subject, situation.trial, size=LOUD))
    return [d for d in louder.departures if "changed_by" in d.name] if louder is not None else []


def overflowing(situation: Situation) -> list[Departure]:
    """Exponentials of large scores overflow where the largest is not taken off."""
    x = situation.inputs
    louder = Inputs(*(LOUDEST * tensor for tensor in (x.query, x.key, x.value)))
    returned: list[Tensor] = []
    ran = attempt(lambda: operations_of(lambda: returned.extend(situation.trial.tensors(louder))))
    if ran is None or not any(map(_has_overflown, returned)):  # 1 / (1 + exp(-x)) does no harm
        return []
    spoilt = (op for op in ran if any(_has_overflown(slot.value) for slot in op.outputs))
    first = next(spoilt, None)
    if first is None or first.name != "exp":
        return []
    claim = f"With inputs {LOUDEST:g} times as large the exponential is infinite here, and NaN comes back."
    return [Departure("softmax_overflows", "softmax", first, {"claim": claim})]


def _has_overflown(x: Tensor) -> bool:
    return x.is_floating_point() and bool((x.isnan() | (x == torch.inf)).any())


def missing_keys(situation: Situation) -> list[Departure]:
    """Every query meets every key of its sample."""
    queries, keys = situation.inputs.query.size(1), situation.inputs.key.size(1)
    for judgement in situation.found.judgements:
        if judgement.over_channels:
            continue
        tables = [part.table for part in judgement.attention.parts]
        over = all(bool((t.query % queries == t.key % keys).all()) for t in tables) and queries == keys > 1
        if over and any(bool((t.query != t.key).any()) for t in tables):
            return [Departure("attention_over_batch", "product", judgement.attention.first)]
        attention = judgement.attention
        pairs = torch.cat(
            [torch.stack([p.table.query * 1024 + p.table.head, p.table.key], -1) for p in attention.parts]
        )
        pairs = pairs.unique(dim=0)
        learnt = int(pairs[:, 1].min()) >= len(situation.inputs.key) * keys
        if learnt or _rows_are_samples(situation) or len(pairs) >= len(pairs[:, 0].unique()) * keys:
            continue
        window = _windows(pairs[:, 0] // 1024, pairs[:, 1], queries)
        settings = Evidence(judgement, situation.subject.module)
        if window and (evidence := settings.width_named({window, window**0.5})):
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
    judgement, length = situation.judgement, situation.inputs.query.size(1)
    attention = judgement.attention if judgement is not None else None
    if judgement is None or attention is None or not situation.plan.self_attention or len(attention.parts) < 2:
        return None
    parts = list(zip(attention.parts, judgement.models, strict=False))
    if len(parts) < len(attention.parts) or any(int(part.table.rank_query.max()) for part, _ in parts):
        return None
    tokens = torch.arange(len(situation.inputs.query) * length)
    same, ahead = tokens[:, None] // length == tokens // length, tokens - tokens[:, None]
    sees = torch.zeros_like(same)
    for part, model in parts:
        seen = ~(model.hidden | model.replaced)
        sees[part.table.query[seen] % len(tokens), part.table.key[seen] % len(tokens)] = True
    patterns = {"": 0, "causal_sees_one_ahead": 1, "causal_cannot_see_itself": -1}
    name = next((name for name, most in patterns.items() if torch.equal(sees, same & (ahead <= most))), None)
    if not name:
        return None if name is None else []
    lows = ((op, value) for part, _ in parts for op, _, value in part.steps(attention.run))
    hiding = next((op for op, value in lows if bool((value < -HIDING).any())), None)
    return [Departure(name, "mask", hiding or _cutting(attention))]


def _windows(query: Tensor, key: Tensor, length: int) -> int:
    """How many tokens see each other and no other, where samples are cut into such windows; 0 where they are not."""
    sees = torch.zeros(2 * [int(query.max(key).max()) + 1], dtype=torch.bool)
    sees[query, key] = True
    apart = torch.equal(query // length, key // length) and bool(sees.diagonal()[query.unique()].all())
    return int(sees.sum(1).max()) if apart and torch.equal(sees.double() @ sees.double() > 0, sees) else 0


def other_length_departures(situation: Situation) -> list[Departure]:
    """Keys may be more or fewer than queries wherever they are given apart."""
    lengths = situation.trial.sizes
    if situation.plan.self_attention or lengths.query_len != lengths.key_len or situation.subject.adapter.call:
        return []
    if _rows_are_samples(situation):
        return []
    trial = situation.trial
    try:
        trial.returned(trial.inputs(key_len=lengths.query_len + 2))
    except Exception as error:  # that is what is asked
        added = _residual_of_keys(situation)
        if added is not None:
            return [Departure("query_key_swapped", "project", added)]
        if is_refusal(error):
            return []
        facts = {"said": said(error), "claim": f"With {lengths.query_len + 2} keys the call raises {said(error)}"}
        return [Departure("other_lengths_crash", "project", None, facts, frames=frames_of(error))]
    return []


def _residual_of_keys(situation: Situation) -> Operation | None:
    """What makes the queries, where what comes out is added to the tensor of the keys: those are the queries then."""
    judgement = situation.judgement
    if judgement is None or len(judgement.first_operands) < 2:
        return None
    names, attention = judgement.attention.run.names, judgement.attention

    def inputs(numbers: Iterable[int]) -> set[int]:
        return {source.number for source in names.made_of(numbers, beyond=True) if source.kind == "input"}

    query, key = (inputs(source.number for source in operand.sources) for operand in judgement.first_operands[:2])
    contexts = set(attention.context_sources)
    for operation in attention.run.operations[attention.end.index :]:
        taken = [sources_in(codes) for _, codes in names.taken(operation)] if operation.name in ADDS else []
        attended = [numbers for numbers in taken if contexts & {s.number for s in names.made_of(numbers, beyond=True)}]
        others = [inputs(numbers) for numbers in taken if numbers not in attended]
        if attended and others == [key] and key.isdisjoint(query):
            made = (source.operation for source in judgement.first_operands[0].sources)
            return next((one for one in made if one is not None), attention.first)
    return None


def in_training(situation: Situation) -> list[Departure]:
    """Dropout drops the weights, not the scores."""
    module, judgement = situation.subject.module, situation.judgement
    if module is None or judgement is None or judgement.blocked():
        return []
    module.train()
    run = attempt(partial(situation.call.run, situation.found.patches))
    module.eval()
    if run is None:
        return []
    for part in judgement.attention.parts:
        steps = [operation for operation, _, _ in run.names.carrying([part.number])]
        weighed = max((step.index for step in steps if step.name in WEIGHS), default=0)
        for step in steps:
            if "dropout" in step.name and step.index < weighed:
                before, after = step.inputs[0].value, step.outputs[0].value
                dropped = int(((after == 0) & (before != 0)).sum())
                claim = f"In training, {dropped} of {after.numel()} scores became 0 here, before the softmax."
                return [Departure("dropout_on_scores", "dropout", step, {"claim": claim})] if dropped else []
    return []


def crossing(situation: Situation) -> list[Departure]:
    """With the second tensor that may be left out."""
    if not situation.plan.self_attention or situation.subject.adapter.call is not None:
        return []
    trial = crossed(situation.trial)
    return situation_of(situation.subject, trial).departures if trial is not None else []


def made_in_forward(situation: Situation) -> list[Departure]:
    """Layers with weights that every call makes anew."""
    made = layers_made(lambda: situation.trial.returned(situation.inputs))
    if not made:
        return []
    name = "norm_fresh_in_forward" if set(made) == {"LayerNorm"} else "layer_made_in_forward"
    claim = f"Each call makes {' and '.join(sorted(made))} anew: none of its weights is a parameter of the module."
    return [Departure(name, "project", None, {"claim": claim}, frames=next(iter(made.values())))]


def _sees_no_future(situation: Situation) -> bool:
    """Whether the outputs before the last stay as they are when the last token changes."""
    inputs = situation.inputs
    before, after = (situation.trial.output(x)[:, :-1] for x in (inputs, inputs.changed(token=-1)))
    return torch.equal(before, after)


def never_causal(situation: Situation) -> list[Departure]:
    """A causal mask that the code speaks of, where every token sees the future."""
    module, judgement = situation.subject.module, situation.judgement
    if module is None or judgement is None or not situation.plan.self_attention:
        return []
    if any(bool(hidden.any()) for hidden in judgement.hidden) or any(d.stage == "mask" for d in judgement.departures):
        return []
    with torch.no_grad():
        claim = causal_claim(module, lambda: situation.trial.returned(situation.inputs))
    if not claim or _sees_no_future(situation):
        return []
    place = unused_fill(situation.found.run.operations) or judgement.attention.first
    return [Departure("causal_mask_never_used", "mask", place, {"claim": claim})]
