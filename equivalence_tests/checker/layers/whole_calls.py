"""The calls in which a layer, a stack or a model is compared as a whole: what its forward is given, at many sizes."""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.running import Call, inputs_of
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.layers.masks import Mask
from equivalence_tests.checker.reach.masking import draw_masks
from equivalence_tests.checker.reach.model_calls import FIRST_ID, Given, ModelRun
from equivalence_tests.checker.reach.state import ask

BATCHES = (2, 3)


@dataclass(frozen=True)
class Sizes:
    """How many samples and tokens a call has."""

    batch: int
    source: int | None = None  # tokens of the source; None for as many as were drawn at first
    target: int | None = None


def bound(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Give arguments by the names of a forward's signature."""
    signature = inspect.signature(module.forward)
    packed = [x.name for x in signature.parameters.values() if x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    found = dict(signature.bind(*args, **kwargs).arguments)
    if any(found.get(name) for name in packed):
        raise UnreadError("its forward takes arguments without names of their own")
    return {name: x for name, x in found.items() if name not in packed}


@dataclass(frozen=True)
class Calls:
    """The ways in which the whole is called."""

    module: nn.Module
    run: ModelRun
    heads: int = 1  # how many heads a mask may be repeated for
    masks: Sequence[Mask] = ()  # the masks that it is known to take, each with its form

    def recorded(self, place: int, masked: bool) -> Call:
        """Give the first or the second of two calls of different sizes, from which the program is read."""
        return self.drawn(self.sizes[place], 3 + place, [mask.name for mask in self.masks if masked])

    @cached_property
    def sizes(self) -> tuple[Sizes, Sizes]:
        """Two sizes, in as many axes apart as the code allows."""
        own, other = BATCHES
        tokens, target = self.run.source.size(1), None if self.run.target is None else self.run.target.size(1)
        first = Sizes(own, tokens, target)
        if self.run.kind == "image":
            return Sizes(own), Sizes(other)
        for longer in (2, -1):  # another step than that of the batch distinguishes the two
            second = Sizes(other, tokens + longer, None if target is None else target + 2 * longer)
            if self._runs(second):
                return first, second
        return first, Sizes(other, tokens, target)

    def _runs(self, sizes: Sizes) -> bool:
        """Return whether the code takes these lengths; it may take no others than its own."""
        return ask(self.drawn(sizes, 3).returned).error is None

    def compared(self, masked: bool) -> Iterator[tuple[str, Call, int | None]]:
        """List the calls in which wholes are compared: what each is, the call, and the seed of new parameters."""
        first, second = self.sizes
        yield "fresh inputs", self.drawn(first, 21), 7
        yield "parameters drawn anew, other sizes", self.drawn(second, 22), 8
        if second.source != first.source:
            longer = replace(first, source=(first.source or 0) + 1)
            if self._runs(longer):
                yield "longer sequences", self.drawn(longer, 23), None
        names = [mask.name for mask in self.masks] if masked else []
        alone = [[name] for name in names] if len(names) > 1 else []
        for seed, given in enumerate([names, *alone] if names else [], 24):
            yield self.with_masks(given), self.drawn(first, seed, given), 9

    @staticmethod
    def with_masks(names: Sequence[str]) -> str:
        """Say which masks a call hands over."""
        return f"a call with {', '.join(names)}"

    def drawn(self, sizes: Sizes, seed: int, masks: Collection[str] = ()) -> Call:
        """Draw one call, in which the masks of these names are handed over."""
        generator = torch.Generator().manual_seed(seed)
        source = _like(self.run.source, sizes.batch, sizes.source, generator)
        target = self.run.target
        target = None if target is None else _like(target, sizes.batch, sizes.target, generator)
        given = self._masks(source, target, seed, masks)
        seen = inputs_of({"": self.module}, lambda: ask(lambda: self.run.run(source, target, given)))
        if not seen:
            raise UnreadError("its forward is not what is called")
        return Call(self.module, (), bound(self.module, *seen[0][1:]))

    def hidden(self, place: int) -> dict[str, Tensor]:
        """Give the tokens, (batch, len), that each mask hides from all queries in the first or the second call."""
        sizes = self.sizes[place]
        source = sizes.source or self.run.source.size(1)
        may = {
            mask.name: self._may_attend(mask, sizes.batch, source, sizes.target or source, 3 + place)
            for mask in self.masks
        }
        return {name: ~x.any(1) for name, x in may.items()}

    @staticmethod
    def _may_attend(mask: Mask, batch: int, source: int, target: int, seed: int) -> Tensor:
        """Draw which query may look at which key, as far as a mask can say it."""
        assert mask.form is not None  # it is known what it means
        reads = {site.reads for site in mask.reached}
        queries, keys = source if "source" in reads else target, target if reads == {"target"} else source
        return draw_masks(mask.form.pattern, batch, queries, keys, seed)

    def _masks(self, source: Tensor, target: Tensor | None, seed: int, names: Collection[str]) -> Given:
        """Draw the masks that are required, and those of these names."""
        known = inspect.signature(self.module.forward).parameters
        required = {name for name, x in known.items() if x.default is x.empty}
        length = (source if target is None else target).size(1)
        given: dict[str, Tensor] = {}
        for mask in (mask for mask in self.masks if mask.name in names or mask.name in required):
            assert mask.form is not None  # it is known what it means
            may = self._may_attend(mask, len(source), source.size(1), length, seed)
            given[mask.name] = mask.form.build(may, self.heads, torch.get_default_dtype())
        return given


def _like(x: Tensor, batch: int, tokens: int | None, generator: torch.Generator) -> Tensor:
    """Draw what may stand in the place of a tensor, with other sizes."""
    shape = (batch, tokens or x.size(1), *x.shape[2:])
    if x.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(x.dtype)
    return torch.randint(min(FIRST_ID, int(x.max())), int(x.max()) + 1, shape, generator=generator, dtype=x.dtype)
