"""Every mistake of the catalogue is made of right code, and the checker names it."""

import re
from pathlib import Path

import pytest

from equivalence_tests import verify
from equivalence_tests.checker.mistakes import MISTAKES, named_mistake
from equivalence_tests.checker.zoo.right import RIGHT, broken

MADE = [name for name, mistake in MISTAKES.items() if mistake.right]
# Known, and not told from others yet where it stands alone.
OPEN = ("softmax_missing", "mask_transposed", "mask_fill_positive", "causal_fill_positive", "own_mask")


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "mine.py").write_text(text)
    (name,) = re.findall(r"^class (\w+)", text, re.MULTILINE)
    return f"{tmp_path / 'mine.py'}:{name}"


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_changed_is_right(name: str, tmp_path: Path) -> None:
    report = verify(written(tmp_path, broken(name)))
    assert report.verdict == "equal", str(report)


@pytest.mark.parametrize("name", [name for name in MADE if name not in OPEN])
def test_every_mistake_is_named(name: str, tmp_path: Path) -> None:
    mistake = named_mistake(name)
    report = verify(written(tmp_path, broken(mistake.right, mistake.changes)))
    assert report.mistakes == (name,), str(report)


@pytest.mark.parametrize(
    "added", ["merged", "q.transpose(1, 2).flatten(2)", "v.transpose(1, 2).flatten(2)", "self.v_proj(x)"]
)
def test_a_residual_from_inside_the_attention_is_none(added: str, tmp_path: Path) -> None:
    ending = "return self.out_proj(merged)"
    report = verify(written(tmp_path, broken("itself", ((ending, f"{ending} + {added}"),))))
    assert report.mistakes == ("residual_from_elsewhere",), str(report)


def test_an_unknown_name_raises() -> None:
    with pytest.raises(KeyError):
        named_mistake("zebra")
    with pytest.raises(ValueError, match="changes must be found"):
        broken("cross", (("zebra", ""),))
