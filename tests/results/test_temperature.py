"""Temperature scaling: against a grid search, and a truth that is known."""

from __future__ import annotations

import numpy as np
import pytest

from forgetfree.results.answers import LabelAnswers
from forgetfree.results.temperature import HIGHEST, LOWEST, fitted_temperature


def drawn(n: int, labels: int, temperature: float, seed: int) -> LabelAnswers:
    """Answers whose softmax at ``temperature`` is the probability of each label."""
    random = np.random.default_rng(seed)
    logits = 3 * random.normal(size=(n, labels))
    shares = np.exp(logits / temperature)
    shares /= shares.sum(axis=1, keepdims=True)
    right = np.array([random.choice(labels, p=share) for share in shares])
    return LabelAnswers(logits.astype(np.float32), right)


def loss(answers: LabelAnswers, temperature: float) -> float:
    logits = answers.logits.astype(np.float64) / temperature
    of_labels = logits[np.arange(len(logits)), answers.labels]
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - of_labels))


@pytest.mark.sampled("3-1.0")
@pytest.mark.parametrize(("labels", "truth"), [(2, 0.6), (3, 1.0), (5, 2.5)])
def test_it_is_that_of_a_grid_search_and_near_the_truth(labels: int, truth: float) -> None:
    answers = drawn(300, labels, truth, seed=labels)
    grid = np.exp(np.linspace(np.log(0.2), np.log(8), 4001))
    best = min(grid, key=lambda t: loss(answers, t))
    assert fitted_temperature(answers) == pytest.approx(best, rel=2e-3)
    assert fitted_temperature(drawn(20_000, labels, truth, seed=7)) == pytest.approx(truth, rel=0.05)


def test_scaling_calibrates_and_leaves_the_answers() -> None:
    fitted, scored = drawn(2000, 3, 2.5, seed=1), drawn(2000, 3, 2.5, seed=2)
    after = scored.scaled(fitted_temperature(fitted))
    assert after.score("accuracy") == scored.score("accuracy")
    assert scored.ece > 0.12 and after.ece < 0.04


def test_answers_that_are_all_right_or_all_wrong_end_at_the_bounds() -> None:
    logits = np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0]])
    assert (
        LOWEST <= fitted_temperature(LabelAnswers(logits, np.array([0, 1, 0]))) < 0.05
    )  # none is better than another there
    assert fitted_temperature(LabelAnswers(logits, np.array([1, 0, 1]))) == pytest.approx(HIGHEST, rel=1e-3)


def test_labels_that_were_ruled_out_do_not_count() -> None:
    """A word that was cut off is answered for certain, whatever its label is."""
    answers = drawn(200, 2, 1.5, seed=3)
    lowest = np.finfo(np.float32).min
    cut = np.array([[0.0, lowest], [0.0, lowest]], dtype=np.float32)
    more = LabelAnswers(np.concatenate([answers.logits, cut]), np.concatenate([answers.labels, [0, 1]]))
    assert fitted_temperature(more) == pytest.approx(fitted_temperature(answers), rel=1e-3)
    assert fitted_temperature(LabelAnswers(cut[:1], np.array([1]))) == 1.0
