"""Pages of tables, and their formats: the step between measured numbers and printed text.

Cells are text already, so that each format is one small function that does not depend on results.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import jinja2
import numpy as np
import rich.box
import rich.console
import rich.table
import rich.text

from forgetfree.display import NULL, PERCENT, escaped
from forgetfree.errors import UnknownNameError

#: Longer cells are sentences.
_PROSE = 40
#: In tables of streams longer than this, tasks are rows, because fifty columns fit on no page.
WIDE = 10


@dataclass(frozen=True)
class Table:
    """A table of text; the first column names the row, the others hold numbers.

    Attributes:
        title: the content of the table, with the unit.
        header: a name for each column.
        rows: the rows, each with as many cells as the header.
        tints: the tint of each cell but the first of its row, from 0 for none to 1; ``None`` if the cell has no number.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    tints: tuple[tuple[float | None, ...], ...] = ()

    @property
    def is_prose(self) -> bool:
        """Whether cells hold sentences, which must be broken into lines."""
        return any(len(cell) > _PROSE for row in self.rows for cell in row[1:])


@dataclass(frozen=True)
class Page:
    """A whole report, ready to be written in any format.

    Attributes:
        title: the title of the report.
        notes: sentences that explain the tables.
        tables: the tables in reading order.
        headline: the outcome in a few sentences, or empty.
        words: the names of columns and rows with their meanings, for the glossary of a file.
    """

    title: str
    notes: tuple[str, ...]
    tables: tuple[Table, ...]
    headline: str = ""
    words: tuple[tuple[str, str], ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """The notes on broken claims and on failed or unfinished units."""
        return tuple(note for note in self.notes if note.startswith(("Broken", "Failed", "Unfinished")))


def render_page(page: Page, format: str) -> str:
    """Return a page as text: ``rich``, ``markdown``, ``html`` or ``latex``."""
    if format not in _RENDERERS:
        raise UnknownNameError("report format", format, FORMATS)
    return _RENDERERS[format](shown(page))


def brief_page(page: Page) -> Page:
    """Return the outcome alone: headline, warnings and the first table; without a headline, all notes stay."""
    return replace(page, notes=page.warnings if page.headline else page.notes, tables=page.tables[:1])


def shown(page: Page) -> Page:
    """Return the page without terminal control characters, which names of tasks and labels may contain."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return escaped(value)
        if isinstance(value, tuple):
            return tuple(map(clean, value))
        if isinstance(value, Page | Table):
            return replace(value, **{each.name: clean(getattr(value, each.name)) for each in fields(value)})
        return value

    clean_page: Page = clean(page)
    return clean_page


# ---- tables ---------------------------------------------------------------------------------------------


def titled(what: str, *units: str) -> str:
    """Return the title of a table: its content, and the units in brackets, if there are any."""
    said = "; ".join(filter(None, units))
    return f"{what} ({said})" if said else what


def known_columns(table: Table) -> Table:
    """Return the table without empty columns."""
    columns = zip(table.header, *table.rows, strict=True)
    known = [column for column in columns if not table.rows or any(each != NULL for each in column[1:])]
    header, *rows = zip(*known, strict=True)
    return replace(table, header=header, rows=tuple(rows))


def transposed(table: Table, corner: str) -> Table:
    """Return the table with its columns as rows; ``corner`` becomes the name of the first column."""
    names, *columns = zip(table.header, *table.rows, strict=True)
    return replace(table, header=(corner, *names[1:]), rows=tuple(columns))


# ---- cells ----------------------------------------------------------------------------------------------


def cell(values: Iterable[float | None], show: Callable[[float], str]) -> str:
    """Return `mean (std)` over seeds, the value of a single seed, or a dash if a seed has no value.

    A mean over some of the seeds would look like the means over all seeds beside it.
    """
    numbers = list(values)
    known = [value for value in numbers if value is not None and not np.isnan(value)]
    if not known or len(known) < len(numbers):
        return NULL
    mean = show(float(np.mean(known)))
    return mean if len(known) == 1 else f"{mean} ({show(float(np.std(known, ddof=1)))})"


def percent(fraction: float) -> str:
    """Return a fraction in percent, with one decimal; a dash if it is NaN."""
    return PERCENT.text(fraction)


def size(amount: float) -> str:
    """Return a number of bytes with three digits, e.g. ``111 kB``."""
    scale, unit = next((each for each in _SIZES if abs(amount) >= each[0]), (1, "bytes"))
    return f"{amount / scale:.3g} {unit}"


_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


# ---- formats --------------------------------------------------------------------------------------------


def _as_rich(page: Page) -> str:
    # If the output is not a terminal, 80 columns are not a limit.
    width = shutil.get_terminal_size(fallback=(120, 24)).columns
    text = io.StringIO()
    console = rich.console.Console(file=text, width=10**4, color_system=None, force_terminal=False, force_jupyter=False)

    def write(line: str) -> None:
        console.print(rich.text.Text(line), width=width)  # verbatim, without rich's markup

    for line in (page.title, *filter(None, [page.headline]), *page.notes):
        write(line)
    for table in page.tables:
        drawn = _draw(table, broken=False)
        if console.measure(drawn).maximum > width:
            drawn = _draw(table, broken=True)
        write("")
        write(table.title)
        # On the narrowest terminals a table is too wide rather than missing columns.
        console.print(drawn, width=max(width, console.measure(drawn).minimum))
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines()) + "\n"


def _draw(table: Table, broken: bool) -> rich.table.Table:
    """Return the table for a terminal; ``broken``: break cells between all words to fit, except sentences."""
    drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for number, cells in enumerate(zip(table.header, *table.rows, strict=True)):
        longest = max((len(word) for cell in cells for word in cell.split()), default=1)
        prose = any(len(cell) > _PROSE for cell in cells[1:])
        drawn.add_column(
            rich.text.Text(cells[0]),
            justify="right" if number and not prose else "left",
            overflow="fold",
            width=longest if broken and not prose else None,
        )
    for row in table.rows:
        drawn.add_row(*map(rich.text.Text, row))
    return drawn


# Not with tabulate or pandas: they pad the cells of a column to one width, and have neither notes nor captions.
def in_markdown(text: str) -> str:
    """Return a text as escaped markdown, on one line."""
    return re.sub(r"([\\|*_<>\[\]`&~#])", r"\\\1", " ".join(text.split()))


def _as_markdown(page: Page) -> str:
    escape = in_markdown

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(map(escape, cells))} |"

    blocks = [f"# {escape(page.title)}", *filter(None, [escape(page.headline)])]
    if page.notes:
        blocks.append("\n".join(f"- {escape(note)}" for note in page.notes))
    for table in page.tables:
        rule = " | ".join(["| ---"] + ["---:"] * (len(table.header) - 1)) + " |"
        blocks += [f"## {escape(table.title)}", "\n".join([line(table.header), rule, *map(line, table.rows)])]
    if page.words:
        blocks += ["## Glossary", "\n".join(f"- {escape(name)}: {escape(meaning)}" for name, meaning in page.words)]
    return "\n\n".join(blocks) + "\n"


_LATEX = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
    | {char: f"\\{char}" for char in "&%$#_{}"}
)


#: The most columns of a table that is not scaled to the width of the text.
_LATEX_COLUMNS = 8


def _in_latex(text: str) -> str:
    """Return a text as escaped LaTeX, with a minus sign before numbers."""
    return re.sub(r"(?<![\w.])-(?=\d)", "$-$", text.translate(_LATEX))


def _as_latex(page: Page) -> str:
    """Return the tables, with the rest as comments: a paper has its own sentences."""
    import pandas as pd

    said = ["Needs \\usepackage{booktabs, graphicx}.", page.title, *filter(None, [page.headline]), *page.notes]
    blocks = ["\n".join(f"% {line}" for line in said)]
    for table in page.tables:
        frame = pd.DataFrame(table.rows, columns=table.header).map(_in_latex).rename(columns=_in_latex)
        columns = ("p{4cm}" if table.is_prose else "r") * (len(table.header) - 1)
        latex = frame.to_latex(
            index=False, column_format=f"l{columns}", caption=_in_latex(table.title), position="htbp"
        )
        if len(table.header) > _LATEX_COLUMNS:
            latex = latex.replace("\\begin{tabular}", "\\resizebox{\\linewidth}{!}{%\n\\begin{tabular}")
            latex = latex.replace("\\end{tabular}", "\\end{tabular}}")
        blocks.append(latex.rstrip())
    return "\n\n".join(blocks) + "\n"


def render_html(page: Page, figure: str = "", caption: str = "", style: str = "") -> str:
    """Return a page as one self-contained HTML file.

    Args:
        page: tables and notes.
        figure: an ``<svg>`` element before the tables.
        caption: how to read the figure.
        style: the colours of the figure.
    """
    # Every value is escaped, quotes as in Python's html.escape.
    loader = jinja2.PackageLoader("forgetfree.results.report", ".")
    templates = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, autoescape=True)
    template = templates.get_template("report.html.jinja")
    return template.render(page=shown(page), figure=figure, caption=caption, style=style) + "\n"


_RENDERERS: dict[str, Callable[[Page], str]] = {
    "rich": _as_rich,
    "markdown": _as_markdown,
    "html": render_html,
    "latex": _as_latex,
}
#: Formats of reports: those for tables, and ``json`` and ``csv`` for runs.
FORMATS = (*_RENDERERS, "json", "csv")
