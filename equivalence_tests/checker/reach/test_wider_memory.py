"""A memory whose tokens are of another width than what asks for it, as a bidirectional encoder gives it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.verify import verify


class Crosses(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_q, self.to_kv, self.out = nn.Linear(dim, dim), nn.Linear(2 * dim, 2 * dim), nn.Linear(dim, dim)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        key, value = self.to_kv(memory).chunk(2, -1)
        q, k, v = map(self.heads, (self.to_q(x), key, value))
        attended = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.out(attended.transpose(1, 2).flatten(2))

    @property
    def scale(self) -> float:
        return (self.to_q.out_features / self.num_heads) ** -0.5


class CrossesScaledByItsWidth(Crosses):
    @property
    def scale(self) -> float:
        return float(self.to_q.out_features**-0.5)


class LooksBack(nn.Module):
    """(batch, features) and (len, batch, twice as many), with a mask that is required, (batch, len)."""

    def __init__(self, enc_hid_dim: int, dec_hid_dim: int) -> None:
        super().__init__()
        self.both, self.v = nn.Linear(2 * enc_hid_dim + dec_hid_dim, dec_hid_dim), nn.Linear(dec_hid_dim, 1, bias=False)

    def forward(self, hidden: Tensor, encoder_outputs: Tensor, mask: Tensor) -> Tensor:
        asked = hidden.expand(len(encoder_outputs), -1, -1)
        energy = self.v(self.both(torch.cat((asked, encoder_outputs), -1)).tanh()).squeeze(-1).t()
        return energy.masked_fill(mask == 0, -1e10).softmax(1)


def test_keys_and_values_are_projected_from_tokens_of_another_width() -> None:
    report = verify(Crosses)
    assert (report.verdict, report.not_exercised) == ("equal", []), str(report)
    assert "tokens of the memory have 66 features beside 33 of the queries" in " ".join(report.notes)
    assert verify(CrossesScaledByItsWidth).mistakes == ("scale_wrong",)


def test_a_state_looks_back_at_tokens_of_another_width() -> None:
    report = verify(LooksBack)
    assert (report.verdict, report.kind, report.not_exercised) == ("equal", "additive attention", []), str(report)
