"""Pictures: functions of arrays and Axes, without LaTeX, in colours that colour-blind readers can tell apart."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette."""

STYLE: Any = {
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "legend.frameon": False,
    "mathtext.fontset": "cm",
    "savefig.dpi": 200,
    "svg.fonttype": "none",
}


def figure(rows: int = 1, columns: int = 1, *, width: float = 6.4, height: float = 3.6) -> tuple[Figure, np.ndarray]:
    """A figure in the package's style and its (rows, columns) Axes; nothing global is changed."""
    with mpl.rc_context(STYLE):
        fig = Figure(figsize=(width, height), layout="constrained")
        axes = fig.subplots(rows, columns, squeeze=False)
    return fig, axes


def save(fig: Figure, path) -> None:
    """Write the figure in the format of the path's ending."""
    with mpl.rc_context(STYLE):
        fig.savefig(path)


def phases(
    ax: Axes,
    ts: np.ndarray,
    distances: Sequence[np.ndarray],
    betas: Sequence[float],
    *,
    marks: Sequence[dict],
    bounds: Sequence[np.ndarray] = (),
) -> Axes:
    r"""$W_2(\rho_t, \Pi_\#\rho_0)$ against t for every beta, with the minimum, departure and terminal time marked.

    `bounds` are the curves of Theorem 1, drawn dashed where they are below the sphere's diameter.
    """
    for i, (w, beta, mark) in enumerate(zip(distances, betas, marks, strict=True)):
        colour = COLOURS[i % len(COLOURS)]
        ax.plot(ts, w, color=colour, label=rf"$\beta = {beta:g}$")
        for name, symbol in (("t_min", "o"), ("t_leave", "^"), ("t_terminal", "s")):
            t = mark.get(name)
            if t is not None and np.isfinite(t):
                ax.plot(t, np.interp(t, ts, w), symbol, color=colour, markersize=5)
    for i, bound in enumerate(bounds):
        shown = np.where(np.asarray(bound) <= 2, bound, np.nan)
        ax.plot(ts, shown, "--", color=COLOURS[i % len(COLOURS)], linewidth=1, label=None if i else "Theorem 1, fitted")
    ax.set_yscale("log")
    ax.set_xlabel("t")
    ax.set_ylabel(r"$W_2(\rho_t, \Pi_\#\rho_0)$")
    for symbol, text in (("o", "closest"), ("^", "leaves"), ("s", "terminal")):
        ax.plot([], [], symbol, color="0.4", markersize=5, label=text)
    ax.legend(ncols=2)
    return ax


def timeseries(ax: Axes, ts: np.ndarray, values: np.ndarray, *, label: str, name: str = "value") -> Axes:
    """One or several curves (T,) or (T, k) against t."""
    values = np.asarray(values).reshape(len(ts), -1)
    for k in range(values.shape[1]):
        ax.plot(ts, values[:, k], label=label if k == 0 else None)
    ax.set_xlabel("t")
    ax.set_ylabel(name)
    return ax


def staircase(
    ax: Axes, plateaus: Sequence[Sequence], betas: Sequence[float], *, shifts: Sequence[float] | None = None
) -> Axes:
    r"""Energy $\sum_k W_k^2$ against $\ln t$ (plus a shift per beta): one tread per plateau (energy, start, end, error)."""
    moved = np.zeros(len(betas)) if shifts is None else np.asarray(shifts)
    steps = [p.end + m for stairs, m in zip(plateaus, moved, strict=True) for p in stairs if np.isfinite(p.end)]
    left, right = (min(steps) - 2, max(steps) + 0.1 * abs(max(steps)) + 1) if steps else (0.0, 1.0)
    for i, (stairs, beta, m) in enumerate(zip(plateaus, betas, moved, strict=True)):
        edges = [left] + [min(p.end + m, right) for p in stairs]
        ax.stairs([p.energy for p in stairs], edges, baseline=None, color=COLOURS[i % 7], label=rf"$\beta = {beta:g}$")
    ax.set_xlabel(r"$\ln t$" if shifts is None else r"$\ln t + \beta$")
    ax.set_ylabel(r"energy $\sum_k W_k^2$")
    ax.legend(loc="lower right")
    return ax


def merge_tree(ax: Axes, order: np.ndarray, x: np.ndarray, y: np.ndarray) -> Axes:
    r"""Dendrogram over $\ln t$: tokens `order` along the axis, one bracket (x, y) per merge."""
    for xs, ys in zip(x, y, strict=True):
        ax.plot(xs, ys, color=COLOURS[0], linewidth=1)
    if len(order) <= 40:
        ax.set_xticks(range(len(order)), [str(i) for i in order], fontsize=6)
    ax.set_xlabel("token")
    ax.set_ylabel(r"$\ln t$ of the merge")
    return ax


def lifetimes(
    ax: Axes, betas: np.ndarray, log_t: np.ndarray, error: np.ndarray, *, slope: float, intercept: float
) -> Axes:
    r"""$\ln t$ of the last merge against beta with its fitted line."""
    ax.errorbar(betas, log_t, yerr=np.where(np.isfinite(error), error, 0), fmt="o", color=COLOURS[0], markersize=4)
    line = np.array([np.min(betas), np.max(betas)])
    ax.plot(line, slope * line + intercept, color=COLOURS[1], label=f"slope {slope:.4g}")
    ax.set_xlabel(r"$\beta$")
    ax.set_ylabel(r"$\ln t$ of the last merge")
    ax.legend()
    return ax


def heat_map(ax: Axes, values: np.ndarray, *, x: str, y: str, label: str) -> Axes:
    """A matrix as an image with a colour bar: layer by head, beta by time."""
    image = ax.imshow(values, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label=label)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    return ax


def phase_diagram(
    ax: Axes, ts: np.ndarray, betas: np.ndarray, values: np.ndarray, *, label: str = "share of close pairs"
) -> Axes:
    """Observable (beta, time) as colour, its level one half as a line."""
    mesh = ax.pcolormesh(ts, betas, values, cmap="viridis", shading="nearest", rasterized=True)
    ax.figure.colorbar(mesh, ax=ax, label=label)
    if np.nanmin(values) < 0.5 < np.nanmax(values):
        ax.contour(ts, betas, values, levels=[0.5], colors="white", linewidths=1)
    ax.set_xlabel("t")
    ax.set_ylabel(r"$\beta$")
    return ax


def bands(ax: Axes, ts: np.ndarray, values: np.ndarray, *, label: str, name: str = "value") -> Axes:
    """Median (line) and quartiles (band) over the first axis of values (B, T)."""
    low, middle, high = np.nanquantile(values, (0.25, 0.5, 0.75), axis=0)
    (line,) = ax.plot(ts, middle, label=label)
    ax.fill_between(ts, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    ax.set_xlabel("t")
    ax.set_ylabel(name)
    return ax


def spectrum(ax: Axes, eigenvalues: np.ndarray, *, label: str) -> Axes:
    """Eigenvalues in the complex plane."""
    ax.plot(np.real(eigenvalues), np.imag(eigenvalues), ".", label=label)
    ax.axhline(0, color="0.8", linewidth=0.5, zorder=0)
    ax.axvline(0, color="0.8", linewidth=0.5, zorder=0)
    ax.set_xlabel("real part")
    ax.set_ylabel("imaginary part")
    ax.set_aspect("equal", adjustable="datalim")
    return ax


def circle(ax: Axes, x: np.ndarray, *, weights: np.ndarray | None = None) -> Axes:
    """Tokens (n, 2) on the circle, their areas in proportion to their weights."""
    turn = np.linspace(0, 2 * np.pi, 400)
    ax.plot(np.cos(turn), np.sin(turn), color="0.8", linewidth=0.8, zorder=0)
    size = 12 if weights is None else 12 * weights * len(weights)
    ax.scatter(x[:, 0], x[:, 1], s=size, color=COLOURS[0], linewidths=0)
    ax.set_aspect("equal")
    ax.set_axis_off()
    return ax


def sphere(ax: Axes, x: np.ndarray, *, axes: np.ndarray | None = None) -> Axes:
    """Tokens (n, 3) seen from (1, 1, 0.6), nearer ones larger and darker; columns of `axes` (3, m) as lines through the centre."""
    eye = np.array([1.0, 1.0, 0.6]) / np.linalg.norm([1.0, 1.0, 0.6])
    right = np.cross([0, 0, 1.0], eye)
    right /= np.linalg.norm(right)
    screen = np.stack([right, np.cross(eye, right)], axis=1)
    depth, flat = x @ eye, x @ screen
    turn = np.linspace(0, 2 * np.pi, 400)
    ax.plot(np.cos(turn), np.sin(turn), color="0.8", linewidth=0.8, zorder=0)
    order = np.argsort(depth)
    near = (depth[order] + 1) / 2
    ax.scatter(*flat[order].T, s=4 + 16 * near, c=near, cmap="Blues", vmin=-0.6, vmax=1.2, linewidths=0)
    for k in range(0 if axes is None else axes.shape[1]):
        end = np.asarray(axes)[:, k] @ screen
        ax.plot([-end[0], end[0]], [-end[1], end[1]], color=COLOURS[1 + k % 6], linewidth=1)
    ax.set_aspect("equal")
    ax.set_axis_off()
    return ax
