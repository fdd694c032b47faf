"""What holds of attention without any reference, of training, and of derivatives; drawn by hypothesis."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import jvp, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import scratch
from equivalence_tests.instruments import strategies
from equivalence_tests.instruments.differences import compare_group, compare_tensors
from equivalence_tests.instruments.inputs import Case
from equivalence_tests.instruments.side_by_side import PACKAGES, fast_path, random_tensor
from equivalence_tests.instruments.weights import randomize_parameters
from equivalence_tests.twins.properties import Ledger, Tally, stops_the_fast_path

FEWER = max(settings().max_examples // 3, 1)
by_package = pytest.mark.parametrize("package", PACKAGES)
sizes = st.integers(2, 7)


def attention(package: str, embed_dim: int = 6, **arguments: Any) -> Any:
    module = PACKAGES[package].MultiheadAttention(embed_dim, 3, batch_first=True, dtype=torch.float64, **arguments)
    return randomize_parameters(module).eval()


@by_package
class TestInvariants:
    @given(length=sizes, moved=st.integers(1, 6), seed=st.integers(0, 99), norm_first=st.booleans())
    def test_a_later_token_leaves_earlier_outputs_alone_to_the_last_bit(
        self, package: str, length: int, moved: int, seed: int, norm_first: bool
    ) -> None:
        moved = min(moved, length - 1)
        layer = PACKAGES[package].TransformerEncoderLayer(6, 3, 5, batch_first=True, norm_first=norm_first)
        layer = randomize_parameters(layer.double().eval(), seed=seed)
        attn_mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = random_tensor(2, length, 6, seed=seed)
        other = x.clone()
        other[:, moved] += 1.0
        with fast_path(False):
            before, after = (layer(src, attn_mask) for src in (x, other))
        assert torch.equal(before[:, :moved], after[:, :moved])
        assert not torch.equal(before[:, moved], after[:, moved])

    @given(length=sizes, added=st.integers(1, 3), seed=st.integers(0, 99), filling=st.sampled_from([0.0, 1.0, 1e6]))
    def test_padded_equals_unpadded(self, package: str, length: int, added: int, seed: int, filling: float) -> None:
        module, x = attention(package), random_tensor(2, length, 6, seed=seed)
        padded = torch.cat([x, torch.full((2, added, 6), filling, dtype=torch.float64)], dim=1)
        hidden = torch.arange(length + added).expand(2, -1) >= length
        (alone, weights), (output, padded_weights) = (
            module(x, x, x),
            module(x, padded, padded, key_padding_mask=hidden),
        )
        assert compare_tensors(output, alone).passed
        assert compare_tensors(padded_weights[..., :length], weights).passed
        assert (padded_weights[..., length:] == 0).all()

    @given(query_len=sizes, key_len=sizes, seed=st.integers(0, 99), need_weights=st.booleans())
    def test_samples_do_not_influence_one_another(
        self, package: str, query_len: int, key_len: int, seed: int, need_weights: bool
    ) -> None:
        module = attention(package)
        query, key = random_tensor(2, query_len, 6, seed=seed), random_tensor(2, key_len, 6, seed=seed + 1)
        before, _ = module(query, key, key, need_weights=need_weights)
        query[1], key[1] = 3.0, -2.0
        after, _ = module(query, key, key, need_weights=need_weights)
        assert torch.equal(before[0], after[0])

    @given(order=st.permutations(range(5)), seed=st.integers(0, 99))
    def test_the_order_of_the_keys_is_nothing(self, package: str, order: list[int], seed: int) -> None:
        module, query, key = (
            attention(package),
            random_tensor(2, 7, 6, seed=seed),
            random_tensor(2, 5, 6, seed=seed + 1),
        )
        (output, weights), (turned, turned_weights) = (module(query, x, x) for x in (key, key[:, order]))
        assert compare_tensors(turned, output).passed
        assert compare_tensors(turned_weights, weights[..., order]).passed

    @given(data=st.data(), query_len=sizes, key_len=sizes)
    def test_weights_sum_to_1_and_hidden_keys_get_no_gradient(
        self, package: str, data: st.DataObject, query_len: int, key_len: int
    ) -> None:
        hidden = data.draw(strategies.padding_masks((2, key_len), forms=st.just("bool"))).build(torch.float64)
        hidden[:, 0] = False
        query = random_tensor(2, query_len, 6).requires_grad_()
        key = random_tensor(2, key_len, 6, seed=1).requires_grad_()
        output, weights = attention(package)(query, key, key, key_padding_mask=hidden)
        assert compare_tensors(weights.sum(dim=-1), torch.ones(2, query_len, dtype=torch.float64)).passed
        (output * random_tensor(*output.shape, seed=2)).sum().backward()
        assert key.grad is not None
        assert (key.grad[hidden] == 0).all()
        assert (key.grad[~hidden] != 0).any()


@by_package
@pytest.mark.parametrize("component", [*strategies.COMPONENTS, "Seq2SeqTransformer"])
@given(data=st.data(), gradients=st.booleans())
@settings(max_examples=FEWER)
def test_a_call_changes_nothing_so_that_the_next_one_agrees(
    package: str, component: str, data: st.DataObject, gradients: bool
) -> None:
    drawn = {**strategies.COMPONENTS, "Seq2SeqTransformer": strategies.seq2seq_cases}
    case = data.draw(drawn[component]())
    assume(not stops_the_fast_path(case))
    call, inputs = case.construct(PACKAGES[package]), case.inputs()
    if isinstance(call, nn.Module):
        call.eval()
    results = []
    with torch.set_grad_enabled(gradients):
        for _ in range(2):
            torch.manual_seed(case.seed)  # the function drops in every mode
            result = call(**inputs)
            results.append(result[0] if isinstance(result, tuple) else result)
    assert compare_tensors(*results, relative_bound=0).passed
    untouched = {name: (inputs[name], x) for name, x in case.inputs().items() if type(x) is torch.Tensor}
    assert all(torch.equal(*pair) for pair in untouched.values()), untouched
    if isinstance(call, nn.Module):
        parameters = zip(call.parameters(), case.construct(PACKAGES[package]).parameters(), strict=True)
        assert all(torch.equal(x, y) for x, y in parameters)


LEARNING_RATE = 0.01


def train(package: Any, optimizer: Any, options: dict[str, Any], num_steps: int, seed: int) -> dict[str, torch.Tensor]:
    """Train towards a random target: the mean square alone of a LayerNorm's output is 1, whatever its inputs."""
    torch.manual_seed(seed)
    model = package.Transformer(**options)
    steps = optimizer(model.parameters(), lr=LEARNING_RATE)
    src, tgt, target = (random_tensor(2, n, options["d_model"], seed=n + i) for i, n in enumerate((7, 5, 5)))
    if not options.get("batch_first"):
        src, tgt, target = (x.transpose(0, 1) for x in (src, tgt, target))
    for _ in range(num_steps):
        steps.zero_grad()
        F.mse_loss(model(src, tgt), target).backward()
        steps.step()
    return dict(model.named_parameters())


def set_key_biases_apart(parameters: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Cut the key biases out of the packed ones: no output depends on them, so their gradients are rounding alone."""
    rest, key_biases = dict(parameters), []
    for name in [name for name in parameters if name.endswith("in_proj_bias")]:
        bias_q, bias_k, bias_v = rest.pop(name).chunk(3)
        rest |= {f"{name}, queries": bias_q, f"{name}, values": bias_v}
        key_biases.append(bias_k)
    return rest, torch.cat(key_biases or [torch.empty(0)])


# torch.nn's encoder announces when it will not convert to nested tensors, and why.
@pytest.mark.filterwarnings("ignore:.*nested.tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*bias=False:UserWarning")
@pytest.mark.parametrize(("optimizer", "bound"), [(torch.optim.SGD, 1e-12), (torch.optim.AdamW, 1e-10)])
@settings(max_examples=FEWER)
@given(case=strategies.transformer_cases(), num_steps=st.integers(1, 5), seed=st.integers(0, 99))
def test_training_runs_end_in_the_same_parameters(
    optimizer: Any, bound: float, ledger: Ledger, case: Case, num_steps: int, seed: int
) -> None:
    d_model = 3 * max(4, case.part.arguments["d_model"])  # LayerNorm of one or two numbers leaves nothing to learn from
    options = {**case.part.arguments, "d_model": d_model, "nhead": 3, "dropout": 0.25, "dtype": torch.float64}
    with fast_path(False):
        ours, theirs = (train(package, optimizer, options, num_steps, seed) for package in (scratch, nn))
    (ours, our_biases), (theirs, their_biases) = (set_key_biases_apart(x) for x in (ours, theirs))
    comparisons = compare_group(ours, theirs, relative_bound=bound)
    assert all(x.passed for x in comparisons), "\n".join(str(x) for x in comparisons if not x.passed)
    # AdamW makes up to full steps of rounding: no two runs need to agree on their direction.
    assert ((our_biases - their_biases).abs() <= 2 * LEARNING_RATE * num_steps).all()
    tally = Tally(1, len(comparisons), sum(x.identical for x in comparisons))
    ledger.add("scratch.Transformer", f"training, {optimizer.__name__}", tally)


class TestDerivatives:
    @settings(max_examples=FEWER)
    @given(
        data=st.data(), query_len=st.integers(1, 3), key_len=st.integers(1, 3), scale=st.sampled_from([None, -0.5, 2.0])
    )
    def test_second_derivatives(self, data: st.DataObject, query_len: int, key_len: int, scale: float | None) -> None:
        attn_mask = data.draw(strategies.attention_masks((query_len, key_len), true_means_hidden=False))
        bias = attn_mask.build(torch.float64)
        inputs = [random_tensor(2, n, 2, seed=i).requires_grad_() for i, n in enumerate((query_len, key_len, key_len))]

        def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return scratch.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)

        assert torch.autograd.gradcheck(call, inputs)
        assert torch.autograd.gradgradcheck(call, inputs)

    # torch scripts its own formula for the forward derivative of softmax.
    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
    @given(query_len=sizes, key_len=sizes, seed=st.integers(0, 99), is_causal=st.booleans())
    def test_jvp_and_vmap_are_those_of_torch(self, query_len: int, key_len: int, seed: int, is_causal: bool) -> None:
        shapes = [(2, 3, n, 5) for n in (query_len, key_len, key_len)]
        primals, tangents = (
            tuple(random_tensor(*shape, seed=seed + start + i) for i, shape in enumerate(shapes)) for start in (0, 3)
        )
        with sdpa_kernel(SDPBackend.MATH):
            ours, theirs = (
                (
                    *jvp(lambda q, k, v, f=f: f(q, k, v, is_causal=is_causal), primals, tangents),
                    vmap(lambda q, k, v, f=f: f(q, k, v, is_causal=is_causal))(*primals),
                )
                for f in (scratch.scaled_dot_product_attention, F.scaled_dot_product_attention)
            )
        for name, x, y in zip(("output", "jvp", "vmap"), ours, theirs, strict=True):
            comparison = compare_tensors(x, y, name=name)
            assert comparison.passed, str(comparison)
