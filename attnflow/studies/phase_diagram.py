"""Phase diagrams: how clustered the tokens are over beta and time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .. import plots
from ..attention import Softmax
from ..figures import Line
from ..points import grid
from ..theory import equiangular
from .flows import CLOSE, first_crossing, one_flow, swept


@dataclass(frozen=True)
class PhaseDiagram:
    """Share of close pairs over beta and time, mean over seeds; V = B = I (phase diagrams of arXiv 2312.10794)."""

    kind: ClassVar = "phase_diagram"
    title: str = "Phase diagram"
    seed: int = 0
    attention: Literal["softmax", "exponential"] = "softmax"
    n: int = 32
    d: int = 2
    beta: tuple[float, ...] = (0.1, 9.0)
    betas: int = 90
    seeds: int = 256
    t1: float = 30.0
    times: int = 200
    rtol: float = 1e-3

    def __post_init__(self):
        if len(self.beta) != 2 or not 0 <= self.beta[0] < self.beta[1]:
            raise ValueError(f"beta must be an interval [low, high] with 0 <= low < high, got {list(self.beta)}.")

    @property
    def ts(self):
        return jnp.linspace(0.0, self.t1, self.times)

    def points(self):
        keys = jr.split(jr.key(self.seed), self.seeds)
        return grid(beta=np.linspace(self.beta[0], self.beta[1], self.betas), strengths=np.ones((1, 1)), key=keys)

    def flow(self) -> Callable:
        """One point: (beta, strengths, key, ts) to a trajectory."""
        return partial(one_flow, n=self.n, d=self.d, kind=self.attention, rtol=self.rtol)

    def results(self, out: Path, **options) -> Any:
        return swept(self, self.flow(), self.points(), shared=(self.ts,), store=out / "store", **options)

    def summary(self, results: Any) -> tuple[list[dict], list[Line], Any]:
        """Rows of the half-level edge, acceptance lines, and a function that draws."""
        share = results.close_pairs.mean("key").isel(strengths=0).transpose("beta", "time").values
        betas, ts = results.beta.values, np.asarray(self.ts)
        edge = np.array([first_crossing(ts, row) for row in share])
        rows = [
            {"beta": float(b), "t at one half": float(t)}
            for b, t in zip(betas[:: max(1, len(betas) // 12)], edge[:: max(1, len(betas) // 12)], strict=True)
        ]
        fallen = float(np.max(np.maximum.accumulate(share, axis=1) - share))
        lines = [Line("largest fall of the share in time", fallen, 0.0, fallen < 0.01)]
        curve = None
        if self.d >= 64 and self.attention == "softmax":  # tokens start nearly orthogonal: the equiangular equation
            small = betas <= 4
            curve = np.array(
                [float(equiangular.time(Softmax(b), jnp.ones(1), self.n, 0.0, CLOSE)) for b in betas[small]]
            )
            worst = float(np.max(np.abs(edge[small] / curve - 1)))
            lines.append(
                Line("edge against the equiangular curve, beta <= 4, largest deviation", worst, 0.02, worst <= 0.02)
            )

        def draw(ax):
            plots.phase_diagram(ax, ts, betas, share)
            if curve is not None:
                ax.plot(curve, betas[betas <= 4], color=plots.COLOURS[1], linestyle="--", label="equiangular")
                ax.legend()

        return rows, lines, draw
