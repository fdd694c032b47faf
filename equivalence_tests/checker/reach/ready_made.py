"""Build the parts that a constructor wants handed to it, from the classes that stand in the same file."""

import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["classes_for"]

# What an argument wants, by its name, and how such classes are called.
WANTED = (
    (r"attn|attention", r"attention|attn"),
    (r"feed_?forward|^ffn?$|^mlp$|pos(ition)?_?wise", r"feed_?forward|ffn|mlp"),
    (r"^(encoder|decoder)?_?(layer|block)$", r"(?<!sub)(layer|block)$"),
)


def classes_for(argument: str, target: Any) -> Iterator[type[nn.Module]]:
    """List the classes beside a class of which an argument may want an instance.

    Args:
        argument: Name of the argument.
        target: The class that takes it.

    Yields:
        Classes of the same module, those whose name shares most with that of the target first.
    """
    pattern = next((wanted for name, wanted in WANTED if re.search(name, argument.lower())), "")
    module = sys.modules.get(getattr(target, "__module__", ""))
    if not pattern or module is None:
        return
    found = [
        x
        for x in vars(module).values()
        if isinstance(x, type) and issubclass(x, nn.Module) and x is not target and x.__module__ == module.__name__
    ]
    fitting = [x for x in found if re.search(pattern, x.__name__.lower()) and "norm" not in x.__name__.lower()]

    def unlike(found: type[nn.Module]) -> int:
        pairs = zip(found.__name__, target.__name__, strict=False)
        return -sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    yield from sorted(fitting, key=unlike)
