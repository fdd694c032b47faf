"""Run the tests that look at a file against each of its mutants, each in a process of its own.

torch is imported once: every mutant is a fork of this process, in which one module is imported from the broken code.
"""

import importlib.abc
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal

import pytest
import torch._dynamo  # noqa: F401  slow to import: once here, not in every fork

import scratch
from equivalence_tests.mutation.breaking import Mutant

__all__ = ["ROOT", "TESTS", "Verdict", "run_mutants", "tests_of", "time_of_whole_code"]

ROOT = Path(scratch.__file__).parents[1]
PROJECT = ("scratch", "builtin", "equivalence_tests")
Verdict = Literal["killed", "timed out", "survived"]

ATTENTION = ["property_edges", "layers", "functional", "property_invariants", "attention", "errors", "properties"]
LAYERS = ["layers", "property_edges", "transformer", "errors", "parity", "decoding", "properties", "seq2seq"]
REFUSED = ["errors", "property_edges"]
SIGNATURES = "parity::TestTwins::test_signatures_are_equal_annotations_included"
# The tests that look at a file, quick ones first; the examples in its docstrings go before them. Where the tests are
# slow, one class or function of them is named.
TESTS = {
    "functional.py": ATTENTION,
    "paths.py": ["functional", "tiling", "recording", "flex", *ATTENTION],
    "rounding.py": ATTENTION,
    "documentation.py": ["parity::TestTwins", "parity::TestDocstrings"],
    "sdpa.py": [*ATTENTION, "tiling::TestFunction"],
    "tiling.py": ["tiling"],
    "masks.py": ["masks", "property_edges", "errors", "functional", "attention", "properties", "seq2seq"],
    "attention.py": ["attention", "decoding", *ATTENTION, "tiling::TestModule", "parity"],
    "layers.py": LAYERS,
    "transformer.py": ["transformer", *LAYERS],
    "positional.py": ["positional", "property_edges", "errors", "parity", "seq2seq"],
    "seq2seq.py": ["errors", "property_edges", "parity", "seq2seq", "decoding"],
    "decoding.py": ["decoding", "property_edges", "decoder_only", "errors", "seq2seq"],
    "caches.py": ["decoding", "property_edges", "grouped", "errors", "seq2seq"],
    "recording.py": ["recording", "errors", "property_edges"],
    "norms.py": ["norms", SIGNATURES],
    "rotary.py": ["rotary", SIGNATURES],
    "score_functions.py": ["score_functions", "errors"],
    "flex.py": ["flex", "score_functions", SIGNATURES, "errors"],
    "block_masks.py": ["flex", "score_functions", SIGNATURES, "errors"],
    "mask_functions.py": ["flex", "score_functions", SIGNATURES, "errors"],
    "varlen.py": ["varlen", SIGNATURES, "errors"],
    "grouped.py": ["grouped", SIGNATURES],
    "decoder_only.py": ["decoder_only", SIGNATURES],
    "parallel.py": ["parallel"],
    "validation/basics.py": [*REFUSED, "masks", "positional", "translation::TestTraining", "seq2seq::TestErrors"],
    "validation/masks.py": [*REFUSED, "masks"],
    "validation/attention.py": [*REFUSED, "decoding::TestCaches"],
    "validation/sdpa.py": [*REFUSED, "functional"],
    "validation/layers.py": [*REFUSED, "decoding::TestCaches"],
    "validation/positional.py": [*REFUSED, "positional"],
    "validation/norms.py": ["errors", "norms"],
    "validation/rotary.py": ["errors", "rotary"],
    "validation/score_functions.py": ["errors", "score_functions"],
    "validation/flex.py": ["errors", "flex"],
    "validation/varlen.py": ["errors", "varlen"],
    "validation/grouped.py": ["errors", "grouped", "parallel"],
    "validation/tokens.py": [
        *REFUSED,
        "seq2seq::TestErrors",
        "seq2seq::TestCache::test_a_target_without_new_tokens_is_refused",
        "seq2seq::TestGenerate::test_the_last_position_is_used",
        "decoding::TestCaches",
        "decoding::TestBeamSearch::test_bad_arguments_are_named",
    ],
    "validation/recording.py": [
        "recording::test_models_that_cannot_be_recorded_are_refused",
        "recording::test_compiled_models_are_refused_and_compiled_parts_without_attention_are_not",
        "recording::test_shared_repeated_and_idle_modules",
        "recording::test_trace_refuses_what_it_cannot_read",
        "plotting",
        "command_line::test_errors_are_one_line_and_status_2",
    ],
    "validation/task.py": [
        "translation::TestVocabulary",
        "translation::TestPairsFile",
        "translation::TestBatch",
        "translation::TestTraining::test_settings_out_of_range_are_refused",
        "translation::TestTraining::test_settings_in_range_are_taken",
        "translation::TestCheckpoint",
        "plotting",
        "command_line::test_errors_are_one_line_and_status_2",
        "command_line::test_options_without_effect_are_refused",
        "command_line::test_plots_are_written",
        "command_line::test_resuming_adds_epochs",
    ],
}


def tests_of(file: Path) -> list[str]:
    """Name what is run for a file of ``scratch``: the examples in its docstrings, and the tests that look at it."""
    names = (name.partition("::") for name in dict.fromkeys(TESTS[file.relative_to(ROOT / "scratch").as_posix()]))
    return [
        str(file.relative_to(ROOT)),
        *(f"equivalence_tests/twins/test_{stem}.py{colons}{part}" for stem, colons, part in names),
    ]


def time_of_whole_code(file: Path) -> float:
    """Give the seconds that the tests of a file take while nothing is broken.

    Raises:
        RuntimeError: If a test fails already.
    """
    before = time.monotonic()
    process = _FORK.Process(target=_test, args=(file, None, 0))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"{file.name}: tests fail before anything is broken: pytest {' '.join(tests_of(file))}")
    return time.monotonic() - before


def run_mutants(
    file: Path, mutants: Sequence[Mutant], jobs: int, timeout_seconds: int
) -> Iterator[tuple[Mutant, Verdict]]:
    """Test every mutant of a file, several at a time, and give each verdict as it falls."""
    waiting = list(reversed(mutants))
    running: dict[Any, tuple[BaseProcess, Mutant]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            broken = _FORK.Process(target=_test, args=(file, mutant.code, timeout_seconds))
            broken.start()
            running[broken.sentinel] = broken, mutant
        for sentinel in multiprocessing.connection.wait(list(running)):
            process, mutant = running.pop(sentinel)
            process.join()
            yield mutant, _verdict(process.exitcode)


_FORK = multiprocessing.get_context("fork")


def _verdict(exit_code: int | None) -> Verdict:
    if exit_code == -signal.SIGALRM:
        return "timed out"
    return "survived" if exit_code == 0 else "killed"


def _test(file: Path, code: CodeType | None, timeout_seconds: int) -> None:
    """Run the tests in this process, which ends here; the first that fails is enough."""
    signal.alarm(timeout_seconds)
    os.chdir(ROOT)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1), os.dup2(nowhere, 2)
    for name in [name for name in sys.modules if name.partition(".")[0] in PROJECT]:
        del sys.modules[name]
    if code is not None:
        sys.meta_path.insert(0, _Broken(".".join(file.relative_to(ROOT).with_suffix("").parts), file, code))
    for tests in tests_of(file):  # one after another: what the first of them notices waits for no other
        status = pytest.main(["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", tests])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            sys.exit(status)
    sys.exit()


class _Broken(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from its broken code."""

    def __init__(self, name: str, file: Path, code: CodeType) -> None:
        self.name, self.file, self.code = name, file, code

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.file, loader=self)

    def get_source(self, fullname: str) -> str:  # noqa: ARG002
        return self.file.read_text(encoding="utf-8")

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code, module.__dict__)
