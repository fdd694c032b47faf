"""Name what is wrong with how the sub-layers of one layer are wired, in the reading that its program is made of.

One forward pass is followed: every value is a sum of what was given, the input x and the memory, and of what the parts
gave. The residual stream goes from x to the output. Where it cannot be followed, that is said.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor, nn

from equivalence_tests.checker.engine.names import Run
from equivalence_tests.checker.engine.running import Call, called_by_hooks
from equivalence_tests.checker.engine.taking_part import idle_modules
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.layers.whole_steps import Follower
from equivalence_tests.checker.layers.whole_values import BASES, Labels, Terms, Value
from equivalence_tests.checker.reach.calling import Inputs, Trial
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.lines import Frames

Sum = tuple[str, ...]
SUBLAYERS = ("attention", "feed_forward")
MATRICES = ("linear", "embedding")  # a matrix that reads the input as it is embeds it


@dataclass(frozen=True)
class Step:
    """What one part made of its inputs.

    Args:
        path: Where it is.
        kind: attention, feed_forward, layer_norm, or "" for another part with parameters.
        inputs: What went in, each as a sum of labels; None where one is scaled.
        output: The label of what came out.
        contained: Whether it adds its own residual; None if that is not known.
        frames: The lines that called it.
        summed: The lines that first add what came out to something.
    """

    path: str
    kind: str
    inputs: tuple[Sum | None, ...]
    output: str
    contained: bool | None = False
    frames: Frames = ()
    summed: Frames = ()


@dataclass
class Wiring:
    """What was read: mistakes with their lines, what could not be read, the steps, what nothing uses, and the order."""

    mistakes: dict[str, Frames] = field(default_factory=dict)
    idle_norms: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    unused: set[str] = field(default_factory=set)
    order: str = ""

    def blame(self, name: str, frames: Frames) -> None:
        """Note a mistake once, and the lines where it shows."""
        self.mistakes.setdefault(name, frames)


def read_wiring(trial: Trial, atoms: Mapping[str, str], contained: Mapping[str, bool | None]) -> Wiring:
    """Follow one call of a layer.

    Args:
        trial: How the layer is called.
        atoms: The sub-modules that are looked at as wholes, and what they are.
        contained: Of those, whether they add their own residual.

    Returns:
        Mistakes, and what could not be read.
    """
    wiring = Wiring()
    run, follower = _followed(trial, {p: "layer" if contained.get(p) else kind for p, kind in atoms.items() if kind})
    try:
        steps = follower.steps([*tensors_in((run.output,))][trial.plan.output :])
        wiring.unread += [step.words for step in steps if not step.evidence]
    except UnreadError as why:
        wiring.unread.append(str(why))
    idle = idle_modules(run, follower.module)
    wiring.steps += _steps(follower.labels, atoms, contained, wiring)
    _judge_unused(wiring, {path: kind for path, kind in atoms.items() if path in idle}, trial.plan.self_attention)
    if follower.returned:
        _Stream(wiring, follower, trial.plan.self_attention).follow()
    return wiring


def _followed(trial: Trial, kinds: Mapping[str, str]) -> tuple[Run, Follower]:
    """Run a layer, and say which of the tensors that it is given is the input, and which the memory."""
    inputs, module = trial.inputs(), trial.function
    assert isinstance(module, nn.Module)  # layers are modules
    with called_by_hooks(module):
        run = Call(lambda: trial.returned(inputs), (), module=module).run(read=False)
    follower = Follower(module, run.recorder, kinds, ())
    for name, x in [(_given_as(x, inputs), x) for x in run.recorder.calls[0].inputs]:
        if name:
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


def _steps(
    labels: Labels, atoms: Mapping[str, str], contained: Mapping[str, bool | None], wiring: Wiring
) -> Iterator[Step]:
    """List what the parts made; matrices that follow one another through an activation are one feed-forward."""
    found: dict[str, Step] = {}
    for label, made in labels.made.items():
        if not made.inputs or made.kind not in ("layer", "layer_norm", "gain", *MATRICES, *SUBLAYERS):
            continue
        kind = atoms.get(made.words, "") or ("layer_norm" if made.kind == "layer_norm" else "")
        paths, inputs = [made.words], made.inputs
        matrices = [*_matrices(labels, made.inputs[0])] if made.kind in MATRICES else []
        if matrices:
            if labels.kind(made.inputs[0]) in MATRICES:
                wiring.blame("activation_missing", made.frames)
            kind, inputs = "feed_forward", labels.made[matrices[-1]].inputs
            paths = [found.pop(one).path for one in matrices[::-1] if one in found] + paths
        read = tuple(_sum(value.terms) for value in inputs)
        found[label] = Step(
            ", ".join(paths),
            kind,
            read,
            label,
            contained.get(made.words, False),
            made.frames,
            labels.summed.get(label, made.frames),
        )
    yield from found.values()


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


def _sum(terms: Terms) -> Sum | None:
    """Write a sum as labels, each as often as it is in it; None where one is not counted in whole numbers."""
    if any(count != int(count) or count < 0 for _, count in terms):
        return None
    return tuple(sorted(label for label, count in terms for _ in range(int(count))))


def _judge_unused(wiring: Wiring, idle: Mapping[str, str], self_attention: bool) -> None:
    """Name what takes no part in the output: it is not called, or nothing reads what it gives."""
    read = {label for step in wiring.steps for x in step.inputs for label in x or ()}
    called = {path: step for step in wiring.steps for path in step.path.split(", ")}
    left_out = {kind for path, kind in idle.items() if path not in called}
    normed = left_out.isdisjoint(SUBLAYERS) and any(step.kind == "layer_norm" for step in wiring.steps)
    for path, kind in idle.items():
        step = called.get(path)
        if step is not None and step.output not in read:  # else what reads it is reported
            wiring.unused.add(step.output)
            wiring.blame("norm_never_used" if kind == "layer_norm" else "sublayer_unused", step.frames)
        elif step is None and kind == "layer_norm" and normed:
            wiring.blame("norm_never_used", ())
        elif step is None and kind == "attention" and not self_attention:
            wiring.blame("cross_attention_left_out", ())
        else:
            continue
        wiring.idle_norms += [path] if kind == "layer_norm" else []


class _LostError(Exception):
    """The way of the residual stream is lost."""


class _Stream:
    """Follows the residual stream through the sub-layers of a layer.

    Args:
        wiring: Receives what is found.
        follower: Followed the run.
        self_attention: Whether there is no memory.
    """

    def __init__(self, wiring: Wiring, follower: Follower, self_attention: bool) -> None:
        labels = follower.labels
        self.memory = "" if self_attention else labels.add("given", "memory")
        self.bases = {label for label, _ in labels.of_kind(*BASES)}
        self.wiring, self.final, self.steps = wiring, _sum(follower.returned), wiring.steps
        self.most = 1 if self_attention else 2  # attentions in a layer; with more, the end of a stack may stand in it
        self.sums = [x for x in (*(x for step in self.steps for x in step.inputs), self.final) if x is not None]
        self.norms = {step.output: step for step in self.steps if step.kind == "layer_norm"}
        self.sublayers = [step for step in self.steps if step.kind in SUBLAYERS]
        first = self._raw(self.sublayers[0]) if self.sublayers else None
        self.now: Sum = first if first and self.bases.issuperset(first) else (labels.add("given", "x"),)
        self.pre_norm = bool(self.sublayers) and self._normalised(self._query(self.sublayers[0])) == self.now
        self.done: set[str] = set()

    def follow(self) -> None:
        """Go from x to the output."""
        with suppress(_LostError):
            for step in self.sublayers:
                if step.output not in self.done:
                    self._follow_one(step)
            self._judge_end()
            self.wiring.order = self._order()
        self._judge_norms()
        if self.memory:
            self._judge_cross()

    def _order(self) -> str:
        """Say where the norms stand, and around what; "" where there is none."""
        normed = [x for step in self.norms.values() for x in step.inputs[:1] if x is not None and len(x) > 1]
        paths = ", ".join(step.path for step in self.sublayers)
        post = f"post-norm, LayerNorm(x + f(x)), around {paths}" if normed else ""
        return f"pre-norm, x + f(LayerNorm(x)), around {paths}" if self.pre_norm else post

    def _follow_one(self, step: Step) -> None:
        """Go through one sub-layer."""
        entered = self._query(step)
        if entered is None:
            raise _LostError
        if self.now not in (entered, self._normalised(entered)):
            if self._is_known(entered):
                self._stop("sublayer_reads_another_tensor", step.frames)
            raise _LostError
        if self._is_mixed(step, entered):
            self.wiring.blame("sublayer_reads_another_tensor", step.frames)
        if step.output in self.wiring.unused:
            raise _LostError
        last, used = self._branch(step, entered)
        if used is None:
            raise _LostError
        beside = _without(used, last.output)
        if not beside:
            self._alone(step)
            return
        self._judge_sum(step, last, beside, entered)
        self._advance(used)

    def _is_mixed(self, step: Step, entered: Sum) -> bool:
        """Whether queries, keys and values are neither all the stream nor all norms of it."""
        given = [x for x in step.inputs if x is not None and self._is_known(x)]
        own = step.contained is not False  # then one of them may be the residual
        if step.kind != "attention" or own or any(map(self._of_memory, given)):
            return False
        return any(x != entered and not self._normalised(x) == self._normalised(entered) == self.now for x in given)

    def _is_known(self, x: Sum) -> bool:
        return set(x) <= {*self.bases, *(step.output for step in self.sublayers), *self.norms}

    def _branch(self, step: Step, entered: Sum) -> tuple[Step, Sum | None]:
        """The end of a branch, and the first value that it is seen in: a norm or a scale may stand in between."""
        used, reader = self._first_sum_with(step.output), self._reader(step.output)
        if used == (step.output,) and reader is not None and reader.kind in ("layer_norm", ""):
            summed = self._first_sum_with(reader.output)
            if summed is not None and _without(summed, reader.output) in (self.now, entered if self.pre_norm else None):
                return reader, summed
        return step, used

    def _judge_sum(self, step: Step, last: Step, beside: Sum, entered: Sum) -> None:
        """Say what is wrong with what stands beside a branch in the sum that it ends in."""
        if last.kind == "layer_norm" and beside == self.now:
            self.wiring.blame("residual_after_norm", last.frames)
        elif len(set(beside)) < len(beside):
            self.wiring.blame("residual_added_twice", last.summed)
        elif beside == entered != self.now and self.pre_norm:  # else one more LayerNorm stands on the stream itself
            self.wiring.blame("residual_from_normalised", last.summed)
        elif beside not in (self.now, entered):
            others = [s for s in self.sublayers if s.output in beside and self._raw(s) == self._raw(step)]
            if not others or beside != _with(self.now, others[0].output):
                self._stop("residual_from_elsewhere", step.summed)
            self.wiring.blame("sublayers_side_by_side", step.summed)
            self.done.add(others[0].output)

    def _advance(self, used: Sum) -> None:
        """The sum is the stream now; with post-norm its LayerNorm is."""
        self.now = used
        norm = next((s for s in self.norms.values() if s.inputs and s.inputs[0] == used), None)
        if norm is not None and not self.pre_norm:
            self.now = (norm.output,)

    def _alone(self, step: Step) -> None:
        """A sub-layer that is summed with nothing: it holds its own residual, or one is missing."""
        if step.contained:
            self.now = (step.output,)
            return
        reader = self._reader(step.output)
        if reader is not None and reader.kind in SUBLAYERS and _with(self.now, step.output) in self.sums:
            self._stop("sublayer_reads_another_tensor", reader.frames)
        if step.contained is None:
            raise _LostError
        self.wiring.blame("residual_missing", step.frames)
        self._advance((step.output,))

    def _judge_end(self) -> None:
        if self.final is None:
            raise _LostError
        if self.final == self.now:
            return
        if not self.pre_norm or self._normalised(self.final) != self.now:
            raise _LostError
        if sum(step.kind == "attention" for step in self.sublayers) <= self.most:
            self.wiring.blame("norm_final_extra", self.norms[self.final[0]].frames)

    def _judge_cross(self) -> None:
        """Say whether the cross-attention comes second, and takes keys and values from the memory."""
        attentions = [step for step in self.steps if step.kind == "attention"]
        counts = [sum(x is not None and self._of_memory(x) for x in step.inputs) for step in attentions]
        wrong = [step for step, n in zip(attentions, counts, strict=True) if 0 < n < len(step.inputs) - 1]
        if not counts or "cross_attention_left_out" in self.wiring.mistakes:
            return
        if not any(counts):
            wrong = attentions[-1:] if all(x is not None for step in attentions for x in step.inputs) else []
        if wrong:
            self.wiring.blame("cross_attention_from_decoder", wrong[0].frames)
        elif len(counts) > 1 and counts[0]:
            self.wiring.blame("sublayers_in_another_order", attentions[0].frames)

    def _judge_norms(self) -> None:
        """Name a LayerNorm that stands in two places."""
        first: dict[str, Sum | None] = {}
        for step in self.norms.values():
            given = step.inputs[0]
            if given != (self.memory,) and first.setdefault(step.path, given) != given:
                self.wiring.blame("norm_shared", step.frames)

    def _stop(self, mistake: str, frames: Frames) -> None:
        self.wiring.blame(mistake, frames)
        raise _LostError

    def _query(self, step: Step) -> Sum | None:
        """What a sub-layer reads besides the memory."""
        return next((x for x in step.inputs if x is None or not self._of_memory(x)), None)

    def _raw(self, step: Step) -> Sum | None:
        """What a sub-layer reads, before a LayerNorm."""
        return self._normalised(self._query(step)) or self._query(step)

    def _of_memory(self, x: Sum) -> bool:
        return (self.memory,) in (x, self._normalised(x))

    def _normalised(self, x: Sum | None) -> Sum | None:
        """What a LayerNorm was given, if x is what one gave."""
        norm = self.norms.get(x[0]) if x is not None and len(x) == 1 else None
        return norm.inputs[0] if norm is not None and norm.inputs else None

    def _reader(self, label: str) -> Step | None:
        """The first step that takes what another gave as it is."""
        return next((step for step in self.steps if step.inputs and step.inputs[0] == (label,)), None)

    def _first_sum_with(self, label: str) -> Sum | None:
        """The first value that a label is seen in: a sum, or itself alone."""
        return next((x for x in self.sums if label in x), None)


def _with(terms: Sum, label: str) -> Sum:
    return tuple(sorted((*terms, label)))


def _without(terms: Sum, label: str) -> Sum:
    place = terms.index(label)
    return terms[:place] + terms[place + 1 :]
