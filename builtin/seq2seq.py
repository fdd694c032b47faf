"""The whole model of the paper on torch.nn: token ids in, logits out."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from builtin import masks
from builtin.layers import TransformerEncoderLayer
from builtin.transformer import Transformer, TransformerEncoder
from scratch import seq2seq as by_hand
from scratch import validation
from scratch.decoding import Ending, LayerCache, beam_search, greedy_decode
from scratch.documentation import documented_like
from scratch.positional import Layout, PositionalEncoding

__all__ = ["Seq2SeqTransformer"]


@documented_like(by_hand.Seq2SeqTransformer)
class Seq2SeqTransformer(nn.Module):
    """In torch.nn: only the parts: ``nn.Embedding``, ``nn.Transformer`` and ``nn.Linear``. The masks have
    torch.nn's form, chosen so that the logits are the same on and off the fast path.

    Raises:
        ValueError: For sizes that do not fit, an unknown activation or layout, or special tokens that are outside of
            the vocabulary; pad_id must differ from start_id and end_id. Also if a head size is given, because torch.nn
            has no other than d_model / nhead.

    Traps:
        torch.nn takes embeddings and knows nothing of positions: see trap `no_positions`.
        Its default encoder warns about nested tensors, and would wait for the device: see trap `nested_tensor_warning`.
    """

    def __init__(
        self,
        src_vocab_size: int,
        tgt_vocab_size: int,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        norm_first: bool = False,
        bias: bool = True,
        *,
        max_len: int = 5000,
        pad_id: int = 0,
        start_id: int = 1,
        end_id: int = 2,
        positional: Layout = "interleaved",
        scale_embeddings: bool = True,
        tie_weights: bool = False,
        qk_head_dim: int | None = None,
        v_head_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        validation.check_vocabularies(src_vocab_size, tgt_vocab_size, pad_id, start_id, end_id)
        validation.check_positive(num_encoder_layers=num_encoder_layers, num_decoder_layers=num_decoder_layers)
        validation.check_choice("positional", positional, ("interleaved", "concatenated"))
        validation.check_no_head_dims(qk_head_dim, v_head_dim)
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        arguments: dict[str, Any] = {
            "dim_feedforward": dim_feedforward,
            "dropout": dropout,
            "activation": activation,
            "layer_norm_eps": layer_norm_eps,
            "batch_first": True,
            "norm_first": norm_first,
            "bias": bias,
            **factory,
        }
        self.pad_id, self.start_id, self.end_id = pad_id, start_id, end_id
        self.embedding_scale = math.sqrt(d_model) if scale_embeddings else 1.0
        self.src_embedding = nn.Embedding(src_vocab_size, d_model, **factory)
        self.tgt_embedding = nn.Embedding(tgt_vocab_size, d_model, **factory)
        self.positional_encoding = PositionalEncoding(d_model, max_len, dropout, positional, **factory)
        # Without nested tensors, which the encoder that Transformer builds by itself would use, or warn about.
        encoder_norm = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **factory)
        encoder_layer = TransformerEncoderLayer(d_model, nhead, **arguments)
        encoder = TransformerEncoder(encoder_layer, num_encoder_layers, encoder_norm, enable_nested_tensor=False)
        self.transformer = Transformer(
            d_model, nhead, num_decoder_layers=num_decoder_layers, custom_encoder=encoder, **arguments
        )
        self.projection = nn.Linear(d_model, tgt_vocab_size, bias=False, **factory)
        self._reset_embeddings(scale_embeddings, tie_weights)

    def _reset_embeddings(self, scale_embeddings: bool, tie_weights: bool) -> None:
        if tie_weights:
            self.projection.weight = self.tgt_embedding.weight
        std = self.transformer.d_model**-0.5 if scale_embeddings or tie_weights else 1.0
        for embedding in (self.src_embedding, self.tgt_embedding):
            nn.init.normal_(embedding.weight, std=std)

    def forward(self, src_ids: Tensor, tgt_ids: Tensor) -> Tensor:
        validation.check_source_and_target(self, src_ids, tgt_ids)
        return self.decode(tgt_ids, self.encode(src_ids), src_ids)

    def encode(self, src_ids: Tensor) -> Tensor:
        """In torch.nn: ``nn.TransformerEncoder``.

        Traps:
            Where padding is 0 depends on the path taken: see trap `encoder_zeroes_padding`.
            A source of padding only is NaN on the fast path: see trap `all_keys_padded_fast_path`.
        """
        validation.check_source(self, src_ids)
        src_padding = masks.to_module_mask(masks.from_token_ids(src_ids, self.pad_id))  # (b, src_len)
        memory = self.transformer.encoder(self._embed(self.src_embedding, src_ids), src_key_padding_mask=src_padding)
        # The fast path leaves 0, other numbers or NaN in padded places: from here on it is 0.
        return memory.masked_fill(src_padding.unsqueeze(2), 0.0)

    def decode(
        self,
        tgt_ids: Tensor,
        memory: Tensor,
        src_ids: Tensor,
        *,
        cache: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """In torch.nn: ``nn.TransformerDecoder``.

        Returns:
            Logits, (batch, tgt_len, tgt_vocab_size).

        Raises:
            ValueError: As ``forward``, and for a memory of another shape or a cache, which torch.nn does not have.
            TypeError: As ``forward``.

        Traps:
            There is no cache: see trap `no_cache`.
            Padding of the memory has to be passed once more: see trap `memory_padding_forgotten`.
            A target place that may look at no key is NaN on the fast path: see trap `fully_masked_row`.
        """
        validation.check_no_cache(cache)
        return self.projection(self._decode(tgt_ids, memory, src_ids))

    def _decode(self, tgt_ids: Tensor, memory: Tensor, src_ids: Tensor) -> Tensor:
        validation.check_decode(self, tgt_ids, memory, src_ids, None)
        tgt = self._embed(self.tgt_embedding, tgt_ids)
        # Float masks of the target keep self-attention off the fast path, where a place that may look at no key, such
        # as padding in front, is NaN and hands the NaN on to all that follow.
        tgt_padding = masks.to_score_bias(masks.from_token_ids(tgt_ids, self.pad_id), tgt.dtype)
        return self.transformer.decoder(
            tgt,
            memory,
            tgt_mask=Transformer.generate_square_subsequent_mask(tgt_ids.size(1), tgt.device, tgt.dtype),
            tgt_key_padding_mask=tgt_padding,
            memory_key_padding_mask=masks.to_module_mask(masks.from_token_ids(src_ids, self.pad_id)),
            tgt_is_causal=True,
        )

    def _embed(self, embedding: nn.Embedding, token_ids: Tensor, offset: int = 0) -> Tensor:
        return self.positional_encoding(embedding(token_ids) * self.embedding_scale, offset)

    @torch.no_grad()
    def generate(
        self,
        src_ids: Tensor,
        max_len: int = 64,
        beam_size: int = 1,
        length_penalty: float = 0.6,
    ) -> Tensor:
        """Translate: build the target token by token, greedily or by beam search.

        Dropout acts in train mode here as everywhere: call ``eval()`` first. Each step computes all tokens so far anew.

        Traps:
            The more tokens there are, the more each costs: see trap `no_cache`.
        """
        validation.check_generate(self, src_ids, max_len, beam_size, length_penalty)
        memory = self.encode(src_ids).repeat_interleave(beam_size, dim=0)
        beam_src_ids = src_ids.repeat_interleave(beam_size, dim=0)

        def next_logits(tgt_ids: Tensor) -> Tensor:
            return self.projection(self._decode(tgt_ids, memory, beam_src_ids)[:, -1])

        start = src_ids.new_full((src_ids.size(0), 1), self.start_id)
        ending = Ending(max_len, self.end_id, self.pad_id)
        if beam_size == 1:
            return greedy_decode(next_logits, start, ending)
        token_ids, _ = beam_search(next_logits, start, ending, beam_size=beam_size, length_penalty=length_penalty)
        return token_ids
