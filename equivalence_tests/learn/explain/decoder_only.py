"""The arguments of DecoderOnlyTransformer that its layers do not have, and those of its ``generate``."""

from functools import partial

import torch

from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.explain.entry import LANGUAGE_MODEL, Explanation
from scratch import DecoderOnlyTransformer, decoding

__all__ = ["EXPLANATIONS"]

OWNER = (LANGUAGE_MODEL,)


def built() -> None:
    vocab_size, num_layers = 11, 3
    model = DecoderOnlyTransformer(vocab_size, 16, 8, num_layers)
    logits = model(torch.tensor([[5, 3, 7]]))
    print(len(model.layers), "layers, logits:", tuple(logits.shape))


def capped() -> None:
    ids, sizes = torch.tensor([[5, 3, 7]]), (11, 8, 2, 1)
    for logit_soft_cap in (None, 0.1):
        torch.manual_seed(0)
        model = DecoderOnlyTransformer(*sizes, logit_soft_cap=logit_soft_cap)
        greatest = model(ids).abs().max().item()
        print(f"logit_soft_cap={logit_soft_cap}: greatest logit {greatest:.2g}")


def scaled_embeddings() -> None:
    sizes = 999, 64, 2, 1
    for on in (False, True):
        model = DecoderOnlyTransformer(*sizes, scale_embeddings=on)
        model(torch.tensor([[5, 3, 7]]))
        spread, scale = model.embedding.weight.std().item(), model.embedding_scale
        print(f"{spread:.3f} * {scale:.0f} = {spread * scale:.1f}")


def tied() -> None:
    model = DecoderOnlyTransformer(11, 8, 2, 1, tie_weights=True)
    print("one tensor:", model.projection.weight is model.embedding.weight)


def padded() -> None:
    model = DecoderOnlyTransformer(11, 8, 2, 1, pad_id=0)
    alone = model(torch.tensor([[5, 3, 7]]))
    beside = model(torch.tensor([[0, 0, 5, 3, 7]]))[:, 2:]
    print("padding changes nothing:", torch.allclose(alone, beside, atol=1e-6))


def ended() -> None:
    torch.manual_seed(3)
    model = DecoderOnlyTransformer(4, 8, 2, 1, pad_id=0, end_id=1)
    prompt_ids = torch.tensor([[2], [3]])
    print(model.generate(prompt_ids, max_len=8, temperature=1.0))


def cached() -> None:
    model = DecoderOnlyTransformer(11, 8, 2, 2)
    token_ids, cache = torch.tensor([[5, 3, 7, 4]]), model.new_cache()
    model(token_ids[:, :3], cache=cache)
    new = model(token_ids, cache=cache)  # the whole text again: one token is new
    again = model(token_ids)[:, 3:]
    print(tuple(new.shape), torch.allclose(new, again, atol=1e-6))


def drawn() -> None:
    model = DecoderOnlyTransformer(11, 8, 2, 2)
    prompt_ids = torch.tensor([[5, 3, 7]])
    print("likeliest:", model.generate(prompt_ids, max_len=6))
    draw = partial(model.generate, prompt_ids, max_len=6, temperature=0.7)
    generator = torch.Generator().manual_seed(0)
    print("top_k=3:", draw(top_k=3, generator=generator))
    print("top_p=0.5:", draw(top_p=0.5, generator=generator))


READ = Place(DecoderOnlyTransformer._read, "x = self.embedding(")
DRAWN = Place(decoding.Sampling.draw, "probabilities =")

EXPLANATIONS = (
    Explanation(
        "vocab_size",
        OWNER,
        "The number of tokens. It is the height of the embedding, and the width of the logits.",
        (Place(DecoderOnlyTransformer.__init__, "self.embedding ="),),
        built,
    ),
    Explanation(
        "num_layers",
        OWNER,
        "The number of layers. Each is initialised separately, and none is a copy of another.",
        (Place(DecoderOnlyTransformer.__init__, "self.layers ="),),
        built,
    ),
    Explanation(
        "logit_soft_cap",
        OWNER,
        "Keeps logits between -logit_soft_cap and logit_soft_cap by a tanh. Gemma 2 has it.",
        (Place(DecoderOnlyTransformer._logits, "torch.tanh"),),
        capped,
    ),
    Explanation(
        "scale_embeddings",
        OWNER,
        "Multiplies embeddings by sqrt(d_model), as the paper and Gemma do. They are drawn smaller by the same "
        "factor, so that what enters the first layer has a spread of 1 in either case.",
        (READ, Place(DecoderOnlyTransformer.__init__, "nn.init.normal_")),
        scaled_embeddings,
    ),
    Explanation(
        "tie_weights",
        OWNER,
        "Lets the last projection share its weights with the embedding. One tensor then stands for both.",
        (Place(DecoderOnlyTransformer.__init__, "self.projection.weight ="),),
        tied,
    ),
    Explanation(
        "pad_id",
        OWNER,
        "The token that fills up shorter rows, on the left. Nobody looks at it. Rotary positions make the place where "
        "a text "
        "begins unimportant.",
        (Place(DecoderOnlyTransformer._read, "masks.from_token_ids"),),
        padded,
    ),
    Explanation(
        "end_id",
        OWNER,
        "The token that ends a text. generate fills the rest of the row with pad_id, and stops when all rows have "
        "ended.",
        (
            Place(decoding.Ending.close, "token = token.masked_fill"),
            Place(decoding.Ending.close, "return token, ended |"),
        ),
        ended,
    ),
    Explanation(
        "token_ids",
        OWNER,
        "The text as token ids, (batch, len). With a cache it is still the whole text so far, and only what is "
        "new is computed.",
        (READ,),
        cached,
    ),
    Explanation(
        "cache",
        OWNER,
        "What earlier calls on the beginning of this text have stored, from new_cache(). The logits are those of the "
        "new tokens.",
        (Place(DecoderOnlyTransformer._read, "earlier_len ="),),
        cached,
    ),
    Explanation(
        "prompt_ids",
        OWNER,
        "What each row starts with, (batch, prompt_len). Shorter prompts are padded on the left, so that all end "
        "together.",
        (Place(DecoderOnlyTransformer.generate, "cache = self.new_cache()"),),
        drawn,
    ),
    Explanation(
        "max_len",
        OWNER,
        "The greatest number of tokens that are generated. The prompt does not count.",
        (Place(decoding.sample_decode, "token_ids = torch.cat"),),
        drawn,
    ),
    Explanation(
        "temperature",
        OWNER,
        "How boldly tokens are drawn. 0 takes the likeliest; logits are divided by it otherwise, so that below 1 "
        "likely tokens "
        "become likelier still.",
        (DRAWN,),
        drawn,
    ),
    Explanation(
        "top_k",
        OWNER,
        "Draws among this many of the likeliest tokens. The others get a probability of 0.",
        (Place(decoding.keep_likeliest, "logits.topk"),),
        drawn,
    ),
    Explanation(
        "top_p",
        OWNER,
        "Draws among the fewest of the likeliest tokens whose probabilities add up to this. It comes after top_k.",
        (Place(decoding.keep_likeliest, "enough = probabilities.cumsum"),),
        drawn,
    ),
    Explanation(
        "generator",
        OWNER,
        "Where the random numbers come from. With the same seed the same tokens are drawn.",
        (Place(decoding.Sampling.draw, "torch.multinomial"),),
        drawn,
    ),
)
