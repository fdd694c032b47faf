"""The table of kernels and situations, the faults below it, and the same for other programs."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from textwrap import indent
from typing import Any
from xml.etree import ElementTree

from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from equivalence_tests.kernels.faults import Fault, Request
from equivalence_tests.kernels.judging import Cell, State

__all__ = ["Report", "to_github", "to_json", "to_junit"]

COLOURS = {"right": "green", "worse": "yellow", "wrong": "bold red", "refuses": "dim", "falls back": "cyan"}
COLOURS |= {"needs mask": "yellow"}
WORST_FIRST: tuple[State, ...] = ("wrong", "worse", "needs mask", "falls back", "right", "refuses")
TITLE = "Output and gradients compared with scratch in float64; the greatest error over the textbook's"
NAMED = 8  # of the places that show a fault too


@dataclass
class Report:
    """What one run found.

    Args:
        request: What was asked.
        machine: On what.
        cells: Every kernel in every situation.
        faults: What is wrong.
        remarks: What could not be done, in one line each.
        title: Of the table.
        groups: Its columns, in their order.
    """

    request: Request
    machine: str
    cells: Sequence[Cell]
    faults: Sequence[Fault]
    remarks: Sequence[str] = ()
    title: str = TITLE
    groups: Sequence[str] = ()

    @property
    def exit_status(self) -> int:
        """0 if nothing is wrong, 1 if something is, 2 if nothing could be judged."""
        if any(cell.state == "wrong" for cell in self.cells):
            return 1
        return 0 if any(cell.state != "refuses" for cell in self.cells) else 2

    def show(self, console: Console) -> None:
        """Print the table, and below it each fault once, with a program that can be copied as it stands."""
        console.print(_table(self), "", *_refusals(self.cells), *map(Text, self.remarks), sep="\n")
        for fault in self.faults:
            console.print("", *_shown(fault), sep="\n")
            if fault.program:
                console.print(Text("\n" + indent(fault.program, "    ")), soft_wrap=True)
        console.print("", self.verdict, sep="\n")

    @property
    def verdict(self) -> str:
        """The run in one line."""
        count = Counter(cell.state for cell in self.cells)
        judged = sum(count.values()) - count["refuses"]
        if count["wrong"]:
            wrong = sorted({cell.kernel for cell in self.cells if cell.state == "wrong"})
            return f"[bold red]Wrong:[/] {count['wrong']} of {judged} calls ({escape('; '.join(wrong))})."
        if not judged:
            return "[bold yellow]Nothing could be judged:[/] every kernel refuses."
        worse = f" {count['worse']} are worse than the rule allows." if count["worse"] else ""
        return f"[bold green]Right:[/] none of {judged} calls is wrong.{worse}"


def _table(report: Report) -> Table:
    """Show a line for each kernel and a column for each group of situations."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    table.title = Text(report.title)
    cells = report.cells
    there = list(dict.fromkeys(cell.group for cell in cells))
    groups = [group for group in report.groups if group in there] or there
    table.add_column("", overflow="fold", min_width=24)
    for group in groups:
        table.add_column(group)
    for name in dict.fromkeys(cell.kernel for cell in cells):
        here = [cell for cell in cells if cell.kernel == name]
        if not _takes_nothing(here):
            table.add_row(
                escape(name), *(_in_a_cell([cell for cell in here if cell.group == group]) for group in groups)
            )
    return table


def _in_a_cell(cells: Sequence[Cell]) -> str:
    if not cells:
        return ""
    count = Counter(cell.state for cell in cells)
    worst = next(state for state in WORST_FIRST if count[state])
    ratio = max(cell.ratio for cell in cells)
    word = {"wrong": "WRONG"}.get(worst, worst)
    share = f" {count[worst]}/{len(cells)}" if worst != "right" else f" {ratio:.1f}" if ratio else ""
    refused = f", {count['refuses']} refused" if count["refuses"] and worst == "right" else ""
    return f"[{COLOURS[worst]}]{word}{share}[/]{refused}"


def _refusals(cells: Sequence[Cell]) -> Iterator[RenderableType]:
    """Say which kernels take nothing at all, and give torch's words where some calls are refused."""
    said: dict[str, list[str]] = {}
    for name in dict.fromkeys(cell.kernel for cell in cells):
        for words in _refused([cell for cell in cells if cell.kernel == name]):
            said.setdefault(words, []).append(name)
    for words, names in said.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        verb, _, rest = words.partition(" ")
        verb = verb if len(names) == 1 else {"refuses": "refuse", "has": "have"}[verb]
        yield Text(f"{'; '.join(names[:NAMED])}{more} {verb} {rest}")


def _refused(cells: Sequence[Cell]) -> Iterator[str]:
    """Say what one kernel refuses, and whether it has a backward."""
    refused = list({cell.situation: cell for cell in cells if cell.state == "refuses"}.values())
    if _takes_nothing(cells):
        yield f"refuses every call: {_short(refused[0].words)}"
    elif refused:
        few = ", ".join(f"({cell.situation})" for cell in refused[:3])
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        yield f"refuses {few}{more}: {_short(refused[0].words)}"
    no_backward = [cell.words for cell in cells if cell.words.startswith("no backward")]
    if no_backward:
        yield f"has {_short(no_backward[0])}"


def _takes_nothing(cells: Sequence[Cell]) -> bool:
    return all(cell.state == "refuses" for cell in cells if cell.size) and any(
        cell.state == "refuses" for cell in cells
    )


def _short(words: str) -> str:
    return words if len(words) <= 160 else words[:157] + "..."


def _shown(fault: Fault) -> Iterator[RenderableType]:
    word = "WRONG" if fault.cell.state == "wrong" else "worse than the rule allows"
    yield Text.assemble((word, COLOURS[fault.cell.state]), f"  {fault.sentence}")
    places = Counter(cell.kernel for cell in fault.others)
    also = [f"{name} ({count})" for name, count in places.items()]
    more = [f"{len(also) - NAMED} more"] if len(also) > NAMED else []
    told = [fault.name, *fault.places, also and "also: " + "; ".join([*also[:NAMED], *more])]
    told += [fault.advice.issue and f"known: {fault.advice.issue}", fault.advice.help]
    yield from (Padding(Text(text), (0, 0, 0, 2)) for text in told if text)


def to_json(report: Report) -> str:
    """Give everything; numbers that are not finite, which JSON lacks, as text."""
    data: dict[str, Any] = {"machine": report.machine, **asdict(report.request), "remarks": list(report.remarks)}
    data["faults"] = [fault.to_dict() for fault in report.faults]
    data["cells"] = [cell.to_dict() for cell in report.cells]
    finite = json.loads(json.dumps(data), parse_constant=lambda number: str(float(number)))
    return json.dumps(finite, indent=2, allow_nan=False)


def to_junit(report: Report) -> str:
    """Give a suite for each kernel, with a case for each situation."""
    suites = ElementTree.Element("testsuites")
    for name in dict.fromkeys(cell.kernel for cell in report.cells):
        suite = ElementTree.SubElement(suites, "testsuite", name=name)
        for cell in (cell for cell in report.cells if cell.kernel == name):
            case = ElementTree.SubElement(suite, "testcase", classname=name, name=f"{cell.situation}, {cell.dtype}")
            told = "; ".join([*map(str, cell.wrong_parts), *([cell.words] if cell.words else [])])
            if cell.state == "wrong":
                ElementTree.SubElement(case, "failure", message=told)
            elif cell.state == "refuses":
                ElementTree.SubElement(case, "skipped", message=told)
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(len(suite.findall("testcase/failure"))))
        suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode")


def to_github(report: Report) -> Iterator[str]:
    """Give a line for each fault that GitHub's runner turns into an annotation."""
    for fault in report.faults:
        level = "error" if fault.cell.state == "wrong" else "warning"
        said = " ".join(text for text in (fault.sentence, fault.name, fault.advice.issue, fault.advice.help) if text)
        escaped = said.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        yield f"::{level} title={fault.kind}::{escaped}"
