"""Scores: one measured number per row, in a CSV file that any tool reads.

strategy,seed,task,after,metric,value,rows
grafting-continual,0,qnli,1,accuracy,0.8125,400
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from forgetfree.display import brief
from forgetfree.errors import ReportError, first_line
from forgetfree.files import write_atomically

#: What the table of one unit is called, in the unit's directory.
SCORES_FILE = "scores.csv"


@dataclass(frozen=True)
class Score:
    """One measured number.

    Attributes:
        strategy: of the unit.
        seed: of the unit.
        task: on whose rows.
        after: how many tasks were learned before; 0 is before training.
        metric: such as ``accuracy``, ``f1``, ``ece`` or ``agreement``.
        value: the number, within the bounds of its metric.
        rows: how many rows were scored; 0 where it is not known.
    """

    strategy: str
    seed: int
    task: str
    after: int
    metric: str
    value: float
    rows: int


#: Of every table of scores.
COLUMNS = tuple(each.name for each in fields(Score))


def write_scores(path: Path, scores: Iterable[Score]) -> None:
    """Write a table of scores as a CSV file; values keep every bit."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    table.writerows(map(astuple, scores))
    write_atomically(path, text.getvalue())


def read_scores(path: Path) -> list[Score]:
    """Read a table of scores.

    Raises:
        ReportError: the file is missing or damaged.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(file, strict=True)) or [[]]
            if tuple(header) != COLUMNS:
                raise ValueError(f"its columns must be {', '.join(COLUMNS)}, got {', '.join(header) or 'none'}")
            scores = [
                Score(strategy, int(seed), task, int(after), metric, float(value), int(count))
                for strategy, seed, task, after, metric, value, count in rows
            ]
            for each in scores:
                if not math.isfinite(each.value) or each.after < 0 or each.rows < 0:
                    raise ValueError(f"expected finite numbers, after and rows of at least 0, got {brief(each, 200)}")
            return scores
    except (OSError, ValueError, csv.Error) as error:
        raise ReportError(
            f"{path} is not a readable table of scores ({first_line(error)}). Restore it from a copy, or go on with --resume."
        ) from error
