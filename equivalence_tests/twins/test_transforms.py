"""What torch does to functions and modules: compile, export, differentiate, map, cast, copy, save."""

import copy
import io
import pickle
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import builtin
import scratch
from equivalence_tests.instruments.differences import compare_errors, compare_tensors
from equivalence_tests.instruments.error_cases import LAYER, construct
from equivalence_tests.instruments.side_by_side import (
    CLASSES,
    PACKAGES,
    TORCH,
    assert_equal,
    random_tensor,
    with_same_weights,
)
from equivalence_tests.instruments.weights import randomize_parameters

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    # torch scripts its own derivatives the first time they are needed.
    pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated:DeprecationWarning"),
]

EACH_PACKAGE = pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
COMPONENTS: dict[str, dict[str, Any]] = {
    "MultiheadAttention": {"embed_dim": 33, "num_heads": 3},
    "TransformerEncoderLayer": dict(LAYER),
    "TransformerDecoderLayer": dict(LAYER),
    "TransformerEncoder": {"num_layers": 2},
    "TransformerDecoder": {"num_layers": 2},
    "Transformer": {**LAYER, "num_encoder_layers": 1, "num_decoder_layers": 1},
}


def built(package: Any, component: str, dtype: torch.dtype = torch.float64) -> Any:
    return randomize_parameters(construct(package, component, COMPONENTS[component]).to(dtype)).eval()


def call_of(component: str, query_len: int = 5, key_len: int = 7) -> dict[str, Tensor]:
    """Give the sequences that a class is called with."""
    x, memory = random_tensor(query_len, 2, 33), random_tensor(key_len, 2, 33, seed=1)
    if component == "MultiheadAttention":
        return {"query": x, "key": memory, "value": memory}
    if component.startswith("TransformerEncoder"):
        return {"src": x}
    return {"src": memory, "tgt": x} if component == "Transformer" else {"tgt": x, "memory": memory}


def masks_of(component: str, query_len: int = 5, key_len: int = 7) -> dict[str, Any]:
    """Give the masks that a class is called with, the hint included: finding out looks at the values."""
    causal = ~scratch.masks.causal(query_len)
    padding = torch.zeros(2, key_len, dtype=torch.bool)
    padding[0, 1:2] = True
    if component == "MultiheadAttention":
        return {"key_padding_mask": padding, "attn_mask": ~scratch.masks.causal(query_len, key_len)}
    if component.startswith("TransformerEncoder"):
        name = "src_mask" if component.endswith("Layer") else "mask"
        return {name: causal, "is_causal": True}
    masks = {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": padding}
    return masks | ({"src_key_padding_mask": padding, "src_is_causal": False} if component == "Transformer" else {})


def compiled(function: Any, **options: Any) -> Any:
    """Compile into one graph, with nothing left over from graphs before."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **options)


def first(result: Any) -> Tensor:
    output = result[0] if isinstance(result, tuple) else result
    assert isinstance(output, Tensor)
    return output


def thorough(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.thorough)


# A graph takes a second to compile. That of a Transformer runs through its stacks and their layers.
HOLD_THE_REST = ("MultiheadAttention", "Transformer")
FEW_CLASSES = [x if x in HOLD_THE_REST else thorough(x) for x in CLASSES]
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": random_tensor(2, 1, 1, 1) > 2},
    "float": {"attn_mask": random_tensor(2, 1, 1, 1), "scale": 0.5},
    "grouped": {"enable_gqa": True},
}


class TestCompile:
    @pytest.mark.parametrize(
        ("package", "component"),
        [
            (scratch, "MultiheadAttention"),
            (scratch, "Transformer"),
            (builtin, "Transformer"),
            *(thorough(scratch, component) for component in CLASSES if component not in HOLD_THE_REST),
            thorough(builtin, "MultiheadAttention"),
        ],
    )
    def test_classes_compile_into_one_graph_of_dynamic_sizes(self, package: Any, component: str) -> None:
        module = built(package, component)
        graph = compiled(module, backend="eager", dynamic=True)
        for query_len, key_len in ((5, 7), (11, 13), (3, 3)):
            arguments = {**call_of(component, query_len, key_len), **masks_of(component, query_len, key_len)}
            assert_equal({"output": first(graph(**arguments))}, {"output": first(module(**arguments))})

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("component", FEW_CLASSES)
    def test_so_they_do_backwards_in_training(self, component: str) -> None:
        module = built(scratch, component).train()
        gradients = []
        for call in (compiled(module, backend="aot_eager"), module):
            module.zero_grad()
            torch.manual_seed(0)
            for dropout in module.modules():
                if isinstance(dropout, nn.Dropout):
                    dropout.p = 0.0  # a compiled graph draws from the random stream in its own order
                if isinstance(dropout, scratch.MultiheadAttention):
                    dropout.dropout = 0.0
            first(call(**call_of(component), **masks_of(component))).square().sum().backward()
            gradients.append({f"gradient of {name}": x.grad for name, x in module.named_parameters()})
        assert_equal(gradients[0], gradients[1])

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize(
        ("package", "call"),
        [
            *((scratch, call) for call in CALLS if call != "plain"),  # grouped is plain, and more
            (builtin, "bool"),
            thorough(scratch, "plain"),
            *(thorough(builtin, call) for call in CALLS if call != "bool"),
        ],
    )
    def test_the_function_compiles_into_one_graph_of_dynamic_sizes_0_included(self, package: Any, call: str) -> None:
        sdpa, arguments = package.scaled_dot_product_attention, CALLS[call]
        graph = compiled(sdpa, backend="eager", dynamic=True)
        heads = 1 if arguments.get("enable_gqa") else 3
        for query_len, key_len in ((5, 7), (11, 13), (0, 7), (1, 2), (5, 0)):
            inputs = (
                random_tensor(2, 3, query_len, 11),
                random_tensor(2, heads, key_len, 11, seed=1),
                random_tensor(2, heads, key_len, 13, seed=2),
            )
            assert_equal({"output": graph(*inputs, **arguments)}, {"output": sdpa(*inputs, **arguments)})

    @EACH_PACKAGE
    def test_mask_builders_compile_into_one_graph(self, package: Any) -> None:

        def build(x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
            masks, n = package.masks, x.size(0)
            return (
                masks.causal(n, n + 2, align="lower_right"),
                masks.sliding_window(n, window=2),
                masks.from_lengths(lengths, max_len=n),
                masks.to_score_bias(masks.from_token_ids(lengths, pad_id=0)),
            )

        graph = compiled(build, backend="eager", dynamic=True)
        for n in (5, 7, 2):
            x, lengths = torch.zeros(n), torch.tensor([2, 0, 1])
            assert all(torch.equal(*pair) for pair in zip(graph(x, lengths), build(x, lengths), strict=True))

    @pytest.mark.slow
    @pytest.mark.thorough
    @pytest.mark.skipif(shutil.which("c++") is None, reason="the default backend needs a C++ compiler")
    def test_the_default_backend_gives_the_same(self) -> None:
        attention = built(scratch, "MultiheadAttention")
        arguments: dict[str, Any] = {**call_of("MultiheadAttention"), **masks_of("MultiheadAttention")}
        for actual, expected in zip(compiled(attention)(**arguments), attention(**arguments), strict=True):
            assert_equal({"output": actual}, {"output": expected})


class TestExport:
    @pytest.mark.parametrize("component", FEW_CLASSES)
    def test_classes_export_with_dynamic_lengths(self, component: str) -> None:
        module = built(scratch, component)
        inputs = call_of(component)
        lengths = {name: {0: torch.export.Dim.AUTO} for name in inputs}
        program = torch.export.export(module, (), dict(inputs), dynamic_shapes=lengths)
        for query_len, key_len in ((5, 7), (11, 13)):
            arguments = call_of(component, query_len, key_len)
            assert_equal({"output": first(program.module()(**arguments))}, {"output": first(module(**arguments))})

    @pytest.mark.parametrize(("dim", "is_causal"), [(1, True), (2, False)], ids=["length", "number of heads"])
    def test_the_function_exports_with_a_size_that_only_the_data_tell(self, dim: int, is_causal: bool) -> None:
        class Truncated(nn.Module):
            def forward(self, x: Tensor, length: Tensor) -> Tensor:
                n = length.item()
                torch._check(n >= 0)
                torch._check(n <= x.size(dim))
                # Laid out anew, heads after tokens: the strides depend on the number of heads.
                shorter = (2 * x.narrow(dim, 0, n)).transpose(1, 2)  # type: ignore[arg-type]
                return scratch.scaled_dot_product_attention(shorter, shorter, shorter, is_causal=is_causal)

        x = random_tensor(2, 7, 5, 11)
        program = torch.export.export(Truncated(), (x, torch.tensor(5)))
        for n in (5, 3, 0):
            expected = Truncated()(x, torch.tensor(n))
            assert_equal({"output": program.module()(x, torch.tensor(n))}, {"output": expected})


def scratch_and_torch(component: str) -> tuple[Any, Any]:
    ours, theirs = built(scratch, component), built(TORCH, component)
    with_same_weights(ours, theirs)
    return ours, theirs


def of_parameters(module: Any, component: str) -> Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor]:
    """Turn a module into a function of its parameters and inputs."""

    def loss(parameters: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
        return first(torch.func.functional_call(module, parameters, (), {**inputs, **masks_of(component)})).sin().sum()

    return loss


class TestFunctionTransforms:
    @pytest.mark.parametrize("component", CLASSES)
    def test_grad_of_a_functional_call(self, component: str) -> None:
        found = []
        for module in scratch_and_torch(component):
            parameters = dict(module.named_parameters())
            gradients = torch.func.grad(of_parameters(module, component))(parameters, call_of(component))
            found.append({f"gradient of {name}": x for name, x in gradients.items()})
        assert_equal(found[0], found[1])

    @pytest.mark.parametrize("component", CLASSES)
    def test_vmap_over_samples_gives_the_gradient_of_each(self, component: str) -> None:
        module = built(scratch, component)
        loss, parameters = of_parameters(module, component), dict(module.named_parameters())
        both = [call_of(component), {name: x.flip(0) for name, x in call_of(component).items()}]
        stacked = {name: torch.stack([inputs[name] for inputs in both]) for name in both[0]}
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, stacked)
        for i, inputs in enumerate(both):
            alone = torch.func.grad(loss)(parameters, inputs)
            assert_equal(
                {f"gradient of {name}": x[i] for name, x in each.items()},
                {f"gradient of {name}": x for name, x in alone.items()},
            )

    @pytest.mark.parametrize("component", CLASSES)
    def test_jvp_is_the_derivative_along_a_direction(self, component: str) -> None:
        module = built(scratch, component)
        loss, parameters = of_parameters(module, component), dict(module.named_parameters())
        inputs = call_of(component)
        directions = {name: random_tensor(*x.shape, seed=9) for name, x in inputs.items()}
        along = torch.func.jvp(lambda x: loss(parameters, x), (inputs,), (directions,))[1]
        gradients = torch.func.grad(loss, argnums=1)(parameters, inputs)
        expected = torch.stack([(gradients[name] * directions[name]).sum() for name in inputs]).sum()
        assert_equal({"output": along}, {"output": expected})

    @EACH_PACKAGE
    def test_the_function_maps_over_a_batch_of_masks(self, package: Any) -> None:
        q, k, v = random_tensor(3, 5, 11), random_tensor(3, 7, 11, seed=1), random_tensor(3, 7, 13, seed=2)
        masks = random_tensor(4, 5, 7, seed=3) > 0
        sdpa = package.scaled_dot_product_attention
        mapped = torch.func.vmap(lambda attn_mask: sdpa(q, k, v, attn_mask))(masks)
        assert_equal({"output": mapped}, {"output": torch.stack([sdpa(q, k, v, mask) for mask in masks])})

    def test_gradients_and_their_gradients_are_those_of_finite_differences(self) -> None:
        inputs = tuple(random_tensor(*shape, seed=5).requires_grad_() for shape in ((2, 3, 5), (2, 5, 5), (2, 5, 2)))
        attn_mask = torch.ones(3, 5, dtype=torch.bool).tril()
        attn_mask[1] = False

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return scratch.scaled_dot_product_attention(query, key, value, attn_mask)

        assert torch.autograd.gradcheck(attend, inputs, check_batched_grad=True, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(attend, inputs)


class TestCasting:
    @pytest.mark.parametrize("component", CLASSES)
    def test_autocast_rounds_no_worse_than_torch(self, component: str) -> None:
        exact_module = built(scratch, component)
        exact = first(exact_module(**call_of(component), **masks_of(component)))
        inputs = {name: x.float() for name, x in call_of(component).items()}
        outputs = []
        for package in (scratch, TORCH):
            module = built(package, component, torch.float32)
            module.load_state_dict(exact_module.state_dict())
            with torch.autocast("cpu", torch.bfloat16):
                outputs.append(first(module(**inputs, **masks_of(component))))
        ratio = compare_errors(outputs[0], outputs[1], exact)
        assert ratio.passed, str(ratio)

    def test_autocast_gives_the_functions_dtype_as_torch_does(self) -> None:
        q, k = random_tensor(2, 3, 5, 11, dtype=torch.float32), random_tensor(2, 3, 7, 11, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = (f(q, k, k) for f in (scratch.scaled_dot_product_attention, F.scaled_dot_product_attention))
        assert ours.dtype == theirs.dtype == torch.bfloat16

    @EACH_PACKAGE
    @pytest.mark.parametrize("component", CLASSES)
    def test_modules_live_on_the_meta_device_until_they_get_memory(self, package: Any, component: str) -> None:
        with torch.device("meta"):
            module = construct(package, component, COMPONENTS[component])
        assert {x.device.type for x in module.parameters()} == {"meta"}
        inputs = {name: x.float().to("meta") for name, x in call_of(component).items()}
        assert first(module(**inputs)).shape == first(built(scratch, component)(**call_of(component))).shape
        module.to_empty(device="cpu").load_state_dict(built(TORCH, component, torch.float32).state_dict())
        assert all(x.isfinite().all() for x in module.parameters())


@EACH_PACKAGE
@pytest.mark.parametrize("component", CLASSES)
class TestCopies:
    def test_deep_copies_and_pickles_compute_the_same_and_share_nothing(self, package: Any, component: str) -> None:
        module = built(package, component)
        expected = first(module(**call_of(component)))
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert type(twin) is type(module)
            assert torch.equal(first(twin(**call_of(component))), expected)
            for parameter in twin.parameters():
                nn.init.zeros_(parameter)
        assert torch.equal(first(module(**call_of(component))), expected)

    def test_weights_are_saved_and_loaded_as_weights_only(self, package: Any, component: str) -> None:
        module, file = built(package, component), io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        twin = construct(package, component, COMPONENTS[component]).double().eval()
        twin.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(first(twin(**call_of(component))), first(module(**call_of(component))))

    def test_whole_modules_are_saved_and_loaded(self, package: Any, component: str) -> None:
        module, file = built(package, component), io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
        assert compare_tensors(
            first(twin(**call_of(component))), first(module(**call_of(component))), relative_bound=0
        ).passed

    def test_modules_change_dtype_in_place_and_by_swapping(self, package: Any, component: str) -> None:
        module = built(package, component, torch.float32)
        inputs = call_of(component)
        before = torch.__future__.get_swap_module_params_on_conversion()
        try:
            for swap in (False, True):
                torch.__future__.set_swap_module_params_on_conversion(swap)
                module.float()
                assert first(module.double()(**inputs)).dtype == torch.float64
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
