"""New texts from a file: the reader of training data, without labels."""

from __future__ import annotations

from pathlib import Path

import pytest

from forgetfree.data.columns import ColumnNames
from forgetfree.data.texts import read_texts
from forgetfree.errors import BadDataError, DataError
from forgetfree.tasks import TaskDefinition

MOOD = TaskDefinition("mood", "single", ("no", "yes"))
PAIRS = TaskDefinition("pairs", "pair", ("no", "yes"))


def test_columns_are_those_that_are_named_or_usual_or_known(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text,blurb\n7,one,two\n")
    for named, usual, read in (
        ((), (), "one"),
        (("blurb",), (), "two"),
        ((), ("blurb",), "two"),
        ((), ("other",), "one"),
    ):
        table, rows = read_texts(tmp_path / "a.csv", MOOD, ColumnNames(named), ColumnNames(usual))
        assert rows == [(read,)] and table.columns["id"] == ["7"]
    (tmp_path / "a.txt").write_text("one\ttwo\r\n")
    assert read_texts(tmp_path / "a.txt", PAIRS)[1] == read_texts(tmp_path / "a.txt", None)[1] == [("one", "two")]
    assert read_texts(tmp_path / "a.txt", MOOD)[1] == [("one\ttwo",)]
    with pytest.raises(DataError, match=r"a\.doc has an unknown format: expected a name that ends in \.parquet, "):
        read_texts(tmp_path / "a.doc", MOOD)


def test_all_bad_rows_are_told_and_no_option_that_leaves_them_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": 5}\n{"text": "cut\n{"text": " "}\n')
    with pytest.raises(BadDataError) as caught:
        read_texts(tmp_path / "a.jsonl", MOOD)
    assert [(each.row, each.what) for each in caught.value.rows] == [
        (2, "no text"),
        (3, "no JSON object"),
        (4, "no text"),
    ]
    assert str(caught.value).startswith("3 bad rows in 1 file: no text (2), no JSON object (1). Fix or remove them.\n")
    for name, content, row in (("a.txt", 299 * "a film\n" + " \n", 300), ("a.csv", 'text,id\na film,1\n"",2\n', 2)):
        (tmp_path / name).write_text(content)
        with pytest.raises(BadDataError, match=rf"{name}, row {row}, column 'text': expected a text, got \"") as caught:
            read_texts(tmp_path / name, MOOD)
        assert str(caught.value).endswith(". Fix or remove the row.")
