"""Sweeps in real processes: killed, interrupted, spread over workers; the store comes out the same, byte for byte."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

DRIVER = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with Ctrl-C ignored
import jax
jax.config.update("jax_enable_x64", True)
jax.numpy.ones(3)  # JAX has started: a fork could hang from here on
import numpy as np
import sweeps
from attnflow.points import grid
from attnflow.sweep import sweep

def main(store, lanes, workers, name):
    shared = {"slow": (np.zeros(20000),), "fatal": ()}
    out = sweep(
        getattr(sweeps, name), grid(a=np.arange(lanes, dtype=float)), shared=shared[name], store=store,
        chunk=1, group=1, workers=workers,
    )
    print(json.dumps(out["value"].values.tolist()))

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""


@pytest.fixture
def driver(tmp_path):
    """Starts sweeps in processes of their own, each with one thread and device, so that engines have equal facts."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    env = {**os.environ, "XLA_FLAGS": "", "NPROC": "1", "PYTHONPATH": str(TESTS)}
    started = []

    def start(store, *, lanes, workers=0, run="slow"):
        command = [sys.executable, "-W", "error", str(script), str(store), str(lanes), str(workers), run]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=env, start_new_session=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def manifests(store):
    return len(list((store / "manifest").glob("*.json")))


def wait_for_chunks(store, count, process):
    """Wait until so many chunks are stored, or the process has ended."""
    while manifests(store) < count and process.poll() is None:
        time.sleep(0.01)


def finished(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out)


def workers_of(process):
    """Pids of the worker processes of a driver."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == process.pid and b"spawn_main" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return sorted(found)


def content(store):
    return {str(p.relative_to(store)): p.read_bytes() for p in store.rglob("*") if p.is_file() and p.name != "lock"}


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_sweep_killed_at_random_moments_ends_as_the_undisturbed_one(driver, tmp_path, kills):
    draw, lanes = random.Random(kills), 3 * kills
    for _ in range(kills):
        before = manifests(tmp_path / "killed")
        process = driver(tmp_path / "killed", lanes=lanes)
        wait_for_chunks(tmp_path / "killed", before + draw.randint(0, 2), process)
        time.sleep(draw.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert manifests(tmp_path / "killed") >= before
    killed = finished(driver(tmp_path / "killed", lanes=lanes))
    assert killed == finished(driver(tmp_path / "undisturbed", lanes=lanes))
    assert content(tmp_path / "killed") == content(tmp_path / "undisturbed")


def test_control_c_leaves_a_store_to_resume(driver, tmp_path):
    process = driver(tmp_path / "store", lanes=40)
    wait_for_chunks(tmp_path / "store", 2, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)
    assert f"The finished chunks are in {tmp_path / 'store'}; run the same again to resume." in err
    assert 2 <= manifests(tmp_path / "store") < 40
    assert len(finished(driver(tmp_path / "store", lanes=40))) == 40


@pytest.mark.slow
def test_a_second_sweep_on_a_store_in_use_is_refused(driver, tmp_path):
    first = driver(tmp_path / "store", lanes=60)
    wait_for_chunks(tmp_path / "store", 1, first)
    second = driver(tmp_path / "store", lanes=60)
    _, err = second.communicate(timeout=120)
    assert second.returncode == 1 and f"is being written by pid {first.pid} on " in err
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert len(finished(driver(tmp_path / "store", lanes=60))) == 60


@pytest.mark.slow
def test_workers_make_the_store_of_one_process_and_outlive_their_kills(driver, tmp_path):
    """Kills of workers at random moments, and one of the driver; no chunk is lost, none differs."""
    draw, lanes = random.Random(0), 24
    process = driver(tmp_path / "killed", lanes=lanes, workers=2)
    wait_for_chunks(tmp_path / "killed", 2, process)
    orphans = workers_of(process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    process = driver(tmp_path / "killed", lanes=lanes, workers=2)
    kills = 0
    for count in range(4, lanes - 4, 4):
        wait_for_chunks(tmp_path / "killed", count, process)
        if victims := workers_of(process):
            os.kill(draw.choice(victims), signal.SIGKILL)
            kills += 1
    killed = finished(process)
    assert kills >= 4
    assert killed == finished(driver(tmp_path / "undisturbed", lanes=lanes))
    assert content(tmp_path / "killed") == content(tmp_path / "undisturbed")
    assert not [pid for pid in orphans if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_a_sweep_on_workers_after_jax_has_started_neither_forks_nor_leaves_orphans(driver, tmp_path):
    process = driver(tmp_path / "six", lanes=6, workers=2)
    assert len(finished(process)) == 6
    process = driver(tmp_path / "stopped", lanes=400, workers=2)
    wait_for_chunks(tmp_path / "stopped", 1, process)
    workers = workers_of(process)
    assert len(workers) == 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=120)
    assert "run the same again to resume" in err
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_a_chunk_that_kills_every_worker_ends_the_sweep_with_advice(driver, tmp_path):
    process = driver(tmp_path / "always", lanes=1, workers=1, run="fatal")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1 and "workers died over one chunk" in err and "run again to resume" in err


LARGE = """
import resource, sys
import jax, jax.numpy as jnp, jax.random as jr, numpy as np
import sweeps
from attnflow.points import grid
from attnflow.sweep import sweep
points = grid(beta=np.arange(int(sys.argv[1]), dtype=np.float32), key=jr.split(jr.key(0), 100))
out = sweep(sweeps.wide, points, shared=(np.zeros(4096, np.float32),), memory=2**26, store=sys.argv[2])
print(out["mean"].size, float(np.abs(out["mean"]).max()) < 1, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_a_grid_of_a_hundred_thousand_points_runs_in_bounded_memory(tmp_path):
    """Each lane needs 16 KiB: 1.6 GiB if all ran at once. The peak stays near that of a hundredth of the points."""
    env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(TESTS)}
    peaks = []
    for betas in (10, 1000):
        command = [sys.executable, "-c", LARGE, str(betas), str(tmp_path / str(betas))]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        size, right, peak = done.stdout.split()
        assert int(size) == 100 * betas and right == "True"
        peaks.append(int(peak) / 1024)
    assert peaks[1] - peaks[0] < 256  # MiB
