// The layer with switches: everything below them follows.
const layerGiven = JSON.parse(one("#layer")?.textContent || "null");
const freshLayer = () => layerGiven && structuredClone(layerGiven.inputs);
let layerInputs = freshLayer(), layerFound = null;

function layerStep(stage, number) {
  const { name, tables } = stage, isWeights = stage.kind === "weights", [part, what] = name.split(" ");
  const words = layerGiven.words[isWeights ? name : name.replace(/^residual\d$/, "add")];
  const drawn = tables.map((x, index) => heat(x, {
    title: isWeights && tables.length > 1 ? `head ${index}` : "", rows: isWeights ? "query" : "token", columns: isWeights ? "key" : part === "linear1" || stage.kind === "activation" ? "unit" : "feature",
    top: isWeights ? 1 : largest(tables), name, index,
  }));
  drawn.forEach(table => { cellAt(table, 0, 0).tabIndex = 0; });
  return make("article", { className: "step", id: `steps-layer-${number}` },
    make("h4", { textContent: what ? `${what} of ${part}` : name }),
    make("p", { className: "formula" }, make("code", { textContent: Layers.formulaOf(stage, layerInputs.activation) })),
    make("p", { textContent: words }), make("div", { className: "tables" }, ...drawn),
    make("p", { className: "sum", textContent: "Point at a number to see how it is computed.", ariaLive: "polite" }));
}

function showLayer(view) {
  layerFound = Layers.stagesOf(layerGiven, layerInputs);
  one(".call", view).textContent = Layers.codeOf(layerInputs);
  one(".way", view).replaceChildren(...layerFound.stages.flatMap(({ name }, n) => [n ? " → " : "", make("a", { href: `#steps-layer-${n + 1}`, textContent: name })]));
  one(".live", view).replaceChildren(...layerFound.stages.map((stage, n) => layerStep(stage, n + 1)));
}

function fillLayerBench(view) {
  const changed = () => showLayer(view), bench = one(".bench", view);
  const choice = (label, key, options) => {
    const chosen = make("select", { name: key }, ...options.map(([text, value]) => make("option", { textContent: text, selected: value === layerInputs[key] })));
    chosen.addEventListener("input", () => { layerInputs[key] = options[chosen.selectedIndex][1]; fillLayerBench(view); changed(); one(`[name=${key}]`, view).focus(); });
    return make("label", {}, `${label} `, chosen);
  };
  const switches = [
    choice("layer", "isDecoder", [["encoder", false], ["decoder", true]]), choice("norm_first", "normFirst", [["False", false], ["True", true]]),
    choice("activation", "activation", [["relu", "relu"], ["gelu", "gelu"]]), choice("nhead", "numHeads", [1, 2, 4, 8].map(x => [x, x])),
    choice("bias", "bias", [["True", true], ["False", false]]), choice("layer_norm_eps", "eps", [["1e-05", 1e-5], ["0.1", .1]]),
  ];
  const reset = make("button", { type: "button", textContent: "As it was" }), mask = make("div", { className: "editor" }), x = layerInputs.isDecoder ? "tgt" : "src";
  reset.addEventListener("click", () => { layerInputs = freshLayer(); fillLayerBench(view); changed(); });
  drawMask(mask, layerInputs.mayAttend.map(row => row.map(Number)), rows => { layerInputs.mayAttend = rows.map(row => row.map(Boolean)); changed(); });
  bench.replaceChildren(make("p", { className: "switches" }, ...switches, reset),
    make("div", { className: "tables" }, editable(layerInputs.x, x, "token", changed), ...(layerInputs.isDecoder ? [editable(layerInputs.memory, "memory", "token", changed)] : []),
      make("div", {}, make("p", { className: "whose", textContent: "may_attend" }), mask)));
}
all("#steps-layer").forEach(view => { fillLayerBench(view); showLayer(view); });
