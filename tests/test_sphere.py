"""Projection, distances, samplers and quadratures against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import close
from scipy import special

from attnflow import sphere


def test_projection_is_tangent_whatever_the_length(key, dtype):
    x, v = jax.random.normal(key, (2, 50, 4), dtype) * 3
    assert close(jnp.sum(x * sphere.project(x, v), axis=1), np.zeros(50, dtype), eps=10)
    assert close(sphere.project(2 * x, v), sphere.project(x, v), eps=10)


def test_distances_are_exact_where_the_cosine_is_not(dtype):
    e1 = jnp.eye(3, dtype=dtype)[:1]
    assert float(sphere.geodesic(e1, e1)[0]) == 0
    assert float(sphere.geodesic(e1, -e1)[0]) == float(np.pi if dtype == np.float64 else np.float32(np.pi))
    for angle in (1e-5, 1e-3):
        other = jnp.asarray([[np.cos(angle), np.sin(angle), 0]], dtype)
        assert abs(float(sphere.geodesic(e1, other)[0]) / angle - 1) < 1e-2 * np.sqrt(np.finfo(dtype).eps) + 1e-6
        assert abs(float(sphere.geodesic(e1, -other)[0]) - (np.pi - angle)) < 4 * np.finfo(dtype).eps
        assert abs(float(sphere.chordal(e1, other)[0]) / (2 * np.sin(angle / 2)) - 1) < 1e-6


@pytest.mark.parametrize("distance", [sphere.chordal, sphere.geodesic])
def test_distance_gradients_are_finite_at_coincidence_and_antipode(distance, dtype):
    e1 = jnp.eye(3, dtype=dtype)[0]
    for y in (e1, -e1):
        assert np.isfinite(jax.grad(lambda x, y=y: distance(x, y) ** 2)(e1)).all()
    assert close(jax.grad(lambda x: distance(x, e1) ** 2)(e1), np.zeros(3, dtype))


def test_retraction_of_a_zero_row_has_a_zero_gradient(dtype):
    zero = jnp.zeros((1, 3), dtype)
    assert np.all(np.isfinite(jax.jacobian(sphere.retract)(zero)))


@pytest.mark.parametrize("d", [2, 3, 16])
def test_uniform_sample_has_the_moments_of_the_sphere(key, d):
    x = np.asarray(sphere.uniform(key, 20_000, d))
    assert np.allclose(np.linalg.norm(x, axis=1), 1)
    assert np.abs(x.mean(0)).max() < 4 / np.sqrt(20_000 * d)
    assert np.abs(x.T @ x / len(x) - np.eye(d) / d).max() < 4 / np.sqrt(20_000)


@pytest.mark.parametrize(("d", "kappa"), [(2, 3.0), (3, 20.0), (8, 0.0), (5, 300.0)])
def test_von_mises_fisher_sample_has_the_mean_resultant_length(key, d, kappa):
    mean = jnp.eye(d)[0]
    x = np.asarray(sphere.von_mises_fisher(key, 20_000, mean, kappa=kappa))
    length = special.ive(d / 2, kappa) / special.ive(d / 2 - 1, kappa) if kappa else 0.0
    assert np.allclose(np.linalg.norm(x, axis=1), 1)
    assert abs(x[:, 0].mean() - length) < 5 * x[:, 0].std() / np.sqrt(len(x))
    assert np.abs(x[:, 1:].mean(0)).max() < 5 / np.sqrt(len(x))


@pytest.mark.parametrize(("n", "cosine", "d"), [(6, 0.1, None), (32, 0.0, 40), (5, -0.25, 4), (3, 1.0, 3), (1, 0.3, 2)])
def test_equiangular_tokens_have_the_asked_cosine(n, cosine, d):
    x = np.asarray(sphere.equiangular(n, cosine, d))
    assert x.shape == (n, d or n)
    gram = x @ x.T
    assert np.allclose(gram, (1 - cosine) * np.eye(n) + cosine, atol=1e-14)


def test_equiangular_tokens_refuse_what_no_dimension_can_hold():
    with pytest.raises(ValueError, match=r"\[-1/\(n-1\), 1\]"):
        sphere.equiangular(4, -0.5)
    with pytest.raises(ValueError, match="need d >= 4"):
        sphere.equiangular(4, 0.2, d=3)
    assert sphere.simplex(4).shape == (4, 3)


@pytest.mark.parametrize("options", [{}, {"refine": (0.0, np.pi), "smallest": 1e-5}])
def test_circle_quadrature_integrates_trigonometric_moments(options):
    def density(theta):
        return 1 + 0.3 * np.cos(theta - 0.7)

    x, w = map(np.asarray, sphere.circle_quadrature(density, 1200, **options))
    theta = np.asarray(sphere.angles(jnp.asarray(x)))
    tolerance = 1e-13 if not options else 2e-5
    assert abs(float(w.sum()) - 1) < 1e-13
    assert abs(np.sum(w * np.exp(1j * theta)) - 0.15 * np.exp(0.7j)) < tolerance
    assert abs(np.sum(w * np.exp(3j * theta))) < tolerance


def test_graded_nodes_are_dense_where_asked_and_nowhere_coarse():
    x, w = sphere.circle_quadrature(np.ones_like, 1200, refine=(0.0, np.pi), smallest=1e-5)
    theta = np.sort(np.asarray(sphere.angles(x)))
    gaps = np.diff(theta)
    assert gaps.max() < 2 * 2 * np.pi / 1200 + 1e-12
    assert gaps[np.argmin(np.abs(theta[:-1]))] < 2e-6
    assert float(w.min()) < 1e-6


def test_sphere_quadrature_integrates_polynomials():
    x, w = map(np.asarray, sphere.sphere_quadrature(lambda p: 1 + p[:, 2] / 2, 800))
    assert abs(w.sum() - 1) < 1e-13
    assert np.allclose(w @ x, [0, 0, 1 / 6], atol=1e-13)
    assert np.allclose((w * x[:, 2] ** 4).sum(), 1 / 5, atol=1e-13)


def test_quadratures_refuse_a_density_that_is_not_positive():
    with pytest.raises(ValueError, match="non-negative"):
        sphere.circle_quadrature(lambda t: np.cos(t), 16)


def test_resolved_spacing_follows_the_kernel_width():
    assert sphere.resolved_spacing(128.0, 4.0) == pytest.approx(0.3 / np.sqrt(512))
    assert sphere.resolved_spacing(0.0, 4.0) == np.inf
