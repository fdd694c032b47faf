"""Tests of what is found in files, folders, packages and notebooks, without running any of it."""

import json
from pathlib import Path

import pytest

from equivalence_tests.checker.doors.discovery import candidates, names_one_thing
from equivalence_tests.checker.helpers_for_tests import saved
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.loading import load

MODULE = """
raise SystemExit("nobody runs this because it was looked at")

class SelfAttention(nn.Module):
    def forward(self, x): ...

class Mixer(nn.Module):
    def forward(self, x):
        return torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x)

class EncoderLayer(nn.Module):
    def __init__(self):
        self.attn = SelfAttention()
    def forward(self, x): ...

class InlineBlock(nn.Module):
    def forward(self, x):
        return x + torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x)

class Tower(nn.Module):
    def __init__(self):
        self.steps = nn.ModuleList(EncoderLayer() for _ in range(2))
    def forward(self, x): ...

class LanguageModel(nn.Module):
    def __init__(self):
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3), 2)
    def forward(self, ids): ...

class Settings:
    layer = EncoderLayer

class AttentionError(Exception):
    def __init__(self): ...

class Head(nn.Module):
    def forward(self, x):
        return self.linear(x)

def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)

def make_mask(length):
    return torch.tril(torch.ones(length, length))

def apply_mask(scores, mask):
    return scores.masked_fill(mask, -1e9)

def _padding_mask(ids):
    return ids.ne(0)
"""
FOUND = {
    "SelfAttention": "attention",
    "Mixer": "attention",
    "EncoderLayer": "layers",
    "InlineBlock": "layers",
    "Tower": "layers",
    "LanguageModel": "layers",
    "attend": "attention",
    "make_mask": "mask_builder",
}
CELLS = [
    "%matplotlib inline\nimport torch\nwidth = 2 * 4",
    "class Attention(torch.nn.Module):\n    size = width\n    def forward(self, x):\n        return x",
    "raise RuntimeError('trained')",
]


def notebook(path: Path, cells: list[str]) -> Path:
    code = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["# Attention"]}, *code]}))
    return path


def test_attentions_layers_and_mask_builders_are_found_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODULE)
    found, _ = candidates(str(tmp_path / "model.py"))
    assert {one.name: one.kind for one in found} == FOUND
    assert [one.line for one in found if one.name == "attend"] == [
        MODULE.splitlines().index("def attend(q, k, v):") + 1
    ]


def test_a_folder_is_looked_through_without_what_others_put_there(tmp_path: Path) -> None:
    for folder in ("src/deep", ".venv/lib", "build", "node_modules"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.py").write_text(MODULE)
    (tmp_path / "src" / "test_model.py").write_text(MODULE)
    (tmp_path / "src" / "broken.py").write_text("def (")
    (tmp_path / "src" / "binary.py").write_bytes(bytes(range(256)))
    found, unread = candidates(str(tmp_path))
    assert {one.path for one in found} == {tmp_path / "src" / "deep" / "model.py"}
    assert sorted(Path(file).name for file in unread) == ["binary.py", "broken.py"]
    assert "broken.py is not Python: invalid syntax, line 1" in unread[str(tmp_path / "src" / "broken.py")]


def test_a_package_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_package" / "inner").mkdir(parents=True)
    (tmp_path / "some_package" / "__init__.py").touch()
    (tmp_path / "some_package" / "inner" / "model.py").write_text(MODULE)
    (tmp_path / "some_package" / "__init__.py").write_text("raise SystemExit('nobody imports it to look at it')")
    (tmp_path / "some_package" / "inner" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("some_package", "some_package.inner", "some_package.inner.model"):
        assert {one.name for one in candidates(name)[0]} == set(FOUND)


def test_a_package_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "inner").mkdir(parents=True)
    (tmp_path / "here" / "inner" / "model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    assert {one.name for one in candidates("here.inner")[0]} == set(FOUND)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere", "no file, folder or package nowhere"),
        ("a b", "a b"),
        ("gone.py", "no file or folder gone.py"),
        ("src/gone", "no file or folder"),
    ],
)
def test_what_is_not_there_is_said(target: str, said: str) -> None:
    with pytest.raises(CannotCheckError, match=said):
        candidates(target)


def test_an_empty_folder_is_said_to_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(CannotCheckError, match="there is no Python file and no notebook in"):
        candidates(str(tmp_path))


def test_of_a_notebook_definitions_are_run_and_nothing_else(tmp_path: Path) -> None:
    path = notebook(tmp_path / "lesson.ipynb", CELLS)
    assert [one.target for one in candidates(str(path))[0]] == [f"{path}:Attention"]
    assert load(f"{path}:Attention").size == 8
    with pytest.raises(CannotCheckError, match=r"RuntimeError: trained \(lesson.ipynb\[code cell 3\]:1\)"):
        load(f"{path}:Attention", run_all=True)


def test_a_broken_notebook_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.ipynb").write_text("{}")
    (reason,) = candidates(str(tmp_path / "x.ipynb"))[1].values()
    assert "x.ipynb is not a notebook" in reason
    with pytest.raises(CannotCheckError, match=r"y.ipynb\[code cell 1\] is not Python: .* line 1"):
        load(f"{notebook(tmp_path / 'y.ipynb', ['def ('])}:Attention")


def test_relative_imports_are_taken_as_part_of_the_package(tmp_path: Path) -> None:
    package = tmp_path / "relative_package"
    (package / "layers").mkdir(parents=True)
    for folder in (package, package / "layers"):
        (folder / "__init__.py").touch()
    (package / "sizes.py").write_text("width = 7")
    (package / "layers" / "attention.py").write_text("from ..sizes import width")
    assert load(f"{package / 'layers' / 'attention.py'}:width") == 7


def test_a_module_of_the_users_that_is_called_like_ours_is_theirs(tmp_path: Path) -> None:
    import scratch

    (tmp_path / "scratch.py").write_text("mine = 3")
    assert load(saved(tmp_path, "from scratch import mine", "mine")) == 3
    import scratch as again

    assert again is scratch


def test_a_folder_without_init_that_is_called_like_ours_is_theirs(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "sizes.py").write_text("mine = 3")
    assert load(saved(tmp_path, "from scratch.sizes import mine", "mine")) == 3


@pytest.mark.parametrize(
    ("target", "one"), [("a.py:B", True), ("a.b:C.0.d", True), ("a.py", False), ("a/b", False), ("a b:c d", False)]
)
def test_what_names_one_thing(target: str, one: bool) -> None:
    assert names_one_thing(target) is one


def test_a_subclass_counts_like_its_base_in_another_file_and_exp_over_its_sum_like_a_softmax(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text(MODULE)
    (tmp_path / "a.py").write_text(
        "class Wider(b.Mixer):\n    def width(self): ...\n\n"
        "class Settled(Settings):\n    def width(self): ...\n\n"
        "def mix(q, k, v):\n    e = (q @ k.mT).exp()\n    return e / e.sum(-1, keepdim=True) @ v\n"
    )
    found = [(one.name, one.kind) for one in candidates(str(tmp_path))[0] if one.path.name == "a.py"]
    assert found == [("Wider", "attention"), ("mix", "attention")]


def test_a_model_holds_what_its_file_imports_from_another(tmp_path: Path) -> None:
    holder = "class {}:\n    def __init__(self):\n        self.part = {}()\n    def forward(self, x): ...\n"
    (tmp_path / "block.py").write_text(
        "class EncoderLayer(nn.Module):\n    def forward(self, x): return x.softmax(-1)\n"
    )
    (tmp_path / "encoder.py").write_text("from block import *\n" + holder.format("Coder", "EncoderLayer"))
    (tmp_path / "model.py").write_text("import encoder\n" + holder.format("Net", "encoder.Coder"))
    (tmp_path / "other.py").write_text("import torch\n" + holder.format("Unknown", "torch.Coding"))
    found, _ = candidates(str(tmp_path))
    assert {one.name: one.kind for one in found} == {"EncoderLayer": "layers", "Coder": "layers", "Net": "layers"}
    assert {one.asked_kind for one in found} == {None}  # a softmax of generate() makes no attention of a model


def test_an_attention_by_hand_needs_no_base(tmp_path: Path) -> None:
    body = "    def forward(self, q, k, v):\n        return np.exp(q @ k.T) @ v\n"
    classes = f"class Attention:\n{body}\n\nclass Attends:\n{body}\n\nclass AttentionConfig:\n    heads = 2\n"
    (tmp_path / "mine.py").write_text(f"import numpy as np\n\n\n{classes}")
    assert [one.name for one in candidates(str(tmp_path))[0]] == ["Attention"]
