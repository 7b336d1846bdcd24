"""Claims of arXiv 2605.04279 against plain numpy, over random heads and tokens, and what they refuse."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from exact import relative_error, velocity

from attnflow import claims, observe, sphere
from attnflow.attention import Exponential, Linear, ReLU, Softmax
from attnflow.field import AttentionField, ZeroTemperatureField
from attnflow.heads import AlignedHeads, Heads, ScalarHeads, gaussian, goe, orthogonal
from attnflow.solve import solve

N, D = 8, 4


def usa(heads, beta=1.0, **kw):
    return AttentionField(heads, Exponential(beta), **kw)


def sa(heads, beta=1.0, **kw):
    return AttentionField(heads, Softmax(beta), **kw)


@pytest.fixture
def x(key):
    return sphere.uniform(key, N, D)


def energy(x, M, w, beta=1.0):
    """Total exponential energy in numpy."""
    return sum(w @ np.exp(beta * x @ m @ x.T) @ w for m in M) / (2 * beta)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_theorem_11_agrees_with_differences_of_the_energy(key, x, flat, weighted):
    heads = goe(key, 3, D)
    w = np.random.default_rng(0).dirichlet(np.ones(N)) if weighted else np.full(N, 1 / N)
    claim = claims.theorem_11(usa(heads, weights=jnp.asarray(w), flat=flat), x)
    assert claim.holds and relative_error(claim.lhs, claim.rhs) < 1e-10
    M, h, y = np.asarray(heads.matrix), 1e-5, np.asarray(x)
    v = velocity("exponential", y, M, M, w=w, flat=flat)
    assert relative_error((energy(y + h * v, M, w) - energy(y - h * v, M, w)) / (2 * h), claim.lhs) < 1e-7


def test_theorem_11_fails_for_softmax_by_the_known_amount():
    opposed = AlignedHeads(jnp.stack([jnp.eye(2), -jnp.eye(2)]))
    claim = claims.total_energy(sa(opposed), sphere.equiangular(2, 0.5))
    assert not claim.holds and relative_error(claim.lhs, -0.09571947390478555) < 1e-12


def test_one_softmax_head_and_positive_scalar_softmax_heads_always_raise_the_energy(key):
    def rate(key):
        a, b, c = jr.split(key, 3)
        x = sphere.uniform(a, 5, 3)
        scalar = ScalarHeads(jr.uniform(c, (3,)) * 3)
        return jnp.stack([claims.total_energy(sa(h, 2.0), x).slack for h in (goe(b, 1, 3), scalar)])

    assert jnp.min(jax.jit(jax.vmap(rate))(jr.split(key, 500))) >= 0


def test_theorems_12_and_39_are_never_violated_and_say_more_than_nothing(key):
    def slacks(key):
        a, b, c = jr.split(key, 3)
        x, heads = sphere.uniform(a, 6, 3), goe(b, 2, 3)
        off = 0.3 * jr.normal(c, (2, 3, 3))
        twelve = claims.theorem_12(usa(Heads(heads.matrix, heads.matrix + off)), x)
        narrow = claims.theorem_39(usa(heads), x)
        return twelve.slack, jnp.min(narrow.slack), twelve.rhs

    twelve, narrow, bound = jax.jit(jax.vmap(slacks))(jr.split(key, 1000))
    assert jnp.min(twelve) >= -1e-12 and jnp.min(narrow) >= -1e-12
    assert jnp.any(bound > 0)


def test_theorem_12_needs_symmetric_scores(key):
    def slack(key):
        a, b = jr.split(key)
        raw = 2 * jr.normal(b, (1, 3, 3))
        return claims.theorem_12(usa(Heads(raw, raw)), sphere.uniform(a, 6, 3)).slack

    assert jnp.min(jax.jit(jax.vmap(slack))(jr.split(key, 200))) < 0


def test_the_radial_shadow_is_what_flat_space_lacks(key, x):
    heads = orthogonal(key, 2, D, 2, jnp.array([1.0, 3.0]))
    for flat in (False, True):
        assert claims.theorems_16_17(usa(heads, flat=flat), x).holds
    assert claims.per_head_energy(usa(heads, flat=True), x).holds
    assert not claims.theorems_16_17(usa(goe(key, 2, D)), x).holds
    shadow = observe.radial_shadow(usa(heads), x)
    gap = claims.theorems_16_17(usa(heads, flat=True), x).rhs - claims.theorems_16_17(usa(heads), x).rhs
    np.testing.assert_allclose(gap, jnp.mean(shadow * jnp.sum(shadow, 0, keepdims=True), axis=1), rtol=1e-12)


def test_conditions_are_sufficient_and_ordered_for_orthogonal_heads(key):
    def slacks(key):
        a, b, c = jr.split(key, 3)
        field = usa(orthogonal(a, 2, 4, 2, 2 * jr.uniform(b, (2,))), 0.3)
        x = sphere.uniform(c, 4, 4)
        return (
            jnp.min(claims.condition_8(field, x).slack),
            jnp.min(claims.sharp_condition(field, x).slack),
            jnp.min(claims.per_head_energy(field, x).slack),
        )

    eight, sharp, rate = jax.jit(jax.vmap(slacks))(jr.split(key, 2000))
    assert jnp.all(sharp >= eight) and jnp.all(rate[sharp >= 0] >= 0)
    assert jnp.any(eight > 0) and jnp.any((sharp > 0) & (eight < 0)) and jnp.any((rate > 0) & (sharp < 0))


def test_claims_and_observed_margins_agree(key, x):
    field = usa(orthogonal(key, 2, D, 2), 0.7)
    condition8, sharp, exact = observe.dominance_margins(field, x)
    np.testing.assert_allclose(claims.condition_8(field, x).slack, condition8, atol=1e-13)
    np.testing.assert_allclose(claims.sharp_condition(field, x).slack, sharp, atol=1e-13)
    np.testing.assert_allclose(claims.per_head_energy(field, x).lhs, exact, rtol=1e-10)


def test_every_scalar_head_gains_at_every_beta_on_orthonormal_tokens():
    for beta in (0.1, 0.858, 3 * 0.858, 8.0):
        assert claims.per_head_energy(usa(ScalarHeads([1.0, 1.0]), beta), jnp.eye(10)).holds
    assert not claims.condition_8(usa(ScalarHeads([1.0, 1.0]), 0.86), jnp.eye(10)).holds


def test_dominance_is_lost_at_consensus_by_the_weaker_head(key):
    axes = AlignedHeads(jnp.array([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]]))
    angle = jnp.arccos(jnp.sqrt(0.3))
    claim = claims.per_head_energy(usa(axes, 0.5), sphere.circle(jnp.stack([angle] * 3)))
    assert relative_error(claim.lhs, [-0.062761117256066, 0.076656601721773]) < 1e-12
    field = usa(orthogonal(key, 2, 4, 2, jnp.array([1.0, 1.5])), 0.5)
    run = solve(field, sphere.uniform(key, 8, 4), jnp.linspace(0, 12.0, 13), save_tokens=True)
    kept = claims.radial_dominance(field, run)
    assert kept.lhs.shape == (13, 2) and jnp.all(kept.lhs[0] > 0) and not kept.holds
    last = solve(field, sphere.uniform(key, 8, 4), jnp.linspace(0, 12.0, 13))
    np.testing.assert_allclose(claims.radial_dominance(field, last).lhs[0], kept.lhs[-1], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(
    "attention", [Softmax(1.5), Exponential(0.5), ReLU(), Linear()], ids=lambda a: type(a).__name__
)
def test_the_equiangular_law_holds_for_equiangular_tokens_only(key, attention):
    field = AttentionField(ScalarHeads([0.7, 1.9]), attention)
    assert claims.equiangular_law(field, sphere.equiangular(6, 0.2)).holds
    assert not claims.equiangular_law(field, sphere.uniform(key, 6, 6)).holds


def test_rates_of_theorem_22(key):
    pair = ScalarHeads([1.0, 2.0])
    claim = claims.theorem_22_clustering_rate(sa(pair), jnp.eye(8))
    assert claim.holds and relative_error(claim.rhs, 2 / (np.e + 7) + 4 / (np.e**2 + 7)) < 1e-13
    assert not claims.theorem_22_clustering_rate(sa(pair), sphere.equiangular(8, 0.1)).holds
    tight = sphere.retract(jnp.eye(D)[:1] + 1e-5 * sphere.uniform(key, N, D))
    late = claims.theorem_22_late_rate(sa(pair), tight, tolerance=1e-4)
    assert late.holds and relative_error(late.rhs, 6.0) < 1e-13
    late = claims.theorem_22_late_rate(usa(pair), tight, tolerance=1e-4)
    assert late.holds and relative_error(late.rhs, 2 * np.e + 4 * np.e**2) < 1e-12
    assert not claims.theorem_22_late_rate(sa(pair), sphere.equiangular(8, 0.3), tolerance=1e-4).holds


def test_entropy_falls_for_two_clusters_by_the_known_amount():
    four = sphere.circle(jnp.array([0.6, -0.6, jnp.pi + 0.6, jnp.pi - 0.6]))
    field = sa(ScalarHeads([1.0]))
    claim = claims.theorem_27(field, four)
    assert not claim.holds and relative_error(claim.lhs, -0.018953009868) < 1e-9
    assert relative_error(observe.entropy(field, four), 1.15050) < 1e-5
    assert claims.theorem_27(sa(ScalarHeads([1.0, 2.0]), 2.0), sphere.equiangular(6, 0.2)).holds


def test_the_entropy_identity_holds_for_any_heads_weights_and_masses(key, x):
    w = jnp.asarray(np.random.default_rng(1).dirichlet(np.ones(N)))
    for field in (sa(gaussian(key, 3, D), 2.0, weights=w), sa(goe(key, 1, D), 1.0)):
        claim = claims.entropy_identity(field, x)
        assert claim.holds and relative_error(claim.lhs, claim.rhs) < 1e-8


def test_linearised_times_are_true_far_below_one_over_n_only():
    one = ScalarHeads([1.0])
    for attention in (ReLU(), Softmax(1.0)):
        field = AttentionField(one, attention)
        near = sphere.equiangular(50, 1e-5)
        assert claims.theorem_25(field, near, cosine1=1e-4, tolerance=0.02).holds
        assert not claims.theorem_25(field, near, cosine1=0.5, tolerance=0.02).holds


REFUSED = {
    "theorem_11 heads": (claims.theorem_11, lambda k: usa(gaussian(k, 2, D)), "AlignedHeads"),
    "theorem_11 attention": (claims.theorem_11, lambda k: sa(goe(k, 2, D)), "unnormalised"),
    "theorem_12": (claims.theorem_12, lambda k: sa(goe(k, 2, D)), "Exponential"),
    "theorems_16_17": (claims.theorems_16_17, lambda k: usa(gaussian(k, 2, D)), "M_h = M_h"),
    "theorem_19": (claims.theorem_19, lambda k: usa(goe(k, 2, D)), "ScalarHeads"),
    "theorem_22": (claims.theorem_22_clustering_rate, lambda k: usa(ScalarHeads([1.0])), "Softmax"),
    "theorem_27": (claims.theorem_27, lambda k: sa(goe(k, 2, D)), "lambda_h I"),
    "entropy_identity": (claims.entropy_identity, lambda k: sa(goe(k, 2, D), causal=True), "causal"),
    "theorem_39": (claims.theorem_39, lambda k: usa(gaussian(k, 2, D)), "AlignedHeads"),
    "no attention": (claims.condition_8, lambda k: ZeroTemperatureField(goe(k, 1, D)), "AttentionField"),
}


@pytest.mark.parametrize(("claim", "field", "hypothesis"), REFUSED.values(), ids=REFUSED)
def test_a_missing_hypothesis_is_a_type_error_that_names_it(key, x, claim, field, hypothesis):
    with pytest.raises(TypeError, match=hypothesis):
        claim(field(key), x)


def test_hypotheses_measure_their_miss(key, x):
    plain, diagonal = gaussian(key, 2, D), ScalarHeads([1.0, 2.0])
    flush = orthogonal(key, 2, D, 2)
    assert claims.aligned_heads(sa(flush), x).holds and not claims.aligned_heads(sa(plain), x).holds
    assert claims.scalar_heads(sa(diagonal), x).holds and not claims.scalar_heads(sa(flush), x).holds
    assert (
        claims.orthogonal_heads(sa(flush), x).holds
        and relative_error(claims.orthogonal_heads(sa(diagonal), x).lhs, 2) < 1e-12
    )
    assert claims.symmetric_scores(sa(flush), x).holds and not claims.symmetric_scores(sa(plain), x).holds
    assert (
        claims.positive_strengths(sa(diagonal), x).holds
        and not claims.positive_strengths(sa(ScalarHeads([-1.0])), x).holds
    )
    assert (
        claims.equiangular_tokens(sa(diagonal), sphere.equiangular(5, 0.3)).holds
        and not claims.equiangular_tokens(sa(diagonal), x).holds
    )
    assert claims.orthonormal_tokens(sa(diagonal), jnp.eye(5)).holds
    assert relative_error(claims.orthonormal_tokens(sa(diagonal), sphere.equiangular(5, 0.3)).lhs, 0.3) < 1e-12
    uneven = sa(diagonal, weights=jnp.array([0.5, 0.25, 0.25]))
    assert not claims.orthonormal_tokens(uneven, jnp.eye(3)).holds


def test_slack_is_differentiable_in_beta_and_heads_under_jit_and_vmap(key, x):
    heads = orthogonal(key, 2, D, 2)

    def slack(beta):
        return jnp.min(claims.condition_8(usa(heads, beta), x).slack)

    b, h = jnp.array([0.2, 0.4]), 1e-6
    slope = jax.jit(jax.vmap(jax.grad(slack)))(b)
    np.testing.assert_allclose(slope, [(slack(v + h) - slack(v - h)) / (2 * h) for v in b], rtol=1e-6)
    gradient = jax.grad(lambda raw: jnp.min(claims.theorem_39(usa(AlignedHeads(raw)), x).slack))(heads.raw)
    assert np.all(np.isfinite(gradient)) and np.any(gradient != 0)


def test_claims_keep_the_dtype_of_the_tokens(key, x, dtype):
    y = x.astype(dtype)
    for claim in (
        claims.theorem_11(usa(goe(key, 2, D)), y),
        claims.theorems_16_17(usa(orthogonal(key, 2, D, 2)), y),
        claims.theorem_12(usa(goe(key, 2, D)), y),
        claims.theorem_39(usa(goe(key, 2, D)), y),
        claims.entropy_identity(sa(gaussian(key, 2, D)), y),
    ):
        assert claim.holds and claim.lhs.dtype == dtype, claim


def test_a_claim_prints_its_sides_hypothesis_and_verdict(key, x):
    text = repr(claims.theorem_11(usa(goe(key, 2, D)), x))
    assert "Theorem 11" in text and "holds" in text and "aligned heads" in text and " = " in text
    assert "does not hold" in repr(claims.condition_8(usa(ScalarHeads([1.0, 1.0]), 5.0), jnp.eye(4)))
    traced = []
    eqx.filter_jit(lambda: traced.append(repr(claims.total_energy(usa(goe(key, 2, D)), x))))()
    assert "traced" in traced[0]


def test_a_nan_never_holds(key, x):
    bad = jnp.asarray(x).at[0, 0].set(jnp.nan)
    assert not claims.total_energy(usa(goe(key, 2, D)), bad).holds
