"""Rotary positions and models cut among processes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import scratch
from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.traps.entry import Severity, Trap
from scratch import MultiheadAttention, RotaryEmbedding, rotary

__all__ = ["TRAPS", "one_process"]


@contextmanager
def one_process() -> Iterator[DeviceMesh]:
    """Be the only process of a group: what goes wrong with many goes wrong with one."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


class OutProjNotSharded(Trap):
    """out_proj of nn.MultiheadAttention cannot be sharded."""

    number = 67
    name = "out_proj_not_sharded"
    severity = Severity.ERROR
    concerns = ("embed_dim",)
    expects = "A plan that shards the last projection of each attention works for torch's own attention too."
    happens = "The call ends in an error, with one process or with many: parameters of two kinds meet in one product."
    why = (
        "A plan changes parameters, and hooks the module that holds them. torch.nn reads out_proj.weight and never "
        "calls out_proj, so the hooks do not run. The hand-written version calls it."
    )
    places = (Place(MultiheadAttention.forward, "self.out_proj("),)
    instead = (
        "Leave nn.MultiheadAttention unsharded, as tensor_parallel_plan does, or use an attention that calls out_proj."
    )
    raises = "mixed torch.Tensor and DTensor"

    def wrong(self) -> None:
        x = torch.randn(2, 5, 12)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        cut = RowwiseParallel(input_layouts=Replicate())
        with one_process() as mesh:
            parallelize_module(attention, mesh, {"out_proj": cut})
            attention(x, x, x)

    def right(self) -> float:
        x = torch.randn(2, 5, 12)
        attention = scratch.MultiheadAttention(12, 3, batch_first=True)
        cut = RowwiseParallel(input_layouts=Replicate())
        whole, _ = attention(x, x, x)
        with one_process() as mesh:
            parallelize_module(attention, mesh, {"out_proj": cut})
            output, _ = attention(x, x, x)
        difference = (output - whole).abs().max().item()
        print(f"greatest difference from the whole: {difference:.1g}")
        return difference

    def helps(self, right: float) -> bool:
        return right < 1e-6


class RotaryPairings(Trap):
    """Rotary weights trained with adjacent pairs give wrong scores with halves."""

    number = 68
    name = "rotary_pairings"
    severity = Severity.WRONG_NUMBERS
    concerns = ("pairing", "RotaryEmbedding.head_dim")
    expects = "Rotary positions are all alike: Meta's weights for Llama work in code written for transformers."
    happens = (
        "The scores differ, without an error. At position 0 nothing is rotated, and with heads of 2 features there is "
        "only one pair, so tests of either case notice nothing."
    )
    why = (
        "Feature 1 is paired with feature 0 in one layout, and with feature 1 + head_dim / 2 in the other. Each pair "
        "has its own angle, so it is a different rotation."
    )
    places = (Place(RotaryEmbedding._rotate, "rotate ="), Place(rotary.adjacent_to_halves, "return weight"))
    instead = "Reorder the rows of both projections with adjacent_to_halves(weight, head_dim), or its inverse."
    issues = ("huggingface/transformers#25199",)

    def wrong(self) -> float:
        x, q_proj, k_proj = torch.randn(5, 12), torch.randn(8, 12), torch.randn(8, 12)

        def scores(pairing: rotary.Pairing, q_proj: Tensor, k_proj: Tensor) -> Tensor:
            turn = RotaryEmbedding(8, pairing=pairing)
            return turn(x @ q_proj.T) @ turn(x @ k_proj.T).T

        trained = scores("adjacent", q_proj, k_proj)
        difference = (scores("halves", q_proj, k_proj) - trained).abs().max().item()
        print(f"greatest difference of the scores: {difference:.1f}")
        return difference

    def right(self) -> float:
        x, q_proj, k_proj = torch.randn(5, 12), torch.randn(8, 12), torch.randn(8, 12)

        def scores(pairing: rotary.Pairing, q_proj: Tensor, k_proj: Tensor) -> Tensor:
            turn = RotaryEmbedding(8, pairing=pairing)
            return turn(x @ q_proj.T) @ turn(x @ k_proj.T).T

        trained = scores("adjacent", q_proj, k_proj)
        q_proj, k_proj = (rotary.adjacent_to_halves(w, 8) for w in (q_proj, k_proj))
        difference = (scores("halves", q_proj, k_proj) - trained).abs().max().item()
        print(f"greatest difference of the scores: {difference:.1g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong > 1

    def helps(self, right: float) -> bool:
        return right < 1e-4


TRAPS = (OutProjNotSharded, RotaryPairings)
