"""The arguments of RotaryEmbedding; torch.nn has none, so the examples run that of scratch."""

import torch

import scratch
from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.explain.entry import LANGUAGE_MODEL, ROTARY, Explanation
from scratch import RotaryEmbedding, rotary
from scratch.decoder_only import DecoderOnlyTransformer

__all__ = ["EXPLANATIONS"]

PAIRS = """\
adjacent   features 0 1 2 3 4 5     halves   features 0 1 2 3 4 5
           pairs    a a b b c c              pairs    a b c a b c"""


def turned() -> None:
    x = torch.tensor([1.0, 0.0]).expand(4, 2)  # 4 tokens, one pair of features
    print(scratch.RotaryEmbedding(head_dim=2)(x))


def slower_and_slower() -> None:
    for base in (100.0, 10000.0):
        embedding = scratch.RotaryEmbedding(8, base=base)
        print(f"base={base}:", embedding.frequencies)


def paired() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])[None]
    for pairing in ("adjacent", "halves"):
        embedding = scratch.RotaryEmbedding(4, pairing=pairing)
        print(f"{pairing}:", embedding(x, torch.tensor([1]))[0])


def squeezed() -> None:
    for scaling in (None, scratch.LinearScaling(4.0), scratch.NTKScaling(4.0)):
        embedding = scratch.RotaryEmbedding(8, scaling=scaling)
        print(embedding.frequencies, type(scaling).__name__)


def on_a_device() -> None:
    embedding = scratch.RotaryEmbedding(8, device="meta")  # a shape, no memory
    print(embedding.frequencies.device, tuple(embedding.frequencies.shape))


def at_positions() -> None:
    q, k = torch.randn(2, 1, 8)
    embedding = scratch.RotaryEmbedding(8)
    for positions in (torch.tensor([5]), torch.tensor([9])):
        score = embedding(q, positions) @ embedding(k, positions - 2).mT
        print(f"2 apart, from {positions.item()} on: {score.item():.3f}")


def of_a_model() -> None:
    scaling = scratch.Llama3Scaling(8.0, original_max_len=8192)
    sizes = 11, 8, 2, 1  # vocab_size, d_model, nhead, num_layers
    model = scratch.DecoderOnlyTransformer(
        *sizes,
        rotary_base=500000.0,
        pairing="halves",
        rotary_scaling=scaling,
    )
    print(model.get_submodule("layers.0.self_attn.rotary"))


FREQUENCIES = Place(rotary.rotary_frequencies, "return 1 / base")
OF_A_MODEL = (Place(DecoderOnlyTransformer.__init__, "rotary = self.rotary_class("),)

EXPLANATIONS = (
    Explanation(
        "head_dim",
        (ROTARY,),
        "The number of features of each head, which form pairs: it is even. Each pair is rotated by an angle of its "
        "own.",
        (FREQUENCIES,),
        turned,
    ),
    Explanation(
        "base",
        (ROTARY,),
        "How slowly the slowest pair rotates. From one position to the next the first pair rotates by 1, and pair i by "
        "base^(-2i / head_dim). Models for long texts take a large base.",
        (FREQUENCIES,),
        slower_and_slower,
    ),
    Explanation(
        "pairing",
        (ROTARY,),
        "Which features form a pair. The paper and Meta's Llama pair neighbours, GPT-NeoX and the Llama of "
        "transformers pair "
        "the two halves. Weights only work with the pairing that they were trained with; adjacent_to_halves converts "
        "them.",
        (Place(RotaryEmbedding._rotate, "rotate ="),),
        paired,
        PAIRS,
    ),
    Explanation(
        "scaling",
        (ROTARY,),
        "How positions beyond those of the training are read. LinearScaling squeezes all pairs alike, the others "
        "spare those "
        "that rotate fast: NTKScaling, YaRNScaling and Llama3Scaling.",
        (Place(RotaryEmbedding._frequencies, "return self.scaling("),),
        squeezed,
    ),
    Explanation(
        "device",
        (ROTARY,),
        "Where the frequencies are. They stay in float64 whatever the module is cast to.",
        (Place(RotaryEmbedding.__init__, "register_buffer"),),
        on_a_device,
    ),
    Explanation(
        "x",
        (ROTARY,),
        "Queries or keys, (..., len, head_dim). Values are not rotated: only the scores should depend on positions.",
        (Place(RotaryEmbedding.forward, "return self._rotate"),),
        turned,
    ),
    Explanation(
        "positions",
        (ROTARY,),
        "The position of each token; counted from 0 if not given. A score depends only on how far apart its two tokens "
        "are, which is why a cache can keep rotated keys.",
        (Place(rotary.rotary_angles, "return positions"),),
        at_positions,
    ),
    Explanation(
        "rotary_base",
        (LANGUAGE_MODEL,),
        "The base of the rotary positions. All layers share one embedding.",
        OF_A_MODEL,
        of_a_model,
    ),
    Explanation(
        "pairing",
        (LANGUAGE_MODEL,),
        "Which features are rotated together: adjacent or halves. It has to be that of the weights.",
        OF_A_MODEL,
        of_a_model,
        PAIRS,
    ),
    Explanation(
        "rotary_scaling",
        (LANGUAGE_MODEL,),
        "How positions beyond those of the training are read. None treats them like all others.",
        OF_A_MODEL,
        of_a_model,
    ),
)
