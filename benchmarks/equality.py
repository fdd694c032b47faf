"""The gate: what is not equal is shown as such and not timed."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

import builtin
from benchmarks.cases import Case
from benchmarks.contenders import BASELINE, CONTENDERS, Contender
from benchmarks.workloads import Workload, gradients_of, workload
from equivalence_tests.comparing import compare_errors, compare_group, largest_value

__all__ = ["LARGEST_COMPARED_SCORES", "Gate", "compared_case"]

# Elements of one score matrix over batch and heads: float64 copies of a few of them fit into any memory.
LARGEST_COMPARED_SCORES = 2**23

Results = dict[str, Tensor | None]


def compared_case(case: Case) -> Case:
    """Give the case on which contenders are compared: the same, with shorter sequences where they are very long.

    The yardstick is float64 without a fused kernel, whose memory grows with the square of the length. "generate" is
    compared in float64 by itself: in lower precision rounding may turn the choice between two tokens.

    Args:
        case: What is timed.

    Returns:
        What is compared.

    >>> compared_case(Case("attention", batch=1, query_len=16384, key_len=16384)).query_len
    1024
    """
    while case.batch * case.num_heads * case.query_len * case.key_len > LARGEST_COMPARED_SCORES:
        longer = max(case.query_len, case.key_len)
        case = replace(case, query_len=min(case.query_len, longer // 2), key_len=min(case.key_len, longer // 2))
    return replace(case, dtype="float64") if case.component == "generate" else case


class Gate:
    """Holds what the built-in gives in a case, and its float64 result, and compares others with them.

    Args:
        case: What will be timed.
    """

    def __init__(self, case: Case) -> None:
        self.case = compared_case(case)
        self._expected = _results(self.case, CONTENDERS[BASELINE])
        self._exact = self._expected
        if case.dtype != "float64" and case.component != "generate":
            exact_case = replace(self.case, compiled=False)
            self._exact = _results_of(exact_case, workload(exact_case, builtin, upcast=True))

    def objection(self, contender: Contender) -> str:
        """Say how a contender's outputs or gradients differ from the built-in's more than rounding explains.

        Args:
            contender: Whose share is run once.

        Returns:
            One line for the first difference; "" if all are equal.
        """
        found = _results(self.case, contender)
        for kind in ("output", "gradient"):
            for difference in self._differences(_only(found, kind), kind):
                return difference
        return ""

    def _differences(self, found: Results, kind: str) -> list[str]:
        expected, exact = _only(self._expected, kind), _only(self._exact, kind)
        if self.case.dtype == "float64":
            return [str(x) for x in compare_group(found, expected) if not x.passed]
        largest = largest_value(x for x in exact.values() if x is not None)
        ratios = [
            compare_errors(found.get(name), expected[name], exact[name], name=name, largest=largest)
            for name in expected
            if found.get(name) is not None or expected[name] is not None
        ]
        return [str(x) for x in ratios if not x.passed]


def _only(results: Mapping[str, Tensor | None], kind: str) -> Results:
    return {name: x for name, x in results.items() if name.startswith(kind)}


def _results(case: Case, contender: Contender) -> Results:
    with contender.switches():
        return _results_of(case, contender.prepare(case))


def _results_of(case: Case, work: Workload) -> Results:
    with torch.no_grad():
        outputs = work.call()
    results: Results = {f"output {i}" if i else "output": x for i, x in enumerate(outputs)}
    if case.mode != "forward":
        results |= {f"gradient of {name}": x for name, x in gradients_of(case, work).items()}
    return results
