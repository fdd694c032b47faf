"""The call that was tried, as a short Python script: what ``sidebyside verify TARGET --template`` prints."""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.equivalent.texts import Code, arguments_text, constructor, text
from equivalence_tests.checker.reach.arguments import SIZES, role_of_parameter
from equivalence_tests.checker.reach.configs import ImitatedConfig
from equivalence_tests.checker.reach.proposing import parameters_of
from equivalence_tests.checker.reach.tried import TRIED, Try
from equivalence_tests.checker.reporting.report import Report

UNKNOWN = Code("...")
ATTENTIONS = ("multi-head attention", "attention function")
ENDING = """for report in reports:
    print(report)
raise SystemExit(not all(reports))"""


def template_of(found: Any, target: Any, report: Report, kind: str | None) -> str:
    """Write the call that ran, or else the one that got furthest, as a script; "" where none was tried."""
    if TRIED.call is None and TRIED.not_built is None and report.verdict == "unchecked":
        return ""
    return "\n".join(_Script(found, target if isinstance(target, str) else "").lines(report, kind)) + "\n"


class _Script:
    """Writes one script, and remembers what it has to load."""

    def __init__(self, found: Any, place: str) -> None:
        self.found, self.loads = found, dict[str, str]()
        self.name = self._load(found, place)

    def lines(self, report: Report, kind: str | None) -> Iterator[str]:
        """Give the lines."""
        ready = TRIED.built_first is None and TRIED.not_built is None
        model = self.name if ready else "model"
        built = [] if ready else list(self._construction())
        with_inputs = report.kind in (*ATTENTIONS, "layers") or report.verdict == "unchecked"
        given = list(self._inputs()) if with_inputs else []
        yield f'"""Checks {report.target}: change what does not fit your code, and run it with Python."""\n'
        if any("SimpleNamespace(" in line for line in built):
            yield "from types import SimpleNamespace\n"
        yield "import torch"
        yield "from torch import nn\n" if any("nn." in line for line in built) else ""
        yield "from equivalence_tests import load, verify\n"
        yield from (f"{name} = {place}" for name, place in self.loads.items())
        yield from (*built, "", *given)
        itself = f"verify({model}{f', kind={kind!r}' if kind else ''})"
        of_call = f"verify({model}, inputs)"
        if report.kind == "layers":
            yield f"reports = [{itself}, *{of_call}]  # the wiring, then each attention that runs in this call"
        else:
            yield f"reports = {of_call if with_inputs else f'[{itself}]'}"
        yield ENDING

    def _construction(self) -> Iterator[str]:
        call = TRIED.call and TRIED.construction_of(TRIED.call.function)
        made = call or TRIED.built_first or TRIED.not_built
        assert made is not None  # it did not come ready
        yield f"model = {self.name}({self._arguments(made)})"
        yield (
            f"# It raised {one_line(made.error)}" if made.error else '# model.load_state_dict(torch.load("weights.pt"))'
        )

    def _inputs(self) -> Iterator[str]:
        call = TRIED.call or Try(self.found, (), self._guessed())
        if call.args:
            yield f"inputs = ({self._arguments(call)},)"
        else:
            named = (f'    "{name}": {self._text(value)},' for name, value in call.kwargs.items())
            yield from ("inputs = {", *named, "}")
        takes = [str(p) for p in self._parameters() if p.name not in call.kwargs and not call.args]
        yield from [f"# It also takes {', '.join(takes)}."] if takes else []
        yield from [f"# This call raised {one_line(call.error)}"] if call.error else []
        yield ""

    def _parameters(self) -> list[inspect.Parameter]:
        """The arguments of the call."""
        if TRIED.call is not None:
            return parameters_of(TRIED.call.function)
        return parameters_of(getattr(self.found, "forward", self.found))[inspect.isclass(self.found) :]

    def _guessed(self) -> dict[str, Any]:
        x = torch.randn(SIZES[0].batch, SIZES[0].query_len, SIZES[0].embed_dim)
        required = (p for p in self._parameters() if p.default is p.empty)
        return {p.name: None if role_of_parameter(p.name) == "mask" else x for p in required}

    def _arguments(self, call: Try) -> str:
        args, kwargs = tree_map(self._code, (call.args, call.kwargs))
        return arguments_text(args, kwargs)

    def _text(self, value: Any) -> str:
        return text(tree_map(self._code, value))

    def _code(self, value: Any) -> Any:
        """Give what can be written down of a value; ``...`` where nothing can."""
        made = TRIED.construction_of(value)
        if isinstance(value, Tensor):
            return Code(_tensor(value))
        if isinstance(value, ImitatedConfig):
            return self._config(value)
        if made is not None:
            return Code(f"{self._load(made.function)}({self._arguments(made)})")
        if isinstance(value, nn.Module):
            return Code(constructor(value) or "...")
        if isinstance(value, type):
            return Code(self._load(value))
        try:
            return Code(text(value))
        except UnreadError:
            return UNKNOWN

    def _config(self, config: ImitatedConfig) -> Code:
        """Write down what was asked of a config; one that is asked for its sections holds the same in each."""
        said = {name: self._text(value) for name, value in config.answers.items() if value is not config}

        def written(held: Mapping[str, str]) -> str:
            if config.is_subscripted:
                return f"{{{', '.join(f'{name!r}: {value}' for name, value in held.items())}}}"
            return f"SimpleNamespace({', '.join(f'{name}={value}' for name, value in held.items())})"

        sections = {name: written(said) for name, value in config.answers.items() if value is config}
        return Code(written(said | sections))

    def _load(self, found: Any, place: str = "") -> str:
        """Give something a name in the script, and remember where it is loaded from."""
        named = place.rpartition(":")[2].rpartition(".")[2] or getattr(found, "__name__", "target")
        name = re.sub(r"\W|^(?=\d)", "_", named)
        self.loads[name] = f'load("{place or _home(found)}")' if place or _home(found) else "...  # import it here"
        return name


def one_line(error: str) -> str:
    """Keep what was raised on one line, as a comment has to be."""
    return " ".join(error.split())


def _home(found: Any) -> str:
    """Say where a class or function can be loaded from; "" if nowhere."""
    name, module = getattr(found, "__name__", ""), sys.modules.get(getattr(found, "__module__", ""))
    path = Path(getattr(module, "__file__", None) or "")
    if not path.is_file() or getattr(module, name, None) is not found:
        return ""
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{name}"


def _tensor(x: Tensor) -> str:
    """Make a tensor like this one: alike where all its entries are, drawn at random where they are not."""
    shape = ", ".join(map(str, x.shape)) or "()"
    if x.numel() and bool((x == x.flatten()[0]).all()):
        return f"torch.full({tuple(x.shape)}, {text(x.flatten()[0].item())})"
    if x.is_complex():
        return f"torch.polar(torch.ones({shape}), torch.randn({shape}))"
    if x.dtype == torch.bool:
        return f"torch.rand({shape}) < 0.5"
    return f"torch.randn({shape})" if x.is_floating_point() else f"torch.randint({int(x.max()) + 1}, {tuple(x.shape)})"
