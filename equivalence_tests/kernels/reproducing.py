"""A program of at most fifteen lines that shows a fault with torch alone."""

import re

from equivalence_tests.kernels.kernels import IMPORTS, Kernel
from equivalence_tests.kernels.situations import ADDED, MASKS, Situation, source_of

__all__ = ["MOST_LINES", "reproducer"]

MOST_LINES = 15
BOOLEAN = tuple(name for name in MASKS if name and name not in ADDED)


def reproducer(kernel: Kernel, situation: Situation, part: str, seed: int, device: str, dtype: str) -> str:
    """Write a program that prints how far a part is from what the formula gives in float64.

    Args:
        kernel: What is wrong.
        situation: Where.
        part: "output", "dq", "dk" or "dv".
        seed: Of the inputs.
        device: Where it runs.
        dtype: A key of ``DTYPES``.

    Returns:
        Python, for torch alone.
    """
    inputs, call = source_of(situation, seed, device, dtype), _for(situation, kernel.lines)
    backward = part if kernel.gradients and part.startswith("d") else ""
    if backward:
        inputs[-1:] = _differentiated(inputs[-1])
    body = [*inputs, *call, *(kernel.right or _right(situation))]
    if backward:
        leaf, right = backward[1], f"{backward[1]}64"
        body.append("out.backward(grad), right.backward(grad.double().cpu())")
        body.append(f"print(({leaf}.grad.double().cpu() - {right}.grad).abs().max(), {right}.grad.abs().max())")
    else:
        body.append("print((out.double().cpu() - right).abs().max(), right.abs().max())")
    text = "\n".join(body)
    imports = [line for sign, line in IMPORTS.items() if sign in text]
    return "\n".join(["import torch", *imports, *body])


def _differentiated(last: str) -> list[str]:
    """Let the inputs have gradients, on the line that makes them if that is the last one."""
    made = "(torch.randn(shape).to("
    if made not in last:
        return [last, "q, k, v = (x.detach().requires_grad_() for x in (q, k, v))"]
    return [last.replace(") for shape", ").requires_grad_() for shape")]


def _right(s: Situation) -> list[str]:
    """Write the formula, which gives ``right`` on the CPU in float64."""
    lines = ["q64, k64, v64 = (x.detach().double().cpu().requires_grad_() for x in (q, k, v))"]
    keys, values = (
        ("k64", "v64")
        if s.heads == s.key_heads
        else (f"{x}64.repeat_interleave({s.heads // s.key_heads}, 1)" for x in "kv")
    )
    scale = s.scale if s.scale is not None else f"{s.head_dim}**-0.5"
    scores = f"q64 @ {keys}.mT * {scale}"
    if s.is_causal:
        scores = f"({scores}).masked_fill(torch.ones({s.query_len}, {s.key_len}).triu(1).bool(), -torch.inf)"
    elif s.mask in ADDED:
        scores = f"{scores} + mask.double().cpu()"
    elif s.mask:
        scores = f"({scores}).masked_fill(~mask.cpu(), -torch.inf)"
    blind = ".nan_to_num()" if s.mask == "blind rows" else ""
    return [*lines, f"right = ({scores}).softmax(-1){blind} @ {values}"]


def _for(s: Situation, lines: tuple[str, ...]) -> list[str]:
    """Leave out what does not apply, and write arguments as values."""
    values = {"causal": s.is_causal, "scale": s.scale, "gqa": s.key_heads != s.heads}
    written, has_mask = [], bool(s.mask)
    for line in lines:
        condition, _, rest = line.partition(": ")
        applies = {"if causal": s.is_causal, "if mask is not None": has_mask}.get(condition)
        has_mask = has_mask or (applies is True and rest.startswith("mask ="))
        if applies is False or (line.startswith("added =") and not has_mask):
            continue
        line = rest if applies else line
        if line.startswith("hidden = ") and not applies:
            if not s.mask:
                continue
            line = "hidden = ~mask" if s.mask in BOOLEAN else "hidden = mask"
        if not s.mask and not s.is_causal:
            line = line.replace("mask=hidden", "mask=None")
        if not has_mask:
            line = line.replace("None if mask is None else added", "None")
            line = line.replace("v, mask,", "v, None,")
        for name, value in values.items():
            line = re.sub(rf"\b(\w+)={name}\b", rf"\1={value}", line)
        written.append(line.replace("None if mask is None else added", "added"))
    return written
