r"""Observables: functions `(field, x) -> array` of tokens on the sphere, evaluated inside a solve.

Weights $w_i$ are the field's. Head outputs are $f_i^h = V_h\sum_j c_{ij}^h x_j$ (`field.outputs`). Energies and entropies
are stored where they do not lose digits: `log_energy` never overflows, `entropy_deficit` stays accurate at consensus.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from . import sphere
from .attention import Exponential, Softmax, concrete
from .field import AbstractField, AttentionField
from .reduce import Blocked

Tokens = Float[Array, "n d"]
Scalar = Float[Array, ""]


def _attention_field(field: AbstractField) -> AttentionField:
    if not isinstance(field, AttentionField):
        raise TypeError(
            f"this observable needs an `AttentionField`, got `{type(field).__name__}`: it has no attention."
        )
    return field


def head_log_energies(field: AbstractField, x: Tokens) -> Float[Array, " H"]:
    r"""$\log E_h$, $E_h = \frac12\sum_{ij} w_i w_j\,\Phi(s_{ij}^h)$, $\Phi' $ the coefficient function of the attention.

    $\Phi = e^{\beta s}/\beta$ for `Exponential` and, by the papers' definition, for `Softmax` (whose flow need not raise it);
    $\mathrm{relu}(s)^2/2$ and $s^2/2$ for `ReLU` and `Linear` (Section 2, arXiv 2605.04279).

    **Errors:** ValueError at beta = 0, for `Hardmax` and for causal fields, where no energy exists.
    """
    field = _attention_field(field)
    if field.causal:
        raise ValueError("a causal field has no energy: its pairs are not symmetric.")
    attention, q, keys, w = field.queries(x)
    return attention.log_energies(field.method(x), q, keys, w)


def log_energy(field: AbstractField, x: Tokens) -> Scalar:
    r"""$\log\sum_h E_h$: finite at every beta."""
    return jax.nn.logsumexp(head_log_energies(field, x))


def head_energies(field: AbstractField, x: Tokens) -> Float[Array, " H"]:
    r"""$E_h$ of every head, see `head_log_energies`. Errors where it does not fit the dtype and that is known."""
    return _fits(jnp.exp(head_log_energies(field, x)), "head_log_energies")


def energy(field: AbstractField, x: Tokens) -> Scalar:
    r"""Total energy $\sum_h E_h$, see `head_log_energies`. Errors where it does not fit the dtype and that is known."""
    return _fits(jnp.exp(log_energy(field, x)), "log_energy")


def _fits(value, remedy):
    if concrete(value) and np.isinf(np.asarray(value)).any():
        raise ValueError(f"the energy does not fit {value.dtype}; use `{remedy}`.")
    return value


def dissipation(field: AbstractField, x: Tokens) -> Scalar:
    r"""$\sum_i w_i|\dot x_i|^2$: for aligned heads of an unnormalised attention it equals dE/dt (Theorem 11)."""
    v = field(0.0, x, None)
    return jnp.sum(field.token_weights(x) * jnp.sum(v * v, axis=-1))


def energy_rate(field: AbstractField, x: Tokens) -> Scalar:
    """dE/dt along the field, of whatever sign it has."""
    return jnp.sum(head_energy_rates(field, x))


def head_energy_rates(field: AbstractField, x: Tokens) -> Float[Array, " H"]:
    r"""$dE_h/dt$ of every head along the field (forward derivative of `head_energies`)."""
    logs, rates = jax.jvp(lambda y: head_log_energies(field, y), (x,), (field(0.0, x, None),))
    # an energy of 0 (ReLU heads without a positive score) is at its minimum, where its log has no derivative
    return jnp.where(jnp.isneginf(logs), 0, jnp.exp(logs) * rates)


def entropy_deficit(field: AbstractField, x: Tokens) -> Float[Array, " H"]:
    r"""$\sum_i w_i\sum_j p_{ij}\log(p_{ij}/w_j) \ge 0$ of every head: log n - entropy for equal weights, 0 at consensus.

    Of the softmax weights p, also for `Exponential` (its normalised weights); of the tied set for `Hardmax`. For causal
    fields w is renormalised over the visible tokens.
    """
    field = _attention_field(field)
    attention, q, keys, w = field.queries(x)
    return attention.entropy_deficits(field.method(x), q, keys, w, causal=field.causal) @ w


def entropy(field: AbstractField, x: Tokens) -> Float[Array, " H"]:
    r"""Attention entropy $-\sum_i w_i\sum_j p_{ij}\log p_{ij}$ of every head, in nats."""
    field = _attention_field(field)
    attention, q, keys, w = field.queries(x)
    deficit = attention.entropy_deficits(field.method(x), q, keys, w, causal=field.causal)
    if isinstance(attention, Exponential):
        attention = Softmax(attention.beta)
    log_w = jnp.log(jnp.where(w > 0, w, 1))[:, None]
    cross, _ = attention.answer(_plain(field, x), q, keys, log_w, w, causal=field.causal)
    seen = jnp.log(jnp.cumsum(w)) if field.causal else jnp.zeros_like(w)
    return (seen[None] - deficit - cross[..., 0]) @ w


def _plain(field, x):
    """The field's reduction for values other than the tokens."""
    method = field.method(x)
    return method if isinstance(method, Blocked) or not hasattr(method, "tolerance") else Blocked()


def radial_shadow(field: AbstractField, x: Tokens) -> Float[Array, "H n"]:
    r"""$a_i^h = \langle f_i^h, x_i\rangle$, the part of a head's output that the projection removes (Theorems 16-17)."""
    return jnp.einsum("hnd,nd->hn", _attention_field(field).outputs(x), x)


def dominance_margins(
    field: AbstractField, x: Tokens
) -> tuple[Float[Array, "H n"], Float[Array, "H n"], Float[Array, " H"]]:
    r"""Radial-dominance margins (condition8, sharp, exact) of every head; all >= 0 means dominance (arXiv 2605.04279).

    - condition 8 (reconstructed): $|P f_i^h|^2 - |f_i^h|\sum_{h'\ne h}|a_i^{h'}|$;
    - sharp: $|P f_i^h|^2 - |a_i^h|\sum_{h'\ne h}|a_i^{h'}|$;
    - exact: $\sum_i w_i\langle f_i^h, P_i\sum_{h'} f_i^{h'}\rangle$, which is $dE_h/dt$ for aligned exponential, ReLU and linear heads.

    The first two are sufficient for the third to be >= 0 only where $M_h M_{h'} = 0$.
    """
    f = _attention_field(field).outputs(x)
    a = jnp.abs(jnp.einsum("hnd,nd->hn", f, x))
    tangent = jax.vmap(lambda y: sphere.project(x, y))(f)
    square = jnp.sum(tangent**2, axis=-1)
    others = jnp.sum(a, axis=0, keepdims=True) - a
    exact = jnp.einsum("hnd,nd,n->h", tangent, jnp.sum(tangent, axis=0), field.token_weights(x))
    return square - sphere.safe_norm(f) * others, square - a * others, exact


def mean_cosine(field: AbstractField, x: Tokens) -> Scalar:
    r"""$\sum_{i\ne j} w_i w_j\langle x_i, x_j\rangle / \sum_{i\ne j} w_i w_j$ over distinct pairs; 1 for a single token."""
    w = field.token_weights(x)
    mean, square = w @ x, jnp.sum(w * w)
    pairs = 1 - square
    alone = pairs <= 0
    own = jnp.sum(w * w * jnp.sum(x * x, axis=-1))
    return jnp.where(alone, 1, (mean @ mean - own) / jnp.where(alone, 1, pairs))


def minimum_cosine(field: AbstractField, x: Tokens) -> Scalar:
    r"""$\min_{ij}\langle x_i, x_j\rangle$ over tokens of positive weight."""
    w = field.token_weights(x)
    lowest = -Blocked().maximum(-x[None], x, w)[0]
    return jnp.min(lowest, where=w > 0, initial=1)


def order_parameter(field: AbstractField, x: Tokens) -> Scalar:
    r"""$|\sum_i w_i x_i|$: 1 at consensus, 0 for a balanced cloud."""
    return sphere.safe_norm(field.token_weights(x) @ x)


def speed(field: AbstractField, x: Tokens) -> Scalar:
    r"""Largest $|\dot x_i|$ over the tokens."""
    return jnp.max(sphere.safe_norm(field(0.0, x, None)))


def clusters(x: Tokens, threshold: float) -> tuple[Int[Array, ""], Int[Array, " n"]]:
    r"""(count, labels): connected components of the graph $\langle x_i, x_j\rangle \ge$ threshold, labelled 0, 1, ... by first token.

    Minimum labels spread over the graph until nothing changes: the closure of a threshold that is not transitive.
    """
    n = x.shape[0]

    def spread(labels):
        def row(x_i):
            return jnp.min(labels, where=x @ x_i >= threshold, initial=n)

        lowest = jnp.minimum(labels, jax.lax.map(row, x, batch_size=min(n, 256)))
        return lowest[lowest]

    def step(state):
        labels, _ = state
        new = spread(labels)
        return new, jnp.any(new != labels)

    start = jnp.arange(n)
    labels, _ = jax.lax.while_loop(lambda s: s[1], step, (start, jnp.array(True)))
    first = labels == start
    return jnp.sum(first), (jnp.cumsum(first) - 1)[labels]


def cluster_sizes(labels: Int[Array, " n"]) -> Int[Array, " n"]:
    """Tokens in the cluster of each label 0 .. n-1; 0 past the last cluster."""
    return jnp.sum(labels[None] == jnp.arange(labels.shape[0])[:, None], axis=1)


def pair_fraction(x: Tokens, threshold: float) -> Scalar:
    r"""Share of pairs $i \ne j$ with $\langle x_i, x_j\rangle >$ threshold; 1 for a single token."""
    n = x.shape[0]
    close = jax.lax.map(lambda x_i: jnp.sum(x @ x_i > threshold), x, batch_size=min(n, 256))
    return ((jnp.sum(close) - n) / max(1, n * (n - 1))).astype(x.dtype) if n > 1 else jnp.ones((), x.dtype)


def overlap(field: AbstractField, x: Tokens, space: Float[Array, "d m"]) -> Scalar:
    r"""$\sum_i w_i|P x_i|$ with the projector on the span of the orthonormal columns of `space`: 1 where all tokens lie in it."""
    return field.token_weights(x) @ sphere.safe_norm(x @ space)


def effective_rank(field: AbstractField, x: Tokens) -> Scalar:
    r"""$e^{-\sum_k\mu_k\log\mu_k}$ of the eigenvalues of $\sum_i w_i x_i x_i^\top$, normalised: the number of directions used."""
    second = jnp.einsum("n,nd,ne->de", field.token_weights(x), x, x)
    mu = jnp.maximum(jnp.linalg.eigvalsh(second), 0)
    mu = mu / jnp.sum(mu)
    return jnp.exp(-jnp.sum(jnp.where(mu > 0, mu * jnp.log(jnp.where(mu > 0, mu, 1)), 0)))


def resolution(field: AbstractField, x: Float[Array, "n 2"]) -> Scalar:
    r"""Largest ratio of node spacing to the resolved spacing $0.3/\sqrt{\beta|B^\top x|}$ where mass is attended; circle only.

    A quadrature of a mean field is resolved while this is below 1. Above, the metastable state ends early, an artefact of the
    nodes. 0 for attentions without beta.
    """
    field = _attention_field(field)
    if x.shape[-1] != 2:
        raise ValueError(f"`resolution` is for tokens on the circle (d = 2), got d = {x.shape[-1]}.")
    if not isinstance(field.attention, (Softmax, Exponential)):
        return jnp.zeros((), x.dtype)
    _, q, _, _ = field.queries(x)
    theta = jnp.sort(sphere.angles(x))
    gaps = jnp.diff(theta, append=theta[:1] + 2 * jnp.pi)
    target = sphere.angles(q).reshape(-1)
    gap = gaps[jnp.searchsorted(theta, target, side="right") - 1]
    allowed = 0.3 / jnp.sqrt(jnp.maximum(sphere.safe_norm(q).reshape(-1), jnp.finfo(x.dtype).tiny))
    return jnp.max(gap / allowed)


OBSERVABLES = {
    f.__name__: f
    for f in (
        energy, head_energies, log_energy, head_log_energies, dissipation, energy_rate, head_energy_rates, entropy,
        entropy_deficit, radial_shadow, dominance_margins, mean_cosine, minimum_cosine, order_parameter, speed,
        effective_rank, resolution,
    )
}  # fmt: skip
"""Observables by name, for configurations."""

__all__ = [*OBSERVABLES, "OBSERVABLES", "clusters", "cluster_sizes", "overlap", "pair_fraction"]
