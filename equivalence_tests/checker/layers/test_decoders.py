"""Models that decode: a cache that is a plain attribute, a place to start at, norms in float32, no gradients."""

from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.stages import ThreeMatrices

WIDTH, LENGTH = 48, 32


class RMSNorm(nn.Module):
    """Divides by the root of the mean of squares, in float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


def turned(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[None, :, None]).flatten(3).type_as(x)


class Attention(nn.Module):
    """Remembers keys and values of the positions so far."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.cache_k = torch.zeros(4, LENGTH, n_heads, self.head_dim)
        self.cache_v = torch.zeros(4, LENGTH, n_heads, self.head_dim)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, self.n_heads, -1) for f in (self.q, self.k, self.v))
        q, k = turned(q, freqs_cis), turned(k, freqs_cis)
        self.cache_k, self.cache_v = self.cache_k.to(q), self.cache_v.to(q)
        self.cache_k[:b, start_pos : start_pos + n] = k
        self.cache_v[:b, start_pos : start_pos + n] = v
        keys, values = (y[:b, : start_pos + n].transpose(1, 2) for y in (self.cache_k, self.cache_v))
        scores = q.transpose(1, 2) @ keys.transpose(2, 3) / self.head_dim**0.5
        weights = F.softmax((scores if mask is None else scores + mask).float(), dim=-1).type_as(q)
        return self.o((weights @ values).transpose(1, 2).reshape(b, n, -1))


class Layer(nn.Module):
    """Both, each behind a norm."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.attention, self.attention_norm, self.ffn_norm = Attention(dim, n_heads), RMSNorm(dim), RMSNorm(dim)
        self.up, self.down = nn.Linear(dim, 96, bias=False), nn.Linear(96, dim, bias=False)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), start_pos, freqs_cis, mask)
        return self.after(h, x)

    def after(self, h: Tensor, x: Tensor) -> Tensor:
        return h + self.down(F.silu(self.up(self.ffn_norm(h))))


class AddsToItsInput(Layer):
    """Adds the feed-forward to what came in, and not to what attention made of it."""

    def after(self, h: Tensor, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.ffn_norm(h))))


class Decoder(nn.Module):
    """Gives logits of the next token, in float32 and without gradients."""

    def __init__(self, dim: int = WIDTH, n_heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(53, dim)
        self.layers = nn.ModuleList(Layer(dim, n_heads) for _ in range(2))
        self.norm, self.output = RMSNorm(dim), nn.Linear(dim, 53, bias=False)
        powers = torch.arange(0, dim // n_heads, 2).float() / (dim // n_heads)
        angles = torch.outer(torch.arange(LENGTH).float(), 10000.0**-powers)
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        n, h, mask = tokens.size(1), self.embed(tokens), None
        if n > 1:
            mask = torch.triu(torch.full((n, n), -torch.inf), diagonal=1)
            mask = torch.hstack([torch.zeros(n, start_pos), mask]).type_as(h)
        for layer in self.layers:
            h = layer(h, start_pos, self.freqs_cis[start_pos : start_pos + n].to(h.device), mask)
        return self.output(self.norm(h)).float()


def test_a_layer_with_a_cache_and_angles_from_outside_is_equal() -> None:
    report = verify(Layer)
    assert report.verdict == "equal", str(report)
    assert {finding.name for finding in report.intended} == {"rotary_positions"}


def test_a_model_that_starts_at_a_position_and_keeps_no_gradients_is_equal() -> None:
    report = verify(Decoder)
    assert report.verdict == "partial", str(report)
    (training,) = report.not_exercised  # its cache is decoded
    assert training.what == "training"
    assert "torch.inference_mode" in training.detail
    assert report.equivalent is not None
    assert report.equivalent.agrees


class KeepsGradientsOut(nn.Module):
    """A feed-forward that never trains."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class HoldsIt(nn.Module):
    """A layer with such a feed-forward."""

    def __init__(self, dim: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.attention, self.mlp = nn.MultiheadAttention(dim, heads, batch_first=True), KeepsGradientsOut(dim, 96)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.n1(x)
        x = x + self.attention(y, y, y)[0]
        return x + self.mlp(self.n2(x))


def test_a_part_that_gets_no_gradients_makes_no_equal_layer() -> None:
    assert verify(KeepsGradientsOut).verdict == "partial"
    report = verify(HoldsIt)
    assert report.verdict == "unchecked", str(report)
    assert "gradient" in report.reason


@pytest.mark.thorough
def test_what_is_added_to_the_wrong_stream_is_not_equal() -> None:
    report = verify(AddsToItsInput)
    assert report.verdict in ("deviates", "unchecked"), str(report)


class Block(nn.Module):
    """Attends to its own tokens, and to those that it is given, if any."""

    def __init__(self, dim: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.n1, self.n2, self.n3 = (nn.LayerNorm(dim) for _ in range(3))
        self.attn1, self.attn2 = (nn.MultiheadAttention(dim, heads, batch_first=True) for _ in range(2))
        self.up, self.down = nn.Linear(dim, 96), nn.Linear(96, dim)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        y = self.n1(x)
        x = self.attn1(y, y, y)[0] + x
        y = self.n2(x)
        x = (self.attn2(y, y, y)[0] if context is None else self.across(y, context)) + x
        return self.down(F.gelu(self.up(self.n3(x)))) + x

    def across(self, y: Tensor, context: Tensor) -> Tensor:
        return self.attn2(y, context, context)[0]


class Reversed(Block):
    """Reads what it is given backwards, and doubled."""

    def across(self, y: Tensor, context: Tensor) -> Tensor:
        return super().across(y, 2 * context.flip(-1))


class NeverReads(Block):
    """Attends to its own tokens all the same."""

    def across(self, y: Tensor, context: Tensor) -> Tensor:
        return super().across(y, y)


class Shares(Block):
    """Takes its self-attention for the other sequence too."""

    def across(self, y: Tensor, context: Tensor) -> Tensor:
        return self.attn1(y, context, context)[0]


def test_a_layer_is_compared_with_another_sequence_too() -> None:
    report = verify(Block)
    assert report.verdict == "equal", str(report)
    assert any(one.what == "context" and one.exercised for one in report.coverage)


@pytest.mark.parametrize("kind", [Reversed, NeverReads, Shares])
def test_what_is_wrong_with_another_sequence_alone_is_not_equal(kind: type[nn.Module]) -> None:
    assert verify(kind).verdict != "equal"


class Decodes(nn.Module):
    """A layer whose second residual connection is missing behind a dropout that all sublayers share."""

    def __init__(self, dim: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.own, self.cross = (nn.MultiheadAttention(dim, heads, batch_first=True) for _ in range(2))
        self.n1, self.n2, self.n3 = (nn.LayerNorm(dim) for _ in range(3))
        self.up, self.down, self.dropout = nn.Linear(dim, 96), nn.Linear(96, dim), nn.Dropout(0.1)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.n1(x + self.dropout(self.own(x, x, x)[0]))
        attended = self.cross(x, memory, memory)[0]
        x = self.n2(self.dropout(attended))
        return self.n3(x + self.dropout(self.down(torch.relu(self.up(x)))))


def test_a_residual_that_is_missing_behind_a_dropout_is_proven() -> None:
    report = verify(Decodes)
    assert report.mistakes == ("residual_missing",), str(report)
    assert report.findings[0].proof is not None
    line = report.findings[0].line
    assert line is not None
    assert "self.n2(self.dropout(attended))" in line.text


class ZeroesPadding(nn.Module):
    """Right: what stands at padded places is 0, so that nothing of it reaches the next layer."""

    def __init__(self, dim: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 96), nn.Linear(96, dim)

    def forward(self, x: Tensor, pad_mask: Tensor) -> Tensor:
        y = self.n1(x)
        x = x + self.attention(y, y, y, key_padding_mask=~pad_mask)[0]
        x = x + self.down(torch.relu(self.up(self.n2(x))))
        return x * pad_mask.unsqueeze(-1)


def test_padded_tokens_may_be_set_to_zero() -> None:
    assert verify(ZeroesPadding).verdict != "deviates"


class MayCross(nn.Module):
    """A block for an encoder, or with an option for a decoder, as speech models have it."""

    def __init__(self, width: int, heads: int, cross_attention: bool = False) -> None:
        super().__init__()
        self.attn, self.attn_ln = OfTwo(width, heads), nn.LayerNorm(width)
        self.cross_attn = OfTwo(width, heads) if cross_attention else None
        self.cross_attn_ln = nn.LayerNorm(width) if cross_attention else None
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp_ln = nn.LayerNorm(width)

    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.attn_ln(x), mask=mask)
        if self.cross_attn is not None and self.cross_attn_ln is not None:
            x = self.crossed(x, self.cross_attn(self.cross_attn_ln(x), xa))
        return x + self.mlp(self.mlp_ln(x))

    def crossed(self, x: Tensor, seen: Tensor) -> Tensor:
        return x + seen


class OfTwo(ThreeMatrices):
    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        keys = x if xa is None else xa
        q, k, v = self.projected(x, keys, keys)
        scores = self.scores(q, k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -torch.inf)
        return self.finish(scores.softmax(-1) @ v)


class LosesItsResidual(MayCross):
    def crossed(self, x: Tensor, seen: Tensor) -> Tensor:
        return seen


def test_a_block_that_an_option_makes_one_of_a_decoder_is_checked_as_both() -> None:
    assert verify(MayCross).verdict == "equal"
    report = verify(LosesItsResidual)
    assert (report.verdict, report.mistakes) == ("deviates", ("residual_missing",))
    assert "built with cross_attention=True" in report.findings[0].evidence


class AsksSecond(nn.Module):
    """Takes keys first, then queries, then values."""

    def __init__(self, d_model: int, nhead: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, nhead, batch_first=True)

    def forward(self, key: Tensor, query: Tensor, value: Tensor) -> Tensor:
        return self.attention(query, key, value)[0]


class AsksSecondLayer(nn.Module):
    """Attends to a memory with an attention whose queries are its second argument."""

    def __init__(self, d_model: int, nhead: int, d_ff: int) -> None:
        super().__init__()
        self.own_attn, self.memory_attn = AsksSecond(d_model, nhead), AsksSecond(d_model, nhead)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.norm1(x + self.own_attn(x, x, x))
        x = self.norm2(x + self.memory_attn(memory, x, memory))
        return cast(Tensor, self.norm3(x + self.ff(x)))


def test_an_attention_may_take_its_queries_behind_its_keys() -> None:
    assert verify(AsksSecondLayer).verdict == "equal"


class Translates(nn.Module):
    """Takes a mask of the source in which True marks a token, and may insist on its lengths."""

    def __init__(self, vocab_size: int, d_model: int, nhead: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocab_size, d_model), nn.Embedding(vocab_size, d_model)
        self.places = nn.Parameter(torch.randn(1, 64, d_model))
        self.transformer = nn.Transformer(d_model, nhead, 2, 2, 2 * d_model, batch_first=True)
        self.output = nn.Linear(d_model, vocab_size)

    def placed(self, x: Tensor) -> Tensor:
        return x + self.places[:, : x.size(1)]

    def forward(self, source: Tensor, source_valid_mask: Tensor, target: Tensor) -> Tensor:
        hidden = self.transformer(
            self.placed(self.source(source)),
            self.placed(self.target(target)),
            tgt_mask=target.new_ones(2 * [target.size(1)]).triu(1).bool(),
            src_key_padding_mask=~source_valid_mask,
            memory_key_padding_mask=self.of_the_memory(source_valid_mask),
        )
        return self.output(hidden)

    def of_the_memory(self, valid: Tensor) -> Tensor:
        return ~valid


class HidesTheMemory(Translates):
    def of_the_memory(self, valid: Tensor) -> Tensor:
        return valid


class OfTwoSamples(Translates):
    def of_the_memory(self, valid: Tensor) -> Tensor:
        assert len(valid) < 3, "no more than two samples"
        return ~valid


def test_a_mask_that_is_required_is_of_as_many_samples_as_the_tokens() -> None:
    assert verify(Translates).verdict == "equal"


def test_a_mask_that_hides_all_in_one_attention_is_never_equal() -> None:
    report = verify(HidesTheMemory)
    assert report.verdict == "unchecked", str(report)
    assert "source_valid_mask hides no token in any form that was tried" in " ".join(str(report).split())


def test_code_that_asserts_in_a_further_call_is_said_to() -> None:
    report = verify(OfTwoSamples)
    assert report.verdict == "unchecked", str(report)
    assert "it cannot be called again (AssertionError: no more than two samples" in " ".join(str(report).split())
