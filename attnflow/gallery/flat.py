r"""Tokens of $\mathbb{R}^d$ (arXiv 2305.05465): rescaled by the growth of the leading direction they converge, and to what."""

import jax.numpy as jnp
import numpy as np
from scipy.spatial import ConvexHull

from .. import plots
from ..attention import Softmax
from ..config import Experiment
from ..field import AttentionField
from ..figures import Line
from ..heads import Heads
from .tokens import flow, solved


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


def codim_k(experiment: Experiment):
    r"""Symmetric V with two positive eigenvalues: rescaled, tokens fall on at most three lines along its stable eigenvector.

    Conjecture 4.2 of arXiv 2305.05465, reconstructed: k positive eigenvalues, three subspaces of codimension k. Tokens of one
    group attend alike from some time on, so that $x_i - x_j$ stands still and $z_i - z_j$, $z = e^{-tV}x$, goes like
    $e^{-\lambda_k t}$ in the k-th eigenvector: it closes where $\lambda_k > 0$ and opens where $\lambda_k < 0$.
    """
    value = np.asarray(experiment.build_heads(3).dense(3).value)[0]
    rates, z = _in_eigenvectors(experiment, *np.linalg.eigh(value))
    labels = np.unique(z[-1, :, -1].round(2), return_inverse=True)[1]
    groups = int(labels.max()) + 1
    spread, line = _spread(experiment, rates, z, labels)
    lines = [Line("groups, by leading coordinate (at most)", float(groups), 3.0, groups <= 3), line]
    closed = float(spread[-1, 1] / spread[0, 1])
    lines.append(Line("second coordinate: spread at the end over the start", closed, 0.0, closed < 0.05))
    ts = np.asarray(experiment.solve.ts)
    fig, axes = plots.figure(1, 2, width=8.0)
    ax = axes[0, 0]
    for path in np.swapaxes(z, 0, 1):
        ax.plot(path[:, 2], path[:, 1], color="0.75", linewidth=0.6)
    ax.plot(z[0, :, 2], z[0, :, 1], ".", color=plots.COLOURS[5], label="t = 0")
    ax.plot(z[-1, :, 2], z[-1, :, 1], "o", color=plots.COLOURS[0], markersize=4, label=f"t = {ts[-1]:g}")
    ax.set_xlabel("leading coordinate, rescaled")
    ax.set_ylabel("second coordinate, rescaled")
    ax.legend()
    for k in (2, 1, 0):
        (line,) = axes[0, 1].plot(ts, spread[:, k], label=rf"$\lambda = {rates[k]:.3f}$")
        axes[0, 1].plot(ts, spread[-1, k] * np.exp(rates[k] * (ts[-1] - ts)), ":", color=line.get_color())
    axes[0, 1].set_yscale("log")
    axes[0, 1].set_ylim(spread.min() / 3, 30 * spread.max())
    axes[0, 1].set_xlabel("t")
    axes[0, 1].set_ylabel("spread within groups")
    axes[0, 1].legend(title=r"dotted: $e^{-\lambda t}$")
    return [{"groups": groups, "eigenvalues": ", ".join(f"{v:.3f}" for v in rates)}], lines, fig


def high_dim(experiment: Experiment):
    r"""128 tokens of $\mathbb{R}^{128}$, rescaled: along eigenvectors with $\lambda > 0$ they cluster, along the others they fly apart.

    V is sparse, symmetric and non-negative, every eigenvalue at least 1 in size; its largest is scaled from about 7 to 2.4, for
    beyond $e^{36}$ double precision no longer tells the leader of a group from its followers. Bands: mean and standard deviation.
    """
    d = experiment.build_tokens()[0].shape[1]
    rates, z = _in_eigenvectors(experiment, *sparse_spectrum(np.random.default_rng(experiment.seed), d, top=2.4))
    up = z[-1, :, -1] > 0
    spread, line = _spread(experiment, rates, z, up.astype(int))
    wide, far = float(spread[-1, rates > 0].max()), float(np.abs(z[-1, :, rates < 0]).max())
    lines = [
        Line("largest spread of a clustered coordinate at the end", wide, 0.0, wide < 1e-4),
        Line("farthest coordinate at the end (at least)", far, 1e10, far > 1e10),
        line,
    ]
    ts = np.asarray(experiment.solve.ts)
    fig, axes = plots.figure(1, 2, width=8.0)
    for i, k in enumerate((-1, -2, -3, -4)):
        for group in (up, ~up):
            _band(
                axes[0, 0],
                ts,
                z[:, group, k],
                plots.COLOURS[i],
                rf"$\lambda = {rates[k]:.2f}$" if group is up else None,
            )
    for i, k in enumerate(np.linspace(0, np.sum(rates < 0) - 1, 4).astype(int)):
        _band(axes[0, 1], ts, z[:, :, k], plots.COLOURS[i], rf"$\lambda = {rates[k]:.2f}$")
    axes[0, 1].set_yscale("symlog")
    axes[0, 1].set_yticks([-1e12, -1e8, -1e4, 0, 1e4, 1e8, 1e12])
    for ax, name in zip(axes[0], ("clustered coordinates, by group", "other coordinates"), strict=True):
        ax.set_xlabel("t")
        ax.set_ylabel(name)
    axes[0, 0].set_ylim(bottom=-1.9 * np.abs(z[-1, :, -1]).max())
    axes[0, 0].legend(loc="lower right", ncols=2)
    axes[0, 1].legend()
    return [{"tokens": z.shape[1], "positive eigenvalues": int((rates > 0).sum())}], lines, fig


def sparse_spectrum(rng: np.random.Generator, d: int, *, top: float, density: float = 0.1):
    """Eigenvalues and eigenvectors of a sparse symmetric matrix of uniform entries; those below 1 in size are drawn from +-[1, 2].

    The entries are non-negative, and scaled so that the leading eigenvalue, which stands apart, is `top`.
    """
    entries = np.where(rng.random((d, d)) < density, rng.random((d, d)), 0)
    rates, vectors = np.linalg.eigh((entries + entries.T) / 2)
    rates = top / rates[-1] * rates
    rates = np.where(np.abs(rates) < 1, np.sign(rates) * rng.uniform(1, 2, d), rates)
    order = np.argsort(rates)
    return rates[order], vectors[:, order]


def _in_eigenvectors(experiment, rates, vectors):
    """Eigenvalues of V and rescaled tokens (T, n, d) in its eigenvectors, where each coordinate keeps its own digits."""
    x0, _ = experiment.build_tokens()
    d = x0.shape[1]
    score = vectors.T @ np.asarray(experiment.build_heads(d).dense(d).score)[0] @ vectors
    heads = Heads(jnp.asarray(score)[None], jnp.asarray(np.diag(rates))[None])
    field = AttentionField(heads, Softmax(experiment.attention.beta[0]), flat=True)
    traj = solved(experiment, field, x0 @ vectors)
    return rates, np.asarray(traj.values["tokens"]) * np.exp(-np.asarray(traj.ts)[:, None, None] * rates)


def _spread(experiment, rates, z, labels):
    """Root mean square distance (T, d) of the tokens from the mean of their group, and a line on its late rates."""
    parts = [z[:, labels == g] for g in np.unique(labels)]
    square = sum(((part - part.mean(axis=1, keepdims=True)) ** 2).sum(axis=1) for part in parts)
    spread = np.sqrt(square / z.shape[1])
    ts = np.asarray(experiment.solve.ts)
    late = 2 * len(ts) // 3
    found = np.polyfit(ts[late:], np.log(np.maximum(spread[late:], 1e-300)), 1)[0]
    off = float(np.abs(found + rates).max())
    return spread, Line("late rates of the spread against -lambda, largest error", off, 0.0, off < 1e-3)


def _band(ax, ts, values, colour, label):
    mean, std = values.mean(axis=1), values.std(axis=1)
    ax.plot(ts, mean, color=colour, linewidth=1, label=label)
    ax.fill_between(ts, mean - std, mean + std, color=colour, alpha=0.2, linewidth=0)


def rescaled(trajectory, rate: float) -> np.ndarray:
    """Tokens (T, n, d) times exp(-rate t)."""
    ts = np.asarray(trajectory.ts)
    return np.exp(-rate * ts)[:, None, None] * np.asarray(trajectory.values["tokens"])
