"""How long metastable states live: the last merge of tokens on the circle against beta, whose log grows like the gap."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .. import plots
from ..attention import Softmax
from ..field import AttentionField
from ..figures import Line
from ..heads import ScalarHeads
from ..metastable import MergeTree, merge_flow

KNOWN = {
    **{(9.0, 0): (5.7504, 5e-5), (25.0, 0): (17.2505, 5e-5), (81.0, 0): (57.2350, 5e-5)},
    **{(9.0, 1): (7.1697, 5e-5), (25.0, 1): (20.6874, 5e-5), (81.0, 1): (68.590, 5e-4)},
}
"""log10 of the last merge for n = 32 and its unit, by beta and seed; those up to beta = 25 agree with an implicit solve without merging."""


@dataclass(frozen=True)
class Lifetimes:
    r"""The last merge of n tokens on the circle (softmax, V = B = I), for several starts, against beta.

    Two clusters at an angle $\theta$ take $e^{\beta(1 - \cos\theta)}/(\beta\sin^2\theta)$ to leading order: the slope of $\ln t$ in
    beta is the gap $1 - \cos\theta$ of the last pair, less that of $\ln\beta$. Starts are
    `numpy.random.default_rng(seed).uniform(0, 2 pi, n)`.
    """

    kind: ClassVar = "lifetimes"
    title: str = "Lifetimes of metastable states"
    n: int = 32
    seeds: tuple[int, ...] = (0, 1)
    betas: tuple[float, ...] = (9.0, 16.0, 25.0, 36.0, 49.0, 64.0, 81.0)

    def __post_init__(self):
        if len(self.betas) < 3 or min(self.betas) <= 0:
            raise ValueError(f"betas must be at least three positive numbers for a slope, got {list(self.betas)}.")

    def results(self, out: Path, **_) -> dict[int, list[MergeTree]]:
        """The merge tree of every seed and beta; they take about a second each, so no store is kept."""
        trees = {}
        for seed in self.seeds:
            angles = np.random.default_rng(seed).uniform(0, 2 * np.pi, self.n)
            x0 = np.stack([np.cos(angles), np.sin(angles)], axis=1)
            trees[seed] = [merge_flow(AttentionField(ScalarHeads([1.0]), Softmax(b)), x0) for b in self.betas]
        return trees

    def summary(self, results: Any) -> tuple[list[dict], list[Line], Any]:
        rows, lines, drawn = [], [], []
        betas = np.array(self.betas)
        for seed, trees in results.items():
            log_t = np.array([tree.merges[-1].log_t for tree in trees])
            error = np.array([tree.merges[-1].error for tree in trees])
            gaps = np.array([last_gap(tree) for tree in trees])
            for beta, t, e, gap in zip(self.betas, log_t, error, gaps, strict=True):
                found = float(t / np.log(10))
                row = {"seed": seed, "beta": beta, "log10 t of the last merge": found, "error": float(e / np.log(10))}
                rows.append(row | {"1 - cos of the last pair": float(gap)})
                if self.n == 32 and (beta, seed) in KNOWN:
                    known, unit = KNOWN[beta, seed]
                    good = bool(abs(found - known) < unit)
                    lines.append(Line(f"seed {seed}, beta {beta:g}: log10 t", found, known, good))
            slope, intercept = np.polyfit(betas, log_t, 1)
            leading = float(np.polyfit(betas, betas * gaps - np.log(betas), 1)[0])
            good = bool(abs(slope / leading - 1) < 0.02)
            lines.append(
                Line(f"seed {seed}: slope of ln t in beta, by the gap of the last pair", float(slope), leading, good)
            )
            drawn.append((seed, log_t, float(slope), float(intercept)))

        def draw(ax):
            for i, (seed, log_t, slope, intercept) in enumerate(drawn):
                colour = plots.COLOURS[i % len(plots.COLOURS)]
                ax.plot(betas, log_t, "o", color=colour, markersize=4)
                ax.plot(betas, slope * betas + intercept, color=colour, label=f"start {seed}: slope {slope:.3f}")
            ax.set_xlabel(r"$\beta$")
            ax.set_ylabel(r"$\ln t$ of the last merge")
            ax.legend()

        return rows, lines, draw


def last_gap(tree: MergeTree) -> float:
    r"""$1 - \cos\theta$ between the barycentres of the last two groups halfway, in $\ln t$, through their plateau."""
    merge, before = tree.merges[-1], tree.merges[-2].log_t
    frame = tree.history.tokens[int(np.searchsorted(tree.log_t, (before + merge.log_t) / 2))]
    a, b = (frame[list(group)].mean(axis=0) for group in merge.who)
    return float(1 - a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
