"""A million tokens on the circle and on the sphere: time per token and error, where the series begins to pay, a trajectory."""

import time

import jax
import jax.numpy as jnp
import numpy as np

import attnflow as af
from attnflow.harmonics import Harmonics, degree_for
from attnflow.reduce import Blocked

from .measure import Recorder, peak, reset_peak, resident

# d, beta, tolerance, heads: the same length for all queries, or not
MILLION = [
    (2, 81.0, 1e-12, "scalar"),
    (2, 81.0, 1e-12, "general"),
    (3, 25.0, 1e-6, "scalar"),
    (3, 25.0, 1e-6, "general"),
]


def main(recorder: Recorder) -> None:
    for d, beta, tolerance, heads in MILLION[:1] if recorder.tiny else MILLION:
        million(recorder, 4096 if recorder.tiny else 10**6, d, beta, tolerance, heads)
    for d, beta in ((2, 81.0), (3, 25.0))[: 1 if recorder.tiny else 2]:
        for n in (512,) if recorder.tiny else (512, 2048, 16384):
            against_exact(recorder, n, d, beta)
    trajectory(recorder, 2048 if recorder.tiny else 10**6)


def tokens(n: int, d: int):
    """Tokens of a smooth law: von Mises-Fisher on top of uniform, half and half."""
    key = jax.random.key(0)
    axis = jnp.eye(d)[0]
    return jnp.concatenate(
        [af.sphere.uniform(key, n - n // 2, d), af.sphere.von_mises_fisher(key, n // 2, axis, kappa=2.0)]
    )


def million(recorder: Recorder, n: int, d: int, beta: float, tolerance: float, heads: str) -> None:
    x, w = tokens(n, d), jnp.full(n, 1 / n)
    stretch = jnp.ones(d) if heads == "scalar" else jnp.linspace(0.5, 1.0, d)
    q = beta * (x * stretch)[None]
    reduction = Harmonics(tolerance, radius=beta * (1 + 1e-9))
    mean = jax.jit(lambda q, x, w: reduction.log_mean(q, x, x, w)[1])

    def pull(q, x, w):
        return jnp.sum(jnp.sin(reduction.log_mean(q, x, x, w)[1]))

    few = min(n, 10**5)
    gradient, here = jax.jit(jax.grad(pull, argnums=(0, 1))), (q[:, :few], x[:few], jnp.full(few, 1 / few))
    rows = np.linspace(0, n - 1, 40).astype(int)
    oracle = exact_rows(np.asarray(q[0])[rows], np.asarray(x))
    params = {"d": d, "n": n, "beta": beta, "tolerance": tolerance, "heads": heads}
    params["degree"] = degree_for(tolerance, beta, d=d)
    recorder.contest(
        "a million tokens",
        params,
        {"harmonics": lambda: jax.block_until_ready(mean(q, x, w))},
        units=n,
        error=lambda got: relative(np.asarray(got[0])[rows], oracle),
    )
    recorder.contest(
        "gradient by harmonics",
        params | {"n": few},
        {"harmonics": lambda: jax.block_until_ready(gradient(*here))},
        units=few,
    )


def against_exact(recorder: Recorder, n: int, d: int, beta: float) -> None:
    x, w = tokens(n, d), jnp.full(n, 1 / n)
    rows = np.linspace(0, n - 1, 40).astype(int)
    oracle = exact_rows(beta * np.asarray(x)[rows], np.asarray(x))

    def call(reduction):
        run = jax.jit(lambda q, x, w: reduction.log_mean(q, x, x, w)[1])
        return lambda: jax.block_until_ready(run(beta * x[None], x, w))

    recorder.contest(
        "harmonics against exact sums",
        {"d": d, "n": n, "beta": beta},
        {"harmonics": call(Harmonics(radius=beta * (1 + 1e-9))), "blocked": call(Blocked())},
        units=n,
        error=lambda got: relative(np.asarray(got[0])[rows], oracle),
    )


def trajectory(recorder: Recorder, n: int, beta: float = 81.0) -> None:
    """Weighted tokens on the circle to T = 5 at rtol 1e-6, first call included."""
    x, w = af.sphere.circle_quadrature(lambda angle: 1 + 0.3 * np.cos(angle - 0.7), n)
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(beta), weights=w).settled(x)
    before, start = resident(), time.perf_counter()
    reset_peak()
    run = af.solve(field, x, jnp.linspace(0.0, 5.0, 6), rtol=1e-6)
    jax.block_until_ready(run.final)
    wall = time.perf_counter() - start
    used = max(0, peak() - before)
    rows = np.linspace(0, n - 1, 20).astype(int)
    u = np.asarray(run.final)
    pull = exact_rows(beta * u[rows], u, np.asarray(w))
    expected = pull - np.sum(pull * u[rows], axis=1, keepdims=True) * u[rows]
    got = np.asarray(jax.jit(lambda x: field(0.0, x))(run.final))[rows]
    recorder.write(
        "trajectory of a million tokens",
        "harmonics",
        {"d": 2, "n": n, "beta": beta, "T": 5.0, "rtol": 1e-6},
        median_s=wall,
        peak_bytes=used,
        error=float(np.max(np.abs(got - expected))),
        steps=int(run.stats["steps"]),
    )


def exact_rows(q: np.ndarray, x: np.ndarray, w: np.ndarray | None = None) -> np.ndarray:
    """Weighted means for some queries, in extended precision."""
    s = q.astype(np.longdouble) @ x.T.astype(np.longdouble)
    e = np.exp(s - s.max(axis=1, keepdims=True)) * (1 if w is None else w)
    return np.asarray(e @ x / e.sum(axis=1, keepdims=True), dtype=np.float64)


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)))
