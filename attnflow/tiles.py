r"""Sums over keys, one tile of scores at a time: memory O(n), forward, forward-mode and reverse.

Arrays come in groups that do not see each other (heads with keys of their own, batches): queries q (G, r, k), keys
(G, m, k), weighted values u (G, m, e). No function here holds more than a few tiles of scores.

Two layouts of a tile, chosen by measurement of XLA's CPU products (docs/performance.md): keys down and queries across
for the sums themselves; the other way round for their derivative, so that every product of its transpose has the big
matrix where XLA reads it at full speed.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .exponential import LOG2E, exp, exp2, small_exp2


class Shape(NamedTuple):
    """Sizes of the tiles: (query, key) blocks forward and in the derivative; `causal` is n if token i sees keys j <= i."""

    forward: tuple[int, int]
    derivative: tuple[int, int]
    causal: int | None = None


# Compiled here although the library leaves `jit` to its callers: a loop called outside every trace is compiled anew each
# time, because its body is a new function, and the sums are often called so.
@partial(jax.jit, static_argnames="shape", inline=True)
def log_mean(q, keys, u, shape: Shape):
    r"""$L_i = \log\sum_j w_j e^{\langle q_i, k_j\rangle}$ (G, r) and $\sum_j p_{ij} v_j$ (G, r, e) for $u_j = (w_j v_j, w_j)$."""

    @jax.custom_jvp
    def run(q, keys, u):
        return over_groups(partial(_log_mean, shape=shape), q, keys, u)

    @run.defjvp
    def rule(primals, tangents):
        log_mass, mean = run(*primals)
        moved = tangent(exp, (*primals, log_mass), (*tangents, None), shape)
        return (log_mass, mean), (moved[..., -1], moved[..., :-1] - mean * moved[..., -1:])

    return run(q, keys, u)


@partial(jax.jit, static_argnames=("phi", "shape"), inline=True)
def weighted_sum(phi: Callable, q, keys, u, shift, shape: Shape):
    r"""$\sum_j \varphi(\langle q_i, k_j\rangle - c_i)\,u_j$ (G, r, e); `phi` is elementwise, its derivative is its own business."""

    @jax.custom_jvp
    def run(q, keys, u, shift):
        return over_groups(partial(_sum, phi, shape=shape), q, keys, u, shift)

    @run.defjvp
    def rule(primals, tangents):
        return run(*primals), tangent(phi, primals, tangents, shape)

    return run(q, keys, u, shift)


@partial(jax.jit, static_argnames="shape", inline=True)
def maximum(q, keys, live, shape: Shape):
    r"""$\max_j \langle q_i, k_j\rangle$ over live (G, m) keys (G, r)."""

    def step(top, query, key):
        s = jnp.where(key.live[:, None] & _seen(query, key, shape), _product(key.k, query.q, 1, 1), _lowest(q))
        return jnp.maximum(top, jnp.max(s, axis=0))

    start = partial(jnp.full, fill_value=_lowest(q), dtype=q.dtype)
    queries, keys = _Queries(q), _Keys(keys, live=live)
    return _rows(_fold(step, start, queries, keys, shape.forward, shape.causal), q)


def tangent(phi: Callable, primals, tangents, shape: Shape):
    r"""$\sum_j \varphi'(t_{ij})\,\dot t_{ij}\,u_j + \varphi(t_{ij})\,\dot u_j$ with $t_{ij} = \langle q_i, k_j\rangle - c_i$.

    Linear in the tangents, tile by tile with nothing carried but the sum, so that JAX's transpose of it is the reverse
    pass at five products per tile; checkpoints make it recompute the coefficients. Widths are padded to multiples of
    four, at which XLA's products run.
    """
    q, keys, u, shift = primals
    dq, dk, du, dshift = tangents
    wide = [(0, 0), (0, 0), (0, -q.shape[-1] % 4)]
    q, dq, keys, dk = (jnp.pad(a, wide) for a in (q, dq, keys, dk))

    @partial(jax.checkpoint, prevent_cse=False)
    def tile(query, key):
        t = _product(query.q, key.k, 1, 1) - query.shift[:, None]
        dt = _product(query.dq, key.k, 1, 1) + _product(query.qT, key.dkT, 0, 0)
        if dshift is not None:
            dt = dt - query.dshift[:, None]
        if shape.causal is not None:
            seen = _seen(query, key, shape).T
            t, dt = jnp.where(seen, t, 0), jnp.where(seen, dt, 0)
        # A branch that XLA cannot see through: else it computes phi once for every use of it, exponentials included.
        c, dc = jax.jvp(lambda t: lax.cond(key.number >= 0, phi, jnp.zeros_like, t), (t,), (dt,))
        if shape.causal is not None:
            c = jnp.where(seen, c, 0)
        return _product(dc, key.u, 1, 0), _product(key.duT, c, 1, 1)

    def step(carry, query, key):
        down, across = tile(query, key)
        return carry[0] + down, carry[1] + across

    def start(b):
        return jnp.zeros((b, u.shape[-1]), q.dtype), jnp.zeros((u.shape[-1], b), q.dtype)

    queries = _Queries(q, qT=q, dq=dq, shift=shift, dshift=dshift)
    keys = _Keys(keys, u=u, dkT=dk, duT=du)
    down, across = _fold(step, start, queries, keys, shape.derivative, shape.causal)
    return _rows(down, q) + _rows(jnp.swapaxes(across, -1, -2), q)


# Forward passes. They are never differentiated, so they may branch and loop as they like.


def _log_mean(q, keys, u, *, shape):
    """Without a shift where no exponential can leave the range of the dtype, else with a running maximum."""
    live = u[..., -1] > 0
    q = q * jnp.asarray(LOG2E, q.dtype)
    info = jnp.finfo(q.dtype)
    largest = jnp.max(_length(q)) * jnp.max(_length(keys))
    lightest = jnp.log2(jnp.min(jnp.max(u[..., -1], axis=-1)))
    room = jnp.asarray(-info.minexp - info.nmant - 2, q.dtype)  # terms that flush to 0 are below a rounding of the mass
    top, total = lax.cond(
        largest - jnp.minimum(lightest, 0) <= room,
        lambda *a: (jnp.zeros(q.shape[:2], q.dtype), _bounded(*a, shape)),
        lambda *a: _running(*a, shape),
        *(q, keys, u, live),
    )
    mass = total[..., -1]
    return top * jnp.asarray(1 / LOG2E, q.dtype) + jnp.log(mass), total[..., :-1] / mass[..., None]


def _bounded(q, keys, u, live, shape):
    def step(total, query, key):
        e = small_exp2(_product(key.k, query.q, 1, 1))
        if shape.causal is not None:
            e = jnp.where(_seen(query, key, shape), e, 0)
        return total + _product(key.uT, e, 1, 0)

    def start(b):
        return jnp.zeros((u.shape[-1], b), q.dtype)

    total = _fold(step, start, _Queries(q), _Keys(keys, uT=u), shape.forward, shape.causal)
    return _rows(jnp.swapaxes(total, -1, -2), q)


def _running(q, keys, u, live, shape):
    def step(carry, query, key):
        top, total = carry
        counts = key.live[:, None]
        if shape.causal is not None:
            counts = counts & _seen(query, key, shape)
        s = _product(key.k, query.q, 1, 1)
        new = jnp.maximum(top, jnp.max(jnp.where(counts, s, _lowest(q)), axis=0))
        e = exp2(s - new[None])
        if shape.causal is not None:
            e = jnp.where(counts, e, 0)
        return new, total * exp2(top - new)[None] + _product(key.uT, e, 1, 0)

    def start(b):
        return jnp.full(b, _lowest(q), q.dtype), jnp.zeros((u.shape[-1], b), q.dtype)

    top, total = _fold(step, start, _Queries(q), _Keys(keys, uT=u, live=live), shape.forward, shape.causal)
    return _rows(top, q), _rows(jnp.swapaxes(total, -1, -2), q)


def _sum(phi, q, keys, u, shift, *, shape):
    def step(total, query, key):
        t = _product(key.k, query.q, 1, 1) - query.shift[None]
        if shape.causal is None:
            return total + _product(key.uT, phi(t), 1, 0)
        seen = _seen(query, key, shape)
        return total + _product(key.uT, jnp.where(seen, phi(jnp.where(seen, t, 0)), 0), 1, 0)

    def start(b):
        return jnp.zeros((u.shape[-1], b), q.dtype)

    total = _fold(step, start, _Queries(q, shift=shift), _Keys(keys, uT=u), shape.forward, shape.causal)
    return _rows(jnp.swapaxes(total, -1, -2), q)


# Loops.


class _Queries(NamedTuple):
    """A block of queries; names ending in T hold its columns as rows."""

    q: jax.Array
    qT: jax.Array | None = None
    dq: jax.Array | None = None
    shift: jax.Array | None = None
    dshift: jax.Array | None = None
    place: jax.Array | None = None


class _Keys(NamedTuple):
    """A block of keys; names ending in T hold its columns as rows."""

    k: jax.Array
    u: jax.Array | None = None
    uT: jax.Array | None = None
    dkT: jax.Array | None = None
    duT: jax.Array | None = None
    live: jax.Array | None = None
    place: jax.Array | None = None
    number: jax.Array | None = None  # of the block


def _fold(step, start, queries: _Queries, keys: _Keys, tile, causal):
    """`step(carry, query block, key block)` over all key blocks, for each query block of each group: (G, R, ...)."""
    G, r, _ = queries.q.shape
    m = keys.k.shape[1]
    if causal is not None:
        queries = queries._replace(place=jnp.broadcast_to(jnp.arange(r) % causal, (G, r)))
        keys = keys._replace(place=jnp.broadcast_to(jnp.arange(m), (G, m)))
    queries, keys = _blocks(queries, tile[0]), _blocks(keys, tile[1])
    count = keys.k.shape[1]
    keys = keys._replace(number=jnp.broadcast_to(jnp.arange(count), (G, count)))

    def group(arrays):
        queries, keys = arrays

        @partial(jax.checkpoint, prevent_cse=False)
        def row(query):
            def advance(carry, key):
                if causal is None:
                    return step(carry, query, key), None
                hidden = key.place[0] > jnp.max(query.place)
                return lax.cond(hidden, lambda c: c, lambda c: step(c, query, key), carry), None

            return lax.scan(advance, start(queries.q.shape[1]), keys)[0]

        return lax.map(row, queries)

    if G == 1:
        return jax.tree.map(lambda a: a[None], group(jax.tree.map(lambda a: a[0], (queries, keys))))
    return lax.map(group, (queries, keys))


def _blocks(arrays, size):
    """Cut axis 1 of every array of the tuple into equal blocks of about `size`, the last one filled up.

    Keys and queries are filled by the last of them, weighted values, lives and tangents by zeros: what is added counts
    for nothing and no `phi` sees a score that is not genuine.
    """
    total = next(a.shape[1] for a in arrays if a is not None)
    count = -(-total // size)
    size = min(total, -(-total // (8 * count)) * 8)
    count = -(-total // size)

    def cut(name, a):
        genuine = name in ("q", "qT", "k", "shift", "place")
        width = [(0, 0), (0, count * size - total)] + [(0, 0)] * (a.ndim - 2)
        a = jnp.pad(a, width, mode="edge" if genuine else "constant")
        a = a.reshape(a.shape[0], count, size, *a.shape[2:])
        return jnp.swapaxes(a, -1, -2) if name.endswith("T") else a

    return type(arrays)(**{name: None if a is None else cut(name, a) for name, a in arrays._asdict().items()})


def _rows(a, q):
    """Blocks (G, R, b, ...) back to rows (G, r, ...)."""
    return a.reshape(a.shape[0], -1, *a.shape[3:])[:, : q.shape[1]]


def over_groups(run, *arrays):
    """`run` of grouped arrays, whose batches under `vmap` become more groups: one program, one decision, bounded memory."""
    batched = jax.custom_batching.custom_vmap(run)

    @batched.def_vmap
    def rule(size, is_batched, *arrays):
        def spread(a, has_batch):
            a = a if has_batch else jnp.broadcast_to(a, (size, *a.shape))
            return a.reshape(-1, *a.shape[2:])

        out = over_groups(run, *map(spread, arrays, is_batched))
        return jax.tree.map(lambda a: a.reshape(size, -1, *a.shape[1:]), out), jax.tree.map(lambda a: True, out)

    return batched(*arrays)


def _product(a, b, i, j):
    """Product over axis i of a and axis j of b; float32 stays float32 on devices that would round it."""
    return lax.dot_general(a, b, (((i,), (j,)), ((), ())), precision=lax.Precision.HIGHEST)


def _seen(query, key, shape):
    return (key.place[:, None] <= query.place[None]) if shape.causal is not None else jnp.asarray(True)


def _length(a):
    return jnp.sqrt(jnp.sum(a * a, axis=-1))


def _lowest(a):
    return float(jnp.finfo(a.dtype).min)
