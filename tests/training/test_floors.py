"""Bags of words and linear probes, compared with direct calls of scikit-learn, and cases with nothing to fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from tagged import tagged_stream

from forgetfree import registry
from forgetfree.data.prompts import PromptEncoder
from forgetfree.data.rows import Rows
from forgetfree.data.sources import load_tasks
from forgetfree.kinds.tagging import TagAnswers, entity_f1
from forgetfree.models.loading import load_model
from forgetfree.tasks import TaskDefinition
from forgetfree.training import floors
from forgetfree.training.encoded_task import encode_task, sampled
from forgetfree.training.floors import bag_of_words, linear_probes, word_answers

TASKS = ["qnli", "ag_news", "sst2"]  # a pair, four labels, two labels


@pytest.fixture(scope="module")
def known(data_directory: Path, model_directory: Any) -> Any:
    """Return the tiny tasks, encoded, their model, and their rows as texts."""
    rows = load_tasks(",".join(TASKS), str(data_directory))
    loaded = load_model(str(model_directory("bert")), "linear")
    tasks = [encode_task(each, loaded, shots=4, seed=3) for each in rows]
    return tasks, loaded.model, [sampled(each, 4, 3) for each in rows], [each.test for each in rows]


def test_a_bag_of_words_is_what_scikit_learn_makes_of_the_same_rows(known: Any) -> None:
    tasks, _, train, test = known
    found = bag_of_words(tasks, train, test)
    for i in (1, 2):  # the tasks with one text per row
        words = TfidfVectorizer(token_pattern=r"\w+")
        fitted = LogisticRegression(max_iter=1000).fit(words.fit_transform(train[i].first), train[i].labels)
        assert found[i] == fitted.score(words.transform(test[i].first), test[i].labels)
    words = TfidfVectorizer(token_pattern=r"\w+").fit([*train[0].first, *train[0].second])

    def read(rows: Rows) -> Any:
        first, second = (words.transform(each).toarray() for each in (rows.first, rows.second))
        shared = scaler.transform(floors.overlap(rows.first, rows.second, weights))
        return np.concatenate([first, second, first * second, shared], axis=1)

    weights = dict(zip(words.get_feature_names_out(), words.idf_, strict=True))
    scaler = StandardScaler().fit(floors.overlap(train[0].first, train[0].second, weights))
    fitted = LogisticRegression(max_iter=1000).fit(read(train[0]), train[0].labels)
    assert found[0] == fitted.score(read(test[0]), test[0].labels)


def test_rows_without_a_word_have_no_bag_of_words() -> None:
    silent = Rows(("...", "!?"), (), (0, 1))
    assert word_answers([silent], np.array([0, 1]), [silent, silent]) == [None, None]


def test_a_probe_is_a_logistic_regression_on_standardised_features(known: Any) -> None:
    tasks, model, *_ = known
    found = linear_probes(tasks, model, batch_size=3)["linear_probe"]
    model.eval()
    for task, score in zip(tasks, found, strict=True):
        with torch.no_grad():
            train, test = (model.features(rows.batch(range(len(rows)))[0]).numpy() for rows in (task.train, task.test))
        scale = StandardScaler().fit(train)
        fitted = LogisticRegression(max_iter=1000).fit(scale.transform(train), task.train.labels.numpy())
        expected = fitted.predict(scale.transform(test))
        assert score == pytest.approx((expected == task.test.labels.numpy()).mean(), abs=1.01 / len(task.test))


def test_where_the_task_is_withheld_one_classifier_knows_all_labels(known: Any) -> None:
    tasks, model, train, test = known
    together = bag_of_words(tasks, train, test, task_known=False)
    labels = np.concatenate([task.train.labels.numpy() for task in tasks])
    answers = word_answers(train, labels, test)
    for task, predicted, score in zip(tasks, answers, together, strict=True):
        assert score == (predicted == task.test.labels.numpy()).mean()
    assert together != bag_of_words(tasks, train, test)
    assert linear_probes(tasks, model, task_known=False)["linear_probe"] != linear_probes(tasks, model)["linear_probe"]


def test_a_classifier_is_fitted_to_so_many_rows_and_a_single_label_is_all_it_knows(
    known: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, _, train, test = known
    monkeypatch.setattr(floors, "MOST_ROWS", 1)
    (score,) = bag_of_words(tasks[2:], train[2:], test[2:])
    assert score in [np.mean([label == one for label in test[2].labels]) for one in (0, 1)]


def test_other_readouts_have_no_probe(data_directory: Path, model_directory: Any) -> None:
    (rows,) = load_tasks("sst2", str(data_directory))
    loaded = load_model(str(model_directory("roberta-mlm")), "prompt")
    assert linear_probes([encode_task(rows, loaded, shots=4)], loaded.model)["linear_probe"] == [None]


def test_words_that_are_labelled_have_a_probe_and_no_bag_of_words() -> None:
    stream = tagged_stream()
    task = stream.tasks[0]
    assert bag_of_words([task], [Rows((), (), ())], [Rows((), (), ())]) == [None]
    stream.model.eval()

    def read(rows: Any, i: int) -> np.ndarray:
        with torch.no_grad():
            return stream.model.features(rows.batch([i])[0]).numpy()

    rows = task.train
    features = np.concatenate([read(rows, i) for i in range(len(rows))])
    labels = np.concatenate([rows.batch([i])[1] for i in range(len(rows))])
    scale = StandardScaler().fit(features)
    fitted = LogisticRegression(max_iter=1000).fit(scale.transform(features), labels)
    predicted, lengths = [], task.test.words.diff().tolist()
    for i, length in enumerate(lengths):
        found = fitted.predict(scale.transform(read(task.test, i))).tolist()
        predicted += found + [0] * (length - len(found))  # cut-off words get the label O
    names = task.definition.labels
    expected = entity_f1(TagAnswers(np.eye(len(names))[predicted], task.test.labels.numpy(), names, np.array(lengths)))
    (score,) = linear_probes([task], stream.model)["linear_probe"]
    assert score is not None and score == pytest.approx(expected, abs=0.06)  # rounding in a batch may change one word


def test_the_nearest_row_is_looked_for_in_all_parts_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a file may be sorted, and only some of them are compared."""
    monkeypatch.setattr(floors, "MOST_ROWS", 2)
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(floors, "_most_similar", lambda known, prompts: asked.append(known))
    task: Any = SimpleNamespace(definition=TaskDefinition("own", "generation", ()), kind=registry.kind("generation"))
    train = Rows(tuple("abcd"), (), (("x",),) * 4)
    assert floors.nearest_rows([task], [train], [train]) == [None]
    ((first, second),) = asked
    assert first in "ab"
    assert second in "cd"


def test_the_nearest_row_answers_as_the_model_writes() -> None:
    """If a chat template puts a thought before each answer, right texts contain it, and so do the floor's answers."""
    tokenizer = tiny.byte_level(causal=True)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
        "<|endoftext|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    definition = TaskDefinition("own", "generation", (), metric="exact_match", max_new_tokens=20)
    kind: Any = registry.kind("generation")
    rows = Rows(("great film", "terrible movie"), (), (("yes",), ("no",)))
    part = kind.encode(definition, rows, PromptEncoder(tokenizer, definition, 100), label=0, pad=0)
    task: Any = SimpleNamespace(definition=definition, kind=kind, train=part, test=part)
    assert floors.nearest_rows([task], [rows], [rows]) == [1.0]
