r"""Attention nonlinearities: what a query is answered by the weighted tokens.

Each is the gradient in the query of a potential of the token measure (docs/design.md): softmax of the log-mass,
exponential of the mass, ReLU and linear of a quadratic, hardmax of the largest score. `beta` multiplies the score
inside `Softmax` and `Exponential` only; strengths and signs live in the heads.
"""

import abc
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from .heads import real
from .reduce import AbstractReduction, Differences

Answer = tuple[Float[Array, "H n e"], Float[Array, ""]]


class AbstractAttention(eqx.Module):
    """The answers $\\sum_j c_{ij} v_j$ of one nonlinearity; `c` from the scores of row i and the weights w."""

    @abc.abstractmethod
    def scale(self, q: Float[Array, "H n k"]) -> Float[Array, "H n k"]:
        """Queries with beta folded in."""

    @abc.abstractmethod
    def answer(self, reduction: AbstractReduction, q, keys, values, w, *, causal: bool = False) -> Answer:
        """(a, c) with answers $e^c a$ for scaled queries; c is 0 unless the answers may overflow."""

    @abc.abstractmethod
    def coefficients(self, s: Float[Array, "H n m"], w: Float[Array, "n m"]) -> tuple[Float[Array, "H n m"], Array]:
        """(a, c) with coefficients $e^c a_{ij}$ from scaled scores; a weight of 0 hides a key."""

    def entropy_deficits(
        self, reduction: AbstractReduction, q, keys, w, *, causal: bool = False
    ) -> Float[Array, "H n"]:
        r"""$\sum_j p_{ij}\log(p_{ij}/w_j) \ge 0$ of the normalised coefficients p; 0 at consensus."""
        raise ValueError(f"`{type(self).__name__}` has no entropy: its coefficients are not probabilities.")

    @abc.abstractmethod
    def log_energies(self, reduction: AbstractReduction, q, keys, w) -> Float[Array, " H"]:
        r"""$\log E_h$, $E_h = \frac12\sum_{ij} w_i w_j \Phi(s_{ij})$ with $\Phi'$ the coefficient function."""


def concrete(x) -> bool:
    """Whether the value of `x` is known here, outside every trace."""
    return not isinstance(x, Tracer)


def inverse_temperature(beta: Array, hard: str) -> None:
    if beta.ndim != 0:
        raise ValueError(f"`beta` must be a scalar, got shape {beta.shape}; vmap the constructor to batch.")
    if concrete(beta):
        value = float(np.asarray(beta))  # numpy: inside a trace jax would stage the check out
        if not value >= 0:
            raise ValueError(f"`beta` must be >= 0, got {value}; put a sign into the heads' score instead.")
        if np.isinf(value):
            raise ValueError(f"`beta` must be finite, got inf; {hard}")


def _zero(q):
    return jnp.zeros((), q.dtype)


def _exponential_log_energies(attention, reduction, q, keys, w):
    if concrete(attention.beta) and np.asarray(attention.beta) == 0:
        raise ValueError("`beta` = 0 has no energy: exp(beta s)/beta diverges.")
    log_mass, _ = reduction.log_mean(q, keys, keys[..., :1], w)
    return jax.nn.logsumexp(log_mass, axis=-1, b=w[None]) - jnp.log(2 * attention.beta.astype(q.dtype))


class Softmax(AbstractAttention):
    r"""$c_{ij} = w_j e^{\beta s_{ij}} / \sum_k w_k e^{\beta s_{ik}}$ (SA). Finite at any beta; causal rows are renormalised.

    **Errors:** ValueError where beta is negative, NaN or infinite (`Hardmax` is the limit).
    """

    beta: Float[Array, ""] = eqx.field(converter=real)

    def __check_init__(self):
        inverse_temperature(self.beta, "the limit is `Hardmax()`.")

    def scale(self, q):
        return self.beta * q

    def answer(self, reduction, q, keys, values, w, *, causal=False):
        return reduction.log_mean(q, keys, values, w, causal=causal)[1], _zero(q)

    def coefficients(self, s, w):
        return _softmax(s, w), _zero(s)

    def entropy_deficits(self, reduction, q, keys, w, *, causal=False):
        return _softmax_deficits(reduction, q, keys, w, causal)

    def log_energies(self, reduction, q, keys, w):
        return _exponential_log_energies(self, reduction, q, keys, w)


class Exponential(AbstractAttention):
    r"""$c_{ij} = w_j e^{\beta s_{ij}}$ (USA), of which the energy is the potential: aligned heads flow up its gradient.

    Velocities run like $e^{\beta \max s}$: where that does not fit the dtype, integrate with `clock="scaled"`.
    """

    beta: Float[Array, ""] = eqx.field(converter=real)

    def __check_init__(self):
        inverse_temperature(self.beta, "the exponential field has no limit; `Softmax` has.")

    def scale(self, q):
        return self.beta * q

    def answer(self, reduction, q, keys, values, w, *, causal=False):
        log_mass, mean = reduction.log_mean(q, keys, values, w, causal=causal)
        c = jnp.max(log_mass, initial=0) if log_mass.size == 0 else jnp.max(log_mass)
        return jnp.exp(log_mass - c)[..., None] * mean, c

    def coefficients(self, s, w):
        live = (w > 0)[None]
        top = jnp.max(s, where=live, initial=float(jnp.finfo(s.dtype).min))
        e = jnp.where(live, w[None] * jnp.exp(jnp.where(live, s - top, 0)), 0)
        mass = jnp.max(jnp.sum(e, axis=-1), initial=float(jnp.finfo(s.dtype).tiny))
        return e / mass, top + jnp.log(mass)

    def entropy_deficits(self, reduction, q, keys, w, *, causal=False):
        return _softmax_deficits(reduction, q, keys, w, causal)

    def log_energies(self, reduction, q, keys, w):
        return _exponential_log_energies(self, reduction, q, keys, w)


class ReLU(AbstractAttention):
    r"""$c_{ij} = w_j \max(s_{ij}, 0)$."""

    def scale(self, q):
        return q

    def answer(self, reduction, q, keys, values, w, *, causal=False):
        return reduction.sum(jax.nn.relu, q, keys, values, w, causal=causal), _zero(q)

    def coefficients(self, s, w):
        return w[None] * jax.nn.relu(s), _zero(s)

    def log_energies(self, reduction, q, keys, w):
        ones = jnp.ones((w.shape[0], 1), q.dtype)
        return jnp.log(reduction.sum(_half_square, q, keys, ones, w)[..., 0] @ w) - jnp.log(jnp.asarray(2, q.dtype))


class Linear(AbstractAttention):
    r"""$c_{ij} = w_j s_{ij}$: the answer is the covariance $\sum_j w_j x_j x_j^\top$ times the query, at O(n)."""

    def scale(self, q):
        return q

    def answer(self, reduction, q, keys, values, w, *, causal=False):
        if causal:
            return reduction.sum(_identity, q, keys, values, w, causal=True), _zero(q)
        keys = jnp.broadcast_to(keys, (q.shape[0], *keys.shape[-2:]))
        values = jnp.broadcast_to(values, (q.shape[0], *values.shape[-2:]))
        covariance = jnp.einsum("m,hmk,hme->hke", w, keys, values)
        return jnp.einsum("hnk,hke->hne", q, covariance), _zero(q)

    def coefficients(self, s, w):
        return w[None] * s, _zero(s)

    def log_energies(self, reduction, q, keys, w):
        answer, _ = self.answer(reduction, q, keys, keys, w)
        square = jnp.sum(answer * q, axis=-1)
        return jnp.log(square @ w) - jnp.log(jnp.asarray(4, q.dtype))


class Hardmax(AbstractAttention):
    r"""The w-weighted mean of the tokens that attain $\max_j s_{ij}$: the limit of `Softmax` as beta grows, at finite n.

    Ties are shared: token j counts where $w_j > 0$ and $s_{ij} \ge \max - 8\,\epsilon\,|q_i| \max_j|k_j|$ with the rounding
    unit $\epsilon$ of the dtype. Piecewise constant: it has no energy, and a gradient is refused.
    """

    def scale(self, q):
        return q

    def answer(self, reduction, q, keys, values, w, *, causal=False):
        ones = jnp.ones((*values.shape[:-1], 1), values.dtype)
        both = self._tied(reduction, q, keys, jnp.concatenate([values, ones], -1), w, causal)
        return both[..., :-1] / both[..., -1:], _zero(q)

    def entropy_deficits(self, reduction, q, keys, w, *, causal=False):
        tied = self._tied(reduction, q, keys, jnp.ones((len(w), 1), q.dtype), w, causal)[..., 0]
        return jnp.log(_visible_weight(w, causal))[None] - jnp.log(tied)

    def _tied(self, reduction, q, keys, values, w, causal):
        """Weighted sum of the values over the tied set of maximisers."""
        q, keys = _undifferentiable(q), _undifferentiable(keys)
        reach = jnp.max(jnp.linalg.norm(keys, axis=-1), axis=-1)
        length = jnp.linalg.norm(q, axis=-1) * jnp.reshape(reach, (-1, 1))
        shift = reduction.maximum(q, keys, w, causal=causal) - 8 * jnp.finfo(q.dtype).eps * length
        return reduction.sum(_reached, q, keys, values, w, shift=shift, causal=causal)

    def coefficients(self, s, w):
        s = _undifferentiable(s)
        live = (w > 0)[None]
        top = jnp.max(s, axis=-1, where=live, initial=float(jnp.finfo(s.dtype).min), keepdims=True)
        slack = 8 * jnp.finfo(s.dtype).eps * jnp.max(jnp.abs(s), axis=-1, keepdims=True)
        tie = jnp.where(live & (s >= top - slack), w[None], 0)
        return tie / jnp.sum(tie, axis=-1, keepdims=True), _zero(s)

    def log_energies(self, reduction, q, keys, w):
        raise ValueError("`Hardmax` has no energy: it is not the gradient of a function of the tokens.")


def _softmax_deficits(reduction, q, keys, w, causal):
    r"""$\sum_j w_j\,g(u_{ij})$, $g(u) = u e^u - e^u + 1$ with $u = \log(p/w)$: every term is >= 0, so nothing cancels."""
    seen = _visible_weight(w, causal)
    if isinstance(reduction, Differences) and keys.ndim == 2:
        # Scores relative to the token's own: u keeps its relative accuracy when all scores nearly agree.
        s = jnp.einsum("hnk,nmk->hnm", q, keys[None] - keys[:, None])
        share = jnp.broadcast_to(w, (len(w), len(w)))
        share = (jnp.tril(share) if causal else share)[None] / seen[None, :, None]
        top = jnp.max(s, axis=-1, where=share > 0, initial=float(jnp.finfo(s.dtype).min), keepdims=True)
        far = top > 1
        shifted = jnp.where(share > 0, s - jnp.where(far, top, 0), 0)
        excess = jnp.sum(share * jnp.expm1(shifted), axis=-1, keepdims=True)
        return jnp.sum(share * _relative_entropy(shifted - jnp.log1p(excess)), axis=-1)
    log_mass, _ = reduction.log_mean(q, keys, keys[..., :1], w, causal=causal)
    ones = jnp.ones((len(w), 1), q.dtype)
    shift = log_mass - jnp.log(seen)[None]
    total = reduction.sum(_relative_entropy, q, keys, ones, w, shift=shift, causal=causal)[..., 0]
    return total / seen[None]


def _relative_entropy(u):
    r"""$g(u) = u e^u - e^u + 1 = \sum_{k\ge2} \frac{k-1}{k!} u^k$, accurate also where u is tiny."""
    small = jnp.abs(u) < 0.25
    near, far = jnp.where(small, u, 0), jnp.where(small, 0, u)
    series = jnp.zeros_like(u)
    for k in range(14, 1, -1):
        series = series * near + (k - 1) / math.factorial(k)
    return jnp.where(small, series * near * near, far * jnp.exp(far) - jnp.expm1(far))


def _visible_weight(w, causal):
    """Total weight that each query sees: 1, or the running sum for causal attention."""
    return jnp.cumsum(w) if causal else jnp.ones_like(w)


def _softmax(s, w):
    live = (w > 0)[None]
    top = jax.lax.stop_gradient(jnp.max(s, axis=-1, where=live, initial=float(jnp.finfo(s.dtype).min), keepdims=True))
    e = jnp.where(live, w[None] * jnp.exp(jnp.where(live, s - top, 0)), 0)
    return e / jnp.sum(e, axis=-1, keepdims=True)


def _half_square(s):
    return jax.nn.relu(s) ** 2 / 2


def _identity(s):
    return s


def _reached(s):
    return (s >= 0).astype(s.dtype)


@jax.custom_jvp
def _undifferentiable(x):
    return x


@_undifferentiable.defjvp
def _refuse(primals, tangents):
    raise ValueError("`Hardmax` has no gradient: its answer is piecewise constant. Use `Softmax` at a large beta.")
