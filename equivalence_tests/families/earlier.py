"""The families before rotary positions: GPT-2 and BERT's encoder, which are ``TransformerEncoder`` with other names."""

from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.families.decoders import activation_of
from equivalence_tests.families.family import Family, Rule

__all__ = ["BERT_ENCODER", "GPT2", "LearntPositionsModel"]


class LearntPositionsModel(nn.Module):
    """A language model with learnt positions around a ``TransformerEncoder`` with a causal mask: GPT-2.

    logits = Encoder(E[ids] + P[0 ... len - 1]) Eᵀ

    Args:
        encoder: Pre-norm, with a LayerNorm at its end.
        vocab_size: Number of tokens.
        d_model: Width of the embeddings.
        max_len: Number of positions.

    Source: Radford et al. 2019, section 2.3.
    """

    def __init__(self, encoder: nn.Module, vocab_size: int, d_model: int, max_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(max_len, d_model)
        self.encoder = encoder

    def forward(self, token_ids: Tensor) -> Tensor:
        """Score every token as the one that follows each place.

        Args:
            token_ids: (batch, len).

        Returns:
            Logits, (batch, len, vocab_size).
        """
        length = token_ids.size(1)
        x = self.embedding(token_ids) + self.positions.weight[:length]  # (b, l, e)
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        return self.encoder(x, mask=hidden, is_causal=True) @ self.embedding.weight.mT


def build_encoder(package: Any, *, num_layers: int, final_norm: bool, **settings: Any) -> nn.Module:
    """Build our encoder."""
    layer = package.TransformerEncoderLayer(**settings, dropout=0.0, batch_first=True)
    norm = nn.LayerNorm(settings["d_model"], settings["layer_norm_eps"]) if final_norm else None
    encoder: nn.Module = package.TransformerEncoder(layer, num_layers, norm, enable_nested_tensor=False)
    return encoder


def build_gpt2(package: Any, *, vocab_size: int, max_len: int, **settings: Any) -> nn.Module:
    """Build our GPT-2."""
    encoder = build_encoder(package, **settings, norm_first=True, final_norm=True)
    return LearntPositionsModel(encoder, vocab_size, settings["d_model"], max_len)


GPT2 = Family(
    "GPT-2",
    build_gpt2,
    lambda config: {
        "vocab_size": config.vocab_size,
        "max_len": config.n_positions,
        "d_model": config.n_embd,
        "nhead": config.n_head,
        "num_layers": config.n_layer,
        "dim_feedforward": config.n_inner or 4 * config.n_embd,
        "activation": activation_of(config.activation_function),
        "layer_norm_eps": config.layer_norm_epsilon,
    },
    (
        Rule("embedding.weight", ("transformer.wte.weight",)),
        Rule("positions.weight", ("transformer.wpe.weight",)),
        *(
            Rule(f"encoder.layers.*.{ours}{kind}", (f"transformer.h.*.{theirs}.{kind}",), transposed="ln" not in theirs)
            for ours, theirs in {
                "self_attn.in_proj_": "attn.c_attn",
                "self_attn.out_proj.": "attn.c_proj",
                "linear1.": "mlp.c_fc",
                "linear2.": "mlp.c_proj",
                "norm1.": "ln_1",
                "norm2.": "ln_2",
            }.items()
            for kind in ("weight", "bias")
        ),
        *(Rule(f"encoder.norm.{kind}", (f"transformer.ln_f.{kind}",)) for kind in ("weight", "bias")),
    ),
    must_be={
        "add_cross_attention": False,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
)

BERT_ENCODER = Family(
    "BERT's encoder",
    build_encoder,
    lambda config: {
        "d_model": config.hidden_size,
        "nhead": config.num_attention_heads,
        "num_layers": config.num_hidden_layers,
        "dim_feedforward": config.intermediate_size,
        "activation": activation_of(config.hidden_act),
        "layer_norm_eps": config.layer_norm_eps,
        "final_norm": False,
    },
    tuple(
        Rule(f"layers.*.{ours}{kind}", tuple(f"layer.*.{name}.{kind}" for name in theirs))
        for ours, theirs in {
            "self_attn.in_proj_": tuple(f"attention.self.{name}" for name in ("query", "key", "value")),
            "self_attn.out_proj.": ("attention.output.dense",),
            "norm1.": ("attention.output.LayerNorm",),
            "linear1.": ("intermediate.dense",),
            "linear2.": ("output.dense",),
            "norm2.": ("output.LayerNorm",),
        }.items()
        for kind in ("weight", "bias")
    ),
    must_be={
        "is_decoder": False,
        "add_cross_attention": False,
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
    },
)
