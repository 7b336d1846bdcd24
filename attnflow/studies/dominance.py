"""Radial dominance of given heads: until when all of their energies rise, over beta and clouds of random tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .. import observe, plots, sphere
from ..attention import Exponential
from ..field import AttentionField
from ..figures import Line
from ..heads import AlignedHeads
from ..points import grid
from ..reduce import Dense
from ..solve import solve
from ..specs import HeadsSpec, RandomHeads
from ..survey import fell, first, negative
from .flows import swept


@dataclass(frozen=True)
class Dominance:
    r"""Share of clouds whose margins dE_h/dt have all been positive up to t, over beta, for aligned heads under exponential attention.

    `heads` is any [heads] table of `attnflow run`; `kind = "file"` reads the `heads.safetensors` of `attnflow fit`.
    """

    kind: ClassVar = "dominance"
    title: str = "Radial dominance"
    seed: int = 0
    heads: HeadsSpec = field(default_factory=lambda: RandomHeads("orthogonal", 2))
    n: int = 32
    d: int = 8
    beta: tuple[float, ...] = (0.5, 2.0)
    betas: int = 16
    seeds: int = 32
    t1: float = 12.0
    times: int = 97
    rtol: float = 1e-7

    def __post_init__(self):
        if len(self.beta) != 2 or not 0 < self.beta[0] < self.beta[1]:
            raise ValueError(f"beta must be an interval [low, high] with 0 < low < high, got {list(self.beta)}.")

    @property
    def ts(self):
        return jnp.linspace(0.0, self.t1, self.times)

    def aligned(self) -> AlignedHeads:
        """The heads, of which V = B symmetric is required: for others the margin is not an energy rate."""
        built = self.heads.build(jr.fold_in(jr.key(self.seed), 1), self.d)
        if built.dimension not in (None, self.d):
            raise ValueError(f"heads: act in dimension {built.dimension}; set d to it, got d = {self.d}.")
        dense = built.dense(self.d)
        off = jnp.maximum(
            jnp.max(jnp.abs(dense.score - dense.value)),
            jnp.max(jnp.abs(dense.score - jnp.swapaxes(dense.score, 1, 2))),
        )
        if not off <= 1e-9 * jnp.max(jnp.abs(dense.score)):
            raise ValueError(f"heads: must be aligned, V = B symmetric; they are off by {float(off):.2g}.")
        return AlignedHeads(dense.score)

    def points(self):
        betas = np.geomspace(self.beta[0], self.beta[1], self.betas)
        return grid(beta=betas, key=jr.split(jr.key(self.seed), self.seeds))

    def flow(self) -> Callable:
        """One point: (beta, key, ts, heads) to a trajectory."""
        return partial(one_cloud, n=self.n, d=self.d, rtol=self.rtol)

    def results(self, out: Path, **options) -> Any:
        return swept(self, self.flow(), self.points(), shared=(self.ts, self.aligned()), store=out / "store", **options)

    def summary(self, results: Any) -> tuple[list[dict], list[Line], Any]:
        lost = negative(results.margin.transpose("beta", "key", "time").values)
        ts, betas = np.asarray(self.ts), results.beta.values
        losses = first(ts, lost)
        every = max(1, len(betas) // 8)
        rows = [
            {
                "beta": float(b),
                "median first loss": float(np.median(f)),
                f"share lost by t = {self.t1 / 2:g}": float(np.mean(f <= self.t1 / 2)),
                f"by t = {self.t1:g}": float(np.mean(f <= self.t1)),
            }
            for b, f in zip(betas[::every], losses[::every], strict=True)
        ]
        down = fell(results.log_energies.transpose("beta", "key", "time", ...).values).any(axis=-1)
        hidden = float(np.mean(down & ~lost.any(axis=-1)))
        lines = [Line("share of clouds whose energy fell though no margin was negative", hidden, 0.0, hidden == 0)]

        def draw(ax):
            still = ~np.logical_or.accumulate(lost, axis=-1)
            plots.phase_diagram(ax, ts, betas, still.mean(axis=1), label="share of clouds still dominant")

        return rows, lines, draw


def one_cloud(beta, key, ts, heads, *, n: int, d: int, rtol: float):
    """One point: n uniform tokens, the smallest exact margin of all heads and the heads' log-energies along their flow."""

    def margin(field, x):
        return jnp.min(observe.dominance_margins(field, x)[2])

    seen = {"margin": margin, "log_energies": observe.head_log_energies}
    field = AttentionField(heads, Exponential(beta), reduction=Dense())
    return solve(
        field, sphere.uniform(key, n, d), ts, observe=seen, rtol=rtol, atol=1e-3 * rtol, max_steps=8192, throw=False
    )
