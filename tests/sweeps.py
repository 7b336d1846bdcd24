"""Functions of one point that the sweep tests run, importable by worker processes."""

import multiprocessing
import os
import signal

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


def fatal(a):
    """Kills every worker process that is to compute it, and no other."""
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"value": a}


def wide(beta, key, zeros):
    """A lane of 4096 random numbers, of which only the mean stays."""
    noise = zeros + jr.normal(key, zeros.shape, zeros.dtype)
    return {"mean": jnp.mean(noise * jnp.exp(-beta))}
