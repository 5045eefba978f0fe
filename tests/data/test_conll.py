"""Files of a word and a tag a line, as CoNLL's shared tasks have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from forgetfree.data.rows import Rows
from forgetfree.data.sources import load_task
from forgetfree.errors import DataError

TWO = "Jane\tB-PER\nSmith\tI-PER\nlives\tO\nin\tO\nRome\tB-LOC\n\nnobody\tO\n\n\nRome\tB-LOC"
FOUR = """-DOCSTART- -X- -X- O

Jane NNP B-NP B-PER
Smith NNP I-NP I-PER
lives VBZ B-VP O
in IN B-PP O
Rome NNP B-NP B-LOC

-DOCSTART- -X- -X- O
nobody NN B-NP O

Rome NNP B-NP B-LOC
"""
EXPECTED = Rows(("Jane Smith lives in Rome", "nobody", "Rome"), (), ((3, 4, 0, 0, 1), (0,), (1,)))


def task(folder: Path, train: str, ending: str = "conll", **splits: str) -> str:
    """Write a task's files, and return the data directory."""
    (folder / "ner").mkdir()
    for split, text in {"train": train, "validation": train, "test": train, **splits}.items():
        (folder / "ner" / f"{split}.{ending}").write_text(text, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("ending", ["conll", "bio", "txt"])
@pytest.mark.parametrize("text", [TWO, FOUR, TWO.replace("\n", "\r\n"), "\ufeff" + TWO], ids=["2", "4", "crlf", "bom"])
def test_words_and_tags_are_read_line_by_line(tmp_path: Path, text: str, ending: str) -> None:
    rows = load_task("ner", task(tmp_path, text, ending))
    assert rows.task.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert rows.train == rows.test == EXPECTED
    assert rows.notes == ()


def test_comments_hashes_and_blanks_within_words(tmp_path: Path) -> None:
    text = "# id 7 domain=en\n#\tO\nNew York\tB-LOC\n\n# newdoc\nhere\tO\n"
    rows = load_task("ner", task(tmp_path, text))
    assert rows.train.first == ("# New\u00a0York", "here")


def test_a_txt_beside_another_file_is_not_read(tmp_path: Path) -> None:
    data = task(tmp_path, TWO)
    (tmp_path / "ner" / "train.txt").write_text("All that is known of these sentences.")
    assert load_task("ner", data).train == EXPECTED


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Jane\tB-PER\nSmith\n", 'line 2: expected a word and its tag, got "Smith"'),
        ("Jane\tPER\n", "line 1: expected a word and its tag, got "),
        ("Jane NNP B-PER\nSmith I-PER\n", 'line 2: expected 3 columns, as in the lines before, got "Smith I-PER"'),
        ("\n\nThis film is a joy.\n", 'line 3: expected a word and its tag, got "This film is a joy."'),
        ("Jane\tX-PER\n", "row 1, column 'tags': expected tags O, B-X and I-X"),
        ("-DOCSTART- -X- O O\n\n", "no rows"),
    ],
)
def test_what_is_no_tagged_word_is_refused_by_its_line(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(DataError) as caught:
        load_task("ner", task(tmp_path, text))
    assert told in str(caught.value)


def test_a_txt_that_is_a_split_and_holds_no_tags_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mood").mkdir()
    (tmp_path / "mood" / "train.csv").write_text("text,label\na joy,1\na bore,0\n")
    (tmp_path / "mood" / "dev.txt").write_text("text,label\na joy,1\n")
    with pytest.raises(DataError) as caught:
        load_task("mood", str(tmp_path))
    assert "dev.txt, line 1: expected a word and its tag" in str(caught.value)
