"""Write the program of an attention down as Python that runs with torch alone: nn.MultiheadAttention if it can be."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.equivalent.biases import Bias, Visible
from equivalence_tests.checker.equivalent.expressions import Expression, Given, Values, all_of, of_kind
from equivalence_tests.checker.equivalent.operands import Projection, Relative, first_alike
from equivalence_tests.checker.equivalent.parameters import Parameters, index_of
from equivalence_tests.checker.equivalent.program import ROUNDING, Program
from equivalence_tests.checker.equivalent.rotation import Rotation
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.equivalent.texts import arguments_text, bracketed
from equivalence_tests.checker.equivalent.writer import LAYOUTS, Signature, Text, Writer
from equivalence_tests.checker.reach.arguments import ROLES
from equivalence_tests.checker.reach.calling import OF_PIXELS, WINDOWS

SENTENCE = "softmax(query · keyᵀ · scale + what is added) · value, between projections."


@dataclass
class _Written(Values):
    """What an expression is written down from: arguments, parameters and sub-modules as text."""

    writer: Writer = field(kw_only=True)

    def learnt(self, name: str) -> Any:
        return self.writer.parameter(name)

    def vector(self, name: str) -> Any:
        return self.writer.parameter(name, (self.parameters.named[name].numel(),))

    def called(self, path: str, given: Sequence[Any], numbers: Mapping[str, float]) -> Any:
        return Text(f"self.{self.writer.sub_module(path)}({arguments_text(given, numbers)})", self.writer)


@dataclass
class AttentionWriter:
    """Writes one program."""

    program: Program
    signature: Signature
    parameters: Parameters
    is_function: bool
    writer: Writer = field(init=False)
    values: Any = field(init=False)

    def __post_init__(self) -> None:
        names = [f"{name}: {kind}" for name, kind in self._kinds.items()]
        names += [f"{name}: Tensor" for name in self.signature.tables]
        names += [f"{self.signature.mask}: Tensor | None = None"] if self._has_mask else []
        target, arguments = self.signature.target, ", ".join(names)
        heads, width = self.program.query.weight.shape[:2]
        sizes = "" if self.is_function and heads == 1 else f", for {heads} heads of {width}"
        module = self.parameters.module
        self.writer = Writer(target, self.parameters, module, arguments, self.is_function, SENTENCE, sizes)
        given: Any = {name: Text(own, self.writer) for name, own in self.signature.arguments}
        output: Any = Text("output", self.writer)
        self.values = _Written(given, self.parameters, output, writer=self.writer)

    def source(self) -> str:
        """Write the module."""
        if self.signature.layout not in LAYOUTS:
            raise UnreadError(f"the layout {self.signature.layout} cannot be written down")
        plain = self.program.is_multi_head_attention
        *self.writer.lines, result = self._of_multi_head_attention() if plain else self._of_parts()
        return self.writer.source(Text(result, self.writer))

    @property
    def _has_mask(self) -> bool:
        return bool(self.signature.mask) and self.signature.form is not None

    @property
    def _kinds(self) -> dict[str, str]:
        """The arguments that hold tokens: "Tensor", or "list[Tensor]" where several lie in one."""
        places = (own.partition("[") for _, own in self.signature.arguments)
        return {name: "list[Tensor]" if inside else "Tensor" for name, inside, _ in places}

    def _inward(self) -> Iterator[str]:
        if self.signature.layout in OF_PIXELS:
            image = next(name for name in self._kinds if name not in self.signature.apart)
            yield f"width = {image}.size({self.signature.layout.split().index('1')})  # of the image"
        if self.signature.layout == WINDOWS:
            yield f"shape = {next(iter(self._kinds))}.shape  # (batch, windows, pixels in each, features)"
        for name, kind in self._kinds.items():
            turn = self.signature.inward(name)
            if not turn:
                continue
            turned = f"{name}{turn}" if kind == "Tensor" else f"[x{turn} for x in {name}]"
            yield f"{name} = {turned}  # (batch, tokens, features)"

    @property
    def _width(self) -> Text | None:
        """How wide the image is that is handed over."""
        return Text("width", self.writer) if self.signature.layout in OF_PIXELS else None

    def _outward(self, expression: Any) -> str:
        """Lay it out as the user's code returns it."""
        layout, back = self.signature.returned, LAYOUTS[self.signature.returned][1]
        if layout in ("b h l d", "b l h d") and not self.signature.merged:
            back = f".unflatten(-1, ({self.program.query.weight.size(0)}, -1))"
            back += ".transpose(1, 2)" if layout == "b h l d" else ""
        return f"{bracketed(expression)}{back}" if back else str(expression)

    def _hidden(self, keys: str = "key.size(-2)") -> str:
        return self.signature.hidden(self.program.query.weight.size(0), keys)

    # ------------------------------------------------------------------------------------------- torch's module
    def _of_multi_head_attention(self) -> Iterator[str]:
        program = self.program
        heads, _, features = program.query.weight.shape
        given = [str(one.tokens(self.values)) for _, one in program.roles]
        weights = [one.weight.flatten(0, 1) for _, one in program.roles]
        biases = [one.bias.flatten() for _, one in program.roles if one.bias is not None]
        out = program.output
        assert out.bias is not None  # nn.MultiheadAttention has an output projection
        biased = any(bool((one >= 0).any()) for one in (*biases, out.bias))
        said = "" if biased else ", bias=False"
        self.writer.torchs = f"nn.MultiheadAttention({features}, {heads}{said}, batch_first=True)"
        self.writer.convert("in_proj_weight", torch.cat(weights))
        if biased:
            self.writer.convert("in_proj_bias", torch.cat(biases))
        self.writer.convert("out_proj.weight", out.weight)
        if biased:
            self.writer.convert("out_proj.bias", out.bias)
        yield from self._inward()
        yield from self._mask_of_module(heads, *given[:2])
        mask = ", attn_mask=hidden" if self._has_mask or program.bias.is_causal else ""
        causal = ", is_causal=True" if program.bias.is_causal and not self._has_mask else ""
        called = f"super().forward({', '.join(given)}{mask}{causal}, need_weights=False)[0]"
        yield self._outward(Text(called, self.writer))

    def _mask_of_module(self, heads: int, first: str, second: str) -> Iterator[str]:
        """Write what is hidden, True = may not look, as torch's module takes it."""
        if self.program.bias.is_causal:
            sizes = f"{first}.size(1), {second}.size(1), dtype=torch.bool, device={first}.device"
            yield f"hidden = torch.ones({sizes}).triu(1)  # True = may not look: the future"
        elif self._has_mask:
            yield "hidden = None"
        if self._has_mask:
            hidden = self._hidden(f"{second}.size(1)")
            text = f"hidden | ({hidden})" if self.program.bias.is_causal else hidden
            sizes = f"{first}.size(0), {heads}, {first}.size(1), {second}.size(1)"
            yield f"if {self.signature.mask} is not None:"
            yield f"    hidden = {text}  # True = may not look"
            yield f"    hidden = hidden.expand({sizes}).flatten(0, 1)"

    # ------------------------------------------------------------------------------------------- parts
    def _of_parts(self) -> Iterator[str]:
        program = self.program
        if program.mask_replaces:
            raise UnreadError("masks that replace the causal one are not written down")
        yield from self._inward()
        yield from self._kept_tokens()
        for role, one in program.roles:
            yield from self._operand(role, one)
        if program.gain is not None:
            yield f"query = query * {bracketed(program.gain(self.values))}.reshape(-1, 1, 1)  # a number for each head"
        bias = list(self._score_bias())
        yield from bias
        yield from self._averaged_by_hand(bool(bias)) if self._is_by_hand else self._averaged(bool(bias))
        yield "merged = averaged.transpose(1, 2).flatten(2)  # heads side by side"
        yield f"output = {self._projected()}"
        yield self._outward(program.output.around(self.values))

    @property
    def _scale(self) -> float:
        """What the scores are multiplied by, wherever the user's code does it, without the last digit's rounding."""
        return float(f"{self.program.scale_of_scores:.15g}")

    @property
    def _is_by_hand(self) -> bool:
        """Whether something stands between scores and weights that torch's own function does not have."""
        return bool(self.program.cap) or self.program.sink is not None or any(self.program.mixes)

    def _averaged_by_hand(self, biased: bool) -> Iterator[str]:
        program = self.program
        yield f"scores = {self._scale!r} * query @ key.transpose(-2, -1)"
        if program.cap:
            yield f"scores = {program.cap!r} * torch.tanh(scores / {program.cap!r})"
        yield from self._mixed("scores", program.mixes[0])
        if biased:
            yield "scores = scores + bias"
        if program.sink is not None:
            sink = f"{bracketed(program.sink(self.values))}.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)"
            yield f"scores = torch.cat([scores, {sink}], -1)"
        weights = f"scores.softmax(-1){'' if program.sink is None else '[..., :-1]'}"
        if program.mixes[1] is not None:
            yield f"weights = {weights}"
            yield from self._mixed("weights", program.mixes[1])
        yield f"averaged = {weights if program.mixes[1] is None else 'weights'} @ value"

    def _mixed(self, name: str, mix: Expression | None) -> Iterator[str]:
        if mix is not None:
            given: Any = Text(name, self.writer)
            yield f"{name} = {mix(replace(self.values, output=given))}  # the heads, with one another"

    def _averaged(self, biased: bool) -> Iterator[str]:
        width = self.program.query.weight.size(1)
        arguments = ["attn_mask=bias"] if biased else []
        arguments += ["is_causal=True"] if not biased and self.program.bias.is_causal else []
        arguments += [f"scale={self._scale!r}"] if abs(self._scale * width**0.5 - 1) > ROUNDING else []
        called = ", ".join(["query", "key", "value", *arguments])
        yield f"averaged = F.scaled_dot_product_attention({called})"

    def _kept_tokens(self) -> Iterator[str]:
        """Give the tokens another name that are asked for again after something else has theirs."""
        uses = [(one.tokens, role) for role, one in self.program.roles] + [(self.program.output.around, "")]
        for name, own in self.signature.arguments:
            again = any(Given(name) in all_of(x) for x, role in uses if role != own)
            if again and own in (*ROLES, "averaged", "merged", "output"):
                self.values.given[name] = Text(f"{own}_tokens", self.writer)
                yield f"{own}_tokens = {own}"

    def _operand(self, role: str, one: Projection) -> Iterator[str]:
        relative = self.program.bias.relative if role == "query" else None
        one = one if relative is None else relative.split(one)
        heads, own, weight, bias = _grouped(one)
        tokens: Any = one.tokens(self.values)
        if not any(of_kind(Given, one.tokens)):  # learnt, and the same in each sample
            tokens = Text(f"{bracketed(tokens)}.expand(len({self.signature.arguments[0][1]}), -1, -1)", self.writer)
        if bias is None:
            beside = [other.weight for _, other in self.program.roles if other.tokens == one.tokens]
            packed = not all(torch.equal(one.weight, other) for other in beside)
            yield f"{role} = {self._features(bracketed(tokens), weight, packed)}"
        else:
            self.writer.linear(f"{role}_proj", weight.flatten(0, 1), bias.flatten())
            yield f"{role} = self.{role}_proj({tokens}).unflatten(-1, ({own}, -1)).transpose(1, 2)"
        if relative is not None:
            yield f"met = {role}{self._plus(relative.query.more)}  # what meets the distances"
        if one.more is not None:
            yield f"{role} = {role}{self._plus(one.more)}"
        if one.change.norm is not None:
            yield f"{role} = {one.change.norm(Text(role, self.writer), self.values)}"
        if one.change.rotation is not None:
            yield from self._rotated(role, one.change.rotation)
        if role == "value" and abs(one.number - 1) > ROUNDING:  # those of query and key are in the scale
            yield f"value = {one.number!r} * value"
        if heads is not None:
            yield f"{role} = {role}[:, {heads}]  # which heads share it"

    def _plus(self, places: Tensor | None) -> str:
        """Write that a vector of each head is added; "" for none."""
        if places is None:
            return ""
        (name,), (heads, width) = self.parameters.names_at(places), places.shape
        if not torch.equal(places.flatten(), torch.arange(places.numel()) + self.parameters.start[name]):
            raise UnreadError("a vector of each head that lies in another order cannot be written down")
        return f" + {self.writer.parameter(name)}.reshape({heads}, 1, {width})"

    def _features(self, tokens: str, weight: Tensor, packed: bool) -> str:
        """Take some features of the tokens, which may be packed with those of the other operands, apart into heads."""
        heads, width = weight.shape
        first = int(weight.flatten()[0])
        if torch.equal(weight.flatten(), first + torch.arange(heads * width)) and (packed or first == 0):
            tokens = f"{tokens}[..., {first}:{first + heads * width}]" if packed else tokens
            wide = -1 if self.is_function else width  # a function takes any
            return f"{tokens}.unflatten(-1, ({heads}, {wide})).transpose(1, 2)"
        return f"{tokens}[..., {weight.flatten().tolist()}].unflatten(-1, ({heads}, {width})).transpose(1, 2)"

    def _rotated(self, role: str, rotation: Rotation) -> Iterator[str]:
        if rotation.angles is not None:
            raise UnreadError("angles that were seen for one length only cannot be written down")
        if rotation.whole:
            heads = getattr(self.program, role).weight.size(0)
            yield f"{role} = {role}.transpose(1, 2).flatten(2)  # all heads side by side"
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
        if rotation.whole:
            yield f"{role} = {role}.unflatten(-1, ({heads}, -1)).transpose(1, 2)"

    def _score_bias(self) -> Iterator[str]:
        bias = self.program.bias
        if bias.given is not None:
            raise UnreadError("the mask of one call cannot be written down")
        if not self._has_mask and (bias.is_none or (bias.is_causal and not self._is_by_hand)):
            return
        if bias.is_none and not self._is_by_hand:
            yield "bias = None"
            yield f"if {self.signature.mask} is not None:"
            yield f"    bias = ~({self._hidden()})  # True = may look"
            return
        yield "bias = query.new_zeros(1, 1, query.size(-2), key.size(-2))"
        yield from self._distances(bias)
        yield from self._added(bias)
        yield from self._hiding(bias.visible)

    def _distances(self, bias: Bias) -> Iterator[str]:
        """Write the distances of keys from queries, where something is made of them."""
        visible = bias.visible
        if bias.grid is not None:
            places = f"torch.cartesian_prod(torch.arange({bias.grid.rows}), torch.arange({bias.grid.columns})).to(bias)"
            yield f"places = {places}"
            apart, before = "torch.cdist(places, places)", bias.grid.first
            yield f"distance = {f'F.pad({apart}, ({before}, 0, {before}, 0))' if before else apart}"
        elif bias.slopes is not None or bias.relative is not None or not visible.is_everything:
            yield "queries, keys = (torch.arange(x.size(-2), device=x.device) for x in (query, key))"
            from_end = " + key.size(-2) - query.size(-2)" if visible.from_end else ""
            yield from [f"distance = queries[:, None] - keys{from_end}"] * (visible.windows is None)

    def _added(self, bias: Bias) -> Iterator[str]:
        """Write what is added: slopes, what is learnt, relative positions."""
        if bias.slopes is not None:
            yield f"bias = bias - torch.tensor({bias.slopes.tolist()}).to(bias)[:, None, None] * distance.abs()"
        if bias.learnt is not None:
            learnt = self._learnt(bias.learnt, "reshape(-1, {width})" if bias.meets else "flatten()")
            if bias.meets:
                yield f"met = {learnt}  # a vector for each query and key"
                learnt = "torch.einsum('bhqd,hqkd->bhqk', query, met)"
            yield f"bias = bias + {bias.factor!r} * {learnt}"
        if bias.relative is not None:
            yield from self._relative(bias.relative)

    def _hiding(self, visible: Visible) -> Iterator[str]:
        """Write what is hidden: outside of a window, by the distance, and by a mask that is handed over."""
        if visible.windows is not None:
            queries, keys = (visible.windows.of(Text(x, self.writer), self._width) for x in ("queries", "keys"))
            yield f"bias = bias.masked_fill(({queries})[:, None] != {keys}, -torch.inf)  # not in its window"
        if visible.not_own:
            yield "bias = bias.masked_fill(distance == 0, -torch.inf)"
        if visible.least is not None:
            yield f"bias = bias.masked_fill(distance < {visible.least}, -torch.inf)"
        if visible.most is not None:
            yield f"bias = bias.masked_fill(distance > {visible.most}, -torch.inf)"
        if self._has_mask:
            yield f"if {self.signature.mask} is not None:"
            yield f"    bias = bias.masked_fill({self._hidden()}, -torch.inf)"

    def _relative(self, relative: Relative) -> Iterator[str]:
        """Write what queries say to the distance of a key."""
        heads, width, _ = relative.weight.shape
        self.writer.linear(
            "relative_proj", relative.weight.flatten(0, 1), None if relative.bias is None else relative.bias.flatten()
        )
        row = "[None]" if relative.of_pairs else f"[:, key.size(-2) - 1 {'-' if relative.backwards else '+'} distance]"
        yield f"vectors = self.relative_proj({relative.table}{row})  # (batch or 1, query, key, features)"
        each = f"vectors.unflatten(-1, ({heads}, {width}))"
        yield f"bias = bias + {relative.factor!r} * torch.einsum('bhqd,bqkhd->bhqk', met, {each})"

    def _learnt(self, places: Tensor, laid: str) -> str:
        if self.program.bias.rows is not None:
            raise UnreadError("vectors that other queries meet cannot be written down")
        name, width = self.parameters.name_at(int(places.max())), places.size(-1)
        index = (places - self.parameters.start[name]).clamp_min(0)
        first = index[..., :1] // width
        if not torch.equal(index, torch.where(places < 0, 0, first * width + torch.arange(width))):
            raise UnreadError("vectors that lie across a table cannot be written down")
        windows, rows = self.program.bias.visible.windows, torch.where(places < 0, -1, first)[..., 0]
        row = index_of(rows) if windows is None else index_of(rows, windows.image, str(self._width or ""))
        return f"{self.writer.parameter(name)}.{laid.format(width=width)}[{row}]"

    def _projected(self) -> str:
        output = self.program.output
        factor = f"{output.factor!r} * " if abs(output.factor - 1) > ROUNDING else ""
        if output.bias is None:
            plain = torch.equal(output.weight, torch.arange(len(output.weight)))
            return f"{factor}merged" + ("" if plain else f"[..., {output.weight.tolist()}]")
        self.writer.linear("out_proj", output.weight, output.bias)
        return f"{factor}self.out_proj(merged)"


def _grouped(one: Projection) -> tuple[str | None, int, Tensor, Tensor | None]:
    """Give which head uses which of those that differ, how many these are, and their weight and bias."""
    first = first_alike(one.weight)
    kept = first.unique()
    if len(kept) == len(first):
        return None, len(first), one.weight, one.bias
    heads = str(torch.searchsorted(kept, first).tolist())
    return heads, len(kept), one.weight[kept], None if one.bias is None else one.bias[kept]
