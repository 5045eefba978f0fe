"""Figures for a page: SVG that is part of it, with text as text, in colours that follow the page's light or dark scheme.

A figure is drawn with the colours of the light scheme. In the SVG each of them becomes a variable of the style sheet.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forgetfree.display import escaped

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
_STYLE: Any = {
    **{"font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "svg.fonttype": "none"},
    **{"text.color": TEXT, "axes.labelcolor": FAINT, "xtick.color": FAINT, "ytick.color": FAINT},
    **{"axes.edgecolor": LINE, "grid.color": LINE, "axes.facecolor": "none", "figure.facecolor": "none"},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.linewidth": 0.6},
    **{"axes.axisbelow": True, "lines.markersize": 5, "lines.linewidth": 1.5, "legend.frameon": False},
    **{"xtick.labelsize": 8, "ytick.labelsize": 8, "axes.labelsize": 9, "path.simplify_threshold": 0.3},
    "text.parse_math": False,  # names of tasks are shown as they are
}


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


def style_sheet() -> str:
    """Return the colours as CSS: variables of the light scheme, and of the dark one where the reader prefers it."""

    def variables(scheme: int) -> str:
        return ";".join(f"--{name}:{colours[scheme]}" for name, colours in COLOURS.items())

    return f":root{{{variables(0)}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{variables(1)}}}}}"


@contextmanager
def canvas(width: float = 3.5, height: float = 2.5) -> Iterator[Axes]:
    """Give one panel, in inches, to draw on; `picture` makes an SVG of its figure."""
    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained").add_subplot()


def styles(count: int) -> list[dict[str, Any]]:
    """Return styles of lines that differ in colour, mark and dashes."""
    shapes = "osD^vPX"
    found = ({"color": c, "marker": m} for c, m in zip(cycle(LINES), cycle(shapes), strict=False))
    return [
        style | {"linestyle": ("-", "--", ":")[i // len(LINES) % 3]} for i, style in enumerate(islice(found, count))
    ]


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
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
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
    svg = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", svg)
    svg = re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), svg)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert box is not None
    head = f'<svg role="img" aria-label="{html.escape(name)}" {box[0]} style="max-width:{1.5 * float(box[1]):.0f}px">'
    body = svg[svg.index(">") + 1 :].strip()
    for pattern, short in ((r">\s+<", "><"), (r"\s*\n\s*", " "), (r"<defs\s*/>|<defs></defs>|<g></g>", "")):
        body = re.sub(pattern, short, body)
    return head + escaped(body)
