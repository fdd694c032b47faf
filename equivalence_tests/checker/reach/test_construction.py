"""What a constructor is told: by names, by widths that the file fixes, and by what one head needs."""

import contextlib
import copy
import inspect
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from equivalence_tests.checker.reach.arguments import IMAGE_SIDE, MAX_LEN, Sizes, value_for
from equivalence_tests.checker.reach.by_steps import forward_by_steps
from equivalence_tests.checker.reach.configs import ImitatedConfig, made_up_for
from equivalence_tests.checker.reach.construction import FEW, argument_lists, build
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.loading import load
from equivalence_tests.checker.reach.plans import trials_of
from equivalence_tests.checker.reach.proposing import exact_lengths
from equivalence_tests.checker.verify import verify

WIDTH = 27


class PartsOfADictionary(nn.Module):
    """Its arguments hold those of its parts."""

    def __init__(self, embed_dim: int, encoder_args: dict[str, dict[str, int]]) -> None:
        super().__init__()
        inner = encoder_args["self_attention"]
        self.heads = inner["n_head"]
        self.packed = nn.Linear(embed_dim, 3 * inner["n_head"] * inner["d_k"])
        self.out = nn.Linear(inner["n_head"] * inner["d_k"], embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.packed(x).chunk(3, -1))
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_dictionary_with_the_arguments_of_its_parts_is_imitated() -> None:
    assert verify(PartsOfADictionary).verdict == "equal"


class PresetOrSizes(PartsOfADictionary):
    """Takes the name of a preset or sizes, not both: the other is None."""

    def __init__(self, config: Any) -> None:
        assert (config.model_type is not None) ^ all(x is not None for x in (config.n_head, config.n_embd))
        width = config.n_embd // config.n_head
        super().__init__(config.n_embd, {"self_attention": {"n_head": config.n_head, "d_k": width}})


def test_what_a_constructor_compares_with_none_may_be_none_in_its_config() -> None:
    assert verify(PresetOrSizes).verdict == "equal"


class FixedWidth(nn.Module):
    """Its width stands in the file; only heads that fill it can be split."""

    def __init__(self, num_heads: int, head_size: int) -> None:
        super().__init__()
        self.packed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_heads, self.head_size = num_heads, head_size

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            t.view(batch, length, self.num_heads, self.head_size).transpose(1, 2) for t in self.packed(x).chunk(3, -1)
        )
        context = self.scores(q, k).softmax(-1) @ v
        return self.out(context.transpose(1, 2).reshape(batch, length, WIDTH))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / math.sqrt(self.head_size)


class FixedWidthScaledTwice(FixedWidth):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) / math.sqrt(self.head_size)


class Crossing(nn.Module):
    """The second input has a width of its own, whose name holds the word for a switch."""

    def __init__(self, n_heads: int, d_embed: int, d_cross: int) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d_embed, d_embed), nn.Linear(d_cross, d_embed), nn.Linear(d_cross, d_embed)
        self.out, self.n_heads = nn.Linear(d_embed, d_embed), n_heads

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (
            f(t).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f, t in ((self.q, x), (self.k, y), (self.v, y))
        )
        context = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v
        return self.out(context.transpose(1, 2).flatten(2))


class Windows(FixedWidth):
    """Takes the side of a window as a whole number; at a side of 64 its table is enormous."""

    table: Tensor
    apart: Tensor

    def __init__(self, window_size: int, num_heads: int) -> None:
        super().__init__(num_heads, WIDTH // num_heads)
        self.window_size = window_size
        self.table = nn.Parameter(torch.randn((2 * window_size - 1) ** 2, num_heads))
        at = torch.cartesian_prod(torch.arange(window_size), torch.arange(window_size))
        apart = at[:, None] - at + window_size - 1
        self.register_buffer("apart", apart[..., 0] * (2 * window_size - 1) + apart[..., 1])

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) + self.table[self.apart].permute(2, 0, 1)


class OfOneHead(nn.Module):
    """Takes no axis of heads, and is told the width that it scales by."""

    def __init__(self, d_k: int) -> None:
        super().__init__()
        self.root = math.sqrt(d_k)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("ijk,ilk->ijl", q, k) / self.root
        return torch.einsum("ijk,ikl->ijl", scores.softmax(-1), v)


class OfOneHeadUnrooted(OfOneHead):
    def __init__(self, d_k: int) -> None:
        super().__init__(d_k * d_k)


class Windowed(FixedWidth):
    """May be told that there is no window."""

    def __init__(self, num_heads: int, head_size: int, window: int | None = None) -> None:
        super().__init__(num_heads, head_size)
        self.window = window


class OfAConfig(Windowed):
    """Hands on a field that may be None."""

    def __init__(self, cfg) -> None:  # type: ignore[no-untyped-def]
        super().__init__(3, WIDTH // 3, cfg.window)
        if self.window is not None:
            raise ValueError("no windows here")


@dataclass
class OwnConfig:
    """Has as many heads as the groups that stand in the class can share."""

    n_embd: int = 96
    n_head: int = 8


class OfGroups(nn.Module):
    """Shares four heads of keys, whatever the config says."""

    def __init__(self, config) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.n_head, self.head_dim = config.n_head, config.n_embd // config.n_head
        self.q, self.out = nn.Linear(config.n_embd, config.n_embd), nn.Linear(config.n_embd, config.n_embd)
        self.kv = nn.Linear(config.n_embd, 2 * 4 * self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
        k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2).repeat_interleave(self.n_head // 4, 1)
            for t in self.kv(x).chunk(2, -1)
        )
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class WantsOneOfTwo(FixedWidth):
    """Two widths are left out; one has to be given."""

    def __init__(self, num_heads: int, d_attn: int | None = None, d_v: int | None = None) -> None:
        assert d_attn is not None or d_v is not None
        super().__init__(num_heads, WIDTH // num_heads)


class Table(nn.Module):
    """A part that an argument is annotated with."""

    rows: Tensor

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(64, d_model))

    def first(self, length: int) -> Tensor:
        return self.rows[:length]


class OfAnAnnotatedPart(FixedWidth):
    """Wants an instance of another class of the file, as a text says."""

    def __init__(self, num_heads: int, positions: "Table") -> None:
        super().__init__(num_heads, WIDTH // num_heads)
        self.packed, self.positions = nn.Linear(positions.rows.size(1), 3 * WIDTH), positions

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions.first(x.size(1)))


class OfDefaultsThatFitEachOther(FixedWidth):
    """Its default object fits no other width."""

    def __init__(self, d_model: int = WIDTH, num_heads: int = 3, positions: Table = Table(WIDTH)) -> None:  # noqa: B008
        super().__init__(num_heads, d_model // num_heads)
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions.first(x.size(1)))


class OfASection(FixedWidth):
    """Reads a section and a base that no other config has."""

    def __init__(self, config) -> None:  # type: ignore[no-untyped-def]
        near = config.near
        super().__init__(near["num_heads"] if config.near_rope_base > 1 else 2, WIDTH // near["num_heads"])


class OfManyWidths(nn.Module):
    """The width of its heads stands in the file, as that of its tokens does."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 5 * n_heads, bias=False) for _ in range(3))
        self.out, self.n_heads = nn.Linear(5 * n_heads, WIDTH), n_heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        context = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x + self.out(context.flatten(2))


class OfATemperature(nn.Module):
    """Divides by a number that only its caller knows."""

    def __init__(self, temperature: float, attn_dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = nn.Dropout(attn_dropout)
        self.temperature = temperature

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (torch.bmm(q, k.transpose(1, 2)) / self.temperature).softmax(2)
        return torch.bmm(self.dropout(weights), v)


class OfAnAlpha(nn.Module):
    """Scales what comes out, and not its scores."""

    def __init__(self, d_model: int, n_heads: int, alpha: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.n_heads, self.alpha = n_heads, 0.0
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.alpha * self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class OfATemperatureOverQueries(OfATemperature):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm((torch.bmm(q, k.transpose(1, 2)) / self.temperature).softmax(1), v)


@pytest.mark.parametrize(
    "right",
    [
        *(OfGroups, OfAConfig, OfASection, OfAnAnnotatedPart, OfDefaultsThatFitEachOther, OfManyWidths, WantsOneOfTwo),
        *(OfATemperature, FixedWidth, Crossing, Windows, OfOneHead),
    ],
)
def test_what_is_right_is_built_so_that_it_runs(right: type[nn.Module]) -> None:
    report = verify(right)
    assert report.mistakes == (), str(report)
    assert report.verdict == "equal" or report.equivalent or report.unread


def test_a_scale_that_the_checker_chose_is_told() -> None:
    assert "the caller chooses the scale; it was built with temperature = sqrt(head_dim)" in str(verify(OfATemperature))


class OfATemperatureBesideWidths(nn.Module):
    """Multiplies by a number that only its caller knows, and has widths that only its caller knows."""

    def __init__(self, n_head: int, d_asks: int, d_told: int, d_k: int, temp: float) -> None:
        super().__init__()
        self.n_head, self.temp = n_head, temp
        self.q = nn.Linear(d_asks, n_head * d_k)
        self.k, self.v = nn.Linear(d_told, n_head * d_k), nn.Linear(d_told, n_head * d_k)
        self.o = nn.Linear(n_head * d_k, d_asks)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = self.q(q), self.k(k), self.v(v)
        q, k, v = (x.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for x in (q, k, v))
        return self.o(((q @ k.mT * self.temp).softmax(-1) @ v).transpose(1, 2).flatten(2))


class OfAWidthForATemperature(OfATemperatureBesideWidths):
    def __init__(self, n_head: int, d_asks: int, d_told: int, d_k: int) -> None:
        super().__init__(n_head, d_asks, d_told, d_k, d_asks)


def test_a_scale_is_told_from_widths_that_are_the_same_number() -> None:
    report = verify(OfATemperatureBesideWidths)
    assert report.verdict == "equal", str(report)
    assert "the caller chooses the scale; it was built with temp = 1 / sqrt(head_dim)" in str(report)
    assert "scale_wrong" in verify(OfAWidthForATemperature).mistakes


def test_a_number_that_scales_no_scores_excuses_none() -> None:
    assert "scale_missing" in verify(OfAnAlpha).mistakes


class OfTheLargest(FixedWidth):
    """Its k says how many keys are seen, and is no width."""

    def __init__(self, num_heads: int, head_size: int, k: int = 2) -> None:
        super().__init__(num_heads, head_size)
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        q, key, v = (
            t.unflatten(-1, (self.num_heads, self.head_size)).transpose(1, 2) for t in self.packed(x).chunk(3, -1)
        )
        scores = q @ key.mT / math.sqrt(self.head_size)
        least = scores.topk(min(self.k, x.size(1)), -1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (OfTheLargest, "keys_hidden_by_their_scores"),
        (OfATemperatureOverQueries, "softmax_over_queries"),
        (FixedWidthScaledTwice, "scale_wrong"),
        (OfOneHeadUnrooted, "scale_wrong"),
    ],
)
def test_another_size_excuses_no_mistake(broken: type[nn.Module], name: str) -> None:
    assert verify(broken).mistakes == (name,)


class Divided(nn.Module):
    """Has a letter for the number of its heads, and groups that share keys."""

    def __init__(self, d: int, n: int, num_heads: int, num_groups: int) -> None:
        super().__init__()
        self._d, self._n = d, n
        self.width = self._d // self._n
        assert num_heads % num_groups == 0


ACTIVATIONS = {"swish": functional.silu, "tanh": torch.tanh}


class LooksUp(nn.Module):
    """Knows two activations, two kinds of loss, a number of axes, and which layer it is."""

    def __init__(self, embed_dim: int, hidden_act: str, layer, num_axes, loss_class, num_dimensions: int = 2) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        losses = {"my.CrossEntropy": "ce", "my.Binary": "bce"}
        self.loss = losses[loss_class]
        self.activation, self.axes = ACTIVATIONS[hidden_act], num_axes * num_dimensions
        self.part = Numbered(embed_dim, layer_idx=layer)


class Numbered(nn.Linear):
    """Its caller says where it stands, and the side of its patches is one of two."""

    def __init__(self, embed_dim: int, layer_idx: int, patch_size: int = 16) -> None:
        assert patch_size in [8, 16], "others are not known"
        super().__init__(embed_dim, embed_dim)
        self.layer_idx, self.side = layer_idx, patch_size


def test_tables_counts_and_places_are_given_what_they_take() -> None:
    made, _ = next(build(LooksUp))
    assert (made.activation, made.axes, made.part.layer_idx, made.loss) == (functional.silu, 4, 0, "ce")


class OfPatches(Numbered):
    """Hands the side of its patches on."""

    def __init__(self, embed_dim: int, patch_size: int = 16) -> None:
        super().__init__(embed_dim, 0)
        self.part = Numbered(embed_dim, 0, patch_size)


def test_what_an_assertion_lists_is_accepted() -> None:
    assert next(build(OfPatches))[0].part.side == 8


class Correlation(nn.Module):
    """Is no attention by its name."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v)


class TakesPairs(nn.Module):
    """Takes the two sides of an image, and runs a part that it asks for."""

    def __init__(self, correlation: Any, dim: int, image_size: Any) -> None:
        super().__init__()
        height, width = image_size
        self.correlation, self.positions = correlation, nn.Parameter(torch.zeros(1, height * width, dim))

    def forward(self, x: Tensor) -> Any:
        x = x + self.positions
        return self.correlation(q=x, k=x, v=x)


def test_a_pair_and_a_part_that_is_named_like_its_class_are_handed_over() -> None:
    made, sizes = next(build(TakesPairs))
    assert made.positions.shape == (1, IMAGE_SIDE**2, sizes.embed_dim)
    assert isinstance(made.correlation, Correlation)


class RepeatsItsQueries(nn.Module):
    """A section of its config says how many queries there are, and how often it looks."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        slots = args["slots"]
        self.number, self.iterations = slots["number_of_slots"], range(slots["iterations"])
        self.query = nn.Parameter(torch.zeros(1, 1, slots["input_dim"]))

    def forward(self, x: Tensor) -> Tensor:
        query = self.query.repeat(len(x), self.number, 1)
        for _ in self.iterations:
            query = query + functional.scaled_dot_product_attention(query, x, x)
        return query


def test_a_section_holds_numbers_of_which_nothing_says_what_they_are() -> None:
    made, sizes = next(build(RepeatsItsQueries))
    assert made(torch.zeros(2, 5, sizes.embed_dim)).shape == (2, FEW, sizes.embed_dim)
    assert [one.what for one in made_up_for(made)] == ["the config's number_of_slots", "the config's iterations"]


def test_what_divides_a_width_or_a_number_of_heads_fits_it() -> None:
    _, sizes = next(build(Divided))
    (first, *_), *_ = argument_lists(Divided, sizes)
    heads = {"n": sizes.num_heads, "num_heads": sizes.num_heads, "num_groups": sizes.key_heads}
    assert first == {"d": sizes.embed_dim} | heads


def test_a_switch_and_a_width_may_share_a_word() -> None:
    sizes = Sizes()
    for width in ("d_cross", "cross_attention_dim", "decoder_dim"):
        assert value_for(width, sizes) == (True, sizes.embed_dim)
    for switch in ("cross_attention", "is_decoder", "use_cross"):
        assert value_for(switch, sizes) == (True, False)
    for count in ("n_layer", "n_encoder_layer", "n_dec_layers", "num_hidden_layers"):
        assert value_for(count, sizes) == (True, sizes.num_layers)


def test_a_window_of_two_by_three_has_a_length_to_try() -> None:
    window = nn.Module()
    window.register_buffer("relative_position_index", torch.zeros(6, 6, dtype=torch.long))
    window.register_buffer("offsets", torch.zeros(3, dtype=torch.long))
    assert exact_lengths(window) == [6]


class CountsItsBuilds(FixedWidth):
    """Asks for no part, though the file has others for which "attention" stands."""

    builds = 0

    def __init__(self, num_attention_heads: int, attention_width: int) -> None:
        CountsItsBuilds.builds += 1
        if CountsItsBuilds.builds > 1000:
            pytest.fail("it is built again and again")
        super().__init__(num_attention_heads, attention_width)


class OneAttention(CountsItsBuilds):
    pass


class AnotherAttention(CountsItsBuilds):
    pass


class AsksForAttention(CountsItsBuilds):
    def __init__(self, self_attention: nn.Module) -> None:
        super().__init__(3, 9)
        if not isinstance(self_attention, OneAttention):
            raise TypeError("another attention was meant")


class AsksForThatAttention(AsksForAttention):
    pass


@pytest.mark.parametrize("target", [OneAttention, AsksForThatAttention])
def test_parts_of_one_file_are_not_built_in_one_another_again_and_again(target: type[nn.Module]) -> None:
    CountsItsBuilds.builds = 0
    with contextlib.suppress(CannotCheckError):
        next(build(target))
    assert CountsItsBuilds.builds <= 1000


BESIDE = """from torch import nn

class FlowAttention(nn.Module):
    pass

class FullAttention(nn.Module):
    pass

class Layer(nn.Module):
    def __init__(self, attention, kernel_size):
        super().__init__()
        self.attention, self.width = attention, kernel_size
"""


def test_of_several_attentions_of_a_file_one_that_says_that_it_is_torchs_is_handed_over(tmp_path: Path) -> None:
    (tmp_path / "several_of_ours.py").write_text(BESIDE)
    made, _ = next(build(load(f"{tmp_path / 'several_of_ours.py'}:Layer")))
    assert (type(made.attention).__name__, made.width) == ("FullAttention", 3)  # an odd kernel keeps the length


class RaisesItself(nn.Module):
    """Its own line fails, whatever it is given."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.act = self.made()

    def made(self) -> nn.Module:
        return nn.Relu()  # type: ignore[attr-defined]


def test_a_constructor_that_fails_by_itself_is_told_its_lines() -> None:
    first, entry = (inspect.getsourcelines(found)[1] for found in (RaisesItself.made, RaisesItself.__init__))
    where = rf"\(\S+:{first + 1}, called from \S+:{entry + 2}\)"
    with pytest.raises(
        CannotCheckError, match=rf"no attribute 'Relu' {where}\n\d+ of the \d+ constructions .* ended there"
    ):
        list(build(RaisesItself))


class OfPowers(nn.Module):
    """Makes a table whose length is a power of a width that may be left to its default."""

    def __init__(self, d_model: int, channels: int = 3) -> None:
        super().__init__()
        self.table = torch.empty(channels**4, 400)


class WideByDefault(nn.Module):
    """Is large by its own defaults, and takes only widths of whole groups."""

    def __init__(self, base_channels: int = 128) -> None:
        super().__init__()
        self.norm, self.inner = nn.GroupNorm(8, base_channels), nn.Linear(24 * base_channels, 24 * base_channels)


def test_smaller_sizes_are_tried_before_large_defaults_and_instead_of_them() -> None:
    assert {made.norm.num_channels for made, _ in build(WideByDefault)} == {32, 64}


class InVain(nn.Module):
    """Makes a large table before it refuses whatever it is told."""

    built = 0

    def __init__(self, zebra: int, okapi: int) -> None:
        super().__init__()
        type(self).built += 1
        self.table = torch.empty(2**25)
        raise ValueError("want something else")


def test_no_huge_tensor_is_made_where_a_default_makes_a_small_one() -> None:
    assert next(build(OfPowers))[0].table.numel() == 400 * 3**4


def test_constructors_that_fail_late_are_called_less_often() -> None:
    with pytest.raises(CannotCheckError, match="want something else"):
        next(build(InVain))
    assert 10 < InVain.built < 60


class DropsInEval(nn.Module):
    """Drops while its own argument says that it trains, at a rate of another name that is 0 by default."""

    def __init__(self, n_patch: int, n_embd: int, h_size: int, d_rate: float = 0.0) -> None:
        super().__init__()
        assert n_embd % h_size == 0
        self.h_size, self.d_rate = h_size, d_rate
        self.packed, self.out, self.drop = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd), nn.Dropout(d_rate)

    def forward(self, x: Tensor, training: bool = True) -> Tensor:
        self.training = training
        q, k, v = (t.unflatten(-1, (-1, self.h_size)).transpose(1, 2) for t in self.packed(x).chunk(3, -1))
        rate = self.d_rate if self.training else 0.0
        return self.out(functional.scaled_dot_product_attention(q, k, v, dropout_p=rate).transpose(1, 2).flatten(2))


class InDepth(nn.Module):
    """Hands its rate and its size on, and repeats what it holds."""

    def __init__(self, n_embd: int, h_size: int, enc_depth: int, d_rate: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DropsInEval(9, n_embd, h_size, d_rate=d_rate) for _ in range(enc_depth))


def test_what_no_name_says_is_read_off_what_the_constructor_does_with_it() -> None:
    built, sizes = next(build(InDepth))
    assert len(built.layers) == sizes.num_layers
    assert (built.layers[0].h_size, built.layers[0].d_rate) == (sizes.head_dim, 0.25)
    assert "dropout_in_eval" in verify(DropsInEval).mistakes


class ScaledByTheWidthOfItsInput(nn.Module):
    """Right only where input and output are equally wide."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(d_in, d_out, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT / x.size(-1) ** 0.5
        return scores.softmax(-1) @ self.value(x)


RANKED = """
from torch import nn


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.down, self.up = nn.Linear({width}, {rank}), nn.Linear({rank}, 3 * {width})
"""
DATACLASS = """
from dataclasses import dataclass


@dataclass
class Model:
    emb_dim: int = 768
    zebra_rank: int = 17


for step in range(3):
    raise KeyError("configs are read, and what trains is not run")
"""


@pytest.mark.parametrize(
    ("width", "rank", "beside"),
    [
        ("cfg.emb_dim", "cfg.zebra_rank", DATACLASS),
        ("cfg.emb_dim", "cfg.zebra_rank", "class Config:\n    emb_dim, zebra_rank = 768, 17"),
        (
            "cfg.emb_dim",
            "cfg.zebra_rank",
            "class Config:\n    def __init__(self):\n        self.emb_dim = 768\n        self.zebra_rank = 17",
        ),
        ('cfg["emb_dim"]', 'cfg["zebra_rank"]', "CONFIG = {'emb_dim': 768, 'zebra_rank': 17, 'layers': 12}"),
    ],
)
def test_a_config_that_lies_beside_is_used_in_small_sizes(tmp_path: Path, width: str, rank: str, beside: str) -> None:
    (tmp_path / "config.py").write_text(beside)
    (tmp_path / "model.py").write_text(RANKED.format(width=width, rank=rank))
    built, sizes = next(build(load(f"{tmp_path / 'model.py'}:Attention")))
    assert (built.down.in_features, built.down.out_features) == (sizes.embed_dim, 17)


class AsksWhetherToShare(nn.Module):
    def __init__(self, channels: int, share_key_query, matmul_norm) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.query, self.matmul_norm = nn.Linear(channels, channels), matmul_norm
        self.key = self.query if share_key_query else nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT
        return (scores / math.sqrt(x.size(-1)) if self.matmul_norm else scores).softmax(-1) @ x


def test_what_is_only_asked_whether_it_is_true_is_a_switch_and_on_where_torch_has_it() -> None:
    made, _ = next(build(AsksWhetherToShare))
    assert made.key is not made.query
    assert made.matmul_norm is True


class ReadsWidthsOfItsConfig(nn.Module):
    """What is called hidden units is often the width of a feed-forward; here it is that of the tokens."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(args.hidden_units, args.num_heads)


def test_a_config_is_imitated_in_the_other_meaning_of_its_names_too() -> None:
    made, sizes = next(build(ReadsWidthsOfItsConfig))
    assert made.attention.embed_dim == sizes.embed_dim


def test_an_imitated_config_that_a_module_keeps_is_copied_with_it() -> None:
    config = copy.deepcopy(ImitatedConfig(Sizes(num_heads=3, head_dim=9)))
    assert (config.n_embd, 0 < config.std_rate < 1) == (27, True)
    assert not hasattr(config, "sample_rate")  # a whole number, as dilations are


def test_a_part_that_lies_in_a_file_beside_is_handed_over(tmp_path: Path) -> None:
    (tmp_path / "heads.py").write_text(RANKED.format(width="cfg.emb_dim", rank="cfg.n_heads"))
    layer = (
        "class Layer(nn.Module):\n    def __init__(self, attn):\n        super().__init__()\n        self.attn = attn"
    )
    (tmp_path / "layer.py").write_text(f"from torch import nn\n\n\n{layer}\n        attn.down\n")
    assert type(next(build(load(f"{tmp_path / 'layer.py'}:Layer")))[0].attn).__name__ == "Attention"


def test_an_output_may_be_wider_than_the_input() -> None:
    assert verify(ScaledByTheWidthOfItsInput).mistakes == ("scale_wrong",)


class OfALength(nn.Module):
    def __init__(self, dim: int, n_timesteps: int, input_resolution: tuple[int, int]) -> None:
        super().__init__()
        self.dim, self.n_timesteps, self.input_resolution = dim, n_timesteps, input_resolution


class HandsOn(OfALength):
    """Leaves to the class above what it does not name."""

    def __init__(self, d_model: int, **kwargs: Any) -> None:
        super().__init__(dim=d_model, **kwargs)


def test_what_the_class_above_requires_is_handed_on_and_an_image_has_rows_and_columns() -> None:
    module, sizes = next(build(HandsOn))
    assert (module.dim, module.n_timesteps, module.input_resolution) == (sizes.embed_dim, MAX_LEN, (4, 8))
    assert exact_lengths(module) == [32]


def test_pixels_with_their_features_last_are_tokens() -> None:
    class OfRows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            b, rows, columns, width = x.shape
            assert rows == columns == 8
            tokens = x.view(b, rows * columns, width)
            return ((tokens @ tokens.mT).softmax(-1) @ tokens).view(b, rows, columns, width)

    trial = next(trials_of(OfRows(), Sizes(), torch.float64))
    assert (trial.plan.layout, trial.sizes.query_len) == ("b l 1 e", 64)
    assert trial.output(trial.inputs()).shape == trial.inputs().query.shape


class OfSquareWindows(nn.Module):
    """Keeps a number for each pair of tokens of a window, of which there are side to the fourth power."""

    def __init__(self, dim: int, window_size: int) -> None:
        super().__init__()
        self.tokens = window_size * window_size
        self.q, self.pairs = nn.Linear(dim, dim), nn.Parameter(torch.zeros(self.tokens, self.tokens))


class OfDistancesInWindows(nn.Module):
    """Keeps a number for each distance in a window, and which of them each pair of tokens has, end to end."""

    def __init__(self, dim: int, window_size: int) -> None:
        super().__init__()
        self.tokens = window_size * window_size
        self.q, self.table = nn.Linear(dim, dim), nn.Parameter(torch.zeros((2 * window_size - 1) ** 2, 3))
        self.register_buffer("index", torch.zeros(self.tokens, self.tokens, dtype=torch.long).flatten())


@pytest.mark.parametrize("made", [OfSquareWindows, OfDistancesInWindows])
def test_the_side_of_a_window_is_short(made: Any) -> None:
    built, _ = next(iter(build(made)))
    assert built.tokens < MAX_LEN


def test_an_index_end_to_end_is_that_of_a_square() -> None:
    assert exact_lengths(OfDistancesInWindows(33, 3)) == [9, 81]


class LooksUpAllPlaces(nn.Module):
    """Takes as many items as it has places, as models of what users did last have them."""

    def __init__(self, num_items: int, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.item_embedding, self.pos_embedding = nn.Embedding(num_items + 2, embed_dim), nn.Embedding(20, embed_dim)
        layer = nn.TransformerEncoderLayer(embed_dim, num_heads, 2 * embed_dim, batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.output = nn.Linear(embed_dim, num_items + 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.item_embedding(x) + self.pos_embedding(torch.arange(20, device=x.device)[None])
        return self.output(self.transformer(x, src_key_padding_mask=mask))


def test_items_are_a_vocabulary_and_all_places_may_be_looked_up_at_once() -> None:
    assert exact_lengths(next(build(LooksUpAllPlaces))[0]) == [20]
    assert verify(LooksUpAllPlaces).verdict == "equal"


class LooksUpAllRows(nn.Module):
    """Adds all rows of a table to each sample; a part that is called positions holds it."""

    def __init__(self, length: int, embed_dim: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(length, embed_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows.weight.unsqueeze(0).repeat(len(x), 1, 1)


class RunsWhatItIsHanded(nn.Module):
    """A residual around whatever is handed over, as The Annotated Transformer has it."""

    calls = 0

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)

    def forward(self, x: torch.Tensor, sublayer: Any) -> torch.Tensor:
        type(self).calls += 1
        return cast(torch.Tensor, x + sublayer(self.norm(x)))


class OfHiddenUnits(nn.Module):
    """Says how wide it is by its hidden units alone, and runs its attention past its own call."""

    def __init__(self, num_items: int, max_len: int, num_heads: int = 2, hidden_units: int = 256) -> None:
        super().__init__()
        self.width, self.items = hidden_units, nn.Embedding(num_items + 1, hidden_units)
        self.position = LooksUpAllRows(max_len, hidden_units)
        self.attention = nn.MultiheadAttention(hidden_units, num_heads, batch_first=True)
        self.around = RunsWhatItIsHanded(hidden_units)
        self.ff = nn.Sequential(nn.LayerNorm(hidden_units), nn.Linear(hidden_units, 2 * hidden_units), nn.ReLU())
        self.ff.append(nn.Linear(2 * hidden_units, hidden_units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.items(x) + self.position(x)
        x = self.around(x, lambda y: self.attention.forward(y, y, y)[0])
        return cast(torch.Tensor, x + self.ff(x))


def test_what_alone_says_how_wide_tokens_are_is_their_width() -> None:
    module, sizes = next(build(OfHiddenUnits))
    assert module.width == sizes.embed_dim
    assert exact_lengths(module) == [MAX_LEN]
    report = verify(OfHiddenUnits)
    assert report.verdict == "equal", str(report)
    RunsWhatItIsHanded.calls = 0
    assert not list(trials_of(module.around, sizes, torch.float64))  # only its caller knows what
    assert RunsWhatItIsHanded.calls == 0


class TakesAnything(nn.Module):
    """Encodes and decodes whatever it is given, so that nothing says what a forward would take."""

    def encode(self, *tokens: Tensor) -> Tensor:
        return tokens[0]

    def decode(self, memory: Tensor, scale: float = 1.0, **others: Tensor) -> Tensor:
        return scale * memory


def test_steps_that_take_anything_make_no_forward() -> None:
    assert forward_by_steps(TakesAnything) is None
    assert "has no forward" in verify(TakesAnything).reason
