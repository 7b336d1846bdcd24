"""The zero-temperature flow against 40-digit values, integration in numpy, optimal transport and known rates."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from exact import REFERENCE, relative_error
from scipy.integrate import solve_ivp

from attnflow.heads import Heads, ScalarHeads
from attnflow.theory import laplace, terminal
from attnflow.theory import low_temperature as lt

ELEMENTARY, ODE = 1e-13, 1e-10


def head(B, V):
    return Heads(np.asarray(B, float)[None], np.asarray(V, float)[None])


def unit(x):
    x = np.asarray(x, float)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def case(row):
    A, B = (np.array(row[k], float) for k in ("A_equals_V_BT", "B"))
    return (
        head(B, A @ np.linalg.inv(B).T),
        jnp.asarray(unit([np.array(row["x0_unnormalised"], float)])),
        float(row["t"]),
    )


@pytest.mark.parametrize("row", REFERENCE["zero_temp"], ids=["plane", "space"])
def test_the_flow_is_the_reference_value(row):
    heads, x0, t = case(row)
    assert relative_error(lt.token_clock(heads, x0, t), float(row["s"])) < ODE
    assert relative_error(lt.zero_temperature_flow(heads, x0, t)[0], np.array(row["x"], float)) < ODE


def test_the_flow_solves_its_field_for_many_tokens_at_once():
    heads, _, _ = case(REFERENCE["zero_temp"][1])
    B, V = np.asarray(heads.score[0]), np.asarray(heads.value[0])
    x0 = unit(np.random.default_rng(1).normal(size=(6, 3)))

    def move(_, x):
        y = x.reshape(6, 3)
        push = y @ B / np.linalg.norm(y @ B, axis=1, keepdims=True) @ V.T
        return (push - np.sum(push * y, 1, keepdims=True) * y).ravel()

    np.testing.assert_allclose(
        lt.zero_temperature_velocity(heads, jnp.asarray(x0)).ravel(), move(0, x0.ravel()), atol=1e-13
    )
    x = solve_ivp(move, (0, 2), x0.ravel(), method="DOP853", rtol=1e-12, atol=1e-13).y[:, -1].reshape(6, 3)
    np.testing.assert_allclose(lt.zero_temperature_flow(heads, jnp.asarray(x0), 2.0), x, atol=1e-10)


def test_the_projection_is_invariant_and_the_angle_falls_at_least_at_its_rate():
    heads, _, _ = case(REFERENCE["zero_temp"][1])
    x0 = jnp.asarray(unit(np.random.default_rng(2).normal(size=(20, 3))))
    x = lt.zero_temperature_flow(heads, x0, 3.0)
    np.testing.assert_allclose(lt.projection(heads, x), lt.projection(heads, x0), atol=1e-11)
    s = lt.token_clock(heads, x0, 3.0)
    bound = lt.tangent(heads, x0) * jnp.exp(-lt.spectral_gap(heads) * s)
    assert bool(jnp.all(lt.tangent(heads, x) <= bound * (1 + 1e-9)))
    assert bool(jnp.all(lt.pathwise_rate(heads) * 3.0 <= lt.spectral_gap(heads) * s * (1 + 1e-12)))


def test_orthogonal_queries_keep_time():
    R = np.linalg.qr(np.random.default_rng(3).normal(size=(3, 3)))[0]
    x0 = jnp.asarray(unit(np.random.default_rng(4).normal(size=(4, 3))))
    heads = head(R, np.diag([2.0, 1.0, -1.0]) @ R)
    np.testing.assert_allclose(lt.token_clock(heads, x0, 7.0), 7, rtol=1e-13)


def test_only_the_algebraically_largest_eigenvalue_matters():
    heads = head(np.eye(2), np.diag([1.0, -4.0]))
    x = lt.zero_temperature_flow(heads, jnp.array([[0.6, 0.8]]), 20.0)
    np.testing.assert_allclose(x, [[1, 0]], atol=1e-12)
    assert lt.spectral_gap(heads) == 5


def test_multiplicity_is_found_and_the_projection_reaches_the_whole_space():
    U = np.linalg.qr(np.random.default_rng(5).normal(size=(4, 4)))[0]
    A = U @ np.diag([2.0, 2.0 + 1e-9, 1.0, -3.0]) @ U.T
    heads = head(np.eye(4), (A + A.T) / 2)
    P1, m = lt.principal_space(heads)
    np.testing.assert_allclose(P1, U[:, :2] @ U[:, :2].T, atol=1e-12)
    assert m == 2 and abs(lt.spectral_gap(heads) - 1) < 1e-8
    assert lt.spectral_gap(head(np.eye(3), np.eye(3))) == 0 and lt.principal_space(head(np.eye(3), np.eye(3)))[1] == 3


def test_asymmetric_products_are_refused_unless_symmetrised():
    heads = head(np.eye(2), [[1, 0], [0.5, 0.2]])
    x = jnp.array([[0.6, 0.8]])
    assert lt.asymmetry(heads) == 0.5
    for call in (
        lt.spectral_gap,
        lt.principal_space,
        lambda h: lt.projection(h, x),
        lambda h: lt.zero_temperature_flow(h, x, 1.0),
    ):
        with pytest.raises(ValueError, match=r"Assumption 1 fails: asymmetry 0\.5"):
            call(heads)
    mu = np.linalg.eigvalsh([[1, 0.25], [0.25, 0.2]])
    assert relative_error(lt.spectral_gap(heads, symmetrize=True), mu[1] - mu[0]) < 1e-14
    assert np.all(np.isfinite(lt.projection(heads, x, symmetrize=True)))
    noise = np.float32([[1.1, 0.3], [0.3 * (1 + 1e-7), 0.2]])
    assert lt.spectral_gap(head(np.eye(2), noise)) > 0
    with pytest.raises(Exception, match="Assumption 1 fails"):
        jax.block_until_ready(jax.jit(lt.spectral_gap)(heads))


def test_undefined_projections_and_many_heads_are_refused():
    one = head(np.eye(2), np.diag([2.0, 1.0]))
    with pytest.raises(ValueError, match="undefined"):
        lt.projection(one, jnp.array([[0.0, 1.0]]))
    with pytest.raises(ValueError, match="one head"):
        lt.spectral_gap(ScalarHeads([1.0, 2.0]).dense(2))
    with pytest.raises(ValueError, match="any dimension"):
        lt.spectral_gap(ScalarHeads([1.0]))


def test_a_token_off_the_principal_space_stays_off_it():
    x = lt.zero_temperature_flow(head(np.eye(2), np.diag([2.0, 1.0])), jnp.array([[0.0, 1.0], [1e-9, 1.0]]), 60.0)
    np.testing.assert_allclose(x, [[0, 1], [1, 0]], atol=1e-16)


def test_w2_to_the_projection_is_the_optimal_transport_value(key):
    ot = pytest.importorskip("ot")
    heads, _, _ = case(REFERENCE["zero_temp"][1])
    x = jnp.asarray(unit(np.random.default_rng(6).normal(size=(40, 3))))
    w = np.random.default_rng(7).dirichlet(np.ones(40))
    y = np.asarray(lt.projection(heads, x))
    cost = np.sum((np.asarray(x)[:, None] - y[None]) ** 2, axis=-1)
    assert relative_error(lt.zero_temperature_w2(heads, x, jnp.asarray(w)) ** 2, ot.emd2(w, w, cost)) < 1e-12
    assert relative_error(lt.zero_temperature_w2(heads, x) ** 2, ot.emd2([], [], cost)) < 1e-12


def test_w2_to_the_projection_is_accurate_when_tiny():
    heads = head(np.eye(2), np.diag([2.0, 1.0]))
    assert relative_error(lt.zero_temperature_w2(heads, jnp.array([[1.0, 1e-12]])), 1e-12) < 1e-14
    x = jnp.array([[1.0, 0.0]])
    assert lt.zero_temperature_w2(heads, x) == 0
    assert np.all(np.isfinite(jax.grad(lambda x: lt.zero_temperature_w2(heads, x))(x)))


@pytest.mark.parametrize("row", REFERENCE["zero_temp_W2_uniform"], ids=lambda r: f"{r['kind']}g{r['gamma']}")
def test_uniform_w2_is_the_reference_value(row):
    d, m = int(row["kind"][1]), int(row["kind"][3])
    assert relative_error(lt.uniform_w2(d, m, float(row["gamma"]) * float(row["t"])), float(row["W2"])) < ELEMENTARY


@pytest.mark.parametrize("row", REFERENCE["W2_uniform_to_projection"], ids=lambda r: f"d{r['d']}m{r['m']}")
def test_uniform_w2_at_time_zero_is_the_reference_value(row):
    assert relative_error(lt.uniform_w2(row["d"], row["m"], 0.0), float(row["W2_chordal"])) < ELEMENTARY


@pytest.mark.parametrize("decay", [0.1, 4.0, 60.0])
def test_uniform_w2_agrees_with_its_elementary_forms(decay):
    with mpmath.workdps(200):
        forms = {key: float(mpmath.sqrt(v)) for key, v in _forms(decay).items()}
    for (d, m), value in forms.items():
        assert relative_error(lt.uniform_w2(d, m, decay), value) < 1e-12


def _forms(decay):
    q = mpmath.exp(-mpmath.mpf(decay))
    k2 = 1 - q**2
    k = mpmath.sqrt(k2)
    return {
        (2, 1): 2 - 4 / mpmath.pi * mpmath.asin(k) / k,
        (3, 1): 2 * q / (1 + q),
        (3, 2): 2 - 2 * (mpmath.ellipe(k2) - q**2 * mpmath.ellipk(k2)) / k2,
    }


def test_uniform_w2_is_what_many_tokens_on_the_circle_show():
    theta = (np.arange(4000) + 0.5) * 2 * np.pi / 4000
    x = lt.zero_temperature_flow(
        head(np.eye(2), np.diag([1.0, 0.0])), jnp.stack([jnp.cos(theta), jnp.sin(theta)], 1), 2.0
    )
    assert relative_error(lt.zero_temperature_w2(head(np.eye(2), np.diag([1.0, 0.0])), x), 0.39481444676636715) < 1e-5


@pytest.mark.parametrize(
    ("b", "rate", "pathwise"), [((4.0, 1.0), 0.25, 0.25), ((1.0, 4.0), 0.125, 0.25), ((1.0, 1.0), 0.5, 1.0)]
)
def test_the_rate_of_the_measure_is_not_the_rate_of_a_path(b, rate, pathwise):
    heads = head(np.diag(b), np.diag([2.0, 1.0]) / np.array(b))
    assert relative_error([lt.projection_rate(heads), lt.pathwise_rate(heads)], [rate, pathwise]) < 1e-14
    # nodes graded down to the mass that crosses late: theta from the separatrix = e^y
    y = np.linspace(-100, np.log(np.pi / 2), 3001)
    theta, w = np.exp(y), np.exp(y) * np.gradient(y)
    x0 = jnp.asarray(np.stack([np.sin(theta), np.cos(theta)], 1))
    times = (50.0, 60.0)
    gap = [
        lt.zero_temperature_w2(heads, lt.zero_temperature_flow(heads, x0, t), jnp.asarray(w / w.sum())) for t in times
    ]
    assert relative_error(np.log(gap[0] / gap[1]) / 10, rate) < 2e-3


@pytest.mark.parametrize("row", REFERENCE["bound"], ids=lambda r: f"beta{r['beta']}")
def test_the_bound_of_theorem_1_and_its_best_time_are_the_reference_values(row):
    beta, growth, decay = (float(row[k]) for k in ("beta", "C1", "c"))
    assert relative_error(lt.concentration_bound(beta, 0.0, growth, decay) - 1, float(row["prefactor"])) < ELEMENTARY
    t = lt.best_time(beta, growth, decay)
    assert relative_error(t, float(row["t_star"])) < ELEMENTARY
    assert relative_error(lt.best_bound(beta, growth, decay), float(row["bound_at_t_star"])) < ELEMENTARY
    assert relative_error(lt.concentration_bound(beta, t, growth, decay), float(row["bound_at_t_star"])) < ELEMENTARY
    assert abs(jax.grad(lambda t: lt.concentration_bound(beta, t, growth, decay))(t)) < 1e-14


def test_the_best_time_is_clipped_at_zero():
    assert lt.best_time(1.0, 5.0, 0.5) == 0 and lt.best_bound(1.0, 5.0, 0.5) == lt.concentration_bound(
        1.0, 0.0, 5.0, 0.5
    )


def test_field_growth_bounds_the_spread_of_neighbouring_paths():
    heads = head(np.diag([1.0, 4.0]), np.diag([2.0, 0.25]))
    theta = np.linspace(0, 2 * np.pi, 400, endpoint=False)
    circle = jnp.asarray(np.stack([np.cos(theta), np.sin(theta)], 1))
    angular = jax.vmap(jax.grad(lambda a: _turn(heads, a)))(jnp.asarray(theta))
    # on the circle DX_0 is the angular derivative along the tangent and minus the velocity across it
    across = jax.vmap(lambda a: _turn(heads, a))(jnp.asarray(theta))
    assert relative_error(lt.field_growth(heads, circle), float(jnp.max(jnp.hypot(angular, across)))) < 1e-10


def _turn(heads, a):
    v = lt.zero_temperature_velocity(heads, jnp.stack([jnp.cos(a), jnp.sin(a)])[None])[0]
    return -jnp.sin(a) * v[0] + jnp.cos(a) * v[1]


@pytest.mark.parametrize("row", REFERENCE["softmax_mean_uniform_sphere"], ids=lambda r: f"d{r['d']}k{r['kappa']}")
def test_laplace_mean_and_gibbs_width_are_the_reference_values(row):
    d, kappa = row["d"], float(row["kappa"])
    assert relative_error(lt.laplace_mean(d, kappa), float(row["A"])) < ELEMENTARY
    assert relative_error(laplace.gibbs_w2(d, kappa), float(row["W2_gibbs_to_dirac"])) < ELEMENTARY


@pytest.mark.parametrize("d", [2, 3, 10, 200])
def test_laplace_mean_is_the_ratio_of_bessel_functions_over_all_sizes(d):
    kappas = [1e-8, 1e-3, 1.0, 30.0, 1e3, 1e4, 1e6, 1e8]
    with mpmath.workdps(60):
        exact = [mpmath.besseli(mpmath.mpf(d) / 2, k) / mpmath.besseli(mpmath.mpf(d) / 2 - 1, k) for k in kappas]
        mean, deficit = [float(a) for a in exact], [float(1 - a) for a in exact]
    assert relative_error(laplace.laplace_mean(d, jnp.array(kappas)), mean) < 1e-14
    assert relative_error(laplace.laplace_deficit(d, jnp.array(kappas)), deficit) < 1e-9
    assert laplace.laplace_mean(d, 0.0) == 0 and laplace.laplace_mean(d, -1.0) == -laplace.laplace_mean(d, 1.0)


def test_laplace_mean_has_the_derivative_of_its_equation():
    A, slope = jax.value_and_grad(lambda k: laplace.laplace_mean(5, k))(7.0)
    assert relative_error(slope, 1 - A**2 - 4 / 7 * A) < 1e-12


def test_laplace_expansion_is_first_order_for_a_lipschitz_density():
    """Error of second order on the circle with density 1 + .3 cos(theta - .7)."""
    theta = np.arange(200000) * 2 * np.pi / 200000

    def error(kappa):
        w = np.exp(kappa * (np.cos(theta) - 1)) * (1 + 0.3 * np.cos(theta - 0.7))
        mean = np.array([w @ np.cos(theta), w @ np.sin(theta)]) / w.sum()
        slope = np.array([0.0, 0.3 * np.sin(0.7) / (1 + 0.3 * np.cos(0.7))])  # at y* = e1, along e2
        return np.linalg.norm(mean - laplace.laplace_expansion(jnp.array([1.0, 0.0]), kappa, jnp.asarray(slope)))

    slope = np.log(error(400.0) / error(100.0)) / np.log(4)
    assert abs(slope + 2) < 0.05
    radial = laplace.laplace_expansion(jnp.array([1.0, 0.0]), 10.0, jnp.array([5.0, 0.0]))
    np.testing.assert_allclose(radial, [0.95, 0], atol=1e-15)


def test_noisy_thresholds_are_the_known_values():
    assert (
        relative_error(
            [laplace.noise_transition(2), laplace.noise_transition(3)], [2.44691831128904613, 1.81615452543588396]
        )
        < 1e-13
    )
    assert (
        relative_error(
            [laplace.noise_threshold(1.0, 2), laplace.noise_threshold(1.0, 3)], [0.884706618840291, 1.35914091422952]
        )
        < 1e-13
    )
    assert laplace.noise_threshold(0.0, 5) == 2.5
    for beta in (10.0, 300.0):
        exact = mpmath.mpf(beta) ** 1.5 / (mpmath.mpf(2) ** 1.5 * mpmath.gamma(1.5) * mpmath.besseli(1.5, beta))
        assert relative_error(laplace.noise_threshold(beta, 3), float(exact)) < 1e-11
    with pytest.raises(ValueError, match="1000"):
        laplace.noise_threshold(1e4, 3)


@pytest.mark.parametrize(
    ("V", "B", "kept"),
    [((1, -2), (1, -2), 1), ((1, -2), (3, -0.5), 0), ((-1, -2), (-3, -1), 1), ((1, 0.5), (1, 4), 0)],
)
def test_an_antipodal_pair_is_stable_where_the_sign_of_its_score_says(V, B, kept):
    lam, states, stable = terminal.antipodal_states(head(np.diag(B), np.diag(V)))
    assert stable[int(np.argmax(np.abs(states[:, kept])))]
    for k, (value, v) in enumerate(zip(lam, states, strict=True)):
        nudged = jnp.asarray(unit(v + 1e-4 * np.asarray(states[1 - k])))
        push = terminal.antipodal_velocity(head(np.diag(B), np.diag(V)), nudged, 8.0)
        assert (float(push @ states[1 - k]) < 0) == bool(stable[k]), value
        assert np.linalg.norm(terminal.antipodal_velocity(head(np.diag(B), np.diag(V)), v, 8.0)) < 1e-15


def test_a_pair_on_the_zero_cone_halts_off_every_eigenvector():
    x = jnp.asarray(unit([np.sqrt(2.0), 1.0]))  # x^T B x = -2/3 + 2/3
    heads = head(np.diag([-1.0, 2.0]), np.diag([-1.0, -2.0]))
    assert np.linalg.norm(terminal.antipodal_velocity(heads, x, 8.0)) < 1e-14
    assert abs(np.degrees(np.arctan2(float(x[1]), float(x[0]))) - 35.26438968) < 1e-7
    with pytest.raises(ValueError, match="real spectrum"):
        terminal.antipodal_states(head(np.eye(2), [[0, -1], [1, 0]]))


def test_low_temperature_forms_map_compile_and_differentiate():
    x0 = jnp.asarray(unit(np.random.default_rng(8).normal(size=(3, 2))))

    def spread(b):
        heads = Heads(
            jnp.stack([jnp.ones(()), b])[None, :, None] * jnp.eye(2)[None], jnp.diag(jnp.array([2.0, 0.25]))[None]
        )
        return lt.zero_temperature_w2(heads, lt.zero_temperature_flow(heads, x0, 1.5))

    b, h = jnp.array([3.0, 4.0]), 1e-5
    value, slope = jax.jit(jax.vmap(jax.value_and_grad(spread)))(b)
    difference = (jax.jit(jax.vmap(spread))(b + h) - jax.jit(jax.vmap(spread))(b - h)) / (2 * h)
    np.testing.assert_allclose(slope, difference, rtol=1e-7)
    assert np.all(np.isfinite(value))


def test_the_flow_keeps_the_dtype_of_the_tokens(dtype):
    heads = head(np.diag([1.0, 4.0]), np.diag([1.0, 0.5]))
    x = lt.zero_temperature_flow(heads, jnp.asarray([[0.6, 0.8]], dtype), 1.0)
    assert x.dtype == dtype and abs(float(jnp.linalg.norm(x)) - 1) < 4 * np.finfo(dtype).eps
