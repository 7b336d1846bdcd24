"""Distances to projected, atomic and uniform laws, and how fine a sample can resolve them."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray
from scipy import special

from .circle import TURN, safe_root
from .clouds import checked_clouds, second_weights, traced_weights
from .exact import root
from .ground import Metric, cost_table, diameter
from .interval import Interval
from .wasserstein import w2

Weights = Float[ArrayLike, " n"] | None


def to_projection(
    x: Float[Array, "n d"],
    basis: Float[Array, "d m"],
    *,
    weights: Weights = None,
    metric: Metric = "chordal",
) -> Float[Array, ""]:
    r"""Exact $W_2(\mu, \Pi_\#\mu)$, $\Pi x = P_1x/|P_1x|$, for the span of the orthonormal columns of `basis`; no solver needed.

    $\Pi x$ is the point of the subspace's sphere nearest to x, so no plan costs less: $W_2^2 = 2 - 2E|P_1x|$ (chordal) or
    $E\,\mathrm{atan2}(|P_2x|, |P_1x|)^2$ (geodesic). It is also the distance to the set of all laws on the subspace. Along the
    zero-temperature flow $\Pi x_t = \Pi x_0$, and it is $W_2(\rho_t, \Pi_\#\rho_0)$ (arXiv 2605.10931, Corollary 2). Accurate
    for tiny distances, with gradient 0 at 0; tokens of norm 1.
    """
    diameter(metric)
    if basis.ndim != 2 or basis.shape[0] != x.shape[1]:
        raise ValueError(f"`basis` must have shape ({x.shape[1]}, m), orthonormal columns, got {basis.shape}.")
    basis = basis.astype(x.dtype)
    inside = x @ basis
    off = jnp.sum((x - inside @ basis.T) ** 2, axis=1)
    along = safe_root(jnp.sum(inside**2, axis=1))
    angle = jnp.arctan2(safe_root(off), along)
    squared = 2 * off / (1 + along) if metric == "chordal" else jnp.where(off > 0, angle**2, off)
    return safe_root(jnp.sum(traced_weights(weights, x) * squared))


def to_atoms(
    x: Float[Array, "n d"],
    atoms: Float[Array, "k d"],
    *,
    weights: Weights = None,
    metric: Metric = "chordal",
) -> Float[Array, ""]:
    r"""Distance to the set of all laws on the atoms: $(\sum_i w_i \min_k c(x_i, z_k))^{1/2}$, exact, under jit and grad.

    With given masses it is `w2(x, atoms, y_weights=masses)`.
    """
    diameter(metric)
    nearest = jnp.min(cost_table(x, atoms.astype(x.dtype), metric=metric), axis=1)
    return safe_root(jnp.sum(traced_weights(weights, x) * nearest))


def circle_to_uniform(x: Float[Array, "n 2"], *, weights: Weights = None) -> Float[Array, ""]:
    r"""Exact geodesic W2 to the uniform law of the circle: $W_2^2 = \mathrm{Var}_s(F^{-1}(s) - 2\pi s)$; under jit and grad.

    A shift of the uniform law is no change, so the best shift of the quantile functions is the mean difference.
    """
    w = traced_weights(weights, x)
    theta = jnp.mod(jnp.arctan2(x[:, 1], x[:, 0]), TURN)
    order = jnp.argsort(theta)
    theta, w = theta[order], w[order]
    middle = theta - TURN * (jnp.cumsum(w) - w / 2)
    mean = jnp.sum(w * middle)
    return safe_root(jnp.sum(w * ((middle - mean) ** 2 + (TURN * w) ** 2 / 12)))


def to_uniform(x, *, weights=None, metric: Metric = "chordal", nodes: int = 4000, tolerance: float = 1e-3) -> Interval:
    r"""Bounds of W2 to the uniform law of $S^{d-1}$; exact for d = 2 and the geodesic metric.

    d = 2, 3: the sphere is cut into about `nodes` cells of mass $w_c$ and centroid $m_c$. With W the distance to
    $\sum w_c \delta_{m_c}$ and $h^2 = 1 - \sum w_c|m_c|^2$, chordal: $W - h \le W_2 \le \sqrt{W^2 + h^2}$ (a plan to a centroid is a plan
    to its cell, and the cross term vanishes); geodesic: the triangle inequality with the points $m_c/|m_c|$.
    d >= 4: below Gelbrich's bound by two moments; above the plan that is monotone along one axis and independent across;
    geodesic by $W_2^{geo} \ge 2\arcsin(W_2/2)$ (Jensen: the squared angle is convex in the squared chord) and angle
    $\le (\pi/2)$ chord.
    """
    clouds = checked_clouds(x, x, weights, weights, metric=metric)
    d = clouds.x.shape[1]
    if d < 2 or np.max(np.abs(np.linalg.norm(clouds.x, axis=1) - 1)) > 1e-3:
        raise ValueError("`x` must lie on a sphere of dimension at least 1 to be compared with its uniform law.")
    if d == 2 and metric == "geodesic":
        with jax.enable_x64(True):
            value = float(circle_to_uniform(jnp.asarray(clouds.x), weights=jnp.asarray(clouds.a)))
        return Interval(value, value, "quantiles", exact=True, quantum=clouds.quantum)
    if d > 3:
        lower, upper, method = _by_moments(clouds.x, clouds.a), _along_one_axis(clouds.x, clouds.a), "moments"
        reason = "no cells for d >= 4"
        converged = False
    else:
        centroids, areas, reach = _circle_cells(nodes) if d == 2 else _sphere_cells(nodes)
        length = np.linalg.norm(centroids, axis=1)
        if metric == "chordal":
            spread = root(1 - areas @ length**2)
            near = w2(clouds.x, centroids, x_weights=clouds.a, y_weights=areas, tolerance=tolerance)
            lower, upper = near.lower - spread, np.hypot(near.upper, spread)
        else:
            spread = root(2 - 2 * areas @ length) * 2 * np.arcsin(reach / 2) / reach
            nodes_ = centroids / length[:, None]
            near = w2(clouds.x, nodes_, x_weights=clouds.a, y_weights=areas, metric=metric, tolerance=tolerance)
            lower, upper = near.lower - spread, near.upper + spread
        method, reason = "cells", f"{len(areas)} cells of spread {spread:.1e}, {near.method}"
        converged = near.converged
    if metric == "geodesic" and d > 3:
        lower, upper = 2 * np.arcsin(min(lower / 2, 1.0)), min(np.pi / 2 * upper, np.pi)
    lower, upper = np.float64(max(lower, 0.0)) * (1 - 1e-12), np.float64(upper) * (1 + 1e-12)
    return Interval(lower, upper, method, reason, converged=converged, quantum=clouds.quantum)


def moment_bound(
    x: Float[Array, "n d"],
    y: Float[Array, "m d"],
    *,
    x_weights: Weights = None,
    y_weights: Float[ArrayLike, " m"] | None = None,
) -> Float[Array, ""]:
    r"""Gelbrich's lower bound of the chordal W2: $|m_x - m_y|^2 + \mathrm{tr}(S_x + S_y - 2(S_x^{1/2}S_yS_x^{1/2})^{1/2})$, square root."""
    a, b = traced_weights(x_weights, x), second_weights(x_weights, y_weights, x, y)
    return _gelbrich(*_moments(x, a), *_moments(y.astype(x.dtype), b))


def quantisation(weights: Float[ArrayLike, " n"], *, metric: Metric = "chordal") -> Float[Array, ""]:
    r"""$D\sqrt{\max_i w_i}$, D the sphere's diameter: how far W2 can jump when one token goes over to the other side.

    Mass w moved by a distance r costs $w r^2$. With n equal tokens it is $2 n^{-1/2}$: slopes in beta finer than that are
    not resolved by a sample, whatever the width of the interval.
    """
    return diameter(metric) * jnp.sqrt(jnp.max(jnp.asarray(weights)))


def sampling_band(
    key: PRNGKeyArray,
    sampler: Callable[[PRNGKeyArray, int], Float[Array, "n d"]],
    n: int,
    *,
    repeats: int = 8,
    metric: Metric = "chordal",
) -> np.ndarray:
    """W2 between two independent samples of n points of one law, `repeats` times: the floor under curves from samples.

    `sampler(key, n)` draws; take the same sample on both sides wherever the theorem allows it.
    """
    pairs = [jr.split(k) for k in jr.split(key, repeats)]
    return np.array([w2(sampler(p, n), sampler(q, n), metric=metric).value for p, q in pairs])


def _moments(x, w):
    mean = w @ x
    centred = x - mean[None]
    return mean, (centred * w[:, None]).T @ centred


def _gelbrich(mean, cov, other_mean, other_cov):
    values, vectors = jnp.linalg.eigh(cov)
    half = (vectors * jnp.sqrt(jnp.maximum(values, 0))[None]) @ vectors.T
    cross = jnp.sqrt(jnp.maximum(jnp.linalg.eigvalsh(half @ other_cov @ half), 0))
    squared = jnp.sum((mean - other_mean) ** 2) + jnp.trace(cov) + jnp.trace(other_cov) - 2 * jnp.sum(cross)
    return jnp.sqrt(jnp.maximum(squared, 0))


def _by_moments(x, w):
    d = x.shape[1]
    with jax.enable_x64(True):
        mean, cov = _moments(jnp.asarray(x), jnp.asarray(w))
        return float(_gelbrich(mean, cov, jnp.zeros(d), jnp.eye(d) / d)) * (1 - 1e-12)


def _along_one_axis(x, w):
    r"""$\sqrt{2 - 2\int F^{-1}Q}$, F the law of <x, v>, Q the quantile function of a uniform coordinate, v the best axis."""
    d = x.shape[1]
    v = np.linalg.eigh((x * w[:, None]).T @ x)[1][:, -1]
    order = np.argsort(x @ v)
    levels = np.clip(np.concatenate([[0.0], np.cumsum(w[order])]), 0, 1)
    s = 2 * special.betaincinv((d - 1) / 2, (d - 1) / 2, levels) - 1
    tail = special.gamma(d / 2) / (special.gamma((d - 1) / 2) * np.sqrt(np.pi) * (d - 1)) * (1 - s**2) ** ((d - 1) / 2)
    return root(2 - 2 * (x @ v)[order] @ -np.diff(tail)) * (1 + 1e-12)


def _circle_cells(n):
    """Centroids and masses of n equal arcs, and the largest chord from an arc to its middle."""
    angles = TURN * (np.arange(n) + 0.5) / n
    centroids = np.sinc(1 / n) * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return centroids, np.full(n, 1 / n), 2 * np.sin(np.pi / (2 * n))


def _sphere_cells(n):
    """Centroids and masses of cells between parallels, cut into sectors about as wide as high, and their largest extent."""
    bands = max(2, round(np.sqrt(n * np.pi / 4)))
    edges = np.linspace(0, np.pi, bands + 1)
    centroids, masses, reach = [], [], 0.0
    for top, bottom in itertools.pairwise(edges):
        sectors = max(1, round(TURN * np.sin((top + bottom) / 2) / (bottom - top)))
        drop = np.cos(top) - np.cos(bottom)
        radius = (bottom - top - (np.sin(2 * bottom) - np.sin(2 * top)) / 2) / (2 * drop) * np.sinc(1 / sectors)
        phi = TURN * (np.arange(sectors) + 0.5) / sectors
        height = np.full(sectors, (np.cos(top) + np.cos(bottom)) / 2)
        centroids.append(np.stack([radius * np.cos(phi), radius * np.sin(phi), height], axis=1))
        masses.append(np.full(sectors, drop / 2 / sectors))
        widest = 1.0 if top <= np.pi / 2 <= bottom else max(np.sin(top), np.sin(bottom))
        reach = max(reach, bottom - top + TURN / sectors * widest)
    return np.concatenate(centroids), np.concatenate(masses), min(reach, 2.0)
