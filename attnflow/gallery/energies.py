"""Least and greatest energies: what tokens come to that repel, or attract, one another under D (arXiv 2501.03096)."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .. import observe, plots, sphere
from ..attention import Exponential
from ..config import Experiment
from ..field import AttentionField
from ..figures import Line
from ..heads import Heads
from ..phases import leading_space
from ..solve import solve
from .tokens import solved

NODES = 20_000  # of the sphere, where the least potential of the tokens is sought


def energy_minima(experiment: Experiment):
    r"""Tokens that repel one another under D, each head a case: the uniform law (D = I), a law about poles, the poles, a ring.

    $E = \frac12\iint e^{\langle x, Dy\rangle}$ is convex in the law for positive semidefinite D, and at least 1/2, which laws on the
    kernel of D attain. For every law $\mu$ with potential $U = \int e^{\langle\cdot, Dy\rangle}d\mu$ the least energy is at least
    $\min U - E(\mu)$: the last column of lines says how near the tokens have come by this bound.
    """
    x0, cases = _cases(experiment)
    nodes, _ = sphere.sphere_quadrature(lambda x: np.ones(len(x)), NODES)
    rows, lines, found = [], [], []
    for name, D, field in cases:
        traj = solved(experiment, field, x0, energy=observe.energy)
        energy = np.asarray(traj.values["energy"])
        end, rise = float(energy[-1]), float(np.max(np.diff(energy)))
        least = end - float(jnp.min(_potential(nodes, traj.final, D)) - end)
        rows.append({"D": name, "energy": end, "above the least, at most": least})
        lines.append(Line(f"D = {name}: energy above the least, at most", least, 0.0, 0 <= least < 1e-4))
        lines.append(Line(f"D = {name}: largest rise of the energy", rise, 0.0, rise < 1e-10))
        found.append((name, traj.final, leading_space(-np.diag(np.diag(D)))))
    x = [np.asarray(final) for _, final, _ in found]
    second = float(np.abs(x[0].T @ x[0] / len(x0) - np.eye(3) / 3).max())
    lines.append(Line(f"D = {cases[0][0]}: second moments away from 1/3", second, 0.0, second < 1e-3))
    return rows, lines, _panels(found)


def energy_maxima(experiment: Experiment):
    r"""Single tokens under V = B = D, each head a case: $x = e^{sD}x_0 / |e^{sD}x_0|$, up to the leading eigenspace, its nearest point.

    The law of one token at a leading eigenvector has the greatest energy, $\frac12e^{\lambda_1}$. Grey: the way of each token.
    """
    x0, cases = _cases(experiment)
    spec = experiment.solve
    rows, lines, found = [], [], []

    for name, D, field in cases:
        paths = np.swapaxes(np.asarray(_alone(field, x0, spec.ts, spec.rtol, spec.atol)), 0, 1)
        space = leading_space(np.asarray(D))
        nearest = np.asarray(x0) @ space @ space.T
        nearest /= np.linalg.norm(nearest, axis=1, keepdims=True)
        off = float(np.linalg.norm(paths[-1] - nearest, axis=1).max())
        energy = np.exp(np.einsum("ti,ij,tj->t", paths[-1], np.asarray(D), paths[-1])) / 2
        short = float(np.exp(np.max(np.diag(D))) / 2 - energy.min())
        rows.append(
            {"D": name, "tokens": len(x0), "farthest from its limit": off, "energy short of the greatest": short}
        )
        lines.append(Line(f"D = {name}: largest distance from the projection of the start", off, 0.0, off < 1e-6))
        found.append((name, paths[-1], space, paths))
    return rows, lines, _panels(found)


@eqx.filter_jit
def _alone(field, x0, ts, rtol, atol):
    """The way (n, T, d) of every token by itself."""

    def one(x):
        return solve(field, x[None], ts, save_tokens=True, rtol=rtol, atol=atol).values["tokens"][:, 0]

    return jax.vmap(one)(x0)


def _cases(experiment):
    """Tokens, and (name, D, field) for every head of the configuration, D being its score."""
    x0, _ = experiment.build_tokens()
    heads = experiment.build_heads(x0.shape[1]).dense(x0.shape[1])
    attention, cases = Exponential(experiment.attention.beta[0]), []
    for D, V in zip(heads.score, heads.value, strict=True):
        name = f"diag({', '.join(f'{v:g}' for v in np.diag(D))})"
        cases.append((name, D, AttentionField(Heads(D[None], V[None]), attention)))
    return x0, cases


@eqx.filter_jit
def _potential(nodes, x, D):
    return jax.lax.map(lambda y: jnp.mean(jnp.exp(x @ (D @ y))), nodes, batch_size=1000)


def _panels(found):
    """One sphere for every case, with the eigenspace it tends to drawn in colour."""
    fig, axes = plots.figure(1, len(found), width=2.6 * len(found), height=3.0)
    for ax, (name, x, space, *paths) in zip(axes[0], found, strict=True):
        plots.sphere(ax, x, spaces=[space] if space.shape[1] < 3 else [], paths=paths[0] if paths else None)
        ax.set_title(f"D = {name}", fontsize=9)
    return fig
