r"""Where the layer normalisation sits decides how fast tokens cluster (reconstructed from arXiv 2510.22026).

With $g_i = \sum_h f_i^h$ the head outputs at the unit tokens $u = x/|x|$, one layer adds

- post: $u \leftarrow (u + g)/|u + g|$, the flow on the sphere (`AttentionField`): $1 - \rho$ falls like $e^{-2\Lambda t}$, $\Lambda$ the
  sum of the strengths;
- pre: $x \leftarrow x + g$ (`PreNorm`): at consensus the radius grows like $\Lambda t$, and $1 - \rho$ falls like $(r_0 + \Lambda t)^{-2}$;
- peri: $x \leftarrow x + g/|g|$ (`PeriNorm`): the output is normalised too, the radius grows like t: $(r_0 + t)^{-2}$;
- a normalised output on the sphere (`NormalizedPush`, nGPT), $u \leftarrow (u + \alpha g/|g|)/|\cdot|$: $e^{-2\alpha t}$, whatever the
  strengths.

The laws are those of the linearised flow at consensus of scalar heads under softmax attention. Every field here commutes with
the rotations that commute with its heads.
"""

import abc
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from . import sphere
from .field import AbstractField, AttentionField, Tokens


class _Normalized(AbstractField):
    """Shared: the velocity in terms of the unit tokens and the sum of the head outputs there."""

    inner: AttentionField

    def __check_init__(self):
        if self.inner.flat:
            raise ValueError("`inner` must not be flat: these fields normalise the tokens that its heads see.")

    @property
    def on_sphere(self):
        return False

    @abc.abstractmethod
    def velocity(self, u: Tokens, push: Tokens) -> Tokens:
        """Velocity for unit tokens and the push on them."""

    def __call__(self, t: Any, x: Tokens, args: Any = None) -> Tokens:
        u = sphere.retract(x)
        return self.velocity(u, jnp.sum(self.inner.outputs(u), axis=0))

    def scaled(self, x: Tokens) -> tuple[Tokens, Float[Array, ""]]:
        return self(0.0, x), jnp.zeros((), x.dtype)

    def token_weights(self, x: Tokens) -> Float[Array, " n"]:
        return self.inner.token_weights(x)


class PreNorm(_Normalized):
    r"""$\dot x_i = g_i(x/|x|)$ in $\mathbb{R}^d$: directions cluster while lengths grow by $\dot r = \langle u, g\rangle$."""

    def velocity(self, u, push):
        return push


class PeriNorm(_Normalized):
    r"""$\dot x_i = g_i/|g_i|$ at $x/|x|$, in $\mathbb{R}^d$: every layer moves a token by the same length."""

    def velocity(self, u, push):
        return _unit(push)


class NormalizedPush(_Normalized):
    r"""$\dot u_i = \alpha P_{u_i} g_i/|g_i|$ on the sphere: normalised outputs at the rate $\alpha$ (`rate`), as in nGPT."""

    rate: Float[Array, ""]

    def __init__(self, inner: AttentionField, rate: ArrayLike = 1.0):
        self.inner = inner
        self.rate = jnp.asarray(rate)

    @property
    def on_sphere(self):
        return True

    def __call__(self, t: Any, x: Tokens, args: Any = None) -> Tokens:
        # Of degree one in the length, like every field on the sphere.
        return jnp.linalg.norm(x, axis=-1, keepdims=True) * super().__call__(t, x, args)

    def velocity(self, u, push):
        return self.rate.astype(u.dtype) * sphere.project(u, _unit(push))


def _unit(push):
    """A push of length 0 stays 0."""
    return push / sphere.safe_norm(push, where_zero=1.0)[..., None]
