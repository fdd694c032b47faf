"""parametrize_with_checks: every check of an attention as a pytest item of its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from equivalence_tests.checker.engine.checks import attention_checks
from equivalence_tests.checker.reach.subject import Adapter
from equivalence_tests.checker.reporting.findings import CheckResult
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.verify import verify

__all__ = ["parametrize_with_checks"]


class _Item:
    """One check of one target; the report is made once for all of them."""

    def __init__(self, name: str, make: Callable[[], Report], shared: dict[str, Report]) -> None:
        self.name, self.make, self.shared = name, make, shared

    def __call__(self) -> None:
        if "report" not in self.shared:
            self.shared["report"] = self.make()
        report = self.shared["report"]
        if report.verdict == "unchecked":
            raise AssertionError(f"could not be checked: {report.reason}")
        result = next((c for c in report.checks if c.name == self.name), CheckResult(self.name, "passed"))
        if self.name == "diagnosis":
            result = CheckResult("diagnosis", "failed" if report.findings else "passed", ", ".join(report.mistakes))
        if result.outcome in ("skipped", "expected"):
            import pytest

            pytest.skip(result.detail)
        if result.outcome == "failed":
            raise AssertionError(f"{result.detail}\n\n{report}")


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
        expected_failures: Names of checks that may fail, each with its reason; they are skipped with it.

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
        shared: dict[str, Report] = {}
        label = target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)

        def make(target: Any = target) -> Report:
            return verify(target, adapter=adapter, expected_failures=expected_failures)

        for name in ("diagnosis", *(check.__name__ for check in attention_checks())):
            items.append(_Item(name, make, shared))
            ids.append(f"{label}-{name}")
    return pytest.mark.parametrize("check", items, ids=ids)
