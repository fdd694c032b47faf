"""What programs do with torch.nn's classes, done with the classes of both packages in their place."""

import copy
import io
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.jit._trace import TracerWarning
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import builtin
import scratch
from equivalence_tests.instruments.differences import compare_errors
from equivalence_tests.instruments.side_by_side import (
    CLASSES,
    PACKAGES,
    TORCH,
    assert_equal,
    fast_path,
    random_tensor,
)
from equivalence_tests.instruments.weights import randomize_parameters

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.trace(_method)?` is deprecated:DeprecationWarning"),
]

EACH_PACKAGE = pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
ALL = {"torch.nn": TORCH, **PACKAGES}
SIZES: dict[str, Any] = {"d_model": 12, "nhead": 2, "dim_feedforward": 20, "dropout": 0.0, "batch_first": True}


@pytest.fixture(autouse=True)
def plain_path() -> Iterator[None]:
    """Compare with the path of torch.nn that hooks see."""
    with fast_path(False):
        yield


def embedded(length: int = 5, seed: int = 0) -> Tensor:
    return random_tensor(2, length, 12, seed=seed)


def hidden_later(length: int = 5) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def padding(length: int = 5) -> Tensor:
    hidden = torch.zeros(2, length, dtype=torch.bool)
    hidden[0, -1] = True
    return hidden


def in_each(program: Callable[[Any], Any], packages: dict[str, Any] = ALL) -> dict[str, Any]:
    """Run a program with the classes of each package, built after one seed."""
    results = {}
    for name, package in packages.items():
        torch.manual_seed(0)
        results[name] = program(package)
    return results


def assert_same(program: Callable[[Any], Tensor]) -> None:
    """Require that a program gives the tensor that it gives with torch.nn's classes."""
    results = in_each(program)
    for name in PACKAGES:
        assert_equal({"output": results[name]}, {"output": results["torch.nn"]})


def assert_alike(program: Callable[[Any], object]) -> None:
    """Require that a program notes the same with the classes of each package."""
    results = in_each(program)
    for name in PACKAGES:
        assert results[name] == results["torch.nn"], name


def layer_of(package: Any, kind: str, **options: Any) -> Any:
    return randomize_parameters(getattr(package, f"Transformer{kind}Layer")(**SIZES | options).double())


def call_layer(layer: Any, kind: str) -> Tensor:
    if kind == "Encoder":
        return layer(embedded(), src_mask=hidden_later(), src_key_padding_mask=padding())
    masks = {"tgt_mask": hidden_later(), "tgt_key_padding_mask": padding(), "memory_key_padding_mask": padding(7)}
    return layer(embedded(), embedded(7, seed=1), **masks)


def attentions_of(kind: str) -> tuple[str, ...]:
    return ("self_attn",) if kind == "Encoder" else ("self_attn", "multihead_attn")


EACH_KIND = pytest.mark.parametrize("kind", ["Encoder", "Decoder"])


class TorchsSignature(nn.Module):
    """An attention of one's own, called as torch.nn calls its own, with nothing but what torch's layers read."""

    def __init__(self, result: Callable[..., Any] = lambda x: (x, None)) -> None:
        super().__init__()
        self.batch_first = True
        self.mix = nn.Linear(12, 12)
        self.result = result

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        assert not need_weights
        scores = self.mix(query) @ key.transpose(-2, -1)
        scores = scores if attn_mask is None else scores + attn_mask
        scores = scores if key_padding_mask is None else scores.masked_fill(hidden(key_padding_mask)[:, None], -1e9)
        return self.result(scores.softmax(-1) @ value)


def hidden(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask < 0


class TestLayers:
    @EACH_KIND
    @pytest.mark.parametrize("norm_first", [True, False])
    def test_an_attention_with_torchs_signature_may_stand_in(self, kind: str, norm_first: bool) -> None:
        def program(package: Any) -> Tensor:
            layer = getattr(package, f"Transformer{kind}Layer")(**SIZES, norm_first=norm_first)
            for name in attentions_of(kind):
                setattr(layer, name, nn.MultiheadAttention(12, 2, batch_first=True))
            return call_layer(randomize_parameters(layer.double()), kind)

        assert_same(program)

    @EACH_KIND
    def test_an_own_attention_needs_no_more_than_torchs_call(self, kind: str) -> None:
        def program(package: Any) -> Tensor:
            layer = getattr(package, f"Transformer{kind}Layer")(**SIZES)
            for name in attentions_of(kind):
                setattr(layer, name, TorchsSignature())
            layer = randomize_parameters(layer.double())
            if kind == "Encoder":
                return layer(embedded(), src_mask=hidden_later(), src_key_padding_mask=padding())
            return layer(embedded(), embedded(7, seed=1), memory_key_padding_mask=padding(7))

        assert_same(program)

    @EACH_PACKAGE
    def test_an_own_attention_gets_tensors_and_masks_that_can_be_a_bias(self, package: Any) -> None:
        encoder, decoder = package.TransformerEncoderLayer(**SIZES), package.TransformerDecoderLayer(**SIZES)
        encoder.self_attn, decoder.multihead_attn = TorchsSignature(), TorchsSignature()
        for layer, call, text in (
            (encoder, (embedded().long(), hidden_later()), "src must be floating beside a bool mask"),
            (encoder, ([1.0],), "src must be a tensor, got list"),
            (encoder, (embedded(), hidden_later().long()), "src_mask must be bool or floating"),
            (encoder, (embedded(), None, padding().long()), "src_key_padding_mask must be bool or floating"),
            (decoder, (embedded().float(), [1.0]), "memory must be a tensor, got list"),
        ):
            with pytest.raises(TypeError, match=f"^{text}"):
                layer(*call)

    @EACH_KIND
    def test_a_wrapper_that_hides_the_attention_may_stand_in(self, kind: str) -> None:
        class Sharded(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner
                self.batch_first = True

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return self.inner(*args, **kwargs)

        def program(package: Any) -> Tensor:
            layer = layer_of(package, kind)
            for name in attentions_of(kind):
                setattr(layer, name, Sharded(getattr(layer, name)))
            return call_layer(layer, kind)

        assert_same(program)

    @pytest.mark.parametrize("result", [lambda x: (x,), lambda x: (x, None, "more"), lambda x: [x]], ids=[1, 3, "list"])
    def test_what_it_returns_is_read_at_its_first_place(self, result: Callable[[Tensor], Any]) -> None:
        def program(package: Any) -> Tensor:
            layer = package.TransformerEncoderLayer(**SIZES)
            layer.self_attn = TorchsSignature(result)
            return randomize_parameters(layer.double())(embedded())

        assert_same(program)

    @EACH_KIND
    def test_overridden_blocks_have_torchs_signature(self, kind: str) -> None:
        def program(package: Any) -> list[Any]:
            calls: list[Any] = []

            class Noting(getattr(package, f"Transformer{kind}Layer")):  # type: ignore[misc]
                def _sa_block(self, x: Any, attn_mask: Any, key_padding_mask: Any, is_causal: bool = False) -> Any:
                    calls.append(("sa", attn_mask.tolist(), key_padding_mask.tolist(), is_causal))
                    return super()._sa_block(x, attn_mask, key_padding_mask, is_causal=is_causal)

                def _ff_block(self, x: Any) -> Any:
                    calls.append("ff")
                    return super()._ff_block(x)

                if kind == "Decoder":

                    def _mha_block(
                        self, x: Any, mem: Any, attn_mask: Any, key_padding_mask: Any, is_causal: bool = False
                    ) -> Any:
                        calls.append(("mha", attn_mask, key_padding_mask.tolist(), is_causal))
                        return super()._mha_block(x, mem, attn_mask, key_padding_mask, is_causal)

            call_layer(Noting(**SIZES).double(), kind)
            return calls

        assert_alike(program)

    @EACH_KIND
    def test_hooks_of_an_attention_see_what_torch_passes_and_how(self, kind: str) -> None:
        def program(package: Any) -> list[Any]:
            calls: list[Any] = []

            def note(module: nn.Module, args: Any, kwargs: Any) -> None:
                query, key, value = args
                masks = {name: x.tolist() if isinstance(x, Tensor) else x for name, x in kwargs.items()}
                calls.append((key is value, query is key, masks))

            layer = layer_of(package, kind)
            for name in attentions_of(kind):
                getattr(layer, name).register_forward_pre_hook(note, with_kwargs=True)
                getattr(layer, name).register_forward_hook(lambda _, args, output: calls.append((len(args), output[1])))
            call_layer(layer, kind)
            return calls

        assert_alike(program)

    @EACH_KIND
    def test_full_backward_hooks_see_three_gradients(self, kind: str) -> None:
        def program(package: Any) -> Tensor:
            gradients: list[Tensor] = []

            def note(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
                query, key, value = grad_input
                gradients.extend([query, key, value, grad_output[0]])

            layer = layer_of(package, kind)
            layer.multihead_attn = getattr(layer, "multihead_attn", layer.self_attn)
            layer.multihead_attn.register_full_backward_hook(note)
            x, memory = embedded().requires_grad_(), embedded(7, seed=1).requires_grad_()
            output = (
                layer(x, src_key_padding_mask=padding())
                if kind == "Encoder"
                else layer(x, memory, memory_key_padding_mask=padding(7))
            )
            output.square().sum().backward()
            return torch.cat([x.flatten() for x in gradients])

        assert_same(program)

    @pytest.mark.parametrize("norm_first", [False, True])
    def test_the_cache_reaches_what_knows_it(self, norm_first: bool) -> None:
        seen = []

        class Noting(scratch.TransformerDecoderLayer):
            def _sa_block(self, *args: Any, **kwargs: Any) -> Tensor:
                seen.append(set(kwargs))
                return super()._sa_block(*args, **kwargs)

            def _mha_block(self, *args: Any, **kwargs: Any) -> Tensor:
                seen.append(set(kwargs))
                return super()._mha_block(*args, **kwargs)

        layer = Noting(**SIZES, norm_first=norm_first).double()
        layer(embedded(), embedded(7))
        layer(embedded(), embedded(7), cache=scratch.decoding.LayerCache())
        assert seen == [set(), set(), {"cache"}, {"cache"}]

    def test_marks_of_the_fast_path_are_torchs(self) -> None:
        activations = ["relu", "gelu", F.relu, F.gelu, nn.ReLU(), nn.GELU(), nn.SiLU(), torch.tanh]
        assert_alike(
            lambda package: [
                package.TransformerEncoderLayer(**SIZES, activation=x).activation_relu_or_gelu for x in activations
            ]
        )

    @EACH_KIND
    def test_pickles_of_the_first_releases_have_no_activation(self, kind: str) -> None:
        def program(package: Any) -> Tensor:
            layer = layer_of(package, kind, activation="gelu")
            state = layer.__getstate__() if hasattr(layer, "__getstate__") else dict(vars(layer))
            state = {name: x for name, x in state.items() if name != "activation"}
            old = object.__new__(type(layer))
            old.__setstate__(dict(state))
            assert old.activation is F.relu
            return call_layer(old, kind)

        assert_same(program)


class OwnLayer(nn.Module):
    """A layer that adds the mask to its scores, as torch's documentation of ``mask`` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = SimpleNamespace(batch_first=True)
        self.mix = nn.Linear(12, 12)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: Any = 0,
    ) -> Tensor:
        assert src_mask is not None
        assert src_key_padding_mask is not None
        scores = self.mix(src) @ src.transpose(-2, -1) + src_mask + src_key_padding_mask[:, None]
        return scores.softmax(-1) @ src


class TestStacks:
    def test_layers_of_ones_own_get_masks_as_biases(self) -> None:
        def program(package: Any) -> Tensor:
            encoder = package.TransformerEncoder(OwnLayer(), 2, enable_nested_tensor=False)
            return randomize_parameters(encoder.double())(embedded(), hidden_later(), padding())

        assert_same(program)

    @pytest.mark.parametrize("name", ["encoder", "decoder"])
    def test_one_half_of_a_transformer_may_have_no_layers(self, name: str) -> None:
        layers = {"encoder": (2, 0), "decoder": (0, 2)}[name]

        def program(package: Any) -> Tensor:
            model = randomize_parameters(package.Transformer(12, 2, *layers, 20, 0.0, batch_first=True).double())
            return model.encoder(embedded()) if name == "encoder" else model.decoder(embedded(), embedded(7))

        assert_same(program)

    @EACH_PACKAGE
    def test_a_stack_without_layers_says_so_when_it_is_called(self, package: Any) -> None:
        model = package.Transformer(12, 2, 2, 0, 20, batch_first=True).double()
        with pytest.raises(IndexError, match=r"num_layers must be greater than 0 .* is out of range\)$"):
            model(embedded(7), embedded())

    @EACH_PACKAGE
    def test_whether_input_is_nested_can_be_read_and_switched_off(self, package: Any) -> None:
        encoder = package.TransformerEncoder(package.TransformerEncoderLayer(**SIZES), 1).double().eval()
        assert isinstance(encoder.use_nested_tensor, bool)
        assert not (package is scratch and encoder.use_nested_tensor)
        encoder.use_nested_tensor = False
        assert encoder(embedded(), src_key_padding_mask=padding()).shape == (2, 5, 12)


def mask_forms() -> dict[str, tuple[Tensor | None, Tensor | None]]:
    square, per_head = random_tensor(5, 5, seed=3), random_tensor(4, 5, 5, seed=4)
    padded = random_tensor(2, 5, seed=5)
    return {"none": (None, None), "padding": (None, padded), "2-D": (square, None), "3-D": (per_head, padded)}


class TestMultiheadAttention:
    @pytest.mark.parametrize("masks", mask_forms().values(), ids=mask_forms())
    def test_merge_masks_is_torchs(self, masks: tuple[Tensor | None, Tensor | None]) -> None:
        results = in_each(
            lambda package: package.MultiheadAttention(12, 2, batch_first=True).merge_masks(*masks, embedded())
        )
        expected_mask, expected_type = results.pop("torch.nn")
        for merged, mask_type in results.values():
            assert mask_type == expected_type
            assert (merged is None) == (expected_mask is None)
            assert merged is None or torch.equal(merged, expected_mask)

    def test_heads_may_be_regrouped_after_construction(self) -> None:
        def program(package: Any) -> Tensor:
            attention = randomize_parameters(package.MultiheadAttention(16, 4, batch_first=True).double())
            attention.num_heads, attention.head_dim = 2, 8
            x = random_tensor(2, 5, 16)
            return torch.cat([attention(x, x, x, need_weights=asked)[0] for asked in (True, False)])

        assert_same(program)

    def test_so_by_their_number_alone(self) -> None:
        def program(package: Any) -> Tensor:
            attention = randomize_parameters(package.MultiheadAttention(16, 2, batch_first=True).double())
            attention.num_heads = 8
            x = random_tensor(2, 5, 16)
            return attention(x, x, x, average_attn_weights=False)[1]

        assert_same(program)

    def test_so_with_head_sizes_that_were_given(self) -> None:
        attention = scratch.MultiheadAttention(12, 3, qk_head_dim=8, v_head_dim=10, batch_first=True).double()
        attention.num_heads = 6
        assert attention._head_dims() == (4, 5)
        assert attention(*[embedded()] * 3)[0].shape == (2, 5, 12)

    def test_subclasses_may_take_any_name_for_their_own(self) -> None:
        names = ("project", "score_bias", "append_tokens", "projection_weights", "attend", "scale", "v_head_dim")

        def program(package: Any) -> Tensor:
            class Renamed(package.MultiheadAttention):  # type: ignore[misc]
                def __init__(self) -> None:
                    super().__init__(12, 2, batch_first=True)
                    for name in names:
                        setattr(self, name, nn.Linear(12, 12))

                def forward(self, query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> Any:
                    query = sum(getattr(self, name)(query) for name in names)
                    return super().forward(query, key, value, **rest)

            attention = randomize_parameters(Renamed().double())
            return attention(embedded(), embedded(7), embedded(7), need_weights=False)[0]

        assert_same(program)

    def test_no_public_name_is_ours(self) -> None:
        for component in CLASSES:
            ours, theirs = getattr(scratch, component), getattr(nn, component)
            assert {name for name in dir(ours) if not name.startswith("_")} <= set(dir(theirs)), component

    def test_pickles_of_the_first_releases_do_not_say_whether_projections_are_packed(self) -> None:
        def program(package: Any) -> Tensor:
            attention = randomize_parameters(package.MultiheadAttention(12, 2, batch_first=True).double())
            state = {name: x for name, x in vars(attention).items() if name != "_qkv_same_embed_dim"}
            old = object.__new__(type(attention))
            old.__setstate__(state)
            assert old._qkv_same_embed_dim
            return old(*[embedded()] * 3)[0]

        assert_same(program)

    def test_sizes_may_be_tensors_without_dimensions(self) -> None:
        def program(package: Any) -> Tensor:
            twelve, two = torch.tensor(12), torch.tensor(2)
            attention = package.MultiheadAttention(twelve, two, kdim=twelve, batch_first=True).double()
            layer = package.TransformerEncoderLayer(**SIZES | {"nhead": two, "dim_feedforward": twelve}).double()
            mask = (nn if package is TORCH else package).Transformer.generate_square_subsequent_mask(torch.tensor(5))
            x = attention(*[embedded()] * 3, attn_mask=mask.double())[0]
            return package.TransformerEncoder(layer, two)(x, mask.double())

        assert_same(program)


class TestScaledDotProductAttention:
    @EACH_PACKAGE
    @pytest.mark.parametrize(
        "dtypes",
        [
            (torch.float32, torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32, torch.float16),
            (torch.float16, torch.float16, torch.float32),
        ],
        ids=str,
    )
    def test_autocast_takes_mixed_dtypes(self, package: Any, dtypes: tuple[torch.dtype, ...]) -> None:
        exact = [random_tensor(2, 3, length, 11, seed=length) for length in (5, 7, 7)]
        inputs = [x.to(dtype) for x, dtype in zip(exact, dtypes, strict=True)]
        attn_mask = random_tensor(5, 7, seed=1, dtype=torch.float16)
        with torch.autocast("cpu", torch.bfloat16):
            ours = package.scaled_dot_product_attention(*inputs, attn_mask)
            theirs = TORCH.scaled_dot_product_attention(*inputs, attn_mask)
        assert ours.dtype == theirs.dtype == torch.bfloat16
        ratio = compare_errors(ours, theirs, TORCH.scaled_dot_product_attention(*exact, attn_mask.double()))
        assert ratio.passed, str(ratio)

    @EACH_PACKAGE
    def test_autocast_leaves_float64_alone(self, package: Any) -> None:
        double, single = random_tensor(2, 3, 5, 11), random_tensor(2, 3, 5, 11, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            assert package.scaled_dot_product_attention(double, double, double).dtype == torch.float64
            for function in (package.scaled_dot_product_attention, F.scaled_dot_product_attention):
                with pytest.raises(RuntimeError, match="dtype"):
                    function(double, single, single)

    @EACH_PACKAGE
    @pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "all heads"])
    def test_the_output_lies_in_memory_as_the_queries_do(self, package: Any, grouped: bool) -> None:
        query = random_tensor(2, 5, 6, 11).transpose(1, 2)
        key = random_tensor(2, 7, 2 if grouped else 6, 11, seed=1).transpose(1, 2)
        sdpa, torchs = package.scaled_dot_product_attention, TORCH.scaled_dot_product_attention
        for q, attn_mask in itertools.product((query, query.contiguous()), (None, random_tensor(5, 7) > 0)):
            output = sdpa(q, key, key, attn_mask, enable_gqa=grouped)
            assert output.stride() == torchs(q, key, key, attn_mask, enable_gqa=grouped).stride()
        assert sdpa(query, key, key, enable_gqa=grouped).transpose(1, 2).view(2, 5, 66).shape == (2, 5, 66)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_dynamic_quantisation_changes_the_modules_that_it_changes_in_torch() -> None:
    def program(package: Any) -> list[tuple[str, str]]:
        encoder = package.TransformerEncoder(package.TransformerEncoderLayer(**SIZES), 2).eval()
        encoder = torch.ao.quantization.quantize_dynamic(encoder, {nn.Linear}, dtype=torch.qint8)
        assert encoder(embedded().float()).isfinite().all()
        return [(name, type(x).__name__) for name, x in encoder.named_modules() if "lin" in name or "proj" in name]

    assert_alike(program)


class LowRank(nn.Module):
    """An adapter that is added to a weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.down = nn.Parameter(random_tensor(2, weight.size(1), seed=3))
        self.up = nn.Parameter(random_tensor(weight.size(0), 2, seed=4))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def adapted(model: Any) -> Tensor:
    for layer in model.layers:
        parametrize.register_parametrization(layer.self_attn, "in_proj_weight", LowRank(layer.self_attn.in_proj_weight))
        nn.utils.parametrizations.weight_norm(layer.linear1)
    return model(embedded())


def pruned(model: Any) -> Tensor:
    for layer in model.layers:
        prune.l1_unstructured(layer.self_attn, "in_proj_weight", 0.5)
        prune.l1_unstructured(layer.self_attn.out_proj, "weight", 0.5)
    return model(embedded())


def averaged(model: Any) -> Tensor:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for seed in range(2):
        average.update_parameters(randomize_parameters(model, seed=seed))
    return average(embedded())


def checkpointed(model: Any) -> Tensor:
    x = embedded().requires_grad_()
    for layer in model.train().layers:
        x = checkpoint(layer, x, use_reentrant=False)
    x.sin().sum().backward()
    return model.layers[0].self_attn.in_proj_weight.grad


def for_each_sample(model: Any) -> Tensor:
    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x[None],)).sin().sum()

    parameters = {name: x.detach() for name, x in model.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, embedded())
    return gradients["layers.0.self_attn.in_proj_weight"]


def ensembled(model: Any) -> Tensor:
    models = [randomize_parameters(copy.deepcopy(model), seed=seed) for seed in range(2)]
    skeleton = copy.deepcopy(model).to("meta")

    def call(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(skeleton, parameters, (x,))

    return torch.func.vmap(call, (0, None))(torch.func.stack_module_state(models)[0], embedded())


def filled_after_construction_on_meta(model: Any) -> Tensor:
    empty = copy.deepcopy(model).to("meta")
    empty.load_state_dict(model.state_dict(), assign=True)
    again = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    again.load_state_dict(model.state_dict())
    return torch.stack([empty(embedded()), again(embedded())])


def ask_for_weights(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"need_weights": True}


def made_to_give_its_maps(model: Any) -> Tensor:
    maps = []
    for layer in model.layers:
        attention = layer.self_attn
        attention.forward = partial(attention.forward, average_attn_weights=False)
        attention.register_forward_pre_hook(ask_for_weights, with_kwargs=True)
        attention.register_forward_hook(lambda *call: maps.append(call[-1][1]))
    model(embedded())
    return torch.stack(maps)


@pytest.mark.parametrize(
    "program",
    [
        adapted,
        pruned,
        averaged,
        checkpointed,
        for_each_sample,
        ensembled,
        filled_after_construction_on_meta,
        made_to_give_its_maps,
    ],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_an_encoder_can_be(program: Callable[[Any], Tensor]) -> None:
    def build_and_run(package: Any) -> Tensor:
        encoder = package.TransformerEncoder(package.TransformerEncoderLayer(**SIZES), 2)
        return program(randomize_parameters(encoder.double()))

    assert_same(build_and_run)


class Masked(nn.Module):
    """Make the causal mask inside, from the length of the input, as many models do.

    Args:
        package: Whose classes are used.
        component: One of them.
        hint: Say that the mask is causal, or leave it to the class to find out.
    """

    def __init__(self, package: Any, component: str, hint: bool | None = None) -> None:
        super().__init__()
        self.causal_mask = (nn if package is TORCH else package).Transformer.generate_square_subsequent_mask
        if component == "Transformer":
            self.inner: Any = package.Transformer(12, 2, 1, 1, 20, 0.0, batch_first=True)
        elif component == "MultiheadAttention":
            self.inner = package.MultiheadAttention(12, 2, batch_first=True)
        else:
            layer = getattr(package, component.removesuffix("Layer") + "Layer")(**SIZES)
            self.inner = layer if component.endswith("Layer") else getattr(package, component)(layer, 2)
        self.component, self.hint = component, hint

    def forward(self, x: Tensor) -> Tensor:
        mask = self.causal_mask(x.size(1), x.device, x.dtype)
        if self.component == "MultiheadAttention":
            return self.inner(x, x, x, attn_mask=mask, need_weights=False)[0]
        if self.component.startswith("TransformerEncoder"):
            return self.inner(x, mask, **({} if self.hint is None else {"is_causal": self.hint}))
        return self.inner(x, x, tgt_mask=mask, **({} if self.hint is None else {"tgt_is_causal": self.hint}))


@pytest.mark.parametrize("component", CLASSES)
class TestTracing:
    @EACH_PACKAGE
    def test_jit_traces_a_model_that_builds_its_mask(self, package: Any, component: str) -> None:
        model = randomize_parameters(Masked(package, component).double()).eval()
        with warnings.catch_warnings():
            if package is not scratch:  # torch.nn's own warns; ours says nothing
                warnings.simplefilter("ignore", TracerWarning)
            traced = torch.jit.trace(model, (embedded(),))
        for length in (5, 9):
            assert_equal({"output": traced(embedded(length))}, {"output": model(embedded(length))})

    @EACH_PACKAGE
    def test_jit_traces_masks_that_come_in(self, package: Any, component: str) -> None:
        model = randomize_parameters(Masked(package, component).double()).eval()
        inner = model.inner

        class WithMask(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: Tensor, hide: Tensor) -> Tensor:
                if component == "MultiheadAttention":
                    return self.inner(x, x, x, key_padding_mask=hide)[0]
                if component.startswith("TransformerEncoder"):
                    return self.inner(x, src_key_padding_mask=hide)
                return self.inner(x, x, tgt_key_padding_mask=hide)

        with warnings.catch_warnings():
            if package is not scratch:
                warnings.simplefilter("ignore", TracerWarning)
            traced = torch.jit.trace(WithMask(), (embedded(), padding()))
        for length in (5, 9):
            expected = WithMask()(embedded(length), padding(length))
            assert_equal({"output": traced(embedded(length), padding(length))}, {"output": expected})

    @EACH_PACKAGE
    def test_fx_sees_one_node(self, package: Any, component: str) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Linear(12, 12)
                self.body = Masked(package, component).inner

            def forward(self, x: Tensor) -> Tensor:
                x = F.relu(self.embed(x))
                if component == "MultiheadAttention":
                    return self.body(x, x, x)[0]
                return self.body(x) if component.startswith("TransformerEncoder") else self.body(x, x)

        model = randomize_parameters(Model().double()).eval()
        traced = fx.GraphModule(model, package.Tracer().trace(model))
        assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["embed", "body"]
        assert_equal({"output": traced(embedded(9))}, {"output": model(embedded(9))})


def test_fx_goes_through_subclasses_as_it_does_for_torch() -> None:
    class Own(scratch.TransformerEncoderLayer):
        pass

    assert scratch.Tracer().is_leaf_module(scratch.TransformerEncoderLayer(**SIZES), "x")
    assert not scratch.Tracer().is_leaf_module(Own(**SIZES), "x")
    assert not fx.Tracer().is_leaf_module(type("Own", (nn.TransformerEncoderLayer,), {})(**SIZES), "x")


@pytest.mark.parametrize("component", CLASSES)
@pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based ONNX export:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The feature will be removed:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Constant folding - Only steps=1 can be constant folded:UserWarning")
class TestOnnx:
    """This exporter writes the length into the model, with torch.nn's classes too; the next one does not."""

    def test_tracing_gives_a_valid_model(self, component: str) -> None:
        reference = pytest.importorskip("onnx.reference")
        model = randomize_parameters(Masked(scratch, component).double()).eval()
        file: Any = io.BytesIO()
        torch.onnx.export(model, (embedded(),), file, dynamo=False, input_names=["x"])
        graph = onnx_model(file.getvalue())
        (found,) = reference.ReferenceEvaluator(graph).run(None, {"x": embedded(seed=3).numpy()})
        assert_equal({"output": torch.from_numpy(found)}, {"output": model(embedded(seed=3)).detach()})


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")
def test_onnx_export_of_a_graph_gives_a_model_of_any_length() -> None:
    reference = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    exact = randomize_parameters(Masked(scratch, "Transformer", hint=True).double()).eval()
    model = copy.deepcopy(exact).float()
    lengths = ({1: torch.export.Dim("length", min=2, max=64)},)
    program = torch.onnx.export(model, (embedded().float(),), dynamo=True, dynamic_shapes=lengths, input_names=["x"])
    assert program is not None
    graph = onnx_model(program.model_proto.SerializeToString())
    for n in (5, 9):
        x = embedded(n)
        (found,) = reference.ReferenceEvaluator(graph).run(None, {"x": x.float().numpy()})
        ratio = compare_errors(torch.from_numpy(found), model(x.float()).detach(), exact(x).detach())
        assert ratio.passed, str(ratio)


def onnx_model(serialized: bytes) -> Any:
    onnx = pytest.importorskip("onnx")
    graph = onnx.load_from_string(serialized)
    onnx.checker.check_model(graph, full_check=True)
    return graph


def test_builtin_serves_in_torchs_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes and functions call what was there when they were imported, and so never themselves."""
    torch.compiler.reset()  # what was traced for a closure before would be asked of a mask function, which has none
    homes = (nn, F, torch.nn.attention.flex_attention)
    taken = [(home, name) for name in builtin.__all__ for home in homes if hasattr(home, name)]
    assert len(taken) > 10
    for home, name in taken:
        monkeypatch.setattr(home, name, getattr(builtin, name))
    x, flex = torch.randn(5, 2, 12), torch.nn.attention.flex_attention
    assert nn.Transformer(12, 3, 1, 1, 20)(x, x).shape == x.shape
    assert nn.Transformer.generate_square_subsequent_mask(3).shape == (3, 3)
    assert nn.RMSNorm(12)(x).shape == x.shape
    causal = flex.create_block_mask(scratch.score_functions.causal(), None, None, 5, 5, "cpu")
    q = torch.randn(2, 3, 5, 8)
    ours = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(flex.flex_attention(q, q, q, block_mask=causal), ours)
