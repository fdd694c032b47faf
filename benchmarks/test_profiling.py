"""Tests of profiling.py: what a run is spent on, and where it is said; no time is compared with another."""

import mmap
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import profiling, running
from benchmarks.grids import Case
from benchmarks.measuring import MachineRates, Runner, profiled
from benchmarks.profiling import Profile, kind_of, profile_of
from benchmarks.readme import tables
from benchmarks.report import html_page
from benchmarks.results import append_rows, read_rows, write_csv
from benchmarks.running import run_case
from benchmarks.test_readme import everything
from benchmarks.test_reporting import row

A, B, BIAS = torch.randn(3, 5, 7), torch.randn(3, 7, 11), torch.randn(11)
LINEAR = torch.nn.Linear(7, 11)
PROFILE = Profile(100.0, 60.0, 45.0, 0.0, 25.0, 5.0, page_faults=12)


def profile(run: Callable[[], object]) -> Profile:
    return profile_of(Runner(run, nullcontext, 1, torch.device("cpu")))


@pytest.mark.parametrize(
    ("run", "products"),
    [
        (lambda: A @ B, {((3, 5, 7), (3, 7, 11), "float"): 1}),
        (lambda: LINEAR(A), {((15, 7), (7, 11), "float"): 1}),
        (lambda: torch.baddbmm(BIAS, A, B), {((3, 5, 7), (3, 7, 11), "float"): 1}),
        (
            lambda: [A.double() @ B.double(), A[0] @ B[0], A[0] @ B[1]],
            {((3, 5, 7), (3, 7, 11), "double"): 1, ((5, 7), (7, 11), "float"): 2},
        ),
        (lambda: A.exp(), {}),
    ],
    ids=["matmul", "linear", "baddbmm", "several", "none"],
)
def test_products_are_found_with_their_factors(run: Callable[[], object], products: dict[Any, int]) -> None:
    found: dict[Any, int] = {}
    for stretch in profiling._nested(profiled(run, shapes=True)):
        product = profiling._product(stretch)
        if product is not None:
            found[product] = found.get(product, 0) + 1
    assert found == products


def test_a_product_that_leaves_its_work_to_others_is_counted_once() -> None:
    """Into a slice of several heads, torch adds one product after another."""
    whole = torch.zeros(3, 99, 11)
    stretches = profiling._nested(profiled(lambda: whole[:, :5].baddbmm_(A, B), shapes=True))
    factors = [x for x in map(profiling._product, stretches) if x is not None]
    work = sum(torch.Size(left).numel() * right[-1] for left, right, _ in factors)
    assert work == 3 * 5 * 7 * 11


def test_the_parts_make_up_the_whole() -> None:
    with torch.no_grad():
        found = profile(lambda: torch.softmax(LINEAR(A).clone(), dim=-1) + 1)
    assert sum(found.shares().values()) == pytest.approx(1.0)
    assert min(found.products_us, found.arithmetic_us, found.copies_us, found.bare_us) > 0
    assert found.fused_us == 0
    assert found.matmul_rate == found.bare_us / found.products_us


def test_a_fused_kernel_is_a_kind_of_its_own() -> None:
    query = torch.randn(1, 2, 16, 8)
    found = profile(lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query))
    assert found.fused_us > 0
    assert (found.products_us, found.matmul_rate) == (0, None)


def test_fresh_memory_shows_as_page_faults() -> None:
    pytest.importorskip("resource")
    here = torch.ones(2**24)

    def fresh() -> torch.Tensor:  # from the system, whatever the allocator has kept
        return torch.frombuffer(mmap.mmap(-1, 2**26), dtype=torch.float32).fill_(1.0)

    faults = [profile(run).page_faults for run in (fresh, lambda: here.fill_(1.0))]
    assert None not in faults
    assert faults[0] > faults[1]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("aten::addmm_", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "fused"),
        ("aten::_softmax", "arithmetic"),
        ("aten::cat", "copies"),
        ("aten::as_strided", "overhead"),
        ("autograd::engine::evaluate_function: MmBackward0", "overhead"),
    ],
)
def test_kinds(operation: str, kind: str) -> None:
    assert kind_of(operation) == kind


def test_those_whom_an_aim_compares_are_looked_into_unless_in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "profile_of", lambda _: PROFILE)
    monkeypatch.setattr(running, "rounds_in_turns", lambda runners, _: [[1e-3] * 5 for _ in runners])
    monkeypatch.setattr(running, "machine_rates", lambda *_: MachineRates(1e9, 1e9))
    case = Case("self_attention", batch=1, query_len=5, key_len=5, embed_dim=16)
    for seconds, expected in ((1.0, {"scratch", "torch.nn"}), (0.4, set())):
        rows = run_case(case, ["builtin", "torch.nn", "scratch"], seconds)
        assert {row.contender for row in rows if row.profile is not None} == expected


@pytest.mark.parametrize(
    ("settings", "is_looked_into"),
    [
        ({}, True),
        ({"compiled": True}, False),
        ({"device": "cuda"}, False),
        ({"component": "attention", "query_len": 511}, False),
    ],
    ids=["a module", "compiled", "another device", "the function where it has no aim"],
)
def test_where_the_profiler_tells_nothing_it_is_not_asked(
    settings: dict[str, Any], is_looked_into: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "profile_of", lambda _: PROFILE)
    runner = Runner(lambda: None, nullcontext, 1, torch.device("cpu"))
    found = running._profile(
        running._Ready(runner, row("scratch", 1.0, case=Case(**{"component": "encoder_layer"} | settings)))
    )
    assert found == (PROFILE if is_looked_into else None)


def test_times_stay_where_there_is_no_memory_for_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(_: Runner) -> Profile:
        raise MemoryError

    monkeypatch.setattr(running, "profile_of", no_memory)
    runner = Runner(lambda: None, nullcontext, 1, torch.device("cpu"))
    assert running._profile(running._Ready(runner, row("scratch", 1.0, case=Case("encoder_layer")))) is None


def test_it_is_kept_and_read_again(tmp_path: Path) -> None:
    rows = [replace(everything()[0], profile=PROFILE), everything()[1]]
    append_rows(tmp_path / "results.jsonl", rows)
    assert read_rows(tmp_path / "results.jsonl") == rows
    write_csv(tmp_path / "results.csv", rows)


def test_it_stands_below_an_aim_that_is_missed_and_in_the_cell() -> None:
    rows = [replace(row, profile=PROFILE) for row in everything()]
    text = tables(rows, "cpu", with_plot=False)
    heading, missed = "What the time is spent on there:", [row for row in rows if row.case.query_len == 1024]
    (table,) = text.split(heading)[1:]
    lines = table.split("\n\n")[1].splitlines()[2:]
    assert [line.split(" | ")[1:3] for line in lines] == [["`scratch`", "110 µs"], ["`torch.nn`", "100 µs"]]
    assert all(line.endswith(" | 60% | 0% | 25% | 5% | 10% | 75% | 12 |") for line in lines)
    assert all(line.startswith(f"| {missed[0].case} |") for line in lines)
    assert heading not in tables(everything(), "cpu", with_plot=False)
    assert str(PROFILE) in html_page(rows)
    assert "<summary>" not in html_page(everything())
