"""Turn what departs into words: a name, a sentence, formulas, a fix, and the lines that ran."""

from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.mistakes import Mistake, found_mistake, named_mistake
from equivalence_tests.checker.reporting.findings import Example, Finding, Proof
from equivalence_tests.checker.reporting.lines import code_lines


def finding_of(departure: Departure, proof: Proof | None = None) -> Finding:
    """Say what a departure is."""
    mistake = _changed(departure, proof) if "changed_by_" in departure.name else named_mistake(departure.name)
    return found_mistake(
        mistake,
        departure.facts,
        stage=departure.stage,
        stack=code_lines(departure.lines),
        example=Example(departure.quantity, departure.have, departure.want) if departure.have else None,
        proof=proof,
        evidence=departure.facts.get("claim", "") or _idle(departure),
        reason=departure.evidence,
    )


def _idle(departure: Departure) -> str:
    """Say which weights take no part; "" where all do."""
    idle = departure.facts.get("unused", ())
    return f"The output does not depend on {', '.join(idle)}: no result is computed from it." if idle else ""


def _changed(departure: Departure, proof: Proof | None) -> Mistake:
    """What no catalogue knows: a stage is changed by a function that torch's formula does not have."""
    function, what = departure.facts["function"], departure.facts["what"]
    is_or_are, was = ("are", "they were") if what in ("scores", "weights") else ("is", "it was")
    fix = f"Leave {function} out" if proof else f"From here on the numbers differ: see what {function} is there for"
    return Mistake(
        departure.name,
        departure.stage,
        f"The {what} {is_or_are} changed by {function}, which torch's formula does not have.",
        f"{what} = {function}({what})",
        f"the {what} as {was} before",
        f"{fix}, or say with --intended {departure.name}=REASON that it is intended.",
    )
