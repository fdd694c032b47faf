"""Step by step through the layers: an encoder layer with its norms after or before, and a decoder."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

import scratch
from equivalence_tests.instruments.side_by_side import random_tensor, with_same_weights
from equivalence_tests.learn.page.figures import largest_of, matrices
from equivalence_tests.learn.page.steps import (
    EMBED_DIM,
    FF_DIM,
    KEY_LEN,
    NUM_HEADS,
    QUERY_LEN,
    Quote,
    Side,
    Step,
    View,
    shown,
    step_of,
)
from equivalence_tests.learn.page.tape import Entry, Tape, tape_of
from scratch import masks

__all__ = ["LAYER_WORDS", "decoder_view", "encoder_layer_view"]

LAYER_WORDS = {
    "self_attn": "Each token looks at the tokens of its own sentence.",
    "multihead_attn": "Each token looks at the memory, which is the encoder's output.",
    "add": "The residual connection: the input of the sub-layer is added to its output.",
    "norm1": "LayerNorm: each token's features get mean 0 and variance 1, then a gain and a bias.",
    "norm2": "LayerNorm again, with its own gain and bias.",
    "norm3": "LayerNorm a third time, with its own gain and bias.",
    "norm": "The norm at the end of the stack.",
    "linear1": "The feed-forward network: each token by itself is projected to the hidden units.",
    "relu": "The activation: negative numbers become 0.",
    "gelu": "The activation: each number times the share of a normal distribution that lies below it.",
    "self_attn weights": "How much each token takes from every token: each row adds up to 1.",
    "multihead_attn weights": "How much each token takes from each token of the memory.",
    "linear2": "And back to the width of the model.",
}
LAYER_FILES = ("scratch/layers.py", "scratch/transformer.py", "torch/nn/modules/transformer.py")


def call_encoder_layer(layer: Any, src: Tensor) -> Any:
    """Call either encoder layer."""
    return layer(src)


def call_decoder(decoder: Any, tgt: Tensor, memory: Tensor, may_attend: Tensor) -> Any:
    """Call either decoder."""
    return decoder(tgt, memory, tgt_mask=masks.to_module_mask(may_attend))


def encoder_layer_view(norm_first: bool) -> View:
    """Follow an encoder layer, with the norms after the residuals or before the sub-layers."""
    arguments: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
    sizes = (EMBED_DIM, NUM_HEADS, FF_DIM)
    pair = scratch.TransformerEncoderLayer(*sizes, **arguments), nn.TransformerEncoderLayer(*sizes, **arguments)
    src = random_tensor(1, KEY_LEN, EMBED_DIM, seed=3)
    steps = _layer_steps(*pair, lambda layer: call_encoder_layer(layer, src))
    if norm_first:
        lead = "The norms come before the sub-layers, and the residual stream passes them by."
        return View("pre-norm", "Layer, pre-norm", lead, shown(call_encoder_layer), steps)
    lead = "Attention, then a feed-forward network; after each, the residual and a LayerNorm, as in the paper."
    return View("post-norm", "Layer, post-norm", lead, shown(call_encoder_layer), steps)


def decoder_view() -> View:
    """Follow a decoder of one layer."""

    def build(package: Any) -> Any:
        layer = package.TransformerDecoderLayer(EMBED_DIM, NUM_HEADS, FF_DIM, 0.0, batch_first=True)
        return package.TransformerDecoder(layer, 1, norm=nn.LayerNorm(EMBED_DIM))

    tgt, memory = random_tensor(1, QUERY_LEN, EMBED_DIM, seed=4), random_tensor(1, KEY_LEN, EMBED_DIM, seed=5)
    may_attend = masks.causal(QUERY_LEN)
    steps = _layer_steps(build(scratch), build(nn), lambda decoder: call_decoder(decoder, tgt, memory, may_attend))
    lead = "The target looks at itself under a causal mask, then at the memory, and ends in the stack's own norm."
    return View("decoder", "Decoder", lead, shown(call_decoder), steps)


def _layer_steps(ours: nn.Module, theirs: nn.Module, call: Callable[[Any], Any]) -> tuple[Step, ...]:
    with_same_weights(ours, theirs)
    tapes = [tape_of(partial(call, module), module) for module in (ours.eval(), theirs.eval())]
    return tuple(_layer_step(event, tapes) for event in _events(tapes[0]))


def _events(tape: Tape) -> list[Entry]:
    """Pick what a layer computes: of its parts what they return, and its own sums and activations."""
    events: dict[Any, Entry] = {}
    for number, entry in enumerate(tape.computing):
        part = _part_of(entry)
        # All that an attention does is one event, its last; what is done to masks is none.
        if entry.result.is_floating_point() and entry.result.size(-1) in (EMBED_DIM, FF_DIM):
            events[part if part.endswith("attn") else number] = entry
    return sorted(events.values(), key=tape.entries.index)


def _part_of(entry: Entry) -> str:
    """Name the part of a layer whose operation it is: what an attention calls belongs to the attention."""
    part, attn, _ = entry.module.rpartition("attn")
    return part + attn if attn else entry.module.rpartition(".")[2]


def _layer_step(event: Entry, tapes: Sequence[Tape]) -> Step:
    part = _part_of(event).rpartition(".")[2]
    name = part if part in LAYER_WORDS else event.operation
    wanted = event.result.view(1, -1, event.result.size(-1))
    words = ("batch", "len", "dim_feedforward" if wanted.size(-1) == FF_DIM else "d_model")
    ours, theirs = tapes
    found = ours.found(wanted), theirs.found(wanted)
    made = [tape.made(wanted) for tape in tapes]
    sides = [
        Side((Quote(entry.statement_in(*LAYER_FILES), entry.operation),), matrices(x, words, largest_of(*found)))
        for entry, x in zip(made, found, strict=True)
    ]
    return step_of(name, ("", LAYER_WORDS[name]), words, sides, found)
