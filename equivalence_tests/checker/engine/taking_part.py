"""Which parameters, arguments and sub-modules the output of a run depends on."""

import ast
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.names import Attention, Run
from equivalence_tests.checker.engine.vocabulary import CONTRACTIONS, OF_A_SHAPE
from equivalence_tests.checker.engine.watching import Operation, Slot, storage_of
from equivalence_tests.checker.reach.proposing import code_of, nodes_of, parsed, unread_arguments
from equivalence_tests.checker.reach.tracing import tensors_of
from equivalence_tests.checker.reporting.lines import source_of

NEVER_READ = "no line of its forward reads it"
OF_MASKS = re.compile(r"^(use_|with_|apply_|is_)?mask(_?flag|ed|ing)?$", re.IGNORECASE)


def idle_modules(run: Run, module: nn.Module) -> set[str]:
    """Give the paths of the sub-modules with parameters, none of which the output depends on."""
    idle = set(unused_parameters(run, module))
    owned = {path: {name for name, _ in child.named_parameters(path)} for path, child in module.named_modules() if path}
    return {path for path, names in owned.items() if names and names <= idle}


def unused_parameters(run: Run, module: nn.Module | None) -> list[str]:
    """Give the names of the parameters that the output does not depend on."""
    if module is None:
        return []
    live = run.live()
    used = set(run.recorder.named(_taken_by(run, live)))
    hidden = tuple(f"{path}." for path, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule))
    named = [(name, x) for name, x in module.named_parameters() if x.numel() and not name.startswith(hidden)]
    idle = [(name, x) for name, x in named if f"param:{name}" not in used]
    kept = _of_no_origin(run, live) if idle else []
    return [name for name, x in idle if not any(_is_made_of(own, x.detach().to(own.dtype)) for own in kept)]


def _is_made_of(own: Tensor, x: Tensor) -> bool:
    """Whether all elements of ``own`` occur in ``x``; the first is looked for first, as it mostly does not."""
    return bool((x == own.flatten()[0]).any()) and bool(torch.isin(own, x).all())


def waiting_parameters(run: Run, module: nn.Module | None) -> list[str]:
    """Give the names of unused parameters that a function which ran would use in a line that did not run."""
    idle, held = unused_parameters(run, module), dict(module.named_modules()) if module is not None else {}
    taken = set(run.recorder.named(_taken_by(run, {operation.index for operation in run.operations})))
    waiting = []
    for name in (name for name in idle if f"param:{name}" not in taken):
        path, dot, last = name.rpartition(".")
        inside = [operation for operation in run.operations if f"{operation.place}.".startswith(f"{path}{dot}")]
        ran = {(file, function) for operation in inside for file, _, function in operation.frames}
        own = itertools.takewhile(lambda made: made is not nn.Module, type(held[path]).__mro__)
        if any(last in _computed_with(made, ran) for made in own):
            waiting.append(name)
    return waiting


def _computed_with(target: type, ran: set[tuple[str, str]]) -> set[str]:
    """Names of the attributes that these functions of a class use as an operand, or pass to a call."""
    functions = (x for x in parsed(source_of(target)) if isinstance(x, ast.FunctionDef))
    own = (x for x in functions if (inspect.getsourcefile(target), x.name) in ran)
    parts = [part for function in own for x in ast.walk(function) for part in _computing(x)]
    return {part.attr for part in parts if isinstance(part, ast.Attribute)}


def _computing(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.Call(args=args, keywords=keywords):
            return [*args, *(keyword.value for keyword in keywords)]
    return []


def _taken_by(run: Run, live: set[int]) -> int:
    """The named tensors whose elements, not only shapes, the ``live`` operations take, as bits."""
    taking = (one for one in run.operations if one.index in live and one.name not in OF_A_SHAPE)
    return reduce(or_, (bits for operation in taking for bits in operation.origins), 0)


def idle_biases(attention: Attention) -> Iterator[tuple[str, Tensor]]:
    """Give named tensors from which a second output, shaped like the scores, is made, but not the first output."""
    run, scores = attention.run, attention.first.outputs[0].value
    beside = [x for x in tensors_of(run.output) if attention.last.index not in run.live([x])]
    output = [x for x in tensors_of(run.output) if all(x is not other for other in beside)]
    used = _taken_by(run, run.live(output))
    for made in beside if output else ():
        if made.is_floating_point() and made.dim() > 2 and made.shape[-2:] == scores.shape[-2:]:
            yield from ((name, made) for name in run.recorder.named(run.recorder.origins_of(made) & ~used))


def idle_arguments(run: Run, function: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
    """Give the arguments, name and tensor, that no line reads or that only unused results are computed from.

    Gives none where something hides its operations, as TorchScript and numpy do.
    """
    if hides(run, function):
        return
    live = run.live()
    used = _taken_by(run, live)
    for tensor in tensors_of(run.output):
        used |= run.recorder.origins_of(tensor)
    in_vain = _taken_by(run, {operation.index for operation in run.operations} - live)
    unread = unread_arguments(function)
    for place, (name, slot) in enumerate(zip(run.recorder.names, run.recorder.given, strict=True)):
        bit, argument = 1 << place, argument_name(name, function)
        mask = slot.value.dtype == torch.bool and bool(slot.value.any()) and not bool(slot.value.all())
        numbers = name.startswith("arg:") and (slot.value.is_floating_point() or mask) and slot.value.dim() > 1
        if numbers and not used & bit and (in_vain & bit or argument in unread):
            yield argument, slot.value


def hides(run: Run, function: Any) -> bool:
    """Whether an operation takes, or the run returns, a tensor that no recorded operation made."""
    given = known_before(run, function)
    known = {storage_of(slot.tensor) for slot in given}
    known |= {storage_of(slot.tensor) for operation in run.operations for slot in operation.outputs}
    unknown = {storage_of(x) for x in tensors_of(run.output)} - known
    return bool(unknown) or run.graph.unwatched(given) is not None


def known_before(run: Run, function: Any) -> list[Slot]:
    """List what no operation makes: what a run is given, the recorder's own masks, and what modules keep as it is."""
    modules = function.modules() if isinstance(function, nn.Module) else ()
    kept = [Slot(x, x) for module in modules for x in vars(module).values() if isinstance(x, Tensor)]
    return [*run.recorder.given, *run.recorder.made, *kept]


def argument_name(known: str, function: Callable[..., Any]) -> str:
    """Turn the recorder's "arg:0" or "param:path" into the name of that argument or parameter."""
    name = known.partition(":")[2]
    places, _ = code_of(function)
    return places[int(name)] if name.isdigit() and int(name) < len(places) else name


def _of_no_origin(run: Run, live: set[int]) -> list[Tensor]:
    """Tensors of unknown origin that live operations take: stored by an earlier run, maybe made from parameters."""
    found: dict[int, Tensor] = {}
    for operation in run.operations:
        for slot, origins in zip(operation.inputs, operation.origins, strict=True):
            if not origins and operation.index in live and slot.value.is_floating_point() and slot.value.numel() > 1:
                found.setdefault(slot.key, slot.value)
    return list(found.values())


def matrix_of(attention: Attention, operation: Operation | None) -> tuple[str, float]:
    """Give the name of the parameter that is the matrix of a product, "" if none is, and its first element."""
    if operation is None or operation.name not in CONTRACTIONS:
        return "", 0.0
    followed, recorder = attention.run.names, attention.run.recorder
    tokens = {source.slot.key for source in followed.sources.values()} | {x.key for x, _ in followed.taken(operation)}
    pairs = zip(operation.inputs, operation.origins, strict=True)
    for slot, bits in sorted(pairs, key=lambda pair: pair[0].key in tokens):  # tokens may be learnt too
        given = any(name.startswith("arg:") for name in recorder.named(bits))
        if slot.value.dim() >= 2 and not given and recorder.parameters(bits):
            return recorder.parameters(bits)[0], float(slot.value.flatten()[0])
    return "", 0.0


def replaced_at(function: Any, mask: str) -> int:
    """The line that sets a mask to None, or makes another one in its place, whatever mask is given; 0 for none."""
    choices = [node for node in nodes_of(type(function)) if isinstance(node, ast.If)]
    set_in = (x for one in choices if mask not in ast.unparse(one.test) for x in (*one.body, *one.orelse))
    to_none = next((x.lineno for x in set_in if ast.unparse(x) == f"{mask} = None"), 0)
    on = (one for one in choices if _is_switched_on(one.test, function))
    made = (x for one in on for x in one.body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == mask)
    return to_none or next((x.lineno for x in made if mask not in ast.unparse(x.value)), 0)


def _is_switched_on(test: ast.expr, function: Any) -> bool:
    """Whether a condition is a switch of masks of its own, as ``self.mask_flag``, that is True."""
    name = test.attr if isinstance(test, ast.Attribute) else ""
    return bool(OF_MASKS.search(name)) and getattr(function, name, False) is True
