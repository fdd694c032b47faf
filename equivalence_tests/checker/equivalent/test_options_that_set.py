"""A variable that only an option sets: every call ends there by default, and the option shows that calls run."""

from torch import Tensor, nn

from equivalence_tests.checker.verify import verify


class SetsNothing(nn.Module):
    def __init__(self, dim: int, heads: int, stable: bool = False) -> None:
        super().__init__()
        self.heads, self.stable = heads, stable
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.stable:
            scores = q @ k.mT / q.size(-1) ** 0.5
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class SetsBoth(SetsNothing):
    """Right: the other way has its line, too."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT
        if self.stable:
            scores = scores - scores.amax(-1, keepdim=True)
        scores = scores / q.size(-1) ** 0.5
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_what_only_an_option_sets_is_said_on_its_line() -> None:
    report = verify(SetsNothing)
    assert (report.verdict, report.mistakes) == ("deviates", ("line_raises",)), str(report)
    assert report.findings[0].stack[-1].text.startswith("return self.out(")
    assert "With stable=False, its default, every call ends here; with stable=True calls run." in str(report)


class SetsWithWhatIsHandedOver(SetsNothing):
    """Ends by default, and runs on what its caller hands over: a call that was never made."""

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.stable or extra is not None:
            scores = q @ k.mT / q.size(-1) ** 0.5
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_what_an_argument_may_set_is_no_mistake() -> None:
    assert verify(SetsWithWhatIsHandedOver).findings == []


def test_what_both_ways_set_is_right() -> None:
    assert verify(SetsBoth).verdict == "equal"
