"""What flows between the parts of a layer or a model: sums of what they gave, and which token lies where in them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.same import near
from equivalence_tests.checker.engine.vocabulary import ADDS, CONTRACTIONS, MOVES, words
from equivalence_tests.checker.engine.watching import ModuleCall, Operation, Recorder, letters_of
from equivalence_tests.checker.equivalent.texts import constructor
from equivalence_tests.checker.parts.feed_forwards import ACTIVATIONS
from equivalence_tests.checker.reach.arguments import ADDED_POSITIONS, ROLES, role_of_parameter
from equivalence_tests.checker.reach.proposing import parameters_of
from equivalence_tests.checker.reporting.lines import Frames

OTHER_ORDER = words("gather take_along_dim index_select masked_select take pad")
DROPS = words("dropout alpha_dropout feature_dropout dropout1d")
PASSES = (MOVES - OTHER_ORDER - words("cat stack hstack vstack dstack column_stack row_stack")) | DROPS
PASSES |= words("to cpu type_as type float double half bfloat16 long int nan_to_num requires_grad")
SHAPED = words("view_as reshape_as expand_as type_as to")
ACTS = words("relu gelu silu tanh sigmoid softplus elu leaky_relu selu mish hardswish relu6 prelu")
POOLS = words("mean sum amax max")
NAMES = ("GELU", "tanh-GELU", "sigmoid-GELU", "SiLU", "squared ReLU", "Mish")  # of what is written out
MOST_OPERATIONS = 12  # of which an activation is written out
HALF = 0.5  # as the feed-forwards of a Conformer are added, between which a convolution stands
FEATURES = 1 << 20  # more than a token has
Terms = tuple[tuple[str, float], ...]
# What a stream of tokens begins with.
MATRICES = ("linear", "embedding")  # a matrix that reads the input as it is embeds it
BASES = ("given", "embedding", "table", "positions", "tokens", "layer", "added")
WITHIN = ("layer_norm", "gain", "conditioned", "linear", "activation", "product", "feed_forward", "attention", "piece")
# What torch's own modules are in the wiring.
TORCHS: dict[str, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear, nn.modules.conv._ConvNd),
    "embedding": (nn.Embedding,),
    "layer_norm": (nn.LayerNorm, nn.modules.batchnorm._BatchNorm, nn.GroupNorm),
}
CHANNELS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm)  # norms that take features as the second axis


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor as a sum of what parts gave."""

    terms: Terms  # each part's label, and how often it is in the sum
    places: Tensor  # of each element, its token and its feature

    @property
    def only(self) -> str:
        """The one label that it is; "" for a sum, or something scaled."""
        return self.terms[0][0] if len(self.terms) == 1 and self.terms[0][1] == 1 else ""

    def is_same(self, other: "Value") -> bool:
        """Whether it is the same sum, each token and feature at the same place."""
        return self.terms == other.terms and torch.equal(self.places, other.places)

    def is_not_in(self, made: Tensor) -> bool:
        """Whether positions were made beside it, and not added to it: they are the same for all samples."""
        return relaid(self.places, made.shape) is None or (len(made) > 1 and bool((made == made[:1]).all()))


def is_counted(terms: Terms) -> bool:
    """Whether a sum takes each label a whole number of times, or by half: nothing else is scaled."""
    return all(count in (HALF, int(count)) and count >= 0 for _, count in terms)


def as_often_in(terms: Terms, label: str) -> Terms:
    """Give a label as often as it is in a sum."""
    return tuple(one for one in terms if one[0] == label)


def summed(one: Terms, other: Terms, factor: float = 1.0) -> Terms:
    """Add two sums.

    >>> summed((("x", 1.0),), (("x", 1.0), ("y", 1.0)), -1.0)
    (('y', -1.0),)
    """
    counts = dict(one)
    for label, count in other:
        counts[label] = counts.get(label, 0.0) + factor * count
    return tuple(sorted((label, count) for label, count in counts.items() if count))


def scaled(terms: Terms, factor: float) -> Terms:
    """Multiply a sum by a number."""
    return tuple((label, count * factor) for label, count in terms)


@dataclass(frozen=True)
class Made:
    """What a label stands for."""

    kind: str  # attention, feed_forward, layer_norm, linear, activation and others
    words: str  # what the user calls it
    inputs: tuple[Value, ...] = ()  # what it is made of, first that which it is a function of token by token
    frames: Frames = ()  # the user's lines that made it, the innermost first


@dataclass
class Labels:
    """Everything that was given or made in one run."""

    made: dict[str, Made] = field(default_factory=dict)
    known: dict[tuple[Any, ...], str] = field(default_factory=dict)  # each label, by what it stands for
    streams: set[Terms] = field(default_factory=set)  # sums of what a layer was given and what its sub-layers gave
    users: dict[str, set[str]] = field(default_factory=dict)  # the kinds of what takes a label
    summed: dict[str, Frames] = field(default_factory=dict)  # the lines that first add a label to something
    sums: dict[Terms, Frames] = field(default_factory=dict)  # the lines that first add up a sum
    projecting: set[str] = field(default_factory=set)  # what stands in for the projections of an attention

    def add(self, kind: str, words: str, inputs: Iterable[Value] = (), frames: Frames = ()) -> str:
        """Give the label of something; the same for the same part with the same inputs."""
        found = Made(kind, words, tuple(inputs), frames)
        label = self.known.setdefault((kind, words, *(x.terms for x in found.inputs)), f"{words} {len(self.known)}")
        self.made.setdefault(label, found)
        for value in found.inputs:
            for inside, _ in value.terms:
                self.users.setdefault(inside, set()).add(kind)
        return label

    def unprojected(self, attention: nn.Module, data: list[Value]) -> list[Value]:
        """Give what the matrices take that project for an attention without projections, each for one operand."""
        inside = [p for p in attention.parameters() if p.dim() > 1]
        alone = len(inside) < 2 and all(p.dim() == 2 and p.size(0) == p.size(1) for p in inside)
        made = [self.made.get(x.only) for x in data]
        apart = len({x.only for x in data}) == len(data) > 1 and all(m and m.kind in MATRICES for m in made)
        others = {self.made[one].words for one in self.projecting}
        if not alone or not apart or not others.isdisjoint(m.words for m in made if m is not None):
            return data  # a matrix projects for one attention
        self.projecting |= {x.only for x in data}
        return [m.inputs[0] for m in made if m is not None]

    def bare(self, terms: Terms) -> Terms:
        """Give a sum without the positions that are an argument of their own."""
        return tuple(x for x in terms if self.made[x[0]].kind != "added")

    def added(self, value: Value) -> list[str]:
        """Name the arguments that hold positions and are in a sum."""
        return [self.made[label].words for label, _ in value.terms if self.made[label].kind == "added"]

    def kind(self, value: Value) -> str:
        """Say what a value is, where it is one thing."""
        return self.made[value.only].kind if value.only else ""

    def origins(self, label: str) -> set[Terms]:
        """List the streams that a branch may start from: what its first part reads, and that before its norm."""
        made = self.made[label]
        if not made.inputs:
            return set()
        several = made.inputs if made.kind == "product" else made.inputs[:1]
        found = [self._origins(value) for value in several]
        return set.intersection(*found)

    def _origins(self, value: Value) -> set[Terms]:
        value = replace(value, terms=self.bare(value.terms))
        found = {value.terms} & self.streams
        kind = self.kind(value)
        if kind in ("layer_norm", "conditioned") or (kind in WITHIN and not found):
            found |= self.origins(value.only)
        inner = (self.made[label] for label, _ in value.terms if found and self.made[label].kind == "embedding")
        normed = (made.inputs[0] for made in inner if self.kind(made.inputs[0]) == "layer_norm")
        return found.union(*map(self._origins, normed))  # a stream of its own, around which there is another residual

    def ancestors(self, terms: Terms) -> set[str]:
        """List what tokens were made of, token by token: not what they attended to, nor tables."""
        tables = ("table", "added")
        found = self.behind((label for label, _ in terms), lambda made: made.inputs[: made.kind not in tables])
        return {label for label in found if self.made[label].kind not in tables}

    def behind(
        self, labels: Iterable[str], inputs: Callable[[Made], Iterable[Value]] = lambda made: made.inputs
    ) -> set[str]:
        """List some labels and all that they are made of, by all inputs or by some of them."""
        found, waiting = set[str](), [*labels]
        while waiting:
            label = waiting.pop()
            if label not in found:
                found.add(label)
                waiting += [inside for value in inputs(self.made[label]) for inside, _ in value.terms]
        return found

    def gates(self, values: list[Value]) -> bool:
        """Whether of two factors one is an activation of a matrix, and the other is another matrix's."""
        kinds = [self.kind(value) for value in values]
        return kinds.count("activation") == 1 and all(kind in ("linear", "piece", "activation") for kind in kinds)

    def items_in(self, values: list[Value]) -> str:
        """Say what embeds the items that tokens are compared with, if that embeds the tokens, too; "" for none."""
        made = [self.made.get(value.only) for value in values]
        embedded = [one for one in made if one is not None and one.kind == "embedding"]
        others = [one for one in self.made.values() if one.kind == "embedding" and one not in embedded]
        tied = len(values) == 2 and len(embedded) == 1 and any(one.words == embedded[0].words for one in others)
        return f"{embedded[0].words} embeds both, as where recommenders score items" if tied else ""

    def is_normed_matrix(self, value: Value) -> bool:
        """Whether it is the norm of what a matrix gave."""
        return self.kind(value) == "layer_norm" and self.kind(self.made[value.only].inputs[0]) == "linear"

    def normed_image(self, value: Value, convolved: bool) -> str:
        """Say what a norm was given that normalises an image, perhaps cut into patches; "" where it is none."""
        image = are_pixels(value.places) or (convolved and value.places.dim() == 4)
        normed = self.kind(value) == "layer_norm" and image
        return self.kind(self.made[value.only].inputs[0]) if normed else ""

    def is_pooled(self, made: Made) -> bool:
        """Whether something is made of one vector for all tokens."""
        inside = (self.made[value.only] for value in made.inputs if value.only)
        return any(one.kind == "pool" or self.is_pooled(one) for one in inside)

    def taken_by(self, label: str, kind: str) -> set[str]:
        """List the kinds of what takes something, and of what takes that, where it is of a kind."""
        through = (one for one, made in self.of_kind(kind) if any(x.only == label for x in made.inputs))
        return self.users.get(label, set()) - {kind} | {user for one in through for user in self.users.get(one, set())}

    def words(self, label: str) -> str:
        """Say what a label stands for."""
        made = self.made[label]
        return f"{made.kind} {made.words}" if made.kind in ("activation", "piece") else made.words

    def of_kind(self, *kinds: str) -> Iterator[tuple[str, Made]]:
        """List the labels of some kinds."""
        yield from ((label, made) for label, made in self.made.items() if made.kind in kinds)


def kind_in(module: nn.Module, path: str, kinds: Mapping[str, str]) -> str:
    """Say what a sub-module is in the wiring: of the kinds that are known, one of torch's own, or nothing, ""."""
    if path in kinds:
        return kinds[path]
    own = module.get_submodule(path)
    for kind, classes in TORCHS.items():
        if isinstance(own, classes):
            return kind
    plain = constructor(own) and next(own.parameters(), None) is None
    acts = type(own).__name__.lower() in ACTS and not isinstance(own, nn.Softmax)
    return "activation" if plain and acts else ""


def sums_features(operation: Operation) -> bool:
    """Whether it sums along the last axis alone."""
    axis = operation.argument(1, "dim")
    return axis in (-1, operation.inputs[0].value.dim() - 1, [-1], (-1,))


def call_of(operation: Operation, recorder: Recorder) -> Frames:
    """The lines that call the sub-module that runs an operation; none where the module itself runs it."""
    calls = [one for one in recorder.calls if one.path and one.first <= operation.index < one.end]
    return max(calls, key=lambda one: one.first).frames if calls else ()


def adds_what_it_takes(call: ModuleCall, recorder: Recorder) -> bool:
    """Whether a sub-module ends in the sum of what it was given and something else."""
    inside = recorder.operations[call.first : call.end]
    made = [one for one in inside if any(slot.tensor is call.outputs[0] for slot in one.outputs)]
    return bool(made) and made[-1].name in ADDS and any(slot.tensor is call.inputs[0] for slot in made[-1].inputs)


def queries_first(attention: nn.Module, call: ModuleCall) -> list[Tensor]:
    """Give what an attention is given: queries, keys and values, in this order if its arguments are called so."""
    names = [p.name for p in parameters_of(attention)]
    given = [*zip(names, call.args, strict=False), *call.kwargs.items()]
    roles = {role_of_parameter(name): x for name, x in given if isinstance(x, Tensor)}
    return [roles[role] for role in ROLES] if {*ROLES} <= roles.keys() else call.inputs


def events_in(recorder: Recorder, module: nn.Module, kinds: Mapping[str, str]) -> Iterator[ModuleCall]:
    """List the calls of parts, and of torch's own modules, that are not inside of another."""
    end = 0
    for call in recorder.calls:
        if call.path and call.first >= end and call.end > call.first and kind_in(module, call.path, kinds):
            end = call.end
            yield call


def numbers_in(module: nn.Module, name: str) -> int:
    """Count the numbers of a parameter, or of a buffer; 0 if there is none of this name."""
    held = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    return held[name].numel() if name in held else 0


def are_positions(argument: str, x: Tensor, given: Iterable[Tensor]) -> bool:
    """Whether an argument is called positions, and holds one vector for each token of another that is given."""
    named = x.is_floating_point() and ADDED_POSITIONS.search(argument.lower())
    return bool(named) and any(other.shape == x.shape for other in given if other is not x)


def are_tokens(places: Tensor, output: Tensor) -> bool:
    """Whether what is cut of a parameter is the same for all samples, and as many tokens as a part makes."""
    return places.dim() == 3 and places.shape[:2] == output.shape[:2] and bool((places == places[:1]).all())


def factor_of(operation: Operation, is_known: Callable[[Tensor], bool]) -> float | None:
    """Give the number by which tensors that are followed are multiplied, or divided; None where it is none."""
    first, *_ = tensors = [slot.tensor for slot in operation.inputs]
    constant = [x for x in tensors if not is_known(x) and x.numel() == 1]
    numbers = [x for x in operation.skeleton if isinstance(x, int | float)] if len(tensors) == 1 else constant
    if len(numbers) != 1 or numbers[0] is first:
        return None
    return float(numbers[0]) if operation.name == "mul" else 1 / float(numbers[0])


def written_activation(x: Tensor, operations: Sequence[Operation]) -> tuple[str, Operation] | None:
    """Name the activation of a tensor that several operations make behind it, and give the last of them."""
    wanted, found = {name: ACTIVATIONS[name](x) for name in NAMES}, None
    for place, operation in enumerate(operations[:MOST_OPERATIONS]):
        made = operation.outputs[0].value if operation.outputs else None
        if operation.name in CONTRACTIONS or made is None:
            break
        names = [name for name, want in wanted.items() if made.shape == want.shape and near(made, want)]
        if names and place:  # one operation is known by its name
            found = names[0], operation
    return found


def places_of(shape: torch.Size) -> Tensor:
    """Number the tokens of a tensor that holds features last, and its features."""
    rows = torch.arange(shape[:-1].numel()).view(*shape[:-1], 1)
    return rows * FEATURES + torch.arange(shape[-1])


def places_of_channels(shape: torch.Size) -> Tensor:
    """Number the tokens and the features of a tensor that holds features behind the batch."""
    return places_of(torch.Size((shape[0], *shape[2:], shape[1]))).movedim(-1, 1)


def relaid(before: Tensor, shape: torch.Size) -> Tensor | None:
    """Give the places of what a part makes of tokens, each where it was; None where these are others."""
    if before.shape == shape:
        return before
    if before.dim() and before.shape[:-1] == shape[:-1]:
        return before[..., :1] // FEATURES * FEATURES + torch.arange(shape[-1])
    return None


def made_places(before: Tensor, shape: torch.Size, first: bool, embeds: bool) -> Tensor | None:
    """Give the places of what a part makes; None where it has not the tokens that it is given.

    ``first``: features stand behind the batch, as convolutions have them. What embeds may make tokens of an image,
    whose places are all 0.
    """
    if first:
        return places_of_channels(shape)
    return places_of(shape) if embeds and are_pixels(before) else relaid(before, shape)


def are_pixels(places: Tensor) -> bool:
    """Whether they are the places of an image, which are all 0."""
    return not bool(places.any())


def lies_whole(places: Tensor) -> bool:
    """Whether the last axis holds features of one token, in order."""
    return bool((places.diff(dim=-1) == 1).all())


def lies_in_order(places: Tensor) -> bool:
    """Whether along each axis come later tokens, or later features."""
    return all(bool((places.diff(dim=axis) > 0).all()) for axis in range(places.dim()))


def projects(operation: Operation) -> bool:
    """Whether a product of tokens and a matrix sums over the features of each token."""
    if operation.name != "einsum":
        return True
    read = letters_of(str(operation.argument(0, "equation")), *(slot.value.dim() for slot in operation.inputs))
    tokens, matrix, given = read or ("", "", "")
    return len(matrix) == 2 and tokens[-1:] in matrix and given == tokens[:-1] + matrix.replace(tokens[-1:], "")


def meets_features(one: Value, other: Value) -> bool:
    """Whether a product of two matrices compares tokens, feature by feature."""
    x, y = one.places, other.places
    return min(x.dim(), y.dim()) > 1 and all(map(lies_in_order, (x, y.mT))) and lies_whole(x) and lies_whole(y.mT)


def is_row(places: Tensor, tokens: Tensor) -> bool:
    """Whether each sample has all its features in one row, in whatever order."""
    alike = places.dim() == 2 < tokens.dim() == 3 and places.shape == tokens.flatten(1).shape
    return alike and torch.equal(places.sort().values, tokens.flatten(1).sort().values)


def is_turned(places: Tensor) -> bool:
    """Whether the last axis holds the tokens and the one before it the features, both in order."""
    return places.dim() > 2 and lies_whole(places.mT) and lies_in_order(places.mT)


def keeps_rows(operation: Operation) -> bool:
    """Whether what an operation moves stays in order, some of it left out, or all of it repeated for each sample."""
    moved = operation.call([places_of(operation.inputs[0].value.shape)])
    for axis in range(moved.dim()) if isinstance(moved, torch.Tensor) else ():
        moved = moved.narrow(axis, 0, 1) if bool((moved.diff(dim=axis) == 0).all()) else moved
    return not isinstance(moved, torch.Tensor) or bool((moved.flatten().diff() > 0).all())


def rounds(operation: Operation) -> bool:
    """Whether numbers are rounded to half precision, or to whole numbers."""
    made, was = operation.outputs[0].value, operation.inputs[0].value
    cut = was.is_floating_point() and not (made.is_floating_point() or made.is_complex())
    return cut or made.dtype in (torch.float16, torch.bfloat16)


def weighs(operation: Operation) -> bool:
    """Whether a softmax goes over the features."""
    found = operation.outputs[0].value
    total = (found if operation.name == "softmax" else found.exp()).sum(-1)
    return near(total, torch.ones_like(total))
