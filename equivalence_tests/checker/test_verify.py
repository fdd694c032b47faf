"""verify on code that misbehaves, on torch's own classes, on parts, and from pytest."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import builtin
import scratch
from equivalence_tests import Adapter, first_divergence, parametrize_with_checks, randomize_parameters, verify
from equivalence_tests.checker.helpers_for_tests import saved
from equivalence_tests.checker.zoo.right import broken
from scratch import attention


class TestCodeThatMisbehaves:
    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("raise RuntimeError('at import')", "RuntimeError: at import"),
            ("def Mine(:", "SyntaxError"),
            ("Mine = 3", "neither a class, nor a function, nor a module"),
            ("Other = 3", "Mine"),
        ],
    )
    def test_what_cannot_be_imported_is_said(self, source: str, said: str, tmp_path: Path) -> None:
        report = verify(saved(tmp_path, source, "Mine"))
        assert report.exit_status == 2
        assert said in report.reason

    def test_the_global_state_is_put_back(self) -> None:
        class Careless(nn.MultiheadAttention):
            def forward(self, query: Any, key: Any, value: Any) -> Any:  # type: ignore[override]
                torch.manual_seed(5)
                torch.set_default_dtype(torch.float16)
                torch.set_default_device("meta")
                torch.set_grad_enabled(False)
                torch.use_deterministic_algorithms(True)
                print("noise")
                return super().forward(query, key, value)

        careless = Careless(12, 3)
        state = torch.get_rng_state()
        assert "check stopped: this code itself raises" in verify(careless).reason
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_default_dtype() == torch.float32
        assert torch.get_default_device() == torch.device("cpu")
        assert torch.is_grad_enabled()
        assert not torch.are_deterministic_algorithms_enabled()

    def test_an_instance_stays_as_it_was(self) -> None:
        module = nn.MultiheadAttention(12, 3, batch_first=True).train()
        randomize_parameters(module, seed=3)
        module.in_proj_weight.requires_grad_(False)
        before = {name: p.clone() for name, p in module.named_parameters()}
        assert verify(module).verdict == "equal"
        assert module.training
        assert not module.in_proj_weight.requires_grad
        assert not module._forward_pre_hooks
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, before[name])
            assert parameter.dtype == torch.float32
            assert parameter.grad is None


TORCH_S_OWN: dict[str, Callable[[], Any]] = {
    "F.scaled_dot_product_attention": lambda: F.scaled_dot_product_attention,
    "scratch.scaled_dot_product_attention": lambda: scratch.scaled_dot_product_attention,
    "nn.MultiheadAttention": lambda: nn.MultiheadAttention,
    "scratch.MultiheadAttention": lambda: scratch.MultiheadAttention,
    "builtin.MultiheadAttention": lambda: builtin.MultiheadAttention,
    "partial": lambda: functools.partial(nn.MultiheadAttention, batch_first=True),
    "nn.TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer,
    "nn.TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer,
    "nn.Transformer": lambda: nn.Transformer,
    "scratch.TransformerEncoderLayer": lambda: scratch.TransformerEncoderLayer,
    "scratch.TransformerDecoderLayer": lambda: scratch.TransformerDecoderLayer,
    "scratch.Transformer": lambda: scratch.Transformer,
    "scratch.PositionalEncoding": lambda: scratch.PositionalEncoding,
}


LONG = ("nn.Transformer", "scratch.Transformer", "scratch.TransformerDecoderLayer", "builtin.MultiheadAttention")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in LONG else ()) for name in TORCH_S_OWN]
)
def test_what_is_right_by_definition_is_equal(name: str) -> None:
    report = verify(TORCH_S_OWN[name]())
    not_run = {exercise.what.partition(" of ")[0] for exercise in report.not_exercised}
    conditions = re.compile(r"line \d+|\d+ more condition")  # such as that of the tiles
    named = {what for what in not_run if not conditions.match(what)}
    assert named <= {"cache", "is_causal=True", "scale"}, str(report)  # hints, and what torch has not
    assert report.verdict == ("partial" if not_run else "equal"), str(report)


class Block(nn.Module):
    """A pre-norm block with a feed-forward network of torch's containers, as vision models have it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop_path = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = self.joined(x, self.attn(y, y, y, need_weights=False)[0])
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def joined(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return x + self.drop_path(attended)


class Straight(Block):
    def joined(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return attended


class ThereAndBack(nn.Module):
    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.ReLU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class TestKinds:
    def test_a_block_of_torch_s_containers_is_not_blamed(self) -> None:
        assert verify(Block).verdict == "equal"

    def test_names_that_say_nothing_are_seen_through(self) -> None:
        report = verify(Straight)
        assert report.kind == "layers"
        assert report.mistakes == ("residual_missing",)
        assert verify(ThereAndBack).kind.replace("_", " ") == "feed forward"

    def test_a_mask_of_the_padding_beside_another_is_left_out(self) -> None:
        report = verify(nn.MultiheadAttention)
        assert report.conventions[0][:2] == ("arguments", "query, key, value, attn_mask: mask")

    def test_an_unknown_kind_is_refused(self) -> None:
        with pytest.raises(ValueError, match="kind"):
            verify(Block, kind="sandwich")

    def test_inputs_for_a_class_are_refused(self) -> None:
        (report,) = verify(Block, inputs=torch.ones(2, 5, 12))
        assert "is a class. Inputs are for an instance: name one, built as model = Block(...)." in report.reason


class TestDoors:
    def test_a_call_that_is_not_found_out_takes_an_adapter(self) -> None:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.MultiheadAttention(12, 3, batch_first=True)

            def forward(self, *, bundle: dict[str, Any]) -> Any:
                hidden = bundle["hidden"]
                return self.inner(bundle["a"], bundle["b"], bundle["c"], attn_mask=hidden.repeat_interleave(3, 0))[0]

        def call(module: Any, query: Any, key: Any, value: Any, may_attend: Any) -> Any:
            seen = query.new_ones(len(query), query.size(1), key.size(1)).bool() if may_attend is None else may_attend
            return module(bundle={"a": query, "b": key, "c": value, "hidden": ~seen})

        assert verify(Odd).verdict == "unchecked"
        report = verify(Odd, adapter=Adapter(build=Odd, call=call, num_heads=3, embed_dim=12))
        assert report.verdict == "equal", str(report)

    def test_an_expected_failure_needs_a_reason(self) -> None:
        with pytest.raises(ValueError, match="must give a reason for 'check_gradients'"):
            verify(nn.MultiheadAttention, intended={"check_gradients": " "})

    def test_first_divergence_names_the_path(self) -> None:
        right = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, 20), 2, enable_nested_tensor=False).double()
        wrong = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, 20), 2, enable_nested_tensor=False).double()
        wrong.load_state_dict(right.state_dict())
        inputs = (torch.randn(5, 2, 12, dtype=torch.float64),)
        assert first_divergence(wrong, right, inputs) is None
        wrong.layers[1].norm2.eps = 1e-2
        found = first_divergence(wrong, right, inputs)
        assert found is not None
        assert (found.path, found.direction) == ("layers.1.norm2", "forward")


@parametrize_with_checks([nn.MultiheadAttention, Block])
def test_checks_are_items(check: Callable[[], None]) -> None:
    check()


def test_items_fail_with_the_report_and_skip_with_the_reason() -> None:
    class NoScale(scratch.MultiheadAttention):
        def forward(
            self, query: Any, key: Any, value: Any, key_padding_mask: Any = None, *rest: Any, **more: Any
        ) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(attention, "score_scale", lambda _: 1.0)
                return super().forward(query, key, value, key_padding_mask, *rest, **more)

    class NoGradient(scratch.MultiheadAttention):
        def forward(self, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
            return super().forward(query.detach(), key, value, *rest, **more)

    reason = {"check_gradients": "because it is frozen"}
    mark: Any = parametrize_with_checks([NoScale, NoGradient], expected_failures=reason)
    mark = mark.mark
    items = dict(zip(mark.kwargs["ids"], mark.args[1], strict=True))
    with pytest.raises(AssertionError, match="returns torch's numbers"):
        items["NoScale-diagnosis"]()
    with pytest.raises(pytest.skip.Exception, match="because it is frozen"):
        items["NoGradient-check_gradients"]()


def test_an_attention_that_is_checked_as_a_layer_is_compared_in_one_call_alone(tmp_path: Path) -> None:
    report = verify(saved(tmp_path, broken("itself", ()), "Attention"), kind="layers")
    assert (report.verdict, [one.what for one in report.not_exercised]) == ("partial", ["other calls"]), str(report)
