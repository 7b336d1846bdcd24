"""Phase diagram per seed: a sweep of adaptive flows against the published kind of Euler loop, statistics included.

The rival integrates one batch of seeds per beta by 300 Euler steps of .1 with renormalisation and counts close pairs
at 200 times, in torch where it can be imported, else in numpy. Errors are of the mean share of close pairs against a
tight solve from the same tokens. `python -m benchmarks.phase_diagram SEEDS BETAS` prints one case, such as the whole
diagram of 256 seeds and 90 betas.
"""

import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from attnflow import sphere
from attnflow.attention import Softmax
from attnflow.field import AttentionField
from attnflow.heads import ScalarHeads
from attnflow.lanes import Job, flat, lower, on_host, schedule
from attnflow.points import grid
from attnflow.reduce import Dense
from attnflow.solve import solve
from attnflow.sweep import sweep

from .measure import Recorder

CLOSE, STEP, TIMES = 0.999, 0.1, 200


def close_pairs(field, x):
    """Share of pairs with cosine above .999."""
    n = x.shape[0]
    return (jnp.sum(x @ x.T > CLOSE, dtype=x.dtype) - n) / (n * (n - 1))


def flow(beta, key, like, ts, rtol):
    """One realisation, with the tolerance as an argument."""
    x0 = sphere.uniform(key, n=like.shape[0], d=like.shape[1]).astype(like.dtype)
    field = AttentionField(ScalarHeads([1.0]), Softmax(beta), reduction=Dense())
    return solve(field, x0, ts, observe={"share": close_pairs}, rtol=rtol, atol=1e-3 * rtol, throw=False)


def rival(x0: np.ndarray, betas: np.ndarray, ts: np.ndarray, *, ranks: bool) -> tuple[str, np.ndarray]:
    """(library, share (beta, time)) by the published loop over tokens x0 (seeds, n, d).

    `ranks` adds the published count of clusters: the rank of each thresholded Gram matrix, one after the other.
    """
    try:
        import torch as xp

        name, x0 = "torch", xp.from_numpy(x0.copy())
        exp, norm = xp.exp, lambda a: xp.linalg.norm(a, dim=-1, keepdim=True)
    except ImportError:
        xp, name, exp = np, "numpy", np.exp
        norm = lambda a: np.linalg.norm(a, axis=-1, keepdims=True)  # noqa: E731
    n, share = x0.shape[1], np.zeros((len(betas), len(ts)))
    for b, beta in enumerate(betas):
        x, due, seen = x0 + 0, np.round(ts / STEP).astype(int), 0
        for step in range(due[-1] + 1):
            while seen < len(ts) and due[seen] == step:
                close = x @ x.swapaxes(1, 2) > CLOSE
                share[b, seen] = (float(close.sum()) / len(x) - n) / (n * (n - 1))
                seen += 1
                if ranks:
                    [int(np.linalg.matrix_rank(np.asarray(gram, np.float32))) for gram in close]
            attention = exp(float(beta) * (x @ x.swapaxes(1, 2)))
            x = x + STEP * (attention @ x) / attention.sum(-1)[..., None]
            x = x / norm(x)
    return name, share


def ours(betas, keys, ts, rtol, dtype, **options):
    """Share (beta, time) by a sweep."""
    shared = (np.zeros((32, 2), dtype), ts.astype(dtype), np.asarray(rtol, dtype))
    points = grid(beta=betas.astype(dtype), key=keys)
    out = sweep(flow, points, shared=shared, cost=lambda beta, key: beta, **options)
    return out["share"].mean("key").values


def timed(betas, keys, ts, group):
    """(seconds to trace and compile, seconds to run, share (beta, time)) of the sweep's own program, one chunk."""
    points = grid(beta=betas, key=keys)
    shared = {"like": np.zeros((32, 2), np.float32), "ts": ts.astype(np.float32), "rtol": np.float32([1e-3])[0]}
    devices = jax.local_devices()
    order = schedule(
        len(points), chunk=len(points), group=group, devices=len(devices), cost=-points.coordinates()["beta"]
    )
    axes = {name: on_host(axis.values) for name, axis in points.axes.items()}
    job = Job(flow, axes, points.positions(order), shared, order, len(points), group)
    start = time.perf_counter()
    lowered, begin = lower(job, devices)
    compiled = lowered.compile()
    ready = time.perf_counter()
    share = flat(begin(compiled, 0))["share"]
    ran = time.perf_counter()
    return ready - start, ran - ready, share[np.argsort(order)].reshape(*points.shape, -1).mean(1)


def main(recorder: Recorder) -> None:
    """One case in a process of its own, which has a CPU device for every core."""
    size = (8, 2) if recorder.tiny else (128, 10)
    command = [sys.executable, "-m", "benchmarks.phase_diagram", *map(str, size)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    params = {"seeds": size[0], "betas": size[1], "n": 32, "d": 2}
    for contestant, values in found.items():
        recorder.write("phase diagram", contestant, params, median_s=values["seconds_per_seed"], **values)


def measured(seeds: int, betas: int) -> dict[str, dict]:
    """Seconds per seed and errors of both sides; the rival with pair counts only, and with ranks on an eighth of the seeds."""
    jax.config.update("jax_num_cpu_devices", os.cpu_count())
    jax.config.update("jax_enable_x64", True)
    grid_of_betas, ts = np.linspace(0.1, 9, betas).astype(np.float32), np.linspace(0, 30, TIMES)
    keys = jr.split(jr.key(0), seeds)
    x0 = np.asarray(jax.vmap(lambda k: sphere.uniform(k, n=32, d=2).astype(jnp.float32))(keys))
    groups = (16, 128) if seeds * betas >= 128 * os.cpu_count() else (4,)
    runs = {group: timed(grid_of_betas, keys, ts, group) for group in groups}
    group = min(runs, key=lambda g: runs[g][1])
    first, seconds, share = runs[group]
    exact = ours(grid_of_betas, keys, ts, 1e-8, np.float64, group=16)

    def off(share):
        return float(np.abs(share - exact).max())

    sides = {"attnflow": {"seconds_per_seed": seconds / seeds, "error": off(share), "first_call_s": first}}
    for ranks in (False, True):
        batch = x0[: max(1, seeds // 8)] if ranks else x0
        start = time.perf_counter()
        name, found = rival(batch, grid_of_betas, ts, ranks=ranks)
        seconds = (time.perf_counter() - start) / len(batch)
        what = "Euler loop, pairs" + (" and ranks" if ranks else "")
        sides[what] = {"seconds_per_seed": seconds, "library": name} | ({} if ranks else {"rival_error": off(found)})
    return sides


if __name__ == "__main__":
    print(json.dumps(measured(*map(int, sys.argv[1:]))))
