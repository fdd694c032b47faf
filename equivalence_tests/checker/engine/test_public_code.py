"""Styles that public code has, each written anew: the right one passes, and the wrong one is named."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.caches import exercised_cache
from equivalence_tests.checker.engine.contracts.projecting import unused_departures
from equivalence_tests.checker.engine.judging import examine
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.helpers_for_tests import changed, line_of, program_of, proof_holds
from equivalence_tests.checker.reach.arguments import Sizes
from equivalence_tests.checker.reach.model_calls import run_model
from equivalence_tests.checker.reach.plans import trials_of
from equivalence_tests.checker.reach.subject import Adapter
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.stages import OneMatrix, Operands, SelfAttention, ThreeMatrices


class OneMatrixForAllHeads(nn.Module):
    """Each head's part of a token goes through the same small matrix."""

    def __init__(self, embed_size: int, heads: int) -> None:
        super().__init__()
        self.heads, self.part, self.divisor = heads, embed_size // heads, (embed_size // heads) ** 0.5
        self.values, self.keys, self.queries = (nn.Linear(self.part, self.part, bias=False) for _ in range(3))
        self.out = nn.Linear(embed_size, embed_size)

    def summed(self, weights: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("nhql,nlhd->nqhd", [weights, v])

    def forward(self, values: Tensor, keys: Tensor, query: Tensor) -> Tensor:
        v, k, q = (x.reshape(*x.shape[:2], self.heads, self.part) for x in (values, keys, query))
        energy = torch.einsum("nqhd,nkhd->nhqk", [self.queries(q), self.keys(k)])
        weights = torch.softmax(energy / self.divisor, dim=3)
        return self.out(self.summed(weights, self.values(v)).flatten(2))


class DividedByTheWholeWidth(OneMatrixForAllHeads):
    def __init__(self, embed_size: int, heads: int) -> None:
        super().__init__(embed_size, heads)
        self.divisor = embed_size**0.5


class NeverSumsOverTheKeys(OneMatrixForAllHeads):
    def summed(self, weights: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("nhql,nlhd->nlhd", [weights, v])


def test_a_key_in_the_place_of_the_query_in_an_einsum_is_proven_beside_one_matrix_for_all_heads() -> None:
    (finding,) = verify(NeverSumsOverTheKeys).findings
    assert "nlhd->nlhd" in line_of(finding)


@pytest.mark.thorough
def test_one_small_matrix_for_all_heads_is_told_and_does_not_hide_what_else_is_wrong() -> None:
    assert verify(OneMatrixForAllHeads).mistakes == ("projection_shared_by_heads",)
    both = {"projection_shared_by_heads", "scale_wrong"}
    assert set(verify(DividedByTheWholeWidth).mistakes) == both


class Attends(nn.Module):
    """Attends to a second tensor; the classes below change one thing each."""

    def __init__(self, dim: int, context_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_q, self.to_out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.to_k, self.to_v = nn.Linear(context_dim, dim), nn.Linear(context_dim, dim)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def attend(self, x: Tensor, context: Tensor, bias: Tensor | float = 0.0, hidden: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(context)), self.split(self.to_v(context))
        scores = q @ k.mT / math.sqrt(q.size(-1)) + bias
        if hidden is not None:
            scores = scores.masked_fill(hidden, -1e9)
        return self.to_out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.attend(x, context)


def test_the_width_of_a_context_is_no_length() -> None:
    report = verify(Attends)
    assert report.verdict == "equal"
    assert ("arguments", "x: query, context: key = value", "forward(query, key, value, ...)") in report.conventions


class RoundsItsScores(Attends):
    """Right, and coarse in float32."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.attend(x, context, 3e4)


class T5RoundsItsScores(Attends):
    """The same, without a scale, as in T5."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(context)), self.split(self.to_v(context))
        return self.to_out(((q @ k.mT + 3e4).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_coarse_rounding_is_told_and_no_mistake() -> None:
    report = verify(RoundsItsScores)
    assert report.verdict == "equal"
    assert [note for note in report.notes if "check_float32_error" in note]


def test_coarse_rounding_is_told_beside_what_is_intended() -> None:
    report = verify(T5RoundsItsScores)
    assert (report.verdict, [one.name for one in report.intended]) == ("equal", ["scale_missing"])
    assert [note for note in report.notes if "check_float32_error" in note]


class AddsItsMask(Attends):
    """The mask is required, and added."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.attend(x, x, mask)


def test_a_required_mask_that_is_added_is_not_tried_with_true_and_false() -> None:
    report = verify(lambda: AddsItsMask(12, 12, 3))
    assert report.verdict == "equal"
    assert ["added" in here for what, here, _ in report.conventions if what == "mask (mask)"] == [True]


class HidesNext(Attends):
    """1 is for what may be looked at, and what may not gets next to nothing; -inf would pass all the same."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, x, 0.0 if mask is None else (1 - mask) * -1e-9)


def test_a_mask_of_ones_that_is_multiplied_by_next_to_nothing_is_no_mask_that_is_added() -> None:
    (finding,) = verify(lambda: HidesNext(12, 12, 3)).findings
    assert finding.name == "mask_fill_not_negative"
    assert "fills with -1e-09" in finding.sentence


class HidesQueries(Attends):
    """A mask of padding lies along the queries, and leaves nothing of their rows."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, x, hidden=None if mask is None else mask[:, None, :, None] == 0)


def test_a_padding_mask_that_lies_along_the_queries_is_named() -> None:
    assert verify(lambda: HidesQueries(12, 12, 3)).mistakes == ("padding_mask_on_queries",)


class TakesTwoMasks(Attends):
    """Of two masks no line reads one."""

    def forward(
        self, x: Tensor, context: Tensor, attention_mask: Tensor | None = None, context_mask: Tensor | None = None
    ) -> Tensor:
        del attention_mask
        return self.attend(x, context, 0.0 if context_mask is None else context_mask)


class DropsOneOfTwoMasks(TakesTwoMasks):
    def forward(
        self, x: Tensor, context: Tensor, attention_mask: Tensor | None = None, context_mask: Tensor | None = None
    ) -> Tensor:
        if attention_mask is not None:
            context.masked_fill(attention_mask.any(), 0.0)
        return super().forward(x, context, None, context_mask)


@pytest.mark.thorough
def test_a_mask_that_no_line_reads_is_listed_beside_one_that_acts_and_one_that_is_read_in_vain_is_a_mistake() -> None:
    report = verify(lambda: TakesTwoMasks(12, 12, 3))
    assert (report.verdict, [one.what for one in report.not_exercised]) == ("partial", ["attention_mask"]), str(report)
    dropped = verify(lambda: DropsOneOfTwoMasks(12, 12, 3))
    assert dropped.mistakes == ("mask_never_used",)
    assert dropped.findings[0].sentence == "The mask attention_mask is accepted but never used."


class DropsWhatItFills(Attends):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.to_q(x) @ self.to_k(x).mT / math.sqrt(x.size(-1))
        if mask is not None:
            scores.masked_fill(mask == 0, -torch.inf)
        return self.to_out(scores.softmax(-1) @ self.to_v(x))


def test_a_mask_that_is_filled_in_and_dropped_is_missed_there() -> None:
    (finding,) = verify(lambda: DropsWhatItFills(12, 12, 1)).findings
    assert finding.name == "mask_never_used"
    assert line_of(finding).startswith("scores.masked_fill")


class LooksAtNeighbours(nn.Module):
    """Features first; a convolution over neighbouring places makes queries, keys and values."""

    def __init__(self, feat_dim: int, num_head: int) -> None:
        super().__init__()
        self.num_head = num_head
        self.qkv = nn.Conv1d(feat_dim, 3 * feat_dim, 3, padding=1)
        self.out = nn.Conv1d(feat_dim, feat_dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(1, (self.num_head, -1)).mT for part in self.qkv(x).chunk(3, dim=1))
        context = F.scaled_dot_product_attention(q, k, v)
        return self.out(context.mT.flatten(1, 2))


class NormalisedNeighbours(LooksAtNeighbours):
    """The same, with queries and keys of length one."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(1, (self.num_head, -1)).mT for part in self.qkv(x).chunk(3, dim=1))
        context = F.scaled_dot_product_attention(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, scale=1.0)
        return self.out(context.mT.flatten(1, 2))


class FeedsForwardItself(Attends):
    """A block whose feed-forward network writes its own GELU."""

    def __init__(self, dim: int, context_dim: int, num_heads: int) -> None:
        super().__init__(dim, context_dim, num_heads)
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 20), nn.Linear(20, dim)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.attend(x, x)
        y = self.up(self.norm(x))
        return x + self.down(0.5 * y * (1.0 + torch.erf(y / 2**0.5)))


def test_what_a_network_behind_the_attention_does_is_no_change_of_its_output() -> None:
    assert verify(lambda: FeedsForwardItself(12, 12, 3)).mistakes == ()


def test_queries_of_one_convolution_may_be_normalised() -> None:
    assert "check stopped" not in verify(NormalisedNeighbours).reason


def test_a_convolution_over_neighbours_keeps_tokens_in_their_places() -> None:
    assert verify(LooksAtNeighbours).mistakes == ()


class KeepsADictionary(Attends):
    """Queries, keys and values come in apart; what is kept is a dictionary."""

    late = 0

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, cache: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        q, k, v = self.split(self.to_q(query)), self.split(self.to_k(key)), self.split(self.to_v(value))
        if cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        kept = k.size(2) - q.size(2)
        future = q.new_ones(q.size(2), k.size(2)).bool().triu(1 + kept - self.late * kept)
        weights = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(future, -torch.inf).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2)), {"k": k, "v": v}


def test_a_cache_is_exercised_where_queries_keys_and_values_come_apart() -> None:
    right = verify(lambda: KeepsADictionary(12, 12, 3))
    assert right.verdict == "equal"
    assert "cache" in [exercise.what for exercise in right.coverage if exercise.exercised]
    wrong = verify(lambda: changed(KeepsADictionary, late=1)(12, 12, 3))
    assert wrong.mistakes == ("cache_differs_from_one_pass",)


block_size = 13  # of the file, as in many a lesson


class Head(nn.Module):
    """One head with a causal table of its own; the attention below has a list of them."""

    def __init__(self, n_embed: int, head_size: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(n_embed, head_size, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.ones(block_size, block_size).tril())

    def forward(self, x: Tensor) -> Tensor:
        length, k = x.size(1), self.key(x)
        scores = self.query(x) @ k.mT * k.size(-1) ** -0.5
        tril = self.get_buffer("tril")[:length, :length]
        return scores.masked_fill(tril == 0, -torch.inf).softmax(-1) @ self.value(x)


class ListOfHeads(nn.Module):
    def __init__(self, n_embed: int, n_heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(n_embed, n_embed // n_heads) for _ in range(n_heads))
        self.proj = nn.Linear(n_embed, n_embed)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class AlwaysTheFirstHead(ListOfHeads):
    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([self.heads[0](x) for _ in self.heads], dim=-1))


def test_heads_may_be_a_list_of_modules_whose_table_ends_at_the_block_size() -> None:
    report = verify(ListOfHeads)
    assert (report.verdict, report.mistakes) == ("equal", ())
    assert [e.exercised for e in report.coverage if e.what == "lengths beyond block_size = 13"] == [True]


class RepeatsItsHead(ListOfHeads):
    def __init__(self, n_embed: int, n_heads: int) -> None:
        super().__init__(n_embed, n_heads)
        self.heads = nn.ModuleList([self.heads[0]] * n_heads)


def test_one_head_in_the_place_of_all_is_named() -> None:
    assert verify(AlwaysTheFirstHead).mistakes == ("heads_missing_or_repeated",)
    finding = verify(RepeatsItsHead).findings[0]
    assert (finding.name, finding.line and "* n_heads" in finding.line.text) == ("one_head_for_all", True)


class Packed(nn.Module):
    """One weight for queries, keys and values; ``taken`` says which third each of them is."""

    taken = (0, 1, 2)

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        thirds = [y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, dim=-1)]
        q, k, v = (thirds[place] for place in self.taken)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_rows_of_a_packed_weight_that_are_used_twice_are_told() -> None:
    assert verify(Packed).mistakes == ()
    assert verify(changed(Packed, taken=(0, 1, 1))).mistakes == ("value_uses_key_projection",)
    assert verify(changed(Packed, taken=(0, 2, 2))).mistakes == ("key_uses_value_projection",)


class WritesInPlace(nn.Module):
    """A cache that is written at ``start_pos``; where tokens stand is told by angles that are handed over."""

    forgotten = False

    def __init__(self, dim: int, n_heads: int, max_seq_len: int = 64) -> None:
        super().__init__()
        self.n_heads, width = n_heads, dim // n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.cache_k, self.cache_v = (torch.zeros(4, max_seq_len, n_heads, width) for _ in range(2))

    def turned(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(3)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None = None) -> Tensor:
        end = start_pos + x.size(1)
        q, k, v = (f(x).unflatten(-1, (self.n_heads, -1)) for f in (self.wq, self.wk, self.wv))
        self.cache_k, self.cache_v = self.cache_k.to(k), self.cache_v.to(v)
        self.cache_k[: len(x), start_pos:end] = self.turned(k, freqs_cis)
        self.cache_v[: len(x), 0 if self.forgotten else start_pos :][:, : x.size(1)] = v
        q, k, v = (
            y.transpose(1, 2)
            for y in (self.turned(q, freqs_cis), self.cache_k[: len(x), :end], self.cache_v[: len(x), :end])
        )
        scores = q @ k.mT / math.sqrt(q.size(-1)) + (0.0 if mask is None else mask)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class OneTokenAtAStep(WritesInPlace):
    """Hides nothing, since a step has no token behind its own."""

    short = 0

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor) -> Tensor:  # type: ignore[override]
        end = start_pos + x.size(1)
        q, k, v = (f(x).unflatten(-1, (self.n_heads, -1)) for f in (self.wq, self.wk, self.wv))
        self.cache_k, self.cache_v = self.cache_k.to(k), self.cache_v.to(v)
        self.cache_k[: len(x), start_pos:end], self.cache_v[: len(x), start_pos:end] = self.turned(k, freqs_cis), v
        seen = max(end - self.short, x.size(1))
        q, k, v = self.turned(q, freqs_cis), self.cache_k[: len(x), :seen], self.cache_v[: len(x), :seen]
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / math.sqrt(q.size(-1))
        return self.wo((scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).flatten(2))


class KeepsWhatTheFirstMade(nn.Module):
    """Two attentions: in a pass, the second reads what the first made of tokens that see those after them."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.a, self.b = OneTokenAtAStep(dim, n_heads), OneTokenAtAStep(dim, n_heads)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor) -> Tensor:
        x = x + self.a(x, start_pos, freqs_cis)
        return x + self.b(x, start_pos, freqs_cis)


def test_a_second_attention_is_not_held_against_passes_that_hide_nothing() -> None:
    assert "cache_differs_from_one_pass" not in verify(KeepsWhatTheFirstMade).mistakes


def test_a_step_that_hides_nothing_is_the_last_token_of_a_pass() -> None:
    right = verify(OneTokenAtAStep)
    assert right.mistakes == ()
    assert ("start_pos", True) in [(exercise.what, exercise.exercised) for exercise in right.coverage]
    (wrong,) = verify(changed(OneTokenAtAStep, short=1)).findings
    assert (wrong.name, wrong.evidence) == (
        "cache_differs_from_one_pass",
        "6 tokens, each against the last of a pass up to it",
    )


def test_a_cache_is_exercised_where_the_positions_are_handed_over() -> None:
    right = verify(WritesInPlace)
    assert (right.verdict, right.mistakes) == ("equal", ())
    assert ("start_pos", True) in [(exercise.what, exercise.exercised) for exercise in right.coverage]
    module = changed(WritesInPlace, forgotten=True)(12, 3).double().eval()
    _, (wrong,) = exercised_cache(next(trials_of(module, Sizes(num_heads=3, head_dim=4), torch.float64)))
    assert wrong.name == "cache_differs_from_one_pass"
    assert line_of(wrong).startswith("self.cache_v[")


class NumbersItsTokens(OneMatrix):
    """Takes the number of each token, which counts on from step to step, beside the keys and values of those before."""

    def turned(self, x: Tensor, position_ids: Tensor) -> Tensor:
        angles = position_ids[:, None, :, None] / 10 ** torch.arange(x.size(-1) // 2, device=x.device)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(3)

    def forward(  # type: ignore[override]
        self, x: Tensor, position_ids: Tensor, past_key_value: Any = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        q, k, v = self.operands(x)
        q, k = self.turned(q, position_ids), self.turned(k, position_ids)
        if past_key_value is not None:
            k, v = (torch.cat(both, -2) for both in zip(past_key_value, (k, v), strict=True))
        scores = self.scores(q, k) + (0.0 if mask is None else mask)
        return self.finish(scores.softmax(-1) @ v), (k, v)


def test_the_numbers_of_the_tokens_count_on_from_step_to_step() -> None:
    report = verify(NumbersItsTokens)
    assert (report.verdict, report.mistakes) == ("equal", ()), str(report)
    assert ("past_key_value", True) in [(exercise.what, exercise.exercised) for exercise in report.coverage]


class TakesGroupedHeads(nn.Module):
    """No projections: queries, keys and values come in with their heads, keys with fewer."""

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.groups = num_heads // num_kv_heads

    def repeated(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.groups, dim=2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend; (batch, len, heads, head_dim)."""
        q, k, v = (x.transpose(1, 2) for x in (q, self.repeated(k), self.repeated(v)))
        return ((q @ k.mT * q.size(-1) ** -0.5).softmax(-1) @ v).transpose(1, 2)


class TilesGroupedHeads(TakesGroupedHeads):
    def repeated(self, x: Tensor) -> Tensor:
        return x.repeat(1, 1, self.groups, 1)


def test_keys_are_handed_over_with_fewer_heads_where_a_class_groups_them() -> None:
    report = verify(TakesGroupedHeads)
    assert (report.verdict, report.mistakes) == ("equal", ())
    assert "6; keys and values have 2" in [here for what, here, _ in report.conventions if what == "heads"]
    tiled = verify(TilesGroupedHeads)  # suspected: nothing that can be put in proves it
    assert (tiled.verdict, tiled.mistakes) == ("deviates", ("grouped_heads_tiled",))


class AddsToEachHead(TakesGroupedHeads):
    """Adds one vector to all keys of a head, which no softmax notices."""

    def repeated(self, x: Tensor) -> Tensor:
        return super().repeated(x + torch.arange(x.size(-2))[:, None] * 0.1)


def test_what_changes_no_output_is_not_proven_by_the_numbers_of_another_call() -> None:
    report = verify(AddsToEachHead)
    assert not [finding for finding in report.findings if finding.name == "key_changed_by_add"], str(report)


class WithoutResidual(Attends):
    """An attention with a feed-forward network behind it, in one forward."""

    def __init__(self, dim: int, context_dim: int, num_heads: int) -> None:
        super().__init__(dim, context_dim, num_heads)
        self.feed_forward = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 20), nn.ReLU(), nn.Linear(20, dim))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = self.attend(x, x)
        return x + self.feed_forward(x)


def test_a_feed_forward_behind_an_attention_without_a_residual_connection_is_not_equal() -> None:
    report = verify(lambda: WithoutResidual(12, 12, 3), kind="attention")
    assert report.verdict == "unchecked", str(report)
    assert "the attention has no residual connection" in str(report)


class SumsByLetters(Attends):
    """Public code writes the letters of its products by hand."""

    scores, context = "bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            made.unflatten(-1, (self.num_heads, -1)) for made in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        weights = (torch.einsum(self.scores, q, k) / math.sqrt(q.size(-1))).softmax(-1)
        return self.to_out(torch.einsum(self.context, weights, v).flatten(2))


def test_letters_of_an_einsum_that_do_not_meet_are_told_with_those_that_would() -> None:
    assert verify(SumsByLetters).verdict == "equal"
    for wrong, right in (
        (changed(SumsByLetters, scores="bqhd,bkhe->bhqk"), "bqhd,bkhd->bhqk"),
        (changed(SumsByLetters, context="bhqk,bvhd->bqhd"), "bhqk,bkhd->bqhd"),
    ):
        (finding,) = verify(wrong).findings
        assert (finding.name, finding.want) == ("operands_summed_apart", f"einsum('{right}')")
        assert proof_holds(finding)
    assert verify(changed(SumsByLetters, scores="bqhd,bkjd->bhqk")).mistakes == ("scale_wrong",)


class NeverLooksAtItsScores(Attends):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        weights = (self.split(self.to_q(x)) @ self.split(self.to_k(context)).mT).softmax(-1)
        every = self.split(self.to_v(context)).sum(2, keepdim=True)
        return self.to_out((weights.sum(-1, keepdim=True) * every).transpose(1, 2).flatten(2))


def test_where_scores_meet_no_values_their_line_is_told() -> None:
    report = verify(NeverLooksAtItsScores)
    assert report.verdict == "unchecked"
    assert "self.split(self.to_k(context)).mT" in report.reason


class WindowsOfAnImage(nn.Module):
    """Pads an image to whole windows; a norm over all of it comes first."""

    window_size = 4

    def __init__(self, channels: int, heads: int = 3) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(1, channels)
        self.qkv, self.proj = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def windows(self, x: Tensor) -> Tensor:
        b, c, height, width = x.shape
        side = self.window_size
        cut = x.reshape(b, self.heads, c // self.heads, height // side, side, width // side, side)
        return cut.permute(0, 3, 5, 1, 4, 6, 2).reshape(b, -1, self.heads, side * side, c // self.heads)

    def put_back(self, x: Tensor, shape: torch.Size) -> Tensor:
        b, c, height, width = shape
        side = self.window_size
        apart = x.reshape(b, height // side, width // side, self.heads, side, side, c // self.heads)
        return apart.permute(0, 3, 6, 1, 4, 2, 5).reshape(shape)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        padded = F.pad(x, (0, -width % self.window_size, 0, -height % self.window_size))
        q, k, v = (self.windows(made) for made in self.qkv(self.norm(padded)).chunk(3, 1))
        out = self.put_back(F.scaled_dot_product_attention(q, k, v), padded.shape)
        return x + self.proj(out)[:, :, :height, :width]


class WindowsOfAnImageTurned(WindowsOfAnImage):
    def put_back(self, x: Tensor, shape: torch.Size) -> Tensor:
        return super().put_back(x.flip(3), shape)


@pytest.mark.thorough
def test_windows_of_a_padded_image_are_right_and_a_norm_over_all_of_it_is_no_look_beyond_them() -> None:
    assert verify(WindowsOfAnImage).mistakes == ()
    assert verify(WindowsOfAnImageTurned).verdict == "unchecked"


class WindowsOfOneToken(OneMatrix):
    """Cuts the tokens into windows; by default each sees itself alone."""

    def __init__(self, dim: int, heads: int = 3, window_size: int = 1) -> None:
        super().__init__(dim, heads)
        self.window_size = window_size

    def cut(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.window_size, x.size(-1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.cut(x)).view(x.shape)


class SeesItselfForNoReason(WindowsOfOneToken):
    def __init__(self, dim: int, heads: int = 3) -> None:
        super().__init__(dim, heads, 0)

    def cut(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[:, None]


def test_windows_of_one_token_are_no_attention_over_the_batch() -> None:
    report = verify(WindowsOfOneToken)
    assert (report.mistakes, [finding.name for finding in report.intended]) == ((), ["own_mask"])
    assert "no query had more than one key" in report.not_exercised[0].detail
    assert verify(SeesItselfForNoReason).mistakes == ("key_tokens_missing",)


class TurnsByATable(Attends):
    """Keeps a table of angles that was rounded to float32 before the checker widened it."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, context_dim: int, num_heads: int) -> None:
        super().__init__(dim, context_dim, num_heads)
        width = dim // num_heads
        angles = torch.outer(torch.arange(64.0), 10000.0 ** (-torch.arange(0, width, 2).float() / width))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        last = 5 + x.size(2)  # counts from another position than 0, at which there is nothing to round
        return x * self.cos[5:last] + torch.cat((-other, one), -1) * self.sin[5:last]

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(context)), self.split(self.to_v(context))
        attended = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v)
        return self.to_out(attended.transpose(1, 2).flatten(2))


def test_rounded_angles_that_count_from_anywhere_are_no_deviation() -> None:
    report = verify(lambda: TurnsByATable(60, 60, 6))
    assert report.verdict == "equal", str(report)


class CentresItsKeys(TurnsByATable):
    """All scores of a query move by one number, which no softmax sees."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(context)), self.split(self.to_v(context))
        rotated = self.turned(k)
        attended = F.scaled_dot_product_attention(self.turned(q), rotated - rotated.mean(-2, keepdim=True), v)
        return self.to_out(attended.transpose(1, 2).flatten(2))


class LeansAfterItsRotation(TurnsByATable):
    def turned(self, x: Tensor) -> Tensor:
        rotated = super().turned(x)
        return rotated + rotated.mean(-1, keepdim=True)


class BendsPiecesAfterTheirRotation(TurnsByATable):
    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.to_q, self.to_k, self.to_v))
        q = self.turned(q).contiguous().abs()
        pieces = zip(*(y.split(lengths, 2) for y in (q, self.turned(k), v)), strict=True)
        attended = torch.cat([F.scaled_dot_product_attention(*piece) for piece in pieces], 2)
        return self.to_out(attended.transpose(1, 2).flatten(2))


class TurnsFaster(TurnsByATable):
    power = 1

    def turned(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        turns = self.turns(torch.arange(one.size(-1)) / one.size(-1))
        angles = torch.outer(torch.arange(float(x.size(2))) ** self.power, turns)
        return torch.cat((one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()), -1)

    def turns(self, places: Tensor) -> Tensor:
        return 1.1 * 10000.0**-places


class TurnsByABaseOfItsOwn(TurnsFaster):
    def turns(self, places: Tensor) -> Tensor:
        return torch.exp(-12.0 * places)


class TurnsByNoPowers(TurnsFaster):
    def turns(self, places: Tensor) -> Tensor:
        return 1 - places


def test_what_is_done_after_a_rotation_is_no_mistake_of_the_rotation() -> None:
    assert verify(lambda: CentresItsKeys(60, 60, 6)).verdict == "unchecked"
    found = verify(lambda: LeansAfterItsRotation(60, 60, 6)).findings
    assert [one.name for one in found] == ["query_changed_by_add", "key_changed_by_add"]
    assert all(one.line is not None and "rotated.mean" in one.line.text for one in found)
    (report,) = verify(BendsPiecesAfterTheirRotation(12, 12, 2), (torch.randn(1, 8, 12), [5, 3]))
    assert (report.mistakes, report.reason) == (("query_changed_by_abs",), "")


@pytest.mark.parametrize(
    ("kind", "pace"),
    [
        (TurnsByATable, ""),
        (TurnsFaster, "; pair 1 turns by 1.1, not by 1, from one token to the next"),
        (TurnsByABaseOfItsOwn, f"; the base is {math.exp(12):.6g}"),
        (TurnsByNoPowers, "; pair i does not turn by base^(-2i / d)"),
        (changed(TurnsFaster, power=2), "; they do not turn by the same angle from each token to the next"),
    ],
)
def test_a_rotation_at_a_pace_of_its_own_is_said_to_be_one(kind: type[TurnsByATable], pace: str) -> None:
    (said,) = verify(lambda: kind(60, 60, 6)).intended
    assert said.reason.endswith(f"in halves of a head{pace}")


class RowByRow(nn.Module):
    """One query at a time, with the keys after it hidden in place."""

    ahead = first = 0

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d_model, d_model) for _ in range(3))
        self.register_buffer("causal_mask", torch.ones(64, 64).triu(1).bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        rows = []
        for t in range(x.size(1)):
            scores = q[:, t : t + 1] @ k.mT / math.sqrt(x.size(-1))
            scores[:, :, t + 1 + self.ahead :] = -torch.inf
            rows.append(scores.softmax(-1) @ v)
        return torch.cat(rows, dim=1)


class RowWithItsKeys(RowByRow):
    """One query at a time, with no other keys than it may see."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        rows = []
        for t in range(x.size(1)):
            seen = slice(self.first, t + 1 + self.ahead)
            rows.append((q[:, [t]] @ k[:, seen].mT / math.sqrt(x.size(-1))).softmax(-1) @ v[:, seen])
        return torch.cat(rows, dim=1)


@pytest.mark.thorough
def test_a_mask_that_nothing_applies_is_missed_only_where_the_future_is_seen() -> None:
    assert verify(RowByRow).mistakes == ()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "line"), [(RowByRow, "scores[:, :, t + 1"), (RowWithItsKeys, "rows.append((q[:, [t]] @ k[:, seen]")]
)
def test_one_query_at_a_time_is_held_against_the_causal_mask(kind: type[RowByRow], line: str) -> None:
    assert verify(kind).verdict == "equal"
    (finding,) = verify(type("Ahead", (kind,), {"ahead": 1})).findings
    assert finding.name == "causal_sees_one_ahead"
    if kind is RowWithItsKeys:  # the first query has no key at all
        assert "key_tokens_missing" in verify(type("WithoutTheFirst", (kind,), {"first": 1})).mistakes
    assert line_of(finding).startswith(line)


class ReadsItselfToo(nn.Module):
    """Queries of the second input; keys and values of both, put together."""

    def __init__(self, dim: int, dim_head: int = 11, heads: int = 3) -> None:
        super().__init__()
        inner = dim_head * heads
        self.to_q, self.to_kv, self.to_out = nn.Linear(dim, inner), nn.Linear(dim, 2 * inner), nn.Linear(inner, dim)
        self.heads, self.scale = heads, dim_head**-0.5

    def forward(self, x: Tensor, latents: Tensor) -> Tensor:
        k, v = self.to_kv(torch.cat((x, latents), dim=1)).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.to_q(latents), self.kept(k, v), v))
        context = (q @ k.mT * self.scale).softmax(-1) @ self.used(v)
        return self.to_out(context.transpose(1, 2).flatten(2))

    def kept(self, k: Tensor, v: Tensor) -> Tensor:
        return k

    def used(self, v: Tensor) -> Tensor:
        return v


class ReadsItsValuesForKeys(ReadsItselfToo):
    def kept(self, k: Tensor, v: Tensor) -> Tensor:
        return v


class ReadsItselfTooTurned(ReadsItselfToo):
    def used(self, v: Tensor) -> Tensor:
        return v.roll(1, -1)


def test_tokens_of_two_inputs_put_together_are_told_apart() -> None:
    report = verify(ReadsItselfToo)
    assert report.mistakes == (), str(report)
    assert verify(ReadsItselfTooTurned).mistakes == ("value_changed_by_roll",)
    assert verify(ReadsItsValuesForKeys).mistakes == ("key_uses_value_projection",)


class ScalesItsValues(nn.Module):
    """Multiplies the values by a number of its configuration."""

    def __init__(self, embed_dim: int, num_heads: int, value_scale: float = 0.7) -> None:
        super().__init__()
        self.config = SimpleNamespace(value_scale=value_scale)
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        context = F.scaled_dot_product_attention(q, k, v * 0.7)
        return self.o(context.transpose(1, 2).flatten(2))


def test_a_factor_of_the_values_is_meant_where_a_setting_says_so() -> None:
    report = verify(lambda: ScalesItsValues(33, 3))
    assert (report.verdict, [finding.name for finding in report.intended]) == ("equal", ["value_changed_by_mul"])
    assert verify(lambda: ScalesItsValues(33, 3, 0.5)).mistakes == ("value_changed_by_mul",)


class GatesByHand(nn.Module):
    """Its gate is a sigmoid that is written out, whose exponential may overflow and does no harm."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.gate, self.o = (nn.Linear(embed_dim, embed_dim) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        context = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.o(context / (1 + (-self.gate(x)).exp()))


def test_an_exponential_that_does_no_harm_is_no_softmax_that_overflows() -> None:
    assert "softmax_overflows" not in verify(GatesByHand).mistakes


class DividesByItsInputs(ScalesItsValues):
    """Every projection is divided by the root of the features that it takes; its weights are drawn as wide."""

    def forward(self, x: Tensor) -> Tensor:
        made = (f(x) * x.size(-1) ** -0.5 for f in (self.q, self.k, self.v))
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in made)
        context = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.o(context) * context.size(-1) ** -0.5


class DividesItsValuesByTheirInputs(DividesByItsInputs):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        context = F.scaled_dot_product_attention(q, k, v * x.size(-1) ** -0.5)
        return self.o(context.transpose(1, 2).flatten(2))


def test_projections_that_are_all_divided_by_the_root_of_their_inputs_are_meant_so() -> None:
    report = verify(lambda: DividesByItsInputs(33, 3))
    assert report.verdict == "equal", str(report)
    assert {finding.name for finding in report.intended} >= {"value_changed_by_mul", "scale_wrong", "changed_by_mul"}
    assert verify(lambda: DividesItsValuesByTheirInputs(33, 3)).mistakes == ("value_changed_by_mul",)


class Adapted(nn.Linear):
    """A linear with a product of two narrow matrices added (LoRA)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Parameter(torch.randn(inputs, 2)), nn.Parameter(torch.randn(2, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ self.down) @ self.up * 2


class AdaptedAttention(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = Adapted(embed_dim, 3 * embed_dim), Adapted(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_what_is_added_to_a_matrix_is_part_of_the_projection() -> None:
    report = verify(AdaptedAttention)
    assert report.mistakes == (), str(report)


class FirstKeysForAllHeads(AdaptedAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k[:, :1].expand_as(k), v).transpose(1, 2).flatten(2))


class FirstValuesForAllHeads(AdaptedAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v[:, :1].expand_as(v)).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", [FirstKeysForAllHeads, FirstValuesForAllHeads])
def test_heads_that_a_layer_makes_in_vain_are_seen(kind: type[nn.Module]) -> None:
    assert verify(kind).mistakes == ("changed_by_expand_as",)


class BentAdapter(Adapted):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(super().forward(x))


class BentOnTheWayIn(AdaptedAttention):
    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.qkv = BentAdapter(embed_dim, 3 * embed_dim)


def test_what_is_called_a_linear_layer_and_is_none_is_not_intended_for_its_name() -> None:
    assert verify(BentOnTheWayIn).verdict == "deviates"


class NeverSplits(nn.Module):
    """Its one scale is, by the sizes below, the fourth root of the width too."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.d_k = embed_dim // num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.o((q @ k.mT / self.d_k**0.5).softmax(-1) @ v)


def test_heads_that_are_never_split_are_named_whatever_their_scale_is_called() -> None:
    adapter = Adapter(build=lambda: NeverSplits(16, 4), embed_dim=16, num_heads=4)
    assert verify(NeverSplits, adapter=adapter).mistakes == ("heads_never_split",)


class NarrowKeys(nn.Module):
    """One head of an eighth of the width, unscaled, as in SAGAN."""

    def __init__(self, in_dim: int) -> None:
        super().__init__()
        self.query, self.key = (nn.Conv2d(in_dim, in_dim // 8, 1) for _ in range(2))
        self.value = nn.Conv2d(in_dim, in_dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (projection(x).flatten(2) for projection in (self.query, self.key, self.value))
        return (v @ (q.mT @ k).softmax(-1).mT).view_as(x)


def test_no_scale_is_not_that_of_a_head_that_would_be_one_wide() -> None:
    assert verify(NarrowKeys).mistakes == ("scale_missing",)


class LooksUpClasses(nn.Module):
    """Each pixel attends to a few learnt tokens, which no input says the number of."""

    def __init__(self, channels: int, classes: int = 3) -> None:
        super().__init__()
        self.classes = nn.Parameter(torch.randn(1, classes, channels))
        self.q, self.k, self.v = (nn.Linear(channels, channels) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        pixels, learnt = x.flatten(2).mT, self.classes.expand(x.size(0), -1, -1)
        weights = (self.q(pixels) @ self.k(learnt).mT / x.size(1) ** 0.5).softmax(-1)
        return (weights @ self.v(learnt)).mT.unflatten(-1, x.shape[-2:])


class KeysForValues(LooksUpClasses):
    def __init__(self, channels: int, classes: int = 3) -> None:
        super().__init__(channels, classes)
        self.v = self.k


def test_tokens_that_are_learnt_are_neither_a_projection_nor_keys_that_are_missing() -> None:
    assert verify(LooksUpClasses).mistakes == ()
    assert verify(KeysForValues).mistakes == ("value_uses_key_projection",)


class KeysOnTheLeft(nn.Module):
    """Lays the scores out as (keys, queries)."""

    axis = -2

    def __init__(self, query_dim: int, memory_dim: int, width: int) -> None:
        super().__init__()
        self.query = nn.Conv2d(query_dim, width, 1)
        self.key, self.value = nn.Conv2d(memory_dim, width, 1), nn.Conv2d(memory_dim, width, 1)

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        q, k, v = self.query(query).flatten(2), self.key(memory).flatten(2), self.value(memory).flatten(2)
        weights = (k.mT @ q / q.size(1) ** 0.5).softmax(self.axis)
        return (v @ weights).unflatten(-1, query.shape[-2:])


def test_scores_may_have_their_keys_on_the_left() -> None:
    assert verify(KeysOnTheLeft).verdict == "equal"
    assert verify(changed(KeysOnTheLeft, axis=-1)).mistakes == ("softmax_over_queries",)


class WrittenAsSums(nn.Module):
    """Multiplies matrices by broadcasting and sums."""

    scale = True

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.bias = nn.Parameter(torch.randn(embed_dim, 3 * embed_dim)), nn.Parameter(torch.zeros(embed_dim))
        self.out = nn.Parameter(torch.randn(embed_dim, embed_dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = product(x, self.qkv).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = product(q / (q.size(-1) ** 0.5 if self.scale else 1), k.mT)
        return product(product(scores.softmax(-1), v).transpose(1, 2).reshape(x.shape), self.out) + self.bias


def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.sum(input=a.unsqueeze(-1) * b.unsqueeze(-3), dim=-2) if a.dim() > 3 else sums(a, b)


def sums(a: Tensor, b: Tensor) -> Tensor:
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


def test_products_may_be_written_as_sums() -> None:
    assert verify(WrittenAsSums).verdict == "equal"
    assert verify(changed(WrittenAsSums, scale=False)).mistakes == ("scale_missing",)


class HidesByNode(nn.Module):
    """Takes one truth value for each token; a mask of more axes would give the scores further ones."""

    query_axis = False

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, node_mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        hidden = ~(node_mask[:, None, :, None] if self.query_axis else node_mask[:, None, None, :])
        weights = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(hidden, -math.inf).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(x.shape))


def test_a_mask_that_gives_the_scores_further_axes_is_not_the_one_that_is_meant() -> None:
    assert verify(HidesByNode).verdict == "equal"
    assert verify(changed(HidesByNode, query_axis=True)).mistakes == ("padding_mask_on_queries",)


class FusesTwoVectors(nn.Module):
    """Samples of one token each: no query has a choice of keys."""

    def __init__(self, d_model: int, n_heads: int = 3) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, n_heads, batch_first=True)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        query, memory = one.unsqueeze(1), other.unsqueeze(1)
        return self.attention(query, memory, memory)[0].squeeze(1)


def test_rows_of_two_vectors_may_be_samples() -> None:
    report = verify(FusesTwoVectors)
    assert report.mistakes == ()
    assert "no query had more than one key" in report.not_exercised[0].detail


class HalfFromTheTokenBefore(SelfAttention):
    """Takes half of its values from the token before, by a projection of their own, as Zaya does."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.v, self.before = nn.Linear(dim, dim // 2), nn.Linear(dim, dim // 2)

    def values(self, x: Tensor) -> Tensor:
        none = self.before(x.new_zeros(x.size(0), 1, x.size(2)))
        return torch.cat((self.v(x), torch.cat((none, self.before(x)[:, :-1]), 1)), -1)

    def operands(self, x: Tensor) -> Operands:
        return self.split(self.q(x)), self.split(self.k(x)), self.split(self.values(x))


class AllFromTheTokenBefore(HalfFromTheTokenBefore):
    def values(self, x: Tensor) -> Tensor:
        return torch.cat((self.v(x), self.before(x)), -1).roll(1, 1)


def test_values_of_other_tokens_are_meant_so_where_a_projection_of_their_own_makes_them() -> None:
    report = verify(HalfFromTheTokenBefore)
    assert (report.mistakes, [finding.name for finding in report.intended]) == ((), ["values_meet_other_keys"])
    assert verify(AllFromTheTokenBefore).mistakes == ("value_changed_by_roll",)


def test_a_mask_inside_of_an_argument_is_one_that_was_asked_for() -> None:
    def attention(x: Tensor, masks: dict[str, Tensor]) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, masks["far"])

    far = (torch.arange(6)[:, None] - torch.arange(6)).abs() < 2
    (report,) = verify(attention, {"x": torch.randn(2, 6, 8), "masks": {"far": far}})
    (found,) = report.intended
    assert (found.name, found.reason) == ("own_mask", "it is made from the argument masks['far']")
    assert "argument" not in found.sentence


class DecodesWithAMemory(nn.Module):
    """Keeps keys and values from step to step, and gives its scores back."""

    kept: Tensor | None

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.register_buffer("kept", None, persistent=False)

    def keep(self, new: Tensor) -> Tensor:
        return new if self.kept is None else torch.cat((self.kept, new), 3)

    def forward(
        self, query: Tensor, memory: Tensor, mask: Tensor | None = None, use_cache: bool = False
    ) -> tuple[Tensor, Tensor]:
        made = (self.query(query), self.key(memory), self.value(memory))
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in made)
        if use_cache:
            self.kept = self.keep(torch.stack((k, v)))
            k, v = self.kept
        scores = q @ k.mT / q.size(-1) ** 0.5
        scores = scores if mask is None else scores.masked_fill(mask[:, None], -1e4)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), scores


class DecodesBackwards(DecodesWithAMemory):
    def keep(self, new: Tensor) -> Tensor:
        return new if self.kept is None else torch.cat((new, self.kept), 3)


class KeepsTheWholeMemory(DecodesWithAMemory):
    def keep(self, new: Tensor) -> Tensor:
        return new if self.kept is None else self.kept


@pytest.mark.thorough
def test_scores_may_come_back_and_a_memory_may_be_kept_step_by_step_or_as_a_whole() -> None:
    report = verify(DecodesWithAMemory)
    assert (report.verdict, report.mistakes) == ("equal", ())
    assert verify(DecodesBackwards).mistakes == ("cache_differs_from_one_pass",)
    whole = verify(KeepsTheWholeMemory)
    assert (whole.mistakes, [exercise.what for exercise in whole.not_exercised]) == ((), ["use_cache"])


class WithABranchFactor(nn.Module):
    """Scales its residual branch by what its caller chooses."""

    def __init__(self, dim: int, heads: int, alpha: float) -> None:
        super().__init__()
        self.heads, self.alpha = heads, alpha
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def joined(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + self.alpha * branch

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.joined(x, self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


class WithAFactorNobodyChose(WithABranchFactor):
    def joined(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + 0.3 * branch


class WithTheRestOfAStart(WithABranchFactor):
    """Keeps what a starting value of its own leaves, as differential attention does."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads, 1.0)
        self.lambda_init = 0.8 - 0.6 * 0.4

    def joined(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch * (1 - self.lambda_init)


def test_a_factor_that_the_constructor_demands_is_meant_so() -> None:
    assert "1 - what lambda_init says" in verify(WithTheRestOfAStart).intended[0].reason
    report = verify(WithABranchFactor)
    assert (report.mistakes, [finding.name for finding in report.intended]) == ((), ["changed_by_mul"])
    assert "what alpha says" in report.intended[0].reason
    assert verify(WithAFactorNobodyChose).mistakes == ("changed_by_mul",)


class AttentionOfTwoSignals(nn.Module):
    """Features first; what comes out stays on the first signal, whose tokens are therefore the queries."""

    def __init__(self, dim: int, num_heads: int = 4) -> None:
        super().__init__()
        self.attends, self.norm = nn.MultiheadAttention(dim, num_heads, batch_first=True), nn.LayerNorm(dim)

    def forward(self, slow: Tensor, fast: Tensor) -> Tensor:
        x, y = slow.mT, fast.mT
        return self.norm(x + self.attends(x, y, y)[0]).mT


class AttentionOfTheOtherSignal(AttentionOfTwoSignals):
    def forward(self, slow: Tensor, fast: Tensor) -> Tensor:
        x, y = slow.mT, fast.mT
        return self.norm(x + self.attends(y, x, x)[0]).mT


@pytest.mark.thorough
def test_a_residual_of_the_keys_breaks_at_other_lengths() -> None:
    assert verify(AttentionOfTwoSignals).mistakes == ()
    (finding,) = verify(AttentionOfTheOtherSignal).findings
    assert finding.name == "other_lengths_crash"
    assert line_of(finding).startswith("return self.norm(x + ")


class MixesPlaces(nn.Module):
    """Each head learns how much of its weights comes from the places of the tokens alone."""

    fixed = False

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = num_heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.near, self.gate = nn.Parameter(torch.ones(num_heads, 1, 1)), nn.Parameter(torch.ones(num_heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        apart = torch.arange(x.size(1), dtype=x.dtype)
        places = (-self.near * (apart[:, None] - apart).abs()).softmax(-1)
        gate = 0.3 if self.fixed else self.gate.sigmoid()
        weights = (1 - gate) * (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) + gate * places
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


def test_weights_that_a_parameter_mixes_with_others_are_meant_so_and_not_compared() -> None:
    report = verify(MixesPlaces)
    assert report.mistakes == (), str(report)
    assert report.verdict == "unchecked"
    assert verify(changed(MixesPlaces, fixed=True)).verdict == "deviates"


class MakesItsMaskInSingle(Attends):
    """In float64 the least number is -inf in float32, and 0 times that is NaN."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = (1.0 - mask.float()) * torch.finfo(x.dtype).min
        return self.attend(x, x, hidden[:, None, None].to(x.dtype))


def test_a_model_that_gives_nan_in_float64_alone_is_judged_in_its_own_precision() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    (report,) = verify(MakesItsMaskInSingle(12, 12, 3), inputs=(torch.randn(2, 5, 12), mask))
    assert (report.verdict, report.findings) == ("equal", []), str(report)


class LengthFirst(nn.Module):
    """Two of torch's own, which take the length first and say so; their maps come back side by side."""

    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.attns = nn.ModuleList(nn.MultiheadAttention(d_model, n_head) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = list[Tensor]()
        for attn in self.attns:
            y, weights = attn(x, x, x)
            x, maps = x + y, [*maps, weights]
        return x, torch.stack(maps, 1)


def test_what_wraps_torchs_own_attention_may_take_the_length_first() -> None:
    report = verify(LengthFirst)
    assert report.verdict == "partial", str(report)  # others in this file are built with batch_first=True
    assert [one.what for one in report.not_exercised] == ["layer: (batch, len, features)"]
    assert ("layer: layout", "(len, batch, features)") in {row[:2] for row in report.conventions}


def of_one_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert q.shape == k.shape
    return (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v


def test_a_length_that_the_code_itself_refuses_is_no_crash() -> None:
    assert verify(of_one_length).mistakes == ()


def test_an_image_of_one_channel_is_another_when_it_is_turned() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.image_size = nn.Conv2d(1, 6, 4, 4), 12

        def forward(self, images: Tensor) -> Tensor:
            return self.conv(images).flatten(2).mT[:, 0]

    mistakes = list[str]()
    run_model(Patches().double(), Sizes(), [], mistakes)
    assert mistakes == []


class Crossing(nn.Module):
    """Torch's own attention, on a context: queries take the first rows of its matrix, keys and values the others."""

    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_head, batch_first=True)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        out: Tensor = self.attn(x, context, context, need_weights=False)[0]
        return out


def test_the_rows_of_one_matrix_are_told_as_they_lie() -> None:
    report = verify(Crossing)
    assert ("projections", "attn.in_proj_weight") in {row[:2] for row in report.conventions}
    assert '"in_proj_weight": theirs["attn.in_proj_weight"],' in program_of(report)


class RootInSinglePrecision(nn.Module):
    """Right: the root of the width of a head is a tensor in float32, off by a rounding."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.root = n_heads, torch.sqrt(torch.tensor(d_model // n_heads, dtype=torch.float32))
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f, x in ((self.q, q), (self.k, k), (self.v, v))
        )
        return self.o(((q @ k.mT / self.root).softmax(-1) @ v).transpose(1, 2).flatten(2))


class RootOfAnotherWidth(RootInSinglePrecision):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.root = self.root * (1 + 1e-4)


def test_a_root_in_single_precision_is_right() -> None:
    assert verify(RootInSinglePrecision).verdict == "equal", str(verify(RootInSinglePrecision))
    assert verify(RootOfAnotherWidth).mistakes == ("scale_wrong",)


class ReadsATextBeside(nn.Module):
    """Queries of an image, turned by small matrices; keys and values of a text before those of the image."""

    def __init__(self, dim: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.text_kv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def turned(self, x: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (-1, 1, 2))
        angle = torch.arange(x.size(2))[:, None] * 0.5 ** torch.arange(x.size(3) // 2)
        table = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2)).to(x)
        return (table[..., 0] * pairs[..., 0] + table[..., 1] * pairs[..., 1]).flatten(-2)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        keys, values = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.text_kv(text).chunk(2, -1))
        keys, values = torch.cat([keys, self.turned(k)], 2), self.joined(values, v)
        context = F.scaled_dot_product_attention(self.turned(q), keys, values)
        return self.proj(context.transpose(1, 2).flatten(2))

    def joined(self, text: Tensor, image: Tensor) -> Tensor:
        return torch.cat([text, image], 2)


class ReadsTheTextsValuesLast(ReadsATextBeside):
    def joined(self, text: Tensor, image: Tensor) -> Tensor:
        return torch.cat([image, text], 2)


@pytest.mark.thorough
def test_an_image_may_attend_to_a_text_and_to_itself_turned_by_small_matrices() -> None:
    report = verify(ReadsATextBeside)
    assert (report.mistakes, [finding.name for finding in report.intended]) == ((), ["rotary_positions"])
    assert verify(ReadsTheTextsValuesLast).mistakes == ("values_meet_other_keys",)


class TurnsByTablesIfGiven(nn.Module):
    """Turns queries and keys where the tables of the angles are handed over, at the positions that are handed over."""

    way = 1

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if cos is not None and sin is not None:
            places = torch.arange(x.size(1)) if position_ids is None else position_ids
            q, k = (self.turned(y, cos[places], sin[places] * way) for y, way in ((q, 1), (k, self.way)))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        return x * cos + torch.cat([-two, one], -1) * sin


class TurnsByAnglesOfItsOwnKind(TurnsByTablesIfGiven):
    """Right: takes the angles with a scale beside them, which no name says."""

    def forward(self, x: Tensor, rotary_pos_emb: tuple[Tensor, Tensor] | None = None) -> Tensor:  # type: ignore[override]
        if rotary_pos_emb is None:
            return super().forward(x)
        angles, scale = rotary_pos_emb
        return super().forward(x, None, angles.cos() * scale, angles.sin() * scale)


@pytest.mark.thorough
def test_tables_of_angles_that_may_be_left_out_are_given_too() -> None:
    own = verify(TurnsByAnglesOfItsOwnKind)
    assert (own.mistakes, [one.what for one in own.not_exercised]) == ((), ["rotary_pos_emb"])
    report = verify(TurnsByTablesIfGiven)
    assert (report.verdict, report.mistakes) == ("equal", ()), str(report)
    assert {one.what for one in report.coverage if one.exercised} >= {"cos", "sin", "position_ids"}
    assert verify(changed(TurnsByTablesIfGiven, way=-1)).mistakes == ("rotations_differ",)


class AddsTwoScores(nn.Module):
    """Right: scores by content and by place, each with its scale, and a mask that is added to their sum."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.queries, self.keys, self.values, self.places, self.seen = (nn.Linear(d_model, d_model) for _ in range(5))

    def forward(self, x: Tensor, attn_mask: Tensor) -> Tensor:
        split = [one(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for one in self.children()]
        q, k, v, p, s = split
        scores = q @ k.mT / math.sqrt(q.size(-1)) + p @ s.mT / math.sqrt(p.size(-1)) + attn_mask
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_a_mask_that_is_added_to_the_sum_of_two_products_is_not_read_as_true_and_false() -> None:
    report = verify(AddsTwoScores)
    assert report.mistakes == ()
    assert [here for what, here, _ in report.conventions if "mask" in what and "added" in here]


class ProjectsByNetworks(SelfAttention):
    """Right: small networks in the place of matrices, and some of their features are 0 everywhere."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.q, self.k, self.v = (  # type: ignore[assignment]
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim), nn.ReLU()) for _ in range(3)
        )


class ProjectsKeysByTheQuerysNetwork(ProjectsByNetworks):
    def operands(self, x: Tensor) -> Operands:
        return self.split(self.q(x)), self.split(self.q(x)), self.split(self.v(x))


class ExchangesItsNetworks(ProjectsByNetworks):
    def operands(self, x: Tensor) -> Operands:
        return self.split(self.q(x)), self.split(self.v(x)), self.split(self.k(x))


def test_small_networks_may_stand_for_projections_each_for_its_own() -> None:
    report = verify(ProjectsByNetworks(12, 3))
    assert report.verdict == "equal", str(report)
    assert "q is called. Intended: the sub-module q," in " ".join(str(report).split())


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", [ProjectsKeysByTheQuerysNetwork, ExchangesItsNetworks])
def test_networks_of_other_roles_are_not_passed_over(wrong: Any) -> None:
    report = verify(wrong(12, 3))
    assert report.verdict in ("deviates", "unchecked"), str(report)


class AddsToItsQuery(nn.Module):
    """Right: its arguments have the names that heads have in a program, and are asked for again behind these."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(dim)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        weights = (self.a(query) @ self.b(key).mT / math.sqrt(query.size(-1))).softmax(-1)
        return self.norm(query + self.out(weights @ self.c(key)))


def test_tokens_that_a_program_asks_for_again_keep_a_name() -> None:
    report = verify(AddsToItsQuery(12))
    assert report.verdict == "equal", str(report)
    assert "self.norm(query_tokens + output)" in program_of(report)


class DotAttention(nn.Module):
    """Right: as Luong has it, without a scale."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT).softmax(-1) @ value


class ScaledDotAttention(DotAttention):
    """Says that it scales."""


class TurnsByCosinesAndSines(SelfAttention):
    """Right: the table holds a cosine and a sine for each element; elements beside each other are a pair."""

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.operands(x)
        q, k = (y * freqs[..., 0] + self.quarter(y) * freqs[..., 1] for y in (q, k))
        return self.finish(self.attend(q, k, v))

    def quarter(self, y: Tensor) -> Tensor:
        return torch.stack((-y[..., 1::2], y[..., ::2]), -1).flatten(-2)


def test_a_table_of_cosines_and_sines_is_given_as_its_pairs_ask() -> None:
    report = verify(TurnsByCosinesAndSines)
    assert (report.verdict, [one.name for one in report.intended]) == ("equal", ["rotary_positions"]), str(report)


class LuongAttention(nn.Module):
    """Right: scores of one matrix."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Linear(dim, dim, bias=False)

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        return (query @ self.weight(memory).mT).softmax(-1) @ memory


def test_an_attention_with_a_matrix_for_its_keys_alone_may_be_named_after_its_author() -> None:
    report = verify(LuongAttention)
    assert (report.verdict, len(report.intended)) == ("equal", 3), str(report)


class MAB(nn.Module):
    """As the Set Transformer was published: divided by the root of the whole width, beside the projected queries."""

    power = 1 / 2

    def __init__(self, dim_q: int, dim_k: int, dim_v: int, num_heads: int) -> None:
        super().__init__()
        self.dim_v, self.num_heads = dim_v, num_heads
        self.fc_q, self.fc_k, self.fc_v = nn.Linear(dim_q, dim_v), nn.Linear(dim_k, dim_v), nn.Linear(dim_k, dim_v)
        self.fc_o = nn.Linear(dim_v, dim_v)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        q, k, v = self.fc_q(q), self.fc_k(k), self.fc_v(k)
        apart = (torch.cat(x.split(self.dim_v // self.num_heads, 2), 0) for x in (q, k, v))
        queries, keys, values = apart
        weights = (queries @ keys.mT / self.dim_v**self.power).softmax(-1)
        output = torch.cat((queries + weights @ values).split(q.size(0), 0), 2)
        return output + F.relu(self.fc_o(output))


class MMAB(MAB):
    """The same, which others call so where it takes a mask."""


class SAB(MAB):
    """Adds the queries' tokens behind the matrix of the values."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        queries, keys, values = (
            x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (self.fc_q(q), self.fc_k(k), self.fc_v(k))
        )
        weights = (queries @ keys.mT / self.dim_v**0.5).softmax(-1)
        output = self.fc_v(q) + (weights @ values).transpose(1, 2).flatten(2)
        return output + F.relu(self.fc_o(output))


class SpectralMSAB(Attends):
    """Ends as such a name does, and is an attention like any other."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(context)), self.split(self.to_v(context))
        return self.to_out(F.scaled_dot_product_attention(q, k, v, scale=x.size(-1) ** -0.5).transpose(1, 2).flatten(2))


class AllOfOneOfThree(nn.Module):
    """Three matrices are there, and one of them projects all."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_q, self.to_k = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.to_v, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_v(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_matrix_that_projects_all_beside_others_is_no_packed_one() -> None:
    assert verify(AllOfOneOfThree).verdict != "equal"


class PMA(nn.Module):
    """Asks with tokens that are learnt."""

    def __init__(self, dim: int, num_heads: int, num_seeds: int) -> None:
        super().__init__()
        self.seeds, self.mab = nn.Parameter(torch.randn(1, num_seeds, dim)), MAB(dim, dim, dim, num_heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.mab(self.seeds.repeat(x.size(0), 1, 1), x)


class ISAB(nn.Module):
    """Tokens that are learnt look at all, and all look at these."""

    def __init__(self, dim: int, num_heads: int, num_inds: int) -> None:
        super().__init__()
        self.inducing = nn.Parameter(torch.randn(1, num_inds, dim))
        self.inward, self.outward = (MAB(dim, dim, dim, num_heads) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.back(x, self.inward(self.inducing.repeat(x.size(0), 1, 1), x))

    def back(self, x: Tensor, seen: Tensor) -> Tensor:
        return self.outward(x, seen)


class ISABOfOneBlock(ISAB):
    def back(self, x: Tensor, seen: Tensor) -> Tensor:
        return self.inward(x, seen)


def test_a_block_of_several_attentions_is_read_as_layers() -> None:
    assert verify(ISAB).verdict == "equal"
    report = verify(ISABOfOneBlock)
    assert "sublayer_unused" in report.mistakes, str(report)
    assert [one.line.text for one in report.findings if one.line and "outward" in one.line.text]


def test_the_scale_and_the_residual_of_a_set_transformer_are_those_of_its_paper() -> None:
    assert verify(PMA).verdict == "equal"
    report = verify(MAB)
    assert (report.verdict, len(report.intended)) == ("equal", 2), str(report)
    assert verify(MMAB).verdict == "equal"
    assert verify(changed(MAB, power=1)).mistakes == ("scale_wrong",)
    assert verify(SAB).verdict != "equal"
    assert verify(lambda: SpectralMSAB(12, 12, 3)).mistakes == ("scale_wrong",)


class AttendsInATable(nn.Module):
    """Of the pixels of an image that is so high and so wide."""

    def __init__(self, input_size: tuple[int, int], window_size: tuple[int, int], embed_dim: int, num_heads: int):
        super().__init__()
        assert input_size[0] % window_size[0] == input_size[1] % window_size[1] == 0
        self.attends = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attends(x, x, x, need_weights=False)[0]


def test_a_pair_of_whole_numbers_is_the_size_of_an_image_or_of_a_window() -> None:
    assert verify(AttendsInATable).verdict == "equal"


def made_of_positions(length: int, width: int) -> Tensor:
    return (torch.arange(length)[:, None] / 10 ** torch.linspace(0, 3, width)).sin()


class HidesPadding(OneMatrix):
    """Hides the keys whose number is 0."""

    def forward(self, x: Tensor, token_ids: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.operands(x)
        scores = self.scores(q, k)
        scores = scores.masked_fill((token_ids == 0)[:, None, :, None], -1e9)
        return self.finish(scores.softmax(-1) @ v)


def test_padding_that_no_call_has_is_no_part_of_an_equal() -> None:
    report = verify(HidesPadding)
    assert report.verdict == "partial", str(report)
    assert [one for one in report.not_exercised if "masked_fill" in one.detail]


class DropsWhatAttends(OneMatrix):
    """Drops the averaged values in training, not the weights."""

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.1) -> None:
        super().__init__(dim, num_heads)
        self.dropout = nn.Dropout(dropout)

    def finish(self, context: Tensor) -> Tensor:
        return super().finish(self.dropout(context))


def test_what_training_drops_of_the_averaged_values_is_said_and_accuses_nobody() -> None:
    report = verify(DropsWhatAttends)
    assert (report.verdict, [one.name for one in report.intended]) == ("equal", ["dropout_not_on_weights"])


class FusesImages(nn.Module):
    """Keys come first, from an image as large as that of the queries."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.out = num_heads, nn.Linear(dim, dim)

    def forward(self, k: Tensor, q: Tensor, v: Tensor) -> Tensor:
        b, c, h, w = k.shape
        q, k, v = (x.flatten(2).mT.reshape(b, h * w, self.num_heads, -1).transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).reshape(b, h * w, c)).mT.reshape(b, c, h, w)


def test_images_that_attend_to_each_other_are_as_large_as_each_other() -> None:
    assert "other_lengths_crash" not in verify(FusesImages).mistakes


class ShiftsItsKeys(Attends):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(context)), self.split(self.to_v(context))
        return self.to_out((self.attention(q, k, v)).transpose(1, 2).flatten(2))

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k + made_of_positions(*k.shape[2:]), v)


class ShiftsItsKeysByNumbers(ShiftsItsKeys):
    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k + torch.linspace(0, 1, k.size(2))[:, None], v)


@pytest.mark.thorough
def test_names_say_what_is_meant_a_score_without_scale_and_positions_that_are_added_to_keys() -> None:
    assert verify(DotAttention).verdict == "equal"
    assert verify(ScaledDotAttention).mistakes == ("scale_missing",)
    positions = verify(ShiftsItsKeys)
    assert (positions.mistakes, [one.name for one in positions.intended]) == ((), ["key_changed_by_add"])
    assert verify(ShiftsItsKeysByNumbers).mistakes == ("key_changed_by_add",)


class GivesTheLastRowAndWhatItKept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.embed(ids)
        return self.head(x[:, -1:]), [x]


class GivesANumber(nn.Module):
    """One for each sequence, or for each token, without an axis of its own."""

    def __init__(self, each: str) -> None:
        super().__init__()
        self.embed, self.head, self.each = nn.Embedding(31, 8), nn.Linear(8, 1), each

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x if self.each == "token" else x[:, -1]).squeeze(-1)


def test_a_model_may_give_a_number_for_each_sequence_or_token() -> None:
    for each, shape in (("token", (2, 7, 1)), ("sequence", (2, 1, 1))):
        run = run_model(GivesANumber(each), Sizes(), [], [])
        assert run is not None
        assert run.call(run.source, None).shape == shape


def test_the_last_row_of_a_model_is_what_it_gives_and_not_the_cache_beside_it() -> None:
    run = run_model(GivesTheLastRowAndWhatItKept(), Sizes(), [], [])
    assert run is not None
    assert run.call(run.source, None).shape == (2, 1, 31)


class LooksItsCacheUpByMode(Attends):
    """Right: keeps keys for whoever asks, and takes a dictionary of caches, which nobody can guess."""

    def forward(self, x: Tensor, layer_cache: dict[str, Tensor] | None = None) -> Tensor:  # type: ignore[override]
        self.kept = x if layer_cache is None else torch.cat([layer_cache["self"], x], 1)
        return self.attend(x, self.kept)


def test_a_cache_that_no_guess_fits_is_not_run_and_no_mistake() -> None:
    report = verify(lambda: LooksItsCacheUpByMode(12, 12, 3))
    assert (report.verdict, [one.what for one in report.not_exercised]) == ("partial", ["layer_cache"]), str(report)


class ForgetsItsDropout(Attends):
    def __init__(self, dim: int, context_dim: int, num_heads: int) -> None:
        super().__init__(dim, context_dim, num_heads)
        self.dropout = nn.Dropout(0.1)


class DropsByHand(OneMatrix):
    """Sets weights to zero first, and divides the others by what is kept afterwards."""

    rescales = True

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.4) -> None:
        super().__init__(embed_dim, num_heads)
        self.dropout = dropout

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.scores(q, k).softmax(-1)
        if self.training and self.dropout:
            weights = weights * (torch.rand_like(weights) > self.dropout)
            weights = weights / (1 - self.dropout) if self.rescales else weights
        return weights @ v


def test_what_survives_dropout_may_be_scaled_up_later() -> None:
    assert verify(DropsByHand).verdict == "equal"
    assert verify(changed(DropsByHand, rescales=False)).mistakes == ("dropout_not_rescaled",)


class JoinsAMemory(ThreeMatrices):
    """Puts a memory before its own tokens, as Transformer-XL does; positions are handed over for all keys."""

    def __init__(self, num_heads: int, d_model: int) -> None:
        super().__init__(d_model, num_heads)
        self.to_p = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, pos_emb: Tensor, mem: Tensor | None = None) -> Tensor:
        joined = x if mem is None else torch.cat((mem, x), dim=1)
        q, k, v = self.projected(x, joined, joined)
        p = self.to_p(pos_emb).view(-1, self.heads, q.size(-1)).transpose(0, 1)
        scores = q @ k.mT + torch.einsum("bhqd,hkd->bhqk", q, p)
        return self.finish((scores / q.size(-1) ** 0.5).softmax(-1) @ v)


def test_keys_that_a_memory_is_joined_to_have_no_length_of_their_own() -> None:
    assert "other_lengths_crash" not in verify(JoinsAMemory).mistakes


def test_a_dropout_layer_that_is_not_used_is_a_note() -> None:
    report = verify(ForgetsItsDropout)
    assert report.verdict == "equal"
    assert any("dropout" in note for note in report.notes)


class HidesTheFutureOfItsHeads(nn.Module):
    """Right: takes heads that are split already, length first or heads first, as the einsum says alone."""

    def __init__(self, scale: bool = False) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        scores = torch.einsum("blhe,bshe->bhls", queries, keys)
        if self.scale:
            scores = scores / math.sqrt(queries.size(-1))
        future = torch.ones(queries.size(1), queries.size(1)).triu(1).bool()
        return torch.einsum("bhls,bshd->blhd", scores.masked_fill(future, -torch.inf).softmax(-1), values)


def test_heads_behind_the_length_of_a_causal_attention_are_read_so_and_a_scale_may_be_an_option() -> None:
    report = verify(HidesTheFutureOfItsHeads)
    assert (report.mistakes, [one.reason for one in report.intended]) == ((), ["scale is False"]), str(report)


class KeepsItsScaleAndItsMask(nn.Module):
    """Right; what the two classes below keep is wrong, and used as it is."""

    hidden: Tensor

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.register_buffer("hidden", torch.ones(64, 64).bool().triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.to_qkv(x).chunk(3, -1))
        scores = q @ k.mT * self.scale
        scores = scores.masked_fill(self.hidden[: x.size(1), : x.size(1)], -1e9)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class ScalesByTheWholeWidth(KeepsItsScaleAndItsMask):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.scale = dim**-0.5


class HidesTheDiagonal(KeepsItsScaleAndItsMask):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.register_buffer("hidden", torch.ones(64, 64).bool().triu())


@pytest.mark.parametrize(
    ("target", "line", "used"),
    [
        (ScalesByTheWholeWidth, "self.scale = dim**-0.5", "q @ k.mT * self.scale"),
        (HidesTheDiagonal, 'self.register_buffer("hidden"', "scores.masked_fill"),
    ],
)
def test_the_line_that_makes_what_a_module_keeps_comes_before_the_line_that_uses_it(
    target: type[nn.Module], line: str, used: str
) -> None:
    report = verify(target)
    (finding,) = report.findings
    assert (finding.stack[-1].text.startswith(line), used in finding.stack[-2].text) == (True, True), str(report)
    assert "used at" in str(report)


class HidesWhatItReads(nn.Module):
    """Right: makes the mask of padding from its ids; the class below hides what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 8)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        scores = self.q(x) @ self.k(x).mT / 8**0.5
        return scores.masked_fill(self.hidden(ids)[:, None], -1e9).softmax(-1) @ self.v(x)

    def hidden(self, ids: Tensor) -> Tensor:
        return ids == 0


class HidesAllThatItReads(HidesWhatItReads):
    def hidden(self, ids: Tensor) -> Tensor:
        return ids > 0


def test_a_mask_made_from_ids_that_leaves_no_key_is_inverted() -> None:
    ids = torch.arange(1, 15).view(2, 7)
    assert [report.mistakes for report in verify(HidesWhatItReads(), ids)] == [()]
    (report,) = verify(HidesAllThatItReads(), ids)
    assert (report.mistakes, report.findings[0].is_proven) == (("mask_inverted",), True), str(report)


class WeightThenBias(OneMatrix):
    """Projects by addmm with a weight of its own, (in, out), as GPT-2's Conv1D does, and is given its positions."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__(hidden_size, num_heads)
        del self.qkv
        self.packed = nn.Parameter(torch.randn(hidden_size, 3 * hidden_size))
        self.bias = nn.Parameter(torch.zeros(3 * hidden_size))

    def project(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, 1), self.packed).unflatten(0, x.shape[:2])

    def rotated(self, x: Tensor, position_ids: Tensor) -> Tensor:
        half = x.size(-1) // 2
        angles = position_ids[:, None, :, None] * 10000.0 ** -(torch.arange(half).to(x) / half)
        cos, sin, (first, second) = angles.cos(), angles.sin(), x.split(half, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = map(self.split, self.project(x).chunk(3, -1))
        return self.finish(self.attend(self.rotated(q, position_ids), self.rotated(k, position_ids), v))


class BiasTwice(WeightThenBias):
    def project(self, x: Tensor) -> Tensor:
        return super().project(x) + self.bias


@pytest.mark.thorough
def test_a_bias_that_is_added_after_the_product_is_part_of_the_projection_but_only_once() -> None:
    report = verify(WeightThenBias)
    assert (report.verdict, [one.name for one in report.intended]) == ("equal", ["rotary_positions"])
    assert "position_ids: positions" in next(here for what, here, _ in report.conventions if what == "arguments")
    assert verify(BiasTwice).verdict not in ("equal", "partial")


class RootOfChannels(nn.Module):
    """Takes the length of each pixel's channels to one, and its gain has axes for rows and columns."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, dim, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * self.g * x.size(1) ** 0.5


class AttentionOfPixels(nn.Module):
    def __init__(self, dim: int, heads: int = 3) -> None:
        super().__init__()
        self.heads, self.norm = heads, RootOfChannels(dim)
        self.to_qkv, self.to_out = nn.Conv2d(dim, 3 * dim, 1, bias=False), nn.Conv2d(dim, dim, 1)

    def merged(self, x: Tensor, shape: torch.Size) -> Tensor:
        return x.reshape(shape)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(1, (self.heads, -1)).flatten(3).mT for y in self.to_qkv(self.norm(x)).chunk(3, 1))
        return self.to_out(self.merged(F.scaled_dot_product_attention(q, k, v).mT, x.shape)) + x


class ExchangesRowsAndColumns(AttentionOfPixels):
    def merged(self, x: Tensor, shape: torch.Size) -> Tensor:
        return x.reshape(*shape[:2], shape[3], shape[2]).mT


@pytest.mark.thorough
def test_pixels_are_put_back_where_they_were_and_normed_over_their_channels() -> None:
    right = verify(AttentionOfPixels)
    assert (right.verdict, len(right.intended)) == ("equal", 2), str(right)
    assert verify(ExchangesRowsAndColumns).verdict not in ("equal", "partial")


class FlattensAllAxes(nn.Module):
    """Samples, pixels and heads become one axis, and attend to one another."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Conv2d(embed_dim, embed_dim, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        made = (y(x).movedim(1, -1).unflatten(-1, (self.num_heads, -1)) for y in (self.q, self.k, self.v))
        q, k, v = (y.flatten(0, 3) for y in made)
        attended = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v
        return self.o(attended.reshape(*x.shape[:1], *x.shape[2:], -1).movedim(-1, 1))


def test_samples_that_attend_to_one_another_are_a_finding_where_no_call_keeps_them_apart() -> None:
    report = verify(FlattensAllAxes)
    assert (report.mistakes, report.findings[0].line is not None) == (("samples_mixed",), True), str(report)


class GivesNumbersWhenAsked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(31, 8), nn.Linear(8, 1)

    def forward(self, ids: Tensor, answers: Tensor | None = None, inference: bool = False) -> Tensor:
        if not inference and answers is None:
            raise ValueError("there are no answers")
        return self.head(self.embed(ids)[:, 0]).squeeze()


def test_a_model_may_need_a_switch_and_give_one_number_for_each_sample() -> None:
    run = run_model(GivesNumbersWhenAsked(), Sizes(), [], [])
    assert run is not None
    assert run.call(run.source, run.target).shape == (2, 1, 1)
    assert not run.of_samples


class SeesOneAhead(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.packed = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.packed(x).chunk(3, -1)
        allowed = torch.ones(x.size(1), x.size(1)).tril(1)
        scores = query @ key.mT / math.sqrt(x.size(-1))
        return scores.masked_fill(allowed == 0, -math.inf).softmax(-1) @ value


def test_a_mask_of_the_call_is_blamed_where_it_is_made() -> None:
    (finding,) = verify(SeesOneAhead).findings
    lines = [line.text.partition(" ")[0] for line in finding.stack]
    assert (finding.name, lines) == ("causal_sees_one_ahead", ["return", "allowed"])


class WritesItsRotation(OneMatrix):
    """Rotates pairs by writing them, one after the other, into memory of their own."""

    times, base = 1, 10000.0
    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__(dim, n_heads)
        self.theta = self.base
        steps = self.base ** (-self.times * torch.arange(0, dim // n_heads, 2).double() / (dim // n_heads))
        self.register_buffer("cos", torch.outer(torch.arange(64.0), steps).cos(), persistent=False)
        self.register_buffer("sin", torch.outer(torch.arange(64.0), steps).sin(), persistent=False)

    def rotated(self, x: Tensor) -> Tensor:
        cos, sin, out = self.cos[: x.size(2)], self.sin[: x.size(2)], torch.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)


class WritesInALayer(nn.Module):
    def __init__(self, dim: int, n_heads: int, attention: type[nn.Module] = WritesItsRotation) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = attention(dim, n_heads), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def test_an_exponent_that_holds_its_factor_twice_is_named() -> None:
    assert verify(lambda: changed(WritesItsRotation, times=2)(36, 3)).mistakes == ("position_exponent_wrong",)


def test_angles_that_are_handed_over_may_have_any_base() -> None:
    angles = torch.outer(torch.arange(7.0).double(), 10.0 ** (-8 * torch.arange(0, 12, 2) / 12)).repeat(1, 2)
    given = {"x": torch.randn(2, 7, 36), "cos": angles.cos(), "sin": angles.sin()}
    (report,) = verify(TurnsByTablesIfGiven(36, 3), given)
    assert (report.verdict, report.mistakes) == ("equal", ()), str(report)


@pytest.mark.thorough
def test_what_writes_a_rotation_is_written_in_torchs_parts() -> None:
    layer = verify(lambda: WritesInALayer(60, 6))
    assert (layer.verdict, layer.intended[0].name) == ("equal", "rotary_positions"), str(layer)
    assert verify(lambda: changed(WritesItsRotation, base=10.0**8)(60, 6)).mistakes == ()


class WideWindow(ThreeMatrices):
    """A window of its own, made for as many keys as queries and wider than most lengths."""

    def near(self, length: int) -> Tensor:
        places = torch.arange(length)
        return (places[:, None] - places).abs() <= 20

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k).masked_fill(~self.near(q.size(2)), -torch.inf)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attended(query, key, value)


class LaidOutAsTheQueries(WideWindow):
    def near(self, length: int) -> Tensor:
        return torch.ones((), dtype=torch.bool)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().forward(query, key.view(query.shape), value)


def test_a_mask_of_its_own_has_one_length_and_keys_have_any() -> None:
    assert verify(WideWindow).mistakes == ()
    assert verify(LaidOutAsTheQueries).mistakes == ("other_lengths_crash",)


class SamplesItsQueries(WideWindow):
    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__(dim, n_heads)
        self.mean, self.spread = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.ones(dim))

    def drawn(self, x: Tensor) -> Tensor:
        return self.mean + self.spread * torch.randn(x.shape)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(self.drawn(x), x, x)


class ThinsItsQueries(SamplesItsQueries):
    def drawn(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape[:2]) < 0.8)[..., None]


def test_what_is_sampled_is_no_dropout() -> None:
    assert verify(SamplesItsQueries).verdict == "unchecked"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(43)  # the first draws after it drop nothing
        assert verify(ThinsItsQueries).verdict == "deviates"


class TokensFirst(nn.Module):
    """Tokens along the first axis, as Transformer-XL has them; no line names the axes."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (self.n_heads, -1)) for x in (self.q(h), *self.kv(h).chunk(2, -1)))
        weights = (torch.einsum("ibnd,jbnd->ijbn", q, k) / q.size(-1) ** 0.5).softmax(1)
        return self.o(torch.einsum("ijbn,jbnd->ibnd", weights, v).flatten(2))


class SaysBatchFirst(TokensFirst):
    def forward(self, h: Tensor) -> Tensor:
        batch, _, width = h.shape
        assert width % self.n_heads == 0
        assert batch > 0
        return super().forward(h)


def test_tokens_come_first_where_no_line_says_that_samples_do() -> None:
    assert verify(TokensFirst).verdict == "equal", str(verify(TokensFirst))
    assert verify(SaysBatchFirst).mistakes == ("attention_over_batch",)


class TakesItsWidth(nn.Module):
    def forward(self, keys: Tensor, queries: Tensor, values: Tensor, head_dim) -> Tensor:  # type: ignore[no-untyped-def]
        scores = queries @ keys.mT / torch.tensor(head_dim).double().sqrt()
        return scores.softmax(-1) @ values


class TakesItsWidthAsKeys(TakesItsWidth):
    def forward(self, keys: Tensor, queries: Tensor, values: Tensor, head_dim) -> Tensor:  # type: ignore[no-untyped-def]
        return super().forward(queries, keys, values, head_dim)


def test_a_size_that_a_call_is_given_is_no_mask() -> None:
    assert verify(TakesItsWidth), str(verify(TakesItsWidth))
    assert "query_key_swapped" in verify(TakesItsWidthAsKeys).mistakes


class TakesWhatItIgnores(ThreeMatrices):
    """A third tensor that no line reads is no value."""

    def forward(self, hidden_states: Tensor, residual: Tensor, prob: Tensor) -> Tensor:
        return self.attended(residual, hidden_states, hidden_states)


def test_what_an_argument_is_only_taken_for_is_no_fault_of_the_code() -> None:
    assert verify(TakesWhatItIgnores).mistakes == ()


class GivesItsHeadsBack(nn.Module):
    """Splits heads, and leaves it to its caller to merge them."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads, self.d_k = heads, d_model // heads

    def split(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.heads, self.d_k).transpose(1, 2)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (self.split(x) for x in (queries, keys, values))
        return (q @ k.mT / self.d_k**0.5).softmax(-1) @ v


class SplitsWithoutATranspose(GivesItsHeadsBack):
    def split(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, -1, self.d_k)


def test_heads_may_come_back_as_they_were_split() -> None:
    assert verify(GivesItsHeadsBack), str(verify(GivesItsHeadsBack))
    assert not verify(SplitsWithoutATranspose)


class HasAMatrixForEachToken(nn.Module):
    def __init__(self, dim: int, max_len: int = 16) -> None:
        super().__init__()
        self.queries, self.keys = (nn.ModuleList(nn.Linear(dim, dim) for _ in range(max_len)) for _ in range(2))
        self.value = nn.Linear(dim, dim)

    def of(self, place: int) -> int:
        return place

    def forward(self, x: Tensor) -> Tensor:
        places = range(x.size(1))
        q, k = (torch.stack([made[self.of(i)](x[:, i]) for i in places], 1) for made in (self.queries, self.keys))
        return (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ self.value(x)


class LeavesOneMatrixOut(HasAMatrixForEachToken):
    def of(self, place: int) -> int:
        return 1 if place == 2 else place


@pytest.mark.parametrize(("made", "missed"), [(HasAMatrixForEachToken, False), (LeavesOneMatrixOut, True)])
def test_matrices_of_tokens_that_are_not_there_are_no_fault(made: type[HasAMatrixForEachToken], missed: bool) -> None:
    module = made(8, 12).double()
    (judgement,) = examine(Call(module, (torch.randn(2, 5, 8, dtype=torch.float64),))).judgements
    assert bool([*unused_departures(judgement.attention, module, [])]) == missed
