"""Maps: phase diagrams, layer by head, spectra in the complex plane."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import Numbers, figure


def heat_map(ax: Axes, values: Numbers, *, x: str, y: str, label: str) -> Axes:
    """A matrix as an image with a colour bar: layer by head, beta by time."""
    image = ax.imshow(values, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label=label)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    return ax


def layer_maps(columns: Mapping[str, Numbers]) -> Figure:
    """One layer-by-head map for every entry of `columns` (L, H), three in a row."""
    rows = -(-len(columns) // 3)
    fig, axes = figure(rows, min(3, len(columns)), width=3.2 * min(3, len(columns)), height=2.6 * rows)
    for ax in axes.flat[len(columns) :]:
        ax.set_axis_off()
    for ax, (name, values) in zip(axes.flat, columns.items(), strict=False):
        heat_map(ax, values, x="head", y="layer", label=name.replace("_", " "))
    return fig


def phase_diagram(
    ax: Axes, ts: Numbers, betas: Numbers, values: Numbers, *, label: str = "share of close pairs"
) -> Axes:
    """Observable (beta, time) as colour, its level one half as a line."""
    mesh = ax.pcolormesh(ts, betas, values, cmap="viridis", shading="nearest", rasterized=True)
    ax.figure.colorbar(mesh, ax=ax, label=label)
    values = np.asarray(values)
    if np.nanmin(values) < 0.5 < np.nanmax(values):
        ax.contour(ts, betas, values, levels=[0.5], colors="white", linewidths=1)
    ax.set_xlabel("t")
    ax.set_ylabel(r"$\beta$")
    return ax


def spectrum(ax: Axes, eigenvalues: Numbers, *, label: str) -> Axes:
    """Eigenvalues in the complex plane."""
    ax.plot(np.real(eigenvalues), np.imag(eigenvalues), ".", label=label)
    ax.axhline(0, color="0.8", linewidth=0.5, zorder=0)
    ax.axvline(0, color="0.8", linewidth=0.5, zorder=0)
    ax.set_xlabel("real part")
    ax.set_ylabel("imaginary part")
    ax.set_aspect("equal", adjustable="datalim")
    return ax
