"""What attention remembers between calls, so that a step of decoding projects its new tokens only."""

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from scratch import validation
from scratch.attention import MultiheadAttention, project
from scratch.paths import are_plain

__all__ = ["FixedCache", "GrowingCache", "KeyValueCache", "LayerCache", "new_cache"]


class GrowingCache:
    """Keys and values of all tokens so far, for self-attention: each call adds its own.

    They are kept as the attention projects them, sequence first and not yet split into heads, so that a call costs the
    projections of its new tokens only. There is room for twice as many: new ones are written behind the earlier ones,
    where a new tensor for all of them would make every call copy them.

    In torch.nn: ``nn.MultiheadAttention`` projects all tokens at every call.

    >>> attention = MultiheadAttention(embed_dim=12, num_heads=3)
    >>> x, cache = torch.randn(5, 2, 12), GrowingCache()
    >>> _ = attention(x[:4], x[:4], x[:4], cache=cache)
    >>> last, _ = attention(x[4:], x[4:], x[4:], cache=cache)
    >>> torch.allclose(last, attention(x, x, x)[0][4:], atol=1e-6)
    True

    Attributes:
        length: Number of tokens so far.
    """

    def __init__(self) -> None:
        self._keys_values: tuple[Tensor, Tensor] | None = None  # (room, b, h * d) each, of which length are used
        self.length = 0

    def extended_len(self, key_len: int) -> int:
        """Return the number of keys that ``extend`` will return for ``key_len`` new ones."""
        return self.length + key_len

    def extend(
        self, attention: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project the new tokens, remember their keys and values, and return them after the earlier ones.

        Args:
            attention: The attention whose projections are used; the same at every call.
            query: (new_len, batch, embed_dim).
            key: (new_len, batch, kdim).
            value: (new_len, batch, vdim).

        Returns:
            q, (new_len, batch, num_heads * head_dim), and k and v of all tokens so far, (len, batch, ...).

        Raises:
            ValueError: If the batch is not the one of the earlier calls.
        """
        q, k, v = project(query, key, value, attention._in_projection())
        new_len = k.size(0)
        if self._keys_values is not None:
            earlier_k, earlier_v = self._keys_values
            validation.check_cache_batch(earlier_k.size(1), k.size(1))
            k, v = _written_behind(earlier_k, self.length, k), _written_behind(earlier_v, self.length, v)
        self._keys_values = k, v
        self.length += new_len
        return q, k[: self.length], v[: self.length]

    def reorder(self, rows: Int[Tensor, " batch"]) -> None:
        """Let row i of the batch continue from what row ``rows[i]`` has seen so far."""
        if self._keys_values is not None:
            k, v = self._keys_values
            self._keys_values = k.index_select(1, rows), v.index_select(1, rows)


def _written_behind(kept: Tensor, length: int, new: Tensor) -> Tensor:
    """Write the new places after the first ``length`` kept ones: into the same tensor if it has room."""
    if torch.is_grad_enabled() or not are_plain(kept, new):
        return torch.cat([kept[:length], new])  # a backward pass needs what is kept as it is
    end = length + new.size(0)
    if kept.size(0) < end or kept.dtype != new.dtype or _is_frozen(kept):
        kept = torch.cat([kept[:length], new, torch.empty_like(kept[:length])])
    else:
        kept[length:end] = new
    return kept


def _is_frozen(x: Tensor) -> bool:
    """Return whether x was made in inference mode and so may not be changed outside it."""
    return x.is_inference() and not torch.is_inference_mode_enabled()


class FixedCache:
    """Keys and values of a memory that stays as it is, for cross-attention: the first call projects them.

    Later calls project their queries only, whatever keys and values they are given.

    In torch.nn: ``nn.MultiheadAttention`` projects the memory at every call.

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
        """Return the number of keys that ``extend`` will return for ``key_len`` new ones."""
        return key_len if self._keys_values is None else self._keys_values[0].size(0)

    def extend(
        self, attention: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project the queries, and at the first call keys and values.

        Args:
            attention: The attention whose projections are used; the same at every call.
            query: (query_len, batch, embed_dim).
            key: (key_len, batch, kdim).
            value: (key_len, batch, vdim).

        Returns:
            q, (query_len, batch, num_heads * head_dim), and k and v of the memory, (key_len, batch, ...).

        Raises:
            ValueError: If the batch is not the one of the first call.
        """
        if self._keys_values is None:
            q, k, v = project(query, key, value, attention._in_projection())
            self._keys_values = k, v
            return q, k, v
        k, v = self._keys_values
        validation.check_cache_batch(k.size(1), query.size(1))
        (weight, bias), _, _ = attention._in_projection().each()
        return F.linear(query, weight, bias), k, v


class KeyValueCache:
    """Keys and values of the tokens so far, for grouped-query attention: of all of them, or of the last ``window``.

    They are kept split into heads, normalised and rotated by their positions. With a window the cache rolls: what no
    later token can see is forgotten, so that it stops growing.

    Args:
        window: The window of the attention; everything is kept if not given.

    Raises:
        ValueError: For a window below 1.

    Source: Jiang et al. 2023, section 2, "Rolling Buffer Cache".

    >>> cache = KeyValueCache(window=3)
    >>> tokens = torch.arange(5.0).view(1, 1, 5, 1)
    >>> k, v = cache.extend(tokens[:, :, :4], tokens[:, :, :4])
    >>> k, v = cache.extend(tokens[:, :, 4:], tokens[:, :, 4:])
    >>> k.flatten(), cache.length
    (tensor([2., 3., 4.]), 5)
    """

    def __init__(self, window: int | None = None) -> None:
        if window is not None:
            validation.check_window(window)
        self.window = window
        self.length = 0
        self._keys_values: tuple[Tensor, Tensor] | None = None  # (b, g, at most window - 1, d) each

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Remember new keys and values, and return them after those that are remembered.

        Args:
            k: (batch, num_key_heads, new_len, head_dim).
            v: The values of the same tokens.

        Returns:
            Both, (batch, num_key_heads, remembered + new_len, head_dim).

        Raises:
            ValueError: If the batch is not the one of the earlier calls.
        """
        new_len = k.size(2)
        if self._keys_values is not None:
            earlier_k, earlier_v = self._keys_values
            validation.check_cache_batch(earlier_k.size(0), k.size(0))
            k, v = torch.cat([earlier_k, k], dim=2), torch.cat([earlier_v, v], dim=2)
        self.length += new_len
        forgotten = 0 if self.window is None else max(k.size(2) - self.window + 1, 0)  # the next token counts too
        self._keys_values = k[:, :, forgotten:], v[:, :, forgotten:]
        return k, v

    def reorder(self, rows: Int[Tensor, " batch"]) -> None:
        """Let row i of the batch continue from what row ``rows[i]`` has seen so far."""
        if self._keys_values is not None:
            k, v = self._keys_values
            self._keys_values = k.index_select(0, rows), v.index_select(0, rows)


class LayerCache:
    """What the two attentions of one decoder layer remember between calls."""

    def __init__(self) -> None:
        self.self_attn = GrowingCache()
        self.multihead_attn = FixedCache()

    @property
    def length(self) -> int:
        """Number of target tokens so far."""
        return self.self_attn.length

    def reorder(self, rows: Int[Tensor, " batch"]) -> None:
        """Let row i of the batch continue from row ``rows[i]``, which must have the same source sentence.

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

    >>> cache = new_cache(num_layers=6)
    >>> len(cache), cache[0].length  # six layers, no tokens yet
    (6, 0)
    """
    validation.check_positive(num_layers=num_layers)
    return [LayerCache() for _ in range(num_layers)]
