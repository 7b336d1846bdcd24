"""The statements on somebody's own heads and tokens: which hypotheses they meet, and by how much they miss the others."""

from collections.abc import Iterator

import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import claims
from ..field import AbstractField, AttentionField
from ..heads import AlignedHeads, ScalarHeads
from .row import Row, row

HYPOTHESES = {
    "symmetric scores": claims.symmetric_scores,
    "aligned heads": claims.aligned_heads,
    "scalar heads": claims.scalar_heads,
    "positive strengths": claims.positive_strengths,
    "orthogonal heads": claims.orthogonal_heads,
    "equiangular tokens": claims.equiangular_tokens,
    "orthonormal tokens": claims.orthonormal_tokens,
}

# Statement, claim, and the hypotheses under which it is a theorem; None where it is a condition that may go either way.
ON_HEADS_AND_TOKENS = (
    ("Theorem 11: dE/dt = mean |dx/dt|^2", claims.theorem_11, ("aligned heads",)),
    ("monotone energy: dE/dt >= 0", claims.total_energy, None),
    ("Theorem 12: dE/dt >= its bound", claims.theorem_12, ("symmetric scores",)),
    ("Theorems 16-17: dE_h/dt with the radial shadow", claims.theorems_16_17, ("aligned heads", "orthogonal heads")),
    ("monotone head energies: dE_h/dt >= 0", claims.per_head_energy, None),
    ("Condition 8", claims.condition_8, None),
    ("sharp condition", claims.sharp_condition, None),
    ("Theorem 19: beta <= beta*", claims.theorem_19, None),
    ("equiangular law (Theorems 22, 25)", claims.equiangular_law, ("scalar heads", "equiangular tokens")),
    ("Theorem 22: rate sum of phi", claims.theorem_22_clustering_rate, ("scalar heads", "orthonormal tokens")),
    ("Theorem 22: unequal heads are faster", claims.theorem_22_superadditivity, None),
    (
        "Theorem 27: attention entropy rises",
        claims.theorem_27,
        ("scalar heads", "positive strengths", "equiangular tokens"),
    ),
    ("dH/dt = -beta^2 Cov(s, ds/dt)", claims.entropy_identity, ()),
    ("Theorem 39: dE_h/dt >= its bound", claims.theorem_39, ("aligned heads",)),
)
ON_ONE_HEAD = (
    ("Assumption 1", claims.assumption_1, None),
    ("W2(rho, Pi#rho)^2 = 2 - 2 E|P1 x|", claims.projection_distance, ()),
)


def rows(field: AbstractField, x: Float[Array, "n d"], *, paper: str | None) -> Iterator[Row]:
    """Hypotheses first, then every statement that the types of heads and attention allow."""
    met = {}
    if isinstance(field, AttentionField) and paper in (None, "B"):
        for name, hypothesis in HYPOTHESES.items():
            claim = hypothesis(field, x)
            met[name] = bool(claim.holds)
            yield row("B", f"hypothesis: {name}", claim.hypothesis, claim, expected=met[name])
        typed = _typed(field, x, met)
        for case in ON_HEADS_AND_TOKENS:
            yield _row("B", *case, field=typed, x=x, met=met)
    if paper in (None, "A"):
        for case in ON_ONE_HEAD:
            yield _row("A", *case, field=field, x=x, met=met)


def _row(paper, statement, claim, needs, *, field, x, met):
    try:
        result = claim(field, x)
    except (TypeError, ValueError) as refusal:
        nan = float("nan")
        return Row(paper, statement, f"does not apply: {refusal}", nan, nan, nan, ">=", False, False, "")
    missed = [name for name in needs or () if not met[name]]
    if needs is None:
        regime, expected = "a condition", bool(result.holds)
    elif missed:
        regime, expected = f"not met: {', '.join(missed)}", bool(result.holds)
    else:
        regime, expected = "hypotheses met", True
    return row(paper, statement, regime, result, expected=expected)


def _typed(field, x, met):
    """The field with its heads in the narrowest type whose hypothesis they meet."""
    heads = field.heads.dense(x.shape[-1])
    if met["scalar heads"]:
        heads = ScalarHeads(jnp.trace(heads.score, axis1=1, axis2=2) / x.shape[-1])
    elif met["aligned heads"]:
        heads = AlignedHeads(heads.score)
    else:
        heads = field.heads
    return AttentionField(
        heads, field.attention, field.weights, flat=field.flat, causal=field.causal, reduction=field.reduction
    )
