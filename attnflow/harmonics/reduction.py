"""The reduction by harmonics: what degree a tolerance needs, and the exact sum where the series is not good enough."""

import functools
import math
from types import ModuleType

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..reduce import AbstractReduction, Blocked
from ..sphere import retract, safe_norm
from . import circle, sphere
from .agree import exact_where, largest

SERIES: dict[int, ModuleType] = {2: circle, 3: sphere}
TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
CHOSEN = 1e-12  # tolerance of the series that a field chooses by itself
THINNEST = 1e-6  # the tolerance is met by the series where the tokens are denser than this times uniform
REFUSED = "`Harmonics` sums over all tokens at once; a causal field needs `Blocked()`."


def truncation_error(degree: int, radius: float, *, d: int) -> float:
    r"""Largest error of $e^{\langle q, u\rangle - |q|}$, $|q|$ = `radius`, u on $S^{d-1}$, from a series cut after `degree`; d = 2, 3."""
    return _series(d).truncation_error(degree, radius)


@functools.lru_cache(maxsize=256)
def degree_for(tolerance: float, radius: float, *, d: int, eps: float = float(np.finfo(np.float64).eps)) -> int:
    """The smallest even degree whose truncation keeps the tolerance wherever tokens are not thinner than `THINNEST` x uniform."""
    allowed = _allowed(tolerance, radius, d, eps)
    degree = 4
    while truncation_error(degree, radius, d=d) > allowed:
        degree += 2
    return degree


class Harmonics(AbstractReduction):
    r"""O(n) sums over tokens of $S^1$ (Fourier-Bessel) and $S^2$ (spherical harmonics), to a stated relative error.

    The log-mass has absolute error `tolerance`, the mean `tolerance` times the largest value. A series is accurate
    against the kernel's maximum $e^{|q|}$: a query whose mass is too small beside it for the tolerance (few tokens near
    $q/|q|$), or that is too long for the degree, is summed by `exact` at O(n) each, and so is all where keys are not unit
    vectors. The answer is right in any case; only its cost depends on the tokens. Derivatives are those along the
    sphere: a key counts as its direction.

    ReLU sums over the circle are exact, by sorting. Other sums and the maximum are those of `exact`; so are heads with keys
    of their own.

    **Arguments:**

    - `tolerance`: default 1e-9 in float64, 1e-4 in float32. Not below 64 rounding units.
    - `radius`: a bound on $|q|$, for example $\beta\max_h|B_h|$, from which the degree follows. Without it the degree comes
      from the queries: at once outside `jit`, else by a choice between a few compiled degrees.
    - `block`: tokens at a time; None chooses.
    - `exact`: the reduction to fall back on.

    **Errors:** ValueError for causal fields, for tokens of other dimensions, for a tolerance that the dtype cannot meet.
    """

    tolerance: float | None = eqx.field(static=True, default=None)
    radius: float | None = eqx.field(static=True, default=None)
    block: int | None = eqx.field(static=True, default=None)
    exact: AbstractReduction = Blocked()

    def log_mean(self, q, keys, values, w, *, causal=False):
        if causal:
            raise ValueError(REFUSED)
        if keys.ndim == 3:
            return self.exact.log_mean(q, keys, values, w)
        d, eps = keys.shape[-1], float(jnp.finfo(q.dtype).eps)
        series, tolerance = _series(d), self._tolerance(q.dtype)
        radius = self.radius
        if radius is None and not isinstance(q, Tracer):
            radius = float(jnp.max(jnp.linalg.norm(q, axis=-1), initial=0))
        if radius is None:
            degrees, allowed = series.DEGREES, eps
        elif series.truncation_error(series.LARGEST, radius) > _allowed(tolerance, radius, d, eps):
            return self.exact.log_mean(q, keys, values, w)
        else:
            degrees, allowed = (degree_for(tolerance, radius, d=d, eps=eps),), _allowed(tolerance, radius, d, eps)

        u = retract(keys)
        tokens = (u, None if values is keys else values, w)
        length = jax.lax.stop_gradient(jnp.linalg.norm(q, axis=-1))
        reach = jnp.asarray([_reach(degree, allowed, d) for degree in degrees], q.dtype)
        h, scale = self._sums(series, degrees, reach, tokens, q, length)

        share = jax.lax.stop_gradient(h[..., 0] * jnp.exp(scale - length)) / jnp.sum(w)
        off = jnp.max(jnp.where(w > 0, jnp.abs(safe_norm(keys) - 1), 0), initial=0)
        bad = (
            (share < (allowed + 4 * eps) / tolerance)
            | (length > reach[-1])
            | (off * length > tolerance + 4 * eps * length)
        )
        bad = jax.lax.stop_gradient(bad)
        mass = jnp.where(bad, 1, h[..., 0])
        series_answer = scale + jnp.log(mass), h[..., 1:] / mass[..., None]
        return exact_where(bad, series_answer, lambda q: self.exact.log_mean(q, keys, values, w), q)

    def sum(self, phi, q, keys, values, w, *, shift=None, causal=False):
        if causal:
            raise ValueError(REFUSED)
        if phi is jax.nn.relu and shift is None and keys.ndim == 2 and values.ndim == 2 and keys.shape[-1] == 2:
            return circle.half_circle_sums(keys, w[:, None] * values, q)
        return self.exact.sum(phi, q, keys, values, w, shift=shift)

    def maximum(self, q, keys, w, *, causal=False):
        if causal:
            raise ValueError(REFUSED)
        return self.exact.maximum(q, keys, w)

    def _tolerance(self, dtype):
        eps, name = float(jnp.finfo(dtype).eps), str(dtype)
        if name not in TOLERANCE:
            raise ValueError(f"`Harmonics` needs float32 or float64 tokens, got {name}.")
        tolerance = TOLERANCE[name] if self.tolerance is None else self.tolerance
        if not 64 * eps <= tolerance < 1:
            raise ValueError(f"`tolerance` must lie in [{64 * eps:.1e}, 1) in {name}, got {tolerance}.")
        return tolerance

    def _sums(self, series, degrees, reach, tokens, q, length):
        def sums(degree):
            return lambda tokens, q: series.exponential_sums(*tokens, q, degree=degree, block=self.block)

        if len(degrees) == 1:
            return sums(degrees[0])(tokens, q)

        needed = jnp.sum(largest(jnp.max(length, initial=0)) > reach[:-1])
        return jax.lax.switch(needed, [sums(degree) for degree in degrees], tokens, q)


def pays_from(d: int, radius: float | None) -> int | None:
    """Tokens from which the series at the tolerance `CHOSEN` beats exact sums over them on a CPU, None for never.

    Without a radius: tokens from which even a series of the largest degree in vain costs a few percent of the exact sums.
    """
    if d not in SERIES:
        return None
    if radius is None:
        return {2: 2**17, 3: 2**20}[d]
    eps, radius = float(np.finfo(np.float64).eps), _rounded(radius)
    if SERIES[d].truncation_error(SERIES[d].LARGEST, radius) > _allowed(CHOSEN, radius, d, eps):
        return None
    degree = degree_for(CHOSEN, radius, d=d)
    return max(2**12, 16 * degree) if d == 2 else max(2**13, 3 * degree**2)


def suits(n: int, d: int, dtype, *, radius: float | None = None) -> Harmonics | None:
    """`Harmonics` where it is faster than exact sums over n unit tokens and as accurate as a solve can tell, else None.

    The radius is rounded up, so that neighbouring temperatures share a program.
    """
    if str(jnp.dtype(dtype)) != "float64" or jax.default_backend() != "cpu":
        return None
    smallest = pays_from(d, radius)
    if smallest is None or n < smallest:
        return None
    return Harmonics(CHOSEN, radius=None if radius is None else _rounded(radius))


def _rounded(radius):
    """The next power of 2^(1/4)."""
    return 2.0 ** (math.ceil(4 * math.log2(max(radius, 1.0)) + 1e-9) / 4)


def _series(d):
    if d not in SERIES:
        raise ValueError(f"`Harmonics` is for tokens of dimension 2 or 3, got d = {d}; use `Blocked()`.")
    return SERIES[d]


def _allowed(tolerance, radius, d, eps):
    return max(tolerance * THINNEST * _series(d).uniform_share(radius), eps)


@functools.lru_cache(maxsize=256)
def _reach(degree: int, allowed: float, d: int) -> float:
    """The largest radius at which a series of this degree is accurate to `allowed`."""
    low, high = 0.0, float(degree) ** 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if truncation_error(degree, middle, d=d) <= allowed else (low, middle)
    return low
