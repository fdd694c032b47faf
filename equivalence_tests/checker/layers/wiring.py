"""Read how the sub-layers of one layer are wired: a proof, sum by sum, or a mistake with its name.

One forward pass is traced. Every value that matters is written as a sum of what went before: the input x, the memory,
and what each sub-module gave. The residual stream is followed from x to the output. Where it cannot be followed, that
is said, and nothing is claimed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.distance import distance
from equivalence_tests.checker.engine.ran import operations_of
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.parts.feed_forwards import ACTIVATIONS
from equivalence_tests.checker.reach.calling import CallPlan, Trial
from equivalence_tests.checker.reach.tracing import ModuleCall, tensors_in, trace
from equivalence_tests.checker.reporting.lines import Frames

__all__ = ["Step", "Wiring", "read_wiring"]

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
        place: Which call of a sub-module it is.
        contained: Whether it adds its own residual; None if that is not known.
        frames: The lines that called it.
        summed: The lines that first add what came out to something.
    """

    path: str
    kind: str
    inputs: tuple[Sum | None, ...]
    output: str
    place: int
    contained: bool | None = False
    frames: Frames = ()
    summed: Frames = ()


@dataclass
class Wiring:
    """What was read: the mistakes with their lines, what could not be read, the steps, and what nothing uses."""

    mistakes: dict[str, Frames] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    unused: set[str] = field(default_factory=set)

    def blame(self, name: str, frames: Frames) -> None:
        """Note a mistake once, and the lines where it shows."""
        self.mistakes.setdefault(name, frames)


class Values:
    """Tensors by the sums that they are.

    Args:
        batch: Number of samples; with ``width`` it tells how a tensor is turned.
        width: Number of features.
    """

    def __init__(self, batch: int, width: int) -> None:
        self.batch, self.width = batch, width
        self.known: list[tuple[str, Tensor]] = []

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


def read_wiring(
    trial: Trial,
    atoms: Mapping[str, str],
    contained: Mapping[str, bool | None],
) -> Wiring:
    """Trace one call of a layer and follow the residual stream.

    Args:
        trial: How the layer is called.
        atoms: The sub-modules that are looked at as wholes, and what they are.
        contained: Of those, whether they add their own residual.

    Returns:
        Mistakes, and what could not be read.
    """
    inputs, plan = trial.inputs(), trial.plan
    values = Values(len(inputs.query), inputs.query.size(-1))
    values.add("x", inputs.query)
    if not plan.self_attention:
        for memory in {id(x): x for x in (inputs.key, inputs.value)}.values():
            values.add("memory", memory)
    module, seen = trial.function, list[ModuleCall]()
    assert isinstance(module, nn.Module)  # layers are modules
    ran = operations_of(lambda: seen.extend(trace(module, lambda: trial.returned(inputs))))
    calls = {place: call for place, call in enumerate(seen) if call.path in atoms}
    sums = [operation for operation in ran if operation.name.strip("_") in ("add", "iadd", "radd")]
    wiring = Wiring()
    steps = [
        replace(step, summed=_where_summed(step, values, sums))
        for step in _steps(calls, values, atoms, contained, trial.sizes.embed_dim)
    ]
    wiring.steps = list(_feed_forwards_joined(steps, values, calls, wiring))
    with torch.no_grad():
        final = values.as_sum(trial.output(inputs))

    def told(place: int | None) -> list[Tensor]:
        given: list[Tensor] = []
        with torch.no_grad():
            trace(module, lambda: given.extend(trial.tensors(inputs)), changed=place)
        return given

    _judge_unused(wiring, final, told)
    _Stream(wiring, final, plan).follow()
    _judge_shared_norms(wiring)
    if not plan.self_attention:
        _judge_cross(wiring, atoms)
    return wiring


def _steps(
    calls: Mapping[int, ModuleCall],
    values: Values,
    atoms: Mapping[str, str],
    contained: Mapping[str, bool | None],
    width: int,
) -> Iterator[Step]:
    for place, call in calls.items():
        output = next(tensors_in((call.output,)), None)
        if output is None or output.dim() != 3:
            continue
        given = [x for x in tensors_in((call.args, call.kwargs)) if x.dim() == 3 and width in x.shape]
        inputs = tuple(values.as_sum(x) for x in given)
        if len(values.as_sum(output) or ()) == 1:
            continue  # it hands on what it gets, or what another call gave
        label = f"{call.path}#{place}"
        values.add(label, output)
        kind = atoms[call.path]
        yield Step(call.path, kind, inputs, label, place, contained.get(call.path, False), call.frames)


def _where_summed(step: Step, values: Values, sums: list[Operation]) -> Frames:
    """Give the lines that first add what a step gave to something; those that called it where none do."""
    given = values.tensor(step.output)
    adding = (op for op in sums if any(_equal(given, x) for slot in op.inputs for x in _turned(slot.value)))
    return next((operation.frames for operation in adding), step.frames)


def _feed_forwards_joined(
    steps: list[Step], values: Values, calls: Mapping[int, ModuleCall], wiring: Wiring
) -> Iterator[Step]:
    """Take matrices that follow one another through an activation for one feed-forward."""
    inputs_of = {f"{call.path}#{i}": next(tensors_in((call.args, call.kwargs)), None) for i, call in calls.items()}
    waiting: Step | None = None
    for step in steps:
        entered = inputs_of.get(step.output)
        if waiting is not None and step.kind == "" and entered is not None:
            activation = _activation_between(values.tensor(waiting.output), entered)
            if activation:
                if activation == "nothing":
                    wiring.blame("activation_missing", step.frames)
                yield replace(step, path=f"{waiting.path}, {step.path}", kind="feed_forward", inputs=waiting.inputs)
                waiting = None
                continue
        if waiting is not None:
            yield waiting
        waiting = step if step.kind == "" else None
        if waiting is None:
            yield step
    if waiting is not None:
        yield waiting


def _activation_between(before: Tensor, after: Tensor) -> str:
    """Name the activation that turns one tensor into another; "" if none does."""
    if any(_equal(before, tensor) for tensor in _turned(after)):
        return "nothing"
    fits = (n for n, f in ACTIVATIONS.items() if any(_equal(f(before), tensor) for tensor in _turned(after)))
    return next(fits, "")


class _Stream:
    """Follows the residual stream through the sub-layers of a layer."""

    def __init__(self, wiring: Wiring, final: Sum | None, plan: CallPlan) -> None:
        self.wiring, self.final, self.plan = wiring, final, plan
        self.steps = wiring.steps
        self.norms = {step.output: step for step in self.steps if step.kind == "layer_norm"}
        self.now: Sum = ("x",)
        self.pre_norm = False
        self.done: set[str] = set()

    def follow(self) -> None:
        """Go from x to the output."""
        sublayers = [step for step in self.steps if step.kind in SUBLAYERS]
        strangers = [step.path for step in self.steps if step.kind == "" and step.output not in self._scaled()]
        if strangers:
            self.wiring.unread.append(f"{strangers[0]} is no part that is known")
        self.pre_norm = bool(sublayers) and self._normalised(self._query(sublayers[0])) == ("x",)
        for step in sublayers:
            if step.output not in self.done and not self._follow_one(step):
                return
        self._judge_end(sum(step.kind == "attention" for step in sublayers))

    def _follow_one(self, step: Step) -> bool:
        """Go through one sub-layer; False where the way is lost."""
        entered = self._query(step)
        if entered is None:
            return self._lost(f"what goes into {step.path} is no sum of what came before")
        if entered != self.now and self._normalised(entered) != self.now:
            return self._wrong_input(step, entered)
        used = self._first_sum_with(step.output)
        if step.output in self.wiring.unused:
            return False
        if used is None:
            return self._lost(f"what {step.path} gives is not seen in any sum")
        rest = tuple((Counter(used) - Counter([step.output])).elements())
        if not rest:
            return self._alone(step)
        if Counter(rest) == Counter(self.now):
            self._advance(used)
        elif Counter(rest) == Counter(self.now + self.now) or (len(set(rest)) < len(rest)):
            self.wiring.blame("residual_added_twice", step.summed)
            self._advance(used)
        elif rest == entered:
            if self.pre_norm:  # else one more LayerNorm stands on the stream itself
                self.wiring.blame("residual_from_normalised", step.summed)
            self._advance(used)
        else:
            return self._other_residual(step, rest, used)
        return True

    def _advance(self, used: Sum) -> None:
        """The sum is the stream now; with post-norm its LayerNorm is."""
        self.now = used
        norm = next((s for s in self.norms.values() if s.inputs and s.inputs[0] == used), None)
        if norm is not None and not self.pre_norm:
            self.now = (norm.output,)

    def _alone(self, step: Step) -> bool:
        """A sub-layer that is summed with nothing: it holds its own residual, a norm follows, or one is missing."""
        if step.contained:
            self.now = (step.output,)
            return True
        follower = next((s for s in self.steps if s.inputs and s.inputs[0] == (step.output,)), None)
        summed = self._first_sum_with(follower.output) if follower is not None else None
        if follower is not None and summed is not None and len(summed) > 1 and follower.kind in ("layer_norm", ""):
            rest = tuple((Counter(summed) - Counter([follower.output])).elements())
            from_norm = self.pre_norm and rest == self._query(step)
            if Counter(rest) == Counter(self.now) or from_norm:
                if from_norm:
                    self.wiring.blame("residual_from_normalised", follower.summed)
                elif follower.kind == "layer_norm":
                    self.wiring.blame("norm_on_the_branch", follower.frames)
                self._advance(summed)
                return True
        if follower is not None and follower.kind in SUBLAYERS and self._is_summed_later(step.output):
            self.wiring.blame("sublayer_reads_another_tensor", follower.frames)
            return False
        if step.contained is None:
            return self._lost(f"whether {step.path} adds a residual of its own is not known")
        self.wiring.blame("residual_missing", step.frames)
        self.now = (step.output,)
        if follower is not None and follower.kind == "layer_norm" and not self.pre_norm:
            self.now = (follower.output,)
        return True

    def _wrong_input(self, step: Step, entered: Sum) -> bool:
        before = [s.output for s in self.steps if s.kind in SUBLAYERS]
        known = set(entered) <= {"x", "memory", *before, *self.norms}
        if known:
            self.wiring.blame("sublayer_reads_another_tensor", step.frames)
            return False
        return self._lost(f"what goes into {step.path} is not the residual stream")

    def _other_residual(self, step: Step, rest: Sum, used: Sum) -> bool:
        others = [s for s in self.steps if s.kind in SUBLAYERS and s.output in rest and s.output not in self.done]
        beside = [s for s in others if s is not step and self._raw(s) == self._raw(step)]
        if beside and Counter(rest) == Counter((*self.now, beside[0].output)):
            self.wiring.blame("sublayers_side_by_side", step.summed)
            self.done.add(beside[0].output)
            self._advance(used)
            return True
        self.wiring.blame("residual_from_elsewhere", step.summed)
        return False

    def _judge_end(self, attentions: int) -> None:
        if self.final is None:
            self.wiring.unread.append("the output is no sum of what the sub-modules gave")
        elif Counter(self.final) == Counter(self.now):
            return
        elif self.pre_norm and self._normalised(self.final) == self.now:
            if attentions <= (1 if self.plan.self_attention else 2):
                self.wiring.blame("norm_final_extra", self.norms[self.final[0]].frames)
        else:
            self.wiring.unread.append("the output is not where the residual stream ends")

    def _lost(self, reason: str) -> bool:
        self.wiring.unread.append(reason)
        return False

    def _query(self, step: Step) -> Sum | None:
        """What a sub-layer reads besides the memory."""
        own = [x for x in step.inputs if x is None or not self._of_memory(x)]
        return own[0] if own else None

    def _raw(self, step: Step) -> Sum | None:
        """What a sub-layer reads, before a LayerNorm."""
        return self._normalised(self._query(step)) or self._query(step)

    def _of_memory(self, x: Sum) -> bool:
        return x == ("memory",) or self._normalised(x) == ("memory",)

    def _normalised(self, x: Sum | None) -> Sum | None:
        """What a LayerNorm was given, if x is what one gave."""
        norm = self.norms.get(x[0]) if x is not None and len(x) == 1 else None
        return norm.inputs[0] if norm is not None and norm.inputs else None

    def _scaled(self) -> set[str]:
        """Labels of other modules that stand on a branch: scales of layers."""
        outputs = {s.output for s in self.steps if s.kind in SUBLAYERS}
        return {s.output for s in self.steps if s.kind == "" and s.inputs and s.inputs[0] in [(o,) for o in outputs]}

    def _first_sum_with(self, label: str) -> Sum | None:
        """The first value that a label is seen in: a sum, or itself alone."""
        sums = [x for step in self.steps for x in step.inputs if x is not None and label in x]
        sums += [self.final] if self.final is not None and label in self.final else []
        return sums[0] if sums else None

    def _is_summed_later(self, label: str) -> bool:
        sums = [x for step in self.steps for x in step.inputs if x is not None] + [self.final or ()]
        return any(Counter(x) == Counter((*self.now, label)) for x in sums)


def _judge_unused(wiring: Wiring, final: Sum | None, told: Callable[[int | None], list[Tensor]]) -> None:
    """Name what a sub-module gives in vain: the output stays the same if it gives something else."""
    read = {label for x in [final, *(x for step in wiring.steps for x in step.inputs)] for label in x or ()}
    for step in wiring.steps:
        if not step.kind or step.output in read:
            continue
        if all(map(torch.equal, told(None), told(step.place))):
            wiring.unused.add(step.output)
            wiring.blame("norm_missing" if step.kind == "layer_norm" else "sublayer_unused", step.frames)


def _judge_shared_norms(wiring: Wiring) -> None:
    """Name a LayerNorm that stands in two places."""
    norms = [step for step in wiring.steps if step.kind == "layer_norm"]
    first: dict[str, Sum | None] = {}
    for step in norms:
        given = step.inputs[0] if step.inputs else ("memory",)
        if given != ("memory",) and first.setdefault(step.path, given) != given:
            wiring.blame("norm_shared", step.frames)


def _judge_cross(wiring: Wiring, atoms: Mapping[str, str]) -> None:
    """Say whether the cross-attention is there, comes second, and takes keys and values from the memory."""
    norms = {step.output: step.inputs[0] for step in wiring.steps if step.kind == "layer_norm" and step.inputs}
    attentions = [step for step in wiring.steps if step.kind == "attention"]

    def of_memory(x: Sum | None) -> bool:
        return x == ("memory",) or (x is not None and len(x) == 1 and norms.get(x[0]) == ("memory",))

    counts = [(sum(of_memory(x) for x in step.inputs), len(step.inputs)) for step in attentions]
    called = {step.path for step in attentions}
    uncalled = [path for path, kind in atoms.items() if kind == "attention" and path not in called]
    if uncalled:
        wiring.blame("cross_attention_left_out", ())
    elif counts and not any(memory for memory, _ in counts):
        if all(x is not None for step in attentions for x in step.inputs):
            wiring.blame("cross_attention_from_decoder", attentions[-1].frames)
    elif halves := [s for s, (memory, given) in zip(attentions, counts, strict=True) if 0 < memory < given - 1]:
        wiring.blame("cross_values_from_decoder", halves[0].frames)
    elif len(counts) > 1 and counts[0][0]:
        wiring.blame("sublayers_in_another_order", attentions[0].frames)
