"""Critical points of the coupled field: the known ones are found, rest, and have the known stability."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from attnflow import sphere
from attnflow.attention import Exponential, Softmax
from attnflow.equilibria import equilibria, newton, spectrum, stationary
from attnflow.field import AttentionField
from attnflow.heads import AlignedHeads, Heads, ScalarHeads
from attnflow.solve import solve


def starts(n, d, many):
    return jax.vmap(lambda key: sphere.uniform(key, n, d))(jr.split(jr.key(7), many))


def test_consensus_has_the_spectrum_of_the_late_rate():
    field = AttentionField(ScalarHeads([1.0, 0.5]), Softmax(2.0))
    x = jnp.tile(jnp.array([[1.0, 0.0, 0.0]]), (4, 1))
    rates = spectrum(field, x).real  # two neutral rotations, the rest -Lambda
    np.testing.assert_allclose(rates, np.r_[np.zeros(2), np.full(6, -1.5)], atol=1e-12)


def test_newton_halves_the_distance_to_nothing(key):
    field = AttentionField(ScalarHeads([1.0]), Exponential(1.0))
    x = newton(field, sphere.uniform(key, 4, 2))
    assert jnp.max(jnp.abs(field(0.0, x, None))) < 1e-12
    np.testing.assert_allclose(jnp.linalg.norm(x, axis=1), 1, rtol=1e-14)


def test_three_tokens_on_the_circle_rest_as_consensus_pair_and_triangle():
    field = AttentionField(ScalarHeads([1.0]), Softmax(1.0))
    found = equilibria(field, starts(3, 2, 40))
    cosines = [np.round(np.sort(np.asarray(p.x @ p.x.T)[np.triu_indices(3, 1)]), 6).tolist() for p in found]
    assert [1.0, 1.0, 1.0] in cosines and [-0.5, -0.5, -0.5] in cosines and [-1.0, -1.0, 1.0] in cosines
    assert found[0].unstable == 0 and cosines[0] == [1.0, 1.0, 1.0]
    assert all(p.unstable > 0 for p in found[1:]) and all(p.neutral >= 1 for p in found)


def test_energy_of_the_stable_point_is_the_largest_for_aligned_exponential_heads():
    """A gradient flow upwards: real spectrum, and stable points are maxima."""
    heads = AlignedHeads(jnp.array([[[1.0, 0.0], [0.0, 0.2]], [[0.0, 0.3], [0.3, 0.0]]]))
    field = AttentionField(heads, Exponential(1.0))
    found = equilibria(field, starts(3, 2, 40))
    assert len(found) >= 3 and found[0].unstable == 0 and found[0].neutral == 0
    assert all(np.max(np.abs(np.imag(p.spectrum))) < 1e-7 for p in found)
    top = np.linalg.eigh(np.asarray(jnp.sum(heads.matrix, axis=0)))[1][:, -1]
    step = jnp.max(jnp.abs(field(0.0, found[0].x, None)))
    assert step < 1e-10 and abs(float(jnp.abs(found[0].x[0] @ top))) > 0.9


def test_the_spectrum_predicts_the_departure():
    field = AttentionField(ScalarHeads([1.0]), Softmax(3.0))
    point = next(p for p in equilibria(field, starts(3, 2, 40)) if p.unstable)
    rate = float(np.max(np.real(point.spectrum)))
    jacobian = jax.jacfwd(lambda y: field(0.0, sphere.retract(y), None))(point.x).reshape(6, 6)
    values, vectors = np.linalg.eig(np.asarray(jacobian))
    k = int(np.argmax(values.real))
    assert abs(values[k].real - rate) < 1e-9
    kick = 1e-5 * vectors[:, k].real.reshape(3, 2)
    moved = field(0.0, sphere.retract(point.x + kick), None)
    np.testing.assert_allclose(moved, rate * kick, atol=1e-9)


def test_an_equilibrium_prints_its_stability():
    found = equilibria(AttentionField(ScalarHeads([1.0]), Softmax(1.0)), starts(2, 2, 8))
    assert "0 unstable, 1 neutral of 2" in repr(found[0])


def repelling(r):
    """Tokens that repel one another under the score diag(1, r)."""
    matrix = jnp.diag(jnp.stack([jnp.ones_like(r), r]))[None]
    return AttentionField(Heads(matrix, -matrix), Exponential(1.0))


def test_implicit_gradient_is_that_of_the_four_particles_and_of_the_flow_to_rest():
    r"""At rest $\tanh(x_1^2) = r \tanh(r x_2^2)$, whose derivative in r is known, and is what a long solve gives."""
    angles = jnp.pi * jnp.array([0.2, 0.7, 1.3, 1.8])
    start = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)
    r = jnp.asarray(0.5)

    def first(x):
        return jnp.mean(x[:, 0] ** 2)

    at_rest = jax.jit(lambda r: first(stationary(repelling(r), start)))
    value, slope = jax.jit(jax.value_and_grad(at_rest))(r)
    a, b = np.tanh(value), np.tanh(r * (1 - value))
    assert abs(a - r * b) < 1e-12
    da, db = 1 - a**2, 1 - b**2  # a(p) = r b(r (1 - p)), differentiated in r
    expected = (b + r * (1 - value) * db) / (da + r**2 * db)
    assert abs(slope - expected) < 1e-9
    assert abs(jax.jvp(at_rest, (r,), (jnp.ones(()),))[1] - expected) < 1e-9
    h = 1e-4
    assert abs((at_rest(r + h) - at_rest(r - h)) / (2 * h) - slope) < 1e-7
    far = jax.jit(jax.grad(lambda r: first(solve(repelling(r), start, jnp.array([0.0, 200.0]), rtol=1e-9).final)))(r)
    assert abs(far - slope) < 1e-6
