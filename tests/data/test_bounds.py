"""Paths that are not files, files that are too large, and content that is not text are refused before they are read whole."""

from __future__ import annotations

import csv
import json
import os
import time
from pathlib import Path

import pytest
from task_files import write_task

from forgetfree.data import table_files
from forgetfree.data.sources import load_task
from forgetfree.errors import DataError

ROWS = [{"text": f"text {i}", "label": i % 2} for i in range(20)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task with 20 rows in each split."""
    return write_task(tmp_path, "mine", ROWS)


def refusal(folder: Path) -> str:
    """Return the error message of loading the task, which must not take long."""
    begin = time.monotonic()
    with pytest.raises(DataError) as caught:
        load_task("mine", str(folder.parent))
    assert time.monotonic() - begin < 60  # reading a pipe would wait forever
    return str(caught.value)


# -- Paths that are not files ------------------------------------------------------------------------------


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


# -- Files that are too large ------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_file_of_too_many_bytes_is_refused_with_its_size(folder: Path, suffix: str) -> None:
    (folder / "train.jsonl").unlink()
    path = folder / f"train.{suffix}"
    path.touch()
    os.truncate(path, table_files.MOST_BYTES + 1)  # a sparse file takes no disk space
    assert refusal(folder) == (
        f"{path} contains 4,294,967,297 bytes, but at most 4,294,967,296 are read. Use a part of its rows."
    )


def test_a_csv_text_may_be_longer_than_the_bound_of_pythons_csv_module(folder: Path) -> None:
    """That bound is 131,072 characters."""
    (folder / "train.jsonl").unlink()
    with (folder / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *(("word " * 40_000, i % 2) for i in range(4))])
    assert len(load_task("mine", str(folder.parent)).train.first[0]) == 200_000


# -- Content that is not text ------------------------------------------------------------------------------


def test_half_of_a_surrogate_pair_is_refused_with_its_place(folder: Path) -> None:
    with (folder / "train.jsonl").open("a") as file:
        file.write(json.dumps({"text": "a \udcff", "label": 0}))
    message = refusal(folder)
    assert message.startswith(f"{folder}/train.jsonl, row 21: expected a JSON object, got ")
    assert r"holds '\udcff', half of a surrogate pair and no character" in message
    message.encode()  # the message itself is valid text
    (folder / "source.json").write_text(json.dumps({"label_names": ["a", "b\ud800"]}))
    assert refusal(folder).startswith(f"{folder}/source.json is not valid JSON: a text in it holds '\\ud800', half of")
