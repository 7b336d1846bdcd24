"""Constraints that hold for every value of the parameters, also after gradient steps."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from exact import close, velocity

from attnflow import AlignedHeads, AttentionField, Exponential, Heads, Softmax, heads, sphere
from attnflow.constrained import (
    CommutingHeads,
    FixedNormHeads,
    GappedHeads,
    OrthogonalHeads,
    SemidefiniteHeads,
    frobenius,
    gapped,
    on_planes,
    on_shared_axes,
    orthonormal,
    overlaps,
    spectral_gap,
)
from attnflow.fit import fit

H, d, k = 3, 7, 2


def family(name, key, dtype=np.float64):
    a, b = jr.split(key)
    made = {
        "semidefinite": lambda: SemidefiniteHeads(jr.normal(a, (H, k, d), dtype)),
        "orthogonal": lambda: OrthogonalHeads(jr.normal(a, (d, H * k), dtype), jr.normal(b, (H, k, k), dtype)),
        "commuting": lambda: CommutingHeads(jr.normal(a, (d, d), dtype), jr.normal(b, (H, d), dtype)),
        "gapped": lambda: jax.tree.map(lambda x: x.astype(dtype), gapped(a, H, d, 0.7)),
        "norm": lambda: FixedNormHeads(AlignedHeads(jr.normal(a, (H, d, d), dtype)), jnp.arange(1, H + 1, dtype=dtype)),
        "norm of orthogonal": lambda: FixedNormHeads(family("orthogonal", key, dtype), jnp.ones(H, dtype)),
    }
    return made[name]()


NAMES = ["semidefinite", "orthogonal", "commuting", "gapped", "norm", "norm of orthogonal"]


def holds(name, made, eps):
    """The constraint, by numpy, from the written-out matrices alone; `eps` in units of rounding."""
    M = np.asarray(made.matrix)
    unit = eps * np.finfo(M.dtype).eps
    size = np.linalg.norm(M, axis=(1, 2)).max()
    good = np.abs(M - M.swapaxes(1, 2)).max() <= unit * size
    if name == "semidefinite":
        mu = np.linalg.eigvalsh(M)
        good &= mu.min() >= -unit * size and np.abs(mu[:, :-k]).max() <= unit * size
    if "orthogonal" in name:
        products = np.einsum("hde,gef->hgdf", M, M)
        products[np.arange(H), np.arange(H)] = 0
        good &= np.abs(products).max() <= unit * size**2
    if name == "commuting":
        products = np.einsum("hde,gef->hgdf", M, M)
        good &= np.abs(products - products.swapaxes(0, 1)).max() <= unit * size**2
    if name == "gapped":
        mu = np.linalg.eigvalsh(M)
        good &= np.abs(mu[:, -1] - mu[:, -2] - np.asarray(made.gap)).max() <= unit * size
    if "norm" in name:
        good &= np.abs(np.linalg.norm(M, axis=(1, 2)) - np.asarray(made.norms)).max() <= unit * size
    return bool(good)


@pytest.mark.parametrize("name", NAMES)
def test_the_constraint_holds_before_and_after_a_rough_fit(name, key, dtype):
    target = jr.normal(jr.key(5), (H, d, d), dtype)

    def loss(made):
        return jnp.mean((made.matrix - target) ** 2)

    made = family(name, key, dtype)
    assert holds(name, made, 40)
    fitted, history = fit(loss, made, steps=60, optimiser=_ADAM)
    assert fitted.matrix.dtype == dtype and history.losses[-1] < history.losses[0]
    assert holds(name, fitted, 40)
    loose = AlignedHeads(fitted.matrix + 0.01 * target)  # without the parametrisation the same step breaks it
    assert name == "norm" or not holds(name.split()[-1], _like(fitted, loose.matrix), 40)


def _like(made, matrix):
    """Other matrices with the held numbers of `made`."""

    class Plain:
        gap = getattr(made, "gap", None)
        norms = getattr(made, "norms", None)

    Plain.matrix = matrix
    return Plain


@pytest.mark.parametrize("name", NAMES)
def test_a_constrained_head_moves_tokens_like_its_matrices(name, key):
    made, x = family(name, key), sphere.uniform(jr.key(1), 9, d)
    M = np.asarray(made.matrix)
    for kind, attention in (("softmax", Softmax(1.3)), ("exponential", Exponential(0.4))):
        assert close(AttentionField(made, attention)(0.0, x), velocity(kind, x, M, M, beta=attention.beta), eps=1e-6)
        assert close(
            AttentionField(made.aligned(), attention)(0.0, x), AttentionField(made, attention)(0.0, x), eps=1e-6
        )
    assert made.count == H and made.dimension == d
    assert isinstance(made.dense(d), Heads) and np.array_equal(made.score, made.value)


@pytest.mark.parametrize("name", NAMES)
def test_matrices_are_differentiated_exactly(name, key):
    made, weight = family(name, key), jr.normal(jr.key(2), (H, d, d))
    moving, rest = jax.tree.flatten(made)

    def value(leaves):
        return jnp.sum(jax.tree.unflatten(rest, leaves).matrix * weight)

    slope = jax.grad(value)(moving)
    tangent = [jr.normal(jr.fold_in(key, i), a.shape) for i, a in enumerate(moving)]
    held = {"gapped": 3}.get(name, len(moving) - 1 if "norm" in name else None)
    if held is not None:
        assert np.all(np.asarray(slope[held]) == 0)
        tangent[held] = jnp.zeros_like(tangent[held])
    step = 1e-5
    shifted = [value([a + s * step * t for a, t in zip(moving, tangent, strict=True)]) for s in (-1, 1)]
    expected = (shifted[1] - shifted[0]) / (2 * step)
    found = sum(jnp.sum(a * b) for a, b in zip(slope, tangent, strict=True))
    assert abs(found - expected) < 1e-8 * abs(expected) + 1e-8


def test_factored_semidefinite_heads_are_the_same_heads(key):
    made, x = family("semidefinite", key), sphere.uniform(jr.key(1), 9, d)
    assert close(
        AttentionField(made.factored(), Softmax(2.0))(0.0, x), AttentionField(made, Softmax(2.0))(0.0, x), eps=1e-6
    )
    assert made.factored().query(x).shape == (H, 9, k)


def test_the_orthonormal_factor_is_continuous_where_lapacks_changes_sign():
    a = jnp.array([[1e-9, 2.0], [1.0, 0.5], [0.3, 1.0]])
    b = a.at[0, 0].set(-1e-9)
    assert jnp.max(jnp.abs(orthonormal(a) - orthonormal(b))) < 1e-8
    assert close(orthonormal(a).T @ orthonormal(a), jnp.eye(2), eps=1e-7)
    assert jnp.max(jnp.abs(jnp.linalg.qr(a)[0] - jnp.linalg.qr(b)[0])) > 1


def test_orthogonal_heads_are_recognised_and_others_refused(key):
    plain = heads.orthogonal(key, 2, 8, 4, strengths=[1.0, -2.0])
    made = on_planes(plain, 4)
    assert close(made.matrix, plain.matrix, eps=1e-6)
    assert close(overlaps(made), jnp.eye(2), eps=1e-6)
    with pytest.raises(ValueError, match="mutually orthogonal planes"):
        on_planes(heads.goe(key, 2, 8), 4)
    with pytest.raises(ValueError, match="at most d/H"):
        on_planes(plain, 5)


def test_heads_that_commute_are_recognised_and_others_refused(key):
    plain = heads.orthogonal(key, 2, 8, 4, strengths=[1.0, -2.0])
    made = on_shared_axes(plain)
    assert close(made.matrix, plain.matrix, eps=1e-6)
    assert close(frobenius(made.matrix), np.linalg.norm(made.spectra, axis=1), eps=1e-6)
    mu = made.spectra / np.linalg.norm(made.spectra, axis=1, keepdims=True)
    assert close(overlaps(made), mu @ mu.T, eps=1e-6)
    with pytest.raises(ValueError, match="must commute"):
        on_shared_axes(heads.goe(key, 2, 8))


def test_overlaps_are_one_for_equal_heads_and_gaps_are_those_of_the_spectrum(key):
    M = heads.goe(key, 1, 5).matrix
    both = AlignedHeads(jnp.concatenate([M, -2 * M]))
    assert close(overlaps(both), jnp.array([[1.0, -1.0], [-1.0, 1.0]]), eps=1e-6)
    assert close(spectral_gap(jnp.diag(jnp.array([3.0, -5.0, 2.5]))[None]), jnp.array([0.5]))
    assert close(frobenius(jnp.diag(jnp.array([3.0, -4.0]))[None]), jnp.array([5.0]))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SemidefiniteHeads(jnp.ones((2, 3))), r"`factor` must have shape \(H, k, d\)"),
        (lambda: OrthogonalHeads(jnp.ones((4, 6)), jnp.ones((3, 2, 2))), "`frame` must be tall"),
        (lambda: OrthogonalHeads(jnp.ones((8, 5)), jnp.ones((3, 2, 2))), r"`frame` must have shape \(d, H k\)"),
        (lambda: OrthogonalHeads(jnp.ones((8, 6)), jnp.ones((3, 2, 1))), "`core`"),
        (lambda: CommutingHeads(jnp.ones((4, 3)), jnp.ones((2, 4))), r"`frame` must have shape \(d, d\)"),
        (lambda: CommutingHeads(jnp.eye(4), jnp.ones((2, 3))), r"`spectra` must have shape \(H, d\)"),
        (lambda: gapped(jr.key(0), 2, 4, -1.0), "`gap` must be positive"),
        (lambda: GappedHeads(jnp.ones((2, 3, 3)), jnp.ones(2), jnp.ones((2, 2)), jnp.ones(2)), "`drops`"),
        (lambda: FixedNormHeads(heads.goe(jr.key(0), 2, 4), jnp.zeros(2)), "`norms` must be positive"),
        (lambda: FixedNormHeads(heads.goe(jr.key(0), 2, 4), jnp.ones(3)), "`norms` must have shape"),
    ],
)
def test_bad_parameters_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


_ADAM = optax.adam(0.05)
