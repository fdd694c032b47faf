"""An einsum that sums nothing is a multiplication."""

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.helpers_for_tests import changed
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.stages import ThreeMatrices


class Turns(ThreeMatrices):
    """Right: each pair of neighbours is multiplied by the cosine and the sine of its angle."""

    equation, sign = "b n h c p, n c -> b n h c p", 1.0

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        q, k = self.turned(q, 1.0), self.turned(k, self.sign)
        weights = (torch.einsum("bihd,bjhd->bhij", q, k) / q.size(-1) ** 0.5).softmax(-1)
        return self.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))

    def turned(self, x: Tensor, sign: float) -> Tensor:
        pairs = x.unflatten(-1, (-1, 2))
        beside = torch.stack([-pairs[..., 1], pairs[..., 0]], -1)
        steps = 10000 ** -torch.linspace(0, 1, pairs.size(-2) + 1, device=x.device)[:-1]
        angles = sign * torch.arange(x.size(1), device=x.device)[:, None] * steps
        turned = torch.einsum(self.equation, pairs, angles.cos()) + torch.einsum(self.equation, beside, angles.sin())
        return turned.flatten(-2)


class TurnsWhateverComesBetween(Turns):
    """Right."""

    equation = "bn...cp,nc->bn...cp"


class FactorsCancel(Turns):
    """Right: what the queries are multiplied by, the keys are divided by."""

    sign = -1.0

    def turned(self, x: Tensor, sign: float) -> Tensor:
        return torch.einsum("d,bnhd->bnhd", torch.linspace(0.5, 2, x.size(-1)) ** sign, x)


@pytest.mark.parametrize("right", [Turns, TurnsWhateverComesBetween])
def test_rotations_by_einsum_are_rotations(right: type[nn.Module]) -> None:
    report = verify(right)
    assert (report.verdict, [one.name for one in report.intended]) == ("equal", ["rotary_positions"]), str(report)


def test_keys_that_are_turned_back_are_found() -> None:
    report = verify(changed(Turns, sign=-1.0))
    assert report.mistakes == ("rotations_differ",), str(report)


def test_factors_that_cancel_are_nobodys_mistake() -> None:
    assert verify(FactorsCancel).verdict != "deviates"
