"""Configurations: what is accepted round-trips, what is wrong is one line with the key's path."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from attnflow import config
from attnflow.schema import ConfigError, build, to_table, to_toml

ROOT = Path(__file__).parents[1]
BASE = """
[tokens]
kind = "uniform"
n = 8
d = 3
[heads]
kind = "scalar"
strengths = [1.0]
"""


def write(tmp_path, text):
    path = tmp_path / "experiment.toml"
    path.write_text(text)
    return path


def test_showcase_is_valid_and_round_trips():
    experiment = config.read(ROOT / "configs" / "low_temperature.toml")
    again = build(config.Experiment, tomllib.loads(to_toml(to_table(experiment))))
    assert again == experiment
    assert experiment.attention.beta == (8.0, 32.0, 128.0)


def test_assignments_override_the_file(tmp_path):
    path = write(tmp_path, BASE)
    experiment = config.read(path, ["attention.beta=[2, 3]", "solve.solver=dopri8", "tokens.n=5"])
    assert experiment.attention.beta == (2.0, 3.0)
    assert experiment.solve.solver == "dopri8"
    assert experiment.build_tokens()[0].shape == (5, 3)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("tokens.m=3", r"tokens\.m: unknown key"),
        ("atention.beta=3", r"atention: unknown key; did you mean `attention`"),
        ("solve.rtol='a'", r"solve\.rtol: must be a number"),
        ("solve.times=1.5", r"solve\.times: must be a whole number"),
        ("solve.times=true", r"solve\.times: must be a whole number, got boolean"),
        ("solve.times=1", r"solve: times must be at least 2"),
        ("solve.t1=inf", r"solve\.t1: must be finite"),
        ("attention.kind='soft'", r"attention\.kind: must be one of"),
        ("attention.beta=-1", r"attention: beta must be >= 0"),
        ("tokens.kind='unifrom'", r"tokens\.kind: .*did you mean 'uniform'"),
        ("observe=['energie']", r"observe: no observable `energie`"),
        ("tokens=3", r"tokens: must be a table"),
        ("dtype='float16'", r"dtype: must be one of"),
        ("noequals", r"must read key=value"),
    ],
)
def test_mistakes_are_one_line_with_the_path(assignment, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as caught:
        config.read(write(tmp_path, BASE), [assignment])
    assert "\n" not in str(caught.value)


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        config.read(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"experiment\.toml"):
        config.read(write(tmp_path, "a = = 3"))
    with pytest.raises(ConfigError, match="tokens: is required"):
        config.read(write(tmp_path, "[heads]\nkind='scalar'\nstrengths=[1]"))


def test_tokens_and_heads_come_from_files_beside_the_config(tmp_path):
    x = np.eye(3)
    np.savez(tmp_path / "own.npz", tokens=x, score=np.eye(3)[None], value=2 * np.eye(3)[None])
    text = "[tokens]\nkind='file'\npath='own.npz'\n[heads]\nkind='file'\npath='own.npz'\n"
    experiment = config.read(write(tmp_path, text))
    tokens, _ = experiment.build_tokens()
    assert np.array_equal(tokens, x)
    assert np.array_equal(experiment.build_heads(3).value, 2 * np.eye(3)[None])


def test_object_arrays_are_refused(tmp_path):
    np.save(tmp_path / "evil.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    text = "[tokens]\nkind='file'\npath='evil.npy'\n[heads]\nkind='scalar'\nstrengths=[1]\n"
    with pytest.raises(ValueError, match=r"evil\.npy"):
        config.read(write(tmp_path, text)).build_tokens()


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "sp ace"])
def test_names_that_could_leave_the_folder_are_refused(name):
    with pytest.raises(ConfigError, match="cannot name a run"):
        config.safe_name(name)
