r"""Vector fields on the tokens: $\dot x_i = P_{x_i} \sum_h V_h\,\mathrm{answer}_i^h$, $P_x = I - x x^\top/|x|^2$."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from . import sphere
from .attention import AbstractAttention, Exponential, Softmax, concrete
from .harmonics import Harmonics, pays_from, suits
from .heads import AbstractHeads
from .reduce import AbstractReduction, Blocked, Dense, Differences

Tokens = Float[Array, "n d"]

DIFFERENCES_UP_TO = 2**16  # n^2 d above which the difference form costs more than it is worth
DENSE_UP_TO = 2**16  # H n^2 up to which all scores at once are as fast as tiles; a gradient prefers tiles even earlier


class AbstractField(eqx.Module):
    """A velocity for every token, called `field(t, x, args)`; homogeneous of degree one in each token unless flat."""

    @abc.abstractmethod
    def __call__(self, t: Any, x: Tokens, args: Any = None) -> Tokens:
        """Velocities at time t (these fields are autonomous) of the tokens x."""

    @abc.abstractmethod
    def scaled(self, x: Tokens) -> tuple[Tokens, Float[Array, ""]]:
        """(v, c) with velocity $e^c v$: v is finite also where the velocity is not."""

    @abc.abstractmethod
    def token_weights(self, x: Tokens) -> Float[Array, " n"]:
        """The weights w, in the dtype of x."""

    @property
    def on_sphere(self) -> bool:
        return True


class AttentionField(AbstractField):
    r"""Tokens moved by attention heads: $\dot x_i = P_{x_i} \sum_h f_i^h$, $f_i^h = V_h \sum_j c_{ij}^h x_j$.

    Off the sphere it is evaluated at $u = x/|x|$ and multiplied by $|x|$: the path of the direction does not depend on
    the length, and no rounding error grows where $\langle x, f\rangle < 0$. At the tokens' dtype; leaves are cast.

    **Arguments:**

    - `weights`: $w_i \ge 0$ with sum 1, default 1/n.
    - `flat`: no projection and no normalisation: tokens of $\mathbb{R}^d$.
    - `causal`: token i sees tokens j <= i only (softmax rows are renormalised).
    - `reduction`: how sums over tokens are taken; None chooses by size, and `print(field)` says how.
    """

    heads: AbstractHeads
    attention: AbstractAttention
    weights: Float[Array, " n"] | None
    flat: bool = eqx.field(static=True)
    causal: bool = eqx.field(static=True)
    reduction: AbstractReduction | None

    def __init__(
        self,
        heads: AbstractHeads,
        attention: AbstractAttention,
        weights=None,
        *,
        flat: bool = False,
        causal: bool = False,
        reduction: AbstractReduction | None = None,
    ):
        self.heads = heads
        self.attention = attention
        self.weights = None if weights is None else checked_weights(weights)
        self.flat = flat
        self.causal = causal
        self.reduction = reduction
        if causal and self.weights is not None and concrete(self.weights) and not np.asarray(self.weights)[0] > 0:
            raise ValueError("`weights[0]` must be > 0 where `causal`: the first token sees only itself.")

    @property
    def on_sphere(self):
        return not self.flat

    def __call__(self, t: Any, x: Tokens, args: Any = None) -> Tokens:
        v, c = self.scaled(x)
        return jnp.exp(c) * v

    def scaled(self, x: Tokens) -> tuple[Tokens, Float[Array, ""]]:
        r"""(v, c) with velocity $e^c v$; c is the largest log-mass for `Exponential`, else 0."""
        if self.flat:
            push, c = self._push(x)
            return push, c
        length = jnp.linalg.norm(x, axis=-1, keepdims=True)
        u = x / length
        push, c = self._push(u)
        return length * sphere.project(u, push), c

    def outputs(self, x: Tokens) -> Float[Array, "H n d"]:
        r"""Head outputs $f_i^h = V_h\,\mathrm{answer}_i^h$."""
        heads, w = self._prepare(x)
        attention = _cast(self.attention, x)
        q = attention.scale(heads.query(x))
        reduction = Dense() if isinstance(chosen := self.method(x), Differences) else chosen
        answer, c = attention.answer(reduction, q, heads.keys(x), heads.values(x), w, causal=self.causal)
        return jnp.exp(c) * heads.lift(answer)

    def token_weights(self, x: Tokens) -> Float[Array, " n"]:
        return _token_weights(self.weights, x)

    def queries(self, x: Tokens) -> tuple[AbstractAttention, Array, Array, Array]:
        """(attention, scaled queries, keys, weights) in the dtype of x, as the observables need them."""
        heads, w = self._prepare(x)
        attention = _cast(self.attention, x)
        return attention, attention.scale(heads.query(x)), heads.keys(x), w

    def method(self, x: Tokens) -> AbstractReduction:
        """The reduction used for tokens of this shape."""
        if self.reduction is not None:
            return self.reduction
        n, d = x.shape
        if not self.flat and n * n * d <= DIFFERENCES_UP_TO:
            return Differences()
        if self.heads.count * n * n <= DENSE_UP_TO:
            return Dense()
        series = suits(n, d, x.dtype, radius=self._radius(d)) if self._expands and d in (2, 3) else None
        return Blocked() if series is None else series

    def settled(self, x: Tokens) -> "AttentionField":
        """The same field with the series chosen here, if it is one: inside a trace of the field no temperature is known."""
        method = self.method(x)
        if self.reduction is not None or not isinstance(method, Harmonics):
            return self
        return eqx.tree_at(lambda field: field.reduction, self, method, is_leaf=lambda a: a is None)

    @property
    def _expands(self):
        """Whether a series could take the sums."""
        return not (self.flat or self.causal) and isinstance(self.attention, (Softmax, Exponential))

    def _radius(self, d):
        r"""$\beta \max_h |B_h|$, which bounds the queries of unit tokens; None inside a trace of the field."""
        heads, attention = self.heads, self.attention
        known = all(concrete(a) for a in jax.tree.leaves((heads, attention))) and heads.dimension in (None, d)
        if not known or not isinstance(attention, (Softmax, Exponential)) or attention.beta.ndim != 0:
            return None
        with jax.ensure_compile_time_eval():
            score, beta = np.asarray(heads.dense(d).score), float(attention.beta)
        return beta * float(np.max(np.linalg.norm(score, 2, axis=(1, 2)), initial=0))

    def _prepare(self, x):
        heads = _cast(self.heads, x)
        if heads.dimension not in (None, x.shape[-1]):
            raise ValueError(f"tokens of dimension {x.shape[-1]} do not fit heads of dimension {heads.dimension}.")
        return heads, self.token_weights(x)

    def _push(self, u):
        """Sum of the head outputs at unit tokens, less multiples of the token itself where that keeps accuracy."""
        heads, w = self._prepare(u)
        attention = _cast(self.attention, u)
        q, keys, values = attention.scale(heads.query(u)), heads.keys(u), heads.values(u)
        method = self.method(u)
        if isinstance(method, Differences) and not self.flat:
            s = jnp.einsum("hnk,hmk->hnm" if keys.ndim == 3 else "hnk,mk->hnm", q, keys)
            seen = jnp.broadcast_to(w, (len(w), len(w)))
            coefficients, c = attention.coefficients(s, jnp.tril(seen) if self.causal else seen)
            gaps = values[..., None, :, :] - values[..., :, None, :]
            moved = jnp.einsum("hnm,hnme->hne" if gaps.ndim == 4 else "hnm,nme->hne", coefficients, gaps)
            own = jnp.sum(coefficients, axis=-1, keepdims=True) * jnp.broadcast_to(values, moved.shape)
            return jnp.sum(heads.lift(moved) + heads.lift_deviator(own), axis=0), c
        answer, c = attention.answer(method, q, keys, values, w, causal=self.causal)
        return jnp.sum(heads.lift(answer), axis=0), c

    def __repr__(self):
        how = repr(self.reduction) if self.reduction is not None else self._rule()
        flags = "".join(f", {name}" for name in ("flat", "causal") if getattr(self, name))
        weights = "1/n" if self.weights is None else f"given for n = {self.weights.shape[-1]}"
        return (
            f"AttentionField({type(self.heads).__name__} (H = {self.heads.count}, d = {self.heads.dimension or 'any'}), "
            f"{self.attention}{flags}, weights {weights}, reduction {how})"
        )

    def _rule(self):
        rule = (
            f"by size: differences while n^2 d <= {DIFFERENCES_UP_TO}, dense while H n^2 <= {DENSE_UP_TO}, then blocked"
        )
        if not self._expands:
            return rule
        choices = {d: pays_from(d, self._radius(d)) for d in (2, 3) if self.heads.dimension in (None, d)}
        series = " and ".join(f"n = {n} (d = {d})" for d, n in choices.items() if n is not None)
        return f"{rule}, on a CPU in float64 harmonics from {series}" if series else rule


class ZeroTemperatureField(AbstractField):
    r"""The mean-field limit beta -> infinity: $\dot x = P_x \sum_h V_h B_h^\top x/|B_h^\top x|$ (equation 3, arXiv 2605.10931).

    It does not depend on the other tokens: the token at $B^\top x/|B^\top x|$ is taken to be there, as for a law of full
    support. The attention of finitely many tokens at zero temperature is `Hardmax`. Closed forms need H = 1.
    """

    heads: AbstractHeads
    weights: Float[Array, " n"] | None

    def __init__(self, heads: AbstractHeads, weights=None):
        self.heads = heads
        self.weights = None if weights is None else checked_weights(weights)

    def __call__(self, t: Any, x: Tokens, args: Any = None) -> Tokens:
        heads = _cast(self.heads, x).dense(x.shape[-1])
        length = jnp.linalg.norm(x, axis=-1, keepdims=True)
        u = x / length
        return length * sphere.project(u, jnp.sum(heads.lift(sphere.retract(heads.query(u))), axis=0))

    def scaled(self, x: Tokens) -> tuple[Tokens, Float[Array, ""]]:
        return self(0.0, x), jnp.zeros((), x.dtype)

    def token_weights(self, x: Tokens) -> Float[Array, " n"]:
        return _token_weights(self.weights, x)


def checked_weights(weights) -> Float[Array, " n"]:
    """Weights as a floating array; values are checked where they are known."""
    w = jnp.asarray(weights)
    if not jnp.issubdtype(w.dtype, jnp.floating):
        w = w.astype(jnp.result_type(float))
    if w.ndim != 1:
        raise ValueError(f"`weights` must have shape (n,), got {w.shape}; vmap the constructor to batch.")
    if concrete(w):
        values = np.asarray(w)  # numpy: inside a trace jax would stage the check out
        if not np.all(np.isfinite(values) & (values >= 0)):
            raise ValueError("`weights` must be finite and >= 0.")
        total = float(np.sum(values))
        if abs(total - 1) > 100 * float(jnp.finfo(w.dtype).eps) * max(1, len(w)) ** 0.5:
            raise ValueError(f"`weights` must sum to 1, got {total:.9g}; divide by their sum.")
    return w


def _token_weights(weights, x):
    n = x.shape[0]
    if weights is None:
        return jnp.full(n, 1 / n, x.dtype)
    if weights.shape != (n,):
        raise ValueError(f"`weights` must have shape (n,) = ({n},), got {weights.shape}.")
    return weights.astype(x.dtype)


def _cast(module, x):
    """Floating leaves in the dtype of x, so that a float32 flow stays float32."""
    return jax.tree.map(lambda a: a.astype(x.dtype) if eqx.is_inexact_array(a) else a, module)


def overflow_is_possible(field: AbstractField) -> bool:
    return isinstance(getattr(field, "attention", None), Exponential)
