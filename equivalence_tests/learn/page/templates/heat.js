// Numbers as figures.py shows them, and masks to draw.
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const one = (selector, within = document) => within.querySelector(selector);
const inTable = cell => ({ row: cell.parentElement.sectionRowIndex, column: cell.cellIndex - 1 });
const cellAt = (table, row, column) => table.tBodies[0].rows[row]?.cells[column + 1];
const LEVELS = 8;
function printed(number) {
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "NaN" : number > 0 ? "∞" : "−∞";
  if (Math.abs(number) >= 1e4) return number.toExponential(3).replace("-", "−").replace(/e\+(\d)$/, "e+0$1");
  const text = number.toFixed(3);
  return (/^-[0.]+$/.test(text) ? text.slice(1) : text).replace("-", "−");
}
function levelOf(number, top) {
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "nan" : "inf";
  const step = top ? Math.round(Math.min(Math.abs(number) / top, 1) * LEVELS) : 0;
  return step ? (number > 0 ? "p" : "n") + step : "z";
}
const flat = x => (Array.isArray(x) ? x.flatMap(flat) : [x]);
const largest = x => Math.max(0, ...flat(x).filter(Number.isFinite).map(Math.abs));
const make = (name, properties = {}, ...children) => { const x = Object.assign(document.createElement(name), properties); x.append(...children); return x; };

/* A table of numbers as the macro heat writes it; named, it takes part in a step. */
function heat(numbers, { title = "", rows, columns, top = largest(numbers), name = "", index = 0 }) {
  const cell = x => make("td", { className: levelOf(x, top), textContent: printed(x) });
  const table = make("table", { className: "heat" },
    make("caption", {}, ...(title ? [make("b", { textContent: title }), " "] : []), make("span", { textContent: `${rows} ↓ ${columns} →` })),
    make("thead", {}, make("tr", {}, make("th"), ...numbers[0].map((_, j) => make("th", { textContent: j })))),
    make("tbody", {}, ...numbers.map((row, i) => make("tr", {}, make("th", { textContent: i }), ...row.map(cell)))));
  if (name) Object.assign(table.dataset, { t: name, i: index, rows, columns });
  return table;
}

/* All tables of a tensor with a word for each axis: an axis of length 1 goes unnamed. */
function heats(x, words, options = {}, title = "") {
  if (words.length === 1) return heats([x], ["", ...words], options, title);
  const top = options.top ?? largest(x);
  if (words.length === 2) return [heat(x, { ...options, title, rows: words[0], columns: words[1], top })];
  return x.flatMap((part, n) => heats(part, words.slice(1), { ...options, top }, [title, x.length > 1 ? `${words[0]} ${n}` : ""].filter(Boolean).join(", ")));
}

/* A mask as buttons, which the mouse draws over; `rows` holds 0 and 1, and `changed` is called with them. */
function drawMask(box, rows, changed) {
  const label = (text, kind) => make("span", { textContent: text, className: kind });
  const button = (bit, i, j) => {
    const found = make("button", { type: "button", tabIndex: i || j ? -1 : 0, ariaPressed: String(Boolean(bit)), ariaLabel: `query ${i}, key ${j}` });
    found.dataset.at = `${i} ${j}`;
    return found;
  };
  const set = (x, bit) => {
    const [i, j] = x.dataset.at.split(" ").map(Number);
    if (rows[i][j] === bit) return;
    rows[i][j] = bit;
    x.ariaPressed = String(Boolean(bit));
    changed(rows);
  };
  const bitOf = x => Number(x.ariaPressed === "true");
  let drawing = null;
  box.style.gridTemplateColumns = `repeat(${rows[0].length + 1}, auto)`;
  box.replaceChildren(label("", "top"), ...rows[0].map((_, j) => label(j, "top")), ...rows.flatMap((row, i) => [label(i, ""), ...row.map((bit, j) => button(bit, i, j))]));
  box.onpointerdown = event => {
    const x = event.target.closest("button");
    if (!x) return;
    x.releasePointerCapture(event.pointerId);
    drawing = 1 - bitOf(x);
    set(x, drawing);
  };
  box.onpointerover = event => { const x = event.target.closest("button"); if (x && drawing !== null && event.buttons) set(x, drawing); };
  box.onpointerup = box.onpointercancel = box.onpointerleave = () => { drawing = null; };
  box.onclick = event => { const x = event.target.closest("button"); if (x && !event.detail) set(x, 1 - bitOf(x)); };  // by the keyboard
  box.onkeydown = event => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }, move = moves[event.key];
    if (!move || !event.target.dataset.at) return;
    const [i, j] = event.target.dataset.at.split(" ").map(Number), next = one(`[data-at="${i + move[0]} ${j + move[1]}"]`, box);
    event.preventDefault();
    if (next) { event.target.tabIndex = -1; next.tabIndex = 0; next.focus(); }
  };
}
