"""The solver against closed forms, its order, its failures and its promise of one compilation."""

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import REFERENCE, close, relative_error

import attnflow as af
from attnflow import observe as ob
from attnflow import sphere
from attnflow.solve import Status


@pytest.fixture
def small(key):
    return sphere.uniform(key, 16, 3)


def cosine(field, x):
    return x[0] @ x[1]


@pytest.mark.parametrize("case", REFERENCE["equiangular_SA"][:2], ids=lambda c: f"n{c['n']}")
def test_simplex_particles_follow_the_softmax_equiangular_equation(case):
    field = af.AttentionField(af.ScalarHeads([float(v) for v in case["lambdas"]]), af.Softmax(float(case["beta"])))
    x0 = sphere.equiangular(case["n"], float(case["gamma0"]))
    ts = jnp.array([0.0, float(case["t"])])
    traj = af.solve(field, x0, ts, observe={"cosine": cosine, "entropy": ob.entropy}, rtol=1e-12, atol=1e-14)
    assert abs(float(traj.values["cosine"][-1]) - float(case["gamma"])) < 1e-9
    assert relative_error(traj.values["entropy"][0], [float(v) for v in case["entropy0"]]) < 1e-12
    assert relative_error(traj.values["entropy"][-1], [float(v) for v in case["entropy_head"]]) < 1e-9


@pytest.mark.parametrize("case", REFERENCE["equiangular_USA"], ids=lambda c: f"n{c['n']}")
def test_simplex_particles_follow_the_exponential_equiangular_equation(case):
    field = af.AttentionField(af.ScalarHeads([float(v) for v in case["lambdas"]]), af.Exponential(float(case["beta"])))
    x0 = sphere.equiangular(case["n"], float(case["gamma0"]))
    traj = af.solve(field, x0, jnp.array([0.0, float(case["t"])]), observe={"cosine": cosine}, rtol=1e-12, atol=1e-14)
    assert abs(float(traj.values["cosine"][-1]) - float(case["gamma"])) < 1e-9


@pytest.mark.parametrize("case", REFERENCE["relu_time"][:2], ids=lambda c: f"n{c['n']}")
def test_simplex_particles_reach_the_relu_time(case):
    field = af.AttentionField(af.ScalarHeads([float(case["lam"])]), af.ReLU())
    x0 = sphere.equiangular(case["n"], float(case["g0"]))
    traj = af.solve(field, x0, jnp.array([0.0, float(case["t"])]), observe={"cosine": cosine}, rtol=1e-12, atol=1e-14)
    assert abs(float(traj.values["cosine"][-1]) - float(case["g1"])) < 1e-9


def test_float32_reaches_the_reference_too():
    case = REFERENCE["equiangular_SA"][0]
    field = af.AttentionField(af.ScalarHeads([float(v) for v in case["lambdas"]]), af.Softmax(float(case["beta"])))
    x0 = sphere.equiangular(case["n"], float(case["gamma0"])).astype(jnp.float32)
    traj = af.solve(field, x0, jnp.array([0.0, float(case["t"])]), observe={"cosine": cosine})
    assert traj.final.dtype == traj.values["cosine"].dtype == traj.ts.dtype == jnp.float32
    assert relative_error(traj.values["cosine"][-1], float(case["gamma"])) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("solver", "order"), [(dfx.Euler(), 1), (dfx.Heun(), 2), (dfx.Bosh3(), 3), (dfx.Tsit5(), 5)])
def test_solver_has_its_order_on_the_sphere(solver, order, small):
    field = af.AttentionField(af.ScalarHeads([1.0, -0.7]), af.Softmax(2.0))
    ts = jnp.array([0.0, 1.0])
    exact = af.solve(field, small, ts, solver=dfx.Dopri8(), rtol=1e-13, atol=1e-14).final
    errors = []
    for steps in (8, 16):
        end = af.solve(field, small, ts, solver=solver, controller=dfx.ConstantStepSize(), max_steps=steps).final
        errors.append(float(jnp.max(jnp.abs(end - exact))))
    assert abs(np.log2(errors[0] / errors[1]) - order) < 0.6 + (order == 5)


@pytest.mark.parametrize("rtol", [1e-3, 1e-6])
def test_tokens_stay_on_the_sphere_where_the_radial_part_repels(rtol, key, dtype):
    heads = af.Heads(np.eye(3)[None], -np.eye(3)[None])
    x0 = sphere.uniform(key, 32, 3).astype(dtype)
    field = af.AttentionField(heads, af.Softmax(9.0))
    traj = af.solve(field, x0, jnp.linspace(0.0, 20.0, 5), save_tokens=True, rtol=rtol, atol=1e-3 * rtol)
    norms = jnp.linalg.norm(traj.values["tokens"], axis=-1)
    assert float(jnp.max(jnp.abs(norms - 1))) <= (1e-10 if dtype == np.float64 else 1e-6)
    assert float(traj.stats["norm_defect"]) <= 10 * rtol
    assert int(traj.stats["steps"]) < 400


def test_rotation_value_keeps_the_sphere_for_long(key):
    turn = np.array([[0.0, 1, 0], [-1, 0, 0], [0, 0, 0]])
    field = af.AttentionField(af.Heads(np.eye(3)[None], turn[None]), af.Softmax(9.0))
    traj = af.solve(field, sphere.uniform(key, 32, 3), jnp.linspace(0.0, 60.0, 4), rtol=1e-3, atol=1e-6)
    assert float(traj.stats["norm_defect"]) <= 5e-3  # without retraction the defects add up to 1.3e-2
    assert int(traj.stats["steps"]) < 400


def test_time_reversal_returns_to_the_start(small):
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(1.0))
    there = af.solve(field, small, jnp.array([0.0, 1.0]), rtol=1e-11, atol=1e-12).final
    back = af.solve(field, there, jnp.array([1.0, 0.0]), rtol=1e-11, atol=1e-12).final
    assert float(jnp.max(jnp.abs(back - small))) < 1e-8


def test_linear_flow_on_a_pair_has_its_closed_form():
    # beta = 0, V = I: both tokens move to the mean; half angle a: tan(a(t)) = tan(a(0)) e^{-t cos...}; by symmetry
    # a' = -sin(a) cos(a), so tan a = tan(a0) e^{-t}
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(0.0))
    a0 = 0.9
    x0 = sphere.circle(jnp.array([a0, -a0]))
    traj = af.solve(field, x0, jnp.array([0.0, 2.0]), rtol=1e-12, atol=1e-14)
    assert abs(float(jnp.tan(sphere.angles(traj.final)[0])) - np.tan(a0) * np.exp(-2.0)) < 1e-10


def test_flat_flow_is_the_linear_equation():
    # beta = 0, flat: x' = V mean(x), so the mean grows like e^{tV}
    value = np.array([[0.3, 0.2], [-0.1, 0.5]])
    field = af.AttentionField(af.Heads(np.eye(2)[None], value[None]), af.Softmax(0.0), flat=True)
    x0 = jnp.array([[3.0, 1.0], [0.0, -2.0], [1.0, 1.0]])
    traj = af.solve(field, x0, jnp.array([0.0, 1.5]), rtol=1e-11, atol=1e-12)
    mean = jax.scipy.linalg.expm(1.5 * value) @ jnp.mean(x0, axis=0)
    assert float(jnp.max(jnp.abs(traj.final - x0 - (mean - jnp.mean(x0, axis=0))[None]))) < 1e-9


def test_one_compilation_serves_all_numbers(small):
    traces = []

    def counted(field, x):
        traces.append(1)
        return ob.order_parameter(field, x)

    def run(beta, t1, rtol, x0=small):
        field = af.AttentionField(af.ScalarHeads([beta]), af.Softmax(beta), jnp.full(len(x0), 1 / len(x0)))
        af.solve(field, x0, jnp.array([0.0, t1]), observe={"r": counted}, rtol=rtol)
        return len(traces)

    once = run(1.0, 1.0, 1e-6)
    assert {run(float(b), float(b), 1e-6 * float(b)) for b in np.linspace(0.5, 9, 20)} == {once}
    assert run(1.0, 1.0, 1e-6, small[:15]) == 2 * once


def test_unfinished_run_says_why_and_what_to_change(small):
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(4.0))
    with pytest.raises(RuntimeError, match=r"MAX_STEPS, max_steps = 5.*raise `max_steps`"):
        af.solve(field, small, jnp.linspace(0, 10, 5), max_steps=5)


def test_unfinished_lane_is_nan_and_does_not_touch_the_others(small):
    def lane(beta):
        field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(beta))
        return af.solve(field, small, jnp.linspace(0, 10, 5), observe={"r": ob.order_parameter}, max_steps=20)

    betas = jnp.array([0.2, 16.0, 64.0])
    batch = eqx.filter_jit(eqx.filter_vmap(lane))(betas)
    status = np.asarray(batch.stats["status"])
    assert list(batch.ok) == list(status <= Status.EVENT)
    assert batch.ok.any() and not batch.ok.all()
    for b, ok, r, reached in zip(betas, batch.ok, batch.values["r"], batch.stats["time_reached"], strict=True):
        if ok:
            assert np.isfinite(r).all()
            assert close(r, lane(float(b)).values["r"], eps=1e-3)
        else:
            assert np.isfinite(r[0]) and np.isnan(r[-1]) and reached < 10
    assert "MAX_STEPS in lanes" in repr(batch)


def test_gradient_of_an_unfinished_run_is_nan_not_a_number(small):
    def loss(beta, max_steps):
        field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(beta))
        traj = af.solve(field, small, jnp.linspace(0, 3, 3), observe={"r": ob.order_parameter}, max_steps=max_steps)
        return traj.values["r"][-1]

    assert np.isnan(jax.grad(loss)(2.0, 5))
    central = (loss(2.0 + 1e-5, 64) - loss(2.0 - 1e-5, 64)) / 2e-5
    assert abs(float(jax.grad(loss)(2.0, 64)) - float(central)) < 1e-6


def test_a_field_that_turns_non_finite_stops_at_once(small):
    class Broken(af.AttentionField):
        def __call__(self, t, x, args=None):
            return jnp.where(t > 0.5, jnp.nan, 1.0) * super().__call__(t, x, args)

    field = Broken(af.ScalarHeads([1.0]), af.Softmax(4.0))
    traj = af.solve(field, small, jnp.linspace(0, 10, 5), observe={"r": ob.order_parameter}, throw=False)
    assert int(traj.stats["status"]) == Status.NONFINITE
    assert int(traj.stats["steps"]) < 50
    assert np.isnan(traj.values["r"][-1]) and np.isfinite(traj.values["r"][0])


def test_overflow_names_the_scaled_clock_and_the_scaled_clock_solves(small):
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Exponential(1e4))
    with pytest.raises(RuntimeError, match=r'OVERFLOW.*clock="scaled"'):
        af.solve(field, small, jnp.linspace(0, 1, 3))
    traj = af.solve(field, small, jnp.linspace(0, 1, 3), clock="scaled", observe={"e": ob.log_energy})
    assert np.isfinite(traj.values["e"]).all()
    # n = 16 distinct tokens: c = max log-mass = beta + log(1/16), and log t = log(s) - c
    assert close(traj.stats["log_time"][1:], np.log([0.5, 1.0]) - 1e4 + np.log(16), eps=1e-3)


def test_scaled_clock_agrees_with_the_physical_one(small):
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Exponential(2.0))
    scaled = af.solve(field, small, jnp.array([0.0, 0.5]), clock="scaled", rtol=1e-11, atol=1e-12)
    t = jnp.exp(scaled.stats["log_time"][-1])
    physical = af.solve(field, small, jnp.stack([jnp.zeros_like(t), t]), rtol=1e-11, atol=1e-12)
    assert float(jnp.max(jnp.abs(scaled.final - physical.final))) < 1e-9


def test_events_end_the_run(small):
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(1.0))
    traj = af.solve(
        field, small, jnp.linspace(0, 1e3, 3), event=af.at_consensus(1e-6), observe={"r": ob.order_parameter}
    )
    assert int(traj.stats["status"]) == Status.EVENT
    assert 1 - float(jnp.linalg.norm(jnp.mean(traj.final, axis=0))) < 1e-6
    assert np.isnan(traj.values["r"][-1])
    rest = af.solve(field, small, jnp.linspace(0, 1e3, 3), event=af.at_rest(1e-5))
    assert float(ob.speed(field, rest.final)) < 1e-5


def test_counts_and_flags_are_observed_as_numbers(small):
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(1.0))
    seen = {"count": lambda f, x: jnp.arange(3), "flag": lambda f, x: x[0, 0] > 2, "plain": lambda f, x: 7}
    traj = af.solve(field, small, jnp.linspace(0.0, 1.0, 4), observe=seen)
    assert all(a.dtype == small.dtype for a in traj.values.values())
    assert np.array_equal(traj.values["count"], np.tile([0.0, 1.0, 2.0], (4, 1)))
    assert not np.any(traj.values["flag"]) and np.all(traj.values["plain"] == 7)
    some = af.solve(field, small, jnp.linspace(0.0, 1e3, 3), observe=seen, event=af.at_consensus(1e-6))
    assert np.isnan(some.values["count"][-1]).all() and np.array_equal(some.values["count"][0], [0.0, 1.0, 2.0])


def test_layers_are_projected_euler_steps(small):
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(2.0))
    net = af.layers(field, small, 3, 0.1, observe={"r": ob.order_parameter}, save_tokens=True)
    x = small
    for k in range(3):
        assert close(net.values["tokens"][k], x, eps=1e-6)
        y = x + 0.1 * field(0.0, x)
        x = y / jnp.linalg.norm(y, axis=1, keepdims=True)
    assert close(net.final, x, eps=1e-6)
    assert net.values["r"].shape == (4,)


@pytest.mark.parametrize(
    ("x0", "message"),
    [
        (lambda x: x.at[3, 0].set(jnp.nan), "finite; row 3"),
        (lambda x: x.at[2].set(0.0), "no direction in row 2"),
        (lambda x: 1.1 * x, "norm 1.1.*normalize=True"),
        (lambda x: jnp.ones((3, 3), int), r"floating.*astype\(float\)"),
        (lambda x: x.astype(jnp.float16), "float32 or float64"),
        (lambda x: x[:0], "n, d >= 1"),
        (lambda x: x[0], "shape"),
        (lambda x: x[:, :2] / jnp.linalg.norm(x[:, :2], axis=1, keepdims=True), "do not fit heads"),
    ],
)
def test_bad_tokens_are_refused_by_name(x0, message, small):
    field = af.AttentionField(af.AlignedHeads(jnp.eye(3)[None]), af.Softmax(1.0))
    with pytest.raises(ValueError, match=message):
        af.solve(field, x0(small), jnp.linspace(0, 1, 3))


@pytest.mark.parametrize(
    ("ts", "message"),
    [([0.0, 2.0, 1.0], "sorted"), ([0.0, jnp.nan], "finite"), ([0.0, jnp.inf], "at_rest"), ([], "T >= 1")],
)
def test_bad_times_are_refused(ts, message, small):
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(1.0))
    with pytest.raises(ValueError, match=message):
        af.solve(field, small, jnp.array(ts))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rtol": -1.0}, "`rtol` must be >= 0"),
        ({"rtol": 0.0, "atol": 0.0}, "must not both be 0"),
        ({"rtol": 1e-17}, "below"),
        ({"clock": "fast"}, "`clock` must be"),
        ({"adjoint": dfx.BacksolveAdjoint()}, "`adjoint` must not be `BacksolveAdjoint`"),
    ],
)
def test_bad_options_are_refused(options, message, small):
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(1.0))
    with pytest.raises(ValueError, match=message):
        af.solve(field, small, jnp.linspace(0, 1, 3), **options)


def test_zero_and_single_times_and_repeats(small):
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(1.0))
    start = ob.order_parameter(field, small)
    one = af.solve(field, small, jnp.array([2.0]), observe={"r": ob.order_parameter})
    assert close(one.values["r"], start[None], eps=1e-6)
    repeated = af.solve(field, small, jnp.array([0.0, 0.0, 1.0, 1.0]), observe={"r": ob.order_parameter})
    assert repeated.values["r"][0] == repeated.values["r"][1] and repeated.values["r"][2] == repeated.values["r"][3]


def test_sparse_nodes_are_warned_about():
    x, w = sphere.circle_quadrature(np.ones_like, 40)
    field = af.AttentionField(af.ScalarHeads([1.0]), af.Softmax(400.0), w)
    with pytest.warns(UserWarning, match="leaves its metastable state early"):
        af.solve(field, x, jnp.array([0.0, 0.1]))


def test_duplicates_stay_together(small):
    x = jnp.concatenate([small, small[:2]])
    field = af.AttentionField(af.ScalarHeads([1.0, 0.5]), af.Softmax(4.0))
    end = af.solve(field, x, jnp.array([0.0, 5.0])).final
    assert np.array_equal(end[:2], end[-2:])
