"""Throughput of a sweep over one device, two, eight, and two worker processes; what lanes of unequal length cost.

Each setting is a process of its own. The flow is that of the phase diagram (n = 32, d = 2, T = 30, 200 times, rtol 1e-3).
"""

import json
import subprocess
import sys
import tempfile
import time
from functools import partial

from .measure import Recorder

SETTINGS = {"1 device": (1, 0), "2 devices": (2, 0), "8 devices": (8, 0), "2 workers": (1, 2)}


def main(recorder: Recorder) -> None:
    betas, seeds = (2, 8) if recorder.tiny else (10, 2048)
    lines = {}
    settings = {"2 devices": (2, 0)} if recorder.tiny else SETTINGS
    for name, (devices, workers) in settings.items():
        command = [sys.executable, "-m", "benchmarks.sweep", *map(str, (devices, workers, betas, seeds))]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        params = {"betas": betas, "seeds": seeds, "n": 32, "d": 2}
        lines[name] = recorder.write("sweep", name, params, ns_per_unit=1e9 / found["points_per_s"], **found)
    totals = {name: line["total"] for name, line in lines.items()}
    spread = max(totals.values()) - min(totals.values())
    recorder.write("sweep", "largest difference of the mean share", {}, error=spread)
    lanes(recorder)


def lanes(recorder: Recorder) -> None:
    """A sweep of beta from 1 to 100 (n = 32, d = 3, T = 10): steps spent over steps needed, and programs compiled.

    Lanes that run together take as many steps as the slowest of them; `cost` puts lanes of like beta together.
    """
    import jax
    import jax.numpy as jnp
    import jax.random as jr
    import numpy as np

    import attnflow as af
    from attnflow.points import grid
    from attnflow.sweep import sweep

    traces = 0

    def count(field, x):
        nonlocal traces
        traces += 1
        return jnp.zeros((), x.dtype)

    def run(beta, x0, ts):
        field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(beta))
        return af.solve(field, x0, ts, observe={"count": count}, throw=False)

    points = 16 if recorder.tiny else 256
    betas = np.random.default_rng(0).permutation(np.geomspace(1, 100, points))
    shared = (af.sphere.uniform(jr.key(0), 32, 3), jnp.array([0.0, 10.0]))
    run(betas[0], *shared)
    alone, traces = traces, 0
    group = min(32, points)
    for name, cost in {"attnflow": _beta, "in the order given": None}.items():
        traces = 0
        out = sweep(run, grid(beta=betas), shared=shared, devices=jax.local_devices()[:1], cost=cost, group=group)
        steps = out["steps"].values
        steps = steps[np.argsort(betas)[::-1]] if cost else steps
        waste = group * float(steps.reshape(-1, group).max(axis=1).sum()) / float(steps.sum())
        params = {"points": points, "n": 32, "d": 3, "group": group}
        compiled = {"programs": traces / alone} if cost else {}  # the second order finds the first one's program
        recorder.write("lane waste", name, params, waste=waste, steps=[int(steps.min()), int(steps.max())], **compiled)


def measured(devices: int, workers: int, betas: int, seeds: int) -> dict:
    """Points per second in a process of `devices` CPU devices: two sweeps that differ in their seeds, start-up cancelling."""
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    import jax.numpy as jnp
    import jax.random as jr
    import numpy as np

    from attnflow.points import grid
    from attnflow.studies.flows import one_flow
    from attnflow.sweep import sweep

    run = partial(one_flow, n=32, d=2, kind="softmax", rtol=1e-3)

    def swept(count, store):
        keys, levels = jr.split(jr.key(0), count), np.linspace(0.1, 9, betas, dtype=np.float32)
        points = grid(beta=levels, strengths=np.ones((1, 1), np.float32), key=keys)
        start = time.perf_counter()
        out = sweep(
            run, points, shared=(jnp.linspace(0.0, 30.0, 200),), cost=_beta, chunk=256, store=store, workers=workers
        )
        return time.perf_counter() - start, out

    with tempfile.TemporaryDirectory() as folder:
        first, _ = swept(4, f"{folder}/first")
        few, _ = swept(seeds // 4, f"{folder}/few")
        many, out = swept(seeds, f"{folder}/many")
    rate = betas * (seeds - seeds // 4) / (many - few)
    return {
        "first_call_s": first,
        "median_s": many,
        "points_per_s": rate,
        "total": float(out["close_pairs"].mean()),
        "mean_steps": float(out["steps"].mean()),
    }


def _beta(beta, **rest):
    return beta


if __name__ == "__main__":
    print(json.dumps(measured(*map(int, sys.argv[1:]))))
