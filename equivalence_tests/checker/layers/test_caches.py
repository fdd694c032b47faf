"""verify on layers that decode with a cache."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.helpers_for_tests import line_of, saved
from equivalence_tests.checker.verify import verify

Cache = tuple[Tensor, Tensor]


class CachedAttention(nn.Module):
    """Causal, with learnt positions for queries and keys, and a cache that comes back."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        hidden = q.new_ones(k.size(2), k.size(2)).triu(1)[-q.size(2) :].bool()
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(hidden, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), (k, v)


class Block(nn.Module):
    """Its attention is a module of its own."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = CachedAttention(dim, n_heads), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def attend(self, x: Tensor, past: Cache | None) -> tuple[Tensor, Cache]:
        attended: tuple[Tensor, Cache] = self.attention(x, past)
        return attended

    def forward(self, x: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        attended, past = self.attend(self.norm1(x), past)
        x = x + attended
        return x + self.mlp(self.norm2(x)), past


class Forgets(Block):
    """Wrong: what the attention has kept is not handed on."""

    def attend(self, x: Tensor, past: Cache | None) -> tuple[Tensor, Cache]:
        attended: tuple[Tensor, Cache] = self.attention(x)
        return attended


class InlineBlock(Block):
    """Attends in methods of its own."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__(dim, n_heads)
        self.n_heads, self.qkv, self.out = n_heads, self.attention.qkv, self.attention.out
        del self.attention

    def attend(self, x: Tensor, past: Cache | None) -> tuple[Tensor, Cache]:
        return CachedAttention.forward(self, x, self.kept(past))  # type: ignore[arg-type]

    def kept(self, past: Cache | None) -> Cache | None:
        return past


class ReversedBlock(InlineBlock):
    """Wrong: the values that were kept are turned round."""

    def kept(self, past: Cache | None) -> Cache | None:
        return past and (past[0], past[1].flip(2))


def test_a_layer_decodes_with_its_cache() -> None:
    report = verify(Block)
    assert report.verdict == "equal", str(report)
    assert "past" in [exercise.what for exercise in report.coverage if exercise.exercised]


def test_a_cache_that_a_layer_does_not_hand_on_is_found() -> None:
    (finding,) = verify(Forgets).findings
    assert finding.name == "cache_differs_from_one_pass"


def test_the_cache_of_an_attention_in_the_forward_of_a_layer_is_run() -> None:
    report = verify(InlineBlock)
    assert report.verdict == "equal", str(report)
    assert report.not_exercised == []
    (finding,) = verify(ReversedBlock).findings
    assert finding.name == "cache_differs_from_one_pass"
    assert "torch.cat" in line_of(finding)


class HandsBackTheNewTokens(CachedAttention):
    """Its caller joins what comes back to what there was, and hands over one token at a step: no mask hides more."""

    def forward(self, x: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        present, scale = (k, v), q.size(-1) ** -0.5
        if past is not None:
            k, v = self.joined(past[0], k), torch.cat([past[1], v], 2)
        scores = q @ k.mT * scale
        if past is None:
            scores = scores.masked_fill(q.new_ones(q.size(2), q.size(2)).triu(1).bool(), -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), present

    def joined(self, old: Tensor, new: Tensor) -> Tensor:
        return torch.cat([old, new], 2)


class JoinsInTheWrongOrder(HandsBackTheNewTokens):
    def joined(self, old: Tensor, new: Tensor) -> Tensor:
        return torch.cat([new, old], 2)


def test_what_comes_back_of_the_new_tokens_alone_is_joined_to_the_others() -> None:
    report = verify(HandsBackTheNewTokens)
    assert (report.verdict, report.findings) == ("partial", []), str(report)
    for said in ("one token", "right only where the caller joins it"):
        assert any(said in exercise.detail for exercise in report.not_exercised), str(report)
    (finding,) = verify(JoinsInTheWrongOrder).findings
    assert finding.name == "cache_differs_from_one_pass"
    assert line_of(finding).endswith("return torch.cat([new, old], 2)")


class KeepsKeysAndValuesApart(CachedAttention):
    """Its keys and its values come back by themselves, and are handed over by themselves."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cache_k: Tensor | None = None, cache_v: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        past = None if cache_k is None or cache_v is None else (cache_k, self.old_values(cache_v))
        output, (k, v) = super().forward(x, past)
        return output, k, v

    def old_values(self, values: Tensor) -> Tensor:
        return values


class TurnsOldValuesAround(KeepsKeysAndValuesApart):
    def old_values(self, values: Tensor) -> Tensor:
        return values.flip(2)


def test_keys_and_values_may_be_two_arguments() -> None:
    report = verify(KeepsKeysAndValuesApart)
    assert report.verdict == "equal", str(report)
    assert any("passed to cache_k and cache_v" in exercise.detail for exercise in report.coverage)
    (finding,) = verify(TurnsOldValuesAround).findings
    assert finding.name == "cache_differs_from_one_pass"


class NeedsState(CachedAttention):
    """Must be given what earlier steps left, which is nothing before the first."""

    kept_first = True

    def empty_state(self, batch_size: int) -> Cache:
        none = self.out.weight.new_zeros(batch_size, self.n_heads, 0, self.out.in_features // self.n_heads)
        return none, none

    def forward(self, x: Tensor, state: Cache) -> tuple[Tensor, Cache]:  # type: ignore[override]
        earlier_keys, earlier_values = state
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        k, v = torch.cat([earlier_keys, k], 2), torch.cat([earlier_values, v], 2)
        parts = [q.new_zeros(q.size(2), earlier_keys.size(2)), q.new_ones(q.size(2), q.size(2)).triu(1)]
        mask = torch.cat(parts if self.kept_first else parts[::-1], -1).bool()
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(mask, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), (k, v)


class SeesAhead(NeedsState):
    """Wrong: keys that were kept are hidden in the place of later ones."""

    kept_first = False


def test_a_state_that_a_class_makes_is_handed_over_and_decoded_with() -> None:
    report = verify(NeedsState)
    assert (report.verdict, report.not_exercised) == ("equal", [])
    assert verify(SeesAhead).mistakes == ("cache_differs_from_one_pass",)


class SeesAll(CachedAttention):
    """Right where each step is of one token: it hides nothing."""

    kept = 64  # of the last tokens

    def forward(self, x: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        scores = q @ k.mT / q.size(-1) ** 0.5
        attended = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return attended, (k[:, :, -self.kept :], v[:, :, -self.kept :])


class SeesTheLastFour(SeesAll):
    """Right: it keeps a window."""

    kept = 4


class Decodes(nn.Module):
    """Right: it decodes with a cache, beside a memory that each step is given as a whole."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.attention, self.cross = SeesAll(dim, n_heads), nn.MultiheadAttention(dim, n_heads, batch_first=True)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, memory: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        attended, past = self.attention(self.norm1(x), past)
        x = x + attended
        x = x + self.cross(self.norm2(x), memory, memory, need_weights=False)[0]
        return x + self.mlp(self.norm3(x)), past


def test_a_cache_that_hides_nothing_is_held_against_passes_where_these_say_anything() -> None:
    assert not verify(SeesAll).not_exercised
    for right in (SeesTheLastFour, Decodes):
        report = verify(right)
        assert (report.findings, [one.what for one in report.not_exercised][:1]) == ([], ["past"]), str(report)


STALE = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads, self.kept = n_heads, None
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, {arguments}):
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        new = (k, v)
        if {is_there}:
            k, v = (torch.cat([old, x], 2) for old, x in zip({old}, new))
        hidden = k.new_ones(k.size(2), k.size(2)).triu(1).bool()[-q.size(2):]
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(hidden, -torch.inf)
        {keeps}
        return {back}

    def attended(self, weights, v):
        return self.out((weights @ v).transpose(1, 2).flatten(2))
"""
CALLER = """
def decode(tokens):
    attention, cache, outputs = Attention(12, 3), None, []
    for x in tokens.split(1, 1):
        y, {taken} = attention(x, {given}cache)
        outputs.append(y)
    return torch.cat(outputs, 1)
"""
OUT = "self.attended(scores.softmax(-1), v)"
THERE, NOTHING = "cache is not None", "pass"
RETURNED = {  # arguments, whether there is something, what is taken from it, what is kept, what comes back
    "a tuple": ("cache=None", THERE, "cache", NOTHING, f"{OUT}, new"),
    "a list": ("cache=None", THERE, "cache", NOTHING, f"{OUT}, [*new]"),
    "a dictionary": ("cache=None", THERE, "cache.values()", NOTHING, f"{OUT}, dict(zip('kv', new))"),
    "a tensor of both": ("cache=None", THERE, "cache", NOTHING, f"{OUT}, torch.stack(new)"),
    "by a switch": ("cache=None, use_cache=False", THERE, "cache", NOTHING, f"{OUT}, new if use_cache else None"),
}
GIVEN, OWN = ("cache=None", "cache"), ("use_cache=False", "use_cache and self.kept", "self.kept")
KEPT = {
    "a dictionary": (*GIVEN, "cache.values()", "if cache is not None: cache.update(k=new[0], v=new[1])", OUT),
    "a list": (*GIVEN, "cache", "if cache is not None: cache[:] = new", OUT),
    "the module": (*OWN, "self.kept = new if use_cache else None", OUT),
}


def stale(folder: Path, form: tuple[str, ...], caller: str = "") -> str:
    names = ("arguments", "is_there", "old", "keeps", "back")
    return saved(folder, STALE.format(**dict(zip(names, form, strict=True))) + caller, "Attention")


@pytest.mark.parametrize("form", RETURNED)
def test_what_is_of_the_new_tokens_alone_is_wrong_where_it_is_handed_back_as_it_is(form: str, tmp_path: Path) -> None:
    report = verify(stale(tmp_path, RETURNED[form], CALLER.format(taken="cache", given="cache=")))
    assert report.mistakes == ("cache_of_new_tokens_alone",), str(report)
    assert "k, v = (torch.cat([old, x], 2)" in line_of(report.findings[0])


@pytest.mark.parametrize("caller", ["", CALLER.format(taken="new", given=""), CALLER.format(taken="_", given="")])
def test_nothing_is_said_of_it_where_nobody_does_so(caller: str, tmp_path: Path) -> None:
    report = verify(stale(tmp_path, RETURNED["a tuple"], caller))
    assert (report.verdict, len(report.not_exercised)) == ("partial", 1), str(report)
    assert "right only where the caller joins it" in report.not_exercised[0].detail


@pytest.mark.parametrize("form", KEPT)
def test_a_cache_that_keeps_the_new_tokens_alone_is_wrong(form: str, tmp_path: Path) -> None:
    assert verify(stale(tmp_path, KEPT[form])).mistakes == ("cache_differs_from_one_pass",)


class Generates(nn.Module):
    """A model on ids that decodes with a cache, and counts positions from its end."""

    def __init__(self, vocab_size: int, dim: int, n_heads: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(vocab_size, dim), nn.Embedding(64, dim)
        self.blocks = nn.ModuleList([Block(dim, n_heads)])
        self.head = nn.Linear(dim, vocab_size)

    def first(self, past: list[Cache] | None) -> int:
        return 0 if past is None else past[0][0].size(2)

    def forward(self, ids: Tensor, past: list[Cache] | None = None) -> tuple[Tensor, list[Cache]]:
        start, kept = self.first(past), list[Cache]()
        x = self.embed(ids) + self.places(torch.arange(start, start + ids.size(1), device=ids.device))
        for place, block in enumerate(self.blocks):
            x, cache = block(x, None if past is None else past[place])
            kept.append(cache)
        return self.head(self.ends(x)), kept

    def ends(self, x: Tensor) -> Tensor:
        return x


class OfTheLast(Generates):
    """Right: what comes back is of the last token alone."""

    def ends(self, x: Tensor) -> Tensor:
        return x[:, -1:]


class StartsAgain(Generates):
    """Wrong: each step begins at position 0."""

    def first(self, past: list[Cache] | None) -> int:
        return 0


class StartsAgainAtTheLast(OfTheLast):
    def first(self, past: list[Cache] | None) -> int:
        return 0


def test_a_whole_model_is_decoded_with_its_cache() -> None:
    report = verify(Generates)
    assert (report.verdict, report.not_exercised) == ("equal", []), str(report)
    assert "past" not in [one.what for one in verify(OfTheLast).not_exercised]
    for wrong in (StartsAgain, StartsAgainAtTheLast):
        (finding,) = verify(wrong).findings
        assert finding.name == "cache_differs_from_one_pass"
    assert "x = self.embed(ids) + self.places" in line_of(finding)
