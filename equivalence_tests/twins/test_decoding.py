"""A cache changes the work and not the result; greedy decoding and beam search against slow searches that list all."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import scratch
from equivalence_tests.instruments.differences import compare_tensors
from equivalence_tests.instruments.side_by_side import assert_close, random_tensor
from equivalence_tests.instruments.weights import randomize_parameters
from scratch import masks
from scratch.decoding import (
    Ending,
    FixedCache,
    GrowingCache,
    LayerCache,
    Sampling,
    beam_search,
    greedy_decode,
    hypothesis_score,
    new_cache,
)

BATCH, HEADS, LENGTH, MEMORY_LEN, HEAD_DIM = 2, 3, 7, 5, 11
EMBED_DIM = HEADS * HEAD_DIM
# A sequence of seven tokens, in one piece or in several.
PIECES = [(7,), (1, 1, 1, 1, 1, 1, 1), (2, 5), (3, 1, 1, 2)]
MHA_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias": {"bias": False},
    "extra-tokens": {"add_bias_kv": True, "add_zero_attn": True},
    "widths": {"kdim": 13, "vdim": 17},
    "head-sizes": {"qk_head_dim": 5, "v_head_dim": 19},
    "all": {"add_bias_kv": True, "kdim": 13, "vdim": 17, "qk_head_dim": 5, "v_head_dim": 19},
}


def draw_mask(*shape: int, seed: int = 0) -> Tensor:
    """Draw a module mask (True = may not look) that leaves every query its first key."""
    hidden = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    hidden[..., 0] = False
    return hidden


def spans(pieces: Sequence[int]) -> Iterator[slice]:
    ends = list(itertools.accumulate(pieces))
    return (slice(end - size, end) for size, end in zip(pieces, ends, strict=True))


def attention(options: str, **arguments: Any) -> scratch.MultiheadAttention:
    module = scratch.MultiheadAttention(EMBED_DIM, HEADS, dtype=torch.float64, **MHA_OPTIONS[options], **arguments)
    return randomize_parameters(module).eval()


def inputs_for(module: scratch.MultiheadAttention, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw query, key and value, one object where the widths allow it."""
    if module.kdim == module.vdim == EMBED_DIM:
        x = random_tensor(length, BATCH, EMBED_DIM, seed=seed)
        return x, x, x
    widths = (EMBED_DIM, module.kdim, module.vdim)
    query, key, value = (random_tensor(length, BATCH, width, seed=seed + i) for i, width in enumerate(widths))
    return query, key, value


def cut(inputs: Sequence[Tensor], part: slice) -> tuple[Tensor, ...]:
    """Take the same part of each input, and keep equal objects equal."""
    pieces = {id(x): x[part] for x in inputs}
    return tuple(pieces[id(x)] for x in inputs)


class TestRoom:
    """Without gradients, new keys and values are written into memory that is there already."""

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_token_by_token_gives_what_the_whole_gives_and_few_tensors_are_made(self, mode: Any) -> None:
        module, cache = scratch.MultiheadAttention(EMBED_DIM, HEADS).double(), GrowingCache()
        x, places = random_tensor(LENGTH, BATCH, EMBED_DIM), set()
        expected, _ = module(x, x, x, attn_mask=~masks.causal(LENGTH))
        with mode():
            for i in range(LENGTH):
                output, _ = module(x[i : i + 1], x[i : i + 1], x[i : i + 1], cache=cache)
                assert_close(output, expected[i : i + 1])
                assert cache._keys_values is not None
                places.add(cache._keys_values[0].data_ptr())
        assert cache.length == LENGTH
        assert len(places) <= 2 + math.log2(LENGTH)

    def test_rows_go_on_from_others_in_the_middle(self) -> None:
        module, cache, rows = scratch.MultiheadAttention(EMBED_DIM, HEADS).double(), GrowingCache(), [1, 1, 0]
        x = random_tensor(6, 3, EMBED_DIM)
        moved = torch.cat([x[:4, rows], x[4:]])
        with torch.no_grad():
            for i in range(4):  # there is room for three more then
                module(x[i : i + 1], x[i : i + 1], x[i : i + 1], cache=cache)
            cache.reorder(torch.tensor(rows))
            output, _ = module(x[4:], x[4:], x[4:], attn_mask=~masks.causal(2, 6, align="lower_right"), cache=cache)
        assert_close(output, module(moved, moved, moved, attn_mask=~masks.causal(6))[0][4:])

    @pytest.mark.parametrize("later", [torch.no_grad, torch.enable_grad])
    def test_what_inference_mode_left_is_extended_outside_of_it(self, later: Any) -> None:
        module, cache = scratch.MultiheadAttention(EMBED_DIM, HEADS).double(), GrowingCache()
        x = random_tensor(4, BATCH, EMBED_DIM)
        for i, mode in enumerate([torch.inference_mode, torch.inference_mode, later, later]):
            with mode():
                output, _ = module(x[i : i + 1], x[i : i + 1], x[i : i + 1], cache=cache)
        assert_close(output, module(x, x, x)[0][3:])

    def test_what_a_backward_pass_needs_is_left_alone(self) -> None:
        module, cache = scratch.MultiheadAttention(EMBED_DIM, HEADS).double(), GrowingCache()
        x = random_tensor(4, BATCH, EMBED_DIM)
        with torch.no_grad():
            module(x[:1], x[:1], x[:1], cache=cache)
            module(x[1:2], x[1:2], x[1:2], cache=cache)
        outputs = [module(x[i : i + 1], x[i : i + 1], x[i : i + 1], cache=cache)[0] for i in (2, 3)]
        torch.cat(outputs).sum().backward()
        assert module.in_proj_weight is not None
        assert module.in_proj_weight.grad is not None

    def test_so_where_only_the_queries_are_trained(self) -> None:
        module, cache = scratch.MultiheadAttention(EMBED_DIM, HEADS, kdim=EMBED_DIM + 1), GrowingCache()
        module.requires_grad_(False)
        assert module.q_proj_weight is not None
        module.q_proj_weight.requires_grad_()
        query, memory = torch.randn(4, BATCH, EMBED_DIM), torch.randn(4, BATCH, EMBED_DIM + 1)
        outputs = [module(*(x[i : i + 1] for x in (query, memory, query)), cache=cache)[0] for i in range(4)]
        torch.cat(outputs).sum().backward()
        assert module.q_proj_weight.grad is not None

    def test_a_cache_goes_on_in_a_wider_dtype(self) -> None:
        module, cache, x = (
            scratch.MultiheadAttention(EMBED_DIM, HEADS),
            GrowingCache(),
            torch.randn(3, BATCH, EMBED_DIM),
        )
        with torch.no_grad():
            for i in range(2):
                module(x[i : i + 1], x[i : i + 1], x[i : i + 1], cache=cache)
            module, x = module.double(), x.double()
            output, _ = module(x[2:], x[2:], x[2:], cache=cache)
            expected, _ = module(x[2:], x, x)
        assert torch.allclose(output, expected, atol=1e-6)

    def test_several_continuations_can_be_mapped_over(self) -> None:
        module, cache = scratch.MultiheadAttention(EMBED_DIM, HEADS).double(), GrowingCache()
        x, candidates = random_tensor(2, BATCH, EMBED_DIM), random_tensor(5, 1, BATCH, EMBED_DIM, seed=1)
        with torch.no_grad():
            for i in range(2):
                module(x[i : i + 1], x[i : i + 1], x[i : i + 1], cache=cache)
            outputs = torch.func.vmap(lambda y: module(y, y, y, cache=copy.copy(cache))[0])(candidates)
            for y, output in zip(candidates, outputs, strict=True):
                whole = torch.cat([x, y])
                assert_close(output, module(y, whole, whole)[0])


@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("options", MHA_OPTIONS)
class TestGrowingCache:
    """What was attended piece by piece equals what is attended at once, masked alike."""

    @pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
    @pytest.mark.parametrize("masking", ["causal", "arbitrary", "float", "per-head"])
    def test_pieces_give_what_the_whole_gives(
        self, pieces: tuple[int, ...], options: str, masking: str, need_weights: bool
    ) -> None:
        module, cache = attention(options), GrowingCache()
        query, key, value = inputs_for(module, LENGTH)
        may_attend = masks.causal(LENGTH)
        attn_mask = {
            "causal": ~may_attend,
            "arbitrary": ~may_attend | draw_mask(LENGTH, LENGTH),
            "float": random_tensor(LENGTH, LENGTH, seed=5).masked_fill(~may_attend, -math.inf),
            "per-head": ~may_attend | draw_mask(BATCH * HEADS, LENGTH, LENGTH),
        }[masking]
        padding = draw_mask(BATCH, LENGTH, seed=2)
        padding = masks.to_score_bias(~padding, torch.float64) if masking == "float" else padding
        arguments: dict[str, Any] = {"need_weights": need_weights, "average_attn_weights": False}
        output, weights = module(query, key, value, padding, attn_mask=attn_mask, **arguments)
        for part in spans(pieces):
            piece, piece_weights = module(
                *cut((query, key, value), part),
                padding[:, : part.stop],
                attn_mask=attn_mask[..., part, : part.stop],
                cache=cache,
                **arguments,
            )
            assert_close(piece, output[part])
            if weights is not None:
                extra = weights[:, :, part, LENGTH:]  # appended tokens come last, behind keys that are still to come
                assert_close(piece_weights, torch.cat([weights[:, :, part, : part.stop], extra], dim=-1))
        assert cache.length == LENGTH

    def test_a_promise_of_causality_is_read_off_the_mask(self, pieces: tuple[int, ...], options: str) -> None:
        module, cache = attention(options), GrowingCache()
        inputs, attn_mask = inputs_for(module, LENGTH), ~masks.causal(LENGTH)
        output, _ = module(*inputs, need_weights=False, attn_mask=attn_mask)
        for part in spans(pieces):
            mask = ~masks.causal(part.stop - part.start, part.stop, align="lower_right")
            piece, _ = module(*cut(inputs, part), need_weights=False, attn_mask=mask, is_causal=True, cache=cache)
            assert_close(piece, output[part])

    def test_gradients_pass_through_it(self, pieces: tuple[int, ...], options: str) -> None:
        module, cache = attention(options), GrowingCache()
        inputs, attn_mask = inputs_for(module, LENGTH), ~masks.causal(LENGTH)
        leaves = {id(x): x.clone().requires_grad_() for x in inputs}
        inputs = tuple(leaves[id(x)] for x in inputs)  # type: ignore[assignment]
        gradient = random_tensor(LENGTH, BATCH, EMBED_DIM, seed=9)
        wanted = [*leaves.values(), *module.parameters()]
        expected = torch.autograd.grad(module(*inputs, attn_mask=attn_mask)[0], wanted, gradient)
        steps = [
            module(*cut(inputs, part), attn_mask=attn_mask[part, : part.stop], cache=cache)[0] for part in spans(pieces)
        ]
        largest = max(float(x.abs().max()) for x in expected)  # the key bias has none but rounding noise
        for actual, exact in zip(torch.autograd.grad(torch.cat(steps), wanted, gradient), expected, strict=True):
            assert compare_tensors(actual, exact, largest=largest).passed


@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("options", MHA_OPTIONS)
def test_fixed_cache_pieces_of_the_queries_give_what_all_give(pieces: tuple[int, ...], options: str) -> None:
    module, cache = attention(options), FixedCache()
    query, (_, key, value) = random_tensor(LENGTH, BATCH, EMBED_DIM, seed=7), inputs_for(module, MEMORY_LEN)
    padding, attn_mask = draw_mask(BATCH, MEMORY_LEN), draw_mask(LENGTH, MEMORY_LEN, seed=3)
    output, weights = module(query, key, value, padding, attn_mask=attn_mask)
    for part in spans(pieces):
        piece, piece_weights = module(query[part], key, value, padding, attn_mask=attn_mask[part], cache=cache)
        assert_close(piece, output[part])
        assert_close(piece_weights, weights[:, part])


class TestCaches:
    def test_layouts_share_the_cache(self) -> None:
        x, cache = random_tensor(LENGTH, BATCH, EMBED_DIM), GrowingCache()
        sequence_first, batch_first = attention("plain"), attention("plain", batch_first=True)
        expected, _ = sequence_first(x, x, x, attn_mask=~masks.causal(LENGTH))
        for part in spans((2, 5)):
            piece, mask = x[part].transpose(0, 1), ~masks.causal(LENGTH)[part, : part.stop]
            actual, _ = batch_first(piece, piece, piece, attn_mask=mask, cache=cache)
            assert_close(actual.transpose(0, 1), expected[part])

    def test_unbatched_input_is_cached_too(self) -> None:
        module, cache, x = attention("plain"), GrowingCache(), random_tensor(LENGTH, EMBED_DIM)
        expected, _ = module(x, x, x, attn_mask=~masks.causal(LENGTH))
        for part in spans((3, 4)):
            mask = ~masks.causal(LENGTH)[part, : part.stop]
            actual, _ = module(x[part], x[part], x[part], attn_mask=mask, cache=cache)
            assert_close(actual, expected[part])

    def test_a_fixed_cache_looks_at_the_memory_of_the_first_call_only(self) -> None:
        module, cache = attention("plain"), FixedCache()
        query, memory = random_tensor(1, BATCH, EMBED_DIM, seed=1), random_tensor(MEMORY_LEN, BATCH, EMBED_DIM)
        first, _ = module(query, memory, memory, cache=cache)
        other = torch.full_like(memory, math.nan)
        assert torch.equal(module(query, other, other, cache=cache)[0], first)

    def test_reordered_rows_go_on_from_the_rows_they_are_told(self) -> None:
        module, cache, rows = attention("plain"), LayerCache(), torch.tensor([2, 0, 2])
        x, last = random_tensor(4, 3, EMBED_DIM), random_tensor(1, 3, EMBED_DIM, seed=1)
        module(x, x, x, cache=cache.self_attn)
        cache.reorder(rows)
        whole = torch.cat([x[:, rows], last])
        assert_close(module(last, last, last, cache=cache.self_attn)[0], module(whole, whole, whole)[0][4:])

    def test_reordering_an_empty_cache_does_nothing(self) -> None:
        cache = new_cache(1)[0]
        cache.reorder(torch.tensor([1, 0]))
        assert cache.length == 0

    @pytest.mark.parametrize("cache_type", [GrowingCache, FixedCache])
    def test_another_batch_is_refused(self, cache_type: Callable[[], Any]) -> None:
        module, cache = attention("plain"), cache_type()
        x, y = random_tensor(4, 3, EMBED_DIM), random_tensor(4, 2, EMBED_DIM)
        module(x, x, x, cache=cache)
        with pytest.raises(ValueError, match="cache holds a batch of 3, got a batch of 2: begin a new cache"):
            module(y, y, y, cache=cache)

    def test_masks_have_to_span_the_earlier_keys(self) -> None:
        module, cache, x = attention("plain"), GrowingCache(), random_tensor(4, BATCH, EMBED_DIM)
        module(x, x, x, cache=cache)
        for masking in ({"attn_mask": draw_mask(4, 4)}, {"attn_mask": draw_mask(4, 4), "is_causal": True}):
            with pytest.raises(ValueError, match=r"attn_mask must have shape \(query_len, key_len\) = \(4, 8\)"):
                module(x, x, x, need_weights=False, cache=cache, **masking)
        with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(batch, key_len\) = \(2, 8\)"):
            module(x, x, x, draw_mask(BATCH, 4), cache=cache)
        assert cache.length == 4  # a refused call leaves no trace

    def test_one_cache_for_each_layer(self) -> None:
        layer = scratch.TransformerDecoderLayer(EMBED_DIM, HEADS, 13)
        decoder, x = scratch.TransformerDecoder(layer, 2), torch.zeros(1, BATCH, EMBED_DIM)
        for count in (1, 3):
            with pytest.raises(ValueError, match=f"cache must have one entry for each of 2 layers, got {count}"):
                decoder(x, x, cache=new_cache(count))
        with pytest.raises(ValueError, match="num_layers must be greater than 0"):
            new_cache(0)


DECODER_OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm_first": True, "bias": False},
    {"norm_first": True, "batch_first": True, "activation": "gelu"},
    {"qk_head_dim": 5, "v_head_dim": 19, "batch_first": True},
]


def build_decoder(num_layers: int = 2, **options: Any) -> scratch.TransformerDecoder:
    layer = scratch.TransformerDecoderLayer(EMBED_DIM, HEADS, 13, dropout=0.0, dtype=torch.float64, **options)
    decoder = scratch.TransformerDecoder(layer, num_layers, torch.nn.LayerNorm(EMBED_DIM, dtype=torch.float64))
    return randomize_parameters(decoder)


class TestDecoderStack:
    @pytest.mark.parametrize("pieces", PIECES, ids=str)
    @pytest.mark.parametrize("options", DECODER_OPTIONS, ids=str)
    def test_pieces_give_what_the_whole_gives(self, pieces: tuple[int, ...], options: dict[str, Any]) -> None:
        decoder, cache = build_decoder(**options), new_cache(2)
        time_dim = 1 if options.get("batch_first") else 0
        tgt, memory = random_tensor(LENGTH, BATCH, EMBED_DIM), random_tensor(MEMORY_LEN, BATCH, EMBED_DIM, seed=1)
        tgt, memory = (x.transpose(0, time_dim) for x in (tgt, memory))
        tgt_padding, memory_padding = draw_mask(BATCH, LENGTH), draw_mask(BATCH, MEMORY_LEN, seed=1)
        tgt_padding[0, 0] = True  # the first place may look at no key at all
        tgt_mask, memory_mask = ~masks.causal(LENGTH), draw_mask(LENGTH, MEMORY_LEN, seed=4)
        paddings: dict[str, Any] = {"memory_key_padding_mask": memory_padding}
        whole = decoder(tgt, memory, tgt_mask, memory_mask, tgt_padding, **paddings)
        assert whole.isfinite().all()
        for part in spans(pieces):
            piece = decoder(
                tgt.narrow(time_dim, part.start, part.stop - part.start),
                memory,
                tgt_mask[part, : part.stop],
                memory_mask[part],
                tgt_padding[:, : part.stop],
                **paddings,
                cache=cache,
            )
            assert_close(piece, whole.narrow(time_dim, part.start, part.stop - part.start))
        assert [layer.length for layer in cache] == [LENGTH, LENGTH]

    def test_a_step_multiplies_one_token_with_the_weights_however_many_came_before(self) -> None:
        """All products with a weight matrix are ``addmm``; the attention's own products are not."""
        decoder, cache = build_decoder(), new_cache(2)
        memory, counts = random_tensor(MEMORY_LEN, BATCH, EMBED_DIM, seed=1), []
        for seed in range(9):
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                decoder(random_tensor(1, BATCH, EMBED_DIM, seed=seed), memory, cache=cache)
            counts.append(counter.get_flop_counts()["Global"][torch.ops.aten.addmm])
        # self-attention: 3 in, 1 out; cross-attention: query in, 1 out; feed-forward: up and down
        weights_of_a_layer = (4 + 2) * EMBED_DIM**2 + 2 * EMBED_DIM * 13
        assert counts[1:] == [2 * 2 * BATCH * weights_of_a_layer] * 8
        assert counts[0] == counts[1] + 2 * 2 * BATCH * MEMORY_LEN * 2 * EMBED_DIM**2  # keys and values of the memory


# --- searches --------------------------------------------------------------------------------------------------------

PAD, START, END = 0, 1, 2
NEVER = -math.inf


@dataclass
class Language:
    """Logits for whatever has been said so far: drawn once for every beginning, and nothing else to know.

    Args:
        seed: Where the logits start.
        vocab_size: Number of tokens, padding, start and end included.
        levels: 0 for normal numbers; otherwise that many whole numbers, so that many logits are equal. One token lies
            so far above them that log_softmax rounds nothing: sums that are equal are so in any order.
        dtype: Of the logits.
    """

    seed: int
    vocab_size: int
    levels: int = 0
    dtype: torch.dtype = torch.float64

    def logits(self, said: tuple[int, ...]) -> Tensor:
        number = 0
        for token in said:
            number = number * (self.vocab_size + 1) + token + 1
        generator = torch.Generator().manual_seed(hash((self.seed, number)) % 2**63)
        if self.levels:
            drawn = -128 - torch.randint(self.levels, (self.vocab_size,), generator=generator)
            above = int(torch.randint(2 * self.vocab_size, (), generator=generator))
            drawn[above if above < self.vocab_size else PAD] = 0  # padding is never said: then the others are equal
            return drawn.to(self.dtype)
        return (2 * torch.randn(self.vocab_size, generator=generator, dtype=torch.float64)).to(self.dtype)

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = [self.logits(tuple(row)) for row in token_ids.tolist()]
        return torch.stack(rows) if rows else torch.zeros(0, self.vocab_size, dtype=self.dtype)

    def log_probs(self, said: tuple[int, ...]) -> list[float]:
        """Log-probabilities of the next token; padding is never said."""
        result: list[float] = self.logits(said).log_softmax(dim=-1).tolist()
        return [NEVER if token == PAD else x for token, x in enumerate(result)]


@dataclass(frozen=True)
class Said:
    """A hypothesis of the slow searches."""

    tokens: tuple[int, ...]
    log_prob: float

    @property
    def has_ended(self) -> bool:
        return self.tokens[-1:] == (END,)

    def score(self, length_penalty: float) -> float:
        return self.log_prob / math.pow((5 + len(self.tokens)) / 6, length_penalty)


def continuations(language: Language, prefix: tuple[int, ...], said: Said) -> list[Said]:
    step = language.log_probs(prefix + said.tokens)
    return [Said((*said.tokens, token), said.log_prob + x) for token, x in enumerate(step) if x > NEVER]


def say_everything(language: Language, prefix: tuple[int, ...], max_len: int) -> list[Said]:
    """List all that can be said: what ends, and what is cut off at max_len."""
    finished, growing = [], [Said((), 0.0)]
    for _ in range(max_len):
        growing = [longer for said in growing for longer in continuations(language, prefix, said)]
        finished += [said for said in growing if said.has_ended]
        growing = [said for said in growing if not said.has_ended]
    return finished + growing


def slow_greedy(language: Language, prefix: tuple[int, ...], max_len: int) -> tuple[int, ...]:
    """Say the likeliest token, of equals the first, until the end is said."""
    said: tuple[int, ...] = ()
    while len(said) < max_len and said[-1:] != (END,):
        log_probs = language.log_probs(prefix + said)
        said += (log_probs.index(max(log_probs)),)
    return said


def slow_beam_search(
    language: Language, prefix: tuple[int, ...], beam_size: int, max_len: int, length_penalty: float
) -> Said:
    """Search as the docstring says, with lists, to the very end."""
    beam = [Said((), 0.0)]
    for _ in range(max_len):
        ended = [said for said in beam if said.has_ended]
        longer = []
        for said in beam:
            if not said.has_ended:
                longer += sorted(continuations(language, prefix, said), key=lambda x: -x.log_prob)  # stable: by token
        beam = ended + sorted(longer, key=lambda x: -x.log_prob)[: beam_size - len(ended)]
    return max(beam, key=lambda x: x.score(length_penalty))  # the first of equals


def strip(row: Tensor) -> tuple[int, ...]:
    """Cut off the padding, which is at the end only."""
    said = [x for x in row.tolist() if x != PAD]
    assert row.tolist()[: len(said)] == said
    return tuple(said)


def greedy(language: Callable[[Tensor], Tensor], starts: Sequence[Sequence[int]], max_len: int) -> Tensor:
    return greedy_decode(language, torch.tensor(starts), Ending(max_len, END, PAD))


def search(
    language: Callable[[Tensor], Tensor], starts: Sequence[Sequence[int]], beam_size: int, max_len: int, **options: Any
) -> tuple[Tensor, Tensor]:
    return beam_search(language, torch.tensor(starts), Ending(max_len, END, PAD), beam_size=beam_size, **options)


SEEDS = st.integers(0, 2**31)
PENALTIES = st.sampled_from([0.0, 0.6, 1.0, 3.0])


class TestGreedyDecode:
    @settings(deadline=None, max_examples=50)
    @given(seed=SEEDS, vocab_size=st.integers(3, 6), levels=st.sampled_from([0, 2]), max_len=st.integers(1, 6))
    def test_every_token_is_the_likeliest_and_of_equals_the_least(
        self, seed: int, vocab_size: int, levels: int, max_len: int
    ) -> None:
        language = Language(seed, vocab_size, levels)
        starts = [(START,), (vocab_size - 1,)]
        result = greedy(language, starts, max_len)
        expected = [slow_greedy(language, start, max_len) for start in starts]
        assert [strip(row) for row in result] == expected
        assert result.shape == (2, max(map(len, expected)))

    def test_it_asks_no_more_once_all_rows_have_ended(self) -> None:
        calls = []

        def next_logits(token_ids: Tensor) -> Tensor:
            calls.append(token_ids.tolist())
            likeliest = torch.where(token_ids[:, -1] == 3, END, 3)  # 3, then the end
            return torch.nn.functional.one_hot(likeliest, 4).double()

        result = greedy(next_logits, [[START], [3]], max_len=50)
        assert result.tolist() == [[3, END], [END, PAD]]
        assert calls == [[[START], [3]], [[START, 3], [3, END]]]

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
    def test_ids_keep_their_dtype(self, dtype: torch.dtype) -> None:
        prefix = torch.tensor([[START, 3]], dtype=dtype)
        assert greedy_decode(Language(0, 5), prefix, Ending(3, END, PAD)).dtype == dtype
        assert beam_search(Language(0, 5), prefix, Ending(3, END, PAD), beam_size=2)[0].dtype == dtype

    def test_padding_is_never_chosen(self) -> None:
        def next_logits(token_ids: Tensor) -> Tensor:
            return torch.tensor([9.0, 0.0, 1.0, 2.0]).expand(len(token_ids), 4)

        assert greedy(next_logits, [[START]], max_len=3).tolist() == [[3, 3, 3]]
        for length_penalty in (0.0, 9.0):
            token_ids, _ = search(next_logits, [[START]], beam_size=3, max_len=3, length_penalty=length_penalty)
            assert token_ids.tolist() == ([[3, 3, 3]] if length_penalty else [[END]])


class TestBeamSearch:
    @settings(deadline=None, max_examples=40)
    @given(seed=SEEDS, vocab_size=st.integers(3, 5), max_len=st.integers(1, 4), length_penalty=PENALTIES)
    def test_a_beam_that_holds_everything_finds_the_best_of_all(
        self, seed: int, vocab_size: int, max_len: int, length_penalty: float
    ) -> None:
        language = Language(seed, vocab_size)
        everything = say_everything(language, (START,), max_len)
        best = max(everything, key=lambda said: said.score(length_penalty))
        token_ids, scores = search(
            language, [[START]], beam_size=len(everything), max_len=max_len, length_penalty=length_penalty
        )
        assert strip(token_ids[0]) == best.tokens
        assert scores.tolist() == pytest.approx([best.score(length_penalty)], rel=1e-12)

    @settings(deadline=None, max_examples=80)
    @given(
        seed=SEEDS,
        vocab_size=st.integers(3, 7),
        levels=st.sampled_from([0, 2]),
        beam_size=st.integers(1, 6),
        max_len=st.integers(1, 6),
        length_penalty=PENALTIES,
    )
    def test_it_searches_as_described(
        self, seed: int, vocab_size: int, levels: int, beam_size: int, max_len: int, length_penalty: float
    ) -> None:
        language = Language(seed, vocab_size, levels)
        starts = [(START,), (vocab_size - 1, START), (START, vocab_size - 1)]
        for start in starts:
            expected = slow_beam_search(language, start, beam_size, max_len, length_penalty)
            token_ids, scores = search(language, [start], beam_size, max_len, length_penalty=length_penalty)
            assert strip(token_ids[0]) == expected.tokens
            assert token_ids.shape == (1, len(expected.tokens))
            assert scores.tolist() == pytest.approx([expected.score(length_penalty)], rel=1e-12)

    @settings(deadline=None, max_examples=40)
    @given(seed=SEEDS, levels=st.sampled_from([0, 2, 3]), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def test_one_hypothesis_is_greedy_decoding(self, seed: int, levels: int, dtype: torch.dtype) -> None:
        language = Language(seed, vocab_size=9, levels=levels, dtype=dtype)
        starts = [(start,) for start in range(1, 9)]
        token_ids, _ = search(language, starts, beam_size=1, max_len=7)
        assert torch.equal(token_ids, greedy(language, starts, max_len=7))

    @settings(deadline=None, max_examples=40)
    @given(seed=SEEDS, levels=st.sampled_from([0, 2]), beam_size=st.integers(1, 4), length_penalty=PENALTIES)
    def test_rows_of_a_batch_do_not_influence_one_another(
        self, seed: int, levels: int, beam_size: int, length_penalty: float
    ) -> None:
        language, starts = Language(seed, 6, levels), [(start,) for start in range(1, 6)]
        options: dict[str, Any] = {"beam_size": beam_size, "max_len": 5, "length_penalty": length_penalty}
        token_ids, scores = search(language, starts, **options)
        for start, row, score in zip(starts, token_ids, scores, strict=True):
            alone, alone_score = search(language, [start], **options)
            assert strip(row) == strip(alone[0])
            assert score == alone_score[0]
        assert token_ids.size(1) == max(len(strip(row)) for row in token_ids)

    @settings(deadline=None, max_examples=40)
    @given(seed=SEEDS, beam_size=st.integers(2, 5))
    def test_what_remembers_rows_is_told_where_each_goes_on_from(self, seed: int, beam_size: int) -> None:
        language, starts = Language(seed, 6), [(start,) for start in range(1, 6)]
        rows: list[list[int]] = [list(start) for start in starts for _ in range(beam_size)]

        def next_logits(token_ids: Tensor) -> Tensor:
            for row, token in zip(rows, token_ids[:, -1].tolist(), strict=True):
                if token_ids.size(1) > 1:
                    row.append(token)
            assert rows == token_ids.tolist()
            return language(token_ids)

        def reorder(parents: Tensor) -> None:
            assert torch.equal(parents // beam_size, torch.arange(len(rows)) // beam_size)  # of the same sample
            rows[:] = [list(rows[parent]) for parent in parents.tolist()]

        token_ids, _ = search(next_logits, starts, beam_size, max_len=6, reorder=reorder)
        assert torch.equal(token_ids, search(language, starts, beam_size, max_len=6)[0])

    def test_an_ended_hypothesis_is_kept_while_others_grow(self) -> None:
        """The end at once has 0.4; token 3 has 0.6 but spreads thin afterwards."""
        first, later = [0.0, 0.0, 0.4, 0.6], [0.0, 0.4, 0.3, 0.3]

        def next_logits(token_ids: Tensor) -> Tensor:
            rows = [first if len(row) == 1 else later for row in token_ids.tolist()]
            return torch.tensor(rows, dtype=torch.float64).log()

        token_ids, scores = search(next_logits, [[START]], beam_size=2, max_len=5, length_penalty=0.0)
        assert token_ids.tolist() == [[END]]
        assert scores.tolist() == pytest.approx([math.log(0.4)])
        assert greedy(next_logits, [[START]], max_len=2).tolist() == [[3, START]]

    def test_it_asks_no_more_when_nothing_can_overtake_the_best(self) -> None:
        calls = []

        def next_logits(token_ids: Tensor) -> Tensor:
            calls.append(token_ids.size(1))
            return torch.tensor([0.0, 0.01, 0.9, 0.09]).log().expand(len(token_ids), 4)

        token_ids, _ = search(next_logits, [[START]] * 3, beam_size=2, max_len=50, length_penalty=0.0)
        assert token_ids.tolist() == [[END]] * 3
        assert calls == [1]

    def test_the_length_penalty_decides_between_short_and_long(self) -> None:
        def next_logits(token_ids: Tensor) -> Tensor:
            ends = torch.tensor([0.0, 0.0, 0.5, 0.5])
            return torch.where(token_ids[:, -1:] == 3, torch.tensor([0.0, 0.0, 0.7, 0.3]), ends).log()

        short, long = math.log(0.5), math.log(0.5 * 0.7)
        alpha = math.log(long / short) / math.log(7 / 6)  # where both score the same
        for length_penalty, expected in ((alpha * 0.99, [[END]]), (alpha * 1.01, [[3, END]])):
            found, _ = search(next_logits, [[START]], beam_size=3, max_len=2, length_penalty=length_penalty)
            assert found.tolist() == expected

    def test_beams_may_outnumber_all_there_is_to_say(self) -> None:
        token_ids, scores = search(Language(3, vocab_size=3), [[START]] * 2, beam_size=50, max_len=2)
        best = max(say_everything(Language(3, 3), (START,), 2), key=lambda said: said.score(0.6))
        assert [strip(row) for row in token_ids] == [best.tokens] * 2
        assert scores.isfinite().all()

    def test_empty_places_crowd_no_hypothesis_out(self) -> None:
        """Three tokens leave two of five places empty, one of them after an end; the fourth of the next step wins."""
        after_start, after_one = [0.0, 0.3, 0.4, 0.3], [0.0, 0.5, 0.0, 0.5]

        def next_logits(token_ids: Tensor) -> Tensor:
            after_two = [
                [0.0, 0.0, 1.0, 0.0] if row[1:] == [3, 3] else [0.0, 0.3, 0.4, 0.3] for row in token_ids.tolist()
            ]
            steps = [[after_start] * len(token_ids), [after_one] * len(token_ids), after_two]
            return torch.tensor(steps[token_ids.size(1) - 1]).log()

        token_ids, _ = search(next_logits, [[START]], beam_size=5, max_len=3, length_penalty=9.0)
        assert token_ids.tolist() == [[3, 3, END]]

    def test_impossible_tokens_are_not_said(self) -> None:
        def next_logits(token_ids: Tensor) -> Tensor:
            return torch.tensor([NEVER, NEVER, NEVER, 0.0]).expand(len(token_ids), 4)

        for beam_size in (1, 2, 5):
            token_ids, scores = search(next_logits, [[START]], beam_size, max_len=3)
            assert token_ids.tolist() == [[3, 3, 3]]
            assert scores.tolist() == [0.0]

    def test_an_empty_batch_has_nothing_to_say(self) -> None:
        nothing = torch.zeros(0, 1, dtype=torch.int64)
        assert greedy_decode(Language(0, 5), nothing, Ending(3, END, PAD)).shape == (0, 0)
        token_ids, scores = beam_search(Language(0, 5), nothing, Ending(3, END, PAD), beam_size=2)
        assert token_ids.shape == (0, 0)
        assert scores.shape == (0,)

    def test_the_score_is_the_formula(self) -> None:
        log_probs, lengths = torch.tensor([[-3.0, -5.0]], dtype=torch.float64), torch.tensor([[1, 13]])
        assert hypothesis_score(log_probs, lengths, 0.0).tolist() == [[-3.0, -5.0]]
        assert_close(hypothesis_score(log_probs, lengths, 2.0), torch.tensor([[-3.0, -5.0 / 9]], dtype=torch.float64))
        assert_close(hypothesis_score(log_probs, 13, 0.5), log_probs / math.sqrt(3))

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"beam_size": 0}, "beam_size must be greater than 0, got beam_size=0"),
            ({"length_penalty": -0.1}, "length_penalty must be finite and not negative .* got -0.1"),
            ({"length_penalty": math.inf}, "length_penalty must be finite and not negative .* got inf"),
            ({"length_penalty": math.nan}, "length_penalty must be finite and not negative .* got nan"),
        ],
    )
    def test_bad_arguments_are_named(self, arguments: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            search(Language(0, 5), [[START]], **{"beam_size": 2, "max_len": 3, **arguments})


@pytest.mark.parametrize("checked", [Ending(3), Sampling()], ids=["Ending", "Sampling"])
def test_what_was_checked_stays_as_it_is(checked: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(checked, next(iter(vars(checked))), -1)


class TestEnding:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ((0, END, PAD), "max_len must be greater than 0, got max_len=0"),
            ((3, PAD, PAD), "end_id must differ from pad_id, which is never chosen, got 0 for both"),
            ((3, END), "pad_id must be given where end_id is, to fill up rows that end, got end_id=2"),
        ],
    )
    def test_bad_arguments_are_named(self, arguments: tuple[int, ...], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            Ending(*arguments)

    def test_without_an_end_token_every_row_is_as_long_as_it_may_be(self) -> None:
        starts = torch.tensor([[START], [3]])
        token_ids = greedy_decode(Language(0, 5), starts, Ending(4))
        assert token_ids.shape == (2, 4)
        found, _ = beam_search(Language(0, 5), starts, Ending(4), beam_size=1)
        assert torch.equal(found, token_ids)
