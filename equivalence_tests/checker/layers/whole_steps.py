"""Follow a run from part to part, and list what no Transformer of torch's has between them."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from equivalence_tests.checker.engine.vocabulary import CREATES, MOVES, NORMS
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.equivalent.expressions import own_norm
from equivalence_tests.checker.equivalent.steps import Step, UnreadError
from equivalence_tests.checker.layers.whole_beside import normalised
from equivalence_tests.checker.layers.whole_parts import OF_POSITIONS, Parts
from equivalence_tests.checker.layers.whole_values import (
    ACTS,
    DROPS,
    FEATURES,
    PASSES,
    POOLS,
    SHAPED,
    Value,
    call_of,
    events_in,
    factor_of,
    is_row,
    lies_in_order,
    meets_features,
    numbers_in,
    places_of,
    projects,
    relaid,
    rounds,
    scaled,
    summed,
    sums_features,
    weighs,
    written_activation,
)
from equivalence_tests.checker.parts.names import kind_of_name
from equivalence_tests.checker.reach.calling import IMAGE
from equivalence_tests.checker.reach.errors import said

NOT_FOLLOWED = (RuntimeError, IndexError, KeyError, ValueError, TypeError, AttributeError)


class Follower(Parts):
    """Follows one run, from part to part."""

    def steps(self, outputs: list[Tensor]) -> list[Step]:
        """List what stands between the parts that is not torch's, each with the evidence that it is intended."""
        try:
            self._follow()
            self._end(outputs)
        except NOT_FOLLOWED as error:
            raise UnreadError(f"its wiring could not be followed ({said(error)})") from error
        returned = [label for x in outputs if id(x) in self.values for label, _ in self.values[id(x)].terms]
        return self.sums.judged(self.calls, self.module, self.kinds, returned, self.conditions.idle)

    def _follow(self) -> None:
        for name, slot in zip(self.recorder.names, self.recorder.given, strict=True):
            kind, _, named = name.partition(":")
            if kind == "arg":
                self.given(named, slot.tensor)
            else:
                self.learnt.setdefault(slot.key, (named, None))
        events = {call.first: call for call in reversed([*events_in(self.recorder, self.module, self.kinds)])}
        place = 0
        while place < len(self.recorder.operations):
            call = events.get(place := self._normalised(place))
            if call is not None:
                self._called(call)
            else:
                self._made(self.recorder.operations[place])
            place = max(place + 1, call.end if call is not None else 0)
            place = self._activated(call.outputs if call is not None else (), place)

    def _normalised(self, place: int) -> int:
        """Take the operations that normalise a series by itself for one; go behind them."""
        given = self.recorder.operations[place].inputs[:1]
        value = self.values.get(given[0].key) if given else None
        if self.series is not None or value is None or self.labels.kind(value) != "given":
            return place
        self.series = normalised(given[0], value.places, self.recorder.operations[place:])
        if self.series is None:
            return place
        made = self.recorder.operations[self.series.end].outputs[0].tensor
        self._new("given", "the normalised series", [value], [made], value.places)
        self.labels.streams.add(self.values[id(made)].terms)
        return self.series.end + 1

    def _activated(self, outputs: Sequence[Tensor], place: int) -> int:
        """Take several operations behind a matrix that make one activation of what it gave for one; go behind them."""
        value = next((self.values[id(x)] for x in outputs if id(x) in self.values), None)
        if value is None or self.labels.kind(value) not in ("linear", "embedding"):
            return place
        found = written_activation(outputs[0], self.recorder.operations[place:])
        if found is None:
            return place
        name, operation = found
        self._new("activation", name, [value], [operation.outputs[0].tensor], value.places)
        return operation.index + 1

    def _made(self, operation: Operation) -> None:
        name, inputs = operation.name, [slot.tensor for slot in operation.inputs]
        data = [self.values[id(x)] for x in inputs if id(x) in self.values]
        if name in SHAPED:  # the second is there for its shape alone
            data = data[: int(id(inputs[0]) in self.values)]
        made = [slot.tensor for slot in operation.outputs]
        if self.series is not None and self.series.follow(operation, data):
            self._give(made, data[0]) if data else None
            return
        if name in CREATES or (not data and self.conditions.follow(inputs, made)):
            self.conditions.moved(operation)
            return
        if not data:
            self._of_constants(operation)
            self.hidden.follow(operation)
        elif len(data) == 1 and lies_in_order(data[0].places) and (by := self.hidden.blanked(operation)):
            self.sums.say("the tokens that are hidden are set to 0", "project", f"{by} says that they are no tokens")
            self._give(made, data[0])
        elif label := self.conditions.changed(operation, data, self.sums):
            self._give([operation.outputs[0].tensor], Value(((label, 1.0),), data[0].places))
        elif name in PASSES and len(data) == 1 and id(inputs[0]) in self.values and not rounds(operation):
            self._moved(operation, data[0])
        elif name in ("add", "sub", "rsub") and len(operation.inputs) == 2:
            self._added(operation, -1.0 if name == "sub" else 1.0)
        elif name in ("mul", "div"):
            self._multiplied(operation, data)
        elif name in ACTS:
            self._acted(name, data[0], operation.outputs[0].tensor)
        else:
            self._by_name(operation, data)

    def _by_name(self, operation: Operation, data: list[Value]) -> None:
        """What one of torch's functions makes in the place of a part, or puts together."""
        name, inputs = operation.name, [slot.tensor for slot in operation.inputs]
        if name == "linear" or (name in ("matmul", "einsum") and id(inputs[-1]) in self.learnt and projects(operation)):
            self._by_function("linear", operation, data)
        elif name in NORMS:
            self._by_function("layer_norm", operation, data)
        elif name == "embedding" or (name == "getitem" and len(inputs) == 2 and id(inputs[0]) in self.learnt):
            table, ids = inputs if name == "getitem" else inputs[1::-1]
            self._looked_up(self._names(table), ids, operation.outputs[0].tensor)
        elif self.labels.kind(data[0]) == "compared":
            if name != "sum" or not sums_features(operation):
                self._strange(operation, data)
                return
            self._new("compared", name, data, [operation.outputs[0].tensor], data[0].places[..., 0])
        elif name in POOLS and data[0].places.dim() > operation.outputs[0].value.dim():
            self._pooled(name, data[0], operation)
        elif name in ("softmax", "log_softmax") and self.labels.kind(data[0]) == "linear" and weighs(operation):
            self._function("softmax", name, data, operation)
        elif name in ("matmul", "bmm") and (items := self.labels.items_in(data)) and meets_features(*data):
            self._scored(items, data, operation)
        elif name == "stack" and len(data) == len(inputs) > 1 and data[0].places.dim() == 3:
            self._side_by_side(operation, data)
        elif name == "cat" and len(data) == len(inputs) > 1 and self._are_of_one_token(operation, data):
            self.sums.say("embeddings of one token are joined", "project", "each is an embedding of that token")
            self._function("embedding", "the joined embeddings", data, operation)
        elif name == "cat" and len(data) == 1 and all(id(x) in self.learnt or id(x) in self.values for x in inputs):
            self._put_before(operation, data)
        elif not operation.outputs[0].value.is_floating_point():
            self._of_ids(operation, data)
        else:
            self._strange(operation, data)

    def _are_of_one_token(self, operation: Operation, data: list[Value]) -> bool:
        """Whether the features of embeddings are joined, token by token."""
        widths, rows = [x.value.size(-1) for x in operation.inputs], [x.places[..., :1] // FEATURES for x in data]
        joined = operation.outputs[0].value.size(-1) == sum(widths) and lies_in_order(data[0].places)
        alike = all(x.shape == rows[0].shape and torch.equal(x, rows[0]) for x in rows)
        return joined and alike and {self.labels.kind(x) for x in data} == {"embedding"}

    def _put_before(self, operation: Operation, data: list[Value]) -> None:
        if not lies_in_order(data[0].places):
            self.sums.say("the tokens that something is prepended to are in another order", "project")
        self.sums.used(data[0], operation.name)
        out, starts = operation.outputs[0], itertools.accumulate((x.value.size(1) for x in operation.inputs), initial=0)
        label = self._new("tokens", "what is prepended to the tokens", data, [out.tensor], places_of(out.value.shape))
        for slot, start in zip(operation.inputs, starts, strict=False):
            own = range(start, start + slot.value.size(1)) if id(slot.tensor) in self.learnt else ()
            self.sums.put[label] = self.sums.put.get(label, set()) | {*own}

    def _side_by_side(self, operation: Operation, data: list[Value]) -> None:
        """Number the tokens of several sequences step by step, so that this is the order that one of them has."""
        out, places, count = operation.outputs[0], data[0].places, len(data)
        for value in data:
            self.sums.used(value, operation.name)
        if not lies_in_order(places) or not all(torch.equal(x.places, places) for x in data):
            self.sums.say(f"{operation.name} of sequences in another order", "project")
        self.sums.say(f"{count} sequences are one", "project", "the tokens of one step stand side by side")
        numbered = [(places // FEATURES * count + i) * FEATURES + places % FEATURES for i in range(count)]
        with torch.no_grad():
            label = self._new(
                "tokens",
                f"{count} sequences",
                data,
                [out.tensor],
                torch.stack(numbered, operation.argument(1, "dim", 0)),
            )
        self.sums.steps_of[label] = count

    def _of_ids(self, operation: Operation, data: list[Value]) -> None:
        """What is made of ids are masks, or other ids, as where targets are shifted behind a first one."""
        out = operation.outputs[0]
        if out.value.dtype == torch.bool or out.value.dim() != data[0].places.dim():
            self.hidden.compared(operation)
            return
        if operation.name != "cat" or len(data) == 1:  # what several are joined for shows in what takes them
            said = "a fixed first one is prepended, as to targets that are to be predicted"
            self.sums.say(f"{operation.name} of the ids", "project", said * (operation.name == "cat"))
        places = places_of(torch.Size((*out.value.shape, 1)))[..., 0]
        self._new("given", f"{operation.name} of ids", data, [out.tensor], places)

    def _scored(self, items: str, data: list[Value], operation: Operation) -> None:
        """What recommenders end in: tokens are compared with items."""
        self.sums.say("each token is compared with the embedding of an item", "output", items)
        self._function("compared", f"compared {operation.index}", data, operation)

    def _strange(self, operation: Operation, data: list[Value]) -> None:
        self.sums.say_strange(operation)
        self._function("strange", f"{operation.name} {operation.index}", data, operation)

    def _function(self, kind: str, words: str, data: list[Value], operation: Operation) -> None:
        for value in data:
            self.sums.used(value, words)
        for slot in operation.outputs:
            places = relaid(data[0].places, slot.value.shape)
            places = places_of(slot.value.shape) if places is None and slot.value.dim() else places
            self._new(kind, words, data, [slot.tensor], torch.zeros(()) if places is None else places)

    def _by_function(self, kind: str, operation: Operation, data: list[Value]) -> None:
        path = self._names(*(slot.tensor for slot in operation.inputs[1:])) or f"{operation.name} {operation.index}"
        if kind == "layer_norm" and len(operation.inputs) == 1:
            self.sums.say(f"{operation.name} without a parameter", "project", own_norm(operation))
        self._part(kind, path, data[:1], [operation.outputs[0].tensor], operation.frames)

    def _moved(self, operation: Operation, value: Value) -> None:
        if operation.name in DROPS or not value.places.dim():  # a table has none
            self.sums.moved(operation, value)
            self._give([slot.tensor for slot in operation.outputs], value)
            return
        if value.places.shape != operation.inputs[0].value.shape:
            raise UnreadError(f"{operation.name} of something without tokens")
        others = [slot.value for slot in operation.inputs[1:]]
        result = operation.call([value.places, *others]) if operation.name in MOVES else value.places
        moved = [result] if isinstance(result, Tensor) else [*result]
        whole = sum(x.numel() for x in moved)
        for x, slot in zip(moved, operation.outputs, strict=True):
            if is_row(x, value.places):
                self._pooled("the row", value, operation, x)
            elif x.numel() >= value.places.numel():
                self._give([slot.tensor], Value(value.terms, x))
            elif not slot.value.is_floating_point():
                self.values[id(slot.tensor)] = Value(value.terms, x)  # some of the ids
            elif operation.name in ("getitem", "select") and self.sums.is_of_one_sequence(value, x):
                self._new("pool", "the tokens of one sequence", [value], [slot.tensor], places_of(slot.value.shape))
            elif (x.dim() < value.places.dim() or x.size(1) == 1) and operation.name in ("getitem", "select"):
                own = lies_in_order(value.places) and self.sums.is_put(value, x)
                self._pooled("a token" if own else "another token", value, operation)
            elif operation.name == "getitem" and self.sums.are_not_put(value, x):
                self.sums.say("all but the tokens put beside are taken", "output", "these stand for the whole")
                self._give([slot.tensor], Value(value.terms, x))
            elif self.labels.kind(value) == "linear" and whole in (x.numel(), value.places.numel()):
                self._new("piece", f"{x.flatten()[0]} of {value.only}", [value], [slot.tensor], x)
            else:
                self._strange(operation, [value])

    def _pooled(self, name: str, value: Value, operation: Operation, places: Tensor | None = None) -> None:
        """One vector for all tokens, where a model says one thing of a whole."""
        self.sums.used(value, name)
        evidence = "" if name == "another token" else "the output holds no tokens"
        self.sums.say(f"{name} of all tokens is taken", "output", evidence)
        out = operation.outputs[0]
        self._new("pool", name, [value], [out.tensor], places_of(out.value.shape) if places is None else places)

    def _added(self, operation: Operation, sign: float) -> None:
        one, other = (self._operand(slot.tensor) for slot in operation.inputs)
        if one is None or other is None or operation.name == "rsub":
            self._strange(operation, [x for x in (one, other) if x is not None])
            return
        learnt = [slot.tensor.dim() for slot in operation.inputs if id(slot.tensor) in self.learnt]
        projected = next((x for x in (one, other) if self.labels.kind(x) == "linear"), None)
        if learnt == [1] and projected is not None:  # its bias, which is a parameter of its own
            self._give([operation.outputs[0].tensor], projected)
            return
        for slot in operation.inputs:
            if slot.value.numel() == slot.value.size(-1) and (name := self._names(slot.tensor)):
                whole = numbers_in(self.module, name) == slot.value.numel()
                self.sums.say(f"{name} is added to each token", "residual", f"the parameter {name}" * whole)
        frames = (*operation.frames, *call_of(operation, self.recorder))
        for value in (one, other):
            self.labels.summed.setdefault(value.only, frames)
        both = [x for x in (one, other) if x.places.dim()]
        if len(both) > 1 and not torch.equal(both[0].places, both[1].places):
            self.sums.say("what is added is in another order", "project")
        largest = max((x.places for x in both), key=Tensor.numel, default=one.places)  # of tables alone: none
        largest = largest.expand(operation.outputs[0].value.shape if both else largest.shape)
        terms = summed(one.terms, other.terms, sign)
        self.labels.sums.setdefault(terms, frames)
        for label in {*dict(one.terms)} & {*dict(other.terms)} - {*dict(terms)}:
            self.sums.say(f"{self.labels.words(label)} is added and subtracted again", "residual")
        self._give([operation.outputs[0].tensor], Value(terms, largest))

    def _operand(self, x: Tensor) -> Value | None:
        """A value, or a table that is learnt."""
        if id(x) in self.values:
            return self.values[id(x)]
        if id(x) not in self.learnt:
            return None
        name, places = self._names(x), self._elements(x)
        places = places[:1] if places.dim() > 2 and bool((places == places[:1]).all()) else places
        if bool((places.flatten().diff() != 1).any()):
            self.sums.say(f"{name} is added in another order", "scores")
        self.sums.from_row(name, int(places.min()) // places.size(-1))
        if not self._is_learnt(x) and name not in self.added and kind_of_name(name.rpartition(".")[2]) != OF_POSITIONS:
            self.sums.say(f"{name} is added", "scores")
        label = self.labels.add("added" if name in self.added else "table", name)
        self.calls[name].add(label)
        return Value(((label, 1.0),), torch.zeros(()))

    def _is_learnt(self, x: Tensor) -> bool:
        """Whether it is a parameter, or cut of one: what a buffer holds is a constant."""
        return self._names(x) in dict(self.module.named_parameters(remove_duplicate=False))

    def _multiplied(self, operation: Operation, data: list[Value]) -> None:
        out, gains = operation.outputs[0].tensor, [x.tensor for x in operation.inputs if id(x.tensor) in self.learnt]
        factor = factor_of(operation, lambda x: id(x) in self.values or self._is_learnt(x))
        if len(data) == 1 and factor is not None:
            self._give([out], Value(scaled(data[0].terms, factor), data[0].places))
        elif operation.name == "mul" and len(data) == 1 and gains:
            if gains[0].dim() > 1 and gains[0].size(-2) > 1:
                self.sums.say(f"each token is multiplied by numbers of its own, of {self._names(gains[0])}", "gate")
            self._part("gain", self._names(gains[0]), data, [out], operation.frames)
        elif operation.name == "mul" and len(data) == 2 and self.labels.gates(data):
            self._function("product", "product", data, operation)
        elif (
            operation.name == "mul"
            and (items := self.labels.items_in(data))
            and all(lies_in_order(x.places) for x in data)
        ):
            self._scored(items, data, operation)
        else:
            self._strange(operation, data)

    def _of_constants(self, operation: Operation) -> None:
        """What is cut of parameters is known by its places; other constants are not followed."""
        inputs = [slot.tensor for slot in operation.inputs]
        known = [x for x in inputs if id(x) in self.learnt]
        if not known or not all(slot.value.is_floating_point() for slot in operation.outputs):
            return
        if rounds(operation):
            self.sums.say_strange(operation)
        name, whole = self._names(known[0]), known[0]
        if operation.name == "embedding":
            self._looked_up(self._names(inputs[1]), inputs[0], operation.outputs[0].tensor)
        elif operation.name in MOVES and len(inputs) == 1 and len(operation.outputs) == 1:
            self.learnt[id(operation.outputs[0].tensor)] = name, operation.call([self._elements(whole)])
        elif operation.name in ("to", "type_as", "float", "double"):
            self.learnt[id(operation.outputs[0].tensor)] = name, self._elements(whole)

    def _end(self, outputs: list[Tensor]) -> None:
        known = next((self.values[id(x)] for x in outputs if id(x) in self.values), None)
        if known is None:
            raise UnreadError("the output could not be followed")
        self.returned = known.terms
        if self.series is not None:
            said = "the output is scaled back by them; no gradients of data were compared"
            said *= self.series.is_undone(known.terms)
            self.sums.say("a series is normalised by its own mean and deviation", "project", said)
        for label, made in self.labels.of_kind("given"):
            if label not in self.labels.users and "compared" in {one.kind for one in self.labels.made.values()}:
                self.sums.say(f"nothing reads {made.words}", "unused")
        self.sums.come_back(known, self.layout == IMAGE)
