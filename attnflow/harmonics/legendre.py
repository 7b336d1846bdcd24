r"""Recurrences behind the sphere: normalised Legendre functions on rings, and ratios of modified spherical Bessel functions.

$\bar P_{lm} = \sqrt{(2l+1)(l-m)!/(l+m)!}\,P_l^m$ without the sign $(-1)^m$:
$\bar P_{mm} = \sqrt{1 + 1/(2m)}\,\sin\theta\,\bar P_{m-1,m-1}$, $\bar P_{lm} = a_{lm}\cos\theta\,\bar P_{l-1,m} - b_{lm}\bar P_{l-2,m}$.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def steps(degree: int) -> tuple[np.ndarray, np.ndarray]:
    """a, b (l, m) of the recurrence; zero where it must not look below l = m."""
    ell, m = np.arange(degree + 1.0)[:, None], np.arange(degree + 1.0)[None]
    first, second = ell > m, ell > m + 1
    a = np.sqrt(np.where(first, (4 * ell**2 - 1) / np.where(first, ell**2 - m**2, 1), 0))
    b = np.sqrt(np.where(second, ((ell - 1) ** 2 - m**2) / np.where(second, 4 * (ell - 1) ** 2 - 1, 1), 0))
    return a, a * b


def growth(degree: int) -> np.ndarray:
    r"""$\sqrt{1 + 1/(2m)}$ for m = 1, ..., `degree`."""
    return np.sqrt(1 + 1 / (2 * np.arange(1.0, degree + 1)))


def ring_angles(degree: int) -> np.ndarray:
    """Latitudes of degree + 1 rings, on which all functions of the degree are known."""
    return np.pi * (np.arange(degree + 1) + 0.5) / (degree + 1)


def ring_waves(degree: int) -> np.ndarray:
    r"""(2, k, t): the coefficients of $\cos k\theta$, or of $\sin k\theta$, in a function given on the rings $\theta_t$."""
    k, theta = np.arange(degree + 1)[:, None], ring_angles(degree)
    cosines = np.where(k == 0, 1, 2) * np.cos(k * theta)
    return np.stack([cosines, 2 * np.sin(k * theta)]) / (degree + 1)


def over_degrees(visit, start, rows, degree: int, dtype):
    r"""Scan l = 0, ..., degree: `carry, y = visit(carry, legendre (m, t), row)` with $\bar P_{lm}(\cos\theta_t)$, never all l at once."""
    a, b = (jnp.asarray(s, dtype) for s in steps(degree))
    z = jnp.asarray(np.cos(ring_angles(degree)), dtype)
    order = np.arange(degree + 1)[:, None]
    heads = np.concatenate([[1.0], np.cumprod(growth(degree))])[:, None] * np.sin(ring_angles(degree)) ** order
    heads = jnp.asarray(heads, dtype)
    diagonal = jnp.eye(degree + 1, dtype=dtype)

    def step(carry, x):
        now, before, state = carry
        a, b, head, row = x
        new = a[:, None] * z[None] * now - b[:, None] * before + head[:, None] * heads
        state, y = visit(state, new, row)
        return (new, now, state), y

    zero = jnp.zeros_like(heads)
    (_, _, state), y = jax.lax.scan(step, (zero, zero, start), (a, b, diagonal, rows))
    return state, y


def bessel_steps(square: Float[Array, " n"], degree: int) -> Float[Array, "l n"]:
    r"""$i_l/(r\,i_{l-1})$ for l = 1, ..., `degree` at $r^2$ = `square`: the continued fraction, run downwards, stable and smooth at 0."""

    def step(t, ell):
        d = 1 / (2 * ell + 1 + t)
        return square * d, d

    # Amos (1974): r i_{L+1}/i_L to three digits, of which the last degrees need none
    t = square / (degree + 1 + jnp.sqrt((degree + 1.5) ** 2 + square))
    return jax.lax.scan(step, t, jnp.arange(degree, 0, -1, dtype=square.dtype), unroll=4)[1][::-1]
