"""Passes over all pairs of two clouds in row blocks, O(n + m) memory: Sinkhorn by ott-jax, c-transforms, rounded plans."""

import functools
import warnings
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jss
from jaxtyping import Array, Float

from .clouds import log_weights
from .ground import ROUNDING, Metric, cost_table

with warnings.catch_warnings():  # ott-jax imports a library that announces its end
    warnings.simplefilter("ignore", DeprecationWarning)
    from ott.geometry.epsilon_scheduler import Epsilon
    from ott.geometry.geometry import Geometry
    from ott.problems.linear.linear_problem import LinearProblem
    from ott.solvers.linear.acceleration import Momentum
    from ott.solvers.linear.sinkhorn import Sinkhorn

BLOCK = 2**20  # pairs held at a time


@contextmanager
def lenient():
    """ott-jax is not written for strict promotion of ranks and dtypes."""
    with ExitStack() as stack:
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        yield


def by_rows(f: Callable, x: Any, m: int) -> Any:
    """Stack f(row) over the rows of x, as many at a time as fit in a block with m columns; f takes and returns blocks."""
    rows = jax.tree.leaves(x)[0].shape[0]
    size = max(1, min(rows, BLOCK // m))
    blocks = -(-rows // size)
    if blocks == 1:
        return f(x)

    def fold(v):
        padded = jnp.concatenate([v, jnp.repeat(v[-1:], blocks * size - rows, axis=0)])
        return padded.reshape(blocks, size, *v.shape[1:])

    out = jax.lax.map(f, jax.tree.map(fold, x))
    return jax.tree.map(lambda v: v.reshape(blocks * size, *v.shape[2:])[:rows], out)


@jax.tree_util.register_pytree_node_class
class StreamedGeometry(Geometry):
    """Geometry of ott-jax whose kernel is applied in row blocks: its own online mode does not run on current jax."""

    def __init__(self, x, y, epsilon, metric: Metric):
        super().__init__(epsilon=epsilon)
        self.x, self.y, self.metric = x, y, metric

    @property
    def shape(self):
        return self.x.shape[0], self.y.shape[0]

    @property
    def dtype(self):
        return self.x.dtype

    def apply_lse_kernel(self, f, g, eps, vec=None, axis=0):
        """eps log sum exp((f + g - C)/eps) over one axis, less the potential of the other."""
        if vec is not None:
            raise NotImplementedError("The streamed geometry applies no weights.")
        x, y, inner = (self.x, self.y, g) if axis == 1 else (self.y, self.x, f)

        def block(rows):
            return eps * jss.logsumexp((inner - cost_table(rows, y, metric=self.metric)) / eps, axis=1)

        return by_rows(block, x, y.shape[0]), jnp.ones(1, x.dtype)

    def tree_flatten(self):
        return (self.x, self.y, self._epsilon_init), {"metric": self.metric}

    @classmethod
    def tree_unflatten(cls, aux_data, children):
        return cls(*children, **aux_data)


def potentials(
    x: Float[Array, "n d"],
    y: Float[Array, "m d"],
    log_a: Float[Array, " n"],
    log_b: Float[Array, " m"],
    start: tuple[Float[Array, " n"], Float[Array, " m"]],
    *,
    epsilon: Float[Array, ""],
    metric: Metric,
    iterations: int,
    ratio: float = 1.0,
    relaxation: float = 1.0,
    symmetric: bool = False,
) -> tuple[Float[Array, " n"], Float[Array, " m"], Float[Array, ""]]:
    r"""(f, g, marginal error) of the plan $a_i b_j e^{(f_i + g_j - c_{ij})/\epsilon}$ after Sinkhorn iterations of ott-jax.

    The first iteration is taken at `ratio` times epsilon, half of them on the way down to it. `relaxation` between 0 and 2
    multiplies each step. `symmetric`: both potentials at once, so that equal clouds get bitwise equal potentials.
    """
    epsilon = jnp.asarray(epsilon, x.dtype)
    decay = ratio ** (-2 / iterations) if ratio > 1 else 1.0
    geometry = StreamedGeometry(x, y, Epsilon(epsilon, init=ratio, decay=decay), metric)
    solver = Sinkhorn(
        threshold=0.0,
        inner_iterations=iterations,
        min_iterations=iterations,
        max_iterations=iterations,
        implicit_diff=None,
        parallel_dual_updates=symmetric,
        momentum=Momentum(value=relaxation),
    )
    f0, g0 = start[0] + epsilon * log_a, start[1] + epsilon * log_b
    with lenient():
        out = solver(LinearProblem(geometry, a=jnp.exp(log_a), b=jnp.exp(log_b)), init=(f0, g0))
    f, g = (jnp.where(jnp.isfinite(v), v - epsilon * w, 0) for v, w in ((out.f, log_a), (out.g, log_b)))
    return f, g, jnp.asarray(out.errors)[-1]


def soft_transform(
    x: Float[Array, "n d"],
    y: Float[Array, "m d"],
    log_b: Float[Array, " m"],
    g: Float[Array, " m"],
    *,
    epsilon: Float[Array, ""],
    metric: Metric,
) -> Float[Array, " n"]:
    r"""$f(x) = -\epsilon\log\sum_j b_j e^{(g_j - c(x, y_j))/\epsilon}$, which extends a potential to any x; O(n + m) memory in reverse."""

    @jax.checkpoint
    def rows(block):
        c = cost_table(block, y, metric=metric)
        return -epsilon * jss.logsumexp((g[None] - c) / epsilon + log_b[None], axis=1)

    return by_rows(rows, x, y.shape[0])


def c_transform(
    x: Float[Array, "n d"], y: Float[Array, "m d"], g: Float[Array, " m"], *, metric: Metric
) -> Float[Array, " n"]:
    r"""$f_i = \min_j (c(x_i, y_j) - g_j)$: the largest f with $f_i + g_j \le c_{ij}$."""
    return by_rows(lambda rows: jnp.min(cost_table(rows, y, metric=metric) - g[None], axis=1), x, y.shape[0])


@functools.partial(jax.jit, static_argnames="metric")
def lower_bound(
    x: Float[Array, "n d"],
    y: Float[Array, "m d"],
    a: Float[Array, " n"],
    b: Float[Array, " m"],
    g: Float[Array, " m"],
    *,
    metric: Metric,
) -> tuple[Float[Array, ""], Float[Array, " n"], Float[Array, " m"]]:
    r"""(lower bound of $W_2^2$, f, g) from any g: $\langle a, f\rangle + \langle b, g\rangle$ with the feasible $f = g^c$, $g = f^c$.

    Rounding is taken off: a computed cost is within a factor $1 \pm (d + 16)\,\mathrm{eps}$ of the true one, a sum of n terms
    within n eps times the sum of their magnitudes. Points without weight constrain nothing.
    """
    unit = jnp.finfo(x.dtype).eps
    n, m, d = x.shape[0], y.shape[0], x.shape[1]
    g = jnp.where(b > 0, g, -jnp.inf)
    f = c_transform(x, y, g, metric=metric)
    g = c_transform(y, x, jnp.where(a > 0, f, -jnp.inf), metric=metric)
    value = jnp.sum(a * f) + jnp.sum(b * g)
    magnitude = jnp.sum(a * jnp.abs(f)) + jnp.sum(b * jnp.abs(g))
    loose = unit * ((n + m + d + ROUNDING) * magnitude + 4 * (jnp.max(jnp.abs(f)) + jnp.max(jnp.abs(g))))
    return jnp.maximum(value - loose, 0), f, g


@functools.partial(jax.jit, static_argnames="metric")
def upper_bound(
    x: Float[Array, "n d"],
    y: Float[Array, "m d"],
    a: Float[Array, " n"],
    b: Float[Array, " m"],
    g: Float[Array, " m"],
    *,
    epsilon: Float[Array, ""],
    metric: Metric,
) -> Float[Array, ""]:
    r"""Cost of a plan with the marginals a and b, near $a_i b_j e^{(f_i + g_j - c_{ij})/\epsilon}$, for any g: so $\ge W_2^2$.

    The rows of the kernel are normalised to a (so no exponential overflows and f is not needed), the columns that hold more
    than b are scaled down, and what is missing is added as a product (Altschuler, Weed, Rigollet 2017, Algorithm 2).
    Rounding is added: the marginals are off by less than (n + m) eps of the mass, which costs at most `largest` a unit.
    """
    unit = jnp.finfo(x.dtype).eps
    n, m, d = x.shape[0], y.shape[0], x.shape[1]
    log_b = log_weights(b)

    def plan(rows, mass):
        c = cost_table(rows, y, metric=metric)
        return c, mass[:, None] * jax.nn.softmax((g[None] - c) / epsilon + log_b[None], axis=1)

    size = max(1, min(n, BLOCK // m))
    pad = -n % size
    blocks = jnp.concatenate([x, jnp.repeat(x[-1:], pad, axis=0)]).reshape(-1, size, d)
    masses = jnp.concatenate([a, jnp.zeros(pad, a.dtype)]).reshape(-1, size)

    def columns(total, block):
        return total + jnp.sum(plan(*block)[1], axis=0), None

    held = jax.lax.scan(columns, jnp.zeros(m, b.dtype), (blocks, masses))[0]
    scale = jnp.where(held > b, b / jnp.where(held > 0, held, 1), 1)

    def row_sums(block):
        c, p = plan(*block)
        p = p * scale[None]
        return jnp.sum(p, axis=1), jnp.sum(p * c, axis=1)

    kept, spent = (v.reshape(-1)[:n] for v in jax.lax.map(row_sums, (blocks, masses)))
    missing, room = jnp.maximum(a - kept, 0), jnp.maximum(b - held * scale, 0)
    share = room / jnp.maximum(jnp.sum(room), jnp.finfo(b.dtype).tiny)
    price = by_rows(lambda rows: jnp.sum(cost_table(rows, y, metric=metric) * share[None], axis=1), x, m)
    total = jnp.sum(spent) + jnp.sum(missing * price)
    reach = sum(jnp.sqrt(jnp.max(jnp.sum(p * p, axis=1))) for p in (x, y)) if metric == "chordal" else jnp.pi
    return total * (1 + (n + m + d + ROUNDING) * unit) + (n + m + ROUNDING) * unit * reach**2


@functools.partial(jax.jit, static_argnames=("metric", "k"))
def tightest(x: Float[Array, "n d"], y: Float[Array, "m d"], g: Float[Array, " m"], *, metric: Metric, k: int):
    r"""The column of least $c_{ij} - g_j$ in each of k interleaved groups of columns, and that value: (n, k) each."""
    width = -(-y.shape[0] // k)
    fill = width * k - y.shape[0]
    padded = jnp.concatenate([y, jnp.repeat(y[-1:], fill, axis=0)])
    offset = jnp.concatenate([g, jnp.full(fill, -jnp.inf, g.dtype)])

    def block(rows):
        reduced = (cost_table(rows, padded, metric=metric) - offset[None]).reshape(len(rows), width, k)
        return jnp.argmin(reduced, axis=1) * k + jnp.arange(k)[None], jnp.min(reduced, axis=1)

    return by_rows(block, x, width * k)


@functools.partial(jax.jit, static_argnames=("metric", "iterations", "relaxation"))
def stage(x, y, log_a, log_b, start, *, epsilon, metric: Metric, iterations: int, relaxation: float):
    """`potentials` at one epsilon, compiled once for all its values."""
    return potentials(
        x, y, log_a, log_b, start, epsilon=epsilon, metric=metric, iterations=iterations, relaxation=relaxation
    )


@functools.partial(jax.jit, static_argnames="metric")
def extension(x, y, log_b, g, *, epsilon, metric: Metric):
    """`soft_transform`, compiled."""
    return soft_transform(x, y, log_b, g, epsilon=epsilon, metric=metric)
