"""The equiangular ODE against 40-digit values, particles in plain numpy, and itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import REFERENCE, relative_error, velocity
from scipy.integrate import solve_ivp

from attnflow.attention import Exponential, Hardmax, Linear, ReLU, Softmax
from attnflow.theory import equiangular as eq

ELEMENTARY, ODE = 1e-13, 1e-10


def system(row, attention):
    return attention(float(row["beta"])), [float(lam) for lam in row["lambdas"]], row["n"]


@pytest.mark.parametrize("row", REFERENCE["equiangular_SA"], ids=lambda r: f"n{r['n']}t{r['t']}")
def test_softmax_cosine_and_entropy_are_the_reference_values(row):
    case, start, t = system(row, Softmax), float(row["gamma0"]), float(row["t"])
    deficit = eq.cosine_deficit(*case, start, t)
    assert relative_error(deficit, float(row["one_minus_gamma"])) < ODE
    assert relative_error(eq.cosine(*case, start, t), float(row["gamma"])) < ODE
    entropies = [float(s) for s in row["entropy_head"]]
    assert relative_error(eq.entropy(*case, float(row["gamma"])), entropies) < ELEMENTARY
    assert relative_error(eq.entropy(*case, 1 - deficit), entropies) < ODE
    assert relative_error(eq.entropy(*case, start), [float(s) for s in row["entropy0"]]) < ELEMENTARY


@pytest.mark.parametrize("row", REFERENCE["equiangular_USA"], ids=lambda r: f"n{r['n']}")
def test_exponential_cosine_is_the_reference_value(row):
    case, start, t = system(row, Exponential), float(row["gamma0"]), float(row["t"])
    assert relative_error(eq.cosine_deficit(*case, start, t), float(row["one_minus_gamma"])) < ODE
    assert relative_error(eq.cosine(*case, start, t), float(row["gamma"])) < ODE


@pytest.mark.parametrize("row", REFERENCE["relu_time"], ids=lambda r: f"n{r['n']}")
def test_relu_times_are_the_reference_values_and_invert_the_cosine(row):
    case, ends = (ReLU(), [float(row["lam"])], row["n"]), (float(row["g0"]), float(row["g1"]))
    t = eq.time(*case, *ends)
    assert relative_error(t, float(row["t"])) < ELEMENTARY
    assert relative_error(eq.cosine(*case, ends[0], t), ends[1]) < ODE


@pytest.mark.parametrize("row", REFERENCE["softmax_time"], ids=lambda r: f"n{r['n']}g{r['g0']}")
def test_softmax_times_are_the_reference_values(row):
    case = Softmax(float(row["beta"])), [float(row["lam"])], row["n"]
    assert relative_error(eq.time(*case, float(row["g0"]), float(row["g1"])), float(row["t"])) < ODE


@pytest.mark.parametrize(
    ("kind", "attention", "start"),
    [
        ("softmax", Softmax(1.5), 0.1),
        ("exponential", Exponential(0.7), 0.0),
        ("relu", ReLU(), 0.2),
        ("linear", Linear(), 0.2),
    ],
)
def test_particles_follow_the_cosine(kind, attention, start):
    n, strengths, beta = 5, [0.7, 1.9], getattr(attention, "beta", 1.0)
    gram = (1 - start) * np.eye(n) + start
    x0 = np.linalg.cholesky(gram)
    maps = np.array(strengths)[:, None, None] * np.eye(n)

    def move(_, x):
        return velocity(kind, x.reshape(n, n), maps, maps, beta=float(beta)).ravel()

    x = solve_ivp(move, (0, 0.8), x0.ravel(), method="DOP853", rtol=1e-12, atol=1e-13).y[:, -1].reshape(n, n)
    expected = np.full((n, n), float(eq.cosine(attention, strengths, n, start, 0.8)))
    np.testing.assert_allclose(x @ x.T, np.where(np.eye(n) == 1, 1, expected), atol=1e-9)


def test_frozen_states_stay():
    assert eq.cosine(ReLU(), [1.0, 2.0], 8, -0.1, 50.0) == -0.1 and eq.cosine(ReLU(), [1.0], 8, 0.0, 50.0) == 0
    assert (
        eq.cosine(Softmax(1.0), [1.0], 8, 1.0, 50.0) == 1 and eq.cosine_deficit(Softmax(1.0), [1.0], 8, 1.0, 5.0) == 0
    )
    assert abs(eq.cosine(Softmax(1.0), [1.0], 5, -0.25, 5.0) + 0.25) < 1e-13


def test_times_that_are_never_reached_are_infinite():
    soft = Softmax(1.0), [1.0], 8
    assert eq.time(*soft, 0.5, 0.1) == jnp.inf and eq.time(*soft, 0.1, 1.0) == jnp.inf
    assert eq.time(ReLU(), [1.0], 8, -0.1, 0.5) == jnp.inf and eq.time(ReLU(), [1.0], 8, 0.1, 1.0) == jnp.inf
    assert eq.time(*soft, 0.3, 0.3) == 0 and eq.time(ReLU(), [1.0], 8, 0.0, 0.0) == 0
    back = eq.time(Softmax(1.0), [-1.0], 8, 0.5, 0.1)  # repelling heads spread
    assert relative_error(eq.cosine(Softmax(1.0), [-1.0], 8, 0.5, back), 0.1) < ODE


def test_tiny_deficits_decay_at_the_late_rate():
    for attention, rate in (
        (Softmax(2.0), 2 * 1.5),
        (Exponential(2.0), 2 * np.exp(2.0) + np.exp(1.0)),
        (ReLU(), 2 * 1.25),
    ):
        case = attention, [1.0, 0.5], 16
        assert relative_error(eq.late_rate(*case), rate) < ELEMENTARY
        t = np.array([30.0, 40.0]) / rate * 2
        d = eq.cosine_deficit(*case, 0.5, t)
        assert relative_error(np.log(d[0] / d[1]) / (t[1] - t[0]), rate) < 1e-9


def test_times_come_back_in_the_order_they_were_asked_for():
    case = Softmax(1.0), [1.0], 8, 0.1
    t = jnp.array([2.0, 0.0, 1.0])
    several = eq.cosine(*case, t)
    assert relative_error(several, [eq.cosine(*case, s) for s in t]) < 1e-12 and abs(several[1] - 0.1) < 1e-16


def test_metastable_waits_are_crossed_or_refused_where_time_cannot_resolve_them():
    wait = eq.time(Softmax(20.0), [1.0], 32, 0.0, 0.5)
    assert relative_error(eq.cosine(Softmax(20.0), [1.0], 32, 0.0, wait), 0.5) < 1e-4 and wait > 1e6
    assert eq.time(Softmax(200.0), [1.0], 32, 0.0, 0.5) > 1e80
    with pytest.raises(Exception, match="1e15 crossing times"):
        jax.block_until_ready(eq.cosine(Softmax(200.0), [1.0], 32, 0.0, 1e90))


def test_softmax_clusters_in_log_n_and_the_linearised_order_is_reversed():
    soft, relu, n = Softmax(1.0), ReLU(), 10**4
    full = [
        float(eq.time(soft, [1.0], n, 0.0, 0.5)),
        float(eq.time(soft, [1.0], n, 0.125, 0.5)),
        float(eq.time(relu, [1.0], n, 0.125, 0.5)),
    ]
    np.testing.assert_allclose(full, [4.606, 0.973, 3.971], atol=6e-4)
    assert relative_error(eq.linearised_time(soft, 1.0, n, 0.0, 0.5), 2500) < 1e-3
    assert relative_error(eq.linearised_time(relu, 1.0, n, 0.125, 0.5), 6931) < 1e-3
    with pytest.raises(ValueError, match="linearised"):
        eq.linearised_time(Linear(), 1.0, n, 0.1, 0.5)


def test_relu_wins_the_late_race_at_large_beta_only():
    times = [float(eq.time(a, [1.0], 100, 0.5, 0.99)) for a in (ReLU(), Softmax(1.0), Softmax(10.0), Softmax(20.0))]
    np.testing.assert_allclose(times, [2.785, 2.297, 2.603, 24.63], rtol=3e-4)


def test_entropy_deficit_complements_entropy_and_survives_consensus():
    case = Softmax(4.0), [1.0, -1.0, 1e3], 32
    gap = np.array(0.4)
    np.testing.assert_allclose(eq.entropy_deficit(*case, gap), np.log(32) - eq.entropy(*case, 1 - gap), rtol=1e-12)
    d = eq.entropy_deficit(Softmax(4.0), [1.0, -1.0], 32, 1e-9)
    assert relative_error(d, 31 * (4e-9) ** 2 / (2 * 32**2)) < 1e-8
    assert np.all(eq.entropy_deficit(*case, 0.0) == 0)
    around = (
        eq.entropy_deficit(Softmax(1.0), [1.0], 2, 0.2),
        eq.entropy_deficit(Softmax(1.0), [1.0], 2, np.nextafter(0.2, 1)),
    )
    assert relative_error(*around) < 1e-14  # the series and the formula meet (2 q = .0997, above; q = .0498, below)


def test_entropy_rate_is_the_derivative_along_the_drift_and_rises_with_the_cosine():
    case, gamma = (Softmax(4.0), [1.0, -0.2], 32), jnp.asarray(0.3)
    drift = eq.drift(*case, gamma)
    _, rate = jax.jvp(lambda g: eq.entropy(*case, g), (gamma,), (drift,))
    np.testing.assert_allclose(eq.entropy_rate(*case, gamma), rate, rtol=1e-12)
    assert np.all(rate * drift > 0)


def test_refusals_name_the_rule():
    for call, words in (
        (lambda: eq.cosine(Softmax(1.0), [1.0], 1, 0.0, 1.0), "at least 2"),
        (lambda: eq.cosine(Softmax(1.0), [1.0], 5, -0.3, 1.0), "-1/"),
        (lambda: eq.cosine(Softmax(1.0), [1.0], 5, 0.3, -1.0), "`t`"),
        (lambda: eq.cosine(Exponential(1e4), [1.0], 5, 0.3, 1.0), "does not fit"),
        (lambda: eq.cosine(Hardmax(), [1.0], 5, 0.3, 1.0), "Hardmax"),
        (lambda: eq.entropy(ReLU(), [1.0], 5, 0.3), "entropy"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_cosine_maps_compiles_and_has_the_derivative_of_finite_differences():
    def law(beta):
        return eq.cosine(Softmax(beta), jnp.array([1.0, 2.0]), 8, 0.1, 0.5)

    b, h = jnp.array([0.9, 1.1]), 1e-5
    value, slope = jax.jit(jax.vmap(jax.value_and_grad(law)))(b)
    plus, minus = jax.jit(jax.vmap(law))(b + h), jax.jit(jax.vmap(law))(b - h)
    assert relative_error(value, (plus + minus) / 2) < 1e-9
    np.testing.assert_allclose(slope, (plus - minus) / (2 * h), rtol=1e-7)


def test_time_has_the_derivative_one_over_drift():
    case = Softmax(1.0), [1.0], 100
    assert relative_error(jax.grad(lambda g: eq.time(*case, 0.0, g))(0.5), 1 / eq.drift(*case, 0.5)) < ODE


def test_single_precision_arguments_are_computed_in_double():
    low = eq.cosine_deficit(Softmax(np.float32(4.0)), np.ones(1, np.float32), 32, np.float32(0), np.float32(10))
    assert low.dtype == jnp.float64 and relative_error(low, 2.2610988430006077435e-6) < ODE
