"""The translation task: vocabularies, files, losses, training, checkpoints."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import builtin
import scratch
from scratch import validation
from scratch.task.translation import (
    PAIRS,
    ModelSizes,
    Training,
    TrainingSettings,
    TranslationTask,
    Vocabulary,
    cross_entropy,
    load_checkpoint,
    read_pairs,
    save_checkpoint,
    smoothed_divergence,
    translate,
)

PACKAGES = [scratch, builtin]
TINY = ModelSizes.small(
    d_model=12, nhead=3, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=20, dropout=0.1
)


def begin(package: Any = scratch, sizes: ModelSizes = TINY, **settings: Any) -> Training:
    task = TranslationTask(PAIRS)
    model = task.build(package.Seq2SeqTransformer, sizes, seed=3, dtype=torch.float64)
    return Training(model, task, TrainingSettings(**settings))


class TestVocabulary:
    def test_special_tokens_come_first_and_padding_is_zero(self) -> None:
        vocabulary = Vocabulary.from_sentences(["b a", "a c"])
        assert vocabulary.tokens == ["<pad>", "<start>", "<end>", "b", "a", "c"]
        assert vocabulary.encode("c a b") == [5, 4, 3]

    def test_decoding_stops_at_the_end_token(self) -> None:
        vocabulary = Vocabulary.from_sentences(["a b"])
        assert vocabulary.decode([1, 3, 2, 4, 0]) == "a"
        assert vocabulary.decode([3, 4]) == "a b"

    def test_an_unknown_word_is_named_with_the_nearest_known_ones(self) -> None:
        with pytest.raises(ValueError, match="got 'biere'; nearest: bier"):
            TranslationTask(PAIRS).source.encode("ich mochte ein biere")
        with pytest.raises(ValueError, match="got 'x'; known: ich, mochte"):
            TranslationTask(PAIRS).source.encode("x")

    @pytest.mark.parametrize(
        ("number", "sentence", "end"),
        [
            (20, "x", "word1000019$"),
            (21, "x", "word1000019 and 1 more$"),
            (21, "word100002", "; nearest: word10000[0-9, word]*$"),
        ],
    )
    def test_of_many_known_words_twenty_are_named(self, number: int, sentence: str, end: str) -> None:
        vocabulary = Vocabulary.from_sentences([f"word{1000000 + i}" for i in range(number)])
        with pytest.raises(ValueError, match=end):
            vocabulary.encode(sentence)

    def test_a_sentence_without_words_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"sentence must hold at least one word, got an empty one$"):
            TranslationTask(PAIRS).source.encode(" ")


class TestPairsFile:
    def test_reads_what_was_written(self, tmp_path: Path) -> None:
        path = tmp_path / "pairs.tsv"
        path.write_text("ein Bär\ta bear\n\nzwei\ttwo\n", encoding="utf-8")
        assert read_pairs(path) == [("ein Bär", "a bear"), ("zwei", "two")]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"a\tb\nc d\n", "line 2: .* one tab between, got 0 tabs"),
            (b"a\tb\tc\n", "line 1: .* got 2 tabs"),
            (b"a\tb\n\t c\n", "line 2: the source sentence must not be empty"),
            (b"a\t \n", "line 1: the target sentence must not be empty"),
            (b"a\tb\nc\t\xff\n", "UTF-8, got other bytes on line 2"),
            (b"\n\n", "at least one pair"),
        ],
    )
    def test_a_broken_file_is_refused_with_its_line(self, tmp_path: Path, content: bytes, message: str) -> None:
        path = tmp_path / "pairs.tsv"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_pairs(path)

    def test_a_missing_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"none.tsv must be a file .* No such file"):
            read_pairs(tmp_path / "none.tsv")


class TestBatch:
    def test_sources_are_padded_and_targets_framed(self) -> None:
        src_ids, tgt_ids = TranslationTask([("a b", "x"), ("a", "y z")]).batch([0, 1])
        assert src_ids.tolist() == [[3, 4], [3, 0]]
        assert tgt_ids.tolist() == [[1, 3, 2, 0], [1, 4, 5, 2]]

    def test_an_empty_task_is_refused(self) -> None:
        with pytest.raises(ValueError, match="pairs must hold at least one pair"):
            TranslationTask([])


class TestLosses:
    logits = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([[3, 1, 6, 2, 0], [4, 2, 0, 0, 0]])

    def test_cross_entropy_is_the_mean_over_tokens_that_are_no_padding(self) -> None:
        probabilities = self.logits.softmax(-1)
        terms = [
            -math.log(probabilities[b, t, self.targets[b, t]])
            for b in range(2)
            for t in range(5)
            if self.targets[b, t] != 0
        ]
        assert cross_entropy(self.logits, self.targets).item() == pytest.approx(sum(terms) / 6, rel=1e-12)

    def test_without_smoothing_the_divergence_is_the_cross_entropy(self) -> None:
        difference = smoothed_divergence(self.logits, self.targets, 0.0) - cross_entropy(self.logits, self.targets)
        assert abs(difference) < 1e-12

    def test_the_divergence_is_torchs_smoothed_loss_less_the_entropy(self) -> None:
        smoothing, size = 0.1, 7
        share = smoothing / size
        top = 1 - smoothing + share
        entropy = -(top * math.log(top) + (size - 1) * share * math.log(share))
        theirs = F.cross_entropy(
            self.logits.flatten(0, 1), self.targets.flatten(), ignore_index=0, label_smoothing=smoothing
        )
        ours = smoothed_divergence(self.logits, self.targets, smoothing)
        assert ours.item() == pytest.approx(theirs.item() - entropy, rel=1e-12)

    def test_a_model_that_says_the_target_distribution_has_no_divergence(self) -> None:
        wanted = 0.8 * F.one_hot(self.targets, 7).double() + 0.2 / 7
        assert smoothed_divergence(wanted.log(), self.targets, 0.2).item() == pytest.approx(0, abs=1e-12)


class TestTraining:
    @pytest.mark.parametrize("settings", [{}, {"optimizer": "adam"}, {"loss": "kl", "label_smoothing": 0.1}])
    def test_both_packages_train_alike_with_dropout(self, settings: dict[str, Any]) -> None:
        ours, theirs = begin(scratch, num_epochs=5, **settings), begin(builtin, num_epochs=5, **settings)
        for mine, other in zip(ours.epochs(), theirs.epochs(), strict=True):  # in turns
            assert mine == pytest.approx(other, rel=1e-10)
        for (name, p), q in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9, msg=name)

    @pytest.mark.parametrize("package", PACKAGES)
    @pytest.mark.parametrize("beam_size", [1, 2])
    def test_learns_the_embedded_pairs(self, package: Any, beam_size: int) -> None:
        training = begin(package, ModelSizes.small(), optimizer="adam")
        losses = list(training.epochs())
        assert losses[-1] < 0.1 < losses[0]
        outputs = translate(training.model, training.task, [source for source, _ in PAIRS], beam_size)
        assert outputs == [target for _, target in PAIRS]

    def test_every_epoch_has_an_order_and_drops_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        task = TranslationTask([(f"x{i}", f"y{i}") for i in range(7)])
        settings = TrainingSettings(num_epochs=2, batch_size=7)
        training = Training(task.build(scratch.Seq2SeqTransformer, ModelSizes.small(), seed=0), task, settings)
        drawn = []

        def step(src_ids: torch.Tensor, _: torch.Tensor) -> float:
            drawn.append((src_ids.flatten().tolist(), torch.rand(()).item()))
            return 0.0

        monkeypatch.setattr(training, "_step", step)
        list(training.epochs())
        (first, first_number), (second, second_number) = drawn
        assert sorted(first) == sorted(second)
        assert first != second
        assert first_number != second_number

    def test_leaves_the_global_random_stream_alone(self) -> None:
        training = begin()
        torch.manual_seed(5)
        before = torch.get_rng_state()
        training.run_epoch()
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"optimizer": "lion"}, "optimizer must be one of 'sgd', 'adam', got 'lion'"),
            ({"loss": "mse"}, "loss must be one of"),
            ({"num_epochs": 0}, "num_epochs must be greater than 0"),
            ({"batch_size": 0}, "batch_size must be greater than 0"),
            ({"learning_rate": 0.0}, "learning_rate must be greater than 0"),
            ({"momentum": 1.0}, "momentum must be in 0"),
            ({"seed": -1}, r"seed must be in 0 ... 2\*\*32 - 1, got -1"),
            ({"seed": 2**32}, r"seed must be in 0 ... 2\*\*32 - 1, got 4294967296"),
            ({"label_smoothing": 0.1}, "label_smoothing needs loss='kl'"),
        ],
    )
    def test_settings_out_of_range_are_refused(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            TrainingSettings(**settings)

    def test_settings_in_range_are_taken(self) -> None:
        assert TrainingSettings(loss="kl", label_smoothing=0.1).label_smoothing == 0.1
        assert TrainingSettings(seed=2**32 - 1).seed == 2**32 - 1


class TestCheckpoint:
    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    def test_a_resumed_training_ends_where_an_uninterrupted_one_does(self, tmp_path: Path, optimizer: str) -> None:
        whole = begin(optimizer=optimizer, num_epochs=6)
        list(whole.epochs())
        part = begin(optimizer=optimizer, num_epochs=2)
        list(part.epochs())
        save_checkpoint(tmp_path / "c.pt", part, TINY)
        resumed, sizes = load_checkpoint(tmp_path / "c.pt", scratch.Seq2SeqTransformer)
        assert sizes == TINY
        resumed.settings = dataclasses.replace(resumed.settings, num_epochs=6)
        list(resumed.epochs())
        assert resumed.losses == whole.losses
        for p, q in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(p, q)

    def test_either_package_reads_the_other_ones_checkpoint(self, tmp_path: Path) -> None:
        training = begin(scratch, num_epochs=1)
        list(training.epochs())
        save_checkpoint(tmp_path / "c.pt", training, TINY)
        loaded, _ = load_checkpoint(tmp_path / "c.pt", builtin.Seq2SeqTransformer)
        assert isinstance(loaded.model, builtin.Seq2SeqTransformer)
        sources = [source for source, _ in PAIRS]
        assert translate(loaded.model, loaded.task, sources) == translate(training.model, training.task, sources)

    def test_what_is_no_checkpoint_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "c.pt"
        with pytest.raises(ValueError, match="there is no such file"):
            load_checkpoint(path, scratch.Seq2SeqTransformer)
        torch.save({"weights": torch.zeros(2)}, path)
        with pytest.raises(ValueError, match=r"checkpoint of format .* got None"):
            load_checkpoint(path, scratch.Seq2SeqTransformer)
        torch.save(["weights"], path)
        with pytest.raises(ValueError, match=r"checkpoint of format .* got None"):
            load_checkpoint(path, scratch.Seq2SeqTransformer)
        torch.save({"format": Path("runs code of its own when it is read")}, path)
        with pytest.raises(ValueError, match=r"torch\.load cannot read it"):
            load_checkpoint(path, scratch.Seq2SeqTransformer)
        save_checkpoint(path, begin(), TINY)
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(ValueError, match="a complete checkpoint"):
            load_checkpoint(path, scratch.Seq2SeqTransformer)

    def test_it_is_read_to_the_device_that_is_asked_for(self, tmp_path: Path) -> None:
        path = tmp_path / "c.pt"
        torch.save({"format": "f", "weights": torch.zeros(2)}, path)
        assert validation.read_checkpoint(path, "f", "meta")["weights"].device.type == "meta"

    def test_a_file_without_permission_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "c.pt"
        path.write_bytes(b"old")
        monkeypatch.setattr("os.access", lambda asked, _: asked != path)
        with pytest.raises(ValueError, match="got a folder or no permission"):
            save_checkpoint(path, begin(), TINY)

    def test_a_failed_save_leaves_the_old_checkpoint(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "c.pt"
        save_checkpoint(path, begin(), TINY)
        before = path.read_bytes()

        def fail(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(torch, "save", fail)
        with pytest.raises(ValueError, match="could not be written: disk full"):
            save_checkpoint(path, begin(), TINY)
        assert path.read_bytes() == before
        assert [file.name for file in tmp_path.iterdir()] == ["c.pt"]

    def test_a_path_that_cannot_be_written_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(validation.ArgumentValueError, match="in a folder that exists"):
            save_checkpoint(tmp_path / "none" / "c.pt", begin(), TINY)
        with pytest.raises(validation.ArgumentValueError, match="got a folder"):
            save_checkpoint(tmp_path, begin(), TINY)
