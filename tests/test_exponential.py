"""The exponentials against arithmetic with 50 digits, and their derivatives of several orders."""

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

from attnflow.exponential import excess, exp, exp2, small_exp2


def unit(dtype):
    return float(np.finfo(dtype).eps)


@pytest.mark.parametrize("function", [exp2, small_exp2])
def test_powers_of_two_are_right_to_three_rounding_units_over_the_whole_range(function, dtype):
    reach = 1000.0 if dtype == np.float64 else 100.0
    x = np.random.default_rng(0).uniform(-reach, reach, 100_000).astype(dtype)
    got = np.asarray(jax.jit(function)(x)).astype(np.longdouble)
    assert np.max(np.abs(got / np.exp2(x.astype(np.longdouble)) - 1)) <= 3 * unit(dtype)


def test_exponential_is_as_accurate_as_its_argument(dtype):
    x = np.linspace(-60, 60, 10_001).astype(dtype)
    error = np.abs(np.asarray(exp(jnp.asarray(x))).astype(np.longdouble) / np.exp(x.astype(np.longdouble)) - 1)
    assert np.all(error <= (2 + np.abs(x)) * unit(dtype))


def test_integers_give_exact_powers(dtype):
    i = np.arange(-100, 100).astype(dtype)
    assert np.array_equal(np.asarray(exp2(jnp.asarray(i))), np.exp2(i))


def test_out_of_range_arguments_stay_finite_and_nan_stays_nan(dtype):
    low, high, nan = exp2(jnp.asarray([-np.inf, np.inf, np.nan], dtype))
    assert low == np.finfo(dtype).tiny
    assert jnp.isfinite(high * jnp.asarray(1e3, dtype)) and high > 1e30
    assert jnp.isnan(nan)


def test_every_derivative_of_the_exponential_is_the_exponential(dtype):
    third = jax.jit(jax.vmap(jax.grad(jax.grad(jax.grad(exp)))))
    x = jnp.linspace(-3, 3, 31, dtype=dtype)
    assert np.max(np.abs(third(x) / jnp.exp(x) - 1)) < 10 * unit(dtype)
    second = jax.vmap(jax.grad(jax.grad(exp2)))(x)
    assert np.max(np.abs(np.asarray(second) / (np.log(2) ** 2 * np.exp2(np.asarray(x))) - 1)) < 10 * unit(dtype)


def test_bits_without_the_rule_would_have_no_slope(dtype):
    """Why the rule exists: the slope of the bare bits is that of the polynomial times a frozen power, or nothing."""
    with_rule = float(jax.grad(lambda x: exp2(x))(jnp.asarray(10.25, dtype)))
    bare = float(jax.grad(lambda x: small_exp2(x))(jnp.asarray(10.25, dtype)))
    assert abs(with_rule / (np.log(2) * 2**10.25) - 1) < 1e-6
    assert not abs(bare / (np.log(2) * 2**10.25) - 1) < 1e-2


def test_excess_keeps_relative_accuracy_down_to_consensus(dtype):
    t = np.concatenate([-np.logspace(1.5, -6, 60), np.logspace(-6, 1.5, 60)]).astype(dtype)
    with mp.workdps(50):
        exact = np.array([float(mp.mpf(float(a)) * mp.exp(float(a)) - mp.expm1(float(a))) for a in t])
    assert np.max(np.abs(np.asarray(excess(jnp.asarray(t))) / exact - 1)) < 60 * unit(dtype)
    slope = np.asarray(jax.vmap(jax.grad(excess))(jnp.asarray(t)))
    assert np.max(np.abs(slope / (t * np.exp(t.astype(float))) - 1)) < 60 * unit(dtype)
    assert excess(jnp.zeros((), dtype)) == 0


def test_excess_sums_to_the_relative_entropy():
    p = np.random.default_rng(1).dirichlet(np.ones(50))
    w = np.random.default_rng(2).dirichlet(np.ones(50))
    assert abs(float(np.sum(w * np.asarray(excess(jnp.asarray(np.log(p / w)))))) - np.sum(p * np.log(p / w))) < 1e-14
