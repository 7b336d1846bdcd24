"""Flows of a run folder as the viewer reads them: frames in 16-bit integers, curves, and the heads' eigenspaces."""

import base64
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..files import load_heads
from ..observe import clusters
from ..phases import leading_space

NUMBERS = 6_000_000  # coordinates in one page, 2 bytes each: 5000 tokens x 400 frames
FRAMES = 400
CURVES = 8
SAME = 0.999  # cosine above which tokens of the last frame count as one cluster
NOT_SERIES = {"ts", "tokens", "final", "weights", "plateaus", "merges", "log_t"}
PARTS = {
    "dominance_margins_0": "margin, condition 8",
    "dominance_margins_1": "margin, sharp",
    "dominance_margins_2": "margin, exact: dE_h/dt",
    "w2_to_projection": "W2 to the projected start",
    "w2_to_space": "W2 to the principal space",
    "w2_terminal": "W2 to V's leading space",
}


def flows(folder: Path) -> list[dict]:
    """One entry per `flow_K.npz` or `tree_K.npz` of the folder, in order."""
    paths = sorted([*folder.glob("flow_*.npz"), *folder.glob("tree_*.npz")], key=lambda p: int(_digits(p)))
    labels = _labels(folder, len(paths))
    heads = load_heads(folder / "heads.safetensors") if (folder / "heads.safetensors").exists() else None
    return [_flow(path, label, heads, NUMBERS // len(paths)) for path, label in zip(paths, labels, strict=True)]


def encode(array: np.ndarray, dtype: str) -> str:
    """Little-endian bytes in base64."""
    return base64.b64encode(np.ascontiguousarray(array, np.dtype(dtype).newbyteorder("<")).tobytes()).decode()


def numbers(values: np.ndarray) -> list[float | None]:
    """Numbers as JSON has them: None where they are not finite."""
    return [float(v) if np.isfinite(v) else None for v in np.asarray(values, np.float64)]


def _flow(path: Path, label: str, heads, budget: int) -> dict:
    with np.load(path, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    log_time = path.name.startswith("tree")
    tokens, ts = arrays.get("tokens"), arrays.get("log_t" if log_time else "ts")
    flow: dict[str, Any] = {"label": label, "clock": "ln t" if log_time else "t", "tokens": None, "dims": 3, "n": 0}
    flow |= {"sphere": True, "spaces": [], "groups": None, "weights": None}
    if ts is None:
        return flow | {"ts": [0.0], "series": [], "note": "This run kept no frames: run it again to see it move."}
    reached = np.flatnonzero(np.isfinite(ts) & (True if tokens is None else np.isfinite(tokens).all(axis=(1, 2))))
    n, d = (1, 1) if tokens is None else tokens.shape[1:]
    most = max(2, min(FRAMES, budget // max(1, min(n, 5000) * min(d, 3))))
    frames = reached[np.unique(np.linspace(0, len(reached) - 1, min(most, len(reached))).round().astype(int))]
    notes = [] if len(reached) == len(ts) else [f"{len(ts) - len(reached)} frames were not reached."]
    if len(frames) < len(reached):
        notes.append(f"{len(frames)} of {len(reached)} frames shown.")
    flow |= {"ts": numbers(ts[frames]), "series": _series(arrays, len(ts), frames)}
    if tokens is None:
        return flow | {"note": " ".join(["Tokens were not kept: set save_tokens = true.", *notes])}
    some = np.arange(0, n, -(-n * len(frames) * min(d, 3) // budget))
    if len(some) < n:
        notes.append(f"{len(some)} of {n} tokens shown.")
    moved = tokens[np.ix_(frames, some)].astype(np.float64)
    basis, share = projection(moved)
    if d > 3:
        notes.append(
            f"d = {d}: projected on the three leading eigenvectors of the second moment of all frames, {share:.1%} of it."
        )
    shown = moved @ basis
    norms = np.linalg.norm(moved, axis=-1)
    on_sphere = bool(np.abs(norms - 1).max() < 1e-3)
    scale = np.ones((len(frames), 1, 1))
    if not on_sphere:
        scale = np.maximum(np.abs(shown).max(axis=(1, 2), keepdims=True), np.finfo(float).tiny)
        notes.append("Not on the sphere: every frame is scaled to its largest coordinate.")
    flow |= {"n": len(some), "dims": basis.shape[1], "sphere": on_sphere, "note": " ".join(notes)}
    flow["tokens"] = encode(np.round(shown / scale * 32767), "int16")
    flow["groups"] = encode(_groups(tokens[frames[-1]][some]) if on_sphere else np.zeros(len(some)), "uint8")
    if "weights" in arrays:
        flow["weights"] = encode(arrays["weights"][some] * len(some) / arrays["weights"][some].sum(), "float32")
    flow["spaces"] = [] if heads is None or not on_sphere else _spaces(heads, d, basis)
    return flow


def projection(tokens: np.ndarray) -> tuple[np.ndarray, float]:
    """(d, 2 or 3) columns to look along, and their share of the second moment: the axes themselves where d <= 3."""
    d = tokens.shape[-1]
    if d <= 3:
        return np.eye(d, max(d, 2)), 1.0
    flat = tokens.reshape(-1, d)
    mu, vectors = np.linalg.eigh(flat.T @ flat)
    return vectors[:, ::-1][:, :3], float(mu[-3:].sum() / mu.sum())


def _groups(x: np.ndarray) -> np.ndarray:
    """Colour of every token by its cluster in the last frame: 0 .. 6 for the largest, 7 for the rest and for single ones."""
    labels = np.asarray(jax.jit(clusters, static_argnums=1)(jnp.asarray(x), SAME)[1])
    sizes = np.bincount(labels)
    rank = np.argsort(np.argsort(-sizes, kind="stable"))
    if len(sizes) == len(x):
        return np.zeros(len(x))
    return np.where((rank < 7) & (sizes > 1), rank, 7)[labels]


def _spaces(heads, d: int, basis: np.ndarray) -> list[dict]:
    """Leading eigenspaces of every head's V, and of V B^T for a single head, where they are lines or planes."""
    dense = heads.dense(d)
    score, value = np.asarray(dense.score, np.float64), np.asarray(dense.value, np.float64)
    named = [(f"V, head {h}" if len(value) > 1 else "V", v) for h, v in enumerate(value[:6])]
    if len(value) == 1:
        named.append(("V Bᵀ", value[0] @ score[0].T))
    found = []
    for k, (name, matrix) in enumerate(named):
        space = leading_space(matrix)
        if space.shape[1] == 1:
            vector, kind = basis.T @ space[:, 0], "line"
        elif space.shape[1] == 2 and d == 3:
            vector, kind = np.cross(space[:, 0], space[:, 1]), "plane"
        else:
            continue
        vector = np.append(vector, np.zeros(3 - len(vector)))
        found.append(
            {"label": f"leading space of {name}", "kind": kind, "vector": vector.tolist(), "colour": (k + 1) % 7}
        )
    return found


def _series(arrays: dict, times: int, frames: np.ndarray) -> list[dict]:
    """Curves of every stored observable: each head's if they are few, else minimum, median and maximum over the rest."""
    found = []
    for name, value in arrays.items():
        if name in NOT_SERIES or name.startswith("stats_") or value.ndim == 0 or len(value) != times:
            continue
        rows = value[frames].reshape(len(frames), -1)
        if rows.shape[1] <= CURVES:
            label = "head {}" if rows.shape[1] > 1 else ""
            curves = [{"label": label.format(k), "y": numbers(rows[:, k])} for k in range(rows.shape[1])]
        else:
            spread = {"minimum": rows.min(1), "median": np.median(rows, 1), "maximum": rows.max(1)}
            curves = [{"label": label, "y": numbers(y)} for label, y in spread.items()]
        found.append({"name": PARTS.get(name, name.replace("_", " ")), "curves": curves})
    return found


def _labels(folder: Path, count: int) -> list[str]:
    from .page import tables_of

    rows = next((rows for name, rows in tables_of(folder) if name == "Results"), [])
    named = [f"beta = {row['beta']:g}" for row in rows if isinstance(row, dict) and "beta" in row]
    return named if len(named) == count else [f"flow {k}" for k in range(count)]


def _digits(path: Path) -> str:
    return re.sub(r"\D", "", path.stem) or "0"
