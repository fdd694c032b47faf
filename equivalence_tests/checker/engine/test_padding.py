"""Padding that is hidden as queries too, or whose output is set to zero, is right; as queries alone it is not."""

import inspect
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests import verify
from equivalence_tests.checker.zoo.right import broken
from equivalence_tests.checker.zoo.stages import OneMatrix


class Padded(OneMatrix):
    """Hides keys that are padding; what the classes below have in common."""

    def hide(self, scores: Tensor, keep: Tensor) -> Tensor:
        return scores.masked_fill(~keep[:, None, None, :], -math.inf)

    def finished(self, context: Tensor, keep: Tensor) -> Tensor:
        return context

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.operands(x)
        scores = self.scores(q, k)
        scores = scores if mask is None else self.hide(scores, mask)
        context = scores.softmax(-1) @ v
        return self.finish(context if mask is None else self.finished(context, mask))


class HidesPaddedRowsToo(Padded):
    def hide(self, scores: Tensor, keep: Tensor) -> Tensor:
        both = keep[:, None, :, None] & keep[:, None, None, :]
        return scores.masked_fill(~both, -torch.finfo(scores.dtype).max)


class ZeroesPaddedRows(Padded):
    def finished(self, context: Tensor, keep: Tensor) -> Tensor:
        return context.masked_fill(~keep[:, None, :, None], 0.0)


class HidesPaddedRowsAlone(Padded):
    def hide(self, scores: Tensor, keep: Tensor) -> Tensor:
        return scores.masked_fill(~keep[:, None, :, None], -1e9)


class TakesTheFirstRow(Padded):
    """Takes a mask with a row for each query, and gives them all the first."""

    def hide(self, scores: Tensor, keep: Tensor) -> Tensor:
        rows = [scores[:, :, i : i + 1].masked_fill(~keep[:, :, :1], -math.inf) for i in range(scores.size(2))]
        return torch.cat(rows, 2)


class TakesEachRow(TakesTheFirstRow):
    def hide(self, scores: Tensor, keep: Tensor) -> Tensor:
        assert keep.dim() == 4
        return scores.masked_fill(~keep, -math.inf)


class ZeroesAnotherRow(Padded):
    def finished(self, context: Tensor, keep: Tensor) -> Tensor:
        return context.masked_fill(~keep.roll(1, -1)[:, None, :, None], 0.0)


class ZeroesPaddedOutputs(Padded):
    """Sets what comes back to zero, by the class's name also where a part of it would be called so."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = super().forward(x, mask)
        return out if mask is None else self.without(out, mask)

    def without(self, out: Tensor, keep: Tensor) -> Tensor:
        return out.masked_fill(~keep[..., None], 0.0)


class Mul(ZeroesPaddedOutputs):
    def without(self, out: Tensor, keep: Tensor) -> Tensor:
        return out * keep[..., None]


class ZeroesOtherOutputs(ZeroesPaddedOutputs):
    def without(self, out: Tensor, keep: Tensor) -> Tensor:
        return out * keep.roll(1, -1)[..., None]


class TwoMasks(nn.Module):
    """Attends to y: what comes out for padding in x is nothing but the residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)

    def without(self, out: Tensor, x_mask: Tensor) -> Tensor:
        return out * x_mask[..., None]

    def forward(self, x: Tensor, y: Tensor, x_mask: Tensor | None = None, y_mask: Tensor | None = None) -> Tensor:
        out = self.attn(x, y, y, key_padding_mask=None if y_mask is None else ~y_mask, need_weights=False)[0]
        return x + (out if x_mask is None else self.without(out, x_mask))


class MovesPaddedRows(TwoMasks):
    def without(self, out: Tensor, x_mask: Tensor) -> Tensor:
        return out + (~x_mask)[..., None].to(out.dtype)


class TakesNoMaskOfQueries(TwoMasks):
    def without(self, out: Tensor, x_mask: Tensor) -> Tensor:
        return out


class MoreKeys(TwoMasks):
    """Takes a bank of further keys, with a mask for these."""

    def forward(
        self, x: Tensor, mask: Tensor | None = None, bank: Tensor | None = None, bank_mask: Tensor | None = None
    ) -> Tensor:
        keep = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        if bank is not None:
            more = torch.ones(bank.shape[:2], dtype=torch.bool) if bank_mask is None else bank_mask
            return super().forward(x, torch.cat([bank, x], 1), None, torch.cat([more, keep], 1))
        return super().forward(x, x, None, keep)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("right", [Padded, ZeroesPaddedOutputs, Mul, TwoMasks, HidesPaddedRowsToo, ZeroesPaddedRows])
def test_what_comes_out_for_padding_is_nobodys(right: type[nn.Module]) -> None:
    report = verify(right)
    assert report.verdict == "equal" or "a residual connection" in report.reason, str(report)


def test_padding_that_is_hidden_as_queries_alone_is_named() -> None:
    report = verify(HidesPaddedRowsAlone)
    assert report.mistakes == ("padding_mask_on_queries",), str(report)
    assert report.findings[0].line is not None
    assert "keep[:, None, :, None]" in report.findings[0].line.text


@pytest.mark.thorough
def test_a_mask_of_queries_is_told() -> None:
    rows = {row[0]: row[1] for row in verify(TwoMasks).conventions}
    assert rows["mask (x_mask)"] == "(batch, query), True = may look"
    assert verify(MovesPaddedRows).verdict == "deviates"


@pytest.mark.parametrize(("right", "mask"), [(TakesNoMaskOfQueries, "x_mask"), (MoreKeys, "bank_mask")])
def test_a_mask_of_what_is_not_looked_at_is_no_mistake(right: type[nn.Module], mask: str) -> None:
    report = verify(right)
    assert report.mistakes == (), str(report)
    assert "a residual connection" in report.reason
    assert mask in [exercise.what for exercise in report.not_exercised]


def test_a_row_that_is_no_padding_is_not_excused() -> None:
    assert verify(ZeroesAnotherRow).mistakes == ("changed_by_masked_fill",)
    assert verify(ZeroesOtherOutputs).mistakes == ("changed_by_mul",)


def test_a_mask_by_query_of_which_one_row_is_taken_is_told() -> None:
    report = verify(TakesTheFirstRow)
    assert [exercise.what for exercise in report.not_exercised] == ["mask with a row for each query"], str(report)
    assert verify(TakesEachRow).verdict == "equal"


class SaysWhatOneMeans(nn.Module):
    """Attends to a text, of which text_mask: 1 = real token, 0 = padding."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor, text_mask: Tensor) -> Tensor:
        made = self.q(x), self.k(context), self.v(context)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in made)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self.allowed(text_mask)[:, None, None])
        return self.o(attended.transpose(1, 2).flatten(2))

    def allowed(self, mask: Tensor) -> Tensor:
        return mask != 0


class DoesTheOpposite(SaysWhatOneMeans):
    """Attends to a text, of which text_mask: 1 = real token, 0 = padding."""

    def allowed(self, mask: Tensor) -> Tensor:
        return mask == 0


class SaysWhatItDoes(DoesTheOpposite):
    """Attends to a text, of which text_mask: True = padding."""


class IndicatesMasking(SaysWhatOneMeans):
    """Attends to a text, of which text_mask: (batch, key). True indicates masking."""

    def allowed(self, mask: Tensor) -> Tensor:
        return ~(mask == 0)


class SaysItBehindTheShape(DoesTheOpposite):
    """Attends to a text. text_mask shape : (batch, key) = True for real tokens, False for padding"""


class EndsItsClauseInChinese(SaysWhatOneMeans):
    """Attends to a text, of which text_mask: (batch, key), 1=真实 token，用于屏蔽 padding."""  # noqa: RUF002


class CountsItsCases(SaysWhatOneMeans):
    """Attends to a text. Case 1: padding, for which text_mask (batch, key) is given."""


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (SaysWhatOneMeans, ()),
        (DoesTheOpposite, ("mask_inverted",)),
        (SaysWhatItDoes, ()),
        (IndicatesMasking, ("mask_inverted",)),
        (SaysItBehindTheShape, ("mask_inverted",)),
        (EndsItsClauseInChinese, ()),
        (CountsItsCases, ()),
    ],
)
def test_the_words_beside_a_mask_say_what_it_should_hide(target: type[nn.Module], names: tuple[str, ...]) -> None:
    report = verify(target)
    assert report.mistakes == names, str(report)
    assert all(one.line is not None and "mask == 0" in one.line.text for one in report.findings)


def test_words_about_another_mask_in_the_file_are_a_note(tmp_path: Path) -> None:
    own = inspect.getsource(SaysWhatOneMeans).replace(inspect.getdoc(SaysWhatOneMeans) or "", "It attends to a text.")
    head = "import torch\nfrom torch import Tensor, nn\nfrom torch.nn import functional as F\n\n# key_mask: 1 = valid\n"
    handed = own.replace("mask != 0", "mask == 0") + "\n\ndef step(f, x, key_mask):\n    f(x, x, text_mask=key_mask)\n"
    (tmp_path / "handed.py").write_text(head + handed, encoding="utf-8")
    assert verify(f"{tmp_path / 'handed.py'}:SaysWhatOneMeans").mistakes == ("mask_inverted",)
    for word, said in (("!=", False), ("==", True)):
        path = tmp_path / f"{'right' if word == '!=' else 'other'}.py"
        path.write_text(head + own.replace("mask != 0", f"mask {word} 0"), encoding="utf-8")
        report = verify(f"{path}:SaysWhatOneMeans")
        assert (report.findings, any("key_mask: 1 = valid" in note for note in report.notes)) == ([], said), str(report)


def test_a_mask_that_all_samples_share_is_no_padding_mask(tmp_path: Path) -> None:
    shared = (("if mask is not None:\n", "if mask is not None:\n            mask = mask.unsqueeze(0)\n"),)
    (tmp_path / "mine.py").write_text(broken("cross", shared))
    report = verify(f"{tmp_path / 'mine.py'}:Attention")
    assert report.verdict == "partial", str(report)
    assert [one.what for one in report.not_exercised] == ["mask for each sample"]


PASSED = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / q.size(-1) ** 0.5
        scores = scores if mask is None else scores.masked_fill(mask == 0, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attend = Attention(dim, heads)

    def forward(self, x):
        n = x.size(1)
        mask = PASSES
        return x + self.attend(x, mask)
"""


@pytest.mark.parametrize(
    ("passes", "names"),
    [
        ("torch.tril(torch.ones(n, n)).bool()[None]", ()),
        ("torch.triu(torch.ones(n, n), diagonal=1)", ("mask_inverted",)),
        ("x.new_ones(n, n).triu(1).unsqueeze(0)", ("mask_inverted",)),
        ("x.new_ones(n, n).triu(1) == 0", ()),
        ("torch.triu(torch.ones(n, n))", ()),
    ],
)
def test_a_triangle_that_a_caller_passes_says_what_the_mask_should_hide(
    passes: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "passed.py").write_text(PASSED.replace("PASSES", passes), encoding="utf-8")
    report = verify(f"{tmp_path / 'passed.py'}:Attention")
    assert report.mistakes == names, str(report)
    assert not names or f"self.attend(x, mask) passes {passes}" in str(report.findings[0].evidence)


BESIDE = """
import torch
from torch import nn
from mine import Attention


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(12, 3)

    def forward(self, x, lengths):
        key_padding_mask = self.made(x, lengths)
        return self.attention(x, x, x, key_padding_mask=key_padding_mask)

    def made(self, x, lengths):
        places = torch.arange(x.size(1))
        return (places >= lengths[:, None]).to(x.device)
"""


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("", "", ()),
        ("places >=", "places <", ("mask_inverted",)),
        ("return (places >= lengths[:, None])", "return (x[..., 0] != self.pad_id)", ("mask_inverted",)),
        ("places >= lengths[:, None]", "lengths[:, None] > places", ("mask_inverted",)),
    ],
)
def test_a_file_beside_that_makes_a_padding_mask_says_what_it_means(
    old: str, new: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(broken("padded"))
    (tmp_path / "model.py").write_text(BESIDE.replace(old, new))
    report = verify(f"{tmp_path / 'mine.py'}:Attention")
    assert report.mistakes == names, str(report)
    if names:
        turned = BESIDE.replace(old, new).replace("=key_padding_mask", "=~key_padding_mask")
        (tmp_path / "model.py").write_text(turned)
        assert verify(f"{tmp_path / 'mine.py'}:Attention").mistakes == ()
