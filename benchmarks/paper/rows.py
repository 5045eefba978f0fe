"""Numbers, tables and figures from rows, which are flat and tidy in all experiments."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.paper.plots import curves, look
from forgetfree.results.report.figures import legend
from forgetfree.results.report.page import Table, cell, percent
from forgetfree.results.runs import CONSTANT

#: The title of ``score`` in tables.
SCORE = "Accuracy, or F1 where the task is measured by it"
#: One measurement: a value for each key.
Row = dict[str, Any]
#: The keys of a unit, which is measured and stored as a whole: e.g. ``{"task": "sst2", "shots": 64, "seed": 0}``.
Unit = dict[str, Any]


def select(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def values(rows: Sequence[Row], key: str, **wanted: Any) -> list[float]:
    """Return the value of ``key`` in each row that has these values."""
    return [float(row[key]) for row in select(rows, **wanted)]


def mean(rows: Sequence[Row], key: str, **wanted: Any) -> float:
    """Return the mean of `values`; NaN if there are none."""
    numbers = values(rows, key, **wanted)
    return float(np.mean(numbers)) if numbers else float("nan")


def sparsities_of(rows: Sequence[Row], **wanted: Any) -> list[float]:
    """Return the sparsities of the rows that have these values, the smallest first."""
    return sorted({row["sparsity"] for row in select(rows, **wanted)})


def ratio(part: float, whole: float) -> float:
    """Return ``part / whole``; NaN if ``whole`` is 0."""
    return part / whole if whole else math.nan


def kept(rows: Sequence[Row], part: Mapping[str, Any], whole: Mapping[str, Any]) -> float:
    """Return the share of the score of ``whole`` that ``part`` has, mean over tasks; NaN if a task lacks either."""
    shares = [
        ratio(mean(rows, "score", task=task, **part), mean(rows, "score", task=task, **whole))
        for task in distinct(rows, "task")
    ]
    return sum(shares) / len(shares) if shares else math.nan


def verdict(holds: bool, *numbers: float) -> bool | None:
    """Return ``holds``, or ``None`` if one of its numbers is NaN."""
    return None if any(map(math.isnan, numbers)) else bool(holds)


def share_of(sparsity: float) -> str:
    """Return a sparsity in percent: 0.001 is ``0.1 %``."""
    return f"{100 * sparsity:g} %"


def distinct(rows: Sequence[Row], key: str) -> list[Any]:
    """Return the different values of a key, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows if key in row))


#: Maps a header to the key that its column shows, and the values that select the column's rows.
ScoreColumns = Mapping[str, tuple[str, Mapping[str, Any]]]


def with_constant(rows: Sequence[Row], columns: ScoreColumns) -> ScoreColumns:
    """Put the score of a constant answer before columns of scores, unless the rows are older and lack it."""
    (_, wanted), *_ = columns.values()
    if not all("constant" in row for row in rows):  # older published results lack it
        return columns
    return {CONSTANT: ("constant", wanted), **columns}


def pivot(title: str, rows: Sequence[Row], by: str | tuple[str, ...], columns: ScoreColumns) -> Table:
    """Return a table of mean (std) over seeds, in percent.

    Args:
        title: the title of the table.
        rows: all rows.
        by: the key, or keys, whose values name the rows of the table.
        columns: the columns of the table, see `ScoreColumns`.
    """
    keys = (by,) if isinstance(by, str) else by
    groups = list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))
    body = []
    for group in groups:
        those = select(rows, **dict(zip(keys, group, strict=True)))
        cells = [cell(values(those, key, **wanted), percent) for key, wanted in columns.values()]
        body.append((" · ".join(map(str, group)), *cells))
    return Table(title, (" · ".join(keys), *columns), tuple(body))


def scores_over_sparsity(
    rows: Sequence[Row],
    line: str,
    lines: Sequence[str],
    *,
    dashed: Mapping[str, Mapping[str, Any]],
    dotted: Mapping[str, Mapping[str, Any]] | None = None,
    share: str = "graft",
) -> Figure:
    """Draw a panel for each task: lines of the score (%) over sparsity, and levels that have no sparsity.

    Args:
        rows: tidy rows with ``task``, ``sparsity`` and ``score``.
        line: the key whose values are the lines.
        lines: the values to draw, in order.
        dashed: name of a level → the columns and values of its rows, such as ``{"fine-tuned": {"model": "fine-tuned"}}``;
            a level with the name of a line has its colour.
        dotted: the same.
        share: the noun in the label of the axis, such as ``"region"``.
    """
    levels = [*dashed.values(), *(dotted or {}).values()]
    points = [row for row in rows if not any(row.items() >= where.items() for where in levels)]
    figure, axes = curves(points, "task", "sparsity", "score", line, lines)
    for ax, task in zip(axes, distinct(points, "task"), strict=True):
        for named, style in ((dashed, "--"), (dotted or {}, ":")):
            for name, where in named.items():
                level = 100 * mean(rows, "score", task=task, **where)
                ax.axhline(level, color=look(name)["color"], ls=style, lw=0.8 if name in lines else 1.5, label=name)
        ax.set_xlabel(f"share of parameters in the {share}")
    axes[0].set_ylabel("score (%)" if not set(dashed) & set(lines) else "score (%); dashed: fine-tuned")
    legend(figure, axes)
    return figure


# ---- rows as a file -------------------------------------------------------------------------------------


def rows_to_csv(rows: Sequence[Mapping[str, Any]], header: Mapping[str, Any]) -> str:
    """Return rows as a CSV table below a line ``# {…}`` of JSON; a list has a column for each of its values."""
    flat = [{name: each for key, value in row.items() for name, each in _columns(key, value)} for row in rows]
    text = io.StringIO(f"# {json.dumps(header, allow_nan=False)}\n")
    text.seek(0, io.SEEK_END)
    table = csv.DictWriter(text, list(dict.fromkeys(name for row in flat for name in row)), lineterminator="\n")
    table.writeheader()
    table.writerows(flat)
    return text.getvalue()


def _columns(key: str, value: Any) -> list[tuple[str, Any]]:
    return [(f"{key}[{i}]", each) for i, each in enumerate(value)] if isinstance(value, list) else [(key, value)]


def _typed(cells: Sequence[str]) -> list[Any]:
    """Return a column of texts as whole numbers where all of them are, else as numbers, else as texts; empty is ``None``."""
    for kind in (int, float):
        try:
            column = [kind(cell) if cell else None for cell in cells]
        except ValueError:
            continue
        if all(math.isfinite(number) for number in column if number is not None):
            return column
    return [cell or None for cell in cells]


def rows_of_csv(text: str) -> tuple[dict[str, Any], list[Row]]:
    """Return the header and the rows that `rows_to_csv` wrote; a row has no keys for empty cells."""
    line, _, text = text.removeprefix("# ").partition("\n")
    table = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows = list(table)
    columns = {name: _typed([row[name] for row in rows]) for name in table.fieldnames or []}
    filled: list[Row] = [{} for _ in rows]
    for name, cells in columns.items():
        key, _, place = name.partition("[")
        for row, value in zip(filled, cells, strict=True):
            if place and value is not None:
                row.setdefault(key, []).append(value)
            elif value is not None:
                row[key] = value
    return json.loads(line), filled
