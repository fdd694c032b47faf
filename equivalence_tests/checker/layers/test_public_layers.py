"""Arguments, masks and positions as public code has them, each written anew: what is right is not accused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.helpers_for_tests import changed, line_of, saved
from equivalence_tests.checker.layers.whole_beside import normalised
from equivalence_tests.checker.layers.whole_values import places_of
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.stages import OneMatrix


class Causal(OneMatrix):
    """Causal by a triangle that it keeps, whatever mask it is given beside."""

    def __init__(self, embed_dim: int, num_heads: int, max_len: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.register_buffer("triangle", torch.ones(max_len, max_len).tril())

    def seen(self, length: int) -> Tensor:
        return self.triangle[:length, :length]  # type: ignore[index]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.operands(x)
        scores = self.scores(q, k).masked_fill(self.seen(x.size(1)) == 0, -torch.inf)
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        return self.finish(scores.softmax(-1) @ v)


class CutsTheLastRows(Causal):
    def seen(self, length: int) -> Tensor:
        return self.triangle[-length:, :length]  # type: ignore[index]


def test_a_triangle_that_takes_part_and_hides_nothing_is_named_beside_a_mask_argument() -> None:
    assert verify(Causal).verdict == "equal"
    report = verify(CutsTheLastRows)
    assert report.mistakes == ("causal_mask_never_used",), str(report)
    assert "self.triangle[-length:, :length]" in line_of(report.findings[0])


class DropsBesideAMap(OneMatrix):
    """Returns a map that a second softmax makes, behind the dropout of the weights."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k, v = self.operands(x)
        scores = self.scores(q, k)
        return self.finish(self.dropout(scores.softmax(-1)) @ v), scores.softmax(-1).mean(1)


def test_a_second_softmax_behind_the_dropout_says_nothing_of_the_first() -> None:
    assert not verify(DropsBesideAMap).mistakes


class Layer(nn.Module):
    """Has the signature of torch's decoder layer, and no memory; masks only where it was built with shifts."""

    def __init__(self, d_model: int, nhead: int, shift: int = 0) -> None:
        super().__init__()
        self.attn, self.shift = nn.MultiheadAttention(d_model, nhead, batch_first=True), shift
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 3 * d_model), nn.ReLU(), nn.Linear(3 * d_model, d_model))

    def forward(self, tgt: Tensor, memory: Tensor | None = None, attn_mask: Tensor | None = None) -> Tensor:
        if self.shift == 0:
            attn_mask = None
        x = self.norm1(tgt)
        x = tgt + self.attn(x, x, x, attn_mask=attn_mask)[0]
        return x + self.mlp(self.norm2(x))


class ReadsNoMemory(Layer):
    """Has a second attention, which is given the target in the place of the memory."""

    def __init__(self, d_model: int, nhead: int) -> None:
        super().__init__(d_model, nhead)
        self.cross, self.norm3 = nn.MultiheadAttention(d_model, nhead, batch_first=True), nn.LayerNorm(d_model)

    def forward(self, tgt: Tensor, memory: Tensor | None = None, attn_mask: Tensor | None = None) -> Tensor:
        x = self.norm1(tgt)
        x = tgt + self.attn(x, x, x, attn_mask=attn_mask)[0]
        y = self.norm3(x)
        x = x + self.cross(y, y, y)[0]
        return x + self.mlp(self.norm2(x))


def test_what_no_line_reads_or_a_setting_leaves_out_is_no_mistake() -> None:
    report = verify(Layer)
    assert not report.findings, str(report)
    assert "replaces it" in str(report)
    assert verify(ReadsNoMemory).mistakes == ("cross_attention_from_decoder",)


class Positions(nn.Module):
    """Adds positions to what it is given, or gives them alone, for each sample."""

    def __init__(self, d_model: int, alone: bool) -> None:
        super().__init__()
        steps = torch.arange(64)[:, None] * 10000.0 ** (-torch.arange(0, d_model, 2) / d_model)
        self.register_buffer("table", torch.stack((steps.sin(), steps.cos()), -1).flatten(1))
        self.alone = alone

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.table[: x.size(1)].expand_as(x)  # type: ignore[index]
        return rows if self.alone else x + rows


class LengthFirst(nn.Module):
    """Takes ids batch first, and gives tokens length first."""

    alone = True

    def __init__(self, vocab_size: int, d_model: int, nhead: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab_size, d_model), Positions(d_model, self.alone)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(d_model, nhead, 3 * d_model), 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.encoder((x + self.positions(x)).transpose(0, 1))


def test_tokens_that_are_added_once_more_to_what_has_positions_are_a_step() -> None:
    right, wrong = verify(lambda: LengthFirst(29, 24, 3)), verify(lambda: changed(LengthFirst, alone=False)(29, 24, 3))
    assert right.verdict == "equal", str(right)
    assert wrong.verdict == "unchecked", str(wrong)
    assert "is added to its output once more" in " ".join(wrong.reason.split())


def _rotated(x: Tensor, freqs_cis: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs_cis[None, :, None]).flatten(3)


class RotatesBy(nn.Module):
    def __init__(self, dim: int, num_heads: int = 3) -> None:
        super().__init__()
        self.num_heads, self.packed, self.out = num_heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in self.packed(x).chunk(3, -1))
        q, k, v = (y.transpose(1, 2) for y in (_rotated(q, freqs_cis=pos), _rotated(k, freqs_cis=pos), v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_what_is_handed_on_as_angles_is_given_angles() -> None:
    report = verify(RotatesBy)
    assert report.verdict == "equal", str(report)
    assert {one.name for one in report.intended} == {"rotary_positions"}


def attends_beside_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
    beside = sinks.reshape(-1, 1, 1)[:1].expand(len(query), query.size(1), 1) * 0 - 3
    weights = torch.cat((query @ key.mT / query.size(-1) ** 0.5, beside), -1).softmax(-1)
    return weights[..., :-1] @ value


@pytest.mark.thorough
def test_what_is_taken_for_a_mask_and_hides_nothing_accuses_nobody() -> None:
    report = verify(attends_beside_sinks)
    assert (report.verdict, report.findings) == ("unchecked", []), str(report)
    assert "Nothing says what sinks takes" in report.reason


class Patches(nn.Module):
    """Cuts an image into so many patches in each row."""

    def __init__(self, image_size: int = 32, patches_in_row: int = 2, emb_dim: int = 24) -> None:
        super().__init__()
        side = image_size // patches_in_row
        self.cut = nn.Conv2d(3, emb_dim, side, stride=side)
        self.encoder = nn.TransformerEncoderLayer(emb_dim, 3, 48, batch_first=True)

    def forward(self, image: Tensor) -> Tensor:
        return self.encoder(self.cut(image).flatten(2).mT)[:, 0]


def test_a_count_that_divides_an_image_divides_it() -> None:
    assert verify(Patches).verdict == "equal"


OF_NUMPY = """import numpy as np


class Base:
    def __call__(self, x, **kwargs):
        return self.forward(x, **kwargs)


class Attention(Base):
    def __init__(self, scaled=True):
        self.scaled, self.training, self.rng = scaled, True, np.random.default_rng()

    def eval(self):
        self.training = False

    def forward(self, query, key, value):
        scores = np.matmul(query, np.swapaxes(key, -1, -2)) / np.sqrt(query.shape[-1])
        scores = scores * self.rng.random(scores.shape) if self.training else scores
        e = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
        return np.matmul(e / np.sum(e, axis=-1, keepdims=True), value)


class LayerNorm(Base):
    def __init__(self, dim):
        self.scale, self.shift = np.ones(dim), np.zeros(dim)

    def forward(self, x, **kwargs):
        centred = x - np.mean(x, axis=-1, keepdims=True)
        return centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 1e-5) * self.scale + self.shift
"""


@pytest.mark.parametrize(("name", "never"), [("Attention", ["`self.training` is true"]), ("LayerNorm", [])])
def test_a_class_of_numpy_that_is_called_by_the_class_above_runs_in_torchs_functions(
    name: str, never: list[str], tmp_path: Path
) -> None:
    report = verify(saved(tmp_path, OF_NUMPY, name))
    assert report.equivalent is not None, str(report)
    assert report.equivalent.agrees
    assert [one.what.partition("where ")[2] for one in report.not_exercised] == never


@pytest.mark.parametrize(
    "change", [("/ np.sqrt(query.shape[-1])", ""), ("axis=-1, keepdims=True), value", "axis=-2, keepdims=True), value")]
)
def test_a_class_of_numpy_is_found_out(change: tuple[str, str], tmp_path: Path) -> None:
    assert verify(saved(tmp_path, OF_NUMPY.replace(*change), "Attention")).verdict == "deviates"


WITH_WEIGHTS = """import numpy as np


class MultiHeadAttention:
    def __init__(self, d_model, num_heads):
        self.heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (np.random.randn(d_model, d_model) for _ in range(4))
        self.b_o = np.zeros(d_model)
        self.parameters = [self.W_q, self.W_k, self.W_v, self.W_o, self.b_o]
        self.future = np.triu(np.full((64, 64), -1e9), k=1)

    def split(self, x):
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)

    def forward(self, x):
        q, k, v = (self.split(x @ weight) for weight in (self.W_q, self.W_k, self.W_v))
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
        scores += self.future[: x.shape[1], : x.shape[1]]
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ self.W_o + self.b_o
"""


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (("", ""), "equal"),
        (("self.W_q, self.W_k, self.W_v)", "self.W_q, self.W_k, self.W_k)"), "deviates"),
        (("weights /= weights.sum", "scores /= weights.sum"), "deviates"),
        (("(weights @ v).transpose(0, 2, 1, 3)", "(weights @ v)"), "deviates"),
    ],
)
def test_a_class_of_numpy_holds_its_weights(change: tuple[str, str], verdict: str, tmp_path: Path) -> None:
    report = verify(saved(tmp_path, WITH_WEIGHTS.replace(*change), "MultiHeadAttention"))
    assert report.verdict == verdict, str(report)


class Rotary(nn.Module):
    """Rotates what it is given; the same one serves all layers, and is handed to them."""

    def __init__(self, head_dim: int, max_len: int) -> None:
        super().__init__()
        self.table: Tensor
        angles = torch.arange(max_len)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        self.register_buffer("table", torch.cat((angles, angles), -1))

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        angles, halves = self.table[position_ids][:, None], x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-halves[1], halves[0]), -1) * angles.sin()


class IsHandedARotary(OneMatrix):
    def keys(self, x: Tensor, rope: Rotary, position_ids: Tensor) -> Tensor:
        return rope(x, position_ids)

    def forward(self, x: Tensor, rope: Rotary, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.operands(x)
        return self.finish(self.attend(rope(q, position_ids), self.keys(k, rope, position_ids), v))


class RotatesQueriesAlone(IsHandedARotary):
    def keys(self, x: Tensor, rope: Rotary, position_ids: Tensor) -> Tensor:
        return x


def test_a_part_that_rotates_is_handed_over() -> None:
    report = verify(IsHandedARotary)
    assert report.verdict == "equal", str(report)
    assert {one.name for one in report.intended} == {"rotary_positions"}
    assert verify(RotatesQueriesAlone).verdict == "deviates"


def test_a_file_in_a_package_may_have_its_name(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "net.py").write_text("from .parts import scale\n")
    (tmp_path / "net" / "parts.py").write_text("def scale(q): return q.size(-1) ** -0.5\n")
    (tmp_path / "net" / "mine.py").write_text(
        "from .parts import scale\n\ndef attention(q, k, v):\n    return (scale(q) * q @ k.mT).softmax(-1) @ v\n"
    )
    assert verify(f"{tmp_path / 'net' / 'mine.py'}:attention").verdict == "equal"


class Sharpened(OneMatrix):
    """Multiplies queries and keys behind their norms by a number of its own."""

    def by(self, x: Tensor) -> float:
        return 1.2

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        q, k = (F.rms_norm(y, (y.size(-1),)) * self.by(y) for y in (q, k))
        return self.finish(self.attend(q, k, v))


class ScaledOnceMore(Sharpened):
    def by(self, x: Tensor) -> float:
        return x.size(-1) ** -0.5


def test_a_number_behind_the_norms_of_queries_and_keys_is_intended() -> None:
    report = verify(Sharpened)
    assert (report.verdict, report.mistakes) == ("equal", ()), str(report)
    assert "multiplied by 1.2 each" in " ".join(str(report).split())
    assert verify(ScaledOnceMore).mistakes


class RoundsItsOutput(LengthFirst):
    """Gives single numbers, which differ by rounding from one sample to the next."""

    def forward(self, ids: Tensor) -> Tensor:
        return (super().forward(ids) * (1 + 2e-7 * torch.arange(len(ids)))[:, None]).float()


def test_what_rounding_makes_of_a_sample_in_another_place_is_no_position() -> None:
    assert not verify(lambda: RoundsItsOutput(29, 24, 3)).mistakes


class AttendsInTwoStreams(nn.Module):
    """Text and image are projected apart, and attend to all tokens of both."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv_text, self.qkv_image = nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim)
        self.out_text, self.out_image = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat((self.qkv_text(text), self.qkv_image(image)), 1)
        q, k, v = both.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        of_text, of_image = attended.split((text.size(1), image.size(1)), 1)
        return self.out_text(of_text), self.out_image(of_image)


class BlockOfTwoStreams(nn.Module):
    """As in multimodal diffusion transformers: what comes back is both streams."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.attn = AttendsInTwoStreams(dim, num_heads)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(4))
        self.ff_text, self.ff_image = (
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(2)
        )

    def forward(self, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        of_text, of_image = self.attn(self.norms[0](text), self.norms[1](image))
        text, image = text + of_text, image + of_image
        return text + self.ff_text(self.norms[2](text)), image + self.ff_image(self.norms[3](image))


class ForgetsTheImage(BlockOfTwoStreams):
    def forward(self, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        of_text, _ = self.attn(self.norms[0](text), self.norms[1](image))
        text = text + of_text
        return text + self.ff_text(self.norms[2](text)), image + self.ff_image(self.norms[3](image))


def test_a_stream_that_comes_back_second_is_used() -> None:
    assert verify(BlockOfTwoStreams).findings == []
    assert "out_image.weight" in str(verify(ForgetsTheImage).findings)


class InvertedForecaster(nn.Module):
    """Takes what all tokens hold of one feature for a token, as iTransformer does, and normalises each feature."""

    eps = 1e-5

    def __init__(self, seq_len: int = 24, pred_len: int = 6, d_model: int = 16, n_heads: int = 2) -> None:
        super().__init__()
        self.embed, self.project = nn.Linear(seq_len, d_model), nn.Linear(d_model, pred_len)
        layer = nn.TransformerEncoderLayer(d_model, n_heads, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def scaled_back(self, x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        return x * deviation[:, :1].repeat(1, x.size(1), 1) + mean

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True).detach()
        x = x - mean
        deviation = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + self.eps)
        x = x / deviation
        y = self.project(self.encoder(self.embed(x.transpose(1, 2)))).transpose(1, 2)
        return self.scaled_back(y, mean, deviation)


class InvertedWithoutItsScale(InvertedForecaster):
    def scaled_back(self, x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        return x / deviation + mean


class InvertedWithTheTwoExchanged(InvertedForecaster):
    def scaled_back(self, x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        return x * mean + deviation


class InvertedWithAGain(InvertedForecaster):
    """The normalised features are scaled by a gain and a bias, which are taken away again."""

    def __init__(self, seq_len: int = 24, pred_len: int = 6, d_model: int = 16, n_heads: int = 2) -> None:
        super().__init__(seq_len, pred_len, d_model, n_heads)
        self.gain, self.bias = nn.Parameter(torch.rand(1)), nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = x.mean(1, keepdim=True), x.std(1, keepdim=True)
        x = (x - mean) / deviation * self.gain + self.bias
        y = self.project(self.encoder(self.embed(x.transpose(1, 2)))).transpose(1, 2)
        return (y - self.bias) / (self.gain + self.eps**2) * deviation + mean


class InvertedInPlace(InvertedForecaster):
    """Writes into what it takes the deviation of, so that data have no gradients; they need none."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True).detach()
        x = x - mean
        deviation = torch.sqrt(x.var(1, keepdim=True) + self.eps)
        x /= deviation
        y = self.project(self.encoder(self.embed(x.transpose(1, 2)))).transpose(1, 2)
        return self.scaled_back(y, mean, deviation)


def test_a_series_may_be_normalised_by_itself_and_scaled_back_by_the_same_numbers() -> None:
    for right in (InvertedForecaster, InvertedWithAGain, InvertedInPlace):
        report = verify(right)
        assert report.verdict == "equal", str(report)
        assert any(one.reason.startswith("the output is scaled back by them") for one in report.intended)
    for wrong in (InvertedWithoutItsScale, InvertedWithTheTwoExchanged):
        report = verify(wrong)
        assert (report.verdict, "a series is normalised" in report.reason) == ("unchecked", True), str(report)


class ScalesByATensor(nn.Module):
    """Keeps the root of its width as a tensor, which no state_dict holds."""

    def __init__(self, vocab_size: int, d_model: int, nhead: int, max_len: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, d_model), nn.Embedding(max_len, d_model)
        layer = nn.TransformerEncoderLayer(d_model, nhead, 3 * d_model, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scale = torch.sqrt(torch.FloatTensor([d_model]))

    def forward(self, src: Tensor) -> Tensor:
        places = self.positions(torch.arange(src.size(1), device=src.device))
        return self.encoder(self.tokens(src) * self.scale.to(src.device) + places)


class ScalesByAParameter(ScalesByATensor):
    def __init__(self, vocab_size: int, d_model: int, nhead: int, max_len: int) -> None:
        super().__init__(vocab_size, d_model, nhead, max_len)
        self.scale = nn.Parameter(self.scale)


def test_a_tensor_of_one_number_is_a_factor_unless_it_is_learnt() -> None:
    report = verify(ScalesByATensor)
    assert report.verdict == "equal", str(report)
    assert "the square root of the width, as embeddings are scaled" in " ".join(str(report).split())
    assert verify(ScalesByAParameter).verdict == "unchecked", str(verify(ScalesByAParameter))


class Attends(nn.Module):
    """Attends to the pixels of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(4, channels), nn.MultiheadAttention(channels, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.norm(x).flatten(2).mT
        return x + self.attention(pixels, pixels, pixels)[0].mT.reshape(x.shape)


class Denoiser(nn.Module):
    """Gives an image for an image; its name says nothing."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 3, padding=1)
        self.middle, self.end = Attends(channels), Attends(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.end(self.middle(self.first(x))))


def test_what_gives_an_image_is_run_as_a_model() -> None:
    report = verify(Denoiser)
    assert report.kind == "layers", str(report)
    assert "was found" not in report.reason
    assert not [one for one in report.not_exercised if "model" in one.what]


def test_a_single_token_is_no_series() -> None:
    run = Call(lambda x: x * 2, (torch.randn(3, 1, 4),)).run(read=False)
    given = run.recorder.given[0]
    assert normalised(given, places_of(given.value.shape), run.operations) is None


class TwoAttentions(nn.Module):
    """Holds what other models have in layers itself."""

    second = "attention2"

    def __init__(self, vocab_size: int, d_model: int, nhead: int, max_len: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, d_model), nn.Embedding(max_len, d_model)
        self.attention1, self.attention2 = (nn.MultiheadAttention(d_model, nhead, batch_first=True) for _ in range(2))
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        x = self.norm1(x + self.attention1(x, x, x)[0])
        return self.norm2(x + getattr(self, self.second)(x, x, x)[0])


class TakesTheFirstTwice(TwoAttentions):
    second = "attention1"


def test_an_attention_in_whose_place_its_like_is_called_twice_is_named() -> None:
    assert verify(TwoAttentions).verdict == "equal"
    report = verify(TakesTheFirstTwice)
    assert (report.mistakes, report.findings[0].where) == (("part_never_used",), "attention2"), str(report)


class PixelsAndContext(nn.Module):
    """The block of a U-Net: convolutions around attentions of pixels, which attend to one another and to a text."""

    def __init__(self, n_heads: int, head_width: int, d_context: int) -> None:
        super().__init__()
        width = n_heads * head_width
        self.group, self.enter, self.leave = (
            nn.GroupNorm(8, width),
            nn.Conv2d(width, width, 1),
            nn.Conv2d(width, width, 1),
        )
        self.own = nn.MultiheadAttention(width, n_heads, batch_first=True)
        self.text = nn.MultiheadAttention(width, n_heads, batch_first=True, kdim=d_context, vdim=d_context)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.wider, self.narrower = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def attended(self, x: Tensor, context: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.own(y, y, y)[0]
        return x + self.text(self.norm2(x), context, context)[0]

    def tokens(self, image: Tensor, context: Tensor) -> Tensor:
        x = self.attended(self.enter(self.group(image)).flatten(2).mT, context)
        y, gate = self.wider(self.norm3(x)).chunk(2, -1)
        return x + self.narrower(y * F.gelu(gate))

    def forward(self, image: Tensor, context: Tensor) -> Tensor:
        return self.leave(self.tokens(image, context).mT.reshape(image.shape)) + image


class ForgetsWhatPixelsGave(PixelsAndContext):
    def attended(self, x: Tensor, context: Tensor) -> Tensor:
        y = self.norm1(x)
        own = x + self.own(y, y, y)[0]
        return x + self.text(self.norm2(own), context, context)[0]


class EndsInPixels(PixelsAndContext):
    """Right: nothing stands behind the tokens, and they are all that comes back."""

    def __init__(self, n_heads: int, head_width: int, d_context: int) -> None:
        super().__init__(n_heads, head_width, d_context)
        del self.leave

    def laid(self, x: Tensor) -> Tensor:
        return x.mT

    def forward(self, image: Tensor, context: Tensor) -> Tensor:
        return self.laid(self.tokens(image, context)).reshape(image.shape)


class EndsInRows(EndsInPixels):
    """Views rows of features as an image."""

    def laid(self, x: Tensor) -> Tensor:
        return x


def test_a_layer_may_take_an_image_and_a_context_of_tokens() -> None:
    right, wrong = verify(PixelsAndContext), verify(ForgetsWhatPixelsGave)
    assert (right.verdict, right.mistakes) == ("equal", ()), str(right)
    reasons = {one.reason for one in right.intended}
    assert reasons == {"the sub-module group, a GroupNorm", "the sub-module group", "the sub-module leave"}, str(right)
    assert wrong.mistakes == ("residual_from_elsewhere",), str(wrong)
    assert line_of(wrong.findings[0]).endswith("return x + self.text(self.norm2(own), context, context)[0]"), str(wrong)
    assert verify(EndsInPixels).verdict == "equal"
    assert "the output has its tokens or features in another order" in verify(EndsInRows).reason


class ReadsTheWholeRow(nn.Module):
    """A classifier whose matrix takes the features of all tokens, one token after another."""

    def __init__(self, d_model: int, nhead: int, walk_length: int, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(d_model, nhead, 2 * d_model, batch_first=True)
        self.row, self.classes = nn.Linear(walk_length * d_model, 20), nn.Linear(20, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.row(self.laid(self.layer(x)).flatten(1)))

    def laid(self, x: Tensor) -> Tensor:
        return x


class ReadsItFeatureByFeature(ReadsTheWholeRow):
    """Right, too: the matrix is learnt in this order."""

    def laid(self, x: Tensor) -> Tensor:
        return x.mT


class ScramblesRows(ReadsTheWholeRow):
    """Views rows of features as tokens again, which they are not."""

    def __init__(self, d_model: int, nhead: int, walk_length: int, num_classes: int) -> None:
        super().__init__(d_model, nhead, walk_length, num_classes)
        self.row, self.classes = nn.Linear(d_model, d_model), nn.Linear(walk_length * d_model, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.layer(x).mT.flatten(1).view(x.shape)
        return self.classes(self.row(tokens).relu().flatten(1))


def test_a_model_whose_matrix_takes_all_tokens_is_run_on_as_many() -> None:
    for right in (ReadsTheWholeRow, ReadsItFeatureByFeature):
        report = verify(right)
        assert (report.verdict, report.not_exercised) == ("equal", []), str(report)
        assert {one.reason for one in report.intended} == {"the output holds no tokens"}
    assert verify(ScramblesRows).mistakes == ("changed_by_mT",)
