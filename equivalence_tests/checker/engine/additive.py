"""Recognise attention that torch has none of: additive attention, and attention over channels."""

from collections.abc import Iterator

from equivalence_tests.checker.engine.identities import JOINS
from equivalence_tests.checker.engine.names import Run
from equivalence_tests.checker.engine.vocabulary import CONTRACTIONS, SOFTMAXES
from equivalence_tests.checker.engine.watching import Operation, Slot
from equivalence_tests.checker.reporting.lines import code_lines

IT_IS = "It is additive attention"


def additive(run: Run, is_read: bool) -> str:
    """Say which line makes additive scores from queries and keys; "" where none does, or a product makes the scores.

    scores = w · f(query + key), as in Bahdanau et al. 2015 and in graph attention (Veličković et al. 2018). What
    ``is_read`` as an attention all the same is additive only if each query meets several keys there.
    """
    weighs = next((op for op in run.recorder.operations if op.name in SOFTMAXES and op.frames), None)
    if weighs is None:
        return ""
    before = [*run.graph.ancestors(weighs.inputs[0], weighs.index)]
    if any(op.name in CONTRACTIONS and _of_two(run, op) for op in before):
        return ""
    added = [op for op in before if (op.name == "add" or _joins_features(op)) and op.frames and _of_two(run, op)]
    added = [op for op in added if _broadcasts(op) or not is_read]
    if not added:
        return ""
    line = code_lines(added[-1].frames)[-1]
    does = "concatenates queries and keys" if added[-1].name in JOINS else "adds queries and keys"
    return (
        f"{IT_IS}: line {line.number}, `{line.text}`, {does}, and the scores are no product of "
        "the two. torch.nn has none to compare it with."
    )


def over_channels(run: Run) -> Iterator[tuple[str, str]]:
    """Say where a softmax weighs products over the tokens: the path of the module, and a sentence with the line."""
    weighing = (operation for operation in run.operations if operation.name in SOFTMAXES)
    before = [{*run.graph.ancestors(one.inputs[0], one.index, _until_a_product)} for one in weighing]
    for operation in (product.operation for product in run.names.across if product.operation.frames):
        if any(operation in made for made in before):
            line = code_lines(operation.frames)[-1]
            said = f"in line {line.number}, `{line.text}`, features attend to one another, over the tokens."
            yield operation.place, f"{said} torch.nn has no such attention to compare it with."


def _until_a_product(operation: Operation) -> list[Slot]:
    return [] if operation.name in CONTRACTIONS else operation.inputs


def _of_two(run: Run, operation: Operation) -> bool:
    """Whether two or more operands are made from arguments of the call."""
    made_of = [run.recorder.named(bits) for bits in operation.origins[:2]]
    return len(made_of) == 2 and all(any(name.startswith("arg:") for name in names) for names in made_of)


def _joins_features(operation: Operation) -> bool:
    """Whether it puts features side by side: tokens behind one another are more keys."""
    last = operation.outputs[0].value.dim() - 1 if operation.outputs else -1
    return operation.name in JOINS and operation.argument(1, "dim", 0) in (-1, last)


def _broadcasts(operation: Operation) -> bool:
    """Whether each element of the one operand meets several of the other."""
    whole = operation.outputs[0].value.shape
    return any(slot.value.shape != whole for slot in operation.inputs[:2])
