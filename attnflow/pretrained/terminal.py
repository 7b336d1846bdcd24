r"""Where a flow with one shared layer ends: the leading eigenspace of the summed value matrix.

Once all tokens are one cluster u, every softmax mean is u itself, so heads alone move it by $\dot u = P_u V u$,
$V = \sum_h V_h$: the direction of $e^{tV} u_0$. It ends in the eigenspace of V of largest real part, which is a line for
a real eigenvalue (Hypothesis 1 of arXiv 2605.10931 as we know it), and for a complex pair a plane in which the cluster
turns for ever, by $2\pi$ in time $2\pi/|\mathrm{Im}\,\mu|$: no stationary state.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array as JaxArray
from jaxtyping import Complex, Float

from ..heads import FactoredHeads
from .flow import PretrainedField

Array = np.ndarray


class TerminalSpace(NamedTuple):
    """The eigenvalue of V of largest real part, or the pair of them, and an orthonormal basis of its invariant space."""

    eigenvalues: Complex[Array, " m"]
    basis: Float[Array, "d m"]

    @property
    def turning(self) -> float:
        """The mean angular speed of a cluster in this space: $|\\mathrm{Im}\\,\\mu|$."""
        return float(np.abs(self.eigenvalues.imag).max())


def terminal_space(field: PretrainedField) -> TerminalSpace:
    r"""The leading eigenspace of $V = \sum_h V_h$ for a field of one layer: m = 1, or 2 for a complex pair.

    One d x d matrix is formed for the layer, none for a head. Directions that the norm removes do not count.

    **Errors:** ValueError where the field has several layers.
    """
    if field.count != 1:
        raise ValueError(f"A field of {field.count} layers has no one terminal space; take `stack.field(layer)`.")
    heads = field.attention(field.switches[0]).heads
    if not isinstance(heads, FactoredHeads):
        raise ValueError("The field must have factored heads.")
    outputs, values = (np.asarray(a, np.float64) for a in (heads.output_factor, heads.value_factor))
    v = np.tensordot(outputs, values, axes=([0, 2], [0, 1]))
    if field.centred:  # the mean is no direction of the sphere: move its eigenvalue 0 out of the way
        v = v - (1 + np.linalg.norm(v)) / len(v)
    mu, vectors = np.linalg.eig(v)
    first = int(np.argmax(mu.real))
    if abs(mu[first].imag) <= 1e-9 * np.abs(mu).max():
        leading, space = mu[first : first + 1], vectors[:, first : first + 1].real
    else:
        leading = np.array([mu[first], mu[first].conj()])
        space = np.stack([vectors[:, first].real, vectors[:, first].imag], axis=1)
    return TerminalSpace(leading.astype(np.complex128), np.linalg.qr(space)[0])


class TerminalPhase(NamedTuple):
    """How far tokens are on the way to the terminal space; at the end alignment and mean cosine are 1.

    `alignment` is the mean length of the tokens' projection on the space, `mean_cosine` that of distinct tokens, `speed`
    the mean of $|\\dot u_i|$, which for a complex pair does not go to 0.
    """

    space: TerminalSpace
    alignment: float
    mean_cosine: float
    speed: float


def terminal_phase(field: PretrainedField, x: Float[JaxArray, "n d"]) -> TerminalPhase:
    """The terminal-phase test of tokens x on the sphere, for a field of one layer without affine drift.

    **Errors:** ValueError where the field has several layers, a feed-forward block, or affine drifts.
    """
    drifts = (field.drift.constant, field.drift.linear, field.heads.query_bias)
    if field.feed_forward is not None or any(drift is not None for drift in drifts):
        raise ValueError("The terminal phase is that of heads alone: make the field with `affine` = False.")
    space = terminal_space(field)
    u = np.asarray(field.directions(x), np.float64)
    n = len(u)
    cosine = float((np.sum(u @ u.T) - np.sum(u * u)) / (n * (n - 1))) if n > 1 else 1.0
    speed = np.linalg.norm(np.asarray(field(field.switches[0], x)), axis=-1)
    alignment = np.linalg.norm(u @ space.basis, axis=-1)
    return TerminalPhase(space, float(alignment.mean()), cosine, float(speed.mean()))
