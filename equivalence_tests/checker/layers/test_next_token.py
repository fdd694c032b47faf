"""Models of tokens: which of them predict the next one, and may not read it; and masks that other code makes."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests import verify
from equivalence_tests.checker.layers.masks import read_masks
from equivalence_tests.checker.layers.models import SEES_ALL
from equivalence_tests.checker.reach.arguments import Sizes
from equivalence_tests.checker.reach.model_calls import run_model
from equivalence_tests.checker.zoo import layers
from equivalence_tests.checker.zoo.stages import OneMatrix, ThreeMatrices


class Reads(nn.Module):
    """One layer that reads every token, and logits."""

    def __init__(self, vocab_size: int, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab_size, d_model), nn.Embedding(16, d_model)
        self.layer = nn.TransformerEncoderLayer(d_model, n_heads, 2 * d_model, batch_first=True)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.read(ids))

    def read(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """The stage that others replace."""
        embedded = self.embedding(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        return self.layer(embedded, src_mask=mask)


class SentenceModel(Reads):
    """Right: nothing says that it predicts the next token."""


class MaskedLanguageModel(Reads):
    """Right: what is masked is predicted from both sides."""


class FillsInModel(Reads):
    """Right: it generates all tokens at once."""

    def generate(self, length: int) -> Tensor:
        ids = torch.zeros(1, length, dtype=torch.long)
        return torch.where(ids == 0, self(ids).argmax(-1), ids)


class SASRecOfItems(Reads):
    """Recommends the item that comes next."""


class LlamaModel(Reads):
    pass


class AppendsModel(Reads):
    def generate(self, ids: Tensor, count: int) -> Tensor:
        for _ in range(count):
            ids = torch.cat([ids, self(ids)[:, -1].argmax(-1, keepdim=True)], 1)
        return ids


class LastLogitsModel(AppendsModel):
    """What comes back is of the last token alone."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.read(ids)[:, [-1]])


class ShiftsModel(Reads):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        logits = super().forward(ids)
        if labels is None:
            return logits, None
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class ForgetsItsMaskModel(AppendsModel):
    """It takes a mask, and hands none over where it generates."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.read(ids, mask))


class LeftToCallersGPT(Reads):
    """Right, and said: whoever calls it hands a mask over."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.read(ids, mask))


@pytest.mark.parametrize(
    ("model", "notes"), [(SentenceModel, [SEES_ALL]), (MaskedLanguageModel, []), (FillsInModel, [SEES_ALL])]
)
def test_a_model_that_predicts_no_next_token_may_read_it(model: type[nn.Module], notes: list[str]) -> None:
    report = verify(model)
    assert (report.verdict, report.notes) == ("equal", notes), str(report)


class ShiftsWhatItMustBeGiven(Reads):
    """Right: it hides later tokens, and makes a loss where it is given what is predicted, and not None."""

    def forward(self, ids: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        logits = self.head(self.read(ids, ids.new_ones(ids.size(1), ids.size(1)).triu(1).bool()))
        if y is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


def test_what_a_loss_is_made_of_is_left_out_where_it_may_be_none() -> None:
    assert verify(ShiftsWhatItMustBeGiven).verdict == "equal"


@pytest.mark.parametrize(
    "model", [LlamaModel, SASRecOfItems, AppendsModel, LastLogitsModel, ShiftsModel, ForgetsItsMaskModel]
)
def test_a_model_that_predicts_the_next_token_may_not_read_it(model: type[nn.Module]) -> None:
    report = verify(model)
    assert report.mistakes == ("future_is_seen",), str(report)
    assert any(note.startswith("it predicts the next token: ") for note in report.notes)


def test_a_causal_mask_that_is_left_to_the_caller_is_said() -> None:
    report = verify(LeftToCallersGPT)
    assert report.findings == [], str(report)
    assert any("only mask hides later tokens" in note for note in report.notes), report.notes


class TranslatingTransformer(nn.Module):
    """Right: both masks are made by other code, and have to be given."""

    def __init__(self, vocab_size: int, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab_size, d_model), nn.Embedding(16, d_model)
        self.encoder, self.own, self.cross = (Attends(d_model, n_heads) for _ in range(3))

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        memory, x = (self.embedding(ids) + self.positions(torch.arange(ids.size(1))) for ids in (src, tgt))
        memory = memory + self.encoder(memory, memory, src_mask)
        x = x + self.own(x, x, tgt_mask)
        return F.linear(x + self.cross(x, memory, src_mask), self.embedding.weight)


class Attends(ThreeMatrices):
    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.projected(x, memory, memory)
        return self.finish(self.scores(q, k).masked_fill(mask == 0, -1e9).softmax(-1) @ v)


def test_a_mask_is_given_in_a_form_that_other_lengths_have_too() -> None:
    module = TranslatingTransformer(11, 12, 3).double().eval()
    run = run_model(module, Sizes(), [], [])
    assert run is not None
    patterns = {mask.name: mask.form.pattern for mask in read_masks(module, run).masks if mask.form is not None}
    assert patterns["src_mask"] == "keys", patterns  # it hides keys from both sequences


class CausalAttention(OneMatrix):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attn = CausalAttention(d_model, n_heads)
        self.mlp = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.ReLU(), nn.Linear(2 * d_model, d_model))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class NormedGPT(nn.Module):
    """Hides later tokens with the option of torch's function."""

    def __init__(self, vocab_size: int, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab_size, d_model), nn.Embedding(16, d_model)
        self.block, self.norm = Block(d_model, n_heads), nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.block(self.embedding(ids) + self.positions(torch.arange(ids.size(1))))
        return self.head(self.last(x))

    def last(self, x: Tensor) -> Tensor:
        return self.norm(x)


class ForgetsItsNormGPT(NormedGPT):
    def last(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(("model", "names"), [(NormedGPT, ()), (ForgetsItsNormGPT, ("part_never_used",))])
def test_a_norm_that_nothing_uses_is_seen_where_torch_hides_later_tokens(
    model: type[nn.Module], names: tuple[str, ...]
) -> None:
    assert verify(model).mistakes == names


class OfPlacesBeside(nn.Module):
    """Right: takes the places of its tokens beside them, cuts the last target off, and scales its logits."""

    def __init__(self, vocab_size: int, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab_size, d_model), nn.Embedding(64, d_model)
        self.transformer = nn.Transformer(d_model, n_heads, 2, 2, 2 * d_model, batch_first=True)
        self.logits = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, src: Tensor, src_pos: Tensor, tgt: Tensor, tgt_pos: Tensor) -> Tensor:
        tgt, tgt_pos = tgt[:, :-1], tgt_pos[:, :-1]
        read, written = self.words(src) + self.places(src_pos), self.words(tgt) + self.places(tgt_pos)
        x = self.transformer(read, written, tgt_mask=self.future(tgt.size(1)))
        logits: Tensor = self.logits(x) * x.size(-1) ** -0.5
        return logits.flatten(0, 1)

    def future(self, length: int) -> Tensor | None:
        return self.logits.weight.new_ones(length, length).triu(1).bool()


class SeesTheFutureBeside(OfPlacesBeside):
    def future(self, length: int) -> Tensor | None:
        return None


def test_places_may_stand_beside_tokens_whose_last_is_cut_off() -> None:
    report = verify(OfPlacesBeside)
    assert report.verdict == "equal", str(report)
    assert "the root of the width divides it" in " ".join(str(report).split())
    assert verify(SeesTheFutureBeside).mistakes == ("future_is_seen",)


class GivesALossToo(Reads):
    """Right: with targets it gives all logits and a loss, without them the logits of the last token."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        logits = self.head(self.read(ids, self.hidden(ids, targets)))
        if targets is None:
            return logits[:, -1:], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def hidden(self, ids: Tensor, targets: Tensor | None) -> Tensor | None:
        return ids.new_ones(ids.size(1), ids.size(1)).triu(1).bool()


class SeesTheFutureWithTargets(GivesALossToo):
    def hidden(self, ids: Tensor, targets: Tensor | None) -> Tensor | None:
        return None if targets is not None else super().hidden(ids, targets)


def test_labels_change_nothing_but_the_loss() -> None:
    right = verify(GivesALossToo)
    assert right.verdict == "equal", str(right)
    (wrong,) = verify(SeesTheFutureWithTargets).findings
    assert (wrong.name, wrong.stack[-1].text) == ("labels_change_outputs", "if targets is None:")


class MakesItsMasks(layers.TranslationModel):
    """Wrong: the mask of the target that it makes where none is passed hides padding alone."""

    layers = 1

    def __init__(self, vocab_size: int, d_model: int, n_heads: int, d_ff: int, max_len: int) -> None:
        super().__init__(vocab_size, d_model, n_heads, d_ff, max_len)
        self.heads = n_heads

    def forward(self, src: Tensor, tgt: Tensor, tgt_mask: Tensor | None = None) -> Tensor:
        if tgt_mask is None:
            tgt_mask = self.made(tgt)
        memory, x = self.encode(self.embed(src)), self.embed(tgt)
        for layer in self.decoder_layers:
            x = layer(x, memory, tgt_mask=tgt_mask)
        return self.head(self.last_norm(x))

    def made(self, tgt: Tensor) -> Tensor:
        hidden = (tgt == 0)[:, None].expand(-1, tgt.size(1), -1)
        return hidden.repeat_interleave(self.heads, 0)


class MakesACausalMask(MakesItsMasks):
    def made(self, tgt: Tensor) -> Tensor:
        return super().made(tgt) | (self.future(tgt.size(1)) == 1)


class LeavesItToItsCallers(MakesItsMasks):
    def forward(self, src: Tensor, tgt: Tensor, tgt_mask: Tensor | None = None) -> Tensor:
        memory, x = self.encode(self.embed(src)), self.embed(tgt)
        for layer in self.decoder_layers:
            x = layer(x, memory, tgt_mask=tgt_mask)
        return self.head(self.last_norm(x))


def test_a_mask_that_a_model_makes_where_none_is_passed_has_to_hide_the_future() -> None:
    (finding,) = verify(MakesItsMasks).findings
    assert (finding.name, finding.where) == ("future_is_seen", "decoder_layers.0.self_attn")
    assert verify(MakesACausalMask).findings == []
    report = verify(LeavesItToItsCallers)
    assert report.verdict == "equal", str(report)
    assert "only tgt_mask hides later tokens, if it is passed" in report.notes
