"""What torch's layers do not have in the sums that flow between parts: factors, other residuals, parts side by side."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from equivalence_tests.checker.engine.vocabulary import MOVES
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.equivalent.steps import Step
from equivalence_tests.checker.layers.whole_values import (
    BASES,
    CHANNELS,
    FEATURES,
    Labels,
    Made,
    Terms,
    Value,
    is_turned,
    keeps_rows,
    lies_in_order,
)
from equivalence_tests.checker.reporting.lines import Frames, code_lines

ROLES = "queries", "keys", "values"
GIVEN = ("given", "embedding", "table", "positions", "added")
SHORTCUT = re.compile("shortcut|skip", re.IGNORECASE)
SHARED = {"layer_norm": "shared_norm", "attention": "shared_attention"}  # the stages of what is used again
EXEMPT = (*GIVEN, "activation", "product", "piece", "pool", "softmax", "tokens")


@dataclass(eq=False)
class Sums:
    """Asks of each sum that a part takes whether it is the stream of tokens."""

    labels: Labels  # what the parts made
    paths: set[str]  # of the sub-modules
    name: str  # of the class of the whole
    found: list[Step] = field(default_factory=list)
    seen: set[Terms] = field(default_factory=set)
    rows: dict[str, int] = field(default_factory=dict)  # of a table, the first row that is added to tokens
    mixing: set[str] = field(default_factory=set)  # the convolutions between sub-layers
    inverts: bool = False  # whether features were taken for tokens
    steps_of: dict[str, int] = field(default_factory=dict)  # how many tokens each step of several sequences has
    put: dict[str, set[int]] = field(default_factory=dict)  # the places of learnt tokens among those they are put to

    def used(self, value: Value, by: str) -> None:
        """Ask of a value that something takes whether it is the stream of tokens, or what one part gave."""
        if value.terms in self.seen:
            return
        self.seen.add(value.terms)
        self._multiplied(value)
        alone = [
            label for label, _ in value.terms if len(value.terms) == 1 and self.labels.made[label].kind == "linear"
        ]
        value = replace(value, terms=((alone[0], 1.0),) if alone else self.labels.bare(value.terms))
        kinds = {label: self.labels.made[label].kind for label, _ in value.terms}
        branches = [label for label, kind in kinds.items() if kind not in BASES]
        if value.only and branches:
            made = self.labels.made[value.only]
            if made.kind == "layer_norm" and made.inputs[0].terms in self.labels.streams:
                self.labels.streams.add(value.terms)
            return
        if sum(kind == "given" for kind in kinds.values()) > 1:
            self.say("two arguments are added", "residual")
        layers = [label for label, kind in kinds.items() if kind == "layer"]
        if layers and sum(kind in ("given", "embedding", "tokens", "layer") for kind in kinds.values()) > 1:
            words = self.labels.words(layers[-1])
            self.say(f"{words}, which has residual connections of its own, is added to something else", "residual")
        for made in (self.labels.made[label] for label, kind in kinds.items() if kind == "embedding"):
            if not kinds.keys().isdisjoint(label for label, _ in made.inputs[0].terms):
                self._stands_alone(made)
        for made in (self.labels.made[label] for label, kind in kinds.items() if kind == "positions"):
            if made.inputs and not kinds.keys().isdisjoint(label for label, _ in made.inputs[0].terms):
                self.say(f"the input of {made.words} is added to its output once more", "residual")
        if branches and not self._are_normed_embeddings(branches, kinds):
            self._from_stream(value, by)
        self.labels.streams.add(value.terms)

    def _multiplied(self, value: Value) -> None:
        """Say which terms are multiplied by a number."""
        width = value.places.size(-1) if value.places.dim() else 0
        for made, count in ((self.labels.made[label], count) for label, count in value.terms if count != 1):
            looked_up = made.kind == "embedding" and made.inputs[0].places.dim() < value.places.dim()
            handed_over = made.kind == "given" and "emb" in made.words
            usual = (looked_up or handed_over) and math.isclose(count, math.sqrt(width), rel_tol=1e-6)
            said = "the square root of the width, as embeddings are scaled" if usual else ""
            taken = made.inputs[0].places if made.kind == "linear" else value.places
            if made.kind == "linear" and math.isclose(count, taken.size(-1) ** -0.5, rel_tol=1e-6):
                said = "the root of the width divides it, as where the matrix is that of embeddings"
            self.say(f"{made.words} times {count:.6g}", "factor", said)

    def _from_stream(self, value: Value, by: str) -> None:
        """A sum is a stream with what sub-layers made of it."""
        whole = dict(value.terms)
        known = [dict(x) for x in self.labels.streams if x != value.terms]
        known = [x for x in known if all(whole.get(label) == count for label, count in x.items())]
        for stream in sorted(known, key=len, reverse=True):
            rest = [label for label in whole if label not in stream]
            start = tuple(sorted(stream.items()))
            if rest and all(start in self.labels.origins(label) for label in rest):
                for made in (self.labels.made[label] for label in rest):
                    if made.kind in ("linear", "layer_norm") and made.inputs[0].terms in self.labels.streams:
                        self._stands_alone(made)
                if len(rest) > 1:
                    words = f"{' and '.join(self.labels.words(x) for x in rest)} are added in parallel"
                    self.say(words, "parallel", self._one_norm(rest, start) or self._shortcut(rest))
                return
        names = " + ".join(self.labels.words(label) for label in whole)
        self.say(f"{names}, which {by} takes, is not a residual connection", "residual")

    def _are_normed_embeddings(self, branches: Sequence[str], kinds: Mapping[str, str]) -> bool:
        """Whether tables are added to the norm of embeddings, in the place of these."""
        made, others = self.labels.made[branches[0]], [kind for label, kind in kinds.items() if label not in branches]
        taken = {label for label, _ in made.inputs[0].terms} if made.kind == "layer_norm" else set[str]()
        embedded = bool(taken) and all(self.labels.made[label].kind == "embedding" for label in taken)
        return len(branches) == 1 and embedded and {*others} <= {"table", "positions"}

    def _one_norm(self, labels: Sequence[str], stream: Terms) -> str:
        """Say that attention and feed-forward read the same norm of the stream, as in GPT-J; "" where they do not."""
        if {self.labels.made[label].kind for label in labels} - {"attention", "feed_forward", "linear"}:
            return ""
        before = self.labels.ancestors(stream)
        behind = [self.labels.ancestors(((label, 1.0),)) - before for label in labels]
        norms = [{x for x in one if self.labels.made[x].kind == "layer_norm"} for one in behind]
        return "one norm serves them all" if len(norms[0]) == 1 and all(x == norms[0] for x in norms) else ""

    def _shortcut(self, labels: Sequence[str]) -> str:
        """Say that one of two is a matrix that is called a shortcut; "" where none is."""
        named = [made.words for made in map(self.labels.made.__getitem__, labels) if made.kind == "linear"]
        found = next(filter(SHORTCUT.search, named), "") if len(labels) == 2 else ""
        return f"the sub-module {found}, by its name" if found else ""

    def _stands_alone(self, made: Made) -> None:
        """A matrix, or a norm, that is a sublayer by itself."""
        own = made.kind != "layer_norm" and made.words in self.paths
        self.say(f"{made.words} alone is a sublayer", "residual", f"the sub-module {made.words}" * own)

    def inverted(self, path: str, value: Value, owner: str) -> bool:
        """Note that a matrix makes one token of what all tokens hold of one feature, as in an iTransformer."""
        if turned := is_turned(value.places):
            said = re.search("inverted|itransformer", f"{self.name} {owner}", re.IGNORECASE)
            self.say(f"{path} takes features for tokens", "project", f"the name {said.group()}" if said else "")
            self.inverts = True
        return turned

    def is_beside_a_norm(self, path: str, value: Value) -> bool:
        """Whether a value comes from a norm of the same layer; torch has two in a row only where a stack ends."""
        if self.labels.kind(value) != "layer_norm":
            return False
        both = self.labels.made[value.only].words, path
        return self.paths.issuperset(both) and len({x.rpartition(".")[0] for x in both}) == 1

    def attended(self, path: str, data: list[Value], frames: Frames) -> None:
        """Ask what an attention takes: one stream, or keys and values of a memory, and where positions are added."""
        query, *others = (replace(x, terms=self.labels.bare(x.terms)) for x in data)
        named = [self.labels.added(x) for x in data]
        if any(named):
            self._say_where_positions_are_added(path, named, frames)
        if query.terms not in self.labels.streams:
            self.say(f"{path} reads something other than the stream of tokens", "project")
        for other in others:
            apart = self.labels.ancestors(query.terms).isdisjoint(self.labels.ancestors(other.terms))
            if not apart and not other.is_same(query):
                said = self._as_in_sasrec(query, other)
                self.say(f"{path} takes keys or values from another tensor than its queries", "project", said)
        if len(others) > 1 and not others[0].is_same(others[1]):
            self.say(f"{path} takes values from another tensor than its keys", "project")

    def _as_in_sasrec(self, query: Value, other: Value) -> str:
        """Say that the queries are the norm of what the keys are, in a class whose name says it; "" elsewhere."""
        made = self.labels.made.get(query.only)
        normed = made is not None and made.kind == "layer_norm" and made.inputs[0].terms == other.terms
        return "only the queries are normalised, as in SASRec" if normed and "sasrec" in self.name.lower() else ""

    def _say_where_positions_are_added(self, path: str, named: Sequence[Sequence[str]], frames: Frames) -> None:
        names = " and ".join(dict.fromkeys(itertools.chain.from_iterable(named)))
        as_in_detr = [*map(bool, named)] == [True, True, False]
        taken = ", ".join(role for role, added in zip(ROLES, named, strict=False) if added)
        where = f"the {taken} of {path}" if len(named) == len(ROLES) else f"what {path} takes"
        where = f"the queries and keys of {path}, not to its values" if as_in_detr else f"{where}{_at(frames)}"
        self.say(f"{names}: added to {where}", "scores", "the name of the argument says positions" * as_in_detr)

    def positioned(self, value: Value, kind: str, path: str) -> None:
        """Say that positions are added to what a part takes; an attention is asked where."""
        for name in self.labels.added(value) if kind != "attention" else ():
            said = "the name of the argument says positions" * (kind == "layer")
            self.say(f"{name}: added to what {path} takes", "scores", said)

    def behind(self, value: Value, kind: str, path: str, module: nn.Module) -> None:
        """Say what is strange in a part that takes what another gave."""
        before, own = self.labels.kind(value), module.get_submodule(path) if path in self.paths else module
        if kind == before == "positions":
            self.say(f"{path} adds positions to what has positions", "scores")
        if kind == "convolution":
            self.mixing.add(path)
            self.say(f"{path} mixes neighbouring tokens", "project", f"the sub-module {path}, a {type(own).__name__}")
        if isinstance(own, CHANNELS):
            said = f"the sub-module {path}, a {type(own).__name__}"
            of = "all tokens of a sample" if isinstance(own, nn.GroupNorm) else "what all samples in training have"
            self.say(f"{path} normalises by {of}", "project", said)
        if kind == "layer_norm" and before in ("attention", "feed_forward"):
            said = f"the sub-module {path}" if path in self.paths else ""
            self.say(f"{path} normalises what {self.labels.words(value.only)} gives", "project", said)
        if kind == "layer_norm" and path in self.paths and len(getattr(own, "normalized_shape", ())) > 1:
            self.say(f"{path} normalises several tokens as one", "project")
        if kind == "linear" and before in ("linear", "feed_forward"):
            said = "the output holds no tokens" if self.labels.is_pooled(self.labels.made[value.only]) else ""
            self.say(f"{path} follows another matrix with nothing in between", "project", said)

    def made_of_none(self, path: str, name: str, positions: bool = False) -> None:
        """Say that a part takes tokens that are learnt, or of unknown origin, or positions, which it may add itself."""
        if positions:
            self.say(f"{path} is passed {name} beside the tokens", "scores", "the name of the argument says positions")
            return
        said = f"the parameter {name}" if name else ""
        self.say(f"{path} takes tokens that are made from none that are passed in", "project", said)

    def come_back(self, value: Value, image: bool) -> None:
        """Ask of what comes back whether it is the stream of tokens, in order; of an image, pixels lie last."""
        self.used(value, "the output")
        ordered = is_turned if self.inverts or image else lies_in_order
        if value.places.dim() and not ordered(value.places.flatten(2) if image else value.places):
            self.say("the output has its tokens or features in another order", "output")
        for label, _ in value.terms:
            self.labels.users.setdefault(label, set()).add("output")

    def moved(self, operation: Operation, value: Value) -> None:
        """Say where the rows of a table change places."""
        if operation.name in MOVES and not value.places.dim() and not keeps_rows(operation):
            self.say(f"{operation.name} of the rows of {self.labels.words(value.only)}", "scores")

    def say_strange(self, operation: Operation) -> None:
        """Note an operation between the parts, with its line."""
        self.say(f"{operation.name} between the parts{_at(operation.frames)}", "project")

    def judged(
        self,
        calls: Mapping[str, set[str]],
        module: nn.Module,
        kinds: Mapping[str, str],
        returned: Sequence[str],
        idle: Sequence[str],
    ) -> list[Step]:
        """Give all that was said, and what is strange once it is known what comes back and what is idle."""
        self.judge_parts(calls, module)
        for path in idle:
            self.say(f"only part of the output of {path} is used", "unused")
        self.judge_unused({path: labels for path, labels in calls.items() if path in kinds}, returned)
        return list(dict.fromkeys(self.found))

    def judge_parts(self, calls: Mapping[str, set[str]], module: nn.Module) -> None:
        """Say what is strange in how often parts take part, and in what follows them."""
        self._halved()
        self._joined()
        for name, row in self.rows.items():
            if row > 0:
                self.say(f"{name} is added from its row {row} on", "scores")
        for path, labels in calls.items():
            kinds = [self.labels.made[label].kind for label in labels]
            owner = {self.labels.made[label].kind for label in calls.get(path.rpartition(".")[0], ())} - {"embedding"}
            elsewhere = len(owner) * ("table" in kinds)
            if len([kind for kind in kinds if kind not in EXEMPT]) > 1 or kinds.count("table") + elsewhere > 1:
                stage = SHARED.get(kinds[0], "residual")
                self.say(f"{path} is used {len(labels) + elsewhere} times, with different inputs", stage)
        for label, made in self.labels.of_kind("layer_norm"):
            stays = self.labels.users.get(label, set()) - {"attention", "feed_forward", "linear", "conditioned"}
            if stays and all(self.labels.made[x].kind in GIVEN for x, _ in made.inputs[0].terms):
                own = made.words in self.paths
                self.say(f"{made.words} normalises the embeddings", "project", f"the sub-module {made.words}" * own)
        for label, made in self.labels.of_kind("softmax"):
            if self.labels.users.get(label, set()) != {"output"} or label in self.labels.summed:
                self.say(f"{made.words} is used between the parts", "gate")
        for label, made in self.labels.of_kind("activation"):
            users = self.labels.users.get(label, set())
            inside = users <= {"linear", "product", "layer_norm"} and label not in self.labels.summed
            ends = inside or self.labels.is_pooled(made)
            if users and not ends:
                self.say(f"{made.words} follows the last matrix", "gate")
        for _, made in self.labels.of_kind("gain"):
            learnt = made.words in dict(module.named_parameters(remove_duplicate=False))
            self.say(f"times {made.words}", "scale", f"the parameter {made.words}" if learnt else "")

    def judge_unused(self, calls: Mapping[str, set[str]], returned: Sequence[str]) -> None:
        """Say what is computed, and of which nothing comes back: the last of what belongs together."""
        used = self.labels.behind(returned)
        idle = {label for labels in calls.values() if used.isdisjoint(labels) for label in labels}
        before = self.labels.behind(y for x in idle for one in self.labels.made[x].inputs for y, _ in one.terms)
        for words in dict.fromkeys(self.labels.words(label) for label in self.labels.made if label in idle - before):
            self.say(f"nothing uses what {words} gives", "unused")

    def is_put(self, value: Value, taken: Tensor) -> bool:
        """Whether a token, by its places, is one of those that were put beside the others, if any were."""
        token = int(taken.flatten()[0]) // FEATURES % value.places.size(1)
        put = [self.put[label] for label in self.labels.ancestors(value.terms) if label in self.put]
        return not any(put) or any(token in one for one in put)

    def are_not_put(self, value: Value, taken: Tensor) -> bool:
        """Whether all tokens are taken but those that were put beside them."""
        count = value.places.size(1)
        left = {*range(count)} - {*(taken // FEATURES % count).unique().tolist()}
        return left in [self.put[label] for label in self.labels.ancestors(value.terms) if label in self.put]

    def is_of_one_sequence(self, value: Value, taken: Tensor) -> bool:
        """Say that one token of each step is taken where several sequences are one; say whether they are."""
        steps = [self.steps_of[label] for label in self.labels.ancestors(value.terms) if label in self.steps_of]
        if not steps or taken.dim() != 3:
            return False
        apart = bool(((taken[..., 0] // FEATURES).diff(dim=1) == steps[0]).all()) and len(steps) == 1
        self.used(value, "the output")
        self.say("one token of each step is taken", "output", "the others are of other sequences" * apart)
        return True

    def from_row(self, name: str, row: int) -> None:
        """Note from which row on a table is added."""
        self.rows[name] = min(row, self.rows.get(name, row))

    def _joined(self) -> None:
        """Say for what ids of several arguments are joined."""
        for label, made in self.labels.of_kind("given"):
            if len(made.inputs) > 1:
                scored = {"compared"} == self.labels.taken_by(label, "embedding")
                self.say(made.words, "project", "they are the items that are compared with tokens" * scored)

    def _halved(self) -> None:
        """Two feed-forwards, each added by half, stand on both sides of an attention, as in Macaron-Net."""
        halves = {one for one in self.found if one.stage == "factor" and one.words.endswith(" times 0.5")}
        attend = [made for _, made in self.labels.of_kind("attention", "layer") if made.words not in self.mixing]
        if halves and len(halves) == 2 * len(attend):
            said = "two feed-forwards are half a step each, as in Macaron-Net"
            self.found = [replace(one, evidence=said) if one in halves else one for one in self.found]

    def say(self, words: str, stage: str, evidence: str = "") -> None:
        """Note something that torch's layers do not have."""
        self.found.append(Step(words, evidence, stage))


def _at(frames: Frames) -> str:
    """Name the user's line that did something; "" where it is none."""
    line = code_lines(frames)[-1:]
    return f" (line {line[0].number}: {line[0].text})" if line else ""
