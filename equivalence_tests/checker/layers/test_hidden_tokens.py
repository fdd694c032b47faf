"""Tokens that a mask hides may be set to 0 between the parts; others, and other masks, are no padding."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.helpers_for_tests import line_of, report_on
from equivalence_tests.checker.layers.whole_beside import Hidden
from equivalence_tests.checker.reach.model_calls import ModelRun
from equivalence_tests.checker.reach.model_calls import _mixed_samples as run_mistake
from equivalence_tests.checker.reach.state import seen_constructors
from equivalence_tests.checker.verify import verify

TEXT = """
import torch
from torch import nn


class Attends(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, mask=None):
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = q @ k.mT / q.size(-1) ** 0.5
        if mask is not None:
            s = s.masked_fill(~mask[:, None, None], -1e9)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.attn = Attends(d_model, num_heads)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))

    def forward(self, x, mask=None):
        x = self.norm1(x + self.attn(x, mask))
        x = self.norm2(x + self.ff(x))
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        return x
"""
END = "x = x * mask.unsqueeze(-1)"
RIGHT = (
    "x = x * mask.unsqueeze(-1).float()",
    "x = x.masked_fill(~mask[..., None], 0)",
    "x = torch.where(mask[..., None], x, 0.0)",
)
WRONG = (
    "x = x * ~mask.unsqueeze(-1)",
    "x = x.masked_fill(mask[..., None], 0)",
    "x = x * mask.roll(1, 1).unsqueeze(-1)",
    "x = x * (mask.unsqueeze(-1) + 1)",
    "x = x.roll(1, 1)",
)
IDS = (
    TEXT.replace("class EncoderLayer", "class Layer").replace("self.attn(x, mask)", "self.attn(x)")
    + """

class Tagger(nn.Module):
    def __init__(self, vocab_size, d_model, num_heads, d_ff, max_len=64):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab_size, d_model), nn.Embedding(max_len, d_model)
        self.layer = Layer(d_model, num_heads, d_ff)
        self.head = nn.Linear(d_model, 5)

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.size(1), device=ids.device))
        x = x * (ids != 0).unsqueeze(-1)
        return self.head(self.layer(x))
"""
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("end", [END, *RIGHT])
def test_hidden_tokens_may_be_set_to_0(end: str, required: bool, tmp_path: Path) -> None:
    text = TEXT.replace("(self, x, mask=None):\n        x =", "(self, x, mask):\n        x =") if required else TEXT
    said = report_on(text.replace(END, end), "EncoderLayer", tmp_path)
    assert said.startswith("equal"), said
    assert "the tokens that are hidden are set to 0. Intended: mask says that they are no tokens" in said


TIMES = (
    TEXT.replace("(self, x, mask=None):\n        x =", "(self, x, non_pad_mask=None, mask=None):\n        x =")
    .replace("        if mask is not None:\n            x = x * mask.unsqueeze(-1)", "        x *= non_pad_mask")
    .replace("        if mask is not None:\n            s = s", "        s = s")
)


def test_masks_that_a_layer_cannot_do_without_are_given(tmp_path: Path) -> None:
    """Right: both default to None, one is multiplied with, and the attention computes with the other."""
    said = report_on(TIMES, "EncoderLayer", tmp_path)
    assert said.startswith("equal"), said
    assert "Intended: non_pad_mask says that they are no tokens" in said


@pytest.mark.parametrize(("name", "real"), [("non_pad_mask", True), ("pad_mask", False)])
def test_what_is_multiplied_with_is_a_mask_of_real_tokens_by_its_name(name: str, real: bool) -> None:
    hidden, given = Hidden({name: None}), torch.ones(2, 5, 1)
    assert hidden.given(name, given)
    assert bool(hidden.made) == real


@pytest.mark.sampled(2)
@pytest.mark.parametrize("end", WRONG)
def test_what_is_done_to_tokens_only_where_a_mask_is_handed_over_is_not_passed_over(end: str, tmp_path: Path) -> None:
    said = report_on(TEXT.replace(END, end), "EncoderLayer", tmp_path)
    assert said.startswith(("deviates", "unchecked")), said
    assert "Nothing says whether this is intended" in said or "another order" in said


def test_padding_may_be_set_to_0_and_words_may_not(tmp_path: Path) -> None:
    assert "the id 0 says that they are no tokens" in (said := report_on(IDS, "Tagger", tmp_path))
    assert said.startswith("partial"), said
    assert "padding behind the tokens" in said  # it is seen, as a vector of zeros
    said = report_on(IDS.replace("(ids != 0)", "(ids == 0)"), "Tagger", tmp_path)
    assert said.startswith(("deviates", "unchecked")), said


def test_sasrec_adds_what_is_normalised(tmp_path: Path) -> None:
    normed = TEXT.replace(
        "x = self.norm1(x + self.attn(x, mask))", "y = self.norm1(x)\n        x = y + self.attn(y, mask)"
    )
    normed = normed.replace("x = self.norm2(x + self.ff(x))", "y = self.norm2(x)\n        x = y + self.ff(y)")
    said = report_on(normed, "EncoderLayer", tmp_path)
    assert said.startswith("deviates"), said
    assert "The residual is taken from the normalised input" in said
    said = report_on(normed.replace("class EncoderLayer", "class SASRecLayer"), "SASRecLayer", tmp_path)
    assert said.startswith("equal"), said
    assert "SASRecLayer is named after SASRec" in said


ITEMS = """
import numpy as np
import torch
from torch import nn


class SASRec(nn.Module):
    def __init__(self, user_num, item_num, args):
        super().__init__()
        dim, layers = args.hidden_units, range(args.num_blocks)
        self.item_emb = nn.Embedding(item_num + 1, dim, padding_idx=0)
        self.pos_emb = nn.Embedding(args.maxlen + 1, dim)
        self.norms, self.norms2 = (nn.ModuleList(nn.LayerNorm(dim, eps=1e-8) for _ in layers) for _ in range(2))
        self.attention = nn.ModuleList(nn.MultiheadAttention(dim, args.num_heads, batch_first=True) for _ in layers)
        self.fed = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)) for _ in layers)
        self.last_norm = nn.LayerNorm(dim, eps=1e-8)

    def features(self, log_seqs):
        seqs = self.item_emb(torch.LongTensor(log_seqs))
        places = np.tile(np.array(range(log_seqs.shape[1])), [log_seqs.shape[0], 1])
        seqs += self.pos_emb(torch.LongTensor(places + 1))
        seqs *= ~torch.BoolTensor(log_seqs.cpu() == 0).unsqueeze(-1)
        hidden = ~torch.tril(seqs.new_ones(seqs.shape[1], seqs.shape[1])).bool()
        for norm, attend, norm2, fed in zip(self.norms, self.attention, self.norms2, self.fed):
            asks = norm(seqs)
            seqs = asks + attend(asks, seqs, seqs, attn_mask=hidden)[0]
            seqs = norm2(seqs)
            seqs = seqs + fed(seqs)
        return self.last_norm(seqs)

    def forward(self, user_ids, log_seqs, pos_seqs, neg_seqs):
        found = self.features(log_seqs)
        positive, negative = self.item_emb(pos_seqs), self.item_emb(neg_seqs)
        return (found * positive).sum(dim=-1), (found * negative).sum(dim=-1)
"""
OTHERS = (
    ("class SASRec", "class Recommender", "takes keys or values from another tensor than its queries"),
    ("attend(asks, seqs, seqs", "attend(seqs, asks, asks", "takes keys or values from another tensor"),
    ("asks = norm(seqs)", "asks = norm(seqs) + seqs", "not"),
    ("places + 1", "places[:, ::-1] + 1", "it uses a tensor that is neither an argument"),
    ("attn_mask=hidden", "attn_mask=None", "Earlier outputs of the decoder change when a later target token does"),
)


def test_items_may_be_numbered_by_numpy_and_only_what_asks_be_normed(tmp_path: Path) -> None:
    said = report_on(ITEMS, "SASRec", tmp_path)
    assert said.startswith("equal"), said
    assert "only the queries are normalised, as in SASRec" in said
    assert "the tokens that are hidden are set to 0. Intended: the id 0 says" in said


SIGNATURE = "user_ids, log_seqs, pos_seqs, neg_seqs"
END_OF_ITEMS = ITEMS[ITEMS.index("        positive, negative =") :]
TABLE = "self.item_emb(torch.cat([pos_seqs, neg_seqs], -1))"
JOINED = ITEMS.replace(END_OF_ITEMS, f"        return (found[:, -1:] @ {TABLE}.mT).squeeze(1)\n")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", [ITEMS, JOINED], ids=["each", "joined"])
@pytest.mark.parametrize("signature", ["log_seqs, pos_seqs=None, neg_seqs=None", "x, pos_seqs, neg_seqs"])
def test_items_may_be_optional_and_stand_beside_one_sequence_of_any_name(
    signature: str, text: str, tmp_path: Path
) -> None:
    history = signature.partition(",")[0]
    text = text.replace(SIGNATURE, signature).replace("self.features(log_seqs)", f"self.features({history})")
    said = report_on(text, "SASRec", tmp_path)
    assert said.startswith("equal"), said
    assert "item_emb embeds both, as where recommenders score items" in said
    assert ("they are the items that are compared with tokens" in said) == ("torch.cat([pos" in text)


@pytest.mark.parametrize(
    ("old", "new"),
    [(TABLE, f"{TABLE}.flip(-1)"), ("features(log_seqs)", "features(torch.cat([log_seqs, pos_seqs], -1))")],
)
def test_items_that_are_joined_otherwise_are_not_passed_over(old: str, new: str, tmp_path: Path) -> None:
    assert old in JOINED
    assert report_on(JOINED.replace(old, new), "SASRec", tmp_path).startswith(("deviates", "unchecked"))


def test_a_query_that_is_hidden_may_see_its_own_key(tmp_path: Path) -> None:
    rows = "    s = s.masked_fill(~mask[:, None, :, None], 0.0)\n        s = s.masked_fill(s.new_ones(s.shape[-2:])"
    text = TEXT.replace("        return", f"        {rows}.triu(1).bool(), -torch.inf)\n        return", 1)
    said = report_on(text, "EncoderLayer", tmp_path)
    assert said.startswith("equal"), said
    assert "a call with mask" in said


def test_old_constructors_are_types_while_they_are_seen() -> None:
    with seen_constructors():
        assert torch.equal(torch.LongTensor([1]), torch.tensor([1]))
        assert isinstance(torch.LongTensor(torch.ones(1).long()), torch.LongTensor)
        assert not isinstance(torch.ones(1), torch.LongTensor)
        assert torch.ones(1).type(torch.LongTensor).dtype == torch.long  # type: ignore[call-overload]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("old", "new", "words"), OTHERS, ids=[new for _, new, _ in OTHERS])
def test_other_recommenders_are_not_passed_over(old: str, new: str, words: str, tmp_path: Path) -> None:
    assert old in ITEMS
    said = report_on(ITEMS.replace(old, new), "Recommender" if "Recommender" in new else "SASRec", tmp_path)
    assert said.startswith(("deviates", "unchecked")), said
    assert words in said


class Recommender(nn.Module):
    """Right where padding lies behind the items: in front of them it would see no key."""

    def __init__(self, num_items: int, hidden: int = 32, heads: int = 2, max_len: int = 50) -> None:
        super().__init__()
        self.items = nn.Embedding(num_items + 1, hidden, padding_idx=0)
        self.places = nn.Embedding(max_len, hidden)
        layer = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(hidden, num_items)

    def padding(self, items: Tensor) -> Tensor:
        return items == 0

    def forward(self, items: Tensor) -> Tensor:
        n = items.size(1)
        x = self.items(items) + self.places(torch.arange(n, device=items.device))
        causal = torch.triu(items.new_ones(n, n), 1).bool()
        x = self.encoder(x, mask=causal, src_key_padding_mask=self.padding(items))
        return self.out(x)


class AlwaysSeesTheFirst(Recommender):
    """Right for padding anywhere: the first item is never hidden."""

    def padding(self, items: Tensor) -> Tensor:
        return (items == 0).index_fill(1, torch.tensor(0), False)


def test_padding_in_front_that_leaves_a_query_without_keys_is_listed() -> None:
    report = verify(Recommender)
    assert [one.what for one in report.not_exercised] == ["padding in front of the tokens"], str(report)
    assert verify(AlwaysSeesTheFirst).verdict == "equal", str(verify(AlwaysSeesTheFirst))


class HidesThePaddingOfTheFirst(AlwaysSeesTheFirst):
    def padding(self, items: Tensor) -> Tensor:
        return super().padding(items)[:1].expand_as(items)


class HidesWhereAnyIsPadded(AlwaysSeesTheFirst):
    def padding(self, items: Tensor) -> Tensor:
        return super().padding(items).any(0).expand_as(items)


class ReadsAtTheLastOfTheLongest(AlwaysSeesTheFirst):
    def forward(self, items: Tensor) -> Tensor:
        ends = (items != 0).sum(-1).max().expand(len(items)) - 1
        return super().forward(items)[torch.arange(len(items)), ends]


@pytest.mark.parametrize("model", [HidesThePaddingOfTheFirst, HidesWhereAnyIsPadded, ReadsAtTheLastOfTheLongest])
def test_padding_that_samples_share_is_found(model: type[nn.Module]) -> None:
    report = verify(model)
    assert report.mistakes == ("padding_of_other_samples",), str(report)
    (finding,) = report.findings
    assert "items" in line_of(finding)


class ReadsAtTheLast(AlwaysSeesTheFirst):
    """Right: what it knows of the whole is at the last item that is no padding."""

    def forward(self, items: Tensor) -> Tensor:
        return super().forward(items)[torch.arange(len(items)), self.ends(items)]

    def ends(self, items: Tensor) -> Tensor:
        return (items != 0).sum(-1) - 1


class ReadsOneEarly(ReadsAtTheLast):
    """Wrong where no row is padded."""

    def ends(self, items: Tensor) -> Tensor:
        return super().ends(items[:, :-1])


def test_padding_behind_the_tokens_that_changes_what_comes_back_is_listed() -> None:
    assert verify(ReadsAtTheLast).verdict == "equal", str(verify(ReadsAtTheLast))
    assert [one.what for one in verify(ReadsOneEarly).not_exercised] == ["padding behind the tokens"]


class TurnsByEinsum(AlwaysSeesTheFirst):
    def forward(self, items: Tensor) -> Tensor:
        return torch.einsum("ijk->jik", torch.einsum("ijk->jik", super().forward(items)))


def test_an_einsum_of_one_tensor_is_a_step_of_its_own() -> None:
    assert "einsum between the parts" in verify(TurnsByEinsum).reason, str(verify(TurnsByEinsum))


def test_a_single_row_is_of_no_sample() -> None:
    run = ModelRun(lambda source, *_: source.sum(0, keepdim=True), torch.randn(2, 3, 5), None)
    assert run_mistake(run) is None


SHARED = (
    TEXT.replace(f"        if mask is not None:\n            {END}\n", "")
    .replace("~mask[:, None, None]", "~mask[None]")
    .replace(".flatten(2))", ".reshape(x.shape))")
)


@pytest.mark.parametrize("name", ["Attends", "EncoderLayer"])
def test_a_mask_that_lies_with_its_samples_along_the_heads_is_of_none(name: str, tmp_path: Path) -> None:
    """One of (batch, 1, query, key) gives the scores a fifth axis, and what comes back has the shape of tokens."""
    said = report_on(SHARED, name, tmp_path)
    assert said.startswith("partial"), said
    assert "mask for each sample it raises" in said
    assert "gives the scores more axes" in said


ALONG_THE_KEYS = (
    IDS.replace("x = self.norm1(x + self.attn(x))", "x = self.norm1(x + self.attn(x, mask))")
    .replace(f"        if mask is not None:\n            {END}\n", "")
    .replace("~mask[:, None, None]", "~mask")
    .replace("        x = x * (ids != 0).unsqueeze(-1)\n", "        mask = (ids != 0)[:, None, None]\n")
    .replace("self.layer(x)", "self.layer(x, mask.expand(-1, 1, ids.size(1), ids.size(1)))")
)


def test_padding_that_a_model_hides_along_the_queries_is_still_seen(tmp_path: Path) -> None:
    assert report_on(ALONG_THE_KEYS, "Tagger", tmp_path).startswith("equal")
    both = ALONG_THE_KEYS.replace("[:, None, None]\n", "[:, None, None]\n        mask = mask & mask.mT\n")
    assert report_on(both, "Tagger", tmp_path).startswith("equal")
    said = report_on(ALONG_THE_KEYS.replace("[:, None, None]\n", "[:, None, :, None]\n"), "Tagger", tmp_path)
    assert said.startswith("deviates"), said
    assert "The padding mask is applied to the queries instead of the keys" in said
    assert "mask = (ids != 0)[:, None, :, None]" in said
