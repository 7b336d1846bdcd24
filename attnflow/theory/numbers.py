"""What the closed forms share: real numbers, checks of their domain, and bracketed roots."""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..attention import concrete

Real = jax.typing.ArrayLike | Sequence[float]


def real(x: Real) -> Array:
    """`x` in double precision where that is switched on: the closed forms compute in it whatever their arguments have."""
    return jnp.asarray(x, dtype=jnp.result_type(float))


def checked(name: str, x: Real, good: Callable, rule: str) -> Array:
    """`x` as a real array; ValueError where `good` is false, at run time where the value is not known yet."""
    x = real(x) if isinstance(x, Sequence) else x
    ok = good(np.asarray(x) if concrete(x) else x)
    if not concrete(ok):
        return eqx.error_if(real(x), ~jnp.all(ok), f"`{name}` must be {rule}.")
    if not np.all(ok):
        raise ValueError(f"`{name}` must be {rule}, got {x}.")
    return real(x)


def positive(name: str, x: Real) -> Array:
    return checked(name, x, lambda a: a > 0, "> 0")


def population(n: Real) -> Array:
    return checked("n", n, lambda a: a >= 1, "a number of tokens >= 1")


def root(f: Callable, lower: Array, upper: Array) -> Array:
    """The x in (lower, upper), elementwise, where f turns from negative to positive; differentiable in what f closes over.

    Bisection to the last bit and three Newton steps kept inside the bracket; derivatives are those of the implicit function.
    """

    def halve(_, bracket):
        a, b = bracket
        middle = (a + b) / 2
        below = f(middle) < 0
        return jnp.where(below, middle, a), jnp.where(below, b, middle)

    def solve(f, _):
        a, b = jax.lax.fori_loop(0, 64, halve, (lower, upper))
        x = (a + b) / 2
        for _ in range(3):
            value, slope = jax.jvp(f, (x,), (jnp.ones_like(x),))
            step = jnp.where(slope > 0, value / jnp.where(slope > 0, slope, 1), 0)
            x = jnp.clip(x - step, lower, upper)
        return x

    lower, upper = jax.lax.stop_gradient(jnp.broadcast_arrays(lower, upper))
    return jax.lax.custom_root(f, lower, solve, lambda g, y: y / g(jnp.ones_like(y)))
