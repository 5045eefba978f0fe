"""Certificates on problems whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import beta

from benchmarks.paper.bound import certified_error, on_grid, printed_bound, region_nats

DELTA = 0.05


@pytest.mark.parametrize(("errors", "rows", "nats"), [(20, 100, 0.0), (0, 50, 3.0), (300, 1000, 12.5), (99, 100, 1.0)])
def test_the_certificate_is_the_exact_limit_of_clopper_and_pearson(errors: int, rows: int, nats: float) -> None:
    exact = beta.isf(DELTA * math.exp(-nats), errors + 1, rows - errors)
    assert certified_error(errors, rows, nats, DELTA) == pytest.approx(exact, abs=1e-7)


def test_descriptions_too_long_for_a_probability_as_a_float_are_certified_all_the_same() -> None:
    """Without errors, (1 − p)^n = δ·e^(−nats) can be solved by hand."""
    by_hand = 1 - math.exp((math.log(DELTA) - 2000) / 8000)
    assert certified_error(0, 8000, 2000.0, DELTA) == pytest.approx(by_hand, abs=1e-8)
    assert certified_error(8000, 8000, 2000.0, DELTA) == 1.0


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
        places = (rounded / scale + 1) * (levels - 1) / 2  # no value need reach the grid's scale, a power of two
        assert len(rounded.unique()) <= levels
        assert levels > 4 or torch.allclose(places, places.round(), atol=1e-3)
    errors = [float((on_grid(values, levels) - values).square().sum()) for levels in (2, 4, 16)]
    assert errors[0] > errors[1] > errors[2]
    assert on_grid(torch.zeros(3), 4).tolist() == [0.0] * 3 and len(on_grid(torch.zeros(0), 4)) == 0


def test_of_many_useless_models_the_luckiest_is_not_certified_beyond_its_truth() -> None:
    """1,000 models all err on 40 % of new rows; the certificate must include the choice of the best model on 200 rows."""
    random, models, rows, truth = np.random.default_rng(0), 1000, 200, 0.4
    luckiest = random.binomial(rows, truth, size=(4000, models)).min(axis=1)
    missed = {int(k): certified_error(int(k), rows, math.log(models), DELTA) < truth for k in set(luckiest.tolist())}
    unpaid = {k: certified_error(k, rows, 0.0, DELTA) < truth for k in missed}
    noise = 2 * math.sqrt(
        DELTA / len(luckiest)
    )  # this is the worst case, in which the bound fails almost as often as it may
    assert np.mean([missed[int(k)] for k in luckiest]) <= DELTA + noise
    assert np.mean([unpaid[int(k)] for k in luckiest]) > 0.9
