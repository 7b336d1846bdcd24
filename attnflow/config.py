"""What `attnflow run` reads: a TOML file into a frozen `Experiment` that builds its own tokens, heads and field."""

import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import diffrax as dfx
import jax.numpy as jnp
import jax.random as jr

from . import observe
from .attention import Exponential, Hardmax, Linear, ReLU, Softmax
from .field import AttentionField, ZeroTemperatureField
from .heads import AbstractHeads
from .schema import ConfigError, build, override, to_table, to_toml
from .specs import HeadsSpec, Tokens


@dataclass(frozen=True)
class AttentionSpec:
    """The nonlinearity; `beta` may be a list: one flow per value."""

    kind: Literal["softmax", "exponential", "relu", "linear", "hardmax", "zero_temperature"] = "softmax"
    beta: tuple[float, ...] = (1.0,)

    def __post_init__(self):
        if any(b < 0 for b in self.beta):
            raise ValueError(f"beta must be >= 0, got {min(self.beta)}; put a sign into the heads' score instead.")
        if not self.beta:
            raise ValueError("beta must name at least one value.")

    @property
    def betas(self) -> tuple[float, ...]:
        return self.beta if self.kind in ("softmax", "exponential") else (math.inf,)

    def field(self, heads, weights, beta, *, flat, causal):
        if self.kind == "zero_temperature":
            return ZeroTemperatureField(heads, weights)
        tempered = {"softmax": Softmax, "exponential": Exponential}
        plain = {"relu": ReLU, "linear": Linear, "hardmax": Hardmax}
        attention = tempered[self.kind](beta) if self.kind in tempered else plain[self.kind]()
        return AttentionField(heads, attention, weights, flat=flat, causal=causal)


@dataclass(frozen=True)
class SolveSpec:
    """Times and accuracy."""

    t1: float = 10.0
    times: int = 101
    rtol: float = 1e-6
    atol: float = 1e-9
    solver: Literal["tsit5", "dopri8", "dopri5", "kvaerno5"] = "tsit5"
    max_steps: int = 4096
    clock: Literal["physical", "scaled"] = "physical"

    def __post_init__(self):
        if self.times < 2:
            raise ValueError(f"times must be at least 2, got {self.times}.")

    @property
    def ts(self):
        return jnp.linspace(0.0, self.t1, self.times)

    def diffrax(self) -> dfx.AbstractSolver:
        return {"tsit5": dfx.Tsit5, "dopri8": dfx.Dopri8, "dopri5": dfx.Dopri5, "kvaerno5": dfx.Kvaerno5}[self.solver]()


@dataclass(frozen=True)
class PhasesSpec:
    """The three phases of the low-temperature flow: the time it leaves Pi#rho_0 and when it is terminal, by W2."""

    leave: float = 0.5
    terminal: float = 0.1


@dataclass(frozen=True)
class MergeSpec:
    """Follow the flow until its tokens have merged, in log time (see `metastable.merge_flow`).

    `cosine` is a level of the minimum cosine whose last crossing is reported as well.
    """

    t1: float | None = None
    tolerance: float | None = None
    threshold: float | None = None
    rtol: float | None = None
    max_steps: int = 20_000
    cosine: float | None = None


@dataclass(frozen=True)
class Experiment:
    """One flow per beta: tokens, heads, attention, times and what to observe.

    `save_tokens` keeps the tokens of every frame, times x n x d numbers, which phases and the report page need.
    """

    tokens: Tokens
    heads: HeadsSpec
    title: str = "attention flow"
    seed: int = 0
    dtype: Literal["float32", "float64"] = "float64"
    flat: bool = False
    causal: bool = False
    attention: AttentionSpec = field(default_factory=AttentionSpec)
    solve: SolveSpec = field(default_factory=SolveSpec)
    observe: tuple[str, ...] = ("order_parameter",)
    save_tokens: bool = True
    phases: PhasesSpec | None = None
    merge: MergeSpec | None = None

    def __post_init__(self):
        for name in self.observe:
            if name not in observe.OBSERVABLES:
                raise ConfigError(f"observe: no observable `{name}`; known: {', '.join(observe.OBSERVABLES)}.")
        if self.phases is not None and not self.save_tokens:
            raise ConfigError("save_tokens: must be true for a `[phases]` table, which is read off the tokens.")

    def build_tokens(self):
        """Tokens and weights (or None) in the experiment's dtype."""
        x, w = self.tokens.build(jr.fold_in(jr.key(self.seed), 0))
        return x.astype(self.dtype), None if w is None else w.astype(self.dtype)

    def build_heads(self, d: int) -> AbstractHeads:
        return self.heads.build(jr.fold_in(jr.key(self.seed), 1), d)

    def fields(self):
        """(beta, field) for every beta, and the tokens they move."""
        x, w = self.build_tokens()
        heads = self.build_heads(x.shape[1])
        pairs = [
            (b, self.attention.field(heads, w, b, flat=self.flat, causal=self.causal)) for b in self.attention.betas
        ]
        return x, pairs


def read_table(path: str | Path, assignments: Sequence[str] = ()) -> dict:
    """The TOML file at `path` with `key=value` assignments applied; paths inside it are taken from the file's folder."""
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `attnflow init` writes one to start from.") from None
    except (ValueError, RecursionError, IsADirectoryError, PermissionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    for assignment in assignments:
        override(table, assignment)
    for section in ("tokens", "heads"):
        entry = table.get(section)
        if isinstance(entry, dict) and isinstance(entry.get("path"), str):
            entry["path"] = str(path.parent / entry["path"])
    return table


def read(path: str | Path, assignments: Sequence[str] = ()) -> Experiment:
    """The validated experiment in a TOML file."""
    return build(Experiment, read_table(path, assignments))


def write(experiment: Experiment, path: Path) -> None:
    """The resolved experiment, every default written out, as TOML."""
    path.write_text(to_toml(to_table(experiment)), encoding="utf-8")


def safe_name(name: str) -> str:
    """`name` if it can name a folder, else a ConfigError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"{name!r} cannot name a run: use letters, digits, '.', '_' and '-'.")
    return name


__all__ = ["Experiment", "read", "read_table", "safe_name", "write"]
