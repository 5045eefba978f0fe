"""``forgetfree predict``: answer from a finished run."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from forgetfree.cli.text_rows import Asked, Row, is_plain, rows_of_file, rows_of_stdin, rows_of_texts
from forgetfree.cli.usage import Debug
from forgetfree.cli.use import BaseModel, Deterministic, Run, Seed, Strategy, predictor_of
from forgetfree.cli.words import say
from forgetfree.data.columns import PAIR, Columns
from forgetfree.display import counted, escaped
from forgetfree.errors import UsageError

if TYPE_CHECKING:
    from forgetfree.serve.inference import Answer
    from forgetfree.serve.tagging import TaggedSentence

AUTO = "auto"
#: What the command line makes of a lone hyphen.
STDIN = "/dev/stdin"
#: What a line of --json or --csv holds itself.
_OURS = {"text", *PAIR, "task", "label", "probability", "probabilities", "words", "tags", "cut_tokens", "entities"}
#: Rows that are answered together.
_ROWS = 256
#: What a spreadsheet takes for a formula begins with one of these.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
Print = Callable[[Asked, Any], None]


def command(
    directory: Run,
    /,
    *texts: Annotated[
        str,
        Parameter(name="TEXT", help="default: all lines of stdin; -: each line as it comes; pairs with a tab between"),
    ],
    task: Annotated[
        str | None,
        Parameter(metavar="NAME", help="what classifies the texts (default: the only task); auto: the router finds it"),
    ] = None,
    file: Annotated[
        Path | None, Parameter(name="--file", metavar="FILE", help="texts of a csv, tsv, json, jsonl, parquet or txt")
    ] = None,
    text_column: Annotated[
        tuple[str, ...], Parameter(metavar="NAME", help="column of the texts in FILE; for pairs, give it twice")
    ] = (),
    keep: Annotated[
        tuple[str, ...],
        Parameter(metavar="NAME", help="column of FILE, such as an id, to write into each line of --json or --csv"),
    ] = (),
    as_json: Annotated[bool, Parameter(name="--json", help="print an object a line, with all probabilities")] = False,
    as_csv: Annotated[bool, Parameter(name="--csv", help="print a table with all probabilities")] = False,
    seed: Seed = None,
    strategy: Strategy = None,
    model: BaseModel = None,
    deterministic: Deterministic = False,
    debug: Debug = False,
) -> None:
    """Print an answer a text; of a task that finds entities, a line for each entity in it."""
    streaming = texts == (STDIN,)
    for text in texts:
        if not streaming and os.path.isfile(text):
            raise UsageError(
                f"{text!r} is the name of a file, and a TEXT is itself classified. To read the file, write --file {text!r}."
            )
    if as_json and as_csv:
        raise UsageError("--json and --csv are both given. Give one of them.")
    if file is not None and texts:
        raise UsageError("--file and texts are both given. Give one of them.")
    if text_column and (file is None or is_plain(file)):
        raise UsageError(
            "--text-column names a column of --file, which must be a csv, tsv, json, jsonl or parquet. Give one, or leave it "
            "out."
        )
    if keep and (file is None or is_plain(file) or not (as_json or as_csv)):
        raise UsageError(
            "--keep names a column of --file, which must be a csv, tsv, json, jsonl or parquet, and is written by --json "
            "or --csv. Give both, or leave it out."
        )
    if taken := [name for name in keep if name in _OURS]:
        raise UsageError(f"--keep {taken[0]} has the name of a column that predict writes. Rename it in {file}.")
    asked = Columns.of(text_column, None)
    predictor, _ = predictor_of(directory, seed, strategy, model, deterministic=deterministic)
    if task is None:
        task, *others = predictor.tasks
        if others:
            raise UsageError(f"The run learned {', '.join(predictor.tasks)}. Give one of them by --task.")
    routed = task == AUTO and AUTO not in predictor.tasks
    if routed:
        predictor.route([])  # refuses before any text is read
    tasks = list(predictor.tasks) if routed else [task]
    kinds = {predictor.definition(each).kind for each in tasks}
    kind = min(kinds) if len(kinds) == 1 else None
    sizes = {len(predictor.definition(each).text_columns) for each in tasks}
    size = min(sizes) if len(sizes) == 1 else None

    answered: Callable[[Sequence[Row]], Sequence[Any]]
    if not routed and predictor.definition(task).kind == "tokens":
        from forgetfree.serve.tagging import tag_sentences, words_of

        if as_csv:
            raise UsageError(f"Task {task!r} finds any number of entities in a text, which is no table. Use --json.")
        answered = lambda rows: tag_sentences(predictor, task, [words_of(text) for (text,) in rows])  # noqa: E731
        show: Print = _entities_as_json if as_json else _entities
    else:
        answered = predictor.route if routed else partial(predictor.answer, task)
        columns = ("text",) if size == 1 else PAIR
        labels = dict.fromkeys(label for each in tasks for label in predictor.definition(each).labels)
        show = _as_json(columns) if as_json else _as_csv(columns, list(labels), keep) if as_csv else _plain
    if streaming or (not texts and file is None and sys.stdin.isatty()):
        if sys.stdin.isatty():
            say("Reading texts from the terminal, one a line; end with Ctrl-D.")
        chunks: Iterable[Sequence[Asked]] = ([Asked(row)] for row in rows_of_stdin(size))
    else:
        rows = (
            rows_of_file(file, kind, asked, keep)
            if file is not None
            else map(Asked, rows_of_texts(texts, size) if texts else rows_of_stdin(size))
        )
        chunks = iter(lambda: list(islice(rows, _ROWS)), [])
    empty, cut = 0, list[int]()
    for chunk in chunks:
        answers = answered([each.texts for each in chunk])
        for row, answer in zip(chunk, answers, strict=True):
            show(row, answer)
            empty += not any(text.strip() for text in row.texts)
        cut += [answer.cut_tokens for answer in answers if answer.cut_tokens]
        sys.stdout.flush()
    if cut:
        what = "text is" if len(cut) == 1 else "texts are"
        say(
            f"warning: {len(cut):,} {what} longer than max_length={predictor.loaded.max_length} allows: "
            f"{counted(sum(cut), 'token')} cut off and not read."
        )
    if empty:
        say(f"warning: {empty} {'text is' if empty == 1 else 'texts are'} empty: what is answered there means nothing.")


def _plain(row: Asked, answer: Answer) -> None:
    print(f"{escaped(answer.label)}\t{answer.probability:.3f}\t{escaped(' | '.join(row.texts))}")


def _entities(row: Asked, tagged: TaggedSentence) -> None:
    text = escaped(" ".join(tagged.words))
    for entity in tagged.entities:
        print(f"{escaped(entity.kind)}\t{entity.probability:.3f}\t{escaped(entity.text)}\t{text}")
    if not tagged.entities:
        print(f"-\t-\t-\t{text}")


def _entities_as_json(row: Asked, tagged: TaggedSentence) -> None:
    print(
        json.dumps(
            {**row.kept, **asdict(tagged), "entities": [asdict(each) for each in tagged.entities]}, ensure_ascii=False
        )
    )


def _as_json(columns: Sequence[str]) -> Print:
    def show(row: Asked, answer: Answer) -> None:
        said = {"task": answer.task, "label": answer.label, "probability": answer.probability}
        said |= {"probabilities": answer.probabilities, "cut_tokens": answer.cut_tokens}
        texts = dict(zip(columns if len(row.texts) == len(columns) else ("text",), row.texts, strict=True))
        print(json.dumps({**row.kept, **texts, **said}, ensure_ascii=False))

    return show


def _as_csv(columns: Sequence[str], labels: Sequence[str], kept: Sequence[str]) -> Print:
    """Print the header, and return what prints a line: what is kept, texts, task, label and all probabilities."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(
        _as_text([*kept, *columns, "task", "label", "probability", *(f"probability of {label}" for label in labels)])
    )

    def show(row: Asked, answer: Answer) -> None:
        shares = [answer.probabilities.get(label, "") for label in labels]
        missing = [""] * (len(columns) - len(row.texts))
        said = [answer.task, answer.label, answer.probability, *shares]
        table.writerow(_as_text([*row.kept.values(), *row.texts, *missing, *said]))

    return show


def _as_text(cells: Iterable[Any]) -> list[Any]:
    """Return cells that no spreadsheet takes for a formula: a text that begins like one gets an apostrophe before it.

    >>> _as_text(["=1+1", "-0.5", "fine", 0.5])
    ["'=1+1", '-0.5', 'fine', 0.5]
    """
    return [
        f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) and not _is_number(cell) else cell
        for cell in cells
    ]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
