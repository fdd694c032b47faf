"""Run the user's code, its parameters drawn anew, and leave the state of Python, of torch and of a module as it was."""

import contextlib
import copy
import inspect
import io
import itertools
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from unittest import mock
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch._tensor_str import PRINT_OPTS
from torch.backends import mha
from torch.overrides import TorchFunctionMode
from torch.utils import _contextlib
from torch.utils.weak import WeakIdKeyDictionary

from equivalence_tests.checker.reach.crashes import CRASHES
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reporting.lines import raised_in, source_of
from equivalence_tests.instruments.weights import randomize_parameters

T = TypeVar("T")
CACHE = re.compile(r"cache|past|(^|_)kv($|_)|memory", re.IGNORECASE)
OF_ANY_MODULE = frozenset(vars(nn.Module()))
OF_LAYERS = tuple(f"torch.nn.modules.{name}" for name in ("linear", "activation", "dropout", "normalization", "sparse"))
PLAIN = (dict, list, set, int, bool)
_COPIES = WeakIdKeyDictionary()  # of each tensor: its version, and a copy
_CHANGED: "WeakKeyDictionary[nn.Module, set[str]]" = WeakKeyDictionary()


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _set_path(before: tuple[list[str], list[str]]) -> None:
    sys.path, sys.path[:] = before


# How each setting is looked up, and put back.
SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (mha.get_fastpath_enabled, mha.set_fastpath_enabled),
    (np.geterr, lambda errors: np.seterr(**errors)),
    (lambda: vars(PRINT_OPTS).copy(), lambda options: torch.set_printoptions(**options)),
    (np.get_printoptions, lambda options: np.set_printoptions(**options)),
    (os.environ.copy, _set_environment),
    (lambda: (sys.path, sys.path.copy()), _set_path),
    (os.getcwd, os.chdir),
)


@contextlib.contextmanager
def preserved_global_state() -> Iterator[io.StringIO]:
    """Restore seeds, default dtype and device and all of ``SETTINGS``, and give a buffer of what is printed.

    >>> with preserved_global_state():
    ...     torch.set_default_dtype(torch.float64)
    >>> torch.get_default_dtype()
    torch.float32
    """
    device = torch.get_default_device()
    before = [(put_back, look()) for look, put_back in SETTINGS]
    mha.set_fastpath_enabled(False)  # it packs tokens without their padding, and hides what it does
    printed = io.StringIO()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(contextlib.redirect_stdout(printed))
            if device.type != "cpu":  # what is checked here is checked on the CPU
                stack.enter_context(torch.device("cpu"))
            yield printed
    finally:
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)  # None takes the mode away
        for put_back, value in before:
            put_back(value)


class _Constructor(type):
    """A constructor such as torch.LongTensor, of which a recorder sees what it makes of a tensor."""

    own: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        same = len(args) == 1 and isinstance(args[0], torch.Tensor) and args[0].dtype == cls.own.dtype
        return args[0][...] if same else cls.own(*args, **kwargs)

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, cls.own)


@contextlib.contextmanager
def seen_constructors() -> Iterator[None]:
    """Let torch's old constructors give a view of the tensor that they are given, which a recorder sees."""
    with contextlib.ExitStack() as stack:
        for name in ("LongTensor", "BoolTensor", "FloatTensor", "DoubleTensor"):
            own = getattr(torch, name)
            stack.enter_context(mock.patch.object(torch, name, _Constructor(f"torch.{name}", (), {"own": own})))
        yield


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Let what is compiled run as it is written.

    torch's own switch takes two seconds to import: until somebody compiles, ``torch.compile`` gives back what it takes.

    >>> with uncompiled():
    ...     torch.compile(lambda x: x + 1, backend=lambda *_: 1 / 0)(torch.zeros(1))
    tensor([1.])
    """
    switched: contextlib.AbstractContextManager[Any] = mock.patch.object(torch, "compile", _as_it_is)
    if "torch._dynamo" in sys.modules:
        switched = torch.compiler.set_stance("force_eager")
    with switched:
        yield


def _as_it_is(model: Any = None, **_: Any) -> Any:
    """What ``torch.compile`` gives, or the decorator that it gives where it is handed options alone."""
    return (lambda function: function) if model is None else model


class InDouble(TorchFunctionMode):
    """Lets code that names float32 itself run with weights in float64: what it makes or casts is float64, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        given = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return func(*args, **given)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let code that makes tensors without saying their dtype make them in this one.

    >>> with default_dtype(torch.float64):
    ...     torch.zeros(1).dtype
    torch.float64
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def retype(module: nn.Module, dtype: torch.dtype) -> None:
    """Put all tensors of a module into this precision, plain attributes too, and the dtypes to which it casts.

    A tensor that is a plain attribute becomes a buffer, as which it is known by its name, unless a call may assign it
    anew: a buffer takes nothing but tensors.
    """

    def retyped(x: Tensor) -> Tensor:
        return x.to(dtype.to_complex() if x.is_complex() else dtype) if x.is_floating_point() or x.is_complex() else x

    module._apply(retyped)
    for child in module.modules():
        for name, value in [*vars(child).items()]:
            if isinstance(value, Tensor) and not hasattr(type(child), name) and not _assigns_later(child, name):
                delattr(child, name)
                child.register_buffer(name, retyped(value), persistent=False)
            elif isinstance(value, Tensor):
                setattr(child, name, retyped(value))
            elif name not in OF_ANY_MODULE:
                setattr(child, name, _casting_to(value, dtype))


def _assigns_later(module: nn.Module, name: str) -> bool:
    """Whether another method than the constructor assigns an attribute."""
    own = itertools.takewhile(lambda made: made is not nn.Module, type(module).__mro__)
    methods = (x for made in own for x in vars(made).values() if inspect.isfunction(x) and x.__name__ != "__init__")
    return any(re.search(rf"\bself\.{name}\b[^=\n]*=(?!=)", source_of(method)) for method in methods)


def _casting_to(held: Any, dtype: torch.dtype) -> Any:
    """A dtype of floats, or a copy of a config that names some, with this one instead; anything else as it is."""
    if isinstance(held, torch.dtype):
        return dtype if held.is_floating_point else held
    named = held if isinstance(held, dict) else getattr(held, "__dict__", {})
    floats = [key for key, x in named.items() if isinstance(x, torch.dtype) and x.is_floating_point]
    if not floats or callable(held):
        return held
    changed = copy.copy(held)
    (changed if isinstance(changed, dict) else vars(changed)).update(dict.fromkeys(floats, dtype))
    return changed


def prepare(module: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Give a module random parameters, in eval mode and in this precision, without touching its own code.

    A single number that is frozen is a setting, such as a scale, and a frozen table of different numbers was computed:
    they stay.
    """
    retype(module, dtype)
    module.eval()  # a train() of the user's own may return nothing
    settings = [(x, x.detach().clone()) for x in settings_of(module)]
    randomize_parameters(module, seed=0)
    with torch.no_grad():
        for x, before in settings:
            x.copy_(before)
    return module


def settings_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """List what is frozen on purpose: single numbers, and tables of different numbers outside of torch's own layers."""
    for one in module.modules():
        of_theirs = isinstance(one, nn.Embedding) or not type(one).__module__.startswith("torch.")
        for x in (x for x in one.parameters(recurse=False) if not x.requires_grad):
            table = of_theirs and x.dim() > 1 and x.is_floating_point() and bool((x != x.flatten()[0]).any())
            if x.numel() == 1 or table:
                yield x


def mode_around(function: Any) -> str:
    """Name the decorator of torch's, such as ``no_grad``, under which a function runs; "" where there is none.

    >>> mode_around(torch.no_grad()(lambda x: x)), mode_around(lambda x: x)
    ('no_grad', '')
    """
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename != _contextlib.__file__ or not hasattr(function, "__wrapped__"):
        return ""
    factory = inspect.getclosurevars(function).nonlocals["ctx_factory"]
    return type(factory()).__name__


@contextlib.contextmanager
def outside_modes(found: Any) -> Iterator[str]:
    """Let the forward of a module run without a decorator such as ``torch.no_grad()``, whose name is given.

    Its sub-modules keep theirs: they would train where they do not.
    """
    kind = found if isinstance(found, type) else type(found)
    forward: Any = getattr(kind, "forward", None)
    mode = mode_around(forward)
    with mock.patch.object(kind, "forward", inspect.unwrap(forward)) if mode else contextlib.nullcontext():
        yield mode


@contextlib.contextmanager
def keeping_state(function: Any) -> Iterator[None]:
    """Put back afterwards what a call changes of the tensors, tables and counts of a module; parameters are left alone.

    >>> module = nn.Module()
    >>> module.cache = torch.zeros(2)
    >>> with keeping_state(module):
    ...     module.cache += 1
    >>> module.cache, changed_by_calls(module)
    (tensor([0., 0.]), ['cache'])
    """
    children = list(_that_may_keep(function))
    with torch._C.DisableTorchFunction():  # what watches the call does not see these copies
        held = [(*one, *_copied(one[-1])) for child in children for one in _held_by(child)]
    names = [(child, {*vars(child)}) for child in children]
    try:
        yield
    finally:
        for child, known in names:
            for name in [one for one in vars(child).keys() - known if _asks_for(type(child), one)]:
                _CHANGED.setdefault(function, set()).add(name)
                delattr(child, name)
        for owner, name, value, version, before in held:
            if getattr(owner, name, None) is not value or _version(value) != version:
                if type(value) not in PLAIN:
                    _CHANGED.setdefault(function, set()).add(name)
                setattr(owner, name, value if type(value) in PLAIN else before)
            if isinstance(value, dict | set):
                value.clear()
                value.update(before)
            elif isinstance(value, list):
                value[:] = before


def changed_by_calls(function: Any) -> list[str]:
    """Name what calls have changed so far."""
    return sorted(_CHANGED.get(function, ())) if isinstance(function, nn.Module) else []


def _that_may_keep(function: Any) -> Iterator[nn.Module]:
    """List the modules that may keep what a call gives them: all but torch's simplest layers."""
    modules = function.modules() if isinstance(function, nn.Module) else ()
    return (one for one in modules if one._buffers or not type(one).__module__.startswith(OF_LAYERS))


def _asks_for(kind: type, name: str) -> bool:
    """Whether a class asks whether it has an attribute of this name, so that a later call may run differently."""
    return bool(re.search(rf"hasattr\(self, [\"']{name}[\"']\)", source_of(kind)))


def _held_by(child: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """List what a module remembers: tensors beside its parameters, tables, counts, and None where a cache may be."""
    for name, value in itertools.chain(vars(child).items(), child._buffers.items()):
        if name in OF_ANY_MODULE:
            continue
        if type(value) in PLAIN or isinstance(value, Tensor) or (value is None and CACHE.search(name)):
            yield child, name, value


def _copied(value: Any) -> tuple[int, Any]:
    """Give the version of a tensor, and a copy, which is made anew only where the version is; of a table a copy."""
    if not isinstance(value, Tensor):
        return 0, value.copy() if isinstance(value, dict | list | set) else value
    if value not in _COPIES or _COPIES[value][0] != _version(value):
        _COPIES[value] = _version(value), value.detach().clone()
    known: tuple[int, Tensor] = _COPIES[value]
    return known


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What came of a call of code that may raise anything."""

    value: T | None = None  # what it gave; None where it raised
    error: Exception | None = None  # what it raised; None where it gave something


def ask(call: Callable[[], T]) -> Answer[T]:
    """Run code that may raise anything.

    >>> ask(lambda: 1 / 0).error
    ZeroDivisionError('division by zero')
    """
    try:
        return Answer(call())
    except Exception as error:
        CRASHES.note(error)
        return Answer(error=error)


@torch.no_grad()
def attempt(call: Callable[[], T], errors: list[str] | None = None) -> T | None:
    """Run code that may raise anything, without gradients; give None where it raised."""
    answer = ask(call)
    if answer.error is not None and errors is not None:
        errors.append(said(answer.error) + raised_in(answer.error))
    return answer.value


def held_by(function: Any) -> dict[str, Any]:
    """Give what a module and those inside it hold beside parameters, by their paths; nothing of a function.

    >>> held_by(nn.Dropout(0.2))["p"]
    0.2
    """
    children = function.named_modules() if isinstance(function, nn.Module) else ()
    held = ((path, (*vars(child).items(), *child.named_buffers(recurse=False))) for path, child in children)
    return {f"{path}.{name}".strip("."): value for path, pairs in held for name, value in pairs}


def switch_off(module: nn.Module | None, named: re.Pattern[str]) -> str:
    """Name the attribute that is False and has such a name; "" if there is none."""
    held = held_by(module).items()
    return next((name for name, value in held if value is False and named.search(name.rpartition(".")[2])), "")
