"""The main job: an experiment's flows, a table, and a run folder that says what made it."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from rich.table import Table

from . import plots
from .config import Experiment, write
from .facts import facts
from .files import save_heads
from .metastable import merge_flow
from .observe import OBSERVABLES, minimum_cosine
from .phases import Phases, fit_bound, phases
from .solve import Trajectory, solve


def run(experiment: Experiment, out: Path, *, say: Callable[[object], None] = print) -> list[dict]:
    """Solve the experiment for every beta, write the run folder `out`, and return one row of results per beta.

    The folder holds `config.toml` (resolved), `facts.json` (versions, device, seed), `heads.safetensors`, `flow_K.npz` (times,
    tokens, weights, observables of the K-th beta) or with a `[merge]` table `tree_K.npz` (plateaus, merges, tokens over
    ln t), `figure.svg` and `.png` where there is something to draw, and last `results.json`: a folder with it is whole. Files
    appear whole or not at all; those of an earlier run in the folder are removed first.
    """
    x0, fields = experiment.fields()
    out.mkdir(parents=True, exist_ok=True)
    for pattern in ("results.json", "flow_*.npz", "tree_*.npz", "figure.*", "*.partial"):
        for old in out.glob(pattern):
            old.unlink()
    write(experiment, out / "config.toml")
    _dump(out / "facts.json", facts() | {"seed": experiment.seed, "dtype": experiment.dtype})
    save_heads(out / "heads.safetensors", fields[0][1].heads)
    rows = _merged(experiment, x0, fields, out, say) if experiment.merge else _solved(experiment, x0, fields, out, say)
    _dump(out / "results.json", rows)
    return rows


def _solved(experiment, x0, fields, out, say):
    rows, flows = [], []
    for k, (beta, field) in enumerate(fields):
        traj = solve(
            field,
            x0,
            experiment.solve.ts,
            observe={name: OBSERVABLES[name] for name in experiment.observe},
            save_tokens=experiment.save_tokens,
            solver=experiment.solve.diffrax(),
            rtol=experiment.solve.rtol,
            atol=experiment.solve.atol,
            max_steps=experiment.solve.max_steps,
            clock=experiment.solve.clock,
        )
        say(f"beta = {beta:g}\n{traj}")
        weights = None if field.weights is None else np.asarray(field.weights)
        row: dict = {"beta": beta, "steps": int(traj.stats["accepted"])}
        found = None
        if experiment.phases is not None:
            found = phases(
                field.heads,
                traj.ts,
                traj.values["tokens"],
                weights=weights,
                leave=experiment.phases.leave,
                terminal=experiment.phases.terminal,
            )
            row |= found.row
        else:
            row |= _last(traj, experiment.observe)
        rows.append(row)
        flows.append((traj, found))
        save_flow(out / f"flow_{k}.npz", traj, weights, found)
    if experiment.phases is not None or experiment.observe:
        _draw(experiment, rows, flows, out, say)
    return rows


def _last(traj, names):
    """Last value of every observable that is a number, or a number per head."""
    ends = {}
    for name in names:
        leaves = [np.asarray(leaf)[-1].ravel() for leaf in jax.tree.leaves(traj.values[name])]
        if len(leaves) == 1 and leaves[0].size <= 4:
            several = leaves[0].size > 1
            ends |= {f"last {name} {h}" if several else f"last {name}": float(v) for h, v in enumerate(leaves[0])}
    return ends


def _merged(experiment, x0, fields, out, say):
    """Merge trees in place of solved flows: last merge, plateaus and how the run ended, for every beta."""
    spec, rows, trees = experiment.merge, [], []
    for k, (beta, field) in enumerate(fields):
        tree = merge_flow(
            field,
            x0,
            t1=math.inf if spec.t1 is None else spec.t1,
            tolerance=spec.tolerance,
            threshold=spec.threshold,
            rtol=spec.rtol,
            max_steps=spec.max_steps,
        )
        say(f"beta = {beta:g}\n{tree}")
        last = tree.merges[-1] if tree.merges else None
        row = {"beta": beta, "merges": len(tree.merges), "status": tree.status}
        row |= {"last ln t": last.log_t if last else math.nan, "error": last.error if last else math.nan}
        row["last step ln t"] = max((p.end for p in tree.plateaus if math.isfinite(p.end)), default=math.nan)
        if spec.cosine is not None:
            row[f"t(cosine {spec.cosine:g})"] = math.exp(tree.crossing(minimum_cosine, spec.cosine))
        rows.append(row)
        trees.append(tree)
        lasting = np.array([tuple(p) for p in tree.plateaus], dtype=float).reshape(-1, 4)
        merges = np.array([(m.log_t, m.weight, m.error) for m in tree.merges], dtype=float).reshape(-1, 3)
        _save_arrays(
            out / f"tree_{k}.npz", {"plateaus": lasting, "merges": merges, "final": tree.final} | _frames(tree)
        )
    fig, axes = plots.figure(1, 2, width=8.0)
    betas = [row["beta"] for row in rows]
    shifts = betas if experiment.attention.kind == "exponential" else None
    plots.staircase(axes[0, 0], [t.plateaus for t in trees], betas, shifts=shifts)
    plots.merge_tree(axes[0, 1], *trees[-1].dendrogram())
    axes[0, 1].set_title(rf"$\beta = {rows[-1]['beta']:g}$", fontsize=9)
    _save_figure(experiment, fig, out)
    return rows


def _frames(tree):
    """Up to 400 of a tree's points in time, with their tokens and observables; t = 0 is left out."""
    some = np.unique(np.linspace(1, len(tree.log_t) - 1, min(400, len(tree.log_t) - 1)).round().astype(int))
    values = {name: np.asarray(value)[some] for name, value in tree.values.items()}
    return {"log_t": tree.log_t[some], "tokens": tree.history.tokens[some]} | values


def table(title: str, rows: list[dict]) -> Table:
    """Rows of numbers as a table for the terminal."""
    shown = Table(title=title, title_justify="left")
    for name in rows[0]:
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(*(_cell(v) for v in row.values()))
    return shown


def _cell(value) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.4g}"
    return str(value)


def save_flow(path: Path, traj: Trajectory, weights=None, found: Phases | None = None) -> None:
    """Times, observables, last tokens and statistics of a flow, and its distances, in one .npz that appears whole."""
    arrays: dict = {"ts": traj.ts, "final": traj.final}
    for name, value in traj.values.items():
        leaves = jax.tree.leaves(value)
        arrays |= {name if len(leaves) == 1 else f"{name}_{i}": leaf for i, leaf in enumerate(leaves)}
    arrays |= {f"stats_{name}": value for name, value in traj.stats.items()}
    if weights is not None:
        arrays["weights"] = weights
    if found is not None:
        arrays |= {"w2_to_projection": found.distance, "w2_to_space": found.to_space, "w2_terminal": found.to_terminal}
    _save_arrays(path, arrays)


def _save_arrays(path: Path, arrays: dict) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("wb") as stream:
        np.savez_compressed(stream, **{k: np.asarray(v) for k, v in arrays.items()})  # ty: ignore[invalid-argument-type]
    os.replace(partial, path)


def _draw(experiment, rows, flows, out, say):
    ts = np.asarray(flows[0][0].ts)
    if experiment.phases is not None:
        fig, axes = plots.figure()
        distances = [found.distance for _, found in flows]
        betas = [row["beta"] for row in rows]
        bound = fit_bound(betas, ts, distances, until=[row["t_leave"] for row in rows])
        say(f"Theorem 1, constants fitted: {bound}")
        bounds = [bound(beta, ts) for beta in betas]
        plots.phases(axes[0, 0], ts, distances, betas, marks=rows, bounds=bounds)
    else:
        names = experiment.observe
        fig, axes = plots.figure(len(names), 1, height=1.6 + 1.6 * len(names))
        for ax, name in zip(axes[:, 0], names, strict=True):
            for row, (traj, _) in zip(rows, flows, strict=True):
                leaf = jax.tree.leaves(traj.values[name])[-1]
                plots.timeseries(ax, ts, leaf, label=f"beta = {row['beta']:g}", name=name)
        axes[0, 0].legend()
    _save_figure(experiment, fig, out)


def _save_figure(experiment, fig, out):
    fig.suptitle(experiment.title)
    for ending in ("svg", "png"):
        plots.save(fig, out / f"figure.{ending}")


def _dump(path: Path, content) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, path)
