"""Floors: scores without any fine-tuning. A model has learned a task only as far as it scores above them.

A bag of words is a logistic regression on TF-IDF features, for pairs also on the overlap of both texts; a linear probe is a
logistic regression on the features of a frozen backbone. Both are fitted to the training rows of the strategies. Where the
task is withheld, one classifier is fitted to the rows of all tasks. Where texts are the answers, the floor answers with the
text of the most similar training row.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forgetfree import registry
from forgetfree.core.precision import faster_precision
from forgetfree.core.readout_model import LINEAR, ReadoutModel
from forgetfree.data.examples import DatasetExamples, Examples
from forgetfree.data.rows import Rows, evenly, representative
from forgetfree.recipes import PrecisionChoice
from forgetfree.training.encoded_task import EncodedTask, features_of

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_WORD = re.compile(r"\w+")
#: Maximum number of training rows of a classifier: more rows would take minutes and hardly improve its score.
MOST_ROWS = 20_000


def bag_of_words(
    tasks: Sequence[EncodedTask], train: Sequence[Rows], test: Sequence[Rows], *, task_known: bool = True
) -> list[float | None]:
    """Return the score of a bag of words on each task; ``None`` where the kind has no such floor, or no text has a word.

    Args:
        tasks: the tasks of the rows, with labels as the readouts number them.
        train: for each task, the texts of ``task.train``.
        test: for each task, the texts of ``task.test``.
        task_known: whether each task has a classifier of its own.
    """
    if not (task_known or all("bag_of_words" in task.kind.floors for task in tasks)):
        return [None] * len(tasks)
    scores: list[float | None] = []
    for group in _groups(len(tasks), task_known):
        if not all("bag_of_words" in tasks[i].kind.floors for i in group):
            scores.append(None)
            continue
        chosen = [representative(tasks[i].train.targets, MOST_ROWS // len(group)) for i in group]
        labels = [labels_of_rows(tasks[i].train)[rows] for i, rows in zip(group, chosen, strict=True)]
        texts = [train[i].take(rows) for i, rows in zip(group, chosen, strict=True)]
        answers = word_answers(texts, np.concatenate(labels), [test[i] for i in group])
        scores += [
            None if predicted is None else _score(tasks[i], predicted)
            for i, predicted in zip(group, answers, strict=True)
        ]
    return scores


def word_answers(train: Sequence[Rows], labels: Integers, test: Sequence[Rows]) -> list[Integers | None]:
    """Return the labels that a bag of words predicts for test rows, part by part; ``None`` where no text has a word.

    The features of a pair are the words of the first text, of the second and of both (three numbers for each word), and the
    overlap of the two texts, see `overlap`.
    """
    from scipy.sparse import hstack, vstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    words, paired = TfidfVectorizer(token_pattern=r"\w+"), any(part.second for part in train)
    try:
        words.fit([text for part in train for texts in part.texts for text in texts])
    except ValueError:  # no word at all
        return [None] * len(test)
    weights = dict(zip(words.get_feature_names_out(), words.idf_, strict=True))

    def overlaps(part: Rows) -> Floats:
        return overlap(part.first, part.second or [""] * len(part), weights)

    scaler = StandardScaler().fit(np.concatenate([overlaps(part) for part in train])) if paired else None

    def read(part: Rows) -> Any:
        first = words.transform(part.first)
        if scaler is None:
            return first
        second = words.transform(part.second or [""] * len(part))
        return hstack([first, second, first.multiply(second), scaler.transform(overlaps(part))])

    classifier = _fitted(LogisticRegression(max_iter=1000), vstack([read(part) for part in train]), labels)
    return [classifier.predict(read(part)) for part in test]


def overlap(first: Sequence[str], second: Sequence[str], weights: Mapping[str, float]) -> Floats:
    """Return features of the overlap of two texts ``(n, 8)``, which are not linear in a bag of words.

    They are the cosine of both texts; the weight of the shared words, as a share of either text's weight and as a logarithm;
    and for either text the logarithms of the weight that is not shared and of the number of words. The weight of a word is its
    inverse document frequency; a word that no training row has weighs as much as the rarest.
    """
    rarest = max(weights.values(), default=1.0)
    rows = []
    for a, b in zip(first, second, strict=True):
        ours, theirs = _WORD.findall(a.lower()), _WORD.findall(b.lower())
        sets = {*ours}, {*theirs}, {*ours} & {*theirs}
        own, its, both = (sum(weights.get(word, rarest) for word in each) for each in sets)
        squares = [sum(weights.get(word, rarest) ** 2 for word in each) for each in sets]
        rows.append(
            [
                squares[2] / max(math.sqrt(squares[0] * squares[1]), 1e-9),
                *(both / max(own, 1e-9), both / max(its, 1e-9), math.log1p(both)),
                *(math.log1p(own - both), math.log1p(its - both), math.log1p(len(ours)), math.log1p(len(theirs))),
            ]
        )
    return np.array(rows).reshape(-1, 8)


def nearest_rows(tasks: Sequence[EncodedTask], train: Sequence[Rows], test: Sequence[Rows]) -> list[float | None]:
    """Return the score of answers copied from the most similar training row; ``None`` for tasks whose answers are labels.

    ``train`` and ``test`` have the texts of each task's training and test rows.
    """
    scores: list[float | None] = []
    for task, known, queries in zip(tasks, train, test, strict=True):
        chosen = evenly(len(known), MOST_ROWS)  # files may be sorted
        nearest = _most_similar(known.take(chosen).first, queries.first) if "nearest_row" in task.kind.floors else None
        if nearest is None:
            scores.append(None)
        else:
            right: Any = task.train.right  # type: ignore[union-attr]
            texts = [
                right[chosen[row]][0] for row in nearest
            ]  # in the form in which the model writes, as for test rows
            losses = torch.zeros(len(task.test.labels), device="cpu")
            answers: Any = task.kind.answers(task.definition, losses, task.test.labels, task.test)
            scores.append(replace(answers, texts=texts).score(task.definition.metric))
    return scores


def _most_similar(known: Sequence[str], queries: Sequence[str]) -> list[int] | None:
    """Return the index of the known text with the largest TF-IDF cosine for each query; ``None`` if none has a word."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(token_pattern=r"\w+")
    try:
        features = words.fit_transform(known)
    except ValueError:  # no word at all
        return None
    return [int((words.transform([text]) @ features.T).toarray().argmax()) for text in queries]


def linear_probes(
    tasks: Sequence[EncodedTask],
    model: ReadoutModel,
    *,
    task_known: bool = True,
    batch_size: int = 64,
    precision: PrecisionChoice = "fp32",
) -> dict[str, list[float | None]]:
    """Return the scores of linear classifiers on the model's frozen features, standardised, for each task.

    ``linear_probe`` takes the features of the model's readout, ``mean_probe`` the mean over a row's tokens in the last layer;
    one pass over the rows gives both. A score is ``None`` where there are no such features: a readout that is not linear reads
    logits of the whole vocabulary, and the mean of a row does not describe its single words, or a text to be written.

    Args:
        tasks: the tasks to score.
        model: the model whose backbone is probed.
        task_known: whether each task has a classifier of its own.
        batch_size: rows per forward pass.
        precision: the precision of forward passes.
    """
    scores: dict[str, list[float | None]] = {"linear_probe": [], "mean_probe": []}
    if precision == "auto":
        precision = faster_precision(model, tasks[0].train)
    for group in _groups(len(tasks), task_known):
        possible = {
            "linear_probe": model.readout in LINEAR,
            "mean_probe": model.readout != "mean" and all(_has_mean(tasks[i], model) for i in group),
        }
        here = [place for place in scores if possible[place]]
        for place in scores:
            if place not in here:
                scores[place] += [None] * len(group)
        if not here:
            continue

        def read(rows: Examples, here: Sequence[str] = here) -> npt.NDArray[np.float32]:
            features = features_of(model, rows, _read(model, here), batch_size=batch_size, precision=precision)
            array: npt.NDArray[np.float32] = features.numpy()
            return array

        rows = [_at_most(tasks[i].train, MOST_ROWS // len(group)) for i in group]
        features, labels = (np.concatenate([of(part) for part in rows]) for of in (read, labels_of_rows))
        test = [read(tasks[i].test) for i in group]
        ends = np.cumsum([len(each) for each in test])[:-1]
        for number, place in enumerate(here):
            answers = probe_answers(features[:, number], labels, np.concatenate(test)[:, number])
            scores[place] += [_score(tasks[i], each) for i, each in zip(group, np.split(answers, ends), strict=True)]
    return scores


def _read(model: ReadoutModel, places: Sequence[str]) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the features of P places in one pass ``(n, P, H)``."""
    if len(places) == 2:
        return model.features_and_mean
    alone: Callable[[Tensor], Tensor] = (
        model.features if places[0] == "linear_probe" else partial(model.pooled, layer=-1)
    )
    return lambda x: alone(x).unsqueeze(1)


def probe_answers(train: npt.NDArray[Any], labels: Integers, test: npt.NDArray[Any]) -> Integers:
    """Return the labels of test features ``(m, H)`` by a linear probe, fitted to training features ``(n, H)`` and labels."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    classifier = _fitted(make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)), train, labels)
    predicted: Integers = classifier.predict(test)
    return predicted


def _has_mean(task: EncodedTask, model: ReadoutModel) -> bool:
    return type(model).pooled is not ReadoutModel.pooled and "mean_probe" in task.kind.floors


def _groups(tasks: int, task_known: bool) -> list[list[int]]:
    """Return the numbers of the tasks that share a classifier."""
    return [[i] for i in range(tasks)] if task_known else [list(range(tasks))]


def _at_most(rows: Examples, count: int) -> Examples:
    return rows if len(rows) <= count else rows.subset(representative(rows.targets, count))


def labels_of_rows(rows: Examples) -> Integers:
    """Return the labels of all rows ``(n,)``, or of all words that are not cut off.

    Where a row has any number of labels, return 1 for each label that it has, else 0 ``(n, n_labels)``.
    """
    if isinstance(rows, DatasetExamples) or rows.words is None:
        labels: Integers = rows.labels.numpy()
        return labels
    labels = rows.batch(range(len(rows)))[1].numpy()
    return labels.reshape(len(rows), -1) if registry.kind(rows.kind).answer == "labels" else labels


def _fitted(classifier: Any, features: Any, labels: Integers) -> Any:
    """Return the fitted classifier: a constant one for a single label; one per label where rows have several labels."""
    from sklearn.dummy import DummyClassifier
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.multiclass import OneVsRestClassifier

    if labels.ndim > 1:
        classifier = OneVsRestClassifier(classifier)
    with warnings.catch_warnings():  # a floor that has not quite converged is still a floor
        warnings.simplefilter("ignore", ConvergenceWarning)
        # Tasks with few rows per label are usual.
        warnings.filterwarnings("ignore", "The number of unique classes|Label .* is present in all", UserWarning)
        return (classifier if len(np.unique(labels)) > 1 else DummyClassifier()).fit(features, labels)


def _score(task: EncodedTask, predicted: Integers) -> float:
    """Return the score of a classifier's labels for a task's test rows, or for those of their words that are not cut off."""
    width = 1 + max(int(predicted.max()), int(task.test.labels.max()), *task.classes, 1)
    logits = torch.eye(width, device="cpu")[torch.as_tensor(predicted.reshape(-1), dtype=torch.int64, device="cpu")]
    answers = task.kind.answers(task.definition, logits, task.test.labels, task.test)
    return answers.score(task.definition.metric)
