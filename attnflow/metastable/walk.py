"""One walk through a metastable flow: steps in the compiled loop, merges between them."""

from typing import NamedTuple

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import brentq

from . import clock
from .clock import Flow, Limits
from .tree import NODES, Segment, lagrange

CHUNK = 64  # steps between looks from outside the compiled loop
ROWS = (8, 32)  # numbers of rows to which few tokens are padded, so that few programs are compiled
LARGEST_SPECTRUM = 1024  # tangent dimensions up to which a resting state is classified


class Plan(NamedTuple):
    """How far to walk and how accurately: see `merge_flow`; `stiffness` is that of `Limits`."""

    t1: float
    threshold: float
    tolerance: float
    rtol: float
    stiffness: float
    solver: dfx.AbstractAdaptiveSolver
    max_steps: int


class Walk:
    """The tokens that are left, and the way behind them."""

    def __init__(self, field, x0, plan):
        self.plan, self.dtype = plan, x0.dtype
        flow, y = prepared(field, x0)
        self.flow, self.near = clock.started(flow, jnp.asarray(y), self._real(plan.tolerance))
        last = np.inf if np.isinf(plan.t1) else self.flow.clock(np.log(plan.t1))
        limits = (plan.tolerance, plan.tolerance**2, plan.rtol, plan.stiffness, last)
        self.limits = Limits(*map(self._real, limits))
        self.state, self.ds = (jnp.asarray(y), self._real(0.0)), self._real(1e-3)
        self.groups: dict[int, tuple[int, ...]] = {i: (i,) for i in range(len(x0))}
        self.segments: list[Segment] = []
        self.fused: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self.steps = self.tries = 0

    def _real(self, value):
        return jnp.asarray(value, self.dtype)

    def to_the_end(self) -> tuple[str, str]:
        """Steps and merges until there is nothing left to happen; (status, reason)."""
        self.merge(np.asarray(self.near))
        while len(self.groups) > 1:
            path = self.advance()
            stop = int(path.stop)
            if stop == clock.DONE:
                self.cut()
                return "not reached", f"t1 = {self.plan.t1:g} comes first"
            if stop == clock.REST:
                return self.at_rest()
            if stop == clock.BROKEN:
                return "not reached", "the velocity is not finite"
            if self.steps >= self.plan.max_steps or (stop == clock.RUNNING and self.segments[-1].ds.size < CHUNK):
                return "not reached", f"{self.steps} steps were not enough; raise `max_steps` or `rtol`"
            if stop == clock.CLOSE:
                self.merge(np.asarray(path.near))
            elif stop == clock.FADED:
                self.fade(path.gone)
        if not self.segments:
            self.advance()
        return "merged", "one token is left"

    def advance(self) -> clock.Path:
        """One chunk of steps."""
        path = clock.advance(self.flow, self.state, self.ds, self.limits, steps=CHUNK, solver=self.plan.solver)
        k = int(path.count)
        y = np.concatenate([np.asarray(self.state[0])[None], np.asarray(path.y)[:k]])
        U = np.append(np.asarray(self.state[1]), np.asarray(path.U)[:k])
        slots = np.zeros(sum(map(len, self.groups.values())), int)
        for row, group in self.groups.items():
            slots[list(group)] = row
        self.segments.append(Segment(self.flow, y, U, np.array(path.ds)[:k], slots))
        self.steps, self.tries = self.steps + k, self.tries + int(path.tries)
        self.state, self.ds = path.state, path.next_ds
        return path

    def merge(self, touching: np.ndarray) -> None:
        """One place for tokens that touch, nearest first; rows that nobody uses leave the program when it is far too large."""
        y, log_w = np.array(self.state[0]), np.array(self.flow.log_weights)
        pairs = np.argwhere(np.triu(touching))
        nearest = np.argsort(np.linalg.norm(y[pairs[:, 0]] - y[pairs[:, 1]], axis=-1), kind="stable")
        root = np.arange(len(y))
        for i, j in pairs[nearest]:
            a, b = sorted((int(root[i]), int(root[j])))
            if a == b:
                continue
            self.fused.append((self.steps, self.groups[a], self.groups[b]))
            mean = y[a] + np.exp(log_w[b] - log_w[a]) * y[b]
            y[a], log_w[a], log_w[b] = mean / np.linalg.norm(mean), np.logaddexp(log_w[a], log_w[b]), -np.inf
            self.groups[a] = self.groups[a] + self.groups.pop(b)
            root[root == b] = a
        rows = max(ROWS[-1], 1 << (len(self.groups) - 1).bit_length())
        if 4 * rows <= len(y):
            spare = np.flatnonzero(np.isneginf(log_w))[: rows - len(self.groups)]
            keep = np.append(np.array(list(self.groups)), spare)
            y, log_w = y[keep], log_w[keep]
            self.groups = dict(enumerate(self.groups.values()))
        self.flow = eqx.tree_at(lambda f: f.log_weights, self.flow, jnp.asarray(log_w))
        self.state = jnp.asarray(y), self.state[1]

    def fade(self, gone) -> None:
        """Components that have died out are 0 from here on, so that their relaxation sets no time scale any more."""
        self.flow = eqx.tree_at(lambda f: f.alive, self.flow, self.flow.alive & ~gone)
        y = jnp.where(gone[None], 0, self.state[0])
        self.state = y / jnp.linalg.norm(y, axis=-1, keepdims=True), self.state[1]

    def cut(self) -> None:
        """End the last step at `t1`."""
        s = self.segments[-1]
        state = jnp.asarray(s.y[-2]), jnp.asarray(s.U[-2])
        nodes = jnp.asarray(NODES, self.dtype)
        y, U = map(np.asarray, clock.sampled(s.flow, state, self._real(s.ds[-1]), nodes, solver=self.plan.solver))
        goal = float(self.limits.last)
        fraction = brentq(lambda u: float(lagrange(u) @ U) - goal, 0.0, 1.0, xtol=1e-12) if goal < U[-1] else 1.0
        end = np.tensordot(lagrange(fraction), y, 1)
        s.y[-1], s.U[-1] = end / np.linalg.norm(end, axis=-1, keepdims=True), lagrange(fraction) @ U
        s.ds[-1] *= fraction

    def at_rest(self) -> tuple[str, str]:
        """Whether what is left is stable, by the spectrum of the linearised flow; rotations of an isotropic field are neutral."""
        n, d = len(self.groups), self.state[0].shape[1]
        if n * (d - 1) > LARGEST_SPECTRUM:
            return "not reached", f"at rest; {n} tokens are too many to tell whether it is stable"
        growth = clock.growth_rates(self.flow, self.state).real
        value = np.asarray(self.flow.value)
        isotropic = value.ndim == 2 and not np.ptp(value, axis=1).any()
        slack = 1e-9 * np.abs(growth).max() if self.dtype == np.float64 else 1e-4 * np.abs(growth).max()
        neutral = int(np.sum(np.abs(growth) <= slack))
        if growth.max() > slack:
            return "not reached", f"at rest in an unstable equilibrium, growth rate {growth.max():.3g}; perturb `x0`"
        if neutral > (d * (d - 1) // 2 if isotropic else 0):
            return "not reached", "at rest to rounding; a slower drift would not be seen"
        return (
            "stable",
            f"{n} tokens at rest, slowest decay {-growth[np.abs(growth) > slack].max():.3g} of the fastest rate",
        )


def prepared(field, x0) -> tuple[Flow, np.ndarray]:
    """The field in log time, all but its first rate, and the tokens in its frame, padded with rows of weight 0."""
    heads, attention = jax.tree.map(
        lambda a: a.astype(x0.dtype) if eqx.is_inexact_array(a) else a, (field.heads, field.attention)
    )
    frame, value = eigenframe(np.asarray(heads.dense(x0.shape[1]).value))
    y = x0 if frame is None else x0 @ frame
    n, d = x0.shape
    spare = next((rows for rows in ROWS if rows >= n), n) - n
    y = np.concatenate([y, np.repeat(y[:1], spare, axis=0)])
    log_w = np.log(np.asarray(field.token_weights(jnp.asarray(x0))))
    flow = Flow(
        heads=heads,
        attention=attention,
        frame=None if frame is None else jnp.asarray(frame),
        value=jnp.asarray(value),
        alive=jnp.ones(d, bool),
        log_weights=jnp.asarray(np.append(log_w, np.full(spare, -np.inf, x0.dtype))),
        log_rate=jnp.zeros((), x0.dtype),
    )
    return flow, y


def eigenframe(value: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """(frame, spectra (H, d)) of symmetric matrices (H, d, d) that commute, equal eigenvalues made exactly equal; else (None, value)."""
    H, d, _ = value.shape
    eye = np.eye(d, dtype=value.dtype)
    if not np.any(value - value[:, :1, :1] * eye):
        return None, np.repeat(value[:, 0, :1], d, axis=1)
    slack = 64 * d * np.finfo(value.dtype).eps * np.abs(value).max()
    mixed = np.tensordot(np.cos(np.arange(H)).astype(value.dtype), value, 1)
    frame = np.linalg.eigh(mixed)[1]
    turned = frame.T @ value @ frame
    spectra = np.diagonal(turned, axis1=1, axis2=2).copy()
    if np.abs(turned - spectra[:, None] * eye).max() > slack:
        return None, value
    for v in spectra:
        order = np.argsort(v)
        for group in np.split(order, np.flatnonzero(np.diff(v[order]) > slack) + 1):
            v[group] = v[group].mean()
    return frame, spectra
