r"""The flow of which a trained network is a discretisation: layers as time, both blocks folded onto the sphere."""

from typing import Any

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import sphere
from ..attention import Softmax
from ..field import AbstractField, AttentionField
from ..heads import FactoredHeads, real
from ..reduce import AbstractReduction

Tokens = Float[Array, "n d"]


class FoldedHeads(FactoredHeads):
    r"""Trained heads on the sphere: `FactoredHeads` whose query carries a bias, $q_i = Q_h u_i + q_h$, a key bias of the score."""

    query_bias: Float[Array, "H k"] | None

    def __init__(self, query, key, value, output, query_bias=None):
        super().__init__(query, key, value, output)
        self.query_bias = None if query_bias is None else real(query_bias)

    def query(self, x):
        q = super().query(x)
        return q if self.query_bias is None else q + self.query_bias[:, None]


class Affine(eqx.Module):
    r"""The drift that is no head's: a constant $v_0$ and, after-norm, the linear $(G - I)u$; None where there is none."""

    constant: Float[Array, "*L d"] | None
    linear: Float[Array, "*L d"] | None

    def __call__(self, u: Tokens) -> Tokens:
        v = jnp.zeros_like(u) if self.linear is None else self.linear.astype(u.dtype)[None] * u
        return v if self.constant is None else v + self.constant.astype(u.dtype)[None]


class FeedForwardBlock(eqx.Module):
    r"""$D\,\sigma(U u_i + b)$, times $W u_i + c$ where gated: each token moves by itself."""

    up: Float[Array, "*L m d"]
    up_bias: Float[Array, "*L m"]
    gate: Float[Array, "*L m d"] | None
    gate_bias: Float[Array, "*L m"] | None
    down: Float[Array, "*L d m"]
    activation: str = eqx.field(static=True)

    def __call__(self, u: Tokens) -> Tokens:
        inner = ACTIVATIONS[self.activation](u @ self.up.T + self.up_bias[None])
        if self.gate is not None and self.gate_bias is not None:
            inner = inner * (u @ self.gate.T + self.gate_bias[None])
        return inner @ self.down.T


def _gelu(z):
    return jax.nn.gelu(z, approximate=False)


ACTIVATIONS = {
    "gelu": _gelu,
    "gelu_new": jax.nn.gelu,
    "gelu_fast": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}


class PretrainedField(AbstractField):
    r"""Tokens moved by the layers of a trained network; leaves have a leading axis of layers.

    At time t the layer with `switches[l] <= t < switches[l + 1]` acts (the first before, the last after; the only one of a
    shared stack always): its heads and their affine drift, then, where
    there is a feed-forward block and `split`, that block in the second half of the interval, each at double speed (Lie
    splitting); without `split` both act together.

    On the sphere $\dot u_i = P_{u_i}\,\mathrm{push}(u)_i$. Before-norm networks may instead keep the residual stream as
    state (`residual`): $\dot r_i = \mathrm{push}(u)_i$ with $u = Cr/\sqrt{|Cr|^2 + \varepsilon d}$, so that one Euler step of
    length one (half, if split) is exactly one layer, and $|r|$ is the clock.
    """

    heads: FoldedHeads
    drift: Affine
    feed_forward: FeedForwardBlock | None
    feed_forward_drift: Affine | None
    switches: Float[Array, " S"]
    eps: Float[Array, ""]
    causal: bool = eqx.field(static=True)
    centred: bool = eqx.field(static=True)
    residual: bool = eqx.field(static=True)
    split: bool = eqx.field(static=True)
    reduction: AbstractReduction | None

    @property
    def on_sphere(self):
        return not self.residual

    def __call__(self, t: Any, x: Tokens, args: Any = None) -> Tokens:
        if self.residual:
            return self.push(t, self.directions(x))
        length = jnp.linalg.norm(x, axis=-1, keepdims=True)
        u = self.directions(x)
        return length * sphere.project(u, self.push(t, u))

    def scaled(self, x: Tokens) -> tuple[Tokens, Float[Array, ""]]:
        """(v, 0): softmax velocities are always finite; for a field that does not depend on time.

        **Errors:** ValueError where it has several layers or is split.
        """
        if self.split or self.count > 1:
            raise ValueError("A field of several layers depends on time: it has the physical clock only.")
        return self(self.switches[0], x), jnp.zeros((), x.dtype)

    def token_weights(self, x: Tokens) -> Float[Array, " n"]:
        return jnp.full(x.shape[0], 1 / x.shape[0], x.dtype)

    def directions(self, x: Tokens) -> Tokens:
        """Points of the sphere at which the blocks read the state x."""
        c = x - jnp.mean(x, axis=-1, keepdims=True) if self.centred else x
        if not self.residual:
            return sphere.retract(c)
        return c / jnp.sqrt(jnp.sum(c * c, axis=-1, keepdims=True) + self.eps.astype(x.dtype) * x.shape[-1])

    @property
    def count(self) -> int:
        """How many different layers there are."""
        return self.heads.query_factor.shape[0]

    def interval(self, t: Any) -> Array:
        """The number of the interval between switches that t lies in."""
        place = jnp.searchsorted(self.switches, jnp.asarray(t, self.switches.dtype), side="right") - 1
        return jnp.clip(place, 0, self.switches.shape[0] - 2)

    @property
    def jumps(self) -> Float[Array, " J"]:
        """The times at which the field jumps: switches of layers, and of blocks where these are split."""
        s = self.switches
        inner = s[1:-1] if self.count > 1 or self.split else s[:0]
        return jnp.sort(jnp.concatenate([inner, (s[1:] + s[:-1]) / 2])) if self.split else inner

    def controller(self, rtol: float = 1e-6, atol: float = 1e-9) -> dfx.AbstractStepSizeController:
        """A step controller for `solve` that ends a step at every jump instead of searching for it."""
        adaptive = dfx.PIDController(rtol=rtol, atol=atol, pcoeff=0.2, icoeff=0.4)
        return dfx.ClipStepSizeController(adaptive, jump_ts=self.jumps) if self.jumps.size else adaptive

    def attention(self, t: Any) -> AttentionField:
        """The heads at time t without their drift, as a field that observables accept."""
        heads = _at(self.heads, jnp.minimum(self.interval(t), self.count - 1))
        return AttentionField(heads, Softmax(1.0), causal=self.causal, reduction=self.reduction)

    def push(self, t: Any, u: Tokens) -> Tokens:
        """The drift at points u of the sphere before projection: what a block adds to the residual, without the centre."""
        interval = self.interval(t)
        number = jnp.minimum(interval, self.count - 1)

        def heads(u):
            return jnp.sum(self.attention(t).outputs(u), axis=0) + _at(self.drift, number)(u)

        if self.feed_forward is None:
            return heads(u)

        def forward(u):
            block = _cast(_at(self.feed_forward, number), u)
            return block(u) + _at(self.feed_forward_drift, number)(u)

        if not self.split:
            return heads(u) + forward(u)
        middle = (self.switches[interval] + self.switches[interval + 1]) / 2
        first = jnp.asarray(t, middle.dtype) < middle
        return 2 * jax.lax.cond(first, heads, forward, u)


def _at(module, number):
    return jax.tree.map(lambda a: a[number], module)


def _cast(module, u):
    return jax.tree.map(lambda a: a.astype(u.dtype), module)
