"""The compiler computes what numpy computes, at the sizes where one release did not (jax 0.10.2, jax-ml/jax#39103)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnflow.reduce import Blocked
from attnflow.sphere import project

SIZES = [16_385, 20_000, 32_769, 100_001]


def tokens(n, dtype):
    x = np.random.default_rng(0).standard_normal((n, 3))
    matrix = np.random.default_rng(1).standard_normal((3, 3))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(dtype), matrix.astype(dtype)


def wrong(got, expected, dtype):
    """Number of tokens off by more than rounding."""
    scale = np.max(np.abs(expected))
    return int(np.sum(np.abs(np.asarray(got) - expected) > 50 * np.finfo(dtype).eps * scale))


@pytest.mark.parametrize("n", SIZES)
def test_sum_of_squares_of_a_product_per_token(n, dtype):
    x, matrix = tokens(n, dtype)
    expected = np.sum((x.astype(np.float64) @ matrix.T.astype(np.float64)) ** 2, axis=1)
    per_token = jax.jit(lambda m, x: jax.vmap(lambda a: jnp.sum((m @ a) ** 2))(x))(matrix, x)
    at_once = jax.jit(lambda m, x: jnp.sum((x @ m.T) ** 2, axis=-1))(matrix, x)
    assert wrong(per_token, expected, dtype) == 0
    assert wrong(at_once, expected, dtype) == 0


@pytest.mark.parametrize("n", SIZES)
def test_tangential_power_of_one_head_per_token(n, dtype):
    x, matrix = tokens(n, dtype)
    wide, m = x.astype(np.float64), matrix.astype(np.float64)
    push = wide @ m.T
    tangential = push - np.sum(push * wide, axis=1, keepdims=True) * wide
    got = jax.jit(lambda m, x: jnp.sum(project(x, x @ m.T) ** 2, axis=-1))(matrix, x)
    assert wrong(got, np.sum(tangential**2, axis=1), dtype) == 0
    by_token = jax.jit(lambda m, x: jax.vmap(lambda a: jnp.sum(project(a, m @ a) ** 2))(x))(matrix, x)
    assert wrong(by_token, np.sum(tangential**2, axis=1), dtype) == 0


@pytest.mark.parametrize("n", SIZES)
def test_attention_of_many_queries_to_few_keys(n, dtype):
    x, matrix = tokens(n, dtype)
    keys, w = x[:64], np.full(64, 1 / 64, dtype)
    wide, k = x.astype(np.float64) @ matrix.astype(np.float64), keys.astype(np.float64)
    e = np.exp(wide @ k.T)
    mass, mean = np.log(e.mean(1)), e @ k / e.sum(1, keepdims=True)
    got_mass, got_mean = jax.jit(lambda q: Blocked().log_mean(q[None], keys, keys, w))((x @ matrix).astype(dtype))
    assert wrong(got_mass[0], mass, dtype) == 0
    assert wrong(got_mean[0], mean, dtype) == 0


@pytest.mark.parametrize("n", SIZES)
def test_gradient_of_the_power_per_token(n, dtype):
    x, matrix = tokens(n, dtype)
    wide, m = x.astype(np.float64), matrix.astype(np.float64)
    got = jax.jit(jax.grad(lambda x, m: jnp.sum(jax.vmap(lambda a: jnp.sum((m @ a) ** 2))(x))))(x, matrix)
    assert wrong(got, 2 * wide @ m.T @ m, dtype) == 0
