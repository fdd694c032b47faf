"""How many calls are tried before it is said that there is no way."""

import torch
from torch import Tensor, nn

from equivalence_tests.checker.reach.construction import Sizes
from equivalence_tests.checker.reach.plans import trials_of


class OfOneQuery(nn.Module):
    """Takes one query a sample, without an axis of lengths, and so fails before it comes to its mask."""

    calls = 0

    def forward(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        type(self).calls += 1
        if query.dim() != 1:
            raise ValueError("one query")
        return (key @ query).masked_fill(~mask, float("-inf")).softmax(-1) @ key


class OfAMaskOfTwoAxes(nn.Module):
    """Refuses masks of other ranks in the same words, and none at all."""

    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None or mask.dim() != 2 or mask.size(0) != query.size(1):
            raise ValueError("want a mask of two axes")
        return (query @ key.mT).masked_fill(~mask, float("-inf")).softmax(-1) @ key


def test_other_masks_are_not_tried_where_no_mask_is_reached() -> None:
    assert not list(trials_of(OfOneQuery(), Sizes(), torch.float64, []))
    assert 0 < OfOneQuery.calls < 600


def test_a_mask_of_a_certain_form_is_found_though_others_are_refused_alike() -> None:
    trial = next(trials_of(OfAMaskOfTwoAxes(), Sizes(), torch.float64, []))
    assert trial.plan.neutral is not None
    assert trial.plan.neutral.shape == "(query, key)"
