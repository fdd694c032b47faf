"""Sizes and arguments that random draws seldom hit, each against torch; mutants of ``scratch`` called for them."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import scratch
from equivalence_tests.instruments.side_by_side import (
    assert_equal,
    outputs_and_gradients,
    random_tensor,
    with_same_weights,
)
from scratch import masks
from scratch.decoding import Ending, FixedCache, GrowingCache, LayerCache, _first_beams, beam_search, without_padding

META = torch.device("meta")


class TestScaledDotProductAttention:
    def test_the_scale_of_heads_of_width_1_is_1(self) -> None:
        query, key, value = (random_tensor(2, n, 1, seed=n) for n in (3, 5, 5))
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(query, key, value)
        assert torch.equal(scratch.scaled_dot_product_attention(query, key, value), expected)

    def test_keys_with_one_more_dimension_give_it_to_the_output(self) -> None:
        query, key, value = random_tensor(3, 5, 11), random_tensor(1, 3, 7, 11), random_tensor(1, 3, 7, 13)
        with sdpa_kernel(SDPBackend.MATH):
            for k, v in ((key, value), (key, value[0]), (key[0], value)):
                expected = F.scaled_dot_product_attention(query, k, v)
                assert torch.equal(scratch.scaled_dot_product_attention(query, k, v), expected)
                assert expected.shape == (1, 3, 5, 13)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_dtype_under_autocast_is_torchs(self, dtype: torch.dtype) -> None:
        query, key, value = (random_tensor(2, 3, n, 11, dtype=dtype) for n in (5, 7, 7))
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            calls = scratch.scaled_dot_product_attention, F.scaled_dot_product_attention
            dtypes = [call(query, key, value).dtype for call in calls]
        assert dtypes[0] == dtypes[1]

    @pytest.mark.parametrize("arguments", [{"is_causal": True}, {"attn_mask": causal_lower_right(5, 7)}], ids=str)
    def test_masks_are_built_where_the_queries_are(self, arguments: dict[str, object]) -> None:
        query, key = torch.empty(2, 3, 5, 11, device=META), torch.empty(2, 3, 7, 11, device=META)
        assert scratch.scaled_dot_product_attention(query, key, key, **arguments).device == META  # type: ignore[arg-type]


class TestMasks:
    def test_lengths_stay_on_their_device(self) -> None:
        assert masks.from_lengths(torch.empty(2, dtype=torch.int64, device=META), max_len=3).device == META

    def test_a_window_over_negative_keys_is_refused(self) -> None:
        with pytest.raises(ValueError, match="key_len must not be negative, got -1"):
            masks.sliding_window(3, -1, window=2)


class TestMultiheadAttention:
    def test_query_and_key_may_be_one_tensor_and_the_value_another(self) -> None:
        theirs, ours = nn.MultiheadAttention(33, 3), scratch.MultiheadAttention(33, 3)
        with_same_weights(ours, theirs)
        x = random_tensor(5, 2, 33)
        inputs = {"query": x, "key": x, "value": random_tensor(5, 2, 33, seed=1)}
        actual, expected = (outputs_and_gradients(module, inputs) for module in (ours, theirs))
        assert_equal(actual, expected, relative_bound=0)

    def test_the_mask_of_a_promise_is_built_where_the_queries_are(self) -> None:
        attention, x = scratch.MultiheadAttention(33, 3, device=META), torch.empty(5, 2, 33, device=META)
        hidden = masks.to_module_mask(masks.causal(5, device=META))
        output, _ = attention(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)
        assert output.device == META

    def test_a_float32_mask_joins_lower_precision_where_no_weights_are_asked_for(self) -> None:
        attention = scratch.MultiheadAttention(12, 3, dtype=torch.bfloat16)
        x, nothing_hidden = random_tensor(5, 2, 12, dtype=torch.bfloat16), torch.zeros(5, 5)
        masked, _ = attention(x, x, x, attn_mask=nothing_hidden, need_weights=False)
        assert torch.equal(masked, attention(x, x, x, need_weights=False)[0])

    @pytest.mark.parametrize("package", [scratch, nn], ids=["scratch", "torch.nn"])
    def test_autocast_takes_inputs_and_masks_of_other_dtypes(self, package: Any) -> None:
        attention = package.MultiheadAttention(12, 3)
        x, nothing_hidden = random_tensor(5, 2, 12, dtype=torch.bfloat16), torch.zeros(5, 5)
        with torch.autocast("cpu", torch.bfloat16):
            output, weights = attention(x, x, x, attn_mask=nothing_hidden)
        assert output.isfinite().all()
        assert weights.shape == (2, 5, 5)


class TestLayers:
    def test_the_memory_mask_fits_the_memory_that_the_cache_holds(self) -> None:
        layer, cache = scratch.TransformerDecoderLayer(12, 3, 13, dropout=0.0, dtype=torch.float64), LayerCache()
        x, memory, other = (random_tensor(n, 2, 12, seed=n) for n in (1, 7, 3))
        hidden = torch.tensor([[False] * 6 + [True], [False] * 7])
        first = layer(x, memory, memory_key_padding_mask=hidden, cache=cache)
        cache.self_attn = GrowingCache()
        assert torch.equal(layer(x, other, memory_key_padding_mask=hidden, cache=cache), first)

    @pytest.mark.parametrize("name", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
    def test_head_sizes_reach_every_attention(self, name: str) -> None:
        layer = getattr(scratch, name)(12, 3, 5, qk_head_dim=5, v_head_dim=7)
        attentions = [x for x in layer.modules() if isinstance(x, scratch.MultiheadAttention)]
        sizes = [(*x._head_dims(), len(x.state_dict()["in_proj_weight"])) for x in attentions]
        assert sizes == [(5, 7, 3 * (5 + 5 + 7))] * (1 if name == "TransformerEncoderLayer" else 2)

    def test_the_blocks_that_subclasses_call_promise_nothing_by_default(self) -> None:
        ours = scratch.TransformerDecoderLayer(12, 3, 5, dtype=torch.float64)
        hidden = torch.ones(5, 5, dtype=torch.bool).tril(-1)
        x = random_tensor(5, 2, 12)
        for with_default, without in (
            (ours.eval()._sa_block(x, hidden, None), ours._sa_block(x, hidden, None, False)),
            (ours._mha_block(x, x, hidden, None), ours._mha_block(x, x, hidden, None, False)),
        ):
            assert torch.equal(with_default, without)


class SaysWhatItIsTold(nn.Module):
    """A layer that remembers the hint it is called with."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.self_attn = nn.Identity()
        self.self_attn.batch_first = batch_first  # type: ignore[assignment]
        self.hints: list[bool] = []

    def forward(self, x: torch.Tensor, *_: torch.Tensor, **told: Any) -> torch.Tensor:
        self.hints.append(told["is_causal"] if "is_causal" in told else told["tgt_is_causal"])
        return x


class TestStacks:
    @pytest.mark.parametrize("package", [scratch, nn], ids=["scratch", "torch.nn"])
    @pytest.mark.parametrize(
        ("shape", "batch_first"), [((5, 2, 3), False), ((2, 5, 3), True), ((5, 3), True), ((5, 3), False)]
    )
    def test_a_causal_mask_is_recognised_in_every_layout(
        self, package: Any, shape: tuple[int, ...], batch_first: bool
    ) -> None:
        hidden = masks.to_module_mask(masks.causal(5))
        encoder = package.TransformerEncoder(SaysWhatItIsTold(batch_first), 1, enable_nested_tensor=False)
        decoder = package.TransformerDecoder(SaysWhatItIsTold(batch_first), 1)
        encoder(torch.zeros(shape), hidden)
        decoder(torch.zeros(shape), torch.zeros(shape), hidden)
        assert encoder.layers[0].hints == decoder.layers[0].hints == [True]

    def test_the_warning_about_nested_tensors_points_at_the_caller(self) -> None:
        layer = scratch.TransformerEncoderLayer(12, 3, 5, bias=False)
        with pytest.warns(UserWarning, match=r"encoder_layer.self_attn was passed bias=False$") as warned:
            scratch.TransformerEncoder(layer, 1)
        assert warned[0].filename == __file__

    def test_the_float_mask_is_built_on_its_device(self) -> None:
        assert scratch.Transformer.generate_square_subsequent_mask(3, device=META).device == META


class TestPositionalEncoding:
    def test_it_has_5000_places_and_moves_with_its_model(self) -> None:
        encoding = scratch.PositionalEncoding(4)
        assert encoding.table.shape == (5000, 4)
        assert encoding.to(META).table.device == META


class TestSeq2SeqTransformer:
    def model(self) -> scratch.Seq2SeqTransformer:
        return scratch.Seq2SeqTransformer(7, 5, 12, 3, num_encoder_layers=1, num_decoder_layers=1).eval()

    def test_a_bad_target_is_refused_before_the_source_is_read(self) -> None:
        model, read = self.model(), []
        model.transformer.encoder.register_forward_hook(lambda *_: read.append(True))
        with pytest.raises(TypeError, match="tgt_ids"):
            model(torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3))
        assert not read

    def test_generate_asks_for_its_length_before_it_encodes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = scratch.Seq2SeqTransformer(7, 7, d_model=12, nhead=3, num_encoder_layers=1, num_decoder_layers=1)
        monkeypatch.setattr(model, "encode", None)
        with pytest.raises(ValueError, match="max_len must be greater than 0, got max_len=0"):
            model.generate(torch.ones(1, 2, dtype=torch.int64), max_len=0)

    def test_generate_keeps_no_graph(self) -> None:
        model, with_gradients = self.model(), []
        model.projection.register_forward_hook(lambda *_: with_gradients.append(torch.is_grad_enabled()))
        model.generate(torch.ones(2, 3, dtype=torch.int64), max_len=2)
        assert with_gradients
        assert not any(with_gradients)


def test_masks_fit_the_memory_that_a_fixed_cache_holds_whatever_is_given_later() -> None:
    attention, cache = scratch.MultiheadAttention(12, 3, dtype=torch.float64), FixedCache()
    x, memory, other = (random_tensor(n, 2, 12, seed=n) for n in (5, 7, 3))
    hidden = torch.tensor([[False] * 6 + [True], [False] * 7])
    attention(x, memory, memory, cache=cache)
    later, _ = attention(x, other, other, key_padding_mask=hidden, cache=cache)
    assert torch.equal(later, attention(x, memory, memory, key_padding_mask=hidden)[0])


class TestBeamSearch:
    def test_the_length_penalty_is_that_of_generate(self) -> None:
        defaults = [
            inspect.signature(call).parameters["length_penalty"].default
            for call in (beam_search, scratch.Seq2SeqTransformer.generate)
        ]
        assert defaults == [0.6, 0.6]

    def test_no_rows_give_no_tokens(self) -> None:
        token_ids, scores = beam_search(
            lambda token_ids: torch.zeros(len(token_ids), 5),
            torch.ones(0, 1, dtype=torch.int64),
            Ending(max_len=3, end_id=2, pad_id=0),
            beam_size=2,
        )
        assert token_ids.shape == (0, 0)
        assert scores.shape == (0,)


@pytest.mark.parametrize("shape", [(5,), (2, 5), (3, 2, 5)])
def test_padding_is_left_out_of_the_last_dimension_where_the_logits_are(shape: tuple[int, ...]) -> None:
    logits = without_padding(torch.zeros(shape), pad_id=3)
    assert (logits.isinf() == torch.tensor([False, False, False, True, False])).all()
    assert without_padding(torch.empty(shape, device=META), pad_id=3).device == META


def test_log_probabilities_of_half_precision_logits_are_summed_in_float32() -> None:
    logits = random_tensor(2, 5, dtype=torch.bfloat16)
    start = torch.ones(2, 1, dtype=torch.int64)
    ending = Ending(max_len=1, end_id=2, pad_id=0)
    tokens, scores = beam_search(lambda _: logits, start, ending, beam_size=1, length_penalty=0.0)
    expected = logits.float().log_softmax(dim=-1).gather(1, tokens).squeeze(1)
    assert torch.equal(scores, expected)


def test_beams_begin_where_the_prefix_is() -> None:
    beams = _first_beams(torch.ones(2, 1, dtype=torch.int64, device=META), beam_size=3)
    assert {x.device for x in beams} == {META}
