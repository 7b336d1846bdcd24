r"""Critical points of the coupled field of a few tokens: Newton on the field, stability by the spectrum of its Jacobian."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float

from . import sphere
from .field import AbstractField

Tokens = Float[Array, "n d"]


class Equilibrium(eqx.Module):
    r"""Tokens at rest: `x`, the largest speed left, the eigenvalues of the Jacobian on the tangent space, by real part.

    `unstable` and `neutral` count those with positive and with zero real part (to 1e-7 of the largest); rotations that
    commute with the heads are neutral.
    """

    x: Tokens
    speed: Float[Array, ""]
    spectrum: Complex[Array, " m"]

    @property
    def unstable(self) -> int:
        return int(np.sum(np.real(self.spectrum) > self._zero))

    @property
    def neutral(self) -> int:
        return int(np.sum(np.abs(np.real(self.spectrum)) <= self._zero))

    @property
    def _zero(self):
        return 1e-7 * max(1e-300, float(np.max(np.abs(self.spectrum))))

    def __repr__(self):
        gram = np.asarray(self.x @ self.x.T)
        pairs = np.sort(gram[np.triu_indices(len(gram), 1)])
        return (
            f"Equilibrium({self.unstable} unstable, {self.neutral} neutral of {len(self.spectrum)}, "
            f"largest rate {float(np.max(np.real(self.spectrum))):.4g}, cosines {np.array2string(pairs, precision=4)}, "
            f"speed left {float(self.speed):.1e})"
        )


def newton(field: AbstractField, x: Tokens, *, steps: int = 60) -> Tokens:
    r"""Tokens at rest near x: damped Newton steps on the tangent spaces, retracted to the sphere.

    Levenberg-Marquardt with damping $|F|^2$ (zeros need not be isolated: the field may commute with rotations), each step
    shortened by halves to where $|F|$ is least. It may end at a local minimum of $|F|$: look at the speed left.
    """
    scales = jnp.asarray(2.0, x.dtype) ** -jnp.arange(0, 16, dtype=x.dtype)

    def step(_, x):
        frame = _tangent_frames(x)
        F, J = _linearised(field, x, frame)
        damping = (jnp.sum(F**2) + jnp.finfo(x.dtype).tiny) * jnp.eye(F.shape[0], dtype=x.dtype)
        direction = -jnp.linalg.solve(J.T @ J + damping, J.T @ F)

        def moved(scale):
            return _moved(x, frame, scale * direction)

        sizes = jax.vmap(lambda scale: jnp.sum(field(0.0, moved(scale), None) ** 2))(scales)
        best = jnp.argmin(sizes)
        return jnp.where(sizes[best] < jnp.sum(F**2), moved(scales[best]), x)

    return jax.lax.fori_loop(0, steps, step, x)


def stationary(field: AbstractField, x: Tokens, *, steps: int = 60) -> Tokens:
    r"""Tokens at rest near x, differentiable in the field by the implicit function theorem: $dx = -J^+ \partial F$.

    Costs a Newton solve and one linear one, whatever time the flow would need to come there, and no stored steps. Along
    neutral directions (J singular to 1e-9: rotations that commute with the heads) the derivative is that of least length, so
    only what is invariant under them has a meaningful gradient. x itself, the start of the search, gets none.
    """
    x = jax.lax.stop_gradient(newton(jax.lax.stop_gradient(field), x, steps=steps))
    frame = _tangent_frames(x)
    F, J = _linearised(field, x, frame)
    # A Newton step from the zero with its matrix held: it moves nothing, and its derivative is the theorem's.
    return _moved(x, frame, -jnp.linalg.pinv(jax.lax.stop_gradient(J), rtol=1e-9) @ F)


def spectrum(field: AbstractField, x: Tokens) -> Complex[Array, " m"]:
    r"""Eigenvalues of the Jacobian of the field on the tangent spaces, m = n(d-1), by falling real part. On a CPU only."""
    values = jnp.linalg.eigvals(_linearised(field, x, _tangent_frames(x))[1])
    return values[jnp.argsort(-values.real)]


def equilibria(field: AbstractField, starts: Float[Array, "S n d"], *, tolerance: float = 1e-10) -> list[Equilibrium]:
    r"""The different critical points that Newton reaches from many starts, most stable first.

    Kept where the largest speed is at most `tolerance`; two are one if their sorted cosines and spectra agree to 1e-5, so
    members of a family (permuted or rotated tokens) appear once. Starts from `sphere.uniform`, and from ends of runs.
    """
    ends = jax.lax.map(lambda x: newton(field, x), starts)
    found: list[tuple[np.ndarray, Equilibrium]] = []
    for x in ends:
        speed = jnp.max(sphere.safe_norm(field(0.0, x, None)))
        if not speed <= tolerance:
            continue
        point = Equilibrium(x, speed, spectrum(field, x))
        mark = np.concatenate([np.sort(np.ravel(x @ x.T)), np.sort(np.real(point.spectrum))])
        if not any(np.allclose(mark, other, atol=1e-5) for other, _ in found):
            found.append((mark, point))
    return sorted((point for _, point in found), key=lambda p: (p.unstable, float(np.max(np.real(p.spectrum)))))


def _tangent_frames(x):
    """Orthonormal bases (n, d, d-1) of the tangent spaces at unit tokens."""
    return jax.vmap(lambda u: jnp.linalg.qr(u[:, None], mode="complete")[0][:, 1:])(x)


def _moved(x, frame, u):
    return sphere.retract(x + jnp.einsum("ndk,nk->nd", frame, u.reshape(frame.shape[0], frame.shape[2])))


def _linearised(field, x, frame):
    """The field and its Jacobian in the coordinates of the frames."""

    def F(u):
        return jnp.einsum("ndk,nd->nk", frame, field(0.0, _moved(x, frame, u), None)).ravel()

    zero = jnp.zeros(frame.shape[0] * frame.shape[2], x.dtype)
    return F(zero), jax.jacfwd(F)(zero)
