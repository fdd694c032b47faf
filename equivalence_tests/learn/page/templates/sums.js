// One attention whose inputs can be changed: its stages, and how each number is computed. `given` holds the parameters,
// `inputs` query, memory, mayAttend and numHeads.
const Sums = (() => {
  /* All stages and inputs, each as a list of tables: of the stages inside the heads one a head. */
  function stagesOf(given, { query, memory, mayAttend, numHeads }) {
    const score_bias = Attention.bias(mayAttend), biases = Array(numHeads).fill(score_bias);
    const found = Attention.multiHead(given.parameters, query, memory, memory, { numHeads, biases });
    const single = { query, memory, score_bias, merged: found.merged, output: found.output };
    return { ...found, ...Object.fromEntries(Object.entries(single).map(([name, x]) => [name, [x]])) };
  }

  const factor = number => (printed(number).startsWith("−") ? `(${printed(number)})` : printed(number));
  const products = (a, b) => a.map((x, i) => `${factor(x)} × ${factor(b[i])}`).join(" + ");

  /* The number of a stage in words, and what goes in: name, table, row, column; null stands for all. */
  function explained(given, stages, name, t, i, j) {
    const { in_proj, in_proj_bias, out_proj, out_proj_bias } = given.parameters, width = stages.q[0][0].length;
    const head = x => stages[x][t], column = x => head(x).map(row => row[j]), number = printed(head(name)[i][j]);
    const projected = (source, which) => {
      const at = t * width + j;
      return [`${products(stages[source][0][i], in_proj[which][at])} + ${factor(in_proj_bias[which][at])} = ${number}`, [[source, 0, i, null]]];
    };
    const ways = {
      q: () => projected("query", 0), k: () => projected("memory", 1), v: () => projected("memory", 2),
      scores: () => [`(${products(head("q")[i], head("k")[j])}) / √${width} = ${number}`, [["q", t, i, null], ["k", t, j, null]]],
      masked_scores: () => [`${printed(head("scores")[i][j])} + ${factor(stages.score_bias[0][i][j])} = ${number}`, [["scores", t, i, j], ["score_bias", 0, i, j]]],
      weights: () => {
        const row = head("masked_scores")[i].map(x => `exp(${printed(x)})`);
        return [`${row[j]} / (${row.join(" + ")}) = ${number}`, [["masked_scores", t, i, null]]];
      },
      context: () => [`${products(head("weights")[i], column("v"))} = ${number}`, [["weights", t, i, null], ["v", t, null, j]]],
      merged: () => [`feature ${j % width} of head ${Math.floor(j / width)}, as it is: ${number}`, [["context", Math.floor(j / width), i, j % width]]],
      output: () => [`${products(stages.merged[0][i], out_proj[j])} + ${factor(out_proj_bias[j])} = ${number}`, [["merged", 0, i, null]]],
    };
    return ways[name]();
  }

  /* The gradient of one number with respect to both inputs. */
  const gradients = (given, inputs, name, t, i, j) =>
    ["query", "memory"].map(source => Attention.slopes(inputs[source], () => stagesOf(given, inputs)[name][t][i][j]));

  return { explained, factor, gradients, products, stagesOf };
})();
