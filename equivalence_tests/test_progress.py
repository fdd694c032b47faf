"""A log gets a line now and then; a terminal a bar, which the tests of the commands see."""

from types import SimpleNamespace

import pytest

from equivalence_tests import progress


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter([0.0, 4.0, 12.0, 13.0, 21.9, 22.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    with progress.progress("training", 5) as advance:
        for step in ("one", "two", "three", "four"):
            advance(f"[{step}]")
        advance()
    said = capsys.readouterr()
    assert said.err == "12 s: [two] (2 of 5)\n22 s: training (5 of 5)\n"
    assert said.out == ""
