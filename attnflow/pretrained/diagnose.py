"""How far the heads of a trained network are from what the theorems assume."""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.table import Table

from .load import load
from .measures import Depth, Measures, depth_of, measures
from .spectra import baseline, overlaps, own_angles, principal_angles, spectra
from .stack import WeightStack
from .verdicts import Verdict, verdicts

Array = np.ndarray

SPACES = ("query", "key", "value", "output")


@dataclass(frozen=True)
class Diagnosis:
    """The table of `diagnose`: `columns` by name (L, H), `depth` by name (L + 1,), `random` the value for random heads."""

    model: str
    columns: dict[str, Float[Array, "L H"]]
    depth: dict[str, Float[Array, " L1"]]
    random: dict[str, float]
    verdicts: list[Verdict]
    notes: list[str]

    def heat(self, name: str) -> Float[Array, "L H"]:
        """A column as a layer x head map, for plotting.

        **Errors:** ValueError naming the columns where there is none of that name.
        """
        if name not in self.columns:
            raise ValueError(f"No column {name!r}; there are {', '.join(self.columns)}.")
        return self.columns[name]

    def rows(self) -> list[dict[str, float | int]]:
        """One dict for each layer and head."""
        depth, heads = next(iter(self.columns.values())).shape
        return [
            {"layer": layer, "head": head, **{name: float(a[layer, head]) for name, a in self.columns.items()}}
            for layer in range(depth)
            for head in range(heads)
        ]

    def to_csv(self, path: str | Path | None = None) -> str:
        """The rows as CSV, also written to `path`."""
        text = io.StringIO()
        rows = self.rows()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return _written(text.getvalue(), path)

    def to_json(self, path: str | Path | None = None) -> str:
        """Everything as one JSON object, also written to `path`; undefined numbers are null."""
        content = {
            "model": self.model,
            "notes": self.notes,
            "verdicts": [v._asdict() | {"holds": v.holds} for v in self.verdicts],
            "random": self.random,
            "depth": {name: a.tolist() for name, a in self.depth.items()},
            "heads": self.rows(),
        }
        return _written(json.dumps(_defined(content), indent=1, allow_nan=False), path)

    def print(self, console: Console | None = None) -> None:
        """A summary for people: quantiles over heads beside random heads, the medians by layer, and the verdicts."""
        console = Console() if console is None else console
        console.print(self.model, markup=False)
        for note in self.notes:
            console.print(f"note: {note}", markup=False)
        console.print(self._summary(), self._layers())
        for verdict in self.verdicts:
            console.print(f"- {verdict}", markup=False)

    def _summary(self) -> Table:
        table = Table("quantity", *("least", "q10", "median", "q90", "most", "random"), title="over all heads")
        for name, a in self.columns.items():
            levels = np.nanquantile(a, [0, 0.1, 0.5, 0.9, 1]) if np.isfinite(a).any() else [np.nan] * 5
            random = f"{self.random[name]:.3g}" if name in self.random else ""
            table.add_row(name, *(f"{v:.3g}" for v in levels), random)
        return table

    def _layers(self) -> Table:
        shown = [name for name in _SHOWN if name in self.columns]
        table = Table("layer", *shown, *self.depth, title="by layer: medians over heads, state on entry")
        for layer in range(len(self.columns[shown[0]])):
            values = [np.nanmedian(self.columns[name][layer]) for name in shown]
            table.add_row(str(layer), *(f"{v:.3g}" for v in values), *(f"{a[layer]:.3g}" for a in self.depth.values()))
        if self.depth:
            table.add_row("end", *([""] * len(shown)), *(f"{a[-1]:.3g}" for a in self.depth.values()))
        return table


_SHOWN = ("symmetry_defect", "alignment", "gap", "beta_op", "entropy", "shadow", "condition8", "exact", "energy_rate")


def diagnose(
    stack: WeightStack, tokens: Float[Array, "n d"] | None = None, *, tolerance: float = 0.05, seed: int = 0
) -> Diagnosis:
    """The hypotheses of the theorems for every layer and head, beside random heads of the same shape.

    **Arguments:**

    - `tokens`: a residual that enters the first layer, as from `stack.embed`; without it only the weights are looked at.
    - `tolerance`: the defect up to which a hypothesis counts as met.
    - `seed`: of the one random layer that the baseline is measured on.

    Norms and spectra come from k x k and 2k x 2k matrices. For the quantities see `Spectra`, `Angles`, `Measures`.
    """
    a = stack.architecture
    notes = []
    by_layer = []
    for number in range(1 if stack.shared else len(stack)):
        folded, _ = stack.folded(number)
        by_layer.append(_weights(folded.query, folded.key, folded.value, folded.output))
    if stack.shared:
        notes.append("every pass has the same weights; their columns repeat")
        by_layer *= len(stack)
    if stack.layer(0).attention.rotary is not None:
        notes.append("rotary positions: columns of weights take the score at equal positions")
    columns = {name: np.stack([row[name] for row in by_layer]) for name in by_layer[0]}
    random = _weights(*baseline(a.heads, a.width, a.dimension, seed=seed))
    scaled = {"beta_op", "beta_frobenius", "score_rms", "trace"}  # not free of the size of the weights
    by_name = {name: _or_nan(np.nanmedian, v) for name, v in random.items() if name not in scaled}
    depth = {}
    if tokens is None:
        notes.append("no tokens were given: only weights are looked at")
    else:
        token_columns, depth = _tokens(stack, tokens)
        columns |= token_columns
        if stack.layer(0).attention.causal:
            notes.append(
                "causal heads: energies are those of the score over all pairs, which no causal flow derives from"
            )
    return Diagnosis(repr(stack), columns, depth, by_name, verdicts(columns, by_name, tolerance=tolerance), notes)


def _weights(query: Array, key: Array, value: Array, output: Array) -> dict[str, Array]:
    """Columns (H,) from the factors of one layer."""
    heads, k, d = query.shape
    columns = spectra(query, key, value, output)._asdict()
    columns["rank_share"] = np.full(heads, k / d)
    for name, factor in zip(SPACES, (query, key, value, output.swapaxes(1, 2)), strict=True):
        for measure, angles in principal_angles(factor)._asdict().items():
            columns[f"{name}_angle_{measure}"] = _mean_over_pairs(angles, heads)
            if measure == "smallest":
                columns[f"{name}_angle_closest"] = _least_over_pairs(angles, heads)
    columns["own_angle_rms"] = own_angles(query, key).rms
    overlap = np.where(np.eye(heads, dtype=bool), np.nan, overlaps(query, key))
    columns["overlap_median"] = np.array([_or_nan(np.nanmedian, row) for row in overlap])
    columns["overlap_max"] = np.array([_or_nan(np.nanmax, row) for row in overlap])
    return columns


def _or_nan(function, a: Array) -> float:
    return float(function(a)) if np.isfinite(a).any() else float("nan")


def _pairs(values: Array, heads: int) -> Array:
    table = np.full((heads, heads), np.nan)
    a, b = np.triu_indices(heads, 1)
    table[a, b] = table[b, a] = values
    return table


def _mean_over_pairs(values: Array, heads: int) -> Array:
    return np.array([_or_nan(np.nanmean, row) for row in _pairs(values, heads)])


def _least_over_pairs(values: Array, heads: int) -> Array:
    return np.array([_or_nan(np.nanmin, row) for row in _pairs(values, heads)])


def _tokens(stack: WeightStack, tokens: Array) -> tuple[dict[str, Array], dict[str, Array]]:
    passes, a = stack.layers(tokens), stack.architecture
    rows = []
    for number in range(len(stack)):
        layer = stack.layer(number)
        rows.append(
            measures(layer.attention, layer.attention_norm, passes.residual[number], centred=a.centred, post=a.post)
        )
    depth = [depth_of(u, radius) for u, radius in zip(passes.tokens, passes.radius, strict=True)]
    return (
        {name: np.stack([getattr(row, name) for row in rows]) for name in Measures._fields},
        {name: np.array([getattr(row, name) for row in depth]) for name in Depth._fields},
    )


def inspect(path: str | Path, text: str | None = None, *, config: Mapping[str, object] | None = None) -> Diagnosis:
    """`diagnose` of a local model folder or file, on the tokens of a text where one is given."""
    stack = load(path, config)
    return diagnose(stack, None if text is None else stack.embed(stack.tokenize(text)))


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def _defined(value: Any) -> Any:
    match value:
        case dict():
            return {name: _defined(v) for name, v in value.items()}
        case list() | tuple():
            return [_defined(v) for v in value]
        case float() if not np.isfinite(value):
            return None
    return value
