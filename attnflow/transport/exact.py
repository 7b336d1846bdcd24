"""Exact solvers on the host, in float64: two atoms, a line, the network simplex, the assignment."""

import math
import warnings

import numpy as np
from scipy.optimize import linear_sum_assignment

from .clouds import Clouds
from .ground import Metric, host_cost, host_table
from .interval import Interval

OPTIMAL = 1e-9  # relative duality gap of the squared distance below which a plan counts as optimal
SMALL = 5000**2  # pairs up to which the table of costs is held (8 bytes each, five times over)
REFINEMENTS = 3
ROUNDING_OF_A_DUAL = 16 * np.finfo(float).eps


def exact_solver():
    """The module `ot` of POT, or None where it is not installed; imported late, because it takes seconds."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ot
    except ImportError:
        return None
    return ot


def root(value: float) -> float:
    return math.sqrt(max(value, 0.0))


def monotone(s: np.ndarray, t: np.ndarray, a: np.ndarray, b: np.ndarray):
    """The plan (i, j, mass) that moves the masses a at s to the masses b at t without crossings."""
    order, other = np.argsort(s, kind="stable"), np.argsort(t, kind="stable")
    u, v = np.cumsum(a[order]), np.cumsum(b[other])
    u[-1] = v[-1] = max(u[-1], v[-1])
    levels = np.sort(np.concatenate([u, v]), kind="stable")
    mass = np.diff(levels, prepend=0.0)
    middle = levels - mass / 2
    i, j = np.searchsorted(u, middle), np.searchsorted(v, middle)
    used = mass > 0
    return order[np.minimum(i, len(u) - 1)][used], other[np.minimum(j, len(v) - 1)][used], mass[used]


def two_points(y: np.ndarray, metric: Metric, tolerance: float):
    """(p, q, which rows are p, largest distance of a row to its point) where y lies on at most two points, else None."""
    p, q = y[0], y[np.argmax(host_cost(y, y[:1], metric=metric))]
    to_p, to_q = host_cost(y, p[None], metric=metric), host_cost(y, q[None], metric=metric)
    spread = root(np.max(np.minimum(to_p, to_q)))
    return (p, q, to_p <= to_q, spread) if spread <= tolerance else None


def atoms(clouds: Clouds) -> Interval | None:
    """W2 to a target on at most two points, by sorting c(x, p) - c(x, q): exact for every cost; None if there are more.

    Points that differ by rounding count as one, and the width carries their spread.
    """
    for x, y, a, b, metric, *_ in (clouds, clouds.swapped()):
        pair = two_points(y, metric, 8 * clouds.unit)
        if pair is None:
            continue
        p, q, is_p, spread = pair
        at_p, at_q = host_cost(x, p[None], metric=metric), host_cost(x, q[None], metric=metric)
        order = np.argsort(at_p - at_q, kind="stable")
        before = np.cumsum(a[order]) - a[order]
        to_p = np.clip(np.sum(b[is_p]) - before, 0, a[order])
        return _rounded(at_p[order] @ to_p + at_q[order] @ (a[order] - to_p), spread, "two atoms")
    return None


def line(clouds: Clouds) -> Interval | None:
    r"""Chordal W2 to a target on a straight line, by sorting $\langle x, v\rangle$; None where neither cloud is on one."""
    if clouds.metric != "chordal":
        return None
    for x, y, a, b, *_ in (clouds, clouds.swapped()):
        offset = y - y[0]
        v = offset[np.argmax(np.sum(offset**2, axis=1))]
        v = v / max(np.linalg.norm(v), np.finfo(float).tiny)
        spread = np.max(np.linalg.norm(offset - (offset @ v)[:, None] * v, axis=1))
        if spread <= 8 * clouds.unit:
            i, j, mass = monotone((x - y[0]) @ v, offset @ v, a, b)
            return _rounded(np.sum((x[i] - y[j]) ** 2, axis=1) @ mass, 2 * spread, "sorting on a line")
    return None


def _rounded(squared, spread, method):
    value = root(squared)
    return Interval(max(value - spread, 0.0), value + spread, method, exact=True)


def simplex(clouds: Clouds) -> Interval | None:
    """Network simplex on the table of costs, its plan checked against its own dual; None where POT is missing.

    The solver's potentials drift by rounding; where the gap shows, it is run again on the reduced costs.
    """
    ot = exact_solver()
    if ot is None or len(clouds.a) * len(clouds.b) > SMALL:
        return None
    table = host_table(clouds.x, clouds.y, metric=clouds.metric)
    nearest = np.min(table, axis=1)
    lower, upper, f, g = clouds.a @ nearest, np.inf, 0.0 * clouds.a, 0.0 * clouds.b
    for _ in range(REFINEMENTS):
        reduced = table - f[:, None] - g if np.any(g) else table
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan, log = ot.emd(clouds.a, clouds.b, reduced, numItermax=10**9, log=True)
        upper = min(upper, float(np.vdot(plan, table)))
        g = g + log["v"]
        f = np.min(table - g, axis=1)
        g = np.min(table - f[:, None], axis=0)
        lower = max(lower, clouds.a @ f + clouds.b @ g)
        if upper - lower <= OPTIMAL * upper:
            return Interval(root(upper), root(upper), "network simplex", exact=True)
    slack = ROUNDING_OF_A_DUAL * (np.max(np.abs(f)) + np.max(np.abs(g)))
    closed = bool(upper - lower <= ROUNDING_OF_A_DUAL * clouds.largest)
    reason = "to rounding" if closed else "stopped before the optimum"
    return Interval(root(lower - slack), root(upper), "network simplex", reason, exact=closed, converged=closed)


def assignment(clouds: Clouds) -> Interval | None:
    """Linear assignment (Jonker-Volgenant in scipy) for equally many points of equal weights; None for others."""
    n = len(clouds.a)
    if n != len(clouds.b) or n * n > SMALL or np.ptp(np.r_[clouds.a, clouds.b]) > 1e-12 / n:
        return None
    table = host_table(clouds.x, clouds.y, metric=clouds.metric)
    i, j = linear_sum_assignment(table)
    value = root(table[i, j] @ clouds.a[i])
    return Interval(value, value, "assignment", exact=True)
