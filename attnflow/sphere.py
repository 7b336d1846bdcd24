r"""The unit sphere $S^{d-1}$: tangent projection, retraction, distances, samplers and quadratures.

Points are rows of arrays (n, d). Distances are accurate for close and for antipodal points: none is taken through
$\langle x, y\rangle$, which loses half the digits there.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from scipy import special

Points = Float[Array, "*batch d"]


def project(x: Points, v: Points) -> Points:
    r"""Tangential part of v at x: $P_x v = v - \langle x, v\rangle x/|x|^2$, for x of any length but 0."""
    return v - jnp.sum(x * v, axis=-1, keepdims=True) / jnp.sum(x * x, axis=-1, keepdims=True) * x


def retract(x: Points) -> Points:
    """Nearest point of the sphere, $x/|x|$; a zero row stays zero, with a zero gradient."""
    return x / safe_norm(x, where_zero=1.0)[..., None]


def safe_norm(x: Points, *, where_zero: float = 0.0) -> Float[Array, "*batch"]:
    r"""$|x|$ along the last axis with gradient 0 (not NaN) where x = 0."""
    square = jnp.sum(x * x, axis=-1)
    zero = square == 0
    return jnp.where(zero, jnp.asarray(where_zero, x.dtype), jnp.sqrt(jnp.where(zero, 1, square)))


def chordal(x: Points, y: Points) -> Float[Array, "*batch"]:
    r"""$|x - y|$; gradient 0 at coincident points."""
    return safe_norm(x - y)


def geodesic(x: Points, y: Points) -> Float[Array, "*batch"]:
    r"""Angle $2\,\mathrm{atan2}(|x-y|, |x+y|)$ in $[0, \pi]$: accurate at 0 and $\pi$; gradient 0 at both."""
    return 2 * jnp.arctan2(safe_norm(x - y), safe_norm(x + y))


def uniform(key: PRNGKeyArray, n: int, d: int) -> Float[Array, "n d"]:
    """n independent points of the uniform law on $S^{d-1}$."""
    _count("n", n)
    return retract(jr.normal(key, (n, d)))


def von_mises_fisher(key: PRNGKeyArray, n: int, mean: Float[Array, " d"], *, kappa: float) -> Float[Array, "n d"]:
    r"""n independent points of density $\propto e^{\kappa\langle x, \mathrm{mean}\rangle}$, $\kappa \ge 0$ (Wood's rejection, 1994)."""
    _count("n", n)
    if not kappa >= 0:
        raise ValueError(f"`kappa` must be >= 0, got {kappa}; turn `mean` round for the opposite side.")
    d = mean.shape[-1]
    axis = retract(mean)
    cosine_key, tangent_key = jr.split(key)
    b = (d - 1) / (2 * kappa + np.sqrt(4 * kappa**2 + (d - 1) ** 2))
    x0 = (1 - b) / (1 + b)
    c = kappa * x0 + (d - 1) * np.log1p(-(x0**2))

    def draw(state):
        key, done, w = state
        key, zkey, ukey = jr.split(key, 3)
        z = jr.beta(zkey, (d - 1) / 2, (d - 1) / 2, (n,), axis.dtype)
        trial = (1 - (1 + b) * z) / (1 - (1 - b) * z)
        level = kappa * trial + (d - 1) * jnp.log(1 - x0 * trial) - c
        good = level >= jnp.log(jr.uniform(ukey, (n,), axis.dtype))
        return key, done | good, jnp.where(done, w, trial)

    start = (cosine_key, jnp.zeros(n, bool), jnp.zeros(n, axis.dtype))
    w = jax.lax.while_loop(lambda s: ~jnp.all(s[1]), draw, start)[2]
    tangent = retract(project(jnp.broadcast_to(axis, (n, d)), jr.normal(tangent_key, (n, d), axis.dtype)))
    return w[:, None] * axis[None] + jnp.sqrt(jnp.maximum(1 - w**2, 0))[:, None] * tangent


def equiangular(n: int, cosine: float, d: int | None = None) -> Float[Array, "n d"]:
    r"""n points with $\langle x_i, x_j\rangle$ = `cosine` for all $i \ne j$, in dimension d (default n).

    **Errors:** ValueError unless $-1/(n-1) \le$ cosine $\le 1$ and d >= n (d >= n - 1 at the lower end, the simplex).
    """
    _count("n", n)
    d = n if d is None else d
    lowest = -1.0 if n == 1 else -1 / (n - 1)
    if not lowest - 1e-12 <= cosine <= 1:
        raise ValueError(f"`cosine` must lie in [-1/(n-1), 1] = [{lowest:.6g}, 1] for n = {n}, got {cosine}.")
    values, vectors = np.linalg.eigh((1 - cosine) * np.eye(n) + cosine * np.ones((n, n)))
    rows = vectors * np.sqrt(np.maximum(values, 0))
    rows = rows[:, np.argsort(-values)]
    needed = int(np.sum(values > 1e-12))
    if d < needed:
        raise ValueError(f"{n} points of pairwise cosine {cosine} need d >= {needed}, got d = {d}.")
    rows = np.pad(rows, ((0, 0), (0, max(0, d - n))))[:, :d]
    return jnp.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), jnp.result_type(float))


def simplex(n: int, d: int | None = None) -> Float[Array, "n d"]:
    """The regular simplex: n points of pairwise cosine $-1/(n-1)$, in dimension d (default n - 1)."""
    if n < 2:
        raise ValueError(f"`n` must be at least 2, got {n}.")
    return equiangular(n, -1 / (n - 1), d=n - 1 if d is None else d)


def circle(angles: Float[Array, " n"]) -> Float[Array, "n 2"]:
    """Points of the circle at the given angles in radians."""
    angles = jnp.asarray(angles)
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def angles(x: Float[Array, "*batch 2"]) -> Float[Array, "*batch"]:
    r"""Angles in $(-\pi, \pi]$ of points of the circle."""
    return jnp.arctan2(x[..., 1], x[..., 0])


def circle_quadrature(
    density: Callable[[np.ndarray], np.ndarray],
    n: int,
    *,
    refine: Sequence[float] = (),
    smallest: float | None = None,
) -> tuple[Float[Array, "n 2"], Float[Array, " n"]]:
    r"""Points and weights of the law with the given positive density of the angle (any normalisation).

    Midpoint rule in a periodic parameter: uniform nodes, spectrally accurate for smooth densities. With `refine`, half of
    the nodes stay uniform and half are graded towards those angles, their spacing proportional to the distance from the
    nearest down to about `smallest` (default 1e-6): a mass that is diluted like $e^{-ct}$ there stays resolved.
    """
    _count("n", n)
    if refine:
        theta, spacing = _graded_angles(n, np.asarray(refine, float), 1e-6 if smallest is None else smallest)
    else:
        theta, spacing = 2 * np.pi * (np.arange(n) + 0.5) / n - np.pi, np.ones(n)
    mass = np.asarray(density(theta), float) * spacing
    return circle(jnp.asarray(theta, jnp.result_type(float))), _weights(mass)


def _graded_angles(n, centres, smallest):
    """Midpoints of equal steps of u(theta), and d theta/du there: u is half uniform, half integral of 1/distance."""
    if not smallest > 0:
        raise ValueError(f"`smallest` must be > 0, got {smallest}.")

    def distance(theta):
        gap = np.mod(theta[..., None] - centres + np.pi, 2 * np.pi) - np.pi
        return np.hypot(np.min(np.abs(gap), axis=-1), smallest)

    # A fine grid that is itself graded, so that quadrature and inversion are accurate next to every centre.
    steps = np.geomspace(smallest * 1e-2, np.pi, 3000)
    near = np.mod(centres[:, None] + np.concatenate([-steps, [0.0], steps]) + np.pi, 2 * np.pi) - np.pi
    grid = np.unique(np.concatenate([near.ravel(), [-np.pi, np.pi]]))
    node, weight = np.polynomial.legendre.leggauss(6)
    width = np.diff(grid)
    inner = grid[:-1, None] + width[:, None] * (node + 1) / 2
    graded = np.concatenate([[0.0], np.cumsum((1 / distance(inner)) @ weight * width / 2)])
    total = graded[-1]
    u = (graded / total + (grid + np.pi) / (2 * np.pi)) / 2
    theta = np.interp((np.arange(n) + 0.5) / n, u, grid)
    return theta, 1 / (1 / (distance(theta) * total) + 1 / (2 * np.pi))


def sphere_quadrature(
    density: Callable[[np.ndarray], np.ndarray], n: int
) -> tuple[Float[Array, "n 3"], Float[Array, " n"]]:
    r"""About n points of $S^2$ and weights of the law with the given positive density of the point (n, 3) -> (n,).

    Gauss-Legendre in $x_3$ times the trapezoidal rule in longitude: exact for spherical harmonics of degree below about
    $\sqrt{2n}$.
    """
    _count("n", n)
    rings = max(1, round(np.sqrt(n / 2)))
    z, wz = np.polynomial.legendre.leggauss(rings)
    phi = 2 * np.pi * (np.arange(2 * rings) + 0.5) / (2 * rings)
    r = np.sqrt(1 - z**2)
    points = np.stack(
        [np.outer(r, np.cos(phi)), np.outer(r, np.sin(phi)), np.broadcast_to(z[:, None], (rings, 2 * rings))],
        axis=-1,
    ).reshape(-1, 3)
    mass = np.repeat(wz, 2 * rings) * np.asarray(density(points), float)
    return jnp.asarray(points, jnp.result_type(float)), _weights(mass)


def mean_resultant_length(d: int, kappa: float) -> float:
    r"""$A_d(\kappa) = I_{d/2}(\kappa)/I_{d/2-1}(\kappa)$, the length of the mean of the von Mises-Fisher law."""
    return float(special.ive(d / 2, kappa) / special.ive(d / 2 - 1, kappa)) if kappa > 0 else 0.0


def resolved_spacing(beta: float, query_norm: float) -> float:
    r"""Largest spacing of attended nodes that resolves the kernel $e^{\beta\langle B^\top x, y\rangle}$: $0.3/\sqrt{\beta |B^\top x|}$.

    Coarser nodes leave the metastable state early (an artefact of the sample, not of the mean field).
    """
    return float(0.3 / np.sqrt(beta * query_norm)) if beta * query_norm > 0 else float("inf")


def _weights(mass):
    if not np.all(np.isfinite(mass)) or np.any(mass < 0) or mass.sum() <= 0:
        raise ValueError("`density` must be finite and non-negative with a positive integral.")
    return jnp.asarray(mass / mass.sum(), jnp.result_type(float))


def _count(name, n):
    if n < 1:
        raise ValueError(f"`{name}` must be at least 1, got {n}.")
