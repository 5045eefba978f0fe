"""Files that hold a table: parquet, jsonl, csv, tsv, json, CoNLL's tagged words; those of text may be packed."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from forgetfree.data.arrow_tables import read_parquet
from forgetfree.data.bad_rows import BadRow, BadRows, refuse
from forgetfree.data.places import format_of
from forgetfree.data.tables import Table, check_names, of_records, shown
from forgetfree.data.text_files import (
    MOST_BYTES,
    MOST_LINE,
    check_size,
    encoding_of,
    lines_of,
    open_text,
    unpacked_limit,
)
from forgetfree.errors import DataError, first_line
from forgetfree.files import size_of
from forgetfree.json_file import MOST_BYTES as MOST_JSON
from forgetfree.json_file import parse_json

#: What separates the cells of a format by its name, and what else may.
_SIGN = {"csv": ",", "tsv": "\t"}
_SIGNS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_QUOTE = "Quote texts that hold commas, quotes or line breaks"
#: The most rows of a text file, whose cells are all objects of their own in memory.
MOST_TEXT_ROWS = 5_000_000
#: Rows of csv that are put into columns together; and the most texts of a column that are compared to hold each once.
_ROWS_AT_A_TIME, _FEW = 10_000, 1000
#: A tag of CoNLL's files, and the word of a line that begins a document.
_TAG = re.compile(r"O|[A-Z]-\S+")
_BREAK = "-DOCSTART-"
_CONLL_FORM = (
    "Write a word, a tab and O, B-X or I-X on a line, and a blank line between sentences; a table of texts is named .csv, .tsv "
    "or .jsonl."
)
#: Of how many bytes the encoding of a header is found out.
_HEAD = 2**20


def read_table(path: Path) -> Table:
    """Read a file by the format that its name says.

    Raises:
        DataError: it cannot be read.
    """
    _, format = format_of(path.name)
    try:
        check_size(path, size_of(path), "bytes", MOST_BYTES)
        if format == "parquet":
            return read_parquet(path)
        form = text_form(path)
        read = {"jsonl": _read_jsonl, "json": _read_json, "csv": _read_csv, "tsv": _read_csv}.get(format, _read_conll)
        return replace(read(path, form), note=form.note)
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text: {first_line(error)}. Write the file again, in UTF-8.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}. Put a file there.") from error
    except Exception as error:
        raise DataError(f"{path} cannot be read as {format}: {first_line(error)}. Write the file again.") from error


def head_of(path: Path) -> Table | None:
    """Return the columns of a file that names them before its rows, with its first row or none.

    Returns:
        ``None`` for files of other formats, and for those that can only be judged when they are read whole.

    Raises:
        DataError: the names are not as they must be.
    """
    _, format = format_of(path.name)
    try:
        if not path.is_file():
            return None
        if format == "parquet":
            return read_parquet(path, head=True)
        form = text_form(path, _HEAD) if format in _SIGN else None
    except Exception:  # whoever reads the file tells it
        return None
    if form is None:
        return None
    with closing(_records(path, form, refuse, delimiter=form.separator)) as records:
        _, names = next(records, (0, list[str]()))
    return Table(str(path), {name: [] for name in names}, []) if names else None


@dataclass(frozen=True)
class TextForm:
    """How a file of text is written, which is found out once.

    Attributes:
        encoding: as Python calls it.
        separator: of the cells of a csv or tsv file.
        note: what a user should know of it: that it is not in UTF-8, or its cells not separated as its name says.
    """

    encoding: str = "utf-8-sig"
    separator: str = ""
    note: str = ""


def text_form(path: Path, most: int = MOST_BYTES) -> TextForm:
    """Return how a file of text is written; a pipe cannot be read twice, and must be as its name says, in UTF-8.

    Args:
        path: the file.
        most: how many bytes to look at.

    Raises:
        DataError: it is in no encoding that is known.
    """
    format = format_of(path.name)[1]
    usual = _SIGN.get(format, "")
    if not path.is_file():
        return TextForm(separator=usual)
    encoding, note = encoding_of(path, min(most, unpacked_limit(path) + 1))
    sign = _separator(path, encoding, usual) if usual else ""
    if sign != usual:
        note = "; ".join(filter(None, [note, f"the cells of {path.name} are separated by {_SIGNS[sign]}"]))
    return TextForm(encoding, sign, note)


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let texts be as long as a line: the csv module reads at most 131,072 characters by default."""
    before = csv.field_size_limit(MOST_LINE)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def csv_records(path: Path, form: TextForm) -> Iterator[list[str]]:
    """Yield the names of the columns of a csv or tsv file, and then each row, which has a cell for each of them.

    Raises:
        DataError: a row has more cells or fewer, a quote is not closed, or a column's name comes twice.
    """
    return (record for _, record in _records(path, form, refuse, **_dialect(path, form)))


def _separator(path: Path, encoding: str, usual: str) -> str:
    """Return what separates the cells of a csv or tsv file: as usual, unless another sign alone cuts its header."""
    with closing(lines_of(path, encoding)) as lines, _long_fields():
        header = next((line for line in lines if line.strip()), "")
        columns = {sign: len(next(csv.reader([header], delimiter=sign), [])) for sign in (usual, *_SIGNS)}
    return usual if columns[usual] > 1 else max(columns, key=columns.__getitem__)


def _records(
    path: Path, form: TextForm, on_bad: Callable[[BadRow], None], **dialect: Any
) -> Generator[tuple[int, list[str]], None, None]:
    """Yield 0 and the names of a file's columns, then the number and the cells of each good row."""
    names, number, begin = list[str](), 0, 1
    with closing(lines_of(path, form.encoding)) as lines, _long_fields():
        reader = csv.reader(lines, strict=True, **dialect)
        while True:
            try:
                record = next(reader, None)
            except csv.Error as error:
                fault = f"{path}, line {begin}: {first_line(error)}. {_QUOTE}, and double the quotes inside."
                if not names or "unexpected end" in str(error):  # after a quote that is not closed there are no rows
                    raise DataError(fault) from error
                through = f" to {reader.line_num}" if reader.line_num > begin else ""
                on_bad(BadRow(str(path), number, "", "broken quotes", f"line {begin}{through}", fault))
                record = []
                number += 1
            begin = reader.line_num + 1
            if record is None:
                return
            if not record:  # blank ones are no rows
                continue
            if not names:
                names = record
                check_names(str(path), [name for name in names if name])  # a column without a name is not read
            elif len(record) != len(names):
                on_bad(_of_other_length(path, number, names, record, form.separator))
                number += 1
                continue
            yield number, record
            number += 1


def _of_other_length(path: Path, number: int, names: Sequence[str], record: Sequence[str], sign: str) -> BadRow:
    """Return the fault of a row that has not a cell for each column."""
    column = repr(names[len(record)]) if len(record) < len(names) else len(names) + 1
    of = "the one column" if len(names) == 1 else f"each of the {len(names)} columns"
    fault = f"expected a cell for {of} ({', '.join(names)}), got {len(record)}"
    message = f"{path}, row {number}, column {column}: {fault}. {_QUOTE}."
    what = "too few cells" if len(record) < len(names) else "too many cells"
    return BadRow(str(path), number, "", what, shown(sign.join(record)), message)


def _dialect(path: Path, form: TextForm) -> dict[str, Any]:
    """Return how cells are written.

    Between tabs: with quotes as in csv, if all cells that begin with one are quoted whole, else (GLUE) without.
    """
    quoted: dict[str, Any] = {"delimiter": form.separator}
    if form.separator != "\t":
        return quoted
    plain, bad = quoted | {"quoting": csv.QUOTE_NONE}, BadRows()
    cells = (cell for _, record in _records(path, form, bad.add, **plain) for cell in record if cell.startswith('"'))
    others = sum(not re.fullmatch(r'"([^"]|"")*"', cell) for cell in cells)
    if not bad or not others:
        return plain if others else quoted
    broken = BadRows()  # either some rows are bad, or cells hold tabs or line breaks, so that they must be quoted
    try:
        for _ in _records(path, form, broken.add, **quoted):
            pass
    except DataError:
        return plain
    return quoted if len(broken) <= len(bad) else plain


def _read_csv(path: Path, form: TextForm) -> Table:
    bad = BadRows()
    with closing(_records(path, form, bad.add, **_dialect(path, form))) as rows:
        _, names = next(rows, (0, list[str]()))
        columns, numbers = [_Column() for _ in names], list[int]()
        while piece := list(islice(rows, min(_ROWS_AT_A_TIME, MOST_TEXT_ROWS + 1 - len(numbers)))):
            numbers += [number for number, _ in piece]
            check_size(path, len(numbers), "rows or more", MOST_TEXT_ROWS)
            for column, values in zip(columns, zip(*(record for _, record in piece), strict=True), strict=True):
                column.extend(values)
    cells = {name: column.cells for name, column in zip(names, columns, strict=True)}
    return Table(str(path), cells, numbers, typed=False, bad=bad)


class _Column:
    """A column of texts, which holds each of a few texts once."""

    def __init__(self) -> None:
        self.cells = list[str]()
        self._known = dict[str, str]()

    def extend(self, cells: Iterable[str]) -> None:
        """Add cells to the end."""
        if len(self._known) < _FEW:
            cells = [self._known.setdefault(cell, cell) for cell in cells]
        self.cells.extend(cells)


def _read_jsonl(path: Path, form: TextForm) -> Table:
    records, numbers, bad = list[Any](), list[int](), BadRows()
    for number, line in enumerate(lines_of(path, form.encoding), 1):
        if not line.strip():
            continue
        record, reason = None, ""
        try:
            record = parse_json(line)
        except ValueError as error:
            reason = f" ({first_line(error)})"
        if isinstance(record, dict):
            records.append(record)
            numbers.append(number)
            check_size(path, len(records), "rows or more", MOST_TEXT_ROWS)
        else:
            text = shown(line.strip())
            fault = f"{path}, row {number}: expected a JSON object, got {text}{reason}. Fix or remove the row."
            bad.add(BadRow(str(path), number, "", "no JSON object", text, fault))
    return replace(of_records(str(path), records, numbers), bad=bad)


def _read_json(path: Path, form: TextForm) -> Table:
    """Read a list of records; or, as many files of that name are, one record a line."""
    with open_text(path, form.encoding) as file:
        start = file.read(1024).lstrip()
    if not start.startswith("["):
        return _read_jsonl(path, form)
    with open_text(path, form.encoding) as file:
        text = file.read(MOST_JSON + 1)
    check_size(path, len(text), "characters of JSON or more", MOST_JSON)
    try:
        records = parse_json(text)
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {first_line(error)}. Write the file again.") from error
    return of_records(str(path), records, range(1, len(records) + 1))


def _read_conll(path: Path, form: TextForm) -> Table:
    """Read tagged words as CoNLL's shared tasks have them: a word and its tag a line, a blank line between sentences.

    The table has the columns ``tokens`` and ``tags``; a row's number is its first line's. The word is a line's first cell and
    the tag its last, so that two cells (WNUT), three (CoNLL 2002) and four (CoNLL 2003) are read alike. Cells stand between
    tabs, or else between blanks. Lines of ``-DOCSTART-`` begin a document and are no words; a line that begins with # and does
    not end in a tag is a comment. A sentence is bad where a line of it has no tag, or not as many cells as those before it.
    """
    where = str(path)
    tokens: list[list[str]] = []
    tags: list[list[str]] = []
    numbers: list[int] = []
    columns, begins, bad = 0, True, BadRows()
    for number, line in enumerate(lines_of(path, form.encoding), 1):
        cells = line.strip("\r\n").rstrip("\t ").split("\t") if "\t" in line.strip() else line.split()
        if not cells or cells[0] == _BREAK:
            begins = True
            continue
        is_tagged = len(cells) > 1 and _TAG.fullmatch(cells[-1]) is not None
        if cells[0].startswith("#") and not is_tagged:
            continue
        if begins:
            tokens.append([])
            tags.append([])
            numbers.append(number)
            begins = False
        if not is_tagged or (columns and len(cells) != columns):
            expected = f"{columns} columns, as in the lines before" if columns and is_tagged else "a word and its tag"
            text, what = shown(line.strip()), "other columns" if is_tagged else "no tag"
            fault = f"{where}, line {number}: expected {expected}, got {text}. {_CONLL_FORM}"
            bad.add(BadRow(where, numbers[-1], "", what, text, fault))
            continue
        columns = len(cells)
        tokens[-1].append(cells[0])
        tags[-1].append(cells[-1])
    return Table(where, {"tokens": tokens, "tags": tags}, numbers, bad=bad).good()
