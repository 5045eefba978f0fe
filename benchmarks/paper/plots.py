"""The figures of experiments, as files: equal names have equal colours and markers in all figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forgetfree.display import escaped
from forgetfree.results.report.figures import COLOURS, STYLE

#: The colour, by name, and the marker of each line.
LOOK: dict[str, tuple[str, str]] = {
    "fine-tuned": ("text", "s"),
    "fine-tune": ("text", "s"),
    "continual-ft": ("vermilion", "X"),
    "grafting-continual": ("blue", "o"),
    "grafted": ("blue", "o"),
    "learned": ("blue", "o"),
    "movement": ("amber", "^"),
    "random": ("faint", "x"),
    "retrained": ("green", "D"),
    "bitfit": ("purple", "v"),
    "biases": ("purple", "v"),
    "pre-trained": ("cyan", "P"),
    "readout alone": ("cyan", "P"),
    "pruned": ("vermilion", "X"),
    "sgd": ("blue", "o"),
    "adamw": ("vermilion", "X"),
    "adamw + ℓ1": ("green", "D"),
    "fisher": ("vermilion", "X"),
    "label words": ("blue", "o"),
    "linear": ("vermilion", "X"),
    "true labels": ("blue", "o"),
    "own labels": ("vermilion", "X"),
    "graft": ("blue", "o"),
    "LoRA": ("vermilion", "X"),
    "Houlsby": ("green", "D"),
    "Pfeiffer": ("purple", "v"),
}


def panels(
    titles: Sequence[str], *, rows: int = 1, width: float = 3.1, height: float = 2.7, share_y: bool = True
) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure with a column of panels for each title and ``rows`` rows, and its axes by row."""
    with matplotlib.rc_context(STYLE):
        size = max(3.6, width * len(titles)), height * rows
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        axes: Any = figure.subplots(rows, len(titles), squeeze=False, sharey="row" if share_y else False)
        for ax, title in zip(axes[0], titles, strict=True):
            ax.set_title(title)
        return figure, [list(row) for row in axes]


def look(name: str) -> dict[str, Any]:
    """Return colour, marker and label of a line."""
    colour, marker = LOOK.get(name, ("text", "o"))
    return {"color": COLOURS[colour][0], "marker": marker, "label": name}


def save_figure(figure: Figure, path: Path) -> None:
    """Write ``path`` with .png and .svg, without dates, so that equal figures are equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    titles = [text for ax in figure.axes for text in (ax.title, ax.xaxis.label, ax.yaxis.label)]
    for text in (*titles, *(text for each in figure.legends for text in each.get_texts())):
        text.set_parse_math(False)  # names of tasks are not math
        text.set_text("\n".join(map(escaped, text.get_text().split("\n"))))
    with matplotlib.rc_context(STYLE):
        figure.savefig(path.with_suffix(".png"), dpi=150, metadata={"Software": None})
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def curves(
    rows: Sequence[Mapping[str, Any]], panel: str, x: str, y: str, line: str, lines: Sequence[str]
) -> tuple[Figure, list[Axes]]:
    """Draw a panel for each value of ``panel``: lines of ``y`` (in %; mean and range over seeds) over ``x`` (logarithmic).

    Args:
        rows: tidy rows.
        panel: the key whose values are the panels.
        x: the key along the axis.
        y: a fraction.
        line: the key whose values are the lines.
        lines: the values to draw, in order.
    """
    titles = list(dict.fromkeys(row[panel] for row in rows))
    figure, (axes,) = panels(titles)
    for ax, title in zip(axes, titles, strict=True):
        for name in lines:
            points: dict[float, list[float]] = {}
            for row in rows:
                if row[panel] == title and row[line] == name:
                    points.setdefault(row[x], []).append(100 * row[y])
            places = sorted(points)
            ax.fill_between(
                places,
                [min(points[place]) for place in places],
                [max(points[place]) for place in places],
                color=look(name)["color"],
                alpha=0.15,
                linewidth=0,
            )
            ax.plot(places, [sum(points[place]) / len(points[place]) for place in places], **look(name))
        ax.set_xscale("log")
    return figure, axes
