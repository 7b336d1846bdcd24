r"""What heads do to given tokens: entropies, shadows, dominance margins and energy signs, in numpy."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from .blocks import Attention, Norm, centre

Array = np.ndarray


class Measures(NamedTuple):
    r"""Per head (H,), over the n tokens of one text with equal weights; $f_i^h$ are head outputs on the sphere.

    - `entropy`: attention entropy over log n, mean over tokens (causal rows over the log of what they see).
    - `shadow`: mean of $|a_i^h|/|f_i^h|$, $a_i^h = \langle f_i^h, u_i\rangle$.
    - `condition8`, `sharp`: share of tokens with margin $|P f|^2 - |f| \sum |a|$, $|P f|^2 - |a| \sum |a|$ at least 0.
    - `summed`: $\sum_i a_i^h \sum_{h' \ne h} a_i^{h'} / \sum_i |P f_i^h|^2$; at most 1 means dominance for orthogonal heads.
    - `exact`: $\sum_i \langle f_i^h, P_i \sum_{h'} f_i^{h'}\rangle$ over the norms of its two sides, in [-1, 1].
    - `energy_rate`: $d \log E_h/dt$ along the velocity of the heads, $E_h = \frac12 \sum_{ij} e^{u_i^\top M_h u_j}/n^2$;
      `block_rate`: the same along the whole block, whose other drifts are no head's.
    - `beta_spread`: median over tokens of std_j(score)/std_j<u_i, u_j>; `beta_regression`, `r_squared`: slope and R^2 of
      the score on <u_i, u_j>, each row centred. A scalar head has R^2 = 1 and both equal to lambda.
    """

    entropy: Float[Array, " H"]
    shadow: Float[Array, " H"]
    condition8: Float[Array, " H"]
    sharp: Float[Array, " H"]
    summed: Float[Array, " H"]
    exact: Float[Array, " H"]
    energy_rate: Float[Array, " H"]
    block_rate: Float[Array, " H"]
    beta_spread: Float[Array, " H"]
    beta_regression: Float[Array, " H"]
    r_squared: Float[Array, " H"]


def measures(block: Attention, norm: Norm | None, r: Float[Array, "n d"], *, centred: bool, post: bool) -> Measures:
    """The measures of an attention block on the residual r that it reads through `norm` (None: raw)."""
    x = r if norm is None else norm(r)
    c = centre(r) if centred else r
    u = c / np.linalg.norm(c, axis=-1, keepdims=True)
    p = block.probabilities(x)
    f = block.outputs(x, p)
    rest = block.output_bias + (x if post else np.zeros_like(x))
    if centred:
        f, rest = centre(f), centre(rest)
    velocity = _tangent(u, f.sum(axis=0))
    gain = np.ones(x.shape[-1]) if norm is None else norm.gain * np.sqrt(x.shape[-1])
    return Measures(
        _entropy(p, block.causal),
        *_margins(u, f),
        *_energy_rates(block, gain, u, (velocity, velocity + _tangent(u, rest))),
        *_betas(block, gain, u),
    )


def _tangent(u: Array, v: Array) -> Array:
    return v - np.sum(u * v, axis=-1, keepdims=True) * u


def _entropy(p: Array, causal: bool) -> Array:
    """Entropy over its largest value; a token that sees only itself is left out."""
    n = p.shape[-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        rows = -np.sum(np.where(p > 0, p * np.log(p), 0), axis=-1)
        share = rows / (np.log(np.arange(1, n + 1)) if causal else np.log(n))
    return share[:, 1:].mean(axis=-1) if causal and n > 1 else share.mean(axis=-1)


def _margins(u: Array, f: Array) -> tuple[Array, ...]:
    a = np.einsum("hnd,nd->hn", f, u)
    tangent = _tangent(u, f)
    square, length = np.sum(tangent**2, axis=-1), np.linalg.norm(f, axis=-1)
    others = np.sum(np.abs(a), axis=0) - np.abs(a)
    total = tangent.sum(axis=0)
    exact = np.einsum("hnd,nd->h", tangent, total)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (
            np.mean(np.abs(a) / length, axis=-1),
            np.mean(square >= length * others, axis=-1),
            np.mean(square >= np.abs(a) * others, axis=-1),
            np.sum(a * (a.sum(axis=0) - a), axis=-1) / np.sum(square, axis=-1),
            exact / np.sqrt(np.sum(square, axis=-1) * np.sum(total**2)),
        )


def _energy_rates(block: Attention, gain: Array, u: Array, velocities: tuple[Array, ...]) -> list[Array]:
    """d log E_h/dt for the bilinear score u_i^T M_h u_j (turned by its positions where these are rotary)."""
    q, k = _factors(block, gain, u)
    s = q @ k.swapaxes(1, 2)
    e = np.exp(s - s.max(axis=(1, 2), keepdims=True))
    rates = []
    for velocity in velocities:
        dq, dk = _factors(block, gain, velocity)
        rate = dq @ k.swapaxes(1, 2) + q @ dk.swapaxes(1, 2)
        rates.append(np.sum(e * rate, axis=(1, 2)) / np.sum(e, axis=(1, 2)))
    return rates


def _factors(block: Attention, gain: Array, u: Array) -> tuple[Array, Array]:
    """Queries and keys linear in u, without biases."""
    x = gain * u
    return (
        block.turned(x @ block.query.swapaxes(1, 2)) * block.scale,
        block.turned(x @ block.key.swapaxes(1, 2)),
    )


def _betas(block: Attention, gain: Array, u: Array) -> tuple[Array, Array, Array]:
    q, k = _factors(block, gain, u)
    s, g = q @ k.swapaxes(1, 2), u @ u.T
    s, g = s - s.mean(axis=-1, keepdims=True), g - g.mean(axis=-1, keepdims=True)
    inner, size = np.sum(s * g, axis=(1, 2)), np.sum(g * g)
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.median(np.sqrt(np.sum(s * s, axis=-1) / np.sum(g * g, axis=-1)), axis=-1)
        return spread, inner / size, inner**2 / (size * np.sum(s * s, axis=(1, 2)))


class Depth(NamedTuple):
    """How clustered the tokens are at one depth."""

    mean_cosine: float
    centred_cosine: float
    radius: float


def depth_of(u: Float[Array, "n d"], radius: Float[Array, " n"]) -> Depth:
    """Mean cosine of distinct tokens, the same after their mean was taken off, and the mean length of the residual.

    A direction that all tokens share counts as clustering in the first and not in the second, whose value for
    independent tokens is -1/(n - 1).
    """
    n = len(u)
    if n < 2:
        return Depth(float("nan"), float("nan"), float(radius.mean()))
    v = u - u.mean(axis=0)
    size = np.linalg.norm(v, axis=-1, keepdims=True)
    v = np.divide(v, size, out=np.zeros_like(v), where=size > 1e-12)
    return Depth(*(float((np.sum(a @ a.T) - np.sum(a * a)) / (n * (n - 1))) for a in (u, v)), float(radius.mean()))
