"""Tiny models of transformers with random weights: ours give their logits, gradients and tokens."""

import copy
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.families import (
    BERT_ENCODER,
    GEMMA2,
    GPT2,
    GPT_OSS_ATTENTION,
    LLAMA,
    MISTRAL,
    QWEN3,
    DoesNotFitError,
    Family,
    Widened,
    from_theirs,
    into_theirs,
)
from equivalence_tests.families.decoders import rotary_scaling_of
from equivalence_tests.families.family import in_our_names
from equivalence_tests.instruments.differences import compare_errors, compare_tensors
from equivalence_tests.instruments.side_by_side import PACKAGES, assert_equal, random_tensor
from equivalence_tests.instruments.weights import randomize_parameters
from equivalence_tests.wild.torchvision_stand_in import make_importable
from scratch.decoding import Ending, greedy_decode, keep_likeliest
from scratch.rotary import rotary_frequencies

make_importable()
transformers = pytest.importorskip("transformers", reason="the extra wild is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # inside transformers
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

IDS = torch.tensor([[5, 3, 7, 4, 9, 8, 16], [4, 2, 12, 5, 3, 6, 2]])
# Every size its own, and no special tokens unless a test asks for them.
SIZES: dict[str, Any] = {
    "vocab_size": 17,
    "hidden_size": 12,
    "intermediate_size": 19,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 150.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}


@dataclass(frozen=True)
class Published:
    """A model of transformers.

    Args:
        family: What it belongs to.
        kind: What its classes are called.
        options: Of its configuration, beside the sizes.
    """

    family: Family
    kind: str
    options: dict[str, Any]

    def build(self, **more: Any) -> Any:
        """Build theirs in float64, frequencies included, with random weights."""
        config = getattr(transformers, f"{self.kind}Config")(**SIZES | self.options | more)
        config._attn_implementation = "eager"
        with Widened():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        return randomize_parameters(model).eval()


DECODERS = {
    "Llama": Published(LLAMA, "Llama", {"rope_theta": 500.0}),
    "Llama, tied, scaled": Published(LLAMA, "Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "Llama, linear": Published(LLAMA, "Llama", {"rope_parameters": LINEAR, "num_key_value_heads": 6}),
    "Mistral": Published(MISTRAL, "Mistral", {"sliding_window": 3}),
    "Qwen3": Published(QWEN3, "Qwen3", {"use_sliding_window": True, "sliding_window": 3, "layer_types": MIXED}),
    "Gemma 2": Published(
        GEMMA2,
        "Gemma2",
        {
            "sliding_window": 3,
            "layer_types": MIXED,
            "attn_logit_softcapping": 0.7,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 5,
        },
    ),
    "GPT-2": Published(
        GPT2, "GPT2", {"n_inner": 19, "n_positions": 23, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    ),
}
NO_GRADIENT = {("builtin", "Gemma 2")}  # torch's flex attention has none on the CPU


def gradients(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    """Go backward from random gradients."""
    model.zero_grad()
    output.backward(random_tensor(*output.shape, seed=2).to(output.dtype))
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def named(tensors: dict[str, Tensor]) -> dict[str, Tensor | None]:
    return {f"gradient of {name}": x for name, x in tensors.items()}


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("package", PACKAGES)
class TestLanguageModels:
    def test_logits_and_gradients_are_theirs_in_float64(self, package: str, name: str) -> None:
        published = DECODERS[name]
        theirs = published.build()
        ours = from_theirs(published.family, theirs, PACKAGES[package])
        with Widened():
            expected = theirs(IDS).logits
        trains = (package, name) not in NO_GRADIENT
        with torch.set_grad_enabled(trains):
            output = ours(IDS)
        assert_equal({"output": output}, {"output": expected})
        if trains:
            with Widened():
                wanted = in_our_names(published.family, gradients(theirs, expected), gradients=True)
            found = gradients(ours, output)
            assert len(found) == len(list(ours.parameters()))
            assert_equal(named(found), named(wanted))

    def test_weights_go_back_as_they_came(self, package: str, name: str) -> None:
        published = DECODERS[name]
        theirs = published.build()
        ours = from_theirs(published.family, theirs, PACKAGES[package])
        other = randomize_parameters(published.build(), seed=9)
        into_theirs(published.family, ours, other)
        pairs = zip(theirs.named_parameters(), other.named_parameters(), strict=True)
        # Gains that are kept as a difference lose what rounding 1 + x loses.
        assert all(torch.allclose(x, y, rtol=0, atol=1e-15) for (_, x), (_, y) in pairs)

    def test_the_same_tokens_are_generated(self, package: str, name: str) -> None:
        published = DECODERS[name]
        theirs = published.build()
        ours: Any = from_theirs(published.family, theirs, PACKAGES[package])
        with Widened():
            expected = theirs.generate(IDS, max_new_tokens=6, do_sample=False)[:, 7:]
        if hasattr(ours, "generate"):
            assert torch.equal(ours.generate(IDS, max_len=6), expected)
        else:
            with torch.no_grad():
                found = greedy_decode(lambda x: ours(x)[:, -1], IDS, Ending(max_len=6))
            assert torch.equal(found, expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_in_lower_precision_the_error_is_at_most_twice_theirs(
        self, package: str, name: str, dtype: torch.dtype
    ) -> None:
        published = DECODERS[name]
        model, ratios = published.build(), []
        # A few hundred logits have their greatest error by chance: the medians of five models are compared.
        for seed in range(5):
            theirs = copy.deepcopy(randomize_parameters(model, seed=seed)).to(dtype)
            ours = from_theirs(published.family, theirs, PACKAGES[package])
            with torch.no_grad():
                with Widened():
                    exact = copy.deepcopy(theirs).double()(IDS).logits
                ratios.append(compare_errors(ours(IDS), theirs(IDS).logits, exact))
        error, bound = (median(getattr(ratio, side) for ratio in ratios) for side in ("candidate_error", "bound"))
        assert error <= bound, "; ".join(map(str, ratios))


@pytest.mark.parametrize("package", PACKAGES)
class TestParts:
    @pytest.mark.parametrize("window", [None, 3])
    def test_the_attention_of_gpt_oss_with_its_sinks(self, package: str, window: int | None) -> None:
        from transformers.models.gpt_oss import modeling_gpt_oss as published

        config = transformers.GptOssConfig(
            **SIZES, sliding_window=3, layer_types=["sliding_attention" if window else "full_attention"] * 3,
            rope_parameters={**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        )  # fmt: skip
        config._attn_implementation = "eager"
        x = random_tensor(2, 7, 12)
        hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
        if window is not None:
            hidden |= torch.ones(7, 7, dtype=torch.bool).tril(-window)
        bias = torch.zeros(7, 7, dtype=torch.float64).masked_fill(hidden, -torch.inf)[None, None]
        with Widened():
            theirs = randomize_parameters(published.GptOssAttention(config, 0).double()).eval()
            positions = published.GptOssRotaryEmbedding(config)(x, torch.arange(7)[None])
            expected, _ = theirs(x, positions, bias)
        ours: Any = from_theirs(GPT_OSS_ATTENTION, theirs, PACKAGES[package])
        ours.window = window
        output = ours(x)
        assert_equal({"output": output}, {"output": expected})
        with Widened():
            wanted = in_our_names(GPT_OSS_ATTENTION, gradients(theirs, expected), gradients=True)
        assert_equal(named(gradients(ours, output)), named(wanted))

    def test_the_encoder_of_bert(self, package: str) -> None:
        from transformers.models.bert.modeling_bert import BertEncoder

        sizes = {name: x for name, x in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
        config = transformers.BertConfig(**sizes, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
        config._attn_implementation = "eager"
        theirs = randomize_parameters(BertEncoder(config).double()).eval()
        ours = from_theirs(BERT_ENCODER, theirs, PACKAGES[package])
        x, hidden = random_tensor(2, 7, 12), torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
        bias = torch.zeros(2, 1, 1, 7, dtype=torch.float64).masked_fill(hidden[:, None, None], -torch.inf)
        expected = theirs(x, attention_mask=bias).last_hidden_state
        output = ours(x, src_key_padding_mask=hidden)
        assert_equal({"output": output}, {"output": expected})
        wanted = in_our_names(BERT_ENCODER, gradients(theirs, expected), gradients=True)
        assert_equal(named(gradients(ours, output)), named(wanted))


class TestGenerating:
    def test_a_prompt_that_is_padded_on_the_left(self) -> None:
        theirs = DECODERS["Llama"].build(pad_token_id=0)
        ours: Any = from_theirs(LLAMA, theirs, PACKAGES["scratch"])
        ours.pad_id = 0
        ids = torch.tensor([[5, 3, 7, 4, 9], [0, 0, 12, 5, 3]])
        with Widened():
            expected = theirs.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=6, do_sample=False)[:, 5:]
        assert torch.equal(ours.generate(ids, max_len=6), expected)

    @pytest.mark.parametrize("top_k", [1, 3, 50])
    @pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9])
    def test_tokens_are_drawn_among_the_same(self, top_k: int, top_p: float) -> None:
        logits = random_tensor(5, 17)
        expected = transformers.TopKLogitsWarper(min(top_k, 17))(None, logits)
        expected = transformers.TopPLogitsWarper(top_p)(None, expected)
        assert torch.equal(keep_likeliest(logits, top_k, top_p), expected)


@pytest.mark.parametrize("rope", [LLAMA3, YARN, {**YARN, "truncate": False, "beta_fast": 8.0}, LINEAR], ids=str)
@pytest.mark.parametrize("head_dim", [10, 64])
def test_frequencies_are_theirs(rope: dict[str, Any], head_dim: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(**{**SIZES, "head_dim": head_dim}, rope_parameters=rope)
    scaling = rotary_scaling_of(config.rope_parameters)
    assert scaling is not None
    with Widened():
        expected, expected_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    frequencies, factor = scaling(head_dim, rope["rope_theta"])
    comparison = compare_tensors(frequencies, expected)
    assert comparison.passed, str(comparison)
    assert factor == pytest.approx(expected_factor)
    assert not torch.allclose(frequencies, rotary_frequencies(head_dim, rope["rope_theta"]))


class TestWhatDoesNotFit:
    @pytest.mark.parametrize(
        ("name", "options", "text"),
        [
            ("Llama", {"mlp_bias": True, "attention_bias": True}, "attention_bias=True (only False), mlp_bias=True"),
            ("Llama", {"hidden_act": "mish"}, "activation 'mish' does not fit"),
            ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}, "'dynamic'"),
            ("Mistral", {"attention_dropout": 0.1}, "Mistral with attention_dropout=0.1 (only 0.0) does not fit"),
            ("GPT-2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ],
    )
    def test_configurations_are_refused_by_name(self, name: str, options: dict[str, Any], text: str) -> None:
        theirs = DECODERS[name].build(**options)
        with pytest.raises(DoesNotFitError) as caught:
            from_theirs(DECODERS[name].family, theirs, PACKAGES["scratch"])
        assert text in str(caught.value)

    def test_weights_without_a_place_are_named_and_nothing_is_copied(self) -> None:
        theirs = DECODERS["Qwen3"].build()
        with pytest.raises(DoesNotFitError, match=r"layers\.0\.self_attn\.q_norm\.weight has no place"):
            from_theirs(LLAMA, theirs, PACKAGES["scratch"])
        theirs.extra = nn.Linear(2, 2)
        with pytest.raises(DoesNotFitError, match="no rule of Qwen3 says where to put extra"):
            from_theirs(QWEN3, theirs, PACKAGES["scratch"])

    def test_weights_that_are_missing_or_shaped_otherwise_are_named(self) -> None:
        small, wide = DECODERS["Llama"].build(), DECODERS["Llama"].build(intermediate_size=23)
        ours = from_theirs(LLAMA, small, PACKAGES["scratch"])
        before = copy.deepcopy(wide.state_dict())
        with pytest.raises(DoesNotFitError, match=r"mlp\.up_proj\.weight has shape \(19, 12\) instead of \(23, 12\)"):
            into_theirs(LLAMA, ours, wide)
        assert all(torch.equal(x, before[name]) for name, x in wide.state_dict().items())


def test_without_widening_theirs_is_right_to_single_precision_only() -> None:
    theirs = DECODERS["Llama"].build()
    with torch.no_grad():
        narrow = theirs(IDS).logits
        with Widened():
            wide = theirs(IDS).logits
    assert 1e-9 < float((narrow - wide).abs().max() / wide.abs().max()) < 1e-5
