r"""The three phases of the low-temperature flow (arXiv 2605.10931), read off a trajectory.

Concentration of $\rho_t$ on $\Pi_\#\rho_0$, the projection on the leading eigenspace of $VB^\top$; a metastable stay of length
about log beta; departure; and a terminal phase on the leading eigenspace of V.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

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
    to_terminal = _distance_to(_leading_space(np.asarray(heads.dense(tokens.shape[-1]).value)[0]), tokens, weights)
    k = int(distance.argmin())
    return Phases(
        distance,
        to_space,
        to_terminal,
        float(distance[k]),
        float(ts[k]),
        _first(ts, distance > leave, k),
        _first(ts, to_terminal < terminal, 0),
    )


def _leading_space(value, tolerance=1e-6):
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


def _first(ts, hit, start):
    later = np.flatnonzero(hit[start:])
    return float(ts[start + later[0]]) if later.size else float("nan")
