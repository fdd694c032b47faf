"""Write a program down in torch's own parts: its lines, its sub-modules, and the conversion of weights both ways."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from equivalence_tests.checker.equivalent.parameters import Block, Parameters, blocks_of, joined, written_back
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.equivalent.texts import (
    Code,
    bracketed,
    call_text,
    constructor,
    outside_of_brackets,
    without_defaults,
)
from equivalence_tests.checker.reach.calling import WINDOWS
from equivalence_tests.checker.reach.masking import MaskForm
from equivalence_tests.checker.reporting.equivalents import Equivalent

# From a layout to (batch, tokens, features), and back.
LAYOUTS: Mapping[str, tuple[str, str]] = {
    "b l e": ("", ""),
    "l b e": (".transpose(0, 1)", ".transpose(0, 1)"),
    "l e": ("[None]", "[0]"),
    "b e l": (".mT", ".mT"),
    "b e l 1": (".flatten(2).mT", ".mT.unflatten(2, (-1, width))"),
    "b l 1 e": (".flatten(1, 2)", ".unflatten(1, (-1, width))"),
    WINDOWS: (".flatten(3, 4).flatten(0, 2)", ".unflatten(1, shape[3:5]).unflatten(0, shape[:3])"),
    "b h l d": (".transpose(1, 2).flatten(2)", ""),
    "b l h d": (".flatten(2)", ""),
    "b e": ("[:, None]", "[:, 0]"),
    "1 b e": (".transpose(0, 1)", ".transpose(0, 1)"),
    "b 1 e": ("", ""),
}
# From the shape of a mask to (batch, heads, query, key).
MASK_SHAPES: Mapping[str, str] = {
    "(batch, query, key)": "[:, None]",
    "(batch, 1, query, key)": "",
    "(batch, heads, query, key)": "",
    "(batch * heads, query, key)": ".unflatten(0, (-1, {heads}))",
    "(heads * batch, query, key)": ".unflatten(0, ({heads}, -1)).transpose(0, 1)",
    "(query, key, batch)": ".permute(2, 0, 1)[:, None]",
    "(query, key)": "[None, None]",
    "(1, query, key)": "[:, None]",
    "(1, 1, query, key)": "",
    "(batch, key)": "[:, None, None]",
    "(batch, 1, key)": "[:, None]",
    "(batch, 1, 1, key)": "",
    "(1, key, batch)": ".permute(2, 0, 1)[:, None]",
    "(batch, key, 1)": ".mT[:, None]",
    "segments (batch, key)": "[:, None]",
    "lengths (batch,)": "[:, None, None, None]",
    "lengths (batch, query)": "[:, None, :, None]",
}
HIDES: Mapping[str, str] = {"look": "~{}", "block": "{}", "look_float": "{} == 0", "look_int": "{} == 0"}
HIDES = {**HIDES, "block_float": "{} != 0", "block_int": "{} != 0", "additive": "{} < 0"}
HIDES = {**HIDES, "segments": "{0}[..., None] != {0}[..., None, :]"}
HIDES = {**HIDES, "lengths": "torch.arange({keys}, device={name}.device) >= {0}"}
HEAD = '''"""The same as {target}, in torch's own parts{sizes}."""

{imports}


'''
CONVERSION = '''

def from_theirs(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn a state_dict of {target} into one of Equivalent."""
    return {{
{taken}    }}


def to_theirs(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put the weights of Equivalent into a copy of a state_dict of theirs."""
    theirs = {{name: x.clone() for name, x in theirs.items()}}
{returned}    return theirs
'''
# Between what the lines of such conversions stand.
CONVERTED = (("    return {\n", "    }\n"), ("in theirs.items()}\n", "    return theirs"))
# Torch's modules of activations, by the names of their functions without what joins words.
ACTIVATIONS = {name.lower(): name for name in nn.modules.activation.__all__}


@dataclass(frozen=True)
class Signature:
    """How the code that was checked is called."""

    target: str
    arguments: tuple[tuple[str, str], ...]  # those that hold tokens: the names in a call, and in its signature
    layout: str = "b l e"
    mask: str = ""  # the name of its mask; "" for none
    form: MaskForm | None = None  # how that is understood; None where it is not known
    merged: bool = True  # whether heads that are handed over come back side by side
    tables: tuple[str, ...] = ()  # the arguments that hold relative positions
    apart: Mapping[str, str] = field(default_factory=dict)  # how those are laid out that lie in another way
    returned: str = "b l e"

    def inward(self, name: str) -> str:
        """Write what lays an argument out as (batch, tokens, features)."""
        return LAYOUTS[self.apart.get(name, self.layout)][0]

    def hidden(self, heads: int, keys: str = "key.size(-2)") -> str:
        """Write what the mask hides of so many keys, (batch, heads, query, key) bool, True = may not look."""
        if self.form is None or self.form.shape not in MASK_SHAPES or self.form.held:
            raise UnreadError(f"a mask of the form {self.form} cannot be written down")
        mask = self.mask + MASK_SHAPES[self.form.shape].format(heads=heads)
        return HIDES[self.form.encoding].format(mask, name=self.mask, keys=keys)


@dataclass(frozen=True, eq=False)
class Text(Code):
    """Stands for a tensor in a formula of a part."""

    writer: "Writer"
    chain: tuple[str, ...] | None = None  # the modules that make it of the input, one after the other

    def made(self, expression: str, chain: tuple[str, ...] | None = None) -> Self:
        """Give what is made of it."""
        return replace(self, expression=expression, chain=chain)

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> "Text":
        """Write down a call of one of torch's functions."""
        name, given = function.__name__, without_defaults(function, kwargs or {})
        module = ACTIVATIONS.get(name.replace("_", ""))
        first = next(x for x in tree_leaves(args) if isinstance(x, Text))
        options = ", ".join(f"{key}={value!r}" for key, value in given.items())
        known = first.chain is not None and module is not None and len(args) == 1
        chain = (*(first.chain or ()), f"nn.{module}({options})") if known else None
        return first.made(call_text(function, name, args, given), chain)


@dataclass
class Writer:
    """Writes one program."""

    target: str  # what the code that was checked is called
    parameters: Parameters  # of the user's module, or what a function is given as its weights
    module: nn.Module
    signature: str = "x: Tensor"  # the arguments of the equivalent, as Python
    is_function: bool = False  # whether a function is written, whose weights are arguments
    sentence: str = "The same in torch."
    sizes: str = ""  # for which it is written
    torchs: str = ""  # the module of torch that is the whole
    width: str = ""  # the argument that is the number of features
    lines: list[str] = field(default_factory=list)  # of its forward, before what it returns
    made: dict[str, str] = field(default_factory=dict)  # what __init__ makes
    taken: list[str] = field(default_factory=list)  # entries of the converted state_dict
    returned: list[str] = field(default_factory=list)  # lines that put weights back
    handed: dict[str, str] = field(default_factory=dict)  # the paths of the user's own sub-modules, by their names
    called_as_it_is: list[str] = field(default_factory=list)  # sub-modules
    imports: list[str] = field(default_factory=list)
    projecting: list[str] = field(default_factory=list)  # the parameters that are matrices
    copied: list[str] = field(default_factory=list)  # those that are several of them

    @property
    def argument(self) -> str:
        """The first argument."""
        found = re.match(r"\w+(?=:)", self.signature)
        return found[0] if found else "x"

    def equivalent(self, source: str, theirs: str) -> Equivalent:
        """Give what was written, before it is compared."""
        steps = tuple((f"{path} is called as it is", f"the sub-module {path}") for path in self.called_as_it_is)
        return Equivalent(source, "", theirs, tuple(self.handed.values()), steps, torchs=self.torchs)

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
        return Text(re.sub(r'theirs\["(\w+)"\]', r"\1", joined(self._blocks(places), "theirs")), self)

    def number(self, value: float) -> str:
        """Give a number, by the name of the argument that it is the default of."""
        found = re.search(rf"(\w+): float = {re.escape(repr(value))}(,|$)", self.signature)
        return found[1] if found else repr(value)

    def projected(self, x: Text, name: str, weight: Tensor, bias: Tensor | None) -> Text:
        """Apply a linear layer, (out, in) and (out,); their values say which parameter elements they are."""
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
        self.linear(name, places, own)
        return Text(f"self.{name}({x})", self, None if x.chain is None else (*x.chain, name))

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> None:
        """Make a linear layer of parameter elements: (out, in) places, and (out,) of the bias; -1 for none."""
        if name in self.made:
            return
        biased = bias is not None and bool((bias >= 0).any())
        self.made[name] = f"nn.Linear({weight.size(1)}, {weight.size(0)}{'' if biased else ', bias=False'})"
        self.convert(f"{name}.weight", weight)
        if bias is not None and biased:
            self.convert(f"{name}.bias", bias)

    def _owner_of(self, weight: Tensor) -> str:
        """Find the sub-module that makes a weight of its parameters, as weight norm does."""
        for path, part in self.module.named_modules():
            made = getattr(part, "weight", None)
            if path and isinstance(made, Tensor) and made.shape == weight.shape and torch.equal(made.double(), weight):
                return path
        raise UnreadError("what multiplies its features is computed from parameters, and is not one itself")

    def places_of(self, values: Tensor) -> Tensor:
        """Find which parameter elements some numbers are."""
        every = self.parameters.end_to_end().detach()
        ordered = every.sort()
        places = torch.searchsorted(ordered.values, values.detach().double().contiguous()).clamp_max(len(every) - 1)
        found = ordered.indices[places]
        if not torch.equal(every[found], values.detach().double()):
            raise UnreadError("what multiplies its features is computed from parameters, and is not one itself")
        return found

    def vector(self, name: str, path: str, plus_one: bool = False) -> None:
        """Make a weight of the equivalent of a parameter, or of 1 + it."""
        self.convert(name, self.parameters.places(path).flatten(), plus_one)

    def convert(self, name: str, places: Tensor, plus_one: bool = False) -> None:
        """Say which parameter elements a weight of the equivalent is, or which 1 is added to."""
        blocks = self._blocks(places)
        self.taken.append(f'"{name}": {"1 + " if plus_one else ""}{joined(blocks, "theirs")},')
        self.returned += written_back(blocks, "theirs", f'ours["{name}"]{" - 1" if plus_one else ""}')

    def _blocks(self, places: Tensor) -> list[Block]:
        """Find the parts of the user's parameters that elements are; zeros where there is none."""
        blocks = blocks_of(places, self.parameters)
        if blocks is None:
            raise UnreadError("the weights lie in an order that cannot be written down")
        return blocks

    def _tied(self) -> Iterator[str]:
        """Write that a parameter is held under another name once more."""
        known = {id(x): name for name, x in self.parameters.named.items()}
        for name, x in self.module.named_parameters(remove_duplicate=False):
            if known.get(id(x), name) != name:
                yield f'theirs["{name}"] = theirs["{known[id(x)]}"]'

    # ------------------------------------------------------------------------------------------- sub-modules
    def called(self, x: Text, path: str) -> Text:
        """Call a sub-module as it is, which is a step of the program."""
        self.called_as_it_is += [path] if _identifier(path) not in self.made else []
        return Text(f"self.{self.sub_module(path)}({x})", self)

    def sub_module(self, path: str) -> str:
        """Make a sub-module of torch's anew, and take one of the user's own as it is handed over; give its name."""
        name, part = _identifier(path), self.module.get_submodule(path)
        if name not in self.made:
            self.made[name] = constructor(part) or name
            self.handed |= {} if constructor(part) else {name: path}
            self.same(name, path)
        return name

    def same(self, name: str, path: str) -> None:
        """Give a part of the equivalent the weights that a sub-module has under the same names."""
        for key in self.module.get_submodule(path).state_dict():
            self.taken.append(f'"{name}.{key}": theirs["{path}.{key}"],')
            self.returned.append(f'theirs["{path}.{key}"].copy_(ours["{name}.{key}"])')

    def converted(self, name: str, path: str, part: Equivalent) -> None:
        """Give a part of the equivalent its weights as the program of a sub-module takes them."""
        taken, returned = (part.source.partition(start)[2].partition(end)[0] for start, end in CONVERTED)
        for lines, kept in ((taken, self.taken), (returned, self.returned)):
            named = lines.replace('theirs["', f'theirs["{path}.').replace('ours["', f'ours["{name}.').splitlines()
            kept += [re.sub('^"', f'"{name}.', line.strip()) for line in named]

    # ------------------------------------------------------------------------------------------- the text
    def source(self, result: Text, before: str = "", after: str = "") -> str:
        """Write it down; before and after are what is done to its argument first, as ".mT", and to the result."""
        first = [f"{self.argument} = {self.argument}{before}"] if before else []
        if self.is_function and self.made:
            raise UnreadError("a function that holds weights cannot be written down")
        result = result if self.is_function else self._as_a_chain(result)
        lines = [*first, *self.lines, f"return {bracketed(result) if after else result}{after}"]
        return self.program(self._function(lines) if self.is_function else self._class(lines))

    def program(self, body: str) -> str:
        """Write what it needs around the class, or the function."""
        if not self.is_function:
            taken = "".join(f"        {line}\n" for line in self.taken)
            returned = "".join(f"    {line}\n" for line in (*self.returned, *self._tied()))
            body += CONVERSION.format(target=self.target, taken=taken, returned=returned)
        imports = ["import torch"] if re.search(r"\btorch\.[a-z]", body) else []
        imports = ["from typing import Any", "", *imports] if re.search(r"\bAny\b", body) else imports
        imports += ["from torch import Tensor" + (", nn" if "nn." in body else "")]
        imports += ["from torch.nn import functional as F"] if re.search(r"\bF\.", body) else []
        imports += ["", *dict.fromkeys(self.imports)] if self.imports else []
        return HEAD.format(target=self.target, sizes=self.sizes, imports="\n".join(imports)) + body

    def _function(self, lines: Sequence[str]) -> str:
        body = "\n".join(f"    {line}" for line in lines)
        asked = [one for one in re.split(r", (?=\*?\*?\w+: |\*,)", self.signature) if _is_used(one, body)]
        arguments = ", ".join(asked[:-1] if asked[-1:] == ["*"] else asked)
        kind = "tuple[Tensor, ...]" if "," in outside_of_brackets(lines[-1]) else "Tensor"
        return f'def equivalent({arguments}) -> {kind}:\n    """{self.sentence}"""\n{body}\n'

    def _as_a_chain(self, result: Text) -> Text:
        """Write modules that follow one another as nn.Sequential."""
        if self.torchs or result.chain is None or not self.made:
            return result
        self.torchs = f"nn.Sequential({', '.join(self.made.get(one, one) for one in result.chain)})"
        for place, name in enumerate(result.chain):
            self.taken = [line.replace(f'"{name}.', f'"{place}.', 1) for line in self.taken]
            self.returned = [line.replace(f'ours["{name}.', f'ours["{place}.') for line in self.returned]
        self.made = {}
        return Text(f"super().forward({self.argument})", self)

    def _class(self, forward: Sequence[str]) -> str:
        base, _, options = self.torchs.partition("(")
        lines = [f"class Equivalent({base or 'nn.Module'}):", f'    """{self.sentence}"""']
        given = "".join(f", {name}: nn.Module" for name in self.handed)
        if self.torchs or self.made:
            lines += ["", f"    def __init__(self{given}) -> None:"]
            lines += [f"        super().__init__({options}" if self.torchs else "        super().__init__()"]
            lines += [f"        self.{name} = {made}" for name, made in self.made.items()]
        if [*forward] != ["return super().forward(input)"]:
            ignore = "  # type: ignore[override]" if self.torchs else ""
            lines += ["", f"    def forward(self, {self.signature}) -> Tensor:{ignore}"]
            lines += [f"        {line}" for line in forward]
        return "\n".join(lines) + "\n"


def _is_used(argument: str, body: str) -> bool:
    """Whether an argument has to be given, or the body takes it: nothing is accepted and ignored."""
    return " = " not in argument or re.search(rf"\b{argument.partition(':')[0]}\b", body) is not None


def signature_of(function: Callable[..., Any], kinds: Mapping[str, str] | None = None) -> str:
    """Write the arguments of a function, each with what it takes by default; kinds are the types of some, by name.

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
