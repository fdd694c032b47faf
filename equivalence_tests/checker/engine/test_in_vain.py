"""What is handed to an attention, or learnt by it, and does nothing to its output."""

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.test_styles import HEADS, Base, judged
from equivalence_tests.checker.helpers_for_tests import changed
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.stages import OneMatrix

LENGTH = 5


class SharesItsBias(Base):
    """Unscaled, with a bias by distance that the first layer learns and hands to the next."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.relative_bias = nn.Embedding(2 * LENGTH, HEADS)

    def places(self) -> Tensor:
        position = torch.arange(LENGTH)
        return position[:, None] - position + LENGTH

    def weigh(self, scores: Tensor) -> Tensor:
        scores = scores + self.bias
        return super().weigh(scores)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        self.bias = self.relative_bias(self.places()).permute(2, 0, 1)[None] if bias is None else bias
        return self.o_proj(self.attend(x)), self.bias


class ForgetsItsBias(SharesItsBias):
    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


class TurnsItsPlaces(SharesItsBias):
    def places(self) -> Tensor:
        return super().places().flip(-1)


class ForgetsWhatItIsHanded(Base):
    def forward(self, x: Tensor, angles: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class WorksInVain(ForgetsWhatItIsHanded):
    def forward(self, x: Tensor, angles: Tensor) -> Tensor:  # type: ignore[override]
        angles = angles[..., :LENGTH]
        return Base.forward(self, x)


class SwitchedOff(ForgetsWhatItIsHanded):
    """Positions that only some layers use."""

    uses_positions = False

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:  # type: ignore[override]
        return Base.forward(self, x + angles if self.uses_positions else x)


HANDED = torch.randn(1, HEADS, LENGTH, LENGTH).double()


@pytest.mark.parametrize(
    ("target", "more", "names"),
    [
        (SharesItsBias, (), ("scale_missing",)),
        (SharesItsBias, (HANDED,), ("scale_missing",)),
        (ForgetsItsBias, (), ("scale_missing", "bias_never_used")),
        (ForgetsItsBias, (HANDED,), ("scale_missing", "bias_never_used")),
        (TurnsItsPlaces, (), ("scale_missing", "changed_by_flip")),
        (ForgetsWhatItIsHanded, (HANDED,), ("argument_never_used",)),
        (WorksInVain, (HANDED,), ("argument_never_used",)),
        (SwitchedOff, (HANDED,), ()),
    ],
)
def test_what_does_nothing_to_the_output_is_told(
    target: type[nn.Module], more: tuple[Tensor, ...], names: tuple[str, ...]
) -> None:
    report = judged(target, *more, length=LENGTH)
    assert report.mistakes == names, str(report)


class ForgetsTwoNorms(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(12), nn.LayerNorm(12)


def test_norms_that_do_nothing_are_told_together_and_by_name() -> None:
    (finding,) = verify(ForgetsTwoNorms).findings
    assert finding.name == "norm_never_used"
    assert finding.sentence.endswith(": first, second.")


class TakesItsBiasThroughNumpy(OneMatrix):
    """What numpy does to the bias on its way is hidden; the bias is used all the same."""

    def __init__(self) -> None:
        super().__init__(12, 3)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.operands(x)
        added = torch.from_numpy(2 * (bias * 1).detach().numpy()).to(x.dtype)
        return self.finish((self.scores(q, k) + added).softmax(-1) @ v)


def test_what_goes_where_nobody_sees_is_not_called_unused() -> None:
    (report,) = verify(TakesItsBiasThroughNumpy(), inputs=(torch.randn(2, 5, 12), torch.randn(3, 5, 5)))
    assert report.findings == [], str(report)


class ForgetsItsBlocks(Base):
    """A mask of blocks, made into numbers that nothing adds."""

    def forward(self, x: Tensor, blocks: Tensor) -> Tensor:  # type: ignore[override]
        torch.where(blocks, 0.0, -1e10)
        return super().forward(x)


@pytest.mark.parametrize(("hidden", "names"), [(2, ("argument_never_used",)), (0, ())])
def test_a_mask_of_another_shape_is_used_where_it_hides_something(hidden: int, names: tuple[str, ...]) -> None:
    blocks = torch.ones(2, 1, 2, 3, 9, dtype=torch.bool)
    blocks[..., :hidden] = False
    assert judged(ForgetsItsBlocks, blocks).mistakes == names


class TakesMasksOfThreeAxes(OneMatrix):
    """A mask of four axes is taken, and forgotten."""

    axes = 3

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.operands(x)
        scores = self.scores(q, k)
        if mask is not None and mask.dim() <= self.axes:
            scores = scores.masked_fill(mask.view(x.size(0), -1, x.size(1), x.size(1)) == 0, -torch.inf)
        return self.finish(scores.softmax(-1) @ v)


@pytest.mark.parametrize(
    ("tested", "ignores"), [(changed(TakesMasksOfThreeAxes, axes=4), False), (TakesMasksOfThreeAxes, True)]
)
def test_a_mask_that_is_taken_in_another_shape_hides_something(tested: type[nn.Module], ignores: bool) -> None:
    report = verify(tested)
    assert report.verdict == "partial", str(report)
    assert ("mask of (batch, 1, query, key)" in {one.what for one in report.not_exercised}) == ignores


class AllowsMasksOfFourAxes(TakesMasksOfThreeAxes):
    """Says of a mask that it lets by that it may have four axes, and forgets it."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is None or mask.dim() in (3, 4)
        return super().forward(x, mask)


class AllowsMasksOfThreeAxes(TakesMasksOfThreeAxes):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is None or mask.dim() == self.axes
        return super().forward(x, mask)


def test_a_mask_that_the_code_says_it_takes_and_forgets_is_a_mistake() -> None:
    assert verify(AllowsMasksOfThreeAxes).findings == []
    (finding,) = verify(AllowsMasksOfFourAxes).findings
    assert finding.sentence.startswith("The mask mask of (batch, 1, query, key) is accepted but never used")
    assert finding.line is not None
    assert finding.line.text == "assert mask is None or mask.dim() in (3, 4)"
