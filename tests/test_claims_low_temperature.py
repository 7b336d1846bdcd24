"""Claims of arXiv 2605.10931: what they compute, where they fail, and what they refuse."""

import jax.numpy as jnp
import numpy as np
import pytest
from exact import relative_error

from attnflow import claims, sphere
from attnflow.attention import Exponential, Softmax
from attnflow.field import AttentionField, ZeroTemperatureField
from attnflow.heads import Heads, ScalarHeads
from attnflow.theory import laplace, low_temperature


def head(b, v):
    return Heads(np.diag(b)[None], np.diag(v)[None])


CASE = head([1.0, 4.0], [1.0, 0.5])


@pytest.fixture
def circle():
    return sphere.circle_quadrature(lambda theta: 1 + 0.3 * np.cos(theta - 0.7), 400)


def test_assumption_1_says_what_it_misses_and_by_how_much(circle):
    good = claims.assumption_1(AttentionField(CASE, Softmax(8.0)), circle[0])
    assert good.holds and relative_error(good.lhs[:2], [0.25, 0.5]) < 1e-14 and good.lhs[2] == 0
    skew = claims.assumption_1(ZeroTemperatureField(Heads(np.eye(2)[None], [[[1, 0], [0.5, 0.2]]])), circle[0])
    assert not skew.holds and skew.lhs[2] == -0.5
    assert not claims.assumption_1(AttentionField(head([1.0, 0.0], [1.0, 0.5]), Softmax(8.0)), circle[0]).holds
    assert not claims.assumption_1(AttentionField(head([1.0, 1.0], [1.0, 1.0]), Softmax(8.0)), circle[0]).holds


def test_the_second_moment_of_tan_contradicts_a_positive_density(circle):
    field = AttentionField(CASE, Softmax(8.0))
    assert not claims.assumption_2(field, circle[0], moment=2.0).holds
    assert not claims.assumption_2(field, circle[0], moment=1.0).holds
    assert claims.assumption_2(field, circle[0], moment=0.9).holds

    def moment(p, nodes):  # of the uniform density on the circle, m = 1
        return np.mean(np.abs(np.tan((np.arange(nodes) + 0.5) * 2 * np.pi / nodes)) ** p)

    assert abs(moment(0.5, 10**6) - np.sqrt(2)) < 2e-3
    assert moment(2.0, 10**6) > 50 * moment(2.0, 10**4)


def test_a_density_must_be_positive():
    assert claims.assumption_3(jnp.array([0.1, 2.0])).holds and not claims.assumption_3(jnp.array([0.0, 2.0])).holds


def test_transport_agrees_with_the_closed_form_for_weighted_tokens(circle):
    x, w = circle
    claim = claims.projection_distance(AttentionField(CASE, Softmax(8.0), w), x)
    assert claim.holds and relative_error(claim.lhs, claim.rhs) < 1e-7


def test_zero_temperature_rates(circle):
    y = np.linspace(-60, np.log(np.pi / 2), 1500)
    x = jnp.asarray(np.stack([np.sin(np.exp(y)), np.cos(np.exp(y))], 1))
    w = jnp.asarray(np.exp(y) / np.exp(y).sum())
    heads = head([1.0, 4.0], [2.0, 0.25])
    field, times = ZeroTemperatureField(heads, w), jnp.array([30.0, 40.0])
    claim = claims.corollary_2(field, x, times, decay=0.125, tolerance=0.01)
    assert claim.holds and relative_error(claim.lhs, 0.125) < 2e-3
    assert not claims.corollary_2(field, x, times, decay=0.25, tolerance=0.01).holds


def test_theorem_1_compares_transport_with_its_bound(circle):
    x, w = circle
    field = AttentionField(CASE, Softmax(32.0), w)
    case = {"t": 2.0, "growth": 1.0, "decay": 0.25, "constant": 1.0}
    moved = low_temperature.zero_temperature_flow(CASE, x, 2.0)
    claim = claims.theorem_1(field, x, moved, **case)
    assert claim.holds and relative_error(claim.lhs, low_temperature.zero_temperature_w2(CASE, moved, w)) < 1e-6
    assert relative_error(claim.rhs, low_temperature.concentration_bound(32.0, 2.0, 1.0, 0.25)) < 1e-14
    assert not claims.theorem_1(field, x, x, **{**case, "constant": 0.1}).holds


def test_the_laplace_principle_on_both_sides(circle):
    x, w = circle
    claim = claims.laplace_principle(AttentionField(CASE, Softmax(10.0), w), x, constant=1.0)
    assert claim.holds
    assert not claims.laplace_principle(AttentionField(CASE, Softmax(10.0), w), x, constant=0.01).holds
    uniform, w = sphere.circle_quadrature(np.ones_like, 300)
    exact = claims.laplace_mean_of_uniform(AttentionField(CASE, Softmax(10.0), w), uniform, tolerance=1e-12)
    assert exact.holds and jnp.max(exact.rhs) < laplace.laplace_mean(2, 40.0)
    tilted = claims.laplace_mean_of_uniform(AttentionField(CASE, Softmax(10.0), circle[1]), x, tolerance=1e-12)
    assert not tilted.holds
    points, w = sphere.sphere_quadrature(lambda p: np.ones(len(p)), 1800)
    space = AttentionField(head([1.0, 1.0, 2.0], [1.0, 1.0, 1.0]), Softmax(5.0), w)
    assert claims.laplace_mean_of_uniform(space, points, tolerance=1e-10).holds


def test_phases_are_ordered_or_do_not_happen():
    ts = jnp.arange(6.0)
    near = jnp.array([0.9, 0.3, 0.1, 0.3, 0.6, 0.8])
    claim = claims.three_phases(ts, near, jnp.array([1.0, 1.0, 1.0, 1.0, 0.4, 0.05]))
    assert claim.holds and claim.lhs.tolist() == [2, 4] and claim.rhs.tolist() == [4, 5]
    assert not claims.three_phases(ts, near, jnp.ones(6)).holds
    assert not claims.three_phases(ts, jnp.array([0.9, 0.3, 0.1, 0.1, 0.1, 0.1]), jnp.zeros(6)).holds


def test_hypothesis_1_accepts_either_leading_space_and_no_complex_one():
    x = sphere.circle(jnp.array([0.0, jnp.pi]))
    up = sphere.circle(jnp.array([jnp.pi / 2, -jnp.pi / 2]))
    for V in ([1.0, -2.0], [2.0, 1.0]):
        assert claims.hypothesis_1(AttentionField(head([1.0, 1.0], V), Softmax(1.0)), x, tolerance=1e-9).holds
    by_modulus = AttentionField(head([1.0, 1.0], [1.0, -2.0]), Softmax(1.0))
    assert claims.hypothesis_1(by_modulus, up, tolerance=1e-9).holds
    assert not claims.hypothesis_1(AttentionField(head([1.0, 1.0], [2.0, 1.0]), Softmax(1.0)), up, tolerance=1e-9).holds
    turning = AttentionField(Heads(np.eye(2)[None], [[[0.0, -1.0], [1.0, 0.0]]]), Softmax(1.0))
    assert claims.hypothesis_1(turning, x, tolerance=1e-3).lhs == 0
    whole = AttentionField(ScalarHeads([1.0]), Softmax(1.0))
    assert relative_error(claims.hypothesis_1(whole, x, tolerance=1e-9).lhs, 1.0) < 1e-14


def test_many_heads_and_other_attentions_are_refused(circle):
    x, _ = circle
    many = AttentionField(ScalarHeads([1.0, 2.0]), Softmax(1.0))
    for claim in (claims.assumption_1, claims.projection_distance):
        with pytest.raises(TypeError, match="one head"):
            claim(many, x)
    with pytest.raises(TypeError, match="softmax"):
        claims.laplace_principle(AttentionField(CASE, Exponential(1.0)), x, constant=1.0)
    with pytest.raises(TypeError, match="AttentionField"):
        claims.hypothesis_1(ZeroTemperatureField(CASE), x, tolerance=0.1)
