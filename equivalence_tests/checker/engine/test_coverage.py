"""What the code offers beyond one call: each of these said EQUAL once, and must not."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.coverage import cover
from equivalence_tests.checker.engine.covered import Covered
from equivalence_tests.checker.helpers_for_tests import changed, line_of, saved
from equivalence_tests.checker.reach.arguments import Sizes
from equivalence_tests.checker.reach.plans import trials_of
from equivalence_tests.checker.reach.subject import Adapter
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.right import broken
from equivalence_tests.checker.zoo.stages import ThreeMatrices

WIDTH, HEADS = 12, 3
Cache = tuple[Tensor, Tensor]


class Parts(ThreeMatrices):
    """What the classes below share: a width, and a mask of what is hidden."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS)

    def masked(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
        scores = self.scores(q, k)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return self.finish(scores.softmax(-1) @ v)


class Attention(Parts):
    """Right, and with nothing to exercise."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attended(x, x, x)


class IgnoresArguments(Attention):
    def forward(self, x: Tensor, kv_cache: object = None, rel_table: object = None) -> Tensor:
        return super().forward(x)


def test_arguments_that_no_line_reads_are_noted_and_leave_nothing_to_run() -> None:
    report = verify(IgnoresArguments)
    assert report.verdict == "equal", str(report)
    assert {f"{name}: no line of its forward reads it" for name in ("kv_cache", "rel_table")} <= {*report.notes}


def above(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys).triu(1 + keys - queries).bool()


class Cached(Parts):
    """Hides the future itself, and takes the offset of the cache into account."""

    def joined(self, past: Cache | None, new: Cache) -> Cache:
        return new if past is None else (torch.cat([past[0], new[0]], dim=2), torch.cat([past[1], new[1]], dim=2))

    def hidden(self, queries: int, keys: int) -> Tensor | None:
        return above(queries, keys)

    def forward(self, x: Tensor, past_key_value: Cache | None = None) -> tuple[Tensor, Cache]:
        q, k, v = self.operands(x)
        k, v = self.joined(past_key_value, (k, v))
        return self.masked(q, k, v, self.hidden(q.size(2), k.size(2))), (k, v)


class CachedWithoutOffset(Cached):
    def hidden(self, queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys).triu(1).bool()


class CachedTheWrongWayRound(Cached):
    def joined(self, past: Cache | None, new: Cache) -> Cache:
        return new if past is None else (torch.cat([new[0], past[0]], dim=2), torch.cat([past[1], new[1]], dim=2))


class CachedInOnePosition(Cached):
    """Turns what is new as if nothing stood before it."""

    def turned(self, *heads: Tensor) -> tuple[Tensor, ...]:
        angles = torch.arange(heads[0].size(2))[:, None] / 10 ** torch.arange(2)
        turn = torch.polar(torch.ones_like(angles).double(), angles.double())
        pairs = (torch.view_as_complex(x.unflatten(-1, (2, 2)).contiguous()) for x in heads)
        return tuple(torch.view_as_real(x * turn).flatten(-2) for x in pairs)

    def forward(self, x: Tensor, past_key_value: Cache | None = None) -> tuple[Tensor, Cache]:
        q, k, v = self.operands(x)
        q, k = self.turned(q, k)
        k, v = self.joined(past_key_value, (k, v))
        return self.masked(q, k, v, self.hidden(q.size(2), k.size(2))), (k, v)


class ChunkSeesItsFuture(Cached):
    """Right for what is decoded token by token: it hides the future of the first step alone."""

    def forward(self, x: Tensor, past_key_value: Cache | None = None) -> tuple[Tensor, Cache]:
        q, k, v = self.operands(x)
        k, v = self.joined(past_key_value, (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.hides(q, past_key_value))
        return self.finish(y), (k, v)

    def hides(self, q: Tensor, past: Cache | None) -> bool:
        return past is None


class ChunkSeesTheFirst(ChunkSeesItsFuture):
    """Right for what is decoded token by token: torch's causal mask begins at the first key."""

    def hides(self, q: Tensor, past: Cache | None) -> bool:
        return q.size(2) > 1


class ChunkMasksTheFirst(Cached):
    """Wrong: makes a mask for several tokens behind others, of as many keys, and takes its first rows."""

    def hidden(self, queries: int, keys: int) -> Tensor | None:
        hidden = torch.ones(WIDTH, WIDTH).triu(1)[:queries, :keys].bool()
        return hidden if queries > 1 else None


class ChunkSeesOtherKeys(Cached):
    """Wrong: makes a mask for several tokens behind others, and its halves stand the wrong way round."""

    def hidden(self, queries: int, keys: int) -> Tensor:
        kept = torch.zeros(queries, keys - queries).bool()
        return torch.cat([above(queries, queries), kept], 1)


class CacheCrashes(Cached):
    def joined(self, past: Cache | None, new: Cache) -> Cache:
        return new if past is None else (torch.cat([past[0], new[0]], dim=1), torch.cat([past[1], new[1]], dim=1))


class CacheTakesOneToken(Cached):
    """Says itself that with a cache there is one token at a step."""

    def forward(self, x: Tensor, past_key_value: Cache | None = None) -> tuple[Tensor, Cache]:
        if past_key_value is not None and x.size(1) != 1:
            raise NotImplementedError("one token at a time")
        return super().forward(x, past_key_value)


class CacheKeepsTheLastToken(Cached):
    """Keeps one new token a step, whatever it is given."""

    def joined(self, past: Cache | None, new: Cache) -> Cache:
        return super().joined(past, new if past is None else (new[0][:, :, -1:], new[1][:, :, -1:]))

    def hidden(self, queries: int, keys: int) -> Tensor | None:
        return None if queries == 1 else above(queries, queries)


class CacheWithALimit(Cached):
    def __init__(self) -> None:
        super().__init__()
        self.cache_size = 33


class BentAndCached(Cached):
    """Bends what it gives; its cache is right."""

    def forward(self, x: Tensor, past_key_value: Cache | None = None) -> tuple[Tensor, Cache]:
        y, kept = super().forward(x, past_key_value)
        return y.round(decimals=3), kept


class BentAndCachedWithoutOffset(BentAndCached):
    """The same with a cache whose queries see only the first keys."""

    def hidden(self, queries: int, keys: int) -> Tensor:
        return torch.arange(keys) > torch.arange(queries)[:, None]


class KeptAtAPosition(Parts):
    """Writes keys and values into buffers of its own."""

    cache_k: Tensor
    cache_v: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("cache_k", "cache_v"):
            self.register_buffer(name, torch.zeros(2, HEADS, 32, WIDTH // HEADS, dtype=torch.float64))

    def forward(self, x: Tensor, start_pos: int = 0) -> Tensor:
        q, k, v = self.operands(x)
        end = start_pos + x.size(1)
        self.write(k, v, start_pos, end)
        return self.masked(q, self.cache_k[:, :, :end], self.cache_v[:, :, :end], above(x.size(1), end))

    def write(self, k: Tensor, v: Tensor, start: int, end: int) -> None:
        self.cache_k[:, :, start:end], self.cache_v[:, :, start:end] = k, v


class KeptAtPositionZero(KeptAtAPosition):
    def write(self, k: Tensor, v: Tensor, start: int, end: int) -> None:
        self.cache_k[:, :, : end - start], self.cache_v[:, :, : end - start] = k, v


class Object(Parts):
    """Writes into a dict that it is given."""

    def forward(self, x: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        q, k, v = self.operands(x)
        if cache is not None:
            k = cache["k"] = torch.cat([cache["k"], k], dim=2) if "k" in cache else k
            v = cache["v"] = torch.cat([cache["v"], v], dim=2) if "v" in cache else v
        return self.masked(q, k, v, above(q.size(2), k.size(2)))


class Switched(Parts):
    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        return self.masked(*self.operands(x), above(x.size(1), x.size(1)) if causal else None)


class Inverted(Parts):
    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        return self.masked(*self.operands(x), above(x.size(1), x.size(1)).mT if causal else None)


class HidesItself(Parts):
    def forward(self, x: Tensor, causal_mask: bool = False) -> Tensor:
        return self.masked(*self.operands(x), torch.ones(x.size(1), x.size(1)).triu().bool() if causal_mask else None)


class Repeated(Parts):
    """A number whose name says nothing about lengths."""

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        return self.masked(*self.operands(x)) * (times / 2)


class CountsBytes(Parts):
    """A large number that is no length."""

    def forward(self, x: Tensor, sram_size: int = 65536) -> Tensor:
        return self.masked(*self.operands(x)) * (sram_size / 65536)


class ChunksOfTen(Parts):
    """Beyond ten tokens a query sees its own chunk alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.chunked(x)

    def chunked(self, x: Tensor, size: int = 10) -> Tensor:
        return torch.cat([self.masked(*self.operands(chunk)) for chunk in x.split(size, dim=1)], dim=1)


class SwitchCrashes(Parts):
    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        return self.masked(*self.operands(x), torch.ones(WIDTH, WIDTH).triu(1).bool() if causal else None)


class CausalCache(Parts):
    """Causal by a switch, with a cache that a second switch turns on."""

    def forward(
        self, x: Tensor, is_causal: bool = False, past: Cache | None = None, use_cache: bool = False
    ) -> tuple[Tensor, Cache | None]:
        q, k, v = self.operands(x)
        if past is not None:
            k, v = (torch.cat([before, new], dim=2) for before, new in zip(past, (k, v), strict=True))
        hidden = above(q.size(2), k.size(2)) if is_causal else None
        return self.masked(q, k, v, hidden), (k, v) if use_cache else None


class Windowed(Parts):
    wide = 4

    def __init__(self) -> None:
        super().__init__()
        self.window = self.wide

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.size(1))
        return self.masked(*self.operands(x), (places[:, None] - places).abs() >= self.window)


class WindowWithoutEffect(Windowed):
    def forward(self, x: Tensor) -> Tensor:
        return self.masked(*self.operands(x), above(x.size(1), x.size(1)))


class WindowTooWide(Windowed):
    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.size(1))
        return self.masked(*self.operands(x), (places[:, None] - places).abs() >= 99 * self.window)


class WindowTurnedRound(Windowed):
    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.size(1))
        return self.masked(*self.operands(x), (places[:, None] - places).abs() < self.window)


class WindowHidesAll(Windowed):
    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.size(1))
        return self.masked(*self.operands(x), (places[:, None] - places).abs() >= -self.window)


class WindowsCutByTheCaller(Parts):
    """One window of an image in each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.window = 4

    def forward(self, x: Tensor) -> Tensor:
        return self.masked(*self.operands(x))


class BlocksCrash(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.block_size = 8

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(self.block_size, self.block_size, dtype=torch.bool)
        return self.masked(*self.operands(x), hidden[: x.size(1), : x.size(1)])


class Unknown(Parts):
    def forward(self, x: Tensor, gates: Tensor | None = None) -> Tensor:
        return self.masked(*self.operands(x if gates is None else x * gates))


class Refuses(Parts):
    def forward(self, x: Tensor, use_flash: bool = False) -> Tensor:
        if use_flash:
            raise RuntimeError("needs a GPU")
        return self.masked(*self.operands(x))


class SetCausal(Parts):
    """Says of itself that it is causal; whether it is, is seen when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.causal = True

    def hidden(self, length: int) -> Tensor:
        return torch.ones(length, length).triu(1).bool()

    def forward(self, x: Tensor) -> Tensor:
        return self.masked(*self.operands(x), self.hidden(x.size(1)))


class SetInWindows(SetCausal):
    """Causal within windows of two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.window_size = 2

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.size(1))
        hidden = above(x.size(1), x.size(1)) | (places[:, None] - places >= self.window_size)
        return self.masked(*self.operands(x), hidden if self.causal else None)


class SetTheWrongWayRound(SetCausal):
    def hidden(self, length: int) -> Tensor:
        return super().hidden(length) if not self.causal else torch.zeros(length, length).bool()


class Packed(Attention):
    def forward(self, x: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        apart = None if segment_ids is None else self.apart(segment_ids)
        return self.masked(*self.operands(x), apart)

    def apart(self, ids: Tensor) -> Tensor:
        return (ids[:, :, None] != ids[:, None])[:, None]


class PackedInverted(Packed):
    def apart(self, ids: Tensor) -> Tensor:
        return ~super().apart(ids)


class PackedBeforeIt(Packed):
    def apart(self, ids: Tensor) -> Tensor:
        return (ids[:, :, None] < ids[:, None])[:, None]


class PackedAlways(Packed):
    def forward(self, x: Tensor, document_ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, document_ids)


@pytest.mark.parametrize("made", [Packed, PackedAlways])
def test_segments_that_tokens_belong_to_are_read_as_a_mask(made: type[nn.Module]) -> None:
    report = verify(made)
    assert report.verdict == "equal", str(report)
    assert "each token, which may look at those of its own" in " ".join(str(report).split())


@pytest.mark.parametrize("made", [PackedInverted, PackedBeforeIt])
def test_segments_that_are_not_kept_apart_accuse_nobody_and_are_listed(made: type[nn.Module]) -> None:
    report = verify(made)
    assert report.verdict == "partial", str(report)
    assert "segment_ids" in [exercise.what for exercise in report.not_exercised]


class Placed(Attention):
    """Adds a table of positions, unless others are given."""

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        places = torch.arange(x.size(1)) if position_ids is None else self.counted(position_ids)
        return self.masked(*self.operands(x + places[..., None].sin()))

    def counted(self, ids: Tensor) -> Tensor:
        return ids


class PlacedFromOne(Placed):
    def counted(self, ids: Tensor) -> Tensor:
        return ids + 1


class PlacedInVain(Placed):
    def counted(self, ids: Tensor) -> Tensor:
        return torch.arange(ids.size(-1))


class Turned(Parts):
    """Turns queries and keys by their positions, which begin where an argument says."""

    def forward(self, x: Tensor, seq_len_offset: int = 0, token_positions: Tensor | None = None) -> Tensor:
        places = torch.arange(x.size(1)) if token_positions is None else token_positions
        angle = self.counted(places, seq_len_offset)[..., None].to(x.dtype) * torch.tensor([1.0, 0.3, 1.0, 0.3]).to(x)
        q, k, v = self.operands(x)
        return self.masked(self.turned(q, angle), self.turned(k, angle), v)

    def counted(self, places: Tensor, offset: int) -> Tensor:
        return places + offset

    def turned(self, x: Tensor, angle: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-two, one], -1) * angle.sin()


class TurnedWithoutItsOffset(Turned):
    def counted(self, places: Tensor, offset: int) -> Tensor:
        return places


def covered(module: nn.Module) -> Covered:
    module = module.double().eval()
    trial = next(trials_of(module, Sizes(num_heads=HEADS, head_dim=WIDTH // HEADS), torch.float64))

    def judge(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Report]:
        with torch.no_grad():
            function(*args, **kwargs)
        return [Report("it ran", verdict="equal")]

    found = Covered(trial, [(trial, None)], judge)
    cover(found)
    return found


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (Cached, "past_key_value"),
        (KeptAtAPosition, "start_pos"),
        (Object, "cache"),
        (Switched, "causal=True"),
        (CausalCache, "past"),
        (Windowed, "lengths beyond window = 4"),
        (Placed, "position_ids"),
        (Turned, "seq_len_offset"),
        (Turned, "token_positions"),
    ],
)
def test_what_is_right_is_exercised_without_a_finding(made: Callable[[], nn.Module], what: str) -> None:
    found = covered(made())
    assert what in [exercise.what for exercise in found.exercises if exercise.exercised]
    assert found.findings == []
    assert all(exercise.exercised for exercise in found.exercises)


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (CachedWithoutOffset, "cache_differs_from_one_pass"),
        (CachedTheWrongWayRound, "cache_differs_from_one_pass"),
        (CacheCrashes, "cache_fails"),
        (KeptAtPositionZero, "cache_differs_from_one_pass"),
        (Inverted, "causal_switch_wrong"),
        (HidesItself, "causal_switch_wrong"),
        (SwitchCrashes, "fails_with_what_it_offers"),
        (WindowWithoutEffect, "window_without_effect"),
        (WindowTooWide, "window_without_effect"),
        (WindowTurnedRound, "window_hides_near_keys"),
        (WindowHidesAll, "window_hides_near_keys"),
        (BlocksCrash, "fails_with_what_it_offers"),
    ],
)
def test_what_breaks_where_nobody_looked_is_found(made: Callable[[], nn.Module], name: str) -> None:
    assert [finding.name for finding in covered(made()).findings] == [name]


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (Unknown, "gates"),
        (Repeated, "times"),
        (CountsBytes, "sram_size"),
        (Refuses, "use_flash=True"),
        (CacheTakesOneToken, "several tokens at a step, what it returns is passed to past_key_value"),
        (CacheKeepsTheLastToken, "several tokens at a step, what it returns is passed to past_key_value"),
        (ChunkSeesItsFuture, "several tokens at a step, what it returns is passed to past_key_value"),
        (ChunkSeesTheFirst, "several tokens at a step, what it returns is passed to past_key_value"),
        (CacheWithALimit, "a cache of more than cache_size = 33 tokens"),
        (WindowsCutByTheCaller, "window"),
        (PlacedFromOne, "position_ids"),
        (PlacedInVain, "position_ids"),
        (TurnedWithoutItsOffset, "seq_len_offset"),
    ],
)
def test_what_was_not_run_is_listed(made: Callable[[], nn.Module], what: str) -> None:
    found = covered(made())
    assert [exercise.what for exercise in found.exercises if not exercise.exercised] == [what]
    assert found.findings == []


SCORES = "scores = q @ k.mT"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ((SCORES, "k, v = k[:, :, :50], v[:, :, :50]\n        " + SCORES), "lengths beyond 50"),
        (
            ("dropped = ", "weights = weights * (torch.arange(k.size(2)) < 300)\n        dropped = "),
            "lengths beyond 300",
        ),
        ((SCORES, "v = v[:, :, torch.arange(v.size(2)) % 200]\n        " + SCORES), "lengths beyond 200"),
        (("weights = scores", "scores = torch.where(scores > 30, 30, scores)\n        weights = scores"), "inputs 10"),
    ],
)
def test_what_begins_beyond_a_number_is_listed(change: tuple[str, str], what: str, tmp_path: Path) -> None:
    report = verify(saved(tmp_path, broken("cross", (change,)), "Attention"))
    assert report.verdict == "partial", str(report)
    assert [one.what for one in report.not_exercised if one.what.startswith(what)], report.not_exercised


def test_a_mask_that_is_kept_is_compared_as_far_as_it_reaches(tmp_path: Path) -> None:
    kept = (
        ("self.num_heads = num_heads\n", "self.num_heads = num_heads\n        self.register_buffer('kept', HOLED)\n"),
        (
            "weights = scores",
            "may = self.kept[: x.size(1), : x.size(1)] > 0\n        weights = scores.masked_fill(~may, -1e9)",
        ),
    )
    for hole, what in ((0, []), (1, ["50 tokens"])):
        head = f"import torch\nHOLED = torch.ones(50, 50).tril()\nHOLED[45:, 40] -= {hole}\n"
        (tmp_path / f"mine{hole}.py").write_text(head + broken("itself", kept))
        assert [one.what for one in verify(f"{tmp_path}/mine{hole}.py:Attention").not_exercised] == what


def test_what_is_done_in_chunks_of_a_number_is_listed() -> None:
    assert [one.what for one in verify(ChunksOfTen).not_exercised] == ["lengths beyond 10"]


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (CacheCrashes, "return q @ k.mT"),
        (CachedWithoutOffset, "return torch.ones(queries, keys)"),
        (CachedTheWrongWayRound, "return new if past is None else (torch.cat([new[0]"),
        (CachedInOnePosition, "q, k = self.turned(q, k)"),
        (KeptAtPositionZero, "self.cache_k[:, :, : end - start]"),
        (ChunkSeesOtherKeys, "return torch.cat([above("),
        (ChunkMasksTheFirst, "hidden = torch.ones("),
    ],
)
def test_what_is_wrong_in_a_later_step_has_its_line(made: type[nn.Module], line: str) -> None:
    (finding,) = covered(made()).findings
    assert line_of(finding).startswith(line)


def test_a_setting_that_is_called_causal_is_true_of_each_call() -> None:
    assert [verify(one).mistakes for one in (SetCausal(), SetInWindows())] == [(), ()]
    assert verify(SetTheWrongWayRound()).mistakes == ("causal_mask_never_used",)


def test_what_the_code_keeps_is_as_it_was() -> None:
    module = KeptAtAPosition()
    before = {name: value.clone() for name, value in module.double().state_dict().items()}
    covered(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_plain_attention_has_nothing_to_exercise() -> None:
    assert covered(Attention()).exercises == []


@pytest.mark.parametrize(("made", "wrong"), [(BentAndCached, False), (BentAndCachedWithoutOffset, True)])
def test_what_is_found_in_one_call_does_not_hide_a_wrong_cache(made: type[nn.Module], wrong: bool) -> None:
    mistakes = verify(made, adapter=Adapter(num_heads=HEADS, embed_dim=WIDTH)).mistakes
    assert "changed_by_round" in mistakes
    assert ("cache_differs_from_one_pass" in mistakes) == wrong


class CausalByChoice(Parts):
    """Built without a causal mask by default, beside a mask that may be handed over."""

    first_hidden = 1

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        ones = x.new_ones(x.size(1), x.size(1))
        hidden = torch.zeros_like(ones).bool() if mask is None else ~mask
        if self.causal:
            hidden = hidden | ones.triu(self.first_hidden).bool()
        return self.masked(*self.operands(x), hidden)


class RefusesToBeCausal(CausalByChoice):
    def __init__(self, causal: bool = False) -> None:
        if causal:
            raise NotImplementedError("not yet")
        super().__init__()


class LeavesTheMaskToTheCaller(CausalByChoice):
    """A second switch says that the mask handed over is causal already."""

    def __init__(self, causal: bool = False, use_custom_causal_mask: bool = False) -> None:
        super().__init__(causal and not use_custom_causal_mask)


class Inverts(Parts):
    """A switch of the call lets queries compete for keys, or returns what was seen on the way."""

    def forward(self, x: Tensor, inverted: bool = False, return_weights: bool = False) -> Tensor:
        q, k, v = self.operands(x)
        return self.finish(self.scores(q, k).softmax(self.axis(inverted, return_weights)) @ v)

    def axis(self, inverted: bool, returned: bool) -> int:
        return -2 if inverted else -1


class InvertsToShowIt(Inverts):
    def axis(self, inverted: bool, returned: bool) -> int:
        return -2 if inverted or returned else -1


class InvertsAndMergesWrongly(Parts):
    def forward(self, x: Tensor, inverted: bool = False) -> Tensor:
        context = self.attend(*self.operands(x))
        return self.out((context if inverted else context.transpose(1, 2)).reshape(x.shape))


def test_what_a_switch_of_the_call_asks_for_is_no_mistake_but_a_shape_that_nobody_asks_for_is() -> None:
    assert verify(Inverts).verdict == "equal"
    assert verify(InvertsToShowIt).mistakes == ("softmax_over_queries",)
    (wrong,) = verify(InvertsAndMergesWrongly).findings
    assert (wrong.name, wrong.evidence) == ("heads_merged_without_transpose", "called with inverted=True")


def test_a_causal_switch_of_the_constructor_is_built_both_ways() -> None:
    assert verify(CausalByChoice).verdict == "equal"
    assert verify(LeavesTheMaskToTheCaller).verdict == "equal"
    assert verify(changed(CausalByChoice, first_hidden=0)).mistakes == ("causal_switch_wrong",)
    refused = verify(RefusesToBeCausal)
    assert (refused.verdict, [one.what for one in refused.not_exercised]) == ("partial", ["causal=True"])


class WithOptions(Parts):
    """Merges the heads as one option says; another builds a table, which may be left unused."""

    used, merged = True, 1

    def __init__(self, order: str = "heads first", table: bool = False, scaled: bool = True) -> None:
        super().__init__()
        self.order, self.scaled, self.table = order, scaled, nn.Linear(HEADS, HEADS) if table else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        scores = q @ k.mT / ((WIDTH // HEADS) ** 0.5 if self.scaled else 1)
        if self.used:
            scores = self.table(scores.movedim(1, -1)).movedim(-1, 1)
        y = scores.softmax(-1) @ v
        if self.order == "heads first":
            y = y.transpose(1, 2)
        elif self.order in ("tokens first", "raw"):
            y = y.transpose(self.merged, 2)
        return self.out(y.reshape(x.shape))


def test_each_option_of_the_constructor_is_built() -> None:
    report = verify(changed(WithOptions, used=False))
    assert [one.what for one in report.not_exercised] == ["table=True"]
    assert [one.what for one in report.coverage if one.exercised] == ["order=tokens first", "order=raw", "scaled=False"]
    (wrong,) = verify(changed(WithOptions, merged=2)).findings
    assert (wrong.name, wrong.evidence) == ("heads_merged_without_transpose", "built with order=tokens first")


class Inside(nn.Module):
    """Works in blocks side by side, at a width of its own."""

    def __init__(self, input_size: int, window_size: int, hidden_size: int) -> None:
        super().__init__()
        self.window_size = window_size
        self.qkv, self.out = nn.Linear(input_size, 3 * hidden_size), nn.Linear(hidden_size, input_size)

    def divisor(self, x: Tensor, q: Tensor) -> float:
        return float(q.size(-1)) ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        blocks = []
        for block in x.split(self.window_size, 1):
            q, k, v = self.qkv(block).chunk(3, -1)
            blocks.append((q @ k.mT / self.divisor(x, q)).softmax(-1) @ v)
        return self.finished(x, torch.cat(blocks, 1))

    def finished(self, x: Tensor, context: Tensor) -> Tensor:
        return self.out(context)


class DulledInside(Inside):
    """Scales the scores of large inputs otherwise."""

    def divisor(self, x: Tensor, q: Tensor) -> float:
        return super().divisor(x, q) * (2 if float(q.detach().abs().max()) > 20 else 1)


class SlidingInside(Inside):
    """Not so: its blocks do not slide."""


class ScaledByTheOutside(Inside):
    def divisor(self, x: Tensor, q: Tensor) -> float:
        return float(x.size(-1)) ** 0.5


class KeptAtTheWidthOutside(Inside):
    def finished(self, x: Tensor, context: Tensor) -> Tensor:
        kept = torch.zeros_like(x)
        kept[:] = context
        return super().finished(x, kept)


class ScaledByTheWidthOutside(nn.Module):
    """Queries and keys have a width of their own, and the scale that of the tokens."""

    def __init__(self, dim_embedding: int, dim_qk: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(dim_embedding, dim_qk), nn.Linear(dim_embedding, dim_qk)
        self.v = nn.Linear(dim_embedding, dim_embedding)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT / x.size(-1) ** 0.5
        return scores.softmax(-1) @ self.v(x)


def test_a_width_of_queries_and_keys_is_told_from_that_of_the_tokens() -> None:
    assert verify(ScaledByTheWidthOutside).verdict in ("deviates", "unchecked")


def test_blocks_that_are_intended_hide_no_threshold() -> None:
    assert "inputs 10 times as large" in [one.what for one in verify(DulledInside).not_exercised]


@pytest.mark.thorough
def test_blocks_and_widths_that_are_alike_at_first_are_told_apart() -> None:
    report = verify(Inside)
    assert (report.verdict, [finding.name for finding in report.intended]) == ("equal", ["own_mask"]), str(report)
    assert [one.what for one in verify(SlidingInside).not_exercised] == ["window_size", "lengths beyond 64"]
    assert verify(ScaledByTheOutside).mistakes == ("scale_wrong",)
    (crash,) = verify(KeptAtTheWidthOutside).not_exercised
    assert crash.what.startswith("hidden_size = ")


class Masked(nn.Module):
    """A model of features beside a table of positions; one of its masks is of nobody's."""

    def __init__(self, d_model: int = 24, nhead: int = 4, mask: str = "causal") -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(d_model, nhead, 20, batch_first=True)
        self.encoder, self.proj = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(5, d_model)
        self.places, self.mask = nn.Embedding(9, d_model), mask

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        hidden = x.new_ones(length, length).triu(1).bool()
        if self.mask == "holes":
            hidden[4:, 2] = True
        return self.encoder(self.proj(x) + self.places(torch.arange(length, device=x.device)), mask=hidden)


def test_a_model_is_run_with_each_string_that_its_constructor_takes() -> None:
    report = verify(Masked)
    assert any(check.name.startswith("future") or "order" in check.name for check in report.checks), str(report)
    assert [one.what for one in report.not_exercised] == ["the keys that it hides by itself, mask=holes"]
