"""What is measured: every axis of a case, which values fit together, and the presets."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from scratch import validation

__all__ = ["COMPONENTS", "DTYPES", "MASKS", "MODES", "PRESETS", "Case", "Grid", "cases_of"]

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
MASKS = ("none", "causal", "padding", "both")
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
        mask: "causal" masks what looks at the queries' own sequence, "padding" the keys that fill shorter sequences up.
        need_weights: Whether ``MultiheadAttention`` returns its weights.
        compiled: Whether ``torch.compile`` is used.
        bias: Whether projections have biases.
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
    need_weights: bool = False
    compiled: bool = False
    bias: bool = True
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
        lengths = f"{self.query_len}" if self.query_len == self.key_len else f"{self.query_len}×{self.key_len}"
        words = [
            self.component.replace("_", " "),
            self.mode.replace("_", " "),
            f"batch {self.batch}",
            f"length {lengths}",
            f"width {self.embed_dim}",
            f"{self.num_heads} heads",
            f"{self.num_layers} + {self.num_layers} layers" if self.num_layers else "",
            self.dtype,
            "" if self.mask == "none" else f"{self.mask} mask" if self.mask != "both" else "causal and padding mask",
            "with weights" if self.need_weights else "",
            "compiled" if self.compiled else "",
            "" if self.bias else "no bias",
        ]
        return ", ".join(word for word in words if word)


@dataclass(frozen=True)
class Grid:
    """Values of each axis; the cases are all combinations that mean something.

    Args:
        component: As in ``Case``; so are the others.
        mode: Likewise.
        batch: Likewise.
        length: Both ``query_len`` and ``key_len``.
        key_len: Stands in for ``length`` as the number of keys; "generate" reads a source as long as ``length`` else.
        width: ``embed_dim``.
        heads: ``num_heads``.
        layers: ``num_layers``.
        dtype: Likewise.
        mask: Likewise.
        need_weights: Likewise.
        compiled: Likewise.
        bias: Likewise.
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
    need_weights: tuple[bool, ...] = (False,)
    compiled: tuple[bool, ...] = (False,)
    bias: tuple[bool, ...] = (True,)


PRESETS: dict[str, tuple[Grid, ...]] = {
    "quick": (
        Grid(("attention",), length=(64, 256), batch=(4,), width=(256,)),
        Grid(("self_attention",), length=(256,), batch=(4,), width=(256,), need_weights=(False, True)),
        Grid(("cross_attention", "encoder_layer", "decoder_layer"), batch=(4,), length=(128,), width=(256,)),
        Grid(("encoder_layer",), ("backward",), batch=(4,), length=(128,), width=(256,)),
        Grid(("transformer",), batch=(4,), length=(64,), width=(256,), mask=("causal",)),
        Grid(("seq2seq",), ("training_step",), batch=(4,), length=(64,), width=(256,)),
        Grid(("generate",), batch=(1,), length=(32,), width=(256,)),
    ),
    "standard": (
        Grid(("attention",), batch=(1,), length=(64, 256, 1024, 4096)),
        Grid(("attention",), ("backward",), batch=(1,), length=(64, 256, 1024)),
        Grid(("attention",), batch=(1,), length=(1024,), mask=("causal", "both")),
        Grid(("self_attention",), batch=(1,), length=(64, 256, 1024, 4096)),
        Grid(("self_attention",), batch=(1,), length=(64, 256, 1024), need_weights=(True,)),
        Grid(("self_attention",), ("backward",), batch=(4,), length=(256,), need_weights=(False, True)),
        Grid(("self_attention",), batch=(4,), length=(256,), dtype=("bfloat16",)),
        Grid(("cross_attention",), ("forward", "backward"), batch=(4,), length=(256,)),
        Grid(("encoder_layer", "decoder_layer"), ("forward", "backward"), batch=(4,), length=(64, 256)),
        Grid(("encoder_layer",), batch=(4,), length=(256,), mask=("padding",)),
        Grid(("encoder_layer",), batch=(4,), length=(256,), compiled=(True,)),
        Grid(("transformer",), batch=(4,), length=(128,), mask=("causal", "both")),
        Grid(("seq2seq",), ("forward", "training_step"), batch=(4,), length=(64,)),
        Grid(("generate",), batch=(1,), length=(16, 64, 128)),
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
    ['attention, forward, batch 8, length 64, width 512, 8 heads, float32',
     'attention, forward, batch 8, length 64, width 512, 8 heads, float32, causal mask']
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
    mask = {"none": "causal", "padding": "both"}.get(case.mask, case.mask)
    return replace(
        case,
        mode=_meaningful_mode(case),
        mask=mask if case.component in TOKEN_LEVEL else case.mask,
        num_layers=case.num_layers if case.component in STACKS else 0,
        bias=case.bias or case.component == "attention",
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
        batch=case.batch, length=case.query_len, key_len=case.key_len, layers=case.num_layers, threads=case.threads
    )
    validation.check_attention_sizes(case.embed_dim, case.num_heads, None, None, None, None)
    return case
