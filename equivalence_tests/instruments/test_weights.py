"""Tests of weights.py: every weight goes where it belongs, or none goes anywhere."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scratch
from equivalence_tests.instruments.weights import WeightsDoNotMatchError, copy_weights, randomize_parameters

EMBED_DIM, NUM_HEADS = 33, 3


class SeparateAttention(nn.Module):
    """Attention as many people write it: four Linears, batch first."""

    def __init__(self, names: tuple[str, str, str, str], bias: bool = True, kdim: int = 33, vdim: int = 33) -> None:
        super().__init__()
        self.names = names
        widths = zip(names, (EMBED_DIM, kdim, vdim, EMBED_DIM), strict=True)
        for name, width in widths:
            self.add_module(name, nn.Linear(width, EMBED_DIM, bias=bias))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (
            self.get_submodule(name)(x).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
            for name, x in zip(self.names[:3], (query, key, value), strict=True)
        )
        weights = torch.softmax(q @ k.mT / (EMBED_DIM / NUM_HEADS) ** 0.5, dim=-1)
        return self.get_submodule(self.names[3])((weights @ v).transpose(1, 2).flatten(2))


NAMES = [
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("Wq", "Wk", "Wv", "Wo"),
    ("WQ", "WK", "WV", "WO"),
    ("W_Q", "W_K", "W_V", "fc"),
    ("w_qs", "w_ks", "w_vs", "fc"),
    ("query", "key", "value", "proj"),
    ("to_q", "to_k", "to_v", "to_out"),
    ("toqueries", "tokeys", "tovalues", "unifyheads"),
    ("queryLinear", "keyLinear", "valueLinear", "outputLinear"),
    ("fc_q", "fc_k", "fc_v", "w_concat"),
    ("values", "keys", "queries", "fc_out"),
]


def randomized(module: Any, seed: int = 1) -> Any:
    return randomize_parameters(module.double(), seed=seed)


def inputs(kdim: int = 33, vdim: int = 33) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 5, EMBED_DIM), (2, 7, kdim), (2, 7, vdim))
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query, key, value


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backwards", [False, True])
def test_separate_linears_get_the_weights_of_their_roles_both_ways(
    names: tuple[str, str, str, str], bias: bool, backwards: bool
) -> None:
    if names[0] == "values":  # registered in another order than q, k, v
        names = (names[2], names[1], names[0], names[3])
    attention = randomized(nn.MultiheadAttention(EMBED_DIM, NUM_HEADS, bias=bias, batch_first=True), seed=1)
    theirs = randomized(SeparateAttention(names, bias), seed=2)
    source, target = (theirs, attention) if backwards else (attention, theirs)
    before = {name: x.clone() for name, x in source.named_parameters()}
    report = copy_weights(source, target)
    torch.testing.assert_close(theirs(*inputs()), attention(*inputs())[0], rtol=0, atol=1e-13)
    assert all(torch.equal(x, before[name]) for name, x in source.named_parameters())
    assert {name for pair in report.pairs for name in pair if "in_proj" not in name} == {
        name for side in (theirs, attention) for name, _ in side.named_parameters() if "in_proj" not in name
    }


def test_separate_weights_of_torch_go_to_separate_linears() -> None:
    sizes: dict[str, Any] = {"kdim": 13, "vdim": 17}
    attention = randomized(nn.MultiheadAttention(EMBED_DIM, NUM_HEADS, batch_first=True, **sizes), seed=1)
    theirs = randomized(SeparateAttention(("wq", "wk", "wv", "wo"), **sizes), seed=2)
    copy_weights(attention, theirs)
    torch.testing.assert_close(theirs(*inputs(**sizes)), attention(*inputs(**sizes))[0], rtol=0, atol=1e-13)


class Forced(nn.MultiheadAttention):
    """torch.nn's attention with separate weights although the widths are equal."""

    in_proj_weight: Any

    def __init__(self) -> None:
        super().__init__(EMBED_DIM, NUM_HEADS)
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            setattr(self, name, nn.Parameter(torch.empty(EMBED_DIM, EMBED_DIM)))
        self.in_proj_weight = None
        self._qkv_same_embed_dim = False


@pytest.mark.parametrize("backwards", [False, True])
def test_packed_and_separate_weights_of_torch_match(backwards: bool) -> None:
    packed, separate = randomized(nn.MultiheadAttention(EMBED_DIM, NUM_HEADS), 1), randomized(Forced(), 2)
    copy_weights(*((separate, packed) if backwards else (packed, separate)))
    query, key, value = (x.transpose(0, 1) for x in inputs())
    torch.testing.assert_close(separate(query, key, value)[0], packed(query, key, value)[0], rtol=0, atol=1e-13)


def test_head_sizes_of_their_own_are_cut_at_the_right_rows() -> None:
    attention = randomized(scratch.MultiheadAttention(33, 3, qk_head_dim=5, v_head_dim=7), seed=1)
    theirs: Any = nn.ModuleDict(
        {"q": nn.Linear(33, 15), "k": nn.Linear(33, 15), "v": nn.Linear(33, 21), "o": nn.Linear(21, 33)}
    ).double()
    copy_weights(attention, theirs)
    (q_weight, _), _, (v_weight, _) = attention._in_projection().each()
    assert torch.equal(theirs["q"].weight, q_weight)
    assert torch.equal(theirs["v"].weight, v_weight)
    assert torch.equal(theirs["v"].bias, attention.in_proj_bias[30:])


@pytest.mark.parametrize(
    ("class_name", "arguments"),
    [
        ("MultiheadAttention", {"embed_dim": 33, "num_heads": 3, "add_bias_kv": True, "kdim": 13}),
        ("TransformerEncoderLayer", {"d_model": 33, "nhead": 3, "dim_feedforward": 13}),
        ("TransformerDecoderLayer", {"d_model": 33, "nhead": 3, "dim_feedforward": 13, "bias": False}),
        (
            "Transformer",
            {"d_model": 34, "nhead": 2, "num_encoder_layers": 2, "num_decoder_layers": 1, "batch_first": True},
        ),
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_scratch_and_torch_hold_the_same_names(class_name: str, arguments: dict[str, int], backwards: bool) -> None:
    packages = (nn, scratch) if backwards else (scratch, nn)
    source, target = (randomized(getattr(p, class_name)(**arguments), i) for i, p in enumerate(packages))
    report = copy_weights(source, target)
    assert report.pairs == tuple((name, name) for name in source.state_dict())
    assert all(torch.equal(x, target.state_dict()[name]) for name, x in source.state_dict().items())


def test_attention_inside_a_layer_is_matched_at_its_path() -> None:
    layer = randomized(nn.TransformerEncoderLayer(33, 3, 13), 1)
    theirs = copy.deepcopy(layer)
    theirs.self_attn = SeparateAttention(("to_q", "to_k", "to_v", "to_out")).double()
    report = copy_weights(layer, theirs)
    assert ("self_attn.in_proj_weight[33:66]", "self_attn.to_k.weight") in report.pairs
    assert torch.equal(theirs.self_attn.to_k.weight, layer.self_attn.in_proj_weight[33:66])


def test_numbered_wrappers_around_a_linear_do_not_hide_its_role() -> None:
    theirs = linears("to_q", "to_k", "to_v")
    theirs["to_out"] = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1))
    report = copy_weights(nn.MultiheadAttention(6, 2), theirs)
    assert ("out_proj.weight", "to_out.0.weight") in report.pairs


def refusal(source: nn.Module, target: nn.Module) -> str:
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(WeightsDoNotMatchError) as caught:
        copy_weights(source, target)
    assert all(torch.equal(x, before[name]) for name, x in target.state_dict().items()), "something was copied"
    return str(caught.value)


def linears(*names: str, **sizes: int) -> Any:
    return nn.ModuleDict({name: nn.Linear(6, sizes.get(name, 6)) for name in names})


def test_a_left_over_weight_is_named_with_its_side() -> None:
    source, target = linears("q", "k", "v", "o", "gate"), nn.MultiheadAttention(6, 2)
    assert refusal(source, target).endswith("nothing was: left over in the source: gate.weight, gate.bias")
    assert refusal(target, source).endswith("nothing was: left over in the target: gate.weight, gate.bias")


def test_a_missing_bias_is_left_over() -> None:
    message = refusal(nn.MultiheadAttention(6, 2, bias=False), nn.MultiheadAttention(6, 2))
    assert message.endswith(
        "left over in the target: in_proj_bias[0:6], in_proj_bias[6:12], in_proj_bias[12:18], out_proj.bias"
    )


def test_a_shape_that_differs_is_named_with_both_shapes() -> None:
    message = refusal(nn.MultiheadAttention(6, 2), linears("q", "k", "v", "o", k=5))
    assert "in_proj_weight[6:12] of the source is (6, 6), k.weight of the target (5, 6)" in message
    assert "in_proj_bias[6:12] of the source is (6,), k.bias of the target (5,)" in message
    assert "q.weight" not in message


def test_two_weights_that_claim_one_role_are_refused() -> None:
    message = refusal(nn.MultiheadAttention(6, 2), linears("q", "query", "k", "v", "o"))
    assert "q.weight and query.weight of the target all look like q_proj.weight" in message


def test_a_fused_projection_is_refused_because_its_layout_cannot_be_told() -> None:
    message = refusal(nn.MultiheadAttention(6, 2), linears("qkv", "out_proj", qkv=18))
    assert "left over in the target: qkv.weight, qkv.bias" in message


def test_linears_without_a_role_in_their_name_are_refused() -> None:
    assert "left over in the target: linears.0.weight" in refusal(
        nn.MultiheadAttention(6, 2), nn.ModuleDict({"linears": nn.ModuleList(nn.Linear(6, 6) for _ in range(4))})
    )


def test_two_nameless_linears_do_not_both_become_the_output_projection() -> None:
    assert "left over in the target: fc.weight, fc.bias, linear.weight, linear.bias" in refusal(
        nn.MultiheadAttention(6, 2), linears("q", "k", "v", "fc", "linear")
    )


def test_weights_that_differ_do_not_go_into_one_that_is_shared() -> None:
    shared = linears("q", "k", "v", "o")
    shared["k"] = shared["q"]
    message = refusal(randomized(nn.MultiheadAttention(6, 2)), shared.double())
    assert "q.weight and k.weight of the target are one weight" in message


def test_tied_weights_go_into_tied_weights() -> None:
    def tied(seed: int) -> Any:
        model: Any = nn.ModuleDict({"embedding": nn.Embedding(7, 6), "projection": nn.Linear(6, 7, bias=False)})
        model["projection"].weight = model["embedding"].weight
        return randomize_parameters(model, seed=seed)

    source, target = tied(1), tied(2)
    copy_weights(source, target)
    assert torch.equal(target["projection"].weight, source["embedding"].weight)


def test_a_module_without_shapes_yet_is_refused() -> None:
    lazy = nn.ModuleDict({"q": nn.LazyLinear(6)})
    with pytest.raises(WeightsDoNotMatchError, match=r"the source has no shapes yet for q\.weight, q\.bias: call"):
        copy_weights(lazy, lazy)
    with pytest.raises(WeightsDoNotMatchError, match="the module has no shapes yet"):
        randomize_parameters(lazy)


def test_buffers_of_both_are_copied_and_those_of_one_reported() -> None:
    source, target = linears("q"), linears("q")
    source.register_buffer("running", torch.tensor([3.0]))
    target.register_buffer("running", torch.tensor([0.0]))
    target.register_buffer("causal", torch.ones(5, 5).tril(), persistent=False)
    report = copy_weights(source, target)
    assert target.running.item() == 3.0
    assert report.left_alone == ("causal",)
    assert str(report).endswith("running -> running\ncausal left alone (a buffer of one side)")


def test_weights_are_converted_to_the_dtype_of_the_target() -> None:
    source, target = linears("q"), linears("q").double()
    copy_weights(source, target)
    assert target["q"].weight.dtype == torch.float64
    assert torch.equal(target["q"].weight, source["q"].weight.double())


def parameters(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    layer = nn.TransformerDecoderLayer(128, 4, 256, dtype=dtype)
    layer.self_attn = nn.MultiheadAttention(128, 4, add_bias_kv=True, dtype=dtype)
    return {name: x.detach() for name, x in randomize_parameters(layer, seed=seed).named_parameters()}


def test_random_parameters_follow_from_the_seed_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second, third = parameters(3), parameters(3), parameters(4)
    # Building the layer moved the global state; filling it did not.
    torch.set_rng_state(state)
    layer = nn.Linear(6, 6)
    after_building = torch.get_rng_state()
    randomize_parameters(layer)
    assert torch.equal(torch.get_rng_state(), after_building)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], third[name]) for name in first)


def test_a_generator_goes_on_where_it_stands() -> None:
    generator = torch.Generator().manual_seed(3)
    first, second = (randomize_parameters(nn.Linear(6, 6), generator=generator).weight for _ in range(2))
    assert torch.equal(first, randomize_parameters(nn.Linear(6, 6), seed=3).weight)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_parameters_are_the_same_numbers_in_every_dtype(dtype: torch.dtype) -> None:
    exact, rounded = parameters(), parameters(dtype=dtype)
    assert all(torch.equal(exact[name].to(dtype), rounded[name]) for name in exact)


def test_no_random_parameter_is_left_at_what_a_careless_reader_would_expect() -> None:
    for name, x in parameters().items():
        assert x.std() > 0.01, name
        center = 1.0 if name.startswith("norm") and name.endswith("weight") else 0.0
        assert abs(x.mean() - center) < 0.2, name
        assert x.unique().numel() == x.numel(), name
    gains, biases = parameters()["norm1.weight"], parameters()["self_attn.in_proj_bias"]
    assert gains.min() >= 0.5
    assert gains.max() <= 1.5
    assert biases.abs().max() <= 0.5


def test_softmax_is_neither_flat_nor_saturated_with_random_parameters() -> None:
    attention = nn.MultiheadAttention(64, 4, add_bias_kv=True, dtype=torch.float64)
    x = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, weights = randomize_parameters(attention)(x, x, x, average_attn_weights=False)
    greatest = weights.amax(-1)
    assert 3 / 17 < greatest.mean() < 0.6
    assert greatest.max() < 0.99
    assert weights[..., -1].max() > 3 / 17  # the learnt token is looked at too


def test_shared_parameters_are_drawn_once() -> None:
    model: Any = nn.ModuleDict({"embedding": nn.Embedding(7, 6), "projection": nn.Linear(6, 7, bias=False)})
    alone = randomize_parameters(nn.Embedding(7, 6)).weight
    model["projection"].weight = model["embedding"].weight
    assert torch.equal(randomize_parameters(model)["projection"].weight, alone)


def test_names_of_roles_do_not_clash() -> None:
    # One class with every pair of spellings: each role is still found exactly once.
    for first, second in itertools.permutations(NAMES[:4], 2):
        source = SeparateAttention(first)
        target = SeparateAttention(second)
        assert len(copy_weights(source, target).pairs) == 8
