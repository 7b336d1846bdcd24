"""What several studies share: one flow of random tokens, the sweep of a study's points, crossing times."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import observe, sphere
from ..attention import Exponential, ReLU, Softmax
from ..field import AttentionField
from ..heads import ScalarHeads
from ..points import Points
from ..reduce import Dense
from ..schema import to_table
from ..solve import solve
from ..sweep import sweep

CLOSE = 0.999  # cosine above which a pair counts as one cluster, in the published phase diagrams


def close_pairs(field, x):
    """Share of pairs with cosine above .999."""
    return observe.pair_fraction(x, CLOSE)


def one_flow(
    beta,
    strengths,
    key,
    ts,
    *,
    n: int,
    d: int,
    kind: str,
    rtol: float,
    orthogonal: bool = False,
    save_tokens: bool = False,
):
    """One point: a flow of n uniform tokens, or of orthonormal ones moved by 1e-3, under scalar heads."""
    noise = sphere.uniform(key, n, d)
    x0 = sphere.retract(jnp.eye(n, d) + 1e-3 * noise) if orthogonal else noise
    attention = ReLU() if kind == "relu" else {"softmax": Softmax, "exponential": Exponential}[kind](beta)
    field = AttentionField(ScalarHeads(strengths), attention, reduction=Dense())
    seen = {"close_pairs": close_pairs, "mean_cosine": observe.mean_cosine}
    return solve(field, x0, ts, observe=seen, save_tokens=save_tokens, rtol=rtol, atol=1e-3 * rtol, throw=False)


def swept(study: Any, run: Callable, points: Points, *, shared: tuple, store: Path, **options):
    """The Dataset of a study's points, from its store where it has been there before; long flows run together."""
    return sweep(run, points, shared=shared, store=store, cost=by_beta, config=to_table(study), **options)


def by_beta(beta, **rest):
    return beta


def first_crossing(ts, values, level=0.5):
    """First time at which `values` reaches the level, by interpolation; NaN where it never does."""
    above = np.flatnonzero(values >= level)
    if not above.size:
        return np.nan
    k = above[0]
    if k == 0:
        return float(ts[0])
    return float(np.interp(level, values[k - 1 : k + 1], ts[k - 1 : k + 1]))
