r"""The reduction over keys as one GPU kernel, written in Pallas and compiled by Triton.

A program of the kernel owns a block of queries and walks over the keys, a block at a time, with the scores and the
running sums in registers; nothing of size n x m exists, and only queries, keys, values and the answers touch memory.
Tiles of scores have keys down and queries across: neighbouring threads hold neighbouring queries, so that the sums over
keys stay inside a thread. At small widths scores and sums are multiply-adds one column at a time, since a matrix unit would
have to be fed zeros; wide ones are products in full float32 (`Precision.HIGHEST`: no TF32).

The kernel has been compared with the other reductions in Pallas' interpret mode, on a CPU, and lowered for CUDA; it has
never run on a device. Therefore no field chooses it by itself: pass `reduction=Kernel()`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from . import tiles
from .exponential import LN2, LOG2E, exp
from .reduce import AbstractReduction, Blocked, grouped, scaled, weighted

NARROW = 24  # widths up to this are summed column by column; wider ones, filled up to a power of two, by products


class Kernel(AbstractReduction):
    r"""Sums over keys in one Pallas kernel, for NVIDIA GPUs; memory O(n), forward and reverse.

    The forward pass is the kernel; the derivative is that of `Blocked`, a sum over tiles that JAX transposes, so forward
    mode, reverse mode and `vmap` all work. `sum` with a `phi` that chooses its arithmetic by platform, as this package's
    own exponentials do, is `Blocked`'s too. Run in interpret mode only so far, never on a device.

    **Arguments:**

    - `query_block`, `key_block`: powers of two, at least 16; None is 128 and 32, fewer for fewer tokens.
    - `interpret`: run the kernel's operations one by one through XLA, slowly but anywhere; None does so on a CPU.
    """

    query_block: int | None = eqx.field(static=True, default=None)
    key_block: int | None = eqx.field(static=True, default=None)
    interpret: bool | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        for name in ("query_block", "key_block"):
            size = getattr(self, name)
            if size is not None and (size < 16 or size & (size - 1)):
                raise ValueError(f"`{name}` must be a power of two of at least 16, got {size}.")

    def log_mean(self, q, keys, values, w, *, causal=False):
        groups = grouped(q, keys, weighted(values, w))
        log_mass, mean = _log_mean(*groups, self._tile(q, keys, causal))
        return log_mass.reshape(q.shape[:2]), mean.reshape(*q.shape[:2], -1)

    def sum(self, phi, q, keys, values, w, *, shift=None, causal=False):
        if _by_platform(phi, q.dtype):
            return Blocked().sum(phi, q, keys, values, w, shift=shift, causal=causal)
        groups = grouped(q, keys, scaled(values, w))
        shift = jnp.zeros(groups[0].shape[:2], q.dtype) if shift is None else shift.reshape(groups[0].shape[:2])
        return _weighted_sum(phi, *groups, shift, self._tile(q, keys, causal)).reshape(*q.shape[:2], -1)

    def maximum(self, q, keys, w, *, causal=False):
        q_groups, key_groups, u = grouped(q, keys, w[:, None])
        return _maximum(q_groups, key_groups, u, self._tile(q, keys, causal)).reshape(q.shape[:2])

    def _tile(self, q, keys, causal):
        n, m = q.shape[1], keys.shape[-2]
        interpret = jax.default_backend() == "cpu" if self.interpret is None else self.interpret
        query = self.query_block or max(16, min(128, pl.next_power_of_2(n)))
        key = self.key_block or max(16, min(32, pl.next_power_of_2(m)))
        return Tile(query, key, n if causal else None, interpret)


class Tile(NamedTuple):
    """Sizes of the kernel's blocks; `causal` is n if token i sees keys j <= i."""

    query: int
    key: int
    causal: int | None
    interpret: bool

    def derivative(self) -> tiles.Shape:
        side = 512 if self.interpret else 2048
        return tiles.Shape((side, side), (side, side), self.causal)


# Sums over groups (G, r, k), (G, m, k), (G, m, e), as in `tiles`, each with the derivative that `tiles` has.


@partial(jax.jit, static_argnames="tile", inline=True)
def _log_mean(q, keys, u, tile: Tile):
    @jax.custom_jvp
    def run(q, keys, u):
        return tiles.over_groups(forward, q, keys, u)

    def forward(q, keys, u):
        # Base 2, which is the hardware's. Where no key counts the mass is 0, whatever was summed.
        live = u[..., -1] > 0
        total, top = _launch(_exponentials, q * jnp.asarray(LOG2E, q.dtype), keys, u, tile, live=live)
        total = jnp.where(_met(top)[..., None], total, 0)
        mass = total[..., -1]
        return top * jnp.asarray(LN2, q.dtype) + jnp.log(mass), total[..., :-1] / mass[..., None]

    @run.defjvp
    def rule(primals, tangents):
        log_mass, mean = run(*primals)
        moved = tiles.tangent(exp, (*primals, log_mass), (*tangents, None), tile.derivative())
        return (log_mass, mean), (moved[..., -1], moved[..., :-1] - mean * moved[..., -1:])

    return run(q, keys, u)


@partial(jax.jit, static_argnames=("phi", "tile"), inline=True)
def _weighted_sum(phi: Callable, q, keys, u, shift, tile: Tile):
    @jax.custom_jvp
    def run(q, keys, u, shift):
        return tiles.over_groups(forward, q, keys, u, shift)

    def forward(q, keys, u, shift):
        return _launch(partial(_values, phi), q, keys, u, tile, shift=shift)[0]

    @run.defjvp
    def rule(primals, tangents):
        return run(*primals), tiles.tangent(phi, primals, tangents, tile.derivative())

    return run(q, keys, u, shift)


@partial(jax.jit, static_argnames="tile", inline=True)
def _maximum(q, keys, w, tile: Tile):
    """The largest score, and the mean of the derivatives of those that reach it, as that of `jnp.max`."""

    @jax.custom_jvp
    def run(q, keys, w):
        return tiles.over_groups(forward, q, keys, w)

    def forward(q, keys, w):
        top = _launch(_largest, q, keys, w[..., :0], tile, live=w[..., 0] > 0)[1]
        return jnp.where(_met(top), top, float(jnp.finfo(q.dtype).min))

    @run.defjvp
    def rule(primals, tangents):
        return jax.jvp(lambda q, keys, w: tiles.maximum(q, keys, w[..., 0] > 0, tile.derivative()), primals, tangents)

    return run(q, keys, w)


# The kernel. Arrays lie with their columns as rows, (G, k, r), so that a thread's neighbours read its memory's neighbours.


def _launch(body, q, keys, u, tile: Tile, *, live=None, shift=None):
    """Totals (G, r, e) and maxima (G, r) that `body` reaches over all keys, for every block of queries of every group.

    `live` keys count; `shift` is subtracted from the scores. Both enter as what a score starts from, at no cost.
    Keys are filled up by the last of them with no weight, so that no `phi` sees a score that is not genuine.
    """
    (G, r, _), m, e = q.shape, keys.shape[1], u.shape[-1]
    hidden = _hidden(q.dtype)
    row = jnp.zeros((G, m), q.dtype) if live is None else jnp.where(live, 0, jnp.asarray(hidden, q.dtype))
    row = jnp.pad(row, [(0, 0), (0, -m % tile.key)], constant_values=0 if live is None else hidden)
    column = jnp.zeros((G, r), q.dtype) if shift is None else -shift
    column = jnp.pad(column, [(0, 0), (0, -r % tile.query)], mode="edge")
    queries, keys = _columns(q, tile.query, "edge"), _columns(keys, tile.key, "edge")
    values = _columns(u if e else row[..., :m, None], tile.key, "constant")  # an array of no width cannot be passed
    wide = values.shape[1]
    whole = lambda a: pl.BlockSpec((None, *a.shape[1:]), lambda g, i: (g,) + (0,) * (a.ndim - 1))  # noqa: E731
    block = lambda *lead: pl.BlockSpec((None, *lead, tile.query), lambda g, i: (g, *[0] * len(lead), i))  # noqa: E731
    total, top = pl.pallas_call(
        partial(body, tile=tile, count=row.shape[1] // tile.key),
        grid=(G, column.shape[1] // tile.query),
        in_specs=[block(queries.shape[1]), block(), whole(keys), whole(values), whole(row)],
        out_specs=[block(wide), block()],
        out_shape=[
            jax.ShapeDtypeStruct((G, wide, column.shape[1]), q.dtype),
            jax.ShapeDtypeStruct(column.shape, q.dtype),
        ],
        compiler_params=triton.CompilerParams(num_warps=max(1, tile.query // 64), num_stages=2),
        interpret=tile.interpret,
        name="attnflow_sums",
    )(queries, column, keys, values, row)
    return jnp.swapaxes(total[:, :e, :r], -1, -2), top[:, :r]


def _exponentials(q_ref, column_ref, keys_ref, values_ref, row_ref, total_ref, top_ref, *, tile, count):
    """Sums of 2^(s - top) u with the running maximum: what was summed shrinks whenever the maximum rises."""

    def step(j, carry):
        top, total = carry
        s = scores(j)
        new = jnp.maximum(top, jnp.max(s, axis=0))
        shrink = jnp.exp2(top - new)
        total = jax.tree.map(lambda a: a * (shrink if a.ndim == 1 else shrink[None]), total)
        return new, _add(total, jnp.exp2(s - new[None]), values_ref, _at(j, tile))

    places = _places(tile)
    scores = _scores(q_ref, column_ref, keys_ref, row_ref, places, tile)
    start = jnp.full(tile.query, _hidden(q_ref.dtype), q_ref.dtype), _zeros(values_ref, tile)
    top, total = _walk(step, start, places, tile, count)
    _store(total_ref, total)
    top_ref[...] = top


def _values(phi, q_ref, column_ref, keys_ref, values_ref, row_ref, total_ref, top_ref, *, tile, count):
    """Sums of phi(s) u; what is hidden from a causal query has no value, whatever phi is."""

    def step(j, total):
        s = scores(j)
        if places is None:
            return _add(total, phi(s), values_ref, _at(j, tile))
        seen = _seen(j, places, tile)
        return _add(total, jnp.where(seen, phi(jnp.where(seen, s, 0)), 0), values_ref, _at(j, tile))

    places = _places(tile)
    scores = _scores(q_ref, column_ref, keys_ref, row_ref, places, tile)
    _store(total_ref, _walk(step, _zeros(values_ref, tile), places, tile, count))
    top_ref[...] = jnp.zeros(tile.query, q_ref.dtype)


def _largest(q_ref, column_ref, keys_ref, values_ref, row_ref, total_ref, top_ref, *, tile, count):
    places = _places(tile)
    scores = _scores(q_ref, column_ref, keys_ref, row_ref, places, tile)
    start = jnp.full(tile.query, _hidden(q_ref.dtype), q_ref.dtype)
    top_ref[...] = _walk(lambda j, top: jnp.maximum(top, jnp.max(scores(j), axis=0)), start, places, tile, count)
    _store(total_ref, _zeros(values_ref, tile))


def _scores(q_ref, column_ref, keys_ref, row_ref, places, tile):
    """The function of j that gives the scores of key block j, (key, query); hidden keys have about `_hidden`."""
    k = q_ref.shape[0]
    columns = [q_ref[c, :] for c in range(k)] if k <= NARROW else None
    queries = q_ref[...] if k > NARROW else None
    shift = column_ref[...]

    def scores(j):
        at = _at(j, tile)
        s = row_ref[at][:, None] + shift[None]
        if columns is None:
            s = s + pl.dot(keys_ref[:, at], queries, trans_a=True, precision=lax.Precision.HIGHEST)
        else:
            for c, column in enumerate(columns):
                s = s + keys_ref[c, at][:, None] * column[None]
        return s if places is None else jnp.where(_seen(j, places, tile), s, _hidden(s.dtype))

    return scores


def _add(total, coefficients, values_ref, at):
    """`total` and the sum of coefficients times values over the keys of a block."""
    if isinstance(total, tuple):
        rows = (values_ref[c, at] for c in range(len(total)))
        return tuple(a + jnp.sum(v[:, None] * coefficients, axis=0) for a, v in zip(total, rows, strict=True))
    return total + pl.dot(values_ref[:, at], coefficients, precision=lax.Precision.HIGHEST)


def _zeros(values_ref, tile):
    wide, dtype = values_ref.shape[0], values_ref.dtype
    if wide <= NARROW:
        return tuple(jnp.zeros(tile.query, dtype) for _ in range(wide))
    return jnp.zeros((wide, tile.query), dtype)


def _store(ref, total):
    if not isinstance(total, tuple):
        ref[...] = total
        return
    for c, a in enumerate(total):
        ref[c, :] = a


def _walk(step, start, places, tile, count):
    """`step(j, carry)` over the key blocks; causal queries stop where the last of them does."""
    upper = np.int32(count)
    if places is not None:
        upper = jnp.minimum(jnp.max(places) // np.int32(tile.key) + np.int32(1), upper)
    return lax.fori_loop(np.int32(0), upper, step, start)


def _at(j, tile):
    return pl.ds(j * np.int32(tile.key), tile.key)


def _places(tile):
    """Which token each query of a causal block is: heads that share keys follow each other."""
    if tile.causal is None:
        return None
    first = pl.program_id(1) * np.int32(tile.query)
    return lax.rem(first + lax.iota(np.int32, tile.query), jnp.full(tile.query, tile.causal, np.int32))


def _seen(j, places, tile):
    keys = j * np.int32(tile.key) + lax.iota(np.int32, tile.key)
    return keys[:, None] <= places[None]


def _columns(a, block, mode):
    """Columns as rows (G, k, n), n filled up to whole blocks and k, when wide, to a power of two."""
    wide = a.shape[-1]
    a = jnp.pad(a, [(0, 0), (0, -a.shape[1] % block), (0, 0)], mode=mode)
    fill = 0 if wide <= NARROW else pl.next_power_of_2(wide) - wide
    return jnp.swapaxes(jnp.pad(a, [(0, 0), (0, 0), (0, fill)]), -1, -2)


def _hidden(dtype) -> float:
    """The score of a key that does not count: genuine scores added to it neither leave the range nor come back."""
    return float(jnp.finfo(dtype).min) / 4


def _met(top):
    """Whether a maximum is that of a key that counts."""
    return top > _hidden(top.dtype) / 2


def _by_platform(phi, dtype) -> bool:
    """Whether phi chooses its arithmetic by platform, which a kernel for one platform cannot hold."""
    return "platform_index" in str(jax.make_jaxpr(phi)(jnp.zeros((), dtype)))
