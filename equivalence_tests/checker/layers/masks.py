"""Find out which attentions the masks of a layer or a model reach, and which they should.

A mask that hides one token is handed over, in every form, or one token becomes padding. The run is watched: a key to
which no query gives any weight is hidden in that attention. What changes in that is what the mask does.
"""

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.codes import known, place_of, source_of
from equivalence_tests.checker.engine.given_masks import further_axes
from equivalence_tests.checker.engine.judging import attentions_of
from equivalence_tests.checker.engine.names import Part
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.same import LOOSE, VANISHED, near
from equivalence_tests.checker.reach.masking import MaskForm, mask_forms
from equivalence_tests.checker.reach.model_calls import OF_SOURCE, Given, ModelRun, vocabularies
from equivalence_tests.checker.reach.proposing import code_of, parsed
from equivalence_tests.checker.reach.state import ask, attempt
from equivalence_tests.checker.reach.syntax import assigned_in
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.lines import Frames
from equivalence_tests.checker.reporting.lines import source_of as source_text

OF_TARGET = re.compile(r"tgt|trg|target|look|causal|self|slf|future")
# What distinguishes two masks of one kind: whose tokens they hide.
WHOSE = re.compile(r"^(src|source|mem(ory)?|enc(oder)?|cross|tgt|trg|target|dec(oder)?|self|slf|x|y|key|query)_+")
HIDDEN = 1
USUAL_PADS = (0, 1, 2, 3)
PADDING = "padding"
PADDED = 2  # how much padding is put behind the tokens
CHANGES = "with it, what comes back is not what comes back without it"
SEES_NONE = (
    "it has no key to see, which gives NaN, in torch's own layers on their fast path; padding behind the tokens ran"
)
TARGET = "arg:1"  # how a watched run names it


class Site(NamedTuple):
    """An attention that ran: the path of its module, and whose tokens its keys are."""

    path: str
    reads: str  # "source", "target", or "memory" for tokens of the source where the queries are the target's


Seen = dict[Site, set[tuple[int, int]]]  # which query gives weight to which key
Tokens = tuple[Tensor | None, Tensor | None]  # of the source and of the target


@dataclass(frozen=True)
class Mask:
    """What one mask does."""

    name: str  # the argument, or PADDING
    form: MaskForm | None = None  # the first form that hides a token; None if there is none
    used: bool = False  # whether any form has any effect
    tried: bool = False  # whether any form is taken
    reached: Collection[Site] = ()  # the attentions in which it hides a token
    of_keys: bool = False  # whether it can say of a key alone that it is hidden
    side: str = ""  # "source" or "target", as its name has it; "" where that does not say
    of_others: bool = False  # whether all that it hides in the first attention is made of other tokens
    inverted: Sequence[Site] = ()  # attentions in which padding is all that is seen
    of_queries: bool = False  # whether padding sees nothing, and is seen
    of_samples: bool = False  # whether the padding of one sample changes what comes back for another
    widens: bool = False  # whether the scores get more axes from it in some form

    @property
    def hides(self) -> str:
        """Whose tokens."""
        of_memory = all(site.reads == "memory" for site in self.reached)
        return "tokens of the memory" if of_memory else "the layer's own tokens"

    def of_the_target(self) -> "Mask":
        """Give the mask of the only tokens there were, where these are the target beside another sequence."""
        return replace(self, reached=[x._replace(reads="target") if x.reads == "source" else x for x in self.reached])

    @property
    def meaning(self) -> str:
        """What True says: "look" or "block"; "" where no form with True in it is taken."""
        meaning = self.form.encoding.partition("_")[0] if self.form is not None else ""
        return meaning if meaning in ("look", "block") else ""


@dataclass(frozen=True)
class Masks:
    """All masks of a layer or a model, and the attentions that run in it."""

    masks: list[Mask]
    sites: list[Site]

    def mistakes(self) -> Iterator[tuple[str, str, str]]:
        """Say which masks miss the attentions that they belong to: the mistake, the side or the mask, and the path."""
        inverted = [site for mask in self.masks for site in mask.inverted]
        if any(mask.of_samples for mask in self.masks):
            yield "padding_of_other_samples", "", ""
        if inverted:
            yield "model_padding_inverted", "", inverted[0].path
        if inverted or not self.sites:
            return
        if any(mask.of_queries for mask in self.masks):
            yield "model_padding_on_queries", "", ""
        unused = [mask for mask in self.masks if mask.tried and not mask.used]
        yield from (("mask_never_used", mask.name, "") for mask in unused)
        yield from (("mask_hides_other_entries", mask.name, "") for mask in self.masks if mask.of_others)
        exchanged = [mask for mask in self.masks if any(map(self._exchanged, mask.reached))]
        if exchanged:
            yield "masks_exchanged", exchanged[0].side, ""
        elif not unused:
            yield from (("model_mask_dropped", site.reads, site.path) for site in self._dropped())

    @property
    def opposite(self) -> Sequence[Mask]:
        """Two masks of one kind, by their names, of which one says who may be looked at and the other who may not."""
        pairs = itertools.combinations(self.masks, 2)
        alike = (pair for pair in pairs if len({WHOSE.sub("", mask.name.lower()) for mask in pair}) == 1)
        return next((pair for pair in alike if {mask.meaning for mask in pair} == {"look", "block"}), ())

    def _exchanged(self, site: Site) -> bool:
        """Whether an attention gets the mask of the other sequence and not that of its own."""
        own, other = ("target", "source") if site.reads == "target" else ("source", "target")
        sides = {mask.side for mask in self.masks if site in mask.reached}
        crosses = any(site.reads == "memory" for site in self.sites)
        return crosses and other in sides and not sides & {own, ""}

    def _dropped(self) -> Iterator[Site]:
        """List the first attentions that get no mask of a sequence that has one which can hide any key."""
        for reads, side in (("source", "source"), ("memory", "source"), ("target", "target")):
            given = any(mask.side == side and (mask.of_keys or side == "target") for mask in self.masks)
            reached = {site for mask in self.masks if mask.side in (side, "") for site in mask.reached}
            here = [site for site in self.sites if site.reads == reads]
            if given and here and not reached.intersection(here):
                yield here[0]


def read_masks(module: nn.Module, run: ModelRun, heads: int = 1) -> Masks:
    """Try each mask of a layer or a model by itself, for this many heads at most, and the padding of token ids."""
    whole = run
    if run.target is not None:  # a mask that goes to the wrong attention fits there only on equal lengths
        length = min(run.source.size(1), run.target.size(1))
        run = replace(run, source=run.source[:, :length], target=run.target[:, :length])
    reader = _Reader(module, run, heads, whole)
    masks = [reader.read(name) for name in run.masks]
    if run.kind in ("ids", "memory"):
        masks += [mask for side in ("source", "target") for mask in reader.padding(side)]
    return Masks(masks, list(reader.plain) if masks else [])


def looks_ahead(module: nn.Module, run: ModelRun) -> bool:
    """Whether some attention weighs a key that stands behind its query."""
    return any(key > query for pairs in _Reader(module, run, 1, run).plain.values() for query, key in pairs)


def hides_later_steps(module: nn.Module, run: ModelRun) -> bool:
    """Whether attention is to several tokens of each step of the source, and to none behind its query."""
    pairs = list(set().union(*_Reader(module, run, 1, run).plain.values()))
    keys, steps = 1 + max((key for _, key in pairs), default=0), run.source.size(1)
    return keys > steps and keys % steps == 0 and all(key <= query for query, key in pairs)


def line_that_sets(function: Callable[..., Any], name: str) -> Frames:
    """The last line that sets an argument of a function; none where no line does."""
    nodes, code = parsed(source_text(function)), code_of(function)[1]
    lines = [x.lineno for x in nodes if isinstance(x, ast.Name) and x.id == name and isinstance(x.ctx, ast.Store)]
    return tuple(
        (code.co_filename, code.co_firstlineno + line - 1, code.co_name) for line in sorted(lines)[-1:] if code
    )


def padding_not_run(module: nn.Module, run: ModelRun, hides: bool) -> Iterator[Exercise]:
    """List where padding may stand that a model knows, and is not compared: in front, if it hides it, or behind."""
    reader, pads = _Reader(module, run, 1, run), _pads(module)
    padded = (run.source.index_fill(1, torch.tensor(0), pad) for pad in pads)
    runs = (reader.seen({}, ids, run.target) for ids in padded)
    blind = (not seen or any(all(query for query, _ in pairs) for pairs in seen.values()) for seen in runs)
    if hides and run.target is None and any(blind):
        yield Exercise("padding in front of the tokens", False, SEES_NONE)
    behind = torch.nn.functional.pad(run.source, (0, PADDED), value=pads[0])
    alone, beside = attempt(lambda: [run.call(x, run.target) for x in (run.source, behind)]) or (torch.zeros(0),) * 2
    if alone.dim() == beside.dim() == 3:
        beside = beside[:, : alone.size(1)]
        if alone.shape == beside.shape and not torch.allclose(alone, beside, LOOSE, LOOSE, equal_nan=True):
            yield Exercise("padding behind the tokens", False, f"id {pads[0]}: {CHANGES}")


class _Reader:
    def __init__(self, module: nn.Module, run: ModelRun, heads: int, whole: ModelRun) -> None:
        self.module, self.run, self.heads, self.whole = module, run, heads, whole
        self._outputs: dict[tuple[str, MaskForm, int | None], Tensor | None] = {}
        self.widened = False  # whether a mask has given the scores more axes

    @cached_property
    def plain(self) -> Seen:
        """What is seen without masks."""
        return self.seen({}, self.run.source, self.run.target)

    def seen(self, given: Given, source: Tensor, target: Tensor | None) -> Seen:
        """Run it, watched: which query weighs which key, in each attention; nothing where NaN comes back."""
        found: Seen = defaultdict(set)
        for part, site in self._parts(given, source, target):
            found[site] |= _weighed(part)
        return found

    def _parts(self, given: Given, source: Tensor, target: Tensor | None) -> Iterator[tuple[Part, Site]]:
        recorded = Call(self.run.run, (source, target, dict(given)), module=self.module).run()
        if not bool(recorded.output.isfinite().all()):  # type: ignore[attr-defined]  # a tensor
            return
        attentions = attentions_of(recorded)
        if any(further_axes(attention) for attention in attentions):  # a mask whose batch is no axis of the scores
            self.widened = True
            return
        for part, path in ((part, one.first.place) for one in attentions for part in one.parts):
            made_of = (recorded.recorder.origins_of(slot.tensor) for slot in part.product.operands)
            query, key = (recorded.recorder.named(bits) for bits in made_of)
            reads = "target" if TARGET in key else "memory" if TARGET in query else "source"
            yield part, Site(path, reads)

    def read(self, name: str) -> Mask:
        """Hand a mask over in every form that other lengths have too, or else in any, until one hides a token."""
        self.widened = False
        found = self._read(name, fitting=True)
        found = found if found.reached else self._read(name, fitting=False)
        return replace(found, widens=self.widened)

    def _read(self, name: str, fitting: bool) -> Mask:
        mask = Mask(name, side=_side(name))
        for form in sorted(mask_forms(), key=lambda form: form.pattern == "shared"):  # which fit in more places
            before = self._output(name, form, None)
            after = self._output(name, form, HIDDEN) if before is not None and bool(before.isfinite().all()) else None
            if before is None or after is None or (fitting and not self._fits(name, form)):
                continue
            mask = replace(mask, tried=True)
            if not torch.allclose(before, after, equal_nan=True):
                of_others = mask.of_others or self._hides_others(name, form)
                mask = replace(mask, used=True, reached=self._reached(name, form), of_others=of_others)
            if mask.reached:
                own = {"target" if site.reads == "target" else "source" for site in mask.reached}
                side = mask.side or ("" if len(own) > 1 else own.pop())
                return replace(
                    mask, form=form, of_others=False, of_keys=self._is_of_keys(name, form, mask.reached), side=side
                )
        return mask

    def _given(self, name: str, form: MaskForm, tokens: Tensor, hidden: int | None = None) -> Given:
        may = torch.ones(len(tokens), *2 * [tokens.size(1)], dtype=torch.bool)
        if hidden is not None:
            may[:, :, _place(form)] = False
        return {name: form.build(may, self.heads, torch.get_default_dtype())}

    def _fits(self, name: str, form: MaskForm) -> bool:
        """Whether a form is taken where source and target are of different lengths."""
        run = self.whole
        tokens = run.target if run.target is not None and _side(name) == "target" else run.source
        given = self._given(name, form, tokens)
        return ask(lambda: run.run(run.source, run.target, given)).error is None

    @cached_property
    def _unmasked(self) -> torch.Size:
        """The shape of what comes back without masks."""
        return self.run.call(self.run.source, self.run.target).shape

    def _output(self, name: str, form: MaskForm, hidden: int | None) -> Tensor | None:
        """What comes back; None where a form is not taken, or its queries make tokens that there are not."""
        asked = name, form, hidden
        if asked not in self._outputs:
            given = self._given(name, form, self.run.source, hidden)
            with torch.enable_grad():  # else torch's own layers take a fast path, which may give other shapes
                found = ask(lambda: self.run.run(self.run.source, self.run.target, given).detach())
            taken = found.value is not None and found.value.shape == self._unmasked
            self._outputs[asked] = found.value if taken else None
        return self._outputs[asked]

    def _reached(self, name: str, form: MaskForm) -> list[Site]:
        """The attentions in which the token that is hidden has weight without the mask, and only its own with it."""
        places = self._made_of(_place(form) % self.run.source.size(1))
        seen = self._seen_with(name, form)
        found = list[Site]()
        for site in seen:
            before, after = ({query for query, key in one.get(site, ()) if key in places} for one in (self.plain, seen))
            own = places if site.reads != "memory" and before != places else set[int]()
            if before and not after - own:
                found.append(site)
        return found

    def _seen_with(self, name: str, form: MaskForm) -> Seen:
        return self.seen(self._given(name, form, self.run.source, HIDDEN), self.run.source, self.run.target)

    def _made_of(self, place: int) -> set[int]:
        """The places in the first attention of what is made of a token, where there are more of them than tokens."""
        site = next(iter(self.plain), Site("", ""))
        most = max((key for _, key in self.plain.get(site, ())), default=0)
        if most < self.run.source.size(1) or self.run.kind == "image" or self.run.target is not None:
            return {place}
        changed = self.run.source.clone()
        changed[:, place] = self.run.source[:, place - 1]
        runs = [
            Call(self.run.run, (x, None, {}), module=self.module).run(read=False) for x in (self.run.source, changed)
        ]
        calls = [next((one for one in ran.recorder.calls if one.path == site.path), None) for ran in runs]
        before, after = (call.inputs[0] if call is not None else None for call in calls)
        if before is None or after is None or before.dim() != 3 or before.shape != after.shape:
            return {place}
        return set((before[0] != after[0]).any(-1).nonzero().flatten().tolist()) or {place}

    def _hides_others(self, name: str, form: MaskForm) -> bool:
        """Whether a mask hides only tokens that are not made of the one that it is to hide."""
        own, plain = self._made_of(HIDDEN), self._output(name, form, None)
        if own == {HIDDEN} or plain is None or _place(form) != HIDDEN:
            return False
        alone = self.run.call(self.run.source, None)
        seen, site = self._seen_with(name, form), next(iter(self.plain))
        hidden = {key for _, key in self.plain[site]} - {key for _, key in seen.get(site, self.plain[site])}
        return torch.allclose(plain, alone) and bool(hidden) and hidden.isdisjoint(own)

    def _is_of_keys(self, name: str, form: MaskForm, reached: Collection[Site]) -> bool:
        """Whether a mask that has no axis for queries hides the token in the same attentions."""
        alike = [other for other in mask_forms() if other.pattern == "keys" and other.encoding == form.encoding]
        taken = [other for other in alike if self._output(name, other, HIDDEN) is not None]
        return any(self._reached(name, other) == reached for other in taken)

    def padding(self, side: str) -> Iterator[Mask]:
        """Let tokens become padding: what changes in the attentions is a mask that the model makes."""
        both = {"source": self.run.source, "target": self.run.target}
        ids = both[side]
        if ids is None or ids.is_floating_point():
            return
        both[side] = padded = ids.clone()
        for place, pad in zip(range(HIDDEN, ids.size(1)), _pads(self.module), strict=False):
            padded[:, place] = pad
        if self._is_shared((self.run.source, self.run.target), (both["source"], both["target"])):
            yield Mask(PADDING, side=side, of_samples=True)
            return
        assert both["source"] is not None  # a source there is
        seen = self.seen({}, both["source"], both["target"])
        reached = [site for site, pairs in seen.items() if pairs != self.plain.get(site)]
        inverted = [site for site in reached if site.reads != "target" and (0, 0) not in seen[site]]
        if reached:
            yield Mask(PADDING, used=True, reached=reached, of_keys=True, side=side, inverted=inverted)
        elif side == "source" and any(self._hides_queries(*one) for one in self._parts({}, padded, self.run.target)):
            yield Mask(PADDING, side=side, of_queries=True)

    def _is_shared(self, full: Tokens, padded: Tokens) -> bool:
        """Whether padding in the first sample alone changes the others, of which none or all have some."""
        return self._changed_by_first(full, padded) or self._changed_by_first(padded, full)

    def _changed_by_first(self, given: Tokens, other: Tokens) -> bool:
        """Whether other tokens in the first sample change what comes back for the rest."""
        pairs = zip(given, other, strict=True)
        source, target = (x if x is None or y is None else torch.cat([y[:1], x[1:]]) for x, y in pairs)
        calls = [(x, y) for x, y in (given, (source, target)) if x is not None]
        before, after = attempt(lambda: [self.run.call(*one)[1:] for one in calls]) or (torch.zeros(0),) * 2
        return before.shape == after.shape and not torch.allclose(before, after, LOOSE, LOOSE, equal_nan=True)

    def _hides_queries(self, part: Part, site: Site) -> bool:
        """Whether a mask leaves some queries no key in an attention without order, and others see those tokens."""
        blind, pairs = _blind(part), self.plain.get(site, set())
        return site.reads == "source" and bool(blind) and all((0, query) in pairs for query in blind)


def _weighed(part: Part) -> set[tuple[int, int]]:
    """The places of the queries and the keys that they give weight to."""
    found: set[tuple[int, int]] = set()
    for context in part.contexts:
        weights, names = context.contraction.rows(context.operands[0].value), context.weights
        counts = known(names) & (source_of(names) == part.number) & (weights > VANISHED)
        places = place_of(names[counts])
        found |= set(zip(part.table.rank_query[places].tolist(), part.table.rank_key[places].tolist(), strict=True))
    return found


def _blind(part: Part) -> set[int]:
    """The places of queries that weigh all keys alike, though their scores differ."""
    raw, found = part.product.operation.outputs[0].value.double().reshape(-1), set[int]()
    for context in part.contexts:
        weights, places = context.contraction.rows(context.operands[0].value), place_of(context.weights)
        if not bool(known(context.weights).all()):
            continue
        for row, where in zip(weights.flatten(0, -2), places.flatten(0, -2), strict=True):
            if near(row, row[:1].expand_as(row)) and not near(raw[where], raw[where[:1]].expand_as(row), LOOSE):
                found.add(int(part.table.rank_query[where[0]]))
    return found


def _place(form: MaskForm) -> int:
    return -1 if form.encoding == "lengths" else HIDDEN


def _side(name: str) -> str:
    source, target = OF_SOURCE.search(name.lower()), OF_TARGET.search(name.lower())
    return "" if bool(source) == bool(target) else "source" if source else "target"


def _pads(module: nn.Module) -> list[int]:
    """The ids that may be padding: what the model says, and what is usual."""
    named = [v for m in module.modules() for name, v in vars(m).items() if "pad" in name.lower() and type(v) is int]
    most = min(vocabularies(module))
    return [n for n in dict.fromkeys([*named, *USUAL_PADS]) if 0 <= n < most]


def makes_where_missing(module: nn.Module, mask: str) -> bool:
    """Whether a forward makes a mask by itself where it is given None."""
    asked = (x for x in parsed(source_text(module.forward)) if isinstance(x, ast.If))
    where_missing = (x.body for x in asked if ast.unparse(x.test) == f"{mask} is None")
    return any(ast.unparse(own) == mask for body in where_missing for x in body for own, _ in assigned_in(x))
