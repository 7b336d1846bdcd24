"""Decisions that stay decisions under vmap: all lanes together take the branch that the most demanding lane needs.

`lax.cond` with a mapped predicate runs both branches in every lane, which costs an exact sum per evaluation; reduced
over the lanes first, the predicate is not mapped and only one branch runs.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float

from .powers import blocks

ROWS = 256  # queries that are summed exactly at a time


@custom_vmap
def _largest(x):
    return x


@_largest.def_vmap
def _over_lanes(axis_size, in_batched, x):
    return _largest(jnp.max(x, axis=0)), False


def largest(x: Array) -> Array:
    """The scalar x, or its maximum over all lanes of the surrounding vmaps; without a gradient."""
    return _largest(jax.lax.stop_gradient(x))


def anywhere(flags: Array) -> Array:
    """Whether any flag is true in any lane."""
    return largest(jnp.any(flags).astype(jnp.int32)) > 0


def exact_where(bad: Bool[Array, "H n"], answer, exact: Callable, q: Float[Array, "H n k"]):
    """`answer` with the rows marked `bad` computed by `exact(q (1, b, k))`, as few blocks of rows as there are such rows.

    Where they are more than a quarter of many rows, all rows are computed at once, at the full speed of `exact`.
    """
    count = largest(jnp.sum(bad))
    size = min(ROWS, bad.size)

    def repaired():
        order = jnp.argsort(~bad.reshape(-1))  # stable: bad rows first

        @jax.checkpoint
        def some(start_and_rows):
            start, rows = start_and_rows
            like = jax.eval_shape(exact, rows[None])
            zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
            return jax.lax.cond(start < count, lambda: exact(rows[None]), lambda: zeros)

        rows = blocks(q.reshape(-1, q.shape[-1])[order], size)
        fixed = jax.lax.map(some, (size * jnp.arange(rows.shape[0]), rows))

        def put(new, old):
            new = new.reshape(-1, *old.shape[2:])[: bad.size]
            back = jnp.zeros_like(new).at[order].set(new, unique_indices=True).reshape(old.shape)
            return jnp.where(bad.reshape(*bad.shape, *(1,) * (old.ndim - 2)), back, old)

        return jax.tree.map(put, fixed, answer)

    if bad.size <= 16 * ROWS:
        return jax.lax.cond(count > 0, repaired, lambda: answer)
    needed = (count > 0).astype(jnp.int32) + (4 * count > bad.size).astype(jnp.int32)
    return jax.lax.switch(needed, [lambda: answer, repaired, lambda: exact(q)])
