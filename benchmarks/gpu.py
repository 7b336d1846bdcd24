"""The reduction on a GPU: the Pallas kernel, XLA's tiles and the rivals, with the rate of exponentials as floor.

An NVIDIA multiprocessor computes 16 exponentials per clock, so no exact attention in float32 takes less than n^2 / (16 x
multiprocessors x clock). The clock is the highest that the driver names. Without a GPU every contestant is reported as not
run. The many small systems are one call: their pairs are counted as those of the large one.
"""

import subprocess

import jax
import jax.numpy as jnp
import numpy as np

from attnflow.kernel import Kernel
from attnflow.reduce import Blocked, Dense

from .measure import NotRun, Recorder
from .reduction import BETA, tokens
from .rivals import exact

# systems, n, d
CASES = [(1, 100_000, 3), (10_000, 32, 3)]
METHODS = {"kernel": Kernel(), "blocked": Blocked(), "dense": Dense()}
EXPONENTIALS_PER_CLOCK = 16


def limit() -> float | None:
    """Exponentials per second that the device can compute, or None where its clock is not known."""
    multiprocessors = getattr(jax.devices()[0], "core_count", None)
    question = ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits"]
    try:
        megahertz = subprocess.run(question, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
    return EXPONENTIALS_PER_CLOCK * multiprocessors * float(megahertz) * 1e6 if multiprocessors else None


def attention(q, x):
    """XLA's own attention, (systems, n, d), in full float32."""
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(q[:, :, None], x[:, :, None], x[:, :, None], scale=1.0)[:, :, 0]


def reduce_with(method, q, x):
    w = jnp.full(x.shape[1], 1 / x.shape[1], x.dtype)
    return jax.vmap(lambda q, x: method.log_mean(q[None], x, x, w)[1][0])(q, x)


def calls(x: np.ndarray) -> dict:
    """Contestants on the device; each waits for its answer, which stays there."""
    if jax.default_backend() != "gpu":
        return dict.fromkeys([*METHODS, "jax.nn.dot_product_attention"], NotRun("no GPU here"))
    q, x = jnp.asarray(BETA, x.dtype) * jnp.asarray(x), jnp.asarray(x)
    functions = {name: lambda q, x, method=method: reduce_with(method, q, x) for name, method in METHODS.items()}
    functions["jax.nn.dot_product_attention"] = attention
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 2**34)
    too_large = 3 * 4 * x.shape[0] * x.shape[1] ** 2 > memory  # three copies of all scores
    contestants = {}
    for name, function in functions.items():
        if too_large and name in ("dense", "jax.nn.dot_product_attention"):
            contestants[name] = NotRun("its scores do not fit the memory")
        else:
            run = jax.jit(function)
            contestants[name] = lambda run=run: run(q, x).block_until_ready()
    return contestants


def main(recorder: Recorder) -> None:
    for systems, n, d in CASES[-1:] if recorder.tiny else CASES:
        x = tokens(systems * n, d, "float32").reshape(systems, n, d)
        rows = np.linspace(0, n - 1, min(n, 50)).astype(int)
        oracle = exact(x[-1], BETA * x[-1], rows)
        off = lambda got, rows=rows, oracle=oracle: np.max(np.abs(np.asarray(got[-1])[rows] - oracle))  # noqa: E731
        params = {"systems": systems, "n": n, "d": d, "dtype": "float32", "beta": BETA}
        pairs = float(systems * n * n)
        contestants = calls(x)
        rate = None if isinstance(contestants["kernel"], NotRun) else limit()
        if rate is None:
            recorder.write("gpu", "floor", params, not_run="no GPU here, or its clock is not known")
        else:
            recorder.write("gpu", "floor", params, median_s=pairs / rate, ns_per_unit=1e9 / rate)
        recorder.contest("gpu", params, contestants, units=pairs, error=off)
