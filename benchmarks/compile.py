"""What is paid before the first result: import, tracing, compiling, with a cold and a warm cache; and how often.

Each measurement is a fresh process. The work-precision table says which solver needs how many evaluations for which
true error, by beta: the reason for the defaults of `solve`.
"""

import json
import os
import subprocess
import sys
import tempfile

import diffrax as dfx
import jax
import jax.numpy as jnp
import numpy as np

import attnflow as af

from .measure import Recorder
from .reduction import tokens

FIRST = """
import json, time
start = time.perf_counter()
import jax, numpy as np
jax.config.update("jax_enable_x64", True)
import attnflow as af
imported = time.perf_counter()
n = int({n})
x0 = np.random.default_rng(0).standard_normal((n, 3))
x0 /= np.linalg.norm(x0, axis=1, keepdims=True)
field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(4.0))
ts = np.linspace(0.0, 1.0, 5)
times = []
for _ in range(2):
    began = time.perf_counter()
    af.solve(field, x0, ts, observe={{"energy": af.observe.energy}} if {observe} else None)
    times.append(time.perf_counter() - began)
print(json.dumps(dict(import_s=imported - start, first_s=times[0], second_s=times[1])))
"""


def main(recorder: Recorder) -> None:
    first_calls(recorder)
    recompilations(recorder)
    work_precision(recorder)


def first_calls(recorder: Recorder) -> None:
    for n in (32,) if recorder.tiny else (32, 256, 4096):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("none",) if recorder.tiny else ("none", "cold", "warm"):
                environment = dict(os.environ)
                if state != "none":
                    environment |= {
                        "JAX_COMPILATION_CACHE_DIR": cache,
                        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
                    }
                program = FIRST.format(n=n, observe=True)
                run = subprocess.run(
                    [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
                )
                values = json.loads(run.stdout.splitlines()[-1])
                recorder.write("first call", "attnflow", {"n": n, "d": 3, "cache": state}, **values)


def recompilations(recorder: Recorder) -> None:
    """Traces of the field over a sweep of beta, of final times and of tolerances, at one shape: one."""
    traces = 0

    def count(field, x):
        nonlocal traces
        traces += 1
        return jnp.zeros(())

    x0 = tokens(16, 3, "float64")
    for i in range(12):
        field = af.AttentionField(af.ScalarHeads([1.0 + 0.1 * i]), af.Softmax(0.5 + i))
        af.solve(field, x0, np.array([0.0, 1.0 + i]), rtol=1e-4 / (i + 1), observe={"count": count})
        if i == 0:
            first = traces
    recorder.write("recompilation", "attnflow", {"points": 12}, programs=traces / first)


def work_precision(recorder: Recorder) -> None:
    """Evaluations and true error of solvers and controllers, for tokens that merge at several temperatures."""
    n, end = (16, 2.0) if recorder.tiny else (64, 10.0)
    x0 = tokens(n, 3, "float64")
    ts = np.array([0.0, end])
    stages = {dfx.Tsit5: 6, dfx.Dopri5: 6, dfx.Dopri8: 13, dfx.Bosh3: 3}
    for beta in (4.0,) if recorder.tiny else (1.0, 4.0, 16.0, 64.0):
        field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(beta))
        reference = af.solve(field, x0, ts, rtol=1e-12, atol=1e-12, solver=dfx.Dopri8()).final
        for solver in (dfx.Tsit5,) if recorder.tiny else stages:
            for rtol in (1e-6,) if recorder.tiny else (1e-4, 1e-6, 1e-8):
                for name, gains in {"I": (0.0, 1.0), "PI": (0.2, 0.4)}.items():
                    controller = dfx.PIDController(rtol=rtol, atol=rtol / 1000, pcoeff=gains[0], icoeff=gains[1])
                    traj = af.solve(field, x0, ts, solver=solver(), controller=controller)
                    steps = int(traj.stats["steps"])
                    recorder.write(
                        "work precision",
                        f"{solver.__name__}, {name}",
                        {"n": n, "beta": beta, "rtol": rtol},
                        error=float(jnp.max(jnp.abs(traj.final - reference))),
                        evaluations=steps * stages[solver],
                        steps=steps,
                        rejected=int(traj.stats["rejected"]),
                    )
    jax.clear_caches()
