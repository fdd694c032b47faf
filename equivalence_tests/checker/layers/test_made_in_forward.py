"""Models that make their positions in each call: in float32, by writing into a tensor, and of even widths only."""

import math

import torch
from torch import Tensor, nn

from equivalence_tests.checker.verify import verify


class Positions(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model

    def forward(self, n: int, device: torch.device) -> Tensor:
        at = torch.arange(n, dtype=torch.float32, device=device)[:, None]
        steps = torch.arange(0, self.d_model, 2, dtype=torch.float32, device=device)
        angles = at * torch.exp(steps * (-math.log(10000.0) / self.d_model))
        table = torch.zeros(n, self.d_model, dtype=torch.float32, device=device)
        table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
        return table


class Model(nn.Module):
    def __init__(self, vocab_size: int, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab_size, d_model), Positions(d_model)
        self.layer = nn.TransformerEncoderLayer(d_model, n_heads, 3 * d_model, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.embed(ids) + self.positions(ids.size(1), ids.device))


class TimedModel(nn.Module):
    """A step is embedded in float32, whatever the precision of the weights is."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.dim, self.time = dim, nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.embed = nn.Linear(7, dim)
        self.layer = nn.TransformerEncoderLayer(dim, n_heads, 3 * dim, batch_first=True)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(self.dim // 2, dtype=torch.float32, device=t.device) / self.dim)
        angles = t[:, None].float() * rates
        steps = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        return self.layer(self.embed(x) + steps[:, None])


def test_a_table_that_each_call_writes_is_written_down_at_a_width_that_it_takes() -> None:
    report = verify(Model)
    assert report.verdict == "equal", str(report)


def test_code_that_names_float32_is_compared_in_float64() -> None:
    report = verify(TimedModel(12, 3))
    assert report.verdict == "equal", str(report)
    assert not report.not_exercised, str(report)
