"""Run against each mutant the tests that reach its lines, each mutant in a process of its own.

torch is imported, the tests are collected, and each of them runs in whole code once. Every mutant is a fork of this
process, in which broken functions take the place of the whole ones. Where the broken line runs while its file is
imported, everything is imported and collected anew.
"""

import gc
import importlib.abc
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from operator import itemgetter
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Literal

import pytest
import torch._dynamo  # noqa: F401  slow to import: once here, not in every fork
from torch._guards import TracingContext

import scratch
from equivalence_tests.mutation.breaking import Mutant

__all__ = ["ROOT", "TESTS", "Verdict", "run_mutants", "tests_of"]

ROOT = Path(scratch.__file__).parents[1]
PROJECT = ("scratch", "builtin", "equivalence_tests")
# A mutant meets as many tests that reach it as take so long in whole code: those that are named first, cheapest first.
ENOUGH_SECONDS = 10
FAILED = 10  # as an exit status; 1 is that of an error outside the tests
Verdict = Literal["killed", "timed out", "survived"]
Lines = set[tuple[str, int]]  # the path of a file, and the number of a line

SIGNATURES = "parity::TestTwins::test_signatures_are_equal_annotations_included"
ATTENTION = ["property_edges", "layers", "functional", "property_invariants", "attention", "errors"]
LAYERS = ["real_programs::TestLayers", "layers", "property_edges", "transformer", "errors", "decoding"]
REFUSED = ["errors", "property_edges"]
BAD_CALLS = [
    "errors::test_a_bad_call_raises_an_error_that_names_argument_expectation_and_finding",
    "errors::test_an_unusual_call_is_accepted_and_computed_as_torch_does",
]
TRACED = "real_programs::TestTracing::test_jit_traces_a_model_that_builds_its_mask[scratch-TransformerDecoder]"
# The tests that look at a file, beside the examples in its docstrings. Where they are slow, some of them are named.
TESTS = {
    "functional.py": ATTENTION,
    "paths.py": ["functional", "tiling", "recording", "flex", *ATTENTION],
    "rounding.py": [
        *ATTENTION,
        "transforms::TestExport::test_the_function_exports_with_a_size_that_only_the_data_tell",
    ],
    "documentation.py": ["parity::TestTwins", "parity::TestDocstrings"],
    "sdpa.py": [*ATTENTION, "tiling::TestFunction"],
    "tiling.py": ["tiling"],
    "masks.py": ["masks", "property_edges", "errors", "functional", "attention"],
    "attention.py": [
        SIGNATURES,
        "real_programs::TestMultiheadAttention",
        "attention::test_widths_of_their_own_start_with_torchs_parameters_and_share_no_product",
        "decoding::TestGrowingCache::test_a_promise_of_causality_is_read_off_the_mask",
        "attention",
        *ATTENTION,
        "tiling::TestModule",
    ],
    "layers.py": [SIGNATURES, *LAYERS],
    "transformer.py": ["transformer", *LAYERS],
    "positional.py": ["positional", "property_edges", "errors", "parity", "seq2seq"],
    "seq2seq.py": ["errors", "property_edges", "parity", "seq2seq", "decoding"],
    "decoding.py": ["decoder_only::TestKeepLikeliest", "decoding", "property_edges", "decoder_only", "errors"],
    "caches.py": ["decoding::TestRoom", "decoding::TestCaches", "decoding", "property_edges", "grouped", "errors"],
    "recording.py": ["recording", "errors", "property_edges"],
    "norms.py": [SIGNATURES, "norms"],
    "rotary.py": [SIGNATURES, "rotary"],
    "score_functions.py": ["errors", "score_functions"],
    "flex.py": [SIGNATURES, "errors", "flex", "score_functions"],
    "block_masks.py": [SIGNATURES, "errors", "flex", "score_functions"],
    "mask_functions.py": [SIGNATURES, "errors", "flex", "score_functions"],
    "varlen.py": [SIGNATURES, "errors", "varlen"],
    "grouped.py": [
        SIGNATURES,
        "grouped::TestErrors",
        "grouped::TestBothPackages::test_queries_and_keys_are_normalised_and_then_turned",
        "grouped::TestMeaning",
        "grouped",
    ],
    "decoder_only.py": [
        SIGNATURES,
        "decoder_only::test_defaults_are_those_of_the_transformer_and_nothing_of_one_model_alone",
        "decoder_only::test_a_text_goes_on_for_64_tokens_by_default",
        "decoder_only::TestErrors",
        "decoder_only::TestParts",
        "decoder_only::TestBothPackages::test_same_seed_gives_the_same_model",
        "decoder_only",
    ],
    "parallel.py": ["parallel"],
    "tracing.py": [
        "real_programs::TestTracing::test_fx_sees_one_node",
        "real_programs::test_fx_goes_through_subclasses_as_it_does_for_torch",
    ],
    "task/summary.py": ["summary"],
    "task/terminal.py": ["command_line::test_blanks_at_the_ends_of_lines_are_for_terminals"],
    "validation/basics.py": [
        "validation",
        "errors::test_what_a_program_catches_of_torch_catches_ours",
        "errors::test_errors_are_caught_by_the_clauses_that_torchs_users_write",
        TRACED,
        "real_programs::TestScaledDotProductAttention::test_autocast_takes_mixed_dtypes",
        "real_programs::TestScaledDotProductAttention::test_autocast_leaves_float64_alone",
        "functional::TestSteps::test_the_door_says_nothing_while_it_is_traced",
        "positional::TestPositionalEncoding::test_steps_compile_as_one_graph",
        *BAD_CALLS,
    ],
    "validation/masks.py": [*REFUSED, "masks"],
    "validation/attention.py": [
        TRACED,
        "recording::test_trace_refuses_what_it_cannot_read",
        "attention::test_one_head_of_one_feature_is_enough",
        *REFUSED,
        "decoding::TestCaches",
    ],
    "validation/sdpa.py": [
        *BAD_CALLS,
        "errors::test_two_causal_masks_are_refused_in_torchs_words",
        "functional::TestSteps::test_the_door_says_nothing_while_it_is_traced",
        "functional::TestSteps::test_torchs_causal_biases_are_not_imported_for_a_mask_that_is_none",
        "transforms::TestExport::test_the_function_exports_with_a_size_that_only_the_data_tell[number of heads]",
    ],
    "validation/layers.py": [
        "errors::test_an_exchanged_attention_names_the_arguments_of_its_layer",
        TRACED,
        TRACED.replace("TransformerDecoder", "Transformer"),
        "decoding::TestCaches",
        "decoder_only::TestErrors",
        "real_programs::TestStacks::test_a_stack_without_layers_says_so_when_it_is_called",
        "decoding::TestDecoderStack::test_pieces_give_what_the_whole_gives",
        "real_programs::TestLayers::test_an_own_attention_gets_tensors_and_masks_that_can_be_a_bias",
        "real_programs::TestLayers::test_an_attention_with_torchs_signature_may_stand_in",
        *BAD_CALLS,
    ],
    "validation/positional.py": [
        "positional::TestSinusoidalEncoding",
        "positional::TestPositionalEncoding",
        "seq2seq::test_a_trace_warns_of_a_single_new_token_alone",
    ],
    "validation/norms.py": ["errors", "norms"],
    "validation/rotary.py": [
        "rotary::TestErrors",
        "rotary::TestScaling",
        "rotary::TestConversion",
        "rotary::TestRotation::test_positions_may_differ_from_row_to_row",
        "rotary::test_any_base_above_one_is_taken",
    ],
    "validation/score_functions.py": [*BAD_CALLS, "score_functions::TestSinks"],
    "validation/flex.py": [
        "validation",
        "flex::TestBlockMasks::test_lists_that_do_not_fit_are_refused",
        "flex::TestBlockMasks::test_what_was_cut_needs_a_mask_function_of_its_own",
        "flex::TestBlockMasks::test_sizes_that_are_not_given_are_1_and_blocks_have_128_places",
        "flex::TestValues::test_one_sample_of_keys_serves_all_that_a_block_mask_names",
        "flex::TestValues::test_other_samples_of_keys_are_refused",
        "flex::TestValues::test_empty_tensors_give_empty_tensors",
        "flex::TestBlindQueries",
        "flex::TestLimits",
        "flex::TestWrittenOut::test_score_functions_hide_what_they_make_minus_infinity",
        "flex::TestWrittenOut::test_masks_combine",
        "flex::TestTools::test_only_functions_combine",
        "errors::test_flex_attention_says_that_a_tensor_is_nested",
        "varlen::TestEdges::test_the_log_sum_exp_has_the_heads_first_and_is_not_rounded_to_half",
        *BAD_CALLS,
    ],
    "validation/varlen.py": [*BAD_CALLS, "varlen::TestLimits", "varlen::TestEdges"],
    "validation/grouped.py": [
        "grouped::TestErrors",
        "decoder_only::TestParts::test_the_layer_is_its_equation",
        "grouped::TestNoGradientOfFlex",
        "grouped::TestMeaning",
        "parallel",
    ],
    "validation/tokens.py": [
        "decoder_only::TestErrors",
        "seq2seq::TestErrors",
        "seq2seq::test_a_trace_warns_of_a_single_new_token_alone",
        "seq2seq::TestCache::test_a_target_without_new_tokens_is_refused",
        "seq2seq::TestCache::test_one_layer_has_one",
        "decoder_only::test_generating_records_nothing_for_a_backward_pass",
        "decoder_only::TestMeaning::test_a_rolling_cache_stops_growing",
        "decoder_only::TestParts::test_the_model_is_its_equation",
        "decoder_only::TestGenerate::test_one_likeliest_token_or_almost_no_temperature_is_greedy",
        "seq2seq::TestGenerate::test_the_last_position_is_used",
        "decoding::TestEnding",
        "decoding::TestBeamSearch::test_bad_arguments_are_named",
    ],
    "validation/recording.py": [
        "validation",
        "recording::test_models_that_cannot_be_recorded_are_refused",
        "recording::test_compiled_models_are_refused_and_compiled_parts_without_attention_are_not",
        "recording::test_shared_repeated_and_idle_modules",
        "recording::test_trace_refuses_what_it_cannot_read",
        "plotting",
        "command_line::test_errors_are_one_line_and_status_2",
    ],
    "validation/task.py": [
        "validation",
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


def run_mutants(mutants: Mapping[Path, Sequence[Mutant]], jobs: int) -> Iterator[tuple[Path, Mutant, Verdict]]:
    """Test every mutant of some files, several at a time, and give each verdict as it falls.

    Raises:
        RuntimeError: If the tests cannot be collected, or one fails while nothing is broken.
    """
    reader, writer = multiprocessing.Pipe(duplex=False)
    bench = _FORK.Process(target=_Bench(mutants, jobs, writer).run)
    bench.start()
    writer.close()
    for said in _received(reader):
        if isinstance(said, str):
            raise RuntimeError(said)
        file, index, exit_code = said
        yield file, mutants[file][index], _verdict(exit_code)
    bench.join()
    if bench.exitcode != 0:
        raise RuntimeError(f"tests cannot be collected: pytest {' '.join(map(str, mutants))}")


_FORK = multiprocessing.get_context("fork")


def _received(reader: Connection) -> Iterator[Any]:
    with suppress(EOFError):
        while True:
            yield reader.recv()


class _Bench:
    """Collects the tests of some files once, runs each once in whole code, and forks a process for each mutant."""

    def __init__(self, mutants: Mapping[Path, Sequence[Mutant]], jobs: int, writer: Connection) -> None:
        self.mutants, self.jobs, self.writer = mutants, jobs, writer
        self.reach = _Reach(mutants)
        self.imported = Lines()  # run while the files are imported
        self.functions: list[FunctionType] = []
        self.found: list[tuple[float, str, Lines]] = []  # for each test its seconds, its name, and the lines it reaches

    def run(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1), os.dup2(nowhere, 2)
        os.chdir(ROOT)
        sys.settrace(self.reach.enter)
        sys.exit(_collect([test for file in self.mutants for test in tests_of(file)], self.break_all))

    def break_all(self, items: list[pytest.Item]) -> None:
        sys.settrace(None)
        self.imported = self.reach.lines
        gc.unfreeze()  # what conftest.py has hidden
        functions = (x for x in gc.get_objects() if type(x) is FunctionType)
        self.functions = [x for x in functions if x.__code__.co_filename in self.reach.files]
        gc.freeze()
        reader, writer = multiprocessing.Pipe(duplex=False)
        whole = _FORK.Process(target=self.reach.measure, args=(items, writer))
        whole.start()
        writer.close()
        self.found = sorted(_received(reader), key=itemgetter(0))
        whole.join()
        if whole.exitcode == 0:
            self.test_each(items)
        else:
            self.writer.send(f"a test fails before anything is broken: {items[len(self.found)].nodeid}")

    def test_each(self, items: list[pytest.Item]) -> None:
        waiting = [(file, index) for file, mutants in self.mutants.items() for index in range(len(mutants))]
        running: dict[Any, tuple[BaseProcess, Path, int]] = {}
        while waiting or running:
            while waiting and len(running) < self.jobs:
                file, index = waiting.pop(0)
                broken = _FORK.Process(target=self.test, args=(file, self.mutants[file][index], items))
                broken.start()
                running[broken.sentinel] = broken, file, index
            for sentinel in multiprocessing.connection.wait(list(running)):
                process, file, index = running.pop(sentinel)
                process.join()
                self.writer.send((file, index, process.exitcode))

    def test(self, file: Path, mutant: Mutant, items: list[pytest.Item]) -> None:
        """Run the tests that reach a mutant in this process, the likeliest first; the first that fails ends it."""
        lines = {(str(file), line) for line in mutant.lines}
        imported = bool(lines & self.imported)
        tests, names, seconds = tests_of(file), list[str](), 0.0
        named = {one[1]: one for start in tests for one in self.found if one[1].startswith(start)}
        for cost, name, reached in named.values():
            if seconds < ENOUGH_SECONDS and (imported or lines & reached):
                names.append(name)
                seconds += cost
        signal.setitimer(signal.ITIMER_PROF, 30 + 5 * seconds)  # of its own work, however busy the machine is
        signal.alarm(3600)  # for a process that waits for ever
        if not imported and self.exchange(file, mutant.code):
            _run(names, items)
            return
        sys.meta_path.insert(0, _Broken(".".join(file.relative_to(ROOT).with_suffix("").parts), file, mutant.code))
        sys.exit(_collect(tests, partial(_run, names)))

    def exchange(self, file: Path, code: CodeType) -> bool:
        """Give the functions of a file their broken code, if it is plain which belongs to which."""
        broken = list(_codes_in(code))
        places = Counter(_place(x) for x in broken)
        code_at = {_place(x): x for x in broken}
        functions = [x for x in self.functions if x.__code__.co_filename == str(file)]
        if any(places[_place(x.__code__)] != 1 for x in functions):
            return False
        changed = [(x, code_at[_place(x.__code__)]) for x in functions if x.__code__ != code_at[_place(x.__code__)]]
        if any(len(x.__code__.co_freevars) != len(code.co_freevars) for x, code in changed):
            return False  # without its super(), for one
        for function, code in changed:
            function.__code__ = code
        return bool(changed)


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes_in(inner)


def _verdict(exit_code: int) -> Verdict:
    if exit_code == 1:
        raise RuntimeError("the process of a mutant ended by an error of its own, not by a test")
    if exit_code in (-signal.SIGPROF, -signal.SIGALRM):
        return "timed out"
    return "survived" if exit_code == 0 else "killed"


def _collect(tests: Sequence[str], loop: Callable[[list[pytest.Item]], None]) -> int:
    """Import the project anew, collect tests, and hand them to a loop in place of pytest's own."""
    for name in [name for name in sys.modules if name.partition(".")[0] in PROJECT]:
        del sys.modules[name]
    return pytest.main(["-q", "--assert=plain", "-p", "no:cacheprovider", *dict.fromkeys(tests)], plugins=[_Loop(loop)])


class _Loop:
    """A plugin of pytest, with which the first failure ends the process."""

    def __init__(self, loop: Callable[[list[pytest.Item]], None]) -> None:
        self.loop = loop

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.loop(session.items)
        return True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            os._exit(FAILED)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os._exit(FAILED)


def _run(names: Iterable[str], items: Iterable[pytest.Item]) -> None:
    items_by_name = {item.nodeid: item for item in items}
    for item in filter(None, map(items_by_name.get, names)):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)


class _Reach:
    """Notes which lines of some files are run, and which torch follows while it compiles."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.files, self.lines = {str(file) for file in files}, Lines()

    def measure(self, items: list[pytest.Item], writer: Connection) -> None:
        """Run each test, and tell its seconds, its name and the lines that it reaches."""
        compiled = TracingContext.set_current_loc

        def follow(*place: Any, **more: Any) -> None:
            self.lines.add(place[:2])
            compiled(*place, **more)

        TracingContext.set_current_loc = follow  # type: ignore[method-assign]
        threading.settrace(self.enter)
        sys.settrace(self.enter)
        for item in items:
            self.lines, before = Lines(), time.process_time()
            _run([item.nodeid], [item])
            writer.send((time.process_time() - before, item.nodeid, self.lines))

    def enter(self, frame: FrameType, event: str, arg: object) -> Any:  # noqa: ARG002
        return self.line if frame.f_code.co_filename in self.files else None

    def line(self, frame: FrameType, event: str, arg: object) -> Any:  # noqa: ARG002
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self.line


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
