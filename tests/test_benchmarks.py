"""The benchmarks run at their smallest sizes, their errors are small, and every target has its line in the report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.report import NOT_HERE, TARGETS, Target, verdict, write

OURS = ("attnflow", "harmonics", "by hand", "forward", "2 devices", "exact", "sinkhorn")
WRONG = ("plain ott-jax", "solved backwards")  # which is what they are there to show
LOOSE = {"transport": 1e-2, "phase_diagram": 2e-2}  # the width asked for; a sweep at rtol 1e-3
ROOT = Path(__file__).parents[1]


def line(contestant, **values):
    return {"name": "job", "contestant": contestant, "params": {"n": 4}, "cores": 1, **values}


def test_verdicts_compare_with_the_rival_named():
    lines = [line("ours", median_s=2.0), line("theirs", median_s=7.0), line("absent", not_run="no torch here")]
    where = {"n": 4, "cores": 1}
    assert verdict(lines, Target("", "job", where, "ours", "theirs", 3)) == ("3.5", "met")
    assert verdict(lines, Target("", "job", where, "ours", "theirs", 4)) == ("3.5", "**missed**")
    assert verdict(lines, Target("", "job", where, "ours", "theirs", 6, scale=2)) == ("7", "met")
    assert verdict(lines, Target("", "job", where, "ours", None, 1, at_most=True)) == ("2", "**missed**")
    assert verdict(lines, Target("", "job", where, "ours", "absent", 1)) == ("", "not run: no torch here")
    assert verdict(lines, Target("", "job", {"n": 5}, "ours", None, 1)) == ("", "not run")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name not in ("gpu", "fit")])
def test_benchmark_runs_at_its_smallest_size_and_its_answers_are_right(name, tmp_path):
    command = [sys.executable, "-m", "benchmarks", name, "--tiny", "--out", str(tmp_path)]
    environment = os.environ | {"JAX_ENABLE_X64": "0"}  # each benchmark says itself what it needs
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(text) for text in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    measured = [a for a in lines if "not_run" not in a]
    assert any(a["contestant"] in OURS for a in measured)
    assert all(a["facts"]["versions"] for a in lines)
    errors = [a["error"] for a in measured if "error" in a and a["contestant"] not in WRONG]
    assert max(errors, default=0) < LOOSE.get(name, 1e-4)
    assert all(a["median_s"] > 0 for a in measured if "median_s" in a)
    report = write(tmp_path).read_text()
    assert all(target.claim in report for target in TARGETS)
    assert all(claim in report for claim in NOT_HERE)
