"""The fault catalogue: inputs that go wrong elsewhere, and what each gives here.

`python tests/catalogue.py` writes its tables into docs/reliability.md.
"""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import diffrax as dfx
import jax
import jax.numpy as jnp
import numpy as np

import attnflow as af
from attnflow import claims, observe, sphere, transport
from attnflow.attention import Exponential, Hardmax, Linear, ReLU, Softmax
from attnflow.field import AttentionField, ZeroTemperatureField
from attnflow.heads import AlignedHeads, FactoredHeads, Heads, ScalarHeads
from attnflow.points import grid
from attnflow.reduce import Blocked, Dense, RandomBatch
from attnflow.solve import at_rest, solve
from attnflow.sweep import sweep
from attnflow.theory import low_temperature
from attnflow.trajectory import Status


class Fault(NamedTuple):
    """An input, what it gives, and the check of that."""

    input: str
    gives: str
    check: Callable[[], None]


class Injected(NamedTuple):
    """A fault from outside, how often the suite injects it, what happens, and the test that shows it."""

    fault: str
    times: int
    gives: str
    test: str


CATALOGUE: list[Fault] = []
PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
TS = np.linspace(0.0, 2.0, 5)
ROTATION = np.array([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


def fault(text: str, gives: str):
    def keep(check):
        CATALOGUE.append(Fault(text, gives, check))
        return check

    return keep


def refused(text: str, gives: str, error: type[Exception], pattern: str):
    """The decorated function must raise an error whose message names what is wrong and what to do."""

    def keep(call):
        def check():
            try:
                call()
            except error as found:
                assert re.search(pattern, str(found)), f"{pattern!r} does not match {found}"
            else:
                raise AssertionError("nothing was raised")

        CATALOGUE.append(Fault(text, gives, check))
        return call

    return keep


def tokens(n=6, d=3, seed=0, dtype=np.float64):
    x = np.random.default_rng(seed).normal(size=(n, d))
    return jnp.asarray((x / np.linalg.norm(x, axis=1, keepdims=True)).astype(dtype))


def field(beta=1.0, **options):
    return AttentionField(ScalarHeads([1.0]), Softmax(beta), **options)


def broken(index, value):
    return tokens().at[index].set(value)


# ---- tokens


@refused("NaN or infinite token", "ValueError with the row", ValueError, r"`x0` must be finite; row 3")
def nan_token():
    solve(field(), broken((3, 1), jnp.nan), TS)


@refused("zero token", "ValueError with the row", ValueError, r"no direction in row 2")
def zero_token():
    solve(field(), broken(2, 0.0), TS)


@refused("token off the sphere", "ValueError with norm and remedy", ValueError, r"row 1 has norm 3.*normalize=True")
def long_token():
    solve(field(), tokens().at[1].multiply(3.0), TS)


@refused("no tokens", "ValueError", ValueError, r"`x0` must have shape \(n, d\) with n, d >= 1")
def no_tokens():
    solve(field(), jnp.zeros((0, 3)), TS)


@refused("tokens of integers", "ValueError with the remedy", ValueError, r"`x0` must be floating.*astype")
def integer_tokens():
    solve(field(), np.eye(3, dtype=int), TS)


@refused("float16 tokens", "ValueError", ValueError, r"`x0` must be float32 or float64, got float16")
def half_tokens():
    solve(field(), tokens().astype(jnp.float16), TS)


@refused("one vector in place of tokens", "ValueError with the shape", ValueError, r"must have shape \(n, d\).*\(3,\)")
def flat_tokens():
    solve(field(), jnp.ones(3), TS)


@refused(
    "float64 tokens while JAX computes in float32", "ValueError with the line to add", ValueError, r"jax_enable_x64"
)
def narrow_precision():
    with jax.enable_x64(False):
        solve(field(), np.eye(3), TS.astype(np.float32))


@fault("float32 tokens while JAX computes in float64", "float32 throughout, times and velocities included")
def float32_stays():
    run = solve(field(), tokens(dtype=np.float32), TS, observe={"r": observe.order_parameter})
    assert {str(a.dtype) for a in (run.final, run.ts, run.values["r"])} == {"float32"}


@fault("a single token; dimension one", "they stay where they are")
def degenerate_sizes():
    assert np.array_equal(solve(field(), tokens(1), TS).final, tokens(1))
    pair = jnp.asarray([[1.0], [-1.0], [1.0]])
    assert np.array_equal(solve(field(), pair, TS).final, pair)


@fault("equal tokens", "they stay equal to the bit; speeds and cosines have finite gradients there")
def duplicates():
    x = tokens().at[4].set(tokens()[1])
    assert np.array_equal(*solve(field(4.0), x, TS).final[np.array([1, 4])])
    same = jnp.tile(tokens(1), (5, 1))
    slope = jax.grad(lambda beta: observe.speed(field(beta), same))(1.0)
    assert np.isfinite(slope)


@fault("coincident and antipodal tokens in distances", "0 and pi exactly; squared angles have finite gradients")
def angles():
    for dtype in (np.float32, np.float64):
        e = jnp.asarray([1.0, 0.0, 0.0], dtype)
        near = jnp.asarray([1.0, 1e-5, 0.0], dtype)
        assert sphere.geodesic(e, e) == 0 and sphere.geodesic(e, -e) == dtype(np.pi)
        assert abs(sphere.geodesic(e, near / jnp.linalg.norm(near)) / 1e-5 - 1) < 0.01
        for other in (e, -e):
            assert np.isfinite(jax.grad(lambda y: sphere.geodesic(y, other) ** 2)(e)).all()  # noqa: B023


@fault("V = -I and a rotation V, where the sphere repels in the ambient space", "norms stay 1 in every saved frame")
def unstable_sphere():
    for value in (-np.eye(3), np.eye(3), ROTATION):
        f = AttentionField(Heads([np.eye(3)], [value]), Softmax(9.0))
        run = solve(f, tokens(32), np.linspace(0.0, 60.0, 4), save_tokens=True, rtol=1e-6)
        assert np.abs(np.linalg.norm(run.values["tokens"], axis=-1) - 1).max() < 1e-10
        assert run.stats["norm_defect"] < 50e-6 and run.stats["steps"] < 400


@fault(
    "an exactly antipodal pair",
    "it stays: the equilibrium is unstable, and the merge tree calls it stable only with a gap",
)
def antipodal_pair():
    pair = jnp.asarray([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]])
    assert np.array_equal(solve(field(4.0), pair, TS).final, pair)


# ---- beta


@refused("negative beta", "ValueError with the remedy", ValueError, r"`beta` must be >= 0.*sign into the heads")
def negative_beta():
    Softmax(-1.0)


@refused("beta = infinity", "ValueError naming `Hardmax`", ValueError, r"Hardmax")
def infinite_beta():
    Softmax(np.inf)


@refused("beta = NaN", "ValueError", ValueError, r"`beta` must be >= 0, got nan")
def nan_beta():
    Exponential(np.nan)


@fault("beta = 0", "the projected mean of the tokens, in closed form")
def zero_beta():
    x = tokens()
    y = np.asarray(x)
    mean = y.mean(axis=0)
    assert np.allclose(field(0.0)(0.0, x), mean - (y @ mean)[:, None] * y, atol=1e-15)


@refused("energy at beta = 0", "ValueError: exp(beta s) / beta diverges", ValueError, r"`beta` = 0 has no energy")
def zero_beta_energy():
    observe.log_energy(field(0.0), tokens())


@fault("beta = 10^4, softmax, float32 and float64", "finite, and equal to hardmax where scores differ")
def large_beta():
    for dtype in (np.float32, np.float64):
        x = tokens(dtype=dtype)
        v, hard = field(1e4)(0.0, x), AttentionField(ScalarHeads([1.0]), Hardmax())(0.0, x)
        assert np.allclose(v, hard, atol=1e-6) and np.isfinite(v).all()


@fault(
    "exponential attention at beta = 10^4",
    'status OVERFLOW in physical time; finite with clock="scaled", with the log of the time',
)
def overflow():
    f = AttentionField(ScalarHeads([1.0]), Exponential(1e4))
    lost = solve(f, tokens(), TS, throw=False)
    assert lost.stats["status"] == Status.OVERFLOW and not lost.ok
    run = solve(f, tokens(), TS, clock="scaled")
    assert np.isfinite(run.final).all() and run.stats["log_time"][-1] < -9000


@fault("entropy at beta = 200, float32", "finite with a finite gradient")
def sharp_entropy():
    x = jnp.asarray([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], jnp.float32)

    def total(beta):
        return jnp.sum(observe.entropy(field(beta), x))

    value, slope = jax.value_and_grad(total)(np.float32(200.0))
    assert np.isfinite(value) and np.isfinite(slope) and value >= 0


@refused("gradient of hardmax", "ValueError naming the alternative", ValueError, r"no gradient.*`Softmax`")
def hard_gradient():
    f = AttentionField(ScalarHeads([1.0]), Hardmax())
    jax.grad(lambda x: jnp.sum(f(0.0, x) ** 2))(tokens())


# ---- heads and weights


@refused(
    "a (d, d) matrix where heads (H, d, d) are due",
    "ValueError with both shapes",
    ValueError,
    r"\(H, d, d\), got \(3, 3\)",
)
def one_matrix():
    Heads(np.eye(3), np.eye(3))


@refused(
    "heads of another dimension",
    "ValueError with both dimensions",
    ValueError,
    r"dimension 3 do not fit heads of dimension 4",
)
def wrong_dimension():
    solve(AttentionField(AlignedHeads(np.eye(4)[None]), Softmax(1.0)), tokens(), TS)


@fault("no heads at all", "the zero field")
def no_heads():
    assert not np.any(AttentionField(ScalarHeads(jnp.zeros(0)), Softmax(1.0))(0.0, tokens()))


@refused("weights that do not sum to 1", "ValueError with their sum", ValueError, r"`weights` must sum to 1, got 2")
def heavy_weights():
    field(weights=np.full(6, 1 / 3))


@refused("negative or NaN weights", "ValueError", ValueError, r"`weights` must be finite and >= 0")
def negative_weights():
    field(weights=np.array([1.5, -0.5]))


@refused(
    "weights of another length",
    "ValueError with both lengths",
    ValueError,
    r"`weights` must have shape \(n,\) = \(6,\)",
)
def short_weights():
    field(weights=np.full(3, 1 / 3))(0.0, tokens())


@fault("tokens of weight zero", "they move, and move nobody")
def ghosts():
    w = np.array([0.25, 0.25, 0.25, 0.25, 0.0, 0.0])
    with_ghosts = field(3.0, weights=w)(0.0, tokens())
    assert np.allclose(with_ghosts[:4], field(3.0, weights=w[:4])(0.0, tokens()[:4]), atol=1e-14)
    assert np.all(np.linalg.norm(with_ghosts[4:], axis=1) > 0)


@refused(
    "projection of heads whose V B^T is not symmetric",
    "ValueError with the asymmetry and the remedy",
    ValueError,
    r"0\.5.*symmetrize",
)
def asymmetric():
    low_temperature.projection(Heads([np.eye(2)], [np.array([[1.0, 0.0], [0.5, 0.2]])]), tokens(4, 2))


@refused("energy of a causal field", "ValueError", ValueError, r"causal field has no energy")
def causal_energy():
    observe.energy(field(causal=True), tokens())


@refused(
    "observables of attention on a field without attention",
    "TypeError naming the field",
    TypeError,
    r"ZeroTemperatureField",
)
def no_attention():
    observe.entropy(ZeroTemperatureField(ScalarHeads([1.0])), tokens())


@refused(
    "a theorem on a field outside its hypotheses",
    "claims.HypothesisError or a claim that says so",
    Exception,
    r"(?i)aligned|symmetric|exponential",
)
def wrong_theorem():
    claim = claims.theorem_11(AttentionField(ScalarHeads([1.0]), Softmax(1.0)), tokens())
    raise ValueError(f"{claim.hypothesis}: exponential holds {claim.holds}")


# ---- times, tolerances, steps


@refused("NaN in `ts`", "ValueError", ValueError, r"`ts` must be finite")
def nan_times():
    solve(field(), tokens(), np.array([0.0, np.nan]))


@refused("infinite end time", "ValueError naming the event to use", ValueError, r"`ts` must be finite.*at_rest")
def infinite_time():
    solve(field(), tokens(), np.array([0.0, np.inf]))


@refused("unsorted `ts`", "ValueError", ValueError, r"`ts` must be sorted")
def unsorted_times():
    solve(field(), tokens(), np.array([0.0, 2.0, 1.0]))


@refused("empty `ts`", "ValueError", ValueError, r"`ts` must have shape \(T,\) with T >= 1")
def no_times():
    solve(field(), tokens(), np.zeros(0))


@fault("repeated times, one time, and backwards", "they are answered; forwards and back returns to the start")
def odd_times():
    x = tokens()
    run = solve(field(), x, np.array([0.0, 1.0, 1.0]), save_tokens=True, rtol=1e-10, atol=1e-12)
    assert np.array_equal(run.values["tokens"][1], run.values["tokens"][2])
    assert np.allclose(solve(field(), x, np.zeros(1)).final, x, atol=1e-15)
    back = solve(field(), run.final, np.array([1.0, 0.0]), rtol=1e-10, atol=1e-12)
    assert np.allclose(back.final, x, atol=1e-8)


@refused(
    "rtol below the dtype",
    "ValueError with the finest and the remedy",
    ValueError,
    r"`rtol` = 1e-12 is below.*float64 tokens",
)
def fine_tolerance():
    solve(field(), tokens(dtype=np.float32), TS.astype(np.float32), rtol=1e-12)


@refused("negative tolerance", "ValueError", ValueError, r"`rtol` must be >= 0")
def negative_tolerance():
    solve(field(), tokens(), TS, rtol=-1e-6)


@refused("both tolerances zero", "ValueError", ValueError, r"must not both be 0")
def zero_tolerance():
    solve(field(), tokens(), TS, rtol=0.0, atol=0.0)


@refused(
    "too few steps",
    "RuntimeError with the time reached and the remedy",
    RuntimeError,
    r"stopped at t = .* of 2 after 3 steps.*MAX_STEPS",
)
def few_steps():
    solve(field(9.0), tokens(), TS, max_steps=3)


@fault("too few steps, throw=False", "frames not reached are NaN, the gradient is NaN, the status says so")
def few_steps_quietly():
    run = solve(field(9.0), tokens(), TS, observe={"r": observe.order_parameter}, max_steps=3, throw=False)
    assert run.stats["status"] == Status.MAX_STEPS and not run.ok and "MAX_STEPS" in str(run)
    assert np.isnan(run.values["r"][-1]) and np.isfinite(run.values["r"][0])

    def loss(beta):
        return solve(field(beta), tokens(), TS, max_steps=3, throw=False).final[0, 0]

    assert np.isnan(jax.grad(loss)(9.0))


@fault("one hard lane in a batch", "its frames are NaN and its status tells; the other lanes are untouched")
def hard_lane():
    x = tokens(16)
    ts, seen = np.array([0.0, 10.0]), {"r": observe.order_parameter}
    run = jax.jit(jax.vmap(lambda b: solve(field(b), x, ts, observe=seen, max_steps=32, throw=False)))
    out = run(jnp.asarray([1.0, 4.0, 16.0, 64.0]))
    good = np.asarray(out.stats["status"]) == Status.OK
    assert np.array_equal(good, [False, False, True, True])
    assert np.array_equal(np.isfinite(out.values["r"][:, -1]), good)
    assert np.allclose(out.final[2], solve(field(16.0), x, ts).final, atol=1e-13)


@fault("a field that turns NaN on the way", "the run stops at that step with status NONFINITE, adaptive or not")
def late_nan():
    class Late(AttentionField):
        def __call__(self, t, x, args=None):
            return super().__call__(t, x, args) * jnp.where(t > 0.5, jnp.nan, 1.0)

    for controller in (None, dfx.ConstantStepSize()):
        run = solve(
            Late(ScalarHeads([1.0]), Softmax(1.0)), tokens(), TS, controller=controller, max_steps=64, throw=False
        )
        assert run.stats["status"] == Status.NONFINITE and run.stats["steps"] < 64 and not run.ok


@fault("nothing moves any more", "an event ends the run; later frames are NaN and the status is EVENT")
def steady():
    run = solve(field(), tokens(), np.linspace(0.0, 1e4, 3), event=at_rest(1e-6))
    assert run.stats["status"] == Status.EVENT and run.stats["time_reached"] < 100


@refused(
    "a run that cannot fit into memory",
    "MemoryError with the estimate, before it starts",
    MemoryError,
    r"needs about .*GiB.*Blocked",
)
def too_large():
    x = jnp.ones((400_000, 1))
    solve(AttentionField(ScalarHeads([1.0]), Softmax(1.0), reduction=Dense()), x, TS)


@fault("twenty betas, five end times, three tolerances as Python floats", "one compilation")
def no_recompilation():
    traced = []

    class Counting(AttentionField):
        def __call__(self, t, x, args=None):
            traced.append(1)
            return super().__call__(t, x, args)

    def once(beta, t1=0.5, rtol=1e-6):
        solve(Counting(ScalarHeads([1.0]), Softmax(beta)), tokens(5), np.array([0.0, t1]), rtol=rtol)

    once(0.5)
    count = len(traced)
    for beta in np.linspace(0.1, 2.0, 20):
        once(float(beta))
    for t1 in (0.1, 0.2, 0.3, 0.4):
        once(0.5, t1)
    for rtol in (1e-4, 1e-5):
        once(0.5, rtol=rtol)
    assert len(traced) == count


# ---- reductions


@refused("random batches of a causal field", "ValueError", ValueError, r"no causal sums")
def causal_batches():
    field(causal=True, reduction=RandomBatch(jax.random.key(0), 4))(0.0, tokens())


@fault("scores of 10^4 in float32, dense and blocked", "the running maximum keeps both finite and equal")
def large_scores():
    x = tokens(50, dtype=np.float32)
    dense, blocked = (field(1e4, reduction=r)(0.0, x) for r in (Dense(), Blocked(16, 16)))
    assert np.isfinite(blocked).all() and np.allclose(dense, blocked, atol=2e-3)


@fault("derivative of the exponential, written by hand", "it is the exponential, in float32 and float64")
def exponential_derivative():
    from attnflow.exponential import exp

    for dtype in (np.float32, np.float64):
        t = jnp.asarray([-20.0, -1.0, 0.0, 3.0], dtype)
        slope = jax.vmap(jax.grad(exp))(t)
        assert np.allclose(slope, np.exp(np.asarray(t, np.float64)), rtol=8 * np.finfo(dtype).eps)


@fault("ReLU and linear attention far from the sphere of softmax", "no overflow, no NaN, gradients at the kink are 0")
def kink():
    x = jnp.asarray([[1.0, 0.0], [0.0, 1.0]])
    for attention in (ReLU(), Linear()):
        slope = jax.jacobian(lambda y: AttentionField(ScalarHeads([1.0]), attention)(0.0, y))(x)  # noqa: B023
        assert np.isfinite(slope).all()


# ---- distances


@fault(
    "Sinkhorn stopped long before it converged", "an interval that contains the distance, and says it did not converge"
)
def early_sinkhorn():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)), rng.normal(size=(60, 3)) + np.eye(3)[0]
    x, y = (p / np.linalg.norm(p, axis=1, keepdims=True) for p in (x, y))
    exact = transport.w2(x, y).value
    found = transport.w2(x, y, method="sinkhorn", iterations=10, refine=False, tolerance=1e-6)
    assert found.lower <= exact <= found.upper and not found.converged and found.width > 0


@fault(
    "clouds 1e-5 apart, float32", "the distance to 2 %, never negative or NaN; 0 with a zero gradient at coincidence"
)
def near_clouds():
    angle = np.linspace(0.0, 6.0, 40)
    turn = lambda a: np.stack([np.cos(a), np.sin(a), 0 * a], axis=1)  # noqa: E731
    for dtype in (np.float32, np.float64):
        x, y = turn(angle).astype(dtype), turn(angle + 1e-5).astype(dtype)
        for metric in ("chordal", "geodesic"):
            assert abs(transport.w2(x, y, metric=metric).value / 1e-5 - 1) < 0.02
    same = jnp.asarray(turn(angle))
    value, slope = jax.value_and_grad(lambda p: transport.sinkhorn_divergence(p, same, epsilon=0.1))(same)
    assert value == 0 and np.abs(slope).max() < 1e-12


@refused("NaN points in a distance", "ValueError naming the cloud", ValueError, r"`y`.*finite")
def nan_cloud():
    transport.w2(np.eye(3), np.eye(3) * np.nan)


@refused(
    "points of two dimensions in one distance",
    "ValueError with both shapes",
    ValueError,
    r"\(3, 3\).*\(2, 2\)|dimension",
)
def two_dimensions():
    transport.w2(np.eye(3), np.eye(2))


# ---- sweeps


@refused("an empty axis", "ValueError naming the axis", ValueError, r"beta")
def empty_axis():
    grid(beta=np.zeros(0))


@refused(
    "an array read from a closure",
    "an error: the compiled program would keep its old value",
    ValueError,
    r"(?i)shared|closure|outside",
)
def captured_array():
    x0 = jnp.asarray(tokens())

    def run(beta):
        return {"v": AttentionField(ScalarHeads([1.0]), Softmax(beta))(0.0, x0)}

    sweep(run, grid(beta=np.array([1.0, 2.0])))


@refused("NaN on an axis of a sweep", "ValueError naming the axis", ValueError, r"axis `beta` must be finite")
def nan_axis():
    grid(beta=np.array([1.0, np.nan]))


@fault("one point of a sweep that fails", "a warning that names the point; its frames are NaN, the others are right")
def failing_point():
    def run(beta, ts):
        x = jnp.eye(3)
        return solve(AttentionField(ScalarHeads([1.0]), Exponential(beta)), x, ts, max_steps=64, throw=False)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = sweep(run, grid(beta=np.array([1.0, 1e4, 2.0])), shared=(TS,))
    assert np.array_equal(out["status"] == Status.OK, [True, False, True])
    assert any("10000" in str(w.message) for w in caught)


# ---- the compiler


@fault("20000 sums of the kind that jax 0.10.2 gets wrong", "right to 1e-12; that release is excluded")
def compiler():
    m, x = np.random.default_rng(0).normal(size=(3, 3)), np.asarray(tokens(20_000))
    got = jax.jit(jax.vmap(lambda v: jnp.sum((m @ v) ** 2)))(x)
    assert np.abs(np.asarray(got) - np.sum((x @ m.T) ** 2, axis=1)).max() < 1e-12
    assert jax.__version__ != "0.10.2" and af.__name__ == "attnflow"


@fault("importing the package", "no global setting of JAX changes")
def import_changes_nothing():
    import subprocess
    import sys

    code = (
        "import jax; before = dict(jax.config.values); import attnflow, attnflow.cli, attnflow.sweep, attnflow.fit;"
        "assert before == {k: jax.config.values[k] for k in before}"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@refused(
    "factored heads whose parts do not fit", "ValueError with the shapes", ValueError, r"`(key|value|output)` must"
)
def factored_parts():
    FactoredHeads(np.zeros((2, 2, 3)), np.zeros((2, 3, 3)), np.zeros((2, 2, 3)), np.zeros((2, 3, 2)))


INJECTED = [
    Injected(
        "`kill -9` of a sweep, resumed each time",
        22,
        "the store of an undisturbed sweep, byte by byte; nothing finished is computed again",
        "test_sweep_processes.py::test_a_sweep_killed_at_random_moments_ends_as_the_undisturbed_one",
    ),
    Injected(
        "`kill -9` of a process that writes chunks",
        23,
        "no chunk lost, none half-written, no temporary file left",
        "test_store.py::test_a_writer_killed_at_random_moments_loses_nothing_that_was_finished",
    ),
    Injected(
        "`kill -9` of a worker of the engine, and of its driver",
        5,
        "restarted; the same store as one process makes",
        "test_sweep_processes.py::test_workers_make_the_store_of_one_process_and_outlive_their_kills",
    ),
    Injected(
        "a chunk that kills every worker",
        1,
        "the sweep ends with advice after three losses",
        "test_sweep_processes.py::test_a_chunk_that_kills_every_worker_ends_the_sweep_with_advice",
    ),
    Injected(
        "`kill -9` of a long flow",
        3,
        "the final tokens and step count of an undisturbed flow, to the bit",
        "test_longrun.py::test_a_process_killed_at_random_moments_ends_with_the_same_bits",
    ),
    Injected(
        "`kill -9` of a weight search",
        1,
        "the parameters of an undisturbed search, to the bit",
        "test_fit.py::test_a_killed_fit_resumes_to_the_same_bits",
    ),
    Injected(
        "`kill -9` of `attnflow run`",
        3,
        "files are whole or absent; no result of an older run beside newer flows; running again gives the same bytes",
        "test_injected.py::test_a_run_killed_at_any_moment_leaves_no_half_file_and_no_old_result",
    ),
    Injected(
        "ctrl-C in a sweep",
        1,
        "exit code 130, the command to resume with, a store to resume",
        "test_sweep_processes.py::test_control_c_leaves_a_store_to_resume",
    ),
    Injected(
        "every file of a store with a bit flipped, truncated, emptied, deleted",
        4,
        "noticed by its checksum, computed again, equal bits",
        "test_store.py::test_damage_to_any_file_is_noticed_and_repaired_by_running_again",
    ),
    Injected(
        "a damaged checkpoint",
        2,
        "passed over with a warning; the one before serves",
        "test_longrun.py::test_stopped_and_damaged_runs_go_on_to_the_same_bits",
    ),
    Injected(
        "a full disk, a file size limit",
        2,
        "OSError with the chunk and the remedy; what was stored stays valid",
        "test_store.py::test_a_full_disk_is_named_and_leaves_the_store_intact",
    ),
    Injected(
        "a folder that cannot be written",
        1,
        "one line with its name, exit code 1",
        "test_injected.py::test_a_folder_that_cannot_be_written_is_one_line_with_its_name",
    ),
    Injected(
        "a clock that goes backwards",
        1,
        "the same bits",
        "test_injected.py::test_a_clock_that_goes_backwards_changes_no_result",
    ),
    Injected(
        "a second sweep on a store in use",
        1,
        "refused with the pid and host of the first",
        "test_sweep_processes.py::test_a_second_sweep_on_a_store_in_use_is_refused",
    ),
    Injected(
        "a process of a distributed flow that dies",
        1,
        "all others end; nothing hangs",
        "test_mesh.py::test_when_one_process_dies_none_is_left",
    ),
    Injected(
        "pickles, header bombs and damaged files as weights",
        1,
        "refused; no code runs",
        "test_pretrained_files.py::test_a_pickle_payload_is_refused_and_does_not_run",
    ),
]


def written(page: str) -> str:
    """The page with its two tables as the catalogue has them."""
    inputs = "| input | gives |\n|---|---|\n" + "".join(f"| {f.input} | {f.gives} |\n" for f in CATALOGUE)
    times = sum(f.times for f in INJECTED)
    rows = "".join(f"| {f.fault} | {f.times} | {f.gives} |\n" for f in INJECTED)
    injected = "| fault | times | gives |\n|---|---|---|\n" + rows
    counts = (
        f"{len(CATALOGUE)} kinds of input and {times} faults of {len(INJECTED)} kinds in every full run of the tests. "
        "Silent wrong numbers: 0. Bytes lost: 0. A test fails otherwise.\n"
    )
    for name, text in (("inputs", inputs), ("injected", injected), ("counts", counts)):
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(start)
        _, _, after = rest.partition(end)
        page = f"{before}{start}{text}{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
