"""Run a whole model on token ids: are its layers chained, does the decoder read the encoder, do positions count?"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.calling import forward_parameters, role_of_parameter
from equivalence_tests.checker.masking import MaskForm
from equivalence_tests.checker.tracing import ModuleCall, tensors_in, trace

__all__ = ["ModelRun", "judge_model", "run_model"]

TARGET = re.compile(r"tgt|trg|target|dec|^y$|output")
SOURCE_LEN, TARGET_LEN, BATCH = 7, 5, 2
FIRST_ID = 4  # lower ones are often padding, start and end
GENERATES = re.compile(r"gpt|decoder|language|causal|lm$", re.IGNORECASE)


@dataclass(frozen=True)
class ModelRun:
    """How a model is called with token ids.

    Args:
        call: Gives the output, (batch, len, features), of source and target ids.
        source: Ids of the source; the only ones where there is one sequence.
        target: Ids of the target; None where there is one sequence.
        masked: Whether masks come from outside.
    """

    call: Callable[[Tensor, Tensor | None], Tensor]
    source: Tensor
    target: Tensor | None
    masked: bool


def run_model(module: nn.Module) -> ModelRun | None:
    """Find out how to call a model with token ids.

    Args:
        module: A model with embeddings.

    Returns:
        How, or None if no way was found.
    """
    embeddings = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
    if not embeddings or min(embeddings) <= FIRST_ID + 2:
        return None
    required = [p for p in forward_parameters(module) if p.default is p.empty]
    masks = [p.name for p in forward_parameters(module) if role_of_parameter(p.name) == "mask"]
    ids = [p.name for p in required if p.name not in masks]
    if len(ids) not in (1, 2):
        return None
    generator = torch.Generator().manual_seed(0)
    drawn = [_distinct(min(embeddings), length, generator) for length in (SOURCE_LEN, TARGET_LEN)[: len(ids)]]
    names = sorted(ids, key=lambda name: bool(TARGET.search(name.lower()))) if len(ids) == 2 else ids
    needed = [p.name for p in required if p.name in masks]
    runs = [
        _run(module, names, drawn, given, turned, bool(masks))
        for given, turned in itertools.product(_mask_values(needed), (False, True))
    ]
    working = [run for run in runs if run is not None]
    return next((run for run in working if _samples_are_independent(run)), None)


def _samples_are_independent(run: ModelRun) -> bool:
    """Whether other ids in sample 0 leave sample 1 alone: else batch and length are mixed up."""
    others = [x if x is None else torch.cat([x[:1].flip(1), x[1:]]) for x in (run.source, run.target)]
    assert others[0] is not None  # a source there is
    try:
        with torch.no_grad():
            before, after = run.call(run.source, run.target), run.call(others[0], others[1])
    except Exception:  # not with these ids
        return False
    return bool(torch.allclose(before[1], after[1], rtol=1e-9, atol=1e-11))


def _distinct(size: int, length: int, generator: torch.Generator) -> Tensor:
    """Draw ids, no two of a row alike where the vocabulary allows it."""
    rows = [FIRST_ID + torch.randperm(size - FIRST_ID, generator=generator) for _ in range(BATCH)]
    return torch.stack([row.repeat(length)[:length] for row in rows])


def _mask_values(names: list[str]) -> Iterator[dict[str, MaskForm | None]]:
    """Nothing for each mask that is required, or one that hides nothing."""
    forms: list[MaskForm | None] = [None, *MaskForm.neutral_forms()] if names else [None]
    for form in forms:
        yield dict.fromkeys(names, form)


def _run(
    module: nn.Module,
    names: list[str],
    drawn: Sequence[Tensor],
    masks: dict[str, MaskForm | None],
    turned: bool,
    masked: bool,
) -> ModelRun | None:
    def call(source: Tensor, target: Tensor | None) -> Tensor:
        given = [source] if target is None else [source, target]
        arguments: dict[str, Any] = {n: x.T if turned else x for n, x in zip(names, given, strict=True)}
        arguments |= {name: _neutral(form, name, source, target) for name, form in masks.items()}
        return _output(module(**arguments), given[-1], turned)

    source, target = drawn[0], drawn[1] if len(drawn) == 2 else None
    try:
        call(source, target)
    except Exception:  # not the way in which it is called
        return None
    return ModelRun(call, source, target, masked)


def _neutral(form: MaskForm | None, name: str, source: Tensor, target: Tensor | None) -> Tensor | None:
    if form is None:
        return None
    of_target = target is not None and TARGET.search(name.lower())
    length = target.size(1) if of_target and target is not None else source.size(1)
    return form.build(torch.ones(BATCH, length, length, dtype=torch.bool), 1, torch.get_default_dtype())


def _output(returned: Any, ids: Tensor, turned: bool) -> Tensor:
    """Pick what has one row for each token of the last sequence, batch first."""
    found = [x.transpose(0, 1) if turned and x.dim() == 3 else x for x in tensors_in((returned,))]
    for x in found:
        if x.dim() == 3 and x.shape[:2] == ids.shape:
            return x
    for x in found:  # all tokens in one axis
        if x.dim() == 2 and len(x) == ids.numel():
            return x.view(*ids.shape, -1) if not turned else x.view(*ids.T.shape, -1).transpose(0, 1)
    for x in found:  # of the last token, or of the whole sequence
        if x.dim() in (2, 3) and len(x) == len(ids) and x.size(1) != ids.size(1):
            return x if x.dim() == 3 else x[:, None]
    raise ValueError("no output for each token")


def judge_model(module: nn.Module, run: ModelRun) -> Iterator[tuple[str, str, str]]:
    """Look at how a model is put together.

    Args:
        module: The model.
        run: How it is called.

    Yields:
        What was looked at, the name of the mistake ("" if there is none), and where.
    """
    yield from _unused(module, run)
    with torch.no_grad():
        yield from _judge_order(module, run)


def _judge_order(module: nn.Module, run: ModelRun) -> Iterator[tuple[str, str, str]]:
    seen = trace(module, lambda: run.call(run.source, run.target)).calls
    stacks = list(_stacks(module))
    for path, layers in stacks:
        yield "layers of their own", "layers_share_parameters" if _shared(layers) else "", path
        yield "layers feed one another", "" if _chained(path, len(layers), seen) else "layers_not_chained", path
    if run.target is not None and len(stacks) == 2:
        yield "memory", "" if _memory_is_encoded(stacks, seen) else "memory_is_not_encoder_output", stacks[1][0]
    yield from _judge_tokens(module, run)


def _unused(module: nn.Module, run: ModelRun) -> Iterator[tuple[str, str, str]]:
    """Name the norms and embeddings that no gradient reaches, where it reaches what stands beside them."""
    module.zero_grad(set_to_none=True)
    run.call(run.source, run.target).square().sum().backward()
    for path, child in module.named_modules():
        small = "norm" in type(child).__name__.lower() or isinstance(child, nn.Embedding)
        alone = small and not list(child.children()) and any(p.requires_grad for p in child.parameters())
        if alone and not _reached(child) and _reached(_owner(module, path)):
            yield "all parts take part", "part_never_used", path
    module.zero_grad(set_to_none=True)


def _reached(module: nn.Module) -> bool:
    return any(p.grad is not None for p in module.parameters())


def _owner(module: nn.Module, path: str) -> nn.Module:
    """The module that calls a part: if nothing of it is reached, it stands on another branch, or is left out whole."""
    owner = path.rpartition(".")[0]
    while owner and isinstance(module.get_submodule(owner), nn.ModuleDict | nn.ModuleList):
        owner = owner.rpartition(".")[0]
    return module.get_submodule(owner)


def _judge_tokens(module: nn.Module, run: ModelRun) -> Iterator[tuple[str, str, str]]:
    causal = run.target is not None or GENERATES.search(type(module).__name__)
    if causal and not run.masked:
        yield "the future is unseen", "future_is_seen" if _future_is_seen(run) else "", ""
    if run.target is not None:
        yield "positions of the source", "no_positions" if _source_order_is_lost(run) else "", "source"
    last = run.source if run.target is None else run.target
    if not (run.target is None and _future_is_seen(run)):
        yield "positions", "no_positions" if _order_is_lost(run, last) else "", "" if run.target is None else "target"


def _stacks(module: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """List the stacks of at least two layers that hold an attention, those not inside another."""
    outer: list[str] = []
    for path, child in module.named_modules():
        layers = list(child) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        inside = any(path.startswith(f"{other}.") for other in outer)
        alike = len({type(layer) for layer in layers}) == 1 and not isinstance(layers[0], nn.ModuleList | nn.Linear)
        if len(layers) > 1 and alike and not inside and len(list(layers[0].children())) > 1:
            outer.append(path)
            yield path, layers


def _shared(layers: list[nn.Module]) -> bool:
    first, second = ({id(p) for p in layer.parameters()} for layer in layers[:2])
    return bool(first) and first == second


def _inputs(calls: list[ModuleCall], path: str) -> list[Tensor]:
    found = next((call for call in calls if call.path == path), None)
    return [] if found is None else [x for x in tensors_in((found.args, found.kwargs)) if x.dim() == 3]


def _outputs(calls: list[ModuleCall], path: str) -> Tensor | None:
    found = next((call for call in calls if call.path == path), None)
    return None if found is None else next(tensors_in((found.output,)), None)


def _chained(path: str, count: int, calls: list[ModuleCall]) -> bool:
    """Whether no layer after the first reads just what the first read, and nothing of the one before."""
    given = [_inputs(calls, f"{path}.{i}") for i in range(count)]
    results = [_outputs(calls, f"{path}.{i}") for i in range(count)]
    for i in range(1, count):
        before = results[i - 1]
        if before is None or not given[i] or len(given[i]) != len(given[0]):
            continue
        repeated = all(_same(x, y) for x, y in zip(given[i], given[0], strict=True))
        if repeated and not any(_same(x, before) for x in given[i]):
            return False
    return True


def _memory_is_encoded(stacks: list[tuple[str, list[nn.Module]]], calls: list[ModuleCall]) -> bool:
    """Whether the decoder's layers read something that was there only after the encoder's last layer."""
    (encoder, layers), (decoder, _) = stacks
    order = [call.path for call in calls]
    last = f"{encoder}.{len(layers) - 1}"
    given = _inputs(calls, f"{decoder}.0")
    if last not in order or len(given) < 2:
        return True
    early = calls[: order.index(f"{encoder}.0")]
    first_inputs = _inputs(calls, f"{encoder}.0")[:1]
    known = [x for call in early for x in tensors_in((call.output,))] + first_inputs
    memories = [x for x in given if SOURCE_LEN in x.shape[:2]]
    return not memories or not all(any(_same(x, y) for y in known) for x in memories)


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-10, atol=1e-12)


def _future_is_seen(run: ModelRun) -> bool:
    ids = run.source if run.target is None else run.target
    other = ids.clone()
    other[:, -2] = ids[:, 0]  # the last one may be cut off, where targets are shifted inside
    before, after = _with(run, ids), _with(run, other)
    return not torch.allclose(before[:, :-2], after[:, :-2], rtol=1e-9, atol=1e-11)


def _order_is_lost(run: ModelRun, ids: Tensor) -> bool:
    """Whether exchanging the first two tokens leaves the last output alone."""
    exchanged = ids[:, [1, 0, *range(2, ids.size(1))]]
    before, after = _with(run, ids), _with(run, exchanged)
    return torch.allclose(before[:, -1], after[:, -1], rtol=1e-9, atol=1e-11)


def _source_order_is_lost(run: ModelRun) -> bool:
    exchanged = run.source[:, [1, 0, *range(2, run.source.size(1))]]
    before, after = run.call(run.source, run.target), run.call(exchanged, run.target)
    return torch.allclose(before, after, rtol=1e-9, atol=1e-11)


def _with(run: ModelRun, ids: Tensor) -> Tensor:
    return run.call(ids, None) if run.target is None else run.call(run.source, ids)
