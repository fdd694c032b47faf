"""Turn what departs into words: a name, a sentence, formulas, a fix, and the lines that ran."""

import linecache
import re

from torch import Tensor, nn

from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.same import MEASURED, constant_ratio
from equivalence_tests.checker.engine.visibility import OFF_BY_ONE, triangle_of
from equivalence_tests.checker.mistakes import Mistake, found_mistake, named_mistake
from equivalence_tests.checker.reporting.findings import Finding, Proof, some_of
from equivalence_tests.checker.reporting.lines import Frames, assigned_at, code_lines


def finding_of(departure: Departure, proof: Proof | None = None, module: nn.Module | None = None) -> Finding:
    """Say what a departure is; of the module, where one is given, the line that made what is wrong comes first."""
    mistake = _changed(departure, proof) if "changed_by_" in departure.name else named_mistake(departure.name)
    return found_mistake(
        mistake,
        departure.facts,
        stage=departure.stage,
        stack=code_lines((*_made_by(departure, module), *departure.lines)),
        proof=proof,
        evidence=departure.facts.get("claim", "") or _idle(departure),
        reason=departure.evidence,
    )


def _made_by(departure: Departure, module: nn.Module | None) -> Frames:
    """The line that makes the mask of a call, or the number, mask or softmax that a module keeps, if that is wrong."""
    if departure.operation is None or departure.stage not in ("scale", "mask", "softmax"):
        return ()
    if departure.stage == "softmax":
        kept = None if module is None else module.get_submodule(departure.operation.place)
        return assigned_at(module, departure.operation.place) if isinstance(kept, nn.Softmax) else ()
    if (built := _built_in_call(departure)) or module is None:
        return built
    line = linecache.getline(*departure.lines[0][:2])
    owner = module.get_submodule(departure.operation.place)
    wrong = (name for name in re.findall(r"self\.(\w+)", line) if _is_wrong(departure, getattr(owner, name, None)))
    return next((assigned_at(owner, name) for name in wrong), ())


def _built_in_call(departure: Departure) -> Frames:
    """The line of a call that makes a causal mask that is off by one."""
    operation, graph = departure.operation, departure.seen_in[0].run.graph if departure.seen_in is not None else None
    if operation is None or graph is None or operation not in graph.operations:
        return ()
    given = (graph.ancestors(slot, operation.index) for slot in operation.inputs)
    makers = (one for ancestors in given for one in ancestors if one.name in ("tril", "triu"))
    wrong = (one.frames[:1] for one in makers if triangle_of(one.outputs[0].value) in OFF_BY_ONE)
    return next((frames for frames in wrong if frames != departure.lines[:1]), ())


def _is_wrong(departure: Departure, kept: object) -> bool:
    """Whether what a module keeps is the whole factor of a line, or a causal mask that is off by one."""
    operation = departure.operation
    if isinstance(kept, Tensor) or operation is None:
        return isinstance(kept, Tensor) and departure.stage == "mask" and triangle_of(kept) in OFF_BY_ONE
    if not isinstance(kept, float) or not kept or departure.stage != "scale":
        return False
    taken, given = operation.inputs[0].value, operation.outputs[0].value
    ratio = constant_ratio(given, taken) if taken.shape == given.shape else None
    return ratio is not None and any(abs(number / ratio - 1) < MEASURED for number in (kept, 1 / kept))


def _idle(departure: Departure) -> str:
    """Say which weights take no part; "" where all do."""
    idle = departure.facts.get("unused", ())
    alike = dict.fromkeys(re.sub(r"(?<![^.])\d+(?=\.)", "*", name) for name in idle)  # of all heads and layers, once
    shown = some_of(idle if len(idle) == len(alike) else alike, ", ")
    return f"The output does not depend on {shown}: no result is computed from it." if idle else ""


def _changed(departure: Departure, proof: Proof | None) -> Mistake:
    """What no catalogue knows: a stage is changed by a function that torch's formula does not have."""
    function, what = departure.facts["function"], departure.facts["what"]
    is_or_are, was = ("are", "they were") if what in ("scores", "weights") else ("is", "it was")
    fix = f"Leave {function} out" if proof else f"From here on the numbers differ: see what {function} is there for"
    return Mistake(
        departure.name,
        departure.stage,
        f"The {what} {is_or_are} changed by {function}, which torch's formula does not have.",
        f"the {what} after {function}",
        f"the {what} as {was} before",
        f"{fix}, or say with --intended {departure.name}=REASON that it is intended.",
    )
