"""What raises, overflows or is rounded too much in half precision is said, and nothing else."""

from pathlib import Path

import pytest

from equivalence_tests import verify
from equivalence_tests.checker.zoo.right import broken

FILL, LINE = "scores.masked_fill(mask, -math.inf)", "q @ k.mT / math.sqrt(q.size(-1))"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, ""),
        ((FILL, "scores.masked_fill(mask, -1e9)"), "in float16, it raises RuntimeError: too large for float16"),
        ((LINE, "(300 * q) @ (300 * k).mT / 90000 / math.sqrt(q.size(-1))"), "in float16, the output is not finite"),
        ((LINE, "((q / 16) @ (k / 16).mT + 64 - 64) * 256 / math.sqrt(q.size(-1))"), "in float16, the error of the"),
    ],
)
def test_half_precision(change: tuple[str, str] | None, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(broken("cross", (change,) if change else ()))
    report = verify(f"{tmp_path / 'mine.py'}:Attention")
    assert report.verdict == "equal", str(report)
    found = [one for one in report.notes if "float16" in one]
    assert bool(found) == bool(said), report.notes
    assert "".join(found[:1]).startswith(said), found


def test_a_scale_that_is_kept_in_float32_is_no_doubt_about_a_proof(tmp_path: Path) -> None:
    kept = "self.scale = nn.Parameter(torch.FloatTensor([embed_dim // num_heads]) ** -0.5, requires_grad=False)"
    changes = (
        ("self.dropout =", f"{kept}\n        self.dropout ="),
        (LINE, "q @ k.mT * self.scale"),
        ("context.transpose(1, 2).flatten(2)", "context.reshape(query.shape)"),
    )
    (tmp_path / "mine.py").write_text(broken("cross", changes))
    report = verify(f"{tmp_path / 'mine.py'}:Attention")
    assert [one.name for one in report.findings] == ["heads_merged_without_transpose"], str(report)
