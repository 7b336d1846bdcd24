"""How close the low-temperature flow comes to the projection of its start, against beta (Theorem 1, arXiv 2605.10931)."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from .. import plots, sphere, transport
from ..attention import Softmax
from ..field import AttentionField
from ..figures import Line
from ..heads import Heads
from ..phases import first_time, fit_bound
from ..points import grid
from ..solve import solve
from ..specs import CosineDensity
from ..theory import low_temperature
from .flows import swept


def closest(beta, ts, x0, w, atoms, masses, score, value, *, rtol: float):
    r"""One point: exact $W_2(\rho_t, \Pi_\#\rho_0)$ along the flow from weighted nodes, the target being two atoms."""
    field = AttentionField(Heads(score, value), Softmax(beta), weights=w)
    seen = {"distance": lambda f, x: transport.two_atoms_distance(x, atoms, masses, weights=f.token_weights(x))}
    return solve(field, x0, ts, observe=seen, rtol=rtol, atol=1e-3 * rtol, throw=False)


@dataclass(frozen=True)
class BetaSlope:
    r"""The least $W_2(\rho_t, \Pi_\#\rho_0)$ over t against beta, on the circle with V = diag(1, `value`), B = diag(1, `score`)."""

    kind: ClassVar = "beta_slope"
    title: str = "Concentration against beta"
    n: int = 1600
    density: CosineDensity = field(default_factory=lambda: CosineDensity(0.3, 0.7))
    smallest: float = 1e-6
    score: float = 4.0
    value: float = 0.5
    betas: tuple[float, ...] = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
    leave: float = 0.5
    t1: float = 30.0
    times: int = 241
    rtol: float = 1e-7

    def __post_init__(self):
        if len(self.betas) < 2 or min(self.betas) <= 0:
            raise ValueError(f"betas must be at least two positive numbers for a slope, got {list(self.betas)}.")
        if not 0 < self.value < 1 < self.score * self.value:
            raise ValueError("value must lie in (0, 1) and score * value above 1: V leads with e1 and V B^T with e2.")

    @property
    def ts(self):
        return jnp.linspace(0.0, self.t1, self.times)

    def points(self):
        return grid(beta=np.array(self.betas))

    def shared(self) -> tuple:
        """What every point takes: times, nodes, the two atoms of the projected law, the head."""
        x0, w = sphere.circle_quadrature(self.density, self.n, refine=(0.0, np.pi), smallest=self.smallest)
        up = jnp.sum(jnp.where(x0[:, 1] > 0, w, 0))
        atoms = jnp.asarray([[0.0, 1.0], [0.0, -1.0]])
        score, value = jnp.diag(jnp.asarray([1.0, self.score])), jnp.diag(jnp.asarray([1.0, self.value]))
        return self.ts, x0, w, atoms, jnp.stack([up, 1 - up]), score[None], value[None]

    def results(self, out: Path, **options) -> Any:
        run = partial(closest, rtol=self.rtol)
        return swept(self, run, self.points(), shared=self.shared(), store=out / "store", **options)

    def summary(self, results: Any) -> tuple[list[dict], list[Line], Any]:
        """Rows of minima, the fitted slope, and what the form of Theorem 1 gives with fitted constants."""
        curves, ts, betas = results.distance.transpose("beta", "time").values, np.asarray(self.ts), np.array(self.betas)
        minima, when = curves.min(axis=1), ts[curves.argmin(axis=1)]
        left = np.array([first_time(ts, w > self.leave, int(np.argmin(w))) for w in curves])
        rate = float(low_temperature.projection_rate(Heads(*self.shared()[-2:])))
        rows = [
            {"beta": b, "min W2": float(m), "t_min": float(t), "t_leave": float(gone)}
            for b, m, t, gone in zip(self.betas, minima, when, left, strict=True)
        ]
        slope, height = np.polyfit(np.log(betas), np.log(minima), 1)
        straight = float(np.corrcoef(np.log(betas), left)[0, 1])
        bound = fit_bound(self.betas, ts, list(curves), until=left.tolist())
        lines = [
            Line("slope of ln min W2 in ln beta", float(slope), -0.5, bool(abs(slope + 0.5) < 0.02)),
            Line("correlation of departure time and ln beta", straight, 1.0, straight > 0.999),
            Line(
                "decay of the fitted bound, the rate of Corollary 2", bound.decay, rate, abs(bound.decay - rate) < 0.02
            ),
        ]

        def draw(ax):
            ax.loglog(betas, minima, "o", label="least distance")
            ax.loglog(betas, np.exp(height) * betas**slope, label=f"slope {slope:.3f}")
            ax.loglog(
                betas, [bound(b, ts).min() for b in betas], "--", color=plots.COLOURS[2], label="Theorem 1, fitted"
            )
            ax.set_xlabel(r"$\beta$")
            ax.set_ylabel(r"$\min_t W_2(\rho_t, \Pi_\#\rho_0)$")
            ax.legend()

        return rows, lines, draw
