"""What can be recorded and traced."""

import inspect
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from scratch.validation.attention import AN_ATTENTION, ATTENTION
from scratch.validation.basics import ArgumentTypeError, ArgumentValueError

__all__ = [
    "RECORDED_ARGUMENTS",
    "check_map_recorded",
    "check_maps_to_draw",
    "check_path_part",
    "check_recordable",
]


RECORDED_ARGUMENTS = (*ATTENTION, "need_weights")


def check_recordable(model: nn.Module, attentions: Mapping[str, nn.Module]) -> None:
    """Require a model with attention modules whose calls can be seen and read; they come by their paths."""
    for path, module in model.named_modules():
        compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        if compiled and not set(attentions.values()).isdisjoint(module.modules()):
            raise ArgumentValueError(
                f"model must not be compiled, because compiled code may pass by the hooks: record the model that was "
                f"given to torch.compile, which has the same parameters; got a compiled {type(module).__name__} at "
                f"path {path!r}"
            )
    if not attentions:
        raise ArgumentValueError(f"model must be or hold {AN_ATTENTION}, got {type(model).__name__} with none")
    for path, module in attentions.items():
        found = inspect.signature(module.forward).parameters
        missing = [name for name in RECORDED_ARGUMENTS if name not in found]
        if missing:
            raise ArgumentTypeError(
                f"model must hold attention modules whose forward takes {', '.join(RECORDED_ARGUMENTS)}, got "
                f"{type(module).__name__} at path {path!r} without {', '.join(missing)}"
            )


def check_map_recorded(path: str, calls: Mapping[str, Sequence[Tensor]]) -> None:
    """Require the path of an attention module that was called; a KeyError, as of every mapping."""
    if path not in calls:
        raise KeyError(f"path must be that of an attention module, one of {', '.join(map(repr, calls))}; got {path!r}")
    if not calls[path]:
        raise KeyError(f"path must be that of an attention module that was called while recording; {path!r} was not")


def check_path_part(part: str, paths: Sequence[str]) -> None:
    """Require a part of the path of at least one attention."""
    if not any(part in path for path in paths):
        raise ArgumentValueError(f"--only must be in the path of an attention, one of {', '.join(paths)}; got {part!r}")


def check_maps_to_draw(maps: Mapping[str, Tensor]) -> None:
    """Require at least one attention map."""
    if not maps:
        raise ArgumentValueError("maps must hold at least one attention map, got none")
