"""The plain checks by themselves, with what no door hands them."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scratch import validation

A_TEXT: Any = "1"


def mask_mod(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (batch == batch) & (head == head) & (q_idx >= kv_idx)


@pytest.mark.parametrize(
    "check",
    [
        lambda: validation.check_whole(a=3, b=np.int64(3), c=torch.tensor(3)),  # torch.jit.trace hands out tensors
        lambda: validation.check_not_negative(a=0, b=None),
        lambda: validation.check_positive(a=1),
        lambda: validation.check_number(a=3, b=0.5, c=torch.tensor(0.5)),
        lambda: validation.check_positive_number("a", 0.5),
        lambda: validation.check_dropout("a", 0.0),
        lambda: validation.check_dropout("a", 1.0),
        lambda: validation.check_function("a", len),
        lambda: validation.check_module("a", nn.Identity()),
        lambda: validation.check_create_block_mask(mask_mod, (1, 2)),
        lambda: validation.check_path_part("self", ["0.self_attn", "0.multihead_attn"]),
        lambda: validation.check_width("a", torch.ones(2, 3, 5), "d_model", 5),
        lambda: validation.check_known_to_torch(math.dist, {"p": 1, "q": 2}),
    ],
)
def test_what_fits_is_taken(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(
    ("check", "error", "text"),
    [
        *(
            (lambda x=x: validation.check_whole(a=x), TypeError, f"a must be a whole number, got {x!r}")
            for x in (None, 0.5, torch.tensor([3]), torch.tensor(3.0), torch.tensor(3j))
        ),
        (lambda: validation.check_not_negative(a=-1), ValueError, "a must not be negative, got -1"),
        (lambda: validation.check_positive(a=0), ValueError, "a must be greater than 0, got a=0"),
        (lambda: validation.check_number(a=torch.ones(1)), TypeError, "a must be a number, got tensor([1.])"),
        (lambda: validation.check_number(a=3j), TypeError, "a must be a number, got 3j"),
        (lambda: validation.check_positive_number("a", A_TEXT), TypeError, "a must be a number, got '1'"),
        (lambda: validation.check_width("a", A_TEXT, "d_model", 5), TypeError, "a must be a tensor, got str"),
        (
            lambda: validation.check_create_block_mask(mask_mod, (2, 1.5)),
            TypeError,
            "BLOCK_SIZE must be a whole number, got 1.5",
        ),
        (lambda: validation.check_path_part("norm", ["self_attn"]), ValueError, "one of self_attn; got 'norm'"),
        (lambda: validation.check_dropout("a", -0.5), ValueError, "between 0 and 1, but got a=-0.5"),
        (lambda: validation.check_dropout("a", 1.5), ValueError, "between 0 and 1, but got a=1.5"),
        (lambda: validation.check_function("a", 3), TypeError, "a must be a function, got int"),
        (lambda: validation.check_module("a", len), TypeError, "a must be a torch.nn.Module, got builtin_function"),
        *(
            (lambda x=x: validation.check_width("a", x, "d_model", 5), ValueError, f"d_model = 5, got {tuple(x.shape)}")
            for x in (torch.tensor(1.0), torch.ones(5, 2))
        ),
        (
            lambda: validation.check_known_to_torch(math.dist, {"p": 1, "r": 2}),
            NotImplementedError,
            f"r must be left at its default: dist of torch {torch.__version__} does not have it",
        ),
    ],
)
def test_what_does_not_fit_is_named(check: Callable[[], None], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        check()
    assert text in str(caught.value)


def test_a_check_that_is_quiet_keeps_its_name() -> None:
    assert validation.check_not_negative.__name__ == "check_not_negative"


def test_autocast_chooses_the_dtype_of_floats_alone() -> None:
    dtypes = (torch.float32, torch.float64, torch.bool, torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        found = tuple(validation.autocast_dtype(torch.ones(1, dtype=dtype)) for dtype in dtypes)
    assert found == (torch.bfloat16, *dtypes[1:])


def hides_a_full_disk() -> None:
    """As torch.save does."""
    try:
        raise OSError("disk full")
    except OSError:
        raise RuntimeError("hidden")  # noqa: B904


def test_what_keeps_a_file_from_being_written_is_said_and_other_errors_stay() -> None:
    with pytest.raises(ValueError, match=r"^a.pt could not be written: disk full$"), validation.writing(Path("a.pt")):
        hides_a_full_disk()
    with pytest.raises(RuntimeError, match=r"^other$"), validation.writing(Path("a.pt")):
        raise RuntimeError("other")


def test_what_torchs_flex_attention_lacks_on_the_cpu_it_has_elsewhere() -> None:
    x: Any = torch.ones(1, device="meta", requires_grad=True)
    validation.check_flex_on_device(x, x, x, SimpleNamespace(max_scores=True))
