"""Faults that are known already, and what helps."""

from dataclasses import dataclass

__all__ = ["Advice", "advice_for"]


@dataclass(frozen=True)
class Advice:
    """Where a fault is discussed, if that is known, and what to do."""

    issue: str
    help: str


@dataclass(frozen=True)
class _Known:
    kernel: str
    situation: str
    parts: tuple[str, ...]
    advice: Advice

    def fits(self, kernel: str, situation: str, parts: set[str]) -> bool:
        named = self.kernel in kernel and self.situation in situation
        return named and (not self.parts or bool(parts & set(self.parts)))


REWRITE = Advice(
    "pytorch/pytorch#195320",
    "Write k.transpose(1, 2) and then k.transpose(-2, -1) in the product, instead of one permute(0, 2, 3, 1), or call "
    "F.scaled_dot_product_attention.",
)
KNOWN = (
    _Known("permuted keys", "", (), REWRITE),
    _Known(
        "CUDNN",
        "mask",
        ("dq",),
        Advice(
            "pytorch/pytorch#196678", "Use sdpa_kernel([FLASH_ATTENTION, EFFICIENT_ATTENTION, MATH]), without cuDNN."
        ),
    ),
    _Known(
        "sdpa",
        "expanded",
        (),
        Advice("pytorch/pytorch#191937", "Call .contiguous() on what was expanded, or pass enable_gqa=True."),
    ),
    _Known(
        "sdpa",
        "misaligned",
        (),
        Advice("pytorch/pytorch#183484", "Call .clone() on what begins in the middle of another tensor's memory."),
    ),
    _Known(
        "CUDNN",
        "1 queries",
        (),
        Advice(
            "NVIDIA/cudnn-frontend#1072",
            "Use sdpa_kernel([FLASH_ATTENTION, EFFICIENT_ATTENTION, MATH]), without cuDNN.",
        ),
    ),
    _Known("varlen", "", (), Advice("pytorch/pytorch#188933", "Use nested tensors or padding with a mask.")),
)
# By the backend, what serves in its place.
OTHERWISE = {
    "sdpa": "Force another kernel: with sdpa_kernel(SDPBackend.MATH).",
    "flex": "Use F.scaled_dot_product_attention with an explicit mask.",
    "varlen": "Pad, and use F.scaled_dot_product_attention with a mask.",
    "module": "Switch the fast path off: torch.backends.mha.set_fastpath_enabled(False).",
    "compiled": "Call F.scaled_dot_product_attention there, or keep the function out: torch.compiler.disable.",
    "own": "",
}


def advice_for(kernel: str, backend: str, situation: str, parts: set[str]) -> Advice:
    """Find what is known about a fault; where nothing is, name another kernel."""
    for known in KNOWN:
        if known.fits(kernel, situation, parts):
            return known.advice
    return Advice("", OTHERWISE[backend])
