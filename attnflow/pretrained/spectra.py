r"""What the weights of heads alone say: symmetry, alignment, spectra and angles, from factors, at O(d k^2) per head.

Heads are given as factors on the sphere, $M = Q^\top K$ (score) and $N = O W$ (value), each (k, d) or (d, k). A product of
factors acts between their row spaces, so after one QR of $(Q^\top, K^\top)$ every norm and eigenvalue is that of a small
core matrix; no d x d matrix is formed.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Complex, Float

Array = np.ndarray


class Spectra(NamedTuple):
    r"""Per head (H,): the quantities the theorems' hypotheses speak of.

    - `symmetry_defect`, `product_defect`: $\|A - A^\top\|_F/\|A\|_F$ of $M$ and of $N M^\top$; 0 symmetric, sqrt 2
      unrelated, 2 antisymmetric.
    - `alignment`: cosine of M and N in Frobenius inner product; 1 where $V = M$ up to a factor.
    - `complex_share`, `negative_share`: of the k eigenvalues of $N M^\top$ that can be non-zero, how many are complex,
      and how many have a negative real part.
    - `gap`: (Re mu_1 - Re mu_2)/max |mu| of these, ordered by real part; 0 for a complex leading pair.
    - `positive_share`: positive part of the sum of |eigenvalues| of $(M + M^\top)/2$.
    - `scalar_defect`: $\|M - (\mathrm{tr} M/d) I\|_F/\|M\|_F$; 0 for scalar heads, at least $\sqrt{1 - k/d}$ at rank k.
    - `stable_rank`: $\|M\|_F^2/\|M\|_2^2$; `beta_op`: $\|M\|_2$; `beta_frobenius`: $\|M\|_F/\sqrt k$;
      `score_rms`: $\|M\|_F/d$, the score's size between random tokens; `trace`: tr(M)/d; `copying`:
      $\mathrm{tr}\,N/(\|N\|_F \sqrt k)$.
    """

    symmetry_defect: Float[Array, " H"]
    alignment: Float[Array, " H"]
    product_defect: Float[Array, " H"]
    complex_share: Float[Array, " H"]
    negative_share: Float[Array, " H"]
    gap: Float[Array, " H"]
    positive_share: Float[Array, " H"]
    scalar_defect: Float[Array, " H"]
    stable_rank: Float[Array, " H"]
    beta_op: Float[Array, " H"]
    beta_frobenius: Float[Array, " H"]
    score_rms: Float[Array, " H"]
    trace: Float[Array, " H"]
    copying: Float[Array, " H"]


def spectra(
    query: Float[Array, "H k d"],
    key: Float[Array, "H k d"],
    value: Float[Array, "H k d"],
    output: Float[Array, "H d k"],
) -> Spectra:
    """The spectra of heads from their factors; NaN for a head that is zero."""
    k, d = query.shape[1:]
    o, t = _t(output), _t
    m, n = _core(query, key), _core(o, value)
    product = _core((value @ t(key)).swapaxes(-1, -2) @ o, query)  # N M^T = O (W K^T) Q
    mu = eigenvalues(query, key, value, output)
    size = np.max(np.abs(mu), axis=-1)
    leading = np.sort(mu.real, axis=-1)[:, ::-1]
    frobenius, norm = np.linalg.norm(m, axis=(1, 2)), np.linalg.norm(m, ord=2, axis=(1, 2))
    symmetric = np.linalg.eigvalsh((m + t(m)) / 2)
    value_norm = np.linalg.norm(n, axis=(1, 2))
    trace = np.einsum("hkd,hkd->h", query, key)
    inner = np.einsum("hkl,hkl->h", query @ output, key @ t(value))
    with np.errstate(invalid="ignore", divide="ignore"):
        return Spectra(
            symmetry_defect=_defect(m),
            alignment=inner / (frobenius * value_norm),
            product_defect=_defect(product),
            complex_share=np.mean(np.abs(mu.imag) > 1e-9 * size[:, None], axis=-1),
            negative_share=np.mean(mu.real < 0, axis=-1),
            gap=(leading[:, 0] - leading[:, 1]) / size if k > 1 else np.where(size > 0, 1.0, np.nan),
            positive_share=np.sum(np.maximum(symmetric, 0), axis=-1) / np.sum(np.abs(symmetric), axis=-1),
            scalar_defect=np.sqrt(np.maximum(1 - trace**2 / (d * frobenius**2), 0)),
            stable_rank=(frobenius / norm) ** 2,
            beta_op=norm,
            beta_frobenius=frobenius / np.sqrt(k),
            score_rms=frobenius / d,
            trace=trace / d,
            copying=np.einsum("hdk,hkd->h", output, value) / (value_norm * np.sqrt(k)),
        )


def eigenvalues(
    query: Float[Array, "H k d"],
    key: Float[Array, "H k d"],
    value: Float[Array, "H k d"],
    output: Float[Array, "H d k"],
) -> Complex[Array, "H k"]:
    r"""The k eigenvalues of $N M^\top = O\,(W K^\top)\,Q$ that can be non-zero: those of the k x k matrix $(W K^\top)(Q O)$."""
    return np.linalg.eigvals((value @ _t(key)) @ (query @ output)).astype(np.complex128)


def _t(a: Array) -> Array:
    return np.swapaxes(a, -1, -2)


def _triangular(rows: Array) -> Array:
    """The factor R of rows^T = U R: what remains of the rows up to an isometry."""
    return np.asarray(np.linalg.qr(_t(rows), mode="r"))


def _core(left: Float[Array, "H k d"], right: Float[Array, "H k d"]) -> Array:
    """left^T right in an orthonormal basis of both row spaces: same norms, symmetry and non-zero eigenvalues."""
    basis = _triangular(np.concatenate([left, right], axis=1))
    return basis[..., : left.shape[1]] @ _t(basis[..., left.shape[1] :])


def _defect(a: Array) -> Array:
    return np.linalg.norm(a - _t(a), axis=(1, 2)) / np.linalg.norm(a, axis=(1, 2))


class Angles(NamedTuple):
    """Principal angles in degrees between the row spaces of every two heads (pairs,)."""

    smallest: Float[Array, " pairs"]
    median: Float[Array, " pairs"]
    rms: Float[Array, " pairs"]


def principal_angles(factors: Float[Array, "H k d"]) -> Angles:
    r"""Smallest, median and rms-cosine angle $\arccos\sqrt{\mathrm{mean}\cos^2}$ for each pair of heads.

    Independent random k-planes have $E\cos^2 = k/d$, so $\arccos\sqrt{k/d}$ ($\arccos H^{-1/2}$ where Hk = d) is no
    sign of training: compare `baseline`.
    """
    frames = np.linalg.qr(_t(factors))[0]
    a, b = np.triu_indices(len(factors), 1)
    return _angles(_t(frames[a]) @ frames[b])


def own_angles(left: Float[Array, "H k d"], right: Float[Array, "H k d"]) -> Angles:
    """The same between two row spaces of each head."""
    return _angles(_t(np.linalg.qr(_t(left))[0]) @ np.linalg.qr(_t(right))[0])


def _angles(overlap: Array) -> Angles:
    cos = np.clip(np.linalg.svd(overlap, compute_uv=False), 0, 1)
    angle = np.degrees(np.arccos(cos))
    rms = np.degrees(np.arccos(np.sqrt(np.mean(cos**2, axis=-1))))
    return Angles(angle.min(axis=-1, initial=90.0), np.median(angle, axis=-1), rms)


def overlaps(query: Float[Array, "H k d"], key: Float[Array, "H k d"]) -> Float[Array, "H H"]:
    r"""$\|M_a M_b\|_2 / (\|M_a\|_2 \|M_b\|_2)$ for every ordered pair of heads: 0 where they are orthogonal."""
    q, k = _triangular(query), _triangular(key)
    norm = np.linalg.norm(q @ _t(k), ord=2, axis=(1, 2))
    with np.errstate(invalid="ignore", divide="ignore"):
        rows = [
            # M_a M_b = Q_a^T (K_a Q_b^T) K_b, and only the triangular factor of Q_a and K_b enters the norm
            np.linalg.norm(q[a] @ (key[a] @ _t(query)) @ _t(k), ord=2, axis=(1, 2)) / (norm[a] * norm)
            for a in range(len(query))
        ]
    return np.stack(rows)


def baseline(heads: int, width: int, dimension: int, *, seed: int = 0) -> tuple[Array, Array, Array, Array]:
    """Factors (query, key, value, output) of random Gaussian heads of the same shape, the null model of every table."""
    rng = np.random.default_rng(seed)
    q, k, v, o = rng.standard_normal((4, heads, width, dimension))
    return q, k, v, _t(o)
