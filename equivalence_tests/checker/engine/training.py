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
from equivalence_tests.checker.reporting.report import Report


def add_untrained(report: Report, ran: Run, module: nn.Module, call: Callable[[], Tensor]) -> None:
    """Report the parameters that are never trained; what else is seen in the same lines is seen because of that."""
    found = [*_never_trained(ran, module, call)]
    lines = {one.line for one in found}
    if found:
        report.findings = [*found, *(one for one in report.findings if one.line not in lines)]
        report.verdict, report.reason, report.unread = "deviates", "", ""


def _never_trained(ran: Run, module: nn.Module, call: Callable[[], Tensor]) -> Iterator[Finding]:
    """Give each parameter that gets no gradient from the output of a call, since a line takes its numbers alone."""
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
    with torch.enable_grad():  # which may fail, as where the code writes over what gradients need
        found = ask(lambda: torch.autograd.grad(call().sum(), [*learnt.values()], allow_unused=True)).value
    return {name: x is not None for name, x in zip(learnt, found or (), strict=False)}
