"""Windows of images, as Swin cuts them: moved and masked, with a table of their distances."""

import math

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.helpers_for_tests import changed
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.stages import OneMatrix


def distances(side: int) -> Tensor:
    """Rows and columns between the tokens of a window, (tokens, tokens, 2), from 0."""
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    return places[:, None] - places + side - 1


class InWindows(OneMatrix):
    """Takes images, features last; each window attends to itself."""

    shift = 0
    back = 0

    def __init__(self, dim: int, num_heads: int, window_size: int) -> None:
        super().__init__(dim, num_heads)
        self.window_size = window_size
        self.table = nn.Parameter(torch.zeros((2 * window_size - 1) * (2 * window_size - 1), num_heads))
        self.register_buffer("index", self.indices(window_size))

    def indices(self, side: int) -> Tensor:
        down, right = distances(side).unbind(-1)
        return down * (2 * side - 1) + right

    def cut(self, x: Tensor) -> Tensor:
        batch, height, width, dim = x.shape
        side = self.window_size
        return x.view(batch, height // side, side, width // side, side, dim).transpose(2, 3).reshape(-1, side**2, dim)

    def put_back(self, x: Tensor, shape: torch.Size) -> Tensor:
        batch, height, width, dim = shape
        side = self.window_size
        return x.view(batch, height // side, width // side, side, side, dim).transpose(2, 3).reshape(shape)

    def bias(self) -> Tensor | float:
        return self.table[self.get_buffer("index")].permute(2, 0, 1)

    def hidden(self, x: Tensor) -> Tensor:
        """Where the moved image has an edge in a window, (windows, 1, tokens, tokens)."""
        region = x.new_zeros(1, *x.shape[1:3], 1)
        edges = slice(0, -self.window_size), slice(-self.window_size, -self.shift), slice(-self.shift, None)
        for number, (rows, columns) in enumerate((rows, columns) for rows in edges for columns in edges):
            region[:, rows, columns] = number
        regions = self.cut(region)[..., 0]
        return (regions[:, None] != regions[:, :, None])[:, None]

    def forward(self, x: Tensor) -> Tensor:
        moved = x.roll((-self.shift, -self.shift), (1, 2))
        q, k, v = self.operands(self.cut(moved))
        scores = self.scores(q, k) + self.bias()
        if self.shift:
            scores = scores.unflatten(0, (len(x), -1)).masked_fill(self.hidden(x), -torch.inf).flatten(0, 1)
        out = self.finish(scores.softmax(-1) @ v)
        return self.put_back(out, x.shape).roll((self.back, self.back), (1, 2))


class Moved(InWindows):
    shift = back = 2


class FeaturesFirst(InWindows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Strips(InWindows):
    """Forgets to bring the rows of a window together."""

    def cut(self, x: Tensor) -> Tensor:
        batch, height, width, dim = x.shape
        side = self.window_size
        return x.view(batch, height // side, side, width // side, side, dim).reshape(-1, side**2, dim)

    def put_back(self, x: Tensor, shape: torch.Size) -> Tensor:
        return x.view(shape)


class SharesElements(InWindows):
    """Does not multiply the rows by the width of the table."""

    def indices(self, side: int) -> Tensor:
        return distances(side).sum(-1)


class SeesRoundTheEdge(Moved):
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x).new_zeros(())


class MayBeMoved(InWindows):
    def __init__(self, dim: int, num_heads: int, window_size: int, shift_size: int = 0) -> None:
        super().__init__(dim, num_heads, window_size)
        self.shift = self.back = shift_size


class MayStayMoved(MayBeMoved):
    def __init__(self, dim: int, num_heads: int, window_size: int, shift_size: int = 0) -> None:
        super().__init__(dim, num_heads, window_size, shift_size)
        self.back = -shift_size


def test_windows_that_may_be_moved_are_moved() -> None:
    assert verify(MayBeMoved).verdict == "equal"
    report = verify(MayStayMoved)
    assert report.verdict == "partial"
    assert [one.what for one in report.not_exercised] == ["shift_size=1"]


@pytest.mark.parametrize("made", [Moved, FeaturesFirst])
def test_windows_of_an_image_are_equal_to_a_mask_and_a_table(made: type[InWindows]) -> None:
    report = verify(made)
    assert (report.verdict, report.mistakes) == ("equal", ())
    assert report.equivalent is not None
    text = report.equivalent.source
    assert "# not in its window" in text
    assert "queries[:, None] // width - keys // width" in text
    module = made(33, 3, 4).double()
    nn.init.normal_(module.table)
    images = torch.randn((2, 33, 8, 12) if made is FeaturesFirst else (2, 8, 12, 33), dtype=torch.float64)
    torch.testing.assert_close(report.equivalent.of(module)(images), module(images))


class OfTwoSides(nn.Module):
    """Takes the rows of an image one after the other, and windows that are wider than high."""

    def __init__(
        self, dim: int, num_heads: int, input_resolution: tuple[int, int], window_size: tuple[int, int]
    ) -> None:
        super().__init__()
        self.num_heads, self.input_resolution, self.window_size = num_heads, input_resolution, window_size
        self.height, self.width = window_size[0], window_size[1]
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        down, right = self.input_resolution[0] // self.height, self.input_resolution[1] // self.width
        shape = len(x), down, self.height, right, self.width, 3 * x.size(-1)
        cut = self.qkv(x).view(shape).transpose(2, 3).flatten(3, 4)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(3, 4) for t in cut.chunk(3, -1))
        out = ((q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v).transpose(3, 4).flatten(4)
        out = out.unflatten(3, (self.height, self.width)).transpose(2, 3)
        return self.proj(out.reshape(x.shape))


def test_windows_may_have_two_sides_that_a_setting_names() -> None:
    report = verify(OfTwoSides)
    assert report.verdict == "equal", str(report)
    assert [one.reason for one in report.intended] == ["it is as wide as window_size says (2)"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (Strips, "Not every key takes part"),
        (SharesElements, "one element for distances in the image that differ"),
        (SeesRoundTheEdge, "follows no rule of the distance"),
        (changed(Moved, back=0), "tokens in a different order"),
    ],
)
def test_wrong_windows_are_not_equal(made: type[InWindows], reason: str) -> None:
    report = verify(made)
    assert report.verdict == "unchecked"
    assert reason in report.reason


class OneMaskEach(OneMatrix):
    """Takes windows, and a mask for each window of an image."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.operands(x)
        scores = self.scores(q, k)
        if mask is not None:
            windows = len(mask)
            masked = self.laid(scores, windows) + self.over(mask)
            scores = masked.view(scores.shape)
        return self.finish(scores.softmax(-1) @ v)

    def laid(self, scores: Tensor, windows: int) -> Tensor:
        return scores.view(-1, windows, *scores.shape[1:])

    def over(self, mask: Tensor) -> Tensor:
        return mask[None, :, None]


class OneMaskForNeighbours(OneMaskEach):
    def laid(self, scores: Tensor, windows: int) -> Tensor:
        return scores.view(windows, -1, *scores.shape[1:])

    def over(self, mask: Tensor) -> Tensor:
        return mask[:, None, None]


def test_a_mask_for_each_window_of_an_image_is_for_that_window_of_every_image() -> None:
    right, wrong = verify(OneMaskEach), verify(OneMaskForNeighbours)
    assert (right.verdict, wrong.verdict) == ("equal", "partial")
    assert [one.what for one in wrong.not_exercised] == ["mask for fewer windows than samples"]
