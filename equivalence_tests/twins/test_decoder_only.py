"""The language model in both packages: equal, trained, cached as recomputed, and what it draws."""

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import builtin
import scratch
from equivalence_tests.instruments.differences import compare_errors
from equivalence_tests.instruments.side_by_side import PACKAGES, assert_equal, outputs_and_gradients, random_tensor
from equivalence_tests.instruments.weights import randomize_parameters
from scratch.decoding import Ending, Sampling, greedy_decode, keep_likeliest, sample_decode
from scratch.rotary import LinearScaling, YaRNScaling

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")

VOCABULARY, PAD, END = 17, 0, 1
SMALL: dict[str, Any] = {"d_model": 12, "nhead": 6, "num_layers": 3, "dim_feedforward": 19, "head_dim": 10}
# Ids of two rows, the second shorter and padded on the left, and with padding inside.
IDS = torch.tensor([[5, 3, 7, 4, 9, 8, 16], [0, 0, 12, 5, 0, 6, 2]])
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "Llama": {"num_key_heads": 2, "pairing": "halves", "rotary_base": 500.0},
    "Mistral": {"num_key_heads": 2, "window": 3},
    "Qwen": {"num_key_heads": 1, "qk_norm": True, "tie_weights": True, "bias": True},
    "Gemma, without the cap on scores": {
        "window": (None, 3, 2),
        "sandwich_norm": True,
        "logit_soft_cap": 2.0,
        "scale_embeddings": True,
        "activation": F.gelu,
        "scale": 0.3,
    },
    "gpt-oss": {"sinks": True, "window": (2, None, 2), "rotary_scaling": YaRNScaling(4.0, 16)},
    "padded": {"num_key_heads": 3, "pad_id": PAD, "end_id": END, "window": 4},
}


def build(package: Any, variant: dict[str, Any], **more: Any) -> Any:
    return randomize_parameters(package.DecoderOnlyTransformer(VOCABULARY, **SMALL, **variant, **more).double())


def layer_inputs() -> dict[str, Tensor]:
    return {"x": random_tensor(2, 7, 12)}


@pytest.mark.parametrize("name", VARIANTS)
class TestBothPackages:
    def test_logits_and_gradients_are_the_same(self, name: str) -> None:
        ours, theirs = (build(package, VARIANTS[name]) for package in PACKAGES.values())
        results = [outputs_and_gradients(model, {}, token_ids=IDS) for model in (ours, theirs)]
        assert len(results[0]) > 20
        assert_equal(results[0], results[1])

    def test_same_seed_gives_the_same_model(self, name: str) -> None:
        states = []
        for package in PACKAGES.values():
            torch.manual_seed(3)
            states.append(package.DecoderOnlyTransformer(VOCABULARY, **SMALL, **VARIANTS[name]).state_dict())
        assert list(states[0]) == list(states[1])
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])

    @pytest.mark.parametrize("package", PACKAGES)
    def test_cached_equals_recomputed(self, name: str, package: str) -> None:
        model = build(PACKAGES[package], VARIANTS[name])
        cache, parts = model.new_cache(), []
        with torch.no_grad():
            for length in (3, 4, 6, 7):
                parts.append(model(IDS[:, :length], cache=cache))
            assert_equal({"output": torch.cat(parts, dim=1)}, {"output": model(IDS)})

    def test_generated_tokens_are_those_of_recomputation_in_both(self, name: str) -> None:
        generated = []
        for package in PACKAGES.values():
            model = build(package, VARIANTS[name])

            def next_logits(token_ids: Tensor, model: Any = model) -> Tensor:
                logits: Tensor = model(token_ids)[:, -1]
                return logits

            with torch.no_grad():
                recomputed = greedy_decode(next_logits, IDS, Ending(9, model.end_id, model.pad_id))
            assert torch.equal(model.generate(IDS, max_len=9), recomputed)
            generated.append(recomputed)
        assert torch.equal(*generated)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_in_lower_precision_the_errors_are_those_of_torch(self, name: str, dtype: torch.dtype) -> None:
        models = [build(package, VARIANTS[name]).to(dtype) for package in PACKAGES.values()]
        with torch.no_grad():
            ours, theirs = (model(IDS) for model in models)
            ratio = compare_errors(ours, theirs, models[0].double()(IDS))
        assert ratio.passed, str(ratio)


GEMMA = {**VARIANTS["Gemma, without the cap on scores"], "soft_cap": 0.5}


class TestGemma:
    """Capped scores have no gradient in torch's flex attention on the CPU."""

    def test_logits_are_the_same(self) -> None:
        ours, theirs = (build(package, GEMMA) for package in PACKAGES.values())
        with torch.no_grad():
            assert_equal({"output": ours(IDS)}, {"output": theirs(IDS)})
        assert torch.equal(ours.generate(IDS, max_len=2), theirs.generate(IDS, max_len=2))

    def test_only_scratch_trains_on_the_cpu(self) -> None:
        ours, theirs = (build(package, GEMMA) for package in PACKAGES.values())
        ours(IDS).sum().backward()
        assert all(parameter.grad is not None for parameter in ours.parameters())
        with pytest.raises(ValueError, match="cannot be trained on the CPU with torch"):
            theirs(IDS)


@pytest.mark.parametrize(("optimizer", "bound"), [(torch.optim.SGD, 1e-12), (torch.optim.AdamW, 1e-10)])
def test_both_packages_train_alike(optimizer: Any, bound: float) -> None:
    models = [build(package, VARIANTS["Qwen"]) for package in PACKAGES.values()]
    for model in models:
        steps = optimizer(model.parameters(), lr=0.01)
        for _ in range(10):
            steps.zero_grad()
            F.cross_entropy(model(IDS[:, :-1]).flatten(0, 1), IDS[:, 1:].flatten()).backward()
            steps.step()
    ours, theirs = ({f"output {name}": x for name, x in model.named_parameters()} for model in models)
    assert_equal(ours, theirs, relative_bound=bound)


class TestParts:
    @pytest.mark.parametrize("activation", [F.silu, F.gelu, F.relu, torch.sigmoid])
    @pytest.mark.parametrize("bias", [True, False])
    def test_the_feed_forward_network_is_its_equation(self, activation: Any, bias: bool) -> None:
        modules = [package.SwiGLU(11, 13, activation, bias, dtype=torch.float64) for package in PACKAGES.values()]
        ours, theirs = (randomize_parameters(module) for module in modules)
        inputs = {"x": random_tensor(2, 5, 11)}
        results = [outputs_and_gradients(module, inputs) for module in (ours, theirs)]
        assert_equal(results[0], results[1])
        gate, up = ours.gate_proj(inputs["x"]), ours.up_proj(inputs["x"])
        assert_equal({"output": results[0]["output 0"]}, {"output": ours.down_proj(activation(gate) * up)})

    @pytest.mark.parametrize("sandwich_norm", [True, False])
    @pytest.mark.parametrize("is_causal", [True, False])
    def test_the_layer_is_its_equation(self, sandwich_norm: bool, is_causal: bool) -> None:
        arguments: dict[str, Any] = {"num_key_heads": 2, "sandwich_norm": sandwich_norm, "dtype": torch.float64}
        ours, theirs = (
            randomize_parameters(package.DecoderOnlyLayer(12, 6, 13, **arguments)) for package in PACKAGES.values()
        )
        assert all(isinstance(x, nn.Identity) != sandwich_norm for x in (ours.post_norm1, ours.post_norm2))
        may_attend = IDS[:, None, None] != PAD
        call: dict[str, Any] = {"may_attend": may_attend, "is_causal": is_causal}
        results = [outputs_and_gradients(layer, layer_inputs(), **call) for layer in (ours, theirs)]
        assert_equal(results[0], results[1])
        x = layer_inputs()["x"]
        x = x + ours.post_norm1(ours.self_attn(ours.norm1(x), **call))
        x = x + ours.post_norm2(ours.feed_forward(ours.norm2(x)))
        assert_equal({"output": results[0]["output 0"]}, {"output": x})

    @pytest.mark.parametrize("package", PACKAGES)
    def test_a_model_is_made_of_its_packages_own_parts(self, package: str) -> None:
        parts = PACKAGES[package]
        model = parts.DecoderOnlyTransformer(11, 12, 3, 2, 16, sandwich_norm=True, qk_norm=True)
        layer = model.layers[0]
        assert type(layer) is parts.DecoderOnlyLayer
        assert type(layer.self_attn) is parts.GroupedQueryAttention
        assert type(layer.self_attn.rotary) is parts.RotaryEmbedding
        assert type(layer.feed_forward) is parts.SwiGLU
        norms = (layer.norm1, layer.norm2, layer.post_norm1, layer.self_attn.q_norm, model.norm)
        assert {type(norm) for norm in norms} == {parts.RMSNorm}
        assert model.layers[1].self_attn.rotary is layer.self_attn.rotary

    def test_the_model_is_its_equation(self) -> None:
        model = build(scratch, {"scale_embeddings": True})
        x = model.embedding(IDS) * 12**0.5
        for layer in model.layers:
            x = layer(x)
        assert_equal({"output": model(IDS)}, {"output": F.linear(model.norm(x), model.projection.weight)})

    @pytest.mark.parametrize("tied", [True, False])
    def test_tied_weights_are_one_parameter(self, tied: bool) -> None:
        model = scratch.DecoderOnlyTransformer(11, 12, 3, 1, 16, tie_weights=tied)
        assert (model.projection.weight is model.embedding.weight) == tied

    def test_everything_is_where_it_is_asked_for_and_positions_are_scaled(self) -> None:
        scaling = LinearScaling(2.0)
        model: Any = scratch.DecoderOnlyTransformer(11, 12, 3, 1, 16, rotary_scaling=scaling, device="meta")
        assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))
        assert model.layers[0].self_attn.rotary.scaling is scaling

    @pytest.mark.parametrize(
        ("arguments", "std"),
        [({}, 1.0), ({"scale_embeddings": True}, 64**-0.5), ({"tie_weights": True}, 64**-0.5)],
        ids=str,
    )
    def test_embeddings_enter_with_the_variance_that_is_promised(self, arguments: dict[str, Any], std: float) -> None:
        torch.manual_seed(0)
        model = scratch.DecoderOnlyTransformer(999, 64, 4, 1, 16, **arguments)
        assert model.embedding.weight.std().item() == pytest.approx(std, rel=0.02)
        assert model.embedding_scale == (8.0 if arguments.get("scale_embeddings") else 1.0)

    def test_a_cap_keeps_logits_within(self) -> None:
        model = build(scratch, {"logit_soft_cap": 0.25})
        plain = build(scratch, {})
        assert_equal({"output": model(IDS)}, {"output": 0.25 * (plain(IDS) / 0.25).tanh()})


class TestMeaning:
    @given(seed=st.integers(0, 999), changed=st.integers(1, 6))
    def test_no_token_sees_a_later_one(self, seed: int, changed: int) -> None:
        model = build(scratch, VARIANTS["Llama"])
        ids = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(seed))
        other = ids.clone()
        other[:, changed] = (ids[:, changed] + 1) % VOCABULARY
        before, after = model(ids), model(other)
        assert torch.equal(before[:, :changed], after[:, :changed])
        assert not torch.equal(before[:, changed:], after[:, changed:])

    @pytest.mark.parametrize("package", PACKAGES)
    def test_padding_on_the_left_changes_nothing(self, package: str) -> None:
        model = build(PACKAGES[package], {**VARIANTS["padded"], "pairing": "halves"})
        row = torch.tensor([[5, 3, 7, 4]])
        padded = F.pad(row, (3, 0), value=PAD)
        assert_equal({"output": model(padded)[:, 3:]}, {"output": model(row)})
        assert torch.equal(model.generate(padded, max_len=5), model.generate(row, max_len=5))

    def test_windows_reach_through_layers(self) -> None:
        """With a window of 2 in each of 3 layers a token sees 3 places back, and no further."""
        model = build(scratch, {"window": 2})
        other = IDS.clone()
        other[:, 0] += 1
        differs = (model(IDS) != model(other)).any(dim=2).any(dim=0)
        assert differs.tolist() == [True] * 4 + [False] * 3

    def test_a_rolling_cache_stops_growing(self) -> None:
        model = build(scratch, {"window": (3, None, 2)})
        cache = model.new_cache()
        with torch.no_grad():
            for length in range(1, 8):
                model(IDS[:, :length], cache=cache)
        assert [layer.extend(*random_tensor(2, 2, 6, 1, 10))[0].size(2) for layer in cache] == [3, 8, 2]


class TestGenerate:
    @pytest.mark.parametrize("package", PACKAGES)
    def test_rows_end_and_are_filled_up(self, package: str) -> None:
        torch.manual_seed(0)
        model = PACKAGES[package].DecoderOnlyTransformer(4, 12, 3, 1, 16, pad_id=PAD, end_id=END)
        prompts = torch.randint(2, 4, (23, 3))
        generated = model.generate(prompts, 9, temperature=1.0, generator=torch.Generator().manual_seed(1))
        for row in generated.tolist():
            if END in row:
                assert set(row[row.index(END) + 1 :]) <= {PAD}
            assert PAD not in (row[: row.index(END)] if END in row else row)
        assert any(END in row[:-1] for row in generated.tolist())

    @pytest.mark.parametrize("package", PACKAGES)
    def test_a_generator_decides_what_is_drawn(self, package: str) -> None:
        model = build(PACKAGES[package], VARIANTS["Llama"])
        draws = [
            model.generate(IDS, 9, temperature=2.0, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
        ]
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])
        torch.manual_seed(3)
        assert torch.equal(model.generate(IDS, 9, temperature=2.0), draws[0])

    def test_both_packages_draw_the_same(self) -> None:
        options: dict[str, Any] = {"temperature": 1.5, "top_k": 9, "top_p": 0.9}
        ours, theirs = (
            build(package, VARIANTS["gpt-oss"]).generate(IDS, 9, generator=torch.Generator().manual_seed(5), **options)
            for package in PACKAGES.values()
        )
        assert torch.equal(ours, theirs)

    def test_one_likeliest_token_or_almost_no_temperature_is_greedy(self) -> None:
        model = build(scratch, VARIANTS["Llama"])
        greedy = model.generate(IDS, 9)
        for options in ({"temperature": 5.0, "top_k": 1}, {"temperature": 5.0, "top_p": 1e-9}, {"temperature": 1e-4}):
            assert torch.equal(model.generate(IDS, 9, **options), greedy)

    @pytest.mark.parametrize("temperature", [1.0, 2.0])
    def test_tokens_are_drawn_as_often_as_they_are_likely(self, temperature: float) -> None:
        logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
        generator = torch.Generator().manual_seed(0)
        sampling = Sampling(temperature, generator=generator) if temperature != 1 else Sampling(generator=generator)
        drawn = sample_decode(lambda _: logits, torch.tensor([[0]]), Ending(4000, pad_id=3), sampling)
        expected = (logits[0, :3] / temperature).softmax(dim=0)
        counted = drawn.flatten().bincount(minlength=4) / 4000
        assert counted[3] == 0
        assert (counted[:3] - expected).abs().max() < 0.03  # four standard deviations

    def test_half_precision_is_drawn_from_in_float32(self) -> None:
        logits = random_tensor(500, 100, seed=3, dtype=torch.bfloat16)
        ours, expected = (
            Sampling(0.7, generator=torch.Generator().manual_seed(0)).draw(x) for x in (logits, logits.float())
        )
        assert torch.equal(ours, expected)


class TestKeepLikeliest:
    @given(
        logits=st.lists(st.floats(-4, 4), min_size=1, max_size=9),
        top_k=st.one_of(st.none(), st.integers(1, 12)),
        top_p=st.one_of(st.none(), st.floats(0.01, 1.0)),
    )
    def test_it_keeps_what_the_words_say(self, logits: list[float], top_k: int | None, top_p: float | None) -> None:
        x = torch.tensor(logits, dtype=torch.float64)
        kept = keep_likeliest(x, top_k, top_p) > -math.inf
        candidates = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
        if top_k is not None:
            candidates = [i for i in candidates if logits[i] >= logits[candidates[min(top_k, len(logits)) - 1]]]
        if top_p is not None:
            likely = [math.exp(logits[i]) for i in candidates]
            before = [sum(likely[:n]) / sum(likely) for n in range(len(likely))]
            if any(abs(share - top_p) < 1e-9 for share in before):
                return  # rounding decides
            candidates = [i for n, i in enumerate(candidates) if n == 0 or before[n] < top_p]
        assert kept.nonzero().flatten().tolist() == sorted(candidates)
        assert torch.equal(keep_likeliest(x, top_k, top_p)[kept], x[kept])

    def test_of_equally_likely_tokens_the_first_are_kept(self) -> None:
        kept = keep_likeliest(torch.zeros(64), top_p=0.5) == 0
        assert torch.equal(kept, torch.arange(64) < 32)

    def test_rows_are_cut_each_by_itself(self) -> None:
        logits = random_tensor(3, 5, 7)
        cut = keep_likeliest(logits, top_k=4, top_p=0.7)
        for i in range(3):
            assert torch.equal(cut[i, 2], keep_likeliest(logits[i, 2], top_k=4, top_p=0.7))


@pytest.mark.parametrize("package", PACKAGES)
class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"vocab_size": 0}, ValueError, "vocab_size must be greater than 0, got vocab_size=0"),
            ({"num_layers": 0}, ValueError, "num_layers must be greater than 0"),
            ({"num_layers": 2.0}, TypeError, "num_layers must be a whole number, got 2.0"),
            ({"d_model": 13}, ValueError, "embed_dim must be divisible by num_heads unless head_dim is given"),
            ({"num_key_heads": 2}, ValueError, "divisible by num_key_heads, got num_heads=3 and num_key_heads=2"),
            ({"d_model": 15}, ValueError, "head_dim must be even and at least 2 (features turn in pairs), got 5"),
            ({"dim_feedforward": 0}, ValueError, "dim_feedforward must be greater than 0"),
            ({"activation": "silu"}, TypeError, "activation must be a function, got str"),
            ({"pad_id": 2.5}, TypeError, "pad_id must be a whole number, got 2.5"),
            ({"pad_id": 11}, ValueError, "pad_id must be in 0 ... vocab_size - 1 = 10, got 11"),
            ({"end_id": -1, "pad_id": 0}, ValueError, "end_id must be in 0 ... vocab_size - 1 = 10, got -1"),
            ({"end_id": 3}, ValueError, "pad_id must be given where end_id is, to fill up rows that end, got end_id=3"),
            ({"end_id": 3, "pad_id": 3}, ValueError, "end_id must differ from pad_id"),
            ({"window": (2, None, 3)}, ValueError, "window must be one for all or one for each of 2 layers"),
            ({"window": 0}, ValueError, "window must be at least 1"),
            ({"logit_soft_cap": -1.0}, ValueError, "logit_soft_cap must be greater than 0 and finite, got -1.0"),
            ({"pairing": "both"}, ValueError, "pairing must be one of 'adjacent', 'halves', got 'both'"),
        ],
    )
    def test_of_building(self, package: str, arguments: Any, error: type[Exception], text: str) -> None:
        usual: dict[str, Any] = {"vocab_size": 11, "d_model": 12, "nhead": 3, "num_layers": 2, "dim_feedforward": 16}
        with pytest.raises(error) as caught:
            PACKAGES[package].DecoderOnlyTransformer(**usual | arguments)
        assert text in str(caught.value)

    @pytest.mark.parametrize(
        ("call", "error", "text"),
        [
            ({"token_ids": IDS.double()}, TypeError, "token_ids must hold token ids as int64 or int32"),
            ({"token_ids": IDS[0]}, ValueError, "token_ids must have shape (batch, len), got 1-D of shape (7,)"),
            ({"token_ids": IDS[:, :0]}, ValueError, "token_ids must hold at least one row and one token in each"),
            ({"cache": []}, ValueError, "cache must have one entry for each of 1 layers, got 0"),
            ({"cache": True}, TypeError, "cache must be a list with one entry for each layer, got bool"),
        ],
    )
    def test_of_calling(self, package: str, call: Any, error: type[Exception], text: str) -> None:
        model = PACKAGES[package].DecoderOnlyTransformer(17, 12, 3, 1, 16)
        with pytest.raises(error) as caught:
            model(**{"token_ids": IDS, **call})
        assert text in str(caught.value)

    def test_of_a_text_without_new_tokens(self, package: str) -> None:
        model = PACKAGES[package].DecoderOnlyTransformer(17, 12, 3, 1, 16)
        cache = model.new_cache()
        model(IDS, cache=cache)
        with pytest.raises(ValueError, match="token_ids must hold the whole text so far, the 7 tokens of the cache"):
            model(IDS, cache=cache)

    @pytest.mark.parametrize(
        ("call", "text"),
        [
            ({"max_len": 0}, "max_len must be greater than 0"),
            ({"temperature": -1.0}, "temperature must be at least 0 (the likeliest token) and finite, got -1.0"),
            ({"temperature": math.nan}, "temperature must be at least 0 (the likeliest token) and finite, got nan"),
            ({"temperature": 1.0, "top_k": 0}, "top_k must be greater than 0, got top_k=0"),
            ({"temperature": 1.0, "top_p": 0.0}, "top_p must be greater than 0 and at most 1, got 0.0"),
            ({"temperature": 1.0, "top_p": 1.5}, "top_p must be greater than 0 and at most 1, got 1.5"),
            ({"top_k": 3}, "top_k and top_p need a temperature greater than 0"),
            ({"top_p": 0.5}, "top_k and top_p need a temperature greater than 0"),
            ({"temperature": None}, "temperature must be a number, got None"),
            ({"temperature": 1.0, "top_p": "0.9"}, "top_p must be a number, got '0.9'"),
            ({"prompt_ids": IDS + 1}, "prompt_ids must hold ids in 0 ... vocab_size - 1 = 16, got 17 at [0, 6]"),
            ({"prompt_ids": IDS.double()}, "prompt_ids must hold token ids as int64 or int32, got torch.float64"),
            ({"prompt_ids": IDS.flip(1)[:, :6]}, "got a row that ends with pad_id = 0: row 1"),
        ],
    )
    def test_of_generating(self, package: str, call: Any, text: str) -> None:
        model = PACKAGES[package].DecoderOnlyTransformer(17, 12, 3, 1, 16, pad_id=PAD, end_id=END)
        with pytest.raises((ValueError, TypeError)) as caught:
            model.generate(**{"prompt_ids": IDS, **call})
        assert text in str(caught.value)

    def test_of_parts(self, package: str) -> None:
        parts = PACKAGES[package]
        with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., d_model\) with d_model = 12, got \(2, 11\)"):
            parts.SwiGLU(12, 16)(torch.ones(2, 11))
        with pytest.raises(ValueError, match=r"embed_dim = 12, got \(2, 5, 11\)"):
            parts.DecoderOnlyLayer(12, 3, 16)(torch.ones(2, 5, 11))
        with pytest.raises(ValueError, match="top_k must be greater than 0, got top_k=0"):
            Sampling(top_k=0)


DEFAULTS = {
    "d_model": 512,
    "nhead": 8,
    "num_layers": 6,
    "dim_feedforward": 2048,
    "norm_eps": 1e-6,
    "bias": False,
    "qk_norm": False,
    "sinks": False,
    "sandwich_norm": False,
    "rotary_base": 10000.0,
    "pairing": "adjacent",
    "scale_embeddings": False,
    "tie_weights": False,
}


@pytest.mark.parametrize("part", ["SwiGLU", "DecoderOnlyLayer", "DecoderOnlyTransformer"])
def test_defaults_are_those_of_the_transformer_and_nothing_of_one_model_alone(part: str) -> None:
    given = inspect.signature(getattr(scratch, part)).parameters
    found = {name: x.default for name, x in given.items() if isinstance(x.default, bool | int | float | str)}
    assert found == {name: x for name, x in DEFAULTS.items() if name in found}


def test_a_text_goes_on_for_64_tokens_by_default() -> None:
    assert inspect.signature(scratch.DecoderOnlyTransformer.generate).parameters["max_len"].default == 64


def test_the_model_is_in_both_packages() -> None:
    assert builtin.DecoderOnlyTransformer.__module__ == "builtin.decoder_only"
    assert scratch.DecoderOnlyTransformer.__module__ == "scratch.decoder_only"


@pytest.mark.parametrize("package", [scratch, builtin])
def test_a_feed_forward_of_no_width_is_refused(package: Any) -> None:
    with pytest.raises(ValueError, match="d_model must be greater than 0, got d_model=0"):
        package.SwiGLU(0, 3)


@pytest.mark.parametrize("package", [scratch, builtin])
def test_generating_records_nothing_for_a_backward_pass(package: Any) -> None:
    model = build(package, {})
    recorded: list[bool] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: recorded.append(torch.is_grad_enabled()))
    assert not model.generate(IDS[:1, :3], 5).is_inference()  # or it could not be changed in place
    assert recorded
    assert not any(recorded)
