"""The token-level models of both packages, against plain torch.nn, each other, and their own promises."""

import copy
import inspect
import io
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.jit._trace import TracerWarning
from torch.nn import functional as F

import builtin
import scratch
from equivalence_tests.instruments.side_by_side import PACKAGES, assert_close, fast_path
from equivalence_tests.instruments.weights import randomize_parameters
from equivalence_tests.twins.test_decoding import (
    PIECES,
    Language,
    say_everything,
    slow_beam_search,
    slow_greedy,
    spans,
    strip,
)
from scratch.decoding import new_cache
from scratch.positional import sinusoidal_encoding

PAD, START, END = 0, 1, 2
SRC_VOCAB, TGT_VOCAB, MAX_LEN = 11, 7, 23
# An even number of heads, so that torch.nn may take its fast path.
SIZES: dict[str, Any] = {
    "d_model": 20,
    "nhead": 4,
    "num_encoder_layers": 2,
    "num_decoder_layers": 3,
    "dim_feedforward": 13,
    "max_len": MAX_LEN,
    "dtype": torch.float64,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm-first-no-bias": {"norm_first": True, "bias": False},
    "concatenated-unscaled": {"positional": "concatenated", "scale_embeddings": False},
    "tied": {"tie_weights": True, "activation": "gelu"},
    "odd": {"nhead": 3, "d_model": 33, "layer_norm_eps": 1e-3, "norm_first": True},
    "other-ids": {"pad_id": 4, "start_id": 0, "end_id": 0},
}
HEAD_SIZES: dict[str, Any] = {"qk_head_dim": 3, "v_head_dim": 7}

packages = pytest.mark.parametrize("package", PACKAGES)
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
Model = Any  # the Seq2SeqTransformer of either package


def build(package: str, seed: int = 0, **arguments: Any) -> Model:
    """Build a small model with random parameters, without dropout unless it is given."""
    model = PACKAGES[package].Seq2SeqTransformer(SRC_VOCAB, TGT_VOCAB, **{**SIZES, "dropout": 0.0, **arguments})
    return randomize_parameters(model, seed=seed)


def twins(seed: int = 0, **arguments: Any) -> tuple[Model, Model]:
    ours, theirs = (build(package, seed, **arguments) for package in ("scratch", "builtin"))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return ours, theirs


def draw_ids(model: Model, batch: int, length: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Draw ids that are no padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size - 1, (batch, length), generator=generator)
    return ids + (ids >= model.pad_id)


def draw_source(model: Model, batch: int = 5, length: int = 7, seed: int = 0) -> Tensor:
    """Draw a source with no padding, with some at the end, with holes, with padding in front, and with nothing else."""
    ids = draw_ids(model, batch, length, SRC_VOCAB, seed)
    for row, padded in enumerate(([], range(length - 3, length), [1, length - 1], [0], range(length))):
        if row < batch:
            ids[row, list(padded)] = model.pad_id
    return ids


def draw_target(model: Model, batch: int = 5, length: int = 6, seed: int = 1) -> Tensor:
    """Draw a target likewise, in another order of the rows."""
    ids = draw_ids(model, batch, length, TGT_VOCAB, seed)
    for row, padded in enumerate(([0, 1], range(length), [], range(length - 3, length), [2, 4])):
        if row < batch:
            ids[row, list(padded)] = model.pad_id
    return ids


def gradients(model: Model, src_ids: Tensor, tgt_ids: Tensor) -> dict[str, Tensor]:
    """Differentiate the usual loss, the cross-entropy of the next tokens without padding."""
    model.zero_grad()
    logits = model(src_ids, tgt_ids[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tgt_ids[:, 1:].flatten(), ignore_index=model.pad_id).backward()
    return {name: x.grad for name, x in model.named_parameters()}


def assert_same_gradients(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    largest = max(float(x.abs().max()) for x in expected.values())  # the key biases have none but rounding noise
    for name, x in expected.items():
        assert_close(actual[name], x, name=name, largest=largest)


def on_plain_torch(model: Model, src_ids: Tensor, tgt_ids: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Compute the logits the way that guides to ``nn.Transformer`` do."""
    arguments = {**SIZES, "dropout": 0.0, **settings}
    weights, d_model = model.state_dict(), arguments["d_model"]
    theirs = {name: x for name, x in arguments.items() if name in inspect.signature(nn.Transformer).parameters}
    encoder_decoder = nn.Transformer(batch_first=True, **theirs)
    encoder_decoder.load_state_dict({x.removeprefix("transformer."): weights[x] for x in weights if "former." in x})
    table = sinusoidal_encoding(MAX_LEN, d_model, arguments.get("positional", "interleaved"), dtype=torch.float64)
    scale = d_model**0.5 if arguments.get("scale_embeddings", True) else 1.0
    src = weights["src_embedding.weight"][src_ids] * scale + table[: src_ids.size(1)]
    tgt = weights["tgt_embedding.weight"][tgt_ids] * scale + table[: tgt_ids.size(1)]
    pad_id = arguments.get("pad_id", PAD)
    output = encoder_decoder(
        src,
        tgt,
        tgt_mask=torch.ones(tgt_ids.size(1), tgt_ids.size(1), dtype=torch.bool).triu(1),
        src_key_padding_mask=src_ids == pad_id,
        tgt_key_padding_mask=tgt_ids == pad_id,
        memory_key_padding_mask=src_ids == pad_id,
    )
    return output @ weights["projection.weight"].T


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@packages
@options
def test_logits_are_those_of_a_model_put_together_from_torch(package: str, options: dict[str, Any]) -> None:
    model = build(package, **options)
    src_ids, tgt_ids = draw_source(model), draw_target(model)
    assert_close(model(src_ids, tgt_ids), on_plain_torch(model, src_ids, tgt_ids, options))


class TestTwins:
    @options
    def test_logits_and_gradients_agree(self, options: dict[str, Any]) -> None:
        ours, theirs = twins(**options)
        src_ids, tgt_ids = draw_source(ours), draw_target(ours)
        assert_close(ours(src_ids, tgt_ids), theirs(src_ids, tgt_ids))
        assert_same_gradients(gradients(ours, src_ids, tgt_ids), gradients(theirs, src_ids, tgt_ids))

    @options
    def test_the_same_seed_drops_the_same(self, options: dict[str, Any]) -> None:
        ours, theirs = twins(**options, dropout=0.4)
        src_ids, tgt_ids = draw_source(ours), draw_target(ours)
        torch.manual_seed(3)
        expected = gradients(theirs, src_ids, tgt_ids)
        torch.manual_seed(3)
        assert_same_gradients(gradients(ours, src_ids, tgt_ids), expected)
        other = gradients(ours, src_ids, tgt_ids)["src_embedding.weight"]
        assert not torch.equal(other, expected["src_embedding.weight"])

    @pytest.mark.parametrize("fast", [True, False], ids=["fast-path", "plain-path"])
    @options
    def test_every_place_agrees_in_eval_without_gradients_too(self, fast: bool, options: dict[str, Any]) -> None:
        ours, theirs = (model.eval() for model in twins(**options))
        src_ids, tgt_ids = draw_source(ours), draw_target(ours)
        with torch.no_grad(), fast_path(fast):
            assert_close(theirs.encode(src_ids), ours.encode(src_ids))
            assert_close(theirs(src_ids, tgt_ids), ours(src_ids, tgt_ids))
            left_aligned = src_ids[:2]
            assert_close(theirs(left_aligned, tgt_ids[:2]), ours(left_aligned, tgt_ids[:2]))

    @options
    def test_the_same_seed_gives_the_same_model(self, options: dict[str, Any]) -> None:
        models, states = [], []
        for package in PACKAGES.values():
            torch.manual_seed(5)
            models.append(package.Seq2SeqTransformer(SRC_VOCAB, TGT_VOCAB, **{**SIZES, **options}))
            states.append(torch.get_rng_state())
        assert torch.equal(*states)
        ours, theirs = (model.state_dict() for model in models)
        assert list(ours) == list(theirs)
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []

    def test_parts_have_the_agreed_names(self) -> None:
        for package, parts in PACKAGES.items():
            model = build(package)
            assert [name for name, _ in model.named_children()] == [
                "src_embedding",
                "tgt_embedding",
                "positional_encoding",
                "transformer",
                "projection",
            ]
            assert type(model.transformer) is parts.Transformer
            assert type(model.transformer.encoder) is parts.TransformerEncoder
            assert type(model.transformer.encoder.layers[0]) is parts.TransformerEncoderLayer
            assert model.projection.bias is None
            assert (model.pad_id, model.start_id, model.end_id) == (PAD, START, END)


@packages
@options
class TestPadding:
    def test_what_padding_is_embedded_as_reaches_no_logit_of_a_valid_place(
        self, package: str, options: dict[str, Any]
    ) -> None:
        model = build(package, **options)
        src_ids, tgt_ids = draw_source(model), draw_target(model)
        other = copy.deepcopy(model)
        if options.get("tie_weights"):
            other.projection.weight = nn.Parameter(model.projection.weight.detach().clone())
        with torch.no_grad():
            other.src_embedding.weight[model.pad_id] += 3.0
            other.tgt_embedding.weight[model.pad_id] -= 3.0
        valid = tgt_ids != model.pad_id
        for train in (True, False):
            with torch.set_grad_enabled(train):
                before, after = (x.train(train)(src_ids, tgt_ids)[valid] for x in (model, other))
            assert_close(after, before)

    def test_more_of_it_changes_nothing(self, package: str, options: dict[str, Any]) -> None:
        model = build(package, **options)
        src_ids, tgt_ids = draw_source(model), draw_target(model)
        longer_src, longer_tgt = (F.pad(x, (0, 3), value=model.pad_id) for x in (src_ids, tgt_ids))
        for train in (True, False):
            with torch.set_grad_enabled(train):
                expected = model.train(train)(src_ids, tgt_ids)
                actual = model(longer_src, longer_tgt)[:, : tgt_ids.size(1)]
            valid = tgt_ids != model.pad_id
            assert_close(actual[valid], expected[valid])

    @pytest.mark.parametrize("fast", [True, False], ids=["fast-path", "plain-path"])
    def test_no_place_is_ever_nan(self, package: str, options: dict[str, Any], fast: bool) -> None:
        model = build(package, **options)
        src_ids, tgt_ids = draw_source(model), draw_target(model)
        for train, grad in ((True, True), (False, True), (False, False)):
            with fast_path(fast), torch.set_grad_enabled(grad):
                assert model.train(train)(src_ids, tgt_ids).isfinite().all()
        assert all(x.isfinite().all() for x in gradients(model, src_ids, tgt_ids).values())

    def test_padded_places_of_the_memory_are_zero(self, package: str, options: dict[str, Any]) -> None:
        model = build(package, **options).eval()
        src_ids = draw_source(model)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                memory = model.encode(src_ids)
            assert torch.equal((memory == 0).all(dim=-1), src_ids == model.pad_id)


@packages
class TestIndependence:
    @options
    def test_later_target_tokens_leave_earlier_logits_alone(self, package: str, options: dict[str, Any]) -> None:
        model = build(package, **options)
        src_ids, tgt_ids = draw_source(model), draw_ids(model, 5, 6, TGT_VOCAB)
        other = torch.cat([tgt_ids[:, :4], draw_ids(model, 5, 2, TGT_VOCAB, seed=8)], dim=1)
        before, after = model(src_ids, tgt_ids), model(src_ids, other)
        assert_close(after[:, :4], before[:, :4])
        assert not torch.allclose(after[:, 4:], before[:, 4:])

    @options
    def test_rows_do_not_influence_one_another(self, package: str, options: dict[str, Any]) -> None:
        model = build(package, **options).eval()
        src_ids, tgt_ids = draw_source(model), draw_target(model)
        logits, twice = model(src_ids, tgt_ids), model(src_ids.repeat(2, 1), tgt_ids.repeat(2, 1))
        assert_close(twice, logits.repeat(2, 1, 1))
        for row in range(5):
            assert_close(model(src_ids[row : row + 1], tgt_ids[row : row + 1])[0], logits[row])

    def test_every_source_token_and_its_place_count(self, package: str) -> None:
        model = build(package)
        src_ids, tgt_ids = draw_ids(model, 1, 5, SRC_VOCAB), draw_ids(model, 1, 3, TGT_VOCAB)
        logits = model(src_ids, tgt_ids)
        for place in range(5):
            other = src_ids.clone()
            other[0, place] = 1 + other[0, place] % (SRC_VOCAB - 1)
            assert not torch.allclose(model(other, tgt_ids), logits)
        assert not torch.allclose(model(src_ids.roll(1, dims=1), tgt_ids), logits)

    @pytest.mark.parametrize("lengths", [(1, 1), (1, 3), (3, 1)], ids=str)
    def test_one_is_a_length_and_a_batch_too(self, package: str, lengths: tuple[int, int]) -> None:
        model, (src_len, tgt_len) = build(package), lengths
        src_ids, tgt_ids = draw_ids(model, 1, src_len, SRC_VOCAB), draw_ids(model, 1, tgt_len, TGT_VOCAB)
        logits = model(src_ids, tgt_ids)
        assert logits.shape == (1, tgt_len, TGT_VOCAB)
        assert logits.isfinite().all()


class TestCache:
    @pytest.mark.parametrize("pieces", PIECES, ids=str)
    @pytest.mark.parametrize("options", [*OPTIONS.values(), HEAD_SIZES], ids=[*OPTIONS, "head-sizes"])
    def test_pieces_give_what_the_whole_gives(self, pieces: tuple[int, ...], options: dict[str, Any]) -> None:
        model = build("scratch", **options)
        src_ids, tgt_ids = draw_source(model), draw_target(model, length=7)
        memory, cache = model.encode(src_ids), new_cache(3)
        expected = model(src_ids, tgt_ids)
        for part in spans(pieces):
            actual = model.decode(tgt_ids[:, : part.stop], memory, src_ids, cache=cache)
            assert_close(actual, expected[:, part])

    @settings(deadline=None, max_examples=30)
    @given(data=st.data(), seed=st.integers(0, 2**31), norm_first=st.booleans(), bias=st.booleans())
    def test_any_lengths_padding_and_pieces(self, data: st.DataObject, seed: int, norm_first: bool, bias: bool) -> None:
        model = build("scratch", seed, norm_first=norm_first, bias=bias)
        batch, src_len, tgt_len = (data.draw(st.integers(1, most)) for most in (4, 9, 9))
        generator = torch.Generator().manual_seed(seed)
        src_ids = torch.randint(SRC_VOCAB, (batch, src_len), generator=generator)
        tgt_ids = torch.randint(TGT_VOCAB, (batch, tgt_len), generator=generator)
        ends = sorted({*data.draw(st.sets(st.integers(1, tgt_len))), tgt_len})
        memory, cache = model.encode(src_ids), new_cache(3)
        steps = [model.decode(tgt_ids[:, :end], memory, src_ids, cache=cache) for end in ends]
        assert_close(torch.cat(steps, dim=1), model(src_ids, tgt_ids))

    def test_a_target_without_new_tokens_is_refused(self) -> None:
        model = build("scratch")
        src_ids, tgt_ids = draw_source(model), draw_target(model)
        memory, cache = model.encode(src_ids), new_cache(3)
        model.decode(tgt_ids, memory, src_ids, cache=cache)
        text = r"tgt_ids must hold the whole target so far, the 6 tokens of the cache .* got shape \(5, 1\)"
        with pytest.raises(ValueError, match=text):
            model.decode(tgt_ids[:, -1:], memory, src_ids, cache=cache)
        with pytest.raises(ValueError, match=r"the 6 tokens of the cache .* got shape \(5, 6\)"):
            model.decode(tgt_ids, memory, src_ids, cache=cache)
        with pytest.raises(ValueError, match="cache must have one entry for each of 3 layers, got 0"):
            model.decode(tgt_ids, memory, src_ids, cache=[])
        with pytest.raises(ValueError, match="cache must have one entry for each of 3 layers, got 2"):
            model.decode(tgt_ids, memory, src_ids, cache=new_cache(2))

    def test_one_layer_has_one(self) -> None:
        model = build("scratch", num_decoder_layers=1)
        src_ids, tgt_ids = draw_source(model), draw_target(model)
        actual = model.decode(tgt_ids, model.encode(src_ids), src_ids, cache=new_cache(1))
        assert_close(actual, model(src_ids, tgt_ids))

    def test_builtin_refuses_it_with_the_reason(self) -> None:
        model = build("builtin")
        src_ids, tgt_ids = draw_source(model), draw_target(model)
        with pytest.raises(ValueError, match=r"cache cannot be used with torch\.nn: its attention projects all keys"):
            model.decode(tgt_ids, model.encode(src_ids), src_ids, cache=new_cache(3))


class Spoken(Language):
    """What a model says next to one source, computed anew for every beginning."""

    def __init__(self, model: Model, src_ids: Tensor) -> None:
        self.model, self.src_ids = model, src_ids

    @torch.no_grad()
    def logits(self, said: tuple[int, ...]) -> Tensor:
        logits: Tensor = self.model(self.src_ids.unsqueeze(0), torch.tensor([said]))[0, -1]
        return logits


@packages
class TestGenerate:
    @pytest.mark.parametrize("seed", range(6))
    def test_greedy_tokens_are_the_likeliest_of_the_whole_model(self, package: str, seed: int) -> None:
        model = build(package, seed).eval()
        src_ids = draw_source(model, seed=seed)
        result = model.generate(src_ids, max_len=9)
        for source, row in zip(src_ids, result, strict=True):
            assert strip(row) == slow_greedy(Spoken(model, source), (START,), 9)

    @settings(deadline=None, max_examples=8)
    @given(seed=st.integers(0, 2**31), beam_size=st.integers(2, 4), length_penalty=st.sampled_from([0.0, 0.6, 2.0]))
    def test_beams_are_those_of_the_slow_search(
        self, package: str, seed: int, beam_size: int, length_penalty: float
    ) -> None:
        model = build(package, seed, num_encoder_layers=1, num_decoder_layers=2).eval()
        src_ids = draw_source(model, batch=3, seed=seed)
        result = model.generate(src_ids, max_len=5, beam_size=beam_size, length_penalty=length_penalty)
        for source, row in zip(src_ids, result, strict=True):
            expected = slow_beam_search(Spoken(model, source), (START,), beam_size, 5, length_penalty)
            assert strip(row) == expected.tokens

    def test_a_beam_that_holds_everything_finds_the_best_of_all(self, package: str) -> None:
        model = build(package, 4).eval()
        src_ids = draw_source(model, batch=2)
        everything = [say_everything(Spoken(model, source), (START,), 3) for source in src_ids]
        for length_penalty in (0.0, 1.5):
            result = model.generate(src_ids, 3, beam_size=len(everything[0]), length_penalty=length_penalty)
            for said, row in zip(everything, result, strict=True):
                assert strip(row) == max(said, key=lambda x: x.score(length_penalty)).tokens

    @pytest.mark.parametrize("beam_size", [1, 3])
    def test_a_batch_gives_what_its_rows_give(self, package: str, beam_size: int) -> None:
        model = build(package, 2).eval()
        src_ids = draw_source(model)
        together = model.generate(src_ids, 8, beam_size)
        alone = [model.generate(row.unsqueeze(0), 8, beam_size) for row in src_ids]
        assert [strip(row) for row in together] == [strip(row[0]) for row in alone]
        assert together.size(1) == max(row.size(1) for row in alone)
        assert torch.equal(model.generate(src_ids.repeat(2, 1), 8, beam_size), together.repeat(2, 1))

    def test_other_special_tokens_are_kept_to(self, package: str) -> None:
        seen = set()
        for seed in range(8):
            model = build(package, seed, pad_id=6, start_id=3, end_id=5).eval()
            result = model.generate(draw_source(model, seed=seed), max_len=7)
            for row in result.tolist():
                ended = 5 in row
                seen.add(ended)
                assert set(row[row.index(5) + 1 :] if ended else []) <= {6}
                assert ended or (6 not in row and len(row) == 7)
        assert seen == {True, False}

    @pytest.mark.parametrize("beam_size", [1, 3])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
    def test_ids_come_back_as_they_went_in(self, package: str, beam_size: int, dtype: torch.dtype) -> None:
        model = build(package)
        src_ids = draw_source(model).to(dtype)
        found = model.generate(src_ids, 4, beam_size)
        assert found.dtype == dtype
        assert not found.is_inference()  # or it could not be changed in place
        assert model.training

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("beam_size", [1, 2])
    def test_lower_precision_generates_too(self, package: str, beam_size: int, dtype: torch.dtype) -> None:
        model = build(package).eval().to(dtype)
        result = model.generate(draw_source(model), max_len=6, beam_size=beam_size)
        assert result.size(0) == 5
        assert result.size(1) <= 6

    def test_the_last_position_is_used(self, package: str) -> None:
        model = build(package, max_len=4).eval()
        with torch.no_grad():
            model.projection.weight[END] = 0.0
            model.transformer.decoder.norm.weight.zero_()
            model.transformer.decoder.norm.bias.copy_(model.projection.weight[5])  # whatever comes, 5 comes next
        assert model.generate(draw_source(model, length=4), max_len=4).tolist() == [[5] * 4] * 5


@pytest.mark.sampled(3)
@pytest.mark.parametrize("beam_size", [1, 2, 4])
@options
def test_both_packages_generate_the_same(beam_size: int, options: dict[str, Any]) -> None:
    lengths = set()
    for seed in range(4):
        ours, theirs = (model.eval() for model in twins(seed, **options))
        src_ids = draw_source(ours, seed=seed)
        expected = theirs.generate(src_ids, max_len=12, beam_size=beam_size)
        assert torch.equal(ours.generate(src_ids, max_len=12, beam_size=beam_size), expected)
        lengths |= {len([x for x in row if x != ours.pad_id]) for row in expected.tolist()}
    assert len(lengths) > 1


@packages
class TestStorage:
    @options
    def test_copies_and_files_give_the_same_logits(self, package: str, options: dict[str, Any], tmp_path: Path) -> None:
        model = build(package, **options)
        src_ids, tgt_ids = draw_source(model), draw_target(model)
        torch.save(model.state_dict(), tmp_path / "state.pt")
        loaded = build(package, 1, **options)
        loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), strict=True)
        whole = io.BytesIO()
        torch.save(model, whole)
        whole.seek(0)
        copies = [
            loaded,
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(whole, weights_only=False),
        ]
        expected = model(src_ids, tgt_ids)
        for twin in copies:
            assert torch.equal(twin(src_ids, tgt_ids), expected)
            tied = twin.projection.weight is twin.tgt_embedding.weight
            assert tied == options.get("tie_weights", False)

    def test_the_length_of_the_positions_is_no_part_of_it(self, package: str) -> None:
        model, longer = build(package), build(package, max_len=2 * MAX_LEN)
        longer.load_state_dict(model.state_dict(), strict=True)

    def test_a_model_from_the_meta_device_can_be_filled(self, package: str) -> None:
        model = build(package)
        src_ids, tgt_ids = draw_source(model), draw_target(model)
        empty = PACKAGES[package].Seq2SeqTransformer(SRC_VOCAB, TGT_VOCAB, **{**SIZES, "dropout": 0.0}, device="meta")
        empty.to_empty(device="cpu").load_state_dict(model.state_dict())
        assert torch.equal(empty(src_ids, tgt_ids), model(src_ids, tgt_ids))

    def test_forward_reads_no_value_off_the_device(self, package: str) -> None:
        """Tensors of the meta device have none."""
        model = PACKAGES[package].Seq2SeqTransformer(SRC_VOCAB, TGT_VOCAB, **SIZES, device="meta")
        src_ids, tgt_ids = torch.ones(5, 7, dtype=torch.int64, device="meta"), torch.ones(5, 6).long().to("meta")
        for train in (True, False):
            assert model.train(train)(src_ids, tgt_ids).shape == (5, 6, TGT_VOCAB)

    @pytest.mark.thorough
    def test_forward_compiles_as_one_graph(self, package: str) -> None:
        model = build(package, num_encoder_layers=1, num_decoder_layers=1)
        compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
        for length in (7, 4):
            src_ids, tgt_ids = draw_source(model)[:, :length], draw_target(model)[:, : length - 1]
            assert_close(compiled(src_ids, tgt_ids), model(src_ids, tgt_ids))

    @pytest.mark.sampled(2)
    def test_it_is_exported_for_any_batch_and_lengths(self, package: str) -> None:
        model = build(package, num_encoder_layers=1, num_decoder_layers=1)
        src_ids, tgt_ids = draw_source(model), draw_target(model)
        free = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
        exported = torch.export.export(model, (src_ids, tgt_ids), dynamic_shapes={"src_ids": free, "tgt_ids": free})
        others = src_ids[:3, :4], tgt_ids[:3, 2:]
        assert_close(exported.module()(*others), model(*others))

    def test_autocast_comes_near_to_float32(self, package: str) -> None:
        model = build(package).float().eval()
        src_ids, tgt_ids = draw_source(model), draw_target(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(src_ids, tgt_ids)
        assert_close(logits.float(), model(src_ids, tgt_ids), relative_bound=0.05)


@packages
class TestInitialisation:
    """What enters the stacks has unit variance, and tied logits at the start too."""

    WIDE: dict[str, Any] = {**SIZES, "d_model": 64, "num_encoder_layers": 1, "num_decoder_layers": 1}  # noqa: RUF012

    @pytest.mark.parametrize("scaled", [True, False])
    @pytest.mark.parametrize("tied", [True, False])
    def test_embeddings_are_drawn_for_their_scale(self, package: str, scaled: bool, tied: bool) -> None:
        torch.manual_seed(0)
        model = PACKAGES[package].Seq2SeqTransformer(997, 1009, **self.WIDE, scale_embeddings=scaled, tie_weights=tied)
        expected = 1 / 8 if scaled or tied else 1.0
        for embedding in (model.src_embedding, model.tgt_embedding):
            assert embedding.weight.std().item() == pytest.approx(expected, rel=0.02)
            assert embedding.weight.mean().item() == pytest.approx(0.0, abs=0.02 * expected)
        assert model.embedding_scale == (8.0 if scaled else 1.0)

    def test_tied_weights_are_one_parameter(self, package: str) -> None:
        model = build(package, tie_weights=True)
        assert model.projection.weight is model.tgt_embedding.weight
        assert "projection.weight" not in dict(model.named_parameters())
        assert build(package).projection.weight is not build(package).tgt_embedding.weight

    def test_it_learns_a_sentence(self, package: str) -> None:
        torch.manual_seed(0)
        model = PACKAGES[package].Seq2SeqTransformer(SRC_VOCAB, TGT_VOCAB, **{**SIZES, "dropout": 0.1})
        src_ids = torch.tensor([[3, 4, 5, PAD], [3, 6, 7, 8]])
        tgt_ids = torch.tensor([[START, 3, 4, END, PAD], [START, 5, 4, 6, END]])
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(60):
            optimizer.zero_grad()
            gradients(model, src_ids, tgt_ids)
            optimizer.step()
        for beam_size in (1, 2):
            assert model.eval().generate(src_ids, 9, beam_size).tolist() == tgt_ids[:, 1:].tolist()


SRC_IDS, TGT_IDS = torch.tensor([[3, 4, 5]]), torch.tensor([[START, 3]])


def call(model: Model, src_ids: Any = SRC_IDS, tgt_ids: Any = TGT_IDS) -> Tensor:
    logits: Tensor = model(src_ids, tgt_ids)
    return logits


BAD_MODELS: list[tuple[dict[str, Any], str]] = [
    ({"src_vocab_size": 0}, "src_vocab_size must be greater than 0, got src_vocab_size=0"),
    ({"tgt_vocab_size": -3}, "tgt_vocab_size must be greater than 0, got tgt_vocab_size=-3"),
    ({"pad_id": 9}, r"pad_id must be in 0 \.\.\. tgt_vocab_size - 1 = 6, got 9"),
    ({"pad_id": 11}, r"pad_id must be in 0 \.\.\. src_vocab_size - 1 = 10, got 11"),
    ({"start_id": 7}, r"start_id must be in 0 \.\.\. tgt_vocab_size - 1 = 6, got 7"),
    ({"end_id": -1}, r"end_id must be in 0 \.\.\. tgt_vocab_size - 1 = 6, got -1"),
    ({"start_id": 0}, "pad_id must differ from start_id and end_id, .* got pad_id=0, start_id=0 and end_id=2"),
    ({"end_id": 0}, "pad_id must differ from start_id and end_id, .* got pad_id=0, start_id=1 and end_id=0"),
    ({"d_model": 299, "nhead": 6}, "embed_dim must be divisible by num_heads, got embed_dim=299 and num_heads=6"),
    ({"num_decoder_layers": 0}, "num_decoder_layers must be greater than 0"),
    ({"max_len": -1}, "max_len must not be negative, got -1"),
    ({"positional": "rotary"}, "positional must be one of 'interleaved', 'concatenated', got 'rotary'"),
    ({"activation": "tanh"}, "activation should be relu/gelu"),
]
BAD_CALLS: list[tuple[Any, type[Exception], str]] = [
    (
        lambda m: call(m, src_ids=SRC_IDS.float()),
        TypeError,
        "src_ids must hold token ids as int64 or int32, got torch.fl",
    ),
    (
        lambda m: call(m, tgt_ids=TGT_IDS.bool()),
        TypeError,
        "tgt_ids must hold token ids as int64 or int32, got torch.bool",
    ),
    (lambda m: call(m, tgt_ids=TGT_IDS.short()), TypeError, "tgt_ids must hold token ids .*, got torch.int16"),
    (
        lambda m: call(m, src_ids=SRC_IDS[0]),
        ValueError,
        r"src_ids must have shape \(batch, len\), got 1-D of shape \(3,\)",
    ),
    (lambda m: call(m, tgt_ids=TGT_IDS[None]), ValueError, r"tgt_ids must have shape \(batch, len\), got 3-D of shape"),
    (
        lambda m: call(m, src_ids=SRC_IDS.repeat(2, 1)),
        ValueError,
        r"src_ids and tgt_ids must have the same batch size, got shapes \(2, 3\) and \(1, 2\)",
    ),
    (
        lambda m: call(m, tgt_ids=TGT_IDS.repeat(1, 12)),
        ValueError,
        r"tgt_ids must hold at most max_len = 23 tokens in a row, .* got shape \(1, 24\)",
    ),
    (
        lambda m: m.encode(SRC_IDS.to("meta")),
        ValueError,
        "src_ids must be on the device of the parameters, cpu, got meta",
    ),
    (
        lambda m: m.decode(TGT_IDS, torch.zeros(1, 4, 20), SRC_IDS),
        ValueError,
        r"memory must have shape \(batch, src_len, d_model\) = \(1, 3, 20\), as src_ids has it, got \(1, 4, 20\)",
    ),
    (
        lambda m: m.decode(TGT_IDS.float(), torch.zeros(1, 3, 20), SRC_IDS),
        TypeError,
        "tgt_ids must hold token ids as int64 or int32, got torch.float32",
    ),
    (
        lambda m: call(m, src_ids=SRC_IDS[:, :0]),
        ValueError,
        r"src_ids must hold at least one row .* got shape \(1, 0\)",
    ),
    (
        lambda m: call(m, tgt_ids=TGT_IDS[:, :0]),
        ValueError,
        r"tgt_ids must hold at least one row .* got shape \(1, 0\)",
    ),
    (lambda m: call(m, src_ids=[[3]]), TypeError, "src_ids must be a tensor, got list"),
    (lambda m: m.generate([[3]]), TypeError, "src_ids must be a tensor, got list"),
    (lambda m: m.generate(SRC_IDS, max_len=2.5), TypeError, "max_len must be a whole number, got 2.5"),
    (lambda m: m.generate(SRC_IDS, 3, beam_size=None), TypeError, "beam_size must be a whole number, got None"),
    (lambda m: m.generate(SRC_IDS[:0]), ValueError, r"src_ids must hold at least one row .* got shape \(0, 3\)"),
    (lambda m: m.generate(SRC_IDS[0]), ValueError, r"src_ids must have shape \(batch, len\), got 1-D"),
    (
        lambda m: m.generate(torch.tensor([[3, 4], [11, 3]]), max_len=3),
        ValueError,
        r"src_ids must hold ids in 0 \.\.\. src_vocab_size - 1 = 10, got 11 at \[1, 0\]",
    ),
    (lambda m: m.generate(-SRC_IDS, max_len=3), ValueError, r"src_ids must hold ids in 0 .* got -3 at \[0, 0\]"),
    (lambda m: m.generate(SRC_IDS, max_len=0), ValueError, "max_len must be greater than 0, got max_len=0"),
    (
        lambda m: m.generate(SRC_IDS, max_len=24),
        ValueError,
        "max_len must not exceed the 23 positions that the model was built with, got 24",
    ),
    (lambda m: m.generate(SRC_IDS, 3, beam_size=0), ValueError, "beam_size must be greater than 0, got beam_size=0"),
    (
        lambda m: m.generate(SRC_IDS, 3, 2, -0.5),
        ValueError,
        "length_penalty must be finite and not negative .* got -0.5",
    ),
    (lambda m: m.generate(SRC_IDS, 3, 1, math.nan), ValueError, "length_penalty must be finite .* got nan"),
]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace(_method)?` is deprecated:DeprecationWarning")
def test_a_trace_warns_of_a_single_new_token_alone() -> None:
    """It decides whether a mask is needed, and what was traced with several has one."""
    model = build("scratch").eval()
    with pytest.warns(TracerWarning) as warned:
        traced = torch.jit.trace(model, (draw_source(model), draw_target(model)), check_trace=False)
    assert [Path(x.filename).name for x in warned if x.category is TracerWarning] == ["seq2seq.py"]
    src_ids, tgt_ids = draw_source(model, 3, 4), draw_target(model, 3, 9)
    assert_close(traced(src_ids, tgt_ids), model(src_ids, tgt_ids))


class TestErrors:
    @pytest.mark.parametrize(("arguments", "text"), BAD_MODELS)
    def test_bad_models_are_refused_with_the_same_words(self, arguments: dict[str, Any], text: str) -> None:
        texts = set()
        for package in PACKAGES.values():
            with pytest.raises(ValueError, match=text) as error:
                package.Seq2SeqTransformer(
                    **{"src_vocab_size": SRC_VOCAB, "tgt_vocab_size": TGT_VOCAB, **SIZES, **arguments}
                )
            texts.add(str(error.value))
        assert len(texts) == 1

    @pytest.mark.parametrize("name", ["src_vocab_size", "tgt_vocab_size", "pad_id", "start_id", "end_id"])
    def test_sizes_and_ids_are_whole_numbers(self, name: str) -> None:
        for package in PACKAGES.values():
            with pytest.raises(TypeError, match=f"^{name} must be a whole number, got 2.5"):
                package.Seq2SeqTransformer(
                    **{"src_vocab_size": SRC_VOCAB, "tgt_vocab_size": TGT_VOCAB, **SIZES, name: 2.5}
                )

    @pytest.mark.parametrize(("bad_call", "kind", "text"), BAD_CALLS)
    def test_bad_calls_are_refused_with_the_same_words(self, bad_call: Any, kind: type[Exception], text: str) -> None:
        texts = set()
        for package in PACKAGES:
            with pytest.raises(kind, match=text) as error:
                bad_call(build(package))
            texts.add(str(error.value))
        assert len(texts) == 1

    @pytest.mark.parametrize("name", HEAD_SIZES)
    def test_head_sizes_are_an_extension_of_scratch(self, name: str) -> None:
        arguments = {**SIZES, name: HEAD_SIZES[name]}
        with pytest.raises(ValueError, match=rf"{name}={HEAD_SIZES[name]} cannot be expressed by torch\.nn"):
            builtin.Seq2SeqTransformer(SRC_VOCAB, TGT_VOCAB, **arguments)
        model = scratch.Seq2SeqTransformer(SRC_VOCAB, TGT_VOCAB, **arguments)
        src_ids = draw_source(model)
        assert model(src_ids, draw_target(model)).shape == (5, 6, TGT_VOCAB)
        assert model.eval().generate(src_ids, 4, beam_size=2).size(0) == 5


def test_defaults_are_those_of_the_paper() -> None:
    defaults = inspect.signature(scratch.Seq2SeqTransformer).parameters
    stated = {"d_model": 512, "nhead": 8, "num_encoder_layers": 6, "num_decoder_layers": 6, "dim_feedforward": 2048}
    assert {name: defaults[name].default for name in stated} == stated
    assert defaults["dropout"].default == 0.1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@packages
@options
class TestCuda:
    def test_logits_tokens_and_gradients_are_those_of_the_cpu(self, package: str, options: dict[str, Any]) -> None:
        model = build(package, **options)
        src_ids, tgt_ids = draw_source(model), draw_target(model)
        on_cuda = copy.deepcopy(model).cuda()
        assert_close(on_cuda(src_ids.cuda(), tgt_ids.cuda()).cpu(), model(src_ids, tgt_ids))
        actual = {name: x.cpu() for name, x in gradients(on_cuda, src_ids.cuda(), tgt_ids.cuda()).items()}
        assert_same_gradients(actual, gradients(model, src_ids, tgt_ids))
        for beam_size in (1, 3):
            tokens = on_cuda.eval().generate(src_ids.cuda(), 9, beam_size)
            assert torch.equal(tokens.cpu(), model.eval().generate(src_ids, 9, beam_size))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_no_place_is_ever_nan(self, package: str, options: dict[str, Any], dtype: torch.dtype) -> None:
        model = build(package, **options).to("cuda", dtype)
        src_ids, tgt_ids = draw_source(model).cuda(), draw_target(model).cuda()
        for train, grad in ((True, True), (False, True), (False, False)):
            with torch.set_grad_enabled(grad):
                assert model.train(train)(src_ids, tgt_ids).isfinite().all()
        assert all(x.isfinite().all() for x in gradients(model, src_ids, tgt_ids).values())

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
    def test_forward_does_not_wait_for_the_device(self, package: str, options: dict[str, Any]) -> None:
        model = build(package, **options).cuda().eval()
        src_ids, tgt_ids = draw_source(model).cuda(), draw_target(model).cuda()
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                model(src_ids, tgt_ids)
                torch.cuda.set_sync_debug_mode("error")
                try:
                    model(src_ids, tgt_ids)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
