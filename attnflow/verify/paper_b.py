"""The statements of arXiv 2605.04279, each inside its hypothesis and where it is known to fail."""

from collections.abc import Iterator

import jax.numpy as jnp
import jax.random as jr

from .. import claims, observe, sphere
from ..attention import Exponential, Linear, ReLU, Softmax
from ..claims.claim import at_least, equal
from ..field import AttentionField
from ..heads import AlignedHeads, Heads, ScalarHeads, goe, orthogonal
from ..solve import solve
from ..theory import equiangular, multi_head
from .row import Row, row

SOURCE = "arXiv 2605.04279"


def total_energy() -> Iterator[Row]:
    x, heads = sphere.uniform(jr.key(11), 12, 4), goe(jr.key(12), 3, 4)
    name = "Theorem 11: dE/dt = mean |dx/dt|^2"
    yield row("B", name, "exponential, sphere", claims.theorem_11(_usa(heads, 1.0), x))
    flat = AttentionField(heads, Exponential(1.0), flat=True)
    yield row("B", name, "exponential, flat", claims.theorem_11(flat, 1.3 * x))
    yield row("B", name, "ReLU", claims.theorem_11(AttentionField(heads, ReLU()), x))
    yield row("B", name, "linear", claims.theorem_11(AttentionField(heads, Linear()), x))
    rates = observe.energy_rate(_sa(heads, 1.0), x), observe.dissipation(_sa(heads, 1.0), x)
    yield row("B", name, "softmax: another normalisation", equal(*rates, "unnormalised", SOURCE), expected=False)

    name = "monotone energy: dE/dt >= 0"
    turn = 3.0 * jnp.array([[[0.0, 1.0], [-1.0, 0.0]]])
    skew = claims.total_energy(_usa(Heads(turn, turn), 1.0), sphere.circle(jnp.array([2.54, 0.2, 1.17])))
    yield row("B", name, "exponential, M antisymmetric", skew, expected=False)
    opposed = AlignedHeads(jnp.stack([jnp.eye(2), -jnp.eye(2)]))
    pair = claims.total_energy(_sa(opposed, 1.0), sphere.equiangular(2, 0.5))
    yield row("B", name, "softmax, heads I and -I, two tokens", pair, expected=False)
    axes = AlignedHeads(jnp.array([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]]))
    triple = claims.total_energy(_sa(axes, 3.0), sphere.circle(jnp.array([3.03, 3.02, 0.82])))
    yield row("B", name, "softmax, orthogonal projectors (PSD)", triple, expected=False)
    yield row("B", name, "softmax, one head", claims.total_energy(_sa(goe(jr.key(13), 1, 4), 2.0), x))
    yield row("B", name, "softmax, positive scalar heads", claims.total_energy(_sa(ScalarHeads([1.0, 3.0]), 2.0), x))


def misaligned_values() -> Iterator[Row]:
    x = sphere.uniform(jr.key(14), 12, 4)
    heads = goe(jr.key(15), 2, 4)
    off = 0.1 * jr.normal(jr.key(16), (2, 4, 4))
    field = _usa(Heads(heads.matrix, heads.matrix + off), 1.0)
    yield row("B", "Theorem 12: dE/dt >= its bound", "values off by a random .1", claims.theorem_12(field, x))
    M = jnp.diag(jnp.array([2.0, 1.0]))
    V = M + jnp.array([[0.0, 0.2], [0.2, 0.0]])
    field, between = _usa(Heads(M[None], V[None]), 1.0), sphere.circle(jnp.array([0.1, 0.1]))
    near = claims.total_energy(field, between)
    yield row("B", "Theorem 12: dE/dt >= its bound", "near a critical point", claims.theorem_12(field, between))
    yield row("B", "monotone energy with misaligned values", "near a critical point", near, expected=False)


def per_head_energy() -> Iterator[Row]:
    x, heads = sphere.uniform(jr.key(17), 16, 6), orthogonal(jr.key(18), 2, 6, 3, jnp.array([1.0, 1.5]))
    sphere_field, flat = _usa(heads, 1.0), AttentionField(heads, Exponential(1.0), flat=True)
    name = "Theorems 16-17: dE_h/dt with the radial shadow"
    yield row("B", name, "orthogonal heads, sphere", claims.theorems_16_17(sphere_field, x))
    yield row("B", name, "orthogonal heads, flat: no shadow", claims.theorems_16_17(flat, x))
    skewed = claims.theorems_16_17(_usa(goe(jr.key(19), 2, 6), 1.0), x)
    yield row("B", name, "heads not orthogonal", skewed, expected=False)

    name = "monotone head energies: dE_h/dt >= 0"
    yield row("B", name, "orthogonal heads, flat", claims.per_head_energy(flat, x))
    axes = AlignedHeads(jnp.array([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]]))
    angle = jnp.arccos(jnp.sqrt(0.3))
    consensus = sphere.circle(jnp.stack([angle, angle]))
    loses = claims.per_head_energy(_usa(axes, 0.5), consensus)
    yield row("B", name, "consensus of two complementary heads", loses, expected=False)
    closed = multi_head.consensus_energy_rates([1.0, 1.0], [0.3, 0.7], 0.5)
    measured = observe.head_energy_rates(_usa(axes, 0.5), consensus)
    yield row("B", "dE_h/dt at consensus in closed form", "shares .3 and .7", equal(measured, closed, "", SOURCE))
    scalar, n = ScalarHeads([1.0, 1.0]), 10
    beyond = _usa(scalar, 3 * float(multi_head.critical_beta(1.0, n, 2)))
    yield row("B", name, "scalar heads, orthonormal tokens, 3 beta*", claims.per_head_energy(beyond, jnp.eye(n)))


def dominance() -> Iterator[Row]:
    n, H, alpha = 10, 2, 1.0
    heads, tokens = ScalarHeads([alpha] * H), jnp.eye(n)
    limit, sharp = (float(f(alpha, n, H)) for f in (multi_head.critical_beta, multi_head.sharp_critical_beta))
    for name, claim, edge in (
        ("Theorem 19: beta <= beta*", claims.theorem_19, limit),
        ("Condition 8", claims.condition_8, limit),
        ("sharp condition", claims.sharp_condition, sharp),
    ):
        yield row("B", name, "orthonormal tokens, .999 of the threshold", claim(_usa(heads, 0.999 * edge), tokens))
        above = claim(_usa(heads, 1.001 * edge), tokens)
        yield row("B", name, "orthonormal tokens, 1.001 of the threshold", above, expected=False)
    twelve = ScalarHeads([1.0] * 12)
    empty = claims.theorem_19(_usa(twelve, 1e-6), jnp.eye(122))
    yield row("B", "Theorem 19: beta <= beta*", "12 heads, 122 tokens: no beta", empty, expected=False)
    yield row(
        "B", "Theorem 19: beta <= beta*", "12 heads, 123 tokens", claims.theorem_19(_usa(twelve, 1e-6), jnp.eye(123))
    )
    planes = orthogonal(jr.key(20), 2, 16, 8)
    cloud = claims.condition_8(_usa(planes, 0.2), sphere.uniform(jr.key(21), 32, 16))
    yield row("B", "Condition 8", "random tokens, far below beta*", cloud, expected=False)

    field, x0 = _usa(orthogonal(jr.key(22), 2, 4, 2, jnp.array([1.0, 1.5])), 0.5), sphere.uniform(jr.key(23), 8, 4)
    run = solve(field, x0, jnp.linspace(0.0, 12.0, 25), save_tokens=True)
    kept = claims.radial_dominance(field, run)
    yield row("B", "radial dominance is kept by the flow", "orthogonal heads, to consensus", kept, expected=False)


def clustering() -> Iterator[Row]:
    pair, x = ScalarHeads([1.0, 2.0]), sphere.equiangular(6, 0.3)
    for attention in (Softmax(1.5), Exponential(1.5), ReLU(), Linear()):
        law = claims.equiangular_law(AttentionField(pair, attention), x)
        yield row("B", "equiangular law (Theorems 22, 25)", type(attention).__name__.lower(), law)
    random = claims.equiangular_law(_sa(pair, 1.5), sphere.uniform(jr.key(24), 6, 6))
    yield row("B", "equiangular law (Theorems 22, 25)", "random tokens", random, expected=False)
    start = claims.theorem_22_clustering_rate(_sa(pair, 1.5), jnp.eye(8))
    yield row("B", "Theorem 22: rate sum of phi", "orthonormal tokens, softmax", start)

    name = "Theorem 22: late rate"
    tight = sphere.retract(jnp.eye(4)[:1] + 1e-4 * sphere.uniform(jr.key(25), 8, 4))
    soft = claims.theorem_22_late_rate(_sa(pair, 1.5), tight, tolerance=1e-3)
    yield row("B", name, "softmax: 2 Lambda", soft)
    fast = claims.theorem_22_late_rate(_usa(pair, 1.5), tight, tolerance=1e-3)
    yield row("B", name, "exponential: 2 sum lambda e^(beta lambda)", fast)
    naive = equal(fast.lhs, 2 * jnp.sum(pair.strengths), "softmax attention", SOURCE, tolerance=1e-3)
    yield row("B", name, "exponential: 2 Lambda", naive, expected=False)

    name = "Theorem 22: unequal heads are faster"
    for lam, regime, holds in (
        ([4.0, 6.0], "all strengths above lambda_c", True),
        ([2.0, 8.0], "mean above lambda_c, within the spread", True),
        ([0.2, 9.8], "mean above lambda_c, beyond the spread", False),
        ([0.5, 1.5], "mean below lambda_c", False),
    ):
        claim = claims.theorem_22_superadditivity(_sa(ScalarHeads(lam), 1.0), jnp.eye(8))
        yield row("B", name, f"{lam[0]:g}, {lam[1]:g}: {regime}", claim, expected=holds)


def relu_and_softmax() -> Iterator[Row]:
    one, n = ScalarHeads([1.0]), 100
    name = "Theorem 25: linearised times"
    near = sphere.equiangular(n, 1e-5)
    for attention in (ReLU(), Softmax(1.0)):
        kind, field = type(attention).__name__.lower(), AttentionField(one, attention)
        short = claims.theorem_25(field, near, cosine1=1e-4, tolerance=0.02)
        yield row("B", name, f"{kind}, cosine to .01/n", short)
        far = claims.theorem_25(field, near, cosine1=0.5, tolerance=0.02)
        yield row("B", name, f"{kind}, cosine to 1/2", far, expected=False)
    case = [1.0], 10**4, 0.125, 0.5
    relu, soft = equiangular.time(ReLU(), *case), equiangular.time(Softmax(1.0), *case)
    linear = [
        equiangular.linearised_time(a, 1.0, 10**4, 0.0 if s else 0.125, 0.5)
        for s, a in enumerate((ReLU(), Softmax(1.0)))
    ]
    name = "softmax clusters faster than ReLU"
    yield row("B", name, "same start 1/8, n = 10^4, d = 64", at_least(relu, soft, "", SOURCE))
    apart = at_least(relu, equiangular.time(Softmax(1.0), [1.0], 10**4, 0.0, 0.5), "one start", SOURCE)
    yield row("B", name, "softmax from 0, ReLU from 1/8", apart, expected=False)
    logarithmic = at_least(0.1 * linear[1], soft, "", SOURCE)
    yield row("B", "softmax takes O(log n), not O(n)", "n = 10^4, to cosine 1/2", logarithmic)
    late = [equiangular.time(a, [1.0], 100, 0.5, 0.99) for a in (ReLU(), Softmax(20.0), Softmax(1.0))]
    yield row("B", "ReLU wins the late race", "beta = 20", at_least(late[1], late[0], "large beta", SOURCE))
    yield row(
        "B", "ReLU wins the late race", "beta = 1", at_least(late[2], late[0], "large beta", SOURCE), expected=False
    )


def entropy() -> Iterator[Row]:
    name = "Theorem 27: attention entropy rises"
    scalar = _sa(ScalarHeads([1.0, 2.0]), 1.5)
    yield row(
        "B", name, "positive scalar heads, equiangular tokens", claims.theorem_27(scalar, sphere.equiangular(6, 0.3))
    )
    four = sphere.circle(jnp.array([0.6, -0.6, jnp.pi + 0.6, jnp.pi - 0.6]))
    falls = claims.theorem_27(_sa(ScalarHeads([1.0]), 1.0), four)
    yield row("B", name, "two clusters of two tokens", falls, expected=False)
    field, x = _sa(Heads(*jr.normal(jr.key(26), (2, 2, 4, 4))), 1.5), sphere.uniform(jr.key(27), 8, 4)
    yield row("B", "dH/dt = -beta^2 Cov(s, ds/dt)", "any heads and tokens", claims.entropy_identity(field, x))


def nearly_orthogonal() -> Iterator[Row]:
    x, heads = sphere.uniform(jr.key(28), 32, 16), _tilted(jnp.radians(80.0))
    claim = claims.theorem_39(_usa(heads, 1.0), x)
    yield row("B", "Theorem 39: dE_h/dt >= its bound", "planes at 80 degrees", claim)
    useful = at_least(claim.rhs, 0, "nearly orthogonal heads", SOURCE)
    yield row("B", "the bound of Theorem 39 is >= 0", "planes at 80 degrees: vacuous", useful, expected=False)
    yield row(
        "B", "monotone head energies: dE_h/dt >= 0", "the same heads and tokens", at_least(claim.lhs, 0, "", SOURCE)
    )


def _tilted(angle):
    """Projectors of rank 8 in 16 dimensions, all principal angles equal."""
    first = jnp.eye(16)[:, :8]
    second = jnp.cos(angle) * first + jnp.sin(angle) * jnp.eye(16)[:, 8:]
    return AlignedHeads(jnp.stack([first @ first.T, second @ second.T]))


def _usa(heads, beta):
    return AttentionField(heads, Exponential(beta))


def _sa(heads, beta):
    return AttentionField(heads, Softmax(beta))


PARTS = (
    total_energy, misaligned_values, per_head_energy, dominance, clustering, relu_and_softmax, entropy, nearly_orthogonal
)  # fmt: skip
