"""``sidebyside compare --ranks``: several processes give the numbers of one, whichever way the work is shared."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import builtin
import scratch
from equivalence_tests.compare.processes import Tell, run_ranks
from equivalence_tests.compare.training import PARAMETER_BOUND
from equivalence_tests.instruments.differences import FLOAT64_BOUND, compare_group
from equivalence_tests.instruments.weights import randomize_parameters
from scratch.parallel import tensor_parallel_plan

__all__ = ["CONTEXT_PARALLEL", "RankRow", "STRATEGIES", "compare_ranks", "number_of_comparisons"]

CONTEXT_PARALLEL = "Context parallelism is left out: torch has no strategy for it on the CPU."
STEPS, BATCH, LENGTH, VOCABULARY = 10, 8, 5, 17
PACKAGES = {"scratch": scratch, "builtin": builtin}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@dataclass(frozen=True)
class RankRow:
    """One quantity of one model under one strategy, on the rank where it differs most.

    Args:
        strategy: "DDP", "FSDP2" or "tensor parallel".
        model: Package and class.
        quantity: "output", "gradients", or "10 steps of sgd" or "adam".
        greatest_difference: From what one process computes.
        bound: What is allowed.
        passed: Whether it is kept.
        detail: The worst element in words.
    """

    strategy: str
    model: str
    quantity: str
    greatest_difference: float
    bound: float
    passed: bool
    detail: str


def _shared_by_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:  # noqa: ARG001  one signature for all
    return DistributedDataParallel(model)


def _shared_by_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _cut_by_plan(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, tensor_parallel_plan(model, mesh.size()).styles)


# How a model is shared, and whether the batch is.
STRATEGIES: dict[str, tuple[Callable[[nn.Module, DeviceMesh], nn.Module], bool]] = {
    "DDP": (_shared_by_ddp, True),
    "FSDP2": (_shared_by_fsdp, True),
    "tensor parallel": (_cut_by_plan, False),
}


def _language_model(package: Any) -> nn.Module:
    """Everything that both packages can train on the CPU, at sizes that two and four processes divide."""
    options = {"num_key_heads": 4, "head_dim": 6, "qk_norm": True, "window": (None, 3), "sinks": True, "bias": True}
    return package.DecoderOnlyTransformer(VOCABULARY, 13, 8, 2, 12, **options)


def _encoder(package: Any) -> nn.Module:
    layer = package.TransformerEncoderLayer(12, 4, 20, dropout=0.0, activation="gelu", batch_first=True)
    return package.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "DecoderOnlyTransformer": _language_model,
    "TransformerEncoder": _encoder,
}


def number_of_comparisons() -> int:
    """Say how many strategies and models each rank goes through."""
    return len(STRATEGIES) * len(MODELS) * len(PACKAGES)


def compare_ranks(num_ranks: int, device: str, seed: int, advance: Callable[[str], None]) -> list[RankRow]:
    """Compute in several processes and in one, and compare.

    Args:
        num_ranks: Number of processes: 2 or 4.
        device: "cpu" or "cuda".
        seed: Of weights and inputs.
        advance: Told what has been compared, once for each strategy and model.

    Returns:
        One row for each quantity.

    Raises:
        RanksFailedError: If a process dies, raises or falls silent.
    """
    found: dict[tuple[str, str, str], RankRow] = {}
    for rank, rows in run_ranks(_compare_on_one_rank, num_ranks, (seed, device), device=device):
        for row in rows:
            key = (row.strategy, row.model, row.quantity)
            worst = found.setdefault(key, row)
            if (not row.passed, row.greatest_difference) > (not worst.passed, worst.greatest_difference):
                found[key] = row
        if rank == 0:
            advance(f"compared {rows[0].strategy}, {rows[0].model}")
    return list(found.values())


def _compare_on_one_rank(rank: int, num_ranks: int, tell: Tell, argument: tuple[int, str]) -> None:
    seed, device = argument
    mesh = init_device_mesh(device, (num_ranks,))
    for model_name, build in MODELS.items():
        for package_name, package in PACKAGES.items():
            model = randomize_parameters(build(package).to(device, torch.float64), seed=seed)
            x = _inputs(model_name, seed).to(device)
            alone = list(_outputs_gradients_and_parameters(model, x, lambda model: model))
            for strategy, (share, batch_is_cut) in STRATEGIES.items():
                part = x.chunk(num_ranks)[rank] if batch_is_cut else x
                together = _outputs_gradients_and_parameters(model, part, lambda model: share(model, mesh))  # noqa: B023
                expected = [_cut_output(y, rank, num_ranks, batch_is_cut) for y in alone]
                results = zip(_quantities(), together, expected, strict=True)
                tell([_row(strategy, f"{package_name}.{model_name}", *both) for both in results])


def _quantities() -> list[tuple[str, float]]:
    return [
        ("output", FLOAT64_BOUND),
        ("gradients", FLOAT64_BOUND),
        *((f"{STEPS} steps of {name}", PARAMETER_BOUND[name]) for name in OPTIMIZERS),
    ]


def _outputs_gradients_and_parameters(
    model: nn.Module, x: Tensor, share: Callable[[nn.Module], nn.Module]
) -> Iterator[dict[str, Tensor]]:
    first = share(copy.deepcopy(model))
    output = first(x)
    output.square().mean().backward()
    yield {"output": output.detach()}
    yield {name: _whole(p.grad) for name, p in _parameters(first) if p.grad is not None}
    for build in OPTIMIZERS.values():
        trained = share(copy.deepcopy(model))
        optimizer = build(trained.parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            trained(x).square().mean().backward()
            optimizer.step()
        yield {name: _whole(p.detach()) for name, p in _parameters(trained)}


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name.removeprefix("module."), p) for name, p in model.named_parameters()]


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _cut_output(tensors: dict[str, Tensor], rank: int, num_ranks: int, batch_is_cut: bool) -> dict[str, Tensor]:
    if "output" not in tensors or not batch_is_cut:
        return tensors
    return {"output": tensors["output"].chunk(num_ranks)[rank]}


def _row(
    strategy: str, model: str, quantity: tuple[str, float], actual: dict[str, Tensor], expected: dict[str, Tensor]
) -> RankRow:
    name, bound = quantity
    comparisons = compare_group(actual, expected, relative_bound=bound)
    worst = max(comparisons, key=lambda x: (not x.passed, x.max_abs_difference))
    passed = all(x.passed for x in comparisons)
    return RankRow(strategy, model, name, worst.max_abs_difference, worst.bound, passed, str(worst))


def _layers(model: nn.Module) -> list[nn.Module]:
    layers: Any = model.layers
    return list(layers)


def _inputs(model_name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if model_name == "DecoderOnlyTransformer":
        return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    return torch.randn(BATCH, LENGTH, 12, dtype=torch.float64, generator=generator)
