"""Names of a package that are imported when they are first asked for: ``--help`` need not wait for torch."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["from_homes"]


def from_homes(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package.

    Args:
        package: Its name.
        homes: For each name the module that defines it.

    >>> lookup = from_homes("here", {"sqrt": "math"})
    >>> lookup("sqrt")(9.0)
    3.0
    """

    def lookup(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return lookup
