"""How a model is split across processes: plans for ``torch.distributed.tensor.parallel.parallelize_module``.

Of two consecutive linear layers, the first is split by its output features and the second by its input features. Each
process then holds whole heads, or whole hidden units, and a single sum at the end is all that they exchange.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from scratch import validation

__all__ = ["TensorParallelPlan", "tensor_parallel_plan"]

# By what a module holds: the linear layers that are cut by output features, and the one behind them.
PAIRS = (
    (("q_proj", "k_proj", "v_proj"), "out_proj"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("linear1",), "linear2"),
)
HEADS = 1  # where they are in (batch, num_heads, len, head_dim)


@dataclass(frozen=True)
class TensorParallelPlan:
    """What is split, and what every process holds as a whole.

    Args:
        styles: How each module is split, by its path: the ``parallelize_plan`` of ``parallelize_module``.
        replicated: The reason for each attention that stays whole, by its path.
    """

    styles: dict[str, ParallelStyle] = field(default_factory=dict)
    replicated: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{path}: {type(style).__name__}" for path, style in self.styles.items()]
        return "\n".join(lines + [f"{path}: replicated, because {reason}" for path, reason in self.replicated.items()])


def tensor_parallel_plan(module: nn.Module, num_ranks: int) -> TensorParallelPlan:
    """Plan how the attentions and feed-forward networks of a model are split across processes.

    ``SwiGLU``, ``GroupedQueryAttention`` with its sinks, and the feed-forward network of ``TransformerEncoderLayer``
    and ``TransformerDecoderLayer`` are split; embeddings and norms stay whole, and the gradients of the norms of
    queries and keys, of which each process sees its own heads only, are summed. ``MultiheadAttention`` stays whole too:
    the rows of its packed ``in_proj_weight`` are queries, then keys, then values, and a split would separate these
    instead of heads.

    Args:
        module: A model, a layer or one of these parts, of ``scratch`` or ``builtin``.
        num_ranks: Number of processes; divides the numbers of heads, key heads and hidden units.

    Returns:
        The plan. ``parallelize_module(module, mesh, plan.styles)`` carries it out.

    Raises:
        ValueError: If num_ranks is below 1, or does not divide what is to be split.

    In torch.nn: ``nn.MultiheadAttention`` reads ``out_proj.weight`` without calling ``out_proj``, so that a
    plan which splits it fails.

    Source: Shoeybi et al. 2019, section 3.

    >>> from scratch import GroupedQueryAttention, MultiheadAttention
    >>> parts = nn.ModuleDict({"grouped": GroupedQueryAttention(12, 6, 2), "packed": MultiheadAttention(12, 6)})
    >>> print(tensor_parallel_plan(parts, num_ranks=2))
    grouped.q_proj: ColwiseParallel
    grouped.k_proj: ColwiseParallel
    grouped.v_proj: ColwiseParallel
    grouped.out_proj: RowwiseParallel
    packed: replicated, because rows of in_proj_weight are queries, keys and values in turn
    """
    validation.check_positive(num_ranks=num_ranks)
    plan = TensorParallelPlan()
    for path, child in module.named_modules():
        for first, second in _pairs_in(child):
            _check_divisible(path, child, first, num_ranks)
            plan.styles.update({_join(path, name): ColwiseParallel() for name in first})
            plan.styles[_join(path, second)] = RowwiseParallel()
        for name in ("q_norm", "k_norm"):
            if list(getattr(child, name, nn.Identity()).parameters()):
                plan.styles[_join(path, name)] = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
        if isinstance(getattr(child, "sinks", None), nn.Parameter):
            plan.styles[path] = ShardedSinks()
        if getattr(child, "in_proj_weight", None) is not None:
            plan.replicated[path] = "rows of in_proj_weight are queries, keys and values in turn"
    return plan


class ShardedSinks(ParallelStyle):
    """Leave each process the sinks of its own heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        sinks = distribute_tensor(module.get_parameter("sinks").detach(), device_mesh, [Shard(0)])
        module.register_parameter("sinks", nn.Parameter(sinks))
        module.register_forward_pre_hook(_show_own_sinks)
        module.register_forward_hook(_hide_own_sinks, always_call=True)
        return module


def _show_own_sinks(module: nn.Module, inputs: Any) -> None:  # noqa: ARG001  torch's signature
    sinks: Any = module.get_parameter("sinks")
    assert isinstance(sinks, DTensor)
    vars(module)["sinks"] = sinks.to_local()  # found before the parameter, and differentiable


def _hide_own_sinks(module: nn.Module, inputs: Any, output: Tensor) -> None:  # noqa: ARG001  torch's signature
    del vars(module)["sinks"]


def _pairs_in(module: nn.Module) -> Iterator[tuple[tuple[str, ...], str]]:
    children = {name for name, child in module.named_children() if isinstance(child, nn.Linear)}
    return ((first, second) for first, second in PAIRS if {*first, second} <= children)


def _check_divisible(path: str, module: nn.Module, first: tuple[str, ...], num_ranks: int) -> None:
    for name in first:
        features = module.get_submodule(name).get_parameter("weight").size(0)
        head_dim: Any = getattr(module, "head_dim", 1)
        validation.check_ranks_divide(_join(path, name), features // head_dim, num_ranks)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
