"""What a theorem check returns: both sides, how far they are apart, and under which hypothesis they should agree."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..attention import concrete
from ..field import AbstractField, AttentionField


class Claim(eqx.Module):
    r"""A statement evaluated: `lhs` relation `rhs`, with `slack` >= 0 where it holds.

    `holds` is one truth for all entries, up to rounding for inequalities; a NaN does not hold. Differentiable in `lhs`, `rhs`
    and `slack`. Where the tokens or heads miss the `hypothesis`, a claim that does not hold contradicts nothing.
    """

    lhs: Float[Array, "*s"]
    rhs: Float[Array, "*s"]
    slack: Float[Array, "*s"]
    holds: Bool[Array, ""]
    hypothesis: str = eqx.field(static=True)
    source: str = eqx.field(static=True)
    relation: str = eqx.field(static=True, default=">=")

    def __repr__(self):
        if not concrete(self.slack):
            return f"Claim({self.source}: traced)"
        verdict = "holds" if bool(self.holds) else "does not hold"
        worst = np.unravel_index(np.argmin(self.slack), self.slack.shape)
        sides = f"{float(self.lhs[worst]):.6g} {self.relation} {float(self.rhs[worst]):.6g}"
        where = "" if self.slack.size == 1 else f" at the worst of {self.slack.size} entries {tuple(map(int, worst))}"
        return f"{self.source}: {verdict}\n  {sides}, slack {float(self.slack[worst]):.3g}{where}\n  needs {self.hypothesis}"


def at_least(lhs, rhs, hypothesis: str, source: str) -> Claim:
    """lhs >= rhs; `holds` forgives 64 rounding units of the larger side."""
    lhs, rhs = _sides(lhs, rhs)
    return Claim(lhs, rhs, lhs - rhs, _nonnegative(lhs - rhs, lhs, rhs), hypothesis, source)


def at_most(lhs, rhs, hypothesis: str, source: str) -> Claim:
    """lhs <= rhs; `holds` forgives 64 rounding units of the larger side."""
    lhs, rhs = _sides(lhs, rhs)
    return Claim(lhs, rhs, rhs - lhs, _nonnegative(rhs - lhs, lhs, rhs), hypothesis, source, "<=")


def equal(lhs, rhs, hypothesis: str, source: str, *, tolerance=None, floor=0.0) -> Claim:
    """lhs = rhs within `tolerance` of the largest entry (default: eps^(5/8), 1.6e-10 in double precision) plus `floor`."""
    lhs, rhs = _sides(lhs, rhs)
    tolerance = float(jnp.finfo(lhs.dtype).eps) ** 0.625 if tolerance is None else tolerance
    size = jnp.max(jnp.maximum(jnp.abs(lhs), jnp.abs(rhs)))
    slack = tolerance * size + floor - jnp.abs(lhs - rhs)
    return Claim(lhs, rhs, slack, jnp.all(slack >= 0), hypothesis, source, "=")


def attention_field(field: AbstractField, theorem: str, heads=None, attention=None) -> Any:
    """The field, or a TypeError that names the hypothesis it misses; `heads`, `attention`: (types, what they mean)."""
    if not isinstance(field, AttentionField):
        raise TypeError(f"{theorem} is about an `AttentionField`, got `{type(field).__name__}`.")
    for part, needed in ((field.heads, heads), (field.attention, attention)):
        if needed is not None and not isinstance(part, needed[0]):
            names = " or ".join(f"`{kind.__name__}`" for kind in np.atleast_1d(needed[0]))
            raise TypeError(f"{theorem} needs {names} ({needed[1]}), got `{type(part).__name__}`.")
    return field


def _sides(lhs, rhs):
    lhs = jnp.asarray(lhs, dtype=jnp.result_type(float) if not hasattr(lhs, "dtype") else lhs.dtype)
    return jnp.broadcast_arrays(lhs, jnp.asarray(rhs, dtype=lhs.dtype))


def _nonnegative(slack, lhs, rhs):
    return jnp.all(slack >= -64 * jnp.finfo(slack.dtype).eps * jnp.maximum(jnp.abs(lhs), jnp.abs(rhs)))
