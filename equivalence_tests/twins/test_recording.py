"""The maps of ``record_attention`` and the stages of ``trace_attention`` are those of the real call, and only that."""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import builtin
import scratch
from equivalence_tests.instruments.differences import compare_errors
from equivalence_tests.instruments.side_by_side import assert_close, fast_path, random_tensor
from equivalence_tests.instruments.weights import randomize_parameters
from scratch.decoding import FixedCache, GrowingCache, new_cache
from scratch.functional import merge_heads
from scratch.recording import STAGES, AttentionMaps, record_attention, trace_attention

BATCH, HEADS, QUERY_LEN, KEY_LEN, HEAD_DIM = 2, 3, 5, 7, 11
EMBED_DIM, KDIM, VDIM, FF_DIM = HEADS * HEAD_DIM, 13, 17, 19
PACKAGES: dict[str, Any] = {"scratch": scratch, "builtin": builtin, "torch.nn": nn}
packages = pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES.keys())
scratch_and_torch = pytest.mark.parametrize("package", [scratch, nn], ids=["scratch", "torch.nn"])
fast_path_on_and_off = pytest.mark.parametrize("switch", [True, False], ids=["fast-path-on", "fast-path-off"])

# Every constructor argument that changes the numbers, alone and all together.
CONSTRUCTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias": {"bias": False},
    "bias-kv": {"add_bias_kv": True},
    "zero-attn": {"add_zero_attn": True},
    "kdim": {"kdim": KDIM},
    "vdim": {"vdim": VDIM},
    "dropout": {"dropout": 0.5},
    "all": {"add_bias_kv": True, "add_zero_attn": True, "kdim": KDIM, "vdim": VDIM, "dropout": 0.5},
    "all-no-bias": {"add_bias_kv": True, "add_zero_attn": True, "kdim": KDIM, "vdim": VDIM, "bias": False},
}
MASK_FORMS = (
    "none",
    "bool",
    "float",
    "heads",
    "padding",
    "float-padding",
    "both",
    "float-both",
    "hint",
    "wrong-hint",
    "hint-padding",
)
LAYOUTS = ("sequence-first", "batch-first", "unbatched")


def build(construct: Callable[..., Any], *args: Any, seed: int = 1, **kwargs: Any) -> Any:
    """Construct in float64 with random parameters, without torch.nn's remarks about nested tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        module = construct(*args, **kwargs)
    return randomize_parameters(module.double(), seed=seed)


def attention_of(package: Any, **arguments: Any) -> Any:
    return build(package.MultiheadAttention, EMBED_DIM, HEADS, **arguments)


def transformer_of(package: Any, **arguments: Any) -> Any:
    return build(package.Transformer, EMBED_DIM, HEADS, 2, 2, FF_DIM, **arguments)


def inputs_of(attention: Any, layout: str = "batch-first") -> tuple[Tensor, Tensor, Tensor]:
    lead = {"sequence-first": (BATCH,), "batch-first": (BATCH,), "unbatched": ()}[layout]
    query = random_tensor(*lead, QUERY_LEN, attention.embed_dim, seed=0)
    key = random_tensor(*lead, KEY_LEN, attention.kdim, seed=1)
    value = random_tensor(*lead, KEY_LEN, attention.vdim, seed=2)
    if layout != "sequence-first":
        return query, key, value
    return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)


def masks_of(form: str, *, batched: bool = True) -> dict[str, Any]:
    """Masks with holes inside that leave every query a key; hints are promises about a causal mask."""
    hidden = random_tensor(BATCH * HEADS if batched else HEADS, QUERY_LEN, KEY_LEN, seed=7) > 0.5
    hidden[..., 0] = False
    padding = torch.zeros(BATCH, KEY_LEN, dtype=torch.bool)
    padding[0, 2], padding[1, 5:] = True, True
    padding = padding if batched else padding[1]
    causal = torch.ones(QUERY_LEN, KEY_LEN, dtype=torch.bool).triu(1)
    forms: dict[str, dict[str, Any]] = {
        "none": {},
        "bool": {"attn_mask": hidden[0]},
        "float": {"attn_mask": random_tensor(QUERY_LEN, KEY_LEN, seed=8).masked_fill(hidden[0], -torch.inf)},
        "heads": {"attn_mask": hidden},
        "padding": {"key_padding_mask": padding},
        "float-padding": {"key_padding_mask": random_tensor(*padding.shape, seed=9)},
        "both": {"attn_mask": hidden, "key_padding_mask": padding},
        "float-both": {
            "attn_mask": random_tensor(*hidden.shape, seed=8),
            "key_padding_mask": random_tensor(*padding.shape, seed=9),
        },
        "hint": {"attn_mask": causal, "is_causal": True},
        "wrong-hint": {"attn_mask": hidden[0], "is_causal": True},
        "hint-padding": {"attn_mask": causal, "is_causal": True, "key_padding_mask": padding},
    }
    return forms[form]


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


# --- trace_attention ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@scratch_and_torch
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("form", MASK_FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_traced_output_and_weights_are_those_of_the_module(
    package: Any, layout: str, form: str, need_weights: bool
) -> None:
    masks = masks_of(form, batched=layout != "unbatched")
    for construction, arguments in CONSTRUCTIONS.items():
        attention = attention_of(package, batch_first=layout == "batch-first", **arguments).eval()
        inputs = inputs_of(attention, layout)
        output, weights = attention(*inputs, need_weights=need_weights, average_attn_weights=False, **masks)
        stages = trace_attention(attention, *inputs, need_weights=need_weights, **masks)
        assert tuple(stages) == STAGES
        assert_close(stages["output"], output, f"output, {construction}")
        if need_weights:
            assert_close(stages["weights"], weights, f"weights, {construction}")


@packages
@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_is_traced_through_the_packed_projection(package: Any, batch_first: bool) -> None:
    attention = attention_of(package, batch_first=batch_first).eval()
    x = random_tensor(BATCH, QUERY_LEN, EMBED_DIM)
    output, weights = attention(x, x, x, average_attn_weights=False)
    stages = trace_attention(attention, x, x, x)
    assert_close(stages["output"], output)
    assert_close(stages["weights"], weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_of_the_stages_with_free_head_sizes_and_appended_tokens(layout: str) -> None:
    attention = attention_of(
        scratch,
        batch_first=layout == "batch-first",
        add_bias_kv=True,
        add_zero_attn=True,
        qk_head_dim=KDIM,
        v_head_dim=VDIM,
    )
    inputs = inputs_of(attention, layout)
    stages = trace_attention(attention, *inputs)
    lead = (HEADS,) if layout == "unbatched" else (BATCH, HEADS)
    tokens = inputs[0].shape[:-1]
    assert {name: tuple(stage.shape) for name, stage in stages.items()} == {
        "q": (*lead, QUERY_LEN, KDIM),
        "k": (*lead, KEY_LEN + 2, KDIM),
        "v": (*lead, KEY_LEN + 2, VDIM),
        "scores": (*lead, QUERY_LEN, KEY_LEN + 2),
        "masked_scores": (*lead, QUERY_LEN, KEY_LEN + 2),
        "weights": (*lead, QUERY_LEN, KEY_LEN + 2),
        "context": (*lead, QUERY_LEN, VDIM),
        "merged": (*tokens, HEADS * VDIM),
        "output": (*tokens, EMBED_DIM),
    }
    assert_close(stages["output"], attention(*inputs)[0])


@scratch_and_torch
def test_each_stage_is_what_its_name_says(package: Any) -> None:
    attention = attention_of(package).eval()
    query, key, value = inputs_of(attention, "sequence-first")
    hidden = masks_of("heads")["attn_mask"]
    stages = trace_attention(attention, query, key, value, attn_mask=hidden)
    weight = attention.in_proj_weight.view(3, HEADS, HEAD_DIM, EMBED_DIM)
    bias = attention.in_proj_bias.view(3, HEADS, 1, HEAD_DIM)
    for i, (name, x) in enumerate((("q", query), ("k", key), ("v", value))):
        assert_close(stages[name], torch.einsum("lbe,hde->bhld", x, weight[i]) + bias[i], name)
    assert_close(stages["scores"], torch.einsum("bhqd,bhkd->bhqk", stages["q"], stages["k"]) / HEAD_DIM**0.5)
    hidden = hidden.view(BATCH, HEADS, QUERY_LEN, KEY_LEN)
    assert torch.equal(stages["masked_scores"], stages["scores"].masked_fill(hidden, -torch.inf))
    raised = stages["masked_scores"].exp()
    assert_close(stages["weights"], raised / raised.sum(dim=-1, keepdim=True))
    assert_close(stages["context"], torch.einsum("bhqk,bhkd->bhqd", stages["weights"], stages["v"]))
    assert torch.equal(stages["merged"], merge_heads(stages["context"]))
    assert_close(stages["output"], stages["merged"] @ attention.out_proj.weight.T + attention.out_proj.bias)


@scratch_and_torch
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_flow_from_the_output_to_every_stage_and_to_the_inputs(package: Any, layout: str) -> None:
    attention = attention_of(package, batch_first=layout == "batch-first").eval()
    query, key, value = inputs = tuple(x.requires_grad_() for x in inputs_of(attention, layout))
    masks = masks_of("both", batched=layout != "unbatched")
    stages = trace_attention(attention, query, key, value, **masks)
    sources = (*inputs, *attention.parameters())
    expected = torch.autograd.grad(attention(*inputs, **masks)[0].square().sum(), sources)
    loss = stages["output"].square().sum()
    for actual, right in zip(torch.autograd.grad(loss, sources, retain_graph=True), expected, strict=True):
        assert_close(actual, right, "gradient")
    earlier = [stages[name] for name in STAGES[:-1]]
    assert all((gradient != 0).any() for gradient in torch.autograd.grad(loss, earlier))


@scratch_and_torch
def test_a_query_without_keys_is_traced_as_the_call_treats_it(package: Any) -> None:
    attention = attention_of(package, batch_first=True).eval()
    query, key, value = inputs = tuple(x.requires_grad_() for x in inputs_of(attention))
    hidden = torch.zeros(QUERY_LEN, KEY_LEN, dtype=torch.bool)
    hidden[3] = True
    stages = trace_attention(attention, query, key, value, attn_mask=hidden)  # need_weights=True, as in the call
    assert stages["weights"][:, :, 3].isnan().all()
    assert stages["output"][:, 3].isnan().all()

    stages = trace_attention(attention, query, key, value, attn_mask=hidden, need_weights=False)
    output, _ = attention(*inputs, attn_mask=hidden, need_weights=False)
    assert (stages["masked_scores"][:, :, 3] == -torch.inf).all()
    assert (stages["weights"][:, :, 3] == 0).all()
    assert_close(stages["output"], output)
    sources = (*inputs, *attention.parameters())
    expected = torch.autograd.grad(output.square().sum(), sources)
    actual = torch.autograd.grad(stages["output"].square().sum(), sources)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, "gradient")


@scratch_and_torch
def test_a_nan_in_a_query_without_keys_stays_in_its_trace(package: Any) -> None:
    attention = attention_of(package, batch_first=True).eval()
    query, key, value = inputs_of(attention)
    query[:, 3] = torch.nan
    hidden = torch.zeros(QUERY_LEN, KEY_LEN, dtype=torch.bool)
    hidden[3] = True
    stages = trace_attention(attention, query, key, value, attn_mask=hidden, need_weights=False)
    assert attention(query, key, value, attn_mask=hidden, need_weights=False)[0][:, 3].isnan().all()
    assert stages["output"][:, 3].isnan().all()


@packages
def test_tracing_drops_nothing_and_draws_nothing_in_training(package: Any) -> None:
    attention = attention_of(package, dropout=0.5, batch_first=True)
    inputs = inputs_of(attention)
    state = torch.get_rng_state()
    stages = trace_attention(attention.train(), *inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(stages["output"], attention.eval()(*inputs)[0])
    with torch.no_grad():
        assert not any(stage.requires_grad for stage in trace_attention(attention, *inputs).values())


@scratch_and_torch
@pytest.mark.parametrize(("batch", "query_len"), [(0, QUERY_LEN), (BATCH, 0)])
def test_nothing_in_gives_nothing_out(package: Any, batch: int, query_len: int) -> None:
    attention = attention_of(package, batch_first=True).eval()
    query, key = random_tensor(batch, query_len, EMBED_DIM), random_tensor(batch, KEY_LEN, EMBED_DIM)
    with record_attention(attention) as maps:
        output, weights = attention(query, key, key, average_attn_weights=False)
    assert maps[""].shape == weights.shape == (batch, HEADS, query_len, KEY_LEN)
    assert trace_attention(attention, query, key, key)["output"].shape == output.shape


class Doubled(nn.Linear):
    """An adapter in place of ``out_proj``."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@scratch_and_torch
def test_an_adapter_on_out_proj_counts_in_the_trace_where_it_counts_in_the_call(package: Any) -> None:
    attention = attention_of(package, batch_first=True).eval()
    inputs = inputs_of(attention)
    plain = attention(*inputs)[0]
    adapter = Doubled(EMBED_DIM, EMBED_DIM).double()
    adapter.load_state_dict(attention.out_proj.state_dict())
    attention.out_proj = adapter
    output = attention(*inputs)[0]
    assert torch.equal(output, 2 * plain if package is scratch else plain)
    assert_close(trace_attention(attention, *inputs)["output"], output)


@scratch_and_torch
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_lower_precision_the_trace_is_as_good_as_the_call(
    package: Any, dtype: torch.dtype, need_weights: bool
) -> None:
    attention = attention_of(package, batch_first=True).eval().to(dtype)
    query, key, value = inputs = tuple(x.to(dtype) for x in inputs_of(attention))
    masks = masks_of("padding")
    traced = trace_attention(attention, query, key, value, need_weights=need_weights, **masks)["output"]
    called = attention(*inputs, need_weights=need_weights, **masks)[0]
    assert traced.dtype == called.dtype
    exact = copy.deepcopy(attention).double()(*[x.double() for x in inputs], **masks)[0]
    ratio = compare_errors(traced, called, exact, name="output")
    assert ratio.passed, str(ratio)


def test_a_reparametrised_torch_attention_is_traced_with_its_present_weights() -> None:
    attention = attention_of(nn, batch_first=True).eval()
    inputs = inputs_of(attention)
    torch.nn.utils.parametrizations.weight_norm(attention, "in_proj_weight")
    with torch.no_grad():
        attention.parametrizations.in_proj_weight.original0.mul_(3.0)
    assert_close(trace_attention(attention, *inputs)["output"], attention(*inputs)[0])


@packages
def test_trace_refuses_what_it_cannot_read(package: Any) -> None:
    attention = attention_of(package, batch_first=True)
    query, key, value = inputs_of(attention)
    with pytest.raises(TypeError, match=r"module must be a MultiheadAttention of scratch, .* torch\.nn, got Parameter"):
        trace_attention(attention.out_proj.weight, query, key, value)
    with pytest.raises(ValueError, match=r"attn_mask must have shape \(query_len, key_len\) = \(5, 7\)"):
        trace_attention(attention, query, key, value, attn_mask=torch.zeros(7, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="is_causal=True needs attn_mask"):
        trace_attention(attention, query, key, value, is_causal=True)


# --- record_attention: the maps -----------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@packages
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("form", MASK_FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_maps_are_the_weights_that_torch_returns_before_dropout(
    package: Any, layout: str, form: str, training: bool
) -> None:
    masks = masks_of(form, batched=layout != "unbatched")
    for construction, arguments in CONSTRUCTIONS.items():
        arguments = {"batch_first": layout == "batch-first", **arguments}
        attention, reference = attention_of(package, **arguments), attention_of(nn, **arguments).eval()
        inputs = inputs_of(attention, layout)
        with record_attention(attention.train(training)) as maps:
            attention(*inputs, **masks)
        assert list(maps) == [""]
        assert_close(maps[""], reference(*inputs, average_attn_weights=False, **masks)[1], construction)
        assert_close(maps[""].sum(dim=-1), torch.ones(maps[""].shape[:-1], dtype=torch.float64), "sums of rows")
        assert not maps[""].requires_grad


def source_and_target(batch_first: bool = True) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    src, tgt = random_tensor(BATCH, KEY_LEN, EMBED_DIM, seed=1), random_tensor(BATCH, QUERY_LEN, EMBED_DIM, seed=2)
    padding = masks_of("padding")["key_padding_mask"]
    masks = {
        "tgt_mask": torch.ones(QUERY_LEN, QUERY_LEN, dtype=torch.bool).triu(1),
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
    }
    if not batch_first:
        src, tgt = src.transpose(0, 1), tgt.transpose(0, 1)
    return src, tgt, masks


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_maps_of_the_three_packages_agree_layer_by_layer(training: bool, batch_first: bool, norm_first: bool) -> None:
    src, tgt, masks = source_and_target(batch_first)
    recorded = {}
    for name, package in PACKAGES.items():
        # Dropout would drop the same entries, as the packages draw the same stream; 0 keeps this test to the maps.
        model = transformer_of(package, dropout=0.0, batch_first=batch_first, norm_first=norm_first).train(training)
        with record_attention(model) as maps:
            model(src, tgt, **masks)
        recorded[name] = maps
    shapes = {path: tuple(weights.shape) for path, weights in recorded["torch.nn"].items()}
    assert shapes == {
        "encoder.layers.0.self_attn": (BATCH, HEADS, KEY_LEN, KEY_LEN),
        "encoder.layers.1.self_attn": (BATCH, HEADS, KEY_LEN, KEY_LEN),
        "decoder.layers.0.self_attn": (BATCH, HEADS, QUERY_LEN, QUERY_LEN),
        "decoder.layers.0.multihead_attn": (BATCH, HEADS, QUERY_LEN, KEY_LEN),
        "decoder.layers.1.self_attn": (BATCH, HEADS, QUERY_LEN, QUERY_LEN),
        "decoder.layers.1.multihead_attn": (BATCH, HEADS, QUERY_LEN, KEY_LEN),
    }
    for path, name in itertools.product(shapes, ("scratch", "builtin")):
        assert_close(recorded[name][path], recorded["torch.nn"][path], f"{name} {path}")
    weights = recorded["torch.nn"]["decoder.layers.1.multihead_attn"]
    assert (weights[1, :, :, 5:] == 0).all(), "padded keys are not looked at"
    assert (recorded["torch.nn"]["decoder.layers.1.self_attn"].triu(1) == 0).all(), "nor are later ones"


@scratch_and_torch
def test_a_causal_hint_replaces_the_mask_in_the_map_only_where_it_does_in_the_call(package: Any) -> None:
    attention = attention_of(package, batch_first=True)
    inputs, nothing_hidden = inputs_of(attention), torch.zeros(QUERY_LEN, KEY_LEN, dtype=torch.bool)
    with record_attention(attention) as maps:
        attention(*inputs, attn_mask=nothing_hidden, is_causal=True, need_weights=False)
        attention(*inputs, attn_mask=nothing_hidden, is_causal=True, need_weights=True)
    hinted, masked = maps.calls[""]
    assert (hinted.triu(1) == 0).all()
    assert (masked > 0).all()


@scratch_and_torch
def test_a_query_without_keys_has_a_row_of_zeros_or_of_nan_if_its_weights_were_asked_for(package: Any) -> None:
    attention = attention_of(package, batch_first=True)
    inputs = inputs_of(attention)
    padding = torch.zeros(BATCH, KEY_LEN, dtype=torch.bool)
    padding[1] = True
    with record_attention(attention) as maps:
        output, _ = attention(*inputs, key_padding_mask=padding, need_weights=False)
        attention(*inputs, key_padding_mask=padding, need_weights=True)
    without, asked = maps.calls[""]
    assert (without[1] == 0).all()
    assert_close(output[1], attention.out_proj.bias.expand(QUERY_LEN, -1))
    assert asked[1].isnan().all()
    assert torch.equal(without[0], asked[0])


@packages
def test_positional_and_keyword_arguments_give_the_same_map(package: Any) -> None:
    attention = attention_of(package, batch_first=True)
    query, key, value = inputs_of(attention)
    padding, mask = masks_of("both")["key_padding_mask"], masks_of("both")["attn_mask"]
    with record_attention(attention) as maps:
        attention(query, key, value, padding, False, mask)
        attention(value=value, attn_mask=mask, query=query, need_weights=False, key_padding_mask=padding, key=key)
        attention(query, key, value, attn_mask=mask, key_padding_mask=padding, need_weights=False)
    first, second, third = maps.calls[""]
    assert torch.equal(first, second)
    assert torch.equal(first, third)


@packages
def test_a_map_is_computed_from_what_the_hooks_of_the_user_hand_on(package: Any) -> None:
    attention = attention_of(package, batch_first=True).eval()
    query, key, value = inputs_of(attention)
    expected = attention(3 * query, key, value, average_attn_weights=False)[1]
    with record_attention(attention) as maps:
        attention.register_forward_pre_hook(lambda _, args: (3 * args[0], *args[1:]))
        attention(query, key, value)
    assert_close(maps[""], expected)


@packages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_maps_are_float32_in_lower_precision(package: Any, dtype: torch.dtype) -> None:
    attention = attention_of(package, batch_first=True).to(dtype).eval()
    query, key, value = inputs = tuple(x.to(dtype) for x in inputs_of(attention))
    with record_attention(attention) as maps:
        _, weights = attention(*inputs, average_attn_weights=False)
        attention(*inputs, need_weights=False)
    asked, without = maps.calls[""]
    assert asked.dtype == without.dtype == torch.float32
    assert (asked - weights.float()).abs().max() <= torch.finfo(dtype).eps, "computed in the dtype, as torch does"
    q, k = (trace_attention(attention, query, key, value)[name].double() for name in ("q", "k"))
    exact = (q @ k.mT / HEAD_DIM**0.5).softmax(dim=-1)
    assert (without - exact).abs().max() <= torch.finfo(torch.float32).eps, "computed in float32, as the kernels do"


class Custom(nn.Module):
    """One attention on two paths and called twice in a pass, one never called, and something that is none."""

    def __init__(self, package: Any) -> None:
        super().__init__()
        self.first = attention_of(package, batch_first=True)
        self.blocks = nn.ModuleList([self.first])
        self.idle = attention_of(package, batch_first=True)
        self.linear = nn.Linear(EMBED_DIM, EMBED_DIM, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x, x, x, need_weights=False)[0]
        return self.linear(x + self.blocks[0](x, x, x, need_weights=False)[0])


@packages
def test_shared_repeated_and_idle_modules(package: Any) -> None:
    model, x = Custom(package), random_tensor(BATCH, QUERY_LEN, EMBED_DIM)
    with record_attention(model) as maps:
        model(x)
    assert list(maps.calls) == ["first", "blocks.0", "idle"]
    assert list(maps) == ["first", "blocks.0"]
    assert len(maps) == 2
    assert "idle" not in maps
    first, second = maps.calls["first"]
    assert all(one is other for one, other in zip(maps.calls["first"], maps.calls["blocks.0"], strict=True))
    assert_close(first, trace_attention(model.first, x, x, x)["weights"])
    assert not torch.equal(first, second)
    assert maps["first"] is second, "the latest call"
    with pytest.raises(KeyError, match="'idle' was not"):
        maps["idle"]
    with pytest.raises(KeyError, match=r"one of 'first', 'blocks\.0', 'idle'; got 'linear'"):
        maps["linear"]


def test_a_call_that_fails_leaves_no_map_and_its_own_error() -> None:
    attention = attention_of(nn, batch_first=True)
    query, key, value = inputs_of(attention)
    with record_attention(attention) as maps:
        with pytest.raises(RuntimeError, match="attn_mask"):
            attention(query, key, value, attn_mask=torch.zeros(KEY_LEN, QUERY_LEN, dtype=torch.float64))
        assert not maps
        attention(query, key, value)
    assert len(maps.calls[""]) == 1


# --- record_attention: decoding with a cache ------------------------------------------------------------------------


def decode_step_by_step(decoder: Any, tgt: Tensor, memory: Tensor) -> Tensor:
    cache = new_cache(len(decoder.layers))
    steps = [decoder(tgt[:, i : i + 1], memory, cache=cache) for i in range(tgt.size(1))]
    return torch.cat(steps, dim=1)


def test_cached_decoding_gives_the_rows_of_the_full_maps_and_decodes_as_ever() -> None:
    layer = scratch.TransformerDecoderLayer(EMBED_DIM, HEADS, FF_DIM, batch_first=True)
    decoder = build(scratch.TransformerDecoder, layer, 2).eval()
    memory, tgt, masks = source_and_target()
    with record_attention(decoder) as full:
        decoder(tgt, memory, tgt_mask=masks["tgt_mask"])
    expected = decode_step_by_step(decoder, tgt, memory)
    with record_attention(decoder) as outer, record_attention(decoder) as maps:
        output = decode_step_by_step(decoder, tgt, memory)
    assert torch.equal(output, expected)
    for path, whole in full.items():
        assert len(maps.calls[path]) == QUERY_LEN
        for i, row in enumerate(maps.calls[path]):
            visible = i + 1 if path.endswith("self_attn") else KEY_LEN
            assert_close(row, whole[:, :, i : i + 1, :visible], path)
            assert torch.equal(row, outer.calls[path][i])


@pytest.mark.parametrize("cache_class", [GrowingCache, FixedCache])
def test_a_cache_holds_the_same_after_recording(cache_class: Any) -> None:
    attention = attention_of(scratch, add_bias_kv=True)
    query, key, value = inputs_of(attention, "sequence-first")
    caches = cache_class(), cache_class()
    for _ in range(2):
        expected, _ = attention(query, key, value, cache=caches[0])
        with record_attention(attention) as maps:
            output, weights = attention(query, key, value, average_attn_weights=False, cache=caches[1])
        assert torch.equal(output, expected)
        assert torch.equal(maps[""], weights)
        assert caches[0].extended_len(1) == caches[1].extended_len(1)


def test_a_promise_of_causality_beside_a_cache_is_recorded_as_its_mask_says() -> None:
    attention, cache = attention_of(scratch), GrowingCache()
    x, hidden = random_tensor(KEY_LEN, BATCH, EMBED_DIM), torch.ones(KEY_LEN, KEY_LEN, dtype=torch.bool).triu(1)
    _, whole = attention(x, x, x, attn_mask=hidden, average_attn_weights=False)
    with record_attention(attention) as maps:
        for begin, end in ((0, 5), (5, KEY_LEN)):
            new = x[begin:end]
            mask = hidden[begin:end, :end]
            attention(new, new, new, attn_mask=mask, is_causal=True, need_weights=False, cache=cache)
    assert_close(maps[""], whole[:, :, 5:])


# --- record_attention: nothing else changes -------------------------------------------------------------------------


def one_training_pass(model: Any, context: Any) -> list[Tensor]:
    """Give output, gradients, and the random state afterwards."""
    src, tgt, masks = source_and_target()
    src, tgt = (x.to(next(model.parameters()).dtype).requires_grad_() for x in (src, tgt))
    torch.manual_seed(3)
    with context:
        output = model(src, tgt, **masks)
    gradients = torch.autograd.grad(output.square().sum(), (src, tgt, *model.parameters()))
    return [output.detach(), *gradients, torch.get_rng_state()]


@packages
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_outputs_gradients_and_random_state_stay_the_same_to_the_last_bit(package: Any, autocast: bool) -> None:
    model = transformer_of(package, dropout=0.3, batch_first=True).train()
    if autocast:
        model.float()

    @contextmanager
    def passing(recorded: bool) -> Iterator[None]:
        lower = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
        with record_attention(model) if recorded else nullcontext(), lower:
            yield

    expected, actual = one_training_pass(model, passing(False)), one_training_pass(model, passing(True))
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    assert expected[0].isfinite().all()


@packages
def test_outputs_in_eval_stay_the_same_to_the_last_bit_off_the_fast_path(package: Any) -> None:
    model = transformer_of(package, batch_first=True).eval()
    src, tgt, masks = source_and_target()
    with torch.no_grad():
        expected = model(src, tgt, **masks)
        with record_attention(model):
            actual = model(src, tgt, **masks)
    assert torch.equal(actual, expected), "three heads are odd, so there is no fast path"


def test_the_fast_path_is_off_and_padded_places_hold_numbers() -> None:
    layer = nn.TransformerEncoderLayer(24, 2, FF_DIM, batch_first=True)
    encoder = build(nn.TransformerEncoder, layer, 2).eval()
    x, padding = random_tensor(BATCH, KEY_LEN, 24), torch.zeros(BATCH, KEY_LEN, dtype=torch.bool)
    padding[1, 5:] = True
    with fast_path(True), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        fast = encoder(x, src_key_padding_mask=padding)
        with record_attention(encoder) as maps:
            plain = encoder(x, src_key_padding_mask=padding)
    assert (fast[padding] == 0).all()
    assert (plain[padding].abs() > 0.01).any()
    assert_close(fast[~padding], plain[~padding])
    assert [len(calls) for calls in maps.calls.values()] == [1, 1]


@packages
@fast_path_on_and_off
def test_hooks_and_switch_are_put_back(package: Any, switch: bool) -> None:
    model = transformer_of(package, batch_first=True)
    model.encoder.layers[0].self_attn.register_forward_hook(lambda *_: None)
    with fast_path(switch):
        with record_attention(model):
            assert hooks_of(model) > 1
            assert not torch.backends.mha.get_fastpath_enabled()
        assert hooks_of(model) == 1
        assert torch.backends.mha.get_fastpath_enabled() is switch


@packages
@fast_path_on_and_off
def test_hooks_and_switch_are_put_back_after_an_exception(package: Any, switch: bool) -> None:
    model = transformer_of(package, batch_first=True)
    src, tgt, masks = source_and_target()

    def run_into_an_error() -> None:
        with record_attention(model) as maps:
            collected.append(maps)
            model(src, tgt, **masks)
            model(src, tgt[..., 1:], **masks)

    collected: list[AttentionMaps] = []
    with fast_path(switch):
        with pytest.raises(RuntimeError, match="d_model"):
            run_into_an_error()
        assert hooks_of(model) == 0
        assert torch.backends.mha.get_fastpath_enabled() is switch
    model(src, tgt, **masks)
    assert [len(calls) for calls in collected[0].calls.values()] == [1] * 6


@fast_path_on_and_off
def test_refused_models_are_left_as_they_were(switch: bool) -> None:
    model = nn.Sequential(attention_of(nn), compiled(attention_of(nn)))
    with fast_path(switch):
        with pytest.raises(ValueError, match="must not be compiled"), record_attention(model):
            pass
        assert hooks_of(model) == 0
        assert torch.backends.mha.get_fastpath_enabled() is switch


@packages
@fast_path_on_and_off
def test_nested_recordings_see_their_own_blocks(package: Any, switch: bool) -> None:
    model = transformer_of(package, batch_first=True).eval()
    src, tgt, masks = source_and_target()
    with fast_path(switch):
        with record_attention(model) as outer:
            model(src, tgt, **masks)
            with record_attention(model.decoder) as inner:
                model(src, tgt, **masks)
            assert not torch.backends.mha.get_fastpath_enabled()
            model(src, tgt, **masks)
        assert torch.backends.mha.get_fastpath_enabled() is switch
    assert hooks_of(model) == 0
    assert [len(calls) for calls in outer.calls.values()] == [3] * 6
    assert {path: len(calls) for path, calls in inner.calls.items()} == {
        path.removeprefix("decoder."): 1 for path in outer if path.startswith("decoder.")
    }
    assert torch.equal(inner["layers.1.self_attn"], outer.calls["decoder.layers.1.self_attn"][1])


@packages
def test_a_copy_made_inside_the_block_is_not_recorded(package: Any) -> None:
    model = attention_of(package, batch_first=True)
    inputs = inputs_of(model)
    with record_attention(model) as maps:
        twin = copy.deepcopy(model)
        twin(*inputs)
    twin(*inputs)
    assert not maps


def test_a_copy_made_inside_the_block_is_given_the_very_cache() -> None:
    model, cache, given = attention_of(scratch), GrowingCache(), []
    inputs = inputs_of(model, "sequence-first")
    with record_attention(model):
        twin = copy.deepcopy(model)
        twin.register_forward_pre_hook(lambda _, __, kwargs: given.append(kwargs["cache"]), with_kwargs=True)
        twin(*inputs, cache=cache)
    assert given == [cache]


@packages
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_calls_again_only_inside_the_block(package: Any, use_reentrant: bool) -> None:
    layer = build(package.TransformerEncoderLayer, EMBED_DIM, HEADS, FF_DIM, batch_first=True)
    x = random_tensor(BATCH, QUERY_LEN, EMBED_DIM).requires_grad_()
    torch.manual_seed(4)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    for stay, calls in ((False, 1), (True, 2)):
        torch.manual_seed(4)
        with record_attention(layer) as maps:
            loss = checkpoint(layer, x, use_reentrant=use_reentrant).sum()
            if stay:
                loss.backward()
        if not stay:
            loss.backward()
        assert len(maps.calls["self_attn"]) == calls
        assert torch.equal(maps.calls["self_attn"][0], maps["self_attn"])
        assert x.grad is not None
        assert torch.equal(x.grad, expected)
        x.grad = None


# --- record_attention: what it refuses --------------------------------------------------------------------------------


class SelfAttention(nn.MultiheadAttention):
    """A subclass whose call cannot be read."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x)[0]


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        ([attention_of(scratch)], TypeError, r"model must be a torch\.nn\.Module, got list"),
        (nn.Linear(2, 2), ValueError, r"a MultiheadAttention of scratch, builtin or torch\.nn, got Linear with none"),
        (
            nn.Sequential(SelfAttention(4, 2)),
            TypeError,
            "got SelfAttention at path '0' without query, key, value, attn_mask",
        ),
    ],
)
def test_models_that_cannot_be_recorded_are_refused(model: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text), record_attention(model):
        pass


def test_compiled_models_are_refused_and_compiled_parts_without_attention_are_not() -> None:
    attention = attention_of(scratch, batch_first=True)
    with pytest.raises(ValueError, match="got a compiled OptimizedModule at path ''"):
        record_attention(compiled(attention)).__enter__()
    with pytest.raises(ValueError, match="got a compiled OptimizedModule at path '0'"):
        record_attention(nn.Sequential(compiled(attention))).__enter__()
    in_place = attention_of(scratch)
    in_place.compile(backend="eager")
    with pytest.raises(ValueError, match="got a compiled MultiheadAttention at path ''"):
        record_attention(in_place).__enter__()

    model = nn.ModuleDict({"attention": attention, "linear": compiled(nn.Linear(2, 2))})
    with record_attention(model) as maps:
        model["attention"](*inputs_of(attention))
    assert list(maps) == ["attention"]


def test_builtin_hands_on_the_same_functions() -> None:
    assert builtin.record_attention is scratch.record_attention is record_attention
    assert builtin.trace_attention is scratch.trace_attention is trace_attention
    assert builtin.AttentionMaps is scratch.AttentionMaps is AttentionMaps
