"""Where the time of a run goes: products, what is fused with them, arithmetic, copies, and everything around them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.utils import benchmark

from benchmarks.measuring import Runner, profiled, thread_count

__all__ = ["Profile", "kind_of", "profile_of"]

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")
FUSED = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")
COPIES = (
    *("copy", "clone", "contiguous", "cat", "fill", "zero", "zeros_like", "index_select", "index", "embedding"),
    *("repeat_interleave", "constant_pad_nd", "masked_fill"),
)
# These make views, ask for memory or call others.
OVERHEAD = (
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "as_strided", "transpose", "t", "mT", "permute", "expand"),
    *("unsqueeze", "squeeze", "slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind", "unflatten"),
    *("flatten", "detach", "alias", "empty", "empty_like", "empty_strided", "resize", "resolve_conj", "lift_fresh"),
    *("_to_copy", "to", "zeros", "ones", "full", "new_zeros", "new_full", "linear", "matmul", "softmax", "layer_norm"),
    *("dropout", "pad", "item", "is_nonzero", "_local_scalar_dense", "result_type"),
    *("scaled_dot_product_attention", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
)
DTYPES = {"float": "float32", "double": "float64", "c10::BFloat16": "bfloat16", "c10::Half": "float16"}
SECONDS, MOST_RUNS = 0.1, 20
LEAST_SHARE = 0.01
BARE_RUNS = 5


@dataclass(frozen=True)
class Profile:
    """What one run is spent on, by the profiler, which adds about a microsecond to each operation.

    Args:
        whole_us: The run, in microseconds.
        products_us: Of it in matrix products.
        bare_us: What these products take by themselves, each on tensors of its own in one piece, again and again.
        fused_us: In kernels of torch that compute whole attention.
        arithmetic_us: In softmax and all other arithmetic.
        copies_us: In copies and in filling memory.
        page_faults: How often a run without the profiler had to ask the system for memory; None if it does not tell.
    """

    whole_us: float
    products_us: float
    bare_us: float
    fused_us: float
    arithmetic_us: float
    copies_us: float
    page_faults: int | None = None

    @property
    def overhead_us(self) -> float:
        """What is left: views, the dispatch of operations, autograd, Python."""
        return max(self.whole_us - self.products_us - self.fused_us - self.arithmetic_us - self.copies_us, 0.0)

    @property
    def matmul_rate(self) -> float | None:
        """The rate of the products over that of the same products by themselves; None without any."""
        return self.bare_us / self.products_us if self.products_us else None

    def shares(self) -> dict[str, float]:
        """Give the share of each kind in the run, in words."""
        times = {
            "products": self.products_us,
            "fused kernel": self.fused_us,
            "other arithmetic": self.arithmetic_us,
            "copies": self.copies_us,
            "overhead": self.overhead_us,
        }
        return {kind: microseconds / self.whole_us for kind, microseconds in times.items()}

    def __str__(self) -> str:
        """Say what the time is spent on; what is not worth a percent goes without saying.

        >>> print(Profile(100.0, products_us=60.0, bare_us=45.0, fused_us=0.0, arithmetic_us=25.0, copies_us=5.0))
        products 60% at 75% of their rate alone, other arithmetic 25%, copies 5%, overhead 10%
        """
        parts = {kind: f"{kind} {share:.0%}" for kind, share in self.shares().items() if share >= LEAST_SHARE}
        if self.matmul_rate is not None and "products" in parts:
            parts["products"] += f" at {self.matmul_rate:.0%} of their rate alone"
        if self.page_faults is not None:
            parts["faults"] = f"{self.page_faults} page faults"
        return ", ".join(parts.values())


@cache
def kind_of(operation: str) -> str:
    """Sort an operation by its name.

    Args:
        operation: As the profiler names it.

    Returns:
        "products", "fused", "arithmetic", "copies" or "overhead".

    >>> [kind_of(x) for x in ("aten::baddbmm_", "aten::exp2_", "aten::copy_", "aten::view", "TBackward0")]
    ['products', 'arithmetic', 'copies', 'overhead', 'overhead']
    """
    name = operation.removeprefix("aten::").removesuffix("_")
    if not operation.startswith("aten::"):  # a stretch of the backward pass: what it calls counts by itself
        return "overhead"
    if name.startswith(FUSED):
        return "fused"
    kinds = {"products": PRODUCTS, "copies": COPIES, "overhead": OVERHEAD}
    return next((kind for kind, names in kinds.items() if name in names), "arithmetic")


def profile_of(runner: Runner) -> Profile:
    """Say what a run of a contender on the CPU is spent on.

    Args:
        runner: It has run before.

    Returns:
        The times of one run under the profiler, and the page faults of another without it.
    """
    with runner.switches(), thread_count(runner.threads):
        start = benchmark.timer()
        page_faults = _page_faults(runner.run)
        runs = max(1, min(MOST_RUNS, int(SECONDS / (benchmark.timer() - start))))
        stretches = _nested(profiled(partial(_repeat, runner.run, runs), shapes=True))
        products = Counter(x for x in map(_product, stretches) if x is not None)
        bare = sum(count * _bare_seconds(*product, threads=runner.threads) for product, count in products.items())
    spent: Counter[str] = Counter()
    for stretch in stretches:
        spent[stretch.kind] += stretch.own_ns
    whole = max(x.end_ns for x in stretches) - stretches[0].event.start_ns()
    times = {f"{kind}_us": spent[kind] / runs / 1e3 for kind in ("products", "fused", "arithmetic", "copies")}
    return Profile(whole / runs / 1e3, bare_us=1e6 * bare / runs, page_faults=page_faults, **times)


def _repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


@dataclass
class _Stretch:
    """An operation, and the time that it does not spend in others which it calls."""

    event: Any
    kind: str
    end_ns: int
    own_ns: int
    calls_a_product: bool = False


def _nested(events: Sequence[Any]) -> list[_Stretch]:
    """Take what an operation calls off its time."""
    found: list[_Stretch] = []
    callers: dict[int, list[_Stretch]] = {}  # of each thread those that have not ended
    for event in sorted(events, key=lambda event: (event.start_ns(), -event.duration_ns())):
        start, duration = event.start_ns(), event.duration_ns()
        stretch = _Stretch(event, kind_of(event.name()), start + duration, duration)
        open_ones = callers.setdefault(event.start_thread_id(), [])
        while open_ones and open_ones[-1].end_ns <= start:
            open_ones.pop()
        if open_ones:
            open_ones[-1].own_ns -= duration
            open_ones[-1].calls_a_product |= stretch.kind == "products"
        open_ones.append(stretch)
        found.append(stretch)
    return found


_Product = tuple[tuple[int, ...], tuple[int, ...], str]


def _product(stretch: _Stretch) -> _Product | None:
    """Give the shapes of two factors and their dtype; None for what is no product, or leaves it to another."""
    if stretch.kind != "products" or stretch.calls_a_product:
        return None
    first = 1 if "add" in stretch.event.name() else 0  # behind what is added
    left, right = stretch.event.shapes()[first : first + 2]
    return tuple(left), tuple(right), stretch.event.dtypes()[first]


@cache
def _bare_seconds(left: tuple[int, ...], right: tuple[int, ...], dtype: str, *, threads: int) -> float:
    """Time a product of tensors that lie in one piece, into memory that is there already."""
    a, b = (torch.ones(shape, dtype=getattr(torch, DTYPES[dtype])) for shape in (left, right))
    product, seconds = torch.matmul(a, b), []
    with thread_count(threads):
        for _ in range(BARE_RUNS):
            start = benchmark.timer()
            torch.matmul(a, b, out=product)
            seconds.append(benchmark.timer() - start)
    return min(seconds)


def _page_faults(run: Callable[[], object]) -> int | None:
    try:
        import resource  # Windows has none
    except ImportError:
        return None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
