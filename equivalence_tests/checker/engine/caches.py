"""Decoding with a cache, step by step and in two chunks, compared with the same tokens in one pass."""

import copy
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from equivalence_tests.checker.engine.cache_protocols import (
    OF_LAYER,
    Protocol,
    cache_arguments,
    count_on,
    is_switch,
    prepare,
    protocols,
)
from equivalence_tests.checker.engine.graph import Graph
from equivalence_tests.checker.engine.same import MEASURED, TABLE, near
from equivalence_tests.checker.engine.taking_part import NEVER_READ
from equivalence_tests.checker.engine.visibility import ahead_of, pattern_of, probed
from equivalence_tests.checker.engine.watching import Operation, Recorder
from equivalence_tests.checker.mistakes import found_mistake
from equivalence_tests.checker.reach.calling import Inputs, Trial
from equivalence_tests.checker.reach.errors import CannotCheckError, said
from equivalence_tests.checker.reach.masking import MaskForm, mask_forms
from equivalence_tests.checker.reach.plans import POSITION
from equivalence_tests.checker.reach.proposing import parameters_of, unread_arguments
from equivalence_tests.checker.reach.state import Answer, ask, held_by
from equivalence_tests.checker.reach.syntax import handed_back
from equivalence_tests.checker.reach.tracing import tensors_in, tensors_of
from equivalence_tests.checker.reporting.findings import Exercise, Finding
from equivalence_tests.checker.reporting.lines import Frames, code_lines, frames_of, raised_at

TOKENS = 6
ROUNDS = 6  # of putting operations right
KEYS_AND_VALUES = 5  # axes of a tensor that holds both, as GPT-2's does
NEW_ALONE = "it is of the new tokens alone, right only where the caller joins it to what was kept"
SINGLY = {"token by token": (1,) * TOKENS, "a chunk, then token by token": (4, 1, 1)}
CHUNKS = {**SINGLY, "in two chunks": (4, 2)}
Hiding = Callable[[int, int], dict[str, Any]]  # gives the arguments of a step that hide the future, by its ends
Outcome = tuple[list[Exercise], list[Finding]]  # what was not run, and what is wrong
Step = tuple[Tensor, Recorder]  # the output of a step, and what ran in it
Lines = dict[tuple[str, Frames], list[Tensor]]  # what the same function gave in the same line, one after another


@torch.no_grad()
def exercised_cache(trial: Trial, hiding: Sequence[Hiding] = ()) -> Outcome:
    """Decode with every cache that the code offers, in every way that its arguments suggest.

    ``hiding`` gives the ways in which it hides the future, where that is known.
    """
    given = {name for name, role in trial.plan.roles if not role.startswith("=")}
    names = [name for name in cache_arguments(trial.function) if name not in given]
    if not names or unread_arguments(trial.function).issuperset(names):
        return [Exercise(name, True, NEVER_READ) for name in names], []
    roles = trial.plan.given
    apart = "query" in roles and ("memory" in roles or {"key", "value"} <= roles)
    if not (trial.plan.self_attention or apart) or trial.plan.positional:
        return [Exercise(name, False, "it is not known how to call it with a cache") for name in names], []
    reasons: list[str] = []
    for causal in [*(hiding or _causal_ways(trial))] or [_sees_all]:
        for protocol in protocols(trial, names):
            answer = _decoded(_Decoder(trial, protocol, names, causal, trial.inputs(TOKENS).query))
            if answer.value is not None:
                refused, findings = answer.value
                ran = [Exercise(name, True, protocol.detail) for name in names]
                return [*ran, *refused, *_limits_not_reached(trial)], findings
            error = answer.error  # another way to use this cache may work
            reasons.append(str(error) if isinstance(error, CannotCheckError) else said(error) if error else "")
    return [Exercise(name, False, reasons[0]) for name in names], []


def _limits_not_reached(trial: Trial) -> Iterator[Exercise]:
    """List the cache lengths of an instance that no call reached: whether it drops the right tokens was not run."""
    for name, value in vars(trial.function).items() if isinstance(trial.function, nn.Module) else ():
        if type(value) is int and value > TOKENS and "cache" in name.lower():
            yield Exercise(f"a cache of more than {name} = {value} tokens", False, f"{TOKENS} tokens were decoded")


def _causal_ways(trial: Trial) -> Iterator[Hiding]:
    """Find what hides the future in a pass over all tokens: the code itself, a switch, or a mask in some form."""
    mask, sizes = trial.plan.mask_parameter, trial.sizes

    def masked(form: MaskForm, start: int, stop: int) -> dict[str, Any]:
        may = torch.ones(stop, stop).tril().bool()[start:].expand(sizes.batch, -1, -1)
        return {mask: form.build(may, sizes.num_heads, trial.dtype)}

    switches: list[dict[str, Any]] = [{}, *({name: True} for name in trial.causal_switches)]
    ways: list[Hiding] = [lambda *_, given=given: given for given in switches]
    ways += [partial(masked, form) for form in mask_forms() if mask and form.pattern in ("shared", "full")]
    for way in ways:
        if ask(partial(_hides_the_future, trial, way)).value:  # its mask may not take this form
            yield way


def _sees_all(*_: int) -> dict[str, Any]:
    """Hide nothing: a step sees the tokens so far, and so does the last of a pass over these alone."""
    return {}


def _hides_the_future(trial: Trial, way: Hiding) -> bool:
    extra, last = way(0, TOKENS), TOKENS - 1
    if bool(probed(trial, TOKENS, extra, [last])[:, :-1].any()):  # two calls rule out most ways, which show the future
        return False
    return pattern_of(probed(trial, TOKENS, extra).any(0), ahead_of(TOKENS)) == "causal"


@dataclass
class _Decoder:
    """Decodes tokens of shape (batch, tokens, features), with and without a cache."""

    trial: Trial
    protocol: Protocol
    names: list[str]  # all arguments that serve the cache
    hiding: Hiding
    tokens: Tensor

    def whole(self, length: int) -> Tensor:
        """Give the outputs of the first tokens, in one pass."""
        x = self.tokens[:, :length]
        return self.trial.output(Inputs(x, x, x), self.hiding(0, length))

    def last_of_each(self, length: int) -> Tensor:
        """Give the output of each of the first tokens as the last of a pass, which has none to hide from it."""
        with Recorder() as run:
            self.whole(length)
        if sum(one.name == "softmax" for one in run.operations) > 1:
            raise CannotCheckError("a second attention does not read the same in one pass as step by step")
        return torch.cat([self.whole(1 + token)[:, -1:] for token in range(length)], 1)

    def each_alone(self, length: int) -> Tensor:
        """Give the output of each of the first tokens in a pass of its own."""
        return torch.cat([self.trial.output(Inputs(x, x, x), {}) for x in self.tokens[:, :length].split(1, 1)], 1)

    def makes_no_mask(self, lengths: Sequence[int]) -> bool:
        """Whether in the last step each sees all, or what torch's own causal mask shows, from the first key on."""

        def last(tokens: Tensor) -> Step:
            return [*replace(self, tokens=tokens).steps(lengths)][-1]

        plain, run = last(self.tokens)
        changed = (self.tokens.index_fill(1, torch.tensor(token), 1.0) for token in range(sum(lengths)))
        seen = torch.stack([(last(x)[0] != plain).any(-1).any(0) for x in changed], -1)
        own = ahead_of(sum(lengths))[-lengths[-1] :] == 0  # as the query
        first = torch.equal(seen | own, torch.ones_like(seen).tril() | own)
        return bool(seen.all()) or (first and bool(run.made))

    def steps(self, lengths: Sequence[int], right: Mapping[int, Tensor] | None = None) -> Iterator[Step]:
        """Decode with the cache, on a copy of the module, which may keep keys and values.

        In the last step the values that are ``right`` take the place of what operations give, by their index.
        """
        function = copy.deepcopy(self.trial.function) if isinstance(self.trial.function, nn.Module) else None
        trial, protocol = replace(self.trial, function=function or self.trial.function), self.protocol
        if protocol.prepares:
            prepare(trial, protocol.prepares)
        handed, start, before, size = protocol.first(), 0, _sizes(function), 0
        patches = {index: lambda _, __, rows=rows: rows for index, rows in (right or {}).items()}
        for length in lengths:
            stop, x = start + length, self.tokens[:, start : start + length]
            extra = self._extra(start, length, handed) | self.hiding(start, stop)
            with Recorder(patches=patches if stop == sum(lengths) else None) as recorder:
                returned = replace(trial, first=start).returned(Inputs(x, x, x), extra, changing=True)
            if protocol.fed_back is not None:
                kept, handed = handed, returned[protocol.fed_back]
                if protocol.joins and start:
                    handed = _joined(kept, handed, start, length)
            elif protocol.holders:
                count_on(handed, trial.function, length)
            if isinstance(protocol.fed_back, slice) and not _are_keys_and_values(handed):
                raise CannotCheckError("what is returned besides the output is not keys and values")
            if not (_holds(handed) if protocol.holders else _sizes(function) != before):
                raise CannotCheckError("no way to build one was found; pass one with --inputs")
            earlier, size = size, sum(x.numel() for x in tensors_in((handed, _kept(function))))
            apart = self.hiding is _sees_all and protocol.fed_back is not None
            if size <= earlier and ("memory" in trial.plan.given or apart):  # it may be kept as a whole
                raise CannotCheckError("the cache does not grow from step to step")
            yield trial.output_in(returned), recorder
            start = stop

    def _extra(self, start: int, length: int, handed: Any) -> dict[str, Any]:
        """The arguments of a step besides its tokens: the cache, its switches, and the position of the first token."""
        parameters = {p.name: p for p in parameters_of(self.trial.function)}
        holders = self.protocol.holders
        given: dict[str, Any] = dict(zip(holders, handed if len(holders) > 1 else (handed,), strict=False))
        for name in self.names:
            if is_switch(parameters[name]):
                given[name] = True
            elif OF_LAYER.search(name) and handed is not None:
                given[name] = 0
            elif POSITION.search(name):
                many = "int" not in str(parameters[name].annotation) and name in ("cache_position", "input_pos")
                given[name] = torch.arange(start, start + length) if many else start
        return given


def _decoded(decoder: _Decoder) -> Answer[Outcome]:
    """Compare steps with one pass: with the cache as it comes back, then joined by the caller where it needs that."""
    plain = ask(partial(_compared, decoder))
    if decoder.protocol.fed_back is None or (plain.value is not None and not plain.value[1]):
        return plain
    joins = replace(decoder, protocol=decoder.protocol._replace(joins=True))
    joining = ask(partial(_compared, joins))
    if joining.value is not None and not joining.value[1]:
        return ask(partial(_of_the_new_alone, joins, joining.value[0]))
    return plain if joining.value is None else joining


def _of_the_new_alone(decoder: _Decoder, refused: list[Exercise]) -> Outcome:
    """Judge what is right only for a caller who joins the cache: by a caller in its file, or else not at all."""
    trial, runs = decoder.trial, [run for _, run in decoder.steps((1, 1))]
    code = getattr(inspect.unwrap(getattr(trial.function, "forward", trial.function)), "__code__", None)
    called = getattr(trial.function, "__name__", type(trial.function).__name__)
    arguments = [p.name for p in parameters_of(trial.function)]
    caller = handed_back(code.co_filename, called, arguments, decoder.protocol.holders) if code else None
    if caller is None:
        return [*refused, Exercise(f"{decoder.protocol.detail} as it is", False, NEW_ALONE)], []
    evidence = f"line {caller} hands it back as it is; joined to what was kept, each step gives what one pass gives"
    first, second = ({(x.name, x.frames): x.frames for x in run.operations} for run in runs)
    joins = next((frames for (name, _), frames in second.items() if name == "cat" and (name, frames) not in first), ())
    return refused, [found_mistake("cache_of_new_tokens_alone", evidence=evidence, stack=code_lines(joins))]


def _compared(decoder: _Decoder) -> Outcome:
    refused: list[Exercise] = []
    apart, detail = decoder.hiding is _sees_all, decoder.protocol.detail
    whole = decoder.last_of_each(TOKENS) if apart else decoder.whole(TOKENS)
    last_alone = whole.size(1) == 1  # is what a model gives that generates
    for how, lengths in [*CHUNKS.items()][: 1 if apart else None]:
        done: list[Tensor] = []
        error = ask(partial(done.extend, (output for output, _ in decoder.steps(lengths)))).error
        if error is not None:  # in the step after those that are done
            if not done or decoder.protocol.fed_back is None or isinstance(error, CannotCheckError):
                raise error
            if lengths[len(done)] > 1:  # it takes one token at a step, and was run that way
                why = f"{said(error)}{raised_at(error)}"
                refused.append(Exercise(f"several tokens at a step, {detail}", False, why))
                continue
            facts, stack = {"said": said(error)}, code_lines(frames_of(error))
            return refused, [found_mistake("cache_fails", facts, stack=stack, evidence=detail)]
        if last_alone:
            whole = torch.cat([decoder.whole(stop) for stop in itertools.accumulate(lengths)], 1)
        differs = _differing(torch.cat(done, dim=1), whole, decoder.each_alone(TOKENS) if apart else None)
        if differs.any() and how not in SINGLY and decoder.makes_no_mask(lengths):
            why = "no mask is made for them after cached tokens; one token at a time was right"
            refused.append(Exercise(f"several tokens at a step, {detail}", False, why))
        elif differs.any():
            found = {"how": how, "token": int(differs.nonzero()[0]), "detail": detail}
            found |= {"lengths": ", ".join(map(str, lengths))}
            hidden = "each against the last of a pass up to it" if apart else "the future hidden in both"
            shown = {"evidence": f"{TOKENS} tokens, {hidden}", **_located(decoder, lengths)}
            return refused, [found_mistake("cache_differs_from_one_pass", found, **shown)]
    return refused, []


def _differing(have: Tensor, whole: Tensor, alone: Tensor | None) -> Tensor:
    """Say of each token whether the steps differ from one pass; refuse where each gives what it would ``alone``."""
    if have.shape != whole.shape:
        raise CannotCheckError(f"the steps give {tuple(have.shape)}, one pass {tuple(whole.shape)}")
    if alone is not None and near(have, alone):
        raise CannotCheckError("no step sees the tokens before it")
    return (have - whole).abs().flatten(2).amax((0, 2)) > MEASURED * whole.abs().max()


def _located(decoder: _Decoder, lengths: Sequence[int]) -> dict[str, Any]:
    """The first line at which a step departs from one pass, if the step is right with the right numbers there."""
    lengths = (max(lengths[0], 3), lengths[-1])
    with Recorder() as whole:
        want = decoder.whole(sum(lengths))[:, -lengths[-1] :]
    against, right = _Against(whole, lengths[-1], sum(lengths)), dict[int, Tensor]()

    def step(right: Mapping[int, Tensor]) -> Step:
        return [*decoder.steps(lengths, right)][-1]

    for _ in range(ROUNDS):
        output, run = step(right)
        found = {} if near(output, want) else dict(against.departing(run, right))
        right |= found
        if not found:
            break
    for index in sorted(right) if near(output, want) else ():
        others = {other: rows for other, rows in right.items() if other != index}
        if near(step(others)[0], want):
            right = others
    if not right or not near(output, want):
        return {}
    first = run.operations[min(right)]
    return {"stack": code_lines(first.frames if first.inputs else first.frames[-1:])}


@dataclass(frozen=True)
class _Against:
    """A run over all tokens, with which a step over only the last of them is compared, line by line."""

    whole: Recorder  # the run over all
    new: int  # how many tokens the step is over
    total: int  # how many the whole run is over

    def departing(self, run: Recorder, known: Container[int]) -> Iterator[tuple[int, Tensor]]:
        """List what departs in a step, unless it is known or takes what departs, with what it should give."""
        graph, departs, passed = Graph(run.operations), set[int](), dict[int, Tensor]()
        lines: Lines = defaultdict(list)
        for operation in self.whole.operations:
            lines[operation.name, operation.frames] += [slot.value for slot in operation.outputs[:1]]
        for operation in run.operations:
            made = (graph.maker(slot, operation.index) for slot in operation.inputs)
            before = {maker.index for maker in made if maker is not None}
            wanted = self._wanted(operation, lines, passed, before)
            have = operation.outputs[0].value if wanted else None
            if before & departs or (have is not None and not any(near(_real(have), _real(x), TABLE) for x in wanted)):
                departs.add(operation.index)
                if not before & departs and operation.index not in known:
                    yield operation.index, wanted[0]

    def _wanted(
        self, operation: Operation, lines: Lines, passed: dict[int, Tensor], before: Collection[int]
    ) -> list[Tensor]:
        """List what an operation may have to give: what the same line gave in one pass, or else what it takes."""
        if not operation.frames or len(operation.outputs) != 1:
            return []
        shape, own = operation.outputs[0].value.shape, lines[operation.name, operation.frames]
        if own:
            passed[operation.index] = own.pop(0)
            return self._rows(passed[operation.index], shape)
        # In one pass there is no such line, as where new tokens are joined with those of a cache.
        return [passed[index] for index in before if index in passed and passed[index].shape == shape]

    def _rows(self, whole: Tensor, shape: torch.Size) -> list[Tensor]:
        """Give the last tokens of a tensor, along each axis that holds them; none where its sizes do not tell."""
        for axis, pair in enumerate(zip(shape, whole.shape, strict=False)):
            if pair == (self.new, self.total):
                whole = whole.narrow(axis, self.total - self.new, self.new)
        return [whole] if whole.shape == shape else []


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _joined(kept: Any, returned: Any, start: int, length: int) -> Any:
    """Give the cache of a caller who joins what comes back of the new tokens alone to what was kept."""
    counts = [sum(x.numel() for x in tensors_in((one,))) for one in (kept, returned)]
    if not 0 < counts[1] * start == counts[0] * length:
        raise CannotCheckError("what comes back is not of the new tokens alone")
    return tree_map(lambda old, new: torch.cat([old, new], -2), kept, returned)


def _are_keys_and_values(handed: Any) -> bool:
    """Whether these are two tensors of as many tokens and heads, as keys and values are."""
    tensors = [x for x in handed if isinstance(x, Tensor) and x.dim() > 2]
    return len(tensors) == len(handed) == 2 and tensors[0].shape[:-1] == tensors[1].shape[:-1]


def _holds(handed: Any) -> bool:
    """Whether it is a cache with something in it; a single tensor may also be attention weights."""
    if handed is None or isinstance(handed, (Tensor, bool, int, float)):
        return isinstance(handed, Tensor) and handed.dim() == KEYS_AND_VALUES
    if isinstance(handed, (dict, list, tuple)):
        held = handed.values() if isinstance(handed, dict) else handed
        return any(_holds(one) or isinstance(one, Tensor) for one in held)
    return _holds(vars(handed)) if hasattr(handed, "__dict__") else False


def _kept(function: nn.Module | None) -> list[Tensor]:
    """The tensors that a module holds, by themselves or in tuples, lists and dictionaries."""
    return list(tensors_of(held_by(function)))


def _sizes(function: nn.Module | None) -> list[float]:
    """The sums of squares of these, which change when the tensors do."""
    return [float(x.double().square().sum()) for x in _kept(function)]
