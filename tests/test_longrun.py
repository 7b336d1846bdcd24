"""Long runs: the same bits as one uninterrupted run, through stops, damage and kill -9."""

import os
import random
import signal
import subprocess
import sys
import time

import diffrax as dfx
import jax.numpy as jnp
import numpy as np
import pytest

from attnflow import AttentionField, ScalarHeads, Softmax, observe, solve
from attnflow.longrun import long_run
from attnflow.store import StoreBusy, lock

SETUP = """
import jax
jax.config.update("jax_enable_x64", True)
import numpy as np
from attnflow import AttentionField, Heads, Softmax
from attnflow.longrun import long_run
rng = np.random.default_rng(0)
x0 = rng.normal(size=(6, 3))
x0 = jax.numpy.asarray(x0 / np.linalg.norm(x0, axis=1, keepdims=True))
turn = np.array([[0.0, 1.0, 0.3], [-1.0, 0.0, 0.5], [-0.3, -0.5, 0.0]])
"""


def tokens(dtype=np.float64):
    x = np.random.default_rng(0).normal(size=(6, 3))
    return jnp.asarray((x / np.linalg.norm(x, axis=1, keepdims=True)).astype(dtype))


FIELD = AttentionField(ScalarHeads([1.0, 0.5]), Softmax(4.0))


@pytest.mark.parametrize(("solver", "every"), [(dfx.Tsit5(), 7), (dfx.Dopri8(), 3)], ids=["Tsit5", "Dopri8"])
def test_chunks_have_the_bits_of_one_uninterrupted_run(solver, every, tmp_path):
    x0, observed = tokens(), {"r": observe.order_parameter}
    run = long_run(FIELD, x0, 20.0, folder=tmp_path / "cut", every=every, solver=solver, observe=observed)
    whole = long_run(FIELD, x0, 20.0, folder=tmp_path / "whole", every=10**6, solver=solver, observe=observed)
    assert np.asarray(run.final).tobytes() == np.asarray(whole.final).tobytes()
    assert run.stats["steps"] == whole.stats["steps"] > 2 * every
    assert run.ok and run.ts[-1] == 20.0 and run.values["r"].shape == run.ts.shape
    assert len(run.ts) == -(-int(run.stats["steps"]) // every)
    solved = solve(FIELD, x0, np.array([0.0, 20.0]), solver=solver)
    assert np.abs(run.final - solved.final).max() < 1e-6


def test_chunks_of_any_number_are_compiled_once(tmp_path):
    traced = []

    class Counting(AttentionField):
        def __call__(self, t, x, args=None):
            traced.append(1)
            return super().__call__(t, x, args)

    field = Counting(FIELD.heads, FIELD.attention)
    long_run(field, tokens(), 20.0, folder=tmp_path / "two", every=7, at_most=2)
    count = len(traced)
    long_run(field, tokens(), 20.0, folder=tmp_path / "all", every=7)
    assert len(traced) == count


def test_stopped_and_damaged_runs_go_on_to_the_same_bits(tmp_path):
    x0 = tokens()
    whole = long_run(FIELD, x0, 20.0, folder=tmp_path / "whole", every=7)
    cut = tmp_path / "cut"
    part = long_run(FIELD, x0, 20.0, folder=cut, every=7, at_most=4)
    assert not part.ok and part.stats["steps"] == 28
    newest = sorted(cut.glob("step-*.safetensors"))[-1]
    damaged = bytearray(newest.read_bytes())
    damaged[-5] ^= 1
    newest.write_bytes(damaged)
    with pytest.warns(UserWarning, match="damaged"):
        rest = long_run(FIELD, x0, 20.0, folder=cut, every=7)
    assert np.asarray(rest.final).tobytes() == np.asarray(whole.final).tobytes()
    assert np.asarray(rest.ts).tobytes() == np.asarray(whole.ts).tobytes()
    assert rest.stats["steps"] == whole.stats["steps"]
    assert len(list(cut.glob("step-*.safetensors"))) == 3
    again = long_run(FIELD, x0, 20.0, folder=cut, every=7)  # finished: read back
    assert np.asarray(again.final).tobytes() == np.asarray(whole.final).tobytes()


def test_another_run_or_another_owner_is_refused(tmp_path):
    x0 = tokens(np.float32)
    run = long_run(FIELD, x0, 5.0, folder=tmp_path, every=7, at_most=1, rtol=1e-4)
    assert run.final.dtype == run.ts.dtype == np.float32
    with pytest.raises(ValueError, match="t1"):
        long_run(FIELD, x0, 6.0, folder=tmp_path, every=7, rtol=1e-4)
    with pytest.raises(ValueError, match="field"):
        long_run(AttentionField(FIELD.heads, Softmax(5.0)), x0, 5.0, folder=tmp_path, every=7, rtol=1e-4)
    with pytest.raises(ValueError, match="controller"):
        long_run(FIELD, x0, 5.0, folder=tmp_path, every=7, rtol=1e-5)
    with lock(tmp_path), pytest.raises(StoreBusy):
        long_run(FIELD, x0, 5.0, folder=tmp_path, every=7, rtol=1e-4)


def test_impossible_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="every"):
        long_run(FIELD, tokens(), 1.0, folder=tmp_path, every=0)
    with pytest.raises(ValueError, match="t1"):
        long_run(FIELD, tokens(), 0.0, folder=tmp_path)


@pytest.mark.slow
def test_a_process_killed_at_random_moments_ends_with_the_same_bits(tmp_path):
    """A rotating flow, which never comes to rest, killed by SIGKILL whenever a few more checkpoints have appeared."""
    program = SETUP + (
        "field = AttentionField(Heads([np.eye(3)], [np.eye(3) + turn]), Softmax(2.0))\n"
        "import sys, hashlib\n"
        "run = long_run(field, x0, 1000.0, folder=sys.argv[1], every=250)\n"
        "print(hashlib.sha256(np.asarray(run.final).tobytes()).hexdigest(), int(run.stats['steps']))\n"
    )
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", program]
    whole = subprocess.run(
        [*command, str(tmp_path / "whole")], env=environment, check=True, capture_output=True, text=True
    )
    cut, draw, kills = tmp_path / "cut", random.Random(0), 0
    for _ in range(3):
        process = subprocess.Popen([*command, str(cut)], env=environment, stdout=subprocess.PIPE, text=True)
        before = len(list(cut.glob("step-*.json"))) and max(p.name for p in cut.glob("step-*.json"))
        while process.poll() is None:
            newest = max((p.name for p in cut.glob("step-*.json")), default=0)
            if newest and newest != before:
                time.sleep(draw.uniform(0, 0.05))
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
        kills += process.wait() == -signal.SIGKILL
        process.stdout.close()
    rest = subprocess.run([*command, str(cut)], env=environment, check=True, capture_output=True, text=True)
    assert kills >= 1
    assert rest.stdout == whole.stdout and int(whole.stdout.split()[1]) > 2000
