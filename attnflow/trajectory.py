"""What a solve returns: times, observables, the last tokens, and how it ended, per lane."""

from enum import IntEnum
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float

from .attention import concrete


class Status(IntEnum):
    """How a solve ended; `stats["status"]` of every lane."""

    OK = 0
    EVENT = 1
    MAX_STEPS = 2
    NONFINITE = 3
    OVERFLOW = 4
    STEP_TOO_SMALL = 5


REMEDY = {
    Status.MAX_STEPS: "raise `max_steps`, loosen `rtol`, shorten `ts`, or pass throw=False to keep the frames reached",
    Status.NONFINITE: "look for non-finite heads or weights; a custom field must be finite on the sphere",
    Status.OVERFLOW: 'exp(beta max s) does not fit the dtype: integrate with clock="scaled", or lower beta',
    Status.STEP_TOO_SMALL: "the step fell below the controller's smallest: loosen `rtol` or raise `dtmin`",
}


class Trajectory(eqx.Module):
    """A solved flow: times `ts` (T,), observables `values` (T, ...) by name, last tokens `final` (n, d), and `stats`.

    Frames that were not reached are NaN, never the last state. `stats`: `status` (see `Status`), `time_reached`, `steps`,
    `accepted`, `rejected`, `norm_defect` (largest $||x| - 1|$ before retraction), `log_time` (T,) with the scaled clock,
    and `seconds` where it is known.
    """

    ts: Float[jax.Array, "*batch T"]
    values: dict[str, Any]
    final: Float[jax.Array, "*batch n d"]
    stats: dict[str, Any]

    @property
    def ok(self):
        """Whether every time was reached or an event ended the run, per lane."""
        return self.stats["status"] <= Status.EVENT

    def __repr__(self):
        if not concrete(self.ts):
            return f"Trajectory(traced, values {sorted(self.values)})"
        status = np.atleast_1d(np.asarray(self.stats["status"]))
        lanes = "" if status.size == 1 else f" x {status.size} lanes"
        shape = "x".join(map(str, self.final.shape))
        lines = [f"Trajectory: {self.ts.shape[-1]} times{lanes}, tokens {shape} {self.final.dtype}"]
        for name, value in self.values.items():
            for leaf in jax.tree.leaves(value):
                span = "" if leaf.size == 0 else f"  from {np.nanmin(leaf):.6g} to {np.nanmax(leaf):.6g}"
                lines.append(f"  {name:<20} {leaf.shape!s:<16}{span}")
        total = {k: int(np.sum(self.stats[k])) for k in ("accepted", "rejected") if k in self.stats}
        lines.append("  steps: " + ", ".join(f"{v} {k}" for k, v in total.items()))
        lines.append(f"  largest norm defect before retraction: {float(np.max(self.stats['norm_defect'])):.2e}")
        if "seconds" in self.stats:
            lines.append(f"  wall time: {float(self.stats['seconds']):.3f} s")
        for code in np.unique(status):
            if code != Status.OK:
                where = np.flatnonzero(status == code)
                lanes = "" if status.size == 1 else f" in lanes {where[:8].tolist()}{'...' if len(where) > 8 else ''}"
                reached = np.atleast_1d(np.asarray(self.stats["time_reached"]))[where].min()
                lines.append(f"  {Status(code).name}{lanes} at t = {reached:.6g}")
        return "\n".join(lines)
