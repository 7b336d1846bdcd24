"""The points of a sweep: products, zips, coordinates, and what is no axis."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from attnflow.heads import ScalarHeads
from attnflow.points import grid, zipped


def test_a_grid_is_the_product_with_the_last_axis_fastest():
    axes = {"a": [1.0, 2.0], "b": [3, 4, 5], "c": [True, False]}
    points = grid(**axes)
    assert len(points) == 12 and points.shape == (2, 3, 2)
    flat = points.coordinates()
    assert list(zip(flat["a"], flat["b"], flat["c"], strict=True)) == list(itertools.product(*axes.values()))


def test_zipped_axes_share_one_dimension_and_multiply_as_one():
    points = zipped("case", n=[2, 4, 8], beta=[1.0, 2.0, 3.0]) * grid(seed=[0, 1])
    assert points.dims == {"case": 3, "seed": 2}
    flat = points.coordinates()
    expected = [(2, 1.0, 0), (2, 1.0, 1), (4, 2.0, 0), (4, 2.0, 1), (8, 3.0, 0), (8, 3.0, 1)]
    assert list(zip(flat["n"], flat["beta"], flat["seed"], strict=True)) == expected


def test_keys_and_modules_are_axes_with_numbers_or_given_names_as_labels(key):
    heads = eqx.filter_vmap(ScalarHeads)(jnp.ones((3, 2)))
    points = grid(heads=heads, seed=jr.split(key, 4))
    assert points.shape == (3, 4)
    assert points.coordinates()["heads"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    named = points.labelled(heads=["one", "two", "three"])
    assert named.coordinates()["heads"][::4].tolist() == ["one", "two", "three"]
    assert points.axes["heads"].labels[0] == 0  # the first is unchanged


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: grid(), "at least one axis"),
        (lambda: grid(beta=[]), "axis `beta` is empty"),
        (lambda: grid(beta=jnp.zeros((0, 3))), "axis `beta` is empty"),
        (lambda: grid(beta=1.0), "axis `beta` must be an array, a list or a batched module"),
        (lambda: grid(beta=jnp.ones(())), r"got a scalar: write \[value\]"),
        (lambda: grid(seed=jr.key(0)), r"got a scalar: write \[value\]"),
        (lambda: grid(heads=ScalarHeads([1.0]), x={"a": np.ones(2), "b": np.ones(3)}), "`x` must have one leading"),
        (lambda: grid(beta=[1.0, np.nan]), "axis `beta` must be finite"),
        (lambda: grid(kind=["softmax", "relu"]), "must hold numbers, got <U7; names go into `labelled`"),
        (lambda: zipped("case", a=[1, 2], b=[1]), r"one length, got {'a': 2, 'b': 1}; for all pairs use `grid`"),
        (lambda: zipped("a", a=[1, 2]), "axes of other names"),
        (lambda: grid(a=[1]) * grid(a=[2]), r"share no name, got \['a'\]"),
        (lambda: grid(a=[1]) * zipped("a", b=[2]), r"share no name, got \['a'\]"),
        (lambda: grid(a=[1]).labelled(b=["x"]), "`b` is no axis"),
        (lambda: grid(a=[1]).labelled(a=["x", "y"]), r"labels of `a` must have shape \(1,\), got \(2,\)"),
    ],
)
def test_what_is_no_axis_is_refused_with_a_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_coordinates_keep_the_precision_they_were_given_in():
    assert grid(beta=[0.1]).axes["beta"].labels.dtype == np.float64
    assert grid(beta=np.float32([0.1])).axes["beta"].labels.dtype == np.float32
    assert isinstance(grid(beta=jax.numpy.ones(2)).axes["beta"].labels, np.ndarray)
