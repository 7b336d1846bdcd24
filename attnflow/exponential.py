r"""Exponentials at vector speed on a CPU, with derivative rules of every order.

XLA's own exp costs more than the rest of an attention pair. Here $2^x = 2^i\,2^r$ with $i$ the nearest integer, $|r| \le 1/2$:
$2^r$ by the Chebyshev expansion of degree 10 (float64, relative error 3e-16) or 6 (float32, 3e-9), $2^i$ by adding $i$ to
the exponent bits. Those bits have no derivative of their own, hence the explicit rules. Devices other than a CPU use their
own `exp2`; narrower dtypes go through float32.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

LOG2E = float(np.log2(np.e))
LN2 = float(np.log(2))

# Chebyshev expansions of 2^r on [-1/2, 1/2] as polynomials in r, from 40-digit arithmetic.
_DOUBLE = (
    1.0,
    0.69314718055994998,
    0.2402265069591016,
    0.05550410866444768,
    0.0096181291075872534,
    0.0013333558230170627,
    0.00015403530463727982,
    1.5252657257186042e-5,
    1.3215432534254118e-6,
    1.0208690835930371e-7,
    7.0741945626131048e-9,
)
_SINGLE = (
    1.0,
    0.69314720671061993,
    0.24022651213595232,
    0.055503272142092013,
    0.0096180256029558373,
    0.0013400432165385696,
    0.00015469731977475548,
)


def small_exp2(x: Float[Array, "..."]) -> Float[Array, "..."]:
    r"""$2^x$ where $|x|$ stays below 1022 (float64) or 126 (float32); wrong beyond, and without a derivative."""
    if x.dtype not in (jnp.float32, jnp.float64):
        return small_exp2(x.astype(jnp.float32)).astype(x.dtype)
    return lax.platform_dependent(x, cpu=_by_bits, default=jnp.exp2)


def _by_bits(x):
    double = x.dtype == jnp.float64
    coefficients, bits, mantissa = (_DOUBLE, jnp.int64, 52) if double else (_SINGLE, jnp.int32, 23)
    # The fraction must not be written (x + magic) - magic: XLA folds that to x.
    r = x - lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    # Pairs in r, then Horner in r^2: half the chain of dependent multiply-adds of Horner's rule, a sixth less time.
    c = [jnp.asarray(a, x.dtype) for a in coefficients]
    square, p = r * r, c[-1]
    for i in range(len(c) - 3, -1, -2):
        p = p * square + (c[i] + c[i + 1] * r)
    magic = jnp.asarray(1.5 * 2.0**mantissa, x.dtype)  # leaves the nearest integer in the low bits of x + magic
    exponent = lax.bitcast_convert_type(x + magic, bits) << mantissa
    return lax.bitcast_convert_type(lax.bitcast_convert_type(p, bits) + exponent, x.dtype)


@jax.custom_jvp
def exp2(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """$2^x$, held between the smallest normal number and $2^{1000}$ (float64) or $2^{100}$ (float32): never 0, never inf.

    The cap leaves room for a factor, so that a coefficient of a key that does not count is finite and times 0 is 0.
    """
    info = jnp.finfo(x.dtype)
    return small_exp2(jnp.clip(x, info.minexp, info.maxexp - (24 if info.bits >= 64 else 28 if info.bits == 32 else 4)))


@exp2.defjvp
def _exp2_rule(primals, tangents):
    y = exp2(*primals)
    return y, y * (tangents[0] * jnp.asarray(LN2, y.dtype))


@jax.custom_jvp
def exp(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """$e^x$ within the range of `exp2`; relative error about $|x|$ rounding units."""
    return exp2(x * jnp.asarray(LOG2E, x.dtype))


@exp.defjvp
def _exp_rule(primals, tangents):
    y = exp(*primals)
    return y, y * tangents[0]


@jax.custom_jvp
def excess(t: Float[Array, "..."]) -> Float[Array, "..."]:
    r"""$t e^t - e^t + 1 = \sum_{k\ge2} \frac{(k-1) t^k}{k!} \ge 0$, to full relative accuracy near 0.

    With $t = \log(p/w)$ and $r = p/w - 1$ it is $(1 + r)\log(1 + r) - r$, so that a relative entropy is a sum of terms of
    one sign: $\sum_j p_j \log(p_j/w_j) = \sum_j w_j\,\mathrm{excess}(t_j)$ for p and w of equal sum.
    """
    series = jnp.zeros_like(t)
    for k in range(16, 1, -1):  # |t| <= 1/2: the remainder is below 2^-16 / 17!
        series = series * t + jnp.asarray((k - 1) / float(np.prod(np.arange(1.0, k + 1))), t.dtype)
    near = jnp.abs(t) < jnp.asarray(0.5, t.dtype)
    far = exp(t) * (t - jnp.asarray(1, t.dtype)) + jnp.asarray(1, t.dtype)
    return jnp.where(near, series * t * t, far)


@excess.defjvp
def _excess_rule(primals, tangents):
    (t,) = primals
    return excess(t), t * exp(t) * tangents[0]
