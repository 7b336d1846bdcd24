"""Sweeps: equal to a loop over the points, one compilation, loud failures, bits kept through interruption."""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import sweeps
from exact import close

from attnflow import sphere
from attnflow.dataset import load
from attnflow.heads import ScalarHeads
from attnflow.points import grid, zipped
from attnflow.solve import Status, solve
from attnflow.store import StoreMismatch, load_store
from attnflow.sweep import sweep

TS = np.linspace(0.0, 2.0, 5)


def small(dtype=np.float64):
    return grid(a=np.arange(3, dtype=dtype), b=np.arange(4, dtype=dtype))


def test_a_sweep_is_the_loop_over_its_points(dtype):
    points, c = small(dtype), np.asarray(0.5, dtype)
    out = sweep(sweeps.polynomial, points, shared=(c,))
    a, b = np.meshgrid(np.arange(3.0), np.arange(4.0), indexing="ij")
    assert out["value"].dims == ("a", "b") and out["value"].dtype == dtype
    assert np.array_equal(out["value"], a * a + b * 0.5)
    assert np.array_equal(out["vector"], np.stack([a, b, np.full_like(a, 0.5)], axis=-1))
    assert float(out["value"].sel(a=2, b=3)) == 5.5


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize(("chunk", "group"), [(None, None), (4, 1), (8, 2), (16, 4)])
def test_chunks_groups_devices_and_cost_change_no_result(devices, chunk, group):
    out = sweep(
        sweeps.polynomial, small(), shared=(0.5,), devices=jax.devices()[:devices], chunk=chunk, group=group,
        cost=lambda a, b: a - 2 * b,
    )  # fmt: skip
    a, b = np.meshgrid(np.arange(3.0), np.arange(4.0), indexing="ij")
    assert np.array_equal(out["value"], a * a + b * 0.5)


def test_a_flow_in_a_sweep_has_the_bits_of_the_flow_alone(key):
    keys = jr.split(key, 2)
    betas = [1.0, 3.0]
    out = sweep(sweeps.flow, grid(beta=betas, key=keys), shared=(TS,), devices=jax.devices()[:1], group=1)
    alone = jax.jit(sweeps.flow)
    for i, beta in enumerate(betas):
        for j in range(2):
            traj = alone(jnp.asarray(beta), keys[j], TS)
            assert np.array_equal(out["cosine"][i, j], traj.values["cosine"])
            assert np.array_equal(out["shadow"][i, j], traj.values["shadow"])
            assert int(out["steps"][i, j]) == int(traj.stats["steps"])


def test_groups_and_devices_agree_to_rounding_and_label_the_result(key):
    points = grid(beta=[1.0, 2.0, 3.0], key=jr.split(key, 3))
    one = sweep(sweeps.flow, points, shared=(TS,), devices=jax.devices()[:1], group=1)
    many = sweep(sweeps.flow, points, shared=(TS,), group=2, dims={"shadow": ("time", "head", "token")})
    assert close(many["cosine"], one["cosine"], eps=1e-4)
    assert many["shadow"].dims == ("beta", "key", "time", "head", "token")
    assert np.array_equal(many["time"], TS) and many["cosine"].attrs["units"] == "1"
    assert (many["status"] == Status.OK).all()


def test_a_sweep_over_modules_and_side_by_side_axes(key):
    x = sphere.uniform(key, n=5, d=3)
    strengths = jnp.asarray([[1.0, 2.0], [0.5, -1.0], [3.0, 0.1]])
    heads = eqx.filter_vmap(ScalarHeads)(strengths)
    out = sweep(sweeps.heads_energy, grid(heads=heads).labelled(heads=["a", "b", "c"]), shared=(x,))
    for name, row in zip("abc", strengths, strict=True):
        alone = sweeps.heads_energy(ScalarHeads(row), x)
        assert close(out["energies"].sel(heads=name).values, alone["energies"], eps=1e-7)
    paired = sweep(sweeps.polynomial, zipped("case", a=[1.0, 2.0], b=[5.0, 7.0]), shared=(3.0,))
    assert paired["value"].dims == ("case",) and paired["value"].values.tolist() == [16.0, 25.0]
    assert paired["a"].dims == ("case",)


def test_a_sweep_is_traced_once_whatever_its_numbers_and_chunks(key, tmp_path):
    sweeps.traces.names.clear()
    points = grid(beta=np.linspace(0.5, 5, 20), key=jr.split(key, 2))
    sweep(sweeps.flow, points, shared=(TS,), chunk=4, group=1, store=tmp_path)
    assert sweeps.traces.names == ["flow"]
    sweep(sweeps.flow, points, shared=(TS,), store=tmp_path)  # finished: nothing to trace
    assert sweeps.traces.names == ["flow"]


table = np.ones(3)
number = 2.0


def reads_global(a):
    return {"y": a * table[0]}


def reads_through_helper(a):
    return {"y": helper(a)}


def helper(a):
    return sum(a * t for t in table)


def reads_default(a, t=table):
    return {"y": a * t[0]}


def test_arrays_read_from_outside_are_refused():
    inner = jnp.ones(2)
    points = grid(a=[1.0, 2.0])
    for run, name in [
        (reads_global, "table"),
        (reads_through_helper, "table"),
        (reads_default, "t"),
        (lambda a: {"y": a * inner[0]}, "inner"),
        (functools.partial(lambda a, t: {"y": a * t[0]}, t=inner), "t"),
    ]:
        with pytest.raises(ValueError, match=rf"must not read the array `{name}` .* `shared=\({name},\)`"):
            sweep(run, points)
    out = sweep(lambda a, t: {"y": a * t[0] * number}, points, shared=(inner,))
    assert out["y"].values.tolist() == [2.0, 4.0]


def test_an_array_from_outside_would_have_given_a_stale_answer():
    """What the refusal is for: the compiled program keeps the old number."""
    outside = {"t": np.ones(1)}
    stale = jax.jit(lambda a: a * outside["t"][0])
    assert float(stale(2.0)) == 2.0
    outside["t"] = np.full(1, 5.0)
    assert float(stale(2.0)) == 2.0


def test_wrong_parameters_and_results_are_refused():
    points = small()
    with pytest.raises(ValueError, match=r"\['z'\] are missing"):
        sweep(sweeps.polynomial, grid(z=[1.0]))
    with pytest.raises(ValueError, match=r"`shared` must hold one value for each of \['c'\], got 0"):
        sweep(sweeps.polynomial, points)
    with pytest.raises(ValueError, match=r"`run` must return a Trajectory or a dict of arrays, got"):
        sweep(lambda a, b: a + b, points)
    with pytest.raises(ValueError, match="`run` must be a function of one point's parameters, got type"):
        sweep(dict, points)
    with pytest.raises(ValueError, match=r"`dims` of 'vector' must name 1 axes, got \['x', 'y'\]"):
        sweep(sweeps.polynomial, points, shared=(1.0,), dims={"vector": ("x", "y")})
    with pytest.raises(ValueError, match=r"`cost` must return one number per point, shape \(12,\)"):
        sweep(sweeps.polynomial, points, shared=(1.0,), cost=lambda a, b: a[:2])
    with pytest.raises(ValueError, match=r"`chunk` must be a multiple of 4 devices x `group` = 1, got 6"):
        sweep(sweeps.polynomial, points, shared=(1.0,), chunk=6)
    with pytest.raises(ValueError, match="`workers` and `scheduler` need `store`"):
        sweep(sweeps.polynomial, points, shared=(1.0,), workers=2)


def test_lanes_that_do_not_finish_are_named_and_their_frames_are_nan(tmp_path):
    """Four betas under a cap of steps that two of them exceed: the batch goes on."""
    x0 = np.asarray(sphere.uniform(jr.key(0), n=16, d=2))
    ts = np.linspace(0.0, 10.0, 21)
    betas = [1.0, 4.0, 16.0, 64.0]
    free = sweep(sweeps.capped, grid(beta=betas), shared=(x0, ts))
    run = functools.partial(sweeps.capped, max_steps=int(np.sort(free["steps"])[1]))
    with pytest.warns(UserWarning, match=r"of 4 lanes failed.*\n  beta = .*MAX_STEPS at t = "):
        out = sweep(run, grid(beta=betas), shared=(x0, ts), store=tmp_path)
    failed = (out["status"] == Status.MAX_STEPS).values
    assert failed.any() and not failed.all()
    for lane in range(4):
        reached = ts <= float(out["time_reached"][lane])
        assert np.isfinite(out["cosine"][lane].values).tolist() == reached.tolist()
        assert bool(failed[lane]) == (not reached.all())
    beta = betas[int(np.argmax(failed))]
    with pytest.raises(RuntimeError, match=rf"beta = {beta:g}: MAX_STEPS at t = .*raise `max_steps`"):
        sweep(run, grid(beta=betas), shared=(x0, ts), store=tmp_path, throw=True)


def test_a_nan_in_one_lane_stays_in_its_lane():
    out = sweep(
        lambda a, b: {"y": jnp.log(a - b)}, grid(a=[1.0, 3.0], b=[2.0, 0.0]), group=4, devices=jax.devices()[:1]
    )
    assert np.isnan(out["y"].values).tolist() == [[True, False], [False, False]]


def test_chunks_shrink_until_they_fit_the_memory(key, tmp_path):
    points, length = grid(key=jr.split(key, 64)), np.zeros(2**14)
    free = sweep(sweeps.walk, points, shared=(length,), group=16, chunk=64)
    tight = sweep(sweeps.walk, points, shared=(length,), group=16, chunk=64, memory=2**23, store=tmp_path)
    assert 4 <= load_store(tmp_path).spec["chunk"] <= 32
    assert close(tight["end"], free["end"], eps=1e-3)
    with pytest.raises(ValueError, match=r"one lane per device needs \d+ bytes, `memory` allows 1000"):
        sweep(sweeps.walk, points, shared=(length,), memory=1000)


def interrupted(run, points, store, after, **options):
    """Start a sweep whose storing fails after some chunks, as if the process had died there."""
    from attnflow import store as module

    class Stop(Exception):
        pass

    put, count = module.Store.put, []

    def counted(self, chunk, values):
        if len(count) == after:
            raise Stop
        count.append(chunk)
        put(self, chunk, values)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(module.Store, "put", counted)
        sweep(run, points, store=store, **options)
    return count


def test_an_unfinished_store_shows_what_is_done_and_continues_with_the_same_bits(tmp_path, key):
    points = grid(beta=[1.0, 2.0, 4.0], key=jr.split(key, 4))
    options = {"shared": (TS,), "chunk": 4, "group": 1, "cost": lambda beta, key: beta}
    whole = sweep(sweeps.flow, points, store=tmp_path / "whole", **options)
    assert interrupted(sweeps.flow, points, tmp_path / "part", 1, **options) == [0]
    part = load(tmp_path / "part")
    assert part["done"].values.tolist() == [[False] * 4, [False] * 4, [True] * 4]  # dearest first
    assert np.isnan(part["cosine"].values[:2]).all() and (part["status"].values[:2] == -1).all()
    assert np.array_equal(part["cosine"][2], whole["cosine"][2])
    resumed = sweep(sweeps.flow, points, store=tmp_path / "part", **options)
    assert resumed.identical(whole) and "done" not in resumed


def test_a_changed_sweep_is_refused_by_its_old_store(tmp_path, key):
    points, options = grid(beta=[1.0, 2.0], key=jr.split(key, 2)), {"store": tmp_path, "config": {"n": 6}}
    sweep(sweeps.flow, points, shared=(TS,), **options)
    for change, name in [
        ({"points": grid(beta=[1.0, 2.5], key=jr.split(key, 2))}, r"axes\.beta\.labels"),
        ({"points": grid(beta=[1.0, 2.0], key=jr.split(jr.key(1), 2))}, r"axes\.key\.sha256"),
        ({"shared": (2 * TS,)}, r"shared\.ts"),
        ({"config": {"n": 7}}, r"config\.n \(6 in the store, 7 now\)"),
        ({"chunk": 8, "group": 1}, r"chunk \(4 in the store, 8 now\)"),
        ({"devices": jax.devices()[:1]}, r"facts\.devices \(4 in the store, 1 now\)"),
        ({"run": sweeps.walk, "points": grid(key=jr.split(key, 2))}, r"run\.code"),
    ]:
        new = {"run": sweeps.flow, "points": points, "shared": (TS,), **options, **change}
        with pytest.raises(StoreMismatch, match=name):
            sweep(new.pop("run"), new.pop("points"), **new)


def test_a_changed_constant_or_helper_is_refused_by_an_old_store(tmp_path):
    def scaled(factor):
        return lambda a: {"y": a * factor}

    points = grid(a=[1.0, 2.0])
    sweep(scaled(2.0), points, store=tmp_path)
    assert sweep(scaled(2.0), points, store=tmp_path)["y"].values.tolist() == [2.0, 4.0]
    with pytest.raises(StoreMismatch, match=r"run\.code"):
        sweep(scaled(3.0), points, store=tmp_path)


def test_recheck_recomputes_finished_chunks_and_refuses_other_bits(tmp_path):
    points = small()
    sweep(sweeps.polynomial, points, shared=(0.5,), store=tmp_path, chunk=4, group=1)
    sweep(sweeps.polynomial, points, shared=(0.5,), store=tmp_path, recheck=3)
    at = load_store(tmp_path)
    values = at.get(1)
    (tmp_path / "manifest" / "000001.json").unlink()
    at.put(1, {**values, "value": values["value"] + 1})  # as other hardware would have it
    with pytest.raises(StoreMismatch, match=r"chunk 1 .*other bits"):
        sweep(sweeps.polynomial, points, shared=(0.5,), store=tmp_path, recheck=3)


def test_a_clock_per_lane_is_a_variable_and_not_a_coordinate(key):
    x0 = sphere.uniform(key, n=4, d=2)

    def run(horizon, x0, ts):
        from attnflow.attention import Softmax
        from attnflow.field import AttentionField

        return solve(AttentionField(ScalarHeads([1.0]), Softmax(1.0)), x0, horizon * ts, throw=False)

    out = sweep(run, grid(horizon=[1.0, 2.0]), shared=(x0, TS))
    assert "time" not in out.coords and np.array_equal(out["times"], np.stack([TS, 2 * TS]))


def test_progress_counts_lanes_and_says_what_was_resumed(tmp_path, capsys):
    points = small()
    sweep(sweeps.polynomial, points, shared=(0.5,), store=tmp_path, chunk=4, group=1, progress=True)
    assert "12/12" in capsys.readouterr().out
    (tmp_path / "manifest" / "000001.json").unlink()
    sweep(sweeps.polynomial, points, shared=(0.5,), store=tmp_path, progress=True)
    shown = capsys.readouterr().out
    assert "4/4" in shown and "resumed, 2 of 3 chunks were done" in " ".join(shown.split())


def test_a_sweep_warns_of_nothing_when_all_is_well(key):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sweep(sweeps.flow, grid(beta=[1.0], key=jr.split(key, 1)), shared=(TS,), devices=jax.devices()[:1])


def test_a_store_labels_its_axes_in_the_order_they_were_given(tmp_path):
    points = grid(c=[1.0, 2.0], b=[10.0, 20.0, 30.0], a=[100.0, 200.0, 300.0, 400.0])
    stored = sweep(sweeps.polynomial, points, store=tmp_path / "store")
    for place in ((0, 1, 3), (1, 2, 0)):
        at = dict(zip("cba", place, strict=True))
        point = stored.isel(at)
        assert float(point.value) == float(point.a) ** 2 + float(point.b) * float(point.c)
    assert stored.equals(sweep(sweeps.polynomial, points))
