r"""Statements of arXiv 2605.04279 (multi-head attention as a gradient flow) on a field and its tokens.

The paper writes $1/n$ for what are the weights $w_j$ here. Exact wording of Condition 8 and Theorem 12 was not available:
their forms are reconstructed from the formulas that are.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import observe, sphere
from ..attention import Exponential, Linear, ReLU, Softmax
from ..field import AbstractField
from ..heads import AlignedHeads, ScalarHeads
from ..reduce import Blocked
from ..solve import Trajectory
from ..theory import equiangular, multi_head
from .claim import Claim, at_least, at_most, attention_field, equal
from .hypotheses import overlap

Tokens = Float[Array, "n d"]
PAPER = "arXiv 2605.04279"
ALIGNED = ((AlignedHeads, ScalarHeads), "M_h = M_h^T and V_h = B_h = M_h")
SCALAR = (ScalarHeads, "M_h = lambda_h I")
UNNORMALISED = ((Exponential, ReLU, Linear), "an unnormalised attention, the gradient of the energy")
EXPONENTIAL = (Exponential, "unnormalised exponential attention")
SOFTMAX = (Softmax, "softmax attention")


def theorem_11(field: AbstractField, x: Tokens) -> Claim:
    r"""$dE/dt = \sum_i w_i|\dot x_i|^2$: the total energy rises at the mean squared speed, on the sphere and flat."""
    field = attention_field(field, "Theorem 11", ALIGNED, UNNORMALISED)
    rate, power = observe.energy_rate(field, x), observe.dissipation(field, x)
    floor = 1e3 * jnp.finfo(x.dtype).eps * jnp.exp(observe.log_energy(field, x))
    return equal(rate, power, "aligned heads, unnormalised attention", f"Theorem 11, {PAPER}", floor=floor)


def total_energy(field: AbstractField, x: Tokens) -> Claim:
    r"""$dE/dt \ge 0$: true with Theorem 11, for one aligned softmax head, and for positive scalar softmax heads; not for H >= 2 in general.

    With softmax each head has its own mobility $Z_h$: the gradient is $\sum_h Z_h P s_h$, the velocity $\sum_h
    P s_h$ (derived).
    """
    rule = "unnormalised attention with aligned heads; softmax with one aligned head or positive scalar heads"
    return at_least(
        observe.energy_rate(attention_field(field, "monotone energy"), x), 0, rule, f"after Theorem 11, {PAPER}"
    )


def theorem_12(field: AbstractField, x: Tokens) -> Claim:
    r"""$dE/dt \ge \sum_i w_i |Pv_i| (|Pv_i| - \delta\sum_h Z_i^h)$ with $\delta = \max_h|V_h - B_h|$ (reconstructed).

    $Z_i^h = \sum_j w_j e^{\beta s_{ij}}$. So the energy rises while $|Pv_i| \ge \delta\sum_h Z_i^h$; near critical points
    it may fall for any $\delta > 0$.
    """
    field = attention_field(field, "Theorem 12", attention=EXPONENTIAL)
    heads = field.heads.dense(x.shape[-1])
    delta = jnp.max(jnp.linalg.norm(heads.value - heads.score, ord=2, axis=(1, 2))).astype(x.dtype)
    speed = sphere.safe_norm(field(0.0, x, None))
    bound = field.token_weights(x) @ (speed * (speed - delta * jnp.sum(masses(field, x), axis=0)))
    return at_least(
        observe.energy_rate(field, x), bound, "symmetric scores, exponential attention", f"Theorem 12, {PAPER}"
    )


def theorems_16_17(field: AbstractField, x: Tokens) -> Claim:
    r"""$dE_h/dt = \sum_i w_i(|f_i^h|^2 - a_i^h\sum_{h'} a_i^{h'})$ for orthogonal heads; flat without the radial shadow a, so >= 0."""
    field = attention_field(field, "Theorems 16-17", ALIGNED, UNNORMALISED)
    f, a = field.outputs(x), observe.radial_shadow(field, x)
    shadow = jnp.zeros_like(a) if field.flat else a * jnp.sum(a, axis=0, keepdims=True)
    rate = (jnp.sum(f**2, axis=-1) - shadow) @ field.token_weights(x)
    floor = 1e3 * jnp.finfo(x.dtype).eps * jnp.max(jnp.sum(f**2, axis=-1))
    rule = "aligned heads with M_h M_h' = 0, unnormalised attention"
    return equal(observe.head_energy_rates(field, x), rate, rule, f"Theorems 16-17, {PAPER}", floor=floor)


def per_head_energy(field: AbstractField, x: Tokens) -> Claim:
    r"""$dE_h/dt \ge 0$ for every head: true in flat space for orthogonal heads; on the sphere the radial shadow can break it."""
    field = attention_field(field, "per-head monotonicity", ALIGNED, UNNORMALISED)
    rule = "flat space, aligned heads with M_h M_h' = 0; on the sphere radial dominance besides"
    return at_least(observe.head_energy_rates(field, x), 0, rule, f"Theorems 16-17, {PAPER}")


def condition_8(field: AbstractField, x: Tokens) -> Claim:
    r"""$|P f_i^h|^2 \ge |f_i^h|\sum_{h' \ne h}|a_i^{h'}|$ for every head and token (Condition 8, reconstructed).

    Sufficient for every head's energy to rise where the heads are orthogonal, and far too strict.
    """
    square, length, _, others = _shadows(field, x)
    return at_least(square, length * others, "radial dominance of every head at every token", f"Condition 8, {PAPER}")


def sharp_condition(field: AbstractField, x: Tokens) -> Claim:
    r"""$|P f_i^h|^2 \ge |a_i^h|\sum_{h' \ne h}|a_i^{h'}|$: weaker than Condition 8 and still sufficient for orthogonal heads (derived)."""
    square, _, own, others = _shadows(field, x)
    return at_least(
        square, own * others, "sharp radial dominance of every head at every token", f"after Condition 8, {PAPER}"
    )


def theorem_19(field: AbstractField, x: Tokens) -> Claim:
    r"""$\beta \le \beta^*_h$, which for scalar heads on orthonormal tokens is Condition 8; unequal strengths by their own root (derived).

    A threshold of a sufficient condition: in this very setting every $dE_h/dt > 0$ at every beta.
    """
    field = attention_field(field, "Theorem 19", SCALAR, EXPONENTIAL)
    limit = multi_head.heterogeneous_critical_beta(field.heads.strengths, x.shape[0])
    beta = jnp.asarray(field.attention.beta, limit.dtype)
    return at_most(beta, limit, "positive scalar heads, orthonormal tokens", f"Theorem 19, {PAPER}")


def equiangular_law(field: AbstractField, x: Tokens) -> Claim:
    r"""The mean cosine moves at the drift of the closed form: scalar heads keep equiangular tokens equiangular (Theorems 22, 25)."""
    field = attention_field(field, "the equiangular law", SCALAR)
    gamma, rate = jax.jvp(lambda y: observe.mean_cosine(field, y), (x,), (field(0.0, x, None),))
    drift = equiangular.drift(field.attention, field.heads.strengths, x.shape[0], gamma)
    return equal(rate, drift, "scalar heads, equiangular tokens, weights 1/n", f"Theorems 22 and 25, {PAPER}")


def theorem_22_clustering_rate(field: AbstractField, x: Tokens) -> Claim:
    r"""The cosine of orthonormal tokens starts to rise at $\sum_h \varphi(\lambda_h)$ under softmax."""
    field = attention_field(field, "Theorem 22", SCALAR, SOFTMAX)
    rate = jax.jvp(lambda y: observe.mean_cosine(field, y), (x,), (field(0.0, x, None),))[1]
    phi = multi_head.clustering_rate(field.heads.strengths, field.attention.beta, x.shape[0])
    return equal(rate, jnp.sum(phi), "scalar heads, orthonormal tokens, weights 1/n", f"Theorem 22, {PAPER}")


def theorem_22_late_rate(field: AbstractField, x: Tokens, *, tolerance: float) -> Claim:
    r"""Near consensus $\sum_i w_i|x_i - m|^2$ decays at the late rate, $2\Lambda$ for softmax; exact only in the limit.

    `tolerance` is the relative departure allowed, of the order of the spread. With exponential attention the rate is
    $2\sum_h\lambda_h e^{\beta\lambda_h}$.
    """
    field = attention_field(field, "Theorem 22", SCALAR, ((Softmax, Exponential), "softmax or exponential attention"))
    w = field.token_weights(x)

    def spread(y):
        return w @ jnp.sum((y - (w @ y)[None]) ** 2, axis=-1)

    size, rate = jax.jvp(spread, (x,), (field(0.0, x, None),))
    late = equiangular.late_rate(field.attention, field.heads.strengths, max(2, x.shape[0]))
    return equal(-rate / size, late, "scalar heads, tokens near consensus", f"Theorem 22, {PAPER}", tolerance=tolerance)


def theorem_22_superadditivity(field: AbstractField, x: Tokens) -> Claim:
    r"""$\sum_h\varphi(\lambda_h) \ge H\varphi(\bar\lambda)$: unequal heads are faster.

    Certain if all $\lambda_h \ge \lambda_c$ (Jensen), and near equal heads if $\bar\lambda > \lambda_c$. "Mean
    above $\lambda_c$" alone is not enough: see `theory.multi_head.superadditivity_limit`.
    """
    field = attention_field(field, "Theorem 22", SCALAR)
    case = field.attention.beta, x.shape[0]
    lam = field.heads.strengths
    equals = lam.shape[0] * multi_head.clustering_rate(jnp.mean(lam), *case)
    rule = "every strength at least lambda_c"
    return at_least(jnp.sum(multi_head.clustering_rate(lam, *case)), equals, rule, f"Theorem 22, {PAPER}")


def theorem_25(field: AbstractField, x: Tokens, *, cosine1: float, tolerance: float) -> Claim:
    r"""The linearised time from the tokens' cosine to `cosine1` is the true one: the orders $O(n)$ and $O(n\log d)$ rest on it.

    For softmax and ReLU. True for $\gamma \ll 1/n$; to a cosine of order 1 softmax takes $O(\log n)$, ReLU
    about $\sqrt d/2$.
    """
    field = attention_field(field, "Theorem 25", SCALAR, ((Softmax, ReLU), "softmax or ReLU attention"))
    if field.heads.count != 1:
        raise ValueError(f"the linearised time is known for one head, got H = {field.heads.count}.")
    case = x.shape[0], observe.mean_cosine(field, x), cosine1
    full = equiangular.time(field.attention, field.heads.strengths, *case)
    short = equiangular.linearised_time(field.attention, field.heads.strengths[0], *case)
    rule = "one scalar head, equiangular tokens, cosines much below 1/n"
    return equal(full, short, rule, f"Theorem 25, {PAPER}", tolerance=tolerance)


def theorem_27(field: AbstractField, x: Tokens) -> Claim:
    r"""$dH_h/dt \ge 0$: attention entropy rises for positive scalar heads on equiangular tokens; in general it may fall."""
    field = attention_field(field, "Theorem 27", SCALAR, SOFTMAX)
    rule = "positive scalar heads, equiangular tokens"
    return at_least(entropy_rates(field, x), 0, rule, f"Theorem 27, {PAPER}")


def entropy_identity(field: AbstractField, x: Tokens) -> Claim:
    r"""$dH_h/dt = -\beta^2 \sum_i w_i \mathrm{Cov}_{p_i}(s_i, \dot s_i)$ for any softmax heads and tokens (Theorem 27)."""
    field = attention_field(field, "the entropy identity", attention=SOFTMAX)
    if field.causal:
        raise TypeError("the entropy identity needs every token to see all, got a causal field.")
    (q, k), (q_dot, k_dot) = jax.jvp(lambda y: field.queries(y)[1:3], (x,), (field(0.0, x, None),))
    k, k_dot = (jnp.broadcast_to(a, (q.shape[0], *a.shape[-2:])) for a in (k, k_dot))
    second = jnp.concatenate([jnp.einsum("hma,hmb->hmab", k, b).reshape(*k.shape[:2], -1) for b in (k, k_dot)], axis=-1)
    w = field.token_weights(x)
    moments = Blocked().log_mean(q, k, jnp.concatenate([second, k, k_dot], axis=-1), w)[1]
    width = k.shape[-1]
    kk, kk_dot = (a.reshape(*q.shape, width) for a in jnp.split(moments[..., : 2 * width**2], 2, axis=-1))
    mean, mean_dot = jnp.split(moments[..., 2 * width**2 :], 2, axis=-1)
    product = jnp.einsum("hna,hnab,hnb->hn", q, kk, q_dot) + jnp.einsum("hna,hnab,hnb->hn", q, kk_dot, q)
    means = jnp.sum(q * mean, -1) * (jnp.sum(q_dot * mean, -1) + jnp.sum(q * mean_dot, -1))
    covariance = (product - means) @ w  # q has beta in it
    floor = 1e3 * jnp.finfo(x.dtype).eps * jnp.max(jnp.abs(means))
    return equal(entropy_rates(field, x), -covariance, "softmax attention", f"Theorem 27, {PAPER}", floor=floor)


def theorem_39(field: AbstractField, x: Tokens) -> Claim:
    r"""$dE_h/dt \ge \sum_i w_i(|f^h|^2 - a^h\sum_{h'}a^{h'} - \delta Z^h\sum_{h'\ne h}Z^{h'})$ (shape derived).

    $\delta = \max|M_{h'}M_h|$. The bound is >= 0 for nearly orthogonal heads only: vacuous in practice, since
    $Z \sim n$ and $|f| \sim \sqrt n$.
    """
    field = attention_field(field, "Theorem 39", ALIGNED, EXPONENTIAL)
    f, a, Z = field.outputs(x), observe.radial_shadow(field, x), masses(field, x)
    delta = overlap(field.heads.dense(x.shape[-1]).value).astype(x.dtype)
    total = jnp.sum(Z, axis=0, keepdims=True)
    bound = jnp.sum(f**2, axis=-1) - a * jnp.sum(a, axis=0, keepdims=True) - delta * Z * (total - Z)
    rule = "aligned heads, exponential attention"
    return at_least(observe.head_energy_rates(field, x), bound @ field.token_weights(x), rule, f"Theorem 39, {PAPER}")


def radial_dominance(field: AbstractField, trajectory: Trajectory) -> Claim:
    r"""$\sum_i w_i\langle f_i^h, P_i\sum_{h'}f_i^{h'}\rangle \ge 0$ for every head and saved frame: the exact margin (T, H) along a solve.

    Frames are `trajectory.values["tokens"]` where saved, else the last tokens only. For aligned unnormalised
    heads it is
    $dE_h/dt$. Whether it is preserved by the flow is open in the paper and false: at consensus the weaker of two
    complementary heads always loses, at every beta (derived).
    """
    field = attention_field(field, "radial dominance")
    frames = trajectory.values.get("tokens", trajectory.final[None])
    exact = jax.lax.map(lambda x: observe.dominance_margins(field, x)[2], frames)
    return at_least(exact, 0, "trajectory invariance, an open question of the paper", f"radial dominance, {PAPER}")


def masses(field: AbstractField, x: Tokens) -> Float[Array, "H n"]:
    r"""$Z_i^h = \sum_j w_j e^{\beta s_{ij}^h}$."""
    _, q, k, w = attention_field(field, "the mass").queries(x)
    return jnp.exp(Blocked().log_mean(q, k, k[..., :1], w)[0])


def entropy_rates(field: AbstractField, x: Tokens) -> Float[Array, " H"]:
    r"""$dH_h/dt$ along the field."""
    return -jax.jvp(lambda y: observe.entropy_deficit(field, y), (x,), (field(0.0, x, None),))[1]


def _shadows(field, x):
    """|P f|^2, |f|, |a| and the other heads' sum of |a|, each (H, n)."""
    field = attention_field(field, "radial dominance")
    f = field.outputs(x)
    tangent = jax.vmap(lambda y: sphere.project(x, y))(f)
    a = jnp.abs(jnp.einsum("hnd,nd->hn", f, x))
    return jnp.sum(tangent**2, axis=-1), sphere.safe_norm(f), a, jnp.sum(a, axis=0, keepdims=True) - a
