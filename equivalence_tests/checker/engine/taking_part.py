"""Which operations, and which parameters, take part in what comes back."""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from equivalence_tests.checker.engine.names import Attention, Run
from equivalence_tests.checker.engine.vocabulary import CONTRACTIONS
from equivalence_tests.checker.engine.watching import Operation, storage_of


def live_operations(run: Run) -> set[int]:
    """Give the indices of the operations on which what comes back depends."""
    needed = {storage_of(x) for x in tree_leaves(run.output) if isinstance(x, Tensor)}
    live: set[int] = set()
    if not needed:
        return {operation.index for operation in run.operations}
    for operation in reversed(run.operations):
        if any(storage_of(slot.tensor) in needed for slot in operation.outputs):
            live.add(operation.index)
            needed |= {storage_of(slot.tensor) for slot in operation.inputs}
    return live


def idle_modules(run: Run, module: nn.Module) -> set[str]:
    """Name the modules inside of whose parameters nothing is made that comes back."""
    idle = set(unused_parameters(run, module))
    owned = {path: {name for name, _ in child.named_parameters(path)} for path, child in module.named_modules() if path}
    return {path for path, names in owned.items() if names and names <= idle}


def unused_parameters(run: Run, module: nn.Module | None) -> list[str]:
    """Name the parameters of which nothing is made that comes back."""
    if module is None:
        return []
    bits, live = 0, live_operations(run)
    for operation in run.operations:
        for origin in operation.origins if operation.index in live else ():
            bits |= origin
    used = set(run.recorder.named(bits))
    hidden = tuple(f"{path}." for path, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule))
    named = [(name, x) for name, x in module.named_parameters() if not name.startswith(hidden)]
    idle = [(name, x) for name, x in named if f"param:{name}" not in used]
    kept = _of_no_origin(run, live) if idle else []
    return [name for name, x in idle if not any(bool(torch.isin(own, x.detach().to(own.dtype)).all()) for own in kept)]


def _of_no_origin(run: Run, live: set[int]) -> list[Tensor]:
    """Tensors that the code kept from an earlier run: they may be made of what is a parameter."""
    found: dict[int, Tensor] = {}
    for operation in run.operations:
        for slot, origins in zip(operation.inputs, operation.origins, strict=True):
            if not origins and operation.index in live and slot.value.is_floating_point() and slot.value.numel() > 1:
                found.setdefault(slot.key, slot.value)
    return list(found.values())


def matrix_in(attention: Attention, operation: Operation | None) -> str:
    """Name the parameter that is the matrix of a product; "" if none is."""
    return place_of_matrix(attention, operation)[0]


def place_of_matrix(attention: Attention, operation: Operation | None) -> tuple[str, int]:
    """Name the matrix of a product, and say where in memory it starts: packed matrices have one name."""
    if operation is None or operation.name not in CONTRACTIONS:
        return "", 0
    followed, recorder = attention.run.names, attention.run.recorder
    tokens = {source.slot.key for source in followed.sources.values()} | {x.key for x, _ in followed.taken(operation)}
    pairs = zip(operation.inputs, operation.origins, strict=True)
    for slot, bits in sorted(pairs, key=lambda pair: pair[0].key in tokens):  # tokens may be learnt too
        given = any(name.startswith("arg:") for name in recorder.named(bits))
        if slot.value.dim() >= 2 and not given and recorder.parameters(bits):
            return recorder.parameters(bits)[0], slot.value.data_ptr()
    return "", 0
