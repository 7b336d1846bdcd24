"""Quantities for jit, vmap and grad: coupled, two atoms, circle, divergence; laws projected, atomic, uniform; observables."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from exact import close, relative_error

from attnflow import AttentionField, ScalarHeads, Softmax, solve, sphere, transport
from attnflow.transport import w2, w2_to, w2_to_subspace

METRICS = ["chordal", "geodesic"]


class Weighted:
    """A field as far as the observables look: its token weights."""

    def __init__(self, w):
        self.w = w

    def token_weights(self, x):
        return jnp.asarray(self.w, x.dtype)


def clouds(dtype, n=24, m=18, d=3):
    x, y = sphere.uniform(jr.key(0), n, d), sphere.uniform(jr.key(1), m, d)
    a, b = (jr.uniform(jr.key(k), (size,)) + 0.1 for k, size in ((2, n), (3, m)))
    return x.astype(dtype), y.astype(dtype), (a / a.sum()).astype(dtype), (b / b.sum()).astype(dtype)


def central(f, x, v, step):
    """Directional derivative by central differences."""
    return (f(x + step * v) - f(x - step * v)) / (2 * step)


def entropic(cost, a, b, epsilon, sweeps=2000):
    """min <P, C> + epsilon KL(P | a b) in plain numpy: value at the fixed point of Sinkhorn's iteration."""
    f, g = np.zeros(len(a)), np.zeros(len(b))

    def soft(v, log_w):
        top = v.max(axis=-1, keepdims=True)
        return (top + np.log(np.sum(np.exp(v - top + log_w), axis=-1, keepdims=True)))[..., 0]

    for _ in range(sweeps):
        f = -epsilon * soft((g - cost) / epsilon, np.log(b))
        g = -epsilon * soft((f - cost.T) / epsilon, np.log(a))
    return a @ f + b @ g


@pytest.mark.parametrize("metric", METRICS)
def test_the_divergence_is_the_debiased_entropic_cost(metric, dtype):
    x, y, a, b = clouds(dtype)
    found = jax.jit(
        lambda x: transport.sinkhorn_divergence(
            x, y, epsilon=0.1, x_weights=a, y_weights=b, metric=metric, iterations=1000
        )
    )(x)
    x, y, a, b = (np.asarray(v, np.float64) for v in (x, y, a, b))

    def cost(p, q):
        chord = np.sum((p[:, None] - q[None]) ** 2, axis=2)
        return chord if metric == "chordal" else (2 * np.arcsin(np.minimum(np.sqrt(chord) / 2, 1))) ** 2

    a, b = a / a.sum(), b / b.sum()
    value = entropic(cost(x, y), a, b, 0.1) - (entropic(cost(x, x), a, a, 0.1) + entropic(cost(y, y), b, b, 0.1)) / 2
    assert close(np.asarray(found), dtype(value), eps=10)


@pytest.mark.parametrize("metric", METRICS)
def test_the_gradient_of_the_divergence_is_its_derivative(metric):
    x, y, a, b = clouds(np.float64)

    @jax.jit
    def value(x, y, a):
        return transport.sinkhorn_divergence(
            x, y, epsilon=0.2, x_weights=a, y_weights=b, metric=metric, iterations=1000
        )

    dx, dy, da = jax.grad(value, argnums=(0, 1, 2))(x, y, a)
    vx, vy, va = jr.normal(jr.key(5), x.shape), jr.normal(jr.key(6), y.shape), jr.normal(jr.key(7), a.shape)
    va = va * a  # weights are normalised inside, so any direction will do
    assert relative_error(jnp.sum(dx * vx), central(lambda x: value(x, y, a), x, vx, 1e-5)) < 1e-6
    assert relative_error(jnp.sum(dy * vy), central(lambda y: value(x, y, a), y, vy, 1e-5)) < 1e-6
    assert relative_error(jnp.sum(da * va), central(lambda a: value(x, y, a), a, va, 1e-5)) < 1e-6


@pytest.mark.parametrize("metric", METRICS)
def test_value_and_gradient_vanish_at_coincident_clouds(metric, dtype):
    x, _, a, _ = clouds(dtype)
    x = x.at[1].set(x[0]).at[2].set(-x[0])  # a duplicate and an antipode
    for quantity in (
        lambda x, y: transport.sinkhorn_divergence(x, y, epsilon=0.05, x_weights=a, metric=metric, iterations=50),
        lambda x, y: transport.coupled(x, y, weights=a, metric=metric),
    ):
        value, gradient = jax.jit(jax.value_and_grad(quantity))(x, x)
        unit = float(jnp.finfo(dtype).eps)
        assert 0 <= value <= 8 * unit and np.max(np.abs(gradient)) <= 8 * unit


def test_the_divergence_of_two_close_clouds_is_not_negative():
    t = 2 * np.pi * np.random.default_rng(0).random(48)
    x, y = (jnp.asarray(np.stack([np.cos(s), np.sin(s), 0 * s], axis=1), jnp.float32) for s in (t, t + 1e-5))
    value = jax.jit(lambda x: transport.sinkhorn_divergence(x, y, epsilon=0.05))(x)
    assert value >= 0 and jnp.sqrt(value) < 2e-3


def test_weightless_points_have_a_finite_gradient(dtype):
    x, y, a, b = clouds(dtype)
    a = a.at[0].set(0)
    a = a / a.sum()
    gradients = jax.jit(
        jax.grad(
            lambda x, a: transport.sinkhorn_divergence(x, y, epsilon=0.1, x_weights=a, y_weights=b, iterations=50),
            argnums=(0, 1),
        )
    )(x, a)
    assert all(np.all(np.isfinite(g)) for g in gradients)
    assert np.all(np.asarray(gradients[0][0]) == 0)


def test_the_divergence_descends_to_the_target():
    """A gradient step on the tokens lowers W2 itself, not only its smooth stand-in."""
    x, y, *_ = clouds(np.float64)
    step = jax.jit(jax.grad(lambda x: transport.sinkhorn_divergence(x, y, epsilon=0.1)))
    before = w2(x, y).value
    for _ in range(10):
        x = sphere.retract(x - 5 * step(x))
    assert w2(x, y).value < 0.6 * before


@pytest.mark.slow
def test_gradients_reach_the_heads_through_a_solve():
    x0, target, *_ = clouds(np.float64, n=8, m=6)

    @jax.jit
    def loss(strength):
        field = AttentionField(ScalarHeads(strength), Softmax(2.0))
        final = solve(field, x0, jnp.array([0.0, 0.5]), rtol=1e-9, atol=1e-11).final
        return transport.sinkhorn_divergence(final, target, epsilon=0.2, iterations=400)

    at, along = jnp.array([1.0, 0.5]), jnp.array([0.3, -0.7])
    assert relative_error(jax.grad(loss)(at) @ along, central(loss, at, along, 1e-4)) < 1e-5


def test_the_divergence_maps_over_a_batch(dtype):
    x, y, *_ = clouds(dtype)
    batch = jnp.stack([x, -x])
    value = jax.jit(lambda x: transport.sinkhorn_divergence(x, y, epsilon=0.1))
    assert close(jax.vmap(value)(batch), jnp.stack([value(p) for p in batch]))


@pytest.mark.parametrize("metric", METRICS)
def test_coupled_bounds_from_above_and_moments_from_below(metric):
    x, _, a, _ = clouds(np.float64)
    y = sphere.retract(x + 0.3 * jr.normal(jr.key(9), x.shape))
    exact = w2(x, y, x_weights=a, metric=metric).value
    assert transport.moment_bound(x, y, x_weights=a) <= exact <= transport.coupled(x, y, weights=a, metric=metric)


def test_moments_are_sharp_for_a_translation():
    x = jr.normal(jr.key(10), (24, 4))
    shift = jnp.array([[0.3, 0.0, -0.2, 0.1]])
    assert relative_error(transport.moment_bound(x, x + shift), jnp.linalg.norm(shift)) < 1e-7
    assert relative_error(w2(x, x + shift).value, jnp.linalg.norm(shift)) < 1e-12


def test_the_circle_distance_has_the_derivative_of_its_plan(dtype):
    x, y, a, b = clouds(dtype, d=2)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: transport.circle_distance(x, y, x_weights=a, y_weights=b)))(
        x
    )
    assert close(value, dtype(w2(x, y, x_weights=a, y_weights=b, metric="geodesic").value))
    if dtype is np.float64:
        v = jr.normal(jr.key(11), x.shape)
        v = v - jnp.sum(v * x, axis=1, keepdims=True) * x
        f = jax.jit(lambda x: transport.circle_distance(sphere.retract(x), y, x_weights=a, y_weights=b))
        assert relative_error(jnp.sum(gradient * v), central(f, x, v, 1e-6)) < 1e-6
    still = jax.jit(jax.grad(lambda x: transport.circle_distance(x, jax.lax.stop_gradient(x))))
    assert np.all(np.asarray(still(x)) == 0)


@pytest.mark.parametrize("metric", METRICS)
def test_two_atoms_have_derivatives_in_points_and_weights(metric):
    x, _, a, _ = clouds(np.float64)
    atoms, masses = sphere.uniform(jr.key(12), 2, 3), jnp.array([0.37, 0.63])

    def value(x, a):
        return transport.two_atoms_distance(x, atoms, masses, weights=a, metric=metric)

    dx, da = jax.grad(value, argnums=(0, 1))(x, a)
    vx, va = jr.normal(jr.key(13), x.shape), a * jr.normal(jr.key(14), a.shape)
    assert relative_error(jnp.sum(dx * vx), central(lambda x: value(x, a), x, vx, 1e-6)) < 1e-6
    assert relative_error(jnp.sum(da * va), central(lambda a: value(x, a), a, va, 1e-6)) < 1e-6


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("m", [1, 2])
def test_the_projection_is_the_optimal_plan_to_its_image(metric, m, dtype):
    x, _, a, _ = clouds(dtype, d=4)
    basis = jnp.linalg.qr(jr.normal(jr.key(15), (4, m)))[0].astype(dtype)
    image = sphere.retract(x @ basis @ basis.T)
    found = jax.jit(lambda x: transport.to_projection(x, basis, weights=a, metric=metric))(x)
    assert close(found, dtype(w2(x, image, x_weights=a, metric=metric).value))
    away = sphere.retract(image[::-1])  # the same law in another order is a worse plan, the same distance
    assert transport.coupled(x, away, weights=a, metric=metric) > found


def test_the_projection_resolves_tiny_distances(dtype):
    tiny = dtype(1e-9)
    x = jnp.array([[1.0, 0.0], [-1.0, 0.0]], dtype).at[:, 1].set(tiny)
    for metric in METRICS:
        found = transport.to_projection(x, jnp.eye(2, dtype=dtype)[:, :1], metric=metric)
        assert relative_error(found, 1e-9) < 1e-6
    on = jnp.eye(2, dtype=dtype)[:1]
    gradient = jax.grad(lambda x: transport.to_projection(x, jnp.eye(2, dtype=dtype)[:, :1]))(on)
    assert np.all(np.asarray(gradient) == 0)
    off = jnp.eye(2, dtype=dtype)[1:]  # no nearest point: the distance is that to any
    assert (
        relative_error(transport.to_projection(off, jnp.eye(2, dtype=dtype)[:, :1], metric="geodesic"), np.pi / 2)
        < 1e-6
    )


@pytest.mark.parametrize("metric", METRICS)
def test_free_masses_on_atoms_are_those_of_the_nearest(metric):
    x, y, a, _ = clouds(np.float64, m=5)
    found = transport.to_atoms(x, y, weights=a, metric=metric)
    nearest = np.argmin(np.linalg.norm(np.asarray(x)[:, None] - np.asarray(y)[None], axis=2), axis=1)
    masses = np.bincount(nearest, a, 5)
    assert relative_error(found, w2(x, y, x_weights=a, y_weights=masses, metric=metric).value) < 1e-12
    assert found < w2(x, y, x_weights=a, y_weights=np.full(5, 0.2), metric=metric).value


def test_the_uniform_law_of_the_circle_is_the_limit_of_its_grids():
    x = sphere.uniform(jr.key(16), 20, 2)
    w = jnp.arange(1.0, 21) / 210
    limit = transport.to_uniform(x, weights=w, metric="geodesic")
    t = 2 * np.pi * (np.arange(20_000) + 0.5) / 20_000
    grid = w2(
        x, np.stack([np.cos(t), np.sin(t)], axis=1), x_weights=w, y_weights=np.full(20_000, 5e-5), metric="geodesic"
    )
    assert limit.exact and abs(limit.value - grid.value) < 1e-4  # grid of half-width 1.6e-4
    equal = transport.to_uniform(sphere.circle(2 * jnp.pi * jnp.arange(7.0) / 7), metric="geodesic")
    assert relative_error(equal.value, 2 * np.pi / 7 / np.sqrt(12)) < 1e-9


@pytest.mark.parametrize(
    ("metric", "pole", "antipodes"), [("chordal", np.sqrt(2), 1.0), ("geodesic", np.sqrt((np.pi**2 - 4) / 2), None)]
)
def test_the_uniform_law_of_the_sphere_is_bracketed(metric, pole, antipodes):
    """One atom: sqrt 2, or the root of E theta^2 with density sin/2; two antipodal atoms: 1 (chordal)."""
    up = np.array([[0.0, 0.0, 1.0]])
    found = transport.to_uniform(up, metric=metric, nodes=400)
    assert pole in found and found.width < 0.2
    if antipodes:
        both = transport.to_uniform(np.concatenate([up, -up]), metric=metric, nodes=400)
        assert antipodes in both and both.width < 0.1


@pytest.mark.parametrize("metric", METRICS)
def test_the_uniform_law_of_higher_spheres_is_bracketed(metric):
    """One atom of S^4: sqrt 2, or the root of E theta^2 with density (3/4) sin^3."""
    theta = (np.arange(100_000) + 0.5) * np.pi / 100_000
    pole = (
        np.sqrt(2)
        if metric == "chordal"
        else np.sqrt(np.sum(theta**2 * np.sin(theta) ** 3) / np.sum(np.sin(theta) ** 3))
    )
    found = transport.to_uniform(np.eye(5)[:1], metric=metric)
    assert found.lower <= pole * (1 + 1e-9) and pole * (1 - 1e-9) <= found.upper
    assert not found.converged


def test_one_token_can_move_the_distance_by_the_quantum():
    """Half the tokens at either pole, one of n goes over: W2 to the law before is D sqrt(1/n)."""
    x = np.repeat([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]], 8, axis=0)
    moved = x.copy()
    moved[0] = -x[0]
    for metric in METRICS:
        found = w2(x, moved, metric=metric)
        quantum = transport.quantisation(np.full(16, 1 / 16), metric=metric)
        assert relative_error(found.value, quantum) < 1e-12 and relative_error(found.quantum, quantum) < 1e-12


def test_the_sampling_floor_falls_slowly_in_high_dimension():
    """Measured elsewhere, 100 points: .229, .361, .959 on S^1, S^2, S^15."""
    for d, seen in ((2, 0.229), (3, 0.361), (16, 0.959)):
        band = transport.sampling_band(jr.key(17), lambda key, n, d=d: sphere.uniform(key, n, d), 100, repeats=8)
        assert abs(np.mean(band) - seen) < 4 * np.std(band) / np.sqrt(8) + 0.03


def test_observables_agree_with_w2(dtype):
    x, y, a, b = clouds(dtype)
    field = Weighted(a)
    atoms = sphere.uniform(jr.key(18), 2, 3)[jnp.array([0, 0, 1])]
    observable = w2_to(atoms)
    assert observable.method == "atoms"
    assert close(jax.jit(lambda x: observable(field, x))(x), dtype(w2(x, atoms, x_weights=a).value))
    low, high = jax.jit(lambda x: w2_to(y, target_weights=b, method="interval")(field, x))(x)
    assert float(low) <= w2(x, y, x_weights=a, y_weights=b).value <= float(high)
    paired = w2_to(x[::-1], method="coupled")(field, x)
    assert close(paired, transport.coupled(x, x[::-1], weights=a))
    smooth, plain = jax.jit(
        lambda x: (
            w2_to(y, target_weights=b, method="divergence", epsilon=0.1)(field, x),
            transport.sinkhorn_divergence(x, y, epsilon=0.1, x_weights=a, y_weights=b),
        )
    )(x)
    assert close(smooth**2, plain, eps=10)
    basis = jnp.eye(3, dtype=dtype)[:, :2]
    assert close(w2_to_subspace(basis)(field, x), transport.to_projection(x, basis, weights=a))
    flat, target, *_ = clouds(dtype, d=2)
    circle = w2_to(target, metric="geodesic")
    assert circle.method == "circle"
    assert close(
        jax.jit(lambda x: circle(field, x))(flat), dtype(w2(flat, target, x_weights=a, metric="geodesic").value)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "`method` must be given"),
        ({"method": "simplex"}, "must be 'atoms'"),
        ({"method": "atoms"}, "at most two points"),
        ({"method": "circle"}, "needs d = 2"),
        ({"metric": "cosine"}, "`metric`"),
    ],
)
def test_observables_refuse_what_they_cannot_do(options, message):
    with pytest.raises(ValueError, match=message):
        w2_to(np.eye(3), **options)
    with pytest.raises(ValueError, match="orthonormal"):
        w2_to_subspace(2 * np.eye(3))
    with pytest.raises(ValueError, match="same shape"):
        transport.coupled(jnp.eye(3), jnp.eye(3)[:2])
