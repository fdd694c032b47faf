"""Run a call once, watched: as it is, or with patches, on its own inputs or on others."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.identities import identify
from equivalence_tests.checker.engine.judgement import Judgement
from equivalence_tests.checker.engine.names import Run
from equivalence_tests.checker.engine.watching import Patch, Recorder
from equivalence_tests.checker.reach.kept_state import keeping_state

__all__ = ["Call", "Examination"]


@dataclass(eq=False)
class Call:
    """A function with its arguments, to be run as often as is needed.

    Args:
        function: What is called.
        args: Its arguments.
        kwargs: Its arguments by name.
        module: Holds the parameters; the function itself where it is a module.
        seeds: Names of the elements of its arguments, by the id of the tensor.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    module: nn.Module | None = None
    seeds: Mapping[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.module is None and isinstance(self.function, nn.Module):
            self.module = self.function

    def run(
        self,
        patches: Mapping[int, Patch] | None = None,
        names: Mapping[int, Tensor] | None = None,
        seed: int | None = None,
        read: bool = True,
    ) -> Run:
        """Run it once.

        Args:
            patches: What to put in the place of operations' results.
            names: The names of what patched operations give.
            seed: Draws other numbers for the arguments that hold data; None for its own.
            read: Whether the elements are to be named.
        """
        args, kwargs, replaced = self._inputs(seed)
        given = [(f"{self._kind(x)}:{name}", x) for name, x in _tensors(args, kwargs)]
        recorder = Recorder([*self._owned(), *given], patches)
        state = torch.get_rng_state()
        try:
            torch.manual_seed(5)
            with torch.no_grad(), keeping_state(self.module), _placed(self.module, recorder), recorder:
                output = self.function(*args, **kwargs)
        finally:
            torch.set_rng_state(state)
        seeds = {id(replaced[key]): codes for key, codes in self.seeds.items() if key in replaced}
        data = [x for name, x in given if x.is_floating_point() and x.dim() >= 2]
        return Run(recorder, identify(recorder, seeds, data, names or {}) if read else None, output)  # type: ignore[arg-type]

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors among its arguments, each with its place or name."""
        return _tensors(self.args, self.kwargs)

    def _kind(self, x: Tensor) -> str:
        """A matrix that is handed to a plain function beside tokens is a weight of it."""
        tokens = any(other.dim() >= 3 and _is_data(other) for _, other in self.tensors)
        return "param" if self.module is None and tokens and x.dim() == 2 and _is_data(x) else "arg"

    def _owned(self) -> list[tuple[str, Tensor]]:
        if self.module is None:
            return []
        buffers = [(f"buffer:{name}", x) for name, x in self.module.named_buffers()]
        return [*((f"param:{name}", x) for name, x in self.module.named_parameters(remove_duplicate=False)), *buffers]

    def _inputs(self, seed: int | None) -> tuple[Any, Any, dict[int, Tensor]]:
        """Fresh copies of the arguments: the code may write into them."""
        generator = torch.Generator().manual_seed(seed or 0)
        replaced: dict[int, Tensor] = {}

        def fresh(x: Any) -> Any:
            if isinstance(x, Tensor):
                if id(x) not in replaced:
                    replaced[id(x)] = _drawn(x, generator) if seed is not None else x.detach().clone()
                return replaced[id(x)]
            if isinstance(x, list):
                return [fresh(item) for item in x]
            if type(x) is tuple:
                return tuple(fresh(item) for item in x)
            if type(x) is dict:
                return {key: fresh(item) for key, item in x.items()}
            return _copied(x)

        return tuple(fresh(x) for x in self.args), {key: fresh(x) for key, x in self.kwargs.items()}, replaced


@dataclass(eq=False)
class Examination:
    """All judgements of one call.

    Args:
        call: What was run.
        run: The last run, with what blocks the reading put right.
        judgements: One for each attention of that run.
        departures: What was found in each attention, in the order in which it was found.
        patches: What had to be put right before the rest could be read.
    """

    call: Call
    run: Run
    judgements: list[Judgement] = field(default_factory=list)
    departures: list[list[Departure]] = field(default_factory=list)
    patches: dict[int, Patch] = field(default_factory=dict)


@contextmanager
def _placed(module: nn.Module | None, recorder: Recorder) -> Iterator[None]:
    """Tell the recorder which module is running."""
    handles = []
    for path, child in module.named_modules() if module is not None else ():
        if path and not isinstance(child, torch.jit.ScriptModule):
            enter = child.register_forward_pre_hook(lambda *_, path=path: recorder.places.append(path), prepend=True)
            leave = child.register_forward_hook(lambda *_: recorder.places.pop() and None, always_call=True)
            handles += [enter, leave]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _copied(x: Any) -> Any:
    """A cache that is handed over would grow from run to run."""
    if isinstance(x, str | int | float | bool | type(None) | nn.Module | torch.dtype | torch.device) or callable(x):
        return x
    try:
        return copy.deepcopy(x)
    except Exception:  # somebody's object may refuse
        return x


def _drawn(x: Tensor, generator: torch.Generator) -> Tensor:
    """Other numbers for what looks like data: real numbers that vary, and none that hides something."""
    if not _is_data(x):
        return x.detach().clone()
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)


def _is_data(x: Tensor) -> bool:
    if not x.is_floating_point() or x.dim() < 2 or x.numel() < 2:
        return False
    return bool(x.isfinite().all()) and float(x.abs().max()) <= 1e3 and len(x.unique()) >= 0.5 * x.numel()


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []

    def walk(name: str, x: Any) -> None:
        if isinstance(x, Tensor):
            found.append((name, x))
        elif isinstance(x, list | tuple):
            for i, item in enumerate(x):
                walk(f"{name}[{i}]", item)
        elif isinstance(x, dict):
            for key, item in x.items():
                walk(f"{name}[{key!r}]", item)

    for i, x in enumerate(args):
        walk(str(i), x)
    for key, x in kwargs.items():
        walk(key, x)
    return found
