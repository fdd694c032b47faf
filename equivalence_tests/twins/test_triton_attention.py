"""The Triton kernel gives the textbook's numbers and gradients.

Run on a CUDA device, or by Triton's interpreter on the CPU in a process of its own: ``make triton``.
"""

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import scratch
from equivalence_tests.instruments.differences import compare_errors
from equivalence_tests.instruments.side_by_side import assert_equal, outputs_and_gradients, random_tensor
from scratch import paths, tiling
from scratch.masks import Visible
from scratch.sdpa import textbook_attention
from scratch.validation import ArgumentTypeError, ArgumentUnsupportedError, ArgumentValueError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed; it is the extra `triton`", allow_module_level=True)
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs CUDA, or TRITON_INTERPRET=1 in a process of its own: make triton", allow_module_level=True)

import triton
import triton.language as tl

from scratch import triton_attention as kernels
from scratch.triton_attention import as_kernel, switched_on, triton_attention

DEVICE = "cpu" if INTERPRETED else "cuda"
ON_CUDA = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter multiplies the bits of bfloat16")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut short sequences into several tiles, of different height and width."""
    monkeypatch.setattr(kernels, "ROWS", 16)
    monkeypatch.setattr(kernels, "COLUMNS", 32)


@triton.jit
def by_distance(batch, head, queries, keys):
    """Take more from a score the farther the key is, differently for each head and sample."""
    return -tl.abs(queries - keys).to(tl.float32) * (1 + head + 4 * batch) / 16


@triton.jit
def of_even_keys(batch, head, queries, keys):
    """Hide every other key from the queries from the tenth on, and all keys from those before it."""
    return tl.where((keys % 2 == 0) & (queries >= 10), 0.0, float("-inf"))


@triton.jit
def beyond_the_end(batch, head, queries, keys):
    """Raise the scores of queries that do not exist, in the last tile, until they overflow."""
    return tl.where(queries < 37, 0.0, 1e5) + 0.0 * keys


def written_out(name: str, query_len: int, key_len: int) -> Tensor:
    """Write the same biases down for 2 samples and 4 heads."""
    batch, head, queries, keys = torch.meshgrid(*map(torch.arange, (2, 4, query_len, key_len)), indexing="ij")
    if name == "by distance":
        return -(queries - keys).abs().double() * (1 + head + 4 * batch) / 16
    if name == "beyond the end":
        return torch.zeros(())
    return scratch.masks.to_score_bias((keys % 2 == 0) & (queries >= 10), torch.float64)


BIASES = {"by distance": by_distance, "of even keys": of_even_keys, "beyond the end": beyond_the_end}


def heads(key_heads: int = 2, dtype: torch.dtype = torch.float64, spread: float = 1.0) -> dict[str, Any]:
    shapes = {"q": (2, 4, 37, 11), "k": (2, key_heads, 45, 11), "v": (2, key_heads, 45, 19)}
    drawn = {name: random_tensor(*shape, seed=i).to(DEVICE, dtype) for i, (name, shape) in enumerate(shapes.items())}
    return drawn | {"q": drawn["q"] * spread}


def textbook(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_bias: str | None = None,
    reach: tuple[int | None, int | None] = (None, None),
    scale: float = 1.0,
) -> Tensor:
    """Compute the same with all scores at once."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    may_attend = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool)
    first, last = reach
    may_attend = may_attend if first is None else may_attend.triu(first)
    may_attend = may_attend if last is None else may_attend.tril(last)
    bias = scratch.masks.to_score_bias(may_attend, torch.float64)
    if score_bias is not None:
        bias = bias + written_out(score_bias, q.size(-2), k.size(-2))
    return textbook_attention(q, k, v, Visible(bias.to(q)), scale, dropout_p=0.0)


def kernel(q: Tensor, k: Tensor, v: Tensor, score_bias: str | None = None, **arguments: Any) -> Tensor:
    return triton_attention(q, k, v, None if score_bias is None else BIASES[score_bias], **arguments)


MASKS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "scaled": {"scale": -0.3},
    "causal": {"reach": (None, 0)},
    "causal, lower right": {"reach": (None, 16)},
    "causal, with blind rows": {"reach": (None, -20)},
    "window": {"reach": (-1, 3)},
    "window from the first key on": {"reach": (-39, 0)},
    "later keys": {"reach": (1, None)},
    "window beside all tiles": {"reach": (28, 30)},
    "bias": {"score_bias": "by distance"},
    "bias that hides": {"score_bias": "of even keys"},
    "bias beyond the end": {"score_bias": "beyond the end"},
    "bias, causal, window": {"score_bias": "by distance", "reach": (-17, 2), "scale": 0.5},
}


def assert_as_the_textbook(inputs: dict[str, Tensor], **arguments: Any) -> None:
    assert_equal(
        outputs_and_gradients(kernel, inputs, **arguments), outputs_and_gradients(textbook, inputs, **arguments)
    )


class TestNumbers:
    @pytest.mark.parametrize("mask", MASKS)
    def test_outputs_and_gradients_are_the_textbooks(self, mask: str) -> None:
        assert_as_the_textbook(heads(), **MASKS[mask])

    @pytest.mark.parametrize("key_heads", [4, 1])
    def test_keys_serve_one_head_of_queries_or_all(self, key_heads: int) -> None:
        assert_as_the_textbook(heads(key_heads), reach=(None, 0))

    def test_scores_far_apart_neither_overflow_nor_vanish(self) -> None:
        assert_as_the_textbook(heads(spread=300.0), reach=(-19, 0))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=ON_CUDA)])
    def test_rounding_is_at_most_twice_the_textbooks(self, dtype: torch.dtype) -> None:
        inputs = heads(dtype=dtype)
        exact = outputs_and_gradients(textbook, {name: x.double() for name, x in inputs.items()}, reach=(None, 0))
        theirs = outputs_and_gradients(textbook, inputs, reach=(None, 0))
        for name, actual in outputs_and_gradients(kernel, inputs, reach=(None, 0)).items():
            ratio = compare_errors(actual, theirs[name], exact[name])
            assert ratio.passed, f"{name}: {ratio}"

    def test_rows_that_see_no_key_give_0_and_gradient_0(self) -> None:
        results = outputs_and_gradients(kernel, heads(), reach=(None, -20))
        for name in ("output 0", "gradient of q"):
            found = results[name]
            assert found is not None
            assert not found[:, :, :20].any()
            assert found[:, :, 21:].all()  # query 20 sees a single key, whose weight is 1 whatever it is

    def test_a_nan_reaches_those_who_see_it(self) -> None:
        inputs = heads()
        inputs["k"][0, 1, 7, 3] = math.nan
        output = triton_attention(**inputs, reach=(None, 0))
        expected = torch.zeros_like(output, dtype=torch.bool)
        expected[0, 2:, 7:] = True
        assert torch.equal(output.isnan(), expected)

    def test_tiles_that_no_query_may_see_are_not_read(self) -> None:
        inputs = heads()
        inputs["v"][:, :, 32:] = math.nan  # the second tile of keys
        assert not triton_attention(**inputs, reach=(None, -6)).isnan().any()


class TestShapes:
    @pytest.mark.parametrize("dims", [2, 3])
    def test_batch_and_heads_may_be_missing(self, dims: int) -> None:
        inputs = {name: x[(0,) * (4 - dims)] for name, x in heads(key_heads=4).items()}
        output = triton_attention(**inputs)
        assert output.dim() == dims
        assert_equal(
            {"output": output}, {"output": textbook_attention(**inputs, visible=Visible(), scale=1.0, dropout_p=0.0)}
        )

    def test_one_sample_of_keys_serves_all_and_strides_are_any(self) -> None:
        inputs = heads(key_heads=4)
        inputs |= {"k": inputs["k"][:1], "q": inputs["q"].transpose(1, 2).contiguous().transpose(1, 2)}
        assert_as_the_textbook(inputs)


def second_derivatives(function: Callable[..., Tensor], names: str) -> dict[str, Tensor | None]:
    inputs = {name: x.requires_grad_(name in names) for name, x in heads().items()}
    wanted = [inputs[name] for name in names]
    first = torch.autograd.grad(function(**inputs, reach=(-8, 0)).square().sum(), wanted, create_graph=True)
    again = torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), wanted)
    return {f"gradient of {name}": x for name, x in zip(names, again, strict=True)}


class TestDerivatives:
    @pytest.mark.parametrize("names", ["qkv", "k"])
    def test_second_derivatives_are_the_textbooks(self, names: str) -> None:
        assert_equal(second_derivatives(kernel, names), second_derivatives(textbook, names))

    def test_second_derivatives_beside_a_function_of_triton_are_refused(self) -> None:
        inputs = {name: x.requires_grad_() for name, x in heads().items()}
        output = kernel(**inputs, score_bias="by distance")
        with pytest.raises(ArgumentUnsupportedError, match="score_bias must be None where gradients are different"):
            torch.autograd.grad(output.sum(), list(inputs.values()), create_graph=True)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from scratch import triton_attention as kernels

chosen = {"HEAD_DIM": 64, "V_HEAD_DIM": 64, "GROUP": 2, "SCALE": 0.125, "BIAS": None, "ROWS": 64, "COLUMNS": 64}
numbers = {"query_len", "key_len", "earliest", "latest", "num_heads"}
types = dict.fromkeys(numbers, "i32") | dict.fromkeys(chosen, "constexpr")
types |= {"log_sum_exp": "*fp32", "row_term": "*fp32"}
for kernel in (kernels._attend_tile, kernels._query_gradients, kernels._key_gradients):
    signature = {name: types.get(name, "*bf16") for name in kernel.arg_names}
    constants = {(place,): chosen[name] for place, name in enumerate(kernel.arg_names) if name in chosen}
    triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
"""


@pytest.mark.skipif(not INTERPRETED, reason="the other tests compile it already")
def test_the_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]


class TestSwitch:
    def test_it_is_off_and_can_be_switched_on_for_cuda(self) -> None:
        q = random_tensor(2, 3, 700, 11).to(DEVICE)
        chosen = partial(paths.chosen_kernel, q, q, q, Visible(), 0.0)
        before = chosen()
        with switched_on() if DEVICE == "cuda" else paths.switched_on(DEVICE, as_kernel):
            assert chosen() is as_kernel
        assert chosen() is before

    def test_modules_and_the_function_take_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[int | None] = []

        def counted(*arguments: Any) -> Tensor:
            calls.append(arguments[4])
            return as_kernel(*arguments)

        module = scratch.MultiheadAttention(33, 3, batch_first=True, device=DEVICE, dtype=torch.float64).eval()
        x = random_tensor(2, 37, 33).to(DEVICE)
        mask = torch.ones(37, 37, dtype=torch.bool, device=DEVICE).triu(1)
        options = {"need_weights": False, "is_causal": True, "attn_mask": mask}
        expected, _ = module(x, x, x, **options)
        monkeypatch.setattr(tiling, "TILES_FROM", 1)
        query = random_tensor(2, 3, 37, 11).to(DEVICE)
        with paths.switched_on(DEVICE, counted):
            assert_equal({"output": module(x, x, x, **options)[0]}, {"output": expected})
            scratch.scaled_dot_product_attention(query, query, query)
        assert calls == [0, None]


class TestErrors:
    @pytest.mark.parametrize(
        ("changed", "error", "message"),
        [
            ({"k": torch.ones(2, 3, 45, 11)}, ArgumentValueError, "heads of k and v must be equal and divide those of"),
            ({"k": torch.ones(2, 2, 45, 12)}, ArgumentValueError, "key must have the head_dim of query, 11, got 12"),
            ({"q": torch.ones(11)}, ArgumentValueError, "q must have 2 to 4 dimensions and none of size 0, got shape"),
            ({"v": torch.ones(2, 2, 45, 0)}, ArgumentValueError, "v must have 2 to 4 dimensions and none of size 0"),
            ({"v": torch.ones(2, 2, 45, 19).half()}, ArgumentTypeError, "v must be floating and of the dtype of q"),
            ({"reach": (1, 0)}, ArgumentValueError, "reach must not end before it begins"),
            ({"reach": (0,)}, ArgumentValueError, r"reach must be \(first, last\), whole numbers or None"),
            ({"reach": (None, 0.5)}, ArgumentTypeError, r"reach\[1\] must be a whole number"),
        ],
    )
    def test_bad_input_is_named(self, changed: dict[str, Any], error: type[Exception], message: str) -> None:
        arguments = heads(dtype=torch.float32) | changed
        on_device: Any = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        with pytest.raises(error, match=message):
            triton_attention(**on_device)

    def test_tensors_where_the_kernel_cannot_run_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
        with pytest.raises(ArgumentUnsupportedError, match="q must be on a CUDA device, or Triton's interpreter"):
            triton_attention(**{name: x.cpu() for name, x in heads().items()})
