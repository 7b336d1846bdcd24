r"""Equiangular tokens, $\langle x_i, x_j\rangle = \gamma$ for all pairs, under scalar heads $\lambda_h I$: one ODE for $\gamma(t)$.

$\dot\gamma = k(\gamma)\,(1-\gamma)(1+(n-1)\gamma)$ with a push k set by the attention, for equal weights 1/n:
softmax $\sum_h 2\lambda_h / (e^{\beta\lambda_h(1-\gamma)} + n-1)$, exponential $\frac1n\sum_h 2\lambda_h e^{\beta\lambda_h\gamma}$, ReLU
$\frac1n\sum_h 2\lambda_h (\lambda_h\gamma)_+$, linear $\frac1n\sum_h 2\lambda_h^2\gamma$ (2312.10794; arXiv 2605.04279, Theorems 22, 25).
The domain is $-1/(n-1) \le \gamma \le 1$, n >= 2. Solved for $w = -\log(1-\gamma)$, in which consensus is never reached and nothing
is lost near it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlog1py
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..attention import AbstractAttention, Exponential, Linear, ReLU, Softmax
from .numbers import Real, checked, integrate, real

BEYOND = (
    "the wait for the cosine to rise exceeds 1e15 crossing times, so that t does not resolve it; `time` gives the wait."
)


def push(attention: AbstractAttention, strengths: Real, n: ArrayLike, cosine: ArrayLike) -> Array:
    r"""$k(\gamma)$ in $\dot\gamma = k(\gamma)(1-\gamma)(1+(n-1)\gamma)$."""
    lam, n, gamma = real(strengths), _crowd(n), real(cosine)
    return _push(attention, lam, n, gamma, 1 - gamma)


def drift(attention: AbstractAttention, strengths: Real, n: ArrayLike, cosine: ArrayLike) -> Array:
    r"""$\dot\gamma$, the rate of change of the cosine."""
    gamma, n = real(cosine), _crowd(n)
    return push(attention, strengths, n, gamma) * (1 - gamma) * (1 + (n - 1) * gamma)


def late_rate(attention: AbstractAttention, strengths: Real, n: ArrayLike) -> Array:
    r"""The rate at which $1-\gamma$ decays at consensus, $n\,k(1)$: softmax $2\Lambda = 2\sum_h\lambda_h$ (Theorem 22, arXiv 2605.04279).

    Exponential $2\sum_h\lambda_h e^{\beta\lambda_h}$, which is not $2\Lambda$; ReLU (positive strengths) and linear $2\sum_h\lambda_h^2$.
    """
    return real(n) * push(attention, strengths, n, 1.0)


def cosine(attention: AbstractAttention, strengths: Real, n: ArrayLike, cosine0: ArrayLike, t: ArrayLike) -> Array:
    r"""$\gamma(t)$ from $\gamma(0)$ = `cosine0`; t is a scalar or a vector (T,) of times >= 0, in any order.

    Frozen at $\gamma(0) = 1$ and $-1/(n-1)$, and for ReLU with positive strengths at every $\gamma(0) \le 0$.
    Relative error below 1e-10 in double precision, also of $1-\gamma$ (`cosine_deficit`).

    **Errors:** ValueError outside the domain, or for `Exponential` where $e^{\beta\lambda}$ does not fit the dtype; a run-time
    error where a wait is some $10^{15}$ crossing times ($\beta\lambda$ above about 35), which `time` still gives.
    """
    return -jnp.expm1(-_log_deficit(attention, strengths, n, cosine0, t))


def cosine_deficit(
    attention: AbstractAttention, strengths: Real, n: ArrayLike, cosine0: ArrayLike, t: ArrayLike
) -> Array:
    r"""$1-\gamma(t)$, accurate however small; arguments as `cosine`."""
    return jnp.exp(-_log_deficit(attention, strengths, n, cosine0, t))


def time(attention: AbstractAttention, strengths: Real, n: ArrayLike, cosine0: ArrayLike, cosine1: ArrayLike) -> Array:
    r"""The time from $\gamma_0$ to $\gamma_1$, $\int d\gamma/\dot\gamma$; infinite where the drift does not lead there.

    ReLU in closed form, $\frac{n}{2\Lambda_2}[\ln\gamma - \frac1n\ln(1-\gamma) - \frac{n-1}n\ln(1+(n-1)\gamma)]$ with
    $\Lambda_2 = \sum\lambda_h^2$ over positive strengths (Theorem 25, arXiv 2605.04279); the others by quadrature.
    """
    lam, n = real(strengths), _crowd(n)
    start, end = _inside(cosine0, n), _inside(cosine1, n)
    finite, still = end < 1, start == end
    if isinstance(attention, ReLU):
        drive = jnp.sum(jnp.where(lam > 0, lam**2, 0))
        moving = finite & (start > 0) & (end >= start) & (drive > 0)

        def age(gamma):
            return jnp.log(gamma) - jnp.log1p(-gamma) / n - (n - 1) / n * jnp.log1p((n - 1) * gamma)

        safe = jnp.where(moving, start, 0.5), jnp.where(moving, end, 0.5)
        elapsed = n / (2 * jnp.where(moving, drive, 1)) * (age(safe[1]) - age(safe[0]))
        return jnp.where(moving, elapsed, jnp.where(still, 0, jnp.inf))

    start, end = jnp.where(start < 1, start, 0), jnp.where(finite, end, 0)
    w0, w1 = -jnp.log1p(-start), -jnp.log1p(-end)
    sweep = jnp.linspace(0.0, 1.0, 257)
    pushes = jax.vmap(lambda gamma: push(attention, lam, n, gamma))(start + (end - start) * sweep)
    towards = finite & jnp.all(pushes * jnp.where(end >= start, 1, -1) > 0)

    w1 = jnp.where(towards, w1, w0)
    args, one = (lam, n, attention, w0, w1), jnp.ones((1,), lam.dtype)
    elapsed = integrate(_slowness, jnp.zeros((), lam.dtype), one, args, "the time diverges.")[0]
    return jnp.where(towards | still, elapsed, jnp.inf)


def linearised_time(
    attention: AbstractAttention, strength: ArrayLike, n: ArrayLike, cosine0: ArrayLike, cosine1: ArrayLike
) -> Array:
    r"""The time with $\dot\gamma$ to first order in $\gamma$, as the papers compare attentions; true for $\gamma \ll 1/n$ only.

    Softmax $(\gamma_1-\gamma_0)(e^{\beta\lambda}+n-1)/2\lambda$; ReLU $\frac{n}{2\lambda^2}\ln(\gamma_1/\gamma_0)$. For n = 10^4
    the first is 2500 where the full equation gives 4.6. ValueError for other attentions.
    """
    lam, n = real(strength), _crowd(n)
    start, end = _inside(cosine0, n), _inside(cosine1, n)
    if isinstance(attention, Softmax):
        return (end - start) * (jnp.exp(real(attention.beta) * lam) + n - 1) / (2 * lam)
    if isinstance(attention, ReLU):
        return n / (2 * lam**2) * jnp.log(end / start)
    raise ValueError(f"the linearised time is known for Softmax and ReLU, got {type(attention).__name__}.")


def entropy(attention: AbstractAttention, strengths: Real, n: ArrayLike, cosine: ArrayLike) -> Float[Array, " H"]:
    r"""Attention entropy of each head in nats, $\log(e^a+n-1) - a e^a/(e^a+n-1)$ with $a = \beta\lambda_h(1-\gamma)$.

    Theorem 27, arXiv 2605.04279. For `Softmax`, and `Exponential` with its weights normalised.
    log n at consensus; accurate also where it is tiny.
    """
    a, n = _score_gap(attention, strengths, n, 1 - real(cosine))
    log_others = jnp.log(n - 1)
    return jax.nn.softplus(log_others - a) + a * jax.nn.sigmoid(log_others - a)


def entropy_deficit(
    attention: AbstractAttention, strengths: Real, n: ArrayLike, cosine_deficit: ArrayLike
) -> Float[Array, " H"]:
    r"""$\log n$ minus `entropy`, accurate near consensus, where it is $(n-1)a^2/2n^2$; takes $1-\gamma$."""
    a, n = _score_gap(attention, strengths, n, real(cosine_deficit))
    large = jnp.abs(a)
    # q: minus the relative excess of the weight on another token over 1/n
    up = -jnp.expm1(-large) / (1 + (n - 1) * jnp.exp(-large))
    down = jnp.expm1(-large) / (jnp.exp(-large) + n - 1)
    q = jnp.where(a >= 0, up, down)
    return (_relative_entropy((n - 1) * q) + (n - 1) * _relative_entropy(-q)) / n


def entropy_rate(attention: AbstractAttention, strengths: Real, n: ArrayLike, cosine: ArrayLike) -> Float[Array, " H"]:
    r"""$dH_h/dt = \beta^2\lambda_h^2\,p(1-p)(1-\gamma)\dot\gamma$, p the weight of a token on itself.

    So entropy rises iff the cosine does (Theorem 27, arXiv 2605.04279); for general tokens it may fall.
    """
    gap, rate = 1 - real(cosine), drift(attention, strengths, n, cosine)
    a, n = _score_gap(attention, strengths, n, gap)
    speed, _ = _score_gap(attention, strengths, n, rate)
    p = jax.nn.sigmoid(a - jnp.log(n - 1))
    return p * (1 - p) * a * speed


def _crowd(n):
    return checked("n", n, lambda a: a >= 2, "at least 2 tokens: one has no angle")


def _inside(gamma, n):
    return checked("cosine", gamma, lambda a: ((n - 1) * a >= -1 - 1e-9) & (a <= 1), "in [-1/(n-1), 1]")


def _push(attention, lam, n, gamma, gap):
    match attention:
        case Softmax(beta=beta):
            return jnp.sum(2 * lam / n * _balance(real(beta) * lam * gap, n))
        case Exponential(beta=beta):
            return jnp.sum(2 * lam / n * jnp.exp(real(beta) * lam * gamma))
        case ReLU():
            return jnp.sum(2 * lam / n * jax.nn.relu(lam * gamma))
        case Linear():
            return jnp.sum(2 * lam**2 / n * gamma)
    raise ValueError(
        f"no equiangular law for {type(attention).__name__}; there is one for Softmax, Exponential, ReLU, Linear."
    )


def _balance(a, n):
    """n / (e^a + n - 1), for any a."""
    return n * jnp.exp(-jnp.logaddexp(a, jnp.log(n - 1)))


def _log_deficit(attention, strengths, n, cosine0, t):
    lam, n = real(strengths), _crowd(n)
    gamma0 = _inside(cosine0, n)
    t = checked("t", t, lambda a: a >= 0, ">= 0")
    if isinstance(attention, Exponential):
        fits = 0.98 * float(np.log(np.finfo(lam.dtype).max))
        rule = f"smaller in size than {fits:.0f} / beta, or exp(beta lambda) does not fit"
        lam = checked("strengths", lam, lambda a: attention.beta.astype(lam.dtype) * abs(a) < fits, rule)
    consensus = gamma0 == 1
    w0 = -jnp.log1p(-jnp.where(consensus, 0, gamma0))

    order = jnp.argsort(jnp.atleast_1d(t))
    w = integrate(_speed, w0, jnp.atleast_1d(t)[order], (lam, n, attention), BEYOND)
    w = jnp.zeros_like(w).at[order].set(w).reshape(t.shape)
    return jnp.where(consensus, jnp.inf, w)


def _speed(_, w, args):
    lam, n, attention = args
    gamma = -jnp.expm1(-w)
    return _push(attention, lam, n, gamma, jnp.exp(-w)) * (1 + (n - 1) * gamma)


def _slowness(s, _, args):
    """dt/ds with w running from w0 to w1 as s does from 0 to 1."""
    lam, n, attention, w0, w1 = args
    return (w1 - w0) / _speed(s, w0 + (w1 - w0) * s, (lam, n, attention))


def _score_gap(attention, strengths, n, gap):
    if not isinstance(attention, Softmax | Exponential):
        raise ValueError(f"{type(attention).__name__} attention has no entropy; Softmax and Exponential have.")
    return real(attention.beta) * real(strengths) * gap, _crowd(n)


def _relative_entropy(r):
    """(1 + r) log(1 + r) - r, accurate for small r."""
    small = jnp.abs(r) < 0.05
    s = jnp.where(small, r, 0)
    series = sum((-1.0) ** k * s**k / (k * (k - 1)) for k in range(2, 14))
    r = jnp.where(small, 0.5, r)
    return jnp.where(small, series, xlog1py(1 + r, r) - r)
