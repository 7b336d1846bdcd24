"""Reductions against plain numpy: every method, kernel, dtype, key layout and transformation."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from exact import close

from attnflow.exponential import excess
from attnflow.reduce import Blocked, Dense, Differences, RandomBatch

METHODS = {"dense": Dense(), "blocked": Blocked(16, 8), "one tile": Blocked()}
H, N, K, E = 2, 37, 3, 4


def error(a, b):
    """Largest absolute difference."""
    return np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)))


def problem(dtype, *, per_head=False, beta=1.0, n=N, m=N, seed=0, zeros=True):
    """Queries, keys, values, weights (two of them 0)."""
    rng = np.random.default_rng(seed)
    lead = (H,) if per_head else ()
    q, keys, values = (rng.standard_normal(s) for s in ((H, n, K), (*lead, m, K), (*lead, m, E)))
    w = rng.uniform(0.5, 1.5, m)
    if zeros:
        w[[3, 5]] = 0
    return [jnp.asarray(a, dtype) for a in (beta * q, keys, values, w / w.sum())]


def numpy_sums(q, keys, values, w, causal=False):
    """(log-mass, mean, tanh sum with a shift, maximum), one head at a time, in float64."""
    out = []
    q, keys, values, w = (np.asarray(a, np.float64) for a in (q, keys, values, w))
    for h in range(len(q)):
        k, v = (a[h] if a.ndim == 3 else a for a in (keys, values))
        s = q[h] @ k.T
        mask = np.tril(np.ones(s.shape, bool)) if causal else np.ones(s.shape, bool)
        top = np.where(mask & (w > 0), s, -np.inf).max(1)
        e = np.where(mask, w * np.exp(np.where(mask, np.minimum(s - top[:, None], 300), 0)), 0)
        bent = np.where(mask, w * np.tanh(s - 0.5), 0)
        out.append((top + np.log(e.sum(1)), e @ v / e.sum(1, keepdims=True), bent @ v, top))
    return [np.stack(a) for a in zip(*out, strict=True)]


def sums(method, q, keys, values, w, causal=False):
    shift = jnp.full(q.shape[:2], 0.5, q.dtype)
    return [
        *method.log_mean(q, keys, values, w, causal=causal),
        method.sum(jnp.tanh, q, keys, values, w, shift=shift, causal=causal),
        method.maximum(q, keys, w, causal=causal),
    ]


def loss(method, causal, q, keys, values, w):
    """A scalar that feels every entry of log_mean and sum."""
    log_mass, mean, bent, _ = sums(method, q, keys, values, w, causal)
    return jnp.sum(jnp.sin(log_mass)) + jnp.sum(jnp.cos(mean)) + jnp.sum(jnp.sin(bent))


def numpy_loss(causal, *arrays):
    log_mass, mean, bent, _ = numpy_sums(*arrays, causal)
    return np.sum(np.sin(log_mass)) + np.sum(np.cos(mean)) + np.sum(np.sin(bent))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_sums_are_those_of_numpy(method, per_head, causal, dtype):
    arrays = problem(dtype, per_head=per_head)
    got = jax.jit(lambda *a: sums(method, *a, causal))(*arrays)
    for a, b in zip(got, numpy_sums(*arrays, causal), strict=True):
        assert a.dtype == dtype
        assert error(a, b) < 20 * np.finfo(dtype).eps


@pytest.mark.parametrize("beta", [60.0, 1e4])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_sums_do_not_overflow_at_any_temperature(method, beta, dtype):
    """Both sides of the switch to a running maximum; scores reach 1e5, so their rounding is what is left."""
    arrays = problem(dtype, beta=beta)
    got = jax.jit(lambda *a: method.log_mean(*a))(*arrays)
    rounding = 4 * np.finfo(dtype).eps * np.max(np.abs(numpy_sums(*arrays)[0]))
    for a, b in zip(got, numpy_sums(*arrays)[:2], strict=True):
        assert error(a, b) < rounding


@pytest.mark.parametrize("per_head,causal", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("method", [Dense(), Blocked(16, 8)], ids=["dense", "blocked"])
def test_derivatives_are_those_of_numpy(method, per_head, causal, dtype):
    """Forward mode against central differences of numpy for each argument, a weight of 0 included; reverse against forward."""
    arrays = problem(dtype, per_head=per_head, seed=1)
    rng = np.random.default_rng(2)
    directions = [rng.standard_normal(a.shape).astype(dtype) for a in arrays]
    directions[3] /= 50
    wide = [np.asarray(a, np.float64) for a in arrays]
    gradient = jax.jit(jax.grad(lambda *a: loss(method, causal, *a), argnums=(0, 1, 2, 3)))(*arrays)
    forward = jax.jit(lambda a, t: jax.jvp(lambda *b: loss(method, causal, *b), a, t)[1])
    for i, direction in enumerate(directions):
        size = 1e-7 if i == 3 else 1e-5  # a key that begins to count may bend the log-mass strongly
        step = size * direction.astype(np.float64)
        ends = [numpy_loss(causal, *wide[:i], wide[i] + sign * step, *wide[i + 1 :]) for sign in (1, -1)]
        expected = (ends[0] - ends[1]) / (2 * size)
        alone = tuple(d if i == j else np.zeros_like(d) for j, d in enumerate(directions))
        moved = np.float64(forward(tuple(arrays), alone))
        assert abs(moved - expected) < (1e-6 if dtype == np.float64 else 1e-3) * max(1, abs(expected))
        along = np.sum(np.float64(gradient[i]) * direction)
        assert abs(along - moved) < 1e3 * np.finfo(dtype).eps * max(1, abs(moved))


def test_derivative_in_a_weight_of_zero_is_not_zero():
    arrays = problem(np.float64)
    for method in (Dense(), Blocked(16, 8)):
        slope = jax.grad(lambda w: jnp.sum(method.log_mean(*arrays[:3], w)[0]))(arrays[3])  # noqa: B023
        log_mass, *_ = numpy_sums(*arrays)
        exact = np.sum(np.exp(np.asarray(arrays[0] @ arrays[1][3]) - log_mass))
        assert abs(slope[3] - exact) < 1e-12 * exact


def test_second_derivatives_agree_between_dense_and_blocked():
    q, keys, values, w = problem(np.float64, seed=3)

    def hessian_vector(method):
        value = lambda a: jnp.sum(jnp.sin(method.log_mean(a, keys, values, w)[1]))  # noqa: E731
        return jax.jit(lambda a: jax.jvp(jax.grad(value), (a,), (jnp.ones_like(a),))[1])(q)

    assert error(hessian_vector(Dense()), hessian_vector(Blocked(16, 8))) < 1e-13


@pytest.mark.parametrize("method", [Dense(), Blocked(16, 8)], ids=["dense", "blocked"])
def test_batches_are_their_members(method, dtype):
    """vmap over everything, and over the queries alone, of values and of gradients; one lane needs the running maximum."""
    one, two = problem(dtype, seed=4), problem(dtype, seed=5, beta=300.0)
    both = [jnp.stack(pair) for pair in zip(one, two, strict=True)]
    run = lambda *a: sums(method, *a)  # noqa: E731
    batched = jax.jit(jax.vmap(run))(*both)
    queries_only = jax.jit(jax.vmap(lambda q: run(q, *one[1:])))(both[0])
    slope = jax.grad(lambda q, keys: jnp.sum(jnp.sin(method.log_mean(q, keys, *one[2:])[0])), argnums=(0, 1))
    slopes = jax.jit(jax.vmap(slope))(both[0], both[1])
    eps = 40 * np.finfo(dtype).eps
    for lane, arrays in enumerate((one, two)):
        scale = np.max(np.abs(numpy_sums(*arrays)[0]))
        for a, b in zip(batched, numpy_sums(*arrays), strict=True):
            assert error(a[lane], b) < eps * max(1, scale)
        for a, b in zip(queries_only, numpy_sums(arrays[0], *one[1:]), strict=True):
            assert error(a[lane], b) < eps * max(1, scale)
        for a, b in zip(slopes, slope(*arrays[:2]), strict=True):
            assert error(a[lane], b) < eps * max(1, scale) * max(1, np.max(np.abs(b)))


def test_keys_of_weight_zero_change_nothing_even_where_they_dominate(dtype):
    """A key that does not count has a score 1e4 above the rest: no overflow, no NaN, no trace in value or gradient."""
    q, keys, values, w = problem(dtype, seed=6)
    keys = keys.at[3].set(1e4)
    kept = np.arange(N) != 3
    for method in (Dense(), Blocked(16, 8)):
        run = lambda k, v, u: method.log_mean(q, k, v, u)  # noqa: B023, E731
        for a, b in zip(run(keys, values, w), run(keys[kept], values[kept], w[kept]), strict=True):
            assert error(a, b) < 20 * np.finfo(dtype).eps
        slope = jax.grad(lambda k: jnp.sum(run(k, values, w)[1]))(keys)  # noqa: B023
        assert np.all(np.isfinite(slope)) and np.all(slope[3] == 0)


def test_causal_sums_see_no_later_key(dtype):
    """Changing the keys after token 20 leaves the rows up to it bit for bit as they were, and changes the later ones."""
    q, keys, values, w = problem(dtype, seed=7, zeros=False)
    later = np.arange(N) > 20
    other = jnp.where(later[:, None], 50 * keys, keys)
    for method in (Dense(), Blocked(16, 8)):
        a = method.log_mean(q, keys, values, w, causal=True)[1]
        b = method.log_mean(q, other, values, w, causal=True)[1]
        assert close(a[:, :21], b[:, :21], eps=1e-6 if dtype == np.float64 else 0.01)
        assert not close(a[:, 21:], b[:, 21:])


def test_a_maximum_over_tiles_is_the_maximum_of_scores_that_count():
    q, keys, _, w = problem(np.float64, seed=8)
    s = np.einsum("hnk,mk->hnm", q, keys)[..., np.asarray(w) > 0]
    assert error(Blocked(16, 8).maximum(q, keys, w), s.max(-1)) < 1e-14


def test_sums_are_differentiable_in_the_shift():
    q, keys, values, w = problem(np.float64, seed=9)
    shift = jnp.asarray(np.random.default_rng(0).standard_normal((H, N)))
    slope = lambda method: jax.grad(lambda c: jnp.sum(method.sum(excess, q, keys, values, w, shift=c)))(shift)  # noqa: E731
    assert error(slope(Dense()), slope(Blocked(16, 8))) < 1e-12


def test_relative_entropy_near_consensus_keeps_its_digits():
    """Scores 1e-8 apart: a deficit of 1e-16, below the rounding of log-mass minus mean score, is right to six digits."""
    rng = np.random.default_rng(0)
    x = np.array([1.0, 0, 0]) + 1e-4 * rng.standard_normal((N, 3)) * [0, 1, 1]
    w = np.full(N, 1 / N)
    # Only the deviations of the scores matter, and they are known exactly here.
    gaps = np.einsum("nk,mk->nm", x[:, 1:], x[:, 1:])
    t = gaps - np.mean(gaps, axis=1, keepdims=True)
    expected = np.mean(t**2, axis=1) / 2
    keys, ones, w = jnp.asarray(x[:, 1:]), jnp.ones((N, 1)), jnp.asarray(w)
    for method in (Dense(), Blocked(16, 8)):
        log_mass, _ = method.log_mean(keys[None], keys, ones, w)
        got = method.sum(excess, keys[None], keys, ones, w, shift=log_mass)[0, :, 0]
        assert np.max(np.abs(got / expected - 1)) < 1e-6


@pytest.mark.parametrize("queries,keys", [(20_000, 40), (40, 20_000), (32_769, 3)])
def test_sums_are_right_above_two_to_the_fourteen(queries, keys, dtype):
    arrays = problem(dtype, n=queries, m=max(keys, 8), seed=10)
    got = jax.jit(lambda *a: sums(Blocked(), *a))(*arrays)
    for a, b in zip(got, numpy_sums(*arrays), strict=True):
        assert error(a, b) < 200 * np.finfo(dtype).eps


def test_differences_reduce_as_dense_does():
    arrays = problem(np.float64)
    for a, b in zip(sums(Differences(), *arrays), sums(Dense(), *arrays), strict=True):
        assert np.array_equal(a, b)


def test_random_batches_are_unbiased_for_sums_and_say_their_error():
    """Mean of 400 draws of the USA sum within 5 standard errors; its spread is what `relative_error` announces."""
    q, keys, _, w = problem(np.float64, seed=11)
    ones = jnp.ones((N, 1))
    batches = jax.vmap(lambda key: RandomBatch(key, 16))(jr.split(jr.key(0), 400))
    mass = jax.vmap(lambda batch: batch.sum(jnp.exp, q, keys, ones, w)[..., 0])(batches)
    exact = np.exp(numpy_sums(q, keys, ones, w)[0])
    spread = np.std(mass, axis=0) / exact
    assert np.all(np.abs(np.mean(mass, axis=0) / exact - 1) < 5 * spread / 20)  # 5 standard errors of 400 draws
    said = np.sqrt(np.mean(np.asarray(jax.vmap(lambda b: b.relative_error(q, keys, w))(batches)) ** 2, axis=0))
    assert np.all((said > 0.5 * spread) & (said < 1.5 * spread))


def test_random_batches_are_biased_for_the_softmax():
    """The hypothesis dropped: the mean of log-masses is below the log-mass, by about half the squared relative error."""
    q, keys, values, w = problem(np.float64, seed=11)
    batches = jax.vmap(lambda key: RandomBatch(key, 16))(jr.split(jr.key(0), 400))
    log_mass, _ = jax.vmap(lambda batch: batch.log_mean(q, keys, values, w))(batches)
    assert np.all(np.mean(log_mass, axis=0) < numpy_sums(q, keys, values, w)[0])


def test_random_batches_refuse_causal_sums(key):
    with pytest.raises(ValueError, match="causal"):
        RandomBatch(key, 4).log_mean(*problem(np.float64), causal=True)
