"""The samples that PyTorch's own tests call these modules with, given to scratch's classes in place of torch.nn's.

They ship with torch, in ``torch.testing._internal.common_modules``, which asks for the package expecttest.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import scratch
from equivalence_tests.instruments.differences import compare_tensors
from equivalence_tests.instruments.side_by_side import (
    CLASSES,
    assert_equal,
    fast_path,
    merges_as_torch_does,
    outputs_and_gradients,
)
from equivalence_tests.instruments.weights import copy_weights, randomize_parameters

pytest.importorskip("expecttest", reason="torch's own samples ask for expecttest")
common_modules = pytest.importorskip("torch.testing._internal.common_modules")

# torch.nn has no samples of its decoder stack.
SAMPLED = [name for name in CLASSES if name != "TransformerDecoder"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested.tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*bias=False:UserWarning"),
]


@cache
def samples_of(name: str, training: bool, package: Any = nn) -> list[Any]:
    """Draw torch's samples; a layer that is an argument of a stack comes from the package."""
    info = next(info for info in common_modules.module_db if info.module_cls is getattr(nn, name))
    torch.manual_seed(0)
    with mock.patch.object(nn, "TransformerEncoderLayer", package.TransformerEncoderLayer):
        samples: list[Any] = info.module_inputs_func(info, "cpu", torch.float64, True, training)
    return samples


def construct(package: Any, name: str, sample: Any) -> nn.Module:
    given = sample.constructor_input
    module: nn.Module = getattr(package, name)(*given.args, **given.kwargs)
    return module.double()


def call_of(sample: Any, module: nn.Module) -> tuple[dict[str, torch.Tensor], Mapping[str, Any]]:
    """Give the positional inputs by name, and the rest."""
    names = {"MultiheadAttention": ("query", "key", "value"), "Transformer": ("src", "tgt")}
    decoding = ("tgt", "memory") if "Decoder" in type(module).__name__ else ("src",)
    inputs = zip(names.get(type(module).__name__, decoding), sample.forward_input.args, strict=True)
    return dict(inputs), sample.forward_input.kwargs


@pytest.mark.sampled(3)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", SAMPLED)
def test_torchs_own_samples_give_the_same(name: str, training: bool) -> None:
    pairs = list(zip(samples_of(name, training), samples_of(name, training, scratch), strict=True))
    assert len(pairs) > 30
    for sample, our_sample in pairs:
        theirs = randomize_parameters(construct(nn, name, sample).train(training))
        ours = construct(scratch, name, our_sample).train(training)
        copy_weights(theirs, ours)
        inputs, others = call_of(sample, theirs)
        with fast_path(False):
            actual, expected = (outputs_and_gradients(module, inputs, **others) for module in (ours, theirs))
        same_bits = name == "MultiheadAttention" and merges_as_torch_does(theirs)
        assert_equal(actual, expected, relative_bound=0.0 if same_bits else 1e-12)


@pytest.mark.parametrize("name", [name for name in SAMPLED if name != "TransformerEncoder"])
def test_samples_without_a_batch_agree_with_a_batch_of_one(name: str) -> None:
    """torch's samples bring the function that gives the expected output."""
    checked = 0
    for sample in samples_of(name, False, scratch):
        if sample.reference_fn is None:
            continue
        module = randomize_parameters(construct(scratch, name, sample).eval())
        given = sample.forward_input
        results = module(*given.args, **given.kwargs)
        expected = sample.reference_fn(module, *given.args, **given.kwargs)
        for x, y in zip(results, expected, strict=True) if isinstance(results, tuple) else [(results, expected)]:
            comparison = compare_tensors(x, y, call=str(sample.desc))
            assert comparison.passed, str(comparison)
        checked += 1
    assert checked > 10
