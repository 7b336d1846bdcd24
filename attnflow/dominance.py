r"""Heads that stay radially dominant along the flow: search by gradients, and the survey that checks what was found.

Dominance of head h means that its energy rises: $m_h = \sum_i w_i\langle f_i^h, P_i\sum_{h'} f_i^{h'}\rangle \ge 0$, which is $dE_h/dt$ for
aligned heads under exponential attention (arXiv 2605.04279). Condition 8 (reconstructed) and its sharper form ask more,
token by token, and suffice where $M_h M_{h'} = 0$. All three are lost at consensus by equally strong heads on complementary
subspaces; heads that share leading eigenvectors need not lose them.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from . import observe
from .attention import Exponential
from .constrained import AbstractSymmetricHeads, FixedNormHeads, frobenius, overlaps
from .field import AttentionField
from .fit import History, fit
from .heads import AlignedHeads
from .reduce import Dense
from .solve import solve
from .survey import CONDITIONS, Clouds, Survey, Symmetric, plain, relative_margins, survey

HOLDS = ("strength", "diversity", "clustering")
ENOUGH = 0.1  # share of clouds lost below which a search is not repeated


def soft_minimum(a: Array, temperature: Array) -> Float[Array, ""]:
    r"""$-\tau\log\mathrm{mean}\,e^{-a/\tau}$: between the minimum ($\tau \to 0$) and the mean ($\tau \to \infty$)."""
    return -temperature * (jax.nn.logsumexp(-a / temperature) - jnp.log(jnp.asarray(a.size, a.dtype)))


def fit_radial_dominance(
    heads: Symmetric,
    *,
    n: int,
    horizon: float,
    key: PRNGKeyArray,
    beta: tuple[float, float] = (0.5, 2.0),
    condition: str = "exact",
    hold: str | Collection[str] = HOLDS,
    attention: Callable = Exponential,
    steps: int = 360,
    clouds: int = 12,
    rate: float = 0.05,
    temperatures: tuple[float, ...] = (0.5, 0.2, 0.05),
    overlap: float = 0.02,
    tries: int = 2,
    fresh: int = 64,
    checkpoint: str | Path | None = None,
    progress: bool = False,
) -> tuple[AlignedHeads, "DominanceReport"]:
    r"""Move symmetric heads until their margins stay positive up to `horizon`; returns (heads, report).

    Raises the soft minimum over heads, times (and tokens) of `relative_margins`, averaged over clouds of n uniform tokens and
    over beta (log-uniform in the interval), by Adam with a falling rate, in stages of falling temperature. The class of
    `heads` says what may move: `AlignedHeads` everything, `OrthogonalHeads` keeps $M_h M_{h'} = 0$, `SemidefiniteHeads` the sign.

    **Arguments:**

    - `condition`: "exact", "sharp" or "condition8". Near consensus the last cannot hold for all heads at once.
    - `hold`: what may not be given up, of "strength" ($\|M_h\|_F$, exactly), "diversity" (`overlaps` of different heads do not
      grow by more than `overlap`: else equal heads are an answer), "clustering" (the mean cosine, averaged over the fitted times,
      does not fall: else frozen tokens are one). The last two by penalties; the report says what came of them.
    - `attention`: beta -> attention. Margins are energy rates for `Exponential` only.
    - `steps`, `clouds`: in all, and per step.
    - `tries`: a search whose heads lose more than a tenth of some clouds set aside by `horizon` starts again from moved
      heads, so many times in all; the best is returned.
    - `fresh`: clouds not fitted to, on which before and after are surveyed.

    **Errors:** ValueError for heads that are not symmetric or a single one, unknown names, or an empty interval.
    """
    hold = (hold,) if isinstance(hold, str) else tuple(hold)
    lower, upper = (float(b) for b in beta)
    _check(heads, condition, hold, (lower, upper), horizon)
    d = heads.matrix.shape[-1]
    survey_key, train_key, judge_key = jr.split(key, 3)
    look = functools.partial(
        survey, n=n, beta=(lower, upper), longest=4 * horizon, clouds=fresh, attention=attention, key=survey_key
    )
    before = look(heads)
    params = FixedNormHeads(heads, frobenius(heads.matrix)) if "strength" in hold else heads
    early = before.times <= 1.25 * horizon * (1 + 1e-9)
    goal = _Goal(
        attention=attention,
        condition=condition,
        times=jnp.linspace(
            0.0, 1.25 * horizon, 16
        ),  # a little further than asked: what holds there holds at the horizon
        temperature=jnp.asarray(1.0),
        overlap=jnp.abs(overlaps(heads)) + overlap if "diversity" in hold else None,
        pace=jnp.asarray(before.cosine[:, early].mean() - 0.02) if "clustering" in hold else None,
    )
    betas = jnp.asarray([lower, upper])
    batch = _Batch(Clouds(n, d, clouds, betas), Clouds(n, d, 16 * clouds, betas, gathered=True))
    judge = _Judged(
        goal, _Batch(Clouds(n, d, 4 * clouds, betas), Clouds(n, d, 64 * clouds, betas, gathered=True))(judge_key)
    )
    outcomes = []
    for attempt in range(max(1, tries)):
        folder = None if checkpoint is None else Path(checkpoint) / (f"try-{attempt}" if attempt else "")
        found, histories = _search(
            goal,
            params if attempt == 0 else _moved(params, jr.fold_in(train_key, 500 + attempt)),
            judge,
            batch=batch,
            steps=max(1, steps // len(temperatures)),
            rate=rate,
            temperatures=temperatures,
            key=jr.fold_in(train_key, 1000 * attempt) if attempt else train_key,
            checkpoint=folder,
            progress=progress,
        )
        lost = look(plain(found), key=judge_key).share_lost(horizon, condition)
        outcomes.append((lost, found, histories))
        if lost <= ENOUGH:
            break
    _, found, histories = min(outcomes, key=lambda outcome: outcome[0])
    fitted = plain(found)
    return fitted, DominanceReport(float(horizon), condition, hold, before, look(fitted), histories)


def _search(goal, params, judge, *, batch, steps, rate, temperatures, key, checkpoint, progress):
    """(parameters, histories): one fit in stages of falling temperature."""
    histories = []
    for stage, temperature in enumerate(temperatures):
        stage_goal = eqx.tree_at(lambda g: g.temperature, goal, jnp.asarray(float(temperature)))
        params, history = fit(
            stage_goal,
            params,
            steps=steps,
            optimiser=_adam(rate * 0.4**stage, steps),
            key=jr.fold_in(key, stage),
            batch=batch,
            clip=1.0,
            evaluate=eqx.tree_at(lambda j: j.goal, judge, stage_goal),
            checkpoint=None if checkpoint is None else checkpoint / f"stage-{stage}",
            progress=progress,
        )
        histories.append(history)
    return params, tuple(histories)


def _moved(params, key):
    """Another start: leaves moved by normal noise of half their root mean square, but those that a constraint holds."""
    slope = eqx.filter_grad(lambda p: jnp.sum(p.matrix * jr.normal(key, p.matrix.shape)))(params)
    leaves, structure = jax.tree.flatten(eqx.filter(params, eqx.is_inexact_array))
    noise = [jr.normal(jr.fold_in(key, i), a.shape, a.dtype) for i, a in enumerate(leaves)]
    return eqx.apply_updates(
        params,
        jax.tree.map(
            lambda a, g, e: jnp.where(jnp.any(g != 0), 0.5 * jnp.sqrt(jnp.mean(a * a)) * e, 0),
            jax.tree.unflatten(structure, leaves),
            slope,
            jax.tree.unflatten(structure, noise),
        ),
    )


@functools.cache
def _adam(rate, steps):
    """One object per setting, so that the compiled program is found again."""
    return optax.adam(optax.cosine_decay_schedule(rate, steps))


class _Goal(eqx.Module):
    """The loss of heads on a batch."""

    attention: Callable = eqx.field(static=True)
    condition: str = eqx.field(static=True)
    times: Float[Array, " T"]
    temperature: Float[Array, ""]
    overlap: Float[Array, "H H"] | None
    pace: Float[Array, ""] | None

    def __call__(self, heads, batch):
        heads = plain(heads)
        flowing, still = batch
        margins, cosines = jax.vmap(lambda beta, x: self.flow(heads, beta, x))(*flowing)
        at_rest = jax.vmap(lambda beta, x: self.margins(self.field(heads, beta), x))(*still)
        loss = -jnp.mean(jax.vmap(self.worst)(margins)) - self.worst(at_rest)
        if self.overlap is not None:
            above = jax.nn.relu(jnp.abs(overlaps(heads)) - self.overlap)
            loss = loss + 5 * jnp.sum(jnp.triu(above, 1))
        if self.pace is not None:
            loss = loss + 5 * jax.nn.relu(self.pace - jnp.mean(cosines))
        return loss

    def worst(self, margins):
        return soft_minimum(jnp.minimum(margins, 0.3), self.temperature)  # more than 0.3 is worth nothing

    def field(self, heads, beta):
        return AttentionField(heads, self.attention(beta), reduction=Dense())

    def margins(self, field, x):
        return relative_margins(field, x, self.condition)

    def flow(self, heads, beta, x):
        seen = {"margins": self.margins, "cosine": observe.mean_cosine}
        traj = solve(
            self.field(heads, beta),
            x,
            self.times,
            observe=seen,
            rtol=1e-3,
            atol=1e-5,
            max_steps=512,
            throw=False,
            adjoint=dfx.RecursiveCheckpointAdjoint(checkpoints=128),
        )
        return traj.values["margins"], traj.values["cosine"]


class _Batch(eqx.Module):
    """Clouds to follow, and clouds of every tightness to look at where they are, which costs next to nothing."""

    flowing: Clouds
    still: Clouds

    def __call__(self, key):
        return self.flowing(key), self.still(jr.fold_in(key, 1))


class _Judged(eqx.Module):
    goal: _Goal
    batch: Any

    def __call__(self, heads):
        return self.goal(heads, self.batch)


@dataclasses.dataclass(frozen=True)
class DominanceReport:
    """Before and after a fit, on clouds it has not seen; `print` it for the table."""

    horizon: float
    condition: str
    hold: tuple[str, ...]
    before: Survey
    after: Survey
    histories: tuple[History, ...]

    def rows(self) -> list[dict]:
        """One row per horizon (1/2, 1, 2 and 4 times the fitted one) and condition: the share of clouds lost, before and after."""
        return [
            {
                "horizon": factor * self.horizon,
                "condition": name,
                "before": self.before.share_lost(factor * self.horizon, name),
                "after": self.after.share_lost(factor * self.horizon, name),
            }
            for factor in (0.5, 1.0, 2.0, 4.0)
            for name in (*CONDITIONS, "energy")
        ]

    def __repr__(self) -> str:
        b, a = self.before, self.after
        lines = [
            f"Radial dominance ({self.condition}) up to t = {self.horizon:g}, holding {', '.join(self.hold) or 'nothing'}; "
            f"{len(b.betas)} fresh clouds, beta {b.betas.min():.3g} to {b.betas.max():.3g}",
            "share of clouds lost by t  " + "".join(f"{name:>18}" for name in (*CONDITIONS, "energy")),
        ]
        rows = self.rows()
        for i in range(0, len(rows), 4):
            cells = "".join(f"{r['before']:>9.2f} ->{r['after']:>6.2f}" for r in rows[i : i + 4])
            lines.append(f"  {rows[i]['horizon']:<24g} {cells}")
        median = [float(np.median(s.first_loss())) for s in (b, a)]
        off = [float(np.max(np.abs(s.overlaps - np.diag(np.diag(s.overlaps))))) for s in (b, a)]
        at = int(np.argmin(np.abs(b.times - self.horizon)))
        lines += [
            f"  median first loss (exact)  {median[0]:.3g} -> {median[1]:.3g}",
            f"  strengths |M_h|            {np.round(b.strengths, 4)} -> {np.round(a.strengths, 4)}",
            f"  largest overlap            {off[0]:.3f} -> {off[1]:.3f}",
            f"  mean cosine at t = {b.times[at]:<6.3g}  {b.cosine[:, at].mean():.3f} -> {a.cosine[:, at].mean():.3f}",
        ]
        return "\n".join(lines)


def _check(heads, condition, hold, beta, horizon):
    if not isinstance(heads, AlignedHeads | AbstractSymmetricHeads):
        raise ValueError(
            f"`heads` must be symmetric with V = B (`AlignedHeads` or a family of `constrained`), got `{type(heads).__name__}`: "
            "for others the margin is not an energy rate."
        )
    if heads.count < 2:
        raise ValueError("`heads` must be at least two: a single aligned head is always dominant.")
    if condition not in CONDITIONS:
        raise ValueError(f"`condition` must be one of {CONDITIONS}, got {condition!r}.")
    if not set(hold) <= set(HOLDS):
        raise ValueError(f"`hold` must be among {HOLDS}, got {hold}.")
    if not 0 < beta[0] < beta[1]:
        raise ValueError(f"`beta` must be an interval (lower, upper) with 0 < lower < upper, got {beta}.")
    if not horizon > 0:
        raise ValueError(f"`horizon` must be positive, got {horizon}.")
