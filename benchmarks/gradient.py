"""Gradient of one evaluation (forward and reverse), with the package's own forward pass in the same contest."""

import numpy as np

from .measure import Recorder
from .reduction import BETA, tokens
from .rivals import gradients

# n, d, dtype, whether the rivals that hold n x n arrays run too
CASES = [
    (4096, 3, "float64", True),
    (4096, 3, "float32", True),
    (4096, 16, "float64", True),
    (4096, 16, "float32", True),
    (16384, 3, "float64", False),
    (16384, 16, "float32", False),
]


def exact(x: np.ndarray, ct: np.ndarray) -> np.ndarray:
    """Derivative in x of sum_i <ct_i, sum_j p_ij x_j> in float64, a block of rows at a time."""
    x, ct = x.astype(np.float64), ct.astype(np.float64)
    slope = np.zeros_like(x)
    for start in range(0, len(x), 512):
        rows = slice(start, start + 512)
        p = np.exp(BETA * (x[rows] @ x.T - 1))
        p /= p.sum(1, keepdims=True)
        g = ct[rows] @ x.T
        g = p * (g - np.sum(p * g, axis=1, keepdims=True)) * BETA
        slope[rows] += g @ x
        slope += g.T @ x[rows] + p.T @ ct[rows]
    return slope


def main(recorder: Recorder) -> None:
    for n, d, dtype, slow in CASES[-1:] if recorder.tiny else CASES:
        n = 256 if recorder.tiny else n
        x = tokens(n, d, dtype)
        ct = np.random.default_rng(1).standard_normal((n, d)).astype(dtype)
        oracle = exact(x, ct)
        scale = np.max(np.abs(oracle))
        calls = gradients(x, BETA, ct, slow)
        evaluate = calls.pop("attnflow forward")
        forward = {"attnflow forward": lambda evaluate=evaluate: evaluate()[:0]}  # nothing to be wrong in
        params = {"n": n, "d": d, "dtype": dtype, "beta": BETA}
        off = lambda got, oracle=oracle, scale=scale: np.max(np.abs(got - oracle)) / scale  # noqa: E731
        # In one contest, so that forward and gradient alternate.
        both = forward | calls
        recorder.contest(
            "gradient",
            params,
            both,
            units=float(n * n),
            error=lambda got, off=off: off(got) if len(got) else 0.0,
        )
