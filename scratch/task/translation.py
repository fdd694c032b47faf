"""A small real task for either package: sentence pairs, vocabularies, training, translating, checkpoints.

The shortest way through it::

    task = TranslationTask(PAIRS)
    model = task.build(Seq2SeqTransformer, ModelSizes.small(), seed=0)
    training = Training(model, task, TrainingSettings(optimizer="adam"))
    for loss in training.epochs():
        ...
    translate(model, task, ["ich mochte ein bier"])

Each epoch draws its random numbers from the seed and its own number, and puts the global stream back. So two models can
be trained in turns, epoch by epoch, and a resumed training goes on as if it had never stopped.
"""

import dataclasses
import difflib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from scratch import validation

__all__ = [
    "PAIRS",
    "ModelSizes",
    "Training",
    "TrainingSettings",
    "TranslationTask",
    "Vocabulary",
    "cross_entropy",
    "load_checkpoint",
    "read_pairs",
    "replacing",
    "save_checkpoint",
    "smoothed_divergence",
    "translate",
]

Pair = tuple[str, str]

PAIRS: tuple[Pair, ...] = (
    ("ich mochte ein bier", "i want a beer ."),
    ("ich mochte ein cola", "i want a coke ."),
    ("ich mag das Buch", "i like the book ."),
)

CHECKPOINT_FORMAT = "attention-side-by-side translation 1"


class Vocabulary:
    """The words of one language and their ids; 0 is padding, 1 starts and 2 ends a sentence.

    Args:
        words: Every word once; the three special tokens come before them.

    >>> vocabulary = Vocabulary.from_sentences(["a beer", "a coke"])
    >>> vocabulary.encode("a coke")
    [3, 5]
    >>> vocabulary.decode([3, 5, 2, 0])
    'a coke'
    """

    SPECIAL = ("<pad>", "<start>", "<end>")
    PAD, START, END = 0, 1, 2

    def __init__(self, words: Sequence[str]) -> None:
        self.tokens = [*self.SPECIAL, *words]
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    @classmethod
    def from_sentences(cls, sentences: Sequence[str]) -> "Vocabulary":
        """Collect the words of sentences, split at white space, in the order in which they appear."""
        return cls(list(dict.fromkeys(word for sentence in sentences for word in sentence.split())))

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, sentence: str) -> list[int]:
        """Turn words into ids.

        Args:
            sentence: Words of this vocabulary, between white space.

        Returns:
            One id for each word.

        Raises:
            ValueError: For an empty sentence or an unknown word; the message names known ones.
        """
        words = sentence.split()
        known = self.tokens[len(self.SPECIAL) :]
        validation.check_words(words, known, lambda word: difflib.get_close_matches(word, known, n=3, cutoff=0.5))
        return [self.ids[word] for word in words]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn ids into words, up to the end token, without special tokens."""
        ids = list(token_ids)
        ids = ids[: ids.index(self.END)] if self.END in ids else ids
        return " ".join(self.tokens[i] for i in ids if i >= len(self.SPECIAL))


def read_pairs(path: Path) -> list[Pair]:
    """Read sentence pairs from a file: on each line a source and a target sentence with a tab between.

    Args:
        path: A text file in UTF-8. Empty lines are passed over.

    Returns:
        The pairs in order.

    Raises:
        ValueError: If the file cannot be read, is not UTF-8, holds no pairs, or has a line without exactly one tab or
            with an empty sentence; the message names the line.
    """
    lines = validation.read_text(path).splitlines()
    pairs = [validation.check_pair(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    validation.check_pairs(pairs, str(path))
    return pairs


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a ``Seq2SeqTransformer``; by default those of the paper, without dropout.

    Args:
        d_model: Width of a token.
        nhead: Number of heads.
        num_encoder_layers: Layers that read the source.
        num_decoder_layers: Layers that write the target.
        dim_feedforward: Width inside the feed-forward networks.
        dropout: Share of the numbers that are dropped in training.
        norm_first: LayerNorm before each sub-layer instead of after its residual.
        bias: Whether linear layers, attentions and LayerNorms have biases.
        max_len: The greatest length of source and target.
        positional: Layout of the positional encoding, "interleaved" or "concatenated".
        scale_embeddings: Multiply embeddings by sqrt(d_model).
        tie_weights: Let the last projection share its weights with the target embedding.
        qk_head_dim: d_k; None for d_model / nhead.
        v_head_dim: d_v; None for d_model / nhead.
    """

    d_model: int = 512
    nhead: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    dim_feedforward: int = 2048
    dropout: float = 0.0
    norm_first: bool = False
    bias: bool = True
    max_len: int = 128
    positional: Literal["interleaved", "concatenated"] = "interleaved"
    scale_embeddings: bool = True
    tie_weights: bool = False
    qk_head_dim: int | None = None
    v_head_dim: int | None = None

    @classmethod
    def small(cls, **changes: Any) -> "ModelSizes":
        """A model that learns the embedded pairs in seconds: width 64, two layers, four heads."""
        sizes = {"d_model": 64, "nhead": 4, "num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 128}
        return cls(**{**sizes, **changes})


@dataclass(frozen=True)
class TranslationTask:
    """Sentence pairs with the vocabularies of both languages.

    Args:
        pairs: (source, target) sentences.
        source: The source vocabulary, made from the pairs if not given.
        target: The target vocabulary, likewise.

    Raises:
        ValueError: If there are no pairs.

    >>> src_ids, tgt_ids = TranslationTask(PAIRS).batch([0, 2])
    >>> src_ids
    tensor([[ 3,  4,  5,  6],
            [ 3,  8,  9, 10]])
    >>> tgt_ids
    tensor([[ 1,  3,  4,  5,  6,  7,  2],
            [ 1,  3,  9, 10, 11,  7,  2]])
    """

    pairs: Sequence[Pair]
    source: Vocabulary = field(default_factory=lambda: Vocabulary([]))
    target: Vocabulary = field(default_factory=lambda: Vocabulary([]))

    def __post_init__(self) -> None:
        validation.check_pairs(self.pairs, "pairs")
        for name, column in (("source", 0), ("target", 1)):
            if len(getattr(self, name)) == len(Vocabulary.SPECIAL):
                words = Vocabulary.from_sentences([pair[column] for pair in self.pairs])
                object.__setattr__(self, name, words)

    def source_ids(self, sentences: Sequence[str], device: torch.device | str | None = None) -> Tensor:
        """Return source sentences as ids, (batch, src_len), padded at the end."""
        return padded([self.source.encode(sentence) for sentence in sentences], device)

    def batch(
        self, rows: Sequence[int], device: torch.device | str | None = None
    ) -> tuple[Int[Tensor, "batch src_len"], Int[Tensor, "batch tgt_len"]]:
        """Return pairs as ids; targets begin with the start token and end with the end token."""
        src_ids = self.source_ids([self.pairs[row][0] for row in rows], device)
        targets = [[Vocabulary.START, *self.target.encode(self.pairs[row][1]), Vocabulary.END] for row in rows]
        return src_ids, padded(targets, device)

    def build(
        self,
        model_class: type[nn.Module],
        sizes: ModelSizes,
        seed: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Build a ``Seq2SeqTransformer`` of either package for these vocabularies; same seed, same parameters."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return model_class(
                len(self.source),
                len(self.target),
                pad_id=Vocabulary.PAD,
                start_id=Vocabulary.START,
                end_id=Vocabulary.END,
                device=device,
                dtype=dtype,
                **dataclasses.asdict(sizes),
            )


def padded(rows: Sequence[Sequence[int]], device: torch.device | str | None = None) -> Int[Tensor, "batch len"]:
    """Make one tensor of rows of ids, filled up with padding."""
    longest = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[Vocabulary.PAD] * (longest - len(row))] for row in rows], device=device)


def cross_entropy(
    logits: Float[Tensor, "batch tgt_len vocabulary"], target_ids: Int[Tensor, "batch tgt_len"]
) -> Float[Tensor, ""]:
    """Take the mean negative log-probability of the right tokens, padding left out.

    loss = - mean over tokens of log softmax(logits)[target]

    Args:
        logits: (batch, tgt_len, vocabulary).
        target_ids: (batch, tgt_len).

    Returns:
        A scalar.

    In torch.nn: ``F.cross_entropy(..., ignore_index=pad_id)``.

    Source: Vaswani et al. 2017, section 5.
    """
    return F.cross_entropy(logits.flatten(0, 1), target_ids.flatten(), ignore_index=Vocabulary.PAD)


def smoothed_divergence(
    logits: Float[Tensor, "batch tgt_len vocabulary"], target_ids: Int[Tensor, "batch tgt_len"], smoothing: float
) -> Float[Tensor, ""]:
    """Take the mean Kullback-Leibler divergence of the model from smoothed one-hot targets, padding left out.

    p = (1 - smoothing) one_hot(target) + smoothing / vocabulary

    loss = mean over tokens of sum p log(p / softmax(logits))

    Args:
        logits: (batch, tgt_len, vocabulary).
        target_ids: (batch, tgt_len).
        smoothing: Share of the probability that is spread over all tokens; with 0 this equals ``cross_entropy``.

    Returns:
        A scalar, 0 for a model that says exactly p.

    In torch.nn: ``F.kl_div(log_softmax(logits), p)``. ``F.cross_entropy(..., label_smoothing=)`` is this plus the
    entropy of p, a constant.

    Source: Szegedy et al. 2016, section 7; Vaswani et al. 2017, section 5.4.

    >>> logits, targets = torch.tensor([[[0.0, 0.0, 0.0, 2.0]]]), torch.tensor([[3]])
    >>> smoothed_divergence(logits, targets, 0.0) == cross_entropy(logits, targets)
    tensor(True)
    """
    one_hot = F.one_hot(target_ids, logits.size(-1)).to(logits.dtype)
    wanted = (1 - smoothing) * one_hot + smoothing / logits.size(-1)  # (b, t, vocabulary)
    divergence = F.kl_div(logits.log_softmax(dim=-1), wanted, reduction="none").sum(dim=-1)
    is_token = target_ids != Vocabulary.PAD
    return divergence.masked_fill(~is_token, 0.0).sum() / is_token.sum()


@dataclass(frozen=True)
class TrainingSettings:
    """How a model is trained: by default SGD with momentum 0.99 for 30 epochs.

    Args:
        optimizer: "sgd", or "adam" with the betas and epsilon of the paper.
        learning_rate: Length of a step.
        momentum: Of SGD.
        loss: "cross_entropy", or "kl" for the divergence from smoothed targets.
        label_smoothing: What "kl" spreads over all tokens.
        num_epochs: How often the pairs are gone through.
        batch_size: Pairs in a step.
        seed: Of the order of the pairs, and of dropout.

    Raises:
        ValueError: For a value out of range.

    Source: Vaswani et al. 2017, section 5.3 (Adam).
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = 1e-3
    momentum: float = 0.99
    loss: Literal["cross_entropy", "kl"] = "cross_entropy"
    label_smoothing: float = 0.0
    num_epochs: int = 30
    batch_size: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        validation.check_training_settings(self)


class Training:
    """A model on its way: the optimizer, the epochs done and their losses.

    Args:
        model: A ``Seq2SeqTransformer`` of either package.
        task: What it learns.
        settings: How.

    Raises:
        ValueError: For settings out of range.
    """

    def __init__(self, model: nn.Module, task: TranslationTask, settings: TrainingSettings) -> None:
        self.model, self.task, self.settings = model, task, settings
        self.losses: list[float] = []
        parameters, rate = model.parameters(), settings.learning_rate
        if settings.optimizer == "adam":  # betas and eps of the paper, section 5.3
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, rate, betas=(0.9, 0.98), eps=1e-9)
        else:
            self.optimizer = torch.optim.SGD(parameters, rate, momentum=settings.momentum)

    def epochs(self) -> Iterator[float]:
        """Train to the last epoch, and yield the mean loss of each one."""
        while len(self.losses) < self.settings.num_epochs:
            yield self.run_epoch()

    def run_epoch(self) -> float:
        """Go once through all pairs in random order, and return the mean loss over tokens' batches."""
        device = next(self.model.parameters()).device
        self.model.train()
        total = 0.0
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.settings.seed * 1_000_003 + len(self.losses))
            for rows in torch.randperm(len(self.task.pairs)).split(self.settings.batch_size):
                total += self._step(*self.task.batch(rows.tolist(), device)) * len(rows)
        self.losses.append(total / len(self.task.pairs))
        return self.losses[-1]

    def _step(self, src_ids: Tensor, tgt_ids: Tensor) -> float:
        logits = self.model(src_ids, tgt_ids[:, :-1])
        if self.settings.loss == "kl":
            loss = smoothed_divergence(logits, tgt_ids[:, 1:], self.settings.label_smoothing)
        else:
            loss = cross_entropy(logits, tgt_ids[:, 1:])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def translate(
    model: Any, task: TranslationTask, sentences: Sequence[str], beam_size: int = 1, length_penalty: float = 0.6
) -> list[str]:
    """Translate sentences with a trained model.

    Args:
        model: A ``Seq2SeqTransformer`` of either package; put into eval mode.
        task: Whose vocabularies it was trained with.
        sentences: Words of the source vocabulary, between white space.
        beam_size: Number of hypotheses of beam search; 1 is greedy.
        length_penalty: How much beam search favours long hypotheses.

    Returns:
        One translation for each sentence.

    Raises:
        ValueError: For an empty sentence, an unknown word, or a sentence longer than the model's positions.
    """
    src_ids = task.source_ids(sentences, next(model.parameters()).device)
    max_len = min(model.positional_encoding.max_len, 2 * src_ids.size(1) + 10)
    generated = model.eval().generate(src_ids, max_len, beam_size, length_penalty)
    return [task.target.decode(row) for row in generated.tolist()]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Return the name of a temporary file beside ``path`` that takes its place in the end, all or nothing.

    Args:
        path: The file to be written.

    Yields:
        Where to write. If that raises, ``path`` stays as it was.

    Raises:
        ValueError: If it could not be written, because the disk is full, say.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with validation.writing(path):
            yield temporary
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(path: Path, training: Training, sizes: ModelSizes) -> None:
    """Write a checkpoint to a temporary file beside ``path`` and then put it in its place, all or nothing.

    Args:
        path: Where to.
        training: Model, optimizer, losses, settings and vocabularies are saved.
        sizes: What the model was built with.

    Raises:
        ValueError: If the folder does not exist, cannot be written to, or is on a disk that is full.

    In torch.nn: ``torch.save``.
    """
    validation.check_writable(path)
    checkpoint = {
        "format": CHECKPOINT_FORMAT,
        "sizes": dataclasses.asdict(sizes),
        "settings": dataclasses.asdict(training.settings),
        "dtype": str(next(training.model.parameters()).dtype).removeprefix("torch."),
        "pairs": [list(pair) for pair in training.task.pairs],
        "losses": training.losses,
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
    }
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(checkpoint, file)


def load_checkpoint(
    path: Path, model_class: type[nn.Module], device: torch.device | str | None = None
) -> tuple[Training, ModelSizes]:
    """Read a checkpoint of either package; the two have the same parameters under the same names.

    Args:
        path: What ``save_checkpoint`` wrote.
        model_class: ``Seq2SeqTransformer`` of either package.
        device: Where to put the model.

    Returns:
        The training as it stood, with its model and task, and the sizes of the model.

    Raises:
        ValueError: If the file is missing, cut short, or no checkpoint of this task; or if sizes cannot be expressed
            by the package.

    In torch.nn: ``torch.load(weights_only=True)``.
    """
    saved = validation.read_checkpoint(path, CHECKPOINT_FORMAT, device)
    sizes, settings = ModelSizes(**saved["sizes"]), TrainingSettings(**saved["settings"])
    task = TranslationTask([(source, target) for source, target in saved["pairs"]])
    model = task.build(model_class, sizes, settings.seed, device, getattr(torch, saved["dtype"]))
    model.load_state_dict(saved["model"])
    training = Training(model, task, settings)
    training.optimizer.load_state_dict(saved["optimizer"])
    training.losses = list(saved["losses"])
    return training, sizes
