"""Powers of complex numbers, and maps over blocks of tokens, for both series."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

HIGHEST = jax.lax.Precision.HIGHEST  # no TF32 in float32 products


def powers(x: Float[Array, " n"], y: Float[Array, " n"], count: int) -> Float[Array, "2 count n"]:
    r"""Real and imaginary parts of $(x + iy)^k$, k < `count`."""

    def step(power, _):
        re, im = power
        return (re * x - im * y, re * y + im * x), power

    return jnp.stack(jax.lax.scan(step, (jnp.ones_like(x), jnp.zeros_like(x)), None, length=count)[1])


def blocks(a: Float[Array, "n ..."], size: int) -> Float[Array, "blocks size ..."]:
    """Rows in blocks of `size`, the last one filled with zeros."""
    return jnp.pad(a, ((0, -a.shape[0] % size), *((0, 0),) * (a.ndim - 1))).reshape(-1, size, *a.shape[1:])


def block_size(n: int, size: int | None) -> int:
    """Blocks that stay in cache on a CPU and fill any other device."""
    if size is None:
        size = 2**11 if jax.default_backend() == "cpu" else 2**17
    return min(n, size)
