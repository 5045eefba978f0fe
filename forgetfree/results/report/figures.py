"""Figures in one style: legible for the colour-blind and in print, and byte-identical for equal numbers.

A figure is drawn with the colours of the light scheme; in the SVG of a page each of them becomes a variable of its style sheet,
which follows the reader's light or dark scheme.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forgetfree.display import PLAIN, Scale, escaped
from forgetfree.results.metrics import Floats
from forgetfree.results.report.page import WIDE

#: Colours by name, in the light scheme and in the dark one. The contrast with the page is at least 3 for lines and 4.5 for
#: text.
COLOURS: dict[str, tuple[str, str]] = {
    "text": ("#1b1f24", "#e6e9ee"),
    "faint": ("#59616b", "#a3abb5"),
    "line": ("#d3d8de", "#3a424c"),
    "blue": ("#0071b1", "#5ab4f0"),
    "vermilion": ("#c8550a", "#ff9258"),
    "green": ("#0a8560", "#3fcf9f"),
    "purple": ("#a8508a", "#e39ccb"),
    "amber": ("#94700d", "#e8b93c"),
    "cyan": ("#1d7f96", "#67d0e4"),
}
TEXT, FAINT, LINE, *LINES = (light for light, _ in COLOURS.values())
#: The matplotlib settings of every figure. Task names are not parsed as math, and text in SVG stays text.
STYLE: Any = {
    **{"font.size": 9, "axes.titlesize": 10, "svg.hashsalt": "forgetfree"},
    **{"text.color": TEXT, "axes.labelcolor": FAINT, "xtick.color": FAINT, "ytick.color": FAINT},
    **{"axes.edgecolor": LINE, "grid.color": LINE, "axes.facecolor": "none", "figure.facecolor": "none"},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.linewidth": 0.6},
    **{"axes.axisbelow": True, "lines.markersize": 5, "lines.linewidth": 1.5, "legend.frameon": False},
    **{"xtick.labelsize": 8, "ytick.labelsize": 8, "axes.labelsize": 9, "path.simplify_threshold": 0.3},
    **{"svg.fonttype": "none", "text.parse_math": False},
}
#: The most panels in one row of a figure.
_BESIDE = 4


def styles(count: int) -> list[dict[str, Any]]:
    """Return styles of lines that differ in colour, mark and dashes."""
    shapes = "osD^vPX"
    looks = ({"color": c, "marker": m} for c, m in zip(cycle(LINES), cycle(shapes), strict=False))
    return [
        style | {"linestyle": ("-", "--", ":")[i // len(LINES) % 3]} for i, style in enumerate(islice(looks, count))
    ]


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Draw one legend below all panels."""
    with matplotlib.rc_context(STYLE):
        handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        columns = min(len(handles), max(1, int(figure.get_figwidth() / 1.4)))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)


# ---- over a stream --------------------------------------------------------------------------------------


def curves(
    tasks: Sequence[str],
    values: Mapping[str, Floats],
    scales: Sequence[Scale],
    metric: str,
    levels: Sequence[float] | None = None,
) -> Figure:
    """Return a figure of a metric over the number of tasks that were learned: the mean of seeds, and their range.

    It has a panel for each task; for a long stream, one for the first task and one for the mean of all tasks so far.

    Args:
        tasks: their names.
        values: the learning matrices by strategy ``(S, T+1, T)``.
        scales: the display scale of each task.
        metric: its name.
        levels: for each task the score of the best constant answer, a dotted line.
    """
    titles, long, shared = list(tasks), len(tasks) > WIDE, len({*scales}) == 1
    if long:
        titles, levels = [f"{tasks[0]} (the first task)", "the mean of all tasks so far"], None
        scales, shared = [scales[0] if shared else PLAIN] * 2, True
        values = {label: np.stack([runs[:, :, 0], _so_far(runs)], axis=2) for label, runs in values.items()}
    columns = min(_BESIDE, len(titles))
    rows = -(-len(titles) // columns)
    with matplotlib.rc_context(STYLE):
        size = max(3.6, 3.1 * columns), 2.5 * rows + 0.2 * len(values)
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        axes = figure.subplots(rows, columns, squeeze=False, sharey=shared).ravel()
        for ax in axes[len(titles) :]:
            ax.set_axis_off()
        for place, (ax, title, scale) in enumerate(zip(axes, titles, scales, strict=False)):
            ax.set_title(short(title, 30))
            for (label, runs), style in zip(values.items(), styles(len(values)), strict=True):
                marker = {"marker": ""} if long else {}
                _draw(ax, scale.factor * runs[:, :, place], style | marker | {"label": short(label, 44)})
            if levels is not None:
                ax.axhline(scale.factor * levels[place], color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
            if not long:
                ax.axvline(place + 1, color=FAINT, linewidth=0.8)
                ax.set_xticks(range(len(tasks) + 1))
            ax.set(xlabel="tasks learned", ylabel="" if shared and place % columns else scale.titled(metric))
    legend(figure, [axes[0]])
    return figure


def _draw(ax: Axes, values: Floats, style: dict[str, Any]) -> None:
    """Draw the mean and range of seeds over the stages of a stream ``(S, T+1)``, at the stages that all seeds have."""
    x = np.flatnonzero(~np.isnan(values).any(axis=0))
    known = values[:, x]
    if len(known) > 1 and len(x):
        ax.fill_between(x, known.min(0), known.max(0), color=style["color"], alpha=0.15, linewidth=0)
    ax.plot(x, known.mean(0), **style)


def _so_far(runs: Floats) -> Floats:
    """Return the mean over the tasks learned so far, per run and stage; NaN before the first."""
    means = [np.full(len(runs), np.nan), *(runs[:, stage, :stage].mean(1) for stage in range(1, runs.shape[1]))]
    return np.stack(means, axis=1)


def short(name: str, most: int) -> str:
    """Return a name, cut to ``most`` characters."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


# ---- in a page ------------------------------------------------------------------------------------------


def style_sheet() -> str:
    """Return the colours as CSS variables, of the light scheme and of the dark one for readers who prefer it."""

    def variables(scheme: int) -> str:
        return ";".join(f"--{name}:{colours[scheme]}" for name, colours in COLOURS.items())

    return f":root{{{variables(0)}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{variables(1)}}}}}"


def inlined(figure: Figure, name: str) -> str:
    """Return a figure as an ``<svg>`` element in the page's colours and font; ``name`` is for screen readers."""
    svg = drawn(figure)
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r"(font: [^;\"]*?)?([\d.]+px) '[^;\"]*", r"font-size: \2", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?| transform=\"rotate\(-?0 [^)]*\)\"", "", svg)
    for variable, (light, _) in COLOURS.items():
        svg = re.sub(light, f"var(--{variable})", svg, flags=re.I)
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    head = f'<svg role="img" aria-label="{html.escape(escaped(name))}" viewBox="0 0 {width} {height}" '
    head += f'style="width:{1.33 * float(width):.0f}px">'
    return head + escaped(" ".join(svg[svg.index(">") + 1 :].split()))


def drawn(figure: Figure) -> str:
    """Return a figure as the text of an SVG file."""
    text = io.StringIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # Text stays text: the reader's font provides the glyphs, so matplotlib need not.
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return text.getvalue()
