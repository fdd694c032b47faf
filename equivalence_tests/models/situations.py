"""The situations in which the models of transformers are run, each as the lines that a person would type.

A reproducer prints the very lines that the judge ran. Texts have 11 tokens, fewer than a window, except where
the window is what is asked about.
"""

import itertools
from collections.abc import Iterator

from equivalence_tests.models.library import Situation

__all__ = ["LONG", "WINDOW", "listed_situations"]

WINDOW, SHORT, LONG = 13, 11, 23
PADDINGS = {"right padding": "mask[1, 7:] = 0", "left padding": "mask[0, :1] = mask[1, :4] = 0"}
CACHES = {
    "dynamic": "cache = transformers.DynamicCache(config=model.config)",
    "static": "cache = transformers.StaticCache(config=model.config, max_cache_len={length})",
}
BACKWARD = "(output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()"
GENERATE = (
    "made = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0, ",
    "return_dict_in_generate=True, output_logits=True{more})",
)
READ = "tokens, output = made.sequences, torch.stack(made.logits)"
PACKED = "positions = torch.tensor([[*range(4), *range(7)], [*range(6), *range(5)]])"
PIXELS = "pixels = torch.randn(2, 3, 32, 32)"


def listed_situations() -> list[Situation]:
    """List all, the plainest first."""
    return [*_decoders(), *_texts("encoder"), *_texts("encoder-decoder"), *_vision()]


def _ids(length: int = SHORT) -> str:
    return f"ids = torch.randint(13, 50, (2, {length}))"


def _masked(padding: str, length: int = SHORT) -> tuple[str, ...]:
    return (_ids(length), f"mask = torch.ones(2, {length}, dtype=torch.long)", PADDINGS[padding])


def _decoders() -> Iterator[Situation]:
    kinds = ("decoder",)
    run = "output = model(input_ids=ids).logits"
    yield Situation("no mask", "no mask", (_ids(), run), kinds, quick=True, unmasked=True)
    for padding in PADDINGS:
        lines = (*_masked(padding), "output = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]")
        yield Situation(padding, "padding", lines, kinds, quick=padding.startswith("left"), unmasked=True)
    packed = "output = model(input_ids=ids, position_ids=positions, use_cache=False).logits"
    yield Situation("packed rows", "packed rows", (_ids(), PACKED, packed), kinds, quick=True, unmasked=True)
    window = "text longer than the window"
    yield Situation(window, "window", (_ids(LONG), run), kinds, windowed=True, quick=True)
    yield from _decoding(kinds)
    yield from _generating(kinds)
    yield from _training(kinds, "input_ids=ids, attention_mask=mask", ".logits[mask.bool()]")


def _decoding(kinds: tuple[str, ...]) -> Iterator[Situation]:
    step = "part = model(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True).logits"
    masked = step.replace("past", "attention_mask=mask[:, :end], past")
    for name, cache in CACHES.items():
        for what, first, call in (
            ("", (_ids(),), step),
            (", left padding", _masked("left padding"), masked),
            (", past the window", (_ids(LONG),), step),
        ):
            windowed = "window" in what
            ends = (0, 17, 18, 19, 22, 23) if windowed else (0, 5, 6, 7, 10, 11)
            rows = "part[mask[:, start:end].bool()]" if "padding" in what else "part.flatten(0, 1)"
            lines = (
                *first,
                cache.format(length=LONG + 1 if windowed else 16),
                "output = []",
                f"for start, end in {list(itertools.pairwise(ends))}:",
                f"    {call}",
                f"    output.append({rows})",
                "output = torch.cat(output)",
            )
            quick = (name == "static") == ("padding" in what)
            yield Situation(
                f"decoding, {name} cache{what}", f"{name} cache", lines, kinds, windowed, quick, unmasked=not what
            )


def _generating(kinds: tuple[str, ...]) -> Iterator[Situation]:
    for cache, more in (("dynamic", ""), ("static", ", cache_implementation='static', disable_compile=True")):
        inputs = "inputs = {'input_ids': ids, 'attention_mask': mask}"
        lines = (*_masked("left padding"), inputs, "".join(GENERATE).format(more=more), READ)
        yield Situation(f"generate, {cache} cache", "generate", lines, kinds, quick=cache == "dynamic")


def _training(kinds: tuple[str, ...], given: str, taken: str, quick: bool = True) -> Iterator[Situation]:
    first = (PIXELS,) if "pixels" in given else _masked("right padding")
    if "target" in given:
        first = (*first, "target = torch.randint(13, 50, (2, 7))")
    run = f"output = model({given}){taken}"
    yield Situation("training", "training", (*first, "model.train()", run, BACKWARD), kinds, quick=quick)
    yield Situation("training with dropout", "training", (*first, "model.train()", run), kinds, dropout=0.5)


def _texts(kind: str) -> Iterator[Situation]:
    """Give those of models that read a text both ways."""
    kinds, pair = (kind,), kind == "encoder-decoder"
    target = ("target = torch.randint(13, 50, (2, 7))",) if pair else ()
    given = "input_ids=ids, decoder_input_ids=target" if pair else "input_ids=ids"
    taken = ".logits" if pair else ".last_hidden_state"
    yield Situation(
        "no mask", "no mask", (_ids(), *target, f"output = model({given}){taken}"), kinds, quick=True, unmasked=True
    )
    rows = taken if pair else f"{taken}[mask.bool()]"
    for padding in PADDINGS:
        lines = (*_masked(padding), *target, f"output = model({given}, attention_mask=mask){rows}")
        yield Situation(padding, "padding", lines, kinds, quick=padding.startswith("left"), unmasked=True)
    if pair:
        yield _decoding_a_pair(target)
        yield from _generating(kinds)
    else:
        window = f"output = model({given}){taken}"
        yield Situation("text longer than the window", "window", (_ids(LONG), window), kinds, windowed=True, quick=True)
    yield from _training(kinds, f"{given}, attention_mask=mask", rows)


def _decoding_a_pair(target: tuple[str, ...]) -> Situation:
    lines = (
        *_masked("left padding"),
        *target,
        "encoded = model.get_encoder()(input_ids=ids, attention_mask=mask)",
        "cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())",
        "given = {'encoder_outputs': encoded, 'attention_mask': mask, 'past_key_values': cache, 'use_cache': True}",
        "parts = target.split([3, 1, 1, 2], 1)",
        "output = torch.cat([model(decoder_input_ids=part, **given).logits for part in parts], 1)",
    )
    return Situation("decoding, dynamic cache", "dynamic cache", lines, ("encoder-decoder",), quick=True, unmasked=True)


def _vision() -> Iterator[Situation]:
    kinds = ("vision",)
    run = "output = model(pixel_values=pixels).last_hidden_state"
    yield Situation("no mask", "no mask", (PIXELS, run), kinds, quick=True, unmasked=True)
    yield from _training(kinds, "pixel_values=pixels", ".last_hidden_state", quick=False)
