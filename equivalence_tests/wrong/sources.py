"""A right attention as text that stands alone, how to build it, and what to call it with."""

import ast
import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "DRAWS",
    "HEADS",
    "IMPORTS",
    "LENGTHS",
    "WIDTH",
    "Right",
    "call_of",
    "complete",
    "imported",
    "noisy",
    "sizes_of",
    "text_of",
]

# What edits are written with.
IMPORTS = ("import torch", "from torch import nn", "from torch.nn import functional as F")

BATCH, WIDTH, HEADS = 2, 12, 3
LARGEST = 1e3  # what is larger is a mask
LENGTHS = (6, 8)  # even, as code that pools two tokens wants them, and enough for one that picks five keys
Draw = Callable[[torch.Generator, int], Any]
_numbers = itertools.count()


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _of_shape(shape: Callable[[int], tuple[int, ...]]) -> Draw:
    return lambda generator, length: _normal(*shape(length), generator=generator)


def _seen(shape: Callable[[int], tuple[int, ...]]) -> Draw:
    """True where a key may be looked at; the first always may."""

    def draw(generator: torch.Generator, length: int) -> Tensor:
        seen = torch.rand(shape(length), generator=generator) < 0.6
        seen[..., 0] = True
        return seen

    return draw


def _made_of(draw: Draw, change: Callable[[Tensor], Tensor]) -> Draw:
    return lambda generator, length: change(draw(generator, length))


def _additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e4)


def _angles(length: int) -> Tensor:
    turns = torch.outer(torch.arange(length).double(), torch.tensor([1.0, 0.3]).double())
    return torch.polar(torch.ones_like(turns), turns)


def _of_memory(length: int) -> tuple[int, ...]:
    return BATCH, length, length + 2


def _padding(length: int) -> tuple[int, ...]:
    return BATCH, length


# What an argument is drawn as; "memory" is what keys and values come from, two tokens longer.
DRAWS: Mapping[str, Draw] = {
    "tokens": _of_shape(lambda n: (BATCH, n, WIDTH)),
    "memory": _of_shape(lambda n: (BATCH, n + 2, WIDTH)),
    "wide": _of_shape(lambda n: (BATCH, n, 24)),
    "tokens_first": _of_shape(lambda n: (n, BATCH, WIDTH)),
    "memory_first": _of_shape(lambda n: (n + 2, BATCH, WIDTH)),
    "features_first": _of_shape(lambda n: (BATCH, WIDTH, n)),
    "image": _of_shape(lambda n: (BATCH, WIDTH, n, n + 1)),
    "heads": _of_shape(lambda n: (BATCH, n, 6, 4)),
    "memory_heads": _of_shape(lambda n: (BATCH, n + 2, 2, 4)),
    "scores": _of_shape(lambda n: (BATCH, 1, n, n)),
    "seen": _seen(_of_memory),
    "seen_by_heads": _seen(lambda n: (BATCH, 1, n, n + 2)),
    "hidden": _made_of(_seen(_of_memory), torch.logical_not),
    "hidden_by_all": _made_of(_seen(lambda n: (n, n + 2)), torch.logical_not),
    "seen_tokens": _seen(_padding),
    "hidden_tokens": _made_of(_seen(_padding), torch.logical_not),
    "hidden_by_itself": _made_of(_seen(lambda n: (n, n)), torch.logical_not),
    "hidden_memory": _made_of(_seen(lambda n: (BATCH, n + 2)), torch.logical_not),
    "added": _made_of(_seen(lambda n: (BATCH, 1, n, n)), _additive),
    "lengths": lambda generator, n: torch.randint(1, n + 3, (BATCH,), generator=generator),
    "growth": lambda generator, n: 1 + torch.rand(n, 1, generator=generator),
    "words": lambda generator, n: torch.randint(4, 31, (BATCH, n), generator=generator),
    "more_words": lambda generator, n: torch.randint(4, 31, (BATCH, n + 2), generator=generator),
    "picture": _of_shape(lambda _: (BATCH, 3, 8, 8)),
    "zero": lambda *_: 0,
    "angles": lambda _, n: _angles(n),
    "places": lambda _, n: torch.arange(n).flip(0),
    "kept": lambda generator, _: {name: _normal(BATCH, HEADS, 3, WIDTH // HEADS, generator=generator) for name in "kv"},
    "vector": _of_shape(lambda _: (WIDTH,)),
    "matrix": _of_shape(lambda _: (WIDTH, WIDTH)),
    "ids": lambda generator, n: torch.randint(0, 4, (BATCH, n), generator=generator),
    "length": lambda _, n: n,
    "longer": lambda _, n: n + 2,
    "two": lambda *_: 2,
    "cpu": lambda *_: "cpu",
    "table": lambda generator, n: torch.rand(n, 4, generator=generator, dtype=torch.float64),
}


class Calls(nn.Module):
    """A function, as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, **given: Any) -> Any:
        """Call it."""
        return self.function(**given)


@dataclass(frozen=True)
class Right:
    """A right attention, or another part.

    Args:
        room: Where it comes from: "zoo", "styles", "public", "fixed", "parts", "masks".
        name: What to call it.
        text: Source that stands alone.
        target: The class or function in it.
        arguments: Of its constructor.
        calls: For each call the arguments, each with a name of ``DRAWS``; every form of mask has a call of its own.
        sizes: How its constructor writes each size, for edits that add a parameter.
        lengths: Numbers of tokens that it is called with.
        package: Where its relative imports start.
    """

    room: str
    name: str
    text: str
    target: str
    arguments: Mapping[str, Any]
    calls: tuple[Mapping[str, str], ...]
    sizes: Mapping[int, str] = field(default_factory=dict)
    lengths: tuple[int, ...] = LENGTHS
    package: str = ""

    def built(self, module: ModuleType) -> nn.Module:
        """Build the class of this name in a module, in float64 and in eval; a function is called as it is."""
        torch.manual_seed(0)
        found = getattr(module, self.target)
        made: nn.Module = found(**self.arguments) if isinstance(found, type) else Calls(found)
        return made.double().eval()

    def imported(self, text: str, folder: Path, name: str = "attention") -> tuple[Path, ModuleType]:
        """Import a version of it."""
        return imported(text, folder, name, self.package)

    def asked(self, path: Path, module: nn.Module) -> tuple[Any, Any]:
        """Say what the checker is asked about, and with which inputs."""
        return f"{path}:{self.target}", None

    def run(self, module: nn.Module, given: Any) -> Any:
        """Call it with what was drawn."""
        return module(**given)

    def drawn(self, seed: int, length: int) -> list[Any]:
        """Draw the arguments of each call."""
        generator = torch.Generator().manual_seed(seed)
        return [{name: DRAWS[kind](generator, length) for name, kind in call.items()} for call in self.calls]


def noisy(value: Any, generator: torch.Generator) -> Any:
    """Add noise to the numbers of a tensor, unless they are a mask; give back anything else as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() < 2:
        return value
    if not bool((value.abs() < LARGEST).all()) or len(value.unique()) < 0.5 * value.numel():
        return value
    return value + 0.3 * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)


def call_of(text: str) -> dict[str, str]:
    """Read a call: "x:tokens mask:seen".

    >>> call_of("x:tokens mask:seen")
    {'x': 'tokens', 'mask': 'seen'}
    """
    return dict(one.split(":") for one in text.split())


def sizes_of(arguments: Mapping[str, Any], text: str) -> dict[int, str]:
    """Say how a constructor writes the sizes.

    >>> sizes_of({"dim": 12, "heads": 3}, "")
    {12: 'dim', 36: '3 * dim', 3: 'heads', 4: 'dim // heads'}
    """
    named = {value: name for name, value in arguments.items() if type(value) is int}
    for owner, value in arguments.items():
        if isinstance(value, SimpleNamespace):
            named |= {number: f"{owner}.{name}" for name, number in vars(value).items() if type(number) is int}
    if not arguments and "WIDTH" in text:
        named = {WIDTH: "WIDTH", HEADS: "HEADS"}
    found: dict[int, str] = {}
    if WIDTH in named:
        found |= {WIDTH: named[WIDTH], 3 * WIDTH: f"3 * {named[WIDTH]}"}
    if HEADS in named:
        found[HEADS] = named[HEADS]
    if WIDTH in named and HEADS in named:
        found[WIDTH // HEADS] = f"{named[WIDTH]} // {named[HEADS]}"
    return found


def text_of(source: str, name: str) -> str:
    r"""Cut a class out of a file, with all that it needs from there.

    >>> text_of("import math\nimport torch\nN = 3\nclass A: pass\nclass B(A): n = math.sqrt(N)\nclass C: pass\n", "B")
    'import math\nN = 3\n\n\nclass A: pass\n\n\nclass B(A): n = math.sqrt(N)\n'
    """
    statements = _statements_of(source)
    definitions = {one: node for node in statements for one in _defined(node)}
    needed, waiting = set[str](), [name]
    while waiting:
        found = waiting.pop()
        if found in definitions and found not in needed:
            needed.add(found)
            waiting += [node.id for node in ast.walk(definitions[found]) if isinstance(node, ast.Name)]
    parts = []
    for node in statements:
        kept = [one for one in _defined(node) if one in needed]
        if kept:
            parts.append(_written(source, node, kept))
    return "".join(parts)


@functools.lru_cache(maxsize=8)
def _statements_of(source: str) -> list[ast.stmt]:
    return ast.parse(source).body


def complete(text: str) -> str:
    """Add the imports that edits need, where they are missing."""
    return "".join(f"{line}\n" for line in IMPORTS if line not in text.splitlines()) + text


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [found.id for target in targets for found in ast.walk(target) if isinstance(found, ast.Name)]


def _written(source: str, node: ast.stmt, kept: list[str]) -> str:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias for alias in node.names if (alias.asname or alias.name).partition(".")[0] in kept]
        found = ast.Import(names) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, names, node.level)
        return ast.unparse(found) + "\n"
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(one.lineno for one in decorators)])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    return ("\n\n" if isinstance(node, ast.ClassDef | ast.FunctionDef) else "") + "\n".join(lines) + "\n"


def imported(text: str, folder: Path, name: str, package: str = "") -> tuple[Path, ModuleType]:
    """Write text into a file and import it, as a user's file is."""
    number = next(_numbers)
    path = folder / f"{name}_{number}.py"
    path.write_text(text, encoding="utf-8")
    full = f"{package}.wrong_{name}_{number}".lstrip(".")
    spec = importlib.util.spec_from_file_location(full, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return path, module
