"""Hold a program against the user's code, whole: what comes back, and the gradients of arguments and parameters."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.running import Call, named_tensors
from equivalence_tests.checker.equivalent.expressions import Values
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.equivalent.watched import Layout
from equivalence_tests.checker.reach.branches import RAN
from equivalence_tests.checker.reach.devices import LEFT
from equivalence_tests.checker.reach.state import keeping_state, settings_of
from equivalence_tests.checker.reporting.equivalents import Equivalent

WRITTEN_INTO = ", which the call writes into"
NO_GRADIENTS, OF_ARGUMENT = "gradients, of which it gives none", "the argument "
OF_ARGUMENTS = (NO_GRADIENTS, f"gradient of {OF_ARGUMENT}")  # differences that no parameter explains
Computes = Callable[[Values, Tensor | None], Tensor]  # what a program gives, beside a mask that may be None


@dataclass(frozen=True)
class Case:
    """A call that is compared."""

    call: Call  # with fresh arguments
    may_attend: Tensor | None  # what the mask among them lets each query look at; None where none is handed over
    words: str  # what it is, for the user
    redrawn: int | None = None  # draws all parameters anew; None keeps them
    rows: Tensor | None = None  # which tokens of the output are compared, (batch, query_len) bool; None for all
    lengths: tuple[int, int] | None = None  # how many queries and keys it has, if others than those that were read
    initial: Mapping[str, Tensor] = field(default_factory=dict)  # what the parameters are set to, by name


@dataclass(frozen=True)
class Difference:
    """How far a program is from the user's code in one call."""

    case: str
    what: str  # "output", "gradient of the argument x", "gradient of out.weight" and so on
    size: float  # the greatest difference, relative to the largest value


@dataclass
class Comparison:
    """How a program compares with the user's code in several calls."""

    tolerance: float  # what differs by less, relative to the largest value, is rounding
    worst: Difference = Difference("", "output", 0.0)  # the greatest, or the first that is more than rounding
    compared: list[str] = field(default_factory=list)  # what each call was that could be compared
    left_out: list[tuple[Case, Exception]] = field(default_factory=list)  # the calls that raised something

    @property
    def agrees(self) -> bool:
        """Whether whole outputs and gradients agree."""
        return self.worst.size <= self.tolerance

    @property
    def agrees_in_all(self) -> bool:
        """Whether each call could be compared, too."""
        return self.agrees and not self.left_out

    def of(self, program: Equivalent) -> Equivalent:
        """Write into a program how it compares."""
        return replace(
            program,
            compared=tuple(self.compared),
            not_run=tuple(case.words for case, _ in self.left_out),
            difference=self.worst.size,
            where=f"{self.worst.what}, {self.worst.case}",
            agrees=self.agrees,
        )


def compare(program: Callable[[Case], Computes], cases: Iterable[Case], layout: Layout, tolerance: float) -> Comparison:
    """Compare a program with the user's code, until it differs; parameters that a case draws anew stay for the next."""
    found = Comparison(tolerance)
    for case in cases:
        try:
            differences = list(_differences(program(case), case, layout))
        except Exception as error:  # the code may take no other lengths, or no gradients
            found.left_out.append((case, error))
            continue
        found.compared.append(case.words)
        greatest = max([found.worst, *differences], key=lambda one: one.size)
        found.worst = next((one for one in differences if one.size > tolerance), greatest)  # the output comes first
        if not found.agrees:
            break
    return found


@contextmanager
def kept_parameters(module: nn.Module | None) -> Iterator[None]:
    """Let all parameters but those that are frozen on purpose be differentiated and drawn anew; put them back after."""
    settings = set() if module is None else {id(x) for x in settings_of(module)}
    every = [] if module is None else list(module.parameters())
    kept = [(x, x.detach().clone(), x.requires_grad) for x in every if x.is_floating_point()]
    for x, _, learns in kept:
        x.requires_grad_(learns or id(x) not in settings)
    try:
        yield
    finally:
        with torch.no_grad():
            for x, before, learns in kept:
                x.copy_(before)
                x.requires_grad_(learns)


def redraw(module: nn.Module | None, seed: int) -> None:
    """Draw all parameters anew: a gain of 1, a gate of 0 or a table of 0 hide what they do."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in () if module is None else module.parameters():
            if x.is_floating_point() and x.requires_grad:
                shift = 0.5 if x.dim() == 1 else 0.0
                x.copy_(torch.randn(x.shape, generator=generator, dtype=torch.float64) * 0.4 + shift)


def _differences(program: Computes, case: Case, layout: Layout) -> Iterator[Difference]:
    """Compare one call, with gradients where parameters are drawn anew; what it writes into its arguments differs."""
    call, gradients = case.call, case.redrawn is not None
    if case.redrawn is not None:
        redraw(call.module, case.redrawn)
    with torch.no_grad():
        for name, x in call.module.named_parameters() if call.module is not None and case.initial else ():
            x.copy_(case.initial[name])
    leaves = {name: x.clone().requires_grad_(gradients) for name, x in call.tensors if id(x) in call.seeds}
    instead = {id(x): leaves[name] for name, x in call.tensors if name in leaves}
    args, kwargs, _ = call.fresh(leaves=instead)
    with torch.set_grad_enabled(gradients):
        with keeping_state(call.module):
            torch.default_generator.manual_seed(5)
            theirs = layout.tokens(LEFT.watching(RAN.watching(call.function))(*args, **kwargs)).double()
        if bool(theirs.isnan().any()):
            raise UnreadError("it gives NaN")
        values = layout.values(call, instead)
        ours = program(values, case.may_attend).double()
        if ours.dim() == 3 and ours.size(1) == 1 and theirs.shape == (1, len(ours), ours.size(-1)):
            theirs = theirs.transpose(0, 1)  # one token of each sample, without its axis
        if case.rows is not None and ours.shape == theirs.shape:
            ours, theirs = ours[case.rows], theirs[case.rows]
    yield Difference(case.words, "output", difference_of(ours, theirs))
    for (name, before), (_, after) in zip(call.tensors, named_tensors(args, kwargs), strict=True):
        if not torch.equal(before, after):
            yield Difference(case.words, f"{name}{WRITTEN_INTO}", torch.inf)
    if gradients and ours.requires_grad and not theirs.requires_grad:
        yield Difference(case.words, NO_GRADIENTS, torch.inf)
    if gradients and theirs.requires_grad and ours.shape == theirs.shape:
        arguments = {f"{OF_ARGUMENT}{name}": x for name, x in leaves.items()}
        yield from _of_gradients(case, ours, theirs, {**arguments, **values.parameters.named})


def _of_gradients(case: Case, ours: Tensor, theirs: Tensor, named: dict[str, Tensor]) -> Iterator[Difference]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    wanted = {name: x for name, x in named.items() if x.requires_grad and x.numel()}
    one, other = (_gradients((y.double() * weight).sum(), [*wanted.values()]) for y in (ours, theirs))
    size = max((float(x.abs().max()) for x in other), default=0.0)
    for name, a, b in zip(wanted, one, other, strict=True):
        yield Difference(case.words, f"gradient of {name}", _number((a - b).abs().max() / max(size, 1e-30)))


def _gradients(y: Tensor, wanted: Sequence[Tensor]) -> Sequence[Tensor]:
    if not y.requires_grad or not wanted:
        return [torch.zeros_like(x) for x in wanted]
    return torch.autograd.grad(y, wanted, allow_unused=True, materialize_grads=True)


def difference_of(ours: Tensor, theirs: Tensor) -> float:
    """The greatest difference of two tensors, relative to the largest value; infinite where they cannot be compared."""
    if ours.shape != theirs.shape:
        return torch.inf
    if not theirs.numel():
        return 0.0
    gap = torch.where(ours == theirs, 0.0, ours - theirs)  # where a mask hides, both are infinite
    return _number(gap.abs().max() / torch.where(theirs.isfinite(), theirs, 0.0).abs().max().clamp_min(1e-30))


def _number(x: Tensor) -> float:
    """A difference that is no number is no agreement."""
    return float(x.detach()) if bool(x.isfinite()) else torch.inf
