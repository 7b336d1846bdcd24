"""Weight search: heads on random orthogonal planes that lose radial dominance, before and after a fit, over many keys.

Losses are of the exact per-head margin on 64 clouds of 32 fresh tokens in d = 8, beta on [.5, 2]; strengths are held exactly,
clustering to .02 in the mean cosine, and overlaps to the value printed. Half of the clouds lose dominance before the fit by
the "median first loss"; the fit is judged at twice that and at t = 6, 12 and 24.
"""

import time

import jax.random as jr
import numpy as np

from attnflow.constrained import on_shared_axes
from attnflow.dominance import fit_radial_dominance
from attnflow.heads import orthogonal

from .measure import Recorder

D, N, HORIZON = 8, 32, 6.0


def one(heads: int, seed: int, *, overlap: float, steps: int = 360, fresh: int = 64, tries: int = 2) -> dict:
    """Before and after one fit from one key."""
    start = orthogonal(jr.key(seed), heads, D, D // heads)
    began = time.process_time()
    _, report = fit_radial_dominance(
        on_shared_axes(start),
        n=N,
        horizon=HORIZON,
        key=jr.key(1000 + seed),
        steps=steps,
        fresh=fresh,
        tries=tries,
        overlap=overlap,
    )
    before, after = report.before, report.after
    median = float(np.median(before.first_loss()))
    at = int(np.argmin(np.abs(before.times - HORIZON)))

    def largest(overlaps):
        return float(np.abs(overlaps - np.diag(np.diag(overlaps))).max())

    return {
        "median first loss before": median,
        "median first loss after": float(np.median(after.first_loss())),
        "lost before": {t: before.share_lost(t) for t in (3.0, 2 * median, 6.0, 12.0, 24.0)},
        "lost after": {t: after.share_lost(t) for t in (3.0, 2 * median, 6.0, 12.0, 24.0)},
        "energy fell after": after.share_lost(24.0, "energy"),
        "strength": [float(np.max(np.abs(after.strengths / before.strengths - 1)))],
        "overlap": [largest(before.overlaps), largest(after.overlaps)],
        "cosine at 6": [float(before.cosine[:, at].mean()), float(after.cosine[:, at].mean())],
        "cpu_s": time.process_time() - began,
    }


def summary(lines: list[dict]) -> dict:
    """Medians over keys, and the share of keys whose fit keeps nine clouds in ten up to twice the old median."""
    twice = [list(line["lost after"].values())[1] for line in lines]
    return {
        "keys": len(lines),
        "median first loss": [
            float(np.median([line[f"median first loss {when}"] for line in lines])) for when in ("before", "after")
        ],
        "share lost by 3, before": float(np.mean([line["lost before"][3.0] for line in lines])),
        "share lost by twice the old median, after": float(np.mean(twice)),
        "share lost by 24, after": float(np.mean([line["lost after"][24.0] for line in lines])),
        "keys with a median at least doubled": float(
            np.mean([line["median first loss after"] >= 2 * line["median first loss before"] for line in lines])
        ),
        "keys with more than a tenth lost by twice the old median": float(np.mean(np.array(twice) > 0.1)),
        "largest overlap": max(line["overlap"][1] for line in lines),
        "largest change of a strength": max(line["strength"][0] for line in lines),
        "cosine at 6": [float(np.mean([line["cosine at 6"][k] for line in lines])) for k in (0, 1)],
        "cpu_s": float(np.median([line["cpu_s"] for line in lines])),
    }


def main(recorder: Recorder) -> None:
    """As many keys as rounds are asked for (`--repeats 20`), two heads and four, the latter with overlaps up to .25 too."""
    settings = [(2, 0.02)] if recorder.tiny else [(2, 0.02), (4, 0.25), (4, 0.02)]
    size = {"steps": 3, "fresh": 8, "tries": 1} if recorder.tiny else {}
    for heads, overlap in settings:
        params = {"heads": heads, "overlap": overlap, **size}
        lines = []
        for seed in range(recorder.repeats):
            lines.append(one(heads, seed, overlap=overlap, **size))
            recorder.write("weight search", "attnflow", {**params, "seed": seed}, **lines[-1])
        recorder.write("weight search, summary", "attnflow", params, **summary(lines))
