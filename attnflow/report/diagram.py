"""The store of a sweep as a phase diagram: two axes, quartiles over the rest, and how to see the trajectory of a cell."""

import os
import shlex
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from ..dataset import load
from ..store import load_store
from .flows import encode, numbers

STATISTICS = {"accepted", "rejected", "steps", "norm_defect", "time_reached", "status", "done"}


def diagram(folder: Path, store: Path, beside: Path) -> dict:
    """Every stored variable over the first two of its axes that have several values, time being the second where it has one.

    Axes of random keys are averaged over, other ones become choices. Links to cells are relative to `beside`.
    """
    at = load_store(store)
    results = load(store)
    dims = list(at.spec["dims"])
    drawn = {a["dim"] for name, a in at.spec["axes"].items() if _is_key(name)}
    axes = [d for d in dims if d not in drawn and results.sizes[d] > 1] or dims[:1]
    names = [str(n) for n in results.data_vars if n not in STATISTICS and set(results[n].dims) <= {*dims, "time"}]
    timed = [n for n in names if "time" in results[n].dims]
    names, swept = (timed, False) if timed else (names, True)
    if not names:
        raise FileNotFoundError(f"{store} has no variable that depends on its axes and time alone.")
    y = axes[0]
    x = "time" if not swept else axes[1] if len(axes) > 1 else next((d for d in dims if d != y and d not in drawn), y)
    choices = [c for name in names for c in _choices(results, name, (y, x), drawn)]
    for choice in choices:
        choice["rows"] = _rows(results, dims, (y, x), choice.pop("fixed"), folder, beside)
    shades = (np.asarray(mpl.colormaps["viridis"](np.arange(256)))[:, :3] * 255).round()
    return {
        "x": {
            "name": "t" if x == "time" else x,
            "values": [0.0] if x == y else _coordinate(results, x),
            "swept": swept,
        },
        "y": {"name": y, "values": _coordinate(results, y)},
        "choices": choices,
        "colours": encode(shades, "uint8"),
    }


def _choices(results: Any, name: str, plane: tuple[str, str], drawn: set[str]) -> list[dict]:
    """One map per value of the axes outside the plane; medians and quartiles over the drawn axes."""
    variable = results[name]
    others = [d for d in variable.dims if d not in plane and d not in drawn]
    over = [d for d in variable.dims if d in drawn]
    found = []
    for place in np.ndindex(*(results.sizes[d] for d in others)):
        fixed = dict(zip(others, place, strict=True))
        part = variable.isel(fixed)
        label = ", ".join([name.replace("_", " ")] + [f"{d} {i}" for d, i in fixed.items() if results.sizes[d] > 1])
        maps = part.mean(over).transpose(*dict.fromkeys(plane)).values
        choice = {"label": label, "fixed": fixed, "values": encode(maps, "float32"), "low": None, "high": None}
        choice["count"] = int(np.prod([results.sizes[d] for d in over]))
        if over and choice["count"] > 1:
            bounds = part.quantile((0.25, 0.75), dim=over).transpose("quantile", *dict.fromkeys(plane)).values
            choice |= {"low": encode(bounds[0], "float32"), "high": encode(bounds[1], "float32")}
        found.append(choice)
    return found


def _rows(results, dims, plane, fixed, folder, beside) -> list[dict]:
    """For every row (or cell) of the diagram: the command that computes a trajectory, and the page it wrote if there is one."""
    free = [d for d in dict.fromkeys(plane) if d in dims]
    rows = []
    for place in np.ndindex(*(results.sizes[d] for d in free)):
        where = {**dict.fromkeys(dims, 0), **fixed, **dict(zip(free, place, strict=True))}
        cell = [str(where[d]) for d in dims]
        page = folder / "cells" / "_".join(cell) / "report.html"
        command = f"attnflow report {shlex.quote(str(folder))} --cell {' '.join(cell)}"
        rows.append({"command": command, "href": os.path.relpath(page, beside) if page.exists() else None})
    return rows


def _coordinate(results: Any, dim: str) -> list[float | None]:
    values = results[dim].values if dim in results.coords else np.arange(results.sizes[dim])
    return numbers(values) if np.asarray(values).dtype.kind in "fiub" else list(map(float, range(len(values))))


def _is_key(name: str) -> bool:
    return name in ("key", "keys", "seed", "seeds")
