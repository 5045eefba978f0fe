"""Figures in one look: legible for the colour-blind and in print, the same bytes from the same numbers.

They are files, PNG and SVG, or parts of a page: SVG with text as text, in colours that follow the page's light or dark scheme.
A figure is drawn with the colours of the light scheme; in the SVG of a page each of them becomes a variable of its style sheet.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forgetfree.display import escaped
from forgetfree.results.metrics import Floats

#: Colours by name, in the light scheme and in the dark one. Lines have a contrast of at least 3 with the page, text of 4.5.
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
#: Even steps of lightness: legible for the colour-blind, in print, and on a light or dark page.
SHADES = "viridis"
#: Of every figure, as matplotlib takes it.
STYLE: Any = {
    **{"font.size": 9, "axes.titlesize": 10, "svg.hashsalt": "forgetfree"},
    **{"text.color": TEXT, "axes.labelcolor": FAINT, "xtick.color": FAINT, "ytick.color": FAINT},
    **{"axes.edgecolor": LINE, "grid.color": LINE, "axes.facecolor": "none", "figure.facecolor": "none"},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.linewidth": 0.6},
    **{"axes.axisbelow": True, "lines.markersize": 5, "lines.linewidth": 1.5, "legend.frameon": False},
    **{"xtick.labelsize": 8, "ytick.labelsize": 8, "axes.labelsize": 9, "path.simplify_threshold": 0.3},
}
#: In a page, text is text, and names of tasks are shown as they are.
_PAGE: Any = {**STYLE, "svg.fonttype": "none", "text.parse_math": False}


# ---- lines ----------------------------------------------------------------------------------------------


def styles(count: int) -> list[dict[str, Any]]:
    """Return styles of lines that differ in colour, mark and dashes."""
    shapes = "osD^vPX"
    looks = ({"color": c, "marker": m} for c, m in zip(cycle(LINES), cycle(shapes), strict=False))
    return [
        style | {"linestyle": ("-", "--", ":")[i // len(LINES) % 3]} for i, style in enumerate(islice(looks, count))
    ]


def course(ax: Axes, values: Floats, style: dict[str, Any], *, range_of_seeds: bool = True) -> None:
    """Draw the mean of seeds over the stages of a stream, and their range, from where all of them are known.

    Args:
        ax: where.
        values: ``(seeds, stages)``.
        style: of the line.
        range_of_seeds: whether there is room for it.
    """
    x = np.flatnonzero(~np.isnan(values).any(axis=0))
    known = values[:, x]
    if len(known) > 1 and len(x) and range_of_seeds:
        ax.fill_between(x, known.min(0), known.max(0), color=style["color"], alpha=0.15, linewidth=0)
    ax.plot(x, known.mean(0), **style)


# ---- figures in files -----------------------------------------------------------------------------------


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


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Draw one legend below all panels."""
    with matplotlib.rc_context(STYLE):
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


# ---- figures in a page ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """A figure as it stands in a page.

    Attributes:
        title: its heading.
        svg: an ``<svg>`` element with an accessible name.
        caption: what is to be known of it.
    """

    title: str
    svg: str
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """Figures on one question.

    Attributes:
        key: its anchor.
        title: its heading.
        text: how to read them.
        pictures: in the order in which they are read; the first may be a key to the lines.
    """

    key: str
    title: str
    text: str
    pictures: Sequence[Picture]


def style_sheet() -> str:
    """Return the colours as CSS: variables of the light scheme, and of the dark one where the reader prefers it."""

    def variables(scheme: int) -> str:
        return ";".join(f"--{name}:{colours[scheme]}" for name, colours in COLOURS.items())

    return f":root{{{variables(0)}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{variables(1)}}}}}"


@contextmanager
def canvas(width: float = 3.5, height: float = 2.5) -> Iterator[Axes]:
    """Give one panel, in inches, to draw on; `picture` makes an SVG of its figure."""
    with matplotlib.rc_context(_PAGE):
        yield Figure(figsize=(width, height), layout="constrained").add_subplot()


def picture(ax: Axes, title: str, says: str, caption: str = "") -> Picture:
    """Return what was drawn as a picture.

    Args:
        ax: from `canvas`.
        title: shown above it.
        says: what it shows, for those who do not see it.
        caption: shown below it.
    """
    figure = ax.get_figure(root=True)
    assert figure is not None
    name = f"{title}: {says}"
    with matplotlib.rc_context({**_PAGE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph"
        )  # text stays text: the reader's font has the characters, or its own sign for none
        return Picture(escaped(title), _inlined(_drawn(figure), escaped(name)), escaped(caption))


def _drawn(figure: Figure) -> str:
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return drawn.getvalue()


def _inlined(svg: str, name: str) -> str:
    """Return the element alone, shorter, in the page's colours and font, with a name."""
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r"(font: [^;\"]*?)?([\d.]+px) '[^;\"]*", r"font-size: \2", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?| transform=\"rotate\(-?0 [^)]*\)\"", "", svg)
    for variable, (light, _) in COLOURS.items():
        svg = re.sub(light, f"var(--{variable})", svg, flags=re.I)
    used = set(re.findall(r"(?:url\(#|href=\"#)([\w-]+)", svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", svg)
    svg = re.sub(r"-?\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), svg)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert box is not None
    head = f'<svg role="img" aria-label="{html.escape(name)}" {box[0]} style="max-width:{1.5 * float(box[1]):.0f}px">'
    body = svg[svg.index(">") + 1 :].strip()
    for pattern, short in ((r">\s+<", "><"), (r"\s*\n\s*", " "), (r"<defs\s*/>|<defs></defs>|<g></g>", "")):
        body = re.sub(pattern, short, body)
    return head + escaped(body)


# ---- panels that several figures of a run have ----------------------------------------------------------

#: Longer streams have numbers in place of names, and shades without digits.
NAMED = 10


def shaded(
    values: Floats,
    shades: Floats,
    title: str,
    says: str,
    rows: Sequence[str],
    columns: Sequence[str],
    row: str,
    column: str,
    digits: str,
) -> Picture:
    """Draw a matrix in shades, with its numbers where there is room for them.

    Args:
        values: rows × columns; nothing is drawn at NaN.
        shades: of each, from 0, the darkest, to 1.
        title: shown above it.
        says: what it shows, for those who do not see it.
        rows: their names.
        columns: their names.
        row: what the rows are.
        column: what the columns are.
        digits: how numbers are written.
    """
    places, names = _labels(columns, 16, 18)
    longest = max(map(len, names))
    upright = longest * len(names) > 40  # more than fit beside each other
    with canvas(height=0.9 + 0.2 * min(len(rows), 13) + (0.07 * longest if upright else 0.2)) as ax:
        ax.imshow(shades, cmap=SHADES, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        ax.grid(False)
        ax.spines[:].set_visible(False)
        ax.set_xticks(places, names, rotation=90 if upright else 0)
        ax.set_yticks(*_labels(rows, 14, 18))
        ax.tick_params(length=0)
        ax.set(xlabel=column, ylabel=row)
        for (i, j), value in np.ndenumerate(values) if len(columns) <= NAMED else ():
            if not np.isnan(value):
                colour = _on(colormaps[SHADES](float(shades[i, j])))
                ax.text(j, i, digits.format(value), ha="center", va="center", fontsize=8, color=colour)
    return picture(ax, title, says)


def _labels(names: Sequence[str], most: int, length: int) -> tuple[range, list[str]]:
    """Return as many places, and the names there, as there is room for."""
    every = max(1, -(-len(names) // most))
    return range(0, len(names), every), [short(name, length) for name in names[::every]]


def _on(colour: tuple[float, ...]) -> str:
    """Return black or white, whichever is easier to read on a colour (WCAG 2, relative luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    return "#000001" if float(np.dot((0.2126, 0.7152, 0.0722), linear)) > 0.179 else "#fffffe"


def key_to(names: Sequence[str], where: str) -> Picture:
    """Return what tells the lines apart in the panels beside it."""
    with canvas(height=0.25 + 0.2 * len(names)) as ax:
        ax.set_axis_off()
        for place, (name, style) in enumerate(zip(names, styles(len(names)), strict=True)):
            ax.plot([0, 1], [place, place], **style)
            ax.text(1.4, place, short(name, 44), va="center", color=TEXT)
        ax.set(xlim=(-0.3, 12), ylim=(len(names) - 0.5, -0.5))
    return picture(ax, "Strategies", f"{where}: {', '.join(names)}")


def short(name: str, most: int) -> str:
    """Return a name, cut to ``most`` characters."""
    return name if len(name) <= most else f"{name[: most - 1]}…"
