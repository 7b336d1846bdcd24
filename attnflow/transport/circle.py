r"""W2 on the circle for the geodesic metric, exactly: the optimal plan is monotone after one cut of both circles.

With the periodic quantile functions, $W_2^2 = \min_\alpha \int_0^1 (F^{-1}(s) - G^{-1}(s - \alpha))^2 ds$, convex and
piecewise linear in the shift $\alpha \in [-1, 1]$ (Delon, Salomon, Sobolevskii 2010). Its slope takes one pass over the
sorted points, so that the shift is found by bisection. For the chordal metric no cut need be optimal: there this is no
more than an upper bound.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .clouds import Clouds, second_weights, traced_weights
from .exact import root
from .ground import cost, host_cost
from .interval import Interval

TURN = 2 * np.pi


def circle(clouds: Clouds) -> Interval | None:
    """Exact geodesic W2 of two clouds in d = 2, O(n log n); None for others."""
    if clouds.metric != "geodesic" or clouds.x.shape[1] != 2:
        return None
    i, j, mass = _plan(np, clouds.x, clouds.y, clouds.a, clouds.b)
    value = root(host_cost(clouds.x[i], clouds.y[j], metric="geodesic") @ mass)
    return Interval(value, value, "shift search", exact=True)


def circle_distance(
    x: Float[Array, "n 2"], y: Float[Array, "m 2"], *, x_weights=None, y_weights=None
) -> Float[Array, ""]:
    r"""Geodesic W2 on the circle, exact, under jit, vmap and grad with respect to the points.

    The gradient is that of the optimal plan held fixed (envelope theorem); it is 0, not NaN, at coincident clouds. Weights
    get no gradient.
    """
    if x.shape[1] != 2 or y.shape[1] != 2:
        raise ValueError(f"`circle_distance` needs points of dimension 2, got {x.shape[1]} and {y.shape[1]}.")
    a, b = traced_weights(x_weights, x), second_weights(x_weights, y_weights, x, y)
    i, j, mass = jax.lax.stop_gradient(_plan(jnp, *jax.lax.stop_gradient((x, y, a, b))))
    return safe_root(jnp.sum(cost(x[i], y[j], metric="geodesic") * mass))


def safe_root(square: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Square root with gradient 0 at 0."""
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1)), 0)


def _plan(xp, x, y, a, b):
    """Optimal plan (i, j, mass) of at most n + m entries, with xp = numpy or jax.numpy."""
    theta, phi = (xp.mod(xp.arctan2(p[:, 1], p[:, 0]), TURN) for p in (x, y))
    order, other = xp.argsort(theta), xp.argsort(phi)
    theta, phi, u, v = theta[order], phi[other], xp.cumsum(a[order]), xp.cumsum(b[other])
    u, v = u / u[-1], v / v[-1]
    gap = xp.diff(phi, append=phi[:1] + TURN)
    middle = phi + gap / 2

    def slope(shift):
        """Right derivative of the cost over 2: sum_j gap_j (F^{-1}(v_j + shift) - middle_j)."""
        level = v + shift
        turns = xp.floor(level)
        k = xp.minimum(xp.searchsorted(u, level - turns, side="right"), len(u) - 1)
        return xp.sum(gap * (theta[k] + TURN * turns - middle))

    def halve(bracket):
        low, high = bracket
        shift = (low + high) / 2
        rising = slope(shift) >= 0
        return xp.where(rising, low, shift), xp.where(rising, shift, high)

    steps = 2 - int(np.log2(np.finfo(theta.dtype).eps))
    bracket = (xp.asarray(-1, theta.dtype), xp.asarray(1, theta.dtype))
    if xp is np:
        for _ in range(steps):
            bracket = halve(bracket)
    else:
        bracket = jax.lax.fori_loop(0, steps, lambda _, b: halve(b), bracket)
    shift = bracket[1]

    levels = xp.sort(xp.concatenate([u, xp.mod(v + shift, 1)]), stable=True)
    levels = xp.concatenate([xp.zeros(1, levels.dtype), levels, xp.ones(1, levels.dtype)])
    mass = xp.diff(levels)
    s = levels[:-1] + mass / 2
    i = xp.minimum(xp.searchsorted(u, s), len(u) - 1)
    j = xp.minimum(xp.searchsorted(v, xp.mod(s - shift, 1)), len(v) - 1)
    return order[i], other[j], mass
