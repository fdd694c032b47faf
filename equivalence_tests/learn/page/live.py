"""What the page's own script computes with: the switches as data, and the numbers that go in."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from torch import Tensor, nn

from equivalence_tests.instruments.side_by_side import random_tensor
from equivalence_tests.instruments.weights import randomize_parameters
from equivalence_tests.learn.page.steps import EMBED_DIM, FF_DIM, KEY_LEN, NUM_HEADS, QUERY_LEN
from equivalence_tests.learn.page.steps_attention import attention_inputs
from equivalence_tests.learn.page.steps_layers import LAYER_WORDS
from equivalence_tests.learn.page.switch_table import ATTENTION_SWITCHES, SDPA_SWITCHES, SIZES, Switch
from equivalence_tests.learn.page.switches import INPUTS, TORCH, code_of, names_after, run_code
from scratch import masks

__all__ = ["live_attention", "live_boards", "live_layer", "parameters_of", "rounded"]

DIGITS = 7  # the page shows three
# The switches that decide which inputs there are, and which parameters a module has.
OF_INPUTS = {"mha": (INPUTS, "embed_dim", "batch_first"), "sdpa": (INPUTS, "enable_gqa")}
OF_PARAMETERS = ("embed_dim", "kdim", "vdim", "bias", "add_bias_kv")


def live_boards(digits: int = DIGITS) -> dict[str, Any]:
    """Give both boards.

    Args:
        digits: How many significant digits of each number.

    Returns:
        For each board its switches, the sizes that stand in for words in capitals, and the inputs and parameters by the
        options of the switches that shape them.
    """
    both = run_code(code_of("sdpa", SDPA_SWITCHES, {"attn_mask": 1, "is_causal": 1}), TORCH)
    return {
        "mha": _board("mha", ATTENTION_SWITCHES, digits),
        "sdpa": _board("sdpa", SDPA_SWITCHES, digits) | {"takesBoth": not both.error},  # before torch 2.14 it does
    }


def live_attention(digits: int = 17) -> dict[str, Any]:
    """Give what goes into the attention that is followed step by step.

    Args:
        digits: How many significant digits of each number.
    """
    (_, attention), query, memory, may_attend = attention_inputs()
    return {
        "query": rounded(query[0], digits),
        "memory": rounded(memory[0], digits),
        "mayAttend": may_attend.tolist(),
        "numHeads": attention.num_heads,
        "parameters": parameters_of(attention, digits),
    }


def live_layer(digits: int = DIGITS) -> dict[str, Any]:
    """Give what goes into the layer whose switches are on the page, with the parameters of a decoder layer.

    Args:
        digits: How many significant digits of each number.
    """
    layer = layer_with_parameters()
    parts: dict[str, Any] = {
        name: parameters_of(getattr(layer, name), digits) for name in ("self_attn", "multihead_attn")
    }
    for name in ("linear1", "linear2", "norm1", "norm2", "norm3"):
        parts[name] = {part: rounded(x, digits) for part, x in getattr(layer, name).named_parameters()}
    x, memory = random_tensor(QUERY_LEN, EMBED_DIM, seed=6), random_tensor(KEY_LEN, EMBED_DIM, seed=7)
    inputs = {"x": rounded(x, digits), "memory": rounded(memory, digits), "mayAttend": masks.causal(QUERY_LEN).tolist()}
    switches = {"isDecoder": False, "normFirst": False, "activation": "relu", "bias": True, "eps": 1e-5}
    return {"parameters": parts, "inputs": inputs | switches | {"numHeads": NUM_HEADS}, "words": LAYER_WORDS}


def layer_with_parameters() -> nn.TransformerDecoderLayer:
    """Build the layer whose parameters the page's layer has; an encoder layer's are a part of these."""
    layer = nn.TransformerDecoderLayer(EMBED_DIM, NUM_HEADS, FF_DIM, 0.0, batch_first=True)
    randomize_parameters(layer, seed=8)
    return layer.double()


def _board(name: str, switches: Sequence[Switch], digits: int) -> dict[str, Any]:
    inputs, parameters = {}, {}
    for key, names in _after_setup(name, switches, OF_INPUTS[name]):
        inputs[key] = [rounded(names[x], digits) for x in ("x", "memory", "query", "key", "value") if x in names]
    if name == "mha":
        for key, names in _after_setup(name, switches, OF_PARAMETERS):
            parameters[key] = parameters_of(names["attention"], digits)
    told = [{"key": x.argument.replace(", ", "_"), **asdict(x)} for x in switches]
    return {"switches": told, "sizes": SIZES[name], "inputs": inputs, "parameters": parameters}


def _after_setup(name: str, switches: Sequence[Switch], shaping: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run all but the call, for every setting of some switches."""
    counts = {switch.argument: len(switch.options) for switch in switches}
    for options in product(*(range(counts[argument]) for argument in shaping)):
        chosen = {argument: option for argument, option in zip(shaping, options, strict=True) if option}
        yield "".join(map(str, options)), names_after(code_of(name, switches, chosen).rpartition("\n")[0])


def parameters_of(attention: Any, digits: int = DIGITS) -> dict[str, Any]:
    """Give the parameters of an attention as the script takes them.

    Args:
        attention: With a packed projection or three.
        digits: How many significant digits of each number.

    Returns:
        Lists of numbers, None where there is no such parameter.
    """
    packed, bias = attention.in_proj_weight, attention.in_proj_bias
    separate = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
    in_proj = separate if packed is None else packed.chunk(3)
    tokens = {name: getattr(attention, name) for name in ("bias_k", "bias_v")}
    return {
        "in_proj": [rounded(x, digits) for x in in_proj],
        "in_proj_bias": None if bias is None else [rounded(x, digits) for x in bias.chunk(3)],
        **{name: None if x is None else rounded(x.flatten(), digits) for name, x in tokens.items()},
        "out_proj": rounded(attention.out_proj.weight, digits),
        "out_proj_bias": None if attention.out_proj.bias is None else rounded(attention.out_proj.bias, digits),
    }


def rounded(x: Tensor, digits: int = DIGITS) -> Any:
    """Give the numbers of a tensor as nested lists, with some significant digits.

    >>> import torch
    >>> rounded(torch.tensor([[1 / 3]], dtype=torch.float64), 3)
    [[0.333]]
    """
    if x.dim():
        return [rounded(part, digits) for part in x]
    return float(f"{x.item():.{digits}g}")
