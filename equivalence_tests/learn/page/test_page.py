import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from equivalence_tests.__main__ import app
from equivalence_tests.instruments.side_by_side import random_tensor
from equivalence_tests.learn.page import building, exercises, steps, steps_section
from equivalence_tests.learn.page import command as page_command
from equivalence_tests.learn.page.building import SECTIONS, build_page
from equivalence_tests.learn.page.figures import Matrix
from equivalence_tests.learn.page.reading import PageReader, printed_plainly
from equivalence_tests.learn.page.tape import NotOnTapeError, tape_of
from scratch import masks

MOST_BYTES = 1_600_000


def grids(x: Tensor) -> list[list[list[str]]]:
    return [[[printed_plainly(number) for number in row] for row in rows] for rows in x.flatten(0, -3).tolist()]


def test_the_page_is_one_file_that_loads_nothing(html: str, page: PageReader) -> None:
    assert len(html.encode()) <= MOST_BYTES
    assert page.loaded == ["data:,"]
    assert "@import" not in html
    assert "url(" not in html


def test_every_link_leads_somewhere(page: PageReader) -> None:
    assert len(page.ids) == len(set(page.ids))
    inside = {link[1:] for link in page.links if link.startswith("#")}
    assert {section.name for section in SECTIONS} < inside
    assert inside <= set(page.ids)
    outside = [link for link in page.links if not link.startswith("#")]
    assert all(re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/issues/\d+", link) for link in outside)


@pytest.mark.thorough
def test_two_builds_are_equal(html: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what verify says, which takes longer than all the rest."""
    monkeypatch.setattr(exercises, "report_on", lambda _: "")
    reports = re.compile(r'(<pre tabindex="0">).*?(?=</pre>)', re.DOTALL)
    assert build_page() == reports.sub(r"\1", html)


def test_the_steps_of_attention_are_what_the_formulas_give(page: PageReader) -> None:
    """Every number of the first view, from the weights alone: neither package computes anything here."""
    _, theirs = steps.attention_pair(batch_first=True)
    query, memory = random_tensor(1, 3, 8, seed=1), random_tensor(1, 5, 8, seed=2)
    w_q, w_k, w_v = theirs.in_proj_weight.detach().chunk(3)
    b_q, b_k, b_v = theirs.in_proj_bias.detach().chunk(3)

    def heads(x: Tensor) -> Tensor:
        return torch.stack([x[..., 0:4], x[..., 4:8]], dim=1)

    q, k, v = heads(query @ w_q.T + b_q), heads(memory @ w_k.T + b_k), heads(memory @ w_v.T + b_v)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / 2
    masked = torch.where(masks.causal(3, 5, align="lower_right"), scores, -torch.inf)
    weights = masked.exp() / masked.exp().sum(-1, keepdim=True)
    context = torch.einsum("bhqk,bhkd->bhqd", weights, v)
    merged = torch.cat([context[:, 0], context[:, 1]], dim=-1)
    output = merged @ theirs.out_proj.weight.detach().T + theirs.out_proj.bias.detach()
    for number, stage in enumerate((q, k, v, scores, masked, weights, context, merged, output), start=1):
        assert page.numbers(f"steps-attention-{number}") == grids(stage) * 2, number  # scratch, then torch.nn


@pytest.mark.parametrize("name", ["post-norm", "pre-norm", "decoder"])
def test_the_last_step_of_a_layer_is_what_torch_returns(name: str, page: PageReader) -> None:
    from torch import nn

    from equivalence_tests.instruments.weights import randomize_parameters

    src, tgt, memory = random_tensor(1, 5, 8, seed=3), random_tensor(1, 3, 8, seed=4), random_tensor(1, 5, 8, seed=5)
    if name == "decoder":
        layer = nn.TransformerDecoderLayer(8, 2, 7, 0.0, batch_first=True)
        decoder = nn.TransformerDecoder(layer, 1, norm=nn.LayerNorm(8)).double()
        mask = masks.to_module_mask(masks.causal(3))
        expected = randomize_parameters(decoder)(tgt, memory, tgt_mask=mask)
    else:
        encoder = nn.TransformerEncoderLayer(8, 2, 7, 0.0, batch_first=True, norm_first=name == "pre-norm").double()
        expected = randomize_parameters(encoder)(src)
    last = max(int(x.rpartition("-")[2]) for x in page.ids if re.fullmatch(f"steps-{name}-\\d+", x))
    assert page.numbers(f"steps-{name}-{last}") == grids(expected) * 2


@pytest.fixture(scope="module")
def views() -> dict[str, steps.View]:
    return {view.name: view for view in steps_section.views()}


def test_no_step_differs_by_more_than_rounding(views: dict[str, steps.View], page: PageReader) -> None:
    assert all(view.steps for view in views.values())
    for place, step in ((f"steps-{x.name}-{n}", step) for x in views.values() for n, step in enumerate(x.steps, 1)):
        assert step.gap == "< 1e-12", place
        assert "< 1e-12" in page.texts[place]
        assert {quote.excerpt.file.partition("/")[0] for quote in step.scratch.quotes} == {"scratch"}
        assert {quote.excerpt.file.partition("/")[0] for quote in step.torch.quotes} == {"torch"}
        shown = [texts(table) for side in (step.scratch, step.torch) for table in side.tables]
        assert page.numbers(place) == shown, place


def texts(table: Matrix) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.cells]


def test_gradients_are_those_of_autograd(views: dict[str, steps.View], page: PageReader) -> None:
    """In another way: from a loss, through the module of torch.nn alone."""
    _, theirs = steps.attention_pair(batch_first=True)
    query, memory = random_tensor(1, 3, 8, seed=1), random_tensor(1, 5, 8, seed=2)
    w_q, w_k, w_v = theirs.in_proj_weight.detach().chunk(3)
    b_q, b_k, b_v = theirs.in_proj_bias.detach().chunk(3)
    leaves = [
        torch.stack((x @ w.T + b).split(4, -1), 1).requires_grad_()
        for x, w, b in ((query, w_q, b_q), (memory, w_k, b_k), (memory, w_v, b_v))
    ]
    q, k, v = leaves
    hidden = ~masks.causal(3, 5, align="lower_right")
    weights = (q @ k.mT / 2).masked_fill(hidden, -math.inf).softmax(-1)
    output = theirs.out_proj((weights @ v).transpose(1, 2).flatten(2))
    d_q, d_k, d_v = torch.autograd.grad((output * random_tensor(1, 3, 8, seed=7)).sum(), leaves)
    places = {"d_q": d_q, "d_k": d_k, "d_v": d_v}
    for number, step in enumerate(views["backward"].steps, start=1):
        if step.name in places:
            assert page.numbers(f"steps-backward-{number}") == grids(places.pop(step.name)) * 2
    assert not places


def test_what_nobody_made_is_not_found() -> None:
    x = torch.ones(2, 3, dtype=torch.float64)
    tape = tape_of(lambda: x.sin())
    with pytest.raises(NotOnTapeError, match=r"none of 1 operations made a tensor of shape \(2, 3\)"):
        tape.made(x * 5)
    with pytest.raises(NotOnTapeError, match=r"no tensor has the numbers of shape \(3, 2\) in their order"):
        tape.found(torch.arange(6.0, dtype=torch.float64).view(3, 2))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["page", *arguments])
    return result.exit_code, " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


def test_the_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_command, "build_page", lambda _: "<!doctype html>")
    file = tmp_path / "a.html"
    assert run(str(file))[0] == 0
    assert file.read_text(encoding="utf-8") == "<!doctype html>"
    monkeypatch.chdir(tmp_path)
    assert run()[1] == "attention.html: 0.00 MB. Open it in a browser."


def refuse(*arguments: object) -> str:
    raise AssertionError("nothing is computed where nothing can be written")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("missing/a.html", "FILE must lie in a folder that exists"),
        ("", "FILE must be a file, got the folder"),
        ("a.txt/b.html", "FILE must lie in a folder that exists"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_is_computed(
    file: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_command, "build_page", refuse)
    (tmp_path / "a.txt").touch()
    status, output = run(str(tmp_path / file))
    assert status == 2
    assert message in output


@pytest.mark.skipif(sys.platform == "win32", reason="there is no /proc")
def test_an_unwritable_file_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_command, "build_page", refuse)
    status, output = run("/proc/attention.html")
    assert status == 2
    assert "FILE must be writable, got /proc/attention.html" in output


def test_a_section_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(section: building.Section) -> building.Section:
        return building.Section(section.name, section.title, section.lead, refuse, lambda: f"no {section.name} here")

    lacks: Sequence[building.Section] = tuple(map(lacking, SECTIONS))
    monkeypatch.setattr(building, "SECTIONS", lacks)
    told: list[str] = []
    html = build_page(told.append)
    assert told == [section.title for section in SECTIONS]
    assert all(f"no {section.name} here" in html for section in lacks)


def test_an_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_autograd_node")
    for section in SECTIONS[:2]:
        assert f"torch {torch.__version__} does not tell" in section.lacks()
