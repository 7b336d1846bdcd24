"""What the closed forms share: real numbers, checks of their domain, and bracketed roots."""

from collections.abc import Callable, Sequence
from typing import Any

import diffrax as dfx
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
    value = real(x)
    ok = good(np.asarray(x, value.dtype) if concrete(x) else value)
    if not concrete(ok):
        return eqx.error_if(value, ~jnp.all(ok), f"`{name}` must be {rule}.")
    if not np.all(ok):
        bad = np.flatnonzero(~np.atleast_1d(ok))
        got = f"got {x}" if np.size(x) <= 9 else f"which {len(bad)} of {np.size(ok)} are not, first at {bad[0]}"
        raise ValueError(f"`{name}` must be {rule}, {got}.")
    return value


def positive(name: str, x: Real) -> Array:
    return checked(name, x, lambda a: a > 0, "> 0")


def population(n: Real) -> Array:
    return checked("n", n, lambda a: a >= 1, "a number of tokens >= 1")


@eqx.filter_jit
def root(f: Callable, lower: Array, upper: Array, *args: Any) -> Array:
    """The x in (lower, upper), elementwise, where f(x, *args) turns from negative to positive; differentiable in `args`.

    Bisection to the last bit and three Newton steps kept inside the bracket; derivatives are those of the implicit function.
    Compiled once per f: it is a function of a module, and its numbers are arguments.
    """

    def equation(x):
        return f(x, *args)

    def halve(_, bracket):
        a, b = bracket
        middle = (a + b) / 2
        below = equation(middle) < 0
        return jnp.where(below, middle, a), jnp.where(below, b, middle)

    def solve(_, start):
        a, b = jax.lax.fori_loop(0, 64, halve, (lower, upper))
        x = (a + b) / 2
        for _ in range(3):
            value, slope = jax.jvp(equation, (x,), (jnp.ones_like(x),))
            step = jnp.where(slope > 0, value / jnp.where(slope > 0, slope, 1), 0)
            x = jnp.clip(x - step, lower, upper)
        return x

    lower, upper = jax.lax.stop_gradient(jnp.broadcast_arrays(lower, upper))
    return jax.lax.custom_root(equation, lower, solve, lambda g, y: y / g(jnp.ones_like(y)))


@eqx.filter_jit
def integrate(vector_field: Callable, y0: Array, ts: Array, args, why: str) -> Array:
    """y at the increasing times ts, from y0 at time 0, to rounding; `why` says what it means where that takes for ever.

    Compiled once per vector field, like `root`.
    """
    tight = 1e-13 if y0.dtype == jnp.float64 else 1e-6
    solution = dfx.diffeqsolve(
        dfx.ODETerm(vector_field),
        dfx.Dopri8(),
        jnp.zeros_like(ts[-1]),
        ts[-1],
        None,
        y0,
        args,
        saveat=dfx.SaveAt(ts=ts),
        stepsize_controller=dfx.PIDController(rtol=tight, atol=tight * 1e-3, norm=_largest),
        max_steps=16384,
        throw=False,
    )
    return eqx.error_if(solution.ys, solution.result != dfx.RESULTS.successful, why)


def _largest(x):
    return jnp.max(jnp.abs(x))
