"""ReLU against softmax: the race from one start and from two, by the equiangular equation and by tokens (Theorem 25)."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .. import observe, plots, sphere
from ..attention import ReLU, Softmax
from ..field import AttentionField
from ..figures import Line
from ..heads import ScalarHeads
from ..points import grid
from ..solve import solve
from ..theory import equiangular
from .flows import first_crossing, one_flow, swept

RACERS = {"softmax": Softmax(1.0), "relu": ReLU()}
TARGET = 0.5


@dataclass(frozen=True)
class ReluSoftmax:
    r"""Times to mean cosine 1/2 of one head of strength 1 at beta = 1, for every n of `n`.

    Equiangular tokens start at the cosine $d^{-1/2}$ of random tokens in dimension d; softmax also from 0, where ReLU is
    frozen: comparing that with ReLU from $d^{-1/2}$, as linearised times invite to, reverses the order.
    """

    kind: ClassVar = "relu_softmax"
    title: str = "ReLU against softmax"
    seed: int = 0
    n: tuple[int, ...] = (16, 64, 256)
    d: int = 64
    seeds: int = 8
    far: int = 10_000
    t1: float = 12.0
    uniform_t1: float = 100.0
    times: int = 241
    rtol: float = 1e-8

    @property
    def ts(self):
        return jnp.linspace(0.0, self.t1, self.times)

    @property
    def uniform_ts(self):
        """Uniform tokens need far longer under ReLU than under softmax: the clock is denser at first."""
        return self.uniform_t1 * jnp.linspace(0.0, 1.0, self.times) ** 3

    @property
    def start(self) -> float:
        return self.d**-0.5

    def points(self):
        keys = jr.split(jr.key(self.seed), self.seeds)
        return grid(beta=np.ones(1), strengths=np.ones((1, 1)), key=keys)

    def results(self, out: Path, **options) -> dict:
        """Per n and attention: mean cosine along the flow from equiangular tokens, and from uniform ones for every seed."""
        found = {}
        for n in self.n:
            for name, attention in RACERS.items():
                flow = AttentionField(ScalarHeads([1.0]), attention)
                path = solve(
                    *(flow, sphere.equiangular(n, self.start), self.ts),
                    observe={"cosine": observe.mean_cosine},
                    rtol=self.rtol,
                    atol=1e-3 * self.rtol,
                )
                run = partial(one_flow, n=n, d=self.d, kind=name, rtol=self.rtol)
                store = out / f"store_{name}_{n}"
                seeds = swept(self, run, self.points(), shared=(self.uniform_ts,), store=store, **options)
                found[n, name] = np.asarray(path.values["cosine"]), seeds.mean_cosine.values.reshape(-1, self.times)
        return found

    def summary(self, results: Any) -> tuple[list[dict], list[Line], Any]:
        rows, deviation = [], 0.0
        for n in self.n:
            row: dict = {"n": n}
            for name, attention in RACERS.items():
                cosine, seeds = results[n, name]
                theory = np.asarray(equiangular.cosine(attention, [1.0], n, self.start, self.ts))
                deviation = max(deviation, float(np.max(np.abs(cosine - theory))))
                random = np.median([first_crossing(np.asarray(self.uniform_ts), c, TARGET) for c in seeds])
                row |= {
                    f"{name}": _time(attention, n, self.start),
                    f"{name}, linearised": float(equiangular.linearised_time(attention, 1.0, n, self.start, TARGET)),
                    f"{name}, uniform tokens": float(random),
                }
            rows.append(row | {"softmax from 0": _time(RACERS["softmax"], n, 0.0)})
        relu, soft = (_time(RACERS[name], self.far, self.start) for name in ("relu", "softmax"))
        zero = _time(RACERS["softmax"], self.far, 0.0)
        late = [float(equiangular.time(a, [1.0], 100, TARGET, 0.99)) for a in (ReLU(), Softmax(20.0))]
        lines = [
            Line("tokens against the equiangular equation, largest deviation", deviation, 0.0, deviation < 1e-6),
            Line(f"softmax over ReLU, one start, n = {self.far}: time ratio below", soft / relu, 1.0, soft < relu),
            Line("softmax from 0 over ReLU from its start: time ratio above", zero / relu, 1.0, zero > relu),
            Line(
                "ReLU over softmax at beta = 20, cosine .5 to .99: time ratio below",
                late[0] / late[1],
                1.0,
                late[0] < late[1],
            ),
        ]

        def draw(ax):
            sizes = np.unique(np.round(np.geomspace(4, self.far, 30)))
            for i, (name, attention) in enumerate(RACERS.items()):
                colour = plots.COLOURS[i]
                times = [_time(attention, n, self.start) for n in sizes]
                linear = [float(equiangular.linearised_time(attention, 1.0, n, self.start, TARGET)) for n in sizes]
                ax.loglog(sizes, times, color=colour, label=name)
                ax.loglog(sizes, linear, ":", color=colour, label=f"{name}, linearised")
                ax.loglog(self.n, [row[f"{name}, uniform tokens"] for row in rows], "o", color=colour, markersize=4)
            ax.set_xlabel("n (dots: uniform tokens)")
            ax.set_ylabel("time to mean cosine 1/2")
            ax.legend()

        return rows, lines, draw


def _time(attention, n, start) -> float:
    return float(equiangular.time(attention, [1.0], n, start, TARGET))
