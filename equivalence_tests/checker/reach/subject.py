"""What is being checked: the built object, its sizes, its source, and what the user said about it."""

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from equivalence_tests.checker.reach.calling import Caller, CallPlan, Inputs
from equivalence_tests.checker.reach.construction import SIZES, Sizes, build
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.masking import MaskForm
from equivalence_tests.checker.reach.tracing import tensors_in

__all__ = ["Adapter", "Subject", "subjects"]


@dataclass(frozen=True)
class Adapter:
    """What the checker could not find out by itself.

    Args:
        build: Makes the module.
        call: ``call(module, query, key, value, may_attend)`` gives the output. All tensors are batch first,
            (batch, len, embed_dim); may_attend is (batch, query_len, key_len) bool, True = may look, or None.
        num_heads: Number of heads.
        embed_dim: Width of the tokens.
        meant: Which deviations are on purpose: the name of the finding -> the reason.

    >>> adapter = Adapter(build=lambda: nn.MultiheadAttention(6, 2, batch_first=True), num_heads=2, embed_dim=6)
    """

    build: Callable[[], Any] | None = None
    call: Callable[[Any, Tensor, Tensor, Tensor, Tensor | None], Any] | None = None
    num_heads: int | None = None
    embed_dim: int | None = None
    meant: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Subject:
    """One built instance.

    Args:
        name: What the user calls it.
        function: The module or function.
        sizes: The sizes that it was built with, as far as they are known.
        adapter: What the user said about it.
        trained: Whether it came as an instance, whose weights must come back as they were.
        built: Whether its sizes are ours.
        dtype: Precision in which it computes.
    """

    name: str
    function: Callable[..., Any]
    sizes: Sizes
    adapter: Adapter
    trained: bool = False
    built: bool = False
    dtype: torch.dtype = torch.float64

    def copied(self) -> Any:
        """Leave the user's own instance alone, and what a factory hands out, which may be one."""
        if self.module is None:
            return self.function
        try:
            return copy.deepcopy(self.module)
        except Exception:  # some modules cannot be copied
            if not self.trained:
                return self.module
            raise CannotCheckError("the instance cannot be deep-copied; pass its class or a factory instead") from None

    @property
    def module(self) -> nn.Module | None:
        """The module; None for a plain function."""
        return self.function if isinstance(self.function, nn.Module) else None

    def caller(self) -> Caller:
        """Give what calls it."""
        if self.adapter.call is not None:
            return _AdaptedCaller(self.function, self.sizes.num_heads, self.dtype, self.adapter.call)
        return Caller(self.function, self.sizes.num_heads, self.dtype)


@dataclass
class _AdaptedCaller(Caller):
    """Calls through the user's adapter."""

    call: Callable[[Any, Tensor, Tensor, Tensor, Tensor | None], Any] | None = None

    def returned(self, plan: CallPlan, inputs: Inputs, mask: MaskForm | None = None) -> list[Tensor]:
        assert self.call is not None  # made only with one
        may_attend = inputs.may_attend if mask is not None else None
        arguments = (inputs.query.to(self.dtype), inputs.key.to(self.dtype), inputs.value.to(self.dtype), may_attend)
        return list(tensors_in((self.call(self.function, *arguments),)))


def subjects(target: Any, name: str, adapter: Adapter) -> Iterator[Subject]:
    """Build what is to be checked, with the most telling sizes first.

    Args:
        target: A class, an instance, a function, or a factory.
        name: What to call it.
        adapter: What the user said about it.

    Yields:
        Subjects to try until one can be called.

    Raises:
        CannotCheckError: If nothing could be built.
    """
    if adapter.build is not None:
        instance = adapter.build()
        yield _instance(instance, name, adapter, trained=False)
    elif inspect.isclass(getattr(target, "func", target)):  # a class, or functools.partial of one
        for instance, sizes in build(target):
            if callable(instance):
                yield Subject(name, instance, sizes_of(instance, sizes, adapter), adapter, built=True)
    elif isinstance(target, nn.Module):
        yield _instance(target, name, adapter, trained=True)
    elif callable(target) and not _parameters(target):
        instance = target()
        yield _instance(instance, name, adapter, trained=False)
    elif callable(target):
        yield from _factory_products(target, name, adapter)
        for sizes in SIZES[:2]:
            yield Subject(name, target, sizes, adapter)
    else:
        raise CannotCheckError(f"{name} is {type(target).__name__}, neither a class, nor a function, nor a module")


def _parameters(target: Any) -> Any:
    try:
        return inspect.signature(target).parameters
    except ValueError:
        raise CannotCheckError("its arguments cannot be read; wrap it: verify(lambda q, k, v: ...)") from None


def _factory_products(target: Any, name: str, adapter: Adapter) -> Iterator[Subject]:
    """A function whose arguments are sizes (make_model(d_model, h)) is a factory."""
    if not re.match(r"(make|build|create|get)_|.*_factory", getattr(target, "__name__", "")):
        return
    try:
        for instance, sizes in build(target):
            if isinstance(instance, nn.Module):
                yield Subject(name, instance, sizes_of(instance, sizes, adapter), adapter)
    except CannotCheckError:
        return


def _instance(instance: Any, name: str, adapter: Adapter, trained: bool) -> Subject:
    return Subject(name, instance, sizes_of(instance, Sizes(), adapter), adapter, trained)


def sizes_of(instance: Any, asked: Sizes, adapter: Adapter) -> Sizes:
    """Read heads and width off an instance: its attributes first, then what it was asked to have.

    >>> sizes_of(nn.MultiheadAttention(12, 4), Sizes(), Adapter()).head_dim
    3
    """
    if isinstance(instance, nn.Module) and any(is_lazy(p) for p in (*instance.parameters(), *instance.buffers())):
        raise CannotCheckError("it has lazy layers that no call has filled yet; call it once and pass the instance")
    width = adapter.embed_dim or _width(instance, asked) or asked.embed_dim
    heads = adapter.num_heads or heads_of(instance, width)
    heads = heads or (asked.num_heads if width % asked.num_heads == 0 else 1)
    return replace(asked, num_heads=heads, head_dim=max(width // heads, 1))


COUNTS_HEADS = re.compile(r"head|^_?n?h$")
MEASURES_HEADS = re.compile(r"dim|size|kv|mask|width|(^|_)d_?head|head_?d$|per_?head|depth|feature|channel")


def _whole_numbers(instance: Any) -> list[tuple[str, int]]:
    """List the attributes that are whole numbers, of the module and of those inside it."""
    owners = instance.modules() if isinstance(instance, nn.Module) else [instance]
    named = [item for owner in owners for item in getattr(owner, "__dict__", {}).items()]
    return [(name, value) for name, value in named if isinstance(value, int) and not isinstance(value, bool)]


def heads_of(instance: Any, width: int) -> int | None:
    """Find an attribute that counts heads, on the module or inside it."""
    for name, value in _whole_numbers(instance):
        if COUNTS_HEADS.search(name.lower()) and not MEASURES_HEADS.search(name.lower()) and 0 < value <= width:
            return value
    lists = [x for x in instance.modules() if isinstance(x, nn.ModuleList)] if isinstance(instance, nn.Module) else []
    stacks = [
        len(x)
        for x in lists
        if len(x) > 1 and any(p.dim() == 2 and p.size(0) * len(x) == width for p in x[0].parameters())
    ]
    return stacks[0] if stacks else None


def _width(instance: Any, asked: Sizes) -> int | None:
    """Find the width of the tokens: what a matrix takes in, what a LayerNorm normalises, or what a table holds."""
    if not isinstance(instance, nn.Module):
        return None
    tables = [x for x in instance.buffers() if x.dim() >= 2 and x.is_floating_point()]
    if any(asked.embed_dim in x.shape for x in (*instance.parameters(), *tables)):
        return asked.embed_dim
    for child in instance.modules():
        for name in ("embed_dim", "d_model", "embedding_dim", "in_features"):
            value = getattr(child, name, None)
            if isinstance(value, int) and not _head_sized(instance, value):
                return value
    vectors = [p for p in instance.parameters() if p.dim() >= 1 and p.numel() > 1]
    if vectors:
        return int(
            vectors[0].size({1: 0, 3: 1}.get(vectors[0].dim(), -1))
        )  # (heads, width, head_dim) where it has three
    return int(tables[0].size(-1)) if tables else None


def _head_sized(instance: nn.Module, width: int) -> bool:
    """Whether a matrix that takes in so little works on one head at a time, and is no way into a feed-forward."""
    matrices = [tuple(p.shape) for p in instance.parameters() if p.dim() == 2]
    wider = [shape for shape in matrices if shape[1] > width]
    whole_heads = all(columns % width == 0 and rows != width for rows, columns in wider)
    return (width, width) in matrices and bool(wider) and whole_heads
