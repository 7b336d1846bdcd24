r"""Softmax averages over a smooth density on the sphere: the quantitative Laplace principle of arXiv 2605.10931, and noisy thresholds.

$A_d(\kappa) = I_{d/2}(\kappa)/I_{d/2-1}(\kappa)$ is the length of the softmax mean of the uniform sphere, $\kappa = \beta|B^\top x|$.
"""

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from .numbers import checked, real, root

STEPS = 512


def laplace_mean(d: int, kappa: ArrayLike) -> Array:
    r"""$A_d(\kappa) = I_{d/2}/I_{d/2-1}$: the softmax mean of the uniform sphere is $A_d\,y^*$, $y^* = B^\top x/|B^\top x|$.

    $\kappa/d$ for small, $1 - (d-1)/2\kappa$ for large $\kappa$; odd in $\kappa$. By $r_\nu = \kappa/(2\nu + \kappa r_{\nu+1})$ downwards.
    """
    kappa = real(kappa)
    first, _ = _slow_solution(d, kappa)
    return _downwards(lambda nu, r: kappa / (2 * nu + kappa * r), d, jnp.sign(kappa) * first)


def laplace_deficit(d: int, kappa: ArrayLike) -> Array:
    r"""$1 - A_d(\kappa)$ for $\kappa \ge 0$, accurate however large $\kappa$."""
    kappa = checked("kappa", kappa, lambda a: a >= 0, ">= 0")

    def step(nu, c):
        return (2 * nu - kappa * c) / (2 * nu + kappa - kappa * c)

    return _downwards(step, d, _slow_solution(d, kappa)[1])


def gibbs_w2(d: int, kappa: ArrayLike) -> Array:
    r"""$\sqrt{2 - 2A_d(\kappa)}$, the chordal $W_2$ of the Gibbs measure $\propto e^{\kappa\langle y^*, y\rangle}$ from $\delta_{y^*}$.

    About $\sqrt{(d-1)/\kappa}$: slope -1/2, while the mean field is off by $O(1/\kappa)$ only.
    """
    return jnp.sqrt(2 * laplace_deficit(d, kappa))


def laplace_expansion(
    y: Float[Array, "... d"], kappa: ArrayLike, log_density_gradient: Float[Array, "... d"]
) -> Float[Array, "... d"]:
    r"""$y^*(1 - \frac{d-1}{2\kappa}) + \nabla\log\rho(y^*)/\kappa$: the softmax mean of a density, to first order in $1/\kappa$ (derived).

    The gradient is the one along the sphere; a radial part is dropped.
    """
    y, slope, kappa = real(y), real(log_density_gradient), real(kappa)
    slope = slope - jnp.sum(slope * y, axis=-1, keepdims=True) * y
    return y * (1 - (y.shape[-1] - 1) / (2 * kappa)) + slope / kappa


def noise_threshold(beta: ArrayLike, d: int) -> Array:
    r"""$K_\#(\beta) = \beta^{d/2} / (2^{d/2}\Gamma(d/2) I_{d/2}(\beta))$: above it the uniform state is unstable.

    For the noisy exponential model (arXiv 2606.05140). d/2 at beta = 0. By the power series of $I_{d/2}$, for beta up to 1000.
    """
    beta = checked("beta", beta, lambda a: (a >= 0) & (a <= 1000), "in [0, 1000]")
    k, nu = jnp.arange(2048.0), d / 2
    square = jnp.where(beta > 0, beta, 1) ** 2 / 4
    terms = k * jnp.log(square) - gammaln(k + 1) - (gammaln(nu + 1 + k) - gammaln(nu + 1.0))
    return nu * jnp.where(beta > 0, jnp.exp(-jax.nn.logsumexp(terms)), 1)


def noise_transition(d: int) -> Array:
    r"""$\beta_*^{(d)}$, the root of $I_{d/2+1}(\beta)/I_{d/2}(\beta) = 1/d$, where the transition changes order (arXiv 2606.05140)."""
    return root(_order_change, real(0.0), real(4.0 + 4 / (d - 1)), d)


def _order_change(beta, d):
    return laplace_mean(d + 2, beta) - 1 / d


def _slow_solution(d, kappa):
    """The ratio at the index where `_downwards` starts and 1 minus it, from A' = 1 - A^2 - (2 nu - 1) A / kappa to first order in A'."""
    size = jnp.maximum(jnp.abs(kappa), 1e-15)
    drag = (d + 2 * STEPS + 1) / size
    root = jnp.hypot(drag, 2)
    flat = 2 / (drag + root)
    correction = (drag / root) * (flat / root) / size
    return flat - correction, (drag + drag**2 / (root + 2)) / (drag + root) + correction


def _downwards(step, d, first):
    """Iterate step(nu, value) for nu = d/2 + STEPS, ..., d/2; errors shrink by the squared ratio each time."""
    nu = d / 2 + jnp.arange(STEPS, -1, -1, dtype=first.dtype)
    return jax.lax.scan(lambda value, nu: (step(nu, value), None), first, nu)[0]
