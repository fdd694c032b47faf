"""Tests of readme.py and aims.py: what README and the tables say is what the committed results say."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import command, readme
from benchmarks.aims import AIMS, outcomes
from benchmarks.command import app
from benchmarks.grids import Case
from benchmarks.readme import ADVICE_BEGIN, BEGIN, END, README, RESULTS, highlights, renewed
from benchmarks.results import Row, append_rows, read_rows
from benchmarks.test_reporting import ENVIRONMENT, grown, row


def beside(contender: str, microseconds: float, scratch_us: float, memory: int = 2**20, **settings: Any) -> list[Row]:
    """Make the rows of scratch and another contender in one case."""
    defaults: dict[str, Any] = {"component": "attention", "batch": 1}
    case = Case(**(defaults | settings))
    ours = row("scratch", scratch_us, scratch_us / microseconds, case=case, peak_memory_bytes=memory)
    return [row(contender, microseconds, case=case), ours]


def everything() -> list[Row]:
    """Make results that reach all aims but one, in one of two cases."""
    module: dict[str, Any] = {"component": "self_attention", "query_len": 4096, "key_len": 4096}
    long: dict[str, Any] = {"query_len": 4096, "key_len": 4096}
    decoding: dict[str, Any] = {"component": "generate", "mask": "causal", "query_len": 256, "num_layers": 2}
    return [
        *beside("torch.nn", 200.0, 150.0, 2**19, **module),
        *beside("torch.nn", 100.0, 110.0, **module | {"query_len": 1024, "key_len": 1024}),
        *beside("torch.nn", 400.0, 380.0, **module, mode="backward"),
        *beside("flash", 100.0, 110.0, **long),
        *beside("flash", 100.0, 108.0, **long, mask="causal"),
        *beside("flash", 200.0, 208.0, **long, mode="backward"),
        *beside("naive", 200.0, 150.0, mode="backward", batch=32, query_len=32, key_len=32),
        *beside("torch.nn", 100.0, 27.0, **long, mask="window", window=256),
        *beside("scratch recomputed", 900.0, 100.0, **decoding),
    ]


def test_they_are_current() -> None:
    message = "README's figures are not those of benchmarks/results: run `python -m benchmarks readme`"
    for path, text in renewed().items():
        if path.suffix == ".md":  # another matplotlib draws another plot
            assert text == path.read_text(encoding="utf-8"), message


def test_the_committed_results_can_be_read() -> None:
    for path in sorted(RESULTS.glob("*/results.jsonl")):
        assert {row.status for row in read_rows(path)} <= {"timed", "out of memory", "unavailable"}


def test_the_report_says_what_readme_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "write_report", lambda *_: None)
    (machine,) = RESULTS.glob("cpu/results.jsonl")
    command_line = ["report", str(machine), "--output", str(tmp_path)]
    printed = CliRunner().invoke(app, command_line, env={"COLUMNS": "100"}).stdout
    prompt, *shown = readme.advice_in_words(read_rows(machine), machine.relative_to(README.parent)).splitlines()[1:-1]
    assert prompt == "$ sidebyside-bench report benchmarks/results/cpu/results.jsonl"
    report = "\n".join(line.rstrip() for line in printed.splitlines())
    pieces = "\n".join(shown).split("...")
    assert [piece.strip("\n") in report for piece in pieces] == [True] * 4
    assert len(shown) > 5


def test_three_lines_say_how_fast_scratch_is() -> None:
    text = highlights(everything(), Path("results/cpu"), with_plot=True)
    assert text.splitlines() == [
        f"On {ENVIRONMENT}, 1 thread:",
        "",
        "- `MultiheadAttention` (batch 1, width 512, 8 heads, float32), lengths 1024 to 4096: 0.75 to 1.10× the time "
        "of `torch.nn` in eval and 0.95× in training; 0.50× the memory in eval at length 4096.",
        "- `scaled_dot_product_attention`, length 4096: 1.10× the time of torch's flash kernel; with a causal mask, "
        "length 4096, 1.08×; at length 4096 with a window of 256, 0.27× the time of `torch.nn`, because it skips what "
        "no query may see.",
        "- Decoding 256 tokens: 9.0 times as fast with the cache as without.",
        "",
        "![Time of scratch over time of torch.nn, against the length](results/cpu/at-a-glance.svg)",
    ]
    assert highlights(grown(), Path("cpu"), with_plot=False) == f"On {ENVIRONMENT}, 1 thread:\n"


def test_a_line_compares_scratch_with_what_people_write() -> None:
    long: dict[str, Any] = {"query_len": 4096, "key_len": 4096}
    rows = [
        *everything(),
        *beside("naive", 440.0, 110.0, **long),
        *beside("naive", 880.0, 110.0, **long, mask="causal"),
        *beside("naive", 400.0, 200.0, **long, mode="backward"),
    ]
    line = (
        "- Beside attention as it is usually written, `softmax(q @ k.T / sqrt(d)) @ v`: 0.25× its time at length 4096; "
        "with a causal mask, length 4096, 0.12×; in training, length 4096, 0.50×."
    )
    assert line in highlights(rows, Path("cpu"), with_plot=False).splitlines()


def test_what_is_not_plain_is_not_what_the_lines_are_about() -> None:
    lower = [replace(x, case=replace(x.case, dtype="bfloat16", query_len=8192)) for x in everything()]
    weights = [replace(x, case=replace(x.case, need_weights=True, query_len=8192)) for x in everything()[:6]]
    rows = [*everything(), *(x for x in lower if x.case.mask == "none"), *weights]
    assert highlights(rows, Path("cpu"), with_plot=False) == highlights(everything(), Path("cpu"), with_plot=False)


def test_the_aims_and_where_they_are_missed() -> None:
    found = {x.aim.what: x for x in outcomes(everything())}
    assert list(found) == [aim.what for aim in AIMS]
    assert {what: [case.query_len for case in x.missed] for what, x in found.items() if x.missed} == {
        "modules in eval from length 1024 on": [1024],
    }
    modules = found["modules in eval from length 1024 on"]
    assert (len(modules.ratios), modules.worst.query_len, modules.ratios[modules.worst].value) == (2, 1024, 1.1)
    memory = found["memory of modules from length 1024 on"]
    assert sorted(x.value for x in memory.ratios.values()) == [0.5, 1.0, 1.0]
    assert [x.ratios[x.worst].value for x in found.values()][3:] == pytest.approx([1.1, 1.04, 0.75, 0.27, 1 / 9])


def test_a_gpu_has_no_aims_and_a_column_for_the_kernel() -> None:
    rows = [replace(x, case=replace(x.case, device="cuda")) for x in everything()]
    kernel = replace(rows[0], contender="scratch triton", median_us=120.0)
    text = readme.tables([*rows, kernel], "gpu", with_plot=False)
    assert not list(outcomes(rows))
    assert "aims for" not in text
    (line,) = (line for line in text.splitlines() if "120 µs" in line)
    assert line.split("|")[6].startswith(" 120 µs")
    assert "| memory | `scratch triton` | fastest |" in text


@pytest.mark.parametrize(
    ("settings", "concerned"),
    [
        ({"component": "self_attention", "query_len": 1024}, [0, 2]),
        ({"component": "self_attention", "query_len": 1023}, [1]),
        ({"component": "encoder_layer", "query_len": 4096, "mode": "backward"}, [1, 2]),
        ({"component": "attention", "query_len": 512, "mask": "causal"}, [3]),
        ({"component": "attention", "query_len": 511}, []),
        ({"component": "attention", "query_len": 1024, "mode": "backward", "mask": "causal"}, [4]),
        ({"component": "attention", "query_len": 1023, "mode": "backward"}, []),
        ({"component": "attention", "query_len": 32, "batch": 32, "mode": "backward"}, [5]),
        ({"component": "attention", "query_len": 4096, "mask": "window", "window": 256}, [6]),
        ({"component": "attention", "query_len": 4096, "mask": "window", "window": 128}, []),
        ({"component": "generate", "query_len": 256}, [7]),
        ({"component": "generate", "query_len": 128}, []),
    ],
)
def test_what_an_aim_is_about(settings: dict[str, Any], concerned: Sequence[int]) -> None:
    case = Case(**settings)
    assert [place for place, aim in enumerate(AIMS) if aim.concerns(case)] == concerned


def test_the_tables_have_every_case() -> None:
    gone = row("scratch", 1.0, case=Case("attention", mask="both"), status="out of memory", median_us=None)
    rows = [*everything(), *grown(), gone]
    text = readme.tables(rows, "gpu", with_plot=False)
    assert text.startswith("## gpu\n")
    lines = text.splitlines()
    assert sum(line.startswith("| batch ") for line in lines) == len({x.case for x in rows})
    assert (
        "| batch 8, length 1024, width 512, 8 heads, float32, 1 thread | 3.07 ms, 64 KiB | 10.5 ms, 1.0 MiB "
        "| 3.41 (3.41–3.41) | 16.00 | builtin, 3.07 ms, 64 KiB |"
    ) in lines
    assert "| – | out of memory | – | – | – |" in text
    assert (
        "| modules in eval from length 1024 on | `torch.nn` | 1 | missed | 1 of 2 | 1.10 (1.10–1.10) "
        "| self attention, forward, batch 1, length 1024, width 512, 8 heads, float32, 1 thread |"
    ) in lines
    assert {line.count("|") for line in lines if line.startswith("|")} == {7, 8}
    missed = lines.index("Above 1, modules in eval from length 1024 on:")
    assert lines[missed + 2].startswith("- 1.10 (1.10–1.10): self attention, forward, batch 1, length 1024, ")
    assert text.count("\nAbove ") == 1


def test_every_goal_is_said_to_be_met_missed_or_not_measured(tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    append_rows(tmp_path / "gpu" / "results.jsonl", [x for x in everything() if x.case.component != "generate"])
    lines = list(readme.goals(tmp_path))
    assert [line.split(":")[0].strip() for line in lines] == [
        *("gpu", "missed", "1.10 (1.10–1.10)", *["met"] * 6, "not measured")
    ]
    assert lines[1] == (
        "  missed: modules in eval from length 1024 on, at most 1 of torch.nn; greatest of 2: 1.10 (1.10–1.10)"
    )
    assert lines[8] == (
        "  met: the function with a window of 256 at length 4096, at most 0.3 of torch.nn; greatest of 1: "
        "0.27 (0.27–0.27)"
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    figures = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    (tmp_path / "README.md").write_text(f"{ADVICE_BEGIN}\nold\n<!-- advice: end -->\n{figures}")
    (tmp_path / "results" / "README.md").write_text(figures)
    return tmp_path


def test_both_files_are_renewed_between_their_comments(project: Path) -> None:
    front, inner = project / "README.md", project / "results" / "README.md"
    nothing = renewed(project / "results", front)
    assert all("make benchmark" in text for text in nothing.values())
    for name in ("cpu", "gpu"):
        (project / "results" / name).mkdir()
        rows = [replace(x, environment=replace(ENVIRONMENT, processor=name)) for x in everything()]
        append_rows(project / "results" / name / "results.jsonl", rows)
    files = renewed(project / "results", front)
    assert list(files) == [front, inner]  # two lengths are no line to plot
    for text in files.values():
        assert f"before\n{BEGIN}\n" in text
        assert text.endswith(f"\n{END}\nafter\n")
        assert "old" not in text
    assert files[front].count("\n- ") == 3
    assert "gpu" not in files[front]
    assert "## cpu" in files[inner]
    assert "## gpu" in files[inner]


def test_the_plot_is_written_where_it_is_shown(project: Path) -> None:
    folder = project / "results" / "cpu"
    folder.mkdir()
    rows = [replace(x, contender=x.contender.replace("builtin", "torch.nn")) for x in grown("self_attention")]
    append_rows(folder / "results.jsonl", rows)
    files = renewed(project / "results", project / "README.md")
    assert "(results/cpu/at-a-glance.svg)" in files[project / "README.md"]
    assert "(cpu/at-a-glance.svg)" in files[project / "results" / "README.md"]
    assert files[folder / "at-a-glance.svg"].startswith("<svg")


def test_without_the_comments_it_is_refused(project: Path) -> None:
    (project / "README.md").write_text("nothing\n")
    with pytest.raises(ValueError, match="must have the comments"):
        renewed(project / "results", project / "README.md")


def test_the_command_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert README.name == "README.md"
    monkeypatch.setattr(command, "renewed", lambda: {tmp_path / "a.md": "new", tmp_path / "b.svg": "drawn"})
    assert CliRunner().invoke(app, ["readme"]).exit_code == 0
    assert [(tmp_path / name).read_text() for name in ("a.md", "b.svg")] == ["new", "drawn"]
