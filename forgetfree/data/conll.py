"""Files of tagged words as CoNLL's shared tasks have them: a word and its tag a line, a blank line between sentences.

The word is the first column and the tag the last, so that two columns (WNUT), three (CoNLL 2002) and four (CoNLL 2003) are read
alike. Columns stand between tabs, or else between blanks. Lines of ``-DOCSTART-`` begin a document and are no words; a line
that begins with # and does not end in a tag is a comment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from forgetfree.data.bad_rows import BadRow, BadRows
from forgetfree.data.labels import shown
from forgetfree.data.tables import Table

#: How the names of such files end.
ENDINGS = ("conll", "bio", "iob", "iob2", "txt")
_TAG = re.compile(r"O|[A-Z]-\S+")
_BREAK = "-DOCSTART-"
_FORM = (
    "Write a word, a tab and O, B-X or I-X on a line, and a blank line between sentences; a table of texts is named .csv, .tsv "
    "or .jsonl."
)


def read_conll(where: str, lines: Iterable[str]) -> Table:
    """Return the table of a file's sentences, with columns ``tokens`` and ``tags``; a row's number is its first line's.

    A sentence is bad where a line of it has no tag, or not as many columns as the lines before it.

    Args:
        where: the file, for messages.
        lines: of it.
    """
    tokens: list[list[str]] = []
    tags: list[list[str]] = []
    numbers: list[int] = []
    columns, begins, bad = 0, True, BadRows()
    for number, line in enumerate(lines, 1):
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
            fault = f"{where}, line {number}: expected {expected}, got {text}. {_FORM}"
            bad.add(BadRow(where, numbers[-1], "", what, text, fault))
            continue
        columns = len(cells)
        tokens[-1].append(cells[0])
        tags[-1].append(cells[-1])
    return Table(where, {"tokens": tokens, "tags": tags}, numbers, bad=bad).good()
