"""A tiny model of every entry of timm's registry that holds a product of activations."""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from equivalence_tests.wild.models import Inputs, WildModel
from equivalence_tests.wild.shrinking import Recipe, small_values

__all__ = ["timm_models"]


class _AskedForError(Exception):
    """What timm's builder was asked for; raised in its place."""

    def __init__(self, model_class: type, values: Mapping[str, Any]) -> None:
        super().__init__(model_class.__name__)
        self.model_class, self.values = model_class, values


def timm_models() -> list[WildModel]:
    """List one entry, the smallest, for every class of models and every choice of parts that the registry has."""
    import timm

    smallest: dict[str, tuple[int, str]] = {}
    for name in timm.list_models():
        asked = _asked_for(name)
        if asked is not None and "ttention" in _source(asked.model_class):
            kind, size = _kind_and_size(asked)
            smallest[kind] = min(smallest.get(kind, (size, name)), (size, name))
    return [WildModel("timm", name, functools.partial(_builds, name), _inputs) for _, name in sorted(smallest.values())]


@functools.cache
def _source(model_class: type) -> str:
    return inspect.getsource(sys.modules[model_class.__module__])


def _asked_for(name: str) -> _AskedForError | None:
    def ask(*args: Any, **kwargs: Any) -> nn.Module:
        raise _AskedForError(args[0], kwargs)

    try:
        _with_builder(name, ask)
    except _AskedForError as asked:
        return asked
    except Exception:  # an entry that needs a package of its own
        return None
    return None


def _with_builder(name: str, builder: Callable[..., nn.Module]) -> nn.Module:
    """Create a model with another builder in the place of timm's."""
    import timm

    module: Any = sys.modules[timm.models.model_entrypoint(name).__module__]
    whole = module.build_model_with_cfg
    module.build_model_with_cfg = builder
    try:
        return timm.create_model(name)
    finally:
        module.build_model_with_cfg = whole


def _kind_and_size(asked: _AskedForError) -> tuple[str, int]:
    """Numbers make no other kind of model; switches and parts do."""
    taken = {name: value for name, value in asked.values.items() if name not in ("feature_cfg", "pretrained_cfg")}
    shown = re.sub(r"0x\w+", "", repr(sorted(taken.items(), key=lambda item: item[0])))  # addresses differ by run
    numbers = [int(number) for number in re.findall(r"\d+", shown)]
    return f"{asked.model_class.__name__} {re.sub(r'[0-9.]+', '', shown)}", sum(numbers)


def _builds(name: str) -> Iterator[Callable[[], nn.Module]]:
    for pixels in (32, 64, 128, None):
        yield functools.partial(_build, name, Recipe(image=pixels or 224), pixels is not None)
    yield functools.partial(_build, name, None, False)


def _build(name: str, recipe: Recipe | None, sized: bool) -> nn.Module:
    import timm

    if recipe is None:
        model = timm.create_model(name)
    else:
        model = _with_builder(name, functools.partial(_smaller, recipe, sized))
    if sum(parameter.numel() for parameter in model.parameters()) > 150_000_000:
        raise ValueError("it stays large")
    return model


def _smaller(recipe: Recipe, sized: bool, model_class: type, *args: Any, **kwargs: Any) -> nn.Module:
    """Stand for timm's builder: shrink what the model's class takes."""
    import timm

    taken = inspect.signature(model_class).parameters
    values = {name: p.default for name, p in taken.items() if p.default is not p.empty}
    values |= {name: value for name, value in kwargs.items() if name in taken}
    shrunk = small_values({name: value for name, value in values.items() if "chans" not in name}, recipe)
    shrunk |= _per_stage(values)
    if sized and "img_size" in taken:
        shrunk["img_size"] = recipe.image
    elif not sized:
        shrunk.pop("img_size", None)
    return timm.models.build_model_with_cfg(model_class, *args, **{**kwargs, **shrunk})


def _per_stage(values: Mapping[str, Any]) -> dict[str, Any]:
    """Where a model has stages, its first width must leave room for the heads of each."""
    heads, width = values.get("num_heads"), values.get("embed_dim")
    if isinstance(heads, (tuple, list)) and isinstance(width, int):
        return {"embed_dim": 8 * heads[0]}
    return {}


def _inputs(model: Any) -> Iterator[Inputs]:
    channels, side, _ = model.default_cfg.get("input_size", (3, 224, 224))
    embedded = getattr(getattr(model, "patch_embed", None), "img_size", None)
    sides = [embedded[0] if embedded else None, 64, 128, side]
    generator = torch.Generator().manual_seed(1)
    first = next(iter(inspect.signature(model.forward).parameters))
    for pixels in dict.fromkeys(filter(None, sides)):
        yield {first: torch.randn(2, channels, pixels, pixels, generator=generator)}
