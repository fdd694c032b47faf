"""Configurations of attention and Transformer as data: what is built, and what it is called with.

A ``Case`` is described rather than built, so that the same one can be built for torch.nn, ``scratch`` and ``builtin``,
on any device and in any dtype. Its ``repr`` is a snippet that can be pasted and run. Numbers follow from seeds; global
random state is neither read nor moved.

>>> layer = Part("TransformerEncoderLayer", {"d_model": 4, "nhead": 2, "dim_feedforward": 3})
>>> case = Case(layer, {"src": Normal((5, 2, 4), seed=1)})
>>> case.construct(nn)(**case.inputs()).shape
torch.Size([5, 2, 4])
"""

import itertools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

from equivalence_tests.instruments.weights import copy_weights, randomize_parameters
from scratch import score_functions
from scratch.flex import BlockMask, create_block_mask

__all__ = [
    "Alibi",
    "Case",
    "Cast",
    "CausalBiasMask",
    "Mask",
    "Normal",
    "Part",
    "SameAs",
    "SequenceStarts",
    "TokenIds",
    "WindowBlocks",
]

Layout = Literal["contiguous", "transposed", "expanded"]
MaskForm = Literal["bool", "float", "bias"]
Alignment = Literal["upper_left", "lower_right"]


@dataclass(frozen=True)
class Normal:
    """A tensor of standard normal numbers.

    Args:
        shape: Its shape.
        seed: Where its numbers start.
        layout: "contiguous"; "transposed": stored with the last two axes swapped; "expanded": one row of the first axis
            stands for all of them.
    """

    shape: tuple[int, ...]
    seed: int
    layout: Layout = "contiguous"

    def build(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Draw the tensor in float64 on the CPU and convert it: the same numbers, up to rounding, everywhere."""
        generator = torch.Generator().manual_seed(self.seed)
        stored = torch.randn(self._stored_shape(), generator=generator, dtype=torch.float64).to(device, dtype)
        if self.layout == "transposed":
            return stored.transpose(-2, -1)
        return stored.expand(self.shape)

    def code(self, dtype: torch.dtype) -> str:
        """Write the expression that gives the same tensor."""
        text = (
            f"torch.randn({self._stored_shape()}, generator=torch.Generator().manual_seed({self.seed}), "
            f"dtype=torch.float64)"
        )
        text += "" if dtype == torch.float64 else f".to({dtype})"
        layouts = {"contiguous": "", "transposed": ".transpose(-2, -1)", "expanded": f".expand({self.shape})"}
        return text + layouts[self.layout]

    def _stored_shape(self) -> tuple[int, ...]:
        if self.layout == "transposed":
            return (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return (1, *self.shape[1:]) if self.layout == "expanded" else self.shape


@dataclass(frozen=True)
class Mask:
    """A mask argument.

    Args:
        kind: "causal", "arbitrary", "blind rows", "padding at the end", "padding with holes" or "all padding".
        shape: Its shape.
        hidden: Whether each place is hidden, row after row.
        form: "bool"; "float": 0 and -inf; "bias": normal numbers and -inf.
        seed: Where the numbers of a bias start.
        true_means_hidden: The convention of a bool mask: as torch.nn's modules have it, or as
            ``scaled_dot_product_attention`` does.
    """

    kind: str
    shape: tuple[int, ...]
    hidden: tuple[bool, ...]
    form: MaskForm = "bool"
    seed: int = 0
    true_means_hidden: bool = True

    def build(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Build the argument; ``dtype`` is that of a float mask."""
        hidden = torch.tensor(self.hidden, dtype=torch.bool).view(self.shape)
        if self.form == "bool":
            return (hidden if self.true_means_hidden else ~hidden).to(device)
        bias = torch.zeros(self.shape, dtype=dtype) if self.form == "float" else self._bias().build(dtype)
        return bias.masked_fill(hidden, -math.inf).to(device)

    def code(self, dtype: torch.dtype) -> str:
        """Write the expression that gives the same tensor."""
        inverted = self.form == "bool" and not self.true_means_hidden
        flat = torch.tensor([int(x != inverted) for x in self.hidden]).view(self.shape)
        places = f"torch.tensor({flat.tolist()}, dtype=torch.bool)" if flat.numel() else _empty(self.shape)
        if self.form == "bool":
            return places
        bias = f"torch.zeros({self.shape}, dtype={dtype})" if self.form == "float" else self._bias().code(dtype)
        return f"{bias}.masked_fill({places}, -math.inf)" if any(self.hidden) else bias

    def _bias(self) -> Normal:
        return Normal(self.shape, self.seed)


@dataclass(frozen=True)
class Cast:
    """A tensor in another dtype than the case has."""

    argument: Normal | Mask
    dtype: torch.dtype

    def build(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Build the argument and convert it."""
        return self.argument.build(dtype, device).to(self.dtype)

    def code(self, dtype: torch.dtype) -> str:
        """Write the expression that gives the same tensor."""
        return f"({self.argument.code(dtype)}).to({self.dtype})"


@dataclass(frozen=True)
class TokenIds:
    """A batch of sentences as token ids.

    Args:
        rows: One sentence each, filled up with padding to one length.
    """

    rows: tuple[tuple[int, ...], ...]

    def build(self, device: torch.device | str = "cpu") -> Tensor:
        """Build the argument."""
        return torch.tensor(self.rows, dtype=torch.int64, device=device)

    def code(self) -> str:
        """Write the expression that gives the same."""
        return f"torch.tensor({self.rows})"


@dataclass(frozen=True)
class CausalBiasMask:
    """A causal bias of ``torch.nn.attention.bias``, which ``scaled_dot_product_attention`` takes for a mask."""

    align: Alignment
    query_len: int
    key_len: int

    def build(self, device: torch.device | str = "cpu") -> CausalBias:  # noqa: ARG002
        """Build the argument, which is on no device."""
        return (causal_upper_left if self.align == "upper_left" else causal_lower_right)(self.query_len, self.key_len)

    def code(self) -> str:
        """Write the expression that gives the same."""
        return f"torch.nn.attention.bias.causal_{self.align}({self.query_len}, {self.key_len})"


@dataclass(frozen=True)
class SequenceStarts:
    """Where sequences begin that lie one behind the other, and where the last one ends.

    Args:
        lengths: Number of tokens of each.
    """

    lengths: tuple[int, ...]

    def build(self, device: torch.device | str = "cpu") -> Tensor:
        """Build the argument."""
        return torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=device)

    def code(self) -> str:
        """Write the expression that gives the same."""
        return f"torch.tensor({[0, *itertools.accumulate(self.lengths)]}, dtype=torch.int32)"


@dataclass(frozen=True)
class WindowBlocks:
    """A plan of the blocks that ``flex_attention`` computes: each query sees the last keys up to its own place.

    Args:
        window: How many keys it sees.
        query_len: Number of queries.
        key_len: Number of keys.
        block_len: Length of a block, on either side.
    """

    window: int
    query_len: int
    key_len: int
    block_len: int

    def build(self, device: torch.device | str = "cpu") -> BlockMask:
        """Build the argument."""
        mask_mod = score_functions.causal() & score_functions.sliding_window(self.window)
        return create_block_mask(mask_mod, None, None, self.query_len, self.key_len, device, BLOCK_SIZE=self.block_len)

    def code(self) -> str:
        """Write the expression that gives the same."""
        mask_mod = f"score_functions.causal() & score_functions.sliding_window({self.window})"
        lengths = f"None, None, {self.query_len}, {self.key_len}, 'cpu', BLOCK_SIZE={self.block_len}"
        return f"scratch.create_block_mask({mask_mod}, {lengths})"


@dataclass(frozen=True)
class Alibi:
    """The score function of ALiBi, for ``flex_attention``."""

    num_heads: int

    def build(self, device: torch.device | str = "cpu") -> Any:
        """Build the argument."""
        return score_functions.alibi(score_functions.alibi_slopes(self.num_heads).to(device))

    def code(self) -> str:
        """Write the expression that gives the same."""
        return f"score_functions.alibi(score_functions.alibi_slopes({self.num_heads}))"


# What says by itself how it is built and written, whatever the dtype of the case.
Built = TokenIds | CausalBiasMask | SequenceStarts | WindowBlocks | Alibi


@dataclass(frozen=True)
class SameAs:
    """An argument that is the very same object as an earlier one, as in self-attention."""

    name: str


@dataclass(frozen=True)
class Part:
    """A module that another one is built from.

    Args:
        class_name: Looked up in the package, or in torch.nn if the package has none.
        arguments: What it is built with.
    """

    class_name: str
    arguments: Mapping[str, Any]

    def construct(self, package: Any) -> Any:
        """Build it from ``torch.nn``, ``scratch`` or ``builtin``."""
        arguments = {name: x.construct(package) if isinstance(x, Part) else x for name, x in self.arguments.items()}
        return _look_up(package, self.class_name)(**arguments)

    def code(self) -> str:
        """Write the expression that builds the same."""
        package = "torch.nn" if self.class_name == "LayerNorm" else "package"
        return f"{package}.{self.class_name}({_arguments_code(self.arguments)})"


@dataclass(frozen=True, repr=False)
class Case:
    """One configuration: what is built, and what it is called with.

    Args:
        part: What is built; for a function its name alone.
        arguments: What it is called with, by name: one of the classes above, or the value itself.
        dtype: Of parameters, inputs and float masks.
        seed: Where the parameters start.
        training: Whether the module is in training mode.
    """

    part: Part
    arguments: Mapping[str, Any]
    dtype: torch.dtype = torch.float64
    seed: int = 0
    training: bool = False

    @property
    def is_function(self) -> bool:
        """Whether a function is called rather than a module."""
        return self.part.class_name.islower()

    def construct(
        self,
        package: Any,
        *,
        weights_of: nn.Module | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> Any:
        """Build the module, with every parameter random, or look up the function.

        Args:
            package: ``torch.nn``, ``scratch`` or ``builtin``.
            weights_of: Copy the weights of this module instead of drawing them.
            dtype: Another dtype than that of the case; parameters are rounded to that of the case first.
            device: Where the parameters live.

        Returns:
            What is to be called with ``inputs()``.
        """
        if self.is_function:
            return _look_up(package, self.part.class_name)
        with warnings.catch_warnings():
            # torch.nn's encoder announces at every other argument that it will not convert to nested tensors.
            warnings.filterwarnings("ignore", message=".*nested.tensor")
            module: nn.Module = self.part.construct(package).to(self.dtype)
        if weights_of is None:
            randomize_parameters(module, seed=self.seed)
        else:
            copy_weights(weights_of, module)
        return module.to(device, dtype).train(self.training)

    def inputs(
        self,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        requires_grad: bool = False,
    ) -> dict[str, Any]:
        """Build the arguments of the call.

        Args:
            dtype: Another dtype than that of the case; numbers are rounded to that of the case first.
            device: Where the tensors live.
            requires_grad: Make leaves of the inputs, ready for their gradients; of masks too where they are a bias.

        Returns:
            Keyword arguments.
        """
        built: dict[str, Any] = {}
        for name, argument in self.arguments.items():
            if isinstance(argument, SameAs):
                built[name] = built[argument.name]
            elif isinstance(argument, Cast):
                built[name] = argument.build(self.dtype, device)
            elif isinstance(argument, Normal | Mask):
                x = argument.build(self.dtype, device)
                is_bias = isinstance(argument, Mask) and argument.form == "bias"
                x = x.to(dtype) if dtype is not None and x.is_floating_point() else x
                built[name] = x.requires_grad_(requires_grad and (is_bias or isinstance(argument, Normal)))
            else:
                built[name] = argument.build(device) if isinstance(argument, Built) else argument
        return built

    def __repr__(self) -> str:
        lines = ["# paste and run:", "import math", "import torch", *self._construct_lines()]
        for name, argument in self.arguments.items():
            if isinstance(argument, SameAs):
                lines += [f"{name} = {argument.name}"]
            elif isinstance(argument, Normal | Mask | Cast):
                lines += [f"{name} = {argument.code(self.dtype)}"]
            elif isinstance(argument, Built):
                lines += [f"{name} = {argument.code()}"]
        lines += [f"torch.manual_seed({self.seed})"] if self.training or "dropout_p" in self.arguments else []
        called = f"package.{self.part.class_name}" if self.is_function else "module"
        return "\n".join([*lines, f"output = {called}({_call_code(self.arguments)})"])

    def _construct_lines(self) -> list[str]:
        if hasattr(F, self.part.class_name):
            return ["package = torch.nn.functional  # or scratch, or builtin"]
        if self.is_function:
            return ["import scratch", "from scratch import score_functions", "package = scratch  # or builtin"]
        in_torch = hasattr(nn, self.part.class_name)
        package = "torch.nn  # or scratch, or builtin" if in_torch else "builtin  # or scratch"
        return [
            *([] if in_torch else ["import builtin"]),
            "from equivalence_tests import randomize_parameters",
            f"package = {package}",
            f"module = {self.part.code()}.to({self.dtype}){'.train()' if self.training else '.eval()'}",
            f"randomize_parameters(module, seed={self.seed})",
        ]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002
        """Show the snippet where hypothesis and IPython would list the fields of a dataclass."""
        printer.text(repr(self))


def _look_up(package: Any, name: str) -> Any:
    """Find a class or function in scratch, builtin or torch.nn; what a package lacks, torch.nn has."""
    for place in (package, nn, F):
        if hasattr(place, name):
            return getattr(place, name)
    raise AttributeError(name)


def _arguments_code(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_value_code(x)}" for name, x in arguments.items())


def _call_code(arguments: Mapping[str, Any]) -> str:
    built = SameAs | Normal | Mask | Cast | Built
    return ", ".join(f"{name}={name if isinstance(x, built) else _value_code(x)}" for name, x in arguments.items())


def _value_code(value: Any) -> str:
    if isinstance(value, Part):
        return value.code()
    if callable(value):
        module = "torch" if getattr(torch, value.__name__, None) is value else "torch.nn.functional"
        return f"{module}.{value.__name__}"
    return repr(value)


def _empty(shape: tuple[int, ...]) -> str:
    return f"torch.empty({shape}, dtype=torch.bool)"
