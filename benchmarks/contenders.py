"""Who takes part in a case: by hand, the built-in on each of its paths, torch's functions, and the user's own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from benchmarks.grids import TOKEN_LEVEL, Case
from benchmarks.own import is_in_torch, is_own, own_takes_part, own_workload
from benchmarks.peers import PEERS
from benchmarks.workloads import Workload, seen_lengths, workload
from equivalence_tests.instruments.side_by_side import TORCH, fast_path
from scratch.tiling import TILES_FROM

__all__ = ["BASELINE", "CONTENDERS", "Contender", "absence", "call_of", "contenders_of"]

BASELINE = "builtin"
KERNEL = "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.{})"
BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
WITH_FAST_PATH = ("self_attention", "encoder_layer", "transformer", "seq2seq")
NAMES = {  # of what computes a component in each package
    "attention": "scaled_dot_product_attention",
    "self_attention": "MultiheadAttention",
    "cross_attention": "MultiheadAttention",
    "encoder_layer": "TransformerEncoderLayer",
    "decoder_layer": "TransformerDecoderLayer",
    "transformer": "Transformer",
    "seq2seq": "Seq2SeqTransformer",
    "generate": "Seq2SeqTransformer",
}


@dataclass(frozen=True)
class Contender:
    """One implementation, or one path through it.

    Args:
        name: Its name in tables and on the command line.
        meaning: What it is, in a few words that also fit into a sentence: "use ...".
        prepare: Builds its share of a case.
        call: What a program writes to compute so; "{name}" stands for the class or function.
        takes_part: Whether there is such a thing in a case.
        otherwise: Why not, where there is none.
        backend: The kernel that ``F.scaled_dot_product_attention`` is held to; MATH keeps scratch to the textbook.
        fast_path: Whether torch's fused fast path may be taken.
        kernel: Switches on a kernel of scratch's while it runs.
    """

    name: str
    meaning: str
    prepare: Callable[[Case], Workload]
    call: str = ""
    takes_part: Callable[[Case], bool] = lambda _: True
    otherwise: str = ""
    backend: SDPBackend | None = None
    fast_path: bool = True
    kernel: Callable[[], AbstractContextManager[None]] = nullcontext

    @contextmanager
    def switches(self) -> Iterator[None]:
        """Set the switches while it runs."""
        with fast_path(self.fast_path), self.kernel(), ExitStack() as stack:
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
        return compiled(query, key, value, block_mask=block_mask, enable_gqa=bool(case.key_heads))

    return workload(case, builtin, attend=attend)


def _peer(name: str, case: Case) -> Workload:
    def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, **_: Any) -> Tensor:
        return PEERS[name](query, key, value, is_causal)

    return workload(case, builtin, attend=attend)


def _has_peers(case: Case) -> bool:
    """Whether attention as people usually write it computes this case."""
    plain = case.mask in ("none", "causal") and not case.compiled and not case.key_heads
    return case.component == "attention" and plain


def _packed(case: Case) -> Workload:
    """Leave the padding out of the keys."""
    lengths = seen_lengths(case).to(case.device)
    seen = torch.arange(case.key_len, device=case.device) < lengths[:, None]  # (b, k)
    begins = torch.arange(case.batch + 1, device=case.device) * case.query_len, F.pad(lengths.cumsum(0), (1, 0))
    cu_seq_q, cu_seq_k = (x.int() for x in begins)

    def attend(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        q, k, v = query.transpose(1, 2).flatten(0, 1), key.transpose(1, 2)[seen], value.transpose(1, 2)[seen]
        sizes = (cu_seq_q, cu_seq_k, case.query_len, case.key_len)
        context = scratch.varlen_attn(q, k, v, *sizes, enable_gqa=bool(case.key_heads))
        return context.unflatten(0, (case.batch, -1)).transpose(1, 2)

    return workload(case, scratch, attend=attend)


def _mask_function(case: Case) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Say who may look in flex attention's way: by the numbers of sample, head, query and key."""
    lengths = seen_lengths(case).to(case.device)

    def may_attend(sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = key < lengths[sample]
        if case.window:
            return seen & (key <= query) & (query - key < case.window)
        return seen & (key <= query) if case.is_causal else seen

    return may_attend


def _in_tiles(case: Case) -> bool:
    """Whether scratch attends in tiles, so that it tells something to keep it to the textbook."""
    in_eager_mode_on_cpu = case.device == "cpu" and not case.compiled
    long = case.query_len * case.key_len >= TILES_FROM
    return in_eager_mode_on_cpu and long and not case.need_weights and case.component != "generate"


def _takes_triton(case: Case) -> bool:
    """Whether scratch's Triton kernel computes this case, once it is switched on."""
    eager = case.device != "cpu" and not case.compiled and case.component != "generate"
    masked = case.mask != "none" and not (case.component == "attention" and case.mask == "causal")
    return eager and not masked and case.query_len * case.key_len >= TILES_FROM and not case.need_weights


def _triton() -> AbstractContextManager[None]:
    from scratch import triton_attention  # Triton comes with torch for CUDA alone

    return triton_attention.switched_on()


def _chooses_kernel(case: Case) -> bool:
    """Whether it tells something to hold torch to one kernel: for the function, and for modules off the fast path."""
    in_eval = case.component in ("self_attention", "cross_attention") and case.mode == "forward"
    return (case.component == "attention" or in_eval) and not case.need_weights


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(
            "builtin",
            "torch.nn behind this project's checks of arguments",
            lambda case: workload(case, builtin),
            call="builtin.{name}",
        ),
        Contender(
            "torch.nn",
            "plain torch.nn; for the function, F.scaled_dot_product_attention",
            lambda case: workload(case, TORCH),
            call="{home}.{name}",
            takes_part=lambda case: case.component not in TOKEN_LEVEL,
            otherwise="torch.nn has no model from tokens to logits",
        ),
        Contender("scratch", "by hand", lambda case: workload(case, scratch, cached=True), call="scratch.{name}"),
        Contender(
            "scratch textbook",
            "by hand without tiles",
            lambda case: workload(case, scratch),
            call=f"{KERNEL.format(SDPBackend.MATH.name)}: scratch.{{name}}",
            takes_part=_in_tiles,
            otherwise="scratch computes no tiles here, so this is scratch itself",
            backend=SDPBackend.MATH,
        ),
        Contender(
            "scratch triton",
            "by hand, as a Triton kernel",
            lambda case: workload(case, scratch),
            call="with scratch.triton_attention.switched_on(): scratch.{name}",
            takes_part=_takes_triton,
            otherwise="the kernel takes over on CUDA, for long inputs and no mask but a causal one that is named",
            kernel=_triton,
        ),
        Contender(
            "scratch packed",
            "by hand, with the padding left out",
            _packed,
            call="scratch.varlen_attn",
            takes_part=lambda case: case.component == "attention" and case.mask == "padding" and not case.compiled,
            otherwise="only the function is packed, in eager mode and where there is nothing but padding to leave out",
        ),
        Contender(
            "scratch recomputed",
            "by hand without a cache",
            lambda case: workload(case, scratch),
            call="scratch.{name}, and decode(...) without cache",
            takes_part=lambda case: case.component == "generate",
            otherwise="only decoding has a cache to leave out",
        ),
        Contender(
            "plain path",
            "torch.nn with its fast path switched off",
            lambda case: workload(case, builtin),
            call="torch.backends.mha.set_fastpath_enabled(False)",
            takes_part=lambda case: case.mode == "forward" and case.component in WITH_FAST_PATH,
            otherwise="torch.nn has no fast path here that could be switched off",
            fast_path=False,
        ),
        *(
            Contender(
                name,
                f"torch.nn held to the {name} kernel of F.scaled_dot_product_attention",
                lambda case: workload(case, TORCH),
                call=KERNEL.format(backend.name),
                takes_part=_chooses_kernel,
                otherwise="torch chooses no kernel here: with weights, or on the fast path of a layer",
                backend=backend,
                fast_path=False,
            )
            for name, backend in BACKENDS.items()
        ),
        Contender(
            "flex",
            "torch's flex attention, compiled",
            _flex,
            call="torch.compile(flex_attention)",
            takes_part=lambda case: case.component == "attention",
            otherwise="flex attention is a function, and no module of torch calls it",
        ),
        *(
            Contender(
                name,
                f"attention as it is usually written: {form}",
                partial(_peer, name),
                call=f"benchmarks.peers.{name}",
                takes_part=_has_peers,
                otherwise="the usual forms are timed as the function, in eager mode, and with no mask but a causal one",
            )
            for name, form in (
                ("naive", "all scores at once"),
                ("einsum", "all scores at once, by einsum"),
                ("chunked", "some queries at a time"),
            )
        ),
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


def call_of(name: str, case: Case) -> str:
    """Say what a program writes to compute a case as a contender does.

    >>> call_of("torch.nn", Case("self_attention")), call_of("torch.nn", Case("attention"))
    ('torch.nn.MultiheadAttention', 'torch.nn.functional.scaled_dot_product_attention')
    """
    home = "torch.nn.functional" if case.component == "attention" else "torch.nn"
    return CONTENDERS[name].call.format(home=home, name=NAMES[case.component])


def absence(name: str, case: Case) -> str:
    """Say why a contender has no result in a case.

    >>> absence("torch.nn", Case("generate"))
    'torch.nn has no model from tokens to logits'
    """
    if is_own(name):
        return "a function of yours is timed as attention, a module as self or cross attention without weights"
    return "it was not measured" if CONTENDERS[name].takes_part(case) else CONTENDERS[name].otherwise


def _own(name: str) -> Contender:
    meaning = "your own, in torch's own parts" if is_in_torch(name) else "your own"
    return Contender(name, meaning, partial(own_workload, name), takes_part=partial(own_takes_part, name))
