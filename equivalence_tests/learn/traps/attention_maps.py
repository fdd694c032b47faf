"""Attention weights: what it costs to ask for them, and what one gets."""

import torch
from torch import Tensor, nn

from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.traps.entry import Severity, Trap
from equivalence_tests.learn.traps.operations import operations
from scratch import MultiheadAttention, TransformerEncoderLayer, functional
from scratch.attention import attend_with_weights
from scratch.recording import record_attention

__all__ = ["TRAPS"]


class NeedWeightsSlowPath(Trap):
    """Weights are returned by default, which rules out the fused kernel."""

    number = 10
    name = "need_weights_slow_path"
    severity = Severity.SLOW
    concerns = ("need_weights",)
    expects = "The plain call is the fast call."
    happens = (
        "The operations include bmm, _softmax and bmm: the scores are written out, one number per head, query and "
        "key. Without weights, one fused operation does all three and never stores the scores."
    )
    why = (
        "The weights have to exist before they can be returned. The hand-written version takes one path in both "
        "cases; only what it returns differs."
    )
    places = (
        Place(functional.attention, "weights = softmax"),
        Place(attend_with_weights, "context, weights = weigh"),
    )
    instead = "Pass need_weights=False wherever you throw the weights away, as torch's own layers do."
    issues = ("pytorch/pytorch#100347", "pytorch/pytorch#99878")
    since = "2.0"

    def wrong(self) -> list[str]:
        x = torch.randn(2, 5, 12)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        called = operations(lambda: attention(x, x, x)[0])
        print(len(called), "operations:", *called)
        return called

    def right(self) -> list[str]:
        x = torch.randn(2, 5, 12)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        called = operations(lambda: attention(x, x, x, need_weights=False)[0])
        print(len(called), "operations:", *called)
        return called

    def holds(self, wrong: list[str]) -> bool:
        return "_softmax" in wrong and not any("scaled_dot_product" in name for name in wrong)

    def helps(self, right: list[str]) -> bool:
        return "_softmax" not in right and any("scaled_dot_product" in name for name in right)


class WeightsAveraged(Trap):
    """The weights come back averaged over the heads."""

    number = 11
    name = "weights_averaged"
    severity = Severity.SURPRISING
    concerns = ("average_attn_weights", "need_weights")
    expects = "One map for each head."
    happens = (
        "One map for all heads. A head that looks at one key and a head that looks at another appear as two heads "
        "that look at both."
    )
    why = "average_attn_weights defaults to True, so the maps are averaged as the very last step."
    places = (Place(MultiheadAttention.forward, "weights.mean(dim=1)"),)
    instead = "Pass average_attn_weights=False."
    issues = ("pytorch/pytorch#34537", "pytorch/pytorch#32590")

    def wrong(self) -> tuple[int, ...]:
        query, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        output, weights = attention(query, memory, memory)
        print("shape of the weights:", tuple(weights.shape))
        return tuple(weights.shape)

    def right(self) -> tuple[int, ...]:
        query, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        inputs = query, memory, memory
        output, weights = attention(*inputs, average_attn_weights=False)
        print("shape of the weights:", tuple(weights.shape))
        return tuple(weights.shape)

    def holds(self, wrong: tuple[int, ...]) -> bool:
        return wrong == (2, 5, 7)

    def helps(self, right: tuple[int, ...]) -> bool:
        return right == (2, 3, 5, 7)


class WeightsAfterDropout(Trap):
    """In training, the returned weights have been through dropout."""

    number = 12
    name = "weights_after_dropout"
    severity = Severity.SURPRISING
    concerns = ("MultiheadAttention.dropout", "need_weights")
    expects = "Weights are a distribution over the keys, so each row sums to 1."
    happens = "Some weights are 0 and the others are scaled up; the sums land on either side of 1."
    why = (
        "Dropout is applied to the weights before they multiply the values, and the weights are returned as they "
        "were used."
    )
    places = (Place(functional.attention, "F.dropout"), Place(attend_with_weights, "context, weights = weigh"))
    instead = (
        "Look at the maps in eval mode. To see them during training, use record_attention, which gives them before "
        "dropout, for torch.nn too."
    )
    issues = ("pytorch/pytorch#42929", "pytorch/pytorch#33360")

    def wrong(self) -> Tensor:
        x = torch.randn(1, 5, 12)
        attention = nn.MultiheadAttention(12, 3, dropout=0.3, batch_first=True)
        output, weights = attention(x, x, x)
        sums = weights.sum(dim=-1).detach()
        print("sum of each row:", sums)
        return sums

    def right(self) -> Tensor:
        x = torch.randn(1, 5, 12)
        attention = nn.MultiheadAttention(12, 3, dropout=0.3, batch_first=True)
        with record_attention(attention) as maps:
            attention(x, x, x)  # still in training, still with dropout
        sums = maps[""].sum(dim=-1)
        print("sum of each row, head by head:", sums, sep="\n")
        return sums

    def holds(self, wrong: Tensor) -> bool:
        return bool((wrong - 1).abs().max() > 0.01)

    def helps(self, right: Tensor) -> bool:
        return torch.allclose(right, torch.ones_like(right))


class NoMapsFromLayers(Trap):
    """A layer never returns attention maps, not even to a hook."""

    number = 23
    name = "no_maps_from_layers"
    severity = Severity.SURPRISING
    concerns = ("need_weights", "average_attn_weights", "encoder_layer", "decoder_layer")
    expects = "A hook on self_attn sees the weights."
    happens = "It sees None: the layer calls its attention with need_weights=False, and no argument changes that."
    why = "A layer only needs the output, and without weights the fused kernel can run."
    places = (Place(TransformerEncoderLayer._sa_block, "self.self_attn("),)
    instead = "record_attention computes the maps alongside the unchanged call, one per head, for torch.nn as well."
    issues = ("pytorch/pytorch#99304", "pytorch/pytorch#88810")

    def wrong(self) -> Tensor | None:
        layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)
        seen = []
        layer.self_attn.register_forward_hook(lambda *call: seen.append(call))
        layer(torch.randn(2, 5, 12))
        module, args, (output, weights) = seen[0]
        print("weights:", weights)
        return weights

    def right(self) -> Tensor | None:
        layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)
        with record_attention(layer) as maps:
            layer(torch.randn(2, 5, 12))
        print(maps)
        return maps["self_attn"]

    def holds(self, wrong: Tensor | None) -> bool:
        return wrong is None

    def helps(self, right: Tensor | None) -> bool:
        return right is not None and right.shape == (2, 3, 5, 5)


TRAPS: tuple[type[Trap], ...] = (NeedWeightsSlowPath, WeightsAveraged, WeightsAfterDropout, NoMapsFromLayers)
