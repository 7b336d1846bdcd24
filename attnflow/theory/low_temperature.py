r"""Closed forms of arXiv 2605.10931: the zero-temperature flow of one head and how it concentrates.

$\dot x = P_x A x / |B^\top x|$ with $A = V B^\top$; Assumption 1: A is symmetric with a gap $\gamma$ above which its
eigenspace $E_1$ lies. Only the algebraically largest eigenvalue matters. Tokens go to $\Pi x = P_1 x / |P_1 x|$.
All functions need heads with H = 1, raise ValueError where A is not symmetric to 1e-6 relative (`symmetrize=True` takes
the symmetric part), and compute in double precision where it is switched on.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from ..heads import AbstractHeads
from .laplace import laplace_mean as laplace_mean
from .numbers import checked, integrate, positive, real


def asymmetry(heads: AbstractHeads) -> Float[Array, ""]:
    r"""$\max_{ij} |A_{ij} - A_{ji}|$ of $A = V B^\top$: what Assumption 1 misses by (arXiv 2605.10931)."""
    A, _ = _matrices(heads)
    return jnp.max(jnp.abs(A - A.T))


def spectral_gap(heads: AbstractHeads, *, symmetrize: bool = False) -> Float[Array, ""]:
    r"""$\gamma$: the top eigenvalue of A minus the next distinct one. 0 where A is a multiple of the identity."""
    mu, _, top = _spectrum(heads, symmetrize)
    below = jnp.max(jnp.where(top, -jnp.inf, mu))
    return jnp.where(jnp.all(top), 0, mu[-1] - below)


def principal_space(heads: AbstractHeads, *, symmetrize: bool = False) -> tuple[Float[Array, "d d"], Int[Array, ""]]:
    r"""The projector $P_1$ onto the eigenspace $E_1$ of the largest eigenvalue of A, and its dimension m.

    Eigenvalues within $10^{-6}$ of the spread of the spectrum count as equal.
    """
    _, U, top = _spectrum(heads, symmetrize)
    E1 = jnp.where(top, U, 0)
    return E1 @ E1.T, jnp.sum(top)


def projection(heads: AbstractHeads, x: Float[Array, "n d"], *, symmetrize: bool = False) -> Float[Array, "n d"]:
    r"""$\Pi x = P_1 x / |P_1 x|$, the gradient of $|P_1 x|$ and so the optimal map onto $E_1$. ValueError where $P_1 x = 0$."""
    P1, _ = principal_space(_fit(heads, x), symmetrize=symmetrize)
    x = real(x)
    tiny = 8 * jnp.finfo(x.dtype).eps

    def seen(x):
        return jnp.linalg.norm(x @ P1, axis=-1) > tiny * jnp.linalg.norm(x, axis=-1)

    y = checked("x", x, seen, "off the complement of the principal space, where the projection is undefined") @ P1
    return y / jnp.linalg.norm(y, axis=-1, keepdims=True)


def zero_temperature_velocity(heads: AbstractHeads, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    r"""$P_x V B^\top x / |B^\top x|$, the field (3) of arXiv 2605.10931, for a measure of full support; needs no symmetry."""
    A, B = _matrices(_fit(heads, x))
    x = real(x)
    push = x @ A.T / jnp.linalg.norm(x @ B, axis=-1, keepdims=True)
    return push - jnp.sum(push * x, axis=-1, keepdims=True) * x


def zero_temperature_flow(heads: AbstractHeads, x0: Float[Array, "n d"], t: ArrayLike) -> Float[Array, "n d"]:
    r"""x(t) from $\dot x = P_x A x/|B^\top x|$: $x = e^{sA}x_0 / |e^{sA}x_0|$ in the clock s of each token, `token_clock`."""
    heads = _fit(heads, x0)
    mu, U, _ = _spectrum(heads)
    s = token_clock(heads, x0, t)
    y = _grown(mu, real(x0) @ U, s)
    return ((y / jnp.linalg.norm(y, axis=-1, keepdims=True)) @ U.T).astype(x0.dtype)


def token_clock(heads: AbstractHeads, x0: Float[Array, "n d"], t: ArrayLike) -> Float[Array, " n"]:
    r"""s(t) of each token, $ds = dt/|B^\top x|$; equal to t for orthogonal B.

    The inverse of $t(s) = \int_0^s |B^\top e^{rA}x_0| / |e^{rA}x_0|\,dr$.
    """
    heads = _fit(heads, x0)
    mu, U, _ = _spectrum(heads)
    _, B = _matrices(heads)
    t = checked("t", t, lambda a: a >= 0, ">= 0")

    args, start = (mu, real(x0) @ U, U.T @ B), jnp.zeros(x0.shape[0], t.dtype)
    return integrate(_clock_rate, start, t[None], args, "|B^T x| vanishes on a path: Assumption 1 needs B invertible.")[
        0
    ]


def zero_temperature_w2(
    heads: AbstractHeads, x: Float[Array, "n d"], weights: Float[Array, " n"] | None = None
) -> Float[Array, ""]:
    r"""$\sqrt{2 - 2\sum_i w_i |P_1 x_i|}$, the chordal $W_2$ of the tokens from their own projection $\Pi x$ (derived).

    Along the flow it is $W_2(\rho_t, \Pi_\#\rho_0)$ exactly, because $\Pi x_t = \Pi x_0$. Computed from $|x - \Pi x|^2$, so
    that it is accurate when tiny. Weights default to 1/n.
    """
    _, U, top = _spectrum(_fit(heads, x))
    c = real(x) @ U
    along = jnp.sum(jnp.where(top, c, 0) ** 2, axis=-1)
    across = jnp.sum(jnp.where(top, 0, c) ** 2, axis=-1)
    length = jnp.sqrt(along + across)
    square = 2 * across / (length * (length + jnp.sqrt(along)))  # 2 - 2 cos(angle)
    w = jnp.full(x.shape[:1], 1 / x.shape[0], square.dtype) if weights is None else real(weights)
    total = jnp.sum(w * square)
    return jnp.where(total > 0, jnp.sqrt(jnp.where(total > 0, total, 1)), 0)


def tangent(heads: AbstractHeads, x: Float[Array, "n d"]) -> Float[Array, " n"]:
    r"""$\tan\angle(x, E_1)$, a Lyapunov function of each path: it decays at least like $e^{-\gamma s}$ (derived)."""
    _, U, top = _spectrum(_fit(heads, x))
    c = real(x) @ U
    return jnp.linalg.norm(jnp.where(top, 0, c), axis=-1) / jnp.linalg.norm(jnp.where(top, c, 0), axis=-1)


def pathwise_rate(heads: AbstractHeads) -> Float[Array, ""]:
    r"""$\gamma / |B|_{op}$: the rate in t at which `tangent` decays at least, since $s \ge t/|B|$. A lower bound for one path only."""
    return spectral_gap(heads) / jnp.linalg.norm(_matrices(heads)[1], ord=2)


def projection_rate(heads: AbstractHeads) -> Float[Array, ""]:
    r"""The rate of $W_2(\rho_t, \Pi_\#\rho_0)$ for a positive density: $c = \min(m\gamma/2b_2, \gamma/b_1)$ (derived).

    $b_1$, $b_2$ are the largest $|B^\top v|$ over unit v of the first and second eigenspace. Mass near the complement of $E_1$
    leaves it slowly, along the second eigenspace, and decides for m = dim $E_1$ = 1: for orthogonal B the rate is
    $\gamma/2$, not $\gamma$. (m = 2 with equality of the two: up to a factor $\sqrt t$.)
    """
    mu, U, top = _spectrum(heads)
    _, B = _matrices(heads)
    gap, m = spectral_gap(heads), jnp.sum(top, dtype=mu.dtype)
    second = ~top & (mu >= jnp.max(jnp.where(top, -jnp.inf, mu)) - _tolerance(mu))
    b1, b2 = (jnp.linalg.norm(B.T @ jnp.where(space, U, 0), ord=2) for space in (top, second))
    return jnp.minimum(m * gap / (2 * jnp.where(b2 > 0, b2, 1)), gap / b1)


def uniform_w2(d: int, m: int, gamma_t: ArrayLike) -> Float[Array, ""]:
    r"""$W_2(\rho_t, \Pi_\#\rho_0)$ for uniform $\rho_0$ on $S^{d-1}$, orthogonal B and one gap: $W_2^2 = E[4\sin^2(\theta_t/2)]$ (derived).

    $\tan\theta_t = e^{-\gamma t}\tan\theta_0$, $\theta_0$ of density $\propto \cos^{m-1}\theta\,\sin^{d-m-1}\theta$ on $[0,\pi/2]$.
    With $q = e^{-\gamma t}$, $k^2 = 1-q^2$, the square is $2 - \frac4\pi\arcsin(k)/k$ for d = 2, $2q/(1+q)$ for (3, 1) and
    $2 - 2[E(k) - q^2K(k)]/k^2$ for (3, 2).
    """
    if not 1 <= m < d:
        raise ValueError(f"`m` must be a dimension in [1, d), got m = {m}, d = {d}.")
    shift = checked("gamma_t", gamma_t, lambda a: a >= 0, ">= 0")
    tau = -40 + (80 + shift) * jnp.linspace(0.0, 1.0, 8193)  # log tan theta_0: the trapezoid rule is exact to rounding
    log_cos, log_sin = -jax.nn.softplus(2 * tau) / 2, -jax.nn.softplus(-2 * tau) / 2
    density = jnp.exp(m * log_cos + (d - m) * log_sin)
    angle = jnp.arctan(jnp.exp(tau - shift))
    return jnp.sqrt(jnp.sum(density * 4 * jnp.sin(angle / 2) ** 2) / jnp.sum(density))


def concentration_bound(beta: ArrayLike, t: ArrayLike, growth: ArrayLike, decay: ArrayLike) -> Array:
    r"""$\sqrt{\log(\beta+1)/\beta}\,e^{C_1 t} + e^{-ct}$, the right side of Theorem 1 (arXiv 2605.10931) with unit constants.

    `growth` is $C_1$, which the theorem leaves implicit (`field_growth` estimates a part of it); `decay` is c.
    """
    return _prefactor(beta) * jnp.exp(real(growth) * real(t)) + jnp.exp(-real(decay) * real(t))


def best_time(beta: ArrayLike, growth: ArrayLike, decay: ArrayLike) -> Array:
    r"""The t >= 0 where `concentration_bound` is least: $\log(c/aC_1)/(C_1+c)$, $a = \sqrt{\log(\beta+1)/\beta}$; 0 where $aC_1 \ge c$."""
    growth, decay = positive("growth", growth), positive("decay", decay)
    return jnp.maximum(jnp.log(decay / (_prefactor(beta) * growth)) / (growth + decay), 0)


def best_bound(beta: ArrayLike, growth: ArrayLike, decay: ArrayLike) -> Array:
    r"""The least value of `concentration_bound` over t >= 0, about $\beta^{-c/2(C_1+c)}$ up to logarithms."""
    return concentration_bound(beta, best_time(beta, growth, decay), growth, decay)


def field_growth(heads: AbstractHeads, x: Float[Array, "n d"]) -> Float[Array, ""]:
    r"""$\max_i |DX_0(x_i)|_{op}$ of the zero-temperature field over given tokens: an estimate of its part of $C_1$, from below."""
    x = real(x)
    derivative = jax.vmap(jax.jacfwd(lambda y: zero_temperature_velocity(heads, y[None] / jnp.linalg.norm(y))[0]))(x)
    return jnp.max(jnp.linalg.norm(derivative, ord=2, axis=(-2, -1)))


def _fit(heads, x):
    """The heads written out in the dimension of the tokens."""
    return heads.dense(x.shape[-1])


def _matrices(heads):
    if heads.count != 1:
        raise ValueError(f"the zero-temperature closed forms need one head, got H = {heads.count}.")
    if heads.dimension is None:
        raise ValueError("`heads` act in any dimension; write them out first: heads.dense(d).")
    B, V = real(heads.score[0]), real(heads.value[0])
    return V @ B.T, B


def _tolerance(mu):
    return 1e-6 * jnp.maximum(mu[-1] - mu[0], jnp.finfo(mu.dtype).eps * jnp.max(jnp.abs(mu)))


def _spectrum(heads, symmetrize=False):
    """Eigenvalues of A (ascending), eigenvectors, and which belong to the largest."""
    A, _ = _matrices(heads)
    if not symmetrize:
        defect = asymmetry(heads)
        rule = (
            f"symmetric with V B^T (Assumption 1 fails: asymmetry {defect}); symmetrize=True takes the symmetric part"
        )
        A = checked("heads", A, lambda A: jnp.max(jnp.abs(A - A.T)) <= 1e-6 * jnp.max(jnp.abs(A)), rule)
    mu, U = jnp.linalg.eigh((A + A.T) / 2)
    return mu, U, mu >= mu[-1] - _tolerance(mu)


def _grown(mu, c, s):
    """e^(s mu) c up to a positive factor per token that keeps its largest entries of order |c|."""
    power = jnp.where(c == 0, -jnp.inf, s[:, None] * mu[None])
    power = power - jax.lax.stop_gradient(jnp.max(power, axis=-1, keepdims=True))
    return jnp.exp(jnp.where(c == 0, 0, power)) * c


def _clock_rate(_, s, args):
    mu, c, G = args
    y = _grown(mu, c, s)
    return jnp.linalg.norm(y, axis=-1) / jnp.linalg.norm(y @ G, axis=-1)


def _prefactor(beta):
    beta = positive("beta", beta)
    return jnp.sqrt(jnp.log1p(beta) / beta)
