"""The reduction by harmonics against exact sums: accuracy, the error bound, and what happens where the series fails."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy import special

from attnflow import sphere
from attnflow.attention import Exponential, ReLU, Softmax
from attnflow.field import AttentionField
from attnflow.harmonics import Harmonics, circle, degree_for, suits, truncation_error
from attnflow.harmonics import sphere as sphere_series
from attnflow.heads import FactoredHeads, Heads, ScalarHeads
from attnflow.reduce import Blocked, Dense
from attnflow.solve import solve

# One size and one radius for most tests, so that few programs are compiled.
N, R = 90, 20.0
SERIES = {2: circle, 3: sphere_series}
GENERAL = {
    2: np.array([[[0.8, 0.2], [-0.1, 0.4]], [[-0.5, 0.0], [0.3, -0.8]]]),
    3: np.array([[[0.8, 0.2, 0.0], [-0.1, 0.4, 0.3], [0.0, 0.1, 0.6]], [[-0.5, 0, 0.1], [0.3, -0.8, 0], [0, 0, 0.2]]]),
}


def tokens(n, d, dtype=np.float64, seed=0):
    """Tokens, weights (a third of them zero) and values of the given dtype."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    w = rng.random(n) * (rng.random(n) > 1 / 3)
    x, w, v = x / np.linalg.norm(x, axis=1, keepdims=True), w / w.sum(), rng.normal(size=(n, 2))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(v, dtype)


def cluster(d):
    """N tokens of equal weight within about 20 degrees of the first axis."""
    x = sphere.retract(jnp.asarray([[1.0, 0.0, 0.0][:d]]) + 0.1 * tokens(N, d)[0])
    return x, jnp.full(N, 1 / N, float)


def naive(q, x, values, w):
    """Log-mass and mean in plain numpy."""
    q, x, values, w = (np.asarray(a, np.float64) for a in (q, x, values, w))
    s = q @ x.T
    s = np.where(w > 0, s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = w * np.exp(s - top)
    mass = p.sum(-1, keepdims=True)
    return (top + np.log(mass))[..., 0], p @ values / mass


@eqx.filter_jit
def answer(reduction, q, x, w):
    return reduction.log_mean(q, x, x, w)


def gap(a, b):
    """Largest difference, in float64."""
    return np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)))


def error(got, q, x, w):
    """Largest error of log-mass and mean."""
    return max(gap(a, b) for a, b in zip(got, naive(q, x, x, w), strict=True))


class Absent(Blocked):
    """An exact sum that must not be needed."""

    def log_mean(self, q, keys, values, w, *, causal=False):
        return jnp.full(q.shape[:2], jnp.nan, q.dtype), jnp.full((*q.shape[:2], values.shape[-1]), jnp.nan, q.dtype)


ROWS = []


class Counted(Blocked):
    """An exact sum that notes in ROWS how many queries it is asked for, each time it runs."""

    def log_mean(self, q, keys, values, w, *, causal=False):
        jax.debug.callback(lambda: ROWS.append(q.shape[1]))
        return super().log_mean(q, keys, values, w, causal=causal)


@pytest.fixture
def rows():
    ROWS.clear()
    yield ROWS
    jax.effects_barrier()


# ---- the error bound


def kernel_error(d, degree, radius):
    """Largest error of the cut series of exp(r (cos - 1)) over 2001 angles, in plain numpy."""
    angle = np.linspace(0, np.pi, 2001)
    k = np.arange(degree + 1)
    if d == 2:
        series = np.where(k == 0, 1, 2) * special.ive(k, radius) @ np.cos(k[:, None] * angle)
    else:
        terms = (2 * k + 1) * special.ive(k + 0.5, radius) * np.sqrt(np.pi / (2 * radius))
        series = np.polynomial.legendre.legval(np.cos(angle), terms)
    return np.max(np.abs(series - np.exp(radius * (np.cos(angle) - 1))))


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("radius", [0.5, 4.0, 25.0, 81.0, 400.0])
def test_truncation_error_is_the_error_of_the_cut_kernel(d, radius):
    for degree in (4, 12, 30):
        bound = truncation_error(degree, radius, d=d)
        assert np.isclose(kernel_error(d, degree, radius), bound, rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("radius", [0.5, 25.0, 81.0, 1000.0])
def test_degree_is_the_smallest_that_meets_the_tolerance(d, radius):
    tolerance = 1e-4
    share = circle.uniform_share(radius) if d == 2 else sphere_series.uniform_share(radius)
    degree = degree_for(tolerance, radius, d=d)
    allowed = tolerance * 1e-6 * share
    assert kernel_error(d, degree, radius) <= allowed * (1 + 1e-3) + 1e-15
    assert kernel_error(d, degree - 2, radius) > allowed


def test_uniform_share_is_the_mass_of_the_uniform_law():
    for radius in (0.0, 1e-3, 3.0, 50.0):
        angle = np.linspace(0, np.pi, 200_001)
        kernel = np.exp(radius * (np.cos(angle) - 1))
        assert np.isclose(circle.uniform_share(radius), np.trapezoid(kernel, angle) / np.pi, rtol=1e-8)
        assert np.isclose(
            sphere_series.uniform_share(radius), np.trapezoid(kernel * np.sin(angle), angle) / 2, rtol=1e-8
        )


# ---- values


@pytest.mark.parametrize("d", [2, 3])
def test_log_mean_is_the_exact_sum_for_any_heads_and_weights(d, dtype):
    x, w, _ = tokens(N, d, dtype)
    q = R * jnp.einsum("hde,nd->hne", jnp.asarray(GENERAL[d], dtype), x)
    got = answer(Harmonics(radius=R), q, x, w)
    assert got[0].dtype == got[1].dtype == dtype
    assert error(got, q, x, w) < (1e-9 if dtype == np.float64 else 1e-4)


@pytest.mark.parametrize("d", [2, 3])
def test_series_is_the_exact_sum_of_any_values_and_of_the_keys_themselves(d):
    x, w, v = tokens(N, d)
    q = 6 * x[None, :50]
    expected_log_mass, expected_mean = naive(q, x, v, w)
    h, scale = jax.jit(lambda *a: SERIES[d].exponential_sums(*a, degree=30))(x, v, w, q)
    assert gap(scale + jnp.log(h[..., 0]), expected_log_mass) < 1e-12
    assert gap(h[..., 1:] / h[..., :1], expected_mean) < 1e-12
    own, _ = jax.jit(lambda x, w, q: SERIES[d].exponential_sums(x, None, w, q, degree=30))(x, w, q)
    assert gap(own[..., 1:] / own[..., :1], naive(q, x, x, w)[1]) < 1e-12


@pytest.mark.parametrize("d", [2, 3])
def test_uniform_law_has_the_bessel_ratio_as_mean_beyond_two_to_the_fourteen_tokens(d):
    n, kappa = 20_000, 40.0

    def density(u):
        return np.ones(u.shape[0])

    x, w = sphere.circle_quadrature(density, n) if d == 2 else sphere.sphere_quadrature(density, n)
    _, mean = answer(Harmonics(1e-12, radius=kappa, exact=Absent()), kappa * x[None], x, w)
    assert gap(mean[0], sphere.mean_resultant_length(d, kappa) * x) < 1e-13


@pytest.mark.parametrize("d", [2, 3])
def test_queries_of_length_zero_are_answered_by_the_mean_of_all(d):
    x, w, _ = tokens(N, d)
    log_mass, mean = answer(Harmonics(radius=R), jnp.zeros((2, N, d)), x, w)
    assert gap(log_mass, 0) < 1e-14
    assert gap(mean, w @ x) < 1e-14


def test_queries_of_one_length_and_of_mixed_lengths_meet():
    x, w, _ = tokens(N, 3)
    alpha = sphere_series.coefficients(sphere_series.torus_moments(x, jnp.stack([w, w * x[:, 0]], 1), 30))
    shell = jax.jit(lambda q: sphere_series.evaluate_shell(alpha, q, jnp.asarray(5.0), None))
    mixed = jax.jit(lambda q: sphere_series.evaluate_mixed(alpha, q, None))
    chosen = jax.jit(lambda q: sphere_series.evaluate(alpha, q))
    assert gap(shell(5 * x), mixed(5 * x)) < 1e-13
    assert gap(shell(5 * x), chosen(5 * x)) < 1e-15
    stretched = x * jnp.asarray([[5.0, 3.0, 1.0]])
    assert gap(mixed(stretched), chosen(stretched)) < 1e-15
    assert gap(mixed(stretched), shell(stretched)) > 1e-2


@pytest.mark.parametrize("d", [2, 3])
def test_blocks_do_not_change_the_sum(d):
    x, w, _ = tokens(N, d)
    q = R * jnp.einsum("hde,nd->hne", jnp.asarray(GENERAL[d]), x)
    whole, parts = (answer(Harmonics(radius=R, block=block), q, x, w) for block in (None, 23))
    assert all(gap(a, b) < 1e-9 for a, b in zip(whole, parts, strict=True))


def test_tokens_at_the_poles_of_the_coordinates_count_like_others():
    pole = sphere_series.TURN[:, 2]
    x = tokens(N, 3)[0].at[:3].set(jnp.asarray([pole, -pole, pole]))
    w = jnp.full(N, 1 / N, float)
    q = R * jnp.stack([x, x])
    assert error(answer(Harmonics(radius=R), q, x, w), q, x, w) < 1e-12


# ---- where the series is not good enough


@pytest.mark.parametrize("d", [2, 3])
def test_queries_without_tokens_near_them_are_summed_exactly(d):
    """A negative head asks the far side of a cluster: its mass is exp(-2 r) of the kernel's maximum."""
    x, w = cluster(d)
    q = R * jnp.stack([x, -x])
    assert error(answer(Harmonics(radius=R), q, x, w), q, x, w) < 1e-9
    h, scale = jax.jit(lambda x, w, q: SERIES[d].exponential_sums(x, None, w, q, degree=50))(x, w, q)
    unguarded = np.abs(np.exp(np.asarray(scale) - naive(q, x, x, w)[0]) * np.asarray(h[..., 0]) - 1)
    assert np.max(unguarded[0]) < 1e-9 < 1 < np.max(unguarded[1])


def test_a_few_bad_queries_cost_a_few_exact_sums_and_many_cost_one_of_all(rows):
    n = 4200
    x, w, _ = tokens(n, 2)
    w = jnp.where(x[:, 0] > -0.3, w, 0)
    w, q = w / jnp.sum(w), 60 * x[None]
    asked = np.linspace(0, n - 1, 300).astype(int)
    for queries, fewest, most in (
        (jnp.where(x[:, :1] > -0.9, q, jnp.asarray([60.0, 0])), 1, n - 1),
        (jnp.minimum(-abs(q), -30), n, n),
    ):
        rows.clear()
        got = answer(Harmonics(radius=60.0, exact=Counted()), queries, x, w)
        assert error([a[:, asked] for a in got], queries[:, asked], x, w) < 1e-9
        jax.effects_barrier()
        assert fewest <= sum(rows) <= most


def test_queries_longer_than_the_radius_are_summed_exactly():
    x, w, _ = tokens(N, 2)
    q = jnp.stack([R * x, 40 * x])
    assert error(answer(Harmonics(radius=R), q, x, w), q, x, w) < 1e-9
    log_mass, _ = answer(Harmonics(radius=R, exact=Absent()), q, x, jnp.full(N, 1 / N, float))
    assert bool(jnp.all(jnp.isfinite(log_mass[0]))) and bool(jnp.all(jnp.isnan(log_mass[1])))


def test_keys_that_are_not_unit_vectors_are_summed_exactly():
    x, w, _ = tokens(N, 2)
    for factor in (1.5, 1 + 1e-7):
        q, k = R * jnp.stack([x, -x]), factor * x
        assert error(answer(Harmonics(radius=R), q, k, w), q, k, w) < 1e-9


@pytest.mark.parametrize("d", [2, 3])
def test_a_very_large_beta_is_answered(d):
    x, w, _ = tokens(N, d)
    q = 1e4 * x[None]
    assert error(answer(Harmonics(radius=1e4), q, x, w), q, x, w) < 1e-8


def test_nan_tokens_give_nan_without_an_exact_sum(rows):
    x, w, _ = tokens(N, 2)
    log_mass, _ = answer(Harmonics(radius=R, exact=Counted()), R * x[None], x.at[3, 0].set(jnp.nan), w)
    jax.effects_barrier()
    assert bool(jnp.all(jnp.isnan(log_mass))) and not rows


# ---- derivatives and transformations


@eqx.filter_jit
@eqx.filter_value_and_grad
def gradient(inputs, reduction):
    """Of a scalar of log-mass and mean at unit tokens, as a field would use them."""
    B, x, w = inputs
    u = sphere.retract(x)
    log_mass, mean = reduction.log_mean(jnp.einsum("hde,nd->hne", B, u), u, u, w)
    return jnp.sum(jnp.sin(2 * mean)) + jnp.sum(jnp.cos(log_mass))


def gradient_gap(inputs):
    """Largest error of the gradient in heads, tokens and weights, relative to the largest entry of each."""
    got, expected = (gradient(inputs, reduction)[1] for reduction in (Harmonics(radius=R), Dense()))
    return max(gap(a, b) / np.max(np.abs(b)) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("d", [2, 3])
def test_gradient_is_that_of_the_exact_sum(d):
    x, w, _ = tokens(N, d)
    assert gradient_gap((R / 2 * jnp.asarray(GENERAL[d]), x, w)) < 1e-9
    assert gradient_gap((R * jnp.stack([jnp.eye(d), -0.3 * jnp.eye(d)]), x, w)) < 1e-9  # queries of one length
    assert gradient_gap((jnp.zeros((2, d, d)), x, w)) < 1e-12  # queries of length 0
    x, w = cluster(d)
    assert gradient_gap((-R * jnp.stack([jnp.eye(d)] * 2), x, w)) < 1e-9  # queries summed exactly


def test_gradient_in_float32():
    x, w, _ = tokens(N, 2, np.float32)
    assert gradient_gap((R / 2 * jnp.asarray(GENERAL[2], jnp.float32), x, w)) < 1e-4


def test_forward_mode_agrees_with_differences():
    x, w, _ = tokens(N, 2)
    B, step = R / 2 * jnp.asarray(GENERAL[2]), 1e-6

    def f(B):
        log_mass, mean = answer(Harmonics(radius=R), jnp.einsum("hde,nd->hne", B, x), x, w)
        return jnp.sum(log_mass) + jnp.sum(mean)

    _, tangent = jax.jvp(f, (B,), (jnp.ones_like(B),))
    assert np.isclose(tangent, (f(B + step) - f(B - step)) / (2 * step), rtol=1e-7)


def test_vmap_over_beta_takes_the_degree_of_the_largest_and_no_exact_sum(rows):
    x, _, _ = tokens(N, 2)
    w = jnp.full(N, 1 / N, float)
    betas = jnp.asarray([0.0, 1.0, 9.0])
    got = jax.jit(jax.vmap(lambda beta: Harmonics(exact=Counted()).log_mean(beta * x[None], x, x, w)))(betas)
    jax.effects_barrier()
    assert not rows
    for i, beta in enumerate(betas):
        assert error((got[0][i], got[1][i]), beta * x[None], x, w) < 1e-9


def test_vmap_sums_exactly_in_the_lane_that_needs_it():
    x, w = cluster(2)
    signs = jnp.asarray([1.0, -1.0])
    got = jax.jit(jax.vmap(lambda sign: Harmonics(radius=30.0).log_mean(30 * sign * x[None], x, x, w)))(signs)
    for i, sign in enumerate(signs):
        assert error((got[0][i], got[1][i]), 30 * sign * x[None], x, w) < 1e-9


@pytest.mark.slow
def test_degree_is_chosen_at_run_time_on_the_sphere():
    x, w, _ = tokens(N, 3)
    run = jax.jit(lambda q, x, w: Harmonics().log_mean(q, x, x, w))
    for radius in (2.0, 20.0, 60.0, 200.0, 1000.0):
        q = radius * jnp.einsum("hde,nd->hne", jnp.asarray(GENERAL[3]), x)
        assert error(run(q, x, w), q, x, w) < 1e-9


@pytest.mark.parametrize("d", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_memory_of_a_gradient_is_linear_in_the_tokens(d):
    n = 2**17
    inputs = jnp.zeros((1, d, d)), jnp.zeros((n, d)), jnp.zeros(n)
    stats = gradient.lower(inputs, Harmonics(radius=R)).compile().compiled.memory_analysis()
    assert stats.temp_size_in_bytes < 1500 * n  # n^2 scores would take a thousand times as much


# ---- ReLU on the circle


def test_relu_sums_on_the_circle_are_exact(dtype):
    x, w, v = tokens(N, 2, dtype)
    x = x.at[:4].set(jnp.asarray([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, -0.0]], dtype))  # the cut and its normals
    q = 3 * jnp.einsum("hde,nd->hne", jnp.asarray(GENERAL[2], dtype), x)
    q = jnp.concatenate([q, 2 * x[None]]).at[0, 0].set(0)
    got = jax.jit(lambda *a: Harmonics().sum(jax.nn.relu, *a))(q, x, v, w)
    s = np.asarray(q, np.float64) @ np.asarray(x, np.float64).T
    assert gap(got, (np.asarray(w) * np.maximum(s, 0)) @ np.asarray(v)) < 20 * np.finfo(dtype).eps


def test_gradient_of_relu_sums_on_the_circle():
    x, w, _ = tokens(N, 2)

    def f(x, w, reduction):
        return jnp.sum(jnp.cos(reduction.sum(jax.nn.relu, 2 * x[None], x, x, w)))

    slope = eqx.filter_jit(jax.grad(f, argnums=(0, 1)))
    got, expected = (slope(x, w, reduction) for reduction in (Harmonics(), Dense()))
    assert all(gap(a, b) < 1e-13 for a, b in zip(got, expected, strict=True))


def test_other_sums_and_the_maximum_are_exact():
    x, w, v = tokens(N, 3)
    y = sphere.retract(x[:, :2])
    for phi, keys, shift in (
        (jax.nn.relu, x, None),
        (jnp.tanh, y, None),
        (jax.nn.relu, y, jnp.ones((1, N))),
    ):
        expected = Dense().sum(phi, 2 * keys[None], keys, v, w, shift=shift)
        assert gap(Harmonics().sum(phi, 2 * keys[None], keys, v, w, shift=shift), expected) < 1e-13
    assert gap(Harmonics().maximum(2 * x[None], x, w), Dense().maximum(2 * x[None], x, w)) < 1e-14


# ---- in a field


@eqx.filter_jit
def velocity(field, x):
    return field(0.0, x)


@pytest.mark.parametrize("d", [2, 3])
def test_velocity_is_that_of_exact_sums(d):
    x, w, _ = tokens(N, d)
    heads = Heads(GENERAL[d], GENERAL[d][::-1])
    for attention in (Softmax(R), ReLU()):
        got, expected = (
            velocity(AttentionField(heads, attention, w, reduction=reduction), x)
            for reduction in (Harmonics(radius=R), Dense())
        )
        assert gap(got, expected) < 1e-9


def test_rotating_tokens_and_heads_rotates_the_velocity():
    x, w, _ = tokens(N, 3)
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
    B, V = GENERAL[3], GENERAL[3][::-1]
    field = AttentionField(Heads(B, V), Softmax(R), w, reduction=Harmonics(radius=R))
    turned = AttentionField(Heads(turn @ B @ turn.T, turn @ V @ turn.T), Softmax(R), w, reduction=Harmonics(radius=R))
    assert gap(velocity(turned, x @ turn.T), velocity(field, x) @ turn.T) < 1e-9


def test_velocity_outside_jit_and_off_the_sphere_has_degree_one():
    x, _, _ = tokens(N, 2)
    field = AttentionField(ScalarHeads([1.0]), Softmax(4.0), reduction=Harmonics())
    assert gap(field(0.0, 3 * x), 3 * field(0.0, x)) < 1e-12


def test_factored_heads_have_keys_of_their_own_and_are_summed_exactly(key):
    x, _, _ = tokens(N, 3)
    heads = FactoredHeads(*jr.normal(key, (3, 2, 2, 3)), jr.normal(key, (2, 3, 2)))
    got, expected = (
        velocity(AttentionField(heads, Softmax(2.0), reduction=reduction), x) for reduction in (Harmonics(), Dense())
    )
    assert gap(got, expected) < 1e-12


# ---- choice and refusals


def test_suits_where_many_tokens_meet_a_small_radius():
    assert suits(100, 2, np.float64, radius=4.0) is None
    assert 81.0 <= suits(2**20, 2, np.float64, radius=81.0).radius < 81.0 * 2**0.25
    assert suits(2**20, 2, np.float64, radius=81.0) == suits(2**20, 2, np.float64, radius=90.0)
    assert suits(2**20, 3, np.float64, radius=25.0) is not None
    assert suits(2**20, 3, np.float64, radius=1e6) is None
    assert suits(2**20, 3, np.float32, radius=25.0) is None
    assert suits(2**20, 4, np.float64, radius=25.0) is None
    assert suits(2**20, 2, np.float64).radius is None
    assert suits(2**13, 2, np.float64) is None


def chosen(x, heads, attention, **options):
    return type(AttentionField(heads, attention, **options).method(x))


def test_a_field_chooses_the_series_where_it_is_certain_to_pay():
    x, heads = jnp.zeros((2**13, 2)), ScalarHeads([1.0, -0.5])
    assert chosen(x, heads, Softmax(81.0)) is chosen(x, heads, Exponential(81.0)) is Harmonics
    assert chosen(x, Heads(GENERAL[2], GENERAL[2]), Softmax(81.0)) is Harmonics
    assert chosen(x[:1000], heads, Softmax(81.0)) is Blocked
    assert chosen(x, heads, Softmax(1e5)) is Blocked
    assert chosen(x, heads, ReLU()) is Blocked
    assert chosen(x, heads, Softmax(81.0), flat=True) is chosen(x, heads, Softmax(81.0), causal=True) is Blocked
    assert chosen(x.astype(jnp.float32), heads, Softmax(81.0)) is Blocked
    assert chosen(jnp.zeros((2**13, 4)), heads, Softmax(81.0)) is Blocked
    assert "harmonics from n = 4096 (d = 2)" in repr(AttentionField(heads, Softmax(81.0)))
    assert "harmonics" not in repr(AttentionField(heads, ReLU()))


def test_no_series_is_chosen_inside_a_trace_that_hides_the_temperature():
    x = jnp.zeros((2**13, 2))
    seen = []

    def look(beta):
        seen.append(AttentionField(ScalarHeads([1.0]), Softmax(beta)).method(x))
        return beta

    jax.make_jaxpr(look)(81.0)
    many = eqx.filter_vmap(lambda beta: AttentionField(ScalarHeads([1.0]), Softmax(beta)))(jnp.asarray([1.0, 9.0]))
    assert isinstance(seen[0], Blocked) and "131072" in repr(many)


@pytest.mark.slow
def test_solve_with_the_chosen_series_agrees_with_exact_sums():
    n, beta = 4096, 20.0
    x, w = sphere.circle_quadrature(lambda angle: 1 + 0.5 * np.cos(angle), n)
    chosen, exact = (
        solve(
            AttentionField(ScalarHeads([1.0]), Softmax(beta), w, reduction=reduction),
            x,
            np.asarray([0.0, 0.2]),
            rtol=1e-4,
        ).final
        for reduction in (None, Blocked())
    )
    assert isinstance(AttentionField(ScalarHeads([1.0]), Softmax(beta), w).settled(x).reduction, Harmonics)
    assert gap(chosen, exact) < 1e-11 and gap(chosen, x) > 1e-3


def test_refusals_say_what_to_do():
    x, w, v = tokens(10, 2)
    q = x[None]
    with pytest.raises(ValueError, match="causal"):
        Harmonics().log_mean(q, x, v, w, causal=True)
    with pytest.raises(ValueError, match="causal"):
        Harmonics().sum(jax.nn.relu, q, x, v, w, causal=True)
    with pytest.raises(ValueError, match="causal"):
        Harmonics().maximum(q, x, w, causal=True)
    with pytest.raises(ValueError, match="dimension 2 or 3, got d = 4"):
        y = jnp.eye(4)[:, :4]
        Harmonics().log_mean(y[None], y, y, jnp.ones(4) / 4)
    with pytest.raises(ValueError, match="`tolerance`"):
        Harmonics(1e-16).log_mean(q, x, v, w)
    with pytest.raises(ValueError, match="float16"):
        Harmonics().log_mean(*(a.astype(jnp.float16) for a in (q, x, v, w)))
