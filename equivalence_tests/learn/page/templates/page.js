"use strict";
// Everything shown is in the page already: this script only chooses what is in sight and lights things up.
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const one = (selector, within = document) => within.querySelector(selector);

/* Which section and which panel is in sight follows from the address. */
function goTo(address, byHand) {
  const target = document.getElementById(decodeURIComponent(address)) || document.getElementById("home");
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
    if (shown.has(a.hash.slice(1))) a.setAttribute("aria-current", "true"); else a.removeAttribute("aria-current");
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
function inTable(cell) { return { row: cell.parentElement.sectionRowIndex, column: cell.cellIndex - 1 }; }
function cellAt(table, row, column) { return table.tBodies[0].rows[row]?.cells[column + 1]; }
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

/* A number, and what it is made of. */
const cells = JSON.parse(one("#cells")?.textContent || "{}");
const explained = (step, number, row, column) =>
  (cells[step.dataset.step] || []).find(x => x[0] === number && x[1] === row && x[2] === column);
function light(cell) {
  const step = cell.closest(".step"), table = cell.closest("table"), { row, column } = inTable(cell);
  const number = Number(table.dataset.i);
  all(".lit, .here", step).forEach(x => x.classList.remove("lit", "here"));
  all(`table[data-t="${table.dataset.t}"][data-i="${number}"]`, step).forEach(x => {
    cellAt(x, row, column)?.classList.add("here");
    [x.tBodies[0].rows[row]?.cells[0], x.tHead.rows[0].cells[column + 1]].forEach(head => head?.classList.add("lit"));
  });
  const found = explained(step, number, row, column);
  if (!found) return;
  for (const [name, index, r, c] of found[4]) {
    const swatch = one(`.swatch[data-t="${name}"][data-i="${index}"]`, step);
    const across = Math.round(swatch.firstElementChild.viewBox.baseVal.width / 14);
    all("rect", swatch).forEach((rect, at) =>
      rect.classList.toggle("lit", (r === null || Math.floor(at / across) === r) && (c === null || at % across === c)));
  }
  const where = [...(all(`.side:first-child table`, step).length > 1 ? [`head ${number}`] : []),
    `${table.dataset.rows} ${row}`, `${table.dataset.columns} ${column}`].join(", ");
  const text = one(".sum", step), label = document.createElement("b");
  label.textContent = `${table.dataset.t}[${where}] = `;
  text.replaceChildren(label, found[3]);
}
for (const kind of ["mouseover", "focusin"])
  addEventListener(kind, event => { const cell = event.target.closest?.(".step table[data-t] tbody td"); if (cell) light(cell); });

/* Switches: only what was computed can be set. */
all(".board").forEach(board => {
  const states = new Set(all(".state", board).map(x => x.dataset.key)), fields = all("fieldset", board);
  const keyOf = chosen => fields.map(x => x.dataset.argument).filter(x => chosen[x]).map(x => `${x}.${chosen[x]}`).join("-") || "defaults";
  const chosenNow = () => Object.fromEntries(fields.map(x => [x.dataset.argument, Number(one("input:checked", x).value)]));
  const refresh = () => {
    const chosen = chosenNow();
    fields.forEach(field => {
      const argument = field.dataset.argument;
      field.classList.toggle("set", chosen[argument] > 0);
      all("input", field).forEach(input => {
        input.disabled = !states.has(keyOf({ ...chosen, [argument]: Number(input.value) }));
        if (input.disabled) input.setAttribute("aria-describedby", `rule-${board.dataset.board}`); else input.removeAttribute("aria-describedby");
      });
    });
    all(".told", board).forEach(x => x.classList.toggle("at", chosen[x.dataset.argument] > 0));
  };
  const show = () => { quietly = true; location.hash = `switches-${board.dataset.board}-${keyOf(chosenNow())}`; refresh(); };
  const form = one("form", board);
  form.addEventListener("input", show);
  form.addEventListener("reset", () => setTimeout(show));
  document.addEventListener("shown", event => {
    const state = event.detail.closest(".state");
    if (state && board.contains(state)) {
      const wanted = Object.fromEntries(state.dataset.key.split("-").map(x => x.split(".")));
      fields.forEach(x => { one(`input[value="${wanted[x.dataset.argument] || 0}"]`, x).checked = true; });
    }
    if (board.closest(".part").contains(event.detail)) refresh();
  });
});

/* Lines that are the same in both files are in the page once. */
all(".unit:not(.alone) .same").forEach(row => row.append(row.firstElementChild.cloneNode(true)));

/* Masks: the editor and its three forms, printed as torch prints them. */
const editor = one(".editor"), typed = one(".typed");
const isSet = button => button.getAttribute("aria-pressed") === "true";
function editMask(rows) {
  editor.style.gridTemplateColumns = `repeat(${rows[0].length + 1}, auto)`;
  const label = (text, kind) => Object.assign(document.createElement("span"), { textContent: text, className: kind });
  editor.replaceChildren(label("", "top"), ...[...rows[0]].map((_, j) => label(j, "top")),
    ...rows.flatMap((row, i) => [label(i, ""), ...[...row].map((bit, j) => {
      const button = Object.assign(document.createElement("button"), { type: "button", tabIndex: i || j ? -1 : 0 });
      button.setAttribute("aria-pressed", String(bit === "1"));
      button.setAttribute("aria-label", `query ${i}, key ${j}`);
      button.dataset.at = `${i} ${j}`;
      return button;
    })]));
  printForms();
}
function asTensor(rows, texts, tail = "") {
  // torch pads all to one width, but for infinities and what stands beside them.
  const width = texts.includes("-inf") ? 0 : Math.max(...rows.flat().map(x => texts[x].length));
  const lines = rows.map(row => `[${row.map(x => texts[x].padStart(width)).join(", ")}]`);
  return `tensor([${lines.join(",\n        ")}]${tail})`;
}
function printForms() {
  const buttons = all("button", editor), across = Number(buttons.at(-1).dataset.at.split(" ")[1]) + 1;
  const rows = [];
  buttons.forEach((x, at) => (at % across ? rows.at(-1) : rows[rows.push([]) - 1]).push(isSet(x) ? 1 : 0));
  const texts = { may_attend: ["False", "True"], module_mask: ["True", "False"], score_bias: ["-inf", "0."] };
  for (const [form, words] of Object.entries(texts)) one(`[data-form=${form}]`).textContent = asTensor(rows, words);
  typed.textContent = `may_attend = torch.tensor([${rows.map(row => `[${row.join(", ")}]`).join(", ")}], dtype=torch.bool)`;
}
if (editor) {
  editMask(editor.dataset.mask.split(" "));
  editor.addEventListener("click", event => {
    const button = event.target.closest("button");
    if (button) { button.setAttribute("aria-pressed", String(!isSet(button))); printForms(); }
  });
  editor.addEventListener("keydown", event => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }, move = moves[event.key];
    if (!move) return;
    const [i, j] = event.target.dataset.at.split(" ").map(Number);
    const next = one(`[data-at="${i + move[0]} ${j + move[1]}"]`, editor);
    event.preventDefault();
    if (next) { event.target.tabIndex = -1; next.tabIndex = 0; next.focus(); }
  });
  all(".load").forEach(button => button.addEventListener("click", () => {
    editMask(button.dataset.mask.split(" "));
    location.hash = "masks-converter";
  }));
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

/* Measurements: the answer for one length. */
all(".chart").forEach(chart => {
  const pick = () => {
    const length = one(".lengths input:checked", chart).value;
    all("[data-length]", chart).forEach(x => x.classList.toggle("at", x.dataset.length === length));
  };
  one(".lengths", chart).addEventListener("input", pick);
  pick();
});

/* Find the mistake: guesses are counted, the guilty line stays lit. */
all(".exercise").forEach(exercise => {
  let guesses = 0;
  all(".lines code", exercise).forEach(code => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: code.textContent });
    code.parentElement.style.setProperty("--deep", code.textContent.search(/\S/) + 4);  // a long line goes on further in
    code.replaceWith(button);
  });
  exercise.addEventListener("click", event => {
    const line = event.target.closest(".lines button");
    if (!line || line.matches(".found, .wrong")) return;
    guesses += 1;
    const right = line.parentElement.hasAttribute("data-guilty");
    line.classList.add(right ? "found" : "wrong");
    one(".verdict", exercise).textContent = right
      ? `Yes, this is the line. Found with ${guesses} ${guesses === 1 ? "guess" : "guesses"}.` : "No, this line is right.";
  });
});

/* What is printed is printed unfolded. */
addEventListener("beforeprint", () => all(".part.at details").forEach(x => { x.open = true; }));

goTo(location.hash.slice(1), false);
document.documentElement.classList.add("ready");
