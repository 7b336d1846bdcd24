"""A sweep as one compiled program: a chunk of lanes (points) in, their results out."""

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .captured import described
from .points import Points, is_array, is_key
from .solve import Trajectory
from .store import digest


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """What any process needs to compute any chunk of a sweep; arrays are numpy's."""

    run: Callable
    axes: Mapping[str, Any]  # per axis a pytree of values
    places: Mapping[str, np.ndarray]  # per axis the position of every lane, in the order of work
    shared: Mapping[str, Any]  # the other parameters of run
    order: np.ndarray  # the point (flat index) of every lane, in the order of work
    chunk: int
    group: int

    def lanes(self, chunk: int) -> dict[str, Any]:
        """The points of one chunk: every axis at its lanes."""
        here = slice(chunk * self.chunk, (chunk + 1) * self.chunk)
        return {name: _take(values, self.places[name][here]) for name, values in self.axes.items()}

    def halves(self) -> tuple[Any, Any]:
        """(shared arrays, function from a lane's arrays and the shared ones to its results)."""
        rest = eqx.filter(self.lanes(0), is_array, inverse=True)
        arrays, constants = eqx.partition(self.shared, is_array)

        def lane(point, shared):
            return outputs(self.run(**eqx.combine(point, rest), **eqx.combine(shared, constants)))

        return arrays, lane


def schedule(points: int, *, chunk: int, group: int, devices: int, cost: np.ndarray | None) -> np.ndarray:
    """The order of work: flat indices of the points, the last one repeated up to whole chunks.

    With a cost, dearest first, so that lanes which run together take about as long; within a chunk the devices
    take groups in turn.
    """
    order = np.arange(points) if cost is None else np.argsort(-cost, kind="stable")
    order = np.concatenate([order, np.full(-points % chunk, order[-1])])
    if cost is None:
        return order
    return order.reshape(-1, chunk // (group * devices), devices, group).swapaxes(1, 2).reshape(-1)


def parameters(run: Callable, points: Points, shared: Sequence) -> dict[str, Any]:
    """`shared` by name: the parameters of `run` that are not axes take its values in order."""
    signature = inspect.signature(run)
    unknown = [name for name in points.axes if name not in signature.parameters]
    if unknown:
        raise ValueError(f"`run` must have the axes as parameters; {unknown} are missing in {signature}.")
    free = {name: p for name, p in signature.parameters.items() if name not in points.axes}
    needed = [name for name, p in free.items() if p.default is p.empty]
    if not len(needed) <= len(shared) <= len(free):
        raise ValueError(f"`shared` must hold one value for each of {needed}, got {len(shared)} values.")
    return dict(zip(free, map(on_host, shared), strict=False))


def tree_digest(tree: Any) -> str:
    """Sha256 of a pytree: structure, dtypes, shapes and bytes of its arrays, constants by their repr."""
    leaves, treedef = jax.tree.flatten(tree)
    text = hashlib.sha256(described(treedef).encode())
    for leaf in leaves:
        if is_array(leaf):
            data = np.asarray(jr.key_data(leaf) if is_key(leaf) else leaf)
            text.update(f"{leaf.dtype} {leaf.shape} {digest(data)}".encode())
        else:
            text.update(described(leaf).encode())
    return text.hexdigest()


def shapes(job: Job) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """Shapes of a chunk's results, without compiling anything."""
    shared, lane = job.halves()
    return jax.eval_shape(jax.vmap(lane, in_axes=(0, None)), eqx.filter(job.lanes(0), is_array), shared)


def lower(job: Job, devices: Sequence[jax.Device]) -> tuple[jax.stages.Lowered, Callable]:
    """(lowered, start): the program of one chunk, traced once; `start(lowered.compile(), chunk)` begins a chunk.

    Each device runs its own loop over groups of vmapped lanes: an adaptive solve under vmap takes as long as its
    slowest lane, and devices that share one loop wait for each other.
    """
    mesh = Mesh(np.array(devices), ("lane",), axis_types=(AxisType.Auto,))
    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("lane"))
    shared, lane = job.halves()

    def loop(points, shared):
        if job.group == 1:
            return jax.lax.map(lambda point: lane(point, shared), points)
        groups = jax.tree.map(lambda a: a.reshape(-1, job.group, *a.shape[1:]), points)
        results = jax.lax.map(jax.vmap(lambda point: lane(point, shared)), groups)
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), results)

    # check_vma=False: the check of replication refuses the carry of diffrax's loop
    spread = jax.shard_map(loop, mesh=mesh, in_specs=(P("lane"), P()), out_specs=P("lane"), check_vma=False)
    shared = jax.device_put(shared, everywhere)

    def points(chunk):
        return jax.device_put(eqx.filter(job.lanes(chunk), is_array), split)

    lowered = jax.jit(loop if len(devices) == 1 else spread).lower(points(0), shared)
    return lowered, lambda compiled, chunk: compiled(points(chunk), shared)


def bytes_needed(compiled: jax.stages.Compiled, devices: int) -> int:
    """Peak bytes of a sweep at work on all devices: one chunk computed while the one before is handed over."""
    memory: Any = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return (2 * held + memory.temp_size_in_bytes) * devices


def outputs(result: Any) -> dict[str, dict[str, Any]]:
    """What `run` returned as two dictionaries: frames (first axis: time) and single results."""
    if isinstance(result, Trajectory):
        return {"frames": {"time": result.ts, **_named(result.values)}, "single": _named(result.stats)}
    if not isinstance(result, Mapping) or not result:
        raise ValueError(f"`run` must return a Trajectory or a dict of arrays, got {type(result).__name__}.")
    return {"frames": {}, "single": _named(result)}


def variables(shapes: Any, dims: Mapping[str, Sequence[str]]) -> dict[str, dict]:
    """Shape and dtype of one lane of each result, and the names of its axes, from the shapes of a chunk."""
    found = {}
    for kind, results in shapes.items():
        for name, leaf in results.items():
            if name in found:
                raise ValueError(f"`run` must not return the name {name!r} twice; rename the observable.")
            shape = leaf.shape[1:]
            first = ["time"] if kind == "frames" else []
            names = first + [f"{name}_{axis}" for axis in range(len(first), len(shape))]
            names = list(dims.get(name, names))
            if len(names) != len(shape):
                raise ValueError(f"`dims` of {name!r} must name {len(shape)} axes, got {names}.")
            found[name] = {"shape": list(shape), "dtype": str(leaf.dtype), "dims": names}
    return found


def flat(results: Mapping[str, Mapping[str, jax.Array]]) -> dict[str, np.ndarray]:
    """A chunk's results on the host, by name; waits for them."""
    return {name: np.asarray(array) for kind in results.values() for name, array in kind.items()}


def _named(results: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Arrays by name; those of an observable that returns several are numbered: margins_0, margins_1."""
    paths = jax.tree_util.tree_leaves_with_path(dict(results))
    return {jax.tree_util.keystr(path, simple=True, separator="_"): jnp.asarray(a) for path, a in paths}


def on_host(tree: Any) -> Any:
    """Arrays as numpy, so that they can be sent and hashed; random keys stay as they are."""
    return jax.tree.map(lambda a: a if is_key(a) or not is_array(a) else np.asarray(a), tree)


def _take(tree: Any, positions: np.ndarray) -> Any:
    return jax.tree.map(lambda a: a[positions] if is_array(a) else a, tree)
