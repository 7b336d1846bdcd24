"""Metastability: energy staircases, merge trees, and lifetimes against beta."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from .style import COLOURS, Numbers


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


def merge_tree(ax: Axes, order: Numbers, x: Numbers, y: Numbers) -> Axes:
    r"""Dendrogram over $\ln t$: tokens `order` along the axis, one bracket (x, y) per merge."""
    for xs, ys in zip(x, y, strict=True):
        ax.plot(xs, ys, color=COLOURS[0], linewidth=1)
    if len(order) <= 40:
        ax.set_xticks(range(len(order)), [str(i) for i in order], fontsize=6)
    ax.set_xlabel("token")
    ax.set_ylabel(r"$\ln t$ of the merge")
    return ax


def lifetimes(ax: Axes, betas: Numbers, log_t: Numbers, error: Numbers, *, slope: float, intercept: float) -> Axes:
    r"""$\ln t$ of the last merge against beta with its fitted line."""
    ax.errorbar(betas, log_t, yerr=np.where(np.isfinite(error), error, 0), fmt="o", color=COLOURS[0], markersize=4)
    line = np.array([np.min(betas), np.max(betas)])
    ax.plot(line, slope * line + intercept, color=COLOURS[1], label=f"slope {slope:.4g}")
    ax.set_xlabel(r"$\beta$")
    ax.set_ylabel(r"$\ln t$ of the last merge")
    ax.legend()
    return ax
