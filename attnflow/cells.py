"""One point of a study again, with its tokens kept: what a cell of a phase diagram opens."""

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax

from .facts import facts
from .report import report
from .run import save_flow
from .schema import ConfigError
from .studies import HeadDiversity, PhaseDiagram, read


def open_cell(folder: Path, place: Sequence[int]) -> Path:
    """Solve the point at `place`, its index along every axis of the study in `folder`; returns the page in `folder/cells`.

    **Errors:** ConfigError where the study has no such point, or does not consist of flows.
    """
    study = read(folder / "config.toml")
    if not isinstance(study, PhaseDiagram | HeadDiversity):
        raise ConfigError(f"--cell: the points of a {study.kind} study are not single flows.")
    points = study.points()
    if len(place) != len(points.shape) or not all(0 <= i < n for i, n in zip(place, points.shape, strict=True)):
        sizes = ", ".join(f"{name} 0..{n - 1}" for name, n in points.dims.items())
        raise ConfigError(f"--cell: needs one index per axis ({sizes}), got {' '.join(map(str, place)) or 'none'}.")
    index = dict(zip(points.dims, place, strict=True))
    where = {name: jax.tree.map(lambda a, i=index[axis.dim]: a[i], axis.values) for name, axis in points.axes.items()}
    trajectory = partial(study.flow(), save_tokens=True)(**where, ts=study.ts)
    out = folder / "cells" / "_".join(map(str, place))
    out.mkdir(parents=True, exist_ok=True)
    save_flow(out / "flow_0.npz", trajectory)
    shutil.copy(folder / "config.toml", out / "config.toml")
    row = {name: axis.labels[index[axis.dim]].item() for name, axis in points.axes.items()}
    (out / "results.json").write_text(json.dumps([row]) + "\n", encoding="utf-8")
    (out / "facts.json").write_text(json.dumps(facts()) + "\n", encoding="utf-8")
    return report(out)
