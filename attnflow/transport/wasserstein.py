"""`w2`: the Wasserstein distance of two weighted clouds, exact where exact exists, else between certified bounds."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import restricted
from .circle import circle
from .clouds import Clouds, checked_clouds
from .exact import assignment, atoms, line, monotone, root, simplex
from .ground import Metric
from .interval import Interval

EXACT = {"atoms": atoms, "line": line, "circle": circle, "simplex": simplex, "assignment": assignment}
STAGE = 10  # Sinkhorn iterations per halving of epsilon
FAST = 1.5  # over-relaxation of Sinkhorn
COARSE = 2000  # points of the samples on which large clouds begin
FIRST = 1 / 16  # last epsilon on samples over the first
TIGHT = 0.1  # epsilon over the squared distance at which restricted programmes begin
ROUNDS = 8  # restricted programmes per stage
STALLED = 0.9  # ... while each brings the width below this share of the last
PLAN_ROUNDING = 1 + 1e-12  # a plan's cost is a sum of terms >= 0
SETTLED = 0.2  # epsilon is halved once marginal error times the squared distance is below this share of it
FLOOR = 1e-5  # epsilon over the squared distance below which float32 iterations stop helping


def w2(
    x,
    y,
    *,
    x_weights=None,
    y_weights=None,
    metric: Metric = "chordal",
    method: str | None = None,
    tolerance: float = 1e-3,
    iterations: int = 1000,
    refine: bool = True,
) -> Interval:
    r"""Quadratic Wasserstein distance $W_2(\sum_i a_i\delta_{x_i}, \sum_j b_j\delta_{y_j})$ as an `Interval`.

    $W_2^2 = \min_P \sum_{ij} P_{ij} c(x_i, y_j)$ over plans P with marginals a and b; c is $|x-y|^2$ (chordal) or the
    squared angle (geodesic). Costs, bounds and exact solvers are float64 whatever the dtype of the points. The first that
    applies is taken:

    - two atoms (any metric and dimension): sorting; a chordal target on a line: sorting;
    - d = 2, geodesic: shift search, $O(n \log n)$ (`attnflow.transport.circle`; for the chordal metric no shift is optimal);
    - up to 25 million pairs: network simplex of POT (`pip install attnflow[exact]`), or without it linear assignment for
      equally many points of equal weight;
    - else Sinkhorn in row blocks, $O(n + m)$ memory. Lower bound: the dual value of potentials made feasible by a
      c-transform. Upper bound: the cost of a plan with the exact marginals. Both hold for every potential, so they hold
      whether Sinkhorn converged or not. epsilon is halved until the relative width is at most `tolerance` or `iterations`
      are spent; `refine` closes the interval by exact programmes on the nearly tight pairs.

    For a host only: under jit see `sinkhorn_interval`, `sinkhorn_divergence`, `w2_to`.

    **Arguments:**

    - `x`, `y`: (n, d) and (m, d). The geodesic metric needs unit rows; it divides rounding off.
    - `x_weights`: default 1/n. `y_weights`: default those of x where m = n, else 1/m.
    - `method`: one of 'atoms', 'line', 'circle', 'simplex', 'assignment', 'sinkhorn'; None chooses.
    """
    clouds = checked_clouds(x, y, x_weights, y_weights, metric=metric)
    if not tolerance > 0 or iterations < 1:
        raise ValueError(f"`tolerance` must be > 0 and `iterations` >= 1, got {tolerance} and {iterations}.")
    if method is not None and method not in (*EXACT, "sinkhorn"):
        raise ValueError(f"`method` must be one of {[*EXACT, 'sinkhorn']}, got {method!r}.")
    found = None
    if clouds.paired and np.array_equal(clouds.x, clouds.y):
        found = Interval(0.0, 0.0, "equal clouds", exact=True)
    for name in EXACT if method is None else {method} & set(EXACT):
        found = EXACT[name](clouds) if found is None else found
    if found is None and method in EXACT:
        raise ValueError(f"method={method!r} does not apply to these clouds or is not installed; leave `method` out.")
    if found is None:
        found = _sinkhorn(clouds, tolerance, iterations, refine)
    return Interval(
        np.float64(found.lower),
        np.float64(found.upper),
        found.method,
        found.reason,
        exact=found.exact,
        converged=found.converged,
        epsilon=found.epsilon,
        iterations=found.iterations,
        quantum=clouds.quantum,
    )


class Bracket(NamedTuple):
    """Bounds of the squared distance, with the potentials that gave the lower one."""

    lower: float
    upper: float
    f: np.ndarray
    g: np.ndarray

    @property
    def relative_width(self) -> float:
        return 1 - root(self.lower) / root(self.upper) if self.upper > 0 else 0.0


def certify(clouds: Clouds, g: np.ndarray, *, epsilon: float | None = None) -> Bracket:
    """Bounds in float64 from any g whatever; with epsilon also the upper bound of the plan that they stand for."""
    from .streamed import lower_bound, upper_bound

    g = np.nan_to_num(np.asarray(g, np.float64), nan=0.0, posinf=clouds.largest, neginf=-clouds.largest)
    with jax.enable_x64(True):
        points = [jnp.asarray(v) for v in (clouds.x, clouds.y, clouds.a, clouds.b, g)]
        lower, f, feasible = lower_bound(*points, metric=clouds.metric)
        upper = math.inf
        if epsilon is not None:
            upper = float(upper_bound(*points, epsilon=jnp.asarray(float(epsilon)), metric=clouds.metric))
        return Bracket(float(lower), upper, np.asarray(f), np.asarray(feasible))


def _sinkhorn(clouds: Clouds, tolerance: float, iterations: int, refine: bool) -> Interval:
    best = _first_bracket(clouds)
    spent, epsilon, state, error = 0, best.upper, None, 0.0
    refine = refine and restricted.available(clouds)

    def close(reason):
        reason = f"{reason}relative width {best.relative_width:.1e}"
        done = best.relative_width <= tolerance
        bounds = root(best.lower), root(best.upper)
        return Interval(*bounds, "sinkhorn", reason, converged=done, epsilon=epsilon, iterations=spent)

    while best.relative_width > tolerance:
        if spent + STAGE > iterations:
            return close(f"budget of {iterations} iterations spent: ")
        if epsilon < FLOOR * best.upper:
            return close("epsilon at the floor of float32: ")
        if error * best.upper <= epsilon * SETTLED:
            epsilon = epsilon / 2
        if state is None:
            epsilon, state = _coarse(clouds, epsilon)
        state, error = _stage(clouds, state, epsilon)
        spent += STAGE
        best = _better(best, certify(clouds, state[1], epsilon=epsilon))
        if refine and epsilon <= TIGHT * best.upper and best.relative_width > tolerance:
            best = _refined(clouds, best, epsilon, tolerance)
    return close("")


def _coarse(clouds, epsilon):
    """A start for large clouds: the first stages on samples of them, their potential extended to all points."""
    from .streamed import extension

    n, m = len(clouds.a), len(clouds.b)
    state = np.zeros(n, np.float32), np.zeros(m, np.float32)
    if max(n, m) <= COARSE:
        return epsilon, state
    generator = np.random.default_rng(0)
    i, j = (np.sort(generator.choice(k, min(k, COARSE), replace=False)) for k in (n, m))
    a, b = (w / w.sum() for w in (clouds.a[i], clouds.b[j]))
    sample = clouds._replace(x=clouds.x[i], y=clouds.y[j], a=a, b=b)
    last = epsilon * FIRST
    state = np.zeros(len(i), np.float32), np.zeros(len(j), np.float32)
    while epsilon > last:
        epsilon = epsilon / 2
        state, _ = _stage(sample, state, epsilon)
    x, y, log_b, scale = (np.asarray(v, np.float32) for v in (clouds.x, sample.y, np.log(b), epsilon))
    f = np.asarray(extension(x, y, log_b, state[1], epsilon=scale, metric=clouds.metric))
    return epsilon, (f, np.zeros(m, np.float32))


def _first_bracket(clouds):
    """Bounds without Sinkhorn: every point to its nearest; the identity and a monotone rearrangement as plans."""
    turned = certify(clouds.swapped(), 0 * clouds.a)
    best = _better(certify(clouds, 0 * clouds.b), turned._replace(f=turned.g, g=turned.f))
    pooled = np.concatenate([clouds.x, clouds.y])
    axis = np.linalg.eigh(np.cov(pooled.T).reshape(2 * (clouds.x.shape[1],)))[1][:, -1]
    upper = clouds.coupling(*monotone(clouds.x @ axis, clouds.y @ axis, clouds.a, clouds.b))
    if clouds.paired:
        rows = np.arange(len(clouds.a))
        upper = min(upper, clouds.coupling(rows, rows, clouds.a))
    return best._replace(upper=upper * PLAN_ROUNDING)


def _better(best, other):
    upper = min(best.upper, other.upper)
    return (other if other.lower > best.lower else best)._replace(upper=upper)


def _stage(clouds, state, epsilon):
    """One stage of Sinkhorn in float32: its potentials need not be right, only good. Returns (f, g), marginal error."""
    from .streamed import stage

    x, y, a, b = (np.asarray(v, np.float32) for v in (clouds.x, clouds.y, clouds.a, clouds.b))
    for relaxation in (FAST, 1.0):
        *new, error = stage(
            *(x, y, np.log(a), np.log(b), state),
            epsilon=np.float32(epsilon),
            metric=clouds.metric,
            iterations=STAGE,
            relaxation=relaxation,
        )
        if np.isfinite(error):
            break
    return tuple(np.asarray(v) for v in new), float(error)


def _refined(clouds, best, penalty, tolerance):
    """`best` after restricted programmes around its potentials, until they close or stop helping."""
    programme = restricted.first(clouds, best.f, best.g, penalty=penalty)
    for _ in range(ROUNDS):
        width = best.relative_width
        best = _better(best, certify(clouds, programme.v)._replace(upper=programme.upper * PLAN_ROUNDING))
        if best.relative_width <= tolerance or best.relative_width > STALLED * width:
            break
        programme = restricted.grown(clouds, programme, best.f, best.g, penalty=penalty)
    return best
