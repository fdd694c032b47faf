// Encoder and decoder layers in float64: each stage by name, the code that computes the same in torch, and how each number
// comes about. `inputs` holds x, memory, mayAttend, numHeads, isDecoder, normFirst, activation, bias and eps.
const Layers = (() => {
  // All terms of the series have one sign, so that nothing cancels.
  function erf(x) {
    if (Math.abs(x) > 6) return Math.sign(x);
    let term = x, sum = x;
    for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum); n++) sum += term *= 2 * x * x / (2 * n + 1);
    return sum * Math.exp(-x * x) * 2 / Math.sqrt(Math.PI);
  }
  const below = x => (1 + erf(x / Math.SQRT2)) / 2;
  const ACTIVATIONS = { relu: x => Math.max(0, x), gelu: x => x * below(x) };
  const mean = row => row.reduce((sum, x) => sum + x, 0) / row.length;
  const variance = row => mean(row.map(x => (x - mean(row)) ** 2));
  const layerNorm = (x, { weight, bias }, eps) => x.map(row => row.map((y, j) => (y - mean(row)) / Math.sqrt(variance(row) + eps) * weight[j] + (bias ? bias[j] : 0)));

  /* The parameters of a part; with bias=False a layer has none in its norms either. */
  function parametersOf(given, { bias }, part) {
    const found = given.parameters[part];
    return bias ? found : { ...found, bias: null, in_proj_bias: null, out_proj_bias: null };
  }

  /* All stages in their order: name, kind, what goes in, and tables: of the weights one a head. */
  function stagesOf(given, inputs) {
    const { normFirst, activation, eps, numHeads } = inputs, x = inputs.isDecoder ? "tgt" : "src";
    const found = { [x]: inputs.x, memory: inputs.memory }, stages = [], parameters = part => parametersOf(given, inputs, part);
    const keep = (name, kind, from, tables, extra = {}) => { stages.push({ name, kind, from, tables, ...extra }); found[name] = tables[0]; return name; };
    const attention = (part, keys, biases) => query => {
      const of = keys || query, sides = [found[query], found[of], found[of]];
      const { weights, masked_scores, merged, output } = Attention.multiHead(parameters(part), ...sides, { numHeads, biases, blind: 0 });
      keep(`${part} weights`, "weights", [query, of], weights, { masked_scores });
      return keep(part, "out_proj", [`${part} weights`, of], [output], { merged });
    };
    const linear = (part, from) => keep(part, "linear", [from], [Attention.linear(found[from], parameters(part).weight, parameters(part).bias)]);
    const feedForward = from => linear("linear2", keep(activation, "activation", [linear("linear1", from)], [found.linear1.map(row => row.map(ACTIVATIONS[activation]))]));
    const own = attention("self_attn", null, Array(numHeads).fill(Attention.bias(inputs.mayAttend)));
    const parts = [own, ...(inputs.isDecoder ? [attention("multihead_attn", "memory", [])] : []), feedForward];
    parts.reduce((stream, inside, n) => {
      const norm = from => keep(`norm${n + 1}`, "norm", [from], [layerNorm(found[from], parameters(`norm${n + 1}`), eps)]);
      const inner = inside(normFirst ? norm(stream) : stream);
      const sum = keep(`residual${n + 1}`, "add", [stream, inner], [Attention.added(found[stream], found[inner])]);
      return normFirst ? sum : norm(sum);
    }, x);
    return { stages, found };
  }

  /* The formula of a stage. */
  function formulaOf({ name, kind, from }, activation) {
    const bare = name.split(" ")[0];
    return {
      weights: () => `softmax(queries(${from[0]}) · keys(${from[1]})ᵀ / √head_dim${bare === "self_attn" ? " + mask" : ""})`,
      out_proj: () => `out_proj(weights · values(${from[1]}))`, linear: () => `${name}(${from[0]})`,
      activation: () => `${activation}(${from[0]})`, add: () => `${from[0]} + ${from[1]}`, norm: () => `LayerNorm(${from[0]})`,
    }[kind]();
  }

  /* A number of a stage in words. */
  function explained(given, inputs, { stages, found }, name, t, i, j) {
    const stage = stages.find(x => x.name === name), number = stage.tables[t][i][j], parameters = parametersOf(given, inputs, name);
    const { factor, products } = Sums, row = found[stage.from[0]][i], plus = bias => (bias ? ` + ${factor(bias[j])}` : "");
    const ways = {
      weights: () => {
        const row = stage.masked_scores[t][i], powers = row.map(x => `exp(${printed(x)})`);
        return row.some(Number.isFinite) ? `${powers[j]} / (${powers.join(" + ")})` : "it may look at no token, so that it takes nothing";
      },
      out_proj: () => products(stage.merged[i], parameters.out_proj[j]) + plus(parameters.out_proj_bias),
      linear: () => products(row, parameters.weight[j]) + plus(parameters.bias),
      activation: () => (inputs.activation === "relu" ? `max(0, ${printed(row[j])})` : `${factor(row[j])} × ${printed(below(row[j]))}, the share of a normal distribution below it,`),
      add: () => `${printed(row[j])} + ${factor(found[stage.from[1]][i][j])}`,
      norm: () => `(${printed(row[j])} − mean ${factor(mean(row))}) / √(variance ${printed(variance(row))} + ${inputs.eps}) × ${factor(parameters.weight[j])}${plus(parameters.bias)}`,
    };
    return `${ways[stage.kind]()} = ${printed(number)}`;
  }

  /* The gradient of one number with respect to what goes into the layer. */
  const gradients = (given, inputs, name, t, i, j) => ["x", ...(inputs.isDecoder ? ["memory"] : [])].map(source =>
    Attention.slopes(inputs[source], () => stagesOf(given, inputs).stages.find(x => x.name === name).tables[t][i][j]));

  /* The same in torch, as one would type it. */
  function codeOf({ isDecoder, normFirst, activation, bias, eps, numHeads, mayAttend }) {
    const kind = isDecoder ? "Decoder" : "Encoder", x = isDecoder ? "tgt" : "src";
    const options = [["activation", `"${activation}"`, activation !== "relu"], ["layer_norm_eps", eps, eps !== 1e-5], ["norm_first", "True", normFirst], ["bias", "False", !bias]];
    const given = options.filter(([, , isSet]) => isSet).map(([name, text]) => `, ${name}=${text}`).join("");
    const rows = mayAttend.map(row => `[${row.map(Number).join(", ")}]`).join(", ");
    return `layer = nn.Transformer${kind}Layer(8, ${numHeads}, 7, dropout=0.0, batch_first=True${given})\n`
      + `may_attend = torch.tensor([${rows}], dtype=torch.bool)\n`
      + `layer(${isDecoder ? "tgt, memory" : "src"}, ${x}_mask=masks.to_module_mask(may_attend))`;
  }

  return { codeOf, explained, formulaOf, gradients, stagesOf };
})();
