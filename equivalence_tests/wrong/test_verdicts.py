"""None of the fixed wrong versions is called equal, and none is left without a word."""

from pathlib import Path
from runpy import run_path

import pytest
import torch
from torch import nn

from equivalence_tests.checker.verify import verify
from equivalence_tests.wrong.editing import Version
from equivalence_tests.wrong.fixed import versions


@pytest.mark.sampled(3)
@pytest.mark.parametrize("version", versions(), ids=lambda version: str(version.operator))
def test_a_wrong_version_is_not_called_equal(version: Version, tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(version.text, encoding="utf-8")
    report = verify(f"{path}:Attention")
    assert report.verdict in ("deviates", "unchecked"), str(report)
    assert report.findings or report.reason
    assert len({(one.name, one.line) for one in report.findings}) == len(report.findings), str(report)


def test_with_inputs_of_ones_own_its_line_is_named_too(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(versions()[1].text, encoding="utf-8")
    broken = run_path(str(path))["Attention"]
    layers = nn.Sequential(*(broken(12, 3) for _ in range(2)))
    for report in verify(layers, inputs=torch.randn(2, 5, 12)):
        assert report.verdict == "deviates", str(report)
        (found,) = report.findings
        assert found.proof is not None
        assert found.proof.holds
        assert found.line == verify(f"{path}:Attention").findings[0].line
    (report,) = verify(broken(12, 3), inputs=torch.full((2, 5, 12), torch.nan))
    assert "holds NaN" in report.reason
