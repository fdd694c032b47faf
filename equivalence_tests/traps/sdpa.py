"""F.scaled_dot_product_attention: alignment, dropout, and what its CPU kernel does not check."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from equivalence_tests.excerpts import Place
from equivalence_tests.traps.entry import Severity, Trap
from scratch import functional, masks, validation

__all__ = ["TRAPS"]


class SdpaTopLeft(Trap):
    """is_causal=True aligns upper left: a lone last query sees one key."""

    number = 26
    name = "sdpa_top_left"
    severity = Severity.WRONG_NUMBERS
    concerns = ("scaled_dot_product_attention.is_causal",)
    expects = "With 2 queries and 4 keys the queries are the last two tokens, as in decoding with a cache."
    happens = "They are taken for the first two, and the later keys go unseen."
    why = "Query i may look at keys 0 to i, counted from the start of both. Square masks cannot tell the two apart."
    places = (Place(masks.causal, "offset ="), Place(masks.causal, "tril(offset)"))
    instead = "causal_lower_right(query_len, key_len) as attn_mask; a single new token needs no mask at all."
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
    expects = "After eval() nothing is dropped."
    happens = "Two calls in eval differ."
    why = "The function sees a number, not a mode. The modules pass 0.0 for it outside of training."
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
    """A mask beside is_causal=True: the CPU kernel applies both, silently."""

    number = 31
    name = "sdpa_mask_and_causal"
    severity = Severity.WRONG_NUMBERS
    concerns = ("scaled_dot_product_attention.is_causal", "scaled_dot_product_attention.attn_mask")
    expects = "The error that the documents promise, whatever the shape."
    happens = "With four axes on CPU: no error, and both masks at once. With three axes: the error."
    why = (
        "Four axes without dropout go to the fused CPU kernel, which does not ask. Three axes go to the plain one, which "
        "does. By hand one check stands before all."
    )
    places = (Place(validation.check_scaled_dot_product_attention, "Explicit attn_mask"),)
    instead = "Put the two masks together yourself, and leave is_causal off."
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
        return right[0] < 1e-5


class SdpaLengthsUnchecked(Trap):
    """Fewer values than keys: the CPU kernel leaves keys out, unseen."""

    number = 32
    name = "sdpa_lengths_unchecked"
    severity = Severity.WRONG_NUMBERS
    concerns = ("scaled_dot_product_attention.key", "scaled_dot_product_attention.value")
    expects = "An error: every key needs its value."
    happens = (
        "The output is that of the first four keys. With more values than keys it is worse: the kernel reads keys beyond the "
        "end of the tensor, and what it finds there is chance."
    )
    why = "The fused CPU kernel takes the number of keys from the values and does not compare. By hand the two are compared first."
    places = (Place(validation._check_sdpa_shapes, "if value.size(-2) != key.size(-2)"),)
    instead = "Check it yourself, or call scratch, which does."
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
            functional.scaled_dot_product_attention(query, key, value)
            message = ""
        except ValueError as error:
            message = str(error)
        print(message)
        return message

    def holds(self, wrong: str) -> bool:
        return wrong == "the first four keys"

    def helps(self, right: str) -> bool:
        return "value must have the key_len of key, 7, got 4" in right


TRAPS: tuple[type[Trap], ...] = (SdpaTopLeft, SdpaDropoutInEval, SdpaMaskAndCausal, SdpaLengthsUnchecked)
