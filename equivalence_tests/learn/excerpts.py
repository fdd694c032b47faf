"""Quote code by what it says: text and line numbers are read off the source at the moment of asking, never typed."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

__all__ = ["Excerpt", "Place", "as_typed", "body_of", "imports_of"]

SEED = "torch.manual_seed(0)"


@dataclass(frozen=True)
class Excerpt:
    """A few lines of source as they stand now."""

    file: str
    line: int
    owner: str
    code: str

    @property
    def data(self) -> dict[str, Any]:
        """All that it is, for JSON."""
        return {"file": self.file, "line": self.line, "function": self.owner, "code": self.code}

    @property
    def where(self) -> str:
        """The file, the first line and the function: ``scratch/masks.py:77, causal``."""
        return f"{self.file}:{self.line}, {self.owner}"


@dataclass(frozen=True)
class Place:
    """The innermost statement of a function that contains a text, with the comment above it.

    Args:
        function: Where to look.
        text: A piece of the statement, as it is written. It has to point at one statement only.
    """

    function: Callable[..., Any]
    text: str

    def excerpt(self) -> Excerpt:
        """Find the statement.

        Returns:
            Its lines, without the indentation.

        Raises:
            LookupError: If no statement contains the text, or several do.

        >>> from scratch import masks
        >>> found = Place(masks.causal, "offset =").excerpt()
        >>> found.owner, found.code
        ('causal', 'offset = key_len - query_len if align == "lower_right" else 0')
        """
        lines, first = inspect.getsourcelines(self.function)
        hits = [span for span in _statement_spans(lines) if self.text in "".join(lines[span.start : span.stop])]
        innermost = [span for span in hits if not any(_inside(other, span) for other in hits)]
        if len(innermost) != 1:
            raise LookupError(
                f"{self.function.__module__}.{self.function.__qualname__} has {len(innermost)} statements with "
                f"{self.text!r}, and should have one: point at the code as it is written now"
            )
        start, stop = innermost[0].start, innermost[0].stop
        while lines[start - 1].lstrip().startswith("#"):
            start -= 1
        code = textwrap.dedent("".join(lines[start:stop])).rstrip()
        file = self.function.__module__.replace(".", "/") + ".py"
        return Excerpt(file, first + start, self.function.__qualname__, code)


def _statement_spans(lines: list[str]) -> Iterator[range]:
    """Give the lines of each statement, counted from 0, without docstrings and definitions."""
    for node in ast.walk(ast.parse(textwrap.dedent("".join(lines)))):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not is_text and not isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield range(node.lineno - 1, node.end_lineno or node.lineno)


def _inside(inner: range, outer: range) -> bool:
    return inner != outer and outer.start <= inner.start and inner.stop <= outer.stop


def body_of(function: Callable[..., Any]) -> str:
    """Give the code of a function as one would type it: without its head, its docstring and a ``return`` at the end.

    Args:
        function: Any function written in Python.

    Returns:
        Its body, without the indentation.

    >>> print(body_of(body_of))
    lines, _ = inspect.getsourcelines(function)
    ...
    """
    lines, _ = inspect.getsourcelines(function)
    definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
    assert isinstance(definition, ast.FunctionDef)  # as promised
    body = definition.body if ast.get_docstring(definition) is None else definition.body[1:]
    body = body[:-1] if isinstance(body[-1], ast.Return) else body
    return textwrap.dedent("".join(lines[body[0].lineno - 1 : body[-1].end_lineno])).rstrip()


def imports_of(function: Callable[..., Any]) -> list[str]:
    """Give the imports of its module that the body of a function needs.

    Args:
        function: Any function written in Python.

    Returns:
        One line for each, in the module's order.

    >>> imports_of(body_of)
    ['import ast', 'import inspect', 'import textwrap']
    """
    nodes = list(ast.walk(ast.parse(body_of(function))))
    own = {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = {node.id for node in nodes if isinstance(node, ast.Name)} - own
    module = inspect.getmodule(function)
    assert isinstance(module, ModuleType)  # as promised
    needed = []
    for node in _imports_in(module):
        names = [alias for alias in node.names if (alias.asname or alias.name) in used]
        if isinstance(node, ast.Import) and names:
            needed.append(ast.unparse(ast.Import(names)))
        elif isinstance(node, ast.ImportFrom) and names:
            needed.append(ast.unparse(ast.ImportFrom(node.module, names, node.level)))
    return needed


@functools.cache
def _imports_in(module: ModuleType) -> list[ast.Import | ast.ImportFrom]:
    return [x for x in ast.parse(inspect.getsource(module)).body if isinstance(x, ast.Import | ast.ImportFrom)]


def as_typed(function: Callable[..., Any], known: Collection[str] = ()) -> str:
    """Give the code of a function as one would type it in a session: imports, seed, body.

    Args:
        function: Any function written in Python.
        known: Lines of the session so far. Imports among them are not repeated.

    Returns:
        Lines of Python that run by themselves, or after what is known.

    >>> print(as_typed(body_of))
    import torch
    import ast
    import inspect
    import textwrap
    <BLANKLINE>
    torch.manual_seed(0)
    lines, _ = inspect.getsourcelines(function)
    ...
    """
    needed = imports_of(function)
    needed = needed if "import torch" in needed else ["import torch", *needed]  # for the seed
    new = [line for line in needed if line not in known]
    return "\n".join([*new, *([""] if new else []), SEED, body_of(function)])
