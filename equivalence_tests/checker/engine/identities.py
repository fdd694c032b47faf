"""Follow every element of a recorded run by its name.

What a weight makes of a token gets new names; what only moves data moves the names; a product of two activations is
read by the names on both of its sides. Nothing is told from the names of variables, modules or axes.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import (
    FEATURES,
    UNKNOWN,
    coded,
    feature_of,
    known,
    place_of,
    retagged,
    score_codes,
    source_of,
    sources_in,
    token_of,
    unified,
)
from equivalence_tests.checker.engine.names import Context, Identities, Product, ScoreTable, Source
from equivalence_tests.checker.engine.products import Contraction, contraction_of, contraction_of_sum
from equivalence_tests.checker.engine.vocabulary import (
    CASTS,
    CONTRACTIONS,
    CREATES,
    ELEMENTWISE,
    INDEXED,
    MOVES,
    NORMS,
    REDUCES,
    REORDERS,
    SOFTMAXES,
    words,
)
from equivalence_tests.checker.engine.watching import Operation, Recorder, Slot, _storage

__all__ = ["identify"]

MULTIPLIES = words("mul __mul__ __rmul__ multiply mul_ __imul__")
ADDS = words("add __add__ __radd__ __iadd__ add_ sub __sub__ __isub__ sub_ __rsub__ lerp addcmul")
JOINS = words("cat concat concatenate stack hstack vstack column_stack")
POOLS = words("max amax mean min amin")
PRODUCTS = words("matmul __matmul__ bmm einsum")


def identify(
    recorder: Recorder,
    seeds: Mapping[int, Tensor] | None = None,
    data: Iterable[Tensor] = (),
    patched: Mapping[int, Tensor] | None = None,
) -> Identities:
    """Name the elements of a recorded run.

    Args:
        recorder: Holds the run.
        seeds: Names that are known from outside, by the id of the tensor.
        data: Tensors that hold the data of the call, in contrast to weights, masks and positions.
        patched: The names of what patched operations give, by index.
    """
    data, learnt = list(data), frozenset[int]()
    for _ in range(2):
        follower = _Follower(recorder, dict(seeds or {}), data)
        follower.patched, follower.learnt = dict(patched or {}), learnt
        for operation in recorder.operations:
            follower.follow(operation)
        learnt = _with_learnt_queries(follower.found)
        if not learnt:
            break
    return follower.found


def _with_learnt_queries(found: "Identities") -> frozenset[int]:
    """Products with a parameter whose result is weighed by a softmax, where no other product is: queries are learnt."""
    if found.contexts:
        return frozenset()
    made = set()
    for operation, before in zip(found.operations, found.before, strict=True):
        for codes in before[:1] if operation.name in SOFTMAXES else ():
            sources = [] if codes is None or codes.is_complex() else [found.sources[n] for n in sources_in(codes)]
            made |= {s.operation.index for s in sources if s.operation is not None and s.operation.name in PRODUCTS}
    return frozenset(made)


class _Follower:
    """Walks through the operations and keeps the names of all tensors."""

    def __init__(self, recorder: Recorder, seeds: dict[int, Tensor], data: Iterable[Tensor]) -> None:
        self.found = Identities(recorder.operations)
        self.codes: dict[int, Tensor] = {}
        self.others: dict[int, Tensor] = {}  # second names of what two elements were added to
        self.data = {_storage(tensor) for tensor in data}
        self.weights = {
            slot.key
            for name, slot in zip(recorder.names, recorder.given, strict=False)
            if name.startswith(("param:", "buffer:"))
        }
        self.patched: dict[int, Tensor] = {}
        self.learnt: frozenset[int] = frozenset()  # products of keys with queries that are parameters
        self.parameters = sum(1 << i for i, name in enumerate(recorder.names) if name.startswith("param:"))
        self.makers: dict[int, Operation] = {}
        self.siblings: dict[int, dict[int, Tensor]] = {}
        self.contexts: dict[tuple[Any, ...], Source] = {}
        self.bases: dict[int, int] = {}  # the first token of each tensor that had no names
        self.rows: dict[tuple[int, int], int] = {}  # the token of each row of such a tensor, by where it begins
        self.tokens = 0
        for slot in recorder.given:
            self._met(slot.tensor)
            if slot.key in seeds:
                source = self._new("input", None, slot, seeds[slot.key])
                self.codes[slot.key] = source.codes
                self.tokens = max(self.tokens, int(token_of(source.codes).max()) + 1)

    # ------------------------------------------------------------------------------------------ one operation
    def follow(self, operation: Operation) -> None:
        """Name what an operation gives."""
        before = [self._snapshot(slot) for slot in operation.inputs]
        self.found.before.append(before)
        for slot in (*operation.inputs, *operation.outputs):
            self._met(slot.tensor)
        given = self._named(operation, before)
        if operation.index in self.patched:
            given[:1] = [self.patched[operation.index]]
        for slot, codes in zip(operation.outputs, given, strict=False):
            if codes is None:
                if not operation.inplace:
                    self.codes.pop(slot.key, None)
            elif codes.shape == slot.value.shape:
                self.codes[slot.key] = codes
        self._spread(operation)
        self.found.after.append([self._snapshot(slot) for slot in operation.outputs])

    def _named(self, operation: Operation, before: list[Tensor | None]) -> list[Tensor | None]:
        name = operation.name
        nothing: list[Tensor | None] = [None] * len(operation.outputs)
        if name in INDEXED or name in REORDERS or name in CREATES or not operation.outputs:
            return nothing
        if name in CONTRACTIONS:
            return [self._contracted(operation, before)]
        for read in (self._summed, self._turned, self._heads_joined) if name == "sum" else ():
            if (found := read(operation, before)) is not None:
                return [found]
        if name in POOLS or "pool" in name:
            return [self._pooled(operation, before), *nothing[1:]]
        if name in REDUCES or not any(codes is not None for codes in before):
            return nothing
        if name in MOVES or name in ("__setitem__", "copy_"):
            return self._moved(operation)
        return [self._adopted(operation, before, slot) for slot in operation.outputs]

    def _spread(self, operation: Operation) -> None:
        """Say of what an operation gives whether it is data or a weight."""
        isdata = operation.name in INDEXED or (
            operation.name not in CREATES and any(_storage(slot.tensor) in self.data for slot in operation.inputs)
        )
        isweight = (
            not isdata
            and operation.name not in CONTRACTIONS
            and bool(operation.inputs)
            and all(slot.key in self.weights for slot in operation.inputs)
        )
        for slot in operation.outputs:
            self.makers[slot.key] = operation
            if isdata:
                self.data.add(_storage(slot.tensor))
            if isweight:
                self.weights.add(slot.key)

    def _met(self, tensor: Tensor) -> None:
        self.siblings.setdefault(_storage(tensor), {})[id(tensor)] = tensor

    def _snapshot(self, slot: Slot) -> Tensor | None:
        codes = self.codes.get(slot.key)
        shared = codes is not None and len(self.siblings.get(_storage(slot.tensor), ())) > 1
        return codes.clone() if codes is not None and shared else codes

    def _new(
        self, kind: str, operation: Operation | None, slot: Slot, codes: Tensor, parents: tuple[int, ...] = ()
    ) -> Source:
        number = len(self.found.sources) + 1
        source = Source(number, kind, operation, slot, retagged(codes, number), parents)
        self.found.sources[number] = source
        return source

    # ------------------------------------------------------------------------------------------ data that moves
    def _moved(self, operation: Operation) -> list[Tensor | None]:
        if operation.inplace and operation.inputs[0].key not in self.codes:
            self._name_memory(operation.inputs[0].tensor)
        own = self.codes.get(operation.inputs[0].key) if operation.inplace else None
        if own is not None and self._rank(own) == 0 and isinstance(operation.argument(2, "value"), int | float):
            return [own]  # what hides a score stands in its place
        try:
            moved = self._run_on(operation, self.codes)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return [None] * len(operation.outputs)
        if operation.inplace:
            self._write_without_doubles(operation, moved[0])
        second = self._second_names(operation)
        if second is not None and len(moved) == 1:
            return [self._without_doubles(operation, moved[0], second)]
        return list(moved)

    def _run_on(self, operation: Operation, names: Mapping[int, Tensor]) -> list[Tensor]:
        """Run what moves data on the names of the data."""
        given = [self._stand_in(slot, names) for slot in operation.inputs]
        if operation.name == "pad":
            return [torch.nn.functional.pad(given[0], operation.argument(1, "pad"), value=UNKNOWN)]
        if operation.inplace:
            target = self.codes[operation.inputs[0].key]
            with torch.no_grad():
                operation.call([target, *given[1:]])
            return [target]
        result = operation.call(given)
        return [x for x in (result if isinstance(result, tuple | list) else [result]) if isinstance(x, Tensor)]

    def _stand_in(self, slot: Slot, names: Mapping[int, Tensor]) -> Tensor:
        codes = names.get(slot.key)
        if codes is not None:
            return codes
        if slot.value.is_floating_point() or slot.value.is_complex():
            kind = torch.complex128 if slot.value.is_complex() else torch.float64
            return torch.full(slot.value.shape, UNKNOWN, dtype=kind)
        return slot.value

    def _name_memory(self, tensor: Tensor) -> None:
        """Give the memory behind a tensor names that say nothing yet, shared by all that look at it."""
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        memory = torch.full((count,), UNKNOWN, dtype=torch.float64)
        for key, other in self.siblings.get(_storage(tensor), {}).items():
            if key not in self.codes and other.dtype == tensor.dtype:
                self.codes[key] = memory.as_strided(other.shape, other.stride(), other.storage_offset())

    def _second_names(self, operation: Operation) -> Tensor | None:
        if not any(slot.key in self.others for slot in operation.inputs):
            return None
        if operation.inplace:
            return None
        try:
            second = self._run_on(operation, {**self.codes, **self.others})
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
        for slot, codes in zip(operation.outputs, second, strict=False):
            if operation.name not in JOINS:
                self.others[slot.key] = codes
        return second[0]

    def _without_doubles(self, operation: Operation, first: Tensor, second: Tensor) -> Tensor:
        """Where a name stands twice in what was put together, take the second name of the later piece."""
        if operation.name not in JOINS or first.is_complex():
            return first
        pieces = {
            slot.key: torch.full(slot.value.shape, float(i), dtype=torch.float64)
            for i, slot in enumerate(operation.inputs)
        }
        piece = self._run_on(operation, pieces)[0].reshape(-1)
        flat, other = first.reshape(-1), second.reshape(-1)
        _, place, count = flat.unique(return_inverse=True, return_counts=True)
        earliest = torch.full((len(count),), torch.inf, dtype=torch.float64).scatter_reduce(0, place, piece, "amin")
        later = (count[place] > 1) & (piece > earliest[place]) & known(flat) & (other != flat)
        return torch.where(later, other, flat).view(first.shape)

    def _write_without_doubles(self, operation: Operation, names: Tensor) -> None:
        """Where a name that is written stands elsewhere already, as in halves that turn, write its second name."""
        if names.is_complex() or not any(slot.key in self.others for slot in operation.inputs[1:]):
            return
        rest = operation.inputs[1:]
        with torch.no_grad():
            written, second = torch.zeros_like(names), names.clone()
            operation.call(
                [written, *(torch.ones(s.value.shape, dtype=names.dtype) for s in rest[:1]), *_values(rest[1:])]
            )
            operation.call([second, *(self._stand_in(s, {**self.codes, **self.others}) for s in rest)])
            new = written.bool()
            double = new & torch.isin(names, names[~new]) & known(second)
            names.copy_(torch.where(double, second, names))

    # ------------------------------------------------------------------------------------------ element by element
    def _adopted(self, operation: Operation, before: list[Tensor | None], slot: Slot) -> Tensor | None:
        """Names that pass through an operation which works on each element, or on a whole axis."""
        shape = slot.value.shape
        taken = before[:1] if operation.name in CASTS else before
        fitting = [
            (place, codes)
            for place, given in enumerate(taken)
            if given is not None and (codes := _fitted(operation, given, shape)) is not None
        ]
        fitting = [(i, codes) for i, codes in fitting if codes.is_complex() == slot.value.is_complex()]
        if not fitting:
            return None
        if operation.inplace:
            own = next((codes for i, codes in fitting if i == 0), None)
            if own is None:
                return fitting[0][1].clone()
            fitting = [(0, own), *(item for item in fitting if item[0] != 0)]
        fitting.sort(key=lambda item: (before[item[0]].shape != shape, self._rank(item[1])))  # type: ignore[union-attr]
        place, codes = fitting[0]
        rest = [other for _, other in fitting[1:] if not torch.equal(other, codes)]
        if self._rank(codes) == 0 or codes.is_complex():
            return codes
        return self._mixed(operation, slot, place, codes, rest)

    def _mixed(self, operation: Operation, slot: Slot, place: int, codes: Tensor, rest: list[Tensor]) -> Tensor:
        """Names of what was made from several tensors of tokens, or from one and a weight."""
        sources = set(sources_in(codes))
        for other in rest:
            if set(sources_in(other)) & sources:
                self.others[slot.key] = other
                return codes
        if rest:
            same = torch.equal(token_of(rest[0]), token_of(codes))
            kind = "gated" if operation.name in MULTIPLIES else "added"
            return self._retag(kind, operation, slot, codes, rest) if same else codes
        if operation.name in NORMS:
            return self._retag("normed", operation, slot, codes, [])
        extra = [
            bits
            for i, (bits, taken) in enumerate(zip(operation.origins, operation.inputs, strict=True))
            if i != place and _storage(taken.tensor) not in self.data
        ]
        if any(bits & self.parameters for bits in extra):
            if operation.name in ADDS:
                return self._retag("added", operation, slot, codes, [])
            if operation.name in MULTIPLIES and not self._by_token(operation, place, codes):
                return self._retag("gain", operation, slot, codes, [])
        return codes

    def _by_token(self, operation: Operation, place: int, codes: Tensor) -> bool:
        """Whether what multiplies has an axis along which tokens lie."""
        token = token_of(codes)
        for i, slot in enumerate(operation.inputs):
            if i == place:
                continue
            for back in range(1, slot.value.dim() + 1):
                if slot.value.size(-back) > 1 and back <= token.dim():
                    lead = token.select(-back, 0).unsqueeze(-back)
                    if not bool((token == lead).all()):
                        return True
        return False

    def _retag(self, kind: str, operation: Operation, slot: Slot, codes: Tensor, rest: list[Tensor]) -> Tensor:
        parents = {x for names in (codes, *rest) for x in sources_in(names)}
        return self._new(kind, operation, slot, unified(codes), tuple(sorted(parents))).codes

    def _rank(self, codes: Tensor) -> int:
        """Scores come before what else has a name, what has a name everywhere before what has one here and there."""
        if codes.is_complex():
            return 2
        sources = source_of(codes)
        if any(self.found.sources[int(x)].kind == "score" for x in sources.unique() if x > 0):
            return 0
        return 2 if bool((sources > 0).all()) else 3

    # ------------------------------------------------------------------------------------------ products
    def _isweight(self, slot: Slot) -> bool:
        return slot.key in self.weights

    def _isdata(self, slot: Slot) -> bool:
        return _storage(slot.tensor) in self.data or slot.key in self.codes

    def _contracted(self, operation: Operation, before: list[Tensor | None]) -> Tensor | None:
        contraction = contraction_of(operation)
        if contraction is None:
            return self._convolved(operation, before) if operation.name.startswith("conv") else None
        slots = [operation.inputs[side] for side in contraction.sides]
        if operation.index in self.learnt:
            return self._multiplied(operation, contraction)
        heavy = [self._isweight(slot) for slot in slots]
        if heavy[0] and not heavy[1]:
            contraction, slots, heavy = contraction.swapped(), slots[::-1], heavy[::-1]
        if heavy[1]:
            live = self._isdata(slots[0]) or operation.name == "linear"
            return self._projected(operation, contraction) if live else None
        if not all(self._isdata(slot) for slot in slots):
            return self._projected(operation, self._with_data_left(contraction, slots))
        return self._multiplied(operation, contraction)

    def _with_data_left(self, contraction: Contraction, slots: list[Slot]) -> Contraction | None:
        """A product of data with what is neither data nor a weight, such as a learnt query that was projected."""
        if not any(self._isdata(slot) for slot in slots):
            return None
        return contraction if self._isdata(slots[0]) else contraction.swapped()

    def _projected(self, operation: Operation, contraction: Contraction | None) -> Tensor | None:
        """New names for what a weight makes: the token stays, the feature is the column of the weight.

        Where one weight serves several heads, each takes a part of the token: their columns are numbered on.
        """
        if contraction is None:
            return None
        slot = operation.inputs[contraction.sides[0]]
        codes = self.codes.get(slot.key)
        tokens = None if codes is None or codes.is_complex() else _tokens_of_rows(contraction.rows(codes))
        if tokens is None:
            tokens = self._seeded(contraction, slot, codes)
        elif codes is not None:
            tokens = self._told_apart(tokens, source_of(contraction.rows(codes)[..., 0]), slot.tensor)
        parents = () if codes is None or codes.is_complex() else tuple(sources_in(codes))
        _, column = contraction.right[:, :, 0].unique(return_inverse=True)
        feature = column[:, None, :] + _parts_of_rows(contraction, codes)[:, :, None] * (int(column.max()) + 1)
        names = coded(0, tokens[:, :, None].expand(feature.shape), feature)
        names = contraction.scattered(names) + float(FEATURES) * FEATURES
        return self._new("projection", operation, operation.outputs[0], names, parents).codes

    def _told_apart(self, tokens: Tensor, sources: Tensor, tensor: Tensor) -> Tensor:
        """New numbers for tokens of a second tensor, where two that are put together have tokens of one number."""
        pairs = sources * (tokens.max() + 1) + tokens
        if len(pairs.unique()) == len(tokens.unique()):
            return tokens
        kinds, order = pairs.unique(return_inverse=True)
        return torch.where(sources == sources.min(), tokens, order + self._base(tensor, len(kinds)))

    def _seeded(self, contraction: Contraction, slot: Slot, codes: Tensor | None) -> Tensor:
        """Name the tokens of a tensor by the order in which its rows are stored; beside padding they keep theirs."""
        token = self._rows_in_memory(slot.tensor, contraction.left)
        if codes is not None and not codes.is_complex():
            rows = contraction.rows(codes)
            empty, own = ~known(rows).any(-1), token_of(rows[..., 0])
            if bool((empty | (known(rows) & (token_of(rows) == own[..., None])).all(-1)).all()):
                token = torch.where(empty, token, own)
        names = torch.full((slot.value.numel(),), UNKNOWN, dtype=torch.float64)
        width = torch.arange(contraction.left.size(-1))
        names[contraction.left] = coded(1, token[:, :, None], width)
        names = names.view(slot.value.shape)
        self.codes[slot.key] = self._new("input", None, slot, names).codes
        return token

    def _rows_in_memory(self, tensor: Tensor, places: Tensor) -> Tensor:
        """Number rows in their order, and those of a part of a tensor as the whole tensor has them."""
        starts, token = places[:, :, 0].unique(return_inverse=True)
        base, memory, start = self._base(tensor, len(starts)), _storage(tensor), _memory_of(tensor)[starts]
        apart = start.sort().values.diff()
        if not len(apart) or bool((apart == 0).any()) or tensor.stride(-1) != 1:
            return token + base
        width = int(apart.min())
        first = not any(known == memory for known, _ in self.rows)
        for order, row in enumerate((start // width * width).tolist()):
            if (memory, row) not in self.rows:
                self.rows[memory, row] = base + order if first else self.tokens
                self.tokens += not first
        return torch.tensor([self.rows[memory, row] for row in (start // width * width).tolist()])[token]

    def _base(self, tensor: Tensor, count: int) -> int:
        """The number of the first token of a tensor: its own, but the same for all that look at one memory."""
        place = _storage(tensor)
        if place not in self.bases:
            self.bases[place] = self.tokens
            self.tokens += count
        return self.bases[place]

    def _convolved(self, operation: Operation, before: list[Tensor | None]) -> Tensor | None:
        """Names for what a convolution gives: the token of its place, or new ones where there are fewer places."""
        slot, out = operation.inputs[0], operation.outputs[0].value
        if not self._isdata(slot):
            return None
        codes = before[0]
        weight = operation.inputs[1].value
        batched = out.dim() == weight.dim()
        axis = 1 if batched else 0
        kept = slot.value.shape[axis + 1 :] == out.shape[axis + 1 :]
        if kept and codes is not None and not codes.is_complex():
            token = token_of(codes).select(axis, 0)
        else:
            lead = [size for i, size in enumerate(out.shape) if i != axis]
            count = out.numel() // out.size(axis)
            token = torch.arange(count).view(lead) + self._base(slot.tensor, count)
        feature = torch.arange(out.size(axis)).view([-1 if i == axis else 1 for i in range(out.dim())])
        names = coded(1, token.unsqueeze(axis).expand(out.shape), feature.expand(out.shape))
        parents = () if codes is None or codes.is_complex() else tuple(sources_in(codes))
        return self._new("projection", operation, operation.outputs[0], names, parents).codes

    def _summed(self, operation: Operation, before: list[Tensor | None]) -> Tensor | None:
        """A multiplication that is summed at once is a product."""
        maker = self.makers.get(operation.inputs[0].key) if operation.inputs else None
        if maker is None or maker.name not in MULTIPLIES or len(maker.inputs) != 2 or operation.inplace:
            return None
        names = self.found.before[maker.index]
        wider = all(slot.value.shape != maker.outputs[0].value.shape for slot in maker.inputs)
        if not all(codes is not None and not codes.is_complex() for codes in names) or not wider:
            return None
        contraction = contraction_of_sum(maker, operation)
        return None if contraction is None else self._multiplied(operation, contraction, maker)

    def _heads_joined(self, operation: Operation, before: list[Tensor | None]) -> Tensor | None:
        """Names of sums over heads, each of which a matrix of its own has projected."""
        codes, axis = _over_one_axis(operation, before)
        if codes is None:
            return None
        sources = [self.found.sources[number] for number in sources_in(codes)]
        first = codes.select(axis, 0)
        same_token = bool((token_of(codes) == token_of(first).unsqueeze(axis)).all())
        apart = feature_of(codes) - feature_of(first).unsqueeze(axis)
        whole = all(len(apart.select(axis, i).unique()) == 1 for i in range(codes.size(axis)))
        if [source.kind for source in sources] != ["projection"] or not same_token or not whole:
            return None
        return self._retag("projection", operation, operation.outputs[0], first, [])

    def _pooled(self, operation: Operation, before: list[Tensor | None]) -> Tensor | None:
        """Names of what stands for several tokens: the token of the first of them, or new ones for each place."""
        codes = before[0] if before else None
        if codes is None or codes.is_complex() or self._rank(codes) == 0:
            return None
        if operation.name not in POOLS:
            return self._placed(operation, codes)
        pooled, axis = _over_one_axis(operation, before)
        if pooled is None:
            return None
        first, out = pooled.narrow(axis, 0, 1), operation.outputs[0]
        if not bool((feature_of(pooled) == feature_of(first)).all()) or bool((pooled == first).all()):
            return None
        named = first if out.value.dim() == pooled.dim() else first.squeeze(axis)
        return self._retag("pooled", operation, out, named, [])

    def _placed(self, operation: Operation, codes: Tensor) -> Tensor | None:
        """New tokens, alike for all channels."""
        out = operation.outputs[0].value
        channels = codes.dim() - (2 if "2d" in operation.name else 1) - 1
        feature = feature_of(codes).movedim(channels, -1)
        if (
            channels < 0
            or out.dim() != codes.dim()
            or not bool((feature == feature.reshape(-1, feature.size(-1))[0]).all())
        ):
            return None
        shape = [size for axis, size in enumerate(out.shape) if axis != channels]
        token = torch.arange(math.prod(shape)).view(shape) + self._base(operation.outputs[0].tensor, math.prod(shape))
        own = feature.reshape(-1, feature.size(-1))[0].expand(*shape, -1).movedim(-1, channels)
        named = coded(1, token.unsqueeze(channels).expand(out.shape), own)
        parents = tuple(sources_in(codes))
        return self._new("pooled", operation, operation.outputs[0], named, parents).codes

    def _turned(self, operation: Operation, before: list[Tensor | None]) -> Tensor | None:
        """Names of sums over as many elements as there are sums of them: small matrices that turn parts of a token."""
        codes, axis = _over_one_axis(operation, before)
        if codes is None:
            return None
        summed = codes.movedim(axis, -1).sort(-1).values
        taken = summed.reshape(-1, summed.size(-1))
        of_one_token = bool((token_of(taken) == token_of(taken[:, :1])).all())
        if not of_one_token or len(taken[:, 0].unique()) * taken.size(1) != len(taken):
            return None
        return taken.gather(1, _occurrences(taken[:, 0])[:, None]).view(operation.outputs[0].value.shape)

    def _multiplied(
        self, operation: Operation, contraction: Contraction, factors: Operation | None = None
    ) -> Tensor | None:
        """Read a product of two activations: of queries and keys, or of what comes from scores and values."""
        slots = [(factors or operation).inputs[side] for side in contraction.sides]
        sides = [self._names_at(slot, factors) for slot in slots]
        scores = [side is not None and self._rank(side) == 0 for side in sides]
        if all(scores):
            return None
        if scores[1]:
            contraction, slots, sides = contraction.swapped(), slots[::-1], sides[::-1]
        if sides[0] is None or not any(scores):
            left = self._completed(slots[0], sides[0], contraction.left)
            right = self._completed(slots[1], sides[1], contraction.right)
            rows, columns = contraction.rows(left), contraction.columns(right)
            return self._product(Product(operation, contraction, rows, columns, factors=factors))
        values = contraction.columns(self._completed(slots[1], sides[1], contraction.right.mT))
        return self._context(Context(operation, contraction, contraction.rows(sides[0]), values, factors=factors))

    def _names_at(self, slot: Slot, factors: Operation | None) -> Tensor | None:
        if factors is not None:
            return next(c for s, c in zip(factors.inputs, self.found.before[factors.index], strict=True) if s is slot)
        codes = self.codes.get(slot.key)
        return None if codes is None or codes.is_complex() else codes

    def _product(self, product: Product) -> Tensor | None:
        if _tokens_of_rows(product.left) is None or _tokens_of_rows(product.right) is None:
            if _by_features(product.left) and _by_features(product.right):
                return None
            product.trouble = "one score is made of several tokens"
        slot = product.operation.outputs[0]
        product.source = self._new("score", product.operation, slot, score_codes(1, tuple(slot.value.shape)))
        self.found.products.append(product)
        return product.source.codes

    def _completed(self, slot: Slot, codes: Tensor | None, places: Tensor) -> Tensor:
        """Names for an operand some or all of whose elements have none: rows are tokens, as they lie there."""
        if codes is not None and bool(known(codes).all()):
            return codes
        n, rows, _ = places.shape
        order = torch.arange(n * rows).view(n, rows, 1) + self._base(slot.tensor, n * rows)
        names = torch.full((slot.value.numel(),), UNKNOWN, dtype=torch.float64)
        names[places] = coded(1, order, _features_beside(codes, places))
        given = self._new("given", None, slot, names.view(slot.value.shape))
        if codes is not None:
            return torch.where(known(codes), codes, given.codes)
        self.codes[slot.key] = given.codes
        return given.codes

    def _context(self, context: Context) -> Tensor | None:
        self.found.contexts.append(context)
        read = self._read_context(context)
        if read is None:
            return None
        names, key = read
        shaped = context.contraction.scattered(names) + float(FEATURES) * FEATURES
        if key not in self.contexts:
            self.contexts[key] = self._new("context", context.operation, context.operation.outputs[0], shaped)
        context.source = self.contexts[key]
        context.codes = retagged(shaped, context.source.number)
        if context.operation is not context.source.operation:
            context.source.others.append((context.codes, context.operation.outputs[0]))
        return context.codes

    def _read_context(self, context: Context) -> tuple[Tensor, tuple[Any, ...]] | None:
        """Name what comes out: the query's token, and the feature of the value in its head."""
        product = self._product_of(context)
        columns = _features_of_rows(unified(context.values))  # none where one column holds several features
        if product is None or columns is None:
            return None
        table, weights = ScoreTable(product), context.weights
        has = known(weights)
        place = place_of(weights).clamp_min(0)
        row = table.row[place].masked_fill(~has, -1)
        first = row.amax(-1, keepdim=True)
        if not bool(((row == first) | ~has).all()):  # what is summed belongs to several queries or heads
            return None
        rank = columns.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)
        head = table.place_of_head[table.head_of_row[first.squeeze(-1).clamp_min(0)]]
        token = table.token_of_row[first.squeeze(-1).clamp_min(0)]
        width = int(rank.max()) + 1
        shape = (*head.shape, rank.size(-1))
        combined = head[:, :, None] * width + rank[:, None, :]
        sources = tuple(sources_in(context.values))
        queries = tuple(sources_in(product.left))
        return coded(0, token[:, :, None].expand(shape), combined.expand(shape)), (sources, queries)

    def _product_of(self, context: Context) -> Product | None:
        numbers = context.score_sources
        found = [p for p in self.found.products if p.source is not None and p.source.number in numbers]
        return found[0] if len(found) == 1 else None


def _over_one_axis(operation: Operation, before: list[Tensor | None]) -> tuple[Tensor | None, int]:
    """The names of what is summed, or pooled, over one axis, and which; None where it is not all named, or more."""
    codes, axis = before[0] if before else None, operation.argument(1, "dim", operation.argument(1, "axis"))
    if codes is None or codes.is_complex() or not isinstance(axis, int) or not bool(known(codes).all()):
        return None, 0
    return codes, axis


def _memory_of(tensor: Tensor) -> Tensor:
    """Where each element of a tensor lies in memory, counted in elements."""
    places = [torch.arange(size) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return sum(torch.meshgrid(*places, indexing="ij"), start=torch.tensor(tensor.storage_offset())).reshape(-1)


def _values(slots: Iterable[Slot]) -> list[Tensor]:
    return [slot.value for slot in slots]


def _occurrences(values: Tensor) -> Tensor:
    """How often each value stood before."""
    order = values.argsort(stable=True)
    ordered = values[order]
    counted = torch.arange(len(values)) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(counted).index_copy_(0, order, counted)


def _tokens_of_rows(codes: Tensor) -> Tensor | None:
    """The token of each row; None where rows mix tokens, or have no names."""
    if codes.size(-1) == 0 or not bool(known(codes).all()):
        return None
    token = token_of(codes)
    return token[..., 0] if bool((token == token[..., :1]).all()) else None


def _parts_of_rows(contraction: Contraction, codes: Tensor | None) -> Tensor:
    """Which part of its token each row holds: 0 where all hold the same features."""
    if codes is None or codes.is_complex() or _tokens_of_rows(contraction.rows(codes)) is None:
        return torch.zeros(contraction.left.shape[:2], dtype=torch.long)
    return feature_of(contraction.rows(codes)).amin(-1).unique(return_inverse=True)[1]


def _features_of_rows(codes: Tensor) -> Tensor | None:
    has = known(codes)
    feature = (source_of(codes) * FEATURES + feature_of(codes)).masked_fill(~has, -1)
    lead = feature.amax(-1, keepdim=True)
    return lead.squeeze(-1) if bool(((feature == lead) | ~has).all()) else None


def _features_beside(codes: Tensor | None, places: Tensor) -> Tensor:
    """The features of rows that have none: those of the rows beside them, or their order."""
    plain = torch.arange(places.size(-1))
    if codes is None:
        return plain
    laid = codes.reshape(-1)[places]
    most = feature_of(laid).masked_fill(~known(laid), -1).amax(1, keepdim=True)
    return torch.where(most >= 0, most, plain)


def _by_features(codes: Tensor) -> bool:
    """Whether each row holds one feature of several tokens, and no other row the same one."""
    feature = _features_of_rows(codes) if codes.size(-1) > 1 else None
    return feature is not None and all(len(rows.unique()) == len(rows) for rows in feature)


def _fitted(operation: Operation, codes: Tensor, shape: torch.Size) -> Tensor | None:
    if codes.shape == shape:
        return codes
    if operation.name not in ELEMENTWISE or codes.dim() > len(shape):
        return None
    try:
        return codes.expand(shape).clone()
    except RuntimeError:
        return None
