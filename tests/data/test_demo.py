"""The demo tasks: the same rows everywhere, and out of reach of a bag of words."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from forgetfree.data.demo import TASKS, load
from forgetfree.data.streams import STREAMS
from forgetfree.jobs.config import RunConfig
from forgetfree.jobs.option_file import read_options

ROWS_SHA256 = {
    "qnli": "4d52e257aff62e8cf09a3a5f15b84af17da1110939080b5f98b3ce69f3dcfc26",
    "ag_news": "5533eeb2f717bfe498d8ec58950f9cda5f7e87260a3ac1deb2f47c3424cdefd6",
    "who_did_it": "5a01e78698893dd3e10a8b1edfbcd434679470394a49a9f470176d819241c242",
    "was_it_kind": "928609912c55b7bf47035ce48faa7fb8ccf81508e2b8fd00f6022179ecea155d",
    "sst2": "3439f9bf98724d0c3e0a45a5d8c236649eb3a908805438a33bbad6ea1a1bd8bb",
}


def _text(row: tuple[str, str | None, int]) -> str:
    return " ".join(part for part in row[:2] if isinstance(part, str))


def test_tasks_in_stream_order() -> None:
    assert TASKS == ("qnli", "ag_news", "sst2", "who_did_it", "was_it_kind")


def test_unknown_task_names_the_known() -> None:
    with pytest.raises(KeyError, match=r"no task 'mnli'\. It has: qnli, ag_news, sst2, who_did_it"):
        load("mnli")


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_pinned(task: str) -> None:
    rows = json.dumps(load(task), ensure_ascii=True)
    assert hashlib.sha256(rows.encode()).hexdigest() == ROWS_SHA256[task]


@pytest.mark.parametrize("task", TASKS)
def test_no_row_occurs_twice(task: str) -> None:
    texts = Counter(row[:2] for rows in load(task).values() for row in rows)
    assert max(texts.values()) == 1


def test_every_qnli_question_has_both_labels_alike() -> None:
    for rows in load("qnli").values():
        balance: Counter[str] = Counter()
        for question, _, label in rows:
            balance[question] += 1 - 2 * label
        assert set(balance.values()) == {0}


def test_the_answer_names_the_actor_where_the_label_says_so_and_else_the_other() -> None:
    for rows in load("who_did_it").values():
        for sentence, answer, label in rows:
            found = re.fullmatch(r"The (\w+) \w+ the (\w+)\.", sentence)
            assert found and answer == f"The {found[1 if label else 2]}."


@pytest.mark.parametrize(
    ("task", "ceiling"),
    [("qnli", 0.60), ("ag_news", 0.45), ("sst2", 0.60), ("who_did_it", 0.55), ("was_it_kind", 0.60)],
)
def test_a_bag_of_words_stays_weak(task: str, ceiling: float) -> None:
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    splits = load(task)
    vectorizer = CountVectorizer(ngram_range=(1, 2))
    train = vectorizer.fit_transform([_text(row) for row in splits["train"]])
    classifier = LogisticRegression(max_iter=1000).fit(train, [row[2] for row in splits["train"]])
    test = vectorizer.transform([_text(row) for row in splits["test"]])
    assert classifier.score(test, [row[2] for row in splits["test"]]) < ceiling


# -- The run: make demo ----------------------------------------------------------------------------------


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the Makefile types to run the demo, without ``--out``, in the repository's directory."""
    repository = Path(__file__).parents[2]
    monkeypatch.chdir(repository)
    (line,) = re.findall(r"/forgetfree (run .*) --out ", (repository / "Makefile").read_text(encoding="utf-8"))
    return line.split()


def test_make_demo_gives_all_strategies_the_same_training(typed: list[str]) -> None:
    run, flag, file, *how = typed
    assert (run, flag, *how) == ("run", "--config", "--jobs", "auto")
    config = RunConfig.of(read_options(Path(file)))
    assert (config.stream, config.data, config.model) == ("demo", "demo", "minilm")
    assert STREAMS["demo"] == ("who_did_it", "ag_news", "was_it_kind")
    options = config.check().options
    assert list(options) == ["fine-tune", "continual-ft", "grafting-continual"]
    alike = ("steps", "batch_size", "optimizer", "learning_rate", "readout_learning_rate", "schedule", "dropout")
    for name in alike:
        assert len({getattr(each, name) for each in options.values()}) == 1, name
