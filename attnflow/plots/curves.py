"""Curves: time series and bands, the phases of the low-temperature flow, heads, work against precision."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from .style import COLOURS, Numbers

MARKERS = "os^vD"
MOST_CURVES = 8


def timeseries(ax: Axes, ts: Numbers, values: Numbers, *, label: str = "", name: str = "value") -> Axes:
    """Curves (T,) or (T, k) against t; more than eight as their median with a band from the smallest to the largest."""
    values = np.asarray(values).reshape(len(np.asarray(ts)), -1)
    if values.shape[1] > MOST_CURVES:
        (line,) = ax.plot(ts, np.median(values, axis=1), label=label or None)
        ax.fill_between(ts, values.min(1), values.max(1), color=line.get_color(), alpha=0.2, linewidth=0)
    else:
        for k in range(values.shape[1]):
            ax.plot(ts, values[:, k], label=label if k == 0 and label else None)
    ax.set_xlabel("t")
    ax.set_ylabel(name)
    return ax


def per_head(ax: Axes, ts: Numbers, values: Numbers, *, name: str = "entropy") -> Axes:
    """Entropy (T, H) of every head, or its shadow (T, H, n): then the median token, and a band with four fifths of them."""
    values = np.asarray(values)
    for h in range(values.shape[1]):
        of_head = values[:, h]
        middle = of_head if of_head.ndim == 1 else np.median(of_head, axis=1)
        (line,) = ax.plot(ts, middle, label=f"head {h}")
        if of_head.ndim > 1:
            low, high = np.quantile(of_head, (0.1, 0.9), axis=1)
            ax.fill_between(ts, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    ax.set_xlabel("t")
    ax.set_ylabel(name)
    ax.legend()
    return ax


def work_precision(ax: Axes, work: Sequence[Numbers], errors: Sequence[Numbers], names: Sequence[str]) -> Axes:
    """Error against work (steps, evaluations or seconds), one curve per method, both axes logarithmic."""
    for k, (each, error, name) in enumerate(zip(work, errors, names, strict=True)):
        ax.plot(each, error, MARKERS[k % len(MARKERS)] + "-", markersize=4, label=name)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("work")
    ax.set_ylabel("error")
    ax.legend()
    return ax


def bands(ax: Axes, ts: Numbers, values: Numbers, *, label: str, name: str = "value") -> Axes:
    """Median (line) and quartiles (band) over the first axis of values (B, T)."""
    low, middle, high = np.nanquantile(values, (0.25, 0.5, 0.75), axis=0)
    (line,) = ax.plot(ts, middle, label=label)
    ax.fill_between(ts, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    ax.set_xlabel("t")
    ax.set_ylabel(name)
    return ax


def phases(
    ax: Axes,
    ts: Numbers,
    distances: Sequence[Numbers],
    betas: Sequence[float],
    *,
    marks: Sequence[dict],
    bounds: Sequence[Numbers] = (),
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
                ax.plot(t, np.interp(t, np.asarray(ts), np.asarray(w)), symbol, color=colour, markersize=5)
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
