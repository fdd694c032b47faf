"""How findings look on a terminal: what is wrong and the proof of it, then how the code was read."""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from equivalence_tests.checker.reporting.findings import (
    ABOVE_ROUNDING,
    CheckResult,
    Exercise,
    Finding,
    Proof,
    Verdict,
)
from equivalence_tests.checker.reporting.lines import CodeLine

WORDS: dict[Verdict, tuple[str, str]] = {
    "equal": ("EQUAL", "bold green"),
    "partial": ("EQUAL, as far as it ran", "bold yellow"),
    "deviates": ("DEVIATES", "bold red"),
    "unchecked": ("COULD NOT BE CHECKED", "bold yellow"),
}
WIDTH = 110
LONGEST_NAME = 34  # characters of a name that are not broken in a table on a narrow screen
AT_JOINTS = re.compile(r"(?<=[ /:])|(?<=\.)(?=\w)")
NEAREST, LONGEST_CALL = 4, 80  # lines of a stack that are shown beside the outermost; characters of each
ROUNDED = 1e-3  # of the difference that a mistake makes: what is left beyond that is no rounding


class Shown:
    """Something that is shown as ``__rich__`` lays it out: printed, as text, and in a notebook."""

    def __str__(self) -> str:
        return "\n".join(_printed(self, Console(width=WIDTH, color_system=None, force_jupyter=False)))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        console = Console(width=WIDTH, record=True, file=StringIO(), force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def show(view: RenderableType | Shown, console: Console) -> None:
    """Print something; without the blanks at the ends of lines that only a terminal needs."""
    if console.is_terminal:
        console.print(view)
    else:
        print(*_printed(view, console), sep="\n", file=console.file)


def _printed(view: RenderableType | Shown, console: Console) -> list[str]:
    with console.capture() as captured:
        console.print(view)
    return [line.rstrip() for line in captured.get().splitlines()]


def headline(verdict: Verdict, target: str, kind: str, intended: Sequence[Finding]) -> Text:
    """Give the verdict in a word, and what it is about."""
    word, style = WORDS[verdict]
    if verdict == "equal" and intended:
        word = "EQUAL, except where intended"
    return Text.assemble((word, style), f"  {target}", (f"  ({kind})" if kind else "", "dim"))


def findings_view(findings: Sequence[Finding]) -> Iterator[Group]:
    """Lay out each mistake: the sentence, the line that ran, have and want, the fix and the proof."""
    for finding in findings:
        yield _finding_view(finding, alone=[other.where for other in findings].count(finding.where) == 1)


def _finding_view(finding: Finding, alone: bool) -> Group:
    sentence = (f"{finding.where}: " if finding.where else "") + finding.sentence
    parts = (
        ("line", _lines(finding.stack)),
        ("have", Text(finding.have)),
        ("want", Text(finding.want)),
        ("fix", Text(finding.fix)),
        ("proof", Text(_proof(finding.proof, alone) or ("" if finding.is_proven else "Not proven."))),
        ("evidence", Text(finding.evidence)),
        ("on purpose in", Text(finding.on_purpose_in)),
    )
    return _under(Text(sentence, style="bold"), ((Text(label, style="dim"), value) for label, value in parts if value))


def intended_view(intended: Iterable[Finding]) -> Group:
    """List what deviates from torch's formula on purpose, with the evidence."""
    listed: dict[tuple[str, str], None] = {}  # of several parts alike, once
    for finding in intended:
        difference = f" Without it, the difference from torch is {finding.proof.without:.2g}." if finding.proof else ""
        listed[finding.name, f"{finding.sentence} Intended: {finding.reason}{difference}"] = None
    return _under(Text("Intended", style="bold"), ((Text(name, style="bold"), Text(said)) for name, said in listed))


def coverage_view(not_exercised: Iterable[Exercise]) -> Group:
    """List what the verdict says nothing about."""
    rows = ((Text(exercise.what), Text(exercise.detail)) for exercise in not_exercised)
    return _under(Text("Not run, so the verdict says nothing about it", style="bold"), rows)


def reading_view(conventions: Iterable[tuple[str, str, str]]) -> Table:
    """Put how the code was read beside how torch.nn has it."""
    return table(("how it was read", "in this code", "in torch.nn"), conventions)


def checks_view(checks: Sequence[CheckResult]) -> RenderableType:
    """Count the checks, and list those that failed."""
    counted = [check for check in checks if check.outcome != "skipped"]
    passed = [check for check in counted if check.outcome == "passed"]
    heading = Text(f"{len(passed)} of {len(counted)} checks passed", style="dim")
    styles = {"failed": "red", "expected": "yellow"}
    listed = [check for check in checks if check.outcome in styles]
    return _under(heading, ((Text(c.outcome, styles[c.outcome]), Text(f"{c.name}: {c.detail}")) for c in listed))


def _under(heading: Text, rows: Iterable[tuple[Text, Text]]) -> Group:
    """A heading, and rows of a label and a text that is folded under itself."""
    grid = Table.grid(padding=(0, 2, 0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return Group(heading, grid)


def table(headings: Iterable[str], lines: Iterable[Sequence[str]]) -> Table:
    """Lines of text under headings, each folded in its column."""
    laid, rows = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0)), list(lines)
    for heading, column in itertools.zip_longest(headings, zip(*rows, strict=True)):
        longest = max((len(part) for text in column or () for part in AT_JOINTS.split(text)), default=0)
        laid.add_column(heading, overflow="fold", min_width=min(longest, LONGEST_NAME))
    for line in rows:
        laid.add_row(*map(Cell, line))
    return laid


class Cell:
    """A text that is folded between words, or in a long word at its joints: after a slash, a colon, a dot."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Say how wide it would like to be."""
        return Measurement.get(console, options, Text(self.text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Give its lines."""
        lines, width = [""], options.max_width
        for part in AT_JOINTS.split(self.text):
            if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
                lines.append("")
            lines[-1] += part
        yield Text("\n".join(line.rstrip() for line in lines), overflow="fold")


def _lines(stack: Sequence[CodeLine]) -> Text:
    """Show the line to change, and below it the lines that led there."""
    if not stack:
        return Text("")
    *callers, guilty = stack
    text = Text.assemble((str(guilty), "cyan"), f"  {guilty.text or f'in {guilty.function}'}")
    nearest, outermost = callers[::-1][:NEAREST], callers[:-NEAREST][:1]
    between = len(callers) - len(nearest) - len(outermost)
    more = [f"\n... {between} more call{'s' * (between > 1)}"] if between else []
    shown = "".join([*map(_called_from, nearest), *more, *map(_called_from, outermost)])
    made_before = guilty.function == "__init__" != callers[-1].function if callers else False
    return text.append(shown.replace("called from", "used at", 1) if made_before else shown, style="dim")


def _called_from(line: CodeLine) -> str:
    """Show a call without most of its arguments, where there are many: the file and line identify it."""
    code = line.text if len(line.text) <= LONGEST_CALL else line.text[:LONGEST_CALL].rstrip() + " …"
    return f"\ncalled from {line}  {code}"


def _proof(proof: Proof | None, alone: bool) -> str:
    if proof is None:
        return ""
    if max(proof.error, proof.without) < ABOVE_ROUNDING:
        return "Not proven: correcting this does not change the output."
    if proof.error > proof.without * ROUNDED:
        return f"Not proven: with this corrected, the output still differs from torch's by {proof.error:.2g}."
    exactly = f"to {proof.error:.0e}" if proof.error else "exactly"
    right, left = ("value on this line", "it") if alone else ("values here and at the other findings", "this one")
    return (
        f"With the right {right}, your own code returns torch's numbers {exactly} on {proof.inputs} fresh inputs; "
        f"without {left} the difference is {proof.without:.2g}."
    )
