"""What `attnflow sweep` does: a study over beta, heads and seeds, its store, table, figure and acceptance lines."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from . import observe, plots, sphere
from .attention import Exponential, Softmax
from .config import read_table
from .field import AttentionField
from .figures import Line
from .heads import ScalarHeads, orthogonal
from .onset import Onset, first_decrease, onset
from .points import grid
from .reduce import Dense
from .schema import build, to_table, to_toml
from .solve import solve
from .sweep import sweep
from .theory import equiangular

CLOSE = 0.999  # cosine above which a pair counts as one cluster, in the published phase diagrams


def close_pairs(field, x):
    """Share of pairs with cosine above .999."""
    return observe.pair_fraction(x, CLOSE)


def one_flow(beta, strengths, key, ts, *, n: int, d: int, kind: str, rtol: float, orthogonal: bool = False):
    """One point: a flow of n uniform tokens, or of orthonormal ones moved by 1e-3, under scalar heads."""
    noise = sphere.uniform(key, n, d)
    x0 = sphere.retract(jnp.eye(n, d) + 1e-3 * noise) if orthogonal else noise
    attention = {"softmax": Softmax, "exponential": Exponential}[kind](beta)
    field = AttentionField(ScalarHeads(strengths), attention, reduction=Dense())
    seen = {"close_pairs": close_pairs, "mean_cosine": observe.mean_cosine}
    return solve(field, x0, ts, observe=seen, rtol=rtol, atol=1e-3 * rtol, throw=False)


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

    def points(self):
        keys = jr.split(jr.key(self.seed), self.seeds)
        return grid(beta=np.linspace(self.beta[0], self.beta[1], self.betas), strengths=np.ones((1, 1)), key=keys)

    def run(self) -> Callable:
        return partial(one_flow, n=self.n, d=self.d, kind=self.attention, rtol=self.rtol)

    def results(self, out: Path, **options) -> Any:
        return _swept(self, out, **options)

    def summary(self, results: Any) -> tuple[list[dict], list[Line], Any]:
        """Rows of the half-level edge, acceptance lines, and a function that draws."""
        share = results.close_pairs.mean("key").isel(strengths=0).transpose("beta", "time").values
        betas, ts = results.beta.values, np.linspace(0.0, self.t1, self.times)
        edge = np.array([_first_crossing(ts, row) for row in share])
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

    def points(self):
        strengths = np.array([[self.mean - s, self.mean + s] for s in self.spreads])
        return grid(beta=np.array([self.beta]), strengths=strengths, key=jr.split(jr.key(self.seed), self.seeds))

    def run(self) -> Callable:
        return partial(one_flow, n=self.n, d=self.d, kind="softmax", rtol=self.rtol, orthogonal=True)

    def results(self, out: Path, **options) -> Any:
        return _swept(self, out, **options)

    def summary(self, results: Any) -> tuple[list[dict], list[Line], Any]:
        cosine = results.mean_cosine.isel(beta=0).transpose("strengths", "key", "time").values
        ts = np.linspace(0.0, self.t1, self.times)
        reached = np.array([[_first_crossing(ts, c) for c in rows] for rows in cosine])
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


@dataclass(frozen=True)
class CriticalBeta:
    """Heads alpha_h P_h on orthogonal planes: how far apart are Condition 8, the sharp and the exact margin (Theorem 19)?

    One case per entry of `n`, `k` (rank of every head) and `strengths` (its H values); `clouds` uniform clouds each, and the
    first time at which a head's energy falls along the flow from one of them, at the formal threshold.
    """

    kind: ClassVar = "critical_beta"
    n: tuple[int, ...]
    k: tuple[int, ...]
    strengths: tuple[tuple[float, ...], ...]
    title: str = "Onset of per-head decrease"
    seed: int = 0
    betas: tuple[float, ...] = (0.01, 0.1, 0.3, 1.0, 2.0, 3.0)
    clouds: int = 40

    def __post_init__(self):
        if not len(self.n) == len(self.k) == len(self.strengths):
            raise ValueError("n, k and strengths must have one entry per case.")

    def results(self, out: Path, **_) -> list[Onset]:
        cases = zip(self.n, self.k, self.strengths, strict=True)
        return [
            onset(jr.key(self.seed), jnp.asarray(self.betas), jnp.asarray(a), n=n, k=k, samples=self.clouds)
            for n, k, a in cases
        ]

    def summary(self, results: list[Onset]) -> tuple[list[dict], list[Line], Any]:
        rows, ordered = [], True
        for n, k, a, found in zip(self.n, self.k, self.strengths, results, strict=True):
            beta = max(float(found.formal_beta), 0.1)
            field = AttentionField(
                orthogonal(jr.key(self.seed), len(a), k * len(a), k, jnp.asarray(a)), Exponential(beta)
            )
            x0 = sphere.uniform(jr.key(self.seed + 1), n, k * len(a))
            fall, _ = first_decrease(field, x0, jnp.linspace(0.0, 20.0, 201))
            first = {name: float(value) for name, value in found.first().items()}
            rows.append(
                {"n": n, "k": k, "strengths": " ".join(f"{v:g}" for v in a), "formal beta*": float(found.formal_beta)}
                | {"sharp beta": float(found.formal_sharp_beta)}
                | {f"first beta failing: {name}": value for name, value in first.items()}
                | {"first fall of a head, t at beta*": float(fall)}
            )
            ordered &= bool(np.all(found.condition8 >= found.sharp) and np.all(found.sharp >= found.exact))
        lines = [Line("cases where a stricter margin fails no less often", float(ordered), 1.0, ordered)]

        def draw(ax):
            for i, (row, found) in enumerate(zip(rows, results, strict=True)):
                colour = plots.COLOURS[i % len(plots.COLOURS)]
                label = f"n {row['n']}, rank {row['k']}, strengths {row['strengths']}"
                ax.plot(self.betas, found.condition8, ":", color=colour)
                ax.plot(self.betas, found.exact, "-", color=colour, label=label)
                if row["formal beta*"] > 0:
                    ax.axvline(row["formal beta*"], color=colour, linewidth=0.5)
            ax.set_xscale("log")
            ax.set_xlabel(r"$\beta$ (vertical: formal $\beta^*$)")
            ax.set_ylabel("share failing (dotted: Condition 8)")
            ax.legend(fontsize=6)

        return rows, lines, draw


AnyStudy = PhaseDiagram | HeadDiversity | CriticalBeta


@dataclass(frozen=True)
class Study:
    """The file `attnflow sweep` reads: one `[study]` table with its `kind`."""

    study: PhaseDiagram | HeadDiversity | CriticalBeta


def read(path: str | Path, assignments: Sequence[str] = ()) -> AnyStudy:
    """The validated study in a TOML file."""
    return build(Study, read_table(path, assignments)).study


def run_study(
    study: AnyStudy,
    out: Path,
    *,
    workers: int = 0,
    scheduler: str | None = None,
    progress: bool = False,
) -> tuple[list[dict], list[Line]]:
    """Sweep into `out/store` (an interrupted study continues there), then write table, figure and acceptance lines."""
    out.mkdir(parents=True, exist_ok=True)
    table = to_table(study)
    (out / "config.toml").write_text(to_toml({"study": table}), encoding="utf-8")
    results = study.results(out, workers=workers, scheduler=scheduler, progress=progress)
    rows, lines, draw = study.summary(results)
    fig, axes = plots.figure()
    draw(axes[0, 0])
    fig.suptitle(study.title)
    for ending in ("svg", "png"):
        plots.save(fig, out / f"figure.{ending}")
    content = {"rows": rows, "acceptance": [line._asdict() for line in lines]}
    (out / "results.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return rows, lines


def _swept(study: Any, out: Path, *, workers: int, scheduler: str | None, progress: bool):
    """The Dataset of a study's points, from its store where it has been there before."""
    return sweep(
        study.run(),
        study.points(),
        shared=(jnp.linspace(0.0, study.t1, study.times),),
        store=out / "store",
        cost=_by_beta,
        config=to_table(study),
        workers=workers,
        scheduler=scheduler,
        progress=progress,
    )


def _by_beta(beta, **rest):
    return beta


def _first_crossing(ts, values, level=0.5):
    """First time at which `values` reaches the level, by interpolation; NaN where it never does."""
    above = np.flatnonzero(values >= level)
    if not above.size:
        return np.nan
    k = above[0]
    if k == 0:
        return float(ts[0])
    return float(np.interp(level, values[k - 1 : k + 1], ts[k - 1 : k + 1]))


__all__ = ["HeadDiversity", "PhaseDiagram", "Study", "read", "run_study"]
