"""Merging: closed forms, published cases, symmetries, and what must not merge."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from exact import close
from mpmath import mp, mpf
from scipy.integrate import solve_ivp

from attnflow import (
    AlignedHeads,
    AttentionField,
    Exponential,
    FactoredHeads,
    Heads,
    ReLU,
    ScalarHeads,
    Softmax,
    observe,
    solve,
    sphere,
)
from attnflow.metastable import clock, lifetimes, merge_flow, shifted_energy
from attnflow.metastable.walk import prepared

ONE = ScalarHeads([1.0])
KINETIC = np.radians([3.56, 12.28, 104.23, 166.79, 182.63])


def circle(angles):
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def scattered(n, d, seed=0):
    x = np.random.default_rng(seed).normal(size=(n, d))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def last(tree):
    return tree.merges[-1].log_t


def pair_log_time(kind, beta, w, angle, chord):
    """ln of the integral of d theta / speed from the angle down to that of the chord."""
    mp.dps = 30
    beta, angle, end = mpf(float(beta)), mpf(float(angle)), 2 * mp.asin(mpf(float(chord)) / 2)
    w1, w2 = (mpf(float(a)) for a in w)

    def log_speed(theta):
        e = mp.exp(beta * (mp.cos(theta) - 1))
        if kind == "softmax":
            return mp.log(e * mp.sin(theta) * (w2 / (w1 + w2 * e) + w1 / (w2 + w1 * e)))
        return beta + mp.log(e * mp.sin(theta) * (w1 + w2))

    def integral(low):
        cuts = [end, *(angle - (angle - end) / mpf(2) ** k for k in range(1, 24)), angle]
        return mp.quad(lambda theta: mp.exp(low - log_speed(theta)), cuts)

    low = min(log_speed(angle), log_speed(end))
    return float(mp.log(integral(low)) - low)


@pytest.mark.parametrize("beta", [1.0, 5.0, 30.0, 200.0, 2000.0])
@pytest.mark.parametrize("kind", ["softmax", "exponential"])
def test_two_tokens_merge_at_the_time_of_their_quadrature(kind, beta):
    # beta = 2000: rates of 1e-1500
    w = np.array([0.3, 0.7])
    field = AttentionField(ONE, Softmax(beta) if kind == "softmax" else Exponential(beta), w)
    tree = merge_flow(field, circle(np.array([0.4, 2.9])), threshold=1e-3, error=False, rtol=1e-10)
    exact = pair_log_time(kind, beta, w, 2.5, 1e-3)
    assert tree.status == "merged"
    assert abs(last(tree) - exact) < 1e-8 * abs(exact)


def test_default_tolerances_meet_the_quadrature_and_the_error_covers_it():
    for beta in (8.0, 200.0):
        tree = merge_flow(AttentionField(ONE, Softmax(beta)), circle(np.array([0.0, 2.5])), threshold=1e-3)
        exact = pair_log_time("softmax", beta, [0.5, 0.5], 2.5, 1e-3)
        assert abs(last(tree) - exact) < 1e-8 * exact
        assert abs(last(tree) - exact) < 10 * tree.merges[-1].error < 1e-5


@pytest.mark.parametrize(
    ("beta", "seed", "log10_t", "unit"),
    [
        (9.0, 0, 5.7504, 5e-5),
        (9.0, 1, 7.1697, 5e-5),
        (25.0, 0, 17.2505, 5e-5),
        (25.0, 1, 20.6874, 5e-5),
        (81.0, 0, 57.2350, 5e-5),
        (81.0, 1, 68.590, 5e-4),
    ],
)
def test_last_merge_of_thirty_two_tokens_on_the_circle(beta, seed, log10_t, unit):
    x0 = circle(np.random.default_rng(seed).uniform(0, 2 * np.pi, 32))
    field = AttentionField(ONE, Softmax(beta))
    tree = merge_flow(field, x0, error=False)
    tight = merge_flow(field, x0, error=False, tolerance=1.5e-9)
    assert abs(last(tree) / np.log(10) - log10_t) < unit
    assert abs(last(tight) - last(tree)) < 1e-6
    assert len(tree.merges) == 31 and tree.merges[-1].weight == pytest.approx(1)


def test_kinetic_case_merges_where_the_smallest_cosine_passes_999():
    field = AttentionField(ONE, Softmax(4.0))
    tree = merge_flow(field, circle(KINETIC), observe={"cosine": observe.minimum_cosine})
    t = np.exp(tree.crossing(observe.minimum_cosine, 0.999))
    assert abs(t - 328.20) < 0.02
    assert abs(np.exp(last(tree)) - t) < 1e-4
    assert [{frozenset(a), frozenset(b)} for a, b in (m.who for m in tree.merges)] == [
        {frozenset({0}), frozenset({1})},
        {frozenset({3}), frozenset({4})},
        {frozenset({2}), frozenset({3, 4})},
        {frozenset({0, 1}), frozenset({2, 3, 4})},
    ]
    assert np.allclose(np.exp([m.log_t for m in tree.merges[:3]]), [1.3, 2.4, 5.3], atol=0.05)
    tight = merge_flow(field, circle(KINETIC), tolerance=1e-9, rtol=1e-10, error=False)
    assert abs(np.exp(last(tight)) - np.exp(last(tree))) < 1e-4
    assert tree.values["cosine"].shape == tree.log_t.shape and tree.values["cosine"][-1] > 1 - 1e-12


def test_kinetic_case_in_float32():
    tree = merge_flow(AttentionField(ONE, Softmax(4.0)), circle(KINETIC).astype(np.float32), error=False)
    assert tree.final.dtype == np.float32 and tree.status == "merged"
    assert abs(last(tree) - np.log(328.20)) < 1e-3


@pytest.mark.parametrize("kind", ["softmax", "exponential"])
def test_an_implicit_solver_without_merging_finds_the_same_times(kind):
    """Two scalar heads on the sphere, Radau in log time, to the last passage of the threshold."""
    x0, strengths, beta, delta = scattered(5, 3, seed=3), np.array([1.0, 0.6]), 3.0, 0.02
    field = AttentionField(ScalarHeads(strengths), Softmax(beta) if kind == "softmax" else Exponential(beta))

    def rate(u, y):
        x = y.reshape(5, 3)
        v = np.zeros_like(x)
        for lam in strengths:
            c = np.exp(beta * lam * (x @ x.T)) / 5
            c = c / c.sum(1, keepdims=True) if kind == "softmax" else c
            v += lam * c @ x
        return np.exp(u) * (v - np.sum(v * x, 1, keepdims=True) * x).ravel()

    def width(u, y):
        x = y.reshape(5, 3)
        return np.max(np.linalg.norm(x[:, None] - x[None], axis=-1)) - delta

    width.terminal, width.direction = True, -1
    run = solve_ivp(rate, (-12, 9), x0.ravel(), method="Radau", rtol=1e-10, atol=1e-12, events=width)
    tree = merge_flow(field, x0, threshold=delta, error=False)
    assert abs(last(tree) - (run.t_events[0][0])) < 2e-5  # starting at t = e^-12


FAMILIES = {
    "scalar": ScalarHeads([1.0, -0.5]),
    "aligned": AlignedHeads(np.random.default_rng(0).normal(size=(2, 3, 3))),
    "commuting": AlignedHeads([np.diag([1.0, 1.0, 0.3]), np.diag([0.2, 0.7, 0.7])]),
    "general": Heads(*np.random.default_rng(1).normal(size=(2, 1, 3, 3))),
    "factored": FactoredHeads(*np.random.default_rng(2).normal(size=(3, 2, 2, 3)), np.ones((2, 3, 2))),
}


@pytest.mark.parametrize("attention", [Softmax(2.0), Exponential(2.0)], ids=["softmax", "exponential"])
@pytest.mark.parametrize("family", FAMILIES)
def test_velocity_in_the_scaled_clock_is_that_of_the_field(family, attention, dtype):
    x = scattered(6, 3).astype(dtype)
    field = AttentionField(FAMILIES[family], attention, np.arange(1, 7) / 21)
    flow, y = prepared(field, x)
    dy, dU = jax.jit(lambda flow, y: flow.velocity((y, jnp.zeros((), dtype))))(flow, jnp.asarray(y))
    # At U = 0 the clock runs at dU/ds over the first rate.
    v = np.asarray(dy)[:6] * np.exp(float(flow.log_rate)) / float(dU)
    v = v if flow.frame is None else v @ np.asarray(flow.frame).T
    exact = np.asarray(field(0.0, jnp.asarray(x)))
    assert dy.dtype == dtype
    assert np.abs(v - exact).max() < 50 * np.finfo(dtype).eps * np.abs(exact).max()
    assert not np.any(np.asarray(dy)[6:])


def test_velocity_is_relatively_accurate_where_the_field_underflows():
    beta, angle = 2000.0, 2.0
    flow, y = prepared(AttentionField(ONE, Softmax(beta)), circle(np.array([0.0, angle])))
    flow, _ = clock.started(flow, jnp.asarray(y), jnp.asarray(0.0))
    dy, dU = jax.jit(lambda flow, y: flow.velocity((y, jnp.zeros(()))))(flow, jnp.asarray(y))
    log_speed = np.log(np.linalg.norm(np.asarray(dy)[0])) + float(flow.log_rate) - np.log(float(dU))
    mp.dps = 30
    e = mp.exp(mpf(beta) * (mp.cos(mpf(angle)) - 1))
    exact = mp.log(e * mp.sin(mpf(angle)) / (1 + e))
    assert exact < -2800
    assert abs(log_speed - float(exact)) < 1e-11


def test_antipodal_pair_is_stable_under_a_spectral_gap_and_only_then():
    x0 = circle(np.random.default_rng(0).uniform(0, 2 * np.pi, 5))
    gap = merge_flow(AttentionField(AlignedHeads([np.diag([1.0, 0.5])]), Softmax(9.0)), x0, error=False)
    assert gap.status == "stable" and len(gap.groups) == 2
    assert np.abs(np.abs(gap.final[:, 0]) - 1).max() < 1e-12  # both poles of the leading eigenvector
    assert gap.plateaus[-1].end == np.inf
    flat = merge_flow(AttentionField(AlignedHeads([np.eye(2)]), Softmax(9.0)), x0, error=False)
    assert flat.status == "merged"


def test_gap_seen_through_non_commuting_and_non_symmetric_values_is_stable_too():
    turn = np.array([[0.0, 0.02], [-0.02, 0.0]])
    x0 = circle(np.random.default_rng(0).uniform(0, 2 * np.pi, 5))
    heads = Heads([np.eye(2)], [np.diag([1.0, 0.5]) + turn])
    tree = merge_flow(AttentionField(heads, Softmax(9.0)), x0, error=False)
    assert tree.status == "stable" and len(tree.groups) == 2
    stationary = AttentionField(heads, Softmax(9.0))(0.0, jnp.asarray(tree.final))
    assert np.abs(np.asarray(stationary)).max() < 1e-11


def test_exactly_antipodal_tokens_are_reported_as_unstable_not_as_stable():
    tree = merge_flow(AttentionField(ONE, Softmax(3.0)), np.array([[1.0, 0.0], [-1.0, 0.0]]), error=False)
    assert tree.status == "not reached" and "unstable" in tree.reason


def test_repulsive_heads_spread_and_rest():
    heads = Heads([np.eye(2)], [-np.eye(2)])
    tree = merge_flow(AttentionField(heads, Softmax(2.0)), circle(np.array([0.0, 1.0, 2.0])), error=False)
    assert tree.status == "stable" and not tree.merges
    gaps = np.diff(np.sort(np.mod(np.arctan2(tree.final[:, 1], tree.final[:, 0]), 2 * np.pi)))
    assert np.allclose(gaps, 2 * np.pi / 3, atol=1e-9)


@pytest.mark.parametrize("attention", [Softmax(16.0), Exponential(16.0)], ids=["softmax", "exponential"])
def test_degenerate_leading_eigenspace_carries_the_metastable_chain_of_its_circle(attention):
    """Tokens on E1 of V = R diag(1, 1, .5) R^T move as on the circle; rates of e^-30 survive the anisotropic term."""
    turn = np.linalg.qr(np.random.default_rng(3).normal(size=(3, 3)))[0]
    angles = np.array([0.2, 1.1, 2.6, 4.4])
    flat = merge_flow(AttentionField(ONE, attention), circle(angles), error=False)
    heads = AlignedHeads([turn @ np.diag([1.0, 1.0, 0.5]) @ turn.T])
    x0 = np.pad(circle(angles), ((0, 0), (0, 1))) @ turn.T
    tree = merge_flow(AttentionField(heads, attention), x0, error=False)
    assert tree.status == "merged"
    assert last(flat) - flat.merges[0].log_t > 15
    assert abs(last(tree) - last(flat)) < 1e-6
    off = x0 + 0.1 * turn[:, 2]
    off = off / np.linalg.norm(off, axis=1, keepdims=True)
    tree = merge_flow(AttentionField(heads, attention), off, error=False)
    assert tree.status == "merged" and abs(last(tree) - last(flat)) < 0.2 * abs(last(flat))


def test_tree_does_not_depend_on_rotation_or_on_the_order_of_tokens():
    x0 = scattered(8, 3, seed=5)
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
    order = np.random.default_rng(2).permutation(8)
    field = AttentionField(ONE, Softmax(9.0))
    a, b = merge_flow(field, x0, error=False), merge_flow(field, x0[order] @ turn.T, error=False)
    for m, k in zip(a.merges, b.merges, strict=True):
        assert abs(m.log_t - k.log_t) < 1e-8
        assert {frozenset(g) for g in m.who} == {frozenset(order[list(g)].tolist()) for g in k.who}


def test_duplicates_are_one_token_of_summed_weight():
    angles, beta = np.array([0.1, 1.3, 3.4]), 7.0
    double = merge_flow(AttentionField(ONE, Softmax(beta)), circle(angles[[0, 1, 1, 2]]), error=False)
    weighted = merge_flow(AttentionField(ONE, Softmax(beta), [0.25, 0.5, 0.25]), circle(angles), error=False)
    assert double.merges[0].log_t == -np.inf
    for m, k in zip(double.merges[1:], weighted.merges, strict=True):
        assert abs(m.log_t - k.log_t) < 1e-9


def test_stop_at_t1_is_the_solution_at_t1():
    field = AttentionField(ONE, Softmax(4.0))
    tree = merge_flow(field, circle(KINETIC), t1=100.0, error=False)
    direct = solve(field, jnp.asarray(circle(KINETIC)), jnp.array([0.0, 100.0]), rtol=1e-10, atol=1e-12)
    assert tree.status == "not reached" and len(tree.groups) == 2
    assert abs(tree.log_t[-1] - np.log(100)) < 1e-10
    assert np.abs(tree.final - np.asarray(direct.final)).max() < 1e-6


def test_shifted_energy_is_the_energy_less_its_consensus_exponent():
    x, beta = scattered(6, 3), 3.0
    field = AttentionField(ONE, Exponential(beta), np.arange(1, 7) / 21)
    value = shifted_energy(field, 3)(x, np.arange(1, 7) / 21)
    assert close(value, 2 * beta * np.exp(-beta) * float(observe.energy(field, jnp.asarray(x))), eps=1e-4)
    indefinite = AttentionField(AlignedHeads([np.diag([1.0, -1.0, 0.0])]), Exponential(beta))
    assert shifted_energy(indefinite, 3) is None


def test_plateaus_climb_from_separate_tokens_to_one():
    tree = merge_flow(AttentionField(ONE, Exponential(25.0)), circle(np.array([0.2, 1.1, 2.6, 4.4])))
    energies, starts, ends, errors = map(np.array, zip(*tree.plateaus, strict=True))
    assert np.all(np.diff(energies) > 0) and energies[0] == 0.25 and energies[-1] == pytest.approx(1)
    assert starts[0] == -np.inf and ends[-1] == np.inf and np.all(starts[1:] == ends[:-1])
    assert np.all(errors < 1e-5)
    middle = (starts[1:-1] + ends[1:-1]) / 2
    seen = np.interp(middle, tree.log_t[1:], tree.values["shifted_energy"][1:])
    assert np.allclose(seen, energies[1:-1], atol=1e-3)


def test_timeline_is_a_trajectory_and_the_dendrogram_has_a_bracket_per_merge():
    tree = merge_flow(AttentionField(ONE, Softmax(4.0)), circle(KINETIC), error=False)
    traj = tree.trajectory
    assert traj.ok and np.all(np.diff(np.asarray(traj.ts)) >= 0)
    assert traj.values["shifted_energy"].shape == traj.ts.shape
    order, x, y = tree.dendrogram()
    assert sorted(order.tolist()) == [0, 1, 2, 3, 4]
    assert x.shape == y.shape == (4, 4)
    assert np.all(y[:, 1] == y[:, 2]) and np.all(y[:, 1] >= y[:, [0, 3]].max(1))
    assert y[-1, 1] == last(tree)
    assert "merged" in repr(tree) and "ln t" in repr(tree)
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda x: merge_flow(tree.field, x))(jnp.asarray(circle(KINETIC)))


def test_merging_compiles_nothing_again(monkeypatch):
    traces = []
    original = clock.Limits.norm
    monkeypatch.setattr(clock.Limits, "norm", lambda self, error: (traces.append(1), original(self, error))[1])
    x0 = circle(np.linspace(0.1, 5.0, 7))
    for beta, weights in ((5.0, np.full(7, 1 / 7)), (6.0, np.arange(1, 8) / 28)):
        traces.append(0)
        assert len(merge_flow(AttentionField(ONE, Softmax(beta), weights), x0, rtol=beta * 1e-8).merges) == 6
    assert traces[-1] == 0  # nothing was traced in the second run, whatever the first had to


def test_lifetimes_grow_like_the_exponential_of_the_gap():
    angle, betas = 1.5, [20.0, 40.0, 60.0, 80.0]
    found = lifetimes(
        lambda beta: AttentionField(ONE, Softmax(beta)), circle(np.array([0.0, angle])), betas, threshold=1e-3
    )
    exact = [pair_log_time("softmax", beta, [0.5, 0.5], angle, 1e-3) for beta in betas]
    assert np.allclose(found.log_t, exact, rtol=1e-8)
    # T = e^{beta (1 - cos)} / (beta sin^2) to leading order: the slope is 1 - cos less that of ln beta.
    slope = np.polyfit(betas, np.array(betas) * (1 - np.cos(angle)) - np.log(betas), 1)[0]
    assert abs(found.slope - slope) < 1e-3
    assert found.slope_error < 0.01 and set(found.status) == {"merged"}


def test_single_token_and_identical_tokens_have_merged_already():
    field = AttentionField(ONE, Softmax(1.0))
    alone = merge_flow(field, np.array([[0.0, 1.0]]))
    assert alone.status == "merged" and not alone.merges
    same = merge_flow(field, np.array([[0.0, 1.0]] * 3))
    assert [m.log_t for m in same.merges] == [-np.inf, -np.inf]


@pytest.mark.parametrize(
    ("field", "options", "match"),
    [
        (AttentionField(ONE, ReLU()), {}, "Softmax"),
        (AttentionField(ONE, Softmax(1.0), flat=True), {}, "flat=False"),
        (AttentionField(ONE, Softmax(1.0), causal=True), {}, "causal=False"),
        (AttentionField(ONE, Softmax(1.0), [0.0, 0.5, 0.5]), {}, "positive"),
        (AttentionField(ONE, Softmax(1.0)), {"tolerance": 0.1}, "threshold"),
        (AttentionField(ONE, Softmax(1.0)), {"t1": 0.0}, "t1"),
    ],
)
def test_fields_that_cannot_merge_are_refused(field, options, match):
    with pytest.raises(ValueError, match=match):
        merge_flow(field, circle(np.array([0.0, 1.0, 2.0])), **options)


def test_too_few_steps_are_reported():
    tree = merge_flow(AttentionField(ONE, Softmax(25.0)), circle(KINETIC), max_steps=64, error=False)
    assert tree.status == "not reached" and "max_steps" in tree.reason


def test_tokens_of_any_dtype_of_weights_merge():
    tree = merge_flow(AttentionField(ONE, Softmax(2.0)), sphere.uniform(jr.key(1), 4, 3), error=False)
    assert tree.status == "merged" and tree.groups == ((0, 1, 2, 3),)
