"""The models of transformers, tiny, and its registers of attention and mask functions."""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equivalence_tests.models.library import Architecture, Registration, Situation, Wrap
from equivalence_tests.models.situations import LONG, WINDOW, listed_situations
from equivalence_tests.wild.shrinking import RECIPES
from equivalence_tests.wild.torchvision_stand_in import make_importable
from equivalence_tests.wild.transformers_models import small_config
from scratch import validation

__all__ = ["MISSING", "NAMES", "Transformers", "registered_by"]

MISSING = "sidebyside models needs transformers, which is not installed: pip install 'transformers>=5.23'"
# The types of models, those first that show a fault most plainly.
NAMES = {
    "decoder": (
        "llama mistral qwen3 gemma2 gpt_oss gpt2 qwen2 gemma gemma3_text gpt_neox phi phi3 olmo2 cohere2 starcoder2 "
        "granite stablelm opt glm4 smollm3 mixtral deepseek_v3 llama4_text exaone4 falcon biogpt bloom gptj"
    ),
    "encoder": (
        "bert modernbert roberta distilbert electra albert xlm-roberta ernie nomic_bert eurobert mpnet deberta-v2"
    ),
    "encoder-decoder": "bart t5 marian pegasus mbart m2m_100 blenderbot umt5 t5gemma",
    "vision": "vit siglip_vision_model clip_vision_model deit dinov2 beit ijepa",
}
KINDS = {name: kind for kind, names in NAMES.items() for name in names.split()}
WINDOWS = {"sliding_window": WINDOW, "attention_chunk_size": WINDOW, "local_attention": 2 * WINDOW}
SEED = 0
NAME = "yours"
QUICK = "llama mistral gemma2 gpt_oss gpt2 gemma3_text deepseek_v3 bert modernbert bart t5 vit"
# Biases at 0 and gains at 1 hide what is done with them.
RANDOMISED = "p.data += torch.randn_like(p) * (0.2 if p.dim() < 2 else 0.5 / p[0].numel() ** 0.5)"


def registered_by(target: str) -> list[str]:
    """Write the line that imports a target, and so runs what its file registers."""
    return [f"from {_module_of(target)} import {target.rpartition(':')[2]} as attention"]


def _module_of(target: str) -> str:
    place = target.rpartition(":")[0]
    return Path(place).stem if place.endswith(".py") else place


class Transformers:
    """transformers, as far as its models look their attention up by a name."""

    def __init__(self) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise validation.ArgumentValueError(MISSING)
        make_importable()
        import transformers

        transformers.logging.set_verbosity_error()
        self._shipped = tuple(transformers.AttentionInterface())
        self.names: Mapping[str, Any] = {"transformers": transformers}
        self.situations: Sequence[Situation] = listed_situations()
        self.masks: Mapping[str, Callable[..., Any]] = {
            name: transformers.AttentionMaskInterface()[name] for name in ("eager", "sdpa", "flex_attention")
        }

    def architectures(
        self, names: Sequence[str] = (), quick: bool = False, tell: Callable[[str], None] = lambda _: None
    ) -> list[Architecture]:
        """Build architectures by their types.

        Args:
            names: Which; all if there are none.
            quick: Only those that differ most, where none are named.
            tell: Called with the name of each.
        """
        for name in names:
            validation.check_choice("--architecture", name, tuple(KINDS))
        listed = names or (QUICK.split() if quick else tuple(KINDS))
        found = []
        for name in (name for name in KINDS if name in listed):
            tell(name)
            found.append(_architecture(name, KINDS[name]))
        return found

    def registration(self, function: Any, mask: Any, target: str, mask_name: str) -> Registration:
        """Put a function and a mask function under a name of ours.

        Args:
            function: The attention function.
            mask: The mask function, or None.
            target: How the function is named on the command line.
            mask_name: How the mask function is.
        """
        told = "none" if mask is None else f"{mask_name}_mask" if mask_name in self.masks else mask_name
        lines = [*registered_by(target), f"transformers.AttentionInterface.register({NAME!r}, attention)"]
        if mask_name in self.masks:
            given = f"transformers.AttentionMaskInterface()[{mask_name!r}]"
            lines.append(f"transformers.AttentionMaskInterface.register({NAME!r}, {given})")
        elif mask is not None:
            lines += [f"from {_module_of(mask_name)} import {mask_name.rpartition(':')[2]} as mask_function"]
            lines.append(f"transformers.AttentionMaskInterface.register({NAME!r}, mask_function)")
        return Registration(function, mask, NAME, told, lines)

    def registered(self, function: Callable[..., Any]) -> Registration | None:
        """Find the name under which a function is registered."""
        from transformers import AttentionInterface, AttentionMaskInterface

        name = next((name for name, other in AttentionInterface().items() if other is function), None)
        if name is None:
            return None
        mask = AttentionMaskInterface().get(name)
        told = f"none is registered as {name}" if mask is None else f"that which is registered as {name}"
        return Registration(function, mask, name, told)

    @contextlib.contextmanager
    def in_use(self, model: nn.Module, registration: Registration | None, wrap: Wrap) -> Iterator[None]:
        """Let a model use a function for its attention, or its own attention, within a wrap."""
        from transformers import AttentionInterface, AttentionMaskInterface

        with contextlib.ExitStack() as stack:
            if registration is not None and registration.name in self._shipped:
                model.get_correct_attn_implementation(registration.name)  # type: ignore[operator]
            if registration is None:
                stack.enter_context(_own_attention(AttentionInterface, wrap))
            else:
                functions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
                stack.enter_context(_replaced(functions, registration.name, wrap(registration.function)))
                stack.enter_context(_replaced(masks, registration.name, registration.mask))
            _choose(model, "eager" if registration is None else registration.name)
            try:
                yield
            finally:
                _choose(model, "eager")


@contextlib.contextmanager
def _own_attention(register: Any, wrap: Wrap) -> Iterator[None]:
    """Put a wrap around what a model calls where it uses its own attention."""
    before = register.get_interface
    register.get_interface = lambda self, name, default: wrap(before(self, name, default))
    try:
        yield
    finally:
        register.get_interface = before


@contextlib.contextmanager
def _replaced(table: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Change one entry of a table for a while; None takes it out."""
    before = table.get(name)
    _put(table, name, value)
    try:
        yield
    finally:
        _put(table, name, before)


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    if value is None:
        table.pop(name, None)
    else:
        table[name] = value


def _choose(model: nn.Module, name: str) -> None:
    """Name the attention in every configuration of a model, also where it says that it does not support that."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation_internal = name


@functools.cache
def _architecture(name: str, kind: str) -> Architecture:
    """Find the smallest configuration of a type with which it can be built and run."""
    reason: Exception | None = None
    for recipe in RECIPES:
        try:
            model_class, config = _class_of(name, kind), _config(name, recipe)
            lines = _lines(model_class, config)
            found = Architecture(name, kind, functools.partial(_built, lines), _is_windowed(config), lines)
            model = found.build()
            with torch.no_grad():
                model(**_anything(kind))
        except Exception as error:  # a library fails in any way
            reason = error
            continue
        return found
    raise RuntimeError(f"{name} cannot be built small: {reason}")


def _class_of(name: str, kind: str) -> Any:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    table = {
        "decoder": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    }.get(kind, modeling_auto.MODEL_MAPPING)
    found = table[CONFIG_MAPPING[name]]
    return found[0] if isinstance(found, (tuple, list)) else found


def _config(name: str, recipe: Any) -> Any:
    """Make a small configuration: without dropout, with a window shorter than the long text."""
    from transformers import CONFIG_MAPPING

    config = small_config(CONFIG_MAPPING[name], recipe)
    inner = [getattr(config, one, None) for one in config.sub_configs]
    for one in (config, *(x for x in inner if x is not None)):
        for key, value in vars(one).items():
            if isinstance(value, float) and "drop" in key:
                setattr(one, key, 0.0)
        for key, size in WINDOWS.items():
            if getattr(one, key, None) is not None:
                setattr(one, key, size)
    return config


def _is_windowed(config: Any) -> bool:
    return any(getattr(config, key, None) is not None for key in WINDOWS)


def _lines(model_class: Any, config: Any) -> tuple[str, ...]:
    """Write the lines that build a model."""
    usual = type(config)().to_dict()
    said = {key: value for key, value in config.to_dict().items() if key not in _NOT_SAID}
    changed = {key: value for key, value in said.items() if key not in usual or usual[key] != value}
    made = f"transformers.{type(config).__name__}(**{changed!r})"
    eager = "attn_implementation='eager'" + ", experts_implementation='eager'" * ("expert" in str(said))
    return (
        f"torch.manual_seed({SEED})",
        f"config = {made}",
        f"model = transformers.{model_class.__name__}._from_config(config, {eager}).eval()",
        f"for p in model.parameters(): {RANDOMISED}",
    )


_NOT_SAID = ("transformers_version", "model_type", "architectures", "dtype", "id2label", "label2id", "_name_or_path")


def _built(lines: Sequence[str]) -> nn.Module:
    import transformers

    names: dict[str, Any] = {"torch": torch, "transformers": transformers}
    exec("\n".join(lines), names)
    return names["model"]


def _anything(kind: str) -> dict[str, Any]:
    """Give inputs that every model of a kind takes."""
    if kind == "vision":
        return {"pixel_values": torch.zeros(2, 3, 32, 32)}
    ids = torch.arange(2 * LONG).view(2, LONG) % 37 + 13
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if kind == "encoder-decoder" else {})
