r"""What diffrax lacks for flows on the sphere: a solver that retracts, and a controller that stops at a non-finite step."""

from typing import Any

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp

from . import sphere


class Retracting(dfx.AbstractAdaptiveSolver, dfx.AbstractWrappedSolver):
    r"""Any diffrax solver, its tokens put back on the sphere after every step; the state is a pytree whose first leaf is x (n, d).

    The fields are homogeneous of degree one, so a velocity kept for the next step scales with the same factor and no
    evaluation is lost. The solver's state also carries the largest $||x| - 1|$ seen before retraction.
    """

    solver: dfx.AbstractSolver  # ty: ignore[incompatible-attribute-override]

    @property
    def term_structure(self):  # ty: ignore[incompatible-property-override]
        return self.solver.term_structure

    @property
    def interpolation_cls(self):  # ty: ignore[incompatible-property-override]
        return self.solver.interpolation_cls

    @property
    def term_compatible_contr_kwargs(self):  # ty: ignore[incompatible-property-override]
        return self.solver.term_compatible_contr_kwargs

    @property
    def scan_kind(self):
        """Read, and replaced, by diffrax's forward-mode and direct adjoints."""
        return self.solver.scan_kind  # ty: ignore[missing-attribute]

    def order(self, terms):
        return self.solver.order(terms)

    def strong_order(self, terms):
        return self.solver.strong_order(terms)

    def error_order(self, terms):
        return self.solver.error_order(terms)

    def init(self, terms, t0, t1, y0, args):
        x = jax.tree.leaves(y0)[0]
        return self.solver.init(terms, t0, t1, y0, args), jnp.zeros((), x.dtype)

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        inner, defect = solver_state
        y1, error, dense, inner, result = self.solver.step(terms, t0, t1, y0, args, inner, made_jump)
        x = jax.tree.leaves(y1)[0]
        length = sphere.safe_norm(x, where_zero=1.0)

        def shrink(a):
            tokens = eqx.is_inexact_array(a) and a.shape == x.shape
            return a / length[:, None] if tokens else a

        worst = jax.lax.stop_gradient(jnp.max(jnp.abs(length - 1)))
        return jax.tree.map(shrink, y1), error, dense, (jax.tree.map(shrink, inner), jnp.maximum(defect, worst)), result

    def func(self, terms, t0, y0, args):
        return self.solver.func(terms, t0, y0, args)


def stages_stored(solver: dfx.AbstractSolver, adjoint: dfx.AbstractAdjoint) -> dfx.AbstractSolver:
    """The solver, the loop over its stages kept in memory where the loop over its steps is checkpointed.

    diffrax checkpoints both, so that a reverse pass evaluates the field once more than it must.
    """
    if isinstance(adjoint, dfx.RecursiveCheckpointAdjoint) and getattr(solver, "scan_kind", "lax") is None:
        return eqx.tree_at(lambda s: s.scan_kind, solver, "bounded", is_leaf=lambda a: a is None)
    return solver


class _Stopping(dfx.AbstractStepSizeController):
    """Shared by the two wrappers below: diffrax tells adaptive controllers from others by their class."""

    controller: eqx.AbstractVar[dfx.AbstractStepSizeController]

    def wrap(self, direction):
        return eqx.tree_at(lambda c: c.controller, self, self.controller.wrap(direction))

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        return self.controller.init(terms, t0, t1, y0, dt0, args, func, error_order)

    def adapt_step_size(self, t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state):
        keep, next_t0, next_t1, jump, state, result = self.controller.adapt_step_size(
            t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state
        )
        finite = all_finite(y1_candidate) & all_finite(y_error) & jnp.isfinite(t1)
        result = dfx.RESULTS.where(finite, result, dfx.RESULTS.internal_error)
        return keep & finite, next_t0, next_t1, jump, state, result


class _StoppingConstant(_Stopping):
    controller: dfx.AbstractStepSizeController


class _StoppingAdaptive(_Stopping, dfx.AbstractAdaptiveStepSizeController):
    controller: dfx.AbstractAdaptiveStepSizeController  # ty: ignore[incompatible-mutable-override]

    @property
    def rtol(self):  # ty: ignore[incompatible-property-override]
        return self.controller.rtol

    @property
    def atol(self):  # ty: ignore[incompatible-property-override]
        return self.controller.atol

    @property
    def norm(self):  # ty: ignore[incompatible-property-override]
        return self.controller.norm


def stop_at_non_finite(controller: dfx.AbstractStepSizeController) -> dfx.AbstractStepSizeController:
    """The controller, but a step with a non-finite state or error ends the solve at once instead of being retried for ever."""
    if isinstance(controller, dfx.AbstractAdaptiveStepSizeController):
        return _StoppingAdaptive(controller)  # ty: ignore[missing-argument, invalid-argument-type]
    return _StoppingConstant(controller)


def all_finite(tree: Any):
    ok = jnp.array(True)
    for leaf in jax.tree.leaves(tree):
        if eqx.is_inexact_array(leaf):
            ok = ok & jnp.all(jnp.isfinite(leaf))
    return ok
