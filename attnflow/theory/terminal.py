r"""Where one softmax head leaves its tokens in the end: antipodal pairs on eigenvectors of V (arXiv 2605.10931, after Hypothesis 1)."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from ..heads import AbstractHeads
from .numbers import checked, real


def antipodal_velocity(
    heads: AbstractHeads, x: Float[Array, " d"], beta: ArrayLike, *, mass: ArrayLike = 0.5
) -> Float[Array, " d"]:
    r"""Velocity of the token x of an antipodal pair: $P_x V x \tanh(\beta b + \frac12\ln\frac{p}{1-p})$, $b = x^\top B x$.

    p is the `mass` on x, 1 - p that on -x (derived). The pair stays antipodal for p = 1/2, and halts where x is an
    eigenvector of V, or p = 1/2 and b = 0: on the cone $x^\top B x = 0$ a cluster need not be at any eigenvector.
    """
    B, V = _matrices(heads)
    p = checked("mass", mass, lambda a: (a > 0) & (a < 1), "in (0, 1)")
    x = real(x)
    push = V @ x * jnp.tanh(real(beta) * (x @ B @ x) + (jnp.log(p) - jnp.log1p(-p)) / 2)
    return push - (push @ x) * x


def antipodal_states(heads: AbstractHeads) -> tuple[Float[Array, " d"], Float[Array, "d d"], Bool[Array, " d"]]:
    r"""Eigenvalues of V, its eigenvectors v (rows), and whether an antipodal pair on v is stable at large beta (derived).

    Stable iff $\mathrm{sign}(b)\lambda_v$ is the top of $\mathrm{sign}(b) V$, $b = v^\top B v$: b > 0 selects the largest eigenvalue,
    b < 0 the smallest, and neither the largest in modulus. b = 0 is marked unstable (undecided).

    **Errors:** ValueError unless V is symmetric: its other eigenvectors may be complex, and then no state is terminal.
    """
    B, V = _matrices(heads)
    V = checked(
        "value",
        V,
        lambda V: jnp.max(jnp.abs(V - V.T)) <= 1e-6 * jnp.max(jnp.abs(V)),
        "symmetric to have a real spectrum",
    )
    lam, U = jnp.linalg.eigh((V + V.T) / 2)
    b = jnp.einsum("dk,de,ek->k", U, B, U)
    near = 1e-6 * (lam[-1] - lam[0])
    stable = jnp.where(b > 0, lam >= lam[-1] - near, lam <= lam[0] + near) & (b != 0)
    return lam, U.T, stable


def _matrices(heads):
    if heads.count != 1:
        raise ValueError(f"terminal states are known for one head, got H = {heads.count}.")
    return real(heads.score[0]), real(heads.value[0])
