"""Sweeps: one function of one point, run over all points in compiled chunks that survive interruption."""

import contextlib
import functools
import math
import random
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .captured import fingerprint, qualified_name, refuse_captured_arrays
from .dataset import dataset, failures, load
from .facts import facts
from .lanes import Job, bytes_needed, flat, lower, on_host, parameters, schedule, shapes, tree_digest, variables
from .points import Points
from .store import Store, lock, open_store, read_spec, refuse_change
from .workers import cluster, compute, worker_facts

if TYPE_CHECKING:
    import xarray as xr

CHUNKS = 64  # a sweep is stored in about so many pieces, so that a kill costs at most so small a part of it
GROUP = {"cpu": 32}  # lanes vmapped together: wide enough to pay for the frames, narrow enough for unequal lanes
GROUP_ELSEWHERE = 1024


def sweep(
    run: Callable,
    points: Points,
    *,
    shared: Sequence = (),
    store: str | Path | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    cost: Callable[..., Any] | None = None,
    chunk: int | None = None,
    group: int | None = None,
    memory: int = 2**30,
    devices: Sequence[jax.Device] | None = None,
    workers: int = 0,
    scheduler: str | None = None,
    config: Mapping | None = None,
    recheck: int = 0,
    progress: bool = False,
    throw: bool = False,
) -> "xr.Dataset":
    """Run an ordinary function of one point over all points; a Dataset whose coordinates are the axes.

    `run` takes the axes by name and, for its other parameters in order, the values of `shared`; it returns a
    `Trajectory` or a dict of arrays. It is traced and compiled once. Arrays that it would read from outside its
    arguments are an error, since the compiled program would keep their old values.

        def run(beta, key, ts):
            x0 = sphere.uniform(key, n=32, d=2)
            field = AttentionField(ScalarHeads([1.0]), Softmax(beta))
            return solve(field, x0, ts, observe={"cosine": observe.mean_cosine}, throw=False)

        out = sweep(run, grid(beta=betas, key=jr.split(key, 256)), shared=(ts,), store="runs/phase")

    **Arguments:**

    - `store`: a folder for the chunks as they finish. A sweep that was killed continues there, and the result has
      the bits of an uninterrupted one; another sweep's store is refused, and so is a store in use.
    - `dims`: names of a result's own axes, such as `{"shadow": ("time", "head", "token")}`.
    - `cost`: a function of the coordinates (arrays, by name) that grows with the expected time of a point, such as
      `lambda beta, **rest: beta`. Lanes of about equal cost then run together.
    - `chunk`, `group`: lanes per stored chunk, and lanes vmapped together (up to 1024 on a GPU, 32 on a
      CPU). Both belong to the store, since the bits depend on them.
    - `memory`: bytes that one chunk may take; chunk and group are halved until it fits.
    - `devices`: where to run, default all local devices, each with a loop of its own.
    - `workers`, `scheduler`: instead run in so many local processes, or on a dask scheduler's workers; needs
      `store` and a `run` that can be imported (docs/many-devices.md).
    - `config`: JSON recorded as part of the store's identity.
    - `throw`: raise RuntimeError at the end where a lane failed; otherwise warn. Failed frames are NaN.
    """
    refuse_captured_arrays(run)
    remote = bool(workers or scheduler)
    if remote and (store is None or recheck):
        raise ValueError("`workers` and `scheduler` need `store`, where the chunks are written, and no `recheck`.")
    path = None if store is None else Path(store)
    named = parameters(run, points, shared)
    with contextlib.ExitStack() as stack:
        if path is not None:
            stack.enter_context(lock(path))
        old = None if path is None else read_spec(path)
        client = stack.enter_context(cluster(workers, scheduler)) if remote else None
        devices = list(devices or jax.local_devices())
        here = worker_facts(client) if client else {**facts(), "devices": len(devices)}

        def job(chunk, group):
            sizes = _sizes(len(points), here, chunk, group)
            return _job(run, points, named, cost=cost, sizes=sizes, devices=here["devices"])

        begin: Any = None  # the workers begin their chunks themselves
        if path is not None and old is not None:  # its chunks are fixed, since the bits depend on them
            refuse_change(path, {"facts": old["facts"]}, {"facts": here})
            work, results = job(chunk or old["chunk"], group or old["group"]), old["variables"]
            begin = _when_called(work, devices)
        elif client:
            work = job(chunk, group)
            results = variables(shapes(work), dims or {})
        else:
            work, begin, found = _fitting(job, devices, memory, sizes=(chunk, group))
            results = variables(found, dims or {})
        spec = _specification(work, points, here, results=results, config=config)
        at = None if path is None else open_store(path, spec)
        todo = list(range(spec["chunks"])) if at is None else at.missing()
        again = _sample(sorted({*range(spec["chunks"])} - {*todo}), recheck)
        kept: dict[int, dict] = {}
        with _bar(spec["chunks"], len(todo), work.chunk, progress) as tick, _resumable(path):
            if path is not None and client is not None:
                finished = compute(client, work, path, chunks=todo)
            else:
                finished = _commit(_computed(begin, again + todo), at, kept)
            for _ in finished:
                tick()
        if at is not None:
            at.tidy()
    out = dataset(spec, kept.items()) if path is None else load(path)
    _report(out, throw)
    return out


def _job(run, points: Points, shared: Mapping, *, cost, sizes: tuple[int, int], devices: int) -> Job:
    chunk, group = sizes
    expected = None if cost is None else np.asarray(cost(**points.coordinates()), float)
    if expected is not None and expected.shape != (len(points),):
        raise ValueError(f"`cost` must return one number per point, shape ({len(points)},), got {expected.shape}.")
    order = schedule(len(points), chunk=chunk, group=group, devices=devices, cost=expected)
    axes = {name: on_host(axis.values) for name, axis in points.axes.items()}
    return Job(run, axes, points.positions(order), shared, order, chunk, group)


def _sizes(points: int, here: Mapping, chunk: int | None, group: int | None) -> tuple[int, int]:
    """Lanes per chunk and per vmapped group: whole groups for every device."""
    devices, usual = here["devices"], GROUP.get(here["device"], GROUP_ELSEWHERE)
    if chunk is None:
        group = group or min(usual, math.ceil(points / devices))
        return devices * group * math.ceil(points / (devices * group * CHUNKS)), group
    group = group or max(size for size in range(1, usual + 1) if (chunk // devices) % size == 0)
    if chunk < 1 or chunk % (devices * group):
        raise ValueError(f"`chunk` must be a multiple of {devices} devices x `group` = {group}, got {chunk}.")
    return chunk, group


def _fitting(job: Callable, devices: Sequence, memory: int, *, sizes: tuple) -> tuple[Job, Callable, Any]:
    """(job, function that begins a chunk, shapes of its results): chunk and group lowered until one fits."""
    chunk, group = sizes
    while True:
        work = job(chunk, group)
        lowered, start = lower(work, devices)
        compiled = lowered.compile()
        needed = bytes_needed(compiled, len(devices))
        if needed <= memory:
            return work, functools.partial(start, compiled), lowered.out_info
        if work.chunk == len(devices):
            raise ValueError(f"one lane per device needs {needed} bytes, `memory` allows {memory}; raise it.")
        lanes = max(1, int(work.chunk * memory / needed) // len(devices))
        group = min(work.group, lanes)
        chunk = lanes // group * group * len(devices)


def _when_called(work: Job, devices: Sequence) -> Callable[[int], Any]:
    """A function that begins a chunk; it compiles at its first call, so that a finished sweep compiles nothing."""

    @functools.cache
    def program():
        lowered, start = lower(work, devices)
        return functools.partial(start, lowered.compile())

    return lambda chunk: program()(chunk)


def _specification(work: Job, points: Points, here: Mapping, *, results: Mapping, config: Mapping | None) -> dict:
    """All that decides a sweep's results, as JSON."""
    axes = {
        name: {"dim": axis.dim, "labels": axis.labels.tolist(), "sha256": tree_digest(work.axes[name])}
        for name, axis in points.axes.items()
    }
    return {
        "run": {"name": qualified_name(work.run), "code": fingerprint(work.run)},
        "axes": axes,
        "dims": list(points.dims),
        "shared": {name: tree_digest(value) for name, value in work.shared.items()},
        "points": len(points),
        "order": work.order.tolist(),
        "chunk": work.chunk,
        "group": work.group,
        "chunks": len(work.order) // work.chunk,
        "variables": results,
        "config": config,
        "facts": here,
    }


def _computed(begin: Callable[[int], Any], chunks: Iterable[int]) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Chunks and their results; the next one is under way while one is handed over."""
    running = None
    for chunk in chunks:
        begun = (chunk, begin(chunk))
        if running:
            yield running[0], flat(running[1])
        running = begun
    if running:
        yield running[0], flat(running[1])


def _commit(results: Iterable, at: Store | None, kept: dict) -> Iterator[int]:
    """Put results where they belong; yields the number of each chunk that is safe."""
    for chunk, values in results:
        if at is None:
            kept[chunk] = values
        else:
            at.put(chunk, values)
        yield chunk


def _sample(finished: Sequence[int], count: int) -> list[int]:
    return sorted(random.sample(finished, min(count, len(finished))))


@contextlib.contextmanager
def _resumable(path: Path | None) -> Generator[None]:
    try:
        yield
    except KeyboardInterrupt as stop:
        if path is not None:
            stop.add_note(f"The finished chunks are in {path}; run the same again to resume.")
        raise


@contextlib.contextmanager
def _bar(chunks: int, todo: int, lanes: int, progress: bool) -> Generator[Callable[[], None]]:
    """A progress bar with rate and time left, counting lanes; the finished chunks of a resumed sweep come first."""
    if not progress:
        yield lambda: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns) as bar:
        resumed = "" if todo == chunks else f" (resumed, {chunks - todo} of {chunks} chunks were done)"
        task = bar.add_task(f"sweep{resumed}", total=todo * lanes, rate="")

        def tick():
            bar.advance(task, lanes)
            speed = bar.tasks[0].speed
            bar.update(task, rate="" if speed is None else f"{speed:.3g} lanes/s")

        yield tick


def _report(results: "xr.Dataset", throw: bool) -> None:
    lines = failures(results)
    if lines:
        shown = "\n  ".join(lines[:10] + ["..."] * (len(lines) > 10))
        message = f"{len(lines)} of {results['status'].size} lanes failed, their unreached frames are NaN:\n  {shown}"
        if throw:
            raise RuntimeError(message)
        warnings.warn(f"{message}\nPass throw=True to have this raised.", stacklevel=3)
