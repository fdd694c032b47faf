// What a setting of the switches stands for: its code, as switches.code_of writes it, and its numbers.
const Boards = (() => {
  const INPUTS = "query_key_value", MASKS = ["key_padding_mask", "attn_mask"];
  const optionOf = (board, chosen, key) => board.switches.find(x => x.key === key)?.options[chosen[key] || 0];
  const digits = (chosen, keys) => keys.map(x => chosen[x] || 0).join("");
  const sizesOf = (board, chosen, name) => board.sizes[name === "sdpa" ? chosen[INPUTS] || 0 : 2 * (chosen[INPUTS] || 0) + (chosen.batch_first || 0)];

  function wordsFor(name, board, chosen) {
    const sizes = sizesOf(board, chosen, name);
    if (name === "sdpa") return { ...sizes, KEY_HEADS: chosen.enable_gqa ? 1 : 2 };
    const code = key => optionOf(board, chosen, key).code;
    return {
      ...sizes, EMBED_DIM: code("embed_dim"), MAPS: sizes.BATCH * code("num_heads"), DTYPE: code("dtype"),
      DEVICE: chosen.device ? `, device=${code("device")}` : "", CAST: chosen.dtype ? `.to(${code("dtype")})` : "",
    };
  }

  function codeOf(name, board, chosen) {
    const option = key => optionOf(board, chosen, key), inputs = option(INPUTS);
    const given = place => board.switches.filter(x => x.place === place && chosen[x.key]).map(x => `${x.argument}=${option(x.key).code}`);
    const lines = [...inputs.setup, ...MASKS.flatMap(x => option(x)?.setup || [])];
    if (name === "sdpa") lines.push(`output = F.scaled_dot_product_attention(${[inputs.code, ...given("call")].join(", ")})`);
    else {
      const [query, key, value] = inputs.code.split(", ");
      const passed = [query, key + option("kdim").inputs, value + option("vdim").inputs];
      lines.push(
        `attention = nn.MultiheadAttention(${[option("embed_dim").code, option("num_heads").code, ...given("init"), "dtype=DTYPE"].join(", ")})`,
        "randomize_parameters(attention)",
        ...(chosen.mode ? [option("mode").code] : []),
        `output, weights = attention(${[...passed, ...given("call")].join(", ")})`,
      );
    }
    const words = wordsFor(name, board, chosen);
    return lines.join("\n").replace(new RegExp(Object.keys(words).join("|"), "g"), word => words[word]);
  }

  /* The error in which torch ends; "" if it computes. */
  function errorOf(name, board, chosen) {
    if (name === "sdpa") {
      const isFused = [0, 3].includes(chosen[INPUTS] || 0) && !chosen.dropout_p;
      return chosen.attn_mask && chosen.is_causal && !(isFused && board.takesBoth) ? "RuntimeError: Explicit attn_mask should not be set when is_causal=True" : "";
    }
    const size = key => Number(optionOf(board, chosen, key).code);
    if (size("embed_dim") % size("num_heads")) return "AssertionError: embed_dim must be divisible by num_heads";
    if (chosen.is_causal && !chosen.attn_mask) return "RuntimeError: Need attn_mask if specifying the is_causal hint.";
    return "";
  }

  // Without weights and padding, is_causal is taken at its word, and the mask is not looked at.
  const isPromised = chosen => chosen.is_causal && chosen.need_weights && !chosen.key_padding_mask;
  const lengths = sizes => JSON.parse(sizes.LENGTHS);
  const cut = (x, width) => (Array.isArray(x[0]) ? x.map(part => cut(part, width)) : x.slice(0, width));

  function attnBias(option, { QUERY_LEN: q, KEY_LEN: k }, map) {
    const A = Attention;
    return [null, A.causal(q, k), A.causal(q, k), A.slidingWindow(q, k, 1 + map % 3), A.grid(q, k, i => i > 0)][option];
  }

  function moduleResult(board, chosen, keep) {
    const A = Attention, sizes = sizesOf(board, chosen), numHeads = Number(optionOf(board, chosen, "num_heads").code);
    const [x, memory = x] = board.inputs[digits(chosen, [INPUTS, "embed_dim", "batch_first"])];
    const parameters = board.parameters[digits(chosen, ["embed_dim", "kdim", "vdim", "bias", "add_bias_kv"])];
    const inputs = [x, chosen.kdim ? cut(memory, 3) : memory, chosen.vdim ? cut(memory, 2) : memory];
    const tokens = sizes.KEY_LEN + (chosen.add_bias_kv ? 1 : 0) + (chosen.add_zero_attn ? 1 : 0);
    const masks = Array.from({ length: sizes.BATCH }, (_, n) => Array.from({ length: numHeads }, (_, h) => {
      if (isPromised(chosen)) return A.bias(A.causal(sizes.QUERY_LEN, tokens));
      const mask = attnBias(chosen.attn_mask || 0, sizes, n * numHeads + h);
      const real = chosen.key_padding_mask ? A.grid(sizes.QUERY_LEN, sizes.KEY_LEN, (_, j) => j < lengths(sizes)[n]) : null;
      return A.added(mask && A.bias(mask), real && A.bias(real));
    }));
    return A.module(parameters, inputs, {
      numHeads, masks, keep: chosen.dropout && !chosen.mode ? keep : null, addZero: Boolean(chosen.add_zero_attn), batched: chosen[INPUTS] !== 2,
      batchFirst: Boolean(chosen.batch_first), needWeights: !chosen.need_weights, average: !chosen.average_attn_weights,
    });
  }

  function functionResult(board, chosen, keep) {
    const A = Attention, sizes = sizesOf(board, chosen, "sdpa"), { QUERY_LEN: q, KEY_LEN: k } = sizes;
    const found = board.inputs[digits(chosen, [INPUTS, "enable_gqa"])], batched = chosen[INPUTS] !== 2;
    const [query, key, value] = batched ? found : found.map(x => [x]);
    const biases = [null, A.bias(A.slidingWindow(q, k, 2)), A.grid(q, k, (_, j) => -j), A.bias(A.grid(q, k, (_, j) => j < lengths(sizes)[0])), A.bias(A.grid(q, k, i => i > 0))];
    const scale = [undefined, 1, .05][chosen.scale || 0], scoreBias = A.added(biases[chosen.attn_mask || 0], chosen.is_causal ? A.bias(A.causal(q, k)) : null);
    const output = A.scaledDotProductAttention(query, key, value, { scoreBias, keep: chosen.dropout_p ? keep : null, ...(scale && { scale }) });
    return { output: batched ? output : output[0] };
  }

  /* The results by name, as nested lists; `keep` gives for each weight what dropout multiplies it with. */
  const resultOf = (name, board, chosen, keep) => (name === "sdpa" ? functionResult : moduleResult)(board, chosen, keep);
  return { codeOf, errorOf, resultOf };
})();

