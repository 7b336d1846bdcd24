"""What an architecture is, and how its weights are taken from files: by name, each of a stated shape."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from .blocks import Layer, Norm
from .files import Tensors

Config = Mapping[str, object]

DEEPEST = 4096  # layers, more than any network has


@dataclass(frozen=True)
class Architecture:
    """A network as `depth` layers of two blocks; `post` if the residual is normalised after each block, not before.

    `layer(l)`, `closing()` and `embed(ids)` read the files when called. `shared` says that every layer has the same
    weights, `positions` and `vocabulary` how far `embed` goes, `obstacle` why the network cannot be run exactly.
    """

    name: str
    dimension: int
    heads: int
    width: int
    depth: int
    post: bool
    centred: bool
    layer: Callable[[int], Layer]
    closing: Callable[[], Norm | None]
    embed: Callable[[np.ndarray], np.ndarray] | None = None
    shared: bool = False
    positions: int | None = None
    vocabulary: int | None = None
    obstacle: str | None = None


def count(config: Config, name: str, default: int | None = None, *, most: int = 2**24) -> int:
    value = config.get(name, default)
    value = default if value is None else value
    if type(value) is not int or not 0 < value <= most:
        raise ValueError(f"`{name}` in the configuration must be an integer from 1 to {most}, got {value!r}.")
    return value


def positive(config: Config, name: str, default: float) -> float:
    value = config.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ValueError(f"`{name}` in the configuration must be a number >= 0, got {value!r}.")
    return float(value)


def choice(config: Config, name: str, allowed, default):
    value = config.get(name, default)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"`{name}` in the configuration must be one of {', '.join(allowed)}, got {value!r}.")
    return value


def width_of(d: int, heads: int) -> int:
    if d % heads:
        raise ValueError(f"The configuration asks for {heads} heads in dimension {d}, which they do not divide.")
    return d // heads


class Reader:
    """Reads tensors under a prefix in float64, each of a stated shape; a `dry` one only checks."""

    def __init__(self, tensors: Tensors, anchor: str, dry: bool = False):
        found = [name for name in tensors if name == anchor or name.endswith("." + anchor)]
        if len(found) != 1:
            raise ValueError(f"{tensors.source} must hold one tensor named {anchor}, got {len(found)}.")
        self.tensors, self.prefix, self.dry, self.anchor = tensors, found[0].removesuffix(anchor), dry, anchor

    def checked(self) -> "Reader":
        return Reader(self.tensors, self.anchor, dry=True)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def raw(self, name: str, *shape: int) -> np.ndarray:
        """As stored: for the rows of large embeddings."""
        full = self.prefix + name
        old = full.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        if full not in self.tensors and old in self.tensors:  # a checkpoint from before 2019
            full = old
        if full not in self.tensors:
            raise ValueError(f"{self.tensors.source} has no tensor {full}.")
        if tuple(self.tensors.shape(full)) != shape:
            raise ValueError(
                f"{self.tensors.source}: {full} must have shape {shape} by the configuration, got {self.tensors.shape(full)}."
            )
        return np.broadcast_to(np.float32(0), shape) if self.dry else self.tensors[full]

    def __call__(self, name: str, *shape: int) -> np.ndarray:
        a = self.raw(name, *shape)
        return a if self.dry else np.asarray(a, np.float64)

    def norm(self, name: str, d: int, eps: float) -> Norm:
        return Norm(self(f"{name}.weight", d), self(f"{name}.bias", d), eps)

    def heads(self, name: str, heads: int, width: int, d: int, *, bias: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """A projection (H k, d) and its bias, by head; where `bias` is False one that is missing is 0."""
        w = self(f"{name}.weight", heads * width, d).reshape(heads, width, d)
        if not bias and not self.has(f"{name}.bias"):
            return w, np.zeros((heads, width))
        return w, self(f"{name}.bias", heads * width).reshape(heads, width)


def by_head(w: np.ndarray, heads: int) -> np.ndarray:
    """(d, H k) by head: (H, d, k)."""
    d, all_widths = w.shape
    return w.reshape(d, heads, all_widths // heads).transpose(1, 0, 2)


def checked(architecture: Architecture, dry: Architecture) -> Architecture:
    """The architecture, after every layer of its dry twin was built: shapes fit, no data was read."""
    for number in range(1 if dry.shared else dry.depth):
        dry.layer(number)
    dry.closing()
    if dry.embed is not None:
        dry.embed(np.zeros(1, np.int64))
    return architecture
