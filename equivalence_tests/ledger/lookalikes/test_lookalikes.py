"""Whole files in the shapes of public code: what is right is not accused, what is broken is named on its line."""

from pathlib import Path

import pytest

from equivalence_tests.checker.verify import verify

pytestmark = pytest.mark.thorough
HERE = Path(__file__).parent

RIGHT = (
    "gpt:CausalSelfAttention",
    "gpt:Block",
    "gpt:GPT",
    "annotated:attention",
    "annotated:MultiHeadedAttention",
    "annotated:EncoderLayer",
    "bert:SelfAttention",
    "bert:AttentionWithOutput",
    "llama:RMSNorm",
    "llama:Attention",
    "llama:TransformerBlock",
    "vision:PatchAttention",
    "vision:PatchBlock",
    "vision:WindowAttention",
    "vision:MapAttention",
    "speech:CrossOrSelf",
    "speech:ContextAttention",
    "speech:ValuesKeysQuery",
    *(f"conditioned:{name}" for name in ("ConditionedBlock", "TimedBlock", "TerseAttention", "SharingAttention")),
    *(f"conditioned:{name}" for name in ("WholeTriangle", "TimedModel", "InlineBlock")),
    *(f"recurrent:{name}" for name in ("DotProductAttention", "Attention", "GlobalAttention")),
)
# What to verify, what to replace by what, and the name of the mistake that this makes.
BROKEN = (
    ("gpt:CausalSelfAttention", "math.sqrt(k.size(-1))", "math.sqrt(width)", "scale_wrong"),
    ("gpt:CausalSelfAttention", "y.transpose(1, 2).contiguous().view(", "y.reshape(", "heads_merged_without_transpose"),
    ("gpt:CausalSelfAttention", "F.softmax(att, dim=-1)", "F.softmax(att, dim=-2)", "softmax_over_queries"),
    ("gpt:GPT", "x = x + self.attn(self.ln_1(x))", "x = self.attn(self.ln_1(x))", "residual_missing"),
    ("annotated:MultiHeadedAttention", "mask == 0, -1e9", "mask == 0, 1e-9", "mask_fill_not_negative"),
    ("annotated:MultiHeadedAttention", "view(count, -1, self.h, self.d_k).transpose(1, 2)",
     "view(count, self.h, -1, self.d_k)", "heads_split_without_transpose"),
    ("bert:SelfAttention", "self.key(hidden_states)", "self.query(hidden_states)", "key_uses_query_projection"),
    ("bert:SelfAttention", " / math.sqrt(self.attention_head_size)", "", "scale_missing"),
    ("llama:Attention", "xk_ * freqs_cis", "xk_ * freqs_cis.conj()", "rotations_differ"),
    ("vision:PatchAttention", "(q * self.scale) @ k", "(q * self.scale) @ (k * self.scale)", "scale_wrong"),
    ("vision:MapAttention", "softmax(w_, dim=2)", "softmax(w_, dim=1)", "softmax_over_queries"),
    ("speech:CrossOrSelf", "permute(0, 2, 3, 1) * scale", "permute(0, 2, 3, 1)", "scale_wrong"),
    ("speech:ValuesKeysQuery", "nlhd->nqhd", "nlhd->nhqd", "heads_merged_without_transpose"),
    ("conditioned:ConditionedBlock", "x + gate1", "gate1", "residual_missing"),
    ("conditioned:TimedBlock", "self.cross(self.n2(x)", "self.cross(self.n1(x)", "norm_shared"),
    ("conditioned:TerseAttention", "dim=-1", "dim=-2", "softmax_over_queries"),
    ("recurrent:DotProductAttention", "F.softmax(scores, dim=1)", "F.softmax(scores, dim=0)", "softmax_over_batch"),
    ("recurrent:Attention", "-1e10", "1e-10", "mask_fill_not_negative"),
    ("recurrent:Attention", "(weights.t()", "(attn_energies.t()", "softmax_missing"),
    ("recurrent:GlobalAttention", "squeeze(2), dim=1)", "squeeze(2) / input.size(0), dim=1)", "scale_wrong"),
    ("conditioned:TimedModel", "return x + gate2", "return gate2", "residual_missing"),
)  # fmt: skip


@pytest.mark.parametrize("target", RIGHT)
def test_what_is_right_is_not_accused(target: str) -> None:
    file, _, name = target.partition(":")
    report = verify(f"{HERE / file}.py:{name}")
    assert report.verdict != "deviates", str(report)


@pytest.mark.parametrize(("target", "old", "new", "name"), BROKEN)
def test_what_is_broken_is_named(target: str, old: str, new: str, name: str, tmp_path: Path) -> None:
    file, _, held = target.partition(":")
    text = (HERE / f"{file}.py").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "theirs.py").write_text(text.replace(old, new), encoding="utf-8")
    report = verify(f"{tmp_path / 'theirs.py'}:{held}")
    assert name in report.mistakes, str(report)
