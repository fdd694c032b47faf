"""Follow the masks of a model: which attention gets that of the source, and which that of the target.

A mask reaches a layer if what the layer is handed changes when the mask hides one token more or, where the model
builds its masks itself, when one token becomes padding. What a mask hides there, ``layer_masks`` has found out.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.layers.layer_masks import OF_SOURCE, OF_TARGET, LayerMask
from equivalence_tests.checker.reach.calling import role_of_parameter
from equivalence_tests.checker.reach.masking import MaskForm
from equivalence_tests.checker.reach.model_calls import ModelRun
from equivalence_tests.checker.reach.tracing import trace

__all__ = ["judge_model_masks"]

Row = tuple[str, str, str]  # what was looked at, the mistake or "", and where
Handed = dict[tuple[str, str], Tensor]  # by path of the layer and name of the argument
HIDDEN = 1
USUAL_PADS = (0, 1, 2, 3)
TORCHS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True)
class Place:
    """Where a layer takes a mask: of the source, of the target, or of the memory in the decoder."""

    path: str
    parameter: str
    reads: str
    encoding: str = ""


@dataclass(frozen=True)
class Origin:
    """Where a mask comes from: an argument of the model, or the padding in a sequence.

    Args:
        name: The argument, or "padding".
        side: "source", "target", or "" where the name does not say.
        hides_keys: Whether it can hide a key from all queries.
        reached: The places that it reaches.
        has_effect: Whether it changes what comes out.
    """

    name: str
    side: str
    hides_keys: bool
    reached: frozenset[Place]
    has_effect: bool


def judge_model_masks(
    module: nn.Module, run: ModelRun, known: Mapping[type[nn.Module], Sequence[LayerMask]]
) -> Iterator[Row]:
    """Say which masks do not reach the attentions that they are meant for.

    Args:
        module: The model.
        run: How it is called.
        known: What each mask of its layers hides, by class of the layer.

    Yields:
        What was looked at, the name of the mistake ("" if there is none), and where.
    """
    places = list(_places(module, known))
    if not places:
        return
    run = _on_equal_lengths(run)
    origins = [*_arguments(module, run, places), *_paddings(module, run, places)]
    unused = [origin for origin in origins if not origin.reached and not origin.has_effect]
    for origin in unused:
        yield "masks of the model", "model_mask_never_used", origin.name
    exchanged = run.target is not None and any(_exchanged(origins, place) for place in places)
    dropped = [] if exchanged or unused else _dropped(origins, places)
    if exchanged:
        yield "masks of the model", "masks_exchanged", ""
    for place in dropped:
        yield "masks of the model", "model_mask_dropped", place.path
    inverted = _inverted(module, run, places, origins)
    if inverted:
        yield "masks of the model", "model_padding_inverted", inverted
    if origins and not (unused or exchanged or dropped or inverted):
        yield "masks of the model", "", ""


def _on_equal_lengths(run: ModelRun) -> ModelRun:
    """A mask that goes to the wrong attention fits there only if both sequences are of one length."""
    if run.target is None:
        return run
    length = min(run.source.size(1), run.target.size(1))
    return replace(run, source=run.source[:, :length], target=run.target[:, :length])


def _places(module: nn.Module, known: Mapping[type[nn.Module], Sequence[LayerMask]]) -> Iterator[Place]:
    for path, child in module.named_modules():
        for mask in known.get(type(child), ()):
            if mask.form is not None:
                own = "target" if mask.crosses else "source"
                yield Place(path, mask.parameter, "memory" if mask.hides == "memory" else own, mask.form.encoding)
        if isinstance(child, TORCHS):
            own = "target" if isinstance(child, nn.TransformerDecoderLayer) else "source"
            names = [name for name in inspect.signature(child.forward).parameters if name.endswith("mask")]
            yield from (Place(path, name, "memory" if name.startswith("memory") else own) for name in names)


def _handed(
    module: nn.Module, run: ModelRun, places: Sequence[Place], given: Mapping[str, Tensor], *sequences: Tensor | None
) -> Handed:
    """Run the model and list the masks that its layers are handed; "" is what comes out."""
    source, target = sequences or (run.source, run.target)
    assert source is not None  # a source there is
    outputs: list[Tensor] = []
    with torch.enable_grad():  # else torch's own layers take a fast path, which hands no masks on
        calls = trace(module, lambda: outputs.append(run.run(source, target, given).detach()))
    handed: Handed = {("", ""): outputs[0]}
    for call in (call for call in calls if call.path in {place.path for place in places}):
        forward = module.get_submodule(call.path).forward
        arguments = inspect.signature(forward).bind_partial(*call.args, **call.kwargs).arguments
        handed |= {(call.path, name): x.detach() for name, x in arguments.items() if _is_mask(name, x)}
    return handed


def _is_mask(name: str, given: Any) -> bool:
    return role_of_parameter(name) == "mask" and isinstance(given, Tensor)


def _differing(places: Sequence[Place], one: Handed, other: Handed) -> frozenset[Place]:
    return frozenset(p for p in places if not _same(one.get((p.path, p.parameter)), other.get((p.path, p.parameter))))


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one, other)


def _side(name: str) -> str:
    source, target = OF_SOURCE.search(name.lower()), OF_TARGET.search(name.lower())
    return "" if bool(source) == bool(target) else "source" if source else "target"


def _arguments(module: nn.Module, run: ModelRun, places: Sequence[Place]) -> Iterator[Origin]:
    """Try each mask argument of the model in every form that it takes."""
    for name in run.masks:
        reached, has_effect, hides_keys, taken = frozenset[Place](), False, False, 0
        may = torch.ones(len(run.source), *2 * [run.source.size(1)], dtype=torch.bool)
        for form in MaskForm.neutral_forms():
            hiding = may.clone()
            hiding[:, :, HIDDEN] = False
            try:
                with_all, without = (
                    _handed(module, run, places, {name: form.build(m, 1, torch.get_default_dtype())})
                    for m in (may, hiding)
                )
            except Exception:  # a form that the model does not take
                continue
            found = _differing(places, with_all, without)
            reached, taken = reached | found, taken + 1
            hides_keys = hides_keys or (bool(found) and "query" not in form.shape)
            has_effect = has_effect or not torch.allclose(with_all["", ""], without["", ""], equal_nan=True)
            if reached and (hides_keys or _side(name) == "target"):
                break
        if taken:
            yield Origin(name, _side(name), hides_keys, reached, has_effect)


def _paddings(module: nn.Module, run: ModelRun, places: Sequence[Place]) -> Iterator[Origin]:
    """Let one token become padding: what changes for the layers is a mask that the model builds."""
    if run.kind not in ("ids", "memory"):
        return
    plain = _handed(module, run, places, {})
    for side, ids in (("source", run.source), ("target", run.target)):
        padded = ids if ids is None or ids.is_floating_point() else ids.clone()
        for place, pad in zip(range(HIDDEN, run.source.size(1)), _pads(module), strict=False):
            if padded is not None and padded is not ids:
                padded[:, place] = pad
        pair = (padded, run.target) if side == "source" else (run.source, padded)
        reached = _differing(places, plain, _handed(module, run, places, {}, *pair))
        if reached:
            yield Origin("padding", side, True, reached, True)


def _pads(module: nn.Module) -> list[int]:
    told = [v for m in module.modules() for name, v in vars(m).items() if "pad" in name.lower() and type(v) is int]
    most = min(m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding))
    return [n for n in dict.fromkeys([*told, *USUAL_PADS]) if 0 <= n < most]


def _exchanged(origins: Sequence[Origin], place: Place) -> bool:
    """Whether a place gets the mask of the other sequence and not that of its own."""
    own, other = ("target", "source") if place.reads == "target" else ("source", "target")
    sides = {origin.side for origin in origins if place in origin.reached}
    return other in sides and not sides & {own, ""}


def _dropped(origins: Sequence[Origin], places: Sequence[Place]) -> list[Place]:
    """List the first layers whose attention gets no mask of a sequence that has one which can hide any key."""
    found = []
    for reads, side in (("source", "source"), ("memory", "source"), ("target", "target")):
        masks = [origin for origin in origins if origin.side == side and (origin.hides_keys or side == "target")]
        others = {place for origin in origins for place in origin.reached if origin.side in (side, "")}
        here = [place for place in places if place.reads == reads]
        if masks and here and not others & set(here):
            found.append(here[0])
    return found


def _inverted(module: nn.Module, run: ModelRun, places: Sequence[Place], origins: Sequence[Origin]) -> str:
    """Name a layer that is shown nothing of a source without padding, by a mask made of its padding."""
    handed = _handed(module, run, places, {})
    padded = {place for origin in origins if origin.name == "padding" for place in origin.reached}
    for place in places:
        mask = handed.get((place.path, place.parameter))
        if place in padded and place.reads != "target" and mask is not None and _hides_all(mask, place.encoding):
            return place.path
    return ""


def _hides_all(mask: Tensor, encoding: str) -> bool:
    if not encoding:
        encoding = "additive" if mask.is_floating_point() else "block"
    if encoding == "additive":
        return bool((mask < -1).all())
    if encoding == "lengths":
        return False
    return bool((mask != 0).all()) if encoding.startswith("block") else not bool(mask.any())
