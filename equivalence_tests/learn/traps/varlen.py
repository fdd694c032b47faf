"""Packed sequences: the shape of the log-sum-exp, the size of a window, and the corner it starts from."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import scratch
from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.traps.entry import Severity, Trap
from scratch import masks, varlen

__all__ = ["TRAPS"]


class VarlenLseHeadsFirst(Trap):
    """The log-sum-exp of varlen_attn has the heads first, its output the tokens."""

    number = 64
    name = "varlen_lse_heads_first"
    severity = Severity.ERROR
    concerns = ("varlen_attn.return_aux",)
    expects = "The documentation of 2.13 says (tokens, heads), which fits the output (tokens, heads, head_dim)."
    happens = (
        "It is (heads, tokens), as the documentation of 2.15 says, and the product ends in an error. With as many "
        "heads as tokens there is no error, and the numbers are wrong. The shapes can be seen without a GPU, on the "
        "device meta."
    )
    why = "The kernel writes one row for each head."
    places = (Place(varlen.varlen_attn, "torch.cat(lses, dim=1)"),)
    instead = "Transpose it."
    raises = "RuntimeError"

    def wrong(self) -> None:
        x = torch.empty(7, 2, 8, dtype=torch.float16, device="meta")  # 7 tokens, 2 heads
        cu_seq = torch.tensor([0, 3, 7], dtype=torch.int32, device="meta")
        output, lse = varlen_attn(x, x, x, cu_seq, cu_seq, 4, 4, return_aux=AuxRequest(lse=True))
        print(tuple(output.shape), tuple(lse.shape))
        output * torch.sigmoid(lse).unsqueeze(-1)

    def right(self) -> tuple[int, ...]:
        x = torch.empty(7, 2, 8, dtype=torch.float16, device="meta")  # 7 tokens, 2 heads
        cu_seq = torch.tensor([0, 3, 7], dtype=torch.int32, device="meta")
        output, lse = varlen_attn(x, x, x, cu_seq, cu_seq, 4, 4, return_aux=AuxRequest(lse=True))
        scaled = output * torch.sigmoid(lse).transpose(0, 1).unsqueeze(-1)
        print(tuple(scaled.shape))
        return tuple(scaled.shape)

    def helps(self, right: tuple[int, ...]) -> bool:
        return right == (7, 2, 8)


class WindowOfNeighbours(Trap):
    """A window of 2 means two keys for a model, and three for varlen_attn."""

    number = 65
    name = "window_of_neighbours"
    severity = Severity.WRONG_NUMBERS
    concerns = ("varlen_attn.window_size",)
    expects = "A model with a sliding window of 2 sees the token and the one before it: window_size=(2, 0)."
    happens = "Three keys are seen. (torch computes this on CUDA; scratch has the same meaning anywhere.)"
    why = (
        "window_size counts the keys beside the query's own position. Model configurations count that position too, "
        "as masks.sliding_window does: |i - j| < window."
    )
    places = (Place(varlen.windowed_scores, "masked_fill"), Place(masks.sliding_window, "return places.tril"))
    instead = "window_size=(window - 1, 0)"

    def wrong(self) -> Tensor:
        x, value = torch.zeros(4, 1, 4), torch.eye(4)[:, None]  # the output is the weights
        cu_seq = torch.tensor([0, 4], dtype=torch.int32)
        weights = scratch.varlen_attn(x, x, value, cu_seq, cu_seq, 4, 4, window_size=(2, 0))
        print(weights[:, 0])
        return weights

    def right(self) -> Tensor:
        x, value = torch.zeros(4, 1, 4), torch.eye(4)[:, None]  # the output is the weights
        cu_seq = torch.tensor([0, 4], dtype=torch.int32)
        weights = scratch.varlen_attn(x, x, value, cu_seq, cu_seq, 4, 4, window_size=(2 - 1, 0))
        print(weights[:, 0])
        return weights

    def holds(self, wrong: Tensor) -> bool:
        return int((wrong[-1] > 0).sum()) == 3

    def helps(self, right: Tensor) -> bool:
        may_attend = masks.causal(4) & masks.sliding_window(4, window=2)
        return bool((right[:, 0] > 0).equal(may_attend))


class VarlenLowerRight(Trap):
    """Causal varlen attention aligns lower right, is_causal upper left."""

    number = 66
    name = "varlen_lower_right"
    severity = Severity.WRONG_NUMBERS
    concerns = ("varlen_attn.window_size", "scaled_dot_product_attention.is_causal")
    expects = "window_size=(-1, 0) means the same as is_causal=True: causal."
    happens = (
        "With 2 queries and 4 keys it is another mask: here the last query is aligned with the last key, there the "
        "first query with the first key. With as many queries as keys the two are the same. (torch computes this on "
        "CUDA; scratch anywhere.)"
    )
    why = "The kernel aligns the queries with the end of the keys, which is right for a cache."
    places = (Place(varlen.windowed_scores, "places ="),)
    instead = "causal_upper_left or causal_lower_right say which one is meant; so does masks.causal(align=...)."

    def wrong(self) -> tuple[Tensor, Tensor]:
        query, key = torch.zeros(2, 1, 4), torch.randn(4, 1, 4)  # all scores are 0
        value = torch.eye(4)[:, None]  # the output is the weights
        cu_seq_q, cu_seq_k = torch.tensor([0, 2]).int(), torch.tensor([0, 4]).int()
        packed = scratch.varlen_attn(query, key, value, cu_seq_q, cu_seq_k, 2, 4, window_size=(-1, 0))
        print(packed[:, 0])
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        other = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        print(other[0])
        return packed[:, 0], other[0]

    def right(self) -> tuple[Tensor, Tensor]:
        query, key = torch.zeros(2, 1, 4), torch.randn(4, 1, 4)  # all scores are 0
        value = torch.eye(4)[:, None]  # the output is the weights
        cu_seq_q, cu_seq_k = torch.tensor([0, 2]).int(), torch.tensor([0, 4]).int()
        packed = scratch.varlen_attn(query, key, value, cu_seq_q, cu_seq_k, 2, 4, window_size=(-1, 0))
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        causal = masks.causal(2, 4, align="lower_right")
        other = F.scaled_dot_product_attention(query, key, value, causal)
        print("greatest difference:", (packed[:, 0] - other[0]).abs().max().item())
        return packed[:, 0], other[0]

    def holds(self, wrong: tuple[Tensor, Tensor]) -> bool:
        lower_right, upper_left = (x > 0 for x in wrong)
        return bool(lower_right.equal(masks.causal(2, 4, align="lower_right")) and upper_left.equal(masks.causal(2, 4)))

    def helps(self, right: tuple[Tensor, Tensor]) -> bool:
        return bool((right[0] - right[1]).abs().max() < 1e-6)


class VarlenTailTokens(Trap):
    """Tokens after the last sequence make all gradients NaN."""

    number = 73
    name = "varlen_tail_tokens"
    severity = Severity.WRONG_NUMBERS
    concerns = ("varlen_attn.cu_seq_q", "varlen_attn.cu_seq_k")
    expects = "Padding after the last sequence, which keeps the shape fixed, does no harm."
    happens = (
        "The forward pass raises no error, but the rows of the padding are never written. Neither are their "
        "gradients: whatever was in memory, often enough NaN, reaches the weights of the projections."
    )
    why = (
        "The kernel fills the rows of each sequence, in memory that was not cleared. By hand the sequences are "
        "concatenated, and every row of the output belongs to one of them; other lengths are rejected."
    )
    places = (Place(varlen.sequences, "itertools.pairwise"),)
    instead = "End cu_seq at the last token: make the padding a sequence of its own, or cut it off before the call."
    issues = ("pytorch/pytorch#176793", "pytorch/pytorch#188933")
    needs = "a CUDA device"

    def wrong(self) -> None:
        x = torch.randn(8, 2, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        cu_seq = torch.tensor([0, 3, 6], dtype=torch.int32, device="cuda")  # two sequences, and 2 tokens of padding
        varlen_attn(x, x, x, cu_seq, cu_seq, 3, 3).sum().backward()  # type: ignore[union-attr]
        print(x.grad.isfinite().all())  # type: ignore[union-attr]

    def right(self) -> None:
        x = torch.randn(8, 2, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        cu_seq = torch.tensor([0, 3, 6, 8], dtype=torch.int32, device="cuda")  # the padding is a sequence
        varlen_attn(x, x, x, cu_seq, cu_seq, 3, 3)[:6].sum().backward()  # type: ignore[union-attr]
        print(x.grad.isfinite().all())  # type: ignore[union-attr]


TRAPS = (VarlenLseHeadsFirst, WindowOfNeighbours, VarlenLowerRight, VarlenTailTokens)
