"""The bound of Theorem 1 with fitted constants: it finds the constants of curves that have them, and is never below a curve."""

import numpy as np
import pytest

from attnflow.phases import BoundFit, fit_bound

TS = np.linspace(0.0, 30.0, 61)
BETAS = (8.0, 32.0, 128.0)


def test_constants_of_curves_of_that_form_are_found():
    true = BoundFit(0.03, 0.4, 1.2, 0.25, 1.0)
    found = fit_bound(BETAS, TS, [true(beta, TS) for beta in BETAS], until=[np.nan] * 3)
    assert np.allclose(found[:4], true[:4], rtol=1e-3)
    assert 1 <= found.slack < 1 + 1e-5


@pytest.mark.parametrize("until", [[np.nan] * 3, [10.0, 12.0, 14.0]])
def test_a_fitted_bound_is_above_every_curve_at_every_time(until):
    rng = np.random.default_rng(0)
    curves = [np.abs(np.sin(TS / 5)) * beta**-0.5 + 0.1 * rng.random(len(TS)) for beta in BETAS]
    found = fit_bound(BETAS, TS, curves, until=until)
    for beta, curve in zip(BETAS, curves, strict=True):
        assert np.all(found(beta, TS) >= curve * (1 - 1e-9))
    gaps = [found(b, TS) / c for b, c in zip(BETAS, curves, strict=True)]
    assert min(g.min() for g in gaps) < 1 + 1e-6  # and touches one
    inside = [g[~(t < TS)] for g, t in zip(gaps, until, strict=True)]
    assert np.isclose(np.exp(np.mean(np.log(np.concatenate(inside)))), found.slack, rtol=1e-6)


def test_distances_of_zero_are_met():
    found = fit_bound([4.0], TS, [np.zeros(len(TS))], until=[np.nan])
    assert all(np.isfinite(found)) and np.all(found(4.0, TS) >= 0)


def test_curves_that_do_not_match_the_times_are_refused():
    with pytest.raises(ValueError, match="2 curves of 61 times"):
        fit_bound([1.0, 2.0], TS, [TS], until=[np.nan])
