"""One forward while it is written: its variables, their sizes, and its lines."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from equivalence_tests.checker.engine.vocabulary import STOPS_GRADIENTS
from equivalence_tests.checker.engine.watching import HOLE, Operation
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.equivalent.texts import Code, call_text
from equivalence_tests.checker.equivalent.texts import text as written

# What makes one mask of two: either alone is the whole.
JOINS = ("add", "mul", "and", "or", "logical_and", "logical_or", "bitwise_and", "bitwise_or")


@dataclass
class Scope:
    """One call of a module of the user's, recorded at two sizes."""

    path: str  # of the module
    given: dict[str, tuple[Tensor, Tensor]]  # the tensors that its forward is given, by name, in both recordings
    maybe: set[str]  # the names of masks that may be None, and of what is made of them alone
    numbers: dict[str, tuple[int, int]] = field(default_factory=dict)  # the sizes that its forward is given
    names: dict[int, str] = field(default_factory=dict)  # of each tensor, by its id in the first recording
    shapes: dict[str, tuple[torch.Size, torch.Size]] = field(default_factory=dict)  # of each variable
    lines: list[tuple[list[str], str, set[str]]] = field(default_factory=list)  # what it gives, the text, what it takes
    count: int = 0

    def __post_init__(self) -> None:
        for name, (x, other) in self.given.items():
            self.names.setdefault(id(x), name)
            self.shapes[name] = x.shape, other.shape

    @property
    def signature(self) -> str:
        """The arguments of its forward; what may be None stands last."""
        names = sorted(self.given, key=lambda name: name in self.maybe)
        kinds = {name.partition("[")[0]: "list[Tensor]" if "[" in name else "Tensor" for name in names}
        kinds = dict.fromkeys(self.numbers, "int") | kinds
        maybe = dict.fromkeys(self.maybe, " | None = None")
        return ", ".join(f"{name}: {kind}{maybe.get(name, '')}" for name, kind in kinds.items())

    @property
    def device(self) -> str:
        """Where tensors are made: where one that is given lies; None, which is torch's default, without one."""
        return next((f"{name}.device" for name in self.given if name not in self.maybe), "None")

    # ------------------------------------------------------------------------------------------- lines
    def add(self, given: Sequence[Tensor], again: Sequence[Tensor], text: str, takes: Sequence[str]) -> list[str]:
        """Add a line, and name what it gives."""
        names = [f"h{self.count + place}" for place in range(1, len(given) + 1)]
        self.count += len(names)
        for name, x, other in zip(names, given, again, strict=True):
            self.names[id(x)] = name
            self.shapes[name] = x.shape, other.shape
        self.lines += [(names, text, set(takes))] if names else []
        return names

    def live(self, wanted: Sequence[str]) -> list[str]:
        """Write the lines that something is made of that is returned."""
        needed, kept = set(wanted), list[str]()
        for names, text, takes in reversed(self.lines):
            if needed & set(names):
                kept += [*text.splitlines()[:0:-1], f"{', '.join(names)} = {text.splitlines()[0]}"]
                needed |= takes
        return kept[::-1]

    def add_operation(self, one: Operation, other: Operation, names: Sequence[str]) -> None:
        """Add an operation that takes variables of these names; those that may be None take it along."""
        leaves, given = [], iter(names)
        for a, b in zip(one.skeleton, other.skeleton, strict=True):
            leaves.append(Code(next(given)) if a is HOLE else self.written(a, b))
        args, kwargs = tree_unflatten(leaves, one.spec)
        if one.name == "setitem":  # what is written into may be read before, too
            name = f"h{self.count + 1}"
            text = f"{args[0]}.clone()\n{Code(name)[args[1]]} = {written(args[2])}"
        elif one.name in STOPS_GRADIENTS:
            text = names[0]  # torch's parts stop no gradient, so that one that is stopped differs
        else:
            text = call_text(one.function, one.name, args, kwargs)
        hidden = [*dict.fromkeys(name for name in names if name in self.maybe)]
        seen = [name for name in names if name not in self.maybe]
        if len(hidden) == 2 and not seen and one.name in JOINS:
            text = f"{hidden[1]} if {hidden[0]} is None else {hidden[0]} if {hidden[1]} is None else {text}"
        elif hidden:
            condition = " or ".join(f"{name} is None" for name in hidden)
            text = f"{self._without(one, seen)} if {condition} else {text}"
        found, again = ([slot.tensor for slot in op.outputs] for op in (one, other))
        made = self.add(found, again, text, names)
        self.maybe |= {*made} if hidden and not seen else set()

    def _without(self, one: Operation, seen: Sequence[str]) -> str:
        """What stands in the place of an operation where no mask is handed over."""
        fits = (name for name in seen if name in self.shapes and self.shapes[name][0] == one.outputs[0].value.shape)
        found = next(fits, "") if seen else "None"
        if not found:
            raise UnreadError(f"what {one.name} does without a mask is not known")
        return found

    # ------------------------------------------------------------------------------------------- numbers
    def written(self, one: Any, other: Any) -> Any:
        """Write a constant of the first recording, where it was another one in the second as a size of a variable."""
        if isinstance(one, slice):
            pairs = ((one.start, other.start), (one.stop, other.stop), (one.step, other.step))
            return slice(*(self.written(*pair) for pair in pairs))
        if isinstance(one, torch.Size):
            return tuple(self.written(a, b) for a, b in zip(one, other, strict=True))
        if isinstance(one, torch.device):
            return Code(self.device)
        if isinstance(one, torch.dtype) and one == torch.get_default_dtype():  # others are asked for by name
            real = (name for name, (x, _) in self.given.items() if x.is_floating_point() and name not in self.maybe)
            return Code(next((f"{name}.dtype" for name in real), "torch.get_default_dtype()"))
        if type(one) is type(other) and one == other:
            return one
        if type(one) is int and type(other) is int:
            return self._size(one, other)
        raise UnreadError(f"{one!r} is another number at other sizes")

    def _size(self, one: int, other: int) -> Code:
        """Write a number as a size of a variable, or as what is made of sizes."""
        known = ((f"{name}.size({i})", a[i], b[i]) for name, (a, b) in self.shapes.items() for i in range(len(a)))
        sizes = [*((name, *pair) for name, pair in self.numbers.items()), *(s for s in known if s[1] != s[2])]
        exact = (text for text, a, b in sizes if (a, b) == (one, other))
        negated = (f"-{text}" for text, a, b in sizes if (a, b) == (-one, -other))
        more = ((f"{text} {one - a:+d}", abs(one - a)) for text, a, b in sizes if one - a == other - b)
        near = (text for text, _ in sorted(more, key=lambda found: found[1]))
        times = (f"{text} * {one // a}" for text, a, b in sizes if a and one % a == 0 and (one // a) * b == other)
        rest = (f"{one + a} - {text}" for text, a, b in sizes if one + a == other + b)
        both = (f"{s} * {t}" for s, a, b in sizes for t, c, d in sizes if (a * c, b * d) == (one, other))
        found = next(itertools.chain(exact, negated, times, both, near, rest), "")
        if not found:
            raise UnreadError(f"the number {one}, which is {other} at other sizes, is no size of what it takes")
        return Code(re.sub(r" ([+-])(\d+)$", r" \1 \2", found))
