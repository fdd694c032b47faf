"""The stacks and the Transformer: against torch.nn with the same weights, and what passes from one part to another."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import builtin
import scratch
from equivalence_tests.instruments.side_by_side import (
    PACKAGES,
    TORCH,
    assert_equal,
    fast_path,
    outputs_and_gradients,
    padding_with_holes,
    random_tensor,
    tokens,
    with_same_weights,
)
from equivalence_tests.instruments.weights import randomize_parameters
from scratch.transformer import is_causal_mask

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning"),
]

LAYER: dict[str, Any] = {"d_model": 33, "nhead": 3, "dim_feedforward": 13, "dropout": 0.3}
MODEL: dict[str, Any] = {**LAYER, "num_encoder_layers": 2, "num_decoder_layers": 3}
EVERYWHERE: dict[str, Any] = {**PACKAGES, "torch.nn": TORCH}
EACH_PACKAGE = pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)


def stack(package: Any, name: str, num_layers: int = 2, norm: bool = True, **options: Any) -> Any:
    """Build a stack whose layers differ from one another."""
    layer = getattr(package, f"{name}Layer")(**LAYER | options)
    return getattr(package, name)(layer, num_layers, nn.LayerNorm(33) if norm else None)


def padding_at_the_end() -> Tensor:
    hidden = torch.zeros(2, 7, dtype=torch.bool)
    hidden[0, 4:] = True
    return hidden


ENCODER_MASKS: list[dict[str, Any]] = [
    {},
    {"mask": torch.ones(7, 7, dtype=torch.bool).triu(1)},
    {"mask": random_tensor(7, 7, seed=5)},
    {"mask": random_tensor(6, 7, 7, seed=6) > 0.8, "src_key_padding_mask": padding_with_holes(7)},
    {"src_key_padding_mask": padding_at_the_end()},
]


class TestAgainstTorch:
    @pytest.mark.parametrize("norm", [True, False])
    @pytest.mark.parametrize("options", [{}, {"norm_first": True, "batch_first": True}, {"bias": False}], ids=str)
    def test_encoder(self, options: dict[str, Any], norm: bool) -> None:
        ours, theirs = (stack(package, "TransformerEncoder", norm=norm, **options) for package in (scratch, TORCH))
        with_same_weights(ours, theirs)
        inputs = tokens("src", batch_first=options.get("batch_first", False))
        for masks in ENCODER_MASKS:
            actual = outputs_and_gradients(ours, inputs, **masks)
            assert_equal(actual, outputs_and_gradients(theirs, inputs, **masks))

    @pytest.mark.parametrize("norm", [True, False])
    @pytest.mark.parametrize("options", [{}, {"norm_first": True, "batch_first": True}, {"bias": False}], ids=str)
    def test_decoder(self, options: dict[str, Any], norm: bool) -> None:
        ours, theirs = (stack(package, "TransformerDecoder", norm=norm, **options) for package in (scratch, TORCH))
        with_same_weights(ours, theirs)
        inputs = tokens("tgt", "memory", batch_first=options.get("batch_first", False))
        for masks in (
            {},
            {"tgt_mask": CAUSAL},
            {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)},
            {
                "tgt_mask": CAUSAL,
                "tgt_key_padding_mask": padding_with_holes(5),
                "memory_key_padding_mask": padding_with_holes(7),
            },
            {"tgt_mask": CAUSAL, "tgt_is_causal": False, "memory_mask": random_tensor(5, 7, seed=6)},
        ):
            actual = outputs_and_gradients(ours, inputs, **masks)
            assert_equal(actual, outputs_and_gradients(theirs, inputs, **masks))

    @pytest.mark.parametrize(
        "options",
        [{}, {"norm_first": True}, {"bias": False, "activation": "gelu"}, {"batch_first": True, "dropout": 0.0}],
        ids=str,
    )
    def test_transformer(self, options: dict[str, Any]) -> None:
        ours, theirs = scratch.Transformer(**MODEL | options), nn.Transformer(**MODEL | options)
        with_same_weights(ours, theirs)
        inputs = tokens("src", "tgt", batch_first=options.get("batch_first", False))
        for masks in (
            {},
            {"tgt_mask": CAUSAL, "src_mask": random_tensor(7, 7, seed=5) > 1},
            {
                "tgt_mask": CAUSAL,
                "tgt_is_causal": True,
                "src_key_padding_mask": padding_with_holes(7),
                "tgt_key_padding_mask": padding_with_holes(5),
                "memory_key_padding_mask": padding_with_holes(7),
            },
            {"memory_mask": torch.ones(5, 7, dtype=torch.bool).triu(1), "memory_is_causal": True},
        ):
            actual = outputs_and_gradients(ours, inputs, **masks)
            assert_equal(actual, outputs_and_gradients(theirs, inputs, **masks))

    def test_the_packages_models_hold_and_compute_what_torchs_do_from_one_seed(self) -> None:
        results = []
        for package in EVERYWHERE.values():
            torch.manual_seed(0)
            model = package.Transformer(**MODEL, dtype=torch.float64)
            results.append(outputs_and_gradients(model, tokens("src", "tgt"), tgt_mask=CAUSAL))
        assert_equal(results[0], results[2])
        assert_equal(results[1], results[2], relative_bound=0)


class Spy(nn.Module):
    """A layer of somebody's own, which notes how it is called."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.self_attn = scratch.MultiheadAttention(33, 3, batch_first=batch_first)

    def forward(self, x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        self.arguments, self.keywords = arguments, keywords
        return x


@EACH_PACKAGE
class TestProtocol:
    """What a stack hands to its layers, so that layers of somebody's own can stand in it."""

    @pytest.mark.parametrize(("given", "told"), [(None, True), (True, True), (False, False)])
    def test_encoder(self, package: Any, given: bool | None, told: bool) -> None:
        encoder = package.TransformerEncoder(Spy(), 2, enable_nested_tensor=False)
        mask = nn.Transformer.generate_square_subsequent_mask(7)
        encoder(torch.zeros(7, 2, 33), mask=mask, is_causal=given)
        for layer in encoder.layers:
            assert layer.arguments == ()
            assert sorted(layer.keywords) == ["is_causal", "src_key_padding_mask", "src_mask"]
            assert torch.equal(layer.keywords["src_mask"], mask)
            assert layer.keywords["src_key_padding_mask"] is None
            assert layer.keywords["is_causal"] is told

    def test_decoder(self, package: Any) -> None:
        decoder = package.TransformerDecoder(Spy(), 2)
        memory = torch.zeros(7, 2, 33)
        decoder(torch.zeros(5, 2, 33), memory, tgt_mask=CAUSAL, memory_key_padding_mask=padding_with_holes(7))
        for layer in decoder.layers:
            assert layer.arguments[0] is memory
            assert {name: x for name, x in layer.keywords.items() if isinstance(x, bool)} == {
                "tgt_is_causal": True,
                "memory_is_causal": False,
            }
            assert torch.equal(layer.keywords["memory_key_padding_mask"], padding_with_holes(7))
            assert "cache" not in layer.keywords

    def test_custom_stacks_of_a_transformer(self, package: Any) -> None:
        encoder, decoder = Spy(), Spy()
        model = package.Transformer(33, 3, custom_encoder=encoder, custom_decoder=decoder)
        assert model.encoder is encoder
        assert model.decoder is decoder
        src, tgt = torch.zeros(7, 2, 33), torch.zeros(5, 2, 33)
        model(src, tgt, tgt_mask=CAUSAL, src_is_causal=False, memory_key_padding_mask=padding_with_holes(7))
        assert encoder.keywords == {"mask": None, "src_key_padding_mask": None, "is_causal": False}
        assert decoder.arguments[0] is src
        assert sorted(decoder.keywords) == [
            "memory_is_causal",
            "memory_key_padding_mask",
            "memory_mask",
            "tgt_is_causal",
            "tgt_key_padding_mask",
            "tgt_mask",
        ]

    def test_layers_are_copies_that_start_alike_and_train_apart(self, package: Any) -> None:
        encoder = stack(package, "TransformerEncoder", num_layers=3).double()
        first, *others = encoder.layers
        for other in others:
            for x, y in zip(first.parameters(), other.parameters(), strict=True):
                assert torch.equal(x, y)
                assert x is not y
        encoder(**tokens("src")).sum().backward()
        assert not torch.equal(first.linear1.weight.grad, others[0].linear1.weight.grad)

    @pytest.mark.parametrize("side", ["Encoder", "Decoder"])
    def test_the_layer_that_was_given_is_not_among_them(self, package: Any, side: str) -> None:
        layer = getattr(package, f"Transformer{side}Layer")(12, 3, 5)
        stack_of_copies = getattr(package, f"Transformer{side}")(layer, num_layers=2)
        given = {id(x) for x in layer.parameters()}
        assert given.isdisjoint(id(x) for x in stack_of_copies.parameters())

    def test_what_surrounds_a_sample_does_not_reach_it(self, package: Any) -> None:
        model = randomize_parameters(package.Transformer(**MODEL).double()).eval()
        inputs = tokens("src", "tgt")
        alone = model(**{name: x[:, 1:] for name, x in inputs.items()}, tgt_mask=CAUSAL)
        assert_equal({"output": alone[:, 0]}, {"output": model(**inputs, tgt_mask=CAUSAL)[:, 1]})

    def test_padding_does_not_reach_what_is_none(self, package: Any) -> None:
        model = randomize_parameters(package.Transformer(**MODEL).double()).eval()
        inputs, hidden = tokens("src", "tgt"), padding_with_holes(7)
        masks = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
        before = model(**inputs, **masks)
        inputs["src"] = torch.where(hidden.T[..., None], 100.0, inputs["src"])
        assert_equal({"output": model(**inputs, **masks)}, {"output": before})


@pytest.mark.parametrize(
    ("mask", "said", "found"),
    [
        (None, None, False),
        (None, True, True),
        (CAUSAL, None, True),
        (CAUSAL, False, False),
        (~CAUSAL, None, False),
        (~CAUSAL, True, True),
        (torch.zeros(5, 5), None, False),
        (torch.zeros(5, 5).masked_fill(CAUSAL, -torch.inf), None, True),
        (torch.zeros(5, 5).masked_fill(CAUSAL, -1e9), None, False),
        (CAUSAL.expand(6, 5, 5), None, False),
        (torch.ones(7, 7, dtype=torch.bool).triu(1), None, False),
    ],
)
def test_a_causal_mask_is_found_out_unless_it_was_said(mask: Tensor | None, said: bool | None, found: bool) -> None:
    assert is_causal_mask(mask, said, 5) is found


class TestNestedTensors:
    """builtin leaves torch's conversion as it is; scratch computes every place."""

    @staticmethod
    def encoders() -> tuple[Any, Any, dict[str, Tensor]]:
        options = LAYER | {"d_model": 34, "nhead": 2, "batch_first": True}
        ours, theirs = (
            package.TransformerEncoder(package.TransformerEncoderLayer(**options), 2) for package in (scratch, builtin)
        )
        with_same_weights(ours.eval(), theirs.eval())
        return ours, theirs, {"src": random_tensor(2, 7, 34), "src_key_padding_mask": padding_at_the_end()}

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
    def test_padded_places_are_0_in_builtin_and_valid_places_agree(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, theirs, inputs = self.encoders()
        kinds = []
        forward = nn.TransformerEncoderLayer.forward

        def noting(self: nn.Module, src: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
            kinds.append(src.is_nested)
            return forward(self, src, *arguments, **keywords)  # type: ignore[arg-type]

        monkeypatch.setattr(nn.TransformerEncoderLayer, "forward", noting)
        with torch.no_grad():
            expected, actual = theirs(**inputs), ours(**inputs)
        assert kinds == [True, True]
        hidden = inputs["src_key_padding_mask"]
        assert not expected[hidden].any()
        assert actual[hidden].all()
        assert_equal({"output": actual[~hidden]}, {"output": expected[~hidden]})

    def test_off_the_fast_path_every_place_agrees(self) -> None:
        ours, theirs, inputs = self.encoders()
        with torch.no_grad(), fast_path(False):
            assert_equal({"output": ours(**inputs)}, {"output": theirs(**inputs)})

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
    def test_hooks_on_a_layer_see_what_torchs_would(self) -> None:
        """A hook keeps the layer off its fused path, inside which the attention meets nested tensors."""
        _, theirs, inputs = self.encoders()
        with torch.no_grad():
            expected = theirs(**inputs)
            theirs.layers[0].self_attn.register_forward_hook(lambda *_: None)
            assert_equal({"output": theirs(**inputs)}, {"output": expected})


class TestWarnings:
    def test_masks_of_one_kind_give_none(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for package in PACKAGES.values():
                layer = package.TransformerEncoderLayer(**LAYER)
                encoder = package.TransformerEncoder(layer, 1, enable_nested_tensor=False)
                mask = torch.zeros(7, 7, dtype=torch.bool)
                encoder(torch.zeros(7, 2, 33), mask=mask, src_key_padding_mask=padding_with_holes(7))
                stack(package, "TransformerDecoder")(
                    torch.zeros(5, 2, 33),
                    torch.zeros(7, 2, 33),
                    tgt_mask=CAUSAL,
                    tgt_key_padding_mask=padding_with_holes(5),
                    memory_key_padding_mask=padding_with_holes(7),
                )

    @EACH_PACKAGE
    def test_no_bias_is_told_of_in_torchs_words(self, package: Any) -> None:
        with pytest.warns(UserWarning, match=r"enable_nested_tensor is True.*self_attn was passed bias=False"):
            package.Transformer(**MODEL, bias=False, batch_first=True)
        with pytest.warns(UserWarning, match=r"encoder_layer\.self_attn was passed bias=False"):
            stack(package, "TransformerEncoder", bias=False, batch_first=True)

    def test_builtin_warns_as_torch_does_and_scratch_is_silent_where_nothing_is_amiss(self) -> None:
        with pytest.warns(UserWarning, match="batch_first was not True"):
            builtin.Transformer(**MODEL)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scratch.Transformer(**MODEL)

    @EACH_PACKAGE
    def test_mixed_masks_are_warned_of_by_torch_and_computed_alike(self, package: Any) -> None:
        inputs = {**tokens("src"), "mask": random_tensor(7, 7, seed=5), "src_key_padding_mask": padding_with_holes(7)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stack(package, "TransformerEncoder").double()(**inputs)
        told = [
            str(x.message) for x in caught if "Support for mismatched src_key_padding_mask and mask" in str(x.message)
        ]
        assert bool(told) == (package is builtin)


def test_the_transformer_does_not_look_at_its_own_mode() -> None:
    model = scratch.Transformer(**MODEL).double().eval()
    expected = model(**tokens("src", "tgt"))
    model.training = True
    assert torch.equal(model(**tokens("src", "tgt")), expected)
