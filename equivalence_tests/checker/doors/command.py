"""``sidebyside verify``: check anybody's attention from the command line."""

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.text import Text

from equivalence_tests.checker.doors.discovery import NothingToCheckError, candidates, names_one_thing
from equivalence_tests.checker.doors.sandbox import Limits, Request, checked
from equivalence_tests.checker.intended import check_intended, reasons
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reporting.exports import to_github, to_json, to_junit, to_sarif
from equivalence_tests.checker.reporting.findings import KINDS, VERDICTS
from equivalence_tests.checker.reporting.rendering import show, table
from equivalence_tests.checker.reporting.report import Report

WORST_FIRST = (1, 2, 3, 0)
PRINTED = Path("-")
# The attention that README and the guide check, with its mistake.
EXAMPLE = """\
import math

from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, q, k, v, mask=None):
        b, l, e = q.shape
        q, k, v = self.q_proj(q), self.k_proj(k), self.v_proj(v)
        q, k, v = (x.view(b, -1, self.num_heads, e // self.num_heads).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(e)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        context = scores.softmax(dim=-1) @ v
        return self.out_proj(context.transpose(1, 2).reshape(b, l, e))
"""


def _writable(path: Path | None) -> Path | None:
    """Refuse what cannot be written before the work is done."""
    try:
        if path is not None and path != PRINTED:
            with path.open("ab") if path.exists() else TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}") from error
    return path


def _print_example(wanted: bool) -> None:
    if wanted:
        typer.echo(EXAMPLE, nl=False)
        raise typer.Exit


def verify_command(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET",
            help="file.py:Name, module.path:Name, or a file, folder, package or notebook to look through.",
            show_default=False,
        ),
    ],
    inputs: Annotated[
        str, typer.Option(help="For a model of your own: file.py:name of the batch to call it with.")
    ] = "",
    kind: Annotated[
        str | None, typer.Option(help=f"What TARGET is, if its name does not say: {', '.join(KINDS)}.")
    ] = None,
    adapter: Annotated[
        str, typer.Option(help="file.py:NAME of an Adapter, for what cannot be found out automatically.")
    ] = "",
    intended: Annotated[
        list[str] | None,
        typer.Option(help="Accept the deviation NAME as intended, for this REASON. Repeatable.", metavar="NAME=REASON"),
    ] = None,
    intended_file: Annotated[
        Path | None, typer.Option(help="TOML file of such names and reasons.", exists=True, dir_okay=False)
    ] = None,
    meant: Annotated[list[str] | None, typer.Option(hidden=True)] = None,  # the old names of the two above
    meant_file: Annotated[Path | None, typer.Option(hidden=True, exists=True, dir_okay=False)] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the reports as a JSON list; - prints it.", callback=_writable)
    ] = None,
    junit_file: Annotated[
        Path | None, typer.Option("--junit", help="Write the checks as JUnit XML; - prints it.", callback=_writable)
    ] = None,
    sarif_file: Annotated[
        Path | None, typer.Option("--sarif", help="Write the findings as SARIF 2.1.0; - prints it.", callback=_writable)
    ] = None,
    github: Annotated[bool, typer.Option("--github", help="Print the findings as GitHub annotations.")] = False,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="Exit with 0, not 3, if the code is equal as far as it ran.")
    ] = False,
    equivalent: Annotated[
        bool,
        typer.Option(
            "--equivalent",
            help="Print the equivalent in torch's own parts, as Python; the report goes to standard error.",
        ),
    ] = False,
    template: Annotated[
        bool,
        typer.Option("--template", help="Print how TARGET was built and called, as a script to edit and run."),
    ] = False,
    run_all: Annotated[
        bool, typer.Option("--run-all", help="Run every cell of a notebook, not only imports and definitions.")
    ] = False,
    skip_empty: Annotated[
        bool, typer.Option("--skip-empty", help="Skip files that hold no attention, layer or mask builder.")
    ] = False,
    example: Annotated[
        bool,
        typer.Option(
            "--example",
            callback=_print_example,
            is_eager=True,
            help="Print an attention with a mistake to try this on: the my_attention.py of the README.",
        ),
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the code too, and compare it with itself in eager mode.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="CPU seconds allowed for each target.", min=1)] = 120.0,
    memory_mib: Annotated[int, typer.Option("--memory", help="MiB of memory allowed for each target.", min=256)] = 4096,
) -> None:
    """Check attention code against torch.nn: what is wrong, on which line, and how to fix it.

    Your code is run, and every operation in it is watched. Exit status: 0 equal, 1 deviates, 2 could not be checked,
    3 equal as far as it ran.
    """
    del example  # its callback has answered already
    files = {to_json: json_file, to_junit: junit_file, to_sarif: sarif_file}
    printed = [*files.values()].count(PRINTED) + equivalent + template
    _refuse_options(kind, inputs, adapter, printed, template, compiled)
    excused = _intended([*(meant or []), *(intended or [])], [file for file in (meant_file, intended_file) if file])
    console = Console(stderr=bool(printed))
    pattern = Request("", inputs, kind, adapter, excused, run_all, compiled)
    requests, unread = _requests(targets, console, pattern, skip_empty)
    reports = [*unread, *_checked(requests, Limits(timeout, memory_mib), Console(stderr=True))]
    if PRINTED not in files.values():
        _show(reports, console)
    for export, path in files.items():
        if path == PRINTED:
            typer.echo(export(reports))
        elif path is not None:
            path.write_text(export(reports) + "\n", encoding="utf-8")
    if github:
        typer.echo("\n".join(to_github(reports)))
    if equivalent:
        for found in (report.equivalent for report in reports if report.equivalent is not None):
            show(Group(Text(), found), console)
    for write in [_equivalent] * equivalent + [_template] * template:
        typer.echo("\n\n".join(map(write, reports)).rstrip("\n"))
    raise typer.Exit(VERDICTS["equal"] if skip_empty and not reports else _status(reports, allow_partial))


def _refuse_options(kind: str | None, inputs: str, adapter: str, printed: int, template: bool, compiled: bool) -> None:
    """Refuse options that do not go together, and a kind that there is not; so many of them print."""
    if kind is not None and kind not in KINDS:
        raise typer.BadParameter(f"must be one of {', '.join(KINDS)}, got {kind!r}", param_hint="--kind")
    if printed > 1:
        said = "only one of --json, --junit and --sarif can be -, and none with --equivalent or --template, which print"
        raise typer.BadParameter(f"{said} too: give the others a file")
    if template and (inputs or adapter):
        raise typer.BadParameter(
            "shows the call that is worked out: leave --inputs and --adapter out", param_hint="--template"
        )
    if compiled and inputs:
        raise typer.BadParameter("works on single attentions, not with --inputs", param_hint="--compile")


def _requests(
    targets: Sequence[str], console: Console, pattern: Request, skip_empty: bool
) -> tuple[list[Request], list[Report]]:
    """Turn what was named into what is checked: one thing each, or all that a file or folder holds."""
    requests: list[Request] = []
    unread: list[Report] = []
    for target in targets:
        if not target:
            raise typer.BadParameter(
                "is empty: name a file, a folder or file.py:Name; . is this folder", param_hint="TARGET"
            )
        if names_one_thing(target):
            requests.append(replace(pattern, target=target))
            continue
        try:
            found, broken = candidates(target)
        except CannotCheckError as error:
            if skip_empty and isinstance(error, NothingToCheckError):
                continue
            unread.append(Report(target, reason=str(error)))
            continue
        unread += [Report(file, reason=reason) for file, reason in broken.items()]
        if found:
            files = _count(len({one.path for one in found}), "file")
            show(Text(f"{target}: {_count(len(found), 'thing')} to check in {files}"), console)
        kinds = {one.target: pattern.kind or one.asked_kind for one in found}
        requests += [replace(pattern, target=name, kind=kind) for name, kind in kinds.items()]
    return requests, unread


def _checked(requests: Sequence[Request], limits: Limits, console: Console) -> list[Report]:
    """Check everything, with progress on the standard error."""
    reports: list[Report] = []
    if not requests:
        return reports
    with console.status("") as status:

        def say(text: str) -> None:
            number = min(len(reports) + 1, len(requests))
            of_many = f" ({number} of {len(requests)})" if len(requests) > 1 else ""
            status.update(f"checking {requests[number - 1].target}{of_many}{': ' if text else ''}{text}")

        say("starting torch")
        for found in checked(requests, limits, say):
            reports += found
            say("")
    return reports


def _show(reports: Sequence[Report], console: Console) -> None:
    """Print the table first where there are several, then every report that has something to say."""
    if len(reports) > 1:
        lines = [(report.title, report.verdict, _in_short(report)) for report in reports]
        show(table(("target", "verdict", "what"), lines), console)
        show(Text(), console)
    shown: dict[Any, list[Report]] = {}
    for report in reports:
        if len(reports) == 1 or report.verdict in ("deviates", "partial"):
            shown.setdefault(_alike(report), []).append(report)
    for number, (first, *others) in enumerate(shown.values()):
        if number:
            show(Text(), console)
        show(first, console)
        if others:
            show(Text("  The same in " + ", ".join(report.place for report in others)), console)


def _equivalent(report: Report) -> str:
    """The same in torch's own parts; where it is not written down, a comment that says why."""
    if report.equivalent is not None and report.equivalent.source:
        return report.equivalent.source
    why = report.equivalent.unwritten if report.equivalent is not None else report.unread
    reason = why or (report.reason.splitlines() or [report.verdict])[0]
    return f"# {report.title}: no equivalent is written down: {reason}\n"


def _template(report: Report) -> str:
    reason = " ".join(report.reason.split()) or report.verdict
    return report.template or f"# {report.title}: nothing was built or called: {reason}\n"


def _alike(report: Report) -> Any:
    """What two attentions of one model share that need not be shown twice."""
    found = tuple((finding.name, finding.line) for finding in report.findings)
    return (report.target, report.verdict, found) if report.place and found else id(report)


def _in_short(report: Report) -> str:
    if report.verdict == "partial":
        return "not run: " + ", ".join(exercise.what for exercise in report.not_exercised)
    first, *rest = report.reason.splitlines() or [""]
    reason = f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first
    wrong = ", ".join(report.mistakes) or reason
    intended = ", ".join(finding.name for finding in report.intended)
    return wrong or (f"intended: {intended}" if intended else "")


def _intended(options: Sequence[str], files: Sequence[Path]) -> dict[str, str]:
    """Read which deviations are on purpose, each with its reason."""
    given: dict[str, str] = {}
    for file in files:
        try:
            read = tomllib.loads(file.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise typer.BadParameter(f"{file} is not TOML: {error}", param_hint="--intended-file") from error
        given |= {name: str(reason) for name, reason in read.items()}
    try:
        return dict(check_intended(given | reasons(options)))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--intended") from error


def _status(reports: Sequence[Report], allow_partial: bool) -> int:
    """Give the worst exit status: deviating is worse than unchecked, that than equal as far as it ran."""
    statuses = {report.exit_status for report in reports} or {VERDICTS["unchecked"]}
    worst = next(status for status in WORST_FIRST if status in statuses)
    return VERDICTS["equal"] if allow_partial and worst == VERDICTS["partial"] else worst


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
