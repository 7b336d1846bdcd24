"""The points of a sweep: named axes of numbers, keys or modules, multiplied or run side by side."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Axis:
    """Values of one parameter along one dimension: a pytree of arrays with one leading length."""

    dim: str
    values: Any
    labels: np.ndarray  # the coordinate: the numbers themselves, or 0, 1, ... for keys and modules


@dataclasses.dataclass(frozen=True)
class Points:
    """The points of a sweep, made by `grid` and `zipped`; `p * q` is their product."""

    axes: Mapping[str, Axis]

    @property
    def dims(self) -> dict[str, int]:
        """Length of each dimension, in order; the last one varies fastest."""
        return {axis.dim: len(axis.labels) for axis in self.axes.values()}

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths alone."""
        return tuple(self.dims.values())

    def __len__(self) -> int:
        return math.prod(self.shape)

    def __mul__(self, other: "Points") -> "Points":
        twice = {*self.axes, *self.dims} & {*other.axes, *other.dims}
        if twice:
            raise ValueError(f"the factors of a product must share no name, got {sorted(twice)} in both.")
        return Points({**self.axes, **other.axes})

    def labelled(self, **labels: Sequence) -> "Points":
        """The same points with other coordinates, such as names: `labelled(heads=["one", "two"])`."""
        axes = dict(self.axes)
        for name, values in labels.items():
            if name not in axes:
                raise ValueError(f"`{name}` is no axis; the axes are {sorted(axes)}.")
            expected, coordinate = axes[name].labels.shape, np.asarray(values)
            if coordinate.shape != expected:
                raise ValueError(f"labels of `{name}` must have shape {expected}, got {coordinate.shape}.")
            axes[name] = dataclasses.replace(axes[name], labels=coordinate)
        return Points(axes)

    def positions(self, points: np.ndarray) -> dict[str, np.ndarray]:
        """Where along each axis the given points (flat indices) lie."""
        place = dict(zip(self.dims, np.unravel_index(points, self.shape), strict=True))
        return {name: place[axis.dim] for name, axis in self.axes.items()}

    def coordinates(self) -> dict[str, np.ndarray]:
        """The label of every point on each axis, in flat order."""
        place = self.positions(np.arange(len(self)))
        return {name: axis.labels[place[name]] for name, axis in self.axes.items()}


def grid(**axes: Any) -> Points:
    """Every combination of the axes, the last one fastest: `grid(beta=betas, seed=jr.split(key, 64))`.

    An axis is an array or list (its first axis is the sweep's), an array of random keys, or a module with
    batched arrays as `eqx.filter_vmap` of a constructor makes it. Constants go into `shared` of `sweep`.
    """
    if not axes:
        raise ValueError("a grid needs at least one axis, such as `grid(beta=[1.0, 4.0])`.")
    return Points({name: _axis(name, name, values) for name, values in axes.items()})


def zipped(dim: str, /, **axes: Any) -> Points:
    """Axes of one length, side by side along one dimension: `zipped("case", beta=betas, heads=heads)`."""
    if not axes or dim in axes:
        raise ValueError('`zipped` needs a dimension name and axes of other names: `zipped("case", beta=betas)`.')
    points = Points({name: _axis(name, dim, values) for name, values in axes.items()})
    lengths = {name: len(axis.labels) for name, axis in points.axes.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"axes side by side must have one length, got {lengths}; for all pairs use `grid`.")
    return points


def is_array(leaf: Any) -> bool:
    """Whether a leaf is a numpy or JAX array, random keys included."""
    return isinstance(leaf, np.ndarray | jax.Array)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _axis(name: str, dim: str, values: Any) -> Axis:
    if isinstance(values, list | tuple | range):
        values = np.asarray(values)
    leaves = [leaf for leaf in jax.tree.leaves(values) if is_array(leaf)]
    if not leaves:
        raise ValueError(f"axis `{name}` must be an array, a list or a batched module; constants go into `shared`.")
    if any(leaf.ndim == 0 for leaf in leaves):
        raise ValueError(f"axis `{name}` must have a leading axis to sweep over, got a scalar: write [value].")
    lengths = {leaf.shape[0] for leaf in leaves}
    if len(lengths) > 1:
        raise ValueError(f"the arrays of axis `{name}` must have one leading length, got {sorted(lengths)}.")
    if lengths == {0}:
        raise ValueError(f"axis `{name}` is empty: there is nothing to sweep over.")
    for leaf in leaves:
        if not is_key(leaf) and not jnp.issubdtype(leaf.dtype, jnp.number) and leaf.dtype != bool:
            raise ValueError(f"axis `{name}` must hold numbers, got {leaf.dtype}; names go into `labelled`.")
        if not is_key(leaf) and not bool(np.all(np.isfinite(np.asarray(leaf)))):
            raise ValueError(f"axis `{name}` must be finite; it holds NaN or infinity.")
    plain = is_array(values) and not is_key(values) and values.ndim == 1
    return Axis(dim, values, np.asarray(values) if plain else np.arange(lengths.pop()))
