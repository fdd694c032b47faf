"""parametrize_with_checks: every check of an attention as a pytest item of its own."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from equivalence_tests.checker.engine.checks import all_checks
from equivalence_tests.checker.reach.subject import Adapter
from equivalence_tests.checker.reporting.findings import CheckResult
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.verify import verify


def parametrize_with_checks(
    targets: Sequence[Any],
    *,
    adapter: Adapter | None = None,
    expected_failures: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a pytest decorator that runs every check of every target as an item ``target-check_name``.

    Args:
        targets: What ``verify`` takes.
        adapter: For all of them.
        expected_failures: Names of checks that may fail, and of deviations on purpose, each with its reason.

    Returns:
        ``pytest.mark.parametrize`` over one argument, ``check``: a function without arguments.

    The model is scikit-learn's ``parametrize_with_checks``.

    >>> @parametrize_with_checks([MyAttention])  # doctest: +SKIP
    ... def test_my_attention(check):
    ...     check()
    """
    import pytest

    items, ids = [], []
    for target in targets:
        label = target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)
        made = cache(partial(verify, target, adapter=adapter, intended=expected_failures))
        for name in ("diagnosis", *all_checks()):
            items.append(partial(_ask, name, made))
            ids.append(f"{label}-{name}")
    return pytest.mark.parametrize("check", items, ids=ids)


def _ask(name: str, made: Callable[[], Report]) -> None:
    """Pass, fail or skip as one check of a report did; the report is made once for all of them."""
    import pytest

    report = made()
    if report.verdict == "unchecked":
        raise AssertionError(f"could not be checked: {report.reason}")
    result = next((check for check in report.checks if check.name == name), CheckResult(name, "passed"))
    if name == "diagnosis":
        result = CheckResult(name, "failed" if report.findings else "passed", ", ".join(report.mistakes))
    if result.outcome in ("skipped", "expected"):
        pytest.skip(result.detail)
    if result.outcome == "failed":
        raise AssertionError(f"{result.detail}\n\n{report}")
