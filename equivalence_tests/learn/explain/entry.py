"""What an explanation is, and whose arguments are explained."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

import scratch
from equivalence_tests.learn.excerpts import Place
from scratch import masks

__all__ = [
    "ATTENTION",
    "BESIDE_TORCH_NN",
    "BLOCKS",
    "CAUSAL_MASK",
    "DECODER",
    "DECODERS",
    "DECODER_LAYER",
    "ENCODER",
    "ENCODERS",
    "ENCODER_LAYER",
    "Explanation",
    "FLEX",
    "GROUPED",
    "LANGUAGE_LAYER",
    "LANGUAGE_MODEL",
    "NOT_IN_TORCH",
    "OWNERS",
    "RMS_FUNCTION",
    "RMS_NORM",
    "ROTARY",
    "SDPA",
    "STACKS",
    "SWIGLU",
    "TRANSFORMER",
    "VARLEN",
    "WITH_LAYERS",
    "calls_of",
    "drawn",
]

ATTENTION = "MultiheadAttention"
SDPA = "scaled_dot_product_attention"
FLEX, BLOCKS, VARLEN = "flex_attention", "create_block_mask", "varlen_attn"
GROUPED, SWIGLU, ROTARY = "GroupedQueryAttention", "SwiGLU", "RotaryEmbedding"
RMS_NORM, RMS_FUNCTION = "RMSNorm", "rms_norm"
LANGUAGE_LAYER, LANGUAGE_MODEL = "DecoderOnlyLayer", "DecoderOnlyTransformer"
ENCODER_LAYER, DECODER_LAYER = "TransformerEncoderLayer", "TransformerDecoderLayer"
ENCODER, DECODER = "TransformerEncoder", "TransformerDecoder"
TRANSFORMER = "Transformer"
CAUSAL_MASK = "generate_square_subsequent_mask"

ENCODERS = (ENCODER_LAYER, ENCODER)
DECODERS = (DECODER_LAYER, DECODER)
BESIDE_TORCH_NN = (FLEX, BLOCKS, VARLEN)  # in torch.nn.attention
NOT_IN_TORCH = (ROTARY, GROUPED, SWIGLU, LANGUAGE_LAYER, LANGUAGE_MODEL)
STACKS = (ENCODER, DECODER)
WITH_LAYERS = (ENCODER_LAYER, DECODER_LAYER, TRANSFORMER)  # what builds layers hands its arguments on to them

OWNERS: dict[str, Callable[..., Any]] = {
    ATTENTION: scratch.MultiheadAttention,
    SDPA: scratch.scaled_dot_product_attention,
    ENCODER_LAYER: scratch.TransformerEncoderLayer,
    DECODER_LAYER: scratch.TransformerDecoderLayer,
    ENCODER: scratch.TransformerEncoder,
    DECODER: scratch.TransformerDecoder,
    TRANSFORMER: scratch.Transformer,
    FLEX: scratch.flex_attention,
    BLOCKS: scratch.create_block_mask,
    VARLEN: scratch.varlen_attn,
    CAUSAL_MASK: scratch.Transformer.generate_square_subsequent_mask,
    RMS_NORM: scratch.RMSNorm,
    RMS_FUNCTION: scratch.rms_norm,
    ROTARY: scratch.RotaryEmbedding,
    GROUPED: scratch.GroupedQueryAttention,
    SWIGLU: scratch.SwiGLU,
    LANGUAGE_LAYER: scratch.DecoderOnlyLayer,
    LANGUAGE_MODEL: scratch.DecoderOnlyTransformer,
}


@dataclass(frozen=True)
class Explanation:
    """What one argument does, in all classes where it does the same.

    Args:
        argument: Its name.
        owners: The classes and functions that it is explained for.
        does: What it does. The first sentence says it in short.
        places: The statements of scratch that do it.
        example: Code that shows it; its source and what it prints are shown.
        picture: A drawing, where one helps.
    """

    argument: str
    owners: tuple[str, ...]
    does: str
    places: tuple[Place, ...]
    example: Callable[[], None]
    picture: str = ""

    @property
    def in_short(self) -> str:
        """What it does, in its first sentence."""
        return self.does.split(". ")[0].removesuffix(".") + "."

    @property
    def usages(self) -> list[str]:
        """Where it is given, with its default: ``MultiheadAttention.forward(..., need_weights=True)``."""
        return [
            f"{call}({_as_given(signature.parameters[self.argument])})"
            for owner in self.owners
            for call, signature in calls_of(owner)
            if self.argument in signature.parameters
        ]


def _as_given(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is inspect.Parameter.empty:
        return f"{parameter.name}, ..."
    return f"..., {parameter.name}={getattr(default, '__name__', repr(default))}"


def calls_of(owner: str) -> Iterator[tuple[str, inspect.Signature]]:
    """Give the calls by which one hands arguments to a class or function.

    Args:
        owner: A key of ``OWNERS``.

    Returns:
        The name of each call with its signature.

    >>> [call for call, _ in calls_of("Transformer")]
    ['Transformer', 'Transformer.forward']
    >>> [call for call, _ in calls_of("scaled_dot_product_attention")]
    ['scaled_dot_product_attention']
    """
    found = OWNERS[owner]
    yield owner, inspect.signature(found)
    if isinstance(found, type) and issubclass(found, nn.Module):
        for method in (name for name in ("forward", "generate") if hasattr(found, name)):
            signature = inspect.signature(getattr(found, method))
            _, *parameters = signature.parameters.values()  # without self
            yield f"{owner}.{method}", signature.replace(parameters=parameters)


def drawn(may_attend: Any) -> str:
    """Draw a mask with its axes: 1 = may look.

    >>> print(drawn(masks.causal(2, 3)))
            key 0 1 2
    query 0     1 0 0
    query 1     1 1 0
    """
    heads = "".join(f" {j}" for j in range(may_attend.size(1)))
    rows = [f"query {i}     {row}" for i, row in enumerate(masks.draw(may_attend).splitlines())]
    return "\n".join([f"        key{heads}", *rows])
