"""The known mistakes in how a layer or a model is wired."""

from equivalence_tests.checker.mistakes.mistake import rows

_layer = rows("wiring", "LayerNorm(x + f(x)), or x + f(LayerNorm(x))", "layer")

ROWS = (
    _layer(
        "norm_shared",
        "One LayerNorm serves two sub-layers.",
        ("norm(x + f(x)); norm(x + g(x))", "norm1(x + f(x)); norm2(x + g(x))"),
        "Give each sub-layer its own LayerNorm.",
    ),
    _layer(
        "attention_shared",
        "One attention, with one set of weights, attends to the layer's own tokens and to the memory.",
        (
            "attention(x, x, x); attention(x, memory, memory)",
            "self_attention(x, x, x); cross_attention(x, memory, memory)",
        ),
        "Give the cross-attention a module of its own.",
    ),
    _layer(
        "norm_final_extra",
        "A pre-norm layer has one more LayerNorm, after its last residual.",
        "LayerNorm(x + f(LayerNorm(x)))",
        "Keep it for the end of the stack.",
        ("nn.LayerNorm(d_model), None", "nn.LayerNorm(d_model), nn.LayerNorm(d_model)"),
        ("return x", "return self.norm3(x)"),
    ),
    _layer(
        "cross_attention_from_decoder",
        "The cross-attention takes its keys or values from the decoder.",
        (
            "Attention(query=x, key=x, value=x), or with only one of key and value from the memory",
            "Attention(query=x, key=memory, value=memory)",
        ),
        "Pass the encoder's output as key and value.",
    ),
    _layer(
        "cross_attention_left_out",
        "The cross-attention exists but is never called.",
        ("self-attention, feed-forward", "self-attention, cross-attention, feed-forward"),
        "Call it between the two.",
    ),
    _layer(
        "sublayer_unused",
        "The output of a sub-layer is not used.",
        ("x", "x + f(x)"),
        "Add it to the residual stream; check which variable the next sum takes.",
    ),
    _layer(
        "cross_maps_are_self_maps",
        "The self-attention maps are returned in place of the cross-attention maps.",
        ("returns the self-attention maps twice", "returns self-attention maps and cross-attention maps"),
        "Keep the maps of the second attention and return those.",
    ),
    _layer(
        "sublayers_in_another_order",
        "The sub-layers run in the wrong order.",
        ("another order", "self-attention, cross-attention, feed-forward"),
        "Put them in the order of the paper.",
    ),
    _layer(
        "sublayer_reads_another_tensor",
        "A sub-layer reads something other than the residual stream or its LayerNorm, or a mixture of the two.",
        "f(something earlier)",
        "Feed each sub-layer what came out of the one before, with its residual.",
    ),
    _layer(
        "residual_from_elsewhere",
        "The residual that is added is not what the sub-layer was given.",
        "an earlier tensor + f(x)",
        "Add the tensor that went into this sub-layer.",
    ),
    _layer(
        "sublayers_side_by_side",
        "Attention and feed-forward read the same tensor and are added together.",
        ("x + Attention(LayerNorm(x)) + FF(LayerNorm(x))", "h = x + Attention(LayerNorm(x)); h + FF(LayerNorm(h))"),
        "Feed the attention's output to the feed-forward; torch.nn has no layer that runs them side by side.",
        on_purpose_in="GPT-J, GPT-NeoX and PaLM do so.",
    ),
    _layer(
        "masks_exchanged",
        "The mask of one attention is given to the other.",
        (
            "self_attn(x, x, x, src_mask), cross_attn(x, memory, memory, tgt_mask)",
            "self_attn(x, x, x, tgt_mask), cross_attn(x, memory, memory, src_mask)",
        ),
        "Give the target's mask to the self-attention, the source's to the cross-attention.",
    ),
    _layer(
        "masks_of_opposite_meaning",
        "Two masks of the layer are read with opposite meanings.",
        ("True in one of them hides a token, True in the other shows it", "True means the same in both"),
        "Invert neither mask on the way, or both, and say in the docstring what True means.",
    ),
    _layer(
        "model_mask_dropped",
        "There is a mask for this sequence, but these layers do not get it.",
        ("decoder(tgt, memory, tgt_mask)", "decoder(tgt, memory, tgt_mask, src_mask)"),
        "Pass the mask of the source to the encoder and to the cross-attention, that of the target to the decoder.",
        ran="call",
    ),
    _layer(
        "model_padding_inverted",
        "The padding is shown to these layers and the words are hidden: they read the mask the wrong way round.",
        ("mask = ids == pad, where True means may look", "mask = ids != pad, where True means may look"),
        "Let True mean the same where the mask is built and where it is read.",
        ran="call",
    ),
    _layer(
        "model_padding_on_queries",
        "The padding mask is applied to the queries instead of the keys: padding sees nothing, and words see padding.",
        ("mask = (ids != pad)[:, None, :, None]", "mask = (ids != pad)[:, None, None, :]"),
        "Lay the mask along the keys, the last axis of the scores.",
        ran="ne, eq, gt, ge, lt",
    ),
    _layer(
        "padding_of_other_samples",
        "The padding of one sample changes the output for the others, as where they share its mask or its length.",
        ("(ids == pad)[:1], or a length of the whole batch", "a mask, a length and positions of each sample's own"),
        "Keep the axis of the samples in whatever is made of the padding.",
        ran="ne, eq, gt, ge, lt",
    ),
    _layer(
        "layers_not_chained",
        "The layers of a stack do not feed into one another.",
        ("every layer gets the same input", "x = layer(x) for each layer"),
        "Pass the output of each layer to the next.",
        ran="call",
    ),
    _layer(
        "memory_is_not_encoder_output",
        "The decoder reads something other than the encoder's output.",
        ("decoder(tgt, src)", "decoder(tgt, encoder(src))"),
        "Pass the encoder's output as memory.",
        ran="call",
    ),
    _layer(
        "memory_and_target_exchanged",
        "The decoder is given the encoder's output as its target and the target as memory.",
        ("decoder(encoder(src), tgt)", "decoder(tgt, encoder(src))"),
        "Swap the two arguments.",
        ran="call",
    ),
    _layer(
        "samples_mixed",
        "The output for one sample depends on the other samples: batch and length are mixed up.",
        ("attention along axis 0, the samples, of (batch, len, features)", "attention along the length"),
        "Build torch's layers with batch_first=True, or transpose before and after them; where tensors are reshaped, "
        "keep the axis of the samples.",
    ),
    _layer(
        "input_never_read",
        "The output is the same for every input: batch and length may be mixed up.",
        (
            "the row that is read out sees no other row, as when attention runs along the samples",
            "the row that is read out sees its sequence",
        ),
        "Build torch's layers with batch_first=True, or transpose before and after them.",
    ),
    _layer(
        "layers_share_parameters",
        "The layers of a stack are one and the same: they share all parameters.",
        ("[layer] * num_layers", "[make_layer() for _ in range(num_layers)]"),
        "Make a new layer for each place, or copy.deepcopy one.",
        on_purpose_in="ALBERT and the Universal Transformer do so.",
    ),
    _layer(
        "outputs_of_other_tokens",
        "No attention sees later tokens, and earlier outputs change with them: outputs are read from other tokens.",
        (
            "h.view(b, n, len, d): the first part of all tokens, the next, ...",
            "h.view(b, len, n, d): each step's tokens",
        ),
        "Undo the interleaving in the order in which it was done: view(b, len, n, d), then permute.",
    ),
    _layer(
        "future_is_seen",
        "Earlier outputs of the decoder change when a later target token does: no causal mask takes effect.",
        ("position i reads the targets j > i", "position i reads the targets j <= i"),
        "Give the decoder's self-attention a causal mask.",
        ran="call",
        follows=("causal_", "cross_attention_from_"),
    ),
    _layer(
        "no_positions",
        "The order of the tokens does not matter: no position reaches the layers.",
        ("embedding(ids)", "embedding(ids) + positions"),
        "Add the positional encoding to the embeddings.",
        on_purpose_in="Decoders with a causal mask can do without (NoPE).",
        follows=("position_", "mask_inverted"),
    ),
    _layer(
        "random_in_eval",
        "In eval, two calls with the same input differ.",
        ("something random, in eval too", "nothing random in eval"),
        "Check self.training before anything is dropped or drawn.",
        ran="dropout",
    ),
    _layer(
        "patches_mixed",
        "The tokens of the first layer are not patches: each holds numbers from several.",
        ("patches.reshape(batch, -1, features)", "patches.flatten(2).transpose(1, 2)"),
        "Flatten height and width, then move the features to the end with a transpose: a reshape alone moves nothing.",
        ran="last reshape, last flatten",
    ),
    _layer(
        "part_never_used",
        "A module exists but takes no part in the forward pass.",
        ("nothing that comes back depends on the part", "its result is used, or it is not there"),
        "Use what it returns, or remove it.",
        follows=("cross_attention_",),
    ),
)
