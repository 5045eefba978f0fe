"""Paths that are no files, files that are too large, and content that is no text are refused before they are read whole."""

from __future__ import annotations

import csv
import gzip
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from forgetfree.data import arrow_tables, text_files
from forgetfree.data import table_files as tables
from forgetfree.data.sources import load_task
from forgetfree.errors import DataError

ROWS = [{"text": f"text {i}", "label": i % 2} for i in range(20)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task with 20 rows in each split."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for split in ("train", "validation", "test"):
        write_rows(folder / f"{split}.jsonl", ROWS)
    return folder


def write_rows(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def refusal(folder: Path) -> str:
    """Return the message of loading the task, which must come at once."""
    begin = time.monotonic()
    with pytest.raises(DataError) as caught:
        load_task("mine", str(folder.parent))
    assert time.monotonic() - begin < 5
    return str(caught.value)


# -- What is no file ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train.jsonl", "test.csv", "validation.parquet", "source.json"])
def test_a_pipe_is_refused_and_not_waited_for(folder: Path, name: str) -> None:
    for other in folder.glob(f"{name.split('.')[0]}.*"):
        other.unlink()
    os.mkfifo(folder / name)
    assert refusal(folder).startswith(f"{folder}/{name} cannot be read: it is a pipe or a device, expected a file. ")


def test_devices_directories_and_links_to_nothing_are_refused(folder: Path) -> None:
    path = folder / "test.jsonl"
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "it is a pipe or a device, expected a file" in refusal(folder)
    path.unlink()
    path.symlink_to(folder / "nothing")
    assert f"{path} cannot be read: No such file or directory" in refusal(folder)
    path.unlink()
    path.mkdir()
    assert f"{path} cannot be read: it is a directory, expected a file" in refusal(folder)


# -- What is too large -------------------------------------------------------------------------------------


def test_bounds_are_generous() -> None:
    """Amazon polarity, the largest set of the literature's streams, has 3.6 million rows and 1.7 GB."""
    assert arrow_tables.MOST_ROWS > 10 * 3_600_000 and text_files.MOST_BYTES > 2 * 1_700_000_000
    assert text_files.MOST_LINE >= 10_000_000


def test_a_file_of_too_many_bytes_is_refused_with_its_size(folder: Path) -> None:
    path = folder / "train.jsonl"
    os.truncate(path, text_files.MOST_BYTES + 1)  # a sparse file, which takes no room on the disk
    assert refusal(folder) == (
        f"{path} holds 4,294,967,297 bytes, and at most 4,294,967,296 are read. Take a part of its rows."
    )


def test_a_small_file_that_unpacks_to_gigabytes_is_told_and_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than ten kilobytes; memory does not grow by what they unpack to."""
    (folder / "train.jsonl").unlink()
    one = pyarrow.array(["x" * 10**7])
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2000), one)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts, "label": [0, 1] * 1000}), folder / "train.parquet", compression="zstd"
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "holds 20,000,000,000 bytes or more when unpacked, and at most 268,435,456 are read" in refusal(folder)
    (folder / "train.parquet").unlink()
    line = b"x" * 1021 + b",0\n"
    frame = zstandard.compress(line * 2**10)  # a megabyte
    (folder / "train.csv.zst").write_bytes(zstandard.compress(b"text,label\n") + frame * 30)
    assert (folder / "train.csv.zst").stat().st_size < 10_000
    monkeypatch.setattr(text_files, "FEW_BYTES", 2**23)
    assert "when unpacked, and at most 8,388,608 are read" in refusal(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19, "in kilobytes"


@pytest.mark.parametrize("dictionary", [False, True])
def test_a_parquet_file_is_measured_unpacked(folder: Path, monkeypatch: pytest.MonkeyPatch, dictionary: bool) -> None:
    """A repeated long text takes no room in compressed form or in a dictionary."""
    (folder / "train.jsonl").unlink()
    path = folder / "train.parquet"
    texts: Any = pyarrow.array(["x" * 100_000])
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 100), texts)
    table = pyarrow.table({"text": texts if dictionary else texts.dictionary_decode(), "label": [0, 1] * 50})
    pyarrow.parquet.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 300_000
    assert len(load_task("mine", str(folder.parent)).train) == 100
    monkeypatch.setattr(text_files, "MOST_BYTES", 5_000_000)
    assert "bytes or more when unpacked, and at most 5,000,000 are read" in refusal(folder)
    monkeypatch.setattr(text_files, "MOST_BYTES", path.stat().st_size)
    assert "bytes when unpacked, and at most" in refusal(folder)


def test_a_parquet_file_of_too_many_rows_is_refused_unread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "train.jsonl").unlink()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "train.parquet")
    monkeypatch.setattr(arrow_tables, "MOST_ROWS", 19)
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", None)
    assert refusal(folder).startswith(f"{folder}/train.parquet holds 20 rows, and at most 19 are read.")


@pytest.mark.parametrize("suffix", ["jsonl.gz", "csv.gz", "tsv"])
def test_a_text_file_of_too_many_rows_is_refused_while_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    (folder / "train.jsonl").unlink()
    sign = "\t" if suffix == "tsv" else ","
    rows = (
        [json.dumps(row) for row in ROWS]
        if "json" in suffix
        else [f"text{sign}label", *(f"a text{sign}{i % 2}" for i in range(20))]
    )
    content = "".join(f"{row}\n" for row in rows).encode()
    (folder / f"train.{suffix}").write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    monkeypatch.setattr(tables, "MOST_TEXT_ROWS", 20)
    assert len(load_task("mine", str(folder.parent)).train) == 20
    monkeypatch.setattr(tables, "MOST_TEXT_ROWS", 12)
    for split in ("validation", "test"):
        write_rows(folder / f"{split}.jsonl", ROWS[:12])
    assert refusal(folder).startswith(f"{folder}/train.{suffix} holds 13 rows or more, and at most 12 are read.")


def test_rows_that_each_have_a_key_of_their_own_are_refused(folder: Path) -> None:
    """A table of them would have as many cells as rows times keys."""
    write_rows(folder / "train.jsonl", [{"text": "a", "label": 0, f"key{i}": 1} for i in range(5000)])
    assert "train.jsonl has 4,097 columns or more, expected at most 4,096." in refusal(folder)


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_line_without_end_is_refused_with_its_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    (folder / "train.jsonl").unlink()
    path = folder / f"train.{suffix}"
    lines = {"jsonl": json.dumps(ROWS[0]), "csv": "text,label\ntext,0"}[suffix]
    path.write_text(lines + "\n" + "x" * 5001)
    monkeypatch.setattr(text_files, "MOST_LINE", 5000)
    number = 1 + len(lines.splitlines())
    assert refusal(folder).startswith(f"{path}, line {number}: expected at most 5,000 characters, got more.")


def test_a_csv_text_may_be_longer_than_the_bound_of_pythons_csv_module(folder: Path) -> None:
    """That bound is 131,072 characters, and it stays for all other readers of CSV."""
    (folder / "train.jsonl").unlink()
    with (folder / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *(("word " * 40_000, i % 2) for i in range(4))])
    assert len(load_task("mine", str(folder.parent)).train.first[0]) == 200_000
    assert csv.field_size_limit() == 131_072


def test_a_quote_that_is_never_closed_does_not_swallow_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "train.jsonl").unlink()
    (folder / "train.csv").write_text('text,label\n"open,0\n' + "a line,1\n" * 1000)
    monkeypatch.setattr(tables, "MOST_LINE", 2000)
    assert "field larger than field limit (2000)" in refusal(folder)


# -- What is no text, and no label -------------------------------------------------------------------------


def test_half_of_a_surrogate_pair_in_a_row_is_refused_with_the_row(folder: Path) -> None:
    write_rows(folder / "train.jsonl", [*ROWS, {"text": "a \udcff", "label": 0}])
    message = refusal(folder)
    assert message.startswith(f"{folder}/train.jsonl, row 21: expected a JSON object, got ")
    assert r"holds '\udcff', half of a surrogate pair and no character" in message
    message.encode()  # it can be shown


@pytest.mark.parametrize("key", ["label_names", "label_words"])
def test_half_of_a_surrogate_pair_in_a_label_is_refused(folder: Path, key: str) -> None:
    (folder / "source.json").write_text(json.dumps({key: ["a", "b\ud800"]}))
    assert refusal(folder).startswith(f"{folder}/source.json is not valid JSON: a text in it holds '\\ud800', half of")


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
@pytest.mark.parametrize("digits", [19, 5000])
def test_a_label_of_many_digits_is_told_in_a_message_of_some_length(folder: Path, suffix: str, digits: int) -> None:
    (folder / "train.jsonl").unlink()
    label = "7" * digits
    text = {"jsonl": f'{{"text": "a", "label": "{label}"}}\n', "csv": f"text,label\na,{label}\n"}[suffix]
    (folder / f"train.{suffix}").write_text(text)
    message = refusal(folder)
    assert message.startswith(f"{folder}/train.{suffix}: every row has label ")
    assert len(message) < 400 + len(str(folder))


def test_a_row_that_is_nested_too_deep_is_refused(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"text": "a", "label": ' + "[" * 100_000 + "\n")
    assert "row 1: expected a JSON object" in (message := refusal(folder))
    assert "nested more than 100 deep" in message
    (folder / "source.json").write_text("[" * 100_000)
    assert "source.json is not valid JSON: its lists and objects are nested more than 100 deep" in refusal(folder)


def test_names_that_come_twice_are_found_in_one_pass(folder: Path) -> None:
    names = [f"column {i}" for i in range(20_000)]
    (folder / "train.jsonl").rename(folder / "train.csv")
    (folder / "train.csv").write_text(",".join([*names, names[-1]]) + "\n")
    assert "has column 'column 19999' twice" in refusal(folder)
    row = ", ".join(f'"{name}": 0' for name in [*names, names[-1]])
    (folder / "train.csv").rename(folder / "train.jsonl")
    (folder / "train.jsonl").write_text(f"{{{row}}}\n")
    assert "the key 'column 19999' stands twice" in refusal(folder)
