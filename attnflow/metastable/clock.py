r"""The attention flow in log time: velocities of any size, and a clock in which nothing is stiff.

A metastable state drifts at rates like $e^{-\beta g}$ and then collapses at rates of order one, so neither t nor $\ln t$ suits
both. With $\Lambda$ the fastest rate at which a token is pulled now and $\Lambda_0$ at the start, the clock s here has
$$dt = \frac{ds}{\Lambda + 1/(t + 1/\Lambda_0)},$$
physical time in units of $1/\Lambda$ while something moves, log time while everything waits. Only logarithms are kept,
$U = \ln(1 + \Lambda_0 t)$ for t and $\ln c_{ij}$ for the coefficients, so that $10^{-300}$ is a rate like any other.
"""

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import logsumexp
from jaxtyping import Array, Bool, Float

from .. import sphere
from ..attention import AbstractAttention, Softmax
from ..heads import AbstractHeads

State = tuple[Float[Array, "n d"], Float[Array, ""]]

RUNNING, CLOSE, FADED, REST, DONE, BROKEN = range(6)
NATURAL_STEP = 2.0  # longest step in units of 1/Lambda: within the stability region of the solvers used
AT_REST = 1e3  # units of rounding below which a velocity, in the scaled clock, is zero


class Flow(eqx.Module):
    r"""A field ready for log time, for tokens y in the `frame` in which it is simplest.

    `value` is (H, d) where the $V_h$ are diagonal in one orthonormal `frame` (None is the standard one), (H, d, d) else.
    A token with log-weight -inf is gone: it neither pulls nor moves. `alive` marks the eigendirections that still count.
    """

    heads: AbstractHeads
    attention: AbstractAttention
    frame: Float[Array, "d d"] | None
    value: Float[Array, "H d"] | Float[Array, "H d d"]
    alive: Bool[Array, " d"]
    log_weights: Float[Array, " n"]
    log_rate: Float[Array, ""]

    @property
    def present(self) -> Bool[Array, " n"]:
        return self.log_weights > -jnp.inf

    @property
    def pairs(self) -> Bool[Array, "n n"]:
        there = self.present
        return there[:, None] & there[None] & ~jnp.eye(len(there), dtype=bool)

    def velocity(self, state: State) -> State:
        r"""(dy/ds, dU/ds), of order one at most: $P_y \sum_h V_h \sum_{j \ne i} c_{ij}(y_j - y_i) + P_y\sum_h Z_i^h V_h y_i$.

        The second term, $Z_i = \sum_j c_{ij}$, is exactly 0 where the $V_h$ are multiples of the identity on the living
        directions, so the velocity is as accurate as the distances between tokens, however small the coefficients.
        """
        y, U = state
        y = sphere.retract(y)
        a, m, z = self.log_coefficients(y)
        log_ds = jnp.logaddexp(self.log_fastest(a, m, z), self.log_rate - U)
        a = a * jnp.exp(m - log_ds)[..., None]
        moved = a @ y[None] - jnp.sum(a, axis=-1, keepdims=True) * y[None]
        diagonal = self.value.ndim == 2
        push = jnp.einsum("hd,hnd->nd" if diagonal else "hde,hne->nd", self.value, moved)
        push = sphere.project(y, push + self._own(y, z - log_ds))
        return jnp.where(self.present[:, None], push, 0), jnp.exp(self.log_rate - U - log_ds)

    def log_coefficients(self, y) -> tuple[Float[Array, "H n n"], Float[Array, "H n"], Float[Array, "H n"]]:
        r"""(a, m, z): coefficients $c_{ij} = a_{ij} e^{m_i}$, $a \le 1$, of the other tokens, and $\ln\sum_j c_{ij}$ with j = i."""
        x = y if self.frame is None else y @ self.frame.T
        q, k = self.attention.scale(self.heads.query(x)), self.heads.keys(x)
        s = jnp.einsum("hnk,hmk->hnm" if k.ndim == 3 else "hnk,mk->hnm", q, k) + self.log_weights[None, None]
        others = jnp.where(self.pairs[None], s, -jnp.inf)
        m = jnp.maximum(jnp.max(others, axis=-1), float(jnp.finfo(s.dtype).min) / 4)
        a = jnp.exp(others - m[..., None])
        z = jnp.logaddexp(jnp.diagonal(s, axis1=1, axis2=2), m + jnp.log(jnp.sum(a, axis=-1)))
        z = jnp.where(self.present[None], z, 0)
        return (a, m - z, jnp.zeros_like(z)) if isinstance(self.attention, Softmax) else (a, m, z)

    def log_fastest(self, a, m, z) -> Float[Array, ""]:
        r"""$\ln\Lambda$: a smooth maximum of the pulls of others on a token, and the pull of the anisotropic $V_h$."""
        v = self.value
        size = jnp.max(jnp.abs(v.reshape(len(v), -1)), axis=-1)
        pull = logsumexp(m + jnp.log(jnp.sum(a, axis=-1)) + jnp.log(size)[:, None], axis=0)
        if v.ndim == 2:
            spread = _over(self.alive, v, jnp.max, -jnp.inf) - _over(self.alive, v, jnp.min, jnp.inf)
        else:
            spread = jnp.max(jnp.abs(_deviator(v)), axis=(1, 2))
        own = jnp.max(jnp.where(self.present[None], z, -jnp.inf) + jnp.log(spread)[:, None])
        return jnp.logaddexp(logsumexp(8 * pull) / 8, own)

    def _own(self, y, log_scale):
        """The tokens' pull on themselves, less a multiple of the token."""
        if self.value.ndim == 3:
            return jnp.einsum("hde,hn,ne->nd", _deviator(self.value), jnp.exp(log_scale), y)
        top = _over(self.alive, self.value, jnp.max, -jnp.inf)
        v = jnp.where(self.alive[None], self.value - top[:, None], 0)
        scale = jnp.exp(jnp.where(jnp.any(v != 0, axis=-1)[:, None], log_scale, 0))
        lam = jnp.sum(scale[..., None] * v[:, None], axis=0)
        return jnp.where(self.alive[None], (lam - _over(self.alive, lam, jnp.max, -jnp.inf)[:, None]) * y, 0)

    def log_time(self, U):
        r"""$\ln t$ from $U = \ln(1 + \Lambda_0 t)$, in float64; -inf at t = 0."""
        U = np.asarray(U, np.float64)
        with np.errstate(divide="ignore"):
            small = np.log(np.expm1(np.minimum(U, 40.0)))
        return np.where(U < 40, small, U) - float(self.log_rate)

    def clock(self, log_t: float) -> float:
        """U at a log time."""
        return float(np.logaddexp(0.0, log_t + float(self.log_rate)))


def _over(alive, v, reduce, blank):
    return reduce(jnp.where(alive[None], v, blank), axis=-1)


def _deviator(v):
    d = v.shape[-1]
    return v - (jnp.trace(v, axis1=1, axis2=2) / d)[:, None, None] * jnp.eye(d, dtype=v.dtype)[None]


class Limits(eqx.Module):
    r"""`merge`: distance below which approaching tokens are one; `fade`: size below which a dying component is 0; `error`:
    local error of U and, times `stiffness` $\kappa$, of the tokens (log rates move by $\beta|B|$ times what a token does); `last` U.
    """

    merge: Float[Array, ""]
    fade: Float[Array, ""]
    error: Float[Array, ""]
    stiffness: Float[Array, ""]
    last: Float[Array, ""]

    def norm(self, error):
        y, U = error
        return jnp.maximum(self.stiffness * jnp.max(jnp.abs(y)), jnp.abs(U))


class Path(eqx.Module):
    """Accepted steps: states after them in `y` and `U`, lengths `ds`, of which `count` are filled; then how to go on."""

    y: Float[Array, "K n d"]
    U: Float[Array, " K"]
    ds: Float[Array, " K"]
    count: Array
    tries: Array
    state: State
    dU: Float[Array, ""]
    near: Bool[Array, "n n"]
    gone: Bool[Array, " d"]
    next_ds: Float[Array, ""]
    memory: tuple
    stop: Array


def touching(flow: Flow, y, dy, tolerance) -> Bool[Array, "n n"]:
    """Pairs of tokens nearer than the tolerance and not receding."""
    gap = y[:, None] - y[None]
    closing = jnp.sum(gap * (dy[:, None] - dy[None]), axis=-1) <= 0
    return flow.pairs & closing & (jnp.sum(gap * gap, axis=-1) < tolerance**2)


def fading(flow: Flow, y, dy, tolerance) -> Bool[Array, " d"]:
    """Living eigendirections in which every token has all but lost its component, and gains none."""
    small = (jnp.abs(y) < tolerance) & (y * dy <= 0) | ~flow.present[:, None]
    return flow.alive & jnp.all(small, axis=0) & (flow.value.ndim == 2)


@eqx.filter_jit
def advance(flow: Flow, state: State, ds, limits: Limits, *, steps: int, solver: dfx.AbstractAdaptiveSolver) -> Path:
    """Up to `steps` accepted steps, ending with one after which tokens touch, a direction fades, or everything rests."""
    term = dfx.ODETerm(lambda s, state, flow: flow.velocity(state))
    order = solver.order(term) or 1
    controller = dfx.PIDController(rtol=limits.error, atol=limits.error, norm=limits.norm, pcoeff=0.2, icoeff=0.4)
    zero = jnp.zeros_like(ds)
    _, memory = controller.init(term, zero, ds, state, ds, flow, solver.func, order)

    def more(p):
        return (p.stop == RUNNING) & (p.count < steps) & (p.tries < 20 * steps)

    def step(p):
        start = solver.init(term, zero, p.next_ds, p.state, flow)
        new, error, *_ = solver.step(term, zero, p.next_ds, p.state, flow, start, made_jump=False)
        keep, left, right, _, memory, _ = controller.adapt_step_size(
            zero, p.next_ds, p.state, new, flow, error, order, p.memory
        )
        keep = jnp.asarray(keep)
        y, U = jax.tree.map(lambda a, b: jnp.where(keep, a, b), (sphere.retract(new[0]), new[1]), p.state)
        dy, dU = flow.velocity((y, U))
        near, gone = touching(flow, y, dy, limits.merge), fading(flow, y, dy, limits.fade)
        still = jnp.max(jnp.abs(dy)) < AT_REST * jnp.finfo(dy.dtype).eps
        found = [
            (~jnp.isfinite(right), BROKEN),
            (~keep, RUNNING),
            (limits.last <= U, DONE),
            (jnp.any(near), CLOSE),
            (jnp.any(gone), FADED),
            ((still & (dU < 0.5)) | jnp.all(dy == 0), REST),
        ]
        # A rejected step writes into the slot that the next accepted one takes.
        return Path(
            y=p.y.at[p.count].set(y),
            U=p.U.at[p.count].set(U),
            ds=p.ds.at[p.count].set(p.next_ds),
            count=p.count + keep.astype(p.count.dtype),
            tries=p.tries + 1,
            state=(y, U),
            dU=dU,
            near=near,
            gone=gone,
            next_ds=jnp.minimum(right - left, NATURAL_STEP / (1.05 - dU)),
            memory=memory,
            stop=jnp.select([c for c, _ in found], [jnp.asarray(k) for _, k in found], RUNNING),
        )

    y, _ = state
    n, d = y.shape
    none = jnp.zeros((), int)
    first = Path(
        y=jnp.zeros((steps, n, d), y.dtype),
        U=jnp.zeros(steps, y.dtype),
        ds=jnp.zeros(steps, y.dtype),
        count=none,
        tries=none,
        state=state,
        dU=jnp.ones_like(ds),
        near=jnp.zeros((n, n), bool),
        gone=jnp.zeros(d, bool),
        next_ds=ds,
        memory=memory,
        stop=none,
    )
    return jax.lax.while_loop(more, step, first)


@eqx.filter_jit
def started(flow: Flow, y: Float[Array, "n d"], tolerance) -> tuple[Flow, Bool[Array, "n n"]]:
    """The flow with its first rate, and the pairs of tokens that touch from the start."""
    rate = flow.log_fastest(*flow.log_coefficients(y))
    flow = eqx.tree_at(lambda f: f.log_rate, flow, jnp.where(jnp.isfinite(rate), rate, 0))
    return flow, touching(flow, y, flow.velocity((y, jnp.zeros_like(rate)))[0], tolerance)


@eqx.filter_jit
def sampled(
    flow: Flow, state: State, ds, nodes: Float[Array, " M"], *, solver: dfx.AbstractAdaptiveSolver
) -> tuple[Float[Array, "M n d"], Float[Array, " M"]]:
    """States (M, n, d) and (M,) within one step of length `ds`, at these fractions of it."""
    term = dfx.ODETerm(lambda s, state, flow: flow.velocity(state))
    zero = jnp.zeros_like(ds)
    start = solver.init(term, zero, ds, state, flow)
    _, _, dense, *_ = solver.step(term, zero, ds, state, flow, start, made_jump=False)
    y, U = jax.vmap(solver.interpolation_cls(t0=zero, t1=ds, **dense).evaluate)(nodes * ds)
    return jax.vmap(sphere.retract)(y), U


def growth_rates(flow: Flow, state: State) -> np.ndarray:
    r"""Eigenvalues of the linearised flow of the present tokens on the sphere, in units of $\Lambda$."""
    there = np.flatnonzero(np.asarray(flow.present))
    y = state[0][there]
    full = eqx.tree_at(lambda f: (f.log_weights, f.alive), flow, (flow.log_weights[there], jnp.ones_like(flow.alive)))
    jacobian = np.asarray(_jacobian(full, y, state[1]))
    eye = np.broadcast_to(np.eye(y.shape[1]), (len(y), y.shape[1], y.shape[1]))
    tangent = np.linalg.qr(np.concatenate([np.asarray(y)[..., None], eye], axis=-1))[0][..., 1:]
    reduced = np.einsum("nda,ndme,meb->namb", tangent, jacobian, tangent)
    return np.linalg.eigvals(reduced.reshape([len(y) * (y.shape[1] - 1)] * 2))


@eqx.filter_jit
def _jacobian(flow, y, U):
    return jax.jacfwd(lambda y: flow.velocity((y, U))[0])(y)
