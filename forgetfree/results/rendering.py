"""Pages of tables, and their formats: the form between what was measured and what is printed.

Cells are text already, so that a format is one small function that knows nothing of results.
"""

from __future__ import annotations

import html
import io
import math
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jinja2
import numpy as np
import rich.box
import rich.console
import rich.table
import rich.text

from forgetfree.display import escaped
from forgetfree.errors import UnknownNameError

__all__ = ["CONSTANT", "FORMATS", "NULL", "Page", "Table", "cell", "notebook_html", "percent", "render_page"]

NULL = "—"
#: What the best constant answer scores, beside every score.
CONSTANT = "a constant answer"


@dataclass(frozen=True)
class Table:
    """A table of text; the first column names the row, the others hold numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Page:
    """A whole report, ready to be written in any format."""

    title: str
    notes: tuple[str, ...]
    tables: tuple[Table, ...]


def render_page(page: Page, format: str) -> str:
    """Return a page as text in any format but ``json``; see `render`."""
    if format not in _RENDERERS:
        raise UnknownNameError("report format", format, FORMATS)
    return _RENDERERS[format](_shown(page))


def _shown(page: Page) -> Page:
    """Return the page without characters that act on a terminal: users choose the names of tasks and labels."""
    tables = (
        Table(escaped(t.title), tuple(map(escaped, t.header)), tuple(tuple(map(escaped, row)) for row in t.rows))
        for t in page.tables
    )
    return Page(escaped(page.title), tuple(map(escaped, page.notes)), tuple(tables))


# ---- cells ----------------------------------------------------------------------------------------------


def cell(values: Iterable[float | None], show: Callable[[float], str]) -> str:
    """Return `mean (std)` over seeds, the value of a single seed, or a dash where a seed has none.

    A mean over some of the seeds would stand beside means over all of them and look like one.
    """
    given = list(values)
    known = [value for value in given if value is not None]
    if not known or len(known) < len(given):
        return NULL
    mean = show(float(np.mean(known)))
    return mean if len(known) == 1 else f"{mean} ({show(float(np.std(known, ddof=1)))})"


def percent(fraction: float) -> str:
    """Return a fraction in percent, with one decimal; a dash where it is missing."""
    if math.isnan(fraction):
        return NULL
    return f"{100 * fraction:z.1f}"  # z: no minus sign before 0.0


# ---- formats --------------------------------------------------------------------------------------------


def _as_rich(page: Page) -> str:
    # Where the output is no terminal, nothing needs to be squeezed into 80 columns.
    width = shutil.get_terminal_size(fallback=(120, 24)).columns
    text = io.StringIO()
    console = rich.console.Console(file=text, width=10**4, color_system=None, force_terminal=False, force_jupyter=False)

    def write(line: str) -> None:
        console.print(rich.text.Text(line), width=width)  # shown as it is, never read as rich's markup

    for line in (page.title, *page.notes):
        write(line)
    for table in page.tables:
        drawn = _draw(table, broken=False)
        if console.measure(drawn).maximum > width:
            drawn = _draw(table, broken=True)
        write("")
        write(table.title)
        # On the narrowest terminals a table is too wide rather than robbed of columns.
        console.print(drawn, width=max(width, console.measure(drawn).minimum))
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines()) + "\n"


def _draw(table: Table, broken: bool) -> rich.table.Table:
    """The table for a terminal; `broken` into lines between all words, but for sentences, if that is what it takes to fit."""
    drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for number, cells in enumerate(zip(table.header, *table.rows, strict=True)):
        longest = max((len(word) for cell in cells for word in cell.split()), default=1)
        prose = any(len(cell) > 40 for cell in cells[1:])
        drawn.add_column(
            rich.text.Text(cells[0]),
            justify="right" if number and not prose else "left",
            overflow="fold",
            width=longest if broken and not prose else None,
        )
    for row in table.rows:
        drawn.add_row(*map(rich.text.Text, row))
    return drawn


# By hand, as is LaTeX: tabulate and pandas fill the cells of a column up to one width, and know neither our notes nor captions.
def _as_markdown(page: Page) -> str:
    def escape(text: str) -> str:
        return re.sub(r"([\\|*_<>\[\]`&~#])", r"\\\1", " ".join(text.split()))

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    blocks = [f"# {escape(page.title)}"]
    if page.notes:
        blocks.append("\n".join(f"- {escape(note)}" for note in page.notes))
    for table in page.tables:
        rule = line(["---"] + ["---:"] * (len(table.header) - 1))
        body = [line(map(escape, row)) for row in table.rows]
        blocks += [f"## {escape(table.title)}", "\n".join([line(map(escape, table.header)), rule, *body])]
    return "\n\n".join(blocks) + "\n"


def _as_html(page: Page) -> str:
    return _filled("report.html.jinja", page)


def notebook_html(page: Page) -> str:
    """Return a page's tables as a part of a page of HTML, in the style of the notebook around it."""
    return _filled("notebook.html.jinja", _shown(page))


def _filled(template: str, page: Page) -> str:
    loader = jinja2.PackageLoader("forgetfree.results", ".")
    # Every value is escaped, quotes as Python's own library writes them.
    templates = jinja2.Environment(loader=loader, trim_blocks=True, finalize=html.escape)
    return templates.get_template(template).render(page=page) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # after \\ or \item a bare one would open an optional argument
    "]": "{]}",
    "—": "---",
}


def _as_latex(page: Page) -> str:
    def escape(text: str) -> str:
        return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))

    def line(cells: Sequence[str]) -> str:
        numbers = (re.sub(r"^-(?=\d)", "$-$", escape(cell)) for cell in cells[1:])
        return " & ".join([escape(cells[0]), *numbers]) + r" \\"

    lines = [r"% Needs \usepackage{booktabs}."]
    for table in page.tables:
        lines += [r"\begin{table}[htbp]", r"\centering", rf"\caption{{{escape(table.title)}}}"]
        lines += [rf"\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}", r"\toprule", line(table.header)]
        lines += [r"\midrule", *map(line, table.rows), r"\bottomrule", r"\end{tabular}", r"\end{table}", ""]
    if page.notes:
        lines += [r"\begin{itemize}", *(rf"\item {escape(note)}" for note in page.notes), r"\end{itemize}"]
    return "\n".join(lines).rstrip() + "\n"


_RENDERERS: dict[str, Callable[[Page], str]] = {
    "rich": _as_rich,
    "markdown": _as_markdown,
    "html": _as_html,
    "latex": _as_latex,
}
FORMATS = (*_RENDERERS, "json")
