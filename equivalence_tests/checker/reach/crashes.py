"""Tell the exceptions that the user's own code raises whatever it is given from those of calls that do not fit it."""

import ast
import difflib
import linecache
import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from types import ModuleType, TracebackType

import numpy as np
import torch
from torch import nn

from equivalence_tests.checker.reach.absent import ABSENCES, NotInstalled
from equivalence_tests.checker.reach.arguments import role_of_parameter
from equivalence_tests.checker.reach.devices import begin_anew_on_cpu
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.misfits import Fault, Place, function_of, misfit
from equivalence_tests.checker.reach.syntax import assigned_in, function_at, nodes_in, spans
from equivalence_tests.checker.reporting.lines import CodeLine, code_lines, frames_of, is_users, source_of

# What Python says where a local variable is read too early.
UNBOUND = re.compile(r"local variable '(\w+)'")
# What may give something a name that the text does not show.
DYNAMIC = re.compile(
    r"__dict__|__getattr|__setattr__|\b((set|del)attr|vars|locals|globals|exec)\(|"
    r"\b(register_(buffer|parameter|module)|add_module)\((?!\s*(name=)?[\"'])"
)
# What Python says of a file that lacks a name; of two that import each other it says more.
NOT_IN_FILE = re.compile(r"^cannot import name '(\w+)' from '[\w.]+' \([^()]+\)$")
ALREADY_HELD = re.compile(r"attribute '(\w+)' already exists")
BEFORE_SUPER = re.compile(r"cannot assign \w+ before Module\.__init__\(\) call")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# NotImplementedError is a RuntimeError.
OF_CODE = (KeyError, NameError, AttributeError, TypeError, ImportError, RuntimeError)
# What a parser says of brackets, quotes and signs, and what some versions of Python read and others do not.
BRACKETS = re.compile(r"unmatched|was never closed|does not match opening|unterminated")
SIGNS = re.compile(r"invalid (non-printable )?character")
IN_STRING = re.compile(r"\bf-?string|\b[rR]?[ft][\"']")
ALIKE, NEARLY = 0.75, 0.85  # of the letters of two names


@dataclass(frozen=True)
class Crash:
    """An exception of the user's code of which no argument is the cause."""

    said: str  # its type and words
    why: str  # why no other call would do
    fix: str  # what to change
    stack: tuple[CodeLine, ...]  # the lines that led there, the one that raised it last
    importing: bool  # whether it came up while the file was imported
    may_run: bool = False  # whether a call of another shape may not raise it


class Crashes:
    """Keeps such exceptions, as code is imported, built and called."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, for another check."""
        self._met: dict[tuple[str, int, str], Crash | None] = {}

    def note(self, error: BaseException) -> None:
        """Note an exception that the code raised, if it is one of those."""
        begin_anew_on_cpu(error)
        if isinstance(error, SyntaxError) and error.filename and _is_readable(error.filename):
            self._met[error.filename, error.lineno or 0, str(error)] = _unparsed(error, error.filename)
        last = _last_of_user(error) if isinstance(error, OF_CODE) else None
        if last is None or ABSENCES.used or _stands_in(error):  # what stands in for a package lacks what that has
            return
        key = last.tb_frame.f_code.co_filename, last.tb_lineno, str(error)
        if key not in self._met:
            fault = _fault(error, last) if _is_readable(key[0]) else None
            self._met[key] = None if fault is None else _crash(error, fault)

    def note_default(self, error: BaseException, name: str, own: object, other: object) -> None:
        """Note an exception that a class's own default leads to, and that does not come up with another one."""
        frames = [step for step in walk_tb(error.__traceback__) if is_users(step[0].f_code.co_filename)]
        for frame, line in [step for step in frames if step[0].f_locals.get(name) is own][-1:]:
            why = f"it comes of the class's own default, {name}={own!r}; with {name}={other!r} the class can be built"
            fix = f"Make {name} a whole number here." if isinstance(own, float) else f"Is {name}={other!r} meant?"
            place = frame.f_code.co_filename, line
            self._met[*place, str(error)] = _crash(error, Fault(why, fix, place))

    @property
    def found(self) -> list[Crash]:
        """List them, one for each line and text."""
        return [crash for crash in self._met.values() if crash is not None]

    @property
    def in_calls(self) -> list[Crash]:
        """List those that calls and constructors raised, and that no other call avoids."""
        return [crash for crash in self.found if not (crash.importing or crash.may_run)]

    def met_in(self, errors: Iterable[str]) -> bool:
        """Whether one of these calls ended at a line that raises whatever it is given; others hardly avoid it."""
        crashes = tuple(one.said for one in self.in_calls)
        return bool(crashes) and any(text.startswith(crashes) for text in errors)


CRASHES = Crashes()


def _unparsed(error: SyntaxError, path: str) -> Crash | None:
    """Say where a bracket or string is open, or a sign is none of Python's; a later version may read its f-strings."""
    why, stack = "no version of Python reads it", code_lines(((path, error.lineno or 0, ""),))
    if SIGNS.search(error.msg):
        return Crash(said(error), why, "Remove this character.", stack, importing=True)
    is_open = BRACKETS.search(error.msg) and not IN_STRING.search(f"{error.msg}{error.text}")
    fix = "Close what is open, or remove what closes nothing."
    return Crash(said(error), why, fix, stack, importing=True) if is_open else None


def _last_of_user(error: BaseException) -> TracebackType | None:
    """Where the user's own code was last when it raised; None where it did not run."""
    last, step = None, error.__traceback__
    while step is not None:
        last, step = step if is_users(step.tb_frame.f_code.co_filename) else last, step.tb_next
    return last


def _stands_in(error: BaseException) -> bool:
    """Whether torch's functions raised it in the place of numpy's."""
    owner = getattr(error, "obj", None)
    names = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    names += [getattr(owner, "__name__", ""), type(owner).__module__]
    return any(str(name).startswith("torch._numpy") for name in names)


def _is_readable(path: str) -> bool:
    """Whether a file shows all that is to know: no library, and no cell of a notebook."""
    return path.endswith(".py") and is_users(path) and Path(path).is_file()


def _crash(error: BaseException, fault: Fault) -> Crash:
    """Put the line to change last; where that is another one than raised, the words say which did."""
    stack, place, text = code_lines(frames_of(error)), fault.place, said(error)
    if place is not None and place[1] not in (0, stack[-1].number):
        text, stack = f"{text} ({stack[-1]})", code_lines(((*place, ""),))
    return Crash(text, fault.why, fault.fix, stack, ABSENCES.importing, fault.may_run)


def _fault(error: BaseException, last: TracebackType) -> Fault | None:
    """Say why no other call would do, and what to change; None where one might."""
    path, name = last.tb_frame.f_code.co_filename, str(getattr(error, "name", None))
    match error:
        case UnboundLocalError():
            local = UNBOUND.search(str(error))
            function = function_of(last)
            if local and function and not _gives_before(local[1], last, ast.walk(function)):
                return Fault(f"{local[1]} is set only below this line", "Set it before it is read.")
        case KeyError() if (held := ALREADY_HELD.search(str(error))) and _sets_before(held[1], last):
            return Fault(f"a line above sets self.{held[1]}", "Only register it.")
        case NameError() if not _may_be_defined(name, last):
            where = "that this line sees " if any(_gives(node, name) for node in nodes_in(path)) else ""
            kept = any(_gives(node, name) for node in nodes_in(path) if isinstance(node, ast.Attribute))
            fix = f"Is self.{name} meant?" if kept else f"Import or define {name}."
            return Fault(f"no line of {Path(path).name} {where}defines or imports {name}", fix)
        case ImportError(path=itself) if itself == path and name == last.tb_frame.f_globals.get("__name__"):
            return Fault(f"{Path(path).name} imports itself", "Remove this import.")
        case ImportError(path=str(other)) if _is_readable(other) and (wanted := NOT_IN_FILE.search(str(error))):
            return _not_in_file(other, wanted[1])
        case AttributeError():
            return _lacking(error, name, last) or misfit(str(error), last)
        case TypeError():
            return misfit(str(error), last)
        case NotImplementedError() if outside := _forward_outside(error):
            why = "its class has none: this one is outside it"
            return Fault(why, "Indent it as the class's methods are.", outside)
        case RuntimeError() if str(error).startswith("Boolean value of Tensor") and _is_tested_mask(last):
            return Fault("a mask is a tensor, which is neither True nor False", "Test whether it is not None.")
        case RuntimeError():
            return misfit(str(error), last)
    return None


def _lacking(error: AttributeError, name: str, last: TracebackType) -> Fault | None:
    """Say why an object has no attribute of this name, whatever the arguments are."""
    match error:
        case AttributeError(obj=ModuleType() as module):
            return _not_in_module(module, name)
        case AttributeError(obj=torch.Tensor()) if not any(hasattr(one, name) for one in (np.ndarray, str, list, dict)):
            near = difflib.get_close_matches(name, dir(torch.Tensor), n=1, cutoff=NEARLY)  # it may hold a tensor
            return Fault(f"a tensor has no {name}", f"Is {near[0]} meant?") if near else None
        case AttributeError() if BEFORE_SUPER.search(str(error)):
            return Fault("nn.Module's own __init__ has not run", "Call super().__init__() before this line.")
        case AttributeError(obj=nn.Module() as owner) if last.tb_frame.f_locals.get("self") is owner:
            return _not_in_self(owner, name, last)
    return None


def _not_in_self(owner: nn.Module, name: str, last: TracebackType) -> Fault | None:
    """Say that nothing sets an attribute, or only a method that is to be called __init__."""
    misnamed = _misnamed_constructor(owner)
    if misnamed is not None and any(_gives(node, name) for node in ast.walk(misnamed)):
        why, place = f"nothing calls {misnamed.name}, which sets self.{name}", last.tb_frame.f_code.co_filename
        return Fault(why, f"Call it __init__, not {misnamed.name}.", (place, misnamed.lineno))
    if _may_have(owner, name, last):
        return None
    near = difflib.get_close_matches(name, dir(owner), n=1, cutoff=ALIKE)
    fix = f"Is self.{near[0]} meant?" if near else "Set it in __init__."
    return Fault(f"no line that runs before this one sets self.{name}", fix)


def _misnamed_constructor(owner: nn.Module) -> ast.FunctionDef | None:
    """Find a method with two underscores at both ends that Python never calls, in a class without a constructor."""
    methods = [x for x in vars(type(owner)) if x == "__init__" or (x.startswith("__") and x.endswith("__"))]
    found = difflib.get_close_matches("__init__", methods, n=1, cutoff=ALIKE)
    code = getattr(vars(type(owner)).get(found[0]), "__code__", None) if found and found[0] != "__init__" else None
    return function_at(code.co_filename, code.co_name, code.co_firstlineno) if code is not None else None


def _forward_outside(error: BaseException) -> Place | None:
    """Find the forward that is written outside its class, where a module has none."""
    owner = type([frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)][-1])
    file = str(getattr(sys.modules.get(owner.__module__), "__file__", ""))
    if not _is_readable(file) or getattr(owner, "forward", None) is not nn.Module.forward:
        return None
    inside = {x for one in nodes_in(file) if isinstance(one, ast.ClassDef) for x in one.body}
    written = (x for x in nodes_in(file) if isinstance(x, ast.FunctionDef) and x.name == "forward" and x not in inside)
    return next(((file, x.lineno) for x in written if x.args.args[:1] and x.args.args[0].arg == "self"), None)


def _is_tested_mask(last: TracebackType) -> bool:
    """Whether an if asks for an argument that is named as a mask, and computes with it where it holds."""
    nodes = ast.walk(function_of(last) or ast.Module([], []))
    tested = [x for x in nodes if isinstance(x, ast.If) and x.lineno == last.tb_lineno and isinstance(x.test, ast.Name)]
    if not tested or role_of_parameter(name := getattr(tested[0].test, "id", "")) != "mask":
        return False
    inside = [
        x for one in tested[0].body for x in ast.walk(one) if isinstance(x, ast.BinOp | ast.Compare | ast.UnaryOp)
    ]
    return any(getattr(x, "id", "") == name for node in inside for x in ast.iter_child_nodes(node))


def _sets_before(name: str, last: TracebackType) -> bool:
    """Whether a line that runs whenever this one does has set an attribute of self."""
    around = [x for x in ast.walk(function_of(last) or ast.Module([], [])) if hasattr(x, "body")]
    blocks = (x.body for x in around if isinstance(x.body, list) and any(spans(y, last.tb_lineno) for y in x.body))
    above = [x for block in blocks for x in block if (x.end_lineno or 0) < last.tb_lineno]
    targets = (own for x in above for own, _ in assigned_in(x))
    return any(ast.unparse(own) == f"self.{name}" for own in targets)


def _may_be_defined(name: str, last: TracebackType) -> bool:
    """Whether a file gives something this name, or may do so unseen."""
    path, nodes = last.tb_frame.f_code.co_filename, nodes_in(last.tb_frame.f_code.co_filename)
    others = [x for x in nodes if isinstance(x, FUNCTIONS) and not x.lineno <= last.tb_lineno <= (x.end_lineno or 0)]
    elsewhere = {inside for one in others for inside in ast.walk(one) if inside is not one}
    is_global = any(isinstance(x, ast.Global) and name in x.names for x in nodes)
    is_dynamic = bool(DYNAMIC.search("".join(linecache.getlines(path))))
    seen = [x for x in nodes if x not in elsewhere and not isinstance(x, ast.Attribute)]
    return is_dynamic or is_global or _gives_before(name, last, seen)


def _not_in_file(path: str, name: str) -> Fault | None:
    """Say that a file of the user's has nothing of the name that another takes from it."""
    stars = [x for x in nodes_in(path) if isinstance(x, ast.alias) and x.name == "*"]  # which may give it elsewhere
    is_dynamic = bool(DYNAMIC.search("".join(linecache.getlines(path))))
    if stars or is_dynamic or any(_gives(node, name) for node in nodes_in(path)):
        return None
    beside = (x for x in (*Path(path).parent.glob("*.py"), *Path(path).parent.parent.glob("*/*.py")))
    homes = (x for x in beside if re.search(rf"^(def|class) {name}\b", x.read_text(errors="replace"), re.MULTILINE))
    fix = next((f"Import it from {one.name}, which defines it." for one in homes), f"Define {name} there.")
    return Fault(f"no line of {Path(path).name} defines or imports {name}", fix)


def _not_in_module(module: ModuleType, name: str) -> Fault | None:
    """Say that torch, numpy or Python's own library has no such thing, but something of nearly the same name."""
    root = module.__name__.partition(".")[0]
    near = difflib.get_close_matches(name, dir(module), n=1, cutoff=ALIKE)
    waits = hasattr(module, "__path__") and find_spec(f"{module.__name__}.{name}")  # to be imported
    if not near or waits or root not in {"numpy", "torch", *sys.stdlib_module_names}:
        return None
    version = getattr(sys.modules[root], "__version__", sys.version.split()[0])
    return Fault(f"{root} {version} has no {module.__name__}.{name}", f"Is {near[0]} meant?")


def _may_have(owner: nn.Module, name: str, last: TracebackType) -> bool:
    """Whether something might have given a module an attribute of this name."""
    classes = [one for one in type(owner).__mro__ if one is not object and not one.__module__.startswith("torch.")]
    files = {str(getattr(sys.modules.get(one.__module__), "__file__", "")) for one in classes}
    if any(isinstance(one, NotInstalled) or name in vars(one) for one in classes) or not all(map(_is_readable, files)):
        return True
    around = (one for file in files for one in Path(file).parent.glob("*.py"))
    given = re.compile(rf"(?<!\bself)\.{name}\s*=[^=]")  # by whoever uses the module
    unseen = any(DYNAMIC.search(source_of(one)) for one in classes)
    unseen = unseen or any(given.search(one.read_text(errors="replace")) for one in around)
    nodes = [node for file in files for node in nodes_in(file)]
    functions = (x for x in nodes if isinstance(x, ast.FunctionDef))
    variables = {x for function in functions for x in ast.walk(function) if isinstance(x, ast.Name)}
    return unseen or _gives_before(name, last, nodes, variables)


def _gives_before(
    name: str, last: TracebackType, nodes: Iterable[ast.AST], but: Collection[ast.AST] = frozenset()
) -> bool:
    """Whether a line gives something this name, but for some nodes, and need not run after another of its function."""
    function, line = function_of(last), last.tb_lineno
    below: set[ast.AST] = set()
    if function is not None:
        around = [x for x in ast.walk(function) if isinstance(x, ast.stmt) and spans(x, line)]
        start = max(x.lineno for x in around)
        looped = any(isinstance(x, ast.For | ast.While) for x in around)
        below = {x for x in ast.walk(function) if not looped and getattr(x, "lineno", 0) >= start}
    return any(_gives(node, name) and node not in below and node not in but for node in nodes)


def _gives(node: ast.AST, name: str) -> bool:
    """Whether a line gives something this name, or only speaks of it; so do stars of packages that are absent."""
    match node:
        case ast.Name(id=given, ctx=ast.Store()) | ast.Attribute(attr=given, ctx=ast.Store()):
            return given == name
        case ast.FunctionDef(name=given) | ast.ClassDef(name=given) | ast.ExceptHandler(name=given):
            return given == name
        case ast.Constant(value=text):
            return bool(text == name)
        case ast.alias(name=imported, asname=given):
            return name == (given or imported.partition(".")[0]) or (imported == "*" and bool(ABSENCES.names))
    return False
