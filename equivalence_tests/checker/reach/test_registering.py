"""Modules in plain lists are found and registered; those that are hidden on purpose, or held elsewhere, are not."""

from pathlib import Path

import pytest

from equivalence_tests import verify
from equivalence_tests.checker.reach.loading import load

TEXT = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim=12, heads=3):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, length, dim = x.shape
        q, k, v = self.qkv(x).view(b, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / (dim // self.heads) ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, length, dim))


class Encoder(nn.Module):
    def __init__(self, dim=12, heads=3, depth=2):
        super().__init__()
        made = [(nn.LayerNorm(dim), Attention(dim, heads)) for _ in range(depth)]
        KEPT

    def forward(self, x):
        for norm, attention in LOOP:
            x = x + attention(norm(x))
        return x
"""
HELD = "self.held = nn.ModuleList(x for pair in made for x in pair)"
LEARNT = "self.learnt = nn.ParameterList(p for pair in made for x in pair for p in x.parameters())"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kept", "loop", "kind"),
    [
        ("self.layers = made", "self.layers", "List"),
        ("self.layers = {str(i): x for i, x in enumerate(made)}", "self.layers.values()", "Dict"),
        ("self.layers = tuple(made)", "self.layers", "List"),
        ("self.layers = made; self.reversed = made[::-1]", "self.layers", "List"),
        ("self.layers = made; self.first = made[0]", "self.layers", "List"),
        (f"self.layers = made; {HELD}", "self.layers", ""),
        (f"self.layers = made; {LEARNT}", "self.layers", ""),
        ("self.layers = nn.ModuleList(nn.ModuleList(pair) for pair in made)", "self.layers", ""),
        ("self._layers = made", "self._layers", ""),
        ("[x.requires_grad_(False) for pair in made for x in pair]; self.layers = made", "self.layers", ""),
    ],
)
@pytest.mark.parametrize("as_instance", [False, True])
def test_modules_in_plain_lists_are_found(tmp_path: Path, kept: str, loop: str, kind: str, as_instance: bool) -> None:
    (tmp_path / "mine.py").write_text(TEXT.replace("KEPT", kept).replace("LOOP", loop))
    target = f"{tmp_path / 'mine.py'}:Encoder"
    report = verify(load(target)() if as_instance else target)
    found = [one for one in report.findings if one.name == "modules_not_registered"]
    assert [one.want for one in found] == ([f"self.layers is an nn.Module{kind}"] if kind else [])
    assert [one.line.text for one in found if one.line] == ([kept] if kind else [])
    assert report.verdict == "deviates" or not kind


def test_the_instance_that_is_handed_over_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TEXT.replace("KEPT", "self.layers = made").replace("LOOP", "self.layers"))
    model = load(f"{tmp_path / 'mine.py'}:Encoder")()
    verify(model)
    assert type(model.layers) is list


def test_a_list_that_a_base_class_makes_is_found(tmp_path: Path) -> None:
    text = TEXT.replace("KEPT", "self.layers = made").replace("LOOP", "self.layers")
    (tmp_path / "mine.py").write_text(f"{text}\n\nclass Mine(Encoder):\n    pass\n")
    assert verify(f"{tmp_path / 'mine.py'}:Mine").mistakes == ("modules_not_registered",)


def test_a_list_that_cannot_be_registered_is_found(tmp_path: Path) -> None:
    kept, loop = "self.layers = [{i: x for i, x in enumerate(made)}]", "self.layers[0].values()"
    (tmp_path / "mine.py").write_text(TEXT.replace("KEPT", kept).replace("LOOP", loop))
    assert verify(f"{tmp_path / 'mine.py'}:Encoder").mistakes == ("modules_not_registered",)


HANDED = """

class Head(nn.Module):
    def __init__(self, *others):
        super().__init__()
        self.norm, self.others = nn.LayerNorm(12), list(others)

    def forward(self, x):
        return self.norm(self.others[0](x))


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.head = Head(self.attention, self)

    def forward(self, x):
        return self.head(x)
"""


def test_modules_that_are_handed_over_are_whoevers_they_were(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TEXT.replace("KEPT", "self.layers = []").replace("LOOP", "made") + HANDED)
    whole = load(f"{tmp_path / 'mine.py'}:Whole")()
    assert "modules_not_registered" not in (*verify(whole).mistakes, *verify(whole.head).mistakes)


@pytest.mark.parametrize(
    ("kept", "is_found"),
    [
        ("torch.randn(dim, dim).requires_grad_()", True),
        ("torch.randn(dim, dim, requires_grad=True)", True),
        ("nn.Parameter(torch.randn(dim, dim))", False),
        ("torch.randn(dim, dim)", False),
        ("2 * self.out.weight", False),
    ],
)
def test_a_tensor_to_be_learnt_that_is_no_parameter_is_found(tmp_path: Path, kept: str, is_found: bool) -> None:
    text = TEXT.replace("nn.Linear(dim, dim)\n", f"nn.Linear(dim, dim)\n        self.mixing = {kept}\n")
    (tmp_path / "mine.py").write_text(text.replace("self.out(", "self.out(self.mixing.mean() * "))
    found = [one for one in verify(f"{tmp_path / 'mine.py'}:Attention").findings if "registered" in one.name]
    assert [one.name for one in found] == ["tensor_not_registered"] * is_found
    assert [one.line.text for one in found if one.line] == [f"self.mixing = {kept}"] * is_found


@pytest.mark.parametrize("second", ["self.first", "nn.LayerNorm(12)"])
def test_a_module_of_two_names_is_noted(tmp_path: Path, second: str) -> None:
    both = f"self.first = nn.LayerNorm(12); self.second = {second}; self.layers = nn.ModuleList()"
    loop = "[(self.first, self.second)]"
    (tmp_path / "mine.py").write_text(TEXT.replace("KEPT", both).replace("LOOP", loop))
    noted = "in Encoder, first and second are the same module and share their weights"
    assert (noted in verify(f"{tmp_path / 'mine.py'}:Encoder").notes) == (second == "self.first")
