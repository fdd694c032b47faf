"""Decode with the cache that a whole model takes or keeps, on token ids, as an attention does on features."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.caches import exercised_cache
from equivalence_tests.checker.layers.walk import Walk
from equivalence_tests.checker.reach.arguments import Sizes, role_of_parameter
from equivalence_tests.checker.reach.branches import RAN
from equivalence_tests.checker.reach.calling import CallPlan, Extra, Inputs, Trial
from equivalence_tests.checker.reach.masking import MaskForm
from equivalence_tests.checker.reach.model_calls import ModelRun
from equivalence_tests.checker.reach.plans import POSITION
from equivalence_tests.checker.reach.state import keeping_state
from equivalence_tests.checker.reach.tracing import tensors_in

Arguments = Callable[[Tensor, Tensor], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class _OnIds(Trial):
    """A way to call a model on token ids, (batch, tokens)."""

    ids: Tensor
    given: Arguments  # gives the arguments for ids

    def inputs(self, query_len: int | None = None, key_len: int | None = None, seed: int = 11) -> Inputs:
        """Give the first ids."""
        ids = self.ids[:, :query_len]
        return Inputs(ids, ids, ids)

    def arguments(
        self, inputs: Inputs, extra: Extra = None, mask: MaskForm | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the arguments for ids, with more by name."""
        return (), self.given(inputs.query, inputs.query) | dict(extra or {})


def add_decoding(walk: Walk, run: ModelRun) -> None:
    """Decode a model that shows no mistake, token by token and in two chunks, and compare that with one pass."""
    trial = None if walk.report.findings else _on_ids(walk.module, run, walk.sizes)
    if trial is not None:
        exercises, findings = RAN.watching(exercised_cache)(trial, [lambda *_: {}])
        walk.report.coverage += exercises
        walk.report.findings += findings


def _on_ids(module: nn.Module, run: ModelRun, sizes: Sizes) -> Trial | None:
    """Give the call of a model on ids alone, in which it can be decoded; None where it takes or gives anything else."""
    if run.kind != "ids" or run.target is not None or run.length_first or run.arguments is None:
        return None
    given = run.arguments(run.source, run.source)
    beside = {name: x for name, x in given.items() if isinstance(x, Tensor) and x is not run.source}
    if any(not POSITION.search(name) or role_of_parameter(name) == "mask" for name in beside):
        return None
    with torch.no_grad(), keeping_state(module):
        returned, output = list(tensors_in((module(**given),))), run.call(run.source, None)
    places = [place for place, x in enumerate(returned) if x.shape == output.shape and torch.equal(x, output)]
    roles = [(name, "input" if x is run.source else f"={x}") for name, x in given.items()]
    plan = CallPlan(tuple(roles), "b l e", output=next(iter(places), 0))
    return _OnIds(module, plan, sizes, output.dtype, ids=run.source, given=run.arguments) if places else None
