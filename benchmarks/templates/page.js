"use strict";
const filters = document.getElementById("filters");
const selects = [...filters.querySelectorAll("select")];
const articles = [...document.querySelectorAll("article")];

const fits = (article, select, value) => value === "" || article.dataset[select.name] === value;

function filter() {
  for (const article of articles) {
    article.hidden = !selects.every((select) => fits(article, select, select.value));
  }
  document.getElementById("nothing").hidden = articles.some((article) => !article.hidden);
  for (const select of selects) {
    const others = selects.filter((other) => other !== select);
    const candidates = articles.filter((article) => others.every((other) => fits(article, other, other.value)));
    for (const option of select.options) {
      const count = candidates.filter((article) => fits(article, select, option.value)).length;
      option.textContent = `${option.value || "all"} (${count})`;
    }
  }
}

const table = document.getElementById("advice");
const body = table.tBodies[0];

function sort(column) {
  const heading = table.tHead.rows[0].cells[column];
  const up = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  const text = (row) => row.cells[column].textContent;
  const number = (row) => Number(row.cells[column].dataset.value);
  const isNumber = [...body.rows].some((row) => "value" in row.cells[column].dataset);
  const compare = (one, other) => (isNumber ? number(one) - number(other) : text(one).localeCompare(text(other), "en"));
  const isEmpty = (row) => text(row) === "";
  const inOrder = (one, other) => isEmpty(one) - isEmpty(other) || (up ? 1 : -1) * compare(one, other);
  body.append(...[...body.rows].sort(inOrder));
}

function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of body.rows) {
    row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  }
}

filters.hidden = false;
filters.addEventListener("change", filter);
filter();
[...table.tHead.rows[0].cells].forEach((cell, column) => {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = cell.textContent;
  button.addEventListener("click", () => sort(column));
  cell.replaceChildren(button);
});
const label = document.getElementById("search");
label.hidden = false;
label.querySelector("input").addEventListener("input", (event) => search(event.target.value));
