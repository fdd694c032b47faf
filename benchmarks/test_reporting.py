"""Tests of advice, growth, plots, the page and README's table, on rows whose numbers are made up."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import command, plots, readme, session
from benchmarks.advice import advice, fastest
from benchmarks.cases import Case
from benchmarks.command import app
from benchmarks.contenders import CONTENDERS
from benchmarks.environment import environment_of
from benchmarks.growth import growths
from benchmarks.plots import pictures, save_pictures, svg_of
from benchmarks.report import html_page
from benchmarks.results import Row, append_rows, read_rows
from benchmarks.tables import result_tables
from scratch.validation import ArgumentValueError

ENVIRONMENT = environment_of(torch.device("cpu"))
LENGTHS = (64, 256, 1024)


def row(contender: str, microseconds: float, ratio: float = 1.0, **changes: Any) -> Row:
    timed = Row(
        Case("attention"),
        contender,
        "timed",
        ENVIRONMENT,
        rounds_us=(microseconds,) * 3,
        median_us=microseconds,
        iqr_us=0.0,
        ratio_to_builtin=ratio,
        ratio_low=ratio * 0.99,
        ratio_high=ratio * 1.01,
        peak_memory_bytes=2**20,
        flops=1000,
        flops_per_s=1e9,
        share_of_matmul_rate=0.5,
    )
    return replace(timed, **changes)


def grown(component: str = "attention") -> list[Row]:
    """Make rows whose time grows with the length (builtin) and its square (scratch), and one that was not timed."""
    rows = []
    for length in LENGTHS:
        case = Case(component, query_len=length, key_len=length, num_layers=2 * (component == "generate"))
        rate = {"tokens_per_s": 1e6 / length} if component == "generate" else {}
        rows.append(row("builtin", 3.0 * length, case=case, peak_memory_bytes=64 * length, **rate))
        rows.append(row("scratch", length**2 / 100, length / 300, case=case, peak_memory_bytes=length**2, **rate))
    unequal = row("flash", 1.0, status="unequal", detail="output[0] = <1>, but", median_us=None, case=rows[0].case)
    return [*rows, replace(unequal, rounds_us=(), peak_memory_bytes=None)]


class TestAdvice:
    def test_the_fastest_is_named_with_what_the_others_cost(self) -> None:
        rows = [row("builtin", 200.0), row("scratch", 300.0, peak_memory_bytes=2**21), row("flex", 100.0)]
        assert advice(rows) == (
            "Use flex (flex attention, compiled): 100 µs, 1.0 MiB; builtin takes 2 times as long, with 1.0 MiB; "
            "scratch takes 3 times as long, with 2.0 MiB."
        )

    def test_the_built_in_is_kept_to_where_others_are_hardly_faster(self) -> None:
        rows = [row("builtin", 104.0), row("scratch", 101.0), row("math", 100.0)]
        assert fastest(rows) == rows[0]
        assert advice(rows) == "Use builtin: 104 µs, 1.0 MiB; scratch is as fast, with 1.0 MiB."
        assert fastest([row("builtin", 106.0), *rows[1:]]) == rows[1]

    def test_no_one_is_called_faster_or_slower_where_that_may_be_noise(self) -> None:
        noisy = row("builtin", 140.0, rounds_us=(90.0, 140.0, 190.0))
        rows = [noisy, row("scratch", 120.0), row("math", 100.0)]
        assert fastest(rows) == noisy
        by_hand = row("scratch", 170.0, rounds_us=(85.0, 170.0, 230.0))
        assert advice([noisy, by_hand]) == (
            "Use builtin: 140 µs, 1.0 MiB; scratch is as fast, as far as the noise lets one tell, with 1.0 MiB."
        )

    def test_what_slows_whole_rounds_hides_no_difference(self) -> None:
        rows = [
            row("builtin", 200.0, rounds_us=(120.0, 240.0, 600.0)),
            row("flash", 2.0, rounds_us=(100.0, 200.0, 500.0)),
        ]
        assert fastest(rows) == rows[1]
        apart = replace(rows[1], environment=replace(ENVIRONMENT, measured_at="later"))
        assert fastest([rows[0], apart]) == rows[0]

    def test_what_was_not_timed_is_said(self) -> None:
        gone = row("scratch", 1.0, status="out of memory", median_us=None)
        assert advice([row("builtin", 100.0), gone]) == "Use builtin: 100 µs, 1.0 MiB; scratch is out of memory."
        assert advice([gone]) == "Nothing could be timed."


class TestGrowth:
    def test_exponents_of_time_and_memory(self) -> None:
        found = {x.contender: x for x in growths(grown())}
        assert set(found) == {"builtin", "scratch"}
        assert {x.lengths for x in found.values()} == {LENGTHS}
        assert [found["builtin"].time, found["builtin"].memory] == pytest.approx([1.0, 1.0])
        assert [found["scratch"].time, found["scratch"].memory] == pytest.approx([2.0, 2.0])

    def test_other_settings_and_too_few_lengths_are_kept_apart(self) -> None:
        assert growths(grown()[:4]) == []
        masked = [replace(x, case=replace(x.case, mask="causal")) for x in grown()]
        assert len(growths(grown() + masked)) == 4
        assert growths([*grown()[:4], *masked[4:]]) == []


class TestTables:
    def test_cells_growth_and_problems_are_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        Console(width=80, highlight=False).print(*result_tables(grown()))
        text = capsys.readouterr().out
        for shown in (
            "length 64",
            "× 0.85",
            "× 3.41",
            "UNEQUAL",
            "builtin 1.00, scratch 2.00",
            "flash, unequal: output[0]",
        ):
            assert shown in text
        assert max(map(len, text.splitlines())) <= 80


class TestPictures:
    def test_a_figure_for_what_was_measured_at_three_lengths(self, tmp_path: Path) -> None:
        short = [replace(x, case=replace(x.case, mask="causal")) for x in grown()[:4]]
        (picture,) = pictures(grown() + short)
        time, ratio, memory = picture.figure.axes
        assert [line.get_label() for line in time.get_lines()] == ["builtin", "scratch"]
        assert list(time.get_lines()[1].get_xdata()) == list(LENGTHS)
        assert list(time.get_lines()[1].get_ydata()) == [length**2 / 1e5 for length in LENGTHS]
        assert list(ratio.get_lines()[1].get_ydata()) == [length / 300 for length in LENGTHS]
        assert list(memory.get_lines()[0].get_ydata()) == [64 * length / 2**20 for length in LENGTHS]
        assert {axes.get_xscale() + axes.get_yscale() for axes in (time, ratio, memory)} == {"loglog"}
        save_pictures([picture], tmp_path / "plots")
        assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
            f"{picture.name}{x}" for x in (".png", ".svg")
        ]

    def test_decoding_is_drawn_as_tokens_per_second(self) -> None:
        (picture,) = pictures(grown("generate"))
        assert picture.figure.axes[0].get_ylabel() == "tokens per second"
        assert list(picture.figure.axes[0].get_lines()[0].get_ydata()) == [1e6 / length for length in LENGTHS]

    def test_contenders_keep_their_colours(self) -> None:
        assert len(plots.COLOURS) == len(set(plots.COLOURS)) == len(plots.MARKERS) > len(CONTENDERS)
        assert plots._place("my.py:Mine") == len(plots.COLOURS) - 1

    def test_svg_holds_its_text_as_text(self) -> None:
        (picture,) = pictures(grown())
        text = svg_of(picture)
        assert text.startswith("<svg")
        assert ">peak memory, MiB</text>" in text


class Page(HTMLParser):
    """Reads a page, and asks that its elements are closed in order."""

    EMPTY = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.links: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


class TestPage:
    def test_it_is_whole_and_needs_nothing_else(self) -> None:
        rows = grown()
        page = Page(html_page(rows, list(pictures(rows))))
        assert page.tags.count("svg") == 1
        assert "script" not in page.tags
        assert all(link.startswith("#") for link in page.links)
        for shown in (
            ENVIRONMENT.torch,
            "Use scratch: 41 µs, 4.0 KiB; builtin takes 4.69 times as long",
            "× 3.41 (3.38–3.45)",
            "1 GFLOP/s, 50%",
            "64 to 1024",
            "unequal",
        ):
            assert shown in page.text
        assert Page(html_page(rows, [])).tags.count("svg") == 0

    def test_the_command_writes_it_beside_the_results(self, tmp_path: Path) -> None:
        path = tmp_path / "results.jsonl"
        append_rows(path, grown())
        result = CliRunner().invoke(app, ["report", str(path)])
        assert result.exit_code == 0, result.output
        assert "length 1024, width 512, 8 heads, float32\n  Use builtin: 3.07 ms" in result.output
        assert {x.name for x in tmp_path.iterdir()} == {"results.jsonl", "results.csv", "report.html", "plots"}
        with (tmp_path / "results.csv").open(newline="") as file:
            assert len(list(csv.DictReader(file))) == len(grown())
        elsewhere = CliRunner().invoke(app, ["report", str(path), "--output", str(tmp_path / "nowhere" / "deep")])
        assert elsewhere.exit_code == 2
        assert "must be in a folder that exists" in elsewhere.output

    def test_without_matplotlib_the_page_has_no_plots(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(rows: Sequence[Row]) -> None:
            raise ArgumentValueError("plots need matplotlib")

        monkeypatch.setattr(session, "pictures", refuse)
        append_rows(tmp_path / "results.jsonl", grown())
        result = CliRunner().invoke(app, ["report", str(tmp_path / "results.jsonl")])
        assert result.exit_code == 0
        assert "No plots: plots need matplotlib" in result.output
        assert (tmp_path / "report.html").exists()


class TestReadme:
    def test_it_is_current(self) -> None:
        message = "README's table is not that of benchmarks/results: run `python -m benchmarks readme`"
        assert readme.renewed_readme() == readme.README.read_text(encoding="utf-8"), message

    def test_the_committed_results_can_be_read(self) -> None:
        for path in sorted((readme.HERE / "results").glob("*/results.jsonl")):
            assert {row.status for row in read_rows(path)} <= {"timed", "out of memory", "unavailable"}

    def test_the_table_is_put_between_the_comments(self, tmp_path: Path) -> None:
        file, folder = tmp_path / "README.md", tmp_path / "results"
        file.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
        assert "make benchmark" in readme.renewed_readme(folder, file)
        (folder / "cpu").mkdir(parents=True)
        masked = [replace(x, case=replace(x.case, mask="causal")) for x in grown()]
        append_rows(folder / "cpu" / "results.jsonl", [*masked, *grown(), *grown("generate")[:-1]])
        text = readme.renewed_readme(folder, file)
        assert text.startswith(f"before\n{readme.BEGIN}\n{ENVIRONMENT}")
        assert text.endswith(f"{readme.END}\nafter\n")
        assert "old" not in text
        assert (
            "| attention, forward | batch 8, length 1024, width 512, 8 heads | 3.07 ms, 64 KiB | 10.5 ms, 1.0 MiB "
            "| 3.41 (3.38–3.45) | builtin |"
        ) in text

    def test_without_the_comments_it_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text("nothing\n")
        with pytest.raises(ValueError, match="must have the comments"):
            readme.renewed_readme(tmp_path, tmp_path / "README.md")

    def test_the_command_checks_and_renews(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "README.md"
        file.write_text("old")
        monkeypatch.setattr(command, "README", file)
        monkeypatch.setattr(command, "renewed_readme", lambda: "new")
        assert CliRunner().invoke(app, ["readme", "--check"]).exit_code == 1
        assert file.read_text() == "old"
        assert CliRunner().invoke(app, ["readme"]).exit_code == 0
        assert file.read_text() == "new"
        assert CliRunner().invoke(app, ["readme", "--check"]).exit_code == 0
