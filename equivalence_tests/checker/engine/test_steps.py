"""A decoder's state of one time step looks back at all that an encoder gave, as in Luong's attention."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.helpers_for_tests import changed, program_of, saved
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.right import broken
from equivalence_tests.checker.zoo.stages import OneMatrix


class Looks(nn.Module):
    """Right: (batch, features) looks at (batch, len, features), and comes back so."""

    axis, hidden_by = -1, -1e9

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.of_state = nn.Linear(hidden_dim, hidden_dim, bias=False)

    def forward(self, state: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = memory @ self.of_state(state)[..., None]
        scores = scores[..., 0] if mask is None else scores[..., 0].masked_fill(mask == 0, self.hidden_by)
        return self.averaged(scores.softmax(self.axis), memory)

    def averaged(self, weights: Tensor, memory: Tensor) -> Tensor:
        return (weights[..., None] * memory).sum(1)


class LooksFirst(nn.Module):
    """Right: (1, batch, features), as nn.GRU gives its state, looks at (len, batch, features)."""

    def __init__(self, hidden_dim: int, method: str) -> None:
        super().__init__()
        self.method = method
        if method == "general":
            self.of_memory = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, hidden: Tensor, encoder_outputs: Tensor) -> tuple[Tensor, Tensor]:
        energy = self.of_memory(encoder_outputs) if self.method == "general" else encoder_outputs
        weights = (hidden * energy).sum(2).softmax(0)
        if self.method not in ("dot", "general"):
            raise ValueError(self.method)
        return self.given(torch.einsum("lb,lbd->bd", weights, encoder_outputs), hidden), weights

    def given(self, context: Tensor, hidden: Tensor) -> Tensor:
        return context[:, None]


class JoinsWhatAsks(LooksFirst):
    """Right: what attends and what asks go through one matrix and tanh."""

    def __init__(self, hidden_dim: int, method: str) -> None:
        super().__init__(hidden_dim, method)
        self.both = nn.Linear(2 * hidden_dim, hidden_dim)

    def given(self, context: Tensor, hidden: Tensor) -> Tensor:
        return self.both(torch.cat([context, hidden[0]], -1)).tanh()


class SaysItScales(Looks):
    def __init__(self, hidden_dim: int) -> None:
        super().__init__(hidden_dim)
        self.scale = hidden_dim**-0.5


class NamesAScale(Looks):
    """Says that it scales, in a variable that it does not use."""

    def forward(self, state: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        scaling = state.size(-1) ** -0.5
        return super().forward(state, memory, mask) + 0 * scaling


class SpeaksOfNoScale(Looks):
    """Right: this text says that its scores are not scaled, and so no name does."""


class BendsTwice(JoinsWhatAsks):
    def given(self, context: Tensor, hidden: Tensor) -> Tensor:
        return super().given(context, hidden).tanh()


class OfManyHeads(nn.Module):
    """Forgets its scale; tanh of what attends beside what asks is no excuse where heads are split."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.both = (nn.Linear((1 + (i > 2)) * dim, dim) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        context = ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.both(torch.cat([context, x], -1)).tanh()


class BendsTheContextAlone(JoinsWhatAsks):
    def given(self, context: Tensor, hidden: Tensor) -> Tensor:
        return context.tanh()


@pytest.mark.parametrize("right", [Looks, LooksFirst, JoinsWhatAsks, SpeaksOfNoScale])
def test_a_state_looks_back_without_a_scale(right: type[nn.Module]) -> None:
    report = verify(right)
    assert (report.verdict, report.intended[0].name) == ("equal", "scale_missing"), str(report)
    assert "Luong" in report.intended[0].reason


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (changed(Looks, axis=0), "softmax_over_batch"),
        (changed(Looks, hidden_by=1e-9), "mask_fill_not_negative"),  # proven beside a scale that is intended
        (SaysItScales, "scale_missing"),
        (NamesAScale, "scale_missing"),
        (OfManyHeads, "scale_missing"),
    ],
)
def test_what_is_wrong_with_it_is_found_and_proven(wrong: type[nn.Module], name: str) -> None:
    report = verify(wrong)
    assert report.mistakes == (name,), str(report)
    assert all(finding.is_proven for finding in report.findings)


@pytest.mark.parametrize("bent", [BendsTheContextAlone, BendsTwice])
def test_tanh_of_the_context_alone_or_twice_is_nobodys(bent: type[nn.Module]) -> None:
    report = verify(bent)
    assert report.verdict in ("unchecked", "deviates"), str(report)


def test_what_comes_back_is_said_and_written_down_as_one_step() -> None:
    report = verify(JoinsWhatAsks)
    said = "(len, batch, features); the query (1, batch, features), the output (batch, features)"
    assert report.conventions[1][:2] == ("layout", said), report.conventions
    assert "hidden = hidden.transpose(0, 1)" in program_of(report)
    assert "1 query and 6 keys" in str(report)


def test_a_query_with_an_axis_of_its_own_may_be_one_of_several(tmp_path: Path) -> None:
    merged = "merged = context.squeeze(2).unsqueeze(1).flatten(2)"
    text = broken("cross", (("merged = context.transpose(1, 2).flatten(2)", merged),))
    report = verify(saved(tmp_path, text, "Attention"))
    assert report.verdict == "partial", str(report)
    assert [one.what for one in report.not_exercised] == ["more than one query"]


class GatedBehind(OneMatrix):
    """What attends is gated by a matrix of its own."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.gate = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gated(self.merge(self.attend(*self.operands(x))), self.gate(x)))

    def gated(self, merged: Tensor, gate: Tensor) -> Tensor:
        return merged * gate.sigmoid()


class BentBehindItsGate(GatedBehind):
    def gated(self, merged: Tensor, gate: Tensor) -> Tensor:
        return (merged * gate.sigmoid()).tanh()


def test_what_attends_goes_through_no_activation_beside_a_gate() -> None:
    assert verify(GatedBehind).verdict == "equal"
    report = verify(BentBehindItsGate)
    assert report.mistakes == ("changed_by_tanh",), str(report)
