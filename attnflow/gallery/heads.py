"""Heads: the critical beta of two of them, cosines over layers, spectra of random ones, noisy thresholds."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from scipy.optimize import brentq
from scipy.special import iv

from .. import observe, plots, sphere
from ..attention import Exponential, Softmax
from ..config import Experiment
from ..field import AttentionField
from ..figures import Line
from ..heads import Heads, goe
from ..solve import layers as residual
from ..solve import solve
from ..theory import equiangular, laplace, multi_head
from .tokens import flow


def heads(experiment: Experiment):
    r"""Condition 8 of two equal heads on orthonormal tokens changes sign at $\beta^*$; along the flow the entropy tends to log n."""
    x0, fields = experiment.fields()
    family = fields[0][1].heads
    n, count = x0.shape[0], int(family.dense(x0.shape[1]).score.shape[0])

    @jax.jit
    def margin(beta):
        return jnp.min(observe.dominance_margins(AttentionField(family, Exponential(beta)), x0)[0])

    found = brentq(lambda beta: float(margin(beta)), 0.1, 10.0, xtol=1e-12)
    expected = float(multi_head.critical_beta(1.0, n, count))
    lines = [Line("beta where Condition 8 ends", found, expected, abs(found / expected - 1) < 1e-8)]
    fig, axes = plots.figure(1, 2, width=7.5)
    betas = np.linspace(0.2, 2 * expected, 60)
    axes[0, 0].plot(betas, [float(margin(b)) for b in betas])
    axes[0, 0].axhline(0, color="0.7", linewidth=0.6)
    axes[0, 0].axvline(expected, color=plots.COLOURS[1], linestyle="--", label=r"$\beta^*$")
    axes[0, 0].set_yscale("symlog", linthresh=1e-3)
    axes[0, 0].set_xlabel(r"$\beta$")
    axes[0, 0].set_ylabel("margin of Condition 8")
    axes[0, 0].legend()
    rows = []
    for k, beta in enumerate(experiment.attention.betas):
        traj = flow(experiment, k, log_energy=observe.log_energy, deficit=observe.entropy_deficit)
        fall = float(np.min(np.diff(np.asarray(traj.values["log_energy"]))))
        deficit = np.asarray(traj.values["deficit"])[:, 0]
        rows.append({"beta": beta, "smallest rise of log E": fall, "log n - entropy at the end": float(deficit[-1])})
        lines.append(Line(f"beta {beta:g}: smallest rise of log E", fall, 0.0, fall > -1e-10))
        lines.append(Line(f"beta {beta:g}: log n - entropy at the end", deficit[-1].item(), 0.0, deficit[-1] < 1e-6))
        plots.timeseries(axes[0, 1], traj.ts, np.where(deficit > 1e-14, deficit, np.nan), label=rf"$\beta = {beta:g}$")
    axes[0, 1].set_yscale("log")
    axes[0, 1].set_ylabel("log n - entropy")
    axes[0, 1].legend()
    return rows, lines, fig


def rank(experiment: Experiment):
    """Eigenvalues of the Gram matrix above 1e-3, mean over 8 starts: they fall to 1 with V = B, and all stay with V = -B."""
    spec, (n, d) = experiment.solve, experiment.build_tokens()[0].shape
    G = experiment.build_heads(d).dense(d).score
    B = G @ jnp.swapaxes(G, 1, 2)

    def directions(field, x):
        return jnp.sum(jnp.linalg.eigvalsh(x.T @ x) > 1e-3).astype(x.dtype)

    @jax.jit
    def spanned(key, sign, beta):
        x0 = sphere.uniform(key, n, d)
        field = AttentionField(Heads(B, sign * B), Softmax(beta))
        seen = solve(field, x0, spec.ts, observe={"rank": directions}, rtol=spec.rtol, max_steps=spec.max_steps)
        return seen.values["rank"]

    fig, axes = plots.figure()
    rows, lines = [], []
    keys = jr.split(jr.key(experiment.seed), 8)
    for beta in experiment.attention.betas:
        for sign, name, wanted in ((1.0, "V = B", 1.0), (-1.0, "V = -B", float(d))):
            mean = np.asarray(jax.vmap(lambda k, s=sign, b=beta: spanned(k, s, b))(keys)).mean(axis=0)
            rows.append({"beta": beta, "V": name, "directions at the end": float(mean[-1])})
            good = mean[-1] <= 1.5 if sign > 0 else mean[-1] >= 0.9 * d
            lines.append(Line(f"beta {beta:g}, {name}: directions at the end", float(mean[-1]), wanted, bool(good)))
            plots.timeseries(axes[0, 0], spec.ts, mean, label=rf"{name}, $\beta = {beta:g}$", name="directions")
    axes[0, 0].legend()
    return rows, lines, fig


def equiangular_curve(experiment: Experiment):
    """The cosine of orthonormal tokens against time, and of the equiangular equation: they are one curve."""
    n = experiment.build_tokens()[0].shape[0]
    fig, axes = plots.figure()
    rows, lines = [], []
    for k, beta in enumerate(experiment.attention.betas):
        traj = flow(experiment, k, cosine=observe.mean_cosine)
        seen = np.asarray(traj.values["cosine"])
        law = np.asarray(equiangular.cosine(Softmax(beta), jnp.ones(1), n, 0.0, experiment.solve.ts))
        off = float(np.abs(seen - law).max())
        reached = float(equiangular.time(Softmax(beta), jnp.ones(1), n, 0.0, 0.999))
        rows.append({"beta": beta, "t at cosine .999": reached, "largest deviation": off})
        lines.append(Line(f"beta {beta:g}: largest deviation of the cosine", off, 0.0, off < 1e-6))
        plots.timeseries(axes[0, 0], traj.ts, seen, label=rf"$\beta = {beta:g}$", name="cosine")
        axes[0, 0].plot(experiment.solve.ts, law, "k:", linewidth=1)
    axes[0, 0].legend()
    return rows, lines, fig


def layers(experiment: Experiment):
    """Cosines between tokens after more and more layers of the same random weights: their mass moves to 1."""
    x0, fields = experiment.fields()
    depth = experiment.solve.times - 1
    traj = residual(fields[0][1], x0, depth, experiment.solve.t1 / depth, save_tokens=True)
    shown = [0, 2, 4, 8, depth]
    pairs = np.triu_indices(x0.shape[0], 1)
    cosines = {k: (x @ x.T)[pairs] for k in shown for x in [np.asarray(traj.values["tokens"][k])]}
    rows = [{"layer": k, "mean cosine": float(c.mean()), "lowest": float(c.min())} for k, c in cosines.items()]
    means = [row["mean cosine"] for row in rows]
    rising = all(b > a for a, b in pairwise(means[1:]))
    lines = [Line("mean cosine at the last layer", means[-1], 1.0, means[-1] > 0.99)]
    lines.append(Line("rises between the layers shown", float(rising), 1.0, rising))
    fig, axes = plots.figure()
    for k, c in cosines.items():
        axes[0, 0].hist(c, bins=np.linspace(-0.5, 1.05, 80), density=True, histtype="step", label=f"layer {k}")
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_xlabel("cosine of two tokens")
    axes[0, 0].set_ylabel("density")
    axes[0, 0].legend()
    return rows, lines, fig


def spectra(experiment: Experiment):
    """Eigenvalues of random value matrices: the unit disc (general) and the interval [-2, 2] (symmetric)."""
    d = experiment.build_tokens()[0].shape[1]
    general = experiment.build_heads(d).dense(d).value
    symmetric = goe(jr.key(experiment.seed), general.shape[0], d).dense(d).value
    disc = np.linalg.eigvals(np.asarray(general)).ravel()
    line = np.linalg.eigvalsh(np.asarray(symmetric)).ravel()
    square, spread = float(np.mean(np.abs(disc) ** 2)), float(np.mean(line**2))
    lines = [
        Line("mean |eigenvalue|^2 of the disc", square, 0.5, abs(square - 0.5) < 0.02),
        Line("mean eigenvalue^2 of the semicircle", spread, 1.0, abs(spread - 1) < 0.03),
    ]
    fig, axes = plots.figure(1, 2, width=7.5)
    plots.spectrum(axes[0, 0], disc, label="general")
    turn = np.linspace(0, 2 * np.pi, 200)
    axes[0, 0].plot(np.cos(turn), np.sin(turn), color=plots.COLOURS[1])
    axes[0, 1].hist(line, bins=60, density=True, color=plots.COLOURS[5])
    s = np.linspace(-2, 2, 200)
    axes[0, 1].plot(s, np.sqrt(4 - s**2) / (2 * np.pi), color=plots.COLOURS[1], label="semicircle")
    axes[0, 1].set_xlabel("eigenvalue of a symmetric head")
    axes[0, 1].legend()
    return [{"heads": general.shape[0], "d": d, "mean |eigenvalue|^2": square}], lines, fig


def noise():
    r"""Coupling $K_\#(\beta)$ above which noise no longer keeps tokens uniform, and $\beta_*$ where the transition changes order."""
    fig, axes = plots.figure()
    rows, lines = [], []
    betas = np.linspace(0.0, 12.0, 121)
    for k, d in enumerate((2, 3, 8)):
        threshold = np.array([float(laplace.noise_threshold(b, d)) for b in betas])
        change = float(laplace.noise_transition(d))
        ratio = float(iv(d / 2 + 1, change) / iv(d / 2, change))
        rows.append({"d": d, "beta of the change": change})
        lines.append(Line(f"d {d}: ratio of Bessel functions there", ratio, 1 / d, abs(ratio * d - 1) < 1e-9))
        axes[0, 0].plot(betas, threshold, color=plots.COLOURS[k], label=f"d = {d}")
        axes[0, 0].axvline(change, color=plots.COLOURS[k], linestyle=":")
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_xlabel(r"$\beta$ (dotted: $\beta_*$)")
    axes[0, 0].set_ylabel(r"$K_\#(\beta)$")
    axes[0, 0].legend()
    return rows, lines, fig
