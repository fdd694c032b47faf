"""Tests of strategies.py: what is drawn is valid for torch.nn, and everything that should be drawn can be."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import nn

from equivalence_tests.instruments import strategies
from equivalence_tests.instruments.inputs import Case, CausalBiasMask, Mask, Normal, SameAs

CASES = strategies.COMPONENTS
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
by_component = pytest.mark.parametrize("component", CASES)
SLOW_IS_FINE = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


def examples(strategy: SearchStrategy[Any], number: int) -> list[Any]:
    drawn: list[Any] = []

    @settings(SLOW_IS_FINE, max_examples=number, derandomize=True, phases=[Phase.generate])
    @given(strategy)
    def draw(example: Any) -> None:
        drawn.append(example)

    draw()
    return drawn


@by_component
@settings(SLOW_IS_FINE, max_examples=40)
@given(data=st.data())
def test_drawn_cases_are_valid_for_torch_in_every_dtype(component: str, data: st.DataObject) -> None:
    case = data.draw(CASES[component](dtypes=strategies.float_dtypes()))
    inputs = case.inputs(requires_grad=True)
    output = case.construct(nn)(**inputs)
    first = output[0] if isinstance(output, tuple) else output
    assert first.dtype == case.dtype
    first.sum().backward()
    assert case.part.class_name == component


@by_component
def test_cases_shrink_to_one_token_without_anything_else(component: str) -> None:
    """Hypothesis begins with what it would shrink to."""
    case = find(CASES[component](), lambda _: True, settings=settings(SLOW_IS_FINE, phases=[Phase.generate]))
    tensors = [x for x in case.arguments.values() if isinstance(x, Normal)]
    assert {x.shape for x in tensors} == {(1, 1)}
    assert {(x.seed, x.layout) for x in tensors} == {(0, "contiguous")}
    assert all(isinstance(x, Normal | SameAs) for x in case.arguments.values())
    sizes = {
        "embed_dim", "num_heads", "d_model", "nhead", "dim_feedforward", "num_layers", "num_encoder_layers",
        "num_decoder_layers", "encoder_layer", "decoder_layer",
    }  # fmt: skip
    assert set(case.part.arguments) <= sizes
    assert all(x == 1 for x in case.part.arguments.values() if isinstance(x, int))
    assert (case.dtype, case.seed, case.training) == (torch.float64, 0, False)


def constructor_of(case: Case) -> dict[str, Any]:
    """What a case is built with, the arguments of the layer inside a stack included."""
    arguments = dict(case.part.arguments)
    for name in ("encoder_layer", "decoder_layer"):
        arguments |= arguments[name].arguments if name in arguments else {}
    return arguments


LAYER: dict[str, list[Any]] = {
    "dropout": [0.0, 0.25, 0.5],
    "activation": ["relu", "gelu", torch.nn.functional.relu, torch.nn.functional.gelu, torch.tanh],
    "layer_norm_eps": [1e-5, 1e-3],
    "batch_first": [True, False],
    "norm_first": [True, False],
    "bias": [True, False],
    "nhead": [1, 2, 3],
}
CONSTRUCTORS: dict[str, dict[str, list[Any]]] = {
    "MultiheadAttention": {
        "num_heads": [1, 2, 3],
        "dropout": [0.25],
        "bias": [True, False],
        "add_bias_kv": [True, False],
        "add_zero_attn": [True, False],
        "kdim": [None, 7],
        "vdim": [None, 7],
        "batch_first": [True, False],
    },
    "TransformerEncoderLayer": LAYER,
    "TransformerDecoderLayer": LAYER,
    "TransformerEncoder": {**LAYER, "num_layers": [1, 3], "enable_nested_tensor": [True, False], "mask_check": [False]},
    "TransformerDecoder": {**LAYER, "num_layers": [1, 3]},
    "Transformer": {**LAYER, "num_encoder_layers": [1, 2], "num_decoder_layers": [1, 2]},
}
HINTS = [None, True, False]
CALLS: dict[str, dict[str, list[Any]]] = {
    "scaled_dot_product_attention": {
        "dropout_p": [0.0, 0.5],
        "scale": [None, -0.5],
        "is_causal": [True],
        "enable_gqa": [True],
    },
    "MultiheadAttention": {
        "need_weights": [True, False],
        "average_attn_weights": [True, False],
        "is_causal": [True, False],
    },
    "TransformerEncoderLayer": {"is_causal": [True, False]},
    "TransformerDecoderLayer": {"tgt_is_causal": [True, False], "memory_is_causal": [True, False]},
    "TransformerEncoder": {"is_causal": HINTS},
    "TransformerDecoder": {"tgt_is_causal": HINTS, "memory_is_causal": [True, False]},
    "Transformer": {"src_is_causal": HINTS, "tgt_is_causal": HINTS, "memory_is_causal": [True, False]},
}


MASK_ARGUMENTS = {
    "scaled_dot_product_attention": ["attn_mask"],
    "MultiheadAttention": ["attn_mask", "key_padding_mask"],
    "TransformerEncoderLayer": ["src_mask", "src_key_padding_mask"],
    "TransformerDecoderLayer": ["tgt_mask", "tgt_key_padding_mask", "memory_mask", "memory_key_padding_mask"],
    "TransformerEncoder": ["mask", "src_key_padding_mask"],
    "TransformerDecoder": ["tgt_mask", "tgt_key_padding_mask", "memory_mask", "memory_key_padding_mask"],
    "Transformer": [f"{side}_{kind}" for side in ("src", "tgt", "memory") for kind in ("mask", "key_padding_mask")],
}


def labels_of(case: Case) -> set[str]:
    """Say in words what a case has."""
    labels = {f"built with {name}={value}" for name, value in constructor_of(case).items()}
    labels |= {f"{name}={value}" for name, value in case.arguments.items()}
    labels |= {str(case.dtype), f"training={case.training}"}
    for name, x in case.arguments.items():
        if isinstance(x, Normal):
            labels |= {x.layout, f"{name} {len(x.shape)}-D", *(f"length {size}" for size in x.shape)}
        elif isinstance(x, Mask):
            labels |= {f"{name} {x.form} {len(x.shape)}-D", x.kind}
        elif isinstance(x, CausalBiasMask):
            labels.add(x.align)
    masks = set(MASK_ARGUMENTS[case.part.class_name])
    labels.add("no mask" if not masks & set(case.arguments) else "a mask")
    labels |= {"all masks"} if masks <= set(case.arguments) else set()
    if case.part.class_name == "MultiheadAttention":
        labels.add(sharing_of(case.arguments["key"], case.arguments["value"]))
    if isinstance(mask := case.arguments.get("attn_mask"), Mask) and case.is_function:
        labels |= broadcast_of(case.arguments["query"].shape[:-2], mask.shape)
    return labels


def sharing_of(key: Any, value: Any) -> str:
    """Say which of the inputs are one tensor."""
    if key == SameAs("query"):
        return "self-attention" if value == key else "key is query"
    return "key is value" if value == SameAs("key") else "all different"


def broadcast_of(lead: tuple[int, ...], mask: tuple[int, ...]) -> set[str]:
    """Say in which ways a mask serves several queries, heads or samples."""
    ways = {
        "one row for all queries": mask[-2] == 1,
        "fewer dimensions": len(mask) < len(lead) + 2,
        "one mask for all heads or samples": 1 in mask[:-2] and max(mask[:-2]) > 1,
    }
    return {way for way, is_so in ways.items() if is_so}


def labels_wanted(component: str) -> set[str]:
    """Say what has to turn up among the cases of a component."""
    built = {f"built with {name}={x}" for name, choices in CONSTRUCTORS.get(component, {}).items() for x in choices}
    called = {f"{name}={x}" for name, choices in CALLS[component].items() for x in choices}
    masks = {
        f"{name} {form} {rank}-D"
        for name in MASK_ARGUMENTS[component]
        for form in ("bool", "float", "bias")
        for rank in ((1, 2) if "padding" in name else (2, 3))
    }
    kinds = {"causal", "arbitrary", "blind rows"}
    if component == "scaled_dot_product_attention":
        inputs = {f"query {rank}-D" for rank in (2, 3, 4, 5)} | {"upper_left", "lower_right", "attn_mask bool 4-D"}
        inputs |= {"one row for all queries", "fewer dimensions", "one mask for all heads or samples"}
    else:
        first = {"MultiheadAttention": "query", "Transformer": "src"}.get(
            component, "tgt" if "Dec" in component else "src"
        )
        inputs = {f"{first} 2-D", f"{first} 3-D", "training=True", "training=False"}
        kinds |= {"padding at the end", "padding with holes", "all padding"}
    if component == "MultiheadAttention":
        inputs |= {"self-attention", "key is value", "all different"}
    common = {"no mask", "all masks", "contiguous", "transposed", "expanded", "length 1", "length 7"}
    return built | called | masks | kinds | inputs | common | set(map(str, DTYPES))


class EverythingWasDrawn(Exception):  # noqa: N818  no error
    """No more cases are needed."""


@pytest.mark.sampled(3)
@by_component
def test_every_argument_is_drawn_with_every_value(component: str) -> None:
    missing = labels_wanted(component)

    @settings(SLOW_IS_FINE, max_examples=4000, derandomize=True, phases=[Phase.generate])
    @given(CASES[component](dtypes=strategies.float_dtypes()))
    def draw(case: Case) -> None:
        missing.difference_update(labels_of(case))
        if not missing:
            raise EverythingWasDrawn

    with suppress(EverythingWasDrawn):
        draw()
    assert missing == set()


@by_component
def test_cases_are_float64_unless_another_dtype_is_asked_for(component: str) -> None:
    assert {case.dtype for case in examples(CASES[component](), 20)} == {torch.float64}


@pytest.fixture(scope="module")
def attention_masks() -> list[Mask]:
    return examples(strategies.attention_masks((2, 3, 4)), 100)


@pytest.mark.parametrize("kind", ["causal", "arbitrary", "blind rows"])
def test_each_kind_of_attention_mask(kind: str, attention_masks: list[Mask]) -> None:
    masks = [mask for mask in attention_masks if mask.kind == kind]
    hidden = torch.tensor([mask.hidden for mask in masks]).view(-1, 2, 3, 4)
    if kind == "causal":
        assert (hidden == torch.ones(3, 4, dtype=torch.bool).triu(1)).all()
    if kind == "arbitrary":
        assert len({mask.hidden for mask in masks}) > 10
    if kind == "blind rows":
        assert hidden.all(-1).flatten(1).any(-1).all()


@pytest.fixture(scope="module")
def padding_masks() -> list[Mask]:
    return examples(strategies.padding_masks((2, 4)), 100)


@pytest.mark.parametrize("kind", ["padding at the end", "padding with holes", "all padding"])
def test_each_kind_of_padding_mask(kind: str, padding_masks: list[Mask]) -> None:
    masks = [mask for mask in padding_masks if mask.kind == kind]
    hidden = torch.tensor([mask.hidden for mask in masks]).view(-1, 2, 4)
    has_a_hole = (hidden.int().diff(dim=-1) < 0).flatten(1).any(-1)
    assert (hidden[:, 0] != hidden[:, 1]).any()
    if kind == "padding at the end":
        assert hidden.any()
        assert not has_a_hole.any()
    if kind == "padding with holes":
        assert has_a_hole.any()
    if kind == "all padding":
        assert hidden.all(-1).any(-1).all()


def test_hypothesis_shows_a_failing_case_as_its_snippet() -> None:
    @settings(SLOW_IS_FINE, max_examples=50, derandomize=True)
    @given(case=strategies.multihead_attention_cases())
    def fails(case: Case) -> None:
        assert case.part.arguments["num_heads"] < 2

    with pytest.raises(AssertionError) as caught:
        fails()
    notes = "\n".join(caught.value.__notes__)
    assert "module = package.MultiheadAttention(embed_dim=2, num_heads=2).to(torch.float64).eval()\n" in notes
