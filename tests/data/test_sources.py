"""Rows from a directory, the hub and the demo, and the messages where a file is wrong."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import real_data

from forgetfree import registry
from forgetfree.data.rows import Rows, TaskRows, complete
from forgetfree.data.sources import default_data, load_task, load_tasks
from forgetfree.errors import BadDataError, DataError, UnknownNameError, UsageError
from forgetfree.tasks import DEFAULT_CAUSAL_TEMPLATE, DEFAULT_TEMPLATE, HubSource, TaskDefinition

Record = dict[str, Any]

ROOT = Path(__file__).parents[2]
# Messages must not show these words, because their readers did not write the code.
INTERNALS = ("Traceback", "Error(", "KeyError", "Errno", "<class", "object at 0x", "codec can't")

SINGLES: list[Record] = [{"text": f"text {i}", "label": i % 2} for i in range(20)]
PAIRS: list[Record] = [{"text_a": f"who {i}?", "text_b": f"I, {i}.", "label": i % 2} for i in range(20)]


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(record) for record in records]), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)


def task_folder(
    root: Path, name: str, records: Sequence[Mapping[str, Any]], notes: object = None, suffix: str = "jsonl"
) -> Path:
    """A task with the same rows in all three splits."""
    for split in ("train", "validation", "test"):
        write(root / name / f"{split}.{suffix}", records)
    if notes is not None:
        (root / name / "source.json").write_text(json.dumps(notes), encoding="utf-8")
    return root / name


def load(root: Path, name: str) -> TaskRows:
    return load_tasks(name, str(root))[0]


def message(root: Path, name: str = "mine", kind: type[Exception] = DataError) -> str:
    """The one paragraph that loading ends with; of bad rows that of the first."""
    with pytest.raises(kind) as caught:
        load(root, name)
    bad = getattr(caught.value, "rows", ())
    text = bad[0].message if bad else str(caught.value)
    assert "\n" not in text
    assert not [word for word in INTERNALS if word in text], text
    assert text.endswith(".")
    return text


# -- Directories: formats --------------------------------------------------------------------------------

AWKWARD = ['a "quoted" word', "comma, semicolon; tab\t", "two\nlines", "Grüße, 東京 🙂", "-", " blank ", "\\n [SEP]"]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_every_format_gives_back_every_character(tmp_path: Path, suffix: str) -> None:
    task_folder(tmp_path, "mine", [{"text": t, "label": i % 2} for i, t in enumerate(AWKWARD)], suffix=suffix)
    rows = load(tmp_path, "mine")
    for split in (rows.train, rows.validation, rows.test):
        assert split == Rows(tuple(AWKWARD), (), (0, 1, 0, 1, 0, 1, 0))


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_every_format_reads_pairs(tmp_path: Path, suffix: str) -> None:
    task_folder(tmp_path, "mine", PAIRS, suffix=suffix)
    rows = load(tmp_path, "mine")
    assert rows.task.kind == "pair"
    assert rows.train.first[3] == "who 3?"
    assert rows.train.second[3] == "I, 3."


def test_formats_may_differ_by_split_and_extra_columns_are_ignored(tmp_path: Path) -> None:
    for split, suffix in (("train", "csv"), ("validation", "jsonl"), ("test", "parquet")):
        write(tmp_path / "mine" / f"{split}.{suffix}", [{"id": i, **row} for i, row in enumerate(SINGLES)])
    rows = load(tmp_path, "mine")
    assert rows.train == rows.validation == rows.test


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path, suffix: str) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES, suffix=suffix)
    train = folder / f"train.{suffix}"
    train.write_bytes(b"\xef\xbb\xbf" + train.read_bytes())
    assert load(tmp_path, "mine").train.first[0] == "text 0"


def test_blank_lines_in_jsonl_are_skipped(tmp_path: Path) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES)
    lines = (folder / "train.jsonl").read_text().replace("\n", "\n\n")
    (folder / "train.jsonl").write_text(lines)
    assert len(load(tmp_path, "mine").train) == len(SINGLES)


def test_labels_may_be_written_as_text(tmp_path: Path) -> None:
    task_folder(tmp_path, "mine", [{"text": "a", "label": " 0"}, {"text": "b", "label": "1"}])
    assert load(tmp_path, "mine").train.labels == (0, 1)


# -- Directories: what a task is -------------------------------------------------------------------------


def test_an_unregistered_task_is_inferred_from_its_rows(tmp_path: Path) -> None:
    task_folder(tmp_path, "mine", [{"text": str(i), "label": i % 3} for i in range(6)])
    assert load(tmp_path, "mine").task == TaskDefinition(
        "mine",
        "single",
        ("0", "1", "2"),
        template=DEFAULT_TEMPLATE["single"],
        label_words=("0", "1", "2"),
        causal_template=DEFAULT_CAUSAL_TEMPLATE["single"],
    )


def test_label_names_are_label_words_unless_these_are_given(tmp_path: Path) -> None:
    task_folder(tmp_path, "mine", PAIRS, {"label_names": ["no", "yes"]})
    task = load(tmp_path, "mine").task
    assert (task.kind, task.labels, task.label_words) == ("pair", ("no", "yes"), ("no", "yes"))
    assert task.template == DEFAULT_TEMPLATE["pair"]


def test_source_json_describes_an_unregistered_task_whole(tmp_path: Path) -> None:
    notes = {
        "label_names": ["rejected", "accepted"],
        "label_words": ["No", "Yes"],
        "template": "{text_b:lower}: {mask}! {text_a:bare}",
        "causal_template": "{text_b} / {text_a} =",
        "metric": "f1",
        "licence": "ignored",
    }
    task_folder(tmp_path, "mine", PAIRS, notes)
    task = load(tmp_path, "mine").task
    assert task.labels == ("rejected", "accepted")
    assert task.label_words == ("No", "Yes")
    assert task.template == notes["template"]
    assert task.causal_template == notes["causal_template"]
    assert task.metric == "f1"


def test_a_registered_task_keeps_its_prompt(tmp_path: Path) -> None:
    task_folder(tmp_path, "sst2", SINGLES)
    assert load(tmp_path, "sst2").task == registry.tasks()["sst2"]


def test_source_json_overrides_the_registry(tmp_path: Path) -> None:
    """This lets users replace a label word that is not one token of their model."""
    task_folder(tmp_path, "sst2", SINGLES, {"label_words": ["bad", "good"], "template": "{mask}: {text}"})
    task = load(tmp_path, "sst2").task
    assert task == replace(registry.tasks()["sst2"], label_words=("bad", "good"), template="{mask}: {text}")


def test_label_words_follow_labels_that_the_data_numbers_differently(tmp_path: Path) -> None:
    task_folder(tmp_path, "sst2", SINGLES, {"label_names": ["positive", "negative"]})
    task = load(tmp_path, "sst2").task
    assert task.labels == ("positive", "negative")
    assert task.label_words == ("great", "terrible")


def test_labels_are_recognized_without_case_and_punctuation(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": i % 4} for i in range(8)]
    task_folder(tmp_path, "ag_news", rows, {"label_names": ["sci_tech", "Business", "SPORTS", "world"]})
    assert load(tmp_path, "ag_news").task.label_words == ("Tech", "Business", "Sports", "World")


@pytest.mark.parametrize("names", [["bad", "good"], ["+", "-"]])
def test_other_label_names_of_a_registered_task_count_by_position(tmp_path: Path, names: list[str]) -> None:
    task_folder(tmp_path, "sst2", SINGLES, {"label_names": names})
    task = load(tmp_path, "sst2").task
    assert task.labels == tuple(names)
    assert task.label_words == ("terrible", "great")


# -- Directories: splits ---------------------------------------------------------------------------------


def held_out(tmp_path: Path, count: int) -> TaskRows:
    rows = [{"text": f"{i}", "label": i % 2} for i in range(count)]
    folder = task_folder(tmp_path, "mine", rows)
    (folder / "validation.jsonl").unlink()
    return load(tmp_path, "mine")


def test_a_missing_validation_split_is_a_tenth_of_the_training_rows(tmp_path: Path) -> None:
    rows = held_out(tmp_path, 200)
    assert (len(rows.train), len(rows.validation), len(rows.test)) == (180, 20, 200)
    assert {*rows.train.first} | {*rows.validation.first} == {str(i) for i in range(200)}
    assert not {*rows.train.first} & {*rows.validation.first}
    assert list(map(int, rows.train.first)) == sorted(map(int, rows.train.first))


def test_equal_texts_are_held_out_together(tmp_path: Path) -> None:
    """Else a choice on validation rows would be one on rows that were trained. A tenth they stay, and a label keeps a row."""

    def splits(name: str, texts: Sequence[str]) -> tuple[list[str], list[str]]:
        folder = task_folder(tmp_path, name, [{"text": text, "label": i % 2} for i, text in enumerate(texts)])
        (folder / "validation.jsonl").unlink()
        rows = load(tmp_path, name)
        return [*rows.train.first], [*rows.validation.first]

    train, validation = splits("mine", [f"{i % 40}" for i in range(200)])
    assert not {*train} & {*validation} and (len(train), len(validation)) == (180, 20)
    train, validation = splits("often", ["often" if i < 60 else f"{i}" for i in range(100)])
    assert not {*train} & {*validation} and (len(train), len(validation)) == (90, 10)
    train, validation = splits("all", [f"{i % 2}" for i in range(40)])
    assert {*train} == {"0", "1"} and len(validation) == 4


def test_a_folder_with_files_of_another_format_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.xlsx").write_text("text\tlabel\n")
    for load_it in (lambda: load_tasks("mine", str(tmp_path)), lambda: load_task("mine", str(tmp_path))):
        with pytest.raises(
            DataError, match=r"has no train split: expected .*\.parquet, \.jsonl or \.csv, found train\.xlsx"
        ):
            load_it()


@pytest.mark.parametrize("typo", ["label_name", "lable_names", "label-names", "templates"])
def test_a_misspelt_key_of_source_json_is_reported(tmp_path: Path, typo: str) -> None:
    task_folder(tmp_path, "mine", SINGLES, {typo: ["no", "yes"], "licence": "mine", "names": 3})
    with pytest.raises(DataError, match=f"'{typo}' is not read. Did you mean '(label_names|template)'"):
        load(tmp_path, "mine")


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "./mine", "mine/", "absolute"])
def test_a_task_is_a_folder_of_the_directory_and_nothing_else(tmp_path: Path, name: str) -> None:
    task_folder(tmp_path / "data", "mine", SINGLES)
    folder = task_folder(tmp_path, "other", SINGLES)
    name = str(folder) if name == "absolute" else name
    with pytest.raises(UsageError):
        load_task(name, str(tmp_path / "data"))
    with pytest.raises(UsageError):
        load_tasks(name, str(tmp_path / "data"))


def test_the_held_out_rows_are_the_same_every_time(tmp_path: Path) -> None:
    one, other = held_out(tmp_path / "one", 200), held_out(tmp_path / "other", 200)
    assert one.validation == other.validation
    assert one.fingerprint() == other.fingerprint()


def test_a_missing_test_split_is_the_validation_split(tmp_path: Path) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES)
    (folder / "test.jsonl").unlink()
    rows = load(tmp_path, "mine")
    assert rows.test == Rows(tuple(f"text {i}" for i in range(20)), (), (0, 1) * 10)
    assert len(rows.validation) == 2
    assert len(rows.train) == 18


def test_an_empty_test_split_is_not_replaced_by_another() -> None:
    task = TaskDefinition("mine", "single", ("0", "1"))
    some = Rows(("a", "b"), (), (0, 1))
    with pytest.raises(DataError, match="Task 'mine' has no rows in its test split"):
        complete(task, {"train": some, "validation": some, "test": Rows((), (), ())})


def test_a_fingerprint_knows_every_text_label_and_split() -> None:
    task = TaskDefinition("mine", "single", ("0", "1"))
    some, other = Rows(("a", "b"), (), (0, 1)), Rows(("a", "c"), (), (0, 1))
    base = TaskRows(task, some, some, some)
    assert base.fingerprint() == TaskRows(task, some, some, some).fingerprint()
    assert len(base.fingerprint()) == 64
    changed = [
        TaskRows(task, some, some, other),
        TaskRows(task, other, some, some),
        TaskRows(task, Rows(("a", "b"), (), (1, 0)), some, some),
        TaskRows(task, Rows(("a", "b"), ("", ""), (0, 1)), some, some),
    ]
    assert len({rows.fingerprint() for rows in [base, *changed]}) == 5


def test_rows_that_are_tested_and_trained_on_are_counted_by_their_texts(tmp_path: Path) -> None:
    texts = {"train": "abcdefgh", "validation": "ghij", "test": "aabgjxyzw"}
    for split, words in texts.items():
        rows = [{"text": word, "label": (i + (split == "test")) % 2} for i, word in enumerate(words)]
        write(tmp_path / "mine" / f"{split}.jsonl", rows)
    rows = load(tmp_path, "mine")
    assert rows.shared == {"train": 4, "validation": 2}
    assert rows.shared_note().startswith(
        "4 of 9 test rows of task 'mine' are also training rows, and 2 are also validation rows (the same texts, "
    )
    rows = rows.evaluated_on("validation")
    assert rows.test.first == ("i", "j") and rows.shared == {"train": 0, "validation": 0} and rows.shared_note() == ""
    rows = replace(rows, train=rows.test)
    expected = "2 of 2 validation rows of task 'mine' are also training rows (the same texts, whatever their labels)"
    assert rows.shared_note("validation").startswith(expected)
    one = Rows(rows.test.first[:1], (), (0,))
    note = replace(rows, train=one, validation=one).shared_note("validation")
    assert note.startswith(
        "1 of 2 validation rows of task 'mine' is also one of the training rows, and 1 is also one of"
    )
    rows = replace(rows, train=rows.validation, validation=rows.test)
    assert rows.shared_note("validation").startswith(
        "2 of 2 validation rows of task 'mine' are also other validation rows ("
    )


def test_pairs_are_the_same_if_both_texts_are(tmp_path: Path) -> None:
    write(
        tmp_path / "mine" / "train.csv", [{"text_a": f"a{i % 3}", "text_b": f"b{i}", "label": i % 2} for i in range(6)]
    )
    for split in ("validation", "test"):
        write(tmp_path / "mine" / f"{split}.csv", [{"text_a": f"a{i}", "text_b": "b0", "label": i} for i in range(2)])
    assert load(tmp_path, "mine").shared == {"train": 1, "validation": 2}


def test_taking_rows_keeps_texts_and_labels_together() -> None:
    rows = Rows(("a", "b", "c"), ("x", "y", "z"), (0, 1, 2))
    assert rows.take([2, 0]) == Rows(("c", "a"), ("z", "x"), (2, 0))
    assert Rows(("a", "b"), (), (0, 1)).take([1]) == Rows(("b",), (), (1,))


# -- Directories: faults ---------------------------------------------------------------------------------


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    text = message(tmp_path / "nowhere", kind=UsageError)
    assert f"'{tmp_path}/nowhere' does not exist" in text
    assert "'hub' or 'demo'" in text


def test_a_registered_task_without_a_folder_names_what_there_is(tmp_path: Path) -> None:
    task_folder(tmp_path, "mine", SINGLES)
    assert f"expected the folder {tmp_path}/sst2. It holds mine" in message(tmp_path, "sst2")


def test_a_folder_without_a_training_file_is_reported(tmp_path: Path) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES)
    (folder / "train.jsonl").unlink()
    assert f"'mine' has no train split: expected {folder}/train.parquet" in message(tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_a_missing_column_is_named_with_those_found(tmp_path: Path, suffix: str) -> None:
    folder = task_folder(tmp_path, "mine", [{"phrase": "a", "label": 0}], suffix=suffix)
    text = message(tmp_path)
    assert f"{folder}/train.{suffix} has no column 'text'" in text
    assert "'phrase'" in text
    assert "'label'" in text


@pytest.mark.parametrize(
    ("name", "row", "kind"),
    [
        ("qnli", {"text": "a", "label": 1}, "single"),
        ("sst2", {"text_a": "a", "text_b": "b", "label": 1}, "pair"),
        ("cr", {"tokens": ["a"], "tags": ["B-X"]}, "tokens"),
        ("boolq", {"question": "a", "answer": "b"}, "generation"),
        ("ner_products", {"text": "a", "label": 1}, "single"),
        ("in_one_line", {"text": "a", "label": 1}, "single"),
    ],
)
def test_rows_with_other_columns_than_the_registered_task_of_their_name_are_their_own(
    tmp_path: Path, name: str, row: dict[str, Any], kind: str
) -> None:
    task_folder(tmp_path, name, [{**row, **({"label": i % 2} if "label" in row else {})} for i in range(20)])
    rows = load(tmp_path, name)
    assert rows.task.kind == kind
    assert f"the registered task {name!r} has other columns, and these rows are a task of their own" in rows.notes[0]


def test_columns_that_fit_no_task_of_that_name_are_told_as_the_registered_one_needs_them(tmp_path: Path) -> None:
    task_folder(tmp_path, "qnli", [{"phrase": "a", "rank": 1}])
    assert "no column 'text_a': expected text_a and text_b, and label" in message(tmp_path, "qnli")


@pytest.mark.parametrize(
    ("suffix", "first"), [("parquet", 1), ("jsonl", 1), ("csv", 1)], ids=["parquet", "jsonl", "csv"]
)
def test_a_label_that_is_no_integer_is_named_with_its_row(tmp_path: Path, suffix: str, first: int) -> None:
    rows = [{"text": "a", "label": label} for label in ("0", "1", "one", "0")]
    folder = task_folder(tmp_path, "mine", rows, suffix=suffix)
    expected = f"{folder}/train.{suffix}, row {first + 2}, column 'label': expected an integer from 0"
    assert expected in (text := message(tmp_path))
    assert 'got "one"' in text


@pytest.mark.parametrize(
    ("label", "shown"),
    [(-1, "-1"), (1.5, "1.5"), (True, "true"), (None, "nothing"), ("1_0", '"1_0"'), ([1], "[1]"), ("²", '"²"')],
)
def test_a_label_is_a_whole_number_from_0(tmp_path: Path, label: object, shown: str) -> None:
    task_folder(tmp_path, "mine", [{"text": "a", "label": 0}, {"text": "b", "label": label}])
    assert f"row 2, column 'label': expected an integer from 0, got {shown}." in message(tmp_path)


@pytest.mark.parametrize("value", [None, 3, ["a"]])
def test_a_missing_text_is_named_with_its_row(tmp_path: Path, value: object) -> None:
    task_folder(tmp_path, "mine", [*PAIRS, {"text_a": "a", "text_b": value, "label": 0}])
    assert "train.jsonl, row 21, column 'text_b': expected a text" in message(tmp_path)


def test_a_csv_row_that_is_too_short_is_named(tmp_path: Path) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES, suffix="csv")
    (folder / "test.csv").write_text('label,text\n0,a\n1,"b\nb"\n0\n')
    expected = (
        f"{folder}/test.csv, row 3, column 'text': expected a cell for each of the 2 columns (label, text), got 1."
    )
    assert expected in message(tmp_path)


@pytest.mark.parametrize(
    ("content", "row", "column"),
    [
        (
            "text,label\na,0\n\nb, and c,1\n",
            2,
            "column 3: expected a cell for each of the 2 columns (text, label), got 3.",
        ),
        (
            "label,text\n0,a\n1,b, and c, d\n",
            2,
            "column 3: expected a cell for each of the 2 columns (label, text), got 4.",
        ),
        ("label,text\n0,a\n1,b,\n", 2, "column 3: expected a cell for each of the 2 columns (label, text), got 3."),
    ],
)
def test_a_comma_without_quotes_is_named(tmp_path: Path, content: str, row: int, column: str) -> None:
    """It would cut a text, and leave no trace where the label comes first."""
    folder = task_folder(tmp_path, "mine", SINGLES, suffix="csv")
    (folder / "train.csv").write_text(content)
    assert f"{folder}/train.csv, row {row}, {column} Quote texts that hold commas" in message(tmp_path)


def test_empty_cells_without_a_column_name_are_ignored(tmp_path: Path) -> None:
    """Spreadsheets write such columns after their content was deleted."""
    folder = task_folder(tmp_path, "mine", SINGLES, suffix="csv")
    (folder / "train.csv").write_text("text,label,,\na,0,,\nb,1,,\n")
    assert load(tmp_path, "mine").train == Rows(("a", "b"), (), (0, 1))


def test_a_column_that_appears_twice_is_named(tmp_path: Path) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES, suffix="csv")
    (folder / "train.csv").write_text("text,label,text\na,0,b\n")
    assert f"{folder}/train.csv has column 'text' twice. Rename or remove one of them." in message(tmp_path)
    (folder / "train.csv").unlink()
    columns = [pyarrow.array(["a"]), pyarrow.array([0]), pyarrow.array([1])]
    table = pyarrow.Table.from_arrays(columns, names=["text", "label", "label"])
    pyarrow.parquet.write_table(table, folder / "train.parquet")
    assert f"{folder}/train.parquet has column 'label' twice." in message(tmp_path)
    (folder / "train.parquet").unlink()
    (folder / "train.jsonl").write_text('{"text": "a", "label": 0}\n{"text": "a", "label": 0, "label": 1}\n')
    expected = f"{folder}/train.jsonl, row 2: expected a JSON object, got"
    assert expected in message(tmp_path) and "(the key 'label' stands twice)" in message(tmp_path)


def test_a_key_that_appears_twice_in_source_json_is_named(tmp_path: Path) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES)
    (folder / "source.json").write_text('{"label_names": ["no", "yes"], "label_names": ["yes", "no"]}')
    assert f"{folder}/source.json is not valid JSON: the key 'label_names' stands twice. Fix or remove it." in message(
        tmp_path
    )


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("validation.xlsx", "validation"),
        ("dev.feather", "validation"),
        ("valid.arrow", "validation"),
        ("TEST.xls", "test"),
    ],
)
def test_a_file_that_is_meant_for_a_split_is_not_left_out(tmp_path: Path, name: str, split: str) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES, suffix="csv")
    (folder / f"{split}.csv").rename(folder / name)
    text = message(tmp_path)
    assert (
        f"Task 'mine' has no {split} split, and {folder}/{name} is not read. Write it as {split}.parquet, .jsonl or .csv"
        in text
    )
    (folder / f"{split}.csv").write_bytes((folder / name).read_bytes())
    assert load(tmp_path, "mine").validation == load(tmp_path, "mine").test


def test_a_tag_for_each_word_makes_a_task_that_labels_words(tmp_path: Path) -> None:
    words = [{"tokens": ["Ann", "sleeps"], "tags": ["B-PER", "O"]}] * 4
    task_folder(tmp_path, "names", words, {"kind": "tokens", "entities": ["PER"]}, "parquet")
    task_folder(tmp_path, "bare", words)
    task_folder(tmp_path, "mine", [{**row, **words[0]} for row in SINGLES])
    for name in ("names", "bare"):
        rows = load(tmp_path, name)
        assert rows.task.kind == "tokens" and rows.task.labels == ("O", "B-PER", "I-PER")
        assert set(rows.train.labels) == {(1, 0)} and set(rows.train.first) == {"Ann sleeps"}
    assert load(tmp_path, "mine").train.labels == tuple(row["label"] for row in SINGLES)  # with columns of that name


def test_an_unclosed_quote_in_csv_is_named_with_its_line(tmp_path: Path) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES, suffix="csv")
    (folder / "test.csv").write_text('text,label\na,0\n"b,1\nc,0\n')
    assert f"{folder}/test.csv, line 3: unexpected end of data. Quote texts" in message(tmp_path)


def test_rows_of_jsonl_are_counted_by_line(tmp_path: Path) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES)
    (folder / "test.jsonl").write_text('\n{"text": "a", "label": 0}\n\n{"text": "a", "label": 7}\n')
    assert f"{folder}/test.jsonl, row 4, column 'label': 7 is out of range" in message(tmp_path)


@pytest.mark.parametrize("line", ["{'text': 'a', 'label': 0}", "[1]", "null", '{"text": "a"'])
def test_a_line_that_is_no_json_object_is_named(tmp_path: Path, line: str) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES)
    (folder / "test.jsonl").write_text('{"text": "a", "label": 0}\n' + line + "\n")
    assert f"{folder}/test.jsonl, row 2: expected a JSON object, got " in message(tmp_path)


def test_a_label_out_of_range_is_named_with_the_labels_there_are(tmp_path: Path) -> None:
    folder = task_folder(tmp_path, "sst2", SINGLES)
    write(folder / "test.jsonl", [*SINGLES, {"text": "a", "label": 2}])
    text = message(tmp_path, "sst2")
    assert f"{folder}/test.jsonl, row 21, column 'label': 2 is out of range" in text
    assert "2 labels 0 to 1 (negative, positive)" in text


def test_other_labels_under_the_name_of_a_registered_task_are_told_to_take_another_name(tmp_path: Path) -> None:
    rows = [{**row, "label": ("entailment", "not entailment")[row["label"]]} for row in PAIRS]
    remedy = (
        "A task of this name is registered: if these rows are another task's, give it a name of its own, such as my_rte"
    )
    task_folder(tmp_path, "rte", rows)
    assert remedy in message(tmp_path, "rte")
    task_folder(tmp_path, "rte", rows, {"label_names": ["entailment", "no"]})
    assert remedy not in message(tmp_path, "rte")


def test_a_label_that_only_the_test_rows_have_is_out_of_range(tmp_path: Path) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES)
    write(folder / "test.jsonl", [{"text": "a", "label": 2}])
    assert "row 1, column 'label': 2 is out of range" in message(tmp_path)


@pytest.mark.parametrize("label", [3, 10**12])
def test_labels_with_a_gap_are_named_as_they_are_written(tmp_path: Path, label: int) -> None:
    """This holds for any number: no table of that many names is made."""
    task_folder(tmp_path, "mine", [*SINGLES, {"text": "a", "label": label}])
    rows = load(tmp_path, "mine")
    assert rows.task.labels == rows.task.label_words == ("0", "1", str(label))
    assert rows.train.labels == (0, 1) * 10 + (2,)
    assert f"labels, in this order: 0, 1, {label}." in rows.notes[0]


def test_a_label_without_training_rows_is_named(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": label} for label in (0, 2, 0, 2)]
    task_folder(tmp_path, "mine", rows, {"label_names": ["x", "y", "z"]})
    assert "'mine' has no training row of label 1 ('y'); rows per label: [2, 0, 2]" in message(tmp_path)


def test_a_label_that_lost_its_only_row_to_the_validation_split_is_reported(tmp_path: Path) -> None:
    folder = task_folder(tmp_path, "mine", [{"text": "a", "label": 0}, {"text": "b", "label": 1}])
    (folder / "validation.jsonl").unlink()
    assert "Some went to the missing validation split: add one" in message(tmp_path)


def test_a_task_of_one_label_is_refused(tmp_path: Path) -> None:
    task_folder(tmp_path, "mine", [{"text": "a", "label": 0}])
    assert "no training row of label 1" in message(tmp_path)


def test_an_unreadable_parquet_file_is_named(tmp_path: Path) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES, suffix="parquet")
    (folder / "test.parquet").write_bytes(b"PAR1 and nothing else")
    assert f"{folder}/test.parquet cannot be read as parquet: " in message(tmp_path)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_file_in_another_encoding_is_named(tmp_path: Path, suffix: str) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES, suffix=suffix)
    train = folder / f"train.{suffix}"
    train.write_bytes(train.read_bytes().replace(b"text 3", "привет".encode("cp1251")))
    assert f"{train}, line " in (text := message(tmp_path)) and "is no character of UTF-8" in text


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_an_empty_file_holds_no_rows(tmp_path: Path, suffix: str) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES, suffix=suffix)
    (folder / f"test.{suffix}").write_text("")
    assert f"{folder}/test.{suffix} holds no rows" in message(tmp_path)


def test_a_file_of_no_rows_is_an_empty_split(tmp_path: Path) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES, suffix="csv")
    (folder / "validation.csv").write_text("text,label\n")
    assert "Task 'mine' has no rows in its validation split" in message(tmp_path)


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"label_names": "ab"}', "label_names must be a list of at least two names"),
        ('{"label_names": ["a"]}', "label_names must be a list of at least two names"),
        (
            '{"label_names": ["a", " "]}',
            "label_names must be a list of at least two names, all different, got ['a', ' ']",
        ),
        (
            '{"label_names": ["a", null]}',
            "label_names must be a list of at least two names, all different, got ['a', None]",
        ),
        ('{"label_words": [["a"], {}]}', "label_words must be a list of at least two names"),
        ('{"label_names": ["a", "a"]}', "all different"),
        ('{"label_names": [null, "b"]}', "label_names must be a list of at least two names"),
        ('{"label_names": ["", "b"]}', "label_names must be a list of at least two names"),
        ('{"label_names": ["a ", "a"]}', "all different"),
        ('{"label_names": [["a"], {"b": 1}]}', "label_names must be a list of at least two names"),
        ('{"label_words": [["a"], "b"]}', "label_words must be a list of at least two names"),
        ('{"label_words": "ab"}', "label_words must be a list of at least two names"),
        ('{"label_words": ["a", "b", "c"]}', "one of label_words for each of the 2 labels, got 3"),
        ('{"metric": "bleu"}', "metric must be one of accuracy, f1, macro_f1, got 'bleu'"),
        ('{"template": "{text} was"}', "template must hold each of {text}, {mask} once"),
        ('{"template": "{mask} {text} {text}"}', "template must hold each of {text}, {mask} once"),
        ('{"template": "{mask} {text:upper}"}', "no other slot, got '{mask} {text:upper}'"),
        ('{"template": 3}', "template must be a text"),
        ('{"causal_template": "{text} {mask}"}', "causal_template must hold each of {text} once"),
    ],
)
def test_a_wrong_source_json_is_named(tmp_path: Path, notes: str, expected: str) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES)
    (folder / "source.json").write_text(notes)
    assert f"{folder}/source.json" in (text := message(tmp_path))
    assert expected in text


def test_f1_of_more_than_two_labels_is_refused(tmp_path: Path) -> None:
    notes = {"label_names": ["no", "perhaps", "yes"], "metric": "f1"}
    task_folder(tmp_path, "mine", SINGLES, notes)
    assert "metric 'f1' is that of label 1 of two, and there are 3 labels. Give 'macro_f1' or 'accuracy'." in message(
        tmp_path
    )


def test_more_label_names_than_a_registered_task_has_labels_are_refused(tmp_path: Path) -> None:
    task_folder(tmp_path, "sst2", SINGLES, {"label_names": ["negative", "neutral", "positive"]})
    text = message(tmp_path, "sst2")
    assert "names 3 labels, but task 'sst2' has 2: negative, positive" in text
    assert "Rename the folder" in text


# -- Streams ---------------------------------------------------------------------------------------------


def test_a_stream_is_a_registered_name_or_task_names(tmp_path: Path) -> None:
    task_folder(tmp_path, "mine", SINGLES)
    task_folder(tmp_path, "sst2", SINGLES)
    assert [rows.task.name for rows in load_tasks(" sst2 ,mine,", str(tmp_path))] == ["sst2", "mine"]
    demo = load_tasks("qnli-agnews-sst2", "demo")
    assert [rows.task.name for rows in demo] == ["qnli", "ag_news", "sst2"]
    assert [bool(rows.train.second) for rows in demo] == [True, False, False]


def test_a_stream_names_each_task_once(tmp_path: Path) -> None:
    for name in ("mine", "sst2"):
        task_folder(tmp_path, name, SINGLES)
    with pytest.raises(UsageError, match=r"The stream names 'mine' twice.*a task of another name, such as mine-2"):
        load_tasks("mine,sst2,mine", str(tmp_path))


def test_places_may_be_a_file_a_directory_and_the_demo(tmp_path: Path) -> None:
    """A task is read from the first place that has it."""
    task_folder(tmp_path / "data", "mine", SINGLES)
    task_folder(tmp_path / "data", "sst2", SINGLES)
    (tmp_path / "mine.jsonl").write_text(
        (tmp_path / "data" / "mine" / "train.jsonl").read_text().replace("good", "fine")
    )
    places = [str(tmp_path / "mine.jsonl"), str(tmp_path / "data"), "demo"]
    mine, sst2, qnli = load_tasks("mine,sst2,qnli", places)
    assert mine.train != load_tasks("mine", places[1])[0].train
    assert sst2.train == load_tasks("sst2", places[1])[0].train
    assert qnli.train == load_tasks("qnli", "demo")[0].train
    with pytest.raises(UnknownNameError, match="Unknown stream or task 'nosuch'"):
        load_tasks("nosuch", places)


@pytest.mark.parametrize("stream", ["", " , "])
def test_a_stream_names_some_task(tmp_path: Path, stream: str) -> None:
    with pytest.raises(UsageError, match="names no task"):
        load_tasks(stream, str(tmp_path))


def test_an_unknown_task_gets_its_nearest_name_and_the_place_to_add_it(tmp_path: Path) -> None:
    task_folder(tmp_path, "reviews", SINGLES)
    text = message(tmp_path, "reviws", UnknownNameError)
    assert "Unknown stream or task 'reviws'. Did you mean 'reviews'?" in text
    assert f"put it under {tmp_path}/NAME" in text


def test_an_unknown_stream_gets_its_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'qnli-agnews-sst2'"):
        load_tasks("qnli-agnews-sst", "demo")


def test_the_demo_names_what_it_holds() -> None:
    with pytest.raises(DataError, match=r"no data for task 'trec'.*'demo' holds qnli, ag_news, sst2, who_did_it"):
        load_tasks("trec", "demo")


def test_the_default_data_is_the_environments_or_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGETFREE_DATA", "somewhere")
    assert default_data() == "somewhere"
    monkeypatch.setenv("FORGETFREE_DATA", "")
    assert default_data() == "hub"
    monkeypatch.delenv("FORGETFREE_DATA")
    assert default_data() == "hub"


# -- The hub ---------------------------------------------------------------------------------------------


class Table:
    """The part of the result of `datasets.load_dataset` that we use."""

    def __init__(self, **columns: list[Any]) -> None:
        self._columns = columns
        self.column_names = list(columns)

    def __getitem__(self, name: str) -> list[Any]:
        return self._columns[name]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None, str], Any]:
    """The hub as a dict of (path, name, split) to a table or an error."""
    tables: dict[tuple[str, str | None, str], Any] = {}

    def load_dataset(path: str, name: str | None, *, split: str) -> Any:
        found = tables[path, name, split]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return tables


def hub_message(name: str) -> str:
    with pytest.raises(DataError) as caught:
        load_tasks(name, "hub")
    text = str(caught.value)
    assert "\n" not in text
    assert not [word for word in INTERNALS if word in text], text
    return text


def test_the_hub_is_read_by_the_tasks_own_columns_and_splits(hub: dict[Any, Any]) -> None:
    questions = [f"who {i}?" for i in range(20)]
    table = Table(question=questions, sentence=["I."] * 20, label=[0, 1] * 10, idx=list(range(20)))
    hub["nyu-mll/glue", "qnli", "train"] = hub["nyu-mll/glue", "qnli", "validation"] = table
    rows = load_tasks("qnli", "hub")[0]
    assert rows.test == Rows(tuple(questions), ("I.",) * 20, (0, 1) * 10)
    assert (len(rows.train), len(rows.validation)) == (18, 2)


def test_labels_of_the_hub_are_renumbered_where_ours_differ(hub: dict[Any, Any]) -> None:
    """SetFit/subj calls objective 0; here subjective is."""
    table = Table(text=["o", "s"] * 10, label=[0, 1] * 10)
    hub["SetFit/subj", None, "train"] = hub["SetFit/subj", None, "test"] = table
    assert load_tasks("subj", "hub")[0].test.labels == (1, 0) * 10


def test_a_text_may_be_made_of_several_columns_of_the_hub(hub: dict[Any, Any]) -> None:
    table = Table(
        premise=["The sun rose."] * 20,
        question=["cause", "effect"] * 10,
        choice1=["It was dawn."] * 20,
        choice2=[" It was night. "] * 20,
        label=[0, 1] * 10,
    )
    hub["aps/super_glue", "copa", "train"] = hub["aps/super_glue", "copa", "validation"] = table
    test = load_tasks("copa", "hub")[0].test
    assert test.first[:2] == ("The sun rose. What was the cause?", "The sun rose. What was the effect?")
    assert set(test.second) == {"First: It was dawn. Second: It was night."}


def test_missing_columns_of_a_hub_row_are_left_out_of_its_text(hub: dict[Any, Any]) -> None:
    table = Table(
        question_title=["who"] * 20, question_content=[None] * 20, best_answer=["I"] * 20, topic=[*range(10)] * 2
    )
    for split in ("train", "test"):
        hub["community-datasets/yahoo_answers_topics", "yahoo_answers_topics", split] = table
    assert set(load_tasks("yahoo", "hub")[0].test.first) == {"who I"}


def test_a_column_that_a_text_is_made_of_may_be_missing_on_the_hub(hub: dict[Any, Any]) -> None:
    hub["aps/super_glue", "wic", "train"] = Table(sentence1=["a"], sentence2=["b"], label=[0])
    assert "aps/super_glue:train has no column 'word'; it has sentence1, sentence2, label" in hub_message("wic")


def test_undecided_rows_of_the_hub_are_left_out(hub: dict[Any, Any]) -> None:
    table = Table(premise=list("abcd"), hypothesis=list("efgh"), label=[0, -1, 1, 2])
    for split in ("train", "validation", "test"):
        hub["stanfordnlp/snli", None, split] = table
    assert load_tasks("snli", "hub")[0].train == Rows(("a", "c", "d"), ("e", "g", "h"), (0, 1, 2))


def test_a_row_of_the_hub_that_is_wrong_is_named_by_its_own_number(hub: dict[Any, Any]) -> None:
    for split in ("train", "validation", "test"):
        hub["stanfordnlp/snli", None, split] = Table(
            premise=["a", "b", None], hypothesis=["e", "f", "g"], label=[0, -1, 1]
        )
    with pytest.raises(BadDataError) as caught:
        load_tasks("snli", "hub")
    assert [row.file for row in caught.value.rows] == [
        f"stanfordnlp/snli:{split}" for split in ("train", "validation", "test")
    ]
    assert "snli:train, row 2, column 'text_a': expected a text, got nothing" in caught.value.rows[0].message
    for label, fault in (("unsure", ""), (3, ": 3 is out of range")):
        for split in ("train", "validation", "test"):
            hub["stanfordnlp/snli", None, split] = Table(premise=["a"], hypothesis=["e"], label=[label])
        with pytest.raises(BadDataError) as caught:
            load_tasks("snli", "hub")
        assert f"stanfordnlp/snli:train, row 0, column 'label'{fault}" in str(caught.value)


def test_a_data_set_that_changed_on_the_hub_is_reported(hub: dict[Any, Any]) -> None:
    hub["fancyzhx/ag_news", None, "train"] = Table(body=["a"], label=[0])
    text = hub_message("ag_news")
    assert "fancyzhx/ag_news:train has no column 'text'; it has body, label" in text


def test_a_hub_that_cannot_be_reached_offers_the_other_sources(hub: dict[Any, Any]) -> None:
    hub["fancyzhx/ag_news", None, "train"] = ConnectionError("Couldn't reach the Hub.\nlong\nstory")
    assert hub_message("ag_news") == (
        "Task 'ag_news' cannot be read from the hub (fancyzhx/ag_news, split train): Couldn't reach the Hub. "
        "Without a connection, give a directory with --data DIR, or --data demo."
    )


def test_a_task_that_the_hub_does_not_hold_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "tasks", lambda: {"own": TaskDefinition("own", "single", ("a", "b"))})
    assert "The hub does not hold task 'own'" in hub_message("own")


def test_a_set_in_hub_layout_is_read_by_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for split in ("train", "test"):
        write(tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet", SINGLES)
    own = TaskDefinition("own", "single", ("a", "b"), hub=HubSource(str(tmp_path / "set")))
    monkeypatch.setattr(registry, "tasks", lambda: {"own": own})
    datasets.disable_progress_bars()
    try:
        rows = load_tasks("own", "hub")[0]
    finally:
        datasets.enable_progress_bars()
    assert rows.test.first == tuple(f"text {i}" for i in range(20))
    assert rows.test.labels == (0, 1) * 10


@pytest.mark.sampled(share=0.4)
def test_without_a_connection_the_hub_fails_at_once_and_says_what_to_do() -> None:
    code = (
        "import time, datasets\n"
        "from forgetfree.data.sources import load_tasks\n"
        "from forgetfree.errors import DataError\n"
        "begin = time.perf_counter()\n"
        "try: load_tasks('ag_news', 'hub')\n"
        "except DataError as error: print(error)\n"
        "assert time.perf_counter() - begin < 10\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent/cache"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Task 'ag_news' cannot be read from the hub (fancyzhx/ag_news, split train): ")
    assert done.stdout.strip().endswith("give a directory with --data DIR, or --data demo.")
    assert done.stdout.count("\n") == 1


# -- Real data -------------------------------------------------------------------------------------------

REAL_NOTES = {
    path.parent.name: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(real_data.DIRECTORY.glob("*/source.json"))
}
TOKEN_TASKS = [name for name, notes in REAL_NOTES.items() if notes.get("kind") == "tokens"]


@pytest.mark.sampled(share=0.2)
@pytest.mark.skipif(not REAL_NOTES, reason=f"no real data at {real_data.DIRECTORY}")
@pytest.mark.parametrize("name", [name for name, notes in REAL_NOTES.items() if "label_names" in notes])
def test_a_real_task_is_read_whole(name: str) -> None:
    """Rows by split and label equal the counts of the task's notes, which count held-out validation rows as training rows."""
    notes = REAL_NOTES[name]
    rows = load(real_data.DIRECTORY, name)
    assert rows.task.labels == tuple(notes["label_names"])
    read: dict[str, list[int]] = {}
    for split in ("train", "validation", "test"):
        part: Rows = getattr(rows, split)
        assert bool(part.second) == (rows.task.kind == "pair")
        counted = split if split in notes["splits"] else "train"
        before = read.get(counted, [0] * len(rows.task.labels))
        read[counted] = [n + part.labels.count(label) for label, n in enumerate(before)]
    for split, counts in read.items():
        expected = notes["splits"][split]["label_counts"]
        assert counts == (
            list(expected) if isinstance(expected, list) else [expected[name] for name in rows.task.labels]
        )
        assert sum(counts) == notes["splits"][split]["rows"]


@pytest.mark.sampled(share=0.2)
@pytest.mark.parametrize("name", TOKEN_TASKS)
def test_a_real_task_that_labels_words_is_read_whole(name: str) -> None:
    rows = load(real_data.DIRECTORY, name)
    assert rows.task.entities == tuple(REAL_NOTES[name]["entities"]) and rows.notes == ()
    for part in (rows.train, rows.validation, rows.test):
        assert all(len(text.split(" ")) == len(tags) for text, tags in zip(part.first, part.labels, strict=True))
        assert max(max(tags) for tags in part.labels) < len(rows.task.labels) and any(map(any, part.labels))


def test_a_split_is_exactly_one_file(tmp_path: Path) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES, suffix="csv")
    (folder / "train.jsonl").write_text('{"text": "a", "label": 0}\n')
    assert f"{folder} holds train.jsonl and train.csv, and the train split is one file" in message(tmp_path)


def test_a_column_without_any_text_is_refused(tmp_path: Path) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES, suffix="csv")
    (folder / "train.csv").write_text("text,label\n,0\n ,1\n")
    assert f"{folder}/train.csv: column 'text' is empty in every row" in message(tmp_path)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("text,label\na,0\n", "one training row and no validation split to spare it"),
        ("text,label\na,0\nb,0\nc,0\n", "A task needs rows of two labels at least"),
    ],
)
def test_too_little_to_learn_from_says_what_is_needed(tmp_path: Path, rows: str, expected: str) -> None:
    folder = task_folder(tmp_path, "mine", SINGLES, suffix="csv")
    (folder / "validation.csv").unlink()
    (folder / "train.csv").write_text(rows)
    assert expected in message(tmp_path)


def test_shared_rows_are_found_whatever_their_case_white_space_and_punctuation() -> None:
    definition = TaskDefinition(name="t", kind="single", labels=("no", "yes"))
    train = Rows(("It is good.", "!!", "bad"), (), (0, 1, 0))
    test = Rows(("it  IS good", "!!", "so bad", "?"), (), (1, 1, 0, 0))
    assert TaskRows(definition, train, train.take([2]), test).shared == {"train": 2, "validation": 0}
