"""The choice of a parent by linear probes, each compared with one that is fitted by hand, fold by fold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from tagged import tagged_stream
from torch.nn import functional as F

from forgetfree.data.rows import representative
from forgetfree.training import parents
from forgetfree.training.parents import better_parent, cross_validation, nearest_tasks, probe
from forgetfree.training.training_options import TrainingOptions

MakeStream = Callable[..., Any]
Array = np.ndarray[Any, Any]


# -- The rule --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "parent"),
    [
        ({"": (1.0, 0.5)}, ""),
        ({"": (1.0, 0.5), "mr": (0.9, 0.4)}, "mr"),
        ({"": (1.0, 0.5), "mr": (0.9, 0.5)}, ""),
        ({"": (1.0, 0.5), "mr": (1.0, 0.4)}, ""),
        ({"": (1.0, 0.5), "mr": (0.9, 0.4), "sst2": (0.8, 0.6)}, "mr"),
        ({"": (1.0, 0.5), "mr": (0.8, 0.4), "sst2": (0.5, 0.4), "cola": (0.7, 0.1)}, "sst2"),
        ({"": (1.0, 0.5), "mr": (0.5, 0.4), "sst2": (0.5, 0.3)}, "mr"),
        ({"": (math.inf, math.inf), "mr": (math.inf, math.inf)}, ""),
        ({"": (math.inf, math.inf), "mr": (3.0, 0.5)}, "mr"),
        ({"": (0.0, 0.0), "mr": (0.0, 0.0)}, ""),
        ({"": (1.0,), "mr": (0.99,), "sst2": (1.1,)}, "mr"),  # of texts, the loss alone
    ],
)
def test_a_parent_must_have_a_lower_loss_and_fewer_errors(found: dict[str, tuple[float, ...]], parent: str) -> None:
    assert better_parent(found) == parent
    for other in {*found} - {"", parent}:  # a run that never learned one of the others has the same tasks
        assert better_parent({name: its for name, its in found.items() if name != other}) == parent


# -- The probe -------------------------------------------------------------------------------------------


def drawn(labels: Sequence[int], width: int = 6) -> tuple[Array, Array]:
    """Features that tell labels apart in part, and the labels, mixed."""
    draw = np.random.default_rng(0)
    mixed = draw.permutation(np.array(labels))
    return mixed[:, None] * 0.5 + draw.normal(2.0, 3.0, (len(mixed), width)), mixed


def slow(features: Array, labels: Array, folds: int) -> Any:
    """The mean over rows of −ln p of the row's label, by the probe that is fitted to the other folds, and of its errors."""
    losses, errors = np.zeros((2, len(labels)))
    for others, held in StratifiedKFold(folds).split(features, labels):
        mean, spread = features[others].mean(0), features[others].std(0)
        probe = LogisticRegression(C=0.1, max_iter=300).fit((features[others] - mean) / spread, labels[others])
        shares = probe.predict_proba((features[held] - mean) / spread)
        for row, share in zip(held, shares, strict=True):
            losses[row] = -math.log(share[list(probe.classes_).index(labels[row])])
            errors[row] = probe.classes_[share.argmax()] != labels[row]
    return pytest.approx((losses.mean(), errors.mean()), rel=1e-6)


@pytest.mark.parametrize(
    ("counts", "folds"),
    [((9, 8, 6), 4), ((9, 8, 2), 2), ((3, 3), 3)],
    ids=["many rows", "few of a label", "few rows"],
)
def test_its_loss_and_errors_are_those_of_rows_that_it_was_not_fitted_to(counts: Sequence[int], folds: int) -> None:
    features, labels = drawn([7 + label for label, count in enumerate(counts) for _ in range(count)])
    assert cross_validation(features, labels) == slow(features, labels, folds)


def test_it_says_nothing_where_it_does_not_converge() -> None:
    """As it does not for many labels: a warning would fail the test."""
    draw, labels = np.random.default_rng(0), np.arange(240) % 30
    features = (draw.normal(size=(240, 3)) + 5 * labels[:, None]) @ draw.normal(size=(3, 200))
    features += 0.01 * draw.normal(size=(240, 200))
    assert math.isfinite(cross_validation(features, labels)[0])


def test_a_label_of_one_row_does_not_count() -> None:
    features, labels = drawn([0] * 9 + [1] * 8 + [2])
    others = labels != 2
    expected = slow(features[others], labels[others], 4)
    assert cross_validation(features, labels) == expected
    assert cross_validation(*drawn([0] * 9 + [1])) == (math.inf, math.inf)
    assert cross_validation(*drawn([0] * 9)) == (math.inf, math.inf)


def test_of_several_labels_a_row_it_is_the_mean_over_those_that_some_rows_have() -> None:
    features, one = drawn([0] * 9 + [1] * 8)
    other, all_have, one_has = np.roll(one, 3), np.ones_like(one), np.eye(len(one), dtype=int)[0]
    pairs = [slow(features, each, 4).expected for each in (one, other)]
    labels = np.stack([one, all_have, other, one_has], 1)
    assert cross_validation(features, labels) == pytest.approx(np.mean(pairs, axis=0), rel=1e-6)
    assert cross_validation(features, labels[:, [1, 3]]) == (math.inf, math.inf)


# -- Its rows --------------------------------------------------------------------------------------------


def test_it_reads_training_rows_and_as_many_for_validation(tiny_stream: MakeStream) -> None:
    stream, found = tiny_stream("bert", "linear", stream="ag_news", shots=2), []
    (task,) = stream.tasks
    assert (len(task.train), len(task.validation)) == (8, 12)
    for part in (task.train, task.validation.subset(representative(task.validation.targets, 8))):
        x, y, _ = part.batch(range(len(part)))
        with torch.no_grad():
            found.append((stream.model.eval().features(x).double().numpy(), y.numpy()))
    features, labels = (np.concatenate(each) for each in zip(*found, strict=True))
    expected = slow(features, labels, 4).expected
    assert probe(stream.model, task, TrainingOptions()) == pytest.approx(expected, rel=1e-4)


def test_words_are_probed_one_by_one() -> None:
    """Of a sentence, each word that is read is a row of features."""
    stream = tagged_stream(shots=4)
    task, read = stream.tasks[0], list[tuple[int, int]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parents, "cross_validation", lambda *arrays: read.append(tuple(map(len, arrays))))
        probe(stream.model, task, TrainingOptions())
    parts = (task.train, task.validation.subset(representative(task.validation.targets, len(task.train))))
    words = sum(sum(part.counts) for part in parts)
    assert read == [(words, words)] and words > sum(map(len, parts))


def test_where_a_readout_reads_no_features_the_loss_of_training_rows_counts(
    tiny_stream: MakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = tiny_stream("roberta-mlm", "prompt", stream="ag_news")
    monkeypatch.setattr(parents, "PROBED_TEXTS", 5)
    (task,) = stream.tasks
    rows = task.train.subset(representative(task.train.targets, 5))
    x, y, t = rows.batch(range(5))
    with torch.no_grad():
        expected = float(F.cross_entropy(stream.model.eval()(x, t), y))
    assert probe(stream.model, task, TrainingOptions()) == pytest.approx((expected,), rel=1e-5)


# -- Many tasks ------------------------------------------------------------------------------------------


def many(stream: Any, count: int) -> list[Any]:
    """Tasks of two rows each, no two the same."""
    rows = [task.train.subset([i, i + 1]) for i in range(0, 24, 2) for task in stream.tasks]
    task = stream.tasks[0]
    return [
        replace(task, definition=replace(task.definition, name=f"task {number}"), train=each)
        for number, each in enumerate(rows[:count])
    ]


def test_of_many_tasks_the_eight_nearest_are_probed_and_each_one_is_read_once(
    tiny_stream: MakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = tiny_stream("bert", "linear")
    model, (*earlier, new, next_one) = stream.model, many(stream, 19)
    read, features_of, centres = list[Any](), parents.features_of, dict[str, Any]()

    def noted(model: Any, rows: Any, *more: Any) -> Any:
        read.append(rows)
        return features_of(model, rows, *more)

    monkeypatch.setattr(parents, "features_of", noted)
    assert nearest_tasks(model, new, earlier[:16], centres) == [task.name for task in earlier[:16]]
    assert read == []
    found = nearest_tasks(model, new, earlier, centres)
    assert len(read) == 18

    with torch.no_grad():
        means = [model.eval().features(task.train.batch([0, 1])[0]).mean(0) for task in (*earlier, new)]
    distances = [float((mean - means[-1]).norm()) for mean in means[:-1]]
    nearest = sorted(range(17), key=distances.__getitem__)[:8]
    assert found == [earlier[number].name for number in sorted(nearest)]

    assert len(nearest_tasks(model, next_one, [*earlier, new], centres)) == 8
    assert len(read) == 19


def test_where_there_are_no_features_the_latest_of_many_are_asked(tiny_stream: MakeStream) -> None:
    stream = tiny_stream("roberta-mlm", "prompt")
    *earlier, new = many(stream, 18)
    assert nearest_tasks(stream.model, new, earlier, {}) == [task.name for task in earlier[-8:]]
