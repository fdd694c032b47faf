"""Bad calls as data, one list for both packages, and calls that look bad and are not.

Every case names a class or function that ``scratch`` and ``builtin`` share. Both must raise the same text, a ValueError
or a TypeError, which is also an instance of what torch.nn raises on its plain path. Where torch.nn takes what the
packages refuse, or raises another type, or refuses what they take, the case says why.

Sizes: batch 2, heads 3, query 5, key 7, head_dim 11, embed_dim 33.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

__all__ = ["ACCEPTED_CASES", "ERROR_CASES", "AcceptedCase", "ErrorCase", "construct"]

Arguments = Mapping[str, Any]

MHA = "MultiheadAttention"
ENCODER_LAYER, DECODER_LAYER = "TransformerEncoderLayer", "TransformerDecoderLayer"
ENCODER, DECODER, TRANSFORMER = "TransformerEncoder", "TransformerDecoder", "Transformer"
SQUARE_MASK = "Transformer.generate_square_subsequent_mask"
SDPA = "scaled_dot_product_attention"
FLEX, BLOCKS, VARLEN = "flex_attention", "create_block_mask", "varlen_attn"
# What torch does not have, or has and does not compute here.
BESIDE_TORCH = ("masks.", "score_functions.", "flex.", VARLEN)

MISSING = object()  # an argument that is left out

# Why torch.nn and the packages differ.
NESTED_IN_EVAL = "in eval nn.TransformerEncoder hands nested tensors down to its layers, so builtin's take them"
NO_SUCH_CHECK = "torch.nn has no check there and stumbles over "
COMPUTES_NONSENSE = "torch's fused kernel on CPU does not look and computes something"


@dataclass(frozen=True)
class ErrorCase:
    """One bad call.

    Args:
        component: Name of the class or function; a dot leads into ``masks`` or to a static method.
        name: What is wrong with the call.
        says: What the text must hold: the argument, what was expected, what came, and words that PyTorch's tests read.
        error: ValueError for shapes and values, TypeError for dtypes and kinds.
        build: Arguments of the constructor; None for functions.
        call: Arguments of the call; None if the constructor is to raise.
        torch_accepts: Why torch.nn takes the call and the packages do not; "" if it raises too.
        torch_type: Why ours is no instance of what torch.nn raises; "" if it is.
        train_only: Why the case is not one in eval mode; "" if it is.
    """

    component: str
    name: str
    says: tuple[str, ...]
    error: type[Exception]
    build: Arguments | None
    call: Arguments | None
    torch_accepts: str
    torch_type: str
    train_only: str

    @property
    def in_torch(self) -> bool:
        """Whether torch.nn has the class or function."""
        return not self.component.startswith(BESIDE_TORCH)

    def __str__(self) -> str:
        return f"{self.component}: {self.name}".replace(" ", "_")


@dataclass(frozen=True)
class AcceptedCase:
    """One call that is unusual but right: both packages compute it, and compute the same.

    Args:
        component: Name of the class or function.
        name: What is unusual about the call.
        build: Arguments of the constructor; None for functions.
        call: Arguments of the call.
        torch_rejects: Why torch.nn raises and the packages do not; "" if it takes the call too.
    """

    component: str
    name: str
    build: Arguments | None = field(repr=False)
    call: Arguments = field(repr=False)
    torch_rejects: str = ""

    def __str__(self) -> str:
        return f"{self.component}: {self.name}".replace(" ", "_")


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Give numbers that are all different."""
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=dtype).view(shape)


def mask(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    """Give a mask that hides nothing in any module's convention."""
    return torch.zeros(shape, dtype=dtype)


def masks_nothing(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Let every query look at every key."""
    return (batch == batch) & (head == head) & (q_idx >= 0) & (kv_idx >= 0)


def nested(*samples: Tensor) -> Tensor:
    """Give a nested tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that they are a prototype
        return torch.nested.nested_tensor(list(samples))


LAYER: Arguments = {"d_model": 33, "nhead": 3, "dim_feedforward": 13}
HEADS: Arguments = {"query": floats(2, 3, 5, 11), "key": floats(2, 3, 7, 11), "value": floats(2, 3, 7, 13)}
PACKED: Arguments = {
    **{name: floats(tokens, 3, 11) for name, tokens in (("query", 5), ("key", 7), ("value", 7))},
    "cu_seq_q": torch.tensor([0, 2, 5], dtype=torch.int32),
    "cu_seq_k": torch.tensor([0, 4, 7], dtype=torch.int32),
    "max_q": 3,
    "max_k": 4,
}
KEY, SRC, TGT = floats(7, 2, 33), floats(7, 2, 33), floats(5, 2, 33)
NESTED = nested(floats(5, 33), floats(3, 33))
UNBATCHED: Arguments = {"query": floats(5, 33), "key": floats(7, 33), "value": floats(7, 33)}

# What each component is built and called with, unless a case says otherwise.
USUAL: Mapping[str, tuple[Arguments | None, Arguments]] = {
    MHA: ({"embed_dim": 33, "num_heads": 3}, {"query": floats(5, 2, 33), "key": KEY, "value": KEY}),
    ENCODER_LAYER: (LAYER, {"src": SRC}),
    DECODER_LAYER: (LAYER, {"tgt": TGT, "memory": SRC}),
    ENCODER: ({"num_layers": 1, "enable_nested_tensor": False}, {"src": SRC}),
    DECODER: ({"num_layers": 1}, {"tgt": TGT, "memory": SRC}),
    TRANSFORMER: ({**LAYER, "num_encoder_layers": 1, "num_decoder_layers": 1}, {"src": SRC, "tgt": TGT}),
    SQUARE_MASK: (None, {"sz": 5}),
    SDPA: (None, HEADS),
    FLEX: (None, HEADS),
    BLOCKS: (None, {"mask_mod": masks_nothing, "B": 2, "H": 3, "Q_LEN": 5, "KV_LEN": 7, "device": "cpu"}),
    "flex.create_mask": (None, {"mod_fn": masks_nothing, "B": 2, "H": 3, "Q_LEN": 5, "KV_LEN": 7, "device": "cpu"}),
    VARLEN: (None, PACKED),
    "score_functions.causal": (None, {}),
    "score_functions.sliding_window": (None, {"window": 2}),
    "score_functions.document": (None, {"document_ids": torch.tensor([0, 1])}),
    "score_functions.prefix": (None, {"prefix_len": 2}),
    "score_functions.alibi": (None, {"slopes": floats(3)}),
    "score_functions.alibi_slopes": (None, {"num_heads": 3}),
    "score_functions.soft_cap": (None, {"cap": 2.0}),
    "score_functions.relative_bias": (None, {"table": floats(3, 5)}),
    "score_functions.add_sinks": (None, {"context": floats(2, 3, 5, 11), "lse": floats(2, 3, 5), "sinks": floats(3)}),
    "masks.causal": (None, {"query_len": 5}),
    "masks.sliding_window": (None, {"query_len": 5, "window": 2}),
    "masks.from_lengths": (None, {"lengths": torch.tensor([2, 3])}),
    "masks.from_token_ids": (None, {"token_ids": torch.tensor([2, 3]), "pad_id": 0}),
    "masks.from_module_mask": (None, {"module_mask": mask(5, 7)}),
    "masks.to_module_mask": (None, {"may_attend": mask(5, 7)}),
    "masks.from_score_bias": (None, {"score_bias": floats(5, 7)}),
    "masks.to_score_bias": (None, {"may_attend": mask(5, 7)}),
    "masks.draw": (None, {"may_attend": mask(5, 7)}),
}


def construct(package: Any, component: str, build: Arguments | None) -> Any:
    """Find a function of a package, or build a module of it; a stack gets one layer to copy."""
    found = package
    for name in component.split("."):
        found = getattr(found, name)
    if build is None:
        return found
    if component in (ENCODER, DECODER):
        layer = construct(package, f"{component}Layer", LAYER)
        return found(layer, **build)
    return found(**build)


def bad_call(
    component: str,
    name: str,
    call: Arguments,
    *says: str,
    error: type[Exception] = ValueError,
    build: Arguments | None = None,
    torch_accepts: str = "",
    torch_type: str = "",
    train_only: str = "",
) -> ErrorCase:
    """Make a case of the usual call with some arguments replaced."""
    usual_build, usual_call = USUAL[component]
    return ErrorCase(
        component,
        name,
        says,
        error,
        None if usual_build is None else {**usual_build, **(build or {})},
        {key: x for key, x in {**usual_call, **call}.items() if x is not MISSING},
        torch_accepts,
        torch_type,
        train_only,
    )


def bad_construction(
    component: str,
    name: str,
    build: Arguments,
    *says: str,
    error: type[Exception] = ValueError,
    torch_accepts: str = "",
) -> ErrorCase:
    """Make a case of the usual constructor with some arguments replaced."""
    usual_build, _ = USUAL[component]
    return ErrorCase(component, name, says, error, {**(usual_build or {}), **build}, None, torch_accepts, "", "")


def accepted(
    component: str, name: str, call: Arguments, *, build: Arguments | None = None, torch_rejects: str = ""
) -> AcceptedCase:
    """Make a case of the usual call with some arguments replaced."""
    usual_build, usual_call = USUAL[component]
    arguments = None if usual_build is None else {**usual_build, **(build or {})}
    return AcceptedCase(component, name, arguments, {**usual_call, **call}, torch_rejects)


DIVISIBLE = ("embed_dim must be divisible by num_heads",)
POSITIVE = "embed_dim and num_heads must be greater than 0"
ACTIVATION = ("activation should be relu/gelu", "'abc'")

CONSTRUCTORS = [
    bad_construction(MHA, "embed_dim 300, 299 heads", {"embed_dim": 300, "num_heads": 299}, *DIVISIBLE, "300", "299"),
    bad_construction(MHA, "embed_dim 5, 2 heads", {"embed_dim": 5, "num_heads": 2}, *DIVISIBLE, "(5 = 2 * 2 + 1)"),
    bad_construction(MHA, "embed_dim 0", {"embed_dim": 0}, POSITIVE, "embed_dim=0 and num_heads=3"),
    bad_construction(MHA, "embed_dim negative", {"embed_dim": -33}, POSITIVE, "embed_dim=-33"),
    bad_construction(MHA, "no heads", {"num_heads": 0}, POSITIVE, "num_heads=0"),
    *(
        bad_construction(
            component,
            f"{name} {value!r}",
            {name: value},
            f"{says} must be a whole number, got {value!r}",
            error=TypeError,
            torch_accepts="torch.nn builds it, and fails at the first call" if name in ("num_heads", "nhead") else "",
        )
        for component, name, value, says in (
            (MHA, "embed_dim", "33", "embed_dim"),
            (MHA, "embed_dim", 33.0, "embed_dim"),
            (MHA, "num_heads", 3.0, "num_heads"),
            (MHA, "kdim", 19.0, "kdim"),
            (ENCODER_LAYER, "nhead", 3.0, "num_heads"),
            (DECODER_LAYER, "dim_feedforward", 13.0, "dim_feedforward"),
            (ENCODER, "num_layers", "2", "num_layers"),
        )
    ),
    bad_construction(MHA, "kdim negative", {"kdim": -1}, "kdim must not be negative, got -1"),
    bad_construction(MHA, "vdim negative", {"vdim": -1}, "vdim must not be negative, got -1"),
    *(
        bad_construction(component, "heads do not divide", {"nhead": 5}, *DIVISIBLE, "embed_dim=33 and num_heads=5")
        for component in (ENCODER_LAYER, DECODER_LAYER, TRANSFORMER)
    ),
    *(
        bad_construction(component, "d_model 0", {"d_model": 0}, POSITIVE, "embed_dim=0")
        for component in (ENCODER_LAYER, DECODER_LAYER, TRANSFORMER)
    ),
    *(
        bad_construction(
            component, "hidden layer negative", {"dim_feedforward": -1}, "dim_feedforward must not be", "-1"
        )
        for component in (ENCODER_LAYER, DECODER_LAYER, TRANSFORMER)
    ),
    *(
        bad_construction(component, "unknown activation", {"activation": "abc"}, *ACTIVATION)
        for component in (ENCODER_LAYER, DECODER_LAYER, TRANSFORMER)
    ),
    *(
        bad_construction(
            component,
            "activation no function",
            {"activation": 3},
            'activation must be "relu", "gelu" or a function',
            "int",
            error=TypeError,
            torch_accepts="torch.nn keeps it, and fails at the first call",
        )
        for component in (ENCODER_LAYER, DECODER_LAYER, TRANSFORMER)
    ),
    *(
        bad_construction(
            component, "dropout 1.5", {"dropout": 1.5}, "dropout probability has to be between 0 and 1", "1.5"
        )
        for component in (ENCODER_LAYER, DECODER_LAYER, TRANSFORMER)
    ),
    *(
        bad_construction(
            component,
            "fewer than no layers",
            {"num_layers": -1},
            "num_layers must not be negative, got -1",
            torch_accepts="torch.nn takes it for no layers",
        )
        for component in (ENCODER, DECODER)
    ),
    *(
        bad_call(
            component,
            "no layers",
            {},
            "num_layers must be greater than 0 in a stack that is called, got num_layers=0",
            build={"num_layers": 0},
        )
        for component in (ENCODER, DECODER)
    ),
]

MHA_RANKS = [
    bad_call(
        MHA, "key 2-D", {"key": floats(7, 33)}, "expected `key` and `value` to be 3-D but found 2-D and 3-D tensors"
    ),
    bad_call(
        MHA, "value 2-D", {"value": floats(7, 33)}, "expected `key` and `value` to be 3-D but found 3-D and 2-D tensors"
    ),
    bad_call(
        MHA,
        "key 3-D without a batch",
        {**UNBATCHED, "key": KEY},
        "expected `key` and `value` to be 2-D but found 3-D and 2-D tensors respectively",
    ),
    bad_call(
        MHA,
        "value 3-D without a batch",
        {**UNBATCHED, "value": KEY},
        "expected `key` and `value` to be 2-D but found 2-D and 3-D tensors respectively",
    ),
    bad_call(
        MHA,
        "query 1-D",
        {"query": floats(33)},
        "query should be unbatched 2D or batched 3D tensor but received 1-D query tensor",
        "(33,)",
    ),
    bad_call(MHA, "query 4-D", {"query": floats(1, 5, 2, 33)}, "received 4-D query tensor", "(1, 5, 2, 33)"),
    bad_call(
        MHA,
        "key_padding_mask 1-D",
        {"key_padding_mask": mask(7)},
        "expected `key_padding_mask` to be `None` or 2-D but found 1-D tensor instead",
    ),
    bad_call(
        MHA,
        "key_padding_mask 3-D",
        {"key_padding_mask": mask(2, 1, 7)},
        "For batched (3-D) `query`, expected `key_padding_mask` to be `None` or 2-D but found 3-D tensor instead",
    ),
    bad_call(
        MHA,
        "key_padding_mask 2-D without a batch",
        {**UNBATCHED, "key_padding_mask": mask(1, 7)},
        "expected `key_padding_mask` to be `None` or 1-D but found 2-D tensor instead",
    ),
    bad_call(
        MHA,
        "attn_mask 1-D",
        {"attn_mask": mask(7)},
        "expected `attn_mask` to be `None`, 2-D or 3-D but found 1-D tensor instead",
    ),
    bad_call(
        MHA,
        "attn_mask 4-D",
        {"attn_mask": mask(2, 3, 5, 7)},
        "For batched (3-D) `query`, expected `attn_mask` to be `None`, 2-D or 3-D but found 4-D tensor instead",
    ),
    bad_call(
        MHA,
        "attn_mask 1-D without a batch",
        {**UNBATCHED, "attn_mask": mask(7)},
        "For unbatched (2-D) `query`, expected `attn_mask` to be `None`, 2-D or 3-D but found 1-D tensor instead",
    ),
    bad_call(
        MHA,
        "query no tensor",
        {"query": [[1.0]]},
        "query must be a tensor, got list",
        error=TypeError,
    ),
    bad_call(
        MHA,
        "key None",
        {"key": None},
        "key must be a tensor, got NoneType",
        error=TypeError,
    ),
    bad_call(
        MHA, "attn_mask no tensor", {"attn_mask": [[True]]}, "attn_mask must be a tensor, got list", error=TypeError
    ),
    bad_call(
        MHA,
        "nested tensors",
        {"query": NESTED, "key": NESTED, "value": NESTED},
        "query must not be a nested tensor",
        "key_padding_mask",
        error=TypeError,
    ),
]

MHA_SHAPES = [
    bad_call(
        MHA,
        "query 299 for 300",
        {"query": floats(12, 2, 299), "key": floats(10, 2, 300), "value": floats(10, 2, 300)},
        "query must have embed_dim = 300 features",
        "was expecting embedding dimension of 300, but got 299",
        build={"embed_dim": 300, "num_heads": 6},
    ),
    bad_call(
        MHA, "key too wide", {"key": floats(7, 2, 34), "value": KEY}, "key must have kdim = 33 features", "(7, 2, 34)"
    ),
    bad_call(MHA, "value too wide", {"value": floats(7, 2, 34)}, "value must have vdim = 33 features", "(7, 2, 34)"),
    bad_call(
        MHA,
        "key and value too wide",
        {"key": floats(7, 2, 34), "value": floats(7, 2, 34)},
        "key must have kdim = 33 features",
        "(7, 2, 34)",
    ),
    bad_call(
        MHA,
        "key not kdim wide",
        {"value": floats(7, 2, 23)},
        "key must have kdim = 19 features",
        "(7, 2, 33)",
        build={"kdim": 19, "vdim": 23},
    ),
    bad_call(
        MHA,
        "key longer than value",
        {"value": floats(8, 2, 33)},
        "key and value must agree in length and batch",
        "(7, 2, 33) and (8, 2, 33)",
    ),
    bad_call(
        MHA,
        "key longer than value, separate widths",
        {"key": floats(7, 2, 19), "value": floats(8, 2, 23)},
        "key and value must agree in length and batch",
        "(7, 2, 19) and (8, 2, 23)",
        build={"kdim": 19, "vdim": 23},
    ),
    bad_call(
        MHA,
        "batches differ",
        {"query": floats(5, 3, 33)},
        "query and key must have the same batch size, got 3 and 2",
        "(5, 3, 33)",
        "batch_first=False",
    ),
    bad_call(
        MHA,
        "batches differ, batch first",
        {},
        "query and key must have the same batch size, got 5 and 7",
        "(5, 2, 33)",
        "(batch, len, features)",
        build={"batch_first": True},
    ),
    bad_call(
        MHA,
        "key_padding_mask for another batch",
        {"key_padding_mask": mask(3, 7)},
        "key_padding_mask must have shape (batch, key_len) = (2, 7), got (3, 7)",
    ),
    bad_call(
        MHA,
        "key_padding_mask too short",
        {"key_padding_mask": mask(2, 6)},
        "key_padding_mask must have shape (batch, key_len) = (2, 7), got (2, 6)",
    ),
    bad_call(
        MHA,
        "key_padding_mask too long without a batch",
        {**UNBATCHED, "key_padding_mask": mask(8)},
        "key_padding_mask must have shape (key_len,) = (7,), got (8,)",
    ),
    bad_call(
        MHA,
        "attn_mask transposed",
        {"attn_mask": mask(7, 5)},
        "attn_mask must have shape (query_len, key_len) = (5, 7) or (batch * num_heads, query_len, key_len) = "
        "(6, 5, 7), got (7, 5)",
    ),
    bad_call(
        MHA,
        "attn_mask for the batch without heads",
        {"attn_mask": mask(2, 5, 7)},
        "(batch * num_heads, query_len, key_len) = (6, 5, 7), got (2, 5, 7)",
    ),
    bad_call(
        MHA,
        "attn_mask for other heads without a batch",
        {**UNBATCHED, "attn_mask": mask(5, 5, 7)},
        "(num_heads, query_len, key_len) = (3, 5, 7), got (5, 5, 7)",
        "Expected `attn_mask` shape to be (3, 5, 7)",
    ),
    bad_call(
        MHA,
        "attn_mask for other heads without a batch, replaced by is_causal",
        {**UNBATCHED, "attn_mask": mask(5, 5, 7), "is_causal": True, "need_weights": False},
        "(num_heads, query_len, key_len) = (3, 5, 7), got (5, 5, 7)",
    ),
    bad_call(
        MHA,
        "attn_mask transposed beside is_causal",
        {"attn_mask": mask(7, 5), "is_causal": True},
        "attn_mask must have shape (query_len, key_len) = (5, 7)",
    ),
    bad_call(
        MHA,
        "attn_mask transposed beside is_causal and padding",
        {"attn_mask": mask(7, 5), "is_causal": True, "need_weights": False, "key_padding_mask": mask(2, 7)},
        "attn_mask must have shape (query_len, key_len) = (5, 7)",
    ),
    bad_call(
        MHA,
        "is_causal without attn_mask",
        {"is_causal": True},
        "is_causal=True needs attn_mask",
        "Need attn_mask if specifying the is_causal hint",
        "got None",
    ),
    bad_call(
        MHA,
        "is_causal without attn_mask or weights",
        {"is_causal": True, "need_weights": False},
        "is_causal=True needs attn_mask",
        "got None",
    ),
]

MHA_DTYPES = [
    bad_call(
        MHA,
        "dropout 1.5",
        {},
        "dropout probability has to be between 0 and 1",
        "dropout=1.5",
        build={"dropout": 1.5},
        train_only="nothing is dropped in eval",
    ),
    bad_call(
        MHA,
        "dropout negative",
        {},
        "dropout probability has to be between 0 and 1",
        "dropout=-0.5",
        build={"dropout": -0.5},
        torch_accepts="torch.nn takes it for 0 where it returns weights",
        train_only="nothing is dropped in eval",
    ),
    *(
        bad_call(
            MHA,
            f"{name} of {dtype}",
            {name: mask(*shape, dtype=dtype)},
            f"{name} must be bool or floating",
            f"only bool and floating types of {name} are supported",
            f"got {dtype}",
            f"{name}.bool()",
            error=TypeError,
        )
        for name, shape in (("attn_mask", (5, 7)), ("key_padding_mask", (2, 7)))
        for dtype in (torch.uint8, torch.int64)
    ),
    bad_call(
        MHA,
        "float64 inputs, float32 weights",
        {name: x.double() for name, x in UNBATCHED.items()},
        "query must have the dtype of the weights, torch.float32, got torch.float64",
        "must have the same dtype",
        error=TypeError,
    ),
    bad_call(
        MHA,
        "float64 inputs and a float mask, float32 weights",
        {
            "query": floats(5, 2, 33, dtype=torch.float64),
            "key": KEY.double(),
            "value": KEY.double(),
            "attn_mask": mask(5, 7),
            "key_padding_mask": mask(2, 7, dtype=torch.float32),
        },
        "got torch.float64",
        "must have the same dtype",
        error=TypeError,
    ),
    bad_call(MHA, "float64 key", {"key": KEY.double()}, "key must have the dtype", "torch.float64", error=TypeError),
    *(
        bad_call(
            MHA,
            f"float64 {name}, need_weights={need_weights}",
            {"need_weights": need_weights, name: mask(*shape, dtype=torch.float64)},
            f"{name} must be bool or have the dtype of query, torch.float32, got torch.float64",
            error=TypeError,
        )
        for name, shape in (("attn_mask", (5, 7)), ("key_padding_mask", (2, 7)))
        for need_weights in (True, False)
    ),
    bad_call(
        MHA,
        "float64 attn_mask beside bool padding",
        {"attn_mask": mask(5, 7, dtype=torch.float64), "key_padding_mask": mask(2, 7)},
        "attn_mask must be bool or have the dtype of query, torch.float32, got torch.float64",
        error=TypeError,
    ),
    bad_call(
        MHA,
        "bfloat16 attn_mask",
        {"attn_mask": mask(5, 7, dtype=torch.bfloat16)},
        "attn_mask must be bool or have the dtype of query, torch.float32, got torch.bfloat16",
        error=TypeError,
    ),
    bad_call(
        MHA,
        "both masks bfloat16",
        {"attn_mask": mask(5, 7, dtype=torch.bfloat16), "key_padding_mask": mask(2, 7, dtype=torch.bfloat16)},
        "attn_mask must be bool or have the dtype of query, torch.float32, got torch.bfloat16",
        error=TypeError,
    ),
    bad_call(
        MHA,
        "float32 attn_mask beside bfloat16",
        {
            "query": floats(5, 2, 33, dtype=torch.bfloat16),
            "key": KEY.bfloat16(),
            "value": KEY.bfloat16(),
            "attn_mask": mask(5, 7, dtype=torch.float32),
        },
        "attn_mask must be bool or have the dtype of query, torch.bfloat16, got torch.float32",
        error=TypeError,
        build={"dtype": torch.bfloat16},
    ),
]

LAYER_MASK_DTYPES = [
    bad_call(
        component,
        f"{name} of uint8",
        {name: mask(*shape, dtype=torch.uint8)},
        f"{name} must be bool or floating",
        f"only bool and floating types of {name} are supported",
        ".bool()",
        error=TypeError,
    )
    for component, name, shape in (
        (ENCODER_LAYER, "src_mask", (7, 7)),
        (ENCODER_LAYER, "src_key_padding_mask", (2, 7)),
        (DECODER_LAYER, "tgt_mask", (5, 5)),
        (DECODER_LAYER, "tgt_key_padding_mask", (2, 5)),
        (DECODER_LAYER, "memory_mask", (5, 7)),
        (DECODER_LAYER, "memory_key_padding_mask", (2, 7)),
        (ENCODER, "mask", (7, 7)),
        (ENCODER, "src_key_padding_mask", (2, 7)),
        (DECODER, "tgt_mask", (5, 5)),
        (DECODER, "tgt_key_padding_mask", (2, 5)),
        (DECODER, "memory_mask", (5, 7)),
        (DECODER, "memory_key_padding_mask", (2, 7)),
        (TRANSFORMER, "tgt_mask", (5, 5)),
        (TRANSFORMER, "src_key_padding_mask", (2, 7)),
        (TRANSFORMER, "memory_mask", (5, 7)),
    )
]

LAYER_MASK_SHAPES = [
    bad_call(
        component,
        f"{name} one too long",
        {name: mask(*wrong)},
        f"mask must have shape (query_len, key_len) = {right}",
        f"got {wrong}",
    )
    for component, name, right, wrong in (
        (ENCODER_LAYER, "src_mask", (7, 7), (8, 8)),
        (DECODER_LAYER, "tgt_mask", (5, 5), (6, 6)),
        (DECODER_LAYER, "memory_mask", (5, 7), (6, 8)),
        (ENCODER, "mask", (7, 7), (8, 8)),
        (DECODER, "tgt_mask", (5, 5), (6, 6)),
        (DECODER, "memory_mask", (5, 7), (7, 5)),
        (TRANSFORMER, "src_mask", (7, 7), (8, 8)),
        (TRANSFORMER, "tgt_mask", (5, 5), (6, 6)),
        (TRANSFORMER, "memory_mask", (5, 7), (6, 8)),
    )
]

LAYER_PADDING_SHAPES = [
    bad_call(
        component,
        f"{name} for another batch",
        {name: mask(*wrong)},
        f"{name} must have shape (batch, key_len) = {right}",
        f"got {wrong}",
    )
    for component, name, right, wrong in (
        (ENCODER_LAYER, "src_key_padding_mask", (2, 7), (3, 7)),
        (DECODER_LAYER, "tgt_key_padding_mask", (2, 5), (2, 6)),
        (DECODER_LAYER, "memory_key_padding_mask", (2, 7), (7, 2)),
        (ENCODER, "src_key_padding_mask", (2, 7), (3, 7)),
        (DECODER, "memory_key_padding_mask", (2, 7), (3, 7)),
        (TRANSFORMER, "src_key_padding_mask", (2, 7), (2, 8)),
        (TRANSFORMER, "tgt_key_padding_mask", (2, 5), (3, 5)),
        (TRANSFORMER, "memory_key_padding_mask", (2, 7), (2, 5)),
    )
]

LAYER_HINTS = [
    bad_call(
        component,
        f"{hint} without a mask",
        {argument: True},
        f"{hint}=True needs {name}",
        "Need attn_mask if specifying the is_causal hint",
    )
    for component, argument, hint, name in (
        (ENCODER_LAYER, "is_causal", "is_causal", "src_mask"),
        (DECODER_LAYER, "tgt_is_causal", "tgt_is_causal", "tgt_mask"),
        (DECODER_LAYER, "memory_is_causal", "memory_is_causal", "memory_mask"),
        (ENCODER, "is_causal", "is_causal", "src_mask"),
        (DECODER, "tgt_is_causal", "tgt_is_causal", "tgt_mask"),
        (TRANSFORMER, "src_is_causal", "is_causal", "src_mask"),
        (TRANSFORMER, "memory_is_causal", "memory_is_causal", "memory_mask"),
    )
]

LAYER_INPUTS = [
    bad_call(
        ENCODER_LAYER, "src too wide", {"src": floats(7, 2, 34)}, "src must have embed_dim = 33 features", "but got 34"
    ),
    bad_call(ENCODER_LAYER, "src 1-D", {"src": floats(33)}, "src", "but received 1-D query tensor"),
    bad_call(
        ENCODER,
        "src no tensor",
        {"src": [1.0]},
        "src must be a tensor, got list",
        error=TypeError,
    ),
    bad_call(ENCODER, "mask no tensor", {"mask": [[True]]}, "mask must be a tensor, got list", error=TypeError),
    bad_call(ENCODER, "src too wide", {"src": floats(7, 2, 34)}, "src must have embed_dim = 33 features", "but got 34"),
    bad_call(ENCODER, "src 1-D", {"src": floats(33)}, "src must be 2-D (len, d_model) or 3-D with a batch, got 1-D"),
    bad_call(
        ENCODER,
        "float64 src",
        {"src": SRC.double()},
        "src must have the dtype of the weights, torch.float32, got torch.float64",
        error=TypeError,
    ),
    *(
        bad_call(ENCODER, f"whole numbers beside {name}", {"src": SRC.long(), **masks}, says, error=TypeError)
        for name, masks, says in (
            ("a bool mask", {"mask": mask(7, 7)}, "src must be floating beside a bool mask, which becomes a bias"),
            ("bool padding", {"src_key_padding_mask": mask(2, 7)}, "src must be floating beside a bool mask"),
            ("a float mask", {"mask": mask(7, 7, dtype=torch.float32)}, "src must have the dtype of the weights"),
        )
    ),
    bad_call(
        DECODER_LAYER,
        "memory missing",
        {"memory": MISSING},
        "missing 1 required positional argument: 'memory'",
        error=TypeError,
    ),
    bad_call(
        DECODER_LAYER, "memory too wide", {"memory": floats(7, 2, 34)}, "memory must have", "33 features", "(7, 2, 34)"
    ),
    bad_call(
        DECODER_LAYER,
        "tgt without a batch",
        {"tgt": floats(5, 33)},
        "For unbatched (2-D) `tgt`, expected `memory`",
        "3-D and 3-D tensors respectively",
    ),
    bad_call(
        DECODER_LAYER,
        "batches differ",
        {"memory": floats(7, 3, 33)},
        "tgt and memory must have the same batch size, got 2 and 3",
    ),
    bad_call(
        DECODER, "tgt 4-D", {"tgt": floats(1, 5, 2, 33)}, "tgt must be 2-D (len, d_model) or 3-D with a batch, got 4-D"
    ),
    bad_call(DECODER, "memory too wide", {"memory": floats(7, 2, 34)}, "memory must have", "33 features", "(7, 2, 34)"),
    *(
        bad_call(
            TRANSFORMER,
            f"{name} of another batch",
            {name: floats(7, 3, 33)},
            "src and tgt must have the same batch size",
            "the batch number of src and tgt must be equal",
        )
        for name in ("src", "tgt")
    ),
    *(
        bad_call(
            TRANSFORMER,
            f"{name} too wide",
            {name: floats(7, 2, 34)},
            f"{name} must have d_model = 33 features",
            "must be equal to d_model",
            "(7, 2, 34)",
        )
        for name in ("src", "tgt")
    ),
    bad_call(
        TRANSFORMER,
        "tgt without a batch",
        {"tgt": floats(5, 33)},
        "the batch number of src and tgt must be equal",
        "(7, 2, 33) and (5, 33)",
    ),
    bad_call(
        TRANSFORMER,
        "tgt without a batch, as wide as the batch of src is large",
        {"src": floats(7, 33, 33), "tgt": floats(5, 33)},
        "the batch number of src and tgt must be equal",
        "(7, 33, 33) and (5, 33)",
    ),
    bad_call(
        TRANSFORMER,
        "src without a batch",
        {"src": floats(7, 33)},
        "expected `memory`",
        "2-D and 2-D tensors respectively",
    ),
    bad_call(
        TRANSFORMER,
        "src 1-D",
        {"src": floats(33)},
        "src must be 2-D (len, d_model) or 3-D with a batch, got 1-D",
        torch_type=NO_SUCH_CHECK + "an IndexError",
    ),
    *(
        bad_call(
            component,
            f"{name} nested",
            {name: NESTED},
            f"{name} must not be a nested tensor",
            error=TypeError,
            train_only=reason,
        )
        for component, name, reason in (
            (ENCODER_LAYER, "src", NESTED_IN_EVAL),
            (ENCODER, "src", ""),
            (DECODER_LAYER, "tgt", ""),
            (DECODER_LAYER, "memory", ""),
            (DECODER, "tgt", ""),
            (TRANSFORMER, "src", ""),
            (TRANSFORMER, "tgt", ""),
        )
    ),
    bad_call(SQUARE_MASK, "size negative", {"sz": -1}, "sz must not be negative, got -1"),
    bad_call(
        SQUARE_MASK,
        "dtype of integers",
        {"dtype": torch.int64},
        "dtype must be floating, or bool",
        "got torch.int64",
        error=TypeError,
    ),
]

SDPA_CASES = [
    bad_call(SDPA, "query 1-D", {"query": floats(11)}, "query must be at least 2-D", "(11,)"),
    bad_call(
        SDPA,
        "query 1-D, key and value 2-D",
        {"query": floats(4), "key": floats(1, 4), "value": floats(1, 4)},
        "query must be at least 2-D (len, head_dim), got shape (4,)",
    ),
    bad_call(SDPA, "query no tensor", {"query": None}, "query must be a tensor, got NoneType", error=TypeError),
    *(
        bad_call(SDPA, f"{name} a list", {name: [1.0]}, f"{name} must be a tensor, got list", error=TypeError)
        for name in HEADS
    ),
    bad_call(
        SDPA,
        "half key and value",
        {"key": floats(2, 3, 7, 11).half(), "value": floats(2, 3, 7, 13).half()},
        "query, key and value must have the same dtype",
        "torch.float32, torch.float16 and torch.float16",
        error=TypeError,
    ),
    bad_call(
        SDPA,
        "integers",
        {name: x.long() for name, x in HEADS.items()},
        "query must be floating, got torch.int64",
        error=TypeError,
    ),
    bad_call(
        SDPA,
        "devices differ",
        {"key": floats(2, 3, 7, 11).to("meta"), "value": floats(2, 3, 7, 13).to("meta")},
        "query, key and value must be on the same device, got cpu, meta and meta",
    ),
    bad_call(
        SDPA,
        "nested tensors",
        dict.fromkeys(HEADS, nested(floats(3, 5, 11), floats(3, 7, 11))),
        "query must not be a nested tensor",
        error=TypeError,
        torch_accepts="torch computes them; PyTorch has stopped their development",
    ),
    bad_call(
        SDPA,
        "attn_mask of integers",
        {"attn_mask": mask(5, 7, dtype=torch.int64)},
        "attn_mask must be bool (True = may look), float32 or of query's dtype",
        "torch.int64",
        ".bool()",
        error=TypeError,
    ),
    bad_call(
        SDPA,
        "attn_mask of bytes",
        {"attn_mask": mask(5, 7, dtype=torch.uint8)},
        "torch.uint8",
        "attn_mask.bool()",
        error=TypeError,
    ),
    bad_call(
        SDPA,
        "attn_mask of float64",
        {"attn_mask": mask(5, 7, dtype=torch.float64)},
        "of query's dtype torch.float32, got torch.float64",
        error=TypeError,
    ),
    bad_call(
        SDPA,
        "attn_mask transposed",
        {"attn_mask": mask(7, 5)},
        "attn_mask must be broadcastable to (..., query_len, key_len) = (2, 3, 5, 7), got (7, 5)",
    ),
    bad_call(SDPA, "attn_mask 5-D", {"attn_mask": mask(1, 2, 3, 5, 7)}, "(2, 3, 5, 7), got (1, 2, 3, 5, 7)"),
    bad_call(
        SDPA,
        "attn_mask beside is_causal",
        {"attn_mask": ~mask(5, 7), "is_causal": True},
        "attn_mask and is_causal=True exclude each other",
        "_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True",
    ),
    bad_call(
        SDPA,
        "attn_mask beside is_causal, 3-D",
        {**{name: x[0] for name, x in HEADS.items()}, "attn_mask": ~mask(5, 7), "is_causal": True},
        "Explicit attn_mask should not be set when is_causal=True",
    ),
    *(
        bad_call(
            SDPA,
            f"{variant.__name__} beside is_causal",
            {"attn_mask": variant(5, 7), "is_causal": True},
            "attn_mask is already causal",
            "CausalBias should not be used with causal=True",
        )
        for variant in (causal_upper_left, causal_lower_right)
    ),
    bad_call(SDPA, "key too wide", {"key": floats(2, 3, 7, 12)}, "key must have the head_dim of query, 11, got 12"),
    bad_call(
        SDPA, "value longer than key", {"value": floats(2, 3, 8, 13)}, "value must have the key_len of key, 7, got 8"
    ),
    bad_call(
        SDPA,
        "value longer than key, equal widths",
        {"value": floats(2, 3, 8, 11)},
        "value must have the key_len of key, 7, got 8",
        torch_accepts=COMPUTES_NONSENSE,
    ),
    bad_call(
        SDPA,
        "batches differ",
        {"key": floats(3, 3, 7, 11), "value": floats(3, 3, 7, 13)},
        "key must have the leading dimensions of query, (2, 3)",
        "(3, 3, 7, 11)",
    ),
    bad_call(
        SDPA,
        "batch of value differs",
        {"value": floats(3, 3, 7, 13)},
        "value must have the leading dimensions of query, (2, 3)",
        "(3, 3, 7, 13)",
    ),
    bad_call(
        SDPA,
        "batches differ beside grouped heads",
        {"query": floats(3, 6, 5, 11), "enable_gqa": True},
        "key must have the leading dimensions of query, (3,)",
        "(2, 3, 7, 11)",
    ),
    bad_call(
        SDPA,
        "query without heads to group",
        {"query": floats(5, 11), "key": floats(3, 7, 11), "value": floats(3, 7, 13), "enable_gqa": True},
        "the heads of key must divide the heads of query",
        "(3, 7, 11) and (5, 11)",
        torch_type=NO_SUCH_CHECK + "an IndexError",
    ),
    bad_call(
        SDPA,
        "key without grouped heads",
        {"key": floats(7, 11), "enable_gqa": True},
        "the heads of key must divide the heads of query",
        "(7, 11) and (2, 3, 5, 11)",
        torch_type=NO_SUCH_CHECK + "an IndexError",
    ),
    bad_call(
        SDPA,
        "grouped heads without enable_gqa",
        {"query": floats(2, 65, 5, 11), "key": floats(2, 5, 7, 11), "value": floats(2, 5, 7, 13)},
        "key must have the leading dimensions of query, (2, 65)",
    ),
    bad_call(
        SDPA,
        "grouped heads do not divide",
        {"query": floats(2, 7, 5, 11), "enable_gqa": True},
        "the heads of key must divide the heads of query",
        "Number of heads in key and value must divide the number of",
    ),
    bad_call(
        SDPA,
        "grouped values without heads",
        {"value": floats(2, 0, 7, 13), "enable_gqa": True},
        "the heads of value must divide the heads of query",
        torch_accepts="torch looks at nothing more where a tensor is empty",
    ),
    bad_call(
        SDPA, "dropout_p 1.5", {"dropout_p": 1.5}, "dropout probability has to be between 0 and 1", "dropout_p=1.5"
    ),
    bad_call(
        SDPA,
        "dropout_p negative",
        {"dropout_p": -0.5},
        "dropout probability has to be between 0 and 1",
        "dropout_p=-0.5",
        torch_accepts="torch's MATH backend takes it for 0, its fused kernel raises",
    ),
]

MASKS = [
    *(
        bad_call(f"masks.{name}", "length negative", {"query_len": -1}, "query_len must not be negative, got -1")
        for name in ("causal", "sliding_window")
    ),
    *(
        bad_call(
            f"masks.{name}",
            "unknown alignment",
            {"align": "bottom_right"},
            "align must be one of 'upper_left', 'lower_right', got 'bottom_right'",
        )
        for name in ("causal", "sliding_window")
    ),
    bad_call("masks.causal", "key_len negative", {"key_len": -2}, "key_len must not be negative, got -2"),
    bad_call("masks.sliding_window", "window 0", {"window": 0}, "window must be at least 1", "got 0"),
    bad_call(
        "masks.from_lengths", "lengths of floats", {"lengths": floats(2)}, "lengths must hold integers", error=TypeError
    ),
    bad_call(
        "masks.from_lengths",
        "lengths of bool",
        {"lengths": mask(2)},
        "lengths must hold integers, got torch.bool",
        error=TypeError,
    ),
    bad_call(
        "masks.from_lengths",
        "lengths of complex numbers",
        {"lengths": mask(2, dtype=torch.complex64)},
        "lengths must hold integers, got torch.complex64",
        error=TypeError,
    ),
    bad_call("masks.from_lengths", "lengths 2-D", {"lengths": torch.tensor([[2]])}, "lengths must be 1-D, got 2-D"),
    bad_call(
        "masks.from_token_ids",
        "ids of floats",
        {"token_ids": floats(2, 5)},
        "token_ids must hold integers, got torch.float32",
        error=TypeError,
    ),
    bad_call(
        "masks.from_module_mask",
        "bytes",
        {"module_mask": mask(5, 7, dtype=torch.uint8)},
        "module_mask must be bool or floating",
        "module_mask.bool()",
        error=TypeError,
    ),
    bad_call(
        "masks.from_module_mask",
        "bias",
        {"module_mask": torch.ones(5, 7)},
        "must hold only 0 (may look) and -inf (may not)",
    ),
    bad_call("masks.from_score_bias", "bias", {"score_bias": torch.ones(5, 7)}, "score_bias must hold only 0"),
    bad_call(
        "masks.from_score_bias",
        "bool",
        {"score_bias": mask(5, 7)},
        "score_bias must be floating, got torch.bool",
        error=TypeError,
    ),
    *(
        bad_call(
            f"masks.{name}",
            "floats",
            {"may_attend": floats(5, 7)},
            "may_attend must be a bool tensor (True = may look), got torch.float32",
            error=TypeError,
        )
        for name in ("to_module_mask", "to_score_bias", "draw")
    ),
    *(
        bad_call(f"masks.{name}", f"{argument} {value!r}", {argument: value}, f"{argument} {says}", error=TypeError)
        for name, argument, value, says in (
            ("causal", "query_len", 2.5, "must be a whole number, got 2.5"),
            ("sliding_window", "window", 1.5, "must be a whole number, got 1.5"),
            ("from_lengths", "lengths", [2, 3], "must be a tensor, got list"),
            ("from_lengths", "max_len", 2.5, "must be a whole number, got 2.5"),
            ("from_token_ids", "token_ids", [[2, 3]], "must be a tensor, got list"),
            ("from_module_mask", "module_mask", [[True]], "must be a tensor, got list"),
            ("from_score_bias", "score_bias", [[0.0]], "must be a tensor, got list"),
            ("to_score_bias", "dtype", torch.int64, "must be a floating dtype, got torch.int64"),
            ("draw", "may_attend", [[True]], "must be a tensor, got list"),
        )
    ),
    bad_call("masks.from_lengths", "max_len negative", {"max_len": -2}, "max_len must not be negative, got -2"),
    bad_call("masks.draw", "3-D", {"may_attend": mask(2, 5, 7)}, "may_attend must be 2-D, got 3-D of shape (2, 5, 7)"),
]

EAGER = "torch's eager path "
TRACED = "torch's tracer raises an error of its own: "
GROUPED_KEY: Arguments = {"key": floats(2, 2, 7, 11), "value": floats(2, 2, 7, 13)}


def takes_a_score(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Change nothing."""
    return score + 0 * (batch + head + q_idx + kv_idx)


FLEX_CASES = [
    *(
        bad_call(
            FLEX,
            f"{name} a list",
            {name: [1.0]},
            f"{name} must be a tensor, got list",
            error=TypeError,
        )
        for name in ("query", "key", "value")
    ),
    bad_call(
        FLEX,
        "query 3-D",
        {"query": floats(3, 5, 11)},
        "query must be 4-D (batch, num_heads, query_len, head_dim), got shape (3, 5, 11)",
    ),
    bad_call(
        FLEX,
        "return_aux True",
        {"return_aux": True},
        "return_aux must be an AuxRequest, got bool",
        error=TypeError,
        torch_type=NO_SUCH_CHECK + "an AttributeError",
    ),
    bad_call(
        FLEX,
        "key 5-D",
        {"key": floats(1, 2, 3, 7, 11)},
        "key must be 4-D (batch, num_key_heads, key_len, head_dim), got shape (1, 2, 3, 7, 11)",
    ),
    bad_call(
        FLEX,
        "value nested",
        {"value": nested(floats(3, 7, 13), floats(3, 5, 13))},
        "value must be 4-D (batch, num_key_heads, key_len, v_head_dim), got a nested tensor",
        torch_type=f"{TRACED}torch._dynamo.exc.Unsupported" if torch.__version__ < "2.12" else "",
    ),
    bad_call(
        FLEX,
        "whole numbers",
        {name: x.long() for name, x in HEADS.items()},
        "query must be floating, got torch.int64",
        error=TypeError,
        torch_accepts=f"{EAGER}casts them, its kernels do not",
    ),
    bad_call(
        FLEX, "key elsewhere", {"key": HEADS["key"].to("meta")}, "must be on the same device, got cpu, meta and cpu"
    ),
    bad_call(FLEX, "key too wide", {"key": floats(2, 3, 7, 13)}, "key must have the head_dim of query, 11, got 13"),
    bad_call(FLEX, "fewer values", {"value": floats(2, 3, 5, 13)}, "value must have the key_len of key, 7, got 5"),
    bad_call(
        FLEX,
        "fewer heads of values",
        {"value": floats(2, 1, 7, 13)},
        "value must have the batch and the heads of key, (2, 3), got shape (2, 1, 7, 13)",
        torch_accepts=f"{EAGER}broadcasts them, its kernels do not",
    ),
    bad_call(FLEX, "fewer heads of keys", GROUPED_KEY, "key must have the heads of query, 3, got 2", "enable_gqa=True"),
    bad_call(
        FLEX,
        "heads that do not divide",
        {**GROUPED_KEY, "enable_gqa": True},
        "the heads of key must divide the heads of query, got 2 and 3",
    ),
    bad_call(
        FLEX,
        "one sample of keys",
        {"key": floats(1, 3, 7, 11), "value": floats(1, 3, 7, 13)},
        "key must have the batch of query, 2, or 1 beside a block_mask for each sample, got shape (1, 3, 7, 11)",
    ),
    *(
        bad_call(
            FLEX,
            f"no {what}",
            call,
            f"{name} must have at least one head, one key and one feature to compare",
            torch_type=f"{NO_SUCH_CHECK}{error}",
        )
        for what, name, call, error in (
            ("keys", "key", {"key": floats(2, 3, 0, 11), "value": floats(2, 3, 0, 13)}, "an IndexError"),
            ("heads", "query", {name: x[:, :0] for name, x in HEADS.items()}, "a ZeroDivisionError"),
            ("features", "query", {"query": floats(2, 3, 5, 0), "key": floats(2, 3, 7, 0)}, "a ZeroDivisionError"),
        )
    ),
    *(
        bad_call(
            FLEX,
            name,
            {"score_mod": score_mod},
            f"score_mod must be a function of (score, batch, head, q_idx, kv_idx), {says}",
            error=TypeError,
            torch_type=f"{TRACED}torch._dynamo.exc.Unsupported",
        )
        for name, score_mod, says in (
            ("score_mod a number", 2.0, "got float"),
            ("score_mod without a score", masks_nothing, "got one of (batch, head, q_idx, kv_idx)"),
        )
    ),
    bad_call(
        FLEX,
        "block_mask a tensor",
        {"block_mask": mask(5, 7)},
        "block_mask must be a BlockMask, as create_block_mask makes it, got Tensor",
        error=TypeError,
        torch_type=f"{NO_SUCH_CHECK}an AttributeError",
    ),
    *(
        bad_call(
            FLEX,
            f"block_mask of {sizes}",
            {"block_mask": torch_flex.create_block_mask(masks_nothing, *sizes, "cpu")},
            says,
            torch_accepts=f"{EAGER}asks mask_mod alone and does not look at the blocks" if sizes[2:] == (5, 7) else "",
        )
        for sizes, says in (
            ((2, 3, 5, 5), "block_mask must be made for (query_len, key_len) = (5, 7), got one for (5, 5)"),
            ((2, 3, 7, 7), "block_mask must be made for (query_len, key_len) = (5, 7), got one for (7, 7)"),
            ((3, 1, 5, 7), "block_mask must be made for (batch, num_heads) = (2, 3), or 1 in their place, got (3, 1)"),
            ((1, 2, 5, 7), "block_mask must be made for (batch, num_heads) = (2, 3), or 1 in their place, got (1, 2)"),
        )
    ),
    bad_call(
        FLEX,
        "block_mask elsewhere",
        {"block_mask": torch_flex.create_block_mask(masks_nothing, 1, 1, 5, 7, "cpu").to("meta")},
        "block_mask must be on the device of query, cpu, got meta",
    ),
    bad_call(
        FLEX,
        "return_lse and return_aux",
        {"return_lse": True, "return_aux": torch_flex.AuxRequest(lse=True)},
        "return_lse and return_aux exclude each other",
    ),
]

BLOCK_MASK_CASES = [
    *(
        bad_call(
            BLOCKS,
            name,
            {"mask_mod": mask_mod},
            f"mask_mod must be a function of (batch, head, q_idx, kv_idx), {says}",
            error=TypeError,
            torch_type=torch_type,
        )
        for name, mask_mod, says, torch_type in (
            ("mask_mod None", None, "got NoneType", ""),
            ("mask_mod with a score", takes_a_score, "got one of (score, batch, head, q_idx, kv_idx)", ""),
        )
    ),
    *(
        bad_call(
            BLOCKS,
            f"mask_mod that gives {dtype}",
            {
                "mask_mod": lambda batch, head, q_idx, kv_idx, dtype=dtype: masks_nothing(
                    batch, head, q_idx, kv_idx
                ).to(dtype)
            },
            f"mask_mod must give bool (True = may look), got {dtype}",
            error=TypeError,
        )
        for dtype in (torch.float32, torch.int64)
    ),
    *(
        bad_call(
            BLOCKS,
            f"{name} {size}",
            {name: size},
            f"{name} must be greater than 0, got {name}={size}",
            torch_type=f"{NO_SUCH_CHECK}an IndexError" if size == 0 else "",
        )
        for name in ("B", "H", "Q_LEN", "KV_LEN")
        for size in (0, -2)
    ),
    bad_call(
        BLOCKS,
        "Q_LEN 2.5",
        {"Q_LEN": 2.5},
        "Q_LEN must be a whole number, got 2.5",
        error=TypeError,
        torch_accepts="a mask of a shape of which nothing is",
    ),
    bad_call(
        BLOCKS,
        "BLOCK_SIZE 0",
        {"BLOCK_SIZE": 0},
        "BLOCK_SIZE must be greater than 0, got 0",
        torch_type=f"{NO_SUCH_CHECK}a ZeroDivisionError",
    ),
    bad_call(BLOCKS, "BLOCK_SIZE negative", {"BLOCK_SIZE": (2, -1)}, "BLOCK_SIZE must be greater than 0, got (2, -1)"),
    bad_call(
        BLOCKS,
        "BLOCK_SIZE of three",
        {"BLOCK_SIZE": (1, 2, 3)},
        "BLOCK_SIZE must be one number or two, for queries and keys, got (1, 2, 3)",
    ),
    bad_call(
        BLOCKS,
        "BLOCK_SIZE half",
        {"BLOCK_SIZE": 2.5},
        "BLOCK_SIZE must be one number or two, for queries and keys, got 2.5",
        torch_type=f"{NO_SUCH_CHECK}a TypeError",
    ),
    bad_call(
        "flex.create_mask",
        "a function of nothing",
        {"mod_fn": nested},
        "mod_fn must be a function of (batch, head, q_idx, kv_idx) or (score, batch, head, q_idx, kv_idx)",
        error=TypeError,
    ),
    bad_call("flex.create_mask", "Q_LEN negative", {"Q_LEN": -5}, "Q_LEN must not be negative, got -5"),
    bad_call("flex.create_mask", "KV_LEN negative", {"KV_LEN": -7}, "KV_LEN must not be negative, got -7"),
    bad_call("flex.create_mask", "B negative", {"B": -2}, "B must not be negative, got -2"),
    bad_call("flex.create_mask", "H negative", {"H": -3}, "H must not be negative, got -3"),
    bad_call(
        "flex.create_mask",
        "floats",
        {"mod_fn": lambda batch, head, q_idx, kv_idx: 1.0 * (batch + head + q_idx + kv_idx)},
        "mask_mod must give bool",
        "torch.float32",
        error=TypeError,
    ),
]

VARLEN_CASES = [
    *(
        bad_call(VARLEN, f"{name} a list", {name: [1.0]}, f"{name} must be a tensor, got list", error=TypeError)
        for name in ("query", "key", "value", "cu_seq_q", "cu_seq_k")
    ),
    bad_call(
        VARLEN,
        "query 4-D",
        {"query": floats(1, 5, 3, 11)},
        "query must be 3-D (tokens, num_heads, head_dim), got shape (1, 5, 3, 11)",
    ),
    bad_call(
        VARLEN,
        "no heads",
        {"query": floats(5, 0, 11)},
        "query must have at least one head and one feature, got shape (5, 0, 11)",
    ),
    bad_call(
        VARLEN,
        "whole numbers",
        {"query": PACKED["query"].long()},
        "query must be floating, got torch.int64",
        error=TypeError,
    ),
    bad_call(
        VARLEN,
        "two dtypes",
        {"key": PACKED["key"].half()},
        "query, key and value must have the same dtype, got torch.float32, torch.float16",
        error=TypeError,
    ),
    bad_call(
        VARLEN,
        "value elsewhere",
        {"value": PACKED["value"].to("meta")},
        "must be on the same device, got cpu, cpu and meta",
    ),
    bad_call(VARLEN, "key too wide", {"key": floats(7, 3, 13)}, "key must have the head_dim of query, 11, got 13"),
    bad_call(
        VARLEN,
        "value too wide",
        {"value": floats(7, 3, 13)},
        "value must have the shape of key, (7, 3, 11), got (7, 3, 13)",
    ),
    bad_call(
        VARLEN,
        "fewer heads of keys",
        {"key": floats(7, 2, 11), "value": floats(7, 2, 11)},
        "key must have the heads of query, 3, got 2",
        "enable_gqa=True",
    ),
    bad_call(
        VARLEN,
        "heads that do not divide",
        {"key": floats(7, 2, 11), "value": floats(7, 2, 11), "enable_gqa": True},
        "the heads of key must divide the heads of query, got 2 and 3",
    ),
    *(
        bad_call(VARLEN, f"{name} {x}", {name: x}, f"{name} must be a whole number, got {x}", error=TypeError)
        for name in ("max_q", "max_k")
        for x in (None, 3.5)
    ),
    bad_call(
        VARLEN, "return_aux True", {"return_aux": True}, "return_aux must be an AuxRequest, got bool", error=TypeError
    ),
    bad_call(VARLEN, "cu_seq_k None", {"cu_seq_k": None}, "cu_seq_k must be a tensor, got NoneType", error=TypeError),
    bad_call(
        VARLEN,
        "cu_seq_q int64",
        {"cu_seq_q": PACKED["cu_seq_q"].long()},
        "cu_seq_q must hold integers as int32, got torch.int64",
        error=TypeError,
    ),
    bad_call(
        VARLEN, "cu_seq_q 2-D", {"cu_seq_q": PACKED["cu_seq_q"][None]}, "cu_seq_q must be 1-D, got 2-D of shape (1, 3)"
    ),
    bad_call(
        VARLEN,
        "cu_seq_k elsewhere",
        {"cu_seq_k": PACKED["cu_seq_k"].to("meta")},
        "cu_seq_k must be on the device of query, cpu, got meta",
    ),
    bad_call(
        VARLEN,
        "more sequences of keys",
        {"cu_seq_k": torch.tensor([0, 2, 4, 7], dtype=torch.int32)},
        "cu_seq_q and cu_seq_k must be of as many sequences, got shapes (3,) and (4,)",
    ),
    *(
        bad_call(
            VARLEN,
            f"cu_seq_q {cu_seq}",
            {"cu_seq_q": torch.tensor(cu_seq, dtype=torch.int32)},
            f"cu_seq_q must rise from 0 to the number of tokens, 5, in one step for each sequence, got {cu_seq}",
        )
        for cu_seq in ([1, 2, 5], [0, 2, 4], [0, 6, 5], [0, 3, 7])
    ),
    bad_call(
        VARLEN,
        "no sequences",
        {"query": floats(0, 3, 11), "cu_seq_q": torch.zeros(1).int(), "cu_seq_k": torch.zeros(1).int()},
        "cu_seq_q must rise from 0",
    ),
    bad_call(
        VARLEN,
        "max_q too small",
        {"max_q": 2},
        "max_q must be at least the length of the longest sequence in cu_seq_q, 3, got 2",
    ),
    bad_call(
        VARLEN,
        "max_k too small",
        {"max_k": 0},
        "max_k must be at least the length of the longest sequence in cu_seq_k, 4, got 0",
    ),
    bad_call(
        VARLEN, "window_size one number", {"window_size": 3}, "window_size must be two numbers, (left, right), got 3"
    ),
    bad_call(
        VARLEN,
        "window_size of three",
        {"window_size": (1, 2, 3)},
        "window_size must be two numbers, (left, right), got (1, 2, 3)",
    ),
    bad_call(
        VARLEN,
        "window_size half",
        {"window_size": (1.5, 0)},
        "window_size must be a whole number, got 1.5",
        error=TypeError,
    ),
    bad_call(
        VARLEN,
        "window_size below -1",
        {"window_size": (-2, 0)},
        "window_size must hold numbers of keys, or -1 for all, got (-2, 0)",
    ),
]

SCORE_FUNCTION_CASES = [
    bad_call(
        "score_functions.causal",
        "offset half",
        {"offset": 0.5},
        "offset must be a whole number, got 0.5",
        error=TypeError,
    ),
    bad_call(
        "score_functions.sliding_window",
        "window 0",
        {"window": 0},
        "window must be at least 1 (the query's own place), got 0",
    ),
    bad_call(
        "score_functions.sliding_window",
        "offset half",
        {"offset": 0.5},
        "offset must be a whole number, got 0.5",
        error=TypeError,
    ),
    bad_call(
        "score_functions.document",
        "floats",
        {"document_ids": floats(3)},
        "document_ids must hold integers, got torch.float32",
        error=TypeError,
    ),
    bad_call(
        "score_functions.document",
        "3-D",
        {"document_ids": torch.zeros(1, 2, 3).long()},
        "document_ids must have shape (len) or (batch, len), got 3-D of shape (1, 2, 3)",
    ),
    bad_call("score_functions.prefix", "negative", {"prefix_len": -1}, "prefix_len must not be negative, got -1"),
    bad_call(
        "score_functions.prefix",
        "2-D",
        {"prefix_len": torch.zeros(2, 1).long()},
        "prefix_len must be 1-D, got 2-D of shape (2, 1)",
    ),
    bad_call(
        "score_functions.prefix",
        "floats",
        {"prefix_len": floats(2)},
        "prefix_len must hold integers, got torch.float32",
        error=TypeError,
    ),
    bad_call("score_functions.alibi", "2-D", {"slopes": floats(3, 1)}, "slopes must be 1-D, got 2-D of shape (3, 1)"),
    bad_call(
        "score_functions.alibi",
        "whole numbers",
        {"slopes": torch.tensor([1, 2])},
        "slopes must be floating, got torch.int64",
        error=TypeError,
    ),
    bad_call(
        "score_functions.alibi", "a list", {"slopes": [1.0]}, "slopes must be a tensor, got list", error=TypeError
    ),
    bad_call(
        "score_functions.alibi_slopes",
        "no heads",
        {"num_heads": 0},
        "num_heads must be greater than 0, got num_heads=0",
    ),
    *(
        bad_call(
            "score_functions.soft_cap",
            f"cap {cap}",
            {"cap": cap},
            f"cap must be greater than 0 and finite, got {cap}",
        )
        for cap in (0.0, -1.0, float("nan"), float("inf"))
    ),
    bad_call(
        "score_functions.relative_bias",
        "an even number of distances",
        {"table": floats(3, 4)},
        "table must have 2 * m + 1 columns, one for each distance from -m to m, got shape (3, 4)",
    ),
    bad_call("score_functions.relative_bias", "1-D", {"table": floats(5)}, "table must be 2-D, got 1-D of shape (5,)"),
    bad_call(
        "score_functions.relative_bias",
        "whole numbers",
        {"table": torch.ones(3, 5).long()},
        "table must be floating, got torch.int64",
        error=TypeError,
    ),
    bad_call(
        "score_functions.add_sinks",
        "lse of another length",
        {"lse": floats(2, 3, 7)},
        "lse must have the shape of context without its last axis, (2, 3, 5), got (2, 3, 7)",
    ),
    bad_call(
        "score_functions.add_sinks",
        "sinks for other heads",
        {"sinks": floats(2)},
        "sinks must have one number for each head",
        "in (2, 3, 5), got shape (2,)",
    ),
    *(
        bad_call(
            "score_functions.add_sinks",
            f"{name} a number",
            {name: 0.5},
            f"{name} must be a tensor, got float",
            error=TypeError,
        )
        for name in ("context", "lse", "sinks")
    ),
    *(
        bad_call(
            "score_functions.add_sinks",
            f"no heads, sinks {sinks.dim()}-D",
            {"context": floats(5, 11), "lse": floats(5), "sinks": sinks},
            "sinks must have one number for each head",
        )
        for sinks in (floats(1), torch.tensor(0.5))
    ),
]


ERROR_CASES: tuple[ErrorCase, ...] = (
    *CONSTRUCTORS,
    *MHA_RANKS,
    *MHA_SHAPES,
    *MHA_DTYPES,
    *LAYER_MASK_DTYPES,
    *LAYER_MASK_SHAPES,
    *LAYER_PADDING_SHAPES,
    *LAYER_HINTS,
    *LAYER_INPUTS,
    *SDPA_CASES,
    *MASKS,
    *FLEX_CASES,
    *BLOCK_MASK_CASES,
    *VARLEN_CASES,
    *SCORE_FUNCTION_CASES,
)

CAUSAL = ~torch.ones(5, 7, dtype=torch.bool).tril()
INFINITE = torch.zeros(5, 7).masked_fill(CAUSAL, -torch.inf)

ACCEPTED_CASES: tuple[AcceptedCase, ...] = (
    accepted(MHA, "no keys", {"key": floats(0, 2, 33), "value": floats(0, 2, 33)}),
    accepted(MHA, "no queries", {"query": floats(0, 2, 33)}),
    accepted(MHA, "no samples", {"query": floats(5, 0, 33), "key": floats(7, 0, 33), "value": floats(7, 0, 33)}),
    accepted(
        MHA,
        "no samples but masks",
        {
            "query": floats(5, 0, 33),
            "key": floats(7, 0, 33),
            "value": floats(7, 0, 33),
            "attn_mask": mask(0, 5, 7),
            "key_padding_mask": mask(0, 7),
        },
    ),
    accepted(MHA, "without a batch", {**UNBATCHED, "attn_mask": CAUSAL.expand(3, 5, 7), "key_padding_mask": mask(7)}),
    accepted(
        MHA, "without a batch, batch first", {**UNBATCHED, "key_padding_mask": mask(7)}, build={"batch_first": True}
    ),
    accepted(
        MHA,
        "without a batch, widths of their own",
        {"query": floats(5, 33), "key": floats(7, 19), "value": floats(7, 23)},
        build={"kdim": 19, "vdim": 23},
    ),
    *(
        accepted(MHA, f"{name}, replaced by is_causal", {**call, "is_causal": True, "need_weights": False})
        for name, call in (
            ("attn_mask transposed", {"attn_mask": mask(7, 5)}),
            ("attn_mask transposed, without a batch", {**UNBATCHED, "attn_mask": mask(7, 5)}),
            ("attn_mask for other heads", {"attn_mask": mask(5, 5, 7)}),
            ("attn_mask of bfloat16", {"attn_mask": mask(5, 7, dtype=torch.bfloat16)}),
        )
    ),
    accepted(
        MHA,
        "bfloat16 attn_mask beside bool padding",
        {"attn_mask": INFINITE.bfloat16(), "key_padding_mask": mask(2, 7)},
    ),
    accepted(MHA, "hint beside a float mask", {"attn_mask": INFINITE, "is_causal": True, "need_weights": False}),
    accepted(MHA, "a mask for each head", {"attn_mask": CAUSAL.repeat(6, 1, 1)}),
    accepted(MHA, "float padding", {"key_padding_mask": floats(2, 7)}),
    accepted(MHA, "both masks float", {"attn_mask": INFINITE, "key_padding_mask": floats(2, 7), "need_weights": False}),
    accepted(MHA, "dropout 1", {}, build={"dropout": 1.0}),
    accepted(
        MHA, "widths of their own", {"key": floats(7, 2, 19), "value": floats(7, 2, 23)}, build={"kdim": 19, "vdim": 23}
    ),
    accepted(MHA, "one width of its own", {"value": floats(7, 2, 23)}, build={"vdim": 23}),
    accepted(MHA, "kdim as wide as embed_dim", {}, build={"kdim": 33, "vdim": 33}),
    accepted(MHA, "one head as wide as all", {}, build={"num_heads": 1}),
    accepted(MHA, "heads of width 1", {}, build={"num_heads": 33}),
    accepted(MHA, "width 1", {name: floats(5, 2, 1) for name in UNBATCHED}, build={"embed_dim": 1, "num_heads": 1}),
    accepted(ENCODER_LAYER, "no samples", {"src": floats(7, 0, 33)}),
    accepted(ENCODER_LAYER, "no tokens", {"src": floats(0, 2, 33)}),
    accepted(ENCODER_LAYER, "without a batch", {"src": floats(7, 33), "src_key_padding_mask": mask(7)}),
    accepted(ENCODER_LAYER, "activation a module", {}, build={"activation": nn.SiLU()}),
    *(accepted(ENCODER_LAYER, f"activation {name}", {}, build={"activation": name}) for name in ("relu", "gelu")),
    accepted(ENCODER_LAYER, "src_mask too small, replaced by is_causal", {"src_mask": mask(5, 5), "is_causal": True}),
    accepted(ENCODER, "both masks bool", {"mask": mask(7, 7), "src_key_padding_mask": mask(2, 7)}),
    accepted(DECODER_LAYER, "without a batch", {"tgt": floats(5, 33), "memory": floats(7, 33), "memory_mask": CAUSAL}),
    accepted(DECODER_LAYER, "no memory tokens", {"memory": floats(0, 2, 33)}),
    accepted(
        DECODER, "all masks", {"tgt_mask": mask(5, 5), "memory_mask": CAUSAL, "memory_key_padding_mask": mask(2, 7)}
    ),
    accepted(TRANSFORMER, "without a batch", {"src": floats(7, 33), "tgt": floats(5, 33)}),
    accepted(
        TRANSFORMER, "batch first", {"src": floats(2, 7, 33), "tgt": floats(2, 5, 33)}, build={"batch_first": True}
    ),
    accepted(SQUARE_MASK, "size 0", {"sz": 0}),
    accepted(SQUARE_MASK, "dtype bool", {"dtype": torch.bool}),
    accepted(SDPA, "width 1", {"query": floats(2, 3, 5, 1), "key": floats(2, 3, 7, 1)}),
    accepted(SDPA, "width 0", {"query": floats(2, 3, 5, 0), "key": floats(2, 3, 7, 0)}),
    accepted(SDPA, "value of width 0", {"value": floats(2, 3, 7, 0)}),
    accepted(SDPA, "no samples", {name: x[:0] for name, x in HEADS.items()}),
    accepted(SDPA, "no keys", {"key": floats(2, 3, 0, 11), "value": floats(2, 3, 0, 13)}),
    accepted(SDPA, "no queries", {"query": floats(2, 3, 0, 11)}),
    accepted(SDPA, "2-D", {name: x[0, 0] for name, x in HEADS.items()}),
    accepted(SDPA, "3-D", {**{name: x[0] for name, x in HEADS.items()}, "attn_mask": ~CAUSAL}),
    accepted(SDPA, "5-D", {**{name: x[None] for name, x in HEADS.items()}, "attn_mask": ~CAUSAL}),
    accepted(SDPA, "one key for all samples", {"key": floats(1, 3, 7, 11), "value": floats(1, 3, 7, 13)}),
    accepted(SDPA, "one query for all samples", {"query": floats(1, 3, 5, 11)}),
    accepted(SDPA, "causal, more keys than queries", {"is_causal": True}),
    accepted(SDPA, "causal, more queries than keys", {"query": floats(2, 3, 11, 11), "is_causal": True}),
    accepted(SDPA, "causal bias, upper left", {"attn_mask": causal_upper_left(5, 7)}),
    accepted(SDPA, "causal bias, lower right", {"attn_mask": causal_lower_right(5, 7)}),
    accepted(SDPA, "negative scale", {"scale": -0.5}),
    accepted(SDPA, "scale 0", {"scale": 0.0}),
    accepted(SDPA, "dropout 1", {"dropout_p": 1.0}),
    accepted(
        SDPA,
        "65 heads over 5",
        {"query": floats(2, 65, 5, 11), "key": floats(2, 5, 7, 11), "value": floats(2, 5, 7, 13), "enable_gqa": True},
    ),
    accepted(SDPA, "no grouped heads", {name: x[:, :0] for name, x in HEADS.items()} | {"enable_gqa": True}),
    accepted(SDPA, "no grouped heads, 3-D", {name: x[0, :0] for name, x in HEADS.items()} | {"enable_gqa": True}),
    accepted(SDPA, "one query for all samples and heads", {"query": floats(5, 11)}),
    accepted(
        SDPA,
        "keys and values grouped apart",
        {"query": floats(2, 6, 5, 11), "value": floats(2, 2, 7, 13), "enable_gqa": True},
    ),
    accepted(
        SDPA,
        "grouped heads with masks",
        {"query": floats(2, 6, 5, 11), "attn_mask": ~mask(6, 5, 7), "enable_gqa": True},
    ),
    accepted(
        SDPA,
        "grouped heads without a batch",
        {
            "query": floats(6, 5, 11),
            "key": floats(3, 7, 11),
            "value": floats(3, 7, 13),
            "attn_mask": ~mask(6, 5, 7),
            "enable_gqa": True,
        },
    ),
    *(
        accepted(SDPA, f"attn_mask of shape {tuple(shape)}", {"attn_mask": ~mask(*shape)})
        for shape in ((1, 1), (5, 1), (1, 7), (2, 1, 1, 7), (3, 5, 7))
    ),
    *(
        accepted(
            SDPA,
            f"attn_mask {len(shape)}-D",
            {"attn_mask": floats(*shape)},
            torch_rejects="it broadcasts, as the documentation asks; torch's choice of a kernel ends in an IndexError",
        )
        for shape in ((7,), ())
    ),
)
