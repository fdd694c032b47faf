"""Tests of the page: whole, readable everywhere, and doing what its menus say, in a browser where there is one."""

import csv
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import report
from benchmarks.command import app
from benchmarks.plots import dark_rules
from benchmarks.report import html_page
from benchmarks.results import Row, append_rows
from benchmarks.test_reporting import ENVIRONMENT, grown, row
from scratch.validation import ArgumentValueError

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def several() -> list[Row]:
    """Make rows of two components, of which one has two dtypes."""
    lower = [replace(x, case=replace(x.case, dtype="bfloat16")) for x in grown()]
    return [*grown(), *lower, *grown("encoder_layer")]


class Page(HTMLParser):
    """Reads a page, and asks that its elements are closed in order."""

    EMPTY = ("meta", "br", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if not {"script", "style"} & set(self.open) else ""

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def links(self) -> list[str]:
        return [x[name] or "" for _, x in self.elements for name in ("src", "href", "xlink:href") if name in x]


def test_it_is_whole_and_needs_nothing_else() -> None:
    page = Page(html_page(grown()))
    assert len(page.attributes("svg")) == 1
    assert all(link.startswith("#") for link in page.links())
    for shown in (
        ENVIRONMENT.torch,
        "At length 1024: Use builtin: 3.07 ms, 64 KiB. The call: `builtin.scaled_dot_product_attention`. "
        "By comparison, scratch takes 3.41× the time (1.0 MiB).",
        "× 3.41 (3.38–3.45)",
        "1 GFLOP/s, 50%",
        "64 to 1024",
        "unequal",
    ):
        assert shown in page.text
    assert "{" not in page.text


def test_it_is_made_for_any_screen_and_both_schemes() -> None:
    text = html_page(grown())
    page = Page(text)
    named = {x["name"]: x["content"] for x in page.attributes("meta") if "name" in x}
    assert named == {"viewport": "width=device-width, initial-scale=1", "color-scheme": "light dark"}
    assert text.count("@media (prefers-color-scheme: dark)") == 2
    assert dark_rules() in text
    used, set_in = (set(re.findall(pattern, text)) for pattern in (r"var\((--[a-z]+)\)", r"(--[a-z]+): #"))
    assert used == set_in


def test_it_opens_with_the_most_telling_plot() -> None:
    rows = [*grown()[:2], *(replace(x, case=replace(x.case, mask="causal")) for x in grown())]
    text = html_page(rows)
    page = Page(text)
    articles = page.attributes("article")
    assert [x["data-mask"] for x in articles] == ["causal mask", "no mask"]
    chosen = [x["value"] for x in page.attributes("option") if "selected" in x]
    assert chosen == ["attention", "forward", "float32", "causal mask"]
    assert text.index("<figure>") < text.index("What to use")
    assert len(page.attributes("figure")) == 1  # a single length is no line


def test_the_menu_of_key_heads_says_what_is_usual_in_words() -> None:
    grouped = [replace(x, case=replace(x.case, component="attention", key_heads=2)) for x in grown()]
    usual = [replace(x, case=replace(x.case, component="attention")) for x in grown()]
    page = Page(html_page([*usual, *grouped]))
    assert {x["data-key_heads"] for x in page.attributes("article")} == {"as many as queries", "2"}


def test_every_setting_that_leaves_a_choice_has_a_menu() -> None:
    menus = [x["name"] for x in Page(html_page(several())).attributes("select")]
    assert menus == ["component", "mode", "dtype", "mask"]
    threads = [*several(), *(replace(x, case=replace(x.case, threads=2)) for x in grown())]
    page = Page(html_page(threads))
    assert [x["name"] for x in page.attributes("select")] == ["component", "mode", "dtype", "mask", "threads"]
    settings = [tuple(x.items()) for x in page.attributes("article")]
    assert len(settings) == len(set(settings)) == 4
    assert all(len(x) == 5 for x in settings)


def test_yours_and_texts_of_others_are_shown_as_they_are() -> None:
    mine = row("<b>/mine.py:Mine", 1.0, case=grown()[0].case, unstable="its times spread by 12%")
    odd = row("other.py:A&B", 1.0, case=grown()[0].case, status="unequal", median_us=None, detail='"<script>')
    page = Page(html_page([*grown(), mine, odd]))
    assert "mine.py:Mine" in page.text
    assert "other.py:A&B" in page.text
    assert len(page.attributes("script")) == 1
    assert "unstable: its times spread by 12%" in page.text
    assert "your own" in page.text
    headings = re.findall('<th scope="col">([^<]* / best)</th>', html_page([*grown(), mine]))
    assert headings == ["mine.py:Mine / best", "scratch / best", "builtin / best"]


def test_the_command_writes_it_beside_the_results(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_rows(path, grown())
    result = CliRunner().invoke(app, ["report", str(path)])
    assert result.exit_code == 0, result.output
    assert "float32, 1 thread\n  Use builtin: 3.07 ms" in result.output
    assert {x.name for x in tmp_path.iterdir()} == {"results.jsonl", "results.csv", "report.html", "plots"}
    with (tmp_path / "results.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(grown())
    elsewhere = tmp_path / "made" / "deep"
    assert CliRunner().invoke(app, ["report", str(path), "--output", str(elsewhere)]).exit_code == 0
    assert {x.name for x in elsewhere.iterdir()} == {"results.csv", "report.html", "plots"}
    onto = CliRunner().invoke(app, ["report", str(path), "--output", str(path)])
    assert onto.exit_code == 2
    assert "output must be a folder that can be made" in onto.output


def test_without_matplotlib_it_has_no_plots_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ArgumentValueError("plots need matplotlib")

    monkeypatch.setattr(report, "ratio_plot", refuse)
    monkeypatch.setattr("benchmarks.plots.import_matplotlib_figure", refuse)
    append_rows(tmp_path / "results.jsonl", grown())
    result = CliRunner().invoke(app, ["report", str(tmp_path / "results.jsonl")])
    assert result.exit_code == 0
    assert "No plots: plots need matplotlib" in result.output
    page = Page((tmp_path / "report.html").read_text())
    assert "There are no plots: plots need matplotlib" in page.text
    assert page.attributes("svg") == []
    assert "× 3.41" in page.text


def in_browser(page: str, script: str, folder: Path) -> Any:
    """Load a page, run a script after its own, and give what that returns."""
    ran = f"<script>document.title = JSON.stringify((() => {{ {script} }})())</script></body>"
    (folder / "page.html").write_text(page.replace("</body>", ran), encoding="utf-8")
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command = [BROWSER, *options, "--window-size=390,844", "--dump-dom", (folder / "page.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    (title,) = re.findall("<title>(.*?)</title>", shown.partition("</head>")[0], re.DOTALL)
    return json.loads(title)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium or chrome")
class TestBrowser:
    def test_menus_choose_what_is_shown(self, tmp_path: Path) -> None:
        script = """
        const articles = [...document.querySelectorAll("article")];
        const shown = () => articles.filter((x) => !x.hidden).map((x) => x.dataset.dtype);
        const menu = (name) => document.querySelector(`select[name=${name}]`);
        const choose = (name, value) => {
          menu(name).value = value;
          menu(name).dispatchEvent(new Event("change", { bubbles: true }));
          return [...shown(), ...(document.getElementById("nothing").hidden ? [] : ["nothing"])];
        };
        return [shown(), choose("dtype", "bfloat16"), choose("component", "encoder layer"), choose("dtype", ""),
          choose("component", ""), [...menu("component").options].map((x) => x.textContent)];
        """
        assert in_browser(html_page(several()), script, tmp_path) == [
            ["float32"],
            ["bfloat16"],
            ["nothing"],
            ["float32"],
            ["float32", "bfloat16", "float32"],
            ["all (3)", "attention (2)", "encoder layer (1)"],
        ]

    def test_the_table_is_sorted_and_searched(self, tmp_path: Path) -> None:
        script = """
        const table = document.getElementById("advice");
        const column = (n) => [...table.tBodies[0].rows].filter((x) => !x.hidden).map((x) => x.cells[n].textContent);
        const press = (n) => { table.tHead.rows[0].cells[n].querySelector("button").click(); return column(n); };
        const input = document.querySelector("input");
        input.value = "ENCODER 655";
        const sorted = [press(0), press(0), press(2), press(2), press(5)];
        input.dispatchEvent(new Event("input"));
        return [...sorted, column(2)];
        """
        rows = [*grown(), *grown("encoder_layer")]
        assert in_browser(html_page(rows), script, tmp_path) == [
            ["attention"] * 3 + ["encoder layer"] * 3,
            ["encoder layer"] * 3 + ["attention"] * 3,
            ["64", "64", "256", "256", "1024", "1024"],
            ["1024", "1024", "256", "256", "64", "64"],
            ["41 µs", "41 µs", "655 µs", "655 µs", "3.07 ms", "3.07 ms"],
            ["256"],
        ]

    def test_nothing_is_wider_than_a_telephone(self, tmp_path: Path) -> None:
        script = "return [document.documentElement.scrollWidth, innerWidth];"
        mine = row("a/rather/long/path/to/somebodys_own_attention.py:MultiHeadAttention", 5.0, case=grown()[0].case)
        width, screen = in_browser(html_page([*several(), mine]), script, tmp_path)
        assert width <= screen
