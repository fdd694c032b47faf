"""The arguments that TransformerEncoder, TransformerDecoder and Transformer have beyond those of the layers."""

import torch
from torch import Tensor, nn

import scratch
from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.explain.entry import CAUSAL_MASK, DECODER, ENCODER, STACKS, TRANSFORMER, Explanation, drawn
from scratch import Transformer, TransformerDecoder, TransformerEncoder, masks, transformer
from scratch.decoding import new_cache

__all__ = ["EXPLANATIONS"]

TWO_STACKS = """\
src -> encoder -> memory
                    |
tgt ----------> decoder -> output"""


def copied_encoder_layer() -> None:
    encoder_layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
    encoder = nn.TransformerEncoder(encoder_layer, num_layers=2)
    one, another = encoder.layers
    print("copies:", one is not encoder_layer and another is not encoder_layer)
    print("start alike:", torch.equal(one.linear1.weight, another.linear1.weight))


def copied_decoder_layer() -> None:
    decoder_layer = nn.TransformerDecoderLayer(12, 2, 20, batch_first=True)
    decoder = nn.TransformerDecoder(decoder_layer, num_layers=2)
    one, another = decoder.layers
    print("copies:", one is not decoder_layer and another is not decoder_layer)
    print("start alike:", torch.equal(one.linear1.weight, another.linear1.weight))


def counted_layers() -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
    for num_layers in (1, 6):
        encoder = nn.TransformerEncoder(layer, num_layers)
        output = encoder(torch.randn(2, 5, 12))
        count = sum(parameter.numel() for parameter in encoder.parameters())
        print(f"{num_layers} layers: {count} parameters, {tuple(output.shape)}")


def final_norm() -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 20, norm_first=True)
    x = 100 * torch.randn(5, 2, 12)
    for norm in (None, nn.LayerNorm(12)):
        encoder = nn.TransformerEncoder(layer, 2, norm, False)
        print(f"{encoder(x).std().item():4.1f} is the spread with norm={norm}")


def nested() -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
    src, is_padding = torch.randn(1, 3, 12), torch.tensor([[False, False, True]])
    for enable in (True, False):
        encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=enable)
        with torch.no_grad():
            output = encoder.eval()(src, src_key_padding_mask=is_padding)
        print(f"{enable}, the padded place:", output[0, 2, :3])


def checked() -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
    src, is_padding = torch.randn(1, 3, 12), torch.tensor([[True, False, False]])
    for check in (True, False):
        encoder = nn.TransformerEncoder(layer, 1, mask_check=check).eval()
        with torch.no_grad():
            output = encoder(src, src_key_padding_mask=is_padding)
        print(f"mask_check={check}, the three places:", output[0, :, 0])


def encoder_looks() -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 20, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    src = torch.randn(1, 5, 12)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    found = encoder(src, mask=causal)  # reads the mask
    promised = encoder(src, mask=causal, is_causal=True)  # does not
    print("same output:", torch.equal(found, promised))


def encoder_masked() -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 20, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1)
    src, place = torch.randn(1, 4, 12), torch.arange(4)
    hide = (place[:, None] - place).abs() > 1  # True = may not look
    before = encoder(src, mask=hide)
    src[:, 3] = 0.0  # another last token
    change = (encoder(src, mask=hide) - before).abs().amax(dim=(0, 2))
    print("change of each output:", change.detach())


def decoder_looks() -> None:
    layer = nn.TransformerDecoderLayer(12, 2, 20, 0.0, batch_first=True)
    decoder = nn.TransformerDecoder(layer, 2)
    tgt, memory = torch.randn(1, 5, 12), torch.randn(1, 7, 12)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    found = decoder(tgt, memory, causal)  # reads the mask
    promised = decoder(tgt, memory, causal, tgt_is_causal=True)  # does not
    print("same output:", torch.equal(found, promised))


def source_promised() -> None:
    model = nn.Transformer(12, 2, 1, 1, 20, 0.0, batch_first=True)
    src, tgt = torch.randn(1, 7, 12), torch.randn(1, 5, 12)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    found = model(src, tgt, causal)  # reads the mask
    promised = model(src, tgt, causal, src_is_causal=True)  # does not
    print("same output:", torch.equal(found, promised))


def remembered() -> None:
    layer = scratch.TransformerDecoderLayer(12, 2, 20, 0.0, batch_first=True)
    decoder = scratch.TransformerDecoder(layer, num_layers=2)
    tgt, memory = torch.randn(1, 5, 12), torch.randn(1, 7, 12)
    cache = new_cache(num_layers=2)
    for token in tgt.split(1, dim=1):
        output = decoder(token, memory, cache=cache)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)  # True = may not look
    at_once = decoder(tgt, memory, tgt_mask=causal)
    print("same last output:", torch.allclose(output, at_once[:, -1:], atol=1e-6))


def encoder_depth() -> None:
    model = nn.Transformer(12, 2, num_encoder_layers=1, batch_first=True)
    depths = len(model.encoder.layers), len(model.decoder.layers)
    print("layers of encoder and decoder:", depths)


def decoder_depth() -> None:
    model = nn.Transformer(12, 2, num_decoder_layers=1, batch_first=True)
    depths = len(model.encoder.layers), len(model.decoder.layers)
    print("layers of encoder and decoder:", depths)


def own_encoder() -> None:
    src, tgt = torch.randn(1, 7, 12), torch.randn(1, 5, 12)

    class Unchanged(nn.Module):
        def forward(self, src: Tensor, **masks: Tensor) -> Tensor:
            print("given beside src:", *masks)
            return src

    model = nn.Transformer(12, 2, custom_encoder=Unchanged(), batch_first=True)
    output = model.eval()(src, tgt)
    print("the memory is src:", torch.equal(output, model.decoder(tgt, src)))


def own_decoder() -> None:
    src, tgt = torch.randn(1, 7, 12), torch.randn(1, 5, 12)

    class AddMean(nn.Module):
        def forward(self, tgt: Tensor, memory: Tensor, **masks: Tensor) -> Tensor:
            print("given beside tgt and memory:", *masks, sep="\n  ")
            return tgt + memory.mean(dim=1, keepdim=True)

    model = nn.Transformer(12, 2, 1, custom_decoder=AddMean(), batch_first=True)
    output = model.eval()(src, tgt)
    mean = model.encoder(src).mean(dim=1, keepdim=True)
    print("tgt and the mean of the memory:", torch.equal(output, tgt + mean))


def whole() -> None:
    model = nn.Transformer(12, 2, 1, 1, 20, batch_first=True)
    src, tgt = torch.randn(2, 7, 12), torch.randn(2, 5, 12)
    print(tuple(model(src, tgt).shape))


def mask_built() -> None:
    print(nn.Transformer.generate_square_subsequent_mask(sz=3))


def mask_on_device() -> None:
    meta = torch.device("meta")  # shapes, no memory
    mask = nn.Transformer.generate_square_subsequent_mask(3, device=meta)
    print(mask.device, tuple(mask.shape))


def mask_dtypes() -> None:
    for dtype in (None, torch.bfloat16):
        mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=dtype)
        print(f"dtype={dtype}:", mask.dtype)


LOOKS = (
    Place(transformer.is_causal_mask, "if is_causal is not None"),
    Place(transformer.is_causal_mask, "torch.equal("),
)
MASK_BUILT = Place(Transformer.generate_square_subsequent_mask, "torch.full(")
TO_ENCODER, TO_DECODER = Place(Transformer.forward, "self.encoder("), Place(Transformer.forward, "self.decoder(")
KEPT = "scratch accepts it for compatibility and ignores it, because it has one path for every mode."

EXPLANATIONS = (
    Explanation(
        "encoder_layer",
        (ENCODER,),
        "The layer that the stack is made of. It is copied num_layers times, parameters included, and not used itself.",
        (Place(TransformerEncoder.__init__, "copy.deepcopy"),),
        copied_encoder_layer,
    ),
    Explanation(
        "decoder_layer",
        (DECODER,),
        "The layer that the stack is made of. It is copied num_layers times, parameters included, and not used itself.",
        (Place(TransformerDecoder.__init__, "copy.deepcopy"),),
        copied_decoder_layer,
    ),
    Explanation(
        "num_layers",
        STACKS,
        "How many copies of the layer follow one another. Each has its own parameters, and reads the output of the "
        "one before.",
        (
            Place(TransformerEncoder.__init__, "copy.deepcopy"),
            Place(TransformerEncoder.forward, "for layer in self.layers"),
        ),
        counted_layers,
    ),
    Explanation(
        "norm",
        STACKS,
        "A module for the output of the last layer, usually nn.LayerNorm(d_model). None leaves the output as it is. "
        "A stack of norm_first layers needs one, because nothing in it normalises the last sum.",
        (Place(TransformerEncoder.forward, "self.norm is None"),),
        final_norm,
    ),
    Explanation(
        "enable_nested_tensor",
        (ENCODER,),
        "Lets torch leave padding out of the computation. It does so in evaluation without gradients, and fills the "
        "padded positions with zeros. " + KEPT,
        (
            Place(TransformerEncoder.__init__, "self.enable_nested_tensor ="),
            Place(TransformerEncoder.forward, "for layer in self.layers"),
        ),
        nested,
    ),
    Explanation(
        "mask_check",
        (ENCODER,),
        "Lets torch check whether all padding is at the end. Only then can padding be left out of the computation. "
        "False skips the check: padding elsewhere is then taken for tokens, and as many tokens at the end are lost. "
        + KEPT,
        (
            Place(TransformerEncoder.__init__, "self.mask_check ="),
            Place(TransformerEncoder.forward, "for layer in self.layers"),
        ),
        checked,
    ),
    Explanation(
        "mask",
        (ENCODER,),
        "Who may look at whom: True means may not. Its shape is (src_len, src_len) for all, or (batch * nhead, "
        "src_len, src_len), and it is the src_mask of every layer. A float mask is added to the scores instead.",
        (
            Place(TransformerEncoder.forward, "x = layer("),
            Place(masks.score_bias_from_module, "masked_fill_(module_mask"),
        ),
        encoder_masked,
        f"who may look in the example below, at itself and its neighbours:\n\n{drawn(masks.sliding_window(4, window=2))}",
    ),
    Explanation(
        "is_causal",
        (ENCODER,),
        "What you say about mask: causal, not causal, or None. None compares the numbers to find out, in every "
        "call, and waits for the device to have them. No value of it acts as a mask by itself.",
        LOOKS,
        encoder_looks,
        f"the causal mask:\n\n{drawn(masks.causal(5))}",
    ),
    Explanation(
        "tgt_is_causal",
        (DECODER, TRANSFORMER),
        "What you say about tgt_mask: causal, not causal, or None. None compares the numbers to find out, in every "
        "call, and waits for the device to have them. No value of it acts as a mask by itself.",
        LOOKS,
        decoder_looks,
        f"the causal mask:\n\n{drawn(masks.causal(5))}",
    ),
    Explanation(
        "src_is_causal",
        (TRANSFORMER,),
        "What you say about src_mask: causal, not causal, or None. None compares the numbers to find out, in every "
        "call, and waits for the device to have them. No value of it acts as a mask by itself.",
        (TO_ENCODER, *LOOKS),
        source_promised,
    ),
    Explanation(
        "cache",
        (DECODER,),
        "The keys and values of earlier calls. It holds one LayerCache per layer: new_cache makes them. Each call "
        "then takes only the new tokens. torch.nn has no such argument and recomputes the whole sentence.",
        (Place(TransformerDecoder.forward, "x = layer("),),
        remembered,
    ),
    Explanation(
        "num_encoder_layers",
        (TRANSFORMER,),
        "How many layers the encoder has. It has no effect if custom_encoder is given.",
        (Place(Transformer.__init__, "if custom_encoder is None"),),
        encoder_depth,
    ),
    Explanation(
        "num_decoder_layers",
        (TRANSFORMER,),
        "How many layers the decoder has. It has no effect if custom_decoder is given.",
        (Place(Transformer.__init__, "if custom_decoder is None"),),
        decoder_depth,
    ),
    Explanation(
        "custom_encoder",
        (TRANSFORMER,),
        "A module to use instead of the encoder. It is called with src and the keywords mask, src_key_padding_mask "
        "and is_causal, and returns the memory. The constructor overwrites its matrices with random numbers.",
        (Place(Transformer.__init__, "if custom_encoder is None"), TO_ENCODER),
        own_encoder,
    ),
    Explanation(
        "custom_decoder",
        (TRANSFORMER,),
        "A module to use instead of the decoder. It is called with tgt, memory and the masks as keywords, and "
        "returns the output. The constructor overwrites its matrices with random numbers.",
        (Place(Transformer.__init__, "if custom_decoder is None"), TO_DECODER),
        own_decoder,
    ),
    Explanation(
        "src",
        (TRANSFORMER,),
        "The source, which the encoder turns into the memory. It holds vectors of d_model features, not token ids. "
        "Its length is independent of the target's.",
        (TO_ENCODER,),
        whole,
        TWO_STACKS,
    ),
    Explanation(
        "tgt",
        (TRANSFORMER,),
        "The target, which the decoder reads along with the memory. It holds vectors of d_model features, not token "
        "ids. The output has its shape. In training it is the sentence without its last token.",
        (TO_DECODER,),
        whole,
        TWO_STACKS,
    ),
    Explanation(
        "sz",
        (CAUSAL_MASK,),
        "How many queries and keys the mask is for. The mask is square and added to the scores: 0 may look and -inf "
        "may not.",
        (MASK_BUILT,),
        mask_built,
        drawn(masks.causal(3)),
    ),
    Explanation(
        "device",
        (CAUSAL_MASK,),
        "Where the mask is built. The scores it is added to must be on the same device.",
        (MASK_BUILT,),
        mask_on_device,
    ),
    Explanation(
        "dtype",
        (CAUSAL_MASK,),
        "The dtype of the mask. It defaults to torch's default, float32. Pass the model's dtype if it differs.",
        (MASK_BUILT,),
        mask_dtypes,
    ),
)
