"""The low-temperature flow on the sphere: how close it comes to its projection, and when it leaves."""

import jax.numpy as jnp
import numpy as np

from .. import plots, sphere
from ..attention import Softmax
from ..config import Experiment
from ..field import AttentionField
from ..figures import Line
from ..phases import first_time, leading_space
from ..solve import solve
from ..studies.flows import first_crossing
from ..theory import low_temperature
from ..transport import w2_to, w2_to_subspace

LEFT = 0.5  # W2 beyond which a flow has left its metastable state
TERMINAL = 0.1  # W2 to the leading eigenspace of V below which it is terminal


def low_temperature_sphere(experiment: Experiment):
    r"""The phases of the low-temperature flow on $S^2$ (arXiv 2605.10931): $W_2(\rho_t, \Pi_\#\rho_0)$ dips like $\beta^{-1/2}$.

    Tokens draw near the axis of $VB^\top$ at rate a until their spread is that of the kernel, $\beta^{-1/2}$, at $\log\beta/2a$; from
    there the offset of a cluster, as large, grows at rate $r = \lambda_1(V) - \langle e, Ve\rangle$: the flow leaves at
    $(1/2a + 1/2r)\log\beta$ plus a constant (reconstructed, leading order). W2 is exact, its target being two points; the nodes
    are approximate: rings of them cross the equator whole (dips within 5 % of those of three times as many nodes).
    """
    spec, (_, fields) = experiment.solve, experiment.fields()
    heads, betas = fields[0][1].heads, np.array(experiment.attention.betas)
    x0, w = graded_sphere(experiment.build_tokens()[0].shape[0], tilt=(0.3, 0.1, 0.2))
    axis = low_temperature.principal_space(heads)[0]
    seen = {
        "distance": w2_to(low_temperature.projection(heads, x0), target_weights=w),
        "own": w2_to_subspace(np.linalg.eigh(axis)[1][:, -1:]),
        "terminal": w2_to_subspace(leading_space(np.asarray(heads.dense(3).value)[0])),
    }
    curves, rows = [], []
    for beta in betas:
        traj = solve(AttentionField(heads, Softmax(beta), w), x0, spec.ts, observe=seen, rtol=spec.rtol, atol=spec.atol)
        ts, distance = np.asarray(traj.ts), np.asarray(traj.values["distance"])
        k = int(distance.argmin())
        t_leave = float(first_crossing(ts[k:], distance[k:], LEFT))
        row = {"beta": float(beta), "min W2": float(distance[k]), "t_min": float(ts[k]), "t_leave": t_leave}
        row["t_terminal"] = first_time(ts, np.asarray(traj.values["terminal"]) < TERMINAL)
        rows.append(row | {"min to own projection": float(np.min(traj.values["own"]))})
        curves.append(distance)
    dips, own, leaves = (
        np.array([row[name] for row in rows]) for name in ("min W2", "min to own projection", "t_leave")
    )
    slope, of_own = (float(np.polyfit(np.log(betas), np.log(y), 1)[0]) for y in (dips, own))
    per_log = float(np.polyfit(np.log(betas), leaves, 1)[0])
    value = np.asarray(heads.dense(3).value)[0]
    near, away = (
        float(low_temperature.projection_rate(heads)),
        np.linalg.eigvalsh(value)[-1] - np.trace(np.asarray(axis) @ value),
    )
    law = float(1 / (2 * near) + 1 / (2 * away))
    lines = [
        Line("slope of ln min W2 in ln beta", slope, -0.5, abs(slope + 0.5) < 0.05),
        Line("slope of the least distance to its own projection", of_own, -0.5, abs(of_own + 0.5) < 0.03),
        Line("departure time per ln beta, leading order 1/2a + 1/2r", per_log, law, abs(per_log / law - 1) < 0.05),
    ]
    fig, axes = plots.figure(1, 2, width=8.4)
    plots.phases(axes[0, 0], spec.ts, curves, list(betas), marks=rows)
    axes[0, 0].set_ylim(dips[-1] / 8, 2)
    axes[0, 1].plot(betas, dips, "o", label=r"to $\Pi_\#\rho_0$")
    axes[0, 1].plot(betas, own, "s", label=r"to $\Pi_\#\rho_t$")
    axes[0, 1].plot(betas, dips[-1] * np.sqrt(betas[-1] / betas), "k:", label=r"$\beta^{-1/2}$")
    axes[0, 1].set_xscale("log", base=2)
    axes[0, 1].set_yscale("log", base=2)
    axes[0, 1].set_xlabel(r"$\beta$")
    axes[0, 1].set_ylabel("least W2")
    axes[0, 1].legend()
    return rows, lines, fig


def graded_sphere(n: int, *, tilt):
    r"""About n nodes of $S^2$ and weights of the density 1 + <tilt, x>: latitudes graded to the equator, equal longitudes."""
    around = round(np.sqrt(2 * n / 3))
    meridian, mass = sphere.circle_quadrature(
        lambda angle: np.maximum(np.cos(angle), 0), 2 * (3 * n // (4 * around)), refine=(0.0,), smallest=3e-3
    )  # three of four nodes, the graded half among them, lie on the side of the circle where the density is not 0
    half = np.asarray(mass) > 0
    (radius, height), mass = np.asarray(meridian)[half].T, np.asarray(mass)[half]
    turn = 2 * np.pi * (np.arange(around) + 0.5) / around
    ring = np.stack([np.cos(turn), np.sin(turn), np.ones(around)], axis=-1)
    x = (np.stack([radius, radius, height], axis=-1)[:, None] * ring).reshape(-1, 3)
    w = np.repeat(mass, around) * (1 + x @ np.asarray(tilt))
    return jnp.asarray(x), jnp.asarray(w / w.sum())
