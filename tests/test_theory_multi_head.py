"""Thresholds and rates of scalar heads against 40-digit values, naive numpy and brute force."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from exact import REFERENCE, relative_error

from attnflow.theory import multi_head as mh

ELEMENTARY, ROOT = 1e-13, 1e-10


def test_critical_cosines_are_the_reference_values():
    for table, law in (("c_star", mh.critical_cosine), ("c_sharp", mh.sharp_critical_cosine)):
        for H, value in REFERENCE[table].items():
            assert relative_error(law(int(H)), float(value)) < ELEMENTARY


def test_critical_cosine_solves_its_quadratic():
    H = jnp.arange(1.0, 40.0)
    c = mh.critical_cosine(H)
    np.testing.assert_allclose(c**2 + (H - 1) * c, 1, rtol=1e-14)


@pytest.mark.parametrize("row", REFERENCE["beta_star"], ids=lambda r: f"n{r['n']}H{r['H']}")
def test_critical_betas_are_the_reference_values_also_where_they_are_formal(row):
    case = float(row["alpha"]), row["n"], row["H"]
    assert relative_error(mh.critical_beta(*case), float(row["value"])) < ELEMENTARY
    assert abs(mh.sharp_critical_beta(*case) - float(row["sharp"])) < ELEMENTARY * max(1, float(row["sharp"]))


def margin(alpha, beta, n, H):
    """Condition 8 for one of H equal heads at one of n orthonormal tokens, in numpy, over e^{alpha beta}."""
    f = alpha * np.exp(-alpha * beta) * np.ones(n)
    f[0] = alpha
    return np.sum(f[1:] ** 2) - np.linalg.norm(f) * (H - 1) * abs(f[0])


@pytest.mark.parametrize(("alpha", "n", "H"), [(1.0, 10, 2), (0.5, 64, 4), (1.5, 256, 3), (1.0, 40, 8)])
def test_condition_8_changes_sign_at_the_critical_beta(alpha, n, H):
    beta = float(mh.critical_beta(alpha, n, H))
    assert abs(margin(alpha, beta, n, H)) < 4e-13
    assert margin(alpha, beta - 1e-3, n, H) > 0 > margin(alpha, beta + 1e-3, n, H)


def test_no_beta_meets_condition_8_with_twelve_heads_and_122_tokens():
    n = jnp.arange(2, 123)
    assert bool(jnp.all(jax.vmap(lambda n: mh.critical_beta(1.0, n, 12))(n) < 0))
    assert mh.critical_beta(1.0, 123, 12) > 0
    fewest = mh.fewest_tokens(jnp.array([2, 3, 4, 8, 12, 16]))
    np.testing.assert_allclose(fewest, [2.618, 5.828, 10.908, 50.98, 122.99, 227.0], rtol=1e-4)
    assert margin(1.0, 1e-6, 122, 12) < 0 < margin(1.0, 1e-6, 123, 12)


def test_edges_of_the_critical_beta():
    assert mh.critical_beta(1.0, 10, 1) == jnp.inf and mh.sharp_critical_beta(1.0, 1, 1) == jnp.inf
    assert mh.critical_beta(1.0, 1, 2) == -jnp.inf
    for bad in ((0.0, 10, 2), (-1.0, 10, 2), (1.0, 0, 2), (1.0, 10, 0), (float("nan"), 10, 2)):
        with pytest.raises(ValueError, match="must be"):
            mh.critical_beta(*bad)
    with pytest.raises(Exception, match="must be > 0"):
        jax.block_until_ready(jax.jit(lambda a: mh.critical_beta(a, 10, 2))(-1.0))


def test_heterogeneous_thresholds_zero_their_own_margin():
    lam, n = np.array([1.0, 2.0]), 50
    beta = mh.heterogeneous_critical_beta(lam, n)
    assert relative_error(beta, [0.60968134420456549414, 1.509921225440601808]) < ROOT
    lam = np.array([0.7, 1.1, 2.5])
    for h, b in enumerate(mh.heterogeneous_critical_beta(lam, 400)):
        e = lam * np.exp(float(b) * lam)
        f = lam[h] * np.sqrt(np.exp(2 * float(b) * lam[h]) + 399)
        assert abs(lam[h] ** 2 * 399 / (f * (e.sum() - e[h])) - 1) < 1e-12


def test_heterogeneous_thresholds_of_equal_heads_are_the_critical_beta():
    equal = mh.heterogeneous_critical_beta([0.5] * 4, 64)
    assert relative_error(equal, jnp.full(4, mh.critical_beta(0.5, 64, 4))) < 1e-13
    assert mh.heterogeneous_critical_beta([3.0], 5)[0] == jnp.inf


@pytest.mark.parametrize("row", REFERENCE["phi"], ids=lambda r: r["lam"])
def test_clustering_rate_is_the_reference_value_also_where_it_underflows(row):
    case = float(row["lam"]), float(row["beta"]), row["n"]
    log_phi = float(mpmath.log(mpmath.mpf(row["value"])))
    assert relative_error(mh.log_clustering_rate(*case), log_phi) < ELEMENTARY
    if float(row["value"]) > 0:
        assert relative_error(mh.clustering_rate(*case), float(row["value"])) < ELEMENTARY


def test_clustering_rate_and_its_gradient_are_finite_everywhere():
    lam = jnp.array([-1e3, -1.0, 0.0, 1.0, 1e3, 1e6])
    for n in (2, 8):
        slope = jax.vmap(jax.grad(lambda s, n=n: mh.clustering_rate(s, 10.0, n)))(lam)
        assert np.all(np.isfinite(slope)) and np.all(np.isfinite(mh.clustering_rate(lam, 10.0, n)))


@pytest.mark.parametrize("row", REFERENCE["lambda_max_lambda_c"], ids=lambda r: f"n{r['n']}")
def test_fastest_and_inflection_strengths_are_the_reference_values(row):
    beta, n = float(row["beta"]), row["n"]
    assert relative_error(mh.fastest_strength(beta, n), float(row["lambda_max"])) < ELEMENTARY
    assert relative_error(mh.inflection_strength(beta, n), float(row["lambda_c"])) < ELEMENTARY


@pytest.mark.parametrize("n", [2, 50, 10**9])
def test_the_rate_is_flat_at_the_fastest_and_bends_at_the_inflection_strength(n):
    def rate(s):
        return mh.clustering_rate(s, 1.5, n)

    best, bend = mh.fastest_strength(1.5, n), mh.inflection_strength(1.5, n)
    assert abs(jax.grad(rate)(best)) < 1e-13 * rate(best)
    assert abs(jax.grad(jax.grad(rate))(bend)) < 1e-12 * rate(bend)
    assert bend > best


def test_strengths_have_their_limits_with_one_token():
    assert relative_error([mh.fastest_strength(2.0, 1), mh.inflection_strength(2.0, 1)], [0.5, 1.0]) < 1e-15


@pytest.mark.parametrize("row", REFERENCE["superadditivity_H2_delta_fail"], ids=lambda r: f"n{r['n']}")
def test_superadditivity_fails_beyond_the_reference_spread(row):
    mean, beta, n = float(row["lam_bar"]), float(row["beta"]), row["n"]
    limit = mh.superadditivity_limit(mean, beta, n)
    assert relative_error(limit, float(row["delta_fail"])) < ROOT
    inside, outside = limit - 1e-3, limit + 1e-3
    assert mh.superadditivity_gap(jnp.stack([mean - inside, mean + inside]), beta, n) > 0
    assert mh.superadditivity_gap(jnp.stack([mean - outside, mean + outside]), beta, n) < 0


def test_superadditivity_is_local():
    pairs = [(5.0, 5.0), (4.0, 6.0), (2.0, 8.0), (0.2, 9.8)]
    rates = [float(jnp.sum(mh.clustering_rate(jnp.array(p), 1.0, 8))) for p in pairs]
    np.testing.assert_allclose(rates, [0.1287, 0.1591, 0.2833, 0.0497], atol=5e-5)
    assert abs(mh.superadditivity_gap([0.5, 1.5], 1.0, 8) + 0.0347) < 5e-5
    assert mh.superadditivity_limit(3.0, 1.0, 8) == 0  # mean below the inflection: fails at once
    assert 0 < mh.superadditivity_limit(3.34, 1.0, 8) < 0.3
    assert relative_error(mh.superadditivity_limit(300.0, 1.0, 8), 300.0) < 1e-12  # only (0, 600) is slower


@pytest.mark.parametrize(
    ("H", "a", "value"),
    [(2, 2.006794164249958834, 0.28334698054551414), (3, 2.232189157884237, 0.58958620822904676173)],
)
def test_best_split_of_ten(H, a, value):
    strengths, best = mh.best_split(10.0, 1.0, 8, heads=H)
    assert relative_error(strengths[:-1], np.full(H - 1, a)) < ROOT and relative_error(best, value) < ROOT
    assert relative_error(jnp.sum(strengths), 10.0) < 1e-14


@pytest.mark.parametrize("total", [1.0, 3.0, 5.5, 6.3, 7.0, 20.0, 500.0])
def test_no_split_on_a_grid_beats_the_best_one(total):
    for H in (2, 3):
        cuts = np.sort(np.random.default_rng(0).uniform(0, total, (20000, H - 1)), axis=1)
        parts = np.diff(np.concatenate([np.zeros((20000, 1)), cuts, np.full((20000, 1), total)], axis=1), axis=1)
        tried = np.max(np.sum(2 * parts * np.exp(-np.logaddexp(parts, np.log(7.0))), axis=1))
        strengths, best = mh.best_split(total, 1.0, 8, heads=H)
        assert best >= tried and float(mh.split_bound(total, 1.0, 8, heads=H)) >= best * (1 - 1e-14)
        assert jnp.sum(strengths > mh.inflection_strength(1.0, 8)) <= 1


def test_one_head_takes_the_whole_strength():
    strengths, value = mh.best_split(3.0, 1.0, 8, heads=1)
    assert strengths.tolist() == [3.0] and value == mh.clustering_rate(3.0, 1.0, 8)


LAWS = {
    "critical_beta": lambda b: mh.critical_beta(b, 10, 2),
    "sharp_critical_beta": lambda b: mh.sharp_critical_beta(b, 10, 2),
    "heterogeneous": lambda b: mh.heterogeneous_critical_beta(jnp.stack([b, 2 * b]), 50)[0],
    "clustering_rate": lambda b: mh.clustering_rate(1.0, b, 8),
    "log_clustering_rate": lambda b: mh.log_clustering_rate(1.0, b, 8),
    "fastest_strength": lambda b: mh.fastest_strength(b, 8),
    "inflection_strength": lambda b: mh.inflection_strength(b, 8),
    "superadditivity_limit": lambda b: mh.superadditivity_limit(5.0, b, 8),
    "superadditivity_gap": lambda b: mh.superadditivity_gap([4.0, 6.0], b, 8),
    "best_split": lambda b: mh.best_split(10.0, b, 8, heads=3)[0][0],
    "split_bound": lambda b: mh.split_bound(10.0, b, 8, heads=3),
}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_laws_map_compile_and_have_the_derivative_of_finite_differences(law):
    b, h = jnp.array([0.9, 1.1]), 1e-5
    value, slope = jax.jit(jax.vmap(jax.value_and_grad(law)))(b)
    assert relative_error(value, [law(b[0]), law(b[1])]) < 1e-13
    difference = [(law(x + h) - law(x - h)) / (2 * h) for x in b]
    np.testing.assert_allclose(slope, difference, rtol=1e-7, atol=1e-9)


def test_laws_compute_in_double_precision_from_single():
    assert mh.critical_beta(jnp.float32(1.0), 10, 2).dtype == jnp.float64
    assert relative_error(mh.critical_beta(np.float32(0.5), 64, 4), 1.8497592204363136924) < ELEMENTARY
