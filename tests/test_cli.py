"""The command line: exit codes, help with examples, completion, a starting configuration that runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from checkpoints import CONFIGS, random_tensors, write_folder

from attnflow import cli, config, fitting, studies

ROOT = Path(__file__).parents[1]


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Run the command in this process, in an empty folder; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_precision", lambda dtype: None)  # the tests' precision stays

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["attnflow", *arguments])
        try:
            with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
                cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_starting_configuration_runs_and_can_be_looked_at(call, tmp_path):
    assert call("init", "mine.toml")[0] == 0
    code, out, err = call("run", "mine.toml", "--set", "tokens.n=8", "--set", "solve.times=5")
    assert code == 0 and "written to runs/mine/" in out and err == "" and "last order_parameter" in out
    assert call("report", "runs/mine")[0] == 0
    assert (tmp_path / "runs" / "mine" / "report.html").exists()


def test_a_starting_configuration_for_every_job_reads(call, tmp_path):
    for kind, read in (("run", config.read), ("sweep", studies.read), ("fit", fitting.read)):
        code, out, _ = call("init", f"{kind}.toml", "--kind", kind)
        assert code == 0 and f"next: attnflow {kind} {kind}.toml" in out
        read(tmp_path / f"{kind}.toml")
    code, _, err = call("init", "run.toml")
    assert code == 2 and "exists already" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["doctor"], 0, ""),
        (["figure", "list"], 0, "staircase "),
        (["report", "nowhere"], 1, "attnflow: there is no run folder nowhere."),
        (["run", "nowhere.toml"], 2, "attnflow: nowhere.toml: no such file; `attnflow init` writes one"),
        (["figure", "nothing"], 2, "attnflow: no figure `nothing`; known: low_temperature"),
        (["figure"], 2, "required"),
        (["fly"], 2, "fly"),
        (["run", "a.toml", "--outt", "b"], 2, "outt"),
    ],
)
def test_exit_codes_of_the_commands(call, arguments, code, message):
    got, out, err = call(*arguments)
    assert got == code and message in (out if code == 0 else err)
    assert "Traceback" not in err


@pytest.mark.slow
def test_inspected_heads_become_a_table_and_maps(call, tmp_path):
    write_folder(tmp_path / "model", CONFIGS["gpt2"], random_tensors(CONFIGS["gpt2"], seed=1))
    code, out, _ = call("inspect", "model", "--json", "heads.json", "--figure", "heads.svg")
    assert code == 0 and "symmetry_defect" in out
    heads = json.loads((tmp_path / "heads.json").read_text())["heads"]
    assert (tmp_path / "heads.svg").stat().st_size > 1000 and "symmetry_defect" in heads[0]


@pytest.mark.slow
def test_a_missed_acceptance_line_is_exit_code_3(call):
    """One draw of 32 tokens in dimension 64 starts too far from orthogonal for the equiangular edge."""
    settings = ["study.d=64", "study.seeds=1", "study.betas=2", "study.beta=[0.5, 3.5]", "study.times=400"]
    path = str(ROOT / "configs" / "phase_diagram_128.toml")
    code, out, _ = call("sweep", path, *(part for s in settings for part in ("--set", s)))
    assert code == 3 and "MISSED" in out


@pytest.mark.slow
def test_an_interrupted_sweep_is_exit_code_130(tmp_path):
    command = [sys.executable, "-m", "attnflow", "sweep", str(ROOT / "configs" / "phase_diagram.toml")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=tmp_path) as sweep:
        end = time.monotonic() + 200
        while not list(tmp_path.glob("runs/phase_diagram/store/manifest/*.json")):
            assert sweep.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        os.kill(sweep.pid, signal.SIGINT)
        _, err = sweep.communicate(timeout=100)
    assert sweep.returncode == 130 and "attnflow: interrupted" in err


@pytest.mark.parametrize("command", ["run", "sweep", "fit", "verify", "figure", "report", "inspect", "doctor", "init"])
def test_help_of_every_command_shows_examples_before_options(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0 and f"$ attnflow {command}" in out
    assert out.index(f"$ attnflow {command}") < out.index("options")


def test_exit_codes_and_completion_are_documented(call):
    _, out, _ = call("--help")
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    for code in ("0", "1", "2", "3", "130"):
        assert f"{code} " in out and f"| {code} |" in page
    assert "--tyro-print-completion" in out and "--tyro-print-completion" in page
    for shell in ("bash", "zsh", "fish"):
        code, script, _ = call("--tyro-print-completion", shell)
        assert code == 0 and "attnflow" in script and "low_temperature" not in script
