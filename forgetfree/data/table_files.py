"""Files that hold a table: parquet, jsonl, csv, tsv, json, CoNLL's tagged words; text formats may be compressed.

pyarrow reads parquet, and Python's own csv and json the rest. Unlike pandas and `datasets` they keep each cell as it is written
and report which row is broken (pandas fills short rows and mends quotes in silence), and no cache is written.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from forgetfree.data.bad_rows import BadRow, BadRows
from forgetfree.data.columns import CHATS, WORDS
from forgetfree.data.tables import Columns, Table, check_names, of_arrow, of_records, shown, split_of, stored_features
from forgetfree.display import nfc
from forgetfree.errors import DataError, first_line
from forgetfree.files import size_of
from forgetfree.json_file import parse_json

#: The endings of the names of compressed files.
PACKED = (".gz", ".zst")
#: The largest file that is read, in bytes (decompressed).
MOST_BYTES = 4 * 2**30
#: The formats of tagged words, and all formats; all but parquet may be compressed.
CONLL = ("conll", "bio", "iob", "iob2", "txt")
FORMATS = ("parquet", "jsonl", "csv", "tsv", "json", *CONLL)
#: The separator of cells in each format, and all possible separators with their names.
_SIGN = {"csv": ",", "tsv": "\t"}
_SIGNS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
#: The most characters of a text whose words are examined to find its encoding.
_LOOKED_AT = 10**7
csv.field_size_limit(2**31 - 1)  # the csv module reads texts of at most 131,072 characters by default
_QUOTE = "Quote texts that contain commas, quotes or line breaks"
#: A tag in CoNLL's files, and the word on a line that begins a document.
_TAG = re.compile(r"O|[A-Z]-\S+")
_BREAK = "-DOCSTART-"
_CONLL_FORM = (
    "Write a word, a tab and O, B-X or I-X on a line, and a blank line between sentences; a table of texts is named .csv, .tsv "
    "or .jsonl."
)


def format_of(name: str) -> tuple[str, str]:
    """Return the name of a file without its endings, and its format; the format is empty if it is not supported.

    >>> format_of("mood.csv.gz")
    ('mood', 'csv')
    """
    packed = next((ending for ending in PACKED if name.lower().endswith(ending)), "")
    stem, _, ending = name[: len(name) - len(packed)].rpartition(".")
    known = ending.lower() in FORMATS[1 if packed else 0 :]
    return (nfc(stem), ending.lower()) if known and stem else (name, "")


def check_size(path: Path, size: int, unit: str = "bytes") -> None:
    """Raise ``DataError`` if ``path`` holds more than `MOST_BYTES`."""
    if size > MOST_BYTES:
        raise DataError(
            f"{path} contains {size:,} {unit}, but at most {MOST_BYTES:,} are read. Use a part of its rows."
        )


def read_table(path: Path) -> Table:
    """Read a file in the format of its name.

    Raises:
        DataError: it cannot be read.
    """
    return _read(path, format_of(path.name)[1])


def read_lines(path: Path) -> Table:
    """Read a file with one text per line, as a table with the column ``text``; errors: see `read_table`."""
    return _read(path, "lines")


def _read(path: Path, format: str) -> Table:
    try:
        if format == "parquet":
            return _read_parquet(path)
        text, note = _text_of(path)
        table = _READERS.get(format, _read_conll)(path, text)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}. Replace it by a readable file.") from error
    except Exception as error:
        raise DataError(f"{path} cannot be read as {format}: {first_line(error)}. Write the file again.") from error
    return replace(table, note="; ".join(filter(None, [note, table.note])))


def _read_parquet(path: Path) -> Table:
    """Read a parquet file, where each column is read on access."""
    import pyarrow.parquet

    check_size(path, size_of(path))
    with pyarrow.parquet.ParquetFile(path) as file:
        schema, count = file.schema_arrow, file.metadata.num_rows
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    check_size(path, sum(group.total_byte_size for group in groups), "bytes when unpacked")

    def read(name: str) -> list[Any]:
        with pyarrow.parquet.ParquetFile(path) as file:
            return list(file.read([name]).column(name).chunks)

    return of_arrow(str(path), schema, stored_features(schema), read, range(1, 1 + count))


# -- Text ------------------------------------------------------------------------------------------------


def _text_of(path: Path) -> tuple[str, str]:
    """Return the text of a file, which may be compressed, and a note on its encoding, which is empty for UTF-8.

    Raises:
        DataError: it is too large, or in none of UTF-8, UTF-16 and Windows-1252.
        OSError: it cannot be read.
    """
    import pyarrow

    check_size(path, size_of(path))
    # Unlike gzip's and zstandard's own readers, pyarrow detects a truncated file, and reads all frames of a file.
    with pyarrow.input_stream(str(path), compression="detect") as file:
        data = file.read(MOST_BYTES + 1)
    check_size(path, len(data), "bytes or more when unpacked")
    try:
        return _decoded(path, data)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text: {first_line(error)}. Write the file again, in UTF-8.") from error


def _decoded(path: Path, data: bytes) -> tuple[str, str]:
    """Return the text of bytes, and a note on their encoding; errors: see `_text_of`.

    In doubt, a file is refused. charset-normalizer would read it: it takes French for Baltic, and a damaged file in UTF-8, or
    one with a few words in Cyrillic, for Windows-1252.
    """
    zeros = [data[:4096:2].count(0), data[1:4096:2].count(0)]
    is_wide = max(zeros) > len(data[:4096]) / 4 and min(zeros) < max(zeros) / 10  # most characters are ASCII
    is_marked = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and not data.startswith(codecs.BOM_UTF32_LE)
    if is_marked or is_wide:
        codec = "utf-16" if is_marked else "utf-16-be" if zeros[0] > zeros[1] else "utf-16-le"
        return data.decode(codec), f"{path.name} is read in UTF-16"
    try:
        return data.decode("utf-8-sig"), ""
    except UnicodeDecodeError as error:
        fault = error
    known = data.decode("utf-8", "ignore")
    wide = len(known) - len(known.encode("ascii", "ignore"))  # characters of several bytes
    text = data.decode("cp1252", "replace")
    if 10 * wide <= len(data) - len(known.encode()) and "\ufffd" not in text:  # else it is UTF-8 with some wrong bytes
        words = [word for word in re.findall(r"[\w\x80-\uffff]+", text[:_LOOKED_AT]) if not word.isascii()]
        # Words in other alphabets have no ASCII letters.
        foreign = sum(bool(re.search(r"[^\W\d_a-zA-Z]{3}", word)) for word in words) + text.count("\0")
        if 10 * foreign <= len(words):
            example = f", as in {words[0][:40]!r}" if words else ""
            return text, f"{path.name} is read in Windows-1252{example}"
    line = 1 + data.count(b"\n", 0, fault.start)
    raise DataError(
        f"{path}, line {line}: byte 0x{data[fault.start]:02x} at position {fault.start:,} of the file is not valid "
        "UTF-8, and the file does not seem to be in UTF-16 or Windows-1252 either. Write the file again, in UTF-8."
    )


def _lines(text: str) -> Iterator[str]:
    """Return the lines of a text, each with its line ending."""
    return io.StringIO(text, newline="")


# -- Comma-separated values --------------------------------------------------------------------------------


#: A quoted cell.
_QUOTED = r'"(?:[^"]|"")*+"'


def _read_csv(path: Path, text: str) -> Table:
    """Read csv or tsv; between tabs, cells are quoted as in csv, or (GLUE) not at all.

    Blanks between quotes and separators are ignored. Blanks after separators are ignored if a person seems to have typed them:
    if they are in the header, or before a quote.
    """
    usual = _SIGN[format_of(path.name)[1]]
    header = next((line for line in _lines(text) if line.strip()), "")
    sign = _separator(header, usual)
    notes = [f"the cells of {path.name} are separated by {_SIGNS[sign]}"] * (sign != usual)
    between = re.escape(sign)
    typed = f"{sign} " in re.sub(_QUOTED, "", header)

    def without_blanks(cell: re.Match[str]) -> str:
        nonlocal typed
        typed |= bool(cell[1])
        return cell[2] or cell[0]

    if re.search(rf'" +(?=[{between}\r\n]|\Z)|(?:^|[{between}\r]) +"', text, re.MULTILINE):
        text = re.sub(rf"( *)({_QUOTED}) *(?=[{between}\r\n]|\Z)|[^{between}\r\n]+", without_blanks, text)
    notes += [f"blanks after the {_SIGNS[sign]} in {path.name} are ignored"] * typed
    read = (_tsv_table if sign == "\t" else _csv_table)(path, text, sign, skipinitialspace=typed)
    return replace(read, note="; ".join(notes))


def _separator(header: str, usual: str) -> str:
    """Return the separator of cells: the usual one, unless only another one divides the header."""
    columns = {sign: len(next(csv.reader([header], delimiter=sign), [])) for sign in (usual, *_SIGNS)}
    return usual if columns[usual] > 1 else max(columns, key=columns.__getitem__)


def _tsv_table(path: Path, text: str, sign: str, **dialect: Any) -> Table:
    """Read cells between tabs.

    They are read as quoted if all cells that begin with a quote are quoted whole, or if rows are bad otherwise, and no more are
    bad with quotes.
    """
    plain = _csv_table(path, text, sign, quoting=csv.QUOTE_NONE, **dialect)
    cells = (cell for column in (plain.columns, *plain.columns.values()) for cell in column if cell.startswith('"'))
    if all(re.fullmatch(r'"([^"]|"")*"', cell) for cell in cells):
        return _csv_table(path, text, sign, **dialect)
    if plain.bad:  # either some rows are bad, or cells hold tabs or line breaks, so that they must be quoted
        with suppress(DataError):
            quoted = _csv_table(path, text, sign, **dialect)
            return quoted if len(quoted.bad) <= len(plain.bad) else plain
    return plain


def _csv_table(path: Path, text: str, sign: str, **dialect: Any) -> Table:
    """Return the rows that have a cell for each column; the others are bad."""
    names, records, numbers, bad = list[str](), list[list[str]](), list[int](), BadRows()
    reader, begin, number = csv.reader(_lines(text), strict=True, delimiter=sign, **dialect), 1, 0
    while True:
        try:
            record = next(reader, None)
        except csv.Error as error:
            fault = first_line(error)
            if not names or "unexpected end" in fault:  # after a quote that is not closed there are no rows
                raise DataError(f"{path}, line {begin}: {fault}. {_QUOTE}, and double the quotes inside.") from error
            number += 1
            lines = f"line {begin}" + (f" to {reader.line_num}" if reader.line_num > begin else "")
            told = f"{fault} in {lines}", f"{_QUOTE}, and double the quotes inside."
            bad.add(BadRow(str(path), number, "", "broken quotes", lines, *told))
            record = []
        if record is None:
            break
        if record and not names:
            names = [nfc(name).strip() for name in record]
            check_names(str(path), [name for name in names if name])  # a column without a name is not read
        elif record:  # blank lines are no rows
            number += 1
            if len(record) == len(names):
                records.append(record)
                numbers.append(number)
            else:
                bad.add(_of_other_length(path, number, names, record, sign))
        begin = reader.line_num + 1
    places = {name: place for place, name in enumerate(names)}
    columns = Columns(names, lambda name: [record[places[name]] for record in records])
    return Table(str(path), columns, numbers, typed=False, bad=bad)


def _of_other_length(path: Path, number: int, names: Sequence[str], record: Sequence[str], sign: str) -> BadRow:
    of = "the one column" if len(names) == 1 else f"each of the {len(names)} columns"
    fault = f"expected a cell for {of} ({', '.join(names)}), got {len(record)}"
    what = "too few cells" if len(record) < len(names) else "too many cells"
    return BadRow(str(path), number, "", what, shown(sign.join(record)), fault, f"{_QUOTE}.")


# -- JSON --------------------------------------------------------------------------------------------------


def _read_json(path: Path, text: str) -> Table:
    """Read rows from JSON: a list of objects, one object per line or over several lines, or one object that holds all rows."""
    where, body = str(path), text.lstrip()
    try:
        value = parse_json(body)
    except ValueError:
        lines = _json_lines(where, text)
        if not lines.bad:
            return lines
        if body.startswith("{"):  # objects over several lines: JSON strings have no line breaks
            body = "[" + re.sub(r"}(\s*\n\s*){", r"},\1{", body) + "]"
        try:
            value = parse_json(body)
        except ValueError as error:
            if len(lines.bad) <= len(lines.numbers) or min(lines.bad.numbers) > min(lines.numbers, default=len(text)):
                return lines
            raise DataError(f"{path} is not valid JSON: {first_line(error)}. Write the file again.") from error
    if isinstance(value, list):
        return of_records(where, value, range(1, len(value) + 1))
    is_whole = format_of(path.name)[1] == "json" or "\n" in body.rstrip()
    held = _rows_of(path, value, is_whole) if isinstance(value, dict) else None
    if held is None:
        return of_records(where, [value], [1 + text[: text.index(body[:1])].count("\n")])
    rows, note = held
    return replace(of_records(where, rows, range(1, len(rows) + 1)), note=f"{path.name} has its rows {note}")


def _json_lines(where: str, text: str) -> Table:
    records, numbers, bad = list[Any](), list[int](), BadRows()
    for number, line in enumerate(_lines(text), 1):
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
        else:
            cell = shown(line.strip())
            bad.add(BadRow(where, number, "", "no JSON object", cell, f"expected a JSON object, got {cell}{reason}"))
    return replace(of_records(where, records, numbers), bad=bad)


def _rows_of(path: Path, value: dict[str, Any], is_whole: bool) -> tuple[list[Any], str] | None:
    """Return the rows in one JSON object, as a list or as pandas writes them, and a note; ``None`` if it is itself a row.

    The only line of a JSON Lines file (not ``is_whole``) may have a list of objects beside its text, such as tools.

    Raises:
        DataError: it holds several tables.
    """
    from pandas import DataFrame

    lists = {name: cells for name, cells in value.items() if isinstance(cells, list)}
    objects = {name: cells for name, cells in lists.items() if any(isinstance(cell, dict) for cell in cells)}
    own: list[Any] = next((lists[name] for name in (*CHATS, *WORDS) if name in lists), [[]])
    if not any(isinstance(each, list) for each in own) or (objects and not is_whole):
        return None
    several = [name for name in value if split_of(name)] if len(objects) < 2 else [*objects]
    if len(several) > 1:
        raise DataError(
            f"{path} is one object with several tables of rows: {', '.join(several)}. Write each to its own file, "
            "such as DIR/NAME/train.json for a split, or keep one of them."
        )
    are_columns = len(lists) == len(value) > len(objects) and len({*map(len, lists.values())}) == 1
    if objects and not are_columns:
        ((name, rows),) = objects.items()
        return rows, f"in {name!r}"
    if {"columns", "data"} <= lists.keys():
        frame, form = DataFrame(value["data"], columns=value["columns"], dtype=object), "orient='split'"
    elif all(isinstance(cells, dict) for cells in value.values()):
        more_rows = len(value) > max(map(len, value.values()), default=0)  # more rows than columns
        orient: Literal["index", "columns"] = "index" if more_rows else "columns"
        frame, form = DataFrame.from_dict(value, orient=orient, dtype=object), f"orient={orient!r}"
    elif are_columns:
        frame, form = DataFrame(value, dtype=object), "to_dict('list')"
    else:
        return None
    check_names(str(path), list(map(str, frame.columns)))
    return frame.to_dict("records"), f"as {form} of pandas"


# -- Lines -------------------------------------------------------------------------------------------------


def _read_lines(path: Path, text: str) -> Table:
    lines = [line.rstrip("\r\n") for line in _lines(text)]
    return Table(str(path), {"text": lines}, range(1, 1 + len(lines)))


def _read_conll(path: Path, text: str) -> Table:
    """Read tagged words as in CoNLL's shared tasks: one word and its tag per line, a blank line between sentences.

    The table has the columns ``tokens`` and ``tags``; a row's number is its first line. The word is a line's first cell and
    the tag its last, so that two cells (WNUT), three (CoNLL 2002) and four (CoNLL 2003) are read alike. Cells are separated by
    tabs, or else by blanks. Lines of ``-DOCSTART-`` begin a document and are no words; a line that begins with # and does not
    end in a tag is a comment. A sentence is bad if one of its lines has no tag, or more or fewer cells than the lines before.
    """
    sentences, columns, bad = dict[int, dict[str, list[str]]](), 0, BadRows()
    first = 0  # the line that begins the sentence; 0 between sentences
    for number, line in enumerate(_lines(text), 1):
        cells = line.strip("\r\n").rstrip("\t ").split("\t") if "\t" in line.strip() else line.split()
        if not cells or cells[0] == _BREAK:
            first = 0
            continue
        is_tagged = len(cells) > 1 and _TAG.fullmatch(cells[-1]) is not None
        if cells[0].startswith("#") and not is_tagged:
            continue
        first = first or number
        sentence = sentences.setdefault(first, {"tokens": [], "tags": []})
        if is_tagged and columns in (0, len(cells)):
            columns = len(cells)
            sentence["tokens"].append(cells[0])
            sentence["tags"].append(cells[-1])
        else:
            expected = f"{columns} columns, as in the lines before" if columns and is_tagged else "a word and its tag"
            cell, what = shown(line.strip()), "other columns" if is_tagged else "no tag"
            fault = f"expected {expected}, got {cell} in line {number}"
            bad.add(BadRow(str(path), first, "", what, cell, fault, _CONLL_FORM))
    table = of_records(str(path), [*sentences.values()], [*sentences])
    return replace(table, columns=Columns(("tokens", "tags"), table.columns.__getitem__), bad=bad).good()


#: The readers of text by format; any other format is one of tagged words.
_READERS = {"jsonl": _read_json, "json": _read_json, "csv": _read_csv, "tsv": _read_csv, "lines": _read_lines}
