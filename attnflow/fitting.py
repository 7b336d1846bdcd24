"""What `attnflow fit` does: radially dominant heads from a TOML file, with their report, figure and saved weights."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax.random as jr
import numpy as np

from . import plots
from .config import read_table
from .constrained import AbstractSymmetricHeads, on_planes, on_shared_axes
from .dominance import DominanceReport, fit_radial_dominance
from .facts import facts
from .files import save_heads
from .heads import AlignedHeads, orthogonal
from .schema import build, to_table, to_toml


@dataclass(frozen=True)
class DominanceFit:
    """Heads on random orthogonal subspaces, moved until their margins stay positive up to `horizon`.

    `family` says what may move: "commuting" heads share an eigenbasis (the start does), "free" ones are any symmetric
    matrices, "orthogonal" ones keep to orthogonal subspaces. See `dominance.fit_radial_dominance`.
    """

    title: str = "Radially dominant heads"
    seed: int = 0
    heads: int = 2
    d: int = 8
    n: int = 32
    strengths: tuple[float, ...] = (1.0,)
    family: Literal["commuting", "free", "orthogonal"] = "commuting"
    beta: tuple[float, ...] = (0.5, 2.0)
    horizon: float = 6.0
    condition: Literal["exact", "sharp", "condition8"] = "exact"
    hold: tuple[str, ...] = ("strength", "diversity", "clustering")
    overlap: float = 0.02
    steps: int = 360
    tries: int = 2
    clouds: int = 12
    fresh: int = 64

    def __post_init__(self):
        if len(self.beta) != 2:
            raise ValueError(f"beta must be an interval [low, high], got {list(self.beta)}.")
        if len(self.strengths) not in (1, self.heads):
            raise ValueError(f"strengths must name one value or {self.heads}, got {len(self.strengths)}.")

    def start(self) -> AlignedHeads:
        strengths = np.asarray(self.strengths if len(self.strengths) > 1 else self.strengths[0])
        return orthogonal(jr.key(self.seed), self.heads, self.d, self.d // self.heads, strengths)

    def parameters(self) -> AlignedHeads | AbstractSymmetricHeads:
        """The start, in the family."""
        start = self.start()
        if self.family == "commuting":
            return on_shared_axes(start)
        return start if self.family == "free" else on_planes(start, self.d // self.heads)


def read(path: str | Path, assignments: Sequence[str] = ()) -> DominanceFit:
    """The validated fit in a TOML file."""
    return build(DominanceFit, read_table(path, assignments))


def fit_from(spec: DominanceFit, out: Path, *, progress: bool = False, say: Callable = print) -> DominanceReport:
    """Fit, print the report, and write `heads.safetensors`, `report.json`, `config.toml` and the figure into `out`.

    The checkpoints of an interrupted fit lie in `out/checkpoint`: the same command continues there.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.toml").write_text(to_toml(to_table(spec)), encoding="utf-8")
    heads, report = fit_radial_dominance(
        spec.parameters(),
        n=spec.n,
        horizon=spec.horizon,
        key=jr.fold_in(jr.key(spec.seed), 1),
        beta=(spec.beta[0], spec.beta[1]),
        condition=spec.condition,
        hold=spec.hold,
        overlap=spec.overlap,
        steps=spec.steps,
        tries=spec.tries,
        clouds=spec.clouds,
        fresh=spec.fresh,
        checkpoint=out / "checkpoint",
        progress=progress,
    )
    say(report)
    save_heads(out / "heads.safetensors", heads)
    content = {"rows": report.rows(), "facts": facts()}
    (out / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _draw(spec, report, out)
    return report


def _draw(spec, report, out):
    fig, axes = plots.figure(1, 2, width=8.0)
    for ax, name in zip(axes[0], ("exact", "condition8"), strict=True):
        for label, survey in (("before", report.before), ("after", report.after)):
            plots.bands(ax, survey.times, survey.margins[name], label=label, name=f"worst margin ({name})")
        ax.axhline(0, color="0.6", linewidth=0.6)
        ax.axvline(spec.horizon, color="0.6", linewidth=0.6, linestyle=":")
        ax.set_yscale("symlog", linthresh=1e-4)
        ax.legend()
    fig.suptitle(spec.title)
    for ending in ("svg", "png"):
        plots.save(fig, out / f"figure.{ending}")
