r"""The three phases of the low-temperature flow (arXiv 2605.10931), read off a trajectory.

Concentration of $\rho_t$ on $\Pi_\#\rho_0$, the projection on the leading eigenspace of $VB^\top$; a metastable stay of length
about log beta; departure; and a terminal phase on the leading eigenspace of V.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

from .heads import AbstractHeads
from .theory import low_temperature
from .transport import w2


class Phases(NamedTuple):
    r"""Distances $W_2(\rho_t, \Pi_\#\rho_0)$ (T,), and when the flow is closest, leaves, and is terminal (NaN where it never is)."""

    distance: np.ndarray
    to_space: np.ndarray
    to_terminal: np.ndarray
    minimum: float
    t_min: float
    t_leave: float
    t_terminal: float

    @property
    def row(self) -> dict[str, float]:
        return {
            "min W2": self.minimum,
            "t_min": self.t_min,
            "t_leave": self.t_leave,
            "t_terminal": self.t_terminal,
            "min to space": float(self.to_space.min()),
        }


def phases(
    heads: AbstractHeads,
    ts,
    tokens,
    *,
    weights=None,
    leave: float = 0.5,
    terminal: float = 0.1,
) -> Phases:
    r"""Phases of saved tokens (T, n, d) of a one-head flow.

    `distance` is exact W2 (chordal); `to_space` is $\sqrt{2 - 2\sum w|P_1 x|}$, the distance to the projection of the law
    itself, which ignores mass that crossed the separatrix; `to_terminal` the same for the leading eigenspace of V. The flow
    leaves when `distance` exceeds `leave` after its minimum, and is terminal when `to_terminal` falls below `terminal`.
    """
    ts, tokens = np.asarray(ts), np.asarray(tokens)
    w = None if weights is None else jnp.asarray(weights)
    target = np.asarray(low_temperature.projection(heads, jnp.asarray(tokens[0])))
    distance = np.array([float(w2(x, target, x_weights=weights, y_weights=weights)) for x in tokens])
    to_space = np.array([float(low_temperature.zero_temperature_w2(heads, x, w)) for x in jnp.asarray(tokens)])
    to_terminal = _distance_to(leading_space(np.asarray(heads.dense(tokens.shape[-1]).value)[0]), tokens, weights)
    k = int(distance.argmin())
    return Phases(
        distance,
        to_space,
        to_terminal,
        float(distance[k]),
        float(ts[k]),
        first_time(ts, distance > leave, k),
        first_time(ts, to_terminal < terminal),
    )


class BoundFit(NamedTuple):
    r"""Theorem 1 with fitted constants: $W_2 \le K\,a(\beta)e^{C_1t} + D\,e^{-ct}$, $a(\beta) = \sqrt{\log(\beta+1)/\beta}$."""

    front: float
    growth: float
    start: float
    decay: float
    slack: float

    def __call__(self, beta: float, ts) -> np.ndarray:
        ts = np.asarray(ts)
        return self.front * _prefactor(beta) * np.exp(self.growth * ts) + self.start * np.exp(-self.decay * ts)

    def __str__(self):
        return (
            f"W2 <= {self.front:.3g} sqrt(log(beta+1)/beta) exp({self.growth:.3g} t) + {self.start:.3g} exp(-{self.decay:.3g} t)"
            f", on average {self.slack:.3g} times the distance"
        )


def fit_bound(betas: Sequence[float], ts, distances: Sequence[np.ndarray], *, until: Sequence[float]) -> BoundFit:
    r"""The tightest bound of the form of Theorem 1 (arXiv 2605.10931) that holds at every beta and time given.

    One $(K, C_1, D, c)$ for all curves, least in the mean over beta and $t \le$ `until` (the time each flow leaves) of
    log(bound / distance), and above every distance: the theorem leaves its constants open, so this is what its form can say of
    these curves, not a verification. `slack` is the geometric mean of bound / distance there. NaN in `until` stands for all times.
    """
    ts = np.asarray(ts, float)
    curves = np.array([np.asarray(w, float) for w in distances])
    if curves.shape != (len(betas), len(ts)):
        raise ValueError(f"`distances` must be {len(betas)} curves of {len(ts)} times, got shape {curves.shape}.")
    looked_at = ts[None] <= np.where(np.isnan(until), np.inf, np.asarray(until, float))[:, None]
    floor = max(float(curves.max()), 1e-300) * 1e-12  # a distance of 0 is met by any bound
    log_w = np.log(np.maximum(curves, floor))
    log_a = np.array([[np.log(_prefactor(beta))] for beta in betas])

    def log_shape(p):
        ratio, growth, decay = p
        return np.logaddexp(ratio + log_a + np.exp(growth) * ts, -np.exp(decay) * ts)

    def excess(p):
        gap = log_shape(p) - log_w
        return np.mean(gap[looked_at]) - gap.min()

    span = ts[-1] - ts[0]
    starts = [(r, np.log(g / span), np.log(c / span)) for r in (-4.0, 0.0) for g in (0.3, 3.0) for c in (3.0, 10.0)]
    options = {"maxiter": 4000, "xatol": 1e-8, "fatol": 1e-10}
    rates = (np.log(1e-3 / span), np.log(500 / span))  # e^{C_1 t} stays in range
    ends = [(-40.0, 40.0), rates, rates]
    fits = [minimize(excess, s, method="Nelder-Mead", bounds=ends, options=options) for s in starts]
    best = min(fits, key=lambda fit: fit.fun)
    scale = float(np.exp(-(log_shape(best.x) - log_w).min()))
    ratio, growth, decay = (float(v) for v in np.exp(best.x))
    return BoundFit(scale * ratio, growth, scale, decay, float(np.exp(best.fun)))


def _prefactor(beta):
    return np.sqrt(np.log1p(beta) / beta)


def leading_space(value, tolerance=1e-6):
    """Orthonormal basis of the real invariant space of the eigenvalues of largest real part (a plane for a complex pair)."""
    mu, vectors = np.linalg.eig(value)
    top = np.abs(mu.real - mu.real.max()) <= tolerance * max(1.0, np.abs(mu).max())
    span = np.concatenate([vectors[:, top].real, vectors[:, top].imag], axis=1)
    u, s, _ = np.linalg.svd(span, full_matrices=False)
    return u[:, s > 1e-8]


def _distance_to(space, tokens, weights):
    w = np.full(tokens.shape[1], 1 / tokens.shape[1]) if weights is None else np.asarray(weights)
    along = tokens @ space
    length = np.linalg.norm(along, axis=-1)
    rest = np.linalg.norm(tokens - along @ space.T, axis=-1)
    # 2 - 2 c = 2 s^2 / (1 + c) keeps its digits as c -> 1
    return np.sqrt((2 * rest**2 / (1 + length)) @ w)


def first_time(ts, hit, start=0):
    """The first time, from frame `start` on, at which `hit` is true; NaN where it never is."""
    later = np.flatnonzero(hit[start:])
    return float(ts[start + later[0]]) if later.size else float("nan")
