r"""Exponential sums over tokens of the circle by Fourier-Bessel series, half-circle sums by sorting.

For unit keys $u_j = e^{i\theta_j}$ and a query $q = r e^{i\phi}$ of any length,
$$\sum_j c_j e^{\langle q, u_j\rangle} = \sum_{k \ge 0} \epsilon_k I_k(r)\,\mathrm{Re}(e^{-ik\phi} m_k), \qquad
m_k = \sum_j c_j e^{ik\theta_j}, \quad \epsilon_0 = 1,\ \epsilon_k = 2 .$$
The ratios $I_k/I_{k-1}$ come from their continued fraction, run downwards (Gautschi 1967) together with Horner's rule;
each power of $e^{-i\phi}$ meets one power of r, so that the sum is an entire function of q in the program too.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import special

from .powers import HIGHEST, block_size, blocks, powers

LARGEST = 2048
DEGREES = (24, 64, 160, 480)  # what is offered where the radius is not known in advance


def truncation_error(degree: int, radius: float) -> float:
    r"""$2 e^{-r} \sum_{k > K} I_k(r)$: the largest error of the kernel $e^{r(\cos\gamma - 1)}$, attained at $\gamma = 0$."""
    k = degree + 1 + np.arange(64 + 10 * int(np.sqrt(radius)))
    return float(2 * np.sum(special.ive(k, radius)))


def uniform_share(radius: float) -> float:
    r"""$e^{-r} I_0(r)$: the mass of the uniform law against the kernel's maximum."""
    return float(special.i0e(radius))


def exponential_sums(
    u: Float[Array, "m 2"],
    values: Float[Array, "m e"] | None,
    w: Float[Array, " m"],
    q: Float[Array, "H n 2"],
    *,
    degree: int,
    block: int | None = None,
) -> tuple[Float[Array, "H n c"], Float[Array, "H n"]]:
    r"""(h, a) with $\sum_j w_j (1, v_j) e^{\langle q, u_j\rangle} = e^a h$, $a = \log I_0(|q|)$; `degree` is even, values None are u."""
    if values is None:
        m = with_keys(moments(u, w[:, None], degree + 1, block=block)[..., 0])
    else:
        m = moments(u, w[:, None] * jnp.concatenate([jnp.ones_like(w)[:, None], values], axis=-1), degree, block=block)
    h, scale = evaluate(m, q.reshape(-1, 2), block=block)
    return h.reshape(*q.shape[:2], -1), scale.reshape(q.shape[:2])


def moments(
    u: Float[Array, "m 2"], columns: Float[Array, "m c"], degree: int, *, block: int | None = None
) -> Float[Array, "2 modes c"]:
    r"""Real and imaginary parts of $m_k = \sum_j c_j u_j^k$, k = 0, ..., `degree`.

    With $k = k_1 + a k_2$ a block of tokens costs one product of its a lower powers with its upper powers.
    """
    m, C = columns.shape
    size = block_size(m, block)
    low = min(degree + 1, 2 ** round(np.log2(np.sqrt((degree + 1) * C))))
    high = -(-(degree + 1) // low)

    @jax.checkpoint
    def one(total, token):
        u, c = token
        lower = powers(u[:, 0], u[:, 1], low + 1)
        upper = powers(lower[0, low], lower[1, low], high)
        right = (upper[:, :, None] * c.T[None, None]).reshape(-1, size)
        return total + jnp.matmul(lower[:, :low].reshape(-1, size), right.T, precision=HIGHEST), None

    start = jnp.zeros((2 * low, 2 * high * C), u.dtype)
    total, _ = jax.lax.scan(one, start, (blocks(u, size), blocks(columns, size)))
    p = total.reshape(2, low, 2, high, C)
    product = jnp.stack([p[0, :, 0] - p[1, :, 1], p[0, :, 1] + p[1, :, 0]])
    return product.transpose(0, 2, 1, 3).reshape(2, -1, C)[:, : degree + 1]


def with_keys(m: Float[Array, "2 modes"]) -> Float[Array, "2 modes-1 3"]:
    r"""Moments of $w, w\cos\theta, w\sin\theta$ from those of w up to one degree more: $2 u^k \cos\theta = u^{k+1} + u^{k-1}$."""
    (re, im), (next_re, next_im) = m[:, :-1], m[:, 1:]
    last_re, last_im = jnp.concatenate([m[0, 1:2], re[:-1]]), jnp.concatenate([-m[1, 1:2], im[:-1]])
    cosine = jnp.stack([next_re + last_re, next_im + last_im]) / 2
    sine = jnp.stack([next_im - last_im, last_re - next_re]) / 2
    return jnp.stack([jnp.stack([re, im]), cosine, sine], axis=-1)


def evaluate(
    m: Float[Array, "2 modes c"], q: Float[Array, "n 2"], *, block: int | None = None
) -> tuple[Float[Array, "n c"], Float[Array, " n"]]:
    r"""(h, log I_0(|q|)) from moments up to an even degree."""
    n, K, C = q.shape[0], m.shape[1] - 1, m.shape[2]
    size = block_size(n, block)
    twice = jnp.where(jnp.arange(K + 1) == 0, 1, 2).astype(q.dtype)
    m = m * twice[None, :, None]
    k = jnp.arange(K, 0, -2, dtype=q.dtype)
    pairs = (k, m[:, K - 1 :: -2].swapaxes(0, 1), m[:, K - 2 :: -2].swapaxes(0, 1))

    @jax.checkpoint
    def one(q):
        x, y = q[:, 0], q[:, 1]
        square = x * x + y * y

        def horner(h, d, c):  # h <- c + (I_k/I_{k-1}) e^{-i phi} h
            a, b = x * d, -y * d
            return [(c[0, i] + a * re - b * im, c[1, i] + a * im + b * re) for i, (re, im) in enumerate(h)]

        def step(carry, pair):
            t, even, h = carry
            k, odd_moment, even_moment = pair
            upper = 1 / (2 * k + t)  # I_k / (r I_{k-1})
            t = square * upper
            lower = 1 / (2 * k - 2 + t)
            t = square * lower
            h = horner(horner(h, upper, odd_moment), lower, even_moment)
            return (t, 2 + square * (upper * lower) * even, h), None

        # Amos (1974): r I_{K+1}/I_K to three digits, of which the last modes need none
        t = square / (K + 0.5 + jnp.sqrt((K + 1.0) ** 2 + square))
        h = [(jnp.full_like(x, 1) * m[0, K, i], jnp.full_like(x, 1) * m[1, K, i]) for i in range(C)]
        (_, even, h), _ = jax.lax.scan(step, (t, jnp.full_like(x, 2), h), pairs)
        # cosh r = I_0 + 2 I_2 + 2 I_4 + ...
        return jnp.stack([re for re, _ in h], axis=-1), log_cosh(square) - jnp.log(even - 1)

    h, scale = jax.lax.map(one, blocks(q, size))
    return h.reshape(-1, C)[:n], scale.reshape(-1)[:n]


def log_cosh(square: Float[Array, " n"]) -> Float[Array, " n"]:
    r"""$\log\cosh\sqrt{s}$, smooth at s = 0."""
    near = square < 1e-4
    r = jnp.sqrt(jnp.where(near, 1, square))
    series = square / 2 - square * square / 12
    return jnp.where(near, series, r + jnp.log1p(jnp.exp(-2 * r)) - float(np.log(2)))


def half_circle_sums(
    keys: Float[Array, "m 2"], columns: Float[Array, "m c"], q: Float[Array, "H n 2"]
) -> Float[Array, "H n c"]:
    r"""$\sum_j c_j \max(\langle q, k_j\rangle, 0)$ for keys of any length, exact, by prefix sums in the order of the angle.

    The error is that of a difference of two sums over tokens: absolute, $\epsilon\,|q| \sum_j |c_j|$.
    """
    angle = jax.lax.stop_gradient(jnp.arctan2(keys[:, 1], keys[:, 0]))
    order = jnp.argsort(angle)
    angle = angle[order]
    terms = (columns[:, :, None] * keys[:, None, :])[order]
    prefix = jnp.pad(jnp.cumsum(terms, axis=0), ((1, 0), (0, 0), (0, 0)))

    flat = q.reshape(-1, 2)
    x, y = jax.lax.stop_gradient((flat[:, 0], flat[:, 1]))
    first = jnp.searchsorted(angle, jnp.arctan2(-x, y), method="sort")  # the angle of q less a quarter turn
    last = jnp.searchsorted(angle, jnp.arctan2(x, -y), method="sort")
    around = jnp.where(jnp.arctan2(x, -y) < jnp.arctan2(-x, y), 1, 0).astype(q.dtype)
    half = prefix[last] - prefix[first] + around[:, None, None] * prefix[-1][None]
    return jnp.einsum("nck,nk->nc", half, flat, precision=HIGHEST).reshape(*q.shape[:2], -1)
