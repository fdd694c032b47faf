"""The third part of ``sidebyside compare``: both packages timed in turns, A B A B, so that other work slows both."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import builtin
import scratch
from equivalence_tests.instruments.side_by_side import fast_path
from equivalence_tests.instruments.weights import copy_weights
from scratch.decoding import Ending, greedy_decode, new_cache

__all__ = ["DECODING", "NUM_TIMINGS", "VOCABULARY", "Timing", "TimingSizes", "decoding", "time_side_by_side"]

VOCABULARY = 1000
NUM_TIMINGS = 4
DECODING = "decoding, cache / none"
FEWEST_ROUNDS, MOST_ROUNDS = 3, 9


@dataclass(frozen=True)
class TimingSizes:
    """What is timed, and for how long; by default the sizes of the paper.

    Args:
        batch: Number of sentences.
        length: Number of tokens of each, source and target alike.
        sentences: Number of sentences that are decoded at a time.
        decoded: Number of tokens that are decoded, of each of them.
        d_model: Width; the feed-forward networks are four times as wide.
        num_layers: Number of layers, of encoder and decoder each.
        seconds: Time for the rounds of each thing that is timed, about.
    """

    batch: int = 16
    length: int = 128
    sentences: int = 4
    decoded: int = 128
    d_model: int = 512
    num_layers: int = 6
    seconds: float = 12.0

    @classmethod
    def quick(cls) -> "TimingSizes":
        """Shorter sentences and fewer layers."""
        return cls(length=32, decoded=64, num_layers=2, seconds=1.5)


@dataclass(frozen=True)
class Timing:
    """One thing timed in both packages.

    Args:
        name: What was timed.
        tokens: Number of tokens that one run goes through.
        scratch_ms: The time that scratch took in each round, in milliseconds.
        builtin_ms: The time that builtin took.
    """

    name: str
    tokens: int
    scratch_ms: tuple[float, ...]
    builtin_ms: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Time of scratch / time of builtin, round by round."""
        return [left / right for left, right in zip(self.scratch_ms, self.builtin_ms, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)


def time_side_by_side(sizes: TimingSizes, dtype: torch.dtype, device: torch.device) -> Iterator[Timing]:
    """Time forward, training step and decoding of ``Seq2SeqTransformer`` in both packages, with the same weights.

    Args:
        sizes: What is timed, and for how long.
        dtype: Of the parameters.
        device: Where.

    Yields:
        One entry for each thing, as soon as it is timed.
    """
    models = _same_models(sizes, dtype, device)
    generator = torch.Generator().manual_seed(0)
    src_ids, tgt_ids = torch.randint(3, VOCABULARY, (2, sizes.batch, sizes.length), generator=generator).to(device)
    tokens = 2 * sizes.batch * sizes.length

    forwards = [_forward(model, src_ids, tgt_ids) for model in models]
    for enabled in (False, True):
        with fast_path(enabled):
            yield _in_turns(f"forward, fast path {'on' if enabled else 'off'}", tokens, forwards, sizes.seconds / 2)
    steps = [_training_step(model, src_ids, tgt_ids) for model in models]
    yield _in_turns("training step", tokens, steps, sizes.seconds)
    decodings = [
        decoding(model, src_ids[: sizes.sentences], sizes.decoded, cached=cached)
        for model, cached in zip(models, (True, False), strict=True)
    ]
    yield _in_turns(DECODING, sizes.sentences * sizes.decoded, decodings, sizes.seconds)


def _same_models(sizes: TimingSizes, dtype: torch.dtype, device: torch.device) -> list[Any]:
    options: dict[str, Any] = {"d_model": sizes.d_model, "dim_feedforward": 4 * sizes.d_model}
    options |= {"num_encoder_layers": sizes.num_layers, "num_decoder_layers": sizes.num_layers}
    options |= {"max_len": max(sizes.length, sizes.decoded), "device": device, "dtype": dtype}
    models = [package.Seq2SeqTransformer(VOCABULARY, VOCABULARY, **options) for package in (scratch, builtin)]
    copy_weights(models[0], models[1])
    return models


def _forward(model: Any, src_ids: Tensor, tgt_ids: Tensor) -> Callable[[], None]:
    def run() -> None:
        model.eval()
        with torch.no_grad():
            model(src_ids, tgt_ids)

    return run


def _training_step(model: Any, src_ids: Tensor, tgt_ids: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def run() -> None:
        model.train()
        loss = F.cross_entropy(model(src_ids, tgt_ids).flatten(0, 1), tgt_ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return run


def decoding(model: Any, src_ids: Tensor, length: int, *, cached: bool) -> Callable[[], Tensor]:
    """Give a function that decodes greedily, to the last token.

    Args:
        model: A ``Seq2SeqTransformer`` of either package.
        src_ids: (batch, src_len).
        length: Number of tokens that are decoded.
        cached: Whether keys and values are remembered; only scratch can. Else every step computes all tokens anew.

    Returns:
        A function without arguments that gives the token ids, (batch, length).
    """

    @torch.inference_mode()  # as ``generate`` does
    def run() -> Tensor:
        model.eval()
        memory = model.encode(src_ids)
        cache = new_cache(model.transformer.decoder.num_layers) if cached else None

        def next_logits(token_ids: Tensor) -> Tensor:
            return model.decode(token_ids, memory, src_ids, cache=cache)[:, -1]

        start = src_ids.new_ones(len(src_ids), 1)
        return greedy_decode(next_logits, start, Ending(length, pad_id=model.pad_id))  # no token ends the sentence

    return run


def _in_turns(name: str, tokens: int, runs: Sequence[Callable[[], object]], seconds: float) -> Timing:
    """Run both once to warm up, then in turns; a first round that takes long warms itself up, and counts."""
    first = [_milliseconds(run) for run in runs]
    rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(1e3 * seconds / sum(first))))
    kept = [first] if sum(first) > 1e3 * seconds / 2 else []
    kept += [[_milliseconds(run) for run in runs] for _ in range(rounds - len(kept))]
    ours, theirs = zip(*kept, strict=True)
    return Timing(name, tokens, ours, theirs)


def _milliseconds(run: Callable[[], object]) -> float:
    """Take the time of one run; the clock waits for the device."""
    # Not at the top: a build with CUDA on a machine without prints a line when this is imported.
    from torch.utils.benchmark import timer

    start = timer()
    run()
    return 1e3 * (timer() - start)
