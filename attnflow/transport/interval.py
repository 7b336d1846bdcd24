"""A number known from both sides."""

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

WIDE = 1e-2  # relative width above which a bare float of an interval warns


class Interval(eqx.Module):
    r"""Certified bounds lower <= W2 <= upper, and how they were found.

    `float(interval)` is the midpoint (error at most half the width); it warns where the bounds did not close. `v in interval`
    asks whether both bounds allow v. Bounds may be arrays: then so are the properties.

    **Arguments:**

    - `lower`, `upper`: the two bounds.
    - `method`, `reason`: which solver found them, and why it stopped there.
    - `exact`: the solver is exact; a width left over is rounding.
    - `converged`: the tolerance asked for was reached.
    - `epsilon`, `iterations`: last regularisation and number of Sinkhorn iterations, where there were any.
    - `quantum`: how far the mass of the heaviest token can move the distance, see `quantisation`; no error of this
      interval, but the resolution of the sample that it measures.
    """

    lower: Any
    upper: Any
    method: str = eqx.field(default="given", static=True)
    reason: str = eqx.field(default="", static=True)
    exact: bool = eqx.field(default=False, static=True)
    converged: Any = True
    epsilon: Any = None
    iterations: Any = None
    quantum: Any = None

    @property
    def value(self):
        """Midpoint."""
        return (self.lower + self.upper) / 2

    @property
    def width(self):
        """upper - lower."""
        return self.upper - self.lower

    @property
    def relative_width(self):
        """Width over the upper bound; 0 where both are 0."""
        xp = jnp if isinstance(self.upper, jax.Array) else np
        return self.width / xp.where(self.upper == 0, 1, self.upper)

    def __contains__(self, value) -> bool:
        return bool(np.all((self.lower <= value) & (value <= self.upper)))

    def __float__(self) -> float:
        if not self.converged or self.relative_width > WIDE:
            warnings.warn(
                f"{self!r} is taken as one number; look at `lower` and `upper`, or ask for a smaller `tolerance`.",
                stacklevel=2,
            )
        return float(self.value)

    def __repr__(self) -> str:
        numbers = (self.lower, self.upper, self.converged)
        if any(isinstance(v, Tracer | jax.ShapeDtypeStruct) for v in numbers):
            return f"Interval(traced, {self.method})"
        if np.ndim(self.lower):
            worst = float(np.max(self.relative_width, initial=0.0))
            return f"Interval({np.shape(self.lower)} values, relative width <= {worst:.1e}, {self.method})"
        spread = f"[{float(self.lower):.9g}, {float(self.upper):.9g}]"
        facts = [spread if self.width > 0 else f"{float(self.lower):.12g}"]
        facts += [f"width {float(self.width):.1e}"] if self.width > 0 else []
        facts += ["exact"] if self.exact else [] if self.converged else ["not converged"]
        facts += [self.method] + ([self.reason] if self.reason else [])
        facts += [f"epsilon {float(self.epsilon):.1e}"] if self.epsilon is not None else []
        facts += [f"{int(self.iterations)} iterations"] if self.iterations is not None else []
        facts += [f"one token's mass moves it by up to {float(self.quantum):.2g}"] if self.quantum is not None else []
        return f"Interval({', '.join(facts)})"
