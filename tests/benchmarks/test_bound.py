"""Certificates on problems whose truth is known."""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import pytest
import torch
from scipy.stats import beta, binom

from forgetfree.benchmarks.paper.bound import certified_error, on_grid, printed_bound, region_nats

DELTA = 0.05


@pytest.mark.parametrize(("errors", "rows", "nats"), [(20, 100, 0.0), (0, 50, 3.0), (300, 1000, 12.5), (99, 100, 1.0)])
def test_the_certificate_is_the_exact_limit_of_clopper_and_pearson(errors: int, rows: int, nats: float) -> None:
    exact = beta.isf(DELTA * math.exp(-nats), errors + 1, rows - errors)
    assert certified_error(errors, rows, nats, DELTA) == pytest.approx(exact, abs=1e-7)


def test_descriptions_too_long_for_a_probability_as_a_float_are_certified_all_the_same() -> None:
    """Without errors (1 − p)^n = δ·e^(−nats) can be solved by hand."""
    by_hand = 1 - math.exp((math.log(DELTA) - 2000) / 8000)
    assert certified_error(0, 8000, 2000.0, DELTA) == pytest.approx(by_hand, abs=1e-8)
    assert certified_error(8000, 8000, 2000.0, DELTA) == 1.0


def test_more_errors_and_longer_descriptions_are_certified_less() -> None:
    few, many = (certified_error(errors, 1000, 10.0, DELTA) for errors in (50, 100))
    short, long = (certified_error(50, 1000, nats, DELTA) for nats in (5.0, 100.0))
    assert 0.05 < few < many and short < few < long < 1


def test_the_papers_bound_says_nothing_at_the_papers_sizes() -> None:
    assert printed_bound(5000, 8192, DELTA) == pytest.approx(
        2 * math.sqrt((5000 * 32 * math.log(2) + math.log(20)) / 8192)
    )
    assert printed_bound(5000, 8192, DELTA) > 7.3


def test_a_region_costs_the_logarithm_of_how_many_there_are() -> None:
    assert region_nats(20, 2) == pytest.approx(math.log(190))
    assert region_nats(10_000_000, 100) == pytest.approx(math.log(math.comb(10_000_000, 100)), rel=1e-9)


def test_values_are_rounded_to_as_many_levels_as_are_paid_for() -> None:
    values = torch.tensor([0.9, -0.2, 0.4, -1.1, 0.05, 0.0])
    for levels in (2, 4, 16):
        rounded = on_grid(values, levels)
        scale = float(rounded.abs().max())
        places = (rounded / scale + 1) * (levels - 1) / 2  # a power of two as a scale of the grid need not be reached
        assert len(rounded.unique()) <= levels
        assert levels > 4 or torch.allclose(places, places.round(), atol=1e-3)
    errors = [float((on_grid(values, levels) - values).square().sum()) for levels in (2, 4, 16)]
    assert errors[0] > errors[1] > errors[2]
    assert on_grid(torch.zeros(3), 4).tolist() == [0.0] * 3 and len(on_grid(torch.zeros(0), 4)) == 0


def test_of_many_useless_models_the_luckiest_is_not_certified_beyond_its_truth() -> None:
    """1,000 models that all err on 40 % of new rows: choosing the best of them on 200 rows must be paid for."""
    random, models, rows, truth = np.random.default_rng(0), 1000, 200, 0.4
    luckiest = random.binomial(rows, truth, size=(4000, models)).min(axis=1)
    missed = {int(k): certified_error(int(k), rows, math.log(models), DELTA) < truth for k in set(luckiest.tolist())}
    unpaid = {k: certified_error(k, rows, 0.0, DELTA) < truth for k in missed}
    noise = 2 * math.sqrt(
        DELTA / len(luckiest)
    )  # this is the worst case, in which the bound fails almost as often as it may
    assert np.mean([missed[int(k)] for k in luckiest]) <= DELTA + noise
    assert np.mean([unpaid[int(k)] for k in luckiest]) > 0.9


def test_the_best_region_and_values_by_training_error_keep_their_certificate() -> None:
    """Entries of a linear model, two of twelve, each ±1: every such model is tried on 150 rows with a fifth of false labels.

    The truth is known: over all 2^12 inputs, each equally likely, a model's error is counted.
    """
    random, entries, rows, noise = np.random.default_rng(1), 12, 150, 0.2
    inputs = np.array(list(product((-1, 1), repeat=entries)))
    target = np.sign(inputs[:, 3] - inputs[:, 7] + 0.5)
    regions = list(combinations(range(entries), 2))
    models = [(region, signs) for region in regions for signs in product((-1, 1), repeat=2)]
    answers = np.array([np.sign(inputs[:, list(region)] @ signs + 0.5) for region, signs in models])
    wrong = (answers != target).mean(axis=1)
    truth = noise + (1 - 2 * noise) * wrong  # a false label makes a right answer wrong, and a wrong one right
    nats = region_nats(entries, 2) + 2 * math.log(2)
    assert math.exp(nats) == pytest.approx(len(models))
    held, limits = [], []
    for _ in range(300):
        drawn = random.integers(len(inputs), size=rows)
        labels = target[drawn] * np.where(random.random(rows) < noise, -1, 1)
        errors = (answers[:, drawn] != labels).sum(axis=1)
        best = int(errors.argmin())
        limits.append(certified_error(int(errors[best]), rows, nats, DELTA))
        held.append(limits[-1] >= truth[best])
    assert np.mean(held) >= 1 - DELTA
    assert np.mean(limits) < 0.5  # and it says something


def test_rows_with_a_fixed_number_of_each_label_are_covered_too() -> None:
    """Errors of two labels, 10 and 50 %, 100 rows each: their sum spreads less than a binomial (Hoeffding, 1956)."""
    random, truth = np.random.default_rng(2), 0.3
    counts = random.binomial(100, 0.1, 4000) + random.binomial(100, 0.5, 4000)
    failed = {k: certified_error(k, 200, 0.0, DELTA) < truth for k in set(counts.tolist())}
    assert np.mean([failed[k] for k in counts.tolist()]) <= DELTA
    assert counts.std() < binom(200, truth).std()
