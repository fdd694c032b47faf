"""Validity parity: what torch.nn rejects, scratch rejects; what it accepts, scratch accepts and computes equally.

Cases are drawn valid, then spoiled once or twice. torch.nn itself is the reference, off its fast path, and the MATH
backend for the function: ``builtin`` shares our validation. Where the two differ on purpose, ``DIFFERENCES`` says why.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion

import scratch
from equivalence_tests.instruments import strategies
from equivalence_tests.instruments.inputs import Case, Cast, CausalBiasMask, Mask, Normal, Part
from equivalence_tests.instruments.side_by_side import fast_path
from equivalence_tests.twins.properties import Everything, Ledger, Tally, assert_same, everything

NUMBERS = ("embed_dim", "num_heads", "kdim", "vdim", "d_model", "nhead", "dim_feedforward", "num_layers")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
OTHER_VALUES: dict[str, list[Any]] = {
    "dropout": [-0.5, 1.0, 1.5],
    "dropout_p": [-0.5, 1.5],
    "activation": ["abc"],
    "scale": [0.0],
    "enable_gqa": [True],
}


@st.composite
def spoiled(draw: st.DrawFn, cases: st.SearchStrategy[Case]) -> Case:
    """Cases with one or two things about them changed, right or wrong; shrinks to one change."""
    case = draw(cases)
    for _ in range(draw(st.integers(1, 2))):
        case = draw(draw(st.sampled_from([other_size, other_rank, other_dtype, a_promise, other_argument]))(case))
    return case


def tensors_of(case: Case) -> st.SearchStrategy[str]:
    return st.sampled_from([name for name, x in case.arguments.items() if isinstance(x, Normal | Mask)] or ["nothing"])


def with_argument(case: Case, name: str, argument: Any) -> Case:
    return replace(case, arguments={**case.arguments, name: argument})


def in_shape(argument: Normal | Mask, shape: tuple[int, ...]) -> Normal | Mask:
    if isinstance(argument, Normal):
        return replace(argument, shape=shape, layout="contiguous")
    return replace(argument, kind="arbitrary", shape=shape, hidden=(False,) * math.prod(shape))


@st.composite
def other_size(draw: st.DrawFn, case: Case) -> Case:
    name = draw(tensors_of(case))
    argument = case.arguments.get(name)
    if not isinstance(argument, Normal | Mask) or not argument.shape:
        return case
    axis = draw(st.integers(0, len(argument.shape) - 1))
    size = argument.shape[axis]
    other = draw(st.sampled_from([size + 1, 1, 0, 2 * size]))
    return with_argument(case, name, in_shape(argument, (*argument.shape[:axis], other, *argument.shape[axis + 1 :])))


@st.composite
def other_rank(draw: st.DrawFn, case: Case) -> Case:
    name = draw(tensors_of(case))
    argument = case.arguments.get(name)
    if not isinstance(argument, Normal | Mask):
        return case
    shape = argument.shape[1:] if draw(st.booleans()) else (1, *argument.shape)
    return with_argument(case, name, in_shape(argument, shape))


@st.composite
def other_dtype(draw: st.DrawFn, case: Case) -> Case:
    name = draw(tensors_of(case))
    argument = case.arguments.get(name)
    return with_argument(case, name, Cast(argument, draw(st.sampled_from(DTYPES)))) if argument is not None else case


@st.composite
def a_promise(draw: st.DrawFn, case: Case) -> Case:
    names = ["is_causal"]
    if "tgt" in case.arguments:
        names = ["tgt_is_causal", "memory_is_causal"]
    return with_argument(case, draw(st.sampled_from(names)), True)


@st.composite
def other_argument(draw: st.DrawFn, case: Case) -> Case:
    """Change an argument of the constructor, or of the function."""
    given = case.arguments if case.is_function else case.part.arguments
    numbers = {name: [0, -1, given[name] + 1] for name in NUMBERS if isinstance(given.get(name), int)}
    known = {"dropout_p", "scale", "enable_gqa"} if case.is_function else {"dropout"}
    known |= {"activation"} & given.keys()
    choices = numbers | {name: OTHER_VALUES[name] for name in known if "num_layers" not in given}
    if not choices:
        return case
    name = draw(st.sampled_from(sorted(choices)))
    value = draw(st.sampled_from(choices[name]))
    if case.is_function:
        return with_argument(case, name, value)
    return replace(case, part=replace(case.part, arguments={**case.part.arguments, name: value}))


@dataclass(frozen=True)
class Outcome:
    """What a call gave: everything by name, or an error."""

    results: Everything | None
    error: Exception | None

    def __str__(self) -> str:
        return "accepts" if self.error is None else f"raises {self.error!r}"


@dataclass(frozen=True)
class Difference:
    """What only one of the two takes, on purpose: where ``applies``, and the error of the other has these words.

    Older versions of torch than ``since`` agree with us.
    """

    reason: str
    applies: Callable[[Case], bool]
    ours: str = "None"
    theirs: str = "None"
    since: str = ""

    def explains(self, case: Case, ours: Outcome, theirs: Outcome) -> bool:
        return self.applies(case) and self.ours in str(ours.error) and self.theirs in str(theirs.error)


def is_empty(case: Case) -> bool:
    shapes = [x.shape for x in case.arguments.values() if isinstance(x, Normal | Mask)]
    return any(0 in shape for shape in shapes)


def kills_torch(case: Case) -> bool:
    """Say whether torch divides by the number of key heads, which is 0: that ends the process (pytorch#128690)."""
    key = case.arguments.get("key")
    key = key.argument if isinstance(key, Cast) else key
    return case.arguments.get("enable_gqa") is True and isinstance(key, Normal) and key.shape[-3:-2] == (0,)


def anything(_: Case) -> bool:
    return True


DIFFERENCES = [
    Difference(
        "torch's function returns zeros where a tensor is empty, without a look at the rest; we look",
        lambda case: case.is_function and is_empty(case),
        ours="",
        since="2.13",
    ),
    Difference(
        "torch takes a negative probability for 0 where its path does not come to F.dropout; we refuse it",
        anything,
        ours="dropout probability",
    ),
    Difference(
        "torch cannot turn a mask of an empty batch to its heads; we give the empty result",
        is_empty,
        theirs="is ambiguous",
    ),
]
# Errors of torch that are no check: it stumbled over the argument. Ours are a ValueError or a TypeError there.
STUMBLES = (IndexError, AttributeError, ZeroDivisionError)


def outcome_of(case: Case, package: Any, weights_of: nn.Module | None = None) -> tuple[Outcome, Any]:
    """Build and call, and give what was built too."""
    built = None
    with warnings.catch_warnings(), fast_path(False), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")  # masks of mixed dtypes, nested tensors, empty weights: not about validity
        try:
            built = case.construct(package, weights_of=weights_of)
            return Outcome(everything(case, built), None), built
        except Exception as error:
            return Outcome(None, error), built


def is_of_torchs_type(case: Case, ours: Exception, theirs: Exception) -> bool:
    """Say whether ``except`` clauses written for torch catch ours too."""
    # torch looks at a causal bias before the dtypes; where two things are wrong, either may come first.
    has_causal_bias = any(isinstance(x, CausalBiasMask) for x in case.arguments.values())
    return isinstance(ours, type(theirs)) or isinstance(theirs, STUMBLES) or (has_causal_bias and case.is_function)


@pytest.mark.parametrize("component", strategies.COMPONENTS)
@settings(max_examples=3 * settings().max_examples)
@given(data=st.data())
def test_both_reject_or_both_accept_and_agree(component: str, ledger: Ledger, data: st.DataObject) -> None:
    case = data.draw(spoiled(strategies.COMPONENTS[component]()).filter(lambda case: not kills_torch(case)))
    theirs, module = outcome_of(case, nn)
    ours, _ = outcome_of(case, scratch, module if isinstance(module, nn.Module) else None)
    ledger.add(f"scratch.{component}", "rejected, or accepted and equal", Tally(1))
    if any(difference.explains(case, ours, theirs) for difference in DIFFERENCES):
        return
    assert (ours.error is None) == (theirs.error is None), f"scratch {ours}\ntorch.nn {theirs}\n{case!r}"
    if ours.error is not None and theirs.error is not None:
        assert isinstance(ours.error, ValueError | TypeError), f"{ours}\n{case!r}"
        assert is_of_torchs_type(case, ours.error, theirs.error), f"scratch {ours}\ntorch.nn {theirs}\n{case!r}"
    if ours.results is not None and theirs.results is not None:
        # Where nothing is looked at, torch gives no gradient to a mask, and we give 0.
        compared = {name for name in theirs.results if not is_empty(case) or name.startswith("output")}
        actual, expected = ({name: x[name] for name in compared & x.keys()} for x in (ours.results, theirs.results))
        assert_same(case, actual, expected)


HEADS = {"query": Normal((3, 5, 2), 0), "key": Normal((3, 7, 2), 1), "value": Normal((3, 7, 2), 2)}
FUNCTION, MODULE = (
    Part("scaled_dot_product_attention", {}),
    Part("MultiheadAttention", {"embed_dim": 2, "num_heads": 1}),
)
NO_BATCH = dict.fromkeys(HEADS, Normal((5, 0, 2), 0))
EXAMPLES = [
    Case(FUNCTION, {**HEADS, "value": Normal((3, 0, 2), 0)}),
    Case(FUNCTION, {**HEADS, "dropout_p": -0.5}),
    Case(MODULE, {**NO_BATCH, "attn_mask": Mask("arbitrary", (0, 5, 5), ()), "need_weights": False}),
]


def test_no_key_heads_to_share_are_refused_where_torch_ends_the_process() -> None:
    case = Case(FUNCTION, {**HEADS, "key": Normal((3, 0, 7, 2), 0), "enable_gqa": True})
    assert kills_torch(case)
    outcome, _ = outcome_of(case, scratch)
    assert isinstance(outcome.error, ValueError)


@pytest.mark.parametrize(
    ("difference", "case"),
    list(zip(DIFFERENCES, EXAMPLES, strict=True)),
    ids=[difference.reason for difference in DIFFERENCES],
)
def test_every_listed_difference_is_still_there(difference: Difference, case: Case) -> None:
    if difference.since and torch.__version__ < TorchVersion(difference.since):
        pytest.skip(f"new in torch {difference.since}")
    (ours, _), (theirs, _) = (outcome_of(case, package) for package in (scratch, nn))
    assert difference.explains(case, ours, theirs)
    assert (ours.error is None) != (theirs.error is None)
