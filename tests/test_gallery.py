"""Figures: each meets its acceptance lines, and the lines can be missed."""

from pathlib import Path

import pytest
from test_gallery_more import SMALL

from attnflow import config, gallery
from attnflow.figures import Line, find_configuration
from attnflow.gallery import flat, heads, page, tokens
from attnflow.schema import ConfigError

ROOT = Path(__file__).parents[1]
SLOW = {
    "normalization",
    "alibi",
    "heads",
    "noise",
    "boolean",
    "sphere",
    "late_rate",
    "rotation",
    "repulsion",
    "four_particles",
    "polytope",
    "hyperplanes",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in gallery.DRAWN if n not in SMALL]
)
def test_figure_meets_its_acceptance_lines(name, tmp_path):
    title, rows, lines = gallery.make(name, tmp_path)
    assert title and rows and lines and all(line.good for line in lines), lines
    assert (tmp_path / "figure.svg").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "figure", "changes"),
    [
        ("polytope", flat.polytope, ["solve.t1=2"]),
        ("boolean", flat.boolean, ["solve.t1=0.1"]),
        ("late_rate", tokens.late_rate, ["heads.strengths=[2.0]", "attention.beta=[1.0]"]),
        ("heads", heads.heads, ["heads.strengths=[1.0, 3.0]", "attention.beta=[0.5]"]),
        ("repulsion", tokens.repulsion, ["solve.t1=1", "tokens.n=50"]),
    ],
)
def test_lines_are_missed_where_the_claim_does_not_hold(name, figure, changes):
    _, lines, _ = figure(config.read(find_configuration(name), changes))
    assert not all(line.good for line in lines), lines


def test_every_figure_has_a_configuration_that_reads_and_a_caption():
    for name in gallery.NAMES:
        assert len(gallery.caption(name)) > 20
        assert name == "noise" or gallery.configuration_name(name).exists()
    for name in set(gallery.DRAWN) - {"noise"}:
        config.read(find_configuration(name))
    with pytest.raises(ConfigError, match="no figure `nothing`; known: low_temperature"):
        gallery.make("nothing", Path())


def test_page_shows_every_figure_with_its_numbers(tmp_path):
    gallery.make("spectra", tmp_path / "made" / "spectra")
    lines = [Line("as it should be", 0.5, 0.5, True), Line("not at all", 3.0, 1.0, False)]
    page.write(tmp_path / "docs" / "gallery.md", {"spectra": ("Spectra", lines)}, tmp_path / "made")
    text = (tmp_path / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert (tmp_path / "docs" / "figures" / "spectra.png").stat().st_size > 1000
    assert "| as it should be | 0.5 | 0.5 | ok |" in text and "| not at all | 3 | 1 | **missed** |" in text
    assert "configs/spectra.toml" in text
