"""How far apart the thresholds of radial dominance are, for heads on orthogonal subspaces."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from attnflow import sphere
from attnflow.attention import Exponential
from attnflow.field import AttentionField
from attnflow.heads import ScalarHeads, orthogonal
from attnflow.onset import first_decrease, onset


def test_onset_of_equal_planes_repeats_the_known_shares(key):
    table = onset(key, jnp.array([0.01, 1.0, 5.0, 20.0]), jnp.ones(2), n=32, k=8, samples=40)
    assert abs(table.formal_beta - 1.476) < 5e-4
    assert abs(table.condition8[0] - 0.28) < 0.25 and table.condition8[1] == 1  # 40 clouds: +- 3 standard errors
    assert jnp.all(table.exact == 0)  # no head's energy falls, far above the formal threshold
    assert table.first()["exact"] == jnp.inf and table.first()["condition8"] <= 1
    assert "formal beta* 1.476" in repr(table)


def test_margins_fail_in_the_order_of_their_strength(key):
    table = onset(key, jnp.array([0.1, 0.3, 1.0, 2.0]), jnp.array([1.0, 2.0]), n=32, k=8, samples=40)
    assert jnp.all(table.condition8 >= table.sharp) and jnp.all(table.sharp >= table.exact)
    # nearly every sample has lost a head by beta = 2, whatever the sample: within two standard errors of all of 40
    assert abs(table.formal_beta - 0.738) < 5e-4 and table.exact[-1] >= 0.95 and table.exact[0] == 0


def test_unequal_strengths_drive_the_violation(key):
    betas = jnp.array([0.05, 0.3])
    unequal = onset(key, betas, jnp.array([1.0, 8.0]), n=32, k=8, samples=40)
    assert abs(unequal.formal_beta - 0.185) < 1e-3
    assert unequal.exact[1] == 1 and unequal.condition8[0] == 1
    assert onset(key, betas, jnp.array([4.0, 4.0]), n=32, k=8, samples=40).exact[1] < 0.2


def test_every_flow_of_two_planes_lets_a_head_fall_and_gives_its_gain_back(key):
    for strengths, beta in (((1.0, 1.0), 2.0), ((1.0, 3.0), 0.5)):
        field = AttentionField(orthogonal(key, 2, 8, 4, jnp.array(strengths)), Exponential(beta))
        time, given_back = first_decrease(field, sphere.uniform(jr.key(3), 32, 8), jnp.linspace(0.0, 40.0, 161))
        assert 0 <= time < 20 and jnp.max(given_back) > 0.9
        assert jnp.min(given_back) < 0.5


def test_scalar_heads_never_let_one_fall(key):
    time, given_back = first_decrease(
        AttentionField(ScalarHeads([1.0, 1.0]), Exponential(1.0)), sphere.uniform(key, 8, 8), jnp.linspace(0.0, 3.0, 13)
    )
    assert time == np.inf and jnp.max(given_back) < 1e-9


def test_margins_are_refused_where_planes_do_not_fit(key):
    with pytest.raises(ValueError, match="alpha"):
        onset(key, jnp.array([1.0]), jnp.array([-1.0, -2.0]), n=4, k=1, samples=1)
