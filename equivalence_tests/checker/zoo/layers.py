"""Layers and models, wired rightly and wrongly; their parts are torch's own or right."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["BROKEN", "CORRECT"]


class SelfResidual(nn.Module):
    """An attention that adds its own residual, and normalises the sum."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.heads, self.norm = n_heads, nn.LayerNorm(d_model)
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        split = [
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, x in ((self.query, q), (self.key, k), (self.value, v))
        ]
        context = F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
        return self.norm(q + self.out(context))


class LayerOfSelfResiduals(nn.Module):
    """Right: the sub-layers add their residuals themselves."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.attention = SelfResidual(d_model, n_heads)
        self.linear1, self.linear2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x)
        return self.norm(x + self.feed_forward(x))

    def feed_forward(self, x: Tensor) -> Tensor:
        """The stage that defects replace."""
        return self.linear2(F.relu(self.linear1(x)))


class LayerWithoutActivation(LayerOfSelfResiduals):
    def feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.linear1(x))


class SequentialFeedForwardLayer(nn.Module):
    """Right, pre-norm, with a scale on each branch."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.mlp = self.make_mlp(d_model, d_ff)
        self.ln_1, self.ln_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def make_mlp(self, d_model: int, d_ff: int) -> nn.Sequential:
        """The stage that defects replace."""
        return nn.Sequential(nn.Linear(d_model, d_ff), nn.GELU(), nn.Linear(d_ff, d_model))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=attn_mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class LinearMlpLayer(SequentialFeedForwardLayer):
    def make_mlp(self, d_model: int, d_ff: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model))


class MaskDroppingLayer(SequentialFeedForwardLayer):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


class ParallelLayer(SequentialFeedForwardLayer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = self.ln_1(x)
        return x + self.attn(y, y, y)[0] + self.mlp(self.ln_2(x))


class BranchNormLayer(SequentialFeedForwardLayer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.ln_1(self.attn(x, x, x)[0])
        return x + self.ln_2(self.mlp(x))


class StaleInputLayer(SequentialFeedForwardLayer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        attended = self.attn(x, x, x)[0]
        x = self.ln_1(x + attended)
        return self.ln_2(x + self.mlp(attended))


class StaleResidualLayer(SequentialFeedForwardLayer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = self.ln_1(x + self.attn(x, x, x)[0])
        return self.ln_2(x + self.mlp(y))


class TwoMaskDecoderLayer(nn.Module):
    """Right: a mask for the target, one for the source."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.self_attn, self.cross_attn = (
            nn.MultiheadAttention(d_model, n_heads, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.mlp = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))

    def forward(
        self, x: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, src_mask: Tensor | None = None
    ) -> Tensor:
        tgt_mask, src_mask = self.masks(tgt_mask, src_mask)
        x = self.norm1(x + self.self_attn(x, x, x, attn_mask=tgt_mask)[0])
        x = self.norm2(x + self.cross(x, memory, src_mask))
        return self.norm3(x + self.mlp(x))

    def masks(self, tgt_mask: Tensor | None, src_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The stage that defects replace: the masks of self-attention and cross-attention."""
        return tgt_mask, src_mask

    def cross(self, x: Tensor, memory: Tensor, src_mask: Tensor | None) -> Tensor:
        """The stage that defects replace."""
        return self.cross_attn(x, memory, memory, attn_mask=src_mask)[0]


class SourceMaskDroppingDecoderLayer(TwoMaskDecoderLayer):
    def masks(self, tgt_mask: Tensor | None, src_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        return tgt_mask, None


class MaskExchangingDecoderLayer(TwoMaskDecoderLayer):
    def masks(self, tgt_mask: Tensor | None, src_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        return src_mask, tgt_mask


class MixedMemoryDecoderLayer(TwoMaskDecoderLayer):
    def cross(self, x: Tensor, memory: Tensor, src_mask: Tensor | None) -> Tensor:
        return self.cross_attn(x, memory, x, attn_mask=src_mask)[0]


class TranslationModel(nn.Module):
    """Right: embeddings, learned positions, two stacks, and logits."""

    def __init__(self, vocab_size: int, d_model: int, n_heads: int, d_ff: int, max_len: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab_size, d_model), nn.Embedding(max_len, d_model)
        self.encoder_layers = nn.ModuleList(
            SequentialFeedForwardLayer(d_model, n_heads, d_ff) for _ in range(self.layers)
        )
        self.decoder_layers = self.make_decoder(d_model, n_heads, d_ff)
        self.norm, self.head = nn.LayerNorm(d_model), nn.Linear(d_model, vocab_size)

    layers = 2

    def make_decoder(self, d_model: int, n_heads: int, d_ff: int) -> nn.ModuleList:
        """The stage that defects replace."""
        return nn.ModuleList(TwoMaskDecoderLayer(d_model, n_heads, d_ff) for _ in range(self.layers))

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        memory = self.encode(self.embed(src))
        x, length = self.embed(tgt), tgt.size(1)
        for layer in self.decoder_layers:
            x = layer(x, memory, tgt_mask=self.future(length))
        return self.head(self.last_norm(x))

    def embed(self, ids: Tensor) -> Tensor:
        """The stage that defects replace."""
        return self.embedding(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))

    def encode(self, x: Tensor) -> Tensor:
        """The stage that defects replace."""
        for layer in self.encoder_layers:
            x = layer(x)
        return x

    def future(self, length: int) -> Tensor | None:
        """The stage that defects replace: True = may not look."""
        return self.norm.weight.new_ones(length, length).triu(1).bool()

    def last_norm(self, x: Tensor) -> Tensor:
        """The stage that defects replace."""
        return self.norm(x)


class FrozenPositionsModel(TranslationModel):
    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) + self.positions.weight.data[: ids.size(1)]


class UnchainedModel(TranslationModel):
    def encode(self, x: Tensor) -> Tensor:
        return [layer(x) for layer in self.encoder_layers][-1]


class UnencodedModel(TranslationModel):
    def encode(self, x: Tensor) -> Tensor:
        super().encode(x)
        return x


class OneLayerModel(TranslationModel):
    def make_decoder(self, d_model: int, n_heads: int, d_ff: int) -> nn.ModuleList:
        return nn.ModuleList([TwoMaskDecoderLayer(d_model, n_heads, d_ff)] * self.layers)


class PeekingModel(TranslationModel):
    def future(self, length: int) -> Tensor | None:
        return None


class UnorderedModel(TranslationModel):
    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)


class UnfinishedModel(TranslationModel):
    def last_norm(self, x: Tensor) -> Tensor:
        return x


class PlanningModel(nn.Module):
    """Right: what was seen and what was done are two tokens of each step, side by side; it says what is done next."""

    def __init__(self, obs_dim: int, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.heads, self.positions = n_heads, nn.Embedding(64, d_model)
        self.see, self.do = nn.Linear(obs_dim, d_model), nn.Linear(1, d_model)
        self.layers = nn.ModuleList(SequentialFeedForwardLayer(d_model, n_heads, d_ff) for _ in range(2))
        self.head = nn.Linear(d_model, 1)

    def forward(self, steps: Tensor, seen: Tensor, done: Tensor, pad_mask: Tensor | None = None) -> Tensor:
        batch, length, _ = seen.shape
        places = self.positions(steps)
        x = torch.stack([self.see(seen) + places, self.do(done) + places], dim=2).flatten(1, 2)
        hidden = seen.new_ones(2 * length, 2 * length).triu(1).bool().expand(batch, -1, -1)  # True = may not look
        if pad_mask is not None:
            pad_mask = self.of_tokens(pad_mask)
            hidden = hidden | pad_mask[:, None]
        for layer in self.layers:
            x = layer(x, hidden.repeat_interleave(self.heads, 0))
        return self.head(self.taken_apart(x, batch, length))

    def of_tokens(self, pad_mask: Tensor) -> Tensor:
        """The stage that defects replace."""
        return pad_mask.repeat_interleave(2, 1)

    def taken_apart(self, x: Tensor, batch: int, length: int) -> Tensor:
        """The stage that defects replace: the tokens of what was seen."""
        return x.view(batch, length, 2, -1)[:, :, 0]


class TiledMaskModel(PlanningModel):
    def of_tokens(self, pad_mask: Tensor) -> Tensor:
        return pad_mask.repeat(1, 2)


class MistakenTokensModel(PlanningModel):
    def taken_apart(self, x: Tensor, batch: int, length: int) -> Tensor:
        return x.view(batch, 2, length, -1)[:, 1]


CORRECT = (LayerOfSelfResiduals, SequentialFeedForwardLayer, TwoMaskDecoderLayer, TranslationModel, PlanningModel)
MASKS, MODEL = "source padding mask not passed on, or used for the target", "layers and stacks wired wrongly"
BROKEN = (
    (LayerWithoutActivation, ("activation_missing",), "activation missing inside a layer"),
    (LinearMlpLayer, ("activation_missing",), "activation missing inside a layer"),
    (MaskDroppingLayer, ("mask_never_used",), MASKS),
    (SourceMaskDroppingDecoderLayer, ("mask_never_used",), MASKS),
    (MaskExchangingDecoderLayer, ("masks_exchanged",), MASKS),
    (MixedMemoryDecoderLayer, ("cross_attention_from_decoder",), "cross-attention: values from the decoder"),
    (ParallelLayer, ("sublayers_side_by_side",), "sub-layers side by side"),
    (BranchNormLayer, ("residual_after_norm",), "LayerNorm: on the branch"),
    (StaleInputLayer, ("sublayer_reads_another_tensor",), "residual: of another tensor"),
    (StaleResidualLayer, ("residual_from_elsewhere",), "residual: of another tensor"),
    (FrozenPositionsModel, ("parameter_never_trained",), "positions: never trained"),
    (UnchainedModel, ("layers_not_chained",), MODEL),
    (UnencodedModel, ("memory_is_not_encoder_output",), MODEL),
    (OneLayerModel, ("layers_share_parameters",), MODEL),
    (PeekingModel, ("future_is_seen",), MODEL),
    (TiledMaskModel, ("mask_hides_other_entries",), MASKS),
    (MistakenTokensModel, ("outputs_of_other_tokens",), MODEL),
    (UnorderedModel, ("no_positions", "part_never_used"), MODEL),
    (UnfinishedModel, ("part_never_used",), "final LayerNorm of the stack missing"),
)
