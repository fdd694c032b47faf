"""Positional encodings against a slow formula, and a table that follows its module everywhere."""

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import builtin
import scratch
from equivalence_tests.instruments.side_by_side import assert_close
from scratch import PositionalEncoding, sinusoidal_encoding
from scratch.positional import Layout

LAYOUTS: tuple[Layout, ...] = ("interleaved", "concatenated")
WIDTHS = (1, 2, 3, 8, 11, 12, 33)
MAX_LEN = 17


def angle(position: int, pair: int, d_model: int, base: float) -> float:
    """Compute pos / base^(2i / d_model) through a logarithm, not a power."""
    return position * math.exp(-2 * pair / d_model * math.log(base))


def slow_table(max_len: int, d_model: int, layout: Layout, base: float = 10000.0) -> Tensor:
    """Write the table number by number: column 2i is the sine of pair i, column 2i + 1 its cosine."""
    columns = list(range(d_model))
    if layout == "concatenated":
        columns = [x for x in columns if x % 2 == 0] + [x for x in columns if x % 2 == 1]
    waves = (math.sin, math.cos)
    rows = [[waves[x % 2](angle(position, x // 2, d_model, base)) for x in columns] for position in range(max_len)]
    return torch.tensor(rows, dtype=torch.float64).view(max_len, d_model)


def table_of(encoding: PositionalEncoding, dtype: torch.dtype) -> Tensor:
    """Read the table off what is added to zeros."""
    result: Tensor = encoding(torch.zeros(encoding.max_len, encoding.d_model, dtype=dtype))
    return result


class TestSinusoidalEncoding:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("d_model", WIDTHS)
    @pytest.mark.parametrize("base", [10000.0, 7.0, 0.5])
    def test_values_are_those_of_the_formula(self, layout: Layout, d_model: int, base: float) -> None:
        table = sinusoidal_encoding(MAX_LEN, d_model, layout, base=base, dtype=torch.float64)
        assert_close(table, slow_table(MAX_LEN, d_model, layout, base))

    def test_the_formula_holds_far_out(self) -> None:
        table = sinusoidal_encoding(5000, 512, dtype=torch.float64)
        for position, feature in ((4999, 0), (4999, 1), (4999, 2), (4999, 257), (4999, 511), (1234, 66)):
            wave = math.cos if feature % 2 else math.sin
            assert table[position, feature].item() == pytest.approx(
                wave(angle(position, feature // 2, 512, 10000.0)), rel=0, abs=2e-12
            )

    def test_the_first_position_is_zeros_and_ones(self) -> None:
        assert sinusoidal_encoding(1, 5).tolist() == [[0.0, 1.0, 0.0, 1.0, 0.0]]
        assert sinusoidal_encoding(1, 5, "concatenated").tolist() == [[0.0, 0.0, 0.0, 1.0, 1.0]]

    @pytest.mark.parametrize("d_model", WIDTHS)
    def test_both_layouts_hold_the_same_columns(self, d_model: int) -> None:
        interleaved, concatenated = (sinusoidal_encoding(MAX_LEN, d_model, layout) for layout in LAYOUTS)
        assert torch.equal(concatenated, torch.cat([interleaved[:, 0::2], interleaved[:, 1::2]], dim=1))

    def test_a_shift_is_a_rotation_of_every_pair(self) -> None:
        """PE(pos + k) is a linear function of PE(pos), the reason that the paper gives for its choice."""
        table = sinusoidal_encoding(MAX_LEN, 12, dtype=torch.float64)
        pairs = torch.view_as_complex(table.unflatten(1, (6, 2)).flip(2))  # cosine + i sine
        turned = pairs[:-5] * pairs[5]  # e^(i a) e^(i b) = e^(i (a + b))
        assert_close(torch.view_as_real(turned), torch.view_as_real(pairs[5:]))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_longer_table_begins_like_a_shorter_one(self, layout: Layout) -> None:
        assert torch.equal(sinusoidal_encoding(MAX_LEN, 11, layout)[:5], sinusoidal_encoding(5, 11, layout))

    def test_length_zero_is_an_empty_table(self) -> None:
        assert sinusoidal_encoding(0, 11).shape == (0, 11)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_lower_precision_is_the_rounded_float64(self, dtype: torch.dtype) -> None:
        exact = sinusoidal_encoding(5000, 16, dtype=torch.float64)
        assert torch.equal(sinusoidal_encoding(5000, 16, dtype=dtype), exact.to(dtype))

    def test_dtype_and_device_are_the_defaults_of_torch(self) -> None:
        assert sinusoidal_encoding(3, 4).dtype == torch.get_default_dtype()
        assert sinusoidal_encoding(3, 4).device == torch.get_default_device()
        with torch.device("meta"):
            assert sinusoidal_encoding(3, 4).is_meta

    def test_it_compiles_as_one_graph(self) -> None:
        compiled = torch.compile(sinusoidal_encoding, fullgraph=True, backend="eager")
        assert torch.equal(compiled(MAX_LEN, 11), sinusoidal_encoding(MAX_LEN, 11))

    def test_both_packages_offer_it(self) -> None:
        assert builtin.sinusoidal_encoding is scratch.sinusoidal_encoding
        assert builtin.PositionalEncoding is scratch.PositionalEncoding

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"max_len": -1}, "max_len must not be negative, got -1"),
            ({"d_model": 0}, "d_model must be greater than 0, got d_model=0"),
            ({"layout": "sideways"}, "layout must be one of 'interleaved', 'concatenated', got 'sideways'"),
            ({"base": 0.0}, "base must be greater than 0, got 0.0"),
            ({"base": math.nan}, "base must be greater than 0, got nan"),
        ],
    )
    def test_bad_arguments_are_named(self, arguments: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            sinusoidal_encoding(**{"max_len": 3, "d_model": 4, **arguments})


class TestPositionalEncoding:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("d_model", [11, 12])
    def test_every_sample_gets_the_encoding_of_its_places(self, layout: Layout, d_model: int) -> None:
        encoding = PositionalEncoding(d_model, MAX_LEN, layout=layout, dtype=torch.float64)
        x = torch.randn(2, 5, d_model, dtype=torch.float64)
        expected = torch.stack([sample + slow_table(5, d_model, layout) for sample in x])
        assert_close(encoding(x), expected)
        assert torch.equal(encoding(x[1]), encoding(x)[1])  # without a batch

    @pytest.mark.parametrize("offset", range(6))
    def test_an_offset_continues_where_earlier_tokens_ended(self, offset: int) -> None:
        encoding = PositionalEncoding(11, max_len=6)
        x = torch.randn(2, 6, 11)
        assert torch.equal(encoding(x[:, offset:], offset=offset), encoding(x)[:, offset:])

    def test_the_last_position_may_be_used_and_no_later_one(self) -> None:
        encoding = PositionalEncoding(11, max_len=6)
        assert encoding(torch.zeros(2, 2, 11), offset=4).shape == (2, 2, 11)
        assert encoding(torch.zeros(2, 0, 11), offset=6).shape == (2, 0, 11)
        text = r"x must end within max_len = 6 positions, got 3 tokens from position 4 on"
        with pytest.raises(ValueError, match=text):
            encoding(torch.zeros(2, 3, 11), offset=4)
        with pytest.raises(ValueError, match="offset must not be negative, got -1"):
            encoding(torch.zeros(2, 3, 11), offset=-1)

    def test_what_is_no_tensor_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"^x must be a tensor, got list"):
            PositionalEncoding(11)([[0.0] * 11])

    def test_dropout_that_is_no_probability_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"between 0 and 1, but got dropout=1.5"):
            PositionalEncoding(11, dropout=1.5)

    @pytest.mark.parametrize("shape", [(2, 5, 12), (11,), (2, 3, 5, 11)])
    def test_other_shapes_are_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"x must have shape .* with d_model = 11, got shape \("):
            PositionalEncoding(11)(torch.zeros(shape))

    def test_dropout_acts_on_the_sum_in_training_only(self) -> None:
        encoding, x = PositionalEncoding(11, dropout=0.5), torch.randn(2, 5, 11)
        torch.manual_seed(0)
        dropped = encoding(x)
        torch.manual_seed(0)
        assert torch.equal(dropped, nn.functional.dropout(PositionalEncoding(11)(x), 0.5))
        assert torch.equal(encoding.eval()(x), PositionalEncoding(11)(x))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_the_output_has_the_dtype_of_the_input(self, dtype: torch.dtype) -> None:
        assert PositionalEncoding(11)(torch.zeros(2, 5, 11, dtype=dtype)).dtype == dtype

    def test_the_gradient_passes_unchanged(self) -> None:
        x = torch.randn(2, 5, 11, requires_grad=True)
        gradient = torch.randn(2, 5, 11)
        PositionalEncoding(11)(x).backward(gradient)
        assert x.grad is not None
        assert torch.equal(x.grad, gradient)

    def test_steps_compile_as_one_graph(self) -> None:
        encoding = PositionalEncoding(11, MAX_LEN)
        compiled = torch.compile(encoding, fullgraph=True, backend="eager", dynamic=True)
        x = torch.randn(2, 5, 11)
        for offset in (0, 3, 7):
            assert torch.equal(compiled(x, offset), encoding(x, offset))


class TestTable:
    """Rounded from float64 once, wherever the module has been."""

    EXACT = slow_table(MAX_LEN, 11, "concatenated")

    def encoding(self, **factory: Any) -> PositionalEncoding:
        return PositionalEncoding(11, MAX_LEN, layout="concatenated", **factory)

    @pytest.mark.parametrize("detour", [torch.bfloat16, torch.float16, torch.float32])
    def test_lower_precision_leaves_no_trace(self, detour: torch.dtype) -> None:
        encoding = self.encoding()
        nn.ModuleList([nn.Linear(3, 3), encoding]).to(detour).double()
        assert_close(table_of(encoding, torch.float64), self.EXACT)

    def test_a_module_from_the_meta_device_has_its_table(self) -> None:
        encoding = self.encoding(device="meta", dtype=torch.float64)
        assert encoding(torch.zeros(2, 5, 11, device="meta", dtype=torch.float64)).is_meta
        assert_close(table_of(encoding.to_empty(device="cpu"), torch.float64), self.EXACT)

    def test_it_is_no_part_of_a_checkpoint(self) -> None:
        assert dict(self.encoding().state_dict()) == {}
        PositionalEncoding(11, max_len=3).load_state_dict(self.encoding().state_dict(), strict=True)

    def test_copies_and_pickles_have_it(self, tmp_path: Path) -> None:
        encoding = self.encoding(dtype=torch.float64)
        torch.save(encoding, tmp_path / "encoding.pt")
        stored = io.BytesIO((tmp_path / "encoding.pt").read_bytes())
        for twin in (copy.deepcopy(encoding), torch.load(stored, weights_only=False)):
            assert_close(table_of(twin, torch.float64), self.EXACT)
            assert_close(table_of(twin.half().double(), torch.float64), self.EXACT)

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_it_follows_to_cuda_to_the_last_bit(self) -> None:
        encoding = self.encoding().cuda()
        assert encoding(torch.zeros(2, 5, 11, device="cuda")).is_cuda
        assert torch.equal(encoding.table.cpu(), self.encoding().table)
        assert torch.equal(encoding.cpu().table, self.encoding().table)
