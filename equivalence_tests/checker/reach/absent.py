"""Stand in for packages that a file imports and that are not installed: what makes no use of them can be checked."""

import dis
import inspect
import linecache
import re
import sys
import traceback
from abc import ABCMeta
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn

from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.lines import code_lines, frames_here, is_users
from equivalence_tests.checker.reporting.report import Report

T = TypeVar("T")
FRAMEWORKS = {"tensorflow", "keras", "jax", "flax", "mxnet", "paddle", "mindspore", "mlx", "tinygrad"}


class NotInstalled(ABCMeta):
    """Makes the classes that stand in for an absent package and what it holds: to name, decorate with, inherit from."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or not (ABSENCES.importing or "__absent__" in vars(cls)):
            raise AttributeError(name)
        return _stand_in(f"{cls.__absent__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Be what it decorates or makes while the code is imported; later make modules, and refuse anything else."""
        if ABSENCES.importing or (cls.__name__.endswith("_") and any(isinstance(x, Tensor) for x in args[:1])):
            return cls  # what has such a name draws weights in place, and they are drawn anew
        written = any(isinstance(x, Tensor | nn.Module) for x in (*args, *kwargs.values()))
        if not written and _is_discarded(sys._getframe(1)):
            return cls  # a line of a log
        if issubclass(cls, nn.Module):
            if not issubclass(cls, PlainModule):
                ABSENCES.used.setdefault(_package(cls), "")
            return super().__call__(*args, **kwargs)
        return ABSENCES.refuse(_package(cls))

    @property
    def __signature__(cls) -> inspect.Signature:
        """Give the arguments of the user's own constructor: Python would read those of ``__call__``."""
        own = inspect.signature(getattr(cls, "__init__"))  # noqa: B009  # to mypy an instance
        return own.replace(parameters=list(own.parameters.values())[1:])

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __bool__(cls) -> bool:
        return "__absent__" not in vars(cls) or ABSENCES.refuse(_package(cls))

    def __iter__(cls) -> Iterator[Any]:
        ABSENCES.refuse(_package(cls))


class PlainModule(nn.Module):
    """What Lightning's module is to code that only calls its forward."""

    def save_hyperparameters(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: what is saved is for training."""


def _stand_in(name: str) -> NotInstalled:
    last = name.rpartition(".")[2]
    bases = (PlainModule,) if last == "LightningModule" else ()
    return NotInstalled(last, bases, {"__absent__": name, "__module__": name, "__path__": []})


def _is_discarded(frame: FrameType) -> bool:
    """Whether the call that runs in a frame stands alone: nothing takes its result."""
    following = (x.opname for x in dis.get_instructions(frame.f_code) if x.offset > frame.f_lasti)
    return next(following, "") == "POP_TOP"


def _package(cls: Any) -> str:
    """Name what is absent of what something stands for."""
    return next((one for one in ABSENCES.names if f"{cls.__absent__}.".startswith(f"{one}.")), cls.__absent__)


class Absences:
    """Finds stand-ins for the modules that could not be imported, and keeps what the code did with them."""

    def __init__(self) -> None:
        self.importing = False  # then what the code only names or decorates with is no use
        self.forget()

    def forget(self) -> None:
        """Begin anew, for another check."""
        self.names = list[str]()  # what could not be imported
        self.used = dict[str, str]()  # the first line that used each of them
        self.in_part = dict[str, str]()  # the files of which only the definitions were run, each with the reason

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module that is absent, or inside of one."""
        absent = any(f"{name}.".startswith(f"{one}.") for one in self.names)
        return ModuleSpec(name, self) if absent else None  # type: ignore[arg-type]  # a loader by its methods

    def create_module(self, spec: ModuleSpec) -> Any:
        """Make the stand-in of a module."""
        return _stand_in(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""

    def imported(self, run: Callable[[], T], found_above: Callable[[str], bool]) -> T:
        """Import something, with a stand-in for each module that is missing and does not lie in a folder above."""
        self.importing = True
        sys.meta_path.insert(0, self)
        try:
            while True:
                try:
                    return run()
                except ImportError as error:
                    if error.name and found_above(error.name):
                        continue
                    name = error.name if isinstance(error, ModuleNotFoundError) else _library_that_fails(error)
                    if not name or self.find_spec(name):
                        raise
                    self.names.append(name)
        finally:
            self.importing = False
            sys.meta_path.remove(self)
            for name in [name for name in sys.modules if self.find_spec(name)]:
                holder, _, last = name.rpartition(".")
                if isinstance(sys.modules.get(holder), ModuleType):
                    vars(sys.modules[holder]).pop(last, None)
                del sys.modules[name]

    def refuse(self, package: str) -> NoReturn:
        """Say that a package would be needed here, by raising ModuleNotFoundError."""
        lines = (f" ({line})" for line in code_lines(frames_here()) if line.text)  # none in what a dataclass makes
        if not self.importing:  # what breaks off then may be of no use to what is checked
            self.used.setdefault(package, [*lines, ""][0])
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    def tell(self, report: Report) -> None:
        """Say in a report which packages are absent, before anything else where the code uses them."""
        texts = [f"{name}, which is not installed{line}: {_advice(name)}" for name, line in self.used.items()]
        if texts and report.verdict == "unchecked":
            report.reason = "\n".join(f"It uses {text}" for text in texts)
        elif texts:
            report.coverage += [Exercise("other calls", False, f"they use {text}") for text in texts]
            report.verdict = "partial" if report.verdict == "equal" else report.verdict
        if unused := [name for name in self.names if name not in self.used]:
            report.notes.append(f"not installed, and not used by what was checked: {', '.join(unused)}")
        report.notes += [f"only the definitions of {file} were run: {why}" for file, why in self.in_part.items()]


def _advice(package: str) -> str:
    """Say how to get a package, or a file of the project's own that has such a name."""
    if package.partition(".")[0] in FRAMEWORKS:
        return "it is written for another framework, and only PyTorch and NumPy are read here"
    return "install it, or put it beside this file or in a folder above if it is a file of this project"


def _library_that_fails(error: ImportError) -> str:
    """Name what is installed but cannot be imported, such as one that refuses the version of another; "" for others."""
    walked = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    walked = [one for one in walked if not one[0].startswith("<frozen")]
    own = [one for one in walked if is_users(one[0]) and "site-packages" not in one[0]]
    named = re.match(r"\s*(from|import)\s+([A-Za-z_][\w.]*)", linecache.getline(*own[-1])) if own else None
    return named[2] if named and walked[-1] != own[-1] else ""


ABSENCES = Absences()
