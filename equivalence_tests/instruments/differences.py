"""Say how far two results are apart, and whether that is rounding.

Float64 decides: there a true difference stands far above 1e-12 of the largest value, and rounding far below. In lower
precision no tolerance is picked by hand: the error of the built-in, against the float64 result, says how much rounding
the operation has, and the candidate's error may be at most twice that.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "FLOAT64_BOUND",
    "Comparison",
    "Difference",
    "ErrorRatio",
    "compare_errors",
    "compare_group",
    "compare_tensors",
    "first_stage_that_parts",
    "largest_value",
    "ulp_distance",
    "ulp_size",
]

# What rounding in float64 stays far below, relative to the largest value.
FLOAT64_BOUND = 1e-12
# The rule of flash-attention's tests: at most twice the error of the reference implementation, plus a few ulps.
ERROR_FACTOR = 2.0
FLOOR_ULPS = 4.0

SIGNED_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
MOST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Difference:
    """One element of both results."""

    index: tuple[int, ...]
    actual: float
    expected: float
    size: float


@dataclass(frozen=True)
class Comparison:
    """How one tensor differs from what it should be, and the verdict.

    Args:
        name: What the tensor is: "output", "gradient of key", ...
        call: The call that gave it, to be pasted; "" if unknown.
        shape: Of the expected tensor.
        dtype: Of the expected tensor.
        misfit: Why the two cannot be compared element by element ("shape (5, 2) instead of (2, 5)"), or "".
        elements: Number of elements.
        differing: Number of those that differ; NaN in equal places counts as equal, and -0 equals 0.
        greatest: The element with the greatest absolute difference; None if none differs.
        greatest_relative: The element with the greatest difference relative to what it should be.
        ulps: The greatest distance of two elements in units in the last place.
        largest: The largest finite value that the difference is judged against, of the tensor or of its group.
        bound: The greatest absolute difference that the rule allows.
        rule: The rule in words.
        passed: Whether the rule is kept.
    """

    name: str
    call: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    misfit: str
    elements: int
    differing: int
    greatest: Difference | None
    greatest_relative: Difference | None
    ulps: int
    largest: float
    bound: float
    rule: str
    passed: bool

    @property
    def identical(self) -> bool:
        """Whether every element is equal, NaN in equal places included."""
        return self.differing == 0 and not self.misfit

    @property
    def max_abs_difference(self) -> float:
        """The greatest absolute difference; NaN where only one side is NaN."""
        return self.greatest.size if self.greatest else math.nan if self.misfit else 0.0

    @property
    def max_rel_difference(self) -> float:
        """The greatest difference relative to what the element should be."""
        return self.greatest_relative.size if self.greatest_relative else math.nan if self.misfit else 0.0

    @property
    def ulps_of_largest(self) -> float:
        """The greatest absolute difference in units in the last place of the largest value."""
        return self.max_abs_difference / ulp_size(self.largest, self.dtype)

    def __str__(self) -> str:
        origin = f" [{self.call}]" if self.call else ""
        if self.misfit:
            return f"{self.name} has {self.misfit}{origin}"
        if self.greatest is None:
            return f"{self.name}: identical, shape {self.shape}{origin}"
        worst = self.greatest
        place = f"{self.name}[{', '.join(map(str, worst.index))}]" if worst.index else self.name
        extent = (
            f"{self.differing} of {self.elements} differ, by at most {worst.size:.2g} ({self.ulps_of_largest:.2g} ulp)"
        )
        verdict = f"{'allowed' if self.passed else 'not allowed'} by {self.rule}"
        return f"{place} = {worst.actual!r}, but should be {worst.expected!r}: {extent}, {verdict}{origin}"


@dataclass(frozen=True)
class ErrorRatio:
    """The errors of two implementations against the float64 result, and the verdict.

    Args:
        name: What the tensor is.
        candidate_error: Greatest absolute error of the candidate.
        builtin_error: Greatest absolute error of the built-in.
        floor: A few units in the last place of the largest value, below which an error means nothing.
        misfit: Why the results cannot be compared, or "".
    """

    name: str
    candidate_error: float
    builtin_error: float
    floor: float
    misfit: str

    @property
    def bound(self) -> float:
        """What the candidate's error may be: twice the built-in's plus the floor."""
        return ERROR_FACTOR * self.builtin_error + self.floor

    @property
    def passed(self) -> bool:
        """Whether it is kept."""
        return not self.misfit and self.candidate_error <= self.bound

    @property
    def ratio(self) -> float:
        """The candidate's error over the built-in's; 1 if both are 0."""
        if self.builtin_error == 0:
            return 1.0 if self.candidate_error == 0 else math.inf
        return self.candidate_error / self.builtin_error

    def __str__(self) -> str:
        if self.misfit:
            return f"{self.name} has {self.misfit}"
        return (
            f"{self.name}: error {self.candidate_error:.2g} against {self.builtin_error:.2g} of the built-in, ratio "
            f"{self.ratio:.2f}; {'within' if self.passed else 'above'} {self.bound:.2g}"
        )


def compare_tensors(
    actual: Tensor | None,
    expected: Tensor | None,
    *,
    name: str = "output",
    call: str = "",
    relative_bound: float = FLOAT64_BOUND,
    largest: float | None = None,
) -> Comparison:
    """Compare two tensors element by element.

    passed = max |actual - expected| <= relative_bound * largest

    Args:
        actual: What came out.
        expected: What should have.
        name: What it is.
        call: The call that gave it.
        relative_bound: The rule of float64 by default; 0 asks for identity.
        largest: The largest value of the group that the tensor belongs to; its own by default. A gradient whose exact
            value is 0, such as that of the key bias, is all rounding noise: only its group tells how much is little.

    Returns:
        A ``Comparison``. A difference in shape or dtype is a difference, not an error. So is None, a NaN or an infinity
        on one side only.

    In torch.nn: ``torch.testing.assert_close``.

    >>> print(compare_tensors(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), name="out", call="f(x)"))
    out[1] = 2.5, but should be 2.0: 1 of 2 differ, by at most 0.5 (2.1e+06 ulp), not allowed by 1e-12 of the largest
    value 2 [f(x)]
    """
    misfit = _misfit(actual, expected)
    actual, expected = (x.detach() if x is not None else torch.empty(0) for x in (actual, expected))
    found = _Found(expected.numel(), None, None, MOST) if misfit else _differ(actual.to(expected.device), expected)
    largest = largest_value([expected]) if largest is None else largest
    bound = relative_bound * largest
    return Comparison(
        name=name,
        call=call,
        shape=tuple(expected.shape),
        dtype=expected.dtype,
        misfit=misfit,
        elements=expected.numel(),
        differing=found.differing,
        greatest=found.greatest,
        greatest_relative=found.greatest_relative,
        ulps=found.ulps,
        largest=largest,
        bound=bound,
        rule=f"{relative_bound:g} of the largest value {largest:.3g}" if relative_bound else "identity to the last bit",
        passed=not misfit and (found.greatest is None or found.greatest.size <= bound),
    )


def compare_group(
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    *,
    call: str = "",
    relative_bound: float = FLOAT64_BOUND,
) -> list[Comparison]:
    """Compare tensors that belong together, such as all gradients, against the largest value among them.

    Args:
        actual: What came out, by name.
        expected: What should have; a name that is missing on one side is a difference.
        call: The call that gave them.
        relative_bound: As in ``compare_tensors``.

    Returns:
        One ``Comparison`` for each name.

    >>> noise, signal = torch.tensor([1e-17], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    >>> [x.passed for x in compare_group({"bias": noise, "weight": signal}, {"bias": -noise, "weight": signal})]
    [True, True]
    """
    largest = largest_value(x for x in expected.values() if x is not None)
    return [
        compare_tensors(
            actual.get(name), expected.get(name), name=name, call=call, relative_bound=relative_bound, largest=largest
        )
        for name in dict.fromkeys([*expected, *actual])
    ]


def compare_errors(
    candidate: Tensor | None,
    builtin: Tensor | None,
    reference64: Tensor | None,
    *,
    name: str = "output",
    largest: float | None = None,
    rounded_to: torch.dtype | None = None,
) -> ErrorRatio:
    """Compare two errors: the candidate's may be at most twice the built-in's, plus a few units in the last place.

    passed = max |candidate - reference64| <= 2 max |builtin - reference64| + 4 ulp(largest)

    Args:
        candidate: What came out, in any floating dtype.
        builtin: What torch.nn gives in the same dtype. Where it overflows and the reference does not, it tells nothing
            and the place is left out.
        reference64: The result in float64 on the upcast inputs.
        name: What it is.
        largest: The largest value of the group that the tensor belongs to; its own by default.
        rounded_to: The dtype whose units count, if it is not that of ``builtin``: under autocast a float32 output
            may carry the rounding of bfloat16.

    Returns:
        An ``ErrorRatio``. A difference in shape or dtype is a difference, not an error.

    Source: the rule of flash-attention's own tests, https://github.com/Dao-AILab/flash-attention,
    tests/test_flash_attn.py.

    >>> exact = torch.tensor([1.0, 1 / 3], dtype=torch.float64)
    >>> print(compare_errors(exact.half(), exact.half(), exact))
    output: error 8.1e-05 against 8.1e-05 of the built-in, ratio 1.00; within 0.0041
    """
    misfit = _misfit(candidate, builtin)
    candidate, builtin, reference64 = (
        x.detach() if x is not None else torch.empty(0) for x in (candidate, builtin, reference64)
    )
    largest = largest_value([reference64]) if largest is None else largest
    errors = math.inf, 0.0
    if not misfit:
        differences = _distances(builtin.double(), reference64)
        known = differences < math.inf
        errors = _max(_distances(candidate.double(), reference64)[known]), _max(differences[known])
    return ErrorRatio(name, *errors, FLOOR_ULPS * ulp_size(largest, rounded_to or builtin.dtype), misfit)


def first_stage_that_parts(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    call: str = "",
    relative_bound: float = FLOAT64_BOUND,
) -> Comparison | None:
    """Find the first stage of an attention at which two traces part.

    Args:
        actual: The stages by name, as ``scratch.recording.trace_attention`` gives them, in float64.
        expected: The stages of the implementation that is right.
        call: The call that gave them.
        relative_bound: As in ``compare_tensors``, against the largest value of each stage; 0 asks for identity.

    Returns:
        The comparison of that stage; None if all stages agree.

    >>> expected = {"scores": torch.tensor([2.0]), "weights": torch.tensor([1.0])}
    >>> parts = first_stage_that_parts({"scores": torch.tensor([4.0]), "weights": torch.tensor([0.5])}, expected)
    >>> parts.name
    'scores'
    """
    for name in dict.fromkeys([*expected, *actual]):
        comparison = compare_tensors(
            actual.get(name), expected.get(name), name=name, call=call, relative_bound=relative_bound
        )
        if not comparison.passed:
            return comparison
    return None


def ulp_distance(actual: Tensor, expected: Tensor) -> Tensor:
    """Count the floating-point numbers between two tensors, element by element.

    Neighbours are 1 apart, across powers of two, denormals and zero alike; -0 and 0 are the same place; an infinity is
    1 beyond the largest finite number. NaN is 0 from NaN, and as far as an int64 can say from everything else.

    Args:
        actual: float64, float32, bfloat16 or float16.
        expected: The same shape and dtype.

    Returns:
        int64; a distance that does not fit (in float64 only) is given as its greatest value.

    >>> ulp_distance(torch.tensor([1.0, -0.0]), torch.tensor([1.0000001, 0.0]))
    tensor([1, 0])
    """
    (left, left_negative), (right, right_negative) = (_magnitude_and_sign(x) for x in (actual, expected))
    across_zero = left + right
    across_zero = torch.where(across_zero < 0, MOST, across_zero)  # the sum wrapped around
    distance = torch.where(left_negative == right_negative, (left - right).abs(), across_zero)
    either, both = actual.isnan() | expected.isnan(), actual.isnan() & expected.isnan()
    return distance.masked_fill(either, MOST).masked_fill(both, 0)


def ulp_size(value: float, dtype: torch.dtype) -> float:
    """Give the unit in the last place of a number: the distance to its neighbour away from zero.

    Args:
        value: Any finite number.
        dtype: A floating dtype; the unit of whole numbers and bools is 1.

    Returns:
        The distance; that of denormals for 0.

    >>> ulp_size(1.0, torch.float32) == 2**-23
    True
    """
    if not dtype.is_floating_point:
        return 1.0
    info = torch.finfo(dtype)
    of_denormals = info.smallest_normal * info.eps
    return max(math.ldexp(info.eps, math.frexp(value)[1] - 1), of_denormals) if value else of_denormals


def largest_value(tensors: Iterable[Tensor]) -> float:
    """Give the largest absolute value among the finite elements of some tensors; 0 if there are none.

    Args:
        tensors: Any tensors.

    Returns:
        A number.

    >>> largest_value([torch.tensor([1.0, -3.0, float("inf")]), torch.empty(0)])
    3.0
    """
    return max((_max(x.detach()[x.detach().isfinite()].double().abs()) for x in tensors), default=0.0)


@dataclass(frozen=True)
class _Found:
    differing: int
    greatest: Difference | None
    greatest_relative: Difference | None
    ulps: int


def _differ(actual: Tensor, expected: Tensor) -> _Found:
    distances = _distances(actual.double(), expected.double())
    differing = int((distances > 0).sum())
    if not differing:
        return _Found(0, None, None, 0)
    is_floating = expected.is_floating_point()
    ulps = ulp_distance(actual, expected) if is_floating else distances.long()
    # 0 / 0 is where both are 0: no difference.
    relative = (distances / expected.double().abs()).nan_to_num(nan=0.0, posinf=math.inf)
    return _Found(differing, _worst(distances, actual, expected), _worst(relative, actual, expected), int(ulps.max()))


def _worst(sizes: Tensor, actual: Tensor, expected: Tensor) -> Difference:
    place = torch.unravel_index(sizes.argmax(), sizes.shape)
    return Difference(tuple(int(i) for i in place), actual[place].item(), expected[place].item(), float(sizes[place]))


def _distances(actual: Tensor, expected: Tensor) -> Tensor:
    """Give |actual - expected|: 0 where they are equal or both NaN, infinite where only one is NaN or infinite."""
    equal = (actual == expected) | (actual.isnan() & expected.isnan())
    return (actual - expected).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(equal, 0.0)


def _misfit(actual: Tensor | None, expected: Tensor | None) -> str:
    kinds = ["nothing" if x is None else f"shape {tuple(x.shape)}" for x in (actual, expected)]
    if kinds[0] == kinds[1] and actual is not None and expected is not None and actual.dtype != expected.dtype:
        kinds = [f"dtype {actual.dtype}", f"{expected.dtype}"]
    return "" if kinds[0] == kinds[1] else f"{kinds[0]} instead of {kinds[1]}"


def _magnitude_and_sign(x: Tensor) -> tuple[Tensor, Tensor]:
    signed = x.detach().view(SIGNED_BITS[x.dtype])
    sign_bit = torch.iinfo(signed.dtype).min
    return (signed.long() & (-sign_bit - 1)), signed < 0


def _max(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0
