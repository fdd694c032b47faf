"""Write a layer, a stack or a model down as torch's own program: a class for each kind of module that ran in it."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from equivalence_tests.checker.engine.watching import ModuleCall, Operation, Recorder, Slot
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.layers.whole_calls import bound
from equivalence_tests.checker.layers.whole_modules import (
    LISTS,
    constructor,
    made_of,
    own_lines,
    reached,
)
from equivalence_tests.checker.layers.whole_operations import Sized, Text, nested, operation_text
from equivalence_tests.checker.layers.whole_scopes import Line, Scope, live
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.equivalents import Equivalent

HOLDERS = ("nn.Module()", "nn.ModuleDict()")  # what holds parts that something else calls
# What makes one mask of two: either alone is the whole.
JOINS = ("add", "mul", "and", "or", "logical_and", "logical_or", "bitwise_and", "bitwise_or")
HEAD = '''"""The same as {target}, in torch's own parts."""

import torch
from torch import Tensor, nn
'''
CONVERSION = '''

def from_theirs(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn a state_dict of {target} into one of Equivalent."""
    ours = {{name: x for name, x in theirs.items() if not name.startswith({unused})}}
    for start, (taken, _) in PARTS.items():
        inside = {{name.removeprefix(start): ours.pop(name) for name in list(ours) if name.startswith(start)}}
        ours.update({{start + name: x for name, x in taken(inside).items()}})
    return ours


def to_theirs(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put the weights of Equivalent into a copy of a state_dict of theirs."""
    theirs = {{name: ours.get(name, x).clone() for name, x in theirs.items()}}
    for start, (_, returned) in PARTS.items():
        inside, own = (
            {{name.removeprefix(start): x for name, x in state.items() if name.startswith(start)}}
            for state in (ours, theirs)
        )
        theirs.update({{start + name: x for name, x in returned(inside, own).items()}})
    return theirs
'''
PLAIN = '''

def from_theirs(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn a state_dict of {target} into one of Equivalent: the names are the same."""
    return {{name: x for name, x in theirs.items() if not name.startswith({unused})}}


def to_theirs(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put the weights of Equivalent into a copy of a state_dict of theirs."""
    return {{name: ours.get(name, x).clone() for name, x in theirs.items()}}
'''


@dataclass
class WholeWriter:
    """Writes one program, of two recordings at different sizes.

    Args:
        module: The layer, stack or model.
        recorders: The recordings.
        parts: The equivalents of its parts, by path.
        optional: The arguments that may be None.
    """

    module: nn.Module
    recorders: tuple[Recorder, Recorder]
    parts: Mapping[str, Equivalent]
    optional: set[str]
    classes: dict[str, str] = field(default_factory=dict)  # of each module that ran, by path
    texts: dict[str, str] = field(default_factory=dict)  # each text, by the name of its class
    returned: tuple[str, ...] = ()  # the paths of parts whose weights lie otherwise
    tables: set[str] = field(default_factory=set)  # what no state_dict holds

    def __post_init__(self) -> None:
        one, other = self.recorders
        same = [c.path for c in one.calls] == [c.path for c in other.calls]
        if not same or [op.name for op in one.operations] != [op.name for op in other.operations]:
            raise UnreadError("it runs differently at other sizes")
        self.owned = {
            id(x): f"{path}.{name}".lstrip(".")
            for path, child in self.module.named_modules()
            for name, x in vars(child).items()
            if isinstance(x, Tensor)
        }
        given = reversed([*zip(one.names, one.given, strict=True)])  # the first of two names counts
        named = ((name.partition(":"), slot.key) for name, slot in given)
        self.owned |= {key: name for (kind, _, name), key in named if kind != "arg"}
        self.kept = {*self.module.state_dict(keep_vars=True)}
        self.calls = [*zip(one.calls, other.calls, strict=True)]
        self.operations = [*zip(one.operations, other.operations, strict=True)]

    def source(self, target: str) -> str:
        """Write the program.

        Args:
            target: What the code that was checked is called.

        Raises:
            UnreadError: If something in it cannot be written down.
        """
        self._write(0)
        order = [self.classes[""], *(name for name in reversed(self.texts) if name != self.classes[""])]
        body = "".join(f"\n\n{self.texts[name]}\n" for name in order)
        unused = f"({', '.join(map(repr, self._unused()))},)".replace("(,)", "()")
        body += self._parts_table() + (CONVERSION if self.returned else PLAIN).format(target=target, unused=unused)
        functional = "from torch.nn import functional as F\n" if re.search(r"\bF\.", body) else ""
        more = [line for line in self._imports() if line not in HEAD + functional]
        return HEAD.format(target=target) + functional + "".join(f"{line}\n" for line in more) + body

    # ------------------------------------------------------------------------------------------- weights
    def _unused(self) -> list[str]:
        """List the beginnings of the names of what the program has no part for."""
        built = {name: x for name, x in self.module.named_modules() if name and self._made(name, "") == ""}
        outer = [name for name in built if not any(name.startswith(f"{other}.") for other in built)]
        return [f"{name}." for name in outer if next(iter(built[name].state_dict()), None) is not None]

    def _parts_table(self) -> str:
        if not self.returned:
            return ""
        rows = (
            f'    "{path}.": ({_lower(self.classes[path])}_from_theirs, {_lower(self.classes[path])}_to_theirs),\n'
            for path in self.returned
        )
        return f"\n\n# Where weights lie otherwise.\nPARTS = {{\n{''.join(rows)}}}\n"

    def _imports(self) -> list[str]:
        heads = [self.parts[path].source.split("\n\n\n", 1)[0].splitlines() for path in self.returned]
        found = [line for head in heads for line in head if line.startswith(("from ", "import "))]
        return [*dict.fromkeys(line for line in found if "functional as F" not in line)]

    # ------------------------------------------------------------------------------------------- modules
    def _write(self, number: int, maybe: frozenset[str] = frozenset()) -> str:
        """Write the class of a module that ran; give its name."""
        call, other = self.calls[number]
        module = self.module.get_submodule(call.path)
        given, again = (bound(module, one.args, one.kwargs) for one in (call, other))
        scope = self._scope(call.path, given, again, maybe or frozenset(self.optional if number == 0 else ()))
        self._fill(scope, number)
        text = self._class(scope, call, module)
        known = self.classes.get(call.path)
        if known is not None and self.texts[known].partition("\n")[2] != text.partition("\n")[2]:
            raise UnreadError(f"{call.path} does something else in another call")
        if known is None:
            name = "Equivalent" if number == 0 else type(module).__name__
            self.classes[call.path] = self._kept(name, text)
        return self.classes[call.path]

    def _kept(self, name: str, text: str) -> str:
        """Keep the text of a class, once; give the name under which it is kept."""
        base, count = name, 1
        while name in self.texts and self.texts[name] != text.replace("NAME", name, 1):
            count += 1
            name = f"{base}{count}"
        self.texts.setdefault(name, text.replace("NAME", name, 1))
        return name

    def _scope(self, path: str, given: Mapping[str, Any], again: Mapping[str, Any], maybe: frozenset[str]) -> Scope:
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        if any(not isinstance(x, Tensor) and any(True for _ in tensors_in((x,))) for x in given.values()):
            raise UnreadError(f"{path or 'it'} is given tensors inside other arguments")
        known = [(name, x.shape, again[name].shape) for name, x in tensors.items()]
        typed = next((name for name, x in tensors.items() if x.is_floating_point() and name not in maybe), "")
        names: dict[int, str] = {}
        for name, x in tensors.items():
            names.setdefault(id(x), name)
        first = next((name for name in tensors if name not in maybe), "self")
        signature = [f"{name}: Tensor" + (" | None = None" if name in maybe else "") for name in tensors]
        signature.sort(key=lambda text: "None" in text)
        scope = Scope(path, names, Sized(known, first, typed), {name for name in tensors if name in maybe}, signature)
        scope.shapes = {name: x.shape for name, x in tensors.items()}
        return scope

    def _class(self, scope: Scope, call: ModuleCall, module: nn.Module) -> str:
        outputs = [scope.names[id(x)] for x in call.outputs if id(x) in scope.names]
        if not outputs or (not call.path and len(outputs) < len(call.outputs)):
            raise UnreadError(f"not all that {call.path or 'it'} returns is made in it")
        lines = [*own_lines(module), *self._of_tables(call.path), *self._children(module, call.path)]
        given = ", theirs: nn.Module" if self._takes_tables(call.path) else ""
        init = [f"    {line}" for line in (f"def __init__(self{given}) -> None:", "    super().__init__()")]
        init += [f"        {line}" for line in lines]
        several = f"({', '.join(outputs)})" if len(outputs) > 1 else outputs[0]
        kind = "tuple[Tensor, ...]" if len(outputs) > 1 else "Tensor"
        body = [f"        {', '.join(line.names)} = {line.text}" for line in live(scope.lines, outputs)]
        head = f"    def forward(self, {', '.join(scope.signature)}) -> {kind}:"
        shown = ["class NAME(nn.Module):", *([*init, ""] if lines else []), head, *body, f"        return {several}"]
        return "\n".join(shown)

    def _takes_tables(self, path: str) -> bool:
        return any(table.startswith(f"{path}." if path else "") for table in self.tables)

    def _of_tables(self, path: str) -> Iterator[str]:
        """Write that what no state_dict holds is taken from the user's module."""
        for table in sorted(self.tables):
            owner, _, name = table.rpartition(".")
            if owner == path:
                yield f'self.register_buffer("{name}", theirs.{name}.clone(), persistent=False)'

    def _children(self, module: nn.Module, path: str, base: str | None = None) -> Iterator[str]:
        base = path if base is None else base
        for name, child in module.named_children():
            full = f"{path}.{name}".lstrip(".")
            made = self._made(full, base)
            if made:
                yield f"self.{name} = {made}"
                if made in HOLDERS:
                    yield from (
                        line.replace("self.", f"self.{name}.", 1)
                        for line in (*own_lines(child), *self._of_tables(full), *self._children(child, full, base))
                    )
        yield from self._tied(module) if not path else ()

    def _tied(self, module: nn.Module) -> Iterator[str]:
        """Write that one parameter has two names."""
        first: dict[int, str] = {}
        for name, x in module.named_parameters(remove_duplicate=False):
            if id(x) in first:
                yield f"self{self._reached('', name)} = self{self._reached('', first[id(x)])}"
            first.setdefault(id(x), name)

    def _made(self, path: str, base: str) -> str:
        """Write the construction of a sub-module; "" where it takes no part."""
        module = self.module.get_submodule(path)
        if path in self.classes:
            own = f"theirs{reached(self.module.get_submodule(base), _inside(path, base))}"
            return f"{self.classes[path]}({own if self._takes_tables(path) else ''})"
        if isinstance(module, LISTS):
            inside = [self._made(f"{path}.{name}", base) for name, _ in module.named_children()]
            return made_of(module, inside) if all(inside) else ""
        if constructor(module):
            return constructor(module)
        inside = [self._made(f"{path}.{name}", base) for name, _ in module.named_children()]
        ran = any(other.startswith(f"{path}.") for other in self.classes)
        return HOLDERS[isinstance(module, nn.ModuleDict)] if ran and any(inside) else ""

    def _reached(self, base: str, path: str) -> str:
        owner, _, name = path.rpartition(".")
        inside = owner.removeprefix(base).lstrip(".")
        return reached(self.module.get_submodule(base), inside) + f".{name}"

    # ------------------------------------------------------------------------------------------- a forward
    def _fill(self, scope: Scope, number: int) -> None:
        """Write the lines of one call: its operations, and the sub-modules that it calls, in their order."""
        call = self.calls[number][0]
        inside = [i for i in range(number + 1, len(self.calls)) if self.calls[i][0].end <= call.end]
        inside = [i for i in inside if self.calls[i][0].first >= call.first and self._is_inside(i, call)]
        place = call.first
        for i in inside:
            child = self.calls[i][0]
            if child.first < place:
                continue  # inside of the one before
            for index in range(place, child.first):
                self._add_operation(scope, *self.operations[index])
            self._add_call(scope, i)
            place = child.end
        for index in range(place, call.end):
            self._add_operation(scope, *self.operations[index])

    def _is_inside(self, number: int, call: ModuleCall) -> bool:
        path = self.calls[number][0].path
        return path.startswith(f"{call.path}.") if call.path else bool(path)

    def _name(self, scope: Scope, x: Tensor) -> str:
        if id(x) in scope.names:
            return scope.names[id(x)]
        path = self.owned.get(id(x))
        if path is None:
            raise UnreadError("a tensor takes part that is neither an argument, a parameter nor a buffer")
        if scope.path and not path.startswith(f"{scope.path}."):
            raise UnreadError(f"{scope.path} uses {path}, which is not its own")
        if path not in self.kept:
            self.tables.add(path)
        return f"self{self._reached(scope.path, path)}"

    def _operand(self, scope: Scope, one: Slot, other: Slot) -> str:
        """Write what an operation takes; what was made outside of torch's functions is known if it hides the future."""
        x = one.value
        known = id(one.tensor) in scope.names or id(one.tensor) in self.owned
        if known or x.dtype != torch.bool or x.dim() != 2 or not torch.equal(x, torch.ones_like(x).triu(1)):
            return self._name(scope, one.tensor)
        rows, columns = (scope.sized.written(a, b) for a, b in zip(x.shape, other.value.shape, strict=True))
        return f"torch.ones({rows}, {columns}, dtype=torch.bool, device={scope.sized.anchor}.device).triu(1)"

    def _add_operation(self, scope: Scope, one: Operation, other: Operation) -> None:
        names = [self._operand(scope, *slots) for slots in zip(one.inputs, other.inputs, strict=True)]
        text = operation_text(one, other, names, scope.sized)
        hidden = [*dict.fromkeys(name for name in names if name in scope.maybe)]
        seen = [name for name in names if name not in scope.maybe]
        if len(hidden) == 2 and not seen and one.name in JOINS:
            text = f"{hidden[1]} if {hidden[0]} is None else {hidden[0]} if {hidden[1]} is None else {text}"
        elif hidden:
            condition = " or ".join(f"{name} is None" for name in hidden)
            text = f"{self._without(scope, one, seen)} if {condition} else {text}"
        if hidden and not seen:
            scope.maybe.add(f"h{scope.count + 1}")
        found, again = ([slot.tensor for slot in op.outputs] for op in (one, other))
        self._add_line(scope, found, again, text, names)

    @staticmethod
    def _without(scope: Scope, one: Operation, seen: Sequence[str]) -> str:
        """What stands in the place of an operation where no mask is handed over."""
        if not seen:
            return "None"
        fits = [name for name in seen if scope.shapes.get(name) == one.outputs[0].value.shape]
        if not fits:
            raise UnreadError(f"what {one.name} does without a mask is not known")
        return fits[0]

    def _add_line(
        self, scope: Scope, given: Sequence[Tensor], again: Sequence[Tensor], text: str, takes: Sequence[str]
    ) -> None:
        names: list[str] = []
        for x, other in zip(given, again, strict=True):
            names.append(f"h{scope.count + len(names) + 1}")
            scope.names[id(x)] = names[-1]
            scope.shapes[names[-1]] = x.shape
            scope.sized.known.append((names[-1], x.shape, other.shape))
        if names:
            scope.lines.append(Line(names, text, set(takes)))

    def _add_call(self, scope: Scope, number: int) -> None:
        """Write the call of a sub-module."""
        call, other = self.calls[number]
        module = self.module.get_submodule(call.path)
        if self._is_taken(call, module):
            text, takes = self._part(scope, call, module)
            self._add_line(scope, call.outputs[:1], other.outputs[:1], text, takes)
            return
        if isinstance(module, LISTS):
            for i in self._called_in(number):
                child = self.module.get_submodule(self.calls[i][0].path)
                if self.calls[i][0].path in self.parts:
                    raise UnreadError(f"{self.calls[i][0].path} stands in a sequence")
                if not constructor(child):
                    self._write(i)
        elif not constructor(module):
            self._write(number, frozenset(self._maybe(scope, call, module)))
        self._called(scope, call, other, module)

    def _called_in(self, number: int) -> Iterator[int]:
        call = self.calls[number][0]
        place = number + 1
        while place < len(self.calls) and self._is_inside(place, call) and self.calls[place][0].end <= call.end:
            if "." not in self.calls[place][0].path.removeprefix(f"{call.path}."):
                yield place
            place += 1

    def _maybe(self, scope: Scope, call: ModuleCall, module: nn.Module) -> Iterator[str]:
        """Name the arguments of a sub-module that may be None."""
        for name, x in bound(module, call.args, call.kwargs).items():
            if isinstance(x, Tensor) and scope.names.get(id(x)) in scope.maybe:
                yield name

    def _called(self, scope: Scope, call: ModuleCall, other: ModuleCall, module: nn.Module) -> None:
        takes: list[str] = []

        def leaf(x: Any, y: Any) -> Text:
            if isinstance(x, Tensor):
                takes.append(self._name(scope, x))
                return Text(takes[-1])
            return scope.sized.written(x, y)

        if isinstance(module, LISTS) or constructor(module):
            flat, spec = tree_flatten((call.args, call.kwargs))
            again = tree_flatten((other.args, other.kwargs))[0]
            args, kwargs = tree_unflatten([leaf(x, y) for x, y in zip(flat, again, strict=True)], spec)
        else:  # its class is written anew, and takes tensors alone
            given = bound(module, call.args, call.kwargs)
            args, kwargs = (), {name: leaf(x, x) for name, x in given.items() if isinstance(x, Tensor)}
            required = [name for name in kwargs if str(kwargs[name]) not in scope.maybe]
            args, kwargs = tuple(kwargs[n] for n in required), {n: x for n, x in kwargs.items() if n not in required}
        said = ", ".join([*map(nested, args), *(f"{name}={nested(x)}" for name, x in kwargs.items())])
        text = f"self{reached(self.module.get_submodule(scope.path), _inside(call.path, scope.path))}({said})"
        if isinstance(module, nn.MultiheadAttention):
            found = [*zip(call.outputs, other.outputs, strict=True)]
            for place, (x, y) in enumerate(found):
                self._add_line(scope, [x], [y], f"{text}[{place}]", takes)
            return
        self._add_line(scope, call.outputs, other.outputs, text, takes)

    # ------------------------------------------------------------------------------------------- parts
    def _is_taken(self, call: ModuleCall, module: nn.Module) -> bool:
        """Whether the equivalent of a part takes what the part is given, and nothing else is asked of it."""
        part = self.parts.get(call.path)
        if part is None or part.handed or not part.source:
            return False
        theirs, ours = (inspect.signature(one.forward).parameters for one in (module, part.of(module)))
        given = bound(module, call.args, call.kwargs)
        others = {name: x for name, x in given.items() if not isinstance(x, Tensor)}
        return set(given) - set(others) <= set(ours) and all(x is theirs[name].default for name, x in others.items())

    def _part(self, scope: Scope, call: ModuleCall, module: nn.Module) -> tuple[str, list[str]]:
        """Write the call of the equivalent of a part."""
        part = self.parts[call.path]
        if call.path not in self.classes:
            self._embed(call.path, part, module)
        names = inspect.signature(part.of(module).forward).parameters
        given = {name: x for name, x in bound(module, call.args, call.kwargs).items() if isinstance(x, Tensor)}
        takes = [self._name(scope, x) for x in given.values()]
        said = ", ".join(f"{name}={text}" for name, text in zip(given, takes, strict=True))
        if len(given) == 1 and next(iter(names)) in given:
            said = takes[0]
        return f"self{reached(self.module.get_submodule(scope.path), _inside(call.path, scope.path))}({said})", takes

    def _embed(self, path: str, part: Equivalent, module: nn.Module) -> None:
        """Take the text of a part over, under the name of the user's class."""
        body = part.source.split("\n\n\n", 1)[1].rstrip("\n")
        base, count = type(module).__name__, 1
        name = base
        while True:
            text = re.sub(r"\bEquivalent\b", name, body)
            text = re.sub(r"\b(from_theirs|to_theirs)\b", rf"{_lower(name)}_\1", text)
            if self.texts.setdefault(name, text) == text:
                break
            count += 1
            name = f"{base}{count}"
        self.classes[path] = name
        self.returned = (*self.returned, path)


def _inside(path: str, outer: str) -> str:
    return path.removeprefix(f"{outer}.") if outer else path


def _lower(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
