"""The main job, end to end."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attnflow import config
from attnflow.run import run
from attnflow.theory.low_temperature import projection_rate

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_showcase_reproduces_the_three_phases(tmp_path):
    """Case 1: V = diag(1, .5), B = diag(1, 4); times within 1, minima of W2 within 3 % and to the space within 1 %."""
    experiment = config.read(ROOT / "configs" / "low_temperature.toml", ["solve.times=61"])
    said = []
    rows = run(experiment, tmp_path / "run", say=lambda line: said.append(str(line)))
    expected = {
        8.0: (0.198, 0.1696, 8.0, 11.5, 17.0),
        32.0: (0.1002, 0.0886, 10.5, 15.5, 21.5),
        128.0: (0.0499, 0.0455, 13.5, 19.5, 25.5),
    }
    for row in rows:
        w2, space, t_min, leave, terminal = expected[row["beta"]]
        assert abs(row["min W2"] / w2 - 1) < 0.03
        assert abs(row["min to space"] / space - 1) < 0.01
        assert abs(row["t_min"] - t_min) <= 1 and abs(row["t_leave"] - leave) <= 1
        assert abs(row["t_terminal"] - terminal) <= 1
    assert (tmp_path / "run" / "figure.svg").stat().st_size > 1000
    decay = float(re.search(r"exp\(-(\S+) t\)", said[-1]).group(1))
    assert (
        abs(decay - float(projection_rate(experiment.fields()[1][0][1].heads))) < 0.02
    )  # 1/4, the rate of Corollary 2


def test_run_folder_says_what_made_it(tmp_path):
    experiment = config.read(
        ROOT / "configs" / "low_temperature.toml",
        ["tokens.n=200", "tokens.refine=[]", "attention.beta=[1.0]", "solve.times=11", "solve.t1=2.0"],
    )
    rows = run(experiment, tmp_path / "run", say=lambda _: None)
    folder = tmp_path / "run"
    assert config.read(folder / "config.toml") == experiment
    facts = json.loads((folder / "facts.json").read_text())
    assert facts["seed"] == 0 and facts["dtype"] == "float64" and "jax" in facts["versions"]
    flow = np.load(folder / "flow_0.npz", allow_pickle=False)
    assert flow["tokens"].shape == (11, 200, 2) and flow["weights"].shape == (200,)
    assert flow["w2_to_projection"].min() == rows[0]["min W2"]
    assert not list(folder.glob("*.partial"))


@pytest.mark.slow
def test_command_reports_mistakes_in_one_line_and_with_its_exit_code(tmp_path):
    def call(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "attnflow", *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=300
        )

    bad = call("run", str(ROOT / "configs" / "low_temperature.toml"), "--set", "solve.rtoll=1")
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1 and "did you mean `rtol`" in bad.stderr
    assert call("run", "none.toml").returncode == 2
