"""Exact distances against independent solvers, the closed forms of the reference file, and cases that break naive code."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import REFERENCE, relative_error
from scipy import special
from scipy.optimize import linear_sum_assignment, linprog

from attnflow import transport
from attnflow.transport import exact, w2
from attnflow.transport.circle import _plan

ot = exact.exact_solver()

METRICS = ["chordal", "geodesic"]


def cloud(rng, n, d, *, shift=0.0):
    """Unit vectors in numpy, leaning to e_1."""
    x = rng.normal(size=(n, d)) + shift * np.eye(d)[0]
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def weights(rng, n):
    w = rng.random(n) + 0.01
    return w / w.sum()


def naive_cost(x, y, metric):
    """Cost table from the definition: chords, or arc cosines of inner products."""
    if metric == "chordal":
        return np.sum((x[:, None] - y[None]) ** 2, axis=2)
    return np.arccos(np.clip(x @ y.T, -1, 1)) ** 2


def solved(x, y, a, b, metric):
    return np.sqrt(ot.emd2(a, b, naive_cost(x, y, metric), numItermax=10**7))


def angles(t):
    return np.stack([np.cos(t), np.sin(t)], axis=1)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("d", [2, 3, 16])
def test_exact_distances_agree_with_a_linear_programme(metric, d):
    rng = np.random.default_rng(d)
    x, y, a, b = cloud(rng, 14, d), cloud(rng, 9, d, shift=1.0), weights(rng, 14), weights(rng, 9)
    rows, columns = np.kron(np.eye(14), np.ones(9)), np.kron(np.ones(14), np.eye(9))
    cost = naive_cost(x, y, metric).ravel()
    value = linprog(cost, A_eq=np.vstack([rows, columns]), b_eq=np.concatenate([a, b]), method="highs").fun
    found = w2(x, y, x_weights=a, y_weights=b, metric=metric)
    assert found.exact and found.width == 0
    assert relative_error(found.value**2, value) < 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_the_shift_search_is_exact_on_the_circle(seed):
    rng = np.random.default_rng(seed)
    n, m = (37, 23) if seed % 2 else rng.integers(1, 60, 2)
    x, y, a, b = (
        cloud(rng, n, 2, shift=rng.random()),
        cloud(rng, m, 2, shift=rng.random()),
        weights(rng, n),
        weights(rng, m),
    )
    found = w2(x, y, x_weights=a, y_weights=b, metric="geodesic", method="circle")
    truth = solved(x, y, a, b, "geodesic")
    assert abs(found.value - truth) < 1e-12
    if seed % 2:  # one shape, one compilation
        assert abs(jax.jit(transport.circle_distance)(x, y, x_weights=a, y_weights=b) - truth) < 1e-12


def test_no_shift_is_optimal_for_the_chordal_metric_on_the_circle():
    excess = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        x, y = cloud(rng, 6, 2), cloud(rng, 6, 2)
        cost = naive_cost(x, y, "chordal")
        order, other = (np.argsort(np.arctan2(p[:, 1], p[:, 0])) for p in (x, y))
        shifts = min(np.mean(cost[order, np.roll(other, k)]) for k in range(6))
        excess.append(np.sqrt(shifts) - w2(x, y).value)
    assert min(excess) > -1e-12
    assert max(excess) > 1e-3


def test_the_shift_search_takes_a_hundred_thousand_points():
    n = 100_000
    t = 2 * np.pi * np.sort(np.random.default_rng(0).random(n))
    w = weights(np.random.default_rng(1), n)
    found = w2(angles(t), angles(t + 0.3), x_weights=w, y_weights=w, metric="geodesic")
    assert (
        found.value <= 0.3 + 1e-9
    )  # the rotation is one plan, and for equal laws on the circle a better one may exist
    i, j, mass = _plan(np, angles(t), angles(t + 0.3), w, w)
    for index in (i, j):
        assert np.max(np.abs(np.bincount(index, mass, n) - w)) < 1e-14


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("d", [2, 3, 16])
def test_two_atoms_are_exact_anywhere_and_for_any_weights(metric, d):
    rng = np.random.default_rng(d)
    x, a = cloud(rng, 80, d), weights(rng, 80)
    for atoms in (cloud(rng, 2, d), np.array([1.0, -1.0])[:, None] * cloud(rng, 1, d)):
        y, b = np.repeat(atoms, [3, 2], axis=0), weights(rng, 5)
        truth = solved(x, y, a, b, metric)
        for found in (
            w2(x, y, x_weights=a, y_weights=b, metric=metric),
            w2(y, x, x_weights=b, y_weights=a, metric=metric),
        ):
            assert found.method == "two atoms"
            assert abs(found.value - truth) < 1e-12
        masses = jnp.array([b[:3].sum(), b[3:].sum()])
        traced = jax.jit(lambda x, y, m: transport.two_atoms_distance(x, y, m, weights=a, metric=metric))(
            jnp.asarray(x), jnp.asarray(atoms), masses
        )
        assert abs(traced - truth) < 1e-12


def test_two_atoms_in_rounding_noise_carry_their_spread():
    rng = np.random.default_rng(5)
    x = cloud(rng, 100, 3).astype(np.float32)
    y = (np.sign(x[:, :1]) * np.array([[0.6, 0.8, 0.0]]) + 1e-8 * rng.normal(size=(100, 3))).astype(np.float32)
    found = w2(x, y)
    assert found.method == "two atoms" and 0 < found.width < 1e-5
    assert (
        found.lower
        <= solved(x.astype(float), y.astype(float), np.full(100, 0.01), np.full(100, 0.01), "chordal")
        <= found.upper
    )


def test_flat_tokens_on_a_line_are_sorted():
    rng = np.random.default_rng(6)
    x, a, b = rng.normal(size=(70, 4)), weights(rng, 70), weights(rng, 50)
    y = rng.normal(size=4) + rng.normal(size=(50, 1)) * rng.normal(size=4)
    found = w2(x, y, x_weights=a, y_weights=b)
    assert found.method == "sorting on a line"
    assert abs(found.value - solved(x, y, a, b, "chordal")) < 1e-12


@pytest.mark.parametrize("metric", METRICS)
def test_the_simplex_closes_on_distances_near_zero(metric):
    """A few tight clusters a hair apart: W2^2 is 1e-12, the costs between clusters are of order 1."""
    rng = np.random.default_rng(7)
    centres = cloud(rng, 5, 3)[rng.integers(0, 5, 60)]
    x, y = (centres + 1e-6 * rng.normal(size=(60, 3)) for _ in range(2))
    x, y = (p / np.linalg.norm(p, axis=1, keepdims=True) for p in (x, y))
    w = np.full(60, 1 / 60)
    found = w2(x, y, metric=metric)
    if metric == "chordal":
        i, j = linear_sum_assignment(naive_cost(x, y, metric))
        truth = np.sqrt(np.mean(np.sum((x[i] - y[j]) ** 2, axis=1)))
        assert found.lower <= truth * (1 + 1e-9) and truth <= found.upper * (1 + 1e-9)
    assert found.exact and found.relative_width < 1e-2  # rounding of a dual is 1e-15 of costs of order 1: 1e-3 of 1e-12
    assert abs(w2(x, y, x_weights=w, y_weights=w, metric=metric).value - found.value) < 1e-12


@pytest.mark.parametrize("metric", METRICS)
def test_without_pot_equal_weights_are_an_assignment(metric, monkeypatch):
    monkeypatch.setattr(exact, "exact_solver", lambda: None)
    rng = np.random.default_rng(8)
    x, y = cloud(rng, 50, 3), cloud(rng, 50, 3)
    found = w2(x, y, metric=metric)
    assert found.method == "assignment" and found.exact
    assert abs(found.value - solved(x, y, np.full(50, 0.02), np.full(50, 0.02), metric)) < 1e-12


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_small_rotation_is_resolved(dtype):
    """n = 50 on the equator, turned by 1e-5: the distance is 1e-5, never negative, never NaN."""
    t = 2 * np.pi * np.random.default_rng(0).random(50)
    x, y = (np.stack([np.cos(s), np.sin(s), 0 * s], axis=1).astype(dtype) for s in (t, t + 1e-5))
    for metric in METRICS:
        for method in (None, "simplex", "sinkhorn") if metric == "chordal" else (None,):
            found = w2(x, y, metric=metric, method=method)
            assert found.lower <= found.upper and abs(found.value - 1e-5) < 2e-7, (metric, method)
        assert abs(transport.coupled(jnp.asarray(x), jnp.asarray(y), metric=metric) - 1e-5) < 2e-7
    flat = [jnp.asarray(p[:, :2]) for p in (x, y)]
    assert abs(transport.circle_distance(*flat) - 1e-5) < 2e-7
    assert abs(w2(*flat, metric="geodesic").value - 1e-5) < 2e-7


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("d", [2, 3])
def test_equal_clouds_are_at_distance_zero(metric, d):
    rng = np.random.default_rng(9)
    x, w = cloud(rng, 200, d), weights(rng, 200)
    order = rng.permutation(200)
    assert w2(x, x, metric=metric, x_weights=w).upper == 0
    shuffled = w2(x, x[order], x_weights=w, y_weights=w[order], metric=metric)
    assert shuffled.lower >= 0 and shuffled.upper < 1e-7
    if d == 3:
        certified = w2(x, x[order], x_weights=w, y_weights=w[order], metric=metric, method="sinkhorn")
        assert certified.lower <= 1e-12 and certified.upper < 1e-7


@pytest.mark.parametrize("metric", METRICS)
def test_one_atom_needs_no_solver(metric):
    rng = np.random.default_rng(10)
    x, a = cloud(rng, 30, 3), weights(rng, 30)
    y = np.repeat(cloud(rng, 1, 3), 7, axis=0)
    truth = np.sqrt(a @ naive_cost(x, y[:1], metric)[:, 0])
    assert abs(w2(x, y, x_weights=a, metric=metric).value - truth) < 1e-12
    sharp = np.zeros(30)
    sharp[4] = 1.0
    assert (
        abs(w2(x, y, x_weights=sharp, metric=metric).value - np.sqrt(naive_cost(x[4:5], y[:1], metric)[0, 0])) < 1e-12
    )


@pytest.mark.parametrize("metric", METRICS)
def test_zero_weights_and_duplicates_change_nothing(metric):
    rng = np.random.default_rng(11)
    x, y, a, b = cloud(rng, 40, 3), cloud(rng, 25, 3), weights(rng, 40), weights(rng, 25)
    plain = w2(x, y, x_weights=a, y_weights=b, metric=metric).value
    far = np.concatenate([x, cloud(rng, 5, 3)]), np.concatenate([a, np.zeros(5)])
    split = np.repeat(x, 2, axis=0), np.stack([0.3 * a, 0.7 * a], axis=1).ravel()
    for p, w in (far, split):
        found = w2(p, y, x_weights=w, y_weights=b, metric=metric)
        assert abs(found.value - plain) < 1e-12
    far, w = (jnp.asarray(v) for v in far)
    bounds = transport.sinkhorn_interval(far, jnp.asarray(y), x_weights=w, y_weights=b, metric=metric)
    assert bounds.lower <= plain <= bounds.upper and bounds.relative_width < 0.1


def test_weights_default_to_those_of_x_where_sizes_agree():
    rng = np.random.default_rng(12)
    x, y, a = cloud(rng, 20, 3), cloud(rng, 20, 3), weights(rng, 20)
    assert w2(x, y, x_weights=a).value == w2(x, y, x_weights=a, y_weights=a).value
    assert w2(x, y[:15], x_weights=a).value == w2(x, y[:15], x_weights=a, y_weights=np.full(15, 1 / 15)).value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros(3)}, "`x` must have shape"),
        ({"y": np.zeros((4, 2))}, "same dimension"),
        ({"x": np.full((3, 3), np.nan)}, "row 0 is not"),
        ({"y": 2 * np.eye(3), "metric": "geodesic"}, "norm 2"),
        ({"metric": "cosine"}, "'chordal' or 'geodesic'"),
        ({"x_weights": np.ones(2) / 2}, "one weight per point"),
        ({"x_weights": np.array([1.5, -0.5, 0.0])}, ">= 0"),
        ({"x_weights": np.ones(3)}, "sum 1"),
        ({"method": "circle"}, "does not apply"),
        ({"method": "emd"}, "one of"),
        ({"tolerance": 0.0}, "`tolerance`"),
    ],
)
def test_wrong_arguments_say_what_to_change(change, message):
    call = {"x": np.eye(3), "y": np.eye(3)[[1, 2, 0]]} | change
    with pytest.raises(ValueError, match=message):
        w2(call.pop("x"), call.pop("y"), **call)


def test_tracers_are_refused_with_the_functions_to_use():
    with pytest.raises(ValueError, match="sinkhorn_interval"):
        jax.jit(lambda x: w2(x, x).lower)(jnp.eye(3))


@pytest.mark.slow
def test_float32_tokens_without_x64_get_float64_distances():
    """Costs are float64 in a process that never heard of x64, the Sinkhorn certificate too, and the flag stays off."""
    code = (
        "import numpy as np, jax.numpy as jnp, jax\n"
        "from attnflow.transport import w2\n"
        "r = np.random.default_rng(0)\n"
        "x, y = (jnp.asarray(p / np.linalg.norm(p, axis=1, keepdims=True)) for p in r.normal(size=(2, 40, 3)))\n"
        "a, b = w2(x, y), w2(x, y, method='sinkhorn', tolerance=1e-9)\n"
        "assert x.dtype == jnp.float32 and not jax.config.jax_enable_x64\n"
        "assert a.lower.dtype == np.float64 and b.relative_width < 1e-9, b\n"
        "assert b.lower - 1e-12 <= a.value <= b.upper + 1e-12, (a, b)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": "", "JAX_PLATFORMS": "cpu"})


# The reference values, 20 digits each.


def midpoints(n):
    return (np.arange(n) + 0.5) / n


@pytest.mark.parametrize("case", REFERENCE["zero_temp_W2_uniform"], ids=lambda c: f"{c['kind']}-{c['gamma']}")
def test_reference_zero_temperature_flow_of_the_uniform_law(case):
    q = np.exp(-float(case["gamma"]) * float(case["t"]))
    d, m = int(case["kind"][1]), int(case["kind"][3])
    phi, w = np.polynomial.legendre.leggauss(200)
    phi = (phi + 1) * np.pi / 4  # latitude over the subspace's complement, density 1 (d = 2) or cos (d = 3)
    x = angles(phi) if (d, m) != (3, 1) else angles(phi)[:, ::-1]
    w = w * (np.cos(phi) if d == 3 else 1)
    x = x * np.array([1.0, q])
    x = jnp.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))
    found = transport.to_projection(x, jnp.eye(2)[:, :1], weights=w / w.sum())
    assert relative_error(found, float(case["W2"])) < 1e-12


@pytest.mark.parametrize("case", REFERENCE["softmax_mean_uniform_sphere"], ids=lambda c: f"{c['d']}-{c['kappa']}")
def test_reference_gibbs_measure_to_its_mode(case):
    d, kappa = int(case["d"]), float(case["kappa"])
    t, w = special.roots_jacobi(400, (d - 3) / 2, (d - 3) / 2)
    w = w * np.exp(kappa * (t - 1))
    x = np.stack([t, np.sqrt(1 - t**2)], axis=1)
    found = w2(x, np.array([[1.0, 0.0]]), x_weights=w / w.sum())
    assert found.exact and relative_error(found.value, float(case["W2_gibbs_to_dirac"])) < 1e-12


@pytest.mark.parametrize("case", REFERENCE["W2_uniform_to_projection"], ids=lambda c: f"{c['d']}-{c['m']}")
def test_reference_uniform_law_to_its_projection(case):
    d, m = int(case["d"]), int(case["m"])
    s, w = special.roots_jacobi(
        60, (d - m) / 2 - 1, m - 1
    )  # |P_1 x| = r has density r^{m-1} (1 - r^2)^{(d-m)/2-1} on [0, 1]
    r = (s + 1) / 2
    w = w * (1 + r) ** ((d - m) / 2 - 1)
    x = jnp.asarray(np.stack([r, np.sqrt(1 - r**2)], axis=1))
    found = transport.to_projection(x, jnp.eye(2)[:, :1], weights=w / w.sum())
    assert relative_error(found, float(case["W2_chordal"])) < 1e-12


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("p", ["0.5", "0.3"])
def test_reference_uniform_laws_to_antipodal_atoms(p, metric):
    b = np.array([float(p), 1 - float(p)])
    n = 30_000
    circle = next(c for c in REFERENCE["W2_circle_uniform_to_p_antipodal"] if c["p"] == p)
    found = w2(angles(np.pi * midpoints(n)), np.array([[1.0, 0.0], [-1.0, 0.0]]), y_weights=b, metric=metric)
    assert relative_error(found.value, float(circle[f"W2_{metric}"])) < 1e-8
    sphere = next(c for c in REFERENCE["W2_S2_uniform_to_p_antipodal"] if c["p"] == p)
    z, w = np.polynomial.legendre.leggauss(n // 60)
    x = np.stack([np.sqrt(1 - z**2), 0 * z, z], axis=1)
    found = w2(x, np.array([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]]), x_weights=w / 2, y_weights=b, metric=metric)
    assert relative_error(found.value, float(sphere[f"W2_{metric}"])) < 1e-4


def test_reference_two_uniform_arcs():
    (case,) = REFERENCE["two_arcs_geodesic"]
    c1, h1, c2, h2 = (float(case[k]) for k in ("c1", "h1", "c2", "h2"))
    x, y = (angles(c + h * (2 * midpoints(4000) - 1)) for c, h in ((c1, h1), (c2, h2)))
    found = w2(x, y, metric="geodesic")
    assert found.exact and relative_error(found.value, float(case["W2"])) < 1e-7
