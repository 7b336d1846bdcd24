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
    ax: Axes, ts: np.ndarray, distances: Sequence[np.ndarray], betas: Sequence[float], *, marks: Sequence[dict]
) -> Axes:
    r"""$W_2(\rho_t, \Pi_\#\rho_0)$ against t for every beta, with the minimum, departure and terminal time marked."""
    for i, (w, beta, mark) in enumerate(zip(distances, betas, marks, strict=True)):
        colour = COLOURS[i % len(COLOURS)]
        ax.plot(ts, w, color=colour, label=rf"$\beta = {beta:g}$")
        for name, symbol in (("t_min", "o"), ("t_leave", "^"), ("t_terminal", "s")):
            t = mark.get(name)
            if t is not None and np.isfinite(t):
                ax.plot(t, np.interp(t, ts, w), symbol, color=colour, markersize=5)
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
