r"""Reductions over the keys: the whole cost of the simulator, at O(n) memory.

Every attention is a weighted sum over keys of a function of the score, so three reductions serve all of them, for
queries q (H, n, k), keys (m, k) shared by the heads or (H, m, k), values (m, e) or (H, m, e), weights w (m,):

- `log_mean`: $L_i = \log\sum_j w_j e^{\langle q_i, k_j\rangle}$ and $\sum_j p_{ij} v_j$, $p_{ij} = w_j e^{\langle q_i,k_j\rangle - L_i}$;
- `sum`: $\sum_j w_j\,\varphi(\langle q_i, k_j\rangle - c_i)\,v_j$ for an elementwise $\varphi$;
- `maximum`: $\max_{j : w_j > 0} \langle q_i, k_j\rangle$.

A key of weight 0 does not count, but the derivative in its weight is the true one. The mean score needs no method of its
own, $\sum_j p_{ij}\langle q_i, k_j\rangle = \langle q_i, \sum_j p_{ij} k_j\rangle$, nor does the mean of $\log w$: make it one more value.
"""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from . import tiles
from .exponential import exp
from .facts import threads

Queries = Float[Array, "H n k"]
Keys = Float[Array, "m k"] | Float[Array, "H m k"]
Values = Float[Array, "m e"] | Float[Array, "H m e"]
Weights = Float[Array, " m"]


class AbstractReduction(eqx.Module):
    """A way to sum over the keys."""

    @abc.abstractmethod
    def log_mean(
        self, q: Queries, keys: Keys, values: Values, w: Weights, *, causal: bool = False
    ) -> tuple[Float[Array, "H n"], Float[Array, "H n e"]]:
        """Log-mass and weighted mean of the values under the exponential kernel."""

    @abc.abstractmethod
    def sum(
        self,
        phi: Callable[[Array], Array],
        q: Queries,
        keys: Keys,
        values: Values,
        w: Weights,
        *,
        shift: Float[Array, "H n"] | None = None,
        causal: bool = False,
    ) -> Float[Array, "H n e"]:
        """Weighted sum of the values with coefficients `phi(score - shift)`.

        `phi` is elementwise, closes over no traced value, and must be finite at the scores of all keys, counting or not.
        """

    @abc.abstractmethod
    def maximum(self, q: Queries, keys: Keys, w: Weights, *, causal: bool = False) -> Float[Array, "H n"]:
        """Largest score over the keys of positive weight."""


def scores(q: Queries, keys: Keys) -> Float[Array, "H n m"]:
    """All scores at once: for few tokens only."""
    return jnp.einsum("hnk,hmk->hnm" if keys.ndim == 3 else "hnk,mk->hnm", q, keys, precision="highest")


def visible(n: int, w: Weights, causal: bool):
    """Mask (n, m) of the keys that count: positive weight and, for causal attention, not later than the query."""
    mask = jnp.broadcast_to(w > 0, (n, w.shape[0]))
    return jnp.tril(mask) if causal else mask


class Dense(AbstractReduction):
    """All n x m scores in memory: the plain formula, fastest for a few hundred tokens."""

    def log_mean(self, q, keys, values, w, *, causal=False):
        s = scores(q, keys)
        top = jax.lax.stop_gradient(self.maximum(q, keys, w, causal=causal))
        e = self._hide(exp(s - top[..., None]), causal)
        total = _weigh(e, weighted(values, w))
        return top + jnp.log(total[..., -1]), total[..., :-1] / total[..., -1:]

    def sum(self, phi, q, keys, values, w, *, shift=None, causal=False):
        s = scores(q, keys)
        if shift is not None:
            s = s - shift[..., None]
        return _weigh(self._hide(phi(self._hide(s, causal)), causal), scaled(values, w))

    def maximum(self, q, keys, w, *, causal=False):
        s = scores(q, keys)
        return jnp.max(s, axis=-1, where=visible(q.shape[1], w, causal)[None], initial=float(jnp.finfo(s.dtype).min))

    def _hide(self, a, causal):
        return jnp.tril(a) if causal else a


class Differences(Dense):
    r"""Asks a field to move token i by $\sum_j c_{ij}(x_j - x_i)$, so that a tiny velocity keeps its relative accuracy.

    Memory $O(n^2 d)$: for few tokens. The reductions themselves are those of `Dense`.
    """


class Blocked(AbstractReduction):
    """Tiles of `query_block` x `key_block` scores: memory O(n), forward and reverse. None chooses the sizes.

    `tile_dtype="float32"` with float64 tokens is mixed precision: sums to 1e-7 at about half the cost, enough for a solve
    at rtol >= 1e-5. None computes in the dtype of the tokens.
    """

    query_block: int | None = eqx.field(static=True, default=None)
    key_block: int | None = eqx.field(static=True, default=None)
    tile_dtype: str | None = eqx.field(static=True, default=None)

    def log_mean(self, q, keys, values, w, *, causal=False):
        groups = self._inside(*grouped(q, keys, weighted(values, w)))
        log_mass, mean = tiles.log_mean(*groups, self._shape(q, causal))
        return log_mass.reshape(q.shape[:2]).astype(q.dtype), mean.reshape(*q.shape[:2], -1).astype(q.dtype)

    def sum(self, phi, q, keys, values, w, *, shift=None, causal=False):
        groups = grouped(q, keys, scaled(values, w))
        shift = jnp.zeros(groups[0].shape[:2], q.dtype) if shift is None else shift.reshape(groups[0].shape[:2])
        total = tiles.weighted_sum(phi, *self._inside(*groups, shift), self._shape(q, causal))
        return total.reshape(*q.shape[:2], -1).astype(q.dtype)

    def maximum(self, q, keys, w, *, causal=False):
        q_groups, key_groups, u = self._inside(*grouped(q, keys, w[:, None]))
        top = tiles.maximum(q_groups, key_groups, u[..., 0] > 0, self._shape(q, causal))
        return top.reshape(q.shape[:2]).astype(q.dtype)

    def _inside(self, *arrays):
        return arrays if self.tile_dtype is None else tuple(a.astype(self.tile_dtype) for a in arrays)

    def _shape(self, q, causal):
        """Large tiles let XLA put all cores to work; the derivative holds four tiles at once and likes them smaller."""
        large = jax.default_backend() != "cpu"
        rows = 4096 if large else 2048 if threads() > 1 else 512
        forward = self.query_block or rows, self.key_block or (4096 if large else 512)
        derivative = self.query_block or (2048 if large else 512), self.key_block or (2048 if large else 512)
        return tiles.Shape(forward, derivative, q.shape[1] if causal else None)


class RandomBatch(AbstractReduction):
    r"""`size` keys drawn with replacement in proportion to w: an estimate for statistics, never an exact answer.

    Sums over keys, so the exponential (USA), ReLU and linear answers, are unbiased; log-masses and softmax means are not
    (bias of order 1/size), and the maximum is that of the drawn keys. The draw is that of `key`: pass another key for
    an independent estimate. `relative_error` says how far off the masses are; causal sums are refused.
    """

    key: PRNGKeyArray
    size: int = eqx.field(static=True)

    def log_mean(self, q, keys, values, w, *, causal=False):
        return Blocked().log_mean(q, *self._draw(keys, values, w, causal))

    def sum(self, phi, q, keys, values, w, *, shift=None, causal=False):
        return Blocked().sum(phi, q, *self._draw(keys, values, w, causal), shift=shift)

    def maximum(self, q, keys, w, *, causal=False):
        drawn, _, equal = self._draw(keys, keys, w, causal)
        return Blocked().maximum(q, drawn, equal)

    def relative_error(self, q: Queries, keys: Keys, w: Weights) -> Float[Array, "H n"]:
        r"""Standard error of the drawn mass over the mass, $\sigma(e^s) / (\mathrm{mean}(e^s)\sqrt{\mathrm{size}})$, from the draw."""
        drawn, _, equal = self._draw(keys, keys, w, False)
        ones = jnp.ones((self.size, 1), q.dtype)
        first, _ = Blocked().log_mean(q, drawn, ones, equal / jnp.sum(equal))
        second, _ = Blocked().log_mean(2 * q, drawn, ones, equal / jnp.sum(equal))
        return jnp.sqrt(jnp.expm1(jnp.maximum(second - 2 * first, 0)) / (self.size - 1))

    def _draw(self, keys, values, w, causal):
        if causal:
            raise ValueError("`RandomBatch` has no causal sums: the drawn keys do not know the order of the tokens.")
        chosen = jr.choice(self.key, w.shape[0], (self.size,), p=w)
        equal = jnp.full(self.size, 1 / self.size, w.dtype) * jnp.sum(w)
        return jnp.take(keys, chosen, axis=-2), jnp.take(values, chosen, axis=-2), equal


def weighted(values, w):
    """Values times weights, with the weights as last column."""
    column = jnp.broadcast_to(w[:, None], (*values.shape[:-1], 1))
    return jnp.concatenate([scaled(values, w), column], axis=-1)


def scaled(values, w):
    return values * w.reshape((1,) * (values.ndim - 2) + (-1, 1))


def grouped(q, keys, u):
    """Groups of queries that share keys: all heads in one group, or a group for each head."""
    H, n, k = q.shape
    if keys.ndim == 2 and u.ndim == 2:
        return q.reshape(1, H * n, k), keys[None], u[None]
    return q, jnp.broadcast_to(keys, (H, *keys.shape[-2:])), jnp.broadcast_to(u, (H, *u.shape[-2:]))


def _weigh(coefficients, values):
    form = "hnm,hme->hne" if values.ndim == 3 else "hnm,me->hne"
    return jnp.einsum(form, coefficients, values, precision="highest")
