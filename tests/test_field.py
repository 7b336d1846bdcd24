"""The velocity against plain numpy, its symmetries, and its accuracy where naive code loses every digit."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import close, relative_error, velocity

import attnflow as af
from attnflow import heads as families
from attnflow import sphere
from attnflow.reduce import Blocked, Dense, Differences

ATTENTIONS = {
    "softmax": af.Softmax(2.0),
    "exponential": af.Exponential(2.0),
    "relu": af.ReLU(),
    "linear": af.Linear(),
    "hardmax": af.Hardmax(),
}
REDUCTIONS = {"dense": Dense(), "blocked": Blocked(16, 8), "differences": Differences(), "chosen": None}


def family(name, key, d=3):
    if name == "dense":
        return families.gaussian(key, 2, d)
    if name == "aligned":
        return families.goe(key, 2, d)
    if name == "scalar":
        return af.ScalarHeads([1.0, -0.5])
    q, k, v = jax.random.normal(key, (3, 2, 2, d))
    return af.FactoredHeads(q, k, v, jax.random.normal(key, (2, d, 2)))


@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize("heads_name", ["dense", "aligned", "scalar", "factored"])
def test_velocity_equals_plain_numpy(kind, heads_name, key, dtype):
    x = sphere.uniform(key, 30, 3)
    heads = family(heads_name, key)
    plain = heads.dense(3)
    w = np.random.default_rng(0).uniform(0, 1, 30)
    w[3] = 0
    w /= w.sum()
    for causal, flat, reduction in itertools.product((False, True), (False, True), (Dense(), Differences())):
        field = af.AttentionField(heads, ATTENTIONS[kind], w, causal=causal, flat=flat, reduction=reduction)
        got = field(0.0, x.astype(dtype), None)
        want = velocity(kind, x, plain.score, plain.value, w=w, beta=2.0, causal=causal, flat=flat)
        assert got.dtype == dtype
        assert relative_to_largest(got, want) < (3e-6 if dtype == np.float32 else 1e-14)


def relative_to_largest(a, b):
    return float(np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max())


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_field_is_homogeneous_of_degree_one(kind, key):
    x = sphere.uniform(key, 20, 3)
    field = af.AttentionField(family("dense", key), ATTENTIONS[kind])
    scale = 1 + jax.random.uniform(key, (20, 1))
    assert close(field(0.0, scale * x), scale * field(0.0, x), eps=1e-5)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_field_is_equivariant_under_rotations_and_permutations(kind, key):
    x = sphere.uniform(key, 20, 3)
    heads = family("dense", key)
    field = af.AttentionField(heads, ATTENTIONS[kind])
    v = field(0.0, x)
    turn = jnp.linalg.qr(jax.random.normal(key, (3, 3)))[0]
    turned = af.Heads(turn @ heads.score @ turn.T, turn @ heads.value @ turn.T)
    assert close(af.AttentionField(turned, ATTENTIONS[kind])(0.0, x @ turn.T), v @ turn.T, eps=1e-5)
    order = jax.random.permutation(key, 20)
    assert close(field(0.0, x[order]), v[order], eps=1e-5)
    swapped = af.Heads(heads.score[::-1], heads.value[::-1])
    assert close(af.AttentionField(swapped, ATTENTIONS[kind])(0.0, x), v, eps=1e-5)
    assert np.array_equal(field(0.0, -x), -v)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_splitting_a_token_into_duplicates_changes_no_velocity(kind, key):
    x = sphere.uniform(key, 12, 3)
    heads = family("dense", key)
    w = jnp.full(12, 1 / 14).at[5].set(3 / 14)
    whole = af.AttentionField(heads, ATTENTIONS[kind], w)(0.0, x)
    split = jnp.concatenate([x, x[5:6], x[5:6]])
    assert close(af.AttentionField(heads, ATTENTIONS[kind])(0.0, split)[:12], whole, eps=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_is_finite_and_right_at_every_beta(reduction, causal, key, dtype):
    x = sphere.uniform(key, 24, 3).astype(dtype)
    heads = family("aligned", key)

    @jax.jit
    def evaluate(beta):
        return af.AttentionField(heads, af.Softmax(beta), causal=causal, reduction=REDUCTIONS[reduction])(0.0, x)

    for beta in (0.0, 1.0, 1e2, 1e3, 1e4):
        got = evaluate(jnp.asarray(beta))
        want = velocity("softmax", x, heads.score, heads.value, beta=beta, causal=causal)
        assert np.isfinite(got).all()
        allowed = 4e-16 if dtype == np.float64 else 2e-7
        assert relative_to_largest(got, want) < allowed * (100 + 10 * beta)


def test_exponential_field_is_finite_in_scaled_form_and_right_in_log(key):
    x = sphere.uniform(key, 24, 3)
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Exponential(1e4))
    v, c = field.scaled(x)
    assert np.isfinite(v).all()
    # the token's own term has no tangential part: leave it out, so that the reference does not cancel
    gap = 0.5 * np.sum((np.asarray(x)[:, None] - np.asarray(x)[None]) ** 2, axis=-1)
    coefficients = np.exp(-1e4 * gap - (float(c) - 1e4)) / 24 * (1 - np.eye(24))
    want = coefficients @ np.asarray(x)
    want -= np.sum(want * np.asarray(x), axis=1, keepdims=True) * np.asarray(x)
    assert relative_to_largest(v, want) < 1e-9
    assert not np.isfinite(field(0.0, x)).all()


@pytest.mark.parametrize("heads", [af.ScalarHeads([1.0]), af.AlignedHeads(jnp.eye(2)[None] * 0.1)], ids=type)
def test_slow_velocity_keeps_its_relative_accuracy(heads, dtype):
    # two tokens at 90 degrees: |v| = lam e^{-beta lam} / (1 + e^{-beta lam})
    lam = float(heads.dense(2).score[0, 0, 0])
    beta = 40.0 / lam
    x = sphere.circle(jnp.array([0.3, 0.3 + np.pi / 2], dtype))
    v = af.AttentionField(heads, af.Softmax(beta))(0.0, x)
    want = lam * np.exp(-40.0) / (1 + np.exp(-40.0))
    assert relative_error(jnp.linalg.norm(v, axis=1), want) < (1e-6 if dtype == np.float64 else 3e-5)


def test_naive_projection_would_lose_the_slow_velocity():
    x = sphere.circle(jnp.array([0.3, 0.3 + np.pi / 2]))
    v = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(40.0), reduction=Dense())(0.0, x)
    assert abs(float(jnp.linalg.norm(v[0])) / 4.248e-18 - 1) > 0.1


def test_hardmax_is_the_limit_of_softmax_and_shares_ties(key):
    heads = family("dense", key)
    x = sphere.uniform(key, 16, 3)
    hard = af.AttentionField(heads, af.Hardmax())(0.0, x)
    assert close(af.AttentionField(heads, af.Softmax(1e7))(0.0, x), hard)
    twice = jnp.concatenate([x, x[:1], -x])
    tied = velocity("hardmax", twice, heads.score, heads.value)
    assert close(af.AttentionField(heads, af.Hardmax())(0.0, twice), tied, eps=1e-6)


@pytest.mark.parametrize("reduction", [Differences(), Dense(), Blocked(4, 4)], ids=["differences", "dense", "blocked"])
def test_hardmax_shares_ties_by_weight(reduction, key, dtype):
    """A score of zero ties all tokens: each is answered by the weighted mean of those of positive weight."""
    x = sphere.uniform(key, 9, 3).astype(dtype)
    w = np.array([0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.0], dtype)
    heads = af.Heads(np.zeros((1, 3, 3), dtype), np.eye(3, dtype=dtype)[None])
    v = af.AttentionField(heads, af.Hardmax(), w, reduction=reduction)(0.0, x)
    y, mean = np.asarray(x, np.float64), w.astype(np.float64) @ np.asarray(x, np.float64)
    assert v.dtype == dtype
    assert np.abs(np.asarray(v, np.float64) - (mean - (y @ mean)[:, None] * y)).max() < 20 * np.finfo(dtype).eps


def test_hardmax_refuses_a_gradient(key):
    x = sphere.uniform(key, 8, 3)
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Hardmax())
    with pytest.raises(ValueError, match="no gradient"):
        jax.grad(lambda x: jnp.sum(field(0.0, x) ** 2))(x)


def test_zero_temperature_field_is_the_limit_of_a_resolved_quadrature():
    heads = af.Heads(np.diag([1.0, 4.0])[None], np.diag([1.0, 0.5])[None])
    x, w = sphere.circle_quadrature(np.ones_like, 1_500)
    slow = af.ZeroTemperatureField(heads)(0.0, x)
    evaluate = jax.jit(lambda beta: af.AttentionField(heads, af.Softmax(beta), w)(0.0, x))
    errors = [float(jnp.max(jnp.abs(evaluate(jnp.asarray(beta)) - slow))) for beta in (100.0, 400.0)]
    assert 3.5 < errors[0] / errors[1] < 4.5  # O(1/beta), Laplace principle


@pytest.mark.parametrize("kind", ["softmax", "exponential", "relu", "linear"])
@pytest.mark.parametrize("reduction", ["dense", "differences"])
def test_velocity_under_jit_vmap_and_both_derivatives(kind, reduction, key):
    field = af.AttentionField(family("dense", key), ATTENTIONS[kind], reduction=REDUCTIONS[reduction])
    xs = sphere.uniform(key, 36, 3).reshape(3, 12, 3)
    loop = jnp.stack([field(0.0, x) for x in xs])
    assert close(jax.jit(jax.vmap(lambda x: field(0.0, x)))(xs), loop, eps=1e-6)
    x, v = xs[0], xs[1]

    def f(x):
        return jnp.sum(field(0.0, x) * xs[2])

    step = 1e-6
    central = (f(x + step * v) - f(x - step * v)) / (2 * step)
    assert close(jax.jvp(f, (x,), (v,))[1], central, eps=1)
    assert close(jnp.sum(jax.grad(f)(x) * v), jax.jvp(f, (x,), (v,))[1], eps=1e-4)


def test_large_cloud_equals_numpy_on_a_sample_and_needs_little_memory():
    n = 20_000
    x = sphere.uniform(jax.random.key(3), n, 3)
    heads = families.goe(jax.random.key(4), 1, 3)
    field = af.AttentionField(heads, af.Softmax(4.0))
    v = jax.jit(lambda x: field(0.0, x))(x)
    some = np.arange(0, n, 997)
    s = 4 * np.asarray(x)[some] @ np.asarray(heads.score[0]) @ np.asarray(x).T
    p = np.exp(s - s.max(1, keepdims=True))
    want = (p / p.sum(1, keepdims=True)) @ np.asarray(x) @ np.asarray(heads.value[0]).T
    want -= np.sum(want * np.asarray(x)[some], 1, keepdims=True) * np.asarray(x)[some]
    assert relative_to_largest(v[some], want) < 1e-13


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "gradient"])
def test_memory_is_linear_in_the_tokens(reverse):
    x = jax.ShapeDtypeStruct((16_384, 3), jnp.float64)
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(4.0))

    def f(x):
        return jnp.sum(field(0.0, x) ** 2)

    compiled = jax.jit(jax.grad(f) if reverse else f).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 2**20


def test_leaves_follow_the_dtype_of_the_tokens(key):
    field = af.AttentionField(family("factored", key), af.Softmax(1.0), jnp.full(8, 0.125))
    assert field(0.0, sphere.uniform(key, 8, 3).astype(jnp.float32)).dtype == jnp.float32


def test_batched_heads_come_from_a_vmapped_constructor(key):
    x = sphere.uniform(key, 8, 3)
    heads = eqx.filter_vmap(af.ScalarHeads)(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    batched = eqx.filter_vmap(lambda h: af.AttentionField(h, af.Softmax(1.0))(0.0, x))(heads)
    assert close(batched[1], af.AttentionField(af.ScalarHeads([3.0, 4.0]), af.Softmax(1.0))(0.0, x), eps=1e-6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: af.Heads(jnp.ones((3, 2)), jnp.ones((3, 2))), r"`score` must have shape \(H, d, d\), got \(3, 2\)"),
        (lambda: af.Heads(jnp.ones((1, 3, 3)), jnp.ones((2, 3, 3))), "same shape"),
        (lambda: af.AlignedHeads(jnp.ones((1, 2, 3))), r"`raw` must have shape"),
        (lambda: af.ScalarHeads(2.0), r"`strengths` must have shape \(H,\)"),
        (lambda: af.Softmax(-1.0), ">= 0"),
        (lambda: af.Softmax(jnp.nan), ">= 0"),
        (lambda: af.Softmax(jnp.inf), "Hardmax"),
        (lambda: af.Softmax([1.0, 2.0]), "scalar"),
        (lambda: af.AttentionField(af.ScalarHeads([1.0]), af.ReLU(), jnp.array([0.5, 0.6])), "sum to 1"),
        (lambda: af.AttentionField(af.ScalarHeads([1.0]), af.ReLU(), jnp.array([1.5, -0.5])), ">= 0"),
        (lambda: af.AttentionField(af.ScalarHeads([1.0]), af.ReLU(), jnp.array([jnp.nan, 1.0])), "finite"),
        (
            lambda: af.AttentionField(af.ScalarHeads([1.0]), af.ReLU(), jnp.array([0.0, 1.0]), causal=True),
            "first token",
        ),
        (lambda: families.orthogonal(jax.random.key(0), 3, 8, 3), "need d >= 9"),
    ],
)
def test_bad_parts_are_refused_by_name(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_edges_no_head_one_token_one_dimension(key):
    x = sphere.uniform(key, 5, 3)
    assert np.array_equal(af.AttentionField(af.ScalarHeads(jnp.zeros(0)), af.Softmax(1.0))(0.0, x), np.zeros((5, 3)))
    one = sphere.uniform(key, 1, 3)
    assert close(af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(1.0))(0.0, one), np.zeros((1, 3)))
    line = jnp.array([[1.0], [-1.0]])
    assert close(af.AttentionField(af.ScalarHeads([1.0]), af.Exponential(1.0))(0.0, line), np.zeros((2, 1)))


def test_print_says_how_the_sums_are_taken():
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(1.0))
    assert "differences" in repr(field)
    assert "Dense" in repr(af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(1.0), reduction=Dense()))
