"""One expression keeps code from being torch's attention: its line is found, and blamed where nothing speaks for it."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.equivalent.search import of_its_values
from equivalence_tests.checker.helpers_for_tests import line_of, program_of, proof_holds
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.right import broken

MERGED = "merged = context.transpose(1, 2).flatten(2)"
PROJECTED = "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)"
WEIGHED = "F.linear(x, self.k_proj.weight * self.k_proj.weight.sigmoid(), self.k_proj.bias)"
SCORES = "scores = q @ k.mT / math.sqrt(q.size(-1))"
HELD = "self.num_heads = num_heads"


def changed(tmp_path: Path, *changes: tuple[str, str]) -> str:
    (tmp_path / "mine.py").write_text(broken("itself", changes))
    return f"{tmp_path / 'mine.py'}:Attention"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("line", "instead", "name"),
    [
        (MERGED, f"{MERGED} * x.sigmoid()", "changed_by_mul"),
        (PROJECTED, PROJECTED.replace("self.k_proj(x)", WEIGHED), "changed_by_mul"),
        (PROJECTED, PROJECTED.replace("self.k_proj(x)", "self.k_proj(x.abs())"), "changed_by_abs"),
        ("context = dropped @ v", "context = dropped[..., ::2] @ v[..., ::2, :]", "changed_by_getitem"),
    ],
)
def test_the_expression_is_blamed(line: str, instead: str, name: str, tmp_path: Path) -> None:
    report = verify(changed(tmp_path, (line, instead)))
    assert report.mistakes == (name,), str(report)
    (finding,) = report.findings
    assert line_of(finding) == instead
    assert proof_holds(finding)
    assert program_of(report)


def test_tokens_that_are_moved_before_they_are_projected_are_found_there(tmp_path: Path) -> None:
    report = verify(changed(tmp_path, (PROJECTED, f"x = x.roll(1, 1)\n        {PROJECTED}")))
    assert report.mistakes == ("output_tokens_moved",)
    assert line_of(report.findings[0]) == "x = x.roll(1, 1)"
    assert report.findings[0].is_proven


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            (
                (HELD, f"{HELD}\n        self.own = nn.Linear(embed_dim, embed_dim)"),
                (PROJECTED, PROJECTED.replace("k_proj(x)", "k_proj(x) + self.own(self.k_proj(x)).tanh()")),
            ),
            "own.weight has no other use",
        ),
        (
            (
                (HELD, f"{HELD}\n        self.own = nn.Parameter(torch.ones(num_heads, 1, 1))"),
                (SCORES, f"{SCORES} * (self.own.exp().cumsum(-1) / torch.arange(1, 2)[:, None])"),
            ),
            "own has no other use",
        ),
        (((PROJECTED, f"x = x + torch.arange(x.size(1))[:, None] * 0.1\n        {PROJECTED}"),), "positions alone"),
    ],
)
def test_what_may_be_intended_is_named_and_not_blamed(
    changes: tuple[tuple[str, str], ...], said: str, tmp_path: Path
) -> None:
    report = verify(changed(tmp_path, *changes))
    assert (report.verdict, report.findings) == ("unchecked", [])
    assert re.search(f"on line \\d+, it is torch's attention to .* It may be intended: .*{said}", report.reason), report


def test_scores_of_which_some_are_cut_off_are_followed(tmp_path: Path) -> None:
    report = verify(changed(tmp_path, (SCORES, SCORES.replace("q @ k.mT", "F.pad((q @ k.mT)[..., 1:], (1, 0))"))))
    assert report.verdict in ("deviates", "unchecked")
    assert "check stopped" not in report.reason


X = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
ANGLE = torch.arange(5.0)[:, None].double()
ROTATED = torch.cat(
    (X[..., :3] * ANGLE.cos() - X[..., 3:] * ANGLE.sin(), X[..., :3] * ANGLE.sin() + X[..., 3:] * ANGLE.cos()), -1
)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (X * 0.7, "it is a constant factor"),
        (X + ANGLE, "it depends on positions alone"),
        (X.masked_fill(X > 1, -torch.inf), "it hides keys"),
        (X / X.norm(dim=-1, keepdim=True), "it normalises"),
        (ROTATED, "it rotates"),
        (ROTATED * (1 + 1e-7 * X.sign()), "it rotates"),  # by angles in float32
        (X.roll(1, -1), ""),
        (X.flip(1), ""),
        (X * torch.tensor([1.0, 1, 1, 1, 1, 0]), ""),
        (X * X.sigmoid(), ""),
        (-X, ""),
        (X.abs(), ""),
        (torch.ones_like(X), ""),
    ],
)
def test_numbers_say_what_may_be_intended(changed: Tensor, said: str) -> None:
    assert of_its_values(changed, X) == said


def test_rows_that_a_diagonal_divides_are_not_accused() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        a = (query @ key.mT / query.size(-1) ** 0.5).exp()
        return torch.diag_embed(1 / a.sum(-1)) @ a @ value

    assert verify(attention).verdict != "deviates"


class Pixels(nn.Module):
    """Non-local attention of pixels, without a scale, and with a gate that starts at 0."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Conv2d(channels, channels, 1) for _ in range(3))
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).flatten(2) for part in (self.query, self.key, self.value))
        return self.gamma * (v @ (q.mT @ k).softmax(-1).mT).view(x.shape) + x


def test_a_gate_of_pixels_speaks_for_a_missing_scale() -> None:
    report = verify(Pixels)
    assert (report.verdict, report.mistakes) == ("equal", ()), str(report)
