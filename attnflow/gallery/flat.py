r"""Tokens of $\mathbb{R}^d$ (arXiv 2305.05465): rescaled by the growth of the leading direction they converge, and to what."""

import numpy as np
from scipy.spatial import ConvexHull

from .. import plots
from ..config import Experiment
from ..figures import Line
from .tokens import flow


def polytope(experiment: Experiment):
    r"""Rescaled tokens $e^{-t}x$ with V = B = I: all end at vertices of a convex polytope, or at 0."""
    return _polygon(experiment, rescaled(flow(experiment), 1.0))


def hyperplane_polytope(experiment: Experiment):
    r"""Tokens of $\mathbb{R}^3$ with V = diag(1, 1, -1/2): rescaled, their first two coordinates end at the vertices of a polygon."""
    return _polygon(experiment, rescaled(flow(experiment), 1.0)[..., :2])


def _polygon(experiment, z):
    hulls = [ConvexHull(frame).vertices for frame in z]
    vertices = z[-1][hulls[-1]]
    nearest = np.linalg.norm(z[-1][:, None] - vertices[None], axis=-1).min(axis=1)
    away = float(np.minimum(nearest, np.linalg.norm(z[-1], axis=-1)).max())
    late = {len(hull) for hull in hulls[len(hulls) // 2 :]}
    row = {"tokens": z.shape[1], "vertices": len(vertices), "farthest from a vertex or 0": away}
    lines = [
        Line("largest distance from a vertex or 0", away, 0.0, away < 1e-2),
        Line("numbers of vertices in the second half", float(len(late)), 1.0, len(late) == 1),
    ]
    fig, axes = plots.figure(width=4.2, height=4.2)
    ax = axes[0, 0]
    for path in np.swapaxes(z, 0, 1):
        ax.plot(*path.T, color="0.75", linewidth=0.6)
    ax.plot(*z[0].T, ".", color=plots.COLOURS[5], label="t = 0")
    ax.plot(*z[-1].T, "o", color=plots.COLOURS[0], markersize=4, label=f"t = {experiment.solve.t1:g}")
    ax.fill(*vertices.T, facecolor="none", edgecolor=plots.COLOURS[1], linewidth=1)
    ax.set_aspect("equal")
    ax.legend()
    return [row], lines, fig


def hyperplanes(experiment: Experiment):
    """Rescaled tokens with a positive V: their coordinate along its left leading eigenvector takes at most three values."""
    traj = flow(experiment)
    value = np.asarray(experiment.build_heads(2).dense(2).value)[0]
    rates, vectors = np.linalg.eig(value.T)
    k = int(np.argmax(rates.real))
    normal = vectors[:, k].real / np.linalg.norm(vectors[:, k].real)
    along = rescaled(traj, float(rates[k].real)) @ normal
    limits = np.unique(along[-1].round(2))
    scatter = float(np.abs(along[-1][:, None] - limits[None]).min(axis=1).max())
    lines = [Line("limits of the leading coordinate", float(len(limits)), 3.0, len(limits) <= 3)]
    lines.append(Line("largest distance from a limit", scatter, 0.0, scatter < 1e-2))
    fig, axes = plots.figure()
    plots.timeseries(axes[0, 0], traj.ts, along[:, :8], name="rescaled leading coordinate")
    axes[0, 0].plot(np.asarray(traj.ts), along[:, 8:], color="0.6", linewidth=0.8)
    return [{"leading rate": float(rates[k].real), "limits": ", ".join(f"{v:g}" for v in limits)}], lines, fig


def boolean(experiment: Experiment):
    """The attention matrix of tokens on the line at the last time: rows of zeros and a single one, in two columns."""
    x = np.asarray(flow(experiment).final)[:, 0]
    x = np.sort(x)
    score = np.outer(x, x)
    p = np.exp(score - score.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    doubt = float((1 - p.max(axis=1)).max())
    leaders = len(np.unique(p.argmax(axis=1)))
    lines = [
        Line("largest 1 - entry over the rows", doubt, 0.0, doubt < 1e-9),
        Line("leaders", float(leaders), 2.0, leaders <= 2),
    ]
    fig, axes = plots.figure(width=4.2)
    plots.heat_map(axes[0, 0], p, x="token attended to, by position", y="token", label="attention")
    return [{"tokens": len(x), "leaders": leaders, "largest doubt": doubt}], lines, fig


def rescaled(trajectory, rate: float) -> np.ndarray:
    """Tokens (T, n, d) times exp(-rate t)."""
    ts = np.asarray(trajectory.ts)
    return np.exp(-rate * ts)[:, None, None] * np.asarray(trajectory.values["tokens"])
