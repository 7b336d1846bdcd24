r"""Exponential sums over tokens of $S^2$ by spherical harmonics, with matrix products instead of sums over (l, m).

For unit keys $u_j$ and a query q of length r and direction y,
$$\sum_j c_j e^{\langle q, u_j\rangle} = \sum_l i_l(r) \sum_j c_j (2l+1) P_l(\langle y, u_j\rangle), \qquad
(2l+1) P_l(\langle y, u\rangle) = \sum_{m=0}^{l} \epsilon_m \bar P_{lm}(y)\bar P_{lm}(u) \cos m(\phi_y - \phi_u)$$
with modified spherical Bessel functions $i_l$, $\epsilon_0 = 1$, $\epsilon_m = 2$. $\bar P_{lm}(\cos\theta)$ is a sum of
$\cos k\theta$ (m even) or $\sin k\theta$ (m odd), $k \le l$ (the double Fourier sphere: Merilees 1973; Townsend, Wilber,
Wright 2016). So tokens enter through products of powers of $e^{i\theta}$ with powers of $e^{i\phi}$, and carry over
exactly to L + 1 rings of latitude, where the Legendre functions are cheap. Queries of one length leave in the same way;
queries of mixed lengths have $i_l(r)$ of their own and pay for every (l, m).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import special

from . import legendre
from .agree import anywhere
from .powers import HIGHEST, block_size, blocks, powers

LARGEST = 192  # degrees above cost more than exact sums over a million tokens
DEGREES = (24, 48, 80, 144)  # what is offered where the radius is not known in advance

# The poles of the coordinates, where derivatives lose digits, lie in a direction without symmetry.
TURN = np.linalg.qr(np.array([[3.0, 1.0, 4.0], [1.0, 5.0, 9.0], [2.0, 6.0, 5.0]]))[0]


def truncation_error(degree: int, radius: float) -> float:
    r"""$e^{-r} \sum_{l > L} (2l+1) i_l(r)$: the largest error of the kernel $e^{r(\cos\gamma - 1)}$, attained at $\gamma = 0$."""
    if radius == 0:
        return 0.0
    ell = degree + 1 + np.arange(64 + 10 * int(np.sqrt(radius)))
    return float(np.sum((2 * ell + 1) * special.ive(ell + 0.5, radius)) * np.sqrt(np.pi / (2 * radius)))


def uniform_share(radius: float) -> float:
    r"""$e^{-r} \sinh(r)/r$: the mass of the uniform law against the kernel's maximum."""
    return float(-np.expm1(-2 * radius) / (2 * radius)) if radius > 0 else 1.0


def exponential_sums(
    u: Float[Array, "m 3"],
    values: Float[Array, "m e"] | None,
    w: Float[Array, " m"],
    q: Float[Array, "H n 3"],
    *,
    degree: int,
    block: int | None = None,
) -> tuple[Float[Array, "H n c"], Float[Array, "H n"]]:
    r"""(h, a) with $\sum_j w_j (1, v_j) e^{\langle q, u_j\rangle} = e^a h$, $a = \log(\sinh|q|/|q|)$; values None are u."""
    turn = jnp.asarray(TURN, u.dtype)
    turned = jnp.matmul(u, turn, precision=HIGHEST)
    if values is None:
        torus = with_keys(torus_moments(turned, w[:, None], degree + 1, block=block)[..., 0])
        keys = jnp.matmul(torus[..., 1:], turn.T, precision=HIGHEST)
        torus = jnp.concatenate([torus[..., :1], keys], axis=-1)
    else:
        columns = w[:, None] * jnp.concatenate([jnp.ones_like(w)[:, None], values], axis=-1)
        torus = torus_moments(turned, columns, degree, block=block)
    alpha = coefficients(torus)
    h = jax.lax.map(lambda q: evaluate(alpha, q, block), jnp.matmul(q, turn, precision=HIGHEST))
    return h, log_sinhc(jnp.sum(q * q, axis=-1))


def torus_moments(
    u: Float[Array, "n 3"], columns: Float[Array, "n c"], degree: int, *, block: int | None = None
) -> Float[Array, "m k 2 c"]:
    r"""$\sum_j c_j f_k(\theta_j) (\cos m\phi_j, \sin m\phi_j)$, $f_k = \cos k\theta$ for even m, $\sin k\theta$ for odd m."""
    size = block_size(u.shape[0], block)

    @jax.checkpoint
    def one(total, token):
        u, c = token
        latitude, longitude = _waves(u, degree)
        right = (longitude[:, :, None] * c.T[None, None]).reshape(2, -1, size)
        return [total[p] + jnp.matmul(latitude[p], right[p].T, precision=HIGHEST) for p in (0, 1)], None

    pairs, C = degree // 2 + 1, columns.shape[1]
    start = [jnp.zeros((degree + 1, 2 * pairs * C), u.dtype)] * 2
    torus = jnp.stack(jax.lax.scan(one, start, (blocks(u, size), blocks(columns, size)))[0])
    return torus.reshape(2, -1, pairs, 2, C).transpose(2, 0, 1, 3, 4).reshape(2 * pairs, -1, 2, C)[: degree + 1]


def with_keys(torus: Float[Array, "m k 2"]) -> Float[Array, "m-1 k-1 2 4"]:
    r"""Moments of $w$ and $w u$ from those of w up to one degree more: a coordinate moves k and m by one."""
    odd = jnp.arange(torus.shape[0]) % 2 == 1
    sign = jnp.where(odd, -1, 1).astype(torus.dtype)[:, None, None]
    up, down = torus[:, 1:], jnp.concatenate([sign * torus[:, 1:2], torus[:, :-2]], axis=1)
    height, across = (up + down) / 2, (up - down) / 2  # times cos theta; times sin theta, up to the sign
    beyond = jnp.asarray([[[1, -1]]], torus.dtype)  # m = -1
    right, left = across[1:], jnp.concatenate([beyond * across[1:2], across[:-2]])
    x = sign[:-1] * (right + left) / 2
    y = sign[:-1] * jnp.stack([right[..., 1] - left[..., 1], left[..., 0] - right[..., 0]], axis=-1) / 2
    return jnp.stack([torus[:-1, :-1], x, y, height[:-1]], axis=-1)


def coefficients(torus: Float[Array, "m k 2 c"]) -> Float[Array, "l m 2 c"]:
    r"""$\epsilon_m \sum_j c_j \bar P_{lm}(\cos\theta_j) (\cos m\phi_j, \sin m\phi_j)$, zero for m > l, by way of the rings."""
    degree, dtype = torus.shape[0] - 1, torus.dtype
    waves = jnp.asarray(legendre.ring_waves(degree), dtype)
    odd = (jnp.arange(degree + 1) % 2 == 1)[:, None, None, None]
    rings = [jnp.einsum("kt,mkic->mtic", wave, torus, precision=HIGHEST) for wave in waves]
    rings = jnp.where(odd, rings[1], rings[0])
    twice = jnp.where(jnp.arange(degree + 1) == 0, 1, 2).astype(dtype)

    def project(_, table, row):
        return None, jnp.einsum("mt,mtic->mic", table, rings, precision=HIGHEST)

    return legendre.over_degrees(project, None, None, degree, dtype)[1] * twice[None, :, None, None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def evaluate(alpha: Float[Array, "l m 2 c"], q: Float[Array, "n 3"], block: int | None = None) -> Float[Array, "n c"]:
    r"""$h_c$ of one head: by matrix products where all queries have one length, else by recurrence over (l, m).

    Its derivative is that of the recurrence, which also knows how the sum changes with each query's length.
    """
    length = jnp.sqrt(jnp.sum(q * q, axis=-1))
    mixed = jnp.max(length) - jnp.min(length) > 8 * float(jnp.finfo(q.dtype).eps) * jnp.max(length)
    return jax.lax.cond(
        anywhere(mixed),
        lambda: evaluate_mixed(alpha, q, block),
        lambda: evaluate_shell(alpha, q, jnp.mean(length), block),
    )


@evaluate.defjvp
def _evaluate_jvp(block, primals, tangents):
    return jax.jvp(lambda alpha, q: evaluate_mixed(alpha, q, block), primals, tangents)


def evaluate_shell(
    alpha: Float[Array, "l m 2 c"], q: Float[Array, "n 3"], length: Float[Array, ""], block: int | None
) -> Float[Array, "n c"]:
    """The sums at queries of one length: from the rings back to the torus, then a product for each block of queries."""
    n, L, C = q.shape[0], alpha.shape[0] - 1, alpha.shape[3]
    size = block_size(n, block)
    zero = length == 0
    y = jnp.where(zero, jnp.eye(3, dtype=q.dtype)[:1], q / jnp.where(zero, 1, length))
    ratio = jnp.cumprod(jnp.pad(legendre.bessel_steps(length[None] ** 2, L)[:, 0] * length, (1, 0), constant_values=1))

    def spread(rings, table, row):
        return rings + table[:, :, None, None] * row[:, None], None

    rings = jnp.zeros((L + 1, L + 1, 2, C), q.dtype)
    rings, _ = legendre.over_degrees(spread, rings, alpha * ratio[:, None, None, None], L, q.dtype)
    waves = jnp.asarray(legendre.ring_waves(L), q.dtype)
    even, odd = (jnp.einsum("kt,mtic->cmik", wave, rings, precision=HIGHEST) for wave in waves)
    even, odd = even[:, ::2].reshape(C, -1, L + 1), odd[:, 1::2].reshape(C, -1, L + 1)

    def one(y):
        (cosines, sines), longitude = _waves(y, L)

        def column(c):  # one at a time stays in cache
            across = jnp.sum(jnp.matmul(even[c], cosines, precision=HIGHEST) * longitude[0], axis=0)
            return across + jnp.sum(jnp.matmul(odd[c], sines, precision=HIGHEST) * longitude[1, : odd.shape[1]], axis=0)

        return jnp.stack([column(c) for c in range(C)], axis=-1)

    return jax.lax.map(one, blocks(y, size)).reshape(-1, C)[:n]


def evaluate_mixed(alpha: Float[Array, "l m 2 c"], q: Float[Array, "n 3"], block: int | None) -> Float[Array, "n c"]:
    r"""The sums at queries of any lengths, by recurrence in l for $(i_l(r)/i_0(r))\,\bar P_{lm} e^{im\phi}$, entire functions of q.

    Orders m and L - m follow each other on a path of L + 2 steps, so that no step is idle.
    """
    n, L, C = q.shape[0], alpha.shape[0] - 1, alpha.shape[3]
    size = min(n, max(block_size(n, block) // 4, 1))
    p, s = np.arange(L // 2 + 1)[:, None], np.arange(L + 2)[None]
    first = s <= L - p
    m, ell = np.where(first, p, L - p), np.where(first, p + s, s - 1)
    a, b = (jnp.asarray(table[ell, m], q.dtype) for table in legendre.steps(L))
    head = jnp.asarray(ell == m, q.dtype)
    parts = np.stack([first, ~first & (2 * p != L)], axis=1)  # (path, half, step)
    weight = jnp.where(parts[..., None, None], alpha[ell, m][:, None], 0)
    weight = weight.transpose(0, 1, 3, 4, 2).reshape(len(p), -1, L + 2)
    orders = jnp.asarray(np.stack([m[:, 0], m[:, -1]], axis=1))
    growth = jnp.asarray(legendre.growth(L), q.dtype)

    @jax.checkpoint
    def one(q):
        square = jnp.sum(q * q, axis=-1)
        unit, zero = jnp.ones_like(square), jnp.zeros_like(square)
        d = jnp.concatenate([unit[None], legendre.bessel_steps(square, L)])
        up = d * q[None, :, 2]
        down = jnp.concatenate([zero[None], square[None] * d[1:] * d[:-1]])

        def power(carry, scaled):
            re, im = carry
            x, y = scaled * q[:, 0], scaled * q[:, 1]
            new = re * x - im * y, re * y + im * x
            return new, jnp.stack(new)

        diagonal = jax.lax.scan(power, (unit, zero), growth[:, None] * d[1:])[1]
        diagonal = jnp.concatenate([jnp.stack([unit, zero])[None], diagonal])

        @jax.checkpoint
        def path(h, row):
            steps, orders, weight = row

            def step(carry, x):
                now, before = carry
                ell, a, b, head = x
                new = a * up[ell] * now - b * down[ell] * before + head
                return (new, now), new

            table = jax.lax.scan(step, (zero, zero), steps)[1]
            halves = jnp.matmul(weight, table, precision=HIGHEST).reshape(2, 2, C, size)
            return h + jnp.sum(halves * diagonal[orders][:, :, None], axis=(0, 1)), None

        return jax.lax.scan(path, jnp.zeros((C, size), q.dtype), ((jnp.asarray(ell), a, b, head), orders, weight))[0].T

    return jax.lax.map(one, blocks(q, size)).reshape(-1, C)[:n]


def log_sinhc(square: Float[Array, "*n"]) -> Float[Array, "*n"]:
    r"""$\log(\sinh r/r)$, $r = \sqrt s$, smooth at s = 0."""
    near = square < 1e-4
    r = jnp.sqrt(jnp.where(near, 1, square))
    return jnp.where(near, square / 6 - square * square / 180, r + jnp.log(-jnp.expm1(-2 * r) / (2 * r)))


def _waves(u, degree):
    r"""(2, k, n) of $\cos k\theta, \sin k\theta$; (2, waves, n) of $\cos m\phi, \sin m\phi$ for even m and for odd m."""
    x, y, z = u[:, 0], u[:, 1], u[:, 2]
    square = x * x + y * y
    pole = square == 0
    s = jnp.sqrt(jnp.where(pole, 1, square))
    latitude = powers(z, jnp.where(pole, 0, s), degree + 1)
    longitude = powers(jnp.where(pole, 1, x / s), jnp.where(pole, 0, y / s), 2 * (degree // 2 + 1))
    return latitude, longitude.reshape(2, -1, 2, u.shape[0]).transpose(2, 1, 0, 3).reshape(2, -1, u.shape[0])
