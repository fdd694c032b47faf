"""The truth about a version is a number: how far its whole output lies from the right one's, with weights copied."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from equivalence_tests.wrong.sources import Right

__all__ = ["Dropped", "Truth", "redrawn", "truth_of"]

DIFFERS, ROUNDING, DRAWS, HIDDEN = 1e-6, 1e-10, 3, -1e9


class Dropped(Exception):  # noqa: N818
    """A version about which there is no truth: it crashes, or gives no numbers."""


@dataclass(frozen=True)
class Truth:
    """How far a version is off.

    Args:
        difference: Of the whole output in eval, relative to the largest value; the largest of all draws.
        beyond: The same of gradients, and of outputs in training from one state of the random numbers.
        idle: Whether it has a parameter of its own, which may rightly be missed where the output is the same.
    """

    difference: float
    beyond: float
    idle: bool = False

    @property
    def kind(self) -> Literal["differs", "same", "neither"]:
        """Whether the output differs; "neither" where rounding, or what is no output, may say either."""
        if self.difference > DIFFERS:
            return "differs"
        return "same" if max(self.difference, self.beyond) < ROUNDING and not self.idle else "neither"


def truth_of(right: Right, whole: nn.Module, wrong: nn.Module) -> Truth:
    """Compare a version with the right one, parameters drawn anew and copied, on fresh inputs.

    Args:
        right: How both are called.
        whole: The right module; its parameters are changed.
        wrong: The version; likewise.

    Raises:
        Dropped: If the version crashes, returns other shapes, or anything that is not finite.
    """
    largest, beyond = 0.0, 0.0
    for seed in range(DRAWS):
        redrawn(whole, wrong, seed)
        for length in right.lengths:
            for call in range(len(right.calls)):
                ways = [_answers(module, right, (seed, length, call)) for module in (whole, wrong)]
                (outputs, more), (others, others_more) = ways
                largest = max(largest, _apart(outputs, others))
                beyond = max(beyond, _apart(more, others_more))
    return Truth(largest, beyond, len([*wrong.parameters()]) > len([*whole.parameters()]))


@torch.no_grad()
def redrawn(whole: nn.Module, wrong: nn.Module, seed: int) -> None:
    """Draw the parameters of the right module anew and copy them; what was added to the other is drawn too."""
    generator = torch.Generator().manual_seed(1000 + seed)
    known = dict(whole.named_parameters())
    for name, parameter in (*known.items(), *wrong.named_parameters()):
        if known.get(name) is parameter or name not in known:
            size = 0.4 if parameter.dim() < 2 else parameter[0].numel() ** -0.5
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(parameter) * size)
        else:
            parameter.copy_(known[name])


def _answers(module: nn.Module, right: Right, where: tuple[int, int, int]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of one call; and its gradients with what it returns in training."""
    seed, length, call = where
    given = right.drawn(seed + 100, length)[call]
    inputs = [value.requires_grad_() for value in tree_leaves(given) if _may_learn(value)]
    outputs = list(_tensors(_run(lambda: right.run(module.eval(), given))))
    learnt = [parameter for name, parameter in module.named_parameters() if "added" not in name]
    total = torch.stack([(output * output.detach().cos()).sum() for output in outputs]).sum()
    gradients = _gradients(total, [*inputs, *learnt]) if total.requires_grad else []
    again = right.drawn(seed + 100, length)[call]  # a cache among them was written
    torch.manual_seed(seed)
    with torch.no_grad():
        trained = list(_tensors(_run(lambda: right.run(module.train(), again))))
    return [output.detach() for output in outputs], [*gradients, *trained]


def _gradients(total: Tensor, of: list[Tensor]) -> list[Tensor]:
    try:
        return [*torch.autograd.grad(total, of, materialize_grads=True)]
    except RuntimeError:  # what a call wrote into a cache is part of the graph of the next
        return []


def _may_learn(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _run(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # an edit may break anything
        raise Dropped(f"{type(error).__name__}: {error}") from error


def _tensors(returned: Any) -> Iterator[Tensor]:
    return (leaf.double() for leaf in tree_leaves(returned) if isinstance(leaf, Tensor))


def _apart(right: list[Tensor], wrong: list[Tensor]) -> float:
    """The greatest difference relative to the largest value."""
    if [x.shape for x in right] != [x.shape for x in wrong]:
        raise Dropped("other shapes come back")
    masks = any(bool(x.isneginf().any()) for x in right)  # one that is added hides by -inf
    right, wrong = ([x.clamp_min(HIDDEN) for x in side] if masks else side for side in (right, wrong))
    if not all(bool(x.isfinite().all()) for x in (*right, *wrong)):
        raise Dropped("something that is not finite comes back")
    pairs = [(one, other) for one, other in zip(right, wrong, strict=True) if one.numel()]
    return max((float((a - b).abs().max() / a.abs().max().clamp(min=1e-12)) for a, b in pairs), default=0.0)
