"""Every mistake of the catalogue is made of right code, and the checker names it."""

import re
from pathlib import Path

import pytest

from equivalence_tests import verify
from equivalence_tests.checker.mistakes import MISTAKES, named_mistake
from equivalence_tests.checker.mistakes.mistake import Change
from equivalence_tests.checker.zoo.right import RIGHT, broken

MADE = [name for name, mistake in MISTAKES.items() if mistake.right]


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "mine.py").write_text(text)
    (name,) = re.findall(r"^class (\w+)", text, re.MULTILINE)
    return f"{tmp_path / 'mine.py'}:{name}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_changed_is_right(name: str, tmp_path: Path) -> None:
    report = verify(written(tmp_path, broken(name)))
    assert report.verdict == "equal", str(report)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MADE)
def test_every_mistake_is_named(name: str, tmp_path: Path) -> None:
    mistake = named_mistake(name)
    report = verify(written(tmp_path, broken(mistake.right, mistake.changes)))
    assert report.mistakes == (name,), str(report)


SPLIT = "q, k, v = (self.split(x) for x in (q, k, v))"
HELD = "self.num_heads = num_heads"
WEIGHTS = "weights = scores.softmax(-1)"
# What is intended, where the code holds something that has no other use.
INTENDED = {
    "queries_and_keys_normalised": (
        (HELD, f"{HELD}\n        self.norms = nn.ModuleList(nn.RMSNorm(embed_dim // num_heads) for _ in range(2))"),
        (SPLIT, f"{SPLIT}\n        q, k = self.norms[0](q), self.norms[1](k)"),
    ),
    "attention_sink": (
        (HELD, f"{HELD}\n        self.sinks = nn.Parameter(torch.zeros(num_heads, 1, 1))"),
        (
            WEIGHTS,
            "sinks = self.sinks.expand(*scores.shape[:3], 1)\n        "
            + WEIGHTS.replace("scores", "torch.cat((scores, sinks), -1)")
            + "[..., :-1]",
        ),
    ),
    "scores_capped": (
        ("embed_dim, num_heads):", "embed_dim, num_heads, softcap=30.0):"),
        (HELD, f"{HELD}\n        self.softcap = softcap"),
        (WEIGHTS, "scores = self.softcap * (scores / self.softcap).tanh()\n        " + WEIGHTS),
    ),
    "bias_added": (
        (HELD, f"{HELD}\n        self.table = nn.Parameter(torch.zeros(num_heads, 64, 64))"),
        (WEIGHTS, "scores = scores + self.table[:, : x.size(1), : x.size(1)]\n        " + WEIGHTS),
    ),
}


@pytest.mark.parametrize("name", INTENDED)
def test_what_is_meant_so_is_named_and_not_blamed(name: str, tmp_path: Path) -> None:
    report = verify(written(tmp_path, broken("itself", INTENDED[name])))
    assert report.verdict == "equal" or (name == "attention_sink" and report.unread), str(report)
    assert [finding.name for finding in report.intended] == [name]


def test_a_bias_that_is_worked_with_in_vain_is_named(tmp_path: Path) -> None:
    changes = (
        (HELD, f"{HELD}\n        self.token_bias = nn.Parameter(torch.zeros(embed_dim))"),
        (WEIGHTS, f"{WEIGHTS}\n        shifted = x + self.token_bias"),
    )
    assert verify(written(tmp_path, broken("itself", changes))).mistakes == ("bias_never_used",)


def test_a_softmax_that_is_worked_out_in_vain_is_missing(tmp_path: Path) -> None:
    (finding,) = verify(written(tmp_path, broken("causal", (("dropped @ v", "scores @ v"),)))).findings
    assert (finding.name, finding.line and finding.line.text) == ("softmax_missing", "context = scores @ v")


def test_the_sum_of_a_softmax_by_hand_is_no_learnt_scale(tmp_path: Path) -> None:
    by_hand = "e = (scores - scores.amax(-1, keepdim=True)).exp()\n        weights = e / e.sum(-1, keepdim=True)"
    changes = ((WEIGHTS, by_hand), ("q @ k.mT", "2 * q @ k.mT"))
    assert verify(written(tmp_path, broken("itself", changes))).mistakes == ("scale_wrong",)


@pytest.mark.parametrize(
    "added", ["merged", "q.transpose(1, 2).flatten(2)", "v.transpose(1, 2).flatten(2)", "self.v_proj(x)"]
)
def test_a_residual_from_inside_the_attention_is_none(added: str, tmp_path: Path) -> None:
    ending = "return self.out_proj(merged)"
    report = verify(written(tmp_path, broken("itself", ((ending, f"{ending} + {added}"),))))
    assert report.mistakes == ("residual_from_elsewhere",), str(report)


@pytest.mark.parametrize(
    "change",
    [
        ("scores = q", "q, k = F.elu(q) + 1, F.elu(k) + 1\n        scores = q"),
        ("= scores", "= scores / scores.sum(-1, True)"),
        ("= scores", "= F.relu(scores) / scores.size(-1)"),
    ],
)
def test_an_attention_that_is_meant_to_have_no_softmax_is_not_accused(change: Change, tmp_path: Path) -> None:
    changes = ((WEIGHTS, "weights = scores"), change)
    report = verify(written(tmp_path, broken("itself", changes)))
    assert report.verdict == "unchecked", str(report)


@pytest.mark.parametrize("right", ["cross", "causal"])
def test_a_mask_is_read_where_another_function_stands_in_for_the_softmax(right: str, tmp_path: Path) -> None:
    report = verify(written(tmp_path, broken(right, ((WEIGHTS, "weights = F.relu(scores)"),))))
    assert (report.mistakes, report.notes) == (("relu_for_softmax",), []), str(report)


@pytest.mark.parametrize("code", ["F.relu(scores).softmax(-1)", "F.relu(scores.softmax(-1) - 0.1)"])
def test_a_function_beside_the_softmax_is_not_in_its_place(code: str, tmp_path: Path) -> None:
    report = verify(written(tmp_path, broken("itself", ((WEIGHTS, f"weights = {code}"),))))
    assert report.mistakes == ("changed_by_relu",), str(report)


def test_an_unknown_name_raises() -> None:
    with pytest.raises(KeyError):
        named_mistake("zebra")
    with pytest.raises(ValueError, match="changes must be found"):
        broken("cross", (("zebra", ""),))


def test_an_exact_program_shows_the_step_that_nothing_asks_for(tmp_path: Path) -> None:
    mistake = named_mistake("rotary_queries")
    (finding,) = verify(written(tmp_path, broken(mistake.right, mistake.changes))).findings
    assert finding.evidence.startswith(
        "Your code equals a program of torch's parts that has this step: the query is rot"
    )
