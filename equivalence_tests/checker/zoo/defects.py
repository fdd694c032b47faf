"""Each class breaks one stage in one way, and is named by what it does wrong.

``DEFECTS`` lists them with the name that the checker must give, and the conventions in which they can occur.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.zoo import conventions
from equivalence_tests.checker.zoo.conventions import CONVENTIONS, Stages

__all__ = ["DEFECTS", "Defect"]


@dataclass(frozen=True)
class Defect:
    """A broken stage.

    Args:
        mixin: Replaces the stage.
        names: What the checker may call it.
        only: The conventions that have such a stage; all if empty.
        row: The row of the list of bugs that it belongs to.
    """

    mixin: type
    names: tuple[str, ...]
    row: str
    only: tuple[type[Stages], ...] = ()

    @property
    def conventions(self) -> tuple[type[Stages], ...]:
        """Where it can occur."""
        return self.only or CONVENTIONS


class MergesByReshape(Stages):
    def merge(self, context: Tensor) -> Tensor:
        return context.reshape(context.size(0), context.size(2), -1)


class SplitsByReshape(Stages):
    def split(self, x: Tensor) -> Tensor:
        return x.reshape(x.size(0), self.num_heads, x.size(1), -1)


class ScalesByWholeWidth(Stages):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / math.sqrt(q.size(-1) * self.num_heads)


class DoesNotScale(Stages):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1)


class ScalesTwice(Stages):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) / math.sqrt(q.size(-1))


class Multiplies(Stages):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) * math.sqrt(q.size(-1))


class ScalesByLength(Stages):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / math.sqrt(k.size(-2))


class ScalesAfterSoftmax(Stages):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1)

    def weigh(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        return super().weigh(scores, hidden) / math.sqrt(self.head_dim)


class ViewsKeys(Stages):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.reshape(*k.shape[:2], k.size(3), k.size(2)) / math.sqrt(q.size(-1))


class SoftmaxOverQueries(Stages):
    def weigh(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        return F.softmax(scores if hidden is None else self.hide(scores, hidden), dim=-2)


class SoftmaxOverHeads(Stages):
    def weigh(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        return F.softmax(scores if hidden is None else self.hide(scores, hidden), dim=1)


class SoftmaxOverBatch(Stages):
    def weigh(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        return F.softmax(scores if hidden is None else self.hide(scores, hidden), dim=0)


class SoftmaxInHalf(Stages):
    def weigh(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
        return F.softmax(scores.half(), dim=-1).to(scores.dtype)


class DropsInEval(Stages):
    def weigh(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        return F.dropout(super().weigh(scores, hidden), 0.2)


class DropsScores(Stages):
    def weigh(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        return super().weigh(F.dropout(scores, 0.2, self.training), hidden)


class AttendsAmongHeads(Stages):
    def split(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), self.num_heads, -1)

    def merge(self, context: Tensor) -> Tensor:
        return context.flatten(2)


class AddsMask(Stages):
    def hide(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return scores + (~hidden).to(scores.dtype)


class MultipliesMask(Stages):
    def hide(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return scores * (~hidden).to(scores.dtype)


class IgnoresMask(Stages):
    def hide(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return scores


class TransposesMask(Stages):
    def hide(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return scores.masked_fill(hidden.transpose(-2, -1), -1e9)


class MasksAfterSoftmax(Stages):
    def weigh(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        weights = F.softmax(scores, dim=-1)
        return weights if hidden is None else weights.masked_fill(hidden, 0.0)


class FillsWithTiny(Stages):
    def hide(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return scores.masked_fill(hidden, torch.finfo(torch.float32).tiny)


class FillsWithZero(Stages):
    def hide(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return scores.masked_fill(hidden, 0.0)


class FillsWithTen(Stages):
    def hide(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return scores.masked_fill(hidden, -10.0)


class FillsWithSmallNumber(Stages):
    def hide(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return scores.masked_fill(hidden, 1e-9)


class MaskOfFirstSample(Stages):
    def hide(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return scores.masked_fill(hidden[:1], -1e9)


class RepeatsMaskInWrongOrder(Stages):
    def hide(self, scores: Tensor, hidden: Tensor) -> Tensor:
        batch, heads, query_len, key_len = scores.shape
        folded = hidden.expand(batch, 1, query_len, key_len).squeeze(1).repeat(heads, 1, 1)
        return scores.masked_fill(folded.view(batch, heads, query_len, key_len), -1e9)


class SeesNextToken(Stages):
    def future(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).triu(2)


class CannotSeeItself(Stages):
    def future(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).triu(0)


class LooksAtFutureOnly(Stages):
    def future(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).tril()


class SwapsKeyAndValue(conventions.SeparateLinears):
    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.w_q(query), self.w_k(value), self.w_v(key)


class LeavesValueAlone(conventions.SeparateLinears):
    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.w_q(query), self.w_k(key), value


class SharesOneProjection(conventions.SeparateLinears):
    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.w_q(query), self.w_q(key), self.w_q(value)


class ProjectsValueAsKey(conventions.SeparateLinears):
    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.w_q(query), self.w_k(key), self.w_k(value)


class ForgetsQueryBias(conventions.SeparateLinears):
    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.linear(query, self.w_q.weight), self.w_k(key), self.w_v(value)


class ForgetsValueBias(conventions.SeparateLinears):
    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.w_q(query), self.w_k(key), F.linear(value, self.w_v.weight)


class ForgetsOutputBias(conventions.SeparateLinears):
    def out(self, merged: Tensor) -> Tensor:
        return F.linear(merged, self.w_o.weight)


class SkipsOutputProjection(conventions.SeparateLinears):
    def out(self, merged: Tensor) -> Tensor:
        return merged


class ForgetsResidual(Stages):
    def join(self, x: Tensor, attended: Tensor, norm: nn.LayerNorm) -> Tensor:
        return norm(attended)


class AddsResidualTwice(Stages):
    def join(self, x: Tensor, attended: Tensor, norm: nn.LayerNorm) -> Tensor:
        return norm(x + x + attended)


class MakesNormInForward(Stages):
    def join(self, x: Tensor, attended: Tensor, norm: nn.LayerNorm) -> Tensor:
        return nn.LayerNorm(x.size(-1))(x + attended)


class NeverCallsNorm(Stages):
    def join(self, x: Tensor, attended: Tensor, norm: nn.LayerNorm) -> Tensor:
        return x + attended


class AddsResidualAfterNorm(Stages):
    def join(self, x: Tensor, attended: Tensor, norm: nn.LayerNorm) -> Tensor:
        return x + norm(attended)


LINEARS = (conventions.SeparateLinears, conventions.ValuesFirst, conventions.SequenceFirst, conventions.PostNorm)
MASKED = (*LINEARS, conventions.PackedByHead)
CAUSAL = (conventions.FusedCausal,)
NORMED = (conventions.PostNorm,)

DEFECTS = (
    Defect(MergesByReshape, ("heads_merged_without_transpose",), "heads merged by reshape"),
    Defect(SplitsByReshape, ("heads_split_without_transpose",), "heads split by reshape"),
    Defect(ScalesByWholeWidth, ("scale_wrong",), "scale sqrt(d_model)"),
    Defect(DoesNotScale, ("scale_missing",), "no scale"),
    Defect(ScalesTwice, ("scale_wrong",), "scale twice"),
    Defect(Multiplies, ("scale_wrong",), "scale multiplied"),
    Defect(ScalesByLength, ("scale_wrong",), "scale by another size"),
    Defect(ScalesAfterSoftmax, ("scale_after_softmax",), "scale on the wrong side of the softmax"),
    Defect(ViewsKeys, ("key_viewed_for_transposed",), "keys viewed for transposed"),
    Defect(
        SoftmaxOverQueries,
        ("softmax_over_queries",),
        "softmax over the wrong axis",
        (*MASKED, conventions.ParametersOnly),
    ),
    Defect(
        SoftmaxOverHeads, ("softmax_over_heads",), "softmax over the wrong axis", (*MASKED, conventions.ParametersOnly)
    ),
    Defect(
        SoftmaxOverBatch, ("softmax_over_batch",), "softmax over the wrong axis", (*MASKED, conventions.ParametersOnly)
    ),
    Defect(SoftmaxInHalf, ("softmax_in_float16",), "softmax in lower precision"),
    Defect(DropsInEval, ("dropout_in_eval",), "dropout active in eval"),
    Defect(DropsScores, ("dropout_on_scores",), "dropout on scores"),
    Defect(
        AttendsAmongHeads,
        ("attention_among_heads",),
        "attention over the wrong axis",
        (conventions.ParametersOnly, conventions.PackedByHead),
    ),
    Defect(AddsMask, ("mask_added_as_01",), "bool mask turned into 0/1 and added", MASKED),
    Defect(MultipliesMask, ("mask_multiplied",), "mask multiplied", MASKED),
    Defect(IgnoresMask, ("mask_never_used",), "mask accepted and never used", MASKED),
    Defect(
        TransposesMask,
        ("mask_transposed", "padding_mask_on_queries"),
        "mask transposed",
        (conventions.PackedByHead, conventions.PostNorm),
    ),
    Defect(MasksAfterSoftmax, ("mask_after_softmax",), "mask after softmax", MASKED),
    Defect(FillsWithTiny, ("mask_fill_not_negative", "mask_fill_zero"), "mask fill", MASKED),
    Defect(FillsWithZero, ("mask_fill_zero", "mask_fill_not_negative", "mask_multiplied"), "mask fill", MASKED),
    Defect(FillsWithTen, ("mask_fill_too_small",), "mask fill", MASKED),
    Defect(FillsWithSmallNumber, ("mask_fill_not_negative",), "mask fill", MASKED),
    Defect(MaskOfFirstSample, ("mask_of_first_sample",), "mask of the first sample", MASKED),
    Defect(
        RepeatsMaskInWrongOrder,
        ("mask_repeated_in_wrong_order",),
        "mask repeated over heads in the wrong order",
        MASKED,
    ),
    Defect(SeesNextToken, ("causal_sees_one_ahead",), "causal diagonal off by one", CAUSAL),
    Defect(CannotSeeItself, ("causal_cannot_see_itself",), "causal diagonal off by one", CAUSAL),
    Defect(LooksAtFutureOnly, ("causal_mask_inverted",), "mask inverted", CAUSAL),
    Defect(AddsMask, ("causal_mask_added_as_01",), "bool mask turned into 0/1 and added", CAUSAL),
    Defect(MasksAfterSoftmax, ("causal_mask_after_softmax",), "mask after softmax", CAUSAL),
    Defect(FillsWithTen, ("causal_fill_too_small",), "mask fill", CAUSAL),
    Defect(FillsWithTiny, ("causal_fill_not_negative", "causal_fill_zero"), "mask fill", CAUSAL),
    Defect(SwapsKeyAndValue, ("key_value_swapped",), "key and value swapped", LINEARS),
    Defect(LeavesValueAlone, ("value_not_projected",), "value not projected", LINEARS),
    Defect(SharesOneProjection, ("projection_shared",), "q, k, v share one projection", LINEARS),
    Defect(ProjectsValueAsKey, ("value_uses_key_projection",), "q, k, v share one projection", LINEARS),
    Defect(ForgetsQueryBias, ("bias_never_used",), "bias missing", LINEARS),
    Defect(ForgetsValueBias, ("bias_never_used",), "bias missing", LINEARS),
    Defect(ForgetsOutputBias, ("bias_never_used",), "bias missing", LINEARS),
    Defect(SkipsOutputProjection, ("output_projection_skipped",), "output projection missing", LINEARS),
    Defect(ForgetsResidual, ("residual_missing",), "residual missing", NORMED),
    Defect(AddsResidualTwice, ("residual_added_twice",), "residual added twice", NORMED),
    Defect(
        MakesNormInForward,
        ("norm_fresh_in_forward", "layer_made_in_forward", "norm_never_used"),
        "LayerNorm fresh in every forward",
        NORMED,
    ),
    Defect(NeverCallsNorm, ("norm_never_used",), "LayerNorm missing", NORMED),
    Defect(AddsResidualAfterNorm, ("residual_after_norm",), "residual after the LayerNorm", NORMED),
)
