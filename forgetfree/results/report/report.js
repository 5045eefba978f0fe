"use strict";
// A click on a column's name sorts the rows by it; a cell without a number goes last.
const number = (text) => parseFloat(text.replaceAll(",", ""));
function compare(a, b) {
  const [x, y] = [number(a), number(b)];
  if (Number.isFinite(x) && Number.isFinite(y)) return x - y;
  if (Number.isFinite(x)) return -Infinity;
  return Number.isFinite(y) ? Infinity : a.localeCompare(b);
}
function sort(heading, column) {
  const body = heading.closest("table").tBodies[0];
  const down = heading.getAttribute("aria-sort") === "ascending";
  for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const sorted = [...body.rows].sort((a, b) => {
    const order = compare(a.cells[column].textContent, b.cells[column].textContent);
    return down && Number.isFinite(order) ? -order : order;
  });
  body.append(...sorted);
}
for (const table of document.querySelectorAll("table")) {
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.textContent = heading.textContent;
    button.addEventListener("click", () => sort(heading, column));
    heading.replaceChildren(button);
  });
}
