"""The table claim -> both sides -> verdict: every statement where it should hold, and where it is known to fail."""

import json
from collections.abc import Iterable, Sequence

from jaxtyping import Array, Float
from rich.table import Table

from ..field import AbstractField
from . import own, paper_a, paper_b
from .row import Row as Row


def verify(
    paper: str | None = None, field: AbstractField | None = None, x0: Float[Array, "n d"] | None = None
) -> list[Row]:
    """Every statement of `paper` "A" (arXiv 2605.10931), "B" (arXiv 2605.04279), or both, as rows with a `status`.

    Without a field: each statement within its hypothesis and where it is known to fail; all rows should be as predicted.
    With a field and tokens `x0`: the hypotheses they meet, by how much they miss the others, and the statements that apply.
    A statement outside its hypotheses may go either way; one that fails within them is "unexpected".

    Computes in double precision where that is switched on; rounding makes rows unexpected without it.
    """
    if paper not in (None, "A", "B"):
        raise ValueError(f'`paper` must be "A", "B" or None, got {paper!r}.')
    if (field is None) != (x0 is None):
        raise ValueError("`field` and `x0` go together: give both, or neither for the default run.")
    if field is not None and x0 is not None:
        return list(own.rows(field, x0, paper=paper))
    parts = (paper_a.PARTS if paper != "B" else ()) + (paper_b.PARTS if paper != "A" else ())
    return [line for part in parts for line in part()]


def unexpected(rows: Iterable[Row]) -> list[Row]:
    """The rows that contradict theory: a non-zero exit status where there are any."""
    return [line for line in rows if line.status == "unexpected"]


def table(rows: Sequence[Row]) -> Table:
    """The rows for a terminal."""
    out = Table("paper", "statement", "regime", "left", "", "right", "slack", "verdict")
    style = {"holds": "green", "fails as predicted": "yellow", "unexpected": "bold red"}
    for line in rows:
        sides = f"{line.lhs:.6g}", line.relation, f"{line.rhs:.6g}", f"{line.slack:.2e}"
        out.add_row(line.paper, line.statement, line.regime, *sides, line.status, style=style[line.status])
    return out


def to_json(rows: Sequence[Row]) -> str:
    """The rows as a JSON list of objects; numbers that are not finite become null."""
    return json.dumps([_plain(line) for line in rows], indent=1)


def _plain(line):
    values = {**line.__dict__, "status": line.status}
    return {k: None if isinstance(v, float) and not abs(v) < float("inf") else v for k, v in values.items()}
