"""One line of the table: a statement in one regime, both its sides, and whether that is what theory says."""

import dataclasses

import numpy as np

from ..claims import Claim


@dataclasses.dataclass(frozen=True)
class Row:
    """A statement evaluated in a regime. `lhs`, `rhs`, `slack` are those of the entry with the least slack."""

    paper: str
    statement: str
    regime: str
    lhs: float
    rhs: float
    slack: float
    relation: str
    holds: bool
    expected: bool
    source: str

    @property
    def status(self) -> str:
        """ "holds", "fails as predicted", or "unexpected" in either direction."""
        if self.holds != self.expected:
            return "unexpected"
        return "holds" if self.holds else "fails as predicted"


def row(paper: str, statement: str, regime: str, claim: Claim, *, expected: bool = True) -> Row:
    """The row of a claim that theory `expected` to hold, or to fail."""
    worst = np.unravel_index(np.argmin(claim.slack), claim.slack.shape)
    lhs, rhs, slack = (float(side[worst]) for side in (claim.lhs, claim.rhs, claim.slack))
    return Row(paper, statement, regime, lhs, rhs, slack, claim.relation, bool(claim.holds), expected, claim.source)
