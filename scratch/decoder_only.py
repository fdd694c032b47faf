"""The language model of today: ids in, logits out, each token attending to the earlier ones.

Dimension letters: b batch, l len, k key_len, e d_model, f dim_feedforward.
"""

import math
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scratch import masks, validation
from scratch.decoding import Ending, KeyValueCache, Sampling, in_inference_mode, sample_decode
from scratch.grouped import GroupedQueryAttention
from scratch.norms import RMSNorm
from scratch.rotary import Pairing, RotaryEmbedding, RotaryScaling

__all__ = ["DecoderOnlyLayer", "DecoderOnlyTransformer", "SwiGLU"]


class SwiGLU(nn.Module):
    """Let one half of the hidden units gate the other.

    FFN(x) = (silu(x W_gate) * x W_up) W_down

    Args:
        d_model: Width of input and output.
        dim_feedforward: Number of hidden units, gated and gating ones each.
        activation: What the gate goes through; ``F.gelu`` makes it a GEGLU, ``F.relu`` a ReGLU.
        bias: Whether the three projections have biases.
        device: Where the parameters live.
        dtype: Their dtype.

    Raises:
        ValueError: For sizes that are not positive.
        TypeError: For an activation that is not a function.

    Source: Shazeer 2020, section 2, equation 6.

    >>> SwiGLU(12, 32)(torch.randn(2, 5, 12)).shape
    torch.Size([2, 5, 12])
    """

    def __init__(
        self,
        d_model: int,
        dim_feedforward: int = 2048,
        activation: Callable[[Tensor], Tensor] = F.silu,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        validation.check_positive(d_model=d_model, dim_feedforward=dim_feedforward)
        validation.check_function("activation", activation)
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.activation = activation
        self.gate_proj = nn.Linear(d_model, dim_feedforward, bias, **factory)
        self.up_proj = nn.Linear(d_model, dim_feedforward, bias, **factory)
        self.down_proj = nn.Linear(dim_feedforward, d_model, bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every token by itself.

        Args:
            x: (..., d_model).

        Returns:
            The shape of ``x``.

        Raises:
            ValueError: For another width.
        """
        validation.check_width("x", x, "d_model", self.gate_proj.in_features)
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class DecoderOnlyLayer(nn.Module):
    """Attention to earlier tokens, then a gated feed-forward network, each normalised first and added to its input.

    x = x + Attention(RMSNorm(x)); x = x + FFN(RMSNorm(x))

    Args:
        d_model: Width of input and output.
        nhead: Number of query heads.
        dim_feedforward: Width of the hidden layer of the feed-forward network.
        activation: What its gate goes through.
        norm_eps: Epsilon of all norms.
        bias: Whether the projections of attention and feed-forward network have biases.
        num_key_heads: Number of key and value heads; as many as query heads if not given.
        head_dim: Size of each head; d_model / nhead if not given.
        qk_norm: Divide each head's queries and keys by their root mean square before they are rotated.
        window: A token looks at the last ``window`` tokens, itself included; at all earlier ones if not given.
        soft_cap: Keeps scores within -soft_cap ... soft_cap by a tanh.
        sinks: Learn for each head a score that takes weight and gives nothing.
        rotary: Rotates queries and keys by their positions; a model shares one among its layers.
        scale: Factor on the scores; 1 / sqrt(head_dim) if not given.
        sandwich_norm: Normalise also what attention and feed-forward network give, before it is added.
        device: Where the parameters live.
        dtype: Their dtype.

    Raises:
        ValueError: As ``GroupedQueryAttention`` and ``SwiGLU``.
        TypeError: As ``SwiGLU``.

    In torch.nn: ``nn.TransformerEncoderLayer(norm_first=True)`` with a causal mask has the same wiring, with
    LayerNorms, a plain feed-forward network and as many key heads as query heads.

    Source: Touvron et al. 2023, section 2.2; Gemma Team 2024, section 2 (sandwich norms).

    >>> layer = DecoderOnlyLayer(48, nhead=6, dim_feedforward=64, num_key_heads=2)
    >>> layer(torch.randn(2, 5, 48)).shape
    torch.Size([2, 5, 48])
    """

    attention_class: ClassVar[type[nn.Module]] = GroupedQueryAttention
    norm_class: ClassVar[type[nn.Module]] = RMSNorm

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        activation: Callable[[Tensor], Tensor] = F.silu,
        norm_eps: float | None = 1e-6,
        bias: bool = False,
        *,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        rotary: RotaryEmbedding | None = None,
        scale: float | None = None,
        sandwich_norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {"head_dim": head_dim, "qk_norm": qk_norm, "norm_eps": norm_eps, "window": window}
        options |= {"soft_cap": soft_cap, "sinks": sinks, "rotary": rotary, "scale": scale}
        self.self_attn = self.attention_class(d_model, nhead, num_key_heads, bias, **options, **factory)
        self.feed_forward = SwiGLU(d_model, dim_feedforward, activation, bias, **factory)
        self.norm1 = self.norm_class(d_model, norm_eps, **factory)
        self.norm2 = self.norm_class(d_model, norm_eps, **factory)
        self.post_norm1 = self.norm_class(d_model, norm_eps, **factory) if sandwich_norm else nn.Identity()
        self.post_norm2 = self.norm_class(d_model, norm_eps, **factory) if sandwich_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        may_attend: Tensor | None = None,
        *,
        is_causal: bool = True,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Transform a sequence.

        Args:
            x: (batch, len, d_model); with a cache the new tokens only.
            may_attend: True = may look; broadcastable to (batch, nhead, len, key_len), where with a cache the keys are
                all tokens so far. Narrows what causality and window leave.
            is_causal: No token looks at a later one.
            cache: Keys and values of earlier calls, which this call extends.

        Returns:
            The shape of ``x``.

        Raises:
            ValueError: As ``GroupedQueryAttention.forward``.
            TypeError: As ``GroupedQueryAttention.forward``.
        """
        validation.check_grouped_inputs(self.self_attn, x, may_attend, cache)
        attended = self.self_attn(self.norm1(x), may_attend, is_causal=is_causal, cache=cache)
        x = x + self.post_norm1(attended)
        return x + self.post_norm2(self.feed_forward(self.norm2(x)))


class DecoderOnlyTransformer(nn.Module):
    """Say for each place of a text which token comes next.

    logits = RMSNorm(Layer_N(... Layer_1(E[ids]))) Wᵀ

    Only the rotary positions tell where a token stands, so there is no maximum length.

    Args:
        vocab_size: Number of tokens.
        d_model: Width of the embeddings and of every layer.
        nhead: Number of query heads.
        num_layers: Number of layers.
        dim_feedforward: Width of the hidden layer of the feed-forward networks.
        activation: What their gates go through.
        norm_eps: Epsilon of all norms.
        bias: Whether the projections in the layers have biases; the last one has none.
        num_key_heads: Number of key and value heads; as many as query heads if not given.
        head_dim: Size of each head; d_model / nhead if not given.
        qk_norm: Divide each head's queries and keys by their root mean square before they are rotated.
        window: A token looks at the last ``window`` tokens, itself included; at all earlier ones if not given. One for
            all layers, or one for each.
        soft_cap: Keeps scores within -soft_cap ... soft_cap by a tanh.
        sinks: Learn for each head a score that takes weight and gives nothing.
        scale: Factor on the scores; 1 / sqrt(head_dim) if not given.
        sandwich_norm: Normalise also what attention and feed-forward network give, before it is added.
        rotary_base: Base of the rotary positions.
        pairing: Which features they rotate together: "adjacent" or "halves"; see ``RotaryEmbedding``.
        rotary_scaling: How positions beyond those of the training are read; as all others if not given.
        logit_soft_cap: Keeps logits within -logit_soft_cap ... logit_soft_cap by a tanh.
        scale_embeddings: Multiply embeddings by sqrt(d_model). They are drawn from N(0, 1 / d_model) then, and from
            N(0, 1) otherwise.
        tie_weights: Let the last projection share its weights with the embedding, which is then drawn from
            N(0, 1 / d_model) in any case.
        pad_id: The token that fills a row up, which nobody looks at; there is none if not given.
        end_id: The token that ends a text; there is none if not given.
        device: Where the parameters live.
        dtype: Their dtype.

    Raises:
        ValueError: For sizes that do not fit, special tokens that are outside of the vocabulary or the same, an end_id
            without a pad_id, windows that are not one for each layer, or a cap that is not positive.
        TypeError: For sizes that are not whole numbers, or an activation that is not a function.

    In torch.nn: only the parts: ``nn.Embedding``, ``nn.RMSNorm`` and ``nn.Linear``.

    Source: Radford et al. 2018, section 3.1; Touvron et al. 2023, section 2.2.

    >>> model = DecoderOnlyTransformer(11, d_model=12, nhead=3, num_layers=2, dim_feedforward=16, num_key_heads=1)
    >>> prompt_ids = torch.tensor([[5, 3, 7], [4, 9, 2]])
    >>> model(prompt_ids).shape
    torch.Size([2, 3, 11])
    >>> model.generate(prompt_ids, max_len=4).shape
    torch.Size([2, 4])
    """

    layer_class: ClassVar[type[nn.Module]] = DecoderOnlyLayer
    norm_class: ClassVar[type[nn.Module]] = RMSNorm
    rotary_class: ClassVar[type[RotaryEmbedding]] = RotaryEmbedding

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 512,
        nhead: int = 8,
        num_layers: int = 6,
        dim_feedforward: int = 2048,
        activation: Callable[[Tensor], Tensor] = F.silu,
        norm_eps: float | None = 1e-6,
        bias: bool = False,
        *,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        window: int | Sequence[int | None] | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        scale: float | None = None,
        sandwich_norm: bool = False,
        rotary_base: float = 10000.0,
        pairing: Pairing = "adjacent",
        rotary_scaling: RotaryScaling | None = None,
        logit_soft_cap: float | None = None,
        scale_embeddings: bool = False,
        tie_weights: bool = False,
        pad_id: int | None = None,
        end_id: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        validation.check_language_model(vocab_size, num_layers, pad_id, end_id, window, logit_soft_cap)
        validation.check_grouped_sizes(d_model, nhead, num_key_heads, head_dim)
        super().__init__()
        head_dim = d_model // nhead if head_dim is None else head_dim
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        rotary = self.rotary_class(head_dim, rotary_base, pairing=pairing, scaling=rotary_scaling, device=device)
        options: dict[str, Any] = {"num_key_heads": num_key_heads, "head_dim": head_dim, "qk_norm": qk_norm}
        options |= {"soft_cap": soft_cap, "sinks": sinks, "rotary": rotary, "scale": scale}
        options |= {"sandwich_norm": sandwich_norm, **factory}
        sizes: tuple[Any, ...] = (d_model, nhead, dim_feedforward, activation, norm_eps, bias)
        self.windows = list(window) if isinstance(window, Sequence) else [window] * num_layers
        self.pad_id, self.end_id, self.logit_soft_cap = pad_id, end_id, logit_soft_cap
        self.embedding_scale = math.sqrt(d_model) if scale_embeddings else 1.0
        self.embedding = nn.Embedding(vocab_size, d_model, **factory)
        self.layers = nn.ModuleList([self.layer_class(*sizes, window=x, **options) for x in self.windows])
        self.norm = self.norm_class(d_model, norm_eps, **factory)
        self.projection = nn.Linear(d_model, vocab_size, bias=False, **factory)
        if tie_weights:
            self.projection.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5 if scale_embeddings or tie_weights else 1.0)

    def forward(self, token_ids: Tensor, *, cache: Sequence[KeyValueCache] | None = None) -> Tensor:
        """Score every token as the one that follows each place.

        Args:
            token_ids: (batch, len), the whole text so far, with a cache too.
            cache: What earlier calls with the beginning of this text have left, from ``new_cache``: only tokens that it
                does not hold yet are computed, and are added to it.

        Returns:
            Logits, (batch, len, vocab_size); with a cache those of the new tokens only. At padded places they are
            finite and mean nothing.

        Raises:
            ValueError: For ids that are not two-dimensional or on another device than the parameters, a text without
                new tokens, or a cache of another number of layers. Ids outside of the vocabulary are left to
                ``nn.Embedding``: to look for them would wait for the device.
            TypeError: For ids that are neither int64 nor int32.
        """
        validation.check_language_model_inputs(self, token_ids, cache)
        return self._logits(self._read(token_ids, cache))

    def _read(self, token_ids: Tensor, cache: Sequence[KeyValueCache] | None) -> Tensor:
        earlier_len = 0 if cache is None else cache[0].length
        x = self.embedding(token_ids[:, earlier_len:]) * self.embedding_scale  # (b, l, e)
        may_attend = None
        if self.pad_id is not None:
            may_attend = masks.from_token_ids(token_ids, self.pad_id)[:, None, None]  # (b, 1, 1, k)
        for layer, layer_cache in zip(self.layers, repeat(None) if cache is None else cache, strict=False):
            x = layer(x, may_attend, cache=layer_cache)
        return self.norm(x)

    def _logits(self, x: Tensor) -> Tensor:
        logits, cap = self.projection(x), self.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def new_cache(self) -> list[KeyValueCache]:
        """Make an empty cache, which rolls in layers that have a window.

        Returns:
            One cache for each layer.
        """
        return [KeyValueCache(window) for window in self.windows]

    @in_inference_mode
    def generate(
        self,
        prompt_ids: Tensor,
        max_len: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue the text, token by token.

        The keys and values of earlier tokens are remembered, so that each step costs one token's work. The model
        runs in ``torch.inference_mode``.

        Args:
            prompt_ids: (batch, prompt_len). Shorter prompts are padded on the left.
            max_len: The greatest number of generated tokens, the end token among them.
            temperature: 0 takes the likeliest token; else tokens are drawn from softmax(logits / temperature).
            top_k: Draw among this many likeliest tokens.
            top_p: Draw among the fewest likeliest tokens that have this probability together.
            generator: Where the random numbers come from; torch's own if not given.

        Returns:
            Token ids, (batch, at most max_len), without the prompt. A row ends with ``end_id`` if there is one and it
            gets there, and is filled up with ``pad_id``, which is not chosen otherwise.

        Raises:
            ValueError: As ``forward``; also for ids outside of the vocabulary, a prompt that ends with padding, a
                max_len below 1, a negative temperature, a top_k below 1, a top_p that is not in 0 ... 1, or any of the
                last two without a temperature.
            TypeError: As ``forward``.
        """
        validation.check_prompt(self, prompt_ids)
        sampling = Sampling(temperature, top_k, top_p, generator)
        cache = self.new_cache()

        def next_logits(token_ids: Tensor) -> Tensor:
            return self._logits(self._read(token_ids, cache)[:, -1])

        return sample_decode(next_logits, prompt_ids, Ending(max_len, self.end_id, self.pad_id), sampling)
