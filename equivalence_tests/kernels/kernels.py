"""Every way in which this torch computes attention, each as the lines that a person would type.

The judge runs these lines and a reproducer prints them. They read ``q``, ``k``, ``v``, ``mask``, ``causal``, ``scale``
and ``gqa``, and leave ``out``, (batch, heads, query_len, v_head_dim).
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from equivalence_tests.kernels.forms import FORMS, MASKED_FORMS
from equivalence_tests.kernels.rewriting import rewritten_only
from equivalence_tests.kernels.situations import Inputs, Situation

__all__ = ["BACKENDS", "Kernel", "listed_kernels"]

BACKENDS = ("sdpa", "flex", "varlen", "module", "compiled")

IMPORTS = {
    "F.": "import torch.nn.functional as F",
    "math.": "import math",
    "sdpa_kernel": "from torch.nn.attention import SDPBackend, sdpa_kernel",
    "flex_attention": "from torch.nn.attention.flex_attention import flex_attention",
    "varlen_attn": "from torch.nn.attention.varlen import varlen_attn",
}
SDPA = "F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=gqa)"
CAUSAL_MASK = "if causal: mask = torch.ones(q.shape[2], k.shape[2], device=q.device).tril().bool()"
# Three heads of features side by side, of which the first attends as asked: queries, keys and values are one tensor
# there, as self-attention and its fast path demand.
MODULE = (
    "h, e = q.shape[1], q.shape[1] * q.shape[3]",
    "mha = torch.nn.MultiheadAttention(3 * e, 3 * h, batch_first=True).to(q).eval()",
    "mha.in_proj_weight.data, mha.out_proj.weight.data = "
    "torch.kron(torch.eye(9)[:, ::3], torch.eye(e)).to(q), torch.eye(3 * e).to(q)",
    "x = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], -1)",
)
# Two layers with features from all three tensors, which the fast path takes in one operation each, padding packed away.
ENCODER = (
    "e = 3 * q.shape[1] * q.shape[3]; padded = ahead = None; torch.manual_seed(1)",
    "layer = torch.nn.TransformerEncoderLayer(e, 3 * q.shape[1], 16, batch_first=True)",
    "encoder = torch.nn.TransformerEncoder(layer, 2).to(q).eval()",
    "x = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], -1).detach()",
    "if mask is not None: padded = ~mask[:, 0, 0]",
    "if causal: ahead = torch.ones(q.shape[2], k.shape[2], device=q.device).triu(1).bool()",
    "real = 1 if padded is None else ~padded.unsqueeze(-1)",
    "run = lambda encoder, x: encoder(x, mask=ahead, src_key_padding_mask=padded).detach() * real",
    "with torch.no_grad(): out = run(encoder, x)",
)
PLAIN_ENCODER = (
    "torch.backends.mha.set_fastpath_enabled(False)",
    "text, right = run(encoder, x), run(encoder.double(), x.double()).cpu()",
)
PACKED = (
    "b, h, l, d = q.shape; ends = torch.arange(b + 1, device=q.device, dtype=torch.int32)",
    "packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))",
    "window = (-1, 0) if causal else (-1, -1)",
    "out = varlen_attn(*packed, ends * l, ends * k.shape[2], l, k.shape[2], scale=scale, window_size=window)",
    "out = out.unflatten(0, (b, l)).transpose(1, 2)",
)


@dataclass(frozen=True)
class Kernel:
    """One way of computing attention.

    Args:
        name: What the table calls it.
        backend: One of ``BACKENDS``, or "own".
        lines: What computes ``out``.
        asked: Whether it can be asked for a situation at all.
        own_ops: Parts of the names of torch's operations by which its own path is known; without them it fell back.
        gradients: Whether it is differentiated.
        compiled: Whether it is compiled for each situation, which takes time: it is asked for few.
        call: What computes the output, where that is a function and no lines.
        right: The lines that then compute ``right`` and ``text``, the same in its own precision, where it is more than
            an attention.
        lse: What gives the log-sum-exp of the last call, (batch, heads, query_len), or None where there is none.
    """

    name: str
    backend: str
    lines: tuple[str, ...]
    asked: Callable[[Situation], bool] = lambda _: True
    own_ops: tuple[str, ...] = ()
    gradients: bool = True
    compiled: bool = False
    call: Callable[[Inputs], Tensor] | None = None
    right: tuple[str, ...] = ()
    lse: Callable[[Inputs], Tensor | None] = lambda _: None

    def __call__(self, inputs: Inputs) -> Tensor:
        """Compute the output."""
        if self.call is not None:
            return self.call(inputs)
        return self._run(inputs, self.lines)["out"]

    def against(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Compute what is right in float64, and the same in the precision of the inputs, by its own lines."""
        before = torch.backends.mha.get_fastpath_enabled()
        try:
            names = self._run(inputs, (*self.lines, *self.right))
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
        right, text = (names[name].to(inputs.q.device) for name in ("right", "text"))
        return right, text

    def _run(self, inputs: Inputs, lines: tuple[str, ...]) -> dict[str, Any]:
        names: dict[str, Any] = {"torch": torch, "q": inputs.q, "k": inputs.k, "v": inputs.v, "mask": inputs.mask}
        names |= {"causal": inputs.causal, "scale": inputs.scale, "gqa": inputs.gqa}
        exec("\n".join([*self.imports(), *lines]), names)
        return names

    def imports(self) -> list[str]:
        """Name what the lines need beside torch."""
        text = "\n".join(self.lines)
        return [line for sign, line in IMPORTS.items() if sign in text]


def listed_kernels(device: str, compiles: bool) -> list[Kernel]:
    """List every way that this torch has.

    Args:
        device: Where they run: it decides which operations are a backend's own.
        compiles: Compile the hand-written forms to the end; otherwise only rewrite them, as the compiler does first.

    Returns:
        Those of ``F.scaled_dot_product_attention`` first, and what is compiled last.
    """
    return [*_sdpa(device), *_flex(compiles), *_varlen(), *_modules(), *_encoders(), *_compiled(compiles)]


def _sdpa(device: str) -> Iterator[Kernel]:
    fused = "_for_cpu" if device == "cpu" else "_scaled_dot_product_"
    own_ops = {SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.EFFICIENT_ATTENTION: "efficient"}
    own_ops |= {SDPBackend.CUDNN_ATTENTION: "cudnn"}
    yield Kernel("sdpa, as torch chooses", "sdpa", (f"out = {SDPA}",), own_ops=(fused,))
    for name, backend in SDPBackend.__members__.items():
        if backend not in (SDPBackend.ERROR, getattr(SDPBackend, "OVERRIDEABLE", None)):
            lines = (f"with sdpa_kernel(SDPBackend.{name}):", f"    out = {SDPA}")
            own = (own_ops[backend],) if backend in own_ops else ()
            yield Kernel(f"sdpa, {name}", "sdpa", lines, own_ops=own)


def _flex(compiles: bool) -> Iterator[Kernel]:
    lines = (
        CAUSAL_MASK,
        "if mask is not None: bias = mask if mask.dtype != torch.bool else torch.where(mask, 0.0, -torch.inf).to(q)",
        "if mask is not None: bias = bias.expand(q.shape[0], q.shape[1], -1, -1)",
        "added = lambda score, b, h, i, j: score + bias[b, h, i, j]",
    )
    arguments = "(q, k, v, None if mask is None else added, scale=scale, enable_gqa=gqa)"
    yield Kernel("flex, eager", "flex", (*lines, f"out = flex_attention{arguments}"))
    if compiles:
        compiled = (*lines, f"out = torch.compile(flex_attention){arguments}")
        yield Kernel("flex, compiled", "flex", compiled, _is_few, compiled=True)


def _varlen() -> Iterator[Kernel]:
    def asked(s: Situation) -> bool:
        square = s.query_len == s.key_len or not s.is_causal
        return square and not s.mask and s.key_heads == s.heads

    yield Kernel("varlen_attn", "varlen", PACKED, asked)


def _modules() -> Iterator[Kernel]:
    def asked(s: Situation) -> bool:
        own_scale = s.scale is None and s.head_dim == s.v_head_dim and s.key_heads == s.heads
        two_dims = s.mask in ("", "float", "all true", "-inf", "1e4", "lower right")
        passed_on = not s.layout and (s.logits > 0 or not s.mask)  # what is left of it in a projection
        return own_scale and two_dims and passed_on and s.query_len == s.key_len

    mask = (
        "hidden = ~mask if mask is not None and mask.dtype == torch.bool else mask",
        "if causal: hidden = torch.ones(q.shape[2], k.shape[2], device=q.device).triu(1).bool()",
    )
    for needs in (False, True):
        out = f"out = mha(x, x, x, attn_mask=hidden, need_weights={needs})[0]"
        out += "[..., :e].unflatten(-1, (h, -1)).transpose(1, 2)"
        name = f"MultiheadAttention, need_weights={needs}"
        yield Kernel(name, "module", (*MODULE, *mask, out), asked)
        if not needs:
            fast = (*MODULE, *mask, "with torch.no_grad():", f"    {out}")
            native = ("_native_multi_head_attention",)
            yield Kernel("MultiheadAttention, fast path", "module", fast, asked, native, gradients=False)


def _encoders() -> Iterator[Kernel]:
    def asked(s: Situation) -> bool:
        alone = s.scale is None and s.head_dim == s.v_head_dim == 16 and s.key_heads == s.heads and not s.layout
        return (
            alone
            and s.query_len < 200
            and s.mask in ("", "padding")
            and s.query_len == s.key_len
            and not s.nan_in_hidden_key
        )

    native = ("_transformer_encoder_layer_fwd",)
    name = "TransformerEncoder, fast path"
    yield Kernel(name, "module", ENCODER, asked, native, gradients=False, right=PLAIN_ENCODER)


def _compiled(compiles: bool) -> Iterator[Kernel]:
    for form in (*FORMS, *MASKED_FORMS):
        masked = form in MASKED_FORMS
        for gradients in (False, True):
            name = f"{form.__name__.replace('_', ' ')}, {'compiled' if compiles else 'rewritten'}"
            name += "" if gradients else " without gradients"
            takes = ", mask" if masked else ""
            lines = (
                *_as_typed(form),
                f"out = torch.compile({form.__name__})(*(x.transpose(1, 2).contiguous() for x in (q, k, v)){takes})",
            )
            lines = lines if gradients else (*lines[:-1], "with torch.no_grad():", "    " + lines[-1])
            asked = _is_few_with(_mask_of(form) if masked else "", gradients)
            call = None if compiles else rewritten_only(form)
            yield Kernel(name, "compiled", lines, asked, gradients=gradients, compiled=True, call=call)


def _as_typed(form: Callable[..., Tensor]) -> list[str]:
    return inspect.getsource(form).replace(": Tensor", "").replace(" -> Tensor", "").rstrip().splitlines()


def _mask_of(form: Any) -> str:
    return "bool" if form.__name__ == "masked_fill" else "float"


def _is_few(s: Situation) -> bool:
    """Leave out most: each takes seconds to compile."""
    return s.name in ("length 16", "length 129", "causal, length 17", "mask bool, length 65", "4 heads on 2")


def _is_few_with(mask: str, gradients: bool) -> Callable[[Situation], bool]:
    """Ask for two sizes, of which one has as many tokens as heads; with gradients, which rewrites less, for one."""
    if mask:
        lengths = (5,) if gradients else (5, 65)
        return lambda s: s.name in [f"mask {mask}, length {length}" for length in lengths]
    names = ("length 16",) if gradients else ("as many tokens as heads", "length 16", "5 queries, 704 keys")
    return lambda s: s.name in names
