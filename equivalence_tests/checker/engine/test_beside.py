"""What stands beside an attention, behind its end or behind another mistake is judged by what it takes itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.test_styles import HEADS, WIDTH, Base, judged
from equivalence_tests.checker.helpers_for_tests import changed
from equivalence_tests.checker.verify import verify


class HeadsInside(Base):
    """Puts the features of the heads together with the heads inside, as NesT does."""

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        return (self.weigh(q @ k.mT * self.scale) @ v).permute(0, 2, 3, 1).flatten(2)


class HeadsInsideAndScaled(HeadsInside):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mul(1.3)


class HeadsInsideAndFlipped(HeadsInside):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(-1)


class Parallel(Base):
    """A feed-forward of the same matrix runs beside the attention; a residual lies around both."""

    factor: Any = 1.0

    def __init__(self, factor_of_sum: float = 0.9) -> None:
        super().__init__()
        self.packed, self.down = nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.factor_of_sum = factor_of_sum

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, self.beside = self.packed(x).split([WIDTH, WIDTH, WIDTH, 2 * WIDTH], -1)
        return self.split(q), self.split(k), self.split(v)

    def bent(self, x: Tensor) -> Tensor:
        return F.gelu(x)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (x + (y + self.down(self.bent(self.beside)))) * self.factor


class ParallelClamped(Parallel):
    def bent(self, x: Tensor) -> Tensor:
        return super().bent(x).clamp(-0.2, 0.2)


class ParallelScaledAsItSays(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor_of_sum


class PassesHalf(Base):
    """The second half of the samples passes the attention by, through the same matrices."""

    def passed(self, x: Tensor) -> Tensor:
        return self.o_proj(self.v_proj(x))

    def normed(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, [WIDTH])

    def forward(self, x: Tensor) -> Tensor:
        own, other = x.chunk(2)
        return torch.cat([super().forward(self.normed(own)), self.passed(other)])


class PassesHalfFlipped(PassesHalf):
    def passed(self, x: Tensor) -> Tensor:
        return self.o_proj(self.v_proj(x).flip(-1))


class PassesHalfRolled(PassesHalf):
    def passed(self, x: Tensor) -> Tensor:
        return super().passed(x).roll(1, 1)


class PassesHalfOfScaled(PassesHalf):
    def normed(self, x: Tensor) -> Tensor:
        return super().normed(x) * 1.3


class InBlocks(Base):
    """Queries meet keys of their block of tokens; the last block is filled up."""

    def split(self, x: Tensor) -> Tensor:
        return super().split(self.filled(x)).unflatten(2, (2, 3)).transpose(1, 2)

    def filled(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 1))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        context = self.weigh(q @ k.mT * self.scale) @ v
        return context.transpose(2, 3).flatten(1, 2).flatten(2)[:, : x.size(1)]


class InBlocksWithTurnedKeys(InBlocks):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q, k.flip(-1), v


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (HeadsInside, ("heads_merged_in_another_order",)),
        (HeadsInsideAndScaled, ("changed_by_mul", "heads_merged_in_another_order")),
        (HeadsInsideAndFlipped, ("heads_merged_in_another_order", "changed_by_flip")),
        (Parallel, ()),
        (ParallelClamped, ("changed_by_clamp",)),
        (changed(Parallel, factor=1.3), ("changed_by_mul",)),
        (ParallelScaledAsItSays, ()),
        (PassesHalf, ()),
        (PassesHalfFlipped, ("changed_by_flip",)),
        (PassesHalfRolled, ("changed_by_roll",)),
        (PassesHalfOfScaled, ()),  # its norm without a parameter is no part of a program, so nothing can be proven
        (InBlocks, ()),
        (InBlocksWithTurnedKeys, ("key_changed_by_flip",)),
    ],
)
def test_what_stands_beside_or_behind_is_found_too(target: type[nn.Module], names: tuple[str, ...]) -> None:
    report = judged(target)
    assert report.mistakes == names, str(report)


class Normed(Base):
    """Projects tokens that have no names yet, queries first."""

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(torch.cat([x, x], 1))
        return F.layer_norm(q, q.shape[-1:]), F.layer_norm(k, k.shape[-1:]), v


class OnlyKeysNormed(Normed):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = Base.operands(self, torch.cat([x, x], 1))
        return q, F.layer_norm(k, k.shape[-1:]), v


class KeysOfAPooledImage(Base):
    """Queries are of all tokens, keys and values of fewer ones, which a norm follows."""

    def __init__(self) -> None:
        super().__init__()
        self.reduced: nn.Module = nn.Conv1d(WIDTH, WIDTH, 1)
        self.norm = nn.LayerNorm(WIDTH)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, fewer = self.split(self.q_proj(x)), self.norm(self.reduced(x.mT).mT)
        return q, self.split(self.k_proj(fewer)), self.split(self.v_proj(fewer))


class KeysOfAveragedTokens(KeysOfAPooledImage):
    def __init__(self) -> None:
        super().__init__()
        self.reduced = nn.AvgPool1d(2)


@pytest.mark.parametrize("target", [KeysOfAPooledImage, KeysOfAveragedTokens])
def test_a_norm_of_what_was_made_fewer_before_asks_for_no_norm_of_the_input(target: type[nn.Module]) -> None:
    assert judged(target).mistakes == ()


def test_one_norm_alone_is_told_where_the_projection_of_queries_names_the_tokens() -> None:
    assert judged(Normed).mistakes == ()
    assert judged(OnlyKeysNormed).mistakes == ("key_changed_by_layer_norm",)


def in_tiles(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Right: one softmax in tiles of three keys, kept from a division by 0."""
    largest, total = torch.full_like(query[..., :1], -torch.inf), torch.zeros_like(query[..., :1])
    output = value.new_zeros(*query.shape[:-1], value.size(-1))
    for some, values in zip(key.split(3, -2), value.split(3, -2), strict=True):
        scores = query @ some.mT / query.size(-1) ** 0.5
        before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        shares = (scores - largest).exp()
        total = (before - largest).exp() * total + shares.sum(-1, keepdim=True)
        output = (before - largest).exp() * output + shares @ values
    return output / (total + 1e-10)


def test_a_number_against_a_division_by_zero_changes_nothing() -> None:
    report = verify(in_tiles)
    assert report.verdict == "equal", str(report)


class AnotherQuery(nn.Module):
    """Holds a projection for a way that this call does not take, and no output projection, as LUKE does."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.entity_query = heads, nn.Linear(dim, dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).view(x.shape)  # as torch lays it out


def test_a_projection_of_another_way_is_no_output_projection() -> None:
    assert verify(AnotherQuery).mistakes == ("weight_never_used",)
    assert judged(lambda: AnotherQuery(WIDTH, 3)).mistakes == ()  # one call may not reach all


def test_a_diagonal_beside_other_numbers_of_keys_is_not_called_off_by_one() -> None:
    q, k, v = (torch.randn(2, HEADS, length, 4) for length in (4, 6, 6))
    may = torch.ones(4, 6).tril(1).bool()
    may[2:] = False
    (report,) = verify(lambda q, k, v, may: F.scaled_dot_product_attention(q, k, v, may), (q, k, v, may))
    assert report.mistakes == ()
    (report,) = verify(lambda q, k, v, may: F.scaled_dot_product_attention(q, k, v, may), (q, q, q, may[:, :4]))
    assert report.mistakes == ("causal_sees_one_ahead",)


class PostNorm(nn.Module):
    """Torch's own layer, whose norms stand behind its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_a_norm_behind_dropout_is_no_dropout_without_a_scale() -> None:
    assert verify(PostNorm, kind="attention").mistakes == ()
