"""Noise on the sphere: the decay of correlations, the stationary law, its order, and paths fixed by the key."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from attnflow import AttentionField, Exponential, PreNorm, ScalarHeads, Softmax, layers, sphere
from attnflow.field import AbstractField
from attnflow.noisy import _diffuse, diffuse
from attnflow.theory import laplace


class Pull(AbstractField):
    """Every token drawn to the first axis by the gradient of strength * x_1."""

    strength: jax.Array

    def __call__(self, t, x, args=None):
        length = jnp.linalg.norm(x, axis=-1, keepdims=True)
        axis = jnp.broadcast_to(jnp.eye(1, x.shape[1], dtype=x.dtype), x.shape)
        return self.strength.astype(x.dtype) * length * sphere.project(x, axis)

    def scaled(self, x):
        return self(0.0, x), jnp.zeros((), x.dtype)

    def token_weights(self, x):
        return jnp.full(x.shape[0], 1 / x.shape[0], x.dtype)


def pull(strength):
    return Pull(jnp.asarray(float(strength)))


def attention(beta=1.0):
    return AttentionField(ScalarHeads([1.0]), Softmax(beta))


def kept(d, temperature, h):
    """E <x_{k+1}, x_k> of one step of size h: E (1 + 2 kappa h chi^2_{d-1})^{-1/2}, by quadrature."""
    law = stats.chi2(d - 1)
    return integrate.quad(lambda s: law.pdf(s) / np.sqrt(1 + 2 * temperature * h * s), 0, np.inf)[0]


@pytest.mark.parametrize("d", [2, 3, 6])
def test_correlation_decays_at_the_rate_of_the_laplacian(d, key):
    """E <x_t, x_0> against e^{-(d-1) kappa t}: four standard errors and the step's bias, kappa^2 t h (d-1) (d+2) of it."""
    n, temperature, h, ts = 10_000, 0.3, 1 / 128, np.array([0.0, 0.4, 1.0])
    x0 = sphere.uniform(key, n, d)
    seen = diffuse(pull(0), x0, ts, key=key, temperature=temperature, step=h, save_tokens=True).values["tokens"]
    cosine = np.sum(np.asarray(seen) * np.asarray(x0), axis=-1)
    law = np.exp(-(d - 1) * temperature * ts)
    bias = temperature**2 * ts * h * (d - 1) * (d + 2) * law
    assert np.all(np.abs(cosine.mean(axis=1) - law) <= 4 * cosine.std(axis=1) / np.sqrt(n) + bias + 1e-12)


@pytest.mark.slow
def test_weak_order_is_one(key):
    """Coarse steps decay as their own quadrature says, and that differs from the law by c h: halved steps, halved errors."""
    n, d, temperature = 200_000, 3, 0.5
    x0 = sphere.uniform(key, n, d)
    errors = []
    for h in (0.2, 0.1, 0.05):
        final = diffuse(pull(0), x0, np.array([0.0, 0.4]), key=key, temperature=temperature, step=h).final
        cosine = np.sum(np.asarray(final) * np.asarray(x0), axis=1)
        expected = kept(d, temperature, h) ** round(0.4 / h)
        assert abs(cosine.mean() - expected) < 4 * cosine.std() / np.sqrt(n)
        errors.append(expected - np.exp(-(d - 1) * temperature * 0.4))
    assert errors[0] > 10 * cosine.std() / np.sqrt(n)  # the bias of the coarse step is seen
    assert 1.6 < errors[0] / errors[1] < 2.1 and 1.6 < errors[1] / errors[2] < 2.1


@pytest.mark.parametrize("d", [2, 3])
def test_a_linear_pull_ends_in_the_von_mises_fisher_law(d, key, dtype):
    n, strength, temperature = 30_000, 1.5, 0.5
    x0 = sphere.uniform(key, n, d).astype(dtype)
    final = diffuse(pull(strength), x0, np.array([0.0, 6.0]), key=key, temperature=temperature, step=0.01).final
    assert final.dtype == dtype
    first = np.asarray(final)[:, 0]
    error = 4 * first.std() / np.sqrt(n) + 4e-3  # four standard errors and the step's bias
    assert abs(first.mean() - float(laplace.laplace_mean(d, strength / temperature))) < error
    # Twice the noise is another law, by far more than the error.
    assert abs(first.mean() - float(laplace.laplace_mean(d, strength / temperature / 2))) > 10 * error


def test_without_noise_it_is_the_residual_network(key, dtype):
    x0 = sphere.uniform(key, 7, 3).astype(dtype)
    quiet = diffuse(attention(), x0, np.linspace(0, 1, 3), key=key, temperature=0.0, step=0.1, save_tokens=True)
    network = layers(attention(), x0, 10, 0.1, save_tokens=True).values["tokens"][::5]
    assert np.abs(np.asarray(quiet.values["tokens"] - network)).max() < 20 * float(jnp.finfo(dtype).eps)
    assert int(quiet.stats["steps"]) == 10 and bool(quiet.ok)


def test_the_key_fixes_the_path(key):
    x0 = sphere.uniform(key, 5, 3)
    run = partial(diffuse, attention(), x0, np.array([0.0, 0.5, 0.5, 2.0]), temperature=0.3, step=0.1, save_tokens=True)
    first, again, other = run(key=key), run(key=key), run(key=jax.random.fold_in(key, 1))
    assert np.array_equal(first.final, again.final) and not np.allclose(first.final, other.final)
    tokens = np.asarray(first.values["tokens"])
    assert np.array_equal(tokens[1], tokens[2]) and np.array_equal(tokens[-1], first.final)
    assert int(first.stats["steps"]) == 20
    assert np.abs(np.linalg.norm(tokens, axis=-1) - 1).max() < 1e-14


def test_one_compilation_serves_all_temperatures(key):
    x0 = sphere.uniform(key, 4, 3)
    _diffuse._cached.clear_cache()
    for beta, temperature in ((1.0, 0.1), (2.0, 0.2), (3.0, 0.4)):
        diffuse(attention(beta), x0, np.array([0.0, 1.0]), key=key, temperature=temperature, step=0.25)
    assert _diffuse._cached._cache_size() == 1


@pytest.mark.slow
def test_lanes_and_gradients_follow_the_path(key):
    x0 = sphere.uniform(key, 4, 3)

    def end(temperature):
        field = AttentionField(ScalarHeads([1.0]), Exponential(1.0))
        return jnp.sum(
            diffuse(field, x0, np.array([0.0, 0.4, 1.0]), key=key, temperature=temperature, step=0.1).final[:, 0]
        )

    slope, h = jax.jit(jax.grad(end))(0.2), 1e-5
    both = jax.vmap(end)(jnp.array([0.2 + h, 0.2 - h]))
    assert abs((both[0] - both[1]) / (2 * h) - slope) < 1e-7
    assert abs(both[0] - end(0.2 + h)) < 1e-13


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0.0}, "`step` must be > 0"),
        ({"temperature": -1.0}, "`temperature` must be >= 0"),
        ({"temperature": np.ones(2)}, "`temperature` must be a number"),
        ({"ts": np.array([1.0, 0.0])}, "`ts` must be ascending"),
        ({"field": PreNorm(attention())}, "`field` must keep tokens on the sphere"),
        ({"x0": 2 * np.eye(3)}, "`x0` must lie on the unit sphere"),
        ({"x0": np.ones((2, 1))}, "d >= 2"),
    ],
)
def test_bad_input_is_named(change, message, key):
    given = {
        "field": attention(),
        "x0": np.eye(3),
        "ts": np.array([0.0, 1.0]),
        "temperature": 0.1,
        "step": 0.1,
    } | change
    with pytest.raises(ValueError, match=message):
        diffuse(given.pop("field"), given.pop("x0"), given.pop("ts"), key=key, **given)
