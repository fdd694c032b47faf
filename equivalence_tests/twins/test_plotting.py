"""The pictures: what they show, and what is refused."""

import sys
from pathlib import Path

import pytest
import torch

from scratch.positional import sinusoidal_encoding
from scratch.task.plotting import attention_figure, positional_figure, save_figure


def test_the_positional_figure_shows_the_table_and_its_first_dimensions() -> None:
    heat, lines, *_ = positional_figure(16, 8, "concatenated", curves=5).axes
    table = sinusoidal_encoding(16, 8, "concatenated")
    assert torch.equal(torch.as_tensor(heat.images[0].get_array()), table)
    assert len(lines.lines) == 5
    for dimension, line in enumerate(lines.lines):
        assert torch.equal(torch.as_tensor(line.get_ydata()), table[:, dimension])


def test_the_attention_figure_has_a_row_for_each_attention_and_labels_queries_and_keys() -> None:
    maps = {"self": torch.rand(2, 3, 3), "cross": torch.rand(3, 3, 4)}
    tokens = {"self": ("abc", "abc"), "cross": ("abc", "wxyz")}
    axes = attention_figure(maps, tokens).axes
    cells = [cell for cell in axes if cell.images]
    assert len(cells) == 5
    assert torch.equal(torch.as_tensor(cells[3].images[0].get_array()), maps["cross"][1])
    assert [label.get_text() for label in cells[2].get_xticklabels()] == list("wxyz")
    assert [label.get_text() for label in cells[2].get_yticklabels()] == list("abc")
    assert {cell.get_xlabel() for cell in cells} == {"key"}
    assert [cells[i].get_ylabel() for i in (0, 2)] == ["self\nquery", "cross\nquery"]


@pytest.mark.parametrize(("suffix", "begin"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_figures_are_saved_by_their_suffix(tmp_path: Path, suffix: str, begin: bytes) -> None:
    path = tmp_path / f"picture{suffix}"
    save_figure(positional_figure(8), path)
    assert path.read_bytes().startswith(begin)


def test_other_suffixes_and_no_maps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in .png or .svg, got '.jpg'"):
        save_figure(positional_figure(8), tmp_path / "picture.jpg")
    with pytest.raises(ValueError, match="in a folder that exists"):
        save_figure(positional_figure(8), tmp_path / "none" / "picture.png")
    with pytest.raises(ValueError, match=r"at least one attention map, got none$"):
        attention_figure({}, {})


def test_a_missing_matplotlib_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"plots need matplotlib, .* 'attention-side-by-side\[plot\]'$"):
        positional_figure(8)
