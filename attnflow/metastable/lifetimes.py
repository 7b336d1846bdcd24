"""How long metastable states live."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float

from ..field import AttentionField
from .flow import merge_flow


class Lifetimes(NamedTuple):
    r"""$\ln t$ of the last merge at every beta (NaN where not all merged), its `error`, and the line `slope` $\beta$ + `intercept`."""

    betas: np.ndarray
    log_t: np.ndarray
    error: np.ndarray
    slope: float
    slope_error: float
    intercept: float
    status: tuple[str, ...]


def lifetimes(
    field_of_beta: Callable[[Any], AttentionField],
    x0: Float[Array | np.ndarray, "n d"],
    betas: Sequence[float] | np.ndarray,
    *,
    tolerance: float | None = None,
    threshold: float | None = None,
    rtol: float | None = None,
    max_steps: int = 20_000,
) -> Lifetimes:
    r"""Lifetimes of the metastable state against beta: the last merge of `merge_flow(field_of_beta(beta), x0)`.

    `slope_error` is the standard error of the least-squares slope; NaN for fewer than three betas that merge.
    """
    b, status = np.asarray(betas, np.float64), []
    log_t, error = np.full(len(b), np.nan), np.full(len(b), np.nan)
    for k, beta in enumerate(b):
        tree = merge_flow(
            field_of_beta(float(beta)), x0, tolerance=tolerance, threshold=threshold, rtol=rtol, max_steps=max_steps
        )
        status.append(tree.status)
        if tree.status == "merged" and tree.merges:
            log_t[k], error[k] = tree.merges[-1].log_t, tree.merges[-1].error
    return Lifetimes(b, log_t, error, *_line(b[np.isfinite(log_t)], log_t[np.isfinite(log_t)]), tuple(status))


def _line(x, y) -> tuple[float, float, float]:
    """(slope, its standard error, intercept) of the least-squares line."""
    if len(x) < 2:
        return np.nan, np.nan, np.nan
    slope, intercept = np.polyfit(x, y, 1)
    spread = np.sum((x - x.mean()) ** 2)
    scatter = np.sum((y - slope * x - intercept) ** 2)
    return float(slope), float(np.sqrt(scatter / (len(x) - 2) / spread)) if len(x) > 2 else np.nan, float(intercept)
