"""Gradients through the flow: against central differences and forward mode, for every attention and type of heads."""

import contextlib

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from attnflow import (
    AttentionField,
    Exponential,
    FactoredHeads,
    Linear,
    ReLU,
    ScalarHeads,
    Softmax,
    heads,
    layers,
    solve,
    sphere,
)
from attnflow.constrained import CommutingHeads, FixedNormHeads, SemidefiniteHeads, gapped, on_planes

N, D, H = 6, 4, 2
HEADS = {
    "general": lambda key: heads.gaussian(key, H, D),
    "aligned": lambda key: heads.goe(key, H, D),
    "scalar": lambda key: ScalarHeads([0.7, 1.2]),
    "factored": lambda key: FactoredHeads(*jr.normal(key, (3, H, 2, D)) / 2, jr.normal(key, (H, D, 2)) / 2),
    "semidefinite": lambda key: SemidefiniteHeads(jr.normal(key, (H, 2, D)) / 2),
    "orthogonal": lambda key: FixedNormHeads(on_planes(heads.orthogonal(key, H, D, 2, [1.0, 1.5]), 2), jnp.ones(H)),
    "commuting": lambda key: CommutingHeads(jr.normal(key, (D, D)), jr.normal(jr.fold_in(key, 1), (H, D))),
    "gapped": lambda key: gapped(key, H, D, 0.5),
}
ATTENTIONS = {
    "softmax": lambda: Softmax(1.5),
    "exponential": lambda: Exponential(0.8),
    "relu": lambda: ReLU(),
    "linear": lambda: Linear(),
}


def outcome(field, x0, weight):
    """A smooth functional of a path of 8 steps. The steps are fixed: adaptive ones move with the parameters, which finite
    differences would see as noise of the size of the tolerance."""
    return jnp.sum(layers(field, x0, 8, 0.1, save_tokens=True).values["tokens"][1:] ** 2 * weight)


def along(outcome, field, x0, tangent, steps):
    """Reverse-mode, forward-mode and fourth-order central derivatives along a tangent of all leaves and the tokens."""
    moving, fixed = eqx.partition((field, x0), eqx.is_inexact_array)

    def f(moving):
        return outcome(*eqx.combine(moving, fixed))

    @jax.jit
    def all_three(moving, tangent, step):
        slope = jax.grad(f)(moving)
        reverse = sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(tangent), strict=True))
        k = step * jnp.array([-2.0, -1.0, 1.0, 2.0])
        moved = jax.vmap(lambda s: f(jax.tree.map(lambda a, b: a + s * b, moving, tangent)))(k)
        central = (8 * (moved[2] - moved[1]) - (moved[3] - moved[0])) / (12 * step)
        return reverse, jax.jvp(f, (moving,), (tangent,))[1], central

    return all_three(moving, tangent, jnp.asarray(steps))


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_gradients_of_the_flow_match_finite_differences_and_forward_mode(kind, family, key):
    field = AttentionField(HEADS[family](key), ATTENTIONS[kind]())
    x0, weight = sphere.uniform(jr.fold_in(key, 1), N, D), jr.normal(jr.fold_in(key, 2), (8, N, D))
    tangent = direction(field, x0, key)
    reverse, forward, central = along(
        lambda f, x: outcome(f, x, weight), field, x0, tangent, 1e-5 if kind == "relu" else 2e-4
    )
    assert abs(reverse) > 1e-2  # a zero gradient would agree with anything
    assert abs(reverse - forward) < 1e-12 * abs(forward)
    assert abs(reverse - central) < 1e-7 * abs(central)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax", "exponential"])
def test_the_solved_flow_is_differentiated_like_its_discrete_map(kind, key):
    field = AttentionField(heads.goe(key, H, D), ATTENTIONS[kind]())
    x0, weight = sphere.uniform(jr.fold_in(key, 1), N, D), jr.normal(jr.fold_in(key, 2), (2, N, D))

    def value(field, x0, adjoint):
        ts, fixed = jnp.array([0.0, 0.4, 0.8]), dfx.ConstantStepSize()
        traj = solve(field, x0, ts, save_tokens=True, controller=fixed, adjoint=adjoint, max_steps=8)
        return jnp.sum(traj.values["tokens"][1:] ** 2 * weight)

    tangent = direction(field, x0, key)
    moving, rest = eqx.partition((field, x0), eqx.is_inexact_array)

    def f(moving, adjoint):
        return value(*eqx.combine(moving, rest), adjoint)

    slope = jax.jit(jax.grad(lambda m: f(m, dfx.RecursiveCheckpointAdjoint())))(moving)
    reverse = sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(tangent), strict=True))

    @jax.jit
    def moved(step):
        line = lambda s: f(jax.tree.map(lambda a, b: a + s * b, moving, tangent), dfx.ForwardMode())  # noqa: E731
        return jax.jvp(line, (step,), (jnp.ones_like(step),))

    step = 1e-3
    at = {k: moved(jnp.asarray(k * step)) for k in (-2, -1, 0, 1, 2)}
    central = (8 * (at[1][0] - at[-1][0]) - (at[2][0] - at[-2][0])) / (12 * step)
    assert abs(reverse) > 1e-2
    assert abs(reverse - at[0][1]) < 1e-11 * abs(reverse)
    assert abs(reverse - central) < 1e-7 * abs(central)


def direction(field, x0, key):
    """A random motion of every leaf of heads and attention and of the tokens."""
    leaves, structure = jax.tree.flatten(eqx.filter((field, x0), eqx.is_inexact_array))
    random = [jr.normal(jr.fold_in(key, 3 + i), a.shape) for i, a in enumerate(leaves)]
    return hold(jax.tree.unflatten(structure, random))


def hold(tangent):
    """No motion of what has no gradient by design: fixed norms and gaps."""
    for where in (lambda t: t[0].heads.norms, lambda t: t[0].heads.gap):
        with contextlib.suppress(AttributeError):
            tangent = eqx.tree_at(where, tangent, replace_fn=jnp.zeros_like)
    return tangent


@pytest.mark.slow
def test_the_adaptive_flow_is_differentiated_to_its_tolerance(key):
    field, x0 = AttentionField(heads.goe(key, H, D), ATTENTIONS["softmax"]()), sphere.uniform(jr.fold_in(key, 1), N, D)

    @jax.jit
    def value(raw, rtol):
        moved = eqx.tree_at(lambda f: f.heads.raw, field, raw)
        return jnp.sum(solve(moved, x0, jnp.array([0.0, 1.0]), rtol=rtol, atol=1e-2 * rtol).final[:, 0] ** 3)

    slopes = [jax.grad(value)(field.heads.raw, rtol) for rtol in (1e-11, 1e-5)]
    fine, coarse = (np.asarray(s) for s in slopes)
    assert 0 < np.abs(coarse - fine).max() < 1e-4 * np.abs(fine).max()
