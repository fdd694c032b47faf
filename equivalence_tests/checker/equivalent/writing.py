"""Write a program down as Python that runs with torch alone, with the conversion of the weights both ways."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equivalence_tests.checker.equivalent.blocks import index_of
from equivalence_tests.checker.equivalent.conversion import Conversion
from equivalence_tests.checker.equivalent.expressions import (
    Acted,
    Attended,
    Called,
    Cut,
    Expression,
    Given,
    Joined,
    Learnt,
    Mapped,
    Scaled,
    Spread,
    Sum,
    Times,
    all_of,
)
from equivalence_tests.checker.equivalent.operands import Projection, first_alike
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.program import ROUNDING, Program
from equivalence_tests.checker.equivalent.rotation import HeadNorm, Rotation
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.reach.masking import MaskForm

HEAD = '''"""The same as {target}, in torch's own parts{sizes}."""

{imports}
'''
SENTENCE = '"""softmax(query · keyᵀ · scale + what is added) · value, between projections."""'
# From a layout to (batch, tokens, features), and back.
LAYOUTS: Mapping[str, tuple[str, str]] = {
    "b l e": ("", ""),
    "l b e": (".transpose(0, 1)", ".transpose(0, 1)"),
    "l e": ("[None]", "[0]"),
    "b e l": (".mT", ".mT"),
    "b h l d": (".transpose(1, 2).flatten(2)", ""),
    "b l h d": (".flatten(2)", ""),
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
}
HIDES: Mapping[str, str] = {"look": "~{}", "block": "{}", "look_float": "{} == 0", "look_int": "{} == 0"}
HIDES = {**HIDES, "block_float": "{} != 0", "block_int": "{} != 0", "additive": "{} < 0"}


@dataclass(frozen=True)
class Signature:
    """How the code that was checked is called.

    Args:
        target: What it is called.
        arguments: The arguments that hold tokens: the name in a call, and the name in its signature.
        layout: How they are laid out.
        mask: The name of its mask; "" for none.
        form: How that is understood; None where it is not known.
        merged: Whether heads that are handed over come back side by side.
    """

    target: str
    arguments: tuple[tuple[str, str], ...]
    layout: str = "b l e"
    mask: str = ""
    form: MaskForm | None = None
    merged: bool = True


@dataclass
class Writer(Conversion):
    """Writes one program.

    Args:
        program: The program.
        signature: Of the code that was checked.
        parameters: Of the user's module.
        module: The user's module; None for a function.
    """

    program: Program
    signature: Signature
    parameters: Parameters
    module: nn.Module | None
    made: list[str] = field(default_factory=list)  # lines of __init__
    taken: list[str] = field(default_factory=list)  # entries of the converted state_dict
    returned: list[str] = field(default_factory=list)  # lines that put weights back
    handed: dict[str, str] = field(default_factory=dict)  # the paths of the user's own sub-modules, by their names
    named: dict[str, str] = field(default_factory=dict)  # parts that were made already

    def source(self) -> str:
        """Write the module.

        Raises:
            UnreadError: If it is laid out in a way that cannot be written.
        """
        if self.signature.layout not in LAYOUTS:
            raise UnreadError(f"the layout {self.signature.layout} cannot be written down")
        plain = self.program.is_multi_head_attention
        lines = list(self._of_multi_head_attention() if plain else self._of_parts())
        heads, width = self.program.query.weight.shape[:2]
        converted = ["", "", *self._conversion(self.signature.target)] if self.module is not None else []
        written = self._class(plain, lines) if self.module is not None else self._function(lines)
        body = "\n".join([*written, *converted]) + "\n"
        imports = "import torch\n" if re.search(r"\btorch\.[a-z]", body) or self.module is not None else ""
        imports += f"from torch import Tensor{', nn' if self.module is not None else ''}\n"
        imports += "from torch.nn import functional as F\n" if "F." in body else ""
        sizes = "" if self.module is None and heads == 1 else f", for {heads} heads of {width}"
        return HEAD.format(target=self.signature.target, sizes=sizes, imports=imports) + body

    # ------------------------------------------------------------------------------------------- the class
    def _class(self, plain: bool, forward: list[str]) -> Iterator[str]:
        base = "nn.MultiheadAttention" if plain else "nn.Module"
        yield from ("", f"class Equivalent({base}):", f"    {SENTENCE}", "")
        given = "".join(f", {name}: nn.Module" for name in self.handed)
        if self.made or given:
            yield f"    def __init__(self{given}) -> None:"
            yield from (f"        {line}" for line in (self.made if plain else ["super().__init__()", *self.made]))
            yield ""
        ignore = "  # type: ignore[override]" if plain else ""
        yield f"    def forward(self, {self._arguments()}) -> Tensor:{ignore}"
        yield from (f"        {line}" for line in forward)

    def _function(self, lines: list[str]) -> Iterator[str]:
        if self.made or self.handed:
            raise UnreadError("a function that holds weights cannot be written down")
        yield from ("", f"def equivalent({self._arguments()}) -> Tensor:", f"    {SENTENCE}")
        yield from (f"    {line}" for line in lines)

    def _arguments(self) -> str:
        names = [f"{name}: Tensor" for _, name in self.signature.arguments]
        return ", ".join([*names, *([f"{self.signature.mask}: Tensor | None = None"] if self._has_mask else [])])

    @property
    def _has_mask(self) -> bool:
        return bool(self.signature.mask) and self.signature.form is not None

    def _inward(self) -> Iterator[str]:
        turn = LAYOUTS[self.signature.layout][0]
        for _, name in self.signature.arguments if turn else ():
            yield f"{name} = {name}{turn}  # (batch, tokens, features)"

    def _outward(self, expression: str) -> str:
        if self.signature.layout in ("b h l d", "b l h d") and not self.signature.merged:
            heads = self.program.query.weight.size(0)
            back = f"({expression}).unflatten(-1, ({heads}, -1))"
            return f"return {back}" + (".transpose(1, 2)" if self.signature.layout == "b h l d" else "")
        return f"return {expression}{LAYOUTS[self.signature.layout][1]}"

    def _identifier(self, name: str) -> str:
        return dict(self.signature.arguments)[name]

    def _hidden(self) -> str:
        """Write what the mask hides, (batch, heads, query, key) bool, True = may not look."""
        form = self.signature.form
        assert form is not None  # there is a mask
        if form.shape not in MASK_SHAPES or form.held:
            raise UnreadError(f"a mask of the form {form} cannot be written down")
        mask = self.signature.mask + MASK_SHAPES[form.shape].format(heads=self.program.query.weight.size(0))
        return HIDES[form.encoding].format(mask)

    # ------------------------------------------------------------------------------------------- torch's module
    def _of_multi_head_attention(self) -> Iterator[str]:
        program = self.program
        heads, _, features = program.query.weight.shape
        query, key, value = (one.tokens for _, one in program.roles)
        bias = any(bool((one.bias >= 0).any()) for _, one in program.roles if one.bias is not None)
        out = program.output
        assert out.bias is not None  # nn.MultiheadAttention has an output projection
        bias = bias or bool((out.bias >= 0).any())
        said = "" if bias else ", bias=False"
        self.made.append(f"super().__init__({features}, {heads}{said}, batch_first=True)")
        self._three("in_proj_weight", [one.weight.flatten(0, 1) for _, one in program.roles])
        if bias:
            self._three("in_proj_bias", [one.bias.flatten() for _, one in program.roles if one.bias is not None])
        self._convert("out_proj.weight", out.weight)
        if bias:
            self._convert("out_proj.bias", out.bias)
        yield from self._inward()
        yield from self._mask_of_module(heads)
        names = ", ".join(self._identifier(one.name) for one in (query, key, value) if isinstance(one, Given))
        mask = ", attn_mask=hidden" if self._has_mask or program.bias.is_causal else ""
        causal = ", is_causal=True" if program.bias.is_causal and not self._has_mask else ""
        yield self._outward(f"super().forward({names}{mask}{causal}, need_weights=False)[0]")

    def _mask_of_module(self, heads: int) -> Iterator[str]:
        """Write what is hidden, True = may not look, as torch's module takes it."""
        first, second = self._first_names()
        if self.program.bias.is_causal:
            sizes = f"{first}.size(1), {second}.size(1), dtype=torch.bool, device={first}.device"
            yield f"hidden = torch.ones({sizes}).triu(1)  # True = may not look: the future"
        elif self._has_mask:
            yield "hidden = None"
        if self._has_mask:
            text = f"hidden | ({self._hidden()})" if self.program.bias.is_causal else self._hidden()
            sizes = f"{first}.size(0), {heads}, {first}.size(1), {second}.size(1)"
            yield f"if {self.signature.mask} is not None:"
            yield f"    hidden = {text}  # True = may not look"
            yield f"    hidden = hidden.expand({sizes}).flatten(0, 1)"

    def _first_names(self) -> tuple[str, str]:
        names = [
            next((self._identifier(x.name) for x in all_of(one.tokens) if isinstance(x, Given)), "")
            for _, one in self.program.roles[:2]
        ]
        return names[0], names[1]

    def _three(self, name: str, places: list[Tensor]) -> None:
        """Convert what torch packs: the rows of queries, keys and values."""
        if all(bool((one >= 0).all()) for one in places):
            self._convert(name, torch.cat(places))
            return
        self.taken.append(f'"{name}": torch.cat([{", ".join(self._taken(one) for one in places)}]),')
        start = 0
        for one in places:
            self._give_back(one, f'ours["{name}"][{start}:{start + len(one)}]')
            start += len(one)

    # ------------------------------------------------------------------------------------------- parts
    def _of_parts(self) -> Iterator[str]:
        program = self.program
        yield from self._inward()
        for role, one in program.roles:
            yield from self._operand(role, one)
        bias = list(self._score_bias())
        yield from bias
        width = program.query.weight.size(1)
        arguments = ["attn_mask=bias"] if bias else []
        arguments += ["is_causal=True"] if not bias and program.bias.is_causal else []
        arguments += [f"scale={program.scale!r}"] if abs(program.scale * width**0.5 - 1) > ROUNDING else []
        called = ", ".join(["query", "key", "value", *arguments])
        if program.cap or program.mask_replaces:
            raise UnreadError("capped scores, and masks that replace the causal one, are not written down")
        yield f"averaged = F.scaled_dot_product_attention({called})"
        yield "merged = averaged.transpose(1, 2).flatten(2)  # heads side by side"
        yield f"output = {self._projected()}"
        yield self._outward(self._expression(program.output.around))

    def _operand(self, role: str, one: Projection) -> Iterator[str]:
        heads, own, weight, bias = _grouped(one)
        tokens = self._expression(one.tokens)
        if bias is None:
            yield f"{role} = {self._features(tokens, weight)}"
        else:
            self._linear(f"{role}_proj", weight.flatten(0, 1), bias.flatten())
            yield f"{role} = self.{role}_proj({tokens}).unflatten(-1, ({own}, -1)).transpose(1, 2)"
        if one.change.norm is not None:
            yield f"{role} = {self._normed(role, one.change.norm, own, weight.size(1))}"
        if one.change.rotation is not None:
            yield from self._rotated(role, one.change.rotation)
        if abs(one.number - 1) > ROUNDING:
            yield f"{role} = {one.number!r} * {role}"
        if heads is not None:
            yield f"{role} = {role}[:, {heads}]  # which heads share it"

    def _features(self, tokens: str, weight: Tensor) -> str:
        heads, width = weight.shape
        if torch.equal(weight.flatten(), torch.arange(heads * width)):
            wide = width if self.module is not None else -1  # a function takes any
            return f"{tokens}.unflatten(-1, ({heads}, {wide})).transpose(1, 2)"
        return f"{tokens}[..., {weight.flatten().tolist()}].unflatten(-1, ({heads}, {width})).transpose(1, 2)"

    def _normed(self, role: str, norm: HeadNorm, heads: int, width: int) -> str:
        """Normalise each head, or all of a token's heads side by side."""
        if not norm.whole:
            return self._head_norm(role, role, norm, width)
        normed = self._head_norm(role, f"{role}.transpose(1, 2).flatten(2)", norm, heads * width)
        return f"{normed}.unflatten(-1, ({heads}, -1)).transpose(1, 2)"

    def _head_norm(self, role: str, of: str, norm: HeadNorm, width: int) -> str:
        if norm.kind == "normalize":
            gain = f" * self.{self._parameter(norm.gain)}" if norm.gain else ""
            return f"F.normalize({of}, dim=-1, eps={norm.eps!r}){gain}"
        made = "nn.LayerNorm" if norm.kind == "layer_norm" else "nn.RMSNorm"
        name = f"{role}_norm"
        affine = f", elementwise_affine={bool(norm.gain)}" if not norm.gain else ""
        affine += ", bias=False" if norm.kind == "layer_norm" and norm.gain and not norm.bias else ""
        self.made.append(f"self.{name} = {made}({width}, eps={norm.eps!r}{affine})")
        if norm.gain:
            added = "1 + " if norm.added else ""
            self.taken.append(f'"{name}.weight": {added}theirs["{norm.gain}"].flatten(),')
            less = " - 1" if norm.added else ""
            self.returned.append(f'theirs["{norm.gain}"].view(-1).copy_(ours["{name}.weight"]{less})')
        if norm.bias:
            self._convert(f"{name}.bias", self._places(norm.bias))
        return f"self.{name}({of})"

    def _rotated(self, role: str, rotation: Rotation) -> Iterator[str]:
        if rotation.angles is not None:
            raise UnreadError("angles that were seen for one length only cannot be written down")
        steps = f"torch.tensor({rotation.steps.tolist()})"
        if rotation.base:
            steps = f"{rotation.base!r} ** (-torch.arange(0, {rotation.width}, 2) / {rotation.width})"
        first, end = rotation.start, rotation.start + rotation.width
        yield f"positions = torch.arange({role}.size(-2), device={role}.device, dtype={role}.dtype)" + (
            f" + {rotation.first}" if rotation.first else ""
        )
        yield f"angles = positions[:, None] * ({steps}).to(positions)"
        pairs = f"[..., {first}:{end}:2], {role}[..., {first + 1}:{end}:2]"
        halves = f"[..., {first}:{first + rotation.apart}], {role}[..., {first + rotation.apart}:{end}]"
        yield f"first, second = {role}{pairs if rotation.apart == 1 else halves}"
        rotated = "first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()"
        yield f"rotated = {rotated}"
        whole = "torch.stack(rotated, -1).flatten(-2)" if rotation.apart == 1 else "torch.cat(rotated, -1)"
        yield f"{role} = torch.cat([{role}[..., :{first}], {whole}, {role}[..., {end}:]], -1)"

    def _score_bias(self) -> Iterator[str]:
        bias = self.program.bias
        if bias.given is not None or bias.visible.block is not None:
            raise UnreadError("the mask of one call, and windows that tokens are cut into, cannot be written down")
        if not self._has_mask and (bias.is_none or bias.is_causal):
            return
        if bias.is_none:
            yield "bias = None"
            yield f"if {self.signature.mask} is not None:"
            yield f"    bias = ~({self._hidden()})  # True = may look"
            return
        yield "bias = query.new_zeros(1, 1, query.size(-2), key.size(-2))"
        if bias.slopes is not None or not bias.visible.is_everything:
            yield "queries, keys = (torch.arange(x.size(-2), device=x.device) for x in (query, key))"
            from_end = " + key.size(-2) - query.size(-2)" if bias.visible.from_end else ""
            yield f"distance = queries[:, None] - keys{from_end}"
        if bias.slopes is not None:
            yield f"bias = bias - torch.tensor({bias.slopes.tolist()}).to(bias)[:, None, None] * distance.abs()"
        if bias.table is not None:
            yield f"bias = bias + {bias.factor!r} * {self._table(bias.table)}"
        if bias.visible.least is not None:
            yield f"bias = bias.masked_fill(distance < {bias.visible.least}, -torch.inf)"
        if bias.visible.most is not None:
            yield f"bias = bias.masked_fill(distance > {bias.visible.most}, -torch.inf)"
        if self._has_mask:
            yield f"if {self.signature.mask} is not None:"
            yield f"    bias = bias.masked_fill({self._hidden()}, -torch.inf)"

    def _table(self, places: Tensor) -> str:
        name = self.parameters.name_at(int(places.max()))
        index = (places - self.parameters.start[name]).clamp_min(0)
        return f"self.{self._parameter(name)}.flatten()[{index_of(index)}]"

    def _projected(self) -> str:
        output = self.program.output
        factor = f"{output.factor!r} * " if abs(output.factor - 1) > ROUNDING else ""
        if output.bias is None:
            plain = torch.equal(output.weight, torch.arange(len(output.weight)))
            return f"{factor}merged" + ("" if plain else f"[..., {output.weight.tolist()}]")
        self._linear("out_proj", output.weight, output.bias)
        return f"{factor}self.out_proj(merged)"

    # ------------------------------------------------------------------------------------------- expressions
    def _expression(self, one: Expression) -> str:
        if isinstance(one, Given):
            return self._identifier(one.name)
        if isinstance(one, Attended):
            return "output"
        if isinstance(one, Learnt):
            first = next(name for _, name in self.signature.arguments)
            rows = f"[..., :{first}.size(1), :]" if one.rows else ""
            return f"self.{self._parameter(one.name)}{rows}"
        if isinstance(one, Called):
            transpose = ".mT" if one.transposed else ""
            laid, back = (f".unflatten(-1, {one.grid})", ".flatten(2)") if one.grid else ("", "")
            given = ", ".join(self._expression(x) + transpose + laid for x in one.inner)
            given += "".join(f", {name}={x!r}" for name, x in one.numbers)
            return f"self.{self._sub_module(one.path)}({given}){back}{transpose}"
        if isinstance(one, Mapped):
            transpose = ".mT" if one.transposed else ""
            return f"({self._expression(one.inner)} @ self.{self._parameter(one.name)}{transpose})"
        if isinstance(one, Joined):
            samples = f"{self._identifier(self.signature.arguments[0][0])}.size(0)"
            spread = (f".expand({samples}, -1, -1)" if isinstance(x, Learnt) else "" for x in one.inner)
            parts = (self._expression(x) + more for x, more in zip(one.inner, spread, strict=True))
            return f"torch.cat([{', '.join(parts)}], 1)"
        if isinstance(one, Spread):
            return f"{self._expression(one.inner)}.repeat_interleave({one.count}, -1)"
        if isinstance(one, Cut):
            return f"{self._expression(one.inner)}.narrow({one.axis}, {one.start}, {one.count})"
        if isinstance(one, Sum | Times):
            sign = "+" if isinstance(one, Sum) else "*"
            return f"({self._expression(one.first)} {sign} {self._expression(one.second)})"
        if isinstance(one, Scaled):
            return f"{one.factor!r} * {self._expression(one.inner)}"
        assert isinstance(one, Acted)  # the last kind
        package = "torch" if one.name in ("sigmoid", "tanh", "relu") else "F"
        return f"{package}.{one.name}({self._expression(one.inner)})"

    def _sub_module(self, path: str) -> str:
        """Make a sub-module of torch anew; one of the user's own is handed over."""
        if path in self.named:
            return self.named[path]
        assert self.module is not None  # it has a path in one
        part, name = self.module.get_submodule(path), path.replace(".", "_")
        self.named[path] = name
        of_torch = type(part).__module__.startswith("torch.nn") and next(part.children(), None) is None
        self.made.append(f"self.{name} = nn.{part!r}" if of_torch else f"self.{name} = {name}")
        if not of_torch:
            self.handed[name] = path
        for key in part.state_dict():
            self.taken.append(f'"{name}.{key}": theirs["{path}.{key}"],')
            self.returned.append(f'theirs["{path}.{key}"].copy_(ours["{name}.{key}"])')
        return name

    def _parameter(self, path: str) -> str:
        name = path.replace(".", "_")
        if path not in self.named:
            self.named[path] = name
            shape = tuple(self.parameters.named[path].shape)
            self.made.append(f"self.{name} = nn.Parameter(torch.empty({shape}))")
            self.taken.append(f'"{name}": theirs["{path}"],')
            self.returned.append(f'theirs["{path}"].copy_(ours["{name}"])')
        return name

    # ------------------------------------------------------------------------------------------- weights
    def _linear(self, name: str, weight: Tensor, bias: Tensor) -> None:
        said = "" if bool((bias >= 0).any()) else ", bias=False"
        self.made.append(f"self.{name} = nn.Linear({weight.size(1)}, {weight.size(0)}{said})")
        self._convert(f"{name}.weight", weight)
        if not said:
            self._convert(f"{name}.bias", bias)


def _grouped(one: Projection) -> tuple[str | None, int, Tensor, Tensor | None]:
    """Give which head uses which of those that differ, how many these are, and their weight and bias."""
    first = first_alike(one.weight)
    kept = first.unique()
    if len(kept) == len(first):
        return None, len(first), one.weight, one.bias
    heads = str(torch.searchsorted(kept, first).tolist())
    return heads, len(kept), one.weight[kept], None if one.bias is None else one.bias[kept]
