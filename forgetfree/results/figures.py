"""Figures in one look: colour-blind-safe, legible in print, PNG and SVG, the same bytes from the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forgetfree.display import escaped

#: Okabe and Ito's palette, by what is drawn: the same thing has the same colour and mark in every figure.
LOOK: dict[str, tuple[str, str]] = {
    "fine-tuned": ("#000000", "s"),
    "fine-tune": ("#000000", "s"),
    "continual-ft": ("#D55E00", "X"),
    "grafting-continual": ("#0072B2", "o"),
    "grafted": ("#0072B2", "o"),
    "learned": ("#0072B2", "o"),
    "movement": ("#E69F00", "^"),
    "random": ("#999999", "x"),
    "retrained": ("#009E73", "D"),
    "bitfit": ("#CC79A7", "v"),
    "biases": ("#CC79A7", "v"),
    "pre-trained": ("#56B4E9", "P"),
    "readout alone": ("#56B4E9", "P"),
    "pruned": ("#D55E00", "X"),
    "sgd": ("#0072B2", "o"),
    "adamw": ("#D55E00", "X"),
    "adamw + ℓ1": ("#009E73", "D"),
    "fisher": ("#D55E00", "X"),
    "label words": ("#0072B2", "o"),
    "linear": ("#D55E00", "X"),
    "true labels": ("#0072B2", "o"),
    "own labels": ("#D55E00", "X"),
    "graft": ("#0072B2", "o"),
    "LoRA": ("#D55E00", "X"),
    "Houlsby": ("#009E73", "D"),
    "Pfeiffer": ("#CC79A7", "v"),
}
_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.markersize": 5,
    "svg.hashsalt": "forgetfree",
}


def panels(
    titles: Sequence[str], *, rows: int = 1, width: float = 3.1, height: float = 2.7, share_y: bool = True
) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure with a column of panels for each title and ``rows`` rows, and its axes by row."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(max(3.6, width * len(titles)), height * rows), layout="constrained")
        axes: Any = figure.subplots(rows, len(titles), squeeze=False, sharey="row" if share_y else False)
        for ax, title in zip(axes[0], titles, strict=True):
            ax.set_title(title)
        return figure, [list(row) for row in axes]


def look(name: str) -> dict[str, Any]:
    """Return colour, mark and label of what is drawn."""
    color, marker = LOOK.get(name, ("#000000", "o"))
    return {"color": color, "marker": marker, "label": name}


def marks() -> Iterator[dict[str, Any]]:
    """Yield styles for other lines, such as tasks, without end; the first eighteen differ."""
    colors, shapes = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"), "o^DvXP"
    for style in cycle(("-", "--", "-.")):
        for color, shape in zip(colors, shapes, strict=True):
            yield {"color": color, "marker": shape, "linestyle": style, "fillstyle": "full" if style == "-" else "none"}


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Draw one legend below all panels."""
    with matplotlib.rc_context(_STYLE):
        handles, labels = [], []
        for ax in axes:
            for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
                if label not in labels:
                    handles.append(handle)
                    labels.append(label)
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=min(len(labels), max(1, int(figure.get_figwidth() / 1.4))),
        )


def save_figure(figure: Figure, path: Path) -> None:
    """Write ``path`` with .png and .svg, without dates, so that equal figures are equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    titles = [text for ax in figure.axes for text in (ax.title, ax.xaxis.label, ax.yaxis.label)]
    for text in (*titles, *(text for each in figure.legends for text in each.get_texts())):
        text.set_parse_math(False)  # names of tasks are shown as they are
        text.set_text("\n".join(map(escaped, text.get_text().split("\n"))))
    with matplotlib.rc_context(_STYLE):
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
        lines: which of them, in order.
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
