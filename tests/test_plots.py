"""Pictures: every one draws what it is given, in vectors, without LaTeX and without touching global settings."""

import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from attnflow import plots
from attnflow.metastable.tree import Plateau

RNG = np.random.default_rng(0)
TS = np.linspace(0, 2, 7)
BALL = RNG.normal(size=(7, 12, 3))
BALL /= np.linalg.norm(BALL, axis=-1, keepdims=True)
TURN = np.stack([np.cos(RNG.uniform(0, 7, (7, 12))), np.sin(RNG.uniform(0, 7, (7, 12)))], axis=-1)
WEIGHTS = np.arange(1.0, 13.0) / 78

DRAWN = {
    "angles": lambda ax: plots.angles(ax, TS, TURN, weights=WEIGHTS, most=5),
    "bands": lambda ax: plots.bands(ax, TS, RNG.normal(size=(9, 7)), label="a"),
    "circle": lambda ax: plots.circle(ax, jnp.asarray(TURN[0]), weights=WEIGHTS),
    "circle_density": lambda ax: plots.circle_density(ax, TURN[0], weights=WEIGHTS),
    "heat_map": lambda ax: plots.heat_map(ax, RNG.normal(size=(4, 5)), x="head", y="layer", label="defect"),
    "lifetimes": lambda ax: plots.lifetimes(ax, TS, TS, np.full(7, np.inf), slope=1.0, intercept=0.0),
    "merge_tree": lambda ax: plots.merge_tree(ax, np.arange(3), np.ones((2, 4)), np.ones((2, 4))),
    "per_head": lambda ax: plots.per_head(ax, TS, RNG.normal(size=(7, 2, 12)), name="shadow"),
    "phase_diagram": lambda ax: plots.phase_diagram(ax, TS, np.arange(4.0), RNG.uniform(size=(4, 7))),
    "phases": lambda ax: plots.phases(ax, TS, [TS + 1], [8.0], marks=[{"t_min": 1.0}], bounds=[TS + 2]),
    "spectrum": lambda ax: plots.spectrum(ax, np.array([1j, 1.0, -1j]), label="V"),
    "sphere": lambda ax: plots.sphere(
        ax, jnp.asarray(BALL[0]), weights=WEIGHTS, spaces=[np.eye(3)[:, :1], np.eye(3)[:, :2]], names=["V", "W"], paths=BALL
    ),
    "staircase": lambda ax: plots.staircase(ax, [[Plateau(0.5, -np.inf, 3.0), Plateau(1.0, 3.0, np.inf)]], [4.0]),
    "timeseries": lambda ax: plots.timeseries(ax, jnp.asarray(TS), RNG.normal(size=(7, 30)), label="many"),
    "work_precision": lambda ax: plots.work_precision(ax, [[10, 100]], [[1e-2, 1e-4]], ["tsit5"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_picture_is_drawn_as_vectors_with_readable_text_and_nothing_global(name, tmp_path):
    before = dict(mpl.rcParams)
    fig, axes = plots.figure()
    assert DRAWN[name](axes[0, 0]) is axes[0, 0]
    for ending in ("svg", "pdf"):
        plots.save(fig, tmp_path / f"a.{ending}")
    svg = (tmp_path / "a.svg").read_text()
    assert "<path" in svg and (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    if axes[0, 0].get_xlabel():
        assert "<text" in svg  # text stays text
    assert dict(mpl.rcParams) == before


def test_layer_maps_have_one_map_per_column():
    fig = plots.layer_maps({name: RNG.normal(size=(3, 2)) for name in "abcd"})
    assert sum(len(ax.get_images()) for ax in fig.axes) == 4


def test_the_density_stands_highest_over_the_heaviest_place():
    _, axes = plots.figure()
    angle = np.array([0.3, 0.31, 2.0])
    plots.circle_density(axes[0, 0], np.stack([np.cos(angle), np.sin(angle)], 1), weights=np.array([0.4, 0.4, 0.2]))
    outline = axes[0, 0].patches[0].get_xy()
    top = outline[np.argmax(np.hypot(*outline.T))]
    assert abs(np.arctan2(top[1], top[0]) - 0.305) < 0.02 and abs(np.hypot(*top) - 1.5) < 1e-6


def test_many_curves_become_their_median_and_band():
    _, axes = plots.figure()
    values = RNG.normal(size=(7, 30))
    plots.timeseries(axes[0, 0], TS, values, label="many")
    (line,) = axes[0, 0].get_lines()
    assert np.array_equal(line.get_ydata(), np.median(values, axis=1)) and len(axes[0, 0].collections) == 1


def test_curves_on_the_circle_break_at_the_cut():
    _, axes = plots.figure()
    turn = np.array([3.0, 3.1, -3.1, -3.0])
    plots.angles(axes[0, 0], np.arange(4), np.stack([np.cos(turn), np.sin(turn)], -1)[:, None])
    assert np.isnan(axes[0, 0].get_lines()[0].get_ydata()).sum() == 1


def test_tokens_of_another_dimension_are_refused():
    _, axes = plots.figure()
    with pytest.raises(ValueError, match=r"`x` must have shape \(n, 3\), got \(5, 4\)"):
        plots.sphere(axes[0, 0], np.ones((5, 4)))


@pytest.mark.parametrize("tokens", [BALL, TURN], ids=["sphere", "circle"])
def test_animation_has_one_picture_per_frame_and_they_differ(tokens, tmp_path):
    path = plots.animate(tokens[:3], tmp_path / "moving.gif", ts=TS[:3], dpi=40)
    with Image.open(path) as moving:
        frames = []
        for k in range(moving.n_frames):
            moving.seek(k)
            frames.append(np.asarray(moving.convert("L")))
    assert len(frames) == 3 and np.any(frames[0] != frames[1]) and np.any(frames[1] != frames[2])


def test_animations_that_cannot_be_written_say_why(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"must end in \.gif or \.mp4"):
        plots.animate(BALL, tmp_path / "a.avi")
    with pytest.raises(ValueError, match=r"`tokens` must have shape"):
        plots.animate(BALL[0], tmp_path / "a.gif")
    monkeypatch.setitem(mpl.rcParams, "animation.ffmpeg_path", "no-such-program")
    with pytest.raises(RuntimeError, match="needs ffmpeg"):
        plots.animate(BALL, tmp_path / "a.mp4")
