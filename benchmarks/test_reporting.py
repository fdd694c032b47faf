"""Tests of advice, growth, tables and plots, on rows whose numbers are made up."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks import plots
from benchmarks.advice import advice_by_case, fastest
from benchmarks.contenders import CONTENDERS
from benchmarks.environment import environment_of
from benchmarks.grids import Case
from benchmarks.growth import growths, series_by_length
from benchmarks.plots import at_a_glance, dark_rules, ratio_plot, save_pictures
from benchmarks.results import Row
from benchmarks.summarising import ratio_in_turns
from benchmarks.summary import summary
from benchmarks.tables import result_tables, short_names, time_in_words

ENVIRONMENT = environment_of(torch.device("cpu"))
LENGTHS = (64, 256, 1024)
CALL = "The call: `builtin.scaled_dot_product_attention`."


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


def advice(rows: Sequence[Row]) -> str:
    (found,) = advice_by_case(rows)
    return str(found)


class TestAdvice:
    def test_what_migrating_to_torch_would_gain_is_said(self) -> None:
        case = Case("self_attention", query_len=1024, key_len=1024)
        mine, same = row("old/my.py:Mine", 340.0, case=case), row("old/my.py:Mine in torch", 100.0, case=case)
        printed = "at length 1024, with the same numbers; print it with sidebyside verify old/my.py:Mine --equivalent."
        assert f" my.py:Mine in torch is 3.4 times as fast {printed}" in advice([mine, same])
        slower = replace(same, median_us=680.0, rounds_us=(680.0,) * 3)
        assert f" my.py:Mine in torch takes 2.00× the time {printed}" in advice([mine, slower])
        alike = replace(same, median_us=330.0, rounds_us=(330.0,) * 3)
        assert f" my.py:Mine in torch is as fast {printed}" in advice([mine, alike])
        none = replace(same, status="unavailable", median_us=None, rounds_us=(), detail="no program could be made")
        assert advice([mine, none]).endswith(" my.py:Mine in torch was not timed: no program could be made.")

    def test_the_fastest_is_named_with_what_the_others_cost(self) -> None:
        rows = [row("builtin", 200.0), row("scratch", 300.0, peak_memory_bytes=2**21), row("flex", 100.0)]
        assert advice(rows) == (
            "Use torch's flex attention, compiled (flex): 100 µs, 1.0 MiB. The call: `torch.compile(flex_attention)`. "
            "By comparison, builtin takes 2.00× the time "
            "(1.0 MiB), scratch takes 3.00× the time (2.0 MiB)."
        )

    def test_a_path_that_is_switched_off_cannot_be_read_against_itself(self) -> None:
        text = advice([row("builtin", 200.0), row("plain path", 100.0)])
        assert text.startswith(
            "Use torch.nn with its fast path switched off (plain path): 100 µs, 1.0 MiB. "
            "The call: `torch.backends.mha.set_fastpath_enabled(False)`."
        )
        assert not any(name.startswith(("no ", "not ", "without ")) for name in CONTENDERS)

    def test_yours_against_the_best_comes_first(self) -> None:
        mine = row("/home/me/mine.py:Mine", 250.0)
        rows = [row("builtin", 200.0), row("scratch", 300.0), row("flash", 100.0), mine]
        best = "flash, the best of the others (100 µs, 1.0 MiB)"
        others = "Against flash, builtin takes 2.00× the time (1.0 MiB), scratch takes 3.00× the time (1.0 MiB)."
        assert advice(rows) == f"mine.py:Mine takes 250 µs, 1.0 MiB: 2.50× the time of {best}. {others}"
        faster = row("/home/me/mine.py:Mine", 50.0)
        assert advice([*rows[:3], faster]).startswith(f"mine.py:Mine takes 50 µs, 1.0 MiB: 0.50× the time of {best}.")
        same = row("/home/me/mine.py:Mine", 110.0, rounds_us=(90.0, 110.0, 130.0))
        assert advice([*rows[:3], same]).startswith(
            f"mine.py:Mine takes 110 µs, 1.0 MiB: within the noise as fast as {best}."
        )

    def test_each_of_yours_has_its_sentence(self) -> None:
        wrong = row("new/mine.py:Mine", 1.0, status="unequal", median_us=None, rounds_us=())
        text = advice([row("builtin", 100.0), row("old/mine.py:Mine", 250.0), wrong])
        assert text.startswith("old/mine.py:Mine takes 250 µs, 1.0 MiB: 2.50× the time of builtin")
        assert "new/mine.py:Mine was not timed, because its numbers differ; builtin takes 100 µs, 1.0 MiB." in text
        assert advice([replace(wrong, contender="a.py:A")]) == "a.py:A was not timed, because its numbers differ."
        assert advice([row("a.py:A", 7.0)]) == "a.py:A takes 7 µs, 1.0 MiB."

    def test_what_people_have_is_kept_to_where_others_are_hardly_faster(self) -> None:
        rows = [row("builtin", 104.0), row("scratch", 101.0), row("math", 100.0)]
        assert fastest(rows) == rows[0]
        assert advice(rows) == f"Use builtin: 104 µs, 1.0 MiB. {CALL} By comparison, scratch is as fast (1.0 MiB)."
        assert fastest([row("builtin", 106.0), *rows[1:]]) == rows[1]
        assert fastest([*rows, row("torch.nn", 104.5)]) == row("torch.nn", 104.5)

    def test_no_one_is_called_faster_or_slower_where_that_may_be_noise(self) -> None:
        noisy = row("builtin", 140.0, rounds_us=(90.0, 140.0, 190.0))
        rows = [noisy, row("scratch", 150.0, rounds_us=(90.0, 150.0, 190.0)), row("math", 100.0)]
        assert fastest(rows) == noisy
        by_hand = row("scratch", 170.0, rounds_us=(85.0, 170.0, 230.0))
        assert advice([noisy, by_hand]) == (
            f"Use builtin: 140 µs, 1.0 MiB. {CALL} By comparison, scratch is as fast within the noise (1.0 MiB)."
        )

    def test_nothing_is_recommended_where_the_times_say_nothing(self) -> None:
        noisy = row("scratch", 150.0, rounds_us=(70.0, 150.0, 190.0))
        assert advice([row("builtin", 140.0), noisy, row("flash", 300.0)]) == (
            "No recommendation: scratch takes 0.50 to 1.36 times as long as builtin (140 µs), so the times vary too "
            "much to choose. Measure this case again when nothing else runs."
        )
        page = Console(width=80, record=True)
        page.print(summary([row("builtin", 140.0), noisy]))
        shown = page.export_text()
        assert [line.split()[2] for line in shown.splitlines() if "forward" in line] == ["undecided"]
        assert "undecided: the times vary too much to choose" in shown

    def test_the_one_to_use_is_never_shown_as_much_slower_than_another_of_its_kind(self) -> None:
        slow = row("torch.nn", 198.0, rounds_us=(120.0, 198.0, 250.0))
        fast = row("builtin", 130.0, rounds_us=(110.0, 130.0, 260.0))
        assert fastest([slow, fast]) == fast

    def test_what_slows_whole_rounds_hides_no_difference(self) -> None:
        rows = [
            row("builtin", 240.0, rounds_us=(120.0, 240.0, 600.0)),
            row("flash", 200.0, rounds_us=(100.0, 200.0, 500.0)),
        ]
        assert fastest(rows) == rows[1]
        apart = replace(rows[1], environment=replace(ENVIRONMENT, measured_at="later"))
        assert fastest([rows[0], apart]) == rows[0]

    def test_what_was_not_timed_is_said(self) -> None:
        gone = row("scratch", 1.0, status="out of memory", median_us=None)
        assert advice([row("builtin", 100.0), gone]) == (
            f"Use builtin: 100 µs, 1.0 MiB. {CALL} By comparison, scratch ran out of memory, or was ended by the "
            "system."
        )
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
    def shown(self, rows: Sequence[Row], capsys: pytest.CaptureFixture[str], width: int = 80) -> str:
        Console(width=width, highlight=False).print(*result_tables(rows))
        return capsys.readouterr().out

    def test_cells_growth_and_problems_are_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = self.shown(grown(), capsys)
        for shown in (
            "length 64",
            "× 0.85",
            "× 3.41",
            "UNEQUAL",
            "builtin 1.00, scratch 2.00",
            "flash, length 64, unequal: output[0]",
        ):
            assert shown in text
        assert max(map(len, text.splitlines())) <= 80

    def test_what_differs_in_threads_alone_is_told_apart(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = self.shown([replace(x, case=replace(x.case, threads=n)) for n in (1, 2) for x in grown()], capsys, 150)
        lines = [line for line in text.splitlines() if line.startswith(" length ") or "to the power" in line]
        assert len(set(lines)) == 8
        assert [sum(word in line for line in lines) for word in ("1 thread", "2 threads")] == [4, 4]

    def test_a_cell_that_is_unstable_says_so_and_why(self, capsys: pytest.CaptureFixture[str]) -> None:
        rows = grown()
        rows[1] = replace(rows[1], unstable="its times spread by 30%")
        text = self.shown(rows, capsys)
        assert text.count("unstable") == 2
        assert "unstable, length 64: scratch (its times spread by 30%)" in text

    @pytest.mark.parametrize("seed", range(50))
    def test_a_printed_ratio_is_that_of_the_printed_times(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        ours, theirs = generator.lognormal(0, 0.3, (2, 7)) * 10.0 ** generator.integers(0, 7, (2, 1))
        printed = []
        for times in (ours, theirs):
            number, unit = time_in_words(float(np.median(times))).split()
            printed.append(float(number) * {"µs": 1.0, "ms": 1e3, "s": 1e6}[unit])
        ratio = ratio_in_turns(ours.tolist(), theirs.tolist())
        assert printed[0] / printed[1] == pytest.approx(ratio.value, rel=0.0101)  # three digits, of both
        assert ratio.low <= ratio.value <= ratio.high

    def test_yours_have_a_column_each(self, capsys: pytest.CaptureFixture[str]) -> None:
        names = ["old/mine.py:Mine", "new/mine.py:Mine", "/somewhere/else/other.py:Mine"]
        assert list(short_names(names).values()) == [*names[:2], "other.py:Mine"]
        text = self.shown([*grown(), *(row(name, 5.0, case=grown()[0].case) for name in names)], capsys, 120)
        head = next(line for line in text.splitlines() if "builtin" in line)
        assert head.split()[:5] == ["builtin", "other.py:Mine", "new/mine.py:Mine", "old/mine.py:Mine", "scratch"]
        narrow = self.shown([*grown(), *(row(name, 5.0, case=grown()[0].case) for name in names)], capsys, 60)
        assert "…" not in narrow

    def test_a_cell_without_a_result_says_why(self, capsys: pytest.CaptureFixture[str]) -> None:
        case = Case("self_attention")
        rows = [row(name, 5.0, case=case) for name in ("builtin", "scratch", "math")]
        text = self.shown([*rows, row("builtin", 5.0, case=replace(case, need_weights=True))], capsys, 160)
        assert "  – math: torch chooses no kernel here" in text
        assert "  – scratch: it was not measured" in text
        assert all(x.call and (x.otherwise or name in ("builtin", "scratch")) for name, x in CONTENDERS.items())

    def test_a_problem_says_where_it_is_unless_it_is_everywhere(self, capsys: pytest.CaptureFixture[str]) -> None:
        rows = grown()
        rows = [*rows, *(row("/a/mine.py:Mine", 5.0, case=x.case, unstable="so") for x in rows[:1])]
        everywhere = [replace(x, contender="flex", status="unavailable", detail="no compiler") for x in rows[::2]]
        text = self.shown([*rows, *everywhere], capsys, 120)
        assert "  unstable, length 64: mine.py:Mine (so)" in text
        assert text.count("no compiler") == 1
        assert "  flex, unavailable: no compiler" in text


def texts(svg: str) -> list[str]:
    return [x.text or "" for x in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


class TestPlots:
    def test_a_file_for_what_was_measured_at_three_lengths(self, tmp_path: Path) -> None:
        short = [replace(x, case=replace(x.case, mask="causal")) for x in grown()[:4]]
        folder = tmp_path / "plots"
        folder.mkdir()
        (folder / "of-an-earlier-run.svg").write_text("")
        assert save_pictures(grown() + short, folder) == 1
        (path,) = folder.iterdir()
        assert path.name == "attention-forward-batch-8-width-512-8-heads-float32-1-thread.svg"
        shown = texts(path.read_text())
        assert {"builtin", "scratch", "64", "256", "1024", "time, ms", "peak memory, MiB"} <= set(shown)
        assert "flash" not in shown

    def test_no_empty_folder_is_left_where_nothing_can_be_drawn(self, tmp_path: Path) -> None:
        assert save_pictures(grown()[:4], tmp_path / "plots") == 0
        assert not (tmp_path / "plots").exists()

    def test_what_is_drawn(self) -> None:
        series = list(series_by_length(grown()))
        figure = plots._plot("", series, (plots.TIME, plots.RATIO, plots.MEMORY), (9, 3), short_names(CONTENDERS))
        time, ratio, memory = figure.axes
        assert [line.get_label() for line in time.get_lines()] == ["builtin", "scratch"]
        assert list(time.get_lines()[1].get_xdata()) == list(LENGTHS)
        assert list(time.get_lines()[1].get_ydata()) == [length**2 / 1e5 for length in LENGTHS]
        assert list(ratio.get_lines()[1].get_ydata()) == [length / 300 for length in LENGTHS]
        assert list(memory.get_lines()[0].get_ydata()) == [64 * length / 2**20 for length in LENGTHS]
        assert {axes.get_xscale() + axes.get_yscale() for axes in (time, ratio, memory)} == {"loglog"}

    @pytest.mark.parametrize(
        ("name", "value"), [("threads", 2), ("dtype", "bfloat16"), ("batch", 1), ("device", "cuda")]
    )
    def test_no_picture_overwrites_that_of_another_setting(self, name: str, value: Any, tmp_path: Path) -> None:
        other = [replace(x, case=replace(x.case, **{name: value})) for x in grown()]
        assert save_pictures([*grown(), *other], tmp_path) == len(list(tmp_path.iterdir())) == 2

    def test_a_small_difference_looks_small(self) -> None:
        rows = [replace(x, ratio_to_builtin=1.01, ratio_low=1.0, ratio_high=1.02) for x in grown()]
        (axes,) = plots._plot("", list(series_by_length(rows)), (plots.RATIO,), (4, 3), short_names(CONTENDERS)).axes
        assert axes.get_ylim() == (0.8, 1.25)
        (wide,) = plots._plot("", list(series_by_length(grown())), (plots.RATIO,), (4, 3), short_names(CONTENDERS)).axes
        assert wide.get_ylim()[0] < 0.3
        assert wide.get_ylim()[1] > 3.4

    def test_decoding_is_drawn_as_tokens_per_second(self, tmp_path: Path) -> None:
        save_pictures(grown("generate"), tmp_path)
        (path,) = tmp_path.iterdir()
        assert "tokens per second" in texts(path.read_text())

    def test_contenders_keep_their_colours(self) -> None:
        light, dark = zip(*plots.COLOURS, strict=True)
        assert len(set(light)) == len(set(dark)) == len(plots.COLOURS) == len(plots.MARKERS) > len(CONTENDERS) + 1
        some, all_of_them = plots._places(["scratch", "a.py:A"]), plots._places([*CONTENDERS, "a.py:A", "b.py:B"])
        assert some["scratch"] == all_of_them["scratch"]
        assert len(set(all_of_them.values())) == len(CONTENDERS) + 2
        many = plots._places([f"a.py:A{number}" for number in range(40)])
        assert set(many.values()) == set(range(len(CONTENDERS), len(plots.COLOURS)))

    def test_every_colour_has_one_for_the_dark(self) -> None:
        svg = ratio_plot(list(series_by_length(grown())), short_names(CONTENDERS))
        replaced = set(re.findall(r'style\*="(?:fill|stroke): (#[0-9a-f]{6})"', dark_rules()))
        assert set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svg)) <= replaced
        assert "prefers-color-scheme" not in svg  # the page has the rules
        assert "prefers-color-scheme: dark" in at_a_glance(beside_torch())

    def test_two_plots_of_a_page_share_no_names(self) -> None:
        first, second = (
            ratio_plot(list(series_by_length(rows)), short_names(CONTENDERS)) for rows in (grown(), grown("generate"))
        )
        ids = [{x for x in re.findall(r'id="(\w+)"', svg) if re.match("[mp][0-9a-f]{8}", x)} for svg in (first, second)]
        assert ids[0]
        assert not ids[0] & ids[1]

    def test_scratch_at_a_glance(self) -> None:
        shown = texts(at_a_glance(beside_torch()))
        assert {"self attention, forward", "time of scratch / time of torch.nn", "256"} <= set(shown)
        assert "batch 8, width 512, 8 heads, float32, 1 thread" in shown
        assert at_a_glance(beside_torch()[: len(grown())]) == at_a_glance(beside_torch())
        assert at_a_glance(grown()) == ""
        several = [*beside_torch(), *(replace(x, case=replace(x.case, threads=2)) for x in beside_torch())]
        shown = texts(at_a_glance(several))
        assert {"self attention, forward, 1 thread", "self attention, forward, 2 threads"} <= set(shown)
        assert "batch 8, width 512, 8 heads, float32" in shown

    def test_the_same_rows_give_the_same_file(self) -> None:
        assert at_a_glance(beside_torch()) == at_a_glance(beside_torch())


def beside_torch() -> list[Row]:
    """Put torch.nn in the place of the built-in; then the same under a mask."""
    rows = [replace(x, contender=x.contender.replace("builtin", "torch.nn")) for x in grown("self_attention")]
    return [*rows, *(replace(x, case=replace(x.case, mask="causal")) for x in rows)]
