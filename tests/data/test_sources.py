"""Rows from a directory, the hub and the demo, and the error messages for faulty files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import real_data
from task_files import refusal, write_rows, write_task

from forgetfree import registry
from forgetfree.data.rows import Rows, TaskRows
from forgetfree.data.sources import load_task, load_tasks
from forgetfree.errors import BadDataError, DataError, UnknownNameError, UsageError
from forgetfree.tasks import DEFAULT_CAUSAL_TEMPLATE, DEFAULT_TEMPLATE, HubSource, TaskDefinition

Record = dict[str, Any]

ROOT = Path(__file__).parents[2]
SINGLES: list[Record] = [{"text": f"text {i}", "label": i % 2} for i in range(20)]
PAIRS: list[Record] = [{"text_a": f"who {i}?", "text_b": f"I, {i}.", "label": i % 2} for i in range(20)]


def load(root: Path, name: str) -> TaskRows:
    return load_tasks(name, str(root))[0]


def message(root: Path, name: str = "mine", kind: type[Exception] = DataError) -> str:
    return refusal(str(root), name, kind)


# -- Directories: tasks ----------------------------------------------------------------------------------


def test_an_unregistered_task_is_inferred_from_its_rows(tmp_path: Path) -> None:
    write_task(tmp_path, "mine", [{"text": str(i), "label": i % 3} for i in range(6)])
    assert load(tmp_path, "mine").task == TaskDefinition(
        "mine",
        "single",
        ("0", "1", "2"),
        template=DEFAULT_TEMPLATE["single"],
        label_words=("0", "1", "2"),
        causal_template=DEFAULT_CAUSAL_TEMPLATE["single"],
    )


def test_source_json_describes_an_unregistered_task(tmp_path: Path) -> None:
    write_task(tmp_path, "mine", PAIRS, {"label_names": ["no", "yes"]})
    task = load(tmp_path, "mine").task
    assert (task.kind, task.labels, task.label_words) == ("pair", ("no", "yes"), ("no", "yes"))
    assert task.template == DEFAULT_TEMPLATE["pair"]
    notes = {
        "label_names": ["rejected", "accepted"],
        "label_words": ["No", "Yes"],
        "template": "{text_b:lower}: {mask}! {text_a:bare}",
        "causal_template": "{text_b} / {text_a} =",
        "metric": "f1",
        "licence": "ignored",
    }
    write_task(tmp_path, "mine", PAIRS, notes)
    task = load(tmp_path, "mine").task
    assert task.labels == ("rejected", "accepted") and task.label_words == ("No", "Yes")
    assert {key: getattr(task, key) for key in ("template", "causal_template", "metric")}.items() <= notes.items()


def test_a_registered_task_keeps_its_prompt_and_its_label_words(tmp_path: Path) -> None:
    write_task(tmp_path, "sst2", SINGLES)
    assert load(tmp_path, "sst2").task == registry.tasks()["sst2"]
    for names, words in (
        (("positive", "negative"), ("great", "terrible")),  # each word follows its label into another order
        (("bad", "good"), ("terrible", "great")),  # other names take the words by position
        (("+", "-"), ("terrible", "great")),
    ):
        write_task(tmp_path, "sst2", SINGLES, {"label_names": names})
        task = load(tmp_path, "sst2").task
        assert (task.labels, task.label_words) == (names, words)


# -- Directories: splits ---------------------------------------------------------------------------------


def test_a_missing_validation_split_is_a_tenth_of_the_training_rows(tmp_path: Path) -> None:
    folder = write_task(tmp_path, "mine", [{"text": f"{i}", "label": i % 2} for i in range(200)])
    (folder / "validation.jsonl").unlink()
    rows = load(tmp_path, "mine")
    assert (len(rows.train), len(rows.validation), len(rows.test)) == (180, 20, 200)
    assert {*rows.train.first} | {*rows.validation.first} == {str(i) for i in range(200)}
    assert not {*rows.train.first} & {*rows.validation.first}
    assert list(map(int, rows.train.first)) == sorted(map(int, rows.train.first))


def test_equal_texts_are_split_off_together(tmp_path: Path) -> None:
    """Otherwise validation would use trained texts. The split remains a tenth, and each label keeps a training row."""

    def splits(name: str, texts: Sequence[str]) -> tuple[list[str], list[str]]:
        folder = write_task(tmp_path, name, [{"text": text, "label": i % 2} for i, text in enumerate(texts)])
        (folder / "validation.jsonl").unlink()
        rows = load(tmp_path, name)
        return [*rows.train.first], [*rows.validation.first]

    train, validation = splits("mine", [f"{i % 40}" for i in range(200)])
    assert not {*train} & {*validation} and (len(train), len(validation)) == (180, 20)
    train, validation = splits("often", ["often" if i < 60 else f"{i}" for i in range(100)])
    assert not {*train} & {*validation} and (len(train), len(validation)) == (90, 10)
    train, validation = splits("all", [f"{i % 2}" for i in range(40)])
    assert {*train} == {"0", "1"} and len(validation) == 4


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "./mine", "mine/", "absolute"])
def test_a_task_is_a_folder_of_the_directory_and_nothing_else(tmp_path: Path, name: str) -> None:
    write_task(tmp_path / "data", "mine", SINGLES)
    folder = write_task(tmp_path, "other", SINGLES)
    name = str(folder) if name == "absolute" else name
    with pytest.raises(UsageError):
        load_task(name, str(tmp_path / "data"))
    with pytest.raises(UsageError):
        load_tasks(name, str(tmp_path / "data"))


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
        write_rows(tmp_path / "mine" / f"{split}.jsonl", rows)
    rows = load(tmp_path, "mine")
    assert rows.shared == {"train": 4, "validation": 2}
    assert "(whatever the labels, case and punctuation)" in rows.shared_note()
    assert rows.shared_note().startswith(
        "Of 9 test rows of task 'mine', the texts of 4 are also in the training rows and the texts of 2 are also in the val"
    )
    rows = rows.evaluated_on("validation")
    assert rows.test.first == ("i", "j") and rows.shared == {"train": 0, "validation": 0} and rows.shared_note() == ""
    note = replace(rows, validation=rows.test).shared_note("validation")
    assert note.startswith("Of 2 validation rows of task 'mine', the texts of 2 are also in the other")


def test_shared_rows_are_found_whatever_their_case_white_space_and_punctuation() -> None:
    definition = TaskDefinition(name="t", kind="single", labels=("no", "yes"))
    train = Rows(("It is good.", "!!", "bad"), (), (0, 1, 0))
    test = Rows(("it  IS good", "!!", "so bad", "?"), (), (1, 1, 0, 0))
    assert TaskRows(definition, train, train.take([2]), test).shared == {"train": 2, "validation": 0}
    pairs = Rows(("a", "b"), ("x", "x"), (0, 1))  # pairs are equal if both texts are
    assert TaskRows(definition, pairs, pairs, Rows(("a", "b"), ("x", "y"), (0, 1))).shared["train"] == 1


# -- Directories: faults ---------------------------------------------------------------------------------


#: Changed files of a task whose splits hold 20 good rows each (None: the file is removed), and a part of the message.
REFUSED: list[tuple[dict[str, str | bytes | None], str]] = [
    # files
    ({"train.csv": None}, "'mine' has no train split: expected {folder}/train.parquet, .jsonl or .csv, found test.csv"),
    ({"train.csv": None, "train.xlsx": ""}, "/train.parquet, .jsonl or .csv, found test.csv, train.xlsx, validation.csv"),
    ({"train.jsonl": ""}, "contains train.csv and train.jsonl, but the train split must be one file"),
    ({"test.csv": ""}, "{folder}/test.csv contains no rows"),
    ({"validation.csv": "text,label\n"}, "Task 'mine' has no rows in its validation split"),
    ({"test.csv": None, "test.parquet": b"PAR1 and nothing"}, "{folder}/test.parquet cannot be read as parquet: "),
    ({"test.csv": "text,label\nпривет,1\n".encode("cp1251")}, "test.csv, line 2: byte 0xef at position 11 of"),
    # columns
    ({"train.csv": "phrase,label\na,0\n"}, "{folder}/train.csv has no column 'text': expected text (or text_a"),
    ({"train.csv": "text,label\n,0\n ,1\n"}, "{folder}/train.csv: column 'text' is empty in every row"),
    # cells
    ({"test.csv": 'label,text\n0,a\n1,"b\nb"\n0\n'}, "row 3: expected a cell for each of the 2 columns"),
    ({"test.csv": 'text,label\na,0\n"b,1\nc,0\n'}, "{folder}/test.csv, line 3: unexpected end of data. Quote texts"),
    (
        {"test.csv": None, "test.jsonl": '\n{"text": "a", "label": 7}\n'},
        "test.jsonl, row 2, column 'label': expected a label of the task",
    ),
    ({"test.csv": None, "test.jsonl": '{"text": null, "label": 0}'}, "column 'text': expected a text, got nothing"),
    # labels
    ({"train.csv": "text,label\na,0\nb,one\nc,1\n"}, "row 2, column 'label': expected an integer from 0, got \"one\""),
    ({"train.csv": "text,label\na,0\nb,-1\n"}, "row 2, column 'label': expected an integer from 0, got \"-1\". -1"),
    (
        {"train.csv": None, "train.jsonl": '{"text": "a", "label": [1]}\n{"text": "b", "label": 0}'},
        "expected one label, got [1]. Keep one",
    ),
    ({"test.csv": "text,label\na,2\n"}, "row 1, column 'label': expected a label of the task, got \"2\""),
    ({"source.json": '{"label_names": ["x", "y", "z"]}'}, "no training row of label 2 ('z'); rows per label: [10, 10, 0]"),
    ({"validation.csv": None, "train.csv": "text,label\na,0\nb,1\n"}, "Some went to the missing validation split"),
    ({"validation.csv": None, "train.csv": "text,label\na,0\n"}, "one training row and no validation split, so no row can be"),
    ({"test.csv": None, "validation.csv": None, "train.csv": "text,label\na,x\nb,x\n"}, "rows with at least two labels"),
    # source.json
    ({"source.json": "{"}, "{folder}/source.json is not valid JSON"),
    ({"source.json": '{"metric": "f1", "metric": "f1"}'}, "the key 'metric' stands twice. Fix or remove it."),
    ({"source.json": '{"lable_names": ["no", "yes"]}'}, "'lable_names' is not read. Did you mean 'label_names'?"),
    ({"source.json": '{"label_names": ["a", " "]}'}, "label_names must be a list of names, all different, got ['a', ' ']"),
    ({"source.json": '{"label_words": [["a"], {}]}'}, "label_words must be a list of names"),
    ({"source.json": '{"label_words": ["a", "b", "c"]}'}, "one of label_words for each of the 2 labels, got 3"),
    ({"source.json": '{"metric": "bleu"}'}, "metric must be one of accuracy, f1, macro_f1, got 'bleu'"),
    ({"source.json": '{"template": "{mask} {text:upper}"}'}, "template must hold each of {text}, {mask} once and no other"),
    ({"source.json": '{"causal_template": "{text} {mask}"}'}, "causal_template must hold each of {text} once"),
    ({"source.json": '{"metric": "f1", "label_names": ["a", "b", "c"]}'}, "and there are 3 labels. Give 'macro_f1' or"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "said"), REFUSED)
def test_what_is_wrong_is_named(tmp_path: Path, files: dict[str, str | bytes | None], said: str) -> None:
    folder = write_task(tmp_path, "mine", SINGLES, ending="csv")
    for file, content in files.items():
        if content is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said.replace("{folder}", str(folder)) in message(tmp_path)


def test_what_does_not_fit_a_registered_task_is_named(tmp_path: Path) -> None:
    folder = write_task(tmp_path, "qnli", [{"phrase": "a", "rank": 1}])
    assert "no column 'text_a': expected text_a and text_b, and label" in message(tmp_path, "qnli")
    folder = write_task(tmp_path, "sst2", SINGLES, ending="csv")
    (folder / "test.csv").write_text("text,label\na,2\n")
    assert "Task 'sst2' has the labels negative, positive, and every label needs" in message(tmp_path, "sst2")
    (folder / "source.json").write_text('{"label_names": ["a", "b", "c"]}')
    assert "names 3 labels, but task 'sst2' has 2: negative, positive" in message(tmp_path, "sst2")


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
    write_task(tmp_path, name, [{**row, **({"label": i % 2} if "label" in row else {})} for i in range(20)])
    rows = load(tmp_path, name)
    assert rows.task.kind == kind
    assert f"the registered task {name!r} has other columns, so these rows become a task of their own" in rows.notes[0]


def test_a_column_that_appears_twice_is_named(tmp_path: Path) -> None:
    folder = write_task(tmp_path, "mine", SINGLES, ending="csv")
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


@pytest.mark.parametrize(("name", "split"), [("dev.feather", "validation"), ("TEST.xls", "test")])
def test_a_file_that_is_meant_for_a_split_is_not_left_out(tmp_path: Path, name: str, split: str) -> None:
    folder = write_task(tmp_path, "mine", SINGLES, ending="csv")
    (folder / f"{split}.csv").rename(folder / name)
    text = message(tmp_path)
    assert (
        f"Task 'mine' has no {split} split, and {folder}/{name} is not read. Write it as {split}.parquet, .jsonl or .csv"
        in text
    )
    (folder / f"{split}.csv").write_bytes((folder / name).read_bytes())
    assert load(tmp_path, "mine").validation == load(tmp_path, "mine").test


def test_other_labels_under_the_name_of_a_registered_task_are_told_to_take_another_name(tmp_path: Path) -> None:
    rows = [{**row, "label": ("entailment", "not entailment")[row["label"]]} for row in PAIRS]
    remedy = "A task of this name is registered: if these rows are another task's, give it another name, such as my_rte"
    write_task(tmp_path, "rte", rows)
    assert remedy in message(tmp_path, "rte")
    write_task(tmp_path, "rte", rows, {"label_names": ["entailment", "no"]})
    assert remedy not in message(tmp_path, "rte")


# -- Streams ---------------------------------------------------------------------------------------------


def test_a_stream_names_each_task_once(tmp_path: Path) -> None:
    for name in ("mine", "sst2"):
        write_task(tmp_path, name, SINGLES)
    with pytest.raises(UsageError, match=r"The stream names 'mine' twice.*give the task another name, such as mine-2"):
        load_tasks("mine,sst2,mine", str(tmp_path))


def test_places_may_be_a_file_a_directory_and_the_demo(tmp_path: Path) -> None:
    """A task is read from the first place that has it."""
    write_task(tmp_path / "data", "mine", SINGLES)
    write_task(tmp_path / "data", "sst2", SINGLES)
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


def test_what_is_not_there_is_named_with_what_is(tmp_path: Path) -> None:
    write_task(tmp_path, "reviews", SINGLES)
    text = message(tmp_path, "reviws", UnknownNameError)
    assert "Unknown stream or task 'reviws'. Did you mean 'reviews'?" in text
    assert f"put it under {tmp_path}/NAME" in text
    text = message(tmp_path / "nowhere", kind=UsageError)
    assert f"'{tmp_path}/nowhere' does not exist. Give" in text and "'hub' or 'demo'" in text
    write_rows(tmp_path / "mood.csv", SINGLES)
    for data in (f"{tmp_path}/mood.cvs", [f"{tmp_path}/moods.csv", f"{tmp_path}/mood.csv"]):
        assert "Did you mean 'mood.csv'?" in refusal(data, None, UsageError)
    (tmp_path / "mood.csv").rename(tmp_path / "mood.cvs")
    assert "txt. Did you mean 'csv'? Give" in message(tmp_path / "mood.cvs", kind=UsageError)


# -- The hub ---------------------------------------------------------------------------------------------


def rows_of(**columns: list[Any]) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns)


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
    return refusal("hub", name, DataError)


def test_the_hub_is_read_by_the_tasks_own_columns_and_splits(hub: dict[Any, Any]) -> None:
    questions = [f"who {i}?" for i in range(20)]
    table = rows_of(question=questions, sentence=["I."] * 20, label=[0, 1] * 10, idx=list(range(20)))
    hub["nyu-mll/glue", "qnli", "train"] = hub["nyu-mll/glue", "qnli", "validation"] = table
    rows = load_tasks("qnli", "hub")[0]
    assert rows.test == Rows(tuple(questions), ("I.",) * 20, (0, 1) * 10)
    assert (len(rows.train), len(rows.validation)) == (18, 2)
    table = rows_of(text=["o", "s"] * 10, label=[0, 1] * 10)  # in SetFit/subj, objective is 0; here, subjective is
    hub["SetFit/subj", None, "train"] = hub["SetFit/subj", None, "test"] = table
    assert load_tasks("subj", "hub")[0].test.labels == (1, 0) * 10


def test_a_text_may_be_made_of_several_columns_of_the_hub(hub: dict[Any, Any]) -> None:
    table = rows_of(
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


def test_undecided_rows_of_the_hub_are_left_out_and_wrong_ones_named_by_their_own_number(hub: dict[Any, Any]) -> None:
    table = rows_of(premise=list("abcd"), hypothesis=list("efgh"), label=[0, -1, 1, 2])
    for split in ("train", "validation", "test"):
        hub["stanfordnlp/snli", None, split] = table
    assert load_tasks("snli", "hub")[0].train == Rows(("a", "c", "d"), ("e", "g", "h"), (0, 1, 2))
    for split in ("train", "validation", "test"):
        hub["stanfordnlp/snli", None, split] = rows_of(
            premise=["a", "b", None], hypothesis=["e", "f", "g"], label=[0, -1, 1]
        )
    with pytest.raises(BadDataError) as caught:
        load_tasks("snli", "hub")
    assert [row.file for row in caught.value.rows] == [
        f"stanfordnlp/snli:{split}" for split in ("train", "validation", "test")
    ]
    assert "snli:train, row 2, column 'text_a': expected a text, got nothing" in caught.value.rows[0].message


def test_what_the_hub_does_not_give_is_told(hub: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    hub["fancyzhx/ag_news", None, "train"] = rows_of(body=["a"], label=[0])
    assert "fancyzhx/ag_news:train has no column 'text'; it has body, label" in hub_message("ag_news")
    hub["fancyzhx/ag_news", None, "train"] = ConnectionError("Couldn't reach the Hub.\nlong\nstory")
    assert hub_message("ag_news") == (
        "Task 'ag_news' cannot be read from the hub (fancyzhx/ag_news, split train): Couldn't reach the Hub. "
        "Without a connection, give a directory with --data DIR, or --data demo."
    )
    monkeypatch.setattr(registry, "tasks", lambda: {"own": TaskDefinition("own", "single", ("a", "b"))})
    assert "There is no data for task 'own'. For data of your own, give --data DIR" in hub_message("own")


def test_a_set_in_hub_layout_is_read_by_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for split in ("train", "test"):
        write_rows(tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet", SINGLES)
    own = TaskDefinition("own", "single", ("a", "b"), hub=HubSource(str(tmp_path / "set")))
    monkeypatch.setattr(registry, "tasks", lambda: {"own": own})
    datasets.disable_progress_bars()
    try:
        rows = load_tasks("own", "hub")[0]
    finally:
        datasets.enable_progress_bars()
    assert rows.test.first == tuple(f"text {i}" for i in range(20))
    assert rows.test.labels == (0, 1) * 10


# -- Real data -------------------------------------------------------------------------------------------

REAL_NOTES = {
    path.parent.name: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(real_data.DIRECTORY.glob("*/source.json"))
}
TOKEN_TASKS = [name for name, notes in REAL_NOTES.items() if notes.get("kind") == "tokens"]


@pytest.mark.sampled(share=0.15)
@pytest.mark.skipif(not REAL_NOTES, reason=f"no real data at {real_data.DIRECTORY}")
@pytest.mark.parametrize("name", [name for name, notes in REAL_NOTES.items() if "label_names" in notes])
def test_a_real_task_is_read_whole(name: str) -> None:
    """Rows by split and label equal the counts in the task's notes, which count split-off validation rows as training rows."""
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


def test_a_file_beside_the_folders_of_tasks_is_named(tmp_path: Path) -> None:
    (tmp_path / "mood.csv").write_text("text,label\na,0\n")
    with pytest.raises(
        UsageError, match=r"has no folder of task 'mood', but the file mood\.csv\. Give --data .*mood\.csv"
    ):
        load_tasks("mood,sst2", tmp_path)


@pytest.mark.sampled(share=0.15)
@pytest.mark.parametrize("name", TOKEN_TASKS)
def test_a_real_task_that_labels_words_is_read_whole(name: str) -> None:
    rows = load(real_data.DIRECTORY, name)
    assert rows.task.entities == tuple(REAL_NOTES[name]["entities"]) and rows.notes == ()
    for part in (rows.train, rows.validation, rows.test):
        assert all(len(text.split(" ")) == len(tags) for text, tags in zip(part.first, part.labels, strict=True))
        assert max(max(tags) for tags in part.labels) < len(rows.task.labels) and any(map(any, part.labels))
