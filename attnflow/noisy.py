r"""A flow with noise: `diffuse` follows $dx_i = \mathrm{field}_i(x)\,dt + \sqrt{2\kappa}\,P_{x_i}\circ dW_i$ on the sphere."""

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from . import sphere
from .attention import concrete
from .field import AbstractField
from .solve import Observable, fixed_steps, watched
from .trajectory import Trajectory
from .validate import checked_times, checked_tokens


def diffuse(
    field: AbstractField,
    x0: ArrayLike,
    ts: ArrayLike,
    *,
    key: PRNGKeyArray,
    temperature: ArrayLike,
    step: float,
    observe: Mapping[str, Observable] | None = None,
    save_tokens: bool = False,
    normalize: bool = False,
) -> Trajectory:
    r"""Tokens driven by the field and by Brownian motion on the sphere, observed at `ts` (T,).

    The generator is $\langle\mathrm{field}, \nabla\rangle + \kappa\Delta$ with $\kappa$ the `temperature`; standard Brownian
    motion has 1/2. Geometric Euler-Maruyama: with $\xi$ Gaussian, $x \leftarrow (x + v)/|x + v|$,
    $v = h\,\mathrm{field}(x) + \sqrt{2\kappa h}\,P_x\xi$. The retraction supplies the drift $-\kappa(d-1)x$ by which the Ito form
    differs from the Stratonovich form. Weak order 1 in h.

    The key, the times and the step fix the path; other steps give other paths. Betas, temperatures, keys and times share one
    compilation as long as the numbers of steps agree. Gradients are those along the path; that in the temperature is infinite at 0.

    **Arguments:**

    - `ts`: known numbers, ascending: every interval is divided into equal steps of at most `step`.
    - `observe`, `save_tokens`, `normalize`: as in `solve`. Observables see unit tokens.

    **Errors:** ValueError naming the argument. As with `layers`, a run that is no longer finite says so in `stats["status"]`.
    """
    if not field.on_sphere:
        raise ValueError("`field` must keep tokens on the sphere; `flat`, `PreNorm` and `PeriNorm` fields do not.")
    if not (concrete(ts) and concrete(step)):
        raise ValueError("`ts` and `step` must be known numbers: the number of steps is part of the program.")
    if not (np.isfinite(step) and step > 0):
        raise ValueError(f"`step` must be > 0 and finite, got {step}.")
    if concrete(temperature) and not np.all(np.isfinite(temperature) & (np.asarray(temperature) >= 0)):
        raise ValueError(f"`temperature` must be >= 0 and finite, got {temperature}.")
    if jnp.ndim(temperature) != 0:
        raise ValueError(f"`temperature` must be a number, got shape {jnp.shape(temperature)}; vmap over several.")
    x0 = checked_tokens(x0, on_sphere=True, normalize=normalize)
    if x0.shape[1] < 2:
        raise ValueError(f"`x0` must have shape (n, d) with d >= 2 to diffuse, got {x0.shape}.")
    widths = np.diff(np.asarray(ts, np.float64))
    ts = checked_times(ts, x0.dtype)
    if np.any(widths < 0):
        raise ValueError("`ts` must be ascending: noise cannot be run backwards.")
    # Rounding must not add a step: .3/.1 is a hair more than 3.
    counts = np.ceil(widths / float(step) * (1 - 1e-9)).astype(int)
    scale = jnp.asarray(temperature, x0.dtype)
    steps = jnp.asarray(widths / np.maximum(counts, 1), x0.dtype)
    most = int(np.max(counts, initial=0))
    return _diffuse(
        tuple(watched(observe, save_tokens).items()), field, x0, ts, key, scale, steps, jnp.asarray(counts), most
    )


@eqx.filter_jit
def _diffuse(observe, field, x0, ts, key, temperature, steps, counts, most: int):
    def look(x):
        return {name: f(field, x) for name, f in observe}

    size = jnp.sqrt(2 * temperature)

    def move(x, key, h):
        noise = sphere.project(x, jr.normal(key, x.shape, x.dtype))
        y = x + h * field(0.0, x, None) + size * jnp.sqrt(h) * noise
        length = sphere.safe_norm(y, where_zero=1.0)
        return y / length[:, None], jnp.max(jnp.abs(length - 1))

    def interval(carry, frame):
        number, h, count = frame

        def one(carry, k):
            def go(carry):
                x, worst = carry
                y, defect = move(x, jr.fold_in(jr.fold_in(key, number), k), h)
                return y, jnp.maximum(worst, defect)

            return jax.lax.cond(k < count, go, lambda carry: carry, carry), None

        carry, _ = jax.lax.scan(one, carry, jnp.arange(most))
        return carry, look(carry[0])

    start = (x0, jnp.zeros((), x0.dtype))
    (final, worst), values = jax.lax.scan(interval, start, (jnp.arange(len(steps)), steps, counts))
    return fixed_steps(ts, look(x0), values, final, steps=jnp.sum(counts), defect=jax.lax.stop_gradient(worst))
