"""Radial dominance: what the survey sees, and that a fit keeps what it must while margins rise."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from attnflow import AlignedHeads, heads
from attnflow.constrained import on_shared_axes
from attnflow.dominance import fit_radial_dominance, soft_minimum
from attnflow.survey import Clouds, Survey, survey


def test_the_soft_minimum_lies_between_minimum_and_mean(dtype):
    a = jnp.asarray([0.3, -0.2, 1.0, 0.9], dtype)
    assert abs(soft_minimum(a, jnp.asarray(1e-3, dtype)) + 0.2) < 2e-3
    assert abs(soft_minimum(a, jnp.asarray(1e4, dtype)) - 0.5) < 1e-2
    slope = jax.grad(lambda a: soft_minimum(a, jnp.asarray(0.1, dtype)))(a)
    assert slope.dtype == dtype and abs(slope.sum() - 1) < 1e-5 and slope.argmax() == 1


def test_first_losses_are_read_off_the_frames():
    worst = np.array([[0.1, 0.2, 0.3], [0.1, -0.2, 0.3], [0.1, np.nan, np.nan], [0.1, -1e-12, 0.2]])
    energies = np.array(
        [[[0.0], [1.0], [2.0]], [[0.0], [1.0], [0.5]], [[0.0], [np.nan], [np.nan]], [[0.0], [0.0], [1.0]]]
    )
    seen = Survey(np.ones(4), np.array([0.0, 1.0, 2.0]), {"exact": worst}, energies, worst, np.ones(1), np.eye(1))
    assert np.array_equal(seen.first_loss(), [np.inf, 1.0, 1.0, np.inf])
    assert np.array_equal(seen.first_loss("energy"), [np.inf, 2.0, 1.0, np.inf])
    assert seen.share_lost(1.0) == 0.5 and seen.share_lost(0.5) == 0.0


@pytest.mark.parametrize("gathered", [False, True])
def test_clouds_lie_on_the_sphere_with_beta_spread_over_its_interval(gathered):
    beta, x = Clouds(20, 3, 8, jnp.asarray([0.5, 2.0]), gathered=gathered)(jr.key(0))
    assert np.abs(np.linalg.norm(x, axis=-1) - 1).max() < 1e-14
    place = np.log(np.asarray(beta) / 0.5) / np.log(4)
    assert np.array_equal(np.floor(8 * place), np.arange(8))
    length = np.linalg.norm(x.mean(axis=1), axis=-1)
    assert (length.max() > 0.8) == gathered


def test_equal_heads_are_always_dominated_and_orthogonal_ones_are_not(key):
    """Equal heads: the exact margin is a square. Projections on complementary planes lose it on the way to consensus."""
    one = heads.goe(key, 1, 4).matrix
    equal = survey(AlignedHeads(jnp.concatenate([one, one])), n=8, longest=6.0, key=key, clouds=8)
    assert equal.share_lost(6.0) == 0 and equal.share_lost(6.0, "energy") == 0
    apart = survey(heads.orthogonal(key, 2, 4, 2), n=8, longest=6.0, key=key, clouds=8)
    assert apart.share_lost(6.0) > 0.7 and apart.share_lost(6.0, "energy") > 0.7
    assert np.abs(apart.overlaps - np.eye(2)).max() < 1e-12


@pytest.mark.slow
def test_a_fit_keeps_dominance_for_twice_as_long_and_holds_what_it_must():
    start = heads.orthogonal(jr.key(0), 2, 4, 2)
    fitted, report = fit_radial_dominance(
        on_shared_axes(start), n=12, horizon=4.0, key=jr.key(1), steps=80, clouds=4, fresh=24
    )
    median = np.median(report.before.first_loss())
    assert np.median(report.after.first_loss()) >= 2 * median and median < 3
    assert report.after.share_lost(2 * median) < 0.5 < report.before.share_lost(2 * median)
    assert np.abs(report.after.strengths / report.before.strengths - 1).max() < 1e-12
    assert np.abs(report.after.overlaps - np.eye(2)).max() < 0.1
    assert np.linalg.norm(fitted.matrix[0] - fitted.matrix[1]) > 1
    assert "share of clouds lost" in str(report)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"condition": "any"}, "`condition` must be one of"),
        ({"hold": "everything"}, "`hold` must be among"),
        ({"beta": (2.0, 0.5)}, "`beta` must be an interval"),
        ({"horizon": 0.0}, "`horizon` must be positive"),
        ({"heads": heads.orthogonal(jr.key(0), 1, 4, 2)}, "at least two"),
    ],
)
def test_bad_searches_are_refused(change, message):
    options = {"heads": heads.orthogonal(jr.key(0), 2, 4, 2), "horizon": 2.0, "condition": "exact"} | change
    with pytest.raises(ValueError, match=message):
        fit_radial_dominance(options.pop("heads"), n=8, key=jr.key(0), **options)
