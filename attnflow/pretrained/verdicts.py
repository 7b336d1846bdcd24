"""Which hypotheses of the theorems trained heads meet, and by how much they miss the others."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

Array = np.ndarray


class Verdict(NamedTuple):
    """One hypothesis: the share of heads that meet it, the typical value, what is needed, and the value at random.

    `share` is 1 where it holds for every head; `random` is None where random heads say nothing.
    """

    theorem: str
    hypothesis: str
    share: float
    value: float
    needed: str
    random: float | None

    @property
    def holds(self) -> bool:
        return self.share == 1

    def __str__(self):
        how = "holds" if self.holds else f"fails for {1 - self.share:.0%} of the heads"
        random = "" if self.random is None else f", random {self.random:.3g}"
        return f"{self.theorem}: {self.hypothesis}: {how} (median {self.value:.3g}, needed {self.needed}{random})"


GRADIENT = "Theorem 11, arXiv 2605.04279 (energy rises)"
CLUSTERS = "Theorem 1, arXiv 2605.10931 (clusters at low temperature)"
SCALAR = "Theorems 19, 22, 25, arXiv 2605.04279 (closed forms)"
ORTHOGONAL = "Theorem 39, arXiv 2605.04279 (nearly orthogonal heads)"
DOMINANCE = "Condition 8, arXiv 2605.04279 (radial dominance)"
ENTROPY = "Theorem 27, arXiv 2605.04279 (entropy rises)"


def verdicts(columns: Mapping[str, Array], random: Mapping[str, float], *, tolerance: float) -> list[Verdict]:
    """Verdicts from the table of `diagnose`; defects count as zero below `tolerance`.

    The exact wording of Condition 8 and Theorem 39 is not available to us: their forms are reconstructed.
    """

    def small(theorem, hypothesis, name):
        a = columns[name]
        return Verdict(theorem, hypothesis, _share(a <= tolerance), _median(a), f"<= {tolerance:g}", random.get(name))

    out = [
        small(GRADIENT, "M symmetric, |M - M^T|/|M|", "symmetry_defect"),
        Verdict(
            GRADIENT,
            "V = M up to a factor, cos(M, V)",
            _share(columns["alignment"] >= 1 - tolerance),
            _median(columns["alignment"]),
            f">= {1 - tolerance:g}",
            random.get("alignment"),
        ),
        small(CLUSTERS, "V B^T symmetric, |A - A^T|/|A|", "product_defect"),
        Verdict(
            CLUSTERS,
            "real leading eigenvalue of V B^T with a gap, gap/max|mu|",
            _share(columns["gap"] > tolerance),
            _median(columns["gap"]),
            f"> {tolerance:g}",
            random.get("gap"),
        ),
        Verdict(
            CLUSTERS,
            "B invertible, rank over d",
            _share(columns["rank_share"] == 1),
            _median(columns["rank_share"]),
            "1",
            random.get("rank_share"),
        ),
        small(SCALAR, "M a multiple of I, |M - (tr M/d) I|/|M|", "scalar_defect"),
        small(ORTHOGONAL, "|M_a M_b|/(|M_a||M_b|), largest over b", "overlap_max"),
    ]
    if "condition8" in columns:
        out += [
            _tokens(DOMINANCE, "share of tokens that meet condition 8", columns["condition8"]),
            _tokens(DOMINANCE, "share of tokens that meet the sharp form", columns["sharp"]),
            Verdict(
                DOMINANCE,
                "summed shadow over tangential output",
                _share(columns["summed"] <= 1),
                _median(columns["summed"]),
                "<= 1",
                None,
            ),
            _positive(DOMINANCE, "exact margin, normalised", columns["exact"]),
            _positive(GRADIENT, "energy of the head rises along the heads, d log E/dt", columns["energy_rate"]),
            _positive(GRADIENT, "energy of the head rises along the block, d log E/dt", columns["block_rate"]),
        ]
        if len(columns["entropy"]) > 1:
            out.append(
                _positive(ENTROPY, "entropy/log n rises from layer to layer", np.diff(columns["entropy"], axis=0))
            )
    return out


def _tokens(theorem: str, hypothesis: str, a: Array) -> Verdict:
    return Verdict(theorem, hypothesis, _share(a == 1), _median(a), "1", None)


def _positive(theorem: str, hypothesis: str, a: Array) -> Verdict:
    return Verdict(theorem, hypothesis, _share(a >= 0), _median(a), ">= 0", None)


def _share(good: Array) -> float:
    return float(np.mean(good))


def _median(a: Array) -> float:
    return float(np.nanmedian(a)) if np.isfinite(a).any() else float("nan")
