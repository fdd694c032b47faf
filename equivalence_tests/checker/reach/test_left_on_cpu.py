"""What is made on the CPU wherever the inputs are is followed to the line that would raise on a GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests import verify
from equivalence_tests.checker.reach.devices import LeftOnCPU, OnCPU
from equivalence_tests.checker.zoo.right import broken

device = torch.device("cpu")
Call = Callable[["Keeps", Tensor], Tensor]


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.ones(5)
        self.placed = torch.ones(5).to(device)
        self.late: Tensor | None = torch.ones(5)
        self.register_buffer("kept", torch.ones(5))
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, call: Call) -> Tensor:
        self.late = x[0, 0]
        return call(self, x)


def would_raise(call: Call) -> int:
    followed, x = LeftOnCPU(), torch.randn(2, 5, 5)
    with OnCPU():
        followed.watching(Keeps())(x, call)
    return len([*followed.listed()])


@pytest.mark.parametrize(
    "call",
    [
        lambda _, x: x + torch.ones(5, 5).tril(),
        lambda _, x: x.masked_fill(torch.ones(5, 5, device=None) > 0, 0.0),
        lambda _, x: torch.cat([x, torch.zeros(1, 5, 5)]),
        lambda _, x: torch.arange(5)[x.argmax(-1)],
        lambda _, x: nn.functional.embedding(torch.arange(5), x[0]),
        lambda _, x: x + torch.empty(5, 5).copy_(x[0]),
    ],
)
def test_a_tensor_on_the_cpu_that_meets_an_input_is_listed(call: Call) -> None:
    assert would_raise(call) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda _, x: x + torch.ones(5, 5, device=x.device),
        lambda _, x: x + torch.ones(5, 5).to(x.device),
        lambda _, x: x + torch.ones(5, 5).cuda(),
        lambda _, x: x + torch.ones(5, 5).type_as(x) + torch.ones(5).to(x),
        lambda _, x: x / torch.tensor(5.0).sqrt(),
        lambda _, x: x[:, torch.arange(3)],
        lambda _, x: torch.einsum("bqe,bke->bqk", x, torch.ones_like(x).tril()),
        lambda self, x: x * self.kept * self.placed * self.weight + self.late,
    ],
)
def test_what_goes_where_the_inputs_are_is_not(call: Call) -> None:
    assert would_raise(call) == 0


def test_a_plain_attribute_is_no_buffer() -> None:
    followed = LeftOnCPU()
    followed.watching(Keeps())(torch.randn(2, 5, 5), lambda self, x: x * self.plain)
    (one,) = followed.listed()
    assert "sets is not a buffer, so it stays on the CPU" in one.detail


def test_an_equal_lists_what_would_raise_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(broken("causal", ((", device=scores.device", ""),)))
    report = verify(f"{tmp_path / 'mine.py'}:Attention")
    assert report.verdict == "partial", str(report)
    (one,) = report.not_exercised
    assert one.what == "on a GPU"
    assert "would raise: the tensor made on line" in one.detail
