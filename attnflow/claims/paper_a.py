r"""Statements of arXiv 2605.10931 (one softmax head at low temperature) on a field and its tokens.

Exact wording of Assumption 2 and Hypothesis 1 and all constants were not available: the forms here are reconstructed from
the formulas that are, and constants are arguments.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import observe, sphere, transport
from ..attention import Softmax
from ..field import AbstractField, AttentionField, ZeroTemperatureField
from ..heads import Heads
from ..theory import low_temperature as cold
from ..theory.laplace import laplace_mean
from .claim import Claim, at_least, at_most, attention_field, equal

Tokens = Float[Array, "n d"]
PAPER = "arXiv 2605.10931"
SOFTMAX = (Softmax, "softmax attention")
ASSUMPTION_1 = "Assumption 1: B invertible, V B^T symmetric, with a gap above which its top eigenspace lies"


def assumption_1(field: AbstractField, x: Tokens) -> Claim:
    r"""B invertible, $A = V B^\top$ symmetric, gap $\gamma > 0$: entries (least singular value of B, $\gamma$, asymmetry of A).

    Each over the size of its matrix, beyond $10^{-6}$: the last is $-|A - A^\top|$, and $\gamma$ that of the symmetric part.
    """
    heads = one_head(field, x)
    B, A = heads.score[0], heads.value[0] @ heads.score[0].T
    sigma = jnp.linalg.svd(B, compute_uv=False)
    gap, skew = cold.spectral_gap(heads, symmetrize=True), cold.asymmetry(heads)
    lhs = jnp.stack([sigma[-1] / sigma[0], gap / jnp.max(jnp.abs(A)), -skew / jnp.max(jnp.abs(A))])
    return at_least(lhs, 1e-6 * jnp.array([1.0, 1.0, -1.0]), "one head", f"Assumption 1, {PAPER}")


def assumption_2(field: AbstractField, x: Tokens, *, moment: float) -> Claim:
    r"""$E[\tan^p\angle(x, E_1)] < \infty$ with p = `moment` (reconstructed): for a positive bounded density iff p < m = dim $E_1$.

    So it contradicts Assumption 3 for p = 2 and m = 1 or 2. The tokens give the dimension only.
    """
    m = cold.principal_space(one_head(field, x), symmetrize=True)[1]
    rule = "a positive bounded density (Assumption 3)"
    m = m.astype(jnp.result_type(float))
    claim = at_most(moment, m, rule, f"Assumption 2, {PAPER}")
    return Claim(claim.lhs, m, claim.slack, claim.slack > 0, rule, claim.source, "<")


def assumption_3(density: Float[Array, " n"]) -> Claim:
    r"""A strictly positive density, from its values at n points; that it is Lipschitz no finite set of values decides."""
    low = jnp.min(density)
    return Claim(low, jnp.zeros_like(low), low, low > 0, "a density bounded below", f"Assumption 3, {PAPER}", ">")


def theorem_1(
    field: AbstractField, x0: Tokens, x: Tokens, *, t: float, growth: float, decay: float, constant: float
) -> Claim:
    r"""$W_2(\rho_t, \Pi_\#\rho_0) \le C(\sqrt{\log(\beta+1)/\beta}\,e^{C_1 t} + e^{-ct})$ for tokens x at time t from x0.

    The left side is the upper end of `transport.w2`, chordal. The theorem leaves $C$ = `constant`, $C_1$ = `growth` and
    c = `decay` implicit: `theory.low_temperature.projection_rate` is c, `field_growth` a lower estimate of $C_1$.
    """
    field = attention_field(field, "Theorem 1", attention=SOFTMAX)
    w = field.token_weights(x)
    target = cold.projection(one_head(field, x0), x0)
    gap = transport.w2(x, target, x_weights=w, y_weights=w).upper
    bound = constant * cold.concentration_bound(field.attention.beta, t, growth, decay)
    return at_most(jnp.asarray(gap), bound, f"{ASSUMPTION_1}; Assumptions 2 and 3", f"Theorem 1, {PAPER}")


def corollary_2(field: AbstractField, x0: Tokens, times: Float[Array, "2"], *, decay: float, tolerance: float) -> Claim:
    r"""The zero-temperature $W_2(\rho_t, \Pi_\#\rho_0)$ decays at the rate `decay` between two times, within `tolerance`.

    The rate is $\min(m\gamma/2b_2, \gamma/b_1)$ (`theory.low_temperature.projection_rate`), not $\gamma/|B|$, for weighted
    tokens that resolve the mass near the complement of $E_1$; later than those resolve it becomes $\gamma/b_1$.
    """
    w = field.token_weights(x0)
    heads = one_head(field, x0)
    gap = [cold.zero_temperature_w2(heads, cold.zero_temperature_flow(heads, x0, t), w) for t in times]
    rate = jnp.log(gap[0] / gap[1]) / (times[1] - times[0])
    rule = f"{ASSUMPTION_1}; Assumption 3, resolved"
    return equal(rate, decay, rule, f"Corollary 2, {PAPER}", tolerance=tolerance)


def projection_distance(field: AbstractField, x: Tokens) -> Claim:
    r"""$W_2(\rho, \Pi_\#\rho)^2 = 2 - 2E|P_1 x|$ for every measure: $\Pi$ is the gradient of a convex function (derived).

    Optimal transport on the left. Along the zero-temperature flow $\Pi x_t = \Pi x_0$, so it gives the distance exactly.
    """
    w, heads = field.token_weights(x), one_head(field, x)
    gap = transport.w2(x, cold.projection(heads, x), x_weights=w, y_weights=w)
    closed = cold.zero_temperature_w2(heads, x, w)
    rule, source = "V B^T symmetric", f"Corollary 2, {PAPER}"
    return equal(jnp.asarray((gap.lower + gap.upper) / 2), closed, rule, source, tolerance=1e-6)


def laplace_principle(field: AbstractField, x: Tokens, *, constant: float) -> Claim:
    r"""$|m_i - y_i^*| \le C\sqrt{\log(\beta+1)/\beta}$: the softmax mean of the tokens against $y^* = B^\top x/|B^\top x|$.

    The rate of the theorem; for a smooth density the truth is $O(1/\beta)$ (`laplace_mean`, `laplace_expansion`).
    """
    field, mean, target, _ = _answers(field, x)
    beta = field.attention.beta
    bound = constant * jnp.sqrt(jnp.log1p(beta) / beta)
    rule = "tokens that resolve a positive Lipschitz density"
    return at_most(jnp.max(sphere.safe_norm(mean - target)), bound, rule, f"quantitative Laplace principle, {PAPER}")


def laplace_mean_of_uniform(field: AbstractField, x: Tokens, *, tolerance: float) -> Claim:
    r"""The softmax mean of the uniform sphere is $A_d(\kappa) y^*$, $\kappa = \beta|B^\top x|$, exactly (derived)."""
    field, mean, target, kappa = _answers(field, x)
    length = jnp.sum(mean * target, axis=-1)
    exact = laplace_mean(x.shape[-1], kappa)
    rule = "tokens that resolve the uniform density"
    return equal(length, exact, rule, f"quantitative Laplace principle, {PAPER}", tolerance=tolerance)


def three_phases(ts: Float[Array, " T"], to_projection: Float[Array, " T"], to_terminal: Float[Array, " T"]) -> Claim:
    r"""Concentration, departure, terminal state, in this order: (t of least $W_2$, t when it is > .5 again, t when the other is < .1).

    From the distances to $\Pi_\#\rho_0$ and to the terminal states along a run; infinite where it does not happen.
    """
    least = jnp.argmin(to_projection)
    late = ts >= ts[least]

    def first(happens):
        return jnp.min(jnp.where(happens & late, ts, jnp.inf))

    left, arrived = first(to_projection > 0.5), first(to_terminal < 0.1)
    start, end = jnp.stack([ts[least], left]), jnp.stack([left, arrived])
    claim = at_most(start, end, "low temperature, V B^T and V with different top eigenvectors", f"phases, {PAPER}")
    return Claim(
        start, end, claim.slack, jnp.all((start < end) & jnp.isfinite(end)), claim.hypothesis, claim.source, "<"
    )


def hypothesis_1(field: AbstractField, x: Tokens, *, tolerance: float) -> Claim:
    r"""Late tokens lie in the top eigenspace of V, algebraic or by modulus: $\sum_i w_i|P x_i| \ge 1 - $ `tolerance`.

    A conjecture, reconstructed, and false as worded: complex leading eigenvalues make clusters turn, and clusters halt on
    the cone $x^\top B x = 0$. The eigenspace of a complex eigenvalue has no real vector and counts as empty. Not differentiable.
    """
    field = attention_field(field, "Hypothesis 1", attention=SOFTMAX)
    V = np.asarray(one_head(field, x).value[0], np.float64)
    lam, vectors = np.linalg.eig(V)
    overlaps = [
        observe.overlap(field, x, jnp.asarray(_top(lam, vectors, size), x.dtype)) for size in (lam.real, abs(lam))
    ]
    rule = "one softmax head; V with a real leading eigenvalue"
    return at_least(jnp.maximum(*overlaps), 1 - tolerance, rule, f"Hypothesis 1, {PAPER}")


def one_head(field: AbstractField, x: Tokens) -> Heads:
    """The heads of a softmax or zero-temperature field, written out; TypeError unless there is one."""
    heads = field.heads if isinstance(field, AttentionField | ZeroTemperatureField) else None
    if heads is None or heads.count != 1:
        count = "none" if heads is None else f"H = {heads.count}"
        raise TypeError(f"arXiv 2605.10931 is about one head, got {count}.")
    return heads.dense(x.shape[-1])


def _top(lam, vectors, size):
    """Orthonormal columns of the eigenvectors whose eigenvalue has the largest size; empty where it is complex."""
    scale = np.max(np.abs(lam))
    top = size >= np.max(size) - 1e-9 * scale
    if np.any(np.abs(lam[top].imag) > 1e-9 * scale):
        return np.zeros((len(lam), 0))
    return np.linalg.qr(vectors[:, top].real)[0]


def _answers(field, x):
    field = attention_field(field, "the Laplace principle", attention=SOFTMAX)
    attention, q, keys, w = field.queries(x)
    mean = attention.answer(field.method(x), q, keys, x, w)[0][0]
    kappa = sphere.safe_norm(q[0])
    return field, mean, q[0] / kappa[:, None], kappa
