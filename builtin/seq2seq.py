"""The whole model of the paper on torch.nn: token ids in, logits out."""

from collections.abc import Sequence

from torch import Tensor

from builtin import masks
from builtin.layers import TransformerEncoderLayer
from builtin.transformer import Transformer, TransformerEncoder
from scratch import seq2seq as by_hand
from scratch import validation
from scratch.caches import LayerCache
from scratch.documentation import documented_like

__all__ = ["Seq2SeqTransformer"]


@documented_like(by_hand.Seq2SeqTransformer)
class Seq2SeqTransformer(by_hand.Seq2SeqTransformer):
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

    layer_class = TransformerEncoderLayer
    encoder_class = TransformerEncoder
    transformer_class = Transformer

    def encode(self, src_ids: Tensor) -> Tensor:
        """In torch.nn: ``nn.TransformerEncoder``. Its fast path leaves 0, other numbers or NaN in padded places, which
        are set to 0 afterwards.

        Traps:
            Where padding is 0 depends on the path taken: see trap `encoder_zeroes_padding`.
            A source of padding only is NaN on the fast path: see trap `all_keys_padded_fast_path`.
        """
        return super().encode(src_ids)

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
        return self.projection(self._decode(tgt_ids, memory, src_ids, None))

    def _decode(self, tgt_ids: Tensor, memory: Tensor, src_ids: Tensor, cache: Sequence[LayerCache] | None) -> Tensor:
        validation.check_decode(self, tgt_ids, memory, src_ids, cache)
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

    def _new_cache(self) -> None:
        """Remember nothing: torch.nn has no cache."""

    def generate(
        self,
        src_ids: Tensor,
        max_len: int = 64,
        beam_size: int = 1,
        length_penalty: float = 0.6,
    ) -> Tensor:
        """Translate: build the target token by token, greedily or by beam search.

        Dropout acts in train mode here as everywhere: call ``eval()`` first. Each step computes all tokens so far anew.
        The model runs in ``torch.inference_mode``.

        Traps:
            The more tokens there are, the more each costs: see trap `no_cache`.
        """
        return super().generate(src_ids, max_len, beam_size, length_penalty)
