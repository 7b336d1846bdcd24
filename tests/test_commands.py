"""The commands' work, end to end at small settings: figures, studies, fits, starting configurations."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad, solve_ivp

from attnflow import AlignedHeads, cli, config, figures, fitting, studies
from attnflow.files import load_heads, save_heads
from attnflow.metastable import merge_flow
from attnflow.run import run
from attnflow.schema import ConfigError
from attnflow.specs import HeadsFromFile

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kinetic", "staircase"])
def test_figure_meets_its_acceptance_lines(name, tmp_path):
    experiment = config.read(figures.configuration(name))
    rows = run(experiment, tmp_path, say=lambda _: None)
    lines = figures.FIGURES[name](rows)
    assert lines and all(line.good for line in lines), lines
    assert config.read(tmp_path / "config.toml") == experiment
    plateaus = np.load(tmp_path / "tree_0.npz", allow_pickle=False)["plateaus"]
    assert plateaus[-1, 0] == pytest.approx(1.0)


@pytest.mark.slow
def test_last_step_of_the_staircase_agrees_with_a_stiff_solve_and_quadrature():
    """beta = 500: Radau in log time past the fourth cluster's merge, then the two-cluster integral of dt/d(gap)."""
    beta, theta = 500.0, np.deg2rad(config.read(figures.configuration("staircase")).tokens.degrees)

    def velocity(angle):
        gap = angle[None] - angle[:, None]
        return (np.exp(beta * (np.cos(gap) - 1)) * np.sin(gap)).mean(1)

    early = solve_ivp(lambda t, y: velocity(y), (0, 1), theta, method="Radau", rtol=1e-9, atol=1e-13)
    late = solve_ivp(
        lambda s, y: np.exp(s) * velocity(y), (0, 18), early.y[:, -1], method="Radau", rtol=1e-9, atol=1e-13
    )
    gap = late.y[3:, -1].mean() - late.y[:3, -1].mean()
    scaled, _ = quad(lambda d: np.exp(beta * (np.cos(gap) - np.cos(d))) / np.sin(d), 0.3 * gap, gap, limit=500)
    log_t = np.logaddexp(18.0, np.log(scaled) + beta * (1 - np.cos(gap)))
    experiment = config.read(figures.configuration("staircase"), ["attention.beta=[500]"])
    x0, [(_, field)] = experiment.fields()
    tree = merge_flow(field, x0, error=False)
    assert abs(tree.merges[-1].log_t + beta - log_t) < 1e-4


def test_acceptance_lines_can_miss():
    assert not figures.kinetic([{"t(cosine 0.999)": 364.1}])[0].good
    assert not figures.staircase([{"beta": 500.0, "last step ln t": -400.0}])[0].good
    assert not figures.low_temperature([{"beta": 8.0, "min W2": 0.3, "t_min": 8, "t_leave": 11, "t_terminal": 17}])[
        0
    ].good


def test_every_figure_has_its_configuration_and_others_are_refused():
    for name in figures.FIGURES:
        config.read(figures.configuration(name))
    for name in figures.STUDIES:
        studies.read(figures.configuration(name))
    with pytest.raises(ConfigError, match="no figure `nothing`; known: low_temperature"):
        figures.configuration("nothing")


@pytest.mark.slow
def test_phase_diagram_follows_the_equiangular_curve_and_resumes(tmp_path):
    path = ROOT / "configs" / "phase_diagram_128.toml"
    study = studies.read(path, ["study.betas=3", "study.seeds=4", "study.beta=[0.5, 3.5]"])
    rows, lines = studies.run_study(study, tmp_path)
    assert all(line.good for line in lines), lines
    times = [row["t at one half"] for row in rows]
    assert times == sorted(times)
    assert studies.run_study(study, tmp_path) == (rows, lines)
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == rows
    assert studies.read(tmp_path / "config.toml") == study


@pytest.mark.slow
def test_head_diversity_agrees_with_the_equiangular_times(tmp_path):
    study = studies.read(ROOT / "configs" / "head_diversity.toml", ["study.seeds=4"])
    rows, lines = studies.run_study(study, tmp_path)
    assert all(line.good for line in lines), lines
    for row in rows:
        assert row["median time to mean cosine 1/2"] == pytest.approx(row["equiangular, from orthogonal"], rel=0.02)


@pytest.mark.slow
def test_the_least_distance_falls_like_the_root_of_beta(tmp_path):
    study = studies.read(ROOT / "configs" / "beta_slope.toml", ["study.betas=[8, 32, 128]", "study.n=1000"])
    rows, lines = studies.run_study(study, tmp_path)
    assert all(line.good for line in lines), lines
    assert [row["min W2"] for row in rows] == pytest.approx([0.198, 0.1002, 0.0499], rel=0.03)


@pytest.mark.slow
def test_lifetimes_grow_by_the_gap_of_the_last_pair(tmp_path):
    study = studies.read(ROOT / "configs" / "lifetimes.toml", ["study.seeds=[0]", "study.betas=[9, 25, 81]"])
    rows, lines = studies.run_study(study, tmp_path)
    assert len(lines) == 4 and all(line.good for line in lines), lines
    assert [row["beta"] for row in rows] == [9.0, 25.0, 81.0] and all(row["error"] < 1e-6 for row in rows)


@pytest.mark.slow
def test_softmax_wins_from_one_start_and_loses_from_two(tmp_path):
    study = studies.read(ROOT / "configs" / "relu_softmax.toml", ["study.n=[16]", "study.seeds=3", "study.times=61"])
    (row,), lines = studies.run_study(study, tmp_path)
    assert all(line.good for line in lines), lines
    assert row["softmax"] < row["relu"] < row["relu, linearised"] / 3
    assert row["softmax, uniform tokens"] < row["relu, uniform tokens"]


@pytest.mark.slow
def test_fit_saves_heads_that_load_again(tmp_path):
    small = ["steps=2", "n=6", "d=4", "clouds=1", "fresh=4", "horizon=1.0"]
    spec = fitting.read(ROOT / "configs" / "radial_dominance.toml", small)
    report = fitting.fit_from(spec, tmp_path, say=lambda _: None)
    heads = load_heads(tmp_path / "heads.safetensors")
    assert np.allclose(np.linalg.norm(heads.matrix, axis=(1, 2)), np.linalg.norm(spec.start().matrix, axis=(1, 2)))
    assert len(json.loads((tmp_path / "report.json").read_text())["rows"]) == len(report.rows())
    again = HeadsFromFile(str(tmp_path / "heads.safetensors")).build(None, 4)
    assert isinstance(again, AlignedHeads) and np.array_equal(again.matrix, heads.matrix)


@pytest.mark.slow
def test_fitted_heads_are_read_by_run_sweep_and_verify(tmp_path, capsys, monkeypatch):
    """Equal heads of positive spectra: their energies rise, and the three commands say so of the file."""
    path = tmp_path / "heads.safetensors"
    save_heads(path, AlignedHeads(np.stack([np.diag([1.0, 0.5, 0.2, 0.1])] * 2)))
    mine = tmp_path / "mine.toml"
    mine.write_text(
        f"""[tokens]\nkind = "uniform"\nn = 12\nd = 4\n[heads]\nkind = "file"\npath = "{path}"
[attention]\nkind = "exponential"\nbeta = [1.0]\n[solve]\nt1 = 2.0\ntimes = 11\n"""
    )
    (row,) = run(config.read(mine), tmp_path / "run", say=lambda _: None)
    assert row["beta"] == 1.0 and (tmp_path / "run" / "results.json").exists()
    small = ["study.n=12", "study.d=4", "study.betas=2", "study.seeds=3", "study.t1=4.0", "study.times=17"]
    own, _ = studies.run_study(studies.read(ROOT / "configs" / "dominance.toml", small), tmp_path / "own")
    study = studies.read(
        ROOT / "configs" / "dominance.toml", [*small, f"study.heads={{kind = 'file', path = '{path}'}}"]
    )
    rows, lines = studies.run_study(study, tmp_path / "sweep")
    assert lines and all(line.good for line in lines)
    assert [row["by t = 4"] for row in rows] == [0.0, 0.0] and max(row["by t = 4"] for row in own) > 0.5
    monkeypatch.setattr(sys, "argv", ["attnflow", "verify", "--config", str(mine)])
    cli.main()
    assert "aligned" in capsys.readouterr().out
    with pytest.raises(ValueError, match="set d to it"):
        studies.read(ROOT / "configs" / "dominance.toml", [f"study.heads={{kind = 'file', path = '{path}'}}"]).aligned()


@pytest.mark.parametrize(
    ("read", "name", "assignment", "message"),
    [
        (studies.read, "phase_diagram", "study.beta=[1]", r"study: beta must be an interval"),
        (studies.read, "beta_slope", "study.betas=[8]", r"study: betas must be at least two positive numbers"),
        (studies.read, "lifetimes", "study.betas=[8, 9]", r"at least three positive numbers"),
        (studies.read, "beta_slope", "study.value=0.1", r"score \* value above 1"),
        (studies.read, "phase_diagram", "study.kind=phase", r"study\.kind: must be one of"),
        (studies.read, "phase_diagram", "study.sed=1", r"study\.sed: unknown key; did you mean `seed`"),
        (fitting.read, "radial_dominance", "beta=1", r"beta must be an interval"),
        (fitting.read, "radial_dominance", "condition=any", r"condition: must be one of"),
    ],
)
def test_mistakes_in_studies_and_fits_are_one_line(read, name, assignment, message):
    with pytest.raises(ConfigError, match=message):
        read(ROOT / "configs" / f"{name}.toml", [assignment])


def test_starting_configuration_is_valid_and_is_not_overwritten(tmp_path):
    path = tmp_path / "mine.toml"
    cli.init(path)
    assert config.read(path).attention.beta == (1.0, 4.0)
    with pytest.raises(ConfigError, match="exists already"):
        cli.init(path)
