"""Observables against naive numpy, derivatives against formulas, theorems at their hypotheses and without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import attention_matrix, close, relative_error

import attnflow as af
from attnflow import heads as families
from attnflow import observe as ob
from attnflow import sphere
from attnflow.reduce import Blocked, Dense

KINDS = {"softmax": af.Softmax(1.5), "exponential": af.Exponential(1.5), "relu": af.ReLU(), "linear": af.Linear()}
BIG_PHI = {
    "softmax": lambda s: np.exp(1.5 * s) / 1.5,
    "exponential": lambda s: np.exp(1.5 * s) / 1.5,
    "relu": lambda s: np.maximum(s, 0) ** 2 / 2,
    "linear": lambda s: s**2 / 2,
}


def weights(n):
    w = np.random.default_rng(1).uniform(0.1, 1, n)
    return w / w.sum()


def naive_energies(kind, heads, x, w):
    x = np.asarray(x, np.float64)
    return [w @ BIG_PHI[kind](x @ b @ x.T) @ w / 2 for b in np.asarray(heads.score)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", [None, Dense(), Blocked(8, 16)], ids=["chosen", "dense", "blocked"])
def test_energies_are_the_double_sums(kind, reduction, key, dtype):
    x, w, heads = sphere.uniform(key, 20, 3), weights(20), families.gaussian(key, 2, 3)
    field = af.AttentionField(heads, KINDS[kind], w, reduction=reduction)
    want = naive_energies(kind, heads, x, w)
    x = x.astype(dtype)
    assert relative_error(jax.jit(ob.head_energies)(field, x), want) < 50 * np.finfo(dtype).eps
    assert relative_error(jnp.exp(ob.log_energy(field, x)), sum(want)) < 50 * np.finfo(dtype).eps


def test_log_energy_holds_where_the_energy_does_not_fit(key):
    x = sphere.uniform(key, 10, 3)
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Exponential(1e4))
    assert 9.9e3 < float(ob.log_energy(field, x)) < 1e4
    with pytest.raises(ValueError, match="`log_energy`"):
        ob.energy(field, x)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(0.0)), "`beta` = 0"),
        (af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(1.0), causal=True), "causal"),
        (af.AttentionField(af.ScalarHeads([1.0]), af.Hardmax()), "no energy"),
    ],
)
def test_energies_that_do_not_exist_are_refused(field, message, key):
    with pytest.raises(ValueError, match=message):
        ob.energy(field, sphere.uniform(key, 5, 3))
    with pytest.raises(TypeError, match="ZeroTemperatureField"):
        ob.energy(af.ZeroTemperatureField(af.Heads(np.eye(3)[None], np.eye(3)[None])), sphere.uniform(key, 5, 3))


@pytest.mark.parametrize("kind", ["exponential", "relu", "linear"])
@pytest.mark.parametrize("flat", [False, True], ids=["sphere", "flat"])
def test_total_energy_rises_at_the_mean_squared_speed(kind, flat, key):
    """Theorem 11: dE/dt = sum_i w_i |xdot_i|^2 for aligned heads of an unnormalised attention."""
    x, heads = sphere.uniform(key, 20, 3), families.goe(key, 3, 3)
    field = af.AttentionField(heads, KINDS[kind], weights(20), flat=flat)
    assert relative_error(ob.energy_rate(field, x), ob.dissipation(field, x)) < 1e-10
    crooked = af.AttentionField(families.gaussian(key, 3, 3), KINDS[kind], flat=flat)
    assert relative_error(ob.energy_rate(crooked, x), ob.dissipation(crooked, x)) > 1e-2


def test_softmax_energy_can_fall():
    """n = 2, d = 2, M = (I, -I), beta = 1, cosine 1/2: dE/dt < 0."""
    heads = af.AlignedHeads(jnp.stack([jnp.eye(2), -jnp.eye(2)]))
    field = af.AttentionField(heads, af.Softmax(1.0))
    x = sphere.circle(jnp.array([0.0, jnp.pi / 3]))
    assert relative_error(ob.energy_rate(field, x), -0.09571947390478555) < 1e-12
    single = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(1.0))
    assert float(ob.energy_rate(single, x)) > 0


@pytest.mark.parametrize("kind", ["exponential", "relu", "linear"])
def test_exact_margin_is_the_energy_rate_of_the_head(kind, key):
    x = sphere.uniform(key, 20, 6)
    heads = families.orthogonal(key, 2, 6, 3, jnp.array([1.0, 2.0]))
    field = af.AttentionField(heads, KINDS[kind], weights(20))
    assert relative_error(ob.dominance_margins(field, x)[2], ob.head_energy_rates(field, x)) < 1e-10
    tilted = af.AttentionField(families.gaussian(key, 2, 6), KINDS[kind], weights(20))
    assert relative_error(ob.dominance_margins(tilted, x)[2], ob.head_energy_rates(tilted, x)) > 1e-2


def test_margins_and_shadow_equal_their_formulas(key):
    x, w, heads = sphere.uniform(key, 15, 3), weights(15), families.gaussian(key, 3, 3)
    field = af.AttentionField(heads, af.Softmax(1.5), w)
    xs = np.asarray(x)
    f = np.stack(
        [
            attention_matrix("softmax", xs @ b @ xs.T, w, 1.5) @ xs @ v.T
            for b, v in zip(np.asarray(heads.score), np.asarray(heads.value), strict=True)
        ]
    )
    a = np.einsum("hnd,nd->hn", f, xs)
    pf = f - a[..., None] * xs
    others = np.abs(a).sum(0) - np.abs(a)
    condition8, sharp, exact = ob.dominance_margins(field, x)
    assert close(ob.radial_shadow(field, x), a, eps=1e-6)
    assert close(condition8, (pf**2).sum(-1) - np.linalg.norm(f, axis=-1) * others, eps=1e-6)
    assert close(sharp, (pf**2).sum(-1) - np.abs(a) * others, eps=1e-6)
    assert close(exact, np.einsum("hnd,nd,n->h", f, pf.sum(0), w), eps=1e-6)


@pytest.mark.parametrize("kind", ["softmax", "exponential", "hardmax"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("reduction", [None, Dense()], ids=["differences", "dense"])
def test_entropy_and_its_deficit_equal_plain_numpy(kind, causal, reduction, key):
    x, w, heads = sphere.uniform(key, 12, 3), weights(12), families.gaussian(key, 2, 3)
    attention = af.Hardmax() if kind == "hardmax" else KINDS[kind]
    field = af.AttentionField(heads, attention, w, causal=causal, reduction=reduction)
    xs = np.asarray(x)
    entropy, deficit = [], []
    for b in np.asarray(heads.score):
        p = attention_matrix("hardmax" if kind == "hardmax" else "softmax", xs @ b @ xs.T, w, 1.5, causal)
        seen = np.tril(np.broadcast_to(w, (12, 12))) if causal else np.broadcast_to(w, (12, 12))
        share = seen / seen.sum(1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy.append(w @ -np.where(p > 0, p * np.log(p), 0).sum(1))
            deficit.append(w @ np.where(p > 0, p * np.log(p / share), 0).sum(1))
    assert close(ob.entropy(field, x), entropy, eps=1e-6)
    assert close(ob.entropy_deficit(field, x), deficit, eps=1e-6)


def test_entropy_deficit_keeps_its_digits_at_consensus():
    """Equiangular tokens: the deficit is about beta^2 lam^2 (1 - gamma)^2 (n - 1)/(2 n^2)."""
    n, beta = 8, 2.0
    for delta in (1e-4, 1e-8):
        x = sphere.equiangular(n, 1 - delta)
        x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
        got = ob.entropy_deficit(af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(beta)), x)[0]
        assert relative_error(got, beta**2 * delta**2 * (n - 1) / (2 * n**2)) < 10 * delta + 1e-6
    same = jnp.broadcast_to(jnp.array([0.6, 0.8]), (5, 2))
    assert float(ob.entropy_deficit(af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(3.0)), same)[0]) == 0


def test_entropy_of_separated_tokens_at_large_beta_is_zero_not_nan():
    x = jnp.array([[1.0, 0, 0], [0, 1, 0], [-1, 0, 0]], jnp.float32)
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(200.0))
    assert 0 <= float(ob.entropy(field, x)[0]) < 1e-6
    slope = jax.grad(lambda b: ob.entropy(af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(b)), x)[0])(200.0)
    assert np.isfinite(slope)


def test_relu_and_linear_have_no_entropy(key):
    for attention in (af.ReLU(), af.Linear()):
        with pytest.raises(ValueError, match="no entropy"):
            ob.entropy(af.AttentionField(af.ScalarHeads([1.0]), attention), sphere.uniform(key, 4, 3))


def test_cloud_statistics_equal_plain_numpy(key):
    x, w = sphere.uniform(key, 30, 3), weights(30)
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(1.0), w)
    gram, pairs = np.asarray(x @ x.T), np.outer(w, w) * (1 - np.eye(30))
    assert close(ob.mean_cosine(field, x), np.sum(pairs * gram) / pairs.sum(), eps=1e-6)
    assert close(ob.minimum_cosine(field, x), gram.min(), eps=1e-6)
    assert close(ob.order_parameter(field, x), np.linalg.norm(w @ np.asarray(x)), eps=1e-6)
    assert close(ob.pair_fraction(x, 0.5), ((gram > 0.5).sum() - 30) / (30 * 29), eps=1e-6)
    mu = np.linalg.eigvalsh(np.asarray(x).T @ (w[:, None] * np.asarray(x)))
    assert close(ob.effective_rank(field, x), np.exp(-np.sum(mu * np.log(mu))), eps=1e-6)
    assert close(ob.overlap(field, x, jnp.eye(3)[:, :2]), w @ np.linalg.norm(np.asarray(x)[:, :2], axis=1), eps=1e-6)
    assert float(ob.mean_cosine(af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(1.0)), x[:1])) == 1


def test_clusters_are_the_components_of_a_chain():
    # steps of 2 degrees: neighbours are close, ends are not; a rank of the thresholded matrix would miscount
    x = sphere.circle(jnp.deg2rad(jnp.array([0.0, 90, 2, 4, 6, 8, 91, 200])))
    count, labels = jax.jit(lambda x: ob.clusters(x, 0.999))(x)
    assert int(count) == 3
    assert labels.tolist() == [0, 1, 0, 0, 0, 0, 1, 2]
    assert ob.cluster_sizes(labels).tolist() == [5, 2, 1, 0, 0, 0, 0, 0]


def test_resolution_compares_gaps_with_the_kernel():
    x, w = sphere.circle_quadrature(np.ones_like, 100)
    field = af.AttentionField(af.ScalarHeads([2.0]), af.Softmax(8.0), w)
    assert close(ob.resolution(field, x), (2 * np.pi / 100) / (0.3 / np.sqrt(16)), eps=1e-4)


@pytest.mark.parametrize("name", [n for n in ob.OBSERVABLES if n != "resolution"])
def test_observable_survives_jit_vmap_grad_and_float32(name, key):
    xs = sphere.uniform(key, 24, 3).reshape(2, 12, 3)
    field = af.AttentionField(families.goe(key, 2, 3), af.Softmax(1.5))

    def total(x):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(ob.OBSERVABLES[name](field, x)))

    both = jax.jit(jax.vmap(total))(xs)
    assert close(both, jnp.stack([total(x) for x in xs]), eps=1e-5)
    assert close(total(xs[0].astype(jnp.float32)), np.float32(both[0]), eps=2)
    v = sphere.uniform(key, 12, 3)
    slope = jnp.sum(jax.grad(total)(xs[0]) * v)
    central = (total(xs[0] + 1e-6 * v) - total(xs[0] - 1e-6 * v)) / 2e-6
    assert abs(float(slope - central)) < 1e-6 * max(1.0, abs(float(central)))


def test_speed_has_a_finite_gradient_at_an_equilibrium():
    x = jnp.broadcast_to(jnp.array([0.6, 0.8]), (4, 2))
    slope = jax.grad(lambda b: ob.speed(af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(b)), x))(2.0)
    assert float(slope) == 0
