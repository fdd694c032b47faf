"""Call somebody's attention with more arguments than its plan gives, and say which tokens reach which output."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.reach.calling import Caller, CallPlan, Inputs, from_layout, random_inputs
from equivalence_tests.checker.reach.construction import Sizes
from equivalence_tests.checker.reach.kept_state import keeping_state
from equivalence_tests.checker.reach.tracing import tensors_in

__all__ = ["Trial"]


@dataclass(frozen=True)
class Trial:
    """A way to call the code that works, to be tried with other arguments and lengths.

    Args:
        caller: Holds the code.
        plan: How it is called.
        sizes: Of the inputs.
    """

    caller: Caller
    plan: CallPlan
    sizes: Sizes

    def inputs(self, query_len: int | None = None, key_len: int | None = None, seed: int = 11) -> Inputs:
        """Draw inputs; of other lengths where they are given."""
        queries = query_len or self.sizes.query_len
        keys = key_len or (query_len if self.plan.self_attention and query_len else self.sizes.key_len)
        sizes = replace(self.sizes, query_len=queries, key_len=keys)
        return random_inputs(sizes, self.plan, seed, self.caller.dtype)

    def arguments(self, inputs: Inputs, extra: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Lay the arguments out, with more by name."""
        args, kwargs = self.caller.arguments(self.plan, inputs, None)
        return tuple(args), {**kwargs, **extra}

    def returned(self, inputs: Inputs, extra: Mapping[str, Any], *, changing: bool = False) -> Any:
        """Call, and give what comes back, whatever it is.

        Args:
            inputs: The tensors.
            extra: More arguments, by name.
            changing: Whether what the code keeps may stay changed.
        """
        args, kwargs = self.arguments(inputs, extra)
        with torch.no_grad(), contextlib.nullcontext() if changing else keeping_state(self.caller.function):
            return self.caller.function(*args, **kwargs)

    def output(self, inputs: Inputs, extra: Mapping[str, Any]) -> Tensor:
        """Call, and give the output as (batch, query_len, embed_dim)."""
        return self.output_in(self.returned(inputs, extra))

    def output_in(self, returned: Any) -> Tensor:
        """Find the output in what came back."""
        return from_layout(list(tensors_in((returned,)))[self.plan.output], self.plan.layout)

    def reach(self, length: int, extra: Mapping[str, Any], tokens: Iterable[int] | None = None) -> Tensor:
        """Say which outputs change when one input token does: (length, length) bool, [output, input].

        Where queries are a tensor of their own, only the keys' token changes, with its value.

        Args:
            length: Of queries and keys.
            extra: More arguments, by name.
            tokens: Which to change; None for all.
        """
        inputs = self.inputs(length, length)
        whole = self.output(inputs, extra)
        reached = torch.zeros(length, length, dtype=torch.bool)
        for token in range(length) if tokens is None else tokens:
            changed = inputs.changed(token=token)
            changed = changed if self.plan.self_attention else replace(changed, query=inputs.query)
            apart = (whole - self.output(changed, extra)).abs() > 1e-7 * whole.abs().max()
            reached[:, token] = apart.flatten(2).any(-1).any(0)
        return reached

    def sees_the_first(self, length: int) -> bool:
        """Whether the last output of so many depends on the first token."""
        return bool(self.reach(length, {}, [0])[-1, 0])
