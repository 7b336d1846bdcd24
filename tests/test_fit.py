"""Gradient search: optimum, guards, determinism, resume."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from attnflow import AttentionField, ScalarHeads, Softmax, solve, sphere
from attnflow.fit import fit
from attnflow.store import StoreBusy, lock
from attnflow.theory import multi_head

TARGET = jnp.array([0.2, -1.5, 3.0])


class Bowl(eqx.Module):
    target: jax.Array

    def __call__(self, p):
        return jnp.sum((p - self.target.astype(p.dtype)) ** 2)


def noisy(p, key):
    return jnp.sum((p - TARGET + jr.normal(key, (3,))) ** 2)


def test_a_quadratic_is_minimised_in_its_own_dtype(dtype):
    start = jnp.zeros(3, dtype)
    p, history = fit(Bowl(TARGET), start, steps=400, optimiser=optax.adam(0.1))
    assert p.dtype == dtype
    assert jnp.max(jnp.abs(p - TARGET.astype(dtype))) < 1e-3
    assert history.losses[0] == pytest.approx(float(jnp.sum(TARGET**2)), rel=1e-6)
    assert history.gradient_norms[0] == pytest.approx(2 * float(jnp.linalg.norm(TARGET)), rel=1e-6)
    assert history.best_step == np.argmin(history.losses) and len(history) == 400
    assert "400 steps" in repr(history)


def test_one_step_is_the_optimisers_own_step():
    p, _ = fit(Bowl(TARGET), jnp.ones(3), steps=2, optimiser=optax.sgd(0.1))
    assert np.allclose(p, 1 - 0.1 * 2 * (1 - TARGET), rtol=1e-15)


def test_clipping_bounds_the_whole_gradient():
    p, history = fit(Bowl(TARGET), jnp.zeros(3), steps=2, optimiser=optax.sgd(1.0), clip=0.01)
    assert float(jnp.linalg.norm(p)) == pytest.approx(0.01, rel=1e-12)
    assert history.gradient_norms[0] > 1  # reported before clipping


def test_what_is_held_does_not_move():
    def loss(p):
        return jnp.sum(p["a"] ** 2) + jnp.sum((p["b"] - 1) ** 2) + jnp.sum(p["a"]) * jnp.sum(p["b"])

    start = {"a": jnp.ones(2), "b": jnp.ones(2), "name": "kept", "count": jnp.arange(2)}
    p, _ = fit(loss, start, steps=5, held=lambda p: p["b"])
    assert np.array_equal(p["b"], start["b"]) and not np.array_equal(p["a"], start["a"])
    assert p["name"] == "kept" and np.array_equal(p["count"], start["count"])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_loss_is_undone_counted_and_walked_around(value):
    # The minimum at 0.2 lies behind a wall at 0.5 where the loss is not finite.
    def walled(p):
        return jnp.where(p < 0.5, value, (p - 0.2) ** 2)

    p, history = fit(walled, jnp.ones(()), steps=100, optimiser=optax.adam(0.1), max_skipped=50)
    assert history.skipped == np.isnan(history.losses).sum() > 0
    assert f"{history.skipped} non-finite" in repr(history)
    assert 0.5 <= float(p) < 0.51
    assert float(walled(p)) == np.nanmin(history.losses)


def test_a_non_finite_gradient_of_a_finite_loss_is_caught():
    def kinked(p):  # sqrt has an infinite slope at 0, and 0 * inf is NaN
        return jnp.where(p > 0.5, p, p + 0 * jnp.sqrt(jnp.maximum(p - 0.6, 0)))

    p, history = fit(kinked, jnp.ones(()), steps=40, optimiser=optax.sgd(0.1))
    assert history.skipped > 0 and np.isfinite(p) and p >= 0.5


def test_the_optimisers_state_survives_a_bad_batch():
    # Adam's moments would stay NaN for ever after one NaN gradient.
    def sometimes(p, key):
        return jnp.where(jr.uniform(key) < 0.2, jnp.nan, jnp.sum((p - TARGET) ** 2))

    p, history = fit(sometimes, jnp.zeros(3), steps=300, optimiser=optax.adam(0.1), key=jr.key(1), max_skipped=200)
    assert 30 < history.skipped < 100
    assert jnp.max(jnp.abs(p - TARGET)) < 0.05


def test_a_fit_with_too_many_bad_steps_stops_and_says_so():
    def late(p, key):
        return jnp.where(p < 0.8, jnp.nan, p)

    p, history = fit(late, jnp.ones(()), steps=500, optimiser=optax.sgd(0.05), key=jr.key(0), max_skipped=7, chunk=11)
    assert history.skipped == 8 and len(history) < 500 and "non-finite" in history.stopped
    assert p >= 0.8


def test_a_loss_that_is_never_finite_is_an_error():
    with pytest.raises(RuntimeError, match="non-finite in all"):
        fit(lambda p: jnp.sum(p) * jnp.nan, jnp.ones(2), steps=50, max_skipped=3)


@pytest.mark.slow
def test_an_unfinished_flow_is_a_skipped_step():
    x0 = sphere.uniform(jr.key(0), 8, 3)
    ts = jnp.linspace(0.0, 4.0, 3)

    def loss(heads):  # the larger the strengths the smaller the loss, until the flow no longer fits its 12 steps
        traj = solve(AttentionField(heads, Softmax(2.0)), x0, ts, rtol=1e-4, max_steps=12, throw=False)
        return -jnp.sum(jnp.mean(traj.final, axis=0) ** 2) - jnp.sum(heads.strengths)

    heads, history = fit(loss, ScalarHeads([0.1, 0.2]), steps=40, optimiser=optax.adam(0.5), max_skipped=40)
    assert 0 < history.skipped < 40 and np.isfinite(history.losses[~np.isnan(history.losses)]).all()
    assert np.all(np.isfinite(heads.strengths)) and jnp.sum(heads.strengths) > 0.5
    assert float(loss(heads)) == pytest.approx(np.nanmin(history.losses), rel=1e-12)


def test_patience_stops_a_fit_that_no_longer_improves():
    _, history = fit(lambda p: jnp.sum(p * 0), jnp.ones(2), steps=500, patience=20, chunk=7)
    assert len(history) == 21 and "patience" in history.stopped


def test_evaluation_chooses_what_is_returned():
    # The loss falls for ever, the evaluation has its minimum at p = -1.
    def evaluate(p):
        return (p + 1) ** 2

    p, history = fit(
        lambda p: p, jnp.zeros(()), steps=200, optimiser=optax.sgd(0.1), evaluate=evaluate, chunk=5, patience=40
    )
    steps, values = history.evaluations
    assert history.best_step == steps[np.argmin(values)]
    assert float(p) == pytest.approx(-0.1 * history.best_step) and abs(float(p) + 1) < 0.51
    assert len(history) < 200 and "patience" in history.stopped


def test_the_key_decides_every_bit_and_every_step_has_its_own():
    def run(seed):
        return fit(noisy, jnp.zeros(3), steps=60, key=jr.key(seed), optimiser=_ADAM, chunk=25)

    (p, a), (q, b), (r, _) = run(0), run(0), run(1)
    assert np.array_equal(p, q) and np.array_equal(a.losses, b.losses)
    assert not np.array_equal(p, r)
    at_start = [float(noisy(jnp.zeros(3), jr.fold_in(jr.key(0), k))) for k in range(2)]
    assert a.losses[0] == pytest.approx(at_start[0], rel=1e-12) and at_start[0] != at_start[1]


def test_the_chunk_does_not_change_the_result():
    runs = [fit(noisy, jnp.zeros(3), steps=40, key=jr.key(0), optimiser=_ADAM, chunk=chunk) for chunk in (1, 7, 40)]
    assert all(np.array_equal(runs[0][0], p) and np.array_equal(runs[0][1].losses, h.losses) for p, h in runs[1:])


def test_a_batch_is_drawn_with_the_key_of_the_step():
    def loss(p, x):
        return jnp.mean((p - x) ** 2)

    def batch(key):
        return 3 + jr.normal(key, (64,))

    p, _ = fit(loss, jnp.zeros(()), steps=200, optimiser=optax.adam(0.05), key=jr.key(0), batch=batch)
    assert abs(float(p) - 3) < 0.1
    with pytest.raises(ValueError, match="`batch` draws with a key"):
        fit(loss, jnp.zeros(()), steps=1, batch=batch)


def test_a_fit_is_compiled_once():
    traced = []

    def loss(p):
        traced.append(None)
        return jnp.sum(p**2)

    fit(loss, jnp.ones(2), steps=30, optimiser=_ADAM, chunk=10)
    once = len(traced)
    fit(loss, 2 * jnp.ones(2), steps=55, optimiser=_ADAM, chunk=10)
    assert len(traced) == once


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": 0}, "`steps` and `chunk`"),
        ({"clip": 0.0}, "`clip`"),
        ({"patience": 0}, "`patience`"),
        ({"max_skipped": -1}, "`max_skipped`"),
        ({"held": lambda p: p}, "no floating array"),
    ],
)
def test_bad_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        fit(Bowl(TARGET), jnp.ones(3), **({"steps": 3} | change))


def test_a_loss_that_is_not_a_scalar_is_an_error():
    with pytest.raises(ValueError, match="`loss` must return a real scalar"):
        fit(lambda p: p, jnp.ones(3), steps=3)


class Split(eqx.Module):
    """Clustering rate of heads that share a fixed total strength (n = 8, beta = 1)."""

    total: float

    def strengths(self, raw):
        return self.total * jax.nn.softmax(raw)

    def __call__(self, raw):
        return -jnp.sum(multi_head.clustering_rate(self.strengths(raw), jnp.asarray(1.0), jnp.asarray(8.0)))


@pytest.mark.parametrize(
    "heads, weakest, best",
    [(2, 2.006794164249958834, 0.28334698054551414), (3, 2.232189157884237059, 0.58958620822904676)],
)
def test_the_fastest_split_of_a_total_strength_is_found(heads, weakest, best):
    split = Split(10.0)
    raw, history = fit(split, jnp.arange(heads) / 3, steps=100, optimiser=optax.lbfgs(), patience=20)
    strengths = np.sort(split.strengths(raw))
    assert abs(-split(raw) - best) < 1e-14 and history.skipped == 0
    assert np.allclose(strengths, [*[weakest] * (heads - 1), 10 - (heads - 1) * weakest], atol=1e-7)


def awkward(p, key):
    """A random loss with some non-finite steps."""
    return jnp.where(jr.uniform(key) < 0.05, jnp.nan, noisy(p, key))


AWKWARD = {"key": jr.key(4), "chunk": 5, "clip": 2.0, "max_skipped": 1000, "evaluate": Bowl(TARGET)}


def run_awkward(steps, folder=None):
    return fit(awkward, jnp.zeros(3), steps=steps, optimiser=_ADAM, checkpoint=folder, **AWKWARD)


def same(a, b):
    """Equal parameters and histories, bit for bit."""
    (p, h), (q, g) = a, b
    arrays = [(p, q), (h.losses, g.losses), (h.gradient_norms, g.gradient_norms), (h.evaluations[1], g.evaluations[1])]
    return all(np.array_equal(x, y, equal_nan=True) for x, y in arrays) and (h.skipped, h.best_step) == (
        g.skipped,
        g.best_step,
    )


def test_a_fit_resumed_anywhere_gives_the_same_bits(tmp_path):
    whole = run_awkward(60)
    for stop in (5, 30):
        run_awkward(stop, tmp_path / str(stop))
        assert same(run_awkward(60, tmp_path / str(stop)), whole)


def test_a_finished_fit_is_read_back_without_a_step(tmp_path):
    whole = run_awkward(20, tmp_path)
    before = sorted(p.name for p in tmp_path.glob("step-*"))
    assert same(run_awkward(20, tmp_path), whole) and sorted(p.name for p in tmp_path.glob("step-*")) == before


def test_three_checkpoints_are_kept_and_damaged_ones_passed_over(tmp_path):
    whole = run_awkward(60)
    run_awkward(40, tmp_path)
    notes = sorted(tmp_path.glob("step-*.json"))
    assert [p.stem for p in notes] == ["step-00000030", "step-00000035", "step-00000040"]
    notes[-1].write_bytes(notes[-1].read_bytes()[:-10])  # torn
    arrays = notes[-2].with_suffix(".safetensors")
    arrays.write_bytes(arrays.read_bytes()[:-1] + b"?")  # a flipped bit
    with pytest.warns(UserWarning, match="damaged"):
        assert same(run_awkward(60, tmp_path), whole)


def test_a_checkpoint_of_another_fit_is_refused(tmp_path):
    run_awkward(5, tmp_path)
    with pytest.raises(ValueError, match="holds another fit: it differs in parameters"):
        fit(awkward, jnp.ones(3), steps=10, optimiser=_ADAM, checkpoint=tmp_path, **AWKWARD)
    with pytest.raises(ValueError, match="differs in key"):
        fit(awkward, jnp.zeros(3), steps=10, optimiser=_ADAM, checkpoint=tmp_path, **(AWKWARD | {"key": jr.key(5)}))
    with pytest.raises(ValueError, match="differs in limits"):
        fit(awkward, jnp.zeros(3), steps=10, optimiser=_ADAM, checkpoint=tmp_path, **(AWKWARD | {"clip": 1.0}))


def test_two_fits_cannot_share_a_folder(tmp_path):
    with lock(tmp_path), pytest.raises(StoreBusy):
        run_awkward(5, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("saves", [1, 4])
def test_a_killed_fit_resumes_to_the_same_bits(saves, tmp_path):
    script = f"""
        import sys
        import jax
        jax.config.update("jax_enable_x64", True)
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_fit import run_awkward
        run_awkward(10**7, {str(tmp_path)!r})
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=os.environ)
    try:
        while len(list(tmp_path.glob("step-*.json"))) < min(saves, 3) or newest(tmp_path) < 5 * saves:
            assert child.poll() is None
            time.sleep(0.01)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    steps = newest(tmp_path) + 37
    assert same(run_awkward(steps, tmp_path), run_awkward(steps))


def newest(folder):
    return max((int(p.stem.removeprefix("step-")) for p in folder.glob("step-*.json")), default=0)


_ADAM = optax.adam(0.05)
