r"""Symmetric heads whose constraints hold for every value of their parameters, so that no gradient step can leave them.

All are aligned, $V_h = B_h = M_h = M_h^\top$ (the hypothesis of Theorem 11, arXiv 2605.04279), and differ in what else is
held: `SemidefiniteHeads` $M_h \succeq 0$ of rank at most k, `OrthogonalHeads` $M_h M_{h'} = 0$, `CommutingHeads`
one eigenbasis, `GappedHeads` the spectral gap, `FixedNormHeads` the Frobenius norm of any of them. Rank without
symmetry is `FactoredHeads`.

Where a matrix costs a decomposition, take `aligned()` once per gradient: plain `AlignedHeads` that no longer know the
constraint, differentiable in the parameters.
"""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from .attention import concrete
from .heads import AbstractHeads, AlignedHeads, FactoredHeads, Heads, real, require_shape, transpose


class AbstractSymmetricHeads(AbstractHeads):
    r"""Heads with $V_h = B_h = M_h = M_h^\top$, by whatever parameters."""

    @property
    @abc.abstractmethod
    def matrix(self) -> Float[Array, "H d d"]:
        """$M_h$ written out."""

    @property
    def score(self) -> Float[Array, "H d d"]:
        return self.matrix

    @property
    def value(self) -> Float[Array, "H d d"]:
        return self.matrix

    def aligned(self) -> AlignedHeads:
        """The same matrices as plain heads."""
        return AlignedHeads(self.matrix)

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
        matrix = self.matrix
        return Heads(matrix, matrix)


class SemidefiniteHeads(AbstractSymmetricHeads):
    r"""$M_h = F_h^\top F_h \succeq 0$ of rank at most k; `factor` F (H, k, d)."""

    factor: Float[Array, "H k d"] = eqx.field(converter=real)

    def __check_init__(self):
        require_shape("factor", self.factor, "(H, k, d)", self.factor.ndim == 3)

    @property
    def matrix(self):
        return jnp.einsum("hkd,hke->hde", self.factor, self.factor)

    def factored(self) -> FactoredHeads:
        """The same heads at the cost of width k per pair of tokens."""
        return FactoredHeads(self.factor, self.factor, self.factor, transpose(self.factor))

    @property
    def count(self):
        return self.factor.shape[0]

    @property
    def dimension(self):
        return self.factor.shape[-1]


class OrthogonalHeads(AbstractSymmetricHeads):
    r"""$M_h = U_h\,\mathrm{sym}(C_h)\,U_h^\top$ on mutually orthogonal k-planes, so $M_h M_{h'} = 0$ for $h \ne h'$.

    The frame $(U_1, \dots, U_H)$ is the Q factor of `frame` (d, H k) with positive diagonal in R: orthonormal to rounding
    wherever `frame` has full column rank, and smooth there. `core` C (H, k, k) acts within the planes.
    """

    frame: Float[Array, "d Hk"] = eqx.field(converter=real)
    core: Float[Array, "H k k"] = eqx.field(converter=real)

    def __check_init__(self):
        c, f = self.core, self.frame
        require_shape("core", c, "(H, k, k)", c.ndim == 3 and c.shape[1] == c.shape[2])
        require_shape("frame", f, "(d, H k)", f.ndim == 2 and f.shape[1] == c.shape[0] * c.shape[1])
        if f.shape[0] < f.shape[1]:
            raise ValueError(f"`frame` must be tall, (d, H k) with d >= H k, got {f.shape}.")

    @property
    def planes(self) -> Float[Array, "H d k"]:
        """Orthonormal bases $U_h$ of the planes."""
        q = orthonormal(self.frame)
        return jnp.moveaxis(q.reshape(self.dimension, *self.core.shape[:2]), 1, 0)

    @property
    def matrix(self):
        u = self.planes
        return jnp.einsum("hdk,hkl,hel->hde", u, symmetric(self.core), u)

    @property
    def count(self):
        return self.core.shape[0]

    @property
    def dimension(self):
        return self.frame.shape[0]


class CommutingHeads(AbstractSymmetricHeads):
    r"""$M_h = Q\,\mathrm{diag}(\mu_h)\,Q^\top$ with one orthonormal basis Q for all heads, so $M_h M_{h'} = M_{h'} M_h$.

    Q is the orthonormal factor of `frame` (d, d), `spectra` $\mu$ (H, d). Heads on orthogonal subspaces are of this kind, and
    so are heads that share their leading eigenvectors; $\|M_h\|_F = |\mu_h|$ and the overlap of two heads is the cosine of
    their spectra.
    """

    frame: Float[Array, "d d"] = eqx.field(converter=real)
    spectra: Float[Array, "H d"] = eqx.field(converter=real)

    def __check_init__(self):
        f, mu = self.frame, self.spectra
        require_shape("frame", f, "(d, d)", f.ndim == 2 and f.shape[0] == f.shape[1])
        require_shape("spectra", mu, "(H, d)", mu.ndim == 2 and mu.shape[1] == f.shape[0])

    @property
    def matrix(self):
        q = orthonormal(self.frame)
        return symmetric(jnp.einsum("dk,hk,ek->hde", q, self.spectra, q))

    @property
    def count(self):
        return self.spectra.shape[0]

    @property
    def dimension(self):
        return self.frame.shape[0]


class GappedHeads(AbstractSymmetricHeads):
    r"""$M_h = Q_h\,\mathrm{diag}(\mu_1, \mu_1 - \gamma_h, \dots)\,Q_h^\top$ with the gap $\gamma_h = \mu_1 - \mu_2$ held.

    $Q_h$ is the orthonormal factor of `frame` (H, d, d), `top` $\mu_1$ (H,), `drops` (H, d-2) the logarithms of the further
    falls $\mu_{j} - \mu_{j+1}$, `gap` (H,) positive, without gradient.

    **Errors:** ValueError where a known gap is not positive, or d < 2.
    """

    frame: Float[Array, "H d d"] = eqx.field(converter=real)
    top: Float[Array, " H"] = eqx.field(converter=real)
    drops: Float[Array, "H d-2"] = eqx.field(converter=real)
    gap: Float[Array, " H"] = eqx.field(converter=real)

    def __check_init__(self):
        f = self.frame
        require_shape("frame", f, "(H, d, d) with d >= 2", f.ndim == 3 and f.shape[1] == f.shape[2] >= 2)
        H, d = f.shape[:2]
        for name, shape in (("top", (H,)), ("drops", (H, d - 2)), ("gap", (H,))):
            require_shape(name, getattr(self, name), str(shape), getattr(self, name).shape == shape)
        _require_positive("gap", self.gap)

    @property
    def spectrum(self) -> Float[Array, "H d"]:
        """Eigenvalues in falling order."""
        falls = jnp.concatenate([jax.lax.stop_gradient(self.gap)[:, None], jnp.exp(self.drops)], axis=1)
        return self.top[:, None] - jnp.pad(jnp.cumsum(falls, axis=1), ((0, 0), (1, 0)))

    @property
    def matrix(self):
        q = jax.vmap(orthonormal)(self.frame)
        return symmetric(jnp.einsum("hdk,hk,hek->hde", q, self.spectrum, q))

    @property
    def count(self):
        return self.frame.shape[0]

    @property
    def dimension(self):
        return self.frame.shape[-1]


class FixedNormHeads(AbstractSymmetricHeads):
    r"""$M_h = s_h N_h/\|N_h\|_F$ with $N_h$ the matrices of `inner` symmetric heads and `norms` $s_h$ (H,) held, without gradient.

    Strength can then neither grow nor be given up; what else holds for `inner` up to a positive factor still holds.

    **Errors:** ValueError where `inner` is not symmetric, or a known norm is not positive.
    """

    inner: AlignedHeads | AbstractSymmetricHeads
    norms: Float[Array, " H"] = eqx.field(converter=real)

    def __check_init__(self):
        require_shape("norms", self.norms, "(H,) like `inner`", self.norms.shape == (self.inner.count,))
        _require_positive("norms", self.norms)

    @property
    def matrix(self):
        inner = self.inner.matrix
        return inner * (jax.lax.stop_gradient(self.norms) / frobenius(inner))[:, None, None]

    @property
    def count(self):
        return self.inner.count

    @property
    def dimension(self):
        return self.inner.dimension


def orthonormal(a: Float[Array, "d k"]) -> Float[Array, "d k"]:
    """The orthonormal factor of a = Q R with positive diagonal of R: unique, so smooth in a of full column rank."""
    q, r = jnp.linalg.qr(a)
    return q * jnp.where(jnp.diagonal(r) < 0, -1, 1).astype(q.dtype)[None]


def symmetric(a: Float[Array, "H d d"]) -> Float[Array, "H d d"]:
    """The symmetric part of every matrix."""
    return (a + transpose(a)) / 2


def frobenius(matrix: Float[Array, "H d d"]) -> Float[Array, " H"]:
    r"""$\|M_h\|_F$, the strength of a head."""
    return jnp.sqrt(jnp.sum(matrix * matrix, axis=(1, 2)))


def overlaps(heads: AbstractHeads, d: int | None = None) -> Float[Array, "H H"]:
    r"""$\langle M_h, M_{h'}\rangle_F / \|M_h\|\,\|M_{h'}\|$ of the value matrices: 1 for equal heads, 0 for $M_h M_{h'} = 0$.

    `d` is needed only where the heads fit any dimension.
    """
    width = heads.dimension if heads.dimension is not None else d
    if width is None:
        raise ValueError("`d` must be given: these heads fit any dimension.")
    value = heads.dense(width).value
    unit = value / frobenius(value)[:, None, None]
    return jnp.einsum("hde,gde->hg", unit, unit)


def spectral_gap(matrix: Float[Array, "H d d"]) -> Float[Array, " H"]:
    r"""$\mu_1 - \mu_2$ of every symmetric matrix."""
    mu = jnp.linalg.eigvalsh(matrix)
    return mu[:, -1] - mu[:, -2]


def on_planes(heads: AlignedHeads | AbstractSymmetricHeads, k: int) -> OrthogonalHeads:
    r"""Heads with $M_h M_{h'} = 0$ of rank at most k as `OrthogonalHeads`; they are kept to rounding.

    **Errors:** ValueError unless the heads are of that kind (to 1e-6 of their norms).
    """
    M = heads.matrix
    H, d = M.shape[:2]
    if H * k > d:
        raise ValueError(f"`k` must be at most d/H = {d}/{H}, got {k}: orthogonal planes do not fit.")
    values, vectors = jnp.linalg.eigh(M)
    order = jnp.argsort(-jnp.abs(values), axis=1)[:, :k]
    planes = jnp.take_along_axis(vectors, order[:, None, :], axis=2)
    frame = jnp.moveaxis(planes, 0, 1).reshape(d, H * k)
    core = jax.vmap(jnp.diag)(jnp.take_along_axis(values, order, axis=1))
    made = OrthogonalHeads(frame, core)
    worst = float(jnp.max(jnp.abs(made.matrix - M)) / jnp.max(frobenius(M)))
    if not worst < 1e-6:
        raise ValueError(
            f"`heads` must act on mutually orthogonal planes of dimension {k}; the nearest such heads differ by {worst:.2g}. "
            "Draw them with `heads.orthogonal`, or use `FixedNormHeads`, which does not need planes."
        )
    return made


def on_shared_axes(heads: AlignedHeads | AbstractSymmetricHeads) -> CommutingHeads:
    r"""Commuting heads in their common eigenbasis; they are kept to rounding.

    **Errors:** ValueError unless all pairs commute (to 1e-6 of their norms).
    """
    M = np.asarray(heads.matrix)
    # A generic combination separates all joint eigenspaces, whatever its seed.
    _, q = np.linalg.eigh(np.einsum("h,hde->de", np.random.default_rng(0).uniform(1, 2, len(M)), M))
    made = CommutingHeads(q, np.einsum("dk,hde,ek->hk", q, M, q))
    worst = np.abs(np.asarray(made.matrix) - M).max() / np.linalg.norm(M, axis=(1, 2)).max()
    if not worst < 1e-6:
        raise ValueError(f"`heads` must commute; the nearest commuting heads found differ by {worst:.2g}.")
    return made


def gapped(key: PRNGKeyArray, H: int, d: int, gap: float) -> GappedHeads:
    r"""Random `GappedHeads`: uniform eigenvectors, $\mu_1 = 1$ and the given gap, later falls of mean $1/d$."""
    frame_key, drop_key = jr.split(key)
    drops = jnp.log(jr.exponential(drop_key, (H, d - 2)) / d)
    return GappedHeads(jr.normal(frame_key, (H, d, d)), jnp.ones(H), drops, jnp.full(H, float(gap)))


def _require_positive(name, a):
    if concrete(a) and not bool(jnp.all(a > 0)):
        raise ValueError(f"`{name}` must be positive, got {a}.")
