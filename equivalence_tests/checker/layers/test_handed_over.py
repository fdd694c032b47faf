"""verify on models that hand to their layers what the layers cannot make: angles, and a dtype to cast to."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.reach.state import retype
from equivalence_tests.checker.verify import verify


@dataclass(frozen=True)
class Settings:
    vocab_size: int = 29
    emb_dim: int = 30
    n_heads: int = 3
    context_length: int = 64
    dtype: torch.dtype = torch.float32


class Attention(nn.Module):
    """Causal, rotated in halves by angles that come in."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.n_heads = settings.n_heads
        self.qkv = nn.Linear(settings.emb_dim, 3 * settings.emb_dim, dtype=settings.dtype)
        self.out = nn.Linear(settings.emb_dim, settings.emb_dim, dtype=settings.dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k = (y * cos + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * sin for y in (q, k))
        hidden = x.new_ones(x.size(1), x.size(1)).triu(1).bool()
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(hidden, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.emb_dim
        self.attention = Attention(settings)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(settings.dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Casts to the dtype of its settings before the last matrix."""

    angles: Tensor

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.tokens = nn.Embedding(settings.vocab_size, settings.emb_dim, dtype=settings.dtype)
        self.blocks = nn.ModuleList([Block(settings)])
        self.norm = nn.LayerNorm(settings.emb_dim, dtype=settings.dtype)
        self.head = nn.Linear(settings.emb_dim, settings.vocab_size, dtype=settings.dtype)
        width = settings.emb_dim // settings.n_heads
        angles = torch.arange(settings.context_length)[:, None] / 100 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("angles", self.laid_out(angles), persistent=False)

    def laid_out(self, angles: Tensor) -> Tensor:
        return torch.cat([angles, angles], -1)

    def forward(self, ids: Tensor) -> Tensor:
        x, angles = self.tokens(ids), self.angles[: ids.size(1)]
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x).to(self.settings.dtype))


class OtherPairs(Model):
    """Wrong: angles of neighbours for pairs of halves."""

    def laid_out(self, angles: Tensor) -> Tensor:
        return angles.repeat_interleave(2, -1)


def right() -> Model:
    return Model(Settings())


def wrong() -> OtherPairs:
    return OtherPairs(Settings())


def test_a_model_that_casts_to_the_dtype_of_its_settings_runs() -> None:
    report = verify(right)
    assert (report.verdict, report.mistakes) == ("equal", ()), str(report)
    assert "the future is unseen" in str([check.name for check in report.checks])


def test_angles_that_a_model_hands_over_are_those_that_count() -> None:
    report = verify(wrong)
    assert report.mistakes == ("rotary_mixed",), str(report)


def test_what_a_module_casts_to_is_turned_in_a_copy() -> None:
    class Holder(nn.Module):
        held: Any
        table: Any
        own: Any

    module, settings, table = Holder(), Settings(), {"dtype": torch.bfloat16, "ids": torch.long}
    module.held, module.table, module.own = settings, table, torch.float16
    retype(module, torch.float64)
    assert (module.held.dtype, module.table, module.own) == (
        torch.float64,
        {"dtype": torch.float64, "ids": torch.long},
        torch.float64,
    )
    assert (settings.dtype, table["dtype"]) == (torch.float32, torch.bfloat16)


class Taught(nn.Module):
    """Runs on labels alone, and on its source with a mask whose name does not say whose it is."""

    def __init__(self, vocab_size: int = 29, d_model: int = 24) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, d_model), nn.Embedding(64, d_model)
        self.encoder = nn.TransformerEncoderLayer(d_model, 3, 40, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(d_model, 3, 40, batch_first=True)

    def embedded(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.places(torch.arange(ids.size(1)))

    def of_memory(self, padding: Tensor | None) -> Tensor | None:
        return padding

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            raise ValueError("labels are required")
        padding = None if attention_mask is None else attention_mask == 0
        memory = self.encoder(self.embedded(input_ids), src_key_padding_mask=padding)
        future = torch.ones(labels.size(1), labels.size(1), dtype=torch.bool).triu(1)
        decoded: Tensor = self.decoder(
            self.embedded(labels), memory, tgt_mask=future, memory_key_padding_mask=self.of_memory(padding)
        )
        return decoded


class ForgetsItsPadding(Taught):
    def of_memory(self, padding: Tensor | None) -> Tensor | None:
        return None


def test_a_model_that_wants_labels_is_run_on_some_and_its_mask_followed() -> None:
    right = verify(Taught, kind="layers")
    assert right.mistakes == (), str(right)
    assert "the whole model" not in [exercise.what for exercise in right.not_exercised]
    assert verify(ForgetsItsPadding, kind="layers").mistakes == ("model_mask_dropped",)


class ProjectsItsMemory(nn.Module):
    """Right: the keys and values of its cross-attention are of the memory behind a matrix."""

    def __init__(self, dim: int, context_dim: int, num_heads: int) -> None:
        super().__init__()
        self.context = nn.Linear(context_dim, dim)
        self.own, self.cross = (nn.MultiheadAttention(dim, num_heads, batch_first=True) for _ in range(2))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        memory, y = self.context(context), self.norm1(x)
        x = x + self.own(y, y, y)[0]
        x = x + self.cross(self.norm2(x), memory, self.values(memory, x))[0]
        return x + self.mlp(self.norm3(x))

    def values(self, memory: Tensor, x: Tensor) -> Tensor:
        return memory


class ValuesOfItsInput(ProjectsItsMemory):
    def values(self, memory: Tensor, x: Tensor) -> Tensor:
        return x


def test_a_memory_behind_a_matrix_is_a_memory() -> None:
    assert verify(ProjectsItsMemory).verdict == "equal", str(verify(ProjectsItsMemory))
    assert verify(ValuesOfItsInput).mistakes == ("cross_attention_from_decoder",)
