"""The reduction over keys with the tokens split over devices."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .mesh import TOKEN
from .reduce import AbstractReduction, Blocked


class Sharded(AbstractReduction):
    r"""Each device sums for its own queries; the keys visit it in turn, or all at once.

    The keys go round a ring: at step k device r holds the keys of device r - k, and the partial results combine as
    $L = \log(e^{L_1} + e^{L_2})$, $\bar v = (e^{L_1}\bar v_1 + e^{L_2}\bar v_2)e^{-L}$. Memory per device is that of n/D
    tokens. With `ring=False` every device gathers all keys first: one message, n keys per device. Equal to one device
    to rounding, values and gradients; a number of tokens that does not divide is padded inside.

    **Arguments:**

    - `mesh`: devices in a row, from `token_mesh`.
    - `inner`: how a device sums over the keys it holds.
    """

    mesh: Mesh = eqx.field(static=True)
    inner: AbstractReduction = Blocked()
    ring: bool = eqx.field(static=True, default=True)

    def log_mean(self, q, keys, values, w, *, causal=False):
        def block(q, keys, values, w, causal, seen):
            # weights of a block that is not seen at all are replaced: its log-mass would be that of nothing
            live = seen & jnp.any(w > 0)
            log_mass, mean = self.inner.log_mean(q, keys, values, jnp.where(live, w, 1), causal=causal)
            return jnp.where(live, log_mass, float(jnp.finfo(q.dtype).min)), jnp.where(live, mean, 0)

        return self._over_keys(block, _merge, (q,), (keys, values, w), causal)

    def sum(self, phi: Callable, q, keys, values, w, *, shift=None, causal=False):
        def block(q, shift, keys, values, w, causal, seen):
            return self.inner.sum(phi, q, keys, values, jnp.where(seen, w, 0), shift=shift, causal=causal)

        shift = jnp.zeros(q.shape[:2], q.dtype) if shift is None else shift
        return self._over_keys(block, jnp.add, (q, shift), (keys, values, w), causal)

    def maximum(self, q, keys, w, *, causal=False):
        def block(q, keys, w, causal, seen):
            return self.inner.maximum(q, keys, jnp.where(seen, w, 0), causal=causal)

        return self._over_keys(block, jnp.maximum, (q,), (keys, w), causal)

    def _over_keys(self, block, merge, queries, keys, causal):
        """Merge `block(*queries, *keys, causal, seen)` over the blocks of keys, each device for its queries."""
        devices = self.mesh.size
        n = queries[0].shape[1]

        def local(queries, keys):
            here = jax.lax.axis_index(TOKEN)
            if not self.ring and not causal:
                keys = tuple(jax.lax.all_gather(a, TOKEN, axis=_token_axis(a), tiled=True) for a in keys)
                return block(*queries, *keys, False, True)

            @jax.checkpoint
            def visit(carry, k):
                result, keys = carry
                keys = jax.tree.map(lambda a: jax.lax.ppermute(a, TOKEN, ring), keys)
                seen = here >= k if causal else True  # the keys of device here - k, modulo the ring
                return (merge(result, block(*queries, *keys, False, seen)), keys), None

            ring = [(r, (r + 1) % devices) for r in range(devices)]
            own = block(*queries, *keys, causal, True)
            return jax.lax.scan(visit, (own, keys), jnp.arange(1, devices, dtype=here.dtype))[0][0]

        queries = tuple(_padded(a, 1, devices) for a in queries)
        keys = tuple(_padded(a, _token_axis(a), devices) for a in keys)
        specs = (tuple(P(None, TOKEN) for _ in queries), tuple(P(*[None] * _token_axis(a), TOKEN) for a in keys))
        # check_vma=False: the check of replication refuses the carries of the solver's loops
        spread = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=P(None, TOKEN), check_vma=False)
        return jax.tree.map(lambda a: a[:, :n], spread(queries, keys))


def _merge(one, two):
    (log_one, mean_one), (log_two, mean_two) = one, two
    top = jax.lax.stop_gradient(jnp.maximum(log_one, log_two))
    a, b = jnp.exp(log_one - top), jnp.exp(log_two - top)
    mean = (a[..., None] * mean_one + b[..., None] * mean_two) / (a + b)[..., None]
    return top + jnp.log(a + b), mean


def _token_axis(a):
    """Weights (m,), shared keys (m, k), keys of each head (H, m, k)."""
    return max(0, a.ndim - 2)


def _padded(a, axis, parts):
    widths = [(0, 0)] * a.ndim
    widths[axis] = (0, -a.shape[axis] % parts)
    return jnp.pad(a, widths)
