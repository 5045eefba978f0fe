"""``forgetfree predict``: predict with a finished run."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from forgetfree.cli.arguments import (
    BaseModel,
    Debug,
    Deterministic,
    Device,
    Run,
    Seed,
    Strategy,
    check_there,
    predictor_of,
)
from forgetfree.data.columns import NO_COLUMN_NAMES, PAIR, ColumnNames, ReadOptions
from forgetfree.data.texts import has_columns, read_texts, texts_of_line
from forgetfree.display import Screen, counted, escaped, is_blank, nfc, tell, tell_note
from forgetfree.errors import DataError, UsageError, first_line
from forgetfree.kinds.kind import kind_of, probability_column
from forgetfree.results.run_folder import load_run
from forgetfree.tasks import TaskDefinition

#: The file that the command line puts in place of a lone hyphen.
STDIN = "/dev/stdin"
#: The names that an output of --json or --csv uses itself.
_OURS = {
    *("text", *PAIR, "prompt", "task", "label", "labels", "probability", "probabilities", "words", "tags"),
    *("cut_tokens", "entities"),
}
#: The number of rows that are answered together.
_ROWS = 256
Row = tuple[str, ...]
#: Other columns of a row, which are written beside the answer.
Extra = Mapping[str, Any]


def command(
    directory: Run,
    /,
    *texts: Annotated[
        str,
        Parameter(
            name="TEXT",
            help="texts to classify, with a tab inside a pair (default: all lines of stdin; -: each line of stdin as it "
            "arrives)",
        ),
    ],
    task: Annotated[
        str | None,
        Parameter(metavar="NAME", help="task of the texts (default: the only task); auto: the router infers it"),
    ] = None,
    file: Annotated[
        Path | None,
        Parameter(metavar="FILE", validator=check_there, help="csv, tsv, json, jsonl, parquet or txt file with texts"),
    ] = None,
    text_column: Annotated[
        tuple[str, ...], Parameter(metavar="NAME", help="column with the texts in FILE; for pairs, give it twice")
    ] = (),
    keep: Annotated[
        tuple[str, ...],
        Parameter(metavar="NAME", help="column of FILE, such as an id, to copy to the output of --json or --csv"),
    ] = (),
    as_json: Annotated[
        bool, Parameter(name="--json", help="print one JSON object per line, with all probabilities")
    ] = False,
    as_csv: Annotated[bool, Parameter(name="--csv", help="print a table with all probabilities")] = False,
    seed: Seed = None,
    strategy: Strategy = None,
    model: BaseModel = None,
    device: Device = "auto",
    deterministic: Deterministic = False,
    debug: Debug = False,
) -> None:
    """Print an answer a text, which may be a prompt or a chat; of a task that finds entities, a line for each of them."""
    streaming = texts == (STDIN,)
    for text in texts:
        if not streaming and os.path.isfile(text):
            raise UsageError(
                f"{text!r} is the name of a file, but TEXT arguments are classified themselves. To read the "
                f"file, write --file {text!r}."
            )
    if as_json and as_csv:
        raise UsageError("--json and --csv are both given. Give one of them.")
    if file is not None and texts:
        raise UsageError("--file and texts are both given. Give one of them.")
    if (text_column or keep) and not (file and has_columns(file)):
        flag = "--text-column" if text_column else "--keep"
        raise UsageError(
            f"{flag} names a column of --file, which must be a csv, tsv, json, jsonl or parquet file. Give one, "
            "or leave the flag out."
        )
    if keep and not (as_json or as_csv):
        raise UsageError("--keep needs --json or --csv. Give one of them, or leave --keep out.")
    if taken := [name for name in keep if name in _OURS]:
        raise UsageError(f"--keep {taken[0]} is also the name of a column that predict writes. Rename it in {file}.")
    columns = ColumnNames.of(text_column, None)
    predictor, _ = predictor_of(directory, seed, strategy, model, device, deterministic)
    task, keep = None if task is None else nfc(task), tuple(map(nfc, keep))
    if task is None:
        task, *others = predictor.tasks
        if others:
            raise UsageError(f"There are several tasks: {', '.join(predictor.tasks)}. Choose one with --task.")
    routed = task == "auto" and task not in predictor.tasks
    if routed:
        predictor.route([])  # raises its errors before any text is read
    definitions = [predictor.definition(each) for each in (predictor.tasks if routed else [task])]
    sizes = {len(each.text_columns) for each in definitions}
    size = sizes.pop() if len(sizes) == 1 else None
    answers_to = predictor.route if routed else partial(predictor.answer, task)
    table = _Csv(definitions, size, keep) if as_csv else None
    show = table or partial(_print_json if as_json else partial(_print_lines, routed), definitions[0])
    if not texts and file is None and Screen(sys.stdin).isatty():
        streaming = True
        tell("Reading texts from the terminal, one per line; end with Ctrl-D.")
    if file is not None:
        # Tasks of one kind read the same rows.
        alike = definitions[0] if len({each.kind for each in definitions}) == 1 else None
        usual = _columns_of_run(directory, alike.name) if alike else NO_COLUMN_NAMES
        rows = _rows_of_file(file, alike, columns, usual, keep)
    else:
        lines = _rows_of_texts(texts, size) if texts and not streaming else _rows_of_stdin(size)
        rows = ((row, {}) for row in lines)
    cut = list[int]()
    for chunk in iter(lambda: list(islice(rows, 1 if streaming else _ROWS)), []):
        answers = answers_to([row for row, _ in chunk])
        for (row, extra), answer in zip(chunk, answers, strict=True):
            show(row, extra, answer)
        cut += [answer.cut_tokens for answer in answers if answer.cut_tokens]
        sys.stdout.flush()
    if table is not None:
        table.begin()
    if cut:
        tell(
            f"warning: {counted(len(cut), 'text')} longer than max_length={predictor.loaded.max_length} allows: "
            f"{counted(sum(cut), 'token')} cut off."
        )


# -- The texts -------------------------------------------------------------------------------------------


def _rows_of_texts(texts: Sequence[str], size: int | None) -> list[Row]:
    """Return texts from the command line as rows of ``size`` texts; the two texts of a pair alternate, or have a tab between.

    Args:
        texts: the arguments.
        size: 1 or 2; ``None``: a text with a tab in it is a pair.
    """
    if size == 2 and not any("\t" in text for text in texts) and len(texts) % 2 == 0:
        return list(zip(texts[::2], texts[1::2], strict=True))
    return [texts_of_line(text, size) for text in texts]


def _rows_of_stdin(size: int | None) -> Iterator[Row]:
    """Yield one row per line of stdin, as the lines arrive."""
    try:
        for number, line in enumerate(sys.stdin, 1):
            row = texts_of_line(line.rstrip("\n"), size)
            _check_filled(f"stdin, line {number}", row)
            yield row
    except UnicodeDecodeError as error:
        raise UsageError(f"The texts on stdin are not in UTF-8: {first_line(error)}. Write them in UTF-8.") from error


def _rows_of_file(
    file: Path, task: TaskDefinition | None, named: ColumnNames, usual: ColumnNames, keep: Sequence[str]
) -> Iterator[tuple[Row, Extra]]:
    """Return the rows of a file with their columns to keep; all are read first, so that errors precede any answer."""
    table, rows = read_texts(file, task, named, usual)
    tell_note(f"{table.note}." if table.note else "")
    if lacking := [name for name in keep if name not in table.columns]:
        header = ", ".join(map(repr, table.columns))
        raise DataError(f"--keep {lacking[0]!r} is not a column of {file}, which has {header}. Name one of them.")
    kept = ({name: _json_value(table.columns[name][i]) for name in keep} for i in range(len(rows)))
    return zip(rows, kept, strict=True)


def _columns_of_run(run: Path, task: str) -> ColumnNames:
    """Return the text columns in the configuration of a run for a task; none if they are not set, or for a ledger file."""
    config = load_run(run)["run"] if run.is_dir() else {}
    return ReadOptions.of(config.get("text_column"), None).columns(task)


def _check_filled(where: str, row: Row) -> None:
    """Raise ``DataError`` for a row with an empty text, which no task has learned to answer."""
    if any(map(is_blank, row)):
        raise DataError(f"{where} has an empty text. Write the text, or remove the row.")


# -- The output ------------------------------------------------------------------------------------------


def _print_lines(routed: bool, task: TaskDefinition, row: Row, extra: Extra, answer: Any) -> None:
    """Print the lines of an answer; if ``routed``, each begins with the task that the router found."""
    found = f"{escaped(answer.task)}\t" if routed else ""
    for line in kind_of(task).lines(task, row, answer):
        print(f"{found}{line}")


def _print_json(task: TaskDefinition, row: Row, extra: Extra, answer: Any) -> None:
    print(json.dumps({**extra, **_json_value(kind_of(task).json(task, answer, row))}, ensure_ascii=False))


def _json_value(value: Any) -> Any:
    """Return a value that JSON supports: files may also hold dates, and numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): _json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)


class _Csv:
    """Prints a line for each answer: the columns to keep, the texts, and the columns of the tasks' answers."""

    def __init__(self, tasks: Sequence[TaskDefinition], size: int | None, keep: Sequence[str]) -> None:
        self._task, self._kind = tasks[0], kind_of(tasks[0])
        self._texts = self._kind.names(self._task) if size == 1 else PAIR
        self._columns = list(dict.fromkeys(column for each in tasks for column in kind_of(each).columns(each)))
        self._header = [[*keep, *self._texts, *self._columns]]
        self._table = csv.writer(sys.stdout, lineterminator="\n")

    def begin(self) -> None:
        """Print the header, once. An error before the first answer leaves no table."""
        while self._header:
            self._table.writerow(self._header.pop())

    def __call__(self, row: Row, extra: Extra, answer: Any) -> None:
        self.begin()
        cells, missing = self._kind.json(self._task, answer), [""] * (len(self._texts) - len(row))
        cells |= {probability_column(name): share for name, share in cells.get("probabilities", {}).items()}
        found = [cells.get(column, "") for column in self._columns]
        answered = ["|".join(cell) if isinstance(cell, tuple) else cell for cell in found]
        self._table.writerow([*extra.values(), *row, *missing, *answered])
