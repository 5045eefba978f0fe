"""Panels that several figures of a run have in common: matrices in shades, the key to lines, a scale of costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from forgetfree.results.inline import SHADES, TEXT, Picture, canvas, picture, styles

Floats = npt.NDArray[np.float64]
#: Longer streams have numbers in place of names, and shades without digits.
NAMED = 10


def scale_of_costs(ax: Axes, found: Sequence[float], show: Callable[[float], str]) -> None:
    """Set a logarithmic scale where costs differ by more than ten times, else one from 0; with units."""
    if max(found) > 10 * min(found):
        ax.set_xscale("log")
        ax.set_xlim(min(found) / 2, max(found) * 2)
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 3) if max(found) < 300 * min(found) else (1,), numticks=8))
        ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        ax.set_xlim(0, 1.15 * max(found))
        ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))


def shaded(
    values: Floats,
    title: str,
    says: str,
    rows: Sequence[str],
    columns: Sequence[str],
    row: str,
    column: str,
    limits: tuple[float, float],
    digits: str,
    caption: str = "",
) -> Picture:
    """Draw a matrix in shades, with its numbers where there is room for them.

    Args:
        values: rows × columns; nothing is drawn at NaN.
        title: shown above it.
        says: what it shows, for those who do not see it.
        rows: their names.
        columns: their names.
        row: what the rows are.
        column: what the columns are.
        limits: the values of the darkest and of the lightest shade.
        digits: how numbers are written; empty for none.
        caption: shown below it; default: the shades, where no numbers say it.
    """
    low, high = limits
    written = bool(digits) and len(columns) <= NAMED
    places, names = _labels(columns, 16, 18 if digits else 28)
    longest = max(map(len, names))
    upright = longest * len(names) > 40  # more than fit beside each other
    with canvas(height=0.9 + 0.2 * min(len(rows), 13) + (0.07 * longest if upright else 0.2)) as ax:
        ax.imshow(values, cmap=SHADES, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
        ax.grid(False)
        ax.spines[:].set_visible(False)
        ax.set_xticks(places, names, rotation=90 if upright else 0)
        ax.set_yticks(*_labels(rows, 14, 18))
        ax.tick_params(length=0)
        ax.set(xlabel=column, ylabel=row)
        for (i, j), value in np.ndenumerate(values) if written else ():
            if not np.isnan(value):
                colour = _on(colormaps[SHADES](float((value - low) / (high - low))))
                ax.text(j, i, digits.format(value), ha="center", va="center", fontsize=8, color=colour)
    return picture(ax, title, says, caption or f"From dark, {low:.0f} %, to light, {high:.3g} %." * (not written))


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
