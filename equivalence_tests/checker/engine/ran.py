"""Record calls and find the line that ran an operation, for mistakes that were seen in the output alone."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.engine.same import identical
from equivalence_tests.checker.engine.vocabulary import DRAWS, FILLS, words
from equivalence_tests.checker.engine.watching import Operation, Recorder, storage_of
from equivalence_tests.checker.reach.state import ask
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.lines import Frames, code_lines, frames_here, inside

CLAMPS = words("clamp clip clamp_min clamp_max hardtanh")
GUARDS = 1e-2, 1e4  # bounds beyond these keep from dividing by 0, and from numbers that float16 does not have
SEEDS = 16  # a layer may be skipped after few of them
MIRRORED = {"rsub": "sub", "rdiv": "div", "rpow": "pow"}


def operations_of(*calls: Callable[[], Any]) -> list[Operation]:
    """Record calls that are known to run, and list the operations that a line of the user's code ran."""
    return [operation for call in calls for operation in recorded(call).operations if operation.frames]


def recorded(call: Callable[[], Any], named: Iterable[tuple[str, Tensor]] = ()) -> Recorder:
    """Record a call that is known to run, keeping of each operation's stack the frames inside this call."""
    outside, recorder = frames_here(), Recorder(named)
    with torch.no_grad(), recorder:
        call()
    for operation in recorder.operations:
        operation.frames = inside(operation.frames, outside)
    return recorder


def unused_fill(operations: Sequence[Operation]) -> Operation | None:
    """Give the last ``masked_fill`` whose result no operation takes, so that it hides nothing."""
    taken = {storage_of(slot.tensor) for operation in operations for slot in operation.inputs}
    fills = (operation for operation in reversed(operations) if operation.name == "masked_fill")
    return next((fill for fill in fills if storage_of(fill.outputs[0].tensor) not in taken), None)


def frames_where(ran: str, operations: Sequence[Operation]) -> Frames:
    """Give the stack of the first operation with one of some names, by preference, such as "softmax, exp"; () for none.

    "last mul" is the last of that name, and "end" the outermost line of the last operation.
    """
    for wanted in ran.split(", "):
        if wanted == "end":
            return operations[-1].frames[-1:] if operations else ()
        place, name = (-1, wanted.removeprefix("last ")) if wanted.startswith("last ") else (0, wanted)
        matching = [operation for operation in operations if MIRRORED.get(operation.name, operation.name) == name]
        if matching:
            return matching[place].frames
    return ()


def draws(operation: Operation) -> bool:
    """Whether an operation draws random numbers, or is a dropout that changes what it is given."""
    return operation.name in DRAWS or drops(operation)


def drawing_line(call: Callable[[], Tensor], of: Callable[[Operation], bool] = draws) -> Frames | None:
    """Give the line that drops or draws, where the same call gives something else after other random numbers."""

    def output(seed: int) -> Tensor:
        torch.default_generator.manual_seed(seed)
        return call().double().nan_to_num()

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        first, *others = (ask(partial(output, seed)).value for seed in range(SEEDS))
    if first is None or all(x is None or torch.allclose(x, first) for x in others):
        return None
    return next((one.frames for one in operations_of(call) if of(one)), ())


def drops(operation: Operation) -> bool:
    """Whether an operation is a dropout that changes what it is given."""
    given, made = (slots[0].value if slots else None for slots in (operation.inputs, operation.outputs))
    return "dropout" in operation.name and given is not None and made is not None and not identical(given, made)


def drawn_in(operations: Iterable[Operation]) -> list[Exercise]:
    """List the lines that draw random numbers in eval mode: with others, the code may do something else."""
    drew = (one for one in operations if one.name in DRAWS and one.frames)
    return _not_run("other random numbers in line {}", "`{}` draws them in eval mode, too", drew)


def never_cut(operations: Iterable[Operation]) -> list[Exercise]:
    """List the lines that cut features off at a bound which none of them reached; tiny and huge ones guard rounding."""
    bounded = list[Operation]()
    for one in operations:
        args, kwargs = one.arguments if one.name in CLAMPS else ([], {})
        numbers = [abs(x) for x in (*args, *kwargs.values()) if isinstance(x, int | float)]
        if any(GUARDS[0] < x < GUARDS[1] for x in numbers) and one.frames and one.inputs[0].value.dim() > 2:
            bounded.append(one)
    reached = {one.frames[0] for one in bounded if not torch.equal(one.inputs[0].value, one.outputs[0].value)}
    never = (one for one in bounded if one.frames[0] not in reached)
    return _not_run("the bound in line {}", "`{}` cut nothing off", never)


def never_hid(recorder: Recorder, given: set[str]) -> list[Exercise]:
    """List the lines that hide keys by what ids or tokens alone say, where these say it of none.

    ``given`` names them as they are recorded.
    """
    fills = (one for one in recorder.operations if one.name in FILLS and one.frames)
    taken = ((one, *pair) for one in fills for pair in zip(one.inputs, one.origins, strict=True))
    idle = ((one, bits) for one, slot, bits in taken if slot.value.dtype == torch.bool and not bool(slot.value.any()))
    own = (one for one, bits in idle if bits and given.issuperset(recorder.named(bits)))
    return _not_run("the mask in line {}", "`{}` hid nothing", own)


def _not_run(what: str, said: str, operations: Iterable[Operation]) -> list[Exercise]:
    """List the lines of some operations, each once, as what was not run."""
    lines = {line.number: line.text for line in (code_lines(one.frames)[-1] for one in operations)}
    return [Exercise(what.format(number), False, said.format(text)) for number, text in lines.items()]
