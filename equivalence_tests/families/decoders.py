"""The decoder-only families: one architecture, ``DecoderOnlyTransformer``, and what each of them switches on."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.families.family import DoesNotFitError, Family, Rule
from scratch.rotary import LinearScaling, Llama3Scaling, RotaryScaling, YaRNScaling

__all__ = ["ACTIVATIONS", "GEMMA2", "GPT_OSS_ATTENTION", "LLAMA", "MISTRAL", "QWEN3", "activation_of"]

gelu_by_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": gelu_by_tanh,
    "gelu_pytorch_tanh": gelu_by_tanh,
    "relu": F.relu,
}


PROJECTIONS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"}


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """Find an activation by their name."""
    if name not in ACTIVATIONS:
        raise DoesNotFitError(f"activation {name!r} does not fit (only {', '.join(ACTIVATIONS)})")
    return ACTIVATIONS[name]


def rotary_scaling_of(rope: dict[str, Any]) -> RotaryScaling | None:
    """Read how positions beyond those of the training are scaled."""
    kinds: dict[str, tuple[Callable[..., RotaryScaling], dict[str, str]]] = {
        "linear": (LinearScaling, {}),
        "yarn": (
            YaRNScaling,
            {name: name for name in ("beta_fast", "beta_slow", "truncate", "attention_factor")},
        ),
        "llama3": (Llama3Scaling, {name: name for name in ("low_freq_factor", "high_freq_factor")}),
    }
    kind = rope["rope_type"]
    if kind == "default":
        return None
    if kind not in kinds:
        raise DoesNotFitError(f"rope_type={kind!r} does not fit (only 'default', {', '.join(map(repr, kinds))})")
    scaling, options = kinds[kind]
    length = {"original_max_len": rope["original_max_position_embeddings"]} if kind != "linear" else {}
    known = {"rope_type", "rope_theta", "factor", "original_max_position_embeddings", *options}
    if strange := [name for name, value in rope.items() if name not in known and value is not None]:
        raise DoesNotFitError(f"rotary positions with {', '.join(strange)} do not fit")
    given = {name: rope[name] for name in options if rope.get(name) is not None}
    return scaling(factor=rope["factor"], **length, **given)


def windows_of(config: Any) -> list[int | None]:
    """Give the window of each layer, None where a layer sees everything before it."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def attention_settings(config: Any) -> dict[str, Any]:
    """Read what all of them say of their attention."""
    return {
        "num_key_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "bias": getattr(config, "attention_bias", False),
    }


def model_settings(config: Any, **more: Any) -> dict[str, Any]:
    """Read what all of them say, and add what one of them says besides."""
    rope = config.rope_parameters
    return attention_settings(config) | {
        "vocab_size": config.vocab_size,
        "d_model": config.hidden_size,
        "nhead": config.num_attention_heads,
        "num_layers": config.num_hidden_layers,
        "dim_feedforward": config.intermediate_size,
        "activation": activation_of(getattr(config, "hidden_activation", None) or config.hidden_act),
        "norm_eps": config.rms_norm_eps,
        "rotary_base": rope["rope_theta"],
        "pairing": "halves",
        "rotary_scaling": rotary_scaling_of(rope),
        "tie_weights": config.tie_word_embeddings,
        **more,
    }


def build_model(package: Any, **settings: Any) -> nn.Module:
    """Build our model."""
    model: nn.Module = package.DecoderOnlyTransformer(**settings)
    return model


def rules_of_layers(prefix: str, norms: dict[str, str], offset: float = 0.0) -> tuple[Rule, ...]:
    """Name the weights of attention and feed-forward network, and the norms, of which families have different ones."""
    attention = PROJECTIONS | {"q_norm": "q_norm", "k_norm": "k_norm"}
    linears = {f"self_attn.{ours}": f"self_attn.{theirs}" for ours, theirs in attention.items()}
    linears |= {f"feed_forward.{name}": f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    return (
        Rule("embedding.weight", (f"{prefix}embed_tokens.weight",)),
        *(
            Rule(f"layers.*.{ours}.{kind}", (f"{prefix}layers.*.{theirs}.{kind}",))
            for ours, theirs in linears.items()
            for kind in ("weight", "bias")
        ),
        *(
            Rule(f"layers.*.{ours}.weight", (f"{prefix}layers.*.{theirs}.weight",), offset=offset)
            for ours, theirs in norms.items()
        ),
        Rule("norm.weight", (f"{prefix}norm.weight",), offset=offset),
        Rule("projection.weight", ("lm_head.weight",)),
    )


TWO_NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
SANDWICH = {
    "norm1": "input_layernorm",
    "post_norm1": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}

LLAMA = Family(
    "Llama",
    build_model,
    model_settings,
    rules_of_layers("model.", TWO_NORMS),
    must_be={"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "pretraining_tp": 1},
)
MISTRAL = Family(
    "Mistral",
    build_model,
    lambda config: model_settings(config, window=windows_of(config)),
    rules_of_layers("model.", TWO_NORMS),
    must_be={"attention_dropout": 0.0},
)
QWEN3 = Family(
    "Qwen3",
    build_model,
    lambda config: model_settings(config, window=windows_of(config), qk_norm=True),
    rules_of_layers("model.", TWO_NORMS),
    must_be={"attention_bias": False, "attention_dropout": 0.0},
)
GEMMA2 = Family(
    "Gemma 2",
    build_model,
    lambda config: model_settings(
        config,
        window=windows_of(config),
        soft_cap=config.attn_logit_softcapping,
        logit_soft_cap=config.final_logit_softcapping,
        scale=config.query_pre_attn_scalar**-0.5,
        sandwich_norm=True,
        scale_embeddings=True,
    ),
    # Gains are kept as their difference from 1.
    rules_of_layers("model.", SANDWICH, offset=1.0),
    must_be={"attention_bias": False, "attention_dropout": 0.0, "use_bidirectional_attention": None},
)


def gpt_oss_attention_settings(config: Any) -> dict[str, Any]:
    """Read what gpt-oss says of its attention."""
    rope = config.rope_parameters
    return attention_settings(config) | {
        "embed_dim": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "sinks": True,
        "rotary_base": rope["rope_theta"],
        "rotary_scaling": rotary_scaling_of(rope),
    }


def build_attention(package: Any, *, rotary_base: float, rotary_scaling: RotaryScaling | None, **settings: Any) -> Any:
    """Build our attention, with the rotary positions it is called with."""
    rotary = package.RotaryEmbedding(settings["head_dim"], rotary_base, pairing="halves", scaling=rotary_scaling)
    return package.GroupedQueryAttention(**settings, rotary=rotary)


GPT_OSS_ATTENTION = Family(
    "the attention of gpt-oss",
    build_attention,
    gpt_oss_attention_settings,
    (
        *(
            Rule(f"{ours}.{kind}", (f"{theirs}.{kind}",))
            for ours, theirs in {
                "q_proj": "q_proj",
                "k_proj": "k_proj",
                "v_proj": "v_proj",
                "out_proj": "o_proj",
            }.items()
            for kind in ("weight", "bias")
        ),
        Rule("sinks", ("sinks",)),
    ),
    must_be={"attention_dropout": 0.0},
)
