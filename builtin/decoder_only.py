"""The language model of today on torch: its RMSNorm and its fused attention, wired as in ``scratch``."""

from builtin.grouped import GroupedQueryAttention
from builtin.norms import RMSNorm
from builtin.rotary import RotaryEmbedding
from scratch import decoder_only
from scratch.decoder_only import SwiGLU

__all__ = ["DecoderOnlyLayer", "DecoderOnlyTransformer", "SwiGLU"]


class DecoderOnlyLayer(decoder_only.DecoderOnlyLayer):
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
        qk_norm: Divide each head's queries and keys by their root mean square before they are turned.
        window: A token looks at the last ``window`` tokens, itself included; at all earlier ones if not given.
        soft_cap: Keeps scores within -soft_cap ... soft_cap by a tanh.
        sinks: Learn for each head a score that takes weight and gives nothing.
        rotary: Turns queries and keys by their positions; a model shares one among its layers.
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

    >>> import torch
    >>> layer = DecoderOnlyLayer(48, nhead=6, dim_feedforward=64, num_key_heads=2)
    >>> layer(torch.randn(2, 5, 48)).shape
    torch.Size([2, 5, 48])
    """

    attention_class = GroupedQueryAttention
    norm_class = RMSNorm


class DecoderOnlyTransformer(decoder_only.DecoderOnlyTransformer):
    """Say for each place of a text which token comes next.

    logits = RMSNorm(Layer_N(... Layer_1(E[ids]))) Wᵀ

    Where a token stands is told by rotary positions alone, so that there is no greatest length.

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
        qk_norm: Divide each head's queries and keys by their root mean square before they are turned.
        window: A token looks at the last ``window`` tokens, itself included; at all earlier ones if not given. One for
            all layers, or one for each.
        soft_cap: Keeps scores within -soft_cap ... soft_cap by a tanh.
        sinks: Learn for each head a score that takes weight and gives nothing.
        scale: Factor on the scores; 1 / sqrt(head_dim) if not given.
        sandwich_norm: Normalise also what attention and feed-forward network give, before it is added.
        rotary_base: Base of the rotary positions.
        pairing: Which features they turn together: "adjacent" or "halves"; see ``RotaryEmbedding``.
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

    In torch.nn: only the parts: ``nn.Embedding``, ``nn.RMSNorm``,
    ``F.scaled_dot_product_attention`` or, for capped scores, flex attention, and ``nn.Linear``.

    Source: Radford et al. 2018, section 3.1; Touvron et al. 2023, section 2.2.

    >>> import torch
    >>> model = DecoderOnlyTransformer(11, d_model=12, nhead=3, num_layers=2, dim_feedforward=16, num_key_heads=1)
    >>> prompt_ids = torch.tensor([[5, 3, 7], [4, 9, 2]])
    >>> model(prompt_ids).shape
    torch.Size([2, 3, 11])
    >>> model.generate(prompt_ids, max_len=4).shape
    torch.Size([2, 4])
    """

    layer_class = DecoderOnlyLayer
    norm_class = RMSNorm
    rotary_class = RotaryEmbedding
