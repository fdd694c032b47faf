"""The code of a notebook: its cells, and a module in which their imports and definitions were run."""

import ast
import contextlib
import json
import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType

from equivalence_tests.checker.reach.errors import CannotCheckError

# Magics of a whole cell that run it as Python.
RUNS_PYTHON = ("%%time", "%%capture", "%%prun")
# What only defines something: run by default, while everything else waits for --run-all.
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
PLAIN = (ast.Constant, ast.Name, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)


def cells_of(path: Path) -> list[str]:
    """Give the code cells of a notebook; CannotCheckError if the file is none."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CannotCheckError(f"{path} is not a notebook: {type(error).__name__}: {error}") from error


def without_magics(cell: str) -> str:
    r"""Put ``pass`` in the place of lines that only IPython understands: %matplotlib, !pip, ?help, files = !ls.

    >>> without_magics("%%time\nimport torch")
    'pass\nimport torch'
    >>> without_magics("assert dim % heads == 0 != 1\nfiles = !ls\ndim?")
    'assert dim % heads == 0 != 1\npass\npass'
    """
    if cell.startswith("%%") and not cell.startswith(RUNS_PYTHON):
        return ""
    magic = re.compile(r"^(\s*)([%!?]|[\w, ]+=\s*[%!]|.*\?$).*")
    return "\n".join(magic.sub(r"\1pass", line) for line in cell.splitlines())


def import_notebook(path: Path, run_all: bool) -> ModuleType:
    """Run the imports and definitions of a notebook's cells, or all of them, in a module of their own."""
    module = ModuleType(f"_checked_{path.stem}")
    sys.modules[module.__name__] = module
    for number, cell in enumerate(cells_of(path), start=1):
        name = f"{path.name}[code cell {number}]"
        code = without_magics(cell)
        # So that tracebacks, inspect and reports can quote the cell.
        linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
        for compiled, may_be_skipped in _statements(code, name, run_all):
            with contextlib.suppress(NameError) if may_be_skipped else contextlib.nullcontext():
                exec(compiled, vars(module))
    return module


def _statements(code: str, name: str, run_all: bool) -> Iterator[tuple[CodeType, bool]]:
    """Give what is to be run, and whether it may fail for lack of what was not run."""
    try:
        body = ast.parse(code).body
    except SyntaxError as error:
        raise CannotCheckError(f"{name} is not Python: {error.msg}, line {error.lineno}") from error
    for node in body:
        if run_all or isinstance(node, DEFINITIONS) or is_constant(node):
            yield compile(ast.Module([node], []), name, "exec"), not run_all and not isinstance(node, DEFINITIONS)


def is_constant(node: ast.stmt) -> bool:
    """Whether a statement gives a plain value a name: ``d_model = 2 * 64``."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    return all(isinstance(item, (*PLAIN, ast.Tuple, ast.List, ast.Dict)) for item in ast.walk(node.value))
