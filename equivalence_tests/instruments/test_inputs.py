"""Tests of inputs.py: a case builds what it says, and its repr builds the same."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scratch
from equivalence_tests.instruments.differences import compare_tensors
from equivalence_tests.instruments.inputs import (
    Alibi,
    Case,
    CausalBiasMask,
    Layout,
    Mask,
    MaskForm,
    Normal,
    Part,
    SameAs,
    SequenceStarts,
    WindowBlocks,
)

LAYOUTS: list[Layout] = ["contiguous", "transposed", "expanded"]
FORMS: list[MaskForm] = ["bool", "float", "bias"]
HIDDEN = (True, False, False, False, True, True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_tensor_lies_in_memory_as_its_layout_says(layout: Layout, dtype: torch.dtype) -> None:
    x = Normal((2, 5, 3), 4, layout).build(dtype)
    assert (x.shape, x.dtype) == ((2, 5, 3), dtype)
    strides = {"contiguous": (15, 3, 1), "transposed": (15, 1, 5), "expanded": (0, 3, 1)}
    assert x.stride() == strides[layout]
    assert torch.equal(x, Normal((2, 5, 3), 4, layout).build(torch.float64).to(dtype))
    assert not torch.equal(x, Normal((2, 5, 3), 5, layout).build(dtype))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("true_means_hidden", [True, False])
def test_a_mask_hides_what_it_says_in_every_form(form: MaskForm, true_means_hidden: bool) -> None:
    mask = Mask("arbitrary", (2, 3), HIDDEN, form, 7, true_means_hidden).build(torch.float32)
    hidden = torch.tensor(HIDDEN).view(2, 3)
    if form == "bool":
        assert torch.equal(mask, hidden if true_means_hidden else ~hidden)
        return
    assert mask.dtype == torch.float32
    assert torch.equal(mask == -math.inf, hidden)
    assert bool((mask[~hidden] != 0).all()) is (form == "bias")


def cases() -> list[Case]:
    attention = Part("MultiheadAttention", {"embed_dim": 6, "num_heads": 2, "dropout": 0.25})
    layer = Part("TransformerEncoderLayer", {"d_model": 6, "nhead": 2, "activation": F.gelu, "dim_feedforward": 5})
    norm = Part("LayerNorm", {"normalized_shape": 6})
    x = Normal((3, 2, 6), 1, "transposed")
    square = (False, True, True, False, False, True, False, False, False)
    shared = {"query": x, "key": SameAs("query"), "value": SameAs("query")}
    function = Part("scaled_dot_product_attention", {})
    heads = {"query": Normal((2, 3, 4), 1), "key": Normal((2, 5, 4), 2), "value": Normal((2, 5, 7), 3, "expanded")}
    return [
        Case(attention, {**shared, "attn_mask": Mask("causal", (3, 3), square)}, torch.float32, 3, training=True),
        Case(attention, {**shared, "attn_mask": Mask("causal", (3, 3), square, "float"), "need_weights": False}),
        Case(attention, {**shared, "attn_mask": Mask("causal", (3, 3), square, "bias", 5)}, torch.bfloat16),
        Case(Part("TransformerEncoder", {"encoder_layer": layer, "num_layers": 2, "norm": norm}), {"src": x}),
        Case(function, {**heads, "attn_mask": CausalBiasMask("lower_right", 3, 5)}),
        Case(
            function, {**heads, "attn_mask": Mask("arbitrary", (1, 5), (True, False) * 2 + (False,), "bool", 0, False)}
        ),
        Case(function, {**heads, "is_causal": True, "dropout_p": 0.5}, seed=3),
    ]


def outputs(case: Case, package: Any, **options: Any) -> Any:
    module = case.construct(package, **options)
    torch.manual_seed(case.seed)
    output = module(**case.inputs(**options))
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.part.class_name)
def test_the_repr_of_a_case_is_a_snippet_that_computes_the_same(case: Case) -> None:
    for package in (nn, scratch):
        there: dict[str, Any] = {"scratch": scratch}
        code = repr(case).replace("torch.nn  #", "scratch  #") if package is scratch else repr(case)
        code = code.replace("torch.nn.functional  #", "scratch  #") if package is scratch else code
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
            exec(code, there)
        output = there["output"]
        assert compare_tensors(output[0] if isinstance(output, tuple) else output, outputs(case, package)).identical
        assert there["package"] is (scratch if package is scratch else F if case.is_function else nn)


def test_the_repr_of_what_torch_has_elsewhere_computes_the_same_too() -> None:
    heads = {"query": Normal((2, 4, 5, 6), 1), "key": Normal((2, 4, 7, 6), 2), "value": SameAs("key")}
    flex = {**heads, "score_mod": Alibi(4), "block_mask": WindowBlocks(3, 5, 7, block_len=2)}
    packed = {"query": Normal((7, 2, 6), 1), "key": SameAs("query"), "value": SameAs("query")}
    packed |= {"cu_seq_q": SequenceStarts((3, 4)), "cu_seq_k": SameAs("cu_seq_q"), "max_q": 4, "max_k": 4}
    for case in (Case(Part("flex_attention", {}), flex), Case(Part("varlen_attn", {}), packed)):
        there: dict[str, Any] = {}
        exec(repr(case), there)
        assert compare_tensors(there["output"], outputs(case, scratch)).identical


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.part.class_name)
def test_a_case_can_be_computed_in_float64_on_the_same_rounded_numbers(case: Case) -> None:
    rounded, exact = case.inputs(), case.inputs(dtype=torch.float64)
    for name, x in rounded.items():
        if type(x) is Tensor and x.is_floating_point():
            assert x.dtype == case.dtype
            assert torch.equal(x.double(), exact[name])
    if not case.is_function:
        weights = case.construct(nn).parameters()
        for x, y in zip(weights, case.construct(nn, dtype=torch.float64).parameters(), strict=True):
            assert torch.equal(x.double(), y)
    if not case.training:
        assert compare_tensors(
            outputs(case, scratch, dtype=torch.float64), outputs(case, nn, dtype=torch.float64)
        ).passed


def test_inputs_are_leaves_where_they_are_numbers() -> None:
    built = cases()[2].inputs(requires_grad=True)
    assert built["key"] is built["query"]
    assert all(x.requires_grad and x.is_leaf for x in built.values())
    assert not cases()[1].inputs(requires_grad=True)["attn_mask"].requires_grad
    assert not cases()[1].inputs()["query"].requires_grad


def test_building_a_case_leaves_the_random_state_of_inputs_alone() -> None:
    state = torch.get_rng_state()
    cases()[0].inputs()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_mode_and_the_random_parameters_are_those_of_the_case() -> None:
    training, evaluating = cases()[:2]
    module: Any = training.construct(scratch)
    assert module.training
    assert bool((module.in_proj_bias != 0).all())
    assert not evaluating.construct(scratch).training


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="Attenshun"):
        Case(Part("Attenshun", {}), {}).construct(scratch)
