"""What models on token ids are built with and called with."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scratch.validation.basics import (
    ArgumentTypeError,
    ArgumentValueError,
    check_number,
    check_positive,
    check_positive_number,
    check_tensor,
    check_whole,
    quiet_while_tracing,
    shape,
)
from scratch.validation.layers import check_cache_layers

__all__ = [
    "check_beams",
    "check_decode",
    "check_decoding",
    "check_end_and_padding",
    "check_generate",
    "check_ids_in_vocabulary",
    "check_language_model",
    "check_language_model_inputs",
    "check_prompt",
    "check_sampling",
    "check_source",
    "check_source_and_target",
    "check_token_ids",
    "check_vocabularies",
]


def check_decoding(end_id: int | None, pad_id: int | None, max_len: int) -> None:
    """Check what every way of decoding needs."""
    check_positive(max_len=max_len)
    check_end_and_padding(end_id, pad_id)


def check_end_and_padding(end_id: int | None, pad_id: int | None) -> None:
    """Require that a row which ends can be filled up, with another token than the one that ends it."""
    if end_id is None:
        return
    if pad_id is None:
        raise ArgumentValueError(f"pad_id must be given where end_id is, to fill up rows that end, got end_id={end_id}")
    if end_id == pad_id:
        raise ArgumentValueError(f"end_id must differ from pad_id, which is never chosen, got {end_id} for both")


def check_beams(beam_size: int, length_penalty: float) -> None:
    """Check what beam search needs."""
    check_positive(beam_size=beam_size)
    if not 0 <= length_penalty < float("inf"):
        raise ArgumentValueError(
            f"length_penalty must be finite and not negative (0 = long hypotheses are not favoured), "
            f"got {length_penalty}"
        )


def check_vocabularies(src_vocab_size: int, tgt_vocab_size: int, pad_id: int, start_id: int, end_id: int) -> None:
    """Require that the special tokens are in the vocabularies, and that padding is no other token."""
    check_whole(pad_id=pad_id, start_id=start_id, end_id=end_id)
    check_positive(src_vocab_size=src_vocab_size, tgt_vocab_size=tgt_vocab_size)
    sizes = {"src_vocab_size": src_vocab_size, "tgt_vocab_size": tgt_vocab_size}
    for name, token_id in (("pad_id", pad_id), ("start_id", start_id), ("end_id", end_id)):
        for size_name, size in sizes.items():
            if not 0 <= token_id < size and (name == "pad_id" or size_name == "tgt_vocab_size"):
                raise ArgumentValueError(f"{name} must be in 0 ... {size_name} - 1 = {size - 1}, got {token_id}")
    if pad_id in (start_id, end_id):
        raise ArgumentValueError(
            f"pad_id must differ from start_id and end_id, because padding is never looked at, got pad_id={pad_id}, "
            f"start_id={start_id} and end_id={end_id}"
        )


def check_token_ids(name: str, token_ids: Tensor, embedding: Any, max_len: int | None = None) -> None:
    """Check token ids without reading them: kind, rank, length and device."""
    check_tensor(name, token_ids)
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise ArgumentTypeError(f"{name} must hold token ids as int64 or int32, got {token_ids.dtype}")
    if token_ids.dim() != 2:
        raise ArgumentValueError(
            f"{name} must have shape (batch, len), got {token_ids.dim()}-D of shape {shape(token_ids)}"
        )
    if token_ids.numel() == 0:
        raise ArgumentValueError(
            f"{name} must hold at least one row and one token in each, got shape {shape(token_ids)}: torch.nn's "
            f"padding masks cannot be empty"
        )
    if max_len is not None and token_ids.size(1) > max_len:
        raise ArgumentValueError(
            f"{name} must hold at most max_len = {max_len} tokens in a row, the positions that the model was built "
            f"with, got shape {shape(token_ids)}"
        )
    if token_ids.device != embedding.weight.device:
        raise ArgumentValueError(
            f"{name} must be on the device of the parameters, {embedding.weight.device}, got {token_ids.device}"
        )


def check_ids_in_vocabulary(name: str, token_ids: Tensor, size_name: str, vocab_size: int) -> None:
    """Require that every token id is in the vocabulary. This reads them, and so waits for the device."""
    outside = ((token_ids < 0) | (token_ids >= vocab_size)).nonzero()
    if len(outside):
        row, column = outside[0].tolist()
        raise ArgumentValueError(
            f"{name} must hold ids in 0 ... {size_name} - 1 = {vocab_size - 1}, got {int(token_ids[row, column])} "
            f"at [{row}, {column}]"
        )


@quiet_while_tracing
def check_source(model: Any, src_ids: Tensor) -> None:
    """Check what a token-level model encodes."""
    check_token_ids("src_ids", src_ids, model.src_embedding, model.positional_encoding.max_len)


@quiet_while_tracing
def check_source_and_target(model: Any, src_ids: Tensor, tgt_ids: Tensor) -> None:
    """Check the call of a token-level model."""
    check_source(model, src_ids)
    check_token_ids("tgt_ids", tgt_ids, model.tgt_embedding, model.positional_encoding.max_len)
    if src_ids.size(0) != tgt_ids.size(0):
        raise ArgumentValueError(
            f"src_ids and tgt_ids must have the same batch size, got shapes {shape(src_ids)} and {shape(tgt_ids)}"
        )


@quiet_while_tracing
def check_decode(model: Any, tgt_ids: Tensor, memory: Tensor, src_ids: Tensor, cache: Any) -> None:
    """Check what a token-level model decodes."""
    check_source_and_target(model, src_ids, tgt_ids)
    expected = (*src_ids.shape, model.transformer.d_model)
    if memory.shape != expected:
        raise ArgumentValueError(
            f"memory must have shape (batch, src_len, d_model) = {expected}, as src_ids has it, got {shape(memory)}"
        )
    if cache is None:
        return
    check_cache_layers(cache, model.transformer.decoder.num_layers)
    if tgt_ids.size(1) <= cache[0].length:
        raise ArgumentValueError(
            f"tgt_ids must hold the whole target so far, the {cache[0].length} tokens of the cache and new ones after "
            f"them, got shape {shape(tgt_ids)}"
        )


def check_generate(model: Any, src_ids: Tensor, max_len: int, beam_size: int, length_penalty: float) -> None:
    """Check what a token-level model generates from. This reads the ids, and so waits for the device."""
    check_source(model, src_ids)
    check_ids_in_vocabulary("src_ids", src_ids, "src_vocab_size", model.src_embedding.num_embeddings)
    check_beams(beam_size, length_penalty)
    if max_len > model.positional_encoding.max_len:
        raise ArgumentValueError(
            f"max_len must not exceed the {model.positional_encoding.max_len} positions that the model was built with, "
            f"got {max_len}"
        )


def check_language_model(
    vocab_size: int, num_layers: int, pad_id: int | None, end_id: int | None, window: Any, logit_soft_cap: float | None
) -> None:
    """Check what a decoder-only model is built with, beside the sizes of its layers."""
    check_positive(vocab_size=vocab_size, num_layers=num_layers)
    for name, token_id in (("pad_id", pad_id), ("end_id", end_id)):
        if token_id is not None:
            check_whole(**{name: token_id})
            if not 0 <= token_id < vocab_size:
                raise ArgumentValueError(f"{name} must be in 0 ... vocab_size - 1 = {vocab_size - 1}, got {token_id}")
    check_end_and_padding(end_id, pad_id)
    if isinstance(window, Sequence) and len(window) != num_layers:
        raise ArgumentValueError(f"window must be one for all or one for each of {num_layers} layers, got {window}")
    if logit_soft_cap is not None:
        check_positive_number("logit_soft_cap", logit_soft_cap)


def check_language_model_inputs(model: Any, token_ids: Tensor, cache: Any) -> None:
    """Check the call of a decoder-only model."""
    check_token_ids("token_ids", token_ids, model.embedding)
    if cache is None:
        return
    check_cache_layers(cache, len(model.layers))
    if token_ids.size(1) <= cache[0].length:
        raise ArgumentValueError(
            f"token_ids must hold the whole text so far, the {cache[0].length} tokens of the cache and new ones after "
            f"them, got shape {shape(token_ids)}"
        )


def check_prompt(model: Any, prompt_ids: Tensor) -> None:
    """Check what a decoder-only model generates from. This reads the ids, and so waits for the device."""
    check_token_ids("prompt_ids", prompt_ids, model.embedding)
    check_ids_in_vocabulary("prompt_ids", prompt_ids, "vocab_size", model.embedding.num_embeddings)
    if model.pad_id is not None and bool((prompt_ids[:, -1] == model.pad_id).any()):
        row = int((prompt_ids[:, -1] == model.pad_id).nonzero()[0])
        raise ArgumentValueError(
            f"prompt_ids must be padded on the left, because tokens are appended on the right; got a row that ends "
            f"with pad_id = {model.pad_id}: row {row}"
        )


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Check how tokens are drawn; a temperature of 0 takes the likeliest."""
    check_number(temperature=temperature)
    if not 0 <= temperature < float("inf"):
        raise ArgumentValueError(f"temperature must be at least 0 (the likeliest token) and finite, got {temperature}")
    if top_k is not None:
        check_positive(top_k=top_k)
    if top_p is not None:
        check_number(top_p=top_p)
        if not 0 < top_p <= 1:
            raise ArgumentValueError(f"top_p must be greater than 0 and at most 1, got {top_p}")
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise ArgumentValueError(
            f"top_k and top_p need a temperature greater than 0, because nothing is drawn without, got top_k={top_k} "
            f"and top_p={top_p}"
        )
