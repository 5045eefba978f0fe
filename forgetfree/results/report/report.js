"use strict";
// A click on a column's name sorts the rows by it; a cell without a number goes last, both ways.
const number = (text) => parseFloat(text.replaceAll(",", ""));
function compare(a, b, sign) {
  const [x, y] = [number(a), number(b)];
  const [known, other] = [Number.isFinite(x), Number.isFinite(y)];
  if (known !== other) return known ? -1 : 1;
  return sign * (known ? x - y : a.localeCompare(b));
}
function sort(heading, column) {
  const body = heading.closest("table").tBodies[0];
  const down = heading.getAttribute("aria-sort") === "ascending";
  for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const text = (row) => row.cells[column].textContent;
  body.append(...[...body.rows].sort((a, b) => compare(text(a), text(b), down ? -1 : 1)));
}
for (const table of document.querySelectorAll("table")) {
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.textContent = heading.textContent;
    button.addEventListener("click", () => sort(heading, column));
    heading.replaceChildren(button);
  });
}
