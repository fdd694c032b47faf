"""Bad calls raise one clear error, the same text in both packages, of a type that torch.nn's users already catch."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_upper_left
from torch.nn.functional import scaled_dot_product_attention
from torch.torch_version import TorchVersion

from equivalence_tests.instruments.differences import compare_tensors
from equivalence_tests.instruments.error_cases import ACCEPTED_CASES, ERROR_CASES, AcceptedCase, ErrorCase, construct
from equivalence_tests.instruments.side_by_side import CLASSES, PACKAGES, TORCH
from scratch import validation

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning"),
]

# The encoder has done its work when the decoder's layers look at their masks.
NOT_ALL_CHECKED_AT_THE_DOOR = {"Transformer"}
NO_DROPOUT_IN_EVAL = "nothing is dropped in eval"
IN_TORCH = [case for case in ERROR_CASES if case.in_torch]
# Before 2.13 these take the process with them.
NO_KEY_HEADS = "torch divides by the number of heads, which is 0 here"
DEADLY = {
    "scaled_dot_product_attention:_no_grouped_heads": NO_KEY_HEADS,
    "scaled_dot_product_attention:_no_grouped_heads,_3-D": NO_KEY_HEADS,
    "scaled_dot_product_attention:_grouped_values_without_heads": NO_KEY_HEADS,
    "flex_attention:_value_nested": "it ends the process, seen with torch 2.11 on a machine with a GPU",
}


def survivable(cases: Iterable[ErrorCase | AcceptedCase]) -> list[Any]:
    return [pytest.param(case, marks=skip_if_deadly(str(case)) if str(case) in DEADLY else ()) for case in cases]


def skip_if_deadly(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(torch.__version__ < TorchVersion("2.13"), reason=f"before 2.13 {DEADLY[name]}")


def raised(package: Any, case: ErrorCase, train: bool = True) -> Exception | None:
    try:
        component = construct(package, case.component, case.build)
        if isinstance(component, nn.Module):
            component.train(train)
        if case.call is not None:
            component(**case.call)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("case", ERROR_CASES, ids=str)
def test_a_bad_call_raises_an_error_that_names_argument_expectation_and_finding(case: ErrorCase) -> None:
    """The same in both packages, in training and in eval."""
    for train in (True,) if case.train_only else (True, False):
        ours, theirs = (raised(package, case, train) for package in PACKAGES.values())
        assert isinstance(ours, case.error), repr(ours)
        assert [words for words in case.says if words not in str(ours)] == [], str(ours)
        assert (type(ours), str(ours)) == (type(theirs), str(theirs))


@pytest.mark.parametrize("case", [case for case in IN_TORCH if not case.torch_accepts and not case.torch_type], ids=str)
def test_the_error_is_an_instance_of_what_torch_raises(case: ErrorCase) -> None:
    expected = raised(TORCH, case)
    assert expected is not None, "torch.nn accepts this call: give the reason in torch_accepts"
    assert isinstance(raised(PACKAGES["scratch"], case), type(expected)), repr(expected)


@pytest.mark.parametrize("case", survivable(case for case in IN_TORCH if case.torch_accepts), ids=str)
def test_torch_still_accepts_what_the_packages_refuse_with_a_reason(case: ErrorCase) -> None:
    assert raised(TORCH, case) is None


@pytest.mark.parametrize("case", survivable(case for case in IN_TORCH if case.torch_type), ids=str)
def test_torch_still_raises_another_type_where_a_reason_says_so(case: ErrorCase) -> None:
    expected = raised(TORCH, case)
    assert expected is not None
    assert not isinstance(raised(PACKAGES["scratch"], case), type(expected))


@pytest.mark.parametrize("case", ERROR_CASES, ids=str)
def test_no_module_computes_before_it_checks(case: ErrorCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product of a bad call would be one of these."""

    def computed(*arguments: object, **keywords: object) -> Tensor:
        raise AssertionError("arithmetic began before the arguments were checked")

    monkeypatch.setattr(nn.functional, "linear", computed)
    monkeypatch.setattr(torch, "softmax", computed)
    if case.component not in NOT_ALL_CHECKED_AT_THE_DOOR:
        assert "arithmetic" not in str(raised(PACKAGES["scratch"], case))


def result(package: Any, case: AcceptedCase) -> tuple[Tensor | None, ...]:
    """Build with one seed, call with another, in float64."""
    torch.manual_seed(0)
    component = construct(package, case.component, case.build)
    if isinstance(component, nn.Module):
        component.double()
    torch.manual_seed(1)
    outputs = component(**{name: in_float64(x) for name, x in case.call.items()})
    return outputs if isinstance(outputs, tuple) else (outputs,)


def in_float64(x: Any) -> Any:
    return x.double() if type(x) is Tensor and x.dtype == torch.float32 else x


@pytest.mark.parametrize("case", survivable(ACCEPTED_CASES), ids=str)
def test_an_unusual_call_is_accepted_and_computed_as_torch_does(case: AcceptedCase) -> None:
    expected = result(PACKAGES["builtin"] if case.torch_rejects else TORCH, case)
    for package in PACKAGES.values():
        for actual, should in zip(result(package, case), expected, strict=True):
            if should is not None or actual is not None:
                comparison = compare_tensors(actual, should)
                assert comparison.passed, str(comparison)


@pytest.mark.parametrize("case", [case for case in ACCEPTED_CASES if case.torch_rejects], ids=str)
def test_torch_still_rejects_what_the_packages_accept_with_a_reason(case: AcceptedCase) -> None:
    with pytest.raises((RuntimeError, ValueError, TypeError, IndexError)):
        result(TORCH, case)


@pytest.mark.parametrize("case", [case for case in ERROR_CASES if case.train_only == NO_DROPOUT_IN_EVAL], ids=str)
def test_eval_takes_a_dropout_that_training_refuses(case: ErrorCase) -> None:
    assert raised(PACKAGES["scratch"], case, train=False) is None


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("batch_first", "layout"),
    [
        (True, r"\(batch, len, features\)"),
        (False, r"\(len, batch, features\), as batch_first=False reads it"),
    ],
)
def test_batches_that_differ_are_shown_in_the_layout_they_were_read_in(
    batch_first: bool, layout: str, package: str
) -> None:
    attention = PACKAGES[package].MultiheadAttention(33, 3, batch_first=batch_first)
    key = torch.zeros(7, 2, 33)
    with pytest.raises(ValueError, match=rf"read as {layout}$"):
        attention(torch.zeros(5, 3, 33), key, key)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("attn_mask", "text"),
    [
        (torch.ones(5, 7, dtype=torch.bool), r"Explicit attn_mask should not be set when is_causal=True\)$"),
        (causal_upper_left(5, 7), "CausalBias should not be used with causal=True$"),
    ],
    ids=["bool", "bias"],
)
def test_two_causal_masks_are_refused_in_torchs_words(attn_mask: Tensor, text: str, package: str) -> None:
    q, k = torch.zeros(5, 11), torch.zeros(7, 11)
    with pytest.raises(ValueError, match=text):
        PACKAGES[package].scaled_dot_product_attention(q, k, k, attn_mask, is_causal=True)


@pytest.mark.parametrize("package", PACKAGES)
def test_flex_attention_says_that_a_tensor_is_nested(package: str) -> None:
    case = next(case for case in ERROR_CASES if str(case) == "flex_attention:_value_nested")
    assert str(raised(PACKAGES[package], case)).endswith("got a nested tensor")


def test_cases_have_names_of_their_own() -> None:
    names = [str(case) for case in (*ERROR_CASES, *ACCEPTED_CASES)]
    assert len(set(names)) == len(names)


def takes_a_cache(component: str) -> bool:
    return "cache" in inspect.signature(getattr(PACKAGES["scratch"], component).forward).parameters


@pytest.mark.parametrize("size", ["qk_head_dim", "v_head_dim"])
@pytest.mark.parametrize("component", [name for name in CLASSES if not name.endswith("coder")])
def test_builtin_refuses_head_sizes_with_the_reason(component: str, size: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{size}=13 cannot be expressed by torch\.nn\.MultiheadAttention, whose heads"
    ):
        getattr(PACKAGES["builtin"], component)(33, 3, **{size: 13})


@pytest.mark.parametrize("size", ["qk_head_dim", "v_head_dim"])
def test_head_sizes_are_positive_and_one_of_them_alone_leaves_the_other_to_be_divided(size: str) -> None:
    attention = PACKAGES["scratch"].MultiheadAttention
    with pytest.raises(ValueError, match=f"{size} must be greater than 0, got {size}=0"):
        attention(33, 3, **{size: 0})
    with pytest.raises(ValueError, match="embed_dim must be divisible by num_heads"):
        attention(33, 5, **{size: 13})
    attention(33, 5, qk_head_dim=13, v_head_dim=13)


@pytest.mark.parametrize("width", ["kdim", "vdim"])
@pytest.mark.parametrize(
    ("component", "part", "argument"),
    [
        ("TransformerEncoderLayer", "self_attn", "src"),
        ("TransformerDecoderLayer", "self_attn", "tgt"),
        ("TransformerDecoderLayer", "multihead_attn", "memory"),
    ],
)
@pytest.mark.parametrize("package", PACKAGES)
def test_an_exchanged_attention_names_the_arguments_of_its_layer(
    package: str, component: str, part: str, argument: str, width: str
) -> None:
    case = next(case for case in ACCEPTED_CASES if case.component == component)
    layer = construct(PACKAGES[package], component, case.build)
    setattr(layer, part, PACKAGES[package].MultiheadAttention(33, 3, **{width: 13}))
    with pytest.raises(ValueError, match=rf"^{argument} must have {width} = 13 features"):
        layer(**case.call)


@pytest.mark.parametrize("component", [*filter(takes_a_cache, CLASSES)])
def test_builtin_refuses_a_cache_with_the_reason(component: str) -> None:
    case = next(case for case in ACCEPTED_CASES if case.component == component)
    module = construct(PACKAGES["builtin"], component, case.build)
    with pytest.raises(ValueError, match=r"cache cannot be used with torch\.nn: .*, or decode by recomputation$"):
        module(**case.call, cache=[])


def test_unknown_arguments_are_refused_and_not_swallowed() -> None:
    for package in PACKAGES.values():
        for case in (next(case for case in ACCEPTED_CASES if case.component == name) for name in CLASSES):
            with pytest.raises(TypeError, match="unexpected keyword argument"):
                construct(package, case.component, case.build)(**case.call, attn_maks=None)


def test_errors_are_caught_by_the_clauses_that_torchs_users_write() -> None:
    for error in (validation.ArgumentValueError, validation.ArgumentTypeError):
        assert issubclass(error, RuntimeError)
        assert issubclass(error, AssertionError)
    assert issubclass(validation.ArgumentValueError, ValueError)
    assert issubclass(validation.ArgumentTypeError, TypeError)


@pytest.mark.parametrize(
    "call",
    [
        lambda package, x: package.MultiheadAttention(12, 3)(x, None, x),
        lambda package, x: package.TransformerEncoder(package.TransformerEncoderLayer(12, 3), -1)(x),
        lambda package, x: package.RMSNorm(12)(x.long()),
        lambda package, x: (scaled_dot_product_attention if package is nn else package.scaled_dot_product_attention)(
            *[x.cfloat()] * 3
        ),
    ],
    ids=["no key", "a negative number of layers", "a norm of integers", "complex attention"],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_what_a_program_catches_of_torch_catches_ours(call: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises((AttributeError, IndexError, NotImplementedError)) as theirs:
        call(nn, torch.randn(5, 2, 12))
    for package in PACKAGES.values():
        with pytest.raises(theirs.type):
            call(package, torch.randn(5, 2, 12))
