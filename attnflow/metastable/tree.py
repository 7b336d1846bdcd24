"""What merging leaves behind: the tree of merges, the energy staircase, and the path they are read from."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import brentq

from ..field import AttentionField
from ..solve import Observable
from ..trajectory import Status, Trajectory
from . import clock
from .clock import Flow

BLOCK = 64  # frames observed by one program
NODES = (1 - np.cos(np.linspace(0, np.pi, 13))) / 2  # more than the degree of any solver's interpolation


class Merge(NamedTuple):
    r"""Two groups of tokens become one: `who` they are, its `weight`, and $\ln t$ of the last time the union was wider than the threshold.

    `error` is the difference in $\ln t$ from the same run at tenfold tolerances, inf where that run merged others.
    """

    log_t: float
    who: tuple[tuple[int, ...], tuple[int, ...]]
    weight: float
    error: float = np.nan


class Plateau(NamedTuple):
    r"""A stay at `energy` $= \sum_k W_k^2$ from $\ln t$ = `start` to `end` (-inf: at t = 0; inf: for ever), `error` that of `end`."""

    energy: float
    start: float
    end: float
    error: float = np.nan


class Segment(NamedTuple):
    """Steps with the same flow: states `y` (k + 1, m, d), `U` (k + 1,), steps `ds` (k,), and the row `slots` (n,) of every token."""

    flow: Flow
    y: np.ndarray
    U: np.ndarray
    ds: np.ndarray
    slots: np.ndarray

    @property
    def points(self) -> np.ndarray:
        """States in standard coordinates."""
        return self.y if self.flow.frame is None else self.y @ np.asarray(self.flow.frame).T

    @property
    def weights(self) -> np.ndarray:
        return np.exp(np.asarray(self.flow.log_weights))


class History:
    """All steps of a run, in `segments` between which tokens were merged. Point 0 is the start, point p the end of step p."""

    def __init__(self, segments: list[Segment], *, solver):
        self.solver = solver
        self.segments = [s for s in segments if len(s.ds)]
        self.step = [(s, k) for s in self.segments for k in range(len(s.ds))]
        self.tracks: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        first = segments[0]
        self.tokens = np.concatenate([first.points[:1, first.slots]] + [s.points[1:, s.slots] for s in self.segments])
        U = np.concatenate([first.U[:1]] + [s.U[1:] for s in self.segments])
        self.log_t = first.flow.log_time(U)

    def track(self, p: int) -> tuple[np.ndarray, np.ndarray]:
        """(points, U) at the `NODES` of the step that ends at point p, from the solver's own interpolation."""
        if p not in self.tracks:
            s, k = self.step[p - 1]
            state = jnp.asarray(s.y[k]), jnp.asarray(s.U[k])
            nodes = jnp.asarray(NODES, s.y.dtype)
            y, U = clock.sampled(s.flow, state, jnp.asarray(s.ds[k]), nodes, solver=self.solver)
            self.tracks[p] = s._replace(y=np.asarray(y)).points, np.asarray(U)
        return self.tracks[p]

    def tokens_at(self, p: int, theta: float) -> np.ndarray:
        """All tokens at the fraction `theta` of the step that ends at point p."""
        x = np.tensordot(lagrange(theta), self.track(p)[0][:, self.step[p - 1][0].slots], 1)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def root(self, p: int, f: Callable[[float], float]) -> float:
        r"""$\ln t$ where a function of the fraction of the step that ends at point p changes sign."""
        left, right = f(0.0), f(1.0)
        theta = 0.0 if abs(left) < abs(right) else 1.0  # where merging moved the tokens across
        if left * right < 0:
            theta = float(brentq(f, 0.0, 1.0, xtol=1e-12, rtol=1e-12))
        return float(self.step[p - 1][0].flow.log_time(lagrange(theta) @ self.track(p)[1]))


def last_change(values: np.ndarray, level: float) -> int | None:
    """The last point p with `level` between the values at p - 1 and p."""
    changed = np.flatnonzero((values[1:] > level) != (values[:-1] > level))
    return int(changed[-1]) + 1 if changed.size else None


def lagrange(theta):
    """Coefficients of the values at `NODES` in the value at `theta` of the polynomial through them."""
    gap = theta - NODES
    if np.any(gap == 0):
        return (gap == 0).astype(float)
    terms = np.where(np.arange(len(NODES)) % 2, -1.0, 1.0) / gap
    terms[[0, -1]] /= 2
    return terms / terms.sum()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MergeTree:
    r"""A flow followed until its tokens have merged; made by `merge_flow`.

    `merges` and `plateaus` are in order of time. `status` is "merged" (one token is left), "stable" (every perturbation of what
    is left decays: it never merges) or "not reached"; `reason` says more. `log_t` (T,) and `values` are the timeline, `final`
    (n, d) the tokens at its end, `groups` which of them are one, `threshold` the width at which a union counts as merged.
    """

    field: AttentionField
    merges: tuple[Merge, ...]
    plateaus: tuple[Plateau, ...]
    status: str
    reason: str
    log_t: np.ndarray
    values: dict[str, Any]
    final: np.ndarray
    groups: tuple[tuple[int, ...], ...]
    threshold: float
    tries: int
    history: History

    @property
    def trajectory(self) -> Trajectory:
        r"""The timeline as a `Trajectory`, whose times `ts` are $\ln t$ (t = 0 is left out)."""
        steps = len(self.log_t) - 1
        code = Status.MAX_STEPS if self.status == "not reached" else Status.EVENT
        stats = {"status": int(code), "time_reached": self.log_t[-1], "steps": self.tries}
        stats |= {"accepted": steps, "rejected": self.tries - steps, "norm_defect": 0.0}
        values = jax.tree.map(lambda a: jnp.asarray(a[1:]), self.values)
        return Trajectory(jnp.asarray(self.log_t[1:]), values, jnp.asarray(self.final), jax.tree.map(np.asarray, stats))

    def crossing(self, observable: Observable, level: float) -> float:
        r"""$\ln t$ of the last time an observable `(field, x) -> ()` crosses `level`, found inside the step; NaN where it never does."""
        look = eqx.filter_jit(observable)
        values = np.asarray(watch({"value": observable}, self.field, self.history.tokens)["value"])
        p = last_change(values, level)
        if p is None:
            return np.nan
        h = self.history
        return h.root(p, lambda theta: float(look(self.field, jnp.asarray(h.tokens_at(p, theta)))) - level)

    def dendrogram(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        r"""(order, x, y) of the tree drawn over $\ln t$: tokens `order` (n,) on the axis, one bracket (x, y), (m, 4) each, per merge.

        Brackets start from the merges below them, or from $\ln t$ of the first merge where these are single tokens or -inf.
        """
        floor = min((m.log_t for m in self.merges if np.isfinite(m.log_t)), default=0.0)
        order = np.array([i for group in self.groups for i in group])
        place = dict(zip(order.tolist(), map(float, range(len(order))), strict=True))
        root: dict[tuple[int, ...], tuple[float, float]] = {(int(i),): (place[int(i)], floor) for i in order}
        x, y = np.zeros((len(self.merges), 4)), np.zeros((len(self.merges), 4))
        for k, merge in enumerate(self.merges):
            (xa, ya), (xb, yb) = (root.pop(tuple(sorted(side))) for side in merge.who)
            top = max(merge.log_t, floor)
            x[k], y[k] = (xa, xa, xb, xb), (ya, top, top, yb)
            root[tuple(sorted(merge.who[0] + merge.who[1]))] = ((xa + xb) / 2, top)
        return order, x, y

    def __repr__(self):
        n, d = self.final.shape
        lines = [f"MergeTree: {n} tokens in dimension {d}, {len(self.merges)} merges, {self.status} ({self.reason})"]
        for m in self.merges[-6:]:
            sizes = " + ".join(map(str, map(len, m.who)))
            lines.append(f"  ln t = {m.log_t:<12.6g} +- {m.error:.1g}  weight {m.weight:.4g}, {sizes} tokens")
        lasting = [p for p in self.plateaus if p.end - p.start > 1][-6:]
        lines += [f"  energy {p.energy:.4g} for ln t in {p.start:.6g} .. {p.end:.6g} +- {p.error:.1g}" for p in lasting]
        return "\n".join(
            [*lines, f"  steps: {len(self.log_t) - 1} accepted, {self.tries - len(self.log_t) + 1} rejected"]
        )


def watch(observe: dict[str, Observable], field, tokens: np.ndarray) -> dict[str, Any]:
    """Observables at all frames (T, n, d), in blocks of one size so that one program serves every run."""
    if not observe:
        return {}
    padding = -len(tokens) % BLOCK
    frames = np.concatenate([tokens, np.repeat(tokens[-1:], padding, axis=0)]).reshape(-1, BLOCK, *tokens.shape[1:])
    seen = [_look(tuple(observe.items()), field, jnp.asarray(block)) for block in frames]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(tokens)], *seen)


@eqx.filter_jit
def _look(observe, field, block):
    return jax.lax.map(lambda x: {name: f(field, x) for name, f in observe}, block)


def merge_times(
    history: History, fused: list[tuple[int, tuple, tuple]], w: np.ndarray, threshold: float
) -> list[Merge]:
    """Merges in order of time, from the pairs of groups fused at a point."""
    found = []
    for end, a, b in fused:
        union = np.array(a + b)

        def width(p, x, union=union):
            rows = union[np.unique(history.step[max(p, 1) - 1][0].slots[union], return_index=True)[1]]
            return np.max(np.linalg.norm(x[rows, None] - x[None, rows], axis=-1)) - threshold

        p = end
        while p > 0 and width(p, history.tokens[p]) <= 0:
            p -= 1
        wide = p < end and width(p, history.tokens[p]) > 0
        log_t = history.root(p + 1, lambda u, p=p + 1: width(p, history.tokens_at(p, u))) if wide else -np.inf
        found.append(Merge(log_t, (a, b), float(np.sum(w[union]))))
    return sorted(found, key=lambda m: m.log_t)  # stable: a union is never earlier than its parts


def staircase(
    history: History, merges: list[Merge], energy: Callable[[np.ndarray, np.ndarray], float], w: np.ndarray
) -> tuple[list[Plateau], dict[str, np.ndarray]]:
    r"""Plateaus between the merges, and the energy at all points by its name.

    A plateau ends where energy(x, w) crosses the midpoint to the next level $\sum_k W_k^2$ for the last time.
    """
    first = history.segments[0]
    values = [energy(first.points[0], first.weights)]
    for s in history.segments:
        values += [energy(x, s.weights) for x in s.points[1:]]
    values = np.array(values)
    levels = [float(np.sum(w**2))]
    for m in merges:
        a, b = (float(np.sum(w[list(side)])) for side in m.who)
        levels.append(levels[-1] + 2 * a * b)
    ends = []
    for low, high in itertools.pairwise(levels):
        middle = (low + high) / 2
        p = last_change(values, middle)
        if p is None:
            ends.append(-np.inf if values[0] > middle else np.inf)
        else:
            weights = history.step[p - 1][0].weights
            inner = np.array([energy(x, weights) for x in history.track(p)[0]])
            ends.append(history.root(p, lambda u, e=inner, m=middle: float(lagrange(u) @ e) - m))
    plateaus = [Plateau(*p) for p in zip(levels, [-np.inf, *ends], [*ends, np.inf], strict=True)]
    return plateaus, {"shifted_energy": values}
