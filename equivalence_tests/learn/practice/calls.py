"""The calls that exercises are tried in: float64, every axis of its own size, so that no two can be mixed up unseen."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.instruments.weights import randomize_parameters
from equivalence_tests.learn.practice.exercise import Call, drawn

BATCH, HEADS, QUERIES, KEYS, HEAD_DIM = 2, 3, 5, 7, 11
WIDTH = HEADS * HEAD_DIM


def plain() -> Iterator[Call]:
    """Give queries, keys and values, and then scores whose exponentials overflow."""
    inputs = _inputs(QUERIES, KEYS)
    yield Call("5 queries, 7 keys", inputs)
    yield Call("scores of many hundreds", {**inputs, "q": inputs["q"] * 1000})


def padded() -> Iterator[Call]:
    """Give as many queries as keys, with padding inside and at the end."""
    is_real = torch.tensor([[1, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 0, 1, 1]]).bool()
    yield Call("padding inside and at the end", {**_inputs(KEYS, KEYS), "is_real": is_real})


def short_queries() -> Iterator[Call]:
    """Give as many queries as keys, and then fewer."""
    yield Call("7 queries, 7 keys", _inputs(KEYS, KEYS))
    yield Call("5 queries, the last of 7 tokens", _inputs(QUERIES, KEYS))


def dropping() -> Iterator[Call]:
    """Give a training and an evaluation call."""
    yield Call("outside of training", {**_inputs(QUERIES, KEYS), "dropout_p": 0.3, "training": False})
    yield Call("in training", {**_inputs(QUERIES, KEYS), "dropout_p": 0.3, "training": True}, is_random=True)


def multi_head() -> Iterator[Call]:
    """Give a sequence, and an attention whose ``batch_first`` is torch's default."""
    yield Call("2 samples of 5 tokens", {"x": drawn(BATCH, QUERIES, WIDTH, seed=0), "attention": _attention()})


def two_masks() -> Iterator[Call]:
    """Give a batch-first attention, and padding at the end."""
    is_real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    x = drawn(BATCH, QUERIES, WIDTH, seed=0)
    yield Call("padding at the end", {"x": x, "is_real": is_real, "attention": _attention(batch_first=True)})


def blind_rows() -> Iterator[Call]:
    """Give a mask in which two of the queries see nothing."""
    may_attend = drawn(QUERIES, KEYS, seed=3) > 0
    may_attend[[1, 3]] = False
    yield Call("2 of 5 queries see no key", {**_inputs(QUERIES, KEYS), "may_attend": may_attend})


def one_layer() -> Iterator[Call]:
    """Give the parts of a layer."""
    parts: dict[str, nn.Module] = {
        "attention": nn.Linear(WIDTH, WIDTH),  # the wiring is what counts
        "feed_forward": nn.Sequential(nn.Linear(WIDTH, 13), nn.ReLU(), nn.Linear(13, WIDTH)),
        "norm1": nn.LayerNorm(WIDTH),
        "norm2": nn.LayerNorm(WIDTH),
    }
    for seed, part in enumerate(parts.values()):
        randomize_parameters(part.double(), seed=seed)
    yield Call("2 samples of 5 tokens", {"x": drawn(BATCH, QUERIES, WIDTH, seed=9), **parts})


def encoder_sizes() -> Iterator[Call]:
    """Give the sizes of an encoder."""
    yield Call("2 layers", {"width": WIDTH, "num_heads": HEADS, "ff_dim": 13, "num_layers": 2})


def run_encoder(encoder: Any) -> Any:
    """Randomise what was built, and run it on two samples."""
    randomize_parameters(encoder.double(), seed=0)
    torch.manual_seed(0)
    return encoder(drawn(BATCH, QUERIES, WIDTH, seed=9))


def decoding() -> Iterator[Call]:
    """Give a prompt, one new token, and three new tokens at once."""
    past = drawn(BATCH, HEADS, 4, HEAD_DIM, seed=3), drawn(BATCH, HEADS, 4, HEAD_DIM, seed=4)
    yield Call("a prompt of 4 tokens", {**_inputs(4, 4), "past": None})
    yield Call("1 new token after 4", {**_inputs(1, 1), "past": past})
    yield Call("3 new tokens after 4", {**_inputs(3, 3), "past": past})


def shared_keys() -> Iterator[Call]:
    """Give six heads of queries and two of keys and values."""
    keys = (drawn(BATCH, 2, KEYS, HEAD_DIM, seed=seed) for seed in (1, 2))
    q = drawn(BATCH, 6, QUERIES, HEAD_DIM, seed=0)
    yield Call("6 query heads, 2 key heads", {"q": q, **dict(zip("kv", keys, strict=True))})


def tiled() -> Iterator[Call]:
    """Give scores of a usual size, and large ones."""
    yield Call("7 keys in tiles of 3", {**_inputs(QUERIES, KEYS), "tile": 3})
    inputs = _inputs(QUERIES, KEYS)
    yield Call("scores of many hundreds", {**inputs, "q": inputs["q"] * 1000, "tile": 3})


def halves() -> Iterator[Call]:
    """Give keys and values in two uneven parts."""
    yield Call("7 keys, split after 3", {**_inputs(QUERIES, KEYS), "split": 3})


def _inputs(query_len: int, key_len: int) -> dict[str, Tensor]:
    lengths = zip("qkv", (query_len, key_len, key_len), strict=True)
    return {name: drawn(BATCH, HEADS, size, HEAD_DIM, seed=seed) for seed, (name, size) in enumerate(lengths)}


def _attention(batch_first: bool = False) -> nn.MultiheadAttention:
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first).double()
    randomize_parameters(attention, seed=0)
    return attention.eval()
