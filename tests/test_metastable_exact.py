"""Merge times and plateau ends against mpmath; see `slow_motion`."""

import itertools

import numpy as np
import pytest
import slow_motion
from mpmath import mp, mpf

from attnflow import AttentionField, Exponential, ScalarHeads, Softmax
from attnflow.metastable import merge_flow

ONE = ScalarHeads([1.0])
LEVELS = [0.2, 0.28, 0.44, 0.52, 1.0]
LENGTH = np.log(2000) / np.sqrt(2000)
STAIRCASE = 0.5 * np.array([0, 0.5, 2, 4, 7]) * LENGTH


def circle(angles):
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def staircase(beta):
    """The tree, and its times in the clock of sum_j w_j e^{beta (cos - 1)}: beta more in ln t."""
    tree = merge_flow(AttentionField(ONE, Exponential(beta)), circle(STAIRCASE))
    return tree, tree.merges[-1].log_t + beta


@pytest.mark.parametrize(
    "x0",
    [circle(np.array([0.0, 0.9, 2.1, 3.5])), [[1, 0, 0], [0.6, 0.8, 0], [0, 0.28, 0.96], [-0.8, -0.36, 0.48]]],
    ids=["circle", "sphere"],
)
def test_four_weighted_clusters_merge_when_mpmath_says(x0):
    x0, w, beta = np.array(x0, float), [0.1, 0.2, 0.3, 0.4], 40.0
    tree = merge_flow(AttentionField(ONE, Softmax(beta), w), x0)
    mp.dps = 30
    exact = slow_motion.follow(x0, w, beta, "softmax", last=mpf(float(tree.threshold)))[0]
    last = tree.merges[-1]
    assert tree.status == "merged" and last.log_t > 40
    assert abs(last.log_t - float(exact)) < 1e-6
    assert abs(last.log_t - float(exact)) < 10 * last.error


@pytest.mark.parametrize("beta", [500.0, pytest.param(1000.0, marks=pytest.mark.slow)])
def test_staircase_climbs_in_order_and_its_plateaus_end_when_mpmath_says(beta):
    tree, last = staircase(beta)
    mp.dps = 30
    middles = [(a + b) / 2 for a, b in itertools.pairwise(LEVELS)]
    marks = [lambda x, w, m=m: m - slow_motion.energy(x, w, beta) for m in middles]
    x0 = circle(STAIRCASE)
    exact, *ends = slow_motion.follow(x0, [0.2] * 5, beta, "exponential", marks=marks, last=mpf(float(tree.threshold)))
    assert np.allclose([p.energy for p in tree.plateaus], LEVELS)
    assert abs(last - float(exact)) < 1e-6
    for plateau, end in zip(tree.plateaus, ends, strict=False):
        if end is None:  # the energy starts above this level already
            assert plateau.end == -np.inf
        else:
            assert abs(plateau.end + beta - float(end)) < 1e-6 < 0.01 * abs(float(end))


@pytest.mark.parametrize("beta", [500.0, 1000.0, 2000.0, 4000.0])
def test_last_step_of_the_staircase_nears_the_quadrature_of_clusters_that_never_drifted(beta):
    """{4, 5} is pulled towards {1, 2, 3} while it forms: the last merge comes earlier than from the means at t = 0, by
    an amount that vanishes exponentially. That quadrature: ln t = 34.519, 72.619, 149.530, 304.056."""
    _, last = staircase(beta)
    gap = mpf(float(STAIRCASE[3:].mean() - STAIRCASE[:3].mean()))
    mp.dps = 30
    end, b = mpf(10) ** -3, mpf(beta)
    cuts = [end, *(gap - (gap - end) / mpf(2) ** k for k in range(1, 20)), gap]
    scaled = mp.quad(lambda q: mp.exp(b * (mp.cos(gap) - mp.cos(q))) / mp.sin(q), cuts)
    still = float(mp.log(scaled) + b * (1 - mp.cos(gap)))
    drift = {500.0: 0.45, 1000.0: 0.06, 2000.0: 0.002, 4000.0: 1e-5}[beta]
    assert 0 < still - last < drift
    assert abs(still - {500.0: 34.519, 1000.0: 72.619, 2000.0: 149.530, 4000.0: 304.056}[beta]) < 1e-3


@pytest.mark.slow
def test_two_hundred_tokens_merge_on_circle_and_sphere_whatever_the_tolerance():
    for d, beta in ((2, 81.0), (3, 81.0)):
        x0 = np.random.default_rng(0).normal(size=(200, d))
        x0 = x0 / np.linalg.norm(x0, axis=1, keepdims=True)
        field = AttentionField(ONE, Softmax(beta))
        tree = merge_flow(field, x0)
        tight = merge_flow(field, x0, tolerance=1e-9, error=False)
        assert tree.status == "merged" and len(tree.merges) == 199
        assert tree.merges[-1].error < 1e-6
        assert abs(tree.merges[-1].log_t - tight.merges[-1].log_t) < 1e-6
