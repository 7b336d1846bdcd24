r"""Radial dominance along the flow: which heads' energies rise, and until when, on clouds of random tokens."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from . import observe, sphere
from .attention import Exponential
from .constrained import AbstractSymmetricHeads, frobenius, overlaps
from .field import AttentionField
from .heads import AlignedHeads
from .reduce import Dense
from .solve import solve

CONDITIONS = ("exact", "sharp", "condition8")
FELL = 1e-8  # of a log-energy between two frames: a fall, not the solver's error
LOST = 1e-9  # a margin below -LOST times the largest of its run is a loss, not rounding
Symmetric = AlignedHeads | AbstractSymmetricHeads


def relative_margins(field: AttentionField, x: Float[Array, "n d"], condition: str = "exact") -> Array:
    r"""The margin of one condition on a scale of its own, in [-1, 1]; its sign is that of `observe.dominance_margins`.

    "exact" (H,): the cosine in $L^2(w)$ between $P f^h$ and the velocity. "sharp" and "condition8" (H, n): (a - b)/(a + b) for
    the two sides a >= b of the condition. 0 where everything rests. A scale-free margin cannot be bettered by slow or weak heads.
    """
    f = field.outputs(x)
    tangent = jax.vmap(lambda y: sphere.project(x, y))(f)
    square = jnp.sum(tangent**2, axis=-1)
    if condition == "exact":
        w, velocity = field.token_weights(x), jnp.sum(tangent, axis=0)
        inner = jnp.einsum("hnd,nd,n->h", tangent, velocity, w)
        scale = (square @ w) * (jnp.sum(velocity**2, axis=-1) @ w)
        return _ratio(inner, jnp.sqrt(jnp.where(scale > 0, scale, 1)), scale > 0)
    shadow = jnp.abs(jnp.einsum("hnd,nd->hn", f, x))
    own = shadow if condition == "sharp" else sphere.safe_norm(f)
    asked = own * (jnp.sum(shadow, axis=0, keepdims=True) - shadow)
    return _ratio(square - asked, square + asked, square + asked > 0)


def _ratio(a, b, good):
    return jnp.where(good, a / jnp.where(good, b, 1), 0)


class Clouds(eqx.Module):
    r"""Batches (betas, tokens): beta stratified in its logarithm, uniform tokens; `gathered` ones are drawn towards a point.

    A gathered cloud is $x \propto s\,m + (1 - s)\,u$ with one uniform m and a uniform s for all its tokens u.
    """

    n: int = eqx.field(static=True)
    d: int = eqx.field(static=True)
    count: int = eqx.field(static=True)
    beta: Float[Array, "2"]
    gathered: bool = eqx.field(static=True, default=False)

    def __call__(self, key):
        beta_key, token_key, centre_key, share_key = jr.split(key, 4)
        place = (jnp.arange(self.count, dtype=self.beta.dtype) + jr.uniform(beta_key, (self.count,))) / self.count
        beta = self.beta[0] * (self.beta[1] / self.beta[0]) ** place
        x = jax.vmap(lambda k: sphere.uniform(k, self.n, self.d))(jr.split(token_key, self.count))
        if self.gathered:
            share = jr.uniform(share_key, (self.count, 1, 1))
            centre = sphere.uniform(centre_key, self.count, self.d)[:, None]
            x = sphere.retract(share * centre + (1 - share) * x)
        return beta, x


@dataclasses.dataclass(frozen=True)
class Survey:
    """Heads along the flow of L clouds: `betas` (L,), `times` (T,), worst margins over heads and tokens by condition (L, T),
    `log_energies` (L, T, H), mean `cosine` (L, T); `strengths` (H,) Frobenius norms, `overlaps` (H, H)."""

    betas: np.ndarray
    times: np.ndarray
    margins: dict[str, np.ndarray]
    log_energies: np.ndarray
    cosine: np.ndarray
    strengths: np.ndarray
    overlaps: np.ndarray

    def first_loss(self, condition: str = "exact") -> np.ndarray:
        """Time (L,) of the first frame with a negative margin ("energy": the frame before which some E_h fell); inf if none.

        A frame that the flow did not reach counts as lost; margins that are negative by rounding do not.
        """
        lost = fell(self.log_energies) if condition == "energy" else negative(self.margins[condition])
        return first(self.times, lost)

    def share_lost(self, horizon: float, condition: str = "exact") -> float:
        """Share of the clouds with a loss at or before `horizon`."""
        return float(np.mean(self.first_loss(condition) <= horizon * (1 + 1e-9)))


def negative(margins: np.ndarray) -> np.ndarray:
    """Which margins (..., T) are lost: not reached, or negative by more than rounding."""
    return ~(margins >= -LOST * np.nanmax(np.abs(margins), axis=-1, keepdims=True))


def fell(log_energies: np.ndarray) -> np.ndarray:
    """Frames (..., T) before which the log-energy of some head (..., T, H) fell, or was not reached."""
    held = np.diff(log_energies, axis=-2) >= -FELL
    return np.logical_not(np.concatenate([np.ones_like(held[..., :1, :]), held], axis=-2).all(axis=-1))


def first(times: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """Time of the first frame (..., T) that is lost; inf if none."""
    return np.where(lost.any(axis=-1), times[lost.argmax(axis=-1)], np.inf)


def survey(
    heads: Symmetric,
    *,
    n: int,
    longest: float,
    key: PRNGKeyArray,
    beta: tuple[float, float] = (0.5, 2.0),
    clouds: int = 64,
    frames: int = 81,
    attention: Callable = Exponential,
) -> Survey:
    """Follow `clouds` clouds of n uniform tokens up to the time `longest`, beta evenly spread (in its logarithm) over its interval."""
    draw = Clouds(n, heads.matrix.shape[-1], clouds, jnp.asarray([float(b) for b in beta]))
    times = jnp.linspace(0.0, float(longest), frames)
    betas, margins, energies, cosine = _surveyed(attention, plain(heads), draw, key, times)
    return Survey(
        np.asarray(betas),
        np.asarray(times),
        {name: np.asarray(margins[name]) for name in CONDITIONS},
        np.asarray(energies),
        np.asarray(cosine),
        np.asarray(frobenius(heads.matrix)),
        np.asarray(overlaps(heads)),
    )


@eqx.filter_jit
def _surveyed(attention, heads, draw, key, times):
    betas, clouds = draw(key)

    def worst(field, x):
        condition8, sharp, exact = observe.dominance_margins(field, x)
        return {"exact": jnp.min(exact), "sharp": jnp.min(sharp), "condition8": jnp.min(condition8)}

    def one(lane):
        beta, x = lane
        field = AttentionField(heads, attention(beta), reduction=Dense())
        seen = {"margins": worst, "energies": observe.head_log_energies, "cosine": observe.mean_cosine}
        values = solve(field, x, times, observe=seen, rtol=1e-7, atol=1e-10, max_steps=8192, throw=False).values
        return values["margins"], values["energies"], values["cosine"]

    return betas, *jax.lax.map(one, (betas, clouds))


def plain(heads: Symmetric) -> AlignedHeads:
    """The heads as written-out symmetric matrices, so that a flow does not decompose them at every step."""
    return heads.aligned() if isinstance(heads, AbstractSymmetricHeads) else heads
