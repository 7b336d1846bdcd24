"""What `attnflow sweep` does: a study over beta, heads and seeds, its store, table, figure and acceptance lines."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import plots
from ..config import read_table
from ..figures import Line
from ..schema import build, to_table, to_toml
from .beta_slope import BetaSlope
from .critical_beta import CriticalBeta
from .dominance import Dominance
from .head_diversity import HeadDiversity
from .lifetimes import Lifetimes
from .phase_diagram import PhaseDiagram
from .relu_softmax import ReluSoftmax

AnyStudy = PhaseDiagram | HeadDiversity | CriticalBeta | BetaSlope | ReluSoftmax | Lifetimes | Dominance


@dataclass(frozen=True)
class Study:
    """The file `attnflow sweep` reads: one `[study]` table with its `kind`."""

    study: PhaseDiagram | HeadDiversity | CriticalBeta | BetaSlope | ReluSoftmax | Lifetimes | Dominance


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


__all__ = [
    "BetaSlope",
    "CriticalBeta",
    "Dominance",
    "HeadDiversity",
    "Lifetimes",
    "PhaseDiagram",
    "ReluSoftmax",
    "Study",
    "read",
    "run_study",
]
