"""Follow what the parts of a run are given and what they give, as sums of what came before."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.watching import ModuleCall, Recorder
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.layers.whole_beside import Conditions, Hidden, Series
from equivalence_tests.checker.layers.whole_sums import Sums
from equivalence_tests.checker.layers.whole_values import (
    CHANNELS,
    Labels,
    Terms,
    Value,
    adds_what_it_takes,
    are_pixels,
    are_positions,
    are_tokens,
    kind_in,
    lies_in_order,
    lies_whole,
    made_places,
    places_of,
    places_of_channels,
    queries_first,
    relaid,
)
from equivalence_tests.checker.reach.arguments import role_of_parameter
from equivalence_tests.checker.reach.calling import IMAGE, PIXELS
from equivalence_tests.checker.reporting.lines import Frames

OF_POSITIONS = "positional_encoding"
IN_ORDER = ("attention", "feed_forward", "layer_norm", "layer", "linear")


@dataclass(eq=False)
class Parts:
    """Follows what the parts of one run are given, and what they give."""

    module: nn.Module
    recorder: Recorder  # the run
    kinds: Mapping[str, str]  # what each part is, by its path; "layer" for one that adds its own residual
    hides: Mapping[str, Tensor | None]  # the arguments that are masks, as in ``Hidden``
    layout: str = ""  # of the tokens that are given, where it is known
    labels: Labels = field(default_factory=Labels)
    values: dict[int, Value] = field(default_factory=dict)
    # Parameters, and which elements; None for all of them, as those of a large model take room.
    learnt: dict[int, tuple[str, Tensor | None]] = field(default_factory=dict)
    conditions: Conditions = field(default_factory=Conditions)
    added: set[str] = field(default_factory=set)  # the arguments that hold positions
    series: Series | None = None  # what is normalised by itself
    sums: Sums = field(init=False)
    hidden: Hidden = field(init=False)
    paths: set[str] = field(init=False)
    returned: Terms = ()  # what comes back
    calls: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # labels by the part that made them

    def __post_init__(self) -> None:
        self.paths = {path for path, _ in self.module.named_modules()}
        self.sums, self.hidden = Sums(self.labels, self.paths, type(self.module).__name__), Hidden(self.hides)

    def given(self, name: str, x: Tensor) -> None:
        """Follow a tensor from here on, unless it is a mask or angles; two of one name are one and the same."""
        argument = name.partition("[")[0]
        if are_positions(argument, x, self.recorder.calls[0].inputs):
            self.learnt[id(x)] = argument, None
            self.added.add(argument)
            return
        hidden = self.hidden.given(argument, x) or role_of_parameter(argument) == "angles" or x.dtype == torch.bool
        if hidden or self.conditions.given(argument, x, self.recorder.calls[0].inputs) or x.dim() < 2:
            return
        places = places_of(x.shape) if x.is_floating_point() else places_of(torch.Size((*x.shape, 1)))[..., 0]
        if self.layout == IMAGE and x.dim() == 4:
            places = places_of_channels(x.shape)
        elif x.dim() == 4 and self.layout != PIXELS:  # an image: what convolutions make of it is numbered anew
            places = torch.zeros(x.shape, dtype=torch.long)
        value = Value(((self.labels.add("given", name), 1.0),), places)
        self.values[id(x)] = value
        self.labels.streams.add(value.terms)

    def _called(self, call: ModuleCall) -> None:
        kind, path = kind_in(self.module, call.path, self.kinds).replace(OF_POSITIONS, "positions"), call.path
        inputs = queries_first(self.module.get_submodule(path), call) if kind == "attention" else call.inputs
        data = [self.values[id(x)] for x in inputs if id(x) in self.values]
        attends = kind in ("attention", "layer")
        for x in call.inputs[: kind in IN_ORDER]:
            if id(x) in self.learnt and id(x) not in self.values and are_tokens(self._elements(x), call.outputs[0]):
                data.insert(0, self._learnt_tokens(path, x))  # which ask those that are given
        if not data and self.conditions.follow(call.inputs, call.outputs, path):
            return
        if kind == "embedding":
            self._looked_up(path, call.inputs[0], call.outputs[0])
        elif kind == "positions" and (not data or data[0].is_not_in(call.outputs[0])):
            self._new("table", path, (), call.outputs[:1], torch.zeros(()))
        elif not data:
            raise UnreadError(f"{path} is given nothing that could be followed")
        elif kind == "activation":
            self._acted(type(self.module.get_submodule(path)).__name__, data[0], call.outputs)
        else:
            for x in call.inputs if attends else ():
                self._given_beside(path, x, data[0])
            if kind == "convolution" and adds_what_it_takes(call, self.recorder):
                self.sums.behind(data[0], kind, path, self.module)
                kind = "layer"
            self._part(kind, path, data, call.outputs, call.frames)

    def _learnt_tokens(self, path: str, x: Tensor) -> Value:
        """Follow such tokens from here on."""
        self.values[id(x)] = value = Value(((self.labels.add("tokens", self._names(x)), 1.0),), places_of(x.shape))
        self.labels.streams.add(value.terms)
        self.sums.made_of_none(path, self._names(x))
        return value

    def _given_beside(self, path: str, x: Tensor, value: Value) -> None:
        """Tokens that an attention is given, and that are a vector of each sample, or made of no argument."""
        if known := self.conditions.made.get(id(x)):
            self.sums.say(
                f"{path} attends to one vector of each sample", "project", f"the argument {known[0]} holds it"
            )
        elif id(x) not in self.values and x.dim() == value.places.dim() and x.shape[-1:] == value.places.shape[-1:]:
            self.sums.made_of_none(path, self._names(x), self._names(x) in self.added)

    def _part(self, kind: str, path: str, data: list[Value], outputs: list[Tensor], frames: Frames) -> None:
        """A part, or one of torch's functions in its place."""
        for value in data if kind != "gain" else ():
            self.sums.used(value, path)
            self.sums.positioned(value, kind, path)
        if kind == "attention":
            data = data if path not in self.paths else self.labels.unprojected(self.module.get_submodule(path), data)
            self.sums.attended(path, data, frames)
        self.sums.behind(data[0], kind, path, self.module)
        module = self.module.get_submodule(path) if path in self.paths else None
        first = isinstance(module, nn.modules.conv._ConvNd)  # features stand behind the batch
        if kind == "linear" and "given" in (self.labels.kind(data[0]), self.labels.normed_image(data[0], first)):
            kind = "embedding"  # of features, of patches, or of pixels
        if kind == "layer":  # of a source and a target the one whose tokens come back is first
            data = sorted(data, key=lambda x: relaid(x.places, outputs[0].shape) is None)
        label = self.labels.add(kind, path, data, frames)
        self.calls[path].add(label)
        owner = type(self.module.get_submodule(path.rpartition(".")[0] if module is not None else "")).__name__
        if kind == "embedding" and self.sums.inverted(path, data[0], owner):
            data = [replace(data[0], places=torch.zeros_like(data[0].places))]
        places = made_places(data[0].places, outputs[0].shape, first, kind == "embedding")
        if places is None:
            raise UnreadError(f"the output of {path} does not have the tokens of its input")
        self._in_order(kind, path, data, first or isinstance(module, CHANNELS))
        if kind == "layer_norm" and self.sums.is_beside_a_norm(path, data[0]):
            self.sums.say(f"{path} normalises what is normalised already", "project", f"the sub-module {path}")
        self._give(outputs[:1], Value(((label, 1.0),), places))
        if kind in ("positions", "layer"):
            self.labels.streams.add(((label, 1.0),))

    def _in_order(self, kind: str, path: str, data: list[Value], second: bool) -> None:
        """What a part is given lies in order; its features may be the second axis."""
        taken = (x.places.movedim(1, -1) if second else x.places for x in data if x.places.dim() > second)
        ordered = lies_in_order if kind == "attention" else lies_whole
        cut = kind in ("layer_norm", "embedding") and are_pixels(data[0].places)  # into patches, in whatever order
        cut |= self.labels.kind(data[0]) == "pool" and data[0].places.dim() == 2  # a row of all, in whatever order
        if kind in (*IN_ORDER, "embedding") and not cut and not all(map(ordered, taken)):
            self.sums.say(f"{path} is given tokens or features in another order", "project")

    def _looked_up(self, path: str, index: Tensor, output: Tensor) -> None:
        """Rows of a table, by ids or by positions."""
        if (value := self.values.get(id(index))) is not None:
            places = value.places[..., None] + torch.arange(output.size(-1))
            self.calls[path].add(self._new("embedding", path, [value], [output], places))
            return
        rows = index.double()
        if not (bool((rows == rows[..., :1]).all()) or bool((rows.diff(dim=-1) == 1).all())):
            self.sums.say(f"the positions that {path} looks up are not counted from the first", "scores")
        self.calls[path].add(self._new("table", f"{path} {rows.flatten()[:1].tolist()}", (), [output], torch.zeros(())))

    def _acted(self, name: str, value: Value, output: Tensor | list[Tensor]) -> None:
        if self.labels.kind(value) not in ("linear", "piece") and not self.labels.is_normed_matrix(value):
            self.sums.say(f"{name} of something other than the output of a matrix", "gate")
            self.sums.used(value, name)
        self._new("activation", name, [value], [output] if isinstance(output, Tensor) else output, value.places)

    def _names(self, *tensors: Tensor) -> str:
        return next((self.learnt[id(x)][0] for x in tensors if id(x) in self.learnt), "")

    def _elements(self, x: Tensor) -> Tensor:
        """Number the elements of a parameter, or give which of them were cut of it."""
        found = self.learnt[id(x)][1]
        return torch.arange(x.numel()).view_as(x) if found is None else found

    def _give(self, tensors: list[Tensor], value: Value) -> None:
        self.values |= {id(x): value for x in tensors}

    def _new(self, kind: str, words: str, data: Iterable[Value], tensors: list[Tensor], places: Tensor) -> str:
        """Follow what something makes, under a label of its own."""
        label = self.labels.add(kind, words, data)
        self._give(tensors, Value(((label, 1.0),), places))
        return label
