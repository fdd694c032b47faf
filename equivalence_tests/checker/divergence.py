"""first_divergence: where two models of the same structure part, each sub-module fed equal input."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from equivalence_tests.checker.engine.running import called_by_hooks, inputs_of
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.instruments.differences import FLOAT64_BOUND, Comparison, compare_tensors
from scratch.validation import ArgumentValueError


@dataclass(frozen=True)
class Divergence:
    """The first sub-module that differs when fed equal input.

    Args:
        path: Of the sub-module; "" for the model itself.
        direction: "forward" or "backward".
        comparison: Both values at the worst element, and by how much they differ.
    """

    path: str
    direction: str
    comparison: Comparison

    def __str__(self) -> str:
        return f"{self.path or 'the model itself'} differs in {self.direction}: {self.comparison}"


def first_divergence(
    a: nn.Module, b: nn.Module, inputs: Sequence[Any] | Mapping[str, Any], *, relative_bound: float = FLOAT64_BOUND
) -> Divergence | None:
    """Find the first sub-module whose output, or gradient, differs when it is fed equal input.

    The forward pass of ``b`` is run once and the input of each sub-module kept. The sub-module of the same path in
    ``a`` is then given that same input. Sub-modules without sub-modules of their own come first, in the order of the
    calls; a module whose parts all agree while it differs has its mistake in its own forward.

    Args:
        a: The candidate.
        b: The reference, with sub-modules of the same paths.
        inputs: Arguments of the forward pass: a sequence, or a mapping for keywords.
        relative_bound: The greatest difference, relative to the largest value, that counts as equal.

    Returns:
        The first divergence, or None if there is none.

    Raises:
        ValueError: If the two have no sub-module path in common and differ themselves in structure.

    >>> right = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)).double()
    >>> wrong = copy.deepcopy(right)
    >>> wrong[1] = nn.GELU()
    >>> first_divergence(wrong, right, (torch.randn(2, 3, dtype=torch.float64),)).path
    '1'
    """
    shared = [path for path, _ in b.named_modules() if path in dict(a.named_modules())]
    if shared == [""] and list(b.children()) and list(a.children()):
        raise ArgumentValueError("a and b must have sub-modules of the same paths, got none in common")
    given = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    args, kwargs = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, given)
    with torch.no_grad(), called_by_hooks(b):
        given_to = inputs_of(dict(b.named_modules()), lambda: b(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    for path, ours, named in given_to:
        calls.setdefault(path, (ours, named))
    order = sorted(calls, key=lambda path: _depth_below(b.get_submodule(path)))
    for path in (path for path in order if path in shared):
        found = _compare(a.get_submodule(path), b.get_submodule(path), path, *calls[path], relative_bound)
        if found is not None:
            return found
    return None


def _depth_below(module: nn.Module) -> int:
    return max((1 + _depth_below(child) for child in module.children()), default=0)


def _compare(
    a: nn.Module, b: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], bound: float
) -> Divergence | None:
    ours, theirs = _run(a, args, kwargs), _run(b, args, kwargs)
    for direction, mine, reference in zip(("forward", "backward"), ours, theirs, strict=True):
        for index, (x, y) in enumerate(zip(mine, reference, strict=False)):
            name = "output" if direction == "forward" else "gradient of input"
            comparison = compare_tensors(x, y, name=f"{name} {index}" if index else name, relative_bound=bound)
            if not comparison.passed:
                return Divergence(path, direction, comparison)
    return None


def _run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of the floating inputs for a fixed direction."""
    args, kwargs = copy.deepcopy(args), copy.deepcopy(kwargs)
    leaves = [x.requires_grad_() for x in tensors_in((args, kwargs))]
    module_was_training = module.training
    module.eval()
    try:
        outputs = list(tensors_in((module(*args, **kwargs),)))
        total = sum((x * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in outputs)
        gradients: Sequence[Tensor | None] = ()
        if leaves and isinstance(total, Tensor) and total.requires_grad:
            gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    finally:
        module.train(module_was_training)
    return [x.detach() for x in outputs], [g for g in gradients if g is not None]
