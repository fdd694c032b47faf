"""Every right part that is changed: norms, feed-forwards, positions and functions that build masks."""

import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import ModuleType

from equivalence_tests.checker.zoo import builders
from equivalence_tests.checker.zoo import parts as zoo
from equivalence_tests.wrong.right import Row
from equivalence_tests.wrong.right import right_of as right
from equivalence_tests.wrong.sources import WIDTH, Right, text_of

__all__ = ["rights"]

X, INNER = ("x:tokens",), 20
ROWS: tuple[Row, ...] = (
    ("GainBiasLayerNorm", {"d_model": WIDTH}, X),
    ("PaperFeedForward", {"d_model": WIDTH, "d_ff": INNER}, X),
    ("GeluFeedForward", {"d_model": WIDTH, "d_ff": INNER}, X),
    ("PaperPositionalEncoding", {"d_model": WIDTH}, X),
    ("ConcatenatedPositionalEncoding", {"d_model": WIDTH}, X),
)
STYLES: tuple[Row, ...] = (
    ("RMSNorm", {"dim": WIDTH}, ("hidden_states:tokens",)),
    ("ScaleNorm", {"dim": WIDTH}, X),
    ("GatedFeedForward", {"dim": WIDTH, "hidden_dim": INNER}, X),
    ("PreNormFeedForward", {"dim": WIDTH, "hidden_dim": INNER}, X),
    ("LearnedPositionalEncoding", {"vocab_size": 32, "d_model": WIDTH}, ("ids:ids",)),
    ("RotaryPositionalEncoding", {"dim": WIDTH}, X),
    ("layer_norm", {}, ("x:tokens gamma:vector beta:vector",)),
    ("rms_norm", {}, ("x:tokens weight:vector",)),
    ("feed_forward", {}, ("x:tokens w1:matrix b1:vector w2:matrix b2:vector",)),
)
BUILDERS: tuple[Row, ...] = (
    ("subsequent_mask", {}, ("size:length",)),
    ("square_subsequent_mask", {}, ("sz:length",)),
    ("finite_causal_mask", {}, ("q_len:length k_len:longer",)),
    ("key_padding_mask", {}, ("tokens:ids",)),
    ("cross_pad_mask", {}, ("seq_q:ids seq_k:ids",)),
    ("target_mask", {}, ("tgt:ids pad:two",)),
    ("mask_from_lengths", {}, ("lengths:lengths",)),
    ("window_mask", {}, ("size:length window:two",)),
    ("prefix_mask", {}, ("size:length prefix_len:two device:cpu",)),
)
TESTS = "equivalence_tests.checker.parts.test_part_equivalents"


@cache
def rights() -> tuple[Right, ...]:
    """List them all; what the tests hold is left out where the tests are not installed."""
    return tuple(_listed())


def _listed() -> Iterator[Right]:
    for room, module, rows in (("parts", zoo, ROWS), ("masks", builders, BUILDERS), ("parts", _tests(), STYLES)):
        source = "" if module is None else inspect.getsource(module)
        yield from (right(room, row, text_of(source, row[0])) for row in rows if source)


def _tests() -> ModuleType | None:
    try:
        return import_module(TESTS)
    except ModuleNotFoundError:
        return None
