"""One attention of a call, run again with gradients: each element by its token and feature, and what it is made of."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.codes import known, place_of, sources_in, token_of
from equivalence_tests.checker.engine.judgement import Judgement
from equivalence_tests.checker.engine.names import Source
from equivalence_tests.checker.engine.running import Call, Examination
from equivalence_tests.checker.engine.same import TABLE, near
from equivalence_tests.checker.engine.vocabulary import MOVES, words
from equivalence_tests.checker.engine.watching import ModuleCall, Operation, Recorder
from equivalence_tests.checker.equivalent.expressions import (
    ACTIVATIONS,
    Attended,
    Called,
    Expression,
    Given,
    Joined,
    Learnt,
    Made,
    Mapped,
    Values,
    all_of,
    attends,
    own_norm,
)
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.reach.calling import TABLES, Trial, from_layout
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.lines import code_lines

EXACT, SINGLE = 1e-9, 2e-5  # relative; the second where a part is computed in float32
LOW = (torch.float32, torch.complex64, torch.float16, torch.bfloat16)
PASSES = MOVES | words("to type_as type float double half bfloat16 dropout alpha_dropout feature_dropout")
CUTS = words("getitem narrow select split chunk unbind")
PIECES = words("split chunk unbind")
OF_LEARNT = words("exp clamp clip")
EPS = {"layer_norm": 1e-5, "rms_norm": None}
MOST = 64  # steps, after which it is given up


@dataclass(frozen=True)
class Layout:
    """How the arguments and what comes back are laid out."""

    inward: Callable[[Tensor], Tensor]  # from an argument to (batch, tokens, features)
    outward: Callable[[Tensor], Tensor]  # from the output to the same
    output: Callable[[Any], Tensor]  # finds the output in what came back
    tables: tuple[str, ...] = ()  # the arguments that hold relative positions
    apart: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)  # inward, of what lies otherwise

    @classmethod
    def of(cls, trial: Trial) -> Self:
        """Say how a trial lays out its arguments and its output."""
        plan = trial.plan
        inward, outward = (partial(from_layout, layout=layout) for layout in (plan.layout, plan.output_layout))
        tables = tuple(name for name, role in plan.roles if role in TABLES)
        apart = {name: partial(from_layout, layout=layout) for name, layout in plan.apart.items()}
        return cls(inward, outward, lambda made: list(tensors_in((made,)))[plan.output], tables, apart)

    def tokens(self, returned: Any) -> Tensor:
        """Give the output in what came back, as (batch, tokens, features)."""
        return self.outward(self.output(returned))

    def values(self, call: Call, instead: Mapping[int, Tensor] | None = None) -> Values:
        """Give the tokens among the arguments of a call, each as (batch, tokens, features), its tables and parameters.

        Some of its tensors have others in their place, by their ids.
        """
        stands, data = instead or {}, (pair for pair in call.tensors if id(pair[1]) in call.seeds)
        tokens = {name: self.apart.get(name, self.inward)(stands.get(id(x), x.detach()).double()) for name, x in data}
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
    call: Call = field(init=False)
    judgement: Judgement = field(init=False)  # of the attention that is read
    recorder: Recorder = field(init=False)  # of the run with gradients
    operations: list[Operation] = field(init=False)  # of that
    returned: Any = field(init=False)  # what that gave
    tolerance: float = field(init=False)  # what differs by less, relative to the largest value, is rounding

    def __post_init__(self) -> None:
        self.call, self.judgement = self.found.call, self.found.judgements[0]
        cuts = dict.fromkeys(self._cut_off(), lambda recorder, operation: operation.outputs[0].value)
        run = self.call.run(cuts, read=False, gradients=True)
        self.recorder, self.operations, self.returned = run.recorder, run.operations, run.output
        if [op.name for op in self.operations] != [op.name for op in self.found.run.operations]:
            raise UnreadError("it runs differently where gradients are required")
        self.tolerance = SINGLE if are_single(self.operations) else EXACT

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


@dataclass(eq=False)
class Tracer:
    """Follows tensors of one run."""

    watched: Watched
    attended: Callable[[Tensor, Operation], bool] = lambda *_: False  # whether it is what the attention gives
    steps: int = 0

    def read(self, tensor: Tensor, before: int) -> Expression:
        """Say what a tensor of the run with gradients is made of, before an operation takes it."""
        self.steps += 1
        if self.steps > MOST:
            raise UnreadError("there is too much around the attention to be read")
        watched = self.watched
        if id(tensor) in watched.learnt:
            return Learnt(watched.learnt[id(tensor)])
        maker = watched.maker_of(tensor, before)
        if maker is None:
            return self._given(tensor)
        if self.attended(tensor, maker):
            return Attended()
        call = watched.call_of(tensor, before)
        return self._called(call) if call is not None else self._made(maker, tensor)

    def _given(self, tensor: Tensor) -> Expression:
        name = self.watched.arguments.get(id(tensor), "")
        if name not in self.watched.values.given:
            raise UnreadError("it uses a tensor that is neither an argument nor a parameter")
        return Given(name)

    def _called(self, call: ModuleCall) -> Expression:
        module = self.watched.parameters.module.get_submodule(call.path)
        data = [x for x in call.inputs if x.is_floating_point() and x.dim() >= 2]
        if not data:
            raise UnreadError(f"{call.path} is given no tokens")
        given = inspect.signature(module.forward).bind(*call.args, **call.kwargs).arguments
        numbers = tuple((name, x) for name, x in given.items() if isinstance(x, int | float))
        found = Called(call.path, tuple(self.read(x, call.first) for x in data), numbers=numbers)
        grid = (data[0].size(2), data[0].size(3)) if data[0].dim() == 4 else None
        sides = [x for x in (*self.watched.call.args, *self.watched.call.kwargs.values()) if type(x) is int]
        if grid is not None and [*grid] == sides[::-1] != sides:
            raise UnreadError(f"{call.path} is given an image whose rows are as many as its columns should be")
        transposed = self._is_transposed(data[0], found.inner[0], module)
        return replace(found, transposed=transposed, grid=grid if transposed else None)

    def _is_transposed(self, tensor: Tensor, inner: Expression, module: nn.Module) -> bool:
        """Whether a module is given (batch, features, tokens); behind the attention, a convolution of an image is."""
        if attends(inner):
            return tensor.dim() == 4 and any(isinstance(x, nn.modules.conv._ConvNd) for x in module.modules())
        if tensor.dim() < 3:
            return False
        tensor = tensor.flatten(2)
        with torch.no_grad():
            x = inner(self.watched.values)
        return x.mT.shape == tensor.shape and torch.allclose(x.mT, tensor.double())

    def _made(self, operation: Operation, tensor: Tensor) -> Expression:
        name, inputs, before = operation.name, [slot.tensor for slot in operation.inputs], operation.index
        if name in PASSES and len(inputs) == 1 and inputs[0].numel() == tensor.numel():
            return self.read(inputs[0], before)
        found: Expression | None = None
        if name in CUTS:
            found = self._cut(tensor, self.read(inputs[0], before))
        elif name in ("cat", "concat"):
            found = self._joined(tensor, inputs, before)
        elif name in ("expand", "repeat", "expand_as"):
            whole = self.read(inputs[0], before)
            found = whole if isinstance(whole, Learnt) else None  # the same in each sample
        elif name in ("linear", "matmul", "mm"):
            found = self._mapped(operation, inputs)
        elif len(inputs) == 1:
            found = self._of_one(operation, inputs[0])
        elif len(inputs) == 2:
            found = self._of_two(operation, inputs[0], inputs[1], tensor)
        if found is not None:
            return found
        line = code_lines(operation.frames)[-1:]
        where = f" (line {line[0].number}: {line[0].text})" if line else ""
        raise UnreadError(f"{name} is not among the parts that an equivalent is made of{where}")

    def _of_one(self, operation: Operation, x: Tensor) -> Expression | None:
        """What a function of one tensor makes; None where it is not known."""
        name = operation.name
        if name in ("mul", "div"):
            number = next(one for one in operation.arguments[0] if isinstance(one, int | float))
            factor = float(number) if name == "mul" else 1.0 / number
            scaled = self.read(x, operation.index)
            return scaled if factor == 1 else Made("scaled", (scaled,), (factor,))
        if name in OF_LEARNT:
            return self._of_learnt(operation, x)
        if own_norm(operation):
            numbers = x.size(-1), operation.argument(4 if name == "layer_norm" else 3, "eps", EPS[name])
            return Made(name, (self.read(x, operation.index),), numbers)
        return Made(name, (self.read(x, operation.index),)) if name in ACTIVATIONS else None

    def _of_two(self, operation: Operation, one: Tensor, other: Tensor, made: Tensor) -> Expression | None:
        """What a function of two tensors makes; None where it is not known."""
        name, before = operation.name, operation.index
        if name in ("add", "mul"):
            first, second = (self._spread(x, made, before) for x in (one, other))
            return Made("sum" if name == "add" else "product", (first, second))
        if name == "sub":
            first, second = (self.read(x, before) for x in (one, other))
            return Made("sum", (first, Made("scaled", (second,), (-1.0,))))
        gate = self._sigmoid(other, before) if name == "div" else None
        return None if gate is None else Made("product", (self.read(one, before), gate))

    def _of_learnt(self, operation: Operation, x: Tensor) -> Expression | None:
        """What a scale that is learnt goes through; None where it is made of anything else."""
        found = self.read(x, operation.index)
        if not all(isinstance(one, Learnt | Made) for one in all_of(found)):
            return None
        if operation.name == "exp":
            return Made("exp", (found,))
        for place, end in enumerate(("min", "max"), start=1):
            number = operation.argument(place, end)
            found = found if number is None else Made(f"clamp_{end}", (found,), (number,))
        return found

    def _joined(self, tensor: Tensor, inputs: list[Tensor], before: int) -> Expression | None:
        """Tokens side by side, the features of each, or all pieces of one tensor; None for anything else."""
        makers = [self.watched.maker_of(x, before) for x in inputs]
        whole = makers[0].inputs[0].tensor if makers[0] is not None and makers[0].name in PIECES else None
        if whole is not None and all(one is makers[0] for one in makers) and whole.numel() == tensor.numel():
            return self.read(whole, before)
        beside = len({(*x.shape[:-1], x.dim()) for x in inputs}) == 1 and inputs[0].dim() > 1
        if beside and sum(x.size(-1) for x in inputs) == tensor.size(-1):
            return Joined(tuple(self.read(x, before) for x in inputs), axis=-1)
        alike = all(x.dim() == 3 and x.size(-1) == tensor.size(-1) for x in (tensor, *inputs))
        if not alike or sum(x.size(1) for x in inputs) != tensor.size(1):
            return None
        return Joined(tuple(self.read(x, before) for x in inputs))

    def _mapped(self, operation: Operation, inputs: list[Tensor]) -> Expression | None:
        """A product with a matrix that is a parameter, and what is added to it."""
        names = [self.watched.learnt.get(id(x), "") for x in inputs]
        if len(inputs) < 2 or not names[1] or inputs[1].dim() != 2 or names[0]:
            return None
        found: Expression = Mapped(names[1], self.read(inputs[0], operation.index), operation.name == "linear")
        return Made("sum", (found, Learnt(names[2]))) if len(inputs) > 2 and names[2] else found

    def _sigmoid(self, tensor: Tensor, before: int) -> Expression | None:
        """A sigmoid by which something is multiplied, written as division by 1 + exp(-x)."""
        made = self.watched.maker_of(tensor, before)
        while made is not None and len(made.inputs) == 1:
            x = made.inputs[0].tensor
            if near(1 / x.sigmoid(), tensor, TABLE):
                return Made("sigmoid", (self.read(x, made.index),))
            made = self.watched.maker_of(x, made.index)
        return None

    def _spread(self, x: Tensor, over: Tensor, before: int) -> Expression:
        """What takes part in a product: a number for each head, or token, has its features still to come."""
        found, width = self.read(x, before), over.size(-1)
        alone = x.dim() == over.dim() and x.size(-1) == 1 < width and id(x) not in self.watched.learnt
        return Made("spread", (found,), (width,)) if alone else found

    def _cut(self, tensor: Tensor, whole: Expression) -> Expression | None:
        """Some tokens or features, which their numbers tell."""
        if attends(whole):
            return None
        with torch.no_grad():
            x, wanted = whole(self.watched.values), tensor.detach().double()
        for axis in range(1, x.dim()):
            count = x.size(axis) * wanted.numel() // x.numel()
            for start in range(x.size(axis) - count + 1) if x.numel() * count == wanted.numel() * x.size(axis) else ():
                part = x.narrow(axis, start, count)
                if torch.equal(part.flatten(), wanted.flatten()) or torch.equal(part.mT.flatten(), wanted.flatten()):
                    return Made("cut", (whole,), (axis, start, count))
        return None
