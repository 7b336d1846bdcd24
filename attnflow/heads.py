r"""Attention heads: how a token asks, what it compares with, and what it passes on.

A head h has a score matrix $B_h$ (score $s_{ij} = x_i^\top B_h x_j$) and a value matrix $V_h$ (output $f_i^h = V_h$
answer). The hypothesis of a theorem is the type of its heads: `AlignedHeads` are symmetric with $V = B$ for every value
of their parameters, `ScalarHeads` are multiples of the identity, `FactoredHeads` have rank $d_k < d$ and never form
$d \times d$.
"""

import abc

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray


def real(x) -> Array:
    """`x` as a floating point array, so that a Python number becomes a leaf that gradients reach; a float dtype is kept."""
    kept = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.asarray(x, dtype=x.dtype if kept else jnp.result_type(float))


def transpose(a: Array) -> Array:
    return jnp.swapaxes(a, -1, -2)


def require_shape(name: str, array: Array, shape: str, good: bool) -> None:
    if not good:
        raise ValueError(f"`{name}` must have shape {shape}, got {array.shape}; vmap the constructor to batch.")


class AbstractHeads(eqx.Module):
    """H heads acting on tokens x (n, d); queries and keys have width k, values width e."""

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """The number of heads H."""

    @property
    @abc.abstractmethod
    def dimension(self) -> int | None:
        """The dimension d of the tokens, None where any will do."""

    @abc.abstractmethod
    def query(self, x: Float[Array, "n d"]) -> Float[Array, "H n k"]:
        r"""$B_h^\top x_i$, or its factor of width k: scores are inner products of queries with keys."""

    @abc.abstractmethod
    def keys(self, x: Float[Array, "n d"]) -> Float[Array, "n k"] | Float[Array, "H n k"]:
        """What queries are compared with; without a head axis where all heads share it."""

    @abc.abstractmethod
    def values(self, x: Float[Array, "n d"]) -> Float[Array, "n e"] | Float[Array, "H n e"]:
        """What is averaged; without a head axis where all heads share it."""

    @abc.abstractmethod
    def lift(self, y: Float[Array, "H n e"]) -> Float[Array, "H n d"]:
        r"""Head outputs $f_i^h$ from answers: $V_h y$ where values are the tokens."""

    @abc.abstractmethod
    def lift_deviator(self, y: Float[Array, "H n e"]) -> Float[Array, "H n d"]:
        r"""`lift` less a multiple of y chosen so that it is exactly 0 where $V_h$ is a multiple of the identity.

        A multiple of $x_i$ does not move token i, so on $y = x_i$ both lifts give the same velocity; this one has no
        rounding error to leave behind when the velocity is tiny.
        """

    @abc.abstractmethod
    def dense(self, d: int) -> "Heads":
        """The same heads with their (H, d, d) matrices written out."""


class Heads(AbstractHeads):
    r"""General heads: `score` $B_h$ in $s_{ij} = x_i^\top B_h x_j$, `value` $V_h$; both (H, d, d)."""

    score: Float[Array, "H d d"] = eqx.field(converter=real)
    value: Float[Array, "H d d"] = eqx.field(converter=real)

    def __check_init__(self):
        for name in ("score", "value"):
            a = getattr(self, name)
            require_shape(name, a, "(H, d, d)", a.ndim == 3 and a.shape[1] == a.shape[2])
        if self.score.shape != self.value.shape:
            raise ValueError(
                f"`score` and `value` must have the same shape (H, d, d), got {self.score.shape} and {self.value.shape}."
            )

    @property
    def count(self):
        return self.score.shape[0]

    @property
    def dimension(self):
        return self.score.shape[-1]

    def query(self, x):
        return jnp.einsum("hde,nd->hne", self.score, x)

    def keys(self, x):
        return x

    def values(self, x):
        return x

    def lift(self, y):
        return jnp.einsum("hde,hne->hnd", self.value, y)

    def lift_deviator(self, y):
        eye = jnp.eye(self.dimension, dtype=self.value.dtype)
        return jnp.einsum("hde,hne->hnd", self.value - self.value[:, :1, :1] * eye[None], y)

    def dense(self, d):
        return self


class AlignedHeads(AbstractHeads):
    r"""Heads with $M_h = M_h^\top$ and $V_h = B_h = M_h$, the hypothesis of energy monotonicity (Theorem 11, arXiv 2605.04279).

    `raw` (H, d, d) is unconstrained; `matrix` is its symmetric part, so a gradient step cannot leave the hypothesis.
    """

    raw: Float[Array, "H d d"] = eqx.field(converter=real)

    def __check_init__(self):
        a = self.raw
        require_shape("raw", a, "(H, d, d)", a.ndim == 3 and a.shape[1] == a.shape[2])

    @property
    def matrix(self) -> Float[Array, "H d d"]:
        return (self.raw + transpose(self.raw)) / 2

    @property
    def score(self) -> Float[Array, "H d d"]:
        return self.matrix

    @property
    def value(self) -> Float[Array, "H d d"]:
        return self.matrix

    @property
    def count(self):
        return self.raw.shape[0]

    @property
    def dimension(self):
        return self.raw.shape[-1]

    def query(self, x):
        return self.dense(x.shape[-1]).query(x)

    def keys(self, x):
        return x

    def values(self, x):
        return x

    def lift(self, y):
        return self.dense(y.shape[-1]).lift(y)

    def lift_deviator(self, y):
        return self.dense(y.shape[-1]).lift_deviator(y)

    def dense(self, d):
        return Heads(self.matrix, self.matrix)


class ScalarHeads(AbstractHeads):
    r"""$B_h = V_h = \lambda_h I$ in any dimension; `strengths` $\lambda_h$ (H,). Closed forms of arXiv 2605.04279 need this type."""

    strengths: Float[Array, " H"] = eqx.field(converter=real)

    def __check_init__(self):
        require_shape("strengths", self.strengths, "(H,)", self.strengths.ndim == 1)

    @property
    def count(self):
        return self.strengths.shape[0]

    @property
    def dimension(self):
        return None

    def query(self, x):
        return self.lift(x[None])

    def keys(self, x):
        return x

    def values(self, x):
        return x

    def lift(self, y):
        return self.strengths[:, None, None] * y

    def lift_deviator(self, y):
        return jnp.zeros((self.count, *y.shape[1:]), y.dtype)

    def dense(self, d):
        matrix = self.strengths[:, None, None] * jnp.eye(d, dtype=self.strengths.dtype)[None]
        return Heads(matrix, matrix)


class FactoredHeads(AbstractHeads):
    r"""Heads of rank $k < d$: $B_h = Q_h^\top K_h$, $V_h = O_h W_h$ from `query` $Q$, `key` $K$, `value` $W$
    (H, k, d) and `output` $O$ (H, d, k).

    There is no $1/\sqrt{k}$ in the score. No d x d matrix is formed, and the cost per pair of tokens is that of width k.
    """

    query_factor: Float[Array, "H k d"] = eqx.field(converter=real)
    key_factor: Float[Array, "H k d"] = eqx.field(converter=real)
    value_factor: Float[Array, "H e d"] = eqx.field(converter=real)
    output_factor: Float[Array, "H d e"] = eqx.field(converter=real)

    def __init__(self, query, key, value, output):
        self.query_factor, self.key_factor = real(query), real(key)
        self.value_factor, self.output_factor = real(value), real(output)

    def __check_init__(self):
        q, k, v, o = self.query_factor, self.key_factor, self.value_factor, self.output_factor
        for name, a in (("query", q), ("key", k), ("value", v), ("output", o)):
            require_shape(name, a, "(H, d, k)" if name == "output" else "(H, k, d)", a.ndim == 3)
        if q.shape != k.shape:
            raise ValueError(f"`query` and `key` must have the same shape (H, k, d), got {q.shape} and {k.shape}.")
        if o.shape != (v.shape[0], v.shape[2], v.shape[1]) or q.shape[::2] != v.shape[::2]:
            raise ValueError(
                f"`value` (H, k, d) and `output` (H, d, k) must fit each other and `query`, got {v.shape}, {o.shape} "
                f"and {q.shape}."
            )

    @property
    def score(self) -> Float[Array, "H d d"]:
        """$B_h$ written out: for small d only."""
        return jnp.einsum("hkd,hke->hde", self.query_factor, self.key_factor)

    @property
    def value(self) -> Float[Array, "H d d"]:
        """$V_h$ written out: for small d only."""
        return jnp.einsum("hdk,hke->hde", self.output_factor, self.value_factor)

    @property
    def count(self):
        return self.query_factor.shape[0]

    @property
    def dimension(self):
        return self.query_factor.shape[-1]

    def query(self, x):
        return jnp.einsum("hkd,nd->hnk", self.query_factor, x)

    def keys(self, x):
        return jnp.einsum("hkd,nd->hnk", self.key_factor, x)

    def values(self, x):
        return jnp.einsum("hkd,nd->hnk", self.value_factor, x)

    def lift(self, y):
        return jnp.einsum("hdk,hnk->hnd", self.output_factor, y)

    def lift_deviator(self, y):
        return self.lift(y)

    def dense(self, d):
        return Heads(self.score, self.value)


def orthogonal(key: PRNGKeyArray, H: int, d: int, k: int, strengths=1.0) -> AlignedHeads:
    r"""$M_h = \alpha_h P_h$ with projectors $P_h$ onto H mutually orthogonal random k-planes, so $M_h M_{h'} = 0$.

    **Errors:** ValueError where $Hk > d$.
    """
    if H * k > d:
        raise ValueError(f"{H} orthogonal subspaces of dimension {k} need d >= {H * k}, got d = {d}.")
    frame = jnp.linalg.qr(jr.normal(key, (d, d)))[0][:, : H * k].reshape(d, H, k)
    alpha = jnp.broadcast_to(real(strengths), (H,))
    return AlignedHeads(alpha[:, None, None] * jnp.einsum("dhk,ehk->hde", frame, frame))


def gaussian(key: PRNGKeyArray, H: int, d: int) -> Heads:
    r"""Independent Gaussian $B_h$ and $V_h$ with entries of variance 1/d."""
    score, value = jr.normal(key, (2, H, d, d)) / jnp.sqrt(real(d))
    return Heads(score, value)


def goe(key: PRNGKeyArray, H: int, d: int) -> AlignedHeads:
    r"""Symmetric Gaussian $M_h$ (GOE) with off-diagonal entries of variance 1/d."""
    raw = jr.normal(key, (H, d, d))
    return AlignedHeads((raw + transpose(raw)) / jnp.sqrt(real(2 * d)))
