"""Functions of one point that the sweep tests run, importable by worker processes."""

import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr

from attnflow import observe, sphere
from attnflow.attention import Softmax
from attnflow.field import AttentionField
from attnflow.heads import ScalarHeads
from attnflow.solve import solve


class Traces:
    """Counts how often a function is traced, without being one of its constants."""

    def __init__(self):
        self.names = []


traces = Traces()


def polynomial(a, b, c):
    """A function whose values are exact in floating point for small integers."""
    traces.names.append("polynomial")
    return {"value": a * a + b * c, "vector": jnp.stack([a, b, c])}


def walk(key, length):
    """Many random numbers for one: what a lane needs, not what it returns, fills the memory."""
    return {"end": jnp.sum(jr.normal(key, length.shape) + length)}


def flow(beta, key, ts):
    """A small attention flow."""
    traces.names.append("flow")
    x0 = sphere.uniform(key, n=6, d=2)
    field = AttentionField(ScalarHeads([1.0]), Softmax(beta))
    observables = {"cosine": observe.mean_cosine, "shadow": observe.radial_shadow}
    return solve(field, x0, ts, observe=observables, throw=False)


def capped(beta, x0, ts, max_steps=4096):
    """A flow that may not fit its cap of steps."""
    field = AttentionField(ScalarHeads([1.0]), Softmax(beta))
    return solve(field, x0, ts, observe={"cosine": observe.mean_cosine}, max_steps=max_steps, throw=False)


def heads_energy(heads, x):
    """A sweep over modules."""
    field = AttentionField(heads, Softmax(1.0))
    return {"energies": observe.head_energies(field, x)}


def slow(a, size):
    """About a tenth of a second per lane, for processes that are to be killed at work."""

    def step(x, _):
        return jnp.cos(x + a), None

    return {"value": jnp.sum(jax.lax.scan(step, jnp.ones(size.shape), length=400)[0])}


def deadly(a, marker):
    """Kills its own worker, once, at the first point it meets: `marker` holds the path's bytes."""

    def kill(a, marker):
        path = Path(bytes(marker.tolist()).decode())
        if not path.exists():
            path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return a

    return {"value": jax.pure_callback(kill, jax.ShapeDtypeStruct((), a.dtype), a, marker, vmap_method="sequential")}


def fatal(a):
    """Kills every worker that touches it."""

    def kill(a):
        os.kill(os.getpid(), signal.SIGKILL)
        return a

    return {"value": jax.pure_callback(kill, jax.ShapeDtypeStruct((), a.dtype), a, vmap_method="sequential")}
