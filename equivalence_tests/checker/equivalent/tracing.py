"""Follow a tensor back to the arguments: the sub-modules, norms, sums and products around an attention."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.same import TABLE, near
from equivalence_tests.checker.engine.vocabulary import MOVES, words
from equivalence_tests.checker.engine.watching import ModuleCall, Operation
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
    all_of,
    attends,
    own_norm,
)
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.equivalent.watched import Watched
from equivalence_tests.checker.reporting.lines import code_lines

PASSES = MOVES | words("to type_as type float double half bfloat16 dropout alpha_dropout feature_dropout")
CUTS = words("getitem narrow select split chunk unbind")
PIECES = words("split chunk unbind")
OF_LEARNT = words("exp clamp clip")
EPS = {"layer_norm": 1e-5, "rms_norm": None}
MOST = 64  # steps, after which it is given up


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
