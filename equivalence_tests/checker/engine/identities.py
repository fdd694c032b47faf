"""Give every element of every tensor in a recorded run a name: its source tensor, its token and its feature.

The output of a projection gets new names; an operation that only moves data moves the names; a product of two
activations is read as scores or averages by the names of its operands.
Nothing is inferred from the names of variables, modules or axes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import UNKNOWN, known, sources_in, token_of
from equivalence_tests.checker.engine.graph import elements_of
from equivalence_tests.checker.engine.meetings import POOLS, Meetings
from equivalence_tests.checker.engine.names import Identities
from equivalence_tests.checker.engine.vocabulary import (
    ADDS,
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
from equivalence_tests.checker.engine.watching import Operation, Recorder, Slot, storage_of
from equivalence_tests.checker.reach.tracing import tensors_of

JOINS = words("cat stack hstack vstack column_stack")
PRODUCTS = words("matmul bmm einsum")


def identify(
    recorder: Recorder, seeds: Mapping[int, Tensor], data: list[Tensor], patched: Mapping[int, Tensor]
) -> Identities:
    """Name the elements of a recorded run, with its products, averages (contexts) and sources of names.

    ``seeds`` are names by the id of the tensor, ``patched`` those of what patched operations give, by index; ``data``
    are tensors that hold the data of the call, in contrast to weights, masks and positions.
    """

    def followed(learnt: frozenset[int]) -> Identities:
        follower = _Follower(recorder, seeds, data)
        follower.patched, follower.learnt = patched, learnt
        for operation in recorder.operations:
            follower.follow(operation)
        return follower.found

    found = followed(frozenset())
    learnt = _with_learnt_queries(found)
    return followed(learnt) if learnt else found


def _with_learnt_queries(found: "Identities") -> frozenset[int]:
    """Give the indices of the products of keys with queries that are parameters, in a run without other attentions."""
    if found.contexts:
        return frozenset()
    made = set()
    for operation, before in zip(found.operations, found.before, strict=True):
        for codes in before[:1] if operation.name in SOFTMAXES else ():
            sources = [found.sources[number] for number in sources_in(codes)]
            made |= {s.operation.index for s in sources if s.operation is not None and s.operation.name in PRODUCTS}
    return frozenset(made)


class _Follower(Meetings):
    """Goes through the operations in order and keeps the names of all tensors."""

    def follow(self, operation: Operation) -> None:
        """Name the outputs of an operation, and keep the names of its inputs and outputs as they are at this point."""
        before = [self.codes.get(slot.key) for slot in operation.inputs]
        self.found.before.append(before)
        for slot in (*operation.inputs, *operation.outputs):
            self._met(slot.tensor)
        given = self._named(operation, before)
        patched = self.patched.get(operation.index)
        if patched is not None and self.found.sources.keys() >= {*sources_in(patched)}:
            given[:1] = [patched]
        for slot, codes in zip(operation.outputs, given, strict=False):
            if codes is None:
                if not operation.inplace:
                    self.codes.pop(slot.key, None)
            elif codes.shape == slot.value.shape:
                # What may be viewed in another shape must be so in its names too.
                self.codes[slot.key] = codes.contiguous() if slot.tensor.is_contiguous() else codes
        self._spread(operation)
        self.found.after.append([self.codes.get(slot.key) for slot in operation.outputs])

    def _named(self, operation: Operation, before: list[Tensor | None]) -> list[Tensor | None]:
        name = operation.name
        nothing: list[Tensor | None] = [None] * len(operation.outputs)
        if name in INDEXED or name in REORDERS or name in CREATES or not operation.outputs:
            return nothing
        if name in CONTRACTIONS:
            return [self._contracted(operation)]
        if name == "sum" and (found := self._rotated_by_matrices(operation, before)) is not None:
            return [found]
        if name in POOLS or "pool" in name:
            return [self._pooled(operation, before), *nothing[1:]]
        if name in REDUCES or not any(codes is not None for codes in before):
            return nothing
        if name in MOVES or name in ("setitem", "copy"):
            return self._moved(operation)
        return [self._adopted(operation, before, slot) for slot in operation.outputs]

    def _spread(self, operation: Operation) -> None:
        """Mark the outputs of an operation as data of the call, as made from weights alone, or as neither."""
        name, taken = operation.name, operation.inputs
        passed_on = name not in CREATES and any(storage_of(slot.tensor) in self.data for slot in taken)
        if name in INDEXED or passed_on:
            self.data |= {storage_of(slot.tensor) for slot in operation.outputs}
        elif taken and name not in CONTRACTIONS and all(slot.key in self.weights for slot in taken):
            self.weights |= {slot.key for slot in operation.outputs}

    def _moved(self, operation: Operation) -> list[Tensor | None]:
        target, doubled = operation.inputs[0], any(slot.key in self.others for slot in operation.inputs)
        if operation.inplace:
            self._lay_in_memory(target.tensor)
            hides = isinstance(operation.argument(2, "value"), int | float)
            if hides and self._rank(self.codes[target.key]) == 0:
                return [self.codes[target.key]]  # what hides a score stands in its place
        names = {**self.codes, **self.others} if doubled else {}
        if doubled and operation.inplace:
            names[target.key] = self.codes[target.key].clone()
        try:
            moved = self._run_on(operation, self.codes)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return [None] * len(operation.outputs)
        if not doubled:
            return list(moved)
        second = self._run_on(operation, names)
        if operation.inplace:
            moved[0].copy_(self._without_doubles(operation, moved[0], second[0]))
        elif operation.name in JOINS:
            return [self._without_doubles(operation, moved[0], second[0])]
        else:
            self.others.update({slot.key: codes for slot, codes in zip(operation.outputs, second, strict=False)})
        return list(moved)

    def _run_on(self, operation: Operation, names: Mapping[int, Tensor]) -> list[Tensor]:
        """Run an operation that moves data on the names in place of the data."""
        given = [self._stand_in(slot, names) for slot in operation.inputs]
        if operation.name == "pad":
            return [torch.nn.functional.pad(given[0], operation.argument(1, "pad"), value=UNKNOWN)]
        with torch.no_grad():
            result = operation.call(given)
        return given[:1] if operation.inplace else list(tensors_of(result))

    def _stand_in(self, slot: Slot, names: Mapping[int, Tensor]) -> Tensor:
        codes = names.get(slot.key)
        if codes is not None:
            return codes
        if slot.value.is_floating_point() or slot.value.is_complex():
            kind = torch.complex128 if slot.value.is_complex() else torch.float64
            return torch.full(slot.value.shape, UNKNOWN, dtype=kind)
        return slot.value

    def _lay_in_memory(self, tensor: Tensor) -> None:
        """Give a tensor and all views of its storage one new buffer of names, before something is written into it."""
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        kind = torch.complex128 if tensor.is_complex() else torch.float64
        memory = torch.full((count,), UNKNOWN, dtype=kind)
        views = {key: x for key, x in self.siblings[storage_of(tensor)].items() if x.dtype == tensor.dtype}
        for key, x in views.items():
            if key in self.codes:
                memory[elements_of(x)] = self.codes[key].reshape(-1)
        for key, x in views.items():
            self.codes[key] = memory.as_strided(x.shape, x.stride(), x.storage_offset())

    def _without_doubles(self, operation: Operation, first: Tensor, second: Tensor) -> Tensor:
        """Where the same name would occur twice in a joined or written row, give the later element its other name."""
        if first.is_complex():
            return first
        laid = [slot for slot in operation.inputs if slot.value.is_floating_point()]
        pieces = {x.key: torch.full(x.value.shape, float(i), dtype=torch.float64) for i, x in enumerate(laid)}
        piece = self._run_on(operation, pieces)[0].reshape(-1)
        flat, other = first.reshape(-1), second.reshape(-1)
        _, place, count = flat.unique(return_inverse=True, return_counts=True)
        earliest = torch.full((len(count),), torch.inf, dtype=torch.float64).scatter_reduce(0, place, piece, "amin")
        later = (count[place] > 1) & (piece > earliest[place]) & known(flat) & known(other)
        return torch.where(later, other, flat).view(first.shape)

    def _adopted(self, operation: Operation, before: list[Tensor | None], slot: Slot) -> Tensor | None:
        """Names of the output of an operation that moves nothing, such as arithmetic, a norm or a softmax."""
        shape = slot.value.shape
        taken = before[:1] if operation.name in CASTS else before
        fitted = [(place, _fitted(operation, codes, shape)) for place, codes in enumerate(taken) if codes is not None]
        pairs = [(place, codes) for place, codes in fitted if codes is not None]
        fitting = [(place, codes) for place, codes in pairs if codes.is_complex() == slot.value.is_complex()]
        if not fitting:
            return None
        if operation.inplace and fitting[0][0] > 0:
            return fitting[0][1].clone()
        fitting.sort(key=lambda item: (before[item[0]].shape != shape, self._rank(item[1])))  # type: ignore[union-attr]
        place, codes = fitting[0]
        if taken[place].shape != shape and self._is_repeated_over_tokens(operation, taken, shape):  # type: ignore[union-attr]
            return None
        rest = [other for _, other in fitting[1:] if not torch.equal(other, codes)]
        if self._rank(codes) == 0 or codes.is_complex():
            return codes
        named, second = self._mixed(operation, slot, place, codes, rest), self.others.get(operation.inputs[place].key)
        if named is codes and second is not None and second.shape == shape:
            self.others.setdefault(slot.key, second)
        return named

    def _is_repeated_over_tokens(self, operation: Operation, taken: list[Tensor | None], shape: torch.Size) -> bool:
        """Whether what has names is repeated over tokens that have none yet, as a vector of each sample is."""
        others = zip(operation.inputs, operation.origins, taken, strict=False)
        return any(x.value.shape == shape and bits & self.arguments and codes is None for x, bits, codes in others)

    def _mixed(self, operation: Operation, slot: Slot, place: int, codes: Tensor, rest: list[Tensor]) -> Tensor:
        """Names of an elementwise result of several tensors of tokens, or of one and a parameter."""
        sources = set(sources_in(codes))
        for other in rest:
            if set(sources_in(other)) & sources:
                self.others[slot.key] = other
                return _by_small_matrices(codes, other)
        if rest:
            same = torch.equal(token_of(rest[0]), token_of(codes))
            kind = "gated" if operation.name == "mul" else "added"
            return self._retag(kind, operation, slot, codes, rest) if same else codes
        if operation.name in NORMS:
            return self._retag("normed", operation, slot, codes, [])
        pairs = enumerate(zip(operation.origins, operation.inputs, strict=True))
        extra = [bits for i, (bits, slot) in pairs if i != place and storage_of(slot.tensor) not in self.data]
        if any(bits & self.parameters for bits in extra):
            if operation.name in ADDS | {"lerp", "addcmul"}:
                return self._retag("added", operation, slot, codes, [])
            if operation.name == "mul" and not self._by_token(operation, place, codes):
                return self._retag("gain", operation, slot, codes, [])
        return codes

    def _by_token(self, operation: Operation, place: int, codes: Tensor) -> bool:
        """Whether a factor differs from token to token."""
        token, others = token_of(codes), [slot.value for i, slot in enumerate(operation.inputs) if i != place]
        axes = {axis for x in others for axis in range(-min(x.dim(), token.dim()), 0) if x.size(axis) > 1}
        return any(bool((token != token.select(axis, 0).unsqueeze(axis)).any()) for axis in axes)


def _by_small_matrices(codes: Tensor, other: Tensor) -> Tensor:
    """Names of a sum of two tensors: the first ones; of a 2 x 2 matrix times a pair, one name for each of its rows."""
    alike = codes.size(-1) == 2 and all(bool((x == x[..., :1]).all()) for x in (codes, other))
    if not alike or bool(torch.isin(codes, other).any()) or not torch.equal(token_of(codes), token_of(other)):
        return codes
    return torch.stack([codes[..., 0], other[..., 1]], -1)


def _fitted(operation: Operation, codes: Tensor, shape: torch.Size) -> Tensor | None:
    if codes.shape == shape:
        return codes
    if operation.name not in ELEMENTWISE or codes.dim() > len(shape):
        return None
    try:
        return codes.expand(shape).clone()
    except RuntimeError:
        return None
