"""Layers that take a vector of each sample beside the tokens: right ones are equal, and hide no wrong wiring."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.equivalent import calls
from equivalence_tests.checker.equivalent.calls import diagnose_call
from equivalence_tests.checker.equivalent.deciding import accuse_with_proof
from equivalence_tests.checker.helpers_for_tests import saved
from equivalence_tests.checker.layers.whole_beside import Conditions
from equivalence_tests.checker.mistakes import found_mistake
from equivalence_tests.checker.reach.arguments import Sizes
from equivalence_tests.checker.reach.model_calls import run_model
from equivalence_tests.checker.reach.state import default_dtype
from equivalence_tests.checker.reporting.findings import Proof
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.verify import verify
from equivalence_tests.ledger import lookalikes
from equivalence_tests.ledger.lookalikes.conditioned import InlineBlock, TimedModel

FILE = Path(lookalikes.__path__[0]) / "conditioned.py"


def test_what_a_vector_of_the_sample_shifts_and_scales_is_intended() -> None:
    report = verify(f"{FILE}:ConditionedBlock")
    assert report.verdict == "equal", str(report)
    assert "the sub-module modulation.1 makes it of the argument c" in " ".join(str(report).split())
    assert {one.name for one in report.intended} == {"gate_of_its_own"}  # its norms are those of its sublayers


def test_what_no_sub_module_makes_of_a_vector_is_not_intended(tmp_path: Path) -> None:
    text = FILE.read_text(encoding="utf-8").replace("gate2.unsqueeze(1) *", "c.unsqueeze(1) *")
    report = verify(saved(tmp_path, text, "ConditionedBlock"))
    assert report.verdict in ("deviates", "unchecked"), str(report)
    assert "a vector of its sample" in str(report)


@pytest.mark.thorough
def test_a_gate_that_takes_part_twice_where_another_never_does_is_named(tmp_path: Path) -> None:
    text = FILE.read_text(encoding="utf-8").replace("gate2.unsqueeze(1) *", "gate1.unsqueeze(1) *")
    report = verify(saved(tmp_path, text, "ConditionedBlock"))
    assert report.verdict == "unchecked", str(report)
    assert "only part of the output of modulation.1 is used" in report.reason


def test_a_model_is_given_the_time_step_and_the_class_of_each_sample() -> None:
    errors, mistakes = list[str](), list[str]()
    with default_dtype(torch.float64):
        run = run_model(TimedModel(8, 3, 2, 24, 2, 5), Sizes(), errors, mistakes)
    assert run is not None, errors
    assert run.of_samples
    assert run.run(run.source[:1], None, {}).shape == (1, 16, 12)
    assert not mistakes


def test_a_vector_of_the_sample_names_no_tokens() -> None:
    module = InlineBlock(12, 2).double()
    tokens, vector = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 12, dtype=torch.float64)
    (report,) = diagnose_call(Call(lambda x: module(x, vector), (tokens,), module=module))
    assert not report.mistakes, str(report)


def test_what_is_unproven_is_no_finding() -> None:
    found = found_mistake("scale_missing", where="block")
    report = Report("block", verdict="deviates", findings=[found])
    accuse_with_proof(report)
    assert (report.verdict, report.findings, report.mistakes) == ("unchecked", [], ("scale_missing",))
    assert "suspected but could not be proven" in report.reason
    proven = replace(found, proof=Proof(1e-16, 0.5, 20))
    for complete, left in ((False, [proven, found]), (True, [proven])):
        report = Report("block", verdict="deviates", findings=[found, proven])
        accuse_with_proof(report, complete)
        assert (report.verdict, report.findings) == ("deviates", left)


@pytest.mark.parametrize("alone", [Proof(1e-16, 0.5, 20), Proof(1.7, 2.3, 20)])
def test_what_changes_nothing_is_left_out_or_nothing_is_proven(monkeypatch: pytest.MonkeyPatch, alone: Proof) -> None:
    needed, needless = SimpleNamespace(name="needed"), SimpleNamespace(name="needless")

    def proven(wrong: list[Any], *_: Any) -> dict[int, Proof]:
        together = {id(needed): Proof(1e-16, 0.5, 20), id(needless): Proof(1e-16, 1e-16, 20)}
        return together if len(wrong) == 2 else {id(needed): alone}

    monkeypatch.setattr(calls, "_proven", proven)
    both: list[Any] = [needed, needless]
    kept, proofs = calls._needed(both, cast(Any, None), 0)
    assert kept == (both[:1] if alone.holds else both)
    assert list(proofs.values()) == ([alone] if alone.holds else [None, None])


def test_tokens_of_one_sample_are_no_vectors_and_what_is_made_of_these_is_known_by_its_module() -> None:
    tokens, vector, made = torch.ones(2, 5, 3), torch.ones(2, 3), torch.ones(2, 6)
    assert not Conditions().given("x", vector, [vector])
    conditions = Conditions()
    assert conditions.given("c", vector, [tokens, vector])
    assert not conditions.given("x", tokens, [tokens, vector])
    assert conditions.follow([vector], [made], "to_gain")
    assert not conditions.follow([tokens], [tokens])
    assert conditions.made[id(made)] == ("c", "to_gain")


class AttendsToAVector(nn.Module):
    """Its memory is one vector of each sample, as of an image that is described, or of a prompt."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.attention, self.cross = (nn.MultiheadAttention(dim, n_heads, batch_first=True) for _ in range(2))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        memory = condition[:, None]
        x = x + self.cross(self.norm2(x), memory, memory, need_weights=False)[0]
        return x + self.mlp(self.norm3(x))


def test_a_memory_may_be_one_vector_of_each_sample() -> None:
    report = verify(AttendsToAVector)
    assert report.verdict == "equal", str(report)
    assert "the argument condition holds it" in [one.reason for one in report.intended]
