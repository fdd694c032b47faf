"""Parameters: how they start, under which names they are kept, and who calls them."""

import copy

import torch
from torch import Tensor, nn

from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.traps.entry import Severity, Trap
from scratch import MultiheadAttention, Transformer, TransformerEncoder, TransformerEncoderLayer
from scratch.attention import InProjection

__all__ = ["TRAPS"]


class PackedInit(Trap):
    """A packed projection starts smaller than three separate ones."""

    number = 13
    name = "packed_init"
    severity = Severity.SURPRISING
    concerns = ("embed_dim", "kdim", "vdim", "MultiheadAttention.bias")
    expects = "Projections start alike, packed or not: xavier_uniform_ of (embed_dim, embed_dim)."
    happens = (
        "With kdim, the projections are three matrices. Packed, they are one matrix three times as tall, whose "
        "spread is smaller by the square root of 2. All biases start at exactly 0, so a forgotten bias goes "
        "unnoticed."
    )
    why = (
        "xavier_uniform_ draws from +-sqrt(6 / (rows + columns)): sqrt(6 / 4e) for the packed matrix, sqrt(6 / 2e) "
        "for each of three. The same seed must give the same model, so the hand-written version does the same."
    )
    places = (
        Place(MultiheadAttention._register_parameters, 'register("in_proj_weight"'),
        Place(MultiheadAttention._reset_parameters, "for weight in"),
    )
    instead = "Initialise each third separately if you compare with an implementation that has three matrices."
    issues = ("pytorch/pytorch#166378", "pytorch/pytorch#171409")

    def wrong(self) -> float:
        packed = nn.MultiheadAttention(128, 8)
        separate = nn.MultiheadAttention(128, 8, kdim=129)
        packed_spread = packed.in_proj_weight[:128].std().item()
        separate_spread = separate.q_proj_weight.std().item()
        print(f"spread of the query projection, packed:   {packed_spread:.4f}")
        print(f"spread of the query projection, separate: {separate_spread:.4f}")
        print("greatest bias:", packed.in_proj_bias.abs().max().item())
        return separate_spread / packed_spread

    def right(self) -> float:
        packed = nn.MultiheadAttention(128, 8)
        separate = nn.MultiheadAttention(128, 8, kdim=129)
        for third in packed.in_proj_weight.chunk(3):
            nn.init.xavier_uniform_(third)
        packed_spread = packed.in_proj_weight[:128].std().item()
        separate_spread = separate.q_proj_weight.std().item()
        print(f"spread of the query projection, packed:   {packed_spread:.4f}")
        print(f"spread of the query projection, separate: {separate_spread:.4f}")
        return separate_spread / packed_spread

    def holds(self, wrong: float) -> bool:
        return 1.38 < wrong < 1.45

    def helps(self, right: float) -> bool:
        return 0.97 < right < 1.03


class StateDictForks(Trap):
    """With kdim or vdim, three other weights replace the packed one."""

    number = 14
    name = "state_dict_forks"
    severity = Severity.ERROR
    concerns = ("kdim", "vdim", "bias")
    expects = "in_proj_weight exists and can be cut into three."
    happens = (
        "With kdim or vdim it is None: the weights are q_proj_weight, k_proj_weight and v_proj_weight, next to a "
        "bias that is still packed. And bias=False drops out_proj.bias too."
    )
    why = "One matrix can hold all three projections only if they read vectors of the same width."
    places = (
        Place(MultiheadAttention._register_parameters, 'register("in_proj_weight"'),
        Place(MultiheadAttention._register_parameters, 'register("q_proj_weight"'),
        Place(MultiheadAttention._register_parameters, 'register("in_proj_bias"'),
        Place(InProjection.each, "weights = self.weights if"),
    )
    instead = "Check which form it is. This project's copy_weights handles both, in both directions."
    raises = "'NoneType' object has no attribute 'chunk'"

    def wrong(self) -> None:
        for arguments in ({}, {"kdim": 7, "vdim": 5}, {"bias": False}):
            attention = nn.MultiheadAttention(12, 3, **arguments)
            print(arguments, "->", *attention.state_dict())
        attention = nn.MultiheadAttention(12, 3, kdim=7, vdim=5)
        query_weight, key_weight, value_weight = attention.in_proj_weight.chunk(3)

    def right(self) -> list[tuple[int, ...]]:
        attention = nn.MultiheadAttention(12, 3, kdim=7, vdim=5)
        if attention.in_proj_weight is not None:
            q, k, v = attention.in_proj_weight.chunk(3)
        else:
            q = attention.q_proj_weight
            k = attention.k_proj_weight
            v = attention.v_proj_weight
        print("shapes:", tuple(q.shape), tuple(k.shape), tuple(v.shape))
        return [tuple(q.shape), tuple(k.shape), tuple(v.shape)]

    def helps(self, right: list[tuple[int, ...]]) -> bool:
        return right == [(12, 12), (12, 7), (12, 5)]


class OutProjNeverCalled(Trap):
    """out_proj is never called: hooks and adapters on it do not run."""

    number = 15
    name = "out_proj_never_called"
    severity = Severity.WRONG_NUMBERS
    concerns = ("embed_dim",)
    expects = "A module runs when its parent does, and so do the hooks on it."
    happens = "The hook never runs. An adapter that replaces or wraps out_proj trains nothing."
    why = (
        "torch.nn takes out_proj.weight and out_proj.bias and multiplies by them in a function of its own. The "
        "hand-written version calls out_proj."
    )
    places = (Place(MultiheadAttention.forward, "self.out_proj("),)
    instead = "Hook the attention itself. If you need out_proj to be a module that runs, use scratch's."
    issues = ("huggingface/peft#761", "helicalAI/helical#405")

    def wrong(self) -> int:
        calls = []
        x = torch.randn(2, 5, 12)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        attention.out_proj.register_forward_hook(lambda *_: calls.append(1))
        attention(x, x, x)
        print("calls of the hook:", len(calls))
        return len(calls)

    def right(self) -> int:
        calls = []
        x = torch.randn(2, 5, 12)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        attention.register_forward_hook(lambda *_: calls.append(1))
        attention(x, x, x)
        print("calls of the hook:", len(calls))
        return len(calls)

    def holds(self, wrong: int) -> bool:
        return wrong == 0

    def helps(self, right: int) -> bool:
        return right == 1


class BiasKvIsAToken(Trap):
    """add_bias_kv adds no bias: it appends a learnt key and value."""

    number = 19
    name = "bias_kv_is_a_token"
    severity = Severity.SURPRISING
    concerns = ("add_bias_kv",)
    expects = "The projections of key and value get a bias."
    happens = "The weights have one more column than there are keys: a learnt token that every query can look at."
    why = "bias_k and bias_v are appended to the projected keys and values, once per sample."
    places = (Place(MultiheadAttention._split, "if self.bias_k is not None"),)
    instead = "The bias of the projections is bias=True, which is the default."

    def wrong(self) -> tuple[int, ...]:
        query, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
        attention = nn.MultiheadAttention(12, 3, add_bias_kv=True, batch_first=True)
        output, weights = attention(query, memory, memory)
        print("7 keys; shape of the weights:", tuple(weights.shape))
        return tuple(weights.shape)

    def right(self) -> tuple[int, ...]:
        query, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
        attention = nn.MultiheadAttention(12, 3, bias=True, batch_first=True)
        output, weights = attention(query, memory, memory)
        print("7 keys; shape of the weights:", tuple(weights.shape))
        print("bias of the projections:", tuple(attention.in_proj_bias.shape))
        return tuple(weights.shape)

    def holds(self, wrong: tuple[int, ...]) -> bool:
        return wrong == (2, 5, 8)

    def helps(self, right: tuple[int, ...]) -> bool:
        return right == (2, 5, 7)


class ClonesStartIdentical(Trap):
    """All layers of a stack start with the same weights."""

    number = 21
    name = "clones_start_identical"
    severity = Severity.SURPRISING
    concerns = ("encoder_layer", "decoder_layer", "TransformerEncoder.num_layers", "TransformerDecoder.num_layers")
    expects = "Six layers, each with its own random weights."
    happens = (
        "The weights of the first layer equal those of the last. And the layer that was passed in is none of them."
    )
    why = (
        "The stack makes deep copies, random numbers included. nn.Transformer draws new ones afterwards; the stacks "
        "do not."
    )
    places = (
        Place(TransformerEncoder.__init__, "copy.deepcopy"),
        Place(Transformer._reset_parameters, "for parameter in"),
    )
    instead = "Draw the weights again after building the stack, as nn.Transformer does."
    issues = ("pytorch/pytorch#72253", "pytorch/pytorch#86274", "pytorch/pytorch#120396")

    def wrong(self) -> bool:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
        encoder = nn.TransformerEncoder(layer, num_layers=6)
        first, *others = (layer.linear1.weight for layer in encoder.layers)
        same = all(torch.equal(first, other) for other in others)
        print("all layers have the same weights:", same)
        return same

    def right(self) -> bool:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
        encoder = nn.TransformerEncoder(layer, num_layers=6)
        for parameter in encoder.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        first, *others = (layer.linear1.weight for layer in encoder.layers)
        same = all(torch.equal(first, other) for other in others)
        print("all layers have the same weights:", same)
        return same

    def holds(self, wrong: bool) -> bool:
        return wrong

    def helps(self, right: bool) -> bool:
        return not right


class FinalNormPostNorm(Trap):
    """nn.Transformer adds a final LayerNorm that a bare stack does not have."""

    number = 22
    name = "final_norm_post_norm"
    severity = Severity.WRONG_NUMBERS
    concerns = ("norm", "norm_first", "num_encoder_layers", "num_decoder_layers", "custom_encoder", "custom_decoder")
    expects = "The encoder of nn.Transformer is the same as a TransformerEncoder with as many layers."
    happens = (
        "Its state_dict has two more keys, norm.weight and norm.bias. Without them the outputs differ: barely at "
        "the start, where the second LayerNorm changes nothing, and a lot after training, which random gains stand "
        "for here."
    )
    why = (
        "A final norm is needed with norm_first, where nothing else normalises the last sum. torch adds it in both "
        "cases."
    )
    places = (Place(Transformer.__init__, "custom_encoder = "), Place(TransformerEncoder.forward, "self.norm is None"))
    instead = "Pass norm=nn.LayerNorm(d_model) to a stack that takes its weights from nn.Transformer."
    issues = ("pytorch/pytorch#55270",)

    def wrong(self) -> float:
        model = nn.Transformer(12, 2, 1, 1, 20, dropout=0.0, batch_first=True)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        layer = nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 1)
        print(encoder.load_state_dict(model.encoder.state_dict(), strict=False))
        x = torch.randn(2, 5, 12)
        difference = (encoder(x) - model.encoder(x)).abs().max().item()
        print(f"greatest difference: {difference:.2g}")
        return difference

    def right(self) -> float:
        model = nn.Transformer(12, 2, 1, 1, 20, dropout=0.0, batch_first=True)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        layer = nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(12))
        print(encoder.load_state_dict(model.encoder.state_dict()))
        x = torch.randn(2, 5, 12)
        difference = (encoder(x) - model.encoder(x)).abs().max().item()
        print(f"greatest difference: {difference:.2g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong > 0.01

    def helps(self, right: float) -> bool:
        return right == 0


class CustomEncoderRedrawn(Trap):
    """nn.Transformer overwrites the weights of a custom encoder."""

    number = 51
    name = "custom_encoder_redrawn"
    severity = Severity.WRONG_NUMBERS
    concerns = ("custom_encoder", "custom_decoder")
    expects = "A trained encoder that is passed in stays trained."
    happens = "All its matrices are random again, also in the encoder that you hold, because it is the same object."
    why = "The constructor ends with xavier_uniform_ on every parameter with two or more axes, whoever made it."
    places = (Place(Transformer._reset_parameters, "for parameter in"),)
    instead = (
        "Load the weights after building. Keep a copy until then: state_dict() refers to the very tensors that are "
        "overwritten."
    )

    def wrong(self) -> bool:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
        trained = nn.TransformerEncoder(layer, num_layers=1)
        before = trained.layers[0].linear1.weight.detach().clone()
        model = nn.Transformer(12, 2, custom_encoder=trained, batch_first=True)
        kept = torch.equal(model.encoder.layers[0].linear1.weight, before)
        print("the encoder's weights were kept:", kept)
        return kept

    def right(self) -> bool:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
        trained = nn.TransformerEncoder(layer, num_layers=1)
        before = copy.deepcopy(trained.state_dict())
        model = nn.Transformer(12, 2, custom_encoder=trained, batch_first=True)
        model.encoder.load_state_dict(before)
        weight = model.encoder.layers[0].linear1.weight
        kept = torch.equal(weight, before["layers.0.linear1.weight"])
        print("the encoder's weights were kept:", kept)
        return kept

    def holds(self, wrong: bool) -> bool:
        return not wrong

    def helps(self, right: bool) -> bool:
        return right


class LayerKeptBesideStack(Trap):
    """The layer a stack is made from is not in it: kept around, it is dead weight."""

    number = 52
    name = "layer_kept_beside_stack"
    severity = Severity.SURPRISING
    concerns = ("encoder_layer", "decoder_layer")
    expects = "self.layer is a layer of the model and trains with it."
    happens = (
        "It takes no part: its parameters get no gradient, yet they sit in the state_dict and in every parameter "
        "count. DistributedDataParallel stops at such parameters unless told to look for them."
    )
    why = "The stack makes copies. The original is not needed any more."
    places = (Place(TransformerEncoder.__init__, "copy.deepcopy"),)
    instead = "Keep the layer in a local variable."

    def wrong(self) -> int:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
                self.encoder = nn.TransformerEncoder(self.layer, num_layers=2)

            def forward(self, x: Tensor) -> Tensor:
                return self.encoder(x)

        model = Model()
        model(torch.randn(2, 5, 12)).sum().backward()
        idle = [name for name, p in model.named_parameters() if p.grad is None]
        print(len(idle), "parameters without a gradient:", *idle[:2], "...")
        return len(idle)

    def right(self) -> int:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
                self.encoder = nn.TransformerEncoder(layer, num_layers=2)

            def forward(self, x: Tensor) -> Tensor:
                return self.encoder(x)

        model = Model()
        model(torch.randn(2, 5, 12)).sum().backward()
        idle = [name for name, p in model.named_parameters() if p.grad is None]
        print(len(idle), "parameters without a gradient")
        return len(idle)

    def holds(self, wrong: int) -> bool:
        return wrong == 12

    def helps(self, right: int) -> bool:
        return right == 0


class FeedForwardStaysWide(Trap):
    """dim_feedforward is 2048, whatever d_model is."""

    number = 53
    name = "feed_forward_stays_wide"
    severity = Severity.SURPRISING
    concerns = ("d_model", "dim_feedforward")
    expects = "The inner width follows d_model: four times as wide, as in the paper."
    happens = "A layer of width 64 has an inner width 32 times as large, and nearly all of its parameters are there."
    why = "The default is the paper's number, 2048 = 4 * 512, not its ratio."
    places = (Place(TransformerEncoderLayer.__init__, "self.linear1 ="),)
    instead = "Pass dim_feedforward together with d_model."

    def wrong(self) -> float:
        layer = nn.TransformerEncoderLayer(d_model=64, nhead=4)
        parts = layer.linear1, layer.linear2
        inner = sum(p.numel() for part in parts for p in part.parameters())
        share = inner / sum(p.numel() for p in layer.parameters())
        print("linear1:", layer.linear1)
        print(f"{share:.0%} of the parameters are in linear1 and linear2")
        return share

    def right(self) -> float:
        layer = nn.TransformerEncoderLayer(64, 4, dim_feedforward=4 * 64)
        parts = layer.linear1, layer.linear2
        inner = sum(p.numel() for part in parts for p in part.parameters())
        share = inner / sum(p.numel() for p in layer.parameters())
        print("linear1:", layer.linear1)
        print(f"{share:.0%} of the parameters are in linear1 and linear2")
        return share

    def holds(self, wrong: float) -> bool:
        return wrong > 0.9

    def helps(self, right: float) -> bool:
        return right < 0.7


TRAPS: tuple[type[Trap], ...] = (
    PackedInit,
    StateDictForks,
    OutProjNeverCalled,
    BiasKvIsAToken,
    ClonesStartIdentical,
    FinalNormPostNorm,
    CustomEncoderRedrawn,
    LayerKeptBesideStack,
    FeedForwardStaysWide,
)
