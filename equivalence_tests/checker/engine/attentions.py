"""Which attentions run: products of queries and keys with what weighs values by them, each up to its last product."""

from torch import Tensor

from equivalence_tests.checker.engine.codes import sources_in
from equivalence_tests.checker.engine.names import Attention, Part, Run
from equivalence_tests.checker.engine.vocabulary import ADDS, FILLS, MOVES, MULTIPLIES, WEIGHS, words
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.mistakes import MISTAKES

# What makes features of queries and keys, for an attention that is intended to be linear.
FEATURES_OF = words("elu relu softplus gelu silu selu celu")


def attentions_of(run: Run) -> list[Attention]:
    """Find the attentions of a run, in the order in which they end.

    Products that nothing weighs are left out, unless nothing weighs anywhere: then the softmax was forgotten.
    """
    numbered = ((product, product.source.number) for product in run.names.products if product.source is not None)
    made = ((product, [c for c in run.names.contexts if number in c.score_sources]) for product, number in numbered)
    parts = [Part(product, contexts) for product, contexts in made if contexts]
    weighed = any(operation.name in WEIGHS for operation in run.operations)
    found: dict[int, Attention] = {}
    for part in parts:
        if any(step.name in WEIGHS for step, _, _ in part.steps(run)) if weighed else _only_scaled(run, part):
            operation, names = _end_of(run, part)
            found.setdefault(operation.index, Attention(run, [], operation, names)).parts.append(part)
    return [found[index] for index in sorted(found)]


def _only_scaled(run: Run, part: Part) -> bool:
    """Whether the values meet nothing but scaled scores, or a function of them, masked too, in the softmax's place."""
    made = (part.product.operation, *(context.operation for context in part.contexts))
    steps = [operation for operation, _, _ in part.steps(run) if operation not in made]
    bends = [step for step in steps if f"{step.name}_for_softmax" in MISTAKES]
    scales = [step for step in steps if step.name in MULTIPLIES and not (bends and step.index > bends[0].index)]
    masks = [step for step in steps if bends and step.name in ADDS | FILLS]
    plain = all(step in (*scales, *bends, *masks) or step.name in MOVES | {"dropout"} for step in steps)
    linear = not bends and any(operation.name in FEATURES_OF for operation in run.operations)
    numbers = (slot.value.numel() == 1 for step in steps if step not in masks for slot in step.inputs[1:])
    return plain and not linear and all(numbers)


def _end_of(run: Run, part: Part) -> tuple[Operation, Tensor | None]:
    """The last operation that gives nothing but what the part's contexts gave, as far as the first weight."""
    numbers = {context.source.number for context in part.contexts if context.source is not None}
    last, names = part.contexts[-1].operation, None
    for operation, codes, _ in run.names.carrying(numbers, part.contexts[0].operation.index - 1):
        first = codes is run.names.after[operation.index][0]
        if first and all(run.names.sources[x].kind == "context" for x in sources_in(codes)):
            last, names = operation, codes
    return last, names
