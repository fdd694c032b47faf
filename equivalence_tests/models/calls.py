"""The calls of an attention function in one run of a model, and the first whose output departs."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.instruments.differences import FLOAT64_BOUND, largest_value

__all__ = ["Call", "Recorder", "apart", "first_departure"]

# A difference that is no rounding on its way through the layers.
DEPARTS = 1e4 * FLOAT64_BOUND


@dataclass(eq=False)
class Call:
    """One call of an attention function.

    Args:
        function: What was called.
        module: The module that called it.
        inputs: Queries, keys and values, as they were before.
        mask: What it was given as its mask.
        options: Its arguments by name.
        output: What it returned first; None if it failed.
        writes: Whether it wrote into its inputs.
    """

    function: Callable[..., Any]
    module: nn.Module
    inputs: tuple[Tensor, Tensor, Tensor]
    mask: Any
    options: dict[str, Any]
    output: Any = None
    writes: bool = False

    def again(self, inputs: Sequence[Tensor], **changed: Any) -> Any:
        """Call the function with other queries, keys and values, or other options."""
        result = self.function(self.module, *inputs, self.mask, **self.options | changed)
        return result[0] if isinstance(result, tuple) else result


@dataclass
class Recorder:
    """Keeps the calls that go through it.

    Args:
        dropout: The dropout rate that the function is given in place of the model's; 0 leaves that one.
        calls: What ran.
        failure: The error that the function raised.
    """

    dropout: float = 0.0
    calls: list[Call] = field(default_factory=list)
    failure: Exception | None = None

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Put a record around a function, which otherwise does what it did."""

        @functools.wraps(function)
        def recorded(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.dropout and module.training:
                kwargs["dropout"] = self.dropout
            given = query, key, value
            mask = args[0] if args else kwargs.get("attention_mask")
            options = {name: x for name, x in kwargs.items() if name != "attention_mask"}
            call = Call(function, module, _copies(given), mask, options)
            self.calls.append(call)
            try:
                result = function(module, query, key, value, *args, **kwargs)
            except Exception as error:
                self.failure = error
                raise
            output = result[0] if isinstance(result, tuple) else result
            call.output = output.detach().clone() if isinstance(output, Tensor) else output
            call.writes = any(not x.equal(y) for x, y in zip(map(_known, given), map(_known, call.inputs), strict=True))
            return result

        return recorded


def _known(x: Tensor) -> Tensor:
    return x.detach().nan_to_num()


def _copies(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (x.detach().clone() for x in tensors)
    return query, key, value


def first_departure(own: Sequence[Call], theirs: Sequence[Call]) -> int | None:
    """Find the first call whose output is another, though its inputs are the same.

    Args:
        own: The calls in the run with the model's own attention.
        theirs: Those in the run that is judged.

    Returns:
        Its number in both; None if the calls do not tell.
    """
    for number, (right, given) in enumerate(zip(own, theirs, strict=False)):
        # What stands at padding may differ: nobody looks at it.
        counted = rows(right), keys(right), keys(right)
        pairs = zip(right.inputs, given.inputs, counted, strict=True)
        if any(apart(x.transpose(1, 2), y.transpose(1, 2), where) for x, y, where in pairs):
            return None
        if given.writes or not isinstance(given.output, Tensor) or apart(right.output, given.output, rows(right)):
            return number
    return None


def rows(call: Call) -> Tensor | None:
    """Say which queries count, (batch, query_len), where the mask tells: those that see a key and are no padding."""
    seen = _seen(call)
    if seen is None:
        return None
    square = seen.shape[1] == seen.shape[2]  # among themselves, what nobody looks at is padding
    return seen.any(-1) & seen.any(-2) if square else seen.any(-1)


def keys(call: Call) -> Tensor | None:
    """Say which keys any query sees, (batch, key_len), where the mask tells."""
    seen = _seen(call)
    return None if seen is None else seen.any(-2)


def _seen(call: Call) -> Tensor | None:
    mask = call.mask
    if not isinstance(mask, Tensor) or mask.dim() != 4 or not mask.is_floating_point():
        return None
    visible = (mask > torch.finfo(mask.dtype).min)[:, 0, :, : call.inputs[1].shape[2]]
    return visible.expand(call.inputs[0].shape[0], -1, -1)


def apart(right: Tensor, given: Any, seeing: Tensor | None = None) -> bool:
    """Say whether two tensors differ by more than rounding, in the rows that count; NaN counts everywhere."""
    if not isinstance(given, Tensor) or right.shape != given.shape:
        return True
    difference = (right - given).abs()
    if seeing is not None and seeing.shape[1] == right.shape[1]:
        difference = difference.masked_fill(~seeing.view(*seeing.shape, *[1] * (right.dim() - 2)) & ~given.isnan(), 0.0)
    return bool((~(difference <= DEPARTS * largest_value([right]))).any())
