"""Layers and stacks: layout, what is passed on and what is not, and what decoding costs."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import scratch
from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.traps.entry import Severity, Trap
from equivalence_tests.learn.traps.operations import operations
from scratch import (
    MultiheadAttention,
    Transformer,
    TransformerEncoderLayer,
    functional,
    masks,
    rounding,
    transformer,
    validation,
)
from scratch.attention import project
from scratch.decoding import GrowingCache, new_cache
from scratch.positional import sinusoidal_encoding

__all__ = ["TRAPS"]


class BatchFirstDefault(Trap):
    """By default the first axis is time: samples attend to each other."""

    number = 9
    name = "batch_first_default"
    severity = Severity.WRONG_NUMBERS
    concerns = ("batch_first", "MultiheadAttention.query", "src")
    expects = "Samples are independent of each other."
    happens = "The output of sample 0 changes when sample 1 does. The shapes look right and nothing complains."
    why = (
        "The first axis is read as time. Five tokens in two samples and two tokens in five samples have the same "
        "number of axes, and no check can tell them apart."
    )
    places = (Place(rounding.sequence_first, "if not batch_first"),)
    instead = "Pass batch_first=True."
    issues = ("pytorch/pytorch#137173",)
    since = "1.9"

    def wrong(self) -> float:
        x = torch.randn(2, 5, 12)  # 2 samples of 5 tokens
        attention = nn.MultiheadAttention(12, 3)
        before, _ = attention(x, x, x)
        x[1] = 0.0  # another sample 1
        after, _ = attention(x, x, x)
        change = (after - before)[0].abs().max().item()
        print(f"change of the output of sample 0: {change:.2g}")
        return change

    def right(self) -> float:
        x = torch.randn(2, 5, 12)  # 2 samples of 5 tokens
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        before, _ = attention(x, x, x)
        x[1] = 0.0  # another sample 1
        after, _ = attention(x, x, x)
        change = (after - before)[0].abs().max().item()
        print(f"change of the output of sample 0: {change:.2g}")
        return change

    def holds(self, wrong: float) -> bool:
        return wrong > 0.01

    def helps(self, right: float) -> bool:
        return right == 0


class NoCache(Trap):
    """There is no cache: each new token pays for the whole sentence."""

    number = 24
    name = "no_cache"
    severity = Severity.SLOW
    concerns = (
        "TransformerDecoder.tgt",
        "TransformerDecoder.cache",
        "TransformerDecoderLayer.cache",
        "Transformer.tgt",
    )
    expects = "The next token costs one token's work."
    happens = "The work per step grows with the sentence, although only the last row of the output is new."
    why = (
        "torch's decoder remembers nothing between calls. Under a causal mask, the keys and values of earlier "
        "tokens never change, so they can be kept. In the hand-written version that is one object between "
        "projection and attention."
    )
    places = (
        Place(MultiheadAttention.forward, "cache.extend("),
        Place(GrowingCache.extend, "_written_behind("),
    )
    instead = (
        "Decode with a cache. torch.nn has none; scratch's decoder takes one, with the same weights and the same "
        "numbers."
    )
    issues = ("pytorch/pytorch#107573",)

    def wrong(self) -> list[int]:
        layer = nn.TransformerDecoderLayer(12, 3, 20, batch_first=True)
        decoder = nn.TransformerDecoder(layer, num_layers=2)
        tokens, memory = torch.randn(1, 16, 12), torch.randn(1, 7, 12)
        flops = []
        for step in range(1, 17):
            causal = torch.ones(step, step, dtype=torch.bool).triu(1)
            with FlopCounterMode(display=False) as counter:
                decoder(tokens[:, :step], memory, causal, tgt_is_causal=True)
            flops.append(counter.get_total_flops())
        print("floating point operations of step 2: ", flops[1])
        print("floating point operations of step 16:", flops[15])
        return flops

    def right(self) -> list[int]:
        layer = scratch.TransformerDecoderLayer(12, 3, 20, batch_first=True)
        decoder = scratch.TransformerDecoder(layer, num_layers=2)
        tokens, memory = torch.randn(1, 16, 12), torch.randn(1, 7, 12)
        flops, cache = [], new_cache(num_layers=2)
        for token in tokens.split(1, dim=1):
            with FlopCounterMode(display=False) as counter:
                decoder(token, memory, cache=cache)
            flops.append(counter.get_total_flops())
        print("floating point operations of step 2: ", flops[1])
        print("floating point operations of step 16:", flops[15])
        return flops

    def holds(self, wrong: list[int]) -> bool:
        return wrong[15] > 4 * wrong[1]

    def helps(self, right: list[int]) -> bool:
        return right[15] < 2 * right[1]


class MemoryPaddingForgotten(Trap):
    """nn.Transformer's decoder looks at the source's padding."""

    number = 36
    name = "memory_padding_forgotten"
    severity = Severity.WRONG_NUMBERS
    concerns = ("Transformer.src_key_padding_mask", "memory_key_padding_mask")
    expects = "src_key_padding_mask hides the source's padding everywhere."
    happens = (
        "What is stored at padded positions changes the output: the encoder does not look there, but the decoder does."
    )
    why = "There are three padding masks for three attentions, and the third is not filled in from the first."
    places = (Place(Transformer.forward, "self.encoder("), Place(Transformer.forward, "self.decoder("))
    instead = "Pass the same mask as memory_key_padding_mask."

    def wrong(self) -> float:
        model = nn.Transformer(12, 2, 1, 1, 20, dropout=0.0, batch_first=True)
        src, tgt = torch.randn(1, 7, 12), torch.randn(1, 5, 12)
        is_padding = torch.tensor([[False] * 4 + [True] * 3])
        before = model(src, tgt, src_key_padding_mask=is_padding)
        src[is_padding] = 1.0  # other padding
        after = model(src, tgt, src_key_padding_mask=is_padding)
        change = (after - before).abs().max().item()
        print(f"change of the output: {change:.2g}")
        return change

    def right(self) -> float:
        model = nn.Transformer(12, 2, 1, 1, 20, dropout=0.0, batch_first=True)
        src, tgt = torch.randn(1, 7, 12), torch.randn(1, 5, 12)
        is_padding = torch.tensor([[False] * 4 + [True] * 3])
        names = "src_key_padding_mask", "memory_key_padding_mask"
        padding = dict.fromkeys(names, is_padding)
        before = model(src, tgt, **padding)
        src[is_padding] = 1.0  # other padding
        after = model(src, tgt, **padding)
        change = (after - before).abs().max().item()
        print(f"change of the output: {change:.2g}")
        return change

    def holds(self, wrong: float) -> bool:
        return wrong > 0.01

    def helps(self, right: float) -> bool:
        return right == 0


class NoPositions(Trap):
    """nn.Transformer has no positional encoding."""

    number = 38
    name = "no_positions"
    severity = Severity.WRONG_NUMBERS
    concerns = ("src", "tgt", "d_model")
    expects = "The order of the source's words makes a difference."
    happens = "The source in another order gives the same output, up to rounding."
    why = (
        "Attention is a weighted mean, and a mean does not know about order. The class named after the paper holds "
        "only the two stacks; embeddings, positions and the projection to a vocabulary are up to you."
    )
    places = (Place(Transformer.forward, "self.encoder("), Place(functional.attention, "context = weights @ v"))
    instead = (
        "Add a positional encoding. scratch and builtin have sinusoidal_encoding, and Seq2SeqTransformer includes it."
    )

    def wrong(self) -> float:
        model = nn.Transformer(12, 2, 1, 1, 20, dropout=0.0, batch_first=True)
        src, tgt = torch.randn(1, 7, 12), torch.randn(1, 5, 12)
        backwards = src.flip(1)
        change = (model(src, tgt) - model(backwards, tgt)).abs().max().item()
        print(f"change of the output: {change:.2g}")
        return change

    def right(self) -> float:
        model = nn.Transformer(12, 2, 1, 1, 20, dropout=0.0, batch_first=True)
        src, tgt = torch.randn(1, 7, 12), torch.randn(1, 5, 12)
        backwards, positions = src.flip(1), sinusoidal_encoding(7, 12)
        src, backwards = src + positions, backwards + positions
        change = (model(src, tgt) - model(backwards, tgt)).abs().max().item()
        print(f"change of the output: {change:.2g}")
        return change

    def holds(self, wrong: float) -> bool:
        return wrong < 1e-5

    def helps(self, right: float) -> bool:
        return right > 0.01


class TargetNotShifted(Trap):
    """nn.Transformer does not shift the target: unshifted, it learns to copy."""

    number = 56
    name = "target_not_shifted"
    severity = Severity.WRONG_NUMBERS
    concerns = ("tgt",)
    expects = "Under a causal mask the model cannot see the token it is asked for."
    happens = (
        "The sentences are random, so nothing can be predicted, and still the loss is near 0. The token asked for "
        "at each position is the one given there, and a causal mask lets a token look at itself. Such a model can "
        "copy and nothing else."
    )
    why = (
        "Output i is computed from tgt 0 to i, and nothing shifts it. The language models of Hugging Face shift "
        "labels by themselves; here it is the caller's job."
    )
    places = (Place(Transformer.forward, "self.decoder("), Place(masks.causal, "tril(offset)"))
    instead = "Pass the target without its last token, and ask for the target without its first."

    def wrong(self) -> float:
        embedding, projection = nn.Embedding(8, 16), nn.Linear(16, 8)
        model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        parts = nn.ModuleList([embedding, model, projection])
        optimizer = torch.optim.Adam(parts.parameters(), lr=0.01)
        causal = torch.ones(7, 7, dtype=torch.bool).triu(1)  # True = may not look
        for _ in range(40):
            src, tgt = torch.randint(8, (2, 32, 7))  # chance
            output = model(embedding(src), embedding(tgt), tgt_mask=causal)
            logits = projection(output).flatten(0, 1)
            loss = F.cross_entropy(logits, tgt.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"loss: {loss.item():.2f}, of guessing: {math.log(8):.2f}")
        return loss.item()

    def right(self) -> float:
        embedding, projection = nn.Embedding(8, 16), nn.Linear(16, 8)
        model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        parts = nn.ModuleList([embedding, model, projection])
        optimizer = torch.optim.Adam(parts.parameters(), lr=0.01)
        causal = torch.ones(6, 6, dtype=torch.bool).triu(1)  # True = may not look
        for _ in range(40):
            src, tgt = torch.randint(8, (2, 32, 7))  # chance
            given, wanted = tgt[:, :-1], tgt[:, 1:]
            output = model(embedding(src), embedding(given), tgt_mask=causal)
            logits = projection(output).flatten(0, 1)
            loss = F.cross_entropy(logits, wanted.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"loss: {loss.item():.2f}, of guessing: {math.log(8):.2f}")
        return loss.item()

    def holds(self, wrong: float) -> bool:
        return wrong < 0.5

    def helps(self, right: float) -> bool:
        return right > 1.8


class UnbatchedProjectsThrice(Trap):
    """Without a batch axis, self-attention projects three times."""

    number = 39
    name = "unbatched_projects_thrice"
    severity = Severity.SLOW
    concerns = ("MultiheadAttention.query", "TransformerEncoderLayer.src")
    expects = "(len, features) is a batch of one with less to type."
    happens = "Three products for query, key and value; with a batch of one there is a single product."
    why = (
        "Self-attention is recognised by query, key and value being the same object. Without a batch, each gets its "
        "batch axis separately, and from then on they are three objects. The hand-written version does the same, to "
        "round the same way."
    )
    places = (
        Place(rounding.sequence_first, "if query.dim() == 2"),
        Place(project, "query is key"),
    )
    instead = "Add a batch axis."

    def wrong(self) -> list[str]:
        x = torch.randn(5, 12)
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        called = operations(lambda: attention(x, x, x, need_weights=False)[0])
        print(*called)
        return [name for name in called if name in ("mm", "addmm")]

    def right(self) -> list[str]:
        x = torch.randn(5, 12)[None]
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        called = operations(lambda: attention(x, x, x, need_weights=False)[0])
        print(*called)
        return [name for name in called if name in ("mm", "addmm")]

    def holds(self, wrong: list[str]) -> bool:
        return len(wrong) == 4  # three in, one out

    def helps(self, right: list[str]) -> bool:
        return len(right) == 2


class DropoutByDefault(Trap):
    """Layers use dropout by default: the same call twice gives two answers."""

    number = 42
    name = "dropout_by_default"
    severity = Severity.SURPRISING
    concerns = ("TransformerEncoderLayer.dropout", "TransformerDecoderLayer.dropout", "Transformer.dropout")
    expects = (
        "Same weights, same input, same output. nn.MultiheadAttention, with dropout=0.0 by default, keeps to that."
    )
    happens = "The two outputs differ."
    why = "The layers default to dropout=0.1, the paper's value, and modules start in training mode."
    places = (
        Place(TransformerEncoderLayer._ff_block, "self.dropout("),
        Place(TransformerEncoderLayer._sa_block, "self.dropout1("),
    )
    instead = "Call eval() before you compare or use a model."

    def wrong(self) -> float:
        layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)
        x = torch.randn(2, 5, 12)
        difference = (layer(x) - layer(x)).abs().max().item()
        print(f"greatest difference of two calls: {difference:.2g}")
        return difference

    def right(self) -> float:
        layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True).eval()
        x = torch.randn(2, 5, 12)
        difference = (layer(x) - layer(x)).abs().max().item()
        print(f"greatest difference of two calls: {difference:.2g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong > 0.01

    def helps(self, right: float) -> bool:
        return right == 0


class NoLayers(Trap):
    """A stack of 0 layers can be built, and fails at its first call."""

    number = 45
    name = "no_layers"
    severity = Severity.ERROR
    concerns = ("num_layers", "num_encoder_layers", "num_decoder_layers")
    expects = "With no layers, the input comes out unchanged; or an error points at the 0."
    happens = (
        "The stack is built without complaint. The first call ends in an error about an index that names no argument."
    )
    why = (
        "The forward pass asks the first layer for its layout before it loops over the layers. The hand-written "
        "version checks the number first, and names it. A stack without layers may stand unused in a model, so building "
        "one is no error."
    )
    places = (
        Place(transformer.sequence_len, "first_layer: Any"),
        Place(validation.check_has_layers, "len(layers) == 0"),
    )
    instead = "Use nn.Identity() where a configuration asks for no layers. scratch's stacks name the argument."
    raises = "out of range"

    def wrong(self) -> None:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
        encoder = nn.TransformerEncoder(layer, num_layers=0)
        print("layers:", len(encoder.layers))
        encoder(torch.randn(2, 5, 12))

    def right(self) -> str:
        layer = scratch.TransformerEncoderLayer(12, 2, 20, batch_first=True)
        try:
            scratch.TransformerEncoder(layer, num_layers=0)(torch.randn(2, 5, 12))
            message = ""
        except ValueError as error:
            message = str(error)
        print(message)
        return message

    def helps(self, right: str) -> bool:
        return "num_layers must be greater than 0" in right


TRAPS: tuple[type[Trap], ...] = (
    BatchFirstDefault,
    NoCache,
    MemoryPaddingForgotten,
    NoPositions,
    TargetNotShifted,
    UnbatchedProjectsThrice,
    DropoutByDefault,
    NoLayers,
)
