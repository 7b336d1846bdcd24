r"""Closed forms of arXiv 2605.04279: thresholds of radial dominance, the clustering rate $\varphi$, heterogeneous heads.

Scalar heads $M_h = \lambda_h I$ throughout. Thresholds are for orthonormal tokens under unnormalised attention; $\varphi$ is
for softmax attention without a factor $1/n$ (velocity = sum over heads of softmax averages).
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from .numbers import Real, checked, population, positive, real, root


def critical_cosine(heads: ArrayLike) -> Array:
    r"""$c^*(H) = 2 / (\sqrt{(H-1)^2+4} + H-1)$, the root of $c^2 + (H-1) c = 1$ (Theorem 19, arXiv 2605.04279).

    Condition 8 (reconstructed) holds for H equal heads iff the cosine between token and head output is at most $c^*$. 1 for H = 1.
    """
    others = _others(heads)
    return 2 / (jnp.hypot(others, 2) + others)


def sharp_critical_cosine(heads: ArrayLike) -> Array:
    r"""$1/\sqrt{H}$: the largest cosine of the sharper sufficient condition, $|f_h|$ replaced by $|a_h|$ in Condition 8 (derived)."""
    return 1 / jnp.sqrt(1 + _others(heads))


def fewest_tokens(heads: ArrayLike) -> Array:
    r"""$1/c^{*2} = 1 + (H-1)/c^*$: with n at most this no $\beta > 0$ meets Condition 8, so $\beta^* \le 0$."""
    return 1 + _others(heads) / critical_cosine(heads)


def critical_beta(alpha: ArrayLike, n: ArrayLike, heads: ArrayLike) -> Array:
    r"""$\beta^* = \ln\big(c^*(n-1)/(H-1)\big) / 2\alpha$, up to which Condition 8 holds (Theorem 19, arXiv 2605.04279).

    H equal scalar heads of strength $\alpha$ on n orthonormal tokens. Negative or zero iff $n \le$ `fewest_tokens(heads)`: then
    no beta qualifies, and the value is formal. $-\infty$ for n = 1 and H > 1; $+\infty$ for H = 1, where there is nothing to meet.
    It bounds a sufficient condition only: with equal scalar heads every head's energy rises at every beta.

    **Errors:** ValueError where $\alpha \le 0$ (the cosine condition reverses).
    """
    return _half_log(positive("alpha", alpha), critical_cosine(heads) * (population(n) - 1), _others(heads))


def sharp_critical_beta(alpha: ArrayLike, n: ArrayLike, heads: ArrayLike) -> Array:
    r"""$\ln\big((n-1)/(H-1)\big) / 2\alpha$, up to which the sharper sufficient condition holds (derived); edges as `critical_beta`."""
    return _half_log(positive("alpha", alpha), population(n) - 1, _others(heads))


def heterogeneous_critical_beta(strengths: Real, n: ArrayLike) -> Float[Array, " H"]:
    r"""The beta of each head up to which Condition 8 holds for unequal scalar heads on n orthonormal tokens (derived).

    The root of $\lambda_h (n-1) = \sqrt{e^{2\beta\lambda_h} + n-1} \sum_{h' \ne h} \lambda_{h'} e^{\beta\lambda_{h'}}$, whose right side
    rises in beta. Negative: no beta qualifies for that head. $+\infty$ for H = 1.

    **Errors:** ValueError unless all strengths are positive and n >= 2.
    """
    lam = positive("strengths", strengths)
    log_n = jnp.log(checked("n", n, lambda a: a >= 2, ">= 2") - 1)
    H = lam.shape[0]
    if H == 1:
        return jnp.full((1,), jnp.inf)
    # the excess has slope at least the smallest strength, at most the sum of the two largest
    reach = (jnp.abs(_condition_8_excess(jnp.zeros_like(lam), lam, log_n)) + 1) / jnp.min(lam)
    return root(_condition_8_excess, -reach, reach, lam, log_n)


def log_clustering_rate(strength: Real, beta: ArrayLike, n: ArrayLike) -> Array:
    r"""$\log\varphi(\lambda)$, finite where $\varphi$ underflows. ValueError unless the strength is positive."""
    lam = positive("strength", strength)
    return jnp.log(2 * lam) - _log_partition(lam, real(beta), population(n))


def clustering_rate(strength: Real, beta: ArrayLike, n: ArrayLike) -> Array:
    r"""$\varphi(\lambda) = 2\lambda / (e^{\lambda\beta} + n-1)$, the rate of a head at orthogonal tokens (Theorem 22, arXiv 2605.04279).

    Never overflows; negative strengths repel. At n = 1 there is no dynamics, and the formula's limit is returned.
    """
    lam = real(strength)
    return 2 * lam * jnp.exp(-_log_partition(lam, real(beta), population(n)))


def fastest_strength(beta: ArrayLike, n: ArrayLike) -> Array:
    r"""$\lambda_{\max} = (1 + W((n-1)/e)) / \beta$, where $\varphi$ is largest (Lambert W; Theorem 22, arXiv 2605.04279).

    $u = \lambda\beta$ solves $(u-1)e^u = n-1$. $1/\beta$ at n = 1.
    """
    beta, log_n, few = _scale(beta, n)
    y = root(_slope_sign, jnp.minimum(log_n, 1) - 2, jnp.maximum(log_n - 1, 0), log_n)
    return (1 + jnp.where(few, 0, jnp.exp(y))) / beta


def inflection_strength(beta: ArrayLike, n: ArrayLike) -> Array:
    r"""$\lambda_c$, above which $\varphi$ is convex: $u = \lambda_c\beta > 2$ solves $e^u (u-2)/(u+2) = n-1$ (derived).

    A generalised Lambert function. Always above `fastest_strength`: the convex zone lies where $\varphi$ already falls. $2/\beta$ at n = 1.
    """
    beta, log_n, few = _scale(beta, n)
    lower, upper = jnp.log(0.1) + jnp.minimum(log_n, 0), jnp.log(1 + jnp.maximum(log_n, 0))
    y = root(_bend_sign, lower, upper, log_n)
    return (2 + jnp.where(few, 0, jnp.exp(y))) / beta


def superadditivity_gap(strengths: Real, beta: ArrayLike, n: ArrayLike) -> Array:
    r"""$\sum_h \varphi(\lambda_h) - H\varphi(\bar\lambda)$: positive where unequal heads cluster faster than equal ones of the same mean.

    Certain (Jensen) if every strength is at least `inflection_strength`; near equal heads iff their mean is. Not in general:
    see `superadditivity_limit`.
    """
    lam = real(strengths)
    return jnp.sum(clustering_rate(lam, beta, n)) - lam.shape[0] * clustering_rate(jnp.mean(lam), beta, n)


def superadditivity_limit(mean: ArrayLike, beta: ArrayLike, n: ArrayLike) -> Array:
    r"""The largest $\delta$ for which heads $\bar\lambda \mp \delta$ are faster than two heads $\bar\lambda$ (derived).

    $\varphi(\bar\lambda-\delta) + \varphi(\bar\lambda+\delta) = 2\varphi(\bar\lambda)$. 0 where $\bar\lambda \le \lambda_c$: the
    claim fails at once. It always ends below $\delta = \bar\lambda$, because $\varphi(0) = 0$.
    """
    mean, beta = positive("mean", mean), positive("beta", beta)
    n = checked("n", n, lambda a: a >= 2, ">= 2")

    convex = mean > inflection_strength(beta, n)
    lower = jnp.where(convex, 0, mean / 2)
    return jnp.where(convex, root(_loss_of_spread, lower, mean, mean, beta, n), 0)


def split_bound(total: ArrayLike, beta: ArrayLike, n: ArrayLike, *, heads: int) -> Array:
    r"""$H\hat\varphi(S/H)$, which no split of S among H heads exceeds.

    With the concave envelope $\hat\varphi(\lambda) = \varphi(\min(\lambda, \lambda_{\max}))$ on positive strengths.
    """
    mean = positive("total", total) / heads
    return heads * clustering_rate(jnp.minimum(mean, fastest_strength(beta, n)), beta, n)


def best_split(
    total: ArrayLike, beta: ArrayLike, n: ArrayLike, *, heads: int
) -> tuple[Float[Array, " H"], Float[Array, ""]]:
    r"""Positive strengths of fixed sum S that maximise $\sum_h\varphi(\lambda_h)$, weakest first, and that maximum (derived).

    H-1 heads of strength a and one of $S - (H-1)a \ge a$: heads below $\lambda_c$ share one slope of a concave function, and
    two heads above it would gain by parting, so at most one lies there. The maximum of $(H-1)\varphi(a) + \varphi(S-(H-1)a)$.
    """
    S, beta, n = positive("total", total), positive("beta", beta), population(n)
    if heads == 1:
        return S[None], clustering_rate(S, beta, n)
    rest = heads - 1
    top = jnp.minimum(inflection_strength(beta, n), S / heads)
    grid = jax.lax.stop_gradient(top * jnp.linspace(0.0, 1.0, 513))
    value = rest * clustering_rate(grid, beta, n) + clustering_rate(S - rest * grid, beta, n)
    best = jnp.argmax(value)
    low, high = grid[jnp.maximum(best - 1, 0)], grid[jnp.minimum(best + 1, 512)]
    a = root(_split_slope, low, high, S, real(rest), beta, n)
    equal = (best == 512) & (S / heads <= top)
    a = jnp.where(equal, S / heads, a)
    strengths = jnp.append(jnp.broadcast_to(a, (rest,)), S - rest * a)
    return strengths, jnp.sum(clustering_rate(strengths, beta, n))


def consensus_energy_rates(strengths: Real, shares: Real, beta: ArrayLike) -> Float[Array, " H"]:
    r"""$dE_h/dt$ at consensus x of orthogonal heads $\alpha_h P_h$ that fill the space, $r_h = |P_h x|^2$ the shares (derived).

    $a_h^2/r_h - a_h\sum_{h'} a_{h'}$ with $a_h = \alpha_h e^{\beta\alpha_h r_h} r_h$, exponential attention. Two equal heads:
    $\alpha^2 r_1 r_2 e_1(e_1 - e_2)$, so the weaker head loses at every $\beta > 0$: radial dominance is not kept by the flow.

    **Errors:** ValueError unless the shares are >= 0 with sum 1.
    """
    r = checked("shares", shares, lambda r: (r >= 0) & (abs(r.sum() - 1) < 1e-6), ">= 0 with sum 1")
    gain = real(strengths) * jnp.exp(real(beta) * real(strengths) * r)
    return gain * r * (gain - jnp.sum(gain * r))


def _others(heads):
    return checked("heads", heads, lambda a: a >= 1, "a number of heads >= 1") - 1


def _half_log(alpha, numerator, others):
    alone = others == 0
    return jnp.where(alone, jnp.inf, jnp.log(numerator / jnp.where(alone, 1, others)) / (2 * alpha))


def _log_partition(lam, beta, n):
    """log(e^(lambda beta) + n - 1)."""
    few = n == 1
    return jnp.where(few, lam * beta, jnp.logaddexp(lam * beta, jnp.log(jnp.where(few, 1, n - 1))))


def _condition_8_excess(beta, lam, log_n):
    """Log of the right side over the left side of the equation of `heterogeneous_critical_beta`, one beta per head."""
    drive = jnp.log(lam)[None] + beta[:, None] * lam[None]
    shadow = jax.nn.logsumexp(jnp.where(jnp.eye(len(lam), dtype=bool), -jnp.inf, drive), axis=1)
    return jnp.logaddexp(2 * beta * lam, log_n) / 2 + shadow - jnp.log(lam) - log_n


def _slope_sign(y, log_n):
    """log of (u-1) e^u / (n-1), u = 1 + e^y: positive where the rate falls."""
    return jnp.exp(y) + y + 1 - log_n


def _bend_sign(y, log_n):
    """log of e^u (u-2)/(u+2) / (n-1), u = 2 + e^y: positive where the rate is convex."""
    return 2 + jnp.exp(y) + y - jnp.log(4 + jnp.exp(y)) - log_n


def _loss_of_spread(delta, mean, beta, n):
    """Log of the rate of two equal heads over that of heads mean -/+ delta, so that strong heads do not underflow."""
    slow, fast = (jnp.log(2 * lam) - _log_partition(lam, beta, n) for lam in (mean - delta, mean + delta))
    return jnp.log(4 * mean) - _log_partition(mean, beta, n) - jnp.logaddexp(slow, fast)


def _split_slope(a, S, rest, beta, n):
    """Minus the derivative in a of the rate of `rest` heads a and one with what is left of S, over `rest`."""

    def slope(lam):
        return 2 * jnp.exp(-_log_partition(lam, beta, n)) * (1 - lam * beta * _sigmoid(lam, beta, n))

    return slope(S - rest * a) - slope(a)


def _sigmoid(lam, beta, n):
    """e^(lambda beta) / (e^(lambda beta) + n - 1)."""
    return jnp.exp(lam * beta - _log_partition(lam, beta, n))


def _scale(beta, n):
    beta, n = positive("beta", beta), population(n)
    few = n == 1
    return beta, jnp.log(jnp.where(few, 1, n - 1)), few
