"""Looking inside attention: the maps of a whole model while it runs, and the stages of one attention by name."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scratch import validation
from scratch.attention import AttentionCache, MultiheadAttention, project, resolve_masks, score_scale
from scratch.functional import merge_heads
from scratch.masks import Visible
from scratch.paths import open_blind_rows, weigh
from scratch.rounding import sequence_first, upcast_half

__all__ = ["STAGES", "AttentionMaps", "record_attention", "trace_attention"]

STAGES = ("q", "k", "v", "scores", "masked_scores", "weights", "context", "merged", "output")

AnyAttention = MultiheadAttention | nn.MultiheadAttention


class AttentionMaps(Mapping[str, Tensor]):
    """Attention maps by module path: the value is the map of the latest call, and ``calls`` has those of all calls.

    Args:
        calls: Each path of an attention module, in the order of ``model.named_modules()``, with a list that
            holds one map for each call, oldest first. A module that was not called has an empty list here, and no
            entry in the mapping.

    In torch.nn: layers call their attention with need_weights=False and drop the weights.

    >>> maps = AttentionMaps({"encoder": [torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1, 3)], "decoder": []})
    >>> maps["encoder"].shape, [weights.shape[-1] for weights in maps.calls["encoder"]]
    (torch.Size([1, 2, 1, 3]), [1, 3])
    >>> list(maps), list(maps.calls)
    (['encoder'], ['encoder', 'decoder'])
    >>> maps
    AttentionMaps(
      'encoder': 2 calls, the latest (1, 2, 1, 3)
      'decoder': not called
    )
    """

    def __init__(self, calls: dict[str, list[Tensor]]) -> None:
        self.calls = calls

    def __getitem__(self, path: str) -> Tensor:
        validation.check_map_recorded(path, self.calls)
        return self.calls[path][-1]

    def __iter__(self) -> Iterator[str]:
        return (path for path, maps in self.calls.items() if maps)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        lines = (f"  {path!r}: {_describe(maps)}\n" for path, maps in self.calls.items())
        return f"AttentionMaps(\n{''.join(lines)})"


def _describe(maps: list[Tensor]) -> str:
    if not maps:
        return "not called"
    return f"{len(maps)} call{'s' * (len(maps) > 1)}, the latest {validation.shape(maps[-1])}"


@contextmanager
def record_attention(model: nn.Module) -> Iterator[AttentionMaps]:
    """Record who looks at whom: the attention maps of every attention module, at every call inside the block.

    map = softmax(q kᵀ / sqrt(d_k) + score_bias)

    The real call runs untouched: the map is computed beside it from the same inputs, without gradients and
    without random draws, so outputs, gradients and the random stream stay as they are. It costs about as much as
    one more attention.

    A map has shape (batch, num_heads, query_len, key_len), or (num_heads, query_len, key_len) without a batch, and
    is what the call weighs its values with, before dropout:

    - Its rows sum to 1. A query that may look at no key has a row of 0, or of NaN if the call asked for weights
      (need_weights=True), as then its output is NaN too.
    - ``add_bias_kv`` and ``add_zero_attn`` add one last column each. With a cache, key_len counts the keys of
      earlier calls too.
    - It is a tensor of its own on the device of the model: float64 for float64, float32 for every other dtype. The
      maps live as long as what the block yields, so open it around the passes that you want to look at.

    Every call of a module counts. A module that is reached by two paths has the same calls under both. Gradient
    checkpointing calls modules again in the backward pass: leave the block before it, or find these calls too.

    torch's fast path is off inside the block, for the whole process, and then again as it was. Where torch would have
    taken it (eval, no gradients, batch first), this moves the outputs of torch.nn: at valid places by rounding; at
    the padded places of ``nn.TransformerEncoder`` from 0 to numbers that mean nothing; in samples that are all
    padding from NaN to finite numbers; and at all places of padded samples in ``nn.Transformer`` without
    ``memory_key_padding_mask``, because its decoder reads the padded places. Off the fast path outputs stay the
    same to the last bit.

    Args:
        model: Any module: a Transformer of either package or of torch.nn, a model that holds one, or an
            attention itself, whose path is "".

    Yields:
        The maps, filled while the model runs and kept after the block: ``maps[path]`` is the map of the latest call,
        ``maps.calls[path]`` lists those of all calls.

    Raises:
        ValueError: If the model holds no attention module, or is compiled (also a RuntimeError and an
            AssertionError).
        TypeError: If ``model`` is not a module, or holds a subclass of an attention whose ``forward`` takes other
            arguments (likewise).

    Limits: ``module.forward(...)`` called directly, and code that ``torch.compile`` made earlier, go past the hooks;
    maps cannot leave ``torch.func.vmap``; a parametrization that moves on whenever its weight is read
    (``spectral_norm`` in training) does so for the map as well.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, batch_first=True), num_layers=2).eval()
    >>> with record_attention(model) as maps:
    ...     output = model(torch.randn(2, 5, 12))
    >>> maps
    AttentionMaps(
      'layers.0.self_attn': 1 call, the latest (2, 2, 5, 5)
      'layers.1.self_attn': 1 call, the latest (2, 2, 5, 5)
    )
    >>> maps["layers.1.self_attn"].sum(dim=-1).allclose(torch.ones(()))
    True
    """
    validation.check_module("model", model)
    named = model.named_modules(remove_duplicate=False)
    attentions = {path: module for path, module in named if isinstance(module, AnyAttention)}
    validation.check_recordable(model, attentions)
    calls: dict[nn.Module, list[Tensor]] = {module: [] for module in attentions.values()}

    def watch_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module in calls and kwargs.get("cache") is not None:
            return args, {**kwargs, "cache": _WatchedCache(kwargs["cache"])}
        return None

    def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: object) -> None:
        if module in calls:  # a deepcopy made inside the block carries the hooks along
            calls[module].append(_map_of_call(module, args, kwargs))

    with ExitStack() as undo:
        undo.enter_context(_fast_path_off())
        for module in calls:
            undo.enter_context(module.register_forward_pre_hook(watch_cache, with_kwargs=True))
            undo.enter_context(module.register_forward_hook(record, with_kwargs=True))
        yield AttentionMaps({path: calls[module] for path, module in attentions.items()})


def trace_attention(
    module: AnyAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> dict[str, Tensor]:
    """Compute one attention stage by stage and give every stage by its name.

    scores = q kᵀ / sqrt(d_k); masked_scores = scores + score_bias; weights = softmax(masked_scores);
    context = weights v; merged = Concat(context_1, ..., context_h); output = merged Wᴼ + bᴼ

    Each stage is computed from the stages before it, so gradients flow from each to each. There is no dropout.

    Args:
        module: A ``MultiheadAttention`` of either package or of torch.nn.
        query: The queries, in the layout of the module; so are key and value.
        key: Where the queries look.
        value: What they collect there.
        key_padding_mask: Hides keys: bool, True hides, or float, added to the scores.
        need_weights: Decides whether ``is_causal`` replaces the mask, and whether a query that may look at no key gets
            weights of NaN (True) or 0 (False). The stages are all given either way.
        attn_mask: Hides or weighs pairs of query and key in the same two forms.
        is_causal: A promise that ``attn_mask`` is causal.

    Returns:
        The stages in the order of ``STAGES``; without a batch, the dimension ``batch`` is missing throughout.

        - q: (batch, num_heads, query_len, head_dim), not yet scaled.
        - k: (batch, num_heads, key_len, head_dim), with the tokens of ``add_bias_kv`` and ``add_zero_attn`` last.
        - v: (batch, num_heads, key_len, v_head_dim), likewise.
        - scores, masked_scores, weights: (batch, num_heads, query_len, key_len).
        - context: (batch, num_heads, query_len, v_head_dim).
        - merged: (query_len, batch, num_heads * v_head_dim), or with the batch first if the module is batch_first.
        - output: what the module returns without dropout, in the shape of ``query``.

    Raises:
        ValueError: For shapes that do not fit together (also a RuntimeError and an AssertionError).
        TypeError: For a module that is no multi-head attention, and for dtypes that do not fit together (likewise).

    In torch.nn: ``F.multi_head_attention_forward`` keeps its stages to itself. Its plain path is followed, never the
    fast path. What follows ``module`` are the arguments of ``nn.MultiheadAttention.forward``, in its order, but for
    ``average_attn_weights``: every head has its weights here.

    Source: Vaswani et al. 2017, sections 3.2.1 and 3.2.2.

    >>> attention = nn.MultiheadAttention(embed_dim=12, num_heads=3, batch_first=True)
    >>> query, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    >>> for stage, tensor in trace_attention(attention, query, memory, memory).items():
    ...     print(stage, tuple(tensor.shape))
    q (2, 3, 5, 4)
    k (2, 3, 7, 4)
    v (2, 3, 7, 4)
    scores (2, 3, 5, 7)
    masked_scores (2, 3, 5, 7)
    weights (2, 3, 5, 7)
    context (2, 3, 5, 4)
    merged (2, 5, 12)
    output (2, 5, 12)
    """
    validation.check_attention("module", module, get_args(AnyAttention))
    attention = _as_ours(module)
    given = (attn_mask, key_padding_mask, is_causal)
    validation.check_attention_inputs(attention, (query, key, value), given, need_weights)
    inputs = sequence_first(query, key, value, attention.batch_first)
    q, k, v = attention._split(*project(*inputs, attention._in_projection()))
    visible = resolve_masks(attn_mask, key_padding_mask, q, k, is_causal, need_weights)
    is_batched, scale = query.dim() == 3, score_scale(attention._head_dims()[0])
    if not is_batched:
        q, k, v = (x.squeeze(0) for x in (q, k, v))
    stages = _stages(q, k, v, visible, scale, need_weights)
    context = stages["context"]
    merged = merge_heads(context if is_batched else context.unsqueeze(0))  # (q, b, h * d)
    if not is_batched:
        merged = merged.squeeze(1)
    elif attention.batch_first:
        merged = merged.transpose(0, 1)
    return {**stages, "merged": merged, "output": _project_output(module, merged)}


def _stages(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, need_weights: bool) -> dict[str, Tensor]:
    """Go through the stages from queries, keys and values, split into heads, to the context."""
    stages, dtype = {"q": q, "k": k, "v": v}, v.dtype
    if not need_weights:
        q, k, v = upcast_half(q, k, v)
    score_bias = visible.as_bias(q, k)
    if score_bias is not None and q.dim() == 3:
        score_bias = score_bias.squeeze(0)
    scores = (q * scale) @ k.mT  # (b, h, q, k)
    masked_scores = scores if score_bias is None else scores + score_bias
    if score_bias is None or need_weights:
        context, weights = weigh(masked_scores.clone(), v)
    else:
        _, row_sees = open_blind_rows(score_bias)
        context, weights = (x * row_sees for x in weigh(torch.where(row_sees, masked_scores, scores), v))
    context = context.to(dtype)
    return {**stages, "scores": scores, "masked_scores": masked_scores, "weights": weights, "context": context}


def _project_output(module: AnyAttention, merged: Tensor) -> Tensor:
    out_proj: Any = module.out_proj
    if isinstance(module, MultiheadAttention):
        return out_proj(merged)
    return F.linear(merged, out_proj.weight, out_proj.bias)  # torch.nn reads its parameters, and never calls it


class _TorchAttention(MultiheadAttention):
    """torch.nn's attention read as ours: every attribute is looked up there, and nothing is copied."""

    def __init__(self, module: nn.MultiheadAttention) -> None:
        self.__dict__["module"] = module  # past nn.Module's own registers, which are looked up there too

    def __getattr__(self, name: str) -> Any:
        return (None, None) if name == "_given_widths" else getattr(self.__dict__["module"], name)


def _as_ours(module: AnyAttention) -> MultiheadAttention:
    return _TorchAttention(module) if isinstance(module, nn.MultiheadAttention) else module


class _WatchedCache:
    """Passes every call on to a cache, and remembers the projections that came back.

    A cache grows when it is asked, so it cannot be asked a second time for the map.
    """

    def __init__(self, cache: AttentionCache) -> None:
        self.cache = cache

    def extended_len(self, key_len: int) -> int:
        return self.cache.extended_len(key_len)

    def extend(
        self, attention: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.projected = self.cache.extend(attention, query, key, value)
        return self.projected


@torch.no_grad()
def _map_of_call(module: AnyAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Compute the map of a call that has just been made, from its arguments."""
    call = inspect.signature(module.forward).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    attention = _as_ours(module)
    query, cache = given["query"], given.get("cache")
    if cache is None:
        inputs = sequence_first(query, given["key"], given["value"], attention.batch_first)
        projected = project(*inputs, attention._in_projection())
    else:
        projected = cache.projected
    q, k, v = attention._split(*projected)
    # With a cache, is_causal would misplace the diagonal, so the mask itself is read.
    promised, need_weights = given["is_causal"] and cache is None, given["need_weights"]
    visible = resolve_masks(given["attn_mask"], given["key_padding_mask"], q, k, promised, need_weights)
    stages = _stages(q, k, v, visible, score_scale(attention._head_dims()[0]), need_weights)
    (weights,) = upcast_half(stages["weights"])
    return weights if query.dim() == 3 else weights.squeeze(0)


@contextmanager
def _fast_path_off() -> Iterator[None]:
    was_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_on)
