"""Bad rows are all reported at once, with their kinds and counts, or left out."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from forgetfree.cli.refusal import fail
from forgetfree.data.bad_rows import BadRow
from forgetfree.data.columns import ReadOptions
from forgetfree.data.sources import load_task, load_tasks
from forgetfree.errors import BadDataError, DataError

GOOD = [f"text {i},{('no', 'yes')[i % 2]}" for i in range(20)]
SKIP = ReadOptions(skip_bad_rows=True)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two tasks: csv files with bad rows in two splits, and a jsonl file with broken lines."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    train = [*GOOD, "alone", "one,two,yes", 'x "y" z,yes', '"x" y,no', "empty,", "other,0.5"]
    for split, rows in (("train", train), ("test", [*GOOD, "new,maybe", "text,"])):
        (tmp_path / "a" / f"{split}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    lines = [json.dumps({"text": f"text {i}", "label": i % 2}) for i in range(20)]
    (tmp_path / "b" / "train.jsonl").write_text("\n".join([*lines, '{"text": "cut', "[1]", "", '{"label": 1}']))
    return tmp_path


#: Each bad row: its file, number and column, and its fault.
FAULTS = [
    ("a/train.csv", 21, "", "too few cells"),
    ("a/train.csv", 22, "", "too many cells"),
    ("a/train.csv", 24, "", "broken quotes"),
    ("a/train.csv", 25, "label", "no label"),
    ("a/train.csv", 26, "label", "not a label"),
    ("a/test.csv", 21, "label", "unknown label"),
    ("a/test.csv", 22, "label", "no label"),
    ("b/train.jsonl", 21, "", "no JSON object"),
    ("b/train.jsonl", 22, "", "no JSON object"),
    ("b/train.jsonl", 24, "text", "no text"),
]


def refused(*arguments: Any) -> BadDataError:
    with pytest.raises(BadDataError) as caught:
        load_tasks(*arguments)
    return caught.value


def found(error: BadDataError, root: Path) -> list[tuple[str, int, str, str]]:
    return [(str(Path(each.file).relative_to(root)), each.row, each.column, each.what) for each in error.rows]


def test_all_bad_rows_of_all_splits_and_tasks_are_found_at_once(data: Path) -> None:
    error = refused("a,b", str(data))
    assert found(error, data) == FAULTS
    assert error.rows[4].text == '"0.5"' and "expected a name" in error.rows[4].message
    (whole,) = error.faults
    assert whole == str(error) == str(pickle.loads(pickle.dumps(error)))


def test_they_are_told_in_one_table(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, head, *lines = str(refused("a,b", str(data))).split("\n")
    assert first.startswith("10 bad rows in 3 files: ") and "no label (2)" in first and "--skip-bad-rows" in first
    assert head.split() == ["file", "row", "column", "what", "text"]
    assert [(int(line.split()[1]), what in line) for line, (*_, what) in zip(lines, FAULTS, strict=True)] == [
        (row, True) for _, row, *_ in FAULTS
    ]
    fail(str(refused("a,b", str(data))), 1)
    assert len(capsys.readouterr().err.splitlines()) == 12


def test_a_long_table_is_cut_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "mood.csv").write_text("\n".join(["text,label", *GOOD, *(f"text {i}," for i in range(3000))]))
    error = refused("mood", str(tmp_path / "mood.csv"))
    assert len(error.rows) == 3000 and len(str(error).split("\n")) == 23
    assert str(error).endswith("\n  … and 2,980 more faults")


def test_what_is_wrong_with_a_table_is_told_beside_its_rows(data: Path) -> None:
    (data / "a" / "validation.csv").write_text("text,mood\nx,no\n")
    error = refused("a,b", str(data))
    assert found(error, data) == FAULTS and len(error.faults) == 2
    assert "validation.csv has no column 'label'" in error.faults[1] and error.others == error.faults[1:]
    assert str(error).startswith("2 faults:\n- 10 bad rows")


def test_they_are_left_out_where_that_is_asked_for(data: Path) -> None:
    first, second = load_tasks("a,b", str(data), "test", SKIP)
    assert (len(first.train) + len(first.validation), len(first.test)) == (21, 20)
    assert 'x "y" z' in first.train.first + first.validation.first  # as csv readers parse it
    assert first.left_out["train"] == {
        "rows": 5,
        "faults": dict.fromkeys(("too few cells", "too many cells", "broken quotes", "no label", "not a label"), 1),
    }
    assert first.left_out["test"] == {"rows": 2, "faults": {"unknown label": 1, "no label": 1}}
    assert "5 bad train rows left out: broken quotes (1), no label (1)" in first.notes[0]
    assert second.left_out["train"]["rows"] == 3 and "no JSON object (2), no text (1)" in second.notes[0]


def test_a_fault_of_every_row_is_one_of_the_table_and_never_left_out(tmp_path: Path) -> None:
    (tmp_path / "mood.csv").write_text("text,label\n" + "".join(f"text {i},{i},more\n" for i in range(30)))
    for options in (ReadOptions(), SKIP):
        with pytest.raises(DataError, match=r"row 1: .* All 30 rows are like this one\.$") as caught:
            load_task("mood", str(tmp_path / "mood.csv"), "test", options)
        assert "\n" not in str(caught.value)


def test_a_task_of_one_label_is_refused_where_bad_rows_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "mood.csv").write_text("text,label\na,good\nb,good\nc\n")
    with pytest.raises(DataError, match=r'every row has label "good"\. A task needs rows with at least two labels'):
        load_task("mood", str(tmp_path / "mood.csv"), "test", SKIP)


def test_a_row_with_two_faults_is_one_row(tmp_path: Path) -> None:
    rows = [{"text": f"{i}", "label": i % 2} for i in range(20)]
    error = refused(None, {"mood": [*rows, {"text": 3, "label": None}]})
    assert [each.what for each in error.rows] == ["no label", "no text"]
    assert error.rows[0].row == 20  # rows in memory count from 0
    assert isinstance(error.rows[0], BadRow) and str(error).startswith("1 bad row in 1 file")


def test_most_rows_say_whether_labels_are_names_or_numbers() -> None:
    """The first row repeats the header, as in concatenated files."""
    rows = [{"text": "text", "label": "label"}, *({"text": f"{i}", "label": i % 2} for i in range(20))]
    error = refused(None, {"mood": rows})
    assert [(each.row, each.what) for each in error.rows] == [(0, "label of another kind")]
    (read,) = load_tasks(None, {"mood": rows}, "test", SKIP)
    assert read.task.labels == ("0", "1")


def test_what_is_wrong_with_rows_hides_nothing_else(tmp_path: Path) -> None:
    """The faults are similar labels, a row without a second text, an unknown label, and a label with a single row."""
    rows = [{"text_a": f"{i}", "text_b": "b", "label": ("no", "yes")[i % 2]} for i in range(40)]
    bad = [{"text_a": "x", "text_b": " ", "label": "no"}, {"text_a": "y", "text_b": "b", "label": "Yes"}]
    test = [*rows, {"text_a": "z", "text_b": "b", "label": "maybe"}]
    error = refused(None, {"mood": {"train": [*rows, *bad], "test": test}})
    assert [(each.row, each.what) for each in error.rows] == [(40, "no text"), (40, "unknown label")]
    assert len(error.others) == 1 and "which look alike" in error.others[0]
    (rest,) = error.rest
    assert rest.task.labels == ("no", "yes") and len(rest.train) + len(rest.validation) == 41 and len(rest.test) == 40


def test_tagged_sentences(tmp_path: Path) -> None:
    good = "Jane\tB-PER\nruns\tO\n\n" + "".join(f"It{i}\tO\nruns\tO\n\nRome{i}\tB-LOC\n\n" for i in range(10))
    (tmp_path / "ner.conll").write_text(good + "no tag\n\nJane\tB-PER\nbad\nalso bad\nend\tO\n\n")
    error = refused("ner", str(tmp_path / "ner.conll"))
    assert [(each.row, each.what) for each in error.rows] == [(54, "no tag"), (56, "no tag")]
    read = load_task("ner", str(tmp_path / "ner.conll"), "test", SKIP)
    (tmp_path / "good.conll").write_text(good)
    assert read == load_task("ner", str(tmp_path / "good.conll"))
    assert read.left_out == {"train": {"rows": 2, "faults": {"no tag": 2}}} and "2 bad train rows" in read.notes[0]
    rows = [{"tokens": ["a", "b"], "tags": ["B-X", "O"]}] * 20
    bad = [{"tokens": ["a"], "tags": ["O", "O"]}, {"tokens": [], "tags": []}, {"tokens": ["a"], "tags": ["?"]}]
    error = refused("ner", {"ner": {"train": [*rows, *bad], "test": [*rows, {"tokens": ["a"], "tags": ["B-Y"]}]}})
    whats = ["words and tags differ", "no words", "unknown tag", "unknown entity"]
    assert [each.what for each in error.rows] == whats


def test_a_tsv_without_quotes_keeps_its_form_where_a_row_is_bad(tmp_path: Path) -> None:
    """In GLUE's files, a quote at the beginning of a cell is a plain character."""
    lines = [f'"half {i}\t{i % 2}' for i in range(20)]
    (tmp_path / "mood.tsv").write_text("\n".join(["text\tlabel", *lines[:10], "alone", *lines[10:]]))
    error = refused("mood", str(tmp_path / "mood.tsv"))
    assert [(each.row, each.what) for each in error.rows] == [(11, "too few cells")]
    assert load_task("mood", str(tmp_path / "mood.tsv"), "test", SKIP).train.first[0].startswith('"half')


def test_a_hostile_row_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    rows = [{"text": f"{i}", "label": i % 2} for i in range(20)]
    place = tmp_path / "a\n  b"
    place.mkdir()
    (place / "mood.jsonl").write_text("\n".join(map(json.dumps, [*rows, *[{"text": 1, "label": "\x1b[31m\n  x"}] * 2])))
    text = str(refused("mood", str(place / "mood.jsonl")))
    assert "\x1b" not in text and len(text.split("\n")) == 6
