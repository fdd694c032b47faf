"""Layers that compute their attention in their own forward: their sublayers are a Transformer's, or none is EQUAL."""

from pathlib import Path

import pytest
import torch
from torch import nn

from equivalence_tests.checker.equivalent.expressions import Attended, Called, Expression, Given, Made
from equivalence_tests.checker.equivalent.sublayers import Sublayers
from equivalence_tests.checker.verify import verify

X, A = Given("x"), Attended()


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(4), nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.gain = nn.Parameter(torch.ones(4))


def total(*terms: Expression) -> Expression:
    return Made("sum", terms)


def norm(x: Expression, path: str = "norm") -> Expression:
    return Called(path, (x,))


def feed(x: Expression) -> Expression:
    return Called("down", (Made("gelu", (Called("up", (x,)),)),))


def unlike(around: Expression, tokens: Expression = X) -> str:
    return Sublayers(around, tokens, Parts()).unlike()


@pytest.mark.parametrize(
    ("around", "tokens"),
    [
        (total(X, A), X),
        (A, X),
        (norm(total(norm(total(X, A)), feed(norm(total(X, A)))), "other"), X),
        (total(X, A, feed(norm(total(X, A), "other"))), norm(X)),
        (total(X, norm(A, "other"), norm(feed(total(X, norm(A, "other"))))), norm(X)),
        (total(total(X, A), feed(total(X, A))), X),
    ],
    ids=["attention alone", "no residual alone", "post-norm", "pre-norm", "norms on both sides", "no norms"],
)
def test_a_transformers_layer_is_one(around: Expression, tokens: Expression) -> None:
    assert unlike(around, tokens) == ""


@pytest.mark.parametrize(
    ("around", "tokens", "said"),
    [
        (total(norm(X), A, feed(norm(total(norm(X), A), "other"))), norm(X), "the attention is added to"),
        (total(A, feed(norm(A, "other"))), norm(X), "the attention has no residual connection"),
        (feed(norm(total(X, A), "other")), norm(X), "down has no residual connection"),
        (total(X, feed(norm(total(X, A), "other"))), norm(X), "down is added to something other than what it takes"),
        (total(norm(total(X, A), "other"), feed(norm(total(X, A), "other"))), norm(X), "a norm is applied before one"),
        (total(X, A, Called("down", (Called("up", (total(X, A),)),))), X, "there is no activation between up and what"),
    ],
    ids=["normed", "first missing", "second missing", "other stream", "behind a norm", "no activation"],
)  # fmt: skip
def test_what_is_unlike_it_is_said(around: Expression, tokens: Expression, said: str) -> None:
    assert unlike(around, tokens).startswith(said)


LAYER = """
import math
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.heads = n_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.ln1, self.ln2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        y = self.ln1(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(y).chunk(3, -1))
        a = torch.softmax(q @ k.mT / math.sqrt(q.size(-1)), -1) @ v
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Model(nn.Module):
    def __init__(self, vocab_size=40, d_model=24, n_heads=3, d_ff=48, n_layers=2):
        super().__init__()
        self.embed, self.places = nn.Embedding(vocab_size, d_model), nn.Embedding(32, d_model)
        self.blocks = nn.ModuleList(Layer(d_model, n_heads, d_ff) for _ in range(n_layers))
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, ids):
        x = self.embed(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""


def verdict(name: str, folder: Path, old: str = "", new: str = "") -> tuple[str, str]:
    (folder / "theirs.py").write_text(LAYER.replace(old, new) if old else LAYER, encoding="utf-8")
    report = verify(f"{folder / 'theirs.py'}:{name}")
    return report.verdict, " ".join(str(report).split())


@pytest.mark.parametrize("name", ["Layer", "Model"])
def test_attention_written_in_a_layer_is_followed_with_all_around_it(name: str, tmp_path: Path) -> None:
    assert verdict(name, tmp_path)[0] == "equal"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("Layer", "x = x + self.out", "x = self.out", "the attention has no residual connection"),
        ("Layer", "return x + self.down", "return self.down", "down has no residual connection"),
        ("Model", "x = block(x)", "x = x + block(x)", "blocks.0, which has residual connections of its own, is added"),
        ("Model", "x = block(x)", "x = block(block(x))", "blocks.0 is used 2 times"),
    ],
)
def test_what_is_wrong_around_it_is_not_passed_over(name: str, old: str, new: str, said: str, tmp_path: Path) -> None:
    found, report = verdict(name, tmp_path, old, new)
    assert found == "unchecked"
    assert said in report
