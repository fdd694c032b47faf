"use strict";
// Attention in float64, for what the page computes by itself. A matrix is an array of rows.
const Attention = (() => {
  const dot = (a, b) => { let sum = 0; for (let i = 0; i < a.length; i++) sum += a[i] * b[i]; return sum; };
  const transposed = a => a[0].map((_, j) => a.map(row => row[j]));
  const times = (a, b) => { const columns = transposed(b); return a.map(row => columns.map(column => dot(row, column))); };
  const linear = (x, weight, bias) => x.map(row => weight.map((w, i) => dot(w, row) + (bias ? bias[i] : 0)));
  const grid = (rows, columns, value) => Array.from({ length: rows }, (_, i) => Array.from({ length: columns }, (_, j) => value(i, j)));

  // Masks: true = may look. A bias is added to the scores.
  const causal = (queries, keys, offset = 0) => grid(queries, keys, (i, j) => j <= i + offset);
  const slidingWindow = (queries, keys, window) => grid(queries, keys, (i, j) => Math.abs(i - j) < window);
  const bias = mayAttend => mayAttend.map(row => row.map(x => (x ? 0 : -Infinity)));
  const added = (a, b) => (!a || !b ? a || b : a.map((row, i) => row.map((x, j) => x + b[i][j])));

  // A row that sees no key is NaN in the modules, and 0 in scaled_dot_product_attention.
  function softmax(row, blind) {
    const top = Math.max(...row);
    if (top === -Infinity) return row.map(() => blind);
    const powers = row.map(x => Math.exp(x - top)), sum = powers.reduce((a, b) => a + b, 0);
    return powers.map(x => x / sum);
  }

  /* One head. `keep` gives for each weight what dropout multiplies it with. */
  function attend(q, k, v, { scoreBias = null, scale = 1 / Math.sqrt(q[0].length), blind = NaN, keep = null } = {}) {
    const scores = q.map(row => k.map(key => dot(row, key) * scale)), masked_scores = added(scores, scoreBias);
    const even = masked_scores.map(row => softmax(row, blind));
    const weights = keep ? even.map(row => row.map(x => x * keep())) : even;
    return { scores, masked_scores, weights, context: times(weights, v) };
  }

  /* One sample through a module: all stages by name; those of the heads are lists. `biases` has one bias a head. */
  function multiHead(parameters, query, key, value, { numHeads, biases = [], addZero = false, ...options }) {
    const [wq, wk, wv] = parameters.in_proj, [bq, bk, bv] = parameters.in_proj_bias || [];
    const extra = (x, token) => (token ? [...x, token] : x);
    const whole = [linear(query, wq, bq), extra(linear(key, wk, bk), parameters.bias_k), extra(linear(value, wv, bv), parameters.bias_v)];
    const size = wq.length / numHeads, heads = Array.from({ length: numHeads }, (_, h) => h);
    const [q, k, v] = whole.map((x, which) => heads.map(h => {
      const part = x.map(row => row.slice(h * size, (h + 1) * size));
      return addZero && which ? [...part, Array(size).fill(0)] : part;
    }));
    const wide = x => x && x.map(row => [...row, ...Array(k[0].length - row.length).fill(0)]);
    const found = heads.map(h => attend(q[h], k[h], v[h], { scoreBias: wide(biases[h] || null), ...options }));
    const of = name => found.map(x => x[name]);
    const merged = query.map((_, i) => of("context").flatMap(x => x[i]));
    const output = linear(merged, parameters.out_proj, parameters.out_proj_bias);
    return { q, k, v, scores: of("scores"), masked_scores: of("masked_scores"), weights: of("weights"), context: of("context"), merged, output };
  }

  const mean = tables => tables[0].map((row, i) => row.map((_, j) => tables.reduce((sum, x) => sum + x[i][j], 0) / tables.length));
  const swapped = x => x[0].map((_, n) => x.map(step => step[n]));  // (len, batch, ...) and (batch, len, ...)

  /* nn.MultiheadAttention: inputs and results as torch has them; `masks` holds biases by sample and head. */
  function module(parameters, inputs, { batched = true, batchFirst = false, needWeights = true, average = true, ...options }) {
    const samples = inputs.map(x => (!batched ? [x] : batchFirst ? x : swapped(x)));
    const found = samples[0].map((query, n) => multiHead(parameters, query, samples[1][n], samples[2][n],
      { ...options, biases: options.masks[n], blind: needWeights ? NaN : 0 }));
    const outputs = found.map(x => x.output), weights = found.map(x => (average ? mean(x.weights) : x.weights));
    const output = !batched ? outputs[0] : batchFirst ? outputs : swapped(outputs);
    return needWeights ? { output, weights: batched ? weights : weights[0] } : { output };
  }

  /* F.scaled_dot_product_attention for (batch, heads, len, width); fewer key heads are shared by neighbours. */
  function function_(query, key, value, { scoreBias = null, ...options }) {
    return query.map((heads, n) => heads.map((q, h) => {
      const of = x => x[n][Math.floor(h * x[n].length / heads.length)];
      return attend(q, of(key), of(value), { scoreBias, blind: 0, ...options }).context;
    }));
  }

  /* The gradient of one number of `compute(tables)` with respect to every number of a table, by central differences. */
  function slopes(table, number) {
    const step = 1e-5;
    return table.map(row => row.map((x, j) => {
      row[j] = x + step; const above = number();
      row[j] = x - step; const below = number();
      row[j] = x;
      return (above - below) / (2 * step);
    }));
  }

  return { added, attend, bias, causal, grid, linear, module, multiHead, scaledDotProductAttention: function_, slidingWindow, slopes };
})();

