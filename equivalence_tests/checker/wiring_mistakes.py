"""The known mistakes in how a layer or a model is put together, beside those of ``part_mistakes``."""

from equivalence_tests.checker.part_mistakes import PartMistake

__all__ = ["WIRING_MISTAKES"]

SUBLAYER = "LayerNorm(x + f(x)), or x + f(LayerNorm(x))"
FORWARD = (r"def forward",)
CROSS_LINES = (r"(cross|enc|multihead|src|inter)\w*\(", r"attn\w*\(|attention\w*\(")

BATCH_FIRST_LINES = (r"(Encoder|Decoder)Layer\(|MultiheadAttention\(", r"nn\.Transformer\(", r"(transpose|permute)\(")

MODEL_MASK_LINES = (r"(enc|dec)\w*\(", r"layers?\w*\(|blocks?\w*\(", r"def forward")

WIRING_MISTAKES = {
    mistake.name: mistake
    for mistake in (
        PartMistake(
            "sublayer_reads_another_tensor",
            "A sub-layer reads something other than the residual stream or its LayerNorm.",
            "f(something earlier)",
            SUBLAYER,
            "Feed each sub-layer what came out of the one before, with its residual.",
            (r"ff\w*\(|feed_?forward\(|mlp\(|linear1\(", r"attn\w*\(|attention\w*\("),
        ),
        PartMistake(
            "residual_from_elsewhere",
            "The residual that is added is not what the sub-layer was given.",
            "an earlier tensor + f(x)",
            SUBLAYER,
            "Add the tensor that went into this sub-layer.",
            (r"\+",),
        ),
        PartMistake(
            "cross_values_from_decoder",
            "Only one of the cross-attention's keys and values comes from the encoder.",
            "Attention(query=x, key=memory, value=x)",
            "Attention(query=x, key=memory, value=memory)",
            "Pass the encoder's output as key and as value.",
            CROSS_LINES,
        ),
        PartMistake(
            "sublayers_side_by_side",
            "Attention and feed-forward read the same tensor and are added together.",
            "x + Attention(LayerNorm(x)) + FF(LayerNorm(x))",
            "h = x + Attention(LayerNorm(x)); h + FF(LayerNorm(h))",
            "Feed the attention's output to the feed-forward; torch.nn has no layer that runs them side by side.",
            (r"\+.*\+", r"def forward"),
            "GPT-J, GPT-NeoX and PaLM do so.",
        ),
        PartMistake(
            "norm_on_the_branch",
            "A LayerNorm sits on the branch, before the residual is added.",
            "x + LayerNorm(f(x))",
            SUBLAYER,
            "Normalise the sum, or the input of the sub-layer; torch.nn has no layer with a norm there.",
            (r"\+.*norm\w*\(|norm\w*\(", r"def forward"),
            "Swin v2 (res-post-norm), Gemma 2 and CogView (sandwich norm) do so.",
        ),
        PartMistake(
            "layer_mask_never_used",
            "The layer takes a mask but does not pass it on.",
            "self_attn(x, x, x)",
            "self_attn(x, x, x, attn_mask=mask)",
            "Pass the mask to the attention it is meant for.",
            CROSS_LINES,
        ),
        PartMistake(
            "masks_exchanged",
            "The mask of one attention is given to the other.",
            "self_attn(x, x, x, src_mask), cross_attn(x, memory, memory, tgt_mask)",
            "self_attn(x, x, x, tgt_mask), cross_attn(x, memory, memory, src_mask)",
            "Give the target's mask to the self-attention, the source's to the cross-attention.",
            CROSS_LINES,
        ),
        PartMistake(
            "model_mask_never_used",
            "The model takes a mask but passes it to none of its layers.",
            "decoder(tgt, memory)",
            "decoder(tgt, memory, tgt_mask, src_mask)",
            "Pass the mask on.",
            MODEL_MASK_LINES,
        ),
        PartMistake(
            "model_mask_dropped",
            "There is a mask for this sequence, but these layers do not get it.",
            "decoder(tgt, memory, tgt_mask)",
            "decoder(tgt, memory, tgt_mask, src_mask)",
            "Pass the mask of the source to the encoder and to the cross-attention, that of the target to the decoder.",
            MODEL_MASK_LINES,
        ),
        PartMistake(
            "model_padding_inverted",
            "The padding is shown to these layers and the words are hidden: they read the mask the wrong way round.",
            "mask = ids == pad, where True means may look",
            "mask = ids != pad, where True means may look",
            "Let True mean the same where the mask is built and where it is read.",
            (r"(==|!=|\.eq\(|\.ne\().*pad|pad.*(==|!=)", r"mask\s*="),
        ),
        PartMistake(
            "layers_not_chained",
            "The layers of a stack do not feed one another.",
            "every layer gets the same input",
            "x = layer(x) for each layer",
            "Hand the output of each layer to the next.",
            (r"for .* in .*layers?", r"def forward"),
        ),
        PartMistake(
            "memory_is_not_encoder_output",
            "The decoder reads something other than the encoder's output.",
            "decoder(tgt, src)",
            "decoder(tgt, encoder(src))",
            "Pass the encoder's output as memory.",
            (r"decoder\(|\bdec\(|layer\(.*(src|enc|mem)", r"def forward"),
        ),
        PartMistake(
            "memory_and_target_exchanged",
            "The decoder is given the encoder's output as its target and the target as memory: it answers for each "
            "token of the source.",
            "decoder(encoder(src), tgt)",
            "decoder(tgt, encoder(src))",
            "Swap the two arguments.",
            (r"decoder\(|decode\(|\bdec\(", r"def forward"),
        ),
        PartMistake(
            "samples_mixed",
            "The output for one sample depends on the other samples: batch and length are mixed up.",
            "attention along axis 0, the samples, of (batch, len, features)",
            "attention along the length",
            "Build torch's layers with batch_first=True, or transpose before and after them.",
            BATCH_FIRST_LINES,
        ),
        PartMistake(
            "input_never_read",
            "The output is the same for every input: batch and length may be mixed up.",
            "the row that is read out sees no other, as where attention runs along the samples",
            "the row that is read out sees its sequence",
            "Build torch's layers with batch_first=True, or transpose before and after them.",
            BATCH_FIRST_LINES,
        ),
        PartMistake(
            "layers_share_parameters",
            "The layers of a stack are one and the same: they share all parameters.",
            "[layer] * num_layers",
            "[make_layer() for _ in range(num_layers)]",
            "Make a layer for each place, or copy.deepcopy it.",
            (r"ModuleList\(|clones\(|\]\s*\*",),
            "ALBERT and the Universal Transformer do so.",
        ),
        PartMistake(
            "future_is_seen",
            "Earlier outputs of the decoder change when a later target token does: no causal mask works.",
            "position i reads the targets j > i",
            "position i reads the targets j <= i",
            "Give the decoder's self-attention a causal mask.",
            (r"tril|triu|subsequent|ahead|future", r"(tgt|trg|target|self)\w*_mask\s*="),
        ),
        PartMistake(
            "no_positions",
            "The order of the tokens does not matter: no position reaches the layers.",
            "embedding(ids)",
            "embedding(ids) + positions",
            "Add the positional encoding to the embeddings.",
            (r"pos\w*(enc|emb)|positions?\(", r"emb\w*\("),
            "Decoders with a causal mask can do without (NoPE).",
        ),
        PartMistake(
            "part_never_used",
            "A module exists but takes no part in the forward pass.",
            "the part is constructed and not called",
            "the part is called, or not there",
            "Call it, or remove it.",
            FORWARD,
        ),
    )
}
