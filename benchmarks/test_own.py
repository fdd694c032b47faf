"""Tests of own.py: other people's attention gets the built-in's weights, inputs and masks, or a reason why not."""

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import builtin
from benchmarks import measuring
from benchmarks.command import app
from benchmarks.contenders import contenders_of
from benchmarks.equality import Gate
from benchmarks.grids import MASKS, Case
from benchmarks.own import check_own, own_takes_part, own_workload
from benchmarks.results import read_rows
from benchmarks.workloads import may_attend_of, workload
from equivalence_tests.checker.equivalent.holding import Held
from equivalence_tests.checker.equivalent.program import Program
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.instruments.warm_processes import warm_context

SOURCE = """
import torch
from torch import nn

class Separate(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.Wq, self.Wk, self.Wv, self.Wo = (nn.Linear(embed_dim, embed_dim) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.view(x.size(0), -1, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, q, k, v, mask=None):
        q, k, v = self.split(self.Wq(q)), self.split(self.Wk(k)), self.split(self.Wv(v))
        scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        context = self.dropout(scores.softmax(-1)) @ v
        return self.Wo(context.transpose(1, 2).reshape(context.size(0), -1, self.num_heads * self.head_dim))

class WrongScale(Separate):
    def __init__(self, embed_dim, num_heads):
        super().__init__(embed_dim, num_heads)

    def forward(self, q, k, v, mask=None):
        q, k, v = self.split(self.Wq(q)), self.split(self.Wk(k)), self.split(self.Wv(v))
        weights = (q @ k.transpose(-2, -1) / (self.num_heads * self.head_dim) ** 0.5).softmax(-1)
        return self.Wo((weights @ v).transpose(1, 2).reshape(v.size(0), -1, self.num_heads * self.head_dim))

class PackedCausal(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).split(c, dim=2))
        scores = q @ k.transpose(-2, -1) / k.size(-1) ** 0.5
        scores = scores.masked_fill(torch.tril(torch.ones(t, t)) == 0, float("-inf"))
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))

class WithoutBias(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.to_qkv(x).chunk(3, dim=-1))
        weights = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))

def attention(query, key, value, mask=None):
    scores = query @ key.transpose(-2, -1) / query.size(-1) ** 0.5
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return scores.softmax(-1) @ value
"""
CASE = Case("self_attention", batch=2, query_len=6, key_len=6, embed_dim=20, num_heads=2)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(SOURCE)
    return path


def objection(name: str, case: Case) -> str:
    *_, own = contenders_of(case, [name])
    assert own.name == name
    return Gate(case).objection(own)


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_module_is_equal_under_every_mask_with_all_gradients(file: Path, mask: str, mode: str) -> None:
    case = replace(CASE, mask=mask, window=2 * (mask == "window"), mode=mode)
    assert objection(f"{file}:Separate", case) == ""
    assert objection(f"{file}:Separate", replace(case, component="cross_attention", key_len=7)) == ""
    assert objection(f"{file}:attention", replace(case, component="attention", key_len=7)) == ""


def test_packed_weights_and_a_mask_of_its_own(file: Path) -> None:
    name = f"{file}:PackedCausal"
    assert objection(name, replace(CASE, mask="causal", mode="backward")) == ""
    with pytest.raises(NotImplementedError, match="has no mask argument"):
        own_workload(name, replace(CASE, mask="window", window=2))
    with pytest.raises(NotImplementedError, match="it is always causal"):
        own_workload(name, CASE)
    with pytest.raises(NotImplementedError, match="has no mask argument"):
        own_workload(name, replace(CASE, mask="both"))
    with pytest.raises(NotImplementedError, match="takes a single tensor"):
        own_workload(name, replace(CASE, component="cross_attention", mask="causal"))


def test_without_biases_it_is_compared_without_biases(file: Path) -> None:
    name = f"{file}:WithoutBias"
    with pytest.raises(NotImplementedError, match="--bias no"):
        own_workload(name, CASE)
    assert objection(name, replace(CASE, bias=False, mode="backward")) == ""
    assert objection(f"{file}:Separate", replace(CASE, bias=False)) == ""


def test_a_mistake_is_read_and_refused(file: Path) -> None:
    assert objection(f"{file}:WrongScale", CASE).startswith("output: error")


def test_gradients_come_under_the_names_of_the_built_in(file: Path) -> None:
    case = replace(CASE, mode="backward")
    own, theirs = own_workload(f"{file}:Separate", case), workload(case, builtin)
    numbers = {f"gradient of {name}": x.detach() for name, x in own.leaves().items()}
    wanted = {f"gradient of {name}": x.detach() for name, x in theirs.leaves().items()}
    translated = own.translated(dict(numbers))
    assert set(translated) == set(wanted)
    for name, x in translated.items():
        assert x is not None
        assert torch.equal(x, wanted[name])


def test_who_takes_part_where(file: Path) -> None:
    module, function = f"{file}:Separate", f"{file}:attention"
    assert own_takes_part(module, CASE)
    assert not own_takes_part(module, replace(CASE, need_weights=True))
    assert not own_takes_part(module, replace(CASE, component="attention"))
    assert own_takes_part(function, replace(CASE, component="attention"))
    assert not own_takes_part(function, CASE)


def test_may_attend_joins_both_masks() -> None:
    case = replace(CASE, query_len=2, key_len=4, mask="both")
    assert may_attend_of(case).int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0]], [[1, 0, 0, 0], [1, 1, 0, 0]]]
    assert may_attend_of(replace(case, mask="padding")).sum(-1).tolist() == [[3, 3], [2, 2]]


@pytest.mark.parametrize("name", ["nowhere.py:Mine", "mine.py", "benchmarks.own:Absent"])
def test_what_cannot_be_imported_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"implementation must name your code as in my.py:MyAttention, got {name}: "):
        check_own(name)


def test_the_command_times_it(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = warm_context()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    for name, value in (("FEWEST_ROUNDS", 2), ("MOST_ROUNDS", 2), ("FEWEST_LONG_ROUNDS", 2), ("TURN_SECONDS", 0.0)):
        monkeypatch.setattr(measuring, name, value)
    sizes = ["--length", "5", "--width", "20", "--heads", "2", "--batch", "2", "--contender", "scratch"]
    names = [f"{file}:Separate", f"{file}:WrongScale", f"{file}:PackedCausal"]
    given = ["--implementation", names[0], "--implementation", f"{names[1]},{names[2]}"]
    result = CliRunner().invoke(app, [*given, *sizes, "--mask", "causal", "--output", str(tmp_path)])
    assert result.exit_code == 1, result.output
    rows = read_rows(tmp_path / "results.jsonl")
    assert {row.case.component for row in rows} == {"self_attention", "cross_attention"}
    assert {row.status for row in rows if row.contender == names[0]} == {"timed"}
    assert {row.status for row in rows if row.contender == names[1]} == {"unequal"}
    assert {row.status for row in rows if row.contender == names[2]} == {"timed", "unavailable"}
    for name in names:  # a column for each
        assert f"mine.py:{name.rpartition(':')[2]}" in "".join(result.output.split())
    advice = CliRunner().invoke(app, ["report", str(tmp_path / "results.jsonl")]).output
    for shown in (result.output, advice):
        assert "\n  mine.py:Separate takes " in shown
    assert "mine.py:WrongScale was not timed, because its numbers differ" in " ".join(advice.split())
    nothing = CliRunner().invoke(app, ["--implementation", f"{file}:Separate", "--need-weights", "yes"])
    assert nothing.exit_code == 2
    assert "implementation must take part in a case that is chosen" in nothing.output
    refused = CliRunner().invoke(app, ["--implementation", "nowhere.py:Mine"])
    assert refused.exit_code == 2
    assert refused.output.startswith("error: implementation must name your code as in")


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_the_equivalent_is_equal_at_the_sizes_of_the_case(file: Path, mode: str) -> None:
    case = replace(CASE, mode=mode, mask="both")
    assert objection(f"{file}:Separate in torch", case) == ""
    assert objection(f"{file}:Separate in torch", replace(case, component="cross_attention", key_len=7)) == ""
    assert objection(f"{file}:attention in torch", replace(case, component="attention", key_len=7)) == ""
    assert objection(f"{file}:PackedCausal in torch", replace(case, mask="causal")) == ""


def test_the_equivalent_is_torchs_own_module(file: Path) -> None:
    made = own_workload(f"{file}:Separate in torch", CASE).module
    assert isinstance(made, torch.nn.MultiheadAttention)
    assert (made.embed_dim, made.num_heads) == (CASE.embed_dim, CASE.num_heads)


def test_without_an_equivalent_the_reason_is_given(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(_situation: object) -> None:
        raise UnreadError("it asks the clock")

    monkeypatch.setattr(Held, "holding", unread)
    with pytest.raises(NotImplementedError, match="written in torch's own parts: it asks the clock"):
        own_workload(f"{file}:Separate in torch", CASE)
    nothing = CliRunner().invoke(app, ["--with-equivalent"])
    assert nothing.exit_code == 2
    assert "--with-equivalent needs --implementation" in nothing.output


def test_gradients_of_an_equivalent_in_parts_come_under_the_names_of_the_built_in(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Program, "is_multi_head_attention", property(lambda _: False))
    case = replace(CASE, mode="backward")
    made = own_workload(f"{file}:Separate in torch", case).module
    assert not isinstance(made, torch.nn.MultiheadAttention)
    assert objection(f"{file}:Separate in torch", case) == ""
