"""Where per-head energies stop rising, against the formal threshold of Theorem 19."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .. import plots, sphere
from ..attention import Exponential
from ..field import AttentionField
from ..figures import Line
from ..heads import orthogonal
from ..onset import Onset, first_decrease, onset


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

    def summary(self, results: Any) -> tuple[list[dict], list[Line], Any]:
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
