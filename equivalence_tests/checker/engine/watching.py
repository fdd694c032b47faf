"""Record one run at the level of torch functions: every operation, its tensors, and the user's lines that led there.

Nothing that the run computes is changed, but for the patches that are asked for. Values are kept by reference and
copied only where an operation is about to write into them.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_unflatten

from equivalence_tests.checker.engine.vocabulary import ASKS, CASTS, CREATES, GETTERS, UNFILLED, plain, writes
from equivalence_tests.checker.reach.tracing import flattened, tensors_of
from equivalence_tests.checker.reporting.lines import Frames, frames_here, local_here

Patch = Callable[["Recorder", "Operation"], Tensor]
MOST_BYTES = 2 << 30  # recording stops beyond


HOLE = object()  # stands for a tensor among the arguments of a recorded operation


@dataclass(eq=False)
class Slot:
    """One tensor at one moment."""

    tensor: Tensor  # the object itself; while it is kept, its id is its name
    value: Tensor  # its numbers at that moment

    @property
    def key(self) -> int:
        """The id of the tensor object."""
        return id(self.tensor)


@dataclass(eq=False)
class Operation:
    """One call of a torch function."""

    index: int  # its place in the run
    name: str  # of the function, as ``vocabulary.plain`` has it
    function: Callable[..., Any]
    skeleton: list[Any]  # its arguments, flat, with holes where tensors were
    spec: TreeSpec  # how they are nested
    inputs: list[Slot]  # the tensors among them
    outputs: list[Slot] = field(default_factory=list)  # the tensors that it gave
    frames: Frames = ()  # the user's lines that led to it, the innermost first
    inplace: bool = False  # whether it writes into its first argument
    origins: list[int] = field(default_factory=list)  # for each input, the named tensors that it was made from, as bits
    patch: "Patch | None" = None  # what gave the result in its place
    place: str = ""  # path of the innermost module that ran it; "" for the outermost, or where there is none
    unasked: bool = False  # whether it hides the future in a function whose ``is_causal`` is False

    def call(self, tensors: Iterable[Tensor]) -> Any:
        """Call the function with other tensors in the place of its own."""
        given = iter(tensors)
        flat = [next(given) if item is HOLE else item for item in self.skeleton]
        args, kwargs = tree_unflatten(flat, self.spec)
        return _emptied(self.name, self.function(*args, **kwargs))

    @property
    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments, each tensor replaced by its slot."""
        slots = iter(self.inputs)
        flat = [next(slots) if item is HOLE else item for item in self.skeleton]
        args, kwargs = tree_unflatten(flat, self.spec)
        return list(args), dict(kwargs)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Give one argument by its position or its name."""
        args, kwargs = self.arguments
        return args[position] if len(args) > position else kwargs.get(name, default)


@dataclass(eq=False)
class ModuleCall:
    """One call of a sub-module."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first: int  # the index of the first operation inside
    outputs: list[Tensor] = field(default_factory=list)  # the tensors that it gave
    end: int = 0  # the index of the first operation behind it
    frames: Frames = ()  # the user's lines that called it, the innermost first

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that it was given."""
        return list(tensors_of((self.args, self.kwargs)))


class Recorder(TorchFunctionMode):
    """Records the operations of one run, with patches in the place of the results of some.

    Known by a name are parameters ("param:..."), buffers ("buffer:...") and arguments ("arg:...").
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]] = (), patches: Mapping[int, Patch] | None = None) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.patches = patches or {}
        self.names: list[str] = []
        self.room, self.overflowed = MOST_BYTES, False
        self.calls: list[ModuleCall] = []  # of sub-modules, in the order in which they begin
        self.running: list[ModuleCall] = []  # the innermost last
        self._origins: dict[int, int] = {}
        self._live: dict[int, list[Slot]] = {}
        self.given: list[Slot] = []  # what is known by a name, as it was before the run
        self.made: list[Slot] = []  # masks that stand for an option of a fused function
        for name, tensor in named:
            self._origins[storage_of(tensor)] = self._origins.get(storage_of(tensor), 0) | 1 << len(self.names)
            self.names.append(name)
            self.given.append(self._slot(tensor))

    def enter(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a sub-module begins."""
        self.calls.append(ModuleCall(path, args, kwargs, len(self.operations), frames=frames_here()))
        self.running.append(self.calls[-1])

    def leave(self, given: Any) -> None:
        """Note that the innermost sub-module ends."""
        call = self.running.pop()
        call.outputs, call.end = list(tensors_of(given)), len(self.operations)

    def origins_of(self, tensor: Tensor) -> int:
        """Give the named tensors that a tensor was made from, as bits."""
        return self._origins.get(storage_of(tensor), 0)

    def named(self, bits: int) -> list[str]:
        """Give the names that the bits stand for."""
        return [name for place, name in enumerate(self.names) if bits >> place & 1]

    def parameters(self, bits: int) -> list[str]:
        """Give the names of the parameters among those that the bits stand for."""
        return [name.removeprefix("param:") for name in self.named(bits) if name.startswith("param:")]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", type(func).__name__)
        if is_getter := name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        asks = name not in GETTERS if is_getter else name in ASKS
        if asks or self.overflowed:
            return func(*args, **kwargs)
        if name == "multi_head_attention_forward":
            return self._opened(func, args, kwargs)
        if name == "sum" and (product := _product_summed(self, *args, *kwargs.values())) is not None:
            return product
        if name == "einsum" and (product := _scaled(self, *args)) is not None:
            return product
        if name in OPENED and "out" not in kwargs:
            return OPENED[name](self, *args, **{MATRICES.get(key, key): value for key, value in kwargs.items()})
        return self.record(func, name, args, kwargs)

    def _opened(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that torch wrote in Python with every operation inside it recorded."""
        saved = vars(F)["has_torch_function"]
        vars(F)["has_torch_function"] = lambda *tensors: False
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            vars(F)["has_torch_function"] = saved

    def record(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one function, keep what it took and gave, and put a patch in its place if there is one."""
        out = kwargs.get("out")
        target = {"out": out} if isinstance(out, Tensor) else {}
        kwargs = {key: value for key, value in kwargs.items() if key not in target}
        flat, spec = flattened(args, kwargs)
        tensors = [item for item in flat if isinstance(item, Tensor)]
        inplace = bool(args) and isinstance(args[0], Tensor) and (writes(name) or kwargs.get("inplace") is True)
        name = plain(name)
        if inplace and tensors:
            self._copy_before_writing(tensors[0])
        inputs = [self._slot(tensor) for tensor in tensors]
        if isinstance(out, Tensor):
            self._copy_before_writing(out)
        skeleton = [HOLE if isinstance(item, Tensor) else item for item in flat]
        operation = Operation(len(self.operations), name, func, skeleton, spec, inputs, [], frames_here(), inplace)
        operation.origins = [self.origins_of(tensor) for tensor in tensors]
        operation.place = self.running[-1].path if self.running else ""
        self.operations.append(operation)
        if inplace and tensors:
            inputs[0].value = inputs[0].value.clone()
        result = _emptied(name, func(*args, **kwargs, **target))
        given = [tensors[0]] if inplace and tensors else list(tensors_of(result))
        operation.outputs = [self._slot(tensor, 0 if inplace else 1) for tensor in given]
        passed_on = operation.origins[: 1 if name in CASTS else None] if name not in CREATES else ()
        origins = reduce(or_, passed_on, 0)
        for tensor in given:
            place = storage_of(tensor)
            self._origins[place] = self._origins.get(place, 0) | origins if inplace else origins
        if operation.index in self.patches and given:
            return self._patched(operation, result, given[0], written=inplace or bool(target))
        return result

    def _patched(self, operation: Operation, result: Any, given: Tensor, *, written: bool) -> Any:
        operation.patch = self.patches[operation.index]
        want = operation.patch(self, operation)
        with torch.no_grad():
            if written:
                self._copy_before_writing(given)
                given.copy_(want)
                operation.outputs = [self._slot(given)]
                return result
            new = want.to(given.dtype).reshape(given.shape).clone()
        self._origins[storage_of(new)] = self._origins.get(storage_of(given), 0)
        operation.outputs[0] = self._slot(new, 1)
        if isinstance(result, tuple | list):
            rest = [new, *list(result)[1:]]
            return type(result)(rest) if type(result) in (tuple, list) else tuple(rest)
        return new

    def _slot(self, tensor: Tensor, made: int = 0) -> Slot:
        slot = Slot(tensor, tensor.detach())
        place = storage_of(tensor)
        if made and place not in self._live:
            self.room -= tensor.numel() * tensor.element_size()
            self.overflowed = self.room < 0
        self._live.setdefault(place, []).append(slot)
        return slot

    def _copy_before_writing(self, tensor: Tensor) -> None:
        for slot in self._live.pop(storage_of(tensor), []):
            if storage_of(slot.value) == storage_of(tensor):
                slot.value = slot.value.clone()


def _fused_attention(
    recorder: Recorder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(query keyᵀ scale + mask) value, one operation a stage."""

    def do(func: Callable[..., Any], name: str, *args: Any) -> Tensor:
        return recorder.record(func, name, args, {})

    if enable_gqa and key.size(-3) != query.size(-3):
        times = query.size(-3) // key.size(-3)
        key, value = (do(torch.repeat_interleave, "repeat_interleave", x, times, -3) for x in (key, value))
    scores = do(torch.matmul, "matmul", query, do(torch.transpose, "transpose", key, -2, -1))
    scores = do(torch.mul, "mul", scores, query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = do(torch.masked_fill, "masked_fill", scores, future, -math.inf)
        recorder.made.append(Slot(future, future))
        for operation in recorder.operations[-1:]:  # none is kept where an expression is left out
            operation.unasked = local_here("is_causal") is False
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = do(torch.logical_not, "logical_not", attn_mask)
        scores = do(torch.masked_fill, "masked_fill", scores, hidden, -math.inf)
    elif attn_mask is not None:
        scores = do(torch.add, "add", scores, attn_mask)
    weights = do(torch.softmax, "softmax", scores, -1)
    if dropout_p:
        weights = do(F.dropout, "dropout", weights, dropout_p)
    return do(_tokens_outside, "matmul", weights, value)


def _tokens_outside(weights: Tensor, value: Tensor) -> Tensor:
    """Average the values, with the heads of each token side by side in memory, as torch's kernels leave them."""
    averaged = weights @ value
    return averaged.transpose(1, 2).contiguous().transpose(1, 2) if averaged.dim() == 4 else averaged


def _product_and_sum(
    recorder: Recorder,
    input: Tensor,  # noqa: A002 -- torch's name
    first: Tensor,
    second: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """Sum as torch.baddbmm: beta * added + alpha * first @ second."""
    product = recorder.record(torch.matmul, "matmul", (first, second), {})
    if alpha != 1:
        product = recorder.record(torch.mul, "mul", (product, alpha), {})
    if beta == 0:
        return product
    if beta != 1:
        input = recorder.record(torch.mul, "mul", (input, beta), {})  # noqa: A001
    return recorder.record(torch.add, "add", (product, input), {})


def _product_summed(recorder: Recorder, x: Tensor, *options: Any) -> Tensor | None:
    """Run (a * b).sum(axis) as the product of matrices that it is; None where neither is repeated."""
    last = next((one for one in reversed(recorder.operations) if any(x is slot.tensor for slot in one.outputs)), None)
    axis = options[0] if len(options) == 1 else None
    axis = axis[0] if isinstance(axis, tuple | list) and len(axis) == 1 else axis
    if last is None or (last.name, last.inplace, last.patch) != ("mul", False, None) or len(last.inputs) < 2:
        return None
    if type(axis) is not int or not -x.dim() <= axis < x.dim() or not x.is_floating_point():
        return None
    if any(slot.tensor.dtype != x.dtype for slot in last.inputs):  # a Boolean mask is no factor of an einsum
        return None
    if not all(any(not name.startswith("buffer:") for name in recorder.named(bits)) for bits in last.origins):
        return None  # a table of constants, as of positions by which pairs are rotated
    letters = ascii_letters[: x.dim()]
    own = [_not_repeated(slot.tensor, x.shape, letters) for slot in last.inputs]
    repeated = all(letters[axis] in one for one in own) and own != [letters] * 2
    alone = [x.size(letters.index(letter)) for letter in set(own[0]) ^ set(own[1])]
    by_pairs = x.size(axis) == 2 and 2 in alone  # pairs are rotated by small matrices
    if not repeated or by_pairs or not torch.equal(x, last.outputs[0].value):
        return None
    shapes = ([x.size(letters.index(letter)) for letter in one] for one in own)
    pairs = zip(last.inputs, shapes, strict=True)
    sides = [recorder.record(torch.reshape, "reshape", (slot.tensor, shape), {}) for slot, shape in pairs]
    equation = f"{','.join(own)}->{letters.replace(letters[axis], '')}"
    return recorder.record(torch.einsum, "einsum", (equation, *sides), {})


def _scaled(recorder: Recorder, equation: Any, *operands: Any) -> Tensor | None:
    """Run an einsum that sums nothing, of a tensor and its factors, as the multiplication that it is; else None."""
    tensors = [*operands[0]] if len(operands) == 1 and isinstance(operands[0], tuple | list) else [*operands]
    if not isinstance(equation, str) or len(tensors) != 2:
        return None
    read = letters_of(equation, tensors[0].dim(), tensors[1].dim())
    if read is None or any(len({*own}) < len(own) for own in read) or {*read[2]} not in ({*read[0]}, {*read[1]}):
        return None
    *sides, given = read
    if not {*sides[0], *sides[1]} <= {*given}:
        return None
    laid = []
    for x, own in zip(tensors, sides, strict=True):
        order = [own.index(letter) for letter in given if letter in own]
        x = x if order == sorted(order) else recorder.record(torch.permute, "permute", (x, order), {})
        index = tuple(slice(None) if letter in own else None for letter in given)
        laid.append(recorder.record(Tensor.__getitem__, "__getitem__", (x, index), {}) if None in index else x)
    return recorder.record(torch.mul, "mul", tuple(laid), {})


def letters_of(equation: str, first: int, second: int) -> tuple[str, str, str] | None:
    """Give the letters of both operands and of the result, with letters for what the dots stand for."""
    inside, arrow, given = equation.replace(" ", "").partition("->")
    one, comma, two = inside.partition(",")
    if not comma or "," in two:
        return None
    dots = max(first - len(one.replace("...", "")), second - len(two.replace("...", "")), 0)
    stand = [chr(0x100 + i) for i in range(dots)]

    def filled(text: str, count: int) -> str:
        return text.replace("...", "".join(stand[dots - (count - len(text.replace("...", ""))) :]) if count else "")

    one, two = filled(one, first), filled(two, second)
    if not arrow:
        given = "..." + "".join(sorted(x for x in set(one + two) - set(stand) if (one + two).count(x) == 1))
    given = given.replace("...", "".join(x for x in stand if x in one + two))
    return one, two, given


def _not_repeated(x: Tensor, shape: torch.Size, letters: str) -> str:
    """Give the letters of the axes along which an operand is not broadcast."""
    missing = len(shape) - x.dim()
    return "".join(letters[missing + i] for i, size in enumerate(x.shape) if size == shape[missing + i])


# Fused functions, each run as the stages that it stands for, and what their matrices are called.
OPENED: Mapping[str, Callable[..., Tensor]] = {
    "scaled_dot_product_attention": _fused_attention,
    "baddbmm": _product_and_sum,
    "addmm": _product_and_sum,
}
MATRICES = {"batch1": "first", "batch2": "second", "mat1": "first", "mat2": "second"}


def _emptied(name: str, result: Any) -> Any:
    """Fill the result of ``empty`` and the like with zeros, so that every run computes the same."""
    if name in UNFILLED:
        for tensor in tensors_of(result):
            tensor.detach().zero_()
    return result


def storage_of(tensor: Tensor) -> int:
    """Give the address of a tensor's storage, the same for all its views."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError, AttributeError):
        return id(tensor)
