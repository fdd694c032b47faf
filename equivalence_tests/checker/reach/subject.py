"""What is being checked: the built object, its sizes, its source, and what the user said about it."""

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from equivalence_tests.checker.reach.arguments import SIZES, Sizes
from equivalence_tests.checker.reach.by_steps import with_forward
from equivalence_tests.checker.reach.construction import build
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.registering import REGISTERING
from equivalence_tests.checker.reach.sublayer import WithSublayer, names_with_sublayer
from equivalence_tests.checker.reach.tried import TRIED, Try

FACTORY = re.compile(r"(make|build|create|get)_|.*_factory")  # its arguments are sizes: make_model(d_model, h)


@dataclass(frozen=True)
class Adapter:
    """What the checker could not find out by itself.

    Args:
        build: Makes the module.
        call: ``call(module, query, key, value, may_attend)`` gives the output. All tensors are batch first,
            (batch, len, embed_dim); may_attend is (batch, query_len, key_len) bool, True = may look, or None.
        num_heads: Number of heads.
        embed_dim: Width of the tokens.
        intended: Which deviations are on purpose: the name of the finding -> the reason.

    >>> adapter = Adapter(build=lambda: nn.MultiheadAttention(6, 2, batch_first=True), num_heads=2, embed_dim=6)
    """

    build: Callable[[], Any] | None = None
    call: Callable[[Any, Tensor, Tensor, Tensor, Tensor | None], Any] | None = None
    num_heads: int | None = None
    embed_dim: int | None = None
    intended: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Subject:
    """One built instance."""

    name: str
    function: Callable[..., Any]  # the module or function
    sizes: Sizes  # the sizes that it was built with, as far as they are known
    adapter: Adapter
    trained: bool = False  # whether it came as an instance, whose weights must come back as they were
    built: bool = False  # whether its sizes are ours
    dtype: torch.dtype = torch.float64  # precision in which it computes
    initial: dict[str, Tensor] = field(default_factory=dict)  # its parameters as they came, by name

    def copied(self) -> Any:
        """Leave the user's own instance alone, and what a factory hands out, which may be one."""
        if self.module is None or self.built:  # a lambda in a copy would still read the weights of the original
            return self.function
        try:
            made = copy.deepcopy(self.module)
            REGISTERING.register(made)
            return made
        except Exception:  # some modules cannot be copied
            if not self.trained:
                return self.module
            raise CannotCheckError("the instance cannot be deep-copied; pass its class or a factory instead") from None

    @property
    def module(self) -> nn.Module | None:
        """The module; None for a plain function."""
        return self.function if isinstance(self.function, nn.Module) else None


def subjects(target: Any, name: str, adapter: Adapter) -> Iterator[Subject]:
    """Build a class, a factory, an instance or a function to try until one can be called, the most telling first."""

    def subject(instance: Any, asked: Sizes = SIZES[0], *, trained: bool = False, built: bool = False) -> Subject:
        instance = with_forward(instance)
        sizes, names = sizes_of(instance, asked, adapter), names_with_sublayer(instance)
        if names is not None and adapter.call is None:
            instance = WithSublayer(instance, names, sizes.embed_dim, sizes.num_heads)
        return Subject(name, instance, sizes, adapter, trained, built)

    if adapter.build is not None:
        yield subject(adapter.build())
    elif inspect.isclass(getattr(target, "func", target)):  # a class, or functools.partial of one
        yield from (subject(made, sizes, built=True) for made, sizes in build(target) if callable(made))
    elif isinstance(target, nn.Module):
        yield subject(target, trained=True)
    elif not callable(target):
        raise CannotCheckError(f"{name} is {type(target).__name__}, neither a class, nor a function, nor a module")
    elif not _parameters(target):
        made = target()
        TRIED.built(Try(target, (), {}), made)
        yield subject(made)
    else:
        if FACTORY.match(getattr(target, "__name__", "")):
            with contextlib.suppress(CannotCheckError):
                yield from (subject(made, sizes) for made, sizes in build(target) if isinstance(made, nn.Module))
        yield from (Subject(name, target, sizes, adapter) for sizes in SIZES[:2])


def _parameters(target: Any) -> Any:
    try:
        return inspect.signature(target).parameters
    except ValueError:
        raise CannotCheckError("its arguments cannot be read; wrap it: verify(lambda q, k, v: ...)") from None


def sizes_of(instance: Any, asked: Sizes, adapter: Adapter) -> Sizes:
    """Read heads and width off an instance: its attributes first, then what it was asked to have.

    >>> sizes_of(nn.MultiheadAttention(12, 4), Sizes(), Adapter()).head_dim
    3
    """
    if isinstance(instance, nn.Module) and any(is_lazy(p) for p in (*instance.parameters(), *instance.buffers())):
        raise CannotCheckError("it has lazy layers that no call has filled yet; call it once and pass the instance")
    packed = next(_packed(instance), "")
    if packed:
        raise CannotCheckError(f"{packed}, which no float64 can hold: pass the module as it was before")
    width = adapter.embed_dim or _width(instance, asked) or asked.embed_dim
    heads = adapter.num_heads or heads_of(instance, width)
    heads = heads or (asked.num_heads if width % asked.num_heads == 0 else 1)
    return replace(asked, num_heads=heads, head_dim=max(width // heads, 1))


def _packed(instance: Any) -> Iterator[str]:
    """Name the weights that are quantised or sparse."""
    for path, part in instance.named_modules() if isinstance(instance, nn.Module) else ():
        if ".quantized" in type(part).__module__:
            yield f"the weights of {path or 'it'} are quantised"
        for name, x in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            if x.is_quantized or x.layout is not torch.strided:
                kind = "quantised" if x.is_quantized else "sparse"
                yield f"{f'{path}.{name}'.lstrip('.')} is {kind}"


COUNTS_HEADS = re.compile(r"head|^_?n?h$")
MEASURES_HEADS = re.compile(r"dim|size|kv|mask|width|(^|_)d_?head|head_?d$|per_?head|depth|feature|channel")


def heads_of(instance: Any, width: int) -> int | None:
    """Find an attribute that counts heads, on the module or inside it, or a list of as many modules."""
    owners = list(instance.modules()) if isinstance(instance, nn.Module) else [instance]
    held = [(name.lower(), value) for owner in owners for name, value in getattr(owner, "__dict__", {}).items()]
    for name, value in held:
        if type(value) is int and COUNTS_HEADS.search(name) and not MEASURES_HEADS.search(name) and 0 < value <= width:
            return value
    lists = [x for x in owners if isinstance(x, nn.ModuleList) and len({*x} - {None}) > 1]
    fill = (len(x) for x in lists if any(p.dim() == 2 and p.size(0) * len(x) == width for p in x[0].parameters()))
    return next(fill, None)


def _width(instance: Any, asked: Sizes) -> int | None:
    """Find the width of the tokens: what a matrix takes in, what a LayerNorm normalises, or what a table holds."""
    if not isinstance(instance, nn.Module):
        return None
    tables = [x for x in instance.buffers() if x.dim() >= 2 and x.is_floating_point()]
    if any(asked.embed_dim in x.shape for x in (*instance.parameters(), *tables)) and not _begins_wider(
        instance, asked
    ):
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


def _begins_wider(instance: nn.Module, asked: Sizes) -> bool:
    """Whether the first thing in it is a norm of several times the width that was asked for, which no vector has."""
    vectors, first = [p for p in instance.parameters() if p.dim() == 1], next(instance.parameters(), None)
    wider = bool(vectors) and first is vectors[0] and first.numel() % asked.embed_dim == 0
    return wider and asked.embed_dim not in map(Tensor.numel, vectors)


def _head_sized(instance: nn.Module, width: int) -> bool:
    """Whether a matrix that takes in so little works on one head at a time, and is no way into a feed-forward."""
    matrices = [tuple(p.shape) for p in instance.parameters() if p.dim() == 2]
    wider = [shape for shape in matrices if shape[1] > width]
    whole_heads = all(columns % width == 0 and rows != width for rows, columns in wider)
    return (width, width) in matrices and bool(wider) and whole_heads
