"""The rows of a table of positions are added in the order of the tokens."""

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.helpers_for_tests import changed, line_of
from equivalence_tests.checker.verify import verify


class Sentences(nn.Module):
    """Right: one vector for each place, whatever axes it gets."""

    def __init__(self, vocab_size: int, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, d_model), nn.Embedding(64, d_model)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(d_model, n_heads, 40, batch_first=True) for _ in "ab")
        self.norm = nn.LayerNorm(d_model)

    def laid_out(self, places: Tensor, batch: int) -> Tensor:
        return places[None].expand(batch, -1, -1)

    def forward(self, ids: Tensor) -> Tensor:
        places = self.places(torch.arange(ids.size(1), device=ids.device))
        x = self.tokens(ids) + self.laid_out(places, len(ids))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Rolled(Sentences):
    def laid_out(self, places: Tensor, batch: int) -> Tensor:
        return places.roll(1, 0)


class Backwards(Sentences):
    def laid_out(self, places: Tensor, batch: int) -> Tensor:
        return super().laid_out(places.flip(0), batch)


def test_a_table_that_is_repeated_for_each_sample_is_right() -> None:
    assert verify(Sentences).verdict == "equal"


@pytest.mark.parametrize("model", [Rolled, Backwards])
def test_rows_that_change_places_are_found(model: type[nn.Module]) -> None:
    (finding,) = verify(model).findings
    assert finding.is_proven
    assert "laid_out" in line_of(finding) or "places" in line_of(finding)


class KeepsAPlainTable(Sentences):
    """Its sinusoids are neither a parameter nor a buffer."""

    first = 0

    def __init__(self, vocab_size: int, d_model: int, n_heads: int) -> None:
        super().__init__(vocab_size, d_model, n_heads)
        del self.places
        angles = torch.arange(64.0)[:, None] * 10000 ** (-torch.arange(0, d_model, 2) / d_model)
        self.position_embeddings = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, :d_model]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.position_embeddings[self.first : self.first + ids.size(1)].to(ids.device)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class KeepsATensorAndThenAPair(KeepsAPlainTable):
    """What it kept last is no buffer: a call assigns two tensors to it."""

    def __init__(self, vocab_size: int, d_model: int, n_heads: int) -> None:
        super().__init__(vocab_size, d_model, n_heads)
        self.last: object = torch.zeros(1)

    def forward(self, ids: Tensor) -> Tensor:
        self.last = (ids, ids)
        return super().forward(ids)


def test_an_attribute_that_a_call_assigns_anew_stays_one() -> None:
    assert verify(KeepsATensorAndThenAPair).verdict == "equal"
    model = KeepsAPlainTable(20, 12, 3)
    verify(model, (torch.randint(20, (2, 5)),))
    assert "position_embeddings" in vars(model)


def test_a_table_that_is_a_plain_attribute_is_known_by_its_name() -> None:
    assert verify(KeepsAPlainTable).verdict == "equal"
    report = verify(changed(KeepsAPlainTable, first=1))
    assert report.verdict == "unchecked"
    assert "position_embeddings" in report.reason


class OfSegments(Sentences):
    """Right: a vector for the segment that a token is of, as BERT adds."""

    def __init__(self, vocab_size: int, d_model: int, n_heads: int) -> None:
        super().__init__(vocab_size, d_model, n_heads)
        self.segments = nn.Embedding(2, d_model)

    def forward(self, ids: Tensor, token_type_ids: Tensor) -> Tensor:  # type: ignore[override]
        places = self.places(torch.arange(ids.size(1), device=ids.device))
        x = self.tokens(ids) + self.laid_out(places, len(ids)) + self.segments(self.known(token_type_ids))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def known(self, ids: Tensor) -> Tensor:
        return ids


class ForgetsSegments(OfSegments):
    def known(self, ids: Tensor) -> Tensor:
        return torch.zeros_like(ids)


def test_segments_that_are_all_the_first_take_part() -> None:
    assert verify(OfSegments).verdict == "equal", str(verify(OfSegments))
    assert [one.what for one in verify(ForgetsSegments).not_exercised] == ["token_type_ids"]
