"""Rows from the ``datasets`` library or pandas: the meaning of cells, and missing rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Json, List, Value

from forgetfree.data.rows import TaskRows
from forgetfree.data.sources import load_task, load_tasks
from forgetfree.errors import DataError

COUNT = 40
LABELLED = {"text": [f"text {i}" for i in range(COUNT)], "label": [i % 2 for i in range(COUNT)]}
NAMED = {"text": Value("string"), "label": ClassLabel(names=["bad", "good"])}


def read(rows: Any) -> TaskRows:
    (task,) = load_tasks(None, {"mood": rows})
    return task


def saved(rows: Dataset, root: Path) -> str:
    rows.save_to_disk(root / "saved")
    return str(root / "saved")


def parquet(rows: Dataset, root: Path) -> str:
    rows.to_parquet(root / "mood.parquet")
    return str(root / "mood.parquet")


def snapshot(rows: Dataset, root: Path) -> str:
    for i in range(2):
        path = root / "snapshot" / "data" / f"train-{i:05}-of-00002.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows.shard(2, i).to_parquet(path)
    return str(root / "snapshot")


FORMS: dict[str, Callable[[Dataset, Path], Any]] = {
    "Dataset": lambda rows, root: rows,
    "shuffled": lambda rows, root: rows.shuffle(seed=0),
    "DatasetDict": lambda rows, root: DatasetDict({"train": rows}),
    "IterableDataset": lambda rows, root: rows.to_iterable_dataset(),
    "save_to_disk": saved,
    "parquet": parquet,
    "snapshot": snapshot,
}

# -- The meaning of cells ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_json_in_a_column_is_read_as_what_it_says(form: str, tmp_path: Path) -> None:
    """The library itself reads objects with different keys in this way; a column that is not read may hold anything."""
    answers = [{"text": [f"a{i}"], "n": i} if i % 2 else {"text": [f"a{i}"], "z": "x"} for i in range(COUNT)]
    turn = {"role": "assistant", "content": "ok"}
    chats = [[{"role": "user", "content": f"{i}"} | ({"n": i} if i % 2 else {"z": "x"}), turn] for i in range(COUNT)]
    tables = {
        "answers": (
            {"question": LABELLED["text"], "answers": answers},
            {"question": Value("string"), "answers": Json()},
        ),
        "chats": (
            {"messages": chats, "unread": [{"inner": 1}] * COUNT},
            {"messages": List(Json()), "unread": {"inner": Json()}},
        ),
        "labels": (LABELLED | {"unread": chats}, NAMED | {"unread": List(Json())}),
    }
    found = {}
    for name, (columns, features) in tables.items():
        rows = Dataset.from_dict(columns, features=Features(features))
        found[name] = read(FORMS[form](rows, tmp_path / name))
    assert set(found["answers"].train.labels) < {(f"a{i}",) for i in range(COUNT)}
    assert set(found["chats"].train.labels) == {("ok",)}
    assert found["labels"].task.labels == ("bad", "good")


@pytest.mark.parametrize("other", [[{"start": {"dtype": "int64", "_type": "Value"}}], None, 3])
def test_labels_keep_their_names_beside_a_column_that_is_not_understood(other: Any, tmp_path: Path) -> None:
    """Older versions of the library describe a list of objects in this way, and later versions may add types."""
    label = {"names": ["bad", "good"], "_type": "ClassLabel"}
    described = json.dumps({"info": {"features": {"label": label, "spans": other, "new": {"_type": "Later"}}}})
    table = pyarrow.table(LABELLED | {"spans": [[{"start": 1}]] * COUNT, "new": ["x"] * COUNT})
    table = table.cast(table.schema.set(1, pyarrow.field("label", pyarrow.int8(), nullable=False)))
    pyarrow.parquet.write_table(table.replace_schema_metadata({"huggingface": described}), tmp_path / "mood.parquet")
    assert read(tmp_path / "mood.parquet").task.labels == ("bad", "good")


MISSING = [float("nan"), np.float32("nan"), pandas.NA, pandas.NaT]


@pytest.mark.parametrize("missing", MISSING, ids=lambda value: type(value).__name__)
def test_what_pandas_takes_as_missing_is_an_empty_cell(missing: Any) -> None:
    """This holds in a list of rows, a split, a DataFrame, and the rows of a transform."""
    rows = [{"instruction": f"Do {i}", "input": missing if i % 2 else "x", "output": "done"} for i in range(COUNT)]
    expected = read([row | {"input": None if i % 2 else "x"} for i, row in enumerate(rows)])
    stored = Dataset.from_list([{"i": i} for i in range(COUNT)])
    made = stored.with_transform(lambda batch: {name: [rows[i][name] for i in batch["i"]] for name in rows[0]})
    for form in (rows, {"train": rows}, pandas.DataFrame(rows, dtype=object), made):
        assert read(form).train.texts == expected.train.texts
    unlabelled = [{"text": f"{i}", "label": missing if i == 3 else i % 2} for i in range(COUNT)]
    with pytest.raises(DataError, match=r"row 3, column 'label': expected .*, got nothing"):
        read(unlabelled)


# -- Missing rows ------------------------------------------------------------------------------------------


def rows_of(count: int) -> pandas.DataFrame:
    return pandas.DataFrame({"text": [f"text {i}" for i in range(count)], "label": [i % 2 for i in range(count)]})


def write(folder: Path, names: list[str]) -> None:
    """Write 40 rows per file, in the format of its name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            rows_of(COUNT).to_parquet(path)
        elif path.suffix == ".csv":
            rows_of(COUNT).to_csv(path, index=False)
        else:
            rows_of(COUNT).to_json(path, orient="records", lines=True)


def describe(folder: Path, splits: dict[str, int], files: str) -> None:
    """Write a card with the number of rows in each split."""
    lines = [f"  - name: {name}\n    num_bytes: 1\n    num_examples: {count}\n" for name, count in splits.items()]
    head = f"configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {files}\n"
    (folder / "README.md").write_text(f"---\n{head}dataset_info:\n  splits:\n{''.join(lines)}---\n")


LACKING = [
    (["data/train-00000-of-00002.parquet"], "1 of the 2 files data/train-*-of-00002; missing: number 00001"),
    (
        ["train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"],
        "2 of the 3 files mood/train-*-of-00003; missing: number 00001",
    ),
    (["train-00002-of-00004.csv"], "1 of the 4 files mood/train-*-of-00004; missing: number 00000, 00001, 00003"),
    (["train_00000_of_00002.parquet"], "1 of the 2 files mood/train_*_of_00002; missing: number 00001"),
    (["data/train-2-of-2.jsonl.gz"], "1 of the 2 files data/train-*-of-2; missing: number 1"),
    (["data/train-00000-of-00001-ab.parquet", "data/test-00000-of-00002-cd.parquet"], "files data/test-*-of-00002"),
    (
        ["train.parquet", "train-00001-of-00002.parquet"],
        "contains train.parquet and also train-00001-of-00002.parquet, which",
    ),
]


@pytest.mark.parametrize(("names", "said"), LACKING, ids=[names[-1] for names, _ in LACKING])
def test_a_missing_part_is_told(names: list[str], said: str, tmp_path: Path) -> None:
    write(tmp_path / "mood", names)
    with pytest.raises(DataError) as caught:
        load_task("mood", str(tmp_path))
    assert said in str(caught.value)


def test_a_downloaded_set_has_as_many_rows_as_its_card_says(tmp_path: Path) -> None:
    folder, name = tmp_path / "mood", "data/train-00000-of-00001.parquet"
    write(folder, [name])
    describe(folder, {"train": COUNT}, name)
    assert len(load_task("mood", str(tmp_path)).train) == 28
    for splits, fault in (({"train": 2 * COUNT}, "num_examples=80"), ({"train": COUNT, "test": 5}, "MoreSplits.*test")):
        describe(folder, splits, name)
        with pytest.raises(DataError, match=f"{fault}.*Save or download it again"):
            load_task("mood", str(tmp_path))


def test_parts_of_different_columns_are_told(tmp_path: Path) -> None:
    write(tmp_path / "mood", ["train-00000-of-00002.csv"])
    (tmp_path / "mood" / "train-00001-of-00002.csv").write_text("text,stars\na,1\n")
    with pytest.raises(
        DataError, match=r"mood cannot be read by the datasets library: .*stars.*Save or download it again"
    ):
        load_task("mood", str(tmp_path))


def test_a_data_file_that_a_saved_set_lacks_is_named(tmp_path: Path) -> None:
    Dataset.from_dict(LABELLED).save_to_disk(tmp_path / "mood", num_shards=3)
    (tmp_path / "mood" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(DataError, match=r"No such file or directory: .*mood/data-00001-of-00003\.arrow"):
        load_task("mood", str(tmp_path))


def test_reading_a_snapshot_says_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    assert len(read(snapshot(Dataset.from_dict(LABELLED), tmp_path)).train) == 28
    assert sorted(path.name for path in tmp_path.iterdir()) == ["snapshot", "temporary"]
    assert not [*(tmp_path / "temporary").iterdir()] and "train" not in capsys.readouterr().err
