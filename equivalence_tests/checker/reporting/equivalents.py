"""The same in torch: a program of torch's own parts that gives the numbers of the code that was checked."""

import copy
import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Column, Table
from rich.text import Text

from equivalence_tests.checker.reporting.findings import Finding

SHOWN_LINES = 24
WIDE_ENOUGH = 100
NO_EVIDENCE = "nothing says that it is intended"
WRITTEN = "<equivalent>"  # what its lines are said to be of


@dataclass(frozen=True)
class Equivalent:
    """Torch's own program with the user's weights, as Python, and how it compares.

    Args:
        source: The program: a class ``Equivalent``, ``from_theirs`` and ``to_theirs``; "" where it is not written down.
        unwritten: Why it is not.
        theirs: The source of the code that was checked.
        handed: The paths of the user's own sub-modules that the program calls as they are.
        steps: What torch's formula does not have, each with the evidence that it is intended.
        compared: The calls in which whole outputs were compared.
        not_run: Those that could not be.
        difference: The greatest difference in any of them, relative to the largest value.
        where: In which, and of what.
        agrees: Whether that is rounding.
        torchs: The one module of torch that is the whole, as Python: "nn.LayerNorm(512)"; "" where there is none.
    """

    source: str
    unwritten: str
    theirs: str
    handed: tuple[str, ...]
    steps: tuple[tuple[str, str], ...]
    compared: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()
    difference: float = math.inf
    where: str = ""
    agrees: bool = False
    torchs: str = ""

    @property
    def is_function(self) -> bool:
        """Whether it is written as a function, as the user's code is."""
        return "\ndef equivalent(" in self.source

    def of(self, theirs: Any) -> Any:
        """Build the program with the weights of a module.

        Args:
            theirs: An instance of the class that was checked, of the sizes that the program is written for; anything
                where a function was checked.

        Returns:
            A module of torch's own parts, with weights of its own, that gives the same numbers; of a function, a
            function with its signature.

        Raises:
            ValueError: If the program is not written down.
        """
        names = self.names()
        if self.is_function:
            return names["equivalent"]
        made = names["Equivalent"](*(copy.deepcopy(theirs.get_submodule(path)) for path in self.handed))
        state = names["from_theirs"](theirs.state_dict())
        for x in list(state.values())[:1]:
            made = like(made, x.device, x.dtype)
        made.load_state_dict(state, strict=True)
        return made.train(theirs.training)

    def to_theirs(self, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
        """Put the weights of the program, or their gradients, where the user's code has them.

        Args:
            ours: A state_dict of the program.
            theirs: A state_dict of the user's module, which is copied.

        Returns:
            The copy with the weights of the program.

        Raises:
            ValueError: If the program is not written down, or is a function, which has no weights of its own.
        """
        if self.is_function:
            raise ValueError("the equivalent is a function: its weights are arguments, and need no conversion")
        found: dict[str, Any] = self.names()["to_theirs"](ours, theirs)
        return found

    def names(self) -> dict[str, Any]:
        """Run the program's text."""
        if not self.source:
            raise ValueError(f"the equivalent cannot be built: {self.unwritten}")
        names: dict[str, Any] = {}
        exec(_compiled(self.source), names)  # our own text
        return names

    def in_short(self, intended: Sequence[Finding] = ()) -> Group:
        """Say what torch does not have and no finding says already, and in which calls the numbers are the same."""
        heading = Text("The same in torch", style="bold")
        said = " ".join(finding.sentence for finding in intended)
        rows = [f"{words}: {evidence or NO_EVIDENCE}" for words, evidence in self.steps if f": {words}." not in said]
        exactly = f"to {self.difference:.0e}" if self.difference else "to the last bit"
        calls = f"{len(self.compared)} calls: {', '.join(dict.fromkeys(self.compared))}"
        numbers = f"equal {exactly} in {calls}; --equivalent prints it" if self.agrees else "it differs"
        program = f"{self.torchs or 'a program of its parts'}, with your weights: {numbers}."
        rows.append(program if self.source else f"It is not written down: {self.unwritten}.")
        return Group(heading, *(Padding(Text(row), (0, 0, 0, 2)) for row in rows))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Lay the user's code and the same in torch out side by side where there is room, folded to one screen."""
        yield self.in_short()
        ours = self.source.split("\n\n\ndef from_theirs")[0].partition("\n\n\n")[2]
        panels = [_panel(title, text) for title, text in (("your code", self.theirs), ("torch", ours)) if ours and text]
        if options.max_width < WIDE_ENOUGH or not panels:
            yield from panels
            return
        beside = Table.grid(*(Column(ratio=1) for _ in panels), expand=True)
        beside.add_row(*panels)
        yield beside


def like(module: Any, device: Any, dtype: Any) -> Any:
    """Put a module on a device, and its real numbers in a precision; ``Module.to`` would make complex ones real."""
    for own in (*module.parameters(), *module.buffers()):
        own.data = own.data.to(device, dtype if own.is_floating_point() else own.dtype)
    return module


def taken(made: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give those arguments that a program takes: what the numbers do not depend on is not among them.

    >>> taken(lambda x: x, (), {"x": 2, "verbose": True})
    ((), {'x': 2})
    """
    wanted = inspect.signature(made).parameters
    return (*args[: len(wanted)],), {name: x for name, x in kwargs.items() if name in wanted}


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> CodeType:
    """Compile a program's text: every call that is compared runs it anew."""
    return compile(source, WRITTEN, "exec")


def _panel(title: str, source: str) -> RenderableType:
    lines = source.strip("\n").splitlines()
    kept = lines[:SHOWN_LINES]
    text = "\n".join([*kept, *([f"# ... and {len(lines) - len(kept)} more lines"] if len(lines) > len(kept) else [])])
    return Panel(Syntax(text, "python", theme="ansi_light", background_color="default", word_wrap=True), title=title)
