"""Write a layer, a stack or a model down as torch's own program: a class for each kind of module that ran in it."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from equivalence_tests.checker.engine.watching import ModuleCall, Recorder
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.equivalent.texts import (
    LISTS,
    Code,
    arguments_text,
    constructor,
    made_of,
    own_lines,
    reached,
)
from equivalence_tests.checker.equivalent.writer import Writer
from equivalence_tests.checker.layers.whole_calls import bound
from equivalence_tests.checker.layers.whole_scopes import Scope
from equivalence_tests.checker.reach.arguments import role_of_parameter
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.equivalents import Equivalent

HOLDERS = ("nn.Module()", "nn.ModuleDict()")  # what holds parts that something else calls


@dataclass
class WholeWriter:
    """Writes one program, of two recordings at different sizes."""

    module: nn.Module
    recorders: tuple[Recorder, Recorder]  # the recordings
    parts: Mapping[str, Equivalent]  # the equivalents of its parts, by path
    optional: set[str]  # the arguments that may be None
    classes: dict[str, str] = field(default_factory=dict)  # of each module that ran, by path
    texts: dict[str, str] = field(default_factory=dict)  # each text, by the name of its class
    converted: list[str] = field(default_factory=list)  # the paths of parts whose weights lie otherwise
    tables: set[str] = field(default_factory=set)  # what no state_dict holds
    inlined: set[str] = field(default_factory=set)  # the paths of modules that are written where they are called

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
        """Write the program of what is called ``target``."""
        self._write(0)
        writer = Writer(target, Parameters({}), self.module)
        others = [f"{path}." for path in self.converted]
        left_out = f"({', '.join(map(repr, [*self._unused(), *others]))},)".replace("(,)", "()")
        same = "{{name: x{} for name, x in {}.items() if {}not name.startswith({})}}".format
        writer.taken.append(f"**{same('', 'theirs', '', left_out)},")
        writer.returned.append(f"theirs.update({same('.clone()', 'ours', 'name in theirs and ', left_out)})")
        for path in self.converted:
            writer.converted(path, path, self.parts[path])
            head = self.parts[path].source.split("\n\n\n", 1)[0].splitlines()
            writer.imports += [line for line in head if line.startswith("from builtin")]
        order = [self.classes[""], *(name for name in reversed(self.texts) if name != self.classes[""])]
        return writer.program("\n\n".join(f"{self.texts[name]}\n" for name in order))

    # ------------------------------------------------------------------------------------------- weights
    def _unused(self) -> list[str]:
        """List the beginnings of the names of what the program has no part for."""
        built = {name: x for name, x in self.module.named_modules() if name and self._made(name, "") == ""}
        outer = [name for name in built if not any(name.startswith(f"{other}.") for other in built)]
        return [f"{name}." for name in outer if next(iter(built[name].state_dict()), None) is not None]

    # ------------------------------------------------------------------------------------------- modules
    def _write(self, number: int, maybe: frozenset[str] = frozenset()) -> str:
        """Write the class of a module that ran; give its name."""
        call, other = self.calls[number]
        module = self.module.get_submodule(call.path)
        scope = self._scope(call, other, module, maybe or frozenset(self.optional if number == 0 else ()))
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

    @staticmethod
    def _scope(call: ModuleCall, other: ModuleCall, module: nn.Module, maybe: frozenset[str]) -> Scope:
        given, again = (bound(module, one.args, one.kwargs) for one in (call, other))
        lists = {name: x for name, x in given.items() if _holds_tensors(x)}
        tensors = {name: (x, again[name]) for name, x in given.items() if isinstance(x, Tensor)}
        tensors |= {f"{name}[{i}]": (x[i], again[name][i]) for name, x in lists.items() for i in range(len(x))}
        others = (x for name, x in given.items() if name not in {*tensors, *lists})
        if any(next(tensors_in((x,)), None) is not None for x in others):
            raise UnreadError(f"{call.path or 'it'} is given tensors inside other arguments")
        numbers = {name: (x, again[name]) for name, x in given.items() if type(x) is int and x != again[name]}
        return Scope(call.path, tensors, {name for name in tensors if name in maybe}, numbers)

    def _class(self, scope: Scope, call: ModuleCall, module: nn.Module) -> str:
        outputs = [scope.names[id(x)] for x in call.outputs if id(x) in scope.names]
        if not outputs or (not call.path and len(outputs) < len(call.outputs)):
            raise UnreadError(f"{call.path or 'it'} returns something that is not made in it")
        lines = [*own_lines(module), *self._of_tables(call.path), *self._children(module, call.path)]
        given = ", theirs: nn.Module" if self._takes_tables(call.path) else ""
        init = [f"    {line}" for line in (f"def __init__(self{given}) -> None:", "    super().__init__()")]
        init += [f"        {line}" for line in lines]
        several = f"({', '.join(outputs)})" if len(outputs) > 1 else outputs[0]
        kind = "tuple[Tensor, ...]" if len(outputs) > 1 else "Tensor"
        body = [f"        {line}" for line in scope.live(outputs)]
        head = f"    def forward(self, {scope.signature}) -> {kind}:"
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
                yield from self._held(child, full, base, f"self.{name}")
        yield from self._tied(module) if not path else ()

    def _held(self, child: nn.Module, path: str, base: str, place: str) -> Iterator[str]:
        """Write what a holder holds, and what the holders in a list do."""
        if self._made(path, base) in HOLDERS:
            for line in (*own_lines(child), *self._of_tables(path), *self._children(child, path, base)):
                yield line.replace("self.", f"{place}.", 1)
        elif isinstance(child, LISTS):
            for name, one in child.named_children():
                yield from self._held(one, f"{path}.{name}", base, place + reached(child, name))

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
            tables = f"theirs{self._reached(base, path)}" if self._takes_tables(path) else ""
            return f"{self.classes[path]}({tables})"
        if isinstance(module, LISTS):
            inside = [self._made(f"{path}.{name}", base) for name, _ in module.named_children()]
            return made_of(module, inside) if all(inside) else ""
        if constructor(module):
            return constructor(module)
        inside = [self._made(f"{path}.{name}", base) for name, _ in module.named_children()]
        ran = path in self.inlined or any(other.startswith(f"{path}.") for other in self.classes)
        return HOLDERS[isinstance(module, nn.ModuleDict)] if ran and any(inside) else ""

    def _reached(self, base: str, path: str) -> str:
        """Write how a sub-module, a parameter or a buffer is reached from a module."""
        inside = path.removeprefix(f"{base}.") if base else path
        return reached(self.module.get_submodule(base), inside)

    # ------------------------------------------------------------------------------------------- a forward
    def _fill(self, scope: Scope, number: int) -> None:
        """Write the lines of one call: its operations, and the sub-modules that it calls, in their order."""
        call = self.calls[number][0]
        place = call.first
        for i in self._inside(number, scope.path):
            self._add_operations(scope, place, self.calls[i][0].first)
            self._add_call(scope, i)
            place = self.calls[i][0].end
        self._add_operations(scope, place, call.end)

    def _inside(self, number: int, path: str) -> Iterator[int]:
        """List the calls that a call makes of what lies under a path, not those inside of these."""
        call = self.calls[number][0]
        place = call.first
        for i, (child, _) in enumerate(self.calls):
            own = child.path.startswith(f"{path}.") if path else bool(child.path)
            if i > number and own and place <= child.first and child.end <= call.end:
                place = child.end
                yield i

    def _name(self, scope: Scope, x: Tensor) -> str:
        if id(x) in scope.names:
            return scope.names[id(x)]
        path = self.owned.get(id(x))
        if path is None:
            raise UnreadError("it uses a tensor that is neither an argument, a parameter nor a buffer")
        if scope.path and not path.startswith(f"{scope.path}."):
            raise UnreadError(f"{scope.path} uses {path}, which is not its own")
        if path not in self.kept:
            self.tables.add(path)
        return f"self{self._reached(scope.path, path)}"

    def _operand(self, scope: Scope, tensor: Tensor, x: Tensor, later: Tensor) -> str:
        """Write what is taken; where torch did not make it, by its numbers: a triangle, or places that are counted."""
        known = id(tensor) in scope.names or id(tensor) in self.owned
        if not known and x.dim() == later.dim() == 2 and x.dtype == later.dtype:
            rows, columns = (scope.written(a, b) for a, b in zip(x.shape, later.shape, strict=True))
            if x.dtype == torch.bool and torch.equal(x, torch.ones_like(x).triu(1)):
                return f"torch.ones({rows}, {columns}, dtype=torch.bool, device={scope.device}).triu(1)"
            first, in_order = int(x[0, 0]), (y == first + torch.arange(y.size(1)) for y in (x, later))
            if x.dtype == torch.long and all(map(torch.all, in_order)):
                return f"({first} + torch.arange({columns}, device={scope.device})).expand({rows}, {columns})"
        return self._name(scope, tensor)

    def _add_operations(self, scope: Scope, start: int, end: int) -> None:
        for one, other in self.operations[start:end]:
            pairs = zip(one.inputs, other.inputs, strict=True)
            names = [self._operand(scope, x.tensor, x.value, later.value) for x, later in pairs]
            scope.add_operation(one, other, names)

    def _add_call(self, scope: Scope, number: int) -> None:
        """Write the call of a sub-module."""
        call = self.calls[number][0]
        if self._calls_what_it_is_given(number):
            self.inlined.add(call.path)
            self._fill(scope, number)
            return
        module = self.module.get_submodule(call.path)
        taken = self._is_taken(call, module)
        if taken:
            self._embed(call.path, self.parts[call.path], module)
        elif isinstance(module, LISTS):
            for i in self._inside(number, call.path):
                if self.calls[i][0].path in self.parts:
                    raise UnreadError(f"{self.calls[i][0].path} stands in a sequence")
                if not constructor(self.module.get_submodule(self.calls[i][0].path)):
                    self._write(i)
        elif not constructor(module):
            self._write(number, frozenset(self._maybe(scope, call, module)))
        self._called(scope, number, module, taken)

    def _calls_what_it_is_given(self, number: int) -> bool:
        """Whether a call runs modules that are not its own, as a residual connection runs its sub-layer."""
        call = self.calls[number][0]
        inside = (x for x, _ in self.calls[number + 1 :] if call.first <= x.first and x.end <= call.end)
        return any(not x.path.startswith(f"{call.path}.") for x in inside)

    def _maybe(self, scope: Scope, call: ModuleCall, module: nn.Module) -> Iterator[str]:
        """Name the arguments of a sub-module that may be None."""
        for name, x in bound(module, call.args, call.kwargs).items():
            if isinstance(x, Tensor) and scope.names.get(id(x)) in scope.maybe:
                yield name

    def _called(self, scope: Scope, number: int, module: nn.Module, taken: bool) -> None:
        call, other = self.calls[number]
        takes: list[str] = []

        def leaf(x: Any, y: Any) -> Any:
            if isinstance(x, Tensor):
                takes.append(self._operand(scope, x, x, y))
                return Code(takes[-1])
            return scope.written(x, y)

        if not taken and (isinstance(module, LISTS) or constructor(module)):
            flat, spec = tree_flatten((call.args, call.kwargs))
            again = tree_flatten((other.args, other.kwargs))[0]
            args, kwargs = tree_unflatten([leaf(x, y) for x, y in zip(flat, again, strict=True)], spec)
        else:  # its class is written anew, and takes tensors and sizes alone
            given, later = (bound(module, one.args, one.kwargs) for one in (call, other))
            kwargs = {name: leaf(x, later[name]) for name, x in given.items() if isinstance(x, Tensor)}
            kwargs |= {name: [leaf(y, y) for y in x] for name, x in given.items() if _holds_tensors(x)}
            first = [name for name, x in kwargs.items() if str(x) not in scope.maybe]
            if taken:
                theirs = inspect.signature(self.parts[call.path].of(module).forward).parameters
                kwargs = {name: x for name, x in kwargs.items() if name in theirs}
                first = [*kwargs] if [*kwargs] == [*theirs][:1] else []
            args = tuple(kwargs.pop(name) for name in first)
            kwargs |= {name: leaf(x, later[name]) for name, x in given.items() if type(x) is int and x != later[name]}
        text = f"self{self._reached(scope.path, call.path)}({arguments_text(args, kwargs)})"
        count = 1 if taken else len(call.outputs)
        text += "[0]" * (count == 1 and isinstance(module, nn.MultiheadAttention) and not taken)
        scope.add(call.outputs[:count], other.outputs[:count], text, takes)

    # ------------------------------------------------------------------------------------------- parts
    def _is_taken(self, call: ModuleCall, module: nn.Module) -> bool:
        """Whether the equivalent of a part takes what the part is given, and nothing else is asked of it."""
        part = self.parts.get(call.path)
        if part is None or part.handed or not part.source:
            return False
        theirs, ours = (inspect.signature(one.forward).parameters for one in (module, part.of(module)))
        given = bound(module, call.args, call.kwargs)
        others = {name: x for name, x in given.items() if not isinstance(x, Tensor)}
        left = all(_is_left_out(x, theirs[name].default) for name, x in others.items())
        rotates = {name for name in given if role_of_parameter(name) == "angles"}  # as the equivalent does by itself
        return set(given) - set(others) - rotates <= set(ours) and left

    def _embed(self, path: str, part: Equivalent, module: nn.Module) -> None:
        """Take the text of a part over, under the name of the user's class."""
        if path not in self.classes:
            body = part.source.split("\n\n\n")[1].rstrip("\n")
            self.classes[path] = self._kept(type(module).__name__, body.replace("class Equivalent", "class NAME", 1))
            self.converted.append(path)


def _is_left_out(x: Any, default: Any) -> bool:
    """Whether an argument is what a part is checked with: its default, or 0, False or None where it has none."""
    return x is default or (default is inspect.Parameter.empty and (x is None or (type(x) in (int, bool) and not x)))


def _holds_tensors(x: Any) -> bool:
    """Whether an argument is a list of nothing but tensors."""
    return isinstance(x, tuple | list) and bool(x) and all(isinstance(one, Tensor) for one in x)
