"""Encoder and decoder layers: against torch.nn with the same weights, in training with dropout and the same seed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import builtin
import scratch
from equivalence_tests.instruments.side_by_side import (
    PACKAGES,
    assert_equal,
    describe,
    fast_path,
    outputs_and_gradients,
    padding_with_holes,
    random_tensor,
    tokens,
    with_same_weights,
)
from equivalence_tests.instruments.weights import randomize_parameters
from scratch.layers import activation_function

SIZES: dict[str, Any] = {"d_model": 33, "nhead": 3, "dim_feedforward": 13, "dropout": 0.3}
INPUTS = {"TransformerEncoderLayer": ("src",), "TransformerDecoderLayer": ("tgt", "memory")}
EACH_PACKAGE = pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm_first": True},
    {"bias": False, "layer_norm_eps": 0.1},
    {"activation": "gelu", "batch_first": True},
    {"activation": squared_relu, "norm_first": True, "batch_first": True},
    {"activation": nn.SiLU(), "dropout": 0.0},
]


MASKS: dict[str, list[dict[str, Any]]] = {
    "TransformerEncoderLayer": [
        {},
        {"src_mask": torch.ones(7, 7, dtype=torch.bool).triu(2), "is_causal": True},  # promised, and so not read
        {"src_mask": random_tensor(7, 7, seed=5)},
        {"src_key_padding_mask": padding_with_holes(7)},
        {"src_mask": random_tensor(6, 7, 7, seed=6) > 0.8, "src_key_padding_mask": padding_with_holes(7)},
    ],
    "TransformerDecoderLayer": [
        {},
        {"tgt_mask": torch.ones(5, 5, dtype=torch.bool).triu(2), "tgt_is_causal": True},
        {"tgt_mask": random_tensor(5, 5, seed=5), "memory_mask": random_tensor(5, 7, seed=6)},
        {"tgt_key_padding_mask": padding_with_holes(5), "memory_key_padding_mask": padding_with_holes(7)},
        {"memory_mask": torch.ones(5, 7, dtype=torch.bool).triu(2), "memory_is_causal": True},
        {"tgt_mask": random_tensor(6, 5, 5, seed=5) > 0.8, "memory_mask": random_tensor(6, 5, 7, seed=6) > 0.8},
    ],
}


@pytest.mark.parametrize("options", OPTIONS, ids=describe)
@pytest.mark.parametrize("layer", INPUTS)
class TestAgainstTorch:
    def test_training_gives_the_same_outputs_and_gradients_and_drops_the_same(
        self, layer: str, options: dict[str, Any]
    ) -> None:
        ours, theirs = getattr(scratch, layer)(**SIZES | options), getattr(nn, layer)(**SIZES | options)
        with_same_weights(ours, theirs)
        inputs = tokens(*INPUTS[layer], batch_first=options.get("batch_first", False))
        for masks in MASKS[layer]:
            actual = outputs_and_gradients(ours, inputs, **masks)
            assert_equal(actual, outputs_and_gradients(theirs, inputs, **masks))

    def test_eval_gives_the_same_without_dropping(self, layer: str, options: dict[str, Any]) -> None:
        ours, theirs = getattr(scratch, layer)(**SIZES | options), getattr(nn, layer)(**SIZES | options)
        with_same_weights(ours.eval(), theirs.eval())
        inputs = tokens(*INPUTS[layer], batch_first=options.get("batch_first", False))
        for masks in MASKS[layer]:
            with fast_path(False):
                expected = outputs_and_gradients(theirs, inputs, seed=1, **masks)
            assert_equal(outputs_and_gradients(ours, inputs, seed=0, **masks), expected)


@pytest.mark.parametrize("layer", INPUTS)
def test_each_dropout_stands_where_torchs_does(layer: str) -> None:
    """Each drops alone, as where somebody sets one of them apart: the names of equal ones could be swapped."""
    ours, theirs = (getattr(package, layer)(**SIZES | {"dropout": 0.0}) for package in (scratch, nn))
    with_same_weights(ours, theirs)
    names = [name for name, module in theirs.named_modules() if isinstance(module, nn.Dropout)]
    assert len(names) >= 3
    for name in names:
        for module in (ours, theirs):
            for each in names:
                module.get_submodule(each).p = 0.5 if each == name else 0.0
        actual, expected = (outputs_and_gradients(module, tokens(*INPUTS[layer])) for module in (ours, theirs))
        assert_equal(actual, expected)


@EACH_PACKAGE
@pytest.mark.parametrize("layer", INPUTS)
class TestForms:
    def test_without_a_batch_it_is_one_sample(self, package: Any, layer: str) -> None:
        module = randomize_parameters(getattr(package, layer)(**SIZES).double()).eval()
        inputs = tokens(*INPUTS[layer])
        alone = module(**{name: x[:, 1] for name, x in inputs.items()})
        assert_equal({"output": alone}, {"output": module(**inputs)[:, 1]})

    def test_what_stands_later_does_not_reach_back_under_a_causal_mask(self, package: Any, layer: str) -> None:
        module = randomize_parameters(getattr(package, layer)(**SIZES).double()).eval()
        name = "src" if layer == "TransformerEncoderLayer" else "tgt"
        inputs = tokens(*INPUTS[layer])
        masks = MASKS[layer][1]
        before = module(**inputs, **masks)
        inputs[name] = inputs[name].clone()
        inputs[name][3:] += 1.0
        after = module(**inputs, **masks)
        assert torch.equal(before[:3], after[:3])
        assert not torch.isclose(before[3:], after[3:]).all(-1).any()

    def test_hooks_on_the_attention_run_in_every_mode(self, package: Any, layer: str) -> None:
        module = getattr(package, layer)(**SIZES | {"batch_first": True, "d_model": 34, "nhead": 2}).double()
        calls: list[str] = []
        module.self_attn.register_forward_hook(lambda *_: calls.append("self_attn"))
        inputs = {name: torch.cat([x, x[..., :1]], -1) for name, x in tokens(*INPUTS[layer], batch_first=True).items()}
        for train, mode in ((True, torch.enable_grad()), (False, torch.no_grad()), (False, torch.inference_mode())):
            with mode:
                module.train(train)(**inputs)
        assert calls == ["self_attn"] * 3

    def test_the_attention_may_be_replaced(self, package: Any, layer: str) -> None:
        module = getattr(package, layer)(**SIZES).double()
        module.self_attn = Silent(module.self_attn)
        inputs = tokens(*INPUTS[layer])
        assert module(**inputs).shape == next(iter(inputs.values())).shape
        assert module.self_attn.calls == 1


class Silent(scratch.MultiheadAttention):
    """Somebody's own attention: it attends to nothing, and counts its calls."""

    def __init__(self, like: Any) -> None:
        super().__init__(like.embed_dim, like.num_heads, dtype=torch.float64)
        self.calls = 0

    def forward(self, query: Tensor, *arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
        self.calls += 1
        return torch.zeros_like(query), None


@EACH_PACKAGE
class TestSubclasses:
    """The parts of a layer can be overridden under the names that torch.nn has for them."""

    def test_feed_forward_of_the_encoder_layer(self, package: Any) -> None:
        class WithoutFeedForward(package.TransformerEncoderLayer):  # type: ignore[misc]
            def _ff_block(self, x: Tensor) -> Tensor:
                return torch.zeros_like(x)

        layer = WithoutFeedForward(**SIZES, norm_first=True, dtype=torch.float64).eval()
        x = tokens("src")["src"]
        attended = layer._sa_block(layer.norm1(x), None, None)
        assert_equal({"output": layer(x)}, {"output": x + attended})

    def test_all_blocks_of_the_decoder_layer(self, package: Any) -> None:
        class Nothing(package.TransformerDecoderLayer):  # type: ignore[misc]
            def _sa_block(self, x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
                return torch.zeros_like(x)

            _mha_block = _ff_block = _sa_block

        layer, inputs = Nothing(**SIZES, norm_first=True), tokens("tgt", "memory")
        layer.double()
        assert torch.equal(layer(**inputs), inputs["tgt"])

    def test_forward_with_what_torchs_has(self, package: Any) -> None:
        class Doubled(package.TransformerEncoderLayer):  # type: ignore[misc]
            def forward(self, *arguments: Any, **keywords: Any) -> Tensor:
                return 2 * super().forward(*arguments, **keywords)

        x = tokens("src")["src"]
        plain, doubled = package.TransformerEncoderLayer(**SIZES).double(), Doubled(**SIZES).double()
        doubled.load_state_dict(plain.state_dict())
        assert torch.equal(doubled.eval()(x), 2 * plain.eval()(x))


def test_the_decoder_layer_does_not_look_at_its_own_mode() -> None:
    """Only its parts do: a frozen part inside a model in training stays frozen."""
    layer = scratch.TransformerDecoderLayer(**SIZES).double().eval()
    inputs = tokens("tgt", "memory")
    expected = layer(**inputs)
    layer.training = True
    assert torch.equal(layer(**inputs), expected)


@pytest.mark.parametrize(
    ("activation", "function"),
    [("relu", torch.relu), ("gelu", F.gelu), (squared_relu, squared_relu)],
)
def test_activations_are_looked_up_by_name_or_taken_as_they_are(
    activation: Any, function: Callable[[Tensor], Tensor]
) -> None:
    x = random_tensor(7)
    assert torch.equal(activation_function(activation)(x), function(x))


class TestFastPath:
    """builtin's checks leave torch's fused path open; scratch has none and gives the same on what is not padding."""

    @staticmethod
    def layers() -> tuple[Any, Any, Tensor]:
        sizes = SIZES | {"d_model": 34, "nhead": 2, "batch_first": True}
        ours, theirs = scratch.TransformerEncoderLayer(**sizes), builtin.TransformerEncoderLayer(**sizes)
        with_same_weights(ours.eval(), theirs.eval())
        return ours, theirs, random_tensor(2, 7, 34)

    @pytest.mark.parametrize("masks", [{}, {"src_key_padding_mask": padding_with_holes(7)}], ids=["no mask", "padding"])
    def test_it_is_reached_in_eval_without_gradients(self, masks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, theirs, src = self.layers()
        fused = count_calls(monkeypatch, torch, "_transformer_encoder_layer_fwd")
        with torch.no_grad():
            expected = theirs(src, **masks)
        assert fused() == 1
        valid = ~masks.get("src_key_padding_mask", torch.zeros(2, 7, dtype=torch.bool))
        with torch.no_grad():
            assert_equal({"output": ours(src, **masks)[valid]}, {"output": expected[valid]})

    @pytest.mark.parametrize("reason", ["gradients", "training", "switched off"])
    def test_it_is_left_when_torch_leaves_it(self, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
        _, theirs, src = self.layers()
        fused = count_calls(monkeypatch, torch, "_transformer_encoder_layer_fwd")
        with torch.set_grad_enabled(reason == "gradients"), fast_path(reason != "switched off"):
            theirs.train(reason == "training")(src)
        assert fused() == 0

    def test_that_of_the_attention_is_reached_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        attention = builtin.MultiheadAttention(34, 2, batch_first=True).eval()
        fused = count_calls(monkeypatch, torch, "_native_multi_head_attention")
        x = torch.ones(2, 7, 34)
        with torch.no_grad():
            attention(x, x, x)
        assert fused() == 1
        attention(x, x, x)
        assert fused() == 1


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Callable[[], int]:
    """Let a function of torch run and count how often it does."""
    function, calls = getattr(owner, name), []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        return function(*arguments, **keywords)

    monkeypatch.setattr(owner, name, counted)
    return lambda: len(calls)
