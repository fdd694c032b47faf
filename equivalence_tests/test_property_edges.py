"""Sizes and arguments that random draws seldom hit, each against torch; mutants of ``scratch`` called for them."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import scratch
from equivalence_tests.side_by_side import random_tensor
from scratch import masks

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
