"""Quantities for use inside jit, vmap and grad: coupled distance, two atoms, Sinkhorn divergence, a certified interval."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from .circle import safe_root
from .clouds import log_weights, second_weights, traced_weights
from .ground import Metric, cost, diameter
from .interval import Interval

Weights = Float[ArrayLike, " n"] | None


def coupled(
    x: Float[Array, "n d"], y: Float[Array, "m d"], *, weights: Weights = None, metric: Metric = "chordal"
) -> Float[Array, ""]:
    r"""$(\sum_i w_i c(x_i, y_i))^{1/2} \ge W_2$: the plan that keeps the pairs, for instance $x_i(t)$ with $\Pi x_i(0)$.

    O(n); the quantity that stability proofs control. Its gradient at x = y is 0.
    """
    diameter(metric)
    if x.shape != y.shape:
        raise ValueError(f"`x` and `y` must have the same shape to be coupled, got {x.shape} and {y.shape}.")
    return safe_root(jnp.sum(traced_weights(weights, x) * cost(x, y, metric=metric)))


def two_atoms_distance(
    x: Float[Array, "n d"],
    atoms: Float[Array, "2 d"],
    masses: Float[ArrayLike, "2"],
    *,
    weights: Weights = None,
    metric: Metric = "chordal",
) -> Float[Array, ""]:
    r"""Exact W2 from weighted tokens to $m_1\delta_p + m_2\delta_q$: mass goes to p in the order of c(x, p) - c(x, q).

    O(n log n) in any dimension, for both metrics; differentiable in points and weights.
    """
    diameter(metric)
    a = traced_weights(weights, x)
    p, q = (jnp.broadcast_to(v, x.shape) for v in atoms.astype(x.dtype))
    at_p, at_q = cost(x, p, metric=metric), cost(x, q, metric=metric)
    order = jnp.argsort(at_p - at_q)
    a, at_p, at_q = a[order], at_p[order], at_q[order]
    masses = jnp.asarray(masses).astype(x.dtype)
    before = jnp.cumsum(a) - a
    to_p = jnp.clip(masses[0] / jnp.sum(masses) - before, 0, a)
    return safe_root(jnp.sum(at_p * to_p + at_q * (a - to_p)))


def sinkhorn_interval(
    x: Float[Array, "n d"],
    y: Float[Array, "m d"],
    *,
    x_weights: Weights = None,
    y_weights: Float[ArrayLike, " m"] | None = None,
    metric: Metric = "chordal",
    epsilon: float | Float[Array, ""] = 1e-2,
    iterations: int = 100,
    ratio: float = 100.0,
) -> Interval:
    r"""Certified bounds of W2 on a fixed schedule, under jit and vmap: epsilon falls from `ratio` epsilon, then stays.

    Both bounds hold for every potential, so also where the schedule was too short, and they include the rounding of the
    dtype of x, in which all is computed. No gradient. Outside jit `w2` closes the interval further.
    """
    from .streamed import lower_bound, potentials, upper_bound

    diameter(metric)
    a, b = traced_weights(x_weights, x), second_weights(x_weights, y_weights, x, y)
    y = y.astype(x.dtype)
    _, g, _ = potentials(
        *(x, y, log_weights(a), log_weights(b), (jnp.zeros_like(a), jnp.zeros_like(b))),
        epsilon=jnp.asarray(epsilon, x.dtype),
        metric=metric,
        iterations=iterations,
        ratio=ratio,
        relaxation=1.0,
    )
    g = jnp.where(jnp.isfinite(g), g, 0)
    lower = lower_bound(x, y, a, b, g, metric=metric)[0]
    upper = upper_bound(x, y, a, b, g, epsilon=jnp.asarray(epsilon, x.dtype), metric=metric)
    return Interval(
        jnp.sqrt(lower), jnp.sqrt(upper), "sinkhorn", "fixed schedule", epsilon=epsilon, iterations=iterations
    )


def sinkhorn_divergence(
    x: Float[Array, "n d"],
    y: Float[Array, "m d"],
    *,
    epsilon: float | Float[Array, ""],
    x_weights: Weights = None,
    y_weights: Float[ArrayLike, " m"] | None = None,
    metric: Metric = "chordal",
    iterations: int = 100,
    ratio: float = 1.0,
) -> Float[Array, ""]:
    r"""Debiased Sinkhorn divergence $S_\epsilon = OT_\epsilon(\mu,\nu) - \frac12 OT_\epsilon(\mu,\mu) - \frac12 OT_\epsilon(\nu,\nu)$.

    Smooth in points and weights, near $W_2^2$ for small epsilon, but no bound of it: for losses and gradients. Value and
    gradient are 0 at coincident clouds, to rounding, converged or not. The gradient is that of the converged problem (envelope theorem), so
    `iterations` must suffice; keep epsilon fixed along a curve. Negative values, which rounding makes and for the geodesic
    cost the definition does not exclude, are returned as 0 with their gradient.

    Feydy, Sejourne, Vialard, Amari, Trouve, Peyre 2019. O(n + m) memory, also for the gradient.
    """
    from .streamed import potentials, soft_transform

    diameter(metric)
    a, b = traced_weights(x_weights, x), second_weights(x_weights, y_weights, x, y)
    y = y.astype(x.dtype)
    log_a, log_b = log_weights(a), log_weights(b)
    epsilon = jnp.asarray(epsilon, x.dtype)

    def solved(p, q, log_v, log_w):
        f, g, _ = potentials(
            *jax.lax.stop_gradient((p, q, log_v, log_w, (jnp.zeros_like(log_v), jnp.zeros_like(log_w)))),
            epsilon=epsilon,
            metric=metric,
            iterations=iterations,
            ratio=ratio,
            relaxation=0.5,
            symmetric=True,
        )
        return jax.lax.stop_gradient((f, g))

    def own(p, q, log_w, g):
        return soft_transform(p, *jax.lax.stop_gradient((q, log_w, g)), epsilon=epsilon, metric=metric)

    f, g = solved(x, y, log_a, log_b)
    same_x, same_y = solved(x, x, log_a, log_a)[0], solved(y, y, log_b, log_b)[0]
    value = jnp.sum(a * (own(x, y, log_b, g) - own(x, x, log_a, same_x)))
    value += jnp.sum(b * (own(y, x, log_a, f) - own(y, y, log_b, same_y)))
    return value + jax.lax.stop_gradient(jnp.maximum(value, 0) - value)
