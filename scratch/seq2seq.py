"""The whole model of the paper: token ids in, logits out."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scratch import masks, validation
from scratch.decoding import Ending, LayerCache, beam_search, greedy_decode, in_inference_mode, new_cache
from scratch.layers import TransformerEncoderLayer, given
from scratch.paths import are_plain
from scratch.positional import Layout, PositionalEncoding
from scratch.transformer import Transformer, TransformerEncoder

__all__ = ["Seq2SeqTransformer"]


class Seq2SeqTransformer(nn.Module):
    """Read a source sentence, and say for each place of a target sentence which token comes next.

    memory = Encoder(sqrt(d_model) * E_src[src_ids] + PE)

    logits = Decoder(sqrt(d_model) * E_tgt[tgt_ids] + PE, memory) Wᵀ

    Which places are padding is read off the ids: nobody looks at ``pad_id``, neither in the source nor in the target,
    and no target token looks at a later one.

    Args:
        src_vocab_size: Number of tokens of the source language.
        tgt_vocab_size: Number of tokens of the target language.
        d_model: Width of the embeddings and of every layer.
        nhead: Number of heads; divides d_model unless both head sizes are given.
        num_encoder_layers: Number of encoder layers.
        num_decoder_layers: Number of decoder layers.
        dim_feedforward: Width of the hidden layer of the feed-forward networks.
        dropout: Probability of dropping: embeddings with their positions, attention weights, hidden units, and what is
            added to the residual.
        activation: "relu", "gelu" or a function.
        layer_norm_eps: Epsilon of the LayerNorms.
        norm_first: LayerNorm before each sub-layer instead of after its residual.
        bias: Whether linear layers, attentions and LayerNorms have biases; the last projection has none.
        max_len: Number of positions: the greatest length of source and target.
        pad_id: The token of both languages that fills a row up.
        start_id: The target token that ``generate`` starts with.
        end_id: The target token that ends a sentence.
        positional: Layout of the positional encoding, "interleaved" or "concatenated".
        scale_embeddings: Multiply embeddings by sqrt(d_model). They are drawn from N(0, 1 / d_model) then, and from
            N(0, 1) otherwise, so that what enters the encoder has unit variance either way.
        tie_weights: Let the last projection share its weights with the target embedding, which is then drawn from
            N(0, 1 / d_model) in any case.
        qk_head_dim: d_k; d_model / nhead if not given.
        v_head_dim: d_v; d_model / nhead if not given.
        device: Where the parameters live.
        dtype: Their dtype.

    Raises:
        ValueError: For sizes that do not fit, an unknown activation or layout, or special tokens that are outside of
            the vocabulary; pad_id must differ from start_id and end_id.

    In torch.nn: only the parts: ``nn.Embedding``, ``nn.Transformer`` and ``nn.Linear``.

    Source: Vaswani et al. 2017, figure 1 and section 3.4.

    >>> import torch
    >>> model = Seq2SeqTransformer(11, 13, d_model=12, nhead=3, num_encoder_layers=1, num_decoder_layers=1)
    >>> src_ids = torch.tensor([[5, 3, 7], [4, 0, 0]])  # 0 is padding
    >>> model(src_ids, tgt_ids=torch.tensor([[1, 8], [1, 6]])).shape
    torch.Size([2, 2, 13])
    >>> model.eval().generate(src_ids, max_len=4).shape[0]
    2
    """

    layer_class: ClassVar[type[nn.Module]] = TransformerEncoderLayer
    encoder_class: ClassVar[type[nn.Module]] = TransformerEncoder
    transformer_class: ClassVar[Any] = Transformer

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
            "qk_head_dim": qk_head_dim,
            "v_head_dim": v_head_dim,
            **factory,
        }
        self.pad_id, self.start_id, self.end_id = pad_id, start_id, end_id
        self.embedding_scale = math.sqrt(d_model) if scale_embeddings else 1.0
        self.src_embedding = nn.Embedding(src_vocab_size, d_model, **factory)
        self.tgt_embedding = nn.Embedding(tgt_vocab_size, d_model, **factory)
        self.positional_encoding = PositionalEncoding(d_model, max_len, dropout, positional, **factory)
        encoder_norm = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **factory)
        encoder = self._encoder(self.layer_class(d_model, nhead, **arguments), num_encoder_layers, encoder_norm)
        self.transformer = self.transformer_class(
            d_model, nhead, num_decoder_layers=num_decoder_layers, custom_encoder=encoder, **arguments
        )
        self.projection = nn.Linear(d_model, tgt_vocab_size, bias=False, **factory)
        self._reset_embeddings(scale_embeddings, tie_weights)

    def _encoder(self, layer: nn.Module, num_layers: int, norm: nn.Module) -> nn.Module:
        """Without nested tensors, which the encoder that Transformer builds by itself would use, or warn about."""
        return self.encoder_class(layer, num_layers, norm, enable_nested_tensor=False)

    def _reset_embeddings(self, scale_embeddings: bool, tie_weights: bool) -> None:
        if tie_weights:
            self.projection.weight = self.tgt_embedding.weight
        std = self.transformer.d_model**-0.5 if scale_embeddings or tie_weights else 1.0
        for embedding in (self.src_embedding, self.tgt_embedding):
            nn.init.normal_(embedding.weight, std=std)

    def forward(self, src_ids: Tensor, tgt_ids: Tensor) -> Tensor:
        """Score every token of the target language as the one that follows each place of the target.

        Args:
            src_ids: (batch, src_len).
            tgt_ids: (batch, tgt_len): the start token and, in training, the target without its last token.

        Returns:
            Logits, (batch, tgt_len, tgt_vocab_size). At padded places they are finite and mean nothing.

        Raises:
            ValueError: For ids that are not two-dimensional, of different batches, longer than max_len, or on another
                device than the parameters. Ids outside of the vocabulary are left to ``nn.Embedding``: to look
                for them would wait for the device.
            TypeError: For ids that are neither int64 nor int32.
        """
        validation.check_source_and_target(self, src_ids, tgt_ids)
        return self.decode(tgt_ids, self.encode(src_ids), src_ids)

    def encode(self, src_ids: Tensor) -> Tensor:
        """Read the source.

        Args:
            src_ids: (batch, src_len).

        Returns:
            The memory, (batch, src_len, d_model), 0 at padded places.

        Raises:
            ValueError: As ``forward``.
            TypeError: As ``forward``.
        """
        validation.check_source(self, src_ids)
        src_padding = masks.to_module_mask(masks.from_token_ids(src_ids, self.pad_id))  # (b, src_len)
        memory = self.transformer.encoder(self._embed(self.src_embedding, src_ids), src_key_padding_mask=src_padding)
        return memory.masked_fill(src_padding.unsqueeze(2), 0.0)

    def decode(
        self,
        tgt_ids: Tensor,
        memory: Tensor,
        src_ids: Tensor,
        *,
        cache: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """Score the tokens that may follow each place of the target, against a memory.

        Args:
            tgt_ids: (batch, tgt_len), the whole target so far, with a cache too.
            memory: (batch, src_len, d_model), what ``encode`` made of ``src_ids``.
            src_ids: (batch, src_len); they say which places of the memory are padding.
            cache: What earlier calls with the beginning of this target have left, from ``new_cache``: only tokens that
                it does not hold yet are computed, and are added to it.

        Returns:
            Logits, (batch, tgt_len, tgt_vocab_size); with a cache those of the new tokens only.

        Raises:
            ValueError: As ``forward``, and for a memory of another shape or a target without new tokens.
            TypeError: As ``forward``.
        """
        return self.projection(self._decode(tgt_ids, memory, src_ids, cache))

    def _decode(self, tgt_ids: Tensor, memory: Tensor, src_ids: Tensor, cache: Sequence[LayerCache] | None) -> Tensor:
        validation.check_decode(self, tgt_ids, memory, src_ids, cache)
        earlier_len, tgt_len = 0 if cache is None else cache[0].length, tgt_ids.size(1)
        new_len = tgt_len - earlier_len
        # With a cache, a mask that hides nothing would take time at every step.
        may_leave_out = cache is not None and are_plain(tgt_ids, src_ids)
        paddings = (masks.to_module_mask(masks.from_token_ids(ids, self.pad_id)) for ids in (tgt_ids, src_ids))
        tgt_padding, src_padding = (None if may_leave_out and not x.any() else x for x in paddings)
        return self.transformer.decoder(
            self._embed(self.tgt_embedding, tgt_ids[:, earlier_len:], earlier_len),
            memory,
            tgt_mask=self._later_tokens(new_len, tgt_len, tgt_ids.device),
            tgt_key_padding_mask=tgt_padding,
            memory_key_padding_mask=src_padding,
            tgt_is_causal=new_len != 1,
            **given(cache=cache),
        )

    @staticmethod
    def _later_tokens(new_len: int, tgt_len: int, device: torch.device) -> Tensor | None:
        """Hide later tokens. One new token is the last one and may look at all others: no mask then."""
        if new_len == 1:
            return None
        return masks.to_module_mask(masks.causal(new_len, tgt_len, align="lower_right", device=device))

    def _embed(self, embedding: nn.Embedding, token_ids: Tensor, offset: int = 0) -> Tensor:
        return self.positional_encoding(embedding(token_ids) * self.embedding_scale, offset)

    def _new_cache(self) -> Sequence[LayerCache] | None:
        return new_cache(self.transformer.decoder.num_layers)

    @in_inference_mode
    def generate(
        self,
        src_ids: Tensor,
        max_len: int = 64,
        beam_size: int = 1,
        length_penalty: float = 0.6,
    ) -> Tensor:
        """Translate: build the target token by token, greedily or by beam search.

        Dropout acts in train mode here as everywhere: call ``eval()`` first. The keys and values of earlier tokens are
        remembered, so that each step costs one token's work. The model runs in ``torch.inference_mode``.

        Args:
            src_ids: (batch, src_len).
            max_len: The greatest number of generated tokens, the end token among them.
            beam_size: Number of hypotheses that beam search keeps; 1 is greedy decoding.
            length_penalty: How much beam search favours long hypotheses; see ``scratch.decoding.beam_search``.

        Returns:
            Token ids, (batch, at most max_len), without the start token. A row ends with ``end_id`` if it gets there,
            and is filled up with ``pad_id``, which is not chosen otherwise.

        Raises:
            ValueError: As ``forward``; also for ids outside of the vocabulary, a max_len below 1 or beyond the
                positions, a beam_size below 1 or a negative length_penalty.
            TypeError: As ``forward``.
        """
        ending = Ending(max_len, self.end_id, self.pad_id)
        validation.check_generate(self, src_ids, max_len, beam_size, length_penalty)
        memory = self.encode(src_ids).repeat_interleave(beam_size, dim=0)
        beam_src_ids = src_ids.repeat_interleave(beam_size, dim=0)
        cache = self._new_cache()

        def next_logits(tgt_ids: Tensor) -> Tensor:
            return self.projection(self._decode(tgt_ids, memory, beam_src_ids, cache)[:, -1])

        def reorder(rows: Tensor) -> None:
            for layer in cache or ():
                layer.reorder(rows)

        start = src_ids.new_full((src_ids.size(0), 1), self.start_id)
        if beam_size == 1:
            return greedy_decode(next_logits, start, ending)
        token_ids, _ = beam_search(
            next_logits, start, ending, beam_size=beam_size, length_penalty=length_penalty, reorder=reorder
        )
        return token_ids
