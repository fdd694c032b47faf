"""How many calls are tried before it is said that there is no way."""

import math

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.equivalent.calls import diagnose_call
from equivalence_tests.checker.helpers_for_tests import changed
from equivalence_tests.checker.reach import plans
from equivalence_tests.checker.reach.arguments import Sizes
from equivalence_tests.checker.reach.plans import Errors, trials_of
from equivalence_tests.checker.reach.subject import Adapter, sizes_of
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.stages import ThreeMatrices


class OfOneQuery(nn.Module):
    """Takes one query a sample, without an axis of lengths, and so fails before it comes to its mask."""

    calls = 0

    def forward(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        type(self).calls += 1
        if query.dim() != 1:
            raise ValueError("one query")
        return (key @ query).masked_fill(~mask, float("-inf")).softmax(-1) @ key


class OfAMaskOfTwoAxes(nn.Module):
    """Refuses masks of other ranks in the same words, and none at all."""

    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None or mask.dim() != 2 or mask.size(0) != query.size(1):
            raise ValueError("want a mask of two axes")
        return (query @ key.mT).masked_fill(~mask, float("-inf")).softmax(-1) @ key


def test_other_masks_are_not_tried_where_no_mask_is_reached() -> None:
    assert not list(trials_of(OfOneQuery(), Sizes(), torch.float64))
    assert 0 < OfOneQuery.calls < 600


def test_a_mask_of_a_certain_form_is_found_though_others_are_refused_alike() -> None:
    trial = next(trials_of(OfAMaskOfTwoAxes(), Sizes(), torch.float64))
    assert trial.plan.neutral is not None
    assert trial.plan.neutral.shape == "(query, key)"


class OfAVector(nn.Module):
    """Takes a vector of each sample, of another width than its tokens, beside tokens of a certain length."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(48, Sizes().embed_dim, dtype=torch.float64)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return x + self.shift(c)[:, None] + torch.zeros(23, 1)


def test_a_vector_is_as_wide_and_tokens_are_as_many_as_the_errors_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "LAYOUTS", (("b l e",),))
    trial = next(trials_of(OfAVector(), Sizes(), torch.float64))
    assert dict(trial.plan.roles)["c"] == "=(batch, 48)"
    assert trial.sizes.query_len == trial.inputs().query.size(1) == 23


class OfAConditionAndAngles(nn.Module):
    """Takes a vector of each sample beside angles, whose name says what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(48, 30, dtype=torch.float64)

    def forward(self, x: Tensor, condition: Tensor, freqs_cis: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * freqs_cis[: x.size(1)].repeat(1, 3)
        return torch.view_as_real(turned).flatten(2) + self.shift(condition)[:, None]


def test_what_stands_beside_angles_may_be_a_vector_of_each_sample() -> None:
    trial = next(trials_of(OfAConditionAndAngles(), Sizes(head_dim=10), torch.float64))
    assert dict(trial.plan.roles)["condition"] == "=(batch, 48)"


class OfSomeCalls(nn.Module):
    """Counts its calls, and refuses all that are not as it wants them."""

    calls = 0

    def _count(self) -> None:
        OfSomeCalls.calls += 1


class BeforeItsAngles(OfSomeCalls):
    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        self._count()
        raise ValueError(f"no features of {x.size(-1)}")


class OfCertainAngles(nn.Module):
    """Refuses all angles but those of a certain shape in the same words."""

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        if rope.shape != (1, x.size(1), 1, 12):
            raise ValueError("want other angles")
        return (x @ x.mT).softmax(-1) @ x


class InSinglePrecision(OfSomeCalls):
    """Wants a mask of two axes first, then float32."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self._count()
        if mask.dim() != 2:
            raise ValueError("want a mask of two axes")
        if x.dtype != torch.float32:
            raise ValueError("want float32")
        return (x @ x.mT).masked_fill(~mask, float("-inf")).softmax(-1) @ x


class OfAnotherMask(InSinglePrecision):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, mask[None, None, None, None])


def test_other_angles_are_not_tried_where_none_are_reached() -> None:
    OfSomeCalls.calls = 0
    assert not list(trials_of(BeforeItsAngles(), Sizes(), torch.float64))
    assert 0 < OfSomeCalls.calls < 400


def test_angles_of_a_certain_shape_are_found_though_others_are_refused_alike() -> None:
    trial = next(trials_of(OfCertainAngles(), Sizes(), torch.float64))
    assert trial.plan.angles is not None
    assert trial.plan.angles.axes == "1 l 1 c"


def test_what_failed_is_tried_again_in_another_precision_only_where_that_changes_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans, "LAYOUTS", (("b l e",),))
    errors = Errors()
    OfSomeCalls.calls = 0
    assert not list(trials_of(OfAnotherMask(), Sizes(), torch.float64, errors))
    first = OfSomeCalls.calls
    assert not list(trials_of(OfAnotherMask(), Sizes(), torch.float32, errors))
    assert first < OfSomeCalls.calls < 1.3 * first
    errors = Errors()
    assert not list(trials_of(InSinglePrecision(), Sizes(), torch.float64, errors))
    assert next(trials_of(InSinglePrecision(), Sizes(), torch.float32, errors)).plan.neutral is not None


class InTiles(nn.Module):
    """Is told the length of its tiles in the call."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_size: int) -> Tensor:
        top = q.new_full((*q.shape[:2], 1), -torch.inf)
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        for keys, values in zip(k.split(block_size, 1), v.split(block_size, 1), strict=True):
            scores = q @ keys.mT / math.sqrt(q.size(-1))
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, rescale = (scores - new).exp(), (top - new).exp()
            total = total * rescale + weights.sum(-1, keepdim=True)
            out = self.rescaled(out, rescale) + weights @ values
            top = new
        return out / total

    def rescaled(self, out: Tensor, rescale: Tensor) -> Tensor:
        return out * rescale


class InTilesNotRescaled(InTiles):
    def rescaled(self, out: Tensor, rescale: Tensor) -> Tensor:
        return out


def test_the_length_of_tiles_is_less_than_that_of_the_sequence() -> None:
    assert verify(InTiles).verdict == "equal"
    assert verify(InTilesNotRescaled).mistakes == ("tiles_do_not_add_up",)


class OfFewerKeys(nn.Module):
    """Makes its keys of patches of an image, whose height and width have defaults, and norms them."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.fewer, self.norm, self.num_heads = nn.Conv2d(dim, dim, 2, 2), nn.LayerNorm(dim), num_heads

    def forward(self, x: Tensor, H: int = 14, W: int = 14) -> Tensor:  # noqa: N803
        patches = self.fewer(x.mT.unflatten(-1, (H, W))).flatten(2).mT
        made = (self.q(x), *self.kv(self.norm(patches)).chunk(2, -1))
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in made)
        context = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v
        return self.out(context.transpose(1, 2).flatten(2))


def test_height_and_width_fit_the_tokens_and_a_norm_of_other_keys_is_none_of_the_input() -> None:
    report = verify(OfFewerKeys)
    assert report.verdict == "equal", str(report)
    beside = ["the sub-module norm, a LayerNorm", "the sub-module fewer, a Conv2d"]
    assert [finding.reason for finding in report.intended] == beside
    assert ("includes", "attention alone", "attention alone") in report.conventions


class AlongRows(nn.Module):
    """Attends along the rows of (batch, rows, len, features)."""

    axis = -1

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.packed, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, length, width = x.shape
        q, k, v = self.packed(x).view(batch, rows, length, 3, width).unbind(3)
        context = (q @ k.mT / math.sqrt(width)).softmax(self.axis) @ v
        return self.out(context)


def test_rows_of_tokens_are_read_as_samples() -> None:
    assert verify(AlongRows).verdict == "equal"
    assert verify(changed(AlongRows, axis=-2)).mistakes == ("softmax_over_queries",)


class Guided(nn.Module):
    """Weighs its values by a map of its own size, which is no mask."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.packed, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, guide: Tensor) -> Tensor:
        _, length, width = x.shape
        if guide.size(-1) != length or length == width:
            raise ValueError("want a map of all tokens")
        q, k, v = self.packed(x).chunk(3, -1)
        share = guide.float().sigmoid().mean()
        return self.out((q @ k.mT / math.sqrt(x.size(-1))).softmax(-1) @ v * (1 + 0 * share))


def test_what_no_name_calls_a_mask_is_not_said_to_be_one_without_effect() -> None:
    assert "mask_never_used" not in verify(Guided).mistakes


class CrossesIfTold(nn.Module):
    """An option of the constructor turns cross-attention on; forward takes the second tensor either way."""

    def __init__(self, dim: int, n_heads: int, from_memory: bool = False) -> None:
        super().__init__()
        self.n_heads, self.from_memory = n_heads, from_memory
        self.q, self.kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, enc: Tensor | None = None) -> Tensor:
        assert enc is not None or not self.from_memory
        q, (k, v) = self.q(x), self.kv(enc if enc is not None and self.from_memory else x).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in (q, k, v))
        return self.out(((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


class CrossesAlways(CrossesIfTold):
    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__(dim, n_heads, True)


class NeverCrosses(CrossesIfTold):
    def __init__(self, dim: int, n_heads: int, bias: bool = False) -> None:
        super().__init__(dim, n_heads)


@pytest.mark.parametrize(
    ("target", "verdict"), [(CrossesIfTold, "partial"), (CrossesAlways, "partial"), (NeverCrosses, "unchecked")]
)
def test_a_second_tensor_is_handed_over_where_the_constructor_asked_for_one(
    target: type[nn.Module], verdict: str
) -> None:
    assert verify(target).verdict == verdict, str(verify(target))


class OfSeveral(ThreeMatrices):
    """Projects what its forward finds in its arguments, and attends."""

    axis = -1

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(self.axis)


class OfOneList(OfSeveral):
    def forward(self, inputs: list[Tensor]) -> Tensor:
        query, key, value = inputs
        return self.attended(query, key, value)


class OfPlacesInATuple(OfSeveral):
    axis = -2

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        tokens = inputs[0]
        return self.attended(tokens, inputs[1], inputs[2])


class OfEarlierStates(OfSeveral):
    def forward(self, state: Tensor, earlier: list[Tensor]) -> Tensor:
        joined = torch.cat(earlier, dim=1)
        return self.attended(state, joined, joined)


class OfEarlierStatesSideBySide(OfSeveral):
    def forward(self, state: Tensor, earlier: list[Tensor]) -> Tensor:
        first, second = earlier[0], torch.cat(earlier, dim=1)
        return self.attended(state, second, torch.cat([second[:, first.size(1) :], first], 1))


@pytest.mark.parametrize(
    ("target", "verdict", "read"),
    [
        (OfOneList, "equal", "inputs: [query, key, value]"),
        (OfPlacesInATuple, "deviates", "inputs: [query, key, value]"),
        (OfEarlierStates, "equal", "state: query, earlier: [memory, memory]"),
        (OfEarlierStatesSideBySide, "deviates", "state: query, earlier: [memory, memory]"),
    ],
)
def test_one_argument_may_hold_several_tensors(target: type[nn.Module], verdict: str, read: str) -> None:
    report = verify(target)
    assert report.verdict == verdict, str(report)
    assert report.conventions[0][1] == read


class OfOneKeyHead(OfSeveral):
    """Hands over more than it needs: None, cosines beside sines, and a window that is none."""

    def forward(self, x: Tensor, gate: Tensor | None, cos_sin: tuple[Tensor, Tensor], window_size: object) -> Tensor:
        assert window_size == (-1, -1)
        x = x if gate is None else x * gate
        cos, sin = cos_sin
        q = self.split(self.q(x))
        k, v = (f(x)[:, None, :, : q.size(-1)] for f in (self.k, self.v))
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        weights = (torch.einsum("bgid,bgjd->bgij", q, k) / math.sqrt(q.size(-1))).softmax(-1)
        return self.out(torch.einsum("bgij,bgjd->bgid", weights, v).transpose(1, 2).flatten(2))


def test_what_may_be_none_is_left_out_and_no_window_is_asked_for() -> None:
    sizes = Sizes(num_heads=3, head_dim=4)
    trial = next(trials_of(OfOneKeyHead(12, 3).double(), sizes, torch.float64))
    given = {"x": "input", "gate": "=None", "cos_sin": "angles", "window_size": "=no window"}
    assert dict(trial.plan.roles) == given


def test_one_head_of_keys_meets_the_queries_of_all() -> None:
    query, key, value = (torch.randn(2, heads, 5, 4, dtype=torch.float64) for heads in (3, 1, 1))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bgij,bgjd->bgid", (torch.einsum("bgid,bgjd->bgij", q, k) / 2).softmax(-1), v)

    (report,) = diagnose_call(Call(attend, (query, key, value)))
    assert report.verdict == "equal", str(report)


class RefusesAll(nn.Module):
    """Says how much it is given each time, whatever the mask."""

    calls = 0

    def forward(self, x: Tensor, past: Tensor, y: Tensor, later: Tensor, mask: Tensor | None = None) -> Tensor:
        RefusesAll.calls += 1
        raise RuntimeError(f"{x.numel()} numbers are too few")


def test_masks_are_not_tried_again_where_none_has_changed_what_is_said_but_for_sizes() -> None:
    assert not list(trials_of(RefusesAll(), Sizes(), torch.float64))
    assert RefusesAll.calls < 300


class PixelsAttendToTokens(nn.Module):
    """Queries are the pixels of an image, keys and values the tokens of a text, of another width."""

    def __init__(self, channels: int, d_context: int, num_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(channels, num_heads, kdim=d_context, vdim=d_context, batch_first=True)

    def forward(self, context: Tensor, image: Tensor) -> Tensor:
        found, _ = self.attention(image.flatten(2).mT, context, context, need_weights=False)
        return found.mT.reshape(image.shape)


def test_keys_and_values_may_be_tokens_beside_an_image() -> None:
    report = verify(PixelsAttendToTokens)
    assert report.verdict == "equal", str(report)
    assert report.equivalent is not None
    assert "width = image.size(3)" in report.equivalent.source
    assert "keys and values (batch, len, features)" in dict(x[:2] for x in report.conventions)["layout"]


class NeverReadsY(nn.Module):
    """Takes the targets that models take, and leaves them unread."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, num_heads, batch_first=True)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.attention(x, x, x)[0]


class NeverReadsItsContext(NeverReadsY):
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.attention(x, x, x)[0]


def test_a_letter_that_nothing_reads_is_no_second_tensor() -> None:
    assert verify(NeverReadsY).verdict == "equal"
    assert [one.name for one in verify(NeverReadsItsContext).suspected] == ["memory_unused"]


def test_the_first_norm_is_as_wide_as_the_tokens_where_the_constructor_takes_the_width_of_a_head() -> None:
    asked, table, head = Sizes(), nn.Module(), Sizes().embed_dim
    table.register_buffer("table", torch.zeros(4, head))
    layer = nn.Sequential(nn.LayerNorm(2 * head), nn.Linear(2 * head, 2 * head), nn.Linear(head, 7, bias=False))
    widths = [sizes_of(one, asked, Adapter()).embed_dim for one in (table, layer, layer[1:])]
    assert widths == [head, 2 * head, head]
