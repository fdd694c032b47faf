"""What pytest finds once this project is installed: two fixtures, and ``pytest --sidebyside``.

Nothing happens unless one of them is used, and torch is imported only then.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from equivalence_tests.checker.doors.discovery import READ, Candidate, candidates
from equivalence_tests.checker.doors.sandbox import Limits, Request, checked
from equivalence_tests.checker.intended import check_intended, reasons
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reporting.lines import OURS
from equivalence_tests.checker.reporting.report import Report

if TYPE_CHECKING:
    from equivalence_tests.checker.doors.watch import Watched

ANSWERS = pytest.StashKey["Answers"]()
PASS = {False: ("equal",), True: ("equal", "partial")}


@pytest.fixture
def watch_attention() -> "Callable[..., AbstractContextManager[Watched]]":
    """Watch a block of a test, which fails where an attention that ran in it computes something else than torch.

    Takes what ``equivalence_tests.watch`` takes, and ``allow_partial=True`` for what is equal as far as it ran.
    """
    watch = _imported("equivalence_tests.checker.doors.watch").watch

    @contextlib.contextmanager
    def watching(*, allow_partial: bool = False, **options: Any) -> "Iterator[Watched]":
        with watch(**options) as seen:
            yield seen
        if not seen.reports:
            pytest.fail(str(seen), pytrace=False)
        _expect_equal(seen.reports, allow_partial)

    return watching


@pytest.fixture
def assert_same_attention() -> Callable[..., None]:
    """Fail the test where what is given, a class, an instance or a function, computes something else than torch.

    Takes what ``equivalence_tests.verify`` takes, and ``allow_partial=True`` for what is equal as far as it ran.
    """
    verify = _imported("equivalence_tests.checker.verify").verify

    def assert_same(target: Any, inputs: Any = None, *, allow_partial: bool = False, **options: Any) -> None:
        found = verify(target, inputs, **options)
        _expect_equal(found if isinstance(found, list) else [found], allow_partial)

    return assert_same


def _expect_equal(reports: Sequence[Report], allow_partial: bool) -> None:
    wrong = [str(report) for report in reports if report.verdict not in PASS[allow_partial]]
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)


def _imported(name: str) -> Any:
    """Import what needs torch, unless a folder of the user's stands in the place of one of ours."""
    for package in ("scratch", "builtin"):
        spec = importlib.util.find_spec(package)
        place = spec.origin if spec is not None else None
        if place is None or not Path(place).resolve().is_relative_to(OURS):
            pytest.fail(
                f"the fixtures of sidebyside need its package {package!r}, and here that is {place or 'a folder'}: "
                "use `pytest --sidebyside` or `sidebyside verify`, which check in a process of their own",
                pytrace=False,
            )
    return importlib.import_module(name)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--sidebyside``, and what may deviate on purpose."""
    group = parser.getgroup("sidebyside")
    group.addoption("--sidebyside", action="store_true", help="check each attention in the files given, as a test")
    parser.addini("sidebyside_intended", "deviations that are intended, each as NAME=REASON", type="linelist")


def pytest_configure(config: pytest.Config) -> None:
    """Read what is intended before anything is collected."""
    if config.getoption("sidebyside"):
        try:
            intended = dict(check_intended(reasons(config.getini("sidebyside_intended"))))
        except ValueError as error:
            raise pytest.UsageError(f"sidebyside_intended: {error}") from error
        config.stash[ANSWERS] = Answers(intended, alone=hasattr(config, "workerinput"))


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Take every file that is no test, if ``--sidebyside`` is given."""
    passed_by = file_path.suffix not in READ or file_path.name.startswith("test_") or file_path.name == "conftest.py"
    if passed_by or not parent.config.getoption("sidebyside"):
        return None
    return AttentionFile.from_parent(parent, path=file_path)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember what is about to be asked, in order: one process answers all of it."""
    if session.config.getoption("sidebyside"):
        wanted = [item.request for item in session.items if isinstance(item, AttentionItem)]
        session.config.stash[ANSWERS].waiting = wanted


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process that answers."""
    if ANSWERS in config.stash:
        config.stash[ANSWERS].end()


class AttentionFile(pytest.File):
    """A file whose attentions, layers and mask builders are tests."""

    def collect(self) -> "Iterator[AttentionItem]":
        """List them by reading the file; it is not imported."""
        here = Path.cwd()
        path = self.path.relative_to(here) if self.path.is_relative_to(here) else self.path
        with contextlib.suppress(CannotCheckError):  # none in it, or no Python
            for candidate in candidates(str(path))[0]:
                yield AttentionItem.from_parent(self, name=candidate.name, candidate=candidate)


class AttentionItem(pytest.Item):
    """One attention, layer or mask builder of the user's."""

    def __init__(self, *, candidate: Candidate, **options: Any) -> None:
        super().__init__(**options)
        self.line = candidate.line
        intended = self.config.stash[ANSWERS].intended
        self.request = Request(candidate.target, kind=candidate.asked_kind, intended=intended)

    def runtest(self) -> None:
        """Fail with the report where it deviates or could not be checked; skip where it is equal as far as it ran."""
        (report,) = self.config.stash[ANSWERS].to(self.request)
        if report.verdict == "partial":
            pytest.skip("equal as far as it ran; not run: " + ", ".join(x.what for x in report.not_exercised))
        _expect_equal([report], allow_partial=False)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Name the line where it is defined."""
        return self.path, self.line - 1, f"verify {self.name}"


class Answers:
    """The process that checks, and what it is still to be asked.

    Alone, each question gets a process of its own, because other processes take their share of them.
    """

    def __init__(self, intended: dict[str, str], alone: bool) -> None:
        self.intended, self.alone = intended, alone
        self.waiting: list[Request] = []
        self.running: Iterator[list[Report]] | None = None

    def to(self, request: Request) -> list[Report]:
        """Check what is asked next; out of turn, in a process of its own."""
        if self.alone or self.waiting[:1] != [request]:
            return next(checked([request], Limits()))
        self.running = self.running or checked(list(self.waiting), Limits())
        self.waiting.pop(0)
        return next(self.running)

    def end(self) -> None:
        """Leave nothing running."""
        if self.running is not None:
            self.running.close()  # type: ignore[attr-defined]
