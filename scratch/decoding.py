"""One token after another: greedy decoding, sampling and beam search. What is kept between steps is in ``caches``."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scratch import validation
from scratch.caches import FixedCache, GrowingCache, KeyValueCache, LayerCache, new_cache
from scratch.rounding import upcast_half

__all__ = [
    "Ending",
    "FixedCache",
    "GrowingCache",
    "KeyValueCache",
    "LayerCache",
    "Sampling",
    "beam_search",
    "greedy_decode",
    "hypothesis_score",
    "keep_likeliest",
    "new_cache",
    "sample_decode",
]

P = ParamSpec("P")
NextLogits = Callable[[Tensor], Tensor]


class Beams(NamedTuple):
    """The hypotheses of every sample; row i * beam_size + j of ``token_ids`` is hypothesis j of sample i."""

    token_ids: Tensor  # (b * beam_size, len), with the prefix
    log_probs: Tensor  # (b, beam_size), -inf where there is no hypothesis yet
    lengths: Tensor  # (b, beam_size), generated tokens with the end token
    ended: Tensor  # (b, beam_size)


@dataclass(frozen=True)
class Ending:
    """When rows of generated tokens end.

    Args:
        max_len: The greatest number of generated tokens.
        end_id: The token that ends a row; None if there is none.
        pad_id: The token that fills a row up after its end, and is never chosen; None if there is none.

    Raises:
        ValueError: If max_len is below 1, or end_id is pad_id or without one.
    """

    max_len: int
    end_id: int | None = None
    pad_id: int | None = None

    def __post_init__(self) -> None:
        validation.check_decoding(self.end_id, self.pad_id, self.max_len)

    def close(self, token: Int[Tensor, "*rows"], ended: Bool[Tensor, "*rows"]) -> tuple[Tensor, Tensor]:
        """Put padding in place of what follows an end, and say which rows have ended with this token."""
        if self.end_id is None or self.pad_id is None:
            return token, ended
        token = token.masked_fill(ended, self.pad_id)
        return token, ended | (token == self.end_id)


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    y_t ~ softmax(logits / temperature), of the tokens that ``top_k`` and ``top_p`` leave.

    Args:
        temperature: Below 1 likely tokens become likelier, above 1 less likely; 0 takes the likeliest, of equal ones
            the one with the least id.
        top_k: Draw among this many likeliest tokens.
        top_p: Draw among the fewest likeliest tokens that have this probability together.
        generator: Where the random numbers come from; torch's own if not given.

    Raises:
        ValueError: For a negative temperature, a top_k below 1, a top_p that is not in 0 ... 1, or any of the last two
            with a temperature of 0.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        validation.check_sampling(self.temperature, self.top_k, self.top_p)

    def draw(self, logits: Float[Tensor, "batch vocabulary"]) -> Int[Tensor, " batch"]:
        """Choose a token for each row."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        (logits,) = upcast_half(logits)
        probabilities = keep_likeliest(logits / self.temperature, self.top_k, self.top_p).softmax(dim=-1)
        return torch.multinomial(probabilities, 1, generator=self.generator).squeeze(1)


LIKELIEST, AS_LIKELY = Sampling(temperature=0.0), Sampling()


def greedy_decode(
    next_logits: NextLogits, prefix: Int[Tensor, "batch prefix_len"], ending: Ending
) -> Int[Tensor, "batch generated_len"]:
    """Append the likeliest token again and again, until every row has its end token.

    y_t = argmax P(y | y_1 ... y_(t-1)), never the padding token; of equal ones the one with the least id.

    Args:
        next_logits: Gives the logits (batch, vocabulary) of the token that follows each row of token ids (batch, len),
            which hold the prefix and all tokens so far. A row past its end token goes on with padding.
        prefix: What each row starts with: usually one start token.
        ending: When a row ends.

    Returns:
        Generated token ids without the prefix, as long as the longest row.

    Source: Sutskever et al. 2014, section 3.2 with a beam of 1.

    >>> likeliest = torch.tensor([0, 2, 3, 1])  # after token 0 itself, after 1 comes 2, after 2 comes 3
    >>> def next_logits(token_ids):
    ...     return torch.nn.functional.one_hot(likeliest[token_ids[:, -1]], 4).float()
    >>> greedy_decode(next_logits, torch.tensor([[1], [2]]), Ending(max_len=9, end_id=3, pad_id=0))
    tensor([[2, 3],
            [3, 0]])
    """
    return sample_decode(next_logits, prefix, ending, LIKELIEST)


def sample_decode(
    next_logits: NextLogits,
    prefix: Int[Tensor, "batch prefix_len"],
    ending: Ending,
    sampling: Sampling = AS_LIKELY,
) -> Int[Tensor, "batch generated_len"]:
    """Append tokens that are drawn at random, until every row has its end token.

    Args:
        next_logits: As for ``greedy_decode``.
        prefix: What each row starts with.
        ending: When a row ends.
        sampling: How each token is drawn; never the padding token.

    Returns:
        Generated token ids without the prefix, as long as the longest row.

    >>> def next_logits(token_ids):  # 0 and 1 are equally likely, 2 is not
    ...     return torch.tensor([[0.0, 0.0, -9.0]])
    >>> sample_decode(next_logits, torch.tensor([[1]]), Ending(max_len=99), Sampling(top_k=2)).unique()
    tensor([0, 1])
    """
    token_ids = prefix
    ended = torch.zeros(prefix.size(0), dtype=torch.bool, device=prefix.device)
    for _ in range(ending.max_len):
        if ended.all():
            break
        token = sampling.draw(without_padding(next_logits(token_ids), ending.pad_id))
        token, ended = ending.close(token, ended)
        token_ids = torch.cat([token_ids, token.unsqueeze(1).to(prefix.dtype)], dim=1)
    return token_ids[:, prefix.size(1) :]


def keep_likeliest(
    logits: Float[Tensor, "*rows vocabulary"], top_k: int | None = None, top_p: float | None = None
) -> Float[Tensor, "*rows vocabulary"]:
    """Make all but the likeliest tokens impossible.

    Args:
        logits: (..., vocabulary).
        top_k: How many are kept, and with them those that are as likely as the last of them.
        top_p: Of these as few as have this probability together, the likeliest first; always one.

    Returns:
        The same, -inf for what is not kept.

    Source: Fan et al. 2018, section 5.4 (top k); Holtzman et al. 2020, section 3.1 (top p).

    >>> logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    >>> keep_likeliest(logits, top_k=3).exp()
    tensor([0.0000, 0.2000, 0.3000, 0.4000])
    >>> keep_likeliest(logits, top_p=0.6).exp()
    tensor([0.0000, 0.0000, 0.3000, 0.4000])
    >>> keep_likeliest(logits, top_p=0.0).exp()
    tensor([0.0000, 0.0000, 0.0000, 0.4000])
    """
    if top_k is not None:
        least = logits.topk(min(top_k, logits.size(-1)), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(dim=-1)
        enough = probabilities.cumsum(dim=-1) - probabilities >= top_p  # those before it suffice
        enough[..., 0] = False
        logits = logits.masked_fill(enough.scatter(-1, order, enough), -math.inf)
    return logits


def beam_search(
    next_logits: NextLogits,
    prefix: Int[Tensor, "batch prefix_len"],
    ending: Ending,
    *,
    beam_size: int,
    length_penalty: float = 0.6,
    reorder: Callable[[Tensor], None] | None = None,
) -> tuple[Int[Tensor, "batch generated_len"], Float[Tensor, " batch"]]:
    """Keep the ``beam_size`` likeliest hypotheses of each row while they grow, and return the best one.

    best = argmax_Y log P(Y) / ((5 + |Y|) / 6)^length_penalty

    A hypothesis that has its end token keeps its place; the others fill the remaining places with their likeliest
    continuations. The search stops when all have ended, when none can still overtake the best of those that have, or at
    max_len, where unfinished hypotheses are compared as they are. Of equal ones, the extension of the likelier
    hypothesis goes first, then the token with the least id. With ``beam_size=1`` this is ``greedy_decode``.

    Args:
        next_logits: As for ``greedy_decode``, for batch * beam_size rows: those of one sample follow one another.
        prefix: What each row starts with: usually one start token.
        ending: When a hypothesis ends.
        beam_size: Number of hypotheses for each row.
        length_penalty: How much long hypotheses are favoured; 0: not at all.
        reorder: Told, after each step, which row each row goes on from, always one of the same sample: what
            ``next_logits`` remembers of its rows has to follow.

    Returns:
        Generated token ids without the prefix, as long as the longest row, and each row's score.

    Raises:
        ValueError: If beam_size is below 1 or length_penalty is negative.

    Source: Sutskever et al. 2014, section 3.2; Wu et al. 2016, section 7, equation 14 (without coverage penalty).

    >>> after = torch.tensor([[0.0, 0.0, 0.4, 0.6, 0.0]] * 2 + [[0.0, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.3, 0.3, 0.4]])
    >>> def next_logits(token_ids):  # after the start token 1, token 3 looks better; after 2 the end is sure
    ...     return after[token_ids[:, -1] % 4].log()
    >>> start, ending = torch.tensor([[1]]), Ending(max_len=9, end_id=4, pad_id=0)
    >>> greedy_decode(next_logits, start, ending)
    tensor([[3, 4]])
    >>> beam_search(next_logits, start, ending, beam_size=2, length_penalty=0.0)
    (tensor([[2, 4]]), tensor([-0.9163]))
    """
    validation.check_beams(beam_size, length_penalty)
    beams = _first_beams(prefix, beam_size)
    for _ in range(ending.max_len):
        if _decided(beams, ending.max_len, length_penalty):
            break
        beams, parents = _grow(beams, next_logits(beams.token_ids), ending)
        if reorder is not None:
            reorder(parents)
    scores, best = hypothesis_score(beams.log_probs, beams.lengths, length_penalty).max(dim=1)  # the first of equals
    longest = max(beams.lengths.gather(1, best.unsqueeze(1)).flatten().tolist(), default=0)
    token_ids = beams.token_ids.unflatten(0, (-1, beam_size))[torch.arange(len(best), device=best.device), best]
    return token_ids[:, prefix.size(1) : prefix.size(1) + longest], scores


def hypothesis_score(
    log_probs: Float[Tensor, "*shape"], lengths: Int[Tensor, "*shape"] | int, length_penalty: float
) -> Float[Tensor, "*shape"]:
    """Make the log-probabilities of shorter and longer hypotheses comparable.

    score(Y) = log P(Y) / ((5 + |Y|) / (5 + 1))^length_penalty

    Args:
        log_probs: log P(Y).
        lengths: |Y|, the number of generated tokens, the end token among them.
        length_penalty: The exponent: 0 leaves log-probabilities as they are.

    Returns:
        The shape of ``log_probs``.

    Source: Wu et al. 2016, section 7, equation 14 (without coverage penalty).

    >>> hypothesis_score(torch.tensor([-2.0, -2.0]), torch.tensor([1, 19]), length_penalty=0.5)
    tensor([-2., -1.])
    """
    return log_probs / ((5 + torch.as_tensor(lengths, dtype=log_probs.dtype)) / 6) ** length_penalty


def in_inference_mode(generate: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Run a function in inference mode, where small operations cost less, and return its token ids as plain tensors."""

    @functools.wraps(generate)
    def faster(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        with torch.inference_mode():
            token_ids = generate(*args, **kwargs)
        return token_ids.clone()

    return faster


def without_padding(logits: Float[Tensor, "*rows vocabulary"], pad_id: int | None) -> Float[Tensor, "*rows vocabulary"]:
    """Make the padding token impossible: it only fills up rows."""
    if pad_id is None:
        return logits
    is_pad = torch.arange(logits.size(-1), device=logits.device) == pad_id
    return logits.masked_fill(is_pad, -math.inf)


def first_best(
    x: Float[Tensor, "rows columns"], count: int
) -> tuple[Float[Tensor, "rows {count}"], Int[Tensor, "rows {count}"]]:
    """Pick the ``count`` greatest of each row, the first among equals: ``torch.topk`` promises no order for those."""
    remaining, picked = x.clone(), []
    for _ in range(count):
        value, index = remaining.max(dim=1, keepdim=True)
        remaining.scatter_(1, index, -math.inf)
        picked.append((value, index))
    values, indices = zip(*picked, strict=True)
    return torch.cat(values, dim=1), torch.cat(indices, dim=1)


def _first_beams(prefix: Tensor, beam_size: int) -> Beams:
    shape, device = (prefix.size(0), beam_size), prefix.device
    log_probs = torch.full(shape, -math.inf, device=device)
    log_probs[:, 0] = 0.0  # all places hold the same prefix: one is enough to begin with
    lengths = torch.zeros(shape, dtype=torch.int64, device=device)
    return Beams(prefix.repeat_interleave(beam_size, dim=0), log_probs, lengths, lengths.bool())


def _decided(beams: Beams, max_len: int, length_penalty: float) -> bool:
    """Return whether, in every sample, no unfinished hypothesis can still overtake the best finished one."""
    scores = hypothesis_score(beams.log_probs, beams.lengths, length_penalty)
    # Log-probabilities only fall, and max_len has the greatest divisor.
    attainable = hypothesis_score(beams.log_probs, max_len, length_penalty)
    best_ended = scores.masked_fill(~beams.ended, -math.inf).amax(dim=1)
    return bool((best_ended > attainable.masked_fill(beams.ended, -math.inf).amax(dim=1)).all())


def _grow(beams: Beams, logits: Tensor, ending: Ending) -> tuple[Beams, Tensor]:
    """Extend each hypothesis by one token, and say which row each new row continues."""
    batch, beam_size = beams.ended.shape
    (logits,) = upcast_half(logits)
    count = min(beam_size, logits.size(-1))
    step_log_probs, tokens = first_best(without_padding(logits.log_softmax(dim=-1), ending.pad_id), count)
    # An ended hypothesis has one continuation, itself, and goes before all others.
    ended, is_first = beams.ended.unsqueeze(2), torch.arange(count, device=logits.device) == 0
    itself = torch.zeros_like(step_log_probs[0]).masked_fill(~is_first, -math.inf)
    step_log_probs = torch.where(ended, itself, step_log_probs.view(batch, beam_size, count))
    log_probs = (beams.log_probs.unsqueeze(2) + step_log_probs).flatten(1)  # (b, beam_size * count)
    rank = log_probs.masked_fill((ended & is_first).flatten(1), math.inf)
    order = rank.argsort(dim=1, descending=True, stable=True)[:, :beam_size]

    parent = order // count  # (b, beam_size)
    had_ended = beams.ended.gather(1, parent)
    token, ended = ending.close(tokens.view(batch, -1).gather(1, order), had_ended)
    rows = (parent + beam_size * torch.arange(batch, device=parent.device).unsqueeze(1)).flatten()
    token_ids = torch.cat([beams.token_ids[rows], token.view(-1, 1).to(beams.token_ids.dtype)], dim=1)
    log_probs = log_probs.gather(1, order)
    ended = ended & (log_probs > -math.inf)  # an empty place is no hypothesis
    return Beams(token_ids, log_probs, beams.lengths.gather(1, parent) + ~had_ended, ended), rows
