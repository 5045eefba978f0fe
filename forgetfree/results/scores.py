"""Scores: one measured number per row, in a CSV file that any tool reads.

    strategy,seed,task,after,metric,value,rows
    grafting-continual,0,qnli,1,accuracy,0.8125,400

Whatever stands before ``task`` says what was measured: strategy and seed of a run, model, sparsity and seed of a graft.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgetfree.display import brief
from forgetfree.errors import ReportError, first_line
from forgetfree.files import write_atomically

#: The last columns of every table of scores.
COLUMNS = ("task", "after", "metric", "value", "rows")
#: What the table of one unit is called, in the unit's directory.
SCORES_FILE = "scores.csv"
#: Metrics whose values lie in [0, 1]. A task's own, under ``score``, may have other bounds.
_FRACTIONS = ("accuracy", "f1", "ece", "agreement", "word_accuracy")
Cell = str | int | float | None


@dataclass(frozen=True)
class Score:
    """One measured number.

    Attributes:
        of: what was measured, by column: e.g. ``{"strategy": "fine-tune", "seed": 0}``.
        task: on whose rows.
        after: how many tasks were learned before; 0 is before training.
        metric: ``accuracy``, ``f1``, ``ece`` or ``agreement``, for instance, which are fractions; or one of a
            package, which may have other bounds.
        value: the number.
        rows: how many rows were scored; 0 where it is not known.
    """

    of: Mapping[str, Cell]
    task: str
    after: int
    metric: str
    value: float
    rows: int


def write_scores(path: Path, scores: Sequence[Score]) -> None:
    """Write a table of scores; values keep every bit.

    Args:
        path: of the CSV file.
        scores: what they have in ``of`` are the first columns; where one lacks a column, its cell is empty.
    """
    text = io.StringIO()
    names = list(dict.fromkeys(name for score in scores for name in score.of))
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*names, *COLUMNS])
    for score in scores:
        of = [score.of.get(name) for name in names]  # None is an empty cell
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


def _parsed(table: csv.DictReader[str]) -> Iterator[Score]:
    names = list(table.fieldnames or [])
    if tuple(names[-len(COLUMNS) :]) != COLUMNS:
        raise ValueError(f"its last columns must be {', '.join(COLUMNS)}, got {', '.join(names) or 'none'}")
    rows = list(table)
    for i, row in enumerate(rows):
        if None in row:  # where DictReader keeps cells without a column
            raise ValueError(f"row {i + 1} must have {len(names)} cells, got more")
    of = {name: typed([row[name] for row in rows]) for name in names[: -len(COLUMNS)]}
    for i, row in enumerate(rows):
        what = {name: column[i] for name, column in of.items()}
        score = Score(what, row["task"], int(row["after"]), row["metric"], float(row["value"]), int(row["rows"]))
        if not math.isfinite(score.value) or score.after < 0 or score.rows < 0:
            raise ValueError(
                f"row {i + 1} must hold finite numbers, after and rows of at least 0, got {brief(list(row.values()))}"
            )
        if score.metric in _FRACTIONS and not 0 <= score.value <= 1:
            raise ValueError(f"row {i + 1}: {score.metric} must be in [0, 1], got {score.value}")
        yield score


def typed(cells: Sequence[str]) -> list[Cell]:
    """Return a column of texts as whole numbers where all of them are, else as numbers, else as texts; empty is ``None``."""
    for kind in (int, float):
        try:
            column: list[Cell] = [kind(cell) if cell else None for cell in cells]
        except ValueError:
            continue
        if all(math.isfinite(number) for number in column if isinstance(number, float)):
            return column
    return [cell or None for cell in cells]


# -- Rows with several numbers ---------------------------------------------------------------------------


def scores_of_rows(rows: Iterable[Mapping[str, Any]], measured: Collection[str]) -> list[Score]:
    """Take rows apart that hold several numbers each, as a graft's do: one score for each number.

    Args:
        rows: dicts with ``task``, what was measured (any other columns) and the numbers; ``test_rows`` and ``after`` where they
            are known, else 0 and 1.
        measured: the columns that hold numbers, or lists of numbers, whose scores are called ``NAME[0]``, ``NAME[1]``, ….
    """
    scores = []
    for row in rows:
        of = {key: value for key, value in row.items() if key not in (*measured, *_OWN)}
        for metric in (key for key in row if key in measured):
            value = row[metric]
            named = [(f"{metric}[{i}]", each) for i, each in enumerate(value)] if _is_list(value) else [(metric, value)]
            scores += [
                Score(of, row["task"], row.get("after", 1), name, float(number), row.get("test_rows", 0))
                for name, number in named
            ]
    return scores


def rows_of_scores(scores: Iterable[Score]) -> list[dict[str, Any]]:
    """Put scores of the same thing back together: undoes `scores_of_rows`, but that all numbers are floats."""
    rows: list[dict[str, Any]] = []
    scores, last = list(scores), None
    timed = any(score.after != 1 for score in scores)
    for score in scores:
        name, _, place = score.metric.partition("[")
        what = (dict(score.of), score.task, score.after, score.rows)
        if what != last or (not place and name in rows[-1]):
            last = what
            rows.append({"task": score.task, **score.of})
            rows[-1] |= {"after": score.after} if timed else {}
            rows[-1] |= {"test_rows": score.rows} if score.rows else {}
        if place:
            rows[-1].setdefault(name, []).append(score.value)
        else:
            rows[-1][name] = score.value
    return rows


#: Columns of a row that a score holds under a name of its own.
_OWN = ("task", "after", "test_rows")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
