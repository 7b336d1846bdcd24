"""Chunks of a sweep on other processes and machines: dask.distributed runs them, the store keeps them.

A task asks the store whether its chunk is done, else computes it, writes it and returns its number. Results do
not travel, so a lost worker costs the chunk it was computing. Needs the extra `attnflow[dask]`.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from .captured import fingerprint, qualified_name
from .facts import facts
from .lanes import Job, flat, lower
from .store import StoreMismatch, load_store

if TYPE_CHECKING:
    from distributed import Client

LOSSES = 3  # workers that may die over one chunk before the sweep gives up
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_compilation_cache_dir")


@contextlib.contextmanager
def cluster(workers: int, scheduler: str | None) -> "Generator[Client]":
    """A dask client: of the scheduler at an address, or of new processes on this machine.

    Local processes are spawned (a fork after JAX has started can hang) and restarted when they die; each has one
    GPU where there are GPUs, else its share of the cores. They listen on the loopback address only.
    """
    try:
        import dask
        from distributed import Client, Nanny, Scheduler, SpecCluster
    except ImportError:
        raise ImportError("sweeps on workers need dask.distributed: pip install 'attnflow[dask]'.") from None
    if scheduler:
        with Client(scheduler) as client:
            client.wait_for_workers(1)
            yield client
        return
    settings = {
        "distributed.scheduler.allowed-failures": LOSSES - 1,
        "distributed.worker.multiprocessing-method": "spawn",
    }
    local = {"host": "127.0.0.1", "port": 0, "dashboard": False}
    quiet = {"silence_logs": logging.WARNING}  # a page of news about connections otherwise
    nannies = {
        rank: {"cls": Nanny, "options": {**local, **quiet, "nthreads": 1, "env": environment(rank, workers)}}
        for rank in range(workers)
    }
    hub = {"cls": Scheduler, "options": {**local, "dashboard_address": "127.0.0.1:0"}}  # any free port
    started = SpecCluster(workers=nannies, scheduler=hub, **quiet)
    with dask.config.set(settings), started as pool, Client(pool) as client:
        client.wait_for_workers(workers)
        yield client


def environment(rank: int, workers: int) -> dict[str, str]:
    """What worker `rank` of so many on one machine may use: one GPU, or its share of the cores as one device."""
    present = ",".join(str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*")))
    gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", present).split(",") if gpu]
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    env = {"XLA_FLAGS": " ".join(flags), "NPROC": os.environ.get("NPROC", threads)}
    return {**env, "CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)]} if gpus else env


def worker_facts(client: "Client") -> dict:
    """The facts of the workers; ValueError where they differ, since the bits would."""
    first, *others = client.run(_facts, settings()).values()
    unlike = [other for other in others if other != first]
    if unlike:
        raise ValueError(f"the workers of one sweep must be alike, got {first} and {unlike[0]}.")
    return first


def settings() -> dict[str, Any]:
    """The settings of JAX that the workers take over from this process."""
    return {name: jax.config.values[name] for name in SETTINGS}


def compute(client: "Client", job: Job, store: Path, *, chunks: Sequence[int]) -> Iterator[int]:
    """Have the workers compute chunks into the store; yields their numbers as they finish.

    An error in a chunk ends the sweep at once. A chunk over which `LOSSES` workers died ends it too.
    """
    from distributed import KilledWorker, as_completed

    refuse_unimportable(job.run)
    sent = client.submit(_same, job, pure=False)  # a task, so that it is sent again to a worker that restarts
    tasks = [client.submit(_chunk, sent, chunk, str(store.resolve()), settings(), pure=False) for chunk in chunks]
    try:
        for task in as_completed(tasks):
            yield task.result()
    except KilledWorker as error:
        raise RuntimeError(
            f"{LOSSES} workers died over one chunk ({error}); look for lack of memory, then run again to resume."
        ) from error
    finally:
        client.cancel(tasks)


def refuse_unimportable(run: Callable) -> None:
    """Raise ValueError unless `run` is a function of a module (or a `partial` of one), sent by its name."""
    name = qualified_name(run)
    if name.startswith("__main__:") or "<" in name:
        raise ValueError(f"workers import `run` by name, so it must be a function of a module, got {name}.")


def _same(job: Job) -> Job:
    return job


def _facts(settings: dict[str, Any]) -> dict:
    for name, value in settings.items():
        jax.config.update(name, value)
    return facts()


def _chunk(job: Job, chunk: int, store: str, settings: dict[str, Any]) -> int:
    at = load_store(Path(store))
    if at.get(chunk) is None:
        here = _facts(settings)
        if here != at.spec["facts"]:
            raise StoreMismatch(f"this worker computes other bits than the store's: {here}, not {at.spec['facts']}.")
        at.put(chunk, flat(_program(job, at.spec["run"]["code"])(chunk)))
    return chunk


@functools.lru_cache(maxsize=1)
def _program(job: Job, code: str) -> Callable[[int], Any]:
    """A function that begins a chunk; compiled once per worker process."""
    if fingerprint(job.run) != code:
        raise StoreMismatch("`run` has other code on this worker than where the sweep was started.")
    lowered, start = lower(job, jax.local_devices())
    return functools.partial(start, lowered.compile())
