"""Find out what each mask of a layer hides: from the layer's own tokens, or from the memory.

A mask hides a token if changing that token changes nothing else. That needs no reference, and no reading of the
attention inside.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equivalence_tests.checker.engine.trying import Trial
from equivalence_tests.checker.reach.calling import Inputs, forward_parameters, other_mask_plans, role_of_parameter
from equivalence_tests.checker.reach.masking import MaskForm, mask_forms

__all__ = ["LayerMask", "opposite_masks", "read_layer_masks"]

OF_SOURCE = re.compile(r"src|source|mem|enc|cross")
OF_TARGET = re.compile(r"tgt|trg|target|look|causal|self|slf|future")
# What tells two masks of one kind apart: whose tokens they hide.
WHOSE = re.compile(r"^(src|source|mem(ory)?|enc(oder)?|cross|tgt|trg|target|dec(oder)?|self|slf|x|y|key|query)_+")
HIDDEN = 1


@dataclass(frozen=True)
class LayerMask:
    """What one mask argument does.

    Args:
        parameter: Its name.
        hides: "x", "memory", or "" where no form of it hides anything.
        form: The form that does; None if there is none.
        used: Whether any form has any effect.
        tried: How many forms the layer takes.
        crosses: Whether the layer reads a memory.
    """

    parameter: str
    hides: str = ""
    form: MaskForm | None = None
    used: bool = False
    tried: int = 0
    crosses: bool = False

    @property
    def mistake(self) -> str:
        """The name of what is wrong; "" if nothing is known to be."""
        if self.tried and not self.used:
            return "layer_mask_never_used"
        name = self.parameter.lower()
        crossed = {"x": OF_SOURCE, "memory": OF_TARGET}.get(self.hides)
        own = {"x": OF_TARGET, "memory": OF_SOURCE}.get(self.hides)
        if self.crosses and crossed is not None and own is not None and crossed.search(name) and not own.search(name):
            return "masks_exchanged"
        return ""

    @property
    def meaning(self) -> str:
        """What True says: "look" or "block"; "" where no form with True in it is taken."""
        meaning = self.form.encoding.partition("_")[0] if self.form is not None else ""
        return meaning if meaning in ("look", "block") else ""


def opposite_masks(masks: Sequence[LayerMask]) -> tuple[LayerMask, LayerMask] | None:
    """Find two masks of one kind, by their names, of which one says who may be looked at and the other who may not.

    Args:
        masks: Those of one layer.
    """
    for one, other in itertools.combinations(masks, 2):
        alike = WHOSE.sub("", one.parameter.lower()) == WHOSE.sub("", other.parameter.lower())
        if alike and {one.meaning, other.meaning} == {"look", "block"}:
            return one, other
    return None


def read_layer_masks(trial: Trial) -> Iterator[LayerMask]:
    """Try each mask argument of a layer by itself, in every form.

    Args:
        trial: How the layer is called.

    Yields:
        What each mask does. Without a memory, masks that speak of one are left out.
    """
    parameters = forward_parameters(trial.caller.function)
    has_memory = any(role_of_parameter(p.name) in ("memory", "key") for p in parameters)
    for parameter in parameters:
        is_mask = role_of_parameter(parameter.name) == "mask" and not isinstance(parameter.default, bool | int | float)
        without_memory = trial.plan.self_attention and has_memory and OF_SOURCE.search(parameter.name.lower())
        if is_mask and not without_memory:
            yield _read(_asking(trial, parameter.name), parameter.name)


def _asking(trial: Trial, name: str) -> Trial:
    """The same call with the mask of this name."""
    plans = (trial.plan, *other_mask_plans(trial.caller, trial.plan))
    return replace(trial, plan=next((plan for plan in plans if plan.mask_parameter == name), trial.plan))


def _read(trial: Trial, name: str) -> LayerMask:
    inputs = trial.inputs()
    used, tried = False, 0
    without = _call(trial, inputs)
    places = [p for p in ("x", "memory") if _is_read(trial, inputs, p, without)]
    for place, form in itertools.product(places, mask_forms()):
        token = -1 if form.encoding == "lengths" else HIDDEN
        hiding = _hiding(inputs, place, token)
        output = _call(trial, hiding, form)
        if output is None:
            continue
        tried += 1
        used = used or without is None or not torch.allclose(output, without, equal_nan=True)
        changed = _call(trial, _with_change(hiding, place, token), form)
        if used and changed is not None and _same_elsewhere(output, changed, place, token):
            return LayerMask(name, place, form, True, tried, "memory" in places)
    return LayerMask(name, "", None, used, tried, "memory" in places)


def _is_read(trial: Trial, inputs: Inputs, place: str, without: Tensor | None) -> bool:
    """Whether the layer looks at a token at all without the mask; taken for granted where it needs one."""
    if place == "memory" and trial.plan.self_attention:
        return False
    changed = _call(trial, _with_change(inputs, place, HIDDEN))
    return changed is None or without is None or not _same_elsewhere(without, changed, place, HIDDEN)


def _hiding(inputs: Inputs, place: str, token: int) -> Inputs:
    """The same tensors, with one token hidden from all queries."""
    seen = inputs.query if place == "x" else inputs.key
    may = torch.ones(len(inputs.query), inputs.query.size(1), seen.size(1), dtype=torch.bool)
    may[:, :, token] = False
    return replace(inputs, may_attend=may)


def _call(trial: Trial, inputs: Inputs, form: MaskForm | None = None) -> Tensor | None:
    try:
        with torch.no_grad():
            output = trial.caller.output(trial.plan, inputs, form)
    except Exception:  # a form that the layer does not take
        return None
    return output if bool(output.isfinite().all()) else None


def _with_change(inputs: Inputs, place: str, token: int) -> Inputs:
    """Change the hidden token of one place, and keep equal tensors equal."""
    other = inputs.changed(token=token)
    if inputs.key is inputs.query:
        return other
    return replace(inputs, query=other.query) if place == "x" else replace(other, query=inputs.query)


def _same_elsewhere(before: Tensor, after: Tensor, place: str, token: int) -> bool:
    tokens = torch.arange(before.size(1))
    rows = tokens != tokens[token] if place == "x" else slice(None)
    return torch.allclose(before[:, rows], after[:, rows], rtol=1e-9, atol=1e-11)
