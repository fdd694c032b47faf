"""What is known of a layer or a model while it is walked through, and the report that receives it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from equivalence_tests.checker.engine.conventions import modules_around
from equivalence_tests.checker.engine.leaving_out import Repair
from equivalence_tests.checker.engine.names import Run
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.taking_part import hides, idle_modules
from equivalence_tests.checker.engine.watching import ModuleCall
from equivalence_tests.checker.layers.masks import Mask, Masks, read_masks
from equivalence_tests.checker.mistakes import found_mistake, named_mistake
from equivalence_tests.checker.parts.kinds import EXAMINED, atoms_of, is_torchs, kind_of, runs
from equivalence_tests.checker.reach.arguments import Sizes
from equivalence_tests.checker.reach.model_calls import ModelRun
from equivalence_tests.checker.reach.subject import Adapter
from equivalence_tests.checker.reporting.findings import CheckResult
from equivalence_tests.checker.reporting.lines import Frames, code_lines
from equivalence_tests.checker.reporting.report import Report

REPORTED = "it is reported already"
APART: dict[str, str] = {
    "equal": "apart from that, it is equal to torch",
    "partial": "apart from that, it is equal to torch as far as it ran",
}


@dataclass
class Walk:
    """What is known while a model is walked through."""

    report: Report
    module: nn.Module  # the model, prepared
    sizes: Sizes
    parts: dict[tuple[Any, ...], Report] = field(default_factory=dict)  # of each part that was examined by itself
    watched: dict[str, Report] = field(default_factory=dict)  # of each attention where it stands in a run, by path
    held: Callable[[], dict[str, Report]] = dict  # gives the same reports, each compared with torch's own program
    ran: Run | None = None
    of_one: set[str] = field(default_factory=set)  # paths that are given one tensor in all arguments in that run
    masks: list[Mask] = field(default_factory=list)  # the masks that the whole was seen to take
    heads: int = 1  # how many heads these may be repeated for
    # What puts right the mistakes that are no facts, by name and path; None where nothing is known to.
    repairs: dict[tuple[str, str], Repair | None] = field(default_factory=dict)
    inlined: set[str] = field(default_factory=set)  # paths of layers that compute their attention themselves
    intended: Mapping[str, str] = field(default_factory=dict)

    def adapter_of(self, part: nn.Module, intended: Mapping[str, str]) -> Adapter:
        """Say how wide a part is: the width of a model may be that of its input only."""
        wide = any(self.sizes.embed_dim in parameter.shape for parameter in part.parameters())
        return Adapter(embed_dim=self.sizes.embed_dim if wide else None, intended=dict(intended))

    def adds_residual(self, part: nn.Module) -> bool | None:
        """Whether a part includes the residual, by its report; None where the part was not understood."""
        report = self.parts.get(mark_of(part))
        if report is None:
            return False
        words = " ".join(here for what, here, _ in report.conventions if what == "includes")
        fresh = "layer_made_in_forward" in report.mistakes and "residual" not in words
        if report.verdict == "unchecked" or fresh:
            return None
        named = (*report.mistakes, *(one.name for one in report.intended))
        return "residual" in words or any(name.startswith(("residual", "norm_fresh")) for name in named)

    def check(
        self, name: str, mistakes: Mapping[str, Frames], place: str, evidence: str, reason: str = "", **facts: Any
    ) -> None:
        """Add a row, and a finding for each mistake, with its lines and the facts of its words.

        With a ``reason`` all are intended.
        """
        owners = [type(module).__name__ for module in modules_around(self.module, place)]
        reasons = {one: self.intended.get(one) or reason or named_mistake(one).as_named(owners) for one in mistakes}
        wrong = [mistake for mistake in mistakes if not reasons[mistake]]
        self.report.checks.append(CheckResult(name, "failed" if wrong else "passed", ", ".join(wrong)))
        for mistake, frames in mistakes.items():
            kept = self.report.intended if reasons[mistake] else self.report.findings
            if (mistake, place) not in [(f.name, f.where) for f in kept]:
                shown = {"stack": code_lines(frames), "evidence": evidence, "where": place, "reason": reasons[mistake]}
                kept.append(found_mistake(mistake, facts, **shown))

    @property
    def calls(self) -> list[ModuleCall]:
        """The calls of its sub-modules, in the order in which they begin."""
        return [] if self.ran is None else [call for call in self.ran.recorder.calls if call.path]

    @cached_property
    def idle(self) -> set[str]:
        """The sub-modules that take no part in the run of the whole; none where something hides that."""
        return set() if self.ran is None or hides(self.ran, self.module) else idle_modules(self.ran, self.module)

    def busy_in(self, path: str) -> set[str]:
        """Name the sub-modules of a part that take part in the run of the whole."""
        inside = dict(self.module.get_submodule(path).named_modules()) if self.ran is not None and path else {}
        return {name for name in inside if name and f"{path}.{name}" not in self.idle}

    def is_normed(self, path: str) -> bool:
        """Whether what a part is given comes right out of a norm."""
        given = [call.inputs[0] for call in self.calls if call.path == path and call.inputs]
        norms = [one for one in self.calls if kind_of(one.path, self.module.get_submodule(one.path)) == "layer_norm"]
        made = [x for one in norms for x in one.outputs]
        return any(x is y for x in given for y in made)

    def with_norms(self, path: str) -> str:
        """Say that all norms of a part take part in the run of the whole, whatever a call of its own leaves out."""
        norms = [name for name, kind in atoms_of(self.module.get_submodule(path)).items() if kind == "layer_norm"]
        return f"{norms[-1]} takes part where {path} is called" if norms and self.busy_in(path) >= {*norms} else ""

    def skip(self, name: str, reason: str) -> None:
        """Say what could not be looked at."""
        self.report.checks.append(CheckResult(name, "skipped", reason))


def is_inside(path: str, outer: str) -> bool:
    """Whether a module lies inside another one."""
    return path != outer and (not outer or path.startswith(f"{outer}."))


def outermost(paths: Iterable[str], inside: str) -> str:
    """Give the outermost of some modules that is a module, or holds it.

    >>> outermost(["layers.0.attn", "layers.0", "head"], "layers.0.attn")
    'layers.0'
    """
    return min((path for path in paths if path == inside or is_inside(inside, path)), key=len)


def mark_of(child: nn.Module) -> tuple[Any, ...]:
    """What two modules share that need not be examined twice."""
    source = str(child) if isinstance(child, nn.Sequential) else ""  # what stands in no class of its own
    return (type(child), tuple(p.shape for p in child.parameters()), source)


def one_of_each(found: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Keep the first module of each class and shape."""
    first: dict[tuple[Any, ...], tuple[str, nn.Module]] = {}
    for path, child in found:
        first.setdefault(mark_of(child), (path, child))
    return list(first.values())


def layers_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """List one of each kind of layer: the innermost modules that hold an attention and a feed-forward.

    Where there is no feed-forward at all, an attention with a norm or with another attention is a layer.
    """
    held = dict(_holding(module))
    found = [path for path, kinds in held.items() if "feed_forward" in kinds or kinds.count("") > 1]
    found = found or [path for path, kinds in held.items() if kinds.count("attention") > 1 or "layer_norm" in kinds]
    innermost = (path for path in found if not any(is_inside(other, path) for other in found))
    return one_of_each((path, module.get_submodule(path)) for path in innermost)


def _holding(module: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """List what may be a layer: it holds an attention, and no name says that it is something else."""
    for path, child in module.named_modules():
        named = path and kind_of(path, child) in EXAMINED  # the whole is read as a layer, whatever its name says
        if named or not runs(child) or isinstance(child, nn.Sequential) or is_torchs(child):
            continue
        kinds = list(atoms_of(child).values())
        if "attention" in kinds:
            yield path, kinds


def masks_of(walk: Walk, path: str, run: ModelRun, heads: int = 1) -> Masks:
    """Try the masks of a layer or a model; none where one goes wrong inside, which hides what becomes of it outside."""
    inside = [f for f in walk.report.findings if f.where.startswith(f"{path}." if path else "")]
    if any(f.stage in ("softmax", "mask") or "mask" in f.name for f in inside):
        return Masks([], [])
    read = read_masks(walk.module.get_submodule(path), run, heads)
    if not path:
        walk.masks, walk.heads = read.masks, heads
    if any(f.name.startswith("cross_") or f.name == "sublayer_unused" for f in walk.report.findings):
        read = replace(read, masks=[mask for mask in read.masks if mask.reached])  # others may have nothing to hide
    return read


def recorded(module: nn.Module, run: ModelRun, source: Tensor, target: Tensor | None) -> Run:
    """Run a model once, and record it."""
    return Call(run.call, (source, target), module=module).run(read=False)


def add_apart_from(report: Report, other: Report) -> None:
    """Add what is found once the norms, which some well-known model has, are taken for intended: they may hide it."""
    known = {one.name for one in report.findings}
    report.findings += [one for one in other.findings if one.name not in known]
    if other.verdict in APART:
        report.notes.append(APART[other.verdict])
    elif other.reason:
        report.notes.append(f"apart from that: {other.reason}")
