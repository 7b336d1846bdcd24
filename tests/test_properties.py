"""What holds for every field, whatever the tokens: symmetries, energy laws, and agreement of every way to compute it."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import velocity
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attnflow as af
from attnflow import observe
from attnflow.mesh import token_mesh
from attnflow.reduce import Blocked, Dense, Differences
from attnflow.sharded import Sharded

N, D, H = 6, 3, 2
KINDS = ("softmax", "exponential", "relu", "linear", "hardmax")
SMOOTH = KINDS[:4]
quiet = settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def attention(kind, beta):
    plain = {"relu": af.ReLU, "linear": af.Linear, "hardmax": af.Hardmax}
    return plain[kind]() if kind in plain else {"softmax": af.Softmax, "exponential": af.Exponential}[kind](beta)


def reduction(name):
    return {
        "dense": Dense, "differences": Differences, "blocked": lambda: Blocked(4, 2), "sharded": lambda: Sharded(token_mesh())
    }[name]()  # fmt: skip


def build(kind, name, causal, parts):
    beta, w, score, value = parts
    return af.AttentionField(af.Heads(score, value), attention(kind, beta), w, causal=causal, reduction=reduction(name))


@cache
def compiled(kind, name="dense", causal=False, batched=False):
    """The velocity as one program per kind, so that hundreds of cases compile nothing."""

    def run(x, *parts):
        return build(kind, name, causal, parts)(0.0, x, None)

    return jax.jit(jax.vmap(run, in_axes=(0, None, None, None, None)) if batched else run)


@st.composite
def cases(draw):
    """Tokens that may coincide, oppose or be orthogonal; weights that may vanish; heads of any size; beta from 0."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.normal(size=(N, D))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    match draw(st.sampled_from(["any", "twins", "opposed", "axes", "close"])):
        case "twins":
            x[3:] = x[:3]
        case "opposed":
            x[3:] = -x[:3]
        case "axes":
            x = np.eye(D)[rng.integers(0, D, N)] * rng.choice((-1.0, 1.0), (N, 1))
        case "close":
            x = x[:1] + 1e-4 * x
            x /= np.linalg.norm(x, axis=1, keepdims=True)
    w = rng.uniform(0.1, 1.0, N) * (rng.uniform(size=N) < draw(st.sampled_from([1.0, 0.6])))
    w = np.where(w.sum() > 0, w, 1.0)
    score, value = draw(st.sampled_from([0.1, 1.0, 3.0])) * rng.normal(size=(2, H, D, D))
    return x, np.array(draw(st.sampled_from([0.0, 0.3, 1.0, 8.0]))), w / w.sum(), score, value


def scale(kind, case):
    """The size that rounding is measured against: of the sums of absolute values, times the condition of the exponent."""
    x, beta, _w, score, value = case
    s = np.abs(np.einsum("nd,hde,me->hnm", x, score, x)).max()
    size = {"exponential": np.exp(beta * s), "relu": s, "linear": s}.get(kind, 1.0)
    return (1 + beta * np.abs(score).sum()) * size * np.abs(value).sum()


def near(a, b, allowed):
    return bool(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))) <= allowed)


def eps(dtype=np.float64):
    return 16 * np.finfo(dtype).eps


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["dense", "blocked", "differences", pytest.param("sharded", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", SMOOTH)
def test_every_reduction_is_the_naive_sum(kind, name, causal):
    @quiet
    @given(cases())
    def check(case):
        x, beta, w, score, value = case
        w = np.where(w > 0, w, 0.05) / np.where(w > 0, w, 0.05).sum()  # a causal token must see some weight
        case = (x, beta, w, score, value)
        want = velocity(kind, x, score, value, w=w, beta=float(beta), causal=causal)
        assert near(compiled(kind, name, causal)(*case), want, eps() * scale(kind, case))

    check()


@pytest.mark.parametrize("kind", SMOOTH)
def test_rotations_and_permutations_commute_with_the_flow(kind):
    @quiet
    @given(cases(), st.integers(0, 2**32 - 1))
    def check(case, seed):
        x, beta, w, score, value = case
        rng = np.random.default_rng(seed)
        q, order = np.linalg.qr(rng.normal(size=(D, D)))[0], rng.permutation(N)
        still = np.asarray(compiled(kind)(*case))
        turned = compiled(kind)((x @ q.T)[order], beta, w[order], q @ score @ q.T, q @ value @ q.T)
        assert near(turned, (still @ q.T)[order], eps() * scale(kind, case))

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_stay_on_the_sphere_and_batches_are_their_members(kind):
    @quiet
    @given(cases(), cases())
    def check(case, other):
        x, beta, w, score, value = case
        parts = (beta, w, score, value)
        one = np.asarray(compiled(kind)(x, *parts))
        assert np.isfinite(one).all()
        assert near(np.sum(one * x, axis=1), 0, eps() * scale(kind, case))
        if kind != "hardmax":  # whose ties may fall either way in another program
            both = np.asarray(compiled(kind, batched=True)(np.stack([x, other[0]]), *parts))
            assert near(both[0], one, eps() * scale(kind, case))

    check()


@pytest.mark.parametrize("kind", SMOOTH)
def test_float32_is_float64_within_its_rounding(kind):
    @quiet
    @given(cases())
    def check(case):
        single = [np.float32(a) for a in case]
        rounded = [np.float64(a) for a in single]
        got = compiled(kind)(*single)
        assert got.dtype == np.float32
        assert near(got, compiled(kind)(*rounded), eps(np.float32) * scale(kind, rounded))

    check()


@pytest.mark.parametrize("kind", SMOOTH)
def test_eager_is_compiled(kind):
    @settings(quiet, max_examples=2)
    @given(cases())
    def check(case):
        x, *parts = map(jnp.asarray, case)
        eager = build(kind, "dense", False, parts)(0.0, x, None)
        assert near(eager, compiled(kind)(*case), eps() * scale(kind, case))

    check()


@cache
def laws(kind):
    def run(x, beta, w, m):
        single = af.AttentionField(af.AlignedHeads(m[:1]), attention(kind, beta), w)
        several = af.AttentionField(af.AlignedHeads(m), attention(kind, beta), w)
        return (
            observe.energy_rate(single, x),
            jnp.sum(observe.head_energy_rates(several, x)) - observe.energy_rate(several, x),
            observe.dissipation(several, x),
            observe.energy_rate(several, x),
        )

    return jax.jit(run)


@pytest.mark.parametrize("kind", ["exponential", "relu", "linear"])
def test_energy_of_an_aligned_flow_grows_by_its_dissipation(kind):
    @quiet
    @given(cases())
    def check(case):
        x, beta, w, score, _value = case
        beta, m = np.maximum(beta, 0.3), score + score.mT
        _, parts, dissipation, rate = laws(kind)(x, beta, w, m)
        allowed = eps() * scale(kind, (x, beta, w, m, m)) ** 2
        assert near(parts, 0, allowed)
        assert near(rate, dissipation, allowed)

    check()


def test_energy_of_one_aligned_softmax_head_never_falls():
    @quiet
    @given(cases())
    def check(case):
        x, beta, w, score, _value = case
        beta, m = np.maximum(beta, 0.3), score + score.mT
        rate, parts, _, _ = laws("softmax")(x, beta, w, m)
        allowed = eps() * scale("exponential", (x, beta, w, m, m)) ** 2
        assert float(rate) >= -allowed
        assert near(parts, 0, allowed)

    check()
