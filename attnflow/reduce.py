r"""Reductions over the keys: the whole cost of the simulator, at O(n) memory.

Every attention is a weighted sum over keys of a function of the score, so three reductions serve all of them, for
queries q (H, n, k), keys (m, k) shared by the heads or (H, m, k), values (m, e) or (H, m, e), weights w (m,):

- `log_mean`: $L_i = \log\sum_j w_j e^{\langle q_i, k_j\rangle}$ and $\sum_j p_{ij} v_j$, $p_{ij} = w_j e^{\langle q_i,k_j\rangle - L_i}$;
- `sum`: $\sum_j w_j\,\varphi(\langle q_i, k_j\rangle - c_i)\,v_j$ for an elementwise $\varphi$;
- `maximum`: $\max_{j : w_j > 0} \langle q_i, k_j\rangle$.
"""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

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
        """Weighted sum of the values with coefficients `phi(score - shift)`."""

    @abc.abstractmethod
    def maximum(self, q: Queries, keys: Keys, w: Weights, *, causal: bool = False) -> Float[Array, "H n"]:
        """Largest score over the keys of positive weight."""


def scores(q: Queries, keys: Keys) -> Float[Array, "H n m"]:
    """All scores at once: for few tokens only."""
    return jnp.einsum("hnk,hmk->hnm" if keys.ndim == 3 else "hnk,mk->hnm", q, keys)


def visible(n: int, w: Weights, causal: bool):
    """Mask (n, m) of the keys that count: positive weight and, for causal attention, not later than the query."""
    mask = jnp.broadcast_to(w > 0, (n, w.shape[0]))
    return jnp.tril(mask) if causal else mask


class Dense(AbstractReduction):
    """All n x m scores in memory: the plain formula, fastest for a few hundred tokens."""

    def log_mean(self, q, keys, values, w, *, causal=False):
        s = scores(q, keys)
        mask = visible(q.shape[1], w, causal)[None]
        top = jax.lax.stop_gradient(jnp.max(s, axis=-1, where=mask, initial=_lowest(s)))
        e = jnp.where(mask, w[None, None] * jnp.exp(jnp.where(mask, s - top[..., None], 0)), 0)
        mass = jnp.sum(e, axis=-1)
        return top + jnp.log(mass), _weigh(e, values) / mass[..., None]

    def sum(self, phi, q, keys, values, w, *, shift=None, causal=False):
        s = scores(q, keys)
        if shift is not None:
            s = s - shift[..., None]
        mask = visible(q.shape[1], w, causal)[None]
        return _weigh(jnp.where(mask, w[None, None] * phi(jnp.where(mask, s, 0)), 0), values)

    def maximum(self, q, keys, w, *, causal=False):
        s = scores(q, keys)
        return jnp.max(s, axis=-1, where=visible(q.shape[1], w, causal)[None], initial=_lowest(s))


class Differences(Dense):
    r"""Asks a field to move token i by $\sum_j c_{ij}(x_j - x_i)$, so that a tiny velocity keeps its relative accuracy.

    Memory $O(n^2 d)$: for few tokens. The reductions themselves are those of `Dense`.
    """


class Blocked(AbstractReduction):
    """Tiles of `query_block` x `key_block` scores, with a running maximum: memory O(n), forward and reverse."""

    query_block: int = eqx.field(static=True, default=512)
    key_block: int = eqx.field(static=True, default=512)

    def log_mean(self, q, keys, values, w, *, causal=False):
        def tile(carry, s, v, wt, mask):
            top, mass, acc = carry
            new = jax.lax.stop_gradient(jnp.maximum(top, jnp.max(s, axis=-1, where=mask, initial=_lowest(s))))
            e = jnp.where(mask, wt[None] * jnp.exp(jnp.where(mask, s - new[:, None], 0)), 0)
            keep = jnp.exp(top - new)
            return new, mass * keep + jnp.sum(e, axis=-1), acc * keep[:, None] + e @ v

        def start(b):
            return (
                jnp.full(b, _lowest(q), q.dtype),
                jnp.zeros(b, q.dtype),
                jnp.zeros((b, values.shape[-1]), q.dtype),
            )

        top, mass, acc = self._tiles(tile, start, q, keys, values, w, None, causal)
        return top + jnp.log(mass), acc / mass[..., None]

    def sum(self, phi, q, keys, values, w, *, shift=None, causal=False):
        def tile(acc, s, v, wt, mask):
            return acc + jnp.where(mask, wt[None] * phi(jnp.where(mask, s, 0)), 0) @ v

        def start(b):
            return jnp.zeros((b, values.shape[-1]), q.dtype)

        return self._tiles(tile, start, q, keys, values, w, shift, causal)

    def maximum(self, q, keys, w, *, causal=False):
        def tile(top, s, v, wt, mask):
            return jnp.maximum(top, jnp.max(s, axis=-1, where=mask, initial=_lowest(s)))

        def start(b):
            return jnp.full(b, _lowest(q), q.dtype)

        return self._tiles(tile, start, q, keys, keys[..., :1], w, None, causal)

    def _tiles(self, tile, start, q, keys, values, w, shift, causal):
        """Run `tile` over all key blocks for each query block, for each head that has keys of its own."""
        H, n, k = q.shape
        m = w.shape[0]
        bq, bk = min(self.query_block, n), min(self.key_block, m)
        if keys.ndim == 2 and values.ndim == 2:
            q = q.reshape(1, H * n, k)
            keys, values = keys[None], values[None]
            shift = None if shift is None else shift.reshape(1, H * n)
        else:
            keys = jnp.broadcast_to(keys, (H, m, k))
            values = jnp.broadcast_to(values, (H, m, values.shape[-1]))
        shift = jnp.zeros(q.shape[:2], q.dtype) if shift is None else shift
        place = jnp.arange(q.shape[1]) % n

        def blocks(a, size, axis):
            pad = [(0, 0)] * a.ndim
            pad[axis] = (0, -a.shape[axis] % size)
            a = jnp.pad(a, pad)
            return a.reshape(*a.shape[:axis], -1, size, *a.shape[axis + 1 :])

        wb, mb = blocks(w, bk, 0), blocks(jnp.arange(m), bk, 0)

        @jax.checkpoint
        def one_tile(carry, query, key):
            (qt, ct, pt), (kt, vt, wt, mt) = query, key
            s = qt @ kt.T - ct[:, None]
            mask = (wt > 0)[None] & (mt[None] <= pt[:, None]) if causal else jnp.broadcast_to((wt > 0)[None], s.shape)
            return tile(carry, s, vt, wt, mask)

        def one_group(group):
            qg, kg, vg, cg = group
            kb, vb = blocks(kg, bk, 0), blocks(vg, bk, 0)

            @jax.checkpoint
            def one_row(query):
                def step(carry, key):
                    return one_tile(carry, query, key), None

                return jax.lax.scan(step, start(bq), (kb, vb, wb, mb))[0]

            rows = jax.lax.map(one_row, (blocks(qg, bq, 0), blocks(cg, bq, 0), blocks(place, bq, 0)))
            return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[: qg.shape[0]], rows)

        out = jax.lax.map(one_group, (q, keys, values, shift))
        return jax.tree.map(lambda a: a.reshape(H, n, *a.shape[2:]), out)


def _lowest(s: Array) -> float:
    return float(jnp.finfo(s.dtype).min)


def _weigh(coefficients, values):
    return jnp.einsum("hnm,hme->hne" if values.ndim == 3 else "hnm,me->hne", coefficients, values)
