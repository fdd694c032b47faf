"""One token after another: the key/value cache, greedy decoding and beam search."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from scratch import validation
from scratch.attention import MultiheadAttention
from scratch.functional import upcast_half

__all__ = ["FixedCache", "GrowingCache", "LayerCache", "beam_search", "greedy_decode", "length_penalty", "new_cache"]

NextLogits = Callable[[Tensor], Tensor]


class GrowingCache:
    """Keys and values of all tokens so far, for self-attention: each call adds its own.

    They are kept as the attention projects them, sequence first and not yet split into heads, so that a call costs the
    projections of its new tokens only.

    In torch.nn: nothing; ``nn.MultiheadAttention`` projects all tokens at every call.

    >>> attention = MultiheadAttention(embed_dim=12, num_heads=3)
    >>> x, cache = torch.randn(5, 2, 12), GrowingCache()
    >>> _ = attention(x[:4], x[:4], x[:4], cache=cache)
    >>> last, _ = attention(x[4:], x[4:], x[4:], cache=cache)
    >>> torch.allclose(last, attention(x, x, x)[0][4:], atol=1e-6)
    True
    """

    def __init__(self) -> None:
        self._keys_values: tuple[Tensor, Tensor] | None = None  # (len, b, h * d) each

    def __len__(self) -> int:
        return 0 if self._keys_values is None else self._keys_values[0].size(0)

    def extended_len(self, key_len: int) -> int:
        """Say how many keys ``extend`` will hand back when it is given ``key_len`` of them."""
        return len(self) + key_len

    def extend(
        self, attention: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project the new tokens, remember their keys and values, and return them after the earlier ones.

        Args:
            attention: Whose projections are used; the same at every call.
            query: (new_len, batch, embed_dim).
            key: (new_len, batch, kdim).
            value: (new_len, batch, vdim).

        Returns:
            q, (new_len, batch, num_heads * head_dim), and k and v of all tokens so far, (len, batch, ...).

        Raises:
            ValueError: If the batch is not the one of the earlier calls.
        """
        q, k, v = attention.project(query, key, value)
        if self._keys_values is not None:
            earlier_k, earlier_v = self._keys_values
            validation.check_cache_batch(earlier_k.size(1), k.size(1))
            k, v = torch.cat([earlier_k, k]), torch.cat([earlier_v, v])
        self._keys_values = k, v
        return q, k, v

    def reorder(self, rows: Int[Tensor, " batch"]) -> None:
        """Let row i of the batch go on from what row ``rows[i]`` has seen so far."""
        if self._keys_values is not None:
            k, v = self._keys_values
            self._keys_values = k.index_select(1, rows), v.index_select(1, rows)


class FixedCache:
    """Keys and values of a memory that stays as it is, for cross-attention: the first call projects them.

    Later calls project their queries only, whatever keys and values they are given.

    In torch.nn: nothing; ``nn.MultiheadAttention`` projects the memory at every call.

    >>> attention = MultiheadAttention(embed_dim=12, num_heads=3)
    >>> x, memory, cache = torch.randn(5, 2, 12), torch.randn(7, 2, 12), FixedCache()
    >>> _ = attention(x[:4], memory, memory, cache=cache)
    >>> last, _ = attention(x[4:], memory, memory, cache=cache)
    >>> torch.allclose(last, attention(x, memory, memory)[0][4:], atol=1e-6)
    True
    """

    def __init__(self) -> None:
        self._keys_values: tuple[Tensor, Tensor] | None = None  # (len, b, h * d) each

    def extended_len(self, key_len: int) -> int:
        """Say how many keys ``extend`` will hand back when it is given ``key_len`` of them."""
        return key_len if self._keys_values is None else self._keys_values[0].size(0)

    def extend(
        self, attention: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project the queries, and at the first call keys and values.

        Args:
            attention: Whose projections are used; the same at every call.
            query: (query_len, batch, embed_dim).
            key: (key_len, batch, kdim).
            value: (key_len, batch, vdim).

        Returns:
            q, (query_len, batch, num_heads * head_dim), and k and v of the memory, (key_len, batch, ...).

        Raises:
            ValueError: If the batch is not the one of the first call.
        """
        if self._keys_values is None:
            q, k, v = attention.project(query, key, value)
            self._keys_values = k, v
            return q, k, v
        k, v = self._keys_values
        validation.check_cache_batch(k.size(1), query.size(1))
        weight, _, _ = attention.projection_weights()
        bias = None if attention.in_proj_bias is None else attention.in_proj_bias[: weight.size(0)]
        return F.linear(query, weight, bias), k, v


class LayerCache:
    """What the two attentions of one decoder layer remember between calls.

    In torch.nn: nothing.
    """

    def __init__(self) -> None:
        self.self_attn = GrowingCache()
        self.multihead_attn = FixedCache()

    def __len__(self) -> int:
        return len(self.self_attn)

    def reorder(self, rows: Int[Tensor, " batch"]) -> None:
        """Let row i of the batch go on from row ``rows[i]``, which has to have the same source sentence.

        Rows of one source have equal keys and values of the memory: those stay where they are.
        """
        self.self_attn.reorder(rows)


def new_cache(num_layers: int) -> list[LayerCache]:
    """Make an empty cache for a stack of decoder layers.

    Args:
        num_layers: Number of layers.

    Returns:
        One cache for each layer: what ``TransformerDecoder`` and ``Seq2SeqTransformer.decode`` take as ``cache``.

    Raises:
        ValueError: If num_layers is below 1.

    In torch.nn: nothing.

    >>> len(new_cache(6)), len(new_cache(6)[0])  # six layers, no tokens yet
    (6, 0)
    """
    validation.check_num_layers(num_layers)
    return [LayerCache() for _ in range(num_layers)]


def length_penalty(length: int, alpha: float) -> float:
    """Compute what a log-probability is divided by, so that long hypotheses are not at a disadvantage.

    lp(Y) = ((5 + |Y|) / (5 + 1))^alpha

    Args:
        length: |Y|, the number of generated tokens, the end token among them.
        alpha: 0 leaves log-probabilities as they are; 0.6 to 0.7 is usual for translation.

    Returns:
        1 for one token, and more for longer hypotheses.

    In torch.nn: nothing.

    Source: Wu et al. 2016, section 7, equation 14 (without its coverage penalty).

    >>> length_penalty(1, 0.6), length_penalty(13, 0.5)
    (1.0, 1.7320508)
    """
    return ((5 + length) / 6) ** alpha


def greedy_decode(
    next_logits: NextLogits,
    prefix: Int[Tensor, "batch prefix_len"],
    *,
    end_id: int,
    pad_id: int,
    max_len: int,
) -> Int[Tensor, "batch generated_len"]:
    """Append the likeliest token again and again, until every row has its end token.

    y_t = argmax P(y | y_1 ... y_(t-1)), never the padding token; of equal ones the one with the least id.

    Args:
        next_logits: Gives the logits (batch, vocabulary) of the token that follows each row of token ids (batch, len),
            which hold the prefix and all tokens so far. A row past its end token goes on with padding.
        prefix: What each row starts with: usually one start token.
        end_id: The token that ends a row.
        pad_id: The token that fills a row after its end.
        max_len: The greatest number of generated tokens.

    Returns:
        Generated token ids without the prefix, as long as the longest row.

    Raises:
        ValueError: If max_len is below 1.

    In torch.nn: nothing.

    Source: Sutskever et al. 2014, section 3.2 with a beam of 1.

    >>> likeliest = torch.tensor([0, 2, 3, 1])  # after token 0 itself, after 1 comes 2, after 2 comes 3
    >>> def next_logits(token_ids):
    ...     return torch.nn.functional.one_hot(likeliest[token_ids[:, -1]], 4).float()
    >>> greedy_decode(next_logits, torch.tensor([[1], [2]]), end_id=3, pad_id=0, max_len=9)
    tensor([[2, 3],
            [3, 0]])
    """
    validation.check_positive(max_len=max_len)
    token_ids = prefix
    ended = torch.zeros(prefix.size(0), dtype=torch.bool, device=prefix.device)
    for _ in range(max_len):
        if ended.all():
            break
        token = without_padding(next_logits(token_ids), pad_id).argmax(dim=-1)
        token = token.masked_fill(ended, pad_id)
        token_ids = torch.cat([token_ids, token.unsqueeze(1).to(prefix.dtype)], dim=1)
        ended = ended | (token == end_id)
    return token_ids[:, prefix.size(1) :]


def without_padding(logits: Float[Tensor, "*rows vocabulary"], pad_id: int) -> Float[Tensor, "*rows vocabulary"]:
    """Make the padding token impossible: it fills rows up and says nothing."""
    is_pad = torch.arange(logits.size(-1), device=logits.device) == pad_id
    return logits.masked_fill(is_pad, -math.inf)
