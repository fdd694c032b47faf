"""Recorded operations give what they give unwatched."""

import pytest
import torch

from equivalence_tests.checker.engine.watching import Recorder


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float64])
def test_the_sum_of_what_a_mask_lets_through(dtype: torch.dtype) -> None:
    x, mask = torch.arange(30.0, dtype=torch.float64).view(2, 3, 5), torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype)
    with Recorder([("arg:x", x), ("arg:mask", mask)]):
        summed = (mask[..., None] * x).sum(1)
    assert torch.equal(summed, torch.stack([x[0, 0] + x[0, 2], x[1, 1] + x[1, 2]]))
