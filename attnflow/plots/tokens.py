"""Tokens on the circle and the sphere, still and moving."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.animation import FFMpegWriter, PillowWriter
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import COLOURS, STYLE, Numbers

EYE = np.array([1.0, 1.0, 0.6]) / np.linalg.norm([1.0, 1.0, 0.6])
SECTORS = 720  # of the density on the circle


def circle(ax: Axes, x: Numbers, *, weights: Numbers | None = None) -> Axes:
    """Tokens (n, 2) on the circle, their areas in proportion to their weights."""
    x = np.asarray(x)
    _ring(ax)
    ax.scatter(x[:, 0], x[:, 1], s=_areas(len(x), weights), color=COLOURS[0], linewidths=0)
    ax.set_aspect("equal")
    ax.set_axis_off()
    return ax


def circle_density(ax: Axes, x: Numbers, *, weights: Numbers | None = None, width: float = 0.05) -> Axes:
    r"""Density of weighted tokens on the circle as height above it: $\sum_j w_j k(\theta - \theta_j)$.

    k is the von Mises kernel of standard deviation `width` (radians); the highest point stands half a radius above.
    """
    x = np.asarray(x)
    w = np.full(len(x), 1 / len(x)) if weights is None else np.asarray(weights)
    turn = np.linspace(0, 2 * np.pi, SECTORS + 1)
    mass, _ = np.histogram(np.arctan2(x[:, 1], x[:, 0]) % (2 * np.pi), turn, weights=w)
    kernel = np.exp((np.cos(turn[:-1]) - 1) / width**2)
    density = np.fft.irfft(np.fft.rfft(mass) * np.fft.rfft(kernel / kernel.sum()), SECTORS)
    height = 1 + 0.5 * np.append(density, density[0]) / density.max()
    middle = np.append((turn[1:] + turn[:-1]) / 2, turn[0] + np.pi / SECTORS)
    _ring(ax)
    ax.fill(
        np.concatenate([height * np.cos(middle), np.cos(middle)[::-1]]),
        np.concatenate([height * np.sin(middle), np.sin(middle)[::-1]]),
        color=COLOURS[0], alpha=0.5, linewidth=0,
    )  # fmt: skip
    ax.set_aspect("equal")
    ax.set_axis_off()
    return ax


def angles(ax: Axes, ts: Numbers, tokens: Numbers, *, weights: Numbers | None = None, most: int = 200) -> Axes:
    """Trajectories (T, n, 2) as angle against time, of at most `most` tokens, broken where they cross the cut at pi."""
    ts, tokens = np.asarray(ts), np.asarray(tokens)
    some = np.arange(0, tokens.shape[1], -(-tokens.shape[1] // most))
    theta = np.arctan2(tokens[:, some, 1], tokens[:, some, 0])
    gaps = np.abs(np.diff(theta, axis=0)) > np.pi
    theta[1:][gaps] = np.nan
    widths = np.ones(len(some)) if weights is None else _areas(tokens.shape[1], weights)[some] / 12
    for k, width in enumerate(np.clip(widths, 0.2, 3.0)):
        ax.plot(ts, theta[:, k], color=COLOURS[0], linewidth=0.6 * width, alpha=0.6)
    ax.set_ylim(-np.pi, np.pi)
    ax.set_yticks([-np.pi, 0, np.pi], [r"$-\pi$", "0", r"$\pi$"])
    ax.set_xlabel("t")
    ax.set_ylabel("angle")
    return ax


def sphere(
    ax: Axes,
    x: Numbers,
    *,
    weights: Numbers | None = None,
    spaces: Sequence[Numbers] = (),
    names: Sequence[str] = (),
    paths: Numbers | None = None,
) -> Axes:
    """Tokens (n, 3) seen from (1, 1, 0.6), nearer ones larger and darker.

    `spaces` are bases (3, 1) or (3, 2) of the heads' eigenspaces, drawn as a line through the centre or a great circle and
    named by `names`; `paths` (T, n, 3) the way the tokens came.
    """
    x, screen = np.asarray(x), _screen()
    if x.ndim != 2 or x.shape[1] != 3:
        raise ValueError(f"`x` must have shape (n, 3), got {x.shape}; project tokens of a higher dimension first.")
    _ring(ax)
    for axis in np.eye(3):
        _great_circle(ax, axis, "0.9", 0.5)
    for k, space in enumerate(spaces):
        basis, colour = np.asarray(space).reshape(3, -1), COLOURS[1 + k % 6]
        if basis.shape[1] == 1:
            end = basis[:, 0] @ screen
            ax.plot([-end[0], end[0]], [-end[1], end[1]], color=colour, linewidth=1)
        else:
            _great_circle(ax, np.cross(basis[:, 0], basis[:, 1]), colour, 1)
        if k < len(names):
            ax.plot([], [], color=colour, label=names[k])
    if paths is not None:
        for path in np.swapaxes(np.asarray(paths), 0, 1):
            ax.plot(*(path @ screen).T, color="0.6", linewidth=0.4, zorder=1)
    depth, flat = x @ EYE, x @ screen
    order = np.argsort(depth)
    near = (depth[order] + 1) / 2
    area = (4 + 16 * near) * (_areas(len(x), weights) / 12 * np.ones(len(x)))[order]
    ax.scatter(*flat[order].T, s=area, c=near, cmap="Blues", vmin=-0.6, vmax=1.2, linewidths=0, zorder=2)
    if names:
        ax.legend(loc="upper left")
    ax.set_aspect("equal")
    ax.set_axis_off()
    return ax


def animate(
    tokens: Numbers,
    path: str | Path,
    *,
    ts: Numbers | None = None,
    weights: Numbers | None = None,
    frames_per_second: int = 20,
    dpi: int = 100,
) -> Path:
    """Write tokens (T, n, 2) or (T, n, 3) of a trajectory as a moving picture, .gif or .mp4.

    `tokens` is `traj.values["tokens"]` of a solve with `save_tokens=True`. A .gif needs nothing else; a .mp4 needs ffmpeg.

    **Errors:** ValueError for another ending or dimension, RuntimeError where there is no ffmpeg.
    """
    tokens, path = np.asarray(tokens), Path(path)
    if tokens.ndim != 3 or tokens.shape[2] not in (2, 3):
        raise ValueError(f"`tokens` must have shape (T, n, 2) or (T, n, 3), got {tokens.shape}.")
    if path.suffix not in (".gif", ".mp4"):
        raise ValueError(f"`path` must end in .gif or .mp4, got {path.name}.")
    if path.suffix == ".mp4" and not FFMpegWriter.isAvailable():
        raise RuntimeError("a .mp4 needs ffmpeg on the path: install it, or write a .gif.")
    writer = (PillowWriter if path.suffix == ".gif" else FFMpegWriter)(fps=frames_per_second)
    draw = circle if tokens.shape[2] == 2 else sphere
    with mpl.rc_context(STYLE | {"figure.constrained_layout.use": False}):
        fig = Figure(figsize=(4, 4.2))
        ax = fig.add_axes((0.02, 0.0, 0.96, 0.93))
        with writer.saving(fig, str(path), dpi):
            for k, x in enumerate(tokens[np.isfinite(tokens).all(axis=(1, 2))]):
                ax.clear()
                draw(ax, x, weights=weights)
                ax.set_xlim(-1.1, 1.1)
                ax.set_ylim(-1.1, 1.1)
                if ts is not None:
                    ax.set_title(f"t = {float(np.asarray(ts)[k]):.2f}", fontsize=9)
                writer.grab_frame()
    return path


def _screen():
    right = np.cross([0, 0, 1.0], EYE)
    right /= np.linalg.norm(right)
    return np.stack([right, np.cross(EYE, right)], axis=1)


def _ring(ax):
    turn = np.linspace(0, 2 * np.pi, 400)
    ax.plot(np.cos(turn), np.sin(turn), color="0.8", linewidth=0.8, zorder=0)


def _great_circle(ax, normal, colour, width):
    """The circle orthogonal to `normal`, its far half faint."""
    u, _, _ = np.linalg.svd(np.reshape(normal, (3, 1)))
    turn = np.linspace(0, 2 * np.pi, 200)
    points = np.outer(np.cos(turn), u[:, 1]) + np.outer(np.sin(turn), u[:, 2])
    flat = points @ _screen()
    near = (points @ EYE >= 0)[:, None]
    ax.plot(*np.where(near, flat, np.nan).T, color=colour, linewidth=width, zorder=0)
    ax.plot(*np.where(near, np.nan, flat).T, color=colour, linewidth=width, alpha=0.3, zorder=0)


def _areas(n, weights):
    return np.full(n, 12.0) if weights is None else 12 * np.asarray(weights) * n
