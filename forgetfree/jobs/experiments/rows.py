"""Rows to numbers and tables. Rows are flat and tidy, whatever the experiment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forgetfree.results.rendering import CONSTANT, NULL, Table, cell, percent

#: What ``score`` is called.
SCORE = "Accuracy, or F1 where the task is measured by it"
#: What was measured: one number of each kind.
Row = dict[str, Any]
#: What is measured at once, and kept at once: e.g. ``{"task": "sst2", "shots": 64, "seed": 0}``.
Unit = dict[str, Any]


def select(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def values(rows: Sequence[Row], key: str, **wanted: Any) -> list[float]:
    """One number of each row that has these values."""
    return [float(row[key]) for row in select(rows, **wanted)]


def mean(rows: Sequence[Row], key: str, **wanted: Any) -> float:
    """Their mean; NaN of none."""
    found = values(rows, key, **wanted)
    return float(np.mean(found)) if found else float("nan")


def sparsities_of(rows: Sequence[Row], **wanted: Any) -> list[float]:
    """Those of the rows that have these values, from the sparsest."""
    return sorted({row["sparsity"] for row in select(rows, **wanted)})


def ratio(part: float, whole: float) -> float:
    """``part / whole``; NaN where there is no telling."""
    return part / whole if whole else math.nan


def kept(rows: Sequence[Row], part: Mapping[str, Any], whole: Mapping[str, Any]) -> float:
    """The score of the rows ``part`` over that of the rows ``whole``, mean over tasks; NaN where a task lacks one."""
    shares = [
        ratio(mean(rows, "score", task=task, **part), mean(rows, "score", task=task, **whole))
        for task in distinct(rows, "task")
    ]
    return sum(shares) / len(shares) if shares else math.nan


def verdict(holds: bool, *numbers: float) -> bool | None:
    """``holds``, unless one of the numbers it rests on is missing."""
    return None if any(map(math.isnan, numbers)) else bool(holds)


def shown(fraction: float) -> str:
    """In percent; a dash where it is missing."""
    return NULL if math.isnan(fraction) else percent(fraction)


def share_of(sparsity: float) -> str:
    """A sparsity as a reader knows it: 0.001 is ``0.1 %``."""
    return f"{100 * sparsity:g} %"


def distinct(rows: Sequence[Row], key: str) -> list[Any]:
    """The values of a key, in the order first met."""
    return list(dict.fromkeys(row[key] for row in rows if key in row))


#: Header to the key that a column shows and the values that its rows must have.
Columns = Mapping[str, tuple[str, Mapping[str, Any]]]


def with_constant(rows: Sequence[Row], columns: Columns) -> Columns:
    """Columns of scores, and before them what a constant answer scores on the same rows; not where rows do not say it."""
    (_, wanted), *_ = columns.values()
    if not all("constant" in row for row in rows):  # results of older versions
        return columns
    return {CONSTANT: ("constant", wanted), **columns}


def pivot(title: str, rows: Sequence[Row], by: str | tuple[str, ...], columns: Columns) -> Table:
    """A table of mean (std) over seeds, in percent.

    Args:
        title: of the table.
        rows: all.
        by: key, or keys, whose values name its rows.
        columns: of the table, see `Columns`.
    """
    keys = (by,) if isinstance(by, str) else by
    groups = list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))
    body = []
    for group in groups:
        those = select(rows, **dict(zip(keys, group, strict=True)))
        cells = [cell(values(those, key, **wanted), percent) for key, wanted in columns.values()]
        body.append((" · ".join(map(str, group)), *cells))
    return Table(title, (" · ".join(keys), *columns), tuple(body))
