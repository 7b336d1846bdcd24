r"""The two blocks of a transformer layer as they are stored, and folded onto the sphere.

A layer norm reads the residual r only through its direction $u = Cr/|Cr|$, $C = I - 11^\top/d$: it is
$x = \sqrt d\,g \odot u + b$ (up to its $\varepsilon$). Written in u, the score of a head is
$(Qu_i + q)^\top K u_j$ up to terms that are equal for all j, with

$$Q = \sqrt{d\sigma}\,W_q G C,\quad K = \sqrt{d\sigma}\,W_k G C,\quad q = \sqrt\sigma\,(W_q b + b_q),\quad \sigma = 1/\sqrt{d_k},$$

its output $O W u + \text{constant}$ with $W = \sqrt d\,W_v G C$, $O = C W_o$. So biases become a key bias $K^\top q$ and a constant
drift, and heads stay factored. RMS norm is the same without C and b. All arrays here are float64 numpy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.special import erf

Array = np.ndarray


@dataclass(frozen=True)
class Norm:
    r"""Layer norm $g \odot Cr / \sqrt{|Cr|^2/d + \varepsilon} + b$, or RMS norm where not `centred`."""

    gain: Float[Array, " d"]
    bias: Float[Array, " d"]
    eps: float
    centred: bool = True

    def __call__(self, r: Float[Array, "n d"]) -> Float[Array, "n d"]:
        c = centre(r) if self.centred else r
        return self.gain * c / np.sqrt(np.mean(c * c, axis=-1, keepdims=True) + self.eps) + self.bias


def centre(r: Array) -> Array:
    """r less its mean over the last axis."""
    return r - r.mean(axis=-1, keepdims=True)


@dataclass(frozen=True)
class Attention:
    """Multi-head attention as stored, with its scale; `rotary` is the base of rotary positions, None where there are none."""

    query: Float[Array, "H k d"]
    key: Float[Array, "H k d"]
    value: Float[Array, "H k d"]
    output: Float[Array, "H d k"]
    query_bias: Float[Array, "H k"]
    key_bias: Float[Array, "H k"]
    value_bias: Float[Array, "H k"]
    output_bias: Float[Array, " d"]
    scale: float
    causal: bool = False
    rotary: float | None = None

    def queries(self, x: Float[Array, "n d"]) -> Float[Array, "H n k"]:
        """Queries with the scale folded in, turned by their positions where these are rotary."""
        return self.turned(x @ _t(self.query) + self.query_bias[:, None]) * self.scale

    def keys(self, x: Float[Array, "n d"]) -> Float[Array, "H n k"]:
        return self.turned(x @ _t(self.key) + self.key_bias[:, None])

    def probabilities(self, x: Float[Array, "n d"]) -> Float[Array, "H n n"]:
        s = self.queries(x) @ _t(self.keys(x))
        if self.causal:
            s = np.where(np.tri(len(x), dtype=bool), s, -np.inf)
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        return p / p.sum(axis=-1, keepdims=True)

    def outputs(self, x: Float[Array, "n d"], p: Float[Array, "H n n"]) -> Float[Array, "H n d"]:
        """What each head adds, its value bias included, the bias of the output left out."""
        return p @ (x @ _t(self.value) + self.value_bias[:, None]) @ _t(self.output)

    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        answers = self.probabilities(x) @ (x @ _t(self.value) + self.value_bias[:, None])
        return np.einsum("hnk,hdk->nd", answers, self.output, optimize=True) + self.output_bias

    def turned(self, a: Float[Array, "H n k"]) -> Float[Array, "H n k"]:
        """Rotary positions: the pair (i, i + k/2) of token p turned by p base^(-2i/k)."""
        if self.rotary is None:
            return a
        n, k = a.shape[1:]
        angle = np.arange(n)[:, None] * self.rotary ** (-np.arange(0, k, 2) / k)
        cos, sin = np.cos(angle), np.sin(angle)
        first, second = a[..., : k // 2], a[..., k // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _t(a: Array) -> Array:
    return np.swapaxes(a, -1, -2)


@dataclass(frozen=True)
class FeedForward:
    """$W_2\\,\\sigma(W_1 x + b_1) + b_2$, with $\\sigma(W_1 x)$ multiplied by $W_3 x$ where there is a `gate` $W_3$."""

    up: Float[Array, "m d"]
    up_bias: Float[Array, " m"]
    down: Float[Array, "d m"]
    down_bias: Float[Array, " d"]
    activation: str
    gate: Float[Array, "m d"] | None = None

    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        inner = ACTIVATIONS[self.activation](x @ self.up.T + self.up_bias)
        if self.gate is not None:
            inner = inner * (x @ self.gate.T)
        return inner @ self.down.T + self.down_bias


def _gelu(z):
    return z * (1 + erf(z / np.sqrt(2))) / 2


def _gelu_tanh(z):
    return z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))) / 2


def _relu(z):
    return np.maximum(z, 0)


def _silu(z):
    return z / (1 + np.exp(-np.clip(z, -700, None)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": _relu,
    "silu": _silu,
    "swish": _silu,
}


@dataclass(frozen=True)
class Layer:
    """One layer: each block reads the residual through its norm; None where it reads it raw (ALBERT's first pass)."""

    attention_norm: Norm | None
    attention: Attention
    feed_forward_norm: Norm | None = None
    feed_forward: FeedForward | None = None


@dataclass(frozen=True)
class FoldedAttention:
    r"""A block of heads on the sphere: drift $\sum_h O_h \sum_j p_{ij} W_h u_j + \text{constant} + \text{linear} \odot u_i$.

    $p_{ij} \propto e^{(Q_h u_i + q_h)^\top K_h u_j}$. The drift is tangent to nothing yet: a step is retract(u + drift / radius)
    before a layer norm (`linear` None), retract(u + drift) after one.
    """

    query: Float[Array, "H k d"]
    key: Float[Array, "H k d"]
    value: Float[Array, "H k d"]
    output: Float[Array, "H d k"]
    query_bias: Float[Array, "H k"]
    constant: Float[Array, " d"]
    linear: Float[Array, " d"] | None


@dataclass(frozen=True)
class FoldedFeedForward:
    """The feed-forward block on the sphere, its norm folded into `up`, `up_bias` and `gate`."""

    up: Float[Array, "m d"]
    up_bias: Float[Array, " m"]
    gate: Float[Array, "m d"] | None
    gate_bias: Float[Array, " m"] | None
    down: Float[Array, "d m"]
    constant: Float[Array, " d"]
    linear: Float[Array, " d"] | None
    activation: str


def fold_attention(block: Attention, norm: Norm, *, post: bool) -> FoldedAttention:
    r"""The block in sphere coordinates; after-norm networks (`post`) divide the drift by $\sqrt d$ and keep $(G - I)u$."""
    root, half = np.sqrt(norm.gain.size), np.sqrt(block.scale)
    values = block.value @ norm.bias + block.value_bias
    constant = np.einsum("hdk,hk->d", block.output, values) + block.output_bias
    return FoldedAttention(
        query=root * half * _inward(block.query, norm),
        key=root * half * _inward(block.key, norm),
        value=root * _inward(block.value, norm),
        output=_outward(block.output, norm, axis=1) / (root if post else 1),
        query_bias=half * (block.query @ norm.bias + block.query_bias),
        constant=_outward(constant + (norm.bias if post else 0), norm, axis=0) / (root if post else 1),
        linear=norm.gain - 1 if post else None,
    )


def fold_feed_forward(block: FeedForward, norm: Norm, *, post: bool) -> FoldedFeedForward:
    """The feed-forward block in sphere coordinates, scaled as `fold_attention`."""
    root = np.sqrt(norm.gain.size)
    gate = block.gate
    return FoldedFeedForward(
        up=root * _inward(block.up, norm),
        up_bias=block.up @ norm.bias + block.up_bias,
        gate=None if gate is None else root * _inward(gate, norm),
        gate_bias=None if gate is None else gate @ norm.bias,
        down=_outward(block.down, norm, axis=0) / (root if post else 1),
        constant=_outward(block.down_bias + (norm.bias if post else 0), norm, axis=0) / (root if post else 1),
        linear=norm.gain - 1 if post else None,
        activation=block.activation,
    )


def _inward(w: Array, norm: Norm) -> Array:
    """W G C: reads a point of the sphere where W read the norm."""
    return centre(w * norm.gain) if norm.centred else w * norm.gain


def _outward(w: Array, norm: Norm, *, axis: int) -> Array:
    """C W: what of an output the next layer norm sees."""
    return w - w.mean(axis=axis, keepdims=True) if norm.centred else w
