"""The user's own attention as a contender: built and called as the checker reads it, with the built-in's weights."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import builtin
from benchmarks.grids import Case
from benchmarks.own_weights import places_of
from benchmarks.workloads import Results, Workload, compiled, may_attend_of, workload
from equivalence_tests.checker.engine.mask_trials import mask_form_of
from equivalence_tests.checker.engine.reading import is_causal
from equivalence_tests.checker.engine.situations import Situation, likeliest, situation_of, trials_for
from equivalence_tests.checker.equivalent.holding import Held
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.reach.arguments import Sizes
from equivalence_tests.checker.reach.calling import Inputs, Trial
from equivalence_tests.checker.reach.construction import built
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.loading import load
from equivalence_tests.checker.reach.masking import MaskForm
from equivalence_tests.checker.reach.plans import Errors
from equivalence_tests.checker.reach.state import prepare, preserved_global_state
from equivalence_tests.checker.reach.subject import Adapter, Subject, subjects
from equivalence_tests.checker.reporting.equivalents import Equivalent
from equivalence_tests.checker.reporting.report import Report
from scratch.validation import ArgumentValueError

__all__ = ["check_own", "code_of", "in_torch", "is_in_torch", "is_own", "own_takes_part", "own_workload"]

IN_TORCH = " in torch"
INPUTS = ("query", "key")  # of the modules


@dataclass(frozen=True)
class _Own:
    """How the checker reads the user's code.

    Args:
        situation: One way to call it, and what was seen in it.
        form: The form of its mask; None if it has none that is understood.
    """

    situation: Situation
    form: MaskForm | None

    @property
    def subject(self) -> Subject:
        """What is called."""
        return self.situation.subject


def is_own(name: str) -> bool:
    """Whether a contender's name is where the user's code stands: "my.py:MyAttention"."""
    return ":" in name


def in_torch(name: str) -> str:
    """Name the equivalent of the user's code in torch's own parts.

    >>> in_torch("my.py:MyAttention")
    'my.py:MyAttention in torch'
    """
    return name + IN_TORCH


def is_in_torch(name: str) -> bool:
    """Whether a contender is the equivalent of the user's code."""
    return is_own(name) and name.endswith(IN_TORCH)


def code_of(name: str) -> str:
    """Say where the user's code stands, of which a contender may be the equivalent.

    >>> code_of("my.py:MyAttention in torch")
    'my.py:MyAttention'
    """
    return name.removesuffix(IN_TORCH)


def check_own(name: str) -> None:
    """Require code that can be imported.

    Args:
        name: "my.py:MyAttention" or "package.module:MyAttention".

    Raises:
        ValueError: If there is none.
    """
    try:
        if not is_own(name):
            raise CannotCheckError("no colon")
        _load(name)
    except CannotCheckError as error:
        reason = " ".join(str(error).split())
        raise ArgumentValueError(
            f"implementation must name your code as in my.py:MyAttention, got {name}: {reason}"
        ) from error


def own_takes_part(name: str, case: Case) -> bool:
    """Whether the user's code is a function for "attention", or a module for ``MultiheadAttention`` without weights.

    Args:
        name: Where it stands.
        case: What is computed.
    """
    components = ("attention",) if _is_function(_load(code_of(name))) else ("self_attention", "cross_attention")
    return case.component in components and not case.need_weights


def own_workload(name: str, case: Case) -> Workload:
    """Build the user's attention, or its equivalent, at the sizes of a case, with the weights of the built-in.

    Args:
        name: Where it stands, or the name of its equivalent.
        case: What is computed.

    Returns:
        A ``Workload``, in eval mode always, because nothing else is known to hold its dropout back.

    Raises:
        NotImplementedError: If it cannot be built, called or masked as the case asks, or has no equivalent, with the
            reason.
    """
    own = _examined(code_of(name), case.num_heads, case.head_dim)
    if own is None:
        raise NotImplementedError(
            "the checker could not tell at this width what it computes; sidebyside verify says more"
        )
    theirs = workload(case, builtin)
    if own.subject.module is None:
        function = _equivalent(own, case).of(nn.Module()) if is_in_torch(name) else own.subject.function
        return _bound(own, case, function, theirs)
    module = prepare(copy.deepcopy(own.subject.module), getattr(torch, case.dtype)).to(case.device)
    assert theirs.module is not None  # only the function has none
    places = _Places(module, own.situation, theirs.module)
    places.fill(module, theirs.module)
    if is_in_torch(name):
        equivalent = _equivalent(own, case)
        made = equivalent.of(module)
        translated = partial(_translated, equivalent, module, places)
        return replace(_bound(own, case, made, theirs), module=made, translated=translated)
    return replace(_bound(own, case, module, theirs), module=module, translated=places.translated)


def _equivalent(own: _Own, case: Case) -> Equivalent:
    """Read the equivalent at the sizes of a case; a function is read anew, because it was read at others."""
    heads = case.num_heads if own.situation.plan.layout == "b h l d" else 1
    sizes = own.subject.sizes if own.subject.module else Sizes(num_heads=heads, head_dim=case.head_dim)
    try:
        equivalent = _read_equivalent(own.situation, sizes)
    except UnreadError as error:
        raise NotImplementedError(f"it could not be written in torch's own parts: {error}") from error
    if not equivalent.source:
        raise NotImplementedError(f"its program of torch's own parts could not be written down: {equivalent.unwritten}")
    if not equivalent.agrees:
        raise NotImplementedError(f"its program of torch's own parts gives other numbers ({equivalent.where})")
    return equivalent


def _read_equivalent(situation: Situation, sizes: Sizes) -> Equivalent:
    with preserved_global_state():
        torch.set_num_threads(1)  # as above
        torch.set_default_dtype(torch.float64)
        if sizes != situation.subject.sizes:
            situation = situation_of(situation.subject, replace(situation.trial, sizes=sizes))
            mask_form_of(situation)
        held = Held(situation)
        return held.written(held.holding(), Report(situation.subject.name))


def _translated(equivalent: Equivalent, module: nn.Module, places: "_Places", gradients: Results) -> Results:
    """Give the gradients of the equivalent's parameters the built-in's names and places."""
    ours = {name.removeprefix("gradient of "): x for name, x in gradients.items() if x is not None}
    zeros = {name: torch.zeros_like(x) for name, x in module.state_dict().items()}
    theirs = {f"gradient of {name}": x for name, x in equivalent.to_theirs(ours, zeros).items()}
    inputs = {name: x for name, x in gradients.items() if name.removeprefix("gradient of ") in INPUTS}
    return places.translated(inputs | theirs)


@cache
def _load(name: str) -> Any:
    with preserved_global_state():
        return load(name)


def _is_function(found: Any) -> bool:
    is_module = inspect.isclass(found) or isinstance(found, nn.Module)
    return not is_module and bool(inspect.signature(found).parameters)


@cache
def _examined(name: str, num_heads: int, head_dim: int) -> _Own | None:
    """Let the checker read the code, at the width of the case and at short lengths."""
    with preserved_global_state():
        torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
        torch.set_default_dtype(torch.float64)
        for subject in _subjects(name, Sizes(num_heads=num_heads, head_dim=head_dim)):
            if subject.module is not None:
                prepare(subject.module)
            subject.dtype = torch.float64
            trials = trials_for(subject, Errors())
            situation = likeliest(subject, trials) if trials else None
            if situation is not None and not situation.blocked:
                return _Own(situation, mask_form_of(situation))
    return None


def _subjects(name: str, sizes: Sizes) -> list[Subject]:
    found = _load(name)
    if not inspect.isclass(found):
        listed = subjects(found, name, Adapter())
        return [x for x in listed if _is_function(found) or x.sizes.embed_dim == sizes.embed_dim][:1]
    instance = built(found, sizes)
    return [] if instance is None else [Subject(name, instance, sizes, Adapter())]


def _bound(own: _Own, case: Case, function: Callable[..., Any], theirs: Workload) -> Workload:
    """Lay inputs and mask out as the code wants them, once: only its own work is timed."""
    plan = own.situation.plan
    if case.component == "cross_attention" and plan.self_attention:
        raise NotImplementedError("it takes a single tensor for query, key and value")
    form = _mask_form(own, case)
    inputs = {name: x.requires_grad_(case.mode != "forward") for name, x in theirs.inputs.items()}
    query, key, value = (_laid_out(x, plan.layout) for x in _query_key_value(inputs))
    folded = case.num_heads if case.component == "attention" and plan.layout == "b l e" else 1
    may_attend = may_attend_of(case).repeat_interleave(folded, 0)
    plan = replace(plan, layout="b l e") if case.component == "attention" else plan  # laid out above
    sizes = Sizes(num_heads=case.num_heads, head_dim=case.head_dim)
    trial = Trial(function, plan, sizes, getattr(torch, case.dtype))
    args, kwargs = trial.arguments(Inputs(query, key, value, may_attend), mask=form)
    run = compiled(function, case)

    def call() -> tuple[Tensor, ...]:
        output = trial.output_in(run(*args, **kwargs))
        return (output.unflatten(0, (-1, folded)) if folded > 1 else output,)

    return Workload(call, None, inputs)


def _query_key_value(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    query, *others = inputs.values()
    key = others[0] if others else query
    return query, key, others[1] if len(others) > 1 else key


def _laid_out(x: Tensor, layout: str) -> Tensor:
    """Fold the heads of a function's inputs into the batch where it was read as working on three dimensions."""
    if x.dim() == 4 and layout not in ("b h l d", "b l e"):
        raise NotImplementedError("its inputs are neither (batch, heads, len, head_dim) nor (batch, len, features)")
    return x.flatten(0, 1) if x.dim() == 4 and layout == "b l e" else x


def _mask_form(own: _Own, case: Case) -> MaskForm | None:
    judgement = own.situation.judgement
    causal_by_itself = judgement is not None and is_causal(judgement)
    if causal_by_itself and not case.is_causal and not case.window:
        raise NotImplementedError("it is always causal; --mask causal times it")
    needs_queries = bool(case.window) or (case.is_causal and not causal_by_itself)
    if not needs_queries and not case.is_padded:
        return None
    form = own.form
    if form is None:
        raise NotImplementedError("it has no mask argument that the checker understands")
    if (needs_queries and form.pattern not in ("full", "shared")) or (case.is_padded and form.pattern == "shared"):
        raise NotImplementedError(f"its mask, {form}, cannot express what this case hides")
    return form


class _Places:
    """Where each element of the built-in's parameters lies among the user's, found by reading numbers in their place.

    Args:
        module: The user's.
        situation: One way to call it, and what the checker saw in it.
        theirs: The built-in.
    """

    def __init__(self, module: nn.Module, situation: Situation, theirs: nn.Module) -> None:
        self.parameters = [name for name, _ in module.named_parameters()]
        self.sizes = [x.numel() for x in module.parameters()]
        found = places_of(situation)
        self.of = {name: _fitting(name, found.get(name), x) for name, x in theirs.named_parameters()}

    def fill(self, module: nn.Module, theirs: nn.Module) -> None:
        """Put the built-in's values into the user's parameters, and 0 where it has none."""
        flat = torch.zeros(1 + sum(self.sizes), dtype=torch.float64)
        for name, x in theirs.named_parameters():
            flat[self.of[name]] = x.detach().cpu().double()
        with torch.no_grad():
            for x, values in zip(module.parameters(), flat[1:].split(self.sizes), strict=True):
                x.copy_(values.view_as(x))

    def translated(self, gradients: Results) -> Results:
        """Give the gradients of the user's parameters the built-in's names and places."""
        ours = [gradients[f"gradient of {name}"] for name in self.parameters]
        inputs = {name: x for name, x in gradients.items() if name.removeprefix("gradient of ") not in self.parameters}
        known = next(x for x in inputs.values() if x is not None)
        pieces = [known.new_zeros(size) if x is None else x.flatten() for size, x in zip(self.sizes, ours, strict=True)]
        flat = torch.cat([known.new_zeros(1), *pieces])
        return inputs | {f"gradient of {name}": flat[places.to(flat.device)] for name, places in self.of.items()}


def _fitting(name: str, places: Tensor | None, wanted: Tensor) -> Tensor:
    if places is None and name.endswith("bias"):
        raise NotImplementedError("one of its projections has no bias; if none has, --bias no times it")
    if places is None or places.shape != wanted.shape:
        raise NotImplementedError(f"the checker could not find its counterpart of {name}")
    return places
