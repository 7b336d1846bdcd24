r"""When does a head's energy first fall? Condition 8, the sharp and the exact margin over beta, and along a flow.

For heads on orthogonal subspaces, $M_h = \alpha_h P_h$ of rank k in d dimensions, under unnormalised attention
(after Theorem 19, arXiv 2605.04279, whose threshold is for a sufficient condition on orthonormal tokens).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from . import observe, sphere
from .attention import Exponential, concrete
from .field import AbstractField, AttentionField
from .heads import orthogonal
from .solve import solve
from .theory import multi_head


class Onset(eqx.Module):
    """Shares of random token clouds in which a margin is negative, for each beta, and the formal thresholds.

    `condition8`, `sharp`: somewhere, for some head and token; `exact`: for some head, so that its energy falls.
    `formal_beta`, `formal_sharp_beta`: of scalar heads of the largest strength on orthonormal tokens; formal where negative.
    """

    betas: Float[Array, " B"]
    condition8: Float[Array, " B"]
    sharp: Float[Array, " B"]
    exact: Float[Array, " B"]
    formal_beta: Float[Array, ""]
    formal_sharp_beta: Float[Array, ""]

    def first(self, share: float = 0.0) -> dict[str, Float[Array, ""]]:
        """The smallest tested beta at which each margin fails in more than this share of the clouds; inf where none does."""
        shares = {"condition8": self.condition8, "sharp": self.sharp, "exact": self.exact}
        return {name: jnp.min(jnp.where(s > share, self.betas, jnp.inf)) for name, s in shares.items()}

    def __repr__(self):
        if not concrete(self.betas):
            return "Onset(traced)"
        lines = [
            f"formal beta* {float(self.formal_beta):.4g}, sharp {float(self.formal_sharp_beta):.4g}; share failing:"
        ]
        lines.append("      beta  condition 8  sharp  exact")
        columns = zip(self.betas, self.condition8, self.sharp, self.exact, strict=True)
        lines += [f"{b:10.4g}{c:13.3f}{s:7.3f}{e:7.3f}" for b, c, s, e in columns]
        return "\n".join(lines)


def onset(
    key: PRNGKeyArray, betas: Float[Array, " B"], strengths: Float[Array, " H"], *, n: int, k: int, samples: int
) -> Onset:
    r"""Margins of `samples` uniform clouds of n tokens in d = Hk dimensions, for heads $\alpha_h P_h$ of rank k, at every beta."""
    H = strengths.shape[0]
    heads_key, key = jr.split(key)
    heads = orthogonal(heads_key, H, H * k, k, strengths)
    clouds = jax.vmap(lambda key: sphere.uniform(key, n, H * k))(jr.split(key, samples))

    def shares(beta):
        def fails(x):
            margins = observe.dominance_margins(AttentionField(heads, Exponential(beta)), x)
            return jnp.stack([jnp.any(m < 0) for m in margins])

        return jnp.mean(jax.vmap(fails)(clouds), axis=0, dtype=betas.dtype)

    condition8, sharp, exact = jax.lax.map(shares, betas).T
    formal = (jnp.max(strengths), n, H)
    return Onset(
        betas, condition8, sharp, exact, multi_head.critical_beta(*formal), multi_head.sharp_critical_beta(*formal)
    )


def first_decrease(
    field: AbstractField, x0: Float[Array, "n d"], ts: Float[Array, " T"]
) -> tuple[Float[Array, ""], Float[Array, " H"]]:
    r"""(the first of `ts` with $dE_h/dt < 0$ for some head, the largest share of its gain each head gives back).

    inf where no head's energy falls. A share of 1: the head ends no higher than it began.
    """
    run = solve(field, x0, ts, observe={"E": observe.head_log_energies, "rate": observe.head_energy_rates})
    log_energy, rate = run.values["E"], run.values["rate"]
    time = jnp.min(jnp.where(jnp.any(rate < 0, axis=1), ts, jnp.inf))
    energy = jnp.exp(log_energy - jnp.max(log_energy, axis=0, keepdims=True))
    best = jax.lax.cummax(energy)
    gain, lost = best - energy[:1], best - energy
    return time, jnp.max(jnp.where(lost > 0, lost / jnp.maximum(gain, lost), 0), axis=0)
