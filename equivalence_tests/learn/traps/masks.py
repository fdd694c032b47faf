"""Masks: which way True points, what a number in one does, and rows without any key."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.traps.entry import Severity, Trap
from scratch import functional, paths, sdpa, validation
from scratch import masks as scratch_masks
from scratch.attention import resolve_masks
from scratch.validation import attention as attention_doors

__all__ = ["TRAPS"]

MODEL_MASKS = ("mask", "src_mask", "tgt_mask", "memory_mask")
MASKS = ("attn_mask", *MODEL_MASKS)
PADDING_MASKS = ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask")


class MaskPolarity(Trap):
    """A module's mask says who may not look; the function's says who may."""

    number = 1
    name = "mask_polarity"
    severity = Severity.WRONG_NUMBERS
    concerns = (*MASKS, *PADDING_MASKS)
    expects = "Queries look at the real tokens and ignore the padding."
    happens = (
        "It is the other way round: all of the weight is on padding. The numbers are finite and nothing complains."
    )
    why = (
        "One library, two conventions. The modules' masks say what to leave out, and become -inf where they are "
        "True. The function's mask says what to keep, and becomes -inf where it is False."
    )
    places = (
        Place(scratch_masks.score_bias_from_module, "masked_fill_(module_mask"),
        Place(scratch_masks.to_score_bias, "masked_fill_(~may_attend"),
    )
    instead = (
        "Negate the mask for a module. Name masks after what True means: may_attend, is_padding. A tokenizer's "
        "attention_mask is 1 at real tokens; a module wants attention_mask == 0."
    )
    issues = ("pytorch/pytorch#170400", "pytorch/pytorch#120668", "rasbt/LLMs-from-scratch#1061")

    def wrong(self) -> Tensor:
        token_ids = torch.tensor([[7, 4, 9, 0], [5, 8, 0, 0]])  # 0 pads
        is_real = token_ids != 0
        x = torch.randn(2, 4, 12)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        output, weights = attention(x, x, x, key_padding_mask=is_real)
        print("weights of the first query of each sample:")
        print(weights[:, 0].detach())
        return (weights * ~is_real[:, None]).sum(-1)

    def right(self) -> Tensor:
        token_ids = torch.tensor([[7, 4, 9, 0], [5, 8, 0, 0]])  # 0 pads
        is_padding = token_ids == 0
        x = torch.randn(2, 4, 12)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        output, weights = attention(x, x, x, key_padding_mask=is_padding)
        print("weights of the first query of each sample:")
        print(weights[:, 0].detach())
        return (weights * is_padding[:, None]).sum(-1)

    def holds(self, wrong: Tensor) -> bool:
        return torch.allclose(wrong, torch.ones_like(wrong))

    def helps(self, right: Tensor) -> bool:
        return not right.any()


class FullyMaskedRow(Trap):
    """A query that may look at nothing gets NaN, a bias or 0."""

    number = 2
    name = "fully_masked_row"
    severity = Severity.WRONG_NUMBERS
    concerns = (*MASKS, *PADDING_MASKS, "need_weights")
    expects = "One answer for that query, and no harm to the others."
    happens = (
        "Query 0 is padding, and the causal mask lets it see nothing else. With weights: NaN. Without: the bias of "
        "out_proj (set to 1 here so that you can see it). Without weights and without gradients: NaN again, from "
        "the fused path. The function: 0. And the NaN spreads: the loss leaves query 0 out, and the gradient is NaN "
        "all the same."
    )
    why = (
        "A softmax over nothing but -inf is 0/0. The function sets such rows aside first and gives them 0. The "
        "module does not when it has to return the weights, because a query without keys has none."
    )
    places = (
        Place(sdpa.textbook_attention, "open_blind_rows(score_bias)"),
        Place(paths.open_blind_rows, "row_sees = "),
        Place(paths.open_blind_rows, "masked_fill(~row_sees"),
    )
    instead = (
        "Let every query see some key. It does not matter which: here a blind query sees all of them, and its "
        "output is left out of the loss."
    )
    issues = ("pytorch/pytorch#41508", "pytorch/pytorch#160064", "pytorch/pytorch#133882")

    def wrong(self) -> dict[str, Tensor]:
        causal = torch.ones(3, 3, dtype=torch.bool).triu(1)  # True = may not look
        is_padding = torch.tensor([True, False, False])  # padding in front
        hide = causal | is_padding  # query 0 may look at nothing
        x = torch.randn(1, 3, 12)
        attention = nn.MultiheadAttention(12, 2, batch_first=True).eval()
        nn.init.ones_(attention.out_proj.bias)
        with_weights, _ = attention(x, x, x, attn_mask=hide)
        without, _ = attention(x, x, x, attn_mask=hide, need_weights=False)
        with torch.no_grad():
            fused, _ = attention(x, x, x, attn_mask=hide, need_weights=False)
        function = F.scaled_dot_product_attention(x, x, x, attn_mask=~hide)
        print("query 0, need_weights=True:  ", with_weights[0, 0, :4].detach())
        print("need_weights=False:          ", without[0, 0, :4].detach())
        print("the same under no_grad:      ", fused[0, 0, :4])
        print("scaled_dot_product_attention:", function[0, 0, :4])
        loss = with_weights[0, 1:].sum()  # query 0 is not in it
        (gradient,) = torch.autograd.grad(loss, attention.in_proj_weight)
        print("NaN in the gradient:", gradient.isnan().any().item())
        return {
            "with_weights": with_weights[0, 0],
            "without": without[0, 0],
            "fused": fused[0, 0],
            "function": function[0, 0],
            "gradient": gradient,
        }

    def right(self) -> dict[str, Tensor]:
        causal = torch.ones(3, 3, dtype=torch.bool).triu(1)  # True = may not look
        is_padding = torch.tensor([True, False, False])  # padding in front
        hide = causal | is_padding  # query 0 may look at nothing
        hide &= ~hide.all(dim=-1, keepdim=True)  # let blind queries see all
        x = torch.randn(1, 3, 12)
        attention = nn.MultiheadAttention(12, 2, batch_first=True).eval()
        nn.init.ones_(attention.out_proj.bias)
        with_weights, _ = attention(x, x, x, attn_mask=hide)
        without, _ = attention(x, x, x, attn_mask=hide, need_weights=False)
        with torch.no_grad():
            fused, _ = attention(x, x, x, attn_mask=hide, need_weights=False)
        print("query 1, need_weights=True:  ", with_weights[0, 1, :4].detach())
        print("need_weights=False:          ", without[0, 1, :4].detach())
        print("the same under no_grad:      ", fused[0, 1, :4])
        loss = with_weights[0, 1:].sum()  # query 0 is not in it
        (gradient,) = torch.autograd.grad(loss, attention.in_proj_weight)
        print("NaN in the gradient:", gradient.isnan().any().item())
        return {
            "with_weights": with_weights[0],
            "without": without[0],
            "fused": fused[0],
            "function": without[0],
            "gradient": gradient,
        }

    def holds(self, wrong: dict[str, Tensor]) -> bool:
        return bool(
            wrong["with_weights"].isnan().all()
            and (wrong["without"] == 1).all()
            and wrong["fused"].isnan().all()
            and (wrong["function"] == 0).all()
            and wrong["gradient"].isnan().any()
        )

    def helps(self, right: dict[str, Tensor]) -> bool:
        same = all(torch.allclose(right["with_weights"], right[path], atol=1e-5) for path in ("without", "fused"))
        return same and all(bool(x.isfinite().all()) for x in right.values())


class PaddingMaskBatchFirst(Trap):
    """A padding mask is (batch, len), even when the inputs are (len, batch)."""

    number = 50
    name = "padding_mask_batch_first"
    severity = Severity.WRONG_NUMBERS
    concerns = ("batch_first", *PADDING_MASKS)
    expects = "The mask is laid out like the inputs: one column per sample."
    happens = (
        "Samples 0 and 1 look at padding, their third token; sample 2, which has none, is left with one token out "
        "of three. Nothing complains here because there are as many tokens as samples. With other sizes it is an "
        "error."
    )
    why = (
        "batch_first is about the inputs and the output. The mask is applied to the scores, where the batch always "
        "comes first."
    )
    places = (Place(resolve_masks, "view(batch, 1, 1, key_len)"),)
    instead = "Transpose the mask, or use batch_first=True so that everything is laid out alike."
    issues = ("pytorch/pytorch#25132", "pytorch/pytorch#25129")

    def wrong(self) -> Tensor:
        token_ids = torch.tensor([[7, 8, 0], [4, 0, 0], [9, 6, 3]]).T  # (len, batch), 0 pads
        x = torch.randn(3, 3, 12)  # (len, batch, embed_dim)
        attention = nn.MultiheadAttention(12, 3)
        _, weights = attention(x, x, x, key_padding_mask=token_ids == 0)
        print("weights of the first query of each sample:")
        print(weights[:, 0].detach())
        return (weights * (token_ids.T == 0)[:, None]).sum(-1)

    def right(self) -> Tensor:
        token_ids = torch.tensor([[7, 8, 0], [4, 0, 0], [9, 6, 3]]).T  # (len, batch), 0 pads
        x = torch.randn(3, 3, 12)  # (len, batch, embed_dim)
        attention = nn.MultiheadAttention(12, 3)
        _, weights = attention(x, x, x, key_padding_mask=(token_ids == 0).T)
        print("weights of the first query of each sample:")
        print(weights[:, 0].detach())
        return (weights * (token_ids.T == 0)[:, None]).sum(-1)

    def holds(self, wrong: Tensor) -> bool:
        return bool((wrong[:2] > 0).all())

    def helps(self, right: Tensor) -> bool:
        return not right.any()


class FloatMaskAdded(Trap):
    """A float mask is added to the scores: 0.0 and 1.0 hide nothing."""

    number = 6
    name = "float_mask_added"
    severity = Severity.WRONG_NUMBERS
    concerns = (*MASKS, *PADDING_MASKS)
    expects = "1.0 marks padding, which then gets no weight."
    happens = (
        "The padded keys get more weight than without a mask, because 1.0 is added to their scores. Nothing complains."
    )
    why = (
        "Only a bool mask means yes or no. A float mask is a bias: each number is added to a score, and only -inf "
        "hides a key. Integers, which could mean either, are rejected."
    )
    places = (
        Place(scratch_masks.score_bias_from_module, "module_mask.is_floating_point()"),
        Place(functional.attention, "scores + score_bias"),
        Place(validation.check_mask_dtype, "if mask.dtype != torch.bool"),
    )
    instead = "Convert masks of 0 and 1 to bool."
    issues = ("pytorch/pytorch#95702", "pytorch/pytorch#92554", "pytorch/pytorch#147209")

    def wrong(self) -> Tensor:
        is_padding = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
        x = torch.randn(2, 4, 12)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        output, weights = attention(x, x, x, key_padding_mask=is_padding)
        print("weights of the first query of each sample:")
        print(weights[:, 0].detach())
        return weights[is_padding.bool()[:, None].expand_as(weights)]

    def right(self) -> Tensor:
        is_padding = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
        x = torch.randn(2, 4, 12)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        output, weights = attention(x, x, x, key_padding_mask=is_padding.bool())
        print("weights of the first query of each sample:")
        print(weights[:, 0].detach())
        return weights[is_padding.bool()[:, None].expand_as(weights)]

    def holds(self, wrong: Tensor) -> bool:
        return bool((wrong > 0).all())

    def helps(self, right: Tensor) -> bool:
        return bool((right == 0).all())


class SquareSubsequentFloat32(Trap):
    """generate_square_subsequent_mask is float32, whatever the model is."""

    number = 7
    name = "square_subsequent_float32"
    severity = Severity.ERROR
    concerns = ("sz", "generate_square_subsequent_mask.dtype", "MultiheadAttention.attn_mask", *MODEL_MASKS)
    expects = "The library's own causal mask fits the library's own module."
    happens = (
        "Next to a bool padding mask it triggers a warning, because the two are of different kinds. In a bfloat16 "
        "model it is an error when weights are returned, and fine when they are not."
    )
    why = (
        "The mask is a tensor of 0 and -inf in torch's default dtype, and is added to the scores. With weights, "
        "that sum is a single call of baddbmm, which wants one dtype. Without, scaled_dot_product_attention adds "
        "it, and that accepts float32 as well."
    )
    places = (
        Place(functional.attention, "scores + score_bias"),
        Place(attention_doors._check_mask_precision, "allowed = "),
    )
    instead = (
        "Use a bool mask: it has no precision and goes with bool padding. If you need the float form, pass the "
        "dtype to generate_square_subsequent_mask."
    )
    issues = ("pytorch/pytorch#28272", "pytorch/pytorch#116170", "pytorch/pytorch#137186")
    raises = "Input dtypes must be the same"
    warns = "mismatched key_padding_mask and attn_mask is deprecated"

    def wrong(self) -> None:
        causal = nn.Transformer.generate_square_subsequent_mask(5)
        print("dtype of the mask:", causal.dtype)
        is_padding = torch.zeros(2, 5, dtype=torch.bool)
        x = torch.randn(2, 5, 12)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        attention(x, x, x, attn_mask=causal, key_padding_mask=is_padding)
        attention, x = attention.bfloat16(), x.bfloat16()
        attention(x, x, x, attn_mask=causal, need_weights=False)
        print("bfloat16 without weights: fine")
        attention(x, x, x, attn_mask=causal)

    def right(self) -> list[Tensor]:
        causal = torch.ones(5, 5, dtype=torch.bool).triu(1)  # True = may not look
        is_padding = torch.zeros(2, 5, dtype=torch.bool)
        x = torch.randn(2, 5, 12)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        output, _ = attention(x, x, x, attn_mask=causal, key_padding_mask=is_padding)
        attention, x = attention.bfloat16(), x.bfloat16()
        half, _ = attention(x, x, x, attn_mask=causal)
        print("float32 and bfloat16: fine")
        return [output, half]

    def helps(self, right: list[Tensor]) -> bool:
        return all(bool(x.isfinite().all()) for x in right)


class Mask3dOrder(Trap):
    """A 3-D attn_mask lists all heads of sample 0, then those of sample 1."""

    number = 8
    name = "mask_3d_order"
    severity = Severity.WRONG_NUMBERS
    concerns = ("MultiheadAttention.attn_mask", *MODEL_MASKS)
    expects = "Each sample's mask is used for all heads of that sample."
    happens = (
        "The shape is right but the order is not: masks of one sample reach heads of the other, and both samples "
        "put weight on keys that their own mask hides. Nothing complains."
    )
    why = (
        "Heads are folded into the batch with the sample as the outer index: row i * num_heads + j is head j of "
        "sample i."
    )
    places = (
        Place(functional.split_heads, "return x.unflatten"),
        Place(resolve_masks, "bias.unflatten(0, (batch, heads))"),
    )
    instead = "Use repeat_interleave(num_heads, dim=0), which keeps the heads of one sample together."
    issues = ("pytorch/pytorch#64706", "pytorch/pytorch#28884")

    def wrong(self) -> Tensor:
        hide = torch.zeros(2, 3, 3, dtype=torch.bool)
        hide[0, :, 2] = True  # sample 0 may not look at its last key
        hide[1, :, 0] = True  # sample 1 may not look at its first
        x = torch.randn(2, 3, 8)
        attention = nn.MultiheadAttention(8, 2, batch_first=True)
        _, weights = attention(x, x, x, attn_mask=hide.repeat(2, 1, 1))
        print("weights of the first query of each sample:")
        print(weights[:, 0].detach())
        return weights[hide]

    def right(self) -> Tensor:
        hide = torch.zeros(2, 3, 3, dtype=torch.bool)
        hide[0, :, 2] = True  # sample 0 may not look at its last key
        hide[1, :, 0] = True  # sample 1 may not look at its first
        x = torch.randn(2, 3, 8)
        attention = nn.MultiheadAttention(8, 2, batch_first=True)
        _, weights = attention(x, x, x, attn_mask=hide.repeat_interleave(2, dim=0))
        print("weights of the first query of each sample:")
        print(weights[:, 0].detach())
        return weights[hide]

    def holds(self, wrong: Tensor) -> bool:
        return bool((wrong > 0).all())

    def helps(self, right: Tensor) -> bool:
        return bool((right == 0).all())


class PaddedQueriesCarryNumbers(Trap):
    """Padded queries still produce numbers, which mean nothing."""

    number = 27
    name = "padded_queries_carry_numbers"
    severity = Severity.WRONG_NUMBERS
    concerns = PADDING_MASKS
    expects = "A sentence has the same mean whether or not it is padded."
    happens = "The mean changes with the amount of padding, because the outputs at padded positions are included."
    why = (
        "The mask is broadcast over the queries, so it hides columns of the weights but never a row. A padded token "
        "asks its question like any other and gets an answer."
    )
    places = (Place(resolve_masks, ".view(batch, 1, 1, key_len)"),)
    instead = "Average, compare and compute the loss over real positions only."
    issues = ("pytorch/pytorch#41508",)

    def wrong(self) -> float:
        layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True).eval()
        sentence = torch.randn(1, 4, 12)
        padded = torch.cat([sentence, torch.zeros(1, 3, 12)], dim=1)
        is_padding = torch.tensor([[False] * 4 + [True] * 3])
        mean = layer(sentence).mean(dim=1)
        padded_mean = layer(padded, src_key_padding_mask=is_padding).mean(dim=1)
        difference = (mean - padded_mean).abs().max().item()
        print(f"greatest difference of the means: {difference:.2g}")
        return difference

    def right(self) -> float:
        layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True).eval()
        sentence = torch.randn(1, 4, 12)
        padded = torch.cat([sentence, torch.zeros(1, 3, 12)], dim=1)
        is_padding = torch.tensor([[False] * 4 + [True] * 3])
        mean = layer(sentence).mean(dim=1)
        output = layer(padded, src_key_padding_mask=is_padding)
        is_real = ~is_padding[..., None]
        padded_mean = (output * is_real).sum(dim=1) / is_real.sum(dim=1)
        difference = (mean - padded_mean).abs().max().item()
        print(f"greatest difference of the means: {difference:.2g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong > 0.01

    def helps(self, right: float) -> bool:
        return right < 1e-5


class IntegerTgtMask(Trap):
    """An integer tgt_mask ends in an error about overflow."""

    number = 41
    name = "integer_tgt_mask"
    severity = Severity.ERROR
    concerns = ("TransformerDecoder.tgt_mask", "Transformer.tgt_mask")
    expects = "A mask of 0 and 1 is accepted, or rejected by name."
    happens = "The decoder asks whether the mask is causal before it looks at the dtype, and fails while asking."
    why = (
        "To find out, torch builds the causal mask of 0 and -inf in the dtype of yours, and no integer is -inf. The "
        "hand-written version checks the dtype first, with a message that names the argument."
    )
    places = (Place(validation.check_mask_dtype, "if mask.dtype != torch.bool"),)
    instead = "Convert masks of 0 and 1 to bool."
    raises = "without overflow"

    def wrong(self) -> None:
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 3, 20), 1)
        tgt, memory = torch.randn(5, 2, 12), torch.randn(7, 2, 12)
        hide = torch.ones(5, 5, dtype=torch.int64).triu(1)
        decoder(tgt, memory, tgt_mask=hide)

    def right(self) -> Tensor:
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 3, 20), 1)
        tgt, memory = torch.randn(5, 2, 12), torch.randn(7, 2, 12)
        hide = torch.ones(5, 5, dtype=torch.int64).triu(1)
        output = decoder(tgt, memory, tgt_mask=hide.bool())
        print(tuple(output.shape))
        return output

    def helps(self, right: Tensor) -> bool:
        return bool(right.isfinite().all())


class EmptyBatchWithPadding(Trap):
    """An empty batch with a padding mask fails in training."""

    number = 44
    name = "empty_batch_with_padding"
    severity = Severity.ERROR
    concerns = PADDING_MASKS
    expects = "A batch without samples gives an output without samples, as it does without the mask."
    happens = (
        "It works in eval mode without gradients, and without a padding mask. In training it is an error about a "
        "reshape, which strikes where batches are filtered or routed and occasionally nothing is left."
    )
    why = (
        "On the path without weights the mask is reshaped to (batch, num_heads, -1, key_len), and in a tensor "
        "without elements -1 could be any number. The hand-written version spells out every size of the reshape."
    )
    places = (Place(resolve_masks, ".view(batch, 1, 1, key_len)"),)
    instead = "Skip the layer when the batch is empty."
    raises = "cannot reshape tensor of 0 elements"

    def wrong(self) -> None:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
        x, is_padding = torch.randn(0, 5, 12), torch.zeros(0, 5, dtype=torch.bool)
        print("without a mask:", tuple(layer(x).shape))
        with torch.no_grad():
            output = layer.eval()(x, src_key_padding_mask=is_padding)
        print("in eval without gradients:", tuple(output.shape))
        layer.train()(x, src_key_padding_mask=is_padding)

    def right(self) -> tuple[int, ...]:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
        x, is_padding = torch.randn(0, 5, 12), torch.zeros(0, 5, dtype=torch.bool)
        output = layer(x, src_key_padding_mask=is_padding) if len(x) else x
        print(tuple(output.shape))
        return tuple(output.shape)

    def helps(self, right: tuple[int, ...]) -> bool:
        return right == (0, 5, 12)


TRAPS: tuple[type[Trap], ...] = (
    MaskPolarity,
    FullyMaskedRow,
    PaddingMaskBatchFirst,
    FloatMaskAdded,
    SquareSubsequentFloat32,
    Mask3dOrder,
    PaddedQueriesCarryNumbers,
    IntegerTgtMask,
    EmptyBatchWithPadding,
)
