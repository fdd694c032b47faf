"""A short program that shows a fault with torch and the library alone."""

import textwrap

from equivalence_tests.models.library import Architecture, Registration, Situation

__all__ = ["reproducer"]

WIDTH = 112


def reproducer(architecture: Architecture, situation: Situation, registration: Registration, seed: int) -> str:
    """Write a program that prints how far a model with the function is from the model with its own attention.

    It runs the lines that the judge ran, with the same numbers.

    Args:
        architecture: The model.
        situation: How it is run.
        registration: The function and its mask function.
        seed: Of the inputs.

    Returns:
        Python, or "" where the library gives no lines or the model's own attention is not what it is held against.
    """
    if not architecture.lines or situation.dropout:
        return ""
    told = "torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])"
    shown = [f"    results.append({told if situation.trains else 'output.detach()'})"]
    if situation.trains:
        shown = ["    results.append(output.detach())", *shown, "    model.zero_grad()"]
    body = [
        "import torch, transformers",
        *registration.lines,
        "torch.set_default_dtype(torch.float64)",
        *architecture.lines,
        "results = []",
        f"for name in ('eager', {registration.name!r}):",
        "    model.set_attn_implementation(name)",
        f"    torch.manual_seed({seed})",
        *(f"    {line}" for line in situation.lines),
        *shown,
    ]
    half = 2 if situation.trains else 1
    body += [f"for own, yours in zip(results[:{half}], results[{half}:]):", "    print((own - yours).abs().max())"]
    return "\n".join(line for long in body for line in _wrapped(long))


def _wrapped(line: str) -> list[str]:
    """Break a long line where brackets are open."""
    if len(line) <= WIDTH or "(" not in line:
        return [line]
    return textwrap.wrap(
        line, WIDTH, subsequent_indent=" " * 4, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
