"""Checks at the public edge: each error names the argument, the rule and the remedy. Traced values pass unchecked."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np

from . import memory, observe, sphere
from .attention import Exponential, Softmax, concrete
from .field import AttentionField
from .reduce import Dense, Differences


def checked_tokens(x0, *, on_sphere: bool = True, normalize: bool = False):
    """Initial tokens (n, d) as a floating array; on the sphere, rows are made unit to rounding."""
    wide = getattr(x0, "dtype", None) == np.float64 and not jax.config.read("jax_enable_x64")
    if wide:
        raise ValueError(
            "`x0` is float64 but JAX computes in float32: add `jax.config.update('jax_enable_x64', True)` "
            "before the first computation, or pass x0.astype('float32')."
        )
    x = jnp.asarray(x0)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"`x0` must have shape (n, d) with n, d >= 1, got {x.shape}.")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"`x0` must be floating, got {x.dtype}; write x0.astype(float).")
    if x.dtype.itemsize < 4:
        raise ValueError(f"`x0` must be float32 or float64, got {x.dtype}: norms would be off by 1e-2.")
    if concrete(x):
        _check_rows(np.asarray(x), on_sphere, normalize)
    return sphere.retract(x) if on_sphere else x


def _check_rows(x, on_sphere, normalize):
    bad = np.flatnonzero(~np.isfinite(x).all(axis=1))
    if bad.size:
        raise ValueError(f"`x0` must be finite; row {bad[0]} is {x[bad[0]]}.")
    if not on_sphere:
        return
    length = np.linalg.norm(x.astype(np.float64), axis=1)
    if (length == 0).any():
        raise ValueError(f"`x0` has no direction in row {np.argmin(length)}: it is zero.")
    worst = int(np.argmax(np.abs(length - 1)))
    allowed = 1e-6 if x.dtype == np.float64 else 1e-3
    if abs(length[worst] - 1) > allowed and not normalize:
        raise ValueError(
            f"`x0` must lie on the unit sphere to {allowed:g}; row {worst} has norm {length[worst]:.6g}. "
            "Pass normalize=True to project it."
        )


def checked_times(ts, dtype):
    """Observation times (T,) in the dtype of the tokens: monotone, finite, repeats allowed, either direction."""
    values = jnp.asarray(ts)
    if values.ndim != 1 or values.shape[0] == 0:
        raise ValueError(f"`ts` must have shape (T,) with T >= 1, got {values.shape}.")
    if concrete(values):
        t = np.asarray(values, dtype=np.float64)
        if not np.isfinite(t).all():
            raise ValueError("`ts` must be finite; to run until nothing moves pass `event=at_rest(speed)`.")
        step = np.diff(t)
        if (step > 0).any() and (step < 0).any():
            raise ValueError("`ts` must be sorted (ascending, or descending to run backwards).")
    return values.astype(dtype)


def checked_tolerances(rtol, atol, dtype):
    """Tolerances as arrays, so that a new value does not compile again."""
    for name, value in (("rtol", rtol), ("atol", atol)):
        if concrete(value) and not (np.isfinite(value) and value >= 0):
            raise ValueError(f"`{name}` must be >= 0 and finite, got {value}.")
    floor = 4 * float(jnp.finfo(dtype).eps)
    if concrete(rtol) and concrete(atol):
        if rtol == 0 and atol == 0:
            raise ValueError("`rtol` and `atol` must not both be 0.")
        if 0 < rtol < floor:
            raise ValueError(
                f"`rtol` = {float(rtol):g} is below {floor:.1e}, the finest that {jnp.dtype(dtype).name} resolves; "
                "use float64 tokens (`jax.config.update('jax_enable_x64', True)`) or a larger rtol."
            )
    return jnp.asarray(rtol, dtype), jnp.asarray(atol, dtype)


def warn_unless_resolved(field, x0):
    """Warn where weighted nodes on the circle are too sparse for the kernel: the run would leave its metastable state early."""
    weighted = isinstance(field, AttentionField) and field.weights is not None and x0.shape[1] == 2
    if not (weighted and isinstance(field.attention, (Softmax, Exponential))):
        return
    ratio = observe.resolution(field, x0)
    if concrete(ratio) and float(ratio) > 1:
        warnings.warn(
            f"node spacing is {float(ratio):.2g} times the resolved spacing 0.3/sqrt(beta |B^T x|): a mean field on these "
            "nodes leaves its metastable state early. Use more nodes, or refine them where mass is attended.",
            stacklevel=3,
        )


LARGE = 2**24  # bytes below which nothing is estimated


def refuse_what_cannot_fit(field, x0, frames: int, seen: dict) -> None:
    """MemoryError before a solve whose saved frames and score matrices would not fit; costs nothing for small runs."""
    if not concrete(x0):
        return
    (n, d), size = x0.shape, x0.dtype.itemsize
    scores = 0
    if isinstance(field, AttentionField):
        method, H = field.method(x0), field.heads.count
        scores = (
            n * n * (3 * H + d)
            if isinstance(method, Differences)
            else 3 * H * n * n
            if isinstance(method, Dense)
            else 0
        )
    if size * (scores + frames * n * max(d, n if seen else 0)) < LARGE:
        return
    shapes = jax.eval_shape(lambda f, x: {name: see(f, x) for name, see in seen.items()}, field, x0)
    saved = {
        f"`{name}`": frames * sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(s)) for name, s in shapes.items()
    }
    remedy = "use `Blocked()` in place of dense scores, fewer `ts`, or observables in place of saved tokens"
    memory.refuse_more_than(memory.available(), {"scores": scores * size, **saved}, remedy)
