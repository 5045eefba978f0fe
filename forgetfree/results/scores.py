"""Scores: one measured number per row, in a CSV file that any tool reads.

    strategy,seed,task,after,metric,value,rows
    grafting-continual,0,qnli,1,accuracy,0.8125,400

Whatever stands before ``task`` says what was measured: strategy and seed of a run, model, sparsity and seed of a graft.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgetfree.errors import ReportError, first_line
from forgetfree.files import write_atomically

#: The last columns of every table of scores.
COLUMNS = ("task", "after", "metric", "value", "rows")
Json = dict[str, Any]


@dataclass(frozen=True)
class Score:
    """One measured number.

    Attributes:
        of: what was measured, by column: e.g. ``{"strategy": "fine-tune", "seed": 0}``.
        task: on whose rows.
        after: how many tasks were learned before; 0 is before training.
        metric: ``accuracy``, ``f1``, ``ece`` or ``agreement``, for instance; all are fractions.
        value: the number.
        rows: how many rows were scored.
    """

    of: Mapping[str, str | int | float | None]
    task: str
    after: int
    metric: str
    value: float
    rows: int


def write_scores(path: Path, scores: Sequence[Score]) -> None:
    """Write a table of scores; values keep every bit.

    Args:
        path: of the CSV file.
        scores: all with the same columns in ``of``.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*(scores[0].of if scores else ()), *COLUMNS])
    for score in scores:
        of = ["" if value is None else value for value in score.of.values()]
        table.writerow([*of, score.task, score.after, score.metric, repr(float(score.value)), score.rows])
    write_atomically(path, text.getvalue())


def read_scores(path: Path) -> list[Score]:
    """Read a table of scores.

    Raises:
        ReportError: the file is missing or damaged.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(_parsed(csv.DictReader(file, strict=True)))
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise ReportError(
            f"{path} is not a readable table of scores ({first_line(error)}). Restore it from a copy, or go on with --resume."
        ) from error


def _parsed(table: csv.DictReader[str]) -> Iterable[Score]:
    names = table.fieldnames or []
    if tuple(names[-len(COLUMNS) :]) != COLUMNS:
        raise ValueError(f"its last columns must be {', '.join(COLUMNS)}, got {', '.join(names) or 'none'}")
    for row in table:
        of = {name: _value(row[name]) for name in names[: -len(COLUMNS)]}
        yield Score(of, row["task"], int(row["after"]), row["metric"], float(row["value"]), int(row["rows"]))


def _value(text: str) -> str | int | float | None:
    """A cell as the number it is, else as text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None
