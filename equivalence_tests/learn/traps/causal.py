"""Causal masks: what is_causal does and does not do."""

import torch
from torch import Tensor, nn

from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.traps.entry import Severity, Trap
from equivalence_tests.learn.traps.operations import operations
from scratch import MultiheadAttention, Transformer, TransformerDecoder, masks, transformer, validation
from scratch.attention import resolve_masks
from scratch.validation import attention as attention_doors

__all__ = ["TRAPS"]

CAUSAL_HINTS = (
    "MultiheadAttention.is_causal",
    "TransformerEncoderLayer.is_causal",
    "TransformerEncoder.is_causal",
    "src_is_causal",
    "tgt_is_causal",
    "memory_is_causal",
)
THE_HINT_WINS = Place(resolve_masks, "if is_causal and key_padding_mask is None")


class IsCausalIsAHint(Trap):
    """is_causal is a promise about your mask, and may replace it."""

    number = 3
    name = "is_causal_is_a_hint"
    severity = Severity.WRONG_NUMBERS
    concerns = CAUSAL_HINTS
    expects = "The mask is applied and made causal as well; or at least the same call with need_weights agrees."
    happens = (
        "Without weights, your mask is thrown away and a plain causal one is used. With weights, your mask counts."
    )
    why = (
        "The hint is there for speed: told that the mask is causal, the kernel need not read it. So without weights "
        "and without padding, the mask is never looked at. On every other path the mask is added and the hint is "
        "dropped."
    )
    places = (THE_HINT_WINS,)
    instead = "Pass is_causal=True only together with exactly the causal mask. For any other mask, leave it off."
    issues = ("pytorch/pytorch#97214", "pytorch/pytorch#131254", "pytorch/pytorch#187413")
    since = "2.0"

    def wrong(self) -> float:
        x = torch.randn(2, 5, 12)
        # Each token may look at itself and the one before.
        hide = ~torch.ones(5, 5, dtype=torch.bool).tril().triu(-1)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        masks = {"attn_mask": hide, "is_causal": True}
        output, weights = attention(x, x, x, **masks)
        without, _ = attention(x, x, x, **masks, need_weights=False)
        difference = (output - without).abs().max().item()
        print(f"difference that need_weights makes: {difference:.2g}")
        return difference

    def right(self) -> float:
        x = torch.randn(2, 5, 12)
        # Each token may look at itself and the one before.
        hide = ~torch.ones(5, 5, dtype=torch.bool).tril().triu(-1)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        output, weights = attention(x, x, x, attn_mask=hide)
        without, _ = attention(x, x, x, attn_mask=hide, need_weights=False)
        difference = (output - without).abs().max().item()
        print(f"difference that need_weights makes: {difference:.2g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong > 0.01

    def helps(self, right: float) -> bool:
        return right < 1e-5


class IsCausalWithoutMask(Trap):
    """is_causal=True without a mask is an error, or no mask at all."""

    number = 4
    name = "is_causal_without_mask"
    severity = Severity.WRONG_NUMBERS
    concerns = CAUSAL_HINTS
    expects = "A causal mask is applied, as scaled_dot_product_attention does for the argument of the same name."
    happens = (
        "In eval mode, without gradients and with an even number of heads, every token looks at later ones and "
        "nothing complains. In training the same call is an error."
    )
    why = (
        "A hint cannot stand in for the mask it describes. Only the plain path checks for this; the fused path used "
        "in evaluation never sees is_causal. The hand-written version checks once, before any path is chosen."
    )
    places = (Place(attention_doors._check_mask_kinds, "if is_causal and attn_mask is None"),)
    instead = "Pass the mask. The hint is only there to make it faster."
    issues = ("pytorch/pytorch#96941", "pytorch/pytorch#108517", "pytorch/pytorch#99282")
    since = "2.0"

    def wrong(self) -> tuple[Tensor, str]:
        x = torch.randn(1, 4, 12)
        attention = nn.MultiheadAttention(12, 2, batch_first=True)
        attention.eval()
        with torch.no_grad():
            output, weights = attention(x, x, x, is_causal=True)
        print("weights in eval, without gradients:")
        print(weights[0])
        attention.train()
        try:
            attention(x, x, x, is_causal=True)
            message = ""
        except RuntimeError as error:
            message = str(error)
        print("in training:", message)
        return weights[0], message

    def right(self) -> tuple[Tensor, str]:
        x = torch.randn(1, 4, 12)
        causal = torch.ones(4, 4, dtype=torch.bool).triu(1)  # True = may not look
        attention = nn.MultiheadAttention(12, 2, batch_first=True)
        attention.eval()
        with torch.no_grad():
            output, weights = attention(x, x, x, attn_mask=causal, is_causal=True)
        print("weights in eval, without gradients:")
        print(weights[0])
        attention.train()
        attention(x, x, x, attn_mask=causal, is_causal=True)
        print("in training: fine")
        return weights[0], ""

    def holds(self, wrong: tuple[Tensor, str]) -> bool:
        weights, message = wrong
        return bool((weights > 0).all()) and "Need attn_mask" in message

    def helps(self, right: tuple[Tensor, str]) -> bool:
        weights, _ = right
        return not weights.triu(1).any()


class IsCausalWithExtraTokens(Trap):
    """With an appended key, even a truthful is_causal changes the numbers."""

    number = 5
    name = "is_causal_with_extra_tokens"
    severity = Severity.WRONG_NUMBERS
    concerns = ("MultiheadAttention.is_causal", "add_bias_kv", "add_zero_attn")
    expects = "The mask is the causal one, so the hint is true and changes nothing."
    happens = "The output changes. With the mask, every query sees the appended key; with the hint, none does."
    why = (
        "The mask gets an extra column of zeros for the appended key. The hint builds a new mask over all keys, "
        "where the appended key is just another later token."
    )
    places = (THE_HINT_WINS, Place(resolve_masks, "# the appended tokens are always seen"))
    instead = "Leave is_causal off when a key is appended."
    since = "2.0"

    def wrong(self) -> float:
        x = torch.randn(2, 5, 12)
        causal = torch.ones(5, 5, dtype=torch.bool).triu(1)  # True = may not look
        attention = nn.MultiheadAttention(12, 3, batch_first=True, add_bias_kv=True)
        masks = {"attn_mask": causal, "is_causal": True}
        mask_alone, _ = attention(x, x, x, attn_mask=causal)
        output, _ = attention(x, x, x, **masks, need_weights=False)
        difference = (output - mask_alone).abs().max().item()
        print(f"difference that the hint makes: {difference:.2g}")
        return difference

    def right(self) -> float:
        x = torch.randn(2, 5, 12)
        causal = torch.ones(5, 5, dtype=torch.bool).triu(1)  # True = may not look
        attention = nn.MultiheadAttention(12, 3, batch_first=True, add_bias_kv=True)
        output, _ = attention(x, x, x, attn_mask=causal, need_weights=False)
        with_weights, _ = attention(x, x, x, attn_mask=causal)
        difference = (output - with_weights).abs().max().item()
        print(f"difference between with weights and without: {difference:.2g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong > 0.01

    def helps(self, right: float) -> bool:
        return right < 1e-5


class PromiseDropsMask(Trap):
    """With is_causal=True, a mask of any shape gets through unread."""

    number = 40
    name = "promise_drops_mask"
    severity = Severity.SURPRISING
    concerns = ("MultiheadAttention.is_causal", "TransformerEncoderLayer.is_causal", "MultiheadAttention.attn_mask")
    expects = "A mask made for nine tokens is rejected for five."
    happens = "Without weights it is accepted, because it is never used. The same call with weights rejects it."
    why = "The hint is acted on before the mask's shape is checked."
    places = (THE_HINT_WINS, Place(validation.check_attention_inputs, "replaced = "))
    instead = (
        "Build the mask from the length of the input. While debugging, leave the hint off: then shapes are checked."
    )
    issues = ("pytorch/pytorch#131254",)
    since = "2.0"

    def wrong(self) -> str:
        x = torch.randn(2, 5, 12)
        causal = nn.Transformer.generate_square_subsequent_mask(9)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        masks = {"attn_mask": causal, "is_causal": True}
        output, _ = attention(x, x, x, **masks, need_weights=False)
        print("accepted, output", tuple(output.shape))
        return "accepted"

    def right(self) -> str:
        x = torch.randn(2, 5, 12)
        causal = nn.Transformer.generate_square_subsequent_mask(9)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        try:
            attention(x, x, x, attn_mask=causal, need_weights=False)
            answer = "accepted"
        except RuntimeError as error:
            answer = str(error)
        print(answer)
        return answer

    def holds(self, wrong: str) -> bool:
        return wrong == "accepted"

    def helps(self, right: str) -> bool:
        return "shape of the 2D attn_mask" in right


class ZeroAttnAfterCausal(Trap):
    """add_zero_attn appends a key of zeros that no mask reaches."""

    number = 20
    name = "zero_attn_after_causal"
    severity = Severity.SURPRISING
    concerns = ("add_zero_attn", "MultiheadAttention.attn_mask")
    expects = "Under a causal mask the first token sees only itself, with weight 1."
    happens = "It shares its weight with the zeros, which sit in one extra column at the end."
    why = (
        "The zeros are appended after the projection, and the mask gets a column of 'may look' for them. That is "
        "their purpose: a query that may look at nothing else has somewhere to look, and gets 0 instead of NaN."
    )
    places = (
        Place(MultiheadAttention._split, "if self.add_zero_attn"),
        Place(resolve_masks, "# the appended tokens are always seen"),
    )
    instead = "Leave add_zero_attn off unless that is what you want."
    issues = ("pytorch/pytorch#27461",)

    def wrong(self) -> Tensor:
        x = torch.randn(1, 4, 12)
        causal = torch.ones(4, 4, dtype=torch.bool).triu(1)  # True = may not look
        attention = nn.MultiheadAttention(12, 3, batch_first=True, add_zero_attn=True)
        output, weights = attention(x, x, x, attn_mask=causal)
        print(weights[0].detach())
        return weights[0, 0]

    def right(self) -> Tensor:
        x = torch.randn(1, 4, 12)
        causal = torch.ones(4, 4, dtype=torch.bool).triu(1)  # True = may not look
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        output, weights = attention(x, x, x, attn_mask=causal)
        print(weights[0].detach())
        return weights[0, 0]

    def holds(self, wrong: Tensor) -> bool:
        return len(wrong) == 5 and bool(wrong[0] < 0.99) and bool(wrong[-1] > 0.01)

    def helps(self, right: Tensor) -> bool:
        return bool((right == torch.tensor([1.0, 0.0, 0.0, 0.0])).all())


class NotCausalByDefault(Trap):
    """By default, nn.Transformer's decoder looks at later tokens."""

    number = 37
    name = "not_causal_by_default"
    severity = Severity.WRONG_NUMBERS
    concerns = ("Transformer.tgt_mask", "TransformerDecoder.tgt_mask", "TransformerDecoderLayer.tgt_mask")
    expects = "A decoder decodes: a token's output does not depend on later tokens."
    happens = (
        "The output of the first token changes when the last one does. In training, the model reads its own answers."
    )
    why = "No mask is built for you. If tgt_mask is not given, there is no mask."
    places = (Place(Transformer.forward, "self.decoder("), Place(masks.score_bias_from_module, "module_mask is None"))
    instead = "Pass a causal tgt_mask."

    def wrong(self) -> float:
        model = nn.Transformer(12, 2, 1, 1, 20, dropout=0.0, batch_first=True)
        src, tgt = torch.randn(1, 7, 12), torch.randn(1, 5, 12)
        output = model(src, tgt)
        tgt[:, -1] = 0.0  # another last token
        change = (model(src, tgt) - output)[0, 0].abs().max().item()
        print(f"change of the first token's output: {change:.2g}")
        return change

    def right(self) -> float:
        model = nn.Transformer(12, 2, 1, 1, 20, dropout=0.0, batch_first=True)
        src, tgt = torch.randn(1, 7, 12), torch.randn(1, 5, 12)
        causal = torch.ones(5, 5, dtype=torch.bool).triu(1)  # True = may not look
        output = model(src, tgt, tgt_mask=causal)
        tgt[:, -1] = 0.0  # another last token
        change = (model(src, tgt, tgt_mask=causal) - output)[0, 0].abs().max().item()
        print(f"change of the first token's output: {change:.2g}")
        return change

    def holds(self, wrong: float) -> bool:
        return wrong > 0.01

    def helps(self, right: float) -> bool:
        return right == 0


class CausalDetectionSyncs(Trap):
    """The stacks read the mask to see whether it is causal, and wait for it."""

    number = 25
    name = "causal_detection_syncs"
    severity = Severity.SLOW
    concerns = (
        "TransformerEncoder.is_causal",
        "TransformerDecoder.tgt_is_causal",
        "src_is_causal",
        "Transformer.tgt_is_causal",
    )
    expects = "The mask is just another tensor on the device, and Python runs on without waiting."
    happens = (
        "The operations include _local_scalar_dense: a number is copied from the device to Python. On a GPU that "
        "waits for all earlier work, in every forward pass."
    )
    why = "With is_causal=None, the stack compares the mask with a causal one and branches on the answer."
    places = (Place(transformer.is_causal_mask, "torch.equal"), Place(TransformerDecoder.forward, "is_causal_mask("))
    instead = "Say it yourself: is_causal=True or False (tgt_is_causal for a decoder). Then nothing is compared."
    issues = ("pytorch/pytorch#101487", "pytorch/pytorch#91171")

    def wrong(self) -> list[str]:
        layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        src = torch.randn(2, 5, 12)
        causal = torch.ones(5, 5, dtype=torch.bool).triu(1)  # True = may not look
        called = operations(lambda: encoder(src, mask=causal))
        print("reads the mask:", "_local_scalar_dense" in called)
        return called

    def right(self) -> list[str]:
        layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        src = torch.randn(2, 5, 12)
        causal = torch.ones(5, 5, dtype=torch.bool).triu(1)  # True = may not look
        called = operations(lambda: encoder(src, mask=causal, is_causal=True))
        print("reads the mask:", "_local_scalar_dense" in called)
        return called

    def holds(self, wrong: list[str]) -> bool:
        return "_local_scalar_dense" in wrong

    def helps(self, right: list[str]) -> bool:
        return bool(right) and "_local_scalar_dense" not in right


TRAPS: tuple[type[Trap], ...] = (
    IsCausalIsAHint,
    IsCausalWithoutMask,
    IsCausalWithExtraTokens,
    ZeroAttnAfterCausal,
    CausalDetectionSyncs,
    NotCausalByDefault,
    PromiseDropsMask,
)
