"""Turn what departs into words: a name, a sentence, formulas, a fix, and the lines that ran."""

from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.watching import code_lines
from equivalence_tests.checker.findings import Example, Finding, Proof
from equivalence_tests.checker.mistakes import named_mistake

__all__ = ["finding_of"]


def finding_of(departure: Departure, proof: Proof | None = None, where: str = "") -> Finding:
    """Say what a departure is.

    Args:
        departure: What was found.
        proof: What putting it right does.
        where: Path of the sub-module.
    """
    name = departure.name
    stack = code_lines(departure.lines)
    example = Example(departure.quantity, departure.have, departure.want) if departure.have else None
    try:
        known = named_mistake(name)
    except StopIteration:
        sentence = _sentence(departure)
        return Finding(
            name,
            departure.stage,
            sentence,
            stack=stack,
            example=example,
            proof=proof,
            meant=departure.evidence,
            where=where,
        )
    return Finding(
        name,
        departure.stage,
        known.sentence,
        known.have,
        known.want,
        known.fix,
        stack,
        example=example,
        proof=proof,
        on_purpose_in=known.choice,
        meant=departure.evidence,
        where=where,
    )


def _sentence(departure: Departure) -> str:
    function = departure.facts.get("function", "")
    role = departure.facts.get("role", departure.facts.get("what", departure.stage))
    if function:
        return f"The {role} is changed by {function}, which torch's formula does not have."
    return f"The {departure.stage} is not torch's: {departure.name.replace('_', ' ')}."
