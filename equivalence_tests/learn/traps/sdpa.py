"""F.scaled_dot_product_attention: axes, alignment, scale, dropout, and what its CPU kernel leaves out."""

import math
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.traps.entry import Severity, Trap
from equivalence_tests.learn.traps.operations import operations
from scratch import functional, masks, sdpa, validation
from scratch.validation import sdpa as sdpa_doors

__all__ = ["TRAPS"]


class SdpaTopLeft(Trap):
    """is_causal=True aligns upper left: a lone last query sees one key."""

    number = 26
    name = "sdpa_top_left"
    severity = Severity.WRONG_NUMBERS
    concerns = ("scaled_dot_product_attention.is_causal",)
    expects = "With 2 queries and 4 keys, the queries are the last two tokens, as in decoding with a cache."
    happens = "They are taken for the first two, and the later keys are never seen."
    why = (
        "Query i may look at keys 0 to i, counted from the start of both. A square mask cannot tell the two "
        "conventions apart."
    )
    places = (Place(masks.causal, "offset ="), Place(masks.causal, "tril(offset)"))
    instead = "Pass causal_lower_right(query_len, key_len) as attn_mask. A single new token needs no mask at all."
    issues = ("pytorch/pytorch#108108", "pytorch/pytorch#103082")
    since = "2.0"

    def wrong(self) -> Tensor:
        query, key = torch.zeros(2, 8), torch.randn(4, 8)  # all scores are 0
        value = torch.eye(4)  # the output is the weights
        weights = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        print(weights)
        return weights

    def right(self) -> Tensor:
        query, key = torch.zeros(2, 8), torch.randn(4, 8)  # all scores are 0
        value = torch.eye(4)  # the output is the weights
        causal = causal_lower_right(2, 4)
        weights = F.scaled_dot_product_attention(query, key, value, causal)
        print(weights)
        return weights

    def holds(self, wrong: Tensor) -> bool:
        return bool((wrong[:, 2:] == 0).all())

    def helps(self, right: Tensor) -> bool:
        return bool((right > 0).equal(masks.causal(2, 4, align="lower_right")))


class SdpaDropoutInEval(Trap):
    """dropout_p drops in evaluation too."""

    number = 30
    name = "sdpa_dropout_in_eval"
    severity = Severity.WRONG_NUMBERS
    concerns = ("scaled_dot_product_attention.dropout_p",)
    expects = "After eval(), nothing is dropped."
    happens = "Two calls in eval mode differ."
    why = "The function sees a number, not a mode. The modules pass 0.0 outside of training."
    places = (Place(functional.attention, "F.dropout"),)
    instead = "dropout_p=self.dropout if self.training else 0.0"
    issues = ("pytorch/pytorch#124464",)
    since = "2.0"

    def wrong(self) -> float:
        class Attention(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

        attention, x = Attention().eval(), torch.randn(2, 3, 5, 8)
        difference = (attention(x) - attention(x)).abs().max().item()
        print(f"greatest difference of two calls: {difference:.2g}")
        return difference

    def right(self) -> float:
        class Attention(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                dropout_p = 0.1 if self.training else 0.0
                return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout_p)

        attention, x = Attention().eval(), torch.randn(2, 3, 5, 8)
        difference = (attention(x) - attention(x)).abs().max().item()
        print(f"greatest difference of two calls: {difference:.2g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong > 0.01

    def helps(self, right: float) -> bool:
        return right == 0


class SdpaMaskAndCausal(Trap):
    """A mask together with is_causal=True: the CPU kernel applies both, silently."""

    number = 31
    name = "sdpa_mask_and_causal"
    severity = Severity.WRONG_NUMBERS
    concerns = ("scaled_dot_product_attention.is_causal", "scaled_dot_product_attention.attn_mask")
    expects = "The error that the documentation promises, whatever the shape."
    happens = "With four axes on CPU there is no error, and both masks apply at once. With three axes: the error."
    why = (
        "Four axes without dropout go to the fused CPU kernel, which does not check. Three axes go to the plain "
        "one, which does. The hand-written version checks before choosing a path."
    )
    places = (Place(validation.check_scaled_dot_product_attention, "Explicit attn_mask"),)
    instead = "Combine the two masks yourself, and leave is_causal off."
    mended_in = "2.14"

    def wrong(self) -> tuple[float, str]:
        x = torch.randn(1, 2, 4, 8)
        may_look = torch.tensor([[True, True, False, True]] * 4)
        output = F.scaled_dot_product_attention(x, x, x, may_look, is_causal=True)
        both = F.scaled_dot_product_attention(x, x, x, may_look.tril())
        difference = (output - both).abs().max().item()
        print(f"four axes, difference from both masks at once: {difference:.2g}")
        try:
            F.scaled_dot_product_attention(x[0], x[0], x[0], may_look, is_causal=True)
            message = ""
        except RuntimeError as error:
            message = str(error)
        print("three axes:", message)
        return difference, message

    def right(self) -> tuple[float, str]:
        x = torch.randn(1, 2, 4, 8)
        may_look = torch.tensor([[True, True, False, True]] * 4)
        output = F.scaled_dot_product_attention(x, x, x, may_look.tril())
        same = F.scaled_dot_product_attention(x[0], x[0], x[0], may_look.tril())
        difference = (output[0] - same).abs().max().item()
        print(f"difference between four axes and three: {difference:.2g}")
        return difference, ""

    def holds(self, wrong: tuple[float, str]) -> bool:
        difference, message = wrong
        return difference < 1e-5 and "Explicit attn_mask should not be set" in message

    def helps(self, right: tuple[float, str]) -> bool:
        return right[0] < 1e-5 and not right[1]


class SdpaLengthsUnchecked(Trap):
    """With fewer values than keys, the CPU kernel silently ignores keys."""

    number = 32
    name = "sdpa_lengths_unchecked"
    severity = Severity.WRONG_NUMBERS
    concerns = ("scaled_dot_product_attention.key", "scaled_dot_product_attention.value")
    expects = "An error: every key needs its value."
    happens = (
        "The output is that of the first four keys. With more values than keys it is worse: the kernel reads past "
        "the end of the keys, and what it finds there is arbitrary."
    )
    why = (
        "The fused CPU kernel takes the number of keys from the values and never compares the two. The hand-written "
        "version compares them first."
    )
    places = (Place(sdpa_doors.check_head_dim_and_key_len, "if value.size(-2) != key.size(-2)"),)
    instead = "Check it yourself, or call scratch's function, which does."
    issues = ("pytorch/pytorch#193728",)

    def wrong(self) -> str:
        query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
        value = torch.randn(1, 2, 4, 8)
        output = F.scaled_dot_product_attention(query, key, value)
        expected = F.scaled_dot_product_attention(query, key[:, :, :4], value)
        difference = (output - expected).abs().max().item()
        print(f"difference from the first four keys: {difference:.2g}")
        return "the first four keys" if difference < 1e-5 else "something else"

    def right(self) -> str:
        query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
        value = torch.randn(1, 2, 4, 8)
        try:
            sdpa.scaled_dot_product_attention(query, key, value)
            message = ""
        except ValueError as error:
            message = str(error)
        print(message)
        return message

    def holds(self, wrong: str) -> bool:
        return wrong == "the first four keys"

    def helps(self, right: str) -> bool:
        return "value must have the key_len of key, 7, got 4" in right


class SdpaHeadsBeforeLength(Trap):
    """Heads come before tokens; otherwise heads attend to heads."""

    number = 46
    name = "sdpa_heads_before_length"
    severity = Severity.WRONG_NUMBERS
    concerns = (
        "scaled_dot_product_attention.query",
        "scaled_dot_product_attention.key",
        "scaled_dot_product_attention.value",
    )
    expects = "Tokens look at tokens: the first token's output changes when the last token does."
    happens = (
        "It does not change. Within each token the heads look at one another, and no token sees another. Nothing "
        "complains."
    )
    why = (
        "Attention runs over the second-to-last axis, and every axis before it counts as a sample. The kernels of "
        "the flash-attn package take (batch, len, heads, head_dim); this function takes (batch, heads, len, "
        "head_dim)."
    )
    places = (Place(functional.attention, "scores + score_bias"), Place(functional.attention, "context = weights @ v"))
    instead = "Transpose before and after."
    issues = ("pytorch/pytorch#152257", "NVlabs/FoundationStereo#217")

    def wrong(self) -> float:
        x = torch.randn(1, 4, 2, 3)  # (batch, len, heads, head_dim)
        before = F.scaled_dot_product_attention(x, x, x)
        x[:, -1] = 0.0  # another last token
        after = F.scaled_dot_product_attention(x, x, x)
        change = (after - before)[:, 0].abs().max().item()
        print(f"change of the first token's output: {change:.2g}")
        return change

    def right(self) -> float:
        x = torch.randn(1, 4, 2, 3)  # (batch, len, heads, head_dim)
        q = x.transpose(1, 2)  # (batch, heads, len, head_dim)
        before = F.scaled_dot_product_attention(q, q, q).transpose(1, 2)
        x[:, -1] = 0.0  # another last token, in q too
        after = F.scaled_dot_product_attention(q, q, q).transpose(1, 2)
        change = (after - before)[:, 0].abs().max().item()
        print(f"change of the first token's output: {change:.2g}")
        return change

    def holds(self, wrong: float) -> bool:
        return wrong == 0

    def helps(self, right: float) -> bool:
        return right > 0.01


class SdpaPaddingMaskAxes(Trap):
    """A padding mask (batch, key_len) is read as (query_len, key_len)."""

    number = 47
    name = "sdpa_padding_mask_axes"
    severity = Severity.WRONG_NUMBERS
    concerns = ("scaled_dot_product_attention.attn_mask",)
    expects = "Row i of the mask is for sample i, as in the modules' key_padding_mask."
    happens = (
        "Sample 1 has one real token, and its queries look at others: row i of the mask went to query i of every "
        "sample. Nothing complains here because there are as many tokens as samples. With other sizes it is an "
        "error about a shape, and with a single sample it is right."
    )
    why = (
        "The mask is broadcast against the scores from the right, and the last two axes of the scores are query and "
        "key."
    )
    places = (Place(functional.attention, "scores + score_bias"),)
    instead = "Give the mask axes for heads and queries: is_real[:, None, None]."
    issues = ("pytorch/pytorch#120810", "pytorch/pytorch#97899")

    def wrong(self) -> Tensor:
        is_real = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
        query = key = torch.zeros(3, 1, 3, 8)  # all scores are 0
        value = torch.eye(3).expand(3, 1, 3, 3)  # the output is the weights
        weights = F.scaled_dot_product_attention(query, key, value, is_real)
        print("weights of sample 1:")
        print(weights[1, 0])
        return weights[1, 0]

    def right(self) -> Tensor:
        is_real = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
        query = key = torch.zeros(3, 1, 3, 8)  # all scores are 0
        value = torch.eye(3).expand(3, 1, 3, 3)  # the output is the weights
        may_look = is_real[:, None, None]  # (batch, 1, 1, key_len)
        weights = F.scaled_dot_product_attention(query, key, value, may_look)
        print("weights of sample 1:")
        print(weights[1, 0])
        return weights[1, 0]

    def holds(self, wrong: Tensor) -> bool:
        return bool((wrong[:, 1:] > 0).any())

    def helps(self, right: Tensor) -> bool:
        return not (right[:, 1:] > 0).any()


class SdpaScaledTwice(Trap):
    """The function scales by itself: scaled queries are scaled twice."""

    number = 48
    name = "sdpa_scaled_twice"
    severity = Severity.WRONG_NUMBERS
    concerns = ("scaled_dot_product_attention.scale", "scaled_dot_product_attention.query")
    expects = "The call replaces the two products and the softmax, and nothing else."
    happens = "The output differs: the scores are divided by sqrt(head_dim) a second time, so the weights are flatter."
    why = "scale=None means 1 / sqrt(head_dim). It is a factor, so scale=sqrt(head_dim) would be wrong too."
    places = (Place(sdpa.usual_scale, "1 / math.sqrt"),)
    instead = "Pass scale=1.0 with scaled queries, or do not scale them yourself."
    issues = ("huggingface/transformers#38277",)
    since = "2.0"

    def wrong(self) -> float:
        query, key, value = torch.randn(3, 2, 4, 5, 8)
        query = query / math.sqrt(8)
        by_hand = (query @ key.transpose(-2, -1)).softmax(-1) @ value
        output = F.scaled_dot_product_attention(query, key, value)
        difference = (output - by_hand).abs().max().item()
        print(f"greatest difference: {difference:.2g}")
        return difference

    def right(self) -> float:
        query, key, value = torch.randn(3, 2, 4, 5, 8)
        query = query / math.sqrt(8)
        by_hand = (query @ key.transpose(-2, -1)).softmax(-1) @ value
        output = F.scaled_dot_product_attention(query, key, value, scale=1.0)
        difference = (output - by_hand).abs().max().item()
        print(f"greatest difference: {difference:.2g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong > 0.01

    def helps(self, right: float) -> bool:
        return right < 1e-5


class NoSecondDerivative(Trap):
    """The fused kernels have no second derivative."""

    number = 49
    name = "no_second_derivative"
    severity = Severity.ERROR
    concerns = ("scaled_dot_product_attention.query", "need_weights", "src", "tgt")
    expects = "A gradient penalty, a Hessian or the inner loop of meta-learning works as with any other layer."
    happens = (
        "You can take the gradient, but not the gradient of the gradient. Forward mode, torch.func.jvp, fails too."
    )
    why = (
        "A fused kernel comes with a hand-coded backward pass, which has no derivative of its own. The CPU has no "
        "fused kernel with dropout, so a layer with dropout works in training and fails in eval(). In the "
        "hand-written version every step has derivatives of every order."
    )
    places = (Place(functional.attention, "weights = softmax"), Place(functional.attention, "context = weights @ v"))
    instead = "Restrict the forward pass to the MATH kernel. need_weights=True also avoids the fused kernels."
    issues = ("pytorch/pytorch#116350", "pytorch/pytorch#98164", "huggingface/diffusers#5678")
    since = "2.0"
    raises = "_backward is not implemented"

    def wrong(self) -> None:
        layer = nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True)
        x = torch.randn(2, 5, 12, requires_grad=True)
        output = layer(x)
        (slope,) = torch.autograd.grad(output[..., 0].sum(), x, create_graph=True)
        print(f"the gradient, its norm: {slope.norm().item():.2g}")
        torch.autograd.grad(slope.norm(), x)

    def right(self) -> Tensor:
        layer = nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True)
        x = torch.randn(2, 5, 12, requires_grad=True)
        with sdpa_kernel(SDPBackend.MATH):
            output = layer(x)
        (slope,) = torch.autograd.grad(output[..., 0].sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.norm(), x)
        print("gradient of the gradient's norm:", tuple(second.shape))
        return second

    def helps(self, right: Tensor) -> bool:
        return bool(right.isfinite().all() and right.any())


class SdpaFallsBack(Trap):
    """Dropout, a learnt bias or another value width silently rule out the fused kernel."""

    number = 54
    name = "sdpa_falls_back"
    severity = Severity.SLOW
    concerns = (
        "scaled_dot_product_attention.dropout_p",
        "scaled_dot_product_attention.attn_mask",
        "scaled_dot_product_attention.value",
        "dropout",
    )
    expects = "The function is fused, whatever it is given."
    happens = (
        "Only the plain call is. The others write out the scores: bmm, _safe_softmax, bmm. So does every layer of "
        "torch.nn in training on CPU, because its dropout defaults to 0.1. Kernels for other devices have other "
        "limits."
    )
    why = (
        "Each kernel says what it supports, and the first that fits is used. The last, which supports everything, "
        "stores one number per head, query and key. The hand-written version has only that one for short inputs."
    )
    places = (Place(functional.attention, "weights = softmax"), Place(functional.attention, "F.dropout"))
    instead = (
        "Ask for the kernel by name while you investigate: whatever rules it out is then an error, usually with the "
        "reason."
    )
    issues = ("pytorch/pytorch#97514",)
    since = "2.0"

    def wrong(self) -> list[str]:
        x, bias = torch.randn(2, 3, 5, 8), nn.Parameter(torch.zeros(5, 5))
        attend = F.scaled_dot_product_attention
        calls = {
            "plain": lambda: attend(x, x, x),
            "dropout": lambda: attend(x, x, x, dropout_p=0.1),
            "learnt bias": lambda: attend(x, x, x, attn_mask=bias),
            "values of width 4": lambda: attend(x, x, x[..., :4]),
        }
        fused = []
        for name, call in calls.items():
            called = operations(call)
            print(f"{name}:", *called)
            fused += [name] if "flash" in str(called) else []
        return fused

    def right(self) -> str:
        x, answer = torch.randn(2, 3, 5, 8), ""
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            try:
                F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
            except RuntimeError as error:
                answer = str(error)
        print(answer)
        print(*(str(x.message).split(" (")[0] for x in said), sep="\n")
        return answer

    def holds(self, wrong: list[str]) -> bool:
        return wrong == ["plain"]

    def helps(self, right: str) -> bool:
        return "No available kernel" in right


class SdpaWithoutBatch(Trap):
    """Three axes, heads without a batch, take the plain kernel."""

    number = 55
    name = "sdpa_without_batch"
    severity = Severity.SLOW
    concerns = ("scaled_dot_product_attention.query",)
    expects = "(heads, len, head_dim) is a batch of one with less to type."
    happens = "The scores are written out: bmm, _safe_softmax, bmm."
    why = (
        "The fused kernels only accept four axes, and nothing adds the missing one. The hand-written version has "
        "one path for any number of axes."
    )
    places = (Place(functional.attention, "weights = softmax"),)
    instead = "Add a batch axis."
    issues = ("pytorch/pytorch#187266",)
    since = "2.0"
    mended_in = "2.14"

    def wrong(self) -> list[str]:
        x = torch.randn(3, 5, 8)
        called = operations(lambda: F.scaled_dot_product_attention(x, x, x))
        print(*called)
        return called

    def right(self) -> list[str]:
        x = torch.randn(3, 5, 8)[None]
        called = operations(lambda: F.scaled_dot_product_attention(x, x, x))
        print(*called)
        return called

    def holds(self, wrong: list[str]) -> bool:
        return "bmm" in wrong

    def helps(self, right: list[str]) -> bool:
        return right == ["_scaled_dot_product_flash_attention_for_cpu"]


class OverflowBecomesZeros(Trap):
    """Scores that overflow give an output of zeros, where a NaN would reveal it."""

    number = 77
    name = "overflow_becomes_zeros"
    severity = Severity.WRONG_NUMBERS
    concerns = ("scaled_dot_product_attention.query", "scaled_dot_product_attention.key")
    expects = "When activations explode, NaN appears, and a check for finite outputs stops the training."
    happens = "All scores are -inf, the output is 0, and the check passes. With scores of +inf the output is NaN."
    why = (
        "A row whose query may look at nothing is all -inf, and is defined to give 0. Nothing distinguishes such a "
        "row from one that overflowed. softmax itself gives NaN for both; by hand, the mask decides, not the scores."
    )
    places = (Place(functional.attention, "softmax"), Place(sdpa.textbook_attention, "context * row_sees"))
    instead = "Check the queries and keys, or the scores: trace_attention gives them."

    def wrong(self) -> Tensor:
        query, key, value = torch.full((1, 1, 8), 1e20), torch.full((1, 3, 8), -1e20), torch.randn(1, 3, 8)
        output = F.scaled_dot_product_attention(query, key, value)
        print(output)
        print("finite:", output.isfinite().all().item())
        return output

    def right(self) -> bool:
        query, key = torch.full((1, 1, 8), 1e20), torch.full((1, 3, 8), -1e20)
        scores = query @ key.mT / 8**0.5
        print(scores)
        print("finite:", scores.isfinite().all().item())
        return bool(scores.isfinite().all())

    def holds(self, wrong: Tensor) -> bool:
        return bool((wrong == 0).all())

    def helps(self, right: bool) -> bool:
        return not right


TRAPS: tuple[type[Trap], ...] = (
    SdpaTopLeft,
    SdpaDropoutInEval,
    SdpaMaskAndCausal,
    SdpaLengthsUnchecked,
    SdpaHeadsBeforeLength,
    SdpaPaddingMaskAxes,
    SdpaScaledTwice,
    NoSecondDerivative,
    SdpaFallsBack,
    SdpaWithoutBatch,
    OverflowBecomesZeros,
)
