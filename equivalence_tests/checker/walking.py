"""Check a layer, a stack or a model by walking its sub-modules, and read how they are wired together.

Every sub-module of a known kind is examined by itself, so that errors do not add up. The wiring is read off one
forward pass: what goes into each sub-module is written as a sum of what came before.
"""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equivalence_tests.checker.calling import CallPlan, call_plans, forward_parameters, random_inputs
from equivalence_tests.checker.construction import VOCABULARY, Sizes, prepare
from equivalence_tests.checker.describe import guilty_line
from equivalence_tests.checker.diagnosis import distance
from equivalence_tests.checker.errors import CannotCheckError
from equivalence_tests.checker.mask_builders import examine_mask_builder, mask_methods
from equivalence_tests.checker.part_mistakes import PART_MISTAKES
from equivalence_tests.checker.parts import examine_part, guess_kind, kind_of_name
from equivalence_tests.checker.report import CheckResult, Finding, Report
from equivalence_tests.checker.subject import Adapter, Subject, subjects
from equivalence_tests.checker.tracing import ModuleCall, tensors_in, trace

__all__ = ["examine_layers"]

EXAMINED = ("attention", "layer_norm", "feed_forward", "positional_encoding")


@dataclass(frozen=True)
class Node:
    """A tensor of the forward pass with a name: "x", "memory", or what a sub-module gave."""

    name: str
    value: Tensor


@dataclass(frozen=True)
class Step:
    """One call of a sub-module, what went into it as sums of earlier nodes, and what it is."""

    path: str
    kind: str
    inputs: tuple[tuple[str, ...] | None, ...]
    output: str


def examine_layers(found: Any, name: str, adapter: Adapter) -> Report:
    """Check a layer or a model.

    Args:
        found: Class, instance or factory.
        name: What to call it.
        adapter: How to build it.

    Returns:
        One report for all sub-modules and the wiring.

    Raises:
        CannotCheckError: If it cannot be built, or holds nothing that is known.
    """
    subject = next(subjects(found, name, adapter))
    if subject.module is None:
        raise CannotCheckError(f"{name} is no module")
    subject.function = copy.deepcopy(subject.module)
    torch.set_default_dtype(torch.float64)
    prepare(subject.function)
    report = Report(name, "layers")
    for path, child in _examined_children(subject.function):
        _add_child(report, path, child)
    _add_wiring(report, subject)
    _add_mask_methods(report, subject.function)
    _add_layout_clash(report, subject)
    if not report.checks and type(subject.module).__module__.startswith("torch."):
        report.checks.append(CheckResult("torch.nn's own modules", "passed", "what others are compared with"))
    if not report.checks:
        raise CannotCheckError(
            f"{name} holds no attention, LayerNorm, feed-forward or positional encoding of its own to check"
        )
    unchecked = [c for c in report.checks if c.outcome == "skipped"]
    failed = [c for c in report.checks if c.outcome == "failed"]
    report.verdict = "deviates" if failed else "unchecked" if unchecked else "equal"
    if report.verdict == "unchecked":
        report.reason = "; ".join(f"{c.name}: {c.detail}" for c in unchecked)
    return report


def kind_of(path: str, child: nn.Module) -> str:
    """Tell what a sub-module is, by its class, or else by the name of the attribute that holds it."""
    attribute = "" if type(child).__module__.startswith("torch.") else path.rpartition(".")[2]
    return guess_kind(child) or kind_of_name(attribute)


def _examined_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """List the outermost sub-modules of a known kind, one of each class and shape; torch's own are right."""
    chosen: list[str] = []
    seen: set[tuple[type, tuple[torch.Size, ...]]] = set()
    for path, child in module.named_modules():
        inside = any(path.startswith(f"{other}.") for other in chosen)
        kind = kind_of(path, child)
        leaf_kind = kind in EXAMINED and (any(True for _ in child.parameters()) or kind == "positional_encoding")
        if not path or inside or not leaf_kind or type(child).__module__.startswith("torch."):
            continue
        chosen.append(path)
        mark = (type(child), tuple(p.shape for p in child.parameters()))
        if mark not in seen:
            seen.add(mark)
            yield path, child


def _add_child(report: Report, path: str, child: nn.Module) -> None:
    from equivalence_tests.checker.verify import verify_found

    kind = kind_of(path, child)
    try:
        part = verify_found(child, path) if kind == "attention" else examine_part(child, path, kind, Adapter(), path)
    except CannotCheckError as error:
        part = Report(path, reason=str(error))
    outcome = {"equal": "passed", "deviates": "failed", "unchecked": "skipped"}[part.verdict]
    failed = [c.name for c in part.checks if c.outcome == "failed"]
    detail = "" if part.verdict == "equal" else ", ".join(part.mistakes or failed) or part.reason.partition("\n")[0]
    report.checks.append(CheckResult(f"{path} ({part.kind or kind})", outcome, detail))  # type: ignore[arg-type]
    report.findings += [replace(f, where=path) for f in part.findings]
    report.conventions += [(f"{path}: {what}", here, there) for what, here, there in part.conventions[:1]]
    torch.set_default_dtype(torch.float64)


def _add_mask_methods(report: Report, module: nn.Module) -> None:
    """Check the methods that build masks, as far as they can be read."""
    for name, method in mask_methods(module):
        with contextlib.suppress(CannotCheckError):
            part = examine_mask_builder(method, name)
            if part.verdict != "unchecked":
                outcome: Literal["passed", "failed"] = "failed" if part.findings else "passed"
                report.checks.append(CheckResult(f"{name} (mask builder)", outcome, ", ".join(part.mistakes)))
                report.findings += [replace(finding, where=name) for finding in part.findings]


def _add_wiring(report: Report, subject: Subject) -> None:
    """Read the wiring of the layer itself, or of the first layer inside a stack."""
    module = subject.module
    assert module is not None  # examine_layers asked
    layer_path, layer = _first_layer(module)
    if layer is None:
        return
    inner = Subject(layer_path or subject.name, layer, subject.sizes, subject.source, Adapter())
    names = _wiring_mistakes(inner)
    if names is None:
        report.checks.append(CheckResult("wiring", "skipped", f"no way to call {layer_path or 'it'} was found"))
    else:
        report.checks.append(CheckResult("wiring", "failed" if names else "passed", ", ".join(names)))
    maps = _returned_maps_mistakes(subject)
    if maps is not None:
        report.checks.append(CheckResult("attention maps", "failed" if maps else "passed", ", ".join(maps)))
    for name in dict.fromkeys([*(names or []), *(maps or [])]):
        mistake = PART_MISTAKES[name]
        line = guilty_line(mistake.patterns, subject.source, subject.source)
        evidence = "read off one forward pass: what goes into each sub-module is a sum of earlier tensors, to rounding"
        report.findings.append(
            Finding(
                name,
                mistake.sentence,
                mistake.have,
                mistake.want,
                mistake.fix,
                evidence,
                line,
                mistake.choice,
                (),
                layer_path,
            )
        )


def _first_layer(module: nn.Module) -> tuple[str, nn.Module | None]:
    """The innermost module that holds an attention and something else beside it."""
    found: tuple[str, nn.Module | None] = ("", None)
    for path, child in module.named_modules():
        if kind_of(path, child) == "attention" or type(child).__module__.startswith("torch."):
            continue
        kinds = [kind_of(name, grandchild) for name, grandchild in child.named_children()]
        if "attention" in kinds and len(kinds) > 1 and found[1] is None:
            found = (path, child)
    return found


def _wiring_mistakes(subject: Subject) -> list[str] | None:
    module = subject.module
    assert module is not None  # made from a module
    caller, errors = subject.caller(), list[str]()
    found = next(iter(call_plans(caller, subject.sizes, errors)), None)
    if found is None:
        return None
    plan, lengths = found
    inputs = random_inputs(lengths, plan, 3, caller.dtype)
    names = {name for name, _ in module.named_children()}
    seen = trace(module, lambda: caller.returned(plan, inputs))
    calls = [c for c in seen.calls if c.path in names or kind_of(c.path, module.get_submodule(c.path)) in EXAMINED]
    nodes = [Node("x", inputs.query)] + ([] if plan.self_attention else [Node("memory", inputs.key)])
    steps = list(_steps(module, calls, nodes, plan))
    with torch.no_grad():
        output = caller.output(plan, inputs)
    final = _as_sum(output, nodes, plan)
    return list(_judge_wiring(module, steps, final, plan))


def _steps(module: nn.Module, calls: list[ModuleCall], nodes: list[Node], plan: CallPlan) -> Iterator[Step]:
    for index, call in enumerate(calls):
        child = module.get_submodule(call.path)
        output = next(tensors_in((call.output,)), None)
        if output is None or isinstance(child, nn.Dropout | nn.Identity):
            continue
        inputs = tuple(_as_sum(x, nodes, plan) for x in tensors_in((call.args, call.kwargs)))
        label = f"{call.path}#{index}"
        nodes.append(Node(label, _batch_first(output, plan)))
        yield Step(call.path, kind_of(call.path, child), inputs, label)


def _batch_first(x: Tensor, plan: CallPlan) -> Tensor:
    return x.transpose(0, 1) if plan.sequence_first and x.dim() == 3 else x


def _as_sum(x: Tensor, nodes: list[Node], plan: CallPlan) -> tuple[str, ...] | None:
    """Write a tensor as a sum of one to three earlier ones, the latest first; None if it is none."""
    for tensor, count in itertools.product((x, _batch_first(x, plan)), (1, 2, 3)):
        candidates = [n for n in nodes if n.value.shape == tensor.shape] if x.dim() == 3 else []
        for chosen in itertools.combinations_with_replacement(reversed(candidates[-8:] + candidates[:1]), count):
            if distance(sum(n.value for n in chosen), tensor) < 1e-10:  # type: ignore[arg-type]
                return tuple(n.name for n in chosen)
    return None


def _judge_wiring(module: nn.Module, steps: list[Step], final: tuple[str, ...] | None, plan: CallPlan) -> Iterator[str]:
    norms = {s.output: s for s in steps if s.kind == "layer_norm"}
    sublayers = [s for s in steps if s.kind in ("attention", "feed_forward")]
    sums = [s.inputs[0] for s in steps if s.inputs and s.inputs[0] is not None] + ([final] if final else [])
    called = {s.path for s in steps}
    unused = [n for n, c in module.named_children() if kind_of(n, c) == "layer_norm" and n not in called]
    if unused and norms:
        yield "norm_missing"
    if len({s.path for s in norms.values()}) < len(norms):
        yield "norm_shared"
    pre_norm = bool(sublayers and sublayers[0].inputs and sublayers[0].inputs[0] and sublayers[0].inputs[0][0] in norms)
    for step in sublayers:
        yield from _judge_residual(step, sums, norms, pre_norm)
    if pre_norm and final and len(final) == 1 and final[0] in norms:
        yield "norm_final_extra"
    if not plan.self_attention:
        yield from _judge_cross(module, sublayers, called)


def _judge_residual(step: Step, sums: list[tuple[str, ...]], norms: dict[str, Step], pre_norm: bool) -> Iterator[str]:
    """Look at the sum in which the output of a sub-layer is added to the residual."""
    using = next((s for s in sums if step.output in s), None)
    taken = step.inputs[0] if step.inputs else None
    if using is None or taken is None:
        return
    rest = [name for name in using if name != step.output]
    from_norm = len(taken) == 1 and taken[0] in norms
    if not rest and not _residual_inside(step):
        yield "residual_missing"
    elif len(rest) != len(set(rest)):
        yield "residual_added_twice"
    elif rest and pre_norm and from_norm and rest == list(taken):
        yield "residual_from_normalised"


def _residual_inside(step: Step) -> bool:
    """A sub-layer whose output goes straight on, with no LayerNorm after it, holds its own residual."""
    return step.path.endswith(("block", "sublayer"))


def _judge_cross(module: nn.Module, sublayers: list[Step], called: set[str]) -> Iterator[str]:
    attentions = [s for s in sublayers if s.kind == "attention"]
    uses_memory = [any(part and "memory" in part for part in s.inputs) for s in attentions]
    read = all(part is not None for s in attentions for part in s.inputs)
    uncalled = [n for n, c in module.named_children() if kind_of(n, c) == "attention" and n not in called]
    if uncalled:
        yield "cross_attention_left_out"
    elif attentions and read and not any(uses_memory):
        yield "cross_attention_from_decoder"
    elif attentions and uses_memory[0] and len(attentions) > 1:
        yield "sublayers_in_another_order"


def _returned_maps_mistakes(subject: Subject) -> list[str] | None:
    """Compare the maps that come back with (query, query) and (query, key); None where there are not two kinds."""
    module = subject.module
    assert module is not None  # examine_layers asked
    query_len, key_len = 5, 7
    returned = _call_with_two_lengths(module, subject.sizes, query_len, key_len)
    maps = [x for x in returned if x.dim() >= 3 and x.size(-2) == query_len and x.size(-1) in (query_len, key_len)]
    cross_exists = sum(kind_of(n, c) == "attention" for n, c in module.named_modules()) > 1
    if len(maps) < 2 or not cross_exists:
        return None
    return ["cross_maps_are_self_maps"] if all(x.size(-1) == query_len for x in maps) else []


def _call_with_two_lengths(module: nn.Module, sizes: Sizes, query_len: int, key_len: int) -> list[Tensor]:
    """Call a decoder with token ids or vectors of the target, and of the source, in whatever order it takes them."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, VOCABULARY, (2, n), generator=generator) for n in (query_len, key_len)]
    vectors = [torch.randn(2, n, sizes.embed_dim, generator=generator) for n in (query_len, key_len)]
    options = [*ids, *vectors, None]
    required = [p for p in forward_parameters(module) if p.default is p.empty]
    for values in itertools.islice(itertools.product(options, repeat=len(required)), 700):
        if not any(v is o for v in values for o in (ids[1], vectors[1])) or not any(
            v is o for v in values for o in (ids[0], vectors[0])
        ):
            continue
        try:
            with torch.no_grad():
                return list(tensors_in((module(*values),)))
        except Exception:
            continue
    return []


def _add_layout_clash(report: Report, subject: Subject) -> None:
    """A positional table along axis 0 beside layers that are batch first."""
    module = subject.module
    assert module is not None  # examine_layers asked
    batch_first = any(getattr(child, "batch_first", False) is True for child in module.modules())
    along_first = [c for c in report.conventions if c[0].endswith("positions run along") and c[1].startswith("axis 0")]
    order_rows = _position_axes(module)
    if batch_first and (along_first or order_rows):
        mistake = PART_MISTAKES["position_indexed_by_batch"]
        line = guilty_line(mistake.patterns, subject.source, subject.source)
        evidence = "the table runs along axis 0, and the attention of the same model is batch first"
        report.findings.append(
            Finding(
                mistake.name,
                mistake.sentence,
                mistake.have,
                mistake.want,
                mistake.fix,
                evidence,
                line,
                "",
                (),
                order_rows[0],
            )
        )
        report.checks.append(CheckResult("positional layout", "failed", mistake.name))


def _position_axes(module: nn.Module) -> list[str]:
    """Name the positional encodings that change along axis 0 and not along axis 1."""
    found = []
    for path, child in module.named_modules():
        if not path or kind_of(path, child) != "positional_encoding" or type(child).__module__.startswith("torch."):
            continue
        width = next((x.size(-1) for x in (*child.buffers(), *child.parameters()) if x.dim() >= 2), 0)
        try:
            with torch.no_grad():
                table = next(tensors_in((child(torch.zeros(3, 5, width)),)))
        except Exception:
            continue
        same_tokens = torch.equal(table[:, 0], table[:, 1])
        if same_tokens and not torch.equal(table[0], table[1]):
            found.append(path)
    return found
