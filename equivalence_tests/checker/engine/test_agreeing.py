"""Calls that have to agree: training and eval, one sample or token and several, one implementation and another."""

from pathlib import Path

import pytest

from equivalence_tests import verify
from equivalence_tests.checker.helpers_for_tests import saved
from equivalence_tests.checker.zoo.right import broken

SCORES = "scores = q @ k.mT / math.sqrt(q.size(-1))\n"
RETURNS = "return self.out_proj(merged)"
OPTIONS = (
    ("embed_dim, num_heads):", "embed_dim, num_heads, flash=False, local=False):"),
    ("self.num_heads = num_heads", "self.num_heads, self.flash, self.local = num_heads, flash, local"),
    (
        SCORES,
        SCORES
        + "        places = torch.arange(scores.size(-1)) - torch.arange(scores.size(-2))[:, None]\n"
        + "        scores = scores - places.abs() if self.local else scores\n",
    ),
)
ASKED = (
    (
        "self.num_heads = num_heads",
        "self.num_heads, self.flash = num_heads, False\n        "
        "self.flash = hasattr(F, 'scaled_dot_product_attention')",
    ),
)
TWICE = "weights = scores", "weights = (2 * scores)"
STABLE = (
    ("embed_dim, num_heads):", "embed_dim, num_heads, stable=False):"),
    ("self.num_heads = num_heads", "self.num_heads, self.stable = num_heads, stable"),
)
FUSED = """scaled_dot_product_attention(q, k, v, {mask})
            return self.out_proj(context.transpose(1, 2).flatten(2))
"""


def fused(mask: str, when: str = "self.flash") -> tuple[str, str]:
    return SCORES, f"if {when}:\n            context = F.{FUSED.format(mask=mask)}        {SCORES}"


def written(tmp_path: Path, *changes: tuple[str, str]) -> str:
    return saved(tmp_path, broken("cross", changes), "Attention")


@pytest.mark.parametrize(
    ("changes", "name", "line"),
    [
        ([(SCORES, f"{SCORES[:-1]} if self.training else q @ k.mT / q.size(-1) ** 0.5 + 0 * q @ k.mT\n")], "", ""),
        (
            [(SCORES, "scores = q @ k.mT / (1.0 if self.training else math.sqrt(q.size(-1)))\n")],
            "training_differs",
            "if",
        ),
        ([("mask is not None", "mask is not None and not self.training")], "training_differs", "not self.training"),
        (
            [
                *STABLE,
                (SCORES, f"{SCORES}        scores = scores - scores.amax(-1, True) if self.stable else scores\n"),
            ],
            "",
            "",
        ),
        (
            [*STABLE, (SCORES, f"{SCORES}        scores = scores / 32 if self.stable else scores\n")],
            "scale_wrong",
            "/ 32",
        ),
        ([(RETURNS, f"{RETURNS}.squeeze()")], "axis_of_one_lost", ".squeeze()"),
        ([(RETURNS, f"{RETURNS}.squeeze(1)")], "axis_of_one_lost", ".squeeze(1)"),
        ([fused("None if mask is None else ~mask"), *OPTIONS[:2]], "", ""),
        ([fused("None"), *OPTIONS[:2]], "implementations_differ", "if self.flash"),
        ([fused("mask"), *OPTIONS[:2]], "implementations_differ", "if self.flash"),
        ([fused("None if mask is None else ~mask"), *ASKED, TWICE], "implementations_differ", "if self.flash"),
        ([fused("None if mask is None else ~mask"), *ASKED], "", ""),
        ([fused("None if mask is None else ~mask"), *OPTIONS], "implementations_differ", "if self.flash"),
        ([fused("None if mask is None else ~mask", "self.flash and not self.local"), *OPTIONS], "", ""),
    ],
)
def test_what_differs_is_named_on_the_line_where_two_ways_part(
    changes: list[tuple[str, str]], name: str, line: str, tmp_path: Path
) -> None:
    report = verify(written(tmp_path, *changes))
    assert report.mistakes == ((name,) if name else ()), str(report)
    assert not name or line in report.findings[0].stack[-1].text, str(report)


CAUSAL = (
    ("mask=None):", "mask=None, causal=False):"),
    (
        "        if mask is not None:\n",
        "        if causal:\n"
        "            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)\n"
        "            scores = scores.masked_fill(future, -math.inf)\n"
        "        if mask is not None:\n",
    ),
)


@pytest.mark.parametrize(("told", "not_run"), [("if", []), ("elif", ["mask with causal=True"])])
def test_a_mask_that_a_causal_switch_makes_idle_is_listed(told: str, not_run: list[str], tmp_path: Path) -> None:
    told_by = (
        "        if mask is not None:\n            scores",
        f"        {told} mask is not None:\n            scores",
    )
    report = verify(written(tmp_path, *CAUSAL, told_by))
    assert [one.what for one in report.not_exercised] == not_run, str(report)


NOISE = "torch.rand_like(scores)"
SELDOM_DROPPED = "scores * torch.empty(1).bernoulli_(1 - 1e-6)"  # twice the same, almost always


@pytest.mark.parametrize("drawn", [NOISE, SELDOM_DROPPED])
def test_training_that_draws_numbers_of_its_own_is_listed(drawn: str, tmp_path: Path) -> None:
    noise = f"scores = scores + {drawn} if self.training else scores\n        weights = scores"
    (never,) = verify(written(tmp_path, ("weights = scores", noise))).not_exercised
    assert never.what.endswith("where `self.training` is true")


LAYER = """


class Layer(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.attention = Attention(embed_dim, num_heads)
        self.norm1, self.norm2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.ff = nn.Sequential(nn.Linear(embed_dim, 2 * embed_dim), nn.GELU(), nn.Linear(2 * embed_dim, embed_dim))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.ff(self.norm2(x))
"""


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (("return x + self.ff", "return x if self.training else x + self.ff"), "training_differs"),
        (("x + self.ff(self.norm2(x))", "(x + self.ff(self.norm2(x))).squeeze(0)"), "axis_of_one_lost"),
    ],
)
def test_a_layer_is_called_in_training_and_with_one_sample_too(
    change: tuple[str, str], name: str, tmp_path: Path
) -> None:
    assert verify(saved(tmp_path, broken("itself") + LAYER.replace(*change), "Layer")).mistakes == (name,)
