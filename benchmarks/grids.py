"""What is measured: every axis of a case, which values fit together, and the presets."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from scratch import validation

__all__ = [
    "COMPONENTS",
    "DTYPES",
    "LENGTHS",
    "MASKS",
    "MODES",
    "PRESETS",
    "SETTINGS",
    "Case",
    "Grid",
    "cases_of",
    "label_of",
]

COMPONENTS = (
    "attention",
    "self_attention",
    "cross_attention",
    "encoder_layer",
    "decoder_layer",
    "transformer",
    "seq2seq",
    "generate",
)
MODES = ("forward", "backward", "training_step")
MASKS = ("none", "causal", "padding", "both", "window")
DTYPES = ("float32", "bfloat16", "float16", "float64")
WITH_WEIGHTS = ("self_attention", "cross_attention")
STACKS = ("transformer", "seq2seq", "generate")
TOKEN_LEVEL = ("seq2seq", "generate")


@dataclass(frozen=True)
class Case:
    """Work that every contender does alike.

    Args:
        component: One of ``COMPONENTS``. "attention" is the function, on heads that are split already; "self_attention"
            and "cross_attention" are ``MultiheadAttention``; "generate" decodes greedily.
        mode: "forward" in eval without gradients, "backward" is forward and backward, "training_step" takes a step of
            SGD with momentum too.
        batch: Number of sequences.
        query_len: Number of queries: the target's length; for "generate" the number of tokens that are decoded.
        key_len: Number of keys: the source's length.
        embed_dim: Width; feed-forward networks are four times as wide.
        num_heads: Number of heads.
        num_layers: Number of layers of encoder and decoder each; 0 for components that are no stacks.
        dtype: Of parameters and inputs.
        mask: "causal" and "window" mask what looks at the queries' own sequence, "padding" the keys that fill shorter
            sequences up, "both" is causal and padding.
        window: How many keys, its own place the last, a query sees under the mask "window"; 0 under any other.
        need_weights: Whether ``MultiheadAttention`` returns its weights.
        compiled: Whether ``torch.compile`` is used.
        bias: Whether projections have biases.
        key_heads: How many heads of keys the function's heads of queries share; 0 if each has its own.
        threads: Number of threads on the CPU.
        device: Where.
    """

    component: str
    mode: str = "forward"
    batch: int = 8
    query_len: int = 512
    key_len: int = 512
    embed_dim: int = 512
    num_heads: int = 8
    num_layers: int = 0
    dtype: str = "float32"
    mask: str = "none"
    window: int = 0
    need_weights: bool = False
    compiled: bool = False
    bias: bool = True
    key_heads: int = 0
    threads: int = 1
    device: str = "cpu"

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.embed_dim // self.num_heads

    @property
    def is_causal(self) -> bool:
        """Whether queries see no later key."""
        return self.mask in ("causal", "both")

    @property
    def is_padded(self) -> bool:
        """Whether some sequences of keys are filled up."""
        return self.mask in ("padding", "both")

    def __str__(self) -> str:
        kind = f"{self.component}, {self.mode}".replace("_", " ")
        return f"{kind}, {label_of(self, SETTINGS, usual=False)}"


# What a case is beside its component and its mode.
LENGTHS = ("query_len", "key_len")
SETTINGS = tuple(x.name for x in fields(Case) if x.name not in ("component", "mode"))


def label_of(case: Case, settings: Sequence[str], usual: bool = True) -> str:
    """Name some settings of a case.

    Args:
        case: Any.
        settings: Names of fields.
        usual: Whether to name what goes without saying, too: "no mask", "eager".

    Returns:
        Words with commas between. Two cases that differ in these settings have different labels.

    >>> label_of(Case("attention", mask="none"), ("query_len", "mask")), label_of(Case("attention"), ("mask",), False)
    ('length 512, no mask', '')
    """
    mask = {
        "none": "no mask" if usual else "",
        "both": "causal and padding mask",
        "window": "" if "window" in settings else "window mask",
    }
    words = {
        "batch": f"batch {case.batch}",
        "query_len": f"length {case.query_len}",
        "key_len": "" if case.key_len == case.query_len else f"{case.key_len} keys",
        "embed_dim": f"width {case.embed_dim}",
        "num_heads": "1 head" if case.num_heads == 1 else f"{case.num_heads} heads",
        "num_layers": f"{case.num_layers} + {case.num_layers} layers" if case.num_layers else "",
        "dtype": case.dtype,
        "mask": mask.get(case.mask, f"{case.mask} mask"),
        "window": f"window of {case.window}" if case.window else "",
        "need_weights": "with weights" if case.need_weights else "without weights" if usual else "",
        "compiled": "compiled" if case.compiled else "eager" if usual else "",
        "bias": "without biases" if not case.bias else "with biases" if usual else "",
        "key_heads": "" if not case.key_heads else f"key heads: {case.key_heads}",
        "threads": "1 thread" if case.threads == 1 else f"{case.threads} threads",
        "device": case.device if usual or case.device != "cpu" else "",
    }
    return ", ".join(words[name] for name in settings if words[name])


@dataclass(frozen=True)
class Grid:
    """Values of each axis; the cases are all combinations that mean something.

    Args:
        component: Each of ``COMPONENTS`` to be timed.
        mode: Forward, backward or a whole step of training.
        batch: Numbers of sequences.
        length: Both ``query_len`` and ``key_len``.
        key_len: Stands in for ``length`` as the number of keys; "generate" reads a source as long as ``length`` else.
        width: ``embed_dim``.
        heads: ``num_heads``.
        layers: ``num_layers``.
        dtype: Names of dtypes.
        mask: Each of ``MASKS`` to be timed.
        window: Widths of the mask "window"; other masks are timed once.
        need_weights: With or without weights, for the components that return them.
        compiled: With or without ``torch.compile``.
        bias: With or without biases.
        key_heads: Numbers of heads of keys, for the function; 0 gives each head of queries its own.
    """

    component: tuple[str, ...]
    mode: tuple[str, ...] = ("forward",)
    batch: tuple[int, ...] = (8,)
    length: tuple[int, ...] = (512,)
    key_len: tuple[int, ...] = ()
    width: tuple[int, ...] = (512,)
    heads: tuple[int, ...] = (8,)
    layers: tuple[int, ...] = (2,)
    dtype: tuple[str, ...] = ("float32",)
    mask: tuple[str, ...] = ("none",)
    window: tuple[int, ...] = (256,)
    need_weights: tuple[bool, ...] = (False,)
    compiled: tuple[bool, ...] = (False,)
    bias: tuple[bool, ...] = (True,)
    key_heads: tuple[int, ...] = (0,)


PRESETS: dict[str, tuple[Grid, ...]] = {
    "quick": (
        Grid(("self_attention", "attention"), batch=(4,), length=(256,), width=(256,)),
        Grid(("encoder_layer",), ("forward", "backward"), batch=(4,), length=(128,), width=(256,)),
        Grid(("transformer",), batch=(4,), length=(64,), width=(256,), mask=("causal",)),
        Grid(("generate",), batch=(1,), length=(32,), width=(256,)),
    ),
    # What README and the goals speak of comes first: a run that is cut short has that.
    "standard": (
        Grid(("attention",), batch=(1,), length=(64, 256, 512, 1024, 2048, 4096)),
        Grid(("attention",), batch=(1,), length=(256, 512, 1024, 2048, 4096), mask=("causal",)),
        Grid(("attention",), ("backward",), batch=(1,), length=(64, 256, 1024, 2048, 4096)),
        Grid(("attention",), ("backward",), batch=(1,), length=(1024, 4096), mask=("causal",)),
        Grid(("attention", "encoder_layer"), ("forward", "backward"), batch=(32,), length=(32,)),
        Grid(("attention",), ("forward", "backward"), batch=(1,), length=(4096,), mask=("window",)),
        Grid(("self_attention",), batch=(1,), length=(64, 256, 1024, 2048, 4096)),
        Grid(("self_attention",), ("backward",), batch=(1,), length=(64, 256, 1024, 2048, 4096)),
        Grid(("encoder_layer",), ("forward", "backward"), batch=(1,), length=(256, 1024, 2048, 4096)),
        Grid(("generate",), batch=(1,), length=(16, 64, 256)),
        Grid(("attention",), batch=(1,), length=(1024,), key_heads=(2,)),
        Grid(("attention",), batch=(4,), length=(1024,), mask=("padding",)),
        Grid(("attention",), batch=(1,), length=(1024,), mask=("both",)),
        Grid(("self_attention",), batch=(1,), length=(64, 256, 1024), need_weights=(True,)),
        Grid(("self_attention",), ("backward",), batch=(4,), length=(256,), need_weights=(False, True)),
        Grid(("self_attention",), batch=(4,), length=(256,), dtype=("bfloat16",)),
        Grid(("cross_attention",), ("forward", "backward"), batch=(4,), length=(256,)),
        Grid(("decoder_layer",), ("forward", "backward"), batch=(1,), length=(256, 1024)),
        Grid(("encoder_layer", "decoder_layer"), ("forward", "backward"), batch=(4,), length=(64,)),
        Grid(("encoder_layer",), batch=(4,), length=(256,), mask=("padding",)),
        Grid(("encoder_layer",), batch=(4,), length=(256,), compiled=(True,)),
        Grid(("transformer",), batch=(4,), length=(128,), mask=("causal", "both")),
        Grid(("seq2seq",), ("forward", "training_step"), batch=(4,), length=(64,)),
    ),
    "full": (
        Grid(
            ("attention", "self_attention", "cross_attention"),
            ("forward", "backward"),
            batch=(1, 8),
            length=(64, 256, 1024, 4096, 16384),
            dtype=("float32", "bfloat16"),
            mask=("none", "causal"),
        ),
        Grid(
            ("attention", "self_attention", "cross_attention"),
            MODES,
            length=(256, 1024),
            mask=MASKS,
            need_weights=(False, True),
            compiled=(False, True),
        ),
        Grid(
            ("encoder_layer", "decoder_layer", "transformer", "seq2seq"),
            MODES,
            length=(64, 256, 1024),
            dtype=("float32", "bfloat16"),
            mask=("none", "both"),
            compiled=(False, True),
        ),
        Grid(("generate",), batch=(1, 8), length=(16, 64, 256), layers=(2, 6), mask=("causal", "both")),
    ),
}


def cases_of(grids: Sequence[Grid], threads: Sequence[int], devices: Sequence[str]) -> list[Case]:
    """List the cases of some grids, each once.

    Args:
        grids: Values of each axis.
        threads: Numbers of threads.
        devices: Where.

    Returns:
        Cases in the order of the grids; combinations without meaning, such as the weights of an encoder layer, are
        turned into the case that they come to.

    Raises:
        ValueError: For an unknown name, a size below 1, or heads that do not divide the width.

    >>> [str(case) for case in cases_of([Grid(("attention",), length=(64,), mask=("none", "causal"))], [1], ["cpu"])]
    ['attention, forward, batch 8, length 64, width 512, 8 heads, float32, 1 thread',
     'attention, forward, batch 8, length 64, width 512, 8 heads, float32, causal mask, 1 thread']
    """
    found = (
        replace(case, threads=count, device=device)
        for device in devices
        for count in threads
        for grid in grids
        for case in _combinations(grid)
    )
    return list(dict.fromkeys(_meaningful(_checked(case)) for case in found))


def _combinations(grid: Grid) -> Iterator[Case]:
    axes = [getattr(grid, axis.name) or (0,) for axis in fields(grid)]
    for component, mode, batch, length, key_len, *others in itertools.product(*axes):
        yield Case(component, mode, batch, length, key_len or length, *others)


def _meaningful(case: Case) -> Case:
    """Turn off what the component does not have, and on what it always has."""
    mask = {"padding": "both", "both": "both"}.get(case.mask, "causal") if case.component in TOKEN_LEVEL else case.mask
    return replace(
        case,
        mode=_meaningful_mode(case),
        mask=mask,
        window=case.window if mask == "window" else 0,
        num_layers=case.num_layers if case.component in STACKS else 0,
        bias=case.bias or case.component == "attention",
        key_heads=case.key_heads if case.component == "attention" and case.key_heads != case.num_heads else 0,
        need_weights=case.need_weights and case.component in WITH_WEIGHTS,
        compiled=case.compiled and case.component != "generate",  # each step has another length
        key_len=case.query_len if case.component in ("self_attention", "encoder_layer") else case.key_len,
    )


def _meaningful_mode(case: Case) -> str:
    if case.component == "attention" and case.mode == "training_step":
        return "backward"  # a function has nothing to train
    return "forward" if case.component == "generate" else case.mode


def _checked(case: Case) -> Case:
    validation.check_choice("component", case.component, COMPONENTS)
    validation.check_choice("mode", case.mode, MODES)
    validation.check_choice("dtype", case.dtype, DTYPES)
    validation.check_choice("mask", case.mask, MASKS)
    validation.check_positive(
        batch=case.batch,
        length=case.query_len,
        key_len=case.key_len,
        layers=case.num_layers,
        window=case.window,
        threads=case.threads,
    )
    validation.check_attention_sizes(case.embed_dim, case.num_heads, None, None, None, None)
    if case.key_heads:
        validation.check_grouped_sizes(case.embed_dim, case.num_heads, case.key_heads, case.head_dim)
    return case
