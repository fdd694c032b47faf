"""Each fault of an attention function once: the plainest model and situation that show it, its layer and its line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from equivalence_tests.kernels.faults import Fault
from equivalence_tests.kernels.known import Advice
from equivalence_tests.kernels.own import by_mistake
from equivalence_tests.models.judging import ModelCell
from equivalence_tests.models.naming import LATER, LEFT_TO_IT, NO_MASK, Cause, read_in

__all__ = ["Found", "ModelFault", "faults_in"]

REGISTER = "Register one: AttentionMaskInterface.register(name, sdpa_mask), with the name of your function."
ADVICE = {
    NO_MASK: Advice("huggingface/transformers#45811", REGISTER),
    LEFT_TO_IT: Advice(
        "", "Hide the future where attention_mask is None, is_causal is true and there are several queries."
    ),
    "s_aux": Advice("", "Append s_aux to the scores as one more column, and leave it out after the softmax."),
    "softcap": Advice("", "Compute softcap * tanh(scores / softcap) after the scale and before the mask."),
    "scaling is ignored": Advice("", "Multiply the scores by scaling; where that is None, by head_dim**-0.5."),
    LATER: Advice("", "Let a mask that is evaluated later copy what it reads, such as the position in a static cache."),
    "upper left": Advice("", "Use the mask as it is given: query i of q is at position key_len - q + i."),
}


@dataclass(frozen=True)
class Found:
    """A wrong cell with what is known about it.

    Args:
        cell: Where.
        cause: What is wrong there.
        program: A reproducer.
    """

    cell: ModelCell
    cause: Cause
    program: str = ""


@dataclass(frozen=True)
class ModelFault(Fault):
    """One thing that is wrong with an attention function.

    Args:
        where: The first layer and call that depart.
        read: What the checker reads in the function, and on which line.
    """

    where: str = ""
    read: str = ""
    kind: ClassVar[str] = "attention function"

    @property
    def places(self) -> list[str]:
        """Give layer, call and line."""
        return [*([f"first in {self.where}"] if self.where else []), *self.read.splitlines()]

    @property
    def sentence(self) -> str:
        """The fault in one line."""
        errors = [
            f"{x.name} has {x.misfit}" if x.misfit else f"{x.name} off by {x.candidate_error:.2g}"
            for x in self.cell.wrong_parts
        ]
        told = "; ".join(text for text in (*errors, self.cell.words) if text)
        return f"{self.cell.kernel}, {self.cell.situation}: {told}"

    def to_dict(self) -> dict[str, Any]:
        """Give plain data."""
        return super().to_dict() | {"where": self.where, "read": self.read}


def faults_in(found: Sequence[Found]) -> Iterator[ModelFault]:
    """Tell each mistake once, that first which explains the most."""
    by_cell = {id(one.cell): one for one in found}
    names = {key: [*one.cause.names] or [one.cell.words] * bool(one.cell.words) for key, one in by_cell.items()}
    for fault in by_mistake([one.cell for one in found], names):
        one = by_cell[id(fault.cell)]
        read = read_in(*one.cause.calls) if one.cause.calls else ""
        name = "" if fault.name == fault.cell.words else fault.name
        advice = _advice(fault.name)
        yield ModelFault(fault.cell, advice, one.program, fault.others, name, one.cause.where, read)


def _advice(name: str) -> Advice:
    return next((advice for sign, advice in ADVICE.items() if sign in name), Advice("", ""))
