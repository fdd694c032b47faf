"""How many examples hypothesis draws, what a run need not pay for, and the table at its end.

The default profile draws new examples in every run; those that fail stay in ``.hypothesis`` and are tried first in the
next run. ``HYPOTHESIS_PROFILE=ci pytest`` draws the same ones in every run, ``HYPOTHESIS_PROFILE=thorough`` ten times
as many.
"""

import gc
import os
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from rich.console import Console

from equivalence_tests.twins.properties import Ledger, Tally

EXAMPLES = 15
COMMON: dict[str, Any] = {
    "deadline": None,
    # A case is many small draws, and is drawn slowly on a machine that is busy.
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "print_blob": True,
}
settings.register_profile("default", max_examples=EXAMPLES, **COMMON)
settings.register_profile("ci", max_examples=EXAMPLES, derandomize=True, **COMMON)
# The same examples for every mutant, and no search for the smallest one that fails.
settings.register_profile(
    "mutants", max_examples=EXAMPLES, derandomize=True, phases=[Phase.explicit, Phase.generate], **COMMON
)
settings.register_profile("thorough", max_examples=10 * EXAMPLES, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# For each kind of device that is not there, torch.manual_seed writes the whole stack down, sixty frames deep in a test.
DEVICES: list[Any] = [torch.cuda, torch.xpu, torch.mtia]
for devices in DEVICES:
    if not devices.is_available():
        devices.manual_seed_all = lambda _: None

# Twelve thousand tests stay till the end: the garbage collector need not look at them while they are made, nor later.
gc.disable()

LEDGER = pytest.StashKey[Ledger]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEDGER] = Ledger()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave all but every n-th case of a test that is marked ``sampled(n)`` to the thorough run."""
    seen = Counter[str]()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % sampled.args[0]:
                item.add_marker("thorough")
            seen[test] += 1


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def ledger(pytestconfig: pytest.Config) -> Ledger:
    """Where the property tests count what they saw."""
    return pytestconfig.stash[LEDGER]


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist, which hands its numbers over
        tallies = session.config.stash[LEDGER].tallies
        session.config.workeroutput["properties"] = [[*key, *tally] for key, tally in tallies.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    for component, name, *numbers in getattr(node, "workeroutput", {}).get("properties", []):
        node.config.stash[LEDGER].add(component, name, Tally(*numbers))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = config.stash[LEDGER]
    if found.tallies:
        console = Console(width=max(80, terminalreporter._tw.fullwidth), force_terminal=False)
        with console.capture() as capture:
            console.print(found.table())
        terminalreporter.write_line(capture.get())
