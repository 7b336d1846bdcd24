r"""Ground costs $c(x, y)$: chordal $|x - y|^2$ and geodesic $\angle(x, y)^2$; every difference is taken before it is squared."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.spatial.distance import cdist

Metric = str  # "chordal" or "geodesic"; `diameter` refuses others
UNROLLED = 8  # dimensions up to which the sum over coordinates is written out
ROUNDING = 16  # relative error of a cost is at most (d + ROUNDING) eps


def diameter(metric: Metric) -> float:
    """Largest distance on the sphere: 2 or pi."""
    if metric not in ("chordal", "geodesic"):
        raise ValueError(f"`metric` must be 'chordal' or 'geodesic', got {metric!r}.")
    return 2.0 if metric == "chordal" else float(np.pi)


def squared_angle(difference: Float[Array, "*s"], total: Float[Array, "*s"]) -> Float[Array, "*s"]:
    r"""$\theta^2$ from $|x-y|^2$ and $|x+y|^2$, $\theta = 2\,\mathrm{atan2}(|x-y|, |x+y|)$; finite gradient at 0 and at $\pi$."""
    near, far = difference <= 0, total <= 0
    angle = 2 * jnp.arctan2(jnp.sqrt(jnp.where(near, 1, difference)), jnp.sqrt(jnp.where(far, 1, total)))
    return jnp.where(near, difference, jnp.where(far, jnp.asarray(np.pi**2, difference.dtype), angle**2))


def cost(x: Float[Array, "*s d"], y: Float[Array, "*s d"], *, metric: Metric) -> Float[Array, "*s"]:
    """c(x, y) of pairs."""
    chord = jnp.sum((x - y) ** 2, axis=-1)
    return chord if metric == "chordal" else squared_angle(chord, jnp.sum((x + y) ** 2, axis=-1))


def cost_table(x: Float[Array, "n d"], y: Float[Array, "m d"], *, metric: Metric) -> Float[Array, "n m"]:
    """c(x_i, y_j) for all pairs of a block."""

    def square(sign):
        if x.shape[1] > UNROLLED:
            return jnp.sum((x[:, None, :] - sign * y[None, :, :]) ** 2, axis=-1)
        return sum((x[:, k, None] - sign * y[None, :, k]) ** 2 for k in range(x.shape[1]))

    return square(1) if metric == "chordal" else squared_angle(square(1), square(-1))


def host_table(x: np.ndarray, y: np.ndarray, *, metric: Metric) -> np.ndarray:
    """`cost_table` in numpy."""
    chord = cdist(x, y, "sqeuclidean")
    return chord if metric == "chordal" else (2 * np.arctan2(np.sqrt(chord), cdist(x, -y))) ** 2


def host_cost(x: np.ndarray, y: np.ndarray, *, metric: Metric) -> np.ndarray:
    """`cost` in numpy."""
    chord = np.sum((x - y) ** 2, axis=-1)
    return chord if metric == "chordal" else (2 * np.arctan2(np.sqrt(chord), np.linalg.norm(x + y, axis=-1))) ** 2
