"""Write a part of a Transformer down in torch's own: a norm, a feed-forward, positions, a mask."""

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.equivalent.conversion import Conversion
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.reporting.equivalents import Equivalent

HEAD = '''"""The same as {target}, in torch's own parts."""

{imports}


'''
ACTIVATIONS = {
    "relu": "ReLU",
    "gelu": "GELU",
    "silu": "SiLU",
    "leaky_relu": "LeakyReLU",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "elu": "ELU",
    "mish": "Mish",
}


@dataclass(frozen=True)
class Text:
    """Stands for a tensor in a formula, and writes down what the formula makes of it.

    Args:
        expression: What it is, as Python.
        writer: Writes the part down.
        chain: The modules that make it of the input, one after the other; None where they are no chain.
    """

    expression: str
    writer: "PartWriter"
    chain: tuple[str, ...] | None = None

    def made(self, expression: str, **others: Any) -> "Text":
        """Give what is made of it."""
        return Text(expression, self.writer, **others)

    def __str__(self) -> str:
        return self.expression

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> "Text":
        """Write down a call of one of torch's functions."""
        name, given = function.__name__, _without_defaults(function, kwargs or {})
        first = next(x for x in (*args, *_inside(args)) if isinstance(x, Text))
        said = ", ".join([*map(_said, args), *(f"{key}={value!r}" for key, value in given.items())])
        own = hasattr(F, name) and name not in ("tanh", "sigmoid")
        options = ", ".join(f"{key}={value!r}" for key, value in given.items())
        known = first.chain is not None and name in ACTIVATIONS and len(args) == 1
        chain = (*(first.chain or ()), f"nn.{ACTIVATIONS[name]}({options})") if known else None
        return first.made(f"{'F' if own else 'torch'}.{name}({said})", chain=chain)

    def __getattr__(self, name: str) -> Callable[..., "Text"]:
        if name.startswith("_"):
            raise AttributeError(name)

        def method(*args: Any, **kwargs: Any) -> Text:
            said = ", ".join([*map(_said, args), *(f"{key}={_said(value)}" for key, value in kwargs.items())])
            return self.made(f"{_owner(self)}.{name}({said})")

        return method

    def __getitem__(self, index: Any) -> "Text":
        places = index if isinstance(index, tuple) else (index,)
        return self.made(f"{_owner(self)}[{', '.join(map(_said, places))}]")

    def __add__(self, other: Any) -> "Text":
        return self.made(f"{self} + {_said(other)}")

    def __radd__(self, other: Any) -> "Text":
        return self.made(f"{_said(other)} + {self}")

    def __sub__(self, other: Any) -> "Text":
        return self.made(f"{self} - {_factor(other)}")

    def __mul__(self, other: Any) -> "Text":
        return self.made(f"{_factor(self)} * {_factor(other)}")

    def __rmul__(self, other: Any) -> "Text":
        return self.made(f"{_factor(other)} * {_factor(self)}")

    def __truediv__(self, other: Any) -> "Text":
        return self.made(f"{_factor(self)} / ({_said(other)})")

    def __floordiv__(self, other: Any) -> "Text":
        return self.made(f"{_factor(self)} // {_factor(other)}")

    def __rpow__(self, base: Any) -> "Text":
        return self.made(f"{_said(base)} ** ({self})")

    def __neg__(self) -> "Text":
        return self.made(f"-({self})")


def _said(x: Any) -> str:
    if isinstance(x, slice):
        return ":".join("" if end is None else _said(end) for end in (x.start, x.stop))
    if x is Ellipsis:
        return "..."
    if isinstance(x, tuple | list):
        return "(" + ", ".join(map(_said, x)) + ("," if len(x) == 1 else "") + ")"
    return str(x) if isinstance(x, Text) else repr(x)


def _factor(x: Any) -> str:
    return f"({x})" if isinstance(x, Text) and outside_of_brackets(str(x)) & set("+-") else _said(x)


def _owner(x: Text) -> str:
    return f"({x})" if outside_of_brackets(str(x)) & set(" -") else str(x)


def outside_of_brackets(text: str) -> set[str]:
    """List the letters of an expression that stand in no brackets.

    >>> sorted(outside_of_brackets("(a != b)[:, None]"))
    []
    """
    depth = itertools.accumulate({"(": 1, "[": 1}.get(x, -(x in ")]")) for x in text)
    return {letter for letter, inside in zip(text, depth, strict=True) if not inside} - set(")]")


def _inside(args: Any) -> Iterator[Any]:
    return (x for one in args if isinstance(one, tuple | list) for x in one)


def _without_defaults(function: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a function has anyhow."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # of one that is written in C
        return kwargs
    return {key: value for key, value in kwargs.items() if parameters[key].default != value}


@dataclass
class PartWriter(Conversion):
    """Writes one part.

    Args:
        target: What it is called.
        parameters: Of the user's module, or what a function is given as its weights.
        module: The user's module.
        signature: The arguments of the equivalent, as Python.
        is_function: Whether a function is written, whose weights are arguments.
    """

    target: str
    parameters: Parameters
    module: nn.Module
    signature: str = "x: Tensor"
    is_function: bool = False
    torchs: str = ""  # the module of torch that is the whole
    width: str = ""  # the argument that is the number of features
    lines: list[str] = field(default_factory=list)  # of its forward, before what it returns
    made: dict[str, str] = field(default_factory=dict)  # what __init__ makes
    taken: list[str] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)
    handed: dict[str, str] = field(default_factory=dict)  # the paths of the user's own sub-modules, by their names
    called_as_it_is: list[str] = field(default_factory=list)  # sub-modules
    imports: list[str] = field(default_factory=list)
    projecting: list[str] = field(default_factory=list)  # the parameters that are matrices
    copied: list[str] = field(default_factory=list)  # those that are several of them

    @property
    def argument(self) -> str:
        """The first argument."""
        return _names(self.signature)[0]

    def equivalent(self, source: str, theirs: str) -> Equivalent:
        """Give what was written, before it is compared."""
        handed = tuple(self.handed.values())
        steps = tuple((f"{path} is called as it is", f"the sub-module {path}") for path in self.called_as_it_is)
        return Equivalent(source, "", theirs, handed, steps, (), (), torch.inf, "", False, self.torchs)

    # ------------------------------------------------------------------------------------------- weights
    def parameter(self, path: str, shape: tuple[int, ...] | None = None) -> Text:
        """Give a parameter as it is, or in another shape."""
        own = tuple(self.parameters.named[path].shape)
        shape = shape or own
        shaped, back = (f".view({shape})", f".view({own})") if shape != own else ("", "")
        if self.is_function:
            return Text(f"{path}{shaped}", self)
        name = _identifier(path)
        if name not in self.made:
            self.made[name] = f"nn.Parameter(torch.empty({shape}))"
            self.taken.append(f'"{name}": theirs["{path}"]{shaped},')
            self.returned.append(f'theirs["{path}"].copy_(ours["{name}"]{back})')
        return Text(f"self.{name}", self)

    def given(self, places: Tensor) -> Text:
        """Give a weight of a function, made of its arguments."""
        return Text(re.sub(r'theirs\["(\w+)"\]', r"\1", self._taken(places)), self)

    def number(self, value: float) -> str:
        """Give a number, by the name of the argument that it is the default of."""
        found = re.search(rf"(\w+): float = {re.escape(repr(value))}(,|$)", self.signature)
        return found[1] if found else repr(value)

    def projected(self, x: Text, name: str, weight: Tensor, bias: Tensor | None) -> Text:
        """Apply a linear layer.

        Args:
            x: What it is applied to.
            name: What to call it.
            weight: (out, in); its values say which parameter elements they are.
            bias: (out,); None for none.
        """
        try:
            places = self.places_of(weight)
        except UnreadError:
            return self.called(x, self._owner_of(weight))
        own = None if bias is None else self.places_of(bias)
        names = self.parameters.names_at(places)
        self.copied += [one for one in names if one in self.projecting and name not in self.made]
        self.projecting += names
        if self.is_function:
            added = "" if own is None else f", {self.given(own)}"
            return Text(f"F.linear({x}, {self.given(places)}{added})", self)
        if name not in self.made:
            less = ", bias=False" if own is None else ""
            self.made[name] = f"nn.Linear({weight.size(1)}, {weight.size(0)}{less})"
            self._convert(f"{name}.weight", places)
            if own is not None:
                self._convert(f"{name}.bias", own)
        return Text(f"self.{name}({x})", self, None if x.chain is None else (*x.chain, name))

    def _owner_of(self, weight: Tensor) -> str:
        """Find the sub-module that makes a weight of its parameters, as weight norm does."""
        for path, part in self.module.named_modules():
            made = getattr(part, "weight", None)
            if path and isinstance(made, Tensor) and made.shape == weight.shape and torch.equal(made.double(), weight):
                return path
        raise UnreadError("what multiplies its features is made of parameters, and is none itself")

    def places_of(self, values: Tensor) -> Tensor:
        """Find which parameter elements some numbers are.

        Raises:
            UnreadError: If they are none.
        """
        every = self.parameters.end_to_end().detach()
        ordered = every.sort()
        places = torch.searchsorted(ordered.values, values.detach().double().contiguous()).clamp_max(len(every) - 1)
        found = ordered.indices[places]
        if not torch.equal(every[found], values.detach().double()):
            raise UnreadError("what multiplies its features is made of parameters, and is none itself")
        return found

    def vector(self, name: str, path: str, plus_one: bool = False) -> None:
        """Make a weight of the equivalent of a parameter, or of 1 + it."""
        places = self._places(path)
        self.taken.append(f'"{name}": {"1 + " if plus_one else ""}{self._taken(places)},')
        self._give_back(places, f'ours["{name}"]{" - 1" if plus_one else ""}')

    # ------------------------------------------------------------------------------------------- sub-modules
    def called(self, x: Text, path: str) -> Text:
        """Call a sub-module: one of torch's is made anew, one of the user's own is handed over."""
        name, part = _identifier(path), self.module.get_submodule(path)
        if name not in self.made:
            self.called_as_it_is.append(path)
            torchs = type(part).__module__.startswith("torch.nn") and next(part.children(), None) is None
            self.made[name] = f"nn.{part!r}" if torchs else name
            if not torchs:
                self.handed[name] = path
            for key in part.state_dict():
                self.taken.append(f'"{name}.{key}": theirs["{path}.{key}"],')
                self.returned.append(f'theirs["{path}.{key}"].copy_(ours["{name}.{key}"])')
        return Text(f"self.{name}({x})", self)

    # ------------------------------------------------------------------------------------------- the text
    def source(self, result: Text, before: str = "", after: str = "") -> str:
        """Write it down.

        Args:
            result: What it returns.
            before: What is done to its argument first, as ".mT".
            after: What is done to the result.
        """
        first = [f"{self.argument} = {self.argument}{before}"] if before else []
        returned = f"return ({result}){after}" if after else f"return {result}"
        if self.is_function:
            body = self._function([*first, *self.lines, returned])
        else:
            self._as_a_chain(result)
            if self.torchs:
                given = self.argument
                returned = f"return super().forward({given}){after}"
            body = (
                "\n".join([*self._class([*first, *self.lines, returned]), "", "", *self._conversion(self.target)])
                + "\n"
            )
        imports = ["import torch"] if re.search(r"\btorch\.[a-z]", body) else []
        imports = ["from typing import Any", "", *imports] if re.search(r"\bAny\b", body) else imports
        imports += ["from torch import Tensor" + (", nn" if "nn." in body else "")]
        imports += ["from torch.nn import functional as F"] if "F." in body else []
        imports += ["", *self.imports] if self.imports else []
        return HEAD.format(target=self.target, imports="\n".join(imports)) + body

    def _function(self, lines: Sequence[str]) -> str:
        body = "\n".join(f"    {line}" for line in lines)
        asked = [one for one in re.split(r", (?=\*?\*?\w+: |\*,)", self.signature) if _is_used(one, body)]
        arguments = ", ".join(asked[:-1] if asked[-1:] == ["*"] else asked)
        kind = "tuple[Tensor, ...]" if "," in outside_of_brackets(lines[-1]) else "Tensor"
        return f'def equivalent({arguments}) -> {kind}:\n    """Give the same."""\n{body}\n'

    def _as_a_chain(self, result: Text) -> None:
        """Write modules that follow one another as nn.Sequential."""
        if self.torchs or result.chain is None or not self.made:
            return
        self.torchs = f"nn.Sequential({', '.join(self.made.get(one, one) for one in result.chain)})"
        for place, name in enumerate(result.chain):
            self.taken = [line.replace(f'"{name}.', f'"{place}.', 1) for line in self.taken]
            self.returned = [line.replace(f'ours["{name}.', f'ours["{place}.') for line in self.returned]
        self.made = {}

    def _class(self, forward: Sequence[str]) -> Iterator[str]:
        base, _, options = self.torchs.partition("(")
        yield from (f"class Equivalent({base or 'nn.Module'}):", '    """The same in torch."""')
        given = "".join(f", {name}: nn.Module" for name in self.handed)
        if self.torchs or self.made:
            yield from ("", f"    def __init__(self{given}) -> None:")
            yield f"        super().__init__({options}" if self.torchs else "        super().__init__()"
            yield from (f"        self.{name} = {made}" for name, made in self.made.items())
        if not self.torchs or len(forward) > 1 or "super().forward(input)" not in forward[-1]:
            ignore = "  # type: ignore[override]" if self.torchs else ""
            yield from ("", f"    def forward(self, {self.signature}) -> Tensor:{ignore}")
            yield from (f"        {line}" for line in forward)


def _is_used(argument: str, body: str) -> bool:
    """Whether an argument has to be given, or the body takes it: nothing is accepted and ignored."""
    return " = " not in argument or re.search(rf"\b{argument.partition(':')[0]}\b", body) is not None


def signature_of(function: Callable[..., Any], kinds: Mapping[str, str] | None = None) -> str:
    """Write the arguments of a function, each with what it takes by default.

    Args:
        function: The function.
        kinds: The types of those that take no tensor by default, by name.

    >>> def norm(x, gain, *, eps=1e-5): ...
    >>> signature_of(norm)
    'x: Tensor, gain: Tensor, *, eps: float = 1e-05'
    """
    found: list[str] = []
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.KEYWORD_ONLY and not any(said.startswith("*") for said in found):
            found.append("*")
        star = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
        default = "" if one.default is one.empty else f" = {one.default!r}"
        plain = type(one.default) in (int, float, bool, str)
        kind = "Any" if star or (default and not plain) else type(one.default).__name__ if default else "Tensor"
        found.append(f"{star}{one.name}: {(kinds or {}).get(one.name, kind)}{default}")
    return ", ".join(found)


def _identifier(path: str) -> str:
    """Make a name of a path.

    >>> _identifier("net.0"), _identifier("0.norm")
    ('net_0', 'part_0_norm')
    """
    name = path.replace(".", "_")
    return name if name.isidentifier() else f"part_{name}"


def _names(signature: str) -> list[str]:
    """Name the arguments of a signature.

    >>> _names("x: Tensor, size: int = 3")
    ['x', 'size']
    """
    return re.findall(r"(\w+)(?=:)", signature) or ["x"]
