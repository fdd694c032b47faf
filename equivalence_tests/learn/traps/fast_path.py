"""The fused fast path: in eval without gradients torch runs other code, with other answers."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.traps.entry import Severity, Trap
from equivalence_tests.learn.traps.operations import inner_operations
from scratch import TransformerEncoder, TransformerEncoderLayer, functional, masks, sdpa

__all__ = ["TRAPS"]

# In one sentence, when it is taken: read off torch/nn/modules/transformer.py.
WHEN = (
    "The fast path is taken in eval without gradients, with batch_first=True, an even number of heads, biases, and ReLU "
    "or GELU."
)


class FastPathPadding(Trap):
    """In eval mode without gradients, an encoder outputs 0 at padded positions."""

    number = 16
    name = "fast_path_padding"
    severity = Severity.WRONG_NUMBERS
    concerns = ("TransformerEncoder.src_key_padding_mask", "enable_nested_tensor", "mask_check", "batch_first")
    expects = "eval() gives one answer, with or without gradients."
    happens = "Anything that averages over all positions gives a different answer under no_grad."
    why = (
        "The encoder packs the real tokens into a nested tensor, runs the fused layers on it and fills the rest "
        f"with zeros. {WHEN} It only packs when the padding is at the end, norm_first is False and no other mask is "
        "given. The hand-written version has a single path."
    )
    places = (Place(TransformerEncoder.forward, "for layer in self.layers"),)
    instead = (
        "Read real positions only: there the two agree to rounding. Or switch the fast path off with "
        "torch.backends.mha.set_fastpath_enabled(False)."
    )
    issues = ("pytorch/pytorch#86120", "pytorch/pytorch#97111")
    since = "1.13"

    def wrong(self) -> float:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
        encoder = nn.TransformerEncoder(layer, num_layers=2).eval()
        x = torch.randn(2, 5, 12)
        is_padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        plain = encoder(x, src_key_padding_mask=is_padding).detach()
        with torch.no_grad():
            fast = encoder(x, src_key_padding_mask=is_padding)
        print("a padded place, with gradients:", plain[1, 4, :4])
        print("the same under no_grad:        ", fast[1, 4, :4])
        difference = (plain.mean(dim=1) - fast.mean(dim=1)).abs().max().item()
        print(f"greatest difference of the means: {difference:.2g}")
        return difference

    def right(self) -> float:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
        encoder = nn.TransformerEncoder(layer, num_layers=2).eval()
        x = torch.randn(2, 5, 12)
        is_padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        plain = encoder(x, src_key_padding_mask=is_padding).detach()
        with torch.no_grad():
            fast = encoder(x, src_key_padding_mask=is_padding)
        difference = (plain - fast)[~is_padding].abs().max().item()
        print(f"greatest difference at real places: {difference:.2g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong > 0.01

    def helps(self, right: float) -> bool:
        return right < 1e-5


class FastPathSlowerOnCpu(Trap):
    """On CPU, the fast path writes out all attention weights."""

    number = 17
    name = "fast_path_slower_on_cpu"
    severity = Severity.SLOW
    concerns = ("batch_first",)
    expects = "The fast path uses the fastest attention available."
    happens = (
        "Inside the one fused operation are two products with a softmax between them, storing one number per head, "
        "query and key. The plain path calls a kernel that never stores them."
    )
    why = f"The fast path is older than scaled_dot_product_attention and was never moved over to it on CPU. {WHEN}"
    places = (Place(functional.attention, "weights = softmax"),)
    instead = (
        "Measure at your own sizes with the switch on and off. When it is off, the kernel that stores no weights runs."
    )
    issues = ("pytorch/pytorch#94428", "pytorch/pytorch#91305")
    since = "1.12"

    def wrong(self) -> set[str]:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True).eval()
        x = torch.randn(2, 5, 12)
        with torch.no_grad():
            called = inner_operations(lambda: layer(x))
        print("one fused layer:", "_transformer_encoder_layer_fwd" in called)
        print("weights written out:", "_softmax" in called)
        fused = [name for name in called if "scaled_dot_product" in name]
        print("fused attention:", *(sorted(fused) or ["none"]))
        return called

    def right(self) -> set[str]:
        torch.backends.mha.set_fastpath_enabled(False)
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True).eval()
        x = torch.randn(2, 5, 12)
        with torch.no_grad():
            called = inner_operations(lambda: layer(x))
        print("one fused layer:", "_transformer_encoder_layer_fwd" in called)
        print("weights written out:", "_softmax" in called)
        fused = [name for name in called if "scaled_dot_product" in name]
        print("fused attention:", *(sorted(fused) or ["none"]))
        return called

    def holds(self, wrong: set[str]) -> bool:
        return "_softmax" in wrong and "_scaled_dot_product_flash_attention_for_cpu" not in wrong

    def helps(self, right: set[str]) -> bool:
        return "_softmax" not in right and "_scaled_dot_product_flash_attention_for_cpu" in right


class NestedTensorWarning(Trap):
    """nn.Transformer() warns about its own defaults."""

    number = 18
    name = "nested_tensor_warning"
    severity = Severity.SURPRISING
    concerns = ("enable_nested_tensor", "norm_first", "batch_first", "nhead")
    expects = "Defaults do not warn."
    happens = (
        "A warning about an argument that nobody passed. norm_first=True, an odd number of heads, bias=False and "
        "other activations trigger it too."
    )
    why = "enable_nested_tensor=True is the default, and the layer's other defaults rule it out."
    places = (Place(TransformerEncoder.__init__, "if enable_nested_tensor"),)
    instead = (
        "Pass batch_first=True if that is how your data is laid out, or build the encoder with "
        "enable_nested_tensor=False."
    )
    issues = ("pytorch/pytorch#137173", "pytorch/pytorch#138552")
    warns = "enable_nested_tensor is True, but self.use_nested_tensor is False"

    def wrong(self) -> None:
        nn.Transformer(12, 2, num_encoder_layers=1, num_decoder_layers=1)

    def right(self) -> list[nn.Module]:
        model = nn.Transformer(12, 2, 1, 1, batch_first=True)
        layer = nn.TransformerEncoderLayer(12, 3, norm_first=True)
        encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        print("no warning")
        return [model, encoder]

    def helps(self, right: list[nn.Module]) -> bool:
        return len(right) == 2


class AllKeysPaddedFastPath(Trap):
    """A sample that is all padding is NaN in eval mode without gradients."""

    number = 28
    name = "all_keys_padded_fast_path"
    severity = Severity.WRONG_NUMBERS
    concerns = ("TransformerEncoderLayer.src_key_padding_mask", "TransformerEncoder.src_key_padding_mask")
    expects = "What was finite in training is finite in evaluation."
    happens = "All outputs of that sample are NaN; the other sample is unharmed."
    why = (
        f"The fused layer takes a softmax over nothing but -inf. The plain path gives such queries 0. {WHEN} The "
        "hand-written version gives 0 in every mode."
    )
    places = (Place(sdpa.textbook_attention, "open_blind_rows(score_bias)"),)
    instead = "Leave every sample at least one key, and throw away the output of empty samples."
    since = "1.12"

    def wrong(self) -> tuple[list[int], list[int]]:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True).eval()
        x = torch.randn(2, 3, 12)
        is_padding = torch.tensor([[False, False, True], [True, True, True]])
        plain = layer(x, src_key_padding_mask=is_padding)
        with torch.no_grad():
            fast = layer(x, src_key_padding_mask=is_padding)
        nan_plain = plain.isnan().sum(dim=(1, 2)).tolist()
        nan_fast = fast.isnan().sum(dim=(1, 2)).tolist()
        print("NaN in each sample, with gradients:", nan_plain)
        print("NaN in each sample, under no_grad: ", nan_fast)
        return nan_plain, nan_fast

    def right(self) -> tuple[list[int], list[int]]:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True).eval()
        x = torch.randn(2, 3, 12)
        is_padding = torch.tensor([[False, False, True], [True, True, True]])
        is_padding[:, 0] &= ~is_padding.all(dim=-1)
        plain = layer(x, src_key_padding_mask=is_padding)
        with torch.no_grad():
            fast = layer(x, src_key_padding_mask=is_padding)
        nan_plain = plain.isnan().sum(dim=(1, 2)).tolist()
        nan_fast = fast.isnan().sum(dim=(1, 2)).tolist()
        print("NaN in each sample, with gradients:", nan_plain)
        print("NaN in each sample, under no_grad: ", nan_fast)
        return nan_plain, nan_fast

    def holds(self, wrong: tuple[list[int], list[int]]) -> bool:
        return wrong == ([0, 0], [0, 36])

    def helps(self, right: tuple[list[int], list[int]]) -> bool:
        return right == ([0, 0], [0, 0])


class EncoderZeroesPadding(Trap):
    """nn.Transformer answers differently with and without gradients."""

    number = 29
    name = "encoder_zeroes_padding"
    severity = Severity.WRONG_NUMBERS
    concerns = ("Transformer.src_key_padding_mask", "Transformer.memory_key_padding_mask")
    expects = "The source's padding mask is enough, and eval() gives one answer."
    happens = "The output changes under no_grad."
    why = (
        "The decoder looks at padded positions of the memory unless told not to. With gradients they hold numbers; "
        "without, the fast path has put zeros there. Two memories, two answers."
    )
    places = (Place(TransformerEncoder.forward, "for layer in self.layers"),)
    instead = "Pass the source's padding mask a second time, as memory_key_padding_mask."
    since = "1.13"

    def wrong(self) -> float:
        model = nn.Transformer(12, 2, 1, 1, 20, batch_first=True).eval()
        src, tgt = torch.randn(1, 7, 12), torch.randn(1, 5, 12)
        is_padding = torch.tensor([[False] * 4 + [True] * 3])
        plain = model(src, tgt, src_key_padding_mask=is_padding)
        with torch.no_grad():
            fast = model(src, tgt, src_key_padding_mask=is_padding)
        difference = (plain - fast).abs().max().item()
        print(f"difference that no_grad makes: {difference:.2g}")
        return difference

    def right(self) -> float:
        model = nn.Transformer(12, 2, 1, 1, 20, batch_first=True).eval()
        src, tgt = torch.randn(1, 7, 12), torch.randn(1, 5, 12)
        is_padding = torch.tensor([[False] * 4 + [True] * 3])
        names = "src_key_padding_mask", "memory_key_padding_mask"
        padding = dict.fromkeys(names, is_padding)
        plain = model(src, tgt, **padding)
        with torch.no_grad():
            fast = model(src, tgt, **padding)
        difference = (plain - fast).abs().max().item()
        print(f"difference that no_grad makes: {difference:.2g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong > 0.01

    def helps(self, right: float) -> bool:
        return right < 1e-5


class FloatBiasBecomesMask(Trap):
    """In eval mode without gradients, a float bias turns into a hard mask."""

    number = 33
    name = "float_bias_becomes_mask"
    severity = Severity.WRONG_NUMBERS
    concerns = ("src_mask", "TransformerEncoder.mask", "TransformerEncoderLayer.src_key_padding_mask")
    expects = "A bias on the scores, such as a distance penalty, is added in every mode."
    happens = (
        "Under no_grad, the output is that of the bool mask bias != 0. Here each token is left with only itself. A "
        "bias without any 0 gives NaN."
    )
    why = (
        "The fused kernel only knows bool masks and casts whatever it is given. nn.MultiheadAttention steps aside "
        f"for float masks; the layer does not. {WHEN} The hand-written version always adds a float mask."
    )
    places = (
        Place(masks.score_bias_from_module, "module_mask is None"),
        Place(functional.attention, "scores + score_bias"),
    )
    instead = "Switch the fast path off while you use such a bias."
    issues = ("pytorch/pytorch#118628", "pytorch/pytorch#107084")
    since = "2.0"

    def wrong(self) -> tuple[float, float]:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True).eval()
        x, place = torch.randn(2, 5, 12), torch.arange(5.0)
        bias = -0.5 * (place[:, None] - place).abs()  # the farther, the less
        plain = layer(x, src_mask=bias)
        with torch.no_grad():
            fast = layer(x, src_mask=bias)
            masked = layer(x, src_mask=bias != 0)
        difference = (plain - fast).abs().max().item()
        print(f"difference that no_grad makes: {difference:.2g}")
        from_mask = (fast - masked).abs().max().item()
        print(f"difference from the mask bias != 0: {from_mask:.2g}")
        return difference, from_mask

    def right(self) -> tuple[float, float]:
        torch.backends.mha.set_fastpath_enabled(False)
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True).eval()
        x, place = torch.randn(2, 5, 12), torch.arange(5.0)
        bias = -0.5 * (place[:, None] - place).abs()  # the farther, the less
        plain = layer(x, src_mask=bias)
        with torch.no_grad():
            fast = layer(x, src_mask=bias)
            masked = layer(x, src_mask=bias != 0)
        difference = (plain - fast).abs().max().item()
        print(f"difference that no_grad makes: {difference:.2g}")
        from_mask = (fast - masked).abs().max().item()
        print(f"difference from the mask bias != 0: {from_mask:.2g}")
        return difference, from_mask

    def holds(self, wrong: tuple[float, float]) -> bool:
        return wrong[0] > 0.01 and wrong[1] < 1e-5

    def helps(self, right: tuple[float, float]) -> bool:
        return right[0] < 1e-5 and right[1] > 0.01


class ActivationReplacedLater(Trap):
    """An activation set later is used in training but not in evaluation."""

    number = 34
    name = "activation_replaced_later"
    severity = Severity.WRONG_NUMBERS
    concerns = ("activation",)
    expects = "layer.activation is what the layer applies."
    happens = "With gradients it is. Without, the layer still applies the ReLU it was built with."
    why = (
        "The constructor records whether the activation is ReLU or GELU, and the fused path goes by that record. "
        "The hand-written version calls the attribute in every mode."
    )
    places = (Place(TransformerEncoderLayer._ff_block, "self.activation("),)
    instead = "Pass the activation to the constructor. Anything other than ReLU and GELU then keeps the fast path away."
    since = "1.12"

    def wrong(self) -> float:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True).eval()
        layer.activation = F.silu
        x = torch.randn(2, 5, 12)
        plain = layer(x)
        with torch.no_grad():
            fast = layer(x)
        difference = (plain - fast).abs().max().item()
        print(f"difference that no_grad makes: {difference:.2g}")
        return difference

    def right(self) -> float:
        layer = nn.TransformerEncoderLayer(12, 2, 20, 0.1, F.silu, batch_first=True)
        layer.eval()
        x = torch.randn(2, 5, 12)
        plain = layer(x)
        with torch.no_grad():
            fast = layer(x)
        difference = (plain - fast).abs().max().item()
        print(f"difference that no_grad makes: {difference:.2g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong > 0.01

    def helps(self, right: float) -> bool:
        return right < 1e-5


class PartsBypassed(Trap):
    """In eval mode without gradients, a layer does not call its parts."""

    number = 35
    name = "parts_bypassed"
    severity = Severity.WRONG_NUMBERS
    concerns = ("dim_feedforward", "TransformerEncoderLayer.d_model")
    expects = "A linear layer with an adapter in it is used in evaluation just as in training."
    happens = "Without gradients the adapter is skipped: its inner weight is read and the module is never called."
    why = (
        "The fused operation takes linear1.weight, not linear1. It steps aside for hooks, but not for a subclass of "
        "nn.Linear or an overridden _sa_block. The hand-written version calls the parts."
    )
    places = (
        Place(TransformerEncoderLayer._ff_block, "self.linear1("),
        Place(TransformerEncoderLayer._sa_block, "self.self_attn("),
    )
    instead = "Switch the fast path off, or merge the adapter into the weight first."
    issues = ("pytorch/pytorch#118628", "pytorch/pytorch#128413", "pytorch/pytorch#132700")
    since = "1.12"

    def wrong(self) -> float:
        class Adapted(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) + x[..., :1]  # what an adapter adds

        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True).eval()
        layer.linear1 = Adapted(12, 20)
        x = torch.randn(2, 5, 12)
        plain = layer(x)
        with torch.no_grad():
            fast = layer(x)
        difference = (plain - fast).abs().max().item()
        print(f"difference that no_grad makes: {difference:.2g}")
        return difference

    def right(self) -> float:
        class Adapted(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) + x[..., :1]  # what an adapter adds

        torch.backends.mha.set_fastpath_enabled(False)
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True).eval()
        layer.linear1 = Adapted(12, 20)
        x = torch.randn(2, 5, 12)
        plain = layer(x)
        with torch.no_grad():
            fast = layer(x)
        difference = (plain - fast).abs().max().item()
        print(f"difference that no_grad makes: {difference:.2g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong > 0.01

    def helps(self, right: float) -> bool:
        return right < 1e-5


class MaskCheckOff(Trap):
    """mask_check=False with padding in front loses the last tokens."""

    number = 43
    name = "mask_check_off"
    severity = Severity.WRONG_NUMBERS
    concerns = ("mask_check", "TransformerEncoder.src_key_padding_mask")
    expects = "mask_check=False skips a look at the mask and changes no number."
    happens = (
        "Under no_grad, one padded position in front costs the last token: its output is 0. The padding is read in "
        "its place, so the outputs of the other tokens change too."
    )
    why = (
        "To pack the real tokens, torch counts them and takes that many from the start. That is right when the "
        f"padding is at the end. The check notices when it is somewhere else, and then nothing is packed. {WHEN} The "
        "hand-written version never packs."
    )
    places = (Place(TransformerEncoder.forward, "for layer in self.layers"),)
    instead = "Leave mask_check=True, the default, unless all padding is at the end."
    issues = ("pytorch/pytorch#90866",)
    since = "1.13"

    def wrong(self) -> tuple[float, Tensor]:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, mask_check=False).eval()
        x = torch.randn(1, 4, 12)
        is_padding = torch.tensor([[True, False, False, False]])
        plain = encoder(x, src_key_padding_mask=is_padding).detach()
        with torch.no_grad():
            fast = encoder(x, src_key_padding_mask=is_padding)
        print("the last token, with gradients:", plain[0, 3, :4])
        print("the same under no_grad:        ", fast[0, 3, :4])
        difference = (plain - fast)[~is_padding].abs().max().item()
        print(f"greatest difference at real places: {difference:.2g}")
        return difference, fast[0, 3]

    def right(self) -> float:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2).eval()
        x = torch.randn(1, 4, 12)
        is_padding = torch.tensor([[True, False, False, False]])
        plain = encoder(x, src_key_padding_mask=is_padding).detach()
        with torch.no_grad():
            fast = encoder(x, src_key_padding_mask=is_padding)
        difference = (plain - fast)[~is_padding].abs().max().item()
        print(f"greatest difference at real places: {difference:.2g}")
        return difference

    def holds(self, wrong: tuple[float, Tensor]) -> bool:
        difference, last_token = wrong
        return difference > 0.01 and not last_token.any()

    def helps(self, right: float) -> bool:
        return right < 1e-5


TRAPS: tuple[type[Trap], ...] = (
    FastPathPadding,
    FastPathSlowerOnCpu,
    NestedTensorWarning,
    AllKeysPaddedFastPath,
    EncoderZeroesPadding,
    FloatBiasBecomesMask,
    ActivationReplacedLater,
    PartsBypassed,
    MaskCheckOff,
)
