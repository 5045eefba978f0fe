"""Sentences with a tag for each word: reading from files, refusals, and few-shot samples."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy
import pandas
import pytest
import tiny
from tagged import PEOPLE, tagged_task
from task_files import write_task

from forgetfree.data.columns import ReadOptions
from forgetfree.data.encoding import WordEncoder
from forgetfree.data.rows import Rows, few_rows_note, k_shot
from forgetfree.data.sources import load_task
from forgetfree.errors import BadDataError, DataError
from forgetfree.kinds.tagging import bio

ROWS = [
    {"tokens": ["Jane", "Smith", "lives", "in", "Rome"], "tags": ["B-PER", "I-PER", "O", "O", "B-LOC"]},
    {"tokens": ["nobody", "else"], "tags": ["O", "O"]},
    {"tokens": ["Rome"], "tags": ["B-LOC"]},
]


def write(folder: Path, rows: list[dict[str, Any]], source: dict[str, Any] | None = None) -> Path:
    """Write a task, and return the data directory."""
    return write_task(folder.parent, folder.name, rows, source).parent


def test_a_task_is_inferred_from_its_columns(tmp_path: Path) -> None:
    rows = load_task("ner", str(write(tmp_path / "ner", ROWS)))
    assert rows.task.kind == "tokens" and rows.task.metric == "f1" and rows.notes == ()
    assert rows.task.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")  # kinds of entities are sorted
    assert rows.train == Rows(("Jane Smith lives in Rome", "nobody else", "Rome"), (), ((3, 4, 0, 0, 1), (0, 0), (1,)))


def test_source_json_orders_the_kinds_and_may_name_one_that_training_lacks(tmp_path: Path) -> None:
    data = write(tmp_path / "ner", ROWS, {"kind": "tokens", "entities": ["PER", "ORG", "LOC"], "license": "none"})
    rows = load_task("ner", str(data))
    assert rows.task.entities == ("PER", "ORG", "LOC") and rows.train.labels[0] == (1, 2, 0, 0, 5)


def test_parquet_csv_and_numbered_tags_hold_the_same_rows(tmp_path: Path) -> None:
    names = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    numbered = [row | {"tags": [names.index(tag) for tag in row["tags"]]} for row in ROWS]
    data = write(tmp_path / "numbers", [{"tokens": r["tokens"], "ner_tags": r["tags"]} for r in numbered])
    (tmp_path / "numbers" / "source.json").write_text(json.dumps({"label_names": names}))
    write_task(tmp_path, "parquet", ROWS, ending="parquet")
    write_task(tmp_path, "csv", [{key: " ".join(cell) for key, cell in row.items()} for row in ROWS], ending="csv")
    read = [load_task(name, str(data)) for name in ("numbers", "parquet", "csv")]
    assert read[0].train == read[1].train == read[2].train and read[0].task.labels == tuple(names)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("I-PER I-PER B-PER O I-LOC", "B-PER I-PER B-PER O B-LOC"),  # IOB1: B- only after an entity of the same kind
        ("B-PER E-PER S-PER S-LOC", "B-PER I-PER B-PER B-LOC"),  # IOBES
        ("U-LOC B-ORG I-ORG L-ORG I-ORG", "B-LOC B-ORG I-ORG I-ORG B-ORG"),  # BILOU; no entity continues after its end
        ("B-PER I-LOC", "B-PER B-LOC"),
        ("B-PER I-PER O", "B-PER I-PER O"),
    ],
)
def test_other_schemes_become_bio(tags: str, expected: str) -> None:
    assert bio(tags.split()) == expected.split()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "row 4, column 'tags': expected a tag for each of 2 words, got 1 tag\\."),
        ({"tokens": ["a"], "tags": ["O", "O"]}, "expected a tag for the one word, got 2 tags"),
        ({"tokens": [], "tags": []}, "row 4, column 'tokens': expected words, got none"),
        ({"tokens": ["a", ""], "tags": ["O", "O"]}, "row 4, column 'tokens': expected words, none of them empty"),
        ({"tokens": ["a"], "tags": ["PER"]}, "row 4, column 'tags': expected tags O, B-X and I-X.*got 'PER'"),
        ({"tokens": ["a"], "tags": [3]}, "label_names in source.json, got 3"),
        ({"tokens": 5, "tags": ["O"]}, "row 4, column 'tokens': expected a list"),
        ({"tokens": ["a"]}, "row 4, column 'tags': expected a list"),
    ],
)  # fmt: skip
def test_a_bad_row_is_refused_by_its_number(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    data = write(tmp_path / "ner", [*ROWS, row], {"kind": "tokens"})
    with pytest.raises(BadDataError) as caught:
        load_task("ner", str(data))
    assert re.search(message, caught.value.rows[0].message)


PREFIXED, BARE = ["O", "B-PER", "I-PER"], ["O", "PER", "art/film"]


@pytest.mark.parametrize(
    ("tags", "names", "message"),
    [
        ([1, 2, 0, -100], PREFIXED, "a place in label_names, 0 to 2, got -100. -100 is no tag: it marks pieces of words"),
        ("1 2 0 -100", PREFIXED, "got -100. -100 is no tag: it marks pieces of words that training leaves out. Give whole"),
        ([-100, 0, 0, 0], None, "and label_names in source.json, got -100. -100 is no tag"),
        ([1, 2, 3, 1], PREFIXED, "expected a place in label_names, 0 to 2, got 3."),
        ([0, 0, 0, -1], PREFIXED, "expected a place in label_names, 0 to 2, got -1."),
        ("0 1 1 0", None, "label_names in source.json, got 0."),
        (["PER", "PER", "O", "PER"], None, "I-X for entities of kind X, got 'PER'. If PER is a kind of entity, write I-PER;"),
        (["B-PER", "I-PER", "O", "PER"], None, "got 'PER'. If PER is a kind of entity, write I-PER; words side by side are"),
        (["O", "O", "O", "art/film"], None, "If art/film is a kind of entity, write I-art/film;"),
        ([0, 1, 1, 0], BARE, "got 'PER'. If PER is a kind of entity, write I-PER in label_names;"),
        (["O", "O", "O", ""], None, "I-X for entities of kind X, got ''. Fix"),
        ("['O', 'O', 'O', 'O']", None, "I-X for entities of kind X, got \"['O',\". Fix"),
    ],
)  # fmt: skip
def test_a_tag_of_another_form_is_told_with_its_remedy(tmp_path: Path, tags: Any, names: Any, message: str) -> None:
    good: Any = [0, 0] if names and not isinstance(tags, str) else ["O", "O"]
    rows = [*[{"tokens": ["a", "b"], "tags": good}] * 3, {"tokens": list("abcd"), "tags": tags}]
    with pytest.raises(BadDataError) as caught:
        load_task("ner", str(write(tmp_path / "ner", rows, {"label_names": names} if names else {"kind": "tokens"})))
    assert message in caught.value.rows[0].message


def test_label_names_of_source_json_stand_for_those_of_a_class_label(tmp_path: Path) -> None:
    """Data sets such as Few-NERD name kinds without B- and I-."""
    features = {
        "tokens": datasets.List(datasets.Value("string")),
        "tags": datasets.List(datasets.ClassLabel(names=BARE)),
    }
    rows = {"tokens": [["Jane", "Smith", f"{i}"] for i in range(20)], "tags": [[1, 1, 0]] * 20}
    (tmp_path / "ner").mkdir()
    held = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    held.to_parquet(tmp_path / "ner" / "train.parquet")
    (tmp_path / "ner" / "source.json").write_text(json.dumps({"label_names": ["O", "I-PER", "I-film"]}))
    assert load_task("ner", str(tmp_path)).train.labels[0] == (1, 2, 0)


def test_kinds_that_look_alike_are_refused_unless_they_are_listed(tmp_path: Path) -> None:
    rows = [{"tokens": ["Jane", f"{i}"], "tags": [("B-PER", "B-Per", "B-PER\u200b")[i % 3], "O"]} for i in range(9)]
    with pytest.raises(
        DataError, match=r'"PER" .* and "PER.u200b" .* and "Per" .*which look alike.*name all'
    ) as caught:
        load_task("ner", str(write(tmp_path / "ner", rows)))
    assert "name all kinds of entities as entities in source.json" in str(caught.value)
    read = load_task("one", str(write(tmp_path / "one", rows, {"entities": ["PER", "LOC"]})))
    assert {label for labels in read.train.labels for label in labels} == {0, 1}
    assert 'entity "Per" (the first in row 2) is read as "PER"' in "".join(read.notes)
    read = load_task("two", str(write(tmp_path / "two", rows, {"entities": ["PER", "Per", "PER\u200b"]})))
    assert len({label for labels in read.train.labels for label in labels}) == 4


@pytest.mark.parametrize("beside", ["text", "sentence", "text_a"])
@pytest.mark.parametrize("named", [None, "ner_tags"])
def test_a_text_beside_words_and_tags_is_no_matter(tmp_path: Path, beside: str, named: str | None) -> None:
    rows = [{beside: " ".join(row["tokens"]), "tokens": row["tokens"], "ner_tags": row["tags"]} for row in ROWS]
    read = load_task("ner", str(write(tmp_path / "ner", rows)), options=ReadOptions.of(None, named))
    assert read.task.kind == "tokens" and read.train.labels[2] == (1,)


def test_what_no_model_can_learn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no entity in its train split"):
        load_task("ner", str(write(tmp_path / "ner", [ROWS[1]] * 3)))
    (tmp_path / "same.jsonl").write_text('{"tokens": ["a"], "tags": ["B-X"]}\n' * 2)
    with pytest.raises(DataError, match="has 1 label in 2 rows, but no label has two different texts"):
        load_task("same", str(tmp_path / "same.jsonl"))
    with pytest.raises(DataError, match="has no column 'tags'"):
        load_task("no", str(write(tmp_path / "no", [{"tokens": ["a"]}], {"kind": "tokens"})))
    with pytest.raises(DataError, match=r'unknown entity.*"B-LOC"'):
        load_task("few", str(write(tmp_path / "few", ROWS, {"entities": ["PER"]})))
    with pytest.raises(DataError, match=r"kind must be single, pair, tokens, .* got 'token'"):
        load_task("odd", str(write(tmp_path / "odd", ROWS, {"kind": "token"})))


def test_shots_are_sentences_of_each_kind() -> None:
    """The sample has three sentences of each kind, and three without entities; a sentence may hold several kinds."""
    whole = tagged_task("people", PEOPLE)
    rows, task = whole.train, whole.task
    few = k_shot(rows, task, 3, 0)
    held = Counter(kind for tags in few.labels for kind in {(tag + 1) // 2 for tag in tags if tag} or {0})
    assert held == {0: 3, 1: 3, 2: 3} and len(few) == 9
    assert few == k_shot(rows, task, 3, 0) != k_shot(rows, task, 3, 1)
    assert re.search(
        r"training sentences with (PER|LOC) entities.*, fewer than --shots 20", few_rows_note(rows, task, 20)
    )


@pytest.mark.parametrize("kind", ["bert", "roberta-mlm", "gpt2"])
def test_ids_are_those_of_the_whole_text_and_marks_stand_where_words_begin(kind: str) -> None:
    tokenizer = tiny.build(kind)[1]
    texts = (
        "lovely zebra film",
        "quartz",
        "the film was an awfulness of zymurgy",
    )  # some words have several tokens
    rows = Rows(texts, (), tuple((0,) * len(text.split()) for text in texts))
    for text, ids in zip(texts, WordEncoder(tokenizer, 100)(rows), strict=True):
        whole = tokenizer(text, return_offsets_mapping=True)
        assert [~i if i < 0 else i for i in ids] == whole["input_ids"]
        firsts: dict[int, int] = {}  # the space before a word belongs to the word
        for place, (start, end) in enumerate(whole["offset_mapping"]):
            if start < end:
                firsts.setdefault(text[: start + 1].count(" "), place)
        assert [place for place, i in enumerate(ids) if i < 0] == [firsts[word] for word in range(len(firsts))]
        assert len(firsts) == len(text.split())


def test_a_word_without_a_token_is_read_as_an_unknown_one() -> None:
    tokenizer = tiny.build("bert")[1]
    (ids,) = WordEncoder(tokenizer)(Rows(("a \u200b film",), (), ((0, 0, 0),)))
    assert [~i for i in ids if i < 0][1] == tokenizer.unk_token_id and sum(i < 0 for i in ids) == 3


def test_columns_of_words_and_tags_may_be_named(tmp_path: Path) -> None:
    data = str(write(tmp_path / "ner", [{"Words": row["tokens"], "NER": row["tags"]} for row in ROWS]))
    expected = load_task("ner", str(write(tmp_path / "usual" / "ner", ROWS)))
    assert load_task("ner", data, options=ReadOptions(("Words",), ("NER",))) == expected
    with pytest.raises(DataError, match=r"no column 'xyz'.*--label-column"):
        load_task("ner", data, options=ReadOptions(("Words",), ("xyz",)))


def test_rows_in_memory_may_have_numbered_tags_with_names_arrays_and_one_piece() -> None:
    names = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    numbered = {
        "tokens": [row["tokens"] for row in ROWS],
        "ner_tags": [[names.index(t) for t in row["tags"]] for row in ROWS],
    }
    tags = datasets.List(datasets.ClassLabel(names=names))
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "ner_tags": tags})
    held = datasets.Dataset.from_dict(numbered, features=features)
    frame = pandas.DataFrame({key: [numpy.array(cell) for cell in cells] for key, cells in row_lists(ROWS).items()})
    splits = [{split: rows for split in ("train", "validation", "test")} for rows in (ROWS, held, frame)]
    plain, named, arrays = [load_task("ner", {"ner": rows}) for rows in splits]
    assert plain == named == arrays
    whole = load_task(
        "ner", {"ner": [row | {"tokens": [f"w{i}", *row["tokens"][1:]]} for i, row in enumerate(ROWS * 7)]}
    )
    assert any("split off" in note for note in whole.notes)


def row_lists(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {key: [row[key] for row in rows] for key in rows[0]}


# -- One word and one tag per line, as in CoNLL's shared tasks --------------------------------------------------

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


def conll(folder: Path, train: str, ending: str = "conll", **splits: str) -> str:
    """Write a task's files, and return the data directory."""
    (folder / "ner").mkdir()
    for split, text in {"train": train, "validation": train, "test": train, **splits}.items():
        (folder / "ner" / f"{split}.{ending}").write_text(text, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("ending", ["conll", "bio", "txt"])
@pytest.mark.parametrize("text", [TWO, FOUR, TWO.replace("\n", "\r\n"), "\ufeff" + TWO], ids=["2", "4", "crlf", "bom"])
def test_words_and_tags_are_read_line_by_line(tmp_path: Path, text: str, ending: str) -> None:
    rows = load_task("ner", conll(tmp_path, text, ending))
    assert rows.task.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert rows.train == rows.test == EXPECTED
    assert rows.notes == ()


def test_comments_hashes_and_blanks_within_words(tmp_path: Path) -> None:
    text = "# id 7 domain=en\n#\tO\nNew York\tB-LOC\n\n# newdoc\nhere\tO\n"
    rows = load_task("ner", conll(tmp_path, text))
    assert rows.train.first == ("# New\u00a0York", "here")


def test_a_txt_beside_another_file_is_not_read(tmp_path: Path) -> None:
    data = conll(tmp_path, TWO)
    (tmp_path / "ner" / "train.txt").write_text("All that is known of these sentences.")
    assert load_task("ner", data).train == EXPECTED


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Jane\tB-PER\nSmith\n", 'expected a word and its tag, got "Smith" in line 2'),
        ("Jane\tPER\n", "expected a word and its tag, got "),
        ("Jane NNP B-PER\nSmith I-PER\n", 'expected 3 columns, as in the lines before, got "Smith I-PER" in line 2'),
        ("\n\nThis film is a joy.\n", 'expected a word and its tag, got "This film is a joy." in line 3'),
        ("Jane\tX-PER\n", "row 1, column 'tags': expected tags O, B-X and I-X"),
        ("-DOCSTART- -X- O O\n\n", "no rows"),
    ],
)
def test_what_is_no_tagged_word_is_refused_by_its_line(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(DataError) as caught:
        load_task("ner", conll(tmp_path, text))
    assert told in str(caught.value)
