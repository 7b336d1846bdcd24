"""By how much heads and tokens miss what the theorems assume; each claim is `miss <= rounding`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..field import AbstractField
from .claim import Claim, at_least, at_most, attention_field

Tokens = Float[Array, "n d"]
SOURCE = "hypothesis"


def aligned_heads(field: AbstractField, x: Tokens) -> Claim:
    r"""$\max_h \max(|B_h - B_h^\top|, |V_h - B_h|)$ in operator norm: 0 is the type `AlignedHeads` (arXiv 2605.04279)."""
    B, V = _matrices(field, x)
    miss = jnp.maximum(_norm(B - jnp.swapaxes(B, 1, 2)), _norm(V - B))
    return at_most(jnp.max(miss), _rounding(B), "B_h = B_h^T = V_h for every head", f"{SOURCE}: aligned heads")


def scalar_heads(field: AbstractField, x: Tokens) -> Claim:
    r"""$\max_h |B_h - \lambda_h I|$ with $\lambda_h$ the mean of the diagonal, and $|V_h - B_h|$: 0 is the type `ScalarHeads`."""
    B, V = _matrices(field, x)
    eye = jnp.eye(B.shape[-1], dtype=B.dtype)[None]
    mean = jnp.trace(B, axis1=1, axis2=2)[:, None, None] / B.shape[-1]
    miss = jnp.maximum(_norm(B - mean * eye), _norm(V - B))
    return at_most(jnp.max(miss), _rounding(B), "B_h = V_h = lambda_h I for every head", f"{SOURCE}: scalar heads")


def orthogonal_heads(field: AbstractField, x: Tokens) -> Claim:
    r"""$\delta = \max_{h \ne h'} |V_{h'}^\top V_h|_{op}$, which Theorem 39 bounds and Theorems 16-17 put to 0. 0 for H = 1."""
    _, V = _matrices(field, x)
    return at_most(
        overlap(V), _rounding(V) * jnp.max(_norm(V)), "M_h' M_h = 0 for every two heads", f"{SOURCE}: orthogonal heads"
    )


def symmetric_scores(field: AbstractField, x: Tokens) -> Claim:
    r"""$\max_h |B_h - B_h^\top|_{op}$: 0 where every score is symmetric, as Theorem 12 needs."""
    B, _ = _matrices(field, x)
    miss = jnp.max(_norm(B - jnp.swapaxes(B, 1, 2)))
    return at_most(miss, _rounding(B), "B_h = B_h^T for every head", f"{SOURCE}: symmetric scores")


def positive_strengths(field: AbstractField, x: Tokens) -> Claim:
    r"""$\min_h \mathrm{tr} B_h / d \ge 0$: no strength of a scalar head is negative."""
    B, _ = _matrices(field, x)
    least = jnp.min(jnp.trace(B, axis1=1, axis2=2)) / B.shape[-1]
    return at_least(least, 0, "lambda_h >= 0 for every head", f"{SOURCE}: positive strengths")


def equiangular_tokens(field: AbstractField, x: Tokens) -> Claim:
    r"""$\max - \min$ of the cosines over pairs $i \ne j$, or the spread of the weights: 0 for equiangular tokens."""
    low, high = _cosine_range(x)
    return _tokens_claim(field, x, high - low, "equiangular tokens")


def orthonormal_tokens(field: AbstractField, x: Tokens) -> Claim:
    r"""$\max_{i \ne j} |\langle x_i, x_j\rangle|$, or the spread of the weights: 0 for orthonormal tokens, which need $n \le d$."""
    low, high = _cosine_range(x)
    return _tokens_claim(field, x, jnp.maximum(jnp.abs(low), jnp.abs(high)), "orthonormal tokens")


def _tokens_claim(field, x, miss, name):
    uneven = jnp.max(jnp.abs(x.shape[0] * field.token_weights(x) - 1))
    rounding = 64 * jnp.finfo(x.dtype).eps
    return at_most(jnp.maximum(miss, uneven), rounding, f"{name}, weights 1/n", f"{SOURCE}: {name}")


def overlap(V: Float[Array, "H d d"]) -> Float[Array, ""]:
    r"""$\max_{h \ne h'} |V_{h'}^\top V_h|_{op}$."""
    products = _norm(jnp.einsum("gji,hjk->ghik", V, V))
    return jnp.max(products, where=~jnp.eye(len(V), dtype=bool), initial=0)


def _matrices(field, x):
    heads = attention_field(field, "a hypothesis on heads").heads.dense(x.shape[-1])
    return heads.score.astype(x.dtype), heads.value.astype(x.dtype)


def _norm(a):
    return jnp.linalg.norm(a, ord=2, axis=(-2, -1))


def _rounding(a):
    return 64 * jnp.finfo(a.dtype).eps * jnp.max(_norm(a))


def _cosine_range(x):
    n = x.shape[0]

    def row(i):
        c = x @ x[i]
        other = jnp.arange(n) != i
        return jnp.min(c, where=other, initial=1), jnp.max(c, where=other, initial=-1)

    low, high = jax.lax.map(row, jnp.arange(n), batch_size=min(n, 256))
    return jnp.min(low), jnp.max(high)
