"""A tiny model of every type that transformers knows, built from its own configuration."""

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.wild.models import Inputs, WildModel, accepted
from equivalence_tests.wild.shrinking import RECIPES, Recipe, small_values

__all__ = ["transformers_models"]

BATCH, TOKENS = 2, 11


def transformers_models() -> list[WildModel]:
    """List every model type of AutoModel."""
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    types = [kind for kind in CONFIG_MAPPING if kind in MODEL_MAPPING._model_mapping]
    return [
        WildModel("transformers", kind, functools.partial(_builds, kind), _inputs, _with_each_attention)
        for kind in types
    ]


def _with_each_attention(model: nn.Module) -> Iterator[str]:
    """Let a model use the attention written out, then torch's, as far as it says that it supports that."""
    owners: list[Any] = [module for module in model.modules() if hasattr(module, "config")]
    without = {id(owner.config) for owner in owners if getattr(owner, "_supports_sdpa", True) is False}
    for implementation in ("eager", "sdpa"):
        able = [owner.config for owner in owners if implementation == "eager" or id(owner.config) not in without]
        for config in able:
            config._attn_implementation_internal = implementation
        if able:
            yield implementation


def _builds(kind: str) -> Iterator[Callable[[], nn.Module]]:
    from transformers import CONFIG_MAPPING

    for recipe in RECIPES:
        for free in (True, False):
            yield functools.partial(_build, CONFIG_MAPPING[kind], recipe, free)


def _build(config_class: type, recipe: Recipe, free: bool) -> nn.Module:
    from transformers import MODEL_MAPPING

    config = small_config(config_class, recipe, free)
    for one in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if one is not None:
            one._attn_implementation = "eager"
    model_class = MODEL_MAPPING[config_class]
    model_class = model_class[0] if isinstance(model_class, (tuple, list)) else model_class
    if sum(p.numel() for p in _on_meta(model_class, config)) > 60_000_000:
        raise ValueError("it stays large")
    return model_class(config)


def _on_meta(model_class: type, config: Any) -> list[nn.Parameter]:
    with torch.device("meta"), contextlib.suppress(Exception):
        return list(model_class(copy.deepcopy(config)).parameters())
    return []


def small_config(config_class: Any, recipe: Recipe, free: bool = True) -> Any:
    """Build a small configuration: every field by its name, every configuration inside likewise.

    Args:
        config_class: A configuration class of transformers.
        recipe: The sizes.
        free: Whether the width of a head, where it is given, may be another than the quotient.
    """
    defaults = _defaults(config_class)
    values = small_values(defaults, recipe)
    if not free and "head_dim" in defaults:
        values.pop("head_dim", None)
    kinds = getattr(_made(config_class), "layer_types", None)
    count = next((name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in values), None)
    if kinds and count:
        values[count] = max(values[count], *(list(kinds).index(kind) + 1 for kind in set(kinds)))
        if values[count] > 8:
            values[count] = recipe.layers
        if defaults.get("layer_types"):
            values["layer_types"] = list(kinds)[: values[count]]
    for name, value in _inner_configs(config_class):
        values[name] = small_config(type(value), recipe, free)
    values |= {name: False for name in ("use_kernels", "use_mamba_kernels") if name in defaults}
    return config_class(**values)


def _defaults(config_class: Any) -> dict[str, Any]:
    """The fields as they are declared: what is None there is worked out from the others."""
    if not dataclasses.is_dataclass(config_class):
        return dict(vars(config_class()))
    found = {}
    for field in dataclasses.fields(config_class):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


@functools.cache
def _made(config_class: Any) -> Any:
    try:
        return config_class()
    except Exception:  # one that wants arguments; then nothing is known of its layers
        return None


def _inner_configs(config_class: Any) -> Iterator[tuple[str, Any]]:
    made = _made(config_class)
    for name in getattr(config_class, "sub_configs", ()):
        value = getattr(made, name, None)
        if value is not None and hasattr(value, "to_dict"):
            yield name, value


def _inputs(model: Any) -> Iterator[Inputs]:
    """What models take, by their arguments' names; each way is tried until one runs."""
    generator = torch.Generator().manual_seed(1)
    config = model.config
    texts = _texts(config, generator)
    for pictures in _pictures(config, generator):
        for sounds in _sounds(config, generator):
            offered = {**texts, **pictures, **sounds}
            yield accepted(model.forward, _without_images(offered, model))
            yield accepted(model.forward, offered)
            main = getattr(model, "main_input_name", "input_ids")
            if main in offered:
                yield {main: offered[main]}
                yield accepted(
                    model.forward, {name: offered[name] for name in (main, "decoder_input_ids") if name in offered}
                )


def _without_images(offered: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """For models that take text and more, the text alone first."""
    if "input_ids" not in accepted(model.forward, offered) or model.main_input_name != "input_ids":
        return offered
    kept = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "bbox")
    return {name: value for name, value in offered.items() if name in kept}


def _texts(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    sizes = [getattr(one, "vocab_size", None) for one in _configs(config)]
    vocabulary = min((size for size in sizes if isinstance(size, int) and size > 20), default=50)
    ids = torch.randint(13, vocabulary, (BATCH, TOKENS), generator=generator)
    mask = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    mask[1, -2:] = 0
    boxes = torch.randint(0, 10, (BATCH, TOKENS, 2), generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(13, vocabulary, (BATCH, TOKENS - 4), generator=generator),
        "bbox": torch.cat([boxes, boxes + 7], dim=-1),
    }


def _configs(config: Any) -> list[Any]:
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return [config, *(one for one in inner if one is not None)]


def _number(config: Any, *names: str, otherwise: int) -> int:
    """Give the first whole number that a configuration, or one inside it, has under one of these names."""
    for one, name in itertools.product(_configs(config), names):
        value = getattr(one, name, None)
        while isinstance(value, (tuple, list)) and value:
            value = value[0]
        if type(value) is int:
            return value
    return otherwise


def _pictures(config: Any, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    side = _number(config, "image_size", "img_size", otherwise=64)
    channels = _number(config, "num_channels", "in_channels", "in_chans", otherwise=3)
    frames = _number(config, "num_frames", otherwise=4)
    for pixels_of_side in dict.fromkeys((side, 64, 224)):
        pixels = torch.randn(BATCH, channels, pixels_of_side, pixels_of_side, generator=generator)
        videos = pixels[:, None].expand(-1, frames, -1, -1, -1).clone()
        mask = torch.ones(BATCH, pixels_of_side, pixels_of_side, dtype=torch.int64)
        yield {"pixel_values": pixels, "pixel_values_videos": videos, "pixel_mask": mask}
        yield {"pixel_values": videos, "pixel_values_videos": videos}
    yield _patches(config, channels, generator)


def _patches(config: Any, channels: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Images of different sizes, their patches in one sequence, with the number of patches along each axis."""
    vision = getattr(config, "vision_config", config)
    side, merged = _number(vision, "patch_size", otherwise=8), _number(vision, "spatial_merge_size", otherwise=2)
    depth = _number(vision, "temporal_patch_size", otherwise=1)
    grid = torch.tensor([[1, 2 * merged, 3 * merged], [1, 2 * merged, merged]])
    pixels = torch.randn(int(grid.prod(1).sum()), channels * depth * side * side, generator=generator)
    return {"hidden_states": pixels, "pixel_values": pixels, "grid_thw": grid, "image_grid_thw": grid}


def _sounds(config: Any, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    names = ("num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "input_dim")
    bins = _number(config, *names, otherwise=16)
    positions = _number(config, "max_source_positions", otherwise=32)
    wave = torch.randn(BATCH, 4000, generator=generator)
    for shape in ((bins, 2 * positions), (48, bins), (bins, 48)):
        yield {"input_values": wave, "input_features": torch.randn(BATCH, *shape, generator=generator)}
    features = torch.randn(BATCH, 48, bins, generator=generator)
    yield {"input_values": features, "input_features": features}
    yield {"input_values": wave[:, None], "input_features": features}
