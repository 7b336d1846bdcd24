"""Tokens and heads as a configuration names them; each builds itself from a key."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from . import heads as head_families
from . import sphere
from .files import load_array, load_heads
from .heads import AbstractHeads, AlignedHeads, Heads, ScalarHeads
from .schema import ConfigError


@dataclass(frozen=True)
class CosineDensity:
    """1 + amplitude cos(theta - centre)."""

    amplitude: float = 0.0
    centre: float = 0.0

    def __post_init__(self):
        if not abs(self.amplitude) < 1:
            raise ValueError(f"amplitude must lie in (-1, 1) for a positive density, got {self.amplitude}.")

    def __call__(self, theta):
        return 1 + self.amplitude * np.cos(theta - self.centre)


@dataclass(frozen=True)
class UniformTokens:
    """n independent uniform tokens in dimension d."""

    kind: ClassVar = "uniform"
    n: int
    d: int

    def build(self, key):
        return sphere.uniform(key, self.n, self.d), None


@dataclass(frozen=True)
class BoxTokens:
    """n independent uniform tokens of the box [-half, half]^d, for flows in flat space."""

    kind: ClassVar = "box"
    n: int
    d: int
    half: float = 1.0

    def build(self, key):
        return jr.uniform(key, (self.n, self.d), minval=-self.half, maxval=self.half), None


@dataclass(frozen=True)
class EquiangularTokens:
    """n tokens of equal pairwise cosine."""

    kind: ClassVar = "equiangular"
    n: int
    cosine: float
    d: int | None = None

    def build(self, key):
        return sphere.equiangular(self.n, self.cosine, self.d), None


@dataclass(frozen=True)
class VonMisesFisherTokens:
    """n tokens concentrated about a direction."""

    kind: ClassVar = "von_mises_fisher"
    n: int
    mean: tuple[float, ...]
    kappa: float

    def build(self, key):
        return sphere.von_mises_fisher(key, self.n, jnp.asarray(self.mean), kappa=self.kappa), None


@dataclass(frozen=True)
class AngleTokens:
    """Tokens of the circle by angle, in degrees."""

    kind: ClassVar = "angles"
    degrees: tuple[float, ...]

    def build(self, key):
        return sphere.circle(jnp.deg2rad(jnp.asarray(self.degrees))), None


@dataclass(frozen=True)
class CircleQuadrature:
    """Weighted nodes for a density on the circle, half of them graded towards the angles in `refine` (radians)."""

    kind: ClassVar = "circle_quadrature"
    n: int
    density: CosineDensity = CosineDensity()
    refine: tuple[float, ...] = ()
    smallest: float | None = None

    def build(self, key):
        return sphere.circle_quadrature(self.density, self.n, refine=self.refine, smallest=self.smallest)


@dataclass(frozen=True)
class SphereQuadrature:
    """Weighted nodes for the uniform law on S^2."""

    kind: ClassVar = "sphere_quadrature"
    n: int

    def build(self, key):
        return sphere.sphere_quadrature(lambda x: np.ones(len(x)), self.n)


@dataclass(frozen=True)
class TokensFromFile:
    """Tokens (n, d) and optionally weights (n,) from .npy, .npz or .safetensors."""

    kind: ClassVar = "file"
    path: str
    name: str = "tokens"
    weights: str | None = None
    normalize: bool = False

    def build(self, key):
        x = jnp.asarray(np.asarray(load_array(self.path, self.name), dtype=np.float64))
        w = None if self.weights is None else jnp.asarray(load_array(self.path, self.weights))
        return (sphere.retract(x) if self.normalize else x), w


Matrices = tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True)
class DenseHeads:
    """Heads by their matrices: score B_h and value V_h, lists of H matrices."""

    kind: ClassVar = "dense"
    score: Matrices
    value: Matrices

    def build(self, key, d) -> AbstractHeads:
        return Heads(_stack("score", self.score), _stack("value", self.value))


@dataclass(frozen=True)
class AlignedHeadsSpec:
    """Heads with V = B = M symmetric, by their matrices."""

    kind: ClassVar = "aligned"
    matrix: Matrices

    def build(self, key, d) -> AbstractHeads:
        return AlignedHeads(_stack("matrix", self.matrix))


@dataclass(frozen=True)
class ScalarHeadsSpec:
    """Heads lambda_h I."""

    kind: ClassVar = "scalar"
    strengths: tuple[float, ...]

    def build(self, key, d) -> AbstractHeads:
        return ScalarHeads(jnp.asarray(self.strengths))


@dataclass(frozen=True)
class RandomHeads:
    """A random family: `orthogonal` subspaces of dimension k, `gaussian` B and V, or symmetric `goe`."""

    kind: ClassVar = "random"
    family: Literal["orthogonal", "gaussian", "goe"]
    count: int
    k: int | None = None
    strengths: tuple[float, ...] = (1.0,)

    def build(self, key, d) -> AbstractHeads:
        if self.family == "orthogonal":
            k = d // self.count if self.k is None else self.k
            strengths = jnp.asarray(self.strengths if len(self.strengths) == self.count else self.strengths[0])
            return head_families.orthogonal(key, self.count, d, k, strengths)
        return {"gaussian": head_families.gaussian, "goe": head_families.goe}[self.family](key, self.count, d)


@dataclass(frozen=True)
class HeadsFromFile:
    """Heads as `save_heads` writes them (a fit's `heads.safetensors`), or arrays of a .npz or .safetensors by name.

    Named are `score` and `value` (H, d, d), or for aligned heads `matrix` alone; a .safetensors without names holds heads, a
    .npz then `score` and `value`.
    """

    kind: ClassVar = "file"
    path: str
    score: str | None = None
    value: str | None = None
    matrix: str | None = None

    def build(self, key, d) -> AbstractHeads:
        if self.matrix is not None:
            return AlignedHeads(jnp.asarray(load_array(self.path, self.matrix)))
        if self.path.endswith(".safetensors") and self.score is None and self.value is None:
            return load_heads(self.path)
        score, value = (load_array(self.path, name) for name in (self.score or "score", self.value or "value"))
        return Heads(jnp.asarray(score), jnp.asarray(value))


Tokens = (
    UniformTokens
    | BoxTokens
    | EquiangularTokens
    | VonMisesFisherTokens
    | AngleTokens
    | CircleQuadrature
    | SphereQuadrature
    | TokensFromFile
)
HeadsSpec = DenseHeads | AlignedHeadsSpec | ScalarHeadsSpec | RandomHeads | HeadsFromFile


def _stack(name, matrices):
    try:
        return jnp.asarray(np.array(matrices, dtype=np.float64))
    except ValueError:
        raise ConfigError(f"heads.{name}: must be a list of H square matrices of one size.") from None
