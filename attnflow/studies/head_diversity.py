"""Two heads of one total strength: whether unequal ones cluster faster."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ..attention import Softmax
from ..figures import Line
from ..points import grid
from ..theory import equiangular
from .flows import first_crossing, one_flow, swept


@dataclass(frozen=True)
class HeadDiversity:
    """Two scalar heads of fixed mean strength and growing spread, from nearly orthonormal tokens (d >= n)."""

    kind: ClassVar = "head_diversity"
    title: str = "Diverse heads"
    seed: int = 0
    n: int = 8
    d: int = 8
    beta: float = 1.0
    mean: float = 5.0
    spreads: tuple[float, ...] = (0.0, 1.0, 2.0, 3.0, 4.0, 4.4, 4.8)
    seeds: int = 32
    t1: float = 30.0
    times: int = 301
    rtol: float = 1e-6

    @property
    def ts(self):
        return jnp.linspace(0.0, self.t1, self.times)

    def points(self):
        strengths = np.array([[self.mean - s, self.mean + s] for s in self.spreads])
        return grid(beta=np.array([self.beta]), strengths=strengths, key=jr.split(jr.key(self.seed), self.seeds))

    def flow(self) -> Callable:
        """One point: (beta, strengths, key, ts) to a trajectory."""
        return partial(one_flow, n=self.n, d=self.d, kind="softmax", rtol=self.rtol, orthogonal=True)

    def results(self, out: Path, **options) -> Any:
        return swept(self, self.flow(), self.points(), shared=(self.ts,), store=out / "store", **options)

    def summary(self, results: Any) -> tuple[list[dict], list[Line], Any]:
        cosine = results.mean_cosine.isel(beta=0).transpose("strengths", "key", "time").values
        ts = np.asarray(self.ts)
        reached = np.array([[first_crossing(ts, c) for c in rows] for rows in cosine])
        theory = np.array(
            [
                float(equiangular.time(Softmax(self.beta), jnp.array([self.mean - s, self.mean + s]), self.n, 0.0, 0.5))
                for s in self.spreads
            ]
        )
        median = np.median(reached, axis=1)
        rows = [
            {"spread": s, "median time to mean cosine 1/2": float(m), "equiangular, from orthogonal": float(t)}
            for s, m, t in zip(self.spreads, median, theory, strict=True)
        ]
        order = float(np.corrcoef(np.argsort(np.argsort(median)), np.argsort(np.argsort(theory)))[0, 1])
        lines = [Line("rank correlation with the equiangular times", order, 1.0, order > 0.8)]

        def draw(ax):
            ax.plot(self.spreads, median, "o-", label="tokens, median")
            ax.plot(self.spreads, theory, "s--", label="equiangular")
            ax.set_xlabel("spread of two heads about their mean")
            ax.set_ylabel("time to mean cosine 1/2")
            ax.set_yscale("log")
            ax.legend()

        return rows, lines, draw
