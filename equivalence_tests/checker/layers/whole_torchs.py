"""Write a layer that is wired as torch's own as that: nn.TransformerEncoderLayer or nn.TransformerDecoderLayer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.watching import Recorder
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.equivalent.texts import called_with
from equivalence_tests.checker.equivalent.writer import HIDES, Text, Writer
from equivalence_tests.checker.layers.masks import Mask
from equivalence_tests.checker.layers.whole_values import Labels, Made
from equivalence_tests.checker.reporting.equivalents import Equivalent

PLACES = ("self_attn", "multihead_attn")
BUILT = re.compile(r"super\(\).__init__\((\d+), (\d+)(?:, (?:batch_first=True|dropout=[\d.]+|bias=False))*\)")
HIDDEN = {**HIDES, "additive": "{}"}  # True = may not look
OF_QUERIES = {
    "(query, key)": "{}", "(1, query, key)": "{}[0]", "(1, 1, query, key)": "{}[0, 0]",
    "(batch, query, key)": "{}.repeat_interleave({heads}, 0)", "(batch * heads, query, key)": "{}",
    "(batch, heads, query, key)": "{}.flatten(0, 1)",
    "(batch, 1, query, key)": "{}[:, 0].repeat_interleave({heads}, 0)",
}  # fmt: skip
OF_KEYS = {"(batch, key)": "{}", "(batch, 1, key)": "{}[:, 0]", "(batch, 1, 1, key)": "{}[:, 0, 0]"}
ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}


@dataclass(frozen=True)
class TorchsLayer:
    """Writes a layer as torch's own, as far as its parts allow; whether it is equal is for a comparison to say."""

    module: nn.Module
    recorder: Recorder
    labels: Labels  # what its parts made in that run
    parts: Mapping[str, Equivalent]  # the equivalents of its attentions, by path
    masks: Sequence[Mask]  # those that it takes
    batch: int  # how many samples the run had

    @cached_property
    def attentions(self) -> list[Made]:
        """The attentions, in the order in which they run."""
        return [made for _, made in self.labels.of_kind("attention")]

    def source(self, target: str) -> tuple[str, str]:
        """Write the program, and torch's layer alone; UnreadError if its parts are not those of torch's layer."""
        if len(self.recorder.calls[0].outputs) != 1 or not 0 < len(self.attentions) < 3:
            raise UnreadError("it is not built as torch's layers are")
        writer = Writer(target, Parameters.of(self.module), self.module, ", ".join(self._signature()))
        writer.torchs = self._constructor()
        first, second = self._matrices()
        norms = {f"norm{i}": path for i, path in enumerate(self._norms(), 1)}
        inside = dict(zip(PLACES, (made.words for made in self.attentions), strict=False))
        for name, path in {**inside, "linear1": first, "linear2": second, **norms}.items():
            if name in inside and not self._is_torchs(path):
                writer.converted(name, path, self.parts[path])
            else:
                writer.same(name, path)
        given = ", ".join(self._arguments())
        return writer.source(Text(f"super().forward({given})", writer)), writer.torchs

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
            raise UnreadError("its feed-forward does not have two matrices")
        return inside[0], inside[1]

    def _norms(self) -> list[str]:
        paths = [made.words for _, made in self.labels.of_kind("layer_norm")]
        if len(paths) != len(self.attentions) + 1 or not all(
            type(self.module.get_submodule(path)) is nn.LayerNorm for path in paths
        ):
            raise UnreadError("its norms are not those of torch's layer")
        return paths

    def _constructor(self) -> str:
        """Write how torch's layer is constructed."""
        sizes = {self._heads(made.words) for made in self.attentions}
        eps = {self.module.get_submodule(path).eps for path in self._norms()}
        if len(sizes) != 1 or len(eps) != 1:
            raise UnreadError("its parts do not share one size and one eps")
        hidden, first = self.module.get_submodule(self._matrices()[0]), self.attentions[0].inputs[0].terms
        assert isinstance(hidden, nn.Linear)  # they are
        return called_with(
            (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)[len(self.attentions) - 1],
            *(*sizes.pop(), hidden.out_features),
            dropout=self._dropout(),
            activation=self._activation(),
            layer_norm_eps=eps.pop(),
            norm_first=self.labels.made[first[0][0]].kind == "layer_norm",
            batch_first=self._tokens()[0][1].size(0) == self.batch,
            bias="bias" in hidden.state_dict(),
        )

    def _activation(self) -> Any:
        acts = [op for op in self.recorder.operations if op.name in ACTIVATIONS]
        if len(acts) != 1 or acts[0].argument(1, "approximate", "none") == "tanh":
            raise UnreadError("its activation is not one that torch's layer knows by name")
        return ACTIVATIONS[acts[0].name]

    def _dropout(self) -> float:
        """The one probability with which all places drop in which torch's layer does."""
        drops = [op.place for op in self.recorder.operations if op.name == "dropout"]
        chances = {m.p for m in self.module.modules() if isinstance(m, nn.Dropout)}
        chances |= {m.dropout for m in self.module.modules() if isinstance(m, nn.MultiheadAttention)}
        outside = [place for place in drops if not any(place.startswith(f"{made.words}.") for made in self.attentions)]
        inside = {made.words for made in self.attentions if any(x.startswith(f"{made.words}.") for x in drops)}
        inside |= {
            x.words for x in self.attentions if getattr(self.module.get_submodule(x.words), "dropout", None) in chances
        }
        if chances <= {0.0}:
            return 0.0
        if len(chances) > 1 or len(outside) != len(self.attentions) + 2 or len(inside) != len(self.attentions):
            raise UnreadError("it does not drop where torch's layer does")
        return float(chances.pop())

    # ------------------------------------------------------------------------------------------- its arguments
    def _tokens(self) -> list[tuple[str, Tensor]]:
        """The arguments that hold tokens: what the layer reads, and the memory."""
        masks, given = {mask.name for mask in self.masks}, self.recorder.calls[0].kwargs
        return [(n, x) for n, x in given.items() if isinstance(x, Tensor) and n not in masks and x.dim() == 3]

    def _signature(self) -> Iterator[str]:
        masks, given = [mask.name for mask in self.masks], self.recorder.calls[0].kwargs
        yield from (f"{name}: Tensor" for name, x in given.items() if isinstance(x, Tensor) and name not in masks)
        yield from (f"{name}: Tensor | None = None" for name in masks)

    def _arguments(self) -> Iterator[str]:
        """Write what torch's layer is given: what the first attention reads, before its norm, then the memory."""
        names, made = [name for name, _ in self._tokens()], self.attentions[0]
        while made.kind != "given" and made.inputs:
            made = self.labels.made[made.inputs[0].terms[0][0]]
        if len(names) != len(self.attentions) or made.words not in names:
            raise UnreadError("it does not take what torch's layer takes")
        yield from sorted(names, key=lambda name: name != made.words)
        yield from map(self._mask, self.masks)

    def _mask(self, mask: Mask) -> str:
        """Write one mask as torch's layer takes it."""
        reads = {site.reads for site in mask.reached}
        if len(reads) != 1 or mask.form is None or mask.form.held or mask.form.encoding not in HIDDEN:
            raise UnreadError(f"{mask.name} is not the mask of a single attention")
        side = "src" if len(self.attentions) == 1 else "memory" if reads == {"memory"} else "tgt"
        shapes = OF_KEYS if mask.form.shape in OF_KEYS else OF_QUERIES
        if mask.form.shape not in shapes:
            raise UnreadError(f"torch's layer takes no mask of the shape {mask.form.shape}")
        heads = self._heads(self.attentions[0].words)[1]
        hidden = HIDDEN[mask.form.encoding].format(mask.name)
        hidden = f"({hidden})" if hidden != mask.name and shapes[mask.form.shape] != "{}" else hidden
        text = shapes[mask.form.shape].format(hidden, heads=heads)
        text = text if text == mask.name else f"None if {mask.name} is None else {text}"
        return f"{side}_{'key_padding_' if shapes is OF_KEYS else ''}mask={text}"
