"""The gate: what is not equal is shown as such and not timed."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

import builtin
from benchmarks.contenders import BASELINE, CONTENDERS, Contender
from benchmarks.grids import Case
from benchmarks.workloads import Results, Workload, gradients_of, workload
from equivalence_tests.instruments.differences import compare_errors, compare_group, largest_value

__all__ = ["LARGEST_COMPARED_SCORES", "Gate", "compared_case"]

# Elements of one score matrix over batch and heads: float64 copies of a few of them fit into any memory.
LARGEST_COMPARED_SCORES = 2**23
LONGEST_COMPARED_DECODING = 64  # without a cache the work grows with the square, and in float64 it takes twice as long

WITHOUT_RELU = ("attention", "self_attention", "cross_attention")

Compute = Callable[[Case, Workload], Results]


def compared_case(case: Case) -> Case:
    """Give the case on which contenders are compared: the same, with shorter sequences where they are very long.

    The yardstick is float64 without a fused kernel, whose memory grows with the square of the length. Decoders are
    themselves compared in float64: in lower precision, rounding may decide between two tokens.

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
    if case.component == "generate":
        return replace(case, dtype="float64", query_len=min(case.query_len, LONGEST_COMPARED_DECODING))
    return case


class Gate:
    """Holds what the built-in gives in a case, and its float64 result, and compares others with them.

    Args:
        case: What will be timed.
    """

    def __init__(self, case: Case) -> None:
        self.case = compared_case(case)
        self._yardsticks = [_Yardstick(self.case, _outputs)]
        if case.mode != "forward":
            # Where rounding moves a hidden unit across the kink of ReLU, its gradient jumps: float64 decides there.
            exact = case.component not in WITHOUT_RELU
            self._yardsticks.append(_Yardstick(replace(self.case, dtype="float64") if exact else self.case, _gradients))

    def objection(self, contender: Contender) -> str:
        """Say how a contender's outputs or gradients differ from the built-in's more than rounding explains.

        Args:
            contender: Whose share is run once, and once more for the gradients.

        Returns:
            One line for the first difference; "" if all are equal.
        """
        return next((x for yardstick in self._yardsticks for x in yardstick.differences(contender)), "")


class _Yardstick:
    """What the built-in computes, in the dtype of the case and exactly."""

    def __init__(self, case: Case, compute: Compute) -> None:
        self.case, self.compute = case, compute
        self.expected = self._results(CONTENDERS[BASELINE])
        if case.dtype != "float64":
            exact_case = replace(case, compiled=False)
            self.exact = compute(exact_case, workload(exact_case, builtin, upcast=True))

    def _results(self, contender: Contender) -> Results:
        with contender.switches():
            return self.compute(self.case, contender.prepare(self.case))

    def differences(self, contender: Contender) -> Iterator[str]:
        found = self._results(contender)
        if self.case.dtype == "float64":
            yield from (str(x) for x in compare_group(found, self.expected) if not x.passed)
            return
        largest = largest_value(x for x in self.exact.values() if x is not None)
        for name, expected in self.expected.items():
            if found.get(name) is not None or expected is not None:
                ratio = compare_errors(found.get(name), expected, self.exact[name], name=name, largest=largest)
                if not ratio.passed:
                    yield str(ratio)


def _gradients(case: Case, work: Workload) -> Results:
    return work.translated(gradients_of(case, work))


def _outputs(_case: Case, work: Workload) -> Results:
    with torch.no_grad():
        return {f"output {i}" if i else "output": x for i, x in enumerate(work.call())}
