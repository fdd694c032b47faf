"""Read how the sub-layers of one layer are wired: a proof, sum by sum, or a mistake with its name.

One forward pass is traced. Every value that matters is written as a sum of what went before: the input x, the memory,
and what each sub-module gave. The residual stream is followed from x to the output. Where it cannot be followed, that
is said, and nothing is claimed.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.same import distance
from equivalence_tests.checker.engine.taking_part import idle_modules
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.parts.feed_forwards import ACTIVATIONS
from equivalence_tests.checker.reach.calling import Inputs, Trial
from equivalence_tests.checker.reach.tracing import ModuleCall, tensors_in, trace
from equivalence_tests.checker.reporting.lines import Frames

Sum = tuple[str, ...]
SUBLAYERS = ("attention", "feed_forward")
ROUNDING = 1e-10


@dataclass(frozen=True)
class Step:
    """One call of a sub-module.

    Args:
        path: Where it is.
        kind: attention, feed_forward, layer_norm, or "" for another module with parameters.
        inputs: What went in, each as a sum of labels; None where it is no sum.
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


class Values:
    """Tensors by the sums that they are.

    Args:
        inputs: What a layer is given: x, and the memory where that is another tensor.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.batch, self.width = len(inputs.query), inputs.query.size(-1)
        given = {id(x): x for x in (inputs.query, inputs.key, inputs.value)}
        self.known = [("x" if x is inputs.query else "memory", x) for x in given.values()]

    def add(self, label: str, tensor: Tensor) -> None:
        """Give a tensor a label of its own."""
        self.known.append((label, self._upright(tensor)))

    def as_sum(self, x: Tensor) -> Sum | None:
        """Write a tensor as a sum of labelled ones, each as often as it is in it; None if it is none."""
        tensor = self._upright(x)
        terms = [(label, value) for label, value in self.known if value.shape == tensor.shape]
        if not terms:
            return None
        columns = torch.stack([value.flatten() for _, value in terms], -1)
        counts = torch.linalg.lstsq(columns, tensor.flatten()[:, None]).solution.round()
        if bool((counts < 0).any()) or not _equal((columns @ counts).view(tensor.shape), tensor):
            return None
        return tuple(sorted(label for (label, _), n in zip(terms, counts, strict=True) for _ in range(int(n))))

    def moved(self, x: Tensor) -> tuple[Tensor, torch.Size] | None:
        """Say where the tokens of a labelled tensor stand in one that holds the same in another order, as windows do.

        Returns:
            For each token of the labelled tensor its place, and the shape of that tensor; None if there is none.
        """
        rows = x.flatten(0, -2)
        for _, value in self.known:
            if value.numel() == x.numel() and value.size(-1) == x.size(-1):
                places = torch.cdist(value.flatten(0, -2), rows).argmin(1)
                if len(places.unique()) == len(rows) and _equal(rows[places], value.flatten(0, -2)):
                    return places, value.shape
        return None

    def tensor(self, label: str) -> Tensor:
        """Give the tensor of a label."""
        return dict(self.known)[label]

    def _upright(self, x: Tensor) -> Tensor:
        """Turn a tensor to (b, l, e), if it can be."""
        wanted = (self.batch, self.width)
        return next((t for t in _turned(x) if (t.size(0), t.size(-1)) == wanted), x)


def _turned(x: Tensor) -> list[Tensor]:
    """The tensor, batch and length exchanged, and length and features exchanged (convolutions)."""
    return [x, x.transpose(0, 1), x.transpose(1, 2)] if x.dim() == 3 else []


def _equal(x: object, y: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == y.shape and distance(x, y) < ROUNDING


def read_wiring(trial: Trial, atoms: Mapping[str, str], contained: Mapping[str, bool | None]) -> Wiring:
    """Trace one call of a layer and follow the residual stream.

    Args:
        trial: How the layer is called.
        atoms: The sub-modules that are looked at as wholes, and what they are.
        contained: Of those, whether they add their own residual.

    Returns:
        Mistakes, and what could not be read.
    """
    inputs, module, seen = trial.inputs(), trial.function, list[ModuleCall]()
    assert isinstance(module, nn.Module)  # layers are modules
    alone = trial.plan.self_attention

    def traced() -> list[Tensor]:
        returned = list[Tensor]()
        seen.extend(trace(module, lambda: returned.extend(trial.tensors(inputs))))
        return returned

    run, values, wiring = Call(traced, (), module=module).run(read=False), Values(inputs), Wiring()
    calls = {f"{call.path}#{place}": call for place, call in enumerate(seen) if call.path in atoms}
    sums = [operation for operation in run.operations if operation.name == "add"]
    steps = _steps(calls, values, atoms, contained, trial.sizes.embed_dim)
    linears = {path for path, child in module.named_modules() if isinstance(child, nn.Linear | nn.Conv1d)}
    for step in list(_feed_forwards_joined(steps, values, calls, wiring, linears)):
        wiring.steps.append(replace(step, summed=_where_summed(step, values, sums)))
    idle = idle_modules(run, module)
    _judge_unused(wiring, {path: kind for path, kind in atoms.items() if path in idle}, alone)
    stream = _Stream(wiring, values.as_sum(trial.output_in(run.output)), alone)
    stream.follow()
    _judge_shared_norms(wiring)
    if not alone:
        stream.judge_cross()
    return wiring


def _steps(
    calls: Mapping[str, ModuleCall],
    values: Values,
    atoms: Mapping[str, str],
    contained: Mapping[str, bool | None],
    width: int,
) -> Iterator[Step]:
    for label, call in calls.items():
        output = next(tensors_in((call.output,)), None)
        if output is None or output.dim() != 3:
            continue
        given = [x for x in tensors_in((call.args, call.kwargs)) if x.dim() == 3 and width in x.shape]
        inputs = tuple(values.as_sum(x) for x in given)
        apart = bool(given) and not any(inputs) and output.shape == given[0].shape
        moved = values.moved(given[0]) if apart else None
        if moved is not None:
            places, shape = moved
            alike = [x for x in (*given, output) if x.shape == given[0].shape]
            *entered, output = (x.flatten(0, -2)[places].view(shape) for x in alike)
            inputs = tuple(values.as_sum(x) for x in entered)
        if len(values.as_sum(output) or ()) == 1:
            continue  # it hands on what it gets, or what another call gave
        values.add(label, output)
        yield Step(call.path, atoms[call.path], inputs, label, contained.get(call.path, False), call.frames)


def _where_summed(step: Step, values: Values, sums: list[Operation]) -> Frames:
    """Give the lines that first add what a step gave to something; those that called it where none do."""
    given = values.tensor(step.output)
    adding = (op for op in sums if any(_equal(given, x) for slot in op.inputs for x in _turned(slot.value)))
    return next((operation.frames for operation in adding), step.frames)


def _feed_forwards_joined(
    steps: Iterator[Step],
    values: Values,
    calls: Mapping[str, ModuleCall],
    wiring: Wiring,
    linears: Collection[str],
) -> Iterator[Step]:
    """Take matrices that follow one another through an activation for one feed-forward."""
    waiting: Step | None = None
    for step in steps:
        entered = next(tensors_in((calls[step.output].args, calls[step.output].kwargs)), None)
        if waiting is not None and step.kind == "" and entered is not None:
            activation = _activation_between(values.tensor(waiting.output), entered)
            joined = activation not in ("", "nothing")
            if activation == "nothing" and {waiting.path, step.path} <= set(linears):  # others may be norms
                wiring.blame("activation_missing", step.frames)
                joined = True
            if joined:
                step = replace(step, path=f"{waiting.path}, {step.path}", kind="feed_forward", inputs=waiting.inputs)
                waiting = None
        if waiting is not None:
            yield waiting
        waiting = step if step.kind == "" else None
        if waiting is None:
            yield step
    if waiting is not None:
        yield waiting


def _activation_between(before: Tensor, after: Tensor) -> str:
    """Name the activation that turns one tensor into another; "" if none does."""
    fits = (n for n, f in reversed(ACTIVATIONS.items()) if any(_equal(f(before), x) for x in _turned(after)))
    return next(fits, "")


def _judge_unused(wiring: Wiring, idle: Mapping[str, str], self_attention: bool) -> None:
    """Name what takes no part in the output: it is not called, or nothing reads what it gives."""
    read = {label for step in wiring.steps for x in step.inputs for label in x or ()}
    called = {path: step for step in wiring.steps for path in step.path.split(", ")}
    left_out = {kind for path, kind in idle.items() if path not in called}
    normed = left_out.isdisjoint(SUBLAYERS) and any(step.kind == "layer_norm" for step in wiring.steps)
    for path, kind in idle.items():
        step = called.get(path)
        if step is not None and step.output not in read:  # else what reads it is told
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
    """The way of the residual stream is lost: why, or "" where that is reported already."""


class _Stream:
    """Follows the residual stream through the sub-layers of a layer.

    Args:
        wiring: Receives what is found.
        final: What comes out.
        self_attention: Whether there is no memory.
    """

    def __init__(self, wiring: Wiring, final: Sum | None, self_attention: bool) -> None:
        self.wiring, self.final, self.steps = wiring, final, wiring.steps
        self.most = 1 if self_attention else 2  # attentions in a layer; with more, the end of a stack may stand in it
        self.sums = [x for x in (*(x for step in self.steps for x in step.inputs), final) if x is not None]
        self.norms = {step.output: step for step in self.steps if step.kind == "layer_norm"}
        self.sublayers = [step for step in self.steps if step.kind in SUBLAYERS]
        self.now: Sum = ("x",)
        self.pre_norm = bool(self.sublayers) and self._normalised(self._query(self.sublayers[0])) == ("x",)
        self.done: set[str] = set()

    def follow(self) -> None:
        """Go from x to the output."""
        branches = {(step.output,) for step in self.sublayers}  # what else reads one is a scale
        used = [s for s in self.steps if s.kind == "" and s.output not in self.wiring.unused]
        strange = [step.path for step in used if not (step.inputs and step.inputs[0] in branches)]
        self.wiring.unread += [f"{path} is no part that is known" for path in strange[:1]]
        try:
            for step in self.sublayers:
                if step.output not in self.done:
                    self._follow_one(step)
            self._judge_end()
            self.wiring.order = self._order()
        except _LostError as lost:
            self.wiring.unread += filter(None, lost.args)

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
            raise _LostError(f"what goes into {step.path} is no sum of what came before")
        if self.now not in (entered, self._normalised(entered)):
            if self._is_known(entered):
                self._stop("sublayer_reads_another_tensor", step.frames)
            raise _LostError(f"what goes into {step.path} is not the residual stream")
        if self._is_mixed(step, entered):
            self.wiring.blame("sublayer_reads_another_tensor", step.frames)
        if step.output in self.wiring.unused:
            raise _LostError
        last, used = self._branch(step, entered)
        if used is None:
            raise _LostError(f"what {step.path} gives is not seen in any sum")
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
        return set(x) <= {"x", "memory", *(step.output for step in self.sublayers), *self.norms}

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
            raise _LostError(f"whether {step.path} adds a residual of its own is not known")
        self.wiring.blame("residual_missing", step.frames)
        self._advance((step.output,))

    def _judge_end(self) -> None:
        if self.final is None:
            raise _LostError("the output is no sum of what the sub-modules gave")
        if self.final == self.now:
            return
        if not self.pre_norm or self._normalised(self.final) != self.now:
            raise _LostError("the output is not where the residual stream ends")
        if sum(step.kind == "attention" for step in self.sublayers) <= self.most:
            self.wiring.blame("norm_final_extra", self.norms[self.final[0]].frames)

    def judge_cross(self) -> None:
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
        return ("memory",) in (x, self._normalised(x))

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


def _judge_shared_norms(wiring: Wiring) -> None:
    """Name a LayerNorm that stands in two places."""
    first: dict[str, Sum | None] = {}
    for step in (step for step in wiring.steps if step.kind == "layer_norm"):
        given = step.inputs[0] if step.inputs else ("memory",)
        if given != ("memory",) and first.setdefault(step.path, given) != given:
            wiring.blame("norm_shared", step.frames)
