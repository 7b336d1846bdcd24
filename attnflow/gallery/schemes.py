"""Variants of the layer: where the normalisation sits, and a bias against distant tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from .. import observe, plots, sphere
from ..config import Experiment
from ..figures import Line
from ..normalization import NormalizedPush, PeriNorm, PreNorm
from ..solve import solve

SCHEMES = {
    "post": lambda inner: inner,
    "pre": PreNorm,
    "peri": PeriNorm,
    "nGPT": lambda inner: NormalizedPush(inner, 0.2),
}


def normalization(experiment: Experiment):
    r"""Distance of the mean cosine from 1 under four normalisations: exponential on the sphere, $t^{-2}$ where the radius grows.

    Post-norm decays like $e^{-2t}$ and a normalised output at rate .2 like $e^{-.4t}$; pre- and peri-norm like the inverse square of a
    radius that grows like t.
    """
    x0, [(_, inner), *_] = experiment.fields()
    ts = np.concatenate([[0.0], np.geomspace(0.05, experiment.solve.t1, experiment.solve.times - 1)])

    def gap(field, x):
        return 1 - observe.mean_cosine(field, sphere.retract(x))

    fig, axes = plots.figure()
    rows, lines = [], []
    for k, (name, scheme) in enumerate(SCHEMES.items()):
        seen = solve(scheme(inner), x0, ts, observe={"gap": gap}, rtol=experiment.solve.rtol, atol=1e-12).values["gap"]
        seen = np.asarray(seen)
        if name in ("pre", "peri"):
            law, wanted, late = "power of t", -2.0, ts > 0.5 * ts[-1]
            found = float(np.polyfit(np.log(ts[late]), np.log(seen[late]), 1)[0])
        else:
            law, wanted = "rate", -2.0 if name == "post" else -0.4
            late = (seen < 1e-4) & (seen > 1e-9)
            found = float(np.polyfit(ts[late], np.log(seen[late]), 1)[0])
        rows.append({"scheme": name, "law": law, "measured": found, "theory": wanted})
        lines.append(Line(f"{name}: {law}", found, wanted, abs(found / wanted - 1) < 0.05))
        shown = seen > 1e-12
        axes[0, 0].plot(ts[1:][shown[1:]], seen[1:][shown[1:]], color=plots.COLOURS[k], label=name)
    axes[0, 0].set_xscale("log")
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_xlabel("t")
    axes[0, 0].set_ylabel("1 - mean cosine")
    axes[0, 0].legend()
    return rows, lines, fig


def alibi(experiment: Experiment):
    r"""Influence of every token's start on where causal tokens end, with and without a bias $-\lambda(i - j)$ on the scores.

    For $j \le i$ the bias splits into $-\lambda i$, which softmax divides out, and $\lambda j$: weights in proportion to $e^{\lambda j}$.
    Without a bias the first token, which attends to itself alone and never moves, decides; with one no token counts far from itself.
    """
    x0, _ = experiment.build_tokens()
    n = x0.shape[0]
    heads, beta, spec = experiment.build_heads(x0.shape[1]), experiment.attention.beta[0], experiment.solve

    @jax.jit
    def influence(slope):
        weights = jax.nn.softmax(slope * jnp.arange(n, dtype=x0.dtype))
        field = experiment.attention.field(heads, weights, beta, flat=False, causal=True)

        def end(x0):
            return solve(field, x0, jnp.array([0.0, spec.t1]), rtol=spec.rtol, throw=False).final[-1]

        jacobian = jax.jacrev(end)(x0)  # (d, n, d)
        size = jnp.sqrt(jnp.sum(jacobian**2, axis=(0, 2)))
        return size / jnp.sum(size)

    fig, axes = plots.figure()
    rows = []
    for slope in (0.0, 0.05, 1.0):
        share = np.asarray(influence(jnp.asarray(slope)))
        rows.append(
            {
                "lambda": slope,
                "token of the largest share": int(share.argmax()) + 1,
                "share of the first token": float(share[0]),
                "share of the last eight": float(share[-8:].sum()),
            }
        )
        axes[0, 0].plot(np.arange(1, n + 1), share, label=rf"$\lambda = {slope:g}$")
    first, recent = rows[0]["token of the largest share"], rows[-1]["share of the last eight"]
    lines = [
        Line("lambda 0: token of the largest share", float(first), 1.0, first == 1),
        Line("lambda 1: share of the last eight tokens", recent, 1.0, recent > 0.9),
    ]
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylim(1e-8, 1.5)
    axes[0, 0].set_xlabel("token")
    axes[0, 0].set_ylabel("share in moving the last token's end")
    axes[0, 0].legend()
    return rows, lines, fig
