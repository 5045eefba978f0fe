"""Ordinary faulty data at the command line: bad rows, several files as a stream, notes before training."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

import forgetfree
from forgetfree import cli
from forgetfree.data.columns import ReadOptions
from forgetfree.data.rows import TaskRows
from forgetfree.data.sources import load_tasks
from forgetfree.errors import (
    BadDataError,
    DataError,
    ForgetfreeError,
    SeveralFaultsError,
    TaskError,
    UnknownNameError,
    UsageError,
)


def texts(count: int = 30) -> list[str]:
    words = ("good", "bad", "film", "who", "news", "city", "a")
    return [" ".join(words[(i * k) % 7] for k in (1, 3, 5)[: i % 3 + 1]) + f" {i}" for i in range(count)]


@pytest.fixture
def here(model_directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with two files, whose columns differ; three rows of the first are bad."""
    rows = [f"{text},{('no', 'yes')[i % 2]}" for i, text in enumerate(texts())]
    (tmp_path / "a.csv").write_text("\n".join(["review,stars", *rows, "alone", "empty,", "half,0.5"]))
    rows = [f"note {i},{text},{('sad', 'glad')[i % 2]}" for i, text in enumerate(texts())]
    (tmp_path / "b.csv").write_text("\n".join(["text,review,mood", *rows]))
    (tmp_path / "model").symlink_to(model_directory("bert"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMON = ("--model", "model", "--readout", "linear", "--steps", "2", "--shots", "4", "--device", "cpu")
BOTH = ("--data", "a.csv", "--data", "b.csv", "--label-column", "b=mood")


def call(*arguments: str) -> int:
    return cli.main(list(arguments))


@pytest.mark.parametrize("command", ["run", "graft"])
@pytest.mark.parametrize("check", [(), ("--check",)])
def test_every_command_tells_all_bad_rows(here: Path, command: str, check: tuple[str, ...], capsys: Any) -> None:
    assert call(command, "a", "--data", "a.csv", *COMMON, "--sparsity", "0.1", *check) != 0
    error = capsys.readouterr().err.split("forgetfree: error: ")[1].splitlines()
    assert error[0].startswith("3 bad rows in 1 file: ") and len(error) == 5
    assert [line.split()[:2] for line in error[2:]] == [["a.csv", "31"], ["a.csv", "32"], ["a.csv", "33"]]


def test_they_are_left_out_and_results_json_says_how_many(here: Path, capsys: Any) -> None:
    words = ("a", "--data", "a.csv", *COMMON, "--skip-bad-rows")
    left_out = {"train": {"rows": 3, "faults": {"too few cells": 1, "no label": 1, "not a label": 1}}}
    assert call("run", *words, "--strategy", "continual-ft", "--out", "run") == 0
    assert "3 bad train rows left out: no label (1), not a label (1), too few cells (1)" in capsys.readouterr().err
    assert json.loads(Path("run/results.json").read_text())["data"]["left_out"] == {"a": left_out}
    assert json.loads(Path("run/config.json").read_text())["run"]["skip_bad_rows"] is True
    assert call("run", "--config", "run/config.json", "--out", "again", "--check") == 0
    assert call("graft", *words, "--sparsity", "0.1", "--out", "graft") == 0
    assert json.loads(Path("graft/results.json").read_text())["data"]["left_out"] == {"a": left_out}


def test_python_has_the_list_of_bad_rows(here: Path) -> None:
    how: dict[str, Any] = {"model": "model", "steps": 2, "strategies": "continual-ft", "progress": False}
    with pytest.raises(BadDataError) as caught:
        forgetfree.run("a", data="a.csv", **how)
    assert [(each.file, each.row, each.what) for each in caught.value.rows] == [
        ("a.csv", 31, "too few cells"),
        ("a.csv", 32, "no label"),
        ("a.csv", 33, "not a label"),
    ]
    stream = forgetfree.load_stream(data="a.csv", model="model", skip_bad_rows=True)
    assert sum(len(getattr(stream.tasks[0], split)) for split in ("train", "validation", "test")) == 30
    from forgetfree.jobs.config import RunConfig
    from forgetfree.jobs.preflight import plan_of

    with pytest.raises(SeveralFaultsError) as told:
        plan_of(RunConfig(stream="a", data="a.csv", model="model", set={"steps": 0}, out="out"))
    assert told.value.rows == caught.value.rows and len(told.value.faults) > 1


def test_a_program_asks_for_a_plan_without_a_directory(here: Path) -> None:
    from forgetfree.jobs.config import RunConfig

    before = sorted(path.name for path in here.iterdir())
    columns: Any = {"text_column": ("review",), "label_column": ("mood",)}
    config = RunConfig(stream="b", data="b.csv", model="model", set={"steps": 2, "sparsity": 0.1}, **columns)
    assert [task["task"] for task in forgetfree.plan(config)["tasks"]] == ["b"]
    assert sorted(path.name for path in here.iterdir()) == before


# -- Mapped labels ---------------------------------------------------------------------------------------------

#: Labels in other capitals, with a typing error, and with rows to be left out.
TICKETS = [*["bug", "feature"] * 15, "feautre", "feautre", "Bug", "junk", "junk"]
MAPPED = ("feautre=feature", "Bug=bug", "junk=")


@pytest.fixture
def tickets(here: Path) -> list[dict[str, str]]:
    rows = [{"text": f"note {i}", "label": label} for i, label in enumerate(TICKETS)]
    Path("tickets.json").write_text(json.dumps(rows))
    return rows


def test_labels_are_read_as_others(tickets: list[dict[str, str]]) -> None:
    def read(*named: str, **tasks: Any) -> list[TaskRows]:
        return load_tasks(None, tasks or {"tickets": tickets}, options=ReadOptions.of(None, None, label_map=named))

    right = {"feautre": "feature", "Bug": "bug"}
    mended = [{**row, "label": right.get(row["label"], row["label"])} for row in tickets if row["label"] != "junk"]
    for named in (MAPPED, [f"tickets:{each}" for each in MAPPED]):
        (task,) = read(*named)
        assert task == read(tickets=mended)[0] and task.mapped == ("feautre", "Bug", "junk")
        assert '2 rows of label "feautre" read as "feature"' in task.notes[0]
        assert '2 rows of label "junk" left out' in task.notes[0]
    numbers = [{"text": f"note {i}", "label": i % 4} for i in range(40)]
    assert read("3=2", "1=", a=numbers, b=numbers)[0].task.labels == ("0", "2")
    assert [len(each.task.labels) for each in read("b:3=2", a=numbers, b=numbers)] == [4, 3]
    reals = [{"text": f"note {i}", "label": float(i % 4)} for i in range(40)]
    assert read("3=2", "1.0=", a=reals)[0].task.labels == ("0", "2")
    composed = [{"text": f"note {i}", "label": "café" if i % 2 else "thé"} for i in range(40)]
    (task,) = read(f" {unicodedata.normalize('NFD', 'café')} =bar, too", a=composed)  # in the form that a Mac writes
    assert task.task.labels == ("bar, too", "thé") and 'in this order: "bar, too", thé' in task.notes[0]
    written = [{"prompt": f"say {i}", "completion": f"it is {i}"} for i in range(40)]
    with pytest.raises(DataError, match="tasks with labels, but no task has labels"):
        load_tasks(None, {"a": written}, options=ReadOptions.of(None, None, label_map=["a=b"]))
    for named, message in (
        (["Bug=bug", "faetre=feature"], "no row has the label 'faetre'"),
        (["Bug=bug", "b:junk=bug"], "no row has the label 'b:junk'"),
        (["Bug"], "--map-label needs OLD=NEW or TASK:OLD=NEW, got 'Bug'"),
        (["tickets:=bug"], "--map-label needs OLD=NEW"),
        (["junk=bug", "junk=feature"], "gives 'junk' two new labels"),
    ):
        with pytest.raises(ForgetfreeError, match=message):
            read(*named)


def test_a_note_names_the_likely_twin_of_a_label(tickets: list[dict[str, str]]) -> None:
    with pytest.raises(DataError, match="Write them alike, or give --map-label Bug=bug; if"):
        load_tasks(None, {"tickets": tickets})
    (task,) = load_tasks(None, {"tickets": [row for row in tickets if row["label"] != "Bug"]})
    told = 'label "feautre" (2 rows) may be "feature" (15): --map-label feautre=feature merges them'
    assert told in task.notes[0] and task.notes[0].count("may be") == 1
    alike = [{"text": f"note {i}", "label": f"legal level{1 + i % 2}"} for i in range(20)]
    assert "may be" not in load_tasks(None, {"levels": alike})[0].notes[0]


def test_a_run_keeps_what_labels_are_read_as_also_on_top_of_another(tickets: list[dict[str, str]]) -> None:
    how: dict[str, Any] = {"model": "model", "steps": 2, "strategies": "bitfit", "progress": False, "shots": 2}
    read = {"text_column": "b=review", "label_column": "b=mood", "readout": "linear"}
    results = forgetfree.run(data=["b.csv", "tickets.json"], map_label=MAPPED, out="both", **how, **read)
    assert results.tasks == ["b", "tickets"]
    section = json.loads(Path("both/config.json").read_text())["run"]
    assert section["map_label"] == list(MAPPED)
    assert call("run", "--on", "both", "--without", "tickets", "--out", "one") == 0
    assert json.loads(Path("one/config.json").read_text())["run"]["map_label"] == []
    flags = [word for each in MAPPED for word in ("--map-label", each)]
    assert call("run", "--data", "tickets.json", *flags, "--on", "one", "--out", "again") == 0
    section = json.loads(Path("again/config.json").read_text())["run"]
    assert section["map_label"] == [f"tickets:{each}" for each in MAPPED]
    ledgers = [Path(run) / "bitfit/seed-0/ledger.safetensors" for run in ("both", "again")]
    assert ledgers[0].read_bytes() == ledgers[1].read_bytes()
    with pytest.raises(
        TaskError, match=r"expected 'new', got 'tickets'\. Name the task tickets, or rename the file to new"
    ):
        forgetfree.run("new", data="tickets.json", on="one", out="third")


# -- Several files ----------------------------------------------------------------------------------------------


def test_several_files_are_a_stream_with_columns_of_their_own(here: Path, plans: list[Any], capsys: Any) -> None:
    words = (*BOTH, "--text-column", "b=review", "--skip-bad-rows", *COMMON, "--strategy", "continual-ft")
    assert call("run", *words, "--out", "run") == 0
    notes = capsys.readouterr().err
    assert "Task 'a' (a.csv): texts from 'review' and labels from 'stars'" in notes and "Task 'b' (b.csv): " in notes
    assert json.loads(Path("run/results.json").read_text())["tasks"] == ["a", "b"]
    section = json.loads(Path("run/config.json").read_text())["run"]
    assert section["data"] == ["../a.csv", "../b.csv"] and section["text_column"] == ["b=review"]
    Path("again.toml").write_text(
        'stream = "b,a"\ndata = ["a.csv", "b.csv"]\ntext_column = "b=review"\nlabel_column = "b=mood"\nskip_bad_rows = true\n'
        'model = "model"\nsteps = 2\nstrategy = "continual-ft"\n'
    )
    assert call("run", "--config", "again.toml", "--check") == 0
    assert [each["task"] for each in plans[-1]["tasks"]] == ["b", "a"]
    assert call("run", "--config", "run/config.json", "--out", "again", "--check") == 0
    assert call("graft", "b", *words[:-2], "--sparsity", "0.1", "--check") == 0


def test_a_run_whose_columns_are_named_is_resumed_and_revised(here: Path) -> None:
    one = ("--label-column", "mood", "--text-column", "review", *COMMON, "--strategy", "continual-ft")
    assert call("run", "b", "--data", "b.csv", *one, "--out", "one") == 0
    assert call("run", "b", "--data", "b.csv", *one, "--out", "one", "--resume") == 0
    assert call("run", "--config", "one/config.json", "--out", "one", "--resume") == 0
    words = (*BOTH, "--text-column", "b=review", "--skip-bad-rows", *COMMON, "--strategy", "continual-ft")
    assert call("run", *words, "--out", "two") == 0
    assert call("run", "--on", "two", "--without", "a", "--out", "less") == 0
    section = json.loads(Path("less/config.json").read_text())["run"]
    assert section["label_column"] == ["b=mood"] and section["text_column"] == ["b=review"]


def test_the_same_in_python(here: Path) -> None:
    read = {"text_column": "b=review", "label_column": "b=mood", "skip_bad_rows": True, "model": "model", "shots": 4}
    stream = forgetfree.load_stream(data=["a.csv", Path("b.csv")], **read)
    assert [task.name for task in stream.tasks] == ["a", "b"]
    results = forgetfree.run(data=["a.csv", "b.csv"], steps=2, strategies="continual-ft", progress=False, **read)
    assert results.matrix("continual-ft").shape == (3, 2)


@pytest.mark.parametrize(
    ("named", "task", "meant"),
    [
        (["a=x", "a.b=y", "z"], "a", ("x",)),
        (["a=x", "a.b=y", "z"], "a.b", ("y",)),
        (["a=x", "a.b=y", "z"], "c", ("z",)),
        (["a=x=y", "a=z"], "a", ("x=y", "z")),
        (["a=x"], "b", ()),
    ],
)
def test_a_name_is_that_of_one_task_or_of_all(named: list[str], task: str, meant: tuple[str, ...]) -> None:
    assert ReadOptions.of(named, None).columns(task).texts == meant


def test_a_task_has_one_column_of_labels() -> None:
    with pytest.raises(UsageError, match=r"--label-column must be one name for task 'a', got x, y\."):
        ReadOptions.of(None, ["x", "y"]).columns("a")
    with pytest.raises(UnknownNameError, match=r"Unknown task in --label-column 'b'\."):
        load_tasks(None, {"a": [{"text": "x", "label": 0}]}, options=ReadOptions.of(None, "b=y"))


def test_columns_of_files_may_have_dots(tmp_path: Path) -> None:
    """Their names may begin with the name of their own file or of another."""
    rows = "".join(f"a text {i},{i % 2}\n" for i in range(20))
    files = [tmp_path / name for name in ("reviews.csv", "my.reviews.csv")]
    for path in files:
        path.write_text(f"reviews.text,reviews.stars\n{rows}")
    options = ReadOptions.of("reviews.text", "reviews.stars")
    reviews, mine = load_tasks(None, [str(path) for path in files], options=options)
    assert reviews.train.first[0].startswith("a text") and mine.task.labels == reviews.task.labels == ("0", "1")


def test_files_that_are_no_stream_are_refused(here: Path) -> None:
    (here / "other").mkdir()
    (here / "other" / "a.tsv").write_text("x")
    for paths, message in (
        (["a.csv", "other/a.tsv"], "would both be the task 'a'"),
        (["a.csv", "none.csv"], r"'none\.csv' does not exist\."),
        (["a.csv", "other"], "The stream contains no task"),  # a directory may hold tasks of any name
        ([{"text": "x", "label": 1}], "Rows must be given with the name of their task"),
    ):
        with pytest.raises(UsageError, match=message):
            load_tasks(None, paths)  # type: ignore[arg-type]


# -- Before training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [True, False])
def test_faults_of_every_sort_are_told_at_once(here: Path, check: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The first two tasks lack a column; the third has rows without a label or a text, and a label with a single row."""
    (here / "data" / "c").mkdir(parents=True)
    (here / "data" / "d").mkdir()
    (here / "data" / "c" / "train.csv").write_text("txt,label\nx,1\n")
    (here / "data" / "d" / "train.tsv").write_text("text\tlabel\nx\t1\n")
    (here / "data" / "d" / "test.csv").write_text("text,stars\nx,1\n")
    (here / "data" / "e").mkdir()
    rows = [f"text {i},{'ab'[i % 2]}" for i in range(100)]
    (here / "data" / "e" / "train.csv").write_text("\n".join(["text,label", *rows, "x,", ",a", "y,aa"]))
    words = ("run", "c,d,e", "--data", "data", *COMMON, "--out", "new")
    assert call(*words, *(["--check"] if check else [])) in (1, 2)
    said = capsys.readouterr().err
    for fault in (
        "c/train.csv has no column 'text'",
        "d/test.csv has no column 'label'",
        "no label (1)",
        "no text (1)",
    ):
        assert fault in said


# -- Texts that are too long ------------------------------------------------------------------------------------


def test_texts_that_are_cut_are_told_in_training_and_in_predict(here: Path, capsys: Any) -> None:
    rows = [f"{text},{('no', 'yes')[i % 2]}" for i, text in enumerate(texts())]
    (here / "c.csv").write_text("\n".join(["text,label", *rows, f"{'film ' * 70},no", f"{'was ' * 70},yes"]))
    words = ("run", "--data", "c.csv", *COMMON[:-4], "--strategy", "continual-ft", "--set", "max_length=40")
    assert call(*words, "--out", "run") == 0
    assert "note: Task 'c': 2 of 32 rows are longer than max_length=40 allows: 64 tokens" in capsys.readouterr().err
    assert call("predict", "run", "the film", "film " * 70) == 0
    said = capsys.readouterr().err
    assert "warning: 1 text longer than max_length=40 allows: 32 tokens cut off." in said
