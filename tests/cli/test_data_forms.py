"""A user's own data at the command line: one file with text labels, for all commands; the format changes no score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest

from forgetfree import cli
from forgetfree.ledger.ledger import Ledger

LABELS = ("angry", "joyful", "very sad")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, model_directory: Any) -> Path:
    """Return a folder with the rows of one task with text labels, in three forms, and a tiny model."""
    place = tmp_path_factory.mktemp("own")
    words = ["good", "bad", "film", "who", "news", "city", "a"]
    rows = [
        {
            "id": i,
            "review": " ".join(words[(i * k) % len(words)] for k in (1, 3, 7)[: i % 3 + 1]),
            "mood": LABELS[i % 3],
        }
        for i in range(60)
    ]
    frame = pandas.DataFrame(rows)
    frame.to_csv(place / "mood.csv", index=False)
    frame.to_parquet(place / "mood.parquet")
    datasets.DatasetDict(train=datasets.Dataset.from_pandas(frame)).save_to_disk(place / "mood.saved")
    (place / "model").symlink_to(model_directory("bert"))
    return place


FORMS = ("mood.csv", "mood.saved")
COMMON = ("--label-column", "mood", "--model", "model", "--readout", "linear", "--steps", "2", "--shots", "8")


def call(*arguments: str) -> int:
    return cli.main(list(arguments))


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for each in place.iterdir():
        (tmp_path / each.name).symlink_to(each)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_same_rows_in_two_forms_give_the_same_scores(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = set()
    for form in FORMS:
        more = ("--strategy", "grafting-continual", "--set", "sparsity=0.1", "--out", f"out-{form}")
        assert call("run", "mood", "--data", form, *COMMON, *more) == 0
        said, source = capsys.readouterr().err, f"{form}['train']" if form == "mood.saved" else form
        assert (
            f"note: Task 'mood' ({source}): texts from 'review'; labels, in this order: angry, joyful, very sad; "
            in said
        )
        assert "validation rows split off from the 60, always the same." in said
        scores.add((here / f"out-{form}" / "grafting-continual" / "seed-0" / "scores.csv").read_text())
        results = json.loads((here / f"out-{form}" / "results.json").read_text())
        scores.add(results["data"]["fingerprints"]["mood"])
        config = json.loads((here / f"out-{form}" / "config.json").read_text())
        assert config["tasks"][0]["labels"] == list(LABELS) and config["run"]["label_column"] == ["mood"]
    assert len(scores) == 2
    out = f"out-{FORMS[0]}"
    assert call("predict", out, "good film") == 0
    assert capsys.readouterr().out.split("\t")[0] in LABELS
    assert call("ledger", "show", f"{out}/grafting-continual/seed-0/ledger.safetensors") == 0
    assert Ledger.load(f"{out}/grafting-continual/seed-0/ledger.safetensors").records[0].definition.labels == LABELS
    # The directory has all settings to repeat the run.
    assert call("run", "--config", f"{out}/config.json", "--out", "again") == 0
    again = (here / "again" / "grafting-continual" / "seed-0" / "scores.csv").read_text()
    assert again in scores


def test_a_file_is_a_task_of_its_own_name_for_run_and_graft(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "demo.csv").symlink_to(here / "mood.csv")  # demo is also the name of a registered stream
    assert call("run", "--data", "demo.csv", *COMMON, "--strategy", "continual-ft", "--out", "out") == 0
    results = json.loads((here / "out" / "results.json").read_text())
    assert (results["stream"], results["tasks"]) == ("demo", ["demo"])
    more = ("--sparsity", "0.1", "--out", "graft")
    assert call("graft", "feelings", "--data", "mood.csv", *COMMON, "--text-column", "review", *more) == 0
    results = json.loads((here / "graft" / "results.json").read_text())
    assert results["tasks"] == ["feelings"]
    assert "Task 'feelings' (mood.csv): labels, in this order: angry" in capsys.readouterr().err


def test_predict_finds_the_columns_that_its_run_was_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "blurbs.csv").write_text((here / "mood.csv").read_text().replace("review", "blurb", 1))
    named = ("--text-column", "mood=blurb", "--strategy", "continual-ft", "--out", "out")
    assert call("run", "mood", "--data", "blurbs.csv", *COMMON, *named) == 0
    (here / "new.csv").write_text("id,text,blurb\n7,one,two\n")
    (here / "other.csv").write_text("id,text\n7,one\n")
    for file, more, read in (
        ("new.csv", (), "two"),
        ("new.csv", ("--text-column", "text"), "one"),
        ("other.csv", (), "one"),
    ):
        capsys.readouterr()
        assert call("predict", "out", "--file", file, *more, "--json") == 0
        assert json.loads(capsys.readouterr().out)["text"] == read


def test_names_that_are_typed_are_those_of_the_disk_in_either_form_of_unicode(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, typed = "humeur_e\u0301te\u0301", "humeur_\u00e9t\u00e9"
    (here / f"{there}.csv").write_text((here / "mood.csv").read_text().replace("review", there, 1))
    named = ("--text-column", f"{typed}={typed}", "--strategy", "grafting-continual", "--set", "sparsity=0.1")
    assert call("run", typed, "--data", f"{typed}.csv", *COMMON, *named, "--out", there) == 0
    assert json.loads((here / there / "results.json").read_text())["tasks"] == [typed]
    for task in (there, typed):
        capsys.readouterr()
        assert call("predict", typed, "--task", task, "--file", f"{typed}.csv", "--keep", typed, "--json") == 0
        row, *_ = map(json.loads, capsys.readouterr().out.splitlines())
        assert row["task"] == typed and row[typed] == row["text"]
    assert call("export", typed, "--task", there, "--out", "model-of-its-own") == 0
    assert call("run", "--on", typed, "--without", there, "--out", "less") == 1
    assert f"learned only '{typed}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "fault", "code"),
    [
        ("run mood --data mood.csv", "has no column 'label': expected it in addition to the texts of ", 1),
        ("run mood --data mood.csv --label-column moood", "has no column 'moood', which label_column names", 1),
        ("run mood --data mood.csv --label-column id", "has 60 labels in 60 rows, but no label has two different texts", 1),
        ("run four --data four.csv", "has 4 rows, which are too few: after test rows are split off, none are left", 1),
        ("run mood --data mood.parquet --label-column mood --text-column id", "column 'id': expected a text, got", 1),
        ("run mood --data mood.csv --label-column mood --text-column mood", "Name each column only once", 2),
        ("run sst2 --data demo --text-column text", "The columns of the tasks of 'demo' are known", 2),
    ],
)  # fmt: skip
def test_wrong_data_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: str, fault: str, code: int
) -> None:
    (here / "four.csv").write_text("text,label\na,x\nb,y\nc,x\nd,y\n")
    assert call(*arguments.split(), "--model", "model", "--set", "sparsity=0.05") == code
    *_, error = capsys.readouterr().err.partition("forgetfree: error: ")
    assert fault in error
    assert not list(here.glob("runs/*"))
