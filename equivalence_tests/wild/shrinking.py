"""Small sizes for the fields of any model's configuration, by their names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["RECIPES", "Recipe", "small", "small_values"]


@dataclass(frozen=True)
class Recipe:
    """Sizes of a small model.

    Args:
        width: Of the tokens.
        heads: Of the queries.
        key_heads: Of keys and values, where a model has fewer of them.
        head_dim: Width of a head, where a model takes it apart from the width of the tokens.
        layers: How many layers.
        image: Pixels of a side of an image.
        patch: Pixels of a side of a patch.
        scale: By what the rest is divided: widths of stages, of convolutions.
    """

    width: int = 48
    heads: int = 4
    key_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    image: int = 32
    patch: int = 8
    scale: int = 8


# The most telling first: heads whose width is no quotient, then what more and more models allow.
RECIPES = (
    Recipe(),
    Recipe(width=48, head_dim=12),
    Recipe(width=64, head_dim=16),
    Recipe(width=64, key_heads=4, head_dim=16),
    Recipe(width=128, heads=4, key_heads=2, head_dim=32, image=64),
    Recipe(width=128, heads=2, key_heads=2, head_dim=64, image=64, layers=4),
    Recipe(width=512, heads=4, key_heads=2, head_dim=128, image=64),
    Recipe(width=256, heads=4, key_heads=4, head_dim=64, image=224, patch=16, scale=1),
)

# The first pattern that a field's whole name matches decides: the greatest size, or the name of one of a recipe.
_RULES: tuple[tuple[str, str | int | None], ...] = (
    (r".*(token_ids?|token_index|_id|token_idx)", "token"),
    (r".*(vocab_size|vocabulary|num_embeddings|entity_vocab\w*)", 101),
    (r"(num_feat_extract_layers|.*_feature_layer|.*adapter_layers|insert_layer_id|vision_start_layer)", None),
    (
        r"(max_window_layers|first_k_dense_replace|num_dense_layers|moe_layer_start_index)",
        1,
    ),
    (
        r"(num_\w*layers\d?|n_layers?|\w*_layers|num_\w*blocks|encoder_depth|decoder_depth|depth|num_layers|layers|\w*_depth|refiner_layers)",
        "layers",
    ),
    (
        r".*(num_key_value_heads|num_kv_heads|n_kv_heads|kv_heads|num_key_value_head|n_head_kv)",
        "key_heads",
    ),
    (r"(linear_)?(num_)?\w*key_heads", "key_heads"),
    (
        r"(num_\w*heads|n_heads?|\w*attention_heads|\w*num_heads|num_heads?|heads|index_n_heads|attention_heads|nhead)",
        "heads",
    ),
    (r"qk_rope_head_dim", 8),
    (r"qk_nope_head_dim", 16),
    (r"qk_head_dim", 24),
    (r"v_head_dim", 12),
    (r".*(head_dim|d_kv|dim_head|head_size|\w*per_head|head_width)", "head_dim"),
    (r"\w*lora_rank|.*_rank", 20),
    (
        r".*(intermediate_size|ffn_dim|mlp_dim|d_ff|ff_dim|ffn_hidden\w*|inner_dim|feed_?forward\w*|n_inner)",
        56,
    ),
    (
        r"(hidden_size|d_model|d_embed|embed_dim|n_embd|dim|width|\w*hidden_dim|embedding_size|emb_dim|\w*hidden_size|\w*embed_dim|"
        r"embedding_dim|model_dim|hidden_channels|\w*projection_dim|\w*proj_dim|fpn_feature_size|mask_feature_size|"
        r"conv_dim|out_hidden_size|\w*_embed_size|out_dim|inner_hidden\w*|emb_size|d_encoder|encoder_dim|\w*channels_out|output_dim)",
        "width",
    ),
    (
        r".*(max_position_embeddings|n_positions|max_\w*positions|n_ctx|max_seq_len|max_length|context_length)",
        64,
    ),
    (r".*(image_size|img_size|input_size|sample_size)", "image"),
    (r"(temporal_patch_size|patch_size_t|p_t)", None),
    (r".*patch_size", "patch"),
    (r".*sliding_window|attention_window|window|local_window\w*|attention_window_size", 5),
    (r".*(num_frames|frames)", 4),
    (r".*(num_experts_per_tok\w*|top_k|topk|experts_per_tok\w*|moe_topk|moe_k)", 2),
    (r"topk_group|n_group|num_expert_group", 1),
    (r".*(experts|expert_num)", 4),
    (
        r"(num_queries|num_query_tokens|num_latents|num_object_queries|\w*_seq_length|mm_tokens_per_image)",
        7,
    ),
    (r".*(num_mel_bins|n_mels|num_mels|feature_size)", 16),
    (r".*(codebook_size)", 32),
)
_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in _RULES)


def small(name: str, value: Any, recipe: Recipe) -> Any:
    """Give a small value for one field; the value itself where its name says nothing.

    >>> small("hidden_size", 4096, Recipe()), small("num_key_value_heads", 32, Recipe())
    (48, 2)
    >>> small("hidden_sizes", (64, 128, 320), Recipe()), small("depths", [3, 4, 18], Recipe())
    ((8, 16, 40), [1, 1, 1])
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value > 0:
        for pattern, rule in _COMPILED:
            if pattern.fullmatch(name):
                return _limited(value, rule, recipe)
        return value
    if isinstance(value, (tuple, list)) and value and all(type(x) is int for x in value):
        return type(value)(_small_list(name, list(value), recipe))
    return value


def _limited(value: int, rule: str | int | None, recipe: Recipe) -> int:
    if rule is None:
        return value
    if rule == "token":  # special tokens stay apart from each other
        return min(value, 5 + value % 7)
    return min(value, rule if isinstance(rule, int) else getattr(recipe, rule))


def _small_list(name: str, values: list[int], recipe: Recipe) -> list[int]:
    if re.fullmatch(r"(depths?|\w*layers|\w*depths?|num_blocks|layers_per_block|\w*_depth)", name):
        return [min(value, 1) for value in values]
    if re.fullmatch(
        r"(\w*hidden_sizes|embed_dims?|dims?|block_out_channels|\w*channels|\w*_dims|conv_dim|\w*widths)", name
    ):
        return [max(value // recipe.scale, 8) if value > 16 else value for value in values]
    if re.fullmatch(r"(image_size|img_size)", name):
        return [recipe.image for _ in values]
    return values


def small_values(values: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Give what a recipe changes.

    >>> small_values({"hidden_size": 768, "layer_norm_eps": 1e-5}, Recipe())
    {'hidden_size': 48}
    """
    shrunk = {name: small(name, value, recipe) for name, value in values.items()}
    return {name: value for name, value in shrunk.items() if value != values[name]}
