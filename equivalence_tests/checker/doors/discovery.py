"""Find what can be checked in a file, a folder, a package or a notebook, by reading the code and running none of it."""

import ast
import contextlib
import importlib.util
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from equivalence_tests.checker.parts.names import OTHER_NORMS, kind_of_name
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.notebooks import cells_of, without_magics
from equivalence_tests.checker.reporting.findings import PARTS

READ = (".py", ".ipynb")
PASSED_BY = {"build", "dist", "node_modules", "site-packages", "__pycache__", "venv", "env"}
ATTENTION = re.compile(r"attention|attn|mha\b|mhsa\b", re.IGNORECASE)
LAYER = re.compile(r"(encoder|decoder|transformer)\w*(layer|block)?$|(^|[a-z_])block$", re.IGNORECASE)
MASK_BUILDER = re.compile(r"(^|_)masks?($|_)", re.IGNORECASE)
NO_BUILDER = re.compile(r"^(apply|check|plot|draw|show|test|print|load|save|use)_|^_", re.IGNORECASE)
# What an attention calls: the weights are made by one of these.
WEIGHING = {"softmax", "Softmax", "scaled_dot_product_attention", "MultiheadAttention", "multi_head_attention_forward"}
TORCHS_LAYER = re.compile(r"Transformer((En|De)coder(Layer)?)?")
QUERIES = re.compile(r"q|x|queries|query\w*|q_\w+|hidden\w*")
MAKES_MASKS = {"tril", "triu", "masked_fill", "arange", "ones", "ne", "eq", "full"}
Definition = ast.ClassDef | ast.FunctionDef
NO_MODULES = {"Exception", "Enum", "NamedTuple", "Protocol", "TestCase", "Dataset", "object"}


@dataclass(frozen=True)
class Candidate:
    """One thing that may be checked."""

    path: Path
    name: str  # the class or function in it
    line: int
    kind: str  # "attention", "layers", "mask_builder" or a part, as far as the source text shows

    @property
    def target(self) -> str:
        """The name by which ``verify`` takes it."""
        return f"{self.path}:{self.name}"

    @property
    def asked_kind(self) -> str | None:
        """As what it is checked; None where it may hold an attention: of that the object says more than the text."""
        return None if self.kind in ("attention", "layers") else self.kind


class NothingToCheckError(CannotCheckError):
    """Nothing in the files looks like an attention, a layer, another part or a mask builder."""


def names_one_thing(target: str) -> bool:
    """Whether a target names one class or function: "file.py:Name" or "module.path:Name".

    >>> names_one_thing("model.py:Attention"), names_one_thing("model.py"), names_one_thing("src")
    (True, False, False)
    """
    place, colon, name = target.rpartition(":")
    return bool(colon and place and re.fullmatch(r"[\w.]+", name)) and not Path(target).exists()


def candidates(target: str) -> tuple[list[Candidate], dict[str, str]]:
    """List what a file, a folder, a package or a notebook defines that can be checked, and why others are unread."""
    files, read, unread = list(_files(target)), dict[Path, list[Definition]](), dict[str, str]()
    for file in files:
        try:
            read[file] = [node for node in _statements(file) if isinstance(node, Definition)]
        except CannotCheckError as error:
            unread[str(file)] = str(error)
    kinds = _kinds([node for nodes in read.values() for node in nodes])
    found = [
        Candidate(file, node.name, node.lineno, kinds[node])
        for file, nodes in read.items()
        for node in nodes
        if node in kinds
    ]
    if not found and not unread:
        if not files:
            raise CannotCheckError(f"there is no Python file and no notebook in {target}")
        raise NothingToCheckError(
            f"{target}: looked at {len(files)} file{'s' * (len(files) != 1)} and found no attention, layer or mask "
            "builder. Name one thing to check it all the same: file.py:Name"
        )
    return found, unread


def _files(target: str) -> Iterator[Path]:
    path = Path(target)
    if path.is_file():
        if path.suffix not in READ:
            raise CannotCheckError(f"{target} is neither a Python file (.py) nor a notebook (.ipynb)")
        yield path
    elif path.is_dir():
        yield from sorted(file for suffix in READ for file in path.rglob(f"*{suffix}") if _is_read(file, path))
    else:
        yield from _package_files(target)


def _is_read(file: Path, root: Path) -> bool:
    parts = file.relative_to(root).parts
    return not any(part in PASSED_BY or part.startswith(".") for part in parts) and not file.name.startswith("test_")


def _package_files(name: str) -> Iterator[Path]:
    if Path(name).suffix in READ or len(Path(name).parts) > 1:
        raise CannotCheckError(f"there is no file or folder {name} in {Path.cwd()}")
    if not re.fullmatch(r"\w+(\.\w+)*", name):
        raise CannotCheckError(f"there is no file, folder or package {name}")
    top, *inner = name.split(".")
    spec = importlib.util.find_spec(top)  # what is inside is looked for as files: nothing is imported
    places = [Path(place, *inner) for place in spec.submodule_search_locations or ()] if spec else []
    places += [Path(spec.origin)] if spec and spec.origin and not places else []
    for place in [Path(top, *inner), *places]:
        for found in (place, place.with_suffix(".py")):
            if found.exists():
                yield from _files(str(found))
                return
    raise CannotCheckError(f"there is no file, folder or package {name}")


def _kinds(nodes: Sequence[Definition]) -> dict[Definition, str]:
    """Say what definitions are by their names; what holds an attention or a layer of any file is a layer."""
    named = {node: _class_kind(node) if isinstance(node, ast.ClassDef) else _function_kind(node) for node in nodes}
    kinds = {node: kind for node, kind in named.items() if kind}
    for _ in nodes:
        parts = {node.name for node, kind in kinds.items() if kind in ("attention", "layers")}
        holders = [node for node in nodes if node not in kinds and _holds(node, parts)]
        if not holders:
            break
        kinds |= dict.fromkeys(holders, "layers")
    known = {node.name: kind for node, kind in kinds.items()}
    classes = (node for node in nodes if isinstance(node, ast.ClassDef))
    inherited = ((node, known[name]) for node in classes for name in _bases(node) if name in known)
    return dict(inherited) | kinds


def _bases(node: ast.ClassDef) -> list[str]:
    return [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases]


def _statements(path: Path) -> Iterator[ast.stmt]:
    if path.suffix == ".ipynb":
        for cell in cells_of(path):
            with contextlib.suppress(SyntaxError):  # which is reported when the notebook is run
                yield from ast.parse(without_magics(cell)).body
        return
    try:
        yield from ast.parse(path.read_bytes()).body
    except SyntaxError as error:
        raise CannotCheckError(f"{path} is not Python: {error.msg}, line {error.lineno}") from error
    except (OSError, ValueError) as error:
        raise CannotCheckError(f"{path} cannot be read: {error}") from error


def _holds(node: Definition, parts: Collection[str]) -> bool:
    """Whether a class builds attentions or layers, torch's or some of these, and calls them."""
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    held = (word for word in _words(node) if word in parts or TORCHS_LAYER.fullmatch(word))
    return {"__init__", "forward"} <= methods and any(held)


def _class_kind(node: ast.ClassDef) -> str:
    """Tell what a class is; "" if it is nothing that can be checked."""
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    bases, used = set(_bases(node)), _words(node)
    if not bases - NO_MODULES:  # a class of NumPy, written by hand
        by_hand = "forward" in methods and ATTENTION.search(node.name) and (used & WEIGHING or "exp" in used)
        return "attention" if by_hand and not bases else ""
    if not methods & {"forward", "__call__", "__init__"}:
        return ""
    is_stack = LAYER.search(node.name) and not ATTENTION.search(node.name)
    if "forward" in methods and used & WEIGHING and not is_stack:
        return "attention"
    if ATTENTION.search(node.name) and ("forward" in methods or any(map(ATTENTION.search, bases))):
        return "attention"
    inside = bool(used & WEIGHING) and "forward" in methods
    if LAYER.search(node.name) and (inside or any(map(ATTENTION.search, used))):
        return "layers"
    part = kind_of_name(node.name) if "forward" in methods and not OTHER_NORMS.search(node.name) else ""
    return part if part in PARTS else ""


def _function_kind(node: ast.FunctionDef) -> str:
    """Tell what a function is; "" if it is nothing that can be checked."""
    used, arguments = _words(node), [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
    weighs = used & (WEIGHING - {"MultiheadAttention"}) or used >= {"exp", "sum"}
    if len(arguments) >= 2 and weighs and any(map(QUERIES.fullmatch, arguments)):
        return "attention"
    builds = MASK_BUILDER.search(node.name) and not NO_BUILDER.search(node.name) and used & MAKES_MASKS
    return "mask_builder" if builds and arguments else ""


def _words(node: ast.AST) -> set[str]:
    """Collect the names and attributes that a definition uses."""
    inside = list(ast.walk(node))
    names = {item.id for item in inside if isinstance(item, ast.Name)}
    return names | {item.attr for item in inside if isinstance(item, ast.Attribute)}
