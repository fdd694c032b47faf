"""Where the elements of an attention's weights lie among the parameters of a module.

The recorded call is run again with a number in the place of every parameter's element. What meets queries, keys and
values then says where it came from, whatever was transposed, cut or packed on the way.
"""

import copy

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.codes import feature_of, source_of, token_of
from equivalence_tests.checker.engine.names import Attention, Run, Source
from equivalence_tests.checker.engine.products import contraction_of
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.reach.errors import CannotCheckError

__all__ = ["places_of"]


def places_of(situation: Situation) -> dict[str, Tensor | None]:
    """Find the parameters of ``nn.MultiheadAttention`` in somebody's module.

    Args:
        situation: A call of the module whose attention could be read.

    Returns:
        For each parameter of the built-in the places of its elements among all elements of the module's parameters,
        in their order, the first of which is 1; None where there is no such parameter.
    """
    judgement, module = situation.judgement, situation.subject.module
    if judgement is None or module is None:
        return {}
    reader = _Reader(judgement.attention, _numbered(situation, module))
    query = [reader.rows(part.product.left) for part in judgement.attention.parts]
    key = [reader.rows(part.product.right) for part in judgement.attention.parts]
    value = [reader.rows(part.contexts[0].values.mT, ordered=True) for part in judgement.attention.parts]
    weights, biases = zip(*(reader.together(found) for found in (query, key, value)), strict=True)
    output = reader.output()
    return {
        "in_proj_weight": _joined(weights),
        "in_proj_bias": _joined(biases),
        "out_proj.weight": output[0],
        "out_proj.bias": output[1],
    }


def _numbered(situation: Situation, module: nn.Module) -> Run:
    """Run the call with numbers for parameters."""
    numbered, count = copy.deepcopy(module).double(), 1
    with torch.no_grad():
        for parameter in numbered.parameters():
            parameter.copy_(torch.arange(count, count + parameter.numel()).view_as(parameter))
            count += parameter.numel()
    call = situation.call
    return Call(numbered, call.args, call.kwargs, numbered).run(read=False)


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    return None if any(x is None for x in parts) else torch.cat([x for x in parts if x is not None])


Linear = tuple[Tensor, Tensor | None]


class _Reader:
    """Reads weights off a run in which they are numbers.

    Args:
        attention: As it was found in the run with true weights.
        numbered: The same run with numbers.
    """

    def __init__(self, attention: Attention, numbered: Run) -> None:
        self.attention, self.numbered, self.names = attention, numbered, attention.run.names

    def rows(self, codes: Tensor, ordered: bool = False) -> list[tuple[int, Tensor]]:
        """For each head the source and the features of its elements; in their own order if that is asked for."""
        first = token_of(codes)[..., 0] == token_of(codes).min()
        rows = {}
        for row in codes[first]:
            features = feature_of(row).sort().values if ordered else feature_of(row)
            rows[int(features.min())] = (int(source_of(row[:1])), features)
        return [rows[least] for least in sorted(rows)]

    def together(self, parts: list[list[tuple[int, Tensor]]]) -> Linear:
        """The weights of all heads, one under the other, and their biases."""
        heads = {int(features.min()): (source, features) for rows in parts for source, features in rows}
        read = [self._linear(*heads[least]) for least in sorted(heads)]
        return torch.cat([weight for weight, _ in read]), _joined(tuple(bias for _, bias in read))

    def output(self) -> tuple[Tensor | None, Tensor | None]:
        """The weights of the output projection."""
        numbers = set(self.attention.context_sources)
        for source in self.names.sources.values():
            made = source.operation
            if source.kind == "projection" and made is not None and numbers & set(source.parents):
                last = next((s for s in self.names.sources.values() if source.number in s.parents), source)
                return self._linear(
                    (last if last.kind == "added" else source).number, feature_of(source.codes).unique()
                )
        return None, None

    def _linear(self, number: int, features: Tensor) -> Linear:
        """The rows of a weight that make some features of a source, and their biases."""
        source = self.names.sources[number]
        if source.kind == "added" and len(source.parents) == 1:
            weight, _ = self._linear(source.parents[0], features)
            return weight, self._added(source, features)
        operation = source.operation
        if operation is None or (contraction := contraction_of(operation)) is None:
            raise CannotCheckError("a projection is no product of a tensor and a weight")
        before = self.names.before[operation.index]
        if before[contraction.sides[0]] is None:
            contraction = contraction.swapped()
        taken, slots = before[contraction.sides[0]], self.numbered.operations[operation.index].inputs
        assert taken is not None  # one of the sides has names
        flat = contraction.right.reshape(-1, contraction.right.size(-1))
        column = contraction.right[:, :, 0].unique(return_inverse=True)[1].reshape(-1)
        at = torch.stack([(column == feature).nonzero()[0, 0] for feature in features])
        order = feature_of(contraction.rows(taken))[0, 0].argsort()
        weight = slots[contraction.sides[1]].value.reshape(-1)[flat[at]][:, order].long()
        bias = slots[2].value[at % contraction.right.size(1)].long() if len(slots) > 2 else None
        return weight, bias

    def _added(self, source: Source, features: Tensor) -> Tensor | None:
        """What is added to each feature."""
        assert source.operation is not None  # it was added by one
        names = self.names.before[source.operation.index]
        slots = self.numbered.operations[source.operation.index].inputs
        other = next((slot for slot, codes in zip(slots, names, strict=True) if codes is None), None)
        if other is None:
            return None
        values = other.value.expand(source.codes.shape).reshape(-1)
        of = feature_of(source.codes).reshape(-1)
        return torch.stack([values[(of == feature).nonzero()[0, 0]] for feature in features]).long()
