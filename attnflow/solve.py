r"""Integrate a field: `solve` follows the flow, `layers` the residual network; both return a `Trajectory`."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from . import sphere
from .attention import concrete
from .field import AbstractField, AttentionField, overflow_is_possible
from .stepping import Retracting, all_finite, stages_stored, stop_at_non_finite
from .trajectory import REMEDY, Status, Trajectory
from .validate import checked_times, checked_tokens, checked_tolerances, refuse_what_cannot_fit, warn_unless_resolved

Observable = Callable[[Any, Array], Any]


def solve(
    field: AbstractField,
    x0: ArrayLike,
    ts: ArrayLike,
    *,
    observe: Mapping[str, Observable] | None = None,
    save_tokens: bool = False,
    event: Observable | None = None,
    solver: dfx.AbstractSolver | None = None,
    rtol: ArrayLike = 1e-6,
    atol: ArrayLike = 1e-9,
    controller: dfx.AbstractStepSizeController | None = None,
    adjoint: dfx.AbstractAdjoint | None = None,
    max_steps: int | None = 4096,
    clock: str = "physical",
    normalize: bool = False,
    throw: bool = True,
    progress: bool = False,
) -> Trajectory:
    r"""Integrate $\dot x = \mathrm{field}(x)$ from `x0` (n, d) at `ts[0]` and observe it at `ts` (T,).

    Adaptive (Tsit5 with a PI controller), in the dtype of `x0`. Tokens are retracted to the sphere after every step and
    observables see unit tokens. One compilation serves all numbers: betas, weights, times and tolerances of one shape.

    **Arguments:**

    - `observe`: functions `(field, x) -> array` by name, evaluated during the solve; `save_tokens` adds "tokens".
    - `event`: `(field, x) -> bool` that ends the run (`at_consensus`, `at_rest`); later frames are NaN.
    - `solver`, `controller`, `adjoint`: diffrax objects. The reverse-mode default recomputes from checkpoints.
    - `clock`: "scaled" integrates $e^{-c}\dot x$ with $c$ the field's log scale (`field.scaled`): `ts` are then scaled
      times and `stats["log_time"]` holds the log of the physical time of every frame. For `Exponential` at large beta.
    - `normalize`: put rows of `x0` on the sphere instead of refusing those that are off it.
    - `throw`: raise where the run did not finish. Inside jit, vmap or grad nothing can be raised for one lane: there, as
      with `throw=False`, frames not reached are NaN, gradients of an unfinished run are NaN, and `stats` tells.

    **Errors:** ValueError naming the argument, the rule and the remedy; MemoryError, with an estimate, where the run cannot
    fit; RuntimeError where the run did not finish.
    """
    if clock not in ("physical", "scaled"):
        raise ValueError(f'`clock` must be "physical" or "scaled", got {clock!r}.')
    if isinstance(adjoint, dfx.BacksolveAdjoint):
        raise ValueError(
            "`adjoint` must not be `BacksolveAdjoint`: the flow contracts, and solved backwards it gives wrong gradients; leave it out."
        )
    x0 = checked_tokens(x0, on_sphere=field.on_sphere, normalize=normalize)
    ts = checked_times(ts, x0.dtype)
    rtol, atol = checked_tolerances(rtol, atol, x0.dtype)
    warn_unless_resolved(field, x0)
    observe = watched(observe, save_tokens)
    refuse_what_cannot_fit(field, x0, len(ts), observe)
    plan = _Plan(
        tuple(observe.items()),
        event,
        dfx.Tsit5() if solver is None else solver,
        controller,
        dfx.RecursiveCheckpointAdjoint() if adjoint is None else adjoint,
        max_steps,
        clock == "scaled",
        progress,
    )
    if isinstance(field, AttentionField):
        field = field.settled(x0)
    start = time.perf_counter()
    traj = _integrate(plan, field, x0, ts, rtol, atol)
    if not concrete(traj.final):
        return traj
    jax.block_until_ready(traj.final)
    traj.stats["seconds"] = np.asarray(time.perf_counter() - start)
    if throw:
        _raise_unless_finished(traj, max_steps)
    return traj


class _Plan(eqx.Module):
    """What is fixed at compile time, and the numbers inside diffrax's own objects."""

    observe: tuple[tuple[str, Observable], ...]
    event: Observable | None
    solver: dfx.AbstractSolver
    controller: dfx.AbstractStepSizeController | None
    adjoint: dfx.AbstractAdjoint
    max_steps: int | None = eqx.field(static=True)
    scaled: bool = eqx.field(static=True)
    progress: bool = eqx.field(static=True)


@eqx.filter_jit
def _integrate(plan: _Plan, field, x0, ts, rtol, atol) -> Trajectory:
    on_sphere = field.on_sphere
    dtype = x0.dtype

    def tokens(y):
        return sphere.retract(y[0]) if on_sphere else y[0]

    if plan.scaled:
        start_scale = jax.lax.stop_gradient(field.scaled(x0)[1])

        def velocity(t, y, args):
            v, c = field.scaled(y[0])
            return v, jnp.exp(start_scale - c)
    else:

        def velocity(t, y, args):
            return field(t, y[0], args), jnp.zeros((), dtype)

    def observed(t, y, args):
        x = tokens(y)
        return {name: jax.tree.map(real, f(field, x)) for name, f in plan.observe}, y[1]

    def real(a):  # frames that are not reached are NaN, which counts and flags could not be
        a = jnp.asarray(a)
        return a if jnp.issubdtype(a.dtype, jnp.inexact) else a.astype(dtype)

    controller = plan.controller
    if controller is None:
        controller = dfx.PIDController(rtol=rtol, atol=atol, pcoeff=0.2, icoeff=0.4)
    event = None
    if plan.event is not None:
        condition = plan.event
        event = dfx.Event(lambda t, y, args, **_: condition(field, tokens(y)))
    solver = stages_stored(plan.solver, plan.adjoint)
    fixed_step = isinstance(controller, dfx.ConstantStepSize)
    solution = dfx.diffeqsolve(
        dfx.ODETerm(velocity),
        Retracting(solver) if on_sphere else solver,
        t0=ts[0],
        t1=ts[-1],
        dt0=(ts[-1] - ts[0]) / jnp.asarray(plan.max_steps, dtype) if fixed_step else None,
        y0=(x0, jnp.zeros((), dtype)),
        saveat=dfx.SaveAt(
            subs=[dfx.SubSaveAt(ts=ts, fn=observed), dfx.SubSaveAt(t1=True, fn=lambda t, y, args: tokens(y))],
            solver_state=True,
        ),
        stepsize_controller=stop_at_non_finite(controller),
        adjoint=plan.adjoint,
        max_steps=plan.max_steps,
        event=event,
        throw=False,
        progress_meter=dfx.TextProgressMeter() if plan.progress else dfx.NoProgressMeter(),
    )
    status = _status(solution.result, overflow_is_possible(field) and not plan.scaled)
    ok = status <= Status.EVENT
    _, (_, reached_ts) = solution.ys, solution.ts
    reached_time = reached_ts[-1]
    forward = ts[-1] >= ts[0]
    seen = jnp.where(forward, ts <= reached_time, ts >= reached_time)
    (values, elapsed), final = solution.ys
    values = jax.tree.map(lambda a: _poison(a, seen, ok), values)
    stats = {
        "status": status,
        "time_reached": reached_time,
        "steps": solution.stats["num_steps"],
        "accepted": solution.stats["num_accepted_steps"],
        "rejected": solution.stats["num_rejected_steps"],
        "norm_defect": solution.solver_state[1] if on_sphere else jnp.zeros((), dtype),
    }
    if plan.scaled:
        stats["log_time"] = jnp.log(jnp.where(seen, elapsed, jnp.nan)) - start_scale
    return Trajectory(ts, values, _poison(final[-1:], jnp.ones(1, bool), ok)[0], stats)


def _status(result, overflow):
    bad = Status.OVERFLOW if overflow else Status.NONFINITE
    codes = [
        (dfx.RESULTS.successful, Status.OK),
        (dfx.RESULTS.event_occurred, Status.EVENT),
        (dfx.RESULTS.max_steps_reached, Status.MAX_STEPS),
        (dfx.RESULTS.dt_min_reached, Status.STEP_TOO_SMALL),
    ]
    status = jnp.asarray(int(bad))
    for code, name in codes:
        status = jnp.where(result == code, int(name), status)
    return status


def _poison(a, seen, ok):
    """NaN in frames not reached; where the run did not finish, NaN in every gradient as well."""
    shape = (-1, *[1] * (a.ndim - 1))
    frames = jnp.where(jnp.reshape(seen, shape), a, jnp.nan)
    return _nan_gradient_unless(frames, ok)


@jax.custom_jvp
def _nan_gradient_unless(a, ok):
    return a


@_nan_gradient_unless.defjvp
def _nan_gradient_rule(primals, tangents):
    a, ok = primals
    factor = jnp.where(ok, 1, jnp.nan).astype(a.dtype)
    return a, tangents[0] * factor


def watched(observe: Mapping[str, Observable] | None, save_tokens: bool) -> dict[str, Observable]:
    """The observables by name, the tokens among them if they are kept."""
    return dict(observe or {}) | ({"tokens": _tokens} if save_tokens else {})


def _tokens(field, x):
    return x


def _raise_unless_finished(traj, max_steps):
    status = np.asarray(traj.stats["status"])
    if status.ndim == 0 and status > Status.EVENT:
        code = Status(int(status))
        raise RuntimeError(
            f"the run stopped at t = {float(traj.stats['time_reached']):.6g} of {float(traj.ts[-1]):.6g} after "
            f"{int(traj.stats['steps'])} steps ({code.name}, max_steps = {max_steps}): {REMEDY[code]}."
        )
    for name, value in traj.values.items():
        if status == Status.OK and not bool(all_finite(value)):
            raise RuntimeError(f"observable `{name}` is not finite; energies have `log_energy`.")


def at_consensus(tolerance: float) -> Observable:
    r"""Event: order parameter above 1 - `tolerance`."""

    def event(field, x):
        return 1 - sphere.safe_norm(field.token_weights(x) @ x) < tolerance

    return event


def at_rest(speed: float) -> Observable:
    r"""Event: every $|\dot x_i|$ below `speed`."""

    def event(field, x):
        return jnp.max(sphere.safe_norm(field(0.0, x, None))) < speed

    return event


def layers(
    field: AbstractField,
    x0: ArrayLike,
    depth: int,
    step: ArrayLike,
    *,
    observe: Mapping[str, Observable] | None = None,
    save_tokens: bool = False,
    normalize: bool = False,
) -> Trajectory:
    r"""The residual network itself: `depth` projected Euler steps $x \leftarrow (x + \mathrm{step}\,\dot x)/|x + \mathrm{step}\,\dot x|$.

    Its difference from `solve` is a result, not an error. Frames 0 .. depth are observed; times are $k\,$step.
    """
    x0 = checked_tokens(x0, on_sphere=field.on_sphere, normalize=normalize)
    if depth < 0:
        raise ValueError(f"`depth` must be >= 0, got {depth}.")
    return _layers(tuple(watched(observe, save_tokens).items()), field, x0, depth, jnp.asarray(step, x0.dtype))


@eqx.filter_jit
def _layers(observe, field, x0, depth, step):
    def look(x):
        return {name: f(field, x) for name, f in observe}

    def layer(x, _):
        y = x + step * field(0.0, x, None)
        length = jnp.linalg.norm(y, axis=-1) if field.on_sphere else jnp.ones(len(y), y.dtype)
        y = y / length[:, None]
        return y, (look(y), jnp.max(jnp.abs(length - 1)))

    final, (values, defects) = jax.lax.scan(layer, x0, length=depth)
    ts = step * jnp.arange(depth + 1, dtype=x0.dtype)
    return fixed_steps(ts, look(x0), values, final, steps=jnp.asarray(depth), defect=jnp.max(defects, initial=0))


def fixed_steps(ts, first, later, final, *, steps, defect) -> Trajectory:
    """The trajectory of a scheme that rejects no step: observables at the start and (T - 1, ...) after it, and how many steps."""
    values = jax.tree.map(lambda a, b: jnp.concatenate([jnp.asarray(a)[None], b]), first, later)
    stats = {
        "status": jnp.where(all_finite(final), int(Status.OK), int(Status.NONFINITE)),
        "time_reached": ts[-1],
        "steps": steps,
        "accepted": steps,
        "rejected": jnp.zeros_like(steps),
        "norm_defect": defect,
    }
    return Trajectory(ts, values, final, stats)
