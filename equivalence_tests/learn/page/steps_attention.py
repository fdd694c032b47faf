"""Step by step through attention: forward, one step of decoding, backward."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import scratch
from equivalence_tests.instruments.side_by_side import random_tensor
from equivalence_tests.learn.page.figures import Matrix, gap, largest_of, matrices
from equivalence_tests.learn.page.steps import (
    EMBED_DIM,
    HEAD_DIM,
    KEY_LEN,
    QUERY_LEN,
    WORDS,
    Quote,
    Side,
    Step,
    View,
    attention_pair,
    detached,
    quotes_of,
    same_scale,
    shown,
    step_of,
)
from equivalence_tests.learn.page.tape import Tape, backward_tape, tape_of
from scratch import masks
from scratch.decoding import GrowingCache
from scratch.recording import STAGES

__all__ = ["attention_inputs", "attention_view", "backward_view", "decoding_view"]

FORMULAS = {
    "q": (
        "query W_q + b_q, in heads",
        "Each query is multiplied by a matrix, and the result is cut into one piece for each head.",
    ),
    "k": ("key W_k + b_k, in heads", "Each key too, by a matrix of its own."),
    "v": ("value W_v + b_v, in heads", "And each value. The output is made from these."),
    "scores": ("q kᵀ / √head_dim", "Every query meets every key: their dot product says how well the two match."),
    "masked_scores": ("scores + score_bias", "Keys that a query may not look at get −∞; all others keep their scores."),
    "weights": ("softmax(masked_scores)", "Softmax makes each row positive, with a sum of 1; a score of −∞ becomes 0."),
    "context": ("weights v", "Each query takes the mean of the values, weighted by its row of weights."),
    "merged": ("Concat(context₁, …, context_h)", "The heads are put side by side again. No number changes."),
    "output": ("merged W_o + b_o", "One last projection mixes what the heads have found."),
}


# What each is computed from.
OPERANDS = {
    "q": ("query",),
    "k": ("memory",),
    "v": ("memory",),
    "scores": ("q", "k"),
    "masked_scores": ("scores", "score_bias"),
    "weights": ("masked_scores",),
    "context": ("weights", "v"),
    "merged": ("context",),
    "output": ("merged",),
}


def attention_inputs() -> tuple[tuple[scratch.MultiheadAttention, nn.MultiheadAttention], Tensor, Tensor, Tensor]:
    """Give both attentions, query, memory and who may look at whom."""
    query, memory = random_tensor(1, QUERY_LEN, EMBED_DIM, seed=1), random_tensor(1, KEY_LEN, EMBED_DIM, seed=2)
    return attention_pair(batch_first=True), query, memory, masks.causal(QUERY_LEN, KEY_LEN, align="lower_right")


def call_attention(attention: Any, query: Tensor, memory: Tensor, may_attend: Tensor) -> Any:
    """Call either attention."""
    return attention(query, memory, memory, attn_mask=masks.to_module_mask(may_attend))


def attention_view() -> View:
    """Follow one attention from its inputs to its output."""
    pair, query, memory, may_attend = attention_inputs()
    mask = masks.to_module_mask(may_attend)
    stages = detached(scratch.trace_attention(pair[0], query, memory, memory, attn_mask=mask))
    # Without weights scratch goes by the textbook, one equation a line; with them it rounds as torch.nn does.
    textbook = tape_of(partial(pair[0], query, memory, memory, attn_mask=mask, need_weights=False))
    masked = [textbook, tape_of(partial(call_attention, pair[1], query, memory, may_attend))]
    # With a mask torch.nn never forms the bare scores: they are what the same call gives without one.
    bare = [textbook, tape_of(partial(pair[1], query, memory, memory))]
    tensors = {"query": query, "memory": memory, "score_bias": masks.to_score_bias(may_attend, query.dtype), **stages}
    steps = [_attention_step(x, tensors, bare if x == "scores" else masked) for x in STAGES]
    lead = (
        "Each query asks for something, each key says what its token has to offer, and each value is what the token "
        "hands over: the better a query matches a key, the more it takes of that value. Here three queries look at "
        "five keys, with two heads. A causal mask aligns the last query with the last key and hides what comes later. "
        "The left side shows the textbook path, which scratch takes when the weights are not asked for."
    )
    return View("attention", "Attention", lead, shown(call_attention), tuple(steps))


def _attention_step(stage: str, tensors: dict[str, Tensor], tapes: Sequence[Tape]) -> Step:
    wanted, after = tensors[stage], tensors["context"] if stage == "merged" else None
    ours, theirs = tapes
    found = ours.found(wanted), theirs.found(wanted)
    tables = same_scale(stage, found)
    sides = [Side(quotes_of(tape.way_to(wanted, after)), x) for tape, x in zip(tapes, tables, strict=True)]
    operands = {name: _operand(name, tensors[name]) for name in OPERANDS[stage]}
    return step_of(stage, FORMULAS[stage], WORDS[stage], sides, found, operands)


def _operand(name: str, x: Tensor) -> tuple[Matrix, ...]:
    return matrices(
        x, ("query_len", "key_len") if name == "score_bias" else WORDS[name], 1.0 if name == "weights" else None
    )


def call_with_cache(attention: Any, x: Tensor, cache: GrowingCache) -> Any:
    """Attend from the newest token, with what was remembered of the others."""
    return attention(x[:, -1:], x[:, -1:], x[:, -1:], cache=cache, need_weights=False)


def call_without_cache(attention: Any, x: Tensor, may_attend: Tensor) -> Any:
    """Attend from all tokens, of which the last row counts."""
    return attention(x, x, x, attn_mask=masks.to_module_mask(may_attend))


def decoding_view() -> View:
    """Follow one step of decoding: with a cache by hand, all over again in torch.nn."""
    ours, theirs = attention_pair(batch_first=True)
    x, may_attend = random_tensor(1, KEY_LEN, EMBED_DIM, seed=6), masks.causal(KEY_LEN)
    earlier = x[:, :-1]
    full = detached(scratch.trace_attention(ours, x, x, x, attn_mask=masks.to_module_mask(may_attend)))

    def remembering() -> GrowingCache:
        cache = GrowingCache()
        ours(earlier, earlier, earlier, attn_mask=masks.to_module_mask(masks.causal(KEY_LEN - 1)), cache=cache)
        return cache

    cache = remembering()
    ours_tape = tape_of(lambda: call_with_cache(ours, x, cache))
    torch_tape = tape_of(lambda: call_without_cache(theirs, x, may_attend))
    stages = [stage for stage in STAGES if stage != "scores"]  # the newest token may look at all: nothing is masked
    steps = tuple(_decoding_step(stage, full, ours_tape, torch_tape) for stage in stages)
    lead = (
        "A fifth token follows four earlier ones. scratch has kept their keys and values. torch.nn has no cache: "
        "it computes all five rows again, of which only the last is new."
    )
    cache = remembering()
    flops = [_flops(lambda: call_with_cache(ours, x, cache)), _flops(lambda: call_without_cache(theirs, x, may_attend))]
    notes = (
        f"Floating-point operations for this one token, counted by torch: {flops[0]:,} with the cache and "
        f"{flops[1]:,} without, which is {flops[1] / flops[0]:.1f} times as many.",
    )
    call = f"{shown(call_with_cache)}  # scratch\n{shown(call_without_cache)}  # torch.nn"
    return View("decoding", "One step of decoding", lead, call, steps, notes)


def _flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def _decoding_step(stage: str, stages: dict[str, Tensor], ours_tape: Tape, torch_tape: Tape) -> Step:
    full, remembered = stages[stage], stage in ("k", "v")
    context = stages["context"] if stage == "merged" else None
    wanted = full if remembered else full[..., -1:, :]
    ours, theirs = ours_tape.found(wanted), torch_tape.found(full)
    tables = same_scale(stage, (ours, theirs))
    rows = () if remembered else (KEY_LEN - 1,)
    context_row = None if context is None else context[..., -1:, :]
    sides = (
        Side(quotes_of(ours_tape.way_to(wanted, context_row)), tables[0]),
        Side(quotes_of(torch_tape.way_to(full, context)), tables[1], rows),
    )
    kept = theirs if remembered else theirs[..., -1:, :]
    return step_of(stage, FORMULAS[stage], WORDS[stage], sides, (ours, kept))


# Each gradient from those after it: run while the page is built, and compared with what autograd gives.
CHAIN_RULE = {
    "merged": ("d_output @ W_o", "The output's gradient goes back through the last projection."),
    "context": ("d_merged, in heads", "Cut into heads again. No number changes."),
    "weights": (
        "d_context @ v.mT",
        "The gradient of a weight is the dot product of its value with the gradient of the context.",
    ),
    "v": (
        "weights.mT @ d_context",
        "A value gets gradient from every query, in proportion to how much the query looked at it.",
    ),
    "masked_scores": (
        "weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))",
        "Softmax passes on only what differs from the row's weighted mean: weights sum to 1 and cannot all rise.",
    ),
    "q": (
        "d_masked_scores @ k / math.sqrt(head_dim)",
        "A query moves towards the keys that should have scored higher.",
    ),
    "k": ("d_masked_scores.mT @ q / math.sqrt(head_dim)", "A key moves towards the queries that should have found it."),
}


def backward_view() -> View:
    """Follow the gradient back through one attention."""
    pair, query, memory, may_attend = attention_inputs()
    gradient = random_tensor(1, QUERY_LEN, EMBED_DIM, seed=7)
    stages = scratch.trace_attention(pair[0], query, memory, memory, attn_mask=masks.to_module_mask(may_attend))
    names = tuple(CHAIN_RULE)
    found = torch.autograd.grad(stages["output"], [stages[name] for name in names], gradient)
    gradients = dict(zip(names, found, strict=True)) | {"output": gradient}
    tapes = [backward_tape(partial(call_attention, module, query, memory, may_attend), gradient) for module in pair]
    steps = tuple(_backward_step(name, gradients, detached(stages), pair[0], tapes) for name in names)
    lead = (
        "The same attention backwards: from a random gradient of the output back to queries, keys and values. "
        "Next to each gradient is the line of the forward pass that it flows back through."
    )
    call = f"{shown(call_attention)}[0].backward(gradient)"
    return View("backward", "Backward", lead, call, steps, is_code=True)


def _backward_step(
    name: str, gradients: dict[str, Tensor], stages: dict[str, Tensor], attention: Any, tapes: Sequence[Tape]
) -> Step:
    wanted, after = gradients[name], gradients["merged"] if name == "context" else None
    ours, theirs = tapes
    found = ours.found(wanted), theirs.found(wanted)
    tables = [matrices(x, WORDS[name], largest_of(*found)) for x in found]
    sides = [Side(_nodes(tape, wanted, after), x) for tape, x in zip(tapes, tables, strict=True)]
    rule, words = CHAIN_RULE[name]
    if name != "context":  # the same numbers as those of merged
        known = stages | {f"d_{stage}": x for stage, x in gradients.items()}
        by_rule = eval(rule, {"math": math, "W_o": attention.out_proj.weight, "head_dim": HEAD_DIM}, known)
        if gap(by_rule, wanted) != gap(wanted, wanted):
            raise ArithmeticError(f"the chain rule for {name} does not give its gradient: {rule}")
    return step_of(f"d_{name}", (rule, words), WORDS[name], sides, found)


def _nodes(tape: Tape, wanted: Tensor, after: Tensor | None) -> tuple[Quote, ...]:
    """Quote the statement of the forward pass that a gradient came back through, with autograd's name of the step."""
    entry = next(x for x in tape.way_to(wanted, after) if x.node)
    return (Quote(entry.statement, entry.node.removeprefix("torch::autograd::")),)
