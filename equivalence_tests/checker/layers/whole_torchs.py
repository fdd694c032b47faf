"""Write a layer that is wired as torch's own as that: nn.TransformerEncoderLayer or nn.TransformerDecoderLayer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from equivalence_tests.checker.engine.watching import Recorder
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.layers.masks import Mask
from equivalence_tests.checker.layers.whole_values import Labels, Made
from equivalence_tests.checker.reporting.equivalents import Equivalent

TEXT = '''"""The same as {target}, in torch's own layer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Equivalent(nn.{kind}):
    def __init__(self) -> None:
        super().__init__({options})

    def forward(self, {signature}) -> Tensor:  # type: ignore[override]
{body}


# The names of torch's weights, and of theirs.
NAMES = {{
{names}
}}


def from_theirs(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn a state_dict of {target} into one of torch's layer."""
    ours = {{name: theirs[own] for name, own in NAMES.items()}}
{taken}    return ours


def to_theirs(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put the weights of torch's layer into a copy of a state_dict of theirs."""
    theirs = {{name: x.clone() for name, x in theirs.items()}}
    theirs.update({{own: ours[name] for name, own in NAMES.items()}})
{returned}    return theirs
{conversions}'''
TAKEN = """\
    inside = {{name.removeprefix("{path}."): x for name, x in theirs.items() if name.startswith("{path}.")}}
    ours.update({{"{place}." + name: x for name, x in {place}_from_theirs(inside).items()}})
"""
RETURNED = """\
    inside = {{name.removeprefix("{place}."): x for name, x in ours.items() if name.startswith("{place}.")}}
    own = {{name.removeprefix("{path}."): x for name, x in theirs.items() if name.startswith("{path}.")}}
    theirs.update({{"{path}." + name: x for name, x in {place}_to_theirs(inside, own).items()}})
"""
PLACES = ("self_attn", "multihead_attn")
BUILT = re.compile(r"super\(\).__init__\((\d+), (\d+)(?:, (?:batch_first=True|dropout=[\d.]+|bias=False))*\)")
HIDDEN = {  # True = may not look
    "look": "~{}", "block": "{}", "look_float": "{} == 0", "look_int": "{} == 0", "block_float": "{} != 0",
    "block_int": "{} != 0", "additive": "{}",
}  # fmt: skip
OF_QUERIES = {
    "(query, key)": "{}", "(1, query, key)": "{}[0]", "(1, 1, query, key)": "{}[0, 0]",
    "(batch, query, key)": "{}.repeat_interleave({heads}, 0)", "(batch * heads, query, key)": "{}",
    "(batch, heads, query, key)": "{}.flatten(0, 1)",
    "(batch, 1, query, key)": "{}[:, 0].repeat_interleave({heads}, 0)",
}  # fmt: skip
OF_KEYS = {"(batch, key)": "{}", "(batch, 1, key)": "{}[:, 0]", "(batch, 1, 1, key)": "{}[:, 0, 0]"}
ACTIVATIONS = ("relu", "gelu")


@dataclass(frozen=True)
class TorchsLayer:
    """Writes a layer as torch's own, as far as its parts allow; whether it is equal is for a comparison to say.

    Args:
        module: The layer.
        recorder: A run of it.
        labels: What its parts made in that run.
        parts: The equivalents of its attentions, by path.
        masks: Those that it takes.
        batch: How many samples the run had.
    """

    module: nn.Module
    recorder: Recorder
    labels: Labels
    parts: Mapping[str, Equivalent]
    masks: Sequence[Mask]
    batch: int

    def source(self, target: str) -> tuple[str, str]:
        """Write the program, and torch's layer alone.

        Args:
            target: What the code that was checked is called.

        Raises:
            UnreadError: If its parts are not those of torch's layer.
        """
        attentions = [made for _, made in self.labels.of_kind("attention")]
        if len(self.recorder.calls[0].outputs) != 1 or not 0 < len(attentions) < 3:
            raise UnreadError("it is not built as torch's layers are")
        kind = ("TransformerEncoderLayer", "TransformerDecoderLayer")[len(attentions) - 1]
        paths = dict(zip(PLACES, (made.words for made in attentions), strict=False))
        converted = {place: path for place, path in paths.items() if not self._is_torchs(path)}
        options = self._options(attentions)
        text = TEXT.format(
            target=target,
            kind=kind,
            options=options,
            signature=", ".join(self._signature()),
            body=f"        return super().forward({', '.join(self._arguments(len(attentions)))})",
            names="\n".join(f'    "{ours}": "{theirs}",' for ours, theirs in self._names(paths)),
            taken="".join(TAKEN.format(place=place, path=path) for place, path in converted.items()),
            returned="".join(RETURNED.format(place=place, path=path) for place, path in converted.items()),
            conversions="".join(self._conversion(*one) for one in converted.items()),
        )
        needless = "" if "F." in options else "from torch.nn import functional as F\n"
        return text.replace(needless, ""), f"nn.{kind}({options})"

    # ------------------------------------------------------------------------------------------- its parts
    def _is_torchs(self, path: str) -> bool:
        """Whether an attention is torch's, with the weights that it has in torch's layers."""
        module = self.module.get_submodule(path)
        if type(module) is not nn.MultiheadAttention:
            return False
        return module.bias_k is None and not module.add_zero_attn and module._qkv_same_embed_dim

    def _heads(self, path: str) -> tuple[int, int]:
        """The width of an attention, and the number of its heads."""
        module = self.module.get_submodule(path)
        if isinstance(module, nn.MultiheadAttention) and self._is_torchs(path):
            return module.embed_dim, module.num_heads
        found = BUILT.search(self.parts[path].source) if path in self.parts else None
        if found is None:
            raise UnreadError(f"{path} is not nn.MultiheadAttention")
        return int(found[1]), int(found[2])

    def _matrices(self) -> tuple[str, str]:
        """The two matrices of the feed-forward."""
        inside = [made.words for _, made in self.labels.of_kind("linear", "embedding")]
        for _, made in self.labels.of_kind("feed_forward"):
            held = self.module.get_submodule(made.words).named_modules(prefix=made.words)
            inside += [path for path, child in held if isinstance(child, nn.Linear)]
        paths = dict(self.module.named_modules())
        if len(inside) != 2 or not all(isinstance(paths.get(path), nn.Linear) for path in inside):
            raise UnreadError("its feed-forward has not two matrices")
        return inside[0], inside[1]

    def _norms(self, count: int) -> list[str]:
        paths = [made.words for _, made in self.labels.of_kind("layer_norm")]
        if len(paths) != count or not all(type(self.module.get_submodule(path)) is nn.LayerNorm for path in paths):
            raise UnreadError("its norms are not those of torch's layer")
        return paths

    def _names(self, attentions: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Pair the names of torch's weights with the user's, but for those of attentions that are not torch's."""
        norms = {f"norm{i}": path for i, path in enumerate(self._norms(len(attentions) + 1), 1)}
        first, second = self._matrices()
        plain = {place: path for place, path in attentions.items() if self._is_torchs(path)}
        for ours, path in {**plain, "linear1": first, "linear2": second, **norms}.items():
            yield from ((f"{ours}.{name}", f"{path}.{name}") for name in self.module.get_submodule(path).state_dict())

    def _options(self, attentions: Sequence[Made]) -> str:
        """Write how torch's layer is constructed."""
        sizes = {self._heads(made.words) for made in attentions}
        eps = {self.module.get_submodule(path).eps for path in self._norms(len(attentions) + 1)}
        if len(sizes) != 1 or len(eps) != 1:
            raise UnreadError("its parts have not one size and one eps")
        (width, heads), hidden = sizes.pop(), self.module.get_submodule(self._matrices()[0])
        said = [str(width), str(heads), str(hidden.out_features), f"dropout={self._dropout(attentions)!r}"]
        said += self._activation()
        said += [f"layer_norm_eps={one!r}" for one in eps if one != 1e-5]
        first = attentions[0].inputs[0].terms
        said += ["norm_first=True"] if self.labels.made[first[0][0]].kind == "layer_norm" else []
        said += ["batch_first=True"] if self._tokens()[0][1].size(0) == self.batch else []
        said += ["bias=False"] if "bias" not in hidden.state_dict() else []
        return ", ".join(said)

    def _activation(self) -> list[str]:
        acts = [op for op in self.recorder.operations if op.name in ACTIVATIONS]
        if len(acts) != 1 or acts[0].argument(1, "approximate", "none") == "tanh":
            raise UnreadError("its activation is none that torch's layer knows by name")
        return [f"activation=F.{acts[0].name}"] if acts[0].name != "relu" else []

    def _dropout(self, attentions: Sequence[Made]) -> float:
        """The one probability with which all places drop in which torch's layer does."""
        drops = [op.place for op in self.recorder.operations if op.name == "dropout"]
        chances = {m.p for m in self.module.modules() if isinstance(m, nn.Dropout)}
        chances |= {m.dropout for m in self.module.modules() if isinstance(m, nn.MultiheadAttention)}
        outside = [place for place in drops if not any(place.startswith(f"{made.words}.") for made in attentions)]
        inside = {made.words for made in attentions if any(x.startswith(f"{made.words}.") for x in drops)}
        inside |= {
            x.words for x in attentions if getattr(self.module.get_submodule(x.words), "dropout", None) in chances
        }
        if chances <= {0.0}:
            return 0.0
        if len(chances) > 1 or len(outside) != len(attentions) + 2 or len(inside) != len(attentions):
            raise UnreadError("it does not drop where torch's layer does")
        return float(chances.pop())

    def _conversion(self, place: str, path: str) -> str:
        """Write how the weights of an attention are converted."""
        found = self.parts[path].source.partition("\n\n\ndef from_theirs")[2].rstrip("\n")
        text = re.sub(r"\b(from_theirs|to_theirs)\b", rf"{place}_\1", f"\n\ndef from_theirs{found}\n")
        return text.replace("one of Equivalent", f"one of torch's {place}").replace(
            "weights of Equivalent", f"weights of torch's {place}"
        )

    # ------------------------------------------------------------------------------------------- its arguments
    def _given(self) -> dict[str, Tensor]:
        call = self.recorder.calls[0]
        return {name: x for name, x in call.kwargs.items() if isinstance(x, Tensor)}

    def _tokens(self) -> list[tuple[str, Tensor]]:
        """The arguments that hold tokens: what the layer reads, and the memory."""
        masks = {mask.name for mask in self.masks}
        return [(name, x) for name, x in self._given().items() if name not in masks and x.dim() == 3]

    def _signature(self) -> Iterator[str]:
        masks = [mask.name for mask in self.masks]
        yield from (f"{name}: Tensor" for name in self._given() if name not in masks)
        yield from (f"{name}: Tensor | None = None" for name in masks)

    def _arguments(self, attentions: int) -> Iterator[str]:
        """Write what torch's layer is given."""
        names = [name for name, _ in self._tokens()]
        own = next((n for n in names if any(m.words == n for m in self._streams())), "")
        if len(names) != attentions or not own:
            raise UnreadError("it does not take what torch's layer takes")
        yield own
        yield from (name for name in names if name != own)
        for mask in self.masks:
            yield self._mask(mask, attentions)

    def _streams(self) -> Iterator[Made]:
        """What the first attention reads, before its norm."""
        made = next(made for _, made in self.labels.of_kind("attention"))
        while made.kind != "given" and made.inputs:
            made = self.labels.made[made.inputs[0].terms[0][0]]
        yield made

    def _mask(self, mask: Mask, attentions: int) -> str:
        """Write one mask as torch's layer takes it."""
        reads = {site.reads for site in mask.reached}
        if len(reads) != 1 or mask.form is None or mask.form.held or mask.form.encoding not in HIDDEN:
            raise UnreadError(f"{mask.name} is no mask of one attention")
        side = "src" if attentions == 1 else "memory" if reads == {"memory"} else "tgt"
        shapes = OF_KEYS if mask.form.shape in OF_KEYS else OF_QUERIES
        if mask.form.shape not in shapes:
            raise UnreadError(f"torch's layer takes no mask of the shape {mask.form.shape}")
        heads = self._heads(next(made.words for _, made in self.labels.of_kind("attention")))[1]
        hidden = HIDDEN[mask.form.encoding].format(mask.name)
        hidden = f"({hidden})" if hidden != mask.name and shapes[mask.form.shape] != "{}" else hidden
        text = shapes[mask.form.shape].format(hidden, heads=heads)
        text = text if text == mask.name else f"None if {mask.name} is None else {text}"
        return f"{side}_{'key_padding_' if shapes is OF_KEYS else ''}mask={text}"
