"""The figures of report.html, which take much of a tiny run: drawn, or left empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from forgetfree.results.report import figures, run_figures


class Blank:
    """Axes on which everything may be drawn, and nothing is."""

    def __getattr__(self, name: str) -> Blank:
        return self

    def __call__(self, *_: Any, **__: Any) -> Blank:
        return self

    def __getitem__(self, _: Any) -> Blank:
        return self

    def get_xlim(self) -> tuple[float, float]:
        return 0.0, 1.0

    get_ylim = get_xlim


@contextmanager
def _blank(width: float = 0, height: float = 0) -> Iterator[Blank]:
    yield Blank()


#: How figures are made: what gives the axes, and what makes an SVG of them.
Way = tuple[Any, Callable[[Any], str]]
#: Drawn; and what they show computed, but left empty.
DRAWN: Way = (figures.canvas, figures._drawn)
EMPTY: Way = (_blank, lambda _: '<svg viewBox="0 0 252 180"></svg>')


def make(way: Way) -> Way:
    """Make figures in this way from now on, and return the way so far."""
    before = figures.canvas, figures._drawn
    figures.canvas, figures._drawn = way
    run_figures.canvas = figures.canvas  # type: ignore[attr-defined]
    return before
