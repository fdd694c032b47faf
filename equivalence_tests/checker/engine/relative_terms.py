"""What queries say to relative positions: each score needs what its own query says.

It takes no convention to see that another query says it. What is right follows from the vectors that the queries meet.
Where each pair has one, the score's own query meets it. Where each distance has one, those lie as skewing takes them:
the last query meets the first ones, in the order of the keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import feature_of, known, numbered, place_of, sources_in, token_of
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.contracts.formula import operand_of
from equivalence_tests.checker.engine.contracts.scores_table import ranks_of
from equivalence_tests.checker.engine.judgement import Judgement
from equivalence_tests.checker.engine.leaving_out import CUTS
from equivalence_tests.checker.engine.names import Part, Product, Run
from equivalence_tests.checker.engine.products import contraction_of
from equivalence_tests.checker.engine.replaying import replayed
from equivalence_tests.checker.engine.same import LOOSE, near
from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.engine.vocabulary import ADDS, CONTRACTIONS, MOVES, MULTIPLIES
from equivalence_tests.checker.engine.watching import Operation, Recorder, Slot

PADDED = "what the rows were padded with"
LONGER = 3  # by so many tokens, another call
OF_KEYS = ("keys", "lengths")  # patterns of masks that hide the same keys from all queries
TO_PAIRS = "Multiply each query by its own vectors: give the queries an axis for the keys, not the other way round."
TO_SKEWING = (
    "Pad one column in front, view the rows as (columns + 1, queries), and leave out the first of these: the last "
    "query then starts with the first vector."
)
TO_ALL = "Take a vector for each of the 2 * len - 1 distances, so that later keys have theirs"
TO_FIRST = "Keep the first columns: once the first row is left out, the vector of key j is met in column j."
NO_MASK_HELPS = ". Hiding later keys is not enough: in a longer call, each distance gets another vector."


@dataclass(eq=False)
class Term:
    """What queries say to relative positions, as it is added to the scores of one part."""

    part: Part  # whose scores
    product: Product  # of queries, on the left, and of the vectors that they meet
    laid: Tensor  # which score each element of what is added belongs to, in its shape
    said: Tensor  # which element of the product is added to each score; -1 for none
    way: list[Operation]  # lays the product out, the last first
    handed: bool  # whether the vectors are made of an argument, whose length may have been guessed

    @cached_property
    def sayer(self) -> Tensor:
        """Which query says what each score gets, by its rank in its sample."""
        own, table = self.part.table, self.product.table
        rank = torch.zeros(int(max(own.query.max(), table.query.max())) + 1, dtype=torch.long)
        rank[own.query] = own.rank_query
        return rank[table.query[self.said]]

    @property
    def of_others(self) -> Tensor:
        """Which scores get what another query says, or what was padded where their own key has a vector."""
        other = (self.said >= 0) & (self.product.table.query[self.said] != self.part.table.query)
        if self.right is None or not any(one.name == "pad" for one in self.way):
            return other
        query, key, _, _ = ranks_of(self.part)
        return other | ((self.said < 0) & (self.right[0] >= 0) & (query == key))

    @property
    def cut(self) -> Operation:
        """What leaves the wrong elements, or else the last that lays them out."""
        cuts = (one for one in self.way if one.name in CUTS and one.inputs[0].value.shape != one.outputs[0].value.shape)
        return next(cuts, self.way[0])

    @cached_property
    def heads(self) -> tuple[Tensor, ...]:
        """The head of each score, and of each element of the product, by where it lies among the features."""
        every = [table.place_of_head[table.head] for table in (self.part.table, self.product.table)]
        return torch.cat(every).unique(return_inverse=True)[1].split([len(one) for one in every])

    @cached_property
    def is_of_pairs(self) -> bool:
        """Whether there is a vector for each pair, so that all that is made for these heads is added."""
        own, other = self.heads
        return torch.equal(self.said.sort().values, torch.isin(other, own).nonzero()[:, 0])

    @property
    def is_of_all_distances(self) -> bool:
        """Whether there are vectors for later keys as well."""
        return int(self.product.table.rank_key.max()) + 1 == 2 * ranks_of(self.part)[3] - 1

    @cached_property
    def right(self) -> tuple[Tensor, Tensor] | None:
        """An element of the product for each score that its query takes part in, and one that its vector does.

        -1 where there is no vector for its distance; None where nothing says which vector is right.
        """
        own, table, (query, key, queries, keys) = self.part.table, self.product.table, ranks_of(self.part)
        sizes = [int(torch.cat(pair).max()) + 1 for pair in ((own.query, table.query), self.heads, (table.rank_key,))]
        made, (head, other) = torch.full(sizes, -1), self.heads
        made[table.query, other, table.rank_key] = torch.arange(len(other))
        if self.is_of_pairs:
            return (made[own.query, head, 0], self.said) if torch.equal(self.sayer, key) else None
        if queries != keys or sizes[2] not in ((2 * keys - 1,) if self.handed else (keys, 2 * keys - 1)):
            return None
        column = keys - 1 - query + key
        place = made[own.query, head, column.clamp_max(sizes[2] - 1)].masked_fill(column >= sizes[2], -1)
        return place, place

    def taken(self, run: Run) -> Operation:
        """Give what takes the vectors out of a longer table, or else the product."""
        side = self.product.contraction.sides[1]
        maker = run.graph.maker(self.product.operation.inputs[side], self.product.operation.index)
        while maker is not None and maker.name in MOVES:
            if maker.name in CUTS and maker.inputs[0].value.numel() > maker.outputs[0].value.numel():
                return maker
            maker = run.graph.maker(maker.inputs[0], maker.index)
        return self.product.operation

    def patch(self, recorder: Recorder, operation: Operation) -> Tensor:
        """Give what each score's own query says."""
        assert self.right is not None
        query, vector = (_met(recorder, self.product, side)[one] for side, one in enumerate(self.right))
        return (query * vector).sum(-1).masked_fill(self.right[0] < 0, 0.0)[self.laid]

    def vectors(self, run: Run) -> Tensor | None:
        """Those of the distances from 0 on, (keys, heads, features); None where they are handed over."""
        if self.right is None or self.handed:
            return None
        own, (query, key, queries, keys) = self.part.table, ranks_of(self.part)
        last = query == queries - 1
        last &= own.query == own.query[last].min()
        order = (key[last] * len(own.heads) + own.head[last]).argsort()
        return _met(run.recorder, self.product, 1)[self.right[1][last][order]].unflatten(0, (keys, -1)).flip(0)


def of_other_queries(situation: Situation) -> list[Departure]:
    """Scores get what their own query says to relative positions."""
    judgement, sizes = situation.judgement, situation.trial.sizes
    if judgement is None or situation.blocked or not any(_terms(judgement)):
        return []
    if not situation.plan.self_attention and sizes.query_len != sizes.key_len:
        even = situation.of_length(sizes.query_len)
        return [] if even is None else of_other_queries(even)
    terms = [*_terms(judgement)]
    wrong = [one for term in terms if (one := _departure(term, situation)) is not None]
    return [reduce(Departure.also, wrong)] if wrong else [*_by_length(terms[0], situation)]


def _departure(term: Term, situation: Situation) -> Departure | None:
    """Say what is wrong in a term; None where nothing is, or nothing says what is right."""
    assert situation.judgement is not None
    parts, (query, key, _, _) = situation.judgement.attention.parts, ranks_of(term.part)
    hidden = dict(zip((part.number for part in parts), situation.judgement.hidden, strict=False))
    if term.right is None or term.part.number not in hidden:
        return None
    seen = term.of_others & ~hidden[term.part.number]
    earlier = seen & (key <= query)
    later, masked = not bool(earlier.any()), not term.is_of_all_distances and _may_hide_later(situation)
    if not bool(seen.any()) or (later and masked and _is_continued(term, situation)):
        return None
    shown = seen if later else earlier
    others = shown & (term.said >= 0)
    at = int((others if bool(others.any()) else shown).nonzero()[0, 0])
    to_all = TO_ALL + (NO_MASK_HELPS if masked else ", or hide later keys.")
    to_later = TO_FIRST if term.is_of_all_distances else to_all
    change = TO_PAIRS if term.is_of_pairs else to_later if later else TO_SKEWING
    other = f"that of query {int(term.sayer[at])}" if term.said[at] >= 0 else PADDED
    facts = {"query": int(query[at]), "key": int(key[at]), "other": other, "change": change}
    patches = {term.way[0].index: term.patch}
    return Departure("positions_of_another_query", "bias", term.cut, facts, patches, seen_in=(situation.found, 0))


def _may_hide_later(situation: Situation) -> bool:
    """Whether there is a mask that may hide later keys."""
    masked = (one for one in (situation, *situation.other_masks) if one.plan.mask_parameter)
    return any(one.understood is None or one.understood.pattern not in OF_KEYS for one in masked)


def _by_length(term: Term, situation: Situation) -> Iterator[Departure]:
    """Say of a distance that a longer call has its vector for another one."""
    have, want = _at_two_lengths(term, situation)
    if have is None or want is None or near(have, want[: len(have)], LOOSE):
        return
    alike = next((apart for apart, one in enumerate(want) if near(have[0], one, LOOSE)), None)
    if alike is not None:
        own = f"In a call of {len(have)} tokens, the vector that a query meets for its own key"
        claim = f"{own} is that of the key {alike} before it in a call of {len(want)}."
        yield Departure("positions_by_length", "bias", term.taken(situation.found.run), {"claim": claim})


def _is_continued(term: Term, situation: Situation) -> bool:
    """Whether distances meet the same vectors in a longer call, as far as that is known."""
    have, want = _at_two_lengths(term, situation)
    return have is None or want is None or near(have, want[: len(have)], LOOSE)


def _at_two_lengths(term: Term, situation: Situation) -> tuple[Tensor | None, Tensor | None]:
    """Give the vectors that distances meet, in this call and in a longer one."""
    longer = situation.of_length(situation.trial.sizes.query_len + LONGER)
    other = next(_terms(longer.judgement), None) if longer is not None and longer.judgement is not None else None
    have = term.vectors(situation.found.run)
    return have, None if other is None or longer is None else other.vectors(longer.found.run)


def _terms(judgement: Judgement) -> Iterator[Term]:
    """List what queries say to relative positions in the scores of each part."""
    run = judgement.attention.run
    for part in judgement.attention.parts:
        for operation, _, _ in part.steps(run):
            pairs = [*zip(operation.inputs, run.names.before[operation.index], strict=True)]
            pairs = pairs if operation.name in ADDS and len(pairs) == 2 else []
            for (slot, own), (other, codes) in (pairs, pairs[::-1]) if pairs else ():
                whole = own is not None and sources_in(own) == [part.number] and bool(known(own).all())
                if whole and slot.value.shape == other.value.shape and sources_in(codes) != [part.number]:
                    yield from _term(part, place_of(own), other, operation, run)  # type: ignore[arg-type]


def _term(part: Part, laid: Tensor, slot: Slot, before: Operation, run: Run) -> Iterator[Term]:
    """Give what is added to scores as a term of relative positions, if queries are multiplied with something there."""
    way, maker = list[Operation](), run.graph.maker(slot, before.index)
    while maker is not None and (maker.name in MOVES or (not way and maker.name in MULTIPLIES)):
        way += [maker] if maker.name in MOVES else []
        taken = max(maker.inputs, key=lambda slot: slot.value.numel(), default=None)
        maker = None if taken is None else run.graph.maker(taken, maker.index)
    product = None if maker is None else _of_queries(maker, part, run)
    if maker is None or product is None:
        return
    way, made = [*way, maker], maker.outputs[0]
    places = torch.arange(1.0, made.value.numel() + 1, dtype=made.value.dtype).view(made.value.shape)
    last = way[0].outputs[0]
    given = places if last is made else replayed(run.recorder, {made.key: places}, maker.index, last, way[0].index)
    if given is not None and given.numel() == laid.numel():
        said = torch.empty(laid.numel(), dtype=torch.long)
        said[laid] = given.view(laid.shape).nan_to_num(0.0, 0.0, 0.0).long() - 1
        origins = run.recorder.named(maker.origins[product.contraction.sides[1]])
        yield Term(part, product, laid, said, way, any(name.startswith("arg:") for name in origins))


def _of_queries(operation: Operation, part: Part, run: Run) -> Product | None:
    """Give an operation as a product of the queries of a part, on the left, and something else."""
    contraction = contraction_of(operation) if operation.name in CONTRACTIONS else None

    def shares(one: Tensor, other: Tensor) -> bool:
        made = [{source.number for source in run.names.made_of(sources_in(codes))} for codes in (one, other)]
        return bool(made[0] & made[1]) and bool(torch.isin(feature_of(one), feature_of(other)).any())

    for laid in () if contraction is None else (contraction, contraction.swapped()):
        codes = run.names.before[operation.index][laid.sides[0]]
        if codes is None or codes.is_complex() or not bool(known(codes).all()):
            continue
        rows, tokens = laid.rows(codes), token_of(laid.rows(codes))
        of_tokens = bool((tokens == tokens[..., :1]).all())
        if of_tokens and shares(rows, part.product.left) and not shares(rows, part.product.right):
            return Product(operation, laid, rows, numbered(laid.right.shape))
    return None


def _met(recorder: Recorder, product: Product, side: int) -> Tensor:
    """Give the vector of one operand for each element of a product."""
    contraction, values = product.contraction, operand_of(recorder, product, side)
    rows = contraction.columns(values)[:, None] if side else contraction.rows(values)[:, :, None]
    every = rows.expand(*contraction.out.shape, -1).flatten(0, 2)
    return every[contraction.out.reshape(-1).argsort()]
