"""The judge itself: each operator gives code that runs, the truth is a number, and the table counts what it says."""

import inspect
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer import Typer
from typer.testing import CliRunner

from equivalence_tests.wild.models import WildModel
from equivalence_tests.wrong import __main__ as command
from equivalence_tests.wrong import fixed, fixed_layers, parts, strangers
from equivalence_tests.wrong.asking import INTENDED
from equivalence_tests.wrong.drawing import UNCHANGED, drawn
from equivalence_tests.wrong.editing import Editable, Version
from equivalence_tests.wrong.judging import NO_ANSWER, accused, called_equal, excused, judged
from equivalence_tests.wrong.operators import OPERATORS, Operator, wraps
from equivalence_tests.wrong.right import rights
from equivalence_tests.wrong.sites import Site, sites_of
from equivalence_tests.wrong.sources import Right, imported
from equivalence_tests.wrong.table import summary, table, written
from equivalence_tests.wrong.truth import Dropped, Truth, truth_of
from equivalence_tests.wrong.unseen import UNSEEN
from equivalence_tests.wrong.wild import judged_in

SMALL = fixed.ATTENTION
OUT = "self.to_out(merged)"
DIFFERENT: dict[str, Any] = {
    "room": "fixed", "class": "Attention", "operator": "x", "adds": False, "diff": "-a\n+b", "truth": "differs",
    "difference": 0.3, "verdict": "equal", "names": [], "lines": [], "intended": [], "reason": "", "seconds": 0.5,
    "on_the_line": False,
}  # fmt: skip


def named(name: str) -> Right:
    return next(right for right in rights() if right.name == name)


def truth(text: str, folder: Path, right: Right = SMALL) -> Truth:
    whole, wrong = (right.built(imported(one, folder, "attention")[1]) for one in (right.text, text))
    return truth_of(right, whole, wrong)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> list[Editable]:
    """A few right attentions that have something for every operator."""
    folder = tmp_path_factory.mktemp("probed")
    return [
        Editable(right, sites_of(right, folder))
        for right in map(named, ("SeparateLinears", "FusedCausal", "MixesPlaces"))
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("operator", [*OPERATORS, *UNSEEN], ids=lambda one: one.name)
def test_each_operator_gives_code_that_runs(operator: Operator, searched: list[Editable], tmp_path: Path) -> None:
    for editable in searched:
        for version in editable.versions(operator, random.Random(0)):
            edited = {line for line in version.diff.splitlines() if line.startswith("+")}
            written = version.text.splitlines()
            assert edited >= {f"+{written[number - 1]}" for number in version.lines} != set()
            try:
                truth(version.text, tmp_path, editable.right)
            except Exception:  # edits may crash, and are dropped then; one in a few must run
                continue
            return
    pytest.fail("no version of it runs")


def test_a_tenth_of_the_operators_is_kept_for_the_end() -> None:
    names = [operator.name for operator in (*OPERATORS, *UNSEEN)]
    assert len(set(names)) == len(names)
    assert len(UNSEEN) >= len(names) / 10


def test_every_right_attention_runs_and_is_as_right_as_itself(tmp_path: Path) -> None:
    assert len(rights()) >= 60
    assert len(parts.rights()) >= 20
    assert len({right.name for right in rights()}) == len(rights())
    for right in (*rights(), *parts.rights()):
        assert truth(right.text, tmp_path, right) == Truth(0.0, 0.0), right.name


LEFT_OUT = {"use_cache"}  # it keeps its state from call to call


def test_every_argument_is_given_in_some_call(tmp_path: Path) -> None:
    for right in rights():
        module = right.built(imported(right.text, tmp_path, right.name)[1])
        given = {name for call in right.calls for name in call}
        assert given >= inspect.signature(module.forward).parameters.keys() - LEFT_OUT, right.name


def test_edits_stand_before_between_and_after_every_stage(tmp_path: Path) -> None:
    sites = sites_of(SMALL, tmp_path)
    found = {"\n".join(one.text.splitlines()[i - 1] for i in one.lines) for one in doubled(sites)}
    before = ("x", "self.to_qkv(x)", "q", "k.transpose(-2, -1)", "v", "scores", "attn", "attn @ v", "context")
    for stage in (*before, "context.transpose(1, 2)", "merged", OUT):
        assert any(f"{stage} * 2" in line or f"({stage}) * 2" in line for line in found), stage


def doubled(sites: Sequence[Site]) -> list[Version]:
    found = (Editable(SMALL, sites).versions(wraps("twice", "E * 2"), random.Random(seed)) for seed in range(3))
    return [version for versions in found for version in versions]


def test_a_parameter_is_added_in_the_constructor_whatever_its_sizes_are_called(tmp_path: Path) -> None:
    right = named("FusedCausal")
    added = wraps("gain", "E * self.added", added="nn.Parameter(torch.ones(LAST))")
    versions = list(Editable(right, sites_of(right, tmp_path)).versions(added, random.Random(0)))
    assert {"config.n_embd", "config.n_embd // config.n_head"} <= {
        version.text.partition("nn.Parameter(torch.ones(")[2].partition("))")[0] for version in versions
    }
    assert all(version.adds for version in versions)
    assert truth(versions[0].text, tmp_path, right).kind == "differs"  # a gain of 1, but for its being drawn anew


@pytest.mark.parametrize(
    ("new", "kind"),
    [
        (f"1 * {OUT}", "same"),
        (f"1.00001 * {OUT}", "differs"),
        (f"{OUT} * (1 + 1e-8)", "neither"),
        ("self.to_out(merged.detach())", "neither"),
        ("self.to_out(F.dropout(merged, 0.5, self.training))", "neither"),
        (OUT.replace("merged", "merged[:, :6]"), None),
        (f"{OUT} / 0", None),
        ("nowhere", None),
    ],
)
def test_the_truth_is_a_number(new: str, kind: str | None, tmp_path: Path) -> None:
    text = SMALL.text.replace(f"return {OUT}", f"return {new}")
    if kind is not None:
        assert truth(text, tmp_path).kind == kind
        return
    with pytest.raises(Dropped):
        truth(text, tmp_path)


@pytest.mark.parametrize("version", fixed.versions(), ids=lambda one: one.operator)
def test_each_of_the_fixed_versions_differs(version: Version, tmp_path: Path) -> None:
    assert truth(version.text, tmp_path).kind == "differs"


def test_there_are_24_of_one_edit_each() -> None:
    assert len(fixed.versions()) == len({version.text for version in fixed.versions()}) == 24
    assert all(1 <= f"\n{version.diff}".count("\n+") <= len(version.lines) <= 2 for version in fixed.versions())


def test_what_ends_its_child_is_a_row_and_what_is_wrong_is_found() -> None:
    ends = SMALL.text.replace(f"return {OUT}", f"import os; os._exit(1); return {OUT}")
    doubled = SMALL.text.replace(OUT, f"2 * {OUT}")
    line = next(number for number, text in enumerate(doubled.splitlines(), 1) if "2 *" in text)
    lines = (ends, 1), (doubled, line), (doubled, 1)
    one, other, elsewhere = judged([Version(SMALL, "x", text, (number,)) for text, number in lines], 1)
    assert (one["dropped"], "verdict" in one) == ("its child failed", False)
    assert (other["truth"], other["verdict"], other["on_the_line"]) == ("differs", "deviates", True)
    assert (elsewhere["verdict"], elsewhere["on_the_line"]) == ("deviates", False)


def test_a_checker_that_does_not_answer_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equivalence_tests.wrong.judging.asked", lambda *_: 1 / 0)
    (row,) = judged([Version(SMALL, "as it is", SMALL.text, ())], 1)
    assert (row["truth"], row["verdict"], row["reason"]) == ("same", NO_ANSWER, "its child failed")


def test_equal_with_a_step_of_its_own_is_to_be_judged() -> None:
    row = {**DIFFERENT, "verdict": INTENDED, "intended": ["scale"]}
    assert called_equal(DIFFERENT)
    assert called_equal({**row, "intended_anew": []})
    assert (called_equal(row), excused(row)) == (False, True)
    assert not called_equal({**DIFFERENT, "truth": "same"})
    meant = {**DIFFERENT, "intended_anew": ["mask (mask): True = may look"]}  # in sight: to be judged
    assert (called_equal(meant), excused(meant)) == (False, True)
    assert accused({**DIFFERENT, "truth": "same", "verdict": "deviates"})
    assert not accused({**DIFFERENT, "verdict": "deviates"})


def test_the_table_counts_by_operator_and_by_verdict(tmp_path: Path) -> None:
    rows = [
        DIFFERENT,
        {**DIFFERENT, "operator": "y", "verdict": "deviates", "on_the_line": True, "names": ["x_wrong"]},
        {**DIFFERENT, "operator": "y", "verdict": INTENDED, "intended": ["gate"]},
        {**DIFFERENT, "operator": "y", "truth": "same", "verdict": "deviates"},
        {"operator": "y", "dropped": "it crashed"},
    ]
    found = summary(rows)
    assert (found["differ"], found["called_equal"], found["intended"], found["on_the_line"]) == (3, 1, 1, 1)
    assert (found["do_not_differ"], found["accused"], found["dropped"]) == (1, 1, 1)
    cells = [list(column.cells) for column in table(rows).columns]
    assert [column[:3] for column in cells[:4]] == [
        ["x", "y", "all"],
        ["1", "2", "3"],
        ["1", "0", "1"],
        ["0", "1", "1"],
    ]
    written(tmp_path / "found.json", {"seed": 3}, rows)
    content = json.loads((tmp_path / "found.json").read_text())
    assert (content["seed"], len(content["versions"]), content["summary"]["differ"]) == (3, 4, 3)


def test_what_the_right_one_is_excused_for_excuses_no_edit() -> None:
    run = command.Run({}, None, 1)
    run._keep({**DIFFERENT, "verdict": INTENDED, "intended": ["scale"]})
    run._keep({**DIFFERENT, "operator": UNCHANGED, "truth": "same", "verdict": INTENDED, "intended": ["scale"]})
    run._keep({**DIFFERENT, "verdict": INTENDED, "intended": ["scale", "gate"]})
    assert [called_equal(row) for row in run.rows] == [True, False, False]


app = Typer()
app.command()(command.main)


@pytest.mark.parametrize(
    ("rows", "status", "said"),
    [
        ([DIFFERENT], 1, "1 of them are called EQUAL"),
        ([{**DIFFERENT, "verdict": "unchecked"}], 0, "0 of them are called EQUAL"),
        ([{**DIFFERENT, "truth": "same", "verdict": "deviates"}], 1, "1 of them DEVIATES"),
        ([{**DIFFERENT, "verdict": INTENDED, "intended": ["gate"]}], 0, "nothing that has a name was added"),
    ],
)
def test_the_exit_status_says_whether_a_wrong_one_is_equal_or_a_right_one_accused(
    rows: list[dict[str, Any]], status: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "judged", lambda *_: iter(rows))
    monkeypatch.setattr(fixed, "EDITS", fixed.EDITS[:1])
    monkeypatch.setattr(fixed_layers, "EDITS", ())
    result = CliRunner().invoke(app, ["--quick", "--output", str(tmp_path / "found.json")])
    assert (result.exit_code, said in result.output) == (status, True), result.output
    assert json.loads((tmp_path / "found.json").read_text())["quick"]


def test_what_was_found_out_before_an_interruption_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(versions: Sequence[Version], jobs: int) -> Iterator[dict[str, Any]]:
        yield DIFFERENT
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "judged", interrupted)
    result = CliRunner().invoke(app, ["--quick", "--output", str(tmp_path / "found.json")])
    assert result.exit_code == 130
    assert len(json.loads((tmp_path / "found.json").read_text())["versions"]) == 1


def test_the_draw_is_that_of_the_seed_and_of_what_was_chosen(tmp_path: Path) -> None:
    found = command.chosen("roll/Base", OPERATORS, rights())
    assert [right.name for right in found[0]] == ["Base"]
    assert {operator.name.partition(":")[0] for operator in found[1]} == {"roll"}
    texts = [[version.text for version in drawn(*found, seed, tmp_path)] for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert sorted(texts[0]) != texts[0]
    firsts = {next(drawn([right], OPERATORS, 0, tmp_path)).operator for right in rights()[:8]}
    assert len(firsts) > 2  # not the same few on every class
    result = CliRunner().invoke(app, ["--only", "/Nothing"])
    assert (result.exit_code, "OPERATOR/CLASS" in result.output) == (2, True)


def test_lines_that_were_edited_are_counted_behind_an_added_parameter(tmp_path: Path) -> None:
    added = wraps("bias", "E + self.added", added="nn.Parameter(torch.zeros(()))")
    for version in Editable(SMALL, sites_of(SMALL, tmp_path)).versions(added, random.Random(0)):
        assert all("self.added" in version.text.splitlines()[number - 1] for number in version.lines)


def test_a_part_that_changes_nothing_may_rightly_be_missed(tmp_path: Path) -> None:
    super_ = "super().__init__()"
    idle = SMALL.text.replace(super_, f"{super_}\n        self.added = nn.Linear(dim, dim)")
    assert truth(idle, tmp_path).kind == "neither"


class Small(nn.Module):
    """Stands for a published model: an attention in it is called by position and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Alone()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, scale=0.5, kept=[])


class Alone(nn.Module):
    """Without a constructor that an edit could need."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(12, 36)

    def forward(self, x: Tensor, scale: float, kept: list[Tensor]) -> Tensor:
        assert not kept, "a cache of another call"
        kept.append(x)
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        return (q @ k.mT * scale).softmax(-1) @ v


def small_model() -> WildModel:
    return WildModel("small", "small", lambda: [Small], lambda _: [{"x": torch.randn(2, 5, 12)}])


def test_published_attentions_are_edited_in_the_place_of_the_original() -> None:
    rows = list(judged_in(small_model(), OPERATORS, 0, 3, ()))
    assert (rows[0]["operator"], rows[0]["truth"], rows[0]["difference"]) == (UNCHANGED, "same", 0.0)
    assert sum(row.get("truth") == "differs" for row in rows) == 3
    assert {row["class"] for row in rows} == {f"{__name__}.Alone"}
    assert not any(row["adds"] for row in rows)
    assert list(judged_in(small_model(), OPERATORS, 0, 3, {f"{__name__}.Alone"})) == []


def test_code_of_others_stays_out_of_the_results(tmp_path: Path) -> None:
    written(tmp_path / "found.json", {}, [DIFFERENT, {**DIFFERENT, "room": "wild"}])
    assert ["diff" in row for row in json.loads((tmp_path / "found.json").read_text())["versions"]] == [True, False]


def test_what_an_edit_takes_twice_is_computed_once(tmp_path: Path) -> None:
    gated = Editable(SMALL, sites_of(SMALL, tmp_path)).versions(wraps("gate", "E * E.sigmoid()"), random.Random(0))
    assert max(version.text.count("attn @ v") for version in gated) == 1


def test_a_draw_goes_on_until_so_many_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "judged", lambda versions, _: (row(version) for version in versions))

    def row(version: Version) -> dict[str, Any]:
        truths = {UNCHANGED: {"truth": "same"}, "crashes": {"dropped": "it crashed"}}
        found = {**DIFFERENT, "operator": version.operator, **truths.get(version.operator, {})}
        return {name: value for name, value in found.items() if version.operator != "crashes" or name != "truth"}

    run = command.Run({}, None, 1)
    run.over((Version(SMALL, ("crashes", "x")[i % 2], SMALL.text, ()) for i in range(1000)), 30)
    assert summary(run.rows) | {"differ": 30, "do_not_differ": 1} == summary(run.rows)


def test_what_a_constructor_computes_stays_as_it_is(tmp_path: Path) -> None:
    right = named("TurnsByATable")
    sites = sites_of(right, tmp_path)
    assert not any("register_buffer" in right.text.splitlines()[site.span[0] - 1] for site in sites)


def test_what_a_folder_defines_is_edited_where_it_is_equal(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(SMALL.text)
    (tmp_path / "wrong.py").write_text(SMALL.text.replace("softmax(dim=-1)", "softmax(dim=-2)"))
    first, second = sorted(strangers.candidates_in(tmp_path), key=lambda one: one.path)
    whole, *edited = strangers.judged_in(first, OPERATORS, seed=1, each=1)
    assert (whole["operator"], whole["truth"], whole["verdict"]) == (UNCHANGED, "same", "equal")
    assert [called_equal(row) for row in edited if row.get("truth") == "differs"] == [False]
    (dropped,) = strangers.judged_in(second, OPERATORS, seed=1, each=1)
    assert dropped["dropped"].startswith("deviates: ")
    result = CliRunner().invoke(app, ["--folder", str(tmp_path), "--quick"])
    assert (result.exit_code, "--folder goes without --quick" in result.output) == (2, True)
