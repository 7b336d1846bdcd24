r"""Metastability to the end: collapsed tokens are merged into weighted ones, and the flow goes on in log time.

The last merge of a metastable state comes at times like $e^{c\beta}$. Tokens closer than a tolerance that are still
approaching are one token of summed weight: what is lost is of the third order in the tolerance, since two close tokens
conserve their mean. Nothing is compiled again: a merged token keeps its place with weight 0.
"""

import dataclasses
from collections.abc import Callable, Mapping

import diffrax as dfx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..attention import Exponential, Softmax, concrete
from ..field import AttentionField
from ..solve import Observable
from ..validate import checked_tokens
from .tree import History, MergeTree, merge_times, staircase, watch
from .walk import Plan, Walk

COARSER = 10.0  # of the second run that gives the errors
SAME_SCORES = 0.1  # times 1/sqrt(beta |B|): scores of tokens this close differ by .005


def merge_flow(
    field: AttentionField,
    x0: Float[Array | np.ndarray, "n d"],
    *,
    t1: float = float("inf"),
    tolerance: float | None = None,
    threshold: float | None = None,
    rtol: float | None = None,
    observe: Mapping[str, Observable] | None = None,
    solver: dfx.AbstractAdaptiveSolver | None = None,
    max_steps: int = 20_000,
    error: bool = True,
) -> MergeTree:
    r"""Follow the flow until all tokens are one, nothing moves any more, or `t1`, merging tokens that have collapsed.

    Softmax and exponential attention, any heads. Times are found to the accuracy of the integration, whatever their size:
    $\ln t$ is what is computed, and rates may be as small as the exponent of the dtype allows, and smaller.
    For anisotropic $V_h$ that are not symmetric or do not commute, drifts below rounding are not seen, and reported so.

    **Arguments:**

    - `tolerance`: distance below which tokens that approach are merged; default 10 sqrt(eps) of the dtype.
    - `threshold`: the distance that defines *when* groups merge: the last time their union is wider. It changes the
      times by $O(1)$ natural units, not their number. Default: cosine .999, or $0.1/\sqrt{\beta \max|B|}$ where that is less.
    - `rtol`: local relative error of $\ln t$; default 1e-8 (1e-5 in float32).
    - `observe`: functions `(field, x) -> array` by name, at every step, of all n tokens with merged ones in one place.
    - `error`: run again with tolerances ten times as large, and report the differences.

    **Errors:** ValueError for fields whose tokens do not merge by this rule: causal, flat, other attentions, weights of 0.
    """
    if not concrete(x0):
        raise ValueError("`merge_flow` decides what to merge while it runs: call it outside jit, vmap and grad.")
    x = np.asarray(checked_tokens(x0))
    attention = _sharp(field)
    _check(field, x)
    fine = x.dtype == np.float64
    rtol = (1e-8 if fine else 1e-5) if rtol is None else rtol
    tolerance = 10 * float(np.finfo(x.dtype).eps) ** 0.5 if tolerance is None else tolerance
    heads = field.heads.dense(x.shape[1])
    sharpness = float(attention.beta) * float(np.linalg.norm(np.asarray(heads.score), 2, axis=(1, 2)).max())
    if threshold is None:
        threshold = min(0.002**0.5, SAME_SCORES / max(sharpness, 1.0) ** 0.5)
    if not 0 < tolerance < threshold:
        raise ValueError(f"`tolerance` must lie between 0 and `threshold` = {threshold:.3g}, got {tolerance:.3g}.")
    if not (t1 > 0 and rtol > 0):
        raise ValueError(f"`t1` and `rtol` must be positive, got {t1} and {rtol}.")
    plan = Plan(t1, threshold, tolerance, rtol, 1 + sharpness, dfx.Dopri8() if solver is None else solver, max_steps)
    tree = _tree(field, x, plan, observe or {})
    if not error:
        return tree
    plan = plan._replace(tolerance=min(COARSER * tolerance, threshold / 2), rtol=COARSER * rtol)
    return _with_errors(tree, _tree(field, x, plan, {}))


def shifted_energy(field: AttentionField, d: int) -> Callable[[np.ndarray, np.ndarray], float] | None:
    r"""$\frac1H \sum_h \sum_{ij} w_i w_j e^{-\frac\beta2 (x_i - x_j)^\top B_h (x_i - x_j)}$ as a function of (x, w), in numpy.

    For $B = I$ it is $\sum_{ij} w_i w_j e^{\beta(\langle x_i, x_j\rangle - 1)}$, the energy $2\beta e^{-\beta} E$. Separate clusters of
    weights $W_k$ have $\sum_k W_k^2$. None where a $B_h$ is not symmetric positive semidefinite.
    """
    beta = float(_sharp(field).beta)
    score = np.asarray(field.heads.dense(d).score, np.float64)
    slack = 1e-6 * np.abs(score).max()
    if np.abs(score - np.swapaxes(score, 1, 2)).max() > slack or np.linalg.eigvalsh(score).min() < -slack:
        return None

    def energy(x, w):
        s = x @ score @ x.T
        own = np.diagonal(s, axis1=1, axis2=2)
        kernel = np.exp(beta * (s - (own[:, :, None] + own[:, None]) / 2))
        return float(w @ np.mean(kernel, axis=0) @ w)

    return energy


def _tree(field: AttentionField, x0: np.ndarray, plan: Plan, observe: Mapping[str, Observable]) -> MergeTree:
    walk = Walk(field, x0, plan)
    status, reason = walk.to_the_end()
    history = History(walk.segments, solver=plan.solver)
    w = np.asarray(field.token_weights(jnp.asarray(x0)), np.float64)
    merges = merge_times(history, walk.fused, w, plan.threshold)
    energy = shifted_energy(field, x0.shape[1])
    plateaus, values = ([], {}) if energy is None else staircase(history, merges, energy, w)
    return MergeTree(
        field=field,
        merges=tuple(merges),
        plateaus=tuple(plateaus),
        status=status,
        reason=reason,
        log_t=history.log_t,
        values=values | watch(dict(observe), field, history.tokens),
        final=history.tokens[-1],
        groups=tuple(sorted(tuple(sorted(g)) for g in walk.groups.values())),
        threshold=plan.threshold,
        tries=walk.tries,
        history=history,
    )


def _sharp(field: AttentionField) -> Softmax | Exponential:
    if not isinstance(field.attention, Softmax | Exponential):
        raise ValueError(f"merging needs `Softmax` or `Exponential` attention, got `{type(field.attention).__name__}`.")
    return field.attention


def _check(field: AttentionField, x0: np.ndarray) -> None:
    if field.flat or field.causal:
        raise ValueError("merging needs a field on the sphere that is not causal: `flat=False`, `causal=False`.")
    if not bool(jnp.all(field.token_weights(jnp.asarray(x0)) > 0)):
        raise ValueError("`weights` must all be positive; leave tokens of weight 0 out.")


def _with_errors(tree: MergeTree, other: MergeTree) -> MergeTree:
    """Differences of the times of the same unions and, where both runs have the same levels, of the same plateaus."""
    times = {frozenset(m.who[0] + m.who[1]): m.log_t for m in other.merges}
    ends = {(k, round(p.energy, 9)): p.end for k, p in enumerate(other.plateaus)}
    return dataclasses.replace(
        tree,
        merges=tuple(m._replace(error=_gap(m.log_t, times.get(frozenset(m.who[0] + m.who[1])))) for m in tree.merges),
        plateaus=tuple(
            p._replace(error=_gap(p.end, ends.get((k, round(p.energy, 9))))) for k, p in enumerate(tree.plateaus)
        ),
    )


def _gap(a: float, b: float | None) -> float:
    return float("inf") if b is None else 0.0 if a == b else abs(a - b)
