"""Draw the pictures of docs/concepts.md from the numbers of its own code: ``python docs/figures/concepts.py``.

The page's code blocks run, and what they leave behind is drawn. The pictures are plain SVG, written by hand, so that the same
numbers always give the same bytes, and so that they follow the reader's light or dark scheme.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

PAGE = Path(__file__).parent.parent / "concepts.md"
LABEL, CELL, ROW, MARGIN, HEAD = 178, 52, 34, 14, 46  # widths and heights in pixels

#: The colours of what is drawn: in the light scheme and in the dark one.
COLOURS = {
    "page": ("#ffffff", "#0d1117"),
    "text": ("#1f2328", "#e6edf3"),
    "faint": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#3d444d"),
    "none": ("#f6f8fa", "#151b23"),
    "first": ("#b6d7ff", "#1f4f85"),
    "second": ("#ffd3a1", "#84500f"),
}
#: A cell: its text and the colour behind it.
Cell = tuple[str, str]


def numbers(page: Path = PAGE) -> dict[str, Any]:
    """Run the page's Python blocks and return the names that they define."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S):
        exec(compile(block, str(page), "exec"), names)
    return names


def pictures(names: dict[str, Any]) -> dict[str, str]:
    """Return the pictures as SVG text, by the name of their file."""
    space, pre, tuned, region = names["space"], names["theta_pre"], names["theta_ft"], names["region"]
    size = len(space)

    def row(values: Sequence[float], *colours: tuple[Any, str]) -> list[Cell]:
        return [(f"{value:g}", _colour(entry, colours)) for entry, value in enumerate(values)]

    def members(*colours: tuple[Any, str], mark: str = "1", other: str = "0") -> list[Cell]:
        found = [_colour(entry, colours) for entry in range(size)]
        return [(other if colour == "none" else mark, colour) for colour in found]

    reviews, news, trainable = (region, "first"), (names["found"], "second"), (names["trainable"], "second")
    for_news = names["grafted"].clone()
    for_news[trainable[0].indices] = names["news"].values
    ledger = names["ledger"]
    every = type(region).of(range(size))
    owners = [[*ledger.tasks, "–"][owner] for owner in ledger.owners(every, ledger.last).tolist()]
    scores, gamma = names["scores"], names["gamma"]
    base = names["base"].nonzero().flatten().tolist()
    return {
        "concepts-graft": _strip(
            space,
            {
                "θ_pre (pre-trained)": row(pre.tolist()),
                "θ_ft (fine-tuned)": row(tuned.tolist(), ((tuned != pre).nonzero().flatten().tolist(), "second")),
                "γ (region)": members(reviews),
                "θ(γ) (grafted)": row(names["grafted"].tolist(), reviews),
            },
            "Orange: fine-tuning moved it. Blue: in the region.",
        ),
        "concepts-mask": _strip(
            space,
            {
                "γ_base (first guess)": members((base, "second")),
                "S (mask scores)": row(scores.tolist()),
                "γ (eq. 4)": [(f"{value:.2f}", _colour(i, (reviews,))) for i, value in enumerate(gamma.tolist())],
                "region": members(reviews),
            },
            "S stays at −10 where fine-tuning moved nothing: there is nothing to choose.",
        ),
        "concepts-ledger": _strip(
            space,
            {
                "γ_1 (reviews)": members(reviews),
                "γ_2 (news)": members(news),
                "news may train": members(trainable),
                "owner": [(name, _colour(i, (reviews, trainable))) for i, name in enumerate(owners)],
                "answers for reviews": row(names["grafted"].tolist(), reviews),
                "answers for news": row(for_news.tolist(), reviews, trainable),
            },
            "Blue: reviews. Orange: news. Both regions hold entry 4; reviews owns it.",
        ),
        "concepts-forgetting": _matrix(names["matrix"]),
    }


def _colour(entry: int, colours: Sequence[tuple[Any, str]]) -> str:
    """The colour of the first set that holds the entry."""
    return next((colour for entries, colour in colours if entry in getattr(entries, "indices", entries)), "none")


def _strip(space: Any, rows: dict[str, list[Cell]], note: str) -> str:
    """Draw one row of cells per quantity, under the tensors' names and the flat index."""
    parts = []
    for tensor in space.tensors:
        left, width = MARGIN + LABEL + tensor.offset * CELL, tensor.size * CELL
        parts.append(_text(left + width / 2, MARGIN + 12, f"{tensor.name} {tensor.shape}", "faint"))
        parts.append(f'<path d="M{left + 3} {MARGIN + 19}h{width - 6}" class="line" stroke="{COLOURS["line"][0]}"/>')
    parts += [_text(MARGIN + LABEL + (i + 0.5) * CELL, MARGIN + 36, str(i), "faint") for i in range(len(space))]
    return _draw(rows, parts, len(space), note)


def _matrix(matrix: list[list[float]]) -> str:
    """Draw a matrix of scores: scores of tasks that are learned in blue, those that have fallen in orange."""
    parts = [_text(MARGIN + LABEL + (j + 0.5) * CELL, MARGIN + 36, f"task {j + 1}", "faint") for j in range(3)]
    rows: dict[str, list[Cell]] = {}
    for i, scores in enumerate(matrix):
        best = [max(row[j] for row in matrix[j + 1 : i + 1]) if i > j else 0 for j in range(len(scores))]
        colours = ["none" if i <= j else "first" if score >= best[j] else "second" for j, score in enumerate(scores)]
        cells = [(f"{score:.0%}", colour) for score, colour in zip(scores, colours, strict=True)]
        rows[f"after task {i}" if i else "before training"] = cells
    return _draw(rows, parts, 3, "Blue: learned. Orange: partly forgotten.")


def _draw(rows: dict[str, list[Cell]], parts: list[str], columns: int, note: str) -> str:
    width = max(2 * MARGIN + LABEL + columns * CELL, 460)
    for i, (label, cells) in enumerate(rows.items()):
        top = MARGIN + HEAD + i * ROW
        parts.append(_text(MARGIN + LABEL - 10, top + 20, label, "text", anchor="end"))
        for j, (value, colour) in enumerate(cells):
            left = MARGIN + LABEL + j * CELL
            parts.append(
                f'<rect x="{left + 1}" y="{top + 1}" width="{CELL - 2}" height="{ROW - 6}" rx="3" class="{colour}" '
                f'fill="{COLOURS[colour][0]}"/>'
            )
            parts.append(_text(left + CELL / 2, top + 20, value.replace("-", "−"), "text", size=11))
    bottom = MARGIN + HEAD + len(rows) * ROW
    parts.append(_text(MARGIN + LABEL, bottom + 16, note, "faint", anchor="start"))
    height = bottom + 16 + MARGIN
    return _page(width, height, parts)


def _page(width: int, height: int, parts: Sequence[str], dark: str = "") -> str:
    """The whole picture: its parts on a page, and the styles of the dark scheme, with those that it adds to ours."""
    ours = "".join(f".{name}{{fill:{after}}}" for name, (_, after) in COLOURS.items() if name != "line")
    ours += f".line{{stroke:{COLOURS['line'][1]}}}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="system-ui, sans-serif">',
            f"<style>@media (prefers-color-scheme: dark){{{ours}{dark}}}</style>",
            f'<rect width="{width}" height="{height}" rx="6" class="page" fill="{COLOURS["page"][0]}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, words: str, colour: str, *, anchor: str = "middle", size: int = 13) -> str:
    fill = COLOURS[colour][0]
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" class="{colour}" fill="{fill}">'
        f"{escape(words)}</text>"
    )


if __name__ == "__main__":
    for name, svg in pictures(numbers()).items():
        (Path(__file__).parent / f"{name}.svg").write_text(svg, encoding="utf-8")
