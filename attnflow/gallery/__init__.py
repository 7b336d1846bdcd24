"""Every figure that the library can make, by name: its configuration, the numbers it must show, and one page with them all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import plots
from ..config import read
from ..figures import FIGURES, STUDIES, Line, find_configuration
from ..run import run
from ..schema import ConfigError
from ..studies import read as read_study
from ..studies import run_study
from . import energies, flat, heads, low_temperature, schemes, tokens

DRAWN: dict[str, Callable] = {
    "sphere": tokens.sphere,
    "late_rate": tokens.late_rate,
    "low_temperature_sphere": low_temperature.low_temperature_sphere,
    "rotation": tokens.rotation,
    "rotation_triangle": tokens.rotation_triangle,
    "repulsion": tokens.repulsion,
    "energy_minima": energies.energy_minima,
    "energy_maxima": energies.energy_maxima,
    "four_particles": tokens.four_particles,
    "polytope": flat.polytope,
    "hyperplanes": flat.hyperplanes,
    "hyperplane_polytope": flat.hyperplane_polytope,
    "boolean": flat.boolean,
    "codim_k": flat.codim_k,
    "high_dim": flat.high_dim,
    "heads": heads.heads,
    "equiangular": heads.equiangular_curve,
    "rank": heads.rank,
    "layers": heads.layers,
    "spectra": heads.spectra,
    "normalization": schemes.normalization,
    "alibi": schemes.alibi,
    "noise": heads.noise,
}
"""Figures with a function of their own, (experiment) -> (rows, acceptance lines, figure); `noise` takes no experiment."""

SMALLER = {
    "phase_diagram": ("study.seeds=32", "study.betas=45"),
    "phase_diagram_128": ("study.betas=20", "study.seeds=8"),
    "phase_diagram_8": ("study.betas=45", "study.seeds=8"),
    "phase_diagram_32": ("study.betas=30", "study.seeds=8"),
    "critical_beta": ("study.clouds=12",),
    "head_diversity": ("study.seeds=8",),
    "dominance": ("study.seeds=16", "study.betas=8"),
}
"""Sizes at which a study takes about a minute; `attnflow sweep` runs them whole."""

NAMES = (*FIGURES, *DRAWN, *STUDIES)


def make(name: str, out: Path) -> tuple[str, list[dict], list[Line]]:
    """Make one figure in `out` (its `figure.svg` and `.png`, with the arrays of flows and sweeps): title, rows and acceptance lines.

    Double precision is the caller's to set. ConfigError for a name that is none.
    """
    if name not in NAMES:
        raise ConfigError(f"no figure `{name}`; known: {', '.join(NAMES)}, all.")
    if name == "noise":
        return _drawn("Noisy thresholds", heads.noise(), out)
    path = find_configuration(name)
    if name in STUDIES:
        study = read_study(path, SMALLER.get(name, ()))
        rows, lines = run_study(study, out)
        return study.title, rows, lines
    experiment = read(path)
    if name in FIGURES:
        rows = run(experiment, out, say=lambda _: None)
        return experiment.title, rows, FIGURES[name](rows)
    return _drawn(experiment.title, DRAWN[name](experiment), out)


def configuration_name(name: str) -> Path | None:
    """The figure's configuration, where it has one."""
    return None if name == "noise" else find_configuration(name)


def caption(name: str) -> str:
    """What a figure shows, in one sentence."""
    return description(name).split("\n\n")[0]


def description(name: str) -> str:
    """What a figure shows and how: its docstring, one line per paragraph."""
    if name in STUDIES:
        text: Any = type(read_study(find_configuration(name))).__doc__
    else:
        text = (FIGURES | DRAWN)[name].__doc__
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (text or "").strip().split("\n\n"))


def _drawn(title, made, out):
    rows, lines, fig = made
    out.mkdir(parents=True, exist_ok=True)
    fig.suptitle(title)
    for ending in ("svg", "png"):
        plots.save(fig, out / f"figure.{ending}")
    return title, rows, lines
