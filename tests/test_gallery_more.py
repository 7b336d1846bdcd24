"""Figures of tokens in flat space, of energies, of the ring and of low temperature, at sizes for tests."""

import numpy as np
import pytest

from attnflow import config, gallery
from attnflow.figures import find_configuration
from attnflow.gallery.flat import sparse_spectrum
from attnflow.gallery.low_temperature import graded_sphere

SMALL = {
    "codim_k": ["tokens.n=10", "solve.rtol=1e-6"],
    "high_dim": ["tokens.n=24", "tokens.d=24"],
    "energy_minima": [],
    "energy_maxima": ["tokens.n=8", "solve.rtol=1e-8"],
    "rotation_triangle": ["tokens.n=30", "solve.rtol=1e-4"],
    "low_temperature_sphere": ["tokens.n=800", "attention.beta=[8.0, 24.0]", "solve.t1=20"],
}
BROKEN = {
    "codim_k": ["solve.t1=7"],
    "high_dim": ["solve.t1=6"],
    "energy_minima": ["solve.t1=2"],
    "energy_maxima": ["solve.t1=2"],
    "rotation_triangle": ["solve.t1=40"],
    "low_temperature_sphere": ["heads.score=[[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]]"],
}


def lines(name, changes):
    _, made, fig = gallery.DRAWN[name](config.read(find_configuration(name), changes))
    assert fig.axes
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_figure_meets_its_lines_and_misses_them_where_the_flow_is_broken(name):
    made = lines(name, SMALL[name])
    assert all(line.good for line in made), made
    made = lines(name, SMALL[name] + BROKEN[name])
    assert not all(line.good for line in made), made


def test_graded_nodes_have_the_moments_of_their_density_and_crowd_at_the_equator():
    tilt = np.array([0.3, 0.1, 0.2])
    x, w = (np.asarray(a) for a in graded_sphere(1700, tilt=tilt))
    assert abs(len(x) / 1700 - 1) < 0.1 and w.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, atol=1e-14)
    np.testing.assert_allclose(w @ x, tilt / 3, atol=2e-4)
    np.testing.assert_allclose((w[:, None] * x).T @ x, np.eye(3) / 3, atol=1e-3)
    assert np.mean(np.abs(x[:, 2]) < 0.03) > 10 * np.sum(w[np.abs(x[:, 2]) < 0.03])


def test_sparse_spectrum_is_that_of_a_nonnegative_matrix_moved_away_from_zero():
    rates, vectors = sparse_spectrum(np.random.default_rng(0), 128, top=2.4)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(128), atol=1e-12)
    assert rates[-1] == pytest.approx(2.4) and np.all(np.diff(rates) >= 0)
    assert np.abs(rates).min() >= 1 and np.abs(rates[:-1]).max() < 2.4
    leading = vectors[:, -1] * np.sign(vectors[0, -1])
    assert np.all(leading > 0)  # Perron and Frobenius: the matrix drawn is non-negative
    assert 40 < np.sum(rates > 0) < 88


def test_page_shows_the_whole_description_and_the_list_its_first_sentence():
    whole = gallery.description("high_dim")
    assert (
        gallery.caption("high_dim") == whole.split("\n\n")[0]
        and "2.4" in whole
        and "2.4" not in gallery.caption("high_dim")
    )
