"""A tiny model of every class of diffusers, and its plain attention with every processor that it can have."""

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.wild.models import Inputs, WildModel, accepted
from equivalence_tests.wild.shrinking import Recipe, small_values

__all__ = ["diffusers_models"]

# Widths of what a model is conditioned on, and the names that they have among the arguments of constructors.
TEXT = [
    "cross_attention_dim",
    "joint_attention_dim",
    "text_dim",
    "caption_channels",
    "text_embed_dim",
    "encoder_hid_dim",
    "cap_feat_dim",
    "cross_attention_input_dim",
    "cond_token_dim",
    "text_states_dim",
    "text_hidden_dim",
    "encoder_hidden_size",
    "context_in_dim",
    "caption_channels_0",
    "cross_attention_hidden_size",
    "txt_dim",
    "in_context_dim",
]
POOLED = [
    "pooled_projection_dim",
    "pooled_embed_dim",
    "global_states_input_dim",
    "global_cond_dim",
    "in_visual_dim",
    "image_dim",
    "clip_img_dim",
    "text_pooled_dim",
]
WIDTH, POOLED_WIDTH, BATCH, TOKENS = 40, 24, 2, 7
# The names that what is given in a call has among the arguments of forward.
OF_HIDDEN = ("hidden_states", "sample", "x", "control_hidden_states", "context_latents", "controlnet_cond")
OF_TEXT = ("encoder_hidden_states", "cap_feats", "context", "encoder_hidden_states_text", "text_bth")
OF_POOLED = (
    "pooled_projections",
    "pooled_text_emb",
    "pooled_projection",
    "global_hidden_states",
    "clip_text_pooled",
    "proj_embedding",
)
OF_TIME = ("timestep", "t", "timestep_r", "r_timestep", "timesteps", "timestep_ratio")
OF_IMAGE_IDS = ("img_ids", "image_ids")
RECIPES = (
    Recipe(heads=3, head_dim=1000, width=96, layers=1, image=16, patch=2),
    Recipe(layers=2, image=16, patch=2),
    Recipe(heads=3, head_dim=64, width=192, layers=1, image=16, patch=2),  # three heads of 64 make up the width
)


def diffusers_models() -> list[WildModel]:
    """List every class of models, and ``Attention`` with every processor."""
    import diffusers
    from diffusers.models import attention_processor

    named = [getattr(diffusers, n, None) for n in dir(diffusers) if not n.startswith("Auto") or "coder" in n]
    classes = {x.__name__: x for x in named if inspect.isclass(x) and issubclass(x, diffusers.ModelMixin)}
    classes.pop(diffusers.ModelMixin.__name__, None)
    models = [
        WildModel("diffusers", name, functools.partial(_builds, found), _inputs)
        for name, found in sorted(classes.items())
    ]
    processors = [
        found
        for name, found in vars(attention_processor).items()
        if inspect.isclass(found)
        and name.endswith(("Processor", "Processor2_0"))
        and found.__module__.endswith("attention_processor")
    ]
    return models + [
        WildModel("diffusers", f"Attention/{found.__name__}", functools.partial(_attentions, found), _attention_inputs)
        for found in processors
    ]


def _builds(model_class: type) -> Iterator[Callable[[], nn.Module]]:
    for recipe in RECIPES:
        for narrow in (True, False):
            yield functools.partial(_build, model_class, recipe, narrow)


def _build(model_class: type, recipe: Recipe, narrow: bool) -> nn.Module:
    taken = inspect.signature(model_class).parameters
    values = {name: p.default for name, p in taken.items() if p.default is not p.empty}
    fixed = {"in_channels", "out_channels", "latent_channels", "freq_dim"}
    required = {"in_channels": 4, "out_channels": 4, "latent_channels": 4, "sample_size": 8, "num_layers": 1}
    shrunk = small_values({name: value for name, value in values.items() if name not in fixed}, recipe)
    for name in ("block_out_channels", "down_block_out_channels", "up_block_out_channels", "norm_num_groups"):
        if isinstance(values.get(name), (tuple, list)):
            shrunk[name] = type(values[name])(32 * (i + 1) for i in range(len(values[name])))
    for names, width in ((TEXT, WIDTH), (POOLED, POOLED_WIDTH)):
        shrunk |= {name: width for name in names if narrow and isinstance(values.get(name), int)}
    shrunk |= {name: size for name, size in required.items() if name in taken and not values.get(name)}
    return _if_small(model_class, shrunk)


def _if_small(model_class: Any, values: dict[str, Any]) -> nn.Module:
    with torch.device("meta"):
        try:
            size = sum(parameter.numel() for parameter in model_class(**values).parameters())
        except NotImplementedError:  # values of meta tensors are asked for
            size = 0
    if size > 200_000_000:
        raise ValueError(f"it stays large: {size} parameters")
    return _lenient(model_class(**values))


def _lenient(model: nn.Module) -> nn.Module:
    """Let layers outside attentions take any width: only a pipeline knows the widths of what conditions a model."""

    def fit(layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        axis, width = (-1, layer.in_features) if isinstance(layer, nn.Linear) else (1, layer.in_channels)
        given = args[0].to(layer.weight.dtype) if args and isinstance(args[0], Tensor) else None
        if given is None or given.dim() < 2 or given.shape[axis] in (width, 0):
            return None if given is None else (given, *args[1:])
        repeated = torch.cat([given] * -(-width // given.shape[axis]), dim=axis)
        return (repeated.narrow(axis, 0, width), *args[1:])

    for path, layer in model.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) and not re.search(r"att|to_[qkv]|qkv", path):
            layer.register_forward_pre_hook(fit)
    return model


def _config(model: Any, names: list[str], otherwise: int) -> int:
    found = (model.config.get(name) for name in names)
    return next((value for value in found if isinstance(value, int)), otherwise)


def _inputs(model: nn.Module) -> Iterator[Inputs]:
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(1))
    channels = _config(model, ["in_channels", "in_dim", "latent_channels", "num_channels"], 4)
    shapes = (
        (channels, 8, 8),
        (channels, 3, 8, 8),
        (16, channels),
        (3, channels, 8, 8),
        (channels, 16),
        (channels, 32, 32),
        (channels, 9, 32, 32),
    )
    for shape, typed in itertools.product(shapes, (torch.float32, torch.int64)):
        hidden = draw(BATCH, *shape)
        offered = _offered(model, hidden, draw, typed)
        yield accepted(model.forward, offered)
        needed = [n for n, p in inspect.signature(model.forward).parameters.items() if p.default is p.empty]
        offered.pop("guidance")
        yield accepted(model.forward, offered)
        yield {name: offered[name] for name in needed if name in offered}


def _offered(model: Any, hidden: Tensor, draw: Callable[..., Tensor], typed: torch.dtype) -> dict[str, Any]:
    """Give a value to each argument that a model may have."""
    tokens = hidden.shape[1] if hidden.dim() == 3 else 16
    text = draw(BATCH, TOKENS, _config(model, TEXT, WIDTH))
    pooled = draw(BATCH, _config(model, POOLED, POOLED_WIDTH))
    time, ids = torch.tensor([3, 5]).to(typed), _position_ids(model, tokens)
    named = {OF_HIDDEN: hidden, OF_TEXT: text, OF_POOLED: pooled, OF_TIME: time, OF_IMAGE_IDS: ids}
    offered: dict[str, Any] = {name: x for names, x in named.items() for name in names}
    return offered | {"txt_ids": torch.zeros(TOKENS, ids.shape[1]), "added_time_ids": draw(BATCH, 3)} | _fixed(tokens)


def _position_ids(model: Any, tokens: int) -> Tensor:
    """Give each token of an image its place on every axis that the model counts."""
    grid = torch.meshgrid(torch.arange(1), torch.arange(4), torch.arange(tokens // 4), indexing="ij")
    ids = torch.stack(grid, -1).reshape(-1, 3).float()
    axes = len(model.config.get("axes_dims_rope", None) or (0, 0, 0))
    return torch.cat([ids, torch.zeros(len(ids), axes - 3)], 1) if axes > 3 else ids


def _fixed(tokens: int) -> dict[str, Any]:
    """Give the arguments that depend on nothing but the number of tokens."""
    return {
        "guidance": torch.tensor([1.0, 2.0]),
        "encoder_attention_mask": torch.ones(BATCH, TOKENS),
        "encoder_hidden_states_mask": torch.ones(BATCH, TOKENS, dtype=torch.bool),
        "img_shapes": [[(1, 4, tokens // 4)]] * BATCH,
        "txt_seq_lens": [TOKENS] * BATCH,
        "conditioning_scale": 1.0,
        "class_labels": torch.tensor([0, 1]),
        "num_frames": 2,
        "height": 4,
        "width": tokens // 4,
        "fps": torch.tensor([8, 8]),
        "original_size": torch.tensor([[64, 64]] * BATCH),
        "target_size": torch.tensor([[64, 64]] * BATCH),
        "crop_coords": torch.tensor([[0, 0]] * BATCH),
        "position_ids": torch.zeros(BATCH, TOKENS + tokens, 3, dtype=torch.int64),
        "chunk_partition": (1, 2),
        "text_lens": torch.tensor([TOKENS, TOKENS - 2]),
        "prior_token_id": torch.ones(BATCH, tokens, dtype=torch.int64),
        "prior_token_drop": torch.zeros(BATCH, tokens, dtype=torch.bool),
        "rotary_embedding": None,
        "image_rotary_emb": None,
        "return_dict": False,
    }


def _attentions(processor: type) -> Iterator[Callable[[], nn.Module]]:
    from diffusers.models.attention_processor import Attention

    def build(added: bool) -> nn.Module:
        wanted = [n for n, p in inspect.signature(processor).parameters.items() if p.default is p.empty]
        sizes = {"slice_size": 2, "hidden_size": 48, "cross_attention_dim": 40, "partition_size": 2}
        made = processor(**{name: sizes[name] for name in wanted})
        extra = {"added_kv_proj_dim": 40, "norm_num_groups": 4} if added else {}
        return Attention(48, None if added else 40, heads=4, dim_head=10, bias=True, processor=made, **extra)

    yield functools.partial(build, False)
    yield functools.partial(build, True)


def _attention_inputs(model: nn.Module) -> Iterator[Inputs]:
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(1))
    for context in (40, 48):
        yield {"hidden_states": draw(BATCH, 11, 48), "encoder_hidden_states": draw(BATCH, TOKENS, context)}
    yield {"hidden_states": draw(BATCH, 11, 48)}
