"""Figures of the papers by name: the configuration that makes each, and the numbers it must show."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .config import ConfigError


class Line(NamedTuple):
    """One acceptance line: what is compared, what was found, what it should be, and whether it is."""

    what: str
    found: float
    expected: float
    good: bool


def low_temperature(rows: list[dict]) -> list[Line]:
    """Three phases (arXiv 2605.10931): minima of W2 within 3 %, times within 1."""
    expected = {8.0: (0.198, 8.0, 11.5, 17.0), 32.0: (0.1002, 10.5, 15.5, 21.5), 128.0: (0.0499, 13.5, 19.5, 25.5)}
    lines = []
    for row in rows:
        for name, value in zip(
            ("min W2", "t_min", "t_leave", "t_terminal"), expected.get(row["beta"], ()), strict=False
        ):
            allowed = 0.03 * value if name == "min W2" else 1.0
            lines.append(Line(f"beta {row['beta']:g}: {name}", row[name], value, abs(row[name] - value) <= allowed))
    return lines


def kinetic(rows: list[dict]) -> list[Line]:
    """Last crossing of minimum cosine .999 at t = 328.20 +- .02 (a published Euler loop gives 364.1)."""
    t = rows[0]["t(cosine 0.999)"]
    return [Line("last merge, t at cosine .999", t, 328.20, abs(t - 328.20) <= 0.02)]


def staircase(rows: list[dict]) -> list[Line]:
    r"""The last plateau ends (energy midway to 1) at $\ln t + \beta$ within 1 % of an independent stiff solve and quadrature.

    At beta = 500 and 1000 the clusters still approach while the last pair merges: their barycentres at the start would
    give 34.519 and 72.619.
    """
    expected = {500.0: 34.0775, 1000.0: 72.5654, 2000.0: 149.529, 4000.0: 304.056}
    return [
        Line(f"beta {row['beta']:g}: ln t + beta at the end of the last plateau", t, want, abs(t / want - 1) <= 0.01)
        for row in rows
        if (want := expected.get(row["beta"])) is not None
        for t in [row["last step ln t"] + row["beta"]]
    ]


FIGURES: dict[str, Callable[[list[dict]], list[Line]]] = {
    "low_temperature": low_temperature,
    "kinetic": kinetic,
    "staircase": staircase,
}
STUDIES = (
    "beta_slope",
    "relu_softmax",
    "lifetimes",
    "phase_diagram",
    "phase_diagram_usa",
    "phase_diagram_8",
    "phase_diagram_32",
    "phase_diagram_128",
    "head_diversity",
    "dominance",
    "critical_beta",
)
"""Figures whose configuration is a study, which brings its own lines."""


def configuration(name: str) -> Path:
    """The TOML of a figure."""
    if name not in (*FIGURES, *STUDIES):
        raise ConfigError(f"no figure `{name}`; known: {', '.join((*FIGURES, *STUDIES))}, all.")
    return find_configuration(name)


def find_configuration(name: str) -> Path:
    """configs/NAME.toml, beside the package in a checkout, inside it once installed."""
    here = Path(__file__).parent
    for folder in (here / "configs", here.parent / "configs"):
        if (path := folder / f"{name}.toml").exists():
            return path
    raise ConfigError(f"{name}.toml is not part of this installation.")
