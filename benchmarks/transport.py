"""W2: the exact solver, the certified interval, and a plain Sinkhorn call, with what each is wrong by."""

import itertools
import statistics
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from attnflow import transport
from attnflow.transport import exact as exact_methods

from .measure import NotRun, Recorder

LARGE = 20_000


def main(recorder: Recorder) -> None:
    sizes = (64,) if recorder.tiny else (1000,)
    for n in sizes:
        for d, metric in ((2, "chordal"), (3, "chordal"), (3, "geodesic"), (16, "chordal")):
            contest(recorder, n, d, metric)
    circle(recorder, 1000 if recorder.tiny else 100_000)
    containment(recorder, repeats=1, sizes=(50,)) if recorder.tiny else containment(recorder)
    if not recorder.tiny:
        large(recorder)


def clouds(n, d):
    """Two weighted clouds on the sphere, the second leaning to e_1."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, d)), rng.normal(size=(n, d)) + np.eye(d)[0]
    x, y = (p / np.linalg.norm(p, axis=1, keepdims=True) for p in (x, y))
    a, b = (w / w.sum() for w in rng.random((2, n)))
    return x, y, {"x_weights": a, "y_weights": b}


def contest(recorder: Recorder, n: int, d: int, metric: str) -> None:
    x, y, weights = clouds(n, d)
    exact = transport.w2(x, y, **weights, metric=metric, method="simplex")

    def measured(result):
        if isinstance(result, transport.Interval):
            return {"relative_width": float(result.relative_width), "iterations": int(result.iterations or 0)}
        return {}

    def sinkhorn(tolerance, refine):
        options = {"method": "sinkhorn", "tolerance": tolerance, "refine": refine}
        return lambda: transport.w2(x, y, **weights, metric=metric, **options)

    recorder.contest(
        "w2",
        {"n": n, "d": d, "metric": metric},
        {
            "exact": lambda: transport.w2(x, y, **weights, metric=metric),
            "interval 1e-2": sinkhorn(1e-2, True),
            "interval 1e-3": sinkhorn(1e-3, True),
            "interval 1e-2, Sinkhorn alone": sinkhorn(1e-2, False),
            "plain ott-jax": plain_ott(x, y, weights, metric),
        },
        error=lambda result: abs(float(getattr(result, "value", result)) / exact.value - 1),
        extra=measured,
    )


def plain_ott(x, y, weights, metric):
    """Dense Sinkhorn at the library's defaults: the square root of its primal cost, no bound of anything."""
    if metric != "chordal":
        return NotRun("ott-jax has no cost for the angle")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ott.geometry.pointcloud import PointCloud
        from ott.solvers.linear import solve

    @jax.jit
    def run(x, y, a, b):
        return jnp.sqrt(solve(PointCloud(x, y), a=a, b=b).primal_cost)

    arrays = [jnp.asarray(v) for v in (x, y, weights["x_weights"], weights["y_weights"])]
    return lambda: jax.block_until_ready(run(*arrays))


def containment(recorder: Recorder, *, repeats: int = 3, sizes: tuple[int, ...] = (50, 100, 300, 1000)) -> None:
    """Whether the bounds hold: every kind of case against network simplex on costs from the definition."""
    kinds = itertools.product((2, 3, 16), ("chordal", "geodesic"), (False, True), ("float32", "float64"))
    missed, widths, cases = 0, {n: [] for n in sizes}, 0
    for (d, metric, weighted, dtype), n, seed in itertools.product(list(kinds), sizes, range(repeats)):
        rng = np.random.default_rng((seed, n, d))
        m = n if d == 3 else (3 * n) // 4
        x, y = rng.normal(size=(n, d)), rng.normal(size=(m, d)) + np.eye(d)[0]
        x, y = ((p / np.linalg.norm(p, axis=1, keepdims=True)).astype(dtype) for p in (x, y))
        a, b = (rng.random(k) if weighted else np.ones(k) for k in (n, m))
        a, b = ((w / w.sum()).astype(dtype) for w in (a, b))
        value = defined(x, y, a, b, metric)
        for method in (None, "sinkhorn"):
            found = transport.w2(x, y, x_weights=a, y_weights=b, metric=metric, method=method)
            cases += 1
            missed += not (found.lower <= value * (1 + 1e-9) and value * (1 - 1e-9) <= found.upper)
        widths[n].append(float(found.relative_width))
    for n, found in widths.items():
        values = {"median_relative_width": statistics.median(found), "largest_relative_width": max(found)}
        recorder.write("w2 bounds", "interval 1e-3", {"n": n}, cases=len(found), **values)
    recorder.write("w2 bounds", "all", {"sizes": list(sizes)}, cases=cases, missed=missed)


def defined(x, y, a, b, metric):
    """The distance by POT, on a matrix of costs from the definition in float64."""
    x, y, a, b = (np.asarray(v, np.float64) for v in (x, y, a, b))
    cost = np.sum((x[:, None] - y[None]) ** 2, axis=2)
    if metric == "geodesic":
        x, y = (p / np.linalg.norm(p, axis=1, keepdims=True) for p in (x, y))
        cost = np.arccos(np.clip(x @ y.T, -1, 1)) ** 2
    return np.sqrt(exact_methods.exact_solver().emd2(a / a.sum(), b / b.sum(), cost, numItermax=10**8))


def circle(recorder: Recorder, n: int) -> None:
    x, y, weights = clouds(n, 2)
    call = lambda: transport.w2(x, y, **weights, metric="geodesic")  # noqa: E731
    recorder.contest("w2 on the circle", {"n": n, "metric": "geodesic"}, {"exact": call}, units=n)


def large(recorder: Recorder) -> None:
    """n against n: the table of costs alone would be 3.2 GB."""
    x, y, weights = clouds(LARGE, 3)
    found = []
    recorder.single(
        "w2 of large clouds",
        {"n": LARGE, "d": 3, "metric": "chordal"},
        "interval 2e-2",
        lambda: found.append(transport.w2(x, y, **weights, tolerance=2e-2)),
        LARGE**2,
    )
    (interval,) = found
    recorder.write(
        "w2 of large clouds", "its bounds", {"n": LARGE}, lower=float(interval.lower), upper=float(interval.upper)
    )
