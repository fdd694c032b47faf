"""An EQUAL of a layer, a stack or a model is one program: it runs alone, and lists what stands between its parts."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from equivalence_tests.__main__ import app
from equivalence_tests.checker.engine.running import Call, called_by_hooks
from equivalence_tests.checker.equivalent.steps import Step
from equivalence_tests.checker.equivalent.texts import text
from equivalence_tests.checker.helpers_for_tests import changed, program_of, proof_holds, saved
from equivalence_tests.checker.layers.whole_scopes import Scope
from equivalence_tests.checker.layers.whole_steps import Follower
from equivalence_tests.checker.parts.kinds import atoms_of
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.equivalents import like
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.stages import OneMatrix
from equivalence_tests.instruments.weights import randomize_parameters
from equivalence_tests.wrong import fixed_layers
from equivalence_tests.wrong.editing import Version
from equivalence_tests.wrong.sources import Right

ALONE = """
import importlib.util, sys, torch
for path in sys.argv[1:]:
    case = torch.load(path + ".pt")
    spec = importlib.util.spec_from_file_location("theirs", path)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    made = theirs.Equivalent().double().eval()
    made.load_state_dict(theirs.from_theirs(case["state"]), strict=True)
    for inputs, output in case["calls"]:
        error = (made(**inputs) - output).abs().max() / output.abs().max()
        assert error < 1e-12, (path, error)
    back = theirs.to_theirs(made.state_dict(), {name: torch.zeros_like(x) for name, x in case["state"].items()})
    assert all(torch.equal(back[name], x) for name, x in case["state"].items()), path
assert not {"equivalence_tests", "scratch", "builtin"} & {name.partition(".")[0] for name in sys.modules}
"""
RIGHT = {right.name: right for right in fixed_layers.rights()}
IN_A_PART = "feed-forward with positions inside"
FOUND_BY_NAME = (
    *("last norm dropped", "last norm left out", "feed-forward left out"),
    *("gate outside of its activation", "gated by two activations", "scores less their mean", IN_A_PART),
)


def built(right: Right, text: str, folder: Path) -> nn.Module:
    return right.built(right.imported(text, folder)[1])


def steps_of(module: nn.Module, given: dict[str, Any]) -> list[Step]:
    torch.set_default_dtype(torch.float64)
    with called_by_hooks(module):
        run = Call(module, (), given).run(read=False)
    kinds = {path: kind for path, kind in atoms_of(module).items() if kind}
    masks = dict.fromkeys(name for name in given if "mask" in name)
    return Follower(module, run.recorder, kinds, masks).steps(list(tensors_in((run.output,))))


def written(right: Right, folder: Path) -> str:
    """Write the program of a right one into a file, and beside it what the user's own code gives."""
    module = built(right, right.text, folder)
    randomize_parameters(module)
    report = verify(module)
    assert report.verdict == "equal", str(report)
    path = folder / f"{right.name}_in_torch.py"
    path.write_text(program_of(report))
    calls = [(given, module(**given).detach()) for given in right.drawn(5, 7)]
    torch.save({"state": module.state_dict(), "calls": calls}, f"{path}.pt")
    return str(path)


@pytest.fixture(autouse=True)
def _in_float64() -> Any:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.thorough
def test_the_program_of_a_whole_runs_alone_in_a_fresh_interpreter(tmp_path: Path) -> None:
    paths = [written(RIGHT[name], tmp_path) for name in ("PostNormLayer", "GatedBlock", "CrossLayer", "Gpt")]
    run = subprocess.run([sys.executable, "-c", ALONE, *paths], capture_output=True, text=True, check=False)
    assert not run.returncode, run.stderr


@pytest.mark.parametrize("right", RIGHT.values(), ids=lambda right: right.name)
def test_each_step_of_what_is_right_has_evidence(right: Right, tmp_path: Path) -> None:
    steps = steps_of(built(right, right.text, tmp_path), right.drawn(0, 6)[-1])
    assert all(step.evidence for step in steps), steps


@pytest.mark.parametrize(
    "version",
    [one for one in fixed_layers.versions() if one.operator not in FOUND_BY_NAME],
    ids=lambda version: f"{version.right.name} {version.operator}",
)
def test_what_is_wrong_between_the_parts_is_a_step_without_evidence(version: Version, tmp_path: Path) -> None:
    steps = steps_of(built(version.right, version.text, tmp_path), version.right.drawn(0, 6)[-1])
    assert not all(step.evidence for step in steps), steps


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("input added at the end", "times 2"),
        ("embedding added twice", "times 2"),
        ("gated by two activations", "mul between the parts"),
        (IN_A_PART, "add between the parts"),
    ],
)
def test_a_wrong_whole_is_not_called_equal(name: str, said: str, tmp_path: Path) -> None:
    version = next(one for one in fixed_layers.versions() if one.operator == name)
    report = verify(built(version.right, version.text, tmp_path))
    assert (report.verdict, report.mistakes) == ("unchecked", ())
    assert said in report.reason


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "blamed"),
    [
        ("features of the feed-forward moved", "changed_by_roll"),
        ("values in another order", "changed_by_flip"),
        ("tokens moved before each layer", "changed_by_roll"),
        ("half of the features blanked before", "changed_by_index_fill"),
        ("scores less their mean", "changed_by_sub"),
    ],
)
def test_the_expression_without_which_it_is_torchs_is_blamed(name: str, blamed: str, tmp_path: Path) -> None:
    version = next(one for one in fixed_layers.versions() if one.operator == name)
    report = verify(built(version.right, version.text, tmp_path))
    assert report.mistakes == (blamed,), str(report)
    (finding,) = report.findings
    assert finding.line is not None
    assert finding.line.number in version.lines
    assert proof_holds(finding)


def test_a_feed_forward_that_never_runs_is_named(tmp_path: Path) -> None:
    version = next(one for one in fixed_layers.versions() if one.operator == "feed-forward left out")
    assert verify(built(version.right, version.text, tmp_path)).mistakes == ("sublayer_unused",)


def test_an_expression_that_may_be_intended_is_named_with_its_line(tmp_path: Path) -> None:
    version = next(one for one in fixed_layers.versions() if one.operator == "branch halved")
    report = verify(built(version.right, version.text, tmp_path))
    assert (report.verdict, report.findings) == ("unchecked", []), str(report)
    assert f"on line {version.lines[0]}, it is a Transformer of torch's parts" in report.reason
    assert "constant factor" in report.reason


def test_a_norm_of_what_is_normalised_already_is_a_step(tmp_path: Path) -> None:
    right = RIGHT["PostNormLayer"]
    text = right.text.replace("self.norm1, ", "self.added, self.norm1, ", 1).replace(
        "= nn.LayerNorm(", "= nn.LayerNorm(d_model), nn.LayerNorm(", 1
    )
    text = text.replace("= self.norm1(", "= self.added(self.norm1(").replace(
        "dropout(attended))", "dropout(attended)))"
    )
    said = {step.words: step.evidence for step in steps_of(built(right, text, tmp_path), right.drawn(0, 6)[-1])}
    assert said["added normalises what is normalised already"] == "the sub-module added"


def test_a_norm_of_what_a_sublayer_gives_is_a_step(tmp_path: Path) -> None:
    right = RIGHT["PreNormBlock"]
    text = right.text.replace("super().__init__()\n", "super().__init__()\n        self.added = nn.LayerNorm(dim)\n")
    text = text.replace("self.mlp(self.ln_2(x))", "self.added(self.mlp(self.ln_2(x)))")
    said = {step.words: step.evidence for step in steps_of(built(right, text, tmp_path), right.drawn(0, 6)[-1])}
    assert said["added normalises what mlp gives"] == "the sub-module added"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("cut", "never"),
    [
        ("clamp(-900.0, 900.0)", True),
        ("clamp_max(900.0)", True),
        ("clamp(-0.5, 0.5)", False),
        ("clamp(max=65504.0)", False),
        ("clamp(min=-900.0, max=1e30)", True),
    ],
)
def test_a_bound_that_nothing_reaches_was_not_run(cut: str, never: bool, tmp_path: Path) -> None:
    right, last = RIGHT["PreNormBlock"], "x + self.mlp(self.ln_2(x))"
    assert last in right.text
    text = right.text.replace(last, f"({last}).{cut}")
    report = verify(built(right, text, tmp_path))
    assert any("the bound in line" in one.what for one in report.not_exercised) == never, str(report)


def test_what_changes_nothing_is_no_accusation(tmp_path: Path) -> None:
    right = RIGHT["PreNormBlock"]
    text = right.text.replace("q @ k.transpose(-2, -1)", "q @ (k - 1).transpose(-2, -1)")  # the same for all keys
    report = verify(built(right, text, tmp_path))
    assert (report.verdict, report.findings, report.mistakes) == ("unchecked", [], ("key_changed_by_sub",)), str(report)


def test_a_matrix_beside_what_is_given_is_a_sublayer(tmp_path: Path) -> None:
    right = RIGHT["PostNormLayer"]
    text = right.text.replace(
        "super().__init__()\n", "super().__init__()\n        self.added = nn.Linear(d_model, d_model)\n", 1
    )
    text = text.replace("attended = ", "src = src + self.added(src)\n        attended = ")
    said = {step.words: step.evidence for step in steps_of(built(right, text, tmp_path), right.drawn(0, 6)[-1])}
    assert said["added alone is a sublayer"] == "the sub-module added"


class NormalisesItself(OneMatrix):
    """An attention with a norm of its own, which is intended."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class AroundIt(nn.Module):
    def __init__(self, dim: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.attn, self.norm1, self.norm2 = NormalisesItself(dim, heads), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 20), nn.ReLU(), nn.Linear(20, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(x + self.attn(self.norm1(x)))
        return x + self.mlp(self.norm2(x))

    def between(self, x: Tensor) -> Tensor:
        return x


class StrangeAroundIt(AroundIt):
    def between(self, x: Tensor) -> Tensor:
        return x.abs()


def test_what_is_intended_inside_a_part_says_nothing_for_what_stands_around_it() -> None:
    report = verify(AroundIt)
    assert (report.verdict, [one.name for one in report.intended]) == ("equal", ["project_of_its_own"]), str(report)
    report = verify(StrangeAroundIt)
    assert report.verdict == "deviates", str(report)
    assert "x.abs() is not part of" in report.findings[0].sentence


class TakesATable(nn.Module):
    """Its table is in no state_dict."""

    positions: Tensor

    def __init__(self, dim: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 20), nn.ReLU(), nn.Linear(20, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.register_buffer("positions", torch.randn(64, dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions[: x.size(1)]
        x = self.norm1(x + self.attn(x, x, x, need_weights=False)[0])
        return self.norm2(x + self.mlp(x))


class AddsABiasOfItsOwn(nn.Module):
    """Predicts words with a matrix that has its bias beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 30, bias=False)
        self.bias, self.shift = nn.Parameter(torch.randn(30)), nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)) + self.bias


class ShiftsWhatItsNormGives(AddsABiasOfItsOwn):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x) + self.shift) + self.bias


def test_a_bias_that_is_a_parameter_beside_its_matrix_is_a_bias_and_one_of_something_else_is_none() -> None:
    given = {"x": torch.randn(2, 9, 12, dtype=torch.float64)}
    assert steps_of(AddsABiasOfItsOwn().double(), given) == []
    assert "" in [step.evidence for step in steps_of(ShiftsWhatItsNormGives().double(), given)]


def test_a_number_of_numpy_is_written_as_a_number() -> None:
    assert text(Scope("", {}, set()).written(np.float64(0.5), np.float64(0.5))) == "0.5"


def test_the_first_of_the_last_rows_of_a_table_is_a_number_less_a_length() -> None:
    scope = Scope("", {"x": (torch.zeros(1, 11), torch.zeros(1, 13))}, set())
    assert text(scope.written(53, 51)) == "64 - x.size(1)"


def test_complex_tables_stay_complex() -> None:
    module = nn.Linear(2, 2, dtype=torch.float32)
    module.register_buffer("turns", torch.ones(3, dtype=torch.complex64))
    like(module, None, torch.float64)
    assert (module.weight.dtype, module.get_buffer("turns").dtype) == (torch.float64, torch.complex64)


def test_what_no_state_dict_holds_is_taken_from_the_module() -> None:
    module, x = TakesATable().double().eval(), torch.randn(2, 9, 12, dtype=torch.float64)
    report = verify(module)
    assert report.equivalent is not None, str(report)
    assert torch.equal(report.equivalent.of(module)(x), module(x))


class SharpenedGelu(nn.Module):
    """x · sigmoid(1.702 x), written out, as one activation of torch's name."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class CausalAttention(OneMatrix):
    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        return self.finish(F.scaled_dot_product_attention(*self.operands(x), is_causal=causal))


@dataclass
class Encoded:
    tokens: Tensor


class ClipLayer(nn.Module):
    """Its parts stand in a dictionary, its attention is asked to hide the future, and it returns a dataclass."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        parts = {"attn": CausalAttention(dim, heads), "norm": nn.LayerNorm(dim), "act": SharpenedGelu()}
        self.parts, self.up, self.down = nn.ModuleDict(parts), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Encoded:
        x = x + self.parts["attn"](self.norm(x), causal=True)
        return Encoded(x + self.down(self.act(self.up(self.parts["norm"](x)))))

    def act(self, x: Tensor) -> Tensor:
        return self.parts["act"](x)


class GatedByAnother(ClipLayer):
    def act(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.6 * x)


def test_what_is_asked_of_a_part_and_activations_written_out_are_followed() -> None:
    report = verify(ClipLayer)
    assert report.verdict == "equal", str(report)
    assert ".triu(1)" in program_of(report)
    assert verify(GatedByAnother).verdict == "unchecked"


class PaddedPreNormLayer(nn.Module):
    """Drops in every place in which torch's layer does; True in its masks = may look."""

    def __init__(self, dim: int, heads: int, hidden: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.up, self.down, self.drop = nn.Linear(dim, hidden), nn.Linear(hidden, dim), nn.Dropout(dropout)
        self.ln_1, self.ln_2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x: Tensor, pad: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        y = self.ln_1(x)
        hidden = None if pad is None else ~pad
        x = x + self.drop(self.attn(y, y, y, hidden, need_weights=False, attn_mask=None if mask is None else ~mask)[0])
        return x + self.drop(self.down(self.drop(F.gelu(self.up(self.ln_2(x))))))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


class HandsItsSublayersOver(nn.Module):
    """Each residual connection is given what it goes around, and holds a norm and no matrix."""

    def __init__(self, d_model: int, num_heads: int, dim_feedforward: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(d_model, dim_feedforward), nn.ReLU(), nn.Linear(dim_feedforward, d_model))
        self.around_attn, self.residual_ffn = Residual(d_model), Residual(d_model)

    def values(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.around_attn(x, lambda y: self.attn(y, y, self.values(y), need_weights=False)[0])
        return self.residual_ffn(x, self.ffn)


class RollsItsValues(HandsItsSublayersOver):
    def values(self, x: Tensor) -> Tensor:
        return x.roll(1, 1)


def test_residual_connections_that_are_given_their_sublayer_are_written_where_they_are_called() -> None:
    report = verify(HandsItsSublayersOver)
    assert (report.verdict, report.not_exercised) == ("equal", []), str(report)
    assert "self.around_attn = nn.Module()" in program_of(report)
    assert verify(RollsItsValues).mistakes == ("changed_by_roll",)


class FirstPlaces(nn.Module):
    """Is given how many tokens there are, and no tensor."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.table = nn.Embedding(64, d_model)

    def forward(self, count: int) -> Tensor:
        return self.table(torch.arange(count))


class CastsItsIds(nn.Module):
    """Whole numbers are ids in any width; of tokens they would be the rounded ones."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(vocab_size, d_model), FirstPlaces(d_model)
        self.layer = nn.TransformerEncoderLayer(d_model, 3, 40, batch_first=True)

    def tokens(self, ids: Tensor) -> Tensor:
        return self.embedding(ids.long()) + self.places(ids.size(1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.tokens(ids))


class RoundsItsTokens(CastsItsIds):
    def tokens(self, ids: Tensor) -> Tensor:
        return super().tokens(ids).mul(1.0).to(torch.long).double()


class Angles(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(length), 10000.0 ** -(torch.arange(0, width, 2) / width)).repeat(1, 2)
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())

    def forward(self, length: int) -> tuple[Any, Any]:
        return self.cosines[:length], self.sines[:length]  # type: ignore[index]


class Turned(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        b, length, width = x.shape
        q, k, v = self.qkv(x).view(b, length, 3, 3, -1).permute(2, 0, 3, 1, 4)
        cosines, sines = angles(length)
        q, k = (y * cosines + torch.cat((-y.chunk(2, -1)[1], y.chunk(2, -1)[0]), -1) * sines for y in (q, k))
        weights = (q @ k.mT / (width // 3) ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, length, width))


class TurnedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.attn = nn.LayerNorm(width), Turned(width)

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        return x + self.attn(self.before(x), angles)


class OfOneTable(nn.Module):
    """Hands one module of angles to all its blocks."""

    def __init__(self, vocab_size: int = 31, width: int = 42) -> None:
        super().__init__()
        self.tokens, self.angles = nn.Embedding(vocab_size, width), Angles(width // 3, 64)
        self.blocks = nn.ModuleList(TurnedBlock(width) for _ in range(2))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.angles)
        return self.head(x)


def test_a_module_that_is_handed_to_others_is_called_where_it_is_held() -> None:
    report = verify(OfOneTable)
    assert report.verdict == "equal", str(report)
    assert report.equivalent is not None
    assert report.equivalent.source.count("self.angles(") == 2


class OfOneTableInTraining(OfOneTable):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * (0.5 if self.training else 1)


def test_what_only_the_whole_could_follow_is_compared_in_training_too() -> None:
    assert verify(OfOneTableInTraining).mistakes == ("training_differs",)


class StopsAGradient(TurnedBlock):
    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        return x + self.attn(self.before(x).detach(), angles)


class OfStoppedGradients(OfOneTable):
    def __init__(self, vocab_size: int = 31, width: int = 42) -> None:
        super().__init__(vocab_size, width)
        self.blocks = nn.ModuleList(StopsAGradient(width) for _ in range(2))


def test_a_gradient_that_is_stopped_is_no_part_of_an_equal() -> None:
    report = verify(OfStoppedGradients)
    assert report.verdict == "unchecked", str(report)
    assert "gradient" in report.reason


def test_ids_may_be_cast_and_tokens_may_not() -> None:
    assert verify(CastsItsIds, kind="layers").verdict == "equal"
    assert verify(RoundsItsTokens, kind="layers").verdict not in ("equal", "partial")


def test_a_layer_that_is_torchs_is_torchs_own_layer() -> None:
    module = PaddedPreNormLayer(12, 3, 20)
    report = verify(module)
    assert report.verdict == "equal", str(report)
    same = report.equivalent
    assert same is not None
    assert same.torchs == (
        "nn.TransformerEncoderLayer(12, 3, 20, activation=F.gelu, layer_norm_eps=1e-06, "
        "norm_first=True, batch_first=True)"
    )
    assert same.compared[-3:] == ("a call with pad, mask", "a call with pad", "a call with mask")
    layer = nn.TransformerEncoderLayer(12, 3, 20, 0.1, F.gelu, 1e-6, batch_first=True, norm_first=True).double().eval()
    module.double().eval()
    layer.load_state_dict(same.names()["from_theirs"](module.state_dict()), strict=True)
    x, pad = torch.randn(2, 5, 12, dtype=torch.float64), torch.arange(5) < torch.tensor([[3], [5]])
    assert torch.allclose(layer(x, src_key_padding_mask=~pad)[pad], module(x, pad)[pad], atol=1e-12)
    back = same.to_theirs(layer.state_dict(), {name: torch.zeros_like(x) for name, x in module.state_dict().items()})
    assert all(torch.equal(back[name], x) for name, x in module.state_dict().items())


def test_the_command_prints_torchs_layer(tmp_path: Path) -> None:
    path = tmp_path / "theirs.py"
    layer = inspect.getsource(PaddedPreNormLayer)
    path.write_text(f"import torch\nfrom torch import Tensor, nn\nfrom torch.nn import functional as F\n\n\n{layer}")
    printed = CliRunner().invoke(app, ["verify", f"{path}:PaddedPreNormLayer", "--equivalent"]).stdout
    assert "class Equivalent(nn.TransformerEncoderLayer):" in printed
    assert "src_key_padding_mask=None if pad is None else ~pad" in printed


class Neighbours(nn.Module):
    """The convolution module of a Conformer."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.widen, self.narrow = nn.Conv1d(d_model, 2 * d_model, 1), nn.Conv1d(d_model, d_model, 1)
        self.depthwise, self.batch = nn.Conv1d(d_model, d_model, 3, padding=1, groups=d_model), nn.BatchNorm1d(d_model)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.widen(self.norm(x).mT), dim=1)
        return self.narrow(F.silu(self.batch(self.depthwise(y)))).mT


class ConformerLayer(nn.Module):
    step = 0.5

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.before, self.after = (self.feed_forward(d_model) for _ in range(2))
        self.attention, self.norm = nn.MultiheadAttention(d_model, num_heads, batch_first=True), nn.LayerNorm(d_model)
        self.convolution: nn.Module = Neighbours(d_model)
        self.last = nn.LayerNorm(d_model)

    @staticmethod
    def feed_forward(d_model: int) -> nn.Sequential:
        width = 2 * d_model
        return nn.Sequential(nn.LayerNorm(d_model), nn.Linear(d_model, width), nn.SiLU(), nn.Linear(width, d_model))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.before(x)
        y = self.norm(x)
        x = x + self.attention(y, y, y)[0]
        x = self.mixed(x, y)
        return self.last(x + self.step * self.after(x))

    def mixed(self, x: Tensor, _: Tensor) -> Tensor:
        return x + self.convolution(x)


class AddsWhatItHolds(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x)


class ConformerOfResiduals(ConformerLayer):
    """Its residual connection around the convolution is a module."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.convolution = AddsWhatItHolds(self.convolution)

    def mixed(self, x: Tensor, _: Tensor) -> Tensor:
        return self.convolution(x)


class ResidualTwice(ConformerOfResiduals):
    def mixed(self, x: Tensor, y: Tensor) -> Tensor:
        return x + super().mixed(x, y)


class ConvolutionWithoutResidual(ConformerLayer):
    def mixed(self, x: Tensor, _: Tensor) -> Tensor:
        return self.convolution(x)


class ConvolutionOfWhatWasAttended(ConformerLayer):
    def mixed(self, x: Tensor, y: Tensor) -> Tensor:
        return x + self.convolution(y)


def test_a_conformer_is_followed() -> None:
    report = verify(ConformerLayer)
    assert report.verdict == "equal", str(report)
    said = " ".join(str(report).split())
    assert "two feed-forwards are half a step each" in said
    assert "convolution mixes neighbouring tokens. Intended: the sub-module convolution, a Neighbours" in said
    assert verify(ConformerOfResiduals).verdict == "equal", str(verify(ConformerOfResiduals))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("wrong", "mistakes"),
    [
        (changed(ConformerLayer, step=1.0), ()),
        (ConvolutionWithoutResidual, ("residual_missing",)),
        (ConvolutionOfWhatWasAttended, ()),
        (ResidualTwice, ("residual_added_twice",)),
    ],
)
def test_a_conformer_that_is_wired_otherwise_is_not_equal(wrong: type[nn.Module], mistakes: tuple[str, ...]) -> None:
    report = verify(wrong)
    assert report.verdict == ("deviates" if mistakes else "unchecked"), str(report)
    assert report.mistakes == mistakes


IMAGES = """
import torch
from torch import nn


class Images(nn.Module):
    def __init__(self, image_size=8, patch_size=4, dim=12, depth=2, num_heads=3, num_classes=5):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, patch_size, patch_size)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, 64, dim))
        layer = nn.TransformerEncoderLayer(dim, num_heads, 2 * dim, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(type(layer)(dim, num_heads, 2 * dim, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(dim, num_classes)

    def forward(self, image):
        x = self.patch(image).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        x = x + self.pos[:, : x.size(1)]
        for layer in self.layers:
            last, x = x, layer(x)
        return self.head(x[:, 0])
"""
OTHERWISE = (
    ("x = layer(x)", "x = layer(x)", ""),
    ("x[:, 0]", "x[:, 1:].mean(1)", ""),
    ("x[:, 0]", "x[:, 2:].mean(1)", "x[:, 2:] is not part of"),
    ("[self.cls.expand(len(x), -1, -1), x]", "[x, self.cls.expand(len(x), -1, -1)]", "another token of all tokens"),
    ("x[:, 0]", "x[:, 1]", "another token of all tokens is taken"),
    ("self.head(x[:, 0])", "self.head(last[:, 0])", "nothing uses what layers.1 gives"),
    (": x.size(1)]", "x.size(1) : 2 * x.size(1)]", "pos is added from its row "),
    ("self.pos[:, : x.size(1)]", "self.pos[:, :1]", "pos is added to each token"),
    ("x + self.pos", "x * self.pos", "each token is multiplied by numbers of its own, of pos"),
    ("last, x = x, layer(x)", "last, x = x, x + layer(x)", "layers.0, which has residual connections of its own, is"),
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("old", "new", "said"), OTHERWISE, ids=[new for _, new, _ in OTHERWISE])
def test_what_a_model_does_to_its_tokens_is_said(old: str, new: str, said: str, tmp_path: Path) -> None:
    report = verify(saved(tmp_path, IMAGES.replace(old, new), "Images"))
    located = "deviates" if "is not part of" in said else "unchecked"
    assert report.verdict == (located if said else "equal"), str(report)
    assert said in " ".join(str(report).split())


PAIRS = """
import torch
from torch import nn


class Pairs(nn.Module):
    def __init__(self, vocab_size, dim, num_heads=2, num_classes=5):
        super().__init__()
        self.first, self.second = (nn.Embedding(vocab_size, dim // 2) for _ in range(2))
        self.places = nn.Embedding(64, dim)
        layer = nn.TransformerEncoderLayer(dim, num_heads, 2 * dim, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(dim, num_classes)

    def forward(self, words, tags):
        x = torch.cat([self.first(words), self.second(tags)JOINED], -1)
        return self.head(self.encoder(x + self.places.weight[: x.size(1)])[:, -1])
"""


@pytest.mark.parametrize(("joined", "verdict"), [("", "equal"), (".flip(1)", "deviates")])
def test_embeddings_of_two_ids_of_each_token_are_joined(joined: str, verdict: str, tmp_path: Path) -> None:
    report = verify(saved(tmp_path, PAIRS.replace("JOINED", joined), "Pairs"))  # whose width has to be even
    assert report.verdict == verdict, str(report)


def test_tables_of_positions_may_be_added_up_first(tmp_path: Path) -> None:
    text = PAIRS.replace("JOINED", "").replace("self.places = ", "self.more, self.places = nn.Embedding(64, dim), ")
    places = "(self.places(n := torch.arange(x.size(1), device=x.device)) + self.more(n))"
    report = verify(saved(tmp_path, text.replace("self.places.weight[: x.size(1)]", places), "Pairs"))
    assert report.verdict == "equal", str(report)


OF_PARAMETERS = """
import torch
from torch import nn


class Words(nn.Module):
    def __init__(self, vocab_size, dim, num_heads):
        super().__init__()
        self.words, self.places = nn.Parameter(torch.randn(vocab_size, dim)), nn.Parameter(torch.randn(64, dim))
        layer = nn.TransformerEncoderLayer(dim, num_heads, 2 * dim, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Parameter(torch.randn(vocab_size, dim))

    def forward(self, tokens):
        return torch.einsum("... j, i j -> ... i", self.encoder(self.words[tokens] + PLACES), self.head)
"""


def test_parameters_may_be_looked_up_and_multiplied(tmp_path: Path) -> None:
    for end, verdict in (
        ("tokens.size(1)]", "equal"),
        ("len(tokens), None]", "deviates"),
    ):
        report = verify(saved(tmp_path, OF_PARAMETERS.replace("PLACES", f"self.places[: {end}"), "Words"))
        assert report.verdict == verdict, str(report)


def test_padding_of_ids_that_a_parameter_knows_is_tried(tmp_path: Path) -> None:
    padded = OF_PARAMETERS.replace("PLACES)", "self.places[: tokens.size(1)], src_key_padding_mask=tokens HIDES 0)")
    for hides, verdict in (("==", "equal"), ("!=", "deviates")):
        report = verify(saved(tmp_path, padded.replace("HIDES", hides), "Words"))
        assert report.verdict == verdict, str(report)
