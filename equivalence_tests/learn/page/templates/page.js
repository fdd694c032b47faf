// Everything that torch and scratch gave is in the page already: here it is chosen, lit up, and computed anew.

/* Which section and which panel is in sight follows from the address. */
function goTo(address, byHand) {
  const named = decodeURIComponent(address), found = document.getElementById(named);
  const target = found || all(".board").map(x => x.stateAt(named)).find(Boolean) || document.getElementById("home");
  const part = target.closest(".part");
  if (!part) return;
  all(".part").forEach(x => x.classList.toggle("at", x === part));
  all(".panels", part).forEach(group => {
    const panels = all(":scope > .panel", group);
    const wanted = panels.find(x => x.contains(target)) || panels.find(x => x.classList.contains("at")) || panels[0];
    panels.forEach(x => x.classList.toggle("at", x === wanted));
  });
  for (let box = target.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
  const shown = new Set([part.id, target.id, ...all(".panel.at", part).map(x => x.id)]);
  all("nav a").forEach(a => {
    const name = a.hash.slice(1), isFile = a.closest(".tabs") && document.getElementById(name)?.closest(".panel.at");
    if (shown.has(name) || isFile) a.setAttribute("aria-current", "true"); else a.removeAttribute("aria-current");
  });
  one(".bar [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  document.dispatchEvent(new CustomEvent("shown", { detail: target }));
  if (target === part || target.matches(".panel")) {
    if (target === part) scrollTo({ top: 0, behavior: "instant" });
    else if (byHand) part.getBoundingClientRect().top < -innerHeight && target.scrollIntoView();
  } else if (!quietly) target.scrollIntoView({ behavior: byHand ? "auto" : "instant" });
  if (byHand) { target.tabIndex = -1; target.focus({ preventScroll: true }); }
}
let quietly = false;  // the address was changed by a control that keeps the focus
addEventListener("hashchange", () => { goTo(location.hash.slice(1), !quietly); quietly = false; });

/* A grid of numbers is one stop of the Tab key; inside it the arrow keys move. */
all("table.heat[data-t]").forEach(table => { const first = cellAt(table, 0, 0); if (first) first.tabIndex = 0; });
addEventListener("keydown", event => {
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const cell = event.target.closest?.("table.heat[data-t] td"), move = moves[event.key];
  if (!cell || !move) return;
  const table = cell.closest("table"), { row, column } = inTable(cell);
  const next = row + move[0] >= 0 && column + move[1] >= 0 && cellAt(table, row + move[0], column + move[1]);
  if (!next) return;
  event.preventDefault();
  cell.tabIndex = -1; next.tabIndex = 0; next.focus();
});

/* Switches: a setting that torch was run with is in the page already, every other one is computed here. */
const boards = JSON.parse(one("#boards")?.textContent || "{}");
const WORDS = { sdpa: ["sample", "head", "query", "feature"], weights: ["sample", "head", "query", "key"], output: ["query", "sample", "feature"] };
function wordsOf(name, tensor, x, chosen) {
  let depth = 0;
  for (let part = x; Array.isArray(part); part = part[0]) depth += 1;
  if (name === "sdpa") return WORDS.sdpa.slice(-depth);
  if (tensor === "output") return depth === 2 ? ["query", "feature"] : chosen.batch_first ? ["sample", "query", "feature"] : WORDS.output;
  if (chosen.average_attn_weights) return WORDS.weights.slice(-depth);
  return depth === 2 ? ["query", "key"] : ["sample", "query", "key"];
}
const NOTES = {
  dtype: "Computed in float64: torch rounds every step to the dtype.",
  dropout: "What is dropped is drawn anew on this page: torch draws other weights.",
  dropout_p: "What is dropped is drawn anew on this page: torch draws other weights.",
  device: "On meta, torch computes only shapes: these numbers are those of the CPU.",
};
function computed(name, chosen) {
  const data = boards[name], error = Boards.errorOf(name, data, chosen);
  const code = make("pre", { className: "code", textContent: Boards.codeOf(name, data, chosen) });
  if (error) return [code, make("p", { className: "output" }, make("span", { textContent: "torch.nn" }), " ", make("strong", { textContent: error }))];
  const notes = Object.keys(NOTES).filter(x => chosen[x]).map(x => make("p", { className: "note", textContent: NOTES[x] }));
  const found = Boards.resultOf(name, data, chosen, () => (Math.random() < .5 ? 0 : 2));
  const shown = Object.entries(found).flatMap(([tensor, x]) => [
    make("p", { className: "shape" }, make("b", { textContent: tensor })),
    make("div", { className: "tables" }, ...heats(x, wordsOf(name, tensor, x, chosen), tensor === "weights" ? { top: 1 } : {})),
  ]);
  return [code, make("p", { className: "gap", textContent: "Computed on this page, by a script that is tested against torch.nn." }), ...notes, ...shown];
}
all(".board").forEach(board => {
  const name = board.dataset.board, prefix = `switches-${name}-`, fields = all("fieldset", board);
  const run = new Map(all(".state", board).map(x => [x.dataset.key, x]));
  const live = make("article", { className: "panel state live" });
  one(".states", board).append(live);
  const keyOf = chosen => fields.map(x => x.dataset.argument).filter(x => chosen[x]).map(x => `${x}.${chosen[x]}`).join("-") || "defaults";
  const chosenNow = () => Object.fromEntries(fields.map(x => [x.dataset.argument, Number(one("input:checked", x).value)]));
  const wantedBy = key => Object.fromEntries(key.split("-").map(x => x.split(".")));
  const refresh = () => {
    const chosen = chosenNow(), key = keyOf(chosen);
    fields.forEach(field => field.classList.toggle("set", chosen[field.dataset.argument] > 0));
    all(".told", board).forEach(x => x.classList.toggle("at", chosen[x.dataset.argument] > 0));
    if (run.has(key) || live.dataset.key === key) return;
    const set = new Set(key.split("-")), within = [...run].filter(([other]) => other.split("-").every(x => set.has(x)));
    const traps = new Set(within.flatMap(([, state]) => all(".named a", state).map(x => x.textContent)));
    const links = [...traps].map(x => make("a", { href: `#trap-${x}`, textContent: x }));
    const title = make("p", { className: "whose", textContent: fields.filter(x => chosen[x.dataset.argument]).map(x => `${one("legend", x).textContent}: ${one("input:checked + span", x).textContent}`).join(", ") });
    live.replaceChildren(title, ...computed(name, chosen), ...(links.length ? [make("p", { className: "named" }, "Traps of this combination: ", ...links.flatMap(x => [x, " "]))] : []));
    live.dataset.key = key;
  };
  const show = () => { quietly = true; location.hash = prefix + keyOf(chosenNow()); };
  const form = one("form", board);
  form.addEventListener("input", show);
  form.addEventListener("reset", () => setTimeout(show));
  /* The address of a setting that was not run leads to the one that is computed. */
  board.stateAt = address => {
    const key = address.startsWith(prefix) ? address.slice(prefix.length) : "", wanted = wantedBy(key);
    if (!key || !fields.some(x => wanted[x.dataset.argument])) return null;
    fields.forEach(x => { (one(`input[value="${wanted[x.dataset.argument] || 0}"]`, x) || one("input", x)).checked = true; });
    refresh();
    return run.get(keyOf(chosenNow())) || live;
  };
  document.addEventListener("shown", event => {
    const state = event.detail.closest(".state");
    if (state && state !== live && board.contains(state)) {
      const wanted = wantedBy(state.dataset.key);
      fields.forEach(x => { one(`input[value="${wanted[x.dataset.argument] || 0}"]`, x).checked = true; });
    }
    if (board.closest(".part").contains(event.detail)) refresh();
  });
});

/* Lines that are the same in both files are in the page once. */
all(".unit:not(.alone) .same").forEach(row => row.append(row.firstElementChild.cloneNode(true)));

/* Masks: the editor and its three forms, printed as torch prints them. */
const editor = one(".converter .editor"), typed = one(".typed");
function asTensor(rows, texts, tail = "") {
  // torch pads all to one width, but for infinities and what stands beside them.
  const width = texts.includes("-inf") ? 0 : Math.max(...rows.flat().map(x => texts[x].length));
  const lines = rows.map(row => `[${row.map(x => texts[x].padStart(width)).join(", ")}]`);
  return `tensor([${lines.join(",\n        ")}]${tail})`;
}
function printForms(rows) {
  const texts = { may_attend: ["False", "True"], module_mask: ["True", "False"], score_bias: ["-inf", "0."] };
  for (const [form, words] of Object.entries(texts)) one(`[data-form=${form}]`).textContent = asTensor(rows, words);
  typed.textContent = `may_attend = torch.tensor([${rows.map(row => `[${row.join(", ")}]`).join(", ")}], dtype=torch.bool)`;
}
if (editor) {
  const edit = bits => {
    const rows = bits.split(" ").map(row => [...row].map(Number));
    drawMask(editor, rows, printForms);
    printForms(rows);
  };
  edit(editor.dataset.mask);
  all(".load").forEach(button => button.addEventListener("click", () => { edit(button.dataset.mask); location.hash = "masks-converter"; }));
}

/* Traps: found by words and severity. */
const search = one("#trap-search"), severities = all("[name=severity]");
function findTraps() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = new Set(severities.filter(x => x.checked).map(x => x.value));
  const found = all(".trap").filter(trap => {
    trap.hidden = !wanted.has(trap.dataset.severity) || !words.every(word => trap.textContent.toLowerCase().includes(word));
    return !trap.hidden;
  });
  one("#trap-count").textContent = `${found.length} trap${found.length === 1 ? "" : "s"}`;
}
if (search) {
  search.form.addEventListener("submit", event => event.preventDefault());
  [search, ...severities].forEach(x => x.addEventListener("input", findTraps));
}

/* Measurements: what is computed, and the answer for one length. */
const what = one("#speed-what"), lengths = one("#speed-length");
function showLength(chart) {
  all("[data-length]", chart).forEach(x => x.classList.toggle("at", x.dataset.length === lengths.value));
}
function showMeasured(panel) {
  const measured = all(".answer[data-length]", panel).map(x => x.dataset.length), before = lengths.value;
  what.value = panel.id;
  lengths.closest("label").hidden = !measured.length;
  lengths.replaceChildren(...measured.map(x => make("option", { value: x, textContent: Number(x).toLocaleString("en") })));
  if (measured.length) lengths.value = measured.includes(before) ? before : measured.at(-1);
  showLength(panel);
}
if (what) {
  what.addEventListener("input", () => { quietly = true; location.hash = what.value; });
  lengths.addEventListener("input", () => showLength(document.getElementById(what.value)));
  document.addEventListener("shown", () => { const panel = one("#speed .panel.at"); if (panel) showMeasured(panel); });
}

/* Find the mistake: a wrong guess brings a hint, the first right one points, and the guilty line stays lit. */
const POINTS = 3;
let score = 0;
function hintFor(exercise, wrong) {
  const lines = all(".lines li", exercise), guilty = lines.findIndex(x => x.hasAttribute("data-guilty"));
  const method = lines.slice(0, guilty + 1).map(x => x.textContent.match(/^\s*def (\w+)/)?.[1]).filter(Boolean).at(-1);
  if (wrong === 1)
    return exercise.dataset.weights === "right" ? "The weights are right: the mistake is in what is done with the values, or after that."
      : "The weights are wrong: the mistake is in them, or before them.";
  return wrong === 2 ? `It is in the method ${method}.` : `It is in the method ${method}, in line ${guilty + 1}.`;
}
all(".exercise").forEach(exercise => {
  let guesses = 0;
  all(".lines code", exercise).forEach(code => {
    const button = make("button", { type: "button", textContent: code.textContent });
    code.parentElement.style.setProperty("--deep", code.textContent.search(/\S/) + 4);  // a long line goes on further in
    code.replaceWith(button);
  });
  exercise.addEventListener("click", event => {
    const line = event.target.closest(".lines button"), isFound = one(".found", exercise);
    if (!line || isFound || line.matches(".wrong")) return;
    guesses += 1;
    const right = line.parentElement.hasAttribute("data-guilty"), points = Math.max(POINTS + 1 - guesses, 0);
    line.classList.add(right ? "found" : "wrong");
    if (right) {
      score += points;
      one(`.tabs a[href="#${exercise.id}"]`).classList.add("done");
      one("#score").textContent = `Score: ${score} of ${POINTS * all(".exercise").length}`;
    }
    one(".verdict", exercise).textContent = right
      ? `Yes, this is the line. Found with ${guesses} ${guesses === 1 ? "guess" : "guesses"}: ${points} of ${POINTS} points.`
      : `No, this line is right. ${hintFor(exercise, guesses)}`;
  });
});

/* What is wider than its box fades out at the side where it goes on. */
function fade(box) { box.classList.toggle("more", box.scrollWidth - box.clientWidth - box.scrollLeft > 4); }
const WIDE = ".tables, .exercise details pre, .value";
addEventListener("scroll", event => { if (event.target.matches?.(WIDE)) fade(event.target); }, true);
addEventListener("toggle", event => all(WIDE, event.target).forEach(fade), true);
addEventListener("resize", () => all(`.part.at :is(${WIDE})`).forEach(fade));
document.addEventListener("shown", event => all(WIDE, event.detail.closest(".part")).forEach(fade));

/* What is printed is printed unfolded. */
addEventListener("beforeprint", () => all(".part.at details").forEach(x => { x.open = true; }));

goTo(location.hash.slice(1), false);
document.documentElement.classList.add("ready");
