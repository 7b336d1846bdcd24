"""Tokens on the sphere: clusters, the rate at consensus, a rotating ring, and what repelling tokens come to."""

import jax.numpy as jnp
import numpy as np
from scipy.special import iv

from .. import observe, plots
from ..attention import Exponential, Softmax
from ..config import Experiment
from ..field import AttentionField
from ..figures import Line
from ..heads import Heads
from ..solve import Observable, Trajectory, solve

CLUSTER = 0.999  # cosine above which two tokens are of one cluster


def sphere(experiment: Experiment):
    """Tokens on the sphere and the way they came: one cluster at small beta, several that last at large beta."""
    fig, axes = plots.figure(1, len(experiment.attention.betas), width=7.0)
    rows, lines = [], []
    for k, beta in enumerate(experiment.attention.betas):
        traj = flow(experiment, k)
        count = int(observe.clusters(traj.final, CLUSTER)[0])
        rows.append({"beta": beta, "clusters at the end": count})
        wanted, good = (1.0, count == 1) if k == 0 else (2.0, 2 <= count <= 10)
        lines.append(Line(f"beta {beta:g}: clusters{'' if k == 0 else ' (at least)'}", float(count), wanted, good))
        plots.sphere(axes[0, k], traj.final, paths=traj.values["tokens"])
        axes[0, k].set_title(rf"$\beta = {beta:g}$", fontsize=9)
    return rows, lines, fig


def late_rate(experiment: Experiment):
    r"""$1 - \bar\gamma$, the mean cosine's distance from 1: its last decay is $e^{-2t}$ at every beta."""
    fig, axes = plots.figure()
    rows, lines = [], []
    for k, beta in enumerate(experiment.attention.betas):
        traj = flow(experiment, k, cosine=observe.mean_cosine)
        gap = 1 - np.asarray(traj.values["cosine"])
        last = (gap < 1e-4) & (gap > 1e-9)
        rate = -float(np.polyfit(np.asarray(traj.ts)[last], np.log(gap[last]), 1)[0])
        rows.append({"beta": beta, "rate": rate})
        lines.append(Line(f"beta {beta:g}: rate of decay", rate, 2.0, abs(rate - 2) < 0.02))
        plots.timeseries(axes[0, 0], traj.ts, np.where(gap > 1e-13, gap, np.nan), label=rf"$\beta = {beta:g}$")
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylabel("1 - mean cosine")
    axes[0, 0].legend()
    return rows, lines, fig


def rotation(experiment: Experiment):
    r"""Repelling tokens under a score with an antisymmetric part eps A: a ring that turns with angular speed $I_1(\epsilon)$."""
    traj = flow(experiment)
    score = np.asarray(experiment.build_heads(3).dense(3).score)[0]
    eps = float(score[0, 1])
    x = np.asarray(traj.values["tokens"])
    angle = np.unwrap(np.arctan2(x[..., 1], x[..., 0]), axis=0)
    late = 3 * len(angle) // 4
    ts = np.asarray(traj.ts)
    speed = float(np.mean((angle[-1] - angle[late]) / (ts[-1] - ts[late])))
    wide = float(np.mean(np.abs(x[-1, :, 2])))
    expected = float(iv(1, eps))
    lines = [
        Line("angular speed", abs(speed), expected, abs(abs(speed) / expected - 1) < 0.01),
        Line("mean distance from the ring", wide, 0.0, wide < 0.05),
    ]
    fig, axes = plots.figure(1, 2, width=7.0)
    plots.sphere(axes[0, 0], traj.final)
    plots.timeseries(axes[0, 1], ts, angle[:, ::80] - angle[:1, ::80], name="angle turned")
    axes[0, 1].plot(ts, np.sign(speed) * expected * ts, "k--", label=r"$I_1(\epsilon)\,t$")
    axes[0, 1].legend()
    return [{"eps": eps, "angular speed": speed, "I_1(eps)": expected}], lines, fig


def rotation_triangle(experiment: Experiment):
    r"""Where the antisymmetric part eps A of the score is large, the turning ring breaks up into a triangle.

    The uniform ring is linearly unstable (reconstructed, by Fourier modes): for the exponential the third mode of the angle grows at
    rate $\frac32(I_2(\epsilon) + I_4(\epsilon))$ and the second mode of the height at $I_2(\epsilon)$; for softmax at
    $\frac32(I_2 + I_4)/I_0 - 3I_1I_3/I_0^2$ and $I_2/I_0$. Right: a ring moved by 1e-5, dotted these rates.
    """
    x0, fields = experiment.fields()
    heads = fields[0][1].heads
    eps = float(np.asarray(heads.dense(3).score)[0, 0, 1])
    final = flow(experiment).final
    count = int(observe.clusters(final, CLUSTER)[0])
    rows, lines = [], [Line("clusters at the end", float(count), 3.0, count == 3)]
    fig, axes = plots.figure(1, 2, width=8.0)
    plots.sphere(axes[0, 0], final)
    i0, i1, i2, i3, i4 = (float(iv(m, eps)) for m in range(5))
    for name, attention, laws in (
        ("exponential", Exponential(1.0), (1.5 * (i2 + i4), i2)),
        ("softmax", Softmax(1.0), (1.5 * (i2 + i4) / i0 - 3 * i1 * i3 / i0**2, i2 / i0)),
    ):
        ts, *modes = _ring_modes(AttentionField(heads, attention), len(x0), experiment.solve.max_steps)
        for what, size, law in zip(("angle", "height"), modes, laws, strict=True):
            rate = float(np.polyfit(ts, np.log(size), 1)[0])
            rows.append({"attention": name, "mode": what, "rate": rate, "closed form": law})
            lines.append(Line(f"{name}, mode of the {what}: rate of growth", rate, law, abs(rate / law - 1) < 1e-4))
            axes[0, 1].plot(ts, size, label=f"{what}, {name}")
            axes[0, 1].plot(ts, size[-1] * np.exp(law * (ts - ts[-1])), "k:", linewidth=1)
    axes[0, 1].set_yscale("log")
    axes[0, 1].set_xlabel("t")
    axes[0, 1].set_ylabel("size of the mode")
    axes[0, 1].legend()
    return rows, lines, fig


def _ring_modes(field, n, max_steps, moved=1e-5):
    """Sizes of the third mode of the angle and the second of the height of a ring moved in both, once the others have gone."""
    turn = 2 * np.pi * np.arange(n) / n
    angle, height = turn + moved * np.sin(3 * turn), moved * np.cos(2 * turn)
    flat = np.sqrt(1 - height**2)
    x0 = np.stack([flat * np.cos(angle), flat * np.sin(angle), height], axis=-1)
    ts = np.linspace(20, 60, 41)
    traj = solve(field, x0, np.concatenate([[0.0], ts]), save_tokens=True, rtol=1e-9, atol=1e-13, max_steps=max_steps)
    x = np.asarray(traj.values["tokens"])[1:]
    theta = np.arctan2(x[..., 1], x[..., 0])
    return ts, np.abs(np.exp(3j * theta).mean(axis=1)), np.abs((x[..., 2] * np.exp(2j * theta)).mean(axis=1))


def repulsion(experiment: Experiment):
    """Tokens that repel one another come to the uniform law: equal second moments, mean 0, the energy at its least."""
    traj = flow(experiment, energy=observe.energy)
    x = np.asarray(traj.final)
    second = np.linalg.eigvalsh(x.T @ x / len(x))
    off, mean = float(np.abs(second - 1 / 3).max()), float(np.linalg.norm(x.mean(axis=0)))
    least = float(np.sinh(1.0) / 2)  # of the uniform law on S^2, by the mean of e^<x, y> over y
    energy = np.asarray(traj.values["energy"])
    lines = [
        Line("largest second moment away from 1/3", off, 0.0, off < 1e-3),
        Line("length of the mean", mean, 0.0, mean < 1e-3),
        Line("energy, of the uniform law sinh(1)/2", float(energy[-1]), least, abs(energy[-1] / least - 1) < 1e-3),
    ]
    fig, axes = plots.figure(1, 2, width=7.0)
    plots.sphere(axes[0, 0], traj.final)
    plots.timeseries(axes[0, 1], traj.ts, energy, name="energy")
    axes[0, 1].axhline(least, color="0.5", linestyle="--", linewidth=1)
    return [{"energy": float(energy[-1]), "uniform law": least}], lines, fig


def four_particles(experiment: Experiment):
    r"""Four tokens at rest under repulsion by D = diag(1, r): $\tanh(x_1^2) / \tanh(r x_2^2) = r$."""
    x0, _ = experiment.build_tokens()
    ratios, found = (0.25, 0.5, 0.75), []
    for r in ratios:
        matrix = jnp.diag(jnp.array([1.0, r]))[None]
        field = AttentionField(Heads(matrix, -matrix), Exponential(experiment.attention.beta[0]))
        square = np.asarray(solved(experiment, field, x0).final) ** 2
        found.append(float(np.mean(np.tanh(square[:, 0]) / np.tanh(r * square[:, 1]))))
    rows = [{"r": r, "tanh ratio": f} for r, f in zip(ratios, found, strict=True)]
    lines = [
        Line(f"r {r:g}: tanh ratio", f, r, abs(f / r - 1) < 1e-6) for r, f in zip(ratios, found, strict=True)
    ]  # fmt: skip
    fig, axes = plots.figure(width=4.2)
    axes[0, 0].plot(ratios, found, "o", label="four particles at rest")
    axes[0, 0].plot([0, 1], [0, 1], "--", color="0.5", label="identity")
    axes[0, 0].set_xlabel("r")
    axes[0, 0].set_ylabel(r"$\tanh(x_1^2)\,/\,\tanh(r\,x_2^2)$")
    axes[0, 0].legend()
    return rows, lines, fig


def flow(experiment: Experiment, k: int = 0, **observed: Observable) -> Trajectory:
    """The experiment's k-th flow with its tokens kept."""
    x0, fields = experiment.fields()
    return solved(experiment, fields[k][1], x0, **observed)


def solved(experiment: Experiment, field: AttentionField, x0, **observed: Observable) -> Trajectory:
    """A flow at the experiment's times and accuracy."""
    spec = experiment.solve
    return solve(
        field, x0, spec.ts, observe=observed, save_tokens=True, rtol=spec.rtol, atol=spec.atol, max_steps=spec.max_steps
    )
