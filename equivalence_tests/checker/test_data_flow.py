"""An attention is found by its data flow, whatever it is called and wherever it is computed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.doors.command import _show
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.helpers_for_tests import line_of, program_of, proof_holds
from equivalence_tests.checker.parts.kinds import guess_kind
from equivalence_tests.checker.reporting.findings import Proof
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.stages import OneMatrix


class Mixes(OneMatrix):
    """Attention under a name that says nothing."""

    def __init__(self, width: int = 24, heads: int = 3, axis: int = -1) -> None:
        super().__init__(width, heads)
        self.axis = axis

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.scores(q, k).softmax(self.axis)
        return weights @ v


class OverQueries(Mixes):
    """The softmax runs over the queries."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__(width, heads, axis=-2)


class Step(nn.Module):
    """A layer whose parts are called nothing in particular."""

    mixes: type[Mixes] = Mixes

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.first = self.mixes(width)
        self.second = nn.Sequential(nn.Linear(width, 40), nn.ReLU(), nn.Linear(40, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(self.one(x))
        return x + self.second(self.two(x))


class WrongStep(Step):
    """A layer with a wrong attention in it."""

    mixes = OverQueries


class Encoder(nn.Module):
    """Two such layers."""

    def __init__(self, width: int = 24, layer: type[Step] = Step) -> None:
        super().__init__()
        self.steps = nn.ModuleList([layer(width), layer(width)])

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class WrongEncoder(Encoder):
    """Two layers with a wrong attention."""

    def __init__(self, width: int = 24) -> None:
        super().__init__(width, WrongStep)


class InlineLayer(nn.Module):
    """Attention in the layer's own forward, with the scale forgotten."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(width), nn.LayerNorm(width)
        self.packed, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 40), nn.Linear(40, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        packed = self.packed(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in packed)
        weights = (q @ k.mT).softmax(-1)
        x = x + self.back((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.other(x))))


def test_a_model_of_unhelpful_names_is_read() -> None:
    report = verify(Encoder)
    assert report.verdict == "equal", str(report)
    assert any("steps.0.first" in check.name for check in report.checks)


def test_its_mistake_is_named_where_it_stands() -> None:
    report = verify(WrongEncoder)
    assert report.mistakes == ("softmax_over_queries",), str(report)
    assert report.findings[0].where == "steps.0.first"
    assert "softmax" in line_of(report.findings[0])


def test_attention_in_the_forward_of_a_layer_is_found_and_only_the_users_lines_are_shown() -> None:
    report = verify(InlineLayer)
    assert report.mistakes == ("scale_missing",), str(report)
    assert {line.path.rpartition("/")[2] for line in report.findings[0].stack} == {"test_data_flow.py"}
    proof = report.findings[0].proof
    assert proof is not None
    assert proof.holds


def test_each_attention_of_a_call_is_named_by_its_module_and_alike_ones_are_shown_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reports = verify(WrongEncoder(), torch.randn(2, 5, 24))
    assert [report.place for report in reports] == ["steps.0.first", "steps.1.first"]
    _show(reports, Console(width=100, color_system=None))
    shown = capsys.readouterr().out
    assert shown.count("The softmax runs over the queries") == 1
    assert "The same in steps.1.first" in shown


class RightInlineLayer(InlineLayer):
    """The same with the scale."""

    def forward(self, x: Tensor) -> Tensor:
        packed = self.packed(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in packed)
        x = x + self.back(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.other(x))))


def test_what_stands_around_such_an_attention_is_followed() -> None:
    report = verify(RightInlineLayer)
    assert report.verdict == "equal", str(report)
    assert report.not_exercised == []


class Window(OneMatrix):
    """Attention in a window of 4 by 4 tokens, with a learnt bias for each distance: it takes no other length."""

    distance: Tensor

    def __init__(self, width: int = 24, window: int = 4, heads: int = 3) -> None:
        super().__init__(width, heads)
        self.table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        at = torch.cartesian_prod(torch.arange(window), torch.arange(window))
        across, down = (at[:, None] - at + window - 1).unbind(-1)
        self.register_buffer("distance", across * (2 * window - 1) + down)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self.table[self.distance].permute(2, 0, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def test_a_window_of_fixed_length_is_read_at_that_length() -> None:
    report = verify(Window)
    assert report.verdict == "equal", str(report)
    assert [finding.name for finding in report.intended] != []


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    """Attention with two switches."""
    scores = q @ k.mT * (q.size(-1) ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ v


def attend_to_the_past_alone(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """With causal=True no token sees itself."""
    scores = q @ k.mT / q.size(-1) ** 0.5
    if causal:
        scores = scores + torch.full_like(scores, -1e9).triu(0)
    return scores.softmax(-1) @ v


def attend_to_the_future(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """With causal=True the past is hidden."""
    scores = q @ k.mT / q.size(-1) ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).tril(-1).bool(), float("-inf"))
    return scores.softmax(-1) @ v


def attend_with_its_scale_twice(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0) -> Tensor:
    """The scale comes beside the root of the width, and not in its place."""
    return (q @ k.mT * scale / q.size(-1) ** 0.5).softmax(-1) @ v


def test_switches_of_a_function_are_run() -> None:
    report = verify(attend)
    assert report.verdict == "equal", str(report)
    assert {exercise.what for exercise in report.coverage} >= {"causal=True", "scale=0.7"}
    assert verify(attend_to_the_past_alone).mistakes == ("causal_switch_wrong",)
    inverted = verify(attend_to_the_future)
    assert inverted.mistakes == ("causal_switch_wrong",)
    assert "tril(-1)" in line_of(inverted.findings[0])
    assert verify(attend_with_its_scale_twice).mistakes == ("scale_argument_wrong",)


class RotatedInSinglePrecision(Mixes):
    """Its tables of angles are made in float32, whatever the tokens are."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rates = 10000.0 ** (-torch.arange(0, q.size(-1), 2).float() / q.size(-1))
        angles = torch.outer(torch.arange(q.size(2)).float(), rates)
        cos, sin = angles.cos().to(q), angles.sin().to(q)

        def rotate(heads: Tensor) -> Tensor:
            one, two = heads.chunk(2, -1)
            return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)

        return F.scaled_dot_product_attention(rotate(q), rotate(k), v)


class SlidingWindowAttention(Mixes):
    """Each query sees as many keys as its window is wide, itself included."""

    def __init__(self, width: int = 24, heads: int = 3, window: int = 4) -> None:
        super().__init__(width, heads)
        self.window = window

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.size(2), device=q.device)
        back = at[:, None] - at
        scores = self.scores(q, k).masked_fill((back < 0) | (back >= self.window), float("-inf"))
        return scores.softmax(-1) @ v


class CappedAfterTheMask(Mixes):
    """A soft cap turns the -inf of hidden keys into a number: they come back."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.scores(q, k)
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        return (5 * torch.tanh(scores / 5)).softmax(-1) @ v


def test_tables_in_single_precision_are_rounding() -> None:
    assert verify(RotatedInSinglePrecision).verdict == "equal"


def test_a_window_as_wide_as_its_attribute_says_is_meant_so() -> None:
    report = verify(SlidingWindowAttention)
    assert report.verdict == "equal", str(report)
    assert [(finding.name, finding.reason) for finding in report.intended] == [
        ("own_mask", "it is as wide as window says (4)")
    ]


def test_a_proof_that_fails_is_not_shown_as_one() -> None:
    report = verify(CappedAfterTheMask)
    assert report.verdict == "deviates"
    (finding,) = report.findings
    assert finding.is_proven  # by torch's own values, where to undo the step is not enough
    failed = Report("x", verdict="deviates", findings=[replace(finding, proof=Proof(0.3, 0.4, 20))])
    assert "returns torch's numbers" not in str(failed)


class Evened(nn.Module):
    """RMSNorm under a name that says nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class EvenedStep(Step):
    """A layer with such norms."""

    def __init__(self, width: int = 24) -> None:
        super().__init__(width)
        self.one, self.two = Evened(width), Evened(width)  # type: ignore[assignment]


class Stretched(nn.Module):
    """A gain for each feature, as LayerScale has it, which normalises nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


def test_a_norm_is_told_by_what_it_does() -> None:
    assert guess_kind(Evened(5)) == "layer_norm"
    assert guess_kind(Stretched(5)) == ""
    report = verify(EvenedStep)
    assert (report.verdict, report.mistakes) == ("equal", ()), str(report)
    assert "self.second(self.two(x + output))" in program_of(report)


class SharesQueriesAndKeys(nn.Module):
    """One matrix for queries and keys, and no other that lies idle."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qk, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        qk, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.to_qk, self.to_v))
        weights = (qk @ qk.mT / qk.size(-1) ** 0.5).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


def test_a_shared_projection_deviates_and_says_who_does_so_on_purpose() -> None:
    report = verify(SharesQueriesAndKeys)
    assert report.mistakes == ("key_uses_query_projection",)
    assert "Reformer" in report.suspected[0].on_purpose_in


class TwoStreamsAttention(nn.Module):
    """Right: joins two streams, each with matrices of its own, and ignores a mask, as its callers know."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.own, self.others, self.o, self.other_o = (nn.Linear(dim, n * dim) for n in (3, 3, 1, 1))

    def forward(self, x: Tensor, text: Tensor | None = None, attention_mask: Tensor | None = None) -> Any:
        made = self.own(x) if text is None else torch.cat((self.own(x), self.others(text)), 1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in made.chunk(3, -1))
        merged = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return (
            self.o(merged) if text is None else (self.o(merged[:, : len(x[0])]), self.other_o(merged[:, len(x[0]) :]))
        )


def test_what_is_only_seen_in_other_calls_is_no_mistake_of_this_one() -> None:
    (report,) = verify(TwoStreamsAttention(12, 3), (torch.randn(2, 5, 12), torch.randn(2, 4, 12)))
    assert (report.verdict, report.mistakes) == ("unchecked", ()), str(report)
    assert verify(lambda: TwoStreamsAttention(12, 3)).mistakes == ("mask_never_used",)


def test_tokens_of_which_most_are_padding_are_tokens() -> None:
    tokens = torch.randn(2, 9, 12)
    tokens[:, 2:] = 0
    (report,) = verify(TwoStreamsAttention(12, 3), (tokens,))
    assert report.verdict == "equal", str(report)
    other = Call(nn.Identity(), (tokens,)).redrawn(1).args[0]
    assert torch.equal(other == 0, tokens == 0)
    assert not torch.equal(other, tokens)


class TurnedByWhatIsHandedOver(nn.Module):
    """Right: queries and keys are rotated by angles that its model hands over, and grouped; softmax in float32."""

    def __init__(self, dim: int = 16, heads: int = 2, key_heads: int = 1) -> None:
        super().__init__()
        self.heads, self.key_heads, head = heads, key_heads, dim // heads
        self.q_proj, self.o_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.k_proj, self.v_proj = nn.Linear(dim, key_heads * head), nn.Linear(dim, key_heads * head)
        self.q_norm, self.k_norm = self.norms(head)

    def norms(self, width: int) -> tuple[nn.Module, nn.Module]:
        return nn.Identity(), nn.Identity()

    def turned(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        quarter_q, quarter_k = (torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) for x in (q, k))
        turned_q = q * cos + quarter_q * sin
        turned_k = k * cos + quarter_k * sin
        return turned_q, turned_k

    def forward(self, hidden_states: Tensor, turns: tuple[Tensor, Tensor] | None = None) -> Tensor:
        assert turns is not None
        q, k, v = (
            made(hidden_states).unflatten(-1, (heads, -1)).transpose(1, 2)
            for made, heads in ((self.q_proj, self.heads), (self.k_proj, self.key_heads), (self.v_proj, self.key_heads))
        )
        return self.o_proj(self.merged(self.attended(*self.turned(self.q_norm(q), self.k_norm(k), *turns), v)))

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (x.repeat_interleave(self.heads // self.key_heads, 1) for x in (key, value))
        scores = query @ key.mT / query.size(-1) ** 0.5
        return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value

    def merged(self, heads: Tensor) -> Tensor:
        return heads.transpose(1, 2).flatten(2)


class TurnedByMatricesOfWhatIsHandedOver(TurnedByWhatIsHandedOver):
    """Right: neighbours are rotated together, each pair by a small matrix."""

    def turned(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (x.chunk(2, -1)[0] for x in (cos, sin))
        matrices = torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))
        turned_q = (q.unflatten(-1, (-1, 1, 2)) * matrices).sum(-1).flatten(-2)
        turned_k = (k.unflatten(-1, (-1, 1, 2)) * matrices).sum(-1).flatten(-2)
        return turned_q, turned_k


class RolledOnceMerged(TurnedByWhatIsHandedOver):
    """Wrong: what is merged is rolled."""

    def merged(self, heads: Tensor) -> Tensor:
        return super().merged(heads).roll(1, 1)


class SwappedOnceTurned(TurnedByWhatIsHandedOver):
    """Wrong: keys and values are handed over in the wrong order."""

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attended(query, value, key)


class TurnedBySinesTooLarge(TurnedByWhatIsHandedOver):
    """Wrong: a factor that is none of the queries, nor of the keys."""

    def turned(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().turned(q, k, cos, sin * 1.3)


class MergedWithoutTransposing(TurnedByWhatIsHandedOver):
    """Wrong: as many samples as heads, so that the sizes of the axes do not say which is which."""

    def norms(self, width: int) -> tuple[nn.Module, nn.Module]:
        return nn.RMSNorm(width), nn.RMSNorm(width)

    def merged(self, heads: Tensor) -> Tensor:
        return heads.reshape(len(heads), heads.size(2), -1)


class RMSNormOverTokens(nn.Module):
    """Wrong: the mean is taken over the tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6))


class AttentionNormedOverTokens(TurnedByWhatIsHandedOver):
    """Wrong: its norms are."""

    def norms(self, width: int) -> tuple[nn.Module, nn.Module]:
        return RMSNormOverTokens(width), RMSNormOverTokens(width)


class TwiceAsLarge(TurnedByWhatIsHandedOver):
    """Nothing says whether it is right: a constant factor."""

    def forward(self, hidden_states: Tensor, turns: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return super().forward(hidden_states, turns) * 2


class BiasedByWhatIsHandedOver(TurnedByWhatIsHandedOver):
    """Wrong: heads are merged without a transpose; what its model hands over is added to the scores."""

    def __init__(self) -> None:
        super().__init__(key_heads=2)

    def forward(self, hidden_states: Tensor, turns: tuple[Tensor, Tensor] | None = None) -> Tensor:
        assert turns is not None
        made = (self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in made)
        bias = turns[0] @ turns[1].mT
        scores = q @ k.mT / q.size(-1) ** 0.5 + bias
        merged = scores.softmax(-1) @ v
        return self.o_proj(merged.reshape(len(merged), merged.size(2), -1))


def with_turns(kind: type[TurnedByWhatIsHandedOver]) -> Report:
    """Check an attention in a call that only its model can make."""
    angles = torch.outer(torch.arange(5.0), 10000 ** -(torch.arange(4.0) / 4)).repeat(1, 2)
    (report,) = verify(kind(), (torch.randn(2, 5, 16), (angles.cos(), angles.sin())))
    return report


@pytest.mark.parametrize(
    ("kind", "mistake", "line"),
    [
        (RolledOnceMerged, "changed_by_roll", ".roll(1, 1)"),
        (SwappedOnceTurned, "key_value_swapped", "made(hidden_states)"),
        (TurnedBySinesTooLarge, "query_changed_by_mul", "sin * 1.3"),
        (MergedWithoutTransposing, "heads_merged_without_transpose", "heads.reshape("),
        (BiasedByWhatIsHandedOver, "heads_merged_without_transpose", "merged.reshape("),
    ],
)
def test_a_mistake_in_a_call_that_only_its_model_can_make_is_proven(
    kind: type[TurnedByWhatIsHandedOver], mistake: str, line: str
) -> None:
    report = with_turns(kind)
    assert report.mistakes == (mistake,), str(report)
    (finding,) = report.findings
    assert proof_holds(finding)
    assert line in line_of(finding)


def test_a_norm_in_it_that_seems_not_to_normalise_is_checked_by_itself() -> None:
    report = with_turns(AttentionNormedOverTokens)
    assert set(report.mistakes) == {"norm_wrong_axes"}, str(report)
    assert {finding.where for finding in report.findings} == {"q_norm", "k_norm"}


def test_what_may_be_intended_in_such_a_call_is_not_held_against_it() -> None:
    for kind in (TurnedByWhatIsHandedOver, TurnedByMatricesOfWhatIsHandedOver):
        assert with_turns(kind).verdict == "equal"
    report = with_turns(TwiceAsLarge)
    assert (report.verdict, report.mistakes) == ("unchecked", ()), str(report)
