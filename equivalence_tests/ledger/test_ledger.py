"""The ledger says what changed, and nothing where nothing did."""

from pathlib import Path

from equivalence_tests.checker.reporting.findings import Exercise, Finding, Proof
from equivalence_tests.checker.reporting.lines import CodeLine
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.ledger.comparing import changes, kept, read, written
from equivalence_tests.ledger.recording import Recorder, row_of

LINE = CodeLine("theirs.py", 7, "scores = q @ k.mT")
FINDING = Finding("scale_missing", "scale", "It is not scaled.", stack=(LINE,), proof=Proof(1e-15, 0.4, 20))
REPORT = Report("theirs.py:A", verdict="deviates", findings=[FINDING], coverage=[Exercise("mask", False, "why")])
ROW = row_of("a 1", REPORT, 0.123)


def test_a_row_holds_what_a_report_says() -> None:
    assert ROW["found"] == ["scale_missing, proven, `scores = q @ k.mT`"]
    assert (ROW["verdict"], ROW["not_run"], ROW["seconds"]) == ("deviates", ["mask"], 0.12)


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    written(tmp_path / "ledger.jsonl", {"a 1": ROW})
    assert read(tmp_path / "ledger.jsonl") == {"a 1": ROW}
    assert read(tmp_path / "missing.jsonl") == {}


def test_what_is_new_gone_or_other_is_told() -> None:
    other = {**ROW, "found": ["scale_missing, not proven, `scores = q @ k.mT`"], "seconds": 9.0}
    assert [*changes({"a": ROW, "b": ROW}, {"b": other, "c": ROW})] == [
        "a: gone, was 'deviates'",
        f"b: found {ROW['found']} -> {other['found']}",
        f"c: new, is 'deviates' {ROW['found']}",
    ]
    assert [*changes({"a": ROW}, {"a": {**ROW, "seconds": 9.0}})] == []


def test_a_row_is_written_anew_where_it_changed_or_took_much_longer() -> None:
    slower, other = {**ROW, "seconds": 0.3}, {**ROW, "verdict": "equal"}
    assert kept({"a": ROW}, {"a": slower})["a"] is slower
    assert kept({"a": ROW}, {"a": other})["a"] is other
    assert kept({"a": ROW}, {"a": {**ROW, "seconds": 0.13}})["a"] is ROW


def test_only_the_outermost_report_is_written_down(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    inner = recorder.recorded(lambda: [REPORT, REPORT])
    assert recorder.recorded(lambda: inner()[:1])() == [REPORT]
    assert [*read(recorder.path)] == [" 1"]
