"""Attention in tiles: the textbook's numbers and gradients, in less memory, and without what nobody may see."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode

import scratch
from equivalence_tests.instruments.differences import compare_errors
from equivalence_tests.instruments.side_by_side import assert_equal, outputs_and_gradients, random_tensor
from scratch import tiling
from scratch.masks import Visible
from scratch.paths import chosen_kernel, switched_on
from scratch.sdpa import textbook_attention
from scratch.tiling import tiled_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut short sequences into many tiles of 6 masked rows and 5 columns, and take over from the first score on."""
    monkeypatch.setattr(tiling, "ROWS", 12)
    monkeypatch.setattr(tiling, "MASKED_ROWS", 6)
    monkeypatch.setattr(tiling, "SCORES_AT_ONCE", 2 * 12 * 5)  # two heads at once without a mask, four with one
    monkeypatch.setattr(tiling, "COLUMNS", 5)
    monkeypatch.setattr(tiling, "TILES_FROM", 1)


SMALL_TILES = pytest.mark.usefixtures("small_tiles")


def heads(query_len: int = 17, key_len: int = 23, spread: float = 1.0, **shapes: tuple[int, ...]) -> dict[str, Any]:
    """Give q, k and v of batch 2, heads 3, head_dim 7 and value width 11, the scores about ``spread`` apart."""
    usual = {"q": (2, 3, query_len, 7), "k": (2, 3, key_len, 7), "v": (2, 3, key_len, 11)}
    drawn = {name: random_tensor(*shapes.get(name, shape), seed=i) for i, (name, shape) in enumerate(usual.items())}
    return drawn | {"q": drawn["q"] * spread}


def textbook(
    q: Tensor, k: Tensor, v: Tensor, score_bias: Tensor | None = None, diagonal: int | None = None, scale: float = 1.0
) -> Tensor:
    """Compute what ``tiled_attention`` does with all scores at once."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) if 1 < x.size(1) < q.size(1) else x for x in (k, v))
    if score_bias is not None and score_bias.dtype == torch.bool:
        score_bias = scratch.masks.to_score_bias(score_bias, q.dtype)
    if diagonal is not None:
        may_attend = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril(diagonal)
        causal = scratch.masks.to_score_bias(may_attend, q.dtype)
        score_bias = causal if score_bias is None else score_bias + causal
    return textbook_attention(q, k, v, Visible(score_bias), scale, dropout_p=0.0)


def assert_as_the_textbook(inputs: dict[str, Tensor], **arguments: Any) -> None:
    actual = outputs_and_gradients(tiled_attention, inputs, **arguments)
    assert_equal(actual, outputs_and_gradients(textbook, inputs, **arguments))


def blind(may_attend: Tensor) -> Tensor:
    """Hide all keys from the third query and from the last six, a whole tile."""
    may_attend = may_attend.clone()
    may_attend[..., 2, :] = False
    may_attend[..., -6:, :] = False
    return may_attend


SOME = random_tensor(17, 23, seed=5) > -0.5
WINDOW = scratch.masks.sliding_window(17, 23, window=3)
HOLE = torch.ones(17, 23, dtype=torch.bool).index_fill(1, torch.arange(5, 16), False)
MASKS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "scaled": {"scale": -0.3},
    "causal": {"diagonal": 0},
    "causal, scaled": {"diagonal": 0, "scale": 0.1},
    "causal, lower right": {"diagonal": 6},
    "causal, with blind rows": {"diagonal": -4},
    "bool": {"score_bias": SOME},
    "bool for each head": {"score_bias": random_tensor(2, 3, 17, 23, seed=6) > 0},
    "bool for all samples": {"score_bias": random_tensor(3, 17, 23, seed=6) > 0},
    "bool with blind rows": {"score_bias": blind(SOME)},
    "bool and causal": {"score_bias": SOME, "diagonal": 1},
    "all may look": {"score_bias": torch.ones(17, 23, dtype=torch.bool)},
    "window": {"score_bias": WINDOW},
    "hole": {"score_bias": HOLE},
    "padding": {"score_bias": (torch.arange(23) < torch.tensor([9, 21])[:, None])[:, None, None]},
    "one for all keys": {"score_bias": random_tensor(17, 1, seed=8) > 0},
    "float": {"score_bias": random_tensor(17, 23, seed=7)},
    "float for each head": {"score_bias": random_tensor(1, 3, 17, 23, seed=7)},
    "float for each sample": {"score_bias": random_tensor(2, 1, 17, 23, seed=7)},
    "float and causal": {"score_bias": random_tensor(17, 23, seed=7), "diagonal": 0},
    "float for keys": {"score_bias": random_tensor(23, seed=7)},
    "float far from 0": {"score_bias": 50 + 9 * random_tensor(23, seed=7)},
    "float of -inf": {"score_bias": torch.zeros(17, 23).double().masked_fill(~blind(SOME), -math.inf)},
    "float of the least number": {
        "score_bias": torch.zeros(17, 23).double().masked_fill(~blind(SOME), torch.finfo(torch.float64).min)
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    "heads": {},
    "grouped": {"k": (2, 1, 23, 7), "v": (2, 1, 23, 11)},
    "one sample of keys": {"k": (1, 3, 23, 7), "v": (1, 3, 23, 11)},
    "one head of values": {"v": (2, 1, 23, 11)},
    "equal widths": {"v": (2, 3, 23, 7)},
}


@SMALL_TILES
@pytest.mark.parametrize(
    "far", ["one query", "one key", "all, by a scale", "many features", "a bias for all", "a bias for each head"]
)
def test_scores_whose_exponentials_overflow_are_noticed_wherever_they_are(far: str) -> None:
    inputs, arguments = heads(), dict[str, Any]()
    match far:
        case "one query":
            inputs["q"][1, 2, 4] *= 1000
        case "one key":
            inputs["q"] *= 30
            inputs["k"][0, 1, 20] *= 30
        case "all, by a scale":
            arguments["scale"] = 500.0
        case "many features":
            inputs = {name: torch.full((1, 1, 1, 64), 4.0, dtype=torch.float64) for name in inputs}
        case "a bias for all":
            arguments["score_bias"] = 1000 * random_tensor(17, 23, seed=7)
        case _:
            arguments["score_bias"] = 1000 * random_tensor(2, 3, 17, 23, seed=7)
    assert_as_the_textbook(inputs, **arguments)


@SMALL_TILES
@pytest.mark.parametrize("spread", [1.0, 30.0], ids=["scores near 0", "scores far from 0"])
class TestTextbook:
    """Values and all gradients, within 1e-12 of the largest."""

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("mask", MASKS)
    def test_masks(self, mask: str, shape: str, spread: float) -> None:
        assert_as_the_textbook(heads(spread=spread, **SHAPES[shape]), **MASKS[mask])

    @pytest.mark.parametrize("mask", ["no mask", "causal, scaled", "bool", "padding", "float", "float for keys"])
    def test_grouped_heads(self, mask: str, spread: float) -> None:
        for query_heads, key_heads in ((6, 2), (6, 3), (7, 1), (16, 2)):
            shapes: Any = {"q": (2, query_heads, 17, 7), "k": (2, key_heads, 23, 7), "v": (2, key_heads, 23, 11)}
            assert_as_the_textbook(heads(spread=spread, **shapes), **MASKS[mask])

    def test_a_mask_for_each_of_grouped_heads(self, spread: float) -> None:
        shapes: Any = {"q": (2, 6, 17, 7), "k": (2, 2, 23, 7), "v": (2, 2, 23, 11)}
        for lead in ((2, 6), (1, 6), (2, 1)):
            score_bias = random_tensor(*lead, 17, 23, seed=9)
            assert_as_the_textbook(heads(spread=spread, **shapes), score_bias=score_bias)
            assert_as_the_textbook(heads(spread=spread, **shapes), score_bias=score_bias > 0)

    def test_two_heads_have_a_bias_each(self, spread: float) -> None:
        shapes: Any = {"q": (2, 2, 17, 7), "k": (2, 2, 23, 7), "v": (2, 2, 23, 11)}
        assert_as_the_textbook(heads(spread=spread, **shapes), score_bias=random_tensor(1, 2, 17, 23, seed=9))

    @pytest.mark.parametrize("diagonal", [None, 0, 3, -3])
    def test_lengths_around_the_borders_of_tiles(self, diagonal: int | None, spread: float) -> None:
        for query_len in (1, 5, 6, 7, 11, 12, 13, 24):
            for key_len in (1, 4, 5, 6, 10, 11):
                assert_as_the_textbook(heads(query_len, key_len, spread), diagonal=diagonal)

    @pytest.mark.parametrize("threads", [1, 2, 4, 7])
    def test_heads_are_shared_out_among_threads(
        self, monkeypatch: pytest.MonkeyPatch, threads: int, spread: float
    ) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        assert_as_the_textbook(heads(spread=spread), score_bias=random_tensor(2, 3, 17, 23, seed=6))

    def test_fewer_dimensions(self, spread: float) -> None:
        for lead in (0, (0, 0)):
            inputs: dict[str, Any] = {name: x[lead] for name, x in heads(spread=spread).items()}
            whole = tiled_attention(**heads(spread=spread), diagonal=0)
            assert_equal({"output": tiled_attention(**inputs, diagonal=0)}, {"output": whole[lead]})

    def test_as_many_keys_as_features(self, spread: float) -> None:
        assert_as_the_textbook(heads(spread=spread, q=(2, 3, 17, 23), k=(2, 3, 23, 23)))

    def test_any_layout_in_memory(self, spread: float) -> None:
        inputs = {name: x.transpose(-1, -2).contiguous().transpose(-1, -2) for name, x in heads(spread=spread).items()}
        assert_as_the_textbook(inputs, diagonal=0)
        inputs = {name: x.transpose(0, 2).contiguous().transpose(0, 2) for name, x in heads(spread=spread).items()}
        assert_as_the_textbook(inputs, diagonal=0)


class TestTilesAsTheyAre:
    """With the sizes that are used, which the small ones stand for elsewhere."""

    @pytest.mark.parametrize("spread", [0.1, 3.0])
    @pytest.mark.parametrize("diagonal", [None, 0, 10])
    def test_they_compute_the_textbook(self, diagonal: int | None, spread: float) -> None:
        rows, columns = tiling.ROWS, tiling.COLUMNS
        for query_len, key_len in ((rows + 1, columns + 1), (rows, 2 * columns - 1)):
            shapes: Any = {"q": (1, 2, query_len, 5), "k": (1, 1, key_len, 5), "v": (1, 1, key_len, 3)}
            assert_as_the_textbook(heads(spread=spread, **shapes), diagonal=diagonal)

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_they_round_no_worse_than_the_textbook_of_torch(self, dtype: torch.dtype, is_causal: bool) -> None:
        names = ("query", "key", "value")
        inputs: dict[str, Any] = {
            name: random_tensor(1, 2, 700, 16, seed=i, dtype=dtype) for i, name in enumerate(names)
        }
        assert chosen_kernel(inputs["query"], inputs["key"], inputs["value"], Visible(), 0.0) is tiled_attention
        ours = outputs_and_gradients(scratch.scaled_dot_product_attention, inputs, is_causal=is_causal)
        with sdpa_kernel(SDPBackend.MATH):
            theirs, exact = (
                outputs_and_gradients(F.scaled_dot_product_attention, given, is_causal=is_causal)
                for given in (inputs, {name: x.double() for name, x in inputs.items()})
            )
        for name, expected in exact.items():
            actual, reference = ours[name], theirs[name]
            assert actual is not None
            assert reference is not None
            assert expected is not None
            ratio = compare_errors(actual, reference, expected)
            assert ratio.passed, f"{name}: {ratio}"
            assert actual.dtype == dtype


@SMALL_TILES
class TestNumbersThatAreNone:
    @pytest.mark.parametrize("mask", ["bool with blind rows", "float of -inf", "causal, with blind rows"])
    @pytest.mark.parametrize("spread", [1.0, 30.0])
    def test_rows_that_see_no_key_give_0_and_gradient_0(self, mask: str, spread: float) -> None:
        inputs = heads(spread=spread)
        row = 2
        for name, x in outputs_and_gradients(tiled_attention, inputs, **MASKS[mask]).items():
            assert x is not None
            assert x.isfinite().all()
            if name in ("output 0", "gradient of q"):
                assert (x[..., row, :] == 0).all()
                assert (x[..., 9, :] != 0).all()

    @pytest.mark.parametrize("mask", ["no mask", "causal", "bool with blind rows", "float"])
    def test_a_nan_in_a_query_stays_in_its_row(self, mask: str) -> None:
        inputs = heads()
        inputs["q"][0, 1, 2, 3] = math.nan
        output = tiled_attention(**inputs, **MASKS[mask])
        expected = torch.zeros(2, 3, 17, 11, dtype=torch.bool)
        expected[0, 1, 2] = True
        assert torch.equal(output.isnan(), expected)

    def test_a_nan_in_a_key_or_value_reaches_those_who_see_it(self) -> None:
        for name in ("k", "v"):
            inputs = heads(23)
            inputs[name][0, 1, 7, 3] = math.nan
            output = tiled_attention(**inputs, diagonal=0).isnan()
            assert output[0, 1, 7:].any(-1).all()
            assert not output[0, 1, :5].any()  # the first tile does not read it
            assert not output[0, 0].any()

    def test_infinite_scores_are_nan_as_in_the_textbook(self) -> None:
        inputs = heads()
        inputs["q"][0, 1, 2] = math.inf
        assert torch.equal(tiled_attention(**inputs).isnan(), textbook(**inputs).isnan())

    def test_scores_that_would_overflow_do_not(self) -> None:
        inputs: dict[str, Any] = {name: x.float() for name, x in heads(spread=1e4).items()}
        exact: dict[str, Any] = {name: x.double() for name, x in inputs.items()}
        actual, expected = tiled_attention(**inputs), textbook(**exact)
        assert (actual - expected).abs().max() < 1e-3

    def test_weights_that_no_sum_would_notice_are_0_and_none_is_denormal(self) -> None:
        """Denormal numbers would make the products a hundred times slower."""
        exponents = torch.arange(-150.0, 1.0)
        tiling._drop_negligible(exponents)
        weights = exponents.exp2()
        assert (weights[weights > 0] >= torch.finfo(torch.float32).tiny ** 0.5).all()
        assert torch.equal(weights[-60:], torch.arange(-59.0, 1.0).exp2())

    def test_a_bias_of_the_least_number_hides_no_more_than_it_does_in_the_textbook(self) -> None:
        """A row that is hidden by it throughout is the mean of the values, as masks of some libraries have it."""
        inputs = heads()
        bias = torch.full((17, 23), torch.finfo(torch.float64).min, dtype=torch.float64)
        output = tiled_attention(**inputs, score_bias=bias)
        assert_equal({"output": output}, {"output": inputs["v"].mean(-2, keepdim=True).expand(2, 3, 17, 11).clone()})


class Watch(TorchDispatchMode):
    """Notes the elements of the largest tensor, the multiplications in products, and how often operations run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0
        self.products = 0
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ in ("bmm.out", "bmm.default", "baddbmm_.default"):
            self.products += args[-2].numel() * args[-1].size(-1)
        self.calls[func.__name__] = self.calls.get(func.__name__, 0) + 1
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return result


def scores_computed(query_len: int, key_len: int, backward: bool = False, **arguments: Any) -> float:
    """Count the scores that are computed for each head, by the products of a head_dim of 8."""
    q, k, v = (torch.ones(1, 1, length, 8, requires_grad=True) for length in (query_len, key_len, key_len))
    with Watch() as forward:
        output = tiled_attention(q, k, v, **arguments)
    with Watch() as both:
        output.sum().backward()
    return both.products / 8 / 5 if backward else forward.products / 8 / 2


@SMALL_TILES
@pytest.mark.parametrize("backward", [False, True])
class TestWhatIsComputed:
    """Tiles have 6 rows, as there is a mask, and 5 columns."""

    def test_everything_without_a_mask(self, backward: bool) -> None:
        assert scores_computed(12, 20, backward) == 12 * 20

    def test_causal_attention_ends_with_the_last_key_that_its_rows_see(self, backward: bool) -> None:
        assert scores_computed(18, 20, backward, diagonal=0) == 6 * (6 + 12 + 18)
        assert scores_computed(18, 20, backward, diagonal=2) == 6 * (8 + 14 + 20)
        assert scores_computed(18, 20, backward, diagonal=-7) == 6 * (0 + 5 + 11)
        assert scores_computed(18, 20, backward, diagonal=-18) == 0

    def test_a_window_begins_and_ends_with_the_keys_that_its_rows_see(self, backward: bool) -> None:
        window = scratch.masks.sliding_window(18, window=3)
        assert scores_computed(18, 18, backward, score_bias=window) == 6 * (8 + 10 + 8)
        as_float = scratch.masks.to_score_bias(window)
        assert scores_computed(18, 18, backward, score_bias=as_float) == 6 * (8 + 10 + 8)
        assert scores_computed(18, 18, backward, score_bias=window, diagonal=0) == 6 * (6 + 8 + 8)

    def test_a_hole_between_keys_is_left_out_where_it_fills_a_tile(self, backward: bool) -> None:
        may_attend = torch.ones(6, 20, dtype=torch.bool)
        may_attend[:, 4:15] = False  # the tiles are 0 ... 4, 5 ... 9, 10 ... 14 and 15 ... 19
        assert scores_computed(6, 20, backward, score_bias=may_attend) == 6 * (5 + 5)

    def test_padding_is_left_out_where_it_is_that_of_all_samples(self, backward: bool) -> None:
        may_attend = torch.arange(20) < 13
        assert scores_computed(6, 20, backward, score_bias=may_attend) == 6 * 13


class TestMemory:
    def test_no_tensor_grows_with_the_square_of_the_length(self) -> None:
        largest = []
        for length in (1024, 2048):
            q, k, v = (torch.zeros(1, 2, length, 8, requires_grad=True) for _ in range(3))
            with Watch() as watch:
                tiled_attention(q, k, v, diagonal=0).sum().backward()
            largest.append(watch.largest)
        assert largest[1] <= 2 * largest[0]
        assert largest[1] < 2048 * 2048 / 4

    def test_keys_of_grouped_heads_are_not_repeated(self) -> None:
        q, k = torch.zeros(1, 16, 512, 64), torch.zeros(1, 2, 1024, 64)
        with Watch() as watch:
            tiled_attention(q, k, k)
        assert watch.largest < 16 * 1024 * 64
        assert k.numel() < watch.largest

    @SMALL_TILES
    def test_no_maximum_is_looked_for_where_scores_are_near_0(self) -> None:
        """It is the bound on the scores that spares the search, so at most one maximum each of q and of k."""
        calls = []
        for spread in (0.1, 30.0):
            with Watch() as watch:
                tiled_attention(**heads(spread=spread))
            calls.append(watch.calls)
        assert calls[0]["amax.default"] == 2
        assert calls[1]["amax.default"] > 2

    def test_the_same_call_gives_the_same_bits(self) -> None:
        inputs = heads(300, 700)
        first, second = (outputs_and_gradients(tiled_attention, inputs, diagonal=0) for _ in range(2))
        assert_equal(first, second, relative_bound=0)


@SMALL_TILES
class TestDerivatives:
    @pytest.mark.parametrize("mask", ["no mask", "bool with blind rows", "float", "causal"])
    def test_gradients_and_their_gradients_are_those_of_finite_differences(self, mask: str) -> None:
        inputs = tuple(x[0].requires_grad_() for x in heads(7, 11, 3.0).values())
        arguments: dict[str, Any] = {
            name: x[..., :7, :11] if isinstance(x, Tensor) else x for name, x in MASKS[mask].items()
        }

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return tiled_attention(q, k, v, scale=0.3, **arguments)

        assert torch.autograd.gradcheck(attend, inputs, check_batched_grad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)

    @pytest.mark.parametrize("mask", MASKS)
    def test_a_backward_that_is_differentiated_gives_the_same_gradients(self, mask: str) -> None:
        shapes: Any = {"q": (2, 3, 17, 7), "k": (2, 1, 23, 7), "v": (2, 1, 23, 11)}
        inputs = [x.requires_grad_() for x in heads(**shapes).values()]
        q, k, v = inputs
        gradients = []
        for create_graph in (False, True):
            output = tiled_attention(q, k, v, **MASKS[mask])
            found = torch.autograd.grad(output.square().sum(), inputs, create_graph=create_graph)
            assert all(x.requires_grad == create_graph for x in found)
            gradients.append({f"gradient {i}": x.detach() for i, x in enumerate(found)})
        assert_equal(gradients[0], gradients[1])

    def test_what_is_kept_for_the_backward_may_not_be_changed(self) -> None:
        q, k, v = (x.requires_grad_() for x in heads().values())
        bias = random_tensor(17, 23)
        output = tiled_attention(q, k, v, bias)
        bias.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.fixture
def taken() -> Iterator[list[int]]:
    """Note every call that goes to the tiles."""
    calls: list[int] = []

    def noted(*arguments: Any) -> Tensor:
        calls.append(len(calls))
        return tiled_attention(*arguments)

    with switched_on("cpu", noted):
        yield calls


def sdpa_inputs(query_len: int = 17, key_len: int = 23) -> dict[str, Any]:
    return dict(zip(("query", "key", "value"), heads(query_len, key_len).values(), strict=True))


def by_the_textbook(call: Any, inputs: dict[str, Tensor], **arguments: Any) -> dict[str, Tensor | None]:
    with sdpa_kernel(SDPBackend.MATH):
        return outputs_and_gradients(call, inputs, **arguments)


@SMALL_TILES
class TestFunction:
    """``scaled_dot_product_attention`` goes to the tiles, with all that it takes."""

    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"is_causal": True},
            {"scale": -0.3},
            {"attn_mask": SOME},
            {"attn_mask": random_tensor(3, 1, 23, seed=5)},
            {"attn_mask": causal_upper_left(17, 23)},
            {"attn_mask": causal_lower_right(17, 23)},
        ],
        ids=["plain", "causal", "scale", "bool", "float", "upper left", "lower right"],
    )
    def test_arguments(self, taken: list[int], arguments: dict[str, Any]) -> None:
        inputs = sdpa_inputs()
        expected = by_the_textbook(scratch.scaled_dot_product_attention, inputs, **arguments)
        assert not taken
        assert_equal(outputs_and_gradients(scratch.scaled_dot_product_attention, inputs, **arguments), expected)
        assert len(taken) == 1

    @pytest.mark.parametrize("key_heads", [(2, 2), (1, 1), (6, 6), (2, 1)])
    def test_grouped_heads(self, taken: list[int], key_heads: tuple[int, int]) -> None:
        of_keys, of_values = key_heads
        inputs = {"query": random_tensor(2, 6, 17, 7), "key": random_tensor(2, of_keys, 23, 7, seed=1)}
        inputs["value"] = random_tensor(2, of_values, 23, 11, seed=2)
        arguments: Any = {"enable_gqa": True, "is_causal": True}
        actual = outputs_and_gradients(scratch.scaled_dot_product_attention, inputs, **arguments)
        assert_equal(actual, by_the_textbook(scratch.scaled_dot_product_attention, inputs, **arguments))
        assert len(taken) == 1

    @pytest.mark.parametrize("dims", [2, 3])
    def test_fewer_dimensions(self, taken: list[int], dims: int) -> None:
        inputs = {name: x[(0,) * (4 - dims)] for name, x in sdpa_inputs().items()}
        actual = outputs_and_gradients(scratch.scaled_dot_product_attention, inputs, attn_mask=SOME)
        assert_equal(actual, by_the_textbook(scratch.scaled_dot_product_attention, inputs, attn_mask=SOME))
        assert len(taken) == 1

    @pytest.mark.parametrize(
        ("inputs", "arguments"),
        [
            ({name: x[None] for name, x in sdpa_inputs().items()}, {}),
            (sdpa_inputs(0), {}),
            (sdpa_inputs(17, 0), {}),
            (sdpa_inputs(), {"dropout_p": 0.3}),
            (sdpa_inputs(), {"attn_mask": random_tensor(17, 23).requires_grad_()}),
        ],
        ids=["5-D", "no query", "no key", "dropout", "learnt bias"],
    )
    def test_what_goes_by_the_textbook(
        self, taken: list[int], inputs: dict[str, Tensor], arguments: dict[str, Any]
    ) -> None:
        actual = outputs_and_gradients(scratch.scaled_dot_product_attention, inputs, **arguments)
        assert_equal(
            actual, by_the_textbook(scratch.scaled_dot_product_attention, inputs, **arguments), relative_bound=0
        )
        assert not taken

    def test_autocast_rounds_no_worse_than_the_textbook(self, taken: list[int]) -> None:
        inputs: dict[str, Any] = {name: x.float() for name, x in sdpa_inputs().items()}
        with torch.autocast("cpu", torch.bfloat16):
            ours = outputs_and_gradients(scratch.scaled_dot_product_attention, inputs)
            theirs = by_the_textbook(scratch.scaled_dot_product_attention, inputs)
        exact = by_the_textbook(scratch.scaled_dot_product_attention, sdpa_inputs())
        assert len(taken) == 1
        for name, expected in exact.items():
            actual, reference = ours[name], theirs[name]
            assert actual is not None
            assert reference is not None
            assert expected is not None
            assert actual.dtype == reference.dtype
            ratio = compare_errors(actual, reference, expected)
            assert ratio.passed, f"{name}: {ratio}"

    def test_a_bias_without_use_for_its_gradient_goes_to_the_tiles(self, taken: list[int]) -> None:
        with torch.no_grad():
            scratch.scaled_dot_product_attention(**sdpa_inputs(), attn_mask=random_tensor(17, 23).requires_grad_())
        assert taken


def test_inputs_shorter_than_512_are_rounded_as_by_torch() -> None:
    q = torch.randn(1, 2, 511, 8)
    assert chosen_kernel(q, q, q, Visible(), 0.0) is None


def test_short_sequences_go_by_the_textbook(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "TILES_FROM", 17 * 23)
    for query_len in (16, 17):
        assert not taken
        scratch.scaled_dot_product_attention(**sdpa_inputs(query_len))
    assert taken


def test_another_device_takes_over_once_it_has_a_kernel_and_no_mask_is_written_down() -> None:
    q = torch.empty(1, 2, 700, 16, device="meta")
    mask = torch.empty(700, 700, device="meta")
    assert chosen_kernel(q, q, q, Visible(), 0.0) is None
    with switched_on("meta", tiled_attention):
        assert chosen_kernel(q, q, q, Visible(), 0.0) is tiled_attention
        assert chosen_kernel(q, q, q, Visible(diagonal=0), 0.0) is tiled_attention
        assert chosen_kernel(q, q, q, Visible(mask), 0.0) is None
    assert chosen_kernel(q, q, q, Visible(), 0.0) is None


@SMALL_TILES
@pytest.mark.parametrize("without_heads", ["query", "key", "value"])
def test_one_of_the_three_may_come_without_heads(taken: list[int], without_heads: str) -> None:
    inputs = sdpa_inputs()
    inputs[without_heads] = inputs[without_heads][0, 0]
    expected = by_the_textbook(scratch.scaled_dot_product_attention, inputs)
    assert_equal(outputs_and_gradients(scratch.scaled_dot_product_attention, inputs), expected)
    assert len(taken) == 1


@pytest.mark.parametrize(("k_heads", "v_heads", "batch"), [(2, 4, 1), (4, 4, 0)])
def test_heads_that_do_not_pair_and_empty_batches_go_by_the_textbook(k_heads: int, v_heads: int, batch: int) -> None:
    q, k, v = (torch.empty(batch, number, 700, 16) for number in (4, k_heads, v_heads))
    assert chosen_kernel(q, k, v, Visible(), 0.0) is None
    if batch:
        assert chosen_kernel(q[0], k[0], v[0], Visible(), 0.0) is None


MODULE_MASKS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"attn_mask": ~scratch.masks.causal(17, 23)},
    "promised": {"attn_mask": ~scratch.masks.causal(17, 23), "is_causal": True},
    "float": {"attn_mask": random_tensor(17, 23, seed=5)},
    "for each head": {"attn_mask": random_tensor(6, 17, 23, seed=5) > 0},
    "padding": {"key_padding_mask": torch.arange(23) >= torch.tensor([9, 23])[:, None]},
    "all padding": {"key_padding_mask": torch.arange(23) >= torch.tensor([9, 0])[:, None]},
    "both": {
        "key_padding_mask": torch.arange(23) >= torch.tensor([9, 23])[:, None],
        "attn_mask": ~scratch.masks.causal(17, 23),
        "is_causal": True,
    },
}


@SMALL_TILES
class TestModule:
    """``MultiheadAttention`` goes to the tiles where it is asked for no weights."""

    @pytest.mark.parametrize(
        "options", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"v_head_dim": 5, "qk_head_dim": 3}]
    )
    @pytest.mark.parametrize("mask", MODULE_MASKS)
    def test_masks(self, taken: list[int], mask: str, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        module = scratch.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64, **options)
        inputs = {name: random_tensor(2, n, 12, seed=n) for name, n in (("query", 17), ("key", 23), ("value", 23))}
        arguments: Any = {"need_weights": False, **MODULE_MASKS[mask]}
        expected = by_the_textbook(module, inputs, **arguments)
        assert not taken
        assert_equal(outputs_and_gradients(module, inputs, **arguments), expected)
        assert len(taken) == 1

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_dtypes(self, taken: list[int], dtype: torch.dtype) -> None:
        module = scratch.MultiheadAttention(12, 3, dtype=dtype)
        x = random_tensor(17, 2, 12, dtype=dtype)
        output, _ = module(x, x, x, need_weights=False)
        assert output.dtype == dtype
        assert taken

    def test_weights_and_dropout_go_by_the_textbook(self, taken: list[int]) -> None:
        module, x = scratch.MultiheadAttention(12, 3, dropout=0.5, dtype=torch.float64), random_tensor(17, 2, 12)
        module(x, x, x, need_weights=False)
        module.eval()(x, x, x)
        assert not taken
        module(x, x, x, need_weights=False)
        assert taken


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scratch.scaled_dot_product_attention(x, x, x, is_causal=True) * 2


@SMALL_TILES
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch scripts derivatives
class TestTransforms:
    """Whoever transforms the operations gets the textbook, from which they all can be had."""

    x = random_tensor(2, 3, 17, 7)

    def test_they_were_tiles_without_a_transform(self, taken: list[int]) -> None:
        Twice()(self.x)
        assert taken

    def test_it_compiles(self, taken: list[int]) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(Twice(), fullgraph=True, backend="aot_eager")
        assert_equal(outputs_and_gradients(compiled, {"x": self.x}), by_the_textbook(Twice(), {"x": self.x}))
        assert not taken

    @pytest.mark.parametrize("strict", [True, False])
    def test_it_compiles_for_export(self, taken: list[int], strict: bool) -> None:
        length = {"x": {2: torch.export.Dim("length", min=2, max=99)}}
        exported = torch.export.export(Twice(), (self.x,), dynamic_shapes=length, strict=strict)
        longer = random_tensor(2, 3, 31, 7)
        assert not taken
        assert_equal({"output": exported.module()(longer)}, {"output": Twice()(longer)})

    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace(_method)?` is deprecated")
    def test_it_compiles_by_tracing(self, taken: list[int]) -> None:
        traced = torch.jit.trace(Twice(), self.x, check_trace=False)
        assert not taken
        assert_equal({"output": traced(self.x)}, {"output": Twice()(self.x)})

    def test_vmap_grad_and_jvp(self, taken: list[int]) -> None:
        whole = by_the_textbook(Twice(), {"x": self.x})["output 0"]
        assert_equal({"output": torch.func.vmap(Twice())(self.x)}, {"output": whole})
        torch.func.grad(lambda x: Twice()(x).sum())(self.x)
        torch.func.jvp(Twice(), (self.x,), (self.x,))
        assert not taken

    def test_forward_mode(self, taken: list[int]) -> None:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(self.x, self.x)
            assert torch.autograd.forward_ad.unpack_dual(Twice()(dual)).tangent is not None
        assert not taken

    def test_other_kinds_of_tensors(self, taken: list[int]) -> None:
        assert Twice()(self.x.to("meta")).shape == self.x.shape
        with torch._subclasses.FakeTensorMode() as mode:
            assert Twice()(mode.from_tensor(self.x)).shape == self.x.shape
        assert not taken

    def test_checkpointing_takes_tiles(self, taken: list[int]) -> None:
        def checkpointed(x: Tensor) -> Tensor:
            output = torch.utils.checkpoint.checkpoint(Twice(), x, use_reentrant=False)
            assert isinstance(output, Tensor)
            return output

        assert_equal(outputs_and_gradients(checkpointed, {"x": self.x}), by_the_textbook(Twice(), {"x": self.x}))
        assert len(taken) == 2
