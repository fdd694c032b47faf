// The attention of the first view: its inputs can be changed, and each number says how it is computed.
const given = JSON.parse(one("#attention")?.textContent || "null");
const TABLES = {
  query: ["query", "feature"], memory: ["key", "feature"], score_bias: ["query", "key"], q: ["query", "feature"], k: ["key", "feature"], v: ["key", "feature"],
  scores: ["query", "key"], masked_scores: ["query", "key"], weights: ["query", "key"], context: ["query", "feature"], merged: ["query", "feature"], output: ["query", "feature"],
};
const OF_HEADS = ["q", "k", "v", "scores", "masked_scores", "weights", "context"];
const fresh = () => given && structuredClone({ query: given.query, memory: given.memory, mayAttend: given.mayAttend, numHeads: given.numHeads });
let inputs = fresh(), stages = given && Sums.stagesOf(given, inputs);

/* A tensor in small: squares of colour. */
function swatch(numbers, name, index, caption) {
  const across = numbers[0].length * 14, down = numbers.length * 14, top = name === "weights" ? 1 : largest(numbers);
  const rects = numbers.flatMap((row, i) => row.map((x, j) => `<rect class=${levelOf(x, top)} x=${j * 14} y=${i * 14} width=13 height=13><title>${printed(x)}</title></rect>`));
  const figure = make("figure", { className: "swatch" });
  figure.innerHTML = `<svg width="${across}" height="${down}" viewBox="0 0 ${across} ${down}" role="img" aria-label="${caption}: ${numbers.length} by ${numbers[0].length}">${rects.join("")}</svg>`;
  figure.append(make("figcaption", { textContent: caption }));
  Object.assign(figure.dataset, { t: name, i: index });
  return figure;
}

function light(cell) {
  const step = cell.closest(".step"), table = cell.closest("table"), { row, column } = inTable(cell);
  const number = Number(table.dataset.i), name = table.dataset.t;
  all(".lit, .here", step).forEach(x => x.classList.remove("lit", "here"));
  all(`table[data-t="${name}"][data-i="${number}"]`, step).forEach(x => {
    cellAt(x, row, column)?.classList.add("here");
    [x.tBodies[0].rows[row]?.cells[0], x.tHead.rows[0].cells[column + 1]].forEach(head => head?.classList.add("lit"));
  });
  if (step.matches("#steps-layer .step")) {
    const [part, what] = name.split(" "), where = [...(what && layerInputs.numHeads > 1 ? [`head ${number}`] : []), `${table.dataset.rows} ${row}`, `${table.dataset.columns} ${column}`].join(", ");
    const slopes = Layers.gradients(layerGiven, layerInputs, name, number, row, column), ends = [layerInputs.isDecoder ? "tgt" : "src", "memory"];
    tell(step, `${name}[${where}] = `, Layers.explained(layerGiven, layerInputs, layerFound, name, number, row, column), slopes, ends);
  }
  if (!step.matches("#steps-attention .step")) return;
  const [text, sources] = Sums.explained(given, stages, name, number, row, column);
  for (const [source, index, r, c] of sources) {
    const drawing = one(`.operands .swatch[data-t="${source}"][data-i="${index}"]`, step), across = stages[source][index][0].length;
    all("rect", drawing).forEach((rect, at) =>
      rect.classList.toggle("lit", (r === null || Math.floor(at / across) === r) && (c === null || at % across === c)));
  }
  const where = [...(OF_HEADS.includes(name) && inputs.numHeads > 1 ? [`head ${number}`] : []), `${table.dataset.rows} ${row}`, `${table.dataset.columns} ${column}`].join(", ");
  tell(step, `${name}[${where}] = `, text, Sums.gradients(given, inputs, name, number, row, column), ["query", "memory"]);
}
/* Write below a step how a number is computed, and its gradient with respect to what goes in. */
function tell(step, whose, text, gradients, sources) {
  one(".sum", step).replaceChildren(make("b", { textContent: whose }), text);
  const slopes = one(".slopes", step) || make("div", { className: "slopes operands" });
  slopes.replaceChildren(make("p", { className: "whose", textContent: "its gradient" }),
    ...gradients.map((x, which) => swatch(x, "", 0, `with respect to ${sources[which]}, at most ${printed(largest(x))}`)));
  one(".sum", step).after(slopes);
}
for (const kind of ["mouseover", "focusin"])
  addEventListener(kind, event => { const cell = event.target.closest?.(".step table[data-t] tbody td"); if (cell) light(cell); });

/* Show what the changed inputs give, instead of what torch and scratch gave. */
function showStages(view) {
  stages = Sums.stagesOf(given, inputs);
  const width = stages.q[0][0].length, many = inputs.numHeads > 1;
  const titled = (name, t) => (OF_HEADS.includes(name) && many ? `head ${t}` : "");
  all(".step", view).forEach(step => {
    const name = step.dataset.step.split(" ")[1], [rows, columns] = TABLES[name], top = name === "weights" ? 1 : largest(stages[name]);
    all(".side > .tables", step).forEach(x => x.replaceChildren(...stages[name].map((table, index) => heat(table, { title: titled(name, index), rows, columns, top, name, index }))));
    const operands = one(".operands", step), names = [...new Set(all(".swatch", operands).map(x => x.dataset.t))];
    operands.replaceChildren(operands.firstElementChild, ...names.flatMap(x => stages[x].map((table, t) => swatch(table, x, t, [x, titled(x, t)].filter(Boolean).join(", ")))));
    one(".sum", step).textContent = "Point at a number to see how it is computed.";
    one(".slopes", step)?.remove();
    one(".gap", step).textContent = "Computed on this page from your inputs, for both sides.";
    all(".shape span", step).forEach(x => {
      if (x.textContent.startsWith("num_heads")) one("b", x).textContent = inputs.numHeads;
      if (x.textContent.startsWith("head_dim")) one("b", x).textContent = width;
    });
  });
  all("table.heat[data-t]", view).forEach(table => { cellAt(table, 0, 0).tabIndex = 0; });
  const rows = inputs.mayAttend.map(row => `[${row.map(Number).join(", ")}]`).join(", ");
  const heads = inputs.numHeads === given.numHeads ? "" : `attention = nn.MultiheadAttention(8, ${inputs.numHeads}, batch_first=True)  # with the same parameters\n`;
  one(".call", view).textContent = `${heads}may_attend = torch.tensor([${rows}], dtype=torch.bool)\nattention(query, memory, memory, attn_mask=masks.to_module_mask(may_attend))`;
}

/* A table whose numbers are typed over. */
function editable(numbers, title, rows, changed) {
  const table = heat(numbers, { title, rows, columns: "feature" });
  all("td", table).forEach(cell => {
    const i = cell.parentElement.sectionRowIndex, j = cell.cellIndex - 1;
    cell.contentEditable = "plaintext-only";
    cell.setAttribute("role", "textbox");
    cell.setAttribute("aria-label", `${title}, ${rows} ${i}, feature ${j}`);
    const commit = () => {
      const text = cell.textContent.trim().replace("−", "-"), number = Number(text);
      if (text && Number.isFinite(number) && printed(number) !== printed(numbers[i][j])) { numbers[i][j] = number; changed(); }
      cell.textContent = printed(numbers[i][j]);
      cell.className = levelOf(numbers[i][j], largest(numbers));
    };
    cell.addEventListener("blur", commit);
    cell.addEventListener("keydown", event => { if (event.key === "Enter") { event.preventDefault(); commit(); } });
  });
  return table;
}

function fillBench(bench, view) {
  const changed = () => showStages(view);
  const heads = make("select", { id: "heads" }, ...[1, 2, 4, 8].map(x => make("option", { textContent: x, selected: x === inputs.numHeads })));
  heads.addEventListener("input", () => { inputs.numHeads = Number(heads.value); changed(); });
  const reset = make("button", { type: "button", textContent: "As it was" });
  reset.addEventListener("click", () => { inputs = fresh(); fillBench(bench, view); changed(); });
  const mask = make("div", { className: "editor" });
  drawMask(mask, inputs.mayAttend.map(row => row.map(Number)), rows => { inputs.mayAttend = rows.map(row => row.map(Boolean)); changed(); });
  bench.replaceChildren(
    make("p", { className: "rule", textContent: "Change the input: type over a number, draw the mask with the mouse, change the number of heads. Every step below follows." }),
    make("div", { className: "tables" }, editable(inputs.query, "query", "query", changed), editable(inputs.memory, "memory", "key", changed),
      make("div", {}, make("p", { className: "whose", textContent: "may_attend" }), mask)),
    make("p", { className: "rule" }, make("label", {}, "num_heads ", heads), " ", reset));
}
all("#steps-attention").forEach(view => {
  const bench = make("div", { className: "bench" });
  one(".call", view).after(bench);
  fillBench(bench, view);
});
