"""Who takes part in a case: by hand, the built-in on each of its paths, torch's functions, and the user's own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import builtin
import scratch
from benchmarks.cases import Case
from benchmarks.own import is_own, own_takes_part, own_workload
from benchmarks.workloads import Workload, seen_lengths, workload
from equivalence_tests.side_by_side import fast_path

__all__ = ["BASELINE", "CONTENDERS", "Contender", "contenders_of"]

BASELINE = "builtin"
BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
FAST_PATH_COMPONENTS = ("self_attention", "encoder_layer", "transformer", "seq2seq", "generate")


@dataclass(frozen=True)
class Contender:
    """One implementation, or one path through it.

    Args:
        name: How it is called in tables.
        meaning: What it is, in a few words.
        prepare: Builds its share of a case.
        takes_part: Whether there is such a thing in a case.
        backend: The kernel that ``F.scaled_dot_product_attention`` is held to, with the fast path off.
        fast_path: Whether torch's fused fast path may be taken.
    """

    name: str
    meaning: str
    prepare: Callable[[Case], Workload]
    takes_part: Callable[[Case], bool] = lambda _: True
    backend: SDPBackend | None = None
    fast_path: bool = True

    @contextmanager
    def switches(self) -> Iterator[None]:
        """Set torch's switches while it runs."""
        with fast_path(self.fast_path), ExitStack() as stack:
            if self.backend is not None:
                stack.enter_context(sdpa_kernel(self.backend))
            yield


def _flex(case: Case) -> Workload:
    block_mask = None
    if case.mask != "none":
        sizes = (case.batch, None, case.query_len, case.key_len)
        block_mask = create_block_mask(_mask_function(case), *sizes, device=case.device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return compiled(query, key, value, block_mask=block_mask)

    return workload(case, builtin, attend=attend)


def _mask_function(case: Case) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Say who may look in flex attention's way: by the numbers of sample, head, query and key."""
    lengths = seen_lengths(case).to(case.device)

    def may_attend(sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = key < lengths[sample]
        return seen & (key <= query) if case.is_causal else seen

    return may_attend


def _without_weights(case: Case) -> bool:
    return case.component in ("attention", "self_attention", "cross_attention") and not case.need_weights


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(
            "builtin", "torch.nn, behind the same checks of arguments as by hand", lambda case: workload(case, builtin)
        ),
        Contender("scratch", "by hand", lambda case: workload(case, scratch, cached=True)),
        Contender(
            "scratch recomputed",
            "by hand, every step of decoding anew",
            lambda case: workload(case, scratch),
            takes_part=lambda case: case.component == "generate",
        ),
        Contender(
            "no fast path",
            "torch.nn with its fused fast path switched off",
            lambda case: workload(case, builtin),
            takes_part=lambda case: case.mode == "forward" and case.component in FAST_PATH_COMPONENTS,
            fast_path=False,
        ),
        *(
            Contender(
                name,
                f"torch.nn held to the {name} kernel of F.scaled_dot_product_attention",
                lambda case: workload(case, builtin),
                takes_part=_without_weights,
                backend=backend,
                fast_path=False,
            )
            for name, backend in BACKENDS.items()
        ),
        Contender(
            "sdpa",
            "F.scaled_dot_product_attention, called directly",
            lambda case: workload(case, builtin, attend=F.scaled_dot_product_attention),
            takes_part=lambda case: case.component == "attention",
        ),
        Contender("flex", "flex attention, compiled", _flex, takes_part=lambda case: case.component == "attention"),
    )
}


def contenders_of(case: Case, chosen: Sequence[str]) -> list[Contender]:
    """List who takes part in a case, the built-in first: the others are compared with it.

    Args:
        case: What is computed.
        chosen: Names; the built-in takes part in any case.

    Returns:
        Those of the chosen for which the case means something.
    """
    known = [x for name, x in CONTENDERS.items() if name in chosen or name == BASELINE]
    return [x for x in (*known, *map(_own, filter(is_own, chosen))) if x.takes_part(case)]


def _own(name: str) -> Contender:
    return Contender(name, "your own", partial(own_workload, name), partial(own_takes_part, name))
