"""A library of two tiny models that look their attention up by a name: what the judge needs, without transformers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.models.library import Architecture, Registration, Situation, Wrap
from scratch import validation

__all__ = ["StandIns", "bool_mask"]

WINDOW, SLOTS = 4, 9
IDS = "ids = torch.randint(7, (2, 6))"
LEFT = "padding = torch.ones(2, 6, dtype=torch.bool); padding[0, :1] = padding[1, :3] = False"
RIGHT = LEFT.replace("padding[0, :1] = padding[1, :3]", "padding[1, 4:]")
DECODED = (
    "output = torch.cat([model(part, cache=cache{more}) for part in ids.split([3, 1, 2], 1)], 1)",
    "cache = {{'slots': {slots}}}",
)
LOSS = "(output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()"


def bool_mask(visible: Tensor, plain: bool) -> Tensor | None:
    """Give True where a query may look; None where nothing or only causality hides a key, as sdpa's has it."""
    return None if plain else visible


def added_mask(visible: Tensor, plain: bool) -> Tensor:
    """Give 0 where a query may look, and the least number elsewhere."""
    del plain  # it is written out all the same
    return torch.where(visible, 0.0, torch.finfo(torch.float64).min)


def own_attention(
    module: "Attention", query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend by the textbook, with all that the stand-ins hand over."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * options["scaling"] + options.get("position_bias", 0.0)
    if options.get("softcap"):
        scores = options["softcap"] * (scores / options["softcap"]).tanh()
    scores = scores if mask is None else scores + mask
    if "s_aux" in options:
        sinks = options["s_aux"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (nn.functional.dropout(weights, options["dropout"], module.training) @ value).transpose(1, 2), None


@dataclass
class Choice:
    """What a model uses: its attention and the mask function that goes with it."""

    attend: Callable[..., Any] = own_attention
    mask: Callable[..., Any] | None = added_mask


class Attention(nn.Module):
    """Four heads on two, with the arguments of an architecture beside the mask."""

    def __init__(self, is_causal: bool, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.is_causal, self.options, self.choice = is_causal, options, Choice()
        self.q, self.kv, self.out = nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x: Tensor, padding: Tensor | None, cache: dict[Any, Any] | None) -> Tensor:
        """Attend to the tokens, and to those in a cache."""
        query = self.q(x).unflatten(-1, (4, 5)).transpose(1, 2)
        key, value = self.kv(x).unflatten(-1, (2, 2, 5)).permute(2, 0, 3, 1, 4)
        start = 0
        if cache is not None:
            start, key, value = _cached(cache, self, key, value)
        options = {"scaling": 5**-0.5, "dropout": 0.0, **self.options}
        if "position_bias" in options:
            options["position_bias"] = options["position_bias"][..., : key.shape[2]]
        mask = self._mask(x, padding, start, key.shape[2])
        output, _ = self.choice.attend(self, query, key, value, mask, **options)
        return self.out(output.reshape(*x.shape))

    def _mask(self, x: Tensor, padding: Tensor | None, start: int, keys: int) -> Tensor | None:
        if self.choice.mask is None:
            return None
        places, columns = torch.arange(x.shape[1])[:, None] + start, torch.arange(keys)
        visible = (columns <= places) if self.is_causal else columns >= torch.zeros_like(places)
        if "sliding_window" in self.options:
            visible = visible & (columns > places - self.options["sliding_window"])
        visible = visible.expand(x.shape[0], 1, -1, -1)
        if padding is not None:
            visible = visible & padding[:, None, None, :]
        windowed = keys > self.options.get("sliding_window", math.inf)
        fits = keys == x.shape[1] or (x.shape[1] == 1 and keys == start + 1)
        return self.choice.mask(visible, padding is None and not windowed and fits)


def _cached(cache: dict[Any, Any], owner: Any, key: Tensor, value: Tensor) -> tuple[int, Tensor, Tensor]:
    """Put keys and values into a cache that grows, or into the slots of one that does not."""
    start = cache.get((owner, "length"), 0)
    end = start + key.shape[2]
    held = cache.setdefault(owner, [x.new_zeros(*x.shape[:2], SLOTS, x.shape[3]) for x in (key, value)])
    for slots, x in zip(held, (key, value), strict=True):
        slots[:, :, start:end] = x
    cache[owner, "length"] = end
    keys, values = held if cache["slots"] else [x[:, :, :end] for x in held]
    return start, keys, values


class Model(nn.Module):
    """Two layers of attention."""

    def __init__(self, kind: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 20)
        self.layers = nn.ModuleList(Attention(kind == "decoder", options) for _ in range(2))

    def forward(self, ids: Tensor, padding: Tensor | None = None, cache: dict[Any, Any] | None = None) -> Tensor:
        """Give the states of the tokens."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x, padding, cache)
        return x


def _situations() -> Iterator[Situation]:
    both = ("decoder", "encoder")
    yield Situation("no mask", "no mask", (IDS, "output = model(ids)"), both, quick=True, unmasked=True)
    for name, padding in (("right padding", RIGHT), ("left padding", LEFT)):
        lines = (IDS, padding, "output = model(ids, padding)[padding]")
        yield Situation(name, "padding", lines, both, unmasked=True)
    for name, slots in (("dynamic", False), ("static", True)):
        call, cache = (line.format(more="", slots=slots) for line in DECODED)
        yield Situation(f"{name} cache", "caches", (IDS, cache, call), ("decoder",), unmasked=True)
    yield Situation("training", "training", (IDS, "model.train()", "output = model(ids)", LOSS), both)
    dropped = (IDS, "model.train()", "output = model(ids)")
    yield Situation("training with dropout", "training", dropped, both, dropout=0.5)


def _build(kind: str, options: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = Model(kind, options)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    return model.eval()


class StandIns:
    """Decoders with and without extras, and an encoder."""

    situations: Sequence[Situation] = tuple(_situations())
    masks: Mapping[str, Callable[..., Any]] = {"added": added_mask, "bool": bool_mask}
    names: Mapping[str, Any] = {}

    def architectures(self, names: Sequence[str] = ()) -> list[Architecture]:
        """List them, the plainest first."""
        extras: dict[str, dict[str, Any]] = {
            "plain": {},
            "windowed": {"sliding_window": WINDOW},
            "capped": {"softcap": 2.0, "scaling": 0.7},
            "with sinks": {"s_aux": torch.linspace(-1, 1, 4, dtype=torch.float64)},
            "biased": {"position_bias": torch.linspace(-1, 1, SLOTS, dtype=torch.float64)},
        }
        listed = [Architecture(name, "decoder", partial(_build, "decoder", one)) for name, one in extras.items()]
        listed.append(Architecture("encoder", "encoder", partial(_build, "encoder", {})))
        for name in names:
            validation.check_choice("architecture", name, tuple(one.name for one in listed))
        return [one for one in listed if not names or one.name in names]

    def registered(self, function: Callable[..., Any]) -> Registration | None:
        """Know of no function."""
        del function
        return None

    @contextmanager
    def in_use(self, model: nn.Module, registration: Registration | None, wrap: Wrap) -> Iterator[None]:
        """Let a model use a function for its attention, or its own."""
        one = registration
        choice = Choice(wrap(own_attention)) if one is None else Choice(wrap(one.function), one.mask)
        layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
        for layer in layers:
            layer.choice = choice
        try:
            yield
        finally:
            for layer in layers:
                layer.choice = Choice()
