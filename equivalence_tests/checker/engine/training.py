"""Find the parameters that code reads and never trains."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.names import Run
from equivalence_tests.checker.engine.vocabulary import STOPS_GRADIENTS
from equivalence_tests.checker.mistakes import found_mistake
from equivalence_tests.checker.reach.state import ask
from equivalence_tests.checker.reporting.findings import Finding
from equivalence_tests.checker.reporting.lines import Frames, code_lines


def never_trained(ran: Run, module: nn.Module, call: Callable[[], Tensor]) -> Iterator[Finding]:
    """Report each parameter that gets no gradient from the output of a call, since a line takes its numbers alone."""
    read = dict(_read_as_numbers(ran))
    trained = _trained(module, call) if read else {}
    for name, frames in read.items() if any(trained.values()) else ():  # else all of it runs without gradients
        if not trained.get(name, True):
            evidence, stack = f"{name} gets no gradient.", code_lines(frames)
            yield found_mistake("parameter_never_trained", {"what": name}, stack=stack, evidence=evidence)


def _read_as_numbers(ran: Run) -> Iterator[tuple[str, Frames]]:
    """Name the parameters of which a line that the output depends on takes the numbers, without their gradient."""
    live = (ran.operations[index] for index in ran.live())
    for one in (x for x in live if x.name in STOPS_GRADIENTS and x.frames):
        names = [name for bits in one.origins for name in ran.recorder.named(bits)]
        if len(names) == 1 and names[0].startswith("param:"):
            yield names[0].removeprefix("param:"), one.frames


def _trained(module: nn.Module, call: Callable[[], Tensor]) -> dict[str, bool]:
    """Say of each parameter whether it gets a gradient; of none where nothing does."""
    learnt = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        output = ask(call).value
    if output is None or not output.requires_grad:
        return {}
    found = torch.autograd.grad(output.sum(), [*learnt.values()], allow_unused=True)
    return {name: x is not None for name, x in zip(learnt, found, strict=True)}
