"""The compiled inside of `fit`: one step of gradient descent that no non-finite number survives, and a chunk of them."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

NEVER = np.iinfo(np.int32).max
HALVED, REGROWN = 0.5, 2**0.5


class State(eqx.Module):
    """Everything a step changes. `good` are the last parameters, and optimiser state, with a finite loss and gradient."""

    step: Int[Array, ""]
    moving: Any
    optimiser: Any
    good: Any
    scale: Float[Array, ""]
    skipped: Int[Array, ""]
    lowest: Float[Array, ""]
    lowest_step: Int[Array, ""]
    best: Any
    best_step: Int[Array, ""]


class Program(eqx.Module):
    """What stays the same during a fit."""

    loss: Callable
    batch: Callable | None
    optimiser: optax.GradientTransformationExtraArgs
    fixed: Any
    key: PRNGKeyArray | None
    clip: Float[Array, ""]
    patience: Int[Array, ""]
    max_skipped: Int[Array, ""]
    returned: str = eqx.field(static=True)
    chunk: int = eqx.field(static=True)

    def start(self, moving) -> State:
        optimiser = self.optimiser.init(moving)
        inf, count = jnp.asarray(jnp.inf, float), jnp.asarray(0)
        none = jnp.asarray(-1)
        state = State(count, moving, optimiser, (moving, optimiser), jnp.asarray(1.0), count, inf, none, moving, none)
        return jax.tree.map(jnp.array, state)

    def value(self, moving, step):
        """The loss of step `step`."""
        params = eqx.combine(moving, self.fixed)
        if self.key is None:
            value = self.loss(params)
        else:
            key = jr.fold_in(self.key, step)
            value = self.loss(params, key if self.batch is None else self.batch(key))
        value = jnp.asarray(value)
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"`loss` must return a real scalar, got {value.dtype} of shape {value.shape}.")
        return value

    def live(self, state):
        """Whether the fit goes on."""
        waited = state.step - state.lowest_step
        return (waited <= self.patience) & (state.skipped <= self.max_skipped)

    def advance(self, state: State) -> tuple[State, Array, Array]:
        """One step, and the loss and gradient norm at the parameters before it."""
        value, gradient = jax.value_and_grad(self.value)(state.moving, state.step)
        norm = optax.tree.norm(gradient).astype(self.clip.dtype)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        shrink = jnp.minimum(1, self.clip / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
        gradient = _times(gradient, shrink)
        with jax.numpy_dtype_promotion("standard"):  # optax counts in int32 whatever the caller's settings
            updates, optimiser = self.optimiser.update(
                gradient,
                state.optimiser,
                state.moving,
                value=value,
                grad=gradient,
                value_fn=lambda moving: self.value(moving, state.step),
            )
        value = value.astype(self.clip.dtype)
        lower = value < state.lowest
        kept = {"loss": lower, "last": True, "evaluation": False}[self.returned]
        moved = State(
            state.step + 1,
            optax.apply_updates(state.moving, _times(updates, state.scale)),
            optimiser,
            (state.moving, state.optimiser),
            jnp.minimum(1, state.scale * REGROWN),
            state.skipped,
            jnp.where(lower, value, state.lowest),
            jnp.where(lower, state.step, state.lowest_step),
            _where(kept, state.moving, state.best),
            jnp.where(kept, state.step, state.best_step),
        )
        undone = eqx.tree_at(
            lambda s: (s.step, s.moving, s.optimiser, s.scale, s.skipped),
            state,
            (state.step + 1, *state.good, state.scale * HALVED, state.skipped + 1),
        )
        seen = jnp.where(finite, jnp.stack([value, norm]), jnp.nan)
        return _where(finite, moved, undone), seen[0], seen[1]


@eqx.filter_jit
def advance_chunk(program: Program, state: State, stop):
    """Up to a chunk of steps, to `stop` at most: (state, losses, norms), the last two NaN past the end."""
    blank = jnp.full(program.chunk, jnp.nan, program.clip.dtype)
    first = state.step

    def unfinished(carry):
        state = carry[0]
        return (state.step < jnp.minimum(stop, first + program.chunk)) & program.live(state)

    def step(carry):
        state, losses, norms = carry
        place = state.step - first
        state, loss, norm = program.advance(state)
        return state, losses.at[place].set(loss), norms.at[place].set(norm)

    return jax.lax.while_loop(unfinished, step, (state, blank, blank))


def _times(tree, factor):
    return jax.tree.map(lambda a: a * factor.astype(a.dtype), tree)


def _where(condition, a, b):
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
