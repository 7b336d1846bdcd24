"""Oracles shared by the tests: the papers' formulas in plain numpy, and the reference values."""

import json
from pathlib import Path

import numpy as np

REFERENCE = json.loads((Path(__file__).parent / "reference.json").read_text())


def close(a, b, *, eps=1.0):
    """True where a and b agree to eps * sqrt(machine epsilon), relative to the larger magnitude (at least 1)."""
    a, b = np.asarray(a), np.asarray(b)
    unit = np.sqrt(np.finfo(np.result_type(a.dtype, np.float32)).eps)
    scale = max(1.0, float(np.max(np.abs(b), initial=0.0)))
    return a.shape == b.shape and bool(np.all(np.abs(a - b) <= eps * unit * scale))


def relative_error(a, b):
    """Largest |a - b| / |b|."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return float(np.max(np.abs(a - b) / np.abs(b)))


def attention_matrix(kind, scores, w, beta=1.0, causal=False):
    """Coefficients c_ij of the answer sum_j c_ij x_j, from scores s_ij, in plain numpy."""
    s, w = np.asarray(scores, dtype=np.float64), np.asarray(w, dtype=np.float64)
    mask = np.tril(np.ones(s.shape, bool)) if causal else np.ones(s.shape, bool)
    if kind == "softmax":
        s = np.where(mask, s - np.where(mask, s, -np.inf).max(1, keepdims=True), -np.inf)
        e = w * np.exp(beta * s if beta else np.where(mask, 0.0, -np.inf))
        return e / e.sum(1, keepdims=True)
    if kind == "exponential":
        return np.where(mask, w * np.exp(beta * s), 0.0)
    if kind == "relu":
        return np.where(mask, w * np.maximum(s, 0.0), 0.0)
    if kind == "linear":
        return np.where(mask, w * s, 0.0)
    if kind == "hardmax":
        live = mask & (w > 0)
        top = np.where(live, s, -np.inf).max(1, keepdims=True)
        tie = np.where(live & (s >= top - 1e-12), w, 0.0)
        return tie / tie.sum(1, keepdims=True)
    raise ValueError(kind)


def velocity(kind, x, score, value, *, w=None, beta=1.0, causal=False, flat=False):
    """P_i sum_h V_h sum_j c_ij^h x_j for tokens on the sphere, in plain numpy, one head at a time."""
    x = np.asarray(x, dtype=np.float64)
    w = np.full(len(x), 1 / len(x)) if w is None else np.asarray(w, dtype=np.float64)
    push = np.zeros_like(x)
    for b, v in zip(np.asarray(score, np.float64), np.asarray(value, np.float64), strict=True):
        push += attention_matrix(kind, x @ b @ x.T, w, beta, causal) @ x @ v.T
    return push if flat else push - np.sum(push * x, axis=1, keepdims=True) * x
