"""Exact transport on few pairs: the linear programme on the pairs whose dual constraint is almost tight, grown until it closes.

Column generation with a stabilised dual (du Merle, Villeneuve, Desrosiers, Hansen 1999): mass may be left unmoved at the
price of its potential plus a penalty, which keeps the potentials of the small programme near the last good ones.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sps
from scipy.optimize import linprog

from .clouds import Clouds
from .exact import exact_solver, monotone
from .ground import host_cost, host_table

CANDIDATES = 12  # pairs per point and side
SMALL_PROGRAMME = 4000  # points up to which scipy's solver stands in for POT
REST = 2000**2  # pairs up to which the rest is placed optimally


class Programme(NamedTuple):
    """A solved programme: its pairs as keys i m + j, their costs, its potentials, and the cost of a feasible plan near its own."""

    keys: np.ndarray
    costs: np.ndarray
    u: np.ndarray
    v: np.ndarray
    upper: float


def available(clouds: Clouds) -> bool:
    return exact_solver() is not None or len(clouds.a) + len(clouds.b) <= SMALL_PROGRAMME


def first(clouds: Clouds, f: np.ndarray, g: np.ndarray, *, penalty: float) -> Programme:
    """The programme on the pairs with reduced cost at most twice the penalty."""
    return _solved(clouds, _candidates(clouds, f, g, 2 * penalty), f, g, penalty)


def grown(clouds: Clouds, last: Programme, f: np.ndarray, g: np.ndarray, *, penalty: float) -> Programme:
    """The next programme, around better potentials: with the pairs that violate the last, without those far from tight."""
    i, j = last.keys // len(clouds.b), last.keys % len(clouds.b)
    kept = last.keys[last.costs - last.u[i] - last.v[j] < 2 * penalty]
    return _solved(clouds, np.concatenate([kept, _candidates(clouds, last.u, last.v, 0.0)]), f, g, penalty)


def _solved(clouds, keys, f, g, penalty):
    keys = np.unique(keys)
    i, j = keys // len(clouds.b), keys % len(clouds.b)
    costs = host_cost(clouds.x[i], clouds.y[j], metric=clouds.metric)
    mass, u, v = _flow(clouds, (i, j, costs), f + penalty, g + penalty)
    return Programme(keys, costs, u, v, _completed(clouds, i, j, mass))


def _candidates(clouds, f, g, threshold):
    """Pairs whose reduced cost c - f - g is at most the threshold, up to `CANDIDATES` for each point."""
    from .streamed import tightest

    n, m = len(clouds.a), len(clouds.b)
    with jax.enable_x64(True):
        x, y, first, second = (jnp.asarray(v) for v in (clouds.x, clouds.y, f, g))
        j, by_row = tightest(x, y, second, metric=clouds.metric, k=min(CANDIDATES, m))
        i, by_column = tightest(y, x, first, metric=clouds.metric, k=min(CANDIDATES, n))
        j, by_row, i, by_column = (np.asarray(v) for v in (j, by_row, i, by_column))
    rows, columns = np.arange(n)[:, None] * m + j, i * m + np.arange(m)[:, None]
    return np.concatenate([rows[by_row - f[:, None] <= threshold], columns[by_column - g[:, None] <= threshold]])


def _flow(clouds, pairs, skip_a, skip_b):
    """min c.mass over plans on the pairs, where leaving a unit of x_i or y_j unmoved costs skip_a_i, skip_b_j."""
    i, j, c = pairs
    n, m = len(clouds.a), len(clouds.b)
    rows = np.concatenate([i, np.arange(n), np.full(m, n), [n]])
    columns = np.concatenate([j, np.full(n, m), np.arange(m), [m]])
    costs = np.concatenate([c, skip_a, skip_b, [0.0]])
    a, b = np.append(clouds.a, 1.0), np.append(clouds.b, 1.0)
    ot = exact_solver()
    if ot is not None:
        table = sps.coo_matrix((costs, (rows, columns)), shape=(n + 1, m + 1))
        plan, log = ot.emd(a, b, table, numItermax=10**9, log=True, center_dual=False)
        flow = sps.csr_matrix(plan)
        mass = np.asarray(flow[i, j]).ravel()
        u, v = log["u"], log["v"]
    else:
        e = np.arange(len(rows))
        one = np.ones(len(rows))
        incidence = sps.csr_matrix(
            (np.tile(one, 2), (np.concatenate([rows, n + 1 + columns]), np.tile(e, 2))), shape=(n + m + 2, len(rows))
        )
        out = linprog(costs, A_eq=incidence[:-1], b_eq=np.concatenate([a, b])[:-1], method="highs")
        mass, dual = out.x[: len(i)], np.append(out.eqlin.marginals, 0.0)
        u, v = dual[: n + 1], dual[n + 1 :]
    return mass, u[:n] + v[m], v[:m] + u[n]


def _completed(clouds, i, j, mass):
    """Cost of the plan once the mass that the pairs left over is placed too."""
    mass = np.maximum(mass, 0)
    for index, w in ((i, clouds.a), (j, clouds.b)):
        held = np.bincount(index, mass, len(w))
        mass = mass * np.where(held > w, w / np.where(held > 0, held, 1), 1)[index]
    total = clouds.coupling(i, j, mass)
    rest_a = np.maximum(clouds.a - np.bincount(i, mass, len(clouds.a)), 0)
    rest_b = np.maximum(clouds.b - np.bincount(j, mass, len(clouds.b)), 0)
    p, q = np.flatnonzero(rest_a > 1e-18), np.flatnonzero(rest_b > 1e-18)
    if len(p) == 0 or len(q) == 0:
        return total
    weight = max(rest_a[p].sum(), rest_b[q].sum())
    a, b = rest_a[p] / rest_a[p].sum(), rest_b[q] / rest_b[q].sum()
    ot = exact_solver()
    if ot is not None and len(p) * len(q) <= REST:
        return total + weight * ot.emd2(
            a, b, host_table(clouds.x[p], clouds.y[q], metric=clouds.metric), numItermax=10**9
        )
    axis = clouds.x.mean(axis=0) - clouds.y.mean(axis=0)
    s, t, plan = monotone(clouds.x[p] @ axis, clouds.y[q] @ axis, a, b)
    return total + weight * clouds.coupling(p[s], q[t], plan)
