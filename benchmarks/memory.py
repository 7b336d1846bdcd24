"""Extra memory of one evaluation and one gradient: peak of the process over what it held before, and XLA's own plan."""

import jax
import jax.numpy as jnp
import numpy as np

from attnflow.reduce import Blocked

from .measure import Recorder
from .reduction import BETA, tokens

CASES = [(16384, 3, "float64"), (100_000, 3, "float64")]


def mean(x, w):
    return Blocked().log_mean((jnp.asarray(BETA, x.dtype) * x)[None], x, x, w)[1][0]


def main(recorder: Recorder) -> None:
    for n, d, dtype in CASES[:1] if recorder.tiny else CASES:
        n = 256 if recorder.tiny else n
        x = jnp.asarray(tokens(n, d, dtype))
        w = jnp.full(n, 1 / n, x.dtype)
        jobs = {"evaluation": mean, "gradient": jax.grad(lambda x, w: jnp.sum(jnp.sin(mean(x, w))))}
        for name, job in jobs.items():
            compiled = jax.jit(job).lower(x, w).compile()
            planned = compiled.memory_analysis().temp_size_in_bytes
            run = lambda compiled=compiled, x=x, w=w: np.asarray(compiled(x, w))  # noqa: E731
            run() if n <= 20_000 else None  # the first call of a long job is as good as the second
            recorder.single(
                "memory",
                {"n": n, "d": d, "dtype": dtype, "job": name},
                "attnflow",
                run,
                float(n * n),
                planned_bytes=planned,
            )
