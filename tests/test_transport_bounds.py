"""Both ends of an interval hold whatever the potentials were, and close on the exact value."""

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnflow.transport import Interval, exact, restricted, sinkhorn_interval, w2
from attnflow.transport.clouds import checked_clouds
from attnflow.transport.streamed import lower_bound, upper_bound
from attnflow.transport.wasserstein import certify

METRICS = ["chordal", "geodesic"]


def draw(seed, n, m, d, *, weighted):
    """Two clouds on the sphere, the second leaning to e_1, and their weights (None for equal ones)."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, d)), rng.normal(size=(m, d)) + np.eye(d)[0]
    x, y = (p / np.linalg.norm(p, axis=1, keepdims=True) for p in (x, y))
    a, b = (w / w.sum() for w in (rng.random(n), rng.random(m)))
    return (x, y, a, b) if weighted else (x, y, None, None)


def truth(x, y, a, b, metric):
    """Network simplex on costs from the definition."""
    x, y = (np.asarray(p, np.float64) for p in (x, y))
    cost = np.sum((x[:, None] - y[None]) ** 2, axis=2)
    if metric == "geodesic":
        x, y = (p / np.linalg.norm(p, axis=1, keepdims=True) for p in (x, y))
        cost = np.arccos(np.clip(x @ y.T, -1, 1)) ** 2
    a, b = (np.full(len(p), 1 / len(p)) if w is None else np.asarray(w, np.float64) for p, w in ((x, a), (y, b)))
    return np.sqrt(exact.exact_solver().emd2(a / a.sum(), b / b.sum(), cost, numItermax=10**8))


def holds(interval, value, *, rounding=1e-9):
    return interval.lower <= value * (1 + rounding) and value * (1 - rounding) <= interval.upper


def containment(seed, sizes, d=None):
    """One random case with every solver that can take it; returns what the bounds missed and the width of the refined one."""
    rng = np.random.default_rng(seed)
    d = int(rng.choice([2, 3, 16])) if d is None else d
    metric, weighted = METRICS[rng.integers(2)], bool(rng.integers(2))
    n = int(rng.choice(sizes))
    m = n if d == 3 else (3 * n) // 4
    dtype = [np.float32, np.float64][rng.integers(2)]
    x, y, a, b = draw(seed, n, m, d, weighted=weighted)
    x, y, a, b = (None if v is None else v.astype(dtype) for v in (x, y, a, b))
    value = truth(x, y, a, b, metric)
    missed, width = [], {}
    for name, options in {
        "default": {},
        "refined": {"method": "sinkhorn"},
        "plain": {"method": "sinkhorn", "refine": False, "tolerance": 1e-2, "iterations": 150},
    }.items():
        found = w2(x, y, x_weights=a, y_weights=b, metric=metric, **options)
        width[name] = found.relative_width
        if not holds(found, value):
            missed.append((seed, name, repr(found), value))
    return missed, width


@pytest.mark.parametrize("d", [2, 3, 16])
def test_intervals_contain_the_exact_value_in_random_cases(d):
    outcomes = [containment(seed, [48], d) for seed in range(10)]  # one shape: a compilation takes longer than a case
    assert not [missed for missed, _ in outcomes if missed]
    assert np.median([w["refined"] for _, w in outcomes]) < 1e-3


@pytest.mark.slow
def test_intervals_contain_the_exact_value_in_larger_random_cases():
    outcomes = [containment(1000 + seed, [64, 400]) for seed in range(40)]
    assert not [missed for missed, _ in outcomes if missed]
    assert np.median([w["refined"] for _, w in outcomes]) < 1e-3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("metric", METRICS)
def test_any_potentials_bound_the_distance(metric, dtype):
    x, y, a, b = (v.astype(dtype) for v in draw(3, 48, 48, 3, weighted=True))
    value = truth(x, y, a, b, metric)
    clouds = checked_clouds(x, y, a, b, metric=metric)
    rng = np.random.default_rng(0)
    points = [jnp.asarray(v) for v in (x, y, a, b)]
    if metric == "geodesic":
        points[:2] = [p / jnp.linalg.norm(p, axis=1, keepdims=True) for p in points[:2]]
    for g in (
        np.zeros(48),
        rng.normal(size=48),
        1e6 * rng.normal(size=48),
        np.full(48, np.nan),
        np.where(np.arange(48) % 3 == 0, np.inf, -np.inf),
    ):
        for epsilon in (1e-12, 1e-2, 1e3):
            bracket = certify(clouds, g, epsilon=epsilon)
            assert np.sqrt(bracket.lower) <= value <= np.sqrt(bracket.upper) and np.isfinite(bracket.upper)
            if np.all(np.isfinite(g)):  # the same in the dtype of the points, as under jit
                g_ = jnp.asarray(g.astype(dtype))
                low, *_ = lower_bound(*points, g_, metric=metric)
                high = upper_bound(*points, g_, epsilon=jnp.asarray(epsilon, dtype), metric=metric)
                assert np.sqrt(low) <= value <= np.sqrt(high)


def test_a_potential_alone_is_no_bound():
    """Without the c-transform the dual value of random potentials overshoots: the hypothesis of the lower bound is used."""
    x, y, a, b = draw(4, 48, 48, 3, weighted=True)
    f, g = np.random.default_rng(1).random((2, 48)) * 4
    assert np.sqrt(a @ f + b @ g) > truth(x, y, a, b, "chordal")


@pytest.mark.parametrize("iterations", [10, 20, 200])
def test_unconverged_sinkhorn_says_so_and_still_bounds(iterations):
    x, y, *_ = draw(0, 200, 200, 3, weighted=False)
    value = truth(x, y, None, None, "chordal")
    found = w2(x, y, method="sinkhorn", refine=False, tolerance=1e-6, iterations=iterations)
    assert not found.converged and holds(found, value)
    assert "budget" in found.reason and found.iterations <= iterations
    for epsilon in (1e-2, 1e-4):
        traced = sinkhorn_interval(jnp.asarray(x), jnp.asarray(y), epsilon=epsilon, iterations=iterations, ratio=1.0)
        assert holds(traced, value)


def test_a_looser_interval_contains_a_tighter_one():
    x, y, a, b = draw(5, 200, 200, 3, weighted=True)
    loose = w2(x, y, x_weights=a, y_weights=b, method="sinkhorn", refine=False, tolerance=3e-2)
    tight = w2(x, y, x_weights=a, y_weights=b, method="sinkhorn", tolerance=1e-6)
    assert loose.converged and tight.converged and tight.width < loose.width
    assert loose.lower <= tight.lower <= tight.upper <= loose.upper


def test_scipy_stands_in_for_pot_on_the_restricted_programmes(monkeypatch):
    for module in (exact, restricted):
        monkeypatch.setattr(module, "exact_solver", lambda: None)
    x, y, a, b = draw(6, 48, 36, 3, weighted=True)
    found = w2(x, y, x_weights=a, y_weights=b, tolerance=1e-6)
    monkeypatch.undo()
    assert found.method == "sinkhorn" and found.relative_width < 1e-6
    assert holds(found, truth(x, y, a, b, "chordal"))


def test_intervals_run_under_jit_and_vmap(dtype):
    clouds = [draw(seed, 48, 36, 3, weighted=True) for seed in range(3)]
    x, y, a, b = (jnp.stack([jnp.asarray(c[k].astype(dtype)) for c in clouds]) for k in range(4))
    run = jax.jit(jax.vmap(lambda x, y, a, b: sinkhorn_interval(x, y, x_weights=a, y_weights=b)))
    found = run(x, y, a, b)
    assert found.lower.shape == (3,) and found.lower.dtype == dtype
    for k in range(3):
        assert float(found.lower[k]) <= truth(x[k], y[k], a[k], b[k], "chordal") <= float(found.upper[k])
    assert np.all(found.relative_width < 0.05)
    assert "3,) values" in repr(found)


def test_the_epsilon_of_an_interval_is_traced():
    x, y, *_ = draw(7, 48, 36, 3, weighted=False)
    run = eqx.filter_jit(
        eqx.debug.assert_max_traces(
            lambda e: sinkhorn_interval(jnp.asarray(x), jnp.asarray(y), epsilon=e), max_traces=1
        )
    )
    assert run(jnp.asarray(0.1)).width > run(jnp.asarray(0.01)).width


def test_points_without_weight_do_not_tighten_the_dual():
    """A weightless point on top of x would force f = 0 there if it counted."""
    x, y, a, b = draw(8, 48, 36, 3, weighted=True)
    y, b = np.concatenate([y, x]), np.concatenate([b, np.zeros(48)])
    found = sinkhorn_interval(jnp.asarray(x), jnp.asarray(y), x_weights=a, y_weights=b)
    assert holds(found, truth(x, y, a, b, "chordal")) and found.relative_width < 0.05


def test_a_float_of_a_wide_interval_warns():
    with pytest.warns(UserWarning, match="look at `lower` and `upper`"):
        assert float(Interval(1.0, 2.0)) == 1.5
    with pytest.warns(UserWarning, match="not converged"):
        float(Interval(1.0, 1.0 + 1e-9, converged=False))
    assert float(Interval(1.0, 1.0 + 1e-9)) == 1.0 + 5e-10


def test_an_interval_reads_well():
    found = Interval(0.5, 0.51, "sinkhorn", "budget spent", converged=False, epsilon=1e-3, iterations=40, quantum=0.1)
    assert repr(found) == (
        "Interval([0.5, 0.51], width 1.0e-02, not converged, sinkhorn, budget spent, epsilon 1.0e-03, "
        "40 iterations, one token's mass moves it by up to 0.1)"
    )
    assert repr(Interval(0.0, 0.0, "equal clouds", exact=True)) == "Interval(0, exact, equal clouds)"
    assert 0.505 in found and 0.52 not in found
    assert Interval(0.0, 0.0).relative_width == 0
    assert "traced" in repr(jax.eval_shape(lambda: Interval(jnp.ones(()), jnp.ones(()))))


MEMORY = """
import numpy as np
from attnflow.transport import w2
rng = np.random.default_rng(0)
x, y = rng.normal(size=(2, {n}, 3))
x, y = (p / np.linalg.norm(p, axis=1, keepdims=True) for p in (x, y + np.eye(3)[0]))
found = w2(x, y, method="sinkhorn", tolerance=2e-2)
assert found.converged, found
# VmHWM is this program's own peak; ru_maxrss keeps that of the process it was forked from
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) / 2**20)
"""


@pytest.mark.slow
def test_memory_is_linear_in_the_number_of_points():
    """8000 against 8000: a table of costs alone would take 0.5 GB; the whole process, imports included, stays below 1 GiB."""
    out = subprocess.run([sys.executable, "-c", MEMORY.format(n=8000)], check=True, capture_output=True, text=True)
    assert float(out.stdout) < 1.0
