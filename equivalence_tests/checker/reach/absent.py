"""Stand in for packages that a file imports and that are not installed: what makes no use of them can be checked."""

import inspect
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from torch import nn

from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.lines import code_lines, frames_here
from equivalence_tests.checker.reporting.report import Report

T = TypeVar("T")
# What pip calls a package whose modules have another name.
DISTRIBUTIONS = {"PIL": "pillow", "cv2": "opencv-python", "skimage": "scikit-image", "sklearn": "scikit-learn"}
DISTRIBUTIONS |= {"yaml": "pyyaml"}


class NotInstalled(ABCMeta):
    """Makes the classes that stand in for an absent package and what it holds: to name, decorate with, inherit from."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or not (ABSENCES.importing or "__absent__" in vars(cls)):
            raise AttributeError(name)
        return _stand_in(f"{cls.__absent__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Be what it decorates or makes while the code is imported; later make modules, and refuse anything else."""
        if ABSENCES.importing:
            return cls
        if issubclass(cls, nn.Module):
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


def _stand_in(name: str) -> NotInstalled:
    return NotInstalled(name.rpartition(".")[2], (), {"__absent__": name, "__module__": name, "__path__": []})


def _package(cls: Any) -> str:
    name: str = cls.__absent__
    return name.partition(".")[0]


class Absences:
    """Finds stand-ins for the modules that could not be imported, and keeps what the code did with them.

    Attributes:
        names: What could not be imported.
        used: The first line that used each of them.
        in_part: Why only the definitions of the file were run; "" if all of it was.
        importing: Whether the code is being imported: what it only names or decorates with then is no use.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.used: dict[str, str] = {}
        self.in_part = ""
        self.importing = False

    def forget(self) -> None:
        """Begin anew, for another check."""
        self.names, self.used, self.in_part = [], {}, ""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module that is absent, or inside of one."""
        absent = any(f"{name}.".startswith(f"{one}.") for one in self.names)
        return ModuleSpec(name, self) if absent else None  # type: ignore[arg-type]  # a loader by its methods

    def create_module(self, spec: ModuleSpec) -> Any:
        """Make the stand-in of a module."""
        return _stand_in(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""

    def imported(self, run: Callable[[], T]) -> T:
        """Import something, with a stand-in for each module without which that fails."""
        self.importing = True
        sys.meta_path.append(self)
        try:
            while True:
                try:
                    return run()
                except ModuleNotFoundError as error:
                    if error.name is None or self.find_spec(error.name):
                        raise
                    self.names.append(error.name)
        finally:
            self.importing = False
            sys.meta_path.remove(self)
            for name in [name for name in sys.modules if self.find_spec(name)]:
                del sys.modules[name]

    def refuse(self, package: str) -> NoReturn:
        """Say that a package would be needed here.

        Raises:
            ModuleNotFoundError: Always.
        """
        lines = (f" ({line})" for line in code_lines(frames_here()) if line.text)  # none in what a dataclass makes
        self.used.setdefault(package, [*lines, ""][0])
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    def tell(self, report: Report) -> None:
        """Say in a report which packages are absent, before anything else where the code uses them."""
        texts = [f"{name}, which is not installed{line}: pip install {_pip(name)}" for name, line in self.used.items()]
        if texts and report.verdict == "unchecked":
            report.reason = "\n".join(f"It uses {text}" for text in texts)
        elif texts:
            report.coverage += [Exercise("other calls", False, f"they use {text}") for text in texts]
            report.verdict = "partial" if report.verdict == "equal" else report.verdict
        if unused := [name for name in self.names if name.partition(".")[0] not in self.used]:
            report.notes.append(f"not installed, and not used by what was checked: {', '.join(unused)}")
        if self.in_part:
            report.notes.append(f"only the definitions of the file were run: {self.in_part}")


def _pip(package: str) -> str:
    return DISTRIBUTIONS.get(package, package.replace("_", "-"))


ABSENCES = Absences()
