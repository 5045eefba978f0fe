"""Data in the usual forms: files, folders of the datasets library, and rows in memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest
import torch
from task_files import refusal, write_rows, write_task, zstd

from forgetfree.data.columns import ColumnNames, ReadOptions
from forgetfree.data.rows import TaskRows
from forgetfree.data.sources import load_task, load_tasks
from forgetfree.data.table_files import read_table
from forgetfree.errors import BadDataError, DataError, UsageError

NAMES = ("angry", "joyful", "sad")
#: Texts with all characters that files quote, and unbalanced labels: 20 angry, 12 joyful, 8 sad.
ROWS: list[dict[str, Any]] = [
    {
        "id": i,
        "review": f"text {i}" + ("", ', "quoted"', "\nof two lines", "\tand a tab", " Grüße 東京")[i % 5],
        "sentiment": NAMES[(0, 1, 0, 2, 0, 0, 1, 0, 1, 2)[i % 10]],
    }
    for i in range(40)
]


def dataset(rows: list[dict[str, Any]] = ROWS) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows)


def class_labels(rows: list[dict[str, Any]] = ROWS) -> datasets.Dataset:
    """Return a data set whose labels are numbers, with their names in its features."""
    features = datasets.Features(
        id=datasets.Value("int64"), review=datasets.Value("string"), sentiment=datasets.ClassLabel(names=[*NAMES])
    )
    return datasets.Dataset.from_list(
        [{**row, "sentiment": NAMES.index(row["sentiment"])} for row in rows], features=features
    )


def parquet_of_datasets(root: Path) -> Path:
    """Write a parquet file whose metadata has the names of the labels."""
    class_labels().to_parquet(root / "mood.parquet")
    return root / "mood.parquet"


def snapshot(root: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """Write a data set as it is downloaded from the hub: two shards, and a card."""
    folder = root / "snapshot"
    (folder / "data").mkdir(parents=True)
    for i, part in enumerate((rows[:25], rows[25:])):
        class_labels(part).to_parquet(folder / "data" / f"train-{i:05}-of-00002.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n---\n# Moods\n"
    )
    return folder


def saved(root: Path, held: Any) -> Path:
    held.save_to_disk(root / "saved")
    return root / "saved"


FORMS: dict[str, Callable[[Path], Any]] = {
    **{
        ending: lambda root, ending=ending: write_rows(root / f"mood.{ending}", ROWS)  # type: ignore[misc]
        for form in ("csv", "tsv", "jsonl", "json", "parquet")
        for ending in ([form] if form == "parquet" else [form, f"{form}.gz", f"{form}.zst"])
    },
    "folder": lambda root: write_rows(root / "folder" / "train.csv", ROWS).parent,
    "saved Dataset": lambda root: saved(root, dataset()),
    "saved DatasetDict": lambda root: saved(root, datasets.DatasetDict(train=class_labels())),
    "hub snapshot": snapshot,
    "Dataset": lambda _: dataset(),
    "ClassLabel": lambda _: class_labels(),
    "ClassLabel in parquet": parquet_of_datasets,
    "DatasetDict": lambda _: datasets.DatasetDict(train=dataset()),
    "selected Dataset": lambda _: dataset(ROWS + ROWS[:3]).select(range(40)),
    "DataFrame": lambda _: pandas.DataFrame(ROWS),
    "categories": lambda _: pandas.DataFrame(ROWS, index=range(40, 80)).astype({"sentiment": "category"}),
    "rows": lambda _: ROWS,
    "splits": lambda _: {"train": ROWS},
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.mark.sampled("ClassLabel", "tsv.zst")
@pytest.mark.parametrize("form", FORMS)
def test_the_same_rows_are_read_from_every_form(form: str, tmp_path: Path) -> None:
    made = FORMS[form](tmp_path)
    (read,) = load_tasks("mood", str(made) if isinstance(made, Path) else {"mood": made})
    assert read.task.labels == read.task.label_words == NAMES
    rows = [*zip(read.train.texts, read.train.labels, strict=True)]
    for part in (read.validation, read.test):
        rows += zip(part.texts, part.labels, strict=True)
    assert sorted(rows) == sorted(((row["review"],), NAMES.index(row["sentiment"])) for row in ROWS)
    assert read.fingerprint() == load_tasks(None, {"mood": ROWS})[0].fingerprint()
    (note,) = read.notes
    assert "texts from 'review' and labels from 'sentiment'" in note
    assert f"8 test and {len(read.validation)} validation rows split off from the 40, always the same." in note
    if isinstance(made, Path):  # it can also be one of a directory's tasks, or one of a dictionary's
        (again,) = load_tasks("mood", {"mood": made})
        assert again.fingerprint() == read.fingerprint()
        if made.is_dir():
            made.rename(tmp_path / "tasks-mood")
            (tmp_path / "tasks").mkdir()
            (tmp_path / "tasks-mood").rename(tmp_path / "tasks" / "mood")
            assert load_task("mood", str(tmp_path / "tasks")).fingerprint() == read.fingerprint()


def test_a_file_packed_in_several_frames_is_read_whole_and_a_cut_one_is_refused(tmp_path: Path) -> None:
    whole = write_rows(tmp_path / "mood.jsonl", ROWS).read_bytes()
    lines = whole.splitlines(keepends=True)
    first, second = b"".join(lines[:20]), b"".join(lines[20:])
    expected = load_task("mood", str(tmp_path / "mood.jsonl")).fingerprint()
    for ending, pack in ((".gz", gzip.compress), (".zst", zstd)):
        path = tmp_path / f"mood.jsonl{ending}"
        path.write_bytes(pack(first) + pack(second))
        assert load_task("mood", str(path)).fingerprint() == expected
        path.write_bytes(pack(whole)[:-20])
        assert f"{path} cannot be read" in refusal(str(path))
        path.write_bytes(b"no such format")
        assert f"{path} cannot be read" in refusal(str(path))


def test_packed_files_are_measured_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mood.csv.gz"
    path.write_bytes(gzip.compress(b"text,label\n" + b"x" * 80 + b",0\n" + (b"y" * 80 + b",1\n") * 5000))
    assert path.stat().st_size < 5000
    monkeypatch.setattr("forgetfree.data.table_files.MOST_BYTES", 100_000)
    assert "bytes or more when unpacked, but at most 100,000 are read" in refusal(str(path))


OBJECTS = {"a": ["x", "y"], "b": [{"c": 1}, {"c": 2}]}
#: Small files: ending, text, expected cells, number of bad rows, and a part of the note about their format.
CELLS = [
    # quotes in csv, and in tsv files of pandas and of GLUE
    ("csv", 'a,b\n"x 0", """quoted"" start"\n"x", ""\n', {"a": ["x 0", "x"], "b": ['"quoted" start', ""]}, 0, "blanks after"),
    ("csv", 'a,b\r"x" , "y"\r', {"a": ["x"], "b": ["y"]}, 0, "blanks after"),
    ("csv", "a,b,,\nx,0,,\ny,1,,\n", {"a": ["x", "y"], "b": ["0", "1"]}, 0, ""),  # as spreadsheets write deleted columns
    ("tsv", 'a\tb\n"never closed\t0\nx "y" z\t1\n', {"a": ['"never closed', 'x "y" z'], "b": ["0", "1"]}, 0, ""),
    ("tsv", 'a\tb\n"x ""word"""\t0\nplain\t1\n', {"a": ['x "word"', "plain"], "b": ["0", "1"]}, 0, ""),
    ("tsv", 'a\tb\n"x\ty"\t0\n"c\nd"\t1\n', {"a": ["x\ty", "c\nd"], "b": ["0", "1"]}, 0, ""),
    # blanks typed beside quotes and separators are dropped; in a file without this style, they belong to the texts
    ("csv", 'a, b\n"one, x", "pos"\n"two, y", neg\n', {"a": ["one, x", "two, y"], "b": ["pos", "neg"]}, 0, "the commas"),
    ("csv", 'a,b\npos, "one, x"\nneg, two\n', {"a": ["pos", "neg"], "b": ["one, x", "two"]}, 0, "blanks after the commas"),
    ("csv", 'a , b \n"one ""x""" , "pos" \n", two." ,"neg"\n', {"a": ['one "x"', ", two."], "b": ["pos", "neg"]}, 0, "blanks"),
    ("csv", '"a" ; "b"\r\n"one; x" ; "pos" \r\ntwo;neg \r\n', {"a": ["one; x", "two"], "b": ["pos", "neg "]}, 0, "semicolons"),
    ("tsv", 'a\t b\n"one\tx"\t "pos"\n"two" \tneg\n', {"a": ["one\tx", "two"], "b": ["pos", "neg"]}, 0, "the tabs"),
    ("csv", 'a,b,c\n0, "" ,sad\n"a, b" , "c\nd" , e\n', {"a": ["0", "a, b"], "b": ["", "c\nd"], "c": ["sad", "e"]}, 0, "blank"),
    ("csv", 'a,b\n  one" x,pos\n"two, ""y"", ",neg\n', {"a": ['  one" x', 'two, "y", '], "b": ["pos", "neg"]}, 0, ""),
    ("csv", '"a, b",label\n one, x\n', {"a, b": [" one"], "label": [" x"]}, 0, ""),
    # other separators; with a comma in the header, the comma is the separator
    *(("csv", f'a{sign}b\n"it is{sign} x"{sign}0\n', {"a": [f"it is{sign} x"], "b": ["0"]}, 0, f"are separated by {name}")
      for sign, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars"))),
    ("csv", "a,b;c\nx,0\n", {"a": ["x"], "b;c": ["0"]}, 0, ""),
    # objects over several lines, a bad first line, a column of objects beside others
    ("json", '{"a": 1}\n{\n"a": 2\n}\n', {"a": [1, 2]}, 0, ""),
    ("json", '{\n"a": "x",\n"b":\n{"c": 1}\n}\n{\n"a": "y",\n"b":\n{"c": 2}\n}\n', OBJECTS, 0, ""),
    ("json", '{"a": ["x", "y"], "b": [{"c": 1}, {"c": 2}]}', OBJECTS, 0, "as to_dict('list') of pandas"),
    ("jsonl", '["a", "b"]\n{"a": "x"}\n', {"a": ["x"]}, 1, ""),
    ("jsonl", '{"a": 1, "b"\n{"a": 2}\n{"a": 3}\n', {"a": [2, 3]}, 1, ""),
    ("jsonl", '{"a": 1}\n{"a": 2\n{"a"\n', {"a": [1]}, 2, ""),
]  # fmt: skip


@pytest.mark.parametrize(("ending", "text", "expected", "bad", "note"), CELLS)
def test_cells_and_objects_are_read_as_they_are_meant(
    ending: str, text: str, expected: dict[str, Any], bad: int, note: str, tmp_path: Path
) -> None:
    (tmp_path / f"a.{ending}").write_text(text, newline="")
    table = read_table(tmp_path / f"a.{ending}")
    assert {column: list(table.columns[column]) for column in table.columns if column} == expected
    assert len(table.bad) == bad
    assert note in table.note if note else not table.note


GERMAN = "text;label\n" + "".join(f"Grüße – Nummer {i};{'böse' if i % 2 else 'gut'}\n" for i in range(20))
LATIN = GERMAN.replace("–", "-")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GERMAN.encode("utf-8-sig"), ""),
        (GERMAN.encode("cp1252"), "mood.csv is read in Windows-1252, as in 'Grüße'"),
        (LATIN.encode("latin-1"), "mood.csv is read in Windows-1252, as in 'Grüße'"),
        (GERMAN.encode("utf-16"), "mood.csv is read in UTF-16"),
        (GERMAN.encode("utf-16-le"), "mood.csv is read in UTF-16"),
        (GERMAN.encode("utf-16-be"), "mood.csv is read in UTF-16"),
        (GERMAN.replace("Grüße", "Grüße 20°C ±3 µm").encode("cp1252"), "Windows-1252, as in 'Grüße'"),
    ],
)
def test_other_encodings_are_found_out_and_said(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "mood.csv").write_bytes(content)
    (tmp_path / "mood.csv.gz").write_bytes(gzip.compress(content))
    for name in ("mood.csv", "mood.csv.gz"):
        read = load_task("mood", str(tmp_path / name))
        assert read.task.labels == ("böse", "gut") and read.train.first[0].startswith("Grüße ")
        assert said.replace("mood.csv", name) in read.notes[0]
        assert ("is read in" in read.notes[0]) is bool(said)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (GERMAN.encode() + b"gr\xfcn;gut\n", f"line 22: byte 0xfc at position {len(GERMAN.encode()) + 2:,} of the file"),
        (GERMAN.encode() + b"\xc3", "line 22: byte 0xc3 at position "),
        (b"text;label\ngr\xfcn;gut\ngr\x81n;gut\n", "line 2: byte 0xfc at position 13 of the file"),
        ("text;label\nпривет;0\nмир;1\n".encode("cp1251"), "line 2: byte 0xef at position 11 of the file"),
        ("text;label\nこんにちは;0\n".encode("shift-jis"), "line 2: byte 0x82 at position 11 of the file"),
        ("text,label\n你好世界,0\n".encode("gbk"), "line 2: byte 0xc4 at position 11 of the file"),
        (b"text,label\n" + b"plain,0\n" * 400 + "café,1\n".encode() + b"\xe9,0\n", "line 403: byte 0xe9 at position "),
        ("text;label\ngrün;0\n".encode("utf-32"), "line 1: byte 0xff at position 0 of the file"),
    ],
)  # fmt: skip
def test_a_wrong_byte_is_named_by_its_position(tmp_path: Path, content: bytes, place: str) -> None:
    (tmp_path / "mood.csv").write_bytes(content)
    assert f"mood.csv, {place}" in (text := refusal(str(tmp_path / "mood.csv")))
    assert text.endswith("Write the file again, in UTF-8.")


FRAME = pandas.DataFrame(ROWS)
WORDS = [{"tokens": ["Jane", f"{i}"], "tags": ["B-PER", "O"]} for i in range(20)]


@pytest.mark.parametrize("name", ["mood.json", "mood.jsonl"])
@pytest.mark.parametrize(
    ("content", "note"),
    [
        (json.dumps(ROWS), ""),
        (FRAME.to_json(orient="records", lines=True), ""),
        ("\n".join(json.dumps(row, indent=2) for row in ROWS), ""),
        ("\n".join(json.dumps(row).replace(', "sent', '\n, "sent') for row in ROWS), ""),
        (json.dumps({"version": "1.1", "data": ROWS}, indent=1), "in 'data'"),
        (json.dumps({"reviews": ROWS, "languages": ["en"], "meta": {"rows": []}}, indent=1), "in 'reviews'"),
        (FRAME.to_json(orient="table", indent=1), "in 'data'"),
        (FRAME.to_json(indent=1), "as orient='columns' of pandas"),
        (FRAME.to_json(orient="index", indent=1), "as orient='index' of pandas"),
        (json.dumps({f"id {i}": row for i, row in enumerate(ROWS)}, indent=1), "as orient='index' of pandas"),
        (FRAME.to_json(orient="split", indent=1), "as orient='split' of pandas"),
        (json.dumps(FRAME.to_dict("list"), indent=1), "as to_dict('list') of pandas"),
    ],
)
def test_the_same_rows_are_read_from_every_form_of_json(tmp_path: Path, name: str, content: str, note: str) -> None:
    (tmp_path / name).write_text(content)
    read = load_task("mood", str(tmp_path / name))
    assert read.fingerprint() == load_tasks(None, {"mood": ROWS})[0].fingerprint()
    assert (f"{name} has its rows {note}" if note else ": texts from") in read.notes[0]


def test_a_lone_line_of_json_lines_may_hold_a_list_of_objects(tmp_path: Path) -> None:
    for content, rows in ((json.dumps({"data": ROWS}), 1), (FRAME.to_json(), 40)):
        for name, count in (("mood.json", 40), ("mood.jsonl", rows)):
            (tmp_path / name).write_text(content)
            assert len(read_table(tmp_path / name).numbers) == count


def test_lists_of_a_sentence_are_no_columns(tmp_path: Path) -> None:
    (tmp_path / "columns.json").write_text(json.dumps({name: [row[name] for row in WORDS] for name in WORDS[0]}))
    assert load_task("ner", str(tmp_path / "columns.json")) == load_tasks(None, {"ner": WORDS})[0]
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.json").write_text(json.dumps(WORDS[0]))
    assert load_task("ner", str(tmp_path)).train.first == ("Jane 0",)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("[1]", "row 1: expected columns and values, got 1. Write each row with the names of its columns"),
        ('[{"text": 1', "is not valid JSON: Expecting ',' delimiter"),
        ('{\n"text": "a",\n"label": 0\n}\n{\n"text": "b",\n}\n', "is not valid JSON: Expecting property name"),
        (json.dumps({"train": ROWS, "test": ROWS}), "several tables of rows: train, test. Write each to its own file"),
        (json.dumps({"train": FRAME.to_dict("list"), "dev": {}}), "several tables of rows: train, dev. Write each to"),
        (json.dumps({"old": ROWS, "new": ROWS}), "several tables of rows: old, new."),
        ('{"columns": ["text"], "data": [["a", 0]]}', "1 columns passed, passed data had 2 columns"),
        ('{"columns": ["a", "a"], "data": [[1, 2]]}', "has column 'a' twice"),
        ('[\n{"a": 1},\n{"a": 2}\n', "is not valid JSON"),
    ],
)  # fmt: skip
def test_json_that_is_no_table_is_refused_with_its_form(tmp_path: Path, content: str, fault: str) -> None:
    (tmp_path / "mood.json").write_text(content)
    assert fault in refusal(str(tmp_path / "mood.json"))


# -- Splits ------------------------------------------------------------------------------------------------


def test_other_names_of_splits_are_read_and_said(tmp_path: Path) -> None:
    for name in ("train.csv", "dev.csv", "TEST.jsonl"):
        write_rows(tmp_path / "mood" / name, ROWS)
    read = load_task("mood", str(tmp_path))
    assert (len(read.train), len(read.validation), len(read.test)) == (40, 40, 40)
    assert "dev.csv is the validation split; TEST.jsonl is the test split;" in read.notes[0]
    write_rows(tmp_path / "mood" / "valid.tsv", ROWS)
    assert "contains dev.csv and valid.tsv, but the validation split must be one file" in refusal(str(tmp_path))


def test_rows_in_one_piece_are_cut_label_by_label_with_equal_texts_on_one_side() -> None:
    rows = [{"text": f"{i % 60}", "label": int(i % 60 >= 50)} for i in range(180)]  # 50 and 10 texts, three times each
    (read,) = load_tasks(None, {"mood": rows})
    parts = (read.train, read.validation, read.test)
    assert read.shared == {"train": 0, "validation": 0}
    assert not {*read.train.first} & {*read.validation.first}
    assert [part.labels.count(0) for part in parts] == [108, 12, 30]  # a fifth of 150, and a tenth of the rest
    assert [part.labels.count(1) for part in parts] == [21, 3, 6]
    assert load_tasks(None, {"mood": rows})[0].fingerprint() == read.fingerprint()
    assert load_tasks(None, {"other": rows})[0].fingerprint() != read.fingerprint()


def test_splits_in_memory_are_known_by_their_names() -> None:
    (read,) = load_tasks(None, {"mood": {"train": ROWS, "dev": ROWS[:10], "test": pandas.DataFrame(ROWS[5:])}})
    assert (len(read.train), len(read.validation), len(read.test)) == (40, 10, 35)
    held = datasets.DatasetDict(train=dataset(), test=dataset(ROWS[:9]), unsupervised=dataset())
    (read,) = load_tasks(None, {"mood": held})
    assert len(read.test) == 9 and "'unsupervised' not read" in read.notes[0]
    assert "data['mood']: 'tst' is not a split" in refusal({"mood": {"train": ROWS, "tst": ROWS}})
    assert "data['mood'] contains dev and val, but there must be only one validation split" in refusal(
        {"mood": {"train": ROWS, "dev": ROWS, "val": ROWS}}
    )
    assert "data['mood'] has no train split; it contains test" in refusal(
        {"mood": datasets.DatasetDict(test=dataset())}
    )


def test_a_transform_of_a_data_set_is_applied() -> None:
    def louder(batch: dict[str, Any]) -> dict[str, Any]:
        return {"review": [text.upper() for text in batch["review"]], "sentiment": torch.tensor(batch["sentiment"])}

    (read,) = load_tasks(None, {"mood": class_labels().with_transform(louder)})
    assert {*read.train.first} <= {row["review"].upper() for row in ROWS}
    assert read.task.labels == NAMES  # the names of the data set, since the labels are unchanged
    renamed = dataset().with_transform(
        lambda batch: {"text": batch["review"], "label": [len(t) % 2 for t in batch["review"]]}
    )
    (read,) = load_tasks(None, {"mood": datasets.DatasetDict(train=renamed, test=renamed)})
    assert read.task.labels == ("0", "1") and read.test.first == tuple(row["review"] for row in ROWS)

    failing = dataset().with_transform(lambda batch: batch["nosuch"])
    assert "data['mood'] with its transform: its rows cannot be read: KeyError: 'nosuch'" in refusal({"mood": failing})


def test_rows_without_a_label_are_left_out_and_said_where_the_data_set_marks_them() -> None:
    marked = class_labels().to_list()
    train = datasets.Dataset.from_list([*marked, {**marked[0], "sentiment": -1}], features=class_labels().features)
    test = datasets.Dataset.from_list([{**row, "sentiment": -1} for row in marked], features=class_labels().features)
    (read,) = load_tasks(None, {"mood": datasets.DatasetDict(train=train, test=test)})
    assert len(read.train) + len(read.validation) + len(read.test) == 40
    assert "1 train row without a label (-1) left out; 40 test rows without a label (-1) left out" in read.notes[0]


# -- Labels ------------------------------------------------------------------------------------------------


def labelled(*labels: Any) -> Any:
    return {
        "mood": {split: [{"text": f"{i}", "label": y} for i, y in enumerate(labels)] for split in ("train", "test")}
    }


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        (["b", "a", " b "], ("a", "b"), (1, 0, 1)),
        ([1.0, 0.0, 1.0], ("0", "1"), (1, 0, 1)),
        (["1.0", "0.0", "1.0"], ("0", "1"), (1, 0, 1)),
        ([True, False, True], ("false", "true"), (1, 0, 1)),
        (["True", "False", "True"], ("False", "True"), (1, 0, 1)),
        ([5, 1, 3], ("1", "3", "5"), (2, 0, 1)),
        (["10", "9", "10"], ("9", "10"), (1, 0, 1)),
        (["cafe\u0301", "bar", "caf\u00e9"], ("bar", "caf\u00e9"), (1, 0, 1)),
    ],
)
def test_labels_are_what_is_written(labels: list[Any], names: tuple[str, ...], numbers: tuple[int, ...]) -> None:
    given = labelled(*labels, *labels)  # two rows of each, as a tenth is split off
    (read,) = load_tasks(None, given)
    assert read.task.labels == names
    assert read.test.labels == numbers * 2
    assert bool(read.notes) == (names != ("0", "1"))  # numbers from 0 need no note


def test_labels_have_the_order_of_their_names_where_it_is_given(tmp_path: Path) -> None:
    write_rows(tmp_path / "mood" / "train.csv", [{"text": r["review"], "label": r["sentiment"]} for r in ROWS])
    (tmp_path / "mood" / "source.json").write_text(json.dumps({"label_names": ["sad", "Joyful", "angry"]}))
    read = load_task("mood", str(tmp_path))
    assert read.task.labels == ("sad", "Joyful", "angry")
    order = ("sad", "joyful", "angry")
    texts = {row["review"]: order.index(row["sentiment"]) for row in ROWS}
    assert all(texts[text] == label for text, label in zip(read.train.first, read.train.labels, strict=True))
    ones = [{"text": f"{i}", "label": i % 4 + 1} for i in range(40)]
    write_rows(tmp_path / "ag_news" / "train.csv", ones)  # numbered as by its authors
    read = load_task("ag_news", str(tmp_path))
    assert read.task.labels == ("World", "Sports", "Business", "Sci/Tech") and set(read.train.labels) == {0, 1, 2, 3}
    assert "labels 1 to 4 are World, Sports, Business, Sci/Tech" in read.notes[0]
    mixed = [{"text": f"{i}", "label": ("1", "2", "3+")[i % 3]} for i in range(30)]
    write_rows(tmp_path / "rooms" / "train.csv", mixed)
    (tmp_path / "rooms" / "source.json").write_text(json.dumps({"label_names": ["1", "2", "3+"]}))
    read = load_task("rooms", str(tmp_path))
    texts = dict(zip(read.train.first, read.train.labels, strict=True))
    assert all(label == int(text) % 3 for text, label in texts.items())


@pytest.mark.parametrize(
    ("labels", "fault"),
    [
        ([0.0, 0.37], "data['mood']['train'], row 1, column 'label': expected an integer from 0, got 0.37. A number that is"),
        (["a", None], "row 1, column 'label': expected a name, as in the other rows, got nothing"),
        (["a", ""], "row 1, column 'label': expected a name, as in the other rows, got \"\""),
        (["a", 1], "row 1, column 'label': expected a name, as in the other rows, got 1. If it is a label, name all"),
        ([0, -1], "row 1, column 'label': expected an integer from 0, got -1. -1 often marks rows without a label."),
        (["a", "A"], '"A" (the first in row 1) and "a" (the first in row 0), which look alike'),
        (["1", "1.0", "2"], '"1.0" (the first in row 1), which look alike'),
        (["Sci/Tech", "sci / tech"], "which look alike. Write them alike, or give --map-label"),
        (["B2B, retail", "b2b,retail"], "which look alike"),
        (["a|b", "A | b"], "which look alike"),
        (["neg", "neg\u200b"], '"neg\\u200b" (the first in row 1), which look alike'),
        (["\u2764", "\u2764\ufe0f"], "which look alike"),
        (["1", "\uff11"], "which look alike"),
        (["a", "\u200b"], 'got "\\u200b". Fix or remove the row.'),
        (["a", "nan"], "nan often marks rows without a label"),
        (["a", "a"], 'every row has label "a". A task needs rows with at least two labels'),
        ([f"text {i}" for i in range(30)], 'has 30 different labels in 30 rows, such as "text 0"'),
    ],
)  # fmt: skip
def test_what_is_no_label_is_refused_with_its_row(labels: list[Any], fault: str) -> None:
    assert fault in refusal(labelled(*labels))


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["1", "01", "2", "02"], ("01", "02", "1", "2")),
        (["1.1", "1.10", "2"], ("1.1", "1.10", "2")),
        (["1e5", "2e7", "123"], ("123", "1e5", "2e7")),
        (["+1", "-0", "-1"], ("+1", "-0", "-1")),
        (["inf", "noun"], ("inf", "noun")),
        (["9" * 30, "9" * 29 + "8"], ("9" * 29 + "8", "9" * 30)),
        (["9" * 5000, "1"], ("1", "9" * 5000)),
    ],
)
def test_texts_that_are_no_plain_whole_numbers_are_names(
    labels: list[str], names: tuple[str, ...], tmp_path: Path
) -> None:
    rows = [{"text": f"{i}", "label": labels[i % len(labels)]} for i in range(40)]
    for data in ({"mood": rows}, str(write_rows(tmp_path / "mood.csv", rows))):
        (read,) = load_tasks(None, data)
        assert read.task.labels == names
        assert all(
            names[y] == labels[int(x) % len(labels)] for x, y in zip(read.test.first, read.test.labels, strict=True)
        )


@pytest.mark.parametrize(
    "labels", [["0", "0.37"], ["0.13", "2.71", "3.5"], ["0.13", "2.70", "3.50"], ["1e-05", "1.0", "0.5"]]
)
def test_real_numbers_of_a_csv_file_are_refused_unless_they_are_named(labels: list[str], tmp_path: Path) -> None:
    rows = [{"text": f"{i}", "label": labels[i % len(labels)]} for i in range(40)]
    write_rows(tmp_path / "mood" / "train.csv", rows)
    assert "A number that is not whole is a value to predict" in (message := refusal(str(tmp_path)))
    assert "list all as label_names in source.json" in message
    (tmp_path / "mood" / "source.json").write_text(json.dumps({"label_names": labels}))
    assert load_task("mood", str(tmp_path)).task.labels == tuple(labels)


def test_prompts_and_answers_are_texts_unless_the_label_column_is_named() -> None:
    rows = [{"prompt": f"Stance on {i}?", "answer": "ABC"[i % 3]} for i in range(40)]
    many = [{"prompt": f"Sum up: item {i}", "answer": f"item {i} was moved"} for i in range(40)]
    for data in (rows, many):
        assert load_tasks(None, {"mood": data})[0].task.kind == "generation"
        for kind in ("generation", "mood=generation"):
            options = ReadOptions.of("prompt", "answer", kinds=kind)
            assert load_tasks(None, {"mood": data}, options=options)[0].task.kind == "generation"
    named = ReadOptions.of("prompt", "answer")
    (read,) = load_tasks(None, {"mood": rows}, options=named)
    assert read.task.labels == ("A", "B", "C") and "--kind generation learns them as texts" in read.notes[0]
    assert "For answers as texts, use --kind generation" in refusal({"mood": many}, options=named)


@pytest.mark.parametrize(
    ("labels", "refused"),
    [
        (["joy", "sad", "joy|sad"], ["joy|sad"]),
        (["joy", "Sad", "joy ; sad", "joy;fear"], ["joy ; sad", "joy;fear"]),  # the sign separates labels
        (["a", "B ", "A / b", "b,c", "c"], ["A / b", "b,c"]),
        (["0", "1", "0,1"], ["0,1"]),
        (["joy", "[joy, sad]", "sad"], ["[joy, sad]"]),
        (["World", "Sci/Tech", "Sci-fi", "C++", "Q&A"], []),
        (["Arts/Design", "Arts/Music", "Arts"], []),
        (["Bonn, NRW", "Köln, NRW", "[NEG]", "(a)"], []),
        (["a, b", "b, c", "c, a"], []),  # names may contain these signs, too
        (["Health & Beauty", "Health & Care", "Beauty & Care", "Care"], []),
    ],
)
def test_cells_of_several_labels_are_refused_unless_the_kind_is_named(
    labels: list[Any], refused: list[str], tmp_path: Path
) -> None:
    rows = [{"text": f"{i}", "label": labels[i % len(labels)]} for i in range(60)]
    given: list[Any] = [{"mood": rows}, str(write_rows(tmp_path / "mood.csv", rows))]
    for data in given:
        read = load_task("mood", data, options=ReadOptions(kinds=("classification",)))
        assert len(read.task.labels) == len(labels)
        if not refused:
            assert load_task("mood", data).task.labels == read.task.labels
            continue
        told = refusal(data)
        assert "column 'label': expected one label, got " in told and "; --kind classification takes such cells" in told
        with pytest.raises(BadDataError) as caught:
            load_task("mood", data)
        if caught.value.rows:
            assert {json.loads(row.text) for row in caught.value.rows} == {*refused}
            rest = load_task("mood", data, options=ReadOptions(skip_bad_rows=True))
            assert len(rest.task.labels) == len(labels) - len(refused)


def test_labels_that_differ_by_case_are_told_with_rows_and_counts(tmp_path: Path) -> None:
    rows = [{"text": f"{i}", "label": "NUMBER" if i in (7, 9) else ("Number", "date")[i % 2]} for i in range(30)]
    message = refusal({"mood": rows})
    assert '"NUMBER" (the first in row 7) and "Number" (the first in row 0), which look alike' in message
    write_rows(tmp_path / "mood" / "train.csv", rows)
    (tmp_path / "mood" / "source.json").write_text(json.dumps({"label_names": ["date", "Number"]}))
    read = load_task("mood", str(tmp_path))
    assert 'train label "NUMBER" is read as "Number"' in read.notes[0]
    rows = [{"text": f"{i}", "label": ("Sci/Tech", "World")[i % 2]} for i in range(30)]
    (read,) = load_tasks(None, {"mood": {"train": rows, "test": [{"text": "x", "label": "sci / tech"}]}})
    assert read.test.labels == (0,) and 'test label "sci / tech" is read as "Sci/Tech"' in read.notes[0]


NFC, NFD = "\u00e9motion", "e\u0301motion"


@pytest.mark.parametrize(("there", "given"), [(NFD, NFC), (NFC, NFD)])
@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "frame", "dataset"])
def test_names_are_known_however_their_characters_are_coded(tmp_path: Path, form: str, there: str, given: str) -> None:
    """File systems and programs encode an accented letter as one character, or as a letter and an accent."""
    rows = [{"text": f"{i}", there: there if i % 2 else "joy"} for i in range(20)]
    test = [{"text": "x", given: given.upper()}]  # in another spelling
    named = ReadOptions.of(None, f"{given}={given}", metrics=[f"{given}=macro_f1"])
    if form in ("frame", "dataset"):
        held = {"frame": pandas.DataFrame, "dataset": datasets.Dataset.from_list}[form]
        place: Any = {there: {"train": held(rows), "test": held(test)}}
    else:
        write_rows(tmp_path / there / there / f"train.{form}", rows)
        write_rows(tmp_path / there / there / f"test.{form}", test)
        (tmp_path / there / there / "source.json").write_text(json.dumps({"label_names": ["joy", given]}))
        place = str(tmp_path / given)
    (read,) = load_tasks(given, place, options=named)
    assert read.task.name == NFC and read.task.labels == ("joy", NFC) and read.task.metric == "macro_f1"
    assert read.test.labels == (1,) and load_task(given, place, options=named) == read


def test_files_and_folders_are_found_however_their_characters_are_coded(tmp_path: Path) -> None:
    rows = [{"text": f"{i}", "label": i % 2} for i in range(20)]
    path = write_rows(tmp_path / NFD / f"{NFD}.csv", rows)
    assert [each.task.name for each in load_tasks(None, [f"{tmp_path}/{NFC}/{NFC}.csv"])] == [NFC]
    with pytest.raises(UsageError, match=f"{NFC}s.csv' does not exist. Did you mean '{NFD}.csv'"):
        load_tasks(None, f"{tmp_path}/{NFC}/{NFC}s.csv")
    for name in (NFC, NFD):
        write_rows(tmp_path / "both" / name / "train.csv", rows)
    assert f"both contains two folders '{NFC}', whose names differ only in their Unicode encoding. Rename" in refusal(
        f"{tmp_path}/both", NFC
    )
    path.write_text(f"text,{NFC},{NFD}\na,0,1\n")
    assert f"has column '{NFC}' twice" in refusal(str(path))
    mixed = [{"text": f"{i}", (NFC, NFD)[i % 2]: i % 2} for i in range(20)]
    assert len(load_tasks(None, {"mood": mixed}, options=ReadOptions.of(None, NFD))[0].test) == 4


def test_a_label_that_training_rows_lack_is_refused_with_its_row() -> None:
    rows = [{"text": f"{i}", "label": "ab"[i % 2]} for i in range(9)]
    message = refusal({"mood": {"train": rows, "test": [*rows, {"text": "x", "label": "c"}]}})
    assert "data['mood']['test'], row 9, column 'label': expected a label of the task, got \"c\"." in message
    assert " Task 'mood' has the labels a, b, and every label needs training rows. " in message
    with pytest.raises(DataError, match=r"unknown label \(2\).* Task 'mood' has the labels a, b, and"):
        load_tasks(None, {"mood": {"train": rows, "test": [*rows, *[{"text": "x", "label": "c"}] * 2]}})
    shifted = [{"text": f"{i}", "label": i % 3 + 1} for i in range(9)]
    message = refusal({"mood": {"train": shifted, "test": [{"text": "x", "label": 0}]}})
    assert (
        "row 0, column 'label': expected a label of the task, got 0. Task 'mood' has the labels 1, 2, 3, and" in message
    )


# -- Columns -----------------------------------------------------------------------------------------------


def table(*names: str) -> Any:
    return {"mood": [{name: f"{name} {i}" for name in names[:-1]} | {names[-1]: i % 2} for i in range(20)]}


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (("sentence", "class"), 1),
        (("Review", "Sentiment"), 1),
        (("premise", "hypothesis", "label"), 2),
        (("Question 1", "question_2", "target"), 2),
        (("question", "sentence", "category"), 2),
        (("title", "content", "stars"), 1),
    ],
)
def test_columns_of_common_names_are_recognised(names: tuple[str, ...], texts: int) -> None:
    (read,) = load_tasks(None, table(*names))
    assert read.task.kind == ("single", "pair")[texts - 1]
    own = [name for name in names[:-1] if name != "title"]
    assert read.train.texts[0][0].startswith(own[0]) and read.train.texts[0][-1].startswith(own[-1])
    assert f"texts from {' and '.join(map(repr, own))}" in read.notes[0]


def test_our_own_columns_are_taken_without_a_word() -> None:
    rows = [{"text": f"{i}", "sentence": "no", "label": i % 2, "class": 0} for i in range(20)]
    (read,) = load_tasks(None, {"mood": {"train": rows, "test": rows}})
    assert read.test.first == tuple(map(str, range(20))) and read.notes == ()


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (
            ("review", "comment", "label"),
            "the texts may be in 'review', or in 'comment'. Choose with --text-column 'review'",
        ),
        (
            ("question", "answer", "sentence", "label"),
            "the texts may be in 'question' and 'answer', or in 'question' and 'sentence'",
        ),
        (("text", "topic", "sentiment"), "the labels may be in 'sentiment', or in 'topic'. Choose with --label-column"),
        (("phrase", "label"), "has no column 'text': expected text (or text_a and text_b), and label; found 'phrase'"),
        (("phrase", "rank"), "or name others with --text-column and --label-column."),
        (
            ("comment", "rank"),
            "has no column 'label': expected it in addition to the texts of 'comment'; found 'comment', 'rank'. "
            "Rename or add the column, or name another with --label-column.",
        ),
    ],
)  # fmt: skip
def test_columns_that_may_be_meant_are_named(names: tuple[str, ...], fault: str) -> None:
    assert fault in refusal(table(*names))


def test_columns_may_be_named(tmp_path: Path) -> None:
    data = table("phrase", "topic", "review", "rank")
    (read,) = load_tasks(None, data, options=ReadOptions.of("phrase", "rank"))
    assert read.train.first[0].startswith("phrase") and read.notes == (
        "Task 'mood' (data['mood']): 4 test and 2 validation rows split off from the 20, always the same.",
    )
    (read,) = load_tasks(None, data, options=ReadOptions.of(["topic", "phrase"], "rank"))
    assert read.train.texts[0][0].startswith("topic") and read.train.texts[0][1].startswith("phrase")
    write_rows(tmp_path / "mood" / "train.csv", data["mood"])
    (tmp_path / "mood" / "source.json").write_text('{"text_column": "phrase", "label_column": "rank"}')
    assert load_task("mood", str(tmp_path)).train.first[0].startswith("phrase")
    assert load_task("mood", str(tmp_path), options=ReadOptions.of("review", None)).train.first[0].startswith("review")
    (tmp_path / "mood" / "source.json").write_text('{"text_column": 3}')
    assert "text_column must be a text, or a list of texts, got 3" in refusal(str(tmp_path))
    for wrong in ('{"text_column": ["phrase", "topic", "review"]}', '{"label_column": ""}'):
        (tmp_path / "mood" / "source.json").write_text(wrong)
        assert "source.json: text_column must be one column or, for pairs, two" in refusal(str(tmp_path))
    (tmp_path / "mood" / "source.json").unlink()
    message = refusal(data, options=ReadOptions.of("phase", "rank"))
    assert "has no column 'phase', which text_column names; found 'phrase', 'topic', 'review', 'rank'." in message
    assert "Did you mean 'phrase'?" in message
    assert "which label_column names" in refusal(data, options=ReadOptions.of("phrase", "rang"))
    assert "one text per row, but 2 text columns" in refusal(
        {"sst2": data["mood"]}, "sst2", options=ReadOptions.of(["phrase", "topic"], "rank", kinds="single")
    )
    for texts, label in ((["a", "b", "c"], None), (["a", "a"], None), ("a", "a"), ([""], None)):
        with pytest.raises(UsageError, match="Name each column only once"):
            ColumnNames.of(texts, label)
    with pytest.raises(UsageError, match="The columns of the tasks of 'demo' are known"):
        load_tasks("sst2", "demo", options=ReadOptions.of("text", None))


# -- Tasks -------------------------------------------------------------------------------------------------


def test_a_file_is_one_task_of_any_name(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "mood.csv.gz", ROWS))
    assert [rows.task.name for rows in load_tasks(None, path)] == ["mood"]
    assert [rows.task.name for rows in load_tasks("feelings", path)] == ["feelings"]
    with pytest.raises(UsageError, match="contains the rows of one task, but 2 are named: mood, other"):
        load_tasks("mood,other", path)
    for name in ("..", "a/b", "sub/"):
        with pytest.raises(UsageError, match=r"Unknown|not a task\."):
            load_task(name, path)


def test_a_task_with_the_name_of_a_registered_stream_is_not_mixed_up_with_it(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "demo.csv", ROWS)
    folder = write_rows(tmp_path / "data" / "demo" / "train.csv", ROWS).parent.parent
    for data in (str(folder), str(file), {"demo": ROWS}):
        told = refusal(data, "demo")
        assert "'demo' is both a task of the data and a registered stream: who_did_it, ag_news, was_it_kind" in told
        assert [rows.task.name for rows in load_tasks("demo,", data)] == ["demo"]


def test_a_label_with_a_single_row_keeps_it_for_training() -> None:
    rows = [*({"text": f"{i}", "label": i % 2} for i in range(20)), {"text": "rare", "label": 2}]
    (read,) = load_tasks(None, {"mood": rows})
    assert (read.train.labels.count(2), read.test.labels.count(2), read.validation.labels.count(2)) == (1, 0, 0)


def test_rows_without_columns_or_labels_are_refused() -> None:
    rows = [{"review": f"{i}", "label": i % 2} for i in range(9)]
    message = refusal({"mood": {"train": rows, "test": [{"comment": "a", "label": 0}]}})
    assert (
        "data['mood']['test'] has no column 'review', which the training rows have; found 'comment', 'label'" in message
    )
    assert "data['mood'] has no column 'text'" in refusal({"mood": [{}] * 20})
    unlabelled = [{**row, "sentiment": -1} for row in class_labels().to_list()]
    data = datasets.Dataset.from_list(unlabelled, features=class_labels().features)
    assert "Task 'mood' has no rows in its train split" in refusal({"mood": data})


def test_a_folder_of_tasks_stays_one_whatever_lies_beside_them(tmp_path: Path) -> None:
    for name in ("mood", "data"):
        write_rows(tmp_path / name / "train.csv", ROWS)
    write_rows(tmp_path / "train.csv", ROWS[:20])
    (tmp_path / "README.md").write_text("---\ndataset_info: x\nconfigs: y\n---\n")
    assert "(" + str(tmp_path / "mood" / "train.csv") in load_task("mood", str(tmp_path)).notes[0]
    assert len(load_task("data", str(tmp_path)).train) > 20
    (tmp_path / "mood" / "train.csv").unlink()
    (tmp_path / "README.md").unlink()
    assert len(load_task("any", str(tmp_path)).test) == 4  # the file beside the empty folder is the task now


def test_a_snapshot_of_several_configurations_is_a_task_of_each_name(tmp_path: Path) -> None:
    card = "---\nconfigs:\n"
    for name, rows in (("home", ROWS), ("work", ROWS[:30])):
        class_labels(rows).to_parquet(tmp_path / f"{name}.parquet")
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.parquet").rename(tmp_path / name / "train-00000-of-00001.parquet")
        card += f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train-*\n"
    (tmp_path / "README.md").write_text(f"{card}---\n")
    read = load_tasks("work,home", str(tmp_path))
    assert [len(each.train) + len(each.validation) + len(each.test) for each in read] == [30, 40]
    message = refusal(str(tmp_path), "play")
    assert f"Unknown stream or task 'play'. Known: home, work. {tmp_path} contains home, work." in message


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        (3, "data['mood']: expected a datasets.Dataset, IterableDataset or DatasetDict, a pandas.DataFrame, a list of rows"),
        ((row for row in ROWS), "got a generator"),
        ([("text", 0)], "data['mood'], row 0: expected columns and values, got [\"text\", 0]"),
        ([], "contains no rows, but every split needs rows"),
        ({"text": ["a"], "label": [0]}, "'text' is not a split; expected train"),
        (pandas.DataFrame([[1, 2]], columns=["text", "text"]), "has column 'text' twice"),
        ([{"text": "a \udcff", "label": 0}], "row 0, column 'text': expected a text, got"),
        ("nowhere.csv", "The data directory 'nowhere.csv' does not exist"),
    ],
)  # fmt: skip
def test_what_holds_no_rows_is_refused(rows: Any, fault: str) -> None:
    message = refusal({"mood": rows})
    assert fault in message
    message.encode()


def test_numbers_of_numpy_are_numbers() -> None:
    import numpy

    rows = [{"text": f"{i}", "label": numpy.int64(i % 2)} for i in range(20)]
    assert {*load_tasks(None, {"mood": rows})[0].train.labels} == {0, 1}
    frame = pandas.DataFrame({"text": [f"{i}" for i in range(20)], "label": numpy.float32([0, 1] * 10)})
    assert {*load_tasks(None, {"mood": frame})[0].train.labels} == {0, 1}
    frame.loc[3, "text"] = None
    assert "data['mood'], row 3, column 'text': expected a text, got nothing" in refusal({"mood": frame})


def test_existing_data_are_read_as_before(tmp_path: Path) -> None:
    """The fingerprints are those of version 0.2, which runs have recorded."""
    for split in ("train", "validation", "test"):
        write_rows(tmp_path / "mine" / f"{split}.jsonl", [{"text": f"{split} {i}", "label": i % 2} for i in range(30)])
    read: TaskRows = load_task("mine", str(tmp_path))
    assert read.fingerprint() == "9ee3840177d56439eb2f57c46787daa1ce74bbb70b019b01b4c84f0a3593a1a0"
    (tmp_path / "mine" / "test.jsonl").unlink()
    assert (
        load_task("mine", str(tmp_path)).fingerprint()
        == "81384d87859a916a6265ee3a2f66b02bedc9b64253904d82a622975f80b49076"
    )


def test_splits_whose_labels_stand_in_another_order_are_refused() -> None:
    features = {
        split: datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
        for split, names in {"train": ["neg", "pos"], "test": ["pos", "neg"]}.items()
    }
    rows = {"text": ["bad", "good", "fine", "poor"], "label": [0, 1, 1, 0]}
    held = {split: datasets.Dataset.from_dict(rows, features=each) for split, each in features.items()}
    assert "has its labels in the order pos, neg, and" in refusal({"mood": held})
    held["test"] = held["test"].cast(features["train"])
    assert load_task("mood", {"mood": held}).task.labels == ("neg", "pos")


@pytest.mark.parametrize(
    ("names", "labels"),
    [(["1", "0"], [1, 0, 1, 0]), (["2", "1", "0"], [2, 1, 0, 1]), (["1", "2", "3"], [1, 2, 2, 1])],
)
def test_numbers_that_are_names_are_names(names: list[str], labels: list[int], tmp_path: Path) -> None:
    """`label_names` in source.json may order labels that are written as numbers."""
    rows = [{"text": f"text {i}", "label": label} for i, label in enumerate(labels + list(map(int, names)))]
    read = load_task("mood", str(write_task(tmp_path, "mood", rows, {"label_names": names}).parent))
    assert [names[label] for label in read.test.labels] == [str(row["label"]) for row in rows]
