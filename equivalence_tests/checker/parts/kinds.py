"""Tell what something is: by its name, by what holds it, or by what it holds and does."""

import inspect
import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.parts.names import OTHER_NORMS, kind_of_name, words_of
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reporting.findings import PARTS

# Under this name a copy of a module keeps the kind that a run showed, where its own name says nothing.
BY_DATA_FLOW = "_kind_by_data_flow"
BUILDER_NAME = re.compile(r"(^|_)mask(s|ing)?($|_)|subsequent|no_?peak|look_?ahead", re.IGNORECASE)
EXAMINED = ("attention", *PARTS)
ALIKE = 1e-6
MOST_PROJECTIONS = 4  # of queries, keys, values and the output


def guess_kind(found: Any) -> str:
    """Tell from the name what something is, and a few of torch's containers by what they hold; "" if neither says.

    >>> guess_kind(nn.LayerNorm), guess_kind(nn.TransformerEncoderLayer), guess_kind(nn.MultiheadAttention)
    ('layer_norm', 'layers', 'attention')
    >>> guess_kind(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))), guess_kind(nn.Linear(2, 2))
    ('feed_forward', '')
    >>> guess_kind(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    'feed_forward'
    >>> guess_kind(type("InstanceNorm", (nn.Module,), {})), guess_kind(type("Norm", (nn.Module,), {}))
    ('', 'layer_norm')
    """
    if isinstance(found, nn.Module) and BY_DATA_FLOW in vars(found):
        return str(vars(found)[BY_DATA_FLOW])
    if isinstance(found, nn.Sequential):
        inside = [m for m in found.modules() if not isinstance(m, nn.Sequential)]
        known = [m for m in inside if isinstance(m, nn.Linear) or guess_kind(m) == "layer_norm"]
        ours = sum(len(list(m.parameters(recurse=False))) for m in known) == len(list(found.parameters()))
        bent = [type(m).__module__ for m in inside[1:-1]].count("torch.nn.modules.activation") == len(known) - 1 == 1
        return "feed_forward" if ours and (bent or there_and_back(found)) else ""
    if builds_masks(found):
        return "mask_builder"
    name = getattr(found, "__name__", type(found).__name__)
    if OTHER_NORMS.search(name):
        return ""
    kind = kind_of_name(name)
    if kind or not isinstance(found, nn.Module):
        return kind
    return "positional_encoding" if _holds_sinusoids(found) else "layer_norm" if _normalises(found) else ""


def _normalises(found: nn.Module) -> bool:
    """Whether it has nothing but a gain and an offset, and gives the same for vectors ten times as long."""
    parameters = list(found.parameters())
    if not 1 <= len(parameters) <= 2 or any(p.dim() != 1 for p in parameters) or any(True for _ in found.children()):
        return False
    x = 10 * torch.randn(2, 3, len(parameters[0]), generator=torch.Generator().manual_seed(0)).to(parameters[0].dtype)
    both = attempt(lambda: torch.stack((found(x), found(10 * x))))
    if both is None or both.shape[1:] != x.shape:
        return False
    return bool(both.any()) and torch.allclose(both[0], both[1], rtol=1e-2, atol=1e-3)


def there_and_back(found: nn.Module) -> bool:
    """Whether its linears lead to another width and back: two, or three with a gate, packed or not."""
    shapes = [tuple(m.weight.shape) for m in found.modules() if isinstance(m, nn.Linear)]
    inside, width = shapes[-1][::-1] if shapes else (0, 0)
    halves = [(inside, width), (width, inside)], [(2 * inside, width), (width, inside)]
    return inside != width and shapes in (*halves, [*halves[0][:1] * 2, halves[0][1]])


def builds_masks(found: Any) -> bool:
    """Tell from its name whether a function builds masks.

    >>> def subsequent_mask(size): ...
    >>> def masked_attention(query, key, value): ...
    >>> builds_masks(subsequent_mask), builds_masks(masked_attention), builds_masks(torch.nn.Linear)
    (True, False, False)
    """
    return inspect.isroutine(found) and BUILDER_NAME.search(words_of(getattr(found, "__name__", ""))) is not None


def kind_of(path: str, child: nn.Module) -> str:
    """Tell what a sub-module is, by its class, or else by the name of the attribute that holds it.

    What is called a norm and holds other modules is none: it normalises for them, or adds a residual.

    >>> kind_of("blocks.0.ln_1", nn.LayerNorm(3)), kind_of("mlp", nn.Identity()), kind_of("x", nn.Dropout())
    ('layer_norm', '', '')
    >>> output = type("Output", (nn.Module,), {"forward": lambda self, x: self.linear(x)})()
    >>> output.linear, output.dropout = nn.Linear(4, 2), nn.Dropout()
    >>> kind_of("head", output), kind_of("attention", output)
    ('', 'attention')
    >>> block = type("AttentionBlock", (nn.Module,), {"forward": lambda self, x: x})()
    >>> block.attention, block.mlp = nn.MultiheadAttention(4, 2), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    >>> kind_of("blocks.0", block)
    'layers'
    """
    if not runs(child):
        return ""  # it only holds what something else calls
    says_all = type(child).__module__.startswith("torch.") or OTHER_NORMS.search(type(child).__name__)
    attribute = path.rpartition(".")[2]
    attribute = "" if says_all or attribute == "head" else attribute  # which mostly makes the output of a model
    kind = guess_kind(child) or kind_of_name(attribute)
    if kind == "attention" and not guess_kind(child) and _stands_beside_an_attention(child):
        return ""  # whatever holds it
    inside = {guess_kind(m) for m in child.modules() if m is not child} if kind in EXAMINED else set()
    if "attention" in inside and (kind != "attention" or "feed_forward" in inside):
        return "layers"  # whatever its name says
    if kind == "feed_forward" and not any(p.dim() > 1 for p in child.parameters()):
        return ""  # a residual connection around one
    if kind == "layer_norm" and any(True for _ in child.children()):
        linears = sum(isinstance(m, nn.Linear | nn.Conv1d) for m in child.modules())
        return "feed_forward" if linears == 2 and "feed" in type(child).__name__.lower() else ""
    return kind


def runs(child: nn.Module) -> bool:
    """Whether a module can be called: a list cannot, nor a class without a forward."""
    return type(child).forward is not nn.Module.forward or type(child).__call__ is not nn.Module.__call__


def _stands_beside_an_attention(child: nn.Module) -> bool:
    """Whether it is a projection, or the norm of a residual connection around an attention."""
    parameters = list(child.parameters())
    matrices = sum(p.dim() > 1 for p in parameters)
    return bool(parameters) and (not matrices or (matrices == 1 and not any(True for _ in child.children())))


def is_torchs(child: nn.Module) -> bool:
    """Whether a module is one of torch's own, and no list of others."""
    return type(child).__module__.startswith("torch.") and not isinstance(child, nn.Sequential)


def is_attention_alone(module: nn.Module) -> bool:
    """Whether nothing but projections has parameters: then there is nothing around the attention."""
    matrices = [p for p in module.parameters() if p.dim() > 1]
    return len(matrices) <= MOST_PROJECTIONS and not any(guess_kind(m) == "layer_norm" for m in module.modules())


def atoms_of(module: nn.Module) -> dict[str, str]:
    """List the outermost sub-modules that are looked at as wholes, by path, with their kind.

    Returns:
        Parts of a known kind, torch's own layers, the convolution modules of Conformers, and under "" every other
        module with parameters and no children.
    """
    chosen: dict[str, str] = {}
    for path, child in module.named_modules():
        if not path or any(path.startswith(f"{other}.") for other in chosen):
            continue
        kind = kind_of(path, child)
        has_parameters = any(True for _ in child.parameters())
        torchs_layer = kind == "layers" and is_torchs(child)
        if torchs_layer or (kind in EXAMINED and (has_parameters or kind == "positional_encoding")):
            chosen[path] = kind
        elif has_parameters and not any(True for _ in child.children()):
            chosen[path] = ""
        elif _convolves(child):
            chosen[path] = "convolution"
    return chosen


def _convolves(module: nn.Module) -> bool:
    """Whether it is the convolution module of a Conformer: neighbours meet, feature by feature, and nothing attends.

    What holds nothing but one, as a residual connection does, is none.

    >>> depthwise = nn.Conv1d(4, 4, 3, groups=4)
    >>> _convolves(nn.Sequential(nn.Conv1d(4, 4, 1), depthwise)), _convolves(nn.Sequential(nn.Conv1d(4, 4, 1)))
    (True, False)
    """
    held = [*module.children()]
    if len(held) == 1 and not is_torchs(held[0]) and not isinstance(held[0], nn.Sequential) and _convolves(held[0]):
        return False
    inside = [*module.named_modules()][1:]
    apart = (isinstance(x, nn.Conv1d | nn.Conv2d) and x.groups == x.in_channels > 1 for _, x in inside)
    return any(apart) and not any(kind_of(path, x) in ("attention", "layers") for path, x in inside)


def _holds_sinusoids(module: nn.Module) -> bool:
    """Whether a module is a table of sines and cosines, whatever it is called."""
    if any(not isinstance(child, nn.Dropout | nn.Embedding | nn.Identity) for child in module.children()):
        return False
    tables = [x.squeeze() for x in own_tensors(module)]
    for table in [x for x in tables if x.dim() == 2 and min(x.shape) > 1 and float(x.abs().max()) <= 1 + ALIKE]:
        one = torch.tensor([math.sin(1), math.cos(1)], dtype=table.dtype)
        if table[0].unique().tolist() == [0.0, 1.0] and bool((table[1][:, None] - one).abs().min() < ALIKE):
            return True
    return False


def own_tensors(found: Any) -> list[Tensor]:
    """List the floating tensors that a module itself holds: parameters, buffers and plain attributes."""
    if not isinstance(found, nn.Module):
        return []
    held = (*found.parameters(recurse=False), *found.buffers(recurse=False), *vars(found).values())
    return [x.detach() for x in held if isinstance(x, Tensor) and x.is_floating_point()]
