r"""Long ordinary runs that survive `kill -9`: the flow in chunks of steps, each ending in a checkpoint, to the bit.

A restart is exact only if the step that was about to be tried is tried again: diffrax saves the state of its controller
but not that, so `Recording` keeps it. A chunk ends after a number of steps, never at a time, which would cut a step.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from . import checkpoints, sphere
from .facts import facts
from .field import AbstractField, overflow_is_possible
from .solve import Observable
from .stepping import Retracting, stop_at_non_finite
from .trajectory import REMEDY, Status, Trajectory
from .validate import checked_times, checked_tokens, checked_tolerances


class Recording(dfx.AbstractAdaptiveStepSizeController):
    """Any adaptive controller; its state also holds the end of the step to be tried next."""

    controller: dfx.AbstractStepSizeController

    @property
    def rtol(self):  # ty: ignore[incompatible-property-override]
        return getattr(self.controller, "rtol", None)

    @property
    def atol(self):  # ty: ignore[incompatible-property-override]
        return getattr(self.controller, "atol", None)

    @property
    def norm(self):  # ty: ignore[incompatible-property-override]
        return getattr(self.controller, "norm", None)

    def wrap(self, direction):
        return eqx.tree_at(lambda c: c.controller, self, self.controller.wrap(direction))

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        next_t, state = self.controller.init(terms, t0, t1, y0, dt0, args, func, error_order)
        return next_t, (state, next_t)

    def adapt_step_size(self, t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state):
        keep, next_t0, next_t1, jump, state, result = self.controller.adapt_step_size(
            t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state[0]
        )
        return keep, next_t0, next_t1, jump, (state, next_t1), result


class _State(eqx.Module):
    """Everything that decides the rest of the run, and what was seen at the ends of the chunks so far."""

    t: Any
    x: Any
    solver: Any
    controller: Any
    made_jump: Any
    counts: Any  # steps, accepted, rejected
    status: Any
    ts: Any
    values: Any


def long_run(
    field: AbstractField,
    x0: ArrayLike,
    t1: float,
    *,
    folder: str | Path,
    t0: float = 0.0,
    every: int = 20_000,
    observe: Mapping[str, Observable] | None = None,
    solver: dfx.AbstractAdaptiveSolver | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-9,
    controller: dfx.AbstractAdaptiveStepSizeController | None = None,
    at_most: int | None = None,
) -> Trajectory:
    r"""Integrate from `t0` to `t1` with a checkpoint in `folder` after every `every` steps; call it again to go on.

    The result, its steps and its observables have the same bits as those of an uninterrupted run, whatever killed the process
    in between and how often; no step is cut short by a checkpoint. `solve`, whose steps differ a little, agrees within the
    tolerance. Three checkpoints are kept; a damaged one is passed over. The gradient through a resumed run is not supported.

    **Arguments:**

    - `observe`: functions `(field, x) -> array` by name, at the ends of the chunks: these are the `ts` of the result.
    - `at_most`: stop after so many chunks of this call; the status is then MAX_STEPS.

    **Errors:** `store.StoreBusy` where another process runs in `folder`; ValueError, naming what differs, where the folder
    holds another run (other tokens, field, times, tolerances, versions or device); RuntimeError where the run cannot go on.
    """
    if every < 1:
        raise ValueError(f"`every` must be at least 1 step, got {every}.")
    x = checked_tokens(x0, on_sphere=field.on_sphere)
    times = checked_times(np.array([t0, t1]), x.dtype)
    if not times[1] > times[0]:
        raise ValueError(f"`t1` must come after `t0`, got {t0} and {t1}.")
    rtol, atol = checked_tolerances(rtol, atol, x.dtype)
    if controller is None:
        controller = dfx.PIDController(rtol=rtol, atol=atol, pcoeff=0.2, icoeff=0.4)
    solver = dfx.Tsit5() if solver is None else solver
    plan = _Plan(
        Retracting(solver) if field.on_sphere else solver,
        Recording(stop_at_non_finite(controller)),  # ty: ignore[missing-argument, invalid-argument-type]
        tuple((observe or {}).items()),
        every,
    )
    identity = facts() | {
        "t0": float(times[0]),
        "t1": float(times[1]),
        "every": every,
        "observe": [name for name, _ in plan.observe],
        "solver": type(solver).__name__,
        "controller": checkpoints.fingerprint(jax.tree.map(np.asarray, eqx.filter(controller, eqx.is_array_like))),
        "tokens": checkpoints.fingerprint(x),
        "field": checkpoints.fingerprint(field),
    }
    blank = eqx.filter_eval_shape(_first, plan, field, x, times)
    with checkpoints.opened(Path(folder), identity) as kept:
        state = kept.newest(blank)
        start = state is not blank
        state = jax.tree.map(jnp.asarray, state) if start else _first(plan, field, x, times)
        chunk = int(state.ts.shape[0])
        if not start:
            kept.save(chunk, state)
        for _ in range(10**9 if at_most is None else at_most - (not start)):
            if int(state.status) != Status.MAX_STEPS:
                break
            dt = _step_to(np.asarray(state.t), np.asarray(state.controller[1]))
            # Without what was seen before, whose length grows: else every chunk would be compiled anew.
            new = _next(plan, field, times[1], dataclasses.replace(state, ts=None, values=None), dt)
            state = eqx.tree_at(
                lambda s: (s.ts, s.values),
                new,
                jax.tree.map(lambda a, b: jnp.concatenate([a, b]), (state.ts, state.values), (new.ts, new.values)),
            )
            chunk += 1
            kept.save(chunk, state)
    return _result(field, state, float(times[1]))


class _Plan(eqx.Module):
    solver: dfx.AbstractAdaptiveSolver
    controller: Recording
    observe: tuple[tuple[str, Observable], ...]
    every: int = eqx.field(static=True)


@eqx.filter_jit
def _first(plan, field, x, times):
    return _solved(plan, field, times[0], times[1], x, jnp.zeros(3, int), {})


@eqx.filter_jit
def _next(plan, field, t1, state, dt):
    resumed = {
        "dt0": dt,
        "solver_state": state.solver,
        "controller_state": state.controller,
        "made_jump": state.made_jump,
    }
    return _solved(plan, field, state.t, t1, state.x, state.counts, resumed)


def _solved(plan, field, t0, t1, x, counts, resumed):
    solution = dfx.diffeqsolve(
        dfx.ODETerm(lambda t, y, args: args(t, y, None)),
        plan.solver,
        t0=t0,
        t1=t1,
        **({"dt0": None} | resumed),
        y0=x,
        args=field,
        saveat=dfx.SaveAt(t1=True, solver_state=True, controller_state=True, made_jump=True),
        stepsize_controller=plan.controller,
        max_steps=plan.every,
        throw=False,
    )
    (y,), (t,) = solution.ys, solution.ts
    done, more = dfx.RESULTS.successful, dfx.RESULTS.max_steps_reached
    bad = Status.OVERFLOW if overflow_is_possible(field) else Status.NONFINITE
    status = jnp.where(
        solution.result == done, int(Status.OK), jnp.where(solution.result == more, int(Status.MAX_STEPS), int(bad))
    )
    names = ("num_steps", "num_accepted_steps", "num_rejected_steps")
    seen = sphere.retract(y) if field.on_sphere else y
    return _State(
        t=t,
        x=y,
        solver=jax.tree.map(jnp.asarray, solution.solver_state),
        controller=jax.tree.map(jnp.asarray, solution.controller_state),
        made_jump=jnp.asarray(solution.made_jump),
        counts=counts + jnp.stack([jnp.asarray(solution.stats[k]).astype(counts.dtype) for k in names]),
        status=status,
        ts=t[None],
        values={name: jnp.asarray(f(field, seen))[None] for name, f in plan.observe},
    )


def _step_to(t, next_t):
    """A step dt with t + dt equal to next_t in their dtype, which rounding may put one unit beside next_t - t."""
    dt = next_t - t
    for candidate in (dt, np.nextafter(dt, np.inf, dtype=dt.dtype), np.nextafter(dt, -np.inf, dtype=dt.dtype)):
        if t + candidate == next_t:
            return jnp.asarray(candidate)
    raise RuntimeError(f"no step leads from t = {t} to {next_t} in {dt.dtype}; use float64 tokens.")


def _result(field, state, t1):
    status = Status(int(state.status))
    if status not in (Status.OK, Status.MAX_STEPS):
        raise RuntimeError(
            f"the run stopped at t = {float(state.t):.6g} of {t1:.6g} ({status.name}): {REMEDY[status]}."
        )
    steps, accepted, rejected = (np.asarray(k) for k in state.counts)
    defect = np.asarray(state.solver[1]) if field.on_sphere else np.zeros(())
    stats = {"status": np.asarray(int(status)), "time_reached": np.asarray(state.t), "steps": steps}
    stats |= {"accepted": accepted, "rejected": rejected, "norm_defect": defect}
    return Trajectory(state.ts, state.values, state.x, stats)
