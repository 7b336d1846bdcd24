"""One style for all pictures: colours that colour-blind readers can tell apart, mathematics without LaTeX, vectors."""

from collections.abc import Sequence
from typing import Any

import jax
import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette."""

Numbers = jax.Array | np.ndarray | Sequence
"""What a picture takes for an array."""

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
    for legend in filter(None, (ax.get_legend() for ax in fig.axes)):
        legend.set_frame_on(False)  # legends are made outside the package's style
    with mpl.rc_context(STYLE):
        fig.savefig(path)
