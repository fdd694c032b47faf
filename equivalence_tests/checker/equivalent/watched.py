"""One attention of a call, run again with gradients: every element at hand, by its token and its feature."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import known, place_of, sources_in, token_of
from equivalence_tests.checker.engine.judgement import Judgement
from equivalence_tests.checker.engine.names import Source
from equivalence_tests.checker.engine.running import Call, Examination
from equivalence_tests.checker.engine.watching import ModuleCall, Operation, Recorder
from equivalence_tests.checker.equivalent.expressions import Values
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.reach.calling import TABLES, Trial, from_layout
from equivalence_tests.checker.reach.tracing import tensors_in

EXACT, SINGLE = 1e-9, 2e-5  # relative; the second where a part is computed in float32
LOW = (torch.float32, torch.complex64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Layout:
    """How the arguments and what comes back are laid out."""

    inward: Callable[[Tensor], Tensor]  # from an argument to (batch, tokens, features)
    outward: Callable[[Tensor], Tensor]  # from the output to the same
    output: Callable[[Any], Tensor]  # finds the output in what came back
    tables: tuple[str, ...] = ()  # the arguments that hold relative positions
    steps: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)  # inward, where it is one time step

    @classmethod
    def of(cls, trial: Trial) -> Self:
        """Say how a trial lays out its arguments and its output."""
        plan = trial.plan
        layouts = (plan.layout, plan.output_layout, plan.step)
        inward, outward, step = (partial(from_layout, layout=layout) for layout in layouts)
        tables = tuple(name for name, role in plan.roles if role in TABLES)
        steps = dict.fromkeys(plan.steps, step)
        return cls(inward, outward, lambda made: list(tensors_in((made,)))[plan.output], tables, steps)

    def tokens(self, returned: Any) -> Tensor:
        """Give the output in what came back, as (batch, tokens, features)."""
        return self.outward(self.output(returned))

    def values(self, call: Call, instead: Mapping[int, Tensor] | None = None) -> Values:
        """Give the tokens among the arguments of a call, each as (batch, tokens, features), its tables and parameters.

        Some of its tensors have others in their place, by their ids.
        """
        stands, data = instead or {}, (pair for pair in call.tensors if id(pair[1]) in call.seeds)
        tokens = {name: self.steps.get(name, self.inward)(stands.get(id(x), x.detach()).double()) for name, x in data}
        tables = {name: x.detach().double() for name, x in call.tensors if name in self.tables}
        return Values(tokens | tables, Parameters.of(call.module))


@dataclass(eq=False)
class Watched:
    """A call that was examined, and run again with gradients.

    What goes into the projections, and what the values are averaged to, is cut off there from what made it, so that
    a gradient says what one projection does.
    """

    found: Examination
    layout: Layout
    recorder: Recorder = field(init=False)
    returned: Any = field(init=False)  # what the second run gave
    tolerance: float = field(init=False)  # what differs by less, relative to the largest value, is rounding

    def __post_init__(self) -> None:
        cuts = dict.fromkeys(self._cut_off(), lambda recorder, operation: operation.outputs[0].value)
        run = self.call.run(cuts, read=False, gradients=True)
        self.recorder, self.returned = run.recorder, run.output
        if [op.name for op in self.operations] != [op.name for op in self.found.run.operations]:
            raise UnreadError("it runs differently where gradients are required")
        self.tolerance = SINGLE if are_single(self.operations) else EXACT

    @property
    def call(self) -> Call:
        """What is called."""
        return self.found.call

    @property
    def judgement(self) -> Judgement:
        """Of the attention that is read."""
        return self.found.judgements[0]

    @property
    def operations(self) -> list[Operation]:
        """Of the run with gradients."""
        return self.recorder.operations

    @cached_property
    def values(self) -> Values:
        """What its expressions are computed from."""
        return self.layout.values(self.call)

    @property
    def parameters(self) -> Parameters:
        """Those of the module."""
        return self.values.parameters

    @cached_property
    def arguments(self) -> Mapping[int, str]:
        """The names of the arguments, by the ids of their tensors."""
        names = dict(zip(self.recorder.names, self.recorder.given, strict=True))
        return {slot.key: name.partition(":")[2] for name, slot in names.items() if name.startswith("arg:")}

    @cached_property
    def learnt(self) -> Mapping[int, str]:
        """The names of the parameters, by the ids of their tensors."""
        return {id(x): name for name, x in self.parameters.named.items()}

    def sources(self, numbers: list[int]) -> list[Source]:
        """Give what made the names, with what only normed or multiplied it followed back to its projection."""
        found: dict[int, Source] = {}
        for source in (self.found.run.names.sources[number] for number in numbers):
            inside = self.sources([*source.parents]) if source.kind in ("normed", "gain") else []
            found |= {one.number: one for one in inside or [source]}
        return list(found.values())

    def taken_by(self, source: Source) -> tuple[Tensor, Operation] | None:
        """Give the tokens that a projection takes, and the operation that ends it, by adding a bias where it does.

        None for what is an argument itself.
        """
        begun = self._begun(source)
        if begun is None or source.operation is None:
            return None
        before = self.found.run.names.before[begun.index]
        operation = self.operations[begun.index]
        named = [slot.tensor for slot, codes in zip(operation.inputs, before, strict=True) if codes is not None]
        return (named or [operation.inputs[0].tensor])[0], self.operations[source.operation.index]

    def _begun(self, source: Source) -> Operation | None:
        """Give the operation that takes the tokens of a source: where a bias is added, that of its projection."""
        parents = [self.found.run.names.sources[number] for number in source.parents]
        biased = source.kind == "added" and [parent.kind for parent in parents] == ["projection"]
        return parents[0].operation if biased else source.operation

    def maker_of(self, tensor: Tensor, before: int) -> Operation | None:
        """Give the last operation that gave a tensor, of those before another one; None where none did."""
        made = (op for op in reversed(self.operations[:before]) if any(out.tensor is tensor for out in op.outputs))
        return next(made, None)

    def call_of(self, tensor: Tensor, before: int) -> ModuleCall | None:
        """Give the outermost sub-module that gave a tensor and holds nothing of the attention itself."""
        ended = (call for call in self._calls_beside if call.end <= before)
        gave = (call for call in ended if any(x is tensor for x in call.outputs))
        return next((call for call in gave if not any(x is tensor for x in call.inputs)), None)

    def call_around(self, index: int) -> ModuleCall | None:
        """Give the outermost sub-module that runs an operation and holds nothing of the attention itself."""
        return next((call for call in self._calls_beside if call.first <= index < call.end), None)

    @property
    def _calls_beside(self) -> Iterator[ModuleCall]:
        """The calls of sub-modules that hold nothing of the attention itself, the outermost first."""
        first, last = self.judgement.attention.first.index, self.judgement.attention.last.index
        beside = (call for call in self.recorder.calls if not call.first <= first <= last < call.end)
        return (call for call in beside if call.path)

    def positions(self, tensor: Tensor, made_by: Operation) -> Tensor | None:
        """Lay the elements of a tensor out by tokens and features: (tokens, features), each its place in memory order.

        None where the names do not say it.
        """
        place = [slot.tensor is tensor for slot in made_by.outputs].index(True)
        codes = self.found.run.names.after[made_by.index][place]
        if codes is None or codes.is_complex() or not bool(known(codes).all()):
            return None
        token = token_of(codes.reshape(-1))
        tokens, counts = token.unique(return_counts=True)
        if bool((counts != len(token) // len(tokens)).any()):
            return None
        return place_of(codes.reshape(-1)).argsort(stable=True).view(len(tokens), -1)

    def _cut_off(self) -> list[int]:
        """The numbers of what gives the tokens that are projected, and the averaged values."""
        attention = self.judgement.attention
        run = self.found.run
        ends = [context.operation for part in attention.parts for context in part.contexts]
        sides = [codes for part in attention.parts for codes, _ in part.sides.values()]
        numbers = sorted({number for codes in sides for number in sources_in(codes)})
        cut: list[Operation | None] = [*ends, run.operations[attention.end.index]]
        for source in self.sources(numbers):
            begun = self._begun(source)
            if begun is not None:
                before = run.names.before[begun.index]
                taken = [x for x, codes in zip(begun.inputs, before, strict=True) if codes is not None]
                cut += [run.graph.maker(slot, begun.index) for slot in taken[:1]]
        return [op.index for op in cut if op is not None and len(op.outputs) == 1 and not op.inplace]


def are_single(operations: Iterable[Operation]) -> bool:
    """Whether any of some operations gives numbers of less than double precision."""
    return any(x.value.dtype in LOW for operation in operations for x in operation.outputs)


def places_in(codes: Tensor) -> dict[int, int]:
    """Say where each name lies in memory order."""
    return dict(zip(place_of(codes).reshape(-1).tolist(), range(codes.numel()), strict=True))
