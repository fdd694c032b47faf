"""An EQUAL is a program: it is written down, runs alone, and gives the numbers of the code that was checked."""

import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.visibility import Windows
from equivalence_tests.checker.equivalent.biases import Bias, Visible
from equivalence_tests.checker.equivalent.comparing import difference_of
from equivalence_tests.checker.equivalent.expressions import Attended, Evidence, Given, Made, Values
from equivalence_tests.checker.equivalent.parameters import Parameters, blocks_of, joined, written_back
from equivalence_tests.checker.equivalent.program import Program
from equivalence_tests.checker.equivalent.rotation import Rotation
from equivalence_tests.checker.equivalent.steps import Step, not_called_again
from equivalence_tests.checker.equivalent.writing import AttentionWriter
from equivalence_tests.checker.helpers_for_tests import changed, line_of, program_of, proof_holds, saved
from equivalence_tests.checker.mistakes import found_mistake, named_mistake
from equivalence_tests.checker.reach.state import ask
from equivalence_tests.checker.reach.subject import Adapter, subjects
from equivalence_tests.checker.reporting.equivalents import Equivalent
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.conventions import CONVENTIONS
from equivalence_tests.checker.zoo.right import broken
from equivalence_tests.checker.zoo.stages import Operands, SelfAttention
from equivalence_tests.instruments.weights import randomize_parameters

WIDTH, HEADS = 33, 3

ALONE = """
import importlib.util, sys, torch
for path in sys.argv[1:]:
    case = torch.load(path + ".pt")
    spec = importlib.util.spec_from_file_location("theirs", path)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    made = theirs.Equivalent().double()
    made.load_state_dict(theirs.from_theirs(case["state"]), strict=True)
    error = (made(**case["inputs"]) - case["output"]).abs().max() / case["output"].abs().max()
    assert error < 1e-12, (path, error)
    back = theirs.to_theirs(made.state_dict(), {name: torch.zeros_like(x) for name, x in case["state"].items()})
    for name in case["learnt"]:
        assert torch.equal(back[name], case["state"][name]), (path, name)
assert not {"equivalence_tests", "scratch", "builtin"} & {name.partition(".")[0] for name in sys.modules}
"""


class Base(SelfAttention):
    """Attention of a sequence with itself, whose stages the classes below replace."""


class SplitsTheOtherWay(Base):
    """The features of a head lie apart, in the projections and behind the merge alike."""

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.heads)).permute(0, 3, 1, 2)

    def merge(self, context: Tensor) -> Tensor:
        return context.permute(0, 2, 3, 1).flatten(2)


class Grouped(Base):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.k, self.v = (nn.Linear(dim, dim // heads) for _ in range(2))

    def operands(self, x: Tensor) -> Operands:
        k, v = (f(x)[:, None].expand(-1, self.heads, -1, -1) for f in (self.k, self.v))
        return self.split(self.q(x)), k, v


class Biased(Base):
    """A table of relative positions that is learnt."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.table = nn.Parameter(torch.zeros(heads, 63))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        gap = torch.arange(q.size(-2))[:, None] - torch.arange(k.size(-2))
        return super().scores(q, k) + self.table[:, gap.clamp(-31, 31) + 31]


class Gated(Base):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.gate = nn.Linear(dim, dim)

    def merge(self, context: Tensor) -> Tensor:
        return super().merge(context)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gate(x).sigmoid()


class NormedBefore(Base):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.norm, self.q_norm, self.k_norm = nn.LayerNorm(dim), nn.RMSNorm(dim // heads), nn.RMSNorm(dim // heads)

    def operands(self, x: Tensor) -> Operands:
        q, k, v = super().operands(self.norm(x))
        return self.q_norm(q), self.k_norm(k), v


class Counted(Base):
    """Takes the length of each sample, and hides the padding behind it."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        q, k, v = self.operands(x)
        scores = self.scores(q, k)
        if lengths is not None:
            scores = self.hide(scores, torch.arange(k.size(-2)) >= lengths[:, None])
        return self.finish(scores.softmax(-1) @ v)

    def hide(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return scores.masked_fill(hidden[:, None, None], -torch.inf)


class CountedToTheLast(Counted):
    """The last token, which only the longest sample has, is met by no query."""

    def hide(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return super().hide(F.pad(scores[..., :-1], (0, 1)), hidden)


RIGHT: tuple[Callable[..., nn.Module], ...] = (
    Base,
    SplitsTheOtherWay,
    Grouped,
    Biased,
    Gated,
    NormedBefore,
    *CONVENTIONS,
)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.thorough)])
def test_the_same_in_torch_runs_alone_in_a_fresh_interpreter(step: int, tmp_path: Path) -> None:
    paths = [_saved(right, tmp_path) for right in RIGHT[::step]]
    run = subprocess.run([sys.executable, "-c", ALONE, *paths], capture_output=True, text=True, check=False)
    assert not run.returncode, run.stderr


def _saved(right: Callable[..., nn.Module], folder: Path) -> str:
    """Write the program of a class down, with the weights, inputs and output of an instance."""
    report = verify(right)
    assert report.verdict == "equal", str(report)
    assert report.equivalent is not None
    assert report.equivalent.source, report.equivalent.unwritten
    subject = next(iter(subjects(right, "it", Adapter())))
    module = randomize_parameters(subject.function.double().eval(), seed=5)  # type: ignore[attr-defined]
    parameters = inspect.signature(module.forward).parameters.values()
    wanted = [one.name for one in parameters if one.default is one.empty]
    inputs = {name: torch.randn(2, 7, subject.sizes.embed_dim, dtype=torch.float64) for name in wanted[:3]}
    inputs |= {name: torch.rand(2, 1, 7, 7) > 0.3 for name in wanted[3:]}  # of the one that cannot do without a mask
    with torch.no_grad():
        output = module(**inputs)
    output = output if isinstance(output, Tensor) else output[0]
    path = folder / f"{getattr(right, '__name__', 'it')}.py"
    path.write_text(report.equivalent.source, encoding="utf-8")
    learnt = [name for name, _ in module.named_parameters()]
    torch.save({"state": module.state_dict(), "inputs": inputs, "output": output, "learnt": learnt}, f"{path}.pt")
    return str(path)


def test_lengths_are_a_mask_of_torchs_module_and_some_are_full() -> None:
    equivalent = verify(Counted).equivalent
    assert equivalent is not None
    module = Counted(WIDTH, HEADS)
    made = equivalent.of(module)
    assert isinstance(made, nn.MultiheadAttention)
    x, lengths = torch.randn(3, 5, WIDTH), torch.tensor([2, 5, 1])
    assert torch.allclose(made(x, lengths=lengths), module(x, lengths), atol=1e-6)
    assert verify(CountedToTheLast).verdict == "deviates"


def test_where_nothing_more_is_needed_it_is_torchs_own_module() -> None:
    report = verify(Base)
    assert report.equivalent is not None
    module = Base(WIDTH, HEADS)
    made = report.equivalent.of(module)
    assert isinstance(made, nn.MultiheadAttention)
    plain = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    plain.load_state_dict(made.state_dict(), strict=True)
    x = torch.randn(2, 5, WIDTH)
    assert torch.allclose(plain(x, x, x)[0], module(x), atol=1e-6)


def test_each_mask_is_compared() -> None:
    equivalent = verify(nn.MultiheadAttention).equivalent
    assert equivalent is not None
    assert [one.partition(":")[0] for one in equivalent.compared if "mask" in one] == [
        "with attn_mask",
        "with key_padding_mask",
    ]


class SquaresWeights(Base):
    """Twice the scale, which no row of a projection asks for."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        weights = self.scores(q, k).softmax(-1) ** 2
        return self.finish(weights / weights.sum(-1, keepdim=True) @ v)


class ScalesByAlmostNothing(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-9)


class Sorts(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sort(-1).values


class AddsItsInput(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class DoublesItsTokens(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x)


class ProjectsTwice(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(super().forward(x))


class SubtractsValues(Base):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        return self.finish(self.attend(q, k, v) - v)


class GatedByWhatItProjects(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.out(x).sigmoid()


class ExchangesHalves(Base):
    def forward(self, x: Tensor) -> Tensor:
        one, two = super().forward(x).tensor_split(2, -1)
        return torch.cat([two, one], -1)


class FlipsTheFeaturesOfKeys(Base):
    def operands(self, x: Tensor) -> Operands:
        q, k, v = super().operands(x)
        return q, k.flip(-1), v


class NormsKeysWithoutAGain(Base):
    def operands(self, x: Tensor) -> Operands:
        q, k, v = super().operands(x)
        return q, F.layer_norm(k, k.shape[-1:]), v


class NormsAllThree(Base):
    """Queries and keys may be normed; that says nothing for the values."""

    def operands(self, x: Tensor) -> Operands:
        q, k, v = (F.layer_norm(one, one.shape[-1:]) for one in super().operands(x))
        return q, k, v


class NormsBothAndProjectsKeysTwice(Base):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.q_norm, self.k_norm = nn.LayerNorm(dim // heads), nn.LayerNorm(dim // heads)

    def operands(self, x: Tensor) -> Operands:
        return self.q_norm(self.split(self.q(x))), self.k_norm(self.split(self.k(self.k(x)))), self.split(self.v(x))


class WritesIntoItsInput(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.data.mul_(0.5)
        return y


class RemembersItsKeys(Base):
    """Right: a call goes on from the keys and values of the one before."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None

    def operands(self, x: Tensor) -> Operands:
        q, k, v = super().operands(x)
        if self.k_cache is not None and self.v_cache is not None:
            k, v = torch.cat([self.k_cache, k], 2), torch.cat([self.v_cache, v], 2)
        self.k_cache, self.v_cache = k, v
        return q, k, v


def test_no_call_goes_on_from_the_one_before() -> None:
    report = verify(RemembersItsKeys)
    (never,) = report.not_exercised
    assert never.what.endswith("where `self.k_cache is not None` is true"), str(report)
    assert program_of(report)


WRONG = (
    SquaresWeights,
    AddsItsInput,
    DoublesItsTokens,
    ProjectsTwice,
    SubtractsValues,
    GatedByWhatItProjects,
    changed(SplitsTheOtherWay, merge=Base.merge),
    ExchangesHalves,
    FlipsTheFeaturesOfKeys,
    NormsKeysWithoutAGain,
    NormsAllThree,
    NormsBothAndProjectsKeysTwice,
    WritesIntoItsInput,
    ScalesByAlmostNothing,
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_torch_does_not_compute_is_not_called_equal(wrong: type[nn.Module]) -> None:
    report = verify(wrong)
    assert report.verdict in ("deviates", "unchecked"), str(report)
    assert report.findings or report.reason


class CountsFeaturesForHeads(Base):
    """Has as many heads as each should have features."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.num_heads = num_heads

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.num_heads)).transpose(1, 2)


def test_as_many_heads_as_each_should_have_features_are_not_called_equal() -> None:
    report = verify(CountsFeaturesForHeads)
    assert report.verdict == "unchecked", str(report)
    assert "it has 11 heads of 3; it was built for 3 of 11" in report.reason


def test_a_product_with_an_argument_is_a_step_that_nothing_says_is_intended() -> None:
    gated = Made("product", (Attended(), Given("x")))
    assert [step.evidence for step in Evidence(Parameters({})).steps(gated, "output")] == [""]


def test_a_difference_is_stated_where_no_line_explains_it() -> None:
    reason = verify(AddsItsInput).reason
    assert reason.startswith("Nothing says whether this is intended: a residual connection. If it is, say so with")
    assert "times -1; v is called" in verify(SubtractsValues).reason
    assert "sort is not among the parts that an equivalent is made of (line" in verify(Sorts).reason


def test_a_step_is_intended_if_the_user_says_so() -> None:
    report = verify(AddsItsInput, intended={"residual_of_its_own": "as in a block"})
    assert (report.verdict, [one.reason for one in report.intended]) == ("equal", ["as in a block"])
    with pytest.raises(ValueError, match="intended must name"):
        verify(AddsItsInput, intended={"dinner_of_its_own": "as in a block"})


class GatesByAParameter(Base):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.gate = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gate


class ReturnsItsScores(Base):
    less = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k, v = self.operands(x)
        scores = self.scores(q, k)
        return self.finish(scores.softmax(-1) @ v), scores - self.less


class ReturnsMeanWeights(ReturnsItsScores):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out, scores = super().forward(x)
        return out, scores.softmax(-1).mean((0, 1))


def test_an_equal_lists_each_step_of_its_program() -> None:
    (gate,) = verify(GatesByAParameter).intended
    assert (gate.name, gate.reason) == ("output_of_its_own", "the parameter gate")


def test_what_comes_back_beside_the_output_is_compared_too() -> None:
    assert verify(ReturnsItsScores).verdict == verify(ReturnsMeanWeights).verdict == "equal"
    other = verify(changed(ReturnsItsScores, less=1))
    assert (other.verdict, [one.what for one in other.not_exercised]) == ("partial", ["output 2"])


@pytest.mark.parametrize(
    ("slopes", "known"),
    [((0.5, 0.25, 0.125), True), ((2**-4, 2**-8, 2**-2), True), ((0.55, 0.275, 0.1375), False), ((2, 4, 8), False)],
)
def test_slopes_are_alibi_by_their_numbers(slopes: tuple[float, ...], known: bool) -> None:
    assert Bias(slopes=torch.tensor(slopes, dtype=torch.float64)).is_alibi == known


@pytest.mark.parametrize("name", ["context_mixes_tokens", "output_tokens_moved"])
def test_torchs_values_put_in_prove_what_no_patch_puts_right(name: str, tmp_path: Path) -> None:
    mistake = named_mistake(name)
    (finding,) = verify(saved(tmp_path, broken(mistake.right, mistake.changes), "Attention")).findings
    assert finding.name == name
    assert proof_holds(finding)


class AddsASquare(Base):
    """What makes the number cannot be put right alone: a second projection takes part, which torch has not."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.more = nn.Linear(dim, dim)

    def merge(self, context: Tensor) -> Tensor:
        merged = super().merge(context)
        return merged + 0.1 * merged**2 + self.more(merged)


def test_what_is_suspected_without_a_proof_blames_no_line() -> None:
    report = verify(AddsASquare)
    assert (report.verdict, report.mistakes, report.findings) == ("unchecked", ("changed_by_pow",), []), str(report)
    assert "could not be proven: The" in report.reason
    assert ".py:" not in str(report)


def test_a_program_that_does_not_run_is_no_fault_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Tensor:
        raise RuntimeError("other sizes")

    monkeypatch.setattr(Program, "__call__", fails)
    assert "the program written from it does not run (RuntimeError: other sizes)" in verify(Base).reason


def test_the_line_that_writes_into_an_argument_is_found() -> None:
    (finding,) = verify(WritesIntoItsInput).findings
    assert finding.name == "argument_written_into"
    assert "x.data.mul_(0.5)" in line_of(finding)


def test_a_call_that_holds_the_tokens_first_is_compared_whole() -> None:
    x = torch.randn(5, 2, WIDTH)
    (report,) = verify(nn.MultiheadAttention(WIDTH, HEADS), (x, x, x))
    assert report.verdict == "equal", str(report)
    assert report.equivalent is not None
    assert report.equivalent.agrees


class ClassAttention(Base):
    """The first token alone asks; each head has a gate; the scale is a parameter that is frozen."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.gate = nn.Linear(dim, heads)
        self.scale = nn.Parameter(torch.tensor((dim // heads) ** -0.5), requires_grad=False)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self.scale

    def forward(self, x: Tensor) -> Tensor:
        first, (_, k, v) = x[:, 0], self.operands(x)
        context = self.scores(self.split(self.q(first[:, None])), k).softmax(-1) @ v
        return self.finish(context * self.gate(first).sigmoid()[..., None, None])[:, 0]


class Cuts(ClassAttention):
    """The same under a name that says nothing."""


def test_some_tokens_may_ask_where_the_name_of_the_class_says_so() -> None:
    with_name, without = (verify(kind(WIDTH, HEADS), (torch.randn(2, 5, WIDTH),))[0] for kind in (ClassAttention, Cuts))
    said = [one.reason for one in with_name.intended]
    assert said == ["the first token alone, as the name ClassAttention says", "the sub-module gate, a Linear"], said
    assert with_name.verdict == "equal"
    assert (without.verdict, "a part of the tokens" in without.reason) == ("unchecked", True)


class CrossesWithItself(Base):
    """The first token asks all of its stream, and is added to the answer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.asked(x, self.norm(x))

    def asked(self, x: Tensor, memory: Tensor) -> Tensor:
        _, k, v = self.operands(memory)
        q = self.split(self.q(self.norm(x)[:, :1]))
        return x[:, :1] + self.finish(self.attend(q, k, v))


class CrossesWithAnother(CrossesWithItself):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        return self.asked(x, memory)


def test_the_first_token_may_cross_with_its_own_stream() -> None:
    x = torch.randn(2, 5, WIDTH)
    (right,), (other,) = verify(CrossesWithItself(WIDTH, HEADS), (x,)), verify(CrossesWithAnother(WIDTH, HEADS), (x, x))
    assert (right.verdict, right.mistakes) == ("equal", ()), str(right)
    assert other.verdict == "unchecked", str(other)


class Joins(Base):
    def forward(self, x: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
        q, _, _ = self.operands(x)
        _, k, v = self.operands(torch.cat([more, x], 1))
        return self.finish(self.attend(q, k, v))


def test_streams_side_by_side_are_a_step_and_the_parameters_as_they_came_are_compared() -> None:
    report = verify(Joins)
    assert [one.reason for one in report.intended] == ["each are an argument or a parameter"], str(report)
    assert report.equivalent is not None
    assert "the parameters as they came" in report.equivalent.compared


class LearnsItsScale(Base):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) / self.temperature.clamp(min=0.5)


class LearnsAScaleOfEachHead(LearnsItsScale):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.temperature = nn.Parameter(torch.linspace(0.2, 2.0, heads)[:, None, None])


class BothSublayers(Base):
    """Two sublayers in one class, each with its residual and its norm behind it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def stream(self, x: Tensor, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x + super().forward(x))
        return self.norm2(self.stream(x, h) + self.down(self.up(h).relu()))


class LeavesTheStream(BothSublayers):
    def stream(self, x: Tensor, h: Tensor) -> Tensor:
        return x


class AddsItsBranchTwice(BothSublayers):
    def stream(self, x: Tensor, h: Tensor) -> Tensor:
        return h + self.down(self.up(h).relu())


class SquaresItsStream(BothSublayers):
    def stream(self, x: Tensor, h: Tensor) -> Tensor:
        return h * h


def test_a_second_residual_starts_where_the_first_one_ends_and_what_is_taken_twice_is_one_step() -> None:
    assert verify(BothSublayers).verdict == "equal", str(verify(BothSublayers))
    for wrong in (LeavesTheStream, AddsItsBranchTwice, SquaresItsStream):
        assert verify(wrong).verdict in ("unchecked", "deviates"), str(verify(wrong))


class CapsItsScores(Base):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.logit_softcapping = 20.0

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        future = q.new_ones(q.size(2), k.size(2)).triu(1).bool()
        cap = self.logit_softcapping
        return (cap * torch.tanh(super().scores(q, k) / cap)).masked_fill(future, -torch.inf)


class HasASink(Base):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k, v = self.operands(x)
        sinks = self.sinks.view(1, -1, 1, 1).expand(q.size(0), -1, q.size(2), 1)
        weights = torch.cat([self.scores(q, k), sinks], -1).softmax(-1)[..., :-1]
        return self.finish(weights @ v), weights


def test_a_text_that_gives_other_numbers_than_the_program_is_no_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    source = AttentionWriter.source
    monkeypatch.setattr(AttentionWriter, "source", lambda self: source(self).replace("(merged)", "(2 * merged)"))
    report = verify(HasASink)
    assert (report.verdict, "the program written from it gives other numbers" in report.reason) == ("unchecked", True)


class LowRank(nn.Linear):
    """Adds a product of two narrow matrices to its own, as LoRA does."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__(dim, width)
        self.down, self.up = nn.Parameter(torch.randn(dim, 2)), nn.Parameter(torch.randn(2, width))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bent(x @ self.down) @ self.up

    def bent(self, x: Tensor) -> Tensor:
        return x


class Adapted(Base):
    projects: type[LowRank] = LowRank

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.qkv = self.projects(dim, 3 * dim)
        del self.q, self.k, self.v

    def operands(self, x: Tensor) -> Operands:
        q, k, v = (self.split(one) for one in self.qkv(x).chunk(3, -1))
        return q, k, v


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (LearnsItsScale, "torch.reciprocal(torch.clamp_min(self.temperature, 0.5))"),
        (LearnsAScaleOfEachHead, "torch.reciprocal(torch.clamp_min(self.temperature, 0.5))"),
        (Adapted, f"key = self.qkv(x)[..., {WIDTH}:{2 * WIDTH}]"),
        (CapsItsScores, "scores = 20.0 * torch.tanh(scores / 20.0)"),
        (HasASink, "averaged = scores.softmax(-1)[..., :-1] @ value"),
    ],
)
def test_scales_caps_and_sinks_that_are_learnt_and_matrices_of_several_parameters_are_steps(
    kind: type[nn.Module], step: str
) -> None:
    report = verify(kind)
    assert report.verdict == "equal", str(report)
    assert report.intended, "what torch's formula does not have is listed"
    assert step in program_of(report), program_of(report)


def test_a_sub_module_that_mixes_tokens_projects_nothing() -> None:
    of_the_mean = changed(LowRank, bent=lambda _, x: x + x.mean(1, keepdim=True))
    assert verify(changed(Adapted, projects=of_the_mean)).verdict == "unchecked"


@pytest.mark.parametrize(
    ("steps", "grows"), [([1.0, 0.01], True), ([0.0, 1e-5], False), ([1.0, -0.01], False), ([0.1, 0.1], False)]
)
def test_a_rotation_says_a_position_where_its_angles_grow_visibly(steps: list[float], grows: bool) -> None:
    assert Rotation(0, 4, 2, torch.tensor(steps, dtype=torch.float64)).grows == grows


def test_nan_is_no_agreement() -> None:
    assert difference_of(torch.tensor([math.nan]), torch.tensor([1.0])) == math.inf
    assert difference_of(torch.zeros(2), torch.zeros(3)) == math.inf


@pytest.mark.parametrize(
    ("shape", "places", "written"),
    [
        ((6, 4), lambda x: x[2:4], 'w["p"][2:4]'),
        ((4, 6), lambda x: x.T, 'w["p"].T'),
        ((2, 3, 5), lambda x: x[1], 'w["p"].as_strided((3, 5), (5, 1), 15)'),
        ((6, 4), lambda x: x[[0, 2, 4, 1, 3, 5]], 'torch.cat([w["p"].as_strided((3, 4), (8, 1), 0), '),
    ],
)
def test_rows_of_parameters_are_written_as_python(shape: tuple[int, ...], places: Any, written: str) -> None:
    value = torch.randn(shape)
    parameters = Parameters({"before": torch.zeros(7), "p": value})
    wanted = places(torch.arange(value.numel()).view(shape))
    blocks = blocks_of(wanted + 7, parameters)
    assert blocks is not None
    text = joined(blocks, "w")
    assert text.startswith(written)
    assert torch.equal(eval(text, {"torch": torch, "w": {"p": value}}), value.reshape(-1)[wanted])
    empty = {"p": torch.zeros(shape)}
    for line in written_back(blocks, "w", "new"):
        exec(line, {"w": empty, "new": value.reshape(-1)[wanted]})
    assert torch.equal(empty["p"].reshape(-1)[wanted], value.reshape(-1)[wanted])


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (Visible(0), [[1, 0, 0], [1, 1, 0]]),
        (Visible(0, from_end=True), [[1, 1, 0], [1, 1, 1]]),
        (Visible(0, 0), [[1, 0, 0], [0, 1, 0]]),
        (Visible(windows=Windows(2)), [[1, 1, 0], [1, 1, 0]]),
    ],
)
def test_what_a_distance_hides(visible: Visible, seen: list[list[int]]) -> None:
    bias = Bias(visible)(torch.zeros(1, 1, 2, 4), 3, Values({}, Parameters({})))
    assert bias is not None
    assert (~bias[0].isinf()).int().tolist() == seen


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = query @ key.mT / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return scores.softmax(-1) @ value


def test_the_equivalent_of_a_function_is_a_function_of_any_width() -> None:
    report = verify(attention)
    assert report.equivalent is not None
    assert report.equivalent.is_function
    query, key, value = torch.randn(2, 4, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 6)
    mask = torch.rand(2, 4, 5) < 0.7
    mask[..., 0] = True
    made = report.equivalent.of(None)
    torch.testing.assert_close(made(query, key, value), attention(query, key, value))
    torch.testing.assert_close(made(query, key, value, mask=mask), attention(query, key, value, mask))
    with pytest.raises(ValueError, match="is a function"):
        report.equivalent.to_theirs({}, {})


class WithoutBatch(Base):
    """Takes one sample, (len, features), and a mask that it needs and lays out itself: 1 = may look."""

    def forward(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = (1 - mask).bool().view(1, len(h), len(h))  # type: ignore[operator, union-attr]
        q, k, v = (t[0] for t in self.operands(h[None]))
        weights = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(hidden, -torch.inf).softmax(-1)
        return self.out((weights @ v).transpose(0, 1).flatten(1))


def test_the_text_is_run_with_masks_of_the_form_that_it_takes() -> None:
    assert verify(WithoutBatch).verdict == "equal"


def test_an_error_of_what_was_written_down_is_none_of_the_users() -> None:
    made = Equivalent("def equivalent(x):\n    return x.missing", "", "", (), ()).names()["equivalent"]
    error = ask(lambda: made(torch.ones(1))).error
    assert error is not None
    assert "missing" not in str(not_called_again(error))


class SharesKeys(Base):
    """Two thirds of the heads share their keys with another: one product has the queries of three heads in its rows."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.groups = max(heads // 3, 1)
        self.k, self.v = (nn.Linear(dim, dim // heads * self.groups) for _ in range(2))

    def queries(self, x: Tensor) -> Tensor:
        return self.split(self.q(x))

    def forward(self, x: Tensor) -> Tensor:
        q = self.queries(x).unflatten(1, (self.groups, -1))
        k, v = (f(x).unflatten(-1, (self.groups, -1)).transpose(1, 2) for f in (self.k, self.v))
        weights = (torch.einsum("bghqd,bgkd->bghqk", q, k) / q.size(-1) ** 0.5).softmax(-1)
        return self.finish(torch.einsum("bghqk,bgkd->bghqd", weights, v).flatten(1, 2))


class PutsHeadsElsewhere(SharesKeys):
    def queries(self, x: Tensor) -> Tensor:
        return super().queries(x).roll(1, dims=1)


def test_rows_of_one_product_may_be_queries_of_several_heads() -> None:
    assert verify(SharesKeys).verdict == "equal", str(verify(SharesKeys))
    assert not verify(PutsHeadsElsewhere)


class TakesADropout(nn.Module):
    """Gives its weights beside the output, and takes a dropout as it is called."""

    def dropped(self, weights: Tensor) -> Tensor:
        return weights

    def shown(self, weights: Tensor) -> Tensor:
        return weights

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: nn.Module | None = None
    ) -> tuple[Tensor, Tensor]:
        weights = (query @ key.mT / math.sqrt(query.size(-1))).softmax(-1)
        if dropout is not None:
            weights = dropout(self.dropped(weights))
        return weights @ value, self.shown(weights)


class MixesWithADropout(TakesADropout):
    def dropped(self, weights: Tensor) -> Tensor:
        return weights.mT.reshape(weights.shape)


class ShowsOtherWeights(TakesADropout):
    def shown(self, weights: Tensor) -> Tensor:
        return weights.mT.reshape(weights.shape)


def test_a_dropout_is_handed_over_and_weights_that_come_back_have_queries_before_keys() -> None:
    assert verify(TakesADropout).verdict == "equal", str(verify(TakesADropout))
    assert verify(MixesWithADropout).verdict in ("deviates", "unchecked")
    assert verify(ShowsOtherWeights).verdict == "partial"


class SideBySide(nn.Module):
    """Takes queries, keys and values side by side, features before tokens, as guided diffusion does."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads

    def cut(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.chunk(3, dim=1)

    def forward(self, qkv: Tensor) -> Tensor:
        batch, width, length = qkv.shape
        assert width % (3 * self.n_heads) == 0
        q, k, v = (x.reshape(batch * self.n_heads, -1, length) for x in self.cut(qkv))
        weights = torch.einsum("bct,bcs->bts", q / q.size(1) ** 0.5, k).softmax(-1)
        return torch.einsum("bts,bcs->bct", weights, v).reshape(batch, -1, length)


class SideBySideInEachHead(SideBySide):
    def cut(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.unflatten(1, (self.n_heads, 3, -1)).unbind(2)


class AveragesKeys(SideBySide):
    def cut(self, qkv: Tensor) -> tuple[Tensor, ...]:
        q, k, _ = super().cut(qkv)
        return q, k, k


class KeysFirst(SideBySide):
    def cut(self, qkv: Tensor) -> tuple[Tensor, ...]:
        k, q, v = super().cut(qkv)
        return q, k, v


def test_an_argument_may_hold_queries_keys_and_values_in_this_order() -> None:
    for right in (SideBySide, SideBySideInEachHead):
        assert verify(right).verdict == "equal", str(verify(right))
    for wrong in (AveragesKeys, KeysFirst):
        assert "in this order" in verify(wrong).reason


class PacksItsProjections(nn.Module):
    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.packed, self.out = n_heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def operands(self, x: Tensor) -> Operands:
        q, k, v = self.packed(x).chunk(3, -1)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        heads = (one.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for one in self.operands(x))
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class PacksKeysFirst(PacksItsProjections):
    def operands(self, x: Tensor) -> Operands:
        k, q, v = self.packed(x).chunk(3, -1)
        return q, k, v


class AveragesWhatItCallsKeys(PacksItsProjections):
    def operands(self, x: Tensor) -> Operands:
        q, k, v = self.packed(x).chunk(3, -1)
        return q, v, k


class AsksWithWhatItCallsKeys(PacksItsProjections):
    """Exchanges two names throughout: what lies first asks, as torch has it."""

    def operands(self, x: Tensor) -> Operands:
        k, q, v = self.packed(x).chunk(3, -1)
        return k, q, v


def test_what_is_called_keys_is_no_value() -> None:
    right = PacksItsProjections, PacksKeysFirst, AsksWithWhatItCallsKeys
    assert [verify(one).verdict for one in right] == ["equal", "equal", "equal"]
    said = "packed.weight does not hold query, key, value in this order, as the code says"
    assert said in verify(AveragesWhatItCallsKeys).reason


def test_what_is_said_of_values_says_nothing_for_queries_and_keys() -> None:
    finding = found_mistake("values_normalised", reason="a separate module normalises each value")
    stages = ("operand", "project", "values")
    assert [Step("", "", stage).is_named_by(finding) for stage in stages] == [False, False, True]
    both = found_mistake("queries_and_keys_normalised", reason="both are, each by its own norm")
    assert [Step("", "", stage).is_named_by(both) for stage in stages] == [True, False, False]
