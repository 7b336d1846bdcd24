"""W2 as an observable of `solve` and `sweep`: functions (field, x) -> array that run under jit."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .circle import circle_distance, safe_root
from .clouds import checked_clouds
from .exact import two_points
from .ground import Metric, diameter
from .interval import Interval
from .projected import to_projection
from .soft import coupled, sinkhorn_divergence, sinkhorn_interval, two_atoms_distance


class W2To(eqx.Module):
    """Observable `(field, x) -> W2` between the tokens with the field's weights and a fixed target; see `w2_to`."""

    target: Array
    target_weights: Array
    epsilon: Float[Array, ""]
    metric: Metric = eqx.field(static=True)
    method: str = eqx.field(static=True)
    iterations: int = eqx.field(static=True)

    def __call__(self, field: Any, x: Float[Array, "n d"]) -> Float[Array, "*s"]:
        w, target, masses = field.token_weights(x), self.target.astype(x.dtype), self.target_weights.astype(x.dtype)
        if self.method == "atoms":
            return two_atoms_distance(x, target, masses, weights=w, metric=self.metric)
        if self.method == "coupled":
            return coupled(x, target, weights=w, metric=self.metric)
        if self.method == "circle":
            return circle_distance(x, target, x_weights=w, y_weights=masses)
        quantity = sinkhorn_interval if self.method == "interval" else sinkhorn_divergence
        found = quantity(
            *(x, target),
            x_weights=w,
            y_weights=masses,
            metric=self.metric,
            epsilon=self.epsilon.astype(x.dtype),
            iterations=self.iterations,
        )
        return jnp.stack([found.lower, found.upper]) if isinstance(found, Interval) else safe_root(found)


class W2ToSubspace(eqx.Module):
    """Observable `(field, x) -> W2(mu, Pi#mu)`, see `to_projection`."""

    basis: Float[Array, "d m"]
    metric: Metric = eqx.field(default="chordal", static=True)

    def __call__(self, field: Any, x: Float[Array, "n d"]) -> Float[Array, ""]:
        return to_projection(x, self.basis, weights=field.token_weights(x), metric=self.metric)


def w2_to_subspace(basis, *, metric: Metric = "chordal") -> W2ToSubspace:
    """Observable: exact W2 of the tokens to their projection on the span of the orthonormal columns of `basis` (d, m)."""
    diameter(metric)
    basis = jnp.asarray(basis)
    if basis.ndim != 2 or not np.allclose(np.asarray(basis).T @ np.asarray(basis), np.eye(basis.shape[1]), atol=1e-5):
        raise ValueError(
            f"`basis` must have orthonormal columns (d, m), got shape {basis.shape}; take those of numpy's qr."
        )
    return W2ToSubspace(basis, metric)


def w2_to(
    target,
    *,
    target_weights=None,
    metric: Metric = "chordal",
    method: str | None = None,
    epsilon: float = 1e-2,
    iterations: int = 100,
) -> W2To:
    r"""Observable: W2 from the tokens (with the field's weights) to a fixed target cloud (m, d).

    `method` None takes the exact one: 'atoms' where the target lies on at most two points (any dimension and metric), 'circle'
    for d = 2 and the geodesic metric. For other targets there is no exact method that runs under jit, and one of these must
    be asked for:

    - 'interval': [lower, upper], both certified, by `sinkhorn_interval`; no gradient;
    - 'divergence': $\sqrt{S_\epsilon}$, an estimate, smooth, for gradients;
    - 'coupled': the upper bound that pairs token i with target i (same n).

    The alternative is to save tokens and call `w2` on the frames: exact, on the host.

    **Arguments:**

    - `target_weights`: default 1/m. For 'coupled' the field's weights are used on both sides.
    - `epsilon`, `iterations`: of 'interval' and 'divergence'.
    """
    clouds = checked_clouds(target, target, target_weights, metric=metric)
    points, masses = clouds.x, clouds.a
    pair = two_points(points, metric, 8 * clouds.unit)
    on_circle = points.shape[1] == 2 and metric == "geodesic"
    if method is None:
        method = "atoms" if pair else "circle" if on_circle else None
    if method is None:
        raise ValueError(
            "`method` must be given for a target of more than two points: 'interval' (certified bounds), "
            "'divergence' (smooth estimate) or 'coupled' (upper bound); exact values need `w2` on saved frames."
        )
    if method not in ("atoms", "circle", "coupled", "interval", "divergence"):
        raise ValueError(f"`method` must be 'atoms', 'circle', 'coupled', 'interval' or 'divergence', got {method!r}.")
    if method == "atoms":
        if pair is None:
            raise ValueError("method='atoms' needs a target on at most two points; leave `method` out.")
        p, q, is_p, _ = pair
        points, masses = np.stack([p, q]), np.array([masses[is_p].sum(), masses[~is_p].sum()])
    elif method == "circle" and not on_circle:
        raise ValueError(
            "method='circle' needs d = 2 and metric='geodesic'; for the chordal metric no shift is optimal."
        )
    elif method == "coupled":
        points = np.asarray(target)
    arrays = [jnp.asarray(v, jnp.result_type(float)) for v in (points, masses, epsilon)]
    return W2To(*arrays, metric, method, iterations)
