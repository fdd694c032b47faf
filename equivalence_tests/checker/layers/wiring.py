"""Name what is wrong with how the sub-layers of one layer are wired, in the reading that its program is made of.

One forward pass is followed: every value is a sum of what was given, the input x and the memory, and of what the parts
gave. The residual stream goes from x to the output. Where it cannot be followed, that is said.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.leaving_out import Repair, Without
from equivalence_tests.checker.engine.names import Run
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.taking_part import idle_modules
from equivalence_tests.checker.equivalent.search import together
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.layers.putting import Putting
from equivalence_tests.checker.layers.walk import outermost
from equivalence_tests.checker.layers.whole_steps import Follower
from equivalence_tests.checker.layers.whole_values import (
    BASES,
    HALF,
    MATRICES,
    Labels,
    Made,
    Terms,
    Value,
    as_often_in,
    is_counted,
    summed,
)
from equivalence_tests.checker.reach.calling import POSITIONS_OF, REAL_TOKENS, Inputs, Trial
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.lines import Frames, assigned_at

SUBLAYERS = ("attention", "feed_forward")
OF_SASREC = frozenset({"sublayer_reads_another_tensor", "residual_from_normalised"})
AS_IN_SASREC = "queries and residuals are normalised, keys and values are not, as in the released code of SASRec"
FOLLOWED = ("layer", "convolution", "layer_norm", "gain", "conditioned", *MATRICES, *SUBLAYERS)


@dataclass
class Wiring:
    """What was read: mistakes with their lines, what could not be read, the steps, what nothing uses, and the order."""

    mistakes: dict[str, Frames] = field(default_factory=dict)
    repairs: dict[str, Repair | None] = field(default_factory=dict)  # of those that are no facts, if anything does
    idle_norms: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    steps: dict[str, Made] = field(default_factory=dict)  # what the parts made, by label
    unused: set[str] = field(default_factory=set)
    order: str = ""
    reason: str = ""  # why its mistakes are none, where they are so together

    def blame(self, name: str, frames: Frames, repairs: tuple[Repair, ...] | None = None) -> None:
        """Note a mistake once, the lines where it shows, and what puts it right; None for a fact."""
        self.mistakes.setdefault(name, frames)
        if repairs is not None:
            known = self.repairs.get(name)
            every = repairs if known is None else (known, *repairs)
            self.repairs[name] = together(every) if every else None


def read_wiring(
    trial: Trial, atoms: Mapping[str, str], contained: Mapping[str, bool | None], busy: Collection[str] = ()
) -> Wiring:
    """Follow one call of a layer made of atoms, of which some are known to contain their own residual.

    Of those that are busy it is known that they take part where the layer stands, whatever this call leaves out.
    """
    wiring = Wiring()
    run, follower = _followed(trial, {p: "layer" if contained.get(p) else kind for p, kind in atoms.items() if kind})
    try:
        steps = follower.steps([*tensors_in((run.output,))][trial.plan.output :])
        wiring.unread += [step.words for step in steps if not step.evidence]
    except UnreadError as why:
        wiring.unread.append(str(why))
    idle = idle_modules(run, follower.module).difference(busy)
    wiring.steps |= _steps(follower.labels, atoms, wiring)
    around = {path: outermost(idle, path) for path in atoms if path in idle}
    unused = {path: (atoms[path], assigned_at(follower.module, held)) for path, held in around.items()}
    _judge_unused(wiring, unused, trial.plan.self_attention)
    if follower.returned:
        putting = Putting(follower, partial(_watched, trial))
        _Stream(wiring, putting, contained, trial.plan.self_attention).follow()
    return wiring


def _watched(trial: Trial) -> Without:
    """Run a layer again, and note where everything stands."""
    watched = Without()
    with torch.no_grad():
        watched.run(trial.returned, trial.inputs())
    return watched


def _followed(trial: Trial, kinds: Mapping[str, str]) -> tuple[Run, Follower]:
    """Run a layer, and say which of the tensors that it is given is the input, and which the memory."""
    inputs, module = trial.inputs(), trial.function
    assert isinstance(module, nn.Module)  # layers are modules
    run = Call(lambda: trial.returned(inputs), (), module=module).run(read=False)
    real = dict.fromkeys(name for name, role in trial.plan.roles if role == REAL_TOKENS)
    follower = Follower(module, run.recorder, kinds, real, trial.plan.layout)
    for name, x in [(_given_as(x, inputs), x) for x in run.recorder.calls[0].inputs]:
        if name:
            follower.given(name, x)
        else:
            follower.conditions.given("beside the tokens", x, run.recorder.calls[0].inputs)
    for name, x in run.recorder.calls[0].kwargs.items():
        if dict(trial.plan.roles).get(name) in (*POSITIONS_OF, REAL_TOKENS):
            follower.given(name, x)
    return run, follower


def _given_as(x: Tensor, inputs: Inputs) -> str:
    """Tell by its numbers, which may be laid out in another way, whether a tensor is the input or the memory."""
    if not x.is_floating_point():
        return ""
    numbers = x.flatten().sort().values
    for name, given in (("x", inputs.query), ("memory", inputs.key), ("memory", inputs.value)):
        if x.numel() == given.numel() and bool((numbers == given.flatten().sort().values).all()):
            return name
    return ""


def _steps(labels: Labels, atoms: Mapping[str, str], wiring: Wiring) -> dict[str, Made]:
    """List what the parts made; matrices that follow one another through an activation are one feed-forward."""
    found: dict[str, Made] = {}
    for label, made in labels.made.items():
        if label in labels.projecting or not made.inputs or made.kind not in FOLLOWED:
            continue
        bare = tuple(replace(x, terms=labels.bare(x.terms)) for x in made.inputs)
        step = replace(
            made, inputs=bare, kind=atoms.get(made.words, "") or ("layer_norm" if made.kind == "layer_norm" else "")
        )
        matrices = [*_matrices(labels, made.inputs[0])] if made.kind in MATRICES else []
        if matrices:
            if labels.kind(made.inputs[0]) in MATRICES:
                wiring.blame("activation_missing", made.frames)
            words = [found.pop(one).words for one in matrices[::-1] if one in found] + [made.words]
            inputs = labels.made[matrices[-1]].inputs
            step = replace(made, kind="feed_forward", words=", ".join(words), inputs=inputs)
        found[label] = step
    return found


def _matrices(labels: Labels, value: Value) -> Iterator[str]:
    """List the matrices that stand before a value, with nothing but activations between, the last one first."""
    made = labels.made.get(value.only)
    if made is None or not made.inputs or made.kind not in (*MATRICES, "activation", "product", "piece"):
        return
    if made.kind in MATRICES:
        yield value.only
        return
    for one in made.inputs:
        yield from _matrices(labels, one)


def _one(label: str) -> Terms:
    return ((label, 1.0),)


def _judge_unused(wiring: Wiring, idle: Mapping[str, tuple[str, Frames]], self_attention: bool) -> None:
    """Name what takes no part in the output: it is not called, or nothing reads what it gives."""
    read = {label for step in wiring.steps.values() for x in step.inputs for label, _ in x.terms}
    called = {path: label for label, step in wiring.steps.items() for path in step.words.split(", ")}
    left_out = {kind for path, (kind, _) in idle.items() if path not in called}
    ran = {step.kind for step in wiring.steps.values()}
    normed = left_out.isdisjoint(SUBLAYERS) and "layer_norm" in ran
    alone = [path for path, (kind, _) in idle.items() if kind in ("", "feed_forward") and path not in called]
    never = "feed_forward" not in ran and (len(alone) > 1 or "feed_forward" in left_out)
    for path, (kind, lines) in idle.items():
        label = called.get(path)
        if label is not None and label not in read:  # else what reads it is reported
            wiring.unused.add(label)
            wiring.blame("norm_never_used" if kind == "layer_norm" else "sublayer_unused", wiring.steps[label].frames)
        elif label is None and kind == "layer_norm" and normed:
            wiring.blame("norm_never_used", lines)
        elif label is None and kind == "attention" and (not self_attention or "attention" not in ran):
            wiring.blame("cross_attention_left_out" if "attention" in ran else "sublayer_unused", lines)
        elif path in alone and never:
            wiring.blame("sublayer_unused", lines)
        else:
            continue
        wiring.idle_norms += [path] if kind == "layer_norm" else []


class _LostError(Exception):
    """The way of the residual stream is lost."""


class _Stream:
    """Follows the residual stream through the sub-layers of a layer, with a memory or alone."""

    def __init__(self, wiring: Wiring, putting: Putting, contained: Mapping[str, bool | None], alone: bool) -> None:
        self.contained, self.putting, follower = contained, putting, putting.follower
        self.labels = labels = follower.labels
        self.memory = "" if alone else labels.add("given", "memory")
        self.bases = {label for label, _ in labels.of_kind(*BASES)}
        self.wiring, self.final, self.steps = wiring, labels.bare(follower.returned), wiring.steps
        self.most = 1 if alone else 2  # attentions in a layer; with more, the end of a stack may stand in it
        read = (x.terms for step in self.steps.values() for x in step.inputs)
        self.sums = [x for x in (*read, self.final) if is_counted(x)]
        self.norms = {label: step for label, step in self.steps.items() if step.kind == "layer_norm"}
        own = {label for label, step in self.steps.items() if not all(self._of_memory(x.terms) for x in step.inputs)}
        self.halves = any(count == HALF for x in self.sums for _, count in x)
        kinds = (*SUBLAYERS, "convolution") if self.halves else SUBLAYERS
        self.sublayers = [label for label in self.steps if label in own and self.steps[label].kind in kinds]
        for label, made in labels.of_kind("conditioned"):  # a norm whose gain is made of a vector is a norm
            value = made.inputs[0]
            if value.only in self.norms:
                self.norms[label] = self.norms[value.only]
            elif self.bases.issuperset(dict(value.terms)):
                self.bases.add(label)
        first = self._raw(self.sublayers[0]) if self.sublayers else ()
        self.now = first if first and self.bases.issuperset(dict(first)) else _one(labels.add("given", "x"))
        self.pre_norm = bool(self.sublayers) and self._normalised(self._query(self.sublayers[0])) == self.now
        self.done: set[str] = set()
        self.sandwiched = self.raw_keys = False

    def follow(self) -> None:
        """Go from x to the output."""
        with suppress(_LostError):
            for label in self.sublayers:
                if label not in self.done:
                    self._follow_one(label, self.steps[label])
            self._judge_end()
            self.wiring.order = self._order()
        self._judge_norms()
        if self.raw_keys and self.wiring.mistakes.keys() == OF_SASREC:
            self.wiring.reason = AS_IN_SASREC
        if self.memory:
            self._judge_cross()

    def _order(self) -> str:
        """Say where the norms stand, and around what; "" where there is none."""
        normed = any(len(step.inputs[0].terms) > 1 for step in self.norms.values())
        paths = ", ".join(self.steps[label].words for label in self.sublayers)
        post = f"post-norm, LayerNorm(x + f(x)), around {paths}" if normed else ""
        if self.sandwiched:
            return f"a norm on both sides, x + LayerNorm(f(LayerNorm(x))), around {paths}"
        return f"pre-norm, x + f(LayerNorm(x)), around {paths}" if self.pre_norm else post

    def _follow_one(self, label: str, step: Made) -> None:
        """Go through one sub-layer."""
        entered = self._query(label)
        if not entered:
            raise _LostError
        if self.now not in (entered, self._normalised(entered)):
            if self._is_known(entered):
                self._stop("sublayer_reads_another_tensor", step.frames, self._entering(label, self.now))
            raise _LostError
        others = self._mixed(step, entered)
        self.raw_keys |= others == [self.now] * (len(step.inputs) - 1) != []
        for mixed in others:
            right = self.putting.taken(label, mixed, entered)
            self.wiring.blame("sublayer_reads_another_tensor", step.frames, right)
        last, used = self._branch(label, entered)
        if label in self.wiring.unused or not used:
            raise _LostError
        if used == as_often_in(used, last):
            self._alone(label, step)
            return
        self._judge_sum(label, last, used, entered)
        self._advance(used, norm_inside=self.halves or bool(self.contained.get(step.words)))

    def _mixed(self, step: Made, entered: Terms) -> list[Terms]:
        """What queries, keys and values are, where they are neither all the stream nor all norms of it."""
        given = [x.terms for x in step.inputs if self._is_known(x.terms)]
        own = self.contained.get(step.words, False) is not False  # then one of them may be the residual
        if step.kind != "attention" or own or any(map(self._of_memory, given)):
            return []
        both = (x for x in given if x != entered)
        return [x for x in both if not self._normalised(x) == self._normalised(entered) == self.now]

    def _entering(self, label: str, want: Terms) -> tuple[Repair, ...]:
        """Let a branch read something else: its norm, its first matrix, or the part itself."""
        first = ([*_matrices(self.labels, self.labels.made[label].inputs[0])] or [label])[-1]
        have = self._query(label)
        norm = have[0][0] if self._normalised(have) is not None else ""
        return self.putting.taken(norm or first, self._normalised(have) or have, want)

    def _is_known(self, x: Terms) -> bool:
        return is_counted(x) and {*dict(x)} <= {*self.bases, *self.sublayers, *self.norms}

    def _branch(self, label: str, entered: Terms) -> tuple[str, Terms]:
        """The end of a branch, and the first value that it is seen in: a norm or a scale may stand in between."""
        used, reader = self._first_sum_with(label), self._reader(label)
        if used == _one(label) and reader and self.steps[reader].kind in ("layer_norm", ""):
            whole = self._first_sum_with(reader)
            if whole and summed(whole, _one(reader), -1) in (self.now, entered if self.pre_norm else None):
                return reader, whole
        return label, used

    def _judge_sum(self, label: str, last: str, used: Terms, entered: Terms) -> None:
        """Say what is wrong with what stands beside a branch in the sum that it ends in."""
        own, end, step = as_often_in(used, last), self.steps[last], self.steps[label]
        beside, right = summed(used, own, -1), partial(self.putting.given, used, summed(self.now, own))
        if end.kind == "layer_norm" and beside == self.now and self.pre_norm:
            self.sandwiched = True  # a norm on both sides of a branch is no slip
        elif end.kind == "layer_norm" and beside == self.now:
            inside = self.putting.given(_one(label), summed(self.now, _one(label)))
            self.wiring.blame("residual_after_norm", end.frames, self.putting.given(used, _one(last)) + inside)
        elif self.contained.get(step.words) and beside == self.now == entered:
            self.wiring.blame("residual_added_twice", self._lines_of(used, last), self.putting.given(used, _one(last)))
        elif any(count > 1 for _, count in beside):
            self.wiring.blame("residual_added_twice", self._lines_of(used, last), right())
        elif beside == entered != self.now and self.pre_norm:  # else one more LayerNorm stands on the stream itself
            self.wiring.blame("residual_from_normalised", self._lines_of_sum(last), right())
        elif beside not in (self.now, entered):
            others = [x for x in self.sublayers if x in dict(beside) and self._raw(x) == self._raw(label)]
            if any(self.steps[x].kind == "convolution" for x in (label, *others)) and others:
                raise _LostError  # side by side, as in a Branchformer
            if not others or beside != summed(self.now, _one(others[0])):
                self._stop("residual_from_elsewhere", self._lines_of_sum(label), right())
            self.done.add(others[0])
            if self._query(others[0]) == self._query(label) != self._raw(label):  # one norm serves both
                return
            apart = self._entering(others[0], summed(self.now, _one(last)))
            self.wiring.blame("sublayers_side_by_side", self._lines_of_sum(label), apart)

    def _lines_of(self, whole: Terms, label: str) -> Frames:
        """The lines that add up a whole sum, which may begin on other lines."""
        return self.labels.sums.get(whole) or self._lines_of_sum(label)

    def _lines_of_sum(self, label: str) -> Frames:
        """The lines that first add what a part gave to something."""
        return self.labels.summed.get(label, self.steps[label].frames)

    def _advance(self, used: Terms, norm_inside: bool = False) -> None:
        """The sum is the stream now; with post-norm its LayerNorm is, unless the part may hold the norm itself."""
        goes_on = norm_inside and any({*used} < {*x} for x in self.sums)
        self.now = used if self.pre_norm or goes_on else self._after(used)

    def _after(self, used: Terms) -> Terms:
        """The LayerNorm of a sum, if there is one."""
        return next((_one(label) for label, step in self.norms.items() if step.inputs[0].terms == used), used)

    def _alone(self, label: str, step: Made) -> None:
        """A sub-layer that is summed with nothing: it holds its own residual, or one is missing."""
        contained = self.contained.get(step.words, False)
        if contained or self.labels.made[label].kind == "layer":
            self.now = _one(label)
            return
        last = self._scaled(label)
        reader, whole = self._reader(last), summed(self.now, _one(last))
        if reader in self.sublayers and whole in self.sums:
            right = self._entering(reader, whole) or self._entering(reader, self._after(whole))
            self._stop("sublayer_reads_another_tensor", self.steps[reader].frames, right)
        if contained is None:
            raise _LostError
        lines = step.frames if self.pre_norm or reader not in self.norms else self.steps[reader].frames
        self.wiring.blame("residual_missing", lines, self.putting.given(_one(last), whole))
        self._advance(_one(last))

    def _scaled(self, label: str) -> str:
        """What gains make of a branch."""
        reader = self._reader(label)
        return self._scaled(reader) if reader and self.labels.made[reader].kind in ("gain", "conditioned") else label

    def _judge_end(self) -> None:
        if self.final == self.now:
            return
        if not self.pre_norm or self._normalised(self.final) != self.now:
            raise _LostError
        if sum(self.steps[label].kind == "attention" for label in self.sublayers) <= self.most:
            self.wiring.blame("norm_final_extra", self.norms[self.final[0][0]].frames)

    def _judge_cross(self) -> None:
        """Say whether the cross-attention is another one, comes second, and takes keys and values from the memory."""
        attentions = [step for step in self.steps.values() if step.kind == "attention"]
        counts = [sum(self._of_memory(x.terms) for x in step.inputs) for step in attentions]
        strange = {label for label, _ in self.labels.of_kind("strange")}  # made by an operation between the parts
        followed = [x for x in attentions if all(strange.isdisjoint(dict(one.terms)) for one in x.inputs)]
        wrong = [x for x, n in zip(attentions, counts, strict=True) if 0 < n < len(x.inputs) - 1 and x in followed]
        own = {step.words for step, n in zip(attentions, counts, strict=True) if not n}
        for step in (step for step, n in zip(attentions, counts, strict=True) if n and step.words in own):
            self.wiring.mistakes.pop("cross_attention_left_out", None)  # since another one is called in its place
            self.wiring.blame("attention_shared", step.frames)
        if not counts or "cross_attention_left_out" in self.wiring.mistakes:
            return
        if not any(counts):
            wrong = attentions[-1:] if all(map(self._is_known_whole, attentions)) else []
        if wrong:
            self.wiring.blame("cross_attention_from_decoder", wrong[0].frames)
        elif len(counts) > 1 and counts[0]:
            self.wiring.blame("sublayers_in_another_order", attentions[0].frames)

    def _is_known_whole(self, step: Made) -> bool:
        """Whether all tokens that a part is given are known."""
        given = [x for call in self.putting.parts if call.path == step.words for x in call.inputs if x.dim() > 2]
        followed = all(id(x) in self.putting.follower.values for x in given if x.is_floating_point())
        return followed and all(self._is_known(x.terms) for x in step.inputs)

    def _judge_norms(self) -> None:
        """Name a LayerNorm that stands in two places."""
        first: dict[str, Terms] = {}
        for step in self.norms.values():
            given = step.inputs[0].terms
            own = self.norms.get(given[0][0])
            again = own is not None and own.words == step.words  # of what it gave itself
            if not again and given != _one(self.memory) and first.setdefault(step.words, given) != given:
                self.wiring.blame("norm_shared", step.frames)

    def _stop(self, mistake: str, frames: Frames, repairs: tuple[Repair, ...]) -> None:
        self.wiring.blame(mistake, frames, repairs)
        raise _LostError

    def _query(self, label: str) -> Terms:
        """What a sub-layer reads besides the memory; () where that is scaled."""
        read = next((x.terms for x in self.steps[label].inputs if not self._of_memory(x.terms)), ())
        return read if is_counted(read) else ()

    def _raw(self, label: str) -> Terms:
        """What a sub-layer reads, before a LayerNorm."""
        return self._normalised(self._query(label)) or self._query(label)

    def _of_memory(self, x: Terms) -> bool:
        """Whether it is the memory, times any number, or what parts made of that alone."""
        label = x[0][0] if len(x) == 1 and self.memory else ""
        made = label in self.steps and all(self._of_memory(one.terms) for one in self.steps[label].inputs)
        return made or (label == self.memory != "")

    def _normalised(self, x: Terms) -> Terms | None:
        """What a LayerNorm was given, if x is what one gave."""
        norm = self.norms.get(x[0][0]) if len(x) == 1 and x[0][1] == 1 else None
        return None if norm is None else norm.inputs[0].terms

    def _reader(self, label: str) -> str:
        """The first part that takes what another gave as it is; "" for none."""
        return next((reader for reader, step in self.steps.items() if step.inputs[0].terms == _one(label)), "")

    def _first_sum_with(self, label: str) -> Terms:
        """The first value that a label is seen in: a sum, or itself alone."""
        return next((x for x in self.sums if label in dict(x)), ())
