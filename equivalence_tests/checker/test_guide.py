"""The guide shows what the checker says today, and its code runs."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from equivalence_tests import checker
from equivalence_tests.__main__ import app
from equivalence_tests.checker.doors.command import EXAMPLE
from equivalence_tests.checker.engine.checks import all_checks
from equivalence_tests.checker.helpers_for_tests import blocks, without_rounding

GUIDE = Path(checker.__file__).with_name("GUIDE.md")
WIDTH = 100
EQUIVALENT, SAME, *SESSION = blocks(GUIDE, "python")
CORRECTED = EXAMPLE.replace("sqrt(e)", "sqrt(k.size(-1))")


@pytest.fixture
def my_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_attention.py").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_attention", raising=False)
    yield tmp_path
    sys.modules.pop("my_attention", None)  # another test has a file of that name


def test_the_report_is_the_one_that_is_shown(my_attention: Path) -> None:
    target = "my_attention.py:MultiHeadAttention"
    assert f"sidebyside verify --example > my_attention.py\nsidebyside verify {target}\n" in blocks(GUIDE, "sh")
    result = CliRunner().invoke(app, ["verify", target], env={"COLUMNS": str(WIDTH)})
    assert result.exit_code == 1
    assert without_rounding(blocks(GUIDE, "text")[0]) == without_rounding(result.stdout)


def test_the_code_runs(my_attention: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in SESSION:
        exec(compile(block, str(GUIDE), "exec"), names)  # the reader's own session
    first, *_, adapted, parted = capsys.readouterr().out.splitlines()
    assert first == "deviates ('scale_wrong',)"
    assert adapted == "equal"
    assert parted == "layers.1.linear1"
    assert names["report"].exit_status == 1


def test_the_same_in_torch_is_the_program_that_is_shown(my_attention: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (my_attention / "my_attention.py").write_text(CORRECTED)
    command = "verify my_attention.py:MultiHeadAttention --equivalent"
    assert f"sidebyside {command} > theirs.py\n" in blocks(GUIDE, "sh")
    result = CliRunner().invoke(app, command.split())
    assert (result.exit_code, result.stdout) == (0, EQUIVALENT)
    exec(compile(SAME, str(GUIDE), "exec"), {})
    assert "class Equivalent(nn.MultiheadAttention):" in capsys.readouterr().out


def test_links_of_the_guide_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", GUIDE.read_text(encoding="utf-8"))
    assert targets
    assert all((GUIDE.parent / target).exists() for target in targets)


def test_every_check_is_described() -> None:
    rows = dict(re.findall(r"^\| `(check_\w+)` \| (.+) \|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows == all_checks()
