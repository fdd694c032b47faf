"""How many parameters a model has and where: weights and biases apart, packed projections split."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["ParameterRow", "parameter_rows"]


@dataclass(frozen=True)
class ParameterRow:
    """One layer with parameters: an element of ``parameter_rows``.

    Args:
        path: Of the layer in the model.
        kind: Its class, "projection" or "learnt token".
        weights: Number of parameters that are no biases.
        biases: Number of those that are.
    """

    path: str
    kind: str
    weights: int
    biases: int

    @property
    def total(self) -> int:
        """Weights and biases together."""
        return self.weights + self.biases


def parameter_rows(model: nn.Module) -> Iterator[ParameterRow]:
    """Count the parameters of every layer that has some of its own.

    An attention gives three rows, for the projections of queries, keys and values, whether they are packed or not,
    and one for the learnt tokens of ``add_bias_kv``. Shared parameters count once, where they are met first.

    Args:
        model: Any module.

    Yields:
        Rows in the order of ``model.named_modules()``.

    >>> for row in parameter_rows(nn.MultiheadAttention(512, 8, bias=False)):
    ...     print(row.path, row.weights, row.biases)
    q 262144 0
    k 262144 0
    v 262144 0
    out_proj 262144 0
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = {name: p for name, p in module.named_parameters(recurse=False) if id(p) not in seen}
        seen.update(map(id, own.values()))
        if hasattr(module, "in_proj_weight"):
            yield from _attention_rows(path, module, own)
        elif own:
            biases = sum(p.numel() for name, p in own.items() if name == "bias")
            kind = (
                "Linear" if isinstance(module, nn.Linear) else type(module).__name__
            )  # torch.nn has a private subclass
            yield ParameterRow(path, kind, sum(p.numel() for p in own.values()) - biases, biases)


def _attention_rows(path: str, module: Any, own: dict[str, nn.Parameter]) -> Iterator[ParameterRow]:
    qk_dim = module.num_heads * module.head_dim
    v_dim = module.out_proj.in_features
    prefix = f"{path}." if path else ""
    widths = (module.embed_dim, module.kdim, module.vdim)
    for name, outputs, inputs in zip("qkv", (qk_dim, qk_dim, v_dim), widths, strict=True):
        biases = 0 if module.in_proj_bias is None else outputs
        yield ParameterRow(prefix + name, "projection", outputs * inputs, biases)
    tokens = sum(p.numel() for name, p in own.items() if name in ("bias_k", "bias_v"))
    if tokens:
        yield ParameterRow(prefix + "bias_kv", "learnt token", tokens, 0)
