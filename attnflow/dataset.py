"""A sweep's results as a labelled xarray Dataset."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .solve import REMEDY, Status
from .store import load_store

if TYPE_CHECKING:
    import xarray as xr

# What is stored under a usual name; an observable of another name has the name alone.
LONG_NAMES = {
    "energy": ("interaction energy", "1"),
    "head_energies": ("interaction energy of each head", "1"),
    "log_energy": ("log of the interaction energy", "1"),
    "head_log_energies": ("log of the interaction energy of each head", "1"),
    "dissipation": ("mean squared speed of the tokens", "1"),
    "energy_rate": ("rate of the energy", "1"),
    "entropy": ("attention entropy of each head", "nat"),
    "entropy_deficit": ("attention entropy below its maximum, each head", "nat"),
    "radial_shadow": ("radial part of each head's output at each token", "1"),
    "mean_cosine": ("mean cosine between distinct tokens", "1"),
    "minimum_cosine": ("smallest cosine between two tokens", "1"),
    "order_parameter": ("length of the mean token", "1"),
    "time": ("time", "1"),
    "status": ("how the solve ended (0: reached the end)", "1"),
    "steps": ("accepted and rejected steps", "1"),
}


def load(store: str | Path) -> "xr.Dataset":
    """The results in a store, finished or not; lanes not computed yet are NaN (-1 where integer), with `done` False.

    Raises FileNotFoundError where there is no store. Every byte is checked against its recorded checksum.
    """
    at = load_store(Path(store))
    chunks = ((chunk, at.get(chunk)) for chunk in range(at.spec["chunks"]))
    return dataset(at.spec, ((chunk, values) for chunk, values in chunks if values is not None))


def dataset(spec: Mapping, chunks: Iterable[tuple[int, Mapping[str, np.ndarray]]]) -> "xr.Dataset":
    """The Dataset of a sweep's specification and its chunks: the axes become coordinates."""
    import xarray as xr

    lengths = {axis["dim"]: len(axis["labels"]) for axis in spec["axes"].values()}
    sizes = {dim: lengths[dim] for dim in spec["dims"]}  # a store sorts its axes by name; `dims` keeps their order
    results = {
        name: np.full((spec["points"], *variable["shape"]), _missing(variable["dtype"]), variable["dtype"])
        for name, variable in spec["variables"].items()
    }
    done = np.zeros(spec["points"], bool)
    for chunk, values in chunks:
        here = spec["order"][chunk * spec["chunk"] : (chunk + 1) * spec["chunk"]]
        done[here] = True
        for name, block in values.items():
            results[name][here] = block

    data: dict[str, tuple] = {} if done.all() else {"done": (tuple(sizes), done.reshape(tuple(sizes.values())))}
    coordinates: dict[str, tuple] = {
        name: (axis["dim"], np.asarray(axis["labels"])) for name, axis in spec["axes"].items()
    }
    for name, array in results.items():
        if name == "time" and (array[done] == array[done][:1]).all():
            coordinates["time"] = ("time", array[done][0], _attributes("time"))
            continue
        dims = (*sizes, *spec["variables"][name]["dims"])
        shape = (*sizes.values(), *array.shape[1:])
        data["times" if name == "time" else name] = (dims, array.reshape(shape), _attributes(name))
    return xr.Dataset(data, coordinates, _provenance(spec))


def failures(results: "xr.Dataset") -> list[str]:
    """One line for each lane that did not finish: where it is, how it ended and when, and the remedy."""
    if "status" not in results:
        return []
    status, lines = results["status"], []
    for place in np.argwhere(status.values > Status.EVENT):
        lane = results.isel(dict(zip(status.dims, place.tolist(), strict=True)))
        where = ", ".join(f"{name} = {lane[name].item():.6g}" for name in lane.coords if not lane[name].dims)
        code = Status(int(lane["status"]))
        lines.append(f"{where}: {code.name} at t = {float(lane['time_reached']):.6g}; {REMEDY[code]}")
    return lines


def _missing(dtype: str) -> Any:
    kind = np.dtype(dtype).kind
    return np.nan if kind in "fc" else -1 if kind == "i" else 0


def _attributes(name: str) -> dict[str, str]:
    long_name, units = LONG_NAMES.get(name, (name.replace("_", " "), "1"))
    return {"long_name": long_name, "units": units}


def _provenance(spec: Mapping) -> dict[str, str]:
    facts = spec["facts"]
    versions = " ".join(f"{name}=={number}" for name, number in facts["versions"].items())
    return {"run": spec["run"]["name"], "versions": versions, "device": f"{facts['devices']} x {facts['device']}"}
