"""Tests of the pytest plugin as its users meet it: fixtures that fail a test, and files that become tests."""

import importlib
import multiprocessing
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from equivalence_tests.checker.doors import pytest_plugin
from equivalence_tests.checker.doors.sandbox import Limits, Request
from equivalence_tests.checker.reporting.findings import Exercise, Verdict
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.instruments.warm_processes import warm_context

ROOT = Path(__file__).parents[3]
Run = Callable[..., pytest.RunResult]
# Right and wrong, without and with a scale.
ATTENTION = """
from torch import nn

class Attention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.inner = nn.MultiheadAttention(d_model, num_heads, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]

def attend(query, key, value):
    return (query @ key.mT / query.size(-1) ** 0.5).softmax(-1) @ value

def attend_wrongly(query, key, value):
    return (query @ key.mT).softmax(-1) @ value
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run pytest in an empty folder, with the plugin as an installation brings it."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(model=ATTENTION)
    pytester.syspathinsert()
    return lambda *arguments: pytester.runpytest_inprocess("-p", pytest_plugin.__name__, *arguments)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[Request]]:
    """What each process is asked; they answer by the first letter of the name."""
    processes: list[list[Request]] = []
    verdicts: dict[str, Verdict] = {"e": "equal", "p": "partial", "d": "deviates", "u": "unchecked"}

    def answers(requests: Sequence[Request], limits: Limits) -> Iterator[list[Report]]:
        processes.append(list(requests))
        for request in requests:
            verdict = verdicts[request.target.rpartition(":")[2][0]]
            yield [Report(request.target, verdict=verdict, reason="as told", coverage=[Exercise("mask", False)])]

    monkeypatch.setattr(pytest_plugin, "checked", answers)
    return processes


def test_the_fixtures_pass_what_is_right_and_fail_what_is_wrong(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile("""
        import torch
        from model import Attention, attend, attend_wrongly

        def test_right(watch_attention, assert_same_attention):
            with watch_attention() as seen:
                Attention(12, 3)(torch.randn(2, 5, 12))
            assert [report.verdict for report in seen] == ["equal"]
            assert_same_attention(attend)
            assert_same_attention(attend_wrongly, intended={"scale_missing": "a test"})

        def test_wrong_in_a_block(watch_attention):
            x = torch.randn(2, 3, 5, 11)
            with watch_attention():
                attend_wrongly(x, x, x)

        def test_wrong_by_itself(assert_same_attention):
            assert_same_attention(attend_wrongly)

        def test_nothing_ran(watch_attention):
            with watch_attention():
                pass
    """)
    result = run()
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(["*DEVIATES  attend_wrongly*", "*model.py:15  *", "No attention ran while watching."])


def test_the_files_given_are_tests(pytester: pytest.Pytester, run: Run, asked: list[list[Request]]) -> None:
    names = ("equal", "partial", "deviates", "unchecked")
    bodies = (f"def {name}(query, key, value):\n    return (query @ key).softmax(-1) @ value\n" for name in names)
    pytester.makepyfile(model="\n".join(bodies), test_model="def test_it():\n    pass", other="import nothing_at_all")
    result = run("--sidebyside", "-rs", ".")
    result.assert_outcomes(passed=2, skipped=1, failed=2)
    result.stdout.fnmatch_lines(["SKIPPED*not run: mask"])
    (in_order,) = asked
    assert [request.target for request in in_order] == [f"model.py:{name}" for name in names]
    pytester.makeini("[pytest]\nsidebyside_intended =\n    scale_missing=as T5")
    run("--sidebyside", "-k", "deviates or equal", "model.py").assert_outcomes(passed=1, failed=1, deselected=2)
    assert [(request.target, request.intended) for request in asked[1]] == [
        (f"model.py:{name}", {"scale_missing": "as T5"}) for name in ("equal", "deviates")
    ]


def test_each_process_of_xdist_asks_only_for_its_share(asked: list[list[Request]]) -> None:
    answers = pytest_plugin.Answers({}, alone=True)
    answers.waiting = [Request("model.py:deviates"), Request("model.py:equal")]
    assert answers.to(Request("model.py:equal"))[0]
    assert asked == [[Request("model.py:equal")]]


def test_a_process_of_its_own_tells_what_is_wrong(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    context = warm_context()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    (result := run("--sidebyside", "-k", "attend_wrongly", "model.py")).assert_outcomes(failed=1, deselected=2)
    result.stdout.fnmatch_lines(["*The scores are not scaled*", "*model.py:15*"])


def test_what_is_intended_is_read_before_the_work(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makeini("[pytest]\nsidebyside_intended = scale_mising=as T5")
    assert run("--sidebyside").stderr.str().strip() == (
        "ERROR: sidebyside_intended: intended must name deviations that the checker knows, got 'scale_mising'; "
        "is it 'scale_missing'?"
    )


def test_a_package_of_the_users_in_the_place_of_ours_is_named(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.mkpydir("scratch")
    pytester.makepyfile("def test_it(assert_same_attention):\n    pass")
    for name in [name for name in sys.modules if name.partition(".")[0] == "scratch"]:
        monkeypatch.delitem(sys.modules, name)
    result = run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*need its package 'scratch', and here that is *__init__.py: use*"])


def test_it_is_off_and_light_unless_used(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile("def test_it():\n    pass")
    run(".").assert_outcomes(passed=1)
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert importlib.import_module(named["sidebyside"]) is pytest_plugin
    code = f"import sys, {named['sidebyside']}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"
