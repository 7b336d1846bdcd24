"""Weighted point clouds as the solvers take them: checked once, in float64, without weightless points."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float

from .ground import Metric, diameter, host_cost

OFF_SPHERE = 1e-3  # | |x| - 1 | above which a geodesic distance is refused


class Clouds(NamedTuple):
    """Two measures sum_i a_i delta_{x_i}, sum_j b_j delta_{y_j} on the host: float64, a and b positive with sum 1.

    `paired`: x and y have the same weights row by row, so that the identity is a coupling of theirs.
    `unit`: machine epsilon of the dtype in which the points were given.
    """

    x: np.ndarray
    y: np.ndarray
    a: np.ndarray
    b: np.ndarray
    metric: Metric
    paired: bool
    unit: float

    @property
    def largest(self) -> float:
        """A bound of every cost: the diameter squared, or more for points off the sphere."""
        if self.metric == "geodesic":
            return float(np.pi**2)
        return float(sum(np.max(np.linalg.norm(p, axis=1)) for p in (self.x, self.y)) ** 2)

    @property
    def quantum(self) -> float:
        return float(np.sqrt(self.largest * max(self.a.max(), self.b.max())))

    def swapped(self) -> "Clouds":
        return self._replace(x=self.y, y=self.x, a=self.b, b=self.a)

    def coupling(self, i: np.ndarray, j: np.ndarray, mass: np.ndarray) -> float:
        """Cost of the plan that sends `mass` from x_i to y_j."""
        return float(host_cost(self.x[i], self.y[j], metric=self.metric) @ mass)


def checked_clouds(x, y, x_weights=None, y_weights=None, *, metric: Metric) -> Clouds:
    """The clouds of a call of `w2`, or a ValueError that says what to change."""
    diameter(metric)
    if any(isinstance(v, Tracer) for v in (x, y, x_weights, y_weights)):
        raise ValueError(
            "`w2` chooses its solver on the host, so it cannot run under jit, vmap or grad; "
            "use `sinkhorn_interval`, `sinkhorn_divergence`, `coupled` or a `w2_to` observable there."
        )
    unit = max(np.finfo(np.result_type(np.asarray(v).dtype, np.float32)).eps for v in (x, y))
    x, y = (_points(name, v, metric) for name, v in (("x", x), ("y", y)))
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"`x` and `y` must have the same dimension, got {x.shape[1]} and {y.shape[1]}.")
    if y_weights is None and len(x) == len(y):
        y_weights = x_weights
    a, b = _weights("x_weights", x_weights, len(x)), _weights("y_weights", y_weights, len(y))
    paired = len(x) == len(y) and np.array_equal(a, b)
    kept = [(p[w > 0], w[w > 0]) for p, w in ((x, a), (y, b))]
    return Clouds(kept[0][0], kept[1][0], kept[0][1], kept[1][1], metric, paired, float(unit))


def _points(name, points, metric):
    points = np.asarray(points)
    if points.ndim != 2 or 0 in points.shape:
        raise ValueError(f"`{name}` must have shape (n, d) with n, d >= 1, got {points.shape}.")
    points = points.astype(np.float64)
    if not np.all(np.isfinite(points)):
        row = int(np.flatnonzero(~np.isfinite(points).all(axis=1))[0])
        raise ValueError(f"`{name}` must be finite; row {row} is not.")
    if metric == "chordal":
        return points
    length = np.linalg.norm(points, axis=1)
    if np.max(np.abs(length - 1)) > OFF_SPHERE:
        row = int(np.argmax(np.abs(length - 1)))
        raise ValueError(
            f"`{name}` must lie on the sphere for the geodesic metric; row {row} has norm {length[row]:.6g}: "
            "divide by the norms, or take metric='chordal'."
        )
    return points / length[:, None]


def _weights(name, weights, n):
    if weights is None:
        return np.full(n, 1 / n)
    weights = np.asarray(weights)
    if weights.shape != (n,):
        raise ValueError(f"`{name}` must have shape ({n},), one weight per point, got {weights.shape}.")
    weights = weights.astype(np.float64)
    if not np.all(np.isfinite(weights)) or np.min(weights) < 0 or not np.sum(weights) > 0:
        raise ValueError(f"`{name}` must be finite and >= 0, and not all 0.")
    if abs(np.sum(weights) - 1) > 1e-3:
        raise ValueError(f"`{name}` must have sum 1, got {np.sum(weights):.6g}; divide by the sum.")
    return weights / np.sum(weights)


def traced_weights(weights: ArrayLike | None, x: Float[Array, "n d"]) -> Float[Array, " n"]:
    """Weights in the dtype of x with sum 1, default 1/n; for use under jit, so no value is checked."""
    if weights is None:
        return jnp.full(x.shape[0], 1 / x.shape[0], x.dtype)
    weights = jnp.asarray(weights).astype(x.dtype)
    if weights.shape != (x.shape[0],):
        raise ValueError(f"weights must have shape ({x.shape[0]},), one per point, got {weights.shape}.")
    return weights / jnp.sum(weights)


def second_weights(x_weights, y_weights, x, y) -> Float[Array, " m"]:
    """The rule for `y_weights=None`: those of x where the sizes agree, else 1/m."""
    return traced_weights(x_weights if y_weights is None and len(x) == len(y) else y_weights, y)


def log_weights(w: Float[Array, " n"]) -> Float[Array, " n"]:
    """log w, -inf where w = 0, without a NaN gradient."""
    return jnp.where(w > 0, jnp.log(jnp.where(w > 0, w, 1)), -jnp.inf)
