"""LayerNorms, feed-forwards, positional encodings and layers, right and wrong."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.zoo.conventions import SeparateLinears

__all__ = ["BROKEN", "CORRECT"]


class GainBiasLayerNorm(nn.Module):
    """Right, with eps as an argument."""

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gamma, self.beta, self.eps = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * self.normalised(x) + self.beta

    def normalised(self, x: Tensor) -> Tensor:
        """The stage that defects replace."""
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + self.eps).sqrt()


class UnbiasedLayerNorm(GainBiasLayerNorm):
    def normalised(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + self.eps).sqrt()


class EpsOutsideLayerNorm(GainBiasLayerNorm):
    def normalised(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, unbiased=False, keepdim=True) + self.eps)


class UnbiasedEpsOutsideLayerNorm(GainBiasLayerNorm):
    def normalised(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)


class NoEpsLayerNorm(GainBiasLayerNorm):
    def normalised(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / x.var(-1, unbiased=False, keepdim=True).sqrt()


class OverTokensLayerNorm(GainBiasLayerNorm):
    def normalised(self, x: Tensor) -> Tensor:
        return (x - x.mean((1, 2), keepdim=True)) / (x.var((1, 2), unbiased=False, keepdim=True) + self.eps).sqrt()


class PaperFeedForward(nn.Module):
    """Right: two linears with ReLU between."""

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.w_1, self.w_2, self.dropout = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.dropout(F.relu(self.w_1(x))))


class GeluFeedForward(PaperFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(F.gelu(self.w_1(x)))


class ActivationLastFeedForward(PaperFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.w_2(self.w_1(x)))


class LinearFeedForward(PaperFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.w_1(x))


class TanhGeluFeedForward(PaperFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        h = self.w_1(x)
        return self.w_2(0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))))


class NoSecondBiasFeedForward(PaperFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(self.w_1(x)), self.w_2.weight)


class PaperPositionalEncoding(nn.Module):
    """Right: sine and cosine interleaved."""

    def __init__(self, d_model: int, max_len: int = 100) -> None:
        super().__init__()
        self.d_model = d_model
        self.register_buffer("pe", self.table(max_len))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[: x.size(1)]

    def angles(self, length: int) -> Tensor:
        """The stage that defects replace."""
        position = torch.arange(length, dtype=torch.float64).unsqueeze(1)
        return position * torch.exp(torch.arange(0, self.d_model, 2) * (-math.log(10000.0) / self.d_model))

    def table(self, length: int) -> Tensor:
        """(len, d_model)."""
        angles = self.angles(length)
        return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, : self.d_model]


class ConcatenatedPositionalEncoding(PaperPositionalEncoding):
    def table(self, length: int) -> Tensor:
        angles = self.angles(length)
        return torch.cat((angles.sin(), angles.cos()), 1)[:, : self.d_model]


class DoubledPositionalEncoding(PaperPositionalEncoding):
    def angles(self, length: int) -> Tensor:
        even = torch.arange(0, self.d_model, 2, dtype=torch.float64)
        return torch.arange(length, dtype=torch.float64).unsqueeze(1) / 10000 ** (2 * even / self.d_model)


class SwappedPositionalEncoding(PaperPositionalEncoding):
    def table(self, length: int) -> Tensor:
        angles = self.angles(length)
        return torch.stack((angles.cos(), angles.sin()), -1).flatten(1)[:, : self.d_model]


class FromOnePositionalEncoding(PaperPositionalEncoding):
    def table(self, length: int) -> Tensor:
        return super().table(length + 1)[1:]


class OtherBasePositionalEncoding(PaperPositionalEncoding):
    def angles(self, length: int) -> Tensor:
        even = torch.arange(0, self.d_model, 2, dtype=torch.float64)
        return torch.arange(length, dtype=torch.float64).unsqueeze(1) / 1000 ** (even / self.d_model)


class PostNormEncoderLayer(nn.Module):
    """Right, post-norm."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.self_attention = SeparateLinears(d_model, n_heads)
        self.feed_forward = PaperFeedForward(d_model, d_ff)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm1(x + self.self_attention(x, x, x, mask))
        return self.norm2(x + self.feed_forward(x))


class PreNormEncoderLayer(PostNormEncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        x = x + self.self_attention(y, y, y, mask)
        return x + self.feed_forward(self.norm2(x))


class NoResidualEncoderLayer(PostNormEncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm1(self.self_attention(x, x, x, mask))
        return self.norm2(x + self.feed_forward(x))


class NormalisedResidualEncoderLayer(PostNormEncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        x = y + self.self_attention(y, y, y, mask)
        return x + self.feed_forward(self.norm2(x))


class SharedNormEncoderLayer(PostNormEncoderLayer):
    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__(d_model, n_heads, d_ff)
        self.norm2 = self.norm1

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm1(x + self.self_attention(x, x, x, mask))
        return self.norm1(x + self.feed_forward(x))


class OneNormEncoderLayer(PostNormEncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.self_attention(x, x, x, mask)
        return self.norm2(x + self.feed_forward(x))


class TwiceResidualEncoderLayer(PostNormEncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm1(x + x + self.self_attention(x, x, x, mask))
        return self.norm2(x + self.feed_forward(x))


class PaperDecoderLayer(nn.Module):
    """Right, post-norm."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.self_attention, self.cross_attention = SeparateLinears(d_model, n_heads), SeparateLinears(d_model, n_heads)
        self.feed_forward = PaperFeedForward(d_model, d_ff)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.norm1(x + self.self_attention(x, x, x))
        x = self.norm2(x + self.cross(x, memory))
        return self.norm3(x + self.feed_forward(x))

    def cross(self, x: Tensor, memory: Tensor) -> Tensor:
        """The stage that defects replace."""
        return self.cross_attention(x, memory, memory)


class SelfishDecoderLayer(PaperDecoderLayer):
    def cross(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.cross_attention(x, x, x)


class NoCrossDecoderLayer(PaperDecoderLayer):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.norm1(x + self.self_attention(x, x, x))
        return self.norm3(self.norm2(x) + self.feed_forward(self.norm2(x)))


class CrossFirstDecoderLayer(PaperDecoderLayer):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.norm2(x + self.cross(x, memory))
        x = self.norm1(x + self.self_attention(x, x, x))
        return self.norm3(x + self.feed_forward(x))


CORRECT = (
    GainBiasLayerNorm,
    UnbiasedEpsOutsideLayerNorm,
    PaperFeedForward,
    GeluFeedForward,
    TanhGeluFeedForward,
    PaperPositionalEncoding,
    ConcatenatedPositionalEncoding,
    PostNormEncoderLayer,
    PreNormEncoderLayer,
    PaperDecoderLayer,
)
BROKEN = (
    (UnbiasedLayerNorm, ("norm_unbiased_std",), "LayerNorm: unbiased std"),
    (EpsOutsideLayerNorm, ("norm_eps_outside",), "LayerNorm: eps outside the root"),
    (NoEpsLayerNorm, ("norm_without_eps",), "LayerNorm: no eps"),
    (OverTokensLayerNorm, ("norm_wrong_axes",), "LayerNorm: over the wrong axes"),
    (ActivationLastFeedForward, ("activation_misplaced",), "activation after the second linear"),
    (LinearFeedForward, ("activation_missing",), "activation missing"),
    (NoSecondBiasFeedForward, ("ff_second_bias_unused",), "feed-forward bias missing"),
    (DoubledPositionalEncoding, ("position_exponent_wrong",), "positional encoding: exponent doubled"),
    (SwappedPositionalEncoding, ("position_sine_cosine_swapped",), "positional encoding: sine and cosine swapped"),
    (FromOnePositionalEncoding, ("position_starts_at_one",), "positional encoding: starts at 1"),
    (OtherBasePositionalEncoding, ("position_base_other",), "positional encoding: base other than 10000"),
    (NoResidualEncoderLayer, ("residual_missing",), "residual missing"),
    (NormalisedResidualEncoderLayer, ("residual_from_normalised",), "residual from the normalised input"),
    (SharedNormEncoderLayer, ("norm_shared",), "LayerNorm shared by two sub-layers"),
    (OneNormEncoderLayer, ("norm_never_used",), "LayerNorm missing"),
    (TwiceResidualEncoderLayer, ("residual_added_twice",), "residual added twice"),
    (SelfishDecoderLayer, ("cross_attention_from_decoder",), "cross-attention: keys from the decoder"),
    (NoCrossDecoderLayer, ("cross_attention_left_out",), "cross-attention left out"),
    (CrossFirstDecoderLayer, ("sublayers_in_another_order",), "decoder sub-layers in another order"),
)
