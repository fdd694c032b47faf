"""The first part of ``sidebyside compare``: every component with the same weights in both packages.

Each component is called once in either package, at small sizes of which no two are equal, and the whole model at the
sizes of the paper as well. Output, attention maps, masks and all gradients are compared.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import builtin
import scratch
from equivalence_tests.compare.drawing import (
    BATCH,
    EMBED_DIM,
    FF_DIM,
    HEAD_DIM,
    KEY_LEN,
    NUM_HEADS,
    QUERY_LEN,
    Component,
    Drawing,
)
from equivalence_tests.compare.todays import todays_components
from equivalence_tests.instruments.differences import (
    FLOAT64_BOUND,
    ErrorRatio,
    compare_errors,
    compare_group,
    largest_value,
)
from equivalence_tests.instruments.inputs import Part, SameAs, TokenIds
from scratch.masks import Alignment

__all__ = ["CALL", "Component", "Row", "compare_component", "compare_masks", "components"]

CALL = "call"  # the quantity of a package that could not be called at all
# 0 is padding: at the end of a sentence, and inside of one too.
SRC_IDS = TokenIds(((5, 3, 7, 4, 9, 8, 6), (4, 10, 5, 0, 0, 0, 0), (6, 0, 3, 9, 0, 8, 0)))
TGT_IDS = TokenIds(((1, 8, 3, 12, 6), (1, 6, 11, 0, 0), (1, 4, 0, 9, 0)))

MULTIHEAD = scratch.MultiheadAttention | nn.MultiheadAttention

Results = dict[str, dict[str, Tensor | None]]


@dataclass(frozen=True)
class Row:
    """One quantity of one component: all its tensors, and the one that differs most.

    Args:
        component: Name of the component.
        quantity: "output", "attention maps", "masks", "input gradients" or "parameter gradients"; ``CALL`` if scratch
            could not be called at all.
        elements: Number of elements of all tensors.
        differing: Number of those that differ.
        greatest_difference: The greatest absolute difference.
        greatest_difference_ulps: The same in units in the last place of the largest value.
        greatest_elementwise_ulps: The greatest number of floating-point numbers between two elements.
        rule: The rule in words.
        bound: What it allows: for the greatest difference, or for the error of scratch where there is one.
        scratch_error: Greatest error of scratch against the float64 result; None where float64 itself decides.
        builtin_error: That of builtin.
        error_ratio: One over the other.
        identical: Whether no element differs.
        passed: Whether the rule is kept.
        detail: The worst element in words, or what was raised.
    """

    component: str
    quantity: str
    elements: int = 0
    differing: int = 0
    greatest_difference: float = 0.0
    greatest_difference_ulps: float = 0.0
    greatest_elementwise_ulps: int = 0
    rule: str = ""
    bound: float = 0.0
    scratch_error: float | None = None
    builtin_error: float | None = None
    error_ratio: float | None = None
    identical: bool = False
    passed: bool = False
    detail: str = ""


def components(dtype: torch.dtype, seed: int) -> list[Component]:
    """List what is compared.

    Args:
        dtype: Of parameters and inputs.
        seed: Where their random numbers start.

    Returns:
        The components: torch.nn's classes from the small to the large, then today's.
    """
    draw = Drawing(dtype, seed)
    return [
        *_free_attentions(draw),
        *_multihead_attentions(draw),
        *_layers(draw),
        *_stacks(draw),
        *_models(draw),
        *todays_components(draw),
    ]


def _free_attentions(draw: Drawing) -> Iterator[Component]:
    for kernel, backend in (("MATH kernel", SDPBackend.MATH), ("torch's choice of kernel", None)):
        inputs = {
            "query": draw.normal(BATCH, NUM_HEADS, QUERY_LEN, HEAD_DIM),
            "key": draw.normal(BATCH, NUM_HEADS, KEY_LEN, HEAD_DIM),
            "value": draw.normal(BATCH, NUM_HEADS, KEY_LEN, HEAD_DIM),
            "attn_mask": draw.holes(BATCH, 1, QUERY_LEN, KEY_LEN, true_means_hidden=False),
        }
        name = f"scaled dot-product attention, {kernel}"
        yield Component(name, draw.case("scaled_dot_product_attention", {}, inputs), backend is not None, backend)


def _multihead_attentions(draw: Drawing) -> Iterator[Component]:
    sizes = {"embed_dim": EMBED_DIM, "num_heads": NUM_HEADS, "batch_first": True}
    query = draw.normal(BATCH, QUERY_LEN, EMBED_DIM)
    own: dict[str, Any] = {"query": query, "key": SameAs("query"), "value": SameAs("query")}
    own |= {"attn_mask": draw.causal(QUERY_LEN), "key_padding_mask": draw.holes(BATCH, QUERY_LEN)}
    memory: dict[str, Any] = {"query": query, "key": draw.normal(BATCH, KEY_LEN, EMBED_DIM), "value": SameAs("key")}
    memory |= {"key_padding_mask": draw.holes(BATCH, KEY_LEN, form="bias")}
    other: dict[str, Any] = {
        "query": query,
        "key": draw.normal(BATCH, KEY_LEN, 17),
        "value": draw.normal(BATCH, KEY_LEN, 19),
    }
    other |= {"attn_mask": draw.holes(BATCH * NUM_HEADS, QUERY_LEN, KEY_LEN)}
    per_head = {"average_attn_weights": False}
    extra_tokens = {**sizes, "add_bias_kv": True, "add_zero_attn": True, "kdim": 17, "vdim": 19}
    for name, built_with, called_with in (
        ("self-attention", sizes, {**own, **per_head}),
        ("cross-attention", sizes, {**memory, **per_head}),
        ("kdim, vdim, bias_kv, zero_attn", extra_tokens, {**other, **per_head}),
        ("need_weights=False", sizes, {**own, "need_weights": False}),
    ):
        identical = "need_weights" not in called_with
        yield Component(
            f"MultiheadAttention, {name}", draw.case("MultiheadAttention", built_with, called_with), identical
        )


def _layers(draw: Drawing) -> Iterator[Component]:
    sizes = {"d_model": EMBED_DIM, "nhead": NUM_HEADS, "dim_feedforward": FF_DIM, "activation": draw.activation}
    sizes |= {"batch_first": True}
    for name, norm_first in (("post-norm", False), ("pre-norm", True)):
        built_with = {**sizes, "norm_first": norm_first}
        called_with = _encoder_inputs(draw, "src_mask")
        yield Component(
            f"TransformerEncoderLayer, {name}", draw.case("TransformerEncoderLayer", built_with, called_with)
        )
    for name, norm_first in (("post-norm", False), ("pre-norm", True)):
        built_with = {**sizes, "norm_first": norm_first}
        yield Component(
            f"TransformerDecoderLayer, {name}", draw.case("TransformerDecoderLayer", built_with, _decoder_inputs(draw))
        )


def _stacks(draw: Drawing) -> Iterator[Component]:
    sizes = {"d_model": EMBED_DIM, "nhead": NUM_HEADS, "dim_feedforward": FF_DIM, "activation": draw.activation}
    sizes |= {"batch_first": True}
    norm = Part("LayerNorm", {"normalized_shape": EMBED_DIM})
    encoder = {"encoder_layer": Part("TransformerEncoderLayer", sizes), "num_layers": 2, "norm": norm}
    decoder = {"decoder_layer": Part("TransformerDecoderLayer", sizes), "num_layers": 2, "norm": norm}
    yield Component("TransformerEncoder", draw.case("TransformerEncoder", encoder, _encoder_inputs(draw, "mask")))
    yield Component("TransformerDecoder", draw.case("TransformerDecoder", decoder, _decoder_inputs(draw)))
    both: dict[str, Any] = {
        "src": draw.normal(BATCH, KEY_LEN, EMBED_DIM),
        "tgt": draw.normal(BATCH, QUERY_LEN, EMBED_DIM),
    }
    both |= {"tgt_mask": draw.causal(QUERY_LEN), "src_key_padding_mask": draw.holes(BATCH, KEY_LEN)}
    both |= {"memory_key_padding_mask": draw.holes(BATCH, KEY_LEN), "tgt_is_causal": True}
    yield Component(
        "Transformer", draw.case("Transformer", {**sizes, "num_encoder_layers": 2, "num_decoder_layers": 3}, both)
    )


def _encoder_inputs(draw: Drawing, mask_name: str) -> dict[str, Any]:
    return {
        "src": draw.normal(BATCH, QUERY_LEN, EMBED_DIM),
        mask_name: draw.holes(BATCH * NUM_HEADS, QUERY_LEN, QUERY_LEN),
        "src_key_padding_mask": draw.holes(BATCH, QUERY_LEN),
    }


def _decoder_inputs(draw: Drawing) -> dict[str, Any]:
    return {
        "tgt": draw.normal(BATCH, QUERY_LEN, EMBED_DIM),
        "memory": draw.normal(BATCH, KEY_LEN, EMBED_DIM),
        "tgt_mask": draw.causal(QUERY_LEN),
        "memory_mask": draw.holes(QUERY_LEN, KEY_LEN),
        "tgt_key_padding_mask": draw.holes(BATCH, QUERY_LEN),
        "memory_key_padding_mask": draw.holes(BATCH, KEY_LEN),
    }


def _models(draw: Drawing) -> Iterator[Component]:
    paper: dict[str, Any] = {"src_vocab_size": 11, "tgt_vocab_size": 13, "max_len": 17, "activation": draw.activation}
    small: dict[str, Any] = {"d_model": EMBED_DIM, "nhead": NUM_HEADS, "num_encoder_layers": 2, "num_decoder_layers": 3}
    small = {**paper, **small, "dim_feedforward": FF_DIM}
    inputs = {"src_ids": SRC_IDS, "tgt_ids": TGT_IDS}
    yield Component("Seq2SeqTransformer", draw.case("Seq2SeqTransformer", small, inputs))
    # Every size at its default: width 512, 8 heads, 6 + 6 layers, feed-forward 2048.
    yield Component("Seq2SeqTransformer, sizes of the paper", draw.case("Seq2SeqTransformer", paper, inputs))


def compare_component(component: Component, device: torch.device) -> list[Row]:
    """Call one component in both packages, with the same weights, and compare all that comes of it.

    Args:
        component: What to compare.
        device: Where.

    Returns:
        One row for each quantity that the component has.
    """
    case = component.case
    trusted = component.trusted or case.construct(builtin, device=device)
    weights = trusted if isinstance(trusted, nn.Module) else None
    expected = _results(trusted, component, case.dtype, device)
    reference = None
    if case.dtype != torch.float64:
        exact = component.trusted or case.construct(builtin, weights_of=weights, dtype=torch.float64, device=device)
        reference = _results(exact, component, torch.float64, device)
    try:
        candidate = case.construct(scratch, weights_of=weights, device=device)
        actual = _results(candidate, component, case.dtype, device)
    except Exception as error:  # whatever goes wrong inside scratch is what this command is there to report
        return [Row(component.name, CALL, detail=f"scratch raises {type(error).__name__}: {error}")]
    promised = component.identical and device.type == "cpu"
    return [
        _judge(component.name, quantity, actual.get(quantity, {}), tensors, (reference or {}).get(quantity), promised)
        for quantity, tensors in expected.items()
    ]


def _results(called: Any, component: Component, dtype: torch.dtype, device: torch.device) -> Results:
    """Call it, and give output, maps, masks and gradients by name."""
    inputs = component.case.inputs(dtype=dtype, device=device, requires_grad=component.differentiable)
    with nullcontext() if component.backend is None else sdpa_kernel(component.backend), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        outputs, maps = _outputs_and_maps(called, inputs, dtype)
    named = dict(zip(("output", "weights"), outputs if isinstance(outputs, tuple) else (outputs,), strict=False))
    named = {name: x for name, x in named.items() if x is not None}
    maps |= {"weights": named["weights"]} if "weights" in named else {}
    results: Results = {"output": {"output": named["output"]}}
    if maps:
        results |= {"attention maps": {**maps}, "masks": {name: weights == 0 for name, weights in maps.items()}}
    return results | _gradients(called, inputs, named)


def _outputs_and_maps(called: Any, inputs: Mapping[str, Any], dtype: torch.dtype) -> tuple[Any, dict[str, Tensor]]:
    """Call it, and record the maps of torch.nn's attention, or find out those of a function."""
    if isinstance(called, nn.Module) and any(isinstance(x, MULTIHEAD) for x in called.modules()):
        with builtin.record_attention(called) as recorded:
            outputs = called(**inputs)
        return outputs, {name: x.to(dtype) for name, x in recorded.items()}
    outputs = called(**inputs)
    if "value" not in inputs or inputs["value"].dim() != 4:
        return outputs, {}
    # Values of 0 and 1 hand the weights through.
    one_hot = torch.eye(inputs["key"].size(-2), dtype=dtype, device=inputs["key"].device)
    one_hot = one_hot.expand(*inputs["value"].shape[:-1], -1)
    return outputs, {"weights": called(**{**inputs, "value": one_hot}).detach()}


def _gradients(called: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> Results:
    """Differentiate a random linear function of all outputs."""
    names: dict[int, str] = {}
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.requires_grad:
            names.setdefault(id(x), name)  # an input that is used twice goes by its first name
    leaves = {name: inputs[name] for name in names.values()}
    parameters = dict(called.named_parameters()) if isinstance(called, nn.Module) else {}
    if not leaves and not parameters:
        return {}
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros((), dtype=torch.float64)
    for x in outputs.values():
        cotangent = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device, x.dtype)
        loss = loss + (x * cotangent).sum().double().cpu()
    wanted = [*leaves.values(), *parameters.values()]
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    results: Results = {}
    if leaves:
        results["input gradients"] = dict(zip(leaves, gradients, strict=False))
    if parameters:
        results["parameter gradients"] = dict(zip(parameters, gradients[len(leaves) :], strict=True))
    return results


def _judge(
    component: str,
    quantity: str,
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    reference: Mapping[str, Tensor | None] | None,
    promised: bool,
) -> Row:
    """Apply the rule: identity where it is promised and for masks, else that of float64 or the error ratio."""
    exact = promised or quantity == "masks"
    comparisons = compare_group(actual, expected, relative_bound=0.0 if exact else FLOAT64_BOUND)
    errors = [] if exact or reference is None else _errors(actual, expected, reference)
    worst = max(comparisons, key=lambda x: (bool(x.misfit), not x.passed, x.max_abs_difference))
    error = max(errors, key=lambda x: (not x.passed, x.candidate_error / x.bound)) if errors else None
    return Row(
        component,
        quantity,
        elements=sum(x.elements for x in comparisons),
        differing=sum(x.differing for x in comparisons),
        greatest_difference=worst.max_abs_difference,
        greatest_difference_ulps=worst.ulps_of_largest,
        greatest_elementwise_ulps=max(x.ulps for x in comparisons),
        rule=worst.rule if error is None else "twice the error of builtin, plus 4 ulp of the largest value",
        bound=worst.bound if error is None else error.bound,
        scratch_error=None if error is None else error.candidate_error,
        builtin_error=None if error is None else error.builtin_error,
        error_ratio=None if error is None else error.ratio,
        identical=all(x.identical for x in comparisons),
        passed=all(x.passed for x in (errors or comparisons)),
        detail=str(worst if error is None else error),
    )


def _errors(
    actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]
) -> list[ErrorRatio]:
    largest = largest_value(x for x in reference.values() if x is not None)
    return [
        compare_errors(actual.get(name), expected[name], reference[name], name=name, largest=largest)
        for name in expected
    ]


def compare_masks(device: torch.device) -> list[Row]:
    """Build masks in both packages and compare them.

    Args:
        device: Where.

    Returns:
        One row for each builder that the packages do not share.
    """
    lengths = [(QUERY_LEN, QUERY_LEN), (QUERY_LEN, KEY_LEN), (KEY_LEN, QUERY_LEN), (1, KEY_LEN)]
    aligned: list[Alignment] = ["upper_left", "lower_right"]
    near = scratch.score_functions.causal() & scratch.score_functions.sliding_window(3)
    builders: dict[str, Callable[[Any], list[Tensor]]] = {
        "causal, upper left": lambda p: [p.masks.causal(*x, align=aligned[0], device=device) for x in lengths],
        "causal, lower right": lambda p: [p.masks.causal(*x, align=aligned[1], device=device) for x in lengths],
        "sliding window": lambda p: [
            p.masks.sliding_window(*x, window=window, device=device) for x in lengths for window in (1, 3)
        ],
        "square, 0 and -inf": lambda p: [
            p.Transformer.generate_square_subsequent_mask(QUERY_LEN, device=device, dtype=torch.float64)
        ],
        "blocks of a window": lambda p: [
            p.create_block_mask(near, None, None, *x, device, BLOCK_SIZE=2).to_dense() for x in lengths
        ],
    }
    rows = []
    for name, build in builders.items():
        actual, expected = ({str(i): x for i, x in enumerate(build(package))} for package in (scratch, builtin))
        rows.append(_judge(f"mask: {name}", "masks", actual, expected, None, promised=True))
    return rows
