"""Faults from outside: a run killed at any moment, a folder that cannot be written, a clock that goes backwards."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnflow import AttentionField, ScalarHeads, Softmax, observe, sphere
from attnflow.points import grid
from attnflow.solve import solve
from attnflow.sweep import sweep

ROOT = Path(__file__).parents[1]
SMALL = ["tokens.n=100", "tokens.refine=[]", "attention.beta=[1.0,2.0,3.0]", "solve.times=11", "solve.t1=2.0"]
COMMAND = [sys.executable, "-m", "attnflow", "run", str(ROOT / "configs" / "low_temperature.toml")]


def arguments(out):
    return [*COMMAND, *(part for each in SMALL for part in ("--set", each)), "--out", str(out)]


@pytest.mark.slow
def test_a_run_killed_at_any_moment_leaves_no_half_file_and_no_old_result(tmp_path):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(arguments(tmp_path / "whole"), check=True, **quiet)
    whole = {p.name: p for p in (tmp_path / "whole").iterdir()}
    folder, rng, kills = tmp_path / "killed", np.random.default_rng(0), 0
    for awaited in ("facts.json", "flow_0.npz", "flow_2.npz"):
        process = subprocess.Popen(arguments(folder), **quiet)
        while process.poll() is None and not (folder / awaited).exists():
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        for path in folder.glob("*.npz"):
            with np.load(path, allow_pickle=False) as arrays:
                assert np.array_equal(arrays["tokens"], np.load(whole[path.name])["tokens"])
        for path in folder.glob("*.json"):
            assert json.loads(path.read_text())
        if awaited != "flow_2.npz":
            assert not (folder / "results.json").exists()
    assert kills >= 2
    subprocess.run(arguments(folder), check=True, **quiet)
    assert {p.name for p in folder.iterdir()} == set(whole)
    assert (folder / "results.json").read_bytes() == whole["results.json"].read_bytes()


@pytest.fixture
def unwritable(tmp_path):
    """A folder that nobody can write to: a read-only file system where the kernel lets us mount one, else its permissions."""
    folder = tmp_path / "sealed"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True).returncode == 0
    folder.chmod(0o500) if not mounted else None
    yield folder
    subprocess.run(["umount", folder], check=True) if mounted else folder.chmod(0o700)


def test_a_folder_that_cannot_be_written_is_one_line_with_its_name(unwritable):
    if os.access(unwritable, os.W_OK):  # a superuser who may not mount: a file stands where the folder should be
        unwritable = unwritable / "file"
        unwritable.write_text("in the way")
    done = subprocess.run(arguments(unwritable / "run"), capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("attnflow: ") and "sealed" in done.stderr


def test_a_clock_that_goes_backwards_changes_no_result(tmp_path, monkeypatch):
    def run(beta, ts):
        field = AttentionField(ScalarHeads([1.0]), Softmax(beta))
        return solve(field, sphere.equiangular(4, 0.1), ts, observe={"c": observe.mean_cosine}, throw=False)

    points, one = grid(beta=np.array([1.0, 2.0, 3.0])), jax.local_devices()[:1]

    def swept(store):
        shared = (jnp.linspace(0.0, 1.0, 3),)
        return sweep(run, points, shared=shared, store=store, chunk=2, group=1, devices=one)

    before = swept(tmp_path / "forwards")
    instants = iter(np.arange(10.0**9, 0.0, -3600.0))
    for clock in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, clock, lambda: float(next(instants)))
    after = swept(tmp_path / "backwards")
    assert before.c.values.tobytes() == after.c.values.tobytes()
    again = swept(tmp_path / "backwards")  # resumes: finished
    assert again.c.values.tobytes() == after.c.values.tobytes()
