r"""Search by gradients: `fit` lowers a loss of any pytree of modules, one compiled program for all its steps.

A loss is a function of the parameters, and of a random key or a minibatch; flows inside it are differentiated by `solve`.
Constraints belong into the parameters (`constrained`), numbers into modules and batches: what a loss closes over is fixed
when it is first compiled.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import PRNGKeyArray
from rich.progress import Progress

from . import checkpoints
from .descent import NEVER, Program, State, advance_chunk


@dataclasses.dataclass(frozen=True)
class History:
    """What happened in a fit. `losses[k]` and `gradient_norms[k]` belong to the parameters before step k, NaN where skipped.

    `best_step` is the step whose parameters were returned; `skipped` the number of steps with a non-finite loss or gradient,
    each undone; `stopped` says why the fit ended; `evaluations` (steps, values) where an `evaluate` was given.
    """

    losses: np.ndarray
    gradient_norms: np.ndarray
    best_step: int
    skipped: int
    stopped: str
    evaluations: tuple[np.ndarray, np.ndarray] | None
    seconds: float

    def __len__(self) -> int:
        return len(self.losses)

    def __repr__(self) -> str:
        best = f"{self.losses[self.best_step]:.6g} at step {self.best_step}"
        lines = [
            f"History: {len(self)} steps, {self.stopped}",
            f"  loss           {self.losses[0]:.6g} -> {self.losses[-1]:.6g}, returned {best}",
            f"  gradient norm  {self.gradient_norms[0]:.3g} -> {self.gradient_norms[-1]:.3g}",
            f"  skipped        {self.skipped} non-finite",
        ]
        if self.evaluations is not None:
            steps, values = self.evaluations
            lines.append(f"  evaluated      {values[0]:.6g} at step {steps[0]} -> {values[-1]:.6g}, {len(steps)} times")
        return "\n".join([*lines, f"  wall time      {self.seconds:.1f} s"])


def fit(
    loss: Callable,
    params: Any,
    *,
    steps: int,
    optimiser: optax.GradientTransformation | None = None,
    key: PRNGKeyArray | None = None,
    batch: Callable[[PRNGKeyArray], Any] | None = None,
    held: Callable[[Any], Any] | None = None,
    clip: float | None = None,
    evaluate: Callable[[Any], Any] | None = None,
    patience: int | None = None,
    max_skipped: int = 20,
    checkpoint: str | Path | None = None,
    chunk: int = 50,
    progress: bool = False,
) -> tuple[Any, History]:
    r"""Lower `loss` by `steps` steps of an optax optimiser (default Adam, 1e-2); returns (params, history).

    The loss is `loss(params)`; with `key`, `loss(params, key_k)` with a key of its own for every step; with `batch` as well,
    `loss(params, batch(key_k))`. Equal arguments give equal bits, whether or not the fit was interrupted.

    A non-finite loss or gradient never reaches the parameters: the step is undone, the optimiser's state with it, and the
    next one is half as long (and again longer after it); after `max_skipped` such steps the fit stops.

    Returned are the parameters of the smallest evaluation; without `evaluate` those of the smallest loss where it is
    deterministic, and of the last finite step where it is not (the smallest loss of random batches is a lucky batch).

    **Arguments:**

    - `params`: any pytree; its floating arrays move, except those that `held(params)` returns.
    - `clip`: largest norm of the whole gradient.
    - `evaluate`: a loss of the parameters alone, on data not fitted to; taken after every `chunk` of steps.
    - `patience`: stop after so many steps without a smaller loss (with `evaluate`: a smaller evaluation).
    - `checkpoint`: a folder. A killed fit continues from there when called again with the same arguments; `steps` may grow.
    - `chunk`: steps per call of the compiled program; progress, evaluation and checkpoints happen in between.

    **Errors:** ValueError naming the argument; RuntimeError where no step was finite.
    """
    _check(steps, batch, key, clip, patience, max_skipped, chunk)
    optimiser = _ADAM if optimiser is None else optimiser
    moving, fixed = eqx.partition(params, _moves(params, held))
    if not jax.tree.leaves(moving):
        raise ValueError("`params` has no floating array left to fit.")
    program = Program(
        loss=loss,
        batch=batch,
        optimiser=_with_extra_arguments(optimiser),  # ty: ignore[invalid-argument-type]
        fixed=fixed,
        key=key,
        clip=jnp.asarray(jnp.inf if clip is None else clip, float),
        patience=jnp.asarray(NEVER if patience is None or evaluate is not None else patience),
        max_skipped=jnp.asarray(max_skipped),
        returned="evaluation" if evaluate is not None else "loss" if key is None else "last",
        chunk=chunk,
    )
    state = program.start(moving)
    log = {name: np.zeros(0) for name in ("losses", "norms", "evaluated_at", "evaluations")}
    with contextlib.ExitStack() as stack:
        folder = None
        if checkpoint is not None:
            folder = stack.enter_context(checkpoints.opened(Path(checkpoint), _identity(program, moving)))
            state, log = folder.newest((state, log))
        judge = None if evaluate is None else _Judge(evaluate, fixed, patience)
        state, log, seconds = _run(program, state, log, steps, judge, folder, stack if progress else None)
    if int(state.best_step) < 0:
        raise RuntimeError(
            f"`loss` or its gradient was non-finite in all of the first {int(state.step)} steps: check it at the initial parameters, "
            "and that flows inside it finish (`max_steps`)."
        )
    return eqx.combine(state.best, fixed), _history(program, state, log, steps, seconds)


_ADAM = optax.adam(1e-2)  # one object per optimiser, so that its compiled program is found again


@functools.lru_cache
def _with_extra_arguments(optimiser: Any) -> optax.GradientTransformationExtraArgs:
    return optax.with_extra_args_support(optimiser)


class _Judge(eqx.Module):
    """Evaluation on other data, once per chunk."""

    evaluate: Callable
    fixed: Any
    patience: int | None = eqx.field(static=True)

    @eqx.filter_jit
    def value(self, moving):
        return jnp.asarray(self.evaluate(eqx.combine(moving, self.fixed))).astype(float)

    def look(self, state: State, log: dict) -> tuple[State, dict]:
        moving, at = state.good[0], int(state.step) - 1
        value = float(self.value(moving))
        better = np.isfinite(value) and not (log["evaluations"] <= value).any()
        log = _extended(log, evaluated_at=[at], evaluations=[value])
        if better:
            state = eqx.tree_at(lambda s: (s.best, s.best_step), state, (moving, jnp.asarray(at)))
        return state, log

    def live(self, state: State) -> bool:
        return self.patience is None or int(state.step) - 1 - int(state.best_step) <= self.patience


def _run(program, state, log, steps, judge, folder, stack):
    started = time.perf_counter()
    bar = None if stack is None else stack.enter_context(Progress())
    task = None if bar is None else bar.add_task("fit", total=steps, completed=int(state.step))
    while int(state.step) < steps and bool(program.live(state)) and (judge is None or judge.live(state)):
        done = int(state.step)
        end = min(steps, (done // program.chunk + 1) * program.chunk)
        state, losses, norms = advance_chunk(program, state, jnp.asarray(end))
        count = int(state.step) - done
        log = _extended(log, losses=losses[:count], norms=norms[:count])
        if judge is not None:
            state, log = judge.look(state, log)
        if folder is not None:
            folder.save(int(state.step), (state, log))
        if bar is not None:
            bar.update(task, completed=int(state.step), description=f"fit: loss {log['losses'][-1]:.6g}")
    return state, log, time.perf_counter() - started


def _history(program, state, log, steps, seconds):
    stopped = "all steps taken"
    if int(state.skipped) > int(program.max_skipped):
        stopped = f"stopped: more than {int(program.max_skipped)} non-finite steps"
    elif int(state.step) < steps:
        stopped = "stopped: no improvement within the patience"
    evaluations = (log["evaluated_at"].astype(int), log["evaluations"]) if len(log["evaluations"]) else None
    return History(
        log["losses"], log["norms"], int(state.best_step), int(state.skipped), stopped, evaluations, float(seconds)
    )


def _check(steps, batch, key, clip, patience, max_skipped, chunk):
    if steps < 1 or chunk < 1:
        raise ValueError(f"`steps` and `chunk` must be at least 1, got {steps} and {chunk}.")
    if batch is not None and key is None:
        raise ValueError("`batch` draws with a key: give `key` as well, or close over the data in `loss`.")
    if clip is not None and not clip > 0:
        raise ValueError(f"`clip` must be positive, got {clip}.")
    if (patience is not None and patience < 1) or max_skipped < 0:
        raise ValueError(
            f"`patience` must be at least 1 and `max_skipped` at least 0, got {patience} and {max_skipped}."
        )


def _moves(params, held):
    """Which leaves move."""
    moves = jax.tree.map(eqx.is_inexact_array, params)
    return (
        moves if held is None else eqx.tree_at(held, moves, replace_fn=lambda node: jax.tree.map(lambda _: False, node))
    )


def _identity(program, moving):
    """What a checkpoint must share with the fit that resumes it."""
    limits = (program.clip, program.patience, program.max_skipped)
    return {
        "parameters": checkpoints.fingerprint((moving, program.fixed)),
        "key": checkpoints.fingerprint(None if program.key is None else jr.key_data(program.key)),
        "optimiser": checkpoints.fingerprint(program.optimiser.init(moving)),
        "limits": checkpoints.fingerprint(limits),
        "returned": program.returned,
        "chunk": program.chunk,
    }


def _extended(log, **news):
    return {name: np.concatenate([old, np.asarray(news.get(name, []), float)]) for name, old in log.items()}
