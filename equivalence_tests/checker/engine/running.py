"""Run a call once, watched: as it is, or with patches, on its own inputs or on others."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map, tree_map_only

from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.identities import identify
from equivalence_tests.checker.engine.judgement import Judgement
from equivalence_tests.checker.engine.names import Run
from equivalence_tests.checker.engine.watching import Patch, Recorder
from equivalence_tests.checker.reach.state import ask, keeping_state


@dataclass(eq=False)
class Call:
    """A function with its arguments, to be run as often as is needed."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    module: nn.Module | None = None  # holds the parameters; the function itself where it is a module
    # Names of the elements of its arguments, by the id of the tensor.
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
        gradients: bool = False,
    ) -> Run:
        """Run it once, with patches in the place of operations' results, and give these the ``names``.

        A ``seed`` draws other numbers for the arguments that hold data; elements are named only to be ``read``.
        """
        args, kwargs, replaced = self.fresh(seed)
        given = [(f"{self._kind(x)}:{name}", x) for name, x in named_tensors(args, kwargs)]
        recorder = Recorder([*self._owned(), *given], patches)
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(gradients), keeping_state(self.module):
            torch.default_generator.manual_seed(5)
            with _placed(self.module, recorder), recorder:
                output = self.function(*args, **kwargs)
        seeds = {id(replaced[key]): codes for key, codes in self.seeds.items() if key in replaced}
        data = [x for name, x in given if x.is_floating_point() and x.dim() >= 2]
        return Run(recorder, identify(recorder, seeds, data, names or {}) if read else None, output)  # type: ignore[arg-type]

    def returned(self) -> Any:
        """Give what it returns for fresh copies of its arguments, unwatched; the module stays as it was."""
        args, kwargs, _ = self.fresh()
        with torch.no_grad(), keeping_state(self.module):
            return self.function(*args, **kwargs)

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors among its arguments, each with its place or name."""
        return named_tensors(self.args, self.kwargs)

    def _kind(self, x: Tensor) -> str:
        """A matrix that is handed to a plain function beside tokens is a weight of it."""
        if self.module is not None or x.dim() != 2 or not is_data(x):
            return "arg"
        return "param" if any(other.dim() >= 3 and is_data(other) for _, other in self.tensors) else "arg"

    def _owned(self) -> list[tuple[str, Tensor]]:
        if self.module is None:
            return []
        buffers = [(f"buffer:{name}", x) for name, x in self.module.named_buffers()]
        return [*((f"param:{name}", x) for name, x in self.module.named_parameters(remove_duplicate=False)), *buffers]

    def fresh(
        self, seed: int | None = None, leaves: Mapping[int, Tensor] | None = None
    ) -> tuple[Any, Any, dict[int, Tensor]]:
        """Copy the arguments, as the code may write into them; each copy is also given by the id of its original.

        A ``seed`` draws other numbers for those that hold data, beside their zeros; ``leaves`` take the place of some,
        with gradients.
        """
        generator = torch.Generator().manual_seed(seed or 0)
        replaced: dict[int, Tensor] = {}

        def fresh(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return _copied(x)
            if id(x) not in replaced:
                leaf, copied = (leaves or {}).get(id(x)), x.detach()
                if seed is not None and is_data(x):
                    copied = torch.randn(x.shape, generator=generator, dtype=torch.float64) * (x != 0)
                replaced[id(x)] = copied.to(x.dtype, copy=True) if leaf is None else leaf * 1
            return replaced[id(x)]

        args, kwargs = tree_map(fresh, (self.args, self.kwargs), is_leaf=_is_leaf)
        return args, kwargs, replaced

    def redrawn(self, seed: int | None) -> "Call":
        """The same call with other numbers for the arguments that hold data; with its own for None."""
        args, kwargs, _ = self.fresh(seed)
        return Call(self.function, args, kwargs, self.module)


@dataclass(eq=False)
class Examination:
    """All judgements of one call."""

    call: Call
    run: Run  # the last one, with what blocks the reading put right
    judgements: list[Judgement] = field(default_factory=list)  # one for each attention of that run
    # What was found in each attention, in the order in which it was found.
    departures: list[list[Departure]] = field(default_factory=list)
    patches: dict[int, Patch] = field(default_factory=dict)  # what had to be put right before the rest could be read


@contextmanager
def called_by_hooks(module: nn.Module) -> Iterator[None]:
    """Let sub-modules whose forward is called by name run their hooks all the same."""
    children = [child for path, child in module.named_modules() if path and "forward" not in vars(child)]
    children = [child for child in children if not isinstance(child, torch.jit.ScriptModule)]
    running: set[int] = set()

    def routed(child: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:
            if id(child) in running:
                running.discard(id(child))
                return forward(*args, **kwargs)
            running.add(id(child))
            return child(*args, **kwargs)

        return called

    def entered(child: nn.Module, _: Any) -> None:
        running.add(id(child))

    with ExitStack() as stack:
        for child in children:
            stack.enter_context(child.register_forward_pre_hook(entered))
            vars(child)["forward"] = routed(child, child.forward)
            stack.callback(vars(child).pop, "forward", None)
        yield


def inputs_of(modules: Mapping[str, nn.Module], run: Callable[[], Any]) -> list[tuple[str, Any, Any]]:
    """List what modules are given in a run: their names, and copies, as a cache is written into later."""
    found: list[tuple[str, Any, Any]] = []

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        found.append((name, *Call(module, args, kwargs).fresh()[:2]))

    with ExitStack() as stack:
        for name, module in modules.items():
            hook = partial(note, name)
            stack.enter_context(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        run()
    return found


@contextmanager
def _placed(module: nn.Module | None, recorder: Recorder) -> Iterator[None]:
    """Tell the recorder which module is running."""

    def enter(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        recorder.enter(path, args, kwargs)

    with ExitStack() as stack:
        for path, child in module.named_modules() if module is not None else ():
            if not isinstance(child, torch.jit.ScriptModule):
                hook = partial(enter, path)
                stack.enter_context(child.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
                leave = child.register_forward_hook(lambda _, __, output: recorder.leave(output), always_call=True)
                stack.enter_context(leave)
        stack.enter_context(called_by_hooks(module) if module is not None else nullcontext())
        yield


def named_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """List the tensors among arguments, each with its place or name."""
    given = [*((str(place), x) for place, x in enumerate(args)), *kwargs.items()]
    leaves = ((name, tree_flatten_with_path(x, is_leaf=_is_leaf)[0]) for name, x in given)
    return [(name + keystr(path), x) for name, found in leaves for path, x in found if isinstance(x, Tensor)]


def _copied(x: Any) -> Any:
    """A cache that is handed over would grow from run to run."""
    if callable(x):
        return x
    copied = ask(partial(copy.deepcopy, x))  # somebody's object may refuse
    return x if copied.error is not None else copied.value


def is_data(x: Tensor) -> bool:
    """Whether it looks like data: real numbers that vary, beside zeros as padding, and none that hides something."""
    if not x.is_floating_point() or x.dim() < 2:
        return False
    varied = x[x != 0]
    if varied.numel() < 2 or not float(varied.abs().max()) <= 1e3:
        return False
    count = len(varied.unique())  # a table of angles may say each twice, beside the zeros of its first row
    return count >= 0.5 * x.numel() or count > 0.5 * varied.numel()


def _is_leaf(x: Any) -> bool:
    """Whether it is handed on as one: somebody's object is, also where torch could take it apart."""
    return not isinstance(x, list | tuple | dict)


def in_dtype(given: Any, dtype: torch.dtype | None) -> Any:
    """Copy the tensors among arguments, the real ones in another precision, or in their own."""

    def converted(x: Tensor) -> Tensor:
        return x.detach().to(dtype if x.is_floating_point() else None, copy=True)

    return tree_map_only(Tensor, converted, given)
